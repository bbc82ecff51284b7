"""The metadata quorum: commits, deaths of controllers, idle CPU time, and images of 100,000 partitions.

`python -m bench.quorum controller ID VOTERS DIRECTORY` is a bare controller: a voter without other roles. It reads
commands from standard input and answers each with a line of JSON:

    status             {"active": bool, "offset": int}
    commits SECONDS N  commits as fast as N concurrent proposers can: {"commits_per_s": ..., "p50_ms": ..., ...}

`python -m bench.quorum image TOPICS PARTITIONS` runs a voter with that many partitions, and an observer that watches it
over gRPC, in one process, so that its memory is that of both; it prints JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import psutil
import uvloop
from grpc import aio

from bench.report import Report, quantile
from broker.__main__ import SWITCH_INTERVAL_S
from broker.clock import SystemClock
from broker.net.services.metadata import MetadataService
from raftlog.v1 import metadata_pb2_grpc, records_pb2
from raftlog.v1.controller_pb2 import HeartbeatRequest
from raftlog.v1.records_pb2 import CreateTopicCommand, MetadataCommand, RegisterBrokerCommand
from raftmeta.features import supported_ranges
from raftmeta.port import MetadataPort
from raftmeta.quorum.channel import ControllerChannel
from raftmeta.quorum.config import SERVER_OPTIONS, ControllerOptions, Endpoint, ObserverConfig, QuorumConfig
from raftmeta.quorum.observed_metadata import open_observed
from raftmeta.quorum.voter_metadata import QuorumMetadata, open_quorum
from raftmeta.state import CapturedState, ClientSessions, MetadataState

BROKER_ID = 1


def parse_voters(text: str) -> dict[int, Endpoint]:
    """Return the voters in "1@host:port,2@host:port"."""
    voters = {}
    for item in text.split(","):
        node_id, _, address = item.partition("@")
        host, _, port = address.rpartition(":")
        voters[int(node_id)] = Endpoint(host, int(port))
    return voters


def register() -> records_pb2.MetadataCommand:
    """Return the command that registers the broker of `allocate`."""
    return records_pb2.MetadataCommand(
        register_broker=records_pb2.RegisterBrokerCommand(
            broker_id=BROKER_ID,
            incarnation_id=b"bench" + bytes(11),
            host="127.0.0.1",
            port=1,
            directory_id=bytes(16),
            features=supported_ranges(),
        )
    )


def allocate(broker_epoch: int) -> records_pb2.MetadataCommand:
    """Return a small command that always changes the image."""
    return records_pb2.MetadataCommand(
        allocate_producer_ids=records_pb2.AllocateProducerIdsCommand(
            broker_id=BROKER_ID, broker_epoch=broker_epoch, new_secret=bytes(32)
        )
    )


async def commits(metadata: MetadataPort, seconds: float, proposers: int) -> dict[str, float]:
    """Commit for `seconds`, and return the measurements."""
    epoch = (await metadata.propose(register())).broker_epoch
    took_ms: list[float] = []
    until = time.perf_counter() + seconds

    async def propose() -> None:
        while (begun := time.perf_counter()) < until:
            await metadata.propose(allocate(epoch))
            took_ms.append((time.perf_counter() - begun) * 1e3)

    begun = time.perf_counter()
    await asyncio.gather(*(propose() for _ in range(proposers)))
    return {
        "commits_per_s": len(took_ms) / (time.perf_counter() - begun),
        "p50_ms": quantile(took_ms, 0.5),
        "p99_ms": quantile(took_ms, 0.99),
    }


async def _answer(metadata: QuorumMetadata, words: Sequence[str]) -> dict[str, float]:
    match words:
        case ["status"]:
            return {"active": metadata.is_active_controller, "offset": metadata.image.offset}
        case ["commits", seconds, proposers]:
            return await commits(metadata, float(seconds), int(proposers))
        case _:
            raise SystemExit(f"unknown command {words}")


async def serve(node_id: int, voters: dict[int, Endpoint], directory: str) -> None:
    """Run until standard input ends."""
    executor = ThreadPoolExecutor(2)
    config = QuorumConfig(node_id=node_id, directory=directory, cluster_id="bench", voters=voters)

    def fatal(error: BaseException) -> None:
        raise SystemExit(f"controller {node_id} failed: {error}")

    metadata = await open_quorum(config, executor, SystemClock(), fatal)
    server = aio.server(options=SERVER_OPTIONS)
    metadata.add_to_server(server)
    server.add_insecure_port(voters[node_id].address)
    await server.start()
    await metadata.start()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(await _answer(metadata, line.decode().split())), flush=True)
    await server.stop(None)
    await metadata.close()
    executor.shutdown()


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
            features=supported_ranges(),
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
    """Return the seconds until a new observer has the whole image."""
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
    """Return the measurements of an image of this size."""
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


VOTERS: Final = 3
COMMITS: Final = 2_000
LOAD_SECONDS: Final = 5
IN_FLIGHT: Final = 64
DEATHS: Final = 20
IDLE_SECONDS: Final = 10
LARGE_IMAGES: Final = ((1_000, 100), (100_000, 1))
"""Numbers of topics, and of partitions of each."""


class Controllers:
    """Three bare controllers, by id."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            sockets = (first, second, third)
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            self.voters = ",".join(
                f"{node_id}@127.0.0.1:{each.getsockname()[1]}" for node_id, each in enumerate(sockets, 1)
            )
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, node_id: int) -> None:
        """Start one."""
        command = [sys.executable, "-m", "bench.quorum", "controller", str(node_id), self.voters]
        self.processes[node_id] = subprocess.Popen(
            [*command, str(self._directory / str(node_id))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self._directory / f"{node_id}.log").open("a"),
            text=True,
        )

    def ask(self, node_id: int, command: str) -> Any:
        """Send a command, and return its answer."""
        process = self.processes[node_id]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(command + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def active(self) -> int:
        """Wait for an active controller, and return its id."""
        while True:
            for node_id in self.processes:
                if self.ask(node_id, "status")["active"]:
                    return node_id
            time.sleep(0.02)

    def kill(self, node_id: int) -> None:
        """Kill -9."""
        process = self.processes.pop(node_id)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """End all."""
        for node_id in list(self.processes):
            self.kill(node_id)


def run(report: Report) -> None:
    """Measure."""
    with tempfile.TemporaryDirectory(prefix="raftlog-bench-") as directory:
        controllers = Controllers(Path(directory))
        try:
            for node_id in range(1, VOTERS + 1):
                controllers.start(node_id)
            _measure(controllers, report)
        finally:
            controllers.stop()
    for topics, partitions in LARGE_IMAGES:
        _measure_large_image(topics, partitions, report)


def _measure_large_image(topics: int, partitions: int, report: Report) -> None:
    command = [sys.executable, "-m", "bench.quorum", "image", str(topics), str(partitions)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    figures = json.loads(done.stdout)
    what = f"{topics:,} topics of {partitions}"
    for key, name in (("encode_s", "snapshot"), ("load_s", "load"), ("watch_s", "watch it whole")):
        report.add("image", f"{what}: {name}", f"{figures[key]:.1f} s", "below 5 s", figures[key] < 5)
    p50_ms, worst_ms = figures["create_p50_ms"], figures["create_max_ms"]
    report.add(
        "image", f"{what}: create a topic", f"p50 {p50_ms:.1f} ms, worst {worst_ms:.0f} ms", "below 20 ms", p50_ms < 20
    )
    rss_mb = figures["rss_mb"]
    report.add("image", f"{what}: voter and observer", f"{rss_mb:.0f} MB", "below 1 GB", rss_mb < 1000)


def _measure(controllers: Controllers, report: Report) -> None:
    active = controllers.active()
    time.sleep(1)
    p50_ms, p99_ms = asyncio.run(_one_at_a_time(controllers))
    report.add("quorum", "commit through gRPC, p50", f"{p50_ms:.2f} ms", "below 1.5 ms", p50_ms < 1.5)
    report.add("quorum", "commit through gRPC, p99", f"{p99_ms:.2f} ms")
    load = controllers.ask(active, f"commits {LOAD_SECONDS} {IN_FLIGHT}")
    rate = load["commits_per_s"]
    report.add("quorum", f"commits, {IN_FLIGHT} in flight", f"{rate:,.0f}/s", "at least 15,000/s", rate >= 15_000)
    report.add("quorum", f"commit, {IN_FLIGHT} in flight", f"p50 {load['p50_ms']:.1f}, p99 {load['p99_ms']:.1f} ms")
    _measure_idle(controllers, active, report)
    took_s = asyncio.run(_deaths(controllers))
    half = quantile(took_s, 0.5)
    report.add("quorum", f"first commit after kill -9, p50 of {DEATHS}", f"{half:.2f} s", "below 0.3 s", half < 0.3)
    report.add("quorum", "first commit after kill -9, slowest", f"{max(took_s):.2f} s")


def _channel(controllers: Controllers) -> ControllerChannel:
    return ControllerChannel(1, parse_voters(controllers.voters), lambda: "bench")


async def _one_at_a_time(controllers: Controllers) -> tuple[float, float]:
    channel = _channel(controllers)
    epoch = (await channel.propose(register())).broker_epoch
    took_ms = []
    for _ in range(COMMITS):
        begun = time.perf_counter()
        await channel.propose(allocate(epoch))
        took_ms.append((time.perf_counter() - begun) * 1e3)
    await channel.close()
    return quantile(took_ms, 0.5), quantile(took_ms, 0.99)


def _measure_idle(controllers: Controllers, active: int, report: Report) -> None:
    time.sleep(1)
    processes = {node_id: psutil.Process(process.pid) for node_id, process in controllers.processes.items()}
    before = {node_id: sum(process.cpu_times()[:2]) for node_id, process in processes.items()}
    time.sleep(IDLE_SECONDS)
    shares = {
        node_id: (sum(process.cpu_times()[:2]) - before[node_id]) / IDLE_SECONDS * 100
        for node_id, process in processes.items()
    }
    leader, follower = shares[active], max(share for node_id, share in shares.items() if node_id != active)
    report.add("quorum", "idle CPU, leader", f"{leader:.1f} %", "below 2 %", leader < 2)
    report.add("quorum", "idle CPU, follower", f"{follower:.1f} %", "below 2 %", follower < 2)


async def _deaths(controllers: Controllers) -> list[float]:
    channel = _channel(controllers)
    epoch = (await channel.propose(register())).broker_epoch
    took_s = []
    for _ in range(DEATHS):
        active = await asyncio.to_thread(controllers.active)
        await channel.propose(allocate(epoch))
        begun = time.perf_counter()
        controllers.kill(active)
        await channel.propose(allocate(epoch))
        took_s.append(time.perf_counter() - begun)
        controllers.start(active)
        await asyncio.sleep(1.5)
    await channel.close()
    return took_s


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["controller", node_id, voters, directory]:
            logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
            uvloop.run(serve(int(node_id), parse_voters(voters), directory))
        case ["image", topics, partitions]:
            sys.setswitchinterval(SWITCH_INTERVAL_S)  # as a server does
            print(json.dumps(uvloop.run(measure(int(topics), int(partitions)))))
        case other:
            sys.exit(f"unknown arguments {other}")
