"""The channel finds the active controller, keeps a command's identity over retries, and gives up in words."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest
from grpc import aio

from raftlog.errors import (
    BrokerOverloaded,
    DuplicateBrokerRegistration,
    NotController,
    RaftlogError,
    RequestTimedOut,
    TopicAlreadyExists,
    UnknownOutcome,
)
from raftlog.v1 import controller_pb2, controller_pb2_grpc
from raftlog.v1.controller_pb2 import ControllerHint, HeartbeatRequest, HeartbeatResponse
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.decide.outcome import outcome_to_wire
from raftmeta.quorum import channel as channel_module
from raftmeta.quorum.channel import ControllerChannel
from raftmeta.quorum.config import Endpoint
from tests.support.quorum import free_ports, register_command, run

Answer = Callable[[MetadataCommand], "CommandResult | RaftlogError"]


class FakeController(controller_pb2_grpc.ControllerServicer):
    """Answers as the test says, and remembers what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[MetadataCommand] = []
        self.hint = ControllerHint(controller_id=-1)

    async def Propose(self, request: controller_pb2.ProposeRequest, context: object) -> controller_pb2.ProposeResponse:
        command = MetadataCommand()
        command.CopyFrom(request.command)
        self.asked.append(command)
        return controller_pb2.ProposeResponse(outcome=outcome_to_wire(self.answer(command)), controller=self.hint)

    async def Barrier(self, request: object, context: object) -> controller_pb2.BarrierResponse:
        raise NotImplementedError

    async def DescribeQuorum(self, request: object, context: object) -> controller_pb2.DescribeQuorumResponse:
        raise NotImplementedError

    def Heartbeat(self, request_iterator: object, context: object) -> AsyncIterator[HeartbeatResponse]:
        raise NotImplementedError


class Local:
    """A controller in the same process."""

    def __init__(self, answer: Answer) -> None:
        self.serving = True
        self.answer = answer
        self.asked: list[tuple[int, int]] = []

    async def propose(self, command: MetadataCommand) -> CommandResult:
        self.asked.append((command.sequence, command.settled_below))
        outcome = self.answer(command)
        if isinstance(outcome, RaftlogError):
            raise outcome
        return outcome

    async def barrier(self) -> int:
        return 7

    def heartbeat(self, request: HeartbeatRequest, stream: object) -> asyncio.Future[HeartbeatResponse]:
        raise NotImplementedError

    def stream_closed(self, stream: object) -> None:
        raise NotImplementedError


class Fakes:
    """Controllers 1 to n over gRPC."""

    def __init__(self, *answers: Answer) -> None:
        self.endpoints = {
            node_id: Endpoint("127.0.0.1", port) for node_id, port in enumerate(free_ports(len(answers)), 1)
        }
        self.controllers = {node_id: FakeController(answer) for node_id, answer in enumerate(answers, 1)}
        self.servers: list[aio.Server] = []

    async def __aenter__(self) -> Fakes:
        for node_id, controller in self.controllers.items():
            server = aio.server()
            controller_pb2_grpc.add_ControllerServicer_to_server(controller, server)
            server.add_insecure_port(self.endpoints[node_id].address)
            await server.start()
            self.servers.append(server)
        return self

    async def __aexit__(self, *error: object) -> None:
        for server in self.servers:
            await server.stop(None)

    def hint(self, node_id: int, epoch: int) -> ControllerHint:
        endpoint = self.endpoints[node_id]
        return ControllerHint(controller_id=node_id, controller_epoch=epoch, host=endpoint.host, port=endpoint.port)

    def channel(self, timeout_ms: float = 5_000) -> ControllerChannel:
        return ControllerChannel(9, self.endpoints, lambda: "c", timeout_ms=timeout_ms, rng=random.Random(1))


def accept(command: MetadataCommand) -> CommandResult:
    return CommandResult(10)


def elsewhere(command: MetadataCommand) -> RaftlogError:
    return NotController("ask another one")


