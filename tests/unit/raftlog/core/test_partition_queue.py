"""Order under refusals, as a property: whatever is refused, batches are accepted in the order they were queued."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.accumulator import Accumulator, AccumulatorConfig
from raftlog._core.batch import Batch
from raftlog._core.partition_queue import PartitionQueue
from raftlog.errors import BrokerUnavailable, DeliveryTimeout, FencedLeaderEpoch
from raftlog.format import Codec, decode_batch

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
    assert not queue.recovered(), "the second batch is still in flight"
    assert not queue.sendable
    assert queue.take(1, 10_000, at_least_one=True) == [], "it would be refused for the chain"
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
