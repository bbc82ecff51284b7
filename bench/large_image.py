"""A hundred thousand partitions in one process: `python -m bench.large_image TOPICS PARTITIONS` prints JSON.

One voter, and an observer that watches it over gRPC, both here, so that the memory is that of both together.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import uvloop
from grpc import aio

from bench.controller_process import quantile
from broker.__main__ import SWITCH_INTERVAL_S
from broker.clock import SystemClock
from broker.services.metadata import MetadataService
from raftlog.v1 import metadata_pb2_grpc
from raftlog.v1.controller_pb2 import HeartbeatRequest
from raftlog.v1.records_pb2 import CreateTopicCommand, MetadataCommand, RegisterBrokerCommand
from raftmeta.client_sessions import ClientSessions
from raftmeta.port import MetadataPort
from raftmeta.quorum.config import SERVER_OPTIONS, ControllerOptions, Endpoint, ObserverConfig, QuorumConfig
from raftmeta.quorum.observed_metadata import open_observed
from raftmeta.quorum.voter_metadata import QuorumMetadata, open_quorum
from raftmeta.state import CapturedState, MetadataState

BROKERS = 3
REPLICAS = 3
PROPOSERS = 32
MEASURED_TOPICS = 100


def _create(name: str, partitions: int) -> MetadataCommand:
    return MetadataCommand(
        create_topic=CreateTopicCommand(
            name=name, topic_id=uuid.uuid4().bytes, partitions=partitions, replication_factor=REPLICAS
        )
    )


async def _bring_brokers_up(metadata: QuorumMetadata) -> None:
    for broker_id in range(1, BROKERS + 1):
        register = RegisterBrokerCommand(
            broker_id=broker_id,
            incarnation_id=uuid.uuid4().bytes,
            host="127.0.0.1",
            port=1,
            directory_id=broker_id.to_bytes(16, "big"),
            lock_identity=broker_id.to_bytes(16, "big"),
        )
        epoch = (await metadata.propose(MetadataCommand(register_broker=register))).broker_epoch
        heartbeats = await metadata.open_heartbeats()
        sequence = 0
        while metadata.image.brokers[broker_id].fenced:
            sequence += 1
            await heartbeats.send(
                HeartbeatRequest(
                    broker_id=broker_id,
                    broker_epoch=epoch,
                    sequence=sequence,
                    applied_offset=metadata.image.offset,
                    cluster_id=metadata.cluster_id,
                )
            )
            await heartbeats.receive()
            await asyncio.sleep(0.01)


async def _create_all(metadata: MetadataPort, topics: int, partitions: int) -> None:
    numbers = iter(range(topics))

    async def propose() -> None:
        for number in numbers:
            await metadata.propose(_create(f"topic{number:06}", partitions))

    await asyncio.gather(*(propose() for _ in range(PROPOSERS)))


async def _create_one_by_one(metadata: MetadataPort) -> list[float]:
    took_ms = []
    for number in range(MEASURED_TOPICS):
        begun = time.perf_counter()
        await metadata.propose(_create(f"late{number}", 10))
        took_ms.append((time.perf_counter() - begun) * 1e3)
    return took_ms


@contextlib.asynccontextmanager
async def _voter(directory: str, executor: ThreadPoolExecutor) -> AsyncIterator[QuorumMetadata]:
    options = ControllerOptions(session_timeout_ms=600_000, auto_leader_rebalance=False)
    config = QuorumConfig(node_id=1, directory=directory, cluster_id="bench", controller=options)

    def fatal(error: BaseException) -> None:
        raise SystemExit(f"the voter failed: {error}")

    metadata = await open_quorum(config, executor, SystemClock(), fatal)
    await metadata.start()
    await metadata.wait_ready()
    try:
        yield metadata
    finally:
        await metadata.close()


def _snapshot(metadata: MetadataPort) -> tuple[float, float, int]:
    """Return the seconds to encode and to load a snapshot, and its bytes."""
    image = metadata.image
    begun = time.perf_counter()
    state = CapturedState(image, image.offset, bytes(16), ClientSessions().capture())
    data = MetadataState().encode(state)
    encoded = time.perf_counter()
    MetadataState().restore(data, image.offset, image.controller_epoch)
    return encoded - begun, time.perf_counter() - encoded, len(data)


async def _watch(metadata: QuorumMetadata, executor: ThreadPoolExecutor) -> float:
    """Return the seconds until an observer that knows nothing has the whole image."""
    server = aio.server(options=SERVER_OPTIONS)
    metadata.add_to_server(server)
    metadata_pb2_grpc.add_MetadataServicer_to_server(MetadataService(metadata), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    config = ObserverConfig(node_id=9, controllers={1: Endpoint("127.0.0.1", port)}, cluster_id="bench")
    observer = await open_observed(config, executor)
    begun = time.perf_counter()
    await observer.start()
    await observer.barrier()
    took_s = time.perf_counter() - begun
    await observer.close()
    await server.stop(None)
    return took_s


async def measure(topics: int, partitions: int) -> dict[str, float]:
    """Return the figures."""
    executor = ThreadPoolExecutor(2)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="raftlog-bench-") as directory:
        path = str(Path(directory) / "metadata")
        async with _voter(path, executor) as metadata:
            await _bring_brokers_up(metadata)
            begun = time.perf_counter()
            await _create_all(metadata, topics, partitions)
            figures["created_s"] = time.perf_counter() - begun
            took_ms = await _create_one_by_one(metadata)
            figures |= {"create_p50_ms": quantile(took_ms, 0.5), "create_max_ms": max(took_ms)}
            figures["watch_s"] = await _watch(metadata, executor)
            figures["rss_mb"] = psutil.Process().memory_info().rss / 1e6
            figures["encode_s"], figures["load_s"], figures["snapshot_bytes"] = _snapshot(metadata)
        begun = time.perf_counter()
        async with _voter(path, executor):
            figures["restart_s"] = time.perf_counter() - begun
    executor.shutdown()
    return figures


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as a server does
    print(json.dumps(uvloop.run(measure(int(sys.argv[1]), int(sys.argv[2])))))
