"""Producer ids in blocks: nobody gets one twice, hardly anybody waits, and trouble is told to those who do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from broker import producer_ids
from broker.producer_ids import LOW_WATER, ProducerIds
from broker.services.transactions import TransactionService
from raftlog.errors import BrokerUnavailable, NotController, RaftlogError, RequestTimedOut, StaleBrokerEpoch
from raftlog.v1 import common_pb2, transaction_pb2
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult
from tests.support import virtual_time

BLOCK = 1_000


class Controller:
    """Gives out blocks from `first` on, when it may."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.commands: list[MetadataCommand] = []
        self.refusals: list[RaftlogError] = []
        self.may = asyncio.Event()
        self.may.set()

    async def propose(self, command: MetadataCommand) -> CommandResult:
        self.commands.append(command)
        await self.may.wait()
        if self.refusals:
            raise self.refusals.pop()
        self.first += BLOCK
        return CommandResult(1, first_producer_id=self.first - BLOCK, producer_ids=BLOCK)


def run(scenario: Callable[[Controller, ProducerIds], Awaitable[None]]) -> None:
    async def main() -> None:
        controller = Controller(5_000)
        ids = ProducerIds(3, controller.propose)
        ids.serve(11)
        await scenario(controller, ids)
        ids.close()

    virtual_time.run(main())


def test_ids_come_in_order_and_never_twice() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        found = [await ids.take() for _ in range(3 * BLOCK)]
        assert found == list(range(5_000, 5_000 + 3 * BLOCK))
        command = controller.commands[0].allocate_producer_ids
        assert (command.broker_id, command.broker_epoch) == (3, 11)

    run(scenario)


def test_many_at_once_share_one_block() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        found = await asyncio.gather(*(ids.take() for _ in range(500)))
        assert sorted(found) == list(range(5_000, 5_500))
        assert len(controller.commands) == 1

    run(scenario)


def test_the_next_block_is_asked_for_before_it_is_needed() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        for _ in range(BLOCK - LOW_WATER + 1):
            await ids.take()
        assert len(controller.commands) == 1
        controller.may.clear()
        for _ in range(LOW_WATER - 1):  # nobody waits
            await asyncio.wait_for(ids.take(), 1)
        assert len(controller.commands) == 2
        controller.may.set()
        assert await ids.take() == 5_000 + BLOCK

    run(scenario)


def test_who_waits_hears_of_a_refusal_and_the_next_one_asks_again() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        controller.refusals.append(NotController("somebody else"))
        with pytest.raises(NotController):
            await ids.take()
        assert await ids.take() == 5_000

    run(scenario)


def test_a_refusal_ahead_of_need_is_nobodys_error() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        await ids.take()
        controller.refusals.append(StaleBrokerEpoch("fenced"))
        for _ in range(BLOCK - 1):
            await ids.take()
            await asyncio.sleep(0)
        assert await ids.take() == 5_000 + BLOCK
        assert len(controller.commands) == 3

    run(scenario)


def test_a_controller_that_is_not_there_is_waited_for_and_then_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_ids, "WAIT_S", 0.02)

    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        controller.may.clear()
        for _ in range(2):
            with pytest.raises(RequestTimedOut, match="try again"):
                await ids.take()
        assert len(controller.commands) == 1
        controller.may.set()
        assert await ids.take() == 5_000

    run(scenario)


def test_before_the_start_and_after_the_end_there_are_none() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        with pytest.raises(BrokerUnavailable):
            await ProducerIds(3, controller.propose).take()
        controller.may.clear()
        waiting = asyncio.create_task(ids.take())
        await asyncio.sleep(0)
        ids.close()
        with pytest.raises(BrokerUnavailable):
            await waiting

    run(scenario)


def test_one_who_does_not_wait_any_more_takes_nothing_from_the_others() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        controller.may.clear()
        first, second = asyncio.create_task(ids.take()), asyncio.create_task(ids.take())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        controller.may.set()
        assert await second == 5_000

    run(scenario)


def test_the_service_answers_with_errors_as_values() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        unused: Any = None  # without a transactional id nobody else is asked
        service = TransactionService(unused, unused, ids, unused, unused, unused, unused)
        request = transaction_pb2.InitProducerIdRequest()
        controller.refusals.append(NotController("somebody else"))
        refused = await service.InitProducerId(request, None)  # type: ignore[arg-type] # not looked at
        assert refused.error.code == common_pb2.NOT_CONTROLLER
        assert refused.producer_id == -1
        answer = await service.InitProducerId(request, None)  # type: ignore[arg-type] # not looked at
        assert not answer.HasField("error")
        assert (answer.producer_id, answer.producer_epoch) == (5_000, 0)

    run(scenario)
