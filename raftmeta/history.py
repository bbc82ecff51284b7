"""The newest committed changes, kept for watchers that are a little behind; bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from raftmeta.port import Change

MAX_CHANGES = 10_000
MAX_RECORDS = 100_000


class ChangeHistory:
    """Every change above some offset, the newest ones last.

    Invariants: offsets rise, with gaps where the log held no change; at most `max_changes` changes, and at most
    `max_records` records unless one change alone has more.
    """

    def __init__(self, offset: int, *, max_changes: int = MAX_CHANGES, max_records: int = MAX_RECORDS) -> None:
        self._changes: deque[Change] = deque()
        self._base_offset = offset
        self._records = 0
        self._max_changes = max_changes
        self._max_records = max_records

    @property
    def end_offset(self) -> int:
        """The offset of the newest change, or the one that the history began with."""
        return self._changes[-1].offset if self._changes else self._base_offset

    def add(self, change: Change) -> None:
        """Add the change that came after the last one, and drop old ones beyond the bounds."""
        assert change.offset > self.end_offset, f"{change.offset} after {self.end_offset}"
        self._changes.append(change)
        self._records += len(change.records)
        while len(self._changes) > self._max_changes or (self._records > self._max_records and len(self._changes) > 1):
            dropped = self._changes.popleft()
            self._base_offset = dropped.offset
            self._records -= len(dropped.records)

    def since(self, offset: int) -> Sequence[Change] | None:
        """Return the changes above `offset`; None when some of them are gone, [] when it is at the newest or ahead."""
        if offset < self._base_offset:
            return None
        newer: list[Change] = []
        for change in reversed(self._changes):
            if change.offset <= offset:
                break
            newer.append(change)
        newer.reverse()
        return newer
