"""The roles of a partition on this broker, by what the metadata says; the ground floor of `Partition`.

    partition_roles.py     leads, follows or waits; who is refused, who waits at the end
    partition_replicas.py  what its followers and the controller hear while it leads
    partition.py           produce and fetch

    leading.py             one term as leader: followers, high watermark, answers
    following.py           one term as follower: appends and truncations as the leader says
    flushing.py            flush.messages and flush.ms
    log_cuts.py            truncations off the event loop

Everything here runs on the event loop's thread; only fsync, truncations and reads that miss the page cache leave it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.bugs import report
from broker.clock import Clock
from broker.flushing import Flushing
from broker.following import Following
from broker.leading import Acks, Leading
from broker.lease import Lease
from broker.log.group_commit import GroupCommit
from broker.log.partition_log import PartitionLog
from broker.log_cuts import LogCuts
from raftlog.errors import CorruptRecordError, FencedLeaderEpoch, NotLeader, RaftlogError, UnknownLeaderEpoch
from raftlog.format import InflateLimits
from raftlog.types import NO_LEADER_EPOCH, TopicPartition
from raftmeta.image import INTERNAL_PREFIX
from raftmeta.topic_configs import is_throttled
from replication.leader import Membership
from replication.ports import Wake

if TYPE_CHECKING:
    from broker.observability.partition_traces import PartitionTraces

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Host:
    """What all partitions of a broker share.

    `on_isr_wish` is told of a partition whose follower may join the ISR now, any number of times. `on_suspicion`: of a
    log, and an offset at which somebody got a batch from it that does not check. `on_damaged`: of a log that can only
    be copied anew. `on_term`: of a partition whose term as leader has begun or ended on this broker, in the midst of
    that change. `traces`: returns what makes a partition's spans, None where nothing is traced. `count_replicated`: of
    bytes that came from a leader, and of bytes that were read for a follower; from any thread.
    """

    node_id: int
    group_commit: GroupCommit
    clock: Clock
    lease: Lease
    disk: Executor
    on_storage_error: Callable[[PartitionLog, BaseException], None]
    on_isr_wish: Callable[[PartitionRoles], None]
    on_suspicion: Callable[[PartitionLog, int], None]
    on_damaged: Callable[[PartitionLog, CorruptRecordError], None]
    replica_lag_time_max_ms: float = 10_000.0
    on_term: Callable[[PartitionRoles], None] = lambda partition: None
    traces: Callable[[str, int], PartitionTraces | None] = lambda topic, partition: None
    count_replicated: Callable[[int, int], None] = lambda bytes_in, bytes_out: None


class PartitionRoles:
    """Who leads, and what becomes of those who wait when that changes.

    Roles, by what the metadata says; each change but `close` only forward in leader epochs:
        waiting    -> leading    `lead`: this broker is the leader in an epoch
        waiting    -> following  `follow`: another broker is
        any        -> waiting    `resign`: nobody is
        leading   <-> following  `follow`, `lead`: the term before ends first
        any        -> closed     `close`: its log directory is offline, the topic was deleted, the broker stops; final

    Only a leader with a valid lease appends, answers and is read from; a follower with one is read from by those whom
    the leader sent. A leader without a lease holds what it owes: the answers leave when a lease comes, or turn into
    `NotLeader` when somebody else leads.

    Invariants: log_start_offset <= high_watermark <= held end offset <= log_end_offset; the high watermark goes back
    only where a follower's log is cut below it.
    """

    def __init__(self, log: PartitionLog, host: Host) -> None:
        self.topic_partition = TopicPartition(log.topic, log.partition)
        self.log = log
        self.is_internal = log.topic.startswith(INTERNAL_PREFIX)
        """Whether the topic is raftlog's own: clients may read it, no more."""
        self.traces = host.traces(log.topic, log.partition)
        """What makes the spans of its records; None: this node does not trace."""
        self.leader_epoch: int = NO_LEADER_EPOCH
        self.refused_by: RaftlogError | None = NotLeader(f"{self.topic_partition}: it is not known yet who leads")
        """Why nothing is served here, lease or not; None while this broker leads."""
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
            on_held=self._held,
            on_refused=self._acks.fail,
            on_broken=host.on_storage_error,
        )
        self._cuts = LogCuts(host.disk)
        self._throttled_replicas = ("", "")
        self._throttled: dict[int, bool] = {}
        self.apply_config()

    def apply_config(self) -> None:
        """Take over what the log's config says; called after it changed."""
        self.inflate_limits = InflateLimits(max_bytes=self.log.config.max_inflate_bytes)
        self._flushing.catch_up()
        self._held()

    def throttle(self, leader: str, follower: str) -> None:
        """Take over the topic's `leader.` and `follower.replication.throttled.replicas` (KIP-73)."""
        if (leader, follower) == self._throttled_replicas:
            return
        self._throttled_replicas = (leader, follower)
        self._throttled.clear()
        self._throttle_following()

    def _throttle_following(self) -> None:
        if self._following is not None:
            names = self._throttled_replicas[1]
            self._following.is_throttled = is_throttled(names, self.log.partition, self._host.node_id)

    def is_throttled(self, broker_id: int) -> bool:
        """Whether `leader.replication.throttled.replicas` names this broker's replica."""
        known = self._throttled.get(broker_id)
        if known is None:
            known = self._throttled[broker_id] = is_throttled(
                self._throttled_replicas[0], self.log.partition, broker_id
            )
        return known

    # Roles

    @property
    def leads(self) -> bool:
        """Whether this broker leads, as far as the metadata says."""
        return self._leading is not None

    @property
    def following(self) -> Following | None:
        """The term as a follower, while there is one."""
        return self._following

    @property
    def is_cut(self) -> bool:
        """Whether a truncation is under way, so that no role can begin yet (`settled`)."""
        return self._cuts.busy

    async def settled(self) -> None:
        """Return once no truncation is under way: the next role begins with the log as it then is."""
        while self._cuts.busy:
            await self._cuts.idle()

    def lead(self, leader_epoch: int, membership: Membership) -> bool:
        """Lead in this epoch, or take over newer metadata of it; an older one is passed over. Return whether it is new.

        No truncation may be under way (`settled`). Who has waited for an answer since `resign(keep_waiting=True)` goes
        on waiting: nobody else can have led in between, so the records are in the log of the new epoch as well.
        Everyone else who waits since an earlier epoch hears that it is over.
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
        """Follow `leader_id` in this epoch; an older one is passed over. Return whether this broker has led until now.

        No truncation may be under way (`settled`). Clients are refused with `refusal`, those who wait too.
        """
        if leader_epoch < self.leader_epoch or self._closed_by is not None:
            return False
        self.refused_by = refusal
        following = self._following
        if following is not None and (following.leader_epoch, following.leader_id) == (leader_epoch, leader_id):
            return False
        assert not self._cuts.busy, "a follower says where its log ends, so it has to stay there"
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
        """Neither lead nor follow in this epoch: refuse everything with `reason`; an older epoch is passed over.

        Return whether this broker has led until now.

        `keep_waiting`: nobody else can lead, so what is owed is answered when this broker leads again.
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
        """End the present role, with `refused_by` set first: streams and readers look when they are woken."""
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
        """Stop for good: answer everyone who waits with `reason`, and everyone who comes later too."""
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

    # Marks

    @property
    def log_start_offset(self) -> int:
        """The first offset that can be read."""
        return self.log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        """Exclusive: the offset that the next record gets."""
        return self.log.log_end_offset

    @property
    def high_watermark(self) -> int:
        """Exclusive: consumers see what lies below."""
        return self.log.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """Exclusive end for `read_committed`: below it every transaction is decided; never above the high watermark."""
        return self.log.last_stable_offset

    @property
    def held_end_offset(self) -> int:
        """Exclusive: what this replica counts as held (`Flushing`)."""
        return self._flushing.held_end_offset

    @property
    def pending_acks(self) -> int:
        """How many produces wait to be held by enough replicas. For any thread."""
        return len(self._acks.held) + len(self._acks.committed)

    def _held(self) -> None:
        if self._leading is not None:
            self._leading.held()
        elif self._following is not None:
            self._following.held()

    @property
    def flushes_by_time(self) -> bool:
        """Whether `flush.ms` is set, so that housekeeping has to look often."""
        return self._flushing.by_time

    def housekeep(self) -> None:
        """Do what is due by time: a flush, the rest of a truncation that was refused half-way."""
        if self._closed_by is not None:
            return
        self._flushing.flush_if_due()
        if self.log.has_unfinished_cut and not self._cuts.busy:
            self._cuts.run(self.log.finish_cut, lambda error: None)

    # Who is refused, and who waits

    def check_leader_epoch(self, leader_epoch: int, *, from_follower: bool = False) -> None:
        """Refuse a request whose sender believes in another epoch; -1 means that it does not know.

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
            f"{self.topic_partition}: leader epoch {leader_epoch} is not known here yet, now {self.leader_epoch}"
        )

    def refusal(self, *, from_follower: bool = False) -> RaftlogError | None:
        """Return why this broker serves no readers, lease or not; None when it does.

        `from_follower`: the reader was sent to a replica that need not lead.
        """
        return None if from_follower and self._following is not None else self.refused_by

    def wait(self, wake: Wake, *, from_follower: bool = False) -> None:
        """Call `wake` once, at the next change that a reader at the end would want to know of."""
        self._waiters[wake] = None
        if self.refusal(from_follower=from_follower) is not None:  # since when the reader was on its way here
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
                try:
                    wake()
                except Exception as error:  # a bug of this one: neither the others nor the high watermark shall suffer
                    report(f"{self.topic_partition}: a reader could not be woken", error)
