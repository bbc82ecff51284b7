"""A broker's requests to the controller for ISR changes, and when it makes none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from typing import Any, cast

from broker.partition.partition import Partition
from broker.replicas.isr import FULL_FOR_MS, FullStorage, IsrChanges
from raftlog.errors import NotController
from raftlog.v1 import records_pb2
from raftmeta.image import MetadataImage
from tests.support.metadata import accept, broker_epoch, claim, image_after, register, up


class _Lagging:
    """A partition whose follower has not been heard of for too long."""

    asked = 0

    def wanted_isr(self, active: Mapping[int, int], full: Set[int]) -> None:
        self.asked += 1


def test_a_leader_without_a_lease_asks_for_nothing() -> None:
    """It may be deaf, but heard: its followers are in order, and it would put them out
    of the ISR one moment before somebody else has to be elected from it."""

    async def propose(command: records_pb2.MetadataCommand) -> Any:
        raise AssertionError("the leader proposed a change of the ISR, though none is wanted")

    lease = [True]
    partition = _Lagging()
    changes = IsrChanges(1, 1, propose, dict, set, lambda: lease[0])

    async def look() -> None:
        changes.look(cast(Partition, partition))
        changes.look_at_all([cast(Partition, partition)])

    asyncio.run(look())
    assert partition.asked == 2
    lease[0] = False
    asyncio.run(look())
    assert partition.asked == 2


class _FullDisk:
    """A broker whose disk refuses writes now and then, and its controller."""

    def __init__(self, *, newest: bool = True) -> None:
        self.image: MetadataImage = up(image_after(claim(newest=newest), register(1)), 1)
        self.times_full = 3
        self.now_ms = 1_000_000.0
        self.reports: list[bool] = []
        self.is_deaf = False
        self.storage = FullStorage(
            1,
            broker_epoch(self.image, 1),
            self._propose,
            lambda: self.times_full,
            lambda: self.image,
            lambda: self.now_ms,
        )

    async def _propose(self, command: records_pb2.MetadataCommand) -> Any:
        self.reports.append(command.alter_broker.storage_full)
        if self.is_deaf:
            raise NotController("ask another one")
        command.controller_epoch = self.image.controller_epoch
        self.image, result = accept(self.image, command)
        return result

    async def after(self, ms: float) -> bool:
        """Let time pass, run the check, and return the controller's state."""
        self.now_ms += ms
        for _ in range(3):
            self.storage.look()
            await asyncio.sleep(0)
        return self.image.brokers[1].storage_full


def test_a_full_disk_is_reported_once_and_counts_as_full_for_a_while() -> None:
    async def scenario() -> None:
        disk = _FullDisk()
        assert not await disk.after(0), "a refusal from before the broker served must not count"
        disk.times_full += 1
        assert await disk.after(500)
        disk.times_full += 1
        assert await disk.after(FULL_FOR_MS - 1)
        assert await disk.after(FULL_FOR_MS - 1)
        assert not await disk.after(1)
        assert disk.reports == [True, False]
        await disk.storage.close()

    asyncio.run(scenario())


def test_a_report_that_fails_is_repeated() -> None:
    async def scenario() -> None:
        disk = _FullDisk()
        disk.is_deaf = True
        disk.times_full += 1
        assert not await disk.after(500)
        disk.is_deaf = False
        assert await disk.after(500)
        await disk.storage.close()

    asyncio.run(scenario())


def test_controllers_that_do_not_know_the_report_are_spared_it() -> None:
    async def scenario() -> None:
        disk = _FullDisk(newest=False)
        disk.times_full += 1
        assert not await disk.after(500)
        assert disk.reports == []

    asyncio.run(scenario())
