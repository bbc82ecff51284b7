"""The coordinator of the transactional ids and sinks of one partition of __transaction_state. Pure.

decide, on_time ─▶ Decision(records, effects)     hard state stays
replay ─▶ Transaction, Sink                       hard state changes

A decision is a record. What replays as decided is owed markers, whoever decided it: `on_time` sends them,
MarkersWritten comes back, who waits is answered, and a moment later a record says that it is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Final, assert_never

from google.protobuf.message import Message

from broker.coordinator.core import Decision, Now, Send
from broker.transactions import decisions, listing, records, staging
from broker.transactions.commands import (
    Abort,
    AbortStages,
    AddTo,
    AddToStage,
    Command,
    CommitBatch,
    Describe,
    End,
    InitProducer,
    InitStage,
    LastBatch,
    List,
    MarkersWritten,
    PendingMarkers,
    Verify,
)
from broker.transactions.config import TransactionConfig
from broker.transactions.deadlines import Deadlines
from broker.transactions.decisions import Outcome
from broker.transactions.listing import Rest
from broker.transactions.markers import Owner, ParkedAnswers
from broker.transactions.sink import STAGE_EPOCH, Sink
from broker.transactions.state import HardState
from broker.transactions.transaction import State, Transaction
from raftlog.errors import BatchAlreadyCommitted, RaftlogError, to_wire
from raftlog.v1 import transaction_pb2

MAX_RECORDS: Final = 200
MAX_SENT: Final = 200
MAX_LOOKED_AT: Final = 2_000
"""After which `on_time` leaves the rest for its next call: a few milliseconds' work."""
AT_ONCE: Final = 0.0
"""A deadline that is over."""


