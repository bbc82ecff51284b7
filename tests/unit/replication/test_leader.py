"""One leader's term: when records commit, which followers stay or join, and the limits of a follower's reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import (
    BrokerUnavailable,
    FencedLeaderEpoch,
    IneligibleReplica,
    InternalError,
    InvalidRequestError,
    InvalidUpdateVersion,
    RequestTimedOut,
    StaleBrokerEpoch,
    UnknownOutcome,
    UnknownTopicId,
)
from replication.high_watermark import PendingAcks, high_watermark
from replication.isr import IsrChange, IsrState, Pending
from replication.leader import NEVER_MS, LeaderState, Membership, ReplicaProgress, ReplicaView
from replication.ports import Replica

LAG_MS = 10_000.0
ACTIVE = {1: 10, 2: 20, 3: 30}
TWO, THREE = Replica(2, 20), Replica(3, 30)


def leader(
    end: int = 100,
    mark: int = 80,
    isr: tuple[int, ...] = (1, 2, 3),
    replicas: tuple[int, ...] = (1, 2, 3),
    min_insync: int = 2,
    **more: Any,
) -> LeaderState:
    """Broker 1, new in epoch 7, at partition epoch 4; it holds all of its log."""
    start = {"epoch_start_offset": end, "log_end_offset": end, "durable_end_offset": end, "high_watermark": mark}
    membership = Membership(replicas, isr, 4, min_insync)
    return LeaderState(
        leader_id=1, leader_epoch=7, membership=membership, now_ms=0.0, lag_time_max_ms=LAG_MS, **{**start, **more}
    )


def running(isr: tuple[int, ...] = (1, 2, 3), **more: Any) -> LeaderState:
    """The same, later: everyone has opened with all of the leader's log."""
    state = leader(isr=isr, **more)
    for replica in (TWO, THREE):
        if replica.broker_id in state.membership.replicas:
            state.opened(replica, state.log_end_offset, 0.0)
    return state


def append(state: LeaderState, count: int, now_ms: float = 1.0) -> None:
    state.appended(state.log_end_offset + count, now_ms)
    state.flushed(state.log_end_offset, now_ms)


def membership(*isr: int, epoch: int = 5, min_insync: int = 2, replicas: tuple[int, ...] = (1, 2, 3)) -> Membership:
    return Membership(replicas, isr, epoch, min_insync)


def members(change: IsrChange | None) -> list[int] | None:
    return None if change is None else [member.broker_id for member in change.members]


# The high watermark


def test_a_new_leader_starts_at_what_it_knew_as_a_follower() -> None:
    state = leader(end=100, mark=80)
    assert state.high_watermark == 80
    assert not state.has_confirmed


def test_it_goes_on_once_every_member_has_confirmed_its_log() -> None:
    state = leader(end=100, mark=80)
    state.opened(TWO, 100, 1.0)
    assert state.high_watermark == 80
    state.opened(THREE, 95, 1.0)
    assert state.high_watermark == 95
    assert not state.has_confirmed
    state.acked(THREE, 100, 2.0)
    assert state.high_watermark == 100
    assert state.has_confirmed


def test_a_sole_replica_commits_what_it_holds() -> None:
    state = leader(isr=(1,), replicas=(1,), min_insync=1)
    assert (state.high_watermark, state.has_confirmed) == (100, True)
    state.appended(110, 1.0)
    assert state.high_watermark == 100
    state.flushed(110, 2.0)
    assert state.high_watermark == 110


def test_the_leaders_own_disk_counts_like_the_others() -> None:
    state = running()
    state.appended(110, 1.0)
    state.acked(TWO, 110, 2.0)
    state.acked(THREE, 110, 2.0)
    assert state.high_watermark == 100
    state.flushed(105, 3.0)
    assert state.high_watermark == 105


def test_the_leaders_own_disk_does_not_go_back() -> None:
    state = running()
    state.flushed(90, 1.0)
    assert state.durable_end_offset == 100


def test_who_is_out_of_sync_is_not_waited_for() -> None:
    state = running(isr=(1, 2))
    append(state, 10)
    state.acked(TWO, 110, 2.0)
    assert state.high_watermark == 110


def test_a_lower_min_insync_replicas_comes_with_the_same_partition_epoch() -> None:
    state = running(isr=(1,), min_insync=2)
    state.update_membership(membership(1, epoch=4, min_insync=1), 1.0)
    assert (state.high_watermark, state.has_enough_in_sync) == (100, True)


def test_a_refusal_takes_the_addition_back() -> None:
    state = running(isr=(1, 2))
    change = state.wanted_isr(ACTIVE, 1.0)
    assert change is not None
    state.proposed(change)
    append(state, 10)
    state.acked(TWO, 110, 2.0)
    state.answered(change, IneligibleReplica("3 is fenced"))
    assert (state.maximal_isr, state.high_watermark) == (frozenset({1, 2}), 110)


