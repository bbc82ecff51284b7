"""Offsets in transactions, and the tools for transactions, against three real servers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio as grpc_aio

import raftlog
from raftlog import TopicPartition, aio
from raftlog.errors import (
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTxnState,
    NonEmptyGroup,
    TransactionalIdNotFound,
    UnknownMemberId,
    UnstableOffsetCommit,
    from_wire,
)
from raftlog.testing import Cluster
from raftlog.v1 import group_pb2, group_pb2_grpc
from tests.support.steady import PATIENT
from tests.support.transaction_client import Identity, TransactionClient, all_ended, transaction_client
from tests.support.up_to_date import heard_everywhere

WAIT_S = 90.0
CALL_S = 20.0
ANSWER_S = 1.0
"""Later than this the end of a transaction may be answered while markers are missing still."""
OPEN_MS = 600_000
"""What is left open stays so for longer than any test takes."""


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(nodes=3, config=PATIENT) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def everyone_is_up(three: Cluster) -> Iterator[None]:
    yield
    three.start_all()


@pytest.fixture
def topic(three: Cluster) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    with raftlog.Admin(three.bootstrap) as admin:
        admin.create_topic(name, partitions=3, replication_factor=3)
    heard_everywhere(three)
    return name


class World:
    """A client of transactions, an admin client, and one group."""

    def __init__(self, cluster: Cluster, client: TransactionClient, admin: aio.Admin, topic: str) -> None:
        self.cluster = cluster
        self.client = client
        self.admin = admin
        self.topic = topic
        self.group_id = f"g-{topic}"

    async def _at_coordinator(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return what the group's coordinator answers, once nothing that passes stands in between."""
        until_s = time.monotonic() + WAIT_S
        while True:
            last: object = None
            for address in self.client.addresses:
                try:
                    answer = await ask(group_pb2_grpc.GroupStub(self.client.channel(address)))  # type: ignore[no-untyped-call,unused-ignore] # generated
                except grpc_aio.AioRpcError as error:
                    last = error
                    continue
                if not answer.HasField("error"):
                    return answer
                last = from_wire(answer.error)
                if not from_wire(answer.error).retriable:
                    raise from_wire(answer.error)
            assert time.monotonic() < until_s, last
            await asyncio.sleep(0.05)

    async def send(self, who: Identity, offsets: dict[int, int], member: tuple[str, int] = ("", -1)) -> None:
        """Send offsets in a transaction; the group has been added to it."""
        request = group_pb2.CommitTransactionOffsetsRequest(
            group_id=self.group_id,
            transactional_id=who.transactional_id,
            producer_id=who.producer_id,
            producer_epoch=who.epoch,
            member_id=member[0],
            member_epoch=member[1],
            offsets=[
                group_pb2.CommitOffset(topic=self.topic, partition=number, offset=offset, leader_epoch=-1)
                for number, offset in offsets.items()
            ],
        )
        answer = await self._at_coordinator(lambda stub: stub.CommitTransactionOffsets(request, timeout=CALL_S))
        assert not any(result.HasField("error") for result in answer.results), answer

    async def offsets(self, *, stable: bool = False) -> dict[int, int | type[Exception]]:
        """Return what the group has committed; with `stable` also what may change."""
        request = group_pb2.FetchOffsetsRequest(
            group_id=self.group_id, member_epoch=-1, all=True, require_stable=stable
        )
        answer = await self._at_coordinator(lambda stub: stub.FetchOffsets(request, timeout=CALL_S))
        return {
            each.partition: type(from_wire(each.error)) if each.HasField("error") else each.offset
            for each in answer.offsets
        }

    async def end(self, who: Identity, *parts: TopicPartition, commit: bool = True) -> Identity:
        """End a transaction; that counts at once, or soon when it took so long that markers may be missing."""
        began_s = time.monotonic()
        after = await self.client.end(who, commit=commit)
        if time.monotonic() - began_s >= ANSWER_S:
            until_s = time.monotonic() + WAIT_S
            while UnstableOffsetCommit in (await self.offsets(stable=True)).values():
                assert time.monotonic() < until_s
                await asyncio.sleep(0.05)
            await all_ended(self.client, *parts)
        return after

    async def coordinator(self) -> int:
        """Return the node that coordinates the group."""
        request = group_pb2.FindCoordinatorRequest(group_id=self.group_id)
        answer = await self._at_coordinator(lambda stub: stub.FindCoordinator(request, timeout=CALL_S))
        node_id: int = answer.node_id
        return node_id


