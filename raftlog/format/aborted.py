"""Aborted transactions as readers of committed records hear of them: ranges of offsets, by producer.

A batch that belongs to a transaction is dropped when its producer has a range in which the batch begins. Nothing has to
be remembered from one answer to the next, and it does not matter where a reader begins (Kafka's `FetchResponse` names
only where a transaction began; its readers look for the marker themselves, KIP-98).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Protocol

from raftlog.format.header import Attributes, BatchHeader

_TRANSACTIONAL = int(Attributes.TRANSACTIONAL)


class AbortedRange(Protocol):
    """One aborted transaction on a partition. Both offsets are inclusive; the last one is that of its marker."""

    @property
    def producer_id(self) -> int: ...
    @property
    def first_offset(self) -> int: ...
    @property
    def last_offset(self) -> int: ...


class AbortedRanges:
    """Which batches are those of aborted transactions.

    A producer has one transaction open at a time on a partition, so its ranges do not overlap.
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
        """Whether this batch is part of one of them."""
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
