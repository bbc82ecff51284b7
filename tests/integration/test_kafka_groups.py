"""Consumer groups of Kafka's clients, unmodified, on a cluster of three: librdkafka, kafka-python and aiokafka.

One cluster serves all tests; each has a topic and a group of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import aiokafka
import confluent_kafka
import confluent_kafka.admin
import kafka
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

import raftlog
from broker.coordinator.shards import partition_for
from raftlog.errors import GroupIdNotFound
from raftlog.testing import Cluster
from tests.support.up_to_date import heard_everywhere

PARTITIONS = 6
TIMEOUT_S = 120.0
ADMIN: Any = confluent_kafka
QUIET: dict[str, Any] = {"log_level": 0}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    config = {
        "group.initial.rebalance.delay.ms": 100,
        "group.min.session.timeout.ms": 1_000,
        "group.consumer.heartbeat.interval.ms": 500,
        "group.consumer.session.timeout.ms": 60_000,
    }
    with Cluster(3, kafka=True, config=config) as started:
        yield started


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic with sixty records; it is the name of the test's group, too."""
    name = f"groups-{next(_numbers)}"
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=PARTITIONS, replication_factor=3)
    heard_everywhere(cluster)
    produce(cluster, name, range(60))
    return name


def produce(cluster: Cluster, topic: str, numbers: Sequence[int]) -> None:
    failed: list[Any] = []
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": cluster.kafka_bootstrap, "enable.idempotence": True, **QUIET}
    )
    for number in numbers:
        producer.produce(
            topic, b"%d" % number, partition=number % PARTITIONS, on_delivery=lambda error, _: failed.append(error)
        )
    assert producer.flush(TIMEOUT_S) == 0
    assert failed == [None] * len(numbers)


class Member:
    """A consumer of librdkafka, with what it has read. `timeouts`: those of a member of a classic group."""

    timeouts: Mapping[str, int] = {"session.timeout.ms": 60_000, "heartbeat.interval.ms": 500}

    def __init__(self, cluster: Cluster, topic: str, **settings: Any) -> None:
        self.read: list[int] = []
        self.consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": cluster.kafka_bootstrap,
                "group.id": topic,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                **QUIET,
                **self.timeouts,
                **settings,
            }
        )
        self.consumer.subscribe([topic])

    @property
    def partitions(self) -> list[int]:
        return sorted(each.partition for each in self.consumer.assignment())

    def poll(self) -> None:
        message = self.consumer.poll(0.05)
        if message is not None and message.error() is None:
            self.read.append(int(message.value() or b"-1"))


COORDINATED: dict[str, Any] = {"group.protocol": "consumer"}


class CoordinatedMember(Member):
    """A consumer of librdkafka that lets the coordinator assign."""

    timeouts: Mapping[str, int] = {}


