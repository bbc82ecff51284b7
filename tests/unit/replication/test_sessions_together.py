"""Both ends of a stream against each other, over partitions without disks."""

from __future__ import annotations

import random

import pytest

from replication.followed import State
from replication.follower_session import FollowerOptions
from replication.token_bucket import TokenBucket
from tests.support.replica_parts import FOLLOWER, TOPIC, Followed, Led, MemoryLog, Stream


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
    assert followed.traceparents == [], "nobody traces"
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
        assert live.high_watermark == number + 1, "it waits for one piece at most"
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