def test_a_hint_is_followed_and_remembered() -> None:
    async def scenario() -> None:
        async with Fakes(elsewhere, elsewhere, accept) as fakes:
            for node_id in (1, 2):
                fakes.controllers[node_id].hint = fakes.hint(3, 4)
            channel = fakes.channel()
            for _ in range(5):
                await channel.propose(register_command())
            assert len(fakes.controllers[3].asked) == 5
            assert len(fakes.controllers[1].asked) + len(fakes.controllers[2].asked) <= 1
            await channel.close()

    run(scenario)


def test_a_command_keeps_its_identity_until_it_is_answered() -> None:
    async def scenario() -> None:
        left = [UnknownOutcome("deposed"), NotController("not yet"), UnknownOutcome("again")]

        def answer(command: MetadataCommand) -> CommandResult | RaftlogError:
            return left.pop() if left else CommandResult(10)

        async with Fakes(answer) as fakes:
            channel = fakes.channel()
            assert await channel.propose(register_command()) == CommandResult(10)
            await channel.propose(register_command())
            asked = fakes.controllers[1].asked
            assert [command.sequence for command in asked] == [0, 0, 0, 0, 1]
            assert len({command.client_id for command in asked}) == 1
            assert [command.settled_below for command in asked] == [0, 0, 0, 0, 1]
            await channel.close()

    run(scenario)


@pytest.mark.parametrize("error", [TopicAlreadyExists("there"), DuplicateBrokerRegistration("alive")])
def test_what_the_state_machine_answers_is_final_even_if_it_is_retriable(error: RaftlogError) -> None:
    async def scenario() -> None:
        async with Fakes(lambda command: error) as fakes:
            channel = fakes.channel()
            with pytest.raises(type(error), match=str(error)):
                await channel.propose(register_command())
            assert len(fakes.controllers[1].asked) == 1
            await channel.close()

    run(scenario)


def test_the_deadline_says_who_could_not_be_reached() -> None:
    async def scenario() -> None:
        async with Fakes(elsewhere) as fakes:
            nobody = Endpoint("127.0.0.1", free_ports(1)[0])
            channel = ControllerChannel(9, {**fakes.endpoints, 2: nobody}, lambda: "c", timeout_ms=500)
            with pytest.raises(RequestTimedOut, match=rf"0\.5 s; controller 2 at {nobody.address}"):
                await channel.propose(register_command())
            await channel.close()

    run(scenario)


def test_commands_beyond_the_bound_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_OUTSTANDING", 3)

    async def scenario() -> None:
        async with Fakes(elsewhere) as fakes:
            channel = fakes.channel(timeout_ms=300)
            under_way = [asyncio.create_task(channel.propose(register_command())) for _ in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(BrokerOverloaded, match="3 metadata commands"):
                await channel.propose(register_command())
            await asyncio.gather(*under_way, return_exceptions=True)
            await channel.close()

    run(scenario)


def test_the_controller_in_this_process_is_asked_directly_and_others_when_it_is_deposed() -> None:
    async def scenario() -> None:
        async with Fakes(accept, elsewhere) as fakes:

            def deposed(command: MetadataCommand) -> RaftlogError:
                local.serving = False
                return UnknownOutcome("deposed")

            local = Local(accept)
            channel = ControllerChannel(2, fakes.endpoints, lambda: "c", local=local)
            assert await channel.barrier() == 7
            await channel.propose(register_command())
            assert local.asked == [(0, 0)]
            local.answer = deposed
            await channel.propose(register_command())
            assert local.asked == [(0, 0), (1, 1)]
            assert [command.sequence for command in fakes.controllers[1].asked] == [1]
            assert fakes.controllers[2].asked == [], "itself is not asked over the network"
            await channel.close()

    run(scenario)


def test_a_stale_hint_does_not_lead_back() -> None:
    async def scenario() -> None:
        async with Fakes(elsewhere, accept) as fakes:
            channel = fakes.channel()
            channel._note(fakes.hint(2, 6))
            channel._note(fakes.hint(1, 5))
            await channel.propose(register_command())
            assert fakes.controllers[1].asked == []
            await channel.close()

    run(scenario)
