"""A partition on a follower, for one leader epoch: it appends the leader's batches as they are, and truncates.

`Following` is the term; `LogCuts` runs the truncations of one log off the event loop, one after the other.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from broker.clock import Clock
from broker.log.flush import Flushing
from broker.log.partition_log import PartitionLog
from broker.log.transactions import MarkerMissing
from raftlog.errors import (
    CorruptRecordError,
    FencedLeaderEpoch,
    InternalError,
    InvalidRequestError,
    RaftlogError,
    StorageError,
)
from raftlog.format import parse_header
from replication.leader_epochs import truncation_offset
from replication.ports import Diverging, Done, FetchState

if TYPE_CHECKING:
    from broker.observability.partition_traces import PartitionTraces, ReplicatedSpans


logger = logging.getLogger(__name__)

Cut = Callable[[], object]
CutDone = Callable[[RaftlogError | None], None]


class LogCuts:
    """Truncations of one log.

    States: idle -> cutting (`run`) -> idle, or cutting the next.

    A caller that needs the log end to stay in place, such as a new leader, waits for `idle` first. Flushes need not
    wait: the log separates them from truncations. `on_end` is called after each truncation, whatever came of it.
    """

    def __init__(self, executor: Executor, on_end: Callable[[], None]) -> None:
        self._executor = executor
        self._on_end = on_end
        self._queue: deque[tuple[Cut, CutDone]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def busy(self) -> bool:
        """Whether a truncation is under way."""
        return not self._idle.is_set()

    async def idle(self) -> None:
        """Return once no truncation is under way."""
        await self._idle.wait()

    def run(self, cut: Cut, done: CutDone) -> None:
        """Run `cut` in a thread, after those before it, then call `done` on the loop, never before this returns."""
        self._queue.append((cut, done))
        if len(self._queue) == 1:
            self._idle.clear()
            self._begin()

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        cut, _ = self._queue[0]

        def run() -> None:
            error: RaftlogError | None = None
            try:
                cut()
            except RaftlogError as refused:
                error = refused
            except BaseException as failure:  # a bug, which `done` has to hear of
                logger.exception("a truncation failed")
                error = InternalError(f"a truncation failed: {type(failure).__name__}: {failure}")
            loop.call_soon_threadsafe(self._end, error)

        try:
            self._executor.submit(run)
        except RuntimeError as failure:  # shut down
            loop.call_soon(self._end, StorageError(f"a truncation cannot begin: {failure}"))

    def _end(self, error: RaftlogError | None) -> None:
        _, done = self._queue.popleft()
        if self._queue:
            self._begin()
        else:
            self._idle.set()
        self._on_end()
        done(error)


class Following:
    """One term of a follower; implements `replication.ports.FollowedPartition`.

    Made by `Partition.follow`. After `end` it appends nothing, acks nothing and begins no truncation. A truncation
    under way completes; the partition's next role waits for that (`LogCuts.idle`).

    The high watermark is the leader's, but not above this replica's durable end. Only a truncation moves it back.
    """

    def __init__(
        self,
        log: PartitionLog,
        flushing: Flushing,
        cuts: LogCuts,
        clock: Clock,
        *,
        leader_id: int,
        leader_epoch: int,
        wake_readers: Callable[[], None],
        on_damaged: Callable[[PartitionLog, CorruptRecordError], None],
        traces: PartitionTraces | None = None,
        count_replicated: Callable[[int, int], None] = lambda bytes_in, bytes_out: None,
    ) -> None:
        self.topic_id, self.partition = log.topic_id, log.partition
        self.name = f"{log.topic}-{log.partition}"
        self.leader_id = leader_id
        self.leader_epoch = leader_epoch
        self.is_throttled = False
        """Whether `follower.replication.throttled.replicas` names this broker."""
        self._log = log
        self._flushing = flushing
        self._cuts = cuts
        self._clock = clock
        self._wake_readers = wake_readers
        self._on_damaged = on_damaged
        self._leader_high_watermark = 0
        self._leader_log_start = 0
        self._on_durable: dict[Callable[[int], None], int] = {}
        """Callbacks, each with the durable end (exclusive) at which it has been told everything."""
        self._told = 0
        """The largest durable end told. A change of the flush config may lower the durable end, but not this."""
        self._ended_by: RaftlogError | None = None
        self._traces = traces
        self._count_replicated = count_replicated
        self._spans: deque[ReplicatedSpans] = deque()
        """Spans of appended records that are not durable yet, oldest first."""

    def begin(self) -> None:
        """Flush what an earlier role has left unflushed."""
        self._flushing.catch_up()

    def end(self, reason: RaftlogError) -> None:
        self._ended_by = reason
        self._on_durable.clear()
        self._end_spans(reason)

    def fetch_state(self) -> FetchState:
        """Return where the log ends now.

        Raises:
            StorageError: a truncation is under way.
        """
        self._check_uncut()
        bounds = self._log.bounds()
        durable = min(self._flushing.durable_end_offset, bounds.log_end_offset)
        return FetchState(bounds.log_end_offset, bounds.leader_epochs.latest_epoch, durable)

    def _check(self, leader_epoch: int) -> None:
        if self._ended_by is not None:
            raise self._ended_by
        if leader_epoch != self.leader_epoch:
            raise FencedLeaderEpoch(
                f"{self.name}: this broker follows in leader epoch {self.leader_epoch}, not in {leader_epoch}"
            )

    # Records

    def append_replicated(
        self,
        records: bytes | memoryview,
        leader_epoch: int,
        on_durable: Callable[[int], None],
        traceparents: Sequence[str] = (),
    ) -> None:
        """Check and append batches as the leader stamped them; see `FollowedPartition`.

        Raises:
            FencedLeaderEpoch, NotLeader: another epoch, or this term is over.
            CorruptRecordError: a batch is invalid or does not continue the log; the batches before it are appended.
            StorageFull, StorageError: the log cannot be written now, or has to be copied anew.
        """
        self._check(leader_epoch)
        self._check_uncut()
        log = self._log
        self._check_beginning(records, leader_epoch)
        before = log.log_end_offset
        spans = self._traces.replicate(traceparents) if traceparents and self._traces is not None else None
        try:
            log.append_stamped(records, now_ms=self._clock.now_ms(), max_epoch=leader_epoch)
        except MarkerMissing as error:
            self._on_damaged(log, error)
            raise StorageError(
                f"{self.name}: {error}; the log is copied again from the leader"
            ) from error  # the leader's log is intact
        finally:
            if spans is not None:
                self._appended_traced(spans, before, traceparents)
            if log.log_end_offset > before:
                self._count_replicated(len(records), 0)
                self._on_durable[on_durable] = log.log_end_offset
                if self._flushing.appended():
                    self.on_durable()

    def _appended_traced(self, spans: ReplicatedSpans, begin: int, traceparents: Sequence[str]) -> None:
        assert self._traces is not None, "spans exist only while tracing"
        end = self._log.log_end_offset
        if end == begin:
            spans.end(CorruptRecordError("none of the records was appended"))
            return
        self._traces.note(begin, end, traceparents)
        spans.appended(begin, end)
        self._spans.append(spans)

    def _end_spans(self, error: RaftlogError | None = None, durable_end_offset: int | None = None) -> None:
        """End the spans of records below `durable_end_offset`; None: all spans."""
        while self._spans and (durable_end_offset is None or self._spans[0].end_offset <= durable_end_offset):
            self._spans.popleft().end(error)

    def call_when_durable(self, on_durable: Callable[[int], None]) -> None:
        """Call `on_durable` once the records that the log has now are durable; see `FollowedPartition`."""
        if self._ended_by is None and self._flushing.durable_end_offset < self._log.log_end_offset:
            self._on_durable[on_durable] = self._log.log_end_offset

    def _check_uncut(self) -> None:
        if self._cuts.busy:
            raise StorageError(f"{self.name}: the log is being truncated; try again")

    def _check_beginning(self, records: bytes | memoryview, leader_epoch: int) -> None:
        """Have an empty log begin at the first batch, if the leader's log start lies within that batch.

        The leader sends whole batches. With the next marks the log start moves up again, past the deleted records.

        Raises:
            StorageError: the log is about to begin at that batch.
        """
        log = self._log
        if log.log_end_offset != log.log_start_offset:
            return
        first = parse_header(records)
        if 0 <= first.base_offset < log.log_end_offset < first.next_offset:
            kept = bytes(records)  # the leader refuses to send them again: the batch begins below its log start

            def begin() -> None:
                self._start_at(first.base_offset, leader_epoch)
                log.append_stamped(kept, now_ms=self._clock.now_ms(), max_epoch=leader_epoch)

            self._cut(begin, lambda error: None)
            raise StorageError(
                f"{self.name}: the leader's log starts within a batch, at {log.log_end_offset}; "
                f"this one is about to begin with that batch, at {first.base_offset}; try again"
            )

    def on_durable(self) -> None:
        """Tell the callbacks how far the log is durable now; called after a flush."""
        if self._ended_by is not None or self._cuts.busy:
            return
        durable = self._flushing.durable_end_offset
        if self._spans:
            self._end_spans(durable_end_offset=durable)
        self._raise_marks()
        if durable < self._told:
            return
        self._told = durable
        waiting = list(self._on_durable.items())
        for on_durable, end_offset in waiting:
            if durable >= end_offset:
                del self._on_durable[on_durable]
        for on_durable, _ in waiting:
            on_durable(durable)

    def take_marks(self, high_watermark: int, log_start_offset: int, leader_epoch: int) -> int:
        """Raise the high watermark, up to the durable end, and the log start; later flushes raise them further."""
        if self._ended_by is not None or leader_epoch != self.leader_epoch or self._cuts.busy:
            return 0
        self._leader_high_watermark = max(self._leader_high_watermark, high_watermark)
        self._leader_log_start = max(self._leader_log_start, log_start_offset)
        self._raise_marks()
        return self._log.log_start_offset

    def _raise_marks(self) -> None:
        log = self._log
        high_watermark = min(self._leader_high_watermark, self._flushing.durable_end_offset)
        moves = high_watermark > log.high_watermark
        if moves:
            log.high_watermark = high_watermark
        log_start_offset = min(self._leader_log_start, log.high_watermark)
        if log_start_offset > log.log_start_offset:
            log.delete_records(log_start_offset)
            moves = True  # readers that wait for a transaction to end may be below the log start now
        if moves:
            self._wake_readers()

    # Truncation

    def truncate(self, diverging: Diverging, leader_epoch: int, done: Done) -> None:
        """Truncate what the leader does not have, then call `done`, always after this method returns."""

        def cut() -> None:
            self._check(leader_epoch)
            log, bounds = self._log, self._log.bounds()
            offset = truncation_offset(bounds.leader_epochs, bounds.log_end_offset, diverging)
            logger.info(
                "log differs from its leader's and is truncated",
                extra={
                    "event": "log_truncated",
                    "partition": self.name,
                    "leader_epoch": leader_epoch,
                    "log_end_offset": log.log_end_offset,
                    "offset": offset,
                    "high_watermark": log.high_watermark,
                },
            )
            if offset < log.high_watermark:
                logger.warning(
                    "%s: committed records are truncated, from offset %d to %d: an unclean election, or lost disks",
                    self.name,
                    offset,
                    log.high_watermark,
                )
            if offset >= log.log_start_offset:
                log.truncate_to(offset, now_ms=self._clock.now_ms())
            else:  # the logs share nothing; opened at 0, the leader answers with its log start
                log.reset_to(0, now_ms=self._clock.now_ms())

        self._cut(cut, done)

    def start_over(self, log_start_offset: int, leader_epoch: int, done: Done) -> None:
        """Drop everything and begin at the leader's log start, then call `done`, always after this method returns."""

        def cut() -> None:
            if log_start_offset < 0:
                raise InvalidRequestError(f"{self.name}: a log cannot start at {log_start_offset}")
            logger.warning(
                "log ends outside of its leader's and starts over",
                extra={
                    "event": "log_started_over",
                    "partition": self.name,
                    "log_end_offset": self._log.log_end_offset,
                    "offset": log_start_offset,
                },
            )
            self._start_at(log_start_offset, leader_epoch)

        self._cut(cut, done)

    def _start_at(self, offset: int, leader_epoch: int) -> None:
        self._check(leader_epoch)
        self._log.reset_to(offset, now_ms=self._clock.now_ms())

    def _cut(self, cut: Callable[[], None], done: Done) -> None:
        self._on_durable.clear()
        self._end_spans(StorageError(f"{self.name}: the log is being truncated"))
        self._told = 0
        self._leader_high_watermark = self._leader_log_start = 0
        self._cuts.run(cut, functools.partial(self._cut_ended, done))

    def _cut_ended(self, done: Done, error: RaftlogError | None) -> None:
        self._flushing.catch_up()  # flushes requested before the truncation may not cover what remains
        done(self._ended_by if error is None else error)