# Metadata


def test_older_metadata_is_passed_over() -> None:
    state = running()
    state.update_membership(membership(1, epoch=3), 1.0)
    assert state.isr == {1, 2, 3}


def test_a_replica_that_is_removed_is_forgotten_and_one_that_is_added_starts_unheard() -> None:
    state = running()
    state.update_membership(membership(1, 2, replicas=(1, 2, 4)), 1.0)
    with pytest.raises(InvalidRequestError, match=r"no replica of this partition, they are on \[1, 2, 4\]"):
        state.acked(THREE, 100, 2.0)
    assert [view.broker_id for view in state.progress()] == [1, 2, 4]
    assert state.progress()[2] == ReplicaView(4, -1, -1, -1, False)
    state.update_membership(membership(1, 2, epoch=6), 3.0)
    assert state.progress()[2] == ReplicaView(3, -1, -1, -1, False)


# Joining


def test_a_replica_joins_when_it_holds_the_committed_and_the_epochs_start() -> None:
    state = running(isr=(1, 2), end=100, mark=80)
    assert state.high_watermark == 100
    state.opened(THREE, 99, 1.0)
    assert state.wanted_isr(ACTIVE, 1.0) is None
    state.acked(THREE, 100, 1.0)
    assert state.wanted_isr(ACTIVE, 1.0) == IsrChange(7, 4, (Replica(1, 10), TWO, THREE))


def test_a_high_watermark_that_is_behind_does_not_let_it_in() -> None:
    """The high watermark of a new leader may be below the committed end, so it also needs the epoch's start."""
    state = leader(end=100, mark=80, isr=(1, 2))
    state.opened(THREE, 90, 1.0)
    assert state.wanted_isr(ACTIVE, 1.0) is None


@pytest.mark.parametrize(("mark", "held", "missing"), [(80, 90, "the epoch's start"), (110, 105, "the high watermark")])
def test_who_was_caught_up_a_moment_ago_and_lost_its_log_needs_both_again(mark: int, held: int, missing: str) -> None:
    state = running(isr=(1,), min_insync=1 if mark > 100 else 2, mark=80)
    append(state, 10)
    state.acked(THREE, 110, 2.0)
    assert state.high_watermark == mark
    assert members(state.wanted_isr(ACTIVE, 3.0)) == [1, 2, 3] if mark == 80 else [1, 3]
    state.opened(TWO, 100, 3.0)
    state.opened(THREE, held, 3.0)
    assert 3 not in (members(state.wanted_isr(ACTIVE, 4.0)) or []), missing


@pytest.mark.parametrize(
    "active",
    [{1: 10, 2: 20}, {1: 10, 2: 20, 3: 31}, {1: 10, 2: 20, 3: 29}, {2: 20, 3: 30}],
    ids=["fenced", "a later life", "heard of before its registration", "the leader itself is not active"],
)
def test_who_is_not_active_in_this_life_does_not_join(active: dict[int, int]) -> None:
    assert running(isr=(1, 2)).wanted_isr(active, 1.0) is None


def test_who_has_no_stream_does_not_join() -> None:
    state = running(isr=(1, 2))
    state.closed(THREE)
    assert state.wanted_isr(ACTIVE, 1.0) is None


def test_who_stands_still_does_not_join_although_it_has_all_that_is_committed() -> None:
    """Else it would join and leave in turn while the ISR is too small to commit anything."""
    state = running(isr=(1,), min_insync=2)
    state.update_membership(membership(1, replicas=(1, 3)), 0.0)
    append(state, 10, now_ms=5.0)
    assert members(state.wanted_isr(ACTIVE, LAG_MS)) == [1, 3]
    assert state.wanted_isr(ACTIVE, LAG_MS + 6) is None
    state.acked(THREE, 110, LAG_MS + 7)
    assert members(state.wanted_isr(ACTIVE, LAG_MS + 7)) == [1, 3]


def test_there_is_nothing_to_want_when_all_are_in_sync() -> None:
    state = running()
    assert state.isr_is_whole
    assert state.wanted_isr(ACTIVE, 1.0) is None


# Leaving


def test_who_has_not_been_caught_up_for_too_long_leaves() -> None:
    state = running()
    append(state, 10, now_ms=1_000.0)
    state.acked(TWO, 110, 1_001.0)
    assert state.wanted_isr(ACTIVE, 11_000.0) is None
    assert members(state.wanted_isr(ACTIVE, 11_001.0)) == [1, 2]


