"""Entries of index files: fixed size, each with a checksum of its own.

The checksum is the CRC-32C of the segment's base offset (i64) followed by the entry's bytes before it. So an index
that is torn, half zero, or of another segment is good up to the first entry that does not check, and no further;
nothing needs to be fsynced before an index may be used.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import google_crc32c
import numpy as np

_I64 = struct.Struct("<q")
_POLYNOMIAL: Final = 0x82F63B78


def _make_table() -> Any:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


_TABLE: Final = _make_table()


def _checksums(base_offset: int, entries: Any, checked_bytes: int) -> Any:
    """CRC-32C of every row's first `checked_bytes`, all rows at once, a table look-up per byte column."""
    seed = int(google_crc32c.value(_I64.pack(base_offset))) ^ 0xFFFFFFFF
    rows = entries.view(np.uint8).reshape(len(entries), entries.dtype.itemsize)
    crc = np.full(len(entries), seed, dtype=np.uint32)
    for column in range(checked_bytes):
        crc = _TABLE[(crc ^ rows[:, column]) & 0xFF] ^ (crc >> 8)
    return ~crc


def seal_entries(base_offset: int, entries: Any) -> bytes:
    """Return the bytes of a structured array whose last field is `crc32c`, with that field filled in."""
    entries["crc32c"] = _checksums(base_offset, entries, entries.dtype.itemsize - 4)
    return bytes(entries.tobytes())


def open_entries(base_offset: int, data: bytes, dtype: Any) -> Any:
    """Return the entries in `data` up to the first that is cut short or does not check."""
    entries = np.frombuffer(data, dtype=dtype, count=len(data) // dtype.itemsize)
    if len(entries) == 0:
        return entries
    good = _checksums(base_offset, entries, dtype.itemsize - 4) == entries["crc32c"]
    return entries if good.all() else entries[: int(np.argmin(good))]
