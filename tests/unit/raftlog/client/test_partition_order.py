"""Order within a partition: what lands in one partition lies there in the order in which it was sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftlog import Producer
from raftlog._core.murmur2 import key_hash
from tests.support.fake_broker import FakeCluster

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


@settings(max_examples=150)
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
        assert numbered == sorted(numbered), "values count up in the order of the input"
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
