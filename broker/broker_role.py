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
from functools import partial
from typing import Final

from grpc import aio

from broker.assignor_plugins import load_assignors
from broker.broker_figures import group_lag_shown, show_broker
from broker.clock import Clock
from broker.config import BrokerConfig
from broker.group_coordinators import GroupCoordinators, warn_of_timeouts
from broker.heartbeats import HeartbeatOptions, Heartbeats
from broker.housekeeping import housekeep
from broker.internal_topics import InternalTopics
from broker.lease import ServingLease
from broker.listening import listen_for_clients, server_options
from broker.lock_identity import lock_identity
from broker.log.group_commit import GroupCommit
from broker.log.manager import LogManager
from broker.log.os_storage import OsStorage
from broker.marker_links import MarkerLinks
from broker.marker_sender import MarkerSender
from broker.marker_writing import LocalMarkers
from broker.node_tls import NodeTls
from broker.observability.leader_offsets import LeaderOffsets
from broker.observability.node import Observability
from broker.observability.security_families import SecurityFamilies
from broker.observability.timing import CallTimer
from broker.opening_logs import open_logs
from broker.producer_ids import ProducerIds
from broker.quorum_role import NodeMetadata, or_failure
from broker.registration import Registration, register
from broker.registry import PartitionRegistry
from broker.replication_role import ReplicationRole, address_of
from broker.security.client_listener import ClientSecurity
from broker.security.permissions import Permissions
from broker.services.admin import AdminService
from broker.services.bounds import RequestBounds
from broker.services.groups import GroupService
from broker.services.log import LogService
from broker.services.look_ups import LookUpService
from broker.services.markers import MarkerService
from broker.services.metadata import MetadataService
from broker.services.node import NodeFacts, NodeService, node_address, pass_on_to
from broker.services.security import SecurityService
from broker.services.transactions import TransactionService
from broker.transaction_coordinators import TransactionCoordinators
from broker.transaction_verifier import TransactionVerifier
from raftlog._client.connections import open_channel
from raftlog.errors import RaftlogError, ShuttingDown
from raftlog.v1 import admin_pb2_grpc, group_pb2_grpc, metadata_pb2_grpc, security_pb2_grpc, transaction_pb2_grpc
from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.image import MetadataImage
from replication.shell.service import ReplicationService

logger = logging.getLogger(__name__)

STOP_GRACE_S: Final = 0.5
"""How long calls under way may take to end after everyone who waits has been answered."""
CONTROLLED_SHUTDOWN_S: Final = 2.0


