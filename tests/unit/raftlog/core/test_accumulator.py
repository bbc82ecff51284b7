"""Batches of a producer: sizes, memory, lingering, order under refusals, and numbers (KIP-98, KIP-360)."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.accumulator import (
    BATCH_BYTES,
    BATCHES_REMEMBERED,
    CROWDED_GROWTH,
    LAST_EPOCH,
    NO_NUMBER,
    SEQUENCES,
    STICKY_GROWTH,
    Accumulator,
    AccumulatorConfig,
    Batch,
    Number,
    Numbering,
    PartitionQueue,
    TopicQueues,
    record_bytes,
)
from raftlog._core.cluster import PartitionView, TopicView
from raftlog.errors import BrokerUnavailable, CorruptRecordError, DeliveryTimeout, FencedLeaderEpoch, MessageTooLarge
from raftlog.format import (
    MAX_RECORDS,
    Codec,
    Columns,
    decode_batch,
    encode_batch,
    parse_batch,
    parse_header,
    stamp_producer,
)
from raftlog.types import Header
from tests.support.idempotent_link import Link

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
    assert not acc.has_room(100), "five batches of 1,000 bytes must leave no room"
    first = queues[0].open
    assert first is not None
    acc.close(first)
    assert acc.used_bytes == 4000 + BATCH_BYTES + 100, "a closed batch must use only the memory of its records"
    acc.complete(first, base_offset=0)
    assert acc.used_bytes == 4000
    assert acc.has_room(100)
    assert not acc.complete(first, base_offset=5), "a batch that is done must not be completed again"
    assert first.base_offset == 0


def test_a_large_record_gets_a_batch_of_its_own_size() -> None:
    acc = accumulator()
    queue = PartitionQueue("t", 0)
    small = acc.open(queue, 100, 0)
    small.append(b"", None, (), 1, 100)
    assert acc.open_batch_for(queue, 2000) is None
    acc.close(small)
    assert acc.open(queue, 2000, 0).limit_bytes == 2000 + BATCH_BYTES


def test_a_batch_of_any_size_has_no_more_records_than_brokers_accept() -> None:
    size = 64 << 20
    acc = accumulator(batch_size_bytes=size, buffer_memory_bytes=2 * size, max_request_size_bytes=size)
    queue = PartitionQueue("t", 0)
    smallest = record_bytes(None, None, ())
    batch = acc.open(queue, smallest, 0)
    batch.size_bytes += (MAX_RECORDS - 1) * smallest
    assert acc.open_batch_for(queue, smallest) is batch
    batch.size_bytes += smallest
    assert acc.open_batch_for(queue, smallest) is None
    acc.close(batch)
    assert acc.open(queue, 40 << 20, 0).limit_bytes == (40 << 20) + BATCH_BYTES, "one record is as large as it is"


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
        acc.close(acc.open(queue, 10, 0))
    return acc.open(queue, 10, 0)


def test_what_could_not_be_sent_yet_goes_on_growing_and_is_closed_once_the_queue_is_shorter() -> None:
    acc, queue = accumulator(), PartitionQueue("t", 0)
    batch = behind_a_backlog(acc, queue)
    assert acc.close_lingered(6.0) == []
    assert acc.next_linger_ms() is None, "no timer must be set, as the batch waits for the queue"
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


CONFIG = AccumulatorConfig(
    batch_size_bytes=1024,
    buffer_memory_bytes=1 << 20,
    max_request_size_bytes=1 << 20,
    linger_ms=5,
    delivery_timeout_ms=1000,
)


def add(accumulator: Accumulator, queue: PartitionQueue, values: list[bytes]) -> Batch:
    batch = accumulator.open(queue, 10, 0)
    for value in values:
        batch.append(value, None, (), 7, 10)
    accumulator.close(batch)
    batch.encode(Codec.NONE, None)
    return batch


class ChainBroker:
    """The broker's side of the rule: a refused chain is refused until a larger one comes."""

    def __init__(self) -> None:
        self.log: list[Batch] = []
        self.broken = -1

    def accepts(self, batch: Batch, chain: int, refuse: bool) -> bool:
        if chain <= self.broken:
            return False
        if refuse:
            self.broken = chain
            return False
        self.log.append(batch)
        return True


def flip(data: st.DataObject) -> bool:
    """Return a coin's side."""
    return data.draw(st.booleans())


