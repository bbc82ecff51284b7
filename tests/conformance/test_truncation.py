"""What Kafka's improvement proposals say of logs that part, each sentence proved on `replication.leader_epochs`.

Logs are written as the leader epoch of each record, as the proposals draw them.
"""

from __future__ import annotations

import pytest

from raftlog.errors import InvalidRequestError
from replication.leader_epochs import NO_EPOCH, OffsetAndEpoch, check_prefix, truncation_offset
from replication.ports import Accepted, Diverging, Opening, OutOfRange
from tests.support.epoch_logs import EpochLog, align


def opening(leader: EpochLog, follower: EpochLog) -> Opening:
    """Return the leader's first answer."""
    return check_prefix(leader.cache, leader.start, leader.end, follower.end, follower.last_epoch)


# KIP-101


def test_kip_101_epoch_rather_than_high_watermark() -> None:
    """ "... use Leader Epoch rather than High Watermark for Truncation" (KIP-101, its title).

    Scenario 1: B has both records, but has heard of a high watermark of 1 only. It restarts, A leads. Cut back to the
    high watermark it would lose the second record, and everybody would, if A died now. Nothing is cut: what a follower
    is asked for has no high watermark in it.
    """
    a, b = EpochLog([0, 0]), EpochLog([0, 0])
    assert align(a, b) == 1
    assert b.epochs == [0, 0]


def test_kip_101_a_record_written_over_is_dropped() -> None:
    """Scenario 2, log divergence: power is lost, B comes back first without the second record and writes another.

    By the high watermark A keeps its own second record, and the logs differ for ever.
    """
    b, a = EpochLog([0, 1]), EpochLog([0, 0])
    align(b, a)
    a.copy(b, 10)
    assert a.epochs == b.epochs


def test_kip_101_both_sides_know_the_epochs() -> None:
    """ "Epochs are tracked in both leader and follower in a new checkpoint file" (KIP-101, apache/kafka#2743).

    A follower that copies a log has the same entries as its leader, which is why it can lead next.
    """
    leader, follower = EpochLog([0, 0, 3, 3, 7]), EpochLog([])
    follower.copy(leader, 10)
    assert follower.cache.entries == leader.cache.entries


# KIP-279


def test_kip_279_fast_leader_fail_over() -> None:
    """ "Fix log divergence between leader and follower after fast leader fail over" (KIP-279, its title).

    Each has led while the other was away. By KIP-101 alone the leader knows nothing of epoch 1, and the follower falls
    back to its high watermark.
    """
    leader, follower = EpochLog([0, 0, 2, 2]), EpochLog([0, 0, 1, 1, 1])
    assert opening(leader, follower) == Diverging(0, 2)
    align(leader, follower)
    assert follower.epochs == [0, 0]


def test_kip_279_the_right_point_for_an_epoch_that_the_leader_does_not_have() -> None:
    """ "... the right truncation point even if the follower has data from leader epochs which the leader itself does
    not have" (apache/kafka#5678, after KIP-279)."""
    leader = EpochLog([0, 0, 4, 4])
    assert leader.cache.end_offset_for(2, leader.end) == OffsetAndEpoch(2, 0)
    follower = EpochLog([0, 0, 1, 2, 3])
    align(leader, follower)
    assert follower.epochs == [0, 0]


def test_kip_279_back_to_back_leader_elections() -> None:
    """ "This situation can occur when there are back to back leader elections" (apache/kafka#5678).

    The leader of epoch 5 has no record of its own yet. What the follower wrote in epoch 4 goes nevertheless.
    """
    leader, follower = EpochLog([0, 0]), EpochLog([0, 0, 4])
    assert check_prefix(leader.cache, 0, leader.end, 3, 4, leader_epoch=5) == Diverging(0, 2)
    align(leader, follower)
    assert follower.epochs == [0, 0]


