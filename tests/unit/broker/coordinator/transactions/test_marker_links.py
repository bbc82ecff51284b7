"""Markers on their way from one broker to another: real connections, and a broker that is not quite well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpc import aio

from broker.coordinator.groups.commands import EndTransactionOffsets
from broker.coordinator.shard import State
from broker.coordinator.transactions import marker_links
from broker.coordinator.transactions.marker_links import MarkerLinks
from broker.coordinator.transactions.marker_sender import Answer, Errors, LocalMarkers, Target
from broker.net.services import markers as markers_service
from broker.net.services.markers import MarkerService
from raftlog.errors import (
    BrokerUnavailable,
    InvalidProducerEpoch,
    NotCoordinator,
    NotEnoughReplicas,
    NotLeader,
    RaftlogError,
    RequestTimedOut,
    ShuttingDown,
)
from raftlog.format.control import Marker
from raftlog.v1.group_pb2 import CommitOffsetResult

TOPIC = bytes(16)
BROKER = 2


class Partition:
    """Stands for a led partition: refuses some producer ids, and keeps others waiting."""

    leader_epoch = 3

    def __init__(self) -> None:
        self.appended: list[Marker] = []
        self.refused: dict[int, RaftlogError] = {}
        self.raises: Exception | None = None
        self.silent = False

    def append_markers(self, markers: Sequence[Marker], leader_epoch: int, answer: Answer) -> None:
        assert leader_epoch == self.leader_epoch
        if self.raises is not None:
            raise self.raises
        self.appended += markers
        if not self.silent:
            answer([self.refused.get(marker.producer_id) for marker in markers])


class Groups:
    """Stands for GroupCoordinators, and for the shard of every group at once."""

    state = State.ACTIVE

    def __init__(self) -> None:
        self.commands: list[EndTransactionOffsets] = []
        self.elsewhere = False

    def shard_of(self, group_id: str) -> tuple[int, Groups]:
        if self.elsewhere:
            raise NotCoordinator("elsewhere")
        return 0, self

    def submit(self, command: EndTransactionOffsets, recipient: Any) -> None:
        self.commands.append(command)
        recipient.deliver(CommitOffsetResult())


class Far:
    """A broker at the other end."""

    def __init__(self) -> None:
        self.partitions = {0: Partition(), 1: Partition()}
        self.groups = Groups()
        self.service = MarkerService()
        self.local = LocalMarkers(self._find, cast(Any, self.groups))

    def _find(self, topic_id: bytes, partition: int) -> Any:
        if partition not in self.partitions:
            raise NotLeader("not here")
        return self.partitions[partition]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is given up because it takes long."""
    monkeypatch.setattr(marker_links, "CALL_S", 600.0)