def play(cluster: Cluster, topic: str, scenario: Callable[[World], Awaitable[None]]) -> None:
    @asynccontextmanager
    async def world() -> AsyncIterator[World]:
        async with transaction_client(cluster.bootstrap) as client, aio.Admin(cluster.bootstrap) as admin:
            yield World(cluster, client, admin, topic)

    async def run() -> None:
        async with world() as made:
            await scenario(made)

    asyncio.run(run())


# Offsets


def test_offsets_count_when_the_end_is_answered(three: Cluster, topic: str) -> None:
    async def scenario(world: World) -> None:
        await world.admin.alter_group_offsets(world.group_id, {TopicPartition(topic, 0): 1})
        me = await world.client.init(f"id-{topic}")
        await world.client.add(me, TopicPartition(topic, 2), groups=[world.group_id])
        await world.client.produce(me, TopicPartition(topic, 2), b"result")
        await world.send(me, {0: 5, 1: 6})
        assert await world.offsets() == {0: 1}
        assert await world.offsets(stable=True) == {0: UnstableOffsetCommit, 1: UnstableOffsetCommit}
        described = await world.admin.describe_transaction(me.transactional_id)
        assert (described.state, described.group_ids) == ("ongoing", [world.group_id])
        with pytest.raises(NonEmptyGroup, match="have offsets of the group"):
            await world.admin.delete_groups([world.group_id])
        after = await world.end(me, TopicPartition(topic, 2))
        assert await world.offsets(stable=True) == {0: 5, 1: 6}
        assert await world.client.committed(TopicPartition(topic, 2)) == [b"result"]
        with pytest.raises(InvalidProducerEpoch):
            await world.send(me, {0: 1})
        await world.client.add(after, groups=[world.group_id])
        await world.send(after, {0: 50})
        await world.end(after, commit=False)
        assert await world.offsets(stable=True) == {0: 5, 1: 6}
        await world.admin.delete_groups([world.group_id])

    play(three, topic, scenario)


def test_offsets_of_no_transaction_are_refused(three: Cluster, topic: str) -> None:
    """Nothing would ever decide about them, and the group would have no stable offset for ever (KIP-890)."""

    async def scenario(world: World) -> None:
        me = await world.client.init(f"id-{topic}")
        with pytest.raises(InvalidTxnState, match="was not added"):
            await world.send(me, {0: 5})
        for stranger in (Identity("nobody", 987_654_321, 0), Identity(me.transactional_id, 987_654_321, 0)):
            with pytest.raises(InvalidProducerIdMapping):
                await world.send(stranger, {0: 5})
        await world.client.add(me, TopicPartition(topic, 2), groups=["another"])
        with pytest.raises(InvalidTxnState, match="was not added"):
            await world.send(me, {0: 5})
        assert await world.offsets(stable=True) == {}
        await world.client.add(me, groups=[world.group_id])
        await world.send(me, {0: 5})
        await world.end(me)
        assert await world.offsets(stable=True) == {0: 5}

    play(three, topic, scenario)


@pytest.mark.parametrize("commit", [True, False])
def test_offsets_outlive_their_coordinator(three: Cluster, topic: str, commit: bool) -> None:
    async def scenario(world: World) -> None:
        me = await world.client.init(f"id-{topic}")
        await world.client.add(me, groups=[world.group_id])
        await world.send(me, {0: 5, 1: 6})
        first = await world.coordinator()
        three.kill(first)
        assert await world.offsets(stable=True) == {0: UnstableOffsetCommit, 1: UnstableOffsetCommit}
        await world.client.end(me, commit=commit)
        # Answered a second after the decision if the marker is still missing; it gets there.
        until_s = time.monotonic() + WAIT_S
        while UnstableOffsetCommit in (await world.offsets(stable=True)).values():
            assert time.monotonic() < until_s
            await asyncio.sleep(0.05)
        assert await world.offsets(stable=True) == ({0: 5, 1: 6} if commit else {})
        three.start(first)

    play(three, topic, scenario)


