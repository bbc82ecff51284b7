"""Records that a broker appended as leader and synced only after it had become a follower, with real partitions."""

from __future__ import annotations

import asyncio
from pathlib import Path

from raftmeta.image import MetadataImage
from replication.follower_session import FollowerSession
from replication.ports import Replica
from replication.token_bucket import TokenBucket
from tests.support.batches import batch_of
from tests.support.broker_parts import Parts, image_with

COUNT = 20


def image(offset: int, leader: int, leader_epoch: int) -> MetadataImage:
    return image_with(
        COUNT, offset=offset, leader=leader, leader_epoch=leader_epoch, replicas=(1, 2, 3), partition_epoch=offset
    )


async def test_it_is_acked_once_it_is_flushed_and_nobody_looks_for_it_meanwhile(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1, 1, 1)
    async with parts:
        parts.disk.held = True
        for partition in parts.registry.partitions():
            partition.append(batch_of(b"v"), 1, None)
        await parts.apply(image(2, 2, 2))
        woken = asyncio.Event()
        session = FollowerSession(me=Replica(1, 1), leader_id=2, cluster_id="c", wake=woken.set, throttle=TokenBucket())
        for partition in parts.registry.partitions():
            assert partition.following is not None
            session.follow(partition.following)
        session.connected(0.0)
        request = session.take_request(0.0)
        assert request is not None
        assert [(opening.fetch_offset, opening.durable_end_offset) for opening in request.open] == [(1, 0)] * COUNT
        assert session.take_request(10.0) is None
        assert session.next_deadline_ms(10.0) is None
        woken.clear()
        parts.disk.release()
        acked: dict[int, int] = {}
        async with asyncio.timeout(60):
            while len(acked) < COUNT:
                await woken.wait()
                woken.clear()
                while (request := session.take_request(20.0)) is not None:
                    acked.update((ack.subscription_id, ack.durable_end_offset) for ack in request.acks)
        assert set(acked.values()) == {1}
