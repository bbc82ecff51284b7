"""Many small clients: 32 and 100 producers in one process, each with one record in flight, RF=3 and acks=all.

The ceiling is a bare gRPC stream for each producer, a leader and two followers (`bench/ceiling.py`), by turns with the
brokers. On a machine that does other work too, records per second mean little, so every row has what hardly depends on
that: CPU time of each process and wake-ups of threads (voluntary context switches) per record.

    python -m bench.small raftlog|ceiling ADDRESS TOPIC PRODUCERS RECORDS    the client's process
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import psutil
from grpc import aio

from bench import ceiling
from bench.produce import UNSAFE, address, ceiling_servers
from bench.report import Report, quantile
from raftlog import Admin
from raftlog.aio import Producer
from raftlog.testing import Cluster

BROKERS: Final = 3
PRODUCERS: Final = (1, 32, 100)
RECORDS: Final = 3_000
"""Records of one run; with one producer a third of them."""
ROUNDS: Final = 3
VALUE: Final = os.urandom(1_000)
SHARE: Final = 0.8
"""The target: the share of the ceiling's records per second."""

Send = Callable[[int], Awaitable[None]]
"""Sends one record of a producer and returns once it is acknowledged."""


# The client's process


async def _senders(stack: AsyncExitStack, kind: str, where: str, topic: str, count: int) -> Send:
    """Connect `count` producers, to brokers or to the ceiling."""
    if kind == "raftlog":
        producers = [await stack.enter_async_context(Producer(where)) for _ in range(count)]

        async def send(number: int) -> None:
            await (await producers[number].send(topic, VALUE))

        return send
    channel = await stack.enter_async_context(aio.insecure_channel(where, options=ceiling.UNLIMITED))
    calls: list[Any] = [channel.stream_stream(ceiling.METHOD)() for _ in range(count)]
    data = ceiling.message(len(VALUE))

    async def send_bare(number: int) -> None:
        await calls[number].write(data)
        await calls[number].read()

    return send_bare


async def client(kind: str, where: str, topic: str, count: int, records: int) -> None:
    """Connect, say so, wait for a line, send, and print the latencies as JSON; end with standard input."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        send = await _senders(stack, kind, where, topic, count)

        async def one_by_one(number: int, of_each: int) -> list[float]:
            latencies_ms = []
            for _ in range(of_each):
                begun_s = time.perf_counter()
                await send(number)
                latencies_ms.append((time.perf_counter() - begun_s) * 1e3)
            return latencies_ms

        await asyncio.gather(*(one_by_one(number, 5) for number in range(count)))  # warms up
        print("ready", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        begun_s = time.perf_counter()
        each = await asyncio.gather(*(one_by_one(number, records // count) for number in range(count)))
        seconds = time.perf_counter() - begun_s
        latencies_ms = sorted(latency for latencies in each for latency in latencies)
        result = {
            "records": len(latencies_ms),
            "seconds": seconds,
            "p50_ms": quantile(latencies_ms, 0.5),
            "p99_ms": quantile(latencies_ms, 0.99),
        }
        print(json.dumps(result), flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)


# The processes


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that a process has used so far, or between two readings."""

    cpu_s: float
    wake_ups: int

    @staticmethod
    def of(pid: int) -> Usage:
        """Return the CPU time of a process and how often its threads have waited."""
        process = psutil.Process(pid)
        times = process.cpu_times()
        waits = 0
        for thread in process.threads():
            try:
                with open(f"/proc/{pid}/task/{thread.id}/status") as status:
                    waits += sum(int(line.split()[1]) for line in status if line.startswith("voluntary_"))
            except FileNotFoundError:  # the thread has ended
                pass
        return Usage(times.user + times.system, waits)

    def since(self, before: Usage) -> Usage:
        """Return the resources used since `before`."""
        return Usage(self.cpu_s - before.cpu_s, self.wake_ups - before.wake_ups)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: rate, latencies and, by process, CPU microseconds and wake-ups per record."""

    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: Mapping[str, float]
    wake_ups: Mapping[str, float]


def measure(arguments: list[str], servers: Mapping[str, int]) -> Measured:
    """Run a client's process, with the dialogue of `client`, beside servers, by name; return its figures."""
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pids = {**servers, "client": process.pid}
        ready = process.stdout.readline()
        assert ready == "ready\n", f"the client's process must say 'ready', but said {ready!r}"
        before = {name: Usage.of(pid) for name, pid in pids.items()}
        process.stdin.write("go\n")
        process.stdin.flush()
        result = json.loads(process.stdout.readline())
        used = {name: Usage.of(pid).since(before[name]) for name, pid in pids.items()}
        process.stdin.close()
    count = result["records"]
    return Measured(
        count / result["seconds"],
        result["p50_ms"],
        result["p99_ms"],
        {name: usage.cpu_s / count * 1e6 for name, usage in used.items()},
        {name: usage.wake_ups / count for name, usage in used.items()},
    )


