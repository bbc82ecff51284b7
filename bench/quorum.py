"""The metadata quorum: three controller processes on loopback, commits, deaths, and what idling costs."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil

from bench.controller_process import allocate, parse_voters, quantile, register
from bench.report import Report
from raftmeta.quorum.channel import ControllerChannel

VOTERS: Final = 3
COMMITS: Final = 2_000
LOAD_SECONDS: Final = 5
IN_FLIGHT: Final = 64
DEATHS: Final = 20
IDLE_SECONDS: Final = 10
LARGE_IMAGES: Final = ((1_000, 100), (100_000, 1))
"""Topics, and partitions of each."""


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
        command = [sys.executable, "-m", "bench.controller_process", str(node_id), self.voters]
        self.processes[node_id] = subprocess.Popen(
            [*command, str(self._directory / str(node_id))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self._directory / f"{node_id}.log").open("a"),
            text=True,
        )

    def ask(self, node_id: int, command: str) -> Any:
        """Give a command and return the answer."""
        process = self.processes[node_id]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(command + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def active(self) -> int:
        """Wait for the active controller and return its id."""
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
    command = [sys.executable, "-m", "bench.large_image", str(topics), str(partitions)]
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
