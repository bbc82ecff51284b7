"""The follower's end of a stream, alone and against a leader's end."""

from __future__ import annotations

import random
from typing import Any

import pytest

from raftlog.errors import (
    CorruptRecordError,
    InvalidRequestError,
    NotLeader,
    StorageError,
    StorageFull,
    UnknownLeaderEpoch,
    to_wire,
)
from raftlog.format.wire import ReplicaFrame
from raftlog.v1 import replication_pb2
from raftlog.v1.replication_pb2 import DivergingEpoch, ReplicateRequest
from replication import follower_session
from replication.follower_session import FollowerOptions, FollowerSession, State
from replication.token_bucket import TokenBucket
from tests.support.replica_parts import CLUSTER, FOLLOWER, LEADER, ME, TOPIC, Batch, Followed, Led, MemoryLog, Stream

KEY = (TOPIC, 0)
OPTIONS = FollowerOptions(
    credit_bytes=1000, catch_up_credit_bytes=800, max_frame_bytes=500, first_retry_ms=10, last_retry_ms=80
)


class Wire:
    """A `FollowerSession`, and a leader that a test plays itself."""

    def __init__(self, *followed: Followed, throttle: TokenBucket | None = None, connected: bool = True) -> None:
        self.now_ms = 0.0
        self.wakes = 0
        self.session = FollowerSession(
            me=ME,
            leader_id=LEADER,
            cluster_id=CLUSTER,
            wake=self._wake,
            throttle=throttle or TokenBucket(),
            options=OPTIONS,
        )
        for one in followed:
            self.session.follow(one)
        if connected:
            self.session.connected(self.now_ms)

    def _wake(self) -> None:
        self.wakes += 1

    def request(self) -> ReplicateRequest | None:
        return self.session.take_request(self.now_ms)

    def said(self) -> ReplicateRequest:
        request = self.request()
        assert request is not None
        return request

    def send(self, subscription_id: int = 1, records: bytes = b"", **fields: object) -> None:
        head = replication_pb2.ReplicaFrame(subscription_id=subscription_id, **fields)  # type: ignore[arg-type] # checked there
        self.session.handle([ReplicaFrame(head, records)], self.now_ms)

    def state(self, partition: int = 0) -> State:
        return self.session.states()[TOPIC, partition]


def batches(*offsets: int, epoch: int = 1, size: int = 1) -> bytes:
    return b"".join(Batch(offset, epoch, b"x" * size).encoded() for offset in offsets)


def test_the_first_request_has_hello_credit_and_every_partition() -> None:
    wire = Wire(Followed(MemoryLog([1, 1])), Followed(MemoryLog(start=7), partition=3))
    request = wire.said()
    hello = request.hello
    assert (hello.cluster_id, hello.broker_id, hello.broker_epoch, hello.leader_id) == (CLUSTER, *ME, LEADER)
    assert (request.live_credit_bytes, request.catch_up_credit_bytes, hello.max_frame_bytes) == (1000, 800, 500)
    assert [(o.subscription_id, o.partition, o.fetch_offset, o.last_fetched_epoch) for o in request.open] == [
        (1, 0, 2, 1),
        (2, 3, 7, -1),
    ]
    assert wire.request() is None
    assert wire.state() is State.OPENING


def test_what_comes_is_appended_and_acked_when_it_is_held() -> None:
    followed = Followed(MemoryLog())
    followed.flushes_by_hand = True
    wire = Wire(followed)
    wire.said()
    wire.send(records=batches(0, 1), high_watermark=0)
    wire.send(records=batches(2), high_watermark=1)
    assert wire.state() is State.FOLLOWING
    assert (followed.log.end, followed.high_watermark) == (3, 1)
    assert wire.request() is None
    wakes = wire.wakes
    followed.flush()
    assert wire.wakes > wakes
    request = wire.said()
    assert [(ack.subscription_id, ack.durable_end_offset) for ack in request.acks] == [(1, 3)]
    assert request.live_credit_bytes == len(batches(0, 1, 2))


def test_the_marks_of_a_frame_are_taken_before_its_records() -> None:
    """A marker among them may end a transaction that begins, here, below the new log start: then no marker is missing.

    The leader has copied its log from that start on, and knows no earlier record of the transaction.
    """
    starts: list[int] = []

    class Noting(Followed):
        def append_replicated(self, *args: Any, **kwargs: Any) -> None:
            starts.append(self.log_start_offset)
            super().append_replicated(*args, **kwargs)

    wire = Wire(Noting(MemoryLog([1, 1])))
    wire.said()
    wire.send(records=batches(2), high_watermark=3, log_start_offset=2)
    assert starts == [2]