@given(st.data())
def test_refused_batches_are_never_overtaken(data: st.DataObject) -> None:
    accumulator, queue, broker = Accumulator(CONFIG), PartitionQueue("t", 0), ChainBroker()
    batches = [add(accumulator, queue, [b"%d" % number]) for number in range(data.draw(st.integers(1, 12)))]
    on_the_way: list[tuple[Batch, bool]] = []
    refusals_left = 20
    for _ in range(400):
        if not queue.busy:
            break
        if on_the_way and (flip(data) or not queue.sendable):
            # Answers come in any order.
            batch, accepted = on_the_way.pop(data.draw(st.integers(0, len(on_the_way) - 1)))
            if accepted:
                queue.on_accepted(batch)
                accumulator.complete(batch, base_offset=0)
            else:
                queue.on_refused(batch, resend=True, counts=True)
            queue.recovered()
        else:
            for batch in queue.take(1, data.draw(st.integers(0, 600)), at_least_one=True):
                refuse = refusals_left > 0 and flip(data)
                refusals_left -= refuse
                on_the_way.append((batch, broker.accepts(batch, queue.chain, refuse)))
    assert broker.log == batches
    assert accumulator.used_bytes == 0
    assert not accumulator.incomplete


def test_nothing_goes_to_a_new_leader_while_the_old_one_owes_answers() -> None:
    accumulator, queue = Accumulator(CONFIG), PartitionQueue("t", 0)
    first, second = add(accumulator, queue, [b"1"]), add(accumulator, queue, [b"2"])
    assert queue.take(1, 1, at_least_one=True) == [first]
    assert queue.take(2, 10_000, at_least_one=True) == []
    queue.on_accepted(first)
    assert queue.take(2, 10_000, at_least_one=True) == [second]


def test_a_timed_out_batch_is_left_out_and_the_rest_goes_on() -> None:
    accumulator, queue = Accumulator(CONFIG), PartitionQueue("t", 0)
    late, good = add(accumulator, queue, [b"1"]), add(accumulator, queue, [b"2"])
    accumulator.complete(late, error=DeliveryTimeout("late"))
    assert queue.take(1, 10_000, at_least_one=True) == [good]


@given(st.integers(2, 40), st.integers(1, 4))
def test_halves_take_the_place_of_what_was_too_large(rows: int, splits: int) -> None:
    accumulator, queue = Accumulator(CONFIG), PartitionQueue("t", 0)
    large = add(accumulator, queue, [b"%d" % row for row in range(rows)])
    last = add(accumulator, queue, [b"last"])
    queue.take(1, 1 << 20, at_least_one=True)
    queue.on_refused(last, resend=True, counts=False)
    current = large
    for _ in range(splits):
        if current.count == 1:
            break
        left, right = accumulator.split(current)
        for half in (left, right):
            half.encode(Codec.NONE, None)
        assert queue.recovered()
        current = left
        queue.take(1, len(left.encoded or b""), at_least_one=True)
    queue.on_refused(current, resend=True, counts=False)
    queue.recovered()
    values = []
    for batch in queue.waiting:
        assert batch.encoded is not None
        values += decode_batch(batch.encoded).columns.column("value").to_pylist()
    assert values == [b"%d" % row for row in range(rows)] + [b"last"]
    for row in range(rows):
        leaf, index = large.leaf(row)
        assert leaf.encoded is not None
        assert decode_batch(leaf.encoded).columns.column("value")[index].as_py() == b"%d" % row
        assert large.timestamp_ms(row) == 7
    assert accumulator.used_bytes == sum(batch.reserved_bytes for batch in accumulator.incomplete)


def test_nothing_new_is_sent_while_answers_are_owed_after_a_refusal() -> None:
    accumulator, queue = Accumulator(CONFIG), PartitionQueue("t", 0)
    first, second, third = (add(accumulator, queue, [b"%d" % number]) for number in range(3))
    queue.take(1, len(first.encoded or b"") + len(second.encoded or b""), at_least_one=True)
    queue.on_refused(first, resend=True, counts=True)
    assert not queue.recovered(), "the queue must not recover while the second batch is in flight"
    assert not queue.sendable
    assert queue.take(1, 10_000, at_least_one=True) == [], (
        "nothing must be sent, as the broker would refuse it after the failed batch"
    )
    queue.on_refused(second, resend=True, counts=False)
    chain = queue.chain
    assert queue.recovered()
    assert queue.chain > chain
    assert queue.take(1, 10_000, at_least_one=True) == [first, second, third]


