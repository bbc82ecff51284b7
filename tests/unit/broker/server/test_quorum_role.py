"""A waiting node logs what it waits for, and ends as soon as that can never come."""

from __future__ import annotations

import asyncio
import logging

import pytest

from broker.server import quorum_role
from broker.server.quorum_role import or_failure
from raftlog.errors import StorageError
from tests.support import virtual_time
from tests.support.logged import lines_of


def test_waiting_is_told_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quorum_role, "FIRST_WORD_S", 0.01)
    monkeypatch.setattr(quorum_role, "WORD_EVERY_S", 0.01)

    async def scenario() -> None:
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done = asyncio.Event()
        missing = ["controller 2", "controller 3"]

        def name_one() -> str:
            if len(missing) == 1:
                done.set()
            return missing.pop(0)

        async def work() -> int:
            await done.wait()
            return 7

        assert await or_failure(work(), failure, name_one, "the quorum") == 7

    with caplog.at_level(logging.INFO):
        virtual_time.run(scenario())
    assert lines_of(caplog, "broker") == [
        "waiting for the quorum: controller 2",
        "waiting for the quorum: controller 3",
    ]


def test_what_is_quick_is_done_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await or_failure(asyncio.sleep(0), failure, str, "the quorum")

    with caplog.at_level(logging.INFO):
        virtual_time.run(scenario())
    assert not lines_of(caplog, "broker")


def test_a_failure_ends_the_wait_and_the_work() -> None:
    async def scenario() -> None:
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        cancelled = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        waiting = asyncio.ensure_future(or_failure(work(), failure, str, "it"))
        await asyncio.sleep(0)
        failure.set_exception(StorageError("the disk"))
        with pytest.raises(StorageError, match="the disk"):
            await waiting
        assert cancelled.is_set()

    virtual_time.run(scenario())


def test_where_nothing_is_missing_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quorum_role, "FIRST_WORD_S", 0.01)

    async def scenario() -> None:
        failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await or_failure(asyncio.sleep(0.05), failure, str, "the quorum")

    with caplog.at_level(logging.INFO):
        virtual_time.run(scenario())
    assert lines_of(caplog, "broker") == ["waiting for the quorum"]
