"""Staged batches in the synchronous SDK: many processes write, one decision makes all of it readable."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Unpack

from raftlog._client.background import Client, LoopThread
from raftlog._client.keywords import StageKeywords
from raftlog._client.options import Bootstrap, shown_as, taken_apart
from raftlog._client.stage_options import StageOptions
from raftlog._client.stages import Sink, StageHub, StageWork
from raftlog._client.tracing_choice import producer_tracing
from raftlog._core.accumulator import Partitioner
from raftlog._core.arguments import HeadersLike
from raftlog._core.staging import CommittedBatch, StageToken, check_batch_id, check_sink_id
from raftlog._delivery import BatchDelivery, Deadline, Delivery
from raftlog._producer import Producer
from raftlog.errors import ClosedError, InvalidRequestError, RaftlogError

_ABORT_TIMEOUT_S: Final = 10.0
"""The time limit for dropping a stage at once: readers then need not wait for its timeout."""


class Staging(Client[StageHub]):
    """The connections and options that the staged writers of one process share. Thread-safe."""

    def __init__(
        self,
        bootstrap: Bootstrap = None,
        *,
        partitioner: Partitioner | None = None,
        config: Mapping[str, object] | None = None,
        **options: Unpack[StageKeywords],
    ) -> None:
        given = taken_apart(bootstrap, config, options)
        self._addresses = given.addresses
        self._options = StageOptions.make(given.config, given.keywords)
        self._partitioner = partitioner
        self.default_timeout_s = self._options.delivery_timeout_s
        self._abandoned = False
        self._start()

    def _make(self, loop: asyncio.AbstractEventLoop) -> StageHub:
        return StageHub(self._addresses, self._options, self._partitioner, loop)

    def _abandon(self) -> None:
        self._abandoned = True

    @property
    def hub(self) -> StageHub:
        """Return the engine on the event loop. Raises as `check`."""
        self.check()
        return self._engine

    def check(self) -> None:
        """Check that this is the process that made the connections.

        Raises:
            ClosedError: the process was forked from that one.
        """
        if self._abandoned:
            raise ClosedError("this staged writer was made in another process; make one in each process")

    @property
    def thread(self) -> LoopThread:
        """Return the event loop's thread."""
        return self._thread

    def deadline(self, timeout: float | None) -> Deadline:
        """Return the deadline of a call; without a timeout it is `delivery.timeout.ms`."""
        return Deadline(self.default_timeout_s if timeout is None else timeout)

    def writer(self, sink_id: str, target: str, expire_after_ms: int = 0) -> StagedWriter:
        """Return a writer for a sink that shares these connections; closing the writer leaves them open.

        `expire_after_ms` is the time for which the sink is remembered after a batch, if shorter than the default.
        """
        return StagedWriter._over(self, Sink(check_sink_id(sink_id), target, expire_after_ms))

    def cluster_id(self, timeout: float | None = None) -> str:
        """Return the id of the cluster.

        Raises:
            BrokerUnavailable: no broker answered in time.
        """
        return self._thread.run(self.hub.cluster_id(self.deadline(timeout)))

    def close(self) -> None:
        """Close all connections; unfinished stages end with their timeouts. Closing twice is allowed."""
        if not self._abandoned and not self._engine.closed:
            self._thread.run(self._engine.close())