def test_a_new_log_start_is_acked_once_and_again_on_a_new_stream() -> None:
    """The leader answers `DeleteRecords` once the replicas in sync have deleted the records."""
    wire = Wire(Followed(MemoryLog([1, 1, 1])))
    wire.said()
    wire.send(high_watermark=3, log_start_offset=0)
    assert wire.request() is None
    wire.send(high_watermark=3, log_start_offset=2)
    assert [(ack.durable_end_offset, ack.log_start_offset) for ack in wire.said().acks] == [(3, 2)]
    wire.send(high_watermark=3, log_start_offset=2)
    assert wire.request() is None
    wire.session.lost()
    wire.session.connected(wire.now_ms)
    wire.said()
    wire.send(records=batches(3), high_watermark=3, log_start_offset=2)
    assert [(ack.durable_end_offset, ack.log_start_offset) for ack in wire.said().acks] == [(4, 2)]


def test_credit_goes_back_alone_once_it_is_a_quarter_of_the_window() -> None:
    followed = Followed(MemoryLog())
    followed.flushes_by_hand = True
    wire = Wire(followed)
    wire.said()
    wire.send(records=batches(0, size=200))
    assert wire.request() is None
    wire.send(records=batches(1, size=200), catch_up=True)
    assert wire.request() is None
    wire.send(records=batches(2, size=50))
    assert wire.said().live_credit_bytes == len(batches(0, size=200)) + len(batches(2, size=50))


def test_beside_live_records_credit_of_catching_up_goes_back_after_a_pause_and_half_of_it_stays() -> None:
    followed, live = Followed(MemoryLog()), Followed(MemoryLog(), partition=1)
    followed.flushes_by_hand = True
    wire = Wire(followed, live)
    wire.said()
    wire.send(2, records=batches(0))
    wire.said()
    wire.send(records=batches(0, size=784), catch_up=True)  # 800 bytes, all of the window
    wire.now_ms = 4.0
    followed.flush()
    request = wire.said()
    assert [ack.subscription_id for ack in request.acks] == [1]
    assert request.catch_up_credit_bytes == 0
    assert wire.session.next_deadline_ms(wire.now_ms) == 8.0  # it took 4 ms, so the pause takes 4
    wire.now_ms = 7.9
    assert wire.request() is None
    wire.now_ms = 8.0
    assert wire.said().catch_up_credit_bytes == 400
    assert wire.session.next_deadline_ms(wire.now_ms) is None
    wire.send(records=batches(1, size=384), catch_up=True)
    wire.now_ms = 2_000.0  # no live record for a while: the whole window again, at once
    followed.flush()
    assert wire.said().catch_up_credit_bytes == 800


def test_credit_for_what_catches_up_goes_back_when_it_is_held() -> None:
    followed = Followed(MemoryLog())
    followed.flushes_by_hand = True
    wire = Wire(followed)
    wire.said()
    wire.send(records=batches(0, size=300), catch_up=True)
    wire.send(records=batches(1, size=400), catch_up=True)
    assert wire.request() is None  # appended, and not on the disk
    followed.flush()
    request = wire.said()
    assert request.catch_up_credit_bytes == len(batches(0, size=300)) + len(batches(1, size=400))
    assert [ack.durable_end_offset for ack in request.acks] == [2]


@pytest.mark.parametrize("end", ["unfollowed", "refused"])
def test_credit_for_what_is_never_heard_of_again_goes_back_at_once(end: str) -> None:
    followed = Followed(MemoryLog())
    followed.flushes_by_hand = True
    wire = Wire(followed)
    wire.said()
    wire.send(records=batches(0, size=300), catch_up=True)
    assert wire.request() is None
    if end == "unfollowed":
        wire.session.unfollow(*KEY)
    else:
        wire.send(error=to_wire(UnknownLeaderEpoch("resigned")))
    assert wire.said().catch_up_credit_bytes == len(batches(0, size=300))


