"""The admin service: topics, configs, log directories, the cluster, leaders, replicas and their moves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from broker.config.config import BROKER_CONFIGS, BrokerConfig
from broker.net.services import metadata
from broker.net.services.admin import LogIdentity
from broker.net.services.metadata import MAX_NAMED
from broker.net.services.node import LogView, describe_broker, describe_topic, describe_topics
from broker.security.caller import Caller, caller
from raftlog._core.security.acls import CLUSTER_NAME
from raftlog.errors import NotController, NotLeader
from raftlog.v1 import admin_pb2, common_pb2
from raftlog.v1.admin_pb2 import ConfigEntry
from raftlog.v1.records_pb2 import ConfigResource, MetadataCommand, QuotaEntity, QuotaRecord, ReplicaAssignment
from raftlog.v1.security_pb2 import Acl
from raftmeta.decide import CommandResult
from raftmeta.features import METADATA_VERSION, QUOTAS_LEVEL, SUPPORTED
from raftmeta.image import MetadataImage
from raftmeta.topic_configs import DYNAMIC_BROKER_CONFIGS, TOPIC_CONFIGS
from replication.leader import ReplicaView
from tests.support import memory_metadata
from tests.support.admin_service import BROKER, TOPIC, Cluster, Description, FakeLog, FakeLogs, run
from tests.support.fake_authorizer import FakeAuthorizer, Permission
from tests.support.metadata import claim, create_topic, delete_topic, image_after, register, update_feature
from tests.support.turns import counted_turns

# Topics


def test_a_topic_is_created_with_the_brokers_defaults_or_as_asked() -> None:
    async def work(cluster: Cluster) -> None:
        response = await cluster.create("a")
        assert not response.HasField("error")
        assert len(cluster.image.topics[response.topic_id].partitions) == 3
        response = await cluster.create("b", partitions=5, replication_factor=1, configs={"retention.ms": "1s"})
        assert len(cluster.image.topics[response.topic_id].partitions) == 5
        assert cluster.image.topic_configs("b") == {"retention.ms": "1000"}

    run(work, {"num.partitions": 3})


def test_a_creation_is_answered_only_once_this_broker_has_applied_it() -> None:
    async def work(cluster: Cluster) -> None:
        cluster.applied.clear()
        creation = asyncio.ensure_future(cluster.create("a"))
        committed = asyncio.Event()
        cluster.metadata.subscribe(lambda image, records: committed.set())
        await committed.wait()
        await cluster.describe(TOPIC, "a")  # a whole round trip: an answer that left too early would be here too
        assert not creation.done()
        cluster.applied.set()
        assert not (await creation).HasField("error")
        assert cluster.waited_for == [cluster.image.offset]

    run(work)


def test_validate_only_creates_nothing() -> None:
    async def work(cluster: Cluster) -> None:
        response = await cluster.create("a", validate_only=True)
        assert not response.HasField("error")
        assert not response.topic_id
        assert not cluster.image.topics
        assert (await cluster.create("a/b", validate_only=True)).error.code == common_pb2.INVALID_TOPIC

    run(work)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"name": "a/b"}, common_pb2.INVALID_TOPIC),
        ({"name": "__cluster_metadata"}, common_pb2.INVALID_TOPIC),
        ({"name": "there"}, common_pb2.TOPIC_ALREADY_EXISTS),
        ({"partitions": -1}, common_pb2.INVALID_PARTITIONS),
        ({"replication_factor": 2}, common_pb2.INVALID_REPLICATION_FACTOR),
        ({"replication_factor": -1}, common_pb2.INVALID_REPLICATION_FACTOR),
        ({"configs": {"nonsense": "1"}}, common_pb2.INVALID_CONFIG),
        ({"partitions": 11}, common_pb2.POLICY_VIOLATION),
        ({"partitions": 10}, common_pb2.POLICY_VIOLATION),
        ({"partitions": 1 << 30, "replication_factor": 1 << 30}, common_pb2.POLICY_VIOLATION),
    ],
)
def test_a_refusal_is_a_value_with_a_code_and_a_message(
    values: dict[str, object], code: common_pb2.ErrorCode.ValueType
) -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.create("there")
        response = await cluster.create(**{"name": "a", **values})  # type: ignore[arg-type] # the tests' values
        assert response.error.code == code
        assert response.error.message
        assert list(cluster.image.topic_id_by_name) == ["there"]
        assert not (await cluster.create("next")).HasField("error"), "the service must go on after a refused request"

    run(work, {"max.partitions.per.topic": 10, "max.partitions.per.broker": 10})


def test_partitions_are_added_within_the_limits() -> None:
    async def work(cluster: Cluster) -> None:
        async def grow(topic: str, partitions: int) -> common_pb2.Error:
            request = admin_pb2.CreatePartitionsRequest(topic=topic, partitions=partitions)
            return (await cluster.stub.CreatePartitions(request)).error

        topic_id = (await cluster.create("a")).topic_id
        assert (await grow("a", 4)).code == common_pb2.NONE
        assert len(cluster.image.topics[topic_id].partitions) == 4
        assert (await grow("a", 4)).code == common_pb2.INVALID_PARTITIONS
        assert (await grow("a", -1)).code == common_pb2.INVALID_PARTITIONS
        assert (await grow("a", 11)).code == common_pb2.POLICY_VIOLATION
        assert (await grow("a", 7)).code == common_pb2.POLICY_VIOLATION
        assert (await grow("b", 7)).code == common_pb2.UNKNOWN_TOPIC_OR_PARTITION
        assert cluster.waited_for[-1] == cluster.image.offset

    run(work, {"max.partitions.per.topic": 10, "max.partitions.per.broker": 6})


class Tenant:
    """Calls the service in place of the interceptor that says who calls. Alter on the cluster: an administrator."""

    def __init__(self, cluster: Cluster, principal: str, *permissions: Permission) -> None:
        assert cluster.service is not None
        self._service = cluster.service
        self._who = Caller(principal, authorizer=FakeAuthorizer(*permissions))

    async def create(self, name: str, partitions: int) -> common_pb2.Error:
        request = admin_pb2.CreateTopicRequest(name=name, partitions=partitions, replication_factor=1)
        caller.set(self._who)
        return (await self._service.CreateTopic(request, Silent())).error  # type: ignore[arg-type] # all that it asks

    async def grow(self, name: str, partitions: int) -> common_pb2.Error:
        request = admin_pb2.CreatePartitionsRequest(topic=name, partitions=partitions)
        caller.set(self._who)
        return (await self._service.CreatePartitions(request, Silent())).error  # type: ignore[arg-type] # as above


class Silent:
    """A call without a deadline."""

    def time_remaining(self) -> float | None:
        return None

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4321"


async def upgraded(cluster: Cluster) -> None:
    newest = SUPPORTED[METADATA_VERSION].max_level
    await cluster.metadata.propose(register(1, incarnation=1, features={METADATA_VERSION: (1, newest)}))
    await cluster.metadata.add_broker()
    await cluster.metadata.propose(update_feature(METADATA_VERSION, newest))


def test_the_topics_of_a_user_have_no_more_partitions_than_max_partitions_per_user() -> None:
    """A user with Create on a prefix could use up the partitions of the cluster."""

    async def work(cluster: Cluster) -> None:
        await upgraded(cluster)
        alice, bob = Tenant(cluster, "User:alice"), Tenant(cluster, "User:bob")
        assert (await alice.create("a", 6)).code == common_pb2.NONE
        error = await alice.create("b", 5)
        assert error.code == common_pb2.POLICY_VIOLATION
        assert "would bring User:alice from 6 to 11 partitions" in error.message
        assert "max.partitions.per.user=10" in error.message
        assert (await alice.create("b", 3)).code == common_pb2.NONE
        assert (await alice.grow("b", 5)).code == common_pb2.POLICY_VIOLATION
        assert (await bob.grow("b", 5)).code == common_pb2.POLICY_VIOLATION, "it is alice's topic"
        assert (await alice.grow("b", 4)).code == common_pb2.NONE
        assert (await bob.create("c", 10)).code == common_pb2.NONE
        admin = Tenant(cluster, "User:admin", (Acl.ALTER, Acl.CLUSTER, CLUSTER_NAME))
        assert (await admin.create("d", 50)).code == common_pb2.NONE
        assert (await admin.grow("b", 7)).code == common_pb2.NONE
        assert (await Tenant(cluster, "User:ANONYMOUS").create("e", 50)).code == common_pb2.NONE
        await cluster.metadata.propose(delete_topic("a"))
        assert (await alice.create("f", 3)).code == common_pb2.NONE
        users = {topic.name: topic.user for topic in cluster.image.topics.values()}
        assert users == {"b": "User:alice", "c": "User:bob", "d": "User:admin", "e": "", "f": "User:alice"}

    run(work, {"max.partitions.per.user": 10})


def test_a_user_may_have_another_limit_of_partitions_than_others() -> None:
    async def work(cluster: Cluster) -> None:
        await upgraded(cluster)
        alice, bob, carol = (Tenant(cluster, f"User:{name}") for name in ("alice", "CN=bob,O=b:c", "carol"))
        assert (await alice.create("a", 20)).code == common_pb2.NONE
        error = await alice.create("b", 1)
        assert error.code == common_pb2.POLICY_VIOLATION
        assert "max.partitions.per.user=20" in error.message
        assert (await bob.create("c", 1)).code == common_pb2.POLICY_VIOLATION
        assert (await carol.create("d", 11)).code == common_pb2.POLICY_VIOLATION
        assert (await carol.create("d", 10)).code == common_pb2.NONE

    overrides = "User:alice:20; User:CN=bob,O=b:c:0"
    run(work, {"max.partitions.per.user": 10, "max.partitions.per.user.overrides": overrides})


def test_concurrent_calls_do_not_each_get_the_partitions_that_are_left() -> None:
    async def work(cluster: Cluster) -> None:
        await upgraded(cluster)
        alice = Tenant(cluster, "User:alice")
        errors = await asyncio.gather(*(alice.create(f"t{number}", 3) for number in range(20)))
        assert sum(error.code == common_pb2.NONE for error in errors) == 3
        assert sum(len(topic.partitions) for topic in cluster.image.topics.values()) == 9
        await asyncio.gather(*(cluster.create(f"u{number}", partitions=10) for number in range(20)))
        assert sum(len(topic.partitions) for topic in cluster.image.topics.values()) == 29, "of 30 for the broker"
        cluster.metadata.refuse_with = [NotController("moved")]
        await alice.create("v", 1)
        assert (await alice.create("v", 1)).code == common_pb2.NONE, "what was refused takes nothing"

    run(work, {"max.partitions.per.user": 10, "max.partitions.per.broker": 30})


def test_topics_count_from_the_metadata_version_on_that_keeps_their_users() -> None:
    async def work(cluster: Cluster) -> None:
        alice = Tenant(cluster, "User:alice")
        assert (await alice.create("a", 9)).code == common_pb2.NONE
        assert (await alice.create("b", 9)).code == common_pb2.NONE
        assert {topic.user for topic in cluster.image.topics.values()} == {""}

    run(work, {"max.partitions.per.user": 10})


def test_there_are_no_more_partitions_than_descriptors_for_them() -> None:
    """Each replica's active segment is open. A user who could make topics made the broker run out of descriptors."""

    async def work(cluster: Cluster) -> None:
        assert (await cluster.create("a", partitions=5)).error.code == common_pb2.NONE
        error = (await cluster.create("b", partitions=6)).error
        assert error.code == common_pb2.POLICY_VIOLATION
        assert "would bring the cluster from 5 to 11 replicas" in error.message
        assert "the limit of open files (ulimit -n), for 10 replicas per broker, allows 10 on 1 broker" in error.message
        request = admin_pb2.CreatePartitionsRequest(topic="a", partitions=11)
        assert (await cluster.stub.CreatePartitions(request)).error.code == common_pb2.POLICY_VIOLATION
        assert (await cluster.create("b", partitions=5)).error.code == common_pb2.NONE

    run(work, max_replicas=10)


