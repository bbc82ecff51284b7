"""Invariants of transactions, over all partitions and both kinds of coordinators, in addition to those of `ledger`.

decided once            a decision whose record is committed never changes (`_apply`)
decided first           no marker is written before its decision is committed (`undecided`)
one decision            all partitions of a transaction get the decided marker (`_ended`)
added first             a record is in a partition only if that was part of the transaction before (`_begun`)
marked everywhere       a transaction is over only when every partition and group of it has its marker (`_check_over`)
last stable offset      of every replica: exactly min(high watermark, first offset of an undecided transaction)
sinks                   the last batch only rises
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.coordinator.groups.records import parse_key as parse_group_key
from broker.coordinator.transactions import records
from broker.coordinator.transactions.transaction import State, Transaction
from raftlog.format import decode_batch
from raftlog.format.control import Marker
from raftlog.v1.group_records_pb2 import OffsetValue, ProducerFenceValue
from tests.simulation.dataplane.isolation import Isolation, Numbers, Part
from tests.simulation.dataplane.ledger import Ledger, _View
from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from broker.partition.partition import Partition
    from tests.simulation.dataplane.broker import DataBroker
    from tests.simulation.dataplane.transaction_schedule import TransactionSimulation

Target = PartitionKey | str


@dataclass
class Sink:
    """What is committed of a sink."""

    last_batch_id: int = -1
    committing: frozenset[int] = frozenset()


class TransactionLedger(Ledger):
    """The decisions about transactions, and their outcomes."""

    def __init__(self, simulation: TransactionSimulation) -> None:
        super().__init__(simulation)
        self._transactions = simulation
        self.isolations: dict[PartitionKey, Isolation] = {}
        self.added: defaultdict[Numbers, set[Target]] = defaultdict(set)
        self.decided: dict[Numbers, bool] = {}
        self.open: dict[str, Numbers] = {}
        """Transactional ids, and stages, that are open."""
        self.prepared: dict[str, Numbers] = {}
        """Transactions that are decided and not known to be complete."""
        self.sinks: defaultdict[str, Sink] = defaultdict(Sink)
        self.stages: dict[int, tuple[str, int]] = {}
        """Sink and batch by producer id."""
        self.offsets: dict[tuple[str, PartitionKey], int] = {}
        """What groups have committed."""
        self.fences: dict[tuple[str, int], int] = {}
        """Epochs by group and producer id."""
        self.pending: set[tuple[str, int, PartitionKey]] = set()
        self._reached: dict[tuple[int, PartitionKey], int] = {}
        """The highest high watermark of each replica, in all of its lives."""
        self._state_read: dict[PartitionKey, int] = {}
        self._checks: list[Callable[[], None]] = []
        """What is looked at once all partitions of a broker have been."""

    def isolation(self, key: PartitionKey) -> Isolation:
        """Return what transactions have become in a partition."""
        found = self.isolations.get(key)
        if found is None:
            found = self.isolations[key] = Isolation(self._name(key), self.of(key))
        return found

    # After each event of a broker

    def look(self, broker: DataBroker) -> None:
        """A broker has done something."""
        super().look(broker)
        checks, self._checks = self._checks, []
        for check in checks:
            check()

    def _look_at(self, broker: DataBroker, partition: Partition, key: PartitionKey, view: _View, leads_in: int) -> None:
        super()._look_at(broker, partition, key, view, leads_in)
        if self._transactions.is_internal(key):
            self._read_internal(key)
            return
        isolation = self.isolation(key)
        begun, ended = isolation.catch_up()
        for part in begun:
            self._checks.append(lambda part=part: self._begun(key, part))  # type: ignore[misc]
        for part in ended:
            self._ended(key, part)
        log = view.log
        replica = (broker.broker_id, key)
        reached = self._reached[replica] = max(self._reached.get(replica, 0), log.high_watermark)
        lowest, highest = isolation.stable_at(log.high_watermark, reached, log.log_start_offset)
        if not lowest <= partition.last_stable_offset <= highest:
            raise Violation(
                f"the last stable offset of {self._name(key)} on broker {broker.broker_id} is "
                f"{partition.last_stable_offset}, but must be {lowest} to {highest} with the high watermark "
                f"{log.high_watermark} and the log start {log.log_start_offset}"
            )
        self.counts["last stable offset below the high watermark"] += lowest < log.high_watermark

    def _begun(self, key: PartitionKey, part: Part) -> None:
        if key not in self.added[part.numbers]:
            raise Violation(
                f"{self._name(key)} has a record of {part.numbers} at offset {part.first_offset}, but the "
                "partition was not added to that transaction"
            )

    def _ended(self, key: PartitionKey, part: Part) -> None:
        """A marker was committed that ends something."""
        self.counts["markers committed" if part.commit else "markers of aborts"] += 1
        if self.decided.get(part.numbers) is not part.commit:
            self._checks.append(lambda: self._check_decided(key, part))

    def _check_decided(self, key: PartitionKey, part: Part) -> None:
        decided = self.decided.get(part.numbers)
        if decided is not part.commit:
            raise Violation(
                f"{self._name(key)}: the marker at offset {part.marker_offset} ends {part.numbers} with "
                f"commit={part.commit}, but the coordinator's decision is {decided}"
            )

    # What coordinators have written

    def _read_internal(self, key: PartitionKey) -> None:
        batches = self.of(key).batches
        apply = self._apply if self._transactions.is_state(key) else self._apply_group
        for batch in batches[self._state_read.get(key, 0) :]:
            columns = decode_batch(batch.data).columns
            keys, values = (columns.column(columns.schema.get_field_index(name)) for name in ("key", "value"))
            for record_key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True):
                apply(record_key, value)
        self._state_read[key] = len(batches)

    def _apply(self, record_key: bytes, value: bytes | None) -> None:
        key = records.parse_key(record_key)
        match key.WhichOneof("kind"):
            case "transactional_id":
                if value is not None:
                    self._apply_transaction(
                        key.transactional_id, records.parse_transaction(key.transactional_id, value)
                    )
            case "sink_id":
                assert value is not None, "the record of a sink was deleted, though no sink expires in this simulation"
                self._apply_sink(key.sink_id, value)
            case _:
                self._apply_stage(key.stage.sink_id, key.stage.producer_id, value)

    def _apply_transaction(self, transactional_id: str, now: Transaction) -> None:
        before = self.prepared.get(transactional_id)
        if now.state is State.ONGOING:
            numbers = (now.producer_id, now.producer_epoch)
            if numbers in self.decided:
                raise Violation(f"{transactional_id}: the transaction {numbers} is open, but it was decided before")
            self._over(transactional_id)
            self.open[transactional_id] = numbers
            self.added[numbers] |= now.partitions | now.group_ids
        elif now.is_prepared:
            numbers = (now.producer_id, now.producer_epoch - 1)
            if before is not None and before != numbers:
                raise Violation(
                    f"{transactional_id}: the transaction {numbers} is decided, but {before} is not complete yet"
                )
            self.open.pop(transactional_id, None)
            self._decide(numbers, now.commits)
            self.prepared[transactional_id] = numbers
            self.counts["decided by a timeout or another producer"] += now.timed_out
        else:
            opened = self.open.pop(transactional_id, None)
            if opened is not None:
                raise Violation(f"{transactional_id}: the transaction {opened} is complete, but was never decided")
            self._over(transactional_id)

    def _decide(self, numbers: Numbers, commit: bool) -> None:
        before = self.decided.setdefault(numbers, commit)
        if before is not commit:
            raise Violation(f"{numbers} was decided with commit={before}, and now with commit={commit}")

    def _over(self, name: str) -> None:
        numbers = self.prepared.pop(name, None)
        if numbers is not None:
            self._checks.append(lambda: self._check_over(name, numbers))

    def _check_over(self, name: str, numbers: Numbers) -> None:
        missing = self.unmarked(numbers)
        if missing:
            raise Violation(f"{name}: the transaction {numbers} is complete, but {missing} have no marker")
        self.counts["transactions over"] += 1

    def unmarked(self, numbers: Numbers) -> list[str]:
        """Return the partitions and groups in which a decided transaction has no committed marker yet."""
        producer_id, epoch = numbers
        missing = []
        for target in self.added[numbers]:
            if isinstance(target, str):
                if self.fences.get((target, producer_id), -1) <= epoch:
                    missing.append(target)
            elif self.isolation(target).epochs.get(producer_id, -1) <= epoch:
                missing.append(self._name(target))
        return sorted(missing)

    def _apply_sink(self, sink_id: str, value: bytes) -> None:
        sink, head = self.sinks[sink_id], records.parse_sink(sink_id, value)
        if head.last_batch_id < sink.last_batch_id:
            raise Violation(
                f"{sink_id}: the last committed batch goes back from {sink.last_batch_id} to {head.last_batch_id}"
            )
        self.counts["batches of sinks"] += head.last_batch_id > sink.last_batch_id
        sink.last_batch_id, sink.committing = head.last_batch_id, head.committing
        for producer_id in head.committing:
            self._decide((producer_id, 0), True)
        for producer_id, (of, batch_id) in self.stages.items():
            if of == sink_id and batch_id <= sink.last_batch_id and f"stage {producer_id}" in self.open:
                del self.open[f"stage {producer_id}"]
                self._decide((producer_id, 0), producer_id in sink.committing)
                self.prepared[f"stage {producer_id}"] = (producer_id, 0)

    def _apply_stage(self, sink_id: str, producer_id: int, value: bytes | None) -> None:
        name, numbers = f"stage {producer_id}", (producer_id, 0)
        if value is None:
            if numbers not in self.decided:
                raise Violation(f"{sink_id}: stage {producer_id} is deleted, but was never decided")
            self._over(name)
            return
        stage = records.parse_stage(records.parse_key(_stage_key(sink_id, producer_id)).stage, value)
        self.stages[producer_id] = (sink_id, stage.batch_id)
        self.added[numbers] |= stage.partitions
        if stage.aborting:
            self.open.pop(name, None)
            self._decide(numbers, False)
            self.prepared[name] = numbers
        elif numbers not in self.decided:
            self.open[name] = numbers

    def _apply_group(self, record_key: bytes, value: bytes | None) -> None:
        key = parse_group_key(record_key)
        match key.WhichOneof("kind"):
            case "offset":
                assert value is not None, (
                    "the record of an offset was deleted, though no offset expires in this simulation"
                )
                part = (key.offset.topic_id, key.offset.partition)
                self.offsets[key.group_id, part] = OffsetValue.FromString(value).offset
            case "pending":
                pending = (key.group_id, key.pending.producer_id, (key.pending.topic_id, key.pending.partition))
                (self.pending.discard if value is None else self.pending.add)(pending)
            case "transaction_of" if value is not None:
                fence = ProducerFenceValue.FromString(value).producer_epoch
                self.fences[key.group_id, key.transaction_of] = fence

    # What is asked

    def undecided(self, broker: DataBroker, markers: Sequence[Marker]) -> str | None:
        """Return what is wrong with markers that are about to be written."""
        for again in (True, False):
            wrong = [each for each in markers if self.decided.get(_of(each)) is not each.commit]
            if not wrong:
                return None
            if again:
                self.look(broker)
        found = {_of(each): self.decided.get(_of(each)) for each in wrong}
        return f"markers {wrong} are about to be written, but the decisions are {found}"

    def check_read(self, key: PartitionKey, begin: int, end: int, offsets: Iterable[int]) -> None:
        """A reader of committed records has got these offsets of all in [begin, end).

        Raises:
            Violation: one of an aborted or an open transaction, or one too few.
        """
        isolation = self.isolation(key)
        got = set(offsets)
        for entry in isolation.between(begin, end):
            if entry.part is not None and entry.part.commit is None:
                raise Violation(
                    f"{self._name(key)}: a reader of committed records got from {begin} to {end}, but "
                    f"{entry.part.numbers} is open from offset {entry.part.first_offset} on"
                )
            expected = set(range(max(begin, entry.base_offset), min(end, entry.next_offset)))
            if not entry.is_visible and got & expected:
                raise Violation(
                    f"{self._name(key)}: a reader of committed records was given the offsets "
                    f"{sorted(got & expected)} of aborted transactions"
                )
            if entry.is_visible and expected - got:
                raise Violation(
                    f"{self._name(key)}: a reader passed the committed offsets {sorted(expected - got)} without "
                    "getting their records"
                )
            got -= expected
        if got:
            raise Violation(
                f"{self._name(key)}: a reader from {begin} to {end} was given the offsets {sorted(got)}, which "
                "are not in the log"
            )

    # The end

    def what_is_wrong(self) -> str | None:
        """Return the transactions that are undecided, or whose client was not told, once no work is in progress."""
        wrong = super().what_is_wrong()
        if wrong is not None:
            return wrong
        if self.open:
            return f"transactions are still open: {self.open}"
        if self.prepared:
            return f"transactions are decided, but not complete: {self.prepared}"
        for key, isolation in self.isolations.items():
            if isolation.open:
                return f"{self._name(key)} has open transactions: {[each.numbers for each in isolation.open.values()]}"
        if self.pending:
            return f"offsets of transactions are still pending: {self.pending}"
        return self._who_is_unstable()

    def _who_is_unstable(self) -> str | None:
        for broker_id in self._simulation.broker_ids:
            broker = self._simulation.data_broker(broker_id)
            for partition in [] if broker is None else broker.partitions():
                if partition.last_stable_offset != partition.high_watermark:
                    return (
                        f"{partition.topic_partition} on broker {broker_id}: last stable offset "
                        f"{partition.last_stable_offset}, high watermark {partition.high_watermark}"
                    )
        return None


def _of(marker: Marker) -> Numbers:
    return marker.producer_id, marker.producer_epoch - 1


def _stage_key(sink_id: str, producer_id: int) -> bytes:
    return records.stage_record(sink_id, producer_id, None)[0]
