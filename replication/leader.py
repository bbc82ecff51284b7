"""What a leader decides from what its log and its followers hold: the high watermark, and who is in sync.

The data itself is elsewhere (the log, the streams); this sees offsets, times and epochs only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from raftlog.errors import InvalidRequestError
from replication.high_watermark import high_watermark
from replication.isr import IsrChange, IsrState, Pending
from replication.ports import Replica
from replication.replica_progress import NEVER_MS, ReplicaProgress

NO_LIFE = -1
"""The epoch of no broker: a change with it is refused, unless the partition has changed since."""
RETRY_MS = 200.0
"""Least time between a change of the ISR that was not granted and the next one."""


@dataclass(frozen=True, slots=True)
class Membership:
    """What the metadata says of a partition, as far as its leader needs it.

    `min_insync_replicas` is the larger of what the metadata and this broker's own config say (KAFKA-16540).
    """

    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    partition_epoch: int
    min_insync_replicas: int


class ReplicaView(NamedTuple):
    """One replica as its leader sees it; -1 stands for what has not been heard in this term."""

    broker_id: int
    held_end_offset: int
    lag: int
    last_caught_up_ms: int
    in_sync: bool


class LeaderState:
    """One term of a partition's leader: made when this broker is told that it leads, dropped when it no longer does.

        event                          what it changes
        appended, held                 the leader's own log
        opened, acked, closed, forget  one follower's progress (`replication.replica_progress`)
        update_membership              replicas, committed ISR, min.insync.replicas; ends the pending change
        wanted_isr, proposed, answered the pending change of the ISR (`replication.isr`)

    After each the high watermark is what `replication.high_watermark` says; the caller compares `high_watermark` with
    what it was.

    Invariants:
        high_watermark never goes back, and high_watermark <= log_end_offset
        held_end_offset <= log_end_offset, and no follower holds more than the leader's log has
        the leader is in the committed ISR, the ISR is part of the replicas
        where the high watermark has moved to in this term is held by the whole maximal ISR, at that time
    """

    __slots__ = (
        "_counted",
        "_followers",
        "_high_watermark",
        "_isr",
        "_lag_time_max_ms",
        "_may_commit",
        "_not_before_ms",
        "_now_ms",
        "_retry_ms",
        "epoch_start_offset",
        "held_end_offset",
        "leader_epoch",
        "leader_id",
        "log_end_offset",
        "membership",
    )

    def __init__(
        self,
        *,
        leader_id: int,
        leader_epoch: int,
        epoch_start_offset: int,
        log_end_offset: int,
        held_end_offset: int,
        high_watermark: int,
        membership: Membership,
        now_ms: float,
        lag_time_max_ms: float,
        retry_ms: float = RETRY_MS,
    ) -> None:
        """Begin a term. `high_watermark` is what this broker has heard as a follower, or had checkpointed."""
        self.leader_id = leader_id
        self.leader_epoch = leader_epoch
        self.epoch_start_offset = epoch_start_offset
        """The log end when the term began: everything below was appended by earlier leaders."""
        self.log_end_offset = log_end_offset
        self.held_end_offset = held_end_offset
        """Exclusive: what the leader itself holds durably."""
        self.membership = membership
        self._lag_time_max_ms = lag_time_max_ms
        self._retry_ms = retry_ms
        self._not_before_ms = NEVER_MS
        self._now_ms = now_ms
        self._high_watermark = high_watermark
        self._followers: dict[int, ReplicaProgress] = {}
        self._counted: tuple[ReplicaProgress, ...] = ()
        self._isr = IsrState(frozenset(membership.isr), membership.partition_epoch)
        self._may_commit = False
        self._apply_membership(membership, now_ms)
        self._advance()

    # Marks

    @property
    def high_watermark(self) -> int:
        """Exclusive: what lies below is committed."""
        return self._high_watermark

    @property
    def has_confirmed(self) -> bool:
        """Whether the high watermark has reached this epoch's start, so that it is no longer behind an earlier
        leader's: before that nobody is told where the committed records end (KIP-207)."""
        return self._high_watermark >= self.epoch_start_offset

    @property
    def has_heard_all_in_sync(self) -> bool:
        """Whether everyone who may lead next has shown in this term that its log is a prefix of this one.

        Only then what is not in this log is in none of theirs: until it has opened, a member of the ISR may have more
        from an earlier leader, whatever the high watermark.
        """
        return all(follower.held_end_offset is not None for follower in self._counted)

    @property
    def has_enough_in_sync(self) -> bool:
        """Whether the committed ISR has min.insync.replicas members, so that acks=all may be appended."""
        return len(self._isr.members) >= self.membership.min_insync_replicas

    @property
    def held_by_all(self) -> int:
        """Exclusive: what every assigned replica holds durably, in sync or not; 0 until all were heard in this term."""
        lowest = self.held_end_offset
        for follower in self._followers.values():
            if follower.held_end_offset is None:
                return 0
            lowest = min(lowest, follower.held_end_offset)
        return lowest

    # Who is in sync

    @property
    def isr(self) -> frozenset[int]:
        """The committed ISR."""
        return self._isr.members

    @property
    def maximal_isr(self) -> frozenset[int]:
        """The committed ISR and pending additions: who has to hold a record before it is committed."""
        return self._isr.maximal

    @property
    def isr_is_whole(self) -> bool:
        """Whether every replica is in the committed ISR, so that no acknowledgement can make one join."""
        return len(self._isr.members) == len(self.membership.replicas)

    @property
    def pending(self) -> Pending:
        """What is known of the change of the ISR that was asked for last."""
        return self._isr.pending

    def update_membership(self, membership: Membership, now_ms: float) -> None:
        """Take over newer metadata of the same leader epoch; what has an older partition epoch is passed over.

        With the same partition epoch only min.insync.replicas can be another one.
        """
        if membership.partition_epoch < self.membership.partition_epoch:
            return
        self._apply_membership(membership, now_ms)
        self._advance()

    # The leader's own log

    def appended(self, log_end_offset: int, now_ms: float) -> None:
        """Note that the leader's log ends here now."""
        before = self.log_end_offset
        assert log_end_offset >= before, f"a leader's log does not shrink: {log_end_offset} after {before}"
        self._now_ms = now_ms
        for follower in self._followers.values():
            follower.leader_appended(before, log_end_offset, now_ms)
        self.log_end_offset = log_end_offset
        self._check_invariants()

    def held(self, held_end_offset: int, now_ms: float) -> None:
        """Note that the leader holds everything below this durably; less than before is passed over."""
        self._now_ms = now_ms
        if held_end_offset > self.held_end_offset:
            self.held_end_offset = held_end_offset
            self._advance()

    # Followers

    def opened(self, replica: Replica, held_end_offset: int, now_ms: float) -> None:
        """Begin to count a follower whose log was found to be a prefix of this one.

        With less than it had before in the same life its log has been lost: the high watermark stays, and if the
        follower lacks committed records now, the next `wanted_isr` is without it.

        Raises:
            StaleBrokerEpoch: a later life of this broker has been heard of.
            InvalidRequestError: it is no follower of the partition, or claims to hold what the leader does not have.
        """
        self._now_ms = now_ms
        self._follower(replica).open(replica, held_end_offset, self.log_end_offset, now_ms)
        self._advance()

    def acked(self, replica: Replica, held_end_offset: int, now_ms: float) -> None:
        """Count what a follower holds durably.

        Raises:
            StaleBrokerEpoch: a later life of this broker has been heard of.
            InvalidRequestError: it is no follower, has not opened, holds less than before or more than the leader has.
        """
        self._now_ms = now_ms
        follower = self._followers.get(replica.broker_id) or self._follower(replica)
        if follower.ack(replica, held_end_offset, self.log_end_offset, now_ms):
            self._advance()

    def closed(self, replica: Replica) -> None:
        """Note that a follower's stream is gone; what it holds is remembered, what is not known here passed over."""
        follower = self._followers.get(replica.broker_id)
        if follower is not None:
            follower.close(replica)

    def forget(self, broker_id: int) -> None:
        """Count nothing of a follower until it opens anew, in the same life too: the metadata shows its replica as
        offline, so what it held may be gone. As a member of the ISR it holds the high watermark up meanwhile."""
        follower = self._followers.get(broker_id)
        if follower is not None:
            follower.forget()
            self._check_invariants()

    def progress(self, now_ms: float | None = None) -> tuple[ReplicaView, ...]:
        """Return how far every replica is, the leader first; whoever lacks nothing is caught up now."""
        now_ms = self._now_ms if now_ms is None else now_ms
        end = self.log_end_offset
        views = [ReplicaView(self.leader_id, self.held_end_offset, 0, int(now_ms), True)]
        for follower in self._followers.values():
            held, in_sync = follower.held_end_offset, follower.broker_id in self._isr.members
            if held is None:
                views.append(ReplicaView(follower.broker_id, -1, -1, -1, in_sync))
                continue
            caught_up_ms = now_ms if held == end else follower.last_caught_up_ms
            views.append(
                ReplicaView(
                    follower.broker_id, held, end - held, -1 if caught_up_ms == NEVER_MS else int(caught_up_ms), in_sync
                )
            )
        return tuple(views)

    def follower_lags(self) -> list[tuple[int, int]]:
        """Return (broker id, records it lacks) of each follower that has spoken in this term. For any thread."""
        end = self.log_end_offset
        found = []
        for follower in list(self._followers.values()):
            held = follower.held_end_offset
            if held is not None:
                found.append((follower.broker_id, max(0, end - held)))
        return found

    # Changes of the ISR

    def wanted_isr(self, active: Mapping[int, int], now_ms: float) -> IsrChange | None:
        """Return the change of the ISR that the controller should be asked for now; None: there is none.

        `active`: broker epochs by broker id, of the brokers that are neither fenced nor shutting down. Without the
        leader among them nothing is wanted: its leadership is about to be taken from it.

        - Who lags for longer than replica.lag.time.max.ms leaves, and who lacks committed records.
        - If nobody has to leave, whoever is open in its present life, not lagging, and holds everything up to the
          high watermark and up to this epoch's start joins.
        - Members that are not active are the controller's to drop. They are no reason for a change, but left out of
          one, since the controller refuses to be asked for them.

        What became of a change that was asked for before is not known: the same one again. If a member has lost
        its log since, that waits while it is catching up; if it is not, its place is taken by NO_LIFE of it: that
        cannot be granted, and the refusal speaks for the earlier attempts too.
        """
        self._now_ms = now_ms
        state = self._isr
        if not state.may_propose or self.leader_id not in active:
            return None
        if state.pending is not Pending.NONE and now_ms < self._not_before_ms:
            return None
        if state.change is not None:
            again = self._asked_again(state.change, active)
            if again is not None:
                self._not_before_ms = now_ms + self._retry_ms
            return again
        followers = self._followers.values()
        leaving = {each.broker_id for each in followers if each.broker_id in state.members and self._has_to_leave(each)}
        joining = set[int]()
        if not leaving:
            outside = (each for each in followers if each.broker_id not in state.members)
            joining = {each.broker_id for each in outside if self._may_join(each, active)}
        if not leaving and not joining:
            return None
        self._not_before_ms = now_ms + self._retry_ms
        members = tuple(self._members((state.members - leaving) | joining, active))
        return IsrChange(self.leader_epoch, state.partition_epoch, members)

    def proposed(self, change: IsrChange) -> None:
        """Note that the controller is about to be asked for `change`, so that whom it adds counts from now on.

        In the same step as `wanted_isr`, and before anything is sent. A change made on older metadata is passed over,
        as the controller will do too.
        """
        if change.partition_epoch != self._isr.partition_epoch:
            return
        for member in change.members:
            may_join = member.broker_epoch == NO_LIFE or self._holds_committed(member.broker_id)
            assert may_join, f"{member} lacks committed records, it may not join"
        self._isr.propose(change)
        self._count_members()
        self._check_invariants()

    def answered(self, change: IsrChange, error: BaseException | None) -> None:
        """Take the controller's answer; None: granted. An answer to what is not pending any more is passed over.

        Only a refusal ends the change here; otherwise whom it adds counts until newer metadata has come.
        """
        self._isr.answered(change, error)
        self._count_members()
        self._advance()

    # How

    def _follower(self, replica: Replica) -> ReplicaProgress:
        follower = self._followers.get(replica.broker_id)
        if follower is None:
            if replica.broker_id == self.leader_id:
                raise InvalidRequestError(f"broker {replica.broker_id} leads this partition and cannot follow itself")
            raise InvalidRequestError(
                f"broker {replica.broker_id} has no replica of this partition, "
                f"they are on {list(self.membership.replicas)}"
            )
        return follower

    def _apply_membership(self, membership: Membership, now_ms: float) -> None:
        assert self.leader_id in membership.isr, f"{self.leader_id} leads and is not in sync: {membership}"
        assert set(membership.isr) <= set(membership.replicas), f"in sync without being a replica: {membership}"
        self._now_ms = now_ms
        self.membership = membership
        if self._isr.committed(frozenset(membership.isr), membership.partition_epoch):
            self._not_before_ms = NEVER_MS
        known = self._followers
        self._followers = {
            broker_id: known.get(broker_id) or ReplicaProgress(broker_id)
            for broker_id in membership.replicas
            if broker_id != self.leader_id
        }
        for broker_id in self._isr.members:
            follower = self._followers.get(broker_id)
            if follower is not None and follower.last_caught_up_ms == NEVER_MS:
                follower.give_time(now_ms)
        self._count_members()

    def _count_members(self) -> None:
        """Take over who has to hold a record, and whether there are enough in sync to commit any."""
        maximal = self._isr.maximal
        self._counted = tuple(f for f in self._followers.values() if f.broker_id in maximal)
        enough = min(self.membership.min_insync_replicas, len(self.membership.replicas))
        self._may_commit = len(self._isr.members) >= enough

    def _advance(self) -> None:
        held = [follower.held_end_offset for follower in self._counted]
        held.append(self.held_end_offset)
        self._high_watermark = high_watermark(self._high_watermark, held, may_commit=self._may_commit)
        self._check_invariants()

    def _holds_committed(self, broker_id: int) -> bool:
        """Whether a member does not lack committed records, as far as it has been heard of."""
        follower = self._followers.get(broker_id)
        held = None if follower is None else follower.held_end_offset
        return held is None or held >= self._high_watermark

    def _asked_again(self, change: IsrChange, active: Mapping[int, int]) -> IsrChange | None:
        """Return what to ask for to settle a change in doubt, None: nothing now."""
        members = []
        for member in change.members:
            follower = self._followers.get(member.broker_id)
            if follower is None or self._may_be_asked_for(member):
                members.append(member)
            elif (
                active.get(member.broker_id) == member.broker_epoch == follower.broker_epoch
                and follower.is_open
                and not follower.lags(self.log_end_offset, self._now_ms, self._lag_time_max_ms)
            ):
                return None
            else:
                members.append(Replica(member.broker_id, NO_LIFE))
        return replace(change, members=tuple(members))

    def _may_be_asked_for(self, member: Replica) -> bool:
        """Whether a member of a change in doubt may be in sync still."""
        follower = self._followers.get(member.broker_id)
        if follower is not None and follower.held_end_offset is None and member.broker_id not in self._isr.members:
            return False  # it was open when it was to join, and has been forgotten since
        return member.broker_epoch != NO_LIFE and self._holds_committed(member.broker_id)

    def _has_to_leave(self, follower: ReplicaProgress) -> bool:
        return not self._holds_committed(follower.broker_id) or follower.lags(
            self.log_end_offset, self._now_ms, self._lag_time_max_ms
        )

    def _may_join(self, follower: ReplicaProgress, active: Mapping[int, int]) -> bool:
        """Whether a follower out of sync may join.

        One that lags would have to leave again at once: while the ISR is too small to commit anything, a replica that
        stands still does not fall behind the high watermark.
        """
        held = follower.held_end_offset
        return (
            follower.is_open
            and held is not None
            and held >= self._high_watermark
            and held >= self.epoch_start_offset
            and active.get(follower.broker_id) == follower.broker_epoch
            and not follower.lags(self.log_end_offset, self._now_ms, self._lag_time_max_ms)
        )

    def _members(self, wanted: Set[int], active: Mapping[int, int]) -> Iterator[Replica]:
        """Yield those of `wanted` that the controller accepts, with the epoch that was heard of them."""
        for broker_id in self.membership.replicas:
            broker_epoch = active.get(broker_id)
            if broker_id not in wanted or broker_epoch is None:
                continue
            follower = self._followers.get(broker_id)
            heard = None if follower is None else follower.replica
            if heard is None:
                yield Replica(broker_id, broker_epoch)
            elif heard.broker_epoch >= broker_epoch:
                yield heard

    def _check_invariants(self) -> None:
        assert self._high_watermark <= self.log_end_offset, f"{self._high_watermark} is beyond the log's end"
        assert self.held_end_offset <= self.log_end_offset, f"{self.held_end_offset} is beyond the log's end"
