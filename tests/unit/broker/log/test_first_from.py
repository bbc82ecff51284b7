"""The first record at or after an offset: how old what a reader has yet to read is."""

from __future__ import annotations

import pytest

from broker.log.config import LogConfig
from tests.support.log_driver import LogDriver


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
