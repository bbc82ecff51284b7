"""Invariants of records and transactions, where producers may repeat records, and topics are created and deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from broker.coordinator.groups.records import parse_key as parse_group_key
from raftlog.format import HEADER_BYTES, Buffer, parse_header
from raftlog.v1.group_records_pb2 import OffsetValue
from tests.simulation.dataplane.committed import Batch
from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.dataplane.transaction_ledger import TransactionLedger
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker.partition.partition import Partition
    from tests.simulation.cluster.schedule import ClusterSimulation
    from tests.simulation.dataplane.broker import DataBroker
    from tests.simulation.dataplane.ledger import _View
    from tests.simulation.dataplane.transaction_schedule import TransactionSimulation


class ClusterLedger(TransactionLedger):
    """As `TransactionLedger`; what it finds committed it tells the book, record by record."""

    def __init__(self, simulation: ClusterSimulation) -> None:
        super().__init__(cast("TransactionSimulation", simulation))  # it asks for what both have
        self._cluster = simulation
        self._told: dict[PartitionKey, int] = {}

    def name(self, key: PartitionKey) -> str:
        """Return a partition's name."""
        return self._name(key)

    def exists(self, key: PartitionKey) -> bool:
        """Return whether the partition was not deleted."""
        return self._cluster.invariants.truth.partition(*key) is not None

    def may_repeat(self, key: PartitionKey, batch: Batch) -> bool:
        """Whether a partition may have the same batch twice, because no idempotent producer sent it."""
        return parse_header(batch.data).producer_id < 0 or super().may_repeat(key, batch)

    def _look_at(self, broker: DataBroker, partition: Partition, key: PartitionKey, view: _View, leads_in: int) -> None:
        super()._look_at(broker, partition, key, view, leads_in)
        if self._cluster.is_internal(key):
            return
        entries = self.isolation(key).entries
        for entry in entries[self._told.get(key, 0) :]:
            self._cluster.book.committed(key, entry)
        self._told[key] = len(entries)

    def value_at(self, key: PartitionKey, offset: int) -> bytes | None:
        """Return the value that is committed at an offset; None: there is none."""
        for entry in self.isolation(key).between(offset, offset + 1):
            return entry.values[offset - entry.base_offset]
        return None

    def last_readable(self, key: PartitionKey) -> int:
        """Return where the last record ends that readers of committed records get."""
        entries = self.isolation(key).entries
        return next((entry.next_offset for entry in reversed(entries) if entry.is_visible), 0)

    def readable(self, key: PartitionKey, begin: int, end: int) -> list[int]:
        """Return the offsets in [begin, end) that readers of committed records get.

        Raises:
            Violation: something there is not decided yet.
        """
        found: list[int] = []
        for entry in self.isolation(key).between(begin, end):
            if entry.part is not None and entry.part.commit is None:
                raise Violation(
                    f"{self._name(key)}: a reader of committed records reached offset {end}, but the "
                    f"transaction {entry.part.numbers} before it is open"
                )
            if entry.is_visible:
                found += range(max(begin, entry.base_offset), min(end, entry.next_offset))
        return found

    def _apply_group(self, record_key: bytes, value: bytes | None) -> None:
        key = parse_group_key(record_key)
        if key.WhichOneof("kind") == "offset":
            part = (key.offset.topic_id, key.offset.partition)
            offset = None if value is None else OffsetValue.FromString(value).offset
            self._cluster.offsets.commits(key.group_id, part, offset)
            if value is None:
                return
        super()._apply_group(record_key, value)

    def check_read_all(self, key: PartitionKey, begin: int, end: int, offsets: Iterable[int]) -> None:
        """A reader of everything has got these offsets of all in [begin, end).

        Raises:
            Violation: one too few.
        """
        expected: set[int] = set()
        for entry in self.isolation(key).between(begin, end):
            expected |= set(range(max(begin, entry.base_offset), min(end, entry.next_offset)))
        missing = expected - set(offsets)
        if missing:
            raise Violation(
                f"{self._name(key)}: a reader passed the committed offsets {sorted(missing)} without getting "
                "their records"
            )

    def answers(
        self,
        broker: DataBroker,
        key: PartitionKey,
        leader_epoch: int,
        base_offset: int,
        batch: Buffer,
        *,
        all_replicas: bool,
    ) -> None:
        """An acknowledgement leaves; perhaps one that was decided on before a pause.

        Raises:
            Violation: there is no lease, or another broker acknowledges in the same epoch.
        """
        self.check_may_acknowledge(broker, key, leader_epoch)
        self.counts["acks=all" if all_replicas else "acks=1"] += 1
        if all_replicas:
            self._due.append((broker, key, leader_epoch, base_offset, batch))
        else:
            self._single.append((key, leader_epoch, base_offset, bytes(batch[HEADER_BYTES:])))
