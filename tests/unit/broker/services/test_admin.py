"""The admin service over a real gRPC connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest
from grpc import aio

from broker.config import BrokerConfig
from broker.config_keys import BROKER_CONFIGS
from broker.services.admin import AdminService
from broker.services.log_dirs import LogView
from raftlog.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from raftlog.v1.admin_pb2 import ConfigEntry
from raftlog.v1.records_pb2 import ConfigResource
from raftmeta.image import MetadataImage
from raftmeta.topic_configs import DYNAMIC_BROKER_CONFIGS, TOPIC_CONFIGS
from tests.support.memory_metadata import MemoryMetadata
from tests.support.metadata import register

TOPIC, BROKER = ConfigResource.TOPIC, ConfigResource.BROKER
WAIT_SECONDS = 20.0


@dataclass
class FakeLog:
    directory: str
    topic: str
    partition: int
    size_bytes: int = 100
    segment_count: int = 2
    log_start_offset: int = 3
    log_end_offset: int = 9
    high_watermark: int = 8


@dataclass
class FakeLogs:
    found: list[FakeLog] = field(default_factory=list)
    offline_dirs: Mapping[str, object] = field(default_factory=dict)

    def logs(self) -> Sequence[LogView]:
        return self.found


class Cluster:
    """One node behind the service, and what the service asked the broker to wait for."""

    def __init__(self, metadata: MemoryMetadata, stub: Stub) -> None:
        self.metadata = metadata
        self.stub = stub
        self.waited_for: list[int] = []
        self.applied = asyncio.Event()
        self.applied.set()

    @property
    def image(self) -> MetadataImage:
        return self.metadata.image

    async def wait_applied(self, metadata_offset: int) -> None:
        self.waited_for.append(metadata_offset)
        await self.applied.wait()

    async def create(self, name: str = "a", **values: object) -> admin_pb2.CreateTopicResponse:
        return await self.stub.CreateTopic(admin_pb2.CreateTopicRequest(name=name, **values))  # type: ignore[arg-type] # the tests' values

    async def describe(
        self, type_: ConfigResource.Type.ValueType, name: str
    ) -> dict[str, tuple[str, ConfigEntry.Source.ValueType]]:
        response = await self.stub.DescribeConfigs(
            admin_pb2.DescribeConfigsRequest(resource=ConfigResource(type=type_, name=name))
        )
        assert not response.HasField("error"), response.error
        assert all(entry.documentation for entry in response.entries)
        return {entry.key: (entry.value, entry.source) for entry in response.entries}

    async def alter(
        self, type_: ConfigResource.Type.ValueType, name: str, set_: Mapping[str, str], unset: Sequence[str] = ()
    ) -> common_pb2.Error:
        request = admin_pb2.AlterConfigsRequest(resource=ConfigResource(type=type_, name=name), set=set_, unset=unset)
        return (await self.stub.AlterConfigs(request)).error


Stub: TypeAlias = "admin_pb2_grpc.AdminAsyncStub"  # known to the stubs only
Work = Callable[[Cluster], Awaitable[None]]


@asynccontextmanager
async def served(config: BrokerConfig, logs: FakeLogs) -> AsyncIterator[Cluster]:
    metadata = MemoryMetadata()
    await metadata.add_broker()
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        cluster = Cluster(metadata, admin_pb2_grpc.AdminStub(channel))
        service = AdminService(metadata, config, logs, cluster.wait_applied)
        admin_pb2_grpc.add_AdminServicer_to_server(service, server)
        await server.start()
        yield cluster
    await server.stop(0)


def run(work: Work, values: Mapping[str, object] | None = None, logs: FakeLogs | None = None) -> None:
    """Serve with these server keys over the least ones, and do the work."""
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data", **(values or {})})

    async def main() -> None:
        async with served(config, logs or FakeLogs()) as cluster, asyncio.timeout(WAIT_SECONDS):
            await work(cluster)

    asyncio.run(main())


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
        ({"replication_factor": 3}, common_pb2.INVALID_REPLICATION_FACTOR),
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


# Cluster


def test_a_topic_with_followers_is_refused_and_the_message_says_why() -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.metadata.add_broker(2, port=9093)
        for values in ({"replication_factor": 2}, {}):
            error = (await cluster.create("a", **values)).error
            assert error.code == common_pb2.INVALID_REPLICATION_FACTOR
            assert "followers are not there yet in this version" in error.message

    run(work, {"default.replication.factor": 2})


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
