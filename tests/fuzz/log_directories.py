"""Log directories as a broker leaves them: two partitions, sealed and active segments, producers, transactions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from broker.log.cleaner import clean, plan_cleaning
from broker.log.config import LogConfig
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.log.transactions import AbortedTransaction
from raftlog.format import Attributes, Codec, iter_headers, parse_header, validate_produced
from raftlog.format.control import Marker
from tests.fuzz.storages import Files, files_of
from tests.support.keyed_log import keyed_batch
from tests.support.log_driver import LOG_DIR, FakeClock, open_manager
from tests.support.memory_storage import MemoryStorage
from tests.support.transactional_log import transactional_batch

TOPICS: Final = {b"\1" * 16: "first", b"\2" * 16: "second"}
CONFIG: Final = LogConfig(
    segment_bytes=1_500, index_interval_bytes=200, cleanup_policy="compact", min_cleanable_dirty_ratio=0.0
)
ROUNDS: Final = 4
_CODECS: Final = (Codec.NONE, Codec.ZSTD, Codec.LZ4)


@dataclass(frozen=True)
class Written:
    """The content of a partition."""

    batches: Mapping[int, bytes]
    """Every batch by its base offset, as it lies on the disk."""
    log_end_offset: int
    kept_end_offset: int
    """Below this nothing may be missing, by the checkpoint."""
    aborted: tuple[AbortedTransaction, ...]
    producers: Mapping[int, tuple[int, object]]


@dataclass(frozen=True)
class Base:
    """A log directory that nothing is wrong with."""

    files: Files
    partitions: Mapping[bytes, Written]


def read_batches(log: PartitionLog) -> dict[int, bytes]:
    """Return all batches of a log by base offset."""
    found: dict[int, bytes] = {}
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        result = log.read(offset, 400, log.log_end_offset, blocking=True)
        assert result is not None
        for position, header in iter_headers(result.records):
            found[header.base_offset] = result.records[position : position + header.size]
        offset = result.next_offset
    return found


def producers_of(log: PartitionLog) -> dict[int, tuple[int, object]]:
    """Return a log's state of its producers, without the times."""
    return {producer_id: (state.epoch, state.batches) for producer_id, state in log.producers.items()}


def _append(log: PartitionLog, batch: bytes, epoch: int, now_ms: int) -> None:
    log.append(batch, validate_produced(batch), leader_epoch=epoch, now_ms=now_ms)


def _write_round(log: PartitionLog, number: int, seed: int, now_ms: int) -> None:
    epoch, row = 1 + number // 3, 2 * number
    value = bytes([97 + seed]) * (20 + 7 * number)
    batch = keyed_batch([(b"k%d" % (number % 3), value), (b"j", None)], now_ms, codec=_CODECS[number % 3])
    _append(log, batch, epoch, now_ms)
    _append(log, keyed_batch([(b"i", value)] * 2, now_ms + 1, producer=(5, 0, row)), epoch, now_ms)
    for producer_id in (10, 11):
        _append(log, transactional_batch([(b"t", value)], now_ms + 2, (producer_id, number, 0)), epoch, now_ms)
    markers = [Marker(10, number + 1, commit=True, coordinator_epoch=1)]
    if number < ROUNDS - 1:  # the last transaction of 11 stays open
        markers.append(Marker(11, number + 1, commit=False, coordinator_epoch=1))
    log.append_markers(markers, leader_epoch=epoch, now_ms=now_ms)


@cache
def base(clean_stop: bool, compacted: bool) -> Base:
    """Return a directory: stopped cleanly or killed, compacted or not."""
    storage, clock = MemoryStorage(), FakeClock()
    manager = open_manager(storage, config=CONFIG, clock=clock)
    logs = {topic_id: manager.create(name, topic_id, 0, CONFIG) for topic_id, name in TOPICS.items()}
    kept: dict[bytes, int] = {}
    for number in range(ROUNDS):
        if compacted and number == ROUNDS - 1:  # before the last round, since compaction flushes the log
            _compact(manager, clock)
        clock.now += 1_000
        for seed, (topic_id, log) in enumerate(logs.items()):
            if number == ROUNDS - 1 and not clean_stop:
                kept[topic_id] = log.log_end_offset
            _write_round(log, number, seed, clock.now)
            if number < ROUNDS - 1 or clean_stop:
                log.flush()
                log.high_watermark = log.log_end_offset
        if number < ROUNDS - 1:
            manager.run_housekeeping_once(clock.now)
    if compacted:
        manager.run_housekeeping_once(clock.now)
    partitions = {}
    for topic_id, log in logs.items():
        aborted = tuple(log.aborted_transactions(0, log.log_end_offset))
        end = log.log_end_offset
        partitions[topic_id] = Written(read_batches(log), end, kept.get(topic_id, end), aborted, producers_of(log))
    if clean_stop:
        manager.close(broker_epoch=3)
    files = files_of(storage, LOG_DIR)
    del files[f"{LOG_DIR}/.lock"]
    return Base(files, partitions)


def _compact(manager: LogManager, clock: FakeClock) -> None:
    for log in manager.logs():
        plan = plan_cleaning(log, log.high_watermark, clock.now)
        assert plan is not None, "the log has nothing to compact, so that it is no base for damage"
        for _ in clean(plan, dedupe_bytes=1 << 20, clock=clock.now_ms):
            pass
        assert any(parse_header(batch).attributes & Attributes.SPARSE_OFFSETS for batch in read_batches(log).values())


def prepare() -> None:
    """Make all directories."""
    for clean_stop in (False, True):
        for compacted in (False, True):
            base(clean_stop, compacted)
