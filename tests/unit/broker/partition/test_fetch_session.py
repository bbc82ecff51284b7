"""A fetch stream pushes what is committed, within the credit; also near a follower and with open transactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from broker.config.config import BrokerConfig
from broker.log.partition_log import PartitionLog
from broker.net.services.log import EARLIEST, LATEST, MAX_TIMESTAMP, LogService
from broker.partition.fetch_session import FetchSession
from broker.partition.partition import Partition
from broker.quotas.disk_reads import DiskReads
from broker.quotas.heavy_work import HeavyWork
from raftlog._core.positions import Rows, wanted_rows
from raftlog.errors import InvalidRequestError, OffsetOutOfRange, RaftlogError, UnknownTopicId, to_wire
from raftlog.format import Attributes, decode_batch, iter_headers
from raftlog.format.aborted import AbortedRanges
from raftlog.format.control import Marker
from raftlog.format.wire import Frame
from raftlog.types import TopicPartition
from raftlog.v1 import common_pb2, log_pb2
from raftmeta.image import MetadataImage
from replication.ports import Accepted, Replica
from tests.support.batches import batch_of
from tests.support.broker_parts import (
    TOPIC_ID,
    FetchWriter,
    Parts,
    Requests,
    image_with,
    partition_records,
    records_of,
    removal,
)
from tests.support.replica_link import settle
from tests.support.transactional_batches import TransactionalLog

BIG = 1 << 30


@asynccontextmanager
async def session(
    parts: Parts, *, credit: int = BIG, max_frame_bytes: int = 1 << 20
) -> AsyncIterator[tuple[Requests[log_pb2.FetchRequest], FetchWriter]]:
    requests, writer = Requests[log_pb2.FetchRequest](), FetchWriter()
    running = asyncio.create_task(
        FetchSession(parts.registry, DiskReads(parts.disk), max_frame_bytes=max_frame_bytes, max_subscriptions=10).run(
            requests.__aiter__(), writer
        )
    )
    requests.send(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=credit)))
    try:
        yield requests, writer
        requests.end()
        await writer.resume()
        await asyncio.wait_for(running, 60)
    finally:
        running.cancel()


def subscribe(subscription_id: int, offset: int = 0, *, partition: int = 0, epoch: int = 3) -> log_pb2.FetchRequest:
    part = log_pb2.FetchPartition(
        subscription_id=subscription_id, topic_id=TOPIC_ID, partition=partition, offset=offset, leader_epoch=epoch
    )
    return log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[part]))


def append(parts: Parts, *values: bytes, partition: int = 0) -> None:
    parts.registry.find(TOPIC_ID, partition).append(batch_of(*values), 3, lambda error: None)


def values_of(records: bytes) -> list[bytes]:
    return [
        value
        for position, _ in iter_headers(records)
        for value in decode_batch(records, position).columns.column("value").to_pylist()
    ]


async def test_what_is_there_comes_first_then_what_appears(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
        append(parts, b"a", b"b")
        await settle()
        requests.send(subscribe(1))
        await writer.wait_for(1)
        append(parts, b"c")
        frames = await writer.wait_for(2)
        assert [values_of(records) for _, records in records_of(frames)] == [[b"a", b"b"], [b"c"]]
        assert frames[1][0].head.high_watermark == 3


async def test_an_empty_partition_tells_its_marks_once(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
        requests.send(subscribe(4))
        frames = await writer.wait_for(1)
        assert (frames[0][0].head.subscription_id, frames[0][0].head.high_watermark) == (4, 0)
        await settle()
        assert len(writer.written) == 1


async def test_nothing_above_the_high_watermark_is_served(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
        append(parts, b"durable")
        await settle()
        parts.disk.held = True
        append(parts, b"not yet")
        requests.send(subscribe(1))
        await settle()
        assert [values_of(records) for _, records in records_of(writer.written)] == [[b"durable"]]
        parts.disk.release()
        frames = await writer.wait_for(2)
        assert [values_of(records) for _, records in records_of(frames)] == [[b"durable"], [b"not yet"]]


async def test_frames_stop_when_the_credit_is_used_up(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, session(parts, credit=1, max_frame_bytes=4096) as (requests, writer):
        for _ in range(5):
            append(parts, b"x" * 3000)
        await settle()
        requests.send(subscribe(1))
        await settle()
        assert len(records_of(writer.written)) == 1
        for granted in range(2, 6):
            requests.send(log_pb2.FetchRequest(credit=log_pb2.GrantCredit(bytes=4096)))
            await settle()
            assert len(records_of(writer.written)) <= granted
        requests.send(log_pb2.FetchRequest(credit=log_pb2.GrantCredit(bytes=BIG)))
        await writer.wait_for(5)
        assert sum(len(values_of(records)) for _, records in records_of(writer.written)) == 5


async def test_a_client_that_does_not_read_costs_one_message(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, session(parts, max_frame_bytes=4096) as (requests, writer):
        for _ in range(50):
            append(parts, b"x" * 3000)
        await settle()
        writer.stalled = True
        requests.send(subscribe(1))
        await settle()
        assert len(writer.written) == 1
        assert sum(len(records) for _, records in records_of(writer.written)) < 8192


async def test_partitions_take_turns(tmp_path: Path) -> None:
    async with Parts(tmp_path, partitions=2) as parts, session(parts, max_frame_bytes=4096) as (requests, writer):
        for _ in range(6):
            append(parts, b"0" * 3000, partition=0)
            append(parts, b"1" * 3000, partition=1)
        await settle()
        requests.send(subscribe(1, partition=0))
        requests.send(subscribe(2, partition=1))
        while len(records_of(writer.written)) < 12:
            await writer.wait_for(len(writer.written) + 1)
        order = [number for number, _ in records_of(writer.written)]
        assert sorted(order[2:8]) == [1, 1, 1, 2, 2, 2]


async def test_an_unsubscribed_or_ended_session_leaves_no_waiter(tmp_path: Path) -> None:
    async with Parts(tmp_path, partitions=2) as parts:
        partitions = [parts.registry.find(TOPIC_ID, number) for number in range(2)]
        async with session(parts) as (requests, writer):
            requests.send(subscribe(1))
            requests.send(subscribe(2, partition=1))
            await writer.wait_for(1)
            await settle()
            assert [partition.waiting for partition in partitions] == [1, 1]
            requests.send(log_pb2.FetchRequest(unsubscribe=log_pb2.Unsubscribe(subscription_ids=[1])))
            await settle()
            assert [partition.waiting for partition in partitions] == [0, 1]
        assert [partition.waiting for partition in partitions] == [0, 0]


async def test_a_partition_is_subscribed_once_until_it_is_unsubscribed(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
        requests.send(subscribe(1))
        requests.send(subscribe(2))
        await settle()
        heads = {f.head.subscription_id: f.head for message in writer.written for f in message}
        assert heads[2].error.code == common_pb2.INVALID_REQUEST
        assert parts.registry.find(TOPIC_ID, 0).waiting == 1
        requests.send(log_pb2.FetchRequest(unsubscribe=log_pb2.Unsubscribe(subscription_ids=[1])))
        requests.send(subscribe(3))
        append(parts, b"a")
        await settle()
        frames = [frame for message in writer.written for frame in message if frame.records]
        assert [frame.head.subscription_id for frame in frames] == [3]


async def test_a_deleted_topic_ends_the_subscription_with_a_reason(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
        requests.send(subscribe(1))
        await writer.wait_for(1)
        await settle()
        parts.registry.on_metadata(type(parts.image)(offset=2), [removal()])
        frames = await writer.wait_for(2)
        assert frames[1][0].head.error.code == common_pb2.UNKNOWN_TOPIC_ID


async def test_a_stale_leader_epoch_and_too_many_subscriptions_are_refused_each_by_itself(tmp_path: Path) -> None:
    async with Parts(tmp_path, partitions=13) as parts, session(parts) as (requests, writer):
        requests.send(subscribe(1, epoch=2))
        for number in range(2, 13):
            requests.send(subscribe(number, partition=number))
        await settle()
        heads = {f.head.subscription_id: f.head for message in writer.written for f in message}
        assert heads[1].error.code == common_pb2.FENCED_LEADER_EPOCH
        assert heads[12].error.code == common_pb2.BROKER_OVERLOADED
        assert not any(heads[number].HasField("error") for number in range(2, 12))


async def test_a_subscription_id_is_never_used_twice(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        with pytest.raises(InvalidRequestError, match="only grow"):
            async with session(parts) as (requests, _):
                requests.send(subscribe(2))
                requests.send(subscribe(2))


async def test_waiting_on_a_partition_that_has_just_closed_wakes_at_once(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        partition = parts.registry.find(TOPIC_ID, 0)
        partition.close(UnknownTopicId("deleted"))
        woken: list[bool] = []
        partition.wait(lambda: woken.append(True))
        assert woken == [True]
        assert partition.waiting == 0


async def test_nothing_is_read_for_anybody_without_a_lease(tmp_path: Path) -> None:
    async with Parts(tmp_path, partitions=2) as parts, session(parts) as (requests, writer):
        append(parts, b"a")
        append(parts, b"b", partition=1)
        await settle()
        parts.lease.end()
        requests.send(subscribe(1))
        requests.send(subscribe(2, partition=1))
        await settle()
        assert writer.written == []
        moved = image_with(2, offset=2, leader=2, leader_epoch=4, replicas=(1, 2))
        stayed, gone = image_with(2, offset=2).topics[TOPIC_ID].partitions[0], moved.topics[TOPIC_ID].partitions[1]
        topic = replace(moved.topics[TOPIC_ID], partitions=(stayed, gone))
        moved = replace(moved, topics={TOPIC_ID: topic})
        parts.registry.on_metadata(moved, partition_records(moved))
        (refused,) = (await writer.wait_for(1))[0]
        assert refused.head.subscription_id == 2
        assert refused.head.error.code == common_pb2.NOT_LEADER_OR_FOLLOWER
        assert refused.head.error.leader.port == 9092
        parts.lease.renew()
        frames = await writer.wait_for(2)
        assert [values_of(records) for _, records in records_of(frames)] == [[b"a"]]
        assert not parts.lease.waiting


async def test_what_was_read_before_a_pause_leaves_with_the_next_lease_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
        append(parts, b"a")
        await settle()
        partition = parts.registry.find(TOPIC_ID, 0)
        read = partition.read

        def read_then_pause(*arguments: Any, **options: Any) -> Any:
            result = read(*arguments, **options)
            parts.lease.end()
            return result

        monkeypatch.setattr(partition, "read", read_then_pause)
        requests.send(subscribe(1))
        await settle()
        assert writer.written == []
        parts.lease.renew()
        frames = await writer.wait_for(1)
        assert [values_of(records) for _, records in records_of(frames)] == [[b"a"]]


async def test_a_client_may_leave_while_its_frames_wait_for_a_lease(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        async with session(parts) as (requests, _):
            parts.lease.end()
            requests.send(subscribe(1))
            await settle()
        assert not parts.lease.waiting


# Damage


def flip(parts: Parts, at: int) -> None:
    """Flip a bit in the only segment of the partition."""
    (path,) = Path(parts.registry.find(TOPIC_ID, 0).log.directory).glob("*.log")
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def damage_told(parts: Parts) -> list[str]:
    """Return the calls of the registry from now on."""
    told: list[str] = []
    parts.registry._suspicions._on_damaged = lambda log, error: told.append(str(error))
    return told


async def test_a_client_that_complains_has_the_log_looked_at(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
        append(parts, b"a")
        append(parts, b"b")
        await settle()
        told = damage_told(parts)
        complaint = subscribe(1)
        complaint.subscribe.partitions[0].damaged_offset = 1
        requests.send(complaint)
        await writer.wait_for(1)
        await settle()
        assert told == [], "an undamaged batch must not be reported as damaged"
        flip(parts, -9)
        parts.registry._suspicions._checked_logs.clear()
        parts.registry._suspicions._checked_offsets.clear()
        complaint.subscribe.partitions[0].subscription_id = 2
        requests.send(log_pb2.FetchRequest(unsubscribe=log_pb2.Unsubscribe(subscription_ids=[1])))
        requests.send(complaint)
        await writer.wait_for(2)
        await settle()
        assert len(told) == 1
        assert "offsets 1 to 1" in told[0]


async def test_a_header_that_cannot_be_read_is_refused_and_looked_at_without_a_complaint(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
        append(parts, b"a")
        await settle()
        told = damage_told(parts)
        flip(parts, 6)
        requests.send(subscribe(1))
        frames = await writer.wait_for(1)
        assert frames[0][0].head.error.code == common_pb2.CORRUPT_MESSAGE
        await settle()
        assert len(told) == 1


EPOCH = 3


@asynccontextmanager
async def stream_of(
    parts: Parts,
    isolation: common_pb2.IsolationLevel.ValueType,
    *,
    max_frame_bytes: int = 1 << 20,
    from_follower: bool = False,
    disk_reads: DiskReads | None = None,
) -> AsyncIterator[tuple[Requests[log_pb2.FetchRequest], FetchWriter]]:
    requests, writer = Requests[log_pb2.FetchRequest](), FetchWriter()
    running = asyncio.create_task(
        FetchSession(
            parts.registry,
            disk_reads or DiskReads(parts.disk),
            max_frame_bytes=max_frame_bytes,
            max_subscriptions=10,
        ).run(requests.__aiter__(), writer)
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


def read(written: list[list[Frame]]) -> list[bytes | None]:
    """Return the rows that a consumer decodes from the frames."""
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


async def test_committed_readers_wait_for_the_marker_and_are_woken_by_it(tmp_path: Path) -> None:
    async with (
        Parts(tmp_path) as parts,
        stream_of(parts, common_pb2.READ_COMMITTED) as (_, committed),
        stream_of(parts, common_pb2.READ_UNCOMMITTED) as (_, uncommitted),
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


async def test_a_marker_that_is_not_committed_yet_wakes_nobody(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts, stream_of(parts, common_pb2.READ_COMMITTED) as (_, writer):
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


async def test_aborted_transactions_are_named_to_committed_readers_only(tmp_path: Path) -> None:
    async with (
        Parts(tmp_path) as parts,
        stream_of(parts, common_pb2.READ_COMMITTED) as (_, committed),
        stream_of(parts, common_pb2.READ_UNCOMMITTED) as (_, uncommitted),
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


@pytest.mark.parametrize("max_frame_bytes", [4096, 1 << 20])
async def test_each_frame_names_what_it_takes_to_read_it_alone(tmp_path: Path, max_frame_bytes: int) -> None:
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
        async with stream_of(parts, common_pb2.READ_COMMITTED, max_frame_bytes=max_frame_bytes) as (
            _,
            writer,
        ):
            await settle()
            assert read(writer.written) == expected
            if max_frame_bytes == 4096:
                assert len(frames_with_records(writer)) > 10
                assert all(len(frame.head.aborted) <= 6 for frame in frames_with_records(writer))


async def test_records_of_an_aborted_transaction_never_leave_when_its_segment_is_removed_amid_the_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segment that names the transaction goes between the read of the records and the look at the transactions."""

    class Removing(DiskReads):
        async def read(self, share: Any, read: Callable[[], Any]) -> Any:
            result = await super().read(share, read)
            log.delete_records(3)
            return result

    async with Parts(tmp_path) as parts:
        log = parts.registry.find(TOPIC_ID, 0).log
        producer = Producer(parts, 7)
        producer.send(b"aborted", b"aborted as well")
        producer.end(commit=False)
        await settle()
        log.roll()
        plain(parts, b"next")
        await settle()
        read_at_once = PartitionLog.read

        def cold(self: PartitionLog, *arguments: Any, blocking: bool) -> Any:
            return read_at_once(self, *arguments, blocking=blocking) if blocking else None

        monkeypatch.setattr(PartitionLog, "read", cold)
        async with stream_of(parts, common_pb2.READ_COMMITTED, disk_reads=Removing(parts.disk)) as (_, writer):
            frames = await writer.wait_for(1)
            assert read(frames) == []
            assert frames[0][0].head.error.code == to_wire(OffsetOutOfRange("")).code