def test_who_has_a_full_disk_leaves_sooner_and_joins_again_with_everything() -> None:
    state = running()
    append(state, 10, now_ms=1_000.0)
    assert state.wanted_isr(ACTIVE, 1_500.0, full={3}) is None, (
        "no change must be asked for yet, as the follower may still have written this"
    )
    state.acked(TWO, 110, 1_001.0)
    assert state.wanted_isr(ACTIVE, 1_501.0) is None
    change = state.wanted_isr(ACTIVE, 1_501.0, full={3})
    assert change is not None
    assert members(change) == [1, 2]
    state.proposed(change)
    state.update_membership(Membership((1, 2, 3), (1, 2), 5, 2), 1_510.0)
    assert state.high_watermark == 110
    assert state.wanted_isr(ACTIVE, 2_000.0, full={3}) is None
    state.acked(THREE, 110, 3_000.0)
    assert members(state.wanted_isr(ACTIVE, 3_000.0, full={3})) == [1, 2, 3]


def test_who_never_opens_leaves_after_the_same_time() -> None:
    state = leader()
    state.opened(TWO, 100, 1.0)
    assert state.wanted_isr(ACTIVE, LAG_MS) is None
    assert members(state.wanted_isr(ACTIVE, LAG_MS + 1)) == [1, 2]


def test_all_who_lag_leave_at_once_and_the_leader_stays() -> None:
    state = leader()
    assert state.wanted_isr(ACTIVE, LAG_MS + 1) == IsrChange(7, 4, (Replica(1, 10),))


def test_somebody_leaves_before_somebody_joins() -> None:
    state = running(isr=(1, 2))
    append(state, 10, now_ms=1_000.0)
    state.acked(THREE, 110, 1_001.0)
    assert members(state.wanted_isr(ACTIVE, 20_000.0)) == [1]


def test_a_log_that_was_lost_in_the_same_life_is_no_longer_in_sync() -> None:
    """Committed records stay committed; a replica that lacks them has to leave, and joins again when it has them."""
    state = running()
    state.opened(THREE, 0, 1.0)
    assert state.high_watermark == 100
    change = state.wanted_isr(ACTIVE, 1.0)
    assert change is not None
    assert members(change) == [1, 2]
    state.proposed(change)
    state.answered(change, None)
    state.update_membership(membership(1, 2), 1.0)
    assert state.wanted_isr(ACTIVE, 1.0) is None
    state.acked(THREE, 100, 2.0)
    assert members(state.wanted_isr(ACTIVE, 2.0)) == [1, 2, 3]


def test_another_life_with_less_is_no_longer_in_sync() -> None:
    """KIP-903: not even while the controller still counts the life before."""
    state = running()
    state.opened(Replica(3, 31), 50, 1.0)
    assert members(state.wanted_isr(ACTIVE, 1.0)) == [1, 2]


def test_members_that_are_not_active_are_no_reason_for_a_change_but_left_out_of_one() -> None:
    state = running()
    active = {1: 10, 2: 20}
    assert state.wanted_isr(active, 1.0) is None
    state.opened(TWO, 50, 1.0)
    assert members(state.wanted_isr(active, 1.0)) == [1]


def test_a_member_whose_broker_has_registered_anew_is_left_out_of_a_change() -> None:
    state = running()
    state.opened(TWO, 50, 1.0)
    assert members(state.wanted_isr({1: 10, 2: 20, 3: 31}, 1.0)) == [1]


# One change at a time


def test_one_change_at_a_time() -> None:
    state = running(isr=(1, 2))
    change = state.wanted_isr(ACTIVE, 1.0)
    assert change is not None
    state.proposed(change)
    assert state.wanted_isr(ACTIVE, 50_000.0) is None
    state.answered(change, None)
    assert state.wanted_isr(ACTIVE, 50_000.0) is None
    state.update_membership(membership(1, 2, 3), 2.0)
    assert state.wanted_isr(ACTIVE, 2.0) is None


def test_after_a_refusal_it_waits_a_little() -> None:
    state = running(isr=(1, 2), retry_ms=100.0)
    change = state.wanted_isr(ACTIVE, 1.0)
    assert change is not None
    state.proposed(change)
    state.answered(change, IneligibleReplica("3 is fenced"))
    assert state.wanted_isr(ACTIVE, 100.9) is None
    assert state.wanted_isr(ACTIVE, 101.0) == change


def test_an_unknown_outcome_is_asked_for_again_as_it_was() -> None:
    state = running(isr=(1, 2), retry_ms=100.0)
    change = state.wanted_isr(ACTIVE, 1.0)
    assert change is not None
    state.proposed(change)
    state.answered(change, UnknownOutcome("no answer"))
    assert state.maximal_isr == {1, 2, 3}
    state.closed(THREE)
    assert state.wanted_isr(ACTIVE, 50.0) is None
    assert state.wanted_isr(ACTIVE, 101.0) == change
    state.proposed(change)
    state.answered(change, IneligibleReplica("3 is fenced"))
    assert state.maximal_isr == {1, 2}


