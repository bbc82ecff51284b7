"""The producer: arguments, partitions, callbacks, codecs, and faults in which no acknowledged record is lost."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftlog import Delivery, Producer, aio
from raftlog._client import producer as produce_stream
from raftlog._client.keywords import Compression
from raftlog._core.accumulator import key_hash
from raftlog._delivery import awaited
from raftlog.errors import (
    BrokerUnavailable,
    BufferExhausted,
    ClosedError,
    CorruptRecordError,
    DeliveryTimeout,
    InternalError,
    InvalidPartitions,
    InvalidRecord,
    InvalidRequestError,
    MessageTooLarge,
    NotEnoughReplicas,
    NotLeader,
    RaftlogError,
    UnknownTopicOrPartition,
)
from tests.support import patience
from tests.support.deliveries import expire
from tests.support.fake_broker import FakeCluster
from tests.support.fresh import examples

FAST: dict[str, Any] = {"linger_ms": 0.5, "retry_backoff_ms": 1, "retry_backoff_max_ms": 20}
PATIENT: dict[str, Any] = {**FAST, "delivery_timeout_ms": 20_000, "request_timeout_ms": 15_000}
"""A record that waits for ever fails within a test."""


def numbered(count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(count)]


def test_processes_that_send_one_record_each_spread_them_over_the_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t", 4)
        partitions = []
        for first in range(4):  # what differs from process to process
            monkeypatch.setattr(produce_stream, "_first_partitions", {})
            monkeypatch.setattr(random, "getrandbits", lambda _, first=first: first)
            with Producer(cluster.bootstrap) as producer:
                partitions.append(producer.send("t", b"one").result(30).partition)
        assert sorted(partitions) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"value": "text"}, TypeError, r"value='text'\.encode\(\)"),
        ({"value": 5}, TypeError, "not int"),
        ({"key": "text"}, TypeError, r"key='text'\.encode\(\)"),
        ({"headers": [("a", "b")]}, TypeError, "header"),
        ({"headers": ["abc"]}, TypeError, "pairs"),
        ({"partition": "0"}, TypeError, "partition"),
        ({"partition": 9}, InvalidPartitions, "partitions 0 to 1"),
        ({"partition": -1}, InvalidPartitions, "partitions 0 to 1"),
        ({"timestamp_ms": 1.5}, TypeError, "milliseconds"),
        ({"timestamp_ms": -5}, InvalidRequestError, "negative"),
        ({"timestamp_ms": 253_402_300_800_000}, InvalidRequestError, "timestamp_ms 253402300800000 .* year 9999"),
        ({"value": b"x" * 2_000_000}, MessageTooLarge, r"2000\d{3} bytes.*max\.request\.size=1048576"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t", 2)
        with Producer(cluster.bootstrap) as producer:
            with pytest.raises(error, match=message):
                producer.send("t", **arguments)
            assert producer.send("t", b"fine").result(30).offset == 0


@pytest.mark.parametrize(
    ("timestamps", "message"),
    [
        (-5, "row 0 .*-5 is negative"),
        ([7, -5], "row 1 .*-5 is negative"),
        (pa.array([7, None, -5], pa.timestamp("ms")), "row 2 .*-5 is negative"),
        (pa.array([253_402_300_800_000, 7], pa.int64()), "row 0 .* year 9999"),
        (pa.array([7, 1 << 62], pa.timestamp("s")), "timestamp"),
    ],
)
def test_timestamps_of_many_records_are_checked_as_those_of_one(timestamps: Any, message: str) -> None:
    with FakeCluster() as cluster, Producer(cluster.bootstrap) as producer:
        cluster.create_topic("t")
        count = len(timestamps) if not isinstance(timestamps, int) else 2
        if isinstance(timestamps, pa.Array):
            data: Any = pa.table({"value": [b"v"] * count, "timestamp": timestamps})
            arguments: dict[str, Any] = {}
        else:
            data, arguments = [b"v"] * count, {"timestamp_ms": timestamps}
        with pytest.raises(InvalidRequestError, match=message):
            producer.send_batch("t", data, **arguments)
        producer.send_batch("t", [b"v"] * 2, timestamp_ms=[0, 253_402_300_799_999]).result(30)
        assert len(cluster.values("t")) == 2, "nothing of the refused batch must be sent"


def test_records_without_a_key_go_to_all_partitions_in_turn() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t", 4)
        with Producer(cluster.bootstrap, batch_size=2000, linger_ms=60_000) as producer:
            sent: deque[Delivery] = deque()
            for _ in range(4000):
                sent.append(producer.send("t", b"x" * 10))
                if len(sent) > 200:  # some four batches: no partition has a backlog, behind which batches are larger
                    sent.popleft().result(30)
        counts = [len(cluster.values("t", partition)) for partition in range(4)]
        assert sum(counts) == 4000
        assert min(counts) > 900, counts


def test_callbacks_run_once_and_their_failures_harm_nobody() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        seen: list[Delivery] = []

        def fail(delivery: Delivery) -> None:
            seen.append(delivery)
            raise RuntimeError("mine")

        with Producer(cluster.bootstrap, **FAST) as producer:
            one, two = producer.send("t", b"1"), producer.send("t", b"2")
            one.add_done_callback(fail)
            two.add_done_callback(seen.append)
            producer.flush(30)
            two.add_done_callback(seen.append)  # at once: it is done
        assert seen == [one, two, two]


def test_waiting_inside_a_callback_is_refused_instead_of_a_deadlock() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        caught: list[RaftlogError] = []
        with Producer(cluster.bootstrap, **FAST) as producer:

            def wait_there(delivery: Delivery) -> None:
                try:
                    producer.send("t", b"2").result(30)
                except RaftlogError as error:
                    caught.append(error)

            delivery = producer.send("t", b"1")
            delivery.add_done_callback(wait_there)
            producer.flush(30)
        assert len(caught) == 1
        assert isinstance(caught[0], InvalidRequestError)


def test_send_batch_keeps_the_order_of_each_partition_and_reports_ranges() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t", 3)
        rows = 5000
        keys = [b"k%d" % (number % 17) for number in range(rows)]
        with Producer(cluster.bootstrap, max_request_size=20_000, batch_size=8000) as producer:
            single = {key: producer.send("t", b"", key).result(30).partition for key in set(keys)}
            start = [len(cluster.values("t", partition)) for partition in range(3)]
            table = pa.table({"key": keys, "value": numbered(rows)})
            ranges = producer.send_batch("t", table).result(30)
        assert sum(part.record_count for part in ranges) == rows
        for partition in range(3):
            expected = [value for key, value in zip(keys, numbered(rows), strict=True) if single[key] == partition]
            assert cluster.values("t", partition)[start[partition] :] == expected


def test_send_batch_follows_what_send_has_queued() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, linger_ms=1000) as producer:
            producer.send("t", b"1")
            producer.send_batch("t", [b"2", b"3"])
            producer.send("t", b"4")
        assert cluster.values("t") == [b"1", b"2", b"3", b"4"]


def test_send_batch_refuses_a_row_that_fits_nowhere_before_sending_any() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, max_request_size=10_000) as producer:
            with pytest.raises(MessageTooLarge, match=r"row 2 .*max\.request\.size=10000"):
                producer.send_batch("t", [b"1", b"2", b"x" * 20_000])
            with pytest.raises(InvalidPartitions):
                producer.send_batch("t", [b"1", b"2"], partition=[0, 7])
            assert producer.send_batch("t", []).result(1) == []
        assert cluster.values("t") == []


def test_partitions_that_a_topic_has_got_since_take_records() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t", 1)
        with Producer(cluster.bootstrap) as producer:
            producer.send("t", b"0").result(30)
            cluster.add_partitions("t", 2)
            assert producer.send("t", b"1", partition=1).result(30).partition == 1
            cluster.add_partitions("t", 4)
            sent = producer.send_batch("t", [b"2", b"3", b"4"], partition=[3, 1, 2]).result(30)
            assert sorted(part.partition for part in sent) == [1, 2, 3]


async def test_partitions_that_a_topic_has_got_since_take_awaited_records() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t", 1)
        async with aio.Producer(cluster.bootstrap) as producer:
            await producer.send_and_wait("t", b"0")
            cluster.add_partitions("t", 2)
            assert (await producer.send_and_wait("t", b"1", partition=1)).partition == 1


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_codec_arrives(codec: Compression) -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, compression_type=codec, compression_level=None) as producer:
            producer.send_batch("t", [b"same" * 20] * 1000).result(30)
            producer.send("t", None, b"tombstone").result(30)
        assert cluster.values("t") == [b"same" * 20] * 1000 + [None]
        assert (sum(map(len, cluster.topics["t"].partitions[0].batches)) < 20_000) == (codec != "none")


def send_all(producer: Producer, values: list[bytes], pause_every: int = 40) -> list[Delivery]:
    """Send in many small batches, so that several are in flight."""
    deliveries = []
    for index, value in enumerate(values):
        deliveries.append(producer.send("t", value, partition=0))
        if index % pause_every == pause_every - 1:
            time.sleep(0.001)
    return deliveries


until = partial(patience.until, within_s=30, pause_s=0.01)


def first_occurrences(values: list[bytes | None]) -> list[bytes | None]:
    return list(dict.fromkeys(values))


def test_order_is_kept_with_several_in_flight_when_batches_are_refused() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        chosen = random.Random(7)
        cluster.faults.ack_delay_s = lambda: chosen.random() * 0.003
        cluster.faults.refuse_when = lambda topic, partition, asked: (
            NotEnoughReplicas("too few") if chosen.random() < 0.3 else None
        )
        with Producer(cluster.bootstrap, batch_size=1200, max_request_size=2048, **FAST) as producer:
            deliveries = send_all(producer, numbered(1500))
            producer.flush(timeout=60)
            offsets = [delivery.result(0).offset for delivery in deliveries]
        # Refused batches were not appended, so without broken streams there are no duplicates either.
        assert cluster.values("t") == numbered(1500)
        assert offsets == list(range(1500))
        assert len(cluster.requests) > 20, (
            f"only {len(cluster.requests)} requests were sent, so that few were in flight"
        )


@pytest.mark.parametrize("moment", ["drop_produce_before_append", "drop_produce_after_append"])
def test_a_broken_stream_loses_nothing_and_keeps_the_order(moment: str) -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, batch_size=1200, max_request_size=2048, **FAST) as producer:
            deliveries = []
            for part in range(5):
                setattr(cluster.faults, moment, 3)
                deliveries += send_all(producer, numbered(1000)[part * 200 : part * 200 + 200])
            producer.flush(timeout=60)
            stored = cluster.values("t")
            for delivery, value in zip(deliveries, numbered(1000), strict=True):
                assert stored[delivery.result(0).offset] == value
        assert first_occurrences(stored) == numbered(1000)
        if moment == "drop_produce_before_append":
            assert len(stored) < 1400, f"{len(stored)} records were stored: only what was in flight must be sent again"


def test_a_leader_change_is_followed_in_order() -> None:
    with FakeCluster(nodes=2) as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, batch_size=1200, max_request_size=2048, **FAST) as producer:
            values = numbered(1200)
            deliveries = []
            for part in range(6):
                deliveries += send_all(producer, values[part * 200 : part * 200 + 200])
                cluster.move_leader("t", 0, 2 if part % 2 == 0 else 1)
            producer.flush(timeout=60)
            assert [delivery.result(0).offset for delivery in deliveries] == list(range(1200))
        assert cluster.values("t") == values


def test_a_killed_leader_that_comes_back_gets_everything() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, batch_size=1200, **FAST) as producer:
            deliveries = send_all(producer, numbered(300))
            cluster.kill(1)
            deliveries += [producer.send("t", b"%06d" % number, partition=0) for number in range(300, 600)]
            time.sleep(0.1)
            cluster.restart(1)
            producer.flush(timeout=60)
            assert all(delivery.exception(0) is None for delivery in deliveries)
        assert first_occurrences(cluster.values("t")) == numbered(600)


def test_a_batch_that_the_broker_finds_too_large_is_halved_and_keeps_its_place() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.faults.max_message_bytes = 2000
        with Producer(cluster.bootstrap, batch_size=32_000, linger_ms=20) as producer:
            deliveries = [producer.send("t", value, partition=0, timestamp_ms=5) for value in numbered(3000)]
            seen: list[int] = []
            deliveries[2000].add_done_callback(lambda delivery: seen.append(delivery.result(0).offset))
            producer.flush(timeout=60)
            assert [delivery.result(0).offset for delivery in deliveries] == list(range(3000))
            assert deliveries[2999].result(0).timestamp_ms == 5
        assert cluster.values("t") == numbered(3000)
        assert seen == [2000]


def test_a_single_record_that_the_broker_finds_too_large_fails_and_the_others_go_on() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.faults.max_message_bytes = 2000
        with Producer(cluster.bootstrap, linger_ms=20) as producer:
            before = producer.send("t", b"before", partition=0)
            large = producer.send("t", b"x" * 3000, partition=0)
            after = producer.send("t", b"after", partition=0)
            with pytest.raises(MessageTooLarge, match=r"max\.message\.bytes=2000"):
                large.result(30)
            assert (before.result(30).offset, after.result(30).offset) == (0, 1)
            assert isinstance(large.exception(), MessageTooLarge)


def test_a_final_refusal_reaches_its_own_batch_only() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, linger_ms=0) as producer:
            producer.send("t", b"a", partition=0).result(30)
            cluster.faults.refuse = [CorruptRecordError("bad bytes")]
            bad = producer.send("t", b"b", partition=0)
            producer.flush(30)
            good = producer.send("t", b"c", partition=0)
            assert good.result(30).offset == 1
            with pytest.raises(CorruptRecordError, match="bad bytes"):
                bad.result(0)


def test_retries_can_be_bounded() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.faults.refuse_when = lambda *_: NotEnoughReplicas("only one")
        with Producer(cluster.bootstrap, retries=2, **FAST) as producer, pytest.raises(NotEnoughReplicas):
            producer.send("t", b"a").result(30)
        assert cluster.topics["t"].partitions[0].asked == 3


def test_delivery_timeout_names_the_last_reason_and_frees_the_memory() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.faults.refuse_when = lambda *_: NotEnoughReplicas("only one of two")
        producer = Producer(cluster.bootstrap, delivery_timeout_ms=100_000, **FAST)
        delivery = producer.send("t", b"a", partition=0)
        until(lambda: cluster.topics["t"].partitions[0].asked >= 3)
        expire(producer, delivery)
        with pytest.raises(DeliveryTimeout, match=r"delivery\.timeout\.ms=100000.*only one of two"):
            delivery.result(30)
        cluster.faults.refuse_when = lambda *_: None
        assert producer.send("t", b"b", partition=0).result(30).offset >= 0
        with producer._lock:
            assert producer._engine.accumulator.used_bytes == 0
        producer.close()


def test_an_internal_error_of_the_broker_is_retried() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.faults.refuse_when = lambda *_: InternalError("a bug")
        with Producer(cluster.bootstrap, **FAST) as producer:
            delivery = producer.send("t", b"a", partition=0)
            until(lambda: cluster.topics["t"].partitions[0].asked >= 3)
            cluster.faults.refuse_when = lambda *_: None
            assert delivery.result(30).offset >= 0


def test_an_answer_that_never_comes_breaks_the_stream_and_is_asked_for_again() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.faults.swallow_acks = 1
        with Producer(cluster.bootstrap, request_timeout_ms=100, **FAST) as producer:
            assert producer.send("t", b"a").result(30).offset >= 0
        assert set(cluster.values("t")) == {b"a"}


def test_acks_0_answers_after_the_write_without_an_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce_stream, "_LAST_WORDS_S", 60.0)
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, acks=0) as producer:
            assert producer.send("t", b"a", partition=0).result(30)[1:3] == (0, -1)
            assert producer.send_batch("t", [b"b", b"c"]).result(30)[0].base_offset == -1
        until(lambda: len(cluster.values("t")) == 3)
        assert cluster.values("t") == [b"a", b"b", b"c"]


def _is_full(stuck: Producer) -> bool:
    """Whether nothing more fits, for good.

    A batch that still lingers gives back what it reserved and did not use; ready batches fit where no new one can open.
    """
    with stuck._lock:
        lingers = bool(stuck._engine.accumulator.lingering)
    try:
        stuck.send_batch("t", [b"x" * 1000])
    except BufferExhausted:
        return not lingers
    return False


def test_back_pressure_waits_and_then_gives_up() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, buffer_memory=64_000, batch_size=4000, linger_ms=0) as producer:
            producer.send("t", b"warm").result(30)
            for _ in range(500):
                producer.send("t", b"x" * 1000)
            producer.flush(30)
            with producer._lock:
                assert producer._engine.accumulator.used_bytes == 0
        cluster.faults.refuse_when = lambda *_: NotEnoughReplicas("none")
        stuck = Producer(cluster.bootstrap, buffer_memory=20_000, batch_size=4000, **FAST)
        stuck.send("t", b"x")
        stuck._engine.options = stuck._engine.options.but(max_block_ms=150)
        with pytest.raises(BufferExhausted, match=r"max\.block\.ms=150.*buffer\.memory=20000"):
            for _ in range(100):
                stuck.send("t", b"x" * 1000)
        stuck._engine.options = stuck._engine.options.but(max_block_ms=0)
        while not _is_full(stuck):
            time.sleep(0.001)
        for _ in range(3):
            with pytest.raises(BufferExhausted):
                stuck.send("t", b"x" * 1000)
            with pytest.raises(BufferExhausted):
                stuck.send_batch("t", [b"x" * 1000])
        with stuck._lock:
            assert not stuck._engine._room_alarms, "a send that gave up must leave nothing behind"
        stuck.close(timeout=0)


def test_full_memory_does_not_wait_for_the_linger() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t", 3)
        with Producer(
            cluster.bootstrap, buffer_memory=9000, batch_size=4000, linger_ms=100_000, max_block_ms=40_000
        ) as producer:
            for number in range(60):
                producer.send("t", b"x" * 500, partition=number % 3)
        assert sum(len(cluster.values("t", partition)) for partition in range(3)) == 60


def test_close_ends_what_is_not_acknowledged() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.faults.refuse_when = lambda *_: NotEnoughReplicas("none")
        producer = Producer(cluster.bootstrap, **FAST)
        delivery = producer.send("t", b"a")
        producer.close(timeout=0.1)
        with pytest.raises(ClosedError):
            delivery.result(30)
        with pytest.raises(ClosedError):
            producer.send("t", b"b")
        with pytest.raises(ClosedError):
            producer.send_batch("t", [b"b"])
        producer.close()


def test_a_topic_that_is_not_there_is_named() -> None:
    with (
        FakeCluster() as cluster,
        Producer(cluster.bootstrap, **FAST) as producer,
        pytest.raises(UnknownTopicOrPartition, match="'nope'"),
    ):
        producer.send("nope", b"a")


def test_nobody_at_the_address_is_named() -> None:
    producer = Producer("127.0.0.1:1", max_block_ms=200, **FAST)
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1.*check"):
        producer.send("t", b"a")
    producer.close()


def test_a_deleted_topic_fails_its_records_instead_of_keeping_them() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, **FAST) as producer:
            producer.send("t", b"a").result(30)
            cluster.delete_topic("t")
            with pytest.raises(UnknownTopicOrPartition):
                producer.send("t", b"b").result(30)


def test_a_topic_made_again_is_written_to_under_its_new_id() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with Producer(cluster.bootstrap, **FAST) as producer:
            producer.send("t", b"a").result(30)
            cluster.delete_topic("t")
            cluster.create_topic("t")
            assert producer.send("t", b"b").result(30).offset == 0
        assert cluster.values("t") == [b"b"]


@pytest.mark.parametrize("acks", ["all", 0])
def test_a_leader_hint_about_a_deleted_topic_is_not_applied_to_the_next_one_of_its_name(
    acks: Literal["all", 0],
) -> None:
    """The answer is late, as one that waits for another partition's replicas; the next topic begins at epoch 0."""
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        refusals: list[RaftlogError] = [NotLeader("broker 1 leads t-0", 1, 7)]
        cluster.faults.refuse_when = lambda *_: refusals.pop() if refusals else None
        with Producer(cluster.bootstrap, acks=acks, metadata_max_age_ms=20, **PATIENT) as producer:
            cluster.hold_acks()
            first = producer.send("t", b"a")
            until(lambda: not refusals)
            cluster.delete_topic("t")
            cluster.create_topic("t")
            topics = producer._engine.metadata.view.topics
            until(lambda: "t" in topics and topics["t"].topic_id == cluster.topics["t"].topic_id)
            answered = cluster.answered
            cluster.release_acks()
            until(lambda: cluster.answered > answered)
            first.result(30)
            producer.send("t", b"b").result(30)
            until(lambda: b"b" in cluster.values("t"))
            assert topics["t"].partitions[0].leader_epoch == 0


