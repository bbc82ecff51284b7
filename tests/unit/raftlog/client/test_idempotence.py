"""The idempotent producer against a scripted broker that knows batches again: every record once, in order."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from raftlog import Delivery, Producer
from raftlog._client import producer as producer_ids
from raftlog._client.options import ProducerOptions
from raftlog._core.accumulator import LAST_EPOCH, SEQUENCES
from raftlog.errors import (
    CorruptRecordError,
    DeliveryTimeout,
    DuplicateSequence,
    InvalidConfig,
    InvalidProducerEpoch,
    LeaderNotAvailable,
    NotEnoughReplicas,
    OutOfOrderSequence,
    RaftlogError,
    UnsupportedVersion,
)
from raftlog.format import parse_header
from raftlog.v1 import transaction_pb2_grpc
from tests.support import patience
from tests.support.deliveries import expire
from tests.support.fake_broker import FakeCluster

FAST: dict[str, Any] = {"linger_ms": 0.5, "retry_backoff_ms": 1, "retry_backoff_max_ms": 20}
SMALL: dict[str, Any] = {"batch_size": 1200, "max_request_size": 2048, **FAST}


LONG_S = 120
SOON_S = 40.0
"""Far below `LONG_S`, and far above what anything takes here."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is only slow to give an id is not given up, and no other one gives one as well."""
    for name in ("_HEDGE_S", "_ADDRESS_TIMEOUT_S"):
        monkeypatch.setattr(producer_ids, name, LONG_S)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(nodes=2) as cluster:
        cluster.create_topic("t")
        yield cluster


def numbered(count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(count)]


def send_all(producer: Producer, values: list[bytes]) -> list[Delivery]:
    deliveries = []
    for index, value in enumerate(values):
        deliveries.append(producer.send("t", value, partition=0))
        if index % 40 == 39:
            time.sleep(0.001)
    return deliveries


until = partial(patience.until, within_s=SOON_S, pause_s=0.01)


def numbers(cluster: FakeCluster) -> list[tuple[int, int, int]]:
    """Return (producer id, epoch, base sequence) of each batch in the log."""
    headers = [parse_header(batch) for batch in cluster.topics["t"].partitions[0].batches]
    return [(header.producer_id, header.producer_epoch, header.base_sequence) for header in headers]


# When


def test_a_producer_is_idempotent_by_default(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, **FAST) as producer:
        producer.send("t", b"a").result(30)
        producer.send("t", b"b").result(30)
    assert numbers(cluster) == [(1001, 0, 0), (1001, 0, 1)]


@pytest.mark.parametrize(
    "options",
    [{"acks": 0}, {"acks": 1}, {"retries": 0}, {"max_in_flight_requests_per_connection": 6}],
    ids=lambda options: next(iter(options)),
)
def test_what_contradicts_idempotence_turns_it_off_unless_it_was_asked_for(options: dict[str, Any]) -> None:
    assert ProducerOptions.make({}, {}).enable_idempotence
    assert not ProducerOptions.make({}, options).enable_idempotence
    name = next(iter(options)).replace("_", ".")
    with pytest.raises(InvalidConfig, match=f"enable.idempotence=true contradicts {name}="):
        ProducerOptions.make({"enable.idempotence": True}, options)
    assert not ProducerOptions.make({}, {"enable_idempotence": False, **options}).enable_idempotence


def test_without_it_nothing_is_numbered_and_no_id_is_asked_for(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, enable_idempotence=False, **FAST) as producer:
        producer.send("t", b"a").result(30)
    assert numbers(cluster) == [(-1, -1, -1)]
    assert cluster.last_producer_id == 1000


def test_all_partitions_share_one_id(cluster: FakeCluster) -> None:
    cluster.create_topic("wide", 4)
    with Producer(cluster.bootstrap, **FAST) as producer:
        for part in range(4):
            producer.send("wide", b"a", partition=part).result(30)
    ids = {parse_header(part.batches[0])[10:13] for part in cluster.topics["wide"].partitions}
    assert ids == {(1001, 0, 0)}