def test_lost_connections_do_not_lengthen_the_pause_after_the_refusal_that_follows_them() -> None:
    queue = PartitionQueue("t", 0)
    for error, expected in [
        (BrokerUnavailable("no connection"), 1),
        (BrokerUnavailable("no connection"), 2),
        (FencedLeaderEpoch("it was started again"), 1),
        (FencedLeaderEpoch("still"), 2),
        (BrokerUnavailable("no connection"), 1),
    ]:
        queue.note_failure(error)
        batch = Batch(queue, queue.next_order(), 100, 0, 0)
        queue.on_refused(batch, resend=True, counts=True)
        assert queue.failures == expected


def test_what_has_failed_while_it_waited_does_not_hold_up_what_comes_behind() -> None:
    accumulator, queue = Accumulator(CONFIG), PartitionQueue("t", 0)
    failed, behind = add(accumulator, queue, [b"failed"]), add(accumulator, queue, [b"behind"])
    accumulator.complete(failed, error=DeliveryTimeout("too late"))
    assert queue.sendable
    assert queue.take(1, 1 << 20, at_least_one=True) == [behind]
    assert not queue.sendable


def numbering(producer_id: int = 7, epoch: int = 0) -> Numbering:
    made = Numbering()
    made.adopt(producer_id, epoch)
    return made


def queue_with(*rows: int, number: Numbering | None = None) -> tuple[Accumulator, PartitionQueue, list[Batch]]:
    accumulator, queue = Accumulator(CONFIG), PartitionQueue("t", 0, number or numbering())
    return accumulator, queue, [enqueue(accumulator, queue, count) for count in rows]


def enqueue(accumulator: Accumulator, queue: PartitionQueue, rows: int) -> Batch:
    batch = accumulator.open(queue, 10, 0)
    for row in range(rows):
        batch.append(b"%d" % row, None, (), 7, 10)
    accumulator.close(batch)
    batch.encode(Codec.NONE, None)
    return batch


def carried(batch: Batch) -> Number:
    """Decode the bytes, and check that they are whole."""
    assert batch.encoded is not None
    header = parse_batch(batch.encoded)
    return Number(header.producer_id, header.producer_epoch, header.base_sequence)


def take(queue: PartitionQueue) -> list[Batch]:
    return queue.take(1, 1 << 20, at_least_one=True)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_stamped_batch_is_what_would_have_been_encoded(codec: Codec) -> None:
    columns = Columns(pa.array([b"value %d" % row for row in range(50)], pa.binary()), key=pa.array([b"k"] * 50))
    plain = encode_batch(columns, 1000, codec=codec)
    numbered = encode_batch(columns, 1000, codec=codec, producer_id=5, producer_epoch=2, base_sequence=70)
    assert stamp_producer(plain, 5, 2, 70) == numbered
    assert stamp_producer(memoryview(numbered), -1, -1, -1) == plain
    with pytest.raises(CorruptRecordError):
        stamp_producer(plain[:63], 5, 2, 70)


def test_sequences_wrap_around_at_the_end_of_a_signed_integer() -> None:
    number = Number(1, 0, SEQUENCES - 3)
    assert number.after(2).base_sequence == SEQUENCES - 1
    assert number.after(3).base_sequence == 0
    assert number.after(10).base_sequence == 7
    assert SEQUENCES == 2**31


def test_predicted_numbers_are_those_that_are_sent() -> None:
    _, queue, batches = queue_with(3, 1, 4)
    before = [batch.encoded for batch in batches]
    assert take(queue) == batches
    assert [carried(batch) for batch in batches] == [Number(7, 0, 0), Number(7, 0, 3), Number(7, 0, 4)]
    assert all(batch.encoded is was for batch, was in zip(batches, before, strict=True)), (
        "no batch must be encoded anew"
    )


def test_what_was_never_sent_uses_no_number() -> None:
    accumulator, queue, batches = queue_with(3, 1, 4)
    accumulator.complete(batches[1], error=DeliveryTimeout("late"))
    assert take(queue) == [batches[0], batches[2]]
    assert carried(batches[2]) == Number(7, 0, 3), "the batch must get the number of the one that was given up"
    later = enqueue(accumulator, queue, 1)
    assert carried(later) == Number(7, 0, 7), "the next batch must get the next number"


def test_what_was_sent_and_has_failed_leaves_a_gap() -> None:
    accumulator, queue, (first, second) = queue_with(3, 2)
    assert take(queue) == [first, second]
    accumulator.complete(first, error=DeliveryTimeout("late"))
    queue.on_refused(first, resend=True, counts=True)
    queue.on_refused(second, resend=True, counts=True)
    assert queue.recovered()
    assert take(queue) == [second]
    assert carried(second) == Number(7, 0, 3), "the batch must keep its number, as the one before it may be in the log"


