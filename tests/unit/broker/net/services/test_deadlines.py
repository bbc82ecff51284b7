"""A caller hears in time why nothing happens."""

from __future__ import annotations

import asyncio

import pytest

from broker.net.services import calls
from broker.net.services.calls import in_time
from raftlog.errors import RequestTimedOut, StorageError
from tests.support import virtual_time


async def _never() -> int:
    await asyncio.Event().wait()
    return 0


async def _seven() -> int:
    return 7


async def _refused() -> int:
    raise StorageError("the disk")


def test_what_is_done_in_time_is_returned_or_raised_as_it_is() -> None:
    assert virtual_time.run(in_time(_seven(), 1.0, str)) == 7
    with pytest.raises(StorageError, match="the disk"):
        virtual_time.run(in_time(_refused(), None, str))


def test_the_answer_leaves_before_the_deadline_and_names_what_is_missing() -> None:
    async def scenario(missing: str) -> float:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        with pytest.raises(RequestTimedOut, match=missing or "did not answer in time"):
            await in_time(_never(), 0.5, lambda: missing)
        return loop.time() - started_s

    assert virtual_time.run(scenario("controller 2 at 10.0.0.2:9093")) < 0.49
    assert virtual_time.run(scenario("")) < 0.49


def test_a_quorum_that_stays_without_a_leader_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LEADERLESS_S", 0.05)
    monkeypatch.setattr(calls, "LOOK_S", 0.01)
    with pytest.raises(RequestTimedOut, match=r"has no leader.* waiting for controller 2"):
        virtual_time.run(in_time(_never(), None, lambda: "controller 2"))


def test_an_election_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "LEADERLESS_S", 0.05)
    monkeypatch.setattr(calls, "LOOK_S", 0.02)
    looks = 0

    async def scenario() -> int:
        done = asyncio.Event()

        def waiting_for() -> str:
            nonlocal looks
            looks += 1
            if looks == 10:
                done.set()
            return "an election" if looks % 2 else ""

        async def work() -> int:
            await done.wait()
            return 7

        return await in_time(work(), None, waiting_for)

    assert virtual_time.run(scenario()) == 7


def test_what_is_given_up_is_cancelled() -> None:
    async def scenario() -> None:
        cancelled = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        with pytest.raises(RequestTimedOut):
            await in_time(work(), 0.02, str)
        assert cancelled.is_set()

    virtual_time.run(scenario())