class StagedWriter:
    """Writes numbered batches, each exactly once, from any number of processes.

    A process that writes a part of a batch *stages* it and gets a token. A process that has all tokens of the batch
    *commits* them. Consumers (`isolation_level="read_committed"`, the default) see nothing of a batch before the commit
    and all of it afterwards. The record of the decision also holds the number of the sink's last batch: a commit of
    that number or a lower one returns `already_committed`, and drops the stages of that batch. So a program may write a
    batch again, in other parts and another order, whenever it does not know whether the batch was committed.

    >>> from raftlog import StagedWriter
    >>> with StagedWriter(cluster.bootstrap, "nightly-export", target="letters") as writer:
    ...     with writer.stage(batch_id=1) as stage:
    ...         delivery = stage.send("letters", b"a", key=b"1")
    ...         token = stage.finish()
    ...     (writer.commit(1, [token]).already_committed, writer.commit(1, []).already_committed)
    (False, True)
    >>> with StagedWriter(cluster.bootstrap, "nightly-export", target="letters") as writer:
    ...     writer.last_batch()
    1

    Args:
        bootstrap: one or more brokers, "host:port,host:port" or a list.
        sink_id: the name of the sink, 1 to 255 characters; the same in all its processes, and used by no other sink.
            The numbers of the sink's batches rise, from 0 on, with or without gaps.
        target: a description of where the sink writes. The first batch fixes it; another target later is a
            `SinkMismatch`, so that two sinks never share an id by accident.
        partitioner, config, options: as for `Producer`; acks=all is implied. A stage that no commit names within
            `transaction_timeout_ms` (15 minutes) of its first record is dropped; servers allow at most their
            `transaction.max.timeout.ms`. Calls without a timeout take `delivery_timeout_ms` at most.

    Raises:
        InvalidConfig: an unknown option, a bad value, or one that contradicts staging.
        InvalidRequestError: the sink id is not allowed.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        sink_id: str,
        target: str = "",
        *,
        partitioner: Partitioner | None = None,
        config: Mapping[str, object] | None = None,
        **options: Unpack[StageKeywords],
    ) -> None:
        self._sink = Sink(check_sink_id(sink_id), target)
        self._staging = Staging(bootstrap, partitioner=partitioner, config=config, **options)
        self._owns_staging = True

    @classmethod
    def _over(cls, staging: Staging, sink: Sink) -> StagedWriter:
        writer = cls.__new__(cls)
        writer._sink, writer._staging, writer._owns_staging = sink, staging, False
        return writer

    @property
    def sink_id(self) -> str:
        """The name of the sink."""
        return self._sink.sink_id

    def last_batch(self, timeout: float | None = None) -> int:
        """Return the highest batch number that the sink has committed, or -1. Batches up to it need not be written.

        Raises:
            SinkMismatch: the sink has another target.
            RequestTimedOut: no answer in time.
        """
        staging = self._staging
        return staging.thread.run(staging.hub.last_batch(self._sink, staging.deadline(timeout)))

    def stage(self, batch_id: int, attempt: str = "") -> Stage:
        """Begin to stage a part of a batch. The cluster learns of it with the first record.

        `attempt` is shown in lists of open stages: for example the task and its machine.

        Raises:
            InvalidRequestError: `batch_id` is not the number of a batch.
            ClosedError: the writer is closed.
        """
        staging = self._staging
        check_batch_id(batch_id)
        hub = staging.hub

        async def begin() -> StageWork:
            return hub.begin(self._sink, batch_id, attempt)

        return Stage(staging, staging.thread.run(begin()))

    def commit(self, batch_id: int, tokens: Iterable[StageToken], timeout: float | None = None) -> CommittedBatch:
        """Make the stages of these tokens readable, together and for good; drop all other stages up to this batch.

        A commit without tokens commits a batch without records: the sink counts its number, and drops its stages. A
        second call with the same tokens is the same commit: it returns the same answer, or, some time later,
        `already_committed`.

        When the call returns, the records are readable; after a failover this may take moments longer.

        Raises:
            StageExpired: a stage is gone; nothing was committed, so write the batch again.
            SinkMismatch: the sink has another target.
            RequestTimedOut: the outcome is unknown: commit again, or write the batch again and commit that.
            InvalidRequestError: a token belongs to another batch or sink.
        """
        staging = self._staging
        return staging.thread.run(staging.hub.commit(self._sink, batch_id, tokens, staging.deadline(timeout)))

    def abort(self, tokens: Iterable[StageToken], timeout: float | None = None) -> None:
        """Drop the stages of these tokens, unless they are committed. Optional: a later commit or a timeout does so
        too.

        Raises:
            RequestTimedOut: no answer in time.
        """
        staging = self._staging
        staging.thread.run(staging.hub.abort(self._sink, tokens, staging.deadline(timeout)))

    def abort_open(self, batch_id: int, attempt: str = "", timeout: float | None = None, *, fence: bool = False) -> int:
        """Drop the open stages of a batch, finished or not, whose `attempt` begins with this text; return how many.

        Use it if tokens never arrived: the open stages of a dead process keep consumers from the records behind them
        until the stages time out.

        With `fence`, later stages of the batch by these attempts fail with `StageExpired`; use it if these processes
        may still be alive. The next try at the batch needs another `attempt`.

        Raises:
            RequestTimedOut: no answer in time.
            InvalidRequestError: a fence without `attempt`, which would refuse every attempt.
        """
        staging = self._staging
        check_batch_id(batch_id)
        if fence and not attempt:
            raise InvalidRequestError("a fence needs the prefix of its attempts, or no later attempt could begin")
        deadline = staging.deadline(timeout)
        return staging.thread.run(staging.hub.abort_open(self._sink, batch_id, attempt, deadline, fence=fence))

    def already_committed(self, batch_id: int) -> StageToken:
        """Return the token for a part that was not written because the batch is already committed."""
        return StageToken(self.sink_id, check_batch_id(batch_id), already_committed=True)

    def close(self) -> None:
        """Close all connections. Finished stages stay and can be committed. Closing twice is allowed."""
        if self._owns_staging:
            self._staging.close()

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a StagedWriter has connections, which do not travel to other processes; make one in each process, with "
            "the same sink id, and send the tokens of its stages"
        )

    def __repr__(self) -> str:
        staging = self._staging
        state = "closed" if staging._engine.closed else "open"
        return shown_as(f"StagedWriter {self.sink_id!r}", staging._addresses, staging._options.producer, state)

    def __enter__(self) -> StagedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Stage:
    """A part of a batch: its records are not readable before a commit names the token that `finish` returns.

    For one thread at a time. A `with` block that ends without `finish` aborts the stage.
    """

    def __init__(self, staging: Staging, work: StageWork) -> None:
        self._staging = staging
        self._work = work
        self._sender = _Sender(staging.thread, work)
        self._records = 0

    @property
    def batch_id(self) -> int:
        """The number of the batch."""
        return self._work.batch_id

    def send(
        self,
        topic: str,
        value: bytes | None = b"",
        key: bytes | None = None,
        partition: int | None = None,
        headers: HeadersLike | None = None,
        timestamp_ms: int | None = None,
    ) -> Delivery:
        """Stage one record, as `Producer.send`. The delivery can be ignored: `finish` waits for all records.

        Raises:
            BatchAlreadyCommitted: the batch was committed meanwhile; `finish` returns a token that says so.
            RaftlogError: as `Producer.send`; or an earlier record failed, and the stage with it.
        """
        self._check_takes_records()
        delivery = self._sender.send(topic, value, key, partition, headers, timestamp_ms)
        self._records += 1
        return delivery

    def send_batch(
        self,
        topic: str,
        values: Any,
        key: Any = None,
        partition: Any = None,
        headers: HeadersLike | None = None,
        timestamp_ms: Any = None,
    ) -> BatchDelivery:
        """Stage many records, as `Producer.send_batch`.

        Raises:
            BatchAlreadyCommitted, RaftlogError: as `send`.
        """
        self._check_takes_records()
        delivery = self._sender.send_batch(topic, values, key, partition, headers, timestamp_ms)
        self._records += sum(batch.count for batch in delivery._batches)
        return delivery

    def flush(self, timeout: float | None = None) -> None:
        """Send all records now and wait until each is acknowledged or has failed.

        Raises:
            TimeoutError: not done within `timeout` seconds; sending goes on.
        """
        self._check_takes_records()
        self._sender.flush(timeout)

    def finish(self, timeout: float | None = None) -> StageToken:
        """Wait until every record is acknowledged, and return the token for the commit.

        A second call returns the same token. A stage without records asks the cluster nothing.

        Raises:
            TimeoutError: not done within `timeout` seconds; sending goes on, and `finish` may be called again.
            RaftlogError: a record or the stage failed; stage the part again.
            InvalidRequestError: the stage was aborted.
        """
        self._staging.check()
        token = self._staging.thread.run(self._work.finish(), timeout)
        return token if token.already_committed else token._replace(records=self._records)

    def abort(self, timeout: float | None = None) -> None:
        """Drop the stage. Does nothing once it is finished or aborted.

        Raises:
            RequestTimedOut: the coordinator did not answer; the next committed batch, or the timeout, ends the stage.
        """
        self._staging.thread.run(self._work.abort(self._staging.deadline(timeout)))

    def _check_takes_records(self) -> None:
        """Check that the stage still takes records: after its end, the engine may already serve another stage."""
        if self._work.is_over:
            self._work.check_may_send()
        self._staging.check()

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a Stage has connections, which do not travel to other processes; send the token of its finish()"
        )

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._work.is_over:
            with contextlib.suppress(RaftlogError, TimeoutError):  # the error that ends the block says more
                self.abort(_ABORT_TIMEOUT_S)


class _Sender(Producer):
    """The producer's methods over the engine that a stage borrows."""

    def __init__(self, thread: LoopThread, work: StageWork) -> None:
        self._thread = thread
        self._engine = work.engine
        self._lock = work.engine.lock
        self._tracing = producer_tracing(work.engine.options)
        self._lean = work.engine.lean if self._tracing is None else {}
