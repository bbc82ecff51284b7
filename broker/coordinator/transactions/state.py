"""The replayed state of one shard: transactional ids, sinks, open transactions, and decisions that are owed markers.

The states of a decision:

    decided (replayed) -> unsent -> sent -> written -> completed (replayed)

`unsent` follows from the records, so after a load it holds what the former coordinator left undone. `written` is known
to this coordinator only; the next one sends the markers again, which changes nothing. The record of `completed` waits
briefly to share an append, and is not written if the next transaction's own record comes first and implies it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.message import Message

from broker.coordinator.core import Send
from broker.coordinator.transactions import records
from broker.coordinator.transactions.commands import PendingMarkers
from broker.coordinator.transactions.transaction import Sink, SinkHead, Stage, State, Transaction
from broker.coordinator.user_bound import Amounts, Made


def named_by(transaction: Transaction | None) -> int:
    """Return how many partitions and groups a transaction names: none, unless it is open or prepared."""
    return 0 if transaction is None else len(transaction.partitions) + len(transaction.group_ids)


def _user_of(known: Transaction | SinkHead | None) -> str:
    return "" if known is None else known.user


class Owner(NamedTuple):
    """The owner of a transaction: a transactional id, or a stage of a sink."""

    transactional_id: str
    sink_id: str = ""
    producer_id: int = -1


class Undone:
    """Owners with a decision that is not completed; in order."""

    def __init__(self) -> None:
        self.unsent: dict[Owner, None] = {}
        self.written: dict[Owner, float] = {}
        """With when it is to be recorded, in monotonic ms; ascending."""

    def decided(self, owner: Owner) -> None:
        """A decision was replayed."""
        self.unsent[owner] = None

    def completed(self, owner: Owner) -> None:
        """Nothing is decided and not told, by the records."""
        self.unsent.pop(owner, None)
        self.written.pop(owner, None)


@dataclass(slots=True)
class _Parked:
    to: object
    answer: Message
    due_ms: float
    missing: set[Owner] = field(default_factory=set)
    answered: bool = False

    def release(self) -> Send:
        self.answered = True
        return Send(self.to, self.answer)


class ParkedAnswers:
    """Answers that wait until all markers are written, or for a while: all for the same, so they are due in order."""

    def __init__(self) -> None:
        self._queue: deque[_Parked] = deque()
        self._waiting: dict[Owner, list[_Parked]] = {}

    def park(self, to: object, answer: Message, missing: Iterable[Owner], due_ms: float) -> None:
        """Answer once the markers of all `missing` are written; at least one is."""
        parked = _Parked(to, answer, due_ms, set(missing))
        assert parked.missing, "there is nothing to wait for"
        assert not self._queue or self._queue[-1].due_ms <= due_ms
        self._queue.append(parked)
        for owner in parked.missing:
            self._waiting.setdefault(owner, []).append(parked)

    def written(self, owner: Owner) -> list[Send]:
        """Return the answers that waited for nothing else any more."""
        sends = []
        for parked in self._waiting.pop(owner, ()):
            parked.missing.discard(owner)
            if not parked.missing and not parked.answered:
                sends.append(parked.release())
        return sends

    def next_ms(self) -> float | None:
        """Return when `due` has to be called next; there may be nothing then."""
        return self._queue[0].due_ms if self._queue else None

    def due(self, now_ms: float) -> list[Send]:
        """Return the answers that have waited for long enough."""
        sends = []
        while self._queue and self._queue[0].due_ms <= now_ms:
            parked = self._queue.popleft()
            if not parked.answered:
                sends.append(parked.release())
                self._forget(parked)
        return sends

    def _forget(self, parked: _Parked) -> None:
        for owner in parked.missing:
            others = [other for other in self._waiting[owner] if other is not parked]
            if others:
                self._waiting[owner] = others
            else:
                del self._waiting[owner]


class HardState:
    """Changed by `replay` alone.

    Invariants: an owner is in `open`, or owed markers, or neither; never both. `made` counts the transactional ids and
    the sinks by their users, `owed` what their transactions and stages name.
    """

    def __init__(self) -> None:
        self.transactions: dict[str, Transaction] = {}
        self.sinks: dict[str, Sink] = {}
        self.open: dict[Owner, None] = {}
        """Transactions that are ONGOING, and stages nothing is decided about."""
        self.undone = Undone()
        self.made = Made()
        self.owed = Amounts()

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Apply a record.

        Raises:
            CorruptRecordError: it is none that this version reads; says why.
        """
        parsed = records.parse_key(key)
        match parsed.WhichOneof("kind"):
            case "transactional_id":
                transactional_id = parsed.transactional_id
                transaction = None if value is None else records.parse_transaction(transactional_id, value)
                self._replay_transaction(transactional_id, transaction)
            case "sink_id":
                head = None if value is None else records.parse_sink(parsed.sink_id, value)
                sink = self.sinks.setdefault(parsed.sink_id, Sink(parsed.sink_id))
                before, after = _user_of(sink.head), _user_of(head)
                self.made.changed(before, after)
                if before != after:
                    named = sum(len(stage.partitions) for stage in sink.stages.values())
                    self.owed.changed(before, -named)
                    self.owed.changed(after, named)
                sink.head = head
                for producer_id, stage in sink.stages.items():
                    self._note_stage(sink, producer_id, stage)
                self._drop_if_gone(sink)
            case _:
                changed = None if value is None else records.parse_stage(parsed.stage, value)
                sink = self.sinks.setdefault(parsed.stage.sink_id, Sink(parsed.stage.sink_id))
                self._replay_stage(sink, parsed.stage.producer_id, changed)
                self._drop_if_gone(sink)

    def _replay_transaction(self, transactional_id: str, transaction: Transaction | None) -> None:
        owner = Owner(transactional_id)
        self.open.pop(owner, None)
        self.undone.completed(owner)
        before = self.transactions.get(transactional_id)
        self.made.changed(_user_of(before), _user_of(transaction))
        self.owed.changed(_user_of(before), -named_by(before))
        self.owed.changed(_user_of(transaction), named_by(transaction))
        if transaction is None:
            self.transactions.pop(transactional_id, None)
            return
        self.transactions[transactional_id] = transaction
        if transaction.state is State.ONGOING:
            self.open[owner] = None
        elif transaction.is_prepared:
            self.undone.decided(owner)

    def _replay_stage(self, sink: Sink, producer_id: int, stage: Stage | None) -> None:
        owner = Owner("", sink.sink_id, producer_id)
        before = sink.stages.get(producer_id)
        named = 0 if stage is None else len(stage.partitions)
        self.owed.changed(_user_of(sink.head), named - (0 if before is None else len(before.partitions)))
        if stage is None:
            sink.stages.pop(producer_id, None)
            self.open.pop(owner, None)
            self.undone.completed(owner)
            return
        is_new = producer_id not in sink.stages
        sink.stages[producer_id] = stage
        if is_new:
            self.open[owner] = None
        self._note_stage(sink, producer_id, stage)

    def _note_stage(self, sink: Sink, producer_id: int, stage: Stage) -> None:
        """A stage that was open may be decided now."""
        owner = Owner("", sink.sink_id, producer_id)
        if owner in self.open and sink.state_of(producer_id, stage) is not State.ONGOING:
            del self.open[owner]
            self.undone.decided(owner)

    def _drop_if_gone(self, sink: Sink) -> None:
        if sink.is_gone:
            del self.sinks[sink.sink_id]

    # Looked at

    def stage_of(self, owner: Owner) -> tuple[Stage, State] | None:
        """Return a stage and its state."""
        sink = self.sinks.get(owner.sink_id)
        stage = sink.stages.get(owner.producer_id) if sink is not None else None
        if sink is None or stage is None:
            return None
        return stage, sink.state_of(owner.producer_id, stage)

    def named_by_owner(self, owner: Owner) -> int:
        """Return how many partitions and groups an owner's transaction or stage names; 0: it is over."""
        if owner.transactional_id:
            return named_by(self.transactions.get(owner.transactional_id))
        found = self.stage_of(owner)
        return 0 if found is None else len(found[0].partitions)

    def times_of(self, owner: Owner) -> tuple[int, int]:
        """Return when what is open was begun, and for how long it may stay so."""
        assert owner in self.open
        if owner.transactional_id:
            transaction = self.transactions[owner.transactional_id]
            return transaction.started_ms, transaction.timeout_ms
        stage = self.sinks[owner.sink_id].stages[owner.producer_id]
        return stage.started_ms, stage.timeout_ms

    def pending(self, owner: Owner) -> PendingMarkers | None:
        """Return the markers of what is decided; None: nothing is, or it is over."""
        if owner.transactional_id:
            transaction = self.transactions.get(owner.transactional_id)
            if transaction is None or not transaction.is_prepared:
                return None
            return PendingMarkers(
                transactional_id=owner.transactional_id,
                sink_id="",
                producer_id=transaction.producer_id,
                producer_epoch=transaction.producer_epoch,
                commit=transaction.commits,
                partitions=transaction.partitions,
                group_ids=transaction.group_ids,
                user=transaction.user,
            )
        found = self.stage_of(owner)
        if found is None or found[1] is State.ONGOING:
            return None
        stage, state = found
        return PendingMarkers(
            transactional_id="",
            sink_id=owner.sink_id,
            producer_id=owner.producer_id,
            producer_epoch=stage.producer_epoch + 1,
            commit=state is State.PREPARE_COMMIT,
            partitions=stage.partitions,
            user=self.sinks[owner.sink_id].user,
        )
