"""One leader's term: what commits, who may stay and who may join, and what no follower can do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raftlog.errors import IneligibleReplica, InvalidRequestError, StaleBrokerEpoch, UnknownOutcome
from replication.isr import IsrChange
from replication.leader import LeaderState, Membership, ReplicaView
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
    start = {"epoch_start_offset": end, "log_end_offset": end, "held_end_offset": end, "high_watermark": mark}
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
    state.held(state.log_end_offset, now_ms)


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
    state.held(110, 2.0)
    assert state.high_watermark == 110


def test_the_leaders_own_disk_counts_like_the_others() -> None:
    state = running()
    state.appended(110, 1.0)
    state.acked(TWO, 110, 2.0)
    state.acked(THREE, 110, 2.0)
    assert state.high_watermark == 100
    state.held(105, 3.0)
    assert state.high_watermark == 105


def test_the_leaders_own_disk_does_not_go_back() -> None:
    state = running()
    state.held(90, 1.0)
    assert state.held_end_offset == 100


def test_who_is_out_of_sync_is_not_waited_for() -> None:
    state = running(isr=(1, 2))
    append(state, 10)
    state.acked(TWO, 110, 2.0)
    assert state.high_watermark == 110


def test_nothing_commits_while_the_isr_is_too_small() -> None:
    """KIP-966."""
    state = running(isr=(1,), min_insync=2)
    append(state, 10)
    assert (state.high_watermark, state.has_enough_in_sync) == (80, False)


def test_more_in_sync_than_there_are_replicas_is_not_waited_for() -> None:
    """min.insync.replicas above the number of replicas refuses acks=all, but does not stop the high watermark."""
    state = running(isr=(1, 2), replicas=(1, 2), min_insync=3)
    assert (state.high_watermark, state.has_enough_in_sync) == (100, False)


def test_a_lower_min_insync_replicas_comes_with_the_same_partition_epoch() -> None:
    state = running(isr=(1,), min_insync=2)
    state.update_membership(membership(1, epoch=4, min_insync=1), 1.0)
    assert (state.high_watermark, state.has_enough_in_sync) == (100, True)


def test_a_shrink_lets_it_go_on_once_it_is_committed() -> None:
    state = running()
    append(state, 10)
    state.acked(TWO, 110, 2.0)
    change = state.wanted_isr(ACTIVE, 20_000.0)
    assert change is not None
    assert members(change) == [1, 2]
    state.proposed(change)
    state.answered(change, None)
    assert state.high_watermark == 100
    state.update_membership(membership(1, 2), 20_001.0)
    assert state.high_watermark == 110


def test_whom_the_leader_wants_to_add_is_waited_for_at_once() -> None:
    """KIP-497: the controller may have agreed, and could elect it, before the leader knows."""
    state = running(isr=(1, 2))
    change = state.wanted_isr(ACTIVE, 1.0)
    assert change is not None
    assert members(change) == [1, 2, 3]
    state.proposed(change)
    assert (state.isr, state.maximal_isr) == (frozenset({1, 2}), frozenset({1, 2, 3}))
    append(state, 10)
    state.acked(TWO, 110, 2.0)
    assert state.high_watermark == 100
    state.acked(THREE, 105, 2.0)
    assert state.high_watermark == 105


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
    """The high watermark of a new leader may be below what was committed: it takes the epoch's start as well."""
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
    """What was committed stays committed; who lacks it has to leave, and joins again when it has it."""
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
    assert [view.held_end_offset for view in state.progress(1.0)] == [100, 100, -1]
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
        (TWO, 99, InvalidRequestError, "what is held stays held"),
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
    state.held(state.log_end_offset, 1.0)
    end = state.log_end_offset
    before = state.membership
    state.update_membership(replace(before, replicas=(1, 2, 3, 4), partition_epoch=before.partition_epoch + 1), 1.0)
    for follower in (TWO, THREE):
        state.opened(follower, end - 1, 1.0)
    assert state.held_by_all == 0, "4 is away, in sync or not"
    state.opened(Replica(4, 1), 1, 1.0)
    assert state.held_by_all == 1
    state.closed(Replica(4, 1))
    assert state.held_by_all == 1, "it is on its disk"
    state.forget(4)
    assert state.held_by_all == 0
