"""One partition on this broker: its role by the metadata, produce, fetch, and its followers.

`Partition` is what the gRPC services, the client streams and the coordinators call. It holds what outlives a role (the
log, waiting producers and readers, the flushes) and hands the rest to the present term:

    leader_term.py        `Leading`: followers, high watermark, answers
    follower_term.py      `Following`: appends and truncations as the leader says
    broker/log/flush.py   `Flushing`: flush.messages and flush.ms

    any role  --lead-->    leading
              --follow-->  following
              --resign-->  waiting      neither leads nor follows, refuses everything
              --close-->   closed       for good

The leader epoch never goes back.

Everything runs on the event loop's thread. Only fsyncs, truncations and reads that miss the page cache leave it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from broker.clock import Clock
from broker.log.flush import Flushing, GroupCommit
from broker.log.partition_log import PartitionLog, ReadResult
from broker.log.transactions import NO_COORDINATOR, MarkerFate, decision_epoch
from broker.observability.event_loop import report
from broker.partition.follower_term import Following, LogCuts
from broker.partition.leader_term import Acks, Leading
from broker.quotas.new_producers import AdmitProducer
from broker.server.lease import Lease, without_lease
from raftlog._core.security.acls import INTERNAL_PREFIX
from raftlog._core.traceparent import MAX_TRACES
from raftlog.errors import (
    CorruptRecordError,
    DuplicateSequence,
    FencedLeaderEpoch,
    InternalError,
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidRequestError,
    InvalidTxnState,
    LeaderNotAvailable,
    MessageTooLarge,
    NotLeader,
    OffsetOutOfRange,
    OutOfOrderSequence,
    RaftlogError,
    SequenceError,
    UnknownLeaderEpoch,
)
from raftlog.format import Attributes, BatchHeader, Buffer, InflateLimits, validate_produced
from raftlog.format.control import MAX_PRODUCER_EPOCH, Marker
from raftlog.types import NO_LEADER_EPOCH, TopicPartition
from raftmeta.producer_ids import ProducerOwner
from raftmeta.topic_configs import is_throttled
from replication.high_watermark import Answer
from replication.isr import IsrChange
from replication.leader import Membership, ReplicaView
from replication.leader_epochs import check_prefix
from replication.ports import Diverging, Opening, Replica, Wake

if TYPE_CHECKING:
    from broker.observability.counters import TopicCounters
    from broker.observability.partition_traces import PartitionTraces

logger = logging.getLogger(__name__)

_TRANSACTIONAL: Final = int(Attributes.TRANSACTIONAL)

MarkersAnswer = Callable[[list[RaftlogError | None]], None]
"""Called once with one entry for each marker, in their order; None: the marker is in the log and committed."""


@dataclass(frozen=True, slots=True)
class Host:
    """What all partitions of a broker share.

    on_storage_error   a flush of this log failed
    on_isr_wish        a follower of this partition may join the ISR; called any number of times
    on_suspicion       a reader got an invalid batch of this log at this offset
    on_damaged         this log is damaged and has to be copied anew
    on_chore           the partition has work for `housekeep`, until `needs_housekeeping` says otherwise
    on_term            the partition's term as leader begins or ends; called within that change
    traces             returns what makes a partition's spans, None where nothing is traced
    count_replicated   bytes received from a leader, bytes read for a follower; from any thread
    """

    node_id: int
    group_commit: GroupCommit
    clock: Clock
    lease: Lease
    disk: Executor
    on_storage_error: Callable[[PartitionLog, BaseException], None]
    on_isr_wish: Callable[[Partition], None]
    on_suspicion: Callable[[PartitionLog, int], None]
    on_damaged: Callable[[PartitionLog, CorruptRecordError], None]
    replica_lag_time_max_ms: float = 10_000.0
    on_chore: Callable[[Partition], None] = lambda partition: None
    on_term: Callable[[Partition], None] = lambda partition: None
    traces: Callable[[str, int], PartitionTraces | None] = lambda topic, partition: None
    count_replicated: Callable[[int, int], None] = lambda bytes_in, bytes_out: None


class RecordTruncated(OffsetOutOfRange):
    """What a reader has read was truncated in an unclean election.

    `diverging_offset`: up to here the log may have what the reader has read; beyond it are other records.
    """

    def __init__(self, message: str, diverging_offset: int) -> None:
        super().__init__(message)
        self.diverging_offset = diverging_offset


class PartitionDescription(NamedTuple):
    """What a leader knows of its replicas, its own first."""

    leader_epoch: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    replicas: tuple[ReplicaView, ...]


class ActiveProducer(NamedTuple):
    """What a partition knows of one producer (KIP-664)."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    """-1: nothing was appended in this epoch."""
    last_append_ms: int
    transaction_start_offset: int
    """-1: no transaction is open."""
    transaction_started_ms: int
    """0: no transaction is open."""


class Partition:
    """One partition, as the services and sessions see it; implements `replication.ports.LedPartition`."""

    def __init__(self, log: PartitionLog, host: Host) -> None:
        self.topic_partition = TopicPartition(log.topic, log.partition)
        self.log = log
        self.is_internal = log.topic.startswith(INTERNAL_PREFIX)
        """Whether the topic is raftlog's own; clients may only read it."""
        self.traces = host.traces(log.topic, log.partition)
        """Makes the spans of its records; None: this node does not trace."""
        self.verified_owners: dict[int, tuple[int, ProducerOwner]] = {}
        """By producer id: epoch and owner of a transaction that its coordinator has confirmed; see `ProducerChecks`."""
        self.leader_epoch: int = NO_LEADER_EPOCH
        self.refused_by: RaftlogError | None = NotLeader(f"{self.topic_partition}: its leader is not known yet")
        """Why this broker serves no clients, lease or not; None while it leads."""
        self._closed_by: RaftlogError | None = None
        self._host = host
        self._clock = host.clock
        self._lease = host.lease
        self._leading: Leading | None = None
        self._following: Following | None = None
        self._acks = Acks()
        self._waiters: dict[Wake, None] = {}
        self._flushing = Flushing(
            log,
            host.group_commit,
            host.clock,
            on_durable=self._on_durable,
            on_refused=self._flush_refused,
            on_broken=host.on_storage_error,
        )
        self._cuts = LogCuts(host.disk, self._look_for_chores)
        self._throttled_replicas = ("", "")
        self.is_throttled = False
        """Whether `leader.replication.throttled.replicas` names this broker."""
        self.apply_config()

    def apply_config(self) -> None:
        """Adopt the log's config; called after it changed."""
        self.inflate_limits = InflateLimits(max_bytes=self.log.config.max_inflate_bytes)
        self._flushing.catch_up()
        self._on_durable()
        self._look_for_chores()

    # Roles

    @property
    def leads(self) -> bool:
        """Whether this broker leads, by the metadata that it knows."""
        return self._leading is not None

    @property
    def following(self) -> Following | None:
        """The present term as a follower; None in another role."""
        return self._following

    @property
    def is_cut(self) -> bool:
        """Whether a truncation is under way, so that no role can begin yet (`settled`)."""
        return self._cuts.busy

    async def settled(self) -> None:
        """Return once no truncation is under way; the next role begins with the log as it is then."""
        while self._cuts.busy:
            await self._cuts.idle()

    def lead(self, leader_epoch: int, membership: Membership) -> bool:
        """Lead in this epoch, or adopt newer metadata of it; return whether the epoch is new. Older epochs are ignored.

        No truncation may be under way (`settled`). Produces that wait since `resign(keep_waiting=True)` go on waiting:
        no other broker can have led in between, so their records are in the log of the new epoch as well. Every other
        produce that waits since an earlier epoch fails.
        """
        if leader_epoch < self.leader_epoch or self._closed_by is not None:
            return False
        if self._leading is not None and leader_epoch == self.leader_epoch:
            self._leading.update_membership(membership)
            return False
        assert not self._cuts.busy, "a leader's log does not shrink"
        over = NotLeader(f"{self.topic_partition}: leader epoch {leader_epoch} has begun; refresh metadata")
        self._end_term(over)
        if len(membership.replicas) > 1:
            self._acks.fail(over)
        self.leader_epoch = leader_epoch
        self.refused_by = None
        self._leading = Leading(
            self.log,
            self._flushing,
            self._clock,
            self._lease,
            self._acks,
            leader_id=self._host.node_id,
            leader_epoch=leader_epoch,
            membership=membership,
            lag_time_max_ms=self._host.replica_lag_time_max_ms,
            wake_readers=self._wake,
        )
        self._leading.begin()
        self._wake()
        self._host.on_term(self)
        return True

    def follow(self, leader_epoch: int, leader_id: int, refusal: NotLeader) -> bool:
        """Follow `leader_id` in this epoch; return whether this broker has led until now. Older epochs are ignored.

        No truncation may be under way (`settled`). Clients, waiting ones too, are refused with `refusal`.
        """
        if leader_epoch < self.leader_epoch or self._closed_by is not None:
            return False
        self.refused_by = refusal
        following = self._following
        if following is not None and (following.leader_epoch, following.leader_id) == (leader_epoch, leader_id):
            return False
        assert not self._cuts.busy, "a follower reports its log end, which must not move meanwhile"
        has_led = self._end_term(refusal)
        self.leader_epoch = leader_epoch
        self._following = Following(
            self.log,
            self._flushing,
            self._cuts,
            self._clock,
            leader_id=leader_id,
            leader_epoch=leader_epoch,
            wake_readers=self._wake,
            on_damaged=self._host.on_damaged,
            traces=self.traces,
            count_replicated=self._host.count_replicated,
        )
        self._throttle_following()
        self._acks.fail(refusal)
        self._following.begin()
        self._wake()
        return has_led

    def resign(self, leader_epoch: int, reason: NotLeader, *, keep_waiting: bool = False) -> bool:
        """Neither lead nor follow in this epoch, and refuse everything with `reason`. Older epochs are ignored.

        Return whether this broker has led until now. `keep_waiting`: no other broker can lead, so waiting produces are
        answered once this broker leads again.
        """
        if leader_epoch < self.leader_epoch or self._closed_by is not None:
            return False
        has_led = self._end_term(reason)
        self.leader_epoch = leader_epoch
        self.refused_by = reason
        if not keep_waiting:
            self._acks.fail(reason)
        self._wake()
        return has_led

    def _end_term(self, reason: RaftlogError) -> bool:
        """End the present role; return whether it was the leader's.

        Sets `refused_by` first, because streams and readers read it when they are woken.
        """
        leading, self._leading = self._leading, None
        following, self._following = self._following, None
        if leading is not None or following is not None:
            self.refused_by = reason
        if following is not None:
            following.end(reason)
        if leading is not None:
            leading.end()
            self._host.on_term(self)
        return leading is not None

    def close(self, reason: RaftlogError) -> None:
        """Stop for good: refuse all waiting and all later requests with `reason`."""
        if self._closed_by is not None:
            return
        self._closed_by = self.refused_by = reason
        self._flushing.closed = True
        logger.info(
            "partition closed",
            extra={"event": "partition_closed", "partition": str(self.topic_partition), "reason": str(reason)},
        )
        self._end_term(reason)
        self._acks.fail(reason)
        self._wake()

    # Refusals

    def refusal(self, *, from_follower: bool = False) -> RaftlogError | None:
        """Return why this broker serves no readers, lease or not; None when it does.

        `from_follower`: the reader accepts a replica that does not lead.
        """
        return None if from_follower and self._following is not None else self.refused_by

    def check_leader_epoch(self, leader_epoch: int, *, from_follower: bool = False) -> None:
        """Refuse a request for another leader epoch; -1: the sender does not know the epoch.

        Raises:
            FencedLeaderEpoch, UnknownLeaderEpoch: or NotLeader, or the reason why this partition is closed.
        """
        refusal = self.refusal(from_follower=from_follower)
        if refusal is not None:
            raise refusal
        if leader_epoch == -1 or leader_epoch == self.leader_epoch:
            return
        if leader_epoch < self.leader_epoch:
            raise FencedLeaderEpoch(
                f"{self.topic_partition}: leader epoch {leader_epoch} is over, it is {self.leader_epoch} now; "
                "refresh metadata"
            )
        raise UnknownLeaderEpoch(
            f"{self.topic_partition}: leader epoch {leader_epoch} is not known here yet, "
            f"the newest is {self.leader_epoch}; try again"
        )

    def check_serving(self, leader_epoch: int = -1) -> None:
        """Refuse what only a leader with a lease may do.

        Raises:
            NotLeader: no lease; and what `check_leader_epoch` raises.
        """
        self.check_leader_epoch(leader_epoch)
        if not self._lease.valid():
            raise without_lease(str(self.topic_partition))

    def check_append(self, leader_epoch: int) -> None:
        """Refuse what `append` with `all_replicas` would refuse now, whatever the batch.

        Raises:
            NotLeader: no lease; and what `check_leader_epoch` raises.
            NotEnoughReplicas: fewer are in sync than min.insync.replicas.
        """
        self.check_serving(leader_epoch)
        leading = self._led()
        if not leading.has_enough_in_sync:
            raise leading.not_enough()

    def check_confirmed(self) -> None:
        """Refuse to say where the committed records end before this term's high watermark is known (KIP-207).

        Raises:
            LeaderNotAvailable: an earlier leader may have told clients a larger high watermark.
        """
        if self._leading is not None and not self._leading.has_confirmed:
            raise LeaderNotAvailable(
                f"{self.topic_partition}: the leader of epoch {self.leader_epoch} is new, and the replicas in sync "
                "have not confirmed yet how far the committed records go; try again"
            )

    def _led(self) -> Leading:
        if self._leading is None:
            assert self.refused_by is not None, "a partition without a leading term refuses"
            raise self.refused_by
        return self._leading

    # Offsets and durability

    @property
    def log_start_offset(self) -> int:
        return self.log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        """Exclusive: the offset that the next record gets."""
        return self.log.log_end_offset

    @property
    def high_watermark(self) -> int:
        """Exclusive: consumers see the records below it."""
        return self.log.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """Exclusive end for `read_committed`: below it every transaction is decided; never above the high watermark."""
        return self.log.last_stable_offset

    @property
    def durable_end_offset(self) -> int:
        """Exclusive: what this replica counts as durable (`Flushing`)."""
        return self._flushing.durable_end_offset

    @property
    def pending_acks(self) -> int:
        """How many produces wait until enough replicas hold them durably. For any thread."""
        return len(self._acks.durable) + len(self._acks.committed)

    @property
    def flushes_by_time(self) -> bool:
        """Whether `flush.ms` is set, so that housekeeping has to run often."""
        return self._flushing.by_time

    @property
    def needs_housekeeping(self) -> bool:
        """Whether `housekeep` has, or may come to have, something to do."""
        return self._closed_by is None and (
            self._flushing.by_time or self._flushing.was_refused or self.log.has_unfinished_cut
        )

    def _look_for_chores(self) -> None:
        if self.needs_housekeeping:
            self._host.on_chore(self)

    def _flush_refused(self, error: RaftlogError) -> None:
        self._look_for_chores()
        self._acks.fail(error)

    def housekeep(self) -> None:
        """Do what is due by time: a flush, or the rest of a truncation that was interrupted."""
        if self._closed_by is not None:
            return
        self._flushing.flush_if_due()
        if self.log.has_unfinished_cut and not self._cuts.busy:
            self._cuts.run(self.log.finish_cut, lambda error: None)

    def _on_durable(self) -> None:
        if self._leading is not None:
            self._leading.on_durable()
        elif self._following is not None:
            self._following.on_durable()

    # Produce

    def check(self, batch: Buffer) -> BatchHeader:
        """Return the header of a batch that may be appended. May run in any thread.

        Raises:
            MessageTooLarge: beyond `max.message.bytes`.
            RaftlogError: as `validate_produced`, among them a record without key in a compacted topic.
        """
        limit = self.log.config.max_message_bytes
        if len(batch) > limit:
            raise MessageTooLarge(
                f"{self.topic_partition}: the batch has {len(batch)} bytes, max.message.bytes={limit}; "
                "send smaller batches or raise the topic's limit"
            )
        return validate_produced(batch, limits=self.inflate_limits, needs_keys=self.log.config.compacts)

    def append(
        self,
        batch: Buffer,
        leader_epoch: int,
        answer: Answer | None,
        *,
        all_replicas: bool = False,
        checked: BatchHeader | None = None,
        session_epoch: int = -1,
        admit_producer: AdmitProducer | None = None,
    ) -> tuple[int, int]:
        """Validate and append one produced batch; return (base offset, log append time in ms or -1).

        A batch of an idempotent producer that is in the log already is not appended again: the result is that of the
        first time, and `answer` is called once that first one is durable as asked.

        `answer` is called once: with None when the batch is durable as asked, else with the error; perhaps before this
        method returns. `answer` None: acks=0. `all_replicas` (acks=all): durable means that the high watermark passed
        the batch, with at least `min.insync.replicas` in sync; else that this replica counts it as durable by the
        topic's flush config. `checked`: what `check` returned for the batch. `session_epoch`: as for
        `ProducerStates.check`. `admit_producer`: called before the first batch of a producer id that this partition
        does not know; it raises to refuse the batch. What it returns is called when that batch is appended.

        Raises:
            NotEnoughReplicas: fewer are in sync with `all_replicas`; nothing was appended.
            LeaderNotAvailable: an earlier batch is missing here, and this leader cannot say yet whether it is lost.
            OutOfOrderSequence, UnknownProducerId: it is lost or was deleted; no later leader can have it either.
            InvalidProducerEpoch, InvalidTxnState: the batch belongs to no transaction that can be open here now.
            InvalidRecord: transactional, but without `all_replicas`, or in an internal topic.
            RaftlogError: refused otherwise; nothing was appended.
        """
        leading = self._leading
        if leading is None or leader_epoch != self.leader_epoch or not self._lease.valid():
            self.check_serving(leader_epoch)
            leading = self._led()
        if all_replicas and not leading.has_enough_in_sync:
            raise leading.not_enough()
        header = checked or self.check(batch)
        now_ms = self._clock.now_ms()
        has_begun: Callable[[], None] | None = None
        if header.producer_id >= 0:
            if header.attributes & _TRANSACTIONAL and (self.is_internal or not all_replicas):
                why = (
                    "an internal topic has no transactions"
                    if self.is_internal
                    else "a transactional batch needs acks=all: committed records must not be lost"
                )
                raise InvalidRecord(f"{self.topic_partition}: {why}")
            found = self._appended_before(
                leading, header, now_ms, answer, all_replicas=all_replicas, session_epoch=session_epoch
            )
            if found is not None:
                return found
            if admit_producer is not None and self.log.producers.get(header.producer_id) is None:
                has_begun = admit_producer()
        result = self.log.append(batch, header, leader_epoch=self.leader_epoch, now_ms=now_ms)
        if has_begun is not None:
            has_begun()
        leading.appended(result.last_offset + 1, answer, all_replicas=all_replicas)
        return result.base_offset, result.timestamp_ms

    def _appended_before(
        self,
        leading: Leading,
        header: BatchHeader,
        now_ms: int,
        answer: Answer | None,
        *,
        all_replicas: bool,
        session_epoch: int,
    ) -> tuple[int, int] | None:
        """Return the result for a batch of an idempotent producer that is in the log already; None: append it.

        After a refusal the producer gives its unacknowledged batches new numbers (docs/adr/0012), so the refusal has
        to hold for every later leader as well.
        """
        try:
            duplicate = self.log.check_producer(header, now_ms, session_epoch)
        except DuplicateSequence as refusal:
            return self._appended_long_before(leading, header, refusal, answer, all_replicas=all_replicas)
        except (SequenceError, InvalidProducerEpoch, InvalidTxnState) as refusal:
            if not leading.may_deny:
                raise LeaderNotAvailable(
                    f"{self.topic_partition}: {refusal}; the leader of epoch {self.leader_epoch} is new, and a replica "
                    "in sync may have the missing batch; try again"
                ) from None
            if not isinstance(refusal, InvalidTxnState):  # for which a producer does not number its batches anew
                leading.deny(header.producer_id, header.producer_epoch)
            raise type(refusal)(f"{self.topic_partition}: {refusal}") from None
        if duplicate is None:
            if leading.has_denied(header.producer_id, header.producer_epoch):
                raise OutOfOrderSequence(
                    f"{self.topic_partition}: a batch of producer id {header.producer_id} was missing, and its epoch "
                    f"{header.producer_epoch} has ended with that; begin the next one with sequence 0"
                )
            return None
        if answer is not None:
            leading.repeated(duplicate.last_offset + 1, answer, all_replicas=all_replicas)
        return duplicate.base_offset, duplicate.timestamp_ms

    def _appended_long_before(
        self,
        leading: Leading,
        header: BatchHeader,
        refusal: DuplicateSequence,
        answer: Answer | None,
        *,
        all_replicas: bool,
    ) -> tuple[int, int]:
        """Answer with DuplicateSequence, for a batch whose offset is no longer known.

        The answer waits until all batches of its producer are durable as asked.
        """
        # Housekeeping may have forgotten the producer since: then everything in the log has to be durable.
        state = self.log.producers.get(header.producer_id)
        end_offset = self.log.log_end_offset if state is None else state.last_offset + 1
        error = DuplicateSequence(f"{self.topic_partition}: {refusal}")
        if answer is None:
            raise error from None

        def done(failure: BaseException | None) -> None:
            assert answer is not None
            answer(error if failure is None else failure)

        leading.repeated(end_offset, done, all_replicas=all_replicas)
        return -1, -1

    # Transaction markers and producers

    def append_markers(self, markers: Sequence[Marker], leader_epoch: int, answer: MarkersAnswer) -> None:
        """Append one control batch with the markers that apply, and call `answer` once all are committed.

        `answer` gets one entry for each marker, perhaps before this method returns:

            None                   in the log, from now or from before (then nothing is appended)
            InvalidProducerEpoch   of a transaction that ended before the producer's last one did (KIP-890)
            InvalidTxnState        contradicts the marker that has ended the transaction here
            BrokerOverloaded       the partition cannot remember another producer id now
            another error          it is not known whether the marker is committed; append it again

        `leader_epoch` -1: in any epoch.

        Raises:
            NotLeader, NotEnoughReplicas: as `check_append`; nothing was appended, and `answer` is not called.
            InvalidRequestError: an invalid producer id or epoch, or an internal topic; likewise.
            StorageFull, StorageError: likewise.
        """
        if self.is_internal:
            raise InvalidRequestError(f"{self.topic_partition}: an internal topic has no transactions")
        for marker in markers:
            if marker.producer_id < 0 or not 0 <= marker.producer_epoch <= MAX_PRODUCER_EPOCH:
                raise InvalidRequestError(
                    f"{self.topic_partition}: producer id {marker.producer_id} with epoch {marker.producer_epoch} "
                    f"has no transactions; ids are not negative, epochs lie between 0 and {MAX_PRODUCER_EPOCH}"
                )
        self.check_append(leader_epoch)
        leading, now_ms = self._led(), self._clock.now_ms()
        fates = self.log.check_markers(markers, now_ms)
        errors = [fate if isinstance(fate, RaftlogError) else None for fate in fates]

        def done(failure: BaseException | None) -> None:
            if failure is None:
                answer(errors)
                return
            if not isinstance(failure, RaftlogError):
                failure = InternalError(f"{type(failure).__name__}: {failure}")
            answer([failure] * len(markers))

        fresh = [marker for marker, fate in zip(markers, fates, strict=True) if fate is MarkerFate.APPENDED]
        if fresh:
            result = self.log.append_markers(fresh, leader_epoch=self.leader_epoch, now_ms=now_ms)
            leading.appended(result.last_offset + 1, done, all_replicas=True)
        else:  # in the log already, at offsets that are not kept
            leading.repeated(self.log.log_end_offset, done, all_replicas=True)

    def abort_hanging(
        self, producer_id: int, producer_epoch: int, start_offset: int, answer: Callable[[RaftlogError | None], None]
    ) -> None:
        """Abort exactly this transaction, which no coordinator knows (KIP-664).

        `answer` gets None once the marker is committed, else the reason why that is not known.

        Raises:
            InvalidTxnState: no such transaction is open here.
            NotLeader, NotEnoughReplicas, StorageFull, StorageError: as `append_markers`.
        """
        self.check_append(-1)
        found = self.log.producers.transactions.get(producer_id)
        if found is None or (found.epoch, found.first_offset) != (producer_epoch, start_offset):
            there = "none is open" if found is None else f"epoch {found.epoch} from offset {found.first_offset} on is"
            raise InvalidTxnState(
                f"{self.topic_partition}: no transaction of producer id {producer_id} with epoch {producer_epoch} from "
                f"offset {start_offset} on is open here, {there}; describe the partition's producers again"
            )
        marker = Marker(producer_id, decision_epoch(producer_epoch), commit=False, coordinator_epoch=NO_COORDINATOR)
        self.append_markers([marker], -1, lambda errors: answer(errors[0]))

    def describe_producers(self) -> list[ActiveProducer]:
        """Return what this replica knows of its producers, the longest idle first. May run in any thread."""
        return [
            ActiveProducer(
                producer_id,
                state.epoch,
                state.last_sequence,
                state.last_append_ms,
                state.first_offset,
                state.started_ms,
            )
            for producer_id, state in self.log.producers_now()
        ]

    # Fetch

    def check_position(self, offset: int, last_fetched_epoch: int, *, from_follower: bool = False) -> None:
        """Refuse a reader whose last record was truncated since (KIP-320).

        `offset`: the next one that it reads; `last_fetched_epoch`: the leader epoch of its last record, -1: unknown.

        Raises:
            RecordTruncated: says where the logs part. A follower decides this below its own high watermark only.
            UnknownLeaderEpoch: a later leader, which this broker does not know of yet, gave the reader its record.
        """
        if last_fetched_epoch < 0 or offset < 0:  # nothing was read; `read` refuses invalid offsets
            return
        if last_fetched_epoch > self.leader_epoch:
            raise UnknownLeaderEpoch(
                f"{self.topic_partition}: a record of leader epoch {last_fetched_epoch} was read; "
                f"this broker knows of epoch {self.leader_epoch}"
            )
        start, end, epochs = self.log.bounds()
        # A follower's records above its high watermark may be uncommitted, and truncated later.
        if from_follower and offset > (end if self.leads else self.high_watermark):
            return
        found = check_prefix(epochs, start, end, offset, last_fetched_epoch)
        if isinstance(found, Diverging):
            raise RecordTruncated(
                f"{self.topic_partition}: the record before offset {offset} is not the one of leader epoch "
                f"{last_fetched_epoch} that was read: it was truncated in an unclean election; the log has epoch "
                f"{found.leader_epoch} up to offset {found.end_offset}",
                min(offset, found.end_offset),
            )

    def read(
        self, offset: int, max_bytes: int, end_offset: int, *, blocking: bool, from_follower: bool = False
    ) -> ReadResult | None:
        """Return whole batches from `offset` up to `end_offset` (exclusive); None when that would wait for the disk.

        Above `end_offset`, but not above what may have been committed, the result is empty: an earlier leader has told
        the reader a larger high watermark, and this replica's catches up. The caller checks the lease, once more right
        before the records leave.

        Raises:
            OffsetOutOfRange: below the log start, or above everything that may have been committed.
            NotLeader: or the reason why this partition is closed; a follower refers to its leader below its log start.
        """
        refusal = self.refusal(from_follower=from_follower)
        if refusal is not None:
            raise refusal
        log, leading = self.log, self._leading
        if offset < log.log_start_offset and leading is None and self.refused_by is not None:
            raise self.refused_by
        if offset > end_offset and (leading is None or not leading.has_confirmed or offset <= log.log_end_offset):
            return ReadResult(b"", offset)
        if offset > end_offset or offset < log.log_start_offset:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: offset {offset} is out of range, "
                f"the log has {log.log_start_offset} to {end_offset}"
            )
        return log.read(offset, max_bytes, end_offset, blocking=blocking)

    def wait(self, wake: Wake, *, from_follower: bool = False) -> None:
        """Call `wake` once, at the next change that concerns a reader at the end of the log."""
        self._waiters[wake] = None
        if self.refusal(from_follower=from_follower) is not None:  # the role changed after the reader looked
            self._wake()

    def stop_waiting(self, wake: Wake) -> None:
        """Forget `wake`, if it still waits."""
        self._waiters.pop(wake, None)

    @property
    def waiting(self) -> int:
        """How many readers wait at the end."""
        return len(self._waiters)

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for wake in waiters:
                try:
                    wake()
                except Exception as error:  # a bug of this reader, which must not stop others or the high watermark
                    report(f"{self.topic_partition}: a reader could not be woken", error)

    def nearer_replica(self, nearby: Collection[int]) -> int | None:
        """Return a follower among `nearby` that is in sync and has every committed record (KIP-392), or None."""
        if self._leading is None or self._host.node_id in nearby:
            return None
        for replica in self._leading.progress():
            if replica.in_sync and replica.broker_id in nearby and replica.durable_end_offset >= self.high_watermark:
                return replica.broker_id
        return None

    def suspect(self, offset: int) -> None:
        """Have the log checked at an offset where a reader got an invalid batch. Returns at once."""
        if self._closed_by is None:
            self._host.on_suspicion(self.log, offset)

    # DeleteRecords

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

    def is_deleted_in_sync(self, offset: int) -> bool:
        """Whether every replica in sync has said that its log starts at `offset` or above.

        Raises:
            NotLeader: or the reason why this partition is closed.
        """
        return self._led().is_deleted_in_sync(offset)

    def log_start_moved(self) -> None:
        """Tell the followers, and readers that wait below the new log start."""
        if self._leading is not None:
            self._leading.wake_streams()
            self._wake()

    # Followers, while this broker leads; `replication.ports.LedPartition` has the contracts

    def open_replica(
        self,
        replica: Replica,
        *,
        leader_epoch: int,
        fetch_offset: int,
        last_fetched_epoch: int,
        durable_end_offset: int,
        on_change: Wake,
    ) -> Opening:
        if leader_epoch < 0:
            raise InvalidRequestError(
                f"{self.topic_partition}: a follower knows its leader epoch, {leader_epoch} is none"
            )
        self.check_leader_epoch(leader_epoch)
        opening = self._led().open_replica(replica, fetch_offset, last_fetched_epoch, durable_end_offset, on_change)
        self._look_at_isr(replica)
        return opening

    def close_replica(self, replica: Replica, on_change: Wake) -> None:
        if self._leading is not None:
            self._leading.close_replica(replica, on_change)

    def check_open(self, on_change: Wake) -> None:
        self._led().check_open(on_change)

    def replica_acked(
        self, replica: Replica, on_change: Wake, durable_end_offset: int, log_start_offset: int = 0
    ) -> None:
        self._led().replica_acked(replica, on_change, durable_end_offset, log_start_offset)
        self._look_at_isr(replica)

    def read_for_replica(self, on_change: Wake, offset: int, max_bytes: int, *, blocking: bool) -> ReadResult | None:
        try:
            read = self._led().read_for_replica(on_change, offset, max_bytes, blocking=blocking)
        except CorruptRecordError:
            self._host.on_suspicion(self.log, offset)
            raise
        if read is not None:
            self._host.count_replicated(0, len(read.records))
        return read

    @property
    def flush_ms(self) -> float:
        return self.log.log_dir.flush_ms if self.log.flush_messages <= 1 else 0.0

    def is_live(self, broker_id: int) -> bool:
        return self._leading is not None and broker_id in self._leading.state.isr

    def throttle(self, leader: str, follower: str) -> None:
        """Adopt the topic's `leader.` and `follower.replication.throttled.replicas` (KIP-73)."""
        if (leader, follower) == self._throttled_replicas:
            return
        self._throttled_replicas = (leader, follower)
        self.is_throttled = is_throttled(leader, self.log.partition, self._host.node_id)
        self._throttle_following()

    def _throttle_following(self) -> None:
        if self._following is not None:
            names = self._throttled_replicas[1]
            self._following.is_throttled = is_throttled(names, self.log.partition, self._host.node_id)

    def replicas_offline(self, broker_ids: frozenset[int]) -> None:
        """Forget what these replicas hold: by the metadata they have no working log."""
        if self._leading is not None:
            self._leading.replicas_offline(broker_ids)

    @property
    def has_offline_replicas(self) -> bool:
        """Whether the last call of `replicas_offline` named any."""
        return self._leading is not None and bool(self._leading.offline)

    @property
    def durable_on_all(self) -> int:
        """Exclusive: what every assigned replica holds durably; 0: not known, or this broker does not lead."""
        return 0 if self._leading is None else self._leading.state.durable_on_all

    def follower_lags(self) -> list[tuple[int, int]]:
        """Return (broker id, records it lacks) of each follower; none while another broker leads. For any thread."""
        leading = self._leading
        return [] if leading is None else leading.state.follower_lags()

    def describe_replicas(self) -> PartitionDescription:
        """Return what this leader knows of its replicas.

        Raises:
            NotLeader: or the reason why this partition is closed.
        """
        progress = self._led().progress()
        return PartitionDescription(
            self.leader_epoch, self.log_start_offset, self.high_watermark, self.log_end_offset, progress
        )

    # The ISR, while this broker leads

    @property
    def isr(self) -> frozenset[int]:
        """The committed ISR that this leader knows; empty while another broker leads."""
        return frozenset() if self._leading is None else self._leading.state.isr

    def _look_at_isr(self, replica: Replica) -> None:
        if self._leading is not None and replica.broker_id not in self._leading.state.isr:
            self._host.on_isr_wish(self)

    def wanted_isr(self, active: Mapping[int, int], full: Set[int] = frozenset()) -> IsrChange | None:
        """Return the change of the ISR to propose to the controller now; it is pending from this call on.

        `active`: broker epochs by broker id, of brokers neither fenced nor shutting down. `full`: brokers whose disk is
        full.
        """
        return None if self._leading is None else self._leading.wanted_isr(active, full)

    def isr_answered(self, change: IsrChange, error: BaseException | None) -> None:
        """Take the controller's answer; None: granted."""
        if self._leading is not None:
            self._leading.isr_answered(change, error)


def append_for_client(
    partition: Partition,
    counted: TopicCounters,
    traceparents: Sequence[str],
    batch: Buffer,
    leader_epoch: int,
    answer: Answer | None,
    *,
    all_replicas: bool,
    checked: BatchHeader | None,
    admit_producer: AdmitProducer,
    session_epoch: int = -1,
) -> tuple[int, int]:
    """Append a batch as `Partition.append` does, with the spans of its records, and count it for its topic."""
    end_offset = partition.log_end_offset
    append = partition.append
    if partition.traces is not None and traceparents:
        append = partial(partition.traces.append, partition, traceparents[:MAX_TRACES])
    try:
        result = append(
            batch,
            leader_epoch,
            answer,
            all_replicas=all_replicas,
            checked=checked,
            session_epoch=session_epoch,
            admit_producer=admit_producer,
        )
    except RaftlogError:
        counted.failed_produces += 1
        raise
    appended = partition.log_end_offset - end_offset  # 0 for a batch that was in the log already
    counted.records_in += appended
    counted.bytes_in += len(batch) if appended else 0
    return result
