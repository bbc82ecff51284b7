"""What a crash may leave at the end of a log is cut off; damage anywhere else is loud and touches nothing."""

from __future__ import annotations

import pytest

from broker.log.config import LogConfig
from broker.log.manager import LogManager
from raftlog.errors import CorruptRecordError
from tests.support.log_driver import TOPIC_ID, LogDriver, open_manager
from tests.support.memory_storage import MemoryStorage

DIRECTORY = "/data/topic-0"
FIRST_LOG = f"{DIRECTORY}/{0:020d}.log"
CONFIG = LogConfig(index_interval_bytes=300)


def reopened(storage: MemoryStorage) -> LogManager:
    storage.crash(None)
    return open_manager(storage, config=CONFIG)


def driver_with(batches: int, config: LogConfig = CONFIG) -> LogDriver:
    driver = LogDriver(config=config)
    driver.open()
    for _ in range(batches):
        driver.append([driver.clock.now] * 2)
    return driver


def test_a_tail_cut_at_every_byte_ends_at_the_last_whole_batch() -> None:
    driver = driver_with(4)
    ends = [0]
    for batch in driver.chain:
        ends.append(ends[-1] + len(batch.data))
    whole = bytes(driver.storage.raw(FIRST_LOG))
    for cut in range(len(whole) + 1):
        storage = driver.storage.clone()
        del storage.raw(FIRST_LOG)[cut:]
        log = reopened(storage).get(TOPIC_ID, 0)
        assert log is not None
        batches = max(i for i, end in enumerate(ends) if end <= cut)
        assert log.log_end_offset == 2 * batches
        assert storage.raw(FIRST_LOG) == whole[: ends[batches]]


@pytest.mark.parametrize("tail", [bytes(1000), b"\xff" * 1000, b"\x01" * 64], ids=["zeros", "ones", "junk"])
def test_a_tail_of_other_bytes_is_cut_off(tail: bytes) -> None:
    driver = driver_with(4)
    whole = bytes(driver.storage.raw(FIRST_LOG))
    driver.storage.raw(FIRST_LOG).extend(tail)
    driver.crash(None)
    assert driver.storage.raw(FIRST_LOG) == whole
    driver.append()
    driver.check()


def test_a_batch_that_does_not_follow_is_no_part_of_the_log() -> None:
    driver = driver_with(2)
    data = driver.storage.raw(FIRST_LOG)
    data.extend(data[: len(driver.chain[0].data)])  # a sound batch, at the wrong offset
    driver.crash(None)
    assert driver.log.log_end_offset == 4


def test_every_bit_flipped_above_the_recovery_point_ends_the_log_before_it() -> None:
    driver = driver_with(3)
    sizes = [len(batch.data) for batch in driver.chain]
    for position in range(0, sum(sizes), 3):
        storage = driver.storage.clone()
        storage.raw(FIRST_LOG)[position] ^= 0x40
        log = reopened(storage).get(TOPIC_ID, 0)
        assert log is not None
        number = 0 if position < sizes[0] else 1 if position < sizes[0] + sizes[1] else 2
        if number == 0 and 12 <= position < 16:
            continue  # the epoch stands outside the checksum; a first batch may have any
        assert log.log_end_offset <= 2 * number + (2 if 12 <= position - sum(sizes[:number]) < 16 else 0)


def test_bit_rot_below_the_recovery_point_never_becomes_a_gap() -> None:
    driver = driver_with(6)
    driver.flush()
    driver.checkpoint()
    for index in (".index", ".timeindex"):  # so that the damage is met: the log is read from its start
        driver.storage.raw(FIRST_LOG.replace(".log", index)).clear()
    for position in range(0, len(driver.storage.raw(FIRST_LOG)), 7):
        storage = driver.storage.clone()
        storage.raw(FIRST_LOG)[position] ^= 0x01
        before = bytes(storage.raw(FIRST_LOG))
        manager = reopened(storage)
        if 12 <= position % len(driver.chain[0].data) < 16:
            continue  # the epoch stands outside the checksum
        assert manager.get(TOPIC_ID, 0) is None
        corrupt = manager.corrupt_logs[TOPIC_ID, 0]
        assert FIRST_LOG in str(corrupt.error)
        assert "position" in str(corrupt.error)
        assert storage.raw(FIRST_LOG) == before
        with pytest.raises(CorruptRecordError):
            manager.create("topic", TOPIC_ID, 0)


def test_a_flushed_tail_that_is_missing_is_loud() -> None:
    driver = driver_with(6)
    driver.flush()
    driver.checkpoint()
    del driver.storage.raw(FIRST_LOG)[-1:]
    assert (TOPIC_ID, 0) in reopened(driver.storage).corrupt_logs


