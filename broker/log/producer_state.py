"""What a log remembers of idempotent producers, so that a batch that is sent again is not appended again. Pure.

Of every producer id: its epoch, and where its last five batches went, by sequence number (KIP-98; five because a
producer has at most five in flight for a partition, KAFKA-5494). A batch continues its producer's numbers, or is one
of the five, or is refused:

    known of the producer id      what comes                                     check
    nothing                       base_sequence 0                                taken
    nothing                       anything else                                  UnknownProducerId
    a lower epoch                 base_sequence 0                                taken: the numbers begin anew
    a lower epoch                 anything else                                  OutOfOrderSequence
    a higher epoch                -                                              InvalidProducerEpoch
    this epoch                    the sequence after the last                    taken
    this epoch                    first and last sequence of one of the five     Duplicate
    this epoch                    nothing after the last sequence                DuplicateSequence
    this epoch                    a gap, or part of it is new                    OutOfOrderSequence

A marker (`transactions.py`) begins the next epoch of a producer, of which nothing is known then: its numbers begin with
0. While a transaction is open, other rules of that module come before these. Of batches that are lost, also to what is
remembered, an epoch may be left (`fences`): the numbers of that, too, begin with 0, as if nothing were known.

Sequences are i32 and go on at 0 after 2^31-1. Compaction takes records away, not numbers: what counts is the range of
offsets of a batch. `broker.log.producer_snapshots` keeps all of this on the disk; whether a *leader* may say what is
refused here is decided in `broker.partition`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from broker.log.producer_entries import (
    MAX_SEQUENCE,
    NO_TIMESTAMP,
    REMEMBERED_BATCHES,
    SEQUENCES,
    Duplicate,
    FrozenProducers,
    Layer,
    ProducerLimits,
    ProducerState,
    RememberedBatch,
    sequence_after,
)
from broker.log.producer_table import FENCE_MS, LIVE_MS, MAX_LAYERS, SMALL_LAYER, ProducerTable
from broker.log.transactions import NO_COORDINATOR, AbortedTransaction, MarkerFate, OpenTransaction
from raftlog.errors import (
    BrokerOverloaded,
    DuplicateSequence,
    InvalidProducerEpoch,
    InvalidTxnState,
    OutOfOrderSequence,
    RaftlogError,
    UnknownProducerId,
)
from raftlog.format.control import MAX_PRODUCER_EPOCH, Marker, PlacedMarker
from raftlog.format.header import Attributes, BatchHeader

__all__ = [
    "FENCE_MS",
    "LIVE_MS",
    "MAX_LAYERS",
    "MAX_SEQUENCE",
    "NO_TIMESTAMP",
    "REMEMBERED_BATCHES",
    "SMALL_LAYER",
    "Duplicate",
    "FrozenProducers",
    "Layer",
    "ProducerLimits",
    "ProducerState",
    "ProducerStates",
    "RememberedBatch",
    "sequence_after",
]

_APPEND_TIME: Final = int(Attributes.LOG_APPEND_TIME)
_TRANSACTIONAL: Final = int(Attributes.TRANSACTIONAL)


class ProducerStates(ProducerTable):
    """All producers of one log: what a leader may append, and what is remembered of it.

    The owner calls `check` before it appends as a leader, and one of the two `note`s for whatever was appended, on a
    leader, a follower and when a log is read again; so all replicas remember the same. The table: `producer_table.py`.
    """

    __slots__ = ()

    # What a leader may append

    def check(self, header: BatchHeader, now_ms: int) -> Duplicate | None:
        """Return where the batch is already, or None if it may be appended; one without a producer id always may.

        Nothing is changed. `now_ms`: wall clock.

        Raises:
            InvalidProducerEpoch: a higher epoch of the producer id has appended, or a transaction of it has ended.
            InvalidTxnState: a transaction of the producer id is open, and this is no part of it.
            OutOfOrderSequence: there is a gap before the batch, or part of it is new.
            DuplicateSequence: all of it was appended, and where is not known any more.
            UnknownProducerId: nothing is known of the id, and the numbers do not begin with 0.
            BrokerOverloaded: as many ids are live as may be, and this is another one.
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
        if epoch == state.epoch:
            if base == state.next_sequence:
                return None
            return self._known(header, state)
        if epoch < state.epoch:
            raise InvalidProducerEpoch(
                f"producer id {producer_id} with epoch {epoch}, but epoch {state.epoch} has written already: "
                "another producer uses the id, or this batch is old"
            )
        if base != 0:
            raise OutOfOrderSequence(
                f"producer id {producer_id} begins epoch {epoch} (it was {state.epoch}) with sequence {base} instead "
                "of 0: batches before this one are missing"
            )
        return None

    def _check_within(self, header: BatchHeader, state: ProducerState) -> None:
        """Refuse what is no part of the transaction that is open."""
        if not header.attributes & _TRANSACTIONAL:
            raise InvalidTxnState(
                f"producer id {header.producer_id} has had a transaction open since offset {state.first_offset}, and "
                "this batch is not transactional: another producer uses the id"
            )
        if header.producer_epoch > state.epoch:
            raise InvalidTxnState(
                f"producer id {header.producer_id} with epoch {header.producer_epoch}, but its transaction of epoch "
                f"{state.epoch} has not ended: add the partition to the new transaction first"
            )

    def _check_new(self, header: BatchHeader, now_ms: int) -> None:
        if header.base_sequence != 0:
            raise UnknownProducerId(
                f"nothing is known here of producer id {header.producer_id}, and sequence {header.base_sequence} is "
                "no beginning: its records were deleted, or it has been idle for longer than "
                "producer.id.expiration.ms; begin a new epoch with sequence 0"
            )
        self._check_room(header.producer_id, now_ms)

    def _check_room(self, producer_id: int, now_ms: int, others: int = 0) -> None:
        """Refuse a producer id for which, besides `others` that are new as well, no idle one can be forgotten."""
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
                f"{named} were appended before sequence {state.next_sequence}; at which offset is not known any more"
            )
        raise OutOfOrderSequence(
            f"{named} do not follow: the next one here is {state.next_sequence}; batches in between are missing"
        )

    def check_markers(self, markers: Sequence[Marker], now_ms: int) -> list[MarkerFate | RaftlogError]:
        """Return what becomes of each marker when they are appended in this order; see `transactions.py`.

        InvalidProducerEpoch where a higher epoch of the producer id is known, BrokerOverloaded where as many ids are
        live as may be, and this is another one: forgotten, a late batch of its transaction would open that again.
        InvalidTxnState where the transaction has ended already, and otherwise: that is never taken for a repeat.
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
                        f"a marker of producer id {producer_id} with epoch {epoch}, but epoch {known} has begun "
                        "already: its transaction ended long ago"
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
        """Whether an administrator ends a transaction of the last epoch, which no marker of a higher one can end."""
        found = self.transactions.get(marker.producer_id)
        return (
            found is not None
            and found.epoch == marker.producer_epoch == MAX_PRODUCER_EPOCH
            and marker.coordinator_epoch == NO_COORDINATOR
        )

    # What was appended

    def note(self, header: BatchHeader, now_ms: int) -> None:
        """Note a batch as it stands in the log: a follower's append, or one that is read again. Never refuses.

        `now_ms`: wall clock; of a batch that is read again it is not known when it was appended here, so that it is
        kept for longer rather than less.
        """
        timestamp_ms = header.max_timestamp_ms if header.attributes & _APPEND_TIME else NO_TIMESTAMP
        self.note_appended(header, header.base_offset, timestamp_ms, now_ms)

    def note_appended(self, header: BatchHeader, base_offset: int, timestamp_ms: int, now_ms: int) -> None:
        """Note what a leader has appended at `base_offset`; `header` is the producer's. Never refuses.

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
            batches: tuple[RememberedBatch, ...] = (
                batch,
            )  # as the log says: its leader has let the numbers begin anew
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
        """Note markers as they stand in the log; return the transactions with records that they abort. Never refuses.

        Where those begin the markers say: what is known here may be less, where the log begins later.
        """
        aborted = []
        for offset, marker in markers:
            self.transactions.end(marker.producer_id, offset)
            self._put(marker.producer_id, ProducerState(marker.producer_epoch, now_ms, (), decision=marker.commit))
            if not marker.commit and marker.first_offset >= 0:
                first_open = self.transactions.first_open
                stable = offset + 1 if first_open is None else first_open
                aborted.append(AbortedTransaction(marker.producer_id, marker.first_offset, offset, stable))
        return aborted


def _contradicted(marker: Marker) -> InvalidTxnState:
    said, known = ("commit", "aborted") if marker.commit else ("abort", "committed")
    return InvalidTxnState(
        f"the marker of producer id {marker.producer_id} with epoch {marker.producer_epoch} says {said}, but the "
        f"transaction was {known} here before: by an administrator, or by two coordinators; what is here stays"
    )
