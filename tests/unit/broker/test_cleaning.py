"""The background compaction: when it looks, what it takes first, how it pauses, and what it does when that fails."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from broker.cleaning import FAILED_PAUSE_MS, Cleaner
from broker.log.config import LogConfig
from broker.log.partition_log import PartitionLog
from raftlog.errors import CorruptRecordError, InvalidRecord
from raftlog.format import validate_produced
from tests.support.broker_parts import HeldDisk
from tests.support.keyed_log import keyed_batch
from tests.support.log_driver import TOPIC_ID, FakeClock, open_manager
from tests.support.memory_storage import Fault, MemoryStorage

RATE = 1 << 40
BACKOFF_MS = 15_000
CONFIG = LogConfig(segment_bytes=1_500, index_interval_bytes=0, cleanup_policy="compact")


class Scene:
    """Logs in which one key was written over and over, and who is told of damage."""

    def __init__(self, logs: int = 1, bytes_per_second: int = RATE) -> None:
        self.storage = MemoryStorage()
        self.clock = FakeClock()
        self.disk = HeldDisk()
        self.manager = open_manager(self.storage, clock=self.clock, config=CONFIG)
        self.logs = [self.manager.create("t", TOPIC_ID, partition) for partition in range(logs)]
        for log in self.logs:
            self.write(log)
        self.damaged: list[PartitionLog] = []
        self.waits = bytes_per_second < RATE
        self.cleaner = Cleaner(
            self.manager,
            self.disk,
            self.clock,
            self._on_damaged,
            bytes_per_second=bytes_per_second,
            backoff_ms=BACKOFF_MS,
            dedupe_bytes=1 << 20,
        )

    def write(self, log: PartitionLog, batches: int = 20) -> None:
        """Append and commit."""
        for number in range(batches):
            batch = keyed_batch([(b"k", b"%d" % number * 50)])
            log.append(batch, validate_produced(batch), leader_epoch=1, now_ms=0)
        log.flush()
        log.high_watermark = log.log_end_offset

    def _on_damaged(self, log: PartitionLog, error: CorruptRecordError) -> None:
        self.damaged.append(log)

    async def tick(self, after_ms: float = BACKOFF_MS) -> None:
        """Let time pass, and what is due happen."""
        self.clock.now += int(after_ms)
        self.cleaner.tick()
        await self.settle()

    async def settle(self) -> None:
        """Wait until it is idle, or for a moment where it has to wait."""
        deadline = asyncio.get_running_loop().time() + (0.05 if self.waits or self.disk.held else 30)
        while self.cleaner.is_busy and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 # nobody announces it
            await asyncio.sleep(0.001)

    def clean(self) -> list[bool]:
        """Which logs have been compacted."""
        return [log.cleaned.first_dirty_offset > 0 for log in self.logs]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_all_that_is_due_is_compacted_one_log_after_the_other() -> None:
    async def scenario() -> None:
        scene = Scene(logs=3)
        await scene.tick(BACKOFF_MS - 1)
        assert scene.clean() == [False] * 3
        await scene.tick(1)
        assert scene.clean() == [True] * 3
        end = scene.logs[0].cleaned.first_dirty_offset
        scene.write(scene.logs[0])
        await scene.tick(BACKOFF_MS - 1)
        assert scene.logs[0].cleaned.first_dirty_offset == end
        await scene.tick(1)
        assert scene.logs[0].cleaned.first_dirty_offset > end

    run(scenario())


def test_a_topic_that_is_not_compacted_is_let_alone() -> None:
    async def scenario() -> None:
        scene = Scene(logs=2)
        scene.logs[0].update_config(replace(CONFIG, cleanup_policy="delete"))
        await scene.tick()
        assert scene.clean() == [False, True]

    run(scenario())


def test_nothing_at_or_above_the_high_watermark_is_compacted() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.logs[0].high_watermark = 5
        await scene.tick()
        assert 0 < scene.logs[0].cleaned.first_dirty_offset <= 5

    run(scenario())


def test_pauses_keep_to_the_rate() -> None:
    async def scenario() -> None:
        scene = Scene(bytes_per_second=100)
        await scene.tick()
        assert scene.clean() == [False], "the first piece alone is good for a minute"
        scene.cleaner.close()
        await scene.tick()
        assert scene.clean() == [False]

    run(scenario())


def test_damage_is_passed_on_and_the_other_logs_are_compacted() -> None:
    async def scenario() -> None:
        scene = Scene(logs=3)
        for log in scene.logs[::2]:
            scene.storage.raw(log.segments[1].log_path)[200] ^= 1
        await scene.tick()
        assert scene.damaged == scene.logs[::2]
        assert scene.clean() == [False, True, False]

    run(scenario())


def test_another_magic_is_damage() -> None:
    """This broker has written the file, so the bit has flipped since."""

    async def scenario() -> None:
        scene = Scene()
        scene.storage.raw(scene.logs[0].segments[1].log_path)[16] ^= 2
        await scene.tick()
        assert scene.damaged == scene.logs

    run(scenario())


def test_what_cannot_be_encoded_is_no_damage(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object, **__: object) -> bytes:
        raise InvalidRecord("too large")

    monkeypatch.setattr("broker.log.batch_parts.encode_batch", refuse)

    async def scenario() -> None:
        scene = Scene()
        await scene.tick()
        assert not scene.damaged
        assert scene.clean() == [False]
        assert "do not fit into one batch" in caplog.text

    run(scenario())


def test_a_log_whose_compaction_is_refused_is_tried_again_later() -> None:
    async def scenario() -> None:
        scene = Scene(logs=2)
        scene.storage.faults.append(Fault("write", "*/t-0/*", errno.ENOSPC))
        await scene.tick()
        assert scene.clean() == [False, True]
        scene.storage.faults.clear()
        await scene.tick()
        assert scene.clean() == [False, True]
        await scene.tick(FAILED_PAUSE_MS)
        assert scene.clean() == [True, True]

    run(scenario())


def test_a_log_that_is_deleted_meanwhile_is_forgotten() -> None:
    async def scenario() -> None:
        scene = Scene(logs=2)
        scene.disk.held = True
        await scene.tick()
        scene.manager.delete(TOPIC_ID, 0)
        scene.disk.release()
        await scene.settle()
        assert not scene.damaged
        assert scene.logs[1].cleaned.first_dirty_offset > 0

    run(scenario())
