"""Reads: whole batches, exact boundaries, no waiting where none is allowed, bounded memory."""

from __future__ import annotations

import pytest

from broker.log.config import LogConfig
from broker.log.segment_cache import SegmentCache
from raftlog.errors import CorruptRecordError, OffsetOutOfRange
from tests.support.log_driver import LogDriver


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
