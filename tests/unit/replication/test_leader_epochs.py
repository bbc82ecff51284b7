"""Leader epochs: the truncation cases of KIP-101 and KIP-279, and logs that always come to agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.leader_epochs import EpochEntry, LeaderEpochCache, OffsetAndEpoch


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


def epochs_of(log: list[int]) -> LeaderEpochCache:
    made = LeaderEpochCache()
    for offset, epoch in enumerate(log):
        made.assign(epoch, offset)
    return made


def follow(leader: list[int], follower: list[int]) -> tuple[list[int], int]:
    """Truncate `follower` (the epoch of each record) by asking `leader`; return it and the number of questions."""
    log = list(follower)
    for question in range(1, 100):
        if not log:
            return log, question
        answer = epochs_of(leader).end_offset_for(log[-1], len(leader))
        if answer is None:
            return [], question
        own = epochs_of(log).end_offset_for(answer.leader_epoch, len(log))
        target = 0 if own is None else min(answer.end_offset, own.end_offset)
        if target >= len(log):
            return log, question
        log = log[:target]
    raise AssertionError("the dialogue goes round in circles")


def test_kip_279_fast_leader_fail_overs() -> None:
    """A: epochs 0, 1; B: 0, 2 - the log forked at an epoch that the other never saw."""
    log, _ = follow(leader=[0, 0, 2, 2], follower=[0, 0, 1, 1, 1])
    assert log == [0, 0]


def test_kip_101_truncation_does_not_use_the_high_watermark() -> None:
    """KIP-101 scenario 1: the follower has all of the leader's records and must keep them, whatever it knows of the
    high watermark."""
    log, questions = follow(leader=[0, 0], follower=[0, 0])
    assert log == [0, 0]
    assert questions == 1


@st.composite
def forked_logs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two logs as elections make them: a common past, then each replica led in epochs that only it has records of."""
    common = sorted(draw(st.lists(st.integers(0, 5), max_size=8)))
    first = max(common, default=0)
    owners = draw(st.lists(st.sampled_from("abn"), min_size=1, max_size=6))
    tails: dict[str, list[int]] = {"a": [], "b": [], "n": []}
    for step, owner in enumerate(owners, first + 1):
        tails[owner] += [step] * draw(st.integers(1, 3))
    return common + tails["a"], common + tails["b"]


@given(forked_logs())
def test_a_follower_ends_with_a_prefix_of_its_leader_and_keeps_the_common_past(
    logs: tuple[list[int], list[int]],
) -> None:
    leader, follower = logs
    common = 0
    while common < min(len(leader), len(follower)) and leader[common] == follower[common]:
        common += 1
    log, questions = follow(leader, follower)
    assert log == leader[: len(log)]
    assert len(log) == common
    assert questions <= len(set(follower)) + 1
