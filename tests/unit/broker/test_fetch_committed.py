"""What a fetch stream sends to readers of committed records while transactions are open, and once they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.config import BrokerConfig
from broker.fetch_session import FetchSession
from broker.partition import Partition
from broker.services.log import LogService
from raftlog._core.fetched import Rows, wanted_rows
from raftlog.errors import RaftlogError
from raftlog.format import Attributes
from raftlog.format.aborted import AbortedRanges
from raftlog.format.control import Marker
from raftlog.types import TopicPartition
from raftlog.v1 import common_pb2, log_pb2
from raftlog.wire import Frame
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, FetchWriter, Parts, Requests, image_with
from tests.support.transactional_batches import TransactionalLog

EPOCH = 3
BIG = 1 << 30


@asynccontextmanager
async def session(
    parts: Parts,
    isolation: common_pb2.IsolationLevel.ValueType,
    *,
    max_frame_bytes: int = 1 << 20,
    from_follower: bool = False,
) -> AsyncIterator[tuple[Requests[log_pb2.FetchRequest], FetchWriter]]:
    requests, writer = Requests[log_pb2.FetchRequest](), FetchWriter()
    running = asyncio.create_task(
        FetchSession(parts.registry, parts.disk, max_frame_bytes=max_frame_bytes, max_subscriptions=10).run(
            requests.__aiter__(), writer
        )
    )
    requests.send(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=BIG, isolation_level=isolation)))
    part = log_pb2.FetchPartition(
        subscription_id=1, topic_id=TOPIC_ID, offset=0, leader_epoch=EPOCH, from_follower=from_follower
    )
    requests.send(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[part])))
    try:
        yield requests, writer
        requests.end()
        await asyncio.wait_for(running, 60)
    finally:
        running.cancel()


class Producer:
    """A producer's transactions in partition 0, each in an epoch of its own."""

    def __init__(self, parts: Parts, producer_id: int) -> None:
        self.partition: Partition = parts.registry.find(TOPIC_ID, 0)
        self.producer_id, self.epoch, self.sequence = producer_id, 0, 0

    def send(self, *values: bytes) -> None:
        """Append a batch."""
        batch = batch_of(
            *values,
            attributes=int(Attributes.TRANSACTIONAL),
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=self.sequence,
        )
        self.sequence += len(values)
        self.partition.append(batch, EPOCH, lambda error: None, all_replicas=True)

    def end(self, *, commit: bool) -> None:
        """Append the marker."""
        self.epoch, self.sequence = self.epoch + 1, 0

        def answered(errors: list[RaftlogError | None]) -> None:
            assert errors == [None]

        self.partition.append_markers([Marker(self.producer_id, self.epoch, commit, 1)], EPOCH, answered)


def plain(parts: Parts, *values: bytes) -> None:
    parts.registry.find(TOPIC_ID, 0).append(batch_of(*values), EPOCH, lambda error: None)


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def read(written: list[list[Frame]]) -> list[bytes | None]:
    """Return what a consumer makes of the frames."""
    found: list[bytes | None] = []
    position = 0
    for frame in (frame for message in written for frame in message):
        aborted = AbortedRanges(frame.head.aborted)
        for rows in wanted_rows(TopicPartition("t", 0), frame.records, position, check_crcs=True, aborted=aborted):
            position = rows.header.next_offset if isinstance(rows, Rows) else rows.next_offset
            if isinstance(rows, Rows):
                found += [record.value for record in rows.records()]
    return found


def frames_with_records(writer: FetchWriter) -> list[Frame]:
    return [frame for message in writer.written for frame in message if len(frame.records)]


def test_committed_readers_wait_for_the_marker_and_are_woken_by_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            Parts(tmp_path) as parts,
            session(parts, common_pb2.READ_COMMITTED) as (_, committed),
            session(parts, common_pb2.READ_UNCOMMITTED) as (_, uncommitted),
        ):
            producer = Producer(parts, 7)
            plain(parts, b"before")
            producer.send(b"a", b"b")
            plain(parts, b"behind")
            await settle()
            assert read(committed.written) == [b"before"]
            assert read(uncommitted.written) == [b"before", b"a", b"b", b"behind"]
            last = frames_with_records(committed)[-1].head
            assert (last.high_watermark, last.last_stable_offset) in {(1, 1), (4, 1)}
            producer.end(commit=True)
            await settle()
            assert read(committed.written) == read(uncommitted.written) == [b"before", b"a", b"b", b"behind"]
            assert not any(frame.head.aborted for frame in frames_with_records(committed))

    asyncio.run(scenario())


def test_a_marker_that_is_not_committed_yet_wakes_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts, common_pb2.READ_COMMITTED) as (_, writer):
            producer = Producer(parts, 7)
            producer.send(b"a")
            await settle()
            parts.disk.held = True
            producer.end(commit=True)
            await settle()
            assert read(writer.written) == []
            parts.disk.release()
            await settle()
            assert read(writer.written) == [b"a"]

    asyncio.run(scenario())