def test_a_topic_is_deleted_and_can_be_made_again_with_another_id() -> None:
    async def work(cluster: Cluster) -> None:
        first = await cluster.create("a")
        request = admin_pb2.DeleteTopicRequest(name="a")
        assert not (await cluster.stub.DeleteTopic(request)).HasField("error")
        assert (await cluster.stub.DeleteTopic(request)).error.code == common_pb2.UNKNOWN_TOPIC_OR_PARTITION
        second = await cluster.create("a")
        assert first.topic_id != second.topic_id
        of_the_first = admin_pb2.DeleteTopicRequest(name="a", topic_id=first.topic_id)
        assert (await cluster.stub.DeleteTopic(of_the_first)).error.code == common_pb2.UNKNOWN_TOPIC_ID
        of_the_second = admin_pb2.DeleteTopicRequest(name="a", topic_id=second.topic_id)
        assert not (await cluster.stub.DeleteTopic(of_the_second)).HasField("error")

    run(work)


# Configs


def test_each_config_shows_the_value_in_effect_and_where_it_comes_from() -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.create("a", configs={"segment.bytes": "1MiB"})
        before = await cluster.describe(TOPIC, "a")
        assert before.keys() == {key.name for key in TOPIC_CONFIGS}
        assert before["segment.bytes"] == ("1048576", ConfigEntry.DYNAMIC_TOPIC)
        assert before["retention.ms"] == ("5000", ConfigEntry.STATIC_BROKER)
        assert before["flush.messages"] == ("1", ConfigEntry.DEFAULT)
        await cluster.alter(BROKER, "", {"log.retention.ms": "6s", "log.segment.bytes": "2MiB", "log.roll.ms": "1h"})
        await cluster.alter(BROKER, "1", {"log.retention.ms": "7s"})
        after = await cluster.describe(TOPIC, "a")
        assert after["segment.bytes"] == ("1048576", ConfigEntry.DYNAMIC_TOPIC)
        assert after["retention.ms"] == ("7000", ConfigEntry.DYNAMIC_BROKER)
        assert after["segment.ms"] == ("3600000", ConfigEntry.DYNAMIC_BROKER)

    run(work, {"log.retention.ms": "5s"})


