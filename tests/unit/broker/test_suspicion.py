"""Complaints about batches: true ones reach the registry, false ones cost next to nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.log.config import LogConfig
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.suspicion import LOG_PAUSE_MS, OFFSET_PAUSE_MS, Suspicions
from raftlog.errors import CorruptRecordError
from raftlog.format import validate_produced
from tests.support.broker_parts import TOPIC_ID as TOPIC_ID_OF_PARTS
from tests.support.broker_parts import HeldDisk, Parts
from tests.support.log_driver import TOPIC_ID, FakeClock, open_manager, timed_batch
from tests.support.memory_storage import MemoryStorage

BATCH = timed_batch([5, 6])
HEADER = validate_produced(BATCH)
SIZE = len(BATCH)


class Scene:
    """Logs of four batches of two records, and who is told of damage."""

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


def run(scenario: Callable[[Scene], object], logs: int = 1) -> None:
    async def main() -> None:
        result = scenario(Scene(logs))
        assert asyncio.iscoroutine(result)
        await result

    asyncio.run(main())


@pytest.mark.parametrize("offset", [4, 5])
def test_a_true_complaint_is_passed_on_with_the_place(offset: int) -> None:
    async def scenario(scene: Scene) -> None:
        scene.damage(scene.logs[0], 2)
        await scene.suspect(scene.logs[0], offset)
        ((log, error),) = scene.damaged
        assert log is scene.logs[0]
        assert f"{log.segments[0].log_path} position {2 * SIZE}" in error
        assert "offsets 4 to 5" in error

    run(scenario)


def test_who_complains_of_a_whole_batch_is_not_believed() -> None:
    async def scenario(scene: Scene) -> None:
        scene.damage(scene.logs[0], 2)
        await scene.suspect(scene.logs[0], 1)
        assert scene.reads == 2
        assert not scene.damaged

    run(scenario)


def test_of_two_that_do_not_fit_either_is_found() -> None:
    async def scenario(scene: Scene) -> None:
        scene.damage(scene.logs[0], 2)
        await scene.suspect(scene.logs[0], 3)
        assert ["offsets 4 to 5" in error for _, error in scene.damaged] == [True]

    run(scenario)


def test_offsets_that_are_not_there_are_not_looked_for() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.suspect(scene.logs[0], -1, 8, 1 << 60)
        assert scene.reads == 0

    run(scenario)


def test_a_storm_of_complaints_is_one_check_of_a_log_in_a_pause_and_of_an_offset_in_a_longer_one() -> None:
    async def scenario(scene: Scene) -> None:
        log = scene.logs[0]
        await scene.suspect(log, *[0, 1, 2, 3] * 100)
        assert scene.reads == 2
        scene.clock.now += int(LOG_PAUSE_MS)
        await scene.suspect(log, *[0] * 100)
        assert scene.reads == 2, "the same offset"
        await scene.suspect(log, *[2] * 100)
        assert scene.reads == 4
        scene.clock.now += int(OFFSET_PAUSE_MS)
        await scene.suspect(log, 0)
        assert scene.reads == 6

    run(scenario)


def test_one_check_at_a_time_and_each_log_has_its_turn() -> None:
    async def scenario(scene: Scene) -> None:
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

    run(scenario, logs=3)


def test_a_log_that_was_closed_meanwhile_is_nobodys_concern() -> None:
    async def scenario(scene: Scene) -> None:
        scene.damage(scene.logs[0], 0)
        scene.disk.held = True
        await scene.suspect(scene.logs[0], 0)
        scene.logs[0].close()
        scene.disk.release()
        await settle()
        assert not scene.damaged
        await scene.suspect(scene.logs[0], 2)

    run(scenario)


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
    said = [record.getMessage() for record in caplog.records if "nobody can stand in" in record.getMessage()]
    assert [line[-3:] for line in said] == ["one", "two"]