def test_an_unknown_outcome_is_not_asked_for_again_while_it_would_add_who_lacks_committed_records() -> None:
    state = running(isr=(1, 2), retry_ms=100.0)
    change = state.wanted_isr(ACTIVE, 1.0)
    assert change is not None
    state.proposed(change)
    state.answered(change, UnknownOutcome("no answer"))
    state.opened(THREE, 0, 2.0)
    assert state.wanted_isr(ACTIVE, 200.0) is None
    state.acked(THREE, 100, 300.0)
    assert state.wanted_isr(ACTIVE, 300.0) == change


@pytest.mark.parametrize("how", ["another life", "gone", "stands still", "forgotten"])
def test_a_change_in_doubt_for_one_that_lost_its_log_and_does_not_come_back_is_settled_by_a_question_to_be_refused(
    how: str,
) -> None:
    state = running(isr=(1, 2), retry_ms=100.0)
    change = state.wanted_isr(ACTIVE, 1.0)
    assert change is not None
    state.proposed(change)
    state.answered(change, UnknownOutcome("no answer"))
    active, now_ms = ACTIVE, 200.0
    match how:
        case "another life":
            state.opened(Replica(3, 31), 0, 2.0)
            active = {1: 10, 2: 20, 3: 31}
        case "gone":
            state.opened(THREE, 0, 2.0)
            state.closed(THREE)
            active = {1: 10, 2: 20}
        case "stands still":
            state.opened(THREE, 0, 2.0)
            now_ms = LAG_MS + 1.0
        case "forgotten":
            state.forget(3)
    append(state, 10)
    state.acked(TWO, 110, now_ms)
    assert state.high_watermark == 100
    again = state.wanted_isr(active, now_ms)
    assert again is not None
    assert again.members == (Replica(1, 10), TWO, Replica(3, -1))
    state.proposed(again)
    assert state.maximal_isr == {1, 2, 3}
    state.answered(again, UnknownOutcome("no answer again"))
    again = state.wanted_isr(active, now_ms + 100.0)
    assert again is not None
    assert again.members[2] == Replica(3, -1)
    state.proposed(again)
    state.answered(again, IneligibleReplica("3 has no such life"))
    assert state.high_watermark == 110


def test_a_replica_that_is_forgotten_counts_again_once_it_has_opened() -> None:
    state = running(isr=(1, 2))
    state.forget(3)
    state.forget(1)
    state.forget(9)
    assert state.wanted_isr(ACTIVE, 1.0) is None
    with pytest.raises(InvalidRequestError, match="has not opened"):
        state.acked(THREE, 100, 1.0)
    with pytest.raises(StaleBrokerEpoch):
        state.opened(Replica(3, 29), 100, 1.0)
    assert [view.durable_end_offset for view in state.progress(1.0)] == [100, 100, -1]
    state.opened(THREE, 100, 2.0)
    assert members(state.wanted_isr(ACTIVE, 2.0)) == [1, 2, 3]


def test_a_member_that_is_forgotten_holds_the_high_watermark_up_until_it_has_opened() -> None:
    state = running()
    state.forget(2)
    append(state, 10)
    state.acked(THREE, 110, 1.0)
    assert state.high_watermark == 100
    state.opened(TWO, 110, 2.0)
    assert state.high_watermark == 110


def test_a_change_made_before_newer_metadata_is_passed_over() -> None:
    state = running(isr=(1, 2))
    change = state.wanted_isr(ACTIVE, 1.0)
    assert change is not None
    state.update_membership(membership(1, 2), 1.0)
    state.proposed(change)
    assert state.maximal_isr == {1, 2}
    assert state.wanted_isr(ACTIVE, 2.0) is not None


def test_adding_who_lacks_committed_records_is_a_bug() -> None:
    state = running(isr=(1, 2))
    change = state.wanted_isr(ACTIVE, 1.0)
    assert change is not None
    append(state, 10)
    state.acked(TWO, 110, 2.0)
    with pytest.raises(AssertionError, match="lacks committed records"):
        state.proposed(change)


# What no follower can do


@pytest.mark.parametrize(
    ("replica", "held", "error", "words"),
    [
        (Replica(1, 10), 100, InvalidRequestError, "cannot follow itself"),
        (Replica(4, 40), 100, InvalidRequestError, "has no replica"),
        (Replica(2, 19), 100, StaleBrokerEpoch, "an earlier life"),
        (TWO, 101, InvalidRequestError, "the leader's log has 0 to 100"),
        (TWO, 99, InvalidRequestError, "a durable end never moves back"),
        (Replica(2, 21), 100, InvalidRequestError, "has not opened"),
    ],
)
def test_an_ack_that_cannot_be_changes_nothing(replica: Replica, held: int, error: type[Exception], words: str) -> None:
    state = running()
    before = state.progress(), state.high_watermark
    with pytest.raises(error, match=words):
        state.acked(replica, held, 5.0)
    assert (state.progress(0.0)[1:], state.high_watermark) == (before[0][1:], before[1])


