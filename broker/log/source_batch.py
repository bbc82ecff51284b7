"""A batch of a log as compaction reads it: checked, taken apart, with the offset of every row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raftlog.format import HEADERS_TYPE, Attributes, BatchHeader, InflateLimits, decode_batch, parse_batch
from raftlog.format.aborted import AbortedRanges
from raftlog.format.header import NO_PRODUCER_ID

LIMITS: Final = InflateLimits(max_bytes=(1 << 31) - 1, max_ratio=1 << 31)
"""What rests in a log was held against the topic's own limits when it came."""
_SPARSE: Final = int(Attributes.SPARSE_OFFSETS)
_CONTROL: Final = int(Attributes.CONTROL)
NONE_ABORTED: Final = AbortedRanges(())

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


class SourceBatch(NamedTuple):
    """A batch of the log as it lies there. `columns` is None where nobody has to look into it.

    `is_pinned`: it stays a batch of its own. `is_over`: nothing of it stays, whatever its keys.
    """

    header: BatchHeader
    data: memoryview
    columns: Any
    is_pinned: bool
    is_over: bool = False

    @property
    def offsets(self) -> Int64s:
        """The offset of each row."""
        header = self.header
        if header.attributes & _SPARSE:
            deltas: Int64s = self.columns.column("offset_delta").to_numpy().astype(np.int64)
            return deltas + header.base_offset
        return np.arange(header.base_offset, header.next_offset, dtype=np.int64)

    def column(self, name: str) -> Any:
        """A column, nulls where the batch does without it."""
        index = self.columns.schema.get_field_index(name)
        if index >= 0:
            return self.columns.column(index)
        return pa.nulls(self.columns.num_rows, HEADERS_TYPE if name == "headers" else pa.binary())


IsPinned = Callable[[int, int], bool]
"""(producer id, base offset) -> whether a producer's state needs this batch's numbers."""
AreSpent = Callable[[BatchHeader, memoryview], bool]
"""Whether the markers of a control batch have nothing more to say to anybody."""


def none_are_spent(header: BatchHeader, data: memoryview) -> bool:
    """Keep every marker."""
    return False


def read_batch(
    data: memoryview,
    header: BatchHeader,
    is_pinned: IsPinned,
    aborted: AbortedRanges = NONE_ABORTED,
    are_spent: AreSpent = none_are_spent,
) -> SourceBatch:
    """Take one whole batch apart after its checksum: what is damaged must never get a new one.

    The contents were validated when it was produced, and with the checksum they are what they were. `aborted`: of all
    transactions that have records in the batch it is known here how they ended.

    Raises:
        CorruptRecordError: it does not check or does not decode.
    """
    parse_batch(data)
    if header.attributes & _CONTROL:
        over = are_spent(header, data)
        return SourceBatch(header, data, None, not over, over)
    pinned = header.producer_id != NO_PRODUCER_ID and is_pinned(header.producer_id, header.base_offset)
    if aborted.hold(header):
        return SourceBatch(header, data, None, pinned, is_over=True)
    decoded = decode_batch(data, limits=LIMITS, check_checksum=False)
    return SourceBatch(header, data, decoded.columns, pinned)
