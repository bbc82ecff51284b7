"""Nothing of a later term of a partition leaves on a subscription of an earlier one, marks no more than records."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from raftlog.v1 import common_pb2
from raftlog.v1.replication_pb2 import OpenReplica, ReplicaHello, ReplicateRequest
from raftlog.wire import ReplicaFrame
from raftmeta.image import MetadataImage
from replication.leader_session import LeaderSession
from replication.ports import Replica
from replication.token_bucket import TokenBucket
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, image_with
from tests.support.replica_link import ReplicaLink
from tests.support.replica_parts import FOLLOWER, OTHER, Led, MemoryLog
from tests.unit.replication.test_leader_session import Wire


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
    led.high_watermark = 5  # of the next leader, whom this broker follows
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
                read_later=lambda *read: pytest.fail("all of it is in memory"),
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
                            following.append_replicated(bytes(records), 1, lambda held_end_offset: None)
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
            assert two.high_watermark == 0, "nothing that it has was ever committed"

    asyncio.run(scenario())