def test_without_an_id_nothing_is_sent_and_with_it_everything_is_numbered() -> None:
    accumulator, queue, batches = queue_with(2, 2, number=Numbering())
    assert queue.lacks_id
    assert carried(batches[0]) == NO_NUMBER
    assert take(queue) == []
    queue.adopt(9, 3)
    batches.append(enqueue(accumulator, queue, 1))
    assert take(queue) == batches
    assert [carried(batch) for batch in batches] == [Number(9, 3, 0), Number(9, 3, 2), Number(9, 3, 4)]


def test_a_queue_without_numbers_has_none() -> None:
    accumulator, queue = Accumulator(CONFIG), PartitionQueue("t", 0)
    batches = [enqueue(accumulator, queue, 1) for _ in range(8)]
    assert not queue.lacks_id
    assert take(queue) == batches, "without a limit on batches as many as fit must be taken"
    assert {carried(batch) for batch in batches} == {NO_NUMBER}


def test_at_most_five_batches_are_in_flight() -> None:
    _, queue, batches = queue_with(*[1] * 8)
    assert take(queue) == batches[:BATCHES_REMEMBERED]
    assert take(queue) == []
    assert queue.sendable, "the queue must count as sendable once an answer has come"
    queue.on_accepted(batches[0])
    queue.on_accepted(batches[1])
    assert take(queue) == batches[5:7]


def test_batches_that_would_only_wait_are_larger_instead() -> None:
    accumulator, queue, _ = queue_with(*[1] * BATCHES_REMEMBERED)
    assert accumulator.open(queue, 10, 0).limit_bytes == CROWDED_GROWTH * CONFIG.batch_size_bytes
    take(queue)
    accumulator.close_all()
    assert accumulator.open(queue, 10, 0).limit_bytes == CONFIG.batch_size_bytes


def test_the_sticky_batch_grows_to_half_of_the_least_backlog_while_every_partition_is_crowded() -> None:
    accumulator = Accumulator(CONFIG)
    view = TopicView("t", b"i" * 16, (PartitionView(0, 1, 0), PartitionView(1, 1, 0), PartitionView(2, -1, 0)))
    topic = TopicQueues(view, None, idempotent=True)
    one, other, _ = topic.queues

    def wait(queue: PartitionQueue, batches: int, size: int) -> None:
        for _ in range(batches):
            batch = accumulator.open(queue, size, 0)
            batch.append(b"", None, (), 1, size)
            accumulator.close(batch)

    def limit(queue: PartitionQueue) -> int:
        batch = accumulator.open(queue, 10, 0, sticky_backlog_bytes=topic.sticky_backlog_bytes)
        found = batch.limit_bytes
        accumulator.close(batch)
        queue.waiting.remove(batch)
        accumulator.release(batch)
        return found

    wait(one, 40, 1000)
    assert limit(one) == CONFIG.batch_size_bytes, "a slow broker's partition must not get more than others"
    wait(other, BATCHES_REMEMBERED, 1000)
    half = sum(batch.size_bytes for batch in other.waiting) // 2
    assert CONFIG.batch_size_bytes < half == limit(one) == limit(other)
    wait(other, 40, 1000)
    assert limit(one) == STICKY_GROWTH * CONFIG.batch_size_bytes


def test_the_first_sticky_partition_is_counted_among_those_there_are() -> None:
    parts = (PartitionView(0, 1, 0), PartitionView(1, -1, 0), PartitionView(2, 1, 0))
    view = TopicView("t", b"i" * 16, parts)
    assert TopicQueues(view, None, first=3 * 7 + 2).sticky_turns(3) == [2, 0, 2]
    assert TopicQueues(view, None, first=1).sticky_turns(3) == [2, 0, 2], "partition 1 has no leader"


def test_nothing_is_sent_that_would_make_the_broker_forget_what_is_not_answered() -> None:
    """Answers may come in any order; the broker remembers the last five batches, not those without an answer."""
    _, queue, batches = queue_with(*[1] * 8)
    take(queue)
    for batch in batches[1:5]:
        queue.on_accepted(batch)
    assert take(queue) == [], "nothing must be sent: a sixth batch would make brokers forget the first"
    queue.on_accepted(batches[0])
    assert take(queue) == batches[5:]


