"""Transactions of producers and stages of sinks: their states and transitions.

A transactional id:

    (unknown)            -> EMPTY            InitProducerId with a fresh producer id, epoch 0
    EMPTY, COMPLETE_*    -> EMPTY            InitProducerId: the next epoch, or a fresh producer id when none is left
    EMPTY, COMPLETE_*    -> ONGOING          AddToTransaction: begins
    EMPTY, COMPLETE_*    -> COMPLETE_*       EndTransaction with nothing begun: the next epoch, no markers
    ONGOING              -> ONGOING          AddToTransaction: more partitions, more groups
    ONGOING              -> PREPARE_COMMIT   EndTransaction
    ONGOING              -> PREPARE_ABORT    EndTransaction, timeout, InitProducerId, AbortTransaction: the next epoch
    PREPARE_COMMIT       -> COMPLETE_COMMIT  all markers are written
    PREPARE_ABORT        -> COMPLETE_ABORT   all markers are written
    PREPARE_*            -> ONGOING          as from COMPLETE_*, if the markers are written but not recorded as such yet
    PREPARE_*            -> EMPTY            likewise
    EMPTY, COMPLETE_*    -> (unknown)        idle for transactional.id.expiration.ms

Each transaction has its own epoch (KIP-890): e while ONGOING, and e + 1 from the decision on, which is the epoch of its
markers and of the next transaction. The epoch rises even if nothing was begun, so a late or repeated EndTransaction
never ends a transaction that began after it was sent. A prepared transaction only moves forward.

`client_epoch` is the ended epoch e, while its owner may repeat its request. With `timed_out` the coordinator has ended
the transaction by itself; its owner may abort it again, or continue with InitProducerId (KIP-360). It is NONE once
another producer has taken over, or the next transaction has begun; then older epochs are fenced. An aborted transaction
with NONE and without `timed_out` was aborted by an operator's tool.

`session_epoch` is the epoch that InitProducerId returned last. A client that keeps one epoch for all its transactions
(Kafka's before transaction.version 2) is the owner as long as it names that one; `own_epoch` says which epoch it means.
It is NONE once another producer takes over, or a tool has aborted the transaction.

A sink and its stages (docs/adr/0016): a stage is a producer id used for one transaction of epoch 0; its markers carry
epoch 1. Its state follows from its own record and its sink's, so one record of the sink decides all stages of a batch:

    open         batch above the sink's last, not aborting
    committing   named in the sink's `committing`
    aborting     its own record says so, or its batch is not above the last and it is not named

    (unknown)   -> open         InitStage, with a fresh producer id
    open        -> open         AddToStage
    open        -> committing   CommitBatch of its batch that names it
    open        -> aborting     CommitBatch of its batch or a later one that does not; AbortStages; the timeout
    (unknown)   -> (unknown)    InitStage of an attempt that AbortStages has fenced
    committing  -> (gone)       all markers are written
    aborting    -> (gone)       all markers are written

A sink's last batch only rises. A named stage stays in `committing` after it is gone, until the sink's next record, so
that a retry of the same commit is recognized.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, NamedTuple

from broker.coordinator.groups.topics import TopicPartition
from raftlog.v1 import transaction_pb2

MAX_EPOCH: Final = 32_766
"""The last epoch of a transaction; its markers carry one more, an int16's last."""
NONE: Final = -1


class State(Enum):
    """As on the wire."""

    EMPTY = transaction_pb2.TRANSACTION_EMPTY
    ONGOING = transaction_pb2.TRANSACTION_ONGOING
    PREPARE_COMMIT = transaction_pb2.PREPARE_COMMIT
    PREPARE_ABORT = transaction_pb2.PREPARE_ABORT
    COMPLETE_COMMIT = transaction_pb2.COMPLETE_COMMIT
    COMPLETE_ABORT = transaction_pb2.COMPLETE_ABORT


