"""Batch writers with stages: a driver has parts of a batch staged and commits them, over and over.

What is driven is what `raftlog.StagedWriter` hands its calls to, in its own order: that class itself blocks a thread.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from raftlog import aio
from raftlog._client.stage_options import StageOptions
from raftlog._client.stages import Sink, StageHub, StageWork
from raftlog._core.cluster import parse_bootstrap
from raftlog._core.staging import StageToken
from raftlog._delivery import Deadline
from raftlog.errors import RaftlogError, RetriableError
from tests.simulation.cluster.client import QUICK, Application
from tests.simulation.cluster.deals import BATCH, Deal
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from tests.simulation.cluster.schedule import ClusterSimulation

CALL_S = 4.0


class _Sender(aio.Producer):
    """The producer's methods, over the engine that a stage has borrowed; as `raftlog._staged_writer` has it."""

    def __init__(self, work: StageWork) -> None:
        self._kept = work.engine
        self._lock = work.engine.lock
        self._lean = work.engine.lean
        self._closed = False
        self._tracing = None


class Driver(Application):
    """Writes batch after batch of one sink."""

    def __init__(self, simulation: ClusterSimulation, number: int, sink_id: str) -> None:
        super().__init__(simulation, number, f"driver of {sink_id}")
        self._sink = Sink(sink_id, "work")

    def _options(self) -> dict[str, Any]:
        return {
            **QUICK,
            "transaction_timeout_ms": self.simulation.transaction_timeout_ms,
            "delivery_timeout_ms": self.random.choice((3_000, 120_000)),
            "max_block_ms": 5_000,
        }

    async def work(self) -> None:
        """Write batches until it is time to end."""
        loop = asyncio.get_running_loop()
        options = StageOptions.make(None, self._options())
        hub = StageHub(parse_bootstrap(self.bootstrap), options, None, loop)
        try:
            batch_id = await hub.last_batch(self._sink, Deadline(10.0)) + 1
            turns = self.random.choice((3, 10, 10_000))
            while not self.winding_down and turns > 0:
                turns -= 1
                if await self._batch(hub, batch_id):
                    batch_id += 1
                await self.think(longest_s=1.0)
        except RaftlogError as error:
            self.count(f"ends by {type(error).__name__}")
        finally:
            if self.process.alive:
                await hub.close()

    async def _batch(self, hub: StageHub, batch_id: int) -> bool:
        """Write a batch; return whether it, or one with its number, is committed."""
        staged: list[tuple[Deal, StageToken]] = []
        for part in range(self.random.choice((1, 1, 2))):
            try:
                async with asyncio.timeout(CALL_S):
                    staged.append(await self._stage(hub, batch_id, f"attempt-{self.lives}-{len(staged)}-{part}"))
            except (RaftlogError, TimeoutError) as error:
                self.count(f"stage: {type(error).__name__}")
                return False
        if self.random.random() < 0.1:
            await self.think(longest_s=self.random.choice((0.3, 2.0)))
        deals = frozenset(deal for deal, _ in staged)
        for deal in deals:
            deal.may_commit = True
        self.simulation.deals.asked[self._sink.sink_id, batch_id].append(deals)
        try:
            done = await hub.commit(self._sink, batch_id, [token for _, token in staged], Deadline(CALL_S))
        except RaftlogError as error:
            self.count(f"commit: {type(error).__name__}")
            return False
        if not done.already_committed:
            for deal in deals:
                self.simulation.deals.told(deal, committed=True)
        last = self.simulation.ledger.sinks[self._sink.sink_id].last_batch_id
        if last < batch_id:
            raise Violation(
                f"{self} was told that batch {batch_id} is committed, but the last committed batch of the sink "
                f"is {last}"
            )
        self.count("batches committed")
        return True

    async def _stage(self, hub: StageHub, batch_id: int, attempt: str) -> tuple[Deal, StageToken]:
        writer = self.book.new_writer(f"{self} {attempt}", idempotent=True, safe=False)
        deal = self.simulation.deals.begin(self.name, writer)
        work = hub.begin(self._sink, batch_id, attempt)
        try:
            producer = _Sender(work)
            for _ in range(self.random.choice((1, 2, 5))):
                value = self.simulation.deals.value(deal, BATCH, batch_id)
                await producer.send(self.simulation.work_topic, value.encode())
            token = await work.finish()
            if token.already_committed:
                self.count("stages of what is committed")
            return deal, token
        except RaftlogError:
            await self._drop(work)
            raise

    async def _drop(self, work: StageWork) -> None:
        try:
            await work.abort(Deadline(1.0))
        except RetriableError as error:
            self.count(f"abort: {type(error).__name__}")
