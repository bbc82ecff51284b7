"""What is counted of a produce stream, also when the client leaves as soon as it has its answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.produce_session import ProduceSession
from raftlog import wire
from raftlog.v1 import log_pb2
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, Requests
from tests.support.raw_client import RawClient


class LeavingClient:
    """Takes an answer, and is gone before the server hears that it went out."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    async def write(self, message: log_pb2.ProduceResponse) -> None:
        self.reached.set()
        await asyncio.Event().wait()


def test_a_request_counts_although_its_client_left_with_the_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            counters = parts.registry.counters
            requests, client = Requests[wire.Produce](), LeavingClient()
            session = ProduceSession(parts.registry, parts.disk, max_in_flight=5, default_timeout_ms=30_000)
            running = asyncio.create_task(session.run(requests.__aiter__(), client))
            requests.send(RawClient.request(1, [(TOPIC_ID, 0, 3, 1, batch_of(b"x"))], log_pb2.ALL))
            async with asyncio.timeout(60):
                await client.reached.wait()
            assert counters.produces_unanswered == 1
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert counters.requests["Produce"].outcomes == {"NONE": 1}
            assert counters.requests["Produce"].stages["total"].cumulative()[-1] == ("+Inf", 1)
            assert counters.produces_unanswered == 0

    asyncio.run(scenario())
