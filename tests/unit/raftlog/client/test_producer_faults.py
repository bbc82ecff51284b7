"""The producer against a scripted broker: nothing acknowledged is lost, order stays, whatever goes wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from raftlog import Delivery, Producer
from raftlog._client import produce_stream
from raftlog._delivery import awaited
from raftlog.errors import (
    BrokerUnavailable,
    BufferExhausted,
    ClosedError,
    CorruptRecordError,
    DeliveryTimeout,
    MessageTooLarge,
    NotEnoughReplicas,
    NotLeader,
    UnknownTopicOrPartition,
)
from tests.support.deliveries import expire
from tests.support.fake_broker import FakeCluster

FAST: dict[str, Any] = {"linger_ms": 0.5, "retry_backoff_ms": 1, "retry_backoff_max_ms": 20}


def numbered(count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(count)]


def send_all(producer: Producer, values: list[bytes], pause_every: int = 40) -> list[Delivery]:
    """Send in many small batches, so that several are in flight."""
    deliveries = []
    for index, value in enumerate(values):
        deliveries.append(producer.send("t", value, partition=0))
        if index % pause_every == pause_every - 1:
            time.sleep(0.001)
    return deliveries


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
        assert len(cluster.requests) > 20, "several requests were in flight"


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
            assert len(stored) < 1400, "only what was in flight is sent again"


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
        stuck._engine.options = replace(stuck._engine.options, max_block_ms=150)
        with pytest.raises(BufferExhausted, match=r"max\.block\.ms=150.*buffer\.memory=20000"):
            for _ in range(100):
                stuck.send("t", b"x" * 1000)
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