async def test_a_reader_behind_an_open_transaction_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at when the high watermark moves, and does not spin in between."""
    async with Parts(tmp_path) as parts, stream_of(parts, common_pb2.READ_COMMITTED) as (_, writer):
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


async def test_a_follower_knows_what_is_decided_from_what_it_has_appended(tmp_path: Path) -> None:
    """KIP-392: with the same bound as the leader's, as far as it has heard of the high watermark."""
    parts = Parts(tmp_path)
    parts.image = image_with(1, offset=1, leader=2, replicas=(1, 2))
    log = TransactionalLog()
    log.produce(1)
    log.produce(2, 7, transactional=True)
    log.produce(1, 8, transactional=True)
    log.end({7: False})
    log.end({8: True})
    async with parts, stream_of(parts, common_pb2.READ_COMMITTED, from_follower=True) as (_, writer):
        following = parts.registry.find(TOPIC_ID, 0).following
        assert following is not None
        following.append_replicated(b"".join(batch for _, batch in log.batches), EPOCH, lambda held: None)
        await settle()
        for high_watermark, expected in ((3, [b"0"]), (5, [b"0"]), (6, [b"0", b"3"])):
            following.take_marks(high_watermark, 0, EPOCH)
            await settle()
            assert read(writer.written) == expected
        assert [frame.head.last_stable_offset for frame in frames_with_records(writer)] == [1, 3, 6]


