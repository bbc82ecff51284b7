"""Who is fenced and when, and who may have a lease."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmeta.image import BrokerImage, MetadataImage
from raftmeta.quorum.leases import BrokerLease
from raftmeta.quorum.sessions import BrokerSessions

SESSION_MS = 1_500
LEASE_MS = 1_200


def broker(broker_id: int, broker_epoch: int = 10, fenced: bool = False) -> BrokerImage:
    return BrokerImage(
        broker_id=broker_id,
        incarnation_id=bytes(16),
        broker_epoch=broker_epoch,
        host="localhost",
        port=9092,
        fenced=fenced,
    )


def image(*brokers: BrokerImage, offset: int = 100) -> MetadataImage:
    return MetadataImage(offset=offset, brokers={each.broker_id: each for each in brokers})


def active(*brokers: BrokerImage, now_ms: float = 0) -> BrokerSessions:
    sessions = BrokerSessions(SESSION_MS, LEASE_MS)
    sessions.activate(now_ms, image(*brokers))
    return sessions


def test_after_its_election_the_controller_gives_everyone_a_full_session() -> None:
    sessions = active(broker(1), now_ms=50)
    assert sessions.next_deadline_ms() == 50 + SESSION_MS
    assert sessions.expired(50 + SESSION_MS - 1, image(broker(1))) == []
    assert sessions.expired(50 + SESSION_MS, image(broker(1))) == [(1, 10)]


def test_a_heartbeat_begins_a_new_session() -> None:
    sessions = active(broker(1), broker(2))
    assert sessions.last_heartbeat_ms(1) is None
    assert sessions.heartbeat(1, 10, 900)
    assert sessions.last_heartbeat_ms(1) == 900
    assert sessions.expired(SESSION_MS, image(broker(1), broker(2))) == [(2, 10)]
    assert sessions.next_deadline_ms() == 900 + SESSION_MS


def test_a_heartbeat_of_another_registration_counts_for_nothing() -> None:
    sessions = active(broker(1))
    assert not sessions.heartbeat(1, 9, 100)
    assert not sessions.heartbeat(7, 10, 100)
    assert sessions.last_heartbeat_ms(1) is None


def test_a_broker_that_is_being_fenced_gets_no_lease_even_if_it_speaks_again() -> None:
    sessions = active(broker(1))
    now = image(broker(1))
    assert sessions.expired(SESSION_MS, now) == [(1, 10)]
    assert not sessions.heartbeat(1, 10, SESSION_MS + 1)
    assert not sessions.may_lease(1, 10, applied_offset=1_000)
    assert sessions.expired(SESSION_MS + 2, now) == [(1, 10)], "until the image shows it fenced"
    assert sessions.next_deadline_ms() is None
    fenced = image(broker(1, fenced=True), offset=101)
    assert sessions.expired(SESSION_MS + 3, fenced) == []
    assert sessions.heartbeat(1, 10, SESSION_MS + 4)


def test_a_fenced_broker_gets_no_lease_and_is_not_fenced_again() -> None:
    sessions = active(broker(1, fenced=True))
    assert sessions.heartbeat(1, 10, 5)
    assert not sessions.may_lease(1, 10, applied_offset=1_000)
    assert sessions.expired(10_000, image(broker(1, fenced=True))) == []


def test_after_unfencing_a_lease_needs_the_offset_of_the_unfencing() -> None:
    """Else the broker would lead, by an old image and a new lease, what was given to another while it was fenced."""
    sessions = active(broker(1, fenced=True))
    sessions.heartbeat(1, 10, 5)
    sessions.observe(6, image(broker(1), offset=140))
    assert not sessions.may_lease(1, 10, applied_offset=139)
    assert sessions.may_lease(1, 10, applied_offset=140)


def test_after_an_election_a_lease_needs_the_controllers_own_offset() -> None:
    sessions = active(broker(1))
    assert not sessions.may_lease(1, 10, applied_offset=99)
    assert sessions.may_lease(1, 10, applied_offset=100)


def test_changes_elsewhere_leave_the_offset_needed_for_a_lease_alone() -> None:
    sessions = active(broker(1))
    sessions.observe(5, image(broker(1), broker(2), offset=150))
    assert sessions.may_lease(1, 10, applied_offset=100)


def test_a_new_registration_starts_over() -> None:
    sessions = active(broker(1))
    sessions.heartbeat(1, 10, 100)
    sessions.observe(200, image(broker(1, broker_epoch=20, fenced=True), offset=20))
    assert not sessions.heartbeat(1, 10, 201)
    assert not sessions.may_lease(1, 10, applied_offset=1_000)
    assert sessions.last_heartbeat_ms(1) is None


def test_a_broken_stream_shortens_the_wait_to_what_a_lease_may_last() -> None:
    sessions = active(broker(1))
    sessions.heartbeat(1, 10, 1_000)
    sessions.stream_lost(1, 1_010)
    deadline_ms = sessions.next_deadline_ms()
    assert deadline_ms is not None
    assert 1_000 + LEASE_MS < deadline_ms < 1_000 + LEASE_MS + 10
    assert sessions.expired(1_000 + LEASE_MS, image(broker(1))) == []
    assert sessions.expired(deadline_ms, image(broker(1))) == [(1, 10)]


def test_a_heartbeat_on_another_stream_makes_up_for_a_broken_one() -> None:
    sessions = active(broker(1))
    sessions.heartbeat(1, 10, 1_000)
    sessions.stream_lost(1, 1_010)
    sessions.heartbeat(1, 10, 1_020)
    assert sessions.next_deadline_ms() == 1_020 + SESSION_MS


def test_a_stream_that_breaks_after_the_election_leaves_the_leases_of_the_former_controller_their_time() -> None:
    sessions = active(broker(1), now_ms=500)
    sessions.stream_lost(1, 501)
    assert sessions.expired(500 + LEASE_MS, image(broker(1))) == []


def test_a_controlled_shutdown_ends_leases_before_it_fences() -> None:
    sessions = active(broker(1))
    sessions.begin_fencing(1, 9)
    assert sessions.may_lease(1, 10, 100)
    sessions.begin_fencing(1, 10)
    assert not sessions.may_lease(1, 10, 100)
    assert sessions.expired(1, image(broker(1))) == [(1, 10)]


def test_who_may_be_unfenced() -> None:
    sessions = active(broker(1, fenced=True))
    assert not sessions.is_live(1, 10, 1)
    sessions.heartbeat(1, 10, 1)
    assert sessions.is_live(1, 10, 2)
    assert not sessions.is_live(1, 9, 2)
    assert not sessions.is_live(1, 10, 1 + SESSION_MS)


def test_who_was_fenced_after_its_stream_broke_is_not_unfenced_for_the_rest_of_a_session() -> None:
    """A lease is shorter than a session: between the two ends it would be fenced and unfenced without an end."""
    sessions = active(broker(1))
    sessions.heartbeat(1, 10, 1_000)
    sessions.stream_lost(1, 1_010)
    deadline_ms = sessions.next_deadline_ms()
    assert deadline_ms is not None
    assert sessions.expired(deadline_ms, image(broker(1))) == [(1, 10)]
    sessions.observe(deadline_ms, image(broker(1, fenced=True), offset=11))
    assert deadline_ms < 1_000 + SESSION_MS
    assert not sessions.is_live(1, 10, deadline_ms)
    sessions.heartbeat(1, 10, deadline_ms)
    assert sessions.is_live(1, 10, deadline_ms), "it is back, on another stream"


def test_a_controller_that_stood_still_reads_what_waits_before_it_fences_anyone() -> None:
    sessions = active(broker(1), broker(2))
    both = image(broker(1), broker(2))
    assert sessions.expired(60_000, both) == []
    sessions.heartbeat(1, 10, 60_001)
    assert sessions.expired(60_000 + SESSION_MS, both) == [(2, 10)], "the grace is given once"


def test_a_broker_that_is_gone_is_forgotten() -> None:
    sessions = active(broker(1), broker(2))
    sessions.observe(5, image(broker(2), offset=101))
    assert not sessions.heartbeat(1, 10, 6)
    sessions.forget(2)
    assert sessions.next_deadline_ms() is None


def test_a_session_not_longer_than_a_lease_is_refused() -> None:
    with pytest.raises(AssertionError, match="lease"):
        BrokerSessions(session_timeout_ms=1_200, lease_ms=1_200)


@given(
    broker_ppm=st.integers(-1_000, 1_000),
    controller_ppm=st.integers(-1_000, 1_000),
    beats=st.lists(st.tuples(st.integers(1, 1_000), st.integers(0, 900), st.integers(0, 900)), min_size=1, max_size=12),
    breaks=st.booleans(),
)
def test_no_lease_outlives_the_fencing(
    broker_ppm: int, controller_ppm: int, beats: list[tuple[int, int, int]], breaks: bool
) -> None:
    """Whatever the delays, and with clocks that drift apart as far as is allowed for."""

    def broker_ms(true_ms: float) -> float:
        return true_ms * (1 + broker_ppm / 1e6)

    def controller_ms(true_ms: float) -> float:
        return true_ms * (1 + controller_ppm / 1e6)

    lease, sessions = BrokerLease(), BrokerSessions(SESSION_MS, LEASE_MS)
    now = image(broker(1))
    sessions.activate(0, now)
    true_ms = 0.0
    for sequence, (pause_ms, there_ms, back_ms) in enumerate(beats):
        true_ms += pause_ms
        lease.sent(sequence, broker_ms(true_ms))
        true_ms += there_ms
        if sessions.expired(controller_ms(true_ms), now):
            break
        if sessions.heartbeat(1, 10, controller_ms(true_ms)) and sessions.may_lease(1, 10, 100):
            true_ms += back_ms
            lease.granted(sequence, LEASE_MS, broker_ms(true_ms))
    if breaks:
        sessions.stream_lost(1, controller_ms(true_ms))
    while not sessions.expired(controller_ms(true_ms), now):
        true_ms += 5
    assert not lease.valid(broker_ms(true_ms))


def test_the_same_broker_with_another_host_keeps_its_session() -> None:
    sessions = active(broker(1))
    sessions.heartbeat(1, 10, 5)
    sessions.observe(6, image(replace(broker(1), host="elsewhere"), offset=130))
    assert sessions.last_heartbeat_ms(1) == 5
    assert sessions.may_lease(1, 10, 100)