def test_a_new_stream_begins_with_the_whole_credit_and_gets_none_for_what_the_old_one_sent() -> None:
    followed = Followed(MemoryLog())
    followed.flushes_by_hand = True
    wire = Wire(followed)
    wire.said()
    wire.send(records=batches(0, size=300), catch_up=True)
    wire.session.lost()
    wire.session.connected(wire.now_ms)
    assert wire.said().catch_up_credit_bytes == 800
    followed.flush()
    request = wire.request()
    assert request is None or request.catch_up_credit_bytes == 0


def test_frames_of_a_subscription_that_is_over_are_passed_over_and_their_credit_returned() -> None:
    followed = Followed(MemoryLog())
    wire = Wire(followed)
    wire.said()
    wire.session.unfollow(*KEY)
    assert list(wire.said().close) == [1]
    wire.send(records=batches(0, size=400))
    assert followed.log.end == 0
    assert wire.said().live_credit_bytes == len(batches(0, size=400))


def test_a_frame_for_what_was_never_opened_breaks_the_protocol() -> None:
    wire = Wire(Followed(MemoryLog()))
    wire.said()
    for subscription_id in (0, 2):
        with pytest.raises(InvalidRequestError, match="never opened"):
            wire.send(subscription_id)


def test_diverging_truncates_and_asks_again() -> None:
    followed = Followed(MemoryLog([1, 1, 2, 2]), epoch=3)
    followed.waits_with_truncation = True
    wire = Wire(followed)
    wire.said()
    wire.send(diverging=DivergingEpoch(leader_epoch=1, end_offset=3))
    assert wire.state() is State.TRUNCATING
    assert wire.request() is None
    assert followed.truncated is not None
    followed.truncated(None)
    (opening,) = wire.said().open
    assert (opening.subscription_id, opening.fetch_offset, opening.last_fetched_epoch) == (2, 2, 1)


def test_out_of_range_starts_over_at_the_leaders_start() -> None:
    followed = Followed(MemoryLog([1, 1]))
    wire = Wire(followed)
    wire.said()
    wire.send(out_of_range=True, log_start_offset=50)
    (opening,) = wire.said().open
    assert (opening.fetch_offset, opening.last_fetched_epoch, opening.durable_end_offset) == (50, -1, 50)


def test_an_accepted_partition_cannot_diverge() -> None:
    followed = Followed(MemoryLog([1, 1]))
    wire = Wire(followed)
    wire.said()
    wire.send(high_watermark=1)
    with pytest.raises(InvalidRequestError, match="has accepted"):
        wire.send(diverging=DivergingEpoch(leader_epoch=-1))
    assert followed.log.end == 2


def test_a_refusal_is_asked_again_with_growing_pauses_until_it_is_accepted() -> None:
    wire = Wire(Followed(MemoryLog()))
    wire.said()
    pauses = []
    for number in range(1, 7):
        wire.send(number, error=to_wire(UnknownLeaderEpoch("not yet")))
        assert wire.state() is State.BACKING_OFF
        assert wire.request() is None
        due_ms = wire.session.next_deadline_ms(wire.now_ms)
        assert due_ms is not None
        pauses.append(due_ms - wire.now_ms)
        wire.now_ms = due_ms
        assert [opening.subscription_id for opening in wire.said().open] == [number + 1]
        assert wire.session.next_deadline_ms(wire.now_ms) is None
    assert pauses == [10, 20, 40, 80, 80, 80]
    wire.send(7, records=batches(0))
    wire.send(7, error=to_wire(NotLeader("gone")))
    assert wire.session.next_deadline_ms(wire.now_ms) == wire.now_ms + 10


@pytest.mark.parametrize("error", [CorruptRecordError("bits"), StorageError("disk"), StorageFull("space")])
def test_what_cannot_be_appended_closes_the_subscription_and_is_fetched_again(error: Exception) -> None:
    followed, other = Followed(MemoryLog()), Followed(MemoryLog(), partition=1)
    followed.append_error = error  # type: ignore[assignment] # they are
    wire = Wire(followed, other)
    wire.said()
    wire.send(records=batches(0))
    wire.send(2, records=batches(0))
    assert other.log.end == 1
    request = wire.said()
    assert list(request.close) == [1]
    assert wire.state() is State.BACKING_OFF
    followed.append_error = None
    wire.now_ms += 2_000
    assert [opening.fetch_offset for opening in wire.said().open] == [0]


