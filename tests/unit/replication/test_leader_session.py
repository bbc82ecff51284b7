"""The leader's end of a stream: what it pushes, to whom first, how much, and what ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raftlog.errors import (
    BrokerOverloaded,
    BrokerUnavailable,
    InconsistentClusterId,
    InvalidRequestError,
    StaleBrokerEpoch,
    StorageError,
)
from raftlog.v1 import common_pb2
from raftlog.v1.replication_pb2 import OpenReplica, ReplicaAck, ReplicaHello, ReplicateRequest
from raftlog.wire import ReplicaFrame
from replication import leader_session, push_queue
from replication.leader_session import LeaderSession
from replication.limits import MAX_ACKS, MAX_CLOSES, MAX_OPENS
from replication.ports import Replica
from replication.push_queue import MARKS_DELAY_MS
from replication.token_bucket import TokenBucket
from tests.support.replica_parts import CLUSTER, FOLLOWER, LEADER, OTHER, TOPIC, Led, MemoryLog, Stream, decoded

WIDE = 1 << 30
KIB = 1024


class Wire:
    """A `LeaderSession`, and a follower that a test plays itself."""

    def __init__(self, *led: Led, live: int = WIDE, catch_up: int = WIDE, max_frame_bytes: int = 1 << 20) -> None:
        self._stream = Stream(dict(enumerate(led)), max_frame_bytes=max_frame_bytes)
        self.leader: LeaderSession = self._stream.leader
        self.now_ms = 0.0
        self._ids = 0
        self.send(hello=hello(), live_credit_bytes=live, catch_up_credit_bytes=catch_up)

    def send(self, **fields: object) -> None:
        self.leader.handle(ReplicateRequest(**fields), self.now_ms)  # type: ignore[arg-type] # as protobuf checks

    def open(self, partition: int, offset: int = 0, last_epoch: int = -1, **fields: int) -> int:
        self._ids += 1
        opening: dict[str, Any] = {"leader_epoch": 1, "fetch_offset": offset, "held_end_offset": offset, **fields}
        self.send(
            open=[
                OpenReplica(
                    subscription_id=self._ids,
                    topic_id=TOPIC,
                    partition=partition,
                    last_fetched_epoch=last_epoch,
                    **opening,
                )
            ]
        )
        return self._ids

    def ack(self, subscription_id: int, held_end_offset: int) -> None:
        self.send(acks=[ReplicaAck(subscription_id=subscription_id, held_end_offset=held_end_offset)])

    def message(self) -> list[ReplicaFrame]:
        return list(self.leader.take_frames(self.now_ms))

    def messages(self) -> list[list[ReplicaFrame]]:
        taken = []
        while message := self.message():
            taken.append(message)
        return taken

    def read_one(self) -> None:
        self._stream.read_one()

    @property
    def waiting_reads(self) -> int:
        return len(self._stream.later)


def hello(**fields: object) -> ReplicaHello:
    wanted = {"cluster_id": CLUSTER, "broker_id": FOLLOWER, "broker_epoch": 20, "leader_id": LEADER, **fields}
    return ReplicaHello(**wanted)  # type: ignore[arg-type] # as protobuf checks them


def offsets(frames: list[ReplicaFrame]) -> list[tuple[int, list[int]]]:
    """Return subscription and offsets of each frame that has records."""
    return [
        (frame.head.subscription_id, [batch.offset for batch in decoded(bytes(frame.records))])
        for frame in frames
        if frame.records
    ]


# Opening


def test_what_is_there_comes_with_the_first_message_and_what_is_appended_with_the_next() -> None:
    led = Led(MemoryLog([1, 1]))
    wire = Wire(led)
    wire.open(0)
    frames = wire.message()
    assert offsets(frames) == [(1, [0, 1])]
    assert (frames[0].head.high_watermark, frames[0].head.log_end_offset) == (0, 2)
    assert wire.message() == []
    led.append(b"next")
    assert offsets(wire.message()) == [(1, [2])]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"leader_epoch": 0}, common_pb2.FENCED_LEADER_EPOCH),
        ({"leader_epoch": 2}, common_pb2.UNKNOWN_LEADER_EPOCH),
        ({"held_end_offset": 9}, common_pb2.INVALID_REQUEST),
        ({"fetch_offset": -5, "held_end_offset": -5}, common_pb2.INVALID_REQUEST),
    ],
)
def test_a_follower_that_claims_what_cannot_be_is_told_so_and_the_stream_lives_on(
    fields: dict[str, int], code: int
) -> None:
    led = Led(MemoryLog([1, 1]))
    wire = Wire(led)
    wire.open(0, **fields)
    (frame,) = wire.message()
    assert frame.head.error.code == code
    assert len(wire.leader) == 0
    led.append(b"more")
    assert wire.message() == []
    wire.open(0)
    assert offsets(wire.message()) == [(2, [0, 1, 2])]


def test_a_broker_that_is_no_replica_and_a_partition_that_is_elsewhere_are_refused_in_frames() -> None:
    led = Led(MemoryLog())
    led.replicas = {OTHER}
    wire = Wire(led)
    wire.open(0)
    wire.open(7)
    assert [frame.head.error.code for frame in wire.message()] == [
        common_pb2.INVALID_REQUEST,
        common_pb2.UNKNOWN_TOPIC_ID,
    ]


def test_a_log_that_parts_from_the_leaders_is_told_where_and_one_below_the_start_to_begin_anew() -> None:
    wire = Wire(Led(MemoryLog([1, 1, 3]), epoch=3), Led(MemoryLog([3], start=50), epoch=3))
    wire.open(0, 5, 2, leader_epoch=3)
    wire.open(1, 5, 2, leader_epoch=3)
    first, second = wire.message()
    assert (first.head.diverging.leader_epoch, first.head.diverging.end_offset) == (1, 2)
    assert (second.head.out_of_range, second.head.log_start_offset) == (True, 50)
    assert len(wire.leader) == 0


def test_a_follower_that_was_sent_what_does_not_check_has_the_log_looked_at_and_is_served_as_usual() -> None:
    led = Led(MemoryLog([1, 1]))
    wire = Wire(led)
    wire.open(0, damaged_offset=0)
    assert led.suspected == [0]
    assert offsets(wire.message()) == [(1, [0, 1])]
    wire.open(0)
    wire.open(0, leader_epoch=7, damaged_offset=1)
    assert led.suspected == [0], "who does not follow in this epoch was sent nothing by this leader"


# Marks


def test_a_high_watermark_rides_with_records_or_leaves_alone_within_five_ms() -> None:
    led = Led(MemoryLog())
    wire = Wire(led)
    wire.open(0)
    wire.messages()
    led.append(b"a")
    wire.messages()
    wire.ack(1, 1)
    assert wire.message() == []
    assert wire.leader.next_deadline_ms(0.0) == MARKS_DELAY_MS
    led.append(b"b")
    (frame,) = wire.message()
    assert (frame.head.high_watermark, len(frame.records) > 0) == (1, True)
    assert wire.leader.next_deadline_ms(0.0) is None
    wire.now_ms = 100.0
    wire.ack(1, 2)
    assert wire.message() == []
    wire.now_ms += MARKS_DELAY_MS
    (frame,) = wire.message()
    assert (frame.head.high_watermark, frame.records) == (2, b"")
    assert wire.leader.next_deadline_ms(wire.now_ms) is None


def test_marks_of_others_leave_with_a_message_that_leaves_anyway() -> None:
    first, second = Led(MemoryLog([1])), Led(MemoryLog())
    wire = Wire(first, second)
    wire.open(0)
    wire.open(1)
    wire.messages()
    wire.ack(1, 1)
    assert wire.message() == []
    second.append(b"x")
    frames = wire.message()
    assert offsets(frames) == [(2, [0])]
    assert [(f.head.subscription_id, f.head.high_watermark) for f in frames if not f.records] == [(1, 1)]


# Credit and fairness


def test_nothing_is_read_without_credit_and_a_message_goes_beyond_it_by_a_frame_at_most() -> None:
    led = Led(MemoryLog())
    led.append(*(b"x" * 1000 for _ in range(100)))
    wire = Wire(led, live=10_000, max_frame_bytes=4096)
    wire.open(0)
    sent = sum(len(frame.records) for message in wire.messages() for frame in message)
    assert 10_000 <= sent <= 10_000 + 4096 + 1016
    reads = led.reads
    led.append(b"more")
    assert wire.message() == []
    assert led.reads == reads
    wire.send(live_credit_bytes=sent - 10_000 + 1)
    assert len(offsets(wire.message())) == 1


def test_each_kind_has_its_own_credit() -> None:
    live, behind = Led(MemoryLog([1])), Led(MemoryLog([1]), live=())
    wire = Wire(live, behind, live=0, catch_up=0)
    wire.open(0)
    wire.open(1)
    assert offsets(wire.message()) == []
    wire.send(catch_up_credit_bytes=1)
    frames = wire.message()
    assert offsets(frames) == [(2, [0])]
    assert frames[0].head.catch_up
    wire.send(live_credit_bytes=1)
    (frame,) = [frame for frame in wire.message() if frame.records]
    assert (frame.head.subscription_id, frame.head.catch_up) == (1, False)


def test_live_partitions_share_messages_in_turn() -> None:
    led = [Led(MemoryLog()) for _ in range(3)]
    wire = Wire(*led, max_frame_bytes=4096)
    for number, one in enumerate(led):
        one.append(*(b"x" * 984 for _ in range(8)))  # 1000 bytes each
        wire.open(number)
    turns = [subscription for message in wire.messages() for subscription, _ in offsets(message)]
    assert turns[:3] == [1, 2, 3]
    assert sorted(turns[3:6]) == [1, 2, 3]


def test_what_catches_up_takes_turns_with_what_is_live_and_never_comes_first() -> None:
    live, behind = Led(MemoryLog()), Led(MemoryLog(), live=())
    behind.append(*(b"x" * 984 for _ in range(40)))
    wire = Wire(live, behind, max_frame_bytes=4096)
    wire.open(0)
    wire.open(1)
    wire.message()
    seen = []
    for _ in range(6):
        live.append(b"y" * 5000)  # keeps every message busy
        seen.append([subscription for subscription, _ in offsets(wire.message())])
    assert seen[0] == [1] or seen[1] == [1]
    assert [1] in seen
    assert [2] in seen
    assert all(len(turn) == 1 for turn in seen)
    assert abs(sum(turn == [1] for turn in seen) - sum(turn == [2] for turn in seen)) <= 1


def test_a_partition_taken_into_the_isr_is_live_from_then_on() -> None:
    led = Led(MemoryLog([1, 1]), live=())
    wire = Wire(led, catch_up=0)
    wire.open(0)
    assert offsets(wire.message()) == []
    led.live.add(FOLLOWER)
    led.changed()
    frames = wire.message()
    assert offsets(frames) == [(1, [0, 1])]
    assert not frames[0].head.catch_up


def test_the_cost_of_a_message_does_not_grow_with_the_partitions_on_the_stream() -> None:
    led = [Led(MemoryLog()) for _ in range(500)]
    wire = Wire(*led)
    for number in range(500):
        wire.open(number)
    wire.messages()
    for one in led:
        one.reads = 0
    led[250].append(b"x")
    assert offsets(wire.message()) == [(251, [0])]
    assert sum(one.reads for one in led) == 1


# Reads that wait for the disk


def test_a_cold_read_holds_nobody_up() -> None:
    cold, live = Led(MemoryLog([1] * 5)), Led(MemoryLog())
    cold.cold_below = 5
    wire = Wire(cold, live)
    wire.open(0)
    wire.open(1)
    assert offsets(wire.message()) == []
    assert wire.waiting_reads == 1
    live.append(b"x")
    assert offsets(wire.message()) == [(2, [0])]
    wire.read_one()
    assert offsets(wire.message()) == [(1, [0, 1, 2, 3, 4])]


def test_only_one_piece_is_read_for_those_that_catch_up_and_it_counts_while_it_is_read() -> None:
    led = [Led(MemoryLog([1] * 5), live=()) for _ in range(3)]
    for one in led:
        one.cold_below = 5
    wire = Wire(*led)
    for number in range(3):
        wire.open(number)
    order = []
    for _ in range(3):
        wire.messages()
        assert wire.waiting_reads == 1
        wire.read_one()
        order += [subscription for subscription, _ in offsets(wire.message())]
    assert order == [1, 2, 3]


def test_cold_reads_of_live_partitions_keep_to_the_credit() -> None:
    led = [Led(MemoryLog([1] * 5)) for _ in range(10)]
    for one in led:
        one.cold_below = 5
    wire = Wire(*led, live=8192, max_frame_bytes=4096)
    for number in range(10):
        wire.open(number)
    wire.messages()
    assert wire.waiting_reads == 2


def test_what_was_read_when_the_leadership_was_lost_is_not_sent() -> None:
    led = Led(MemoryLog([1] * 5))
    led.cold_below = 5
    wire = Wire(led)
    wire.open(0)
    wire.messages()
    stream_read = wire.read_one
    stream_read()
    led.resign()
    (frame,) = wire.message()
    assert frame.head.error.code == common_pb2.NOT_LEADER_OR_FOLLOWER
    assert frame.records == b""


def test_a_read_that_fails_is_told_and_one_that_comes_after_the_end_is_nothing() -> None:
    led = Led(MemoryLog([1] * 5))
    led.cold_below = 5
    wire = Wire(led)
    wire.open(0)
    wire.messages()
    led.error = StorageError("the disk")
    wire.read_one()
    (frame,) = wire.message()
    assert frame.head.error.code == common_pb2.STORAGE_ERROR
    led.error = None
    wire.open(0)
    wire.messages()
    wire.leader.close()
    wire.read_one()
    assert wire.message() == []
    assert led.open_by == {}


# Ends


def test_who_leads_no_more_says_so_at_once_and_names_the_next() -> None:
    led = Led(MemoryLog([1]))
    wire = Wire(led)
    wire.open(0)
    wire.messages()
    led.resign()
    (frame,) = wire.message()
    assert frame.head.error.code == common_pb2.NOT_LEADER_OR_FOLLOWER
    assert (frame.head.error.leader.leader_id, frame.head.error.leader.leader_epoch) == (OTHER, 2)
    wire.ack(1, 1)
    wire.send(close=[1])
    assert wire.message() == []


def test_retention_that_was_quicker_ends_the_subscription_and_it_starts_over() -> None:
    led = Led(MemoryLog([1] * 10))
    wire = Wire(led, live=0)
    wire.open(0)
    wire.messages()
    led.log.truncate(0)
    led.log = MemoryLog([1] * 3, start=20)
    led.changed()
    wire.send(live_credit_bytes=1)
    (frame,) = wire.message()
    assert frame.head.error.code == common_pb2.OFFSET_OUT_OF_RANGE
    wire.open(0, 0)
    (frame,) = wire.message()
    assert frame.head.out_of_range


def test_a_partition_opened_by_another_stream_of_the_follower_is_over_on_the_first() -> None:
    led = Led(MemoryLog([1]))
    first, second = Wire(led), Wire(led)
    first.open(0)
    first.messages()
    second.open(0)
    (frame,) = first.message()
    assert frame.head.error.code == common_pb2.FENCED_LEADER_EPOCH
    assert offsets(second.message()) == [(1, [0])]
    first.leader.close()
    led.append(b"x")
    assert offsets(second.message()) == [(1, [1])]


def test_an_ack_beyond_the_log_end_ends_the_subscription_only() -> None:
    led = Led(MemoryLog([1]))
    wire = Wire(led)
    wire.open(0)
    wire.messages()
    wire.ack(1, 2)
    (frame,) = wire.message()
    assert frame.head.error.code == common_pb2.INVALID_REQUEST
    assert led.held[FOLLOWER] == 0


def test_a_closed_partition_is_forgotten_and_its_replica_too() -> None:
    led = Led(MemoryLog([1]))
    wire = Wire(led)
    wire.open(0)
    wire.messages()
    wire.send(close=[1])
    led.append(b"x")
    assert wire.message() == []
    assert led.open_by == {}


def test_a_message_has_no_more_frames_than_a_follower_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_queue, "MAX_FRAMES", 10)
    led = [Led(MemoryLog([1])) for _ in range(50)]
    wire = Wire(*led)
    for number in range(50):
        wire.open(number)
    messages = wire.messages()
    assert max(map(len, messages)) <= 11
    assert sum(len(offsets(message)) for message in messages) == 50
    for number in range(50):
        wire.ack(number + 1, 1)
    assert wire.message() == []
    wire.now_ms += MARKS_DELAY_MS
    messages = wire.messages()
    assert [len(message) for message in messages] == [10] * 5


# What ends the stream


def refusals() -> list[tuple[Callable[[LeaderSession], None], type[Exception], str]]:
    def handle(**fields: object) -> Callable[[LeaderSession], None]:
        return lambda session: session.handle(ReplicateRequest(**fields), 0.0)  # type: ignore[arg-type] # as above

    def after_hello(**fields: object) -> Callable[[LeaderSession], None]:
        def run(session: LeaderSession) -> None:
            handle(hello=hello())(session)
            handle(**fields)(session)

        return run

    opening = OpenReplica(subscription_id=1, topic_id=TOPIC, leader_epoch=1, last_fetched_epoch=-1)
    return [
        (handle(), InvalidRequestError, "says hello"),
        (handle(live_credit_bytes=1), InvalidRequestError, "says hello"),
        (handle(hello=hello(cluster_id="x" * 500)), InconsistentClusterId, "correct cluster.id"),
        (handle(hello=hello(leader_id=9)), InvalidRequestError, "took broker 1 for broker 9"),
        (handle(hello=hello(broker_id=LEADER)), InvalidRequestError, "does not follow itself"),
        (after_hello(hello=hello()), InvalidRequestError, "says hello once"),
        (after_hello(open=[opening, opening]), InvalidRequestError, "ids of a stream only grow"),
        (after_hello(open=[OpenReplica(subscription_id=0)]), InvalidRequestError, "ids of a stream only grow"),
        (after_hello(close=[1]), InvalidRequestError, "was never opened"),
        (after_hello(acks=[ReplicaAck(subscription_id=3)]), InvalidRequestError, "was never opened"),
        (after_hello(live_credit_bytes=-1), InvalidRequestError, "is not negative"),
        (after_hello(catch_up_credit_bytes=1 << 62), InvalidRequestError, "the sum at most"),
        (after_hello(throttled_credit_bytes=-1), InvalidRequestError, "is not negative"),
        (after_hello(open=[opening] * (MAX_OPENS + 1)), InvalidRequestError, "at most 500"),
        (after_hello(acks=[ReplicaAck(subscription_id=1)] * (MAX_ACKS + 1)), InvalidRequestError, "at most 2000"),
        (after_hello(close=[1] * (MAX_CLOSES + 1)), InvalidRequestError, "at most 2000"),
    ]


@pytest.mark.parametrize(("send", "kind", "words"), refusals())
def test_a_broken_protocol_ends_the_stream(
    send: Callable[[LeaderSession], None], kind: type[Exception], words: str
) -> None:
    session = Stream({0: Led(MemoryLog())}).leader
    with pytest.raises(kind, match=words) as caught:
        send(session)
    assert len(str(caught.value)) < 400
    session.close()


@pytest.mark.parametrize("error", [StaleBrokerEpoch("it has registered anew"), BrokerUnavailable("not heard of yet")])
def test_a_follower_that_is_not_who_it_should_be_gets_no_further_than_its_hello(error: Exception) -> None:
    refused: list[Replica] = []

    def check(replica: Replica) -> None:
        refused.append(replica)
        raise error

    session = LeaderSession(
        find=lambda topic_id, partition: pytest.fail("nothing is looked up"),
        me=LEADER,
        cluster_id=CLUSTER,
        check_replica=check,
        wake=lambda: None,
        read_later=lambda *read: None,
        max_frame_bytes=KIB,
        throttle=TokenBucket(),
    )
    with pytest.raises(type(error)):
        session.handle(ReplicateRequest(hello=hello()), 0.0)
    assert refused == [Replica(FOLLOWER, 20)]
    assert session.take_frames(0.0) == ()


def test_answers_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_session, "MAX_UNREAD", 10)
    wire = Wire()
    with pytest.raises(BrokerOverloaded):
        for _ in range(11):
            wire.open(0)


# The leader's throttle


def test_throttled_partitions_that_catch_up_keep_to_the_rate_and_hold_nobody_else_up() -> None:
    bucket = TokenBucket(10_000)
    slow, quick = Led(MemoryLog(), live=()), Led(MemoryLog(), live=())
    slow.throttled = {FOLLOWER}
    for one in (slow, quick):
        one.append(*(b"x" * 984 for _ in range(60)))
    stream = Stream({0: slow, 1: quick}, max_frame_bytes=4096, leader_throttle=bucket)
    stream.leader.handle(
        ReplicateRequest(
            hello=hello(),
            open=[
                OpenReplica(subscription_id=n + 1, topic_id=TOPIC, partition=n, leader_epoch=1, last_fetched_epoch=-1)
                for n in (0, 1)
            ],
            catch_up_credit_bytes=WIDE,
        ),
        0.0,
    )
    sent = {1: 0, 2: 0}
    now_ms = 0.0

    def take() -> None:
        while frames := stream.leader.take_frames(now_ms):
            for frame in frames:
                sent[frame.head.subscription_id] += len(frame.records)

    take()
    assert sent[2] == 60_000
    assert sent[1] < 8_192
    while now_ms < 3_000.0:
        due_ms = stream.leader.next_deadline_ms(now_ms)
        assert due_ms is not None
        assert due_ms > now_ms
        now_ms = due_ms
        take()
    assert 28_000 <= sent[1] <= 40_000


def test_a_throttled_partition_that_is_live_is_not_held_back() -> None:
    bucket = TokenBucket(1)
    led = Led(MemoryLog([1] * 50))
    led.throttled = {FOLLOWER}
    stream = Stream({0: led}, leader_throttle=bucket)
    opening = OpenReplica(subscription_id=1, topic_id=TOPIC, leader_epoch=1, last_fetched_epoch=-1)
    stream.leader.handle(ReplicateRequest(hello=hello(), open=[opening], live_credit_bytes=WIDE), 0.0)
    assert len(offsets(list(stream.leader.take_frames(0.0)))[0][1]) == 50
