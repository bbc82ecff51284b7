"""Consumer groups against real servers: sharing, going on, coming back."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raftlog import Admin, Consumer, OffsetAndMetadata, Producer, RebalanceListener, Record, TopicPartition, aio
from raftlog.errors import (
    FencedInstanceId,
    InvalidTopic,
    OffsetMetadataTooLarge,
    PartitionNotOwned,
    RaftlogError,
    UnsupportedAssignor,
)
from raftlog.testing import Cluster
from tests.support.patience import quickest_s
from tests.support.steady import PATIENT, STEADY
from tests.support.up_to_date import heard_everywhere

WAIT_S = 90.0
SESSION_MS = 2_000
CONFIG = {"group.consumer.heartbeat.interval.ms": 300, "offsets.topic.num.partitions": 4}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    config = {**PATIENT, **CONFIG, "group.consumer.session.timeout.ms": 60_000}
    with Cluster(nodes=3, config=config) as cluster:
        yield cluster


class Scene:
    """A topic of four partitions, and a group of its own."""

    def __init__(self, cluster: Cluster, replicas: int = 3) -> None:
        self.cluster = cluster
        self._replicas = replicas
        self.topic = f"t-{uuid.uuid4().hex[:8]}"
        self.group = f"g-{uuid.uuid4().hex[:8]}"
        self.sent = 0
        self.create(self.topic, 4)

    def create(self, topic: str, partitions: int) -> None:
        with Admin(self.cluster.bootstrap) as admin:
            admin.create_topic(topic, partitions=partitions, replication_factor=self._replicas)
        heard_everywhere(self.cluster)

    def part(self, number: int) -> TopicPartition:
        return TopicPartition(self.topic, number)

    def send(self, count: int, topic: str | None = None) -> None:
        with Producer(self.cluster.bootstrap) as producer:
            for _ in range(count):
                producer.send(topic or self.topic, b"%d" % self.sent, partition=self.sent % 4)
                self.sent += 1
            producer.flush(WAIT_S)

    def consumer(self, group: str | None = None, **options: Any) -> Consumer:
        return Consumer(self.cluster.bootstrap, group or self.group, **{"auto_offset_reset": "earliest", **options})


@pytest.fixture
def scene(cluster: Cluster) -> Scene:
    return Scene(cluster)


class Told(RebalanceListener):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        self.events.append(("assigned", len(partitions)))

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        self.events.append(("revoked", len(partitions)))

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        self.events.append(("lost", len(partitions)))


def until(done: Callable[[list[Record]], object], *consumers: Consumer, within_s: float = WAIT_S) -> list[Record]:
    """Poll until the condition holds; return the records."""
    deadline = time.monotonic() + within_s
    found: list[Record] = []
    while not done(found):
        assert time.monotonic() < deadline, (
            f"the condition does not hold after {within_s:g} s; {len(found)} records were read"
        )
        for consumer in consumers:
            found += consumer.poll(0.05)
    return found


def numbers(records: list[Record]) -> list[int]:
    return sorted(int(record.value or b"") for record in records)


def test_two_groups_get_everything_and_one_group_shares_it(scene: Scene) -> None:
    with scene.consumer() as one, scene.consumer() as two, scene.consumer(f"{scene.group}-b") as alone:
        one.subscribe(scene.topic)
        two.subscribe(scene.topic)
        alone.subscribe(scene.topic)
        until(lambda _: len(one.assignment()) == len(two.assignment()) == 2, one, two)
        scene.send(40)
        shared = until(lambda found: len(found) >= 40, one, two)
        assert numbers(shared) == list(range(40))
        assert numbers(until(lambda found: len(found) >= 40, alone)) == list(range(40))
        assert alone.poll(0.2) == []


def test_a_group_goes_on_where_it_was(scene: Scene) -> None:
    scene.send(20)
    with scene.consumer() as consumer:
        consumer.subscribe(scene.topic)
        read = until(lambda found: len(found) >= 10, consumer)
    with scene.consumer() as consumer:
        consumer.subscribe(scene.topic)
        read += until(lambda found: len(found) + len(read) >= 20, consumer)
        assert numbers(read) == list(range(20)), (
            "close must commit what poll has returned, so that the next member reads each record once"
        )
        assert consumer.poll(0.3) == []


def test_commits_by_hand(scene: Scene) -> None:
    scene.send(8)
    with scene.consumer(enable_auto_commit=False) as consumer:
        consumer.subscribe(scene.topic)
        read = until(lambda found: len(found) == 8, consumer)
        zero, one = scene.part(0), scene.part(1)
        assert consumer.committed(zero) == {zero: None}
        consumer.commit(next(record for record in read if record.partition == 0))
        assert consumer.committed(zero) == {zero: OffsetAndMetadata(1)}
        over: list[RaftlogError | None] = []
        for offset in range(3):
            consumer.commit_async({one: offset}, lambda _, error: over.append(error))
        consumer.commit({one: OffsetAndMetadata(2, "note")})
        until(lambda _: len(over) == 3, consumer)
        assert over == [None] * 3
        assert consumer.committed(one) == {one: OffsetAndMetadata(2, "note")}
        consumer.commit()
        assert {each.offset for each in consumer.committed().values() if each is not None} == {2}
        with pytest.raises(OffsetMetadataTooLarge):
            consumer.commit({one: OffsetAndMetadata(2, "x" * 5000)})
        with pytest.raises(PartitionNotOwned):
            consumer.commit({scene.part(4): 1})


def test_only_partitions_that_move_pause(scene: Scene) -> None:
    told, other = Told(), Told()
    with scene.consumer() as one, scene.consumer() as two:
        one.subscribe(scene.topic, listener=told)
        assert told.events == [("assigned", 4)]
        two.subscribe(scene.topic, listener=other)
        until(lambda _: len(one.assignment()) == len(two.assignment()) == 2 and other.events, one, two)
        assert told.events == [("assigned", 4), ("revoked", 2)]
        assert other.events == [("assigned", 2)]
        assert one.group_note() == two.group_note() == ""


def test_more_members_than_partitions_say_so(scene: Scene) -> None:
    scene.create(f"{scene.topic}-one", 1)
    with scene.consumer() as one, scene.consumer() as two:
        one.subscribe(f"{scene.topic}-one")
        two.subscribe(f"{scene.topic}-one")
        until(
            lambda _: (
                "more members than partitions" in one.group_note() + two.group_note()
                and len(one.assignment()) + len(two.assignment()) == 1
            ),
            one,
            two,
        )


def test_a_topic_that_does_not_exist_is_waited_for(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    late = f"{scene.topic}-late"
    with scene.consumer(auto_offset_reset="latest") as consumer:
        consumer.subscribe(late)
        until(lambda _: late in consumer.group_note() and late in caplog.text, consumer)
        scene.create(late, 4)
        scene.send(4, late)
        assert len(until(lambda found: len(found) == 4, consumer)) == 4, (
            "a topic that is created later must be read from its start"
        )
        assert consumer.group_note() == ""


def test_patterns_and_partitions_that_come_later_at_latest(scene: Scene) -> None:
    scene.send(4)
    with scene.consumer(auto_offset_reset="latest", metadata_max_age_ms=200) as consumer:
        consumer.subscribe(pattern=f"{scene.topic}.*")
        scene.send(4)
        assert numbers(until(lambda found: len(found) == 4, consumer)) == [4, 5, 6, 7]
        with Admin(scene.cluster.bootstrap) as admin:
            admin.create_partitions(scene.topic, 5)
        with Producer(scene.cluster.bootstrap) as producer:
            producer.send(scene.topic, b"100", partition=4).result(WAIT_S)
        assert numbers(until(lambda found: found, consumer)) == [100]
        scene.create(f"{scene.topic}-more", 4)
        scene.send(4, f"{scene.topic}-more")
        assert len(until(lambda found: len(found) == 4, consumer)) == 4


def test_an_unread_latest_is_kept_over_a_crash(scene: Scene) -> None:
    scene.send(4)
    with scene.consumer(auto_offset_reset="latest", enable_auto_commit=False) as consumer:
        consumer.subscribe(scene.topic)
        until(lambda _: len(consumer.assignment()) == 4, consumer)
        parts = consumer.assignment()
        until(lambda _: all(consumer.committed(*parts).values()), consumer)
    scene.send(4)
    with scene.consumer(auto_offset_reset="latest") as consumer:
        consumer.subscribe(scene.topic)
        assert numbers(until(lambda found: len(found) >= 4, consumer)) == [4, 5, 6, 7]


def test_a_static_member_comes_back_without_a_rebalance(scene: Scene) -> None:
    told = Told()
    with scene.consumer(group_instance_id="b") as other:
        with scene.consumer(group_instance_id="a") as static:
            static.subscribe(scene.topic)
            other.subscribe(scene.topic, listener=told)
            until(lambda _: len(static.assignment()) == len(other.assignment()) == 2, static, other)
            before = static.assignment()
        events = list(told.events)
        with scene.consumer(group_instance_id="a") as static:
            static.subscribe(scene.topic)
            until(lambda _: static.assignment() == before, static)
            other.poll(0.3)
            assert told.events == events
    with pytest.raises(UnsupportedAssignor), scene.consumer(group_remote_assignor="nobodys") as consumer:
        consumer.subscribe(scene.topic)


def test_a_static_member_that_another_process_replaces(scene: Scene) -> None:
    with scene.consumer(group_instance_id="a", default_api_timeout_ms=500) as second:
        with scene.consumer(group_instance_id="a") as first:
            first.subscribe(scene.topic)
            with pytest.raises(RaftlogError):
                second.subscribe(scene.topic)
        with scene.consumer(group_instance_id="a") as third:
            try:
                until(lambda _: len(second.assignment()) == 4, second)
            except FencedInstanceId:
                third.subscribe(scene.topic)


MEMBER = """
    import sys
    from raftlog import Consumer
    consumer = Consumer(sys.argv[1], sys.argv[2], "earliest")
    consumer.subscribe(sys.argv[3])
    while True:
        consumer.poll(0.1)
        print(len(consumer.assignment()), flush=True)
