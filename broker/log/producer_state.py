"""What a log remembers of idempotent producers, so that a batch that is sent again is not appended again.

Of every producer id: its epoch, and where its last five batches went, by sequence number (KIP-98; five because a
producer has at most five in flight for a partition, KAFKA-5494). The leader checks each batch against that:

    known of the producer id      the batch                                      outcome
    nothing                       base_sequence 0                                accepted
    nothing                       anything else                                  UnknownProducerId
    a lower epoch                 base_sequence 0                                accepted: the sequence starts over
    a lower epoch                 anything else                                  OutOfOrderSequence
    a higher epoch                any                                            InvalidProducerEpoch
    this epoch                    continues the sequence                         accepted
    this epoch                    first and last sequence of one of the five     Duplicate
    this epoch                    lies below the next sequence                   DuplicateSequence
    this epoch                    leaves a gap, or only its end is new           OutOfOrderSequence

A marker (`transactions.py`) begins the producer's next epoch, whose sequence starts at 0. Kafka's clients before
transaction.version 2 keep one epoch and one sequence over all transactions of a session: with `session_epoch`, the
epoch in which the session began, the first batch after a marker continues the sequence of that session (`Before`).

While a transaction is open,
the rules of that module come first. Where the batches of an epoch are lost, only the epoch remains (`fences`), and its
sequence, too, starts at 0.

Sequences are i32 and continue at 0 after 2^31-1. Compaction removes records, not sequences: the range of offsets of a
batch counts. `broker.partition.partition` decides whether a *leader* may refuse a batch for what is unknown here.

`ProducerStates` forgets producers that have been idle for `producer.id.expiration.ms` (KIP-854) and, where it has no
room, those that have been idle for longest; never a producer with an open transaction, whose marker still has to come.

Snapshots. `<offset>.snapshot` in the directory of the partition holds what is known below its offset (exclusive). The
log says the same; a snapshot saves reading it from its start, and keeps what retention has removed (KIP-360). Recovery
skips a missing or damaged one and reads on from an older one, or from the log start. Where retention has removed the
log behind an older snapshot, only the epochs of that snapshot hold: sequences may have gone on since, and transactions
have ended.

The file has the form of `broker.log.log_dir`, kind `producers`, with a line for each producer id, longest idle first:

    PRODUCER_ID EPOCH LAST_APPEND_MS then for up to five batches BASE_SEQUENCE LAST_SEQUENCE BASE_OFFSET TIMESTAMP_MS

Times are milliseconds since 1970; the timestamp is the log append time, -1 with the producer's own times. The last
offset of a batch follows from its sequences. A line without batches: the producer's last batch was a marker, or its
batches are lost.

With transactions the file is of version 2, and other lines precede those:

    open PRODUCER_ID FIRST_OFFSET STARTED_MS          a producer below has this transaction open
    undecided MARKER_OFFSET FIRST_OFFSET              ended by a marker that was not below the high watermark yet
    aborted PRODUCER_ID FIRST_OFFSET LAST_OFFSET LAST_STABLE_OFFSET
                                                      aborted by a marker in the segment that the snapshot's
                                                      offset lies in or ends; see `.txnindex` for earlier ones
    decided COMMIT PRODUCER_ID...                     a marker began the epoch of these producers: 1 commit, 0 abort
    before PRODUCER_ID EPOCH LAST_SEQUENCE            the last sequence that an earlier epoch had here

A file without `decided` lines may be older than they are: its decisions are unknown.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final, NamedTuple, Self, cast

from broker.log.index import TxnIndex, read_markers, walk_headers
from broker.log.log_dir import contradictions, decode_lines, encode_lines
from broker.log.segment import Segment
from broker.log.storage import TEMPORARY_SUFFIX, Storage, read_file, rewritten_anyway
from broker.log.transactions import (
    NO_COORDINATOR,
    AbortedTransaction,
    MarkerFate,
    OpenTransaction,
    OpenTransactions,
    Undecided,
)
from raftlog.errors import (
    BrokerOverloaded,
    CorruptRecordError,
    DuplicateSequence,
    InvalidProducerEpoch,
    InvalidTxnState,
    OutOfOrderSequence,
    RaftlogError,
    UnknownProducerId,
    UnsupportedVersion,
)
from raftlog.format.control import MAX_PRODUCER_EPOCH, Marker, PlacedMarker
from raftlog.format.header import Attributes, BatchHeader

REMEMBERED_BATCHES: Final = 5
MAX_SEQUENCE: Final = (1 << 31) - 1
NO_TIMESTAMP: Final = -1
SEQUENCES: Final = MAX_SEQUENCE + 1


def sequence_after(sequence: int, count: int) -> int:
    """Return the sequence `count` records further on; after 2^31-1 comes 0."""
    return (sequence + count) % SEQUENCES


@dataclass(frozen=True, slots=True)
class ProducerLimits:
    """How long a log remembers producer ids, and how many."""

    expiration_ms: int = 86_400_000
    """producer.id.expiration.ms: since a producer's last append, by this broker's clock."""
    max_ids: int = 100_000
    """producer.ids.max, in each partition."""


class Duplicate(NamedTuple):
    """Where the records of a batch were appended before."""

    base_offset: int
    last_offset: int
    timestamp_ms: int
    """The log append time, -1 with the producer's own times."""


