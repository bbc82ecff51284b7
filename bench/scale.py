"""What a controller does for many brokers, measured with up to 300 of them, and what that means for 1,000.

One controller runs in a process of its own, with the real services. The brokers are the parts that burden a
controller: a registration, heartbeats every 300 ms, and a watch of the metadata; they share a few processes. The
figures are CPU time of the controller, which other work on the machine changes little. The row for 1,000 brokers is
arithmetic on them: `docs/quorum.md` says what breaks first.

    python -m bench.scale controller DIRECTORY PORT
    python -m bench.scale brokers PORT FIRST COUNT
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import psutil
import uvloop
from grpc import aio

from bench.quorum import allocate
from bench.report import Report
from broker.__main__ import SWITCH_INTERVAL_S
from broker.clock import SystemClock
from broker.net.services.metadata import MetadataService
from raftlog.errors import RaftlogError
from raftlog.v1 import metadata_pb2_grpc
from raftlog.v1.controller_pb2 import HeartbeatRequest
from raftlog.v1.records_pb2 import MetadataCommand, RegisterBrokerCommand
from raftmeta.features import supported_ranges
from raftmeta.quorum.config import SERVER_OPTIONS, Endpoint, ObserverConfig, QuorumConfig
from raftmeta.quorum.observed_metadata import ObservedMetadata, open_observed
from raftmeta.quorum.voter_metadata import open_quorum

NUMBERS: Final = (30, 100, 300)
"""Of brokers."""
IN_A_PROCESS: Final = 50
HEARTBEAT_S: Final = 0.3
IDLE_S: Final = 15
CHANGES: Final = 200
MODEL: Final = 1_000
VOTERS: Final = 3
"""Controllers of the model: the active one takes all heartbeats; the watches divide among all."""


# The controller's process


async def controller(directory: str, port: int) -> None:
    """Serve as the only voter; `changes N` on standard input commits N changes, one after the other."""
    executor = ThreadPoolExecutor(2)
    config = QuorumConfig(node_id=1, directory=directory, cluster_id="bench")

    def fatal(error: BaseException) -> None:
        raise SystemExit(f"the controller failed: {error}")

    metadata = await open_quorum(config, executor, SystemClock(), fatal)
    server = aio.server(options=SERVER_OPTIONS)
    metadata.add_to_server(server)
    metadata_pb2_grpc.add_MetadataServicer_to_server(MetadataService(metadata, to_nodes=True), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await metadata.start()
    await metadata.wait_ready()
    print(json.dumps("ready"), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        _, broker = min(metadata.image.brokers.items())
        for _ in range(int(line.split()[1])):
            command = allocate(broker.broker_epoch)
            command.allocate_producer_ids.broker_id = broker.broker_id
            await metadata.propose(command)
            await asyncio.sleep(0.01)  # each change reaches the watchers by itself
        print(json.dumps(metadata.image.offset), flush=True)
    await metadata.close()


# The brokers' processes


class Broker:
    """The parts of a broker that a controller hears of."""

    def __init__(self, metadata: ObservedMetadata, broker_id: int) -> None:
        self.metadata = metadata
        self.leased_s = 0.0
        """When it last got a lease."""
        self._id = broker_id
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        register = RegisterBrokerCommand(
            broker_id=self._id,
            incarnation_id=uuid.uuid4().bytes,
            host="127.0.0.1",
            port=1,
            directory_id=self._id.to_bytes(16, "big"),
            lock_identity=self._id.to_bytes(16, "big"),
            features=supported_ranges(),
        )
        epoch = (await self.metadata.propose(MetadataCommand(register_broker=register))).broker_epoch
        sequence = 0
        while True:
            try:
                stream = await self.metadata.open_heartbeats()
                while True:
                    begun_s = time.monotonic()
                    sequence += 1
                    await stream.send(
                        HeartbeatRequest(
                            broker_id=self._id,
                            broker_epoch=epoch,
                            sequence=sequence,
                            applied_offset=self.metadata.image.offset,
                            cluster_id="bench",
                        )
                    )
                    if (await stream.receive()).lease_ms:
                        self.leased_s = time.monotonic()
                    await asyncio.sleep(max(0.0, HEARTBEAT_S - (time.monotonic() - begun_s)))
            except RaftlogError as error:
                if not error.retriable:
                    raise
                await asyncio.sleep(0.05)


async def brokers(port: int, first: int, count: int) -> None:
    """Run brokers; each line of standard input asks for a wait until all have a lease after a moment, or an offset."""
    executor = ThreadPoolExecutor(2)
    made = []
    for broker_id in range(first, first + count):
        config = ObserverConfig(broker_id, {1: Endpoint("127.0.0.1", port)}, cluster_id="bench")
        metadata = await open_observed(config, executor)
        await metadata.start()
        made.append(Broker(metadata, broker_id))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        match line.decode().split():
            case ["leases", since_s]:
                while min(each.leased_s for each in made) <= float(since_s):  # noqa: ASYNC110 - a measurement
                    await asyncio.sleep(0.005)
            case ["offset", offset]:
                while min(each.metadata.image.offset for each in made) < int(offset):  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.005)
        print(json.dumps(time.monotonic()), flush=True)


# The measurement


class Process:
    """A child that answers lines of text with lines of JSON."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "bench.scale", *arguments]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def say(self, line: str) -> None:
        """Send a line."""
        assert self.child.stdin is not None
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()

    def hear(self) -> Any:
        """Return the next answer."""
        assert self.child.stdout is not None
        return json.loads(self.child.stdout.readline())

    def cpu_s(self) -> float:
        """Return the CPU time that it has used."""
        return float(sum(psutil.Process(self.child.pid).cpu_times()[:2]))

    def kill(self) -> None:
        """Kill -9."""
        self.child.kill()
        self.child.wait()


