"""One partition's log: appends, reads, cuts, rolling and retention, and segments that leave it."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any

import pytest

from broker.log import partition_log
from broker.log.config import LogConfig
from broker.log.partition_log import expired_segments
from broker.log.producer_state import snapshot_name, snapshot_offsets
from broker.log.segment import Segment, SegmentCache
from raftlog.errors import (
    CorruptRecordError,
    InvalidConfig,
    InvalidRecord,
    OffsetOutOfRange,
    RaftlogError,
    StorageError,
    StorageFull,
)
from raftlog.format import Attributes, iter_headers, parse_batch, validate_produced
from raftlog.types import OffsetAndTimestamp
from tests.support.log_driver import LOG_DIR, PRODUCERS, LogDriver, restored, saved, timed_batch
from tests.support.memory_storage import Fault, MemoryStorage, PowerLoss


def opened(config: LogConfig | None = None) -> LogDriver:
    driver = LogDriver(config=config or LogConfig())
    driver.open()
    return driver


def everything(driver: LogDriver) -> bytes:
    log = driver.log
    result = log.read(log.log_start_offset, 1 << 20, log.log_end_offset, blocking=True)
    assert result is not None
    return result.records


def test_the_leader_stamps_offset_and_epoch_and_nothing_else() -> None:
    driver = opened()
    batch = timed_batch([5, 6, 7])
    for epoch in (3, 4):
        result = driver.log.append(batch, validate_produced(batch), leader_epoch=epoch, now_ms=9)
        assert result.timestamp_ms == -1
        assert result.appended_bytes == len(batch)
    stored = everything(driver)
    headers = [header for _, header in iter_headers(stored)]
    assert [(h.base_offset, h.leader_epoch) for h in headers] == [(0, 3), (3, 4)]
    assert stored[16 : len(batch)] == batch[16:]
    parse_batch(stored, len(batch))


def test_log_append_time_is_stamped_and_checks() -> None:
    driver = opened(LogConfig(message_timestamp_type="LogAppendTime"))
    batch = timed_batch([5, 6])
    result = driver.log.append(batch, validate_produced(batch), leader_epoch=1, now_ms=777)
    assert result.timestamp_ms == 777
    header = parse_batch(everything(driver))
    assert header.attributes & Attributes.LOG_APPEND_TIME
    assert header.max_timestamp_ms == 777
    assert driver.log.offset_for_time(6, 2) == OffsetAndTimestamp(0, 777, 1)
    assert driver.log.offset_for_time(778, 2) is None


def test_a_memoryview_is_as_good_as_bytes() -> None:
    driver = opened()
    batch = memoryview(b"xx" + timed_batch([5]))[2:]
    driver.log.append(batch, validate_produced(batch), leader_epoch=1, now_ms=9)
    assert everything(driver)[16:] == bytes(batch[16:])


def test_look_ups_by_time_do_not_need_ordered_timestamps() -> None:
    driver = opened(LogConfig(segment_bytes=900, index_interval_bytes=0))
    for stamps in ([50, 10], [20, 90], [30], [90, 91], [5]):
        driver.append(stamps)
    driver.flush()
    log = driver.log
    answers = {t: log.offset_for_time(t) for t in (0, 11, 51, 91, 92)}
    assert {t: (a.offset if a else None) for t, a in answers.items()} == {0: 0, 11: 0, 51: 3, 91: 6, 92: None}
    driver.delete_records(4)
    assert log.offset_for_time(0) == OffsetAndTimestamp(4, 30, 0)
    assert log.max_timestamp() == OffsetAndTimestamp(6, 91, 0)
    assert log.max_timestamp(6) == OffsetAndTimestamp(5, 90, 0)
    assert log.max_timestamp(4) is None


def test_the_largest_timestamp_of_removed_records_does_not_count() -> None:
    driver = opened(LogConfig(index_interval_bytes=0))
    for stamps in ([99], [5], [7], [6]):
        driver.append(stamps)
    driver.flush()
    driver.delete_records(1)
    assert driver.log.max_timestamp() == OffsetAndTimestamp(2, 7, 0)


def test_consumers_are_told_no_time_above_the_high_watermark() -> None:
    driver = opened()
    driver.append([10])
    driver.flush()
    driver.append([99])
    assert driver.log.offset_for_time(50) is None
    assert driver.log.max_timestamp() == OffsetAndTimestamp(0, 10, 0)


def test_a_follower_has_the_same_bytes_whatever_its_segments() -> None:
    leader, follower = opened(), opened(LogConfig(segment_bytes=700))
    for epoch in (1, 1, 4):
        leader.epoch = epoch
        leader.append([1, 2])
    data = everything(leader)
    result = follower.log.append_stamped(data, now_ms=5)
    assert (result.base_offset, result.last_offset) == (0, 5)
    assert follower.log.segment_count == 2
    assert b"".join(piece for _, piece in follower.stored_batches()) == data
    assert follower.log.leader_epochs.entries == leader.log.leader_epochs.entries


def _state(driver: LogDriver) -> tuple[Any, ...]:
    """Return what is kept of a log, in memory and in its files."""
    log = driver.log
    log.flush()
    indexes = [segment.opened.index.entries for segment in log.segments if segment.opened is not None]
    segments = [(each.base_offset, each.end, each.max_timestamp_ms) for each in log.segments]
    names = driver.storage.list_sizes(log.directory)
    files = {name: bytes(driver.storage.content(f"{log.directory}/{name}")) for name in names}
    return segments, indexes, files, log.leader_epochs.entries, {each: log.producers.get(each) for each in range(10)}


@pytest.mark.parametrize("segment_bytes", [300, 1_000, 1 << 20])
@pytest.mark.parametrize("interval", [0, 600])
def test_batches_in_one_write_leave_what_one_at_a_time_leaves(segment_bytes: int, interval: int) -> None:
    config = LogConfig(segment_bytes=segment_bytes, index_interval_bytes=interval)
    leader, at_once, by_one = opened(), opened(config), opened(config)
    dice = Random(5)
    for number in range(40):
        leader.epoch = number // 15
        leader.append([dice.randrange(100) for _ in range(1 + number % 3)], value_bytes=dice.randrange(200))
    data = memoryview(everything(leader))
    at_once.log.append_stamped(data, now_ms=7)
    for position, header in iter_headers(data):
        by_one.log.append_stamped(data[position : position + header.size], now_ms=7)
    assert _state(at_once) == _state(by_one)
    assert at_once.log.log_end_offset == leader.end
    offsets = range(at_once.log.log_start_offset, leader.end)
    assert [at_once.log.read(each, 1, leader.end, blocking=True) for each in offsets] == [
        by_one.log.read(each, 1, leader.end, blocking=True) for each in offsets
    ]


def test_a_follower_writes_batches_of_one_epoch_at_once() -> None:
    leader, follower = opened(), opened()
    for number in range(30):
        leader.epoch = number // 10
        leader.append()
    writes: list[str] = []
    follower.storage.on_step = lambda op, path: writes.append(path) if op == "write" and path.endswith(".log") else None
    follower.log.append_stamped(everything(leader), now_ms=7)
    assert len(writes) == 3


def test_a_follower_goes_on_within_the_first_of_many_batches() -> None:
    one, leader, follower = opened(), opened(), opened()
    one.append([1])
    for stamps in ([1, 2, 3], [4], [5, 6]):
        leader.append(stamps)
    follower.log.append_stamped(everything(one), now_ms=7)
    follower.log.append_stamped(everything(leader), now_ms=7)
    stored = [(header.base_offset, header.next_offset) for _, header in iter_headers(everything(follower))]
    assert stored == [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert everything(follower).endswith(b"".join(batch.data for batch in leader.chain[1:]))


@pytest.mark.parametrize("bad", [1, 4, 5, 9])
def test_what_comes_before_a_refused_batch_is_appended_and_noted(bad: int) -> None:
    leader, follower = opened(), opened()
    for number in range(10):
        leader.epoch = number // 5
        leader.append()
    good = everything(leader)
    data = bytearray(good)
    position = [position for position, _ in iter_headers(good)][bad]
    data[position + 70] ^= 1
    with pytest.raises(CorruptRecordError):
        follower.log.append_stamped(data, now_ms=leader.clock.now)
    assert everything(follower) == good[:position]
    assert follower.log.log_end_offset == bad
    noted = {each: follower.log.producers.get(each) for each in PRODUCERS}
    del leader.chain[bad:]
    assert noted == {each: leader.producers().get(each) for each in PRODUCERS}
    follower.log.append_stamped(good[position:], now_ms=leader.clock.now)
    assert everything(follower) == good


def test_a_write_that_does_not_fit_the_disk_leaves_nothing() -> None:
    leader, follower = opened(), opened(LogConfig(segment_bytes=900))
    for _ in range(10):
        leader.append()
    good = everything(leader)
    full = follower.storage
    full.capacity_bytes = full.used_bytes() + len(good) // 2
    with pytest.raises(StorageFull):
        follower.log.append_stamped(good, now_ms=leader.clock.now)
    end = follower.log.log_end_offset
    assert 0 < end < 10
    assert everything(follower) == b"".join(batch.data for batch in leader.chain[:end])
    full.capacity_bytes = None
    follower.log.append_stamped(b"".join(batch.data for batch in leader.chain[end:]), now_ms=leader.clock.now)
    assert b"".join(piece for _, piece in follower.stored_batches()) == good
    assert {each: follower.log.producers.get(each) for each in PRODUCERS} == {
        each: leader.producers().get(each) for each in PRODUCERS
    }


def test_a_follower_refuses_what_does_not_follow() -> None:
    leader, follower = opened(), opened()
    leader.epoch = 3
    leader.append()
    leader.append()
    data = everything(leader)
    second = data[len(leader.chain[0].data) :]
    with pytest.raises(InvalidRecord, match="does not follow"):
        follower.log.append_stamped(second, now_ms=5)
    with pytest.raises(CorruptRecordError):
        follower.log.append_stamped(data[:-1], now_ms=5)
    assert follower.log.log_end_offset == 1
    older = bytearray(second)
    older[12:16] = (2).to_bytes(4, "little")
    with pytest.raises(InvalidRecord, match="leader epoch 2 after epoch 3"):
        follower.log.append_stamped(older, now_ms=5)


@pytest.mark.parametrize("offset", [3, 12, 14, 40])
def test_starting_over_anywhere(offset: int) -> None:
    driver = opened(LogConfig(segment_bytes=600))
    for _ in range(14):
        driver.append()
    driver.flush()
    driver.delete_records(8)
    driver.checkpoint()
    driver.log.reset_to(offset, now_ms=driver.clock.now)
    log = driver.log
    assert (log.log_start_offset, log.log_end_offset, log.flushed_end_offset, log.high_watermark) == (offset,) * 4
    assert log.leader_epochs.entries == ()
    batch = timed_batch([5])
    log.append(batch, validate_produced(batch), leader_epoch=9, now_ms=1)
    log.flush()
    driver.storage.crash(None)
    driver.open()
    assert (driver.log.log_start_offset, driver.log.log_end_offset) == (offset, offset + 1)
    assert driver.log.leader_epochs.entries == ((9, offset),)


def test_truncation_below_the_log_start_is_refused() -> None:
    driver = opened()
    driver.append()
    driver.append()
    driver.flush()
    driver.delete_records(1)
    with pytest.raises(OffsetOutOfRange, match="cannot truncate to 0"):
        driver.log.truncate_to(0, now_ms=1)


def test_a_flush_begun_before_a_truncation_does_not_count_after_it() -> None:
    driver = opened()
    driver.append()
    driver.append()
    ticket = driver.log.begin_flush()
    assert ticket is not None
    ticket.run()
    driver.truncate(1)
    driver.append()
    assert driver.log.finish_flush(ticket) == 0
    assert driver.log.needs_flush


def test_flushes_that_overlap_count_what_each_covers() -> None:
    driver = opened(LogConfig(segment_bytes=600))
    tickets = []
    for _ in range(3):
        for _ in range(3):
            driver.append()
        ticket = driver.log.begin_flush()
        assert ticket is not None
        tickets.append(ticket)
    for ticket in reversed(tickets):
        ticket.run()
    assert driver.log.finish_flush(tickets[1]) == 6
    assert driver.log.finish_flush(tickets[0]) == 6
    assert driver.log.finish_flush(tickets[2]) == 9
    assert driver.log.begin_flush() is None


@pytest.mark.parametrize("seed", range(6))
def test_a_flush_does_not_answer_for_what_its_segment_got_later(seed: int) -> None:
    """The active segment of a ticket may grow and be sealed before the ticket ends."""
    driver = opened(LogConfig(segment_bytes=600))
    driver.append()
    early = driver.log.begin_flush()
    assert early is not None
    early.run()
    driver.append()
    driver.append()  # seals the segment
    assert driver.log.segment_count == 2
    assert driver.log.finish_flush(early) == 1
    driver.flush()
    driver.crash(Random(seed))


def test_index_entries_of_truncated_batches_do_not_come_back_with_power_loss() -> None:
    """Old and new batches have other boundaries, but the same last one, so only the middle entry gives it away."""
    driver = opened(LogConfig(index_interval_bytes=0))
    for value_bytes in (20, 20, 200, 20):
        driver.append(value_bytes=value_bytes)
    driver.flush()
    driver.checkpoint()
    index = driver.log.segments[0].stem + ".index"
    timeindex = driver.log.segments[0].stem + ".timeindex"
    for path in (index, timeindex):
        driver.storage.open(path).datasync()
    driver.storage.sync_dir(driver.log.directory)
    driver.truncate(1)
    for value_bytes in (200, 20, 20):
        driver.append(value_bytes=value_bytes)
    driver.flush()
    driver.storage.faults += [Fault("truncate", path, errno=errno.ENOSPC) for path in (index, timeindex)]
    driver.checkpoint()
    driver.storage.faults.clear()
    driver.crash(Random(1))
    for offset in range(4):
        result = driver.log.read(offset, 1, 4, blocking=True)
        assert result is not None
        assert result.records == driver.chain[offset].data


def test_index_entries_of_torn_batches_do_not_come_back_with_power_loss() -> None:
    """As above, but it was recovery that cut the batches off."""
    driver = opened(LogConfig(index_interval_bytes=0))
    driver.append(value_bytes=20)
    driver.flush()
    driver.checkpoint()
    for value_bytes in (20, 200, 20):
        driver.append(value_bytes=value_bytes)
    driver.log.store_indexes()
    stem = driver.log.segments[0].stem
    for suffix in (".index", ".timeindex"):
        driver.storage.open(stem + suffix).datasync()
    driver.storage.sync_dir(driver.log.directory)
    del driver.storage.raw(stem + ".log")[len(driver.chain[0].data) :]
    del driver.chain[1:]
    driver.crash(None)
    for value_bytes in (200, 20, 20):
        driver.append(value_bytes=value_bytes)
    driver.flush()
    driver.storage.faults += [
        Fault("truncate", stem + suffix, errno=errno.ENOSPC) for suffix in (".index", ".timeindex")
    ]
    driver.checkpoint()
    driver.storage.faults.clear()
    driver.crash(Random(1))
    for offset in range(4):
        result = driver.log.read(offset, 1, 4, blocking=True)
        assert result is not None
        assert result.records == driver.chain[offset].data


def test_epochs_come_back_with_records_whose_deletion_was_not_durable() -> None:
    driver = opened(LogConfig(index_interval_bytes=0))
    driver.append()
    driver.flush()
    driver.checkpoint()
    driver.delete_records(1)
    driver.epoch = 3
    driver.append()
    driver.flush()
    driver.log.store_indexes()
    driver.crash(None)
    assert driver.log.log_start_offset == 0
    assert driver.log.leader_epochs.entries == ((0, 0), (3, 1))


def test_a_checkpoint_in_the_middle_of_a_truncation_does_not_promise_what_goes() -> None:
    driver = opened()
    for _ in range(4):
        driver.append()
    driver.flush()
    driver.checkpoint()
    log = driver.log

    def checkpoint(op: str, path: str) -> None:
        if op == "truncate" and path.endswith(".log"):
            log.log_dir.update_marks(lambda: {(log.topic_id, log.partition): log.marks()})

    driver.storage.on_step = checkpoint
    driver.truncate(2)
    driver.storage.on_step = None
    driver.crash(None)
    assert driver.log.log_end_offset == 2


def test_epochs_of_truncated_batches_do_not_come_back_with_power_loss() -> None:
    driver = opened(LogConfig(index_interval_bytes=0))
    driver.append()
    driver.epoch = 5
    driver.append()
    driver.flush()
    driver.checkpoint()
    driver.truncate(1)
    driver.epoch = 0  # the new leader has more records of the old epoch
    driver.append()
    driver.append()
    driver.flush()
    driver.checkpoint()
    driver.crash(None)
    assert driver.log.leader_epochs.entries == ((0, 0),)


def test_configs_come_from_topic_configs_over_defaults() -> None:
    defaults = LogConfig(segment_bytes=5_000, retention_ms=7)
    configs = {
        "retention.ms": "-1",
        "retention.bytes": "10",
        "cleanup.policy": "compact, delete",
        "flush.ms": str(2**63 - 1),
        "min.insync.replicas": "2",
    }
    config = LogConfig.from_topic_configs(configs, defaults)
    assert (config.segment_bytes, config.retention_ms, config.retention_bytes) == (5_000, None, 10)
    assert config.cleanup_policy == "compact,delete"
    assert config.flush_ms is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("segment.bytes", "0"),
        ("segment.bytes", "2147483648"),
        ("segment.ms", "soon"),
        ("retention.bytes", "-2"),
        ("flush.messages", "0"),
        ("message.timestamp.type", "Never"),
        ("cleanup.policy", "keep"),
    ],
)
def test_values_that_are_not_allowed_are_named(key: str, value: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{key}='?{value}"):
        LogConfig.from_topic_configs({key: value})


def driver_with(batches: int, config: LogConfig | None = None) -> LogDriver:
    """Batches of two records and 280 bytes."""
    driver = LogDriver(config=config or LogConfig(index_interval_bytes=700))
    driver.open()
    for _ in range(batches):
        driver.append([driver.clock.now] * 2)
    driver.flush()
    return driver


def read(driver: LogDriver, offset: int, max_bytes: int, end_offset: int | None = None) -> tuple[list[int], int]:
    """Return the numbers of the batches that come back, and the next offset."""
    result = driver.log.read(offset, max_bytes, driver.end if end_offset is None else end_offset, blocking=True)
    assert result is not None
    numbers = [i for i, batch in enumerate(driver.chain) if batch.data in result.records]
    assert b"".join(driver.chain[i].data for i in numbers) == result.records
    return numbers, result.next_offset


def test_batches_differ_and_have_the_size_that_the_tests_count_on() -> None:
    driver = driver_with(3)
    assert [len(batch.data) for batch in driver.chain] == [280] * 3
    assert len({batch.data for batch in driver.chain}) == 3


@pytest.mark.parametrize("restarted", [False, True], ids=["fresh", "restarted"])
@pytest.mark.parametrize(
    ("offset", "max_bytes", "end_offset", "batches", "next_offset"),
    [
        (0, 560, 20, [0, 1], 4),
        (0, 561, 20, [0, 1], 4),
        (0, 559, 20, [0], 2),
        (0, 1, 20, [0], 2),
        (1, 280, 20, [0], 2),
        (7, 280, 20, [3], 8),
        (0, 10_000, 6, [0, 1, 2], 6),
        (0, 10_000, 5, [0, 1], 4),
        (4, 10_000, 5, [], 4),
        (19, 1, 20, [9], 20),
        (20, 1, 20, [], 20),
    ],
)
def test_boundaries(
    restarted: bool, offset: int, max_bytes: int, end_offset: int, batches: list[int], next_offset: int
) -> None:
    driver = driver_with(10, LogConfig(index_interval_bytes=0))
    if restarted:
        driver.close()
        driver.crash(None)
    assert read(driver, offset, max_bytes, end_offset) == (batches, next_offset)


def test_a_read_never_crosses_a_segment() -> None:
    driver = driver_with(10, LogConfig(segment_bytes=900))
    assert read(driver, 0, 10_000) == ([0, 1, 2], 6)
    assert read(driver, 5, 10_000) == ([2], 6)
    assert read(driver, 6, 10_000) == ([3, 4, 5], 12)


@pytest.mark.parametrize("offset", [-1, 1, 21])
def test_out_of_range_names_the_range(offset: int) -> None:
    driver = driver_with(10)
    driver.delete_records(2)
    with pytest.raises(OffsetOutOfRange, match=rf"offset {offset} is out of range, the log has 2 to 20"):
        driver.log.read(offset, 100, 20, blocking=True)


def test_cold_data_is_not_waited_for() -> None:
    driver = driver_with(10, LogConfig(segment_bytes=900))
    driver.storage.cold = True
    assert driver.log.read(0, 100, 20, blocking=False) is None
    assert driver.log.read(19, 100, 20, blocking=False) is None
    driver.storage.cold = False
    assert driver.log.read(19, 100, 20, blocking=False) is not None


def test_a_sealed_segment_that_is_closed_is_not_opened_by_a_non_blocking_read() -> None:
    driver = driver_with(10, LogConfig(segment_bytes=900))
    driver.close()
    driver.crash(None)
    fresh = LogDriver(storage=driver.storage.clone(), config=driver.config)
    fresh.open()
    assert fresh.log.read(0, 100, 20, blocking=False) is None
    assert fresh.log.read(0, 100, 20, blocking=True) is not None
    assert fresh.log.read(0, 100, 20, blocking=False) is not None


def test_memory_and_descriptors_do_not_grow_with_the_log() -> None:
    driver = driver_with(60, LogConfig(segment_bytes=900, index_interval_bytes=0))
    cache = SegmentCache(driver.storage, max_segments=4, max_index_bytes=100_000)
    driver.log._cache = cache
    for segment in driver.log.segments[:-1]:
        segment.opened = None
    driver.stored_batches()
    assert len(cache) == 4
    assert sum(segment.opened is not None for segment in driver.log.segments) == 5
    small = SegmentCache(driver.storage, max_segments=100, max_index_bytes=100)
    driver.log._cache = small
    for segment in driver.log.segments[:-1]:
        segment.opened = None
    driver.stored_batches()
    assert small.index_bytes <= 100
    assert len(small) >= 1


def test_bytes_that_contradict_the_index_are_loud() -> None:
    driver = driver_with(10, LogConfig(segment_bytes=900))
    path = driver.log.segments[0].log_path
    driver.storage.raw(path)[0:8] = (77).to_bytes(8, "little")
    with pytest.raises(CorruptRecordError, match=f"{path} position 0"):
        driver.log.read(0, 100, 20, blocking=True)


@pytest.mark.parametrize("byte", [0, 24], ids=["base offset", "last offset delta"])
def test_a_batch_that_reaches_beyond_the_log_is_loud(byte: int) -> None:
    """Else a reader would get nothing, and ask again for ever."""
    driver = driver_with(1)
    driver.close()
    driver.crash(None)  # the boundaries of the last batches are not known any more
    driver.storage.raw(driver.log.segments[0].log_path)[byte] ^= 1
    with pytest.raises(CorruptRecordError, match="position 0"):
        driver.log.read(0, 400, driver.end, blocking=True)


def test_a_sealed_file_that_became_shorter_is_loud() -> None:
    driver = driver_with(10, LogConfig(segment_bytes=900))
    path = driver.log.segments[0].log_path
    del driver.storage.raw(path)[500:]
    with pytest.raises(CorruptRecordError, match=path):
        driver.log.read(0, 10_000, 20, blocking=True)


def test_reading_the_tail_needs_one_read_and_no_walk() -> None:
    driver = driver_with(500, LogConfig(index_interval_bytes=1 << 20))
    reads: list[str] = []
    driver.storage.on_step = lambda op, path: reads.append(op)
    for offset, end_offset in ((0, 1000), (600, 1000), (600, 640), (998, 1000)):
        reads.clear()
        assert driver.log.read(offset, 5_000, end_offset, blocking=True) is not None
        assert reads == ["read"], (offset, end_offset)


def test_sequential_reads_of_a_sealed_segment_need_one_read_each() -> None:
    driver = driver_with(500, LogConfig(index_interval_bytes=700, segment_bytes=130_000))
    reads: list[str] = []
    offset = 0
    driver.storage.on_step = lambda op, path: reads.append(op)
    while offset < driver.log.segments[0].next_offset:
        reads.clear()
        result = driver.log.read(offset, 5_000, 1000, blocking=True)
        assert result is not None
        assert len(reads) == 1, offset
        offset = result.next_offset


@pytest.mark.parametrize("segment_bytes", [1, 700, 1 << 20])
@pytest.mark.parametrize("restarted", [False, True])
def test_every_offset_of_every_segment_names_its_own_record(segment_bytes: int, restarted: bool) -> None:
    driver = LogDriver(config=LogConfig(index_interval_bytes=300, segment_bytes=segment_bytes))
    driver.open()
    times = [[5_000 - 7 * number, 5_000 - 7 * number - 3] for number in range(12)]  # they fall
    for pair in times:
        driver.append(pair)
    driver.flush()
    if restarted:
        driver.close()
        driver.open()
    flat = [time for pair in times for time in pair]
    for offset, time in enumerate(flat):
        found = driver.log.first_from(offset, 24)
        assert found is not None
        assert (found.offset, found.timestamp_ms) == (offset, time)
    assert driver.log.first_from(24, 24) is None
    assert driver.log.first_from(7, 7) is None


def test_below_the_log_start_it_is_the_first_record_there_is() -> None:
    driver = LogDriver(config=LogConfig())
    driver.open()
    for number in range(4):
        driver.append([1_000 + number])
    driver.flush()
    driver.log.high_watermark = 4
    driver.log.delete_records(2)
    found = driver.log.first_from(0)
    assert found is not None
    assert (found.offset, found.timestamp_ms) == (2, 1_002)


CONFIG = LogConfig(segment_bytes=1_100, index_interval_bytes=100, file_delete_delay_ms=10)
Change = Callable[[LogDriver], None]


@cache
def _lived() -> bytes:
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    for epoch in (1, 4):
        driver.epoch = epoch
        for _ in range(7):
            driver.append(value_bytes=100)
    driver.flush()
    driver.checkpoint()
    driver.delete_records(5)  # the first segment is detached, its files are there until the next checkpoint
    assert driver.log.segment_count > 3
    return saved(driver)


def lived() -> LogDriver:
    """Return a log of several segments and epochs, with deleted records at its front."""
    return restored(LogDriver, _lived())


BASES = [segment.base_offset for segment in lived().log.segments]
CHANGES: dict[str, Change] = {
    "into a segment": lambda driver: driver.truncate(8),
    "at a segment's begin": lambda driver: driver.truncate(BASES[2]),
    "within the last segment": lambda driver: driver.truncate(13),
    "start over beyond the end": lambda driver: driver.start_over(40),
    "start over within": lambda driver: driver.start_over(9),
    "start over at the begin of a segment": lambda driver: driver.start_over(BASES[1]),
    "start over where a detached segment began": lambda driver: driver.start_over(0),
}


class Refusing:
    """Refuses the change of the disk with this number, once; reads do not count."""

    def __init__(self, driver: LogDriver, number: int) -> None:
        self.left = number
        driver.storage.on_step = self._step

    def _step(self, op: str, path: str) -> None:
        if op in ("read", "datasync"):  # an fsync that fails is final, which is another story
            return
        self.left -= 1
        if self.left == -1:
            full = op in ("write", "rename", "truncate")
            raise OSError(errno.ENOSPC if full else errno.EMFILE, "refused", path)

    @property
    def refused(self) -> bool:
        return self.left < 0


def changes_of(change: Change) -> int:
    driver = lived()
    refusing = Refusing(driver, 1 << 30)
    change(driver)
    return (1 << 30) - refusing.left


def continued(driver: LogDriver) -> None:
    """Append the records of a leader of a later epoch, make them durable, and lose power."""
    driver.storage.on_step = None
    driver.epoch += 10
    for _ in range(6):
        driver.append(value_bytes=130)
    driver.flush()
    driver.check()


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_disk_refuses_half_way_is_done_by_the_next_attempt(name: str) -> None:
    change = CHANGES[name]
    count = changes_of(change)
    assert count >= 2
    for number in range(count):
        driver = lived()
        refusing = Refusing(driver, number)
        with contextlib.suppress(StorageError, StorageFull):
            change(driver)
        assert refusing.refused
        assert not driver.manager.offline_dirs  # type: ignore[union-attr] # opened
        driver.storage.on_step = None
        change(driver)
        driver.starting_over = False
        driver.check()
        continued(driver)
        for seed in range(3):
            driver.stopped().crash(Random(seed))


@pytest.mark.parametrize("name", CHANGES)
def test_what_lay_below_the_log_start_before_takes_nothing_along_that_has_its_name_now(name: str) -> None:
    driver = lived()
    CHANGES[name](driver)
    driver.log.update_config(replace(CONFIG, segment_bytes=100_000))
    continued(driver)
    for left in (2, 1):
        driver.delete_records(driver.end - left)
        driver.checkpoint()
        driver.clock.now += CONFIG.file_delete_delay_ms + 1
        driver.checkpoint()
        driver.check()
        driver.crash(None)


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_is_appended_behind_what_is_half_done(name: str) -> None:
    """Else power loss could join old records to new ones."""
    change = CHANGES[name]
    unfinished = 0
    for number in range(changes_of(change)):
        driver = lived()
        Refusing(driver, number)
        try:
            change(driver)
        except RaftlogError:
            pass
        else:
            continue  # refused where it does no harm
        driver.storage.on_step = None
        log, batch = driver.log, timed_batch([5], 100, fill=9)
        stamped = 20
        if not log.has_unfinished_cut:
            continue
        unfinished += 1
        with pytest.raises(StorageError, match="was being truncated"):
            log.append(batch, validate_produced(batch), leader_epoch=stamped, now_ms=1)
        log.finish_cut()
        start, end = log.log_start_offset, log.log_end_offset
        for _ in range(4):
            log.append(batch, validate_produced(batch), leader_epoch=stamped, now_ms=1)
        log.flush()
        for seed in range(3):
            stopped = driver.stopped()
            stopped.storage.crash(Random(seed))
            stopped.open()
            found = stopped.log
            assert (found.log_start_offset, found.log_end_offset) == (start, end + 4)
            assert found.leader_epochs.latest_epoch == stamped
    assert unfinished


@pytest.mark.parametrize("name", CHANGES)
def test_power_loss_after_a_refusal_leaves_what_was_or_what_will_be(name: str) -> None:
    change = CHANGES[name]
    for number in range(changes_of(change)):
        driver = lived()
        Refusing(driver, number)
        try:
            change(driver)
        except RaftlogError:
            driver.durable_end = min(driver.durable_end, driver.end)
        driver.storage.on_step = None
        for seed in range(4):
            driver.stopped().crash(Random(seed))


def test_a_roll_and_retention_in_the_middle_of_a_truncation() -> None:
    """Both may run in another thread, between the choice of the segment and the cut."""
    for moment in ("marks", "read"):
        driver = lived()
        log = driver.log
        done: list[str] = []

        def disturb(
            op: str, path: str, moment: str = moment, done: list[str] = done, driver: LogDriver = driver
        ) -> None:
            hit = (op == "write" and "offset-checkpoint" in path) if moment == "marks" else op == "read"
            if hit and not done:
                done.append(op)
                log = driver.log
                other = threading.Thread(target=lambda: (log.roll(), log.delete_records(7)))
                other.start()
                other.join(timeout=60)
                driver.start = max(driver.start, 7)

        driver.storage.on_step = disturb
        driver.truncate(11)
        driver.storage.on_step = None
        assert done
        driver.check()
        driver.append(value_bytes=400)
        driver.flush()
        driver.check()
        driver.crash(Random(1))
        assert log.topic == "topic"


def test_records_that_are_deleted_in_the_middle_of_their_truncation() -> None:
    driver = lived()

    def disturb(op: str, path: str) -> None:
        if op == "read" and driver.log.log_start_offset < 14:
            driver.start = driver.log.delete_records(14)

    driver.storage.on_step = disturb
    with pytest.raises(OffsetOutOfRange, match="the log starts at 14"):
        driver.log.truncate_to(7, now_ms=driver.clock.now)
    driver.storage.on_step = None
    driver.check()
    continued(driver)


def test_a_flush_that_waits_for_a_truncation_stores_nothing_of_what_was_cut_off() -> None:
    driver = lived()
    for _ in range(6):
        driver.append(value_bytes=200)
    ticket = driver.log.begin_flush()
    assert ticket is not None
    assert ticket.sealed
    driver.truncate(9)
    ticket.run()
    driver.log.finish_flush(ticket)
    names = driver.storage.list_sizes(driver.log.directory)
    bases = {segment.base_offset for segment in driver.log.segments}
    assert max(int(name[:20]) for name in names if name.endswith((".log", ".index", ".timeindex"))) <= max(bases)
    continued(driver)
    driver.crash(Random(3))


def test_the_leaders_bytes_are_refused_when_one_bit_is_another_or_the_epoch_is_not_its_own() -> None:
    leader, follower = lived(), LogDriver()
    follower.open()
    data = b"".join(piece for _, piece in leader.stored_batches())
    follower.log.reset_to(leader.stored_batches()[0][0], now_ms=1)
    for position in (30, 61, 62, len(data) // 2, len(data) - 1):
        torn = bytearray(data)
        torn[position] ^= 4
        before = follower.log.log_end_offset
        with pytest.raises(CorruptRecordError):
            follower.log.append_stamped(torn, now_ms=1)
        good = follower.log.log_end_offset
        assert good >= before
        follower.log.truncate_to(before, now_ms=1)
    with pytest.raises(CorruptRecordError, match="from the leader of epoch 3"):
        follower.log.append_stamped(data, now_ms=1, max_epoch=3)
    follower.log.truncate_to(follower.log.log_start_offset, now_ms=1)
    follower.log.append_stamped(data, now_ms=1, max_epoch=4)
    assert b"".join(piece for _, piece in follower.stored_batches()) == data


RETENTION_CONFIG = LogConfig(segment_bytes=600, retention_ms=None, file_delete_delay_ms=100)
"""Two batches of 280 bytes and two records a segment."""


def driver_after(batches: int, config: LogConfig, step_ms: int = 10) -> LogDriver:
    driver = LogDriver(config=config)
    driver.open()
    for _ in range(batches):
        driver.append([driver.clock.now] * 2)
        driver.clock.now += step_ms
    driver.flush()
    return driver


def test_size_keeps_what_is_needed_to_have_that_much() -> None:
    driver = driver_after(10, replace(RETENTION_CONFIG, retention_bytes=1_200))
    assert driver.log.segment_count == 5
    assert driver.log.apply_retention(driver.clock.now) == 2
    assert driver.log.log_start_offset == 8
    assert driver.log.size_bytes == 6 * 280
    assert driver.log.apply_retention(driver.clock.now) == 0


def test_time_counts_from_the_largest_timestamp_of_a_segment() -> None:
    driver = driver_after(10, RETENTION_CONFIG)
    last_of_first = driver.chain[1].timestamps_ms[0]
    driver.log.update_config(replace(RETENTION_CONFIG, retention_ms=1_000))
    assert driver.log.apply_retention(last_of_first + 1_000) == 0
    assert driver.log.apply_retention(last_of_first + 1_001) == 1


def test_a_topic_nobody_writes_to_empties() -> None:
    driver = driver_after(3, replace(RETENTION_CONFIG, retention_ms=1_000))
    driver.clock.now += 10_000
    driver.checkpoint()
    assert driver.log.log_start_offset == driver.log.log_end_offset == 6
    assert driver.log.segment_count == 1
    driver.check()
    driver.crash(None)
    assert driver.log.log_end_offset == 6
    driver.append()
    driver.check()


def test_nothing_above_the_high_watermark_expires() -> None:
    driver = driver_after(6, replace(RETENTION_CONFIG, retention_bytes=0))
    driver.log.high_watermark = 7
    driver.log.apply_retention(driver.clock.now)
    assert driver.log.log_start_offset == 4


def test_records_without_timestamps_do_not_expire_by_time() -> None:
    driver = LogDriver(config=replace(RETENTION_CONFIG, retention_ms=1))
    driver.open()
    for _ in range(4):
        driver.append([-1])
    driver.flush()
    assert driver.log.apply_retention(10**15) == 0


def test_a_compacted_topic_does_not_expire() -> None:
    driver = driver_after(10, replace(RETENTION_CONFIG, retention_bytes=0, cleanup_policy="compact"))
    assert driver.log.apply_retention(10**15) == 0
    driver.log.update_config(replace(RETENTION_CONFIG, retention_bytes=0, cleanup_policy="compact,delete"))
    assert driver.log.apply_retention(10**15) > 0


def names(driver: LogDriver) -> set[str]:
    return set(driver.storage.list_sizes(driver.log.directory))


def test_files_are_renamed_first_and_removed_after_the_delay() -> None:
    driver = driver_after(4, RETENTION_CONFIG)
    driver.checkpoint()
    driver.delete_records(4)
    gone = f"{0:020d}.log"
    assert gone in names(driver)
    driver.checkpoint()
    assert gone not in names(driver)
    assert f"{gone}.deleted" in names(driver)
    driver.clock.now += 99
    driver.checkpoint()
    assert f"{gone}.deleted" in names(driver)
    driver.clock.now += 1
    driver.checkpoint()
    assert not any("deleted" in name or name.startswith(f"{0:020d}") for name in names(driver))


def test_no_file_goes_before_the_new_log_start_is_durable() -> None:
    driver = driver_after(4, RETENTION_CONFIG)
    driver.checkpoint()
    driver.delete_records(4)
    driver.storage.faults.append(Fault("rename", "*offset-checkpoint*", errno=28))
    driver.checkpoint()
    assert f"{0:020d}.log" in names(driver)
    driver.storage.faults.clear()
    driver.checkpoint()
    assert f"{0:020d}.log" not in names(driver)


def test_a_log_start_that_moved_after_the_checkpoint_waits_for_the_next_one() -> None:
    driver = driver_after(6, RETENTION_CONFIG)
    driver.delete_records(4)
    driver.checkpoint()
    driver.delete_records(8)
    driver.log.sweep(driver.clock.now)
    assert f"{4:020d}.log" in names(driver)
    driver.checkpoint()
    assert f"{4:020d}.log" not in names(driver)


def test_a_removed_offset_is_out_of_range_at_once() -> None:
    driver = driver_after(4, RETENTION_CONFIG)
    driver.delete_records(5)
    with pytest.raises(OffsetOutOfRange):
        driver.log.read(4, 100, 8, blocking=True)
    driver.check()
    assert driver.log.delete_records(3) == 5
    with pytest.raises(OffsetOutOfRange, match="high watermark is 8"):
        driver.log.delete_records(9)


def test_reads_of_a_detached_segment_go_on_or_say_out_of_range() -> None:
    driver = driver_after(6, RETENTION_CONFIG)
    driver.checkpoint()
    segment = driver.log.segments[0]
    segment.opened = None
    driver.delete_records(8)
    driver.checkpoint()
    with pytest.raises(OffsetOutOfRange, match="just been removed"):
        driver.log.open_segment(segment)


def test_segments_roll_by_size() -> None:
    driver = driver_after(5, RETENTION_CONFIG)
    assert [segment.size for segment in driver.log.segments] == [560, 560, 280]
    driver.append(value_bytes=5_000)  # larger than a segment: one of its own
    driver.append()
    assert [segment.base_offset for segment in driver.log.segments] == [0, 4, 8, 10, 11]


def test_segments_roll_by_age_of_their_first_append() -> None:
    driver = driver_after(1, replace(RETENTION_CONFIG, segment_ms=50), step_ms=49)
    assert not driver.log.maybe_roll(driver.clock.now)
    driver.clock.now += 1
    driver.append()
    assert driver.log.segment_count == 2
    driver.clock.now += 50
    assert driver.log.maybe_roll(driver.clock.now)
    assert not driver.log.maybe_roll(driver.clock.now + 1_000), "an empty segment must not be rolled by age"


def test_a_segment_begun_while_the_clock_was_ahead_is_rolled_by_age_all_the_same() -> None:
    """It would stay active until the clock is there again; a compacted topic keeps all values for so long."""
    driver = driver_after(1, replace(RETENTION_CONFIG, segment_ms=50), step_ms=0)
    corrected_ms = driver.clock.now - 365 * 86_400_000
    assert not driver.log.maybe_roll(corrected_ms)
    assert not driver.log.maybe_roll(corrected_ms + 49)
    assert driver.log.maybe_roll(corrected_ms + 50)
    driver.check()


def test_files_removed_while_the_clock_was_ahead_are_gone_after_the_usual_delay() -> None:
    driver = driver_after(6, RETENTION_CONFIG)
    driver.delete_records(8)
    driver.checkpoint()
    renamed = [name for name in names(driver) if name.endswith(".deleted")]
    assert renamed
    driver.clock.now -= 365 * 86_400_000
    driver.checkpoint()
    assert [name for name in names(driver) if name.endswith(".deleted")] == renamed
    driver.clock.now += RETENTION_CONFIG.file_delete_delay_ms
    driver.checkpoint()
    assert [name for name in names(driver) if name.endswith(".deleted")] == []


# Races


def judged_beside(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> list[int]:
    """Take these steps while retention first decides; return the list of expired segments by decision."""
    judged: list[int] = []

    def judge(*args: Any) -> int:
        count = expired_segments(*args)
        if not judged:
            for step in steps:
                step()
        judged.append(count)
        return count

    monkeypatch.setattr(partition_log, "expired_segments", judge)
    return judged


def test_records_that_arrive_while_retention_judges_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The active segment has expired; before it is rolled, a fresh record gets into it and is acknowledged."""
    driver = driver_after(3, replace(RETENTION_CONFIG, retention_ms=1_000, segment_bytes=10_000))
    driver.clock.now += 10_000
    judged = judged_beside(monkeypatch, driver.append, driver.flush)
    driver.log.apply_retention(driver.clock.now)
    assert judged == [1, 0]
    assert driver.log.log_start_offset == 0
    driver.check()


