"""The power of real servers goes, of all at once or in turn, while clients append, poll, transact and make topics.

What a server has written and not synced is gone then, or torn, or there (`tests.support.power`). Nothing that was
acknowledged may be lost, moved or doubled, no committed offset may go back, every transaction is there as a whole or
not at all, topics that were made are there and those that were deleted are not; and every server starts again.
That all this would be noticed, servers show whose fsync does nothing.
The short form cuts the power in a few ways; the long form in each of them, then at random, from several seeds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import pytest

from raftlog import Admin
from raftlog.testing import ServerFailed
from tests.support.append_checker import assert_sound
from tests.support.append_workload import TOPIC, AppendWorkload, read_replicas
from tests.support.power.cluster import PoweredCluster, powered_cluster
from tests.support.power.disk import missing
from tests.support.power.workloads import Client, Commits, Topics, Transactions
from tests.support.up_to_date import up_to_date

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

NODES: Final = (1, 2, 3)
PARTITIONS: Final = 3
LONG_ROUNDS: Final = 30
LONG_SEEDS: Final = range(100, 104)
CONFIG: Final[dict[str, str | int | float | bool]] = {
    # Everything that is written aside, rolled, compacted and checkpointed happens all the time.
    "min.segment.bytes": 1024,
    "log.segment.bytes": 64 << 10,
    "log.segment.delete.delay.ms": 200,
    "log.retention.check.interval.ms": 500,
    "log.cleaner.backoff.ms": 500,
    "log.cleaner.min.cleanable.ratio": 0.1,
    "metadata.log.max.record.bytes.between.snapshots": 64 << 10,
    "replica.high.watermark.checkpoint.interval.ms": 500,
    "offsets.topic.num.partitions": 2,
    "offsets.topic.segment.bytes": 16 << 10,
    "transaction.state.log.num.partitions": 2,
    "transaction.state.log.segment.bytes": 16 << 10,
    "replica.lag.time.max.ms": 2_000,
}


@dataclass
class Outage:
    """Cuts the power; each way ends with every server and every client at work."""

    powered: PoweredCluster
    appends: AppendWorkload
    clients: list[Client]
    chance: Random
    cuts: int = field(default=0)

    def all_at_once(self) -> None:
        """The whole house is dark."""
        self.cut()

    def again_while_they_start(self) -> None:
        """The power comes back for a moment."""
        self.cut()
        for node_id in NODES:
            self.powered.cluster.start(node_id, wait=False)
        time.sleep(self.chance.uniform(0.3, 3.0))
        self.cut()

    def one(self) -> None:
        """One server loses its power, and the others go on, as they are in sync."""
        self.powered.cluster.wait_for(_in_sync, timeout_s=120, what="every replica in sync")
        self.cut(self.chance.choice(NODES))
        self.appends.wait_for_progress()

    def one_that_was_killed_before(self) -> None:
        """Killing a process does not make durable the bytes that it wrote in an earlier life."""
        node_id = self.chance.choice(NODES)
        self.powered.kill(node_id)
        self.powered.cluster.start(node_id, wait=self.chance.random() < 0.5)
        self.cut(node_id)

    def two_in_turn(self) -> None:
        """Two lose their power, the second one soon after the first."""
        for node_id in self.chance.sample(NODES, 2):
            self.cut(node_id)
            time.sleep(self.chance.choice((0.0, 0.3, 2.5)))

    def one_after_the_other(self) -> None:
        """All servers lose power in turn and return in the same order: the first ones lack records that the last one
        has."""
        order = self.chance.sample(NODES, 3)
        for node_id in order:
            self.cut(node_id)
            time.sleep(self.chance.choice((0.0, 0.3, 2.5)))
        for node_id in order:
            self.powered.cluster.start(node_id, wait=False)
            time.sleep(self.chance.choice((0.0, 0.5)))

    def cut(self, *node_ids: int) -> None:
        """Cut the power of these servers, or of all."""
        self.powered.cut(*node_ids)
        self.cuts += 1

    def go_on(self, work_s: float) -> None:
        """Start the stopped servers, and see that every client goes on."""
        self.powered.cluster.start_all()
        before = [client.done for client in self.clients]
        self.appends.wait_for_progress()
        for client in self.clients:
            if isinstance(client, Topics | Commits):
                client.check()
        deadline_s = time.monotonic() + 90
        while any(client.done <= done and client.is_alive() for client, done in zip(self.clients, before, strict=True)):
            assert time.monotonic() < deadline_s, (
                "some client makes no progress within 90 s after the power loss: "
                f"{[(each.name, each.done) for each in self.clients]}"
            )
            time.sleep(0.02)
        time.sleep(work_s)


def _in_sync(admin: Admin) -> bool:
    return all(len(part.isr) == len(NODES) for part in up_to_date(admin).describe_topic(TOPIC).partitions)


Way = Callable[[Outage], None]
FEW: Final[tuple[Way, ...]] = (Outage.all_at_once, Outage.one_that_was_killed_before, Outage.two_in_turn)
WAYS: Final[tuple[Way, ...]] = (*FEW, Outage.one, Outage.again_while_they_start, Outage.one_after_the_other)


def make_topics(powered: PoweredCluster, partitions: int = PARTITIONS) -> None:
    """Make the topics that are there all the time."""
    with Admin(powered.cluster.bootstrap) as admin:
        for topic in (TOPIC, Transactions.TOPIC):
            admin.create_topic(
                topic, partitions, replication_factor=3, configs={"min.insync.replicas": "2"}, timeout=60
            )


@contextmanager
def outages(directory: Path, seed: int) -> Iterator[Outage]:
    """Servers whose power can be cut, with clients at work; at the end the answers to clients are checked."""
    chance = Random(seed)
    with powered_cluster(directory, chance, config=CONFIG) as powered:
        make_topics(powered)
        bootstrap = powered.cluster.bootstrap
        appends = AppendWorkload(bootstrap, PARTITIONS, racks={})
        clients = [Topics(bootstrap, seed), *(Transactions(bootstrap, n) for n in (1, 2)), Commits(bootstrap, 1, TOPIC)]
        outage = Outage(powered, appends, clients, chance)
        appends.start()
        for client in clients:
            client.start()
        try:
            outage.go_on(0.5)
            yield outage
            outage.go_on(0.0)
            appends.stop()
            for client in clients:
                client.stop()
            addresses = dict(zip(powered.cluster.broker_ids, bootstrap.split(","), strict=True))
            final, raw = asyncio.run(read_replicas(addresses, PARTITIONS))
            appends.stop_pollers(final[1])
            assert_sound(appends.history(final))
            assert raw[1] == raw[2] == raw[3], "the logs of the three replicas are not the same byte for byte"
            for appender in appends.appenders:
                assert not appender.retries or not appender.errors, appender.errors[:3]
            for client in clients:
                client.check()
        finally:
            print(f"{powered.report()}\n{appends.acknowledged} acknowledged, {[(c.name, c.done) for c in clients]}")
            for client in clients:
                client.over.set()


@pytest.mark.parametrize("ways", [FEW, pytest.param(WAYS, marks=pytest.mark.long)], ids=["few", "all"])
def test_the_power_goes_in_one_way_after_the_other(tmp_path: Path, ways: tuple[Way, ...]) -> None:
    with outages(tmp_path, seed=7) as outage:
        for way in ways:
            way(outage)
            outage.go_on(outage.chance.uniform(0.0, 0.5))
        assert sum(loss.size for _, loss in outage.powered.losses) > 10, (
            "the power losses have lost too little to show anything"
        )


@pytest.mark.long
@pytest.mark.parametrize("seed", LONG_SEEDS)
def test_the_power_goes_at_random(tmp_path: Path, seed: int) -> None:
    with outages(tmp_path, seed) as outage:
        for _ in range(LONG_ROUNDS):
            outage.chance.choice(WAYS)(outage)
            outage.go_on(outage.chance.choice((0.0, 0.3, 2.0)))


# Servers that lie


@pytest.mark.parametrize("lie", [f"{TOPIC}-*/*.log", pytest.param(f"{TOPIC}-?", marks=pytest.mark.long)])
def test_records_that_were_never_synced_are_missed(tmp_path: Path, lie: str) -> None:
    """The fsync of logs, or of directories, does nothing: acknowledged records are lost, which the test notices.

    Servers would notice too, by what they write down of their logs now and then, and serve none of these partitions.
    """
    config = {
        "min.segment.bytes": 1024,
        "log.segment.bytes": 1024,
        "replica.high.watermark.checkpoint.interval.ms": 3_600_000,
    }
    with powered_cluster(tmp_path, Random(3), lie=lie, config=config) as powered:
        make_topics(powered, partitions := 6)
        appends = AppendWorkload(powered.cluster.bootstrap, partitions, racks={})
        for appender in appends.appenders:
            appender.start()
        appends.wait_for_progress(60)
        appends.stop()
        powered.cut()
        powered.cluster.start_all()
        addresses = dict(zip(powered.cluster.broker_ids, powered.cluster.bootstrap.split(","), strict=True))
        final, _ = asyncio.run(read_replicas(addresses, partitions))
        with pytest.raises(AssertionError, match="LOST"):
            assert_sound(appends.history(final))


def test_metadata_that_was_never_synced_is_missed(tmp_path: Path) -> None:
    """The fsync of the metadata log does nothing: topics are gone that were made, or what is left is refused."""
    with powered_cluster(tmp_path, Random(3), nodes=1, lie="__cluster_metadata/wal-*") as powered:
        topics = Topics(powered.cluster.bootstrap, 1, replicas=1)
        topics.start()
        while topics.done < 5:
            time.sleep(0.02)
        topics.stop()
        powered.cut()
        with pytest.raises((ServerFailed, AssertionError), match=r"is damaged|topics that were"):
            powered.cluster.start_all()
            topics.check()
