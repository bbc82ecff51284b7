"""A leader, its followers and a controller that may be slow, silent or late, in any order of events.

What has to hold, with the ISR that the controller has committed, which the leader may not know yet:
    - every member of the ISR, and who is eligible beside it (KIP-966), holds everything below the high watermark,
    - the high watermark never goes back,
    - once everything works again, it reaches the end of the log with everybody in sync.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raftlog.errors import IneligibleReplica, InvalidUpdateVersion, StaleBrokerEpoch, UnknownOutcome
from replication.isr import IsrChange
from replication.leader import LeaderState, Membership
from replication.ports import Replica

LEADER = 1
LAG_MS = 100.0
brokers = st.sampled_from([2, 3, 4])


@dataclass
class Follower:
    """One broker that follows: what is really on its disk."""

    broker_id: int
    broker_epoch: int
    held: int = 0
    is_open: bool = False

    @property
    def replica(self) -> Replica:
        return Replica(self.broker_id, self.broker_epoch)


@dataclass(eq=False)
class Attempt:
    """One command on its way: decided at most once, whatever becomes of the answer."""

    change: IsrChange
    decided: bool = False
    error: BaseException | None = None


@dataclass
class Controller:
    """Commits changes as `raftmeta.decide.leadership` does; a broker that registers anew leaves the ISR."""

    replicas: tuple[int, ...]
    isr: frozenset[int]
    min_insync: int
    brokers: dict[int, int]
    partition_epoch: int = 0
    eligible: frozenset[int] = frozenset()
    in_flight: list[Attempt] = field(default_factory=list)

    @property
    def membership(self) -> Membership:
        isr = tuple(each for each in self.replicas if each in self.isr)
        return Membership(self.replicas, isr, self.partition_epoch, self.min_insync)

    def alter(self, isr: frozenset[int]) -> None:
        were = self.eligible | self.isr
        self.isr = isr
        self.eligible = were - isr if len(isr) < min(self.min_insync, len(self.replicas)) else frozenset()
        self.partition_epoch += 1

    def decide(self, attempt: Attempt) -> None:
        change, attempt.decided = attempt.change, True
        if change.partition_epoch != self.partition_epoch:
            attempt.error = InvalidUpdateVersion("changed since")
        elif any(self.brokers.get(member.broker_id) != member.broker_epoch for member in change.members):
            attempt.error = IneligibleReplica("another life")
        else:
            self.alter(frozenset(member.broker_id for member in change.members))


class LeaderMachine(RuleBasedStateMachine):
    @initialize(min_insync=st.integers(1, 3), mark=st.integers(0, 10), followers=st.integers(1, 3), data=st.data())
    def begin(self, min_insync: int, mark: int, followers: int, data: st.DataObject) -> None:
        """The log has 10 records; the ISR holds all that was committed, at least `mark` and perhaps more."""
        self.now_ms = 0.0
        replicas = (LEADER, 2, 3, 4)[: followers + 1]
        isr = frozenset({LEADER, *data.draw(st.sets(st.sampled_from(replicas)))})
        self.followers = {each: Follower(each, 10 * each) for each in replicas[1:]}
        for follower in self.followers.values():
            follower.held = data.draw(st.integers(mark if follower.broker_id in isr else 0, 10))
        epochs = {each: 10 * each for each in replicas}
        self.controller = Controller(replicas, isr, min_insync, epochs)
        self.state = LeaderState(
            leader_id=LEADER,
            leader_epoch=3,
            epoch_start_offset=10,
            log_end_offset=10,
            held_end_offset=10,
            high_watermark=mark,
            membership=self.controller.membership,
            now_ms=0.0,
            lag_time_max_ms=LAG_MS,
            retry_ms=10.0,
        )
        self.asked: Attempt | None = None
        self.offline = set[int]()
        self.highest = mark

    def follower(self, broker_id: int) -> Follower | None:
        return self.followers.get(broker_id)

    # The log and the followers

    @rule(count=st.integers(1, 3), sync=st.booleans())
    def append(self, count: int, sync: bool) -> None:
        self.state.appended(self.state.log_end_offset + count, self.now_ms)
        if sync:
            self.sync()

    @rule()
    def sync(self) -> None:
        self.state.held(self.state.log_end_offset, self.now_ms)

    @rule(broker_id=brokers)
    def opens(self, broker_id: int) -> None:
        follower = self.follower(broker_id)
        if follower is not None:
            self.state.opened(follower.replica, follower.held, self.now_ms)
            follower.is_open = True

    @rule(broker_id=brokers, count=st.integers(0, 6))
    def acks(self, broker_id: int, count: int) -> None:
        follower = self.follower(broker_id)
        if follower is not None and follower.is_open:
            follower.held = min(self.state.log_end_offset, follower.held + count)
            self.state.acked(follower.replica, follower.held, self.now_ms)

    @rule(broker_id=brokers)
    def catches_up(self, broker_id: int) -> None:
        self.opens(broker_id)
        self.acks(broker_id, 1_000)

    @rule(silent=brokers, count=st.integers(1, 3))
    def writes_go_on_without_one(self, silent: int, count: int) -> None:
        self.append(count, sync=True)
        for broker_id in self.followers.keys() - {silent}:
            self.catches_up(broker_id)

    @rule(broker_id=brokers)
    def closes(self, broker_id: int) -> None:
        follower = self.follower(broker_id)
        if follower is not None:
            self.state.closed(follower.replica)
            follower.is_open = False

    @rule(broker_id=brokers, lost=st.integers(0, 5))
    def dies_and_loses_its_tail(self, broker_id: int, lost: int) -> None:
        """It registers anew, and so leaves the ISR and the eligible, before it opens in its new life."""
        follower = self.follower(broker_id)
        if follower is None:
            return
        follower.broker_epoch += 1
        follower.held, follower.is_open = max(0, follower.held - lost), False
        self.controller.brokers[broker_id] = follower.broker_epoch
        if broker_id in self.controller.isr:
            self.controller.alter(self.controller.isr - {broker_id})
        self.controller.eligible -= {broker_id}

    @rule(broker_id=brokers, lost=st.integers(0, 12))
    def its_disk_is_taken_offline_and_replaced(self, broker_id: int, lost: int) -> None:
        """In the same life: the controller drops it, and the leader forgets it as soon as it has heard."""
        follower = self.follower(broker_id)
        if follower is None:
            return
        follower.held, follower.is_open = max(0, follower.held - lost), False
        self.controller.alter(self.controller.isr - {broker_id})
        self.controller.eligible -= {broker_id}
        self.state.closed(follower.replica)
        self.offline.add(broker_id)

    @rule(broker_id=brokers)
    def an_earlier_life_is_late(self, broker_id: int) -> None:
        follower = self.follower(broker_id)
        if follower is None or not follower.is_open:
            return
        before = self.state.progress(0.0)[1:]
        for say in (self.state.opened, self.state.acked):
            with pytest.raises(StaleBrokerEpoch):
                say(Replica(broker_id, 10 * broker_id - 1), self.state.log_end_offset, self.now_ms)
        assert self.state.progress(0.0)[1:] == before

    @rule(wait_ms=st.sampled_from([1.0, 10.0, 60.0, 200.0]))
    def time_passes(self, wait_ms: float) -> None:
        self.now_ms += wait_ms

    # The controller

    @precondition(lambda self: self.asked is None)
    @rule(decided_soon=st.booleans())
    def wants(self, decided_soon: bool = False) -> None:
        change = self.state.wanted_isr(dict(self.controller.brokers), self.now_ms)
        if change is not None:
            assert LEADER in [member.broker_id for member in change.members]
            self.state.proposed(change)
            self.asked = Attempt(change)
            self.controller.in_flight.append(self.asked)
            if decided_soon:
                self.decides_and_the_answer_is_late_or_lost()

    @precondition(lambda self: self.asked is None)
    @rule(broker_id=brokers, decided_soon=st.booleans(), heard=st.booleans())
    def wants_to_take_one_in(self, broker_id: int, decided_soon: bool, heard: bool) -> None:
        self.catches_up(broker_id)
        self.wants(decided_soon)
        if self.asked is not None and not heard:
            self.is_not_answered()

    @precondition(lambda self: self.asked is not None)
    @rule()
    def is_answered(self) -> None:
        """The answer to the last question settles those before it: they are never decided on any more."""
        assert self.asked is not None
        if not self.asked.decided:
            self.controller.decide(self.asked)
        self.controller.in_flight.clear()
        self.state.answered(self.asked.change, self.asked.error)
        self.asked = None

    @precondition(lambda self: self.asked is not None)
    @rule()
    def is_not_answered(self) -> None:
        assert self.asked is not None
        self.state.answered(self.asked.change, UnknownOutcome("nobody knows"))
        self.asked = None

    @precondition(lambda self: self.controller.in_flight)
    @rule()
    def decides_and_the_answer_is_late_or_lost(self) -> None:
        self.controller.decide(self.controller.in_flight.pop(0))

    @rule()
    def hears_of_the_metadata(self) -> None:
        self.state.update_membership(self.controller.membership, self.now_ms)
        for broker_id in self.offline:
            self.state.forget(broker_id)
            self.followers[broker_id].is_open = False
        self.offline.clear()

    @rule(min_insync=st.integers(1, 3))
    def min_insync_replicas_changes(self, min_insync: int) -> None:
        """As `raftmeta.decide.configs`: who need not be eligible any more is not from that moment."""
        self.controller.min_insync = min_insync
        if len(self.controller.isr) >= min(min_insync, len(self.controller.replicas)) and self.controller.eligible:
            self.controller.eligible = frozenset()
            self.controller.partition_epoch += 1

    # What holds

    @invariant()
    def who_could_lead_holds_everything_committed(self) -> None:
        if not hasattr(self, "state"):
            return
        mark = self.state.high_watermark
        assert mark >= self.highest
        self.highest = mark
        for broker_id in (self.controller.isr | self.controller.eligible) - {LEADER}:
            held = self.followers[broker_id].held
            assert held >= mark, f"broker {broker_id} could lead, holds {held}, and {mark} is the high watermark"

    def teardown(self) -> None:
        """Everything works again."""
        if not hasattr(self, "state"):
            return
        self.sync()
        for _ in range(12):
            self.time_passes(10.0)
            self.hears_of_the_metadata()
            for follower in self.followers.values():
                if not follower.is_open:
                    self.opens(follower.broker_id)
                self.acks(follower.broker_id, 1_000)
            if self.asked is None:
                self.wants()
            if self.asked is not None:
                self.is_answered()
            self.who_could_lead_holds_everything_committed()
        assert self.controller.isr == set(self.controller.replicas)
        assert self.state.high_watermark == self.state.log_end_offset
        assert self.state.has_confirmed


TestLeaderHistories = LeaderMachine.TestCase
TestLeaderHistories.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
