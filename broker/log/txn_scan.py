"""Aborted transactions of a segment, found by going through its batches: when indexes are missing or damaged."""

from __future__ import annotations

from typing import Final

from broker.log.batch_scan import InvalidBatch
from broker.log.storage import File
from broker.log.transactions import AbortedTransaction
from broker.log.txn_index import UNKNOWN_OFFSET, TxnIndex
from raftlog.errors import RaftlogError
from raftlog.format import Attributes, BatchHeader
from raftlog.format.control import PlacedMarker, placed_markers

_CONTROL: Final = int(Attributes.CONTROL)
_TRANSACTIONAL: Final = int(Attributes.TRANSACTIONAL)


def read_markers(file: File, position: int, header: BatchHeader) -> list[PlacedMarker]:
    """Return the markers of the control batch at `position` of a segment.

    Raises:
        InvalidBatch: it does not check.
    """
    try:
        return placed_markers(file.read(header.size, position))
    except RaftlogError as error:
        raise InvalidBatch(position, str(error)) from None


class TxnScan:
    """Shown all batches of a segment in order, it knows what the `.txnindex` has to say.

    Of transactions that began in earlier segments it knows only what `carried` and the markers say, so that the last
    stable offset at the end may be lower than it was: then readers look further than they need to.
    """

    def __init__(self, base_offset: int, carried: int | None) -> None:
        """`carried`: first offset of the oldest transaction open at the begin; None: none is; -1: not known."""
        self._index = TxnIndex(base_offset)
        self._carried = carried
        self._open: dict[int, int] = {}

    def add(self, file: File, position: int, header: BatchHeader) -> None:
        """Take the next batch. Raises InvalidBatch where a control batch does not decode, OSError."""
        if header.attributes & _CONTROL:
            for offset, marker in read_markers(file, position, header):
                self._open.pop(marker.producer_id, None)
                if not marker.commit and marker.first_offset >= 0:
                    stable = UNKNOWN_OFFSET if self._carried is not None else self._first_open(offset + 1)
                    self._index.append(AbortedTransaction(marker.producer_id, marker.first_offset, offset, stable))
        elif header.attributes & _TRANSACTIONAL and header.producer_id >= 0:
            self._open.setdefault(header.producer_id, header.base_offset)

    def _first_open(self, end_offset: int) -> int:
        return min(self._open.values(), default=end_offset)

    def finish(self, next_offset: int) -> TxnIndex | None:
        """Return the index of the segment, which ends at `next_offset`; None: it needs none."""
        index, first_open = self._index, self._first_open(next_offset)
        if self._carried is not None:
            first_open = min(first_open, self._carried)
        index.end_stable_offset = first_open
        return index if len(index) or first_open < next_offset else None
