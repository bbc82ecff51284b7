"""The consumer against a scripted broker: every record once and in order, under every fault."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raftlog._core.positions
from raftlog import Consumer, Record, TopicPartition, aio
from raftlog._client.consumer import ConsumerEngine, FetchSession
from raftlog._client.keywords import OffsetReset
from raftlog._client.options import ConsumerOptions
from raftlog.cli.records.reading import position_now
from raftlog.errors import (
    BrokerUnavailable,
    ClosedError,
    CorruptRecordError,
    InvalidRequestError,
    OffsetOutOfRange,
    UnknownTopicId,
    UnknownTopicOrPartition,
    to_wire,
)
from raftlog.format import Attributes, Columns, decode_batch, encode_batch
from raftlog.format.control import Marker, encode_control
from raftlog.v1 import log_pb2
from tests.support import patience
from tests.support.batches import batch_of
from tests.support.fake_broker import FakeCluster
from tests.support.fake_members import FakeMembers

T0 = TopicPartition("t", 0)
FAST: dict[str, Any] = {"retry_backoff_ms": 1, "retry_backoff_max_ms": 20}


def batch(values: Iterable[bytes | None], at_ms: int = 1000, **columns: Any) -> bytes:
    return encode_batch(Columns(pa.array(list(values), pa.binary()), **columns), at_ms)


def numbered(start: int, count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(start, start + count)]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(nodes=2) as cluster:
        cluster.create_topic("t")
        yield cluster


def read(consumer: Consumer, count: int, timeout_s: float = 30) -> list[Record]:
    """Poll until `count` records are there."""
    records: list[Record] = []
    deadline = time.monotonic() + timeout_s
    while len(records) < count and time.monotonic() < deadline:
        records += consumer.poll(0.1)
    return records


until = partial(patience.until, within_s=30, pause_s=0.01)


def held_bytes(consumer: Consumer) -> int:
    """Return how much was fetched and not polled."""
    return sum(len(fetched.records) for _, fetched in consumer._engine._inbox.copy())


def values(records: list[Record]) -> list[bytes | None]:
    return [record.value for record in records]


def test_a_broken_session_is_taken_up_where_it_was(cluster: FakeCluster) -> None:
    for start in range(0, 1000, 50):
        cluster.append("t", batch(numbered(start, 50)))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", max_partition_fetch_bytes=1024, **FAST) as consumer:
        cluster.faults.drop_fetch_after_frames = 4
        consumer.subscribe("t")
        records = read(consumer, 300)
        cluster.faults.drop_fetch_after_frames = 3
        records += read(consumer, 1000 - len(records))
        assert values(records) == numbered(0, 1000)
        assert [record.offset for record in records] == list(range(1000))
        assert consumer.poll(0.05) == []


def test_a_moved_leader_is_followed(cluster: FakeCluster) -> None:
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **FAST) as consumer:
        consumer.subscribe("t")
        records = []
        for part in range(6):
            cluster.append("t", batch(numbered(part * 10, 10)))
            if part % 2:
                cluster.move_leader("t", 0, 1 + part // 2 % 2)
            records += read(consumer, 10)
        assert values(records) == numbered(0, 60)


def test_duplicate_frames_do_not_double_records(cluster: FakeCluster) -> None:
    cluster.faults.duplicate_frames = True
    for start in range(0, 200, 20):
        cluster.append("t", batch(numbered(start, 20)))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", max_partition_fetch_bytes=1024) as consumer:
        consumer.subscribe("t")
        assert values(read(consumer, 200)) == numbered(0, 200)
        assert consumer.poll(0.05) == []


def test_a_position_inside_a_batch_begins_there(cluster: FakeCluster) -> None:
    cluster.append("t", batch(numbered(0, 100)))
    with Consumer(cluster.bootstrap) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 37)
        assert values(consumer.poll(30))[:2] == numbered(37, 2)
        consumer.seek(T0, 99)
        table = consumer.poll_arrow(30)
        assert (table["offset"].to_pylist(), table["value"].to_pylist()) == ([99], [b"000099"])


def test_records_fetched_before_a_seek_are_stale(cluster: FakeCluster) -> None:
    for start in range(0, 500, 50):
        cluster.append("t", batch(numbered(start, 50)))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", max_partition_fetch_bytes=1024) as consumer:
        consumer.subscribe("t")
        assert len(consumer.poll(30, max_records=7)) == 7
        assert consumer.position(T0) == 7
        for target in (400, 3, 499, 250):
            consumer.seek(T0, target)
            assert consumer.position(T0) == target
            assert consumer.poll(30, max_records=1)[0].offset == target


def test_control_batches_and_compacted_holes_are_passed_over(cluster: FakeCluster) -> None:
    cluster.append("t", batch([b"a", b"b"]))
    cluster.append_raw(
        "t", encode_batch(Columns(pa.array([b"marker"])), 1, attributes=Attributes.CONTROL, base_offset=2)
    )
    sparse = Columns(pa.array([b"d", b"g"]), offset_delta=pa.array([1, 4], pa.uint32()))
    cluster.append_raw("t", encode_batch(sparse, 1, base_offset=3, last_offset_delta=6))
    empty = Columns(pa.array([], pa.binary()), offset_delta=pa.array([], pa.uint32()))
    cluster.append_raw("t", encode_batch(empty, 1, base_offset=10, last_offset_delta=4))
    cluster.append("t", batch([b"z"]))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe("t")
        records = read(consumer, 5)
        assert [(record.offset, record.value) for record in records] == [
            (0, b"a"), (1, b"b"), (4, b"d"), (7, b"g"), (15, b"z"),
        ]  # fmt: skip
        assert consumer.position(T0) == 16
        consumer.seek(T0, 5)
        table = consumer.poll_arrow(30)
        assert table["offset"].to_pylist()[0] == 7
        consumer.seek(T0, 11)
        assert consumer.poll(30)[0].offset == 15


@pytest.mark.parametrize(("policy", "expected"), [("earliest", b"000050"), ("latest", b"000100")])
def test_out_of_range_starts_over_by_policy(cluster: FakeCluster, policy: OffsetReset, expected: bytes) -> None:
    for start in (0, 50):
        cluster.append("t", batch(numbered(start, 50)))
    cluster.call(lambda: setattr(cluster.topics["t"].partitions[0], "start", 50))
    with Consumer(cluster.bootstrap, auto_offset_reset=policy, **FAST) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 10)
        if policy == "latest":
            assert consumer.poll(0.2) == []
            until(lambda: position_now(consumer, T0) == 100)
        cluster.append("t", batch(numbered(100, 1)))
        assert consumer.poll(30)[0].value == expected


@pytest.mark.parametrize("count", [5, 15])
@pytest.mark.parametrize("policy", ["earliest", "latest"])
def test_a_reader_of_truncated_records_goes_on_where_the_logs_part(
    cluster: FakeCluster, policy: OffsetReset, count: int
) -> None:
    """KIP-320: the records from there on are new to it, and it has read those before."""
    for start in (0, 10):
        cluster.append("t", batch(numbered(start, 10)))
    with Consumer(cluster.bootstrap, auto_offset_reset=policy, **FAST) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 0)
        assert len(read(consumer, 20)) == 20
        cluster.truncate("t", 0, 10, batch(numbered(100, count)))
        assert [(record.offset, record.value) for record in read(consumer, count)] == list(
            zip(range(10, 10 + count), numbered(100, count), strict=True)
        )
        assert consumer.metrics()["consumer-fetch-manager-metrics"]["records-lag-max"] == 0


def test_a_reader_of_truncated_records_without_a_policy_hears_of_it(cluster: FakeCluster) -> None:
    for start in (0, 10):
        cluster.append("t", batch(numbered(start, 10)))
    with Consumer(cluster.bootstrap, auto_offset_reset="none", **FAST) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 0)
        assert len(read(consumer, 20)) == 20
        cluster.truncate("t", 0, 10, batch(numbered(100, 15)))
        with pytest.raises(OffsetOutOfRange, match="it was truncated"):
            consumer.poll(30)


def test_out_of_range_without_a_policy_is_raised_until_seek(cluster: FakeCluster) -> None:
    cluster.append("t", batch(numbered(0, 5)))
    with Consumer(cluster.bootstrap, auto_offset_reset="none", **FAST) as consumer:
        consumer.assign([T0])
        with pytest.raises(OffsetOutOfRange, match=r"auto\.offset\.reset=none"):
            consumer.poll(30)
        consumer.seek(T0, 99)
        for _ in range(2):
            with pytest.raises(OffsetOutOfRange, match=r"t-0.*99"):
                consumer.poll(30)
        consumer.seek(T0, 4)
        assert values(consumer.poll(30)) == [b"000004"]


def complaints(cluster: FakeCluster) -> list[tuple[int, int | None]]:
    """Return node and damaged offset of every subscription so far."""
    return [
        (node, part.damaged_offset if part.HasField("damaged_offset") else None) for node, part in cluster.subscribed
    ]


def test_a_batch_that_does_not_check_is_asked_for_again_and_the_broker_is_told(cluster: FakeCluster) -> None:
    cluster.append("t", batch(numbered(0, 5)))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **FAST) as consumer:
        consumer.subscribe("t")
        assert values(read(consumer, 5)) == numbered(0, 5)
        cluster.faults.corrupt_frames = 2
        cluster.append("t", batch(numbered(5, 5)))
        assert values(read(consumer, 5)) == numbered(5, 5), "the records must come without an error"
        cluster.move_leader("t", 0, 2)
        cluster.append("t", batch(numbered(10, 5)))
        assert values(read(consumer, 5)) == numbered(10, 5)
    assert complaints(cluster) == [(1, None), (1, 5), (1, 5), (2, None)]


def test_another_replica_has_the_batch_whole(cluster: FakeCluster) -> None:
    cluster.append("t", batch(numbered(0, 5)))
    cluster.faults.corrupt_partitions.add(0)

    class Subscribed(list[tuple[int, log_pb2.FetchPartition]]):
        """Has the other replica take over at the first complaint."""

        def append(self, subscription: tuple[int, log_pb2.FetchPartition]) -> None:
            super().append(subscription)
            if subscription[1].HasField("damaged_offset"):
                part = cluster.topics["t"].partitions[0]
                part.leader, part.leader_epoch = 2, 1
                cluster.metadata_offset += 1
                cluster.faults.corrupt_partitions.clear()

    cluster.subscribed = Subscribed()
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **FAST) as consumer:
        consumer.subscribe("t")
        assert values(read(consumer, 5)) == numbered(0, 5)
    assert complaints(cluster)[:2] == [(1, None), (1, 0)]
    assert complaints(cluster)[-1][0] == 2


def test_a_batch_that_stays_corrupt_is_raised_and_read_once_it_is_mended(cluster: FakeCluster) -> None:
    cluster.faults.corrupt_partitions.add(0)
    cluster.append("t", batch(numbered(0, 5)))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **FAST) as consumer:
        consumer.subscribe("t")
        with pytest.raises(CorruptRecordError, match="t-0 at offset 0: checksum mismatch"):
            consumer.poll(30)
        assert complaints(cluster)[-1] == (1, 0)
        assert 3 <= len(cluster.subscribed) <= 10, (
            f"the consumer must have tried 3 to 10 times, but has {len(cluster.subscribed)} times"
        )
        cluster.faults.corrupt_partitions.clear()
        assert values(consumer.poll(30)) == numbered(0, 5)


def test_a_seek_is_a_new_beginning_for_complaints(cluster: FakeCluster) -> None:
    cluster.faults.corrupt_partitions.add(0)
    cluster.append("t", batch(numbered(0, 5)))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **FAST) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 0)
        with pytest.raises(CorruptRecordError):
            consumer.poll(30)
        cluster.faults.corrupt_partitions.clear()
        consumer.seek(T0, 2)
        assert values(consumer.poll(30)) == numbered(2, 3)
        assert complaints(cluster)[-1] == (1, None)


def test_a_topic_made_again_is_not_silently_continued(cluster: FakeCluster) -> None:
    cluster.append("t", batch(numbered(0, 5)))
    options = {"metadata_max_age_ms": 20, **FAST}
    with (
        Consumer(cluster.bootstrap, auto_offset_reset="none", **options) as strict,
        Consumer(cluster.bootstrap, auto_offset_reset="latest", **options) as lenient,
    ):
        strict.assign([T0])
        strict.seek(T0, 5)
        assert strict.poll(0.05) == []
        lenient.subscribe("t")
        cluster.make_topic_again("t")
        cluster.append("t", batch([b"other"] * 9))
        with pytest.raises(UnknownTopicId, match="deleted and created again"):
            strict.poll(30)
        assert values(read(lenient, 9)) == [b"other"] * 9, "the records of the new topic must be read from its start"


def test_a_topic_that_was_created_again_has_its_own_lag(cluster: FakeCluster) -> None:
    cluster.append("t", batch(numbered(0, 5)))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", metadata_max_age_ms=20, **FAST) as consumer:
        consumer.assign([T0])
        assert values(read(consumer, 5)) == numbered(0, 5)
        cluster.make_topic_again("t")
        cluster.append("t", batch([b"other"]))
        assert values(read(consumer, 1)) == [b"other"]
        assert consumer.metrics()["consumer-fetch-manager-metrics"]["records-lag-max"] == 0


def test_a_deleted_topic_is_reported_to_who_assigned_it(cluster: FakeCluster) -> None:
    with Consumer(cluster.bootstrap, metadata_max_age_ms=20, **FAST) as consumer:
        consumer.assign([T0])
        cluster.delete_topic("t")
        with pytest.raises(UnknownTopicOrPartition, match="deleted"):
            consumer.poll(30)


def test_new_partitions_and_topics_are_read_from_their_start(cluster: FakeCluster) -> None:
    """KAFKA-20030: a consumer at `latest` misses what came before it noticed a new partition."""
    cluster.append("t", batch([b"old"]))
    with Consumer(cluster.bootstrap, metadata_max_age_ms=20, **FAST) as consumer:
        consumer.subscribe(pattern="t.*")
        cluster.append("t", batch([b"sent after subscribe"]))
        assert values(consumer.poll(30)) == [b"sent after subscribe"]
        cluster.add_partitions("t", 2)
        cluster.append("t", batch([b"before it was noticed"]), partition=1)
        cluster.create_topic("t2")
        cluster.append("t2", batch([b"in a new topic"]))
        cluster.create_topic("other")
        found = read(consumer, 2)
        assert sorted(map(str, values(found))) == sorted(map(str, [b"before it was noticed", b"in a new topic"]))
        assert consumer.assignment() == [T0, TopicPartition("t", 1), TopicPartition("t2", 0)]
        cluster.delete_topic("t2")
        deadline = time.monotonic() + 30
        while len(consumer.assignment()) == 3 and time.monotonic() < deadline:
            assert consumer.poll(0.05) == []
        assert consumer.assignment() == [T0, TopicPartition("t", 1)]


def test_subscribing_to_a_topic_that_comes_later(cluster: FakeCluster) -> None:
    with Consumer(cluster.bootstrap, metadata_max_age_ms=20, **FAST) as consumer:
        consumer.subscribe(["later"])
        assert consumer.poll(0.05) == []
        cluster.create_topic("later")
        cluster.append("later", batch([b"first"]))
        assert values(consumer.poll(30)) == [b"first"]


def test_topics_that_do_not_exist_are_named_once(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    with Consumer(cluster.bootstrap, metadata_max_age_ms=20, **FAST) as consumer, caplog.at_level("WARNING"):
        consumer.subscribe(["t", "nosuch", "another"])
        assert consumer.poll(0.2) == []
    assert [record.name for record in caplog.records] == ["raftlog._client.consumer"]
    assert caplog.messages == ["subscribed to topics that do not exist: another, nosuch; waiting for them"]


def test_a_broker_that_names_the_partition_is_not_repeated(cluster: FakeCluster) -> None:
    text = "t-0: offset 99 is not in the log, which has offsets 0 to 5"
    cluster.append("t", batch(numbered(0, 5)))
    with Consumer(cluster.bootstrap, auto_offset_reset="none", **FAST) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 0)
        assert len(consumer.poll(30)) == 5
        with consumer._engine.lock:
            state = consumer._engine.positions.states[T0]
        head = log_pb2.FetchFrame(error=to_wire(OffsetOutOfRange(text)))
        consumer._thread.loop.call_soon_threadsafe(consumer._engine.refused, state, head)
        with pytest.raises(OffsetOutOfRange) as caught:
            consumer.poll(30)
        assert str(caught.value).count("t-0") == 1


def test_fetched_bytes_stay_within_the_bound(cluster: FakeCluster) -> None:
    large = batch([b"x" * 1000] * 10)
    for _ in range(100):
        cluster.append("t", large)
    with Consumer(
        cluster.bootstrap, auto_offset_reset="earliest", fetch_max_bytes=50_000, max_partition_fetch_bytes=11_000
    ) as consumer:
        consumer.subscribe("t")
        until(lambda: held_bytes(consumer) >= 40_000)
        time.sleep(0.3)
        assert held_bytes(consumer) <= 50_000 + 11_000, (
            f"the consumer holds {held_bytes(consumer)} bytes, more than its credit and one frame"
        )
        assert len(read(consumer, 1000)) == 1000, "all records must come, as polls give the credit back"
    assert cluster.least_credit > -11_000


def test_paused_partitions_hold_nothing_back(cluster: FakeCluster) -> None:
    cluster.add_partitions("t", 2)
    one = TopicPartition("t", 1)
    for partition in (0, 1):
        for start in range(0, 400, 50):
            cluster.append("t", batch(numbered(start, 50)), partition=partition)
    with Consumer(
        cluster.bootstrap, auto_offset_reset="earliest", fetch_max_bytes=2048, max_partition_fetch_bytes=1024,
        metadata_max_age_ms=20, **FAST,
    ) as consumer:  # fmt: skip
        consumer.assign([T0, one])
        consumer.pause(T0)
        assert consumer.paused() == [T0]
        records = read(consumer, 400)
        assert {record.partition for record in records} == {1}
        assert consumer.poll(0.05) == []
        consumer.resume(T0)
        assert [record.value for record in read(consumer, 400)] == numbered(0, 400)


def test_partitions_take_turns(cluster: FakeCluster) -> None:
    cluster.add_partitions("t", 3)
    for partition in range(3):
        cluster.append("t", batch(numbered(0, 1000)), partition=partition)
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", max_poll_records=10) as consumer:
        consumer.subscribe("t")
        deadline = time.monotonic() + 30
        while len(consumer._engine._inbox) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        turns = [consumer.poll(30)[0].partition for _ in range(9)]
        assert sorted(turns[:3]) == sorted(turns[3:6]) == [0, 1, 2]


def test_iteration_ends_after_its_timeout_and_knows_its_position(cluster: FakeCluster) -> None:
    cluster.append("t", batch(numbered(0, 10)))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe("t")
        seen = [next(consumer).offset for _ in range(4)]
        assert seen == [0, 1, 2, 3]
        assert consumer.position(T0) == 4, (
            "the position must be behind the last record handed out, not behind the last one fetched"
        )
        consumer.pause(T0)
        consumer.resume(T0)
        assert [next(consumer).offset for _ in range(6)] == [4, 5, 6, 7, 8, 9]
        patient = consumer._engine.options
        consumer._engine.options = patient.but(consumer_timeout_ms=100)
        assert list(consumer) == []
        consumer._engine.options = patient
        consumer.seek_to_beginning()
        assert next(consumer).offset == 0
        assert consumer.poll_arrow(30)["offset"].to_pylist() == list(range(1, 10))


@pytest.mark.parametrize("wrong", [1.0, None, "1", True, 1 << 63, float("nan")])
def test_a_seek_to_what_is_no_offset_is_refused_and_reading_goes_on(cluster: FakeCluster, wrong: Any) -> None:
    """An offset that fits into no request would have ended the reading of all partitions, without a word."""
    cluster.append("t", batch(numbered(0, 3), 1000))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([T0])
        assert len(read(consumer, 3)) == 3
        with pytest.raises(InvalidRequestError, match="is no offset"):
            consumer.seek(T0, wrong)
        cluster.append("t", batch(numbered(3, 1), 1000))
        assert [record.offset for record in read(consumer, 1)] == [3]
        consumer.seek(T0, np.int64(1))  # type: ignore[arg-type] # a whole number all the same
        assert [record.offset for record in read(consumer, 3)] == [1, 2, 3]
        assert type(consumer.position(T0)) is int


def test_a_poll_after_an_iteration_returns_no_more_than_it_was_asked_for(cluster: FakeCluster) -> None:
    """An iteration has polled many records before it yields the first."""
    cluster.append("t", batch(numbered(0, 20), 1000))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe("t")
        assert next(consumer).offset == 0
        assert [record.offset for record in consumer.poll(30, max_records=3)] == [1, 2, 3]
        assert consumer.position(T0) == 4
        assert next(consumer).offset == 4
        assert len(consumer.poll(30)) == 15


def test_look_ups_by_time_and_name(cluster: FakeCluster) -> None:
    cluster.append("t", batch(numbered(0, 3), 1000))
    cluster.append("t", batch(numbered(3, 3), 2000))
    with Consumer(cluster.bootstrap) as consumer:
        found = consumer.offsets_for_times({T0: 1500})
        assert (found[T0].offset, found[T0].timestamp_ms) == (3, 2000)  # type: ignore[union-attr] # it is there
        assert consumer.offsets_for_times({T0: 3000}) == {T0: None}
        assert consumer.beginning_offsets([T0]) == {T0: 0}
        assert consumer.end_offsets([T0]) == {T0: 6}
        with pytest.raises(InvalidRequestError, match="negative"):
            consumer.offsets_for_times({T0: -1})
        for wrong in (1500.0, None, "1500", True, 1 << 63):
            with pytest.raises(InvalidRequestError, match="no timestamp"):
                consumer.offsets_for_times({T0: wrong})  # type: ignore[dict-item] # as a program may have it
        with pytest.raises(UnknownTopicOrPartition):
            consumer.end_offsets([TopicPartition("t", 7)])


def test_tables_share_the_memory_of_the_frames(cluster: FakeCluster) -> None:
    """Values are not copied: the table's value buffers lie within the messages that came in."""
    for start in range(0, 300, 100):
        cluster.append("t", batch(numbered(start, 100)))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe("t")
        until(lambda: held_bytes(consumer) >= 3000)
        frames = [pa.py_buffer(fetched.records) for _, fetched in consumer._engine._inbox.copy()]
        table = consumer.poll_arrow(30)
        assert table.num_rows == 300
        for chunk in table["value"].chunks:
            data = chunk.buffers()[2]
            assert any(frame.address <= data.address < frame.address + frame.size for frame in frames)
        table.validate(full=True)