PREPARED: Final = frozenset({State.PREPARE_COMMIT, State.PREPARE_ABORT})
IDLE: Final = frozenset({State.EMPTY, State.COMPLETE_COMMIT, State.COMPLETE_ABORT})
COMMITS: Final = frozenset({State.PREPARE_COMMIT, State.COMPLETE_COMMIT})


class Former(NamedTuple):
    """What a producer has had before its epochs were used up."""

    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class Transaction:
    """What is known of one transactional id; see the module. `started_ms`: 0 where none is open or prepared."""

    producer_id: int
    producer_epoch: int
    state: State
    timeout_ms: int
    updated_ms: int
    started_ms: int = 0
    partitions: frozenset[TopicPartition] = frozenset()
    group_ids: frozenset[str] = frozenset()
    client_epoch: int = NONE
    timed_out: bool = False
    former: Former | None = None
    """While the producer id is fresh, and its owner may ask for it again: the answer may have been lost."""
    session_epoch: int = NONE
    user: str = ""
    """The user that made the id; "": it counts for none."""

    @property
    def is_prepared(self) -> bool:
        """Whether it is decided, and markers may be missing."""
        return self.state in PREPARED

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open and nothing prepared."""
        return self.state in IDLE

    @property
    def aborted_by_tool(self) -> bool:
        """Whether an operator has aborted the last transaction, and no other has begun since."""
        is_aborted = self.state in (State.PREPARE_ABORT, State.COMPLETE_ABORT)
        return is_aborted and self.client_epoch == NONE and not self.timed_out

    def own_epoch(self, session_epoch: int) -> int:
        """Return which epoch a client means that keeps `session_epoch`; another's epoch is returned as it is.

        It is that of the transaction which is open, or the next to begin; or that which the coordinator has ended,
        until the client has heard of it.
        """
        if session_epoch != self.session_epoch or session_epoch == self.producer_epoch:
            return session_epoch
        return self.client_epoch if self.timed_out and self.client_epoch != NONE else self.producer_epoch

    @property
    def commits(self) -> bool:
        """Whether the last decision was to commit."""
        return self.state in COMMITS

    def added(self, partitions: frozenset[TopicPartition], group_ids: frozenset[str], now_ms: int) -> Transaction:
        """Begin it if it has not begun, and add to it."""
        assert not self.is_prepared
        assert self.producer_epoch <= MAX_EPOCH
        begins = self.state is not State.ONGOING
        return replace(
            self,
            state=State.ONGOING,
            started_ms=now_ms if begins else self.started_ms,
            updated_ms=now_ms,
            partitions=self.partitions | partitions,
            group_ids=self.group_ids | group_ids,
            client_epoch=NONE,
            timed_out=False,
            former=None,
        )

    def decided(
        self, commit: bool, now_ms: int, *, owner_may_ask: bool = True, by_coordinator: bool = False
    ) -> Transaction:
        """Decide it, once and for all. `owner_may_ask`: its producer goes on; else it is fenced."""
        assert self.state is State.ONGOING
        assert not (commit and by_coordinator), "what the coordinator ends by itself it aborts"
        return replace(
            self,
            state=State.PREPARE_COMMIT if commit else State.PREPARE_ABORT,
            producer_epoch=self.producer_epoch + 1,
            updated_ms=now_ms,
            client_epoch=self.producer_epoch if owner_may_ask else NONE,
            timed_out=by_coordinator,
            session_epoch=self.session_epoch if owner_may_ask else NONE,
        )

    def completed(self, now_ms: int) -> Transaction:
        """All markers are written."""
        assert self.is_prepared
        return replace(
            self,
            state=State.COMPLETE_COMMIT if self.commits else State.COMPLETE_ABORT,
            updated_ms=now_ms,
            started_ms=0,
            partitions=frozenset(),
            group_ids=frozenset(),
        )

    def ended_empty(self, commit: bool, now_ms: int) -> Transaction:
        """End what was never begun: the epoch is used all the same."""
        assert self.is_idle
        assert self.producer_epoch <= MAX_EPOCH
        return replace(
            self,
            state=State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT,
            producer_epoch=self.producer_epoch + 1,
            updated_ms=now_ms,
            client_epoch=self.producer_epoch,
            timed_out=False,
            former=None,
        )


STAGE_EPOCH: Final = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """One attempt to write a part of a batch. `timeout_ms` after `started_ms` it is aborted, unless it is decided."""

    batch_id: int
    started_ms: int
    timeout_ms: int
    attempt: str = ""
    partitions: frozenset[TopicPartition] = frozenset()
    aborting: bool = False
    producer_epoch: int = STAGE_EPOCH


@dataclass(frozen=True, slots=True)
class Fence:
    """Attempts at a batch that were given up, by how their names begin: they begin no stage any more."""

    batch_id: int
    attempts: str

    def stops(self, batch_id: int, attempt: str) -> bool:
        """Whether it is one of these."""
        return batch_id == self.batch_id and attempt.startswith(self.attempts)


MAX_FENCES: Final = 16
"""Fences of a sink; the newest are kept. Each belongs to a driver that gave up a batch not committed since."""
FENCE_MS: Final = 60 * 60 * 1000
"""How long a sink that has only fences is kept: longer than an abandoned task runs on."""


@dataclass(frozen=True, slots=True)
class SinkHead:
    """The sink's own record. `last_batch_id` -1: nothing is committed yet."""

    last_batch_id: int
    target: str
    updated_ms: int
    committing: frozenset[int] = frozenset()
    expire_after_ms: int = 0
    """0: as long as all sinks."""
    fences: tuple[Fence, ...] = ()
    """Of batches above the last, the newest last."""
    user: str = ""
    """The user that made the sink; "": it counts for none."""

    def is_old(self, now_ms: int, expiration_ms: int) -> bool:
        """Whether it may be forgotten, given that it has no stages; at once if it has neither committed nor fenced."""
        if self.last_batch_id == NONE and not self.fences:
            return True
        keep_ms = min(expiration_ms, self.expire_after_ms or expiration_ms)
        return self.updated_ms <= now_ms - (FENCE_MS if self.last_batch_id == NONE else keep_ms)

    def fenced(self, fence: Fence) -> SinkHead:
        """Return it with one fence more."""
        others = [each for each in self.fences if each != fence]
        return replace(self, fences=(*others, fence)[-MAX_FENCES:])