@pytest.mark.parametrize(
    ("replica", "held", "error"),
    [
        (Replica(1, 10), 100, InvalidRequestError),
        (Replica(4, 40), 100, InvalidRequestError),
        (Replica(2, 19), 100, StaleBrokerEpoch),
        (TWO, 101, InvalidRequestError),
        (TWO, -1, InvalidRequestError),
    ],
)
def test_who_cannot_open_changes_nothing(replica: Replica, held: int, error: type[Exception]) -> None:
    state = running()
    with pytest.raises(error):
        state.opened(replica, held, 5.0)
    assert state.progress(0.0) == running().progress(0.0)


@pytest.mark.parametrize("replica", [Replica(1, 10), Replica(4, 40), Replica(2, 19), Replica(2, 21)])
def test_closing_what_is_not_known_changes_nothing(replica: Replica) -> None:
    state = running(isr=(1,))
    state.closed(replica)
    assert members(state.wanted_isr(ACTIVE, 1.0)) == [1, 2, 3]


def test_a_leaders_log_does_not_shrink() -> None:
    with pytest.raises(AssertionError):
        running().appended(99, 1.0)


# What is shown


def test_the_progress_of_every_replica_is_told_the_leader_first() -> None:
    state = running(isr=(1, 2))
    append(state, 10, now_ms=5_000.0)
    state.acked(TWO, 110, 5_001.0)
    assert state.progress(7_000.0) == (
        ReplicaView(1, 110, 0, 7_000, True),
        ReplicaView(2, 110, 0, 7_000, True),
        ReplicaView(3, 100, 10, 5_000, False),
    )


def test_who_was_never_caught_up_in_this_term_has_no_such_time() -> None:
    state = leader(isr=(1, 2))
    state.opened(THREE, 10, 1.0)
    assert state.progress()[2] == ReplicaView(3, 10, 90, -1, False)


def test_what_all_hold_is_known_once_every_assigned_replica_was_heard_in_this_term() -> None:
    state = running(isr=(1, 2))
    append(state, 5)
    state.flushed(state.log_end_offset, 1.0)
    end = state.log_end_offset
    before = state.membership
    state.update_membership(replace(before, replicas=(1, 2, 3, 4), partition_epoch=before.partition_epoch + 1), 1.0)
    for follower in (TWO, THREE):
        state.opened(follower, end - 1, 1.0)
    assert state.durable_on_all == 0, "replica 4 is not connected, so nothing is known to be on all disks"
    state.opened(Replica(4, 1), 1, 1.0)
    assert state.durable_on_all == 1
    state.closed(Replica(4, 1))
    assert state.durable_on_all == 1, "the record must still count, as replica 4 had it on disk"
    state.forget(4)
    assert state.durable_on_all == 0


@pytest.mark.parametrize(
    ("current", "held", "expected"),
    [
        (0, [5], 5),
        (0, [5, 3, 9], 3),
        (3, [3, 9], 3),
        (4, [3, 9], 4),
        (4, [9, None], 4),
        (4, [None], 4),
        (4, [], 4),
        (0, [0, 9], 0),
    ],
)
def test_it_is_what_every_member_holds(current: int, held: list[int | None], expected: int) -> None:
    assert high_watermark(current, held, may_commit=True) == expected


def test_too_few_in_sync_commit_nothing() -> None:
    """KIP-966: a replica that was in sync when the ISR became too small has all committed records."""
    assert high_watermark(4, [9, 9], may_commit=False) == 4


offsets = st.integers(0, 20)


@given(offsets, st.lists(st.none() | offsets, max_size=5), st.booleans())
def test_it_never_goes_back_and_passes_nobody(current: int, held: list[int | None], may_commit: bool) -> None:
    mark = high_watermark(current, held, may_commit=may_commit)
    assert mark >= current
    if mark > current:
        assert may_commit
        assert all(each is not None and each >= mark for each in held)
        assert mark in held


def change(*members: int, partition_epoch: int = 4) -> IsrChange:
    return IsrChange(7, partition_epoch, tuple(Replica(member, 10 * member) for member in members))


def state(*members: int) -> IsrState:
    return IsrState(frozenset(members), 4)


EXPAND, SHRINK = change(1, 2, 3), change(1)


def asked(wanted: IsrChange = EXPAND) -> IsrState:
    isr = state(1, 2)
    isr.propose(wanted)
    return isr


def test_whom_an_expansion_adds_counts_from_the_question_on() -> None:
    assert asked().maximal == {1, 2, 3}
    assert asked().members == {1, 2}