"""


def test_a_killed_member_is_replaced_within_the_session_timeout() -> None:
    config = {**STEADY, **CONFIG, "group.consumer.session.timeout.ms": SESSION_MS}
    promised_s = SESSION_MS / 1000 + 1.5
    with Cluster(nodes=1, config=config) as cluster:
        kinds: set[str] = set()

        def attempt() -> float:
            kinds.clear()
            told, took_s = replace_killed(Scene(cluster, replicas=1))
            kinds.update(told)
            return took_s if told == {"assigned"} else math.inf

        assert quickest_s(attempt, promised_s, tries=5) < promised_s, kinds
    assert kinds == {"assigned"}, "members must only be assigned partitions, and keep those that they have"


def replace_killed(scene: Scene) -> tuple[set[str], float]:
    """Kill one of two members; return the calls of the other's listener, and the time until it had all partitions."""
    arguments = [sys.executable, "-c", textwrap.dedent(MEMBER), scene.cluster.bootstrap, scene.group, scene.topic]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    told = Told()
    try:
        with scene.consumer() as consumer:
            assert process.stdout is not None
            process.stdout.readline()
            consumer.subscribe(scene.topic, listener=told)
            until(lambda _: len(consumer.assignment()) == 2, consumer)
            os.kill(process.pid, signal.SIGKILL)
            began = time.monotonic()
            until(lambda _: len(consumer.assignment()) == 4, consumer)
            return {kind for kind, _ in told.events}, time.monotonic() - began
    finally:
        process.kill()
        process.wait()


