"""The `.index` file: sparse, offset to position.

Entries follow each other without a header, little-endian:

    position  size  field
           0     4  relative_offset  u32 offset of a batch's first record minus the segment's base offset
           4     4  position         u32 byte in the `.log` file where that batch begins
           8     4  crc32c           u32 see `entries.py`

Offsets and positions ascend. The first batch has no entry: it is at position 0. When a segment is sealed, and at a
clean shutdown, a last entry (next offset, size of the log file) closes the index; a sealed segment whose index does
not end in it has its indexes rebuilt.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np

from broker.log.entries import open_entries, seal_entries

OFFSET_ENTRY: Final = np.dtype([("relative_offset", "<u4"), ("position", "<u4"), ("crc32c", "<u4")])
OFFSET_ENTRY_BYTES: Final = 12
MAX_RELATIVE_OFFSET: Final = (1 << 32) - 1

assert OFFSET_ENTRY.itemsize == OFFSET_ENTRY_BYTES


def encode_offset_entries(base_offset: int, relative_offsets: array[int], positions: array[int]) -> bytes:
    """Return the bytes of these entries."""
    entries = np.zeros(len(relative_offsets), dtype=OFFSET_ENTRY)
    entries["relative_offset"] = relative_offsets
    entries["position"] = positions
    return seal_entries(base_offset, entries)


def decode_offset_entries(base_offset: int, data: bytes) -> Any:
    """Return the entries in `data` that can be trusted: a prefix."""
    return open_entries(base_offset, data, OFFSET_ENTRY)