def test_arrow_columns_carry_everything(cluster: FakeCluster) -> None:
    headers = pa.array([[("a", b"1")], None], pa.map_(pa.utf8(), pa.binary()))
    times = pa.array([5, 7], pa.int64())
    cluster.append("t", batch([b"v", None], 5, key=pa.array([None, b"k"]), headers=headers, timestamp_ms=times))
    cluster.append("t", batch([b"w"], 9))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe("t")
        table = consumer.poll_arrow(30)
        rows = table.to_pylist()
        assert [row["timestamp"].timestamp() * 1000 for row in rows][:2] == [5, 7]
        assert [row["key"] for row in rows][:2] == [None, b"k"]
        assert [row["headers"] for row in rows][:2] == [[("a", b"1")], None]
        assert table["topic"].to_pylist()[0] == "t"
        consumer.seek(T0, 0)
        records = read(consumer, 3)
        assert records[0].headers == (("a", b"1"),)
        assert [record.timestamp_ms for record in records] == [5, 7, 9]


def test_close_wakes_a_poll_that_waits(cluster: FakeCluster) -> None:
    consumer = Consumer(cluster.bootstrap)
    consumer.subscribe("t")
    ended: list[Exception] = []

    def wait() -> None:
        try:
            consumer.poll(None)
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    consumer.close()
    thread.join(30)
    assert len(ended) == 1


