"""A broker's lease counts from when the heartbeat left, and ends by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raftmeta.quorum.leases import CLOCK_GRAIN_MS, DRIFT_PPM, MAX_UNANSWERED, BrokerLease

LEASE_MS = 1_200


def test_there_is_no_lease_before_the_first_answer() -> None:
    lease = BrokerLease()
    lease.sent(0, now_ms=1_000)
    assert not lease.valid(1_000)


def test_the_lease_counts_from_the_sending_and_not_from_the_answer() -> None:
    lease = BrokerLease()
    lease.sent(0, now_ms=1_000)
    assert lease.granted(0, LEASE_MS, now_ms=1_900)  # the answer took 900 ms
    assert lease.valid(2_190)
    assert not lease.valid(2_200)


def test_the_margin_for_drift_comes_off_the_lease() -> None:
    lease = BrokerLease(drift_ppm=10_000)
    lease.sent(0, now_ms=0)
    lease.granted(0, LEASE_MS, now_ms=1)
    assert lease.expires_at_ms == LEASE_MS * 0.99 - CLOCK_GRAIN_MS


def test_an_answer_later_than_the_lease_is_worth_nothing() -> None:
    lease = BrokerLease()
    lease.sent(0, now_ms=0)
    assert not lease.granted(0, LEASE_MS, now_ms=5_000)
    assert not lease.valid(5_000)


def test_after_a_long_pause_the_lease_is_simply_gone() -> None:
    lease = BrokerLease()
    lease.sent(0, now_ms=0)
    assert lease.granted(0, LEASE_MS, now_ms=5)
    assert not lease.valid(60_000)


def test_a_later_answer_never_shortens() -> None:
    lease = BrokerLease()
    lease.sent(0, now_ms=0)
    lease.sent(1, now_ms=300)
    lease.granted(0, LEASE_MS, now_ms=310)
    before = lease.expires_at_ms
    lease.granted(1, lease_ms=100, now_ms=320)  # the controller's configuration was made shorter
    assert lease.expires_at_ms == before


def test_an_answer_without_a_lease_takes_nothing_away() -> None:
    lease = BrokerLease()
    lease.sent(0, now_ms=0)
    lease.granted(0, LEASE_MS, now_ms=5)
    lease.sent(1, now_ms=300)
    assert lease.granted(1, lease_ms=0, now_ms=310)


def test_an_answer_to_a_heartbeat_that_was_never_sent_grants_nothing() -> None:
    lease = BrokerLease()
    assert not lease.granted(7, LEASE_MS, now_ms=0)


def test_an_answer_is_taken_once() -> None:
    lease = BrokerLease()
    lease.sent(0, now_ms=0)
    lease.granted(0, 100, now_ms=5)
    lease.granted(0, 9_000, now_ms=6)
    assert lease.expires_at_ms < 100


def test_a_revoked_lease_does_not_come_back_with_a_late_answer() -> None:
    lease = BrokerLease()
    lease.sent(0, now_ms=0)
    lease.sent(1, now_ms=300)
    lease.granted(0, LEASE_MS, now_ms=310)
    lease.revoke()
    assert not lease.valid(311)
    assert not lease.granted(1, LEASE_MS, now_ms=312)


def test_unanswered_heartbeats_do_not_pile_up() -> None:
    lease = BrokerLease()
    for sequence in range(MAX_UNANSWERED + 1):
        lease.sent(sequence, now_ms=sequence)
    assert not lease.granted(0, LEASE_MS, now_ms=300)
    assert lease.granted(1, LEASE_MS, now_ms=300)


@given(st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 2_000)), max_size=30))
def test_whatever_the_delays_a_lease_ends_within_its_length_of_a_sending(steps: list[tuple[int, int]]) -> None:
    lease = BrokerLease()
    now_ms = 0
    for sequence, (pause_ms, delay_ms) in enumerate(steps):
        now_ms += pause_ms
        sent_at_ms = now_ms
        lease.sent(sequence, now_ms)
        before = lease.expires_at_ms
        now_ms += delay_ms
        lease.granted(sequence, LEASE_MS, now_ms)
        assert lease.expires_at_ms >= before
        assert lease.expires_at_ms <= sent_at_ms + LEASE_MS * (1 - DRIFT_PPM / 1_000_000)
