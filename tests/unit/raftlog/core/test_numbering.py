"""The numbers of an idempotent producer's batches (KIP-98, KIP-360)."""

from __future__ import annotations

import pyarrow as pa
import pytest

from raftlog._core.accumulator import CROWDED_FACTOR, Accumulator, AccumulatorConfig
from raftlog._core.batch import Batch
from raftlog._core.numbering import BATCHES_REMEMBERED, LAST_EPOCH, NO_NUMBER, SEQUENCES, Number, Numbering
from raftlog._core.partition_queue import PartitionQueue
from raftlog.errors import CorruptRecordError, DeliveryTimeout
from raftlog.format import Codec, Columns, encode_batch, parse_batch, parse_header, stamp_producer

CONFIG = AccumulatorConfig(
    batch_size_bytes=1024,
    buffer_memory_bytes=1 << 20,
    max_request_size_bytes=1 << 20,
    linger_ms=5,
    delivery_timeout_ms=1000,
)


def numbering(producer_id: int = 7, epoch: int = 0) -> Numbering:
    made = Numbering()
    made.adopt(producer_id, epoch)
    return made


def queue_with(*rows: int, number: Numbering | None = None) -> tuple[Accumulator, PartitionQueue, list[Batch]]:
    accumulator, queue = Accumulator(CONFIG), PartitionQueue("t", 0, number or numbering())
    return accumulator, queue, [add(accumulator, queue, count) for count in rows]


def add(accumulator: Accumulator, queue: PartitionQueue, rows: int) -> Batch:
    batch = accumulator.open(queue, 10, 0)
    for row in range(rows):
        batch.append(b"%d" % row, None, (), 7, 10)
    accumulator.close(batch)
    batch.encode(Codec.NONE, None)
    return batch


def carried(batch: Batch) -> Number:
    """Return what the bytes say, and see that they are whole."""
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
    assert all(batch.encoded is was for batch, was in zip(batches, before, strict=True)), "nothing was stamped anew"


def test_what_was_never_sent_uses_no_number() -> None:
    accumulator, queue, batches = queue_with(3, 1, 4)
    accumulator.complete(batches[1], error=DeliveryTimeout("late"))
    assert take(queue) == [batches[0], batches[2]]
    assert carried(batches[2]) == Number(7, 0, 3), "stamped anew"
    later = add(accumulator, queue, 1)
    assert carried(later) == Number(7, 0, 7), "predicted rightly again"


def test_what_was_sent_and_has_failed_leaves_a_gap() -> None:
    accumulator, queue, (first, second) = queue_with(3, 2)
    assert take(queue) == [first, second]
    accumulator.complete(first, error=DeliveryTimeout("late"))
    queue.on_refused(first, resend=True, counts=True)
    queue.on_refused(second, resend=True, counts=True)
    assert queue.recovered()
    assert take(queue) == [second]
    assert carried(second) == Number(7, 0, 3), "the first one may be in the log or not"


def test_without_an_id_nothing_is_sent_and_with_it_everything_is_numbered() -> None:
    accumulator, queue, batches = queue_with(2, 2, number=Numbering())
    assert queue.lacks_id
    assert carried(batches[0]) == NO_NUMBER
    assert take(queue) == []
    queue.adopt(9, 3)
    batches.append(add(accumulator, queue, 1))
    assert take(queue) == batches
    assert [carried(batch) for batch in batches] == [Number(9, 3, 0), Number(9, 3, 2), Number(9, 3, 4)]


def test_a_queue_without_numbers_has_none() -> None:
    accumulator, queue = Accumulator(CONFIG), PartitionQueue("t", 0)
    batches = [add(accumulator, queue, 1) for _ in range(8)]
    assert not queue.lacks_id
    assert take(queue) == batches, "as many as fit"
    assert {carried(batch) for batch in batches} == {NO_NUMBER}


def test_at_most_five_batches_are_in_flight() -> None:
    _, queue, batches = queue_with(*[1] * 8)
    assert take(queue) == batches[:BATCHES_REMEMBERED]
    assert take(queue) == []
    assert queue.sendable, "once there is an answer"
    queue.on_accepted(batches[0])
    queue.on_accepted(batches[1])
    assert take(queue) == batches[5:7]


def test_batches_that_would_only_wait_are_larger_instead() -> None:
    accumulator, queue, _ = queue_with(*[1] * BATCHES_REMEMBERED)
    assert accumulator.open(queue, 10, 0).limit_bytes == CROWDED_FACTOR * CONFIG.batch_size_bytes
    take(queue)
    accumulator.close_all()
    assert accumulator.open(queue, 10, 0).limit_bytes == CONFIG.batch_size_bytes


def test_nothing_is_sent_that_would_make_the_broker_forget_what_is_not_answered() -> None:
    """Answers may come in any order; the broker remembers the last five batches, not those without an answer."""
    _, queue, batches = queue_with(*[1] * 8)
    take(queue)
    for batch in batches[1:5]:
        queue.on_accepted(batch)
    assert take(queue) == [], "the first one would not be recognised any more"
    queue.on_accepted(batches[0])
    assert take(queue) == batches[5:]


def test_numbers_begin_anew_when_the_first_batch_in_flight_is_denied() -> None:
    accumulator, queue, batches = queue_with(2, 3, 1)
    take(queue)
    queue.on_denied(batches[0])
    assert not queue.recovered(), "the others owe their answers"
    queue.on_refused(batches[1], resend=True, counts=False)
    queue.on_refused(batches[2], resend=True, counts=False)
    assert queue.recovered()
    batches.append(add(accumulator, queue, 1))
    assert take(queue) == batches
    assert [carried(batch) for batch in batches] == [Number(7, 1, base) for base in (0, 2, 5, 6)]
    assert queue.failures == 0, "the next try needs no pause"


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
    assert not queue.is_first_in_flight(batches[1]), "the one before waits to be sent again"
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
