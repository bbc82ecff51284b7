"""A broker's requests to the controller for ISR changes, and when it makes none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.partition.partition import Partition
from broker.replicas import isr
from broker.replicas.isr import FULL_FOR_MS, MAX_UNDER_WAY, FullStorage, IsrChanges
from raftlog import TopicPartition
from raftlog.errors import (
    IneligibleReplica,
    InvalidUpdateVersion,
    NotController,
    RaftlogError,
    RequestTimedOut,
    StaleBrokerEpoch,
    UnknownTopicId,
    to_wire,
)
from raftlog.v1 import records_pb2
from raftmeta.decide import MAX_ALTERATIONS_PER_COMMAND, CommandResult
from raftmeta.features import ALTER_PARTITIONS_LEVEL, METADATA_VERSION
from raftmeta.image import MetadataImage
from replication.isr import IsrChange
from replication.ports import Replica
from tests.support.metadata import accept, broker_epoch, claim, image_after, register, up, uuid_of


class _Partition:
    """A led partition that wants its ISR changed, `wishes` times; what it was answered, in order."""

    def __init__(self, number: int, wishes: int = 1) -> None:
        self.topic_partition = TopicPartition("t", number)
        self.log = SimpleNamespace(topic_id=uuid_of(number // 100 + 1), partition=number % 100)
        self.isr = frozenset({1, 2})
        self.wishes = wishes
        self.asked = 0
        self.fails = False
        self.answers: list[str] = []

    def wanted_isr(self, active: Mapping[int, int], full: Set[int]) -> IsrChange | None:
        self.asked += 1
        if self.fails:
            raise ValueError("a bug")
        if not self.wishes:
            return None
        self.wishes -= 1
        return IsrChange(7, self.asked, (Replica(1, 11), Replica(2, 12), Replica(3, 13)))

    def isr_answered(self, change: IsrChange, error: BaseException | None) -> None:
        self.answers.append("granted" if error is None else type(error).__name__)


class _Controller:
    """Answers commands when told; each alteration by `verdict`, by its partition."""

    def __init__(self, *, level: int = ALTER_PARTITIONS_LEVEL) -> None:
        self.image = replace(MetadataImage(), features={METADATA_VERSION: level})
        self.commands: list[records_pb2.MetadataCommand] = []
        self.verdict: Callable[[int], RaftlogError | None] = lambda partition: None
        self.refusal: Exception | None = None
        self.answers_left_out = 0
        self.may_answer = asyncio.Semaphore(0)
        self.lease = True
        self.changes = IsrChanges(1, 11, self._propose, dict, set, lambda: self.lease, lambda: self.image)

    async def _propose(self, command: records_pb2.MetadataCommand) -> CommandResult:
        self.commands.append(command)
        await self.may_answer.acquire()
        if self.refusal is not None:
            raise self.refusal
        if command.HasField("alter_partition"):
            if (error := self.verdict(command.alter_partition.partition)) is not None:
                raise error
            return CommandResult(1)
        outcomes = [
            records_pb2.AlterationOutcome(error=None if error is None else to_wire(error), partition_epoch=1)
            for error in (self.verdict(each.partition) for each in command.alter_partitions.alterations)
        ]
        return CommandResult(1, alterations=tuple(outcomes[self.answers_left_out :]))

    def look(self, *partitions: _Partition) -> None:
        self.changes.look_at_all(cast(list[Partition], partitions))

    async def answer(self, calls: int = 1) -> None:
        """Answer so many calls, and let the broker go on."""
        for _ in range(calls):
            self.may_answer.release()
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def batches(self) -> list[list[int]]:
        """The partitions of each call."""
        return [
            [command.alter_partition.partition]
            if command.HasField("alter_partition")
            else [each.partition for each in command.alter_partitions.alterations]
            for command in self.commands
        ]


def test_a_leader_without_a_lease_asks_for_nothing() -> None:
    """It may be deaf, but heard: its followers are in order, and it would put them out
    of the ISR one moment before somebody else has to be elected from it."""

    async def scenario() -> None:
        controller, partition = _Controller(), _Partition(0, wishes=0)
        controller.changes.look(cast(Partition, partition))
        await controller.answer(0)
        controller.look(partition)
        await controller.answer(0)
        assert partition.asked == 2
        assert controller.commands == []
        partition.wishes = 9
        controller.lease = False
        controller.changes.look(cast(Partition, partition))
        controller.look(partition)
        await controller.answer(0)
        controller.lease = True
        controller.look(partition)
        controller.lease = False  # lost before the partition is asked
        await controller.answer(0)
        assert partition.asked == 2
        assert controller.commands == []

    asyncio.run(scenario())


def test_a_lone_change_is_sent_at_once_and_what_waits_meanwhile_goes_together() -> None:
    async def scenario() -> None:
        controller = _Controller()
        partitions = [_Partition(number) for number in range(6)]
        controller.look(partitions[0])
        await controller.answer(0)
        assert controller.batches == [[0]], "a lone change must wait for nothing"
        controller.look(partitions[1])
        await controller.answer(0)
        controller.look(*partitions[2:5])
        controller.look(partitions[1])
        await controller.answer(0)
        assert controller.batches == [[0]], "one call is under way at a time"
        assert [each.asked for each in partitions] == [1, 0, 0, 0, 0, 0], "what waits is asked when its turn comes"
        await controller.answer()
        assert controller.batches == [[0], [1, 2, 3, 4]]
        assert partitions[0].answers == ["granted"]
        await controller.answer()
        assert [each.answers for each in partitions] == [["granted"]] * 5 + [[]]
        controller.look(partitions[5])
        await controller.answer()
        assert controller.batches[2:] == [[5]]
        command = controller.commands[2].alter_partitions
        assert (command.broker_id, command.broker_epoch) == (1, 11)
        (asked,) = command.alterations
        assert (asked.topic_id, asked.partition, asked.leader_epoch, asked.partition_epoch) == (uuid_of(1), 5, 7, 1)
        assert [(each.broker_id, each.broker_epoch) for each in asked.new_isr] == [(1, 11), (2, 12), (3, 13)]

    asyncio.run(scenario())


def test_each_change_has_an_answer_of_its_own() -> None:
    async def scenario() -> None:
        controller = _Controller()
        verdicts = {1: InvalidUpdateVersion("newer"), 2: IneligibleReplica("fenced"), 3: UnknownTopicId("deleted")}
        controller.verdict = verdicts.get
        partitions = [_Partition(number) for number in range(5)]
        controller.look(*partitions)
        await controller.answer()
        assert [each.answers for each in partitions] == [
            ["granted"],
            ["InvalidUpdateVersion"],
            ["IneligibleReplica"],
            ["UnknownTopicId"],
            ["granted"],
        ]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("refusal", "left_out", "answer"),
    [
        (StaleBrokerEpoch("another process"), 0, "StaleBrokerEpoch"),
        (RequestTimedOut("no answer came"), 0, "RequestTimedOut"),
        (ValueError("a bug"), 0, "InternalError"),
        (None, 1, "InternalError"),
    ],
)
def test_a_call_without_answers_leaves_no_partition_without_one(
    refusal: Exception | None, left_out: int, answer: str
) -> None:
    """A partition that is told nothing would never propose again."""

    async def scenario() -> None:
        controller = _Controller()
        controller.refusal, controller.answers_left_out = refusal, left_out
        partitions = [_Partition(number) for number in range(3)]
        controller.look(*partitions)
        await controller.answer()
        assert [each.answers for each in partitions] == [[answer]] * 3
        controller.refusal, controller.answers_left_out = None, 0
        partitions[1].wishes = 1
        controller.look(*partitions)
        await controller.answer()
        assert partitions[1].answers == [answer, "granted"]

    asyncio.run(scenario())


def test_a_call_is_bounded_in_changes() -> None:
    async def scenario() -> None:
        controller = _Controller()
        many = [_Partition(number) for number in range(2 * MAX_ALTERATIONS_PER_COMMAND + 1)]
        controller.look(*many)
        await controller.answer(3)
        assert [len(each) for each in controller.batches] == [100, 100, 1]
        assert all(each.answers == ["granted"] for each in many)

    asyncio.run(scenario())


def test_a_call_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isr, "MAX_BATCH_BYTES", 100)

    async def scenario() -> None:
        controller = _Controller()
        controller.look(*(_Partition(number) for number in range(7)))
        await controller.answer(9)
        sizes = [[each.ByteSize() for each in command.alter_partitions.alterations] for command in controller.commands]
        assert sum(map(len, sizes)) == 7
        assert len(sizes) > 2
        assert all(sum(of_one) - of_one[-1] < 100 for of_one in sizes), "the change that fills it is the last one"

    asyncio.run(scenario())


def test_a_bug_in_one_partition_leaves_the_others_their_changes() -> None:
    async def scenario() -> None:
        controller = _Controller()
        partitions = [_Partition(number) for number in range(3)]
        partitions[1].fails = True
        controller.look(*partitions)
        await controller.answer()
        assert controller.batches == [[0, 2]]

    asyncio.run(scenario())


def test_controllers_that_do_not_know_batches_get_one_command_for_each_change() -> None:
    """A controller of the version before would stop at a kind of command that it does not know."""

    async def scenario() -> None:
        controller = _Controller(level=ALTER_PARTITIONS_LEVEL - 1)
        controller.verdict = {1: InvalidUpdateVersion("newer")}.get
        partitions = [_Partition(number) for number in range(MAX_UNDER_WAY + 2)]
        controller.look(*partitions)
        await controller.answer(0)
        assert controller.batches == [[number] for number in range(MAX_UNDER_WAY)]
        assert {command.WhichOneof("command") for command in controller.commands} == {"alter_partition"}
        asked = controller.commands[3].alter_partition
        assert (asked.broker_id, asked.broker_epoch, asked.topic_id) == (1, 11, uuid_of(1))
        assert (asked.partition, asked.leader_epoch, asked.partition_epoch) == (3, 7, 1)
        assert [(each.broker_id, each.broker_epoch) for each in asked.new_isr] == [(1, 11), (2, 12), (3, 13)]
        controller.image = replace(controller.image, features={METADATA_VERSION: ALTER_PARTITIONS_LEVEL})
        await controller.answer(MAX_UNDER_WAY + 1)
        assert controller.batches[MAX_UNDER_WAY:] == [[MAX_UNDER_WAY, MAX_UNDER_WAY + 1]], (
            "from the moment on at which the level says that all know it, they go together"
        )
        assert [each.answers for each in partitions] == [
            ["InvalidUpdateVersion" if number == 1 else "granted"] for number in range(MAX_UNDER_WAY + 2)
        ]

    asyncio.run(scenario())


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
