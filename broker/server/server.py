"""One server process: its roles, its start and its stop.

Start: first the controller, so that a quorum can form, then the broker. Stop: first the broker, which hands over its
leaderships while the quorum still stands, then the controller. Started parts stop in reverse order, also when the start
fails half-way or is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Final

from broker.clock import Clock, SystemClock
from broker.config.config import BrokerConfig
from broker.net.services.calls import LookUpService
from broker.net.services.markers import MarkerService
from broker.net.services.node import NodeFacts, NodeService
from broker.net.tls import node_tls
from broker.observability.metrics import CertificateMetrics, ElectionCounter, NodeMetrics
from broker.observability.node import Observability, traced_metadata
from broker.server.broker_role import BrokerRole
from broker.server.quorum_role import open_metadata, until_ready
from raftlog import __version__
from raftlog.errors import RaftlogError
from raftmeta.quorum.voter_metadata import QuorumMetadata
from replication.shell.service import ReplicationService

logger = logging.getLogger(__name__)

METADATA_THREADS: Final = 1
"""Separate, so that a commit of the quorum never queues behind the recovery of logs or a slow data disk."""


class NodeServer:
    """A node: `start`, then `bootstrap` (for clients), `kafka`, `inter_node`, `metrics` ("" if absent), and `stop`."""

    def __init__(self, config: BrokerConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._stack = AsyncExitStack()
        self._failure: asyncio.Future[None] | None = None
        self._ready = False
        self.bootstrap = ""
        self.kafka = ""
        self.inter_node = ""
        self.metrics = ""

    async def start(self) -> None:
        """Start; the node serves when this returns. May be cancelled.

        Raises:
            RaftlogError: the start failed; nothing is left locked or listening.
        """
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def failed(self) -> None:
        """Wait for a fatal error and raise it; never return.

        Raises:
            RaftlogError: the metadata can no longer be written, or this broker no longer belongs to the cluster.
        """
        assert self._failure is not None, "start comes first"
        await self._failure

    def _fail(self, error: RaftlogError) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def stop(self) -> None:
        """Stop cleanly. Call it once."""
        await self._stack.aclose()

    async def _start(self) -> None:
        config, clock, stack = self._config, self._clock, self._stack
        failure = self._failure = asyncio.get_running_loop().create_future()
        failure.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks the exception as seen

        metadata_disk = ThreadPoolExecutor(METADATA_THREADS, thread_name_prefix="metadata")
        stack.callback(metadata_disk.shutdown)
        observed = Observability(config, clock)
        stack.push_async_callback(lambda: observed.close(report=self._ready))
        observed.open()
        self.metrics = observed.address

        tls = node_tls(config)
        facts = NodeFacts(config, clock, observed.loop_lag, observed.health)
        facts.metrics_listener = self.metrics
        facts.tls = tls
        replication = ReplicationService()
        markers = MarkerService()
        look_ups = LookUpService()
        services = (replication.handlers(), markers.handlers(), look_ups.handlers()) if config.is_broker else ()
        services = (NodeService(facts).handlers(), *services)
        tracing = observed.tracing
        traced = () if tracing is None else (tracing.calls(),)
        metadata = await open_metadata(config, metadata_disk, clock, self._fail, stack, services, traced, tls)
        voter = metadata if isinstance(metadata, QuorumMetadata) else None
        facts.image, facts.voter = lambda: metadata.image, voter
        observed.registry.register(
            NodeMetrics(
                config.node_id, __version__, lambda: metadata.image, observed.loop_lag, voter, observed.counters
            )
        )
        if tls is not None:
            observed.registry.register(CertificateMetrics(lambda: tls.expires_ms / 1_000))
        if voter is not None:
            voter.time_commits(observed.counters.commit_seconds.observe)
            elections = ElectionCounter(observed.counters, lambda: voter.is_active_controller, voter.image)
            stack.callback(voter.subscribe(elections))
        if config.inter_node_listener is not None:
            self.inter_node = facts.inter_node_listener = "{}:{}".format(*config.inter_node_listener)
        observed.health.why_not = metadata.waiting_for
        await until_ready(metadata, failure)

        partitions = 0
        if config.is_broker:
            role = BrokerRole(
                config,
                clock,
                metadata if tracing is None else traced_metadata(metadata, tracing),
                replication,
                markers,
                look_ups,
                failure,
                self._fail,
                observed,
                facts,
                tls,
            )
            await role.start(stack)
            self.bootstrap, self.kafka, partitions = role.bootstrap, role.kafka, len(role)
            observed.health.why_not = role.why_not_ready
        stack.callback(observed.health.stopping)
        observed.health.serving()
        self._ready = True
        fields: dict[str, object] = {
            "event": "node_ready",
            "node_id": config.node_id,
            "roles": ",".join(config.process_roles),
        }
        if config.is_broker:
            fields |= {"bootstrap": self.bootstrap, "partitions": partitions}
        if self.kafka:
            fields["kafka"] = self.kafka
        if self.inter_node:
            fields["inter_node"] = self.inter_node
        if self.metrics:
            fields["metrics"] = self.metrics
        logger.info("node ready", extra=fields)