def test_stale_leader_hint_does_not_loop() -> None:
    """A refusal that names the old leader again must not send the client in circles without a pause."""
    with FakeCluster(nodes=2) as cluster:
        cluster.create_topic("t")
        refusals = [NotLeader("not me", 1, 0) for _ in range(5)]
        cluster.faults.refuse_when = lambda *_: refusals.pop() if refusals else None
        with Producer(cluster.bootstrap, **FAST) as producer:
            assert producer.send("t", b"a").result(30).offset == 0
        assert cluster.topics["t"].partitions[0].asked == 6


def test_what_was_never_sent_is_certainly_not_in_the_log() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.move_leader("t", 0, -1)
        with Producer(cluster.bootstrap, **FAST) as producer:
            delivery = producer.send_batch("t", [b"v"])
            with pytest.raises(TimeoutError):
                delivery.result(0.1)
            until(lambda: awaited(delivery) == "t-0 has no leader (replicas 1; in sync 1)")
            producer.close(timeout=0)
        with Producer(cluster.bootstrap, delivery_timeout_ms=300, **FAST) as producer:
            delivery = producer.send_batch("t", [b"v"])
            with pytest.raises(DeliveryTimeout) as expired:
                delivery.result(30)
        assert "t-0 has no leader (replicas 1; in sync 1)" in str(expired.value)
        assert "the records are certainly not in the log, they were never sent" in str(expired.value)
        assert cluster.values("t") == []