def test_a_broker_shows_its_own_configuration() -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.alter(BROKER, "1", {"log.retention.ms": "7s"})
        await cluster.alter(BROKER, "", {"log.roll.ms": "1h"})
        shown = await cluster.describe(BROKER, "1")
        assert shown.keys() == {key.name for key in BROKER_CONFIGS}
        assert shown["rack"] == ("r1", ConfigEntry.STATIC_BROKER)
        assert shown["log.dirs"] == ("/data", ConfigEntry.STATIC_BROKER)
        assert shown["max.streams"] == ("10000", ConfigEntry.DEFAULT)
        assert shown["log.retention.ms"] == ("7000", ConfigEntry.DYNAMIC_BROKER)
        assert shown["log.roll.ms"] == ("3600000", ConfigEntry.DYNAMIC_BROKER)
        everywhere = await cluster.describe(BROKER, "")
        assert everywhere.keys() == {key.name for key in DYNAMIC_BROKER_CONFIGS}
        assert everywhere["log.roll.ms"] == ("3600000", ConfigEntry.DYNAMIC_BROKER)
        assert everywhere["log.retention.ms"][1] == ConfigEntry.DEFAULT

    run(work, {"rack": "r1"})


def test_read_only_keys_say_so() -> None:
    async def work(cluster: Cluster) -> None:
        request = admin_pb2.DescribeConfigsRequest(resource=ConfigResource(type=BROKER, name="1"))
        read_only = {entry.key: entry.read_only for entry in (await cluster.stub.DescribeConfigs(request)).entries}
        assert read_only["node.id"]
        assert not read_only["log.retention.ms"]
        for key, value in read_only.items():
            error = await cluster.alter(BROKER, "1", {}, unset=[key])
            assert (error.code == common_pb2.INVALID_CONFIG) is value, key

    run(work)