class BrokerRole:
    """The broker of one node. `start`, then `bootstrap` (host:port of the client listener); `stack` ends it."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        metadata: NodeMetadata,
        replication_service: ReplicationService,
        marker_service: MarkerService,
        look_ups: LookUpService,
        disk: ThreadPoolExecutor,
        reads: ThreadPoolExecutor,
        failure: asyncio.Future[None],
        on_fatal: Callable[[RaftlogError], None],
        observed: Observability,
        facts: NodeFacts,
        tls: NodeTls | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._observed = observed
        self._facts = facts
        self._tls = tls
        self._to_nodes = to_nodes = tls.channels if tls is not None else None
        self._metadata = metadata
        self._replication_service = replication_service
        self._marker_service = marker_service
        self._look_ups = look_ups
        self._disk = disk
        self._reads = reads
        self._failure = failure
        self._on_fatal = on_fatal
        self._lease = ServingLease(clock)
        self._logs = LogManager(
            OsStorage(), config.log_dirs, config.log_config(), clock, producer_limits=config.producer_limits()
        )
        self._producer_ids = ProducerIds(config.node_id, metadata.propose)
        self._group_commit = GroupCommit(disk, observed.counters.flushed)
        self._registry = PartitionRegistry(
            config.node_id, self._logs, self._group_commit, clock, config.topic_defaults, disk, self._lease
        )
        self._registry.counters = observed.counters
        if observed.tracing is not None:
            self._registry.traces = observed.tracing.partition
        self._log_service = LogService(self._registry, config, reads)
        self._logs.on_dir_offline = self._registry.on_dir_offline
        warn_of_timeouts(config.group_consumer_session_timeout_ms, config.replica_lag_time_max_ms)
        self._groups = GroupCoordinators(
            config.node_id,
            lambda: metadata.image,
            config.group_config(),
            load_assignors(config.group_consumer_assignors),
            executor=reads,
            clock=clock,
            lease=self._lease,
        )
        self._local_markers = LocalMarkers(self._registry.find, self._groups)
        self._markers = MarkerSender(
            config.node_id,
            lambda: metadata.image,
            self._local_markers,
            MarkerLinks(self._inter_node_address, to_nodes),
            lambda group_id: self._groups.find(group_id).broker.broker_id,
        )
        self._transactions = TransactionCoordinators(
            config.node_id,
            lambda: metadata.image,
            config.transaction_config(),
            self._markers,
            executor=reads,
            clock=clock,
            lease=self._lease,
        )
        self._verifier = TransactionVerifier(
            config.node_id, self._transactions, self._inter_node_address, clock, to_nodes
        )
        self._registry.on_term += (self._groups.on_term, self._transactions.on_term)
        self._internal_topics = InternalTopics(metadata, config)
        self._security: ClientSecurity | None = None
        self._broker_epoch: int | None = None
        self._replication: ReplicationRole | None = None
        self._heartbeats: Heartbeats | None = None
        self._controller_epoch = 0
        self.bootstrap = ""

    def _inter_node_address(self, broker_id: int) -> str | None:
        return address_of(self._metadata.image, self._config.inter_node_routes, broker_id)

    def _node_address(self, node_id: int) -> str | None:
        return node_address(self._config.controller_quorum_voters, self._inter_node_address, node_id)

    def __len__(self) -> int:
        """How many partitions are here."""
        return len(self._registry)

    async def start(self, stack: AsyncExitStack) -> None:
        """Come up; serves when this returns.

        Raises:
            RaftlogError: with the reason; what was started is on `stack`.
        """
        cluster_id = self._metadata.image.cluster_id
        recover = partial(open_logs, self._logs, cluster_id, self._config.node_id, self._clock, self._observed.health)
        await asyncio.get_running_loop().run_in_executor(self._disk, recover)
        stack.push_async_callback(self._close_logs)
        self._facts.logs = self._logs

        secure = partial(
            ClientSecurity, self._config, lambda: self._metadata.image, self._clock, self._observed.counters
        )
        security = self._security = await asyncio.get_running_loop().run_in_executor(self._disk, secure)
        server = self._make_server(security)
        self._observed.health.joining()
        show_broker(
            self._observed,
            self._config,
            self._metadata,
            self._registry,
            self._logs,
            self._lease,
            self._groups,
            self._transactions,
            lambda: {} if self._replication is None else self._replication.throttles(),
        )
        if security.interceptor is not None:
            self._observed.registry.register(
                SecurityFamilies(self._observed.counters, security.interceptor.count_streams)
            )
        listener = listen_for_clients(server, self._config, self._tls)
        stack.push_async_callback(listener.close)
        host, port = self._config.advertised_listener or self._config.listener
        port = port or listener.port
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        self.bootstrap = self._facts.client_listener = f"{host}:{port}"

        broker_epoch = await self._register(host, port)
        replication = self._replication = ReplicationRole(
            self._config,
            self._metadata,
            self._registry,
            self._replication_service,
            self._reads,
            broker_epoch,
            self._to_nodes,
        )
        stack.push_async_callback(replication.close)
        self._producer_ids.serve(broker_epoch)
        stack.callback(self._producer_ids.close)
        self._registry.serve(
            broker_epoch=broker_epoch,
            propose=self._metadata.propose,
            fetchers=replication.fetchers,
            replica_lag_time_max_ms=self._config.replica_lag_time_max_ms,
        )
        stack.callback(self._metadata.subscribe(self._on_metadata))
        stack.callback(self._groups.close)
        stack.push_async_callback(self._markers.close)
        stack.callback(self._transactions.close)
        stack.push_async_callback(self._verifier.close)
        self._marker_service.open(self._local_markers, self._verifier.verify_here)
        stack.callback(self._marker_service.close)
        self._look_ups.open(self._log_service.list_offsets)
        stack.callback(self._look_ups.close)
        leaders = LeaderOffsets(
            self._config.node_id,
            lambda: self._metadata.image,
            self._log_service.list_offsets,
            self._inter_node_address,
            self._to_nodes,
        )
        await stack.enter_async_context(
            group_lag_shown(self._observed, self._config, self._clock, self._groups, leaders)
        )
        stack.push_async_callback(self._internal_topics.close)
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
        stack.push_async_callback(_cancel, asyncio.create_task(security.watch(), name="users"))

        heartbeats = self._start_heartbeats(cluster_id)
        stack.push_async_callback(heartbeats.close)
        stack.push_async_callback(self._leave, server, heartbeats)
        await or_failure(heartbeats.wait_serving(), self._failure, self._why_fenced, "the controller's lease")
        await server.start()
        await listener.open()

    # The client listener

    def _make_server(self, security: ClientSecurity) -> aio.Server:
        server = aio.server(
            interceptors=self._interceptors(security),
            options=server_options(self._config),
            maximum_concurrent_rpcs=self._config.max_streams * 2,
        )
        nodes = NodeService(self._facts, pass_on_to(self._node_address, partial(open_channel, tls=self._to_nodes)))
        server.add_generic_rpc_handlers((self._log_service.handlers(), nodes.handlers()))
        group_pb2_grpc.add_GroupServicer_to_server(
            GroupService(self._groups, self._internal_topics, self._config, self._verifier), server
        )
        metadata_pb2_grpc.add_MetadataServicer_to_server(MetadataService(self._metadata), server)
        transaction_pb2_grpc.add_TransactionServicer_to_server(
            TransactionService(
                self._transactions,
                self._markers,
                self._producer_ids,
                self._internal_topics,
                self._config,
                lambda: self._metadata.image,
                self._registry.find,
            ),
            server,
        )
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
        security_pb2_grpc.add_SecurityServicer_to_server(
            SecurityService(
                self._metadata,
                security,
                self._registry.wait_applied,
                has_authorizer=security.authorizer is not None,
            ),
            server,
        )
        return server

    def _interceptors(self, security: ClientSecurity) -> list[aio.ServerInterceptor]:
        """Return them from the outermost on: who calls is known before anything of a request is read."""
        tracing = self._observed.tracing
        identify = [] if security.interceptor is None else [security.interceptor]
        traced = [] if tracing is None else [tracing.calls()]
        permitted = [] if security.authorizer is None else [Permissions(lambda: self._metadata.image)]
        return [*identify, RequestBounds(), CallTimer(self._observed.counters), *traced, *permitted]

    # Part of the cluster

    async def _register(self, host: str, port: int) -> int:
        """Register, and return the broker epoch."""
        config = self._config
        inter_node = config.advertised_inter_node_listener or ("", 0)
        working = [path for path in self._logs.directory_ids if path not in self._logs.offline_dirs]
        first_id, *other_ids = (bytes.fromhex(self._logs.directory_ids[path]) for path in working)
        registration = Registration(
            broker_id=config.node_id,
            host=host,
            port=port,
            rack=config.rack,
            directory_id=first_id,
            lock_identity=lock_identity(working[0], self._logs.directory_ids[working[0]]),
            previous_broker_epoch=self._logs.clean_broker_epoch,
            inter_node_host=inter_node[0],
            inter_node_port=inter_node[1],
            other_directory_ids=tuple(other_ids),
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
        logger.info(
            "broker registered",
            extra={"event": "broker_registered", "broker_id": config.node_id, "broker_epoch": broker_epoch},
        )
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
            logger.info(
                "another controller is active",
                extra={
                    "event": "controller_changed",
                    "controller_id": image.controller_id,
                    "controller_epoch": image.controller_epoch,
                },
            )
            self._heartbeats.follow(image.controller_epoch)
        if self._security is not None:
            self._security.on_metadata(image)
        if self._replication is not None:
            self._replication.on_metadata(image)
        self._registry.on_metadata(image, records)
        self._groups.on_metadata(image, records)
        self._transactions.on_metadata(image, records)

    def _kick(self, leaderships_changed: bool) -> None:
        """Tell the controller early what it waits for: a leadership that was let go, or a fenced broker catching up."""
        if self._heartbeats is not None and (leaderships_changed or self._heartbeats.fenced):
            self._heartbeats.kick()

    def why_not_ready(self) -> str:
        """Return why clients are not served at the moment; "" when they are."""
        return "" if self._lease.valid() else f"no lease: {self._why_fenced()}"

    def _why_fenced(self) -> str:
        image = self._metadata.image
        broker = image.brokers.get(self._config.node_id)
        if broker is not None and broker.fenced:
            return f"broker {broker.broker_id} is fenced still; the controller is node {image.controller_id}"
        return self._metadata.waiting_for() or f"controller {image.controller_id} has not granted one yet"

    # The end

    async def _leave(self, server: aio.Server, heartbeats: Heartbeats) -> None:
        """Hand over, answer who waits, stop serving, and only then let the lease go."""
        logger.info("broker stopping", extra={"event": "broker_stopping"})
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
        logger.info("broker stopped", extra={"event": "broker_stopped"})


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
