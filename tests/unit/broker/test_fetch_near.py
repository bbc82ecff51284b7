"""Fetch streams and look-ups where several replicas are: readers near a follower, new leaders, truncated readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from broker.config import BrokerConfig
from broker.fetch_session import FetchSession
from broker.services.log import EARLIEST, LATEST, MAX_TIMESTAMP, LogService
from raftlog.v1 import common_pb2, log_pb2
from raftmeta.image import MetadataImage
from replication.ports import Accepted, Replica
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, FetchWriter, Parts, Requests, image_with, records_of
from tests.support.replica_link import settle

KEY = (TOPIC_ID, 0)


def image(offset: int, *, leader: int = 1, epoch: int = 3) -> MetadataImage:
    """Replicas 1 and 2 in sync, each broker in a rack of its own."""
    made = image_with(1, offset=offset, leader=leader, leader_epoch=epoch, replicas=(1, 2), partition_epoch=offset)
    return replace(made, brokers={number: replace(b, rack=f"r{number}") for number, b in made.brokers.items()})


@asynccontextmanager
async def reading(
    parts: Parts, *, rack: str = "", offset: int = 0, from_follower: bool = False, last_fetched_epoch: int | None = -1
) -> AsyncIterator[FetchWriter]:
    requests, writer = Requests[log_pb2.FetchRequest](), FetchWriter()
    session = FetchSession(parts.registry, parts.disk, max_frame_bytes=1 << 20, max_subscriptions=10)
    running = asyncio.create_task(session.run(requests.__aiter__(), writer))
    requests.send(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=1 << 20, rack=rack)))
    part = log_pb2.FetchPartition(
        subscription_id=1,
        topic_id=TOPIC_ID,
        offset=offset,
        leader_epoch=3,
        from_follower=from_follower,
        last_fetched_epoch=last_fetched_epoch,
    )
    requests.send(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[part])))
    await settle()
    try:
        yield writer
        requests.end()
        await asyncio.wait_for(running, 60)
    finally:
        running.cancel()


def caught_up(parts: Parts) -> None:
    partition = parts.registry.find(*KEY)
    opened = partition.open_replica(
        Replica(2, 1),
        leader_epoch=3,
        fetch_offset=partition.log_end_offset,
        last_fetched_epoch=partition.log.leader_epochs.latest_epoch,
        held_end_offset=partition.log_end_offset,
        on_change=no_change,
    )
    assert opened == Accepted()


def no_change() -> None:
    """A stream that need not look."""


def filled(parts: Parts, count: int = 2) -> None:
    for number in range(count):
        parts.registry.find(*KEY).append(batch_of(b"%d" % number), 3, None)


def test_a_reader_is_sent_to_the_replica_in_its_rack_as_soon_as_one_is_in_sync_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path)
        parts.image = image(1)
        async with parts:
            filled(parts)
            await settle()
            async with reading(parts, rack="r2") as writer:
                (frames,) = writer.written
                assert not frames[0].head.HasField("preferred_read_replica"), "nobody has heard of it yet"
                caught_up(parts)
                await settle()
                assert records_of(writer.written) == []
                assert [frame.head.preferred_read_replica for frame in writer.written[1]] == [2]
                filled(parts)
                await settle()
                assert len(writer.written) == 2, "the subscription is over"
            for rack in ("", "r1", "r9"):
                async with reading(parts, rack=rack) as writer:
                    assert len(records_of(writer.written)) == 1

    asyncio.run(scenario())


def test_a_follower_serves_whom_the_leader_sent_with_a_lease_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path)
        parts.image = image(1)
        async with parts:
            filled(parts)
            await settle()
            caught_up(parts)
            await parts.apply(image(2, leader=2, epoch=4))
            async with reading(parts) as writer:
                assert [frame.head.error.code for (frame,) in writer.written] == [common_pb2.NOT_LEADER_OR_FOLLOWER]
            partition = parts.registry.find(*KEY)
            partition.leader_epoch = 3  # what the reader believes in; epochs are compared elsewhere
            parts.lease.end()
            async with reading(parts, from_follower=True, rack="r1") as writer:
                assert writer.written == []
                parts.lease.renew()
                await settle()
                assert len(records_of(writer.written)) == 1
            async with reading(parts, from_follower=True, offset=7) as writer:
                assert [frame.head.HasField("error") for (frame,) in writer.written] == [False], "it is only behind"

    asyncio.run(scenario())


def test_a_reader_of_truncated_records_hears_where_the_logs_part(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path)
        parts.image = image(1)
        async with parts:
            filled(parts)
            async with reading(parts, offset=9, last_fetched_epoch=3) as writer:
                ((frame,),) = writer.written
                assert frame.head.error.code == common_pb2.OFFSET_OUT_OF_RANGE
                assert "epoch 3 up to offset 2" in frame.head.error.message
            async with reading(parts, offset=2, last_fetched_epoch=3) as writer:
                ((frame,),) = writer.written
                assert not frame.head.HasField("error")

    asyncio.run(scenario())


@pytest.mark.parametrize("last_fetched_epoch", [None, -1])
def test_a_reader_that_does_not_say_what_it_has_read_is_asked_nothing(
    tmp_path: Path, last_fetched_epoch: int | None
) -> None:
    """A client made of generated code alone, say: what it does not set is not epoch 0."""

    async def scenario() -> None:
        parts = Parts(tmp_path)
        parts.image = image(1)
        async with parts:
            filled(parts)
            async with reading(parts, offset=1, last_fetched_epoch=last_fetched_epoch) as writer:
                ((frame,),) = writer.written
                assert not frame.head.HasField("error")

    asyncio.run(scenario())


def test_a_leader_that_may_be_deposed_calls_nothing_truncated(tmp_path: Path) -> None:
    """What a reader has got of the next leader is not in the log of one that is cut off and does not know."""

    async def scenario() -> None:
        parts = Parts(tmp_path)
        parts.image = image(1)
        async with parts:
            filled(parts)
            async with reading(parts, offset=9, last_fetched_epoch=4) as writer:
                ((frame,),) = writer.written
                assert frame.head.error.code == common_pb2.UNKNOWN_LEADER_EPOCH
            parts.lease.end()
            async with reading(parts, offset=9, last_fetched_epoch=3) as writer:
                assert writer.written == []
                await parts.apply(image(2, leader=2, epoch=4))
                await settle()
                ((frame,),) = writer.written
                assert frame.head.error.code == common_pb2.NOT_LEADER_OR_FOLLOWER

    asyncio.run(scenario())


@pytest.mark.parametrize("ask", ["latest", "epoch", "time", "largest time"])
def test_look_ups_wait_until_a_new_leader_knows_what_is_committed(tmp_path: Path, ask: str) -> None:
    """KIP-207."""

    async def scenario() -> None:
        parts = Parts(tmp_path)
        parts.image = image(1)
        config = BrokerConfig.from_values({"node.id": 1, "log.dirs": str(tmp_path / "unused")})
        async with parts:
            service = LogService(parts.registry, config, parts.disk)
            filled(parts)
            await settle()
            await parts.apply(image(2, epoch=4))

            async def code() -> int:
                context = cast(Any, None)
                if ask != "epoch":
                    when = {"latest": LATEST, "time": 5, "largest time": MAX_TIMESTAMP}[ask]
                    part = log_pb2.ListOffsetsPartition(topic_id=TOPIC_ID, timestamp_ms=when, leader_epoch=-1)
                    listed = await service.ListOffsets(log_pb2.ListOffsetsRequest(partitions=[part]), context)
                    return listed.results[0].error.code
                epoch = log_pb2.EpochPartition(topic_id=TOPIC_ID, current_leader_epoch=-1, leader_epoch=3)
                found = await service.OffsetForLeaderEpoch(
                    log_pb2.OffsetForLeaderEpochRequest(partitions=[epoch]), context
                )
                return found.results[0].error.code

            assert await code() == common_pb2.LEADER_NOT_AVAILABLE
            earliest = log_pb2.ListOffsetsPartition(topic_id=TOPIC_ID, timestamp_ms=EARLIEST, leader_epoch=-1)
            listed = await service.ListOffsets(log_pb2.ListOffsetsRequest(partitions=[earliest]), cast(Any, None))
            assert not listed.results[0].HasField("error")
            partition = parts.registry.find(*KEY)
            partition.open_replica(
                Replica(2, 1),
                leader_epoch=4,
                fetch_offset=2,
                last_fetched_epoch=3,
                held_end_offset=2,
                on_change=no_change,
            )
            assert await code() == common_pb2.NONE

    asyncio.run(scenario())
