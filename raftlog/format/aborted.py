"""Aborted transactions for readers of committed records: ranges of offsets, by producer.

A reader drops a transactional batch that begins within a range of its producer. It needs no state between responses and
may begin at any offset. (Kafka's `FetchResponse` names only the first offset of a transaction, and its readers look for
the marker themselves, KIP-98.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Protocol

from raftlog.format.header import Attributes, BatchHeader

_TRANSACTIONAL = int(Attributes.TRANSACTIONAL)


class AbortedRange(Protocol):
    """One aborted transaction in a partition. Both offsets are inclusive; the last one is the marker's."""

    @property
    def producer_id(self) -> int: ...
    @property
    def first_offset(self) -> int: ...
    @property
    def last_offset(self) -> int: ...


class AbortedRanges:
    """The ranges of aborted transactions in a partition.

    A producer has at most one open transaction in a partition, so its ranges do not overlap.
    """

    __slots__ = ("_by_producer",)

    def __init__(self, transactions: Iterable[AbortedRange]) -> None:
        found: dict[int, list[tuple[int, int]]] = {}
        for transaction in transactions:
            found.setdefault(transaction.producer_id, []).append((transaction.first_offset, transaction.last_offset))
        for ranges in found.values():
            ranges.sort()
        self._by_producer = found

    def __bool__(self) -> bool:
        return bool(self._by_producer)

    def hold(self, header: BatchHeader) -> bool:
        """Whether this batch belongs to an aborted transaction."""
        if not header.attributes & _TRANSACTIONAL:
            return False
        ranges = self._by_producer.get(header.producer_id)
        if ranges is None:
            return False
        base_offset = header.base_offset
        number = bisect_right(ranges, base_offset, key=_first_offset) - 1
        return number >= 0 and base_offset <= ranges[number][1]


def _first_offset(range_: tuple[int, int]) -> int:
    return range_[0]
