"""The speed of compaction, beside a plain copy of the same files in the same run."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa

from bench.report import Report
from broker.clock import SystemClock
from broker.log.cleaner import clean, plan_cleaning
from broker.log.config import LogConfig
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.log.storage import OsStorage
from raftlog.format import Codec, Columns, encode_batch, validate_produced

LOG_BYTES = 384 << 20
BATCH_BYTES = 64 << 10
KEYS = 100_000
RATE_LIMIT = 100 * 10**6
ROUNDS = 3


def _fill(directory: Path, value_bytes: int, codec: Codec) -> tuple[LogManager, PartitionLog]:
    """Return a log of random keys, each of which is overwritten several times."""
    config = LogConfig(segment_bytes=64 << 20, cleanup_policy="compact", flush_messages=1_000_000)
    manager = LogManager(OsStorage(), [str(directory)], config, SystemClock())
    manager.open(cluster_id="bench", node_id=1)
    log = manager.create("bench", bytes(16), 0, config)
    dice = np.random.default_rng(1)
    names = pa.array([b"customer-%08d" % key for key in range(KEYS)], pa.binary())
    rows = BATCH_BYTES // (value_bytes + 40)
    noise = os.urandom(value_bytes // 2)
    values = pa.array([noise + os.urandom(8) + noise for _ in range(rows)], pa.binary())
    now_ms = 1_000_000
    while log.size_bytes < LOG_BYTES:
        keys = names.take(pa.array(dice.integers(0, KEYS, rows)))
        stamps = pa.array(np.arange(now_ms, now_ms + rows))
        batch = encode_batch(Columns(values, keys, stamps), now_ms, codec=codec)
        log.append(batch, validate_produced(batch), leader_epoch=1, now_ms=now_ms)
        now_ms += rows
    log.roll()
    batch = encode_batch(Columns(pa.array([b"end"]), pa.array([b"end"])), now_ms)
    log.append(batch, validate_produced(batch), leader_epoch=1, now_ms=now_ms)
    log.flush()
    log.high_watermark = log.log_end_offset
    return manager, log


def _copy_seconds(directory: Path) -> float:
    """Copy the segments and fsync, the least work of a compaction that removes nothing; return the seconds."""
    target = directory.parent / "copy"
    target.mkdir()
    start = time.perf_counter()
    for path in sorted((directory / "bench-0").glob("*.log")):
        with path.open("rb") as source, (target / path.name).open("wb") as copy:
            shutil.copyfileobj(source, copy, 8 << 20)
            copy.flush()
            os.fsync(copy.fileno())
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def _once(value_bytes: int, codec: Codec) -> tuple[float, float, float, float]:
    """Return (bytes a second, share of a plain copy's speed, share of bytes left, bytes per second of processor)."""
    with tempfile.TemporaryDirectory(prefix="raftlog-bench-") as path:
        directory = Path(path) / "data"
        manager, log = _fill(directory, value_bytes, codec)
        copying = _copy_seconds(directory)
        size = log.size_bytes
        plan = plan_cleaning(log, log.high_watermark, 0)
        assert plan is not None
        start, start_cpu = time.perf_counter(), time.process_time()
        for _ in clean(plan, dedupe_bytes=128 << 20, clock=lambda: 0):
            pass
        seconds, seconds_cpu = time.perf_counter() - start, time.process_time() - start_cpu
        left = log.size_bytes
        manager.close(clean=False)
        return size / seconds, copying / seconds, left / size, size / seconds_cpu


def run(report: Report) -> None:
    """Compact records of 1 KB and of 100 B, uncompressed and compressed."""
    for name, value_bytes, codec in (
        ("records of 1 KB", 1_000, Codec.NONE),
        ("records of 100 B", 100, Codec.NONE),
        ("records of 1 KB, lz4", 1_000, Codec.LZ4),
    ):
        runs = [_once(value_bytes, codec) for _ in range(ROUNDS)]
        rate = median(run[0] for run in runs)
        has_target = codec is Codec.NONE and value_bytes == 1_000
        report.add(
            "compaction",
            f"{name}, {KEYS:,} keys",
            f"{rate / 1e6:.0f} MB/s, {median(run[1] for run in runs):.0%} of a plain copy of the same files; "
            f"{median(run[3] for run in runs) / 1e6:.0f} MB per second of processor; "
            f"{runs[0][2]:.0%} of the bytes are left",
            f">= {RATE_LIMIT / 1e6:.0f} MB/s" if has_target else "",
            rate >= RATE_LIMIT if has_target else None,
        )
