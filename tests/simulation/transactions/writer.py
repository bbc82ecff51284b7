"""A batch writer with a sink: tasks stage attempts, a driver commits winners, crashes, and replays its last batch."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from broker.coordinator.transactions.commands import AbortStages, AddToStage, CommitBatch, InitStage, LastBatch
from broker.coordinator.transactions.records import partition_messages
from raftlog.errors import BatchAlreadyCommitted, NotCoordinator, RaftlogError, StageExpired, from_wire
from raftlog.v1 import transaction_pb2
from tests.simulation.transactions.partitions import Broken, Transaction
from tests.simulation.transactions.process import Operation, Steps
from tests.support.transaction_driver import parts

if TYPE_CHECKING:
    from tests.simulation.transactions.world import World

RETRY_MS = 50.0
TIMEOUT_MS = 4_000


class Batches:
    """What becomes of the batches of one sink: each is committed by one set of stages at most."""

    def __init__(self) -> None:
        self.asked: dict[int, list[frozenset[int]]] = {}
        self.told: dict[int, frozenset[int]] = {}
        self.stages: dict[int, dict[int, Transaction]] = {}

    def tell(self, batch_id: int, winners: frozenset[int]) -> None:
        """A driver was told that its commit was the one."""
        if self.told.setdefault(batch_id, winners) != winners:
            raise Broken(
                f"the commit of batch {batch_id} succeeded with two sets of stages, {self.told[batch_id]} and {winners}"
            )

    def check(self, decided: dict[tuple[int, int], bool]) -> None:
        """Each batch belongs as a whole to one commit, or to none."""
        for batch_id, stages in self.stages.items():
            committed = frozenset(
                producer_id
                for producer_id, stage in stages.items()
                if decided.get((producer_id, stage.producer_epoch)) is True
            )
            told = self.told.get(batch_id)
            if committed not in (self.asked.get(batch_id, []) if told is None else [told]) and (committed or told):
                raise Broken(
                    f"the stages {set(committed)} of batch {batch_id} are committed, but the driver was told {told}"
                )


class Writer:
    """One driver and its tasks, in one process. Another driver may run at the same time."""

    def __init__(self, world: World, sink_id: str, life: int) -> None:
        self._world = world
        self._random = world.random
        self._sink_id = sink_id
        self._name = f"{sink_id}/{life}"
        self._batches = world.batches.setdefault(sink_id, Batches())
        self._stages: dict[int, Transaction] = {}

    def steps(self) -> Steps:
        """Write batch after batch, from the one after the last; sometimes from the last one, as Spark does."""
        batch_id = yield from self._last()
        if batch_id < 0 or self._random.random() < 0.5:
            batch_id += 1
        committed = 0
        while not (self._world.healing and committed):
            if (yield from self._batch(batch_id)):
                batch_id += 1
                committed += 1

    def _ask(self, make: Any, heard: Any = None) -> Generator[Operation, Any, Any]:
        while True:
            answer = yield self._world.ask(make, heard)
            if answer is not None and not isinstance(answer, NotCoordinator):
                return answer
            yield self._world.sleep(RETRY_MS)

    def _last(self) -> Generator[Operation, Any, int]:
        def heard(message: Any) -> None:
            self._world.told_last(self._sink_id, message.last_batch_id)

        request = transaction_pb2.LastBatchRequest(sink_id=self._sink_id)
        answer = yield from self._ask(lambda to: LastBatch(to, request), heard)
        assert isinstance(answer, transaction_pb2.LastBatchResponse)
        return answer.last_batch_id

    # A batch

    def _batch(self, batch_id: int) -> Generator[Operation, Any, bool]:
        """Write a batch; return whether it is committed now, by whomever."""
        winners = []
        for task in range(self._random.randint(0, 3)):
            stages = []
            for attempt in range(self._random.choice([1, 1, 1, 2])):  # failed, or speculative
                stage = yield from self._stage(batch_id, f"{task}.{attempt}")
                if stage is None:
                    return True  # skipped
                stages.append(stage)
            if None in (yield from self._write_all(stages)):
                return False
            winners.append(stages[-1].producer_id)
            if len(stages) > 1 and self._random.random() < 0.5:
                request = transaction_pb2.AbortStagesRequest(
                    sink_id=self._sink_id, producer_ids=[stages[0].producer_id]
                )
                yield from self._ask(lambda to, request=request: AbortStages(to, request))
        return (yield from self._commit(batch_id, frozenset(winners)))

    def _stage(self, batch_id: int, attempt: str) -> Generator[Operation, Any, Transaction | None]:
        request = transaction_pb2.InitStageRequest(
            sink_id=self._sink_id, batch_id=batch_id, target="t", timeout_ms=TIMEOUT_MS, attempt=attempt
        )
        answer = yield from self._ask(lambda to: InitStage(to, request))
        assert isinstance(answer, transaction_pb2.InitStageResponse), answer
        if answer.HasField("error"):
            assert isinstance(from_wire(answer.error), BatchAlreadyCommitted)
            return None
        name = f"{self._name} batch {batch_id} task {attempt}"
        stage = self._world.checker.begin(name, answer.producer_id, answer.producer_epoch)
        self._stages[answer.producer_id] = stage
        self._batches.stages.setdefault(batch_id, {})[answer.producer_id] = stage
        return stage

    def _write_all(self, stages: list[Transaction]) -> Generator[Operation, Any, list[Transaction | None]]:
        written: list[Transaction | None] = []
        for stage in stages:
            alive = yield from self._write(stage)
            written.append(stage if alive else None)
        return written

    def _write(self, stage: Transaction) -> Generator[Operation, Any, bool]:
        for number in self._random.sample(range(4), self._random.randint(0, 2)):
            request = transaction_pb2.AddToStageRequest(
                sink_id=self._sink_id, producer_id=stage.producer_id, partitions=partition_messages(parts(number))
            )
            answer = yield from self._ask(lambda to, request=request: AddToStage(to, request))
            if isinstance(answer, StageExpired):
                return False
            assert isinstance(answer, transaction_pb2.AddToStageResponse), answer
            name = f"t{number}"
            stage.sent[name] = 0
            for sequence in range(self._random.randint(1, 3)):
                while True:
                    sent = yield self._world.produce(stage, name, sequence)
                    if sent is True:
                        stage.sent[name] = sequence + 1
                        break
                    if isinstance(sent, RaftlogError):
                        return False
                    yield self._world.sleep(RETRY_MS)
        return True

    def _commit(self, batch_id: int, winners: frozenset[int]) -> Generator[Operation, Any, bool]:
        self._batches.asked.setdefault(batch_id, []).append(winners)
        for producer_id in winners:
            self._stages[producer_id].may_commit = True
        request = transaction_pb2.CommitBatchRequest(
            sink_id=self._sink_id, batch_id=batch_id, target="t", producer_ids=sorted(winners)
        )

        def heard(message: Any) -> None:
            if not isinstance(message, transaction_pb2.CommitBatchResponse):
                return
            # It may have waited for markers while the next batch was committed.
            self._world.told_last(self._sink_id, message.last_batch_id, at_least=True)
            if not message.already_committed:
                self._batches.tell(batch_id, winners)
                for producer_id in winners:
                    self._stages[producer_id].tell(True)
                    self._world.checker.check_told(self._stages[producer_id], with_markers=False)

        answer = yield from self._ask(lambda to: CommitBatch(to, request), heard)
        if isinstance(answer, StageExpired):
            if winners and winners == self._batches.told.get(batch_id):
                raise Broken(
                    f"batch {batch_id} was committed with the stages {winners}, but the same commit, sent "
                    "again, is refused"
                )
            return False  # the batch is written again
        assert isinstance(answer, transaction_pb2.CommitBatchResponse), answer
        return True
