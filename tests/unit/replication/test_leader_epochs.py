"""Leader epochs: the truncation cases of KIP-101 and KIP-279, and logs that always come to agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import InvalidRequestError
from replication.leader_epochs import (
    NO_EPOCH,
    EpochEntry,
    LeaderEpochCache,
    OffsetAndEpoch,
    check_prefix,
    truncation_offset,
)
from replication.ports import Accepted, Diverging, Opening, OutOfRange
from tests.support.epoch_logs import EpochLog, align


def cache(*entries: tuple[int, int]) -> LeaderEpochCache:
    return LeaderEpochCache(EpochEntry(*entry) for entry in entries)


def pairs(epochs: LeaderEpochCache) -> list[tuple[int, int]]:
    return [(entry.leader_epoch, entry.start_offset) for entry in epochs.entries]


def test_end_of_the_latest_epoch_is_the_log_end() -> None:
    assert cache((1, 0), (2, 10)).end_offset_for(2, 25) == OffsetAndEpoch(25, 2)


def test_end_of_an_earlier_epoch_is_the_start_of_the_next() -> None:
    assert cache((1, 0), (2, 10), (5, 20)).end_offset_for(2, 25) == OffsetAndEpoch(20, 2)


def test_an_epoch_without_records_is_answered_with_the_one_below_it() -> None:
    """KIP-279: the answer carries its own epoch, for the follower to compare with its own end of that epoch."""
    assert cache((1, 0), (2, 10), (5, 20)).end_offset_for(4, 25) == OffsetAndEpoch(20, 2)


def test_an_epoch_above_all_records_is_answered_with_the_last_one() -> None:
    """KAFKA-20961: "undefined" here would have the follower ask the same question for ever."""
    assert cache((1, 0), (2, 10)).end_offset_for(7, 25) == OffsetAndEpoch(25, 2)


def test_an_epoch_that_predates_the_cache_is_not_answered() -> None:
    assert cache((3, 100), (4, 120)).end_offset_for(2, 130) is None
    assert cache().end_offset_for(0, 0) is None


def test_an_epoch_is_entered_once_at_its_first_record() -> None:
    epochs = cache()
    assert epochs.assign(1, 0)
    assert not epochs.assign(1, 5)
    assert epochs.assign(3, 9)
    assert pairs(epochs) == [(1, 0), (3, 9)]
    assert epochs.latest_epoch == 3


def test_an_epoch_whose_records_are_gone_drops_out() -> None:
    epochs = cache((1, 0), (2, 10))
    assert epochs.truncate_from_end(10)
    assert pairs(epochs) == [(1, 0)]
    assert not epochs.truncate_from_end(10)
    epochs.assign(3, 10)
    assert pairs(epochs) == [(1, 0), (3, 10)]


def test_an_epoch_that_starts_where_another_has_no_record_replaces_it() -> None:
    epochs = cache((1, 0), (2, 10))
    epochs.assign(3, 10)
    assert pairs(epochs) == [(1, 0), (3, 10)]


def test_epochs_never_go_back() -> None:
    with pytest.raises(AssertionError):
        cache((4, 0)).assign(3, 10)


def test_retention_keeps_the_epoch_that_covers_the_log_start() -> None:
    epochs = cache((1, 0), (2, 10), (5, 20))
    assert epochs.truncate_from_start(15)
    assert pairs(epochs) == [(2, 15), (5, 20)]
    assert not epochs.truncate_from_start(15)
    assert epochs.end_offset_for(2, 30) == OffsetAndEpoch(20, 2)
    assert epochs.end_offset_for(1, 30) is None


def test_retention_below_the_first_entry_changes_nothing() -> None:
    epochs = cache((2, 10))
    assert not epochs.truncate_from_start(5)
    assert pairs(epochs) == [(2, 10)]


@pytest.mark.parametrize(("offset", "epoch"), [(0, -1), (3, 1), (9, 1), (10, 4), (99, 4)])
def test_epoch_for_an_offset(offset: int, epoch: int) -> None:
    assert cache((1, 3), (4, 10)).epoch_for(offset) == epoch


def test_entries_that_do_not_ascend_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        cache((1, 5), (2, 5))


LEADER = EpochLog([0, 0, 0, 2, 2, 5, 5, 5], start=0)


def answer(leader: EpochLog, fetch_offset: int, last_fetched_epoch: int) -> Opening:
    return check_prefix(leader.cache, leader.start, leader.end, fetch_offset, last_fetched_epoch)


@pytest.mark.parametrize(
    ("fetch_offset", "epoch", "expected"),
    [
        (0, NO_EPOCH, Accepted()),
        (8, 5, Accepted()),
        (6, 5, Accepted()),
        (5, 2, Accepted()),
        (1, 0, Accepted()),
        (6, 2, Diverging(2, 5)),
        (4, 0, Diverging(0, 3)),
        (9, 5, Diverging(5, 8)),
        (5, 1, Diverging(0, 3)),
        (7, 3, Diverging(2, 5)),
        (9, 7, Diverging(5, 8)),
        (3, 2, Diverging(0, 3)),
        (9, NO_EPOCH, OutOfRange(0)),
    ],
)
def test_what_the_leader_answers(fetch_offset: int, epoch: int, expected: Opening) -> None:
    assert answer(LEADER, fetch_offset, epoch) == expected


@pytest.mark.parametrize(
    ("fetch_offset", "epoch", "expected"),
    [
        (9, 3, OutOfRange(10)),
        (0, NO_EPOCH, OutOfRange(10)),
        (10, NO_EPOCH, Accepted()),
        (12, NO_EPOCH, Accepted()),
        (10, 3, Accepted()),
        (10, 1, Accepted()),
        (11, 1, Diverging(NO_EPOCH, 10)),
        (11, 3, Accepted()),
        (10, 9, Diverging(4, 14)),
    ],
)
def test_what_it_answers_after_retention(fetch_offset: int, epoch: int, expected: Opening) -> None:
    """Its log starts at 10, in epoch 3. What lies below is gone and contradicts nothing."""
    assert answer(EpochLog([3, 3, 4, 4], start=10), fetch_offset, epoch) == expected


@pytest.mark.parametrize(
    ("fetch_offset", "epoch", "expected"),
    [
        (0, NO_EPOCH, OutOfRange(10)),
        (10, NO_EPOCH, Accepted()),
        (10, 3, Accepted()),
        (11, 3, Diverging(NO_EPOCH, 10)),
        (11, NO_EPOCH, OutOfRange(10)),
    ],
)
def test_what_a_leader_without_records_answers(fetch_offset: int, epoch: int, expected: Opening) -> None:
    assert answer(EpochLog([], start=10), fetch_offset, epoch) == expected


@pytest.mark.parametrize(("fetch_offset", "epoch"), [(-1, 0), (-1, NO_EPOCH), (3, -2)])
def test_what_cannot_be_is_refused(fetch_offset: int, epoch: int) -> None:
    with pytest.raises(InvalidRequestError, match="no log ends at offset"):
        answer(LEADER, fetch_offset, epoch)


def test_a_record_of_an_epoch_that_nobody_has_led_in_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the partition is in epoch 6"):
        check_prefix(LEADER.cache, 0, 8, 8, 7, leader_epoch=6)
    assert check_prefix(LEADER.cache, 0, 8, 8, 6, leader_epoch=6) == Diverging(5, 8)


@pytest.mark.parametrize(
    ("log", "diverging", "expected"),
    [
        ([0, 0, 1, 1, 1], Diverging(0, 2), 2),
        ([0, 0, 1, 1, 1], Diverging(1, 4), 4),
        ([0, 0, 0, 3, 3], Diverging(2, 4), 3),
        ([0, 0, 0, 3, 3], Diverging(0, 2), 2),
        ([2, 2, 2], Diverging(1, 1), 0),
        ([2, 2, 2], Diverging(1, 7), 0),
        ([2, 2, 2], Diverging(NO_EPOCH, 0), 0),
    ],
)
def test_what_the_follower_drops(log: list[int], diverging: Diverging, expected: int) -> None:
    mine = EpochLog(log, start=0)
    assert truncation_offset(mine.cache, mine.end, diverging) == expected


@pytest.mark.parametrize(
    ("diverging", "expected"), [(Diverging(1, 5), 5), (Diverging(1, 12), 10), (Diverging(NO_EPOCH, 3), 3)]
)
def test_what_a_follower_drops_whose_log_starts_later(diverging: Diverging, expected: int) -> None:
    """Below its own log start it has to start over."""
    mine = EpochLog([3, 3, 4], start=10)
    assert truncation_offset(mine.cache, mine.end, diverging) == expected


@pytest.mark.parametrize("diverging", [Diverging(5, 8), Diverging(5, 9), Diverging(9, 8), Diverging(0, -1)])
def test_an_answer_that_contradicts_nothing_is_not_followed(diverging: Diverging) -> None:
    """Else the follower would ask the same question for ever."""
    with pytest.raises(InvalidRequestError, match="does not contradict"):
        truncation_offset(LEADER.cache, LEADER.end, diverging)


def test_a_follower_without_records_is_not_told_to_truncate_to_where_it_is() -> None:
    with pytest.raises(InvalidRequestError):
        truncation_offset(LeaderEpochCache(), 4, Diverging(1, 4))


# Shapes


@pytest.mark.parametrize(
    ("leader", "follower", "questions"),
    [
        ([0, 0], [0, 0], 1),
        ([0, 0, 1], [0, 0], 1),
        ([0, 0, 1, 1], [0, 0, 0, 0], 2),
        ([0, 0, 2, 2], [0, 0, 1, 1, 1], 2),
        ([0, 2], [0, 1], 2),
        ([2, 2], [1, 1], 2),
        ([0, 0, 0], [0, 0, 1, 2, 3], 2),
        ([0, 3, 3], [0, 0, 0, 1, 2], 2),
        ([0, 0, 4, 4], [0, 1, 2, 3], 2),
        ([0, 1, 1, 1, 4, 4, 4], [0, 1, 1, 2, 3, 3], 2),
        ([], [0, 1], 2),
        ([5], [], 1),
    ],
    ids=str,
)
def test_how_logs_come_to_agree(leader: list[int], follower: list[int], questions: int) -> None:
    led, following = EpochLog(leader), EpochLog(follower)
    asked = align(led, following)
    assert following.epochs == led.epochs[: len(following.epochs)]
    assert asked == questions


# Any two logs of one history


@st.composite
def two_logs(draw: st.DrawFn) -> tuple[EpochLog, EpochLog]:
    """Play elections between two replicas and unseen others; then retention.

    In each epoch one of the three leads, from a log that is what it had, and the others copy none or some of it: as
    they do, only after being aligned with it.
    """
    logs = [EpochLog([]) for _ in range(3)]
    for epoch in range(draw(st.integers(0, 7))):
        leader = logs[draw(st.integers(0, 2))]
        for follower in logs:
            if follower is not leader and draw(st.booleans()):
                align(leader, follower)
                follower.copy(leader, draw(st.integers(0, 3)))
        leader.append(epoch, draw(st.integers(0, 3)))
        for follower in logs:
            if follower is not leader and draw(st.booleans()):
                align(leader, follower)
                follower.copy(leader, draw(st.integers(0, 4)))
    for log in logs:
        log.expire(draw(st.integers(0, 3)))
    return logs[0], logs[1]


@given(two_logs())
def test_a_follower_ends_as_a_prefix_and_loses_nothing_that_both_have(logs: tuple[EpochLog, EpochLog]) -> None:
    leader, follower = logs
    before = follower.records()
    common = {offset: epoch for offset, epoch in before.items() if leader.records().get(offset) == epoch}
    asked = align(leader, follower)
    after = follower.records()
    assert all(leader.records().get(offset, epoch) == epoch for offset, epoch in after.items())
    assert leader.start <= follower.end <= leader.end
    if not follower.started_over:
        assert common.items() <= after.items()
        assert after.items() <= before.items()
    assert asked <= 2 + len(set(before.values()))


@given(two_logs())
def test_what_a_follower_copies_then_makes_it_equal(logs: tuple[EpochLog, EpochLog]) -> None:
    leader, follower = logs
    align(leader, follower)
    follower.copy(leader, 1_000)
    both = leader.records().keys() & follower.records().keys()
    assert follower.end == leader.end
    assert all(leader.records()[offset] == follower.records()[offset] for offset in both)


@given(two_logs(), st.integers(0, 30), st.integers(-1, 9))
def test_whatever_a_follower_claims_the_answer_is_sound(
    logs: tuple[EpochLog, EpochLog], fetch_offset: int, epoch: int
) -> None:
    """Accepted only where the record before is of that epoch, or gone; else it names a real end that cuts something."""
    leader, _ = logs
    match answer(leader, fetch_offset, epoch):
        case Accepted():
            assert leader.start <= fetch_offset <= leader.end
            assert epoch in (NO_EPOCH, leader.records().get(fetch_offset - 1, epoch))
        case Diverging(found, end):
            assert found <= epoch
            assert leader.start <= end <= leader.end
            assert leader.records().get(end - 1, found) == found
            assert found < epoch or end < fetch_offset
        case OutOfRange(start):
            assert start == leader.start