@pytest.mark.parametrize(("isolation", "latest"), [(common_pb2.READ_COMMITTED, 1), (common_pb2.READ_UNCOMMITTED, 4)])
async def test_offsets_are_looked_up_below_what_the_reader_may_get(
    tmp_path: Path, isolation: common_pb2.IsolationLevel.ValueType, latest: int
) -> None:
    async with Parts(tmp_path) as parts:
        plain(parts, b"before")
        producer = Producer(parts, 7)
        producer.send(b"a", b"b")
        plain(parts, b"behind")
        await settle()
        service = LogService(
            parts.registry,
            BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data"}),
            DiskReads(parts.disk),
            HeavyWork(parts.disk),
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
        assert await find(timestamp_ms=-3) == 0, "the search for the newest timestamp must not find the marker"
        assert await find(at_offset=4) == -1


KEY = (TOPIC_ID, 0)


def image(offset: int, *, leader: int = 1, epoch: int = 3) -> MetadataImage:
    """Replicas 1 and 2 in sync, each broker in a rack of its own."""
    made = image_with(1, offset=offset, leader=leader, leader_epoch=epoch, replicas=(1, 2), partition_epoch=offset)
    return replace(made, brokers={number: replace(b, rack=f"r{number}") for number, b in made.brokers.items()})


@asynccontextmanager
async def reading(
    parts: Parts, *, rack: str = "", offset: int = 0, from_follower: bool = False, last_fetched_epoch: int | None = -1
) -> AsyncIterator[FetchWriter]:
    requests, writer = Requests[log_pb2.FetchRequest](), FetchWriter()
    session = FetchSession(parts.registry, DiskReads(parts.disk), max_frame_bytes=1 << 20, max_subscriptions=10)
    running = asyncio.create_task(session.run(requests.__aiter__(), writer))
    requests.send(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=1 << 20, rack=rack)))
    part = log_pb2.FetchPartition(
        subscription_id=1,
        topic_id=TOPIC_ID,
        offset=offset,
        leader_epoch=3,
        from_follower=from_follower,
        last_fetched_epoch=last_fetched_epoch,
    )
    requests.send(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[part])))
    await settle()
    try:
        yield writer
        requests.end()
        await asyncio.wait_for(running, 60)
    finally:
        running.cancel()


