"""A node's role as a broker: logs, partitions, heartbeats and the client listener.

Start: recover the logs, bind the port, register, apply the image, send heartbeats, and serve once the controller has
unfenced this broker and granted it a lease. Stop: hand over the leaderships, stop serving, give up the lease, flush,
and mark the shutdown as clean.

Also here: the identity of the broker's lock (`lock_identity`), and the loading of assignors (`load_assignors`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final

from grpc import aio

from broker.clock import Clock
from broker.config.config import BrokerConfig
from broker.config.endpoints import PLAINTEXT, Endpoint
from broker.coordinator.groups.assignors import BUILT_IN, Assignor
from broker.coordinator.groups.coordinators import GroupCoordinators, warn_of_timeouts
from broker.coordinator.internal_topics import AUDIT, InternalTopics
from broker.coordinator.transactions.coordinators import TransactionCoordinators
from broker.coordinator.transactions.marker_links import MarkerLinks
from broker.coordinator.transactions.marker_sender import LocalMarkers, MarkerSender
from broker.coordinator.transactions.producer_ids import ProducerIds
from broker.coordinator.transactions.verifier import ProducerChecks, TransactionVerifier
from broker.coordinator.user_bound import NamedGroups
from broker.descriptors import descriptors, warn_of_few_descriptors
from broker.log.flush import GroupCommit
from broker.log.log_dir import LOCK_FILE
from broker.log.manager import LogManager
from broker.log.segment import SegmentCache
from broker.log.storage import OsStorage
from broker.net.calls import CallLimits
from broker.net.connections import limits_of
from broker.net.interceptors import CallTimer, RequestBounds
from broker.net.listeners import listen_for_clients, server_options
from broker.net.services.admin import AdminService
from broker.net.services.calls import LookUpService
from broker.net.services.groups import GroupService
from broker.net.services.log import LogService
from broker.net.services.markers import MarkerService
from broker.net.services.metadata import MetadataService, image_from
from broker.net.services.node import NodeFacts, NodeService, node_address, pass_on_to
from broker.net.services.security import SecurityService
from broker.net.services.tools import Tools
from broker.net.services.transactions import TransactionService
from broker.net.tls import NodeTls
from broker.observability.group_lag import GroupLagSampler
from broker.observability.health import OK, Health
from broker.observability.leader_offsets import LeaderOffsets
from broker.observability.metrics import (
    BrokerMetrics,
    GroupMetrics,
    IdMetrics,
    LoadMetrics,
    QuotaMetrics,
    SecurityMetrics,
)
from broker.observability.node import Observability
from broker.quotas.disk_reads import READ_THREADS, DiskReads
from broker.quotas.heavy_work import THREADS, HeavyWork
from broker.quotas.manager import Charging, QuotaManager
from broker.replicas.replica_manager import ReplicaManager
from broker.security.audit_topic import AuditTopic
from broker.security.caller import Caller
from broker.security.client_listener import ClientSecurity
from broker.security.permissions import Permissions
from broker.server.housekeeping import housekeep
from broker.server.lease import ServingLease
from broker.server.logging import AUDIT as AUDIT_LOGGER
from broker.server.quorum_role import NodeMetadata, or_failure
from broker.server.registration import HeartbeatOptions, Heartbeats, Registration, register
from broker.server.replication_role import ReplicationRole, address_of
from raftlog._client.connections import open_channel
from raftlog.errors import InvalidConfig, RaftlogError, ShuttingDown
from raftlog.v1 import admin_pb2_grpc, group_pb2_grpc, metadata_pb2_grpc, security_pb2_grpc, transaction_pb2_grpc
from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.image import MetadataImage
from raftmeta.port import MetadataPort
from raftmeta.producer_ids import SECRET_BYTES
from replication.shell.service import ReplicationService
from replication.token_bucket import TokenBucket

if TYPE_CHECKING:
    from broker.kafka.listener import KafkaListener

logger = logging.getLogger(__name__)

DISK_THREADS: Final = 4
"""Threads for fsyncs and directory work: enough for several log directories to sync at once."""

SAY_RECOVERING_EVERY_S: Final = 5.0


async def open_logs(
    disk: Executor, logs: LogManager, cluster_id: str, node_id: int, clock: Clock, health: Health
) -> None:
    """Recover the logs in a thread of `disk`, and log every five seconds how many are done.

    Raises:
        RaftlogError: as `LogManager.open`.
    """
    started_ms = clock.monotonic_ms()
    recover = partial(logs.open, cluster_id=cluster_id, node_id=node_id, progress=health.recovering)
    opening = asyncio.get_running_loop().run_in_executor(disk, recover)
    try:
        while not (await asyncio.wait((opening,), timeout=SAY_RECOVERING_EVERY_S))[0]:
            # The line is logged even if no number has changed: else a step that takes long would look like a hang.
            logger.info("recovering logs", extra={"event": "logs_recovering", **health.recovery})
    finally:
        opening.cancel()  # if the start was cancelled; then no caller asks for the result
    await opening
    logger.info(
        "logs recovered",
        extra={
            "event": "logs_recovered",
            "logs": len(logs.logs()),
            "damaged": len(logs.corrupt_logs),
            "took_ms": round(clock.monotonic_ms() - started_ms),
        },
    )
    for corrupt in logs.corrupt_logs.values():
        logger.error("a log in %s is not served: %s", corrupt.log_dir.path, corrupt.error)


IDENTITY_BYTES: Final = 16
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def lock_identity(log_dir: str, directory_id: str, boot_id: Path = BOOT_ID) -> bytes:
    """Return 16 bytes that two processes share only if both locked this very file under this running kernel.

    A broker that registers has to wait until the lease of the process before it has certainly expired, unless it proves
    that this process is gone, by holding the same lock. The directory's id proves nothing: a copy of the directory has
    the same id, and a volume can move to another machine while the old process runs on. Without the kernel's boot id
    the result is random.
    """
    try:
        kernel = boot_id.read_bytes()
        file = os.stat(Path(log_dir) / LOCK_FILE)
    except OSError:
        return secrets.token_bytes(IDENTITY_BYTES)
    text = f"{directory_id} {file.st_dev} {file.st_ino} ".encode() + kernel
    return hashlib.blake2b(text, digest_size=IDENTITY_BYTES).digest()


ENTRY_POINTS: Final = "raftlog.assignors"


def load_assignors(names: Sequence[str]) -> dict[str, Assignor]:
    """Return the assignors of these names, in this order: built-in ones, or entry points.

    Loads only entry points that `group.consumer.assignors` names, since the operator decides what code runs here.

    Raises:
        InvalidConfig: a name is unknown, or its entry point cannot be loaded.
    """
    return {name: BUILT_IN.get(name) or _load(name) for name in names}


def _load(name: str) -> Assignor:
    found = entry_points(group=ENTRY_POINTS, name=name)
    if not found:
        known = sorted({*BUILT_IN, *entry_points(group=ENTRY_POINTS).names})
        raise InvalidConfig(
            f"group.consumer.assignors: {name!r} is neither a built-in assignor nor an entry point {ENTRY_POINTS}; "
            f"use one of {', '.join(known)}"
        )
    try:
        loaded = next(iter(found)).load()
        assignor: Assignor = loaded() if isinstance(loaded, type) else loaded
        if assignor.name != name or not callable(assignor.assign):
            raise TypeError(f"its name is {assignor.name!r}, or it has no method `assign`")
    except Exception as error:  # third-party code may raise anything
        raise InvalidConfig(f"group.consumer.assignors: the entry point {name!r} cannot be loaded: {error}") from error
    return assignor


def show_broker(
    observed: Observability,
    config: BrokerConfig,
    metadata: MetadataPort,
    registry: ReplicaManager,
    logs: LogManager,
    lease: ServingLease,
    groups: GroupCoordinators,
    transactions: TransactionCoordinators,
    throttles: Callable[[], Mapping[str, TokenBucket]],
) -> None:
    """Register the metrics of a broker's partitions, requests, disks, queues and caches."""
    observed.registry.register(
        BrokerMetrics(
            config.node_id,
            observed.counters,
            lambda: metadata.image,
            registry.partitions,
            logs,
            config.log_dirs,
            lease.valid,
        )
    )
    observed.registry.register(
        LoadMetrics(
            observed.counters,
            registry.partitions,
            {"group": groups.shards, "transaction": transactions.shards},
            throttles,
            logs.segments,
            lambda: max(0, metadata.image.offset - max(0, registry.applied_offset)),
        )
    )


