"""How fast a replica far behind catches up, beside a copy from disk to disk, and the effect on live writes."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from grpc import aio

from bench import ceiling
from bench.produce import Run, Shape, address, broker_run
from bench.report import Report
from raftlog import Admin, Producer
from raftlog.testing import Cluster

BEHIND_BYTES: Final = 10_000_000_000
RECORD_BYTES: Final = 10_000
BATCH_ROWS: Final = 100
SHARE: Final = 0.5
"""The target: a share of the speed of a copy from disk to disk."""
SLOWER: Final = 2.0
"""The target: the p99 of live writes meanwhile, as a multiple of the p99 before."""
LIVE: Final = Shape("live", 1_000, 500, 1)
_PIECE_BYTES: Final = 8 << 20


def run(report: Report) -> None:
    """Stop a follower, write, and start it again."""
    with Cluster(nodes=3) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("behind", replication_factor=3, configs={"retention.bytes": "-1"})
            admin.create_topic("live", replication_factor=3)
        away = next(
            each for each in cluster.broker_ids if each not in (cluster.leader("behind"), cluster.leader("live"))
        )
        cluster.stop(away)
        _write(cluster.bootstrap)
        leader = address(cluster, cluster.leader("live"))
        asyncio.run(_live(leader))
        before = asyncio.run(_live(leader)).percentile_ms(0.99)
        copied_s = _copy(cluster.log_dir(cluster.leader("behind")) / "behind-0", cluster.directory / "copy")
        started = time.perf_counter()
        cluster.start(away)
        meanwhile, took_s = asyncio.run(_until_in_sync(cluster, leader, started))
        speed, copy_speed = BEHIND_BYTES / took_s / 1e6, BEHIND_BYTES / copied_s / 1e6
        report.add(
            "catch-up",
            f"a replica {BEHIND_BYTES / 1e9:g} GB behind",
            f"{speed:.0f} MB/s, {speed / copy_speed:.0%} of a copy's {copy_speed:.0f}",
            f">= {SHARE:.0%}",
            speed / copy_speed >= SHARE,
        )
        report.add(
            "catch-up",
            "live writes meanwhile, one 1 KB record in flight",
            f"p99 {meanwhile:.2f} ms, {meanwhile / before:.1f} times the {before:.2f} before",
            f"<= {SLOWER:g} times",
            meanwhile / before <= SLOWER,
        )


def _write(bootstrap: str) -> None:
    values = pa.array([os.urandom(RECORD_BYTES) for _ in range(BATCH_ROWS)], pa.binary())
    batch = pa.record_batch([values], names=["value"])
    with Producer(bootstrap) as producer:
        for _ in range(BEHIND_BYTES // (RECORD_BYTES * BATCH_ROWS)):
            producer.send_batch("behind", batch)
        producer.flush(600)


async def _live(leader: str) -> Run:
    async with aio.insecure_channel(leader, options=ceiling.UNLIMITED) as channel:
        return await broker_run(channel, "live", LIVE)


async def _until_in_sync(cluster: Cluster, leader: str, started: float) -> tuple[float, float]:
    """Write until all replicas are in sync; return the p99 of the writes, and the seconds since `started`."""

    def in_sync() -> bool:
        with Admin(cluster.bootstrap) as admin:
            return len(admin.describe_topic("behind").partitions[0].isr) == 3

    latencies_ms: list[float] = []
    while not await asyncio.to_thread(in_sync):
        latencies_ms += (await _live(leader)).latencies_ms
    took_s = time.perf_counter() - started
    ordered: Any = sorted(latencies_ms) or [0.0]
    return ordered[int(len(ordered) * 0.99)], took_s


def _copy(source: Path, target: Path) -> float:
    """Copy and sync a log's files; return the seconds."""
    started = time.perf_counter()
    target.mkdir()
    for file in sorted(source.iterdir()):
        with file.open("rb") as reading, (target / file.name).open("wb") as writing:
            while piece := reading.read(_PIECE_BYTES):
                writing.write(piece)
            writing.flush()
            os.fsync(writing.fileno())
    took_s = time.perf_counter() - started
    for file in target.iterdir():
        file.unlink()
    return took_s
