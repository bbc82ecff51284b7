"""A metadata quorum in one process: real gRPC on loopback, real directories, one event loop."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from grpc import aio

from broker.clock import SystemClock
from broker.net.services.metadata import MetadataService
from raftlog.errors import RaftlogError
from raftlog.testing.layout import free_ports as free_ports
from raftlog.v1 import metadata_pb2_grpc, records_pb2
from raftlog.v1.controller_pb2 import HeartbeatRequest, HeartbeatResponse
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.features import supported_ranges
from raftmeta.port import HeartbeatStream, MetadataPort
from raftmeta.quorum import links
from raftmeta.quorum import links as exchange
from raftmeta.quorum.config import SERVER_OPTIONS, ControllerOptions, Endpoint, ObserverConfig, QuorumConfig
from raftmeta.quorum.observed_metadata import ObservedMetadata, open_observed
from raftmeta.quorum.voter_metadata import QuorumMetadata, open_quorum
from tests.support.metadata import uuid_of

WAIT_S = 60.0
LASTING_MS = 60_000.0
CLUSTER_ID = "test-cluster"

_T = TypeVar("_T")


async def eventually(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait until something is so."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 # what is waited for announces nothing
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from None


class Controller:
    """One node of the cluster, while it runs."""

    def __init__(self, metadata: QuorumMetadata, server: aio.Server | None) -> None:
        self.metadata = metadata
        self.server = server


class QuorumCluster:
    """Voters by id. Use as an async context manager; `start` starts those that are wanted.

    `lasting`: the leader elected at the start leads for as long as it runs, even if the machine pauses.
    """

    def __init__(
        self,
        directory: Path,
        voters: int = 3,
        *,
        options: ControllerOptions | None = None,
        lasting: bool = False,
    ) -> None:
        self.directory = directory
        self.endpoints: dict[int, Endpoint] = {
            node_id: Endpoint("127.0.0.1", port) for node_id, port in enumerate(free_ports(voters), 1)
        }
        self.options = options or ControllerOptions()
        self.lasting = lasting
        self.running: dict[int, Controller] = {}
        self.observers: list[ObservedMetadata] = []
        self.fatal: list[tuple[int, RaftlogError]] = []
        self.executor = ThreadPoolExecutor(4, thread_name_prefix="disk")
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> QuorumCluster:
        if self.lasting:  # streams that break for silence would call for an election
            patience = self._stack.enter_context(pytest.MonkeyPatch.context())
            for module in (links, exchange):
                patience.setattr(module, "SILENCE_S", LASTING_MS / 1_000)
        return self

    async def __aexit__(self, *error: object) -> None:
        async with self._stack:
            for observer in self.observers:
                await observer.close()
            for node_id in list(self.running):
                await self.kill(node_id)
            self.executor.shutdown()

    def config(self, node_id: int) -> QuorumConfig:
        """Return the configuration of a node."""
        config = QuorumConfig(
            node_id=node_id,
            directory=str(self.directory / f"node-{node_id}"),
            cluster_id=CLUSTER_ID,
            voters=self.endpoints if len(self.endpoints) > 1 else {},
            request_timeout_ms=30_000,
            controller=self.options,
        )
        return replace(config, election_timeout_ms=LASTING_MS) if self.lasting else config

    async def start(
        self,
        *node_ids: int,
        cluster_id: str = CLUSTER_ID,
        voters: Mapping[int, Endpoint] | None = None,
        listen: Endpoint | None = None,
        directory: str | None = None,
    ) -> None:
        """Start nodes, all by default."""
        for node_id in node_ids or self.endpoints:
            config = replace(self.config(node_id), cluster_id=cluster_id)
            if voters is not None:
                config = replace(config, voters=voters)
            if directory is not None:
                config = replace(config, directory=directory)
            self.running[node_id] = await self.start_one(config, listen or self.endpoints[node_id])
        if self.lasting:
            await self._elect()

    async def _elect(self) -> None:
        """Have a node campaign at once, and again until one leads: the others wait for far longer."""
        pause_s = 0.05
        async with asyncio.timeout(WAIT_S):
            while not self.active_ids():
                one = self.metadata(min(self.running))
                one._node._consensus.election_deadline_s = -math.inf
                one._driver.kick()
                await asyncio.sleep(pause_s)
                pause_s *= 1.3

    async def start_one(self, config: QuorumConfig, listen: Endpoint) -> Controller:
        """Start a node that is configured in any way."""

        def fatal(error: RaftlogError) -> None:
            self.fatal.append((config.node_id, error))

        metadata = await open_quorum(config, self.executor, SystemClock(), fatal, rng=random.Random())
        server = None
        if config.voters:
            server = aio.server(options=SERVER_OPTIONS)
            metadata.add_to_server(server)
            metadata_pb2_grpc.add_MetadataServicer_to_server(MetadataService(metadata, to_nodes=True), server)
            assert server.add_insecure_port(listen.address) == listen.port, (
                f"the server could not listen at {listen.address}"
            )
            await server.start()
        await metadata.start()
        return Controller(metadata, server)

    async def observe(self, node_id: int = 9) -> ObservedMetadata:
        """Start an observer."""
        config = ObserverConfig(node_id, self.endpoints, CLUSTER_ID, request_timeout_ms=30_000)
        observer = await open_observed(config, self.executor, rng=random.Random(node_id))
        self.observers.append(observer)
        await observer.start()
        return observer

    async def kill(self, node_id: int) -> None:
        """End a node without a goodbye."""
        await self._end(node_id, hand_over=False)

    async def stop(self, node_id: int) -> None:
        """End a node in an orderly way."""
        await self._end(node_id, hand_over=True)

    async def _end(self, node_id: int, *, hand_over: bool) -> None:
        node = self.running.pop(node_id)
        if hand_over:
            await node.metadata.step_down()
        if node.server is not None:
            await node.server.stop(None)
        await node.metadata.close(hand_over=False)

    def metadata(self, node_id: int) -> QuorumMetadata:
        """Return a running node."""
        return self.running[node_id].metadata

    def active_ids(self) -> list[int]:
        """Return the nodes that believe to be the active controller."""
        return [node_id for node_id, node in self.running.items() if node.metadata.is_active_controller]

    async def active(self) -> int:
        """Wait for an active controller and return its id: of several, one of which is deposed, the latest one's."""
        await eventually(lambda: bool(self.active_ids()), "an active controller")
        return max(self.active_ids(), key=lambda node_id: self.metadata(node_id).image.controller_epoch)

    async def follower(self) -> int:
        """Return a running node that is not the active controller."""
        active = await self.active()
        return next(node_id for node_id in self.running if node_id != active)