@asynccontextmanager
async def group_lag_shown(
    observed: Observability, config: BrokerConfig, clock: Clock, groups: GroupCoordinators, leaders: LeaderOffsets
) -> AsyncIterator[None]:
    """Show the lag of groups, if `metrics.listener` and the interval are set; close `leaders` at the end."""
    try:
        if config.metrics_listener is None or not config.metrics_group_lag_interval_ms:
            yield
            return
        sampler = GroupLagSampler(groups.groups, leaders, clock, config.metrics_group_lag_interval_ms)
        observed.registry.register(GroupMetrics(lambda: sampler.latest))
        sampler.start()
        try:
            yield
        finally:
            await sampler.close()
    finally:
        await leaders.close()


STOP_GRACE_S: Final = 0.5
"""How long open calls may take to end, after all waiting clients have been answered."""
CONTROLLED_SHUTDOWN_S: Final = 2.0
AUDIT_STOP_S: Final = 1.0
"""How long a broker that stops tries to write the last audit records."""


class BrokerRole:
    """The broker of one node: `start`, then `bootstrap` (host:port of the client listener) and `kafka` (of the one for
    Kafka clients, "" without one); the stack stops it."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        metadata: NodeMetadata,
        replication_service: ReplicationService,
        marker_service: MarkerService,
        look_ups: LookUpService,
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
        self._disk = disk = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="disk")
        # Separate threads, so that reads never delay an fsync.
        self._reads = reads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="read")
        self._disk_reads = DiskReads(reads)
        self._heavy = ThreadPoolExecutor(THREADS, thread_name_prefix="heavy")
        self._heavy_work = HeavyWork(self._heavy)
        self._failure = failure
        self._on_fatal = on_fatal
        self._lease = ServingLease(clock)
        shares = descriptors()
        warn_of_few_descriptors(shares, config.max_partitions_per_broker)
        storage = OsStorage()
        self._logs = LogManager(
            storage,
            config.log_dirs,
            config.log_config(),
            clock,
            cache=SegmentCache(storage, max_segments=shares.sealed_segments),
            producer_limits=config.producer_limits(),
            threads=config.num_recovery_threads_per_data_dir * len(config.log_dirs),
        )
        self._producer_ids = ProducerIds(
            config.node_id,
            metadata.propose,
            lambda: metadata.image,
            partial(image_from, metadata),
            partial(os.urandom, SECRET_BYTES),
        )
        self._group_commit = GroupCommit(disk, observed.counters.flushed)
        self._registry = ReplicaManager(
            config.node_id,
            self._logs,
            self._group_commit,
            clock,
            config.topic_defaults,
            disk,
            self._lease,
            config.min_segment_bytes,
        )
        self._registry.counters = observed.counters
        if observed.tracing is not None:
            self._registry.traces = observed.tracing.partition
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
            most_of_user=config.max_groups_per_user,
        )
        self._local_markers = LocalMarkers(self._registry.find, self._groups)
        self._markers = MarkerSender(
            config.node_id,
            lambda: metadata.image,
            self._local_markers,
            MarkerLinks(self._inter_node_address, to_nodes),
            lambda group_id: self._groups.find(group_id).broker.broker_id,
            charge=lambda user, took_ms: self._quotas.worked(Caller(user), took_ms),
        )
        self._transactions = TransactionCoordinators(
            config.node_id,
            lambda: metadata.image,
            config.transaction_config(),
            self._markers,
            executor=reads,
            clock=clock,
            lease=self._lease,
            most_of_user=config.max_transactional_ids_per_user,
            named=NamedGroups(
                self._groups.LIMIT,
                config.max_groups_per_user,
                kept_ms=config.producer_id_expiration_ms,
                open_ms=config.transaction_max_timeout_ms,
                refused=self._groups.refused,
            ),
        )
        self._verifier = TransactionVerifier(
            config.node_id, self._transactions, self._inter_node_address, clock, to_nodes
        )
        window_ms = config.quota_window_num * config.quota_window_size_seconds * 1_000
        self._connections = limits_of(config, lambda: metadata.image)
        self._calls = CallLimits(
            config.max_streams_per_user,
            config.max_streams_per_ip,
            clock,
            short_rate=config.max_short_stream_rate,
            unused_rate=config.max_unused_stream_rate,
            call_rate=config.max_call_rate,
            refused_rate=config.max_refused_call_rate,
        )
        self._quotas = QuotaManager(lambda: metadata.image, clock, window_ms)
        self._log_service = LogService(
            self._registry, config, self._disk_reads, self._heavy_work, self._producer_checks, self._quotas
        )
        self._registry.on_term += (self._groups.on_term, self._transactions.on_term)
        self._internal_topics = InternalTopics(metadata, config)
        # What both client listeners call, beside the service of the log.
        self._group_service = GroupService(self._groups, self._internal_topics, config, self._verifier, self._calls)
        self._transaction_service = TransactionService(
            self._transactions,
            self._markers,
            self._producer_ids,
            self._internal_topics,
            config,
            lambda: metadata.image,
            self._registry.find,
        )
        self._admin_service = AdminService(
            metadata,
            config,
            self._logs,
            self._registry.wait_applied,
            self._registry.partitions,
            clock,
            self._quotas,
            shares.replicas,
        )
        self._security: ClientSecurity | None = None
        self._broker_epoch: int | None = None
        self._replication: ReplicationRole | None = None
        self._heartbeats: Heartbeats | None = None
        self._controller_epoch = 0
        self.bootstrap = self.kafka = ""

    def _producer_checks(self, who: Caller) -> ProducerChecks:
        return ProducerChecks(who, lambda: self._metadata.image, self._verifier)

    def _inter_node_address(self, broker_id: int) -> str | None:
        return address_of(self._metadata.image, self._config.inter_node_routes, broker_id)

    def _node_address(self, node_id: int) -> str | None:
        return node_address(self._config.controller_quorum_voters, self._inter_node_address, node_id)

    def __len__(self) -> int:
        """Return the number of partitions on this broker."""
        return len(self._registry)

    async def start(self, stack: AsyncExitStack) -> None:
        """Start; the broker serves when this returns. `stack` stops it.

        Raises:
            RaftlogError: the start failed; `stack` stops the parts already started.
        """
        for threads in (self._disk, self._reads, self._heavy):
            stack.callback(threads.shutdown)
        cluster_id = self._metadata.image.cluster_id
        health = self._observed.health
        await open_logs(self._disk, self._logs, cluster_id, self._config.node_id, self._clock, health)
        stack.push_async_callback(self._close_logs)
        self._facts.logs = self._logs

        secure = partial(
            ClientSecurity,
            self._config,
            lambda: self._metadata.image,
            self._clock,
            self._observed.counters,
            None if self._tls is None else self._tls.revoked,
        )
        security = self._security = await asyncio.get_running_loop().run_in_executor(self._disk, secure)
        security_service = SecurityService(
            self._metadata,
            security,
            self._registry.wait_applied,
            has_authorizer=security.authorizer is not None,
            quotas=self._quotas,
        )
        server = self._make_server(security, security_service)
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
        refused = {"raftlog": self._connections.refused}
        self._observed.registry.register(QuotaMetrics(self._quotas.usage, lambda: refused, self._calls.refused))
        self._observed.registry.register(IdMetrics((self._transactions, self._groups)))
        if security.interceptor is not None or self._config.kafka_security_protocol != PLAINTEXT:
            self._observed.registry.register(SecurityMetrics(self._observed.counters, security.count_authenticated))
        listener = listen_for_clients(server, self._config, self._tls, self._connections, self._clock)
        self._calls.end_connection = listener.end_connection
        self._calls.is_connected = listener.is_connected
        if security.interceptor is not None:
            security.interceptor.logged_in = listener.logged_in
            security.interceptor.turn_out = self._calls.turn_out
            security.interceptor.refused = self._calls.refused_stranger
        security.shut_out = self._calls.shut_out
        stack.push_async_callback(listener.close)
        host, port = self._config.advertised_listener or self._config.listener
        port = port or listener.port
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        self.bootstrap = self._facts.client_listener = f"{host}:{port}"

        kafka, kafka_endpoint = None, ("", 0)
        if self._config.kafka_listener is not None:
            # Here: most brokers have no such listener, and its libraries take time and memory.
            from broker.kafka.apis import Services
            from broker.kafka.listener import listen_for_kafka
            from broker.kafka.sasl import door_of

            kafka = listen_for_kafka(
                self._config,
                self._registry,
                Services(self._log_service, self._group_service, self._transaction_service, self._admin_service),
                lambda: self._metadata.image,
                self._disk_reads,
                self._heavy_work,
                self._producer_checks,
                self._verifier,
                security_service,
                door_of(self._config, security, self._tls, self._clock, self._observed.counters),
                self._quotas,
                self._calls,
            )
            refused["kafka"] = kafka.limits.refused
            stack.push_async_callback(kafka.close)
            kafka_host, kafka_port = self._config.advertised_kafka_listener or self._config.kafka_listener
            kafka_endpoint = kafka_host, kafka_port or kafka.port
            self.kafka = "{}:{}".format(*kafka_endpoint)

        broker_epoch = await self._register((host, port), kafka_endpoint)
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
            "the report of offline replicas",
        )
        housekeeping = asyncio.create_task(
            housekeep(self._config, self._clock, self._logs, self._registry, self._disk), name="housekeeping"
        )
        stack.push_async_callback(_cancel, housekeeping)
        stack.push_async_callback(_cancel, asyncio.create_task(security.watch(), name="users"))

        heartbeats = self._start_heartbeats(cluster_id)
        stack.push_async_callback(heartbeats.close)
        stack.push_async_callback(self._leave, server, kafka, heartbeats)
        if self._config.audit_topic_enable:
            await stack.enter_async_context(self._audit_topic())
        await or_failure(heartbeats.wait_serving(), self._failure, self._why_fenced, "the controller's lease")
        await server.start()
        await listener.open()
        if kafka is not None:
            await kafka.open()

    @asynccontextmanager
    async def _audit_topic(self) -> AsyncIterator[None]:
        """Write the audit log into its topic as well; at the end what is left, while this broker still leads."""
        topic = AuditTopic(
            self._config.node_id,
            partial(self._internal_topics.needed, AUDIT),
            self._registry.partitions,
            self._clock.now_ms,
        )
        audit_log = logging.getLogger(AUDIT_LOGGER)
        audit_log.addHandler(topic)
        task = asyncio.create_task(topic.run(), name="audit topic")
        try:
            yield
        finally:
            audit_log.removeHandler(topic)
            await _cancel(task)
            with suppress(TimeoutError):
                async with asyncio.timeout(AUDIT_STOP_S):
                    await topic.write()

    # The client listener

    def _make_server(self, security: ClientSecurity, security_service: SecurityService) -> aio.Server:
        server = aio.server(
            interceptors=self._interceptors(security),
            options=server_options(self._config, self._connections.most),
            maximum_concurrent_rpcs=self._config.max_streams * 2,
        )
        nodes = NodeService(self._facts, pass_on_to(self._node_address, partial(open_channel, tls=self._to_nodes)))
        server.add_generic_rpc_handlers((self._log_service.handlers(), nodes.handlers()))
        group_pb2_grpc.add_GroupServicer_to_server(self._group_service, server)
        tools = Tools(
            lambda: self._observed.health.ready()[0] == OK,
            health=self._config.grpc_health_enable,
            reflection=self._config.grpc_reflection_enable,
        )
        tools.add_to(server)
        metadata_pb2_grpc.add_MetadataServicer_to_server(
            MetadataService(
                self._metadata,
                sasl_mechanisms=self._config.own_mechanisms if security.takes_logins else (),
                methods=tools.methods,
            ),
            server,
        )
        transaction_pb2_grpc.add_TransactionServicer_to_server(self._transaction_service, server)
        admin_pb2_grpc.add_AdminServicer_to_server(self._admin_service, server)
        security_pb2_grpc.add_SecurityServicer_to_server(security_service, server)
        return server

    def _interceptors(self, security: ClientSecurity) -> list[aio.ServerInterceptor]:
        """Return the interceptors, outermost first: the caller is identified before any byte of a request is read."""
        tracing = self._observed.tracing
        identify = [] if security.interceptor is None else [security.interceptor]
        traced = [] if tracing is None else [tracing.calls()]
        permitted = [] if security.authorizer is None else [Permissions(lambda: self._metadata.image)]
        timer = CallTimer(self._observed.counters)
        charging = Charging(self._quotas, self._calls.count_refused)
        return [*identify, self._calls, charging, RequestBounds(), timer, *traced, *permitted]

    # Registration and metadata

    async def _register(self, clients: Endpoint, kafka: Endpoint) -> int:
        """Register with the addresses for clients and for Kafka clients, and return the broker epoch."""
        config = self._config
        inter_node = config.advertised_inter_node_listener or ("", 0)
        working = [path for path in self._logs.directory_ids if path not in self._logs.offline_dirs]
        first_id, *other_ids = (bytes.fromhex(self._logs.directory_ids[path]) for path in working)
        registration = Registration(
            broker_id=config.node_id,
            host=clients[0],
            port=clients[1],
            rack=config.rack,
            directory_id=first_id,
            lock_identity=lock_identity(working[0], self._logs.directory_ids[working[0]]),
            previous_broker_epoch=self._logs.clean_broker_epoch,
            inter_node_host=inter_node[0],
            inter_node_port=inter_node[1],
            other_directory_ids=tuple(other_ids),
            synced_broker_epoch=self._logs.synced_broker_epoch,
            unsynced_topic_ids=self._logs.unsynced_topic_ids,
            kafka_host=kafka[0],
            kafka_port=kafka[1],
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
        await asyncio.get_running_loop().run_in_executor(self._disk, self._logs.serve, broker_epoch)
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
        """Send a heartbeat early if it brings something forward: after a leadership change, or without a lease.

        A broker that is not fenced any more has a lease only once it has said that it has applied that.
        """
        if self._heartbeats is not None and (leaderships_changed or not self._lease.valid()):
            self._heartbeats.kick()

    def why_not_ready(self) -> str:
        """Return why this broker serves no clients at the moment, "" if it does."""
        return "" if self._lease.valid() else f"no lease: {self._why_fenced()}"

    def _why_fenced(self) -> str:
        image = self._metadata.image
        broker = image.brokers.get(self._config.node_id)
        if broker is not None and broker.fenced:
            return f"broker {broker.broker_id} is still fenced; the controller is node {image.controller_id}"
        return self._metadata.waiting_for() or f"controller {image.controller_id} has not granted one yet"

    # Stop

    async def _leave(self, server: aio.Server, kafka: KafkaListener | None, heartbeats: Heartbeats) -> None:
        """Hand over the leaderships, answer waiting clients, stop serving, and only then give up the lease."""
        logger.info("broker stopping", extra={"event": "broker_stopping"})
        hands_over = self._config.controlled_shutdown_enable and not heartbeats.fenced
        if hands_over and not await heartbeats.shut_down(CONTROLLED_SHUTDOWN_S):
            logger.warning("leaderships were not handed over: no controller has confirmed it in time")
        self._registry.close_all(ShuttingDown("the broker is stopping; refresh metadata and try again"))
        if self._replication is not None:
            await self._replication.close()
        await asyncio.gather(server.stop(STOP_GRACE_S), *([] if kafka is None else [kafka.close()]))
        await heartbeats.release()

    async def _close_logs(self) -> None:
        await self._group_commit.close()
        epoch = self._broker_epoch
        if epoch is None:  # not registered, so nothing has changed since the last clean stop
            epoch = self._logs.clean_broker_epoch
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._disk, lambda: self._logs.close(broker_epoch=epoch))
        logger.info("broker stopped", extra={"event": "broker_stopped"})


def why_no_lease(image: MetadataImage, broker_id: int, broker_epoch: int | None) -> str:
    """Return why the image denies this process a lease, "" if it does not."""
    broker = image.brokers.get(broker_id)
    if broker is None:
        return "this broker was unregistered"
    if broker.broker_epoch != broker_epoch:
        return "another process has registered as this broker"
    return "this broker is fenced" if broker.fenced else ""


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
