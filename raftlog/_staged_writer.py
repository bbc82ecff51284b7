"""Staged batches in the synchronous SDK: many processes write, one decision makes all of it readable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from raftlog._client.background import LoopThread, abandon_after_fork, loop_thread
from raftlog._client.stage import Sink, StageWork
from raftlog._client.stage_options import StageOptions
from raftlog._client.stages import StageHub
from raftlog._client.tracing_choice import producer_tracing
from raftlog._core.arguments import HeadersLike
from raftlog._core.bootstrap import parse_bootstrap
from raftlog._core.staging import CommittedBatch, StageToken, check_batch_id, check_sink_id
from raftlog._core.topic_queues import Partitioner
from raftlog._delivery import BatchDelivery, Deadline, Delivery
from raftlog._producer import Producer
from raftlog.errors import ClosedError, InvalidRequestError, RaftlogError

_ABORT_TIMEOUT_S: Final = 10.0
"""Dropping a stage at once is a courtesy to readers."""


class Staging:
    """What the staged writers of one process share: connections, and options. Thread-safe."""

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        *,
        partitioner: Partitioner | None = None,
        config: Mapping[str, object] | None = None,
        **options: object,
    ) -> None:
        addresses = parse_bootstrap(bootstrap)
        resolved = StageOptions.make(config, options)
        self._thread = loop_thread()

        async def make() -> StageHub:
            return StageHub(addresses, resolved, partitioner, self._thread.loop)

        self._engine = self._thread.run(make())
        self.default_timeout_s = resolved.delivery_timeout_s
        self._abandoned = False
        abandon_after_fork(self)

    def _abandon(self) -> None:
        self._abandoned = True

    @property
    def hub(self) -> StageHub:
        """Return the side that lives on the event loop; raises as `check`."""
        self.check()
        return self._engine

    def check(self) -> None:
        """Refuse in a child that was forked.

        Raises:
            ClosedError: it is one.
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
        """Return a writer for a sink that shares these connections; closing it closes nothing.

        `expire_after_ms`: how long the sink is remembered after a batch, if that is less than for others.
        """
        return StagedWriter._over(self, Sink(check_sink_id(sink_id), target, expire_after_ms))

    def cluster_id(self, timeout: float | None = None) -> str:
        """Return the id of the cluster.

        Raises:
            BrokerUnavailable: nobody answers in time.
        """
        return self._thread.run(self.hub.cluster_id(self.deadline(timeout)))

    def close(self) -> None:
        """Give every connection back; what is not finished is left to the stages' timeouts. Twice is allowed."""
        if not self._abandoned and not self._engine.closed:
            self._thread.run(self._engine.close())


