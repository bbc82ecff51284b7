"""Transactions outlive the brokers that run them: kills and pauses at every step, over raw stubs."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

import raftlog
from raftlog.errors import RaftlogError
from raftlog.testing import Cluster
from raftlog.types import TopicPartition
from tests.support.transaction_client import TIMEOUT_S, Identity, TransactionClient, all_ended, run_client

NODES = (1, 2, 3)
SEED = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=3) as made:
        yield made


@pytest.fixture(autouse=True)
def everyone_is_up(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.start_all()


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic of its own for each test, so that nobody's open transaction holds others up."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    cluster.wait_for(  # servers are missed soon here, and three have to be there
        lambda admin: admin.create_topic(
            name, partitions=3, replication_factor=3, configs={"min.insync.replicas": "2"}, timeout=60
        ),
        what="a topic with three replicas",
    )
    return name


def parts(topic: str) -> tuple[TopicPartition, TopicPartition]:
    return TopicPartition(topic, 0), TopicPartition(topic, 1)


# One at a time


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("step", ["begun", "added", "written", "decided"])
def test_a_transaction_outlives_its_coordinator(cluster: Cluster, topic: str, step: str, commit: bool) -> None:
    async def scenario(client: TransactionClient) -> None:
        p, q = parts(topic)
        key = f"moves-{step}-{commit}"
        me = await client.init(key)

        async def here(name: str) -> None:
            if name == step:
                node = await client.coordinator_of(key)
                await asyncio.get_running_loop().run_in_executor(None, cluster.kill, node)

        await here("begun")
        await client.add(me, p, q)
        await here("added")
        await client.produce(me, p, b"p")
        await client.produce(me, q, b"q")
        await here("written")
        ending = asyncio.ensure_future(client.end(me, commit=commit))
        if step == "decided":
            await asyncio.sleep(0.002)
            await here("decided")
        after = await ending
        await all_ended(client, p, q)
        expected = ([b"p"], [b"q"]) if commit else ([], [])
        assert (await client.committed(p), await client.committed(q)) == expected
        await client.transact(after, {p: [b"next"]})
        await all_ended(client, p)
        assert (await client.committed(p))[-1] == b"next"

    run_client(cluster.bootstrap, scenario)


@pytest.mark.parametrize("commit", [True, False])
def test_markers_find_the_next_leader(cluster: Cluster, topic: str, commit: bool) -> None:
    """Its leader stands still while the decision is made; who leads next is told, and the one that wakes up as well."""

    async def scenario(client: TransactionClient) -> None:
        loop = asyncio.get_running_loop()
        p, q = parts(topic)
        leader = cluster.leader(topic, 0)
        key = await another_coordinator(client, leader)
        me = await client.init(key)
        await client.add(me, p, q)
        await client.produce(me, p, b"p")
        await client.produce(me, q, b"q")
        await loop.run_in_executor(None, cluster.pause, leader)
        try:
            await client.end(me, commit=commit)
            await all_ended(client, p, q)
        finally:
            await loop.run_in_executor(None, cluster.resume, leader)
        expected = ([b"p"], [b"q"]) if commit else ([], [])
        assert (await client.committed(p), await client.committed(q)) == expected

    run_client(cluster.bootstrap, scenario)


async def another_coordinator(client: TransactionClient, not_this: int) -> str:
    """Return a transactional id that some other node coordinates."""
    while True:
        key = f"elsewhere-{uuid.uuid4().hex}"
        if await client.coordinator_of(key) != not_this:
            return key


def test_a_topic_that_is_deleted_holds_no_transaction_up(cluster: Cluster, topic: str) -> None:
    async def scenario(client: TransactionClient) -> None:
        p, _ = parts(topic)
        other = f"gone-{topic}"
        admin = raftlog.Admin(cluster.bootstrap)
        cluster.wait_for(lambda admin: admin.create_topic(other, partitions=1, replication_factor=3))
        me = await client.init(f"deleted-{topic}", timeout_ms=600_000)
        await client.add(me, p, TopicPartition(other, 0))
        await client.produce(me, p, b"a")
        await asyncio.get_running_loop().run_in_executor(None, admin.delete_topic, other)
        me = await client.end(me)
        begun = time.monotonic()
        await client.add(me, p)  # is refused while the transaction before is not over
        assert time.monotonic() - begun < TIMEOUT_S / 2
        await client.end(me)
        await all_ended(client, p)
        assert await client.committed(p) == [b"a"]

    run_client(cluster.bootstrap, scenario)


def test_everything_is_there_after_all_nodes_were_killed(cluster: Cluster, topic: str) -> None:
    async def before(client: TransactionClient) -> None:
        p, _ = parts(topic)
        me = await client.init(f"survives-{topic}")
        me = await client.transact(me, {p: [b"first"]})
        await client.add(me, p)
        await client.produce(me, p, b"second")
        found.append(me)
        sink = f"sink-{topic}"
        await client.commit_batch(sink, 3, await client.stage(sink, 3, {p: [b"staged"]}))

    async def after(client: TransactionClient) -> None:
        p, _ = parts(topic)
        assert (await client.last_batch(f"sink-{topic}")).last_batch_id == 3
        await client.end(found[0])
        await all_ended(client, p)
        assert await client.committed(p) == [b"first", b"second", b"staged"]

    found: list[Identity] = []
    run_client(cluster.bootstrap, before)
    for node in NODES:
        cluster.kill(node)
    cluster.start_all()
    run_client(cluster.bootstrap, after)


# All at once


@dataclass
class Story:
    """What one producer has done: values by how their transactions ended, as far as it knows."""

    committed: set[bytes] = field(default_factory=set)
    aborted: set[bytes] = field(default_factory=set)
    unknown: set[bytes] = field(default_factory=set)


async def live(client: TransactionClient, name: str, partitions: list[TopicPartition], until_s: float) -> Story:
    """Commit and abort transactions over all partitions, one after the other; begin anew whenever something fails."""
    story, rng = Story(), random.Random(name)
    me: Identity | None = None
    number = 0
    while time.monotonic() < until_s or len(story.committed) < 2:
        if me is None:
            me = await client.init(name, timeout_ms=10_000)
        number += 1
        value, commit = b"%s-%d" % (name.encode(), number), rng.random() < 0.7
        outcome = story.aborted
        try:
            await client.add(me, *partitions)
            for partition in partitions:
                await client.produce(me, partition, value)
            outcome = story.unknown if commit else story.aborted
            me = await client.end(me, commit=commit)
            outcome = story.committed if commit else story.aborted
        except RaftlogError:
            me = None
        outcome.add(value)
    if me is not None:
        await client.init(name)
    return story


async def harm(cluster: Cluster, until_s: float, rng: random.Random) -> None:
    """Kill, or stop for a while, one node after the other."""
    loop = asyncio.get_running_loop()
    while time.monotonic() < until_s:
        node = rng.choice(NODES)
        if rng.random() < 0.6:
            await loop.run_in_executor(None, cluster.kill, node)
            await asyncio.sleep(rng.uniform(0.2, 1.0))
            await loop.run_in_executor(None, cluster.start, node)
        else:
            await loop.run_in_executor(None, cluster.pause, node)
            await asyncio.sleep(rng.uniform(0.5, 2.5))
            await loop.run_in_executor(None, cluster.resume, node)
        await asyncio.sleep(rng.uniform(0.5, 1.5))


def test_every_transaction_is_there_as_a_whole_or_not_at_all(cluster: Cluster, topic: str) -> None:
    async def scenario(client: TransactionClient) -> None:
        partitions = [TopicPartition(topic, number) for number in range(3)]
        until_s = time.monotonic() + 20
        living = [live(client, f"chaos-{topic}-{number}", partitions, until_s) for number in range(6)]
        harming = asyncio.ensure_future(harm(cluster, until_s - 2, random.Random(SEED)))
        stories = await asyncio.gather(*living)
        await harming
        await all_ended(client, *partitions)
        logs = [await client.committed(partition) for partition in partitions]
        for log in logs:
            assert len(log) == len(set(log)), "nothing is there twice"
        first, *others = map(set, logs)
        assert others == [first, first], "a transaction is in all partitions or in none"
        assert sum(len(story.committed) for story in stories) > 10
        for story in stories:
            assert story.committed <= first
            assert not story.aborted & first

    run_client(cluster.bootstrap, scenario)