def caught_up(parts: Parts) -> None:
    partition = parts.registry.find(*KEY)
    opened = partition.open_replica(
        Replica(2, 1),
        leader_epoch=3,
        fetch_offset=partition.log_end_offset,
        last_fetched_epoch=partition.log.leader_epochs.latest_epoch,
        durable_end_offset=partition.log_end_offset,
        on_change=no_change,
    )
    assert opened == Accepted()


def no_change() -> None:
    """A stream that need not look."""


def filled(parts: Parts, count: int = 2) -> None:
    for number in range(count):
        parts.registry.find(*KEY).append(batch_of(b"%d" % number), 3, None)


async def test_a_reader_is_sent_to_the_replica_in_its_rack_as_soon_as_one_is_in_sync_there(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1)
    async with parts:
        filled(parts)
        await settle()
        async with reading(parts, rack="r2") as writer:
            (frames,) = writer.written
            assert not frames[0].head.HasField("preferred_read_replica"), (
                "no replica may be recommended before any has reported"
            )
            caught_up(parts)
            await settle()
            assert records_of(writer.written) == []
            assert [frame.head.preferred_read_replica for frame in writer.written[1]] == [2]
            filled(parts)
            await settle()
            assert len(writer.written) == 2, "the consumer must get nothing more, as it was sent to another replica"
        for rack in ("", "r1", "r9"):
            async with reading(parts, rack=rack) as writer:
                assert len(records_of(writer.written)) == 1


