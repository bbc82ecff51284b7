"""What makes a client pleasant: sending and waiting, functions that convert, reading to the end; both faces."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

import raftlog
from raftlog import Consumer, Producer, TopicPartition, aio
from raftlog.errors import (
    InvalidConfig,
    InvalidRequestError,
    OffsetOutOfRange,
    RequestTimedOut,
    UnknownTopicOrPartition,
)
from raftlog.format.control import Marker, encode_control
from tests.support.batches import batch_of
from tests.support.fake_broker import FakeCluster
from tests.support.group_world import ONE, ZERO, World, until

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(nodes=1) as cluster:
        cluster.create_topic("t", 2)
        yield cluster


@pytest.fixture
def world() -> Iterator[World]:
    with FakeCluster(nodes=2) as cluster:
        world = World(cluster)
        yield world
        world.close()


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


# Sending


def test_sending_and_waiting_returns_the_place(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap) as producer:
        first = producer.send_and_wait("t", b"a", partition=1)
        second = producer.send_and_wait("t", b"b", b"key", 1, {"h": b"1"}, 5, timeout=30)
    assert (first.topic_partition, first.offset, second.offset, second.timestamp_ms) == (T1, 0, 1, 5)
    assert cluster.values("t", 1) == [b"a", b"b"]


async def test_sending_and_waiting_with_asyncio(cluster: FakeCluster) -> None:
    async with aio.Producer(cluster.bootstrap) as producer:
        assert (await producer.send_and_wait("t", b"a", partition=1)).offset == 0


def test_sending_and_waiting_gives_up_in_time_and_the_delivery_goes_on(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap) as producer:
        cluster.hold_acks()
        with pytest.raises(TimeoutError, match="the delivery goes on"):
            producer.send_and_wait("t", b"a", partition=0, timeout=0.05)
        cluster.release_acks()
        producer.flush(30)
    assert cluster.values("t") == [b"a"]


def test_serializers_convert_what_send_gets_and_leave_none_alone(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, key_serializer=str.encode, value_serializer=as_json) as producer:
        for _ in range(3):  # also where a batch is open
            producer.send("t", {"n": 1}, partition=0)
        producer.send("t", None, "key", partition=0).result(30)
        producer.send_batch("t", [b"as it is"], partition=0).result(30)
    assert cluster.values("t") == [b'{"n": 1}'] * 3 + [None, b"as it is"]


async def test_serializers_with_asyncio(cluster: FakeCluster) -> None:
    async with aio.Producer(cluster.bootstrap, value_serializer=as_json) as producer:
        await producer.send_and_wait("t", [1, None], partition=0)
    assert cluster.values("t") == [b"[1, null]"]


def test_a_serializer_that_fails_is_named_and_nothing_is_sent(cluster: FakeCluster) -> None:
    with Producer(cluster.bootstrap, value_serializer=as_json, key_serializer=lambda key: key) as producer:
        with pytest.raises(TypeError, match="not JSON serializable") as caught:
            producer.send("t", object(), partition=0)
        with pytest.raises(TypeError, match=r"key must be bytes, not str"):
            producer.send("t", 1, "not encoded")  # type: ignore[arg-type] # by the function above
    assert caught.value.__notes__ == ["(raised by value_serializer for a record of topic 't')"]
    assert cluster.values("t") == []


@pytest.mark.parametrize("make", [Producer, aio.Producer, Consumer, aio.Consumer])
def test_a_converter_is_a_function(make: Any) -> None:
    name = "value_serializer" if "Producer" in make.__name__ else "value_deserializer"
    with pytest.raises(InvalidConfig, match=f"{name} is 'org.apache.Json': give a function"):
        make("127.0.0.1:1", **{name: "org.apache.Json"})
    with pytest.raises(InvalidConfig, match=rf"it is a function, and an argument of a \w+: {name}="):
        make("127.0.0.1:1", config={name.replace("_", "."): as_json})


# Reading


def test_deserializers_convert_records_and_leave_none_and_tables_alone(cluster: FakeCluster) -> None:
    cluster.append("t", batch_of(b"1", None, b"[2]"))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", value_deserializer=json.loads) as consumer:
        consumer.assign([T0])
        assert [record.value for record in consumer.poll(30)] == [1, None, [2]]
        consumer.seek(T0, 0)
        assert next(consumer).value == 1
        assert [record.value for record in consumer.poll(30)] == [None, [2]]
        consumer.seek(T0, 0)
        assert consumer.poll_arrow(30)["value"].to_pylist() == [b"1", None, b"[2]"]


def test_a_record_that_cannot_be_converted_comes_after_those_before_it_and_until_it_is_passed(
    cluster: FakeCluster,
) -> None:
    cluster.append("t", batch_of(b"1", b"2", b"x", b"4"))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", value_deserializer=int) as consumer:
        consumer.assign([T0])
        assert [record.value for record in consumer.poll(30)] == [1, 2]
        for read in (consumer.poll, consumer.__next__, consumer.poll):
            with pytest.raises(ValueError, match="invalid literal") as caught:
                read()
            assert caught.value.__notes__ == [
                "(raised by value_deserializer for t-0 at offset 2; seek past it to skip the record)"
            ]
            assert consumer.position(T0) == 2
        consumer.seek(T0, 3)
        assert [record.value for record in consumer.poll(30)] == [4]


async def test_deserializers_with_asyncio(cluster: FakeCluster) -> None:
    cluster.append("t", batch_of(b"1", b"x", b"3"))
    async with aio.Consumer(cluster.bootstrap, auto_offset_reset="earliest", value_deserializer=int) as consumer:
        await consumer.assign([T0])
        assert (await anext(consumer)).value == 1
        with pytest.raises(ValueError, match="invalid literal"):
            await anext(consumer)
        consumer.seek(T0, 2)
        assert [record.value for record in await consumer.poll(30)] == [3]


def test_a_commit_stops_before_a_record_that_cannot_be_converted(world: World) -> None:
    with Producer(world.cluster.bootstrap) as producer:
        producer.send_batch("t", [b"1", b"2", b"x", b"4"], partition=0).result(30)
    consumer = world.consumer(value_deserializer=int)
    consumer.subscribe("t")
    found: list[Any] = until(lambda: consumer.position(ZERO) == 2, consumer)
    assert [record.value for record in found] == [1, 2]
    with pytest.raises(ValueError, match="invalid literal"):
        consumer.poll(30)
    consumer.commit()
    assert world.committed(ZERO) == 2


def test_going_back_to_what_is_committed(world: World) -> None:
    world.send(6, partition=0)
    world.send(1, partition=1)
    consumer = world.consumer(enable_auto_commit=False)
    consumer.subscribe("t")
    consumer.commit({ZERO: 4})
    until(lambda: consumer.position(ZERO) == 6 and consumer.position(ONE) == 1, consumer)
    consumer.seek_to_committed()
    assert (consumer.position(ZERO), consumer.position(ONE)) == (4, 0), (
        "the positions must be the committed one, 4, and the start, as auto.offset.reset is earliest"
    )
    consumer.seek(ZERO, 0)
    consumer.seek_to_committed(ZERO)
    assert consumer.position(ZERO) == 4
    strict = world.consumer(auto_offset_reset="none")
    strict.assign([ZERO, ONE])
    with pytest.raises(OffsetOutOfRange, match=r"t-1: nothing is committed there.*seek to continue"):
        strict.seek_to_committed()
    with (
        Consumer(world.cluster.bootstrap) as alone,
        pytest.raises(InvalidRequestError, match="needs a consumer with a"),
    ):
        alone.seek_to_committed(ZERO)


# Tables


def test_a_topic_is_one_table_up_to_the_ends_at_the_call(cluster: FakeCluster) -> None:
    cluster.append("t", batch_of(b"a", b"b"))
    cluster.append("t", batch_of(b"c"), partition=1)
    cluster.append_raw("t", encode_control([Marker(7, 1, True, 0, 0)], 1, base_offset=2))  # ends with a marker
    steps: list[tuple[int, int]] = []

    def progress(passed: int, total: int) -> None:
        if not steps:
            cluster.append("t", batch_of(b"too late"), partition=1)
        steps.append((passed, total))

    table = raftlog.read_table(cluster.bootstrap, "t", timeout=60, progress=progress)
    found = sorted(zip(table["partition"].to_pylist(), table["value"].to_pylist(), strict=True))
    assert found == [(0, b"a"), (0, b"b"), (1, b"c")]
    assert (steps[0], steps[-1]) == ((0, 4), (4, 4))
    assert steps == sorted(steps)


async def test_a_topic_is_one_table_with_asyncio(cluster: FakeCluster) -> None:
    cluster.append("t", batch_of(b"a", b"b"))
    table = await aio.read_table(cluster.bootstrap, ["t"], timeout=60)
    assert table["value"].to_pylist() == [b"a", b"b"]
    async with aio.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        await consumer.assign([T0])
        assert (await consumer.read_to_end(60)).num_rows == 2
        assert (await consumer.read_to_end(60)).num_rows == 0


def test_an_empty_topic_is_an_empty_table_and_a_missing_one_an_error(cluster: FakeCluster) -> None:
    assert raftlog.read_table(cluster.bootstrap, "t", timeout=60).num_rows == 0
    with pytest.raises(UnknownTopicOrPartition):
        raftlog.read_table(cluster.bootstrap, "u")


def test_a_batch_that_reaches_beyond_the_end_is_cut_and_the_rest_is_read_later(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.append("t", batch_of(b"a", b"b", b"c"))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([T0])
        with monkeypatch.context() as patch:
            patch.setattr(consumer, "end_offsets", lambda parts: dict.fromkeys(parts, 2))
            assert consumer.read_to_end(60)["value"].to_pylist() == [b"a", b"b"]
        assert consumer.position(T0) == 2
        assert [record.value for record in consumer.poll(30)] == [b"c"]


def test_an_end_that_is_not_reached_in_time_leaves_the_positions(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.append("t", batch_of(b"a"))
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([T0, T1])
        monkeypatch.setattr(consumer, "end_offsets", lambda parts: dict.fromkeys(parts, 2))
        with pytest.raises(RequestTimedOut, match=r"not complete within 0\.5 s: t-0 is at 1, 1 before its end, t-1"):
            consumer.read_to_end(0.5)
        assert consumer.position(T0) == 0
        consumer.pause(T1)
        with pytest.raises(RequestTimedOut, match=r"s: t-0 is at 1, 1 before its end$"):
            consumer.read_to_end(0.5)
    begun = time.monotonic()
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest", default_api_timeout_ms=500) as consumer:
        consumer.assign([T0])
        monkeypatch.setattr(consumer, "end_offsets", lambda parts: dict.fromkeys(parts, 2))
        with pytest.raises(RequestTimedOut, match=r"nothing came for 0\.5 s: t-0"):
            consumer.read_to_end()
    assert time.monotonic() - begun < 60


def test_a_members_partitions_are_not_read_to_the_end(world: World) -> None:
    consumer = world.consumer()
    consumer.subscribe("t")
    with pytest.raises(InvalidRequestError, match="use assign"):
        consumer.read_to_end()


def test_a_record_names_its_partition(cluster: FakeCluster) -> None:
    cluster.append("t", batch_of(b"a"), partition=1)
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe("t")
        assert consumer.poll(30)[0].topic_partition == T1


# What a debugger shows


def test_a_client_shows_what_it_is_and_whose_and_no_secret(cluster: FakeCluster) -> None:
    secret: dict[str, Any] = {"security_protocol": "sasl_ssl", "sasl_username": "ada", "sasl_password": "lovelace"}
    with Producer(cluster.bootstrap, client_id="billing", transactional_id="t-1") as producer:
        assert repr(producer) == f"<Producer {cluster.bootstrap} client_id='billing' transactional_id='t-1' open>"
    assert repr(producer).endswith(" closed>")
    with Consumer(cluster.bootstrap, "readers") as consumer:
        assert repr(consumer) == f"<Consumer {cluster.bootstrap} client_id='raftlog-python' group_id='readers' open>"
    with raftlog.StagedWriter(cluster.bootstrap, "nightly") as writer:
        assert repr(writer) == f"<StagedWriter 'nightly' {cluster.bootstrap} client_id='raftlog-python' open>"
    shown = repr(aio.Admin("a:1, b:2", **secret))
    assert shown == "<aio.Admin a:1,b:2 client_id='raftlog-python' not used yet>"
    assert repr(raftlog.Admin("a:1", **secret)) == "<Admin a:1 client_id='raftlog-python' open>"


async def test_deliveries_show_their_state_under_their_public_names(cluster: FakeCluster) -> None:
    async with aio.Producer(cluster.bootstrap) as producer:
        delivery = await producer.send("t", b"a", partition=0)
        await delivery
        batch = await producer.send_batch("t", [b"b"], partition=1)
        await batch
    assert repr(delivery) == "<Delivery t-0 acknowledged>"
    assert repr(batch) == "<BatchDelivery 1 of 1 batches acknowledged>"
    assert repr(producer).startswith(f"<aio.Producer {cluster.bootstrap} ")
    assert repr(producer).endswith(" closed>")


def test_a_listener_without_a_method_is_refused_before_any_partition_moves() -> None:
    class OnlyAssigned:
        def on_partitions_assigned(self, partitions: object) -> None: ...

    listener: Any = OnlyAssigned()
    with (
        raftlog.Consumer("127.0.0.1:1", group_id="g") as consumer,
        pytest.raises(TypeError, match="not OnlyAssigned: it has no on_partitions_revoked, on_partitions_lost"),
    ):
        consumer.subscribe(["t"], listener=listener)
