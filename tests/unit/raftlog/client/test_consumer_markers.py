"""Markers of transactions, as consumers pass them: nobody waits for what is not coming, or stops before what is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from raftlog import Consumer, TopicPartition, aio
from raftlog.format.control import Marker, encode_control
from tests.support.batches import batch_of
from tests.support.fake_broker import FakeCluster

T0 = TopicPartition("t", 0)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(nodes=1) as cluster:
        cluster.create_topic("t")
        cluster.append("t", batch_of(b"a", b"b"))
        cluster.append_raw("t", encode_control([Marker(7, 1, True, 0, 0), Marker(8, 1, False, 0)], 1, base_offset=2))
        yield cluster


def test_who_reads_up_to_an_end_does_not_wait_behind_the_last_marker(cluster: FakeCluster) -> None:
    with Consumer(cluster.bootstrap) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 2)  # only markers from here on
        begun = time.monotonic()
        assert consumer.poll(120) == []
        assert consumer.position(T0) == 4
        consumer.seek(T0, 3)
        assert consumer.poll_arrow(120).num_rows == 0
        assert consumer.position(T0) == 4
        assert time.monotonic() - begun < 60
        assert consumer.poll(0.2) == [], "an ordinary wait"


def test_the_same_with_asyncio(cluster: FakeCluster) -> None:
    async def scenario() -> None:
        async with aio.Consumer(cluster.bootstrap) as consumer:
            await consumer.assign([T0])
            consumer.seek(T0, 2)
            async with asyncio.timeout(60):
                assert await consumer.poll(120) == []
            assert await consumer.position(T0) == 4

    asyncio.run(scenario())


def test_who_waits_for_a_record_for_ever_gets_one(cluster: FakeCluster) -> None:
    with Consumer(cluster.bootstrap) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 2)
        timer = threading.Timer(0.3, lambda: cluster.append("t", batch_of(b"c")))
        timer.start()
        assert [record.value for record in consumer.poll(None)] == [b"c"]
        timer.join()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_iteration_goes_on_behind_a_marker_until_its_timeout(cluster: FakeCluster, asynchronous: bool) -> None:
    timer = threading.Timer(0.5, lambda: cluster.append("t", batch_of(b"c")))

    async def scenario() -> list[bytes | None]:
        async with aio.Consumer(cluster.bootstrap, consumer_timeout_ms=300) as consumer:
            await consumer.assign([T0])
            consumer.seek(T0, 2)
            assert [record async for record in consumer] == []
        async with aio.Consumer(cluster.bootstrap, consumer_timeout_ms=60_000) as consumer:
            await consumer.assign([T0])
            consumer.seek(T0, 0)
            timer.start()
            return [(await anext(consumer)).value for _ in range(3)]

    if asynchronous:
        found = asyncio.run(scenario())
    else:
        with Consumer(cluster.bootstrap, consumer_timeout_ms=300) as consumer:
            consumer.assign([T0])
            consumer.seek(T0, 2)
            assert list(consumer) == []
        with Consumer(cluster.bootstrap, consumer_timeout_ms=60_000) as consumer:
            consumer.assign([T0])
            consumer.seek(T0, 0)
            timer.start()
            found = [next(consumer).value for _ in range(3)]
    timer.join()
    assert found == [b"a", b"b", b"c"]