async def test_a_follower_serves_whom_the_leader_sent_with_a_lease_only(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1)
    async with parts:
        filled(parts)
        await settle()
        caught_up(parts)
        await parts.apply(image(2, leader=2, epoch=4))
        async with reading(parts) as writer:
            assert [frame.head.error.code for (frame,) in writer.written] == [common_pb2.NOT_LEADER_OR_FOLLOWER]
        partition = parts.registry.find(*KEY)
        partition.leader_epoch = 3  # what the reader believes in; epochs are compared elsewhere
        parts.lease.end()
        async with reading(parts, from_follower=True, rack="r1") as writer:
            assert writer.written == []
            parts.lease.renew()
            await settle()
            assert len(records_of(writer.written)) == 1
        async with reading(parts, from_follower=True, offset=7) as writer:
            assert [frame.head.HasField("error") for (frame,) in writer.written] == [False], (
                "a consumer that is only ahead of the follower must get no error"
            )


async def test_a_reader_of_truncated_records_hears_where_the_logs_part(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1)
    async with parts:
        filled(parts)
        async with reading(parts, offset=9, last_fetched_epoch=3) as writer:
            ((frame,),) = writer.written
            assert frame.head.error.code == common_pb2.OFFSET_OUT_OF_RANGE
            assert "epoch 3 up to offset 2" in frame.head.error.message
            assert frame.head.diverging_offset == 2
        async with reading(parts, offset=2, last_fetched_epoch=3) as writer:
            ((frame,),) = writer.written
            assert not frame.head.HasField("error")