def test_a_coordinator_dies_and_members_go_on(scene: Scene) -> None:
    told = Told()
    with scene.consumer(enable_auto_commit=False) as consumer:
        consumer.subscribe(scene.topic, listener=told)
        scene.send(8)
        read = until(lambda found: len(found) == 8, consumer)
        consumer.commit({scene.part(0): 1})
        member_id = consumer.group_metadata().member_id
        with Admin(scene.cluster.bootstrap) as admin:
            coordinator = admin.describe_group(scene.group).coordinator_id
        scene.cluster.kill(coordinator)
        try:
            consumer.commit()
            assert consumer.committed(scene.part(0)) == {
                scene.part(0): consumer.committed(scene.part(0))[scene.part(0)]
            }
            scene.send(8)
            read += until(lambda found: len(found) == 8, consumer)
            assert numbers(read) == list(range(16))
            consumer.commit()
        finally:
            scene.cluster.start(coordinator)
        assert told.events == [("assigned", 4)], "no partition may be lost or revoked while the coordinator is away"
        assert consumer.group_metadata().member_id == member_id
    with scene.consumer() as consumer:
        consumer.subscribe(scene.topic)
        until(lambda _: len(consumer.assignment()) == 4, consumer)
        assert [consumer.position(part) for part in consumer.assignment()] == [4] * 4


