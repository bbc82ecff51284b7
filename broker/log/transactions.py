"""Which transactions are not over yet in a log, and up to where what it holds is decided. Pure.

A transaction of a producer begins in a partition with its first transactional batch there, and ends with a marker:

    known of the producer id     what comes                                what becomes of it
    no transaction open          transactional batch that may be appended  one is open from its offset on
    one of epoch e is open       transactional batch of epoch e            goes on
    one of epoch e is open       transactional batch of a lower epoch      InvalidProducerEpoch
    one of epoch e is open       transactional batch of a higher epoch     InvalidTxnState: a marker is missing
    one of epoch e is open       batch that is not transactional           InvalidTxnState
    nothing, or a lower epoch    marker of epoch m                         appended: none open, epoch m from now on
    epoch m                      marker of epoch m                         a repeat: taken for done
    a higher epoch               marker of epoch m                         InvalidProducerEpoch: done long ago

The marker of a transaction of epoch e has the epoch e + 1, that of the producer's next transaction (KIP-890): neither a
late marker nor a late batch of one transaction can touch the next one.

    last stable offset = min(high watermark, first offset of the oldest transaction that is open here, or
                             whose marker is not below the high watermark yet)

What lies below it is decided, and no failover takes that back (KIP-98). Followers know it from what they append.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from raftlog.errors import CorruptRecordError
from raftlog.format.control import MAX_PRODUCER_EPOCH, PlacedMarker

NO_COORDINATOR: Final = -1
"""Coordinator epoch of a marker that no coordinator has asked for: an administrator has, or the leader."""


class MarkerFate(enum.Enum):
    """What a leader does with a marker."""

    APPENDED = "appended"
    REPEATED = "repeated"


class MarkerMissing(CorruptRecordError):
    """A follower's log lacks a marker that its leader's had once: it cannot be mended, only copied anew."""


def decision_epoch(epoch: int) -> int:
    """Return the epoch of the marker that ends a transaction of `epoch`.

    The next one; but a transaction of the last one, which is refused now, can be ended by an administrator only.
    """
    return min(epoch + 1, MAX_PRODUCER_EPOCH)


class OpenTransaction(NamedTuple):
    """One that has records in the log and no marker yet."""

    epoch: int
    first_offset: int
    started_ms: int
    """Wall clock of this broker when its first record was appended here."""


class AbortedTransaction(NamedTuple):
    """One that was aborted, as readers of committed records hear of it; offsets inclusive."""

    producer_id: int
    first_offset: int
    last_offset: int
    """Of its marker."""
    last_stable_offset: int
    """First offset of the oldest transaction open after the marker, or what follows it; -1: not known."""


class Undecided(NamedTuple):
    """A transaction whose marker is in the log, and was not below the high watermark yet when that was looked at."""

    marker_offset: int
    first_offset: int


class OpenTransactions:
    """The transactions of one log that are open, oldest first, and those that are decided by too new a marker.

    The owner calls `begin`, `end` and `advance` in the order of the log.

    Invariants: first offsets ascend among the open ones, as the log does; among the undecided ones both offsets
    ascend, as one that began later than another, and is decided earlier, holds nothing back.
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
        """Whether there is anything that the last stable offset may wait for."""
        return bool(self._open or self._undecided)

    @property
    def first_open(self) -> int | None:
        """First offset of the oldest transaction that is open."""
        return next(iter(self._open.values())).first_offset if self._open else None

    @property
    def undecided(self) -> tuple[Undecided, ...]:
        """Those that hold the last stable offset back without being open, by the offset of their markers."""
        return tuple(self._undecided)

    def get(self, producer_id: int) -> OpenTransaction | None:
        """Return a producer's transaction, if one is open."""
        return self._open.get(producer_id)

    def items(self) -> Iterable[tuple[int, OpenTransaction]]:
        """Return (producer id, transaction), the oldest first."""
        return self._open.items()

    def begin(self, producer_id: int, transaction: OpenTransaction) -> None:
        """Note the first transactional batch of a producer."""
        assert producer_id not in self._open, "a producer has one transaction at a time"
        self._open[producer_id] = transaction

    def end(self, producer_id: int, marker_offset: int) -> OpenTransaction | None:
        """Note a marker; return the transaction that it ends, None when it had no record here."""
        ended = self._open.pop(producer_id, None)
        if ended is not None:
            undecided = self._undecided
            while undecided and undecided[-1].first_offset >= ended.first_offset:
                undecided.pop()
            undecided.append(Undecided(marker_offset, ended.first_offset))
        return ended

    def check_followed(self, markers: Iterable[PlacedMarker], log_start_offset: int) -> None:
        """Check that markers which a leader has written decide on the transactions that are open here.

        A decision of epoch e has the epoch e + 1, and names where its transaction begins: never later than here, as
        no batch of a transaction is cleaned before it has ended. Only below the log start a leader may know less.

        Raises:
            MarkerMissing: the log here lacks a marker, so it is not known how a transaction ended.
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
                    f"{marker.producer_epoch} and ends what began at offset {marker.first_offset}, but here a "
                    f"transaction of epoch {found.epoch} is open from offset {found.first_offset} on: this log lacks "
                    "the marker that ended it"
                )

    def advance(self, high_watermark: int) -> None:
        """Forget whose markers lie below the high watermark: they are decided for good."""
        undecided = self._undecided
        while undecided and undecided[0].marker_offset < high_watermark:
            undecided.popleft()

    def first_unstable(self, high_watermark: int) -> int | None:
        """Return the first offset of the oldest transaction that is not decided for good; None: all are."""
        if self._undecided:
            self.advance(high_watermark)
        first_open = self.first_open
        if not self._undecided:
            return first_open
        first_undecided = self._undecided[0].first_offset
        return first_undecided if first_open is None else min(first_open, first_undecided)


def _first_offset(item: tuple[int, OpenTransaction]) -> int:
    return item[1].first_offset