class RememberedBatch(NamedTuple):
    """One of the last batches of a producer."""

    base_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp_ms: int
    """The log append time, -1 with the producer's own times."""


class Before(NamedTuple):
    """The last sequence of an epoch that a marker has ended."""

    epoch: int
    last_sequence: int


class ProducerState(NamedTuple):
    """What is remembered of one producer id.

    `batches`: at most five, oldest first, without a gap between them; none after a marker, or where they are lost.
    """

    epoch: int
    last_append_ms: int
    """Wall clock of this broker at the last append here."""
    batches: tuple[RememberedBatch, ...]
    first_offset: int = -1
    """First offset of the open transaction; -1: none is open."""
    started_ms: int = 0
    """Wall clock of this broker when the first record of the open transaction was appended here; 0: none is open."""
    decision: bool | None = None
    """Whether the marker that began this epoch was a commit; None: unknown, or a batch began the epoch."""

    before: Before | None = None
    """With no batches: the last sequence that an earlier epoch had here; None: there was none, or it is unknown."""

    def fence(self) -> ProducerState:
        """Return only what later appends cannot invalidate: lower epochs are fenced."""
        return ProducerState(self.epoch, self.last_append_ms, (), decision=self.decision)

    @property
    def last_written(self) -> Before | None:
        """The last sequence here, and its epoch."""
        return Before(self.epoch, self.batches[-1].last_sequence) if self.batches else self.before

    @property
    def next_sequence(self) -> int:
        """The base sequence of the next batch."""
        return (self.batches[-1].last_sequence + 1) % SEQUENCES if self.batches else 0

    @property
    def last_sequence(self) -> int:
        """Sequence of the producer's last record in this epoch; -1: it has none."""
        return self.batches[-1].last_sequence if self.batches else -1

    @property
    def last_offset(self) -> int:
        """Offset of the producer's last record in this epoch; -1: it has none."""
        return self.batches[-1].last_offset if self.batches else -1


def most_of_each(counts: Iterable[int], most: int) -> int:
    """Return the limit on each count that keeps their sum within `most`; small counts leave room to larger ones."""
    ascending = sorted(counts)
    for at, count in enumerate(ascending):
        others = len(ascending) - at
        if count * others > most:
            return most // others
        most -= count
    return max(ascending, default=0)


Layer = dict[int, ProducerState | None]
"""What was noted in some stretch of time, oldest first; None: the producer was forgotten."""


class FrozenProducers:
    """What was remembered at one moment; any thread may read it while others are noted.

    It holds the layers of the table, so that taking it costs nothing; merging them takes the time.
    """

    __slots__ = ("layers", "undecided")

    def __init__(self, layers: tuple[Layer, ...], undecided: tuple[Undecided, ...] = ()) -> None:
        self.layers = layers
        self.undecided = undecided

    def together(self) -> dict[int, ProducerState]:
        """Return the layers as one table, the longest idle first."""
        merged: dict[int, ProducerState] = {}
        for layer in self.layers:
            for producer_id, state in layer.items():
                merged.pop(producer_id, None)
                if state is not None:
                    merged[producer_id] = state
        return merged

    def release(self) -> None:
        """Free the states one by one: freeing a large table at once holds up the interpreter."""
        layers, self.layers = self.layers, ()
        states = [state for layer in layers for state in layer.values()]
        del layers
        while states:
            states.pop()


LIVE_MS: Final = 600_000
"""A producer that appended within this time is never forgotten for want of room: its last batch may be sent again."""
FENCE_MS: Final = 60_000
"""Likewise a producer of which only a marker is left: a late batch of the ended transaction must be refused as long as
one may be on its way."""
MAX_LAYERS: Final = 4
SMALL_LAYER: Final = 1_000
"""`freeze` merges two layers that together have no more producers than this."""
MAX_FORGOTTEN: Final = 1_000
"""Producers that may be forgotten to make room for one control batch."""

_APPEND_TIME: Final = int(Attributes.LOG_APPEND_TIME)
_TRANSACTIONAL: Final = int(Attributes.TRANSACTIONAL)
_CONTROL: Final = int(Attributes.CONTROL)


