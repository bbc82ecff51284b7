"""Staged batches: a stage is a producer whose records stay invisible until a batch that names the stage is committed.

`StageWork` is one stage, `StageHub` the state that the stages of one client share. All of it runs on the event loop. A
stage borrows a producer's engine and is its gate: its first partitions begin it at the sink's coordinator, and later
partitions are added to it.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from raftlog._client.connections import connections
from raftlog._client.metadata import MetadataCache
from raftlog._client.producer import (
    GivenProducerId,
    Openings,
    Outdated,
    Places,
    ProducerEngine,
    ProducerId,
    TransactionCalls,
    TransactionOwner,
)
from raftlog._client.stage_options import STAGE_TIMEOUT, StageOptions
from raftlog._core.accumulator import Partitioner
from raftlog._core.staging import NO_BATCH, CommittedBatch, StageToken, plan_commit, stages_of
from raftlog._delivery import Deadline, raised
from raftlog.errors import (
    BatchAlreadyCommitted,
    ClosedError,
    InvalidRequestError,
    RaftlogError,
    RetriableError,
    SinkMismatch,
    StageExpired,
)
from raftlog.types import TopicPartition
from raftlog.v1 import transaction_pb2


@dataclass(frozen=True, slots=True)
class Sink:
    """A sink of staged batches and the target that it writes to."""

    sink_id: str
    target: str
    expire_after_ms: int = 0
    """How long the coordinator remembers the sink after a batch; 0: sink.expiration.ms."""


class _State(enum.Enum):
    STAGING = "takes records"
    FINISHING = "is being finished"
    FINISHED = "is finished"
    ABORTED = "was aborted"


class Lender(Protocol):
    """The owner of the engine that a stage has borrowed."""

    options: StageOptions
    calls: TransactionCalls

    def give_back(self, engine: ProducerEngine, *, usable: bool) -> asyncio.Task[None] | None:
        """Take the engine back; if it is not usable, close it in the returned task."""


class StageWork:
    """One stage, from its first record to its token; the `PartitionGate` of its borrowed engine.

    Transitions:
        staging              -> finishing  `finish`: it takes no more records
        finishing            -> finished   every record is acknowledged; the engine is given back
        staging or finishing -> aborted    `abort`, even with requests in flight; the engine is closed

    Invariants: the engine sends nothing to a partition before the coordinator has added it; once `error` is set, the
    stage gives no token, except for a batch that was already committed.
    """

    def __init__(self, hub: Lender, engine: ProducerEngine, sink: Sink, batch_id: int, attempt: str) -> None:
        self.sink = sink
        self.batch_id = batch_id
        self.engine = engine
        self.error: RaftlogError | None = None
        """Why the stage can only be aborted."""
        self.producer: ProducerId | None = None
        """None: the stage has no records, and the coordinator does not know it yet."""
        self._attempt = attempt
        self._hub = hub
        self._state = _State.STAGING
        self._partitions = Openings(engine, self._tell, self._fail)
        self._token: StageToken | None = None

    @property
    def is_over(self) -> bool:
        """Whether the stage is finished or aborted."""
        return self._state in (_State.FINISHED, _State.ABORTED)

    # The engine's gate

    @property
    def last_error(self) -> RaftlogError | None:
        """Why the gate stays closed, if known."""
        return self.error or self._hub.calls.last_error

    @property
    def owner(self) -> TransactionOwner:
        """As `PartitionGate.owner`."""
        return TransactionOwner(sink_id=self.sink.sink_id)

    def may_send(self, topic_partition: TopicPartition, topic_id: bytes) -> bool:
        """As `PartitionGate.may_send`."""
        place = (topic_id, topic_partition.partition)
        if place in self._partitions:
            return True
        if self.error is None and not self.is_over:
            self._partitions.want(place, topic_partition)
        return False

    def check_may_send(self) -> None:
        """Refuse a record that the stage cannot take; under the engine's lock.

        Raises:
            RaftlogError: why the stage has failed. InvalidRequestError: it is over.
        """
        if self.error is not None:
            raise raised(self.error)
        if self._state is not _State.STAGING:
            raise InvalidRequestError(f"this stage of batch {self.batch_id} {self._state.value}; begin another one")

    def on_failure(self, topic_partition: TopicPartition, error: RaftlogError) -> None:
        """As `PartitionGate.on_failure`: without the record the stage is never committed."""
        self._fail_soon(error)

    def on_over(self, topic_partition: TopicPartition, error: RaftlogError) -> RaftlogError:
        """As `PartitionGate.on_over`: the stage has ended."""
        ended = StageExpired(
            f"this stage of batch {self.batch_id} was ended while it was written: another attempt has committed the "
            f"batch, or no commit came within {STAGE_TIMEOUT}={self._hub.options.timeout_ms}; {error}"
        )
        self._fail_soon(ended)
        return self.error or ended

    def on_not_sent(self, error: Exception) -> None:
        """As `PartitionGate.on_not_sent`: without the record the stage is never committed."""
        if self._state is _State.STAGING:
            self._fail_soon(error if isinstance(error, RaftlogError) else InvalidRequestError(str(error)))

    def _fail_soon(self, error: RaftlogError) -> None:
        """Fail the stage, and soon its unacknowledged records. In any thread, under the engine's lock."""
        if self.error is None and not self.is_over:
            self.error = error
            self.engine.loop.call_soon_threadsafe(self.engine.fail_incomplete, error)

    async def _tell(self, places: Places, outdated: Outdated) -> bool:
        """Begin the stage with its first partitions, or add partitions to it."""
        calls, options = self._hub.calls, self._hub.options
        deadline = Deadline(options.delivery_timeout_s)
        if self.producer is not None:
            await calls.add_to_stage(self.sink.sink_id, self.producer.producer_id, places, deadline, outdated)
            return True
        self.producer = await calls.init_stage(
            self.sink.sink_id,
            self.batch_id,
            deadline,
            target=self.sink.target,
            partitions=places,
            timeout_ms=options.timeout_ms,
            attempt=self._attempt,
            outdated=outdated,
        )
        with self.engine.lock:
            assert isinstance(self.engine.ids, GivenProducerId)
            self.engine.ids.current = self.producer
        return True

    def _fail(self, error: RaftlogError) -> None:
        if self.error is None:
            self.error = error
        self.engine.fail_incomplete(error)

    # Its end

    async def finish(self) -> StageToken:
        """Wait until every record is acknowledged, and return the token. Repeated calls return the same token.

        Raises:
            RaftlogError: why a record, or the stage, has failed; it can only be aborted.
            InvalidRequestError: the stage was aborted.
        """
        if self._token is not None:  # the caller repeats a call that timed out at the last moment
            return self._token
        with self.engine.lock:
            if self.is_over:
                raise InvalidRequestError(f"this stage of batch {self.batch_id} {self._state.value} already")
            self._state = _State.FINISHING
        await self.engine.drain()
        already = isinstance(self.error, BatchAlreadyCommitted)
        if self.error is not None and not already:
            raise raised(self.error)
        return self._finished(already=already)

    def _finished(self, *, already: bool) -> StageToken:
        if self._token is None:  # unless a concurrent call has set it
            self._token = StageToken(self.sink.sink_id, self.batch_id, already_committed=already)
            if not already and self.producer is not None:
                self._token = self._token._replace(producer_id=self.producer.producer_id)
            self._state = _State.FINISHED
            self._hub.give_back(self.engine, usable=not already)
        return self._token

    async def abort(self, deadline: Deadline) -> None:
        """Drop the staged records, unless the stage is already over.

        Raises:
            RaftlogError: the coordinator does not answer; a later batch or the timeout ends the stage.
        """
        if self.is_over:
            return
        with self.engine.lock:
            self._state = _State.ABORTED
        await self._partitions.stop()
        self.engine.fail_incomplete(ClosedError(f"this stage of batch {self.batch_id} was aborted"))
        closing = self._hub.give_back(self.engine, usable=False)
        if closing is not None:
            await asyncio.shield(closing)
        if self.producer is not None:
            await self._hub.calls.abort_stages(self.sink.sink_id, [self.producer.producer_id], deadline)


