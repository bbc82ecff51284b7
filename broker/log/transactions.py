"""The open transactions of a log, and up to which offset all of them are decided. Pure.

A transaction of a producer begins in a partition with its first transactional batch there, and ends with a marker:

    state of the producer id     appended                                  outcome
    no transaction open          transactional batch that may be appended  a transaction is open from its offset on
    epoch e is open              transactional batch of epoch e            the transaction goes on
    epoch e is open              transactional batch of a lower epoch      InvalidProducerEpoch
    epoch e is open              transactional batch of a higher epoch     InvalidTxnState: a marker is missing
    epoch e is open              batch that is not transactional           InvalidTxnState
    unknown, or a lower epoch    marker of epoch m                         appended: none open, the epoch is m now
    epoch m                      marker of epoch m                         a repeat: counts as written
    a higher epoch               marker of epoch m                         InvalidProducerEpoch: ended long ago

The marker of a transaction of epoch e has the epoch e + 1, that of the producer's next transaction (KIP-890): neither a
late marker nor a late batch of one transaction can affect the next one.

    last stable offset = min(high watermark, first offset of the oldest transaction that is open here, or
                             whose marker is not below the high watermark yet)

Every transaction below it is decided, and no failover undoes that (KIP-98). Followers compute it from what they append.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from raftlog.errors import CorruptRecordError
from raftlog.format.control import MAX_PRODUCER_EPOCH, PlacedMarker

NO_COORDINATOR: Final = -1
"""Coordinator epoch of a marker that an administrator or the leader wrote, not a coordinator."""


class MarkerFate(enum.Enum):
    """What a leader does with a marker."""

    APPENDED = "appended"
    REPEATED = "repeated"


class MarkerMissing(CorruptRecordError):
    """A follower's log lacks a marker that its leader once had: it must be dropped and copied again."""


def decision_epoch(epoch: int) -> int:
    """Return the epoch of the marker that ends a transaction of `epoch`.

    It is the next epoch. A transaction of the highest epoch, which is refused today, keeps its epoch: only an
    administrator can end it.
    """
    return min(epoch + 1, MAX_PRODUCER_EPOCH)


class OpenTransaction(NamedTuple):
    """A transaction that has records in the log and no marker yet."""

    epoch: int
    first_offset: int
    started_ms: int
    """Wall clock of this broker when its first record was appended here."""


class AbortedTransaction(NamedTuple):
    """An aborted transaction, as readers of committed records learn of it; offsets inclusive."""

    producer_id: int
    first_offset: int
    last_offset: int
    """Offset of its marker."""
    last_stable_offset: int
    """First offset of the oldest transaction open after the marker, or the next offset; -1: unknown."""


class Undecided(NamedTuple):
    """A transaction whose marker is in the log, and was not below the high watermark at the last look."""

    marker_offset: int
    first_offset: int


class OpenTransactions:
    """The open transactions of one log, oldest first, and those whose marker is not below the high watermark yet.

    The owner calls `begin`, `end` and `advance` in the order of the log.

    Invariants: first offsets ascend among the open transactions. Among the undecided ones both offsets ascend; one that
    began after another and whose marker comes first is dropped, as it never determines the last stable offset.
    """

    __slots__ = ("_open", "_undecided")

    def __init__(
        self, transactions: Iterable[tuple[int, OpenTransaction]] = (), undecided: Iterable[Undecided] = ()
    ) -> None:
        self._open = OrderedDict(sorted(transactions, key=_first_offset))
        self._undecided = deque(undecided)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, producer_id: int) -> bool:
        return producer_id in self._open

    @property
    def holds_back(self) -> bool:
        """Whether the last stable offset may lie below the high watermark."""
        return bool(self._open or self._undecided)

    @property
    def first_open(self) -> int | None:
        """First offset of the oldest open transaction; None: none is open."""
        return next(iter(self._open.values())).first_offset if self._open else None

    @property
    def undecided(self) -> tuple[Undecided, ...]:
        """Transactions with a marker that still hold the last stable offset back, by the offset of their markers."""
        return tuple(self._undecided)

    def get(self, producer_id: int) -> OpenTransaction | None:
        """Return a producer's open transaction, or None."""
        return self._open.get(producer_id)

    def items(self) -> Iterable[tuple[int, OpenTransaction]]:
        """Return (producer id, transaction), the oldest first."""
        return self._open.items()

    def begin(self, producer_id: int, transaction: OpenTransaction) -> None:
        """Note the first transactional batch of a producer."""
        assert producer_id not in self._open, "a producer has one transaction at a time"
        self._open[producer_id] = transaction

    def end(self, producer_id: int, marker_offset: int) -> OpenTransaction | None:
        """Note a marker; return the transaction that it ends, or None if that has no record here."""
        ended = self._open.pop(producer_id, None)
        if ended is not None:
            undecided = self._undecided
            while undecided and undecided[-1].first_offset >= ended.first_offset:
                undecided.pop()
            undecided.append(Undecided(marker_offset, ended.first_offset))
        return ended

    def check_followed(self, markers: Iterable[PlacedMarker], log_start_offset: int) -> None:
        """Check that the markers of a leader end the transactions that are open here.

        A marker names where its transaction begins. That is never later than here, as compaction keeps every batch of a
        transaction until it has ended; only below the log start may the leader know less.

        Raises:
            MarkerMissing: this log lacks a marker, so it is unknown how a transaction ended.
        """
        seen = set[int]()
        for offset, marker in markers:
            found = None if marker.producer_id in seen else self._open.get(marker.producer_id)
            seen.add(marker.producer_id)
            if found is None or found.first_offset < log_start_offset:
                continue
            if (
                marker.producer_epoch != decision_epoch(found.epoch)
                or not 0 <= marker.first_offset <= found.first_offset
            ):
                raise MarkerMissing(
                    f"the marker at offset {offset} of producer id {marker.producer_id} has epoch "
                    f"{marker.producer_epoch} and ends a transaction from offset {marker.first_offset} on, but here a "
                    f"transaction of epoch {found.epoch} is open from offset {found.first_offset} on: this log lacks "
                    "the marker that ended it"
                )

    def advance(self, high_watermark: int) -> None:
        """Forget transactions whose markers lie below the high watermark: they are decided for good."""
        undecided = self._undecided
        while undecided and undecided[0].marker_offset < high_watermark:
            undecided.popleft()

    def first_unstable(self, high_watermark: int) -> int | None:
        """Return the first offset of the oldest transaction that is not decided for good; None: all are decided."""
        if self._undecided:
            self.advance(high_watermark)
        first_open = self.first_open
        if not self._undecided:
            return first_open
        first_undecided = self._undecided[0].first_offset
        return first_undecided if first_open is None else min(first_open, first_undecided)


def _first_offset(item: tuple[int, OpenTransaction]) -> int:
    return item[1].first_offset