def test_what_cannot_be_is_refused(cluster: FakeCluster) -> None:
    with Consumer(cluster.bootstrap, default_api_timeout_ms=30_000) as consumer:
        with pytest.raises(InvalidRequestError, match="subscribe or assign"):
            consumer.poll(0)
        with pytest.raises(InvalidRequestError, match="not assigned"):
            consumer.seek(T0, 0)
        with pytest.raises(InvalidRequestError, match="one of the two"):
            consumer.subscribe()
        with pytest.raises(UnknownTopicOrPartition):
            consumer.assign([TopicPartition("t", 4)])
        consumer.assign([T0])
        with pytest.raises(InvalidRequestError, match="negative"):
            consumer.seek(T0, -1)
    lost = Consumer("127.0.0.1:1", default_api_timeout_ms=200, **FAST)
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        lost.subscribe("t")
    lost.close()


@pytest.mark.parametrize("after_s", [0.0, 0.05])
async def test_a_session_ends_while_its_broker_is_silent(after_s: float) -> None:
    """It accepts the connection and says nothing: a writer to such a call must not outlast it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        fetcher = ConsumerEngine([address], ConsumerOptions.make({}, {}), asyncio.get_running_loop())
        session = FetchSession(fetcher, 1, address)
        await asyncio.sleep(after_s)
        async with asyncio.timeout(60):
            await session.close()
            await fetcher.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert [task for task in others if "_write" in repr(task)] == []


@pytest.fixture
def cluster_with_markers() -> Iterator[FakeCluster]:
    with FakeCluster(nodes=1) as cluster_with_markers:
        cluster_with_markers.create_topic("t")
        cluster_with_markers.append("t", batch_of(b"a", b"b"))
        cluster_with_markers.append_raw(
            "t", encode_control([Marker(7, 1, True, 0, 0), Marker(8, 1, False, 0)], 1, base_offset=2)
        )
        yield cluster_with_markers


def test_who_reads_up_to_an_end_does_not_wait_behind_the_last_marker(cluster_with_markers: FakeCluster) -> None:
    with Consumer(cluster_with_markers.bootstrap) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 2)  # only markers from here on
        begun = time.monotonic()
        assert consumer.poll(120) == []
        assert consumer.position(T0) == 4
        consumer.seek(T0, 3)
        assert consumer.poll_arrow(120).num_rows == 0
        assert consumer.position(T0) == 4
        assert time.monotonic() - begun < 60
        assert consumer.poll(0.2) == [], "a poll after the end must wait and return nothing"


async def test_the_same_with_asyncio(cluster_with_markers: FakeCluster) -> None:
    async with aio.Consumer(cluster_with_markers.bootstrap) as consumer:
        await consumer.assign([T0])
        consumer.seek(T0, 2)
        async with asyncio.timeout(60):
            assert await consumer.poll(120) == []
        assert await consumer.position(T0) == 4


def test_who_waits_for_a_record_for_ever_gets_one(cluster_with_markers: FakeCluster) -> None:
    with Consumer(cluster_with_markers.bootstrap) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 2)
        timer = threading.Timer(0.3, lambda: cluster_with_markers.append("t", batch_of(b"c")))
        timer.start()
        assert [record.value for record in consumer.poll(None)] == [b"c"]
        timer.join()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_iteration_goes_on_behind_a_marker_until_its_timeout(
    cluster_with_markers: FakeCluster, asynchronous: bool
) -> None:
    timer = threading.Timer(0.5, lambda: cluster_with_markers.append("t", batch_of(b"c")))

    async def scenario() -> list[bytes | None]:
        async with aio.Consumer(cluster_with_markers.bootstrap, consumer_timeout_ms=300) as consumer:
            await consumer.assign([T0])
            consumer.seek(T0, 2)
            assert [record async for record in consumer] == []
        async with aio.Consumer(cluster_with_markers.bootstrap, consumer_timeout_ms=60_000) as consumer:
            await consumer.assign([T0])
            consumer.seek(T0, 0)
            timer.start()
            return [(await anext(consumer)).value for _ in range(3)]

    if asynchronous:
        found = asyncio.run(scenario())
    else:
        with Consumer(cluster_with_markers.bootstrap, consumer_timeout_ms=300) as consumer:
            consumer.assign([T0])
            consumer.seek(T0, 2)
            assert list(consumer) == []
        with Consumer(cluster_with_markers.bootstrap, consumer_timeout_ms=60_000) as consumer:
            consumer.assign([T0])
            consumer.seek(T0, 0)
            timer.start()
            found = [next(consumer).value for _ in range(3)]
    timer.join()
    assert found == [b"a", b"b", b"c"]


RECORDS, EACH = 4000, 4
INTERRUPTED: dict[str, Any] = {"auto_offset_reset": "earliest", "retry_backoff_ms": 1, "retry_backoff_max_ms": 5}
ZERO = TopicPartition("t", 0)
PACKAGE = os.path.dirname(raftlog.__file__) + os.sep


class Interrupt:
    """Raises KeyboardInterrupt in this thread at the nth place where one can come: a call, or after one into C."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE):
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def during(self, work: Callable[[], list[int]]) -> list[int] | None:
        """Return what `work` does, None when it came to nothing."""
        sys.setprofile(self)
        try:
            return work()
        except KeyboardInterrupt:
            return None
        finally:
            sys.setprofile(None)


