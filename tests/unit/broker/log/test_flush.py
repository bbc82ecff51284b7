"""Group commit: which append waits for which fsync."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from broker.log.config import LogConfig
from broker.log.flush import AT_A_TIME, Flushing, GroupCommit
from raftlog.errors import StorageError
from tests.support.log_driver import LogDriver, append
from tests.support.memory_storage import Fault


class Gate:
    """Stops fsyncs of segments until it is opened, and counts them."""

    def __init__(self, driver: LogDriver) -> None:
        self.syncs = 0
        self.entered = threading.Semaphore(0)
        self.leave = threading.Semaphore(0)
        driver.storage.on_step = self._step

    def _step(self, op: str, path: str) -> None:
        if op == "datasync" and path.endswith(".log"):
            self.syncs += 1
            self.entered.release()
            assert self.leave.acquire(timeout=60)


def opened() -> LogDriver:
    driver = LogDriver()
    driver.open()
    return driver


def unexpected(error: BaseException) -> None:
    raise AssertionError(error)


async def test_appends_of_one_round_share_an_fsync_and_callers_are_told_once() -> None:
    driver = opened()
    gate = Gate(driver)
    with ThreadPoolExecutor(2) as pool:
        commit = GroupCommit(pool)
        done: list[int] = []
        for _ in range(5):
            driver.append()
            commit.request(driver.log, done.append, unexpected)
        assert done == []
        gate.leave.release()
        await commit.close()
        assert done == [5]
        assert gate.syncs == 1


async def test_who_comes_during_a_flush_joins_the_next_one() -> None:
    driver = opened()
    gate = Gate(driver)
    with ThreadPoolExecutor(2) as pool:
        commit = GroupCommit(pool)
        first: list[int] = []
        later: list[int] = []
        driver.append()
        commit.request(driver.log, first.append, unexpected)
        await asyncio.to_thread(gate.entered.acquire)
        for _ in range(3):
            driver.append()
            commit.request(driver.log, later.append, unexpected)
        gate.leave.release()
        await asyncio.to_thread(gate.entered.acquire)
        await asyncio.sleep(0)
        assert first == [1], "the first fsync must not cover what was appended after it began"
        assert later == []
        gate.leave.release()
        await commit.close()
        assert later == [4]
        assert gate.syncs == 2


async def test_a_log_directory_notes_its_shortest_recent_flush() -> None:
    driver = opened()
    now_s = 0.0
    takes_s = 0.0

    def disk_takes(op: str, path: str) -> None:
        nonlocal now_s
        if op == "datasync" and path.endswith(".log"):
            now_s += takes_s

    driver.storage.on_step = disk_takes
    with ThreadPoolExecutor(1) as pool:
        commit = GroupCommit(pool, monotonic_s=lambda: now_s)
        log_dir = driver.log.log_dir

        async def flush(took_s: float) -> float:
            nonlocal takes_s
            takes_s = took_s
            driver.append()
            commit.request(driver.log, lambda _: None, unexpected)
            await commit.close()
            return log_dir.flush_ms

        assert log_dir.flush_ms == math.inf
        assert await flush(0.004) == pytest.approx(4.0)
        assert await flush(0.001) == pytest.approx(1.0)
        assert await flush(0.020) < 1.1, "one slow flush says little: the processor may have been busy"
        for _ in range(200):
            await flush(0.020)
        assert log_dir.flush_ms == pytest.approx(20.0)


async def test_nothing_to_flush_is_answered_too() -> None:
    driver = opened()
    with ThreadPoolExecutor(1) as pool:
        commit = GroupCommit(pool)
        done: list[int] = []
        commit.request(driver.log, done.append, unexpected)
        await commit.close()
        assert done == [0]


async def test_an_fsync_error_reaches_everybody_who_waits_and_everybody_after() -> None:
    driver = opened()
    gate = Gate(driver)
    with ThreadPoolExecutor(1) as pool:
        commit = GroupCommit(pool)
        errors: list[BaseException] = []
        done: list[int] = []
        driver.append()
        commit.request(driver.log, done.append, errors.append)
        await asyncio.to_thread(gate.entered.acquire)
        driver.append()
        commit.request(driver.log, done.append, lambda error: errors.append(error))
        driver.storage.faults.append(Fault("datasync"))
        gate.leave.release()
        await commit.close()
        commit.request(driver.log, done.append, errors.append)
        await commit.close()
        assert done == []
        assert [type(error) for error in errors] == [StorageError] * 3
        assert gate.syncs == 1, "an fsync that has failed must never be tried again"
        with pytest.raises(StorageError):
            driver.append()


async def test_logs_do_not_wait_for_each_other() -> None:
    driver = opened()
    assert driver.manager is not None
    other = driver.manager.create("other", bytes(16), 0)
    gate = Gate(driver)
    with ThreadPoolExecutor(2) as pool:
        commit = GroupCommit(pool)
        done: list[int] = []
        driver.append()
        commit.request(driver.log, done.append, unexpected)
        await asyncio.to_thread(gate.entered.acquire)
        commit.request(other, lambda end: done.append(-1 - end), unexpected)
        for _ in range(10):
            await asyncio.sleep(0)
        assert done == [-1]
        gate.leave.release()
        await commit.close()


async def test_segments_that_wait_for_a_flush_keep_few_files_open() -> None:
    """With a large flush.messages they all waited, each with a descriptor."""
    driver = LogDriver(config=LogConfig(segment_bytes=2_000, flush_messages=1_000_000))
    driver.open()
    driver.log.log_dir.unsynced_topic_ids |= {driver.log.topic_id}
    assert driver.log.flush_messages > 1
    with ThreadPoolExecutor(1) as pool:
        commit = GroupCommit(pool)
        flushing = Flushing(
            driver.log,
            commit,
            driver.clock,
            on_durable=lambda: None,
            on_refused=unexpected,
            on_broken=lambda log, error: unexpected(error),
        )
        flushed = 0
        for _ in range(200):
            driver.append(value_bytes=5)
            before = driver.log.flushed_end_offset
            assert flushing.appended(), "the records count at once, whether a flush is under way or not"
            await commit.close()
            assert driver.log._unflushed == []
            flushed += driver.log.flushed_end_offset > before
        assert flushed == driver.log.segment_count - 1 < 150, "a flush is for a segment, not for a batch"


async def test_a_topic_of_many_partitions_lets_another_topic_flush_soon() -> None:
    """Each fsync of its 300 partitions was before that of the other topic."""
    driver = opened()
    assert driver.manager is not None
    many = [driver.manager.create("many", bytes(15) + b"\1", partition) for partition in range(300)]
    synced: list[str] = []
    driver.storage.on_step = lambda op, path: (
        synced.append(path) if op == "datasync" and path.endswith(".log") else None
    )
    with ThreadPoolExecutor(1) as pool:
        commit = GroupCommit(pool)
        done: list[int] = []
        for log in many:
            append(log)
            commit.request(log, lambda end: None, unexpected)
        driver.append()
        commit.request(driver.log, done.append, unexpected)
        await commit.close()
    assert done == [1]
    place = next(at for at, path in enumerate(synced) if driver.log.directory in path)
    assert place <= 1, "topics take turns"
    assert len(synced) == 301


async def test_a_log_that_is_appended_to_all_the_time_does_not_keep_its_topic_first() -> None:
    driver = opened()
    assert driver.manager is not None
    others = [driver.manager.create("other", bytes(15) + b"\1", partition) for partition in range(2 * AT_A_TIME)]
    with ThreadPoolExecutor(1) as pool:
        commit = GroupCommit(pool)
        done: list[int] = []
        flushed = 0

        def again(end: int) -> None:
            nonlocal flushed
            flushed += 1
            if len(done) < len(others):
                driver.append()
                commit.request(driver.log, again, unexpected)

        driver.append()
        commit.request(driver.log, again, unexpected)
        for log in others:
            append(log)
            commit.request(log, done.append, unexpected)
        await commit.close()
    assert done == [2] * len(others)
    assert flushed > 1, "nor do the others keep it waiting"
