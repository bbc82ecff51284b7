"""Producers that share a produce call: their common and their separate state, and the end of the call."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from raftlog import Delivery, Producer
from raftlog._client import producer as producer_module
from raftlog._client.connections import shared_connections
from raftlog._client.producer import ProduceCall
from raftlog.errors import CorruptRecordError
from tests.support import patience
from tests.support.fake_broker import FakeCluster

FAST: dict[str, Any] = {"linger_ms": 0, "retry_backoff_ms": 1, "retry_backoff_max_ms": 20}
COUNT = 12
SOON_S = 40.0

until = partial(patience.until, within_s=SOON_S, pause_s=0.01)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(nodes=2) as cluster:
        cluster.create_topic("t", 2)
        yield cluster


def calls_of(*producers: Producer[Any, Any]) -> set[ProduceCall | None]:
    """Return the calls by which producers send at the moment."""
    return {stream._call for producer in producers for stream in producer._engine._streams.values()}


def of_each(cluster: FakeCluster, partition: int) -> dict[bytes, list[int]]:
    """Return the numbers of each producer's records in a partition, in the order of the log."""
    found: dict[bytes, list[int]] = {}
    for value in cluster.values("t", partition):
        assert value is not None
        name, number, *_ = value.split(b":")
        found.setdefault(name, []).append(int(number))
    return found


def send(producer: Producer[Any, Any], name: int, count: int, partition: int = 0) -> list[Delivery]:
    return [producer.send("t", b"%d:%d" % (name, number), partition=partition) for number in range(count)]


def has_messages(cluster: FakeCluster, count: int) -> bool:
    return len(cluster.messages) == count


def has_records(cluster: FakeCluster, count: int) -> bool:
    return len(cluster.values("t")) == count


def test_producers_with_the_same_settings_share_a_call_to_each_broker(cluster: FakeCluster) -> None:
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(cluster.bootstrap, **FAST)) for _ in range(COUNT)]
        sent = [
            each
            for name, one in enumerate(producers)
            for part in range(2)
            for each in send(one, name, 5, partition=part)
        ]
        for delivery in sent:
            delivery.result(SOON_S)
        assert len({producer._engine.connections for producer in producers}) == 1
    assert sorted(cluster.produce_calls) == [1, 2]
    for partition in range(2):
        assert of_each(cluster, partition) == {b"%d" % name: [*range(5)] for name in range(COUNT)}


@pytest.mark.parametrize(("message_bytes", "most"), [(48 << 10, COUNT - 1), (1, 1)])
def test_a_message_has_a_request_of_each_producer_that_waits_until_it_is_large(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, message_bytes: int, most: int
) -> None:
    monkeypatch.setattr(producer_module, "_MESSAGE_BYTES", message_bytes)
    monkeypatch.setattr(producer_module, "_ACCEPTED_S", SOON_S)
    cluster.hold_acks()
    cluster.faults.late_headers = True  # until then only the first one sends
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(cluster.bootstrap, **FAST)) for _ in range(COUNT)]
        sent = [each for name, one in enumerate(producers) for each in send(one, name, 1)]
        until(lambda: sum(len(call._ready) for call in calls_of(*producers) if call is not None) >= COUNT - 1)
        cluster.release_acks()
        for delivery in sent:
            delivery.result(SOON_S)
        assert len(calls_of(*producers)) == 1
    assert max(cluster.messages) == most


@pytest.mark.parametrize(("most", "expected"), [(4, [1, 1, COUNT - 2]), (1, [1, COUNT - 1])])
def test_requests_gather_while_some_have_no_answer(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, most: int, expected: list[int]
) -> None:
    monkeypatch.setattr(producer_module, "_UNANSWERED_REQUESTS", most)
    monkeypatch.setattr(producer_module, "_GATHER_MS", 1_000_000.0)
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(cluster.bootstrap, **FAST)) for _ in range(COUNT)]
        for name, producer in enumerate(producers):
            send(producer, name, 1)[0].result(SOON_S)
        [call] = calls_of(*producers)
        assert call is not None
        cluster.hold_acks()
        sent, before = [], len(cluster.messages)
        alone = len(expected) - 1
        for name in range(alone):
            sent += send(producers[name], name, 1)
            until(partial(has_messages, cluster, before + name + 1))
        for name in range(alone, COUNT):
            sent += send(producers[name], name, 1)
        until(lambda: {each for one in producers[alone:] for each in one._engine._streams.values()} <= set(call._ready))
        cluster.release_acks()
        for delivery in sent:
            delivery.result(SOON_S)
    assert cluster.messages[before:] == expected