def test_a_decision_reaches_a_coordinator_that_was_away(three: Cluster, topic: str) -> None:
    async def scenario(world: World) -> None:
        me = await world.client.init(f"id-{topic}")
        await world.client.add(me, groups=[world.group_id])
        await world.send(me, {0: 5})
        first = await world.coordinator()
        three.pause(first)
        ending = asyncio.ensure_future(world.client.end(me))
        await asyncio.sleep(0.5)
        three.resume(first)
        after = await ending
        until_s = time.monotonic() + WAIT_S
        while await world.offsets(stable=True) != {0: 5}:
            assert time.monotonic() < until_s
            await asyncio.sleep(0.05)
        await world.client.add(after, groups=[world.group_id])
        await world.send(after, {0: 9})
        await world.end(after)
        assert await world.offsets() == {0: 9}

    play(three, topic, scenario)


def test_a_consumer_begins_where_the_transaction_has_committed(three: Cluster, topic: str) -> None:
    async def scenario(world: World) -> None:
        part = TopicPartition(topic, 0)
        async with aio.Producer(three.bootstrap) as producer:
            for number in range(10):
                await producer.send(topic, b"%d" % number, partition=0)
        await world.admin.alter_group_offsets(world.group_id, {part: 2})
        me = await world.client.init(f"id-{topic}")
        await world.client.add(me, groups=[world.group_id])
        await world.send(me, {0: 7})
        async with aio.Consumer(three.bootstrap, group_id=world.group_id) as consumer:
            await consumer.assign([part])
            assert await consumer.poll(1.0) == []
            await world.client.end(me)
            async with asyncio.timeout(WAIT_S):
                records: list[raftlog.Record] = []
                while len(records) < 3:
                    records += await consumer.poll(0.2)
            assert [record.offset for record in records] == [7, 8, 9]

    play(three, topic, scenario)


def test_a_member_that_has_lost_its_partitions_commits_nothing(three: Cluster, topic: str) -> None:
    async def scenario(world: World) -> None:
        async with aio.Consumer(
            three.bootstrap, group_id=world.group_id, enable_auto_commit=False, auto_offset_reset="earliest"
        ) as consumer:
            await consumer.subscribe(topic)
            async with asyncio.timeout(WAIT_S):
                while len(consumer.assignment()) < 3:
                    await consumer.poll(0.1)
            mine = consumer.group_metadata()
            me = await world.client.init(f"id-{topic}")
            await world.client.add(me, groups=[world.group_id])
            with pytest.raises(UnknownMemberId, match="send them with the consumer's group metadata"):
                await world.send(me, {0: 5})
            await world.send(me, {0: 5}, (mine.member_id, mine.member_epoch))
        until_s = time.monotonic() + WAIT_S
        while (await world.admin.describe_group(world.group_id)).members:
            assert time.monotonic() < until_s
            await asyncio.sleep(0.05)
        # It has left; what it has sent in time counts.
        with pytest.raises(UnknownMemberId):
            await world.send(me, {1: 6}, (mine.member_id, mine.member_epoch))
        await world.end(me)
        assert (await world.offsets())[0] == 5
        assert (await world.offsets()).get(1) is None

    play(three, topic, scenario)


# Tools


