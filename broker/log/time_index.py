"""The `.timeindex` file: sparse, timestamp to offset.

Entries follow each other without a header, little-endian, one for each entry of the `.index` file:

    position  size  field
           0     8  max_timestamp_ms  i64 largest timestamp of the segment's records below the offset
           8     4  relative_offset   u32 that offset minus the segment's base offset
          12     4  crc32c            u32 see `entries.py`

Timestamps never descend, offsets ascend. Records at or after `t` are therefore not below the offset of the last
entry whose timestamp is less than `t`, whatever order the records' own timestamps have. The closing entry of a
sealed segment gives its largest timestamp.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np

from broker.log.entries import open_entries, seal_entries

TIME_ENTRY: Final = np.dtype([("max_timestamp_ms", "<i8"), ("relative_offset", "<u4"), ("crc32c", "<u4")])
TIME_ENTRY_BYTES: Final = 16

assert TIME_ENTRY.itemsize == TIME_ENTRY_BYTES


def encode_time_entries(base_offset: int, relative_offsets: array[int], max_timestamps_ms: array[int]) -> bytes:
    """Return the bytes of these entries."""
    entries = np.zeros(len(relative_offsets), dtype=TIME_ENTRY)
    entries["max_timestamp_ms"] = max_timestamps_ms
    entries["relative_offset"] = relative_offsets
    return seal_entries(base_offset, entries)


def decode_time_entries(base_offset: int, data: bytes) -> Any:
    """Return the entries in `data` that can be trusted: a prefix."""
    return open_entries(base_offset, data, TIME_ENTRY)
