"""A partition on a follower, for one leader epoch: what came is appended as it is, and cut back where the logs part."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from broker.clock import Clock
from broker.flushing import Flushing
from broker.log.partition_log import PartitionLog
from broker.log.transactions import MarkerMissing
from broker.log_cuts import LogCuts
from raftlog.errors import CorruptRecordError, FencedLeaderEpoch, InvalidRequestError, RaftlogError, StorageError
from raftlog.format import parse_header
from replication.divergence import truncation_offset
from replication.ports import Diverging, Done, FetchState

if TYPE_CHECKING:
    from broker.observability.partition_traces import PartitionTraces, ReplicatedSpans

logger = logging.getLogger(__name__)


class Following:
    """One term of a follower; implements `replication.ports.FollowedPartition`.

    Made by `Partition.follow`, ended by `end`: from then on it appends nothing, acks nothing and begins no truncation.
    One that is under way goes on to its end; whoever takes another role waits for that (`LogCuts.idle`).

    The high watermark is what the leader says, as far as this replica holds the log; it never goes back but with the
    log itself.
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
        self.leader_id = leader_id
        self.is_throttled = False
        """Whether `follower.replication.throttled.replicas` names this broker."""
        self._leader_epoch = leader_epoch
        self._log = log
        self._flushing = flushing
        self._cuts = cuts
        self._clock = clock
        self._wake_readers = wake_readers
        self._on_damaged = on_damaged
        self._leader_high_watermark = 0
        self._leader_log_start = 0
        self._on_held: dict[Callable[[int], None], int] = {}
        """Whom to tell, and from which held end on there is nothing more to tell."""
        self._told = 0
        """The largest held end told; the topic's flush config may make it less, but not what was said."""
        self._ended_by: RaftlogError | None = None
        self._traces = traces
        self._count_replicated = count_replicated
        self._spans: deque[ReplicatedSpans] = deque()
        """Of what is appended and not held yet, in order."""

    def begin(self) -> None:
        """Have flushed what an earlier role has left unflushed."""
        self._flushing.catch_up()

    def end(self, reason: RaftlogError) -> None:
        """End the term."""
        self._ended_by = reason
        self._on_held.clear()
        self._end_spans(reason)

    @property
    def topic_id(self) -> bytes:
        """Of the log."""
        return self._log.topic_id

    @property
    def partition(self) -> int:
        """Number in the topic."""
        return self._log.partition

    @property
    def name(self) -> str:
        """Topic and number, for people."""
        return self._name

    @property
    def leader_epoch(self) -> int:
        """The epoch of this term."""
        return self._leader_epoch

    def fetch_state(self) -> FetchState:
        """Return where the log ends now.

        Raises:
            StorageError: that is about to change.
        """
        self._check_uncut()
        bounds = self._log.bounds()
        held = min(self._flushing.held_end_offset, bounds.log_end_offset)
        return FetchState(bounds.log_end_offset, bounds.leader_epochs.latest_epoch, held)

    def _check(self, leader_epoch: int) -> None:
        if self._ended_by is not None:
            raise self._ended_by
        if leader_epoch != self._leader_epoch:
            raise FencedLeaderEpoch(
                f"{self._name}: this broker follows in leader epoch {self._leader_epoch}, not in {leader_epoch}"
            )

    # Records

    def append_replicated(
        self,
        records: bytes | memoryview,
        leader_epoch: int,
        on_held: Callable[[int], None],
        traceparents: Sequence[str] = (),
    ) -> None:
        """Check and append batches as the leader stamped them, see `FollowedPartition`.

        Raises:
            FencedLeaderEpoch, NotLeader: another epoch, or this term is over.
            CorruptRecordError: what came does not check or does not continue the log; what came before it is appended.
            StorageFull, StorageError: it cannot be written now, or this log is to be copied anew.
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
            raise StorageError(f"{self._name}: {error}; it is copied anew") from error  # no damage of the leader's log
        finally:
            if spans is not None:
                self._appended_traced(spans, before, traceparents)
            if log.log_end_offset > before:
                self._count_replicated(len(records), 0)
                self._on_held[on_held] = log.log_end_offset
                if self._flushing.appended():
                    self.held()

    def _appended_traced(self, spans: ReplicatedSpans, begin: int, traceparents: Sequence[str]) -> None:
        assert self._traces is not None, "who has spans traces"
        end = self._log.log_end_offset
        if end == begin:
            spans.end(CorruptRecordError("nothing of it was appended"))
            return
        self._traces.note(begin, end, traceparents)
        spans.appended(begin, end)
        self._spans.append(spans)

    def _end_spans(self, error: RaftlogError | None = None, held_end_offset: int | None = None) -> None:
        """End the spans of what is held by now, or all of them."""
        while self._spans and (held_end_offset is None or self._spans[0].end_offset <= held_end_offset):
            self._spans.popleft().end(error)

    def call_when_held(self, on_held: Callable[[int], None]) -> None:
        """Have `on_held` called for what an earlier role has appended, once it is held; see `FollowedPartition`."""
        if self._ended_by is None and self._flushing.held_end_offset < self._log.log_end_offset:
            self._on_held[on_held] = self._log.log_end_offset

    def _check_uncut(self) -> None:
        if self._cuts.busy:
            raise StorageError(f"{self._name}: the log is being cut; try again")

    def _check_beginning(self, records: bytes | memoryview, leader_epoch: int) -> None:
        """Let an empty log begin with the first batch, where its leader's log start lies within that one.

        Batches are sent whole; those records of it that were deleted are below the log start again with the next marks.

        Raises:
            StorageError: the log begins earlier in a moment.
        """
        log = self._log
        if log.log_end_offset != log.log_start_offset:
            return
        first = parse_header(records)
        if 0 <= first.base_offset < log.log_end_offset < first.next_offset:
            kept = bytes(records)  # asked for from its beginning, the leader would refuse: that is deleted

            def begin() -> None:
                self._start_at(first.base_offset, leader_epoch)
                log.append_stamped(kept, now_ms=self._clock.now_ms(), max_epoch=leader_epoch)

            self._cut(begin, lambda error: None)
            raise StorageError(
                f"{self._name}: the leader's log starts within a batch, at {log.log_end_offset}; "
                f"this one begins with that batch, at {first.base_offset}, in a moment"
            )

    def held(self) -> None:
        """Tell how far the log is held now; after a flush."""
        if self._ended_by is not None or self._cuts.busy:
            return
        held = self._flushing.held_end_offset
        if self._spans:
            self._end_spans(held_end_offset=held)
        self._raise_marks()
        if held < self._told:
            return
        self._told = held
        waiting = list(self._on_held.items())
        for on_held, end_offset in waiting:
            if held >= end_offset:
                del self._on_held[on_held]
        for on_held, _ in waiting:
            on_held(held)

    def take_marks(self, high_watermark: int, log_start_offset: int, leader_epoch: int) -> None:
        """Raise the high watermark, as far as this replica holds the log, and the log start; the rest comes later."""
        if self._ended_by is not None or leader_epoch != self._leader_epoch or self._cuts.busy:
            return
        self._leader_high_watermark = max(self._leader_high_watermark, high_watermark)
        self._leader_log_start = max(self._leader_log_start, log_start_offset)
        self._raise_marks()

    def _raise_marks(self) -> None:
        log = self._log
        high_watermark = min(self._leader_high_watermark, self._flushing.held_end_offset)
        moves = high_watermark > log.high_watermark
        if moves:
            log.high_watermark = high_watermark
        log_start_offset = min(self._leader_log_start, log.high_watermark)
        if log_start_offset > log.log_start_offset:
            log.delete_records(log_start_offset)
            moves = True  # who waits for a transaction to end may be below it now
        if moves:
            self._wake_readers()

    # Where the logs part

    def truncate(self, diverging: Diverging, leader_epoch: int, done: Done) -> None:
        """Drop what the leader does not have, then call `done`; always later."""

        def cut() -> None:
            self._check(leader_epoch)
            log, bounds = self._log, self._log.bounds()
            offset = truncation_offset(bounds.leader_epochs, bounds.log_end_offset, diverging)
            logger.info(
                "log parts from its leader's and is cut",
                extra={
                    "event": "log_truncated",
                    "partition": self._name,
                    "leader_epoch": leader_epoch,
                    "log_end_offset": log.log_end_offset,
                    "offset": offset,
                    "high_watermark": log.high_watermark,
                },
            )
            if offset < log.high_watermark:
                logger.warning(
                    "%s: committed records are cut, from %d to %d: an unclean election, or lost disks",
                    self._name,
                    offset,
                    log.high_watermark,
                )
            if offset >= log.log_start_offset:
                log.truncate_to(offset, now_ms=self._clock.now_ms())
            else:  # nothing here is the leader's; where its log begins it says when it is asked for what is below
                log.reset_to(0, now_ms=self._clock.now_ms())

        self._cut(cut, done)

    def start_over(self, log_start_offset: int, leader_epoch: int, done: Done) -> None:
        """Drop everything and begin at the leader's log start, then call `done`; always later."""

        def cut() -> None:
            if log_start_offset < 0:
                raise InvalidRequestError(f"{self._name}: a log cannot start at {log_start_offset}")
            logger.warning(
                "log lies outside of its leader's and starts over",
                extra={
                    "event": "log_started_over",
                    "partition": self._name,
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
        self._on_held.clear()
        self._end_spans(StorageError(f"{self._name}: the log is being cut"))
        self._told = 0
        self._leader_high_watermark = self._leader_log_start = 0
        self._cuts.run(cut, functools.partial(self._cut_ended, done))

    def _cut_ended(self, done: Done, error: RaftlogError | None) -> None:
        self._flushing.catch_up()  # what stays may wait for a flush that counts no more
        done(self._ended_by if error is None else error)

    @property
    def _name(self) -> str:
        return f"{self._log.topic}-{self._log.partition}"