def test_a_broker_that_answers_nothing_gets_the_requests_that_have_gathered(cluster: FakeCluster) -> None:
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(cluster.bootstrap, **FAST)) for _ in range(COUNT)]
        for name, producer in enumerate(producers):
            send(producer, name, 1)[0].result(SOON_S)
        cluster.hold_acks()
        sent = []
        for name, producer in enumerate(producers):
            sent += send(producer, name, 1)
            until(partial(has_records, cluster, COUNT + name + 1))
        cluster.release_acks()
        for delivery in sent:
            delivery.result(SOON_S)
        assert len(calls_of(*producers)) == 1, "the other producers must use the same call as before"


@pytest.mark.parametrize(
    "options", [{"client_id": "other"}, {"request_timeout_ms": 20_000}, {"acks": 1}, {"enable_idempotence": False}]
)
def test_other_settings_have_another_call(cluster: FakeCluster, options: dict[str, Any]) -> None:
    with Producer(cluster.bootstrap, **FAST) as one, Producer(cluster.bootstrap, **FAST, **options) as other:
        one.send("t", b"a", partition=0).result(SOON_S)
        other.send("t", b"b", partition=0).result(SOON_S)
        assert not calls_of(one) & calls_of(other)
        share_connections = "client_id" in options or "request_timeout_ms" in options
        assert (one._engine.connections is other._engine.connections) is share_connections


def test_a_producer_that_closes_leaves_the_others_their_call_and_their_answers(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, **FAST) as stays:
        leaves = Producer(cluster.bootstrap, **FAST)
        stays.send("t", b"0:0", partition=0).result(SOON_S)
        leaves.send("t", b"1:0", partition=0).result(SOON_S)
        cluster.hold_acks()
        delivery, lost = stays.send("t", b"0:1", partition=0), leaves.send("t", b"1:1", partition=0)
        until(lambda: len(cluster.values("t")) == 4)
        leaves.close(timeout=0)
        assert lost.exception(SOON_S) is not None
        assert not delivery.done()
        cluster.release_acks()
        delivery.result(SOON_S)
        stays.send("t", b"0:2", partition=0).result(SOON_S)
    assert cluster.produce_calls == [1], "the other producer must use the same call as before"
    assert cluster.left_lanes == [2], "the broker must be told once that the producer has left"


@pytest.mark.parametrize("fault", ["drop_produce_before_append", "drop_produce_after_append"])
def test_a_call_that_breaks_costs_no_producer_a_record_and_doubles_none(cluster: FakeCluster, fault: str) -> None:
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(cluster.bootstrap, **FAST)) for _ in range(COUNT)]
        for name, producer in enumerate(producers):
            send(producer, name, 1)[0].result(SOON_S)
        sent = []
        for start in range(1, 40):
            if start % 10 == 0:
                setattr(cluster.faults, fault, 7)
            sent += [
                producer.send("t", b"%d:%d" % (name, start), partition=0) for name, producer in enumerate(producers)
            ]
        for delivery in sent:
            delivery.result(SOON_S)
    assert len(cluster.produce_calls) > 1, "the call must have broken at least once, or the test shows nothing"
    assert of_each(cluster, 0) == {b"%d" % name: [*range(40)] for name in range(COUNT)}


def test_a_leader_that_falls_silent_is_left_by_all_and_each_record_is_there_once(cluster: FakeCluster) -> None:
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(cluster.bootstrap, **FAST)) for _ in range(COUNT)]
        for name, producer in enumerate(producers):
            send(producer, name, 1)[0].result(SOON_S)
        cluster.freeze(1)
        sent = [
            producer.send("t", b"%d:%d" % (name, number), partition=0)
            for number in range(1, 6)
            for name, producer in enumerate(producers)
        ]
        cluster.move_leader("t", 0, 2)
        for delivery in sent:
            delivery.result(SOON_S)
        cluster.thaw(1)
        cluster.move_leader("t", 0, 1)
        for name, producer in enumerate(producers):
            producer.send("t", b"%d:6" % name, partition=0).result(SOON_S)
    assert of_each(cluster, 0) == {b"%d" % name: [*range(7)] for name in range(COUNT)}


