"""The last offset of every key in a section of a log; keys are sorted out by Arrow, never one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.log.source_batch import Bools, Int64s, SourceBatch

_MERGE_BYTES: Final = 16 << 20
"""Keys are collected up to this size, at least, before they are sorted out."""
_NO_KEYS: Final = pa.array([], pa.binary())


class LastOffsets:
    """Keys and their last offsets, of batches that are added in the order of the log."""

    def __init__(self) -> None:
        self._keys: Any = _NO_KEYS
        self._last: Int64s = np.zeros(0, np.int64)
        self._new_keys: list[Any] = []
        self._new_offsets: list[Int64s] = []
        self._new_bytes = 0

    def __len__(self) -> int:
        self._merge()
        return len(self._keys)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the keys take, with those counted twice that were added lately."""
        return self._keys_bytes + self._new_bytes

    @property
    def _keys_bytes(self) -> int:
        return int(self._keys.nbytes) + 8 * len(self._last)

    def add(self, batches: Sequence[SourceBatch], end_offset: int | None = None) -> None:
        """Add the rows of batches, below `end_offset`; rows without key are passed over.

        The keys are copied: a view would hold on to all that was read with them.
        """
        new_keys: list[Any] = []
        new_offsets: list[Int64s] = []
        for batch in batches:
            if batch.columns is None or not batch.header.record_count:
                continue
            keys, offsets = batch.column("key"), batch.offsets
            if keys.null_count:
                valid = keys.is_valid()
                keys, offsets = keys.filter(valid), offsets[valid.to_numpy(zero_copy_only=False)]
            if end_offset is not None and len(offsets) and offsets[-1] >= end_offset:
                count = int(np.searchsorted(offsets, end_offset))
                keys, offsets = keys.slice(0, count), offsets[:count]
            new_keys.append(keys)
            new_offsets.append(offsets)
        if not new_keys:
            return
        self._new_keys.append(pa.concat_arrays(new_keys))
        self._new_offsets.append(np.concatenate(new_offsets))
        self._new_bytes += self._new_keys[-1].nbytes + 8 * len(self._new_keys[-1])
        if self._new_bytes > max(_MERGE_BYTES, self._keys_bytes):
            self._merge()

    def is_full(self, max_bytes: int) -> bool:
        """Whether the keys take `max_bytes` or more."""
        if self.memory_bytes >= max_bytes:
            self._merge()
        return self.memory_bytes >= max_bytes

    def _merge(self) -> None:
        if not self._new_keys:
            return
        encoded = pa.chunked_array([self._keys, *self._new_keys], pa.binary()).combine_chunks().dictionary_encode()
        places = encoded.indices.to_numpy()
        last = np.zeros(len(encoded.dictionary), np.int64)
        last[places] = np.concatenate([self._last, *self._new_offsets])  # ascending: of several, the last one stays
        self._keys, self._last = encoded.dictionary, last
        self._new_keys, self._new_offsets, self._new_bytes = [], [], 0

    def superseded(self, keys: Any, offsets: Int64s) -> Bools:
        """Return for each row whether its key has a later offset; never for null keys."""
        self._merge()
        if not len(self._keys) or not len(offsets):
            return np.zeros(len(offsets), np.bool_)
        places = pc.index_in(keys, value_set=self._keys).fill_null(-1).to_numpy()
        found: Bools = (self._last[places] > offsets) & (places >= 0)
        return found
