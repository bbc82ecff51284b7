"""The admin service of one node over a real gRPC connection, on metadata in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from grpc import aio

from broker.config.config import BrokerConfig
from broker.descriptors import MAX_DESCRIPTORS
from broker.net.services.admin import AdminService, PartitionView
from broker.net.services.metadata import MetadataService
from broker.net.services.node import LogView
from broker.net.services.security import SecurityService
from raftlog.errors import AuthenticationFailed
from raftlog.v1 import admin_pb2, admin_pb2_grpc, common_pb2, metadata_pb2_grpc, security_pb2, security_pb2_grpc
from raftlog.v1.admin_pb2 import ConfigEntry
from raftlog.v1.records_pb2 import AlterPartitionCommand, ConfigResource, IsrMember, MetadataCommand
from raftmeta.image import MetadataImage, PartitionImage
from replication.leader import ReplicaView
from tests.support.memory_metadata import MemoryMetadata
from tests.support.metadata import broker_epoch, uuid_of

TOPIC, BROKER = ConfigResource.TOPIC, ConfigResource.BROKER
WAIT_SECONDS = 60.0

Returned = TypeVar("Returned")


@dataclass
class FakeLog:
    """One log of a broker."""

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
    """All logs of a broker."""

    found: list[FakeLog] = field(default_factory=list)
    offline_dirs: Mapping[str, object] = field(default_factory=dict)

    def logs(self) -> Sequence[LogView]:
        """Return the logs."""
        return self.found


class FixedClock:
    """It is always the same time."""

    def now_ms(self) -> int:
        """Unix time."""
        return 1_000_000

    def monotonic_ms(self) -> float:
        """Since whenever."""
        return 5_000.0


class Cluster:
    """One node behind the service, and the conditions that the service asked the broker to wait for."""

    def __init__(self, metadata: MemoryMetadata, stub: Stub) -> None:
        self.metadata = metadata
        self.stub = stub
        self.waited_for: list[int] = []
        self.partitions: list[PartitionView] = []
        self.service: AdminService | None = None
        self.clock = FixedClock()
        self.applied = asyncio.Event()
        self.applied.set()

    @property
    def image(self) -> MetadataImage:
        """The newest metadata."""
        return self.metadata.image

    async def wait_applied(self, metadata_offset: int) -> None:
        """Note what is waited for; `applied` lets it pass."""
        self.waited_for.append(metadata_offset)
        await self.applied.wait()

    async def create(self, name: str = "a", **values: object) -> admin_pb2.CreateTopicResponse:
        """Create a topic."""
        return await self.stub.CreateTopic(admin_pb2.CreateTopicRequest(name=name, **values))  # type: ignore[arg-type] # the tests' values

    async def describe(
        self, type_: ConfigResource.Type.ValueType, name: str
    ) -> dict[str, tuple[str, ConfigEntry.Source.ValueType]]:
        """Return value and source of every config."""
        response = await self.stub.DescribeConfigs(
            admin_pb2.DescribeConfigsRequest(resource=ConfigResource(type=type_, name=name))
        )
        assert not response.HasField("error"), response.error
        assert all(entry.documentation for entry in response.entries), "configuration entries lack their documentation"
        return {entry.key: (entry.value, entry.source) for entry in response.entries}

    async def alter(
        self, type_: ConfigResource.Type.ValueType, name: str, set_: Mapping[str, str], unset: Sequence[str] = ()
    ) -> common_pb2.Error:
        """Alter configs and return the error, if any."""
        request = admin_pb2.AlterConfigsRequest(resource=ConfigResource(type=type_, name=name), set=set_, unset=unset)
        return (await self.stub.AlterConfigs(request)).error


Stub: TypeAlias = "admin_pb2_grpc.AdminAsyncStub"  # known to the stubs only
Work = Callable[[Cluster], Awaitable[None]]


@asynccontextmanager
async def served(config: BrokerConfig, logs: FakeLogs, max_replicas: int = MAX_DESCRIPTORS) -> AsyncIterator[Cluster]:
    """Serve one node with broker 1 up."""
    metadata = MemoryMetadata()
    await metadata.add_broker()
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        cluster = Cluster(metadata, admin_pb2_grpc.AdminStub(channel))
        service = AdminService(
            metadata,
            config,
            logs,
            cluster.wait_applied,
            lambda: cluster.partitions,
            cluster.clock,
            max_replicas=max_replicas,
        )
        cluster.service = service
        admin_pb2_grpc.add_AdminServicer_to_server(service, server)
        await server.start()
        yield cluster
    await server.stop(0)


def run(
    work: Work,
    values: Mapping[str, object] | None = None,
    logs: FakeLogs | None = None,
    max_replicas: int = MAX_DESCRIPTORS,
) -> None:
    """Serve with these server keys over the least ones, and do the work."""
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data", **(values or {})})

    async def main() -> None:
        async with served(config, logs or FakeLogs(), max_replicas) as cluster, asyncio.timeout(WAIT_SECONDS):
            await work(cluster)

    asyncio.run(main())


class LogName(NamedTuple):
    """Which log it is."""

    topic_id: bytes
    partition: int


class Description(NamedTuple):
    """A leader's view of a partition."""

    leader_epoch: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    replicas: Sequence[ReplicaView]


