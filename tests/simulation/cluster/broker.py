"""A whole broker behind a simulated gRPC server: the services, as `broker.server.broker_role` wires them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from grpc import aio

from broker.config.config import BrokerConfig
from broker.coordinator.internal_topics import InternalTopics
from broker.coordinator.transactions.marker_links import MarkerLinks
from broker.coordinator.transactions.verifier import ProducerChecks, TransactionVerifier
from broker.net.interceptors import RequestBounds
from broker.net.services.admin import AdminService
from broker.net.services.log import LogService
from broker.net.services.metadata import MetadataService
from broker.quotas.disk_reads import DiskReads
from broker.quotas.heavy_work import HeavyWork
from broker.security.caller import Caller
from raftlog.v1 import admin_pb2_grpc, group_pb2_grpc, metadata_pb2_grpc, transaction_pb2_grpc
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.image import MetadataImage
from tests.simulation.cluster.metadata import BrokerMetadata
from tests.simulation.cluster.server import SimServer
from tests.simulation.cluster.watch import watch_of
from tests.simulation.dataplane.broker import DataBroker
from tests.simulation.parts import Violation
from tests.simulation.process import Process

if TYPE_CHECKING:
    from tests.simulation.cluster.schedule import ClusterSimulation

LOOK_FOR_LEASE_S = 0.02


def client_address(broker_id: int) -> str:
    """Where a broker listens for clients: what it registers with."""
    return f"localhost:{9_000 + broker_id}"


def inter_node_address(broker_id: int) -> str:
    """Where it listens for other nodes."""
    return f"inter-node:{9_000 + broker_id}"


class ClusterBroker(DataBroker):
    """One life of a broker with its listeners."""

    simulation: ClusterSimulation

    def __init__(self, process: Process) -> None:
        self._metadata = BrokerMetadata(self)
        self._config = _config(cast("ClusterSimulation", process.simulation), process.host.node_id)
        super().__init__(process)
        simulation = self.simulation
        simulation.loops.append(self._loop)
        self.server = SimServer(process, simulation, [RequestBounds()], lambda method: watch_of(self, method))
        self.server.add_insecure_port(client_address(self.broker_id))
        self.inter_node = SimServer(process, simulation)
        self.inter_node.add_insecure_port(inter_node_address(self.broker_id))
        self._add_services()
        for server in (self.server, self.inter_node):
            server.touched = self._touch
            server.failures = self._failures

    def _add_services(self) -> None:
        transactions, groups = self._services
        server = cast(aio.Server, self.server)
        log = LogService(self.registry, self._config, DiskReads(self.executor), HeavyWork(self.executor), self._checks)
        self.server.add_generic_rpc_handlers((log.handlers(),))
        group_pb2_grpc.add_GroupServicer_to_server(groups, server)
        metadata_pb2_grpc.add_MetadataServicer_to_server(MetadataService(self._metadata), server)
        transaction_pb2_grpc.add_TransactionServicer_to_server(transactions, server)
        admin = AdminService(
            self._metadata,
            self._config,
            self.logs,
            self.registry.wait_applied,
            self.registry.partitions,
            self._clock,
        )
        admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
        self.inter_node.add_generic_rpc_handlers((self._marker_service.handlers(),))

    def _checks(self, who: Caller) -> ProducerChecks:
        return ProducerChecks(who, lambda: self.image, self._verifier)

    def new_marker_links(self) -> MarkerLinks:
        """Make the way of markers to other brokers."""
        return MarkerLinks(inter_node_address)

    def new_verifier(self) -> TransactionVerifier:
        """Make the verifier, which asks other brokers which transactions are open."""
        return TransactionVerifier(self.broker_id, self.transactions, inter_node_address, self._clock)

    def new_config(self) -> BrokerConfig:
        """Return the services' configuration."""
        return self._config

    def new_topics(self) -> InternalTopics:
        """Make the creator of internal topics."""
        return InternalTopics(self._metadata, self._config)

    def _touch(self) -> None:
        self.touched = True

    # The cluster

    def begin_heartbeats(self) -> None:
        """It is registered: the inter-node listener is there, that for clients once it has a lease."""
        self.inter_node.start()
        super().begin_heartbeats()
        self._open()

    def _open(self) -> None:
        if self._serves and self._serving_lease.valid():
            self.server.start()
        else:
            self.process.after(LOOK_FOR_LEASE_S, self._open)

    def sees(self, image: MetadataImage) -> None:
        """Take a committed image."""
        before = self.image
        super().sees(image)
        if self.image is not before:
            self._metadata.changed()

    async def propose(self, command: MetadataCommand) -> CommandResult:
        """Ask the controllers."""
        return await self._propose(command)

    async def read_image(self) -> MetadataImage:
        """Return an image that is as new as everything acknowledged before."""
        answered: asyncio.Future[MetadataImage] = self._loop.create_future()

        def done(image: MetadataImage) -> None:
            if not answered.done():
                answered.set_result(image)

        self._requester.read(done)
        return await answered

    def check_loop(self) -> None:
        """Check that no task of the product has failed.

        Raises:
            Violation: one has.
        """
        super().check_loop()
        if self._failures:
            raise Violation(f"{self.host}: a task of the broker failed: {self._failures[0]!r}")


def _config(simulation: ClusterSimulation, node_id: int) -> BrokerConfig:
    return BrokerConfig.from_values(
        {
            "node.id": node_id,
            "listeners": client_address(node_id),
            "log.dirs": "/logs",
            "request.timeout.ms": 2_000,
            "offsets.topic.num.partitions": simulation.offsets_partitions,
            "offsets.topic.replication.factor": 3,
            "min.segment.bytes": 1024,
            "offsets.topic.segment.bytes": 5_000,
            "transaction.state.log.num.partitions": simulation.state_partitions,
            "transaction.state.log.replication.factor": 3,
            "transaction.state.log.segment.bytes": 5_000,
            "transaction.state.log.min.isr": simulation.state_min_isr,
            "fetch.max.bytes": simulation.frame_bytes,
        }
    )
