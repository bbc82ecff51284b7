"""Sizes, memory and lingering."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.accumulator import Accumulator, AccumulatorConfig
from raftlog._core.batch import BATCH_BYTES, Batch, record_bytes
from raftlog._core.numbering import BATCHES_REMEMBERED
from raftlog._core.partition_queue import PartitionQueue
from raftlog.errors import MessageTooLarge
from raftlog.format import Codec, decode_batch
from raftlog.types import Header

KEYS = st.none() | st.binary(max_size=30)
HEADERS = st.lists(st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=20)), max_size=3).map(tuple)
ROWS = st.lists(
    st.tuples(KEYS, st.none() | st.binary(max_size=200), HEADERS, st.integers(0, 3)), min_size=1, max_size=40
)


def accumulator(**sizes: int) -> Accumulator:
    config = {"batch_size_bytes": 1000, "buffer_memory_bytes": 5000, "max_request_size_bytes": 3000} | sizes
    return Accumulator(AccumulatorConfig(linger_ms=5, delivery_timeout_ms=100, **config))


@given(ROWS)
def test_what_is_counted_is_never_less_than_what_is_sent(
    rows: list[tuple[bytes | None, bytes | None, tuple[Header, ...], int]],
) -> None:
    batch = Batch(PartitionQueue("t", 0), (1,), 1 << 30, 0, 0)
    for key, value, headers, at_ms in rows:
        batch.append(value, key, headers, at_ms, record_bytes(value, key, headers))
    batch.close()
    encoded = batch.encode(Codec.NONE, None)
    assert len(encoded) <= batch.size_bytes
    decoded = decode_batch(encoded)
    columns = decoded.columns
    assert columns.column("value").to_pylist() == [value for _, value, _, _ in rows]
    if "key" in columns.schema.names:
        assert columns.column("key").to_pylist() == [key for key, _, _, _ in rows]
    if "headers" in columns.schema.names:
        found = [tuple(item) if item else () for item in columns.column("headers").to_pylist()]
        assert found == [headers for _, _, headers, _ in rows]
    if "timestamp_ms" in columns.schema.names:
        assert columns.column("timestamp_ms").to_pylist() == [at_ms for *_, at_ms in rows]
    else:
        assert {at_ms for *_, at_ms in rows} == {decoded.header.base_timestamp_ms}
    assert [batch.timestamp_ms(row) for row in range(len(rows))] == [at_ms for *_, at_ms in rows]


def test_a_record_that_fits_nowhere_is_refused_with_both_sizes() -> None:
    with pytest.raises(
        MessageTooLarge, match=rf"takes {3000 + 24 + BATCH_BYTES} bytes.*max\.request\.size=3000.*buffer"
    ):
        accumulator().check_size(b"x" * 3000, None, ())
    assert accumulator().check_size(b"x" * (3000 - 24 - BATCH_BYTES), None, ()) == 3000 - BATCH_BYTES


def test_memory_is_reserved_by_the_batch_and_given_back() -> None:
    acc = accumulator()
    queues = [PartitionQueue("t", partition) for partition in range(6)]
    for queue in queues[:5]:
        assert acc.has_room(100)
        acc.open(queue, 100, 0).append(b"x" * 76, None, (), 1, 100)
    assert acc.used_bytes == 5000
    assert not acc.has_room(100), "five batches of 1000 are all there is room for"
    first = queues[0].open
    assert first is not None
    acc.close(first)
    assert acc.used_bytes == 4000 + BATCH_BYTES + 100, "a closed batch keeps what it uses"
    acc.complete(first, base_offset=0)
    assert acc.used_bytes == 4000
    assert acc.has_room(100)
    assert not acc.complete(first, base_offset=5), "done is final"
    assert first.base_offset == 0


def test_a_large_record_gets_a_batch_of_its_own_size() -> None:
    acc = accumulator()
    queue = PartitionQueue("t", 0)
    small = acc.open(queue, 100, 0)
    small.append(b"", None, (), 1, 100)
    assert acc.open_batch_for(queue, 2000) is None
    acc.close(small)
    assert acc.open(queue, 2000, 0).limit_bytes == 2000 + BATCH_BYTES


def test_batches_linger_in_order_and_flush_closes_all() -> None:
    acc = accumulator()
    one, two, three = (acc.open(PartitionQueue("t", part), 10, at) for part, at in ((0, 0.0), (1, 2.0), (2, 3.0)))
    assert acc.next_linger_ms() == 5
    assert acc.close_lingered(4.9) == []
    assert acc.close_lingered(7.0) == [one, two]
    assert acc.close_all() == [three]
    assert acc.next_linger_ms() is None
    assert set(acc.ready) == {one.queue, two.queue, three.queue}


def behind_a_backlog(acc: Accumulator, queue: PartitionQueue) -> Batch:
    """Return an open batch that has lingered (until 5.0) behind five closed ones."""
    for _ in range(BATCHES_REMEMBERED):
        acc.close(acc.open(queue, 10, 0, in_turn=True))
    return acc.open(queue, 10, 0)


def test_what_could_not_be_sent_yet_goes_on_growing_and_is_closed_once_the_queue_is_shorter() -> None:
    acc, queue = accumulator(), PartitionQueue("t", 0)
    batch = behind_a_backlog(acc, queue)
    assert acc.close_lingered(6.0) == []
    assert acc.next_linger_ms() is None, "no timer helps: it waits for the queue"
    assert acc.open_batch_for(queue, 10) is batch
    queue.waiting.popleft()
    assert acc.close_lingered(6.0) == [batch]
    assert not acc.crowded


@pytest.mark.parametrize("how", ["flush", "memory", "full"])
def test_a_batch_behind_a_backlog_is_closed_when_somebody_waits_for_it(how: str) -> None:
    acc, queue = accumulator(), PartitionQueue("t", 0)
    batch = behind_a_backlog(acc, queue)
    acc.close_lingered(6.0)
    if how == "flush":
        assert acc.close_all() == [batch]
    elif how == "memory":
        acc.hurry()
        assert acc.close_lingered(6.0) == [batch]
    else:
        assert acc.close(batch)
        assert acc.close_lingered(6.0) == []
    assert not acc.crowded
    assert list(acc.open_batches()) == []


def test_expired_batches_are_found_oldest_first() -> None:
    acc = accumulator()
    one = acc.open(PartitionQueue("t", 0), 10, 0)
    two = acc.open(PartitionQueue("t", 1), 10, 50)
    assert list(acc.expired(99)) == []
    assert list(acc.expired(100)) == [one]
    assert list(acc.expired(150)) == [one, two]