def test_whom_a_shrink_leaves_out_counts_until_it_is_committed() -> None:
    assert asked(SHRINK).maximal == {1, 2}


@pytest.mark.parametrize(
    ("error", "pending"),
    [
        (None, Pending.AWAITED),
        (InvalidUpdateVersion("changed since"), Pending.AWAITED),
        (FencedLeaderEpoch("another leader"), Pending.AWAITED),
        (UnknownOutcome("who knows"), Pending.DOUBTFUL),
        (RequestTimedOut("no answer"), Pending.DOUBTFUL),
        (BrokerUnavailable("no connection"), Pending.DOUBTFUL),
        (InternalError("a bug"), Pending.DOUBTFUL),
        (OSError("anything"), Pending.DOUBTFUL),
        (IneligibleReplica("fenced"), Pending.REFUSED),
        (InvalidRequestError("no"), Pending.REFUSED),
        (StaleBrokerEpoch("the leader is fenced"), Pending.REFUSED),
    ],
)
def test_only_a_refusal_ends_what_is_pending(error: BaseException | None, pending: Pending) -> None:
    isr = asked()
    isr.answered(EXPAND, error)
    assert isr.pending is pending
    assert isr.maximal == ({1, 2} if pending is Pending.REFUSED else {1, 2, 3})


def test_a_topic_that_the_controller_does_not_know_leaves_it_in_doubt() -> None:
    """Being retriable says nothing about earlier attempts; keeping an addition only makes the leader wait longer."""
    isr = asked()
    isr.answered(EXPAND, UnknownTopicId("gone"))
    assert isr.pending is Pending.DOUBTFUL


@pytest.mark.parametrize("answer", [None, UnknownOutcome(""), IneligibleReplica("")])
def test_newer_metadata_settles_it_whatever_was_answered(answer: BaseException | None) -> None:
    isr = asked()
    isr.answered(EXPAND, answer)
    assert isr.committed(frozenset({1, 3}), 5)
    assert (isr.members, isr.maximal, isr.pending, isr.change) == (
        frozenset({1, 3}),
        frozenset({1, 3}),
        Pending.NONE,
        None,
    )


@pytest.mark.parametrize("partition_epoch", [3, 4])
def test_metadata_that_is_not_newer_settles_nothing(partition_epoch: int) -> None:
    isr = asked()
    assert not isr.committed(frozenset({1}), partition_epoch)
    assert (isr.members, isr.maximal, isr.pending) == (frozenset({1, 2}), frozenset({1, 2, 3}), Pending.ASKED)


def test_an_answer_that_comes_after_newer_metadata_is_passed_over() -> None:
    isr = asked()
    isr.committed(frozenset({1, 2, 3}), 5)
    isr.propose(change(1, 2, partition_epoch=5))
    isr.answered(EXPAND, IneligibleReplica("late"))
    assert isr.pending is Pending.ASKED


def test_a_second_answer_is_passed_over() -> None:
    isr = asked()
    isr.answered(EXPAND, UnknownOutcome(""))
    isr.answered(EXPAND, IneligibleReplica("of the same question"))
    assert isr.pending is Pending.DOUBTFUL


def test_what_is_doubtful_is_asked_again_and_then_settled_by_a_refusal() -> None:
    isr = asked()
    isr.answered(EXPAND, UnknownOutcome(""))
    isr.propose(EXPAND)
    isr.answered(EXPAND, IneligibleReplica("3 is fenced"))
    assert (isr.pending, isr.maximal) == (Pending.REFUSED, frozenset({1, 2}))


def test_two_changes_at_a_time_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="one change at a time"):
        asked().propose(SHRINK)


def test_another_change_than_the_doubtful_one_is_a_bug() -> None:
    isr = asked()
    isr.answered(EXPAND, UnknownOutcome(""))
    with pytest.raises(AssertionError, match="doubtful"):
        isr.propose(SHRINK)


def test_a_change_made_on_older_metadata_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="was made before"):
        state(1, 2).propose(change(1, 2, 3, partition_epoch=3))


steps = st.lists(st.one_of(st.integers(1, 5), st.tuples(st.integers(0, 12))), max_size=30)


@given(steps)
def test_an_answer_comes_exactly_when_its_records_are_held(script: list[int | tuple[int]]) -> None:
    acks, answered, end, held = PendingAcks(), list[int](), 0, 0
    owed: list[int] = []
    for step in script:
        if isinstance(step, int):
            end += step
            owed.append(end)

            def note(error: BaseException | None, mine: int = end) -> None:
                assert error is None
                answered.append(mine)

            acks.wait(end, note)
        else:
            held = max(held, min(end, held + step[0]))
            acks.advance(held)
        assert answered == [offset for offset in owed if offset <= held] or answered == owed[: len(answered)]
        assert all(offset <= held for offset in answered)
    acks.advance(end)
    assert answered == owed
    assert len(acks) == 0