def test_numbers_begin_anew_when_the_first_batch_in_flight_is_denied() -> None:
    accumulator, queue, batches = queue_with(2, 3, 1)
    take(queue)
    queue.on_denied(batches[0])
    assert not queue.recovered(), "the queue must not recover while other batches have no answer"
    queue.on_refused(batches[1], resend=True, counts=False)
    queue.on_refused(batches[2], resend=True, counts=False)
    assert queue.recovered()
    batches.append(enqueue(accumulator, queue, 1))
    assert take(queue) == batches
    assert [carried(batch) for batch in batches] == [Number(7, 1, base) for base in (0, 2, 5, 6)]
    assert queue.failures == 0, "after new numbers the next try must come without a pause"


def test_denied_again_at_once_is_a_reason_to_wait() -> None:
    _, queue, (batch,) = queue_with(1)
    for failures in (0, 1, 2):
        take(queue)
        queue.on_denied(batch)
        queue.recovered()
        assert queue.failures == failures
    take(queue)
    queue.on_accepted(batch)
    assert queue.failures == queue.renumbered == 0


def test_what_is_said_of_a_later_batch_changes_no_number() -> None:
    _, queue, batches = queue_with(2, 3)
    take(queue)
    queue.on_denied(batches[1])
    queue.on_refused(batches[0], resend=True, counts=True)  # the first one may be in the log
    queue.recovered()
    assert take(queue) == batches
    assert [carried(batch) for batch in batches] == [Number(7, 0, 0), Number(7, 0, 2)]


def test_a_denial_behind_what_is_in_doubt_changes_no_number() -> None:
    _, queue, batches = queue_with(2, 3)
    take(queue)
    queue.on_refused(batches[0], resend=True, counts=True)
    assert not queue.is_first_in_flight(batches[1]), (
        "a batch behind one that waits to be sent again must not count as the first"
    )
    queue.on_denied(batches[1])
    queue.recovered()
    take(queue)
    assert [carried(batch) for batch in batches] == [Number(7, 0, 0), Number(7, 0, 2)]


def test_after_the_last_epoch_comes_another_id() -> None:
    _, queue, (batch,) = queue_with(1, number=numbering(7, LAST_EPOCH))
    take(queue)
    queue.on_denied(batch)
    queue.recovered()
    assert queue.lacks_id
    queue.adopt(8, 0)
    take(queue)
    assert carried(batch) == Number(8, 0, 0)


def test_under_another_id_only_what_is_certainly_not_in_the_log_is_sent_again() -> None:
    _, queue, (first, second, third) = queue_with(1, 1, 1)
    take(queue)
    second.in_doubt = True
    assert queue.on_fenced(first) == [second]
    queue.on_refused(second, resend=False, counts=False)
    queue.on_refused(third, resend=True, counts=False)
    queue.recovered()
    assert queue.lacks_id
    queue.adopt(8, 0)
    assert take(queue) == [first, third]
    assert [carried(first), carried(third)] == [Number(8, 0, 0), Number(8, 0, 1)]


def test_halves_have_the_numbers_of_the_whole() -> None:
    accumulator, queue, (large, last) = queue_with(5, 2)
    take(queue)
    queue.on_refused(last, resend=True, counts=False)
    halves = accumulator.split(large)
    for half in halves:
        half.encode(Codec.NONE, None)
    queue.recovered()
    assert take(queue) == [*halves, last]
    assert [carried(batch).base_sequence for batch in (*halves, last)] == [0, halves[0].count, 5]


def test_only_what_directly_follows_the_acknowledged_says_that_something_was_lost() -> None:
    numbers = numbering()
    first = numbers.take(3)
    numbers.on_acknowledged(first, 3)
    second = numbers.take(2)
    assert numbers.follows_acknowledged(second)
    assert not numbers.follows_acknowledged(numbers.take(1))
    numbers.start_over()
    assert not numbers.follows_acknowledged(numbers.take(1))


def test_numbers_survive_a_wrap_around_in_the_queue() -> None:
    numbers = numbering()
    numbers.upcoming = Number(7, 0, SEQUENCES - 2)
    numbers.repredict(0)
    _, queue, batches = queue_with(3, 1, number=numbers)
    take(queue)
    assert [carried(batch).base_sequence for batch in batches] == [SEQUENCES - 2, 1]
    assert parse_header(batches[0].encoded or b"").record_count == 3


def run(link: Link, steps: int = 250) -> Link:
    for _ in range(steps):
        link.step()
    link.heal()
    link.check()
    return link


@pytest.mark.parametrize("first", range(0, 800, 100))
def test_every_record_is_there_once_and_in_order(first: int) -> None:
    renumbered = sum(run(Link(random.Random(seed))).renumbered for seed in range(first, first + 100))
    assert renumbered > 50, f"batches were numbered anew only {renumbered} times, so that the runs show little"
