"""What a leader decides from the progress of its log and its followers: the high watermark and the ISR. Pure.

`LeaderState` is one term of a leader. `ReplicaProgress` is what it knows of one follower: its life, how much it holds,
and when it last held everything. Both see only offsets, times and epochs; the records are in the log and the streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from raftlog.errors import InvalidRequestError, StaleBrokerEpoch
from replication.high_watermark import high_watermark
from replication.isr import IsrChange, IsrState, Pending
from replication.ports import Replica

NEVER_MS = float("-inf")
"""A time before all others."""
FULL_LAG_TIME_MAX_MS: Final = 500.0
"""How long a follower whose disk is full may lag, if replica.lag.time.max.ms is longer: waiting does not help."""


class ReplicaProgress:
    """One follower, in one term of its leader.

    States, and what moves between them:

        unheard     -> open    `open`: its log is a prefix of the leader's
        open, shut  -> open    `open` again: sets what it holds, lower too (its log was lost)
        open        -> open    `ack` raises what it holds
        open        -> shut    `close`: its stream is gone
        open, shut  -> unheard `forget`: what it held may be gone; earlier lives are still refused

    What it holds counts from the first `open` on, in `shut` too, because it is on its disk. Times are the leader's, in
    monotonic milliseconds.

    "Caught up at time t": it holds everything that the leader's log had at t. A *mark* measures that: the leader's log
    end at some time. Once the follower holds everything up to the mark, it was caught up at the mark's time, and the
    next mark is set. So a follower that is always some records behind a busy leader counts as caught up a moment ago,
    while one that makes no progress does not, however few records it lacks.

    Invariants: durable_end_offset is None in `unheard` only; the times never go back; when a mark is set it lies at or
    above what the follower holds.
    """

    __slots__ = (
        "_mark_end_offset",
        "_mark_ms",
        "broker_epoch",
        "broker_id",
        "durable_end_offset",
        "is_open",
        "last_caught_up_ms",
    )

    def __init__(self, broker_id: int) -> None:
        self.broker_id = broker_id
        self.broker_epoch = -1
        """The broker epoch of its latest life; -1 before the first `open`."""
        self.durable_end_offset: int | None = None
        """Exclusive: what it holds durably."""
        self.is_open = False
        """Whether a stream serves it."""
        self.last_caught_up_ms = NEVER_MS
        self._mark_end_offset = 0
        self._mark_ms = NEVER_MS

    @property
    def replica(self) -> Replica | None:
        """Its latest life; None in `unheard`."""
        return None if self.durable_end_offset is None else Replica(self.broker_id, self.broker_epoch)

    def give_time(self, now_ms: float) -> None:
        """Count it as caught up now, although it has not spoken: it is in the ISR, and the leader is new."""
        self.last_caught_up_ms = max(self.last_caught_up_ms, now_ms)

    def open(self, replica: Replica, durable_end_offset: int, leader_end_offset: int, now_ms: float) -> None:
        """Begin to track it, from what it holds.

        Raises:
            StaleBrokerEpoch: a later life of it has opened before (KIP-903).
            InvalidRequestError: it claims to hold more than the leader's log has.
        """
        self._check_life(replica)
        self._check_end(durable_end_offset, leader_end_offset)
        self.broker_epoch = replica.broker_epoch
        self.is_open = True
        self.durable_end_offset = durable_end_offset
        self._mark_end_offset, self._mark_ms = leader_end_offset, now_ms
        if durable_end_offset == leader_end_offset:
            self.last_caught_up_ms = now_ms

    def ack(self, replica: Replica, durable_end_offset: int, leader_end_offset: int, now_ms: float) -> bool:
        """Count what it holds; return whether that is more than before.

        Raises:
            StaleBrokerEpoch: a later life of it has opened before (KIP-903).
            InvalidRequestError: it is not open, or claims to hold more than the leader's log has, or less than before.
        """
        if replica.broker_epoch != self.broker_epoch or not self.is_open:
            self._check_life(replica)
            raise InvalidRequestError(
                f"broker {replica.broker_id} with epoch {replica.broker_epoch} acknowledges what it holds, "
                "but has not opened the partition"
            )
        before = self.durable_end_offset
        assert before is not None, "an open follower has said what it holds"
        if not before <= durable_end_offset <= leader_end_offset:
            self._check_end(durable_end_offset, leader_end_offset)
            raise InvalidRequestError(
                f"broker {self.broker_id} acknowledges up to {durable_end_offset} after {before}: a durable end "
                "never moves back"
            )
        self.durable_end_offset = durable_end_offset
        if durable_end_offset == leader_end_offset:
            self.last_caught_up_ms = now_ms
        elif durable_end_offset >= self._mark_end_offset:
            self.last_caught_up_ms = self._mark_ms
            self._mark_end_offset, self._mark_ms = leader_end_offset, now_ms
        return durable_end_offset > before

    def leader_appended(self, end_offset_before: int, end_offset: int, now_ms: float) -> None:
        """Note that the leader's log has grown: if the follower held all of it, it was caught up until now."""
        if self.durable_end_offset == end_offset_before:
            self.last_caught_up_ms = now_ms
            self._mark_end_offset, self._mark_ms = end_offset, now_ms

    def close(self, replica: Replica) -> None:
        """Note that the stream of this life is gone; other lives are ignored."""
        if replica.broker_epoch == self.broker_epoch:
            self.is_open = False

    def forget(self) -> None:
        """Count nothing of it until it opens again: its disk is gone, or is being replaced."""
        self.is_open = False
        self.durable_end_offset = None

    def lags(self, leader_end_offset: int, now_ms: float, lag_time_max_ms: float) -> bool:
        """Whether it lacks records, and was last caught up more than `lag_time_max_ms` ago."""
        return self.durable_end_offset != leader_end_offset and now_ms - self.last_caught_up_ms > lag_time_max_ms

    def _check_life(self, replica: Replica) -> None:
        if replica.broker_epoch < self.broker_epoch:
            raise StaleBrokerEpoch(
                f"broker {replica.broker_id} has opened the partition with broker epoch {self.broker_epoch}; "
                f"{replica.broker_epoch} is an earlier life of it"
            )

    def _check_end(self, durable_end_offset: int, leader_end_offset: int) -> None:
        if not 0 <= durable_end_offset <= leader_end_offset:
            raise InvalidRequestError(
                f"broker {self.broker_id} says that it holds everything up to {durable_end_offset}, "
                f"the leader's log has 0 to {leader_end_offset}"
            )


