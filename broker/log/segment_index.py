"""Both sparse indexes of a segment in memory, and their way to the disk and back."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

import numpy as np

from broker.log.offset_index import OFFSET_ENTRY_BYTES, decode_offset_entries, encode_offset_entries
from broker.log.storage import Storage, read_file, rewritten_anyway
from broker.log.time_index import TIME_ENTRY_BYTES, decode_time_entries, encode_time_entries

BEFORE_ALL_TIME_MS = -(1 << 63)
"""Largest timestamp of no records."""


class Boundary(NamedTuple):
    """A batch begins (or the segment ends) at `position`; `offset` is its first offset (or the next one)."""

    offset: int
    position: int


class SegmentIndex:
    """Entries (offset, position, largest timestamp below the offset), ascending.

    New entries stay in memory until `store`: the files only save work, so the hot path does not wait for them.
    One thread appends while others look up: an entry is visible once its offset is there, which is added last.
    """

    __slots__ = ("_max_timestamps_ms", "_offsets", "_positions", "_stored", "base_offset", "last_position")

    def __init__(self, base_offset: int) -> None:
        self.base_offset = base_offset
        self.last_position = 0
        self._offsets = array("I")  # relative to base_offset
        self._positions = array("I")
        self._max_timestamps_ms = array("q")
        self._stored = 0
        assert self._offsets.itemsize == 4, "array('I') is the u32 of the files"

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def memory_bytes(self) -> int:
        """Bytes held for entries."""
        return 16 * len(self._offsets)

    @property
    def last(self) -> Boundary:
        """The last entry, or the segment's begin."""
        if not self._offsets:
            return Boundary(self.base_offset, 0)
        return Boundary(self.base_offset + self._offsets[-1], self._positions[-1])

    @property
    def last_max_timestamp_ms(self) -> int:
        """Largest timestamp below the last entry."""
        return self._max_timestamps_ms[-1] if self._max_timestamps_ms else BEFORE_ALL_TIME_MS

    @property
    def entries(self) -> list[tuple[int, int, int]]:
        """All entries as (offset, position, max_timestamp_ms), for tests and tools."""
        return [
            (self.base_offset + offset, position, timestamp)
            for offset, position, timestamp in zip(self._offsets, self._positions, self._max_timestamps_ms, strict=True)
        ]

    def append(self, offset: int, position: int, max_timestamp_ms: int) -> None:
        """Add an entry for the batch at `position`; the same boundary twice counts once."""
        relative = offset - self.base_offset
        if self._offsets and self._offsets[-1] == relative:
            return
        assert position > self.last_position, f"positions ascend: {position} after {self.last_position}"
        self.last_position = position
        self._max_timestamps_ms.append(max_timestamp_ms)
        self._positions.append(position)
        self._offsets.append(relative)

    def floor(self, offset: int) -> Boundary:
        """Return the last boundary at or below `offset`."""
        index = bisect_right(self._offsets, offset - self.base_offset) - 1
        if index < 0:
            return Boundary(self.base_offset, 0)
        return Boundary(self.base_offset + self._offsets[index], self._positions[index])

    def floor_position(self, position: int, end_offset: int) -> Boundary:
        """Return the last boundary that is neither beyond `position` nor above `end_offset`."""
        index = bisect_right(self._offsets, end_offset - self.base_offset)
        index = bisect_right(self._positions, position, 0, index) - 1
        if index < 0:
            return Boundary(self.base_offset, 0)
        return Boundary(self.base_offset + self._offsets[index], self._positions[index])

    def ceiling(self, position: int) -> Boundary | None:
        """Return the first boundary beyond `position`; None when no entry lies there."""
        index = bisect_right(self._positions, position)
        if index == len(self._positions):
            return None
        return Boundary(self.base_offset + self._offsets[index], self._positions[index])

    def before_time(self, timestamp_ms: int) -> Boundary:
        """Return the last boundary below which every record is older than `timestamp_ms`."""
        index = bisect_left(self._max_timestamps_ms, timestamp_ms) - 1
        if index < 0:
            return Boundary(self.base_offset, 0)
        return Boundary(self.base_offset + self._offsets[index], self._positions[index])

    def floor_time(self, offset: int) -> tuple[Boundary, int]:
        """Return the last boundary at or below `offset` and the largest timestamp below that boundary."""
        index = bisect_right(self._offsets, offset - self.base_offset) - 1
        if index < 0:
            return Boundary(self.base_offset, 0), BEFORE_ALL_TIME_MS
        boundary = Boundary(self.base_offset + self._offsets[index], self._positions[index])
        return boundary, self._max_timestamps_ms[index]

    def truncate(self, end_offset: int) -> None:
        """Drop entries above `end_offset`, in memory only."""
        keep = bisect_right(self._offsets, end_offset - self.base_offset) if end_offset >= self.base_offset else 0
        del self._offsets[keep:], self._positions[keep:], self._max_timestamps_ms[keep:]
        self._stored = min(self._stored, keep)
        self.last_position = self._positions[-1] if keep else 0

    def store(self, storage: Storage, stem: str, count: int | None = None) -> bool:
        """Append to the two files what they lack, of the first `count` entries; return whether there was anything.

        Not durable by itself.
        """
        end = len(self._offsets) if count is None else count
        start = self._stored
        if start >= end:
            return False
        offsets = self._offsets[start:end]
        offset_bytes = encode_offset_entries(self.base_offset, offsets, self._positions[start:end])
        time_bytes = encode_time_entries(self.base_offset, offsets, self._max_timestamps_ms[start:end])
        for path, data, entry_bytes in (
            (stem + ".index", offset_bytes, OFFSET_ENTRY_BYTES),
            (stem + ".timeindex", time_bytes, TIME_ENTRY_BYTES),
        ):
            file = storage.open(path, create=True)
            file.truncate(start * entry_bytes)  # whatever lies beyond did not check
            file.write((data,), start * entry_bytes)
        self._stored = end
        return True

    def cut_files(self, storage: Storage, stem: str) -> None:
        """Cut both files to what this index holds, durably: an entry of a truncated record must never come back."""
        for path, entry_bytes in (
            (stem + ".index", OFFSET_ENTRY_BYTES),
            (stem + ".timeindex", TIME_ENTRY_BYTES),
        ):
            if storage.exists(path):
                file = storage.open(path)
                file.truncate(self._stored * entry_bytes)
                file.datasync()

    def sync(self, storage: Storage, stem: str) -> None:
        """Make the files durable; what they say is checked when they are loaded, so a failure is not the disk's end."""
        for path in (stem + ".index", stem + ".timeindex"):
            with rewritten_anyway():
                storage.open(path, create=True).datasync()

    @staticmethod
    def load(storage: Storage, stem: str, base_offset: int) -> SegmentIndex:
        """Read both files as far as they check and agree; missing files are an empty index."""
        offsets = decode_offset_entries(base_offset, read_file(storage, stem + ".index") or b"")
        times = decode_time_entries(base_offset, read_file(storage, stem + ".timeindex") or b"")
        count = _agreeing_entries(offsets, times)
        index = SegmentIndex(base_offset)
        index._offsets.frombytes(offsets["relative_offset"][:count].astype(np.uint32).tobytes())
        index._positions.frombytes(offsets["position"][:count].astype(np.uint32).tobytes())
        index._max_timestamps_ms.frombytes(times["max_timestamp_ms"][:count].astype(np.int64).tobytes())
        index._stored = count
        index.last_position = index._positions[-1] if count else 0
        return index


def _agreeing_entries(offsets: Any, times: Any) -> int:
    """Return how many entries from the first on ascend as they must and are the same in both files."""
    count = min(len(offsets), len(times))
    if count == 0:
        return 0
    good = offsets["relative_offset"][:count] == times["relative_offset"][:count]
    good[0] &= bool(offsets["relative_offset"][0] > 0 and offsets["position"][0] > 0)
    if count > 1:
        for field in ("relative_offset", "position"):
            good[1:] &= offsets[field][1:count] > offsets[field][: count - 1]
        stamps = times["max_timestamp_ms"][:count]
        good[1:] &= stamps[1:] >= stamps[:-1]
    return count if good.all() else int(np.argmin(good))