class TransactionCoordinator:
    """State of the transactions of one shard. `markers`: the token to which PendingMarkers are sent."""

    def __init__(self, config: TransactionConfig, markers: object) -> None:
        self._config = config
        self._markers = markers
        self._state = HardState()
        self._undone = self._state.undone
        # For as long as this coordinator lives:
        self._deadlines: Deadlines[Owner] = Deadlines()
        self._parked = ParkedAnswers()
        self._expiry_ms: float | None = None
        # What is still to be looked at, the next one last:
        self._expiring_ids: list[str] = []
        self._expiring_sinks: list[str] = []

    @property
    def transactions(self) -> Mapping[str, Transaction]:
        """By transactional id; not to be changed."""
        return self._state.transactions

    @property
    def sinks(self) -> Mapping[str, Sink]:
        """By sink id; not to be changed."""
        return self._state.sinks

    # Records

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Apply a record: the only way hard state changes.

        Raises:
            CorruptRecordError: it is none that this version reads; says why.
        """
        self._state.replay(key, value)

    def loaded(self, now: Now) -> None:
        """The log has been replayed: what is open may stay so for the rest of its time, by the wall clock."""
        for owner in self._state.open:
            started_ms, timeout_ms = self._state.times_of(owner)
            left_ms = min(max(0, started_ms + timeout_ms - now.wall_ms), timeout_ms)
            self._deadlines.set(owner, now.monotonic_ms + left_ms)
        self._expiry_ms = now.monotonic_ms + self._config.expiration_check_interval_ms

    # Commands

    def decide(self, command: Command | Rest, now: Now) -> Decision:
        """Answer a command. Hard state does not change before the records are replayed."""
        decision = Decision()
        if isinstance(command, MarkersWritten):
            decision.effects = self._written(command.markers, now)
            return decision
        to = command.command.to if isinstance(command, Rest) else command.to
        try:
            match command:
                case Rest():
                    self._go_on(command, decision)
                case InitProducer() | AddTo() | End() | Verify() | Abort() | Describe():
                    self._decide_transaction(command, now, decision)
                case InitStage() | AddToStage() | CommitBatch():
                    self._decide_sink(command, now, decision)
                case AbortStages() | LastBatch() | List():
                    self._go_on(listing.begin(command, self._state, now.wall_ms), decision)
                    if isinstance(command, AbortStages):
                        sink = self._sink(command.request.sink_id)
                        decision.records += staging.fence(sink, command.request, now.wall_ms)
                case _:
                    assert_never(command)
        except RaftlogError as error:
            assert not decision.records, "who is refused changes nothing"
            decision.effects = [Send(to, error)]
        return decision

    def at_once(self, command: Command, now: Now) -> None:
        """Return None: everything here waits for its turn."""
        return

    def _answer(self, to: object, answer: Message | RaftlogError, missing: list[Owner], now: Now) -> list[Send]:
        """Answer when the markers of `missing` are written; at once if there are none."""
        if not missing:
            return [Send(to, answer)]
        assert not isinstance(answer, RaftlogError)
        self._parked.park(to, answer, missing, now.monotonic_ms + self._config.answer_within_ms)
        return []

    # Transactional ids

    def _known(self, transactional_id: str, now: Now) -> Transaction | None:
        """Return what is known of an id, even that its markers are written where that is not recorded yet."""
        known = self._state.transactions.get(transactional_id)
        if known is not None and Owner(transactional_id) in self._undone.written:
            return known.completed(now.wall_ms)
        return known

    def _decide_transaction(
        self, command: InitProducer | AddTo | End | Verify | Abort | Describe, now: Now, decision: Decision
    ) -> None:
        if isinstance(command, Abort | Describe):
            transactional_id = command.transactional_id
        else:
            transactional_id = command.request.transactional_id
        known = self._known(transactional_id, now)
        match command:
            case InitProducer():
                outcome = decisions.init(known, command, self._config, now.wall_ms)
            case AddTo():
                outcome = decisions.add(known, command.request, now.wall_ms)
            case End():
                outcome = decisions.end(known, command.request, now.wall_ms)
            case Verify():
                outcome = decisions.verify(known, command.request)
            case Abort():
                outcome = decisions.abort(known, transactional_id, now.wall_ms)
            case Describe():
                outcome = Outcome(listing.described(transactional_id, known))
            case _:
                assert_never(command)
        owner = Owner(transactional_id)
        if outcome.write is not None:
            self._write(owner, outcome.write, decision)
            if outcome.write.state is State.ONGOING and (known is None or known.state is not State.ONGOING):
                self._deadlines.set(owner, now.monotonic_ms + outcome.write.timeout_ms)
        decision.effects += self._answer(command.to, outcome.answer, [owner] if outcome.waits else [], now)

    def _write(self, owner: Owner, transaction: Transaction, decision: Decision) -> None:
        decision.records.append(records.transaction_record(owner.transactional_id, transaction))
        if transaction.state is not State.ONGOING:
            self._deadlines.forget(owner)

    # Sinks

    def _sink(self, sink_id: str) -> Sink:
        return self._state.sinks.get(sink_id) or Sink(sink_id)

    def _decide_sink(self, command: InitStage | AddToStage | CommitBatch, now: Now, decision: Decision) -> None:
        sink = self._sink(command.request.sink_id)
        match command:
            case InitStage():
                decision.effects.append(Send(command.to, self._init_stage(sink, command, now, decision)))
            case AddToStage():
                decision.records = staging.add_to_stage(sink, command.request)
                decision.effects.append(Send(command.to, transaction_pb2.AddToStageResponse()))
            case CommitBatch():
                written = {owner.producer_id for owner in self._undone.written if owner.sink_id == sink.sink_id}
                outcome = staging.commit_batch(sink, command.request, written, now.wall_ms)
                decision.records = outcome.records
                missing = [Owner("", sink.sink_id, producer_id) for producer_id in outcome.waits_for]
                if outcome.records:
                    for owner in missing:
                        self._deadlines.forget(owner)
                decision.effects += self._answer(command.to, outcome.answer, missing, now)
            case _:
                assert_never(command)

    def _init_stage(
        self, sink: Sink, command: InitStage, now: Now, decision: Decision
    ) -> transaction_pb2.InitStageResponse:
        try:
            decision.records = staging.init_stage(sink, command, self._config, now.wall_ms)
        except BatchAlreadyCommitted as error:
            return transaction_pb2.InitStageResponse(error=to_wire(error), last_batch_id=sink.last_batch_id)
        assert command.new_producer_id is not None, "else it would have been asked for"
        owner = Owner("", sink.sink_id, command.new_producer_id)
        self._deadlines.set(owner, now.monotonic_ms + command.request.timeout_ms)
        return transaction_pb2.InitStageResponse(
            producer_id=command.new_producer_id, producer_epoch=STAGE_EPOCH, last_batch_id=sink.last_batch_id
        )

    # Commands about much

    def _go_on(self, rest: Rest, decision: Decision) -> None:
        """Do the next piece; answer after the last one."""
        command = rest.command
        match command:
            case AbortStages():
                sink = self._sink(command.request.sink_id)
                decision.records = staging.abort_stages(sink, rest.take())
            case LastBatch():
                listing.list_stages(rest, self._sink(command.request.sink_id), self._undone.written)
            case List():
                listing.list_some(rest, self._state)
            case _:
                assert_never(command)
        if rest.is_done:
            decision.effects.append(Send(command.to, rest.answer))
        else:
            decision.rest = rest

    # Markers

    def _written(self, markers: PendingMarkers, now: Now) -> list[Send]:
        """Take note that markers are written, and answer who waited for nothing else.

        That leaves with no record, so without waiting: the next coordinator would find out the same.
        """
        if markers.transactional_id:
            owner = Owner(markers.transactional_id)
        else:
            owner = Owner("", markers.sink_id, markers.producer_id)
        pending = self._state.pending(owner)
        if owner in self._undone.written or pending is None:
            return []
        of = pending.producer_id, pending.producer_epoch, pending.commit
        if of != (markers.producer_id, markers.producer_epoch, markers.commit):
            return []
        self._undone.unsent.pop(owner, None)
        self._undone.written[owner] = now.monotonic_ms + self._config.complete_after_ms
        return self._parked.written(owner)

    # Time

    def next_deadline_ms(self) -> float | None:
        """Return when `on_time` has something to do, in monotonic ms; it may be over already. None: never."""
        if self._undone.unsent or self._expiring_ids or self._expiring_sinks:
            return AT_ONCE
        complete_ms = next(iter(self._undone.written.values()), None)
        deadlines = (self._deadlines.next_ms(), self._parked.next_ms(), complete_ms, self._expiry_ms)
        return min((deadline_ms for deadline_ms in deadlines if deadline_ms is not None), default=None)

    def on_time(self, now: Now) -> Decision:
        """Do what is due. May leave some for the next call: `next_deadline_ms` is not later than `now` then."""
        decision = Decision()
        decision.effects += self._parked.due(now.monotonic_ms)
        while len(decision.records) < MAX_RECORDS and (owner := self._deadlines.take(now.monotonic_ms)) is not None:
            self._time_out(owner, now, decision)
        self._complete(now, decision)
        for owner in list(islice(self._undone.unsent, MAX_SENT)):
            del self._undone.unsent[owner]
            pending = self._state.pending(owner)
            assert pending is not None, "what is decided has markers"
            decision.effects.append(Send(self._markers, pending))
        self._expire(now, decision)
        return decision

    def _time_out(self, owner: Owner, now: Now, decision: Decision) -> None:
        if owner not in self._state.open:
            return
        if owner.transactional_id:
            known = self._state.transactions[owner.transactional_id]
            self._write(owner, decisions.time_out(known, now.wall_ms), decision)
        else:
            decision.records += staging.abort_stages(self._state.sinks[owner.sink_id], [owner.producer_id])

    def _complete(self, now: Now, decision: Decision) -> None:
        """Record what has all its markers."""
        for owner, due_ms in list(islice(self._undone.written.items(), MAX_RECORDS)):
            if due_ms > now.monotonic_ms:
                return
            if owner.transactional_id:
                known = self._state.transactions[owner.transactional_id]
                self._write(owner, known.completed(now.wall_ms), decision)
            else:
                decision.records.append(records.stage_record(owner.sink_id, owner.producer_id, None))

    def _expire(self, now: Now, decision: Decision) -> None:
        """Forget ids that were idle for too long, and sinks."""
        if self._expiry_ms is not None and self._expiry_ms <= now.monotonic_ms:
            self._expiry_ms = now.monotonic_ms + self._config.expiration_check_interval_ms
            self._expiring_ids, self._expiring_sinks = list(self._state.transactions), list(self._state.sinks)
        for _ in range(MAX_LOOKED_AT):
            if len(decision.records) >= MAX_RECORDS:
                return
            if self._expiring_ids:
                transactional_id = self._expiring_ids.pop()
                known = self._state.transactions.get(transactional_id)
                limit_ms = now.wall_ms - self._config.id_expiration_ms
                if known is not None and known.is_idle and known.updated_ms <= limit_ms:
                    decision.records.append(records.transaction_record(transactional_id, None))
            elif self._expiring_sinks:
                sink = self._state.sinks.get(self._expiring_sinks.pop())
                if sink is None or sink.head is None or sink.stages:
                    continue
                if sink.head.is_old(now.wall_ms, self._config.sink_expiration_ms):
                    decision.records.append(records.sink_record(sink.sink_id, None))
            else:
                return

    # Topics

    def on_topics(self, topics: object, now: Now) -> Decision:
        """Nothing: that a topic is gone is told by MarkersWritten, if anybody waits for it."""
        return Decision()
