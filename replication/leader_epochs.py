"""Which leader epoch wrote which offsets: the one truth by which replicas find where their logs part.

An entry (epoch, start offset) says that the records from `start offset` up to the next entry's were appended by the
leader of `epoch`. Followers truncate by this and never by high watermark (KIP-101, KIP-279).

Only epochs with records have entries: an epoch whose leader appended nothing leaves no trace in the log, so every
replica derives the same entries from the same bytes. A question for such an epoch is answered with the largest
known epoch below it, which is what keeps the dialogue from going round in circles (KAFKA-20961).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple


class EpochEntry(NamedTuple):
    """`start_offset` is the first offset written in `leader_epoch`."""

    leader_epoch: int
    start_offset: int


class OffsetAndEpoch(NamedTuple):
    """`end_offset` (exclusive) of `leader_epoch`."""

    end_offset: int
    leader_epoch: int


class LeaderEpochCache:
    """The entries of one log, ascending in both epoch and start offset."""

    def __init__(self, entries: Iterable[EpochEntry] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        for entry in entries:
            self._epochs.append(entry.leader_epoch)
            self._starts.append(entry.start_offset)
        self._check_invariants()

    @property
    def entries(self) -> tuple[EpochEntry, ...]:
        """All entries, oldest first."""
        return tuple(map(EpochEntry, self._epochs, self._starts))

    @property
    def latest_epoch(self) -> int:
        """Epoch of the last record, or -1 when there is no record."""
        return self._epochs[-1] if self._epochs else -1

    def assign(self, leader_epoch: int, start_offset: int) -> bool:
        """Note that the record at `start_offset` is of `leader_epoch`; return whether that was a new entry.

        Called for the batch at the log's end; epochs never go back in a log.
        """
        assert leader_epoch >= self.latest_epoch, f"epoch {leader_epoch} after epoch {self.latest_epoch}"
        if leader_epoch == self.latest_epoch:
            return False
        self.truncate_from_end(start_offset)
        if leader_epoch == self.latest_epoch:
            return False
        self._epochs.append(leader_epoch)
        self._starts.append(start_offset)
        self._check_invariants()
        return True

    def epoch_for(self, offset: int) -> int:
        """Return the epoch that wrote `offset`, or -1 when it is below every entry."""
        index = bisect_right(self._starts, offset) - 1
        return self._epochs[index] if index >= 0 else -1

    def end_offset_for(self, leader_epoch: int, log_end_offset: int) -> OffsetAndEpoch | None:
        """Return where `leader_epoch` ended, or None if it predates this cache.

        Exclusive: the first offset *not* written in that epoch. For an epoch without records here the answer is the
        largest epoch below it and that one's end, so the epoch of the answer may be smaller than asked for; the
        follower truncates to the lesser of the answer and its own end for the answer's epoch, and asks again
        (KIP-101, KIP-279).
        """
        index = bisect_right(self._epochs, leader_epoch)
        if index == 0:
            return None
        end_offset = self._starts[index] if index < len(self._starts) else log_end_offset
        return OffsetAndEpoch(end_offset, self._epochs[index - 1])

    def truncate_from_end(self, end_offset: int) -> bool:
        """Drop entries that start at or after `end_offset`; return whether any did."""
        keep = bisect_left(self._starts, end_offset)
        dropped = keep < len(self._starts)
        del self._epochs[keep:], self._starts[keep:]
        return dropped

    def truncate_from_start(self, start_offset: int) -> bool:
        """Forget what lies below `start_offset`; return whether anything changed.

        The entry that covers `start_offset` stays and starts there, so that its epoch is still answered for.
        """
        first = bisect_right(self._starts, start_offset) - 1
        if first < 0 or (first == 0 and self._starts[0] == start_offset):
            return False
        del self._epochs[:first], self._starts[:first]
        self._starts[0] = start_offset
        self._check_invariants()
        return True

    def clear(self) -> None:
        """Forget everything."""
        self._epochs.clear()
        self._starts.clear()

    def _check_invariants(self) -> None:
        pairs = zip(self._epochs, self._starts, self._epochs[1:], self._starts[1:], strict=False)
        assert all(e1 < e2 and s1 < s2 for e1, s1, e2, s2 in pairs), f"entries not ascending: {self.entries}"
