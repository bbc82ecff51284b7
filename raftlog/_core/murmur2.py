"""Murmur2 as Kafka's default partitioner uses it: for one key, and for an Arrow column of keys at once.

Same key, same partition as in Kafka: `(murmur2(key) & 0x7fffffff) % partitions` (Kafka, Utils.murmur2).
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_R: Final = 24
_MASK: Final = 0xFFFFFFFF
_POSITIVE: Final = 0x7FFFFFFF

_FEW_ROWS: Final = 16
"""Fewer rows than this are cheaper to hash one by one than with numpy, whatever their length."""

_words = struct.Struct("<I").iter_unpack


def murmur2(data: bytes) -> int:
    """Return the hash as a signed 32-bit number, like Kafka's `Utils.murmur2`."""
    whole = len(data) & ~3
    h = _SEED ^ len(data)
    for (k,) in _words(data[:whole]):
        k = k * _M & _MASK
        k ^= k >> _R
        h = (h * _M ^ k * _M) & _MASK
    tail = data[whole:]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * _M & _MASK
    h ^= h >> 13
    h = h * _M & _MASK
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


@lru_cache(maxsize=8192)
def _short_key_hash(key: bytes) -> int:
    return murmur2(key) & _POSITIVE


def key_hash(key: bytes) -> int:
    """Return the non-negative hash that is taken modulo the number of partitions."""
    return _short_key_hash(key) if len(key) <= 64 else murmur2(key) & _POSITIVE


def _offsets_and_data(column: Any) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the n + 1 offsets and the bytes of a `pyarrow.BinaryArray`, without copying the bytes."""
    _, offsets_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, len(column) + 1, column.offset * 4).astype(np.int64)
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.empty(0, np.uint8)
    return offsets, data


def murmur2_column(column: Any) -> NDArray[np.int32]:
    """Return the hash of every row of a `pyarrow.BinaryArray` (nulls hash as empty).

    Loops over word positions, not rows: a step mixes the next four bytes of every row that still has them. Rows are
    ordered by length, so those are always the first ones; when only a few long rows are left they are done singly.
    """
    rows = len(column)
    if rows == 0:
        return np.empty(0, np.int32)
    offsets, data = _offsets_and_data(column)
    lengths = np.diff(offsets)
    uniform = bool((lengths == lengths[0]).all())
    order = None if uniform else np.argsort(-lengths, kind="stable")
    starts = offsets[:-1] if order is None else offsets[:-1][order]
    sizes = lengths if order is None else lengths[order]
    m = np.uint32(_M)
    h = np.uint32(_SEED) ^ sizes.astype(np.uint32)
    words = sizes >> 2
    first_single = 0  # rows before this one are hashed singly at the end
    if len(data) >= 4:
        unaligned = np.ndarray((len(data) - 3,), "<u4", data, 0, (1,))
        for word in range(int(words[0])):
            active = rows if words[-1] > word else int(np.searchsorted(-words, -word, side="left"))
            if active < _FEW_ROWS and active < rows:
                first_single = active
                break
            k = unaligned[starts[:active] + 4 * word] * m
            k ^= k >> np.uint32(_R)
            k *= m
            h[:active] *= m
            h[:active] ^= k
    tails = sizes & 3
    ends = starts + 4 * words
    for byte in (2, 1, 0):
        has = np.flatnonzero(tails > byte)
        if len(has):
            h[has] ^= data[ends[has] + byte].astype(np.uint32) << np.uint32(8 * byte)
    h[tails > 0] *= m
    h ^= h >> np.uint32(13)
    h *= m
    h ^= h >> np.uint32(15)
    for row in range(first_single):
        start = int(starts[row])
        h[row] = murmur2(data[start : start + int(sizes[row])].tobytes()) & _MASK
    if order is None:
        return h.view(np.int32)
    hashes = np.empty(rows, np.uint32)
    hashes[order] = h
    return hashes.view(np.int32)
