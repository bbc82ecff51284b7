"""How fast a replica far behind catches up, beside a copy from disk to disk, and the effect on live writes.

Live writes make catching up slower (`replication/pacing.py`), so it is measured with them and without.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

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
BEFORE_RUNS: Final = 6
LIVE_S: Final = 60.0
"""How long there are live writes while the replica catches up; it does the rest alone."""
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
        before = asyncio.run(_live_before(leader))
        copied_s = _copy(cluster.log_dir(cluster.leader("behind")) / "behind-0", cluster.directory / "copy")
        cluster.start(away)
        beside, alone = Pace(), Pace()
        meanwhile = asyncio.run(_live_until(cluster, leader, beside))
        if not beside.in_sync:
            _wait(cluster, alone)
        copy_speed = BEHIND_BYTES / copied_s / 1e6
        report.add(
            "catch-up",
            f"a replica {BEHIND_BYTES / 1e9:g} GB behind, beside live writes",
            f"{beside.mb_per_second:.0f} MB/s, {beside.mb_per_second / copy_speed:.0%} of a copy's {copy_speed:.0f}",
        )
        if not beside.in_sync:
            report.add(
                "catch-up",
                f"the last {alone.first_lag * RECORD_BYTES / 1e9:.1f} GB of it, without live writes",
                f"{alone.mb_per_second:.0f} MB/s, {alone.mb_per_second / copy_speed:.0%} of a copy's {copy_speed:.0f}",
                f">= {SHARE:.0%}",
                alone.mb_per_second / copy_speed >= SHARE,
            )
        report.add(
            "catch-up",
            "live writes meanwhile, one 1 KB record in flight",
            f"p50 {meanwhile.percentile_ms(0.5):.2f} p99 {meanwhile.percentile_ms(0.99):.2f} ms, "
            f"{meanwhile.percentile_ms(0.5) / before.percentile_ms(0.5):.1f} and "
            f"{meanwhile.percentile_ms(0.99) / before.percentile_ms(0.99):.1f} times the "
            f"{before.percentile_ms(0.5):.2f} and {before.percentile_ms(0.99):.2f} before",
            f"p99 <= {SLOWER:g} times",
            meanwhile.percentile_ms(0.99) <= SLOWER * before.percentile_ms(0.99),
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


async def _live_before(leader: str) -> Run:
    return _together([await _live(leader) for _ in range(BEFORE_RUNS)])


def _together(runs: list[Run]) -> Run:
    latencies_ms = [each for run in runs for each in run.latencies_ms]
    return Run(len(latencies_ms), sum(run.bytes for run in runs), sum(run.seconds for run in runs), latencies_ms)


class Pace:
    """How fast a replica catches up: its lag at the first look and at the last one, in records."""

    def __init__(self) -> None:
        self.first_lag = self.last_lag = 0
        self.in_sync = False
        self._first_s = self._last_s = 0.0

    def look(self, cluster: Cluster) -> None:
        """Ask the leader. A replica that has not opened its partition yet does not count."""
        with Admin(cluster.bootstrap) as admin:
            (behind,) = admin.describe_replicas(["behind"]).values()
            self.in_sync = len(admin.describe_topic("behind").partitions[0].isr) == len(cluster.broker_ids)
        lags = [replica.lag for replica in behind.replicas]
        if min(lags) < 0:
            return
        self.last_lag, self._last_s = max(lags), time.perf_counter()
        if not self._first_s:
            self.first_lag, self._first_s = self.last_lag, self._last_s

    @property
    def mb_per_second(self) -> float:
        """Records that were caught up with, in 10^6 bytes per second."""
        return (self.first_lag - self.last_lag) * RECORD_BYTES / max(1e-9, self._last_s - self._first_s) / 1e6


async def _live_until(cluster: Cluster, leader: str, pace: Pace) -> Run:
    """Write while the replica catches up, at most for LIVE_S."""
    runs: list[Run] = []
    until_s = time.monotonic() + LIVE_S
    while time.monotonic() < until_s:
        await asyncio.to_thread(pace.look, cluster)
        if pace.in_sync:
            break
        runs.append(await _live(leader))
    if not pace.in_sync:
        await asyncio.to_thread(pace.look, cluster)
    return _together(runs)


def _wait(cluster: Cluster, pace: Pace) -> None:
    """Wait until the replica is in sync, without live writes."""
    time.sleep(2)  # until the last live record is some time ago
    while not pace.in_sync:
        pace.look(cluster)
        time.sleep(0.2)


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