def test_a_new_epoch_is_a_new_subscription_and_the_same_one_changes_nothing() -> None:
    followed = Followed(MemoryLog())
    wire = Wire(followed)
    wire.said()
    wire.session.follow(followed)
    assert wire.request() is None
    followed.leader_epoch = 2
    wire.session.follow(followed)
    request = wire.said()
    assert list(request.close) == [1]
    assert [(opening.subscription_id, opening.leader_epoch) for opening in request.open] == [(2, 2)]
    wire.send(1, records=batches(0))
    assert followed.log.end == 0


def test_a_flush_that_ends_after_the_epoch_has_changed_acks_nothing_in_the_old_one() -> None:
    followed = Followed(MemoryLog())
    followed.flushes_by_hand = True
    wire = Wire(followed)
    wire.said()
    wire.send(records=batches(0))
    followed.leader_epoch = 2
    wire.session.follow(followed)
    wire.said()
    followed.flush()
    assert [ack.subscription_id for ack in wire.said().acks] == [2]


def test_a_truncation_that_ends_after_the_partition_was_let_go_does_nothing() -> None:
    followed = Followed(MemoryLog([1, 2]), epoch=3)
    followed.waits_with_truncation = True
    wire = Wire(followed)
    wire.said()
    wire.send(diverging=DivergingEpoch(leader_epoch=1, end_offset=1))
    wire.session.unfollow(*KEY)
    assert followed.truncated is not None
    followed.truncated(None)
    assert wire.request() is None
    assert wire.session.states() == {}


def test_a_truncation_that_fails_is_tried_again() -> None:
    followed = Followed(MemoryLog([1, 2]), epoch=3)
    followed.waits_with_truncation = True
    wire = Wire(followed)
    wire.said()
    wire.send(diverging=DivergingEpoch(leader_epoch=1, end_offset=1))
    assert followed.truncated is not None
    followed.truncated(StorageError("the disk"))
    assert wire.state() is State.BACKING_OFF
    wire.now_ms += 2_000
    assert len(wire.said().open) == 1


def test_a_stream_that_breaks_is_opened_again_from_where_the_logs_are() -> None:
    followed, backing_off, truncating = (Followed(MemoryLog([1]), partition=n) for n in range(3))
    truncating.waits_with_truncation = True
    wire = Wire(followed, backing_off, truncating)
    wire.said()
    wire.send(1, records=batches(1))
    wire.send(2, error=to_wire(UnknownLeaderEpoch("not yet")))
    wire.send(3, diverging=DivergingEpoch(leader_epoch=-1, end_offset=0))
    wire.session.lost()
    assert wire.request() is None
    assert [wire.state(n) for n in range(3)] == [State.WAITING, State.BACKING_OFF, State.TRUNCATING]
    wire.session.connected(wire.now_ms)
    request = wire.said()
    assert request.HasField("hello")
    assert [(o.subscription_id, o.partition, o.fetch_offset) for o in request.open] == [(1, 0, 2)]
    assert request.live_credit_bytes == 1000
    wire.now_ms += 10
    assert [o.partition for o in wire.said().open] == [1]
    assert truncating.truncated is not None
    truncating.truncated(None)
    assert [(o.partition, o.fetch_offset) for o in wire.said().open] == [(2, 0)]


def test_nothing_is_due_while_there_is_no_stream() -> None:
    wire = Wire(Followed(MemoryLog()))
    wire.said()
    wire.send(1, error=to_wire(UnknownLeaderEpoch("not yet")))
    wire.session.lost()
    assert wire.session.next_deadline_ms(0.0) is None
    assert wire.request() is None


def test_credit_for_throttled_partitions_is_granted_at_the_rate() -> None:
    followed = Followed(MemoryLog())
    followed.is_throttled = True
    wire = Wire(followed, throttle=TokenBucket(1000))
    request = wire.said()
    assert [opening.throttled for opening in request.open] == [True]
    assert (request.throttled_credit_bytes, request.catch_up_credit_bytes) == (100, 800)
    wire.send(records=batches(0, size=484), catch_up=True, throttled=True)  # 500 bytes, of which 200 pass at once
    assert [ack.durable_end_offset for ack in wire.said().acks] == [1]
    assert wire.session.next_deadline_ms(0.0) == pytest.approx(301)
    wire.now_ms = 302.0
    request = wire.said()
    assert (request.throttled_credit_bytes, request.catch_up_credit_bytes) == (500, 0)  # what is owed, and a piece
    wire.send(records=batches(1, size=484))  # live: not held back
    assert wire.said().live_credit_bytes == 500


