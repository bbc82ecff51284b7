"""One segment: a `.log` file of consecutive batches and its sparse indexes.

File names are the segment's base offset in 20 digits: `00000000000000000042.log`, `.index`, `.timeindex`,
`.txnindex`; what is to be removed has `.deleted` behind that.

States: active (appended to; opened for good) -> sealed (immutable; opened when needed, closed when the cache is full).
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from broker.log.segment_index import BEFORE_ALL_TIME_MS, Boundary, SegmentIndex
from broker.log.storage import File
from broker.log.txn_index import TxnIndex
from raftlog.format import Buffer

SUFFIXES: Final = (".log", ".index", ".timeindex", ".txnindex")
DELETED_SUFFIX: Final = ".deleted"
RECENT_BATCHES: Final = 1024
"""Batches at the end of an active segment whose boundaries are all known, so that readers at the tail never search."""


def segment_stem(directory: str, base_offset: int) -> str:
    """Return the path of a segment's files without the suffix."""
    return f"{directory}/{base_offset:020d}"


class OpenSegment:
    """A segment's open file and loaded indexes."""

    __slots__ = ("file", "index", "txn_index", "txn_stored")

    def __init__(self, file: File, index: SegmentIndex, txn_index: TxnIndex | None = None) -> None:
        self.file = file
        self.index = index
        self.txn_index = txn_index
        """None: no transaction was aborted in the segment, and none is open at its end."""
        self.txn_stored = False
        """Whether the disk has that, of a sealed segment."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held for index entries."""
        return self.index.memory_bytes + (0 if self.txn_index is None else self.txn_index.memory_bytes)


class Segment:
    """What is known of a segment without opening it, and its opened form while there is one.

    Appending changes `end` last and at once: a reader in another thread that sees an offset finds its bytes.
    """

    __slots__ = (
        "base_offset",
        "end",
        "first_append_ms",
        "has_txn_index",
        "max_timestamp_ms",
        "opened",
        "recent",
        "stem",
    )

    def __init__(self, directory: str, base_offset: int) -> None:
        self.base_offset = base_offset
        self.stem = segment_stem(directory, base_offset)
        self.end = (base_offset, 0)
        """(next offset, size in bytes)"""
        self.max_timestamp_ms = BEFORE_ALL_TIME_MS
        self.first_append_ms = 0
        """Wall clock of the first append, or of the opening; means nothing while the segment is empty."""
        self.has_txn_index = False
        """Whether the segment, opened, has a `txn_index`."""
        self.opened: OpenSegment | None = None
        self.recent: tuple[list[int], list[int]] | None = None
        """(positions, base offsets) of the last batches appended; the offset is added last."""

    @property
    def next_offset(self) -> int:
        """The first offset after the segment's records."""
        return self.end[0]

    @property
    def size(self) -> int:
        """Bytes of the `.log` file."""
        return self.end[1]

    @property
    def log_path(self) -> str:
        """Path of the `.log` file."""
        return self.stem + ".log"

    def append(
        self,
        buffers: Sequence[Buffer],
        size: int,
        base_offset: int,
        next_offset: int,
        max_timestamp_ms: int,
        index_interval_bytes: int,
    ) -> None:
        """Append one stamped batch, given in pieces of `size` bytes in all.

        Raises:
            OSError: nothing was appended; with ENOSPC the file is as before, any other error is the disk's end.
        """
        opened = self.opened
        assert opened is not None, "only an opened segment is appended to"
        position = self.end[1]
        try:
            opened.file.write(buffers, position)
        except OSError:
            self._roll_back(opened.file, position)
            raise
        index = opened.index
        if position - index.last_position >= index_interval_bytes and position:
            index.append(base_offset, position, self.max_timestamp_ms)
        if max_timestamp_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = max_timestamp_ms
        recent = self.recent
        if recent is None or len(recent[1]) >= 2 * RECENT_BATCHES:
            kept = recent or ([], [])
            recent = self.recent = (kept[0][-RECENT_BATCHES:], kept[1][-RECENT_BATCHES:])
        recent[0].append(position)
        recent[1].append(base_offset)
        self.end = (next_offset, position + size)

    @staticmethod
    def _roll_back(file: File, position: int) -> None:
        try:
            file.truncate(position)
        except OSError as error:  # a partial batch stays behind: that is more than a full disk
            raise OSError(errno.EIO, f"a partial write could not be taken back: {error}") from error

    def floor(self, opened: OpenSegment, offset: int) -> Boundary:
        """Return the last known boundary at or below `offset`."""
        recent = self.recent
        if recent is not None:
            positions, offsets = recent
            index = bisect_right(offsets, offset) - 1
            if index >= 0:
                return Boundary(offsets[index], positions[index])
        return opened.index.floor(offset)

    def floor_position(self, opened: OpenSegment, position: int, end_offset: int) -> Boundary:
        """Return the last known boundary that is neither beyond `position` nor above `end_offset`."""
        next_offset, size = self.end
        if end_offset >= next_offset and position >= size:
            return Boundary(next_offset, size)
        recent = self.recent
        if recent is not None:
            positions, offsets = recent
            index = bisect_right(offsets, end_offset)
            index = bisect_right(positions, position, 0, index) - 1
            if index >= 0:
                return Boundary(offsets[index], positions[index])
        return opened.index.floor_position(position, end_offset)

    def seal(self) -> None:
        """End appending: the closing entry goes into the index, which is stored at the next flush."""
        assert self.opened is not None
        assert self.size > 0, "an empty segment is never sealed"
        self.opened.index.append(self.next_offset, self.size, self.max_timestamp_ms)
        self.recent = None
