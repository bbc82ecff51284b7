"""What Kafka's improvement proposals say of the ISR and of committed records, each sentence proved on
`replication.leader`.
"""

from __future__ import annotations

import pytest

from raftlog.errors import StaleBrokerEpoch, UnknownOutcome
from replication.isr import IsrChange
from replication.leader import LeaderState, Membership
from replication.ports import Replica

LAG_MS = 10_000.0
ACTIVE = {1: 10, 2: 20, 3: 30}
TWO, THREE = Replica(2, 20), Replica(3, 30)


def leader(isr: tuple[int, ...] = (1, 2, 3), *, mark: int = 80, min_insync: int = 2) -> LeaderState:
    """Broker 1, new in epoch 7 with 100 records; it has heard of a high watermark of `mark`."""
    return LeaderState(
        leader_id=1,
        leader_epoch=7,
        epoch_start_offset=100,
        log_end_offset=100,
        durable_end_offset=100,
        high_watermark=mark,
        membership=Membership((1, 2, 3), isr, 4, min_insync),
        now_ms=0.0,
        lag_time_max_ms=LAG_MS,
    )


def append(state: LeaderState, count: int, now_ms: float = 1.0) -> None:
    """The leader appends, and holds it."""
    state.appended(state.log_end_offset + count, now_ms)
    state.flushed(state.log_end_offset, now_ms)


def learn(state: LeaderState, isr: tuple[int, ...], partition_epoch: int, now_ms: float = 1.0) -> None:
    """Newer metadata comes."""
    membership = Membership((1, 2, 3), isr, partition_epoch, state.membership.min_insync_replicas)
    state.update_membership(membership, now_ms)


def wanted(state: LeaderState, now_ms: float = 1.0) -> list[int]:
    """Return the ISR that the leader wants; empty: no other."""
    change = state.wanted_isr(ACTIVE, now_ms)
    return [] if change is None else [member.broker_id for member in change.members]


def ask(state: LeaderState, now_ms: float = 1.0) -> IsrChange:
    """The leader asks the controller."""
    change = state.wanted_isr(ACTIVE, now_ms)
    assert change is not None
    state.proposed(change)
    return change


# KIP-207


def test_kip_207_offsets_do_not_go_back_at_a_leader_change() -> None:
    """ "Offsets returned by ListOffsetsResponse should be monotonically increasing even during a partition leader
    change" (KIP-207, its title), which cannot be guaranteed "due to the high watermark lagging behind the epoch start
    offset after a recent leader election" (Kafka's documentation of OffsetNotAvailableException).

    The former leader may have answered anything up to 100. The new one does not answer before it is there too.
    """
    state = leader(mark=80)
    answers = [state.high_watermark] if state.has_confirmed else []
    state.opened(TWO, 100, 1.0)
    state.opened(THREE, 90, 1.0)
    answers += [state.high_watermark] if state.has_confirmed else []
    assert answers == []
    state.acked(THREE, 100, 2.0)
    assert state.has_confirmed
    assert state.high_watermark == 100


# KIP-497


def test_kip_497_an_addition_counts_before_it_is_confirmed() -> None:
    """ "When expanding the ISR, we assume that the new replica will make it into the ISR before we receive
    confirmation that it has. This ensures that the HW will already reflect the updated ISR" (apache/kafka
    Partition.scala, KIP-497)."""
    state = leader((1, 2), mark=100)
    state.opened(TWO, 100, 1.0)
    state.opened(THREE, 100, 1.0)
    ask(state)
    append(state, 10)
    state.acked(TWO, 110, 2.0)
    assert state.high_watermark == 100
    state.acked(THREE, 110, 2.0)
    assert state.high_watermark == 110


def test_kip_497_a_removal_counts_only_once_it_is_confirmed() -> None:
    """ "When shrinking the ISR, we cannot assume that the update will succeed as this could erroneously advance the HW
    if the `AlterPartition` were to fail" (apache/kafka Partition.scala, KIP-497)."""
    state = leader(mark=100)
    state.opened(TWO, 100, 1.0)
    append(state, 10)
    state.acked(TWO, 110, 2.0)
    change = ask(state, LAG_MS + 2)
    state.answered(change, UnknownOutcome("no answer"))
    assert state.high_watermark == 100
    learn(state, (1, 2), 5)
    assert state.high_watermark == 110


# KIP-841


def test_kip_841_who_is_fenced_or_shutting_down_does_not_join() -> None:
    """ "... a fenced or in-controlled-shutdown replica is not eligible to be in the ISR" (KIP-841)."""
    state = leader((1, 2), mark=100)
    state.opened(THREE, 100, 1.0)
    assert state.wanted_isr({1: 10, 2: 20}, 1.0) is None
    assert wanted(state) == [1, 2, 3]