def test_asynchronously(scene: Scene) -> None:
    scene.send(8)

    async def main() -> list[int]:
        found: list[Record] = []
        async with aio.Consumer(scene.cluster.bootstrap, scene.group, "earliest", consumer_timeout_ms=500) as consumer:
            await consumer.subscribe(scene.topic)
            while len(found) < 8:  # each time it ends when nothing has come for a while
                async for record in consumer:
                    found.append(record)
                    if len(found) == 8:
                        await consumer.commit(record)
            await consumer.commit()
            assert {each.offset for each in (await consumer.committed()).values() if each is not None} == {2}
        return numbers(found)

    assert asyncio.run(main()) == list(range(8))


def test_offsets_outlive_all_servers(scene: Scene) -> None:
    cluster = scene.cluster
    with scene.consumer() as consumer:
        consumer.commit({scene.part(2): 11})
    for node in cluster.node_ids:
        cluster.kill(node)
    cluster.start_all()
    with scene.consumer() as consumer:
        assert consumer.committed(scene.part(2))[scene.part(2)] == (11, "", -1)


def test_offsets_of_a_deleted_topic_go_with_it(scene: Scene) -> None:
    passing = TopicPartition(f"passing-{scene.topic}", 0)
    scene.create(passing.topic, 1)
    with scene.consumer() as consumer, Admin(scene.cluster.bootstrap) as admin:
        consumer.commit({passing: 1, scene.part(3): 2})
        admin.delete_topic(passing.topic)
        deadline = time.monotonic() + WAIT_S
        while admin.group_offsets(scene.group).keys() != {scene.part(3)}:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_clients_read_internal_topics_and_do_not_change_them(scene: Scene) -> None:
    bootstrap, offsets = scene.cluster.bootstrap, "__consumer_offsets"
    with scene.consumer() as consumer, Admin(bootstrap) as admin:
        consumer.commit({scene.part(0): 1})
        with pytest.raises(InvalidTopic, match="not deleted"):
            admin.delete_topic(offsets)
        with pytest.raises(InvalidTopic, match="number of partitions"):
            admin.create_partitions(offsets, 60)
    with Producer(bootstrap) as producer, pytest.raises(InvalidTopic, match="not written to"):
        producer.send(offsets, b"v").result(WAIT_S)
    with Consumer(bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(offsets, number) for number in range(4)])
        until(bool, consumer)