def test_damage_below_the_high_watermark_is_loud_although_nothing_was_flushed_since() -> None:
    """flush.messages > 1: the checkpoint flushes what it calls committed, so a torn tail is never below it."""
    driver = driver_with(6, LogConfig(index_interval_bytes=300, flush_messages=1000))
    driver.log.high_watermark = driver.end
    driver.checkpoint()
    assert driver.log.flushed_end_offset == driver.end
    driver.storage.raw(FIRST_LOG)[-1] ^= 1
    driver.storage.raw(FIRST_LOG.replace(".log", ".index")).clear()
    assert (TOPIC_ID, 0) in reopened(driver.storage).corrupt_logs


def test_a_missing_segment_is_loud() -> None:
    driver = driver_with(12, LogConfig(segment_bytes=1_000, index_interval_bytes=300))
    driver.flush()
    driver.checkpoint()
    names = [segment.log_path for segment in driver.log.segments]
    assert len(names) >= 3
    for name in names:
        storage = driver.storage.clone()
        storage.remove(name)
        assert (TOPIC_ID, 0) in reopened(storage).corrupt_logs, name


def test_segments_behind_a_torn_one_go_too() -> None:
    driver = driver_with(12, LogConfig(segment_bytes=1_000, index_interval_bytes=300))
    names = [segment.log_path for segment in driver.log.segments]
    storage = driver.storage.clone()
    del storage.raw(names[1])[-10:]
    log = reopened(storage).get(TOPIC_ID, 0)
    assert log is not None
    assert [segment.log_path for segment in log.segments] == names[:2]
    assert storage.exists(names[2] + ".deleted")
    assert not storage.exists(names[2])


def spoiled_indexes() -> list[tuple[str, bytes | None]]:
    return [("gone", None), ("empty", b""), ("zeros", bytes(120)), ("junk", b"\xa5" * 121), ("short", b"\x00")]


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
@pytest.mark.parametrize(("name", "content"), spoiled_indexes())
def test_indexes_are_rebuilt_when_missing_or_wrong(suffix: str, name: str, content: bytes | None) -> None:
    driver = driver_with(20, LogConfig(segment_bytes=1_500, index_interval_bytes=300))
    driver.flush()
    driver.close()
    stems = [segment.stem for segment in driver.log.segments]
    assert len(stems) >= 3
    good = [bytes(driver.storage.raw(stem + suffix)) for stem in stems]
    for stem in stems:
        driver.storage.remove(stem + suffix)
        if content is not None:
            driver.storage.open(stem + suffix, create=True).write((content,), 0)
    driver.crash(None)
    driver.check()
    driver.close()
    assert [bytes(driver.storage.raw(stem + suffix)) for stem in stems] == good


def test_an_index_of_another_segment_is_not_believed() -> None:
    driver = driver_with(20, LogConfig(segment_bytes=1_500, index_interval_bytes=300))
    driver.flush()
    driver.close()
    first, second = (segment.stem for segment in driver.log.segments[:2])
    for suffix in (".index", ".timeindex"):
        driver.storage.raw(first + suffix)[:] = driver.storage.raw(second + suffix)
    driver.crash(None)
    driver.check()


def test_every_cut_of_the_active_index_is_good_enough() -> None:
    driver = driver_with(20)
    driver.flush()
    driver.checkpoint()
    path = FIRST_LOG.replace(".log", ".index")
    for cut in range(len(driver.storage.raw(path))):
        storage = driver.storage.clone()
        del storage.raw(path)[cut:]
        log = reopened(storage).get(TOPIC_ID, 0)
        assert log is not None
        assert log.log_end_offset == 40
        result = log.read(21, 1, 40, blocking=True)
        assert result is not None
        assert result.records == driver.chain[10].data


def test_leader_epochs_are_read_from_the_log_when_their_checkpoint_is_damaged() -> None:
    driver = LogDriver(config=LogConfig(segment_bytes=600, index_interval_bytes=300))
    driver.open()
    for epoch in (2, 5, 9):
        driver.epoch = epoch
        driver.append()
        driver.append()
    driver.flush()
    entries = driver.log.leader_epochs.entries
    driver.close()
    for spoil in (b"junk", None):
        storage = driver.storage.clone()
        if spoil is None:
            storage.remove(f"{DIRECTORY}/leader-epoch-checkpoint")
        else:
            storage.raw(f"{DIRECTORY}/leader-epoch-checkpoint")[:] = spoil
        log = reopened(storage).get(TOPIC_ID, 0)
        assert log is not None
        assert log.leader_epochs.entries == entries
