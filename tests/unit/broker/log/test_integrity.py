"""Damage that is found in an online log: by reads, by the scrub, by complaints about batches; and its consequences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from broker.log.config import LogConfig
from broker.log.integrity import (
    BATCH_BYTES,
    FIRST_PASS_MS,
    LOG_PAUSE_MS,
    OFFSET_PAUSE_MS,
    PIECE_BYTES,
    Scrub,
    ScrubPass,
    Suspicions,
)
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from raftlog.errors import CorruptRecordError, StorageError
from raftlog.format import validate_produced
from tests.support import virtual_time
from tests.support.broker_parts import TOPIC_ID as TOPIC_ID_OF_PARTS
from tests.support.broker_parts import HeldDisk, Parts
from tests.support.log_driver import LOG_DIR, TOPIC_ID, FakeClock, LogDriver, open_manager, timed_batch
from tests.support.memory_storage import MemoryStorage

BATCH_LENGTH = 280
CRC_AT, EPOCH_AT, BODY_AT = 17, 12, 200


def driver_with(batches: int, config: LogConfig | None = None) -> LogDriver:
    """Batches of two records and 280 bytes, three in a segment."""
    driver = LogDriver(config=config or LogConfig(segment_bytes=900, index_interval_bytes=0))
    driver.open()
    for _ in range(batches):
        driver.append([driver.clock.now] * 2)
    driver.flush()
    return driver


def flip(driver: LogDriver, segment: int, position: int) -> str:
    """Flip a bit on the disk, and return the path of the file."""
    path = driver.log.segments[segment].log_path
    driver.storage.raw(path)[position] ^= 4
    return path


def check_all(driver: LogDriver, max_bytes: int = 1, max_batches: int | None = None) -> list[int]:
    """Check from the log start to the end; return where each piece ended."""
    ends = [driver.log.log_start_offset]
    while ends[-1] < driver.log.log_end_offset:
        ends.append(driver.log.check(ends[-1], max_bytes, max_batches=max_batches).next_offset)
    return ends


@pytest.mark.parametrize(
    ("max_bytes", "max_batches", "ends"),
    [
        (1, None, [0, 2, 4, 6, 8]),
        (BATCH_LENGTH + 1, None, [0, 4, 6, 8]),
        (1 << 20, None, [0, 6, 8]),
        (1 << 20, 2, [0, 4, 6, 8]),
    ],
)
def test_a_whole_log_is_checked_piece_by_piece(max_bytes: int, max_batches: int | None, ends: list[int]) -> None:
    assert check_all(driver_with(4), max_bytes, max_batches) == ends


@pytest.mark.parametrize("byte", [0, 5, 8, EPOCH_AT, CRC_AT, 25, 40, BODY_AT])
@pytest.mark.parametrize(("segment", "batch"), [(0, 0), (0, 1), (0, 2), (1, 1), (2, 0)])
def test_any_flipped_bit_is_found_where_it_lies_and_nowhere_else(segment: int, batch: int, byte: int) -> None:
    driver = driver_with(8)
    path = flip(driver, segment, batch * BATCH_LENGTH + byte)
    damaged = segment * 6 + batch * 2
    with pytest.raises(CorruptRecordError, match="are damaged on the disk") as caught:
        driver.log.check(damaged + 1, 1)
    assert f"{path} position {batch * BATCH_LENGTH}: " in str(caught.value)
    assert f"offsets {damaged} to {damaged + 1} of topic-0" in str(caught.value)
    for offset in range(driver.end):
        if offset not in (damaged, damaged + 1):
            driver.log.check(offset, 1)


def test_damage_in_front_of_what_is_asked_for_is_found_where_no_entry_lies_between() -> None:
    driver = driver_with(6, LogConfig(index_interval_bytes=1 << 20))
    driver.close()
    driver.crash(None)  # the boundaries of the last batches are not known any more
    flip(driver, 0, BODY_AT)
    with pytest.raises(CorruptRecordError, match="offsets 0 to 11 of topic-0"):
        driver.log.check(9, 1)


def test_a_file_that_became_shorter_is_found() -> None:
    driver = driver_with(4)
    del driver.storage.raw(driver.log.segments[0].log_path)[500:]
    with pytest.raises(CorruptRecordError, match="offsets 2 to 3"):
        driver.log.check(2, 1)


def test_what_is_not_there_is_passed_over() -> None:
    driver = driver_with(8)
    assert driver.log.check(16, 1).next_offset == driver.log.check(99, 1).next_offset == 16
    driver.delete_records(7)
    driver.checkpoint()
    assert driver.log.check(0, 1).next_offset == 8


def test_a_closed_log_is_not_checked() -> None:
    driver = driver_with(2)
    driver.log.close()
    with pytest.raises(StorageError, match="is closed"):
        driver.log.check(0, 1)


def test_bytes_that_a_truncation_takes_away_meanwhile_are_no_damage() -> None:
    driver = driver_with(8)
    path, log = driver.log.segments[1].log_path, driver.log

    def truncate(op: str, at: str) -> None:
        if op == "read" and at == path:
            driver.storage.on_step = None
            log.truncate_to(6, now_ms=0)

    driver.storage.on_step = truncate
    assert log.check(8, 1).next_offset == 6


# A log that turns corrupt


def test_a_log_found_damaged_is_closed_and_listed_and_its_name_is_free_once_it_is_set_aside() -> None:
    driver = driver_with(4)
    manager, log = driver.manager, driver.log
    assert manager is not None
    error = CorruptRecordError("the batch at 4")
    manager.mark_corrupt(log, error)
    assert log.closed
    assert manager.get(TOPIC_ID, 0) is None
    assert manager.is_lost(TOPIC_ID, 0)
    assert manager.corrupt_logs[TOPIC_ID, 0].error is error
    with pytest.raises(CorruptRecordError, match="the batch at 4"):
        manager.create("topic", TOPIC_ID, 0)
    assert manager.set_aside(TOPIC_ID, 0) == f"{LOG_DIR}/~stray-{TOPIC_ID.hex()}-0"
    fresh = manager.create("topic", TOPIC_ID, 0)
    assert fresh.log_end_offset == 0


def test_what_was_found_damaged_is_not_served_after_a_restart_either() -> None:
    driver = driver_with(4)
    assert driver.manager is not None
    flip(driver, 0, BODY_AT)
    driver.manager.mark_corrupt(driver.log, CorruptRecordError("the batch at 4"))
    driver.manager.close()
    driver.storage.crash(None)
    again = open_manager(driver.storage, config=driver.config)
    assert again.get(TOPIC_ID, 0) is None
    found = again.corrupt_logs[TOPIC_ID, 0].error
    assert "the batch at 4" in str(found)
    assert f"{LOG_DIR}/topic-0/damaged" in str(found), "the message must name the directory to repair"


def test_a_log_that_is_gone_or_another_one_by_now_is_not_marked() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    old = manager.create("topic", TOPIC_ID, 0)
    manager.delete(TOPIC_ID, 0)
    manager.mark_corrupt(old, CorruptRecordError("late"))
    assert not manager.corrupt_logs
    new = manager.create("topic", TOPIC_ID, 0)
    manager.mark_corrupt(old, CorruptRecordError("late"))
    assert manager.get(TOPIC_ID, 0) is new
    assert not new.closed


def test_a_disk_that_refuses_the_mark_does_not_keep_the_log_online() -> None:
    driver = driver_with(2)
    assert driver.manager is not None

    def refuse(op: str, path: str) -> None:
        if path.endswith("damaged.tmp"):
            raise OSError(28, "No space left on device", path)

    driver.storage.on_step = refuse
    driver.manager.mark_corrupt(driver.log, CorruptRecordError("x"))
    assert driver.manager.get(TOPIC_ID, 0) is None
    assert (TOPIC_ID, 0) in driver.manager.corrupt_logs
    assert not driver.manager.offline_dirs


def test_a_follower_calls_a_version_that_it_does_not_know_damage() -> None:
    driver = driver_with(1)
    batch = bytearray(driver.chain[0].data)
    batch[16] ^= 32
    with pytest.raises(CorruptRecordError, match="magic 33"):
        driver.log.append_stamped(bytes(batch), now_ms=0)


BATCH = timed_batch([5, 6])
HEADER = validate_produced(BATCH)
SIZE = len(BATCH)
RATE = 1 << 30
DAY_MS = 86_400_000


class Scene:
    """Logs with segments of three batches, flushed; and a callback for damage."""

    def __init__(self, logs: int = 1, batches: int = 8, bytes_per_second: int = RATE) -> None:
        self.storage = MemoryStorage()
        self.clock = FakeClock()
        self.disk = HeldDisk()
        config = LogConfig(index_interval_bytes=0, segment_bytes=3 * SIZE)
        self.manager = open_manager(self.storage, clock=self.clock, config=config)
        self.logs = [self.manager.create("t", TOPIC_ID, partition) for partition in range(logs)]
        for log in self.logs:
            self.append(log, batches)
            log.flush()
        self.damaged: list[tuple[PartitionLog, str]] = []
        self.read: list[str] = []
        self.storage.on_step = lambda op, path: self.read.append(path) if op == "read" else None
        self.scrub = Scrub(
            self.manager,
            self.disk,
            self.clock,
            self._on_damaged,
            bytes_per_second=bytes_per_second,
            interval_ms=DAY_MS,
        )

    def append(self, log: PartitionLog, batches: int) -> None:
        for _ in range(batches):
            log.append(BATCH, HEADER, leader_epoch=1, now_ms=0)

    def _on_damaged(self, log: PartitionLog, error: CorruptRecordError) -> None:
        self.damaged.append((log, str(error)))

    async def tick(self, after_ms: float = FIRST_PASS_MS) -> None:
        self.clock.now += int(after_ms)
        self.scrub.tick()
        await asyncio.sleep(0.05)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    virtual_time.run(scenario)


def test_every_segment_of_every_log_is_read_in_a_pass_and_passes_are_far_apart() -> None:
    async def scenario() -> None:
        scene = Scene(logs=2)
        await scene.tick(FIRST_PASS_MS - 1)
        assert not scene.read
        await scene.tick(1)
        paths = [segment.log_path for log in scene.logs for segment in log.segments]
        assert len(paths) == 6
        assert [path for path in dict.fromkeys(scene.read) if path.endswith(".log")] == paths
        scene.read.clear()
        await scene.tick(DAY_MS - 1)
        assert not scene.read
        await scene.tick(1)
        assert scene.read

    run(scenario())


def test_damage_is_passed_on_and_the_other_logs_are_checked_all_the_same() -> None:
    async def scenario() -> None:
        scene = Scene(logs=3)
        for log in scene.logs[::2]:
            scene.storage.raw(log.segments[1].log_path)[SIZE + 200] ^= 1
        await scene.tick()
        assert [log for log, _ in scene.damaged] == scene.logs[::2]
        assert all("offsets 8 to 9" in error for _, error in scene.damaged)

    run(scenario())


def test_what_is_not_flushed_is_not_read() -> None:
    async def scenario() -> None:
        scene = Scene(batches=3)
        scene.append(scene.logs[0], 1)
        await scene.tick()
        assert {path for path in scene.read if path.endswith(".log")} == {scene.logs[0].segments[0].log_path}

    run(scenario())


def test_a_rate_of_zero_reads_nothing() -> None:
    async def scenario() -> None:
        scene = Scene(bytes_per_second=0)
        await scene.tick(10 * DAY_MS)
        assert not scene.read

    run(scenario())


@pytest.mark.parametrize("held", [False, True], ids=["pausing", "checking"])
def test_nothing_is_read_after_the_end(held: bool) -> None:
    async def scenario() -> None:
        scene = Scene(bytes_per_second=100 * BATCH_BYTES)  # 10 ms for a batch
        scene.disk.held = held
        scene.clock.now += int(FIRST_PASS_MS)
        scene.scrub.tick()
        scene.scrub.close()
        read = len(scene.read)
        scene.disk.release()
        await asyncio.sleep(0.1)
        assert len(scene.read) <= read + held
        assert not scene.damaged
        scene.scrub.tick()

    run(scenario())


def test_a_log_that_goes_meanwhile_ends_only_its_own_check() -> None:
    async def scenario() -> None:
        scene = Scene(logs=2)
        scene.disk.held = True
        scene.clock.now += int(FIRST_PASS_MS)
        scene.scrub.tick()
        scene.logs[0].close()
        scene.disk.release()
        await asyncio.sleep(0.05)
        assert {path for path in scene.read if path.endswith(".log")} == {
            segment.log_path for segment in scene.logs[1].segments
        }
        assert not scene.damaged

    run(scenario())


# The pace


@pytest.mark.parametrize("bytes_per_second", [1, 1000, 1 << 20, 20 << 20, RATE])
def test_a_pass_takes_at_least_as_long_as_the_rate_says(bytes_per_second: int) -> None:
    async def scenario() -> None:
        scene = Scene(batches=100)
        log = scene.logs[0]
        scrub, pauses = ScrubPass([log], bytes_per_second), []
        assert scrub.piece_bytes <= PIECE_BYTES
        while (found := scrub.next()) is not None:
            assert found[0] is log
            piece = log.check(found[1], scrub.piece_bytes, max_batches=scrub.piece_batches)
            pauses.append(scrub.checked(piece))
        assert scrub.checked_bytes == log.size_bytes
        assert sum(pauses) == pytest.approx(100 * BATCH_BYTES / bytes_per_second)
        assert max(pauses) <= max(0.25, BATCH_BYTES / bytes_per_second), (
            "the scrub must check in small pieces, with pauses of at most 0.25 s or one batch"
        )

    run(scenario())


class Complaints:
    """Logs of four batches of two records, and a callback for damage."""

    def __init__(self, logs: int = 1) -> None:
        self.storage = MemoryStorage()
        self.clock = FakeClock()
        self.disk = HeldDisk()
        self.manager: LogManager = open_manager(
            self.storage, clock=self.clock, config=LogConfig(index_interval_bytes=0)
        )
        self.logs = [self.manager.create("t", TOPIC_ID, partition) for partition in range(logs)]
        for log in self.logs:
            for _ in range(4):
                log.append(BATCH, HEADER, leader_epoch=1, now_ms=0)
        self.damaged: list[tuple[PartitionLog, str]] = []
        self.suspicions = Suspicions(self.disk, self.clock, self._on_damaged)
        self.reads = 0
        self.storage.on_step = self._count

    def _on_damaged(self, log: PartitionLog, error: CorruptRecordError) -> None:
        self.damaged.append((log, str(error)))

    def _count(self, op: str, path: str) -> None:
        self.reads += op == "read"

    def damage(self, log: PartitionLog, batch: int) -> None:
        """Flip a bit of a batch on the disk."""
        self.storage.raw(log.segments[0].log_path)[batch * SIZE + SIZE - 9] ^= 1

    async def suspect(self, log: PartitionLog, *offsets: int) -> None:
        """Complain, and let the loop do what it will."""
        for offset in offsets:
            self.suspicions.suspect(log, offset)
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run_complaints(scenario: Callable[[Complaints], object], logs: int = 1) -> None:
    async def main() -> None:
        result = scenario(Complaints(logs))
        assert asyncio.iscoroutine(result)
        await result

    asyncio.run(main())


@pytest.mark.parametrize("offset", [4, 5])
def test_a_true_complaint_is_passed_on_with_the_place(offset: int) -> None:
    async def scenario(scene: Complaints) -> None:
        scene.damage(scene.logs[0], 2)
        await scene.suspect(scene.logs[0], offset)
        ((log, error),) = scene.damaged
        assert log is scene.logs[0]
        assert f"{log.segments[0].log_path} position {2 * SIZE}" in error
        assert "offsets 4 to 5" in error

    run_complaints(scenario)


def test_who_complains_of_a_whole_batch_is_not_believed() -> None:
    async def scenario(scene: Complaints) -> None:
        scene.damage(scene.logs[0], 2)
        await scene.suspect(scene.logs[0], 1)
        assert scene.reads == 2
        assert not scene.damaged

    run_complaints(scenario)


def test_of_two_that_do_not_fit_either_is_found() -> None:
    async def scenario(scene: Complaints) -> None:
        scene.damage(scene.logs[0], 2)
        await scene.suspect(scene.logs[0], 3)
        assert ["offsets 4 to 5" in error for _, error in scene.damaged] == [True]

    run_complaints(scenario)


def test_offsets_that_are_not_there_are_not_looked_for() -> None:
    async def scenario(scene: Complaints) -> None:
        await scene.suspect(scene.logs[0], -1, 8, 1 << 60)
        assert scene.reads == 0

    run_complaints(scenario)


def test_a_storm_of_complaints_is_one_check_of_a_log_in_a_pause_and_of_an_offset_in_a_longer_one() -> None:
    async def scenario(scene: Complaints) -> None:
        log = scene.logs[0]
        await scene.suspect(log, *[0, 1, 2, 3] * 100)
        assert scene.reads == 2
        scene.clock.now += int(LOG_PAUSE_MS)
        await scene.suspect(log, *[0] * 100)
        assert scene.reads == 2, "an offset that was just checked must not be read again"
        await scene.suspect(log, *[2] * 100)
        assert scene.reads == 4
        scene.clock.now += int(OFFSET_PAUSE_MS)
        await scene.suspect(log, 0)
        assert scene.reads == 6

    run_complaints(scenario)


def test_one_check_at_a_time_and_each_log_has_its_turn() -> None:
    async def scenario(scene: Complaints) -> None:
        for log in scene.logs:
            scene.damage(log, 0)
        scene.disk.held = True
        await scene.suspect(scene.logs[0], 0)
        await scene.suspect(scene.logs[1], *[0] * 50)
        await scene.suspect(scene.logs[2], 0)
        assert len(scene.disk._kept) == 1
        scene.disk.release()
        await settle()
        assert [log for log, _ in scene.damaged] == scene.logs

    run_complaints(scenario, logs=3)


def test_a_log_that_was_closed_meanwhile_is_nobodys_concern() -> None:
    async def scenario(scene: Complaints) -> None:
        scene.damage(scene.logs[0], 0)
        scene.disk.held = True
        await scene.suspect(scene.logs[0], 0)
        scene.logs[0].close()
        scene.disk.release()
        await settle()
        assert not scene.damaged
        await scene.suspect(scene.logs[0], 2)

    run_complaints(scenario)


def test_damage_that_nobody_can_stand_in_for_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            partition = parts.registry.find(TOPIC_ID_OF_PARTS, 0)
            for error in ("one", "one", "two", "two"):
                parts.registry.on_damaged(partition.log, CorruptRecordError(error))
                await settle()
            assert parts.registry.find(TOPIC_ID_OF_PARTS, 0) is partition
            assert not partition.log.closed

    asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records if "no other replica can replace" in record.getMessage()]
    assert [line[-3:] for line in said] == ["one", "two"]