def test_failing_answers_everyone_once_with_the_reason() -> None:
    acks, answers = PendingAcks(), list[BaseException | None]()
    note: Callable[[BaseException | None], None] = answers.append
    acks.wait(3, note)
    acks.wait(5, note)
    acks.advance(3)
    reason = RuntimeError("gone")
    acks.fail(reason)
    acks.advance(9)
    assert answers == [None, reason]


def test_an_answer_may_append_and_wait_again() -> None:
    acks, answers = PendingAcks(), list[str]()

    def first(error: BaseException | None) -> None:
        answers.append("first")
        acks.wait(2, lambda error: answers.append("second"))

    acks.wait(1, first)
    acks.advance(1)
    assert answers == ["first"]
    acks.advance(2)
    assert answers == ["first", "second"]


def test_who_asks_again_is_put_in_its_place() -> None:
    acks, answered = PendingAcks(), list[str]()
    for end_offset in (2, 4, 4, 6):
        acks.wait(end_offset, lambda error, name=f"first {end_offset}": answered.append(name))  # type: ignore[misc]
    for end_offset in (4, 2, 7):
        acks.wait_again(end_offset, lambda error, name=f"again {end_offset}": answered.append(name))  # type: ignore[misc]
    acks.advance(2)
    assert answered == ["first 2", "again 2"]
    acks.advance(5)
    assert answered[2:] == ["first 4", "first 4", "again 4"]
    acks.wait(7, lambda error: answered.append("last"))
    acks.advance(7)
    assert answered[5:] == ["first 6", "again 7", "last"]


