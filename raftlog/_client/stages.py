"""What the stages of one client share, and how a batch of them is committed. Everything here runs on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from raftlog._client.connections import connections
from raftlog._client.metadata import MetadataCache
from raftlog._client.producer import ProducerEngine
from raftlog._client.stage import NeverOpen, Sink, StageWork
from raftlog._client.stage_options import StageOptions
from raftlog._client.transaction_calls import TransactionCalls
from raftlog._core.staging import NO_BATCH, CommittedBatch, StageToken, plan_commit, stages_of
from raftlog._core.topic_queues import Partitioner
from raftlog._delivery import Deadline
from raftlog.errors import (
    ClosedError,
    RetriableError,
    SinkMismatch,
    StageExpired,
)
from raftlog.v1 import transaction_pb2

_MAX_IDLE: Final = 4
"""Engines that are kept for the next stages; they hold connections."""


class StageHub:
    """What stages and commits of one client share: calls at coordinators, and engines that stages borrow in turn."""

    def __init__(
        self,
        bootstrap: list[str],
        options: StageOptions,
        partitioner: Partitioner | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.options = options
        self.closed = False
        self._bootstrap = bootstrap
        self._partitioner = partitioner
        self._loop = loop
        self._connections = connections(options.producer.pem, options.producer.sasl)
        self._metadata = MetadataCache(
            self._connections,
            bootstrap,
            max_age_ms=options.producer.metadata_max_age_ms,
            request_timeout_ms=options.producer.request_timeout_ms,
            pauses=options.producer.pauses,
        )
        self.calls = TransactionCalls(self._metadata, self._connections, options.producer)
        self._idle: list[ProducerEngine] = []
        self._lent: dict[ProducerEngine, None] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def begin(self, sink: Sink, batch_id: int, attempt: str) -> StageWork:
        """Return a new stage; the coordinator hears of it with the first record.

        Raises:
            ClosedError: closed.
        """
        self._check_open()
        engine = self._idle.pop() if self._idle else None
        if engine is None:
            engine = ProducerEngine(
                self._bootstrap, self.options.producer, self._partitioner, self._loop, gate=NeverOpen()
            )
        self._lent[engine] = None
        stage = StageWork(self, engine, sink, batch_id, attempt)
        with engine.lock:
            engine.gate = stage
        return stage

    def give_back(self, engine: ProducerEngine, *, usable: bool) -> asyncio.Task[None] | None:
        """Take an engine back; one with nothing under way serves the next stage, others are closed in a task."""
        self._lent.pop(engine, None)
        if not usable or self.closed or len(self._idle) >= _MAX_IDLE:
            closing = self._loop.create_task(engine.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            return closing
        with engine.lock:
            engine.gate = NeverOpen()
            engine.renumber(None)
        self._idle.append(engine)
        return None

    async def cluster_id(self, deadline: Deadline) -> str:
        """Return the id of the cluster.

        Raises:
            BrokerUnavailable: nobody answers, for as long as the deadline.
        """
        failures = 0
        while not self._metadata.view.cluster_id:
            try:
                await self._metadata.refresh()
            except RetriableError as error:
                failures += 1
                pause_s = self.options.producer.pauses.after_ms(error, failures) / 1000
                left_s = deadline.left()
                if left_s is not None and left_s <= pause_s:
                    raise
                await asyncio.sleep(pause_s)
        return self._metadata.view.cluster_id

    async def last_batch(self, sink: Sink, deadline: Deadline) -> int:
        """Return the last batch that the sink has committed; -1: none.

        Raises:
            SinkMismatch: the sink writes somewhere else. RaftlogError: as `TransactionCalls.call`.
        """
        self._check_open()
        response = await self.calls.last_batch(sink.sink_id, deadline)
        if response.last_batch_id != NO_BATCH and response.target != sink.target:
            raise SinkMismatch(
                f"sink {sink.sink_id!r} writes to {response.target!r}, not to {sink.target!r}; every target needs a "
                "sink id of its own"
            )
        return response.last_batch_id

    async def commit(
        self, sink: Sink, batch_id: int, tokens: Iterable[StageToken], deadline: Deadline
    ) -> CommittedBatch:
        """Commit a batch by the tokens of its stages.

        Raises:
            StageExpired: a stage is gone; nothing was committed. SinkMismatch: the sink writes somewhere else.
            RequestTimedOut: the outcome is not known. TypeError, InvalidRequestError: tokens that do not fit.
        """
        self._check_open()
        plan = plan_commit(sink.sink_id, batch_id, tokens)
        if plan.repeated:
            last = await self.last_batch(sink, deadline)
            if last < batch_id:
                raise StageExpired(
                    f"a stage found batch {batch_id} of sink {sink.sink_id!r} committed, but the sink's last batch is "
                    f"{last}: it has lost what it knew. Nothing was committed, since parts would be missing; write "
                    "the batch again"
                )
            if plan.producer_ids:
                await self.calls.abort_stages(sink.sink_id, plan.producer_ids, deadline)
            return CommittedBatch(batch_id, already_committed=True, records=0)
        response = await self.calls.commit_batch(
            sink.sink_id,
            batch_id,
            plan.producer_ids,
            deadline,
            target=sink.target,
            expire_after_ms=sink.expire_after_ms,
        )
        already = response.already_committed
        return CommittedBatch(batch_id, already_committed=already, records=0 if already else plan.records)

    async def abort(self, sink: Sink, tokens: Iterable[StageToken], deadline: Deadline) -> None:
        """Abort the stages of tokens.

        Raises:
            RaftlogError: as `TransactionCalls.call`. TypeError, InvalidRequestError: tokens that do not fit.
        """
        self._check_open()
        producer_ids = stages_of(sink.sink_id, tokens)
        if producer_ids:
            await self.calls.abort_stages(sink.sink_id, producer_ids, deadline)

    async def abort_open(self, sink: Sink, batch_id: int, attempt: str, deadline: Deadline, *, fence: bool) -> int:
        """Abort the open stages of a batch whose attempt begins with these words; return how many there were.

        `fence`: and have none of these attempts begin a stage any more. Stages are named nevertheless, for servers of
        an older version.

        Raises:
            RaftlogError: as `TransactionCalls.call`.
        """
        self._check_open()
        response = await self.calls.last_batch(sink.sink_id, deadline)
        found = [
            stage.producer_id
            for stage in response.stages
            if stage.state == transaction_pb2.TRANSACTION_ONGOING
            and stage.batch_id == batch_id
            and stage.attempt.startswith(attempt)
        ]
        if fence and response.last_batch_id < batch_id:
            await self.calls.abort_stages(sink.sink_id, found, deadline, fenced_attempts=attempt, batch_id=batch_id)
        elif found:
            await self.calls.abort_stages(sink.sink_id, found, deadline)
        return len(found)

    async def close(self) -> None:
        """Give every connection back. What stages have not finished is left to the stages' timeouts."""
        self.closed = True
        engines = [*self._idle, *self._lent]
        self._idle.clear()
        self._lent.clear()
        await asyncio.gather(*(engine.close() for engine in engines), *self._closing, return_exceptions=True)
        await self.calls.close()
        await self._metadata.close()
        await self._connections.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("this staged writer is closed; make another one")