def test_a_refusal_of_one_producer_does_not_hold_up_another_one(cluster: FakeCluster) -> None:
    """Each producer has its own chains: a refusal for one breaks no chain of another."""
    with Producer(cluster.bootstrap, **FAST) as one, Producer(cluster.bootstrap, **FAST) as other:
        one.send("t", b"0:0", partition=0).result(SOON_S)
        other.send("t", b"1:0", partition=0).result(SOON_S)
        cluster.faults.refuse = [CorruptRecordError("no")]
        assert isinstance(one.send("t", b"0:1", partition=0).exception(SOON_S), CorruptRecordError)
        asked = cluster.topics["t"].partitions[0].asked
        other.send("t", b"1:1", partition=0).result(SOON_S)
        assert cluster.topics["t"].partitions[0].asked == asked + 1
        assert calls_of(one) == calls_of(other)
    assert len(cluster.requests) == 4, "the batch of the other producer must be sent once"


def test_a_broker_that_serves_one_producer_on_a_call_gets_a_call_of_each(cluster: FakeCluster) -> None:
    cluster.serves_many = False
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(cluster.bootstrap, **FAST)) for _ in range(COUNT)]
        sent = [each for name, producer in enumerate(producers) for each in send(producer, name, 5)]
        for delivery in sent:
            delivery.result(SOON_S)
        assert len(calls_of(*producers)) == COUNT
    assert of_each(cluster, 0) == {b"%d" % name: [*range(5)] for name in range(COUNT)}


def test_a_call_that_fails_before_the_broker_speaks_is_followed_by_a_shared_one(cluster: FakeCluster) -> None:
    cluster.hold_acks()
    cluster.faults.refuse_produce_calls = 1
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(cluster.bootstrap, **FAST)) for _ in range(COUNT)]
        sent = [each for name, producer in enumerate(producers) for each in send(producer, name, 1)]
        until(lambda: all(producer._engine._streams for producer in producers))
        until(lambda: len(calls_of(*producers)) == 1)
        cluster.release_acks()
        for delivery in sent:
            delivery.result(SOON_S)
        assert len(calls_of(*producers)) == 1
    assert cluster.produce_calls == [1, 1]


def test_a_producer_with_much_to_send_moves_to_a_call_of_its_own(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, **FAST) as small, Producer(cluster.bootstrap, **FAST) as large:
        small.send("t", b"0:0", partition=0).result(SOON_S)
        large.send("t", b"1:0", partition=0).result(SOON_S)
        assert calls_of(small) == calls_of(large)
        sent = [large.send("t", b"1:%d:%s" % (number, bytes(40_000)), partition=0) for number in range(1, 20)]
        for delivery in sent:
            delivery.result(SOON_S)
        small.send("t", b"0:1", partition=0).result(SOON_S)
        assert not calls_of(small) & calls_of(large)
    assert of_each(cluster, 0) == {b"0": [0, 1], b"1": [*range(20)]}


def test_a_call_has_room_for_so_many_producers(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "MAX_PRODUCERS", 5)
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(cluster.bootstrap, **FAST)) for _ in range(COUNT)]
        for name, producer in enumerate(producers):
            send(producer, name, 1)[0].result(SOON_S)
        assert len(calls_of(*producers)) == 3


async def test_connections_are_not_shared_with_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    ours = shared_connections(loop, None)
    assert shared_connections(loop, None) is ours
    child = os.getpid() + 1
    monkeypatch.setattr("raftlog._client.connections.os.getpid", lambda: child)
    assert shared_connections(loop, None) is not ours


async def test_shared_connections_are_closed_with_their_last_client() -> None:
    loop = asyncio.get_running_loop()
    one, other = shared_connections(loop, None), shared_connections(loop, None)
    channel = one.channel("127.0.0.1:1")
    await one.close()
    assert other.channel("127.0.0.1:1") is channel
    await other.close()
    assert shared_connections(loop, None) is not one
