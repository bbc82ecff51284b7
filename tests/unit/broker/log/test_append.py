"""Appends: stamps, log append time, followers, marks."""

from __future__ import annotations

import errno
from random import Random

import pytest

from broker.log.config import LogConfig
from raftlog.errors import CorruptRecordError, InvalidConfig, InvalidRecord, OffsetOutOfRange
from raftlog.format import Attributes, iter_headers, parse_batch, validate_produced
from raftlog.types import OffsetAndTimestamp
from tests.support.log_driver import LogDriver, timed_batch
from tests.support.memory_storage import Fault


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
