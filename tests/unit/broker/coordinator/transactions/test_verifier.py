"""Asking a transaction's coordinator whether a group may keep its offsets, and what follows from the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpc import aio

from broker.coordinator.transactions import verifier
from broker.coordinator.transactions.commands import AddTo, Command
from broker.coordinator.transactions.marker_sender import LocalMarkers
from broker.coordinator.transactions.verifier import TransactionVerifier
from broker.kafka import errors
from broker.kafka import messages as api
from broker.kafka.transactions import TransactionApis
from broker.net.services import markers
from broker.net.services.markers import MarkerService
from broker.security.caller import Caller
from raftlog.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    InvalidTxnState,
    NotCoordinator,
    PolicyViolation,
    RaftlogError,
    TransactionAbortable,
)
from raftlog.v1 import group_pb2, transaction_pb2

ME, OTHER = 1, 2


class Coordinators:
    """Of transactions: broker `leader` coordinates all of them, and says what `refusal` says."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self.refusal: RaftlogError | None = None
        self.asked: list[transaction_pb2.VerifyTransactionRequest] = []
        self.commands: list[Command] = []

    def find(self, key: str) -> Any:
        return SimpleNamespace(partition=0, broker=SimpleNamespace(broker_id=self.leader))

    def shard_of(self, key: str) -> tuple[int, Any]:
        return 0, self

    def submit(self, command: Any, recipient: Any) -> None:
        self.asked.append(command.request)
        self.commands.append(command)
        recipient.deliver(self.refusal or transaction_pb2.VerifyTransactionResponse())

    def detach(self, recipient: Any) -> None: ...


class Clock:
    now = 0.0

    def now_ms(self) -> int:
        return 0

    def monotonic_ms(self) -> float:
        return self.now


def commit(group_id: str = "g", epoch: int = 3) -> group_pb2.CommitTransactionOffsetsRequest:
    return group_pb2.CommitTransactionOffsetsRequest(
        group_id=group_id, transactional_id="x", producer_id=7, producer_epoch=epoch
    )


class World:
    """This broker, and another one that coordinates transactions when `leader` says so."""

    def __init__(self, leader: int) -> None:
        self.there = Coordinators(OTHER)
        self.here = Coordinators(leader)
        self.clock = Clock()
        self.port: int | None = None
        self.verifier = TransactionVerifier(ME, cast(Any, self.here), self._address_of, self.clock)

    def _address_of(self, broker_id: int) -> str | None:
        assert broker_id == OTHER
        return None if self.port is None else f"127.0.0.1:{self.port}"

    @property
    def coordinator(self) -> Coordinators:
        return self.here if self.here.leader == ME else self.there


@asynccontextmanager
async def world(leader: int, *, is_open: bool = True) -> AsyncIterator[World]:
    made = World(leader)
    server = aio.server()
    service = MarkerService()
    server.add_generic_rpc_handlers((service.handlers(),))
    made.port = server.add_insecure_port("127.0.0.1:0")
    far = TransactionVerifier(OTHER, cast(Any, made.there), lambda broker_id: None, made.clock)
    if is_open:
        service.open(cast(LocalMarkers, object()), far.verify_here)
    await server.start()
    try:
        yield made
    finally:
        await made.verifier.close()
        await server.stop(None)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is given up because it takes long."""
    monkeypatch.setattr(verifier, "CALL_S", 60.0)
    monkeypatch.setattr(markers, "WAIT_MS", 60_000)


@pytest.mark.parametrize("leader", [ME, OTHER])
def test_the_transactions_coordinator_is_asked_once(leader: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "MAX_REMEMBERED", 2)

    async def scenario() -> None:
        async with world(leader) as made:
            for _ in range(3):
                await made.verifier.check(commit(), 60.0)
            (asked,) = made.coordinator.asked
            assert (asked.transactional_id, asked.producer_id, asked.producer_epoch, asked.group_id) == ("x", 7, 3, "g")
            await made.verifier.check(commit("other"), 60.0)
            await made.verifier.check(commit(epoch=4), 60.0)
            assert len(made.coordinator.asked) == 3, "the coordinator must be asked for each transaction and each group"
            await made.verifier.check(commit(), 60.0)
            assert len(made.coordinator.asked) == 4, "the first answer must be forgotten, as there is no more room"
            made.clock.now += verifier.REMEMBERED_MS
            await made.verifier.check(commit(), 60.0)
            assert len(made.coordinator.asked) == 5, (
                "an answer must not be remembered for ever, as the group forgets it, too"
            )

    asyncio.run(scenario())


@pytest.mark.parametrize("leader", [ME, OTHER])
@pytest.mark.parametrize("refusal", [InvalidTxnState("not added"), TransactionAbortable("timed out")])
async def test_a_refusal_is_told_and_not_remembered(leader: int, refusal: RaftlogError) -> None:
    async with world(leader) as made:
        made.coordinator.refusal = refusal
        with pytest.raises(type(refusal), match=str(refusal)):
            await made.verifier.check(commit(), 60.0)
        made.coordinator.refusal = None
        await made.verifier.check(commit(), 60.0)


@pytest.mark.parametrize("leader", [ME, OTHER])
@pytest.mark.parametrize("passing", [NotCoordinator("broker 3 is"), CoordinatorNotAvailable("no leader")])
async def test_what_passes_is_not_taken_for_the_groups_coordinator_having_moved(
    leader: int, passing: RaftlogError
) -> None:
    async with world(leader) as made:
        made.coordinator.refusal = passing
        with pytest.raises(CoordinatorLoadInProgress, match=str(passing)):
            await made.verifier.check(commit(), 60.0)


async def test_a_coordinator_that_is_not_there() -> None:
    async with world(OTHER, is_open=False) as made:
        with pytest.raises(CoordinatorLoadInProgress, match="starting or stopping"):
            await made.verifier.check(commit(), 60.0)
        made.port = 1
        with pytest.raises(CoordinatorLoadInProgress):
            await made.verifier.check(commit(), 0.5)
        made.port = None
        with pytest.raises(CoordinatorLoadInProgress, match="not known where"):
            await made.verifier.check(commit(), 60.0)


@pytest.mark.parametrize("leader", [ME, OTHER])
async def test_a_kafka_client_whose_transactions_have_named_too_many_groups_aborts(leader: int) -> None:
    """A client of transaction.version 2 adds a group by its offsets, and would repeat them after a passing error."""
    permitted = SimpleNamespace(permit=lambda *call: None)
    offset = {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": 0, "committed_metadata": None}
    request = {
        "group_id": "g",
        "transactional_id": "x",
        "producer_id": 7,
        "producer_epoch": 3,
        "member_id": "",
        "generation_id": -1,
        "group_instance_id": None,
        "topics": [{"name": "t", "partitions": [offset]}],
    }
    async with world(leader) as made:
        services = SimpleNamespace(transactions=None, groups=None)
        apis = TransactionApis(cast(Any, permitted), cast(Any, services), made.verifier)
        made.coordinator.refusal = PolicyViolation("too many groups")
        answer = await apis.handlers[api.TXN_OFFSET_COMMIT](request, 5, Caller("User:tenant"))
        (command,) = made.coordinator.commands
    assert answer["topics"][0]["partitions"] == [
        {"partition_index": 0, "error_code": errors.GROUP_AUTHORIZATION_FAILED}
    ]
    assert isinstance(command, AddTo)
    assert list(command.request.group_ids) == ["g"]
    assert command.user == "User:tenant", "a transactional id may have no user, and its groups count for the caller's"