def _all(crowd: list[Process], line: str) -> float:
    """Say a line to all and wait for their answers; return the last one, a moment."""
    for each in crowd:
        each.say(line)
    return max(float(each.hear()) for each in crowd)


def measure(number: int) -> dict[str, float]:
    """Return the figures for so many brokers."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="raftlog-bench-") as directory:
        path = str(Path(directory) / "metadata")
        lead = Process("controller", path, port)
        crowd: list[Process] = []
        try:
            lead.hear()
            begun_s = time.monotonic()
            crowd += [
                Process("brokers", port, str(first), str(min(IN_A_PROCESS, number + 1 - first)))
                for first in range(1, number + 1, IN_A_PROCESS)
            ]
            figures["joined_s"] = _all(crowd, "leases 0") - begun_s
            time.sleep(1)
            used_s = lead.cpu_s()
            time.sleep(IDLE_S)
            idle_s = lead.cpu_s() - used_s
            figures["heartbeat_us"] = idle_s / (number * IDLE_S / HEARTBEAT_S) * 1e6
            used_s, begun_s = lead.cpu_s(), time.monotonic()
            lead.say(f"changes {CHANGES}")
            _all(crowd, f"offset {lead.hear()}")
            share = (time.monotonic() - begun_s) / IDLE_S  # of the heartbeats meanwhile
            figures["change_us"] = (lead.cpu_s() - used_s - idle_s * share) / CHANGES / number * 1e6
            figures["memory_mb"] = psutil.Process(lead.child.pid).memory_full_info().uss / 1e6
            lead.kill()
            killed_s = time.monotonic()
            lead = Process("controller", path, port)
            lead.hear()
            figures["restarted_s"] = time.monotonic() - killed_s
            used_s = lead.cpu_s()
            figures["leased_s"] = _all(crowd, f"leases {time.monotonic()}") - killed_s
            figures["back_cpu_ms"] = (lead.cpu_s() - used_s) / number * 1e3
        finally:
            for each in (lead, *crowd):
                each.kill()
    return figures


def run(report: Report) -> None:
    """Measure by numbers of brokers, and calculate for MODEL."""
    figures: dict[str, float] = {}
    for number in NUMBERS:
        figures = measure(number)
        report.add(
            "scale",
            f"{number} brokers, one controller",
            f"{figures['heartbeat_us']:.0f} us of CPU for a heartbeat, {figures['change_us']:.0f} us for a change at "
            f"each watcher, {figures['memory_mb']:.0f} MB; all joined in {figures['joined_s']:.1f} s",
        )
        report.add(
            "scale",
            f"{number} brokers, the controller killed and started again",
            f"serves after {figures['restarted_s']:.1f} s, all brokers have leases after {figures['leased_s']:.1f} s; "
            f"{figures['back_cpu_ms']:.1f} ms of CPU for each that comes back",
        )
    heartbeats = MODEL / HEARTBEAT_S * figures["heartbeat_us"] / 1e6
    watches = MODEL / VOTERS * figures["change_us"] / 1e6
    report.add(
        "scale",
        f"{MODEL:,} brokers, {VOTERS} controllers, calculated",
        f"heartbeats take {heartbeats:.0%} of a core; a change takes {watches * 1e3:.0f} ms at each controller, so at "
        f"most {max(0.0, 1 - heartbeats) / watches:.0f} changes a second; {MODEL * figures['back_cpu_ms'] / 1e3:.1f} s "
        "of CPU until all are back after a failover",
    )


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as a server does
    match sys.argv[1:]:
        case ["controller", where, number]:
            uvloop.run(controller(where, int(number)))
        case ["brokers", number, first, count]:
            uvloop.run(brokers(int(number), int(first), int(count)))
        case other:
            sys.exit(f"unknown arguments {other}")