class StagedWriter:
    """Writes batches that have a number of their own, each exactly once, from as many processes as you like.

    A process that writes a part of a batch *stages* it and gets a token; one that has all tokens of the batch
    *commits* them. Consumers (`isolation_level="read_committed"`, the default) see nothing of a batch before, and all
    of it after. The cluster remembers the number of the sink's last batch in the same log entry that makes the
    decision: whoever commits that number again, or a lower one, is told `already_committed`, and what was staged for
    it again is dropped. So a batch may be written again, in other parts and another order, whenever it is not certain
    that it was committed.

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
        sink_id: who writes, 1 to 255 characters; the same for all processes, and nobody else's. Its batches have
            growing numbers, from 0 on, with or without gaps.
        target: where the sink writes, in words of your own. The first batch fixes it; another target later is a
            `SinkMismatch`, so that two writers never share a sink id by accident.
        partitioner, config, options: as for `Producer`; acks=all is implied. `transaction_timeout_ms` (15 minutes):
            a stage that no commit has named so long after its first record is dropped; servers allow at most their
            `transaction.max.timeout.ms`. Calls without a timeout take `delivery_timeout_ms` at most.

    Raises:
        InvalidConfig: an unknown option, a bad value, or one that contradicts staging.
        InvalidRequestError: not a sink id.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        sink_id: str,
        target: str = "",
        *,
        partitioner: Partitioner | None = None,
        config: Mapping[str, object] | None = None,
        **options: object,
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
        """Who writes."""
        return self._sink.sink_id

    def last_batch(self, timeout: float | None = None) -> int:
        """Return the highest batch that the sink has committed, -1 for none: batches up to it need not be written.

        Raises:
            SinkMismatch: the sink has another target.
            RequestTimedOut: no answer in time.
        """
        staging = self._staging
        return staging.thread.run(staging.hub.last_batch(self._sink, staging.deadline(timeout)))

    def stage(self, batch_id: int, attempt: str = "") -> Stage:
        """Begin to stage a part of a batch. Nothing is asked of the cluster before the first record.

        `attempt` is shown to whoever lists open stages: which task, on which machine.

        Raises:
            InvalidRequestError: not the number of a batch.
            ClosedError: the writer is closed.
        """
        staging = self._staging
        check_batch_id(batch_id)
        hub = staging.hub

        async def begin() -> StageWork:
            return hub.begin(self._sink, batch_id, attempt)

        return Stage(staging, staging.thread.run(begin()))

    def commit(self, batch_id: int, tokens: Iterable[StageToken], timeout: float | None = None) -> CommittedBatch:
        """Make everything that these tokens stand for readable, at once and for good; drop all other stages up to this
        batch. No tokens at all is a batch without records: its number counts as that of any other, and what was staged
        for it is dropped.

        The same tokens once more are the same commit: it answers as it did, or `already_committed` after a while.

        When it returns the records are readable, or will be within moments while a server is being replaced.

        Raises:
            StageExpired: a stage is gone; nothing was committed, and the batch has to be written again.
            SinkMismatch: the sink has another target.
            RequestTimedOut: the outcome is not known: commit again, or write the batch again and commit that.
            InvalidRequestError: a token of another batch or sink.
        """
        staging = self._staging
        return staging.thread.run(staging.hub.commit(self._sink, batch_id, tokens, staging.deadline(timeout)))

    def abort(self, tokens: Iterable[StageToken], timeout: float | None = None) -> None:
        """Drop what these tokens stand for, unless it was committed. Not needed: a later commit does it, or time.

        Raises:
            RequestTimedOut: no answer in time.
        """
        staging = self._staging
        staging.thread.run(staging.hub.abort(self._sink, tokens, staging.deadline(timeout)))

    def abort_open(self, batch_id: int, attempt: str = "", timeout: float | None = None, *, fence: bool = False) -> int:
        """Drop every stage of a batch that is still open, finished or not, of attempts that begin with these words.

        For the tokens that never arrived: what a process left open that died keeps consumers from what was written
        behind it, until its timeout. Returns how many there were.

        With `fence` these attempts stay given up: a stage of the batch that one of them would begin later is refused
        with `StageExpired`. For processes that cannot be waited for. The next try at the batch needs other words.

        Raises:
            RequestTimedOut: no answer in time.
            InvalidRequestError: a fence for all attempts; name the words that those begin with that are given up.
        """
        staging = self._staging
        check_batch_id(batch_id)
        if fence and not attempt:
            raise InvalidRequestError("a fence needs the words that attempts begin with, or nobody could try again")
        deadline = staging.deadline(timeout)
        return staging.thread.run(staging.hub.abort_open(self._sink, batch_id, attempt, deadline, fence=fence))

    def already_committed(self, batch_id: int) -> StageToken:
        """Return the token of a part that was not written, since the batch had been committed before."""
        return StageToken(self.sink_id, check_batch_id(batch_id), already_committed=True)

    def close(self) -> None:
        """Give every connection back. Finished stages stay: their tokens can be committed. Twice is allowed."""
        if self._owns_staging:
            self._staging.close()

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "a StagedWriter has connections, which do not travel to other processes; make one in each process, with "
            "the same sink id, and send the tokens of its stages"
        )

    def __enter__(self) -> StagedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Stage:
    """A part of a batch: records that nobody reads before a commit names the token of `finish`.

    One thread at a time. As a context manager it is aborted when it is left without `finish`.
    """

    def __init__(self, staging: Staging, work: StageWork) -> None:
        self._staging = staging
        self._work = work
        self._sender = _Sender(staging.thread, work)
        self._records = 0

    @property
    def batch_id(self) -> int:
        """The batch that it is a part of."""
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
        """Stage one record, as `Producer.send` sends one. The delivery need not be looked at: `finish` waits for all.

        Raises:
            BatchAlreadyCommitted: somebody has committed the batch meanwhile; `finish` gives a token that says so.
            RaftlogError: as `Producer.send`; or an earlier record has failed, and the stage with it.
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
        """Stage many records, as `Producer.send_batch` sends them.

        Raises:
            BatchAlreadyCommitted, RaftlogError: as `send`.
        """
        self._check_takes_records()
        delivery = self._sender.send_batch(topic, values, key, partition, headers, timestamp_ms)
        self._records += sum(batch.count for batch in delivery._batches)
        return delivery

    def flush(self, timeout: float | None = None) -> None:
        """Send everything at once and wait until all of it is acknowledged or has failed.

        Raises:
            TimeoutError: not done within `timeout` seconds; it goes on.
        """
        self._check_takes_records()
        self._sender.flush(timeout)

    def finish(self, timeout: float | None = None) -> StageToken:
        """Wait until every record is acknowledged, and return what a commit names. Without records it costs nothing.

        Called again it returns the same token.

        Raises:
            TimeoutError: not within `timeout` seconds; it goes on, and `finish` may be called again.
            RaftlogError: a record has failed, or the stage; leave it, and stage the part again.
            InvalidRequestError: aborted before.
        """
        self._staging.check()
        token = self._staging.thread.run(self._work.finish(), timeout)
        return token if token.already_committed else token._replace(records=self._records)

    def abort(self, timeout: float | None = None) -> None:
        """Drop what was staged. Does nothing once it is finished, or aborted.

        Raises:
            RequestTimedOut: the coordinator was not told in time; what was staged goes with the next batch, or in time.
        """
        self._staging.thread.run(self._work.abort(self._staging.deadline(timeout)))

    def _check_takes_records(self) -> None:
        """Refuse before anything looks at the engine, which may serve another stage by now."""
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
            with contextlib.suppress(RaftlogError, TimeoutError):  # whatever brought us here says more
                self.abort(_ABORT_TIMEOUT_S)


class _Sender(Producer):
    """The producer's methods, over the engine that a stage has borrowed."""

    def __init__(self, thread: LoopThread, work: StageWork) -> None:
        self._thread = thread
        self._engine = work.engine
        self._lock = work.engine.lock
        self._tracing = producer_tracing(work.engine.options)
        self._lean = work.engine.lean if self._tracing is None else {}
