"""A partition on this broker: who leads it, appends, the high watermark, and who waits for it.

Everything here runs on the event loop's thread; only fsync and reads that miss the page cache leave it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from broker.clock import Clock
from broker.lease import Lease, Wake, without_lease
from broker.log.group_commit import GroupCommit
from broker.log.partition_log import PartitionLog, ReadResult
from raftlog.errors import (
    FencedLeaderEpoch,
    InvalidRequestError,
    MessageTooLarge,
    NotEnoughReplicas,
    NotLeader,
    OffsetOutOfRange,
    RaftlogError,
    UnknownLeaderEpoch,
    UnknownTopicId,
)
from raftlog.format import BatchHeader, Buffer, InflateLimits, validate_produced
from raftlog.types import NO_LEADER_EPOCH, TopicPartition
from replication.pending_acks import Answer, PendingAcks

logger = logging.getLogger(__name__)


class Partition:
    """One partition.

    States, by what the metadata says:
        waiting  -> leading    `lead`: this broker is the leader in an epoch
        leading  -> waiting    `resign`: another broker leads, or nobody
        any      -> closed     `close`: its log directory is offline, the topic was deleted, the broker stops; final

    Only a leader with a valid lease appends, answers and is read from. A leader without one holds what it owes: the
    answers leave when a lease comes, or turn into `NotLeader` when somebody else leads.

    Invariants: log_start_offset <= high_watermark <= held end offset <= log_end_offset; the high watermark never
    goes back.
    """

    def __init__(
        self,
        log: PartitionLog,
        group_commit: GroupCommit,
        clock: Clock,
        lease: Lease,
        *,
        on_storage_error: Callable[[PartitionLog, BaseException], None],
    ) -> None:
        self.topic_partition = TopicPartition(log.topic, log.partition)
        self.log = log
        self.leader_epoch: int = NO_LEADER_EPOCH
        self._isr_size = 0
        self._min_insync_replicas = 1
        self._closed_by: RaftlogError | None = None
        self.refused_by: RaftlogError | None = NotLeader(f"{self.topic_partition}: it is not known yet who leads")
        """Why nothing is served here, lease or not; None while this broker leads."""
        self._group_commit = group_commit
        self._clock = clock
        self._lease = lease
        self._on_storage_error = on_storage_error
        self._pending = PendingAcks()
        self._waiters: dict[Wake, None] = {}
        self._flush_requested_end = log.flushed_end_offset
        self._last_flush_ms = clock.monotonic_ms()
        self._flush_refused = False
        self.apply_config()

    def apply_config(self) -> None:
        """Take over what the log's config says; called after it changed."""
        self.inflate_limits = InflateLimits(max_bytes=self.log.config.max_inflate_bytes)

    # Leadership

    @property
    def leads(self) -> bool:
        """Whether this broker leads, as far as the metadata says."""
        return self.refused_by is None

    def lead(self, leader_epoch: int, isr_size: int, min_insync_replicas: int) -> bool:
        """Lead in this epoch; an older one is passed over. Return whether that is new.

        Who has waited for an answer since an earlier epoch goes on waiting: nobody else has led in between, else
        `resign` had come, so the records are in the log of the new epoch as well.
        """
        if leader_epoch < self.leader_epoch or self._closed_by is not None:
            return False
        is_new = leader_epoch > self.leader_epoch or not self.leads
        self._isr_size = isr_size
        self._min_insync_replicas = min_insync_replicas
        self.leader_epoch = leader_epoch
        self.refused_by = None
        self._advance_high_watermark()
        return is_new

    def resign(self, leader_epoch: int, reason: NotLeader, *, keep_waiting: bool = False) -> bool:
        """Do not lead in this epoch: refuse everything with `reason`; an older epoch is passed over.

        Return whether this broker has led until now.

        `keep_waiting`: nobody else can lead, so what is owed is answered when this broker leads again.
        """
        if leader_epoch < self.leader_epoch or self._closed_by is not None:
            return False
        has_led = self.leads
        self.leader_epoch = leader_epoch
        self.refused_by = reason
        if not keep_waiting:
            self._pending.fail(reason)
        self._wake()
        return has_led

    # Marks

    @property
    def high_watermark(self) -> int:
        """Exclusive: consumers see what lies below."""
        return self.log.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """Exclusive end for `read_committed`; equals the high watermark while there are no transactions."""
        return self.log.high_watermark

    @property
    def held_end_offset(self) -> int:
        """Exclusive: what this replica counts as held. With flush.messages=1 that is what has been fsynced."""
        if self.log.config.flush_messages <= 1:
            return self.log.flushed_end_offset
        return self.log.log_end_offset

    def _advance_high_watermark(self) -> None:
        held = self.held_end_offset
        if held <= self.log.high_watermark or self.refused_by is not None:
            return
        if not self._lease.valid():
            self._lease.call_when_renewed(self._advance_high_watermark)
            return
        self.log.high_watermark = held
        self._pending.advance(held)
        self._wake()

    # Produce

    def check_leader_epoch(self, leader_epoch: int) -> None:
        """Refuse a request whose sender believes in another epoch; -1 means that it does not know.

        Raises:
            FencedLeaderEpoch, UnknownLeaderEpoch: or NotLeader, or the reason why this partition is closed.
        """
        if self.refused_by is not None:
            raise self.refused_by
        if leader_epoch == -1 or leader_epoch == self.leader_epoch:
            return
        if leader_epoch < self.leader_epoch:
            raise FencedLeaderEpoch(
                f"{self.topic_partition}: leader epoch {leader_epoch} is over, it is {self.leader_epoch} now; "
                "refresh metadata"
            )
        raise UnknownLeaderEpoch(
            f"{self.topic_partition}: leader epoch {leader_epoch} is not known here yet, now {self.leader_epoch}"
        )

    def check_serving(self, leader_epoch: int = -1) -> None:
        """Refuse what only a leader with a lease may do, on top of `check_leader_epoch`.

        Raises:
            NotLeader: no lease; and what `check_leader_epoch` raises.
        """
        self.check_leader_epoch(leader_epoch)
        if not self._lease.valid():
            raise without_lease(str(self.topic_partition))

    def check(self, batch: Buffer) -> BatchHeader:
        """Return the header of a batch that may be appended. May run in any thread.

        Raises:
            MessageTooLarge: beyond `max.message.bytes`; and what `validate_produced` raises.
        """
        limit = self.log.config.max_message_bytes
        if len(batch) > limit:
            raise MessageTooLarge(
                f"{self.topic_partition}: the batch has {len(batch)} bytes, max.message.bytes={limit}; "
                "send smaller batches or raise the topic's limit"
            )
        return validate_produced(batch, limits=self.inflate_limits)

    def append(
        self,
        batch: Buffer,
        leader_epoch: int,
        answer: Answer | None,
        *,
        all_replicas: bool = False,
        checked: BatchHeader | None = None,
    ) -> tuple[int, int]:
        """Validate and append one produced batch; return (base offset, log append time in ms or -1).

        `answer` is called once the batch is held as the topic's flush config promises, or with the error that
        came in between; it may be called before this returns. None: nobody waits (acks=0). `all_replicas` (acks=all):
        every in-sync replica must hold it, at least `min.insync.replicas`. `checked`: what `check` returned for it.

        Raises:
            RaftlogError: refused; nothing was appended.
        """
        self.check_serving(leader_epoch)
        if all_replicas and self._isr_size < self._min_insync_replicas:
            raise NotEnoughReplicas(
                f"{self.topic_partition}: {self._isr_size} replicas are in sync, acks=all needs "
                f"min.insync.replicas={self._min_insync_replicas}"
            )
        header = checked or self.check(batch)
        log = self.log
        result = log.append(batch, header, leader_epoch=self.leader_epoch, now_ms=self._clock.now_ms())
        if answer is not None:
            self._pending.wait(result.last_offset + 1, answer)
        self._after_append()
        return result.base_offset, result.timestamp_ms

    def _after_append(self) -> None:
        config = self.log.config
        if config.flush_messages <= 1:
            self._request_flush()
            return
        unflushed = self.log.log_end_offset - self._flush_requested_end
        if unflushed >= config.flush_messages or (
            config.flush_ms is not None and self._clock.monotonic_ms() - self._last_flush_ms >= config.flush_ms
        ):
            self._request_flush()
        self._advance_high_watermark()

    @property
    def flushes_by_time(self) -> bool:
        """Whether `flush.ms` is set, so that housekeeping has to look often."""
        return self.log.config.flush_ms is not None

    def flush_if_due(self) -> None:
        """Ask for a flush when `flush.ms` has passed since the last one, or one was refused; housekeeping calls it."""
        if self._closed_by is not None or self.log.log_end_offset <= self.log.flushed_end_offset:
            return
        flush_ms = self.log.config.flush_ms
        due = flush_ms is not None and self._clock.monotonic_ms() - self._last_flush_ms >= flush_ms
        if due or self._flush_refused:
            self._flush_refused = False
            self._request_flush()

    def _request_flush(self) -> None:
        self._flush_requested_end = self.log.log_end_offset
        self._last_flush_ms = self._clock.monotonic_ms()
        self._group_commit.request(self.log, self._on_flushed, self._on_flush_error)

    def _on_flushed(self, flushed_end_offset: int) -> None:
        self._advance_high_watermark()

    def _on_flush_error(self, error: BaseException) -> None:
        if isinstance(error, RaftlogError) and self._closed_by is None:
            # Judged already: nothing was synced, for a reason that passes (no descriptors), or because the directory
            # is offline, and then this partition is about to be closed. Who waits hears of it; another flush follows.
            self._pending.fail(error)
            self._flush_refused = True
        else:
            self._on_storage_error(self.log, error)

    # Fetch

    def read(self, offset: int, max_bytes: int, end_offset: int, *, blocking: bool) -> ReadResult | None:
        """Return whole batches from `offset` up to `end_offset` (exclusive); None when that would wait for the disk.

        The caller sees to the lease: it asks once more right before the records leave.

        Raises:
            OffsetOutOfRange: below the log start or above `end_offset`.
            NotLeader: or the reason why this partition is closed.
        """
        if self.refused_by is not None:
            raise self.refused_by
        if offset > end_offset or offset < self.log.log_start_offset:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: offset {offset} is out of range, "
                f"the log has {self.log.log_start_offset} to {end_offset}"
            )
        return self.log.read(offset, max_bytes, end_offset, blocking=blocking)

    def wait(self, wake: Wake) -> None:
        """Call `wake` once, at the next change that a reader at the end would want to know of."""
        self._waiters[wake] = None
        if self.refused_by is not None:  # since when the reader was on its way here
            self._wake()

    @property
    def waiting(self) -> int:
        """How many readers wait at the end."""
        return len(self._waiters)

    def stop_waiting(self, wake: Wake) -> None:
        """Forget `wake`, if it still waits."""
        self._waiters.pop(wake, None)

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for wake in waiters:
                wake()

    def delete_target(self, before_offset: int) -> int:
        """Return the log start that `DeleteRecords` asks for; -1 means the high watermark.

        Raises:
            OffsetOutOfRange: above the high watermark.
            InvalidRequestError: negative and not -1.
            NotLeader: or the reason why this partition is closed.
        """
        self.check_serving()
        if before_offset < -1:
            raise InvalidRequestError(f"before_offset {before_offset} is negative; -1 means the high watermark")
        target = self.high_watermark if before_offset == -1 else before_offset
        if target > self.high_watermark:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: cannot delete up to {target}, the high watermark is {self.high_watermark}"
            )
        return target

    # Ends

    def close(self, reason: RaftlogError) -> None:
        """Stop for good: answer everyone who waits with `reason`, and everyone who comes later too."""
        if self._closed_by is not None:
            return
        self._closed_by = self.refused_by = reason
        logger.info("partition closed", extra={"partition": str(self.topic_partition), "reason": str(reason)})
        self._lease.stop_waiting(self._advance_high_watermark)
        self._pending.fail(reason)
        self._wake()


TOPIC_ID_BYTES: Final = 16


def check_topic_id(topic_id: bytes) -> None:
    """Check that a topic id has 16 bytes.

    Raises:
        InvalidRequestError: another length.
    """
    if len(topic_id) != TOPIC_ID_BYTES:
        raise InvalidRequestError(f"a topic id has {TOPIC_ID_BYTES} bytes, this one has {len(topic_id)}")


def unknown_partition(topic_id: bytes, partition: int) -> UnknownTopicId:
    """Return the refusal for a partition that is not here."""
    return UnknownTopicId(
        f"topic id {topic_id.hex()} partition {partition} is not on this broker: deleted, moved, or not created yet"
    )
