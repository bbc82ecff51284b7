"""Who asks for a topic afresh is told what holds after he has asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from raftlog._client.connections import Connections
from raftlog._client.inquiry import NobodyAnswers
from raftlog._client.metadata import MetadataCache
from raftlog._client.options import AdminOptions
from raftlog.errors import BrokerUnavailable
from raftlog.v1 import metadata_pb2

OLD, NEW = b"o" * 16, b"n" * 16


def answer(topic_id: bytes, metadata_offset: int) -> metadata_pb2.MetadataResponse:
    response = metadata_pb2.MetadataResponse(cluster_id="c", metadata_offset=metadata_offset)
    response.topics.add(name="t", topic_id=topic_id).partitions.add()
    return response


class Asked:
    """A cache whose questions the test answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.questions: asyncio.Queue[asyncio.Future[metadata_pb2.MetadataResponse]] = asyncio.Queue()
        pauses = AdminOptions.make({}, {"retry_backoff_ms": 1, "retry_backoff_max_ms": 2}).pauses
        self.cache = MetadataCache(
            Connections(), ["127.0.0.1:1"], max_age_ms=60_000, request_timeout_ms=30_000, pauses=pauses
        )
        monkeypatch.setattr(self.cache._inquiry, "ask", self._ask)

    async def _ask(self, *arguments: Any, **options: Any) -> metadata_pb2.MetadataResponse:
        question: asyncio.Future[metadata_pb2.MetadataResponse] = asyncio.get_running_loop().create_future()
        self.questions.put_nowait(question)
        return await question


def run(monkeypatch: pytest.MonkeyPatch, scenario: Callable[[Asked], Any]) -> None:
    async def main() -> None:
        asked = Asked(monkeypatch)
        try:
            async with asyncio.timeout(60):
                first = asyncio.create_task(asked.cache.topic("t", 60_000))
                (await asked.questions.get()).set_result(answer(OLD, 5))
                assert (await first).topic_id == OLD
                await scenario(asked)
        finally:
            await asked.cache.close()
            await asked.cache._connections.close()

    asyncio.run(main())


def test_an_answer_to_an_earlier_question_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(asked: Asked) -> None:
        before = asyncio.create_task(asked.cache.refresh())
        late = await asked.questions.get()
        fresh = asyncio.create_task(asked.cache.topic("t", 60_000, fresh=True))
        await asyncio.sleep(0.05)
        late.set_result(answer(OLD, 5))
        await before
        (await asked.questions.get()).set_result(answer(NEW, 6))
        assert (await fresh).topic_id == NEW

    run(monkeypatch, scenario)


def test_what_was_known_is_no_answer_when_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(asked: Asked) -> None:
        fresh = asyncio.create_task(asked.cache.topic("t", 60_000, fresh=True))
        (await asked.questions.get()).set_exception(NobodyAnswers(["127.0.0.1:1: refused"]))
        (await asked.questions.get()).set_result(answer(NEW, 6))
        assert (await fresh).topic_id == NEW
        fresh = asyncio.create_task(asked.cache.topic("t", 1, fresh=True))
        (await asked.questions.get()).set_exception(NobodyAnswers(["127.0.0.1:1: refused"]))
        while not fresh.done():
            await asyncio.sleep(0.01)
            while not asked.questions.empty():
                asked.questions.get_nowait().set_exception(NobodyAnswers(["127.0.0.1:1: refused"]))
        assert isinstance(fresh.exception(), BrokerUnavailable)

    run(monkeypatch, scenario)


def test_an_outage_is_told_once_and_so_is_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("raftlog._client.metadata._TOLD_AFTER_S", 0.1)

    async def scenario(asked: Asked) -> None:
        async def fail_until_told(outages: int) -> None:
            more = 5
            while more:
                (await asked.questions.get()).set_exception(NobodyAnswers(["127.0.0.1:1: it refused the connection"]))
                more -= sum("no broker answers" in text for text in told()) >= outages

        asked.cache.request_refresh()
        await fail_until_told(1)
        (await asked.questions.get()).set_result(answer(OLD, 6))
        asked.cache.request_refresh()
        await fail_until_told(2)

    def told() -> list[str]:
        mine = threading.get_ident()  # other clients of this process have a thread of their own
        return [each.getMessage() for each in caplog.records if (each.levelname, each.thread) == ("WARNING", mine)]

    run(monkeypatch, scenario)
    assert [text.partition(" at ")[0] for text in told()] == [
        "no broker answers",
        "brokers answer again",
        "no broker answers",
    ]
    assert "127.0.0.1:1: it refused the connection); asking on, for " in told()[0]