NO_LIFE = -1
"""A broker epoch that no broker has: the controller refuses a change with it, if the partition is unchanged."""
RETRY_MS = 200.0
"""Least time between a proposal that was not granted and the next one."""


@dataclass(frozen=True, slots=True)
class Membership:
    """What a partition's leader needs of the metadata.

    `min_insync_replicas` is the larger of the metadata's value and that of this broker's own config (KAFKA-16540).
    """

    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    partition_epoch: int
    min_insync_replicas: int


class ReplicaView(NamedTuple):
    """One replica as its leader sees it; -1: not known in this term."""

    broker_id: int
    durable_end_offset: int
    lag: int
    last_caught_up_ms: int
    in_sync: bool


class LeaderState:
    """One term of a partition's leader, from the metadata that makes this broker the leader to the end of the term.

        event                            what it changes
        appended, flushed                the leader's own log
        opened, acked, closed, forget    one follower's progress (`ReplicaProgress`)
        update_membership                replicas, committed ISR, min.insync.replicas; ends the pending change
        wanted_isr, proposed, answered   the pending change of the ISR (`replication.isr`)

    After each event `high_watermark` follows the rule of `replication.high_watermark`; the caller compares it with its
    former value.

    Invariants:
        high_watermark never goes back, and high_watermark <= log_end_offset
        durable_end_offset <= log_end_offset, and no follower holds more than the leader's log has
        the leader is in the committed ISR, the ISR is a subset of the replicas
        whenever the high watermark moves, every member of the maximal ISR holds everything below it
    """

    __slots__ = (
        "_counted",
        "_followers",
        "_full",
        "_high_watermark",
        "_isr",
        "_lag_time_max_ms",
        "_may_commit",
        "_not_before_ms",
        "_now_ms",
        "_retry_ms",
        "durable_end_offset",
        "epoch_start_offset",
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
        durable_end_offset: int,
        high_watermark: int,
        membership: Membership,
        now_ms: float,
        lag_time_max_ms: float,
        retry_ms: float = RETRY_MS,
    ) -> None:
        """Begin a term. `high_watermark` is the value that this broker heard as a follower, or had checkpointed."""
        self.leader_id = leader_id
        self.leader_epoch = leader_epoch
        self.epoch_start_offset = epoch_start_offset
        """The log end when the term began: everything below was appended by earlier leaders."""
        self.log_end_offset = log_end_offset
        self.durable_end_offset = durable_end_offset
        """Exclusive: what the leader itself holds durably."""
        self.membership = membership
        self._lag_time_max_ms = lag_time_max_ms
        self._retry_ms = retry_ms
        self._not_before_ms = NEVER_MS
        self._now_ms = now_ms
        self._high_watermark = high_watermark
        self._followers: dict[int, ReplicaProgress] = {}
        self._counted: tuple[ReplicaProgress, ...] = ()
        self._full: Set[int] = frozenset()
        self._isr = IsrState(frozenset(membership.isr), membership.partition_epoch)
        self._may_commit = False
        self._apply_membership(membership, now_ms)
        self._advance()

    # Marks

    @property
    def high_watermark(self) -> int:
        """Exclusive: records below it are committed."""
        return self._high_watermark

    @property
    def has_confirmed(self) -> bool:
        """Whether the high watermark has reached this epoch's start, so that it is not behind an earlier leader's.

        Before that the leader tells no client where the committed records end (KIP-207).
        """
        return self._high_watermark >= self.epoch_start_offset

    @property
    def has_heard_all_in_sync(self) -> bool:
        """Whether every member of the maximal ISR has shown in this term that its log is a prefix of this one.

        Only then a record that is missing here is missing in all of their logs too. A member that has not opened may
        have more records of an earlier leader, whatever the high watermark.
        """
        return all(follower.durable_end_offset is not None for follower in self._counted)

    @property
    def has_enough_in_sync(self) -> bool:
        """Whether the committed ISR has min.insync.replicas members, so that acks=all may be appended."""
        return len(self._isr.members) >= self.membership.min_insync_replicas

    @property
    def durable_on_all(self) -> int:
        """Exclusive: what every assigned replica holds durably, in sync or not; 0 until all have opened."""
        lowest = self.durable_end_offset
        for follower in self._followers.values():
            if follower.durable_end_offset is None:
                return 0
            lowest = min(lowest, follower.durable_end_offset)
        return lowest

    # The ISR

    @property
    def isr(self) -> frozenset[int]:
        return self._isr.members

    @property
    def maximal_isr(self) -> frozenset[int]:
        """The committed ISR and pending additions: the brokers that have to hold a record before it is committed."""
        return self._isr.maximal

    @property
    def isr_is_whole(self) -> bool:
        """Whether every replica is in the committed ISR, so that none can join."""
        return len(self._isr.members) == len(self.membership.replicas)

    @property
    def pending(self) -> Pending:
        """What is known of the last proposed change of the ISR."""
        return self._isr.pending

    def update_membership(self, membership: Membership, now_ms: float) -> None:
        """Adopt newer metadata of the same leader epoch; an older partition epoch is ignored.

        With the same partition epoch only min.insync.replicas can differ.
        """
        if membership.partition_epoch < self.membership.partition_epoch:
            return
        self._apply_membership(membership, now_ms)
        self._advance()

    # The leader's own log

    def appended(self, log_end_offset: int, now_ms: float) -> None:
        before = self.log_end_offset
        assert log_end_offset >= before, f"a leader's log does not shrink: {log_end_offset} after {before}"
        self._now_ms = now_ms
        for follower in self._followers.values():
            follower.leader_appended(before, log_end_offset, now_ms)
        self.log_end_offset = log_end_offset
        self._check_invariants()

    def flushed(self, durable_end_offset: int, now_ms: float) -> None:
        """Note that the leader holds everything below this offset durably; less than before is ignored."""
        self._now_ms = now_ms
        if durable_end_offset > self.durable_end_offset:
            self.durable_end_offset = durable_end_offset
            self._advance()

    # Followers

    def opened(self, replica: Replica, durable_end_offset: int, now_ms: float) -> None:
        """Begin to count a follower whose log was found to be a prefix of this one.

        A follower that holds less than before in the same life has lost its log: the high watermark stays, and if the
        follower lacks committed records now, the next `wanted_isr` is without it.

        Raises:
            StaleBrokerEpoch: a later life of this broker has opened before.
            InvalidRequestError: it is no follower of the partition, or claims to hold more than the leader's log has.
        """
        self._now_ms = now_ms
        self._follower(replica).open(replica, durable_end_offset, self.log_end_offset, now_ms)
        self._advance()

    def acked(self, replica: Replica, durable_end_offset: int, now_ms: float) -> None:
        """Count what a follower holds durably.

        Raises:
            StaleBrokerEpoch: a later life of this broker has opened before.
            InvalidRequestError: it is no follower, is not open, holds less than before or more than the leader has.
        """
        self._now_ms = now_ms
        follower = self._followers.get(replica.broker_id) or self._follower(replica)
        if follower.ack(replica, durable_end_offset, self.log_end_offset, now_ms):
            self._advance()

    def closed(self, replica: Replica) -> None:
        """Note that a follower's stream is gone, but remember what it holds; other brokers are ignored."""
        follower = self._followers.get(replica.broker_id)
        if follower is not None:
            follower.close(replica)

    def forget(self, broker_id: int) -> None:
        """Count nothing of a follower until it opens again: by the metadata its replica is offline, and may be lost.

        While it is a member of the ISR the high watermark does not move.
        """
        follower = self._followers.get(broker_id)
        if follower is not None:
            follower.forget()
            self._check_invariants()

    def progress(self, now_ms: float | None = None) -> tuple[ReplicaView, ...]:
        """Return how far every replica is, the leader first; a replica that lacks nothing is caught up now."""
        now_ms = self._now_ms if now_ms is None else now_ms
        end = self.log_end_offset
        views = [ReplicaView(self.leader_id, self.durable_end_offset, 0, int(now_ms), True)]
        for follower in self._followers.values():
            durable, in_sync = follower.durable_end_offset, follower.broker_id in self._isr.members
            if durable is None:
                views.append(ReplicaView(follower.broker_id, -1, -1, -1, in_sync))
                continue
            caught_up_ms = now_ms if durable == end else follower.last_caught_up_ms
            views.append(
                ReplicaView(
                    follower.broker_id,
                    durable,
                    end - durable,
                    -1 if caught_up_ms == NEVER_MS else int(caught_up_ms),
                    in_sync,
                )
            )
        return tuple(views)

    def follower_lags(self) -> list[tuple[int, int]]:
        """Return (broker id, records it lacks) of each follower that has opened in this term. For any thread."""
        end = self.log_end_offset
        found = []
        for follower in list(self._followers.values()):
            durable = follower.durable_end_offset
            if durable is not None:
                found.append((follower.broker_id, max(0, end - durable)))
        return found

    # Changes of the ISR

    def wanted_isr(self, active: Mapping[int, int], now_ms: float, full: Set[int] = frozenset()) -> IsrChange | None:
        """Return the change of the ISR to propose to the controller now, or None.

        `active`: broker epochs by broker id, of the brokers that are neither fenced nor shutting down. If the leader is
        not among them it wants no change, because it is about to lose its leadership.
        `full`: brokers whose disk is full.

        - A member leaves if it lags for longer than replica.lag.time.max.ms (FULL_LAG_TIME_MAX_MS if its disk is full),
          or lacks committed records.
        - If no member has to leave, each follower joins that is open in its present life, does not lag, and holds
          everything up to the high watermark and up to this epoch's start.
        - The controller drops members that are not active. They are no reason for a change, but are left out of one,
          since the controller refuses a change that names them.

        If the outcome of the last change is unknown, the result is that change again. If one of its members has lost
        its log since and is catching up, the proposal waits; if the member is not catching up, its broker epoch is
        replaced by NO_LIFE. The controller cannot grant that, and its refusal covers the earlier attempts too.
        """
        self._now_ms, self._full = now_ms, full
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
        """Note that `change` is about to be proposed, so that the members that it adds count from now on.

        Called in the same step as `wanted_isr`, before anything is sent. A change made on older metadata is ignored, as
        the controller will ignore it.
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
        """Take the controller's answer; None: granted. An answer to a change that is not pending is ignored.

        Only a refusal ends the change here. Otherwise the members that it adds count until newer metadata comes.
        """
        self._isr.answered(change, error)
        self._count_members()
        self._advance()

    # Internals

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
        """Adopt the followers that have to hold a record, and whether enough are in sync to commit any."""
        maximal = self._isr.maximal
        self._counted = tuple(f for f in self._followers.values() if f.broker_id in maximal)
        enough = min(self.membership.min_insync_replicas, len(self.membership.replicas))
        self._may_commit = len(self._isr.members) >= enough

    def _advance(self) -> None:
        durable = [follower.durable_end_offset for follower in self._counted]
        durable.append(self.durable_end_offset)
        self._high_watermark = high_watermark(self._high_watermark, durable, may_commit=self._may_commit)
        self._check_invariants()

    def _holds_committed(self, broker_id: int) -> bool:
        """Whether a member is not known to lack committed records."""
        follower = self._followers.get(broker_id)
        durable = None if follower is None else follower.durable_end_offset
        return durable is None or durable >= self._high_watermark

    def _asked_again(self, change: IsrChange, active: Mapping[int, int]) -> IsrChange | None:
        """Return the proposal that settles a doubtful change, or None to wait."""
        members = []
        for member in change.members:
            follower = self._followers.get(member.broker_id)
            if follower is None or self._may_be_asked_for(member):
                members.append(member)
            elif (
                active.get(member.broker_id) == member.broker_epoch == follower.broker_epoch
                and follower.is_open
                and not self._lags(follower)
            ):
                return None
            else:
                members.append(Replica(member.broker_id, NO_LIFE))
        return replace(change, members=tuple(members))

    def _may_be_asked_for(self, member: Replica) -> bool:
        """Whether a member of a doubtful change may still be in sync."""
        follower = self._followers.get(member.broker_id)
        if follower is not None and follower.durable_end_offset is None and member.broker_id not in self._isr.members:
            return False  # it was open when the change added it, and `forget` was called since
        return member.broker_epoch != NO_LIFE and self._holds_committed(member.broker_id)

    def _has_to_leave(self, follower: ReplicaProgress) -> bool:
        return not self._holds_committed(follower.broker_id) or self._lags(follower)

    def _lags(self, follower: ReplicaProgress) -> bool:
        limit_ms = self._lag_time_max_ms
        if follower.broker_id in self._full:
            limit_ms = min(limit_ms, FULL_LAG_TIME_MAX_MS)
        return follower.lags(self.log_end_offset, self._now_ms, limit_ms)

    def _may_join(self, follower: ReplicaProgress, active: Mapping[int, int]) -> bool:
        """Whether a follower outside of the ISR may join.

        A lagging one may not, as it would have to leave again at once. The high watermark alone does not show the lag:
        while the ISR is too small to commit anything, a replica without progress does not fall behind it.
        """
        durable = follower.durable_end_offset
        return (
            follower.is_open
            and durable is not None
            and durable >= self._high_watermark
            and durable >= self.epoch_start_offset
            and active.get(follower.broker_id) == follower.broker_epoch
            and not self._lags(follower)
        )

    def _members(self, wanted: Set[int], active: Mapping[int, int]) -> Iterator[Replica]:
        """Yield the members of `wanted` that the controller accepts, each with the broker epoch that it has told."""
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
        assert self.durable_end_offset <= self.log_end_offset, f"{self.durable_end_offset} is beyond the log's end"
