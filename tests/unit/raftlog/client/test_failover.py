"""Leaders that die, freeze, hand over or are deposed: clients go on with the next one, and notice it as latency."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from raftlog import Consumer, Delivery, Producer, TopicPartition
from raftlog._client import metadata
from raftlog._client import producer as producer_ids
from raftlog._core.backoff import Pace
from raftlog.errors import (
    FencedLeaderEpoch,
    LeaderNotAvailable,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeader,
    RaftlogError,
    RequestTimedOut,
    UnknownLeaderEpoch,
)
from raftlog.format import Attributes, Columns, encode_batch, pack_stamp, parse_header
from tests.support import patience
from tests.support.fake_broker import FakeCluster

T0 = TopicPartition("t", 0)
LONG_MS = 120_000
SLOW_RETRY: dict[str, Any] = {
    "retry_backoff_ms": LONG_MS,
    "retry_backoff_max_ms": LONG_MS,
    "request_timeout_ms": LONG_MS,
    "metadata_max_age_ms": 300_000,
}
"""With these a client that waits for a retry, or for an unanswered request, does not finish in time."""
SOON_S = 40.0
"""Far below `LONG_MS`, and far above what it takes, some hundred milliseconds."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent broker is not given up before `LONG_MS`, either."""
    for module in (metadata, producer_ids):
        monkeypatch.setattr(module, "_ADDRESS_TIMEOUT_S", LONG_MS / 1000)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(nodes=3) as cluster:
        cluster.create_topic("t")
        yield cluster


def batch(*values: bytes) -> bytes:
    return encode_batch(Columns(pa.array(values, pa.binary())), 1000)


def read(consumer: Consumer, count: int, timeout_s: float = SOON_S) -> list[bytes | None]:
    found: list[bytes | None] = []
    deadline = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < deadline:
        found += [record.value for record in consumer.poll(0.05)]
    return found