@dataclass(slots=True)
class Sink:
    """A sink by its records; `stages` by producer id. `asked_by`: the user that makes it, while it is unknown."""

    sink_id: str
    head: SinkHead | None = None
    stages: dict[int, Stage] = field(default_factory=dict)
    asked_by: str = ""

    @property
    def user(self) -> str:
        """The user that made it, or makes it."""
        return self.asked_by if self.head is None else self.head.user

    @property
    def last_batch_id(self) -> int:
        """The last batch that is committed; -1: none."""
        return NONE if self.head is None else self.head.last_batch_id

    @property
    def target(self) -> str | None:
        """Where it writes, once that is fixed: by a committed batch, or for as long as a stage stands."""
        if self.head is None or (self.head.last_batch_id == NONE and not self.stages):
            return None
        return self.head.target

    def state_of(self, producer_id: int, stage: Stage) -> State:
        """Return ONGOING, PREPARE_COMMIT or PREPARE_ABORT."""
        if self.head is not None and producer_id in self.head.committing:
            return State.PREPARE_COMMIT
        if stage.aborting or stage.batch_id <= self.last_batch_id:
            return State.PREPARE_ABORT
        return State.ONGOING

    def open_stage(self, producer_id: int) -> Stage | None:
        """Return a stage that nothing was decided about."""
        stage = self.stages.get(producer_id)
        return stage if stage is not None and self.state_of(producer_id, stage) is State.ONGOING else None

    @property
    def is_gone(self) -> bool:
        """Whether no record of it is left."""
        return self.head is None and not self.stages