# KIP-903


def test_kip_903_a_stale_broker_epoch_does_not_join() -> None:
    """ "Replicas with stale broker epoch should not be allowed to join the ISR" (KIP-903, its title).

    Broker 3 was caught up when it died with its disk. It has registered anew, and the leader has not heard of that
    life yet.
    """
    state = leader((1, 2), mark=100)
    state.opened(THREE, 100, 1.0)
    reborn = {1: 10, 2: 20, 3: 31}
    assert state.wanted_isr(reborn, 1.0) is None
    state.opened(Replica(3, 31), 0, 2.0)
    assert state.wanted_isr(reborn, 2.0) is None


def test_kip_903_the_controller_is_told_which_life_was_heard() -> None:
    """The epochs in an AlterPartition are those that the replicas themselves gave when they opened, so the controller
    can refuse a life that is over."""
    state = leader((1, 2), mark=100)
    state.opened(TWO, 100, 1.0)
    state.opened(THREE, 100, 1.0)
    assert ask(state).members == (Replica(1, 10), TWO, THREE)


def test_kip_903_an_earlier_life_counts_for_nothing() -> None:
    """A word of broker 3 that was under way when it died."""
    state = leader(mark=100)
    state.opened(TWO, 100, 1.0)
    state.opened(Replica(3, 31), 90, 1.0)
    append(state, 10)
    state.acked(TWO, 110, 2.0)
    with pytest.raises(StaleBrokerEpoch):
        state.acked(THREE, 110, 2.0)
    assert state.high_watermark == 100


# KIP-966


def test_kip_966_the_high_watermark_needs_the_minimum() -> None:
    """ "The High Watermark will only advance if all the messages below it have been replicated to at least
    min.insync.replicas ISR members" (KIP-966)."""
    state = leader((1,), mark=100, min_insync=2)
    append(state, 10)
    assert state.high_watermark == 100
    learn(state, (1, 2), 5)
    state.opened(TWO, 105, 1.0)
    assert state.high_watermark == 105


def test_kip_966_the_addition_has_to_be_confirmed_first() -> None:
    """ "... the leader needs to wait for the controller to ack the ISR change" (KIP-966, of an ISR that was too small):
    a pending member is waited for, but does not make the ISR large enough."""
    state = leader((1,), mark=100, min_insync=2)
    state.opened(TWO, 100, 1.0)
    ask(state)
    append(state, 10)
    state.acked(TWO, 110, 2.0)
    assert state.high_watermark == 100
    learn(state, (1, 2), 5)
    assert state.high_watermark == 110


def test_kip_966_who_left_an_isr_that_became_too_small_has_all_that_is_committed() -> None:
    """ "... it makes some replicas that are not in the ISR safe to become the leader" (Kafka's documentation of
    eligible leader replicas, KIP-966).

    Broker 2 leaves the ISR, one remains: whatever comes then, the high watermark never passes what 2 holds.
    """
    state = leader((1, 2), mark=100, min_insync=2)
    state.opened(TWO, 100, 1.0)
    append(state, 10, now_ms=2.0)
    state.acked(TWO, 105, 3.0)
    change = ask(state, LAG_MS + 10)
    state.answered(change, None)
    learn(state, (1,), 5)
    append(state, 10, now_ms=LAG_MS + 11)
    assert state.high_watermark == 105


def test_kip_966_the_minimum_is_no_more_than_there_are_replicas() -> None:
    """A partition with fewer replicas than min.insync.replicas refuses acks=all, but still commits other records."""
    state = leader(mark=100, min_insync=5)
    state.opened(TWO, 100, 1.0)
    state.opened(THREE, 100, 1.0)
    append(state, 10)
    state.acked(TWO, 110, 2.0)
    state.acked(THREE, 110, 2.0)
    assert state.high_watermark == 110
    assert not state.has_enough_in_sync


# What a leader knows of the others (docs/adr/0012)


def test_a_confirmed_term_has_not_heard_of_everyone_in_sync() -> None:
    """A high watermark at the start of the epoch says what is committed, and nothing of what members have beyond."""
    state = leader(mark=100)
    assert state.has_confirmed
    heard = [state.has_heard_all_in_sync]
    state.opened(TWO, 100, 1.0)
    heard.append(state.has_heard_all_in_sync)
    state.opened(THREE, 90, 1.0)
    heard.append(state.has_heard_all_in_sync)
    state.closed(THREE)  # it has nothing else than this leader has given it
    heard.append(state.has_heard_all_in_sync)
    state.forget(3)
    heard.append(state.has_heard_all_in_sync)
    learn(state, (1, 2), 5)
    heard.append(state.has_heard_all_in_sync)
    assert heard == [False, False, True, True, False, True]
