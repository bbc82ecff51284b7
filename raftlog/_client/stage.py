"""One stage: records that a producer of their own has written, and that nobody reads before a batch names them.

Everything here runs on the event loop. A stage borrows a producer's engine: it opens the engine's gates by beginning
the stage at the sink's coordinator, with the partitions that are written to first, and by adding more.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass
from typing import Protocol

from raftlog._client.gate import GivenProducerId
from raftlog._client.openings import Openings, Places
from raftlog._client.producer import ProducerEngine
from raftlog._client.producer_ids import ProducerId
from raftlog._client.stage_options import STAGE_TIMEOUT, StageOptions
from raftlog._client.transaction_calls import Outdated, TransactionCalls
from raftlog._core.staging import StageToken
from raftlog._delivery import Deadline, raised
from raftlog.errors import (
    BatchAlreadyCommitted,
    ClosedError,
    InvalidRequestError,
    RaftlogError,
    StageExpired,
)
from raftlog.types import TopicPartition


@dataclass(frozen=True, slots=True)
class Sink:
    """Whose batches they are, and where it writes."""

    sink_id: str
    target: str
    expire_after_ms: int = 0
    """How long it is remembered after a batch; 0: for sink.expiration.ms."""


class _State(enum.Enum):
    STAGING = "takes records"
    FINISHING = "is being finished"
    FINISHED = "is finished"
    ABORTED = "was aborted"


class Lender(Protocol):
    """Whose engine a stage has borrowed."""

    options: StageOptions
    calls: TransactionCalls

    def give_back(self, engine: ProducerEngine, *, usable: bool) -> asyncio.Task[None] | None:
        """Take it back; one that is not usable is closed in a task."""


class StageWork:
    """One stage, from its first record to its token. The `PartitionGate` of the engine that it has borrowed.

    Transitions:
        staging              -> finishing  `finish`: it takes no more records
        finishing            -> finished   every record is acknowledged; the engine is given back
        staging or finishing -> aborted    `abort`, whatever may still be on its way; the engine is closed

    Invariants: the engine sends nothing before the coordinator has answered for the partition; once `error` is set no
    token is given, but that for a batch which was committed before.
    """

    def __init__(self, hub: Lender, engine: ProducerEngine, sink: Sink, batch_id: int, attempt: str) -> None:
        self.sink = sink
        self.batch_id = batch_id
        self.engine = engine
        self.error: RaftlogError | None = None
        """Why the stage can only be aborted."""
        self.producer: ProducerId | None = None
        """None: nothing was staged yet, so the coordinator does not know the stage."""
        self._attempt = attempt
        self._hub = hub
        self._state = _State.STAGING
        self._partitions = Openings(engine, self._tell, self._fail)
        self._token: StageToken | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has a token, or was aborted."""
        return self._state in (_State.FINISHED, _State.ABORTED)

    # The engine's gate

    @property
    def last_error(self) -> RaftlogError | None:
        """Why gates do not open, as far as that is known."""
        return self.error or self._hub.calls.last_error

    def may_send(self, topic_partition: TopicPartition, topic_id: bytes) -> bool:
        """Return whether the coordinator knows of the partition; if not, tell it, with all that come meanwhile."""
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
        """A record has failed for good: without it the stage is never committed."""
        self._fail_soon(error)

    def on_over(self, topic_partition: TopicPartition, error: RaftlogError) -> RaftlogError:
        """As `PartitionGate.on_over`: somebody has ended the stage."""
        ended = StageExpired(
            f"this stage of batch {self.batch_id} was ended while it was written: somebody else has committed the "
            f"batch, or no commit came within {STAGE_TIMEOUT}={self._hub.options.timeout_ms}; {error}"
        )
        self._fail_soon(ended)
        return self.error or ended

    def on_not_sent(self, error: Exception) -> None:
        """As `PartitionGate.on_not_sent`: a stage without this record is never committed, either."""
        if self._state is _State.STAGING:
            self._fail_soon(error if isinstance(error, RaftlogError) else InvalidRequestError(str(error)))

    def _fail_soon(self, error: RaftlogError) -> None:
        """Send no more of it, and let nobody wait for the rest. In any thread, under the engine's lock."""
        if self.error is None and not self.is_over:
            self.error = error
            self.engine.loop.call_soon_threadsafe(self.engine.fail_incomplete, error)

    async def _tell(self, places: Places, outdated: Outdated) -> bool:
        """Begin the stage with its first partitions, or add to it."""
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
        """Wait until every record is acknowledged, and return the token: the same one, however often it is called.

        Raises:
            RaftlogError: why a record, or the stage, has failed; it can only be aborted.
            InvalidRequestError: the stage was aborted.
        """
        if self._token is not None:  # who was told of a timeout in the last moment asks again
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
        if self._token is None:  # else another call was faster
            self._token = StageToken(self.sink.sink_id, self.batch_id, already_committed=already)
            if not already and self.producer is not None:
                self._token = self._token._replace(producer_id=self.producer.producer_id)
            self._state = _State.FINISHED
            self._hub.give_back(self.engine, usable=not already)
        return self._token

    async def abort(self, deadline: Deadline) -> None:
        """Drop what was staged; an end that was there before stays.

        Raises:
            RaftlogError: the coordinator could not be told; the stage goes with a later batch, or in time.
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

    def may_send(self, topic_partition: TopicPartition, topic_id: bytes) -> bool:
        """Nothing may be sent."""
        return False

    def check_may_send(self) -> None:
        """Refuse every record.

        Raises:
            InvalidRequestError: always.
        """
        raise InvalidRequestError("this stage is over; begin another one")

    def on_failure(self, topic_partition: TopicPartition, error: RaftlogError) -> None:
        """Nobody waits for it."""

    def on_over(self, topic_partition: TopicPartition, error: RaftlogError) -> RaftlogError:
        """Nobody waits for it."""
        return error

    def on_not_sent(self, error: Exception) -> None:
        """Nobody misses it."""
