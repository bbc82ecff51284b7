"""Credit: none is lost, one log that hangs keeps none from others, and what is throttled flows smoothly, by its own."""

from __future__ import annotations

import pytest

from raftlog.v1 import replication_pb2
from raftlog.v1.replication_pb2 import ReplicateRequest
from replication.followed import State
from replication.follower_credit import LOOK_AGAIN_MS, STALLED_MS, STALLED_TOO_MS
from replication.follower_session import FollowerOptions
from replication.token_bucket import TokenBucket
from tests.support.replica_parts import FOLLOWER, OTHER, TOPIC, Followed, Led, MemoryLog, Stream
from tests.unit.replication.test_leader_session import KIB, Wire, offsets

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
        led.throttled = {FOLLOWER}
    followed.is_throttled = by != "leader"
    stream = Stream({0: led}, leader_throttle=buckets["leader"], follower_throttle=buckets["follower"])
    stream.follower.follow(followed)
    ends = []
    for _ in range(20):
        before = followed.log.end
        stream.advance(500)
        ends.append((followed.log.end - before) * 40)
    assert max(ends) <= 1024 * 0.5 + 1024 * 0.2 + 200, "half a second, what may flow at once, and a batch or two"
    assert sum(ends) >= 10 * 1024 * 0.8


@pytest.mark.parametrize("by", ["leader", "follower"])
def test_lifting_the_throttle_is_noticed(by: str) -> None:
    led, followed, bucket = filled(1_000), Followed(MemoryLog()), TokenBucket(100)
    if by == "leader":
        led.throttled = {FOLLOWER}
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
    assert followed.log.end < 600, "what was on its way"
    before = followed.log.end
    stream.advance(10_000)
    assert 80 <= followed.log.end - before <= 110
    followed.is_throttled = False
    stream.advance(1_000)
    assert followed.log.end == 2_000


def test_a_throttled_partition_that_is_live_is_not_held_back() -> None:
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