def poll_until(members: Sequence[Member], is_so: Callable[[], bool]) -> None:
    """Let members poll, as applications do, until something is so."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s, [(each.partitions, sorted(each.read)) for each in members]
        for member in members:
            member.poll()


def read_by(members: Sequence[Member]) -> set[int]:
    return {number for member in members for number in member.read}


def commit(members: Sequence[Member]) -> None:
    """Commit what members have read; again where the group is between two coordinators, or two generations."""
    for member in members:
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                member.consumer.commit(asynchronous=False)
                break
            except KafkaException as error:
                if error.args[0].code() == ADMIN.KafkaError._NO_OFFSET:
                    break  # it has read nothing since it got its partitions
                if time.monotonic() > deadline_s:
                    raise
                member.poll()


def committed(cluster: Cluster, group: str) -> dict[int, int]:
    """Return the offsets that a group has committed, by partition."""
    with raftlog.Admin(cluster.bootstrap) as admin:
        return {at.partition: each.offset for at, each in admin.group_offsets(group).items()}


def commit_up_to(cluster: Cluster, members: Sequence[Member], group: str, offset: int) -> None:
    """Let members read and commit until the group has this offset everywhere."""

    def is_done() -> bool:
        commit(members)
        return committed(cluster, group) == dict.fromkeys(range(PARTITIONS), offset)

    poll_until(members, is_done)


@pytest.fixture
def members() -> Iterator[list[Member]]:
    """Members to be closed at the end."""
    started: list[Member] = []
    yield started
    for member in started:
        member.consumer.close()


def shared(members: Sequence[Member]) -> bool:
    """Whether the members have all partitions, each as many as the others."""
    return sorted(number for each in members for number in each.partitions) == [*range(PARTITIONS)] and {
        len(each.partitions) for each in members
    } == {PARTITIONS // len(members)}


@pytest.mark.parametrize(
    "strategy", ["range", pytest.param("roundrobin", marks=pytest.mark.long), "cooperative-sticky"]
)
def test_members_of_librdkafka_share_the_partitions(
    cluster: Cluster, topic: str, members: list[Member], strategy: str
) -> None:
    members.append(Member(cluster, topic, **{"partition.assignment.strategy": strategy}))
    commit_up_to(cluster, members, topic, 10)
    assert read_by(members) == {*range(60)}
    members.append(Member(cluster, topic, **{"partition.assignment.strategy": strategy}))
    poll_until(members, lambda: shared(members))
    produce(cluster, topic, range(60, 120))
    poll_until(members, lambda: read_by(members) == {*range(120)})
    assert not [number for number in members[1].read if number < 60], (
        "the new member must not read records that were committed before it came"
    )
    members.pop().consumer.close()
    poll_until(members, lambda: members[0].partitions == [*range(PARTITIONS)])


def test_a_member_that_dies_is_replaced_after_its_session(cluster: Cluster, topic: str, members: list[Member]) -> None:
    """One that does not poll is removed; the other reads its records again from the last commit."""
    short = {"session.timeout.ms": 3_000, "max.poll.interval.ms": 3_000}
    members += [Member(cluster, topic, **short), Member(cluster, topic, **short)]
    poll_until(members, lambda: shared(members) and read_by(members) == {*range(60)})
    alive = members[:1]
    poll_until(alive, lambda: alive[0].partitions == [*range(PARTITIONS)] and set(alive[0].read) == {*range(60)})


def test_a_static_member_restarts_without_a_rebalance(cluster: Cluster, topic: str, members: list[Member]) -> None:
    members += [Member(cluster, topic, **{"group.instance.id": name}) for name in ("a", "b")]
    poll_until(members, lambda: shared(members))
    with raftlog.Admin(cluster.bootstrap) as admin:
        before = admin.describe_group(topic)
        had = members[1].partitions
        members.pop().consumer.close()
        again = Member(cluster, topic, **{"group.instance.id": "b"})
        members.append(again)
        poll_until(members, lambda: bool(again.partitions))
        after = admin.describe_group(topic)
    assert again.partitions == had
    assert after.group_epoch == before.group_epoch
    assert {each.member_id for each in after.members} != {each.member_id for each in before.members}


def test_a_second_static_member_of_the_same_name_fences_the_first(
    cluster: Cluster, topic: str, members: list[Member]
) -> None:
    first = Member(cluster, topic, **{"group.instance.id": "a"})
    members.append(first)
    poll_until(members, lambda: shared(members))
    members.append(Member(cluster, topic, **{"group.instance.id": "a"}))
    deadline_s = time.monotonic() + TIMEOUT_S
    fenced = None
    while fenced is None and time.monotonic() < deadline_s:
        members[1].poll()
        message = first.consumer.poll(0.05)
        if message is not None and (error := message.error()) is not None:
            fenced = error.code()
    assert fenced in (ADMIN.KafkaError._FATAL, ADMIN.KafkaError.FENCED_INSTANCE_ID)


def test_a_group_goes_on_where_it_has_committed(cluster: Cluster, topic: str) -> None:
    first = Member(cluster, topic)
    commit_up_to(cluster, [first], topic, 10)
    first.consumer.close()
    produce(cluster, topic, range(60, 90))
    second = Member(cluster, topic)
    poll_until([second], lambda: len(second.read) >= 30)
    second.consumer.close()
    assert {*second.read} == {*range(60, 90)}


def test_records_are_read_while_the_coordinator_is_killed(cluster: Cluster, topic: str, members: list[Member]) -> None:
    """Of a classic group, and of one in which the coordinator assigns, which has the name that has the same one."""
    groups = {topic: [Member(cluster, topic) for _ in range(2)]}
    coordinated = _name_with_the_coordinator_of(cluster, topic)
    groups[coordinated] = [
        CoordinatedMember(cluster, topic, **COORDINATED, **{"group.id": coordinated}) for _ in range(2)
    ]
    members += itertools.chain.from_iterable(groups.values())
    for group, of_group in groups.items():
        poll_until(members, lambda of_group=of_group: shared(of_group))  # type: ignore[misc] # of this round
        commit_up_to(cluster, of_group, group, 10)
        assert read_by(of_group) == {*range(60)}
    for member in members:
        member.read.clear()
    with raftlog.Admin(cluster.bootstrap) as admin:
        coordinators = {admin.describe_group(group).coordinator_id for group in groups}
    for coordinator in coordinators:
        cluster.kill(coordinator)
    try:
        produce(cluster, topic, range(60, 120))
        for group, of_group in groups.items():
            commit_up_to(cluster, of_group, group, 20)
    finally:
        for coordinator in coordinators:
            cluster.start(coordinator)
    for of_group in groups.values():
        assert read_by(of_group) == {*range(60, 120)}, (
            "after the commits each record must be read, and none that was committed read again"
        )


def _name_with_the_coordinator_of(cluster: Cluster, group: str) -> str:
    """Return the name of another group whose offsets are in the same partition, so that one broker coordinates both."""
    with raftlog.Admin(cluster.bootstrap) as admin:
        partitions = len(admin.describe_topic("__consumer_offsets").partitions)
    wanted = partition_for(group, partitions)
    return next(
        name for number in itertools.count() if partition_for(name := f"{group}-{number}", partitions) == wanted
    )


def test_kafka_python_subscribes(cluster: Cluster, topic: str) -> None:
    servers = cluster.kafka_bootstrap.split(",")
    consumer = kafka.KafkaConsumer(
        topic, bootstrap_servers=servers, group_id=topic, auto_offset_reset="earliest", consumer_timeout_ms=60_000
    )
    try:
        assert sorted(int(next(consumer).value) for _ in range(60)) == [*range(60)]
        consumer.commit()
    finally:
        consumer.close()
    assert committed(cluster, topic) == dict.fromkeys(range(PARTITIONS), 10)


def test_aiokafka_subscribes(cluster: Cluster, topic: str) -> None:
    async def run() -> list[int]:
        consumers = [
            aiokafka.AIOKafkaConsumer(
                topic,
                bootstrap_servers=cluster.kafka_bootstrap,
                group_id=topic,
                auto_offset_reset="earliest",
                heartbeat_interval_ms=300,
            )
            for _ in range(2)
        ]
        for consumer in consumers:
            await consumer.start()
        found: set[int] = set()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while len(found) < 60 or any(len(each.assignment()) != PARTITIONS // 2 for each in consumers):
                    for consumer in consumers:
                        for records in (await consumer.getmany(timeout_ms=50)).values():
                            found |= {int(each.value) for each in records}
        finally:
            for consumer in consumers:
                await consumer.stop()
        return sorted(found)

    assert asyncio.run(run()) == [*range(60)]


def test_tools_see_groups_of_both_types(cluster: Cluster, topic: str, members: list[Member]) -> None:
    members.append(Member(cluster, topic))
    commit_up_to(cluster, members, topic, 10)
    admin = AdminClient({"bootstrap.servers": cluster.kafka_bootstrap, **QUIET})
    described = admin.describe_consumer_groups([topic], include_authorized_operations=True)[topic].result(TIMEOUT_S)
    assert described.state.name == "STABLE"
    assert {each.name for each in described.authorized_operations} >= {"READ", "DESCRIBE", "DELETE"}
    assert described.partition_assignor == "range"
    (member,) = described.members
    assert member.client_id == "rdkafka"
    assert sorted(each.partition for each in member.assignment.topic_partitions) == [*range(PARTITIONS)]
    listed = admin.list_consumer_groups().result(TIMEOUT_S)
    assert {each.group_id: each.state.name for each in listed.valid}[topic] == "STABLE"
    with pytest.raises(KafkaException, match="NON_EMPTY_GROUP"):
        admin.delete_consumer_groups([topic])[topic].result(TIMEOUT_S)
    members.pop().consumer.close()
    admin.delete_consumer_groups([topic])[topic].result(TIMEOUT_S)
    with raftlog.Admin(cluster.bootstrap) as ours:
        assert topic not in {each.group_id for each in ours.list_groups()}


def test_an_empty_group_may_change_its_type_and_keeps_its_offsets(cluster: Cluster, topic: str) -> None:
    first = Member(cluster, topic)
    commit_up_to(cluster, [first], topic, 10)
    first.consumer.close()
    produce(cluster, topic, range(60, 66))
    found: list[int] = []
    with raftlog.Consumer(cluster.bootstrap, group_id=topic, auto_offset_reset="earliest") as consumer:
        consumer.subscribe([topic])
        while len(found) < 6:
            found += [int(bytes(each.value or b"")) for each in consumer.poll(timeout=TIMEOUT_S)]
        consumer.commit()
    assert sorted(found) == [*range(60, 66)]
    produce(cluster, topic, range(66, 72))
    last = Member(cluster, topic)
    poll_until([last], lambda: len(last.read) >= 6)
    last.consumer.close()
    assert {*last.read} == {*range(66, 72)}


# Groups in which the coordinator assigns (KIP-848)


@pytest.mark.parametrize("assignor", ["uniform", pytest.param("range", marks=pytest.mark.long)])
def test_the_coordinator_assigns_to_librdkafka(
    cluster: Cluster, topic: str, members: list[Member], assignor: str
) -> None:
    settings = {**COORDINATED, "group.remote.assignor": assignor}
    members.append(CoordinatedMember(cluster, topic, **settings))
    commit_up_to(cluster, members, topic, 10)
    members.append(CoordinatedMember(cluster, topic, **settings))
    poll_until(members, lambda: shared(members))
    produce(cluster, topic, range(60, 120))
    poll_until(members, lambda: read_by(members) == {*range(120)})
    assert not [number for number in members[1].read if number < 60], (
        "the new member must not read records that were committed before it came"
    )
    admin = AdminClient({"bootstrap.servers": cluster.kafka_bootstrap, **QUIET})
    described = admin.describe_consumer_groups([topic])[topic].result(TIMEOUT_S)
    assert described.partition_assignor == assignor
    assert described.type.name == "CONSUMER"
    shown = [[part.partition for part in each.assignment.topic_partitions] for each in described.members]
    assert sorted(map(sorted, shown)) == sorted(each.partitions for each in members)
    members.pop().consumer.close()
    poll_until(members, lambda: members[0].partitions == [*range(PARTITIONS)])


def test_a_regular_expression_is_matched_by_the_broker(cluster: Cluster, topic: str, members: list[Member]) -> None:
    member = CoordinatedMember(cluster, f"^{topic}(-.*)?", **COORDINATED, **{"group.id": topic})
    members.append(member)
    commit_up_to(cluster, members, topic, 10)
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(f"{topic}-more", partitions=1, replication_factor=3)
    heard_everywhere(cluster)
    poll_until(members, lambda: len(member.consumer.assignment()) == PARTITIONS + 1)


def test_members_of_both_kinds_of_clients_share_a_group(cluster: Cluster, topic: str, members: list[Member]) -> None:
    members.append(CoordinatedMember(cluster, topic, **COORDINATED))
    with raftlog.Consumer(cluster.bootstrap, group_id=topic, auto_offset_reset="earliest") as ours:
        ours.subscribe([topic])

        def is_shared() -> bool:
            ours.poll(timeout=0.05)
            theirs = members[0].partitions
            mine = [each.partition for each in ours.assignment()]
            return len(mine) == len(theirs) == PARTITIONS // 2 and {*mine, *theirs} == {*range(PARTITIONS)}

        poll_until(members, is_shared)
    poll_until(members, lambda: members[0].partitions == [*range(PARTITIONS)])


class SlowMember(CoordinatedMember):
    """A member whose application has to take partitions in a callback, so it takes none before it polls."""

    def __init__(self, cluster: Cluster, topic: str, **settings: Any) -> None:
        super().__init__(cluster, topic, **settings)
        self.taken: set[int] = set()
        self.consumer.unsubscribe()
        self.consumer.subscribe([topic], on_assign=self._take)

    def _take(self, consumer: Any, partitions: Sequence[Any]) -> None:
        self.taken |= {each.partition for each in partitions}


def test_what_a_member_is_about_to_read_goes_to_no_other(cluster: Cluster, topic: str, members: list[Member]) -> None:
    """It was told of partitions, and its application has not polled yet; its heartbeats go on meanwhile."""
    slow = SlowMember(cluster, topic, **COORDINATED)
    members.append(slow)

    def assigned() -> list[int]:
        with raftlog.Admin(cluster.bootstrap) as admin:
            try:
                described = admin.describe_group(topic)
            except GroupIdNotFound:
                return []
        return sorted(each.partition for member in described.members for each in member.assigned)

    poll_until([], lambda: assigned() == [*range(PARTITIONS)])
    other = CoordinatedMember(cluster, topic, **COORDINATED)
    members.append(other)
    until_s = time.monotonic() + 5.0
    poll_until([other], lambda: time.monotonic() > until_s)
    there = set(other.partitions)
    poll_until([slow], lambda: bool(slow.taken))
    assert not slow.taken & there, "no partition may have two readers"
    poll_until(members, lambda: shared(members))


class Mover(CoordinatedMember):
    """A member of either protocol that commits whatever it gives up, before it does."""

    def __init__(self, cluster: Cluster, topic: str, **settings: Any) -> None:
        super().__init__(cluster, topic, **settings)
        self.consumer.unsubscribe()
        self.consumer.subscribe([topic], on_revoke=self._give_up)

    def _give_up(self, consumer: Any, partitions: Sequence[Any]) -> None:
        positions = [each for each in consumer.position(partitions) if each.offset >= 0]
        if positions:
            consumer.commit(offsets=positions, asynchronous=False)

    def poll(self) -> None:
        message = self.consumer.poll(0.05)
        if message is not None and message.error() is None:
            self.read.append(int(message.value() or b"-1"))

    def close(self) -> None:
        self._give_up(self.consumer, self.consumer.assignment())
        self.consumer.close()


@pytest.mark.parametrize("strategy", [pytest.param("range", marks=pytest.mark.long), "cooperative-sticky"])
def test_a_live_group_moves_to_the_protocol_of_the_coordinator_and_back(
    cluster: Cluster, topic: str, members: list[Member], strategy: str
) -> None:
    """While its members read and commit: no record is lost, and none is given to two of them."""
    classic = {**Member.timeouts, "partition.assignment.strategy": strategy}
    gone: list[Member] = []
    told = 60

    def joins(settings: Mapping[str, Any], kind: str) -> None:
        members.append(Mover(cluster, topic, **settings))
        go_on(kind)

    def leaves(number: int, kind: str) -> None:
        member = members.pop(number)
        assert isinstance(member, Mover)
        member.close()
        gone.append(member)
        go_on(kind)

    def go_on(kind: str) -> None:
        nonlocal told
        produce(cluster, topic, range(told, told + 60))
        told += 60
        poll_until(members, lambda: shared(members) and read_by([*members, *gone]) == {*range(told)})
        with raftlog.Admin(cluster.bootstrap) as admin:
            assert admin.describe_group(topic).type == kind

    joins(classic, "classic")
    joins(classic, "classic")
    joins(COORDINATED, "consumer")
    leaves(0, "consumer")
    joins(COORDINATED, "consumer")
    leaves(0, "consumer")  # the last classic one
    joins(classic, "consumer")
    leaves(0, "consumer")
    leaves(0, "classic")  # the last one of the other protocol
    everything = sorted(number for member in (*members, *gone) for number in member.read)
    assert everything == [*range(told)], "the members together must read each record exactly once"


def test_raftlogs_tools_show_and_reset_a_classic_group(cluster: Cluster, topic: str) -> None:
    member = Member(cluster, topic)
    commit_up_to(cluster, [member], topic, 10)
    with raftlog.Admin(cluster.bootstrap) as admin:
        assert {each.group_id: each.type for each in admin.list_groups()}[topic] == "classic"
        described = admin.describe_group(topic)
        assert (described.type, described.state, described.assignor) == ("classic", "stable", "range")
        (shown,) = described.members
        assert [part.partition for part in shown.assigned] == [*range(PARTITIONS)]
        assert shown.topics == [topic]
        lags = admin.group_lag(topic)
        assert {(each.offset, each.lag, each.member_id) for each in lags.values()} == {(10, 0, shown.member_id)}
        beginning = {raftlog.TopicPartition(topic, number): 0 for number in range(PARTITIONS)}
        with pytest.raises(raftlog.RaftlogError, match="members"):
            admin.alter_group_offsets(topic, beginning)
        member.consumer.close()
        admin.alter_group_offsets(topic, beginning)
    again = Member(cluster, topic)
    poll_until([again], lambda: {*again.read} == {*range(60)})
    again.consumer.close()


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat judges nothing here: install Debian's package kcat")
def test_kcat_lists_writes_reads_and_joins_a_group(cluster: Cluster, topic: str) -> None:
    """As its manual has them, which knows of Kafka only."""

    def kcat(*arguments: str, sent: str = "") -> str:
        command = ["kcat", "-b", cluster.kafka_bootstrap, *arguments]
        done = subprocess.run(command, input=sent, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = kcat("-L", "-t", topic)
    assert " 3 brokers:" in listed
    assert f'topic "{topic}" with {PARTITIONS} partitions:' in listed
    kcat("-P", "-t", topic, "-p", "0", "-K:", "-z", "zstd", "-H", "trace=1", sent="key:60\nkey:61\n")
    kcat("-P", "-t", topic, "-p", "0", "-X", f"transactional.id={topic}", sent="62\n")
    assert kcat("-C", "-q", "-t", topic, "-p", "0", "-o", "10", "-e", "-f", "%o %k %s %h\n").splitlines() == [
        "10 key 60 trace=1",
        "11 key 61 trace=1",
        "12  62 ",
    ]
    assert sorted(map(int, kcat("-C", "-q", "-t", topic, "-o", "beginning", "-e").split())) == [*range(63)]
    assert kcat("-Q", "-t", f"{topic}:0:-2", "-t", f"{topic}:1:-1").splitlines() == [
        f"{topic} [0] offset 0",
        f"{topic} [1] offset 10",
    ]
    settings = "-X", "auto.offset.reset=earliest", "-X", "heartbeat.interval.ms=500"
    read = kcat("-q", "-G", topic, *settings, "-c", "63", topic)
    assert sorted(map(int, read.split())) == [*range(63)]
    offsets = committed(cluster, topic)
    assert offsets.pop(0) in (13, 14), (
        "the committed offset must be 13 or 14, before or behind the marker of the transaction"
    )
    assert offsets == dict.fromkeys(range(1, PARTITIONS), 10)