def test_kip_279_the_follower_takes_the_lesser_of_both_ends() -> None:
    """The leader's epoch 1 ends at 4, the follower's at 2: what follows there is of epochs that the leader lacks."""
    leader, follower = EpochLog([0, 1, 1, 1, 5]), EpochLog([0, 1, 2, 2, 2])
    assert opening(leader, follower) == Diverging(1, 4)
    assert truncation_offset(follower.cache, follower.end, Diverging(1, 4)) == 2


# KIP-320


def test_kip_320_a_reader_is_told_when_what_it_has_read_is_gone() -> None:
    """ "... no larger leader epochs which began at a smaller offset than the fetch offset. This would imply that the
    consumer did not see some messages from the later epoch, which means the log was truncated at some point" (KIP-320,
    a draft).

    A consumer has read up to offset 4, in epoch 1. After an unclean election epoch 2 begins at 2.
    """
    leader = EpochLog([1, 1, 2, 2, 2])
    assert check_prefix(leader.cache, 0, leader.end, 4, 1) == Diverging(1, 2)
    assert check_prefix(leader.cache, 0, leader.end, 2, 1) == Accepted()


def test_kip_320_the_first_offset_known_to_diverge() -> None:
    """ "... with the first offset known to diverge from what the consumer previously read" (Kafka's documentation of
    LogTruncationException, KIP-320)."""
    leader = EpochLog([1, 1, 3])
    found = check_prefix(leader.cache, 0, leader.end, 5, 2)
    assert found == Diverging(1, 2)


def test_kip_320_the_start_is_always_told() -> None:
    """ "This ensures that followers (and consumers in KIP-320) can always determine where the correct starting point is
    for the active log range on the leader" (apache/kafka#5678): for an epoch older than all it is the log start.

    "For example, if the earliest entry in the cache is (epoch=5, startOffset=10), then a query for epoch 4 will return
    (epoch=4, endOffset=10)."
    """
    leader = EpochLog([5, 5], start=10)
    assert check_prefix(leader.cache, 10, leader.end, 12, 4) == Diverging(NO_EPOCH, 10)


# KIP-595


@pytest.mark.parametrize(
    ("follower", "largest_epoch", "its_end"),
    [([0, 0, 1, 1], 0, 2), ([0, 0, 2, 2, 2, 2], 2, 5), ([0, 0, 0, 0], 0, 2), ([0, 0, 2, 2, 2, 7], 2, 5)],
)
def test_kip_595_the_largest_epoch_and_its_end(follower: list[int], largest_epoch: int, its_end: int) -> None:
    """ "In case divergence is detected based on the `LastFetchedEpoch` and `FetchOffset` in the request, this field
    indicates the largest epoch and its end offset such that subsequent records are known to diverge" (KIP-595,
    FetchResponse)."""
    leader, asking = EpochLog([0, 0, 2, 2, 2]), EpochLog(follower)
    assert opening(leader, asking) == Diverging(largest_epoch, its_end)
    common = align(leader, asking) and asking.end
    assert common <= its_end


def test_kip_595_truncation_and_fetching_are_one_question() -> None:
    """Nothing but (fetch offset, last fetched epoch) is asked, and with the first Accepted the records flow."""
    leader, follower = EpochLog([0, 0, 1, 3, 3]), EpochLog([0, 0, 1, 2])
    assert align(leader, follower) == 2
    follower.copy(leader, 10)
    assert follower.epochs == leader.epochs


def test_kip_595_below_the_log_start_there_is_nothing_to_compare() -> None:
    """An offset below the leader's log start is out of range, and the follower begins at the log start."""
    leader, follower = EpochLog([4, 4], start=20), EpochLog([1, 1, 2])
    assert opening(leader, follower) == OutOfRange(20)
    align(leader, follower)
    assert (follower.start, follower.end) == (20, 20)


def test_kip_595_an_epoch_above_the_leaders_own_cannot_be() -> None:
    """A leader whose follower has records of a later epoch is not the leader; the two do not agree on anything."""
    leader = EpochLog([0, 0])
    with pytest.raises(InvalidRequestError):
        check_prefix(leader.cache, 0, leader.end, 2, 6, leader_epoch=5)