class ProducerStates:
    """All producers of one log, in the order of their last appends: what a leader may append, and what was appended.

    A leader calls `check` before it appends. Leaders, followers and recovery call `note_appended` or `note` for each
    batch, so all replicas remember the same.

    Invariants: at most `limits.max_ids` ids, unless more have a transaction open; of each at most five batches.
    `_producers` equals the layers overlaid by `_recent`; a layer never changes. `transactions` has the producers with
    an open transaction, `_ended` those of which only a marker or a fence is left, `_idle` the others; the last two are
    in the order of `_producers`, which is that of the log, so every replica forgets in the same order.
    """

    __slots__ = ("_ended", "_idle", "_layers", "_newest_ms", "_producers", "_recent", "limits", "transactions")

    def __init__(
        self,
        limits: ProducerLimits | None = None,
        producers: Iterable[tuple[int, ProducerState]] = (),
        undecided: Iterable[Undecided] = (),
    ) -> None:
        self.limits: Final = limits or ProducerLimits()
        self._producers = OrderedDict(producers)
        self._newest_ms = max((state.last_append_ms for state in self._producers.values()), default=0)
        self.transactions: Final = OpenTransactions(
            (
                (producer_id, OpenTransaction(state.epoch, state.first_offset, state.started_ms))
                for producer_id, state in self._producers.items()
                if state.first_offset >= 0
            ),
            undecided,
        )
        self._idle = OrderedDict[int, None]()
        self._ended = OrderedDict[int, None]()
        for producer_id, state in self._producers.items():
            if state.first_offset < 0:
                (self._idle if state.batches else self._ended)[producer_id] = None
        self._layers: tuple[Layer, ...] = ()
        self._recent: Layer = dict(self._producers)

    def __len__(self) -> int:
        return len(self._producers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProducerStates) and list(self.items()) == list(other.items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self._producers)})"

    def items(self) -> Iterator[tuple[int, ProducerState]]:
        """Yield (producer id, state), the longest idle first."""
        return iter(self._producers.items())

    def get(self, producer_id: int) -> ProducerState | None:
        """Return what is known of a producer id."""
        return self._producers.get(producer_id)

    def remembers(self, header: BatchHeader) -> bool:
        """Whether a batch of the log says what is remembered of sequences, so that compaction must keep its numbers.

        After a marker that is the batch with the last sequence before it (`Before`).
        """
        state = self._producers.get(header.producer_id)
        if state is None:
            return False
        if not state.batches:
            last_sequence = sequence_after(header.base_sequence, header.last_offset_delta)
            return state.before == Before(header.producer_epoch, last_sequence)
        return any(batch.base_offset == header.base_offset for batch in state.batches)

    def needs_epoch(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether a marker of this epoch may be the last that the log says of the producer's epoch."""
        state = self._producers.get(producer_id)
        return state is not None and state.epoch <= producer_epoch

    @property
    def newest_append_ms(self) -> int:
        """Wall clock at the last append of any producer; 0 where none is known."""
        return self._newest_ms if self._producers else 0

    def copy(self) -> Self:
        """Return an independent copy. Takes time in proportion to the producers; `freeze` does not."""
        return type(self)(self.limits, self.items(), self.transactions.undecided)

    def fences(self) -> Self:
        """Return only the fences; later appends cannot invalidate them.

        Sequences and open transactions are left out: they may have changed.
        """
        return type(self)(self.limits, ((producer_id, state.fence()) for producer_id, state in self.items()))

    # Snapshots; these run on the event loop, so none of them takes time in proportion to the producers

    @property
    def may_freeze(self) -> bool:
        """Whether another `freeze` may take memory: each may keep a table until `replace_layers`."""
        return len(self._layers) < MAX_LAYERS

    def freeze(self) -> FrozenProducers:
        """Return what is remembered now."""
        layers, recent = self._layers, self._recent
        if recent and layers and len(layers[-1]) + len(recent) <= SMALL_LAYER:
            together = dict(layers[-1])
            for producer_id, state in recent.items():
                together.pop(producer_id, None)
                together[producer_id] = state
            self._layers = (*layers[:-1], together)
            self._recent = {}
        elif recent:
            self._layers = (*layers, recent)
            self._recent = {}
        return FrozenProducers(self._layers, self.transactions.undecided)

    def replace_layers(self, frozen: FrozenProducers, together: dict[int, ProducerState]) -> None:
        """Keep `frozen.together()` instead of the layers of `frozen`, unless they have been replaced since."""
        count = len(frozen.layers)
        layers = self._layers
        if len(layers) >= count and all(mine is its for mine, its in zip(layers, frozen.layers, strict=False)):
            self._layers = (cast(Layer, together), *layers[count:])

    # The order, and which producers are forgotten

    def _may_forget(self, count: int, now_ms: int) -> bool:
        """Whether `count` producers without open transaction have been idle for long enough."""
        if count > MAX_FORGOTTEN:
            return False
        found = self._idle_since(self._ended, count, now_ms - FENCE_MS)
        return found >= count or found + self._idle_since(self._idle, count - found, now_ms - LIVE_MS) >= count

    def _idle_since(self, ids: Iterable[int], at_most: int, since_ms: int) -> int:
        """Return how many of the first `at_most` of `ids`, longest idle first, have appended nothing since."""
        states = (self._producers[producer_id] for producer_id in islice(ids, at_most))
        return sum(1 for _ in takewhile(lambda state: state.last_append_ms < since_ms, states))

    def _put(self, producer_id: int, state: ProducerState) -> None:
        producers = self._producers
        former = producers.get(producer_id)
        if former is not None and former.last_append_ms > state.last_append_ms:
            state = state._replace(last_append_ms=former.last_append_ms)
        if state.last_append_ms > self._newest_ms:
            self._newest_ms = state.last_append_ms
        self._note_at_end(producer_id, former, state)
        if len(producers) > self.limits.max_ids:
            longest_idle = self._longest_idle()
            if longest_idle is not None and longest_idle != producer_id:
                self._forget(longest_idle)

    def _note_at_end(self, producer_id: int, former: ProducerState | None, state: ProducerState) -> None:
        """Note what is known of a producer now, and move it to the end of all orders."""
        producers, recent = self._producers, self._recent
        if former is not None:
            producers.move_to_end(producer_id)
        self._place(producer_id, former, state)
        recent.pop(producer_id, None)  # moves to the end here, too, even if the producer was forgotten
        producers[producer_id] = recent[producer_id] = state

    def _place(self, producer_id: int, former: ProducerState | None, state: ProducerState) -> None:
        """Move a producer to the end of the order that it belongs to now."""
        before, now = self._order_of(former), self._order_of(state)
        if before is not None and before is not now:
            del before[producer_id]
        if now is not None:
            now[producer_id] = None
            if before is now:
                now.move_to_end(producer_id)

    def _order_of(self, state: ProducerState | None) -> OrderedDict[int, None] | None:
        """Return the order in which a producer waits to be forgotten; None: its transaction is open."""
        if state is None or state.first_offset >= 0:
            return None
        return self._idle if state.batches else self._ended

    def expire(self, now_ms: int, at_most: int | None = None) -> int:
        """Forget producers that have not appended for `limits.expiration_ms` (KIP-854), and return how many.

        `at_most` limits the number; when that many were forgotten, more may have expired.
        """
        oldest_ms = now_ms - self.limits.expiration_ms
        count = 0
        for order in (self._idle, self._ended):
            while order and count != at_most:
                longest_idle = next(iter(order))
                if self._producers[longest_idle].last_append_ms >= oldest_ms:
                    break
                self._forget(longest_idle)
                count += 1
        return count

    def ahead_of(self, now_ms: int) -> list[int]:
        """Return the producers that appended later than now: the clock was ahead then, and was set back since.

        Each would keep those behind it from being forgotten until the clock is there again. By less than `LIVE_MS`
        does not count, as `now_ms` may be from before the last appends. If there are none, `newest_append_ms` becomes
        the latest time of those that are left.
        """
        latest_ms = now_ms + LIVE_MS
        if self._newest_ms <= latest_ms:
            return []
        found = [producer_id for producer_id, state in self._producers.items() if state.last_append_ms > latest_ms]
        if not found:
            self._newest_ms = max((state.last_append_ms for state in self._producers.values()), default=0)
        return found

    def set_back(self, producer_ids: Iterable[int], now_ms: int) -> None:
        """Take the last append of producers that are ahead as one of now: they are kept too long rather than too
        short."""
        for producer_id in producer_ids:
            state = self._producers.get(producer_id)
            if state is not None and state.last_append_ms > now_ms + LIVE_MS:
                self._note_at_end(producer_id, state, state._replace(last_append_ms=now_ms))

    def forget_idle(self, keep: int, now_ms: int, at_most: int) -> int:
        """Forget idle producers, as for want of room, until `keep` are left; return how many were forgotten.

        At most `at_most` in one call; when that many were forgotten, more may be idle.
        """
        count = 0
        while len(self._producers) > keep and count < at_most:
            longest_idle = self._longest_idle()
            if longest_idle is None:
                break
            state = self._producers[longest_idle]
            # A session of a Kafka client continues the sequence that it had before a marker.
            is_fence = not state.batches and state.before is None
            if state.last_append_ms >= now_ms - (FENCE_MS if is_fence else LIVE_MS):
                break
            self._forget(longest_idle)
            count += 1
        return count

    def _longest_idle(self) -> int | None:
        """Return the producer to forget first for want of room; None: every producer has a transaction open.

        It is the one that became eligible first (`LIVE_MS`, `FENCE_MS`), or will.
        """
        idle, ended = next(iter(self._idle), None), next(iter(self._ended), None)
        if idle is None or ended is None:
            return ended if idle is None else idle
        producers = self._producers
        is_later = producers[ended].last_append_ms + FENCE_MS > producers[idle].last_append_ms + LIVE_MS
        return idle if is_later else ended

    def _forget(self, producer_id: int) -> None:
        order = self._order_of(self._producers.pop(producer_id))
        assert order is not None, "a producer with an open transaction is never forgotten"
        del order[producer_id]
        self._recent.pop(producer_id, None)
        if any(producer_id in layer for layer in self._layers):
            self._recent[producer_id] = None

    # What a leader may append

    def check(self, header: BatchHeader, now_ms: int, session_epoch: int = -1) -> Duplicate | None:
        """Return where the batch was appended before, or None if it may be appended, as it may without a producer id.

        Changes nothing. `now_ms`: wall clock. `session_epoch`: see the module; -1: each epoch begins its own sequence.

        Raises:
            InvalidProducerEpoch: a higher epoch of the producer id has appended, or its transaction has ended.
            InvalidTxnState: the producer id has a transaction open, and the batch is no part of it.
            OutOfOrderSequence: there is a gap before the batch, or only its end is new.
            DuplicateSequence: the batch was appended, but its offset is no longer remembered.
            UnknownProducerId: nothing is known of the id, and the sequence does not begin with 0.
            BrokerOverloaded: the id is new, and `producer.ids.max` ids are live.
        """
        producer_id = header.producer_id
        if producer_id < 0:
            return None
        state = self._producers.get(producer_id)
        if state is None:
            self._check_new(header, now_ms)
            return None
        epoch, base = header.producer_epoch, header.base_sequence
        if state.first_offset >= 0:
            self._check_within(header, state)
        if session_epoch >= 0 and (epoch > state.epoch or (epoch == state.epoch and not state.batches)):
            self._check_continues(header, state, session_epoch)
            return None
        if epoch == state.epoch:
            if base == state.next_sequence:
                return None
            return self._known(header, state)
        if epoch < state.epoch:
            raise InvalidProducerEpoch(
                f"producer id {producer_id} has epoch {epoch}, but its epoch {state.epoch} has written before: "
                "another producer uses the id, or this batch is old"
            )
        if base != 0:
            raise OutOfOrderSequence(
                f"producer id {producer_id} begins epoch {epoch} (it was {state.epoch}) with sequence {base} instead "
                "of 0: batches before this one are missing"
            )
        return None

    def _check_within(self, header: BatchHeader, state: ProducerState) -> None:
        """Refuse a batch that is no part of the open transaction."""
        if not header.attributes & _TRANSACTIONAL:
            raise InvalidTxnState(
                f"producer id {header.producer_id} has had a transaction open since offset {state.first_offset}, and "
                "this batch is not transactional: another producer uses the id"
            )
        if header.producer_epoch > state.epoch:
            raise InvalidTxnState(
                f"producer id {header.producer_id} has epoch {header.producer_epoch}, but its transaction of epoch "
                f"{state.epoch} has not ended: add the partition to the new transaction first"
            )

    def _check_continues(self, header: BatchHeader, state: ProducerState, session_epoch: int) -> None:
        """Refuse the first batch of an epoch that does not continue the sequence of its session."""
        last = state.last_written
        base = header.base_sequence
        expected = 0 if last is None or last.epoch < session_epoch else sequence_after(last.last_sequence, 1)
        if base == expected:
            return
        named = f"producer id {header.producer_id} epoch {header.producer_epoch}: sequence {base}"
        behind = (expected - base) % SEQUENCES
        if expected and behind <= SEQUENCES // 2 and header.last_offset_delta < behind:
            raise DuplicateSequence(
                f"{named} was appended in an earlier transaction, which has ended before sequence {expected}"
            )
        raise OutOfOrderSequence(f"{named} does not follow: the next one here is {expected}; batches are missing")

    def _check_new(self, header: BatchHeader, now_ms: int) -> None:
        if header.base_sequence != 0:
            raise UnknownProducerId(
                f"producer id {header.producer_id} is unknown here, and its batch begins with sequence "
                f"{header.base_sequence} instead of 0: its records were deleted, or it has been idle for longer than "
                "producer.id.expiration.ms; begin a new epoch with sequence 0"
            )
        self._check_room(header.producer_id, now_ms)

    def _check_room(self, producer_id: int, now_ms: int, others: int = 0) -> None:
        """Refuse a new producer id if no idle one can be forgotten for it and for `others` that are new as well."""
        room = max(self.limits.max_ids - len(self._producers), 0)
        if others >= room and not self._may_forget(others + 1 - room, now_ms):
            raise BrokerOverloaded(
                f"{len(self._producers)} producer ids have written within the last {LIVE_MS // 60_000} minutes or have "
                f"a transaction open, and producer.ids.max={self.limits.max_ids}: producer id {producer_id} cannot "
                "begin now; use fewer producers and keep them open, or raise producer.ids.max"
            )

    def _known(self, header: BatchHeader, state: ProducerState) -> Duplicate:
        base = header.base_sequence
        last = sequence_after(base, header.last_offset_delta)
        for batch in reversed(state.batches):
            if batch.base_sequence == base and batch.last_sequence == last:
                return Duplicate(batch.base_offset, batch.last_offset, batch.timestamp_ms)
        named = f"producer id {header.producer_id} epoch {header.producer_epoch}: sequences {base} to {last}"
        behind = (state.next_sequence - base) % SEQUENCES
        if state.batches and behind <= SEQUENCES // 2 and header.last_offset_delta < behind:
            raise DuplicateSequence(
                f"{named} were appended before sequence {state.next_sequence}; their offset is no longer remembered"
            )
        raise OutOfOrderSequence(
            f"{named} do not follow: the next one here is {state.next_sequence}; batches in between are missing"
        )

    def check_markers(self, markers: Sequence[Marker], now_ms: int) -> list[MarkerFate | RaftlogError]:
        """Return what becomes of each marker when they are appended in this order; see `transactions.py`.

        InvalidProducerEpoch: a higher epoch of the producer id is known. BrokerOverloaded: the id is new, and
        `producer.ids.max` ids are live; if it were not remembered, a late batch would open its transaction again.
        InvalidTxnState: the transaction has ended with the other decision, so the marker is no repeat.
        """
        fates: list[MarkerFate | RaftlogError] = []
        epochs: dict[int, tuple[int, bool | None]] = {}
        new = 0
        for marker in markers:
            producer_id, epoch = marker.producer_id, marker.producer_epoch
            state = self._producers.get(producer_id)
            known, decision = epochs.get(producer_id, (-1, None) if state is None else (state.epoch, state.decision))
            if epoch == known and not self._ends_last(marker):
                fates.append(MarkerFate.REPEATED if decision in (None, marker.commit) else _contradicted(marker))
                continue
            try:
                if epoch < known:
                    raise InvalidProducerEpoch(
                        f"the marker of producer id {producer_id} has epoch {epoch}, but epoch {known} has begun: "
                        "its transaction ended long ago"
                    )
                if known < 0:
                    self._check_room(producer_id, now_ms, new)
                    new += 1
            except (InvalidProducerEpoch, BrokerOverloaded) as refusal:
                fates.append(refusal)
            else:
                epochs[producer_id] = epoch, marker.commit
                fates.append(MarkerFate.APPENDED)
        return fates

    def _ends_last(self, marker: Marker) -> bool:
        """Whether an administrator ends a transaction of the highest epoch, which no marker of a higher one can end."""
        found = self.transactions.get(marker.producer_id)
        return (
            found is not None
            and found.epoch == marker.producer_epoch == MAX_PRODUCER_EPOCH
            and marker.coordinator_epoch == NO_COORDINATOR
        )

    # What was appended

    def note(self, header: BatchHeader, now_ms: int) -> None:
        """Note a batch of the log: a follower's append, or a batch that recovery reads. Never refuses.

        `now_ms`: wall clock. Recovery does not know when a batch was appended and passes the present, so that the
        producer is kept too long rather than too short.
        """
        timestamp_ms = header.max_timestamp_ms if header.attributes & _APPEND_TIME else NO_TIMESTAMP
        self.note_appended(header, header.base_offset, timestamp_ms, now_ms)

    def note_appended(self, header: BatchHeader, base_offset: int, timestamp_ms: int, now_ms: int) -> None:
        """Note a batch that a leader has appended at `base_offset`; `header` is the producer's. Never refuses.

        `timestamp_ms`: the log append time, or -1.
        """
        producer_id = header.producer_id
        if producer_id < 0 or header.base_sequence < 0:
            return
        delta = header.last_offset_delta
        batch = RememberedBatch(
            header.base_sequence,
            (header.base_sequence + delta) % SEQUENCES,
            base_offset,
            base_offset + delta,
            timestamp_ms,
        )
        state = self._producers.get(producer_id)
        if state is None or state.epoch != header.producer_epoch or state.next_sequence != batch.base_sequence:
            # the batch is in the log, so its leader has let the sequence start over
            batches: tuple[RememberedBatch, ...] = (batch,)
        else:
            batches = (*state.batches[1 - REMEMBERED_BATCHES :], batch)
        first_offset, started_ms = (-1, 0) if state is None else (state.first_offset, state.started_ms)
        decision = None if state is None or state.epoch != header.producer_epoch else state.decision
        if first_offset < 0 and header.attributes & _TRANSACTIONAL:
            first_offset, started_ms = base_offset, now_ms
            self.transactions.begin(producer_id, OpenTransaction(header.producer_epoch, base_offset, now_ms))
        self._put(
            producer_id, ProducerState(header.producer_epoch, now_ms, batches, first_offset, started_ms, decision)
        )

    def note_markers(self, markers: Iterable[PlacedMarker], now_ms: int) -> list[AbortedTransaction]:
        """Note markers of the log; return the transactions with records that they abort. Never refuses.

        The markers say where those transactions begin: a log that begins later does not know.
        """
        aborted = []
        for offset, marker in markers:
            self.transactions.end(marker.producer_id, offset)
            state = self._producers.get(marker.producer_id)
            before = None if state is None else state.last_written
            self._put(
                marker.producer_id,
                ProducerState(marker.producer_epoch, now_ms, (), decision=marker.commit, before=before),
            )
            if not marker.commit and marker.first_offset >= 0:
                first_open = self.transactions.first_open
                stable = offset + 1 if first_open is None else first_open
                aborted.append(AbortedTransaction(marker.producer_id, marker.first_offset, offset, stable))
        return aborted


def _contradicted(marker: Marker) -> InvalidTxnState:
    said, known = ("commit", "aborted") if marker.commit else ("abort", "committed")
    return InvalidTxnState(
        f"the marker of producer id {marker.producer_id} with epoch {marker.producer_epoch} says {said}, but an "
        f"administrator or another coordinator has {known} the transaction here before; that decision stays"
    )


logger = logging.getLogger(__name__)

SNAPSHOT_SUFFIX: Final = ".snapshot"
KEPT_SNAPSHOTS: Final = 2
SNAPSHOT_INTERVAL_BYTES: Final = 64 << 20
"""Bytes appended between two snapshots, give or take a batch: so much of a log is read when it is opened."""
_KIND: Final = "producers"
_NAME: Final = re.compile(r"(\d{20})\.snapshot")
_BATCH_FIELDS: Final = 4
_PLAIN_VERSION: Final = 1
_VERSION: Final = 2


def snapshot_name(offset: int) -> str:
    """Return the name of the snapshot of everything below `offset`."""
    return f"{offset:020d}{SNAPSHOT_SUFFIX}"


def snapshot_offsets(names: Iterable[str]) -> list[int]:
    """Return the offsets of the snapshots among the names in a directory, in order."""
    return sorted(int(matched[1]) for name in names if (matched := _NAME.fullmatch(name)))


class Snapshot(NamedTuple):
    """What a file holds. `aborted`: by markers in the segment that holds the snapshot's offset or ends there."""

    producers: ProducerStates
    aborted: tuple[AbortedTransaction, ...] = ()


def encode_producers(
    producers: ProducerStates | Mapping[int, ProducerState],
    undecided: Iterable[Undecided] = (),
    aborted: Iterable[AbortedTransaction] = (),
) -> bytes:
    """Return the bytes of a snapshot, of version 1 if an earlier raftlog can understand them."""
    marked: list[str] = []
    lines: list[str] = []
    has_ended = False
    decided: dict[bool, list[int]] = {False: [], True: []}
    for producer_id, state in producers.items():
        batches = (f" {b.base_sequence} {b.last_sequence} {b.base_offset} {b.timestamp_ms}" for b in state.batches)
        lines.append(f"{producer_id} {state.epoch} {state.last_append_ms}{''.join(batches)}")
        if state.first_offset >= 0:
            marked.append(f"open {producer_id} {state.first_offset} {state.started_ms}")
        has_ended |= not state.batches
        if state.decision is not None:
            decided[state.decision].append(producer_id)
        if state.before is not None:
            marked.append(f"before {producer_id} {state.before.epoch} {state.before.last_sequence}")
    marked += (f"undecided {entry.marker_offset} {entry.first_offset}" for entry in undecided)
    marked += (f"aborted {' '.join(map(str, entry))}" for entry in aborted)
    marked += (f"decided {commit:d} {' '.join(map(str, ids))}" for commit, ids in decided.items() if ids)
    return encode_lines(_KIND, [*marked, *lines], _VERSION if marked or has_ended else _PLAIN_VERSION)


def decode_snapshot(path: str, data: bytes, limits: ProducerLimits) -> Snapshot:
    """Return what a snapshot holds. Of more ids than `limits` allow, those that appended last are kept, and
    those with an open transaction.

    Raises:
        UnsupportedVersion: written by a newer raftlog.
        CorruptRecordError: torn, altered, or of another kind.
    """
    lines = decode_lines(path, _KIND, data, _VERSION)
    with contradictions(path):
        return _read_lines(path, lines, limits)


def _read_lines(path: str, lines: Sequence[str], limits: ProducerLimits) -> Snapshot:
    producers: list[tuple[int, ProducerState]] = []
    started: dict[int, tuple[int, int]] = {}
    undecided: list[Undecided] = []
    aborted: list[AbortedTransaction] = []
    decided: dict[int, bool] = {}
    before: dict[int, Before] = {}
    new = tuple.__new__
    for line in lines:
        word, _, rest = line.partition(" ")
        if not word.isdecimal():
            numbers = [int(number) for number in rest.split(" ")]
            match word, len(numbers):
                case "open", 3:
                    started[numbers[0]] = (numbers[1], numbers[2])
                case "undecided", 2:
                    undecided.append(Undecided(*numbers))
                case "aborted", 4:
                    aborted.append(AbortedTransaction(*numbers))
                case "before", 3:
                    before[numbers[0]] = Before(numbers[1], numbers[2])
                case "decided", count if count > 1 and numbers[0] in (0, 1):
                    decided.update(dict.fromkeys(numbers[1:], bool(numbers[0])))
                case _:
                    raise CorruptRecordError(f"{path} is damaged: it has an unknown line {line[:60]!r}")
            continue
        producer_id, epoch, last_append_ms, *numbers = map(int, line.split(" "))
        if len(numbers) % _BATCH_FIELDS or len(numbers) > _BATCH_FIELDS * REMEMBERED_BATCHES:
            raise CorruptRecordError(f"{path} is damaged: producer id {producer_id} has {len(numbers)} numbers")
        fields = iter(numbers)
        batches = tuple(
            [  # there may be half a million, so each costs one call
                new(RememberedBatch, (base, last, offset, offset + (last - base & MAX_SEQUENCE), timestamp_ms))
                for base, last, offset, timestamp_ms in zip(fields, fields, fields, fields, strict=True)
            ]
        )
        first_offset, started_ms = started.pop(producer_id, (-1, 0)) if started else (-1, 0)
        decision = decided.get(producer_id) if decided else None
        former = before.get(producer_id) if before else None
        state = ProducerState(epoch, last_append_ms, batches, first_offset, started_ms, decision, former)
        producers.append((producer_id, state))
    if started:
        raise CorruptRecordError(
            f"{path} is damaged: producers {sorted(started)[:5]} with open transactions are missing"
        )
    over = len(producers) - limits.max_ids
    if over > 0:
        producers = [*(item for item in producers[:over] if item[1].first_offset >= 0), *producers[over:]]
    return Snapshot(ProducerStates(limits, producers, undecided), tuple(aborted))


def load_snapshot(
    storage: Storage, directory: str, offsets: Iterable[int], end_offset: int, limits: ProducerLimits
) -> tuple[int, Snapshot]:
    """Return the newest good snapshot at `offsets` that is not beyond `end_offset`, and its offset.

    (0, an empty snapshot) if none is. Raises OSError.
    """
    for offset in sorted(offsets, reverse=True):
        if offset > end_offset:
            continue
        path = f"{directory}/{snapshot_name(offset)}"
        try:
            data = read_file(storage, path)
            if data is not None:
                return offset, decode_snapshot(path, data, limits)
        except (CorruptRecordError, UnsupportedVersion) as error:
            logger.warning("the producers are read from the log instead: %s", error)
    return 0, Snapshot(ProducerStates(limits))


def rebuild_producers(
    storage: Storage,
    directory: str,
    offsets: Iterable[int],
    segments: Sequence[Segment],
    end_offset: int,
    limits: ProducerLimits,
    now_ms: int,
    txn_index: TxnIndex | None = None,
) -> ProducerStates:
    """Return what the log remembers of its producers below `end_offset`: a snapshot, and the batches after it.

    `segments`: all segments in order, those below the log start included. Without a snapshot all are read. If the
    first segment begins after the snapshot, only the fences of the snapshot hold (`ProducerStates.fences`).
    `txn_index`, empty, gets the transactions aborted in its segment; that must be the last segment that begins below
    `end_offset`, as snapshots tell only of that one.

    Raises:
        InvalidBatch: the log holds bytes that are no batch.
        OSError: the disk.
    """
    offset, (producers, known) = load_snapshot(storage, directory, offsets, end_offset, limits)
    begin_offset = segments[0].base_offset
    if offset < begin_offset and len(producers):
        logger.warning(
            "%s: offsets %d to %d are gone, and no snapshot covers them; only earlier epochs of producers are known",
            directory,
            offset,
            begin_offset,
        )
        producers = producers.fences()
    aborted = [entry for entry in known if txn_index is not None and entry.last_offset >= txn_index.base_offset]
    for segment in segments:
        if segment.next_offset <= offset or segment.base_offset >= end_offset:
            continue
        opened = segment.opened
        if opened is None:
            file, start = storage.open(segment.log_path), 0
        else:
            file, start = opened.file, opened.index.floor(max(offset, segment.base_offset)).position
        for position, header in walk_headers(file, start, segment.size):
            if header.next_offset > end_offset:
                break
            if header.base_offset < offset:
                continue
            if header.attributes & _CONTROL:
                ended = producers.note_markers(read_markers(file, position, header), now_ms)
                if txn_index is not None and segment.base_offset == txn_index.base_offset:
                    aborted += ended
            else:
                producers.note(header, now_ms)
    if txn_index is not None:
        for entry in aborted:
            txn_index.append(entry)
    return producers


class SnapshotFiles:
    """The producer snapshots of one log on its disk.

    `offsets` and `newest_durable` change under `lock`, the log's own. The caller runs one of `verify`, `write`, `place`
    and `remove_spare` at a time, and one of `place`, `remove_spare`, `cut` and `remove_gone`. Methods that touch files
    raise OSError.
    """

    def __init__(
        self, storage: Storage, directory: str, offsets: list[int], lock: AbstractContextManager[object]
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._lock = lock
        self.offsets = offsets
        """Offsets of the snapshots, ascending."""
        self.newest_durable = 0
        """Offset of the newest snapshot that is known to be durable; 0: none."""
        self._unsure = set(offsets)
        """Found at the start: they may be torn or not durable, as a clean stop does not fsync them."""
        self._gone: list[int] = []
        """Offsets above a cut, whose files `remove_gone` removes."""

    def _path(self, offset: int) -> str:
        return f"{self._directory}/{snapshot_name(offset)}"

    def newest_committed(self, high_watermark: int) -> int:
        """Return the offset of the newest snapshot that no truncation can remove; 0: none."""
        with self._lock:
            return max((offset for offset in self.offsets if offset <= high_watermark), default=0)

    def verify(self, limits: ProducerLimits) -> None:
        """Fsync the snapshots found at the start that check, and remove the others.

        Only then may an older snapshot go because a newer one exists, or segments because a snapshot tells of them.
        """
        for offset in sorted(self._unsure):
            found, _ = load_snapshot(self._storage, self._directory, [offset], offset, limits)
            if found == offset:
                with suppress(FileNotFoundError):  # a truncation has removed it
                    self._storage.open(self._path(offset)).datasync()
            else:
                self._storage.remove(self._path(offset))
                self._drop([offset])
            self._unsure.discard(offset)

    def _drop(self, offsets: Sequence[int]) -> None:
        with self._lock:
            self.offsets = [kept for kept in self.offsets if kept not in offsets]

    def write(self, offset: int, data: bytes, *, durably: bool) -> None:
        """Write the bytes of a snapshot to a temporary file; `place` renames it."""
        aside = self._storage.open(self._path(offset) + TEMPORARY_SUFFIX, create=True)
        aside.truncate(0)
        aside.write((data,), 0)
        if durably:
            with rewritten_anyway():
                aside.datasync()

    def place(self, offset: int, high_watermark: int, *, durably: bool) -> None:
        """Give a snapshot its name, and remove those that are superfluous then. All stay while some are unsure."""
        self._storage.rename(self._path(offset) + TEMPORARY_SUFFIX, self._path(offset))
        if durably:
            self._storage.sync_dir(self._directory)
        with self._lock:
            self.offsets = sorted({*self.offsets, offset})
            self.newest_durable = max(self.newest_durable, offset)
        if not self._unsure:
            self.remove_spare(high_watermark)

    @property
    def has_spare(self) -> bool:
        """Whether some are superfluous: of those that are needed there are not so many."""
        with self._lock:
            return len(self.offsets) > KEPT_SNAPSHOTS + 1

    def remove_spare(self, high_watermark: int) -> None:
        """Remove all but the newest ones, and the newest below the high watermark, which is never truncated."""
        assert not self._unsure, "the ones to keep are known to be good"
        with self._lock:
            committed = [kept for kept in self.offsets if kept <= high_watermark]
            spare = [old for old in self.offsets[:-KEPT_SNAPSHOTS] if old not in committed[-1:]]
        for old in spare:
            self._storage.remove(self._path(old))
        self._drop(spare)

    def cut(self, offset: int) -> None:
        """Forget the snapshots above `offset`, all if that is 0; the caller holds the lock."""
        self._gone += [gone for gone in self.offsets if gone > offset or offset == 0]
        self.offsets = [kept for kept in self.offsets if kept not in self._gone]
        if self.newest_durable not in self.offsets:
            self.newest_durable = 0

    def remove_gone(self) -> None:
        """Remove the snapshots above a cut, durably, before the log grows over their offsets."""
        if self._gone:
            for offset in self._gone:
                self._storage.remove(self._path(offset))
            self._storage.sync_dir(self._directory)
            self._gone = []
