"""Messages of many batches: the event loop serves others in between, and threads check what inflates far."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.partition import produce_session
from broker.partition.produce_session import BATCH_COST_BYTES, TURN_BYTES, ProduceSession
from broker.quotas.heavy_work import HeavyWork
from broker.turns import SharedTurns
from raftlog.errors import CorruptRecordError, InvalidRequestError
from raftlog.format import Buffer, Codec, wire
from raftlog.v1 import common_pb2, log_pb2
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, HeldDisk, Parts, ProduceWriter, Requests
from tests.support.raw_client import RawClient
from tests.support.turns import counted_turns

IN_A_TURN = TURN_BYTES // BATCH_COST_BYTES
MIB = 1 << 20


class CountingDisk(HeldDisk):
    """Counts what it is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Take a piece of work."""
        self.jobs += 1
        return super().submit(fn, *args, **kwargs)


def message(number: int, batches: list[bytes], acks: int = log_pb2.ALL) -> wire.Produce:
    parts = [(TOPIC_ID, 0, 3, number, batch) for batch in batches]
    return RawClient.request(number, parts, acks)


class Session:
    """One stream, and its end."""

    def __init__(
        self, parts: Parts, *, turns: SharedTurns | None = None, disk: HeldDisk | None = None, many: bool = False
    ) -> None:
        self.requests, self.writer = Requests[wire.Produce | wire.Decoding](), ProduceWriter()
        turns, work = turns or SharedTurns(TURN_BYTES), HeavyWork(disk or HeldDisk())
        session = ProduceSession(parts.registry, turns, work, max_in_flight=5, default_timeout_ms=30_000, many=many)
        self.running = asyncio.create_task(session.run(aiter(self.requests), self.writer))

    async def answer_to(self, request: wire.Produce) -> log_pb2.ProduceResponse:
        """Send a request, and return its answer."""
        count = len(self.writer.written)
        self.requests.send(request)
        return (await self.writer.wait_for(count + 1))[count]

    async def end(self) -> None:
        """End the stream."""
        self.requests.end()
        await asyncio.wait_for(self.running, 60)


@pytest.mark.parametrize("acks", [log_pb2.ALL, log_pb2.NO_ACK])
async def test_a_message_of_many_batches_leaves_others_their_turns(acks: int, tmp_path: Path) -> None:
    """9,000 of them held the loop until the broker's lease had ended."""
    batches = [batch_of(b"%d" % number) for number in range(20 * IN_A_TURN)]
    async with Parts(tmp_path) as parts:
        session = Session(parts)
        async with counted_turns() as turns:
            session.requests.send(message(1, batches, acks))
            answer = await session.answer_to(message(2, [batch_of(b"last")]))
            assert turns.count >= 20
        if acks == log_pb2.ALL:
            assert [result.base_offset for result in answer.results] == list(range(len(batches)))
        assert parts.registry.find(TOPIC_ID, 0).log_end_offset >= len(batches)
        await session.end()


