"""A node's part as a broker: logs, partitions, heartbeats and the client listener.

Start: recover the logs, take the port, register, apply the image, send heartbeats, and serve once the controller has
unfenced this broker and given it a lease. Stop: have others take over, stop serving, give the lease up, flush, and
mark the shutdown as clean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Final

from grpc import aio

from broker.clock import Clock
from broker.config import BrokerConfig
from broker.heartbeats import HeartbeatOptions, Heartbeats
from broker.housekeeping import housekeep
from broker.lease import ServingLease
from broker.listening import why_not
from broker.lock_identity import lock_identity
from broker.log.group_commit import GroupCommit
from broker.log.manager import LogManager
from broker.log.os_storage import OsStorage
from broker.quorum_role import NodeMetadata, or_failure
from broker.registration import Registration, register
from broker.registry import PartitionRegistry
from broker.replication_role import ReplicationRole
from broker.services.admin import AdminService
from broker.services.bounds import RequestBounds
from broker.services.log import LogService
from broker.services.metadata import MetadataService
from raftlog.errors import BrokerUnavailable, RaftlogError, ShuttingDown
from raftlog.v1 import admin_pb2_grpc, metadata_pb2_grpc
from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.image import MetadataImage
from replication.shell.service import ReplicationService

logger = logging.getLogger(__name__)

STOP_GRACE_S: Final = 0.5
"""How long calls under way may take to end after everyone who waits has been answered."""
CONTROLLED_SHUTDOWN_S: Final = 2.0
KEEPALIVE_MS: Final = 20_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000


class BrokerRole:
    """The broker of one node. `start`, then `bootstrap` (host:port of the client listener); `stack` ends it."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        metadata: NodeMetadata,
        replication_service: ReplicationService,
        disk: ThreadPoolExecutor,
        reads: ThreadPoolExecutor,
        failure: asyncio.Future[None],
        on_fatal: Callable[[RaftlogError], None],
    ) -> None:
        self._config = config
        self._clock = clock
        self._metadata = metadata
        self._replication_service = replication_service
        self._disk = disk
        self._reads = reads
        self._failure = failure
        self._on_fatal = on_fatal
        self._lease = ServingLease(clock)
        self._logs = LogManager(OsStorage(), config.log_dirs, config.log_config(), clock)
        self._group_commit = GroupCommit(disk)
        self._registry = PartitionRegistry(
            config.node_id, self._logs, self._group_commit, clock, config.topic_defaults, disk, self._lease
        )
        self._logs.on_dir_offline = self._registry.on_dir_offline
        self._broker_epoch: int | None = None
        self._replication: ReplicationRole | None = None
        self._heartbeats: Heartbeats | None = None
        self._controller_epoch = 0
        self.bootstrap = ""

    def __len__(self) -> int:
        """How many partitions are here."""
        return len(self._registry)

    async def start(self, stack: AsyncExitStack) -> None:
        """Come up; serves when this returns.

        Raises:
            RaftlogError: with the reason; what was started is on `stack`.
        """
        cluster_id = self._metadata.image.cluster_id
        await asyncio.get_running_loop().run_in_executor(self._disk, self._open_logs, cluster_id)
        stack.push_async_callback(self._close_logs)

        server = self._make_server()
        host, port = self._listen(server)
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        self.bootstrap = f"{host}:{port}"

        broker_epoch = await self._register(host, port)
        replication = self._replication = ReplicationRole(
            self._config, self._metadata, self._registry, self._replication_service, self._reads, broker_epoch
        )
        stack.push_async_callback(replication.close)
        self._registry.serve(
            broker_epoch=broker_epoch,
            propose=self._metadata.propose,
            fetchers=replication.fetchers,
            replica_lag_time_max_ms=self._config.replica_lag_time_max_ms,
        )
        stack.callback(self._metadata.subscribe(self._on_metadata))
        self._registry.start(self._metadata.image)
        stack.push_async_callback(self._registry.stop)
        replication.open()
        self._registry.on_applied = self._kick
        await self._registry.wait_applied(self._metadata.image.offset)
        await or_failure(
            self._registry.report_offline_replicas(),
            self._failure,
            lambda: self._metadata.waiting_for() or "the controller to commit it",
            "the report of replicas that cannot be used here",
        )
        housekeeping = asyncio.create_task(
            housekeep(self._config, self._clock, self._logs, self._registry, self._disk), name="housekeeping"
        )
        stack.push_async_callback(_cancel, housekeeping)

        heartbeats = self._start_heartbeats(cluster_id)
        stack.push_async_callback(heartbeats.close)
        stack.push_async_callback(self._leave, server, heartbeats)
        await or_failure(heartbeats.wait_serving(), self._failure, self._why_fenced, "the controller's lease")
        await server.start()

    def _open_logs(self, cluster_id: str) -> None:
        """Recover the logs, with a line for every tenth of a long recovery."""
        shown = 0

        def progress(opened: int, total: int, directory: str) -> None:
            nonlocal shown
            if opened * 10 // total > shown and total >= 100:
                shown = opened * 10 // total
                logger.info("recovering logs", extra={"opened": opened, "total": total})

        self._logs.open(cluster_id=cluster_id, node_id=self._config.node_id, progress=progress)
        for corrupt in self._logs.corrupt_logs.values():
            logger.error("log %s is damaged and not served: %s", corrupt.directory, corrupt.error)

    # The client listener

    def _make_server(self) -> aio.Server:
        server = aio.server(
            interceptors=[RequestBounds()],
            options=self._server_options(),
            maximum_concurrent_rpcs=self._config.max_streams * 2,
        )
        server.add_generic_rpc_handlers((LogService(self._registry, self._config, self._reads).handlers(),))
        metadata_pb2_grpc.add_MetadataServicer_to_server(MetadataService(self._metadata), server)
        admin_pb2_grpc.add_AdminServicer_to_server(
            AdminService(
                self._metadata,
                self._config,
                self._logs,
                self._registry.wait_applied,
                self._registry.partitions,
                self._clock,
            ),
            server,
        )
        return server

    def _server_options(self) -> list[tuple[str, int]]:
        limit = self._config.socket_request_max_bytes
        return [
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            ("grpc.max_concurrent_streams", self._config.max_streams),
            ("grpc.so_reuseport", 0),  # a second server on the same port fails instead of stealing connections
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),  # finds dead clients, which would hold a stream for ever
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]

    def _listen(self, server: aio.Server) -> tuple[str, int]:
        host, port = self._config.listener
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            raise BrokerUnavailable(
                f"cannot listen on {host}:{port}: {why_not(host, port)}; is another server using the port? "
                "Change `listeners`, or use port 0 for a free one"
            ) from None
        advertised = self._config.advertised_listener
        return (advertised[0], advertised[1] or bound) if advertised else (host, bound)

    # Part of the cluster

    async def _register(self, host: str, port: int) -> int:
        """Register, and return the broker epoch."""
        config = self._config
        inter_node = config.advertised_inter_node_listener or ("", 0)
        working = [path for path in self._logs.directory_ids if path not in self._logs.offline_dirs]
        registration = Registration(
            broker_id=config.node_id,
            host=host,
            port=port,
            rack=config.rack,
            directory_id=bytes.fromhex(self._logs.directory_ids[working[0]]),
            lock_identity=lock_identity(working[0], self._logs.directory_ids[working[0]]),
            previous_broker_epoch=self._logs.clean_broker_epoch,
            inter_node_host=inter_node[0],
            inter_node_port=inter_node[1],
        )
        awaited = ""

        def on_wait(what: str) -> None:
            nonlocal awaited
            awaited = what

        broker_epoch = await or_failure(
            register(self._metadata, registration, config.broker_session_timeout_ms, on_wait),
            self._failure,
            lambda: self._metadata.waiting_for() or awaited or "the controller to commit it",
            "this broker's registration",
        )
        self._broker_epoch = broker_epoch
        logger.info("broker registered", extra={"broker_id": config.node_id, "broker_epoch": broker_epoch})
        return broker_epoch

    def _start_heartbeats(self, cluster_id: str) -> Heartbeats:
        config = self._config
        assert self._broker_epoch is not None, "a broker without an epoch has not registered"
        options = HeartbeatOptions(
            broker_id=config.node_id,
            broker_epoch=self._broker_epoch,
            cluster_id=cluster_id,
            interval_ms=config.broker_heartbeat_interval_ms,
            answer_timeout_ms=config.broker_lease_ms + 2 * config.broker_heartbeat_interval_ms,
        )
        self._heartbeats = Heartbeats(
            self._metadata, self._lease, options, lambda: self._registry.applied_offset, self._on_fatal
        )
        self._controller_epoch = self._metadata.image.controller_epoch
        self._heartbeats.start()
        return self._heartbeats

    def _on_metadata(self, image: MetadataImage, records: Sequence[MetadataRecord] | None) -> None:
        against = why_no_lease(image, self._config.node_id, self._broker_epoch)
        if against:
            self._lease.revoke(against)
        if self._heartbeats is not None and image.controller_epoch > self._controller_epoch:
            self._controller_epoch = image.controller_epoch
            self._heartbeats.follow(image.controller_epoch)
        if self._replication is not None:
            self._replication.on_metadata(image)
        self._registry.on_metadata(image, records)

    def _kick(self, leaderships_changed: bool) -> None:
        """Tell the controller early what it waits for: a leadership that was let go, or a fenced broker catching up."""
        if self._heartbeats is not None and (leaderships_changed or self._heartbeats.fenced):
            self._heartbeats.kick()

    def _why_fenced(self) -> str:
        image = self._metadata.image
        broker = image.brokers.get(self._config.node_id)
        if broker is not None and broker.fenced:
            return f"broker {broker.broker_id} is fenced still; the controller is node {image.controller_id}"
        return self._metadata.waiting_for() or f"controller {image.controller_id} has not granted one yet"

    # The end

    async def _leave(self, server: aio.Server, heartbeats: Heartbeats) -> None:
        """Hand over, answer who waits, stop serving, and only then let the lease go."""
        logger.info("broker stopping")
        hands_over = self._config.controlled_shutdown_enable and not heartbeats.fenced
        if hands_over and not await heartbeats.shut_down(CONTROLLED_SHUTDOWN_S):
            logger.warning("leaderships were not handed over: no controller has said so in time")
        self._registry.close_all(ShuttingDown("the broker is stopping; another one, or this one later, will serve"))
        if self._replication is not None:
            await self._replication.close()
        await server.stop(STOP_GRACE_S)
        await heartbeats.release()

    async def _close_logs(self) -> None:
        await self._group_commit.close()
        epoch = self._broker_epoch
        if epoch is None:  # it never came to register, so nothing has changed since the last clean stop
            epoch = self._logs.clean_broker_epoch
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._disk, lambda: self._logs.close(broker_epoch=epoch))
        logger.info("broker stopped")


def why_no_lease(image: MetadataImage, broker_id: int, broker_epoch: int | None) -> str:
    """Return why a process may have no lease by what the image says of it; "" when nothing does."""
    broker = image.brokers.get(broker_id)
    if broker is None:
        return "this broker was unregistered"
    if broker.broker_epoch != broker_epoch:
        return "another process has registered as this broker"
    return "this broker is fenced" if broker.fenced else ""


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