def test_many_partitions_are_opened_in_several_requests() -> None:
    wire = Wire(*(Followed(MemoryLog(), partition=n) for n in range(4_500)))
    sizes = [len(wire.said().open) for _ in range(9)]
    assert sizes == [500] * 9
    assert wire.request() is None


def test_many_partitions_are_acked_and_closed_in_several_requests() -> None:
    wire = Wire(*(Followed(MemoryLog(), partition=n) for n in range(4_500)))
    for _ in range(9):
        wire.said()
    for number in range(4_500):
        wire.send(number + 1, records=batches(0))
    requests = [wire.said() for _ in range(3)]
    assert [len(request.acks) for request in requests] == [2_000, 2_000, 500]
    assert {ack.subscription_id for request in requests for ack in request.acks} == set(range(1, 4_501))
    for number in range(4_500):
        wire.session.unfollow(TOPIC, number)
    assert [len(wire.said().close) for _ in range(3)] == [2_000, 2_000, 500]
    assert wire.request() is None


def test_what_was_being_flushed_when_the_epoch_changed_is_acked_in_the_new_one() -> None:
    followed = Followed(MemoryLog())
    followed.flushes_by_hand = True
    wire = Wire(followed)
    wire.said()
    wire.send(records=batches(0, 1))
    followed.leader_epoch = 2
    wire.session.follow(followed)
    (opening,) = wire.said().open
    assert (opening.fetch_offset, opening.durable_end_offset) == (2, 0)
    wire.send(2, high_watermark=0)
    assert wire.request() is None
    assert wire.session.next_deadline_ms(wire.now_ms) is None
    followed.flush()
    request = wire.said()
    assert [(ack.subscription_id, ack.durable_end_offset) for ack in request.acks] == [(2, 2)]
    assert wire.session.next_deadline_ms(wire.now_ms) is None


def test_many_that_wait_for_their_flush_cost_nothing_until_it_is_done() -> None:
    followed = [Followed(MemoryLog(), partition=n) for n in range(400)]
    wire = Wire(*followed)
    wire.said()
    for one in followed:
        one.flushes_by_hand = True
        wire.send(one.partition + 1, records=batches(0))
        one.leader_epoch = 2
        wire.session.follow(one)
    assert len(wire.said().open) == 400
    assert wire.request() is None
    assert wire.session.next_deadline_ms(wire.now_ms) is None
    for one in followed:
        one.flush()
    assert len(wire.said().acks) == 400


# What came damaged, and what is said of trouble


def test_the_leader_is_told_where_a_batch_did_not_check_once() -> None:
    followed, other = Followed(MemoryLog([1])), Followed(MemoryLog([1]), partition=1)
    followed.append_error = CorruptRecordError("bits")
    other.append_error = StorageError("the disk")
    wire = Wire(followed, other)
    assert not any(opening.HasField("damaged_offset") for opening in wire.said().open)
    wire.send(1, records=batches(1))
    wire.send(2, records=batches(1))
    wire.said()
    wire.session.lost()  # on which stream it is told does not matter
    wire.session.connected(wire.now_ms)
    wire.now_ms += 1_000
    told = {opening.partition: opening for opening in wire.said().open}
    assert told[0].damaged_offset == 1
    assert not told[1].HasField("damaged_offset")
    followed.append_error = None
    wire.send(told[0].subscription_id, error=to_wire(NotLeader("gone")))
    wire.now_ms += 1_000
    assert [opening.HasField("damaged_offset") for opening in wire.said().open] == [False]


def test_many_partitions_that_cannot_be_followed_for_one_reason_make_one_line(caplog: pytest.LogCaptureFixture) -> None:
    followed = [Followed(MemoryLog(), partition=n) for n in range(40)]
    wire = Wire(*followed)
    wire.said()
    for one in followed:
        one.append_error = StorageError("no space left") if one.partition else CorruptRecordError("bits")
        wire.send(one.partition + 1, records=batches(0))
    wire.said()
    assert caplog.messages == []
    due_ms = wire.session.next_deadline_ms(wire.now_ms)
    assert due_ms == 1_000.0
    wire.now_ms = due_ms
    wire.request()
    assert caplog.messages == [
        "cannot follow topic-0: bits; trying again",
        "cannot follow topic-1, topic-2, topic-3 and 36 more partitions: no space left; trying again",
    ]
    assert [vars(record)["partitions"] for record in caplog.records] == [1, 39]
    wire.now_ms += 10_000
    wire.request()
    assert len(caplog.messages) == 2


