"""Sessions, leases and heartbeats: which broker is fenced and when, and which may have a lease."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import BrokerIdNotRegistered, InconsistentClusterId, NotController, StaleBrokerEpoch
from raftlog.v1.controller_pb2 import ControllerHint, HeartbeatRequest, HeartbeatResponse
from raftmeta.image import BrokerImage, MetadataImage
from raftmeta.quorum.controller import HeartbeatHandler
from raftmeta.quorum.sessions import CLOCK_GRAIN_MS, DRIFT_PPM, MAX_UNANSWERED, BrokerLease, BrokerSessions

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
    assert sessions.expired(SESSION_MS + 2, now) == [(1, 10)], (
        "the session must be reported as expired until the metadata shows the broker as fenced"
    )
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


def test_a_broker_is_silent_until_it_is_heard_and_when_it_is_heard_no_more() -> None:
    sessions = active(broker(1), broker(2), broker(3, fenced=True))
    assert sessions.silent(0) == {1, 2}, (
        "brokers without a heartbeat since the election must count as silent, but not a fenced one"
    )
    sessions.heartbeat(1, 10, 100)
    sessions.heartbeat(2, 10, 100)
    assert sessions.silent(100 + LEASE_MS / 2) == frozenset()
    assert sessions.silent(101 + LEASE_MS / 2) == {1, 2}
    sessions.stream_lost(1, 200)
    assert sessions.silent(200) == {1}
    sessions.heartbeat(1, 10, 300)
    assert sessions.silent(300) == frozenset()


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
    assert sessions.is_live(1, 10, deadline_ms), (
        "the broker must count as live again after a heartbeat over a new stream"
    )


def test_a_controller_that_stood_still_reads_what_waits_before_it_fences_anyone() -> None:
    sessions = active(broker(1), broker(2))
    both = image(broker(1), broker(2))
    assert sessions.expired(60_000, both) == []
    sessions.heartbeat(1, 10, 60_001)
    assert sessions.expired(60_000 + SESSION_MS, both) == [(2, 10)], (
        "the grace after an election must be given only once"
    )


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
    """Under any delays, and with clocks that drift as far as the protocol allows."""

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


LEASE_MS, SESSION_MS = 1_200, 1_500


class Reads:
    """Majority rounds that end when the test says so."""

    def __init__(self) -> None:
        self.rounds: list[asyncio.Future[int]] = []

    def read_index(self) -> asyncio.Future[int]:
        self.rounds.append(asyncio.get_running_loop().create_future())
        return self.rounds[-1]


class Rig:
    """A handler with one unfenced broker, 1 of epoch 5."""

    def __init__(self) -> None:
        self.image = MetadataImage(
            offset=50, cluster_id="c", controller_epoch=3, brokers={1: BrokerImage(1, bytes(16), 5, "h", 1)}
        )
        self.now_ms = 0.0
        self.woken = 0
        self.reads = Reads()
        self.sessions = BrokerSessions(SESSION_MS, LEASE_MS)
        self.sessions.activate(0, self.image)
        self.handler = HeartbeatHandler(
            3,
            self.sessions,
            self.reads,
            lambda: self.image,
            lambda: self.now_ms,
            self.wake,
            lambda broker_id: True,
            lambda: ControllerHint(controller_id=2, controller_epoch=4, host="h", port=9),
        )

    def wake(self) -> None:
        self.woken += 1

    def set_broker(self, **changes: object) -> None:
        broker = replace(self.image.brokers[1], **changes)  # type: ignore[arg-type] # names and values of its fields
        self.image = replace(self.image, offset=self.image.offset + 1, brokers={1: broker})
        self.sessions.observe(self.now_ms, self.image)

    def beat(
        self, sequence: int = 1, epoch: int = 5, applied: int = 99, **more: object
    ) -> asyncio.Future[HeartbeatResponse]:
        request = HeartbeatRequest(
            broker_id=1,
            broker_epoch=epoch,
            sequence=sequence,
            applied_offset=applied,
            **more,  # type: ignore[arg-type]
        )
        return self.handler.take(request, "stream")


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_heartbeat_waits_for_a_round_that_begins_after_it() -> None:
    rig = Rig()
    first = rig.beat(1)
    await turn()
    second, third = rig.beat(2), rig.beat(3)
    assert len(rig.reads.rounds) == 1, "the second heartbeat must share the next round, not the one in progress"
    rig.reads.rounds[0].set_result(50)
    await turn()
    assert first.result().lease_ms == LEASE_MS
    assert not second.done()
    assert len(rig.reads.rounds) == 2
    rig.reads.rounds[1].set_result(50)
    await turn()
    assert [second.result().sequence, third.result().sequence] == [2, 3]
    assert second.result().controller_epoch == 3
    assert second.result().metadata_offset == 50


async def test_without_a_majority_there_is_no_lease_but_the_way_to_another_controller() -> None:
    rig = Rig()
    first = rig.beat(1)
    second = rig.beat(2)
    rig.reads.rounds[0].set_exception(NotController("deposed"))
    await turn()
    for answer in (first.result(), second.result()):
        assert answer.error.code == NotController.code
        assert answer.lease_ms == 0
        assert answer.controller.controller_id == 2


async def test_what_counts_is_the_image_when_the_majority_has_answered() -> None:
    rig = Rig()
    fenced = rig.beat(1)
    rig.set_broker(fenced=True)
    rig.reads.rounds[0].set_result(51)
    await turn()
    assert fenced.result().fenced
    assert fenced.result().lease_ms == 0

    rig = Rig()
    replaced = rig.beat(1)
    rig.set_broker(broker_epoch=51)
    rig.reads.rounds[0].set_result(51)
    await turn()
    assert replaced.result().error.code == StaleBrokerEpoch.code

    rig = Rig()
    removed = rig.beat(1)
    rig.image = replace(rig.image, brokers={})
    rig.reads.rounds[0].set_result(51)
    await turn()
    assert removed.result().error.code == BrokerIdNotRegistered.code


async def test_a_round_that_fails_after_the_end_of_the_term_leaves_nothing_unretrieved() -> None:
    said: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
    rig = Rig()
    rig.beat(1)
    rig.handler.close()
    rig.reads.rounds[0].set_exception(NotController("deposed"))
    await turn()
    rig.reads.rounds.clear()
    gc.collect()
    assert said == []


async def test_a_report_says_since_when_a_broker_stands_still() -> None:
    rig = Rig()
    rig.beat(1, applied=50)
    report = rig.handler.reports[1]
    assert report.catch_up_to == 50
    assert report.stands_since_ms == float("inf")
    rig.set_broker(host="other")
    rig.now_ms = 7.0
    rig.beat(2, applied=50)
    assert report.stands_since_ms == 7.0


async def test_a_broker_that_is_about_to_be_fenced_gets_no_lease() -> None:
    rig = Rig()
    waiting = rig.beat(1)
    rig.now_ms = SESSION_MS + 1
    assert rig.sessions.expired(rig.now_ms, rig.image) == [(1, 5)]
    rig.reads.rounds[0].set_result(50)
    await turn()
    assert waiting.result().lease_ms == 0
    late = rig.beat(2)
    rig.reads.rounds[1].set_result(50)
    await turn()
    assert late.result().lease_ms == 0


async def test_a_broker_that_acts_on_an_older_image_than_its_unfencing_gets_no_lease() -> None:
    rig = Rig()
    rig.set_broker(fenced=True)
    rig.set_broker(fenced=False)  # at offset 52
    behind = rig.beat(1, applied=51)
    rig.reads.rounds[0].set_result(52)
    await turn()
    assert behind.result().lease_ms == 0
    there = rig.beat(2, applied=52)
    rig.reads.rounds[1].set_result(52)
    await turn()
    assert there.result().lease_ms == LEASE_MS


async def test_who_has_given_its_lease_up_gets_none() -> None:
    rig = Rig()
    answer = rig.beat(1, wants_shutdown=True, lease_released=True)
    rig.reads.rounds[0].set_result(50)
    await turn()
    assert answer.result().lease_ms == 0
    assert answer.result().may_shut_down
    assert rig.woken > 0


async def test_a_broker_of_another_cluster_is_told_so() -> None:
    rig = Rig()
    answer = rig.beat(1, cluster_id="other")
    rig.reads.rounds[0].set_result(50)
    await turn()
    assert answer.result().error.code == InconsistentClusterId.code
    assert rig.handler.reports == {}


async def test_only_the_newest_stream_of_a_broker_counts_when_one_ends() -> None:
    rig = Rig()
    request = HeartbeatRequest(broker_id=1, broker_epoch=5, sequence=1, applied_offset=99)
    rig.handler.take(request, "old")
    rig.handler.take(request, "new")
    rig.handler.stream_closed("old")
    deadline = rig.sessions.next_deadline_ms()
    assert deadline == SESSION_MS
    rig.handler.stream_closed("new")
    shortened = rig.sessions.next_deadline_ms()
    assert shortened is not None
    assert LEASE_MS < shortened < SESSION_MS


async def test_the_end_of_the_term_answers_everybody() -> None:
    rig = Rig()
    waiting = [rig.beat(1), rig.beat(2)]
    rig.handler.close()
    late = rig.beat(3)
    rig.reads.rounds[0].set_result(50)
    await turn()
    assert {answer.result().error.code for answer in (*waiting, late)} == {NotController.code}
