"""The pending change of the ISR, by its transition table."""

from __future__ import annotations

import pytest

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
from replication.isr import IsrChange, IsrState, Pending
from replication.ports import Replica


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
