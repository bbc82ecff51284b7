"""Idempotent producers: every batch is sent until it is answered, under the rules of the client (docs/adr/0012).

A batch keeps its numbers however often it is sent. One that is given up leaves a gap, and what comes after keeps its
numbers. Only when the first batch in flight is refused as out of order, or as of an unknown producer, everything in
flight is numbered anew in the next epoch. At most five batches are in flight, in order; copies of the same batch may
be under way to several leaders, and come late.

The ledger sees to it that no batch is committed twice, nor before one that was sent before it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raftlog.errors import (
    DuplicateSequence,
    InvalidProducerEpoch,
    OutOfOrderSequence,
    UnknownProducerId,
)
from raftlog.format import Columns, decode_batch, encode_batch, parse_batch
from raftmeta.image import NO_LEADER, PartitionImage
from tests.simulation.dataplane.clients import EPOCH_MS, SMALL_BYTES, Client
from tests.simulation.dataplane.messages import Answer, Failed, PartitionKey, Produce, Produced
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from tests.simulation.dataplane.schedule import DataSimulation

IN_FLIGHT = 5
RETRY_S = (0.01, 0.3)
GIVE_UP_S = (1.0, 8.0)
REPLAYS = 50
"""So many requests are kept to be sent once more."""


@dataclass(eq=False)
class _Batch:
    """One batch until it is answered. `attempt` counts: only the answer to the last one is heard."""

    serial: int
    columns: Columns
    records: int
    base_sequence: int
    epoch: int
    give_up_s: float
    attempt: int = 0
    asking: bool = False
    tried: bool = False


@dataclass(eq=False)
class _Queue:
    """One producer's state for one partition. Invariant: the sequences in flight follow one another, or have gaps."""

    key: PartitionKey
    producer_id: int
    epoch: int = 0
    next_sequence: int = 0
    in_flight: list[_Batch] = field(default_factory=list)
    timed: bool = False
    """Whether it is looked at again soon."""


