"""One broker: what it is made of, how it starts and how it stops.

Start: lock and recover the log directories, load the metadata, open the listener, register, apply the image, serve.
Stop: stop accepting, answer who waits, flush, checkpoint, and mark the shutdown as clean. Parts that were started
are stopped in reverse order, also when the start fails half-way.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Final

from grpc import aio

from broker.clock import Clock, SystemClock
from broker.config import BrokerConfig
from broker.log.group_commit import GroupCommit
from broker.log.manager import LogManager
from broker.log.os_storage import OsStorage
from broker.loop_lag import LoopLagMonitor
from broker.registry import PartitionRegistry
from broker.services.admin import AdminService
from broker.services.bounds import RequestBounds
from broker.services.log import LogService
from broker.services.metadata import MetadataService
from raftlog.errors import BrokerUnavailable, RaftlogError, ShuttingDown
from raftlog.v1 import admin_pb2_grpc, metadata_pb2_grpc, records_pb2
from raftmeta.os_disk import OsDisk
from raftmeta.single_node import SingleNodeMetadata

logger = logging.getLogger(__name__)

DISK_THREADS: Final = 4
"""Threads for fsync and directory work: enough for several log directories to sync at once."""
READ_THREADS: Final = 4
"""Threads for reads that miss the page cache, look-ups and heavy checks: they never hold an fsync up."""
STOP_GRACE_SECONDS: Final = 2.0
HOUSEKEEPING_TICK_S: Final = 0.05
RETRY_INTERVAL_MS: Final = 1_000
"""Between attempts to open partitions that could not be opened: the disk was full, descriptors had run out."""
KEEPALIVE_MS: Final = 20_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000


class BrokerServer:
    """A broker: `start`, `bootstrap` (host:port of the client listener), `stop`."""

    def __init__(self, config: BrokerConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._stack = AsyncExitStack()
        self._failure: asyncio.Future[None] | None = None
        self.bootstrap = ""

    async def start(self) -> None:
        """Come up; ready to serve when this returns.

        Raises:
            RaftlogError: with the reason; nothing is left locked or listening.
        """
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def failed(self) -> None:
        """Return never, or raise what makes it impossible to go on.

        Raises:
            RaftlogError: the metadata can no longer be written.
        """
        assert self._failure is not None, "start comes first"
        await self._failure

    def _fail(self, error: RaftlogError) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def stop(self) -> None:
        """Go down cleanly. May be called once."""
        await self._stack.aclose()

    async def _start(self) -> None:
        config, clock, stack = self._config, self._clock, self._stack
        loop = asyncio.get_running_loop()
        self._failure = loop.create_future()

        disk = ThreadPoolExecutor(DISK_THREADS, thread_name_prefix="disk")
        stack.callback(disk.shutdown)
        reads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="read")
        stack.callback(reads.shutdown)
        loop_lag = LoopLagMonitor(clock)
        loop_lag.start()
        stack.push_async_callback(loop_lag.stop)

        metadata = SingleNodeMetadata(
            OsDisk(config.metadata_log_dir),
            disk,
            clock.now_ms,
            node_id=config.node_id,
            cluster_id=config.cluster_id,
            compact_at_bytes=config.metadata_log_max_record_bytes_between_snapshots,
            on_fatal=self._fail,
        )
        await metadata.start()
        stack.push_async_callback(metadata.close)

        logs = LogManager(OsStorage(), config.log_dirs, config.log_config(), clock)
        await loop.run_in_executor(disk, lambda: self._open_logs(logs, metadata.image.cluster_id))
        group_commit = GroupCommit(disk)

        registry = PartitionRegistry(config.node_id, logs, group_commit, clock, config.topic_defaults, disk)
        logs.on_dir_offline = registry.on_dir_offline
        stack.push_async_callback(self._close_logs, logs, group_commit, disk)

        server = aio.server(
            interceptors=[RequestBounds()],
            options=self._server_options(),
            maximum_concurrent_rpcs=config.max_streams * 2,
        )
        log_service = LogService(registry, config, reads)
        server.add_generic_rpc_handlers((log_service.handlers(),))
        metadata_pb2_grpc.add_MetadataServicer_to_server(MetadataService(metadata), server)
        admin_pb2_grpc.add_AdminServicer_to_server(
            AdminService(metadata, config, logs, clock, registry.wait_applied), server
        )
        host, port = self._listen(server)
        self.bootstrap = f"{host}:{port}"

        await self._register(metadata, host, port)
        stack.callback(metadata.subscribe(registry.on_metadata))
        registry.start(metadata.image)
        stack.push_async_callback(registry.stop)
        await registry.wait_applied(metadata.image.offset)

        await server.start()
        stack.push_async_callback(self._stop_server, server, registry)
        housekeeping = asyncio.create_task(self._housekeep(logs, registry, disk), name="housekeeping")
        stack.push_async_callback(_cancel, housekeeping)
        logger.info(
            "broker ready",
            extra={"node_id": config.node_id, "bootstrap": self.bootstrap, "partitions": len(registry)},
        )

    def _open_logs(self, logs: LogManager, cluster_id: str) -> None:
        """Recover the logs, with a line for every tenth of a long recovery."""
        shown = 0

        def progress(opened: int, total: int, directory: str) -> None:
            nonlocal shown
            if opened * 10 // total > shown and total >= 100:
                shown = opened * 10 // total
                logger.info("recovering logs", extra={"opened": opened, "total": total})

        logs.open(cluster_id=cluster_id, node_id=self._config.node_id, progress=progress)
        for corrupt in logs.corrupt_logs.values():
            logger.error("log %s is damaged and not served: %s", corrupt.directory, corrupt.error)

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
        except RuntimeError as error:
            raise BrokerUnavailable(
                f"cannot listen on {host}:{port}: {error}; is another server using the port? "
                "Change `listeners`, or use port 0 for a free one"
            ) from None
        advertised = self._config.advertised_listener
        return (advertised[0], advertised[1] or bound) if advertised else (host, bound)

    async def _register(self, metadata: SingleNodeMetadata, host: str, port: int) -> None:
        await metadata.propose(
            records_pb2.MetadataCommand(
                proposed_at_ms=self._clock.now_ms(),
                controller_epoch=metadata.image.controller_epoch,
                register_broker=records_pb2.RegisterBrokerCommand(
                    broker_id=self._config.node_id,
                    incarnation_id=uuid.uuid4().bytes,
                    host=host,
                    port=port,
                    rack=self._config.rack,
                ),
            )
        )

    async def _housekeep(self, logs: LogManager, registry: PartitionRegistry, disk: ThreadPoolExecutor) -> None:
        """Flush what flush.ms says; roll, retain, checkpoint every `log.retention.check.interval.ms`."""
        loop = asyncio.get_running_loop()
        next_retry_ms = self._clock.monotonic_ms()
        next_round_ms = self._clock.monotonic_ms() + self._config.log_retention_check_interval_ms
        while True:
            await asyncio.sleep(HOUSEKEEPING_TICK_S)
            for partition in registry.partitions():
                partition.flush_if_due()
            if self._clock.monotonic_ms() >= next_retry_ms:
                next_retry_ms = self._clock.monotonic_ms() + RETRY_INTERVAL_MS
                registry.retry_failed()
            if self._clock.monotonic_ms() < next_round_ms:
                continue
            next_round_ms = self._clock.monotonic_ms() + self._config.log_retention_check_interval_ms
            try:
                await loop.run_in_executor(disk, logs.run_housekeeping_once, self._clock.now_ms())
            except Exception:  # the next round may succeed; the reason is in the log
                logger.exception("housekeeping failed")

    async def _stop_server(self, server: aio.Server, registry: PartitionRegistry) -> None:
        logger.info("broker stopping")
        registry.close_all(ShuttingDown("the broker is stopping; another one, or this one later, will serve"))
        await server.stop(STOP_GRACE_SECONDS)

    async def _close_logs(self, logs: LogManager, group_commit: GroupCommit, disk: ThreadPoolExecutor) -> None:
        await group_commit.close()
        await asyncio.get_running_loop().run_in_executor(disk, logs.close)
        logger.info("broker stopped")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