def test_groups_stay_in_a_compacted_topic() -> None:
    async def work(cluster: Cluster) -> None:
        topic = "__consumer_offsets"
        for policy in ("delete", "compact,delete"):
            error = await cluster.alter(TOPIC, topic, {"cleanup.policy": policy})
            assert error.code == common_pb2.POLICY_VIOLATION
            assert "keeps cleanup.policy=compact: groups are kept there" in error.message
        error = await cluster.alter(TOPIC, topic, {}, unset=["cleanup.policy"])
        assert error.code == common_pb2.POLICY_VIOLATION
        await cluster.create("a")
        assert (await cluster.alter(TOPIC, "a", {"cleanup.policy": "delete"})).code == common_pb2.NONE

    run(work)


def test_configs_are_altered_all_or_none() -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.create("a", configs={"segment.ms": "1h"})
        error = await cluster.alter(TOPIC, "a", {"retention.ms": "1s", "segment.bytes": "soon"})
        assert error.code == common_pb2.INVALID_CONFIG
        assert "segment.bytes='soon'" in error.message
        assert cluster.image.topic_configs("a") == {"segment.ms": "3600000"}
        assert (await cluster.alter(TOPIC, "a", {"retention.ms": "1s"}, unset=["segment.ms"])).code == common_pb2.NONE
        assert cluster.image.topic_configs("a") == {"retention.ms": "1000"}
        assert cluster.waited_for[-1] == cluster.image.offset

    run(work)


HUGE = ",".join(f"0:{1_000_000_000 + broker}" for broker in range(30_000))


def test_a_topic_gets_no_values_that_would_burden_the_brokers() -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.create("a", partitions=2)
        throttled = "leader.replication.throttled.replicas"
        for configs in (
            {throttled: HUGE},
            {throttled: "0:1,1:1,1:2"},  # two partitions on one broker have two replicas
            {"cleanup.policy": ",".join(["delete"] * 140_000)},
            {"segment.bytes": "1024"},
            {"file.delete.delay.ms": str((1 << 63) - 1)},
        ):
            for error in (
                await cluster.alter(TOPIC, "a", configs),
                (await cluster.create("b", partitions=2, configs=configs)).error,
            ):
                assert error.code == common_pb2.INVALID_CONFIG, configs.keys()
        for key, value in (("log.segment.bytes", "1024"), ("log.segment.delete.delay.ms", "2d")):
            assert (await cluster.alter(BROKER, "", {key: value})).code == common_pb2.INVALID_CONFIG
        assert list(cluster.image.topic_id_by_name) == ["a"]
        assert cluster.image.topic_configs("a") == {}
        assert (await cluster.alter(TOPIC, "a", {throttled: "0:1,1:1"})).code == common_pb2.NONE

    run(work)


def test_the_least_segment_is_the_operators_choice() -> None:
    async def work(cluster: Cluster) -> None:
        assert (await cluster.create("a", configs={"segment.bytes": "4096"})).error.code == common_pb2.NONE
        assert (await cluster.alter(TOPIC, "a", {"segment.bytes": "4095"})).code == common_pb2.INVALID_CONFIG

    run(work, {"min.segment.bytes": 4096})


def test_a_topic_inflates_no_more_than_its_brokers_do() -> None:
    """A tenant could set 1 GiB for its own topic, and four batches of a MB took 4 GB of each leader's memory."""

    async def work(cluster: Cluster) -> None:
        most = "max.inflate.bytes"
        assert (await cluster.create("a", configs={most: "64MiB"})).error.code == common_pb2.NONE
        for error in (
            await cluster.alter(TOPIC, "a", {most: "65MiB"}),
            (await cluster.create("b", configs={most: str(1 << 30)})).error,
        ):
            assert error.code == common_pb2.INVALID_CONFIG
            assert f"{most}={64 << 20}" in error.message
        assert (await cluster.alter(BROKER, "", {most: "128MiB"})).code == common_pb2.NONE
        assert (await cluster.alter(TOPIC, "a", {most: "128MiB"})).code == common_pb2.NONE
        assert (await cluster.alter(TOPIC, "a", {most: "129MiB"})).code == common_pb2.INVALID_CONFIG

    run(work)