class IdempotentProducer(Client):
    """Sends every batch until it knows that it is there, or gives it up. `told`: only when told to."""

    def __init__(self, simulation: DataSimulation, number: int, *, told: bool = False) -> None:
        super().__init__(simulation, number)
        self._number = number
        self._queues: dict[PartitionKey, _Queue] = {}
        self._sent: deque[tuple[int, Produce]] = deque(maxlen=REPLAYS)
        self._think_s = self.random.choice((0.02, 0.05, 0.2))
        self._gives_up = self.random.choice((True, False))
        self._waits_for_all = self.random.choice((True, False))
        """Whether it sends again only when nothing is under way any more."""
        if not told:
            self.process.after(self.random.uniform(0.5, 1.5), self._next)

    def _next(self) -> None:
        if self.simulation.winding_down:
            return
        self.process.after(self.random.expovariate(1 / self._think_s), self._next)
        known = self.partitions()
        if known:
            key, _ = self.random.choice(known)
            for _ in range(self.random.choice((1, 1, 2, 5))):
                self.add(key)
        if self._sent and self.random.random() < 0.2:
            node_id, request = self.random.choice(self._sent)
            self.simulation.counts["requests replayed"] += 1
            self.link(node_id).ask(request, lambda answer: None)

    @property
    def in_flight(self) -> int:
        """How many batches it has not heard of."""
        return sum(len(queue.in_flight) for queue in self._queues.values())

    def queue(self, key: PartitionKey) -> _Queue:
        """Return what it has for a partition."""
        queue = self._queues.get(key)
        if queue is None:
            producer_id = self._number * 1_000 + len(self._queues)
            queue = self._queues[key] = _Queue(key, producer_id)
        return queue

    def add(self, key: PartitionKey) -> bool:
        """Send another batch, if not too many are in flight."""
        queue = self.queue(key)
        if len(queue.in_flight) >= IN_FLIGHT:
            return False
        records = self.random.choice((1, 1, 3))
        plain = self.simulation.values.batch(records, self.random.choice(SMALL_BYTES))
        columns = decode_batch(plain).columns
        batch = _Batch(
            self.simulation.ledger.new_serial(plain),
            Columns(columns.column(columns.num_columns - 1)),
            records,
            queue.next_sequence,
            queue.epoch,
            self.simulation.scheduler.now_s + self.random.uniform(*GIVE_UP_S),
        )
        queue.next_sequence += records
        queue.in_flight.append(batch)
        self.simulation.counts["idempotent batches"] += 1
        if all(each.tried for each in queue.in_flight[:-1]):
            self._ask(queue, batch)
        else:  # there was no leader for the one before, which goes first
            self._again_later(queue)
        return True

    def _leader(self, key: PartitionKey) -> PartitionImage | None:
        partition = self.image.partition(*key)
        return None if partition is None or partition.leader == NO_LEADER else partition

    def _ask(self, queue: _Queue, batch: _Batch) -> None:
        partition = self._leader(queue.key)
        if partition is None:
            self._again_later(queue)
            return
        batch.attempt += 1  # no answer to an earlier one is heard any more
        batch.asking = batch.tried = True
        attempt = batch.attempt
        data = encode_batch(
            batch.columns,
            EPOCH_MS,
            producer_id=queue.producer_id,
            producer_epoch=batch.epoch,
            base_sequence=batch.base_sequence,
        )
        request = Produce(queue.key, partition.leader_epoch, data, parse_batch(data), True)
        if not any(request.batch == kept.batch for _, kept in self._sent):
            self._sent.append((partition.leader, request))

        def answered(answer: Answer | None) -> None:
            if batch.attempt == attempt and batch in queue.in_flight:
                batch.asking = False
                self._answered(queue, batch, answer)

        self.link(partition.leader).ask(request, answered)

    def _answered(self, queue: _Queue, batch: _Batch, answer: Answer | None) -> None:
        self.heard(answer)
        counts = self.simulation.counts
        if isinstance(answer, Produced):
            counts["idempotent acks"] += 1
            queue.in_flight.remove(batch)
            return
        error = answer.error if isinstance(answer, Failed) else None
        if error is not None:
            counts[f"idempotent {type(error).__name__}"] += 1
        match error:
            case DuplicateSequence():
                queue.in_flight.remove(batch)
                return
            case OutOfOrderSequence() | UnknownProducerId():
                if batch is queue.in_flight[0]:
                    self._number_anew(queue)
            case InvalidProducerEpoch():
                raise Violation(
                    f"producer {queue.producer_id} is refused with an old epoch, though no client raised it: {error}"
                )
        self._again_later(queue)

    def _number_anew(self, queue: _Queue) -> None:
        """Nothing that is in flight is in the log, or will ever be: says the broker."""
        self.simulation.counts["epochs begun"] += 1
        queue.epoch += 1
        queue.next_sequence = 0
        for batch in queue.in_flight:
            batch.epoch, batch.base_sequence = queue.epoch, queue.next_sequence
            batch.attempt += 1
            batch.asking = False
            queue.next_sequence += batch.records

    def _again_later(self, queue: _Queue) -> None:
        if not queue.timed:
            queue.timed = True
            self.process.after(self.random.uniform(*RETRY_S), self._again, queue)

    def _again(self, queue: _Queue) -> None:
        queue.timed = False
        now_s = self.simulation.scheduler.now_s
        first = queue.in_flight[0] if queue.in_flight else None
        if first is not None and self._gives_up and now_s > first.give_up_s and not self.simulation.winding_down:
            self.simulation.counts["batches given up"] += 1
            queue.in_flight.remove(first)
            if not first.tried:
                queue.next_sequence = first.base_sequence
                for batch in queue.in_flight:
                    assert not batch.tried, "a later batch was sent before the first one in flight"
                    batch.base_sequence = queue.next_sequence
                    queue.next_sequence += batch.records
        waiting = [batch for batch in queue.in_flight if not batch.asking]
        if not waiting:
            return
        if self._waits_for_all and len(waiting) < len(queue.in_flight):
            self._again_later(queue)
            return
        for batch in queue.in_flight:
            self._ask(queue, batch)
