"""Producer ids in blocks: none is given twice, few callers wait, and waiting callers hear of errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from broker.coordinator.transactions import producer_ids
from broker.coordinator.transactions.producer_ids import LOW_WATER, ProducerIds
from broker.net.services.transactions import TransactionService
from raftlog.errors import CoordinatorNotAvailable, NotController, RaftlogError, RequestTimedOut, StaleBrokerEpoch
from raftlog.v1 import common_pb2, transaction_pb2
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.features import METADATA_VERSION, PRODUCER_OWNERS_LEVEL, metadata_version
from raftmeta.image import MetadataImage
from raftmeta.producer_ids import TAG_BITS, ProducerIdKey, ProducerOwner
from tests.support import virtual_time

BLOCK = 1_000
OWNER = ProducerOwner.principal("User:alice")


class Controller:
    """Gives out blocks from `first` on, when it may."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.commands: list[MetadataCommand] = []
        self.refusals: list[RaftlogError] = []
        self.image = MetadataImage()
        self.secrets = 0
        self.may = asyncio.Event()
        self.may.set()

    async def propose(self, command: MetadataCommand) -> CommandResult:
        self.commands.append(command)
        await self.may.wait()
        if self.refusals:
            raise self.refusals.pop()
        self.first += BLOCK
        return CommandResult(1, first_producer_id=self.first - BLOCK, producer_ids=BLOCK)

    async def image_from(self, offset: int) -> MetadataImage:
        secret = self.commands[-1].allocate_producer_ids.new_secret
        if metadata_version(self.image) >= PRODUCER_OWNERS_LEVEL and self.image.producer_id_key is None:
            self.image = replace(self.image, producer_id_key=ProducerIdKey(secret, self.first - BLOCK))
        return self.image

    def new_secret(self) -> bytes:
        self.secrets += 1
        return bytes(32)

    def ids(self) -> ProducerIds:
        return ProducerIds(3, self.propose, lambda: self.image, self.image_from, self.new_secret)


def run(scenario: Callable[[Controller, ProducerIds], Awaitable[None]]) -> None:
    async def main() -> None:
        controller = Controller(5_000)
        ids = controller.ids()
        ids.serve(11)
        await scenario(controller, ids)
        ids.close()

    virtual_time.run(main())


def test_ids_come_in_order_and_never_twice() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        found = [await ids.take(OWNER) for _ in range(3 * BLOCK)]
        assert found == list(range(5_000, 5_000 + 3 * BLOCK))
        command = controller.commands[0].allocate_producer_ids
        assert (command.broker_id, command.broker_epoch) == (3, 11)

    run(scenario)


def test_many_at_once_share_one_block() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        found = await asyncio.gather(*(ids.take(OWNER) for _ in range(500)))
        assert sorted(found) == list(range(5_000, 5_500))
        assert len(controller.commands) == 1

    run(scenario)


def test_the_next_block_is_asked_for_before_it_is_needed() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        for _ in range(BLOCK - LOW_WATER + 1):
            await ids.take(OWNER)
        assert len(controller.commands) == 1
        controller.may.clear()
        for _ in range(LOW_WATER - 1):  # no caller waits
            await asyncio.wait_for(ids.take(OWNER), 1)
        await asyncio.sleep(0)  # from Python 3.12 on `wait_for` alone gives other tasks no turn
        assert len(controller.commands) == 2
        controller.may.set()
        assert await ids.take(OWNER) == 5_000 + BLOCK

    run(scenario)


def test_who_waits_hears_of_a_refusal_and_the_next_one_asks_again() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        controller.refusals.append(NotController("somebody else"))
        with pytest.raises(NotController):
            await ids.take(OWNER)
        assert await ids.take(OWNER) == 5_000

    run(scenario)


def test_a_refusal_ahead_of_need_is_nobodys_error() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        await ids.take(OWNER)
        controller.refusals.append(StaleBrokerEpoch("fenced"))
        for _ in range(BLOCK - 1):
            await ids.take(OWNER)
            await asyncio.sleep(0)
        assert await ids.take(OWNER) == 5_000 + BLOCK
        assert len(controller.commands) == 3

    run(scenario)


def test_a_controller_that_is_not_there_is_waited_for_and_then_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_ids, "WAIT_S", 0.02)

    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        controller.may.clear()
        for _ in range(2):
            with pytest.raises(RequestTimedOut, match="try again"):
                await ids.take(OWNER)
        assert len(controller.commands) == 1
        controller.may.set()
        assert await ids.take(OWNER) == 5_000

    run(scenario)


def test_before_the_start_and_after_the_end_there_are_none() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        with pytest.raises(CoordinatorNotAvailable):
            await controller.ids().take(OWNER)
        controller.may.clear()
        waiting = asyncio.create_task(ids.take(OWNER))
        await asyncio.sleep(0)
        ids.close()
        with pytest.raises(CoordinatorNotAvailable):
            await waiting

    run(scenario)


def test_one_who_does_not_wait_any_more_takes_nothing_from_the_others() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        controller.may.clear()
        first, second = asyncio.create_task(ids.take(OWNER)), asyncio.create_task(ids.take(OWNER))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        controller.may.set()
        assert await second == 5_000

    run(scenario)


def test_the_service_answers_with_errors_as_values() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        unused: Any = None  # without a transactional id no coordinator is asked
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


def test_a_request_that_names_a_transaction_twice_is_refused_before_any_is_described() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        unused: Any = None
        service = TransactionService(unused, unused, ids, unused, unused, unused, unused)
        request = transaction_pb2.DescribeTransactionsRequest(transactional_ids=["t", "u", "t"])
        answer = await service.DescribeTransactions(request, unused)
        assert [(each.transactional_id, each.error.code) for each in answer.transactions] == [
            (name, common_pb2.INVALID_REQUEST) for name in ("t", "u", "t")
        ]

    run(scenario)


def test_ids_are_bound_to_their_owners_as_soon_as_the_cluster_has_upgraded() -> None:
    async def scenario(controller: Controller, ids: ProducerIds) -> None:
        assert await ids.take(OWNER) == 5_000
        assert await ids.key() is None
        assert controller.commands[0].allocate_producer_ids.new_secret == bytes(32), (
            "the first request must offer a new secret, which the cluster does not take yet"
        )
        controller.image = MetadataImage(features={METADATA_VERSION: PRODUCER_OWNERS_LEVEL})
        key = await ids.key()
        assert key == ProducerIdKey(bytes(32), 6_000)
        found = [await ids.take(OWNER) for _ in range(2 * BLOCK)]
        assert [producer_id >> TAG_BITS for producer_id in found] == list(range(6_000, 6_000 + 2 * BLOCK)), (
            "the ids must come from new blocks, as the rest of the first block is dropped"
        )
        assert all(key.owns(OWNER, producer_id) for producer_id in found)
        assert not any(key.owns(ProducerOwner.principal("User:bob"), producer_id) for producer_id in found)
        assert controller.secrets == 2, "no further secret must be made once the cluster has one"

    run(scenario)
