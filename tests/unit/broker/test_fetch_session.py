"""A fetch stream pushes what is committed, within the credit, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.fetch_session import FetchSession
from raftlog.errors import InvalidRequestError, UnknownTopicId
from raftlog.format import decode_batch, iter_headers
from raftlog.v1 import common_pb2, log_pb2
from tests.support.batches import batch_of
from tests.support.broker_parts import (
    TOPIC_ID,
    FetchWriter,
    Parts,
    Requests,
    image_with,
    partition_records,
    records_of,
    removal,
)

BIG = 1 << 30


@asynccontextmanager
async def session(
    parts: Parts, *, credit: int = BIG, max_frame_bytes: int = 1 << 20
) -> AsyncIterator[tuple[Requests[log_pb2.FetchRequest], FetchWriter]]:
    requests, writer = Requests[log_pb2.FetchRequest](), FetchWriter()
    running = asyncio.create_task(
        FetchSession(parts.registry, parts.disk, max_frame_bytes=max_frame_bytes, max_subscriptions=10).run(
            requests.__aiter__(), writer
        )
    )
    requests.send(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=credit)))
    try:
        yield requests, writer
        requests.end()
        await writer.resume()
        await asyncio.wait_for(running, 60)
    finally:
        running.cancel()


def subscribe(subscription_id: int, offset: int = 0, *, partition: int = 0, epoch: int = 3) -> log_pb2.FetchRequest:
    part = log_pb2.FetchPartition(
        subscription_id=subscription_id, topic_id=TOPIC_ID, partition=partition, offset=offset, leader_epoch=epoch
    )
    return log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[part]))


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def append(parts: Parts, *values: bytes, partition: int = 0) -> None:
    parts.registry.find(TOPIC_ID, partition).append(batch_of(*values), 3, lambda error: None)


def values_of(records: bytes) -> list[bytes]:
    return [
        value
        for position, _ in iter_headers(records)
        for value in decode_batch(records, position).columns.column("value").to_pylist()
    ]


def test_what_is_there_comes_first_then_what_appears(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
            append(parts, b"a", b"b")
            await settle()
            requests.send(subscribe(1))
            await writer.wait_for(1)
            append(parts, b"c")
            frames = await writer.wait_for(2)
            assert [values_of(records) for _, records in records_of(frames)] == [[b"a", b"b"], [b"c"]]
            assert frames[1][0].head.high_watermark == 3

    asyncio.run(scenario())


def test_an_empty_partition_tells_its_marks_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
            requests.send(subscribe(4))
            frames = await writer.wait_for(1)
            assert (frames[0][0].head.subscription_id, frames[0][0].head.high_watermark) == (4, 0)
            await settle()
            assert len(writer.written) == 1

    asyncio.run(scenario())


def test_nothing_above_the_high_watermark_is_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
            append(parts, b"durable")
            await settle()
            parts.disk.held = True
            append(parts, b"not yet")
            requests.send(subscribe(1))
            await settle()
            assert [values_of(records) for _, records in records_of(writer.written)] == [[b"durable"]]
            parts.disk.release()
            frames = await writer.wait_for(2)
            assert [values_of(records) for _, records in records_of(frames)] == [[b"durable"], [b"not yet"]]

    asyncio.run(scenario())


def test_frames_stop_when_the_credit_is_used_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts, credit=1, max_frame_bytes=4096) as (requests, writer):
            for _ in range(5):
                append(parts, b"x" * 3000)
            await settle()
            requests.send(subscribe(1))
            await settle()
            assert len(records_of(writer.written)) == 1
            for granted in range(2, 6):
                requests.send(log_pb2.FetchRequest(credit=log_pb2.GrantCredit(bytes=4096)))
                await settle()
                assert len(records_of(writer.written)) <= granted
            requests.send(log_pb2.FetchRequest(credit=log_pb2.GrantCredit(bytes=BIG)))
            await writer.wait_for(5)
            assert sum(len(values_of(records)) for _, records in records_of(writer.written)) == 5

    asyncio.run(scenario())


def test_a_client_that_does_not_read_costs_one_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts, max_frame_bytes=4096) as (requests, writer):
            for _ in range(50):
                append(parts, b"x" * 3000)
            await settle()
            writer.stalled = True
            requests.send(subscribe(1))
            await settle()
            assert len(writer.written) == 1
            assert sum(len(records) for _, records in records_of(writer.written)) < 8192

    asyncio.run(scenario())


def test_partitions_take_turns(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path, partitions=2) as parts, session(parts, max_frame_bytes=4096) as (requests, writer):
            for _ in range(6):
                append(parts, b"0" * 3000, partition=0)
                append(parts, b"1" * 3000, partition=1)
            await settle()
            requests.send(subscribe(1, partition=0))
            requests.send(subscribe(2, partition=1))
            while len(records_of(writer.written)) < 12:
                await writer.wait_for(len(writer.written) + 1)
            order = [number for number, _ in records_of(writer.written)]
            assert sorted(order[2:8]) == [1, 1, 1, 2, 2, 2]

    asyncio.run(scenario())


def test_an_unsubscribed_or_ended_session_leaves_no_waiter(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            partition = parts.registry.find(TOPIC_ID, 0)
            async with session(parts) as (requests, writer):
                requests.send(subscribe(1))
                requests.send(subscribe(2))
                await writer.wait_for(1)
                await settle()
                assert partition.waiting == 2
                requests.send(log_pb2.FetchRequest(unsubscribe=log_pb2.Unsubscribe(subscription_ids=[1])))
                await settle()
                assert partition.waiting == 1
            assert partition.waiting == 0

    asyncio.run(scenario())


def test_a_deleted_topic_ends_the_subscription_with_a_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
            requests.send(subscribe(1))
            await writer.wait_for(1)
            await settle()
            parts.registry.on_metadata(type(parts.image)(offset=2), [removal()])
            frames = await writer.wait_for(2)
            assert frames[1][0].head.error.code == common_pb2.UNKNOWN_TOPIC_ID

    asyncio.run(scenario())


def test_a_stale_leader_epoch_and_too_many_subscriptions_are_refused_each_by_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
            requests.send(subscribe(1, epoch=2))
            for number in range(2, 13):
                requests.send(subscribe(number))
            await settle()
            heads = {f.head.subscription_id: f.head for message in writer.written for f in message}
            assert heads[1].error.code == common_pb2.FENCED_LEADER_EPOCH
            assert heads[12].error.code == common_pb2.BROKER_OVERLOADED
            assert not any(heads[number].HasField("error") for number in range(2, 12))

    asyncio.run(scenario())


def test_a_subscription_id_is_never_used_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            with pytest.raises(InvalidRequestError, match="only grow"):
                async with session(parts) as (requests, _):
                    requests.send(subscribe(2))
                    requests.send(subscribe(2))

    asyncio.run(scenario())


def test_waiting_on_a_partition_that_has_just_closed_wakes_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            partition = parts.registry.find(TOPIC_ID, 0)
            partition.close(UnknownTopicId("deleted"))
            woken: list[bool] = []
            partition.wait(lambda: woken.append(True))
            assert woken == [True]
            assert partition.waiting == 0

    asyncio.run(scenario())


def test_nothing_is_read_for_anybody_without_a_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path, partitions=2) as parts, session(parts) as (requests, writer):
            append(parts, b"a")
            append(parts, b"b", partition=1)
            await settle()
            parts.lease.end()
            requests.send(subscribe(1))
            requests.send(subscribe(2, partition=1))
            await settle()
            assert writer.written == []
            moved = image_with(2, offset=2, leader=2, leader_epoch=4, replicas=(1, 2))
            stayed, gone = image_with(2, offset=2).topics[TOPIC_ID].partitions[0], moved.topics[TOPIC_ID].partitions[1]
            topic = replace(moved.topics[TOPIC_ID], partitions=(stayed, gone))
            moved = replace(moved, topics={TOPIC_ID: topic})
            parts.registry.on_metadata(moved, partition_records(moved))
            (refused,) = (await writer.wait_for(1))[0]
            assert refused.head.subscription_id == 2
            assert refused.head.error.code == common_pb2.NOT_LEADER_OR_FOLLOWER
            assert refused.head.error.leader.port == 9092
            parts.lease.renew()
            frames = await writer.wait_for(2)
            assert [values_of(records) for _, records in records_of(frames)] == [[b"a"]]
            assert not parts.lease.waiting

    asyncio.run(scenario())


def test_what_was_read_before_a_pause_leaves_with_the_next_lease_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
            append(parts, b"a")
            await settle()
            partition = parts.registry.find(TOPIC_ID, 0)
            read = partition.read

            def read_then_pause(*arguments: Any, **options: Any) -> Any:
                result = read(*arguments, **options)
                parts.lease.end()
                return result

            monkeypatch.setattr(partition, "read", read_then_pause)
            requests.send(subscribe(1))
            await settle()
            assert writer.written == []
            parts.lease.renew()
            frames = await writer.wait_for(1)
            assert [values_of(records) for _, records in records_of(frames)] == [[b"a"]]

    asyncio.run(scenario())


def test_a_client_may_leave_while_its_frames_wait_for_a_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            async with session(parts) as (requests, _):
                parts.lease.end()
                requests.send(subscribe(1))
                await settle()
            assert not parts.lease.waiting

    asyncio.run(scenario())


# Damage


def flip(parts: Parts, at: int) -> None:
    """Flip a bit in the only segment of the partition."""
    (path,) = Path(parts.registry.find(TOPIC_ID, 0).log.directory).glob("*.log")
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def damage_told(parts: Parts) -> list[str]:
    """Return what the registry is told from now on."""
    told: list[str] = []
    parts.registry._suspicions._on_damaged = lambda log, error: told.append(str(error))
    return told


def test_a_client_that_complains_has_the_log_looked_at(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
            append(parts, b"a")
            append(parts, b"b")
            await settle()
            told = damage_told(parts)
            complaint = subscribe(1)
            complaint.subscribe.partitions[0].damaged_offset = 1
            requests.send(complaint)
            await writer.wait_for(1)
            await settle()
            assert told == [], "it is whole"
            flip(parts, -9)
            parts.registry._suspicions._checked_logs.clear()
            parts.registry._suspicions._checked_offsets.clear()
            complaint.subscribe.partitions[0].subscription_id = 2
            requests.send(complaint)
            await writer.wait_for(2)
            await settle()
            assert len(told) == 1
            assert "offsets 1 to 1" in told[0]

    asyncio.run(scenario())


def test_a_header_that_cannot_be_read_is_refused_and_looked_at_without_a_complaint(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts, session(parts) as (requests, writer):
            append(parts, b"a")
            await settle()
            told = damage_told(parts)
            flip(parts, 6)
            requests.send(subscribe(1))
            frames = await writer.wait_for(1)
            assert frames[0][0].head.error.code == common_pb2.CORRUPT_MESSAGE
            await settle()
            assert len(told) == 1

    asyncio.run(scenario())
