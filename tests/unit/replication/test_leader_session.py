"""The leader's end of a stream: what it pushes, to which partition first, how much, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
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
from raftlog.format.wire import ReplicaFrame
from raftlog.v1 import common_pb2, replication_pb2
from raftlog.v1.replication_pb2 import OpenReplica, ReplicaAck, ReplicaHello, ReplicateRequest
from raftmeta.image import MetadataImage
from replication import leader_session
from replication.follower_session import STALLED_MS, STALLED_TOO_MS, FollowerOptions, State
from replication.leader_session import MARKS_DELAY_MS, LeaderSession
from replication.pacing import FEW_RECORDS, GATHER_BESIDE_SLOW_FLUSH_MS, GATHER_MS, QUICK_FLUSH_MS, SMALL_BYTES
from replication.ports import MAX_ACKS, MAX_CLOSES, MAX_OPENS, Replica
from replication.token_bucket import LOOK_AGAIN_MS, TokenBucket
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, image_with
from tests.support.replica_link import ReplicaLink
from tests.support.replica_parts import (
    CLUSTER,
    FOLLOWER,
    LEADER,
    OTHER,
    TOPIC,
    Followed,
    Led,
    MemoryLog,
    Stream,
    decoded,
)

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
        opening: dict[str, Any] = {"leader_epoch": 1, "fetch_offset": offset, "durable_end_offset": offset, **fields}
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

    def ack(self, subscription_id: int, durable_end_offset: int) -> None:
        self.send(acks=[ReplicaAck(subscription_id=subscription_id, durable_end_offset=durable_end_offset)])

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
    def wakes(self) -> int:
        return self._stream.leader_wakes

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
    wire.ack(1, 2)
    led.append(b"next")
    assert offsets(wire.message()) == [(1, [2])]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"leader_epoch": 0}, common_pb2.FENCED_LEADER_EPOCH),
        ({"leader_epoch": 2}, common_pb2.UNKNOWN_LEADER_EPOCH),
        ({"durable_end_offset": 9}, common_pb2.INVALID_REQUEST),
        ({"fetch_offset": -5, "durable_end_offset": -5}, common_pb2.INVALID_REQUEST),
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
    assert led.suspected == [0], "a report of a damaged batch from another epoch must be ignored"


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


# Small messages

FEW = list(range(FEW_RECORDS))


def in_flight(led: Led, *others: Led, max_frame_bytes: int = 1 << 20) -> Wire:
    """Return a wire on which the first records of `led` have no acknowledgement, so many that others gather."""
    wire = Wire(led, *others, max_frame_bytes=max_frame_bytes)
    for number in range(1 + len(others)):
        wire.open(number)
    wire.messages()
    led.append(*(b"first" for _ in FEW))
    assert offsets(wire.message()) == [(1, FEW)]
    return wire


def test_records_gather_while_a_small_message_is_not_acknowledged_and_share_the_next() -> None:
    first, second = Led(MemoryLog()), Led(MemoryLog())
    wire = in_flight(first, second)
    wakes = wire.wakes
    for _ in range(3):
        first.append(b"a")
        second.append(b"b")
        assert wire.message() == []
    assert wire.wakes == wakes
    wire.ack(1, 4)
    assert wire.wakes == wakes + 1
    assert sorted(offsets(wire.message())) == [(1, [4, 5, 6]), (2, [0, 1, 2])]


def test_few_records_without_an_acknowledgement_hold_up_no_others() -> None:
    led = Led(MemoryLog())
    wire = Wire(led)
    wire.open(0)
    wire.messages()
    for offset in FEW:
        led.append(b"a")
        assert offsets(wire.message()) == [(1, [offset])]
    led.append(b"b")
    assert wire.message() == []
    wire.ack(1, 2)  # of the first two messages
    assert offsets(wire.message()) == [(1, [4])]


def test_an_acknowledgement_for_which_no_record_waits_wakes_nothing() -> None:
    led = Led(MemoryLog())
    wire = in_flight(led)
    wakes = wire.wakes
    wire.ack(1, 4)
    assert wire.wakes == wakes
    led.append(b"next")
    assert wire.wakes > wakes
    assert offsets(wire.message()) == [(1, [4])]


def test_an_acknowledgement_of_less_than_the_message_lets_nothing_go() -> None:
    led = Led(MemoryLog())
    wire = in_flight(led)
    led.append(b"a")
    wire.ack(1, 3)
    assert wire.message() == []
    wire.ack(1, 4)
    assert offsets(wire.message()) == [(1, [4])]


@pytest.mark.parametrize(
    ("flush_ms", "most_ms"), [(0.0, GATHER_MS), (QUICK_FLUSH_MS, GATHER_MS), (4.0, GATHER_BESIDE_SLOW_FLUSH_MS)]
)
@pytest.mark.parametrize("asks_between", [False, True])
def test_records_gather_for_a_bounded_time(flush_ms: float, most_ms: float, asks_between: bool) -> None:
    led = Led(MemoryLog())
    led.flush_ms = flush_ms
    wire = in_flight(led)
    assert wire.leader.next_deadline_ms(0.0) == most_ms, "records that come until then wake nothing"
    led.append(*(b"a" for _ in FEW))
    if asks_between:
        assert wire.message() == []
        assert wire.leader.next_deadline_ms(0.0) == most_ms
    wire.now_ms = most_ms - 0.1
    assert wire.message() == []
    wire.now_ms = most_ms
    assert offsets(wire.message()) == [(1, [4, 5, 6, 7])]
    wire.ack(1, 4)
    led.append(b"b")
    assert wire.message() == [], "the second message has no acknowledgement yet"


def test_a_large_message_and_a_full_one_are_not_waited_for() -> None:
    led = Led(MemoryLog())
    wire = Wire(led)
    wire.open(0)
    wire.messages()
    led.append(*(b"x" * (SMALL_BYTES // 4) for _ in FEW))
    assert offsets(wire.message()) == [(1, FEW)]
    led.append(b"a")
    assert offsets(wire.message()) == [(1, [4])]
    full = in_flight(Led(MemoryLog()), other := Led(MemoryLog()), max_frame_bytes=4096)
    full.ack(1, 4)
    for offset in FEW:
        other.append(b"x" * 4096)
        assert offsets(full.message()) == [(2, [offset])]
    other.append(b"a")
    assert offsets(full.message()) == [(2, [4])]


@pytest.mark.parametrize("end", ["closed", "resigned"])
def test_records_of_others_go_at_once_when_the_partition_that_was_waited_for_has_ended(end: str) -> None:
    first, second = Led(MemoryLog()), Led(MemoryLog())
    wire = in_flight(first, second)
    second.append(b"a")
    assert wire.message() == []
    wakes = wire.wakes
    if end == "closed":
        wire.send(close=[1])
    else:
        first.resign()
    assert wire.wakes > wakes
    assert offsets([frame for message in wire.messages() for frame in message]) == [(2, [0])]


def test_a_lost_partition_is_told_at_once_also_while_its_records_gather() -> None:
    awaited, lost = Led(MemoryLog()), Led(MemoryLog())
    wire = in_flight(awaited, lost)
    lost.append(b"a")
    wakes = wire.wakes
    lost.resign()
    assert wire.wakes > wakes
    assert [frame.head.error.code for frame in wire.message()] == [common_pb2.NOT_LEADER_OR_FOLLOWER]


def test_what_catches_up_does_not_gather() -> None:
    live, behind = Led(MemoryLog()), Led(MemoryLog(), live=())
    wire = in_flight(live, behind)
    wakes = wire.wakes
    behind.append(b"a")
    assert wire.wakes > wakes
    assert offsets(wire.message()) == [(2, [0])]


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


def test_beside_live_records_there_is_a_pause_after_each_piece() -> None:
    live, behind = Led(MemoryLog()), Led(MemoryLog(), live=())
    behind.append(*(b"x" * 984 for _ in range(40)))
    wire = Wire(live, behind, max_frame_bytes=4096)
    wire.open(0)
    wire.open(1)
    live.append(b"y")
    assert {number for number, _ in offsets(wire.message())} == {1}
    assert {number for number, _ in offsets(wire.message())} == {2}
    wire.now_ms = 4.0  # the piece has taken 4 ms to send
    assert offsets(wire.message()) == []
    assert wire.leader.next_deadline_ms(wire.now_ms) == 8.0
    wire.ack(1, 1)
    live.append(b"y")
    assert offsets(wire.message()) == [(1, [1])]  # live records do not wait
    wire.now_ms = 7.9
    assert offsets(wire.message()) == []
    wire.now_ms = 8.0
    assert {number for number, _ in offsets(wire.message())} == {2}


def test_the_pause_counts_the_sending_of_a_piece_and_not_the_wait_for_credit() -> None:
    live, behind = Led(MemoryLog()), Led(MemoryLog(), live=())
    behind.append(*(b"x" * 984 for _ in range(40)))
    wire = Wire(live, behind, catch_up=1, max_frame_bytes=4096)
    wire.open(0)
    wire.open(1)
    live.append(b"y")
    wire.message()
    wakes = wire.wakes
    assert {number for number, _ in offsets(wire.message())} == {2}  # and no credit is left
    assert wire.wakes > wakes  # asked again as soon as the piece is sent
    wire.now_ms = 4.0
    assert offsets(wire.message()) == []
    wire.now_ms = 40.0
    wire.send(catch_up_credit_bytes=WIDE)
    assert {number for number, _ in offsets(wire.message())} == {2}


def test_without_live_records_pieces_follow_one_another() -> None:
    behind = Led(MemoryLog(), live=())
    behind.append(*(b"x" * 984 for _ in range(12)))
    wire = Wire(behind, max_frame_bytes=4096)
    wire.open(0)
    for _ in range(3):
        assert offsets(wire.message())
        wire.now_ms += 4.0


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
    wire.ack(2, 1)
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
    second.ack(1, 1)
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
    monkeypatch.setattr(leader_session, "MAX_FRAMES", 10)
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
        (after_hello(live_credit_bytes=-1), InvalidRequestError, "grant at least 0 bytes"),
        (after_hello(catch_up_credit_bytes=1 << 62), InvalidRequestError, "in all at most"),
        (after_hello(throttled_credit_bytes=-1), InvalidRequestError, "grant at least 0 bytes"),
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
        find=lambda topic_id, partition: pytest.fail("the session looked up a partition, though no request names one"),
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
    slow.is_throttled = True
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
    led.is_throttled = True
    stream = Stream({0: led}, leader_throttle=bucket)
    opening = OpenReplica(subscription_id=1, topic_id=TOPIC, leader_epoch=1, last_fetched_epoch=-1)
    stream.leader.handle(ReplicateRequest(hello=hello(), open=[opening], live_credit_bytes=WIDE), 0.0)
    assert len(offsets(list(stream.leader.take_frames(0.0)))[0][1]) == 50


def ends(frames: list[ReplicaFrame]) -> list[int]:
    return [frame.head.error.code for frame in frames]


@pytest.mark.parametrize("live", [True, False])
def test_no_marks_leave_on_a_subscription_that_waits_for_credit_once_the_term_is_over(live: bool) -> None:
    led = Led(MemoryLog([1] * 3), live=(FOLLOWER,) if live else (OTHER,))
    wire = Wire(led, live=1, catch_up=1)
    wire.open(0)
    wire.messages()
    led.append(b"a", b"b")
    wire.messages()
    led.resign()
    led.high_watermark = 5  # of the next leader, which this broker follows
    led.changed()
    assert ends(wire.message()) == [common_pb2.NOT_LEADER_OR_FOLLOWER]
    wire.now_ms += 10
    assert wire.message() == []


@pytest.mark.parametrize("live", [True, False])
def test_nor_while_a_read_waits_for_the_disk(live: bool) -> None:
    led = Led(MemoryLog([1] * 3), live=(FOLLOWER,) if live else (OTHER,))
    led.cold_below = 3
    wire = Wire(led)
    wire.open(0)
    wire.messages()
    assert wire.waiting_reads == 1
    led.resign()
    led.high_watermark = 3
    led.changed()
    assert ends(wire.message()) == [common_pb2.NOT_LEADER_OR_FOLLOWER]
    wire.now_ms += 10
    assert wire.message() == []


def test_nor_when_the_change_has_not_been_told_yet() -> None:
    led = Led(MemoryLog([1] * 3))
    wire = Wire(led)
    wire.open(0)
    wire.messages()
    wire.ack(1, 3)
    assert wire.message() == []  # the high watermark waits for records to ride along with
    led.open_by.clear()
    led.high_watermark = 3
    wire.now_ms += 10
    assert ends(wire.message()) == [common_pb2.FENCED_LEADER_EPOCH]
    assert wire.message() == []


def test_a_partition_that_leads_again_in_a_later_epoch_says_nothing_on_the_old_subscription() -> None:
    led = Led(MemoryLog([1] * 3))
    wire = Wire(led, live=1)
    wire.open(0)
    wire.messages()
    led.append(b"a")
    wire.messages()
    wakes = dict(led.open_by)
    led.open_by.clear()
    led.epoch, led.high_watermark = 3, 4
    for _, on_change in wakes.values():
        on_change()
    assert ends(wire.message()) == [common_pb2.FENCED_LEADER_EPOCH]
    assert wire.message() == []


def test_a_followers_high_watermark_is_of_its_own_history(tmp_path: Path) -> None:
    """Real partitions: 2 follows 1, which is deposed and follows 3; 2 has not heard of that, and has no credit."""

    def image(offset: int, leader: int, leader_epoch: int, isr: tuple[int, ...]) -> MetadataImage:
        return image_with(
            1,
            offset=offset,
            leader=leader,
            leader_epoch=leader_epoch,
            replicas=(1, 2, 3),
            isr=isr,
            partition_epoch=offset,
        )

    async def scenario() -> None:
        nodes = {node_id: Parts(tmp_path / str(node_id), node_id=node_id) for node_id in (1, 2, 3)}
        for parts in nodes.values():
            parts.image = image(1, 1, 1, (1, 2, 3))
        async with nodes[1], nodes[2], nodes[3]:
            one, two, three = (nodes[node_id].registry.find(TOPIC_ID, 0) for node_id in (1, 2, 3))
            session = LeaderSession(
                find=nodes[1].registry.find,
                me=1,
                cluster_id="c",
                check_replica=lambda replica: None,
                wake=lambda: None,
                read_later=lambda *read: pytest.fail("the session read from disk, though everything is in memory"),
                max_frame_bytes=1 << 20,
                throttle=TokenBucket(),
            )
            opening = OpenReplica(
                subscription_id=1, topic_id=TOPIC_ID, partition=0, leader_epoch=1, last_fetched_epoch=-1
            )
            hello = ReplicaHello(cluster_id="c", broker_id=2, broker_epoch=1, leader_id=1)
            session.handle(ReplicateRequest(hello=hello, live_credit_bytes=1, open=[opening]), 0.0)
            following = two.following
            assert following is not None

            def carry(now_ms: float) -> None:
                for head, records in session.take_frames(now_ms):
                    if not head.HasField("error"):
                        if records:
                            following.append_replicated(bytes(records), 1, lambda durable_end_offset: None)
                        following.take_marks(head.high_watermark, head.log_start_offset, 1)

            for number in range(3):
                one.append(batch_of(b"old-%d" % number), 1, None)
            carry(0.0)
            for number in range(6):
                one.append(batch_of(b"tail-%d" % number), 1, None)
            carry(1.0)
            for node_id in (1, 3):
                await nodes[node_id].apply(image(2, 3, 2, (1, 3)))
            for number in range(5):
                three.append(batch_of(b"new-%d" % number), 2, None)
            assert one.following is not None
            link = ReplicaLink(three, one.following, Replica(1, 1))
            await link.open()
            async with asyncio.timeout(60):
                while one.high_watermark < 5:
                    await link.pump()
                    await asyncio.sleep(0.01)
            carry(100.0)
            carry(200.0)
            assert two.high_watermark == 0, "the high watermark must stay at 0, as no record was committed"

    asyncio.run(scenario())


SMALL = FollowerOptions(credit_bytes=256 * KIB, catch_up_credit_bytes=256 * KIB, max_frame_bytes=64 * KIB)


def filled(count: int, size: int = 1000, *, live: bool = False) -> Led:
    led = Led(MemoryLog(), live=(FOLLOWER if live else OTHER,))
    led.append(*[b"x" * size] * count)
    return led


# None is lost


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("end", ["closed before its turn", "closed while it is read", "resigned", "ended by its ack"])
def test_credit_of_a_cold_read_comes_back_when_its_records_are_never_sent(live: bool, end: str) -> None:
    led, other = filled(64, live=live), filled(64, live=live)
    led.cold_below = 64
    wire = Wire(led, other, live=48 * KIB, catch_up=48 * KIB, max_frame_bytes=16 * KIB)
    for _ in range(5):
        led.error = None
        subscription_id = wire.open(0)
        wire.messages()
        assert wire.waiting_reads == 1
        if end == "closed while it is read":
            wire.send(close=[subscription_id])
        wire.read_one()
        match end:
            case "closed before its turn":
                wire.send(close=[subscription_id])
            case "resigned":
                led.resign()
            case "ended by its ack":
                wire.ack(subscription_id, 1_000)
        assert [frame for message in wire.messages() for frame in message if frame.records] == []
    wire.open(1)
    sent = sum(len(frame.records) for message in wire.messages() for frame in message)
    assert 48 * KIB <= sent <= 64 * KIB


# One log that hangs


def test_a_log_whose_flush_hangs_does_not_keep_the_credit_of_the_others() -> None:
    hangs, other = filled(4_000), filled(0)
    stream = Stream({0: hangs, 1: other})
    hung, quick = Followed(MemoryLog(), partition=0), Followed(MemoryLog(), partition=1)
    hung.flushes_by_hand = True
    stream.follower.follow(hung)
    stream.follower.follow(quick)
    stream.advance(100)
    got = hung.log.end
    assert 2_000 < got < 4_000
    other.append(b"y")
    stream.advance(STALLED_MS)
    assert quick.log.end == 1
    stream.advance(60_000)
    assert hung.log.end == got
    assert stream.follower.states()[TOPIC, 0] is State.FLUSHING
    other.append(*[b"z" * 1000] * 4_000)
    stream.advance(100)
    assert quick.log.end == 4_001
    hung.flushes_by_hand = False
    hung.flush()
    stream.run()
    assert hung.log.end == 4_000


def test_many_logs_on_a_disk_that_hangs_are_put_aside_sooner_than_one_after_the_other() -> None:
    led = {n: filled(2_000) for n in range(40)} | {40: filled(0)}
    stream = Stream(led)
    hung = [Followed(MemoryLog(), partition=n) for n in range(40)]
    for one in hung:
        one.flushes_by_hand = True
        stream.follower.follow(one)
    quick = Followed(MemoryLog(), partition=40)
    stream.follower.follow(quick)
    stream.advance(100)
    led[40].append(*[b"y" * 1000] * 3_000)
    stream.advance(STALLED_MS + 25 * STALLED_TOO_MS)
    assert quick.log.end == 3_000
    for one in hung:
        one.flushes_by_hand = False
        one.flush()
    stream.run()
    assert all(one.log.end == 2_000 for one in hung)


def test_what_waits_for_its_flush_is_not_opened_on_the_next_stream_either() -> None:
    hangs = filled(10)
    stream = Stream({0: hangs})
    hung = Followed(MemoryLog())
    hung.flushes_by_hand = True
    stream.follower.follow(hung)
    stream.advance(STALLED_MS + 100)
    stream.break_off()
    stream.connect()
    stream.advance(1_000)
    assert hangs.open_by == {}
    hung.flush()
    stream.run()
    assert hangs.held[FOLLOWER] == 10


def test_a_slow_disk_that_makes_progress_is_left_alone() -> None:
    led = filled(100, size=10_000)
    stream = Stream({0: led}, options=SMALL)
    slow = Followed(MemoryLog())
    slow.flushes_by_hand = True
    stream.follower.follow(slow)
    while slow.log.end < 100:
        stream.advance(STALLED_MS * 0.8)
        slow.flush()
    stream.run()
    assert sum(len(request.open) for request in stream.requests) == 1
    assert led.held[FOLLOWER] == 100


# What is throttled


def test_an_unthrottled_partition_is_not_held_up_by_a_throttled_one() -> None:
    slow, quick = filled(2_000), filled(2_000)
    stream = Stream({0: slow, 1: quick}, options=SMALL, follower_throttle=TokenBucket(10_000))
    throttled, other = Followed(MemoryLog(), partition=0), Followed(MemoryLog(), partition=1)
    throttled.is_throttled = True
    stream.follower.follow(throttled)
    stream.follower.follow(other)
    stream.advance(100)
    assert other.log.end == 2_000
    stream.advance(30_000)
    assert 250 <= throttled.log.end <= 310


@pytest.mark.parametrize("by", ["leader", "follower", "both"])
def test_a_small_move_flows_at_its_rate_from_the_first_record_on(by: str) -> None:
    led, followed = filled(1_000, size=24), Followed(MemoryLog())  # 40 bytes each
    buckets = {end: TokenBucket(1024 if by in (end, "both") else None) for end in ("leader", "follower")}
    if by != "follower":
        led.is_throttled = True
    followed.is_throttled = by != "leader"
    stream = Stream({0: led}, leader_throttle=buckets["leader"], follower_throttle=buckets["follower"])
    stream.follower.follow(followed)
    ends = []
    for _ in range(20):
        before = followed.log.end
        stream.advance(500)
        ends.append((followed.log.end - before) * 40)
    assert max(ends) <= 1024 * 0.5 + 1024 * 0.2 + 200, (
        f"the stream sent {max(ends)} bytes in half a second, more than the rate, the burst and one batch"
    )
    assert sum(ends) >= 10 * 1024 * 0.8


@pytest.mark.parametrize("by", ["leader", "follower"])
def test_lifting_the_throttle_is_noticed(by: str) -> None:
    led, followed, bucket = filled(1_000), Followed(MemoryLog()), TokenBucket(100)
    if by == "leader":
        led.is_throttled = True
        stream = Stream({0: led}, leader_throttle=bucket)
    else:
        followed.is_throttled = True
        stream = Stream({0: led}, follower_throttle=bucket)
    stream.follower.follow(followed)
    stream.advance(5_000)
    assert followed.log.end < 10
    bucket.set_rate(None, stream.now_ms)
    stream.advance(LOOK_AGAIN_MS + 1)
    assert followed.log.end == 1_000


def test_a_partition_changes_its_credit_when_it_begins_or_ceases_to_be_throttled() -> None:
    led, followed = filled(0), Followed(MemoryLog())
    stream = Stream({0: led}, options=SMALL, follower_throttle=TokenBucket(10_000))
    stream.follower.follow(followed)
    stream.run()
    followed.is_throttled = True
    led.append(*[b"x" * 1000] * 2_000)
    stream.advance(1_000)
    assert followed.log.end < 600, (
        f"the follower has {followed.log.end} records, more than were on their way when it was throttled"
    )
    before = followed.log.end
    stream.advance(10_000)
    assert 80 <= followed.log.end - before <= 110
    followed.is_throttled = False
    stream.advance(1_000)
    assert followed.log.end == 2_000


def test_a_throttled_live_partition_has_its_own_credit() -> None:
    led, followed = filled(500, live=True), Followed(MemoryLog())
    followed.is_throttled = True
    stream = Stream({0: led}, follower_throttle=TokenBucket(1))
    stream.follower.follow(followed)
    stream.run()
    assert followed.log.end == 500


def test_the_leader_sends_throttled_records_by_their_own_credit_in_pieces_no_larger() -> None:
    slow, quick = filled(20), filled(20)
    wire = Wire(slow, quick, catch_up=0)
    openings = [
        replication_pb2.OpenReplica(
            subscription_id=n + 1,
            topic_id=TOPIC,
            partition=n,
            leader_epoch=1,
            last_fetched_epoch=-1,
            throttled=n == 0,
        )
        for n in (0, 1)
    ]
    wire.leader.handle(ReplicateRequest(open=openings), 0.0)
    assert [frame for message in wire.messages() for frame in message if frame.records] == []
    wire.send(throttled_credit_bytes=2_100)
    assert [offsets(message) for message in wire.messages()] == [[(1, [0, 1])], [(1, [2])]]
    wire.send(catch_up_credit_bytes=1)
    frames = [frame for message in wire.messages() for frame in message if frame.records]
    assert [(f.head.subscription_id, f.head.catch_up, f.head.throttled) for f in frames] == [(2, True, False)]


def test_without_a_rate_everything_passes() -> None:
    bucket = TokenBucket()
    bucket.take(1 << 40, 0.0)
    assert bucket.ready_at_ms(0.0) == 0.0


def test_the_rate_holds_over_time_whatever_the_pieces() -> None:
    bucket, now_ms, sent = TokenBucket(1_000_000), 0.0, 0
    while now_ms < 60_000:
        now_ms = max(now_ms, bucket.ready_at_ms(now_ms))
        bucket.take(70_000, now_ms)
        sent += 70_000
    assert sent == pytest.approx(60_000_000, rel=0.01)


def test_a_piece_larger_than_the_burst_passes_and_the_next_one_waits_for_the_debt() -> None:
    bucket = TokenBucket(1_000)
    assert bucket.ready_at_ms(0.0) == 0.0
    bucket.take(10_200, 0.0)
    assert bucket.ready_at_ms(0.0) == pytest.approx(10_000, abs=2)
    assert bucket.ready_at_ms(5_000.0) == pytest.approx(10_000, abs=2)
    assert bucket.ready_at_ms(10_002.0) == 10_002.0


def test_a_pause_saves_up_no_more_than_the_burst() -> None:
    bucket = TokenBucket(1_000)
    bucket.take(1, 0.0)
    bucket.take(300, 3_600_000.0)
    assert bucket.ready_at_ms(3_600_000.0) == pytest.approx(3_600_101, abs=2)


def test_a_change_of_the_rate_keeps_a_debt_and_no_limit_forgives_it() -> None:
    bucket = TokenBucket(1_000)
    bucket.take(10_200, 0.0)
    bucket.set_rate(10_000, 0.0)
    assert bucket.ready_at_ms(0.0) == pytest.approx(1_000, abs=2)
    bucket.set_rate(None, 0.0)
    assert bucket.ready_at_ms(0.0) == 0.0
    bucket.set_rate(500, 0.0)
    assert bucket.ready_at_ms(0.0) == 0.0


def test_the_time_in_which_nothing_might_flow_is_counted() -> None:
    bucket = TokenBucket(1_000)
    bucket.take(1_200, 0.0)  # the burst is 200
    assert bucket.throttled_ms == 0
    bucket.ready_at_ms(400.0)
    assert bucket.throttled_ms == pytest.approx(400)
    bucket.ready_at_ms(9_000.0)
    assert bucket.throttled_ms == pytest.approx(1_000, abs=2), "the time of throttling must not count beyond the debt"
    bucket.ready_at_ms(20_000.0)
    assert bucket.throttled_ms == pytest.approx(1_000, abs=2)