def test_what_was_sent_once_may_be_in_the_log() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.hold_acks()
        with Producer(cluster.bootstrap, **FAST) as producer:
            delivery = producer.send("t", b"v", partition=0)
            until(lambda: len(cluster.values("t")) == 1)
            expire(producer, delivery)
            with pytest.raises(DeliveryTimeout, match="the records may or may not be in the log"):
                delivery.result(30)


def counted(producer: Producer) -> dict[str, dict[str, float]]:
    """Return the metrics once all that is done is in them."""
    with producer._lock:
        return producer.metrics()


def test_what_is_sent_again_counts_as_retried_and_what_fails_as_an_error() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.faults.refuse = [NotEnoughReplicas("too few"), NotEnoughReplicas("too few")]
        with Producer(cluster.bootstrap, retry_backoff_ms=1, retry_backoff_max_ms=5) as producer:
            producer.send_batch("t", [b"a", b"b", b"c"]).result(30)
            shown = counted(producer)
            for name in ("producer-metrics", "producer-topic-metrics.t"):
                assert shown[name]["record-retry-total"] == 6, (
                    "three records that are sent again twice must count as six retries"
                )
                assert shown[name]["record-send-total"] == 3
                assert shown[name]["record-error-total"] == 0
            cluster.faults.refuse.append(InvalidRecord("no"))
            assert producer.send("t", b"d").exception(30) is not None
            assert counted(producer)["producer-metrics"]["record-error-total"] == 1


