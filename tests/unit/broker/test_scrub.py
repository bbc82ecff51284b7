"""The background check of all logs: everything is read, slowly, and damage is passed on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from broker.log.config import LogConfig
from broker.log.partition_log import PartitionLog
from broker.scrub import BATCH_BYTES, FIRST_PASS_MS, PIECE_BYTES, Scrub, ScrubPass
from raftlog.errors import CorruptRecordError
from raftlog.format import validate_produced
from tests.support import virtual_time
from tests.support.broker_parts import HeldDisk
from tests.support.log_driver import TOPIC_ID, FakeClock, open_manager, timed_batch
from tests.support.memory_storage import MemoryStorage

BATCH = timed_batch([5, 6])
HEADER = validate_produced(BATCH)
SIZE = len(BATCH)
RATE = 1 << 30
DAY_MS = 86_400_000


class Scene:
    """Logs with segments of three batches, flushed; and who is told of damage."""

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
        assert max(pauses) <= max(0.25, BATCH_BYTES / bytes_per_second), "in small pieces"

    run(scenario())
