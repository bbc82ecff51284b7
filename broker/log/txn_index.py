"""The `.txnindex` file: aborted transactions, in the order in which they were aborted.

Entries follow each other without a header, little-endian:

    position  size  field
           0     8  producer_id         i64
           8     8  first_offset        i64 first record of the transaction
          16     8  last_offset         i64 offset of its abort marker
          24     8  last_stable_offset  i64 when the marker was appended
          32     4  crc32c              u32 see `entries.py`

A reader of committed records asks for the transactions that overlap what it fetched and drops their records.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from broker.log.entries import open_entries, seal_entries
from broker.log.storage import Storage, read_file

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

assert TXN_ENTRY.itemsize == TXN_ENTRY_BYTES


class AbortedTransaction(NamedTuple):
    """One aborted transaction; both offsets inclusive."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class TxnIndex:
    """The aborted transactions whose markers lie in one segment. Usually there are none, and no file."""

    def __init__(self, base_offset: int, entries: tuple[AbortedTransaction, ...] = ()) -> None:
        self.base_offset = base_offset
        self._entries = list(entries)
        self._stored = len(entries)

    @staticmethod
    def load(storage: Storage, path: str, base_offset: int) -> TxnIndex:
        """Read the file, up to the first entry that does not check; a missing file is an empty index."""
        good = open_entries(base_offset, read_file(storage, path) or b"", TXN_ENTRY)
        fields = AbortedTransaction._fields
        return TxnIndex(base_offset, tuple(AbortedTransaction(*(int(row[name]) for name in fields)) for row in good))

    @property
    def entries(self) -> tuple[AbortedTransaction, ...]:
        """All entries, in order of `last_offset`."""
        return tuple(self._entries)

    def append(self, aborted: AbortedTransaction) -> None:
        """Add the transaction whose abort marker has just been appended."""
        assert not self._entries or aborted.last_offset > self._entries[-1].last_offset, "markers ascend"
        self._entries.append(aborted)

    def lookup(self, fetch_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """Return the transactions with records in [`fetch_offset`, `end_offset`)."""
        return [
            entry for entry in self._entries if entry.last_offset >= fetch_offset and entry.first_offset < end_offset
        ]

    def truncate(self, end_offset: int) -> None:
        """Forget transactions whose marker is at or above `end_offset`; the file follows at the next `store`."""
        self._entries = [entry for entry in self._entries if entry.last_offset < end_offset]
        self._stored = min(self._stored, len(self._entries))

    def store(self, storage: Storage, path: str) -> None:
        """Append what the file lacks and make it durable."""
        if self._stored == len(self._entries) and not (self._entries or storage.exists(path)):
            return
        rows: Any = np.zeros(len(self._entries) - self._stored, dtype=TXN_ENTRY)
        for row, entry in zip(rows, self._entries[self._stored :], strict=True):
            for name, value in entry._asdict().items():
                row[name] = value
        file = storage.open(path, create=True)
        file.truncate(self._stored * TXN_ENTRY_BYTES)
        file.write((seal_entries(self.base_offset, rows),), self._stored * TXN_ENTRY_BYTES)
        file.datasync()
        self._stored = len(self._entries)