class NeverOpen:
    """The gate of an engine that no stage has borrowed."""

    last_error: RaftlogError | None = None
    owner = TransactionOwner()

    def may_send(self, topic_partition: TopicPartition, topic_id: bytes) -> bool:
        """Return False."""
        return False

    def check_may_send(self) -> None:
        """Refuse every record.

        Raises:
            InvalidRequestError: always.
        """
        raise InvalidRequestError("this stage is over; begin another one")

    def on_failure(self, topic_partition: TopicPartition, error: RaftlogError) -> None:
        """Do nothing."""

    def on_over(self, topic_partition: TopicPartition, error: RaftlogError) -> RaftlogError:
        """Return the partition's error."""
        return error

    def on_not_sent(self, error: Exception) -> None:
        """Do nothing."""


_MAX_IDLE: Final = 4
"""At most this many idle engines are kept for later stages; they hold connections."""


class StageHub:
    """The state that the stages of one client share: calls to coordinators, and engines that each serve one stage."""

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
        """Return a new stage; its first record makes the coordinator begin it.

        Raises:
            ClosedError: the hub is closed.
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
        """Take an engine back: a usable one serves a later stage, others are closed in the returned task."""
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
            BrokerUnavailable: no broker answers within the deadline.
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
            SinkMismatch: the sink has another target. RaftlogError: as `TransactionCalls.call`.
        """
        self._check_open()
        response = await self.calls.last_batch(sink.sink_id, deadline)
        if response.last_batch_id != NO_BATCH and response.target != sink.target:
            raise SinkMismatch(
                f"sink {sink.sink_id!r} writes to {response.target!r}, not to {sink.target!r}; give every target its "
                "own sink id"
            )
        return response.last_batch_id

    async def commit(
        self, sink: Sink, batch_id: int, tokens: Iterable[StageToken], deadline: Deadline
    ) -> CommittedBatch:
        """Commit a batch by the tokens of its stages.

        Raises:
            StageExpired: a stage has ended; nothing was committed. SinkMismatch: the sink has another target.
            RequestTimedOut: the outcome is not known. TypeError, InvalidRequestError: the tokens do not fit.
        """
        self._check_open()
        plan = plan_commit(sink.sink_id, batch_id, tokens)
        if plan.repeated:
            last = await self.last_batch(sink, deadline)
            if last < batch_id:
                raise StageExpired(
                    f"a stage found batch {batch_id} of sink {sink.sink_id!r} committed, but the sink's last batch is "
                    f"{last}: it has lost its state. Nothing was committed, because parts would be missing; write the "
                    "batch again"
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
            RaftlogError: as `TransactionCalls.call`. TypeError, InvalidRequestError: the tokens do not fit.
        """
        self._check_open()
        producer_ids = stages_of(sink.sink_id, tokens)
        if producer_ids:
            await self.calls.abort_stages(sink.sink_id, producer_ids, deadline)

    async def abort_open(self, sink: Sink, batch_id: int, attempt: str, deadline: Deadline, *, fence: bool) -> int:
        """Abort the open stages of a batch whose attempt begins with `attempt`; return how many there were.

        `fence`: also refuse new stages of these attempts. For older servers the request also names each stage.

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
        """Close all engines and connections; unfinished stages end by their timeouts."""
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
            raise ClosedError("this staged writer is closed; make a new one")