def test_waits_for_room_and_what_is_under_way_are_seen() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        cluster.hold_acks()

        def release() -> None:
            deadline = time.monotonic() + 30
            while not producer._engine._room_alarms and time.monotonic() < deadline:
                time.sleep(0.001)
            while not any(each._waiters for each in producer._engine._room_alarms) and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.01)
            cluster.release_acks()

        releasing = threading.Thread(target=release)
        with Producer(cluster.bootstrap, batch_size=2_048, buffer_memory=2_048, linger_ms=0) as producer:
            before = producer.metrics()["producer-metrics"]
            assert (before["bufferpool-wait-time-ns-total"], before["buffer-available-bytes"]) == (0, 2_048)
            first = producer.send("t", b"x" * 900)
            assert producer.metrics()["producer-metrics"]["buffer-available-bytes"] < 2_048
            releasing.start()
            producer.send("t", b"x" * 900).result(30)
            releasing.join()
            assert first.done()
            after = counted(producer)["producer-metrics"]
            assert after["bufferpool-wait-time-ns-total"] > 1_000_000, (
                "the wait of the second record for memory must be counted"
            )
            assert after["buffer-available-bytes"] == 2_048


Row = tuple[bytes | None, int | None]
ROWS = st.lists(st.tuples(st.none() | st.sampled_from([b"a", b"b", b"c"]), st.none() | st.integers(0, 3)), max_size=40)
NAMES = itertools.count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def producers(cluster: FakeCluster) -> Iterator[list[Producer]]:
    """One with ordinary sizes, one that has to cut every few rows."""
    with (
        Producer(cluster.bootstrap, linger_ms=1) as ordinary,
        Producer(cluster.bootstrap, linger_ms=1, batch_size=1024, max_request_size=1024) as small,
    ):
        yield [ordinary, small]