def txn(cluster: Cluster, *arguments: str) -> Any:
    """Run `raftlog txn ...`, and return what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "raftlog.cli", "txn", *arguments, "-b", cluster.bootstrap, "-o", "json"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_transactions_are_found_and_aborted(three: Cluster, topic: str) -> None:
    async def scenario(world: World) -> None:
        part = TopicPartition(topic, 1)
        me = await world.client.init(f"id-{topic}", timeout_ms=OPEN_MS)
        await world.client.add(me, part)
        await world.client.produce(me, part, b"no")
        (listed,) = txn(three, "list", "--state", "ongoing", "--producer-id", str(me.producer_id))
        assert listed["transactional_id"] == me.transactional_id
        (described,) = txn(three, "describe", me.transactional_id)
        assert described["partitions"] == [{"topic": topic, "partition": 1}]
        _, known, _ = txn(three, "producers", topic)
        (writer,) = known["producers"]
        assert (writer["producer_id"], writer["producer_epoch"]) == (me.producer_id, me.epoch)
        assert (writer["transaction_start_offset"], known["last_stable_offset"], known["high_watermark"]) == (0, 0, 1)
        assert await world.admin.find_hanging_transactions([topic], max_transaction_timeout_ms=0) == []
        with pytest.raises(InvalidTxnState, match="is not hanging"):
            await world.admin.abort_hanging(topic, 1, 0)
        assert txn(three, "abort", me.transactional_id)["aborted"] == [me.transactional_id]
        await all_ended(world.client, part)
        until_s = time.monotonic() + WAIT_S
        while (await world.admin.describe_transaction(me.transactional_id)).state != "complete_abort":
            assert time.monotonic() < until_s
            await asyncio.sleep(0.05)
        assert await world.client.committed(part) == []
        assert await world.client.end_offset(part) == await world.client.end_offset(part, committed=False)
        with pytest.raises(TransactionalIdNotFound):
            await world.admin.describe_transaction("nobody")
        with pytest.raises(InvalidTxnState):
            await world.admin.abort_transaction(me.transactional_id)

    play(three, topic, scenario)


def test_what_hangs_is_found_and_ended(three: Cluster, topic: str) -> None:
    """Written by a client that has not added the partition, so that nobody would ever send a marker."""

    async def scenario(world: World) -> None:
        part, other = TopicPartition(topic, 0), TopicPartition(topic, 1)
        me = await world.client.init(f"id-{topic}", timeout_ms=OPEN_MS)
        await world.client.add(me, other)
        await world.client.produce(me, other, b"kept")
        await world.client.produce(me, part, b"hangs")
        (hanging,) = txn(three, "find-hanging", "--topic", topic, "--max-transaction-timeout", "0s")
        assert (hanging["partition"], hanging["producer_id"], hanging["start_offset"]) == (0, me.producer_id, 0)
        await world.client.end(me)
        await all_ended(world.client, other)
        assert [
            each.partition for each in await world.admin.find_hanging_transactions(max_transaction_timeout_ms=0)
        ] == [0]
        assert await world.admin.find_hanging_transactions() == []
        assert (await world.client.end_offset(part), await world.client.end_offset(part, committed=False)) == (0, 1)
        assert txn(three, *hanging["abort_command"].split()[2:])["producer_id"] == me.producer_id
        assert await world.client.end_offset(part) == 2
        assert await world.client.committed(part) == []
        assert await world.client.committed(other) == [b"kept"]
        assert await world.admin.find_hanging_transactions(max_transaction_timeout_ms=0) == []
        with pytest.raises(InvalidTxnState, match="none is open there"):
            await world.admin.abort_hanging(topic, 0, 0)

    play(three, topic, scenario)


def test_sinks_and_their_stages(three: Cluster, topic: str) -> None:
    async def scenario(world: World) -> None:
        sink, part = f"sink-{topic}", TopicPartition(topic, 0)
        first = await world.client.stage(sink, 0, {part: [b"a"]}, timeout_ms=OPEN_MS)
        await world.client.commit_batch(sink, 0, first)
        second = await world.client.stage(sink, 1, {part: [b"b"]}, timeout_ms=OPEN_MS)
        assert [each["last_batch_id"] for each in txn(three, "sinks") if each["sink_id"] == sink] == [0]
        until_s = time.monotonic() + WAIT_S
        while len((described := txn(three, "sinks", sink)[0])["stages"]) > 1:  # the first one is over soon
            assert time.monotonic() < until_s, described
        assert (described["last_batch_id"], described["target"]) == (0, "t")
        (stage,) = described["stages"]
        assert (stage["producer_id"], stage["batch_id"], stage["state"]) == (second, 1, "ongoing")
        assert stage["partitions"] == [{"topic": topic, "partition": 0}]
        assert await world.admin.find_hanging_transactions([topic], max_transaction_timeout_ms=0) == []
        (listed,) = await world.admin.list_transactions(["ongoing"], producer_ids=[second])
        assert (listed.sink_id, listed.transactional_id) == (sink, "")
        with pytest.raises(TransactionalIdNotFound):
            await world.admin.describe_sink("nobody")

    play(three, topic, scenario)