def same(followed: Followed, led: Led) -> bool:
    return followed.log.batches == led.log.batches and followed.log.start == led.log.start


def test_a_record_is_copied_acked_and_committed() -> None:
    led, followed = Led(MemoryLog()), Followed(MemoryLog())
    stream = Stream({0: led})
    stream.follower.follow(followed)
    stream.run()
    led.append(b"a", b"b")
    stream.run()
    assert same(followed, led)
    assert led.high_watermark == 2
    stream.advance(10)
    assert followed.high_watermark == 2


def test_a_record_takes_one_message_there_and_one_back() -> None:
    led, followed = Led(MemoryLog()), Followed(MemoryLog())
    stream = Stream({0: led})
    stream.follower.follow(followed)
    stream.run()
    stream.advance(10)
    stream.messages.clear()
    stream.requests.clear()
    led.append(b"a")
    stream.run()
    assert (len(stream.messages), len(stream.requests)) == (1, 1)
    assert led.high_watermark == 1


class TracesByOffset:
    """Every record is of a trace of its own."""

    def between(self, begin: int, end: int) -> list[str]:
        return [f"trace-{offset}" for offset in range(begin, end)]


def test_the_follower_hears_of_which_traces_the_records_are() -> None:
    led, followed = Led(MemoryLog()), Followed(MemoryLog())
    stream = Stream({0: led})
    stream.follower.follow(followed)
    led.append(b"a")
    stream.run()
    assert followed.traceparents == [], "without tracing no trace may be passed on"
    led.traces = TracesByOffset()
    led.append(b"b", b"c")
    stream.run()
    led.append(b"d")
    stream.run()
    assert same(followed, led)
    assert followed.traceparents == ["trace-1", "trace-2", "trace-3"]


@pytest.mark.parametrize(
    ("leader", "follower"),
    [
        # KIP-101: the follower has what the leader truncated before it led.
        ([1, 1, 2], [1, 1, 1, 1]),
        # KIP-279: both have been leaders since, in epochs that the other has not.
        ([0] * 10 + [2] * 5, [0] * 10 + [1] * 8),
        ([0] * 5 + [3] * 2, [0] * 5 + [1] * 3 + [2] * 4),
        ([1, 3, 5], [1, 2, 2, 4, 4, 4]),
        # Nothing in common at all.
        ([2, 2], [1, 1, 1]),
        ([], [1]),
    ],
)
def test_a_log_that_parts_from_the_leaders_ends_as_its_copy(leader: list[int], follower: list[int]) -> None:
    epoch = 6
    led, followed = Led(MemoryLog(leader), epoch), Followed(MemoryLog(follower), epoch)
    common = next(
        (i for i, (a, b) in enumerate(zip(leader, follower, strict=False)) if a != b), min(len(leader), len(follower))
    )
    stream = Stream({0: led})
    stream.follower.follow(followed)
    stream.run()
    assert same(followed, led)
    assert min(followed.truncations, default=common) >= common


def test_a_log_below_the_leaders_start_begins_anew() -> None:
    led, followed = Led(MemoryLog([1, 1, 2], start=100), 2), Followed(MemoryLog([1, 1]), 2)
    stream = Stream({0: led})
    stream.follower.follow(followed)
    stream.run()
    assert same(followed, led)


def test_a_stream_that_breaks_anywhere_goes_on_where_it_was() -> None:
    rng = random.Random(7)
    led = {n: Led(MemoryLog()) for n in range(5)}
    followed = [Followed(MemoryLog(), partition=n) for n in range(5)]
    stream = Stream(led, options=FollowerOptions(credit_bytes=2_000, catch_up_credit_bytes=2_000), max_frame_bytes=4096)
    for one in followed:
        stream.follower.follow(one)
    for _ in range(300):
        what = rng.random()
        if what < 0.5:
            led[rng.randrange(5)].append(*(b"v" * rng.randrange(400) for _ in range(rng.randrange(1, 9))))
        elif what < 0.7:
            stream.send_requests()
        elif what < 0.9:
            stream.send_frames()
        elif what < 0.97:
            chosen = led[rng.randrange(5)]
            chosen.cold_below = chosen.log.end
        else:
            stream.break_off()
            stream.connect()
        if stream.later and rng.random() < 0.5:
            stream.read_one()
    stream.run()
    assert all(same(one, led[one.partition]) for one in followed)
    assert all(led[n].high_watermark == led[n].log.end for n in led)


