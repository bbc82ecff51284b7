"""The newest committed changes, kept for watchers that are a little behind; bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from raftmeta.port import Change

MAX_CHANGES = 10_000
MAX_RECORDS = 100_000


class ChangeHistory:
    """Changes without a gap, the newest ones last.

    Invariants: offsets rise by one; at most `max_changes` changes, and at most `max_records` records unless one
    change alone has more.
    """

    def __init__(self, offset: int, *, max_changes: int = MAX_CHANGES, max_records: int = MAX_RECORDS) -> None:
        self._changes: deque[Change] = deque()
        self._end_offset = offset
        self._records = 0
        self._max_changes = max_changes
        self._max_records = max_records

    def add(self, change: Change) -> None:
        """Add the change after the last one, and drop old ones beyond the bounds."""
        assert change.offset == self._end_offset + 1, f"{change.offset} after {self._end_offset}"
        self._changes.append(change)
        self._end_offset = change.offset
        self._records += len(change.records)
        while len(self._changes) > self._max_changes or (self._records > self._max_records and len(self._changes) > 1):
            self._records -= len(self._changes.popleft().records)

    def since(self, offset: int) -> Sequence[Change] | None:
        """Return the changes above `offset`; None when some of them are gone, or `offset` is ahead of all."""
        missing = self._end_offset - offset
        if not 0 <= missing <= len(self._changes):
            return None
        return [self._changes[i] for i in range(len(self._changes) - missing, len(self._changes))]
