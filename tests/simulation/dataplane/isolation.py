"""The state of transactions in one partition, derived from its committed records: the reference for readers.

Invariants, each a `Violation` where it does not hold:

markers are in order     a marker is one above the epoch of what it ends, and above every epoch before it: none twice
records are in order     no record of a transaction that is over, nor of the next one before its producer's marker
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from raftlog.format import Attributes, decode_batch, parse_header
from raftlog.format.control import placed_markers
from tests.simulation.dataplane.committed import Batch, Committed
from tests.simulation.parts import Violation

Numbers = tuple[int, int]
"""Producer id and epoch: one transaction, in all partitions."""


@dataclass(eq=False)
class Part:
    """The part of one transaction that is in one partition; `commit` None: it is open."""

    numbers: Numbers
    first_offset: int
    batches: list[tuple[int, int]] = field(default_factory=list)
    """(base offset, next offset) of each."""
    marker_offset: int = -1
    commit: bool | None = None


@dataclass(frozen=True)
class Entry:
    """A batch of records; `part` None: of no transaction."""

    base_offset: int
    next_offset: int
    part: Part | None
    values: tuple[bytes, ...]

    @property
    def is_visible(self) -> bool:
        """Whether readers of committed records get it; undecided while its transaction is open."""
        return self.part is None or self.part.commit is True


class Isolation:
    """One partition, read batch by batch as it is committed."""

    def __init__(self, name: str, committed: Committed) -> None:
        self._name = name
        self._committed = committed
        self._read = 0
        self.open: dict[int, Part] = {}
        self.decided: list[Part] = []
        """By the offsets of their markers."""
        self._marker_offsets: list[int] = []
        self.epochs: dict[int, int] = {}
        self.entries: list[Entry] = []
        self._bases: list[int] = []

    def catch_up(self) -> tuple[list[Part], list[Part]]:
        """Read the records committed since the last call; return the transactions that have begun and those that have
        ended."""
        begun: list[Part] = []
        ended: list[Part] = []
        batches = self._committed.batches
        while self._read < len(batches):
            batch = batches[self._read]
            self._read += 1
            header = parse_header(batch.data)
            if header.attributes & Attributes.CONTROL:
                ended += self._end(batch)
            else:
                transactional = bool(header.attributes & Attributes.TRANSACTIONAL)
                numbers = (header.producer_id, header.producer_epoch)
                part = self._part(batch, numbers, begun) if transactional else None
                columns = decode_batch(batch.data).columns
                values = columns.column(columns.schema.get_field_index("value")).to_pylist()
                self.entries.append(Entry(batch.base_offset, batch.next_offset, part, tuple(values)))
                self._bases.append(batch.base_offset)
        return begun, ended

    def _part(self, batch: Batch, numbers: Numbers, begun: list[Part]) -> Part:
        producer_id, epoch = numbers
        if epoch < self.epochs.get(producer_id, -1):
            raise Violation(
                f"{self._name} has a record of producer {producer_id} in epoch {epoch} at offset "
                f"{batch.base_offset}, behind a marker of the later epoch {self.epochs[producer_id]}"
            )
        part = self.open.get(producer_id)
        if part is None:
            part = self.open[producer_id] = Part(numbers, batch.base_offset)
            begun.append(part)
        elif part.numbers != numbers:
            raise Violation(
                f"{self._name} has a record of epoch {epoch} at offset {batch.base_offset}, but no marker has "
                f"ended {part.numbers}"
            )
        part.batches.append((batch.base_offset, batch.next_offset))
        return part

    def _end(self, batch: Batch) -> Iterator[Part]:
        for offset, marker in placed_markers(batch.data):
            if marker.producer_epoch <= self.epochs.get(marker.producer_id, -1):
                raise Violation(
                    f"{self._name} has the marker {marker} at offset {offset}, behind one with the same or a "
                    "later epoch"
                )
            self.epochs[marker.producer_id] = marker.producer_epoch
            part = self.open.pop(marker.producer_id, None)
            if part is None:
                continue
            if marker.producer_epoch != part.numbers[1] + 1:
                raise Violation(
                    f"{self._name}: the marker {marker} at offset {offset} ends {part.numbers}, but its epoch "
                    "must be one higher"
                )
            part.marker_offset, part.commit = offset, marker.commit
            self.decided.append(part)
            self._marker_offsets.append(offset)
            yield part

    def stable_at(self, high_watermark: int, reached: int, log_start: int) -> tuple[int, int]:
        """Return between which offsets (inclusive) the last stable offset of a replica with these is.

        A high watermark is behind after a restart; what the replica has `reached` before it may remember as decided.
        One that has begun with `log_start` does not know of records that were before it.
        """
        lower = upper = high_watermark
        for part in (*self.open.values(), *self.decided[bisect_left(self._marker_offsets, high_watermark) :]):
            lower = min(lower, part.first_offset)
            if part.commit is None or part.marker_offset >= reached:
                upper = min([upper, *(base for base, following in part.batches if following > log_start)])
        start = min(log_start, high_watermark)
        return max(lower, start), max(upper, start)

    def between(self, begin: int, end: int) -> Iterator[Entry]:
        """Yield the batches of records that have offsets in [begin, end)."""
        number = max(0, bisect_right(self._bases, begin) - 1)
        for entry in self.entries[number:]:
            if entry.base_offset >= end:
                return
            if entry.next_offset > begin:
                yield entry