def test_what_the_leader_has_sent_and_the_follower_not_returned_never_exceeds_the_window_by_more_than_a_frame() -> None:
    led, followed = Led(MemoryLog()), Followed(MemoryLog())
    led.append(*(b"x" * 984 for _ in range(200)))
    stream = Stream({0: led}, options=FollowerOptions(credit_bytes=10_000), max_frame_bytes=4096)
    stream.follower.follow(followed)
    stream.send_requests()
    while stream.send_frames():
        pass
    assert len(followed.log.batches) * 1000 <= 10_000 + 4096
    stream.run()
    assert same(followed, led)


def test_what_is_live_keeps_flowing_while_a_partition_far_behind_catches_up_from_the_disk() -> None:
    behind, live = Led(MemoryLog(), live=()), Led(MemoryLog())
    behind.append(*(b"x" * 984 for _ in range(500)))
    behind.cold_below = behind.log.end
    followed = [Followed(MemoryLog(), partition=n) for n in range(2)]
    stream = Stream({0: behind, 1: live}, max_frame_bytes=8192)
    for one in followed:
        stream.follower.follow(one)
    for number in range(60):
        live.append(b"%d" % number)
        stream.send_requests()
        for _ in range(2):
            stream.send_frames()
            stream.send_requests()
            if stream.later:
                stream.read_one()
        assert live.high_watermark == number + 1, "a live record must wait for one piece of those that catch up at most"
    assert followed[0].log.end > 300
    stream.run()
    assert same(followed[0], behind)


def test_a_follower_that_lost_its_data_is_filled_again() -> None:
    led, followed = Led(MemoryLog([1] * 50)), Followed(MemoryLog())
    stream = Stream({0: led})
    stream.follower.follow(followed)
    stream.run()
    stream.break_off()
    empty = Followed(MemoryLog())
    stream.follower.unfollow(TOPIC, 0)
    stream.connect()
    stream.follower.follow(empty)
    stream.run()
    assert same(empty, led)


def test_a_leader_that_does_not_know_the_epoch_yet_is_asked_until_it_does() -> None:
    led, followed = Led(MemoryLog([1]), 1), Followed(MemoryLog(), 2)
    stream = Stream({0: led})
    stream.follower.follow(followed)
    stream.advance(200)
    assert stream.follower.states()[TOPIC, 0] is State.BACKING_OFF
    led.epoch = 2
    stream.advance(2_000)
    assert same(followed, led)


def test_a_throttled_follower_catches_up_at_its_rate() -> None:
    led, followed = Led(MemoryLog(), live=()), Followed(MemoryLog())
    led.append(*(b"x" * 984 for _ in range(100)))
    followed.is_throttled = True
    stream = Stream(
        {0: led},
        options=FollowerOptions(credit_bytes=10_000, catch_up_credit_bytes=10_000, max_frame_bytes=4096),
        follower_throttle=TokenBucket(10_000),
    )
    stream.follower.follow(followed)
    stream.advance(4_000)
    assert 30 <= followed.log.end <= 70
    stream.advance(10_000)
    assert same(followed, led)


def test_what_every_partition_needs_does_not_depend_on_how_many_there_are() -> None:
    led = {n: Led(MemoryLog()) for n in range(300)}
    stream = Stream(led)
    for n in led:
        stream.follower.follow(Followed(MemoryLog(), partition=n))
    stream.run()
    stream.advance(50)
    for one in led.values():
        one.reads = 0
    stream.messages.clear()
    led[7].append(b"x")
    stream.run()
    stream.advance(10)
    assert sum(len(message) for message in stream.messages) == 2
    assert sum(one.reads for one in led.values()) <= 2
    assert FOLLOWER in led[7].held


def test_what_did_not_fit_a_request_leaves_with_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_session, "MAX_OPENS", 2)
    monkeypatch.setattr(follower_session, "MAX_ACKS", 2)
    led = {partition: Led(MemoryLog()) for partition in range(5)}
    stream = Stream(led)
    for partition in led:
        stream.follower.follow(Followed(MemoryLog(), partition=partition))
    stream.run()
    assert set(stream.follower.states().values()) == {State.FOLLOWING}
    for one in led.values():
        one.append(b"a")
    stream.run()
    assert max(len(request.open) for request in stream.requests) == 2
    assert sum(len(request.acks) for request in stream.requests) == 5
