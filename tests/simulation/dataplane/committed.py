"""The committed records of one partition: batch after batch, never changed, only extended."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from raftlog.format import HEADER_BYTES


class Batch(NamedTuple):
    """One batch as it lies in a log."""

    base_offset: int
    next_offset: int
    leader_epoch: int
    data: bytes

    def __str__(self) -> str:
        return f"{self.base_offset} to {self.next_offset} of epoch {self.leader_epoch}"


@dataclass
class Committed:
    """Every batch of one partition that was below a high watermark, in order; never changed, only extended.

    Invariant: each batch begins where the one before it ends.
    """

    batches: list[Batch] = field(default_factory=list)
    end: int = 0
    bodies: set[bytes] = field(default_factory=set)

    def at(self, offset: int) -> Batch | None:
        """Return the batch that begins at `offset`; None if none does."""
        number = bisect_left(self.batches, offset, key=_base_offset)
        found = self.batches[number] if number < len(self.batches) else None
        return found if found is not None and found.base_offset == offset else None

    def extend(self, batch: Batch) -> None:
        """Append a batch."""
        self.batches.append(batch)
        self.end = batch.next_offset

    def cut(self, offset: int) -> None:
        """Forget what lies from `offset` on: only an unclean election may do that."""
        while self.batches and self.batches[-1].next_offset > offset:
            batch = self.batches.pop()
            self.end = batch.base_offset
            self.bodies.discard(batch.data[HEADER_BYTES:])


def _base_offset(batch: Batch) -> int:
    return batch.base_offset
