"""Users share what checks and conversions inflate at a time, whichever listener they use."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa
import pytest

from broker.quotas.heavy_work import (
    GIVE_BACK_COST,
    MAX_CONVERSIONS,
    THREADS,
    TOTAL_COST,
    HeavyWork,
    TooCostly,
    beside,
)
from broker.quotas.manager import Meter, charged_to
from raftlog.errors import CorruptRecordError
from tests.support.broker_parts import HeldDisk

ALICE, BOB = "User:alice", "User:bob"


class CountingDisk(HeldDisk):
    """Keeps what it is asked to do, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.held = True
        self.jobs = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Take a piece of work."""
        self.jobs += 1
        return super().submit(fn, *args, **kwargs)


class Broker:
    """Heavy work of 100 at a time, which goes on until `disk.release`."""

    def __init__(self) -> None:
        self.disk = CountingDisk()
        self.work = HeavyWork(self.disk, total_cost=100)
        self.done: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def check(self, name: str, cost: int) -> None:
        """Begin to check a batch of a producer."""
        await self._begin(self.work.check(name, cost, self.done.append, name))

    async def convert(self, name: str, cost: int) -> None:
        """Begin to convert a batch of a Kafka client."""

        async def converted() -> None:
            async with self.work.conversion(name, cost) as run:
                await run(self.done.append, name)

        await self._begin(converted())

    async def _begin(self, work: Any) -> None:
        self.tasks.append(asyncio.create_task(work))
        await settle()

    async def end(self) -> None:
        """Have all work done."""
        self.disk.release()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert self.work.room.free == 100


@asynccontextmanager
async def a_broker() -> AsyncIterator[Broker]:
    """Yield a broker, and have all its work done at the end."""
    broker = Broker()
    try:
        yield broker
    finally:
        await broker.end()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_checks_and_conversions_have_one_bound() -> None:
    """Each kind had one of its own, so a broker inflated twice as much as one of them said."""
    async with a_broker() as broker:
        for name in ("a", "b", "c"):
            await broker.check(name, 25)
        await broker.convert("d", 30)
        assert broker.disk.jobs == 3
        await broker.convert("e", 25)
        assert broker.disk.jobs == 3, "d came first"
        await broker.end()
        assert sorted(broker.done) == ["a", "b", "c", "d", "e"]


async def test_a_user_has_one_share_of_both() -> None:
    async with a_broker() as broker:
        await broker.convert(ALICE, 25)
        await broker.check(ALICE, 25)
        await broker.check(ALICE, 25)
        await broker.convert(ALICE, 25)
        assert broker.disk.jobs == 2, "a half of the total"
        await broker.check(BOB, 25)
        assert broker.disk.jobs == 3
        await broker.end()
        assert broker.done.count(ALICE) == 4


async def test_one_user_s_checks_are_as_many_as_fit() -> None:
    async with a_broker() as broker:
        for _ in range(20):
            await broker.check(ALICE, 5)
        assert broker.disk.jobs == 10


async def test_conversions_leave_threads_to_others_and_to_checks() -> None:
    """They take the interpreter, however little they cost."""
    async with a_broker() as broker:
        for _ in range(10):
            await broker.convert(ALICE, 1)
        assert broker.disk.jobs == 2
        await broker.convert(BOB, 1)
        await broker.convert("User:carol", 1)
        await broker.convert("User:dave", 1)
        assert broker.disk.jobs == MAX_CONVERSIONS < THREADS
        await broker.check("User:erin", 50)
        assert broker.disk.jobs == MAX_CONVERSIONS + 1, (
            "the conversions cost little, so they keep no memory from a check"
        )


async def test_a_conversion_that_waits_for_its_turn_keeps_no_memory_from_others() -> None:
    async with a_broker() as broker:
        for name in (ALICE, ALICE, BOB, "User:carol"):
            await broker.convert(name, 1)
        await broker.convert("User:dave", 50)
        assert broker.work.room.free == 100 - MAX_CONVERSIONS


async def test_a_user_leaves_some_of_the_total_to_the_next_one() -> None:
    async with a_broker() as broker:
        for name in (ALICE, ALICE, ALICE, BOB):
            await broker.check(name, 30)
        assert broker.disk.jobs == 2, "one of each user"
        broker.disk.release()
        await asyncio.gather(*broker.tasks)
        assert broker.done == [ALICE, BOB, ALICE, ALICE]


@pytest.mark.parametrize("begin", [Broker.check, Broker.convert])
async def test_work_that_was_begun_keeps_its_part_until_its_end(begin: Callable[[Broker, str, int], Any]) -> None:
    """No thread can be cancelled, however often its stream is."""
    async with a_broker() as broker:
        await begin(broker, ALICE, 30)
        for _ in range(3):
            broker.tasks[0].cancel()
            await settle()
        assert broker.work.room.held(ALICE) == 30
        await broker.end()
        assert broker.tasks[0].cancelled()


async def test_a_check_beyond_the_total_is_alone_and_such_a_conversion_counts_as_a_half() -> None:
    async with a_broker() as broker:
        await broker.check(ALICE, 1_000)
        await broker.check(BOB, 1_000)
        assert broker.disk.jobs == 1
    async with a_broker() as broker:
        await broker.convert(ALICE, 1_000)
        await broker.convert(BOB, 1_000)
        assert broker.disk.jobs == 2


async def test_the_memory_of_large_work_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []

    class Pool:
        def release_unused(self) -> None:
            released.append(1)

    monkeypatch.setattr(pa, "default_memory_pool", Pool)
    work = HeavyWork(HeldDisk())
    await work.check(ALICE, GIVE_BACK_COST - 1, list)
    assert not released, "small work leaves its memory to the next"
    await work.check(ALICE, GIVE_BACK_COST, list)
    async with work.conversion(ALICE, GIVE_BACK_COST) as run:
        await run(list)
    assert len(released) == 2


def fail(error: Exception) -> None:
    sum(range(200_000))
    raise error


async def test_a_thread_s_time_is_charged_also_when_it_fails() -> None:
    meter, work = Meter(), HeavyWork(HeldDisk())
    with charged_to(meter), pytest.raises(CorruptRecordError):
        await work.check(ALICE, 1, fail, CorruptRecordError("x"))
    checked_ms = meter.ms
    assert checked_ms > 0
    with charged_to(meter), pytest.raises(TooCostly):
        await beside(fail, TooCostly())
    assert meter.ms > checked_ms


@pytest.mark.parametrize("error", [CorruptRecordError("x"), TooCostly()])
async def test_work_that_fails_keeps_nothing_of_its_batch(error: Exception) -> None:
    """Errors held the frames in which they were raised until garbage was collected: 32 MiB for each bomb of a flood."""

    class Inflated:
        pass

    held: list[weakref.ref[Inflated]] = []

    def inflate() -> None:
        inflated = Inflated()
        held.append(weakref.ref(inflated))
        try:
            raise ValueError
        except ValueError:
            raise error from None

    work = HeavyWork(HeldDisk())
    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(type(error)):
                async with work.conversion(ALICE, 1) as run:
                    await run(inflate)
        await asyncio.sleep(0)
        assert [reference() for reference in held] == [None] * 3
    finally:
        gc.enable()


def test_ordinary_checks_fit_the_share_of_one_user() -> None:
    assert TOTAL_COST // 2 >= 64 << 20, "the default of max.inflate.bytes"