class CountedOffset(int):
    """An offset that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        CountedOffset.compared += 1
        return int(self) < int(other)

    def __le__(self, other: int) -> bool:
        CountedOffset.compared += 1
        return int(self) <= int(other)

    def __gt__(self, other: int) -> bool:
        CountedOffset.compared += 1
        return int(self) > int(other)


def test_asking_again_does_not_look_at_everything_that_is_owed() -> None:
    """A client may send what it has in flight again as often as it likes; all of it runs on the event loop."""
    acks, answered, count = PendingAcks(), list[int](), 2_000
    for end in range(1, count + 1):
        acks.wait(CountedOffset(end), lambda error, mine=end: answered.append(mine))  # type: ignore[misc]
    CountedOffset.compared = 0
    for number in range(count):
        end = 1 + number * 7 % 50
        acks.wait_again(CountedOffset(end), lambda error, mine=end: answered.append(mine))  # type: ignore[misc]
    assert CountedOffset.compared < 20 * count
    assert len(acks) == 2 * count
    acks.advance(count)
    assert answered == sorted(answered)
    assert len(answered) == 2 * count


def test_failing_answers_those_who_asked_again_as_well() -> None:
    acks, answers = PendingAcks(), list[BaseException | None]()
    acks.wait(3, answers.append)
    acks.wait_again(2, answers.append)
    reason = RuntimeError("gone")
    acks.fail(reason)
    assert answers == [reason, reason]
    assert len(acks) == 0


LIFE = Replica(2, 20)
NEXT_LIFE = Replica(2, 30)


def opened(held: int = 5, leader_end: int = 10, now_ms: float = 1_000) -> ReplicaProgress:
    progress = ReplicaProgress(2)
    progress.open(LIFE, held, leader_end, now_ms)
    return progress


def test_nothing_is_known_before_it_opens() -> None:
    progress = ReplicaProgress(2)
    assert (progress.durable_end_offset, progress.replica, progress.last_caught_up_ms) == (None, None, NEVER_MS)
    assert progress.lags(10, 0.0, 1e9)


def test_what_it_holds_rises_with_its_acks() -> None:
    progress = opened(held=5)
    assert progress.ack(LIFE, 7, 10, 1_001)
    assert not progress.ack(LIFE, 7, 10, 1_002)
    assert progress.durable_end_offset == 7


def test_what_it_holds_counts_although_its_stream_is_gone() -> None:
    progress = opened(held=5)
    progress.close(LIFE)
    assert (progress.durable_end_offset, progress.is_open) == (5, False)


@pytest.mark.parametrize(
    ("replica", "held", "error", "words"),
    [
        (Replica(2, 19), 7, StaleBrokerEpoch, "an earlier life"),
        (NEXT_LIFE, 7, InvalidRequestError, "has not opened"),
        (LIFE, 4, InvalidRequestError, "a durable end never moves back"),
        (LIFE, 11, InvalidRequestError, "the leader's log has 0 to 10"),
        (LIFE, -1, InvalidRequestError, "up to -1"),
    ],
)
def test_an_ack_that_cannot_be_is_refused_and_changes_nothing(
    replica: Replica, held: int, error: type[Exception], words: str
) -> None:
    progress = opened(held=5)
    with pytest.raises(error, match=words):
        progress.ack(replica, held, 10, 1_001)
    assert (progress.durable_end_offset, progress.broker_epoch) == (5, 20)


def test_an_ack_after_the_stream_is_gone_is_refused() -> None:
    progress = opened()
    progress.close(LIFE)
    with pytest.raises(InvalidRequestError, match="has not opened"):
        progress.ack(LIFE, 6, 10, 1_001)


def test_an_ack_before_anything_else_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="has not opened"):
        ReplicaProgress(2).ack(LIFE, 0, 10, 1_001)


@pytest.mark.parametrize("held", [-1, 11])
def test_it_cannot_open_with_more_than_the_leader_has(held: int) -> None:
    progress = ReplicaProgress(2)
    with pytest.raises(InvalidRequestError, match="the leader's log has 0 to 10"):
        progress.open(LIFE, held, 10, 1_000)
    assert progress.replica is None


def test_a_later_life_begins_anew_and_ends_the_earlier_one() -> None:
    """KIP-903."""
    progress = opened(held=5)
    progress.open(NEXT_LIFE, 3, 10, 1_001)
    assert (progress.durable_end_offset, progress.replica) == (3, NEXT_LIFE)
    with pytest.raises(StaleBrokerEpoch):
        progress.open(LIFE, 5, 10, 1_002)
    with pytest.raises(StaleBrokerEpoch):
        progress.ack(LIFE, 5, 10, 1_002)
    progress.close(LIFE)
    assert progress.is_open


def test_the_same_life_may_open_again_with_less() -> None:
    progress = opened(held=5)
    progress.open(LIFE, 0, 10, 1_001)
    assert progress.durable_end_offset == 0


def test_who_holds_everything_is_caught_up() -> None:
    progress = opened(held=5, now_ms=1_000)
    progress.ack(LIFE, 10, 10, 1_500)
    assert progress.last_caught_up_ms == 1_500


def test_who_reaches_the_mark_was_caught_up_when_it_was_set() -> None:
    progress = opened(held=5, leader_end=10, now_ms=1_000)
    progress.ack(LIFE, 10, 12, 1_500)
    assert progress.last_caught_up_ms == 1_000
    progress.ack(LIFE, 11, 14, 1_600)
    assert progress.last_caught_up_ms == 1_000
    progress.ack(LIFE, 12, 20, 1_700)
    assert progress.last_caught_up_ms == 1_500


def test_always_some_records_behind_a_busy_leader_is_not_lagging() -> None:
    progress, end = opened(held=0, leader_end=0, now_ms=0), 0
    for now_ms in range(0, 60_000, 10):
        progress.leader_appended(end, end + 100, now_ms)
        end += 100
        if end > 300:
            progress.ack(LIFE, end - 300, end, now_ms + 5)
        assert not progress.lags(end, now_ms + 9, 100.0)


def test_standing_still_is_lagging_after_a_while_but_not_while_nothing_is_appended() -> None:
    """An idle hour does not count against a follower that held everything."""
    progress = opened(held=10, leader_end=10, now_ms=1_000)
    assert not progress.lags(10, 3_600_000, 500)
    progress.leader_appended(10, 11, 3_600_000)
    assert not progress.lags(11, 3_600_500, 500)
    assert progress.lags(11, 3_600_501, 500)
    progress.leader_appended(11, 12, 3_600_400)
    assert progress.lags(12, 3_600_501, 500)


def test_a_member_that_a_new_leader_has_not_heard_of_gets_its_time() -> None:
    progress = ReplicaProgress(2)
    progress.give_time(1_000)
    assert not progress.lags(10, 1_500, 500)
    assert progress.lags(10, 1_501, 500)
    progress.give_time(900)
    assert progress.lags(10, 1_501, 500)


@given(st.lists(st.tuples(st.sampled_from(["append", "ack"]), st.integers(0, 5), st.integers(0, 50)), max_size=60))
def test_caught_up_at_a_time_means_holding_what_there_was(steps: list[tuple[str, int, int]]) -> None:
    """The definition itself: at `last_caught_up_ms` the leader's log had nothing that it does not hold now."""
    progress, now_ms, end, held = ReplicaProgress(2), 0, 0, 0
    progress.open(LIFE, 0, 0, now_ms)
    history = [(0, 0)]
    for kind, count, wait_ms in steps:
        now_ms += wait_ms + 1
        if kind == "append":
            progress.leader_appended(end, end + count, now_ms)
            end += count
            history.append((now_ms, end))
        else:
            held = min(end, held + count)
            progress.ack(LIFE, held, end, now_ms)
        before = [size for at_ms, size in history if at_ms < progress.last_caught_up_ms]
        assert max(before, default=0) <= held
        assert progress.last_caught_up_ms <= now_ms