def test_retention_never_passes_the_high_watermark(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_after(3, replace(RETENTION_CONFIG, retention_ms=1_000, segment_bytes=10_000))
    driver.clock.now += 10_000
    expired = [driver.clock.now - 5_000]  # but not committed
    judged_beside(monkeypatch, partial(driver.append, expired))
    driver.log.apply_retention(driver.clock.now)
    assert driver.log.log_start_offset <= driver.log.high_watermark == 6


def remove_at_open_of(driver: LogDriver, base_offset: int, new_start: int) -> None:
    """Have retention remove everything below `new_start` when that segment is about to be opened."""

    def on_step(op: str, path: str) -> None:
        if op == "open" and path.endswith(f"{base_offset:020d}.log"):
            driver.storage.on_step = None
            driver.delete_records(new_start)
            driver.checkpoint()

    for segment in driver.log.segments[:-1]:
        driver.log._cache.forget(segment)
    driver.storage.on_step = on_step


def test_a_look_up_by_time_that_races_retention_answers_from_what_is_left() -> None:
    driver = driver_after(8, RETENTION_CONFIG)
    driver.checkpoint()
    remove_at_open_of(driver, 0, 4)
    found = driver.log.offset_for_time(0)
    assert found is not None
    assert found.offset == 4
    remove_at_open_of(driver, 4, 8)
    assert driver.log.max_timestamp() is not None
    assert driver.manager is not None
    assert not driver.manager.offline_dirs


def test_a_cold_read_that_races_retention_is_out_of_range() -> None:
    driver = driver_after(8, RETENTION_CONFIG)
    driver.checkpoint()
    remove_at_open_of(driver, 0, 4)
    with pytest.raises(OffsetOutOfRange, match="the log has 4 to 16"):
        driver.log.read(0, 100, 16, blocking=True)


def test_files_that_could_not_be_removed_go_at_the_next_sweep() -> None:
    driver = driver_after(4, RETENTION_CONFIG)
    driver.checkpoint()
    driver.delete_records(4)
    fault = Fault("open", driver.log.directory, errno=errno.EMFILE)
    driver.storage.faults.append(fault)
    driver.checkpoint()
    driver.storage.faults.clear()
    driver.clock.now += 100
    removed: list[str] = []
    driver.storage.on_step = lambda op, path: removed.append(op) if op in ("remove", "sync_dir") else None
    driver.checkpoint()
    assert removed[0] == "sync_dir", "the directory must be synced before the first file is removed"
    assert "remove" in removed
    assert not any(name.startswith(f"{0:020d}") for name in names(driver))
    assert driver.manager is not None
    assert not driver.manager.offline_dirs


DIRECTORY = f"{LOG_DIR}/topic-0"
LEAVING_CONFIG = LogConfig(segment_bytes=600, index_interval_bytes=0, retention_bytes=1_000, retention_ms=None)


def opened_logs() -> LogDriver:
    driver = LogDriver(MemoryStorage(), LEAVING_CONFIG)
    driver.open()
    return driver


def snapshots(driver: LogDriver) -> list[int]:
    return snapshot_offsets(driver.storage.list_sizes(DIRECTORY))


def let_go_of_unwritten(how: str = "marks") -> LogDriver:
    """Return a log whose first segments lie below the durable log start, with no snapshot of their content."""
    driver = opened_logs()
    for _ in range(6):
        driver.append([0], 0)
    driver.crash(None)  # the snapshots that were due at the rolls are forgotten
    committed = driver.end
    driver.append([0], 0)
    driver.delete_records(committed)
    assert driver.log.segments[0].base_offset > 2
    if how == "a cut":
        driver.truncate(committed)
    else:
        assert driver.manager is not None
        driver.manager.checkpoint_marks()
    assert not snapshots(driver)
    return driver


def segments_on_disk(driver: LogDriver) -> int:
    return sum(name.endswith(".log") for name in driver.storage.list_sizes(DIRECTORY))


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("how", ["a cut", "marks"])
def test_segments_are_let_go_of_only_when_what_they_say_is_written(how: str, seed: int | None) -> None:
    """A cut, and marks between two checkpoints, write the log start too, so a start finds segments below it."""
    driver = let_go_of_unwritten(how)
    driver.crash(None if seed is None else Random(seed))
    driver.checkpoint()
    assert segments_on_disk(driver) == driver.log.segment_count
    driver.crash(None)
    driver.check()


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_start_that_lets_go_of_segments_may_be_stopped_anywhere(seed: int | None) -> None:
    def start(driver: LogDriver) -> None:
        driver.open()
        assert driver.manager is not None
        driver.manager.run_housekeeping_once(driver.clock.now)

    def dice() -> Random | None:
        return None if seed is None else Random(seed)

    whole = let_go_of_unwritten()
    whole.storage.crash(dice())
    begun = whole.storage.operations
    start(whole)
    assert snapshots(whole)
    assert segments_on_disk(whole) == whole.log.segment_count
    count = whole.storage.operations - begun
    assert count > 15
    for crash_at in range(count):
        driver = let_go_of_unwritten()
        driver.storage.crash(dice())
        driver.storage.crash_at = driver.storage.operations + crash_at
        with pytest.raises(PowerLoss):
            start(driver)
        driver.crash(dice())
        assert len(driver.log.producers) == 2, crash_at
        driver.checkpoint()
        assert segments_on_disk(driver) == driver.log.segment_count
        driver.crash(dice())
        assert len(driver.log.producers) == 2, crash_at


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_start_on_a_full_disk_knows_what_lies_below_the_log_start(seed: int | None) -> None:
    driver = let_go_of_unwritten()
    fault = Fault("write", errno=errno.ENOSPC)
    driver.storage.faults.append(fault)
    for _ in range(2):
        driver.crash(None if seed is None else Random(seed))  # opens it, and compares what it knows
        assert not snapshots(driver)
        assert len(driver.log.producers) == 2
        assert segments_on_disk(driver) > driver.log.segment_count, (
            "the old segments must be kept until the disk has space"
        )
    driver.storage.faults.remove(fault)
    driver.checkpoint()
    assert snapshots(driver)
    assert segments_on_disk(driver) == driver.log.segment_count
    driver.crash(None if seed is None else Random(seed))
    assert len(driver.log.producers) == 2


def test_a_cut_before_the_snapshot_is_written_reads_what_lies_below_the_log_start() -> None:
    driver = let_go_of_unwritten()
    driver.storage.faults.append(Fault("write", "*.snapshot*", errno.ENOSPC))
    driver.crash(None)
    end = driver.end
    for _ in range(2):
        driver.append([0], 0)
    driver.truncate(end)
    driver.check()
    assert len(driver.log.producers) == 2


def test_what_lies_below_the_log_start_and_is_damaged_goes() -> None:
    driver = let_go_of_unwritten()
    first, *_, last = sorted(name for name in driver.storage.list_sizes(DIRECTORY) if name.endswith(".log"))
    assert int(last[:20]) == driver.log.segments[0].base_offset
    driver.storage.lose_durably(f"{DIRECTORY}/{first}", 70)
    driver.storage.crash(None)
    driver.open()
    assert segments_on_disk(driver) == driver.log.segment_count
    assert f"{first}.deleted" in driver.storage.list_sizes(DIRECTORY)
    driver.append([0], 0)
    driver.flush()
    assert [offset for offset, _ in driver.stored_batches()] == [6, 7]


@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_of_a_clean_stop_is_made_durable_before_segments_go(seed: int) -> None:
    """A clean stop does not fsync it. It may become the only one that tells of them: a cut takes what is newer."""
    driver = opened_logs()
    for _ in range(5):
        driver.append([0], 0)
    driver.flush()
    committed = driver.end
    driver.close()
    driver.crash(None)
    driver.append([0], 0)
    driver.delete_records(committed)
    driver.checkpoint()
    assert segments_on_disk(driver) == driver.log.segment_count
    driver.truncate(committed)
    assert snapshots(driver)[-1] == committed
    driver.crash(Random(seed))
    assert len(driver.log.producers) == 2


@pytest.mark.parametrize("seed", range(4))
def test_a_torn_snapshot_does_not_count_as_the_one_that_tells_of_segments(seed: int) -> None:
    driver = opened_logs()
    for _ in range(5):
        driver.append([0], 0)
    driver.flush()
    committed = driver.end
    driver.close()
    driver.storage.lose_durably(f"{DIRECTORY}/{snapshot_name(committed)}", 20)
    driver.crash(None)
    driver.append([0], 0)
    driver.delete_records(committed)
    driver.checkpoint()
    driver.truncate(committed)
    driver.crash(Random(seed))
    assert len(driver.log.producers) == 2
    assert committed not in snapshots(driver)


@pytest.mark.parametrize("seed", range(6))
def test_the_marks_have_no_log_start_beyond_what_is_durable(seed: int) -> None:
    """With flush.messages above 1 records are committed, and deleted, before they are fsynced here."""
    driver = opened_logs()
    for _ in range(2):
        driver.append([0], 0)
    driver.flush()
    for _ in range(6):
        driver.append([0], 0)
    driver.log.high_watermark = driver.end
    driver.delete_records(driver.end - 1)
    assert driver.manager is not None
    driver.manager.checkpoint_marks()
    driver.crash(Random(seed))
    assert 2 <= driver.log.log_start_offset <= driver.log.log_end_offset


def test_segments_that_go_in_the_middle_of_a_checkpoint_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened_logs()
    for _ in range(6):
        driver.append([0], 0)
    driver.crash(None)  # the snapshots that were due at the rolls are forgotten
    log, store = driver.log, driver.log.store_producers

    def store_and_delete(*, closing: bool = False) -> None:
        store(closing=closing)
        log.delete_records(driver.end)

    monkeypatch.setattr(log, "store_producers", store_and_delete)
    driver.checkpoint()
    assert driver.start == driver.end
    driver.crash(None)
    assert len(driver.log.producers) == 2
    driver.checkpoint()
    assert segments_on_disk(driver) == driver.log.segment_count
    driver.crash(Random(1))
    assert len(driver.log.producers) == 2


# Many segments


def test_a_roll_costs_the_same_however_many_segments_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that was copied at each roll took 20,000 batches of a topic with tiny segments minutes on the loop."""
    driver = opened(LogConfig(segment_bytes=100))
    copied: list[int] = []
    of = partition_log._Segments.of

    def counted(segments: list[Segment]) -> partition_log._Segments:
        copied.append(len(segments))
        return of(segments)

    monkeypatch.setattr(partition_log._Segments, "of", counted)
    before = driver.log.segment_count
    for _ in range(50):
        driver.append()
    assert driver.log.segment_count == before + 49
    assert copied == []
    driver.check()


def test_a_flush_of_many_segments_compares_none_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened(LogConfig(segment_bytes=100))
    for _ in range(200):
        driver.append()
    compared = 0

    def equal(one: Segment, other: object) -> bool:
        nonlocal compared
        compared += 1
        return one is other

    monkeypatch.setattr(Segment, "__eq__", equal)
    assert len(driver.log._unflushed) == 199
    driver.flush()
    assert driver.log._unflushed == []
    assert len(driver.log.sealed_below(driver.log.log_end_offset).segments) == 199
    assert compared < 200


def test_a_segment_belongs_to_the_log_until_it_leaves() -> None:
    driver = opened(LogConfig(segment_bytes=100))
    for _ in range(5):
        driver.append()
    first, *_, last = driver.log.segments
    assert driver.log.holds(first)
    assert driver.log.holds(last)
    driver.flush()
    driver.truncate(3)
    assert driver.log.holds(first)
    assert not driver.log.holds(last)
    driver.log.high_watermark = 3
    driver.delete_records(2)
    assert not driver.log.holds(first)
