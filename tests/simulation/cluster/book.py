"""The records that applications sent, the answers that they got, and checks of the outcome.

Every record names its writer (one process of an application) and its number there. Checked at once, whenever records
are committed or a client gets an answer:

once, in order      the records of an idempotent writer are in one partition once, in the order of their numbers
told is there       a record that acks=all acknowledged is committed, at the offset in the answer
read is there       a reader's records are the committed ones at these offsets, without a gap (`ledger.check_read`)

and at the end: no record that acks=all acknowledged is missing, every record was sent by a writer, and no record is
there that was reported as certainly not in the log.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.dataplane.isolation import Entry
from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from raftlog.types import Record, RecordMetadata
    from tests.simulation.cluster.ledger import ClusterLedger

MARK = b"C"


class Value(NamedTuple):
    """The content of a record: `writer` and `number`, and other fields that its application needs."""

    writer: int
    number: int
    rest: tuple[bytes, ...] = ()

    def encode(self, padding_bytes: int = 0) -> bytes:
        """Return it as a record's value."""
        return b"|".join([MARK, b"%d" % self.writer, b"%d" % self.number, *self.rest, b"." * padding_bytes])


def read_value(value: bytes | None) -> Value | None:
    """Return the content of a record; None: no application of the simulation wrote it."""
    if value is None or not value.startswith(MARK + b"|"):
        return None
    _, writer, number, *rest, _ = value.split(b"|")
    return Value(int(writer), int(number), tuple(rest))


@dataclass(eq=False)
class Writer:
    """One life of an application that sends."""

    number: int
    name: str
    idempotent: bool
    """Whether the cluster promises to have each record once and in order."""
    safe: bool
    """Whether what is acknowledged is never lost: acks=all."""
    sent: int = 0
    acknowledged: dict[int, tuple[PartitionKey, int]] = field(default_factory=dict)
    """Where they are, by number; -1 for an offset that was not told."""
    certainly_not: set[int] = field(default_factory=set)
    """Numbers that were refused before anything was sent."""


class Book:
    """All writers, and where their records are."""

    def __init__(self, ledger: ClusterLedger) -> None:
        self.ledger = ledger
        self.counts: Counter[str] = Counter()
        self.writers: list[Writer] = []
        self.places: dict[tuple[int, int], list[tuple[PartitionKey, int, Entry]]] = defaultdict(list)
        """By writer and number."""
        self._last: dict[tuple[PartitionKey, int], int] = {}

    def new_writer(self, name: str, *, idempotent: bool, safe: bool) -> Writer:
        """A life begins."""
        writer = Writer(len(self.writers), name, idempotent, safe)
        self.writers.append(writer)
        return writer

    # What is committed

    def committed(self, key: PartitionKey, entry: Entry) -> None:
        """A batch was committed."""
        for place, raw in enumerate(entry.values):
            value = read_value(raw)
            if value is None:
                continue
            self.counts["records committed"] += 1
            writer = self.writers[value.writer]
            offset = entry.base_offset + place
            where = self.places[value.writer, value.number]
            if not writer.idempotent:
                self.counts["records committed again"] += bool(where)
            elif where:
                raise Violation(
                    f"{self.ledger.name(key)} has record {value.number} of the idempotent {writer.name} at "
                    f"offset {offset}, but the record is already in {self.ledger.name(where[0][0])} at offset "
                    f"{where[0][1]}"
                )
            elif value.number < self._last.get((key, value.writer), -1):
                raise Violation(
                    f"{self.ledger.name(key)} has record {value.number} of {writer.name} at offset {offset}, "
                    f"behind its later record {self._last[key, value.writer]}"
                )
            if value.number in writer.certainly_not:
                raise Violation(
                    f"{self.ledger.name(key)} has record {value.number} of {writer.name} at offset {offset}, "
                    "but the producer was told that this record is certainly not in the log"
                )
            where.append((key, offset, entry))
            self._last[key, value.writer] = max(value.number, self._last.get((key, value.writer), -1))

    @staticmethod
    def parse(raw: bytes) -> Value:
        """Return the content of a record that an application of the simulation wrote."""
        value = read_value(raw)
        assert value is not None
        return value

    # What producers are told

    def acknowledged(self, writer: Writer, number: int, told: RecordMetadata, key: PartitionKey) -> None:
        """A delivery has succeeded.

        Raises:
            Violation: the record is not there.
        """
        writer.acknowledged[number] = key, told.offset
        self.counts["records acknowledged"] += 1
        if not writer.safe:
            return
        where = self.places[writer.number, number]
        there = [offset for each, offset, _ in where if each == key]
        if not there or (told.offset >= 0 and told.offset not in there):
            raise Violation(
                f"{writer.name} was told that its record {number} is in {self.ledger.name(key)} at offset "
                f"{told.offset}, but the committed log has it at {there}"
            )

    def acknowledged_of_what_goes(self, writer: Writer, number: int, told: RecordMetadata) -> None:
        """A delivery to a topic has succeeded that may be gone by now.

        Raises:
            Violation: the record was never there.
        """
        self.counts["records acknowledged"] += 1
        if not self.places[writer.number, number]:
            raise Violation(
                f"{writer.name} was told that its record {number} is in {told.topic}-{told.partition}, but no "
                "committed log has it"
            )

    # What readers are given

    def given(self, key: PartitionKey, begin: int, records: list[Record], *, committed_only: bool) -> int:
        """A reader that stood at `begin` was given records of one partition; return where it stands.

        Raises:
            Violation: they are not what is committed, or some are left out.
        """
        self.counts["records given"] += len(records)
        end = begin
        for record in records:
            if record.offset < end:
                raise Violation(
                    f"{self.ledger.name(key)}: a reader that had reached offset {end} was given the earlier "
                    f"offset {record.offset}"
                )
            end = record.offset + 1
            if self.ledger.value_at(key, record.offset) != record.value:
                raise Violation(
                    f"{self.ledger.name(key)}: a reader was given {record.value!r} for offset {record.offset}, "
                    f"but {self.ledger.value_at(key, record.offset)!r} is committed there"
                )
        offsets = [record.offset for record in records]
        if committed_only:
            self.ledger.check_read(key, begin, end, offsets)
        else:
            self.ledger.check_read_all(key, begin, end, offsets)
        return end

    # The end

    def check(self) -> Counter[str]:
        """Check the outcome of all acknowledged records.

        Raises:
            Violation: a record is missing.
        """
        for writer in self.writers:
            missing = [
                number
                for number, (key, _) in writer.acknowledged.items()
                if not self.places[writer.number, number] and self.ledger.exists(key)
            ]
            if missing and writer.safe:
                raise Violation(
                    f"{writer.name}: the records {missing} were acknowledged, but no committed log has them"
                )
            self.counts["lost, as acks=0 and acks=1 may"] += len(missing)
        return self.counts