@asynccontextmanager
async def connected(far: Far, *, is_open: bool = True) -> AsyncIterator[MarkerLinks]:
    server = aio.server()
    server.add_generic_rpc_handlers((far.service.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    if is_open:
        far.service.open(far.local)
    links = MarkerLinks(lambda broker_id: f"127.0.0.1:{port}" if broker_id == BROKER else None)
    try:
        yield links
    finally:
        await links.close()
        await server.stop(None)


async def sent(links: MarkerLinks, *what: tuple[Target, list[Marker]], broker_id: int = BROKER) -> list[Errors]:
    """Send, and return what each was answered with."""
    answers: list[asyncio.Future[Errors]] = [asyncio.get_running_loop().create_future() for _ in what]
    for (target, markers), answer in zip(what, answers, strict=True):
        links.put(broker_id, target, markers, answer.set_result)
    links.flush()
    return await asyncio.wait_for(asyncio.gather(*answers), 60)


def marker(producer_id: int, *, commit: bool = True) -> Marker:
    return Marker(producer_id, 1, commit, 4)


async def test_partitions_and_groups_are_answered_for_each_by_itself() -> None:
    far = Far()
    far.partitions[1].refused[7] = NotEnoughReplicas("too few")
    async with connected(far) as links:
        errors = await sent(
            links,
            ("g", [marker(5), marker(6, commit=False)]),
            ((TOPIC, 0), [marker(5)]),
            ((TOPIC, 1), [marker(6), marker(7)]),
            ((TOPIC, 2), [marker(5)]),
        )
    assert [[type(error) for error in each] for each in errors] == [
        [type(None)] * 2,
        [type(None)],
        [type(None), NotEnoughReplicas],
        [NotLeader],
    ]
    assert far.partitions[0].appended == [marker(5)]
    assert [(each.group_id, each.producer_id, each.producer_epoch, each.commit) for each in far.groups.commands] == [
        ("g", 5, 1, True),
        ("g", 6, 1, False),
    ]


def test_a_marker_that_comes_too_late_is_taken_for_written(caplog: pytest.LogCaptureFixture) -> None:
    """KIP-890: a partition with a newer epoch has heard the decision; the coordinator must not ask for ever."""

    async def scenario() -> None:
        far = Far()
        far.partitions[0].refused[7] = InvalidProducerEpoch("epoch 9 has begun")
        async with connected(far) as links:
            assert await sent(links, ((TOPIC, 0), [marker(6), marker(7)])) == [[None, None]]

    asyncio.run(scenario())
    assert "comes too late" in caplog.text


def test_partitions_that_were_quick_do_not_wait_for_those_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markers_service, "WAIT_MS", 50)

    async def scenario() -> None:
        far = Far()
        far.partitions[1].silent = True
        async with connected(far) as links:
            quick, slow = await sent(links, ((TOPIC, 0), [marker(5)]), ((TOPIC, 1), [marker(5)]))
        assert quick == [None]
        assert isinstance(slow[0], RequestTimedOut)

    asyncio.run(scenario())


async def test_a_bug_of_one_partition_is_an_answer_and_the_others_are_unharmed() -> None:
    far = Far()
    far.partitions[0].raises = ValueError("a bug")
    async with connected(far) as links:
        broken, well = await sent(links, ((TOPIC, 0), [marker(5)]), ((TOPIC, 1), [marker(5)]))
    assert "ValueError: a bug" in str(broken[0])
    assert well == [None]


async def test_a_group_that_moved_is_refused() -> None:
    far = Far()
    far.groups.elsewhere = True
    async with connected(far) as links:
        ((error,),) = await sent(links, ("g", [marker(5)]))
    assert isinstance(error, NotCoordinator)


async def test_a_broker_that_is_starting_refuses_and_may_be_asked_again() -> None:
    far = Far()
    async with connected(far, is_open=False) as links:
        ((error,),) = await sent(links, ((TOPIC, 0), [marker(5)]))
        assert isinstance(error, ShuttingDown)
        far.service.open(far.local)
        assert await sent(links, ((TOPIC, 0), [marker(5)])) == [[None]]


async def test_a_broker_that_nobody_reaches_is_unavailable() -> None:
    links = MarkerLinks({1: "127.0.0.1:1"}.get)
    try:
        for broker_id in (1, 9):
            ((error,),) = await sent(links, ((TOPIC, 0), [marker(5)]), broker_id=broker_id)
            assert isinstance(error, BrokerUnavailable)
    finally:
        await links.close()


@pytest.mark.parametrize("gone", [True, False])
def test_a_broker_that_is_fenced_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    monkeypatch.setattr(markers_service, "WAIT_MS", 600_000)

    async def scenario() -> None:
        far = Far()
        far.partitions[0].silent = True
        async with connected(far) as links:
            sending = asyncio.ensure_future(sent(links, ((TOPIC, 0), [marker(5)])))
            while not far.partitions[0].appended:  # noqa: ASYNC110 - the other end rings no bell
                await asyncio.sleep(0.005)
            brokers = {} if gone else {BROKER: SimpleNamespace(fenced=True)}
            links.on_metadata(cast(Any, SimpleNamespace(brokers=brokers)))
            ((error,),) = await sending
        assert isinstance(error, BrokerUnavailable)

    asyncio.run(scenario())


def test_few_requests_at_a_time_and_what_waits_shares_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker_links, "MAX_IN_FLIGHT", 1)
    requests: list[int] = []

    async def scenario() -> None:
        far = Far()
        write = far.service.Write

        async def counted(request: Any, context: Any) -> Any:
            requests.append(len(request.partitions))
            return await write(request, context)

        monkeypatch.setattr(far.service, "Write", counted)
        async with connected(far) as links:
            first = asyncio.ensure_future(sent(links, ((TOPIC, 0), [marker(0)])))
            await asyncio.sleep(0)
            await asyncio.gather(*(sent(links, ((TOPIC, 0), [marker(number)])) for number in range(1, 20)))
            await first
        assert sorted(each.producer_id for each in far.partitions[0].appended) == list(range(20))

    asyncio.run(scenario())
    assert requests[0] == 1
    assert len(requests) <= 3