@pytest.fixture
def interrupted_cluster() -> Iterator[FakeCluster]:
    with FakeCluster(nodes=1) as interrupted_cluster:
        interrupted_cluster.create_topic("t")
        for start in range(0, RECORDS, EACH):
            values = [b"%d" % number for number in range(start, start + EACH)]
            interrupted_cluster.append("t", encode_batch(Columns(pa.array(values, pa.binary())), 1000))
        interrupted_cluster.groups.add("g", 1)
        interrupted_cluster.groups.members = FakeMembers(interrupted_cluster, "g")
        yield interrupted_cluster


def polled(consumer: Consumer) -> list[int]:
    return [record.offset for record in consumer.poll(30, max_records=6)]


def yielded(consumer: Consumer) -> list[int]:
    return [next(consumer).offset]


def tabled(consumer: Consumer) -> list[int]:
    offsets: list[int] = consumer.poll_arrow(30, max_records=6)["offset"].to_pylist()
    return offsets


@pytest.mark.parametrize("read", [polled, yielded, tabled])
@pytest.mark.parametrize("group_id", ["g", None])
def test_wherever_it_comes(
    interrupted_cluster: FakeCluster, group_id: str | None, read: Callable[[Consumer], list[int]]
) -> None:
    with Consumer(interrupted_cluster.bootstrap, group_id, max_poll_records=6, **INTERRUPTED) as consumer:
        consumer.subscribe("t")
        found: list[int] = []
        place = interrupted = 0
        while place < 40 or interrupted:
            interrupted = 0
            for _ in range(2):  # from the buffer, and with a fetch
                offsets = Interrupt(place).during(lambda: read(consumer))
                interrupted += offsets is None
                if group_id is not None:
                    group = consumer._group
                    assert group is not None
                    for part, done in group.progress.done().items():
                        assert part == ZERO
                        assert done.offset <= len(found), (
                            "records that no iteration has finished must not count as processed"
                        )
                found += offsets or []
                assert found == list(range(len(found))), (
                    f"interrupted at {place}, the consumer must give each record once and in order"
                )
            place += 1
        while len(found) < 30:
            found += read(consumer)
        assert found == list(range(len(found)))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_inside_the_decoder(
    interrupted_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    decode, countdown = decode_batch, [5]

    def failing(*arguments: Any, **options: Any) -> Any:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise error("once")
        return decode(*arguments, **options)

    monkeypatch.setattr(raftlog._core.positions, "decode_batch", failing)
    with Consumer(interrupted_cluster.bootstrap, "g", **INTERRUPTED) as consumer:
        consumer.subscribe("t")
        with pytest.raises(error, match="once"):
            consumer.poll(30, max_records=2000)
        offsets = read_all(consumer)
        assert offsets == list(range(RECORDS))
    assert committed(interrupted_cluster) == RECORDS


def test_a_close_right_after_it_commits_what_was_done_and_no_more(
    interrupted_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = Consumer(interrupted_cluster.bootstrap, "g", **INTERRUPTED)
    consumer.subscribe("t")
    assert polled(consumer) == list(range(6))
    decode, countdown = decode_batch, [3]

    def failing(*arguments: Any, **options: Any) -> Any:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise KeyboardInterrupt
        return decode(*arguments, **options)

    with pytest.raises(KeyboardInterrupt), consumer:
        monkeypatch.setattr(raftlog._core.positions, "decode_batch", failing)
        consumer.poll(30)
    assert committed(interrupted_cluster) == 6


def test_a_table_that_has_no_room(interrupted_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with Consumer(interrupted_cluster.bootstrap, **INTERRUPTED) as consumer:
        consumer.subscribe("t")
        with monkeypatch.context() as patched:

            def failing(rows: Iterable[object], engine: object) -> object:
                raise MemoryError("no room")

            patched.setattr("raftlog._consumer.table_of", failing)
            with pytest.raises(MemoryError):
                consumer.poll_arrow(30)
        assert read_all(consumer) == list(range(RECORDS))


def read_all(consumer: Consumer) -> list[int]:
    found: list[int] = []
    deadline = time.monotonic() + 30
    while len(found) < RECORDS and time.monotonic() < deadline:
        found += [record.offset for record in consumer.poll(0.5)]
    return found


def committed(interrupted_cluster: FakeCluster) -> int | None:
    found = interrupted_cluster.call(lambda: interrupted_cluster.groups.groups["g"].offsets.get(ZERO))
    return None if found is None else found.offset
