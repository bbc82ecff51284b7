"""A sink and its stages: what the coordinator knows of them, and how that may change (docs/adr/0016).

A stage is a producer id used for one transaction, of epoch 0; its markers carry epoch 1. Its state follows from its own
record and its sink's, so that the one record of a sink decides on all stages of a batch at once:

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

A sink's last batch only ever rises. Who was named stays in `committing` after it is gone, until the next record of the
sink: so a retry of the same commit is recognized.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from broker.groups.topics import TopicPartition
from broker.transactions.transaction import NONE, State

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
"""Of a sink; the newest are kept. One stands for a driver that gave up a batch which nobody has committed since."""
FENCE_MS: Final = 60 * 60 * 1000
"""How long a sink is remembered that has fences and nothing else: for longer than a task lives on that was given up."""


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
    """A sink by its records; `stages` by producer id."""

    sink_id: str
    head: SinkHead | None = None
    stages: dict[int, Stage] = field(default_factory=dict)

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