@pytest.mark.parametrize("error", [asyncio.InvalidStateError, KeyError])
def test_whatever_happens_while_an_id_is_asked_for_it_is_asked_for_again(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """`grpc.aio` raises `asyncio.InvalidStateError` where a call ends at the wrong moment."""
    asked = 0

    stub: Any = transaction_pb2_grpc.TransactionStub

    def failing_stub(channel: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked <= 2:
            raise error("a call that has ended")
        return stub(channel)

    monkeypatch.setattr(transaction_pb2_grpc, "TransactionStub", failing_stub)
    with Producer(cluster.bootstrap, **FAST) as producer:
        producer.send("t", b"a").result(30)
    assert asked == 3
    assert numbers(cluster) == [(1001, 0, 0)]


# Exactly one copy


@pytest.mark.parametrize("moment", ["drop_produce_before_append", "drop_produce_after_append"])
def test_broken_streams_and_lost_answers_double_nothing(cluster: FakeCluster, moment: str) -> None:
    values = numbered(1000)
    with Producer(cluster.bootstrap, **SMALL) as producer:
        deliveries = []
        for part in range(5):
            setattr(cluster.faults, moment, 3 if part else 1)
            deliveries += send_all(producer, values[part * 200 : part * 200 + 200])
        producer.flush(timeout=60)
        assert [delivery.result(0).offset for delivery in deliveries] == list(range(1000))
    assert cluster.values("t") == values
    if moment == "drop_produce_after_append":
        assert cluster.topics["t"].partitions[0].duplicates > 0


def test_answers_that_never_come_double_nothing(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, request_timeout_ms=50, **SMALL) as producer:
        producer.send("t", b"000000", partition=0).result(30)
        cluster.faults.swallow_acks = 2
        deliveries = send_all(producer, numbered(200)[1:])
        producer.flush(timeout=60)
        assert [delivery.result(0).offset for delivery in deliveries] == list(range(1, 200))
    assert cluster.values("t") == numbered(200)


def test_refusals_leader_changes_and_lost_answers_at_once_double_nothing(cluster: FakeCluster) -> None:
    chance = random.Random(11)
    values = numbered(2000)
    cluster.faults.ack_delay_s = lambda: chance.random() * 0.003
    cluster.faults.refuse_when = lambda *_: NotEnoughReplicas("too few") if chance.random() < 0.05 else None
    with Producer(cluster.bootstrap, **SMALL) as producer:
        deliveries = []
        for part in range(10):
            cluster.faults.drop_produce_after_append = chance.choice((0, 2, 4))
            deliveries += send_all(producer, values[part * 200 : part * 200 + 200])
            cluster.move_leader("t", 0, chance.choice((1, 2)))
        producer.flush(timeout=60)
        assert [delivery.result(0).offset for delivery in deliveries] == list(range(2000))
    assert cluster.values("t") == values


def test_what_a_frozen_leader_had_appended_is_there_once(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, request_timeout_ms=LONG_S * 1000, **SMALL) as producer:
        producer.send("t", b"before", partition=0).result(30)
        cluster.faults.ack_delay_s = lambda: 0.05
        values = numbered(300)
        deliveries = send_all(producer, values[:150])
        time.sleep(0.03)  # the first requests are appended, their answers are on the way
        cluster.freeze(1)
        deliveries += send_all(producer, values[150:])
        cluster.move_leader("t", 0, 2)
        for delivery in deliveries:
            delivery.result(SOON_S)
        cluster.thaw(1)
    assert cluster.values("t") == [b"before", *values]


def test_a_replaced_leader_is_not_waited_for(cluster: FakeCluster) -> None:
    """Its last words may be missed: what it has appended is recognised."""
    with Producer(cluster.bootstrap, linger_ms=0, request_timeout_ms=LONG_S * 1000) as producer:
        producer.send("t", b"before", partition=0).result(30)
        cluster.faults.ack_delay_s = lambda: LONG_S
        delivery = producer.send("t", b"a", partition=0)
        until(lambda: len(cluster.values("t")) == 2)
        cluster.faults.ack_delay_s = lambda: 0.0
        cluster.move_leader("t", 0, 2)
        producer._thread.loop.call_soon_threadsafe(producer._engine.metadata.request_refresh)
        delivery.result(SOON_S)
    assert cluster.values("t") == [b"before", b"a"]


def test_a_batch_that_is_halved_and_lost_is_there_once(cluster: FakeCluster) -> None:
    cluster.faults.max_message_bytes = 2000
    with Producer(cluster.bootstrap, batch_size=32_000, linger_ms=20, retry_backoff_ms=1) as producer:
        cluster.faults.drop_produce_after_append = 6
        deliveries = [producer.send("t", value, partition=0, timestamp_ms=5) for value in numbered(3000)]
        producer.flush(timeout=60)
        assert [delivery.result(0).offset for delivery in deliveries] == list(range(3000))
    assert cluster.values("t") == numbered(3000)


def test_no_more_than_five_batches_of_a_partition_are_in_flight(cluster: FakeCluster) -> None:
    cluster.hold_acks()
    with Producer(cluster.bootstrap, batch_size=800, linger_ms=0) as producer:
        send_all(producer, numbered(400))
        until(lambda: sum(batches for _, batches in cluster.requests) >= 5)
        time.sleep(0.15)
        assert sum(batches for _, batches in cluster.requests) == 5
        cluster.release_acks()
        producer.flush(timeout=60)
    assert cluster.values("t") == numbered(400)


# Gaps


def test_after_a_final_refusal_the_numbers_begin_anew(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, linger_ms=0) as producer:
        producer.send("t", b"a", partition=0).result(30)
        cluster.faults.refuse = [CorruptRecordError("bad bytes")]
        with pytest.raises(CorruptRecordError):
            producer.send("t", b"b", partition=0).result(30)
        assert producer.send("t", b"c", partition=0).result(30).offset == 1
    assert numbers(cluster) == [(1001, 0, 0), (1001, 1, 0)]


def test_after_a_timeout_the_rest_goes_on_in_order(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, **FAST) as producer:
        producer.send("t", b"a", partition=0).result(30)
        cluster.faults.refuse_when = lambda *_: NotEnoughReplicas("one of two")
        delivery = producer.send("t", b"b", partition=0)
        until(lambda: cluster.topics["t"].partitions[0].asked >= 3)
        expire(producer, delivery)
        with pytest.raises(DeliveryTimeout):
            delivery.result(30)
        streams = producer._engine._streams
        until(lambda: not any(stream.requests_in_flight for stream in streams.copy().values()))
        cluster.faults.refuse_when = lambda *_: None
        assert producer.send("t", b"c", partition=0).result(30).offset == 1
    assert cluster.values("t") == [b"a", b"c"]


def test_a_timeout_of_what_is_in_the_log_leaves_no_gap(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, **FAST) as producer:
        producer.send("t", b"a", partition=0).result(30)
        cluster.faults.swallow_acks = 1
        delivery = producer.send("t", b"b", partition=0)
        until(lambda: len(cluster.values("t")) == 2)
        expire(producer, delivery)
        with pytest.raises(DeliveryTimeout, match="may or may not be in the log"):
            delivery.result(30)
        producer.send("t", b"c", partition=0).result(30)
    assert numbers(cluster) == [(1001, 0, 0), (1001, 0, 1), (1001, 0, 2)]


def test_a_leader_that_cannot_tell_yet_is_asked_again(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, **FAST) as producer:
        producer.send("t", b"a", partition=0).result(30)
        cluster.faults.refuse = [LeaderNotAvailable("not confirmed"), LeaderNotAvailable("not confirmed")]
        producer.send("t", b"b", partition=0).result(30)
    assert numbers(cluster) == [(1001, 0, 0), (1001, 0, 1)]


def forget(cluster: FakeCluster) -> None:
    part = cluster.topics["t"].partitions[0]

    def renew() -> None:
        part.producers = type(part.producers)()

    cluster.call(renew)


def test_a_broker_that_has_forgotten_the_producer_gets_the_next_epoch(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """KIP-360: UNKNOWN_PRODUCER_ID is no error of the application."""
    caplog.set_level(logging.INFO, "raftlog")
    with Producer(cluster.bootstrap, **FAST) as producer:
        producer.send("t", b"a", partition=0).result(30)
        forget(cluster)
        producer.send("t", b"b", partition=0).result(30)
    assert numbers(cluster) == [(1001, 0, 0), (1001, 1, 0)]
    assert "producer.id.expiration.ms" in caplog.text


def test_lost_records_are_said_to_be_lost(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    part = cluster.topics["t"].partitions[0]
    with Producer(cluster.bootstrap, **FAST) as producer:
        producer.send("t", b"a", partition=0).result(30)
        before = part.producers.copy()
        producer.send("t", b"b", partition=0).result(30)

        def lose() -> None:
            part.producers = before
            part.batches.pop()

        cluster.call(lose)
        producer.send("t", b"c", partition=0).result(30)
    assert "not in the log any more" in caplog.text
    assert "unclean.leader.election.enable" in caplog.text
    assert cluster.values("t") == [b"a", b"c"]


def test_what_was_appended_long_ago_is_acknowledged_without_an_offset(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, **FAST) as producer:
        producer.send("t", b"a", partition=0).result(30)
        cluster.faults.refuse = [DuplicateSequence("long ago")]
        assert producer.send("t", b"b", partition=0).result(30).offset == -1
        with producer._lock:
            assert not producer._engine.accumulator.incomplete


def test_an_id_that_somebody_else_uses_is_replaced(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.create_topic("other")
    with Producer(cluster.bootstrap, **FAST) as producer:
        producer.send("t", b"a", partition=0).result(30)
        producer.send("other", b"a", partition=0).result(30)
        cluster.faults.refuse = [InvalidProducerEpoch("epoch 5 has written")]
        producer.send("t", b"b", partition=0).result(30)
        producer.send("other", b"b", partition=0).result(30)
    assert numbers(cluster) == [(1001, 0, 0), (1002, 0, 0)]
    assert cluster.values("other") == [b"a", b"b"]
    assert "another producer uses producer id" in caplog.text


def test_after_the_last_epoch_comes_another_id(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, **FAST) as producer:
        producer.send("t", b"a", partition=0).result(30)
        numbering = producer._engine.topics["t"].queues[0].numbering
        assert numbering is not None
        numbering.upcoming = numbering.upcoming._replace(producer_epoch=LAST_EPOCH)
        numbering.repredict(0)
        producer._engine.ids.retire(1001)  # type: ignore[union-attr] # it is idempotent
        producer.send("t", b"b", partition=0).result(30)
        producer.send("t", b"c", partition=0).result(30)
    assert numbers(cluster) == [(1001, 0, 0), (1002, 0, 0), (1002, 0, 1)]


def test_sequences_wrap_around(cluster: FakeCluster) -> None:
    part = cluster.topics["t"].partitions[0]
    with Producer(cluster.bootstrap, **SMALL) as producer:
        producer.send("t", b"first", partition=0).result(30)
        numbering = producer._engine.topics["t"].queues[0].numbering
        assert numbering is not None
        numbering.upcoming = numbering.upcoming._replace(base_sequence=SEQUENCES - 100)
        numbering.repredict(0)

        def move_on() -> None:
            state = part.producers.get(1001)
            assert state is not None
            moved = state.batches[0]._replace(base_sequence=SEQUENCES - 101, last_sequence=SEQUENCES - 101)
            part.producers = type(part.producers)(None, [(1001, state._replace(batches=(moved,)))])

        cluster.call(move_on)
        cluster.faults.drop_produce_after_append = 3
        deliveries = send_all(producer, numbered(400))
        producer.flush(30)
        assert [delivery.result(0).offset for delivery in deliveries] == list(range(1, 401))
    assert {epoch for _, epoch, _ in numbers(cluster)} == {0}


def test_a_topic_that_was_thought_gone_does_not_take_new_records_for_old_ones(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, metadata_max_age_ms=50, **FAST) as producer:
        for value in numbered(3):
            producer.send("t", value, partition=0).result(30)
        with producer._lock:
            producer._engine._drop_topic("t")
        producer.send("t", b"again", partition=0).result(30)
    assert cluster.values("t") == [*numbered(3), b"again"]
    assert numbers(cluster)[-1] == (1002, 0, 0)


def test_a_topic_that_is_made_again_is_begun_anew(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, metadata_max_age_ms=50, **FAST) as producer:
        producer.send("t", b"old", partition=0).result(30)
        cluster.delete_topic("t")
        cluster.create_topic("t")
        assert producer.send("t", b"new", partition=0).result(30).offset == 0
    assert cluster.values("t") == [b"new"]


# The id


def test_the_next_broker_is_asked_where_one_is_slow(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_ids, "_HEDGE_S", 0.2)
    cluster.faults.producer_ids_delay_s = {1: LONG_S}
    with Producer(cluster.bootstrap, **FAST) as producer:
        producer.send("t", b"a", partition=0).result(SOON_S)


def test_an_id_that_is_not_to_be_had_yet_is_asked_for_again(cluster: FakeCluster) -> None:
    cluster.faults.refuse_producer_ids = [LeaderNotAvailable("no controller") for _ in range(5)]
    with Producer(cluster.bootstrap, **FAST) as producer:
        deliveries = send_all(producer, numbered(50))
        producer.flush(30)
        assert [delivery.result(0).offset for delivery in deliveries] == list(range(50))
    assert numbers(cluster)[0] == (1001, 0, 0)


def test_without_an_id_the_timeout_says_so(cluster: FakeCluster) -> None:
    cluster.faults.refuse_producer_ids = [LeaderNotAvailable("there is no controller") for _ in range(10_000)]
    producer = Producer(cluster.bootstrap, **FAST)
    delivery = producer.send("t", b"a", partition=0)
    ids = producer._engine.ids
    assert isinstance(ids, producer_ids.ProducerIds)
    until(lambda: ids.last_error is not None)
    expire(producer, delivery)
    with pytest.raises(DeliveryTimeout, match=r"never sent; last error: there is no controller"):
        delivery.result(30)
    producer.close(0)
    assert cluster.values("t") == []


def test_a_cluster_too_old_for_it_is_named_at_once(cluster: FakeCluster) -> None:
    cluster.faults.refuse_producer_ids = [UnsupportedVersion("no such call") for _ in range(4)]
    with Producer(cluster.bootstrap, **FAST) as producer:
        with pytest.raises(UnsupportedVersion, match=r"enable\.idempotence=false"):
            producer.send("t", b"a", partition=0).result(30)
        cluster.faults.refuse_producer_ids = []
        producer.send("t", b"b", partition=0).result(30)  # it was updated meanwhile
    assert cluster.values("t") == [b"b"]


def test_denials_without_end_are_bounded_by_the_delivery_timeout(cluster: FakeCluster) -> None:
    cluster.faults.refuse_when = lambda *_: OutOfOrderSequence("always")
    part = cluster.topics["t"].partitions[0]
    began = time.monotonic()
    with Producer(cluster.bootstrap, linger_ms=0, retry_backoff_ms=20) as producer:
        delivery = producer.send("t", b"a", partition=0)
        time.sleep(0.3)
        until(lambda: part.asked >= 3)
        expire(producer, delivery)
        with pytest.raises(DeliveryTimeout, match="always"):
            delivery.result(30)
    assert part.asked < 40 * max(1.0, time.monotonic() - began), (
        f"the batch was sent {part.asked} times, without pauses"
    )


@pytest.mark.parametrize("error", [RaftlogError, OutOfOrderSequence])
def test_sequence_errors_never_reach_the_application(cluster: FakeCluster, error: type[RaftlogError]) -> None:
    """What numbers are for is the producer's own business."""
    cluster.faults.refuse = [OutOfOrderSequence("gap")] * 2
    with Producer(cluster.bootstrap, **FAST) as producer:
        assert producer.send("t", b"a", partition=0).exception(30) is None


def test_a_leader_that_was_given_up_while_it_was_being_reached_can_be_used_again(cluster: FakeCluster) -> None:
    """A call that is cancelled before there is a connection must not hold its stream for ever."""
    with Producer(cluster.bootstrap, linger_ms=0) as producer:
        producer.send("t", b"before", partition=0).result(30)
        cluster.kill(1)
        with socket.create_server(("127.0.0.1", cluster.ports[1])):  # takes connections, and says nothing
            delivery = producer.send("t", b"a", partition=0)
            time.sleep(0.6)
            cluster.move_leader("t", 0, 2)
            delivery.result(30)
        cluster.restart(1)
        cluster.move_leader("t", 0, 1)
        producer.send("t", b"b", partition=0).result(30)
    assert cluster.values("t") == [b"before", b"a", b"b"]