def seconds(work: Callable[[], object]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


until = partial(patience.until, within_s=SOON_S, pause_s=0.01)


# Producers


def test_a_frozen_leader_is_left_as_soon_as_another_one_leads(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, linger_ms=0, **SLOW_RETRY) as producer:
        producer.send("t", b"before").result(30)
        cluster.freeze(1)
        deliveries = [producer.send("t", b"%d" % number) for number in range(5)]
        time.sleep(0.7)
        assert not any(delivery.done() for delivery in deliveries)
        cluster.move_leader("t", 0, 2)
        for delivery in deliveries:
            delivery.result(SOON_S)
        cluster.thaw(1)
        producer.send("t", b"after").result(30)
    assert cluster.values("t") == [b"before", *(b"%d" % number for number in range(5)), b"after"]


def test_what_a_frozen_leader_had_appended_may_be_twice_and_stays_in_order(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, linger_ms=0, batch_size=100, **SLOW_RETRY) as producer:
        producer.send("t", b"before").result(30)
        cluster.faults.ack_delay_s = lambda: 0.05
        values = [b"%03d" % number for number in range(100)]
        deliveries: list[Delivery] = []
        for number, value in enumerate(values):
            deliveries.append(producer.send("t", value))
            if number == 50:
                time.sleep(0.03)  # the first requests are appended, their answers are on the way
                cluster.freeze(1)
        cluster.move_leader("t", 0, 2)
        for delivery in deliveries:
            delivery.result(SOON_S)
    assert list(dict.fromkeys(cluster.values("t"))) == [b"before", *values]


def test_a_leader_that_comes_back_after_it_was_given_up_gets_its_batches_once_more(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, linger_ms=0, **SLOW_RETRY) as producer:
        producer.send("t", b"before").result(30)
        cluster.freeze(1)
        delivery = producer.send("t", b"a")
        time.sleep(0.7)
        cluster.move_leader("t", 0, 2)
        delivery.result(SOON_S)
        cluster.thaw(1)
        cluster.move_leader("t", 0, 1)
        assert producer.send("t", b"b").result(SOON_S).offset == 2
        cluster.freeze(1)
        delivery = producer.send("t", b"c")
        time.sleep(0.7)
        cluster.move_leader("t", 0, 3)
        assert delivery.result(SOON_S).offset == 3
    assert cluster.values("t") == [b"before", b"a", b"b", b"c"]


def test_an_answer_on_its_way_is_waited_for_when_leadership_is_handed_over(cluster: FakeCluster) -> None:
    """To send again at once what the old leader has appended would double it."""
    cluster.faults.ack_delay_s = lambda: 0.05
    with Producer(cluster.bootstrap, linger_ms=0) as producer:
        producer.send("t", b"before").result(30)
        for turn in range(8):
            delivery = producer.send("t", b"%d" % turn)
            time.sleep(0.02)
            cluster.move_leader("t", 0, turn % 3 + 1)
            producer._thread.loop.call_soon_threadsafe(producer._engine.metadata.request_refresh)
            delivery.result(SOON_S)
    assert cluster.values("t") == [b"before", *(b"%d" % turn for turn in range(8))]


@pytest.mark.parametrize(
    "error",
    [
        NotLeader("not me"),
        NotLeader("not me", 3, 1),
        FencedLeaderEpoch("over"),
        LeaderNotAvailable("nobody"),
    ],
    ids=lambda error: f"{type(error).__name__}-{getattr(error, 'leader_id', '')}",
)
def test_a_refusal_costs_no_pause_once_another_leader_is_known(cluster: FakeCluster, error: RaftlogError) -> None:
    with Producer(cluster.bootstrap, linger_ms=0, **SLOW_RETRY) as producer:
        producer.send("t", b"before").result(30)

        def refuse_and_move() -> None:
            part = cluster.topics["t"].partitions[0]
            part.leader_epoch += 1
            part.leader = 3
            cluster.metadata_offset += 1
            cluster.find = refused_once(cluster, error)  # type: ignore[method-assign] # the refusal comes first

        cluster.call(refuse_and_move)
        producer.send("t", b"a").result(SOON_S)
    assert cluster.values("t") == [b"before", b"a"]


def refused_once(cluster: FakeCluster, error: RaftlogError) -> Any:
    """Refuse the next batch with this error if it comes to the former leader."""
    original = type(cluster).find.__get__(cluster)

    def find(node: int, topic_id: bytes, index: int, leader_epoch: int, **options: Any) -> Any:
        cluster.find = original  # type: ignore[method-assign] # back to what it was
        if node == 1:
            raise error
        return original(node, topic_id, index, leader_epoch, **options)

    return find


@pytest.mark.parametrize(
    "error",
    [
        NotLeader("somebody else"),
        FencedLeaderEpoch("over"),
        UnknownLeaderEpoch("not heard of it"),
        LeaderNotAvailable("nobody"),
        NotEnoughReplicas("one of two"),
        NotEnoughReplicasAfterAppend("one of two"),
        RequestTimedOut("too slow"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_refusal_that_passes_is_no_error_of_the_application(cluster: FakeCluster, error: RaftlogError) -> None:
    cluster.faults.refuse = [error, error, error]
    with Producer(cluster.bootstrap, linger_ms=0, batch_size=100) as producer:
        values = [b"%03d" % number for number in range(60)]
        for delivery in [producer.send("t", value) for value in values]:
            delivery.result(30)
    assert list(dict.fromkeys(cluster.values("t"))) == values


def test_a_leader_that_is_elected_late_is_found_soon(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, linger_ms=0, **SLOW_RETRY) as producer:
        producer.send("t", b"before").result(30)
        cluster.move_leader("t", 0, -1)
        began = time.monotonic()
        delivery = producer.send("t", b"a")
        time.sleep(1.0)
        until(lambda: len(cluster.metadata_asked) >= 5)
        asked = len(cluster.metadata_asked)
        assert asked <= 60 * (time.monotonic() - began), (
            f"the metadata was asked for {asked} times, but the pauses must grow"
        )
        assert not delivery.done()
        cluster.move_leader("t", 0, 3)
        delivery.result(SOON_S)
    assert cluster.values("t") == [b"before", b"a"]


def test_a_dead_leader_is_replaced_soon(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, linger_ms=0, **SLOW_RETRY) as producer:
        producer.send("t", b"before").result(30)
        cluster.kill(1)
        delivery = producer.send("t", b"a")
        time.sleep(1.0)
        cluster.move_leader("t", 0, 2)
        delivery.result(SOON_S)


def test_a_queue_that_nobody_refuses_does_not_wait_behind_one_that_is(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retry pace follows the partition that has waited least: a long-lost one does not slow the others down."""
    cluster.create_topic("gone")
    cluster.move_leader("gone", 0, -1)
    waited_ms: list[float] = []
    pause_ms = Pace.pause_ms

    def noted(pace: Pace, missing_ms: float) -> float:
        waited_ms.append(missing_ms)
        return pause_ms(pace, missing_ms)

    monkeypatch.setattr(Pace, "pause_ms", noted)
    with Producer(cluster.bootstrap, linger_ms=0) as producer:
        producer.send("t", b"before").result(30)
        producer.send("gone", b"never")
        time.sleep(2.5)
        cluster.move_leader("t", 0, -1)
        waited_ms.clear()
        began = time.monotonic()
        delivery = producer.send("t", b"a")
        # The other one has waited 2.5 s longer than that.
        until(lambda: bool(waited_ms) and min(waited_ms) <= (time.monotonic() - began) * 1000)
        cluster.move_leader("t", 0, 2)
        delivery.result(SOON_S)
        producer.close(timeout=0)


# Metadata


def test_a_silent_broker_is_not_waited_for(cluster: FakeCluster) -> None:
    cluster.freeze(1)
    cluster.move_leader("t", 0, 2)
    patient: dict[str, Any] = {"request_timeout_ms": LONG_MS}
    with Producer(
        cluster.bootstrap, linger_ms=0, max_block_ms=LONG_MS, **patient
    ) as producer:  # the first address is that of the frozen one
        assert seconds(lambda: producer.send("t", b"a").result(SOON_S)) < SOON_S
    with Consumer(
        cluster.bootstrap, auto_offset_reset="earliest", default_api_timeout_ms=LONG_MS, **patient
    ) as consumer:
        assert seconds(lambda: consumer.subscribe("t")) < SOON_S
        assert read(consumer, 1) == [b"a"]


def test_only_a_silent_broker_is_waited_for(cluster: FakeCluster) -> None:
    bootstrap = f"127.0.0.1:{cluster.ports[1]}"
    cluster.freeze(1)
    thawing = threading.Timer(0.6, cluster.thaw, [1])
    thawing.start()
    with Producer(bootstrap, linger_ms=0) as producer:
        producer.send("t", b"a").result(30)
    thawing.join()


def test_a_broker_that_is_behind_takes_nothing_back(cluster: FakeCluster) -> None:
    """KIP-232: stale metadata must not send a client back to a former leader, nor lose it a topic."""
    cluster.fall_behind(1)
    cluster.create_topic("new")
    cluster.move_leader("t", 0, 2)
    with Producer(cluster.bootstrap, linger_ms=0, metadata_max_age_ms=10) as producer:
        producer.send("t", b"a").result(30)
        producer.send("new", b"a", partition=0).result(30)
        view = producer._engine.metadata.view
        looks = 0
        deadline = time.monotonic() + SOON_S
        while looks < 50 or (1 not in cluster.metadata_asked and time.monotonic() < deadline):
            looks += 1
            time.sleep(0.01)
            assert view.topics["t"].partitions[0].leader == 2
            assert "new" in view.topics
    assert 1 in cluster.metadata_asked


def test_a_leader_that_is_cut_off_from_the_others_is_not_believed(cluster: FakeCluster) -> None:
    """It answers questions, knows of no other leader, and acknowledges nothing."""
    with Producer(cluster.bootstrap, linger_ms=0, **SLOW_RETRY) as producer:
        producer.send("t", b"before").result(30)
        cluster.fall_behind(1)
        cluster.faults.swallow_acks = 1 << 30
        delivery = producer.send("t", b"a")
        time.sleep(0.7)

        def depose() -> None:
            cluster.faults.swallow_acks = 0
            part = cluster.topics["t"].partitions[0]
            part.leader, part.leader_epoch = 2, 1
            cluster.metadata_offset += 1

        cluster.call(depose)
        delivery.result(SOON_S)


# Consumers


def test_a_consumer_leaves_a_frozen_leader(cluster: FakeCluster) -> None:
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", metadata_max_age_ms=300_000) as consumer:
        consumer.subscribe("t")
        cluster.append("t", batch(b"before"))
        assert read(consumer, 1) == [b"before"]
        cluster.freeze(1)
        assert consumer.poll(1.5) == []
        cluster.move_leader("t", 0, 2)
        cluster.append("t", batch(b"a"))
        assert read(consumer, 1) == [b"a"]
        assert consumer.position(T0) == 2
        cluster.thaw(1)
        cluster.append("t", batch(b"b"))
        assert read(consumer, 1) == [b"b"]
        assert consumer.poll(0.1) == []


def test_a_consumer_leaves_a_leader_that_has_become_mute(cluster: FakeCluster) -> None:
    """Cut off from the others it answers questions with what it last knew, and has no records any more."""
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", metadata_max_age_ms=300_000) as consumer:
        consumer.subscribe("t")
        cluster.append("t", batch(b"before"))
        assert read(consumer, 1) == [b"before"]
        cluster.fall_behind(1)

        def depose_quietly() -> None:
            part = cluster.topics["t"].partitions[0]
            part.leader, part.leader_epoch = 2, 1
            cluster.metadata_offset += 1

        cluster.call(depose_quietly)
        deadline = time.monotonic() + 30
        while (2, 2) not in [(node, len(cluster.subscribed)) for node, _ in cluster.subscribed[-1:]]:
            assert consumer.poll(0.05) == []
            assert time.monotonic() < deadline
        cluster.append("t", batch(b"a"))
        assert read(consumer, 1) == [b"a"]


def test_a_start_is_looked_up_at_the_leader_that_answers(cluster: FakeCluster) -> None:
    cluster.append("t", batch(b"a"))
    patient: dict[str, Any] = {"default_api_timeout_ms": LONG_MS, "request_timeout_ms": LONG_MS}
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **patient) as consumer:
        assert consumer.partitions_for("t") == [T0]
        cluster.freeze(1)
        moving = threading.Timer(0.8, cluster.move_leader, ["t", 0, 2])
        moving.start()
        assert seconds(lambda: consumer.subscribe("t")) < SOON_S
        assert consumer.position(T0) == 0, "the position must be known without an answer of the former leader"
        assert read(consumer, 1) == [b"a"]
        moving.join()


def test_a_consumer_does_not_pause_once_another_leader_is_known(cluster: FakeCluster) -> None:
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", **SLOW_RETRY) as consumer:
        consumer.subscribe("t")
        cluster.append("t", batch(b"before"))
        assert read(consumer, 1) == [b"before"]
        cluster.move_leader("t", 0, -1)
        time.sleep(0.1)
        cluster.move_leader("t", 0, 3)
        cluster.append("t", batch(b"a"))
        assert read(consumer, 1) == [b"a"]


def test_the_epoch_of_the_last_record_is_that_of_what_was_passed_over(cluster: FakeCluster) -> None:
    """KIP-320: a position behind a control batch is compared with the control batch's epoch, not the record's."""
    cluster.append("t", batch(b"a"))
    marker = encode_batch(Columns(pa.array([b"marker"])), 1, attributes=Attributes.CONTROL, base_offset=1)
    length = parse_header(marker).batch_length
    cluster.append_raw("t", pack_stamp(1, length, 4) + marker[16:])
    cluster.call(lambda: setattr(cluster.topics["t"].partitions[0], "leader_epoch", 4))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", metadata_max_age_ms=20) as consumer:
        consumer.subscribe("t")
        assert read(consumer, 1) == [b"a"]
        while consumer.position(T0) < 2:
            assert consumer.poll(0.05) == []
        cluster.move_leader("t", 0, 2)
        deadline = time.monotonic() + 30
        while cluster.subscribed[-1][0] != 2 and time.monotonic() < deadline:
            consumer.poll(0.05)
    assert (cluster.subscribed[-1][1].offset, cluster.subscribed[-1][1].last_fetched_epoch) == (2, 4)