def register_command(broker_id: int = 1, incarnation: int = 1) -> MetadataCommand:
    """Register a broker."""
    return MetadataCommand(
        register_broker=records_pb2.RegisterBrokerCommand(
            broker_id=broker_id,
            incarnation_id=uuid_of(incarnation),
            host="127.0.0.1",
            port=9092,
            directory_id=uuid_of(1_000 + broker_id),
            lock_identity=uuid_of(3_000 + broker_id),
            features=supported_ranges(),
        )
    )


def create_topic_command(name: str, topic_id: int, replication_factor: int = 1) -> MetadataCommand:
    """Create a topic of two partitions."""
    return MetadataCommand(
        create_topic=records_pb2.CreateTopicCommand(
            name=name, topic_id=uuid_of(topic_id), partitions=2, replication_factor=replication_factor
        )
    )


class HandBroker:
    """Heartbeats of one broker, by hand."""

    def __init__(self, port: MetadataPort, broker_id: int) -> None:
        self.port = port
        self.broker_id = broker_id
        self.broker_epoch = -1
        self.sequence = 0
        self.stream: HeartbeatStream | None = None
        self.applied_at_most: int | None = None

    async def register(self, incarnation: int = 1) -> None:
        """Register, as a process of its own for each incarnation."""
        result = await self.port.propose(register_command(self.broker_id, incarnation))
        self.broker_epoch = result.broker_epoch

    async def beat(self, *, wants_shutdown: bool = False, released: bool = False) -> HeartbeatResponse:
        """Send one heartbeat and return its answer; a broken stream is replaced."""
        while True:
            try:
                if self.stream is None:
                    self.stream = await self.port.open_heartbeats()
                self.sequence += 1
                await self.stream.send(
                    HeartbeatRequest(
                        broker_id=self.broker_id,
                        broker_epoch=self.broker_epoch,
                        sequence=self.sequence,
                        applied_offset=min(self.port.image.offset, self.applied_at_most or self.port.image.offset),
                        cluster_id=CLUSTER_ID,
                        wants_shutdown=wants_shutdown,
                        lease_released=released,
                    )
                )
                while (answer := await self.stream.receive()).sequence != self.sequence:
                    pass
            except RaftlogError as error:
                if self.stream is not None:
                    await self.stream.close()
                self.stream = None
                if not error.retriable:
                    raise
                await asyncio.sleep(0.02)
            else:
                return answer

    async def until_leased(self) -> HeartbeatResponse:
        """Send heartbeats until one is answered with a lease."""
        async with asyncio.timeout(WAIT_S):
            while True:
                answer = await self.beat()
                if answer.lease_ms > 0:
                    return answer
                await asyncio.sleep(0.02)


def run(scenario: Callable[[], Awaitable[_T]], timeout_s: float = 3 * WAIT_S) -> _T:
    """Run a scenario to its end."""

    async def limited() -> _T:
        async with asyncio.timeout(timeout_s):
            return await scenario()

    return asyncio.run(limited())
