"""Users share the threads in which clients' reads wait for disks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from broker.quotas.disk_reads import PLACES, READ_THREADS, DiskReads
from raftlog.errors import CorruptRecordError
from tests.support.broker_parts import HeldDisk

ALICE, BOB = "User:alice", "User:bob"


class Broker:
    """A broker whose disk is slow: a read ends with `disk.release`."""

    def __init__(self) -> None:
        self.disk = HeldDisk()
        self.disk.held = True
        self.reads = DiskReads(self.disk)
        self.begun: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def read(self, name: str) -> asyncio.Task[None]:
        """Begin a read of a user."""
        self.tasks.append(asyncio.create_task(self.reads.read(name, self.begun.append, name)))
        await settle()
        return self.tasks[-1]

    def waits_for_disk(self) -> int:
        """How many reads have a thread, or wait for one."""
        return self.disk.waiting


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def play(story: Callable[[Broker], object]) -> None:
    async def played() -> None:
        broker = Broker()
        await story(broker)  # type: ignore[misc] # a coroutine function
        for _ in range(1_000):
            if all(task.done() for task in broker.tasks):
                return
            broker.disk.release()
            broker.disk.held = True
            await settle()
        raise AssertionError("reads wait that nothing keeps")

    asyncio.run(played())


def test_many_reads_of_one_user_let_those_of_others_begin() -> None:
    """They had all threads, and a queue: with 500 reads of 20 ms another user's read waited for 2.5 s."""

    async def story(broker: Broker) -> None:
        for _ in range(500):
            await broker.read(ALICE)
        assert broker.waits_for_disk() == PLACES // 2
        await broker.read(BOB)
        assert broker.waits_for_disk() == PLACES // 2 + 1, "it has a thread at once"

    play(story)


def test_followers_and_coordinators_always_have_threads() -> None:
    async def story(broker: Broker) -> None:
        for number in range(100):
            for _ in range(10):
                await broker.read(f"User:{number}")
        assert broker.waits_for_disk() == PLACES < READ_THREADS

    play(story)


def test_a_user_without_a_read_is_served_before_those_that_have_some() -> None:
    async def story(broker: Broker) -> None:
        for name in [ALICE] * 50 + ["User:c"] * 50 + ["User:d"] * 50:
            await broker.read(name)
        before = broker.waits_for_disk()
        await broker.read(BOB)
        if broker.waits_for_disk() == before:  # no place was left
            broker.disk.release()
            broker.disk.held = True
            await settle()
        broker.disk.release()
        await settle()
        assert BOB in broker.begun[: 2 * PLACES]

    play(story)


def test_a_read_whose_client_is_gone_keeps_its_place_until_its_end() -> None:
    async def story(broker: Broker) -> None:
        tasks = [await broker.read(ALICE) for _ in range(PLACES)]
        for task in tasks:
            task.cancel()
        await settle()
        assert all(task.cancelled() for task in tasks)
        for _ in range(PLACES):
            await broker.read(ALICE)
        assert broker.waits_for_disk() == PLACES // 2, "the threads are still busy"
        broker.disk.release()
        broker.disk.held = True
        await settle()
        assert broker.waits_for_disk() == PLACES // 2, "of the later ones"
        broker.disk.release()
        await settle()

    play(story)


def test_results_and_errors_come_back() -> None:
    async def played() -> None:
        with ThreadPoolExecutor(READ_THREADS) as threads:
            reads = DiskReads(threads)
            assert await reads.read(ALICE, divmod, 7, 2) == (3, 1)
            for _ in range(2 * PLACES):
                with pytest.raises(CorruptRecordError):
                    await reads.read(ALICE, fail)
            assert await reads.read(ALICE, threading.current_thread) is not threading.current_thread()

    def fail() -> None:
        raise CorruptRecordError("a batch is damaged")

    asyncio.run(played())


def test_a_broker_that_has_closed_its_threads_keeps_no_place() -> None:
    async def played() -> None:
        threads = ThreadPoolExecutor(1)
        threads.shutdown()
        reads = DiskReads(threads, places=1)
        for _ in range(3):
            with suppress(RuntimeError):
                await asyncio.wait_for(reads.read(ALICE, print), 1)

    asyncio.run(played())
