"""A node's role in the metadata quorum, voter or observer, and its inter-node listener."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from typing import Any, Final, Protocol, TypeVar

import grpc
from grpc import aio

from broker.clock import Clock
from broker.config.config import BrokerConfig
from broker.net.interceptors import NodesOnly
from broker.net.listeners import Listener, why_not
from broker.net.services.metadata import MetadataService
from broker.net.tls import NodeTls
from raftlog._client.security import ChannelTls
from raftlog.errors import BrokerUnavailable, RaftlogError
from raftlog.v1 import metadata_pb2_grpc
from raftmeta.port import MetadataPort
from raftmeta.quorum.config import SERVER_OPTIONS, ControllerOptions, Endpoint, ObserverConfig, QuorumConfig
from raftmeta.quorum.observed_metadata import open_observed
from raftmeta.quorum.voter_metadata import open_quorum

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_WORD_S: Final = 1.0
WORD_EVERY_S: Final = 3.0
"""Seconds between two log lines about what a node waits for."""
INTER_NODE_GRACE_S: Final = 0.1
INTER_NODE_OPTIONS: Final[list[tuple[str, Any]]] = [
    *((name, value) for name, value in SERVER_OPTIONS if name != "grpc.max_send_message_length"),
    ("grpc.max_send_message_length", -1),  # a follower receives each batch in one message, however large
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 20_000),  # without it a dead peer would keep its streams for ever
    ("grpc.keepalive_timeout_ms", 10_000),
]


class NodeMetadata(MetadataPort, Protocol):
    """The metadata of a server, which knows its cluster before it has an image."""

    @property
    def cluster_id(self) -> str:
        """The cluster's id, "" while it is unknown."""
        ...


async def open_metadata(
    config: BrokerConfig,
    executor: Executor,
    clock: Clock,
    on_fatal: Callable[[RaftlogError], None],
    stack: AsyncExitStack,
    services: Sequence[grpc.GenericRpcHandler] = (),
    interceptors: Sequence[aio.ServerInterceptor] = (),
    tls: NodeTls | None = None,
) -> NodeMetadata:
    """Return the metadata of this node, started but not ready yet; `stack` stops it, after handing over leadership.

    The inter-node listener serves `services` besides the quorum's own, all behind `interceptors`.

    Raises:
        RaftlogError: the directory cannot be used, or the inter-node listener cannot be opened.
    """
    voters = {node_id: Endpoint(*endpoint) for node_id, endpoint in config.controller_quorum_voters.items()}
    to_nodes = tls.channels if tls is not None else None
    inter_node = _InterNodeServer(config, interceptors, tls) if config.inter_node_listener is not None else None
    if inter_node is not None:
        stack.push_async_callback(inter_node.stop)
        inter_node.server.add_generic_rpc_handlers(tuple(services))
    if not config.is_controller:
        observed = await open_observed(
            ObserverConfig(
                config.node_id,
                voters,
                cluster_id=config.cluster_id,
                request_timeout_ms=config.request_timeout_ms,
                tls=to_nodes,
            ),
            executor,
        )
        stack.push_async_callback(observed.close)
        if inter_node is not None:
            await inter_node.start()
        await observed.start()
        return observed
    quorum = await open_quorum(_quorum_config(config, voters, to_nodes), executor, clock, on_fatal)
    stack.push_async_callback(quorum.close)
    if inter_node is not None:
        quorum.add_to_server(inter_node.server)
        metadata_pb2_grpc.add_MetadataServicer_to_server(MetadataService(quorum, to_nodes=True), inter_node.server)
        await inter_node.start()
    await quorum.start()
    return quorum


def _quorum_config(config: BrokerConfig, voters: dict[int, Endpoint], tls: ChannelTls | None) -> QuorumConfig:
    return QuorumConfig(
        node_id=config.node_id,
        directory=config.metadata_log_dir,
        cluster_id=config.cluster_id,
        voters=voters,
        snapshot_bytes=config.metadata_log_max_record_bytes_between_snapshots,
        election_timeout_ms=config.controller_quorum_election_timeout_ms,
        request_timeout_ms=config.request_timeout_ms,
        tls=tls,
        controller=ControllerOptions(
            session_timeout_ms=config.broker_session_timeout_ms,
            lease_ms=config.broker_lease_ms,
            auto_leader_rebalance=config.auto_leader_rebalance_enable,
            leader_imbalance_check_interval_ms=config.leader_imbalance_check_interval_ms,
            leader_imbalance_percentage=config.leader_imbalance_per_broker_percentage,
        ),
    )


class _InterNodeServer:
    """The server of the inter-node listener; the constructor binds the port."""

    def __init__(
        self, config: BrokerConfig, interceptors: Sequence[aio.ServerInterceptor], tls: NodeTls | None
    ) -> None:
        """Bind the port. Raises BrokerUnavailable if it cannot be bound."""
        assert config.inter_node_listener is not None, "only a node of a cluster has this server"
        endpoint = Endpoint(*config.inter_node_listener)
        both = config.listener_security_migration
        credentials = None
        self._callers: NodesOnly | None = None
        self._watching: asyncio.Task[None] | None = None
        if tls is not None and (tls.channels is not None or both):
            credentials = tls.inter_node_credentials()
            self._callers = NodesOnly(tls.revoked)
            interceptors = (self._callers, *interceptors)
        self.server = aio.server(interceptors=list(interceptors), options=INTER_NODE_OPTIONS)
        try:
            self._listener = Listener(self.server, endpoint.host, endpoint.port, credentials, both=both)
        except RuntimeError:
            why = why_not(endpoint.host, endpoint.port)
            raise BrokerUnavailable(
                f"cannot listen for other nodes on {endpoint.address}: {why}; is another server using the port, or is "
                "this node running already? Change controller.quorum.voters on all nodes, or inter.node.listener here"
            ) from None

    async def start(self) -> None:
        """Start serving."""
        await self.server.start()
        await self._listener.open()
        if self._callers is not None:
            watch = self._callers.watch(self._listener.end_connections)
            self._watching = asyncio.create_task(watch, name="revoked nodes")

    async def stop(self) -> None:
        """Stop serving, and end all calls."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.server.stop(INTER_NODE_GRACE_S)
        await self._listener.close()


async def until_ready(metadata: MetadataPort, failure: asyncio.Future[None]) -> None:
    """Return when the metadata is ready; until then, log every few seconds what is missing.

    Raises:
        RaftlogError: the error of `failure`.
    """
    await or_failure(metadata.wait_ready(), failure, metadata.waiting_for, "the metadata quorum")
    logger.info(
        "metadata ready",
        extra={
            "event": "metadata_ready",
            "cluster_id": metadata.image.cluster_id,
            "controller_id": metadata.image.controller_id,
            "controller_epoch": metadata.image.controller_epoch,
            "metadata_offset": metadata.image.offset,
        },
    )


async def or_failure(work: Awaitable[T], failure: asyncio.Future[None], missing: Callable[[], str], what: str) -> T:
    """Return the result of `work`, or raise the error of `failure`; meanwhile log every few seconds what is missing."""
    waiting = asyncio.ensure_future(work)
    pause_s = FIRST_WORD_S
    try:
        while not waiting.done():
            await asyncio.wait((waiting, failure), timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                failure.result()
            if not waiting.done():
                lacking = missing()
                logger.warning("waiting for %s%s", what, f": {lacking}" if lacking else "")
                pause_s = WORD_EVERY_S
        return await waiting
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