def test_long_configs_are_described_in_turns_and_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty topics with a MB each, from before it was refused, held up the event loop for seconds."""
    monkeypatch.setattr("broker.net.services.node.shown", lambda *_: pytest.fail("a topic's configs hold no secrets"))
    names = [f"t{number}" for number in range(40)]
    configs = {"leader.replication.throttled.replicas": HUGE}
    image = image_after(
        claim(), register(1), *(create_topic(name, at, configs=configs) for at, name in enumerate(names, 1))
    )
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data"})

    async def main() -> None:
        async with counted_turns() as turns:
            found = await describe_topics(image, names, config, lambda name: None)
            assert turns.count >= len(names) // 3
        assert [entry.value for entry in found[0].entries if entry.key in configs] == [HUGE]

    asyncio.run(main())


def test_describing_what_is_not_there_is_an_error() -> None:
    async def work(cluster: Cluster) -> None:
        for type_, name, code in (
            (TOPIC, "zzz", common_pb2.UNKNOWN_TOPIC_OR_PARTITION),
            (BROKER, "2", common_pb2.INVALID_REQUEST),
            (7, "", common_pb2.INVALID_REQUEST),
        ):
            resource = ConfigResource(name=name)
            resource.type = type_  # type: ignore[assignment] # 7 is what a newer client might send
            response = await cluster.stub.DescribeConfigs(admin_pb2.DescribeConfigsRequest(resource=resource))
            assert response.error.code == code
            assert not response.entries

    run(work)


def test_topics_with_the_same_configs_share_their_entries() -> None:
    async def work(cluster: Cluster) -> None:
        for name in ("a", "b", "c"):
            await cluster.create(name, partitions=1, configs={"retention.ms": "1000"} if name == "b" else {})
        request = admin_pb2.DescribeTopicConfigsRequest(topics=["c", "b", "zzz", "a", "c"])
        response = await cluster.stub.DescribeTopicConfigs(request)
        assert [list(each.topics) for each in response.configs] == [["c", "a"], ["b"], ["zzz"]]
        plain, own, unknown = response.configs
        for found, name in ((plain, "a"), (own, "b")):
            entries = {entry.key: (entry.value, entry.source) for entry in found.entries}
            assert entries == await cluster.describe(TOPIC, name)
            assert not any(entry.documentation for entry in found.entries)
        assert unknown.error.code == common_pb2.UNKNOWN_TOPIC_OR_PARTITION
        assert not unknown.entries
        too_many = admin_pb2.DescribeTopicConfigsRequest(topics=map(str, range(MAX_NAMED + 1)))
        assert (await cluster.stub.DescribeTopicConfigs(too_many)).error.code == common_pb2.INVALID_REQUEST

    run(work)


# Log directories


def test_log_directories_show_space_and_partitions_and_what_is_offline(tmp_path: Path) -> None:
    good, bad, gone = (str(tmp_path / name) for name in ("good", "bad", "gone"))
    for path in (good, bad):
        Path(path).mkdir()
    logs = FakeLogs(
        [FakeLog(f"{good}/b-0", "b", 0), FakeLog(f"{good}/a-1", "a", 1), FakeLog(f"{bad}/c-0", "c", 0)],
        offline_dirs={bad: OSError(5, "Input/output error")},
    )

    async def work(cluster: Cluster) -> None:
        response = await cluster.stub.DescribeLogDirs(admin_pb2.DescribeLogDirsRequest())
        first, second, third = response.log_dirs
        assert first.path == good
        assert 0 < first.usable_bytes <= first.total_bytes
        assert [(p.topic, p.partition) for p in first.partitions] == [("a", 1), ("b", 0)]
        assert first.partitions[0] == admin_pb2.LogDirPartition(
            topic="a", partition=1, size_bytes=100, log_start_offset=3, log_end_offset=9, high_watermark=8, segments=2
        )
        assert not first.HasField("error")
        assert second.error.code == third.error.code == common_pb2.STORAGE_ERROR
        assert "Input/output error" in second.error.message
        assert "No such file" in third.error.message

    run(work, {"log.dirs": [good, bad, gone]}, logs)


def test_a_bug_reaches_the_client_as_an_answer() -> None:
    class Broken(FakeLogs):
        def logs(self) -> Sequence[LogView]:
            raise KeyError("a bug of the test's")

    async def work(cluster: Cluster) -> None:
        response = await cluster.stub.DescribeLogDirs(admin_pb2.DescribeLogDirsRequest())
        assert response.error.code == common_pb2.INTERNAL
        assert "KeyError" in response.error.message

    run(work, logs=Broken())


def test_a_topic_has_as_many_replicas_as_there_are_brokers_at_most() -> None:
    async def work(cluster: Cluster) -> None:
        for values in ({"replication_factor": 2}, {}):
            error = (await cluster.create("a", **values)).error
            assert error.code == common_pb2.INVALID_REPLICATION_FACTOR
            assert "of 1 registered brokers 1 is up, so it can be 1" in error.message
        await cluster.metadata.add_broker(2, port=9093)
        for name, values in (("a", {"replication_factor": 2}), ("b", {})):
            created = await cluster.create(name, **values)
            assert not created.HasField("error")
            assert sorted(cluster.image.topics[created.topic_id].partitions[0].isr) == [1, 2]

    run(work, {"default.replication.factor": 2})


def test_replicas_can_be_placed_by_hand() -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.metadata.add_broker(2, port=9093)
        wanted = [ReplicaAssignment(replicas=each) for each in ([2, 1], [2, 1], [1, 2])]
        created = await cluster.create("a", assignments=wanted)
        placed = cluster.image.topics[created.topic_id].partitions
        assert [(part.replicas, part.leader) for part in placed] == [((2, 1), 2), ((2, 1), 2), ((1, 2), 1)]
        assert (await cluster.create("b", partitions=2, assignments=wanted)).error.code == common_pb2.INVALID_REQUEST
        error = (await cluster.create("b", assignments=[ReplicaAssignment(replicas=[1, 7])])).error
        assert error.code == common_pb2.INVALID_REPLICA_ASSIGNMENT

    run(work)


# Replicas


@dataclass
class FakePartition:
    log: LogIdentity
    led: Description | None

    def describe_replicas(self) -> Description:
        if self.led is None:
            raise NotLeader("broker 2 leads it")
        return self.led


class Identity(NamedTuple):
    topic_id: bytes
    partition: int


def test_a_leader_tells_how_far_its_replicas_are() -> None:
    async def work(cluster: Cluster) -> None:
        mine, other = b"m" * 16, b"o" * 16
        led = Description(4, 10, 90, 100, [ReplicaView(1, 100, 0, 5_000, True), ReplicaView(2, 90, 10, 3_500, False)])
        unheard = Description(4, 0, 0, 5, [ReplicaView(1, 5, 0, 5_000, True), ReplicaView(3, -1, -1, -1, True)])
        cluster.partitions = [
            FakePartition(Identity(other, 0), unheard),
            FakePartition(Identity(mine, 1), None),
            FakePartition(Identity(mine, 0), led),
        ]
        everything = await cluster.stub.DescribeReplicas(admin_pb2.DescribeReplicasRequest())
        assert [(each.topic_id, each.partition) for each in everything.partitions] == [(mine, 0), (other, 0)]
        request = admin_pb2.DescribeReplicasRequest(topic_ids=[mine])
        [found] = (await cluster.stub.DescribeReplicas(request)).partitions
        assert (found.leader_epoch, found.log_start_offset, found.high_watermark, found.log_end_offset) == led[:4]
        assert [
            (each.broker_id, each.log_end_offset, each.lag, each.last_caught_up_ms, each.in_sync)
            for each in found.replicas
        ] == [(1, 100, 0, 0, True), (2, 90, 10, 1_500, False)]
        assert everything.partitions[1].replicas[1].last_caught_up_ms == -1

    run(work)


def test_partitions_are_moved_each_by_itself() -> None:
    async def work(cluster: Cluster) -> None:
        for broker_id in (2, 3):
            await cluster.metadata.add_broker(broker_id, port=9090 + broker_id)
        await cluster.create("a", assignments=[ReplicaAssignment(replicas=[1, 2])] * 3)
        request = admin_pb2.AdminAlterReassignmentsRequest()
        for partition, replicas in ((0, [3, 2]), (1, [9]), (2, []), (7, [1])):
            request.reassignments.add(topic="a", partition=partition, replicas=replicas)
        response = await cluster.stub.AlterReassignments(request)
        assert not response.HasField("error")
        assert [each.error.code for each in response.results] == [
            common_pb2.NONE,
            common_pb2.INVALID_REPLICA_ASSIGNMENT,
            common_pb2.NO_REASSIGNMENT_IN_PROGRESS,
            common_pb2.UNKNOWN_TOPIC_OR_PARTITION,
        ]
        assert response.metadata_offset == cluster.image.offset == cluster.waited_for[-1]
        topic = cluster.image.topic("a")
        assert topic is not None
        assert (topic.partitions[0].replicas, topic.partitions[0].adding_replicas) == ((3, 2, 1), (3,))

    run(work)


@pytest.mark.parametrize(("partitions", "words"), [([0, 0], "a-0 is named twice"), (range(1_001), "at most 1000")])
def test_a_request_names_so_many_partitions_and_each_once(partitions: Sequence[int], words: str) -> None:
    async def work(cluster: Cluster) -> None:
        request = admin_pb2.AdminAlterReassignmentsRequest()
        for partition in partitions:
            request.reassignments.add(topic="a", partition=partition, replicas=[1])
        error = (await cluster.stub.AlterReassignments(request)).error
        assert error.code == common_pb2.INVALID_REQUEST
        assert words in error.message

    run(work)


# Cluster


def test_the_cluster_is_described_with_what_brokers_carry() -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.metadata.add_broker(2, rack="r", port=9093)
        created = await cluster.create("a", partitions=3)
        response = await cluster.stub.DescribeCluster(
            admin_pb2.DescribeClusterRequest(min_metadata_offset=created.metadata_offset)
        )
        assert (response.cluster_id, response.controller_id, response.controller_epoch) == ("test", 1, 1)
        assert response.metadata_offset == cluster.image.offset == created.metadata_offset
        assert [(b.broker_id, b.port, b.rack, b.fenced, b.leaderships, b.replicas) for b in response.brokers] == [
            (1, 9092, "", False, 2, 2),
            (2, 9093, "r", False, 1, 1),
        ]
        assert all(broker.broker_epoch > 0 for broker in response.brokers)
        assert cluster.metadata.barriers == 0
        await cluster.stub.DescribeCluster(admin_pb2.DescribeClusterRequest(linearizable=True))
        assert cluster.metadata.barriers == 1

    run(work)


def test_what_this_broker_has_not_heard_of_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "CATCH_UP_SECONDS", 60.0)

    async def work(cluster: Cluster) -> None:
        ahead = cluster.image.offset + 2
        request = admin_pb2.DescribeClusterRequest(min_metadata_offset=ahead)
        asking = asyncio.ensure_future(cluster.stub.DescribeCluster(request))
        await cluster.describe(BROKER, "")
        assert not asking.done()
        await cluster.create("a")
        assert (await asking).metadata_offset >= ahead

    run(work)


def test_the_quorum_is_described_as_the_port_says() -> None:
    async def work(cluster: Cluster) -> None:
        response = await cluster.stub.DescribeQuorum(admin_pb2.AdminDescribeQuorumRequest())
        assert response.quorum == cluster.metadata.quorum

    run(work)


def test_leaders_are_elected_or_it_is_said_why_not() -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.create("a", partitions=2)

        async def elect(topic: str, *partitions: int) -> common_pb2.Error:
            request = admin_pb2.ElectLeadersRequest(topic=topic, partitions=partitions)
            return (await cluster.stub.ElectLeaders(request)).error

        assert (await elect("a")).code == common_pb2.ELECTION_NOT_NEEDED
        assert (await elect("zzz")).code == common_pb2.UNKNOWN_TOPIC_OR_PARTITION
        error = await elect("a", 0, 7)
        assert error.code == common_pb2.UNKNOWN_TOPIC_OR_PARTITION
        assert "2 partitions and none numbered 7" in error.message

    run(work)


def test_a_broker_that_is_gone_is_unregistered_and_a_live_one_is_not() -> None:
    async def work(cluster: Cluster) -> None:
        async def unregister(broker_id: int) -> admin_pb2.AdminUnregisterBrokerResponse:
            return await cluster.stub.UnregisterBroker(admin_pb2.AdminUnregisterBrokerRequest(broker_id=broker_id))

        assert (await unregister(1)).error.code == common_pb2.INVALID_REQUEST
        assert (await unregister(9)).error.code == common_pb2.BROKER_ID_NOT_REGISTERED
        await cluster.metadata.propose(register(5, incarnation=5))
        response = await unregister(5)
        assert not response.HasField("error")
        assert response.metadata_offset == cluster.image.offset
        assert 5 not in cluster.image.brokers

    run(work)


def test_brokers_are_cordoned_and_drained_and_described_so() -> None:
    async def work(cluster: Cluster) -> None:
        async def alter(broker_id: int, **asked: bool) -> admin_pb2.AdminAlterBrokerResponse:
            request = admin_pb2.AdminAlterBrokerRequest(broker_id=broker_id, **asked)
            return await cluster.stub.AlterBroker(request)

        async def described(broker_id: int) -> tuple[bool, bool, bool]:
            response = await cluster.stub.DescribeCluster(admin_pb2.DescribeClusterRequest())
            (found,) = (broker for broker in response.brokers if broker.broker_id == broker_id)
            return found.cordoned, found.drained, found.drained_until_restart

        await cluster.metadata.add_broker(2, port=9093)
        response = await alter(2, cordoned=True)
        assert not response.HasField("error")
        assert response.metadata_offset == cluster.image.offset == cluster.waited_for[-1]
        assert await described(2) == (True, False, False)
        await alter(2, cordoned=False)
        await alter(2, drained=True, until_restart=True)
        assert await described(2) == (True, True, True), "a drained broker must be shown as cordoned"
        assert not cluster.image.brokers[2].cordoned, (
            "draining must not set the broker's own cordon, which would stay after it"
        )
        await alter(2, drained=False)
        assert await described(2) == await described(1) == (False, False, False)
        assert (await alter(2)).error.code == common_pb2.INVALID_REQUEST
        assert (await alter(9, drained=True)).error.code == common_pb2.BROKER_ID_NOT_REGISTERED

    run(work)


def test_levels_are_described_with_what_all_brokers_know_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_metadata, "levels_with_ids_asked_for", list)

    async def work(cluster: Cluster) -> None:
        async def levels() -> tuple[dict[str, int], list[tuple[str, int, int]]]:
            response = await cluster.stub.DescribeCluster(admin_pb2.DescribeClusterRequest())
            known = [(each.name, each.min_level, each.max_level) for each in response.supported_features]
            return dict(response.features), known

        async def update(level: int, *, validate_only: bool = False) -> common_pb2.Error:
            request = admin_pb2.AdminUpdateFeatureRequest(
                name="metadata.version", level=level, validate_only=validate_only
            )
            return (await cluster.stub.UpdateFeature(request)).error

        await cluster.metadata.propose(register(2, incarnation=2, features={}))  # an older one, which does not say
        assert await levels() == ({"metadata.version": 1}, [("metadata.version", 1, 1)])
        newest = SUPPORTED[METADATA_VERSION].max_level
        error = await update(newest)
        assert error.code == common_pb2.FEATURE_UPDATE_FAILED
        assert "broker 2 does not know" in error.message
        await cluster.metadata.propose(register(2, incarnation=3))
        assert (await update(newest, validate_only=True)).code == common_pb2.NONE
        assert await levels() == ({"metadata.version": 1}, [("metadata.version", 1, newest)])
        assert (await update(newest)).code == common_pb2.NONE
        assert await levels() == ({"metadata.version": newest}, [("metadata.version", 1, newest)])

    run(work)


def test_a_password_in_an_address_is_not_shown() -> None:
    """A user that may describe configs must not see it; `DescribeNode` hides it as well."""
    values = {
        "node.id": 1,
        "log.dirs": "/data",
        "tracing.exporter": "otlp",
        "tracing.otlp.endpoint": "http://raftlog:hunter2@collector.example:4317",
        "sasl.users.location": "/etc/raftlog/users.toml",
    }
    entries = {each.key: each for each in describe_broker(MetadataImage(), BrokerConfig.from_values(values))}
    assert entries["tracing.otlp.endpoint"].value == "http://raftlog:[hidden]@collector.example:4317"
    assert entries["sasl.users.location"].value == "/etc/raftlog/users.toml", "the path of the users file is no secret"
    assert entries["node.id"].value == "1"
    assert "hunter2" not in str(entries)


def test_values_of_topics_are_shown_as_they_are() -> None:
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data", "log.retention.ms": "7d"})
    entries = {each.key: each.value for each in describe_topic(MetadataImage(), "t", config)}
    assert entries == dict(config.topic_defaults)


# Quotas in the audit log

QUOTAS = admin_pb2.AlterClientQuotasRequest(
    alterations=[
        QuotaRecord(entity=QuotaEntity(user="ada"), key="producer_byte_rate", value=1_000),
        QuotaRecord(entity=QuotaEntity(client_id="web"), key="request_percentage"),
    ]
)
CHANGES = [("ALTER", "user 'ada' producer_byte_rate=1000"), ("DELETE", "client id 'web' request_percentage")]


@pytest.fixture
def audited(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str, str, str]]]:
    """The audit lines since the last call: message, host, operation, quota."""
    caplog.set_level(logging.INFO)

    def take() -> list[tuple[str, str, str, str]]:
        written = [vars(record) for record in caplog.records if record.name == "raftlog.audit"]
        caplog.clear()
        assert all(record["resource_type"] == "QUOTA" for record in written)
        return [(line["message"], line["host"], line["operation"], line["resource"]) for line in written]

    return take


def lines(message: str) -> list[tuple[str, str, str, str]]:
    return [(message, "127.0.0.1", *change) for change in CHANGES]


def test_each_changed_quota_has_a_line(audited: Callable[[], list[tuple[str, str, str, str]]]) -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.metadata.propose(update_feature(METADATA_VERSION, QUOTAS_LEVEL))
        only_said = admin_pb2.AlterClientQuotasRequest(alterations=QUOTAS.alterations, validate_only=True)
        assert not (await cluster.stub.AlterClientQuotas(only_said)).HasField("error")
        assert audited() == []
        assert not (await cluster.stub.AlterClientQuotas(QUOTAS)).HasField("error")
        assert audited() == lines("changed")

    run(work)


def test_a_quota_whose_change_has_an_unknown_outcome_has_a_line(
    audited: Callable[[], list[tuple[str, str, str, str]]],
) -> None:
    async def work(cluster: Cluster) -> None:
        cluster.metadata.refuse_with.append(NotController("no controller answered in time"))
        assert (await cluster.stub.AlterClientQuotas(QUOTAS)).HasField("error")
        assert audited() == lines("may have been changed")
        too_many = admin_pb2.AlterClientQuotasRequest(alterations=[QUOTAS.alterations[0]] * 1_001)
        cluster.metadata.refuse_with.append(NotController("no controller answered in time"))
        assert (await cluster.stub.AlterClientQuotas(too_many)).HasField("error")
        assert audited() == [], "a request that the quorum never got must not be audited as a possible change"

    run(work)


def test_a_quota_has_a_line_when_its_author_goes_away(
    audited: Callable[[], list[tuple[str, str, str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(cluster: Cluster) -> None:
        proposed, cancelled = asyncio.Event(), asyncio.Event()

        async def never(command: MetadataCommand) -> CommandResult:
            proposed.set()
            try:
                await asyncio.Event().wait()
            finally:
                asyncio.get_running_loop().call_soon(cancelled.set)
            raise AssertionError("a call that must be cancelled has returned")

        monkeypatch.setattr(cluster.metadata, "propose", never)
        call = cluster.stub.AlterClientQuotas(QUOTAS)
        await proposed.wait()
        call.cancel()
        await cancelled.wait()
        assert audited() == lines("may have been changed")

    run(work)
