"""Power loss, kill -9 and a refusing disk at every storage operation of a compaction."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from random import Random

import pytest

from broker.log.config import LogConfig
from raftlog.errors import RaftlogError
from tests.support.fresh import seeds
from tests.support.keyed_log import KeyedLog
from tests.support.log_driver import restored, saved
from tests.support.memory_storage import Fault, MemoryStorage, PowerLoss, moments

CONFIG = LogConfig(
    segment_bytes=1_500,
    index_interval_bytes=300,
    cleanup_policy="compact",
    delete_retention_ms=50,
    file_delete_delay_ms=10,
)


@cache
def _filled() -> bytes:
    log = KeyedLog(CONFIG)
    for number in range(8):
        for key in range(4):
            log.append((b"k%d" % key, b"%d" % number * 20), (b"own%d" % (number * 4 + key), b"x"))
    log.append((b"k1", None))
    log.append((b"k2", None), (b"own3", None))
    log.append(*((b"k0", b"fill%d" % number) for number in range(40)))
    log.commit()
    assert log.clean()
    log.clock.now += 100
    for number in range(8):
        log.append((b"k3", b"%d" % number * 20), (b"own%d" % number, b"x" * 100))
    log.append(*((b"k0", b"fill%d" % number) for number in range(40)))
    log.append((b"end", b"end"))
    log.commit()
    log.manager.run_housekeeping_once(log.clock.now)
    return saved(log)


def filled() -> KeyedLog:
    """A log that was compacted once, has tombstones that are due, and has grown since."""
    return restored(KeyedLog, _filled())


def day(log: KeyedLog) -> None:
    """Compact, then let housekeeping remove the replaced files."""
    assert log.clean()
    log.clock.now += 20
    log.manager.run_housekeeping_once(log.clock.now)


def _span() -> tuple[int, int, list[tuple[int, int, bytes | None, bytes | None]]]:
    log = filled()
    start = log.storage.operations
    day(log)
    return start, log.storage.operations, log.records()


START, END, EXPECTED = _span()


def again(log: KeyedLog) -> None:
    """Compact once more: the result is that of an undisturbed compaction."""
    log.commit()
    log.clean()
    log.manager.run_housekeeping_once(log.clock.now)
    log.check()
    assert log.records() == EXPECTED
    names = log.storage.list_sizes(log.log.directory)
    assert not [name for name in names if name.endswith((".cleaned", ".swap"))]
    assert sorted(name for name in names if name.endswith(".log")) == [
        f"{segment.base_offset:020d}.log" for segment in log.log.segments
    ]


def test_the_script_is_worth_crashing() -> None:
    assert [number for number, _ in stopped_at_every_operation()] == list(range(START, END))
    log = filled()
    assert log.log.segment_count > 4
    before = log.records()
    day(log)
    assert END - START > 30
    assert len(log.records()) < len(before)
    assert not [record for record in log.records() if record[2] in (b"k1", b"k2")], (
        "the tombstones must be gone, as their time was over"
    )
    again(log)


def stopped_at_every_operation() -> Iterator[tuple[int, KeyedLog]]:
    """Yield the number of each operation of a compaction, and the machine in which all ends before it."""
    log = filled()
    yield from enumerate(moments(log.storage, lambda: day(log), log.stopped), START)


@pytest.mark.parametrize("seed", seeds(also=range(4)))
def test_power_loss_at_every_operation(seed: int) -> None:
    for number, log in stopped_at_every_operation():
        log.stop(Random(seed * 1_000 + number))
        log.check()
        again(log)
        log.stop(Random(seed))
        log.check()


def test_kill_9_at_every_operation() -> None:
    for _, log in stopped_at_every_operation():
        log.stop(None)
        log.check()
        again(log)


@pytest.mark.parametrize("seed", seeds(also=range(7)))
def test_power_loss_while_a_start_finishes_a_swap(seed: int) -> None:
    for number, log in stopped_at_every_operation():
        further = 1 + (seed + number) % 7
        log.storage.crash(Random(number))
        log.storage.crash_at = log.storage.operations + further
        try:
            log.open()
        except PowerLoss:
            log.stop(Random(further))
        log.storage.crash_at = None
        log.check()


@pytest.mark.parametrize("op", ["open", "write", "rename", "remove", "truncate"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_a_disk_that_refuses_for_a_while_loses_nothing(op: str, number: int) -> None:
    for skip in range(40):
        log = filled()
        fault = Fault(op, "*", number, skip=skip)
        log.storage.faults.append(fault)
        with suppress(RaftlogError):
            day(log)
        log.storage.faults.clear()
        if log.log.log_dir.offline_reason is not None:
            log.stop(None)
        log.check()
        again(log)
        log.stop(Random(skip))
        log.check()
        if fault.skip:  # the compaction was over before: no later one is refused anything
            break


def test_a_dying_disk_takes_its_directory_offline_and_a_start_finds_everything() -> None:
    for op in ("write", "datasync", "rename", "sync_dir"):
        for skip in range(12):
            log = filled()
            log.storage.faults.append(Fault(op, "*", errno.EIO, skip=skip))
            try:
                day(log)
            except RaftlogError:
                assert log.log.log_dir.offline_reason is not None
            log.storage.faults.clear()
            log.stop(Random(skip))
            log.check()
            again(log)


def test_a_refused_swap_is_finished_before_the_log_is_cut() -> None:
    log = filled()
    log.storage.faults.append(Fault("rename", "*0.log", errno.EMFILE))
    with pytest.raises(RaftlogError):
        log.clean()
    log.storage.faults.clear()
    log.check()
    end = log.log.log_end_offset
    log.log.truncate_to(end - 1, now_ms=log.clock.now)
    log.written = log.written[:-1]
    log.check()
    log.stop(Random(1))
    log.check()


def test_what_a_start_finds_half_written_is_removed() -> None:
    storage = MemoryStorage()
    log = KeyedLog(CONFIG, storage)
    log.append((b"k", b"v"))
    log.commit()
    storage.open(f"{log.log.directory}/{0:020d}.cleaned", create=True).write((b"half",), 0)
    log.stop(None)
    assert f"{0:020d}.cleaned" not in storage.list_sizes(log.log.directory)
    log.check()
