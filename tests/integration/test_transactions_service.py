"""The Transaction service of real servers, over raw stubs: decisions, markers, and what failovers leave of them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

import pytest

import raftlog
from broker.transactions.config import TransactionConfig
from raftlog.errors import (
    BatchAlreadyCommitted,
    InvalidProducerEpoch,
    InvalidRequestError,
    InvalidTopic,
    InvalidTransactionTimeout,
    InvalidTxnState,
    ProducerFenced,
    SinkMismatch,
    StageExpired,
    TransactionAbortable,
    TransactionalIdNotFound,
    UnknownTopicId,
    from_wire,
)
from raftlog.testing import Cluster
from raftlog.types import TopicPartition
from raftlog.v1 import common_pb2, group_pb2, group_pb2_grpc
from raftlog.v1 import transaction_pb2 as pb
from tests.support.steady import STEADY
from tests.support.transaction_client import NOT_FOUND_YET, Identity, TransactionClient, all_ended, run_client

NODES = (1, 2, 3)
STATE = "__transaction_state"
ANSWERED_ANYWAY_S = TransactionConfig().answer_within_ms / 1000
"""After so long whoever ends a transaction is answered even though markers are missing."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=3, config=STEADY) as made:
        yield made


@pytest.fixture(autouse=True)
def everyone_is_up(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.start_all()


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic of its own for each test, so that nobody's open transaction holds others up."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=3, replication_factor=3, configs={"min.insync.replicas": "2"}, timeout=60)
    return name


def parts(topic: str) -> tuple[TopicPartition, TopicPartition]:
    return TopicPartition(topic, 0), TopicPartition(topic, 1)


# One transaction


def test_what_is_committed_is_visible_when_that_is_answered_and_not_before(cluster: Cluster, topic: str) -> None:
    async def scenario(client: TransactionClient) -> None:
        p, q = parts(topic)
        me = await client.init("visible")
        await client.add(me, p, q)
        await client.produce(me, p, b"a", b"b")
        await client.produce(me, q, b"c")
        assert (await client.end_offset(p), await client.end_offset(p, committed=False)) == (0, 2)
        assert (await client.end_offset(q), await client.end_offset(q, committed=False)) == (0, 1)
        began_s = time.monotonic()
        after = await client.end(me)
        if time.monotonic() - began_s >= ANSWERED_ANYWAY_S:
            await all_ended(client, p, q)
        assert (await client.end_offset(p), await client.end_offset(q)) == (3, 2)  # a marker behind each
        assert after.epoch == me.epoch + 1
        assert after.producer_id == me.producer_id
        assert await client.committed(p) == [b"a", b"b"]
        assert await client.committed(q) == [b"c"]

    run_client(cluster.bootstrap, scenario)


def test_what_is_aborted_is_there_and_not_committed(cluster: Cluster, topic: str) -> None:
    async def scenario(client: TransactionClient) -> None:
        p, q = parts(topic)
        me = await client.init("aborts")
        me = await client.transact(me, {p: [b"no"], q: [b"no"]}, commit=False)
        me = await client.transact(me, {p: [b"yes"]})
        await all_ended(client, p, q)
        assert await client.end_offset(p) == 4
        assert await client.committed(p) == [b"yes"]
        assert await client.committed(q) == []

    run_client(cluster.bootstrap, scenario)


def test_an_end_that_is_sent_again_has_the_same_answer_and_the_opposite_is_refused(
    cluster: Cluster, topic: str
) -> None:
    async def scenario(client: TransactionClient) -> None:
        p, _ = parts(topic)
        me = await client.init("again")
        after = await client.transact(me, {p: [b"a"]})
        assert (await client.end(me)).epoch == after.epoch
        with pytest.raises(InvalidTxnState):
            await client.end(me, commit=False)
        # Late, when the next transaction has begun: it must not touch that one (KIP-890).
        await client.add(after, p)
        await client.produce(after, p, b"b")
        with pytest.raises((InvalidTxnState, ProducerFenced, InvalidProducerEpoch)):
            await client.end(me, commit=False)
        await client.end(after)
        await all_ended(client, p)
        assert await client.committed(p) == [b"a", b"b"]

    run_client(cluster.bootstrap, scenario)


def test_a_late_batch_of_the_last_transaction_is_refused(cluster: Cluster, topic: str) -> None:
    async def scenario(client: TransactionClient) -> None:
        p, _ = parts(topic)
        me = await client.init("late")
        after = await client.transact(me, {p: [b"a"]})
        await all_ended(client, p)  # before its marker it would be one of the transaction
        with pytest.raises(InvalidProducerEpoch):
            await client.produce(me, p, b"late")
        await client.transact(after, {p: [b"b"]})
        await all_ended(client, p)
        assert await client.committed(p) == [b"a", b"b"]

    run_client(cluster.bootstrap, scenario)


def test_who_begins_with_the_same_id_fences_the_one_before(cluster: Cluster, topic: str) -> None:
    async def scenario(client: TransactionClient) -> None:
        p, _ = parts(topic)
        zombie = await client.init("fenced")
        await client.add(zombie, p)
        await client.produce(zombie, p, b"zombie")
        me = await client.init("fenced")
        assert me.epoch > zombie.epoch
        await all_ended(client, p)
        with pytest.raises((ProducerFenced, InvalidProducerEpoch)):
            await client.end(zombie)
        with pytest.raises((ProducerFenced, InvalidProducerEpoch)):
            await client.add(zombie, p)
        with pytest.raises(InvalidProducerEpoch):
            await client.produce(zombie, p, b"zombie")
        await client.transact(me, {p: [b"mine"]})
        await all_ended(client, p)
        assert await client.committed(p) == [b"mine"]

    run_client(cluster.bootstrap, scenario)


def test_a_transaction_that_takes_too_long_is_aborted_and_its_producer_goes_on(cluster: Cluster, topic: str) -> None:
    async def scenario(client: TransactionClient) -> None:
        p, _ = parts(topic)
        me = await client.init("slow", timeout_ms=500)
        await client.add(me, p)
        with suppress(InvalidProducerEpoch, InvalidTxnState, TransactionAbortable):  # later still
            await client.produce(me, p, b"too late")
        await all_ended(client, p)
        with pytest.raises(TransactionAbortable, match="timed out"):
            await client.end(me)
        back = await client.init("slow", timeout_ms=30_000, known=me)
        assert back.producer_id == me.producer_id
        await client.transact(back, {p: [b"in time"]})
        await all_ended(client, p)
        assert await client.committed(p) == [b"in time"]

    run_client(cluster.bootstrap, scenario)


def test_requests_that_can_never_succeed_say_so(cluster: Cluster, topic: str) -> None:
    async def scenario(client: TransactionClient) -> None:
        with pytest.raises(InvalidRequestError, match="1 to 255 characters"):
            await client.find("")
        with pytest.raises(InvalidTransactionTimeout, match=r"transaction\.max\.timeout\.ms"):
            await client.init("bad", timeout_ms=900_001)
        with pytest.raises(InvalidTransactionTimeout):
            await client.init("bad", timeout_ms=0)
        me = await client.init("bad")
        stranger = pb.AddToTransactionRequest(
            transactional_id="bad",
            producer_id=me.producer_id,
            producer_epoch=me.epoch,
            partitions=[group_pb2.TopicPartitions(topic_id=bytes(16), partitions=[0])],
        )
        with pytest.raises(UnknownTopicId):
            await client.call("bad", "AddToTransaction", stranger, passing=NOT_FOUND_YET)
        stranger.partitions[0].topic_id = await client.topic_id(STATE)
        with pytest.raises(InvalidTopic, match="raftlog's own"):
            await client.call("bad", "AddToTransaction", stranger)
        with pytest.raises(TransactionalIdNotFound):
            await client.call("nobody", "AbortTransaction", pb.AbortTransactionRequest(transactional_id="nobody"))

    run_client(cluster.bootstrap, scenario)


# Groups


def test_the_offsets_of_a_group_are_committed_with_the_transaction(cluster: Cluster, topic: str) -> None:
    async def offsets(client: TransactionClient, group_id: str) -> dict[int, int]:
        async with asyncio.timeout(90):
            while True:
                for address in client.addresses:
                    stub = group_pb2_grpc.GroupStub(client.channel(address))
                    answer = await stub.FetchOffsets(
                        group_pb2.FetchOffsetsRequest(group_id=group_id, member_epoch=-1, all=True), timeout=30
                    )
                    if not answer.HasField("error"):
                        return {each.partition: each.offset for each in answer.offsets if each.offset >= 0}
                await asyncio.sleep(0.05)

    async def until_offsets(client: TransactionClient, group_id: str, expected: dict[int, int]) -> None:
        async with asyncio.timeout(90):
            while await offsets(client, group_id) != expected:  # noqa: ASYNC110 # a broker rings no bell
                await asyncio.sleep(0.05)

    async def commit(client: TransactionClient, who: Identity, group_id: str, offset: int) -> None:
        request = group_pb2.CommitTransactionOffsetsRequest(
            group_id=group_id,
            transactional_id=who.transactional_id,
            producer_id=who.producer_id,
            producer_epoch=who.epoch,
            member_epoch=-1,
            offsets=[group_pb2.CommitOffset(topic=topic, partition=0, offset=offset, leader_epoch=-1)],
        )
        async with asyncio.timeout(90):
            while True:
                for address in client.addresses:
                    stub = group_pb2_grpc.GroupStub(client.channel(address))
                    answer = await stub.CommitTransactionOffsets(request, timeout=30)
                    if answer.HasField("error"):
                        assert from_wire(answer.error).retriable, answer
                        continue
                    assert not answer.results[0].HasField("error"), answer
                    return
                await asyncio.sleep(0.05)

    async def scenario(client: TransactionClient) -> None:
        p, _ = parts(topic)
        group_id = f"group-{topic}"
        me = await client.init("consumes")
        await client.add(me, p, groups=[group_id])
        await client.produce(me, p, b"result")
        await commit(client, me, group_id, 7)
        assert await offsets(client, group_id) == {}
        me = await client.end(me)
        await until_offsets(client, group_id, {0: 7})
        await client.add(me, groups=[group_id])
        await commit(client, me, group_id, 9)
        me = await client.end(me, commit=False)
        await client.add(me, p)  # is refused while the transaction before is not over
        assert await offsets(client, group_id) == {0: 7}

    run_client(cluster.bootstrap, scenario)


# Staged batches


def test_a_batch_commits_its_winners_and_nothing_else(cluster: Cluster, topic: str) -> None:
    async def scenario(client: TransactionClient) -> None:
        p, q = parts(topic)
        sink = f"sink-{topic}"
        winner = await client.stage(sink, 0, {p: [b"w1"], q: [b"w2"]})
        loser = await client.stage(sink, 0, {p: [b"retried task"]})
        described = await client.last_batch(sink)
        assert described.last_batch_id == -1
        assert {stage.producer_id for stage in described.stages} == {winner, loser}
        assert {part.topic for stage in described.stages for part in stage.partitions} == {topic}
        answer = await client.commit_batch(sink, 0, winner)
        assert (answer.last_batch_id, answer.already_committed) == (0, False)
        await all_ended(client, p, q)
        assert await client.end_offset(q) == 2
        assert await client.committed(p) == [b"w1"]
        assert await client.committed(q) == [b"w2"]
        # Sent again, and by a driver that goes on from an old checkpoint.
        assert (await client.commit_batch(sink, 0, winner)).last_batch_id == 0
        with pytest.raises(BatchAlreadyCommitted):
            await client.stage(sink, 0, {p: [b"again"]})
        async with asyncio.timeout(90):  # the coordinator has yet to hear that markers are written
            while (described := await client.last_batch(sink)).stages:  # noqa: ASYNC110 # a broker rings no bell
                await asyncio.sleep(0.05)
        assert (described.last_batch_id, described.target) == (0, "t")
        assert await client.committed(p) == [b"w1"]

    run_client(cluster.bootstrap, scenario)


async def expiring_stage(client: TransactionClient, sink: str, partition: TopicPartition) -> int:
    """Stage a record of batch 0 that is gone in a moment; return the producer id that names it."""
    async with asyncio.timeout(90):
        while True:
            with suppress(InvalidProducerEpoch, InvalidTxnState, StageExpired):  # before the record was there
                return await client.stage(sink, 0, {partition: [b"late"]}, timeout_ms=300)


def test_a_winner_that_is_gone_fails_the_batch_and_nothing_is_committed(cluster: Cluster, topic: str) -> None:
    async def scenario(client: TransactionClient) -> None:
        p, q = parts(topic)
        sink = f"sink-{topic}"
        late = await expiring_stage(client, sink, p)
        well = await client.stage(sink, 0, {q: [b"well"]})
        await all_ended(client, p)
        with pytest.raises(StageExpired):
            await client.commit_batch(sink, 0, late, well)
        with pytest.raises(SinkMismatch):
            await client.commit_batch(sink, 0, well, target="elsewhere")
        assert (await client.last_batch(sink)).last_batch_id == -1
        again = await client.stage(sink, 0, {p: [b"replayed"]})
        await client.commit_batch(sink, 0, again, well)
        await all_ended(client, p, q)
        assert await client.committed(p) == [b"replayed"]
        assert await client.committed(q) == [b"well"]

    run_client(cluster.bootstrap, scenario)


# Tools


def test_transactions_are_listed_described_and_aborted(cluster: Cluster, topic: str) -> None:
    async def listed(client: TransactionClient, state: pb.TransactionState.ValueType) -> list[pb.ListedTransaction]:
        found: list[pb.ListedTransaction] = []
        for address in client.addresses:
            async with asyncio.timeout(90):
                while True:
                    answer = await client.stub(address).ListTransactions(pb.ListTransactionsRequest(states=[state]))
                    if not answer.loading:
                        break
                    await asyncio.sleep(0.05)
            found += answer.transactions
        return found

    async def described(client: TransactionClient, key: str) -> pb.TransactionDescription:
        found = await client.find(key)
        answer = await client.stub(f"{found.host}:{found.port}").DescribeTransactions(
            pb.DescribeTransactionsRequest(transactional_ids=[key])
        )
        description: pb.TransactionDescription = answer.transactions[0]
        return description

    async def scenario(client: TransactionClient) -> None:
        p, q = parts(topic)
        key = f"tool-{topic}"
        me = await client.init(key)
        await client.add(me, p, q)
        await client.produce(me, p, b"open")
        open_ones = await listed(client, pb.TRANSACTION_ONGOING)
        assert [each.producer_id for each in open_ones if each.transactional_id == key] == [me.producer_id]
        description = await described(client, key)
        assert description.state == pb.TRANSACTION_ONGOING
        assert description.coordinator_id == await client.coordinator_of(key)
        assert [(part.topic, list(part.partitions)) for part in description.partitions] == [(topic, [0, 1])]
        (producer,) = (await client.producers(p)).producers
        assert (producer.producer_id, producer.transaction_start_offset) == (me.producer_id, 0)
        await client.call(key, "AbortTransaction", pb.AbortTransactionRequest(transactional_id=key))
        await all_ended(client, p)
        assert await client.end_offset(p) == 2
        assert (await client.producers(p)).producers[0].transaction_start_offset == -1
        async with asyncio.timeout(90):  # the coordinator has yet to hear of the markers
            ending = await described(client, key)
            while ending.state == pb.PREPARE_ABORT:
                await asyncio.sleep(0.05)
                ending = await described(client, key)
        assert ending.state == pb.COMPLETE_ABORT
        with pytest.raises((ProducerFenced, InvalidProducerEpoch, TransactionAbortable)):
            await client.end(me)
        assert (await described(client, f"no-{topic}")).error.code == common_pb2.TRANSACTIONAL_ID_NOT_FOUND

    run_client(cluster.bootstrap, scenario)


# Many at once


def test_fifty_producers_commit_and_abort_side_by_side(cluster: Cluster, topic: str) -> None:
    async def produce(client: TransactionClient, number: int, p: TopicPartition, q: TopicPartition) -> None:
        me = await client.init(f"many-{topic}-{number}")
        for turn in range(4):
            value = b"%d-%d" % (number, turn)
            me = await client.transact(me, {p: [value], q: [value]}, commit=turn % 2 == 0)

    async def scenario(client: TransactionClient) -> None:
        p, q = parts(topic)
        await asyncio.gather(*(produce(client, number, p, q) for number in range(50)))
        expected = {b"%d-%d" % (number, turn) for number in range(50) for turn in (0, 2)}
        for partition in (p, q):
            await all_ended(client, partition)
            found = await client.committed(partition)
            assert set(found) == expected
            assert len(found) == len(expected)

    run_client(cluster.bootstrap, scenario)