@pytest.mark.parametrize("partitions", [1, 2])
def test_rows_with_and_without_a_key_keep_their_order(
    cluster: FakeCluster, producers: list[Producer], partitions: int
) -> None:
    topic = f"mixed-{partitions}"
    cluster.create_topic(topic, partitions)
    values = [b"b%d" % number for number in range(6)]
    producers[0].send_batch(topic, values, key=[b"k", None] * 3).result(30)
    for partition in range(partitions):
        found = cluster.values(topic, partition)
        assert found == [value for value in values if value in found]
    assert sum(len(cluster.values(topic, partition)) for partition in range(partitions)) == 6


@settings(max_examples=examples(1.5))
@given(st.lists(st.tuples(st.booleans(), ROWS), max_size=6), st.integers(1, 4), st.booleans(), st.booleans())
def test_order_is_kept_within_and_between_calls(
    cluster: FakeCluster,
    producers: list[Producer],
    calls: list[tuple[bool, list[Row]]],
    partitions: int,
    small: bool,
    chunked: bool,
) -> None:
    """Calls are `send_batch` of all rows, or `send` of each; keys and partitions may be null."""
    topic = f"t{next(NAMES)}"
    cluster.create_topic(topic, partitions)
    producer = producers[small]
    numbers = itertools.count()
    wanted: dict[bytes, Row] = {}
    for together, rows in calls:
        rows = [(key, partition if partition is None else partition % partitions) for key, partition in rows]
        values = [b"%06d" % next(numbers) for _ in rows]
        wanted.update(zip(values, rows, strict=True))
        if not together:
            for value, (key, partition) in zip(values, rows, strict=True):
                producer.send(topic, value, key, partition)
            continue
        table = pa.table(
            {
                "value": pa.array(values, pa.binary()),
                "key": pa.array([key for key, _ in rows], pa.binary()),
                "partition": pa.array([partition for _, partition in rows], pa.int32()),
            }
        )
        if chunked and len(rows) > 1:
            middle = len(rows) // 2
            table = pa.concat_tables([table.slice(0, middle), table.slice(middle)])
        producer.send_batch(topic, table)
    producer.flush(30)
    found = [cluster.values(topic, partition) for partition in range(partitions)]
    assert sorted(str(value) for values in found for value in values) == sorted(map(str, wanted))
    for index, stored in enumerate(found):
        numbered = [value for value in stored if value is not None]
        assert numbered == sorted(numbered), "the values of a partition must be in the order of the input"
        for value in numbered:
            key, partition = wanted[value]
            if partition is not None:
                assert index == partition
            elif key is not None:
                assert index == key_hash(key) % partitions


def test_rows_without_a_key_still_take_turns_among_rows_that_have_one(cluster: FakeCluster) -> None:
    cluster.create_topic("turns", 4)
    count = 60_000
    table = pa.table(
        {"value": [bytes(100)] * count, "key": [b"k" if number % 10 == 0 else None for number in range(count)]}
    )
    with Producer(cluster.bootstrap, batch_size=16 << 10) as producer:
        producer.send_batch("turns", table).result(30)
    held = [len(cluster.values("turns", partition)) for partition in range(4)]
    assert sum(held) == count
    assert min(held) > count // 10, held