@pytest.mark.parametrize("last_fetched_epoch", [None, -1])
async def test_a_reader_that_does_not_say_what_it_has_read_is_asked_nothing(
    tmp_path: Path, last_fetched_epoch: int | None
) -> None:
    """A client made of generated code alone, say: what it does not set is not epoch 0."""
    parts = Parts(tmp_path)
    parts.image = image(1)
    async with parts:
        filled(parts)
        async with reading(parts, offset=1, last_fetched_epoch=last_fetched_epoch) as writer:
            ((frame,),) = writer.written
            assert not frame.head.HasField("error")


async def test_a_leader_that_may_be_deposed_calls_nothing_truncated(tmp_path: Path) -> None:
    """What a reader has got of the next leader is not in the log of one that is cut off and does not know."""
    parts = Parts(tmp_path)
    parts.image = image(1)
    async with parts:
        filled(parts)
        async with reading(parts, offset=9, last_fetched_epoch=4) as writer:
            ((frame,),) = writer.written
            assert frame.head.error.code == common_pb2.UNKNOWN_LEADER_EPOCH
        parts.lease.end()
        async with reading(parts, offset=9, last_fetched_epoch=3) as writer:
            assert writer.written == []
            await parts.apply(image(2, leader=2, epoch=4))
            await settle()
            ((frame,),) = writer.written
            assert frame.head.error.code == common_pb2.NOT_LEADER_OR_FOLLOWER


@pytest.mark.parametrize("ask", ["latest", "epoch", "time", "largest time"])
async def test_look_ups_wait_until_a_new_leader_knows_what_is_committed(tmp_path: Path, ask: str) -> None:
    """KIP-207."""
    parts = Parts(tmp_path)
    parts.image = image(1)
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": str(tmp_path / "unused")})
    async with parts:
        service = LogService(parts.registry, config, DiskReads(parts.disk), HeavyWork(parts.disk))
        filled(parts)
        await settle()
        await parts.apply(image(2, epoch=4))

        async def code() -> int:
            context = cast(Any, None)
            if ask != "epoch":
                when = {"latest": LATEST, "time": 5, "largest time": MAX_TIMESTAMP}[ask]
                part = log_pb2.ListOffsetsPartition(topic_id=TOPIC_ID, timestamp_ms=when, leader_epoch=-1)
                listed = await service.ListOffsets(log_pb2.ListOffsetsRequest(partitions=[part]), context)
                return listed.results[0].error.code
            epoch = log_pb2.EpochPartition(topic_id=TOPIC_ID, current_leader_epoch=-1, leader_epoch=3)
            found = await service.OffsetForLeaderEpoch(log_pb2.OffsetForLeaderEpochRequest(partitions=[epoch]), context)
            if not found.results[0].HasField("error"):
                assert (found.results[0].leader_epoch, found.results[0].end_offset) == (3, 2)
            return found.results[0].error.code

        assert await code() == common_pb2.LEADER_NOT_AVAILABLE
        earliest = log_pb2.ListOffsetsPartition(topic_id=TOPIC_ID, timestamp_ms=EARLIEST, leader_epoch=-1)
        listed = await service.ListOffsets(log_pb2.ListOffsetsRequest(partitions=[earliest]), cast(Any, None))
        assert not listed.results[0].HasField("error")
        partition = parts.registry.find(*KEY)
        partition.open_replica(
            Replica(2, 1),
            leader_epoch=4,
            fetch_offset=2,
            last_fetched_epoch=3,
            durable_end_offset=2,
            on_change=no_change,
        )
        assert await code() == common_pb2.NONE