def test_aborted_transactions_are_named_to_committed_readers_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            Parts(tmp_path) as parts,
            session(parts, common_pb2.READ_COMMITTED) as (_, committed),
            session(parts, common_pb2.READ_UNCOMMITTED) as (_, uncommitted),
        ):
            one, two = Producer(parts, 7), Producer(parts, 8)
            one.send(b"lost")
            two.send(b"kept")
            one.send(b"lost as well")
            plain(parts, b"plain")
            one.end(commit=False)
            two.end(commit=True)
            one.send(b"next")
            one.end(commit=True)
            await settle()
            assert read(committed.written) == [b"kept", b"plain", b"next"]
            assert read(uncommitted.written) == [b"lost", b"kept", b"lost as well", b"plain", b"next"]
            named = [a for frame in frames_with_records(committed) for a in frame.head.aborted]
            assert {(a.producer_id, a.first_offset, a.last_offset) for a in named} == {(7, 0, 4)}
            assert not [a for frame in frames_with_records(uncommitted) for a in frame.head.aborted]

    asyncio.run(scenario())


@pytest.mark.parametrize("max_frame_bytes", [4096, 1 << 20])
def test_each_frame_names_what_it_takes_to_read_it_alone(tmp_path: Path, max_frame_bytes: int) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            one, two = Producer(parts, 7), Producer(parts, 8)
            expected: list[bytes] = []
            for number in range(12):
                for part in range(3):
                    one.send(b"lost" * 300)
                    two.send(b"%d %d" % (number, part) + b"." * 900)
                one.end(commit=False)
                two.end(commit=number % 3 != 0)
                if number % 3:
                    expected += [b"%d %d" % (number, part) + b"." * 900 for part in range(3)]
            await settle()
            async with session(parts, common_pb2.READ_COMMITTED, max_frame_bytes=max_frame_bytes) as (_, writer):
                await settle()
                assert read(writer.written) == expected
                if max_frame_bytes == 4096:
                    assert len(frames_with_records(writer)) > 10
                    assert all(len(frame.head.aborted) <= 6 for frame in frames_with_records(writer))

    asyncio.run(scenario())


def test_a_reader_behind_an_open_transaction_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at when the high watermark moves, and does not spin in between."""

    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts, common_pb2.READ_COMMITTED) as (_, writer):
            producer = Producer(parts, 7)
            producer.send(b"open")
            await settle()
            reads = 0
            original = Partition.read

            def counted(self: Partition, *args: Any, **kwargs: Any) -> Any:
                nonlocal reads
                reads += 1
                return original(self, *args, **kwargs)

            monkeypatch.setattr(Partition, "read", counted)
            for _ in range(10):
                await settle()
            assert reads == 0
            messages = len(writer.written)
            for number in range(5):
                plain(parts, b"%d" % number)
                await settle()
            assert reads <= 5
            assert len(writer.written) == messages
            producer.end(commit=False)
            await settle()
            assert read(writer.written) == [b"%d" % number for number in range(5)]

    asyncio.run(scenario())


def test_a_follower_knows_what_is_decided_from_what_it_has_appended(tmp_path: Path) -> None:
    """KIP-392: with the same bound as the leader's, as far as it has heard of the high watermark."""

    async def scenario() -> None:
        parts = Parts(tmp_path)
        parts.image = image_with(1, offset=1, leader=2, replicas=(1, 2))
        log = TransactionalLog()
        log.produce(1)
        log.produce(2, 7, transactional=True)
        log.produce(1, 8, transactional=True)
        log.end({7: False})
        log.end({8: True})
        async with parts, session(parts, common_pb2.READ_COMMITTED, from_follower=True) as (_, writer):
            following = parts.registry.find(TOPIC_ID, 0).following
            assert following is not None
            following.append_replicated(b"".join(batch for _, batch in log.batches), EPOCH, lambda held: None)
            await settle()
            for high_watermark, expected in ((3, [b"0"]), (5, [b"0"]), (6, [b"0", b"3"])):
                following.take_marks(high_watermark, 0, EPOCH)
                await settle()
                assert read(writer.written) == expected
            assert [frame.head.last_stable_offset for frame in frames_with_records(writer)] == [1, 3, 6]

    asyncio.run(scenario())


@pytest.mark.parametrize(("isolation", "latest"), [(common_pb2.READ_COMMITTED, 1), (common_pb2.READ_UNCOMMITTED, 4)])
def test_offsets_are_looked_up_below_what_the_reader_may_get(
    tmp_path: Path, isolation: common_pb2.IsolationLevel.ValueType, latest: int
) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            plain(parts, b"before")
            producer = Producer(parts, 7)
            producer.send(b"a", b"b")
            plain(parts, b"behind")
            await settle()
            service = LogService(
                parts.registry, BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data"}), parts.disk
            )

            async def find(**wanted: int) -> int:
                part = log_pb2.ListOffsetsPartition(topic_id=TOPIC_ID, leader_epoch=EPOCH, **wanted)
                request = log_pb2.ListOffsetsRequest(partitions=[part], isolation_level=isolation)
                response = await service.ListOffsets(request, None)  # type: ignore[arg-type] # not looked at
                assert not response.results[0].error.code
                return response.results[0].offset

            assert await find(timestamp_ms=-1) == latest
            assert await find(timestamp_ms=-2) == 0
            assert await find(at_offset=1) == (-1 if latest == 1 else 1)
            assert await find(timestamp_ms=1_001) == -1
            assert await find(timestamp_ms=1_000) == 0
            producer.end(commit=False)
            await settle()
            assert await find(timestamp_ms=-1) == 5
            assert await find(timestamp_ms=-3) == 0, "a marker is no record"
            assert await find(at_offset=4) == -1

    asyncio.run(scenario())
