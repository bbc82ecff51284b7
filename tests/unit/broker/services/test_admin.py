"""The admin service: topics, configs, log directories."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from broker.config_keys import BROKER_CONFIGS
from broker.services.log_dirs import LogView
from raftlog.v1 import admin_pb2, common_pb2
from raftlog.v1.admin_pb2 import ConfigEntry
from raftlog.v1.records_pb2 import ConfigResource
from raftmeta.topic_configs import DYNAMIC_BROKER_CONFIGS, TOPIC_CONFIGS
from tests.support.admin_service import BROKER, TOPIC, Cluster, FakeLog, FakeLogs, run

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
        assert not (await cluster.create("next")).HasField("error"), "the service lives on"

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


def test_a_topic_is_deleted_and_can_be_made_again_with_another_id() -> None:
    async def work(cluster: Cluster) -> None:
        first = await cluster.create("a")
        request = admin_pb2.DeleteTopicRequest(name="a")
        assert not (await cluster.stub.DeleteTopic(request)).HasField("error")
        assert (await cluster.stub.DeleteTopic(request)).error.code == common_pb2.UNKNOWN_TOPIC_OR_PARTITION
        second = await cluster.create("a")
        assert first.topic_id != second.topic_id

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