class Led(NamedTuple):
    """A partition that this server leads, as far as DescribeReplicas is concerned."""

    log: LogName
    described: Description

    def describe_replicas(self) -> Description:
        """Return it."""
        return self.described


def led(topic: int, partition: int, *views: ReplicaView) -> Led:
    """Return a partition with 100 records of which 80 are committed."""
    return Led(LogName(uuid_of(topic), partition), Description(0, 0, 80, 100, views))


class NobodyLogsIn:
    """The security service's part that knows passwords, where there is none."""

    def begin(self, mechanism: str, message: bytes, context: object) -> security_pb2.AuthenticateResponse:
        """Refuse."""
        raise AuthenticationFailed("nobody logs in here")

    def finish(self, exchange_id: bytes, message: bytes, context: object) -> security_pb2.AuthenticateResponse:
        """Refuse."""
        raise AuthenticationFailed("nobody logs in here")


class AdminServer:
    """The admin, metadata and security services of one node on an event loop of their own, for clients that block.

    Brokers 1 to `brokers` are up, all of them at this server's address. `propose` changes the metadata. Clients need
    not log in, and may do everything; `authorizer`: permissions can be stored nevertheless.
    """

    def __init__(
        self, brokers: int = 4, values: Mapping[str, object] | None = None, *, authorizer: bool = True
    ) -> None:
        self.cluster: Cluster
        self.bootstrap = ""
        self._config = BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data", **(values or {})})
        self._brokers = brokers
        self._authorizer = authorizer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="admin-server", daemon=True)

    def __enter__(self) -> AdminServer:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *error: object) -> None:
        self._run(self._server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        metadata = MemoryMetadata()
        self._server = aio.server()
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.bootstrap = f"127.0.0.1:{port}"
        for broker_id in range(1, self._brokers + 1):
            await metadata.add_broker(broker_id, port=port)
        self.cluster = cluster = Cluster(metadata, admin_pb2_grpc.AdminStub(aio.insecure_channel(self.bootstrap)))
        service = AdminService(
            metadata, self._config, FakeLogs(), cluster.wait_applied, lambda: cluster.partitions, cluster.clock
        )
        admin_pb2_grpc.add_AdminServicer_to_server(service, self._server)
        metadata_pb2_grpc.add_MetadataServicer_to_server(MetadataService(metadata), self._server)
        security = SecurityService(metadata, NobodyLogsIn(), cluster.wait_applied, has_authorizer=self._authorizer)
        security_pb2_grpc.add_SecurityServicer_to_server(security, self._server)
        await self._server.start()

    def _run(self, work: Coroutine[Any, Any, Returned]) -> Returned:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)

    @property
    def image(self) -> MetadataImage:
        """The newest metadata."""
        return self.cluster.image

    def propose(self, *commands: MetadataCommand) -> None:
        """Commit commands."""
        for command in commands:
            self._run(self.cluster.metadata.propose(command))

    def partition(self, topic: str, partition: int = 0) -> PartitionImage:
        """Return a partition that is there."""
        found = self.image.topic(topic)
        assert found is not None
        return found.partitions[partition]

    def set_isr(self, topic: str, isr: Sequence[int], partition: int = 0) -> None:
        """Give a partition an ISR, as its leader would."""
        found = self.image.topic(topic)
        assert found is not None
        known = found.partitions[partition]
        members = [IsrMember(broker_id=each, broker_epoch=broker_epoch(self.image, each)) for each in isr]
        command = AlterPartitionCommand(
            broker_id=known.leader,
            broker_epoch=broker_epoch(self.image, known.leader),
            topic_id=found.topic_id,
            partition=partition,
            leader_epoch=known.leader_epoch,
            partition_epoch=known.partition_epoch,
            new_isr=members,
        )
        self.propose(MetadataCommand(alter_partition=command))
