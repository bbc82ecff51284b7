"""Commits in one term: what the controller refuses by itself, and heavy commands one at a time."""

from __future__ import annotations

import asyncio

import pytest

from raftlog.errors import FeatureUpdateFailed
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.features import METADATA_VERSION, SUPPORTED
from raftmeta.quorum.proposals import HEAVY_PARTITIONS, Proposals
from raftmeta.state import Applied
from tests.support import virtual_time
from tests.support.metadata import create_partitions, create_topic, update_feature
from tests.support.quorum import SystemClock


class FakeDriver:
    """Keeps what was proposed; answers when the test says so."""

    def __init__(self) -> None:
        self.proposed: list[MetadataCommand] = []
        self.answers: list[asyncio.Future[object]] = []

    def propose(self, data: bytes) -> asyncio.Future[object]:
        self.proposed.append(MetadataCommand.FromString(data))
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]

    def answer(self) -> None:
        applied = type("Entry", (), {"result": Applied(CommandResult(1), None)})()
        next(answer for answer in self.answers if not answer.done()).set_result(applied)


def proposals(driver: FakeDriver) -> Proposals:
    return Proposals(driver, SystemClock(), 3)  # type: ignore[arg-type] # as far as it is used


def test_a_level_that_this_controller_does_not_know_is_never_appended() -> None:
    async def scenario() -> None:
        driver = FakeDriver()
        above = SUPPORTED[METADATA_VERSION].max_level + 1
        for name, level in ((METADATA_VERSION, above), ("unknown", 1), ("\x01" * 100_000, 1)):
            with pytest.raises(FeatureUpdateFailed, match="all controllers first") as refused:
                await proposals(driver).commit(update_feature(name, level))
            assert len(str(refused.value)) < 2_000
        assert driver.proposed == []
        for level in (0, 1, -1, above - 1):  # for the state machine to answer
            asked = asyncio.create_task(proposals(driver).commit(update_feature(METADATA_VERSION, level)))
            await asyncio.sleep(0)
            driver.answer()
            await asked
        assert len(driver.proposed) == 4

    virtual_time.run(scenario())


def test_heavy_commands_are_committed_one_at_a_time_and_nothing_else_waits_for_them() -> None:
    async def scenario() -> None:
        driver = FakeDriver()
        commits = proposals(driver)
        heavy = [
            create_topic("a", 1, partitions=HEAVY_PARTITIONS + 1),
            create_partitions("a", 10_000),
            create_topic("b", 2, partitions=10_000),
        ]
        light = [
            create_topic("c", 3, partitions=HEAVY_PARTITIONS),
            MetadataCommand(fence_broker=records_pb2.FenceBrokerCommand(broker_id=1)),
        ]
        tasks = [asyncio.create_task(commits.commit(command)) for command in (*heavy, *light)]
        await asyncio.sleep(0.01)
        kinds = [each.WhichOneof("command") for each in driver.proposed]
        assert kinds == ["create_topic", "create_topic", "fence_broker"]
        tasks[1].cancel()
        for left in range(4, 0, -1):
            driver.answer()
            await asyncio.sleep(0.01)
            assert sum(not task.done() for task in tasks) == left - 1
        assert driver.proposed[-1].create_topic.name == "b", "the one in between was given up before its turn"

    virtual_time.run(scenario())