def middle(runs: list[Measured]) -> Measured:
    """Return the median of each figure."""

    def by_process(figures: list[Mapping[str, float]]) -> dict[str, float]:
        return {name: median(each[name] for each in figures) for name in figures[0]}

    return Measured(
        median(run.per_s for run in runs),
        median(run.p50_ms for run in runs),
        median(run.p99_ms for run in runs),
        by_process([run.cpu_us for run in runs]),
        by_process([run.wake_ups for run in runs]),
    )


def shown(run: Measured) -> str:
    """Return a run's figures as text; the servers are followers unless they lead."""
    cpu = ", ".join(f"{name} {figure:.0f}" for name, figure in run.cpu_us.items())
    waits = ", ".join(f"{name} {figure:.1f}" for name, figure in run.wake_ups.items())
    return (
        f"{run.per_s:,.0f}/s, p50 {run.p50_ms:.2f} p99 {run.p99_ms:.2f} ms; CPU us per record: {cpu}; "
        f"wake-ups per record: {waits}"
    )


def _broker_pids(cluster: Cluster, leader: int) -> dict[str, int]:
    followers = [node for node in cluster.broker_ids if node != leader]
    return {
        "leader": cluster.pid(leader),
        **{f"follower {number}": cluster.pid(node) for number, node in enumerate(followers, 1)},
    }


def _ceiling_pids(before: set[int]) -> dict[str, int]:
    """Return the processes of the ceiling: the children of this process that were not there before."""
    pids = sorted({child.pid for child in psutil.Process().children()} - before)
    return dict(zip(("leader", *(f"follower {number}" for number in range(1, BROKERS))), pids, strict=True))


def run(report: Report) -> None:
    """Measure brokers and ceiling by turns, without and with fsync."""
    started_s = time.perf_counter()
    with Cluster(nodes=BROKERS) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("unsafe", 1, BROKERS, configs=UNSAFE)
            admin.create_topic("safe", 1, BROKERS)
        for label, fsync, topic in (("no fsync", False, "unsafe"), ("with fsync", True, "safe")):
            leader = cluster.leader(topic)
            brokers = _broker_pids(cluster, leader)
            others = {child.pid for child in psutil.Process().children()}
            with ceiling_servers(fsync=fsync, followers=BROKERS - 1) as top:
                bare = _ceiling_pids(others)
                for producers in PRODUCERS:
                    records = RECORDS if producers > 1 else RECORDS // 3
                    ours, most = [], []
                    for _ in range(ROUNDS):
                        size = [str(producers), str(records)]
                        ours.append(
                            measure(["bench.small", "raftlog", address(cluster, leader), topic, *size], brokers)
                        )
                        most.append(measure(["bench.small", "ceiling", top, topic, *size], bare))
                    _report(report, f"RF=3 acks=all {label}, {producers} x 1 in flight", ours, most)
    report.add("small", "took", f"{time.perf_counter() - started_s:.0f} s")


def _report(report: Report, what: str, ours: list[Measured], most: list[Measured]) -> None:
    share = median(mine.per_s / top.per_s for mine, top in zip(ours, most, strict=True))
    report.add("small", f"{what}, brokers", shown(middle(ours)), f">= {SHARE:.0%} of the ceiling", share >= SHARE)
    report.add("small", f"{what}, ceiling", f"{shown(middle(most))}; brokers reach {share:.0%}")


if __name__ == "__main__":
    import uvloop

    uvloop.run(client(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
