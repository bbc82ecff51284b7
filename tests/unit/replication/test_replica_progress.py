"""What a leader knows of a follower: its life, what it holds, when it was caught up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import InvalidRequestError, StaleBrokerEpoch
from replication.ports import Replica
from replication.replica_progress import NEVER_MS, ReplicaProgress

LIFE = Replica(2, 20)
NEXT_LIFE = Replica(2, 30)


def opened(held: int = 5, leader_end: int = 10, now_ms: float = 1_000) -> ReplicaProgress:
    progress = ReplicaProgress(2)
    progress.open(LIFE, held, leader_end, now_ms)
    return progress


def test_nothing_is_known_before_it_opens() -> None:
    progress = ReplicaProgress(2)
    assert (progress.held_end_offset, progress.replica, progress.last_caught_up_ms) == (None, None, NEVER_MS)
    assert progress.lags(10, 0.0, 1e9)


def test_what_it_holds_rises_with_its_acks() -> None:
    progress = opened(held=5)
    assert progress.ack(LIFE, 7, 10, 1_001)
    assert not progress.ack(LIFE, 7, 10, 1_002)
    assert progress.held_end_offset == 7


def test_what_it_holds_counts_although_its_stream_is_gone() -> None:
    progress = opened(held=5)
    progress.close(LIFE)
    assert (progress.held_end_offset, progress.is_open) == (5, False)


@pytest.mark.parametrize(
    ("replica", "held", "error", "words"),
    [
        (Replica(2, 19), 7, StaleBrokerEpoch, "an earlier life"),
        (NEXT_LIFE, 7, InvalidRequestError, "has not opened"),
        (LIFE, 4, InvalidRequestError, "what is held stays held"),
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
    assert (progress.held_end_offset, progress.broker_epoch) == (5, 20)


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
    assert (progress.held_end_offset, progress.replica) == (3, NEXT_LIFE)
    with pytest.raises(StaleBrokerEpoch):
        progress.open(LIFE, 5, 10, 1_002)
    with pytest.raises(StaleBrokerEpoch):
        progress.ack(LIFE, 5, 10, 1_002)
    progress.close(LIFE)
    assert progress.is_open


def test_the_same_life_may_open_again_with_less() -> None:
    progress = opened(held=5)
    progress.open(LIFE, 0, 10, 1_001)
    assert progress.held_end_offset == 0


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
    """An idle hour does not count against whoever held everything."""
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