async def test_many_requests_in_a_message_leave_others_their_turns_too(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        session = Session(parts, many=True)
        first, *more = (message(number, [batch_of(b"%d" % number)]) for number in range(10 * IN_A_TURN))
        async with counted_turns() as turns:
            await session.answer_to(first._replace(more=more))
            while sum(1 + len(answer.more) for answer in session.writer.written) < 10 * IN_A_TURN:
                await session.writer.wait_for(len(session.writer.written) + 1)
            assert turns.count >= 9
        await session.end()


async def test_a_message_of_many_batches_is_decoded_in_turns_too(tmp_path: Path) -> None:
    """Else 64 streams with 20 KB each would hold the loop for seconds, before a single batch is looked at."""
    batches = [batch_of(b"%d" % number) for number in range(1_000)]
    data = wire.encode_produce(message(1, batches))
    async with Parts(tmp_path) as parts:
        shared = SharedTurns(TURN_BYTES)
        session = Session(parts, turns=shared)
        begun = wire.begin_produce(data)
        assert not isinstance(begun, wire.Produce)
        async with counted_turns() as turns:
            shared.take(TURN_BYTES)
            session.requests.send(begun)
            before = turns.count
            (answer,) = await session.writer.wait_for(1)
            assert turns.count - before >= 1_000 // IN_A_TURN + 2
        assert [result.base_offset for result in answer.results] == list(range(1_000))
        await session.end()


async def test_a_message_that_is_broken_at_its_end_appends_nothing(tmp_path: Path) -> None:
    data = wire.encode_produce(message(1, [batch_of(b"%d" % number) for number in range(1_000)]))
    async with Parts(tmp_path) as parts:
        session = Session(parts)
        session.requests.send(wire.begin_produce(data[:-1]))
        with pytest.raises(InvalidRequestError, match="not protobuf"):
            await asyncio.wait_for(session.running, 60)
        assert parts.registry.find(TOPIC_ID, 0).log_end_offset == 0


async def test_some_dozens_of_batches_are_appended_in_one_turn(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        parts.disk.held = True
        session = Session(parts)
        session.requests.send(message(1, [batch_of(b"%d" % number) for number in range(IN_A_TURN)]))
        partition = parts.registry.find(TOPIC_ID, 0)
        async with asyncio.timeout(60):
            while not partition.log_end_offset:  # noqa: ASYNC110 # the turn in which it changes is the point
                await asyncio.sleep(0)
        assert partition.log_end_offset == IN_A_TURN
        parts.disk.release()
        await session.end()


async def test_streams_share_the_turns(tmp_path: Path) -> None:
    """Else a user with fifty streams would hold the loop for as long as with one large message."""
    async with Parts(tmp_path) as parts:
        shared = SharedTurns(TURN_BYTES)
        sessions = [Session(parts, turns=shared) for _ in range(10)]
        partition = parts.registry.find(TOPIC_ID, 0)
        for session in sessions:
            session.requests.send(message(1, [batch_of(b"%d" % number) for number in range(IN_A_TURN)]))
        end = most = 0
        async with asyncio.timeout(60):
            while end < 10 * IN_A_TURN:
                await asyncio.sleep(0)
                most, end = max(most, partition.log_end_offset - end), partition.log_end_offset
        assert most <= 2 * IN_A_TURN
        for session in sessions:
            await session.end()


async def test_what_a_message_inflates_beyond_some_mib_is_checked_elsewhere(tmp_path: Path) -> None:
    """Each of the batches is small enough for the event loop, all of them together are not."""
    batch = batch_of(b"\0" * (MIB - 2_000), codec=Codec.ZSTD)
    batches = [batch] * 3 + [batch_of(b"x")] + [batch] * 9
    async with Parts(tmp_path) as parts:
        disk = CountingDisk()
        session = Session(parts, disk=disk)
        answer = await session.answer_to(message(1, batches))
        assert [result.base_offset for result in answer.results] == list(range(len(batches)))
        assert disk.jobs == 2, "nine batches, of which a job checks five"
        await session.answer_to(message(2, batches[:4]))
        assert disk.jobs == 2, "each message may inflate some on the event loop"
        await session.end()


async def test_a_batch_that_is_refused_elsewhere_refuses_no_other(tmp_path: Path) -> None:
    batch = batch_of(b"\0" * (MIB - 2_000), codec=Codec.ZSTD)
    broken = batch[:-1] + bytes([batch[-1] ^ 1])
    async with Parts(tmp_path) as parts:
        session = Session(parts)
        request = message(1, [batch] * 4 + [broken, batch])
        for number, part in enumerate(request.parts):
            part.head.chain = 1 if number < 5 else 2
        answer = await session.answer_to(request)
        assert [result.error.code for result in answer.results] == [0] * 4 + [common_pb2.CORRUPT_MESSAGE, 0]
        assert answer.results[5].base_offset == 4
        await session.end()


def test_a_batch_that_is_refused_in_a_thread_keeps_nothing_of_what_it_inflated_to() -> None:
    """Its error held the frames in which it was raised, and so 64 MiB, until garbage was collected."""

    class Inflated:
        pass

    held: list[weakref.ref[Inflated]] = []

    def fail(records: Buffer) -> None:
        inflated = Inflated()
        held.append(weakref.ref(inflated))
        raise CorruptRecordError("x")

    refusing: Any = SimpleNamespace(check=fail)
    gc.disable()
    try:
        results = produce_session._check([(0, refusing, b""), (1, refusing, b"")])
        assert list(map(type, results.values())) == [CorruptRecordError] * 2
        assert [reference() for reference in held] == [None] * 2
    finally:
        gc.enable()


def test_the_limits_fit_each_other() -> None:
    assert produce_session.CHECK_ON_LOOP_BYTES <= TURN_BYTES
    assert IN_A_TURN >= 48, "some dozens of batches cost no turn"
