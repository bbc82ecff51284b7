"""A log that is cut back or started over while the disk refuses, fails, or others are at work on it."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from broker.log.config import LogConfig
from raftlog.errors import CorruptRecordError, OffsetOutOfRange, RaftlogError, StorageError, StorageFull
from raftlog.format import validate_produced
from tests.support.log_driver import LogDriver, timed_batch
from tests.support.memory_storage import MemoryStorage

CONFIG = LogConfig(segment_bytes=1_100, index_interval_bytes=100, file_delete_delay_ms=10)
Change = Callable[[LogDriver], None]


def lived() -> LogDriver:
    """Return a log of several segments and epochs, with deleted records at its front."""
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
    return driver


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
    """Append what a leader of a later epoch has, make it durable, and lose power."""
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
        for seed in range(3):
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
            driver.crash(Random(seed))


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
        for seed in range(3):
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
            driver.storage.crash(Random(seed))
            driver.open()
            log = driver.log
            assert (log.log_start_offset, log.log_end_offset) == (start, end + 4)
            assert log.leader_epochs.latest_epoch == stamped
    assert unfinished


@pytest.mark.parametrize("name", CHANGES)
def test_power_loss_after_a_refusal_leaves_what_was_or_what_will_be(name: str) -> None:
    change = CHANGES[name]
    for number in range(changes_of(change)):
        for seed in range(4):
            driver = lived()
            Refusing(driver, number)
            try:
                change(driver)
            except RaftlogError:
                driver.durable_end = min(driver.durable_end, driver.end)
            driver.storage.on_step = None
            driver.crash(Random(seed))


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
