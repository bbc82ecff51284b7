"""The `.txnindex` file of a sealed segment: the transactions whose abort markers lie in it, in the order of those.

Entries follow each other without a header, little-endian:

    position  size  field
           0     8  producer_id         i64
           8     8  first_offset        i64 first record of the transaction, in this segment or an earlier one
          16     8  last_offset         i64 offset of its abort marker
          24     8  last_stable_offset  i64 first offset of the oldest transaction open after the marker, or what
                                            follows it; -1: not known
          32     4  crc32c              u32 see `entries.py`

The last entry closes the file: producer_id -1, first_offset the base offset of the segment, last_offset the offset
that follows it, last_stable_offset as it is there. A file without it, or with an entry that does not check, is made
anew from the markers, which say where their transactions began (raftlog/format/control.py).

A segment without aborted transactions, at whose end none is open, has no file. As the file is durable before the
closing entries of the other indexes are written, a segment that has those and no `.txnindex` needs none.

A reader of committed records asks for the transactions that overlap what it reads, and drops their records. Their
markers may lie in later segments: it goes on until everything below what it reads was decided before a segment's end.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from broker.log.entries import open_entries, seal_entries
from broker.log.storage import Storage, read_file
from broker.log.transactions import AbortedTransaction

TXN_SUFFIX: Final = ".txnindex"
TXN_ENTRY: Final = np.dtype(
    [
        ("producer_id", "<i8"),
        ("first_offset", "<i8"),
        ("last_offset", "<i8"),
        ("last_stable_offset", "<i8"),
        ("crc32c", "<u4"),
    ]
)
TXN_ENTRY_BYTES: Final = 36
UNKNOWN_OFFSET: Final = -1
_CLOSING_ID: Final = -1
_COLUMNS: Final = AbortedTransaction._fields

assert TXN_ENTRY.itemsize == TXN_ENTRY_BYTES
assert TXN_ENTRY.names == (*_COLUMNS, "crc32c")

__all__ = ["TXN_ENTRY_BYTES", "TXN_SUFFIX", "UNKNOWN_OFFSET", "AbortedTransaction", "TxnIndex", "drop_txn_file"]


class TxnIndex:
    """The aborted transactions whose markers lie in one segment.

    One thread appends while others look up: an entry is visible once its `last_offset` is there, which is added last.
    """

    __slots__ = ("_columns", "_lasts", "base_offset", "end_stable_offset")

    def __init__(self, base_offset: int, entries: Iterable[AbortedTransaction] = ()) -> None:
        self.base_offset = base_offset
        self.end_stable_offset = UNKNOWN_OFFSET
        """First offset of the oldest transaction that is open at the segment's end, or that end; -1: not known."""
        self._columns = tuple(array("q") for _ in _COLUMNS)
        self._lasts = self._columns[_COLUMNS.index("last_offset")]
        for entry in entries:
            self.append(entry)

    def __len__(self) -> int:
        return len(self._lasts)

    @property
    def memory_bytes(self) -> int:
        """Bytes held for entries."""
        return 32 * len(self._lasts)

    @property
    def entries(self) -> tuple[AbortedTransaction, ...]:
        """All entries, in order of `last_offset`."""
        return tuple(self._made(0, len(self._lasts)))

    def append(self, aborted: AbortedTransaction) -> None:
        """Add the transaction whose abort marker has just been appended."""
        assert not self._lasts or aborted.last_offset > self._lasts[-1], "markers ascend"
        for column, value in zip(self._columns, aborted, strict=True):
            if column is not self._lasts:
                column.append(value)
        self._lasts.append(aborted.last_offset)

    def lookup(self, fetch_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """Return the transactions with records in [`fetch_offset`, `end_offset`)."""
        count = len(self._lasts)
        start = bisect_left(self._lasts, fetch_offset, 0, count)
        if start == count:
            return []
        firsts = np.frombuffer(self._columns[1][start:count], np.int64)
        return [entry for number in np.flatnonzero(firsts < end_offset) for entry in self._made(start + int(number), 1)]

    def _made(self, start: int, count: int) -> Iterable[AbortedTransaction]:
        return map(AbortedTransaction, *(column[start : start + count] for column in self._columns))

    def settles(self, end_offset: int) -> bool:
        """Whether every transaction with records below `end_offset` was decided before the segment's end."""
        return self.end_stable_offset >= end_offset

    def truncate(self, end_offset: int) -> None:
        """Forget transactions whose marker is at or above `end_offset`, and how the segment ended; in memory only."""
        keep = bisect_left(self._lasts, end_offset)
        del self._lasts[keep:]
        for column in self._columns:
            del column[keep:]
        self.end_stable_offset = UNKNOWN_OFFSET

    def copy(self) -> TxnIndex:
        """Return the entries that are there now."""
        index, count = TxnIndex(self.base_offset), len(self._lasts)
        for mine, its in zip(self._columns, index._columns, strict=True):
            its.extend(mine[:count])
        return index

    # The file, once the segment is sealed

    def store(self, storage: Storage, stem: str, next_offset: int) -> None:
        """Write the file of a segment that ends at `next_offset`, durably. Raises OSError."""
        rows: Any = np.zeros(len(self._lasts) + 1, dtype=TXN_ENTRY)
        for name, column in zip(_COLUMNS, self._columns, strict=True):
            rows[name][:-1] = column
        for name, value in zip(
            _COLUMNS, (_CLOSING_ID, self.base_offset, next_offset, self.end_stable_offset), strict=True
        ):
            rows[name][-1] = value
        data = seal_entries(self.base_offset, rows)
        file = storage.open(stem + TXN_SUFFIX, create=True)
        file.truncate(0)
        file.write((data,), 0)
        file.datasync()

    @staticmethod
    def load(storage: Storage, stem: str, base_offset: int, next_offset: int) -> TxnIndex | None:
        """Return what the file of a sealed segment says, None if it does not check as a whole. Raises OSError."""
        data = read_file(storage, stem + TXN_SUFFIX) or b""
        rows = open_entries(base_offset, data, TXN_ENTRY)
        if len(rows) * TXN_ENTRY_BYTES != len(data) or not len(rows):
            return None
        closing = AbortedTransaction(*(int(rows[-1][name]) for name in _COLUMNS))
        if closing[:3] != (_CLOSING_ID, base_offset, next_offset):
            return None
        index = TxnIndex(base_offset)
        for name, column in zip(_COLUMNS, index._columns, strict=True):
            column.frombytes(rows[name][:-1].astype(np.int64).tobytes())
        index.end_stable_offset = closing.last_stable_offset
        return index


def drop_txn_file(storage: Storage, stem: str) -> None:
    """Make sure that what the file says never comes back, whatever the segment is going to hold. Raises OSError."""
    path = stem + TXN_SUFFIX
    if storage.exists(path):
        file = storage.open(path)
        file.truncate(0)
        file.datasync()
        storage.remove(path)
