"""Batch writers: drivers that stage attempts, commit winners, crash, and write batches again with other partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftlog.errors import BatchAlreadyCommitted, RaftlogError, StageExpired
from raftlog.v1 import transaction_pb2 as pb
from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.dataplane.transaction_book import Transaction, Value
from tests.simulation.dataplane.transaction_clients import GaveUp, topic_partitions
from tests.simulation.dataplane.transaction_producers import GIVE_UP_S, TransactionalWriter
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from tests.simulation.dataplane.transaction_schedule import TransactionSimulation

TARGET = "there"


class Driver(TransactionalWriter):
    """One driver of a sink, and its tasks. Another one may run at the same time."""

    def __init__(self, simulation: TransactionSimulation, number: int, name: str, sink_id: str) -> None:
        self.sink_id = sink_id
        super().__init__(simulation, number, name)

    def die(self) -> None:
        """End; another driver begins."""
        super().die()
        self.simulation.begin_driver(self)

    async def run(self) -> None:
        """Write batch after batch, from the one after the last; sometimes the last one once more, as Spark does."""
        batch_id = await self._last()
        if batch_id < 0 or self.random.random() < 0.6:
            batch_id += 1
        while not self.simulation.winding_down:
            self.replay_some()
            await self.pause(0.0, 0.3)
            try:
                if await self._batch(batch_id):
                    batch_id += 1
            except (GaveUp, BatchAlreadyCommitted):
                batch_id = await self._last() + 1
            except StageExpired:
                self.counts["stages expired"] += 1
            except RaftlogError as error:  # a record was refused: its stage is over
                self.counts[f"stage failed by {type(error).__name__}"] += 1
        self.finished = True

    async def _last(self) -> int:
        before = self.simulation.book.sinks[self.sink_id].last
        answer = await self.call(
            "LastBatch", pb.LastBatchRequest(sink_id=self.sink_id), pb.LastBatchResponse, again=False
        )
        self.simulation.book.tell_last(self.sink_id, answer.last_batch_id, before)
        return answer.last_batch_id

    async def _batch(self, batch_id: int) -> bool:
        """Write a batch; return whether it is committed, by whomever.

        Raises:
            GaveUp, RaftlogError: it is not, as far as this driver knows.
        """
        winners: list[Transaction] = []
        for task in range(self.random.choice((0, 1, 2, 2, 3))):
            attempts = [await self._stage(batch_id, f"{task}.{each}") for each in range(self.random.choice((1, 1, 2)))]
            for stage in attempts:
                await self._write(stage)
            winners.append(attempts[-1])
            if len(attempts) > 1 and self.random.random() < 0.4:
                await self._abort(attempts[0])
            await self.dawdle()
        return await self._commit(batch_id, winners)

    async def _stage(self, batch_id: int, attempt: str) -> Transaction:
        request = pb.InitStageRequest(
            sink_id=self.sink_id,
            batch_id=batch_id,
            target=TARGET,
            timeout_ms=self.simulation.timeout_ms,
            attempt=attempt,
        )
        answer = await self.call("InitStage", request, pb.InitStageResponse, give_up_s=self.now_s + GIVE_UP_S)
        name = f"{self.name} batch {batch_id} task {attempt}"
        self.counts["stages begun"] += 1
        return self.simulation.book.begin(name, answer.producer_id, answer.producer_epoch)

    async def _write(self, stage: Transaction) -> None:
        keys = self.random.sample(self.simulation.work(), self.random.choice((0, 1, 2)))
        for number, key in enumerate(keys):
            await self._add(stage, key)
            amount = (-1 if number else 1) * stage.number if len(keys) == 2 else 0
            values = [Value(stage.number, number, amount, 0)]
            await self.produce(stage, key, [values])
            await self.dawdle()

    async def _add(self, stage: Transaction, key: PartitionKey) -> None:
        request = pb.AddToStageRequest(
            sink_id=self.sink_id, producer_id=stage.numbers[0], partitions=topic_partitions([key])
        )
        await self.call("AddToStage", request, pb.AddToStageResponse, give_up_s=self.now_s + GIVE_UP_S)

    async def _abort(self, stage: Transaction) -> None:
        request = pb.AbortStagesRequest(sink_id=self.sink_id, producer_ids=[stage.numbers[0]])
        await self.call("AbortStages", request, pb.AbortStagesResponse, give_up_s=self.now_s + GIVE_UP_S)

    async def _commit(self, batch_id: int, winners: list[Transaction]) -> bool:
        named = frozenset(stage.numbers[0] for stage in winners)
        for stage in winners:
            stage.may_commit = True
        batches = self.simulation.book.sinks[self.sink_id]
        batches.asked[batch_id].append(named)
        request = pb.CommitBatchRequest(
            sink_id=self.sink_id, batch_id=batch_id, target=TARGET, producer_ids=sorted(named)
        )
        try:
            answer = await self.call("CommitBatch", request, pb.CommitBatchResponse)
        except StageExpired:
            if named and batches.told.get(batch_id) == named:
                raise Violation(
                    f"batch {batch_id} was committed with the stages {set(named)}, but the same commit, sent "
                    "again, is refused"
                ) from None
            raise
        if answer.already_committed:
            self.counts["batches committed before"] += 1
        else:
            self.counts["batches committed"] += 1
            self.simulation.book.tell_batch(self.sink_id, batch_id, named)
        # No later than what others were told meanwhile: it may have waited for markers.
        self.simulation.book.tell_last(self.sink_id, answer.last_batch_id, batch_id)
        return True
