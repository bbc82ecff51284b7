"""The channel finds the active controller, keeps a command's identity over retries, and gives up in words."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import pytest
from grpc import aio

from raftlog.errors import (
    BrokerOverloaded,
    BrokerUnavailable,
    DuplicateBrokerRegistration,
    MessageTooLarge,
    NotController,
    RaftlogError,
    RequestTimedOut,
    ShuttingDown,
    TopicAlreadyExists,
    UnknownOutcome,
)
from raftlog.v1 import controller_pb2, controller_pb2_grpc
from raftlog.v1.controller_pb2 import ControllerHint, HeartbeatRequest, HeartbeatResponse
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.decide.outcome import outcome_to_wire
from raftmeta.quorum import channel as channel_module
from raftmeta.quorum.channel import ControllerChannel, RemoteHeartbeats
from raftmeta.quorum.config import MAX_COMMAND_BYTES, Endpoint
from tests.support.quorum import free_ports, register_command, run
from tests.support.replica_link import settle

Answer = Callable[[MetadataCommand], "CommandResult | RaftlogError"]


class FakeController(controller_pb2_grpc.ControllerServicer):
    """Answers as the test says, and remembers what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[MetadataCommand] = []
        self.delay_s = 0.0
        self.hint = ControllerHint(controller_id=-1)

    async def Propose(self, request: controller_pb2.ProposeRequest, context: object) -> controller_pb2.ProposeResponse:
        command = MetadataCommand()
        command.CopyFrom(request.command)
        self.asked.append(command)
        await asyncio.sleep(self.delay_s)
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


class SlowLocal(Local):
    """A controller in the same process that answers when the test says so."""

    def __init__(self) -> None:
        super().__init__(accept)
        self.brokers: list[int] = []
        self.sequences: list[int] = []
        self.answers: dict[int, asyncio.Future[CommandResult]] = {}

    async def propose(self, command: MetadataCommand) -> CommandResult:
        broker_id = command.register_broker.broker_id
        self.brokers.append(broker_id)
        self.sequences.append(command.sequence)
        self.answers[broker_id] = asyncio.get_running_loop().create_future()
        return await self.answers[broker_id]

    def answer_all_but(self, *broker_ids: int) -> None:
        for broker_id, answer in self.answers.items():
            if broker_id not in broker_ids and not answer.done():
                answer.set_result(CommandResult(1))


class Nonsense(grpc.GenericRpcHandler):
    """A server that sends no valid messages."""

    def service(self, handler_call_details: Any) -> Any:
        async def stream(requests: Any, context: Any) -> None:
            await context.read()
            await context.write(b"\xff\xff nonsense")
            await asyncio.sleep(60)

        async def unary(request: Any, context: Any) -> bytes:
            return b"\xff\xff nonsense"

        if handler_call_details.method.endswith(("Heartbeat", "Exchange")):
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


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

    def channel(self, timeout_ms: float = 60_000) -> ControllerChannel:
        return ControllerChannel(9, self.endpoints, lambda: "c", timeout_ms=timeout_ms, rng=random.Random(1))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attempt is given up because its answer takes long, so that attempts can be counted."""
    monkeypatch.setattr(channel_module, "ATTEMPT_TIMEOUT_S", 60.0)


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


def test_a_controller_that_the_metadata_names_is_asked_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has found no active controller looks again after a pause, here of an hour."""
    monkeypatch.setattr(channel_module, "FIRST_BACKOFF_S", 3_600.0)
    monkeypatch.setattr(channel_module, "LAST_BACKOFF_S", 3_600.0)

    async def scenario() -> None:
        elected = False

        def answer(command: MetadataCommand) -> CommandResult | RaftlogError:
            return CommandResult(10) if elected else NotController("none is active")

        async with Fakes(answer, elsewhere) as fakes:
            channel = fakes.channel(timeout_ms=7_200_000)
            proposing = asyncio.create_task(channel.propose(register_command()))
            while not (fakes.controllers[1].asked and fakes.controllers[2].asked):  # noqa: ASYNC110 # of other tasks
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # so that it pauses, on most machines
            elected = True
            channel.follow(1, 1)
            async with asyncio.timeout(30):
                assert await proposing == CommandResult(10)
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
            said = ""
            while not channel.troubles():  # it may not have got as far as controller 2
                with pytest.raises(RequestTimedOut) as timed_out:
                    await channel.propose(register_command())
                said = str(timed_out.value)
            assert re.search(rf"within 0\.\d+ s; controller 2 at {re.escape(nobody.address)}", said), said
            await channel.close()

    run(scenario)


def test_commands_beyond_the_bound_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_OUTSTANDING", 3)
    monkeypatch.setattr(channel_module, "MAX_IN_FLIGHT", 2)

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
            assert fakes.controllers[2].asked == [], "the channel must not ask its own controller over the network"
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


def test_commands_of_one_node_take_their_turns_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_IN_FLIGHT", 2)

    async def scenario() -> None:
        local = SlowLocal()
        channel = ControllerChannel(1, {}, lambda: "c", local=local)
        asked = [asyncio.create_task(channel.propose(register_command(broker_id))) for broker_id in range(5)]
        await settle()
        assert local.brokers == [0, 1]
        asked[3].cancel()
        local.answers[1].set_result(CommandResult(1))
        await settle()
        assert local.brokers == [0, 1, 2]
        local.answers[0].set_result(CommandResult(1))
        await settle()
        assert local.brokers == [0, 1, 2, 4], "a command that was given up must not be sent"
        for broker_id in (2, 4):
            local.answers[broker_id].set_result(CommandResult(1))
        done = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(each, CommandResult) for each in done] == [True, True, True, False, True]
        await channel.close()

    run(scenario)


def test_a_command_that_waits_long_never_falls_behind_what_is_kept_of_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "MAX_SPAN", 10)

    async def scenario() -> None:
        local = SlowLocal()
        channel = ControllerChannel(1, {}, lambda: "c", local=local)
        oldest = asyncio.create_task(channel.propose(register_command(0)))
        await settle()
        later = [asyncio.create_task(channel.propose(register_command(broker_id))) for broker_id in range(1, 31)]
        for _ in range(40):
            await asyncio.sleep(0)
            local.answer_all_but(0)
        assert max(local.sequences) == 9, "no further command may be sent while sequence 0 is among the last ten"
        local.answers[0].set_result(CommandResult(1))
        await oldest
        while not all(task.done() for task in later):
            await asyncio.sleep(0)
            local.answer_all_but()
        assert local.sequences == list(range(31))
        await channel.close()

    run(scenario)


def test_a_turn_that_does_not_come_in_time_is_given_up_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_IN_FLIGHT", 1)

    async def scenario() -> None:
        local = SlowLocal()
        channel = ControllerChannel(1, {}, lambda: "c", local=local)
        first = asyncio.create_task(channel.propose(register_command(0)))
        await settle()
        with pytest.raises(RequestTimedOut, match=r"0\.05 s.*1 others.*not sent"):
            await channel.propose(register_command(1), timeout_s=0.05)
        waiting = asyncio.create_task(channel.propose(register_command(2)))
        await settle()
        await channel.close()
        with pytest.raises(ShuttingDown):
            await waiting
        local.answers[0].set_result(CommandResult(1))
        await first
        assert local.brokers == [0]

    run(scenario)


def test_an_answer_that_takes_long_is_waited_for_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "ATTEMPT_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        async with Fakes(accept) as fakes:
            controller, channel = fakes.controllers[1], fakes.channel()
            propose, given_s = channel._propose_remote, list[float]()

            def noted(target: int, command: MetadataCommand, timeout_s: float) -> Coroutine[Any, Any, CommandResult]:
                given_s.append(timeout_s)
                controller.delay_s = 600.0 if len(given_s) < 4 else 0.0
                return propose(target, command, timeout_s)

            monkeypatch.setattr(channel, "_propose_remote", noted)
            assert await channel.propose(register_command()) == CommandResult(10)
            assert given_s[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
            await channel.close()

    run(scenario)


def test_an_outcome_that_is_kept_no_more_is_not_asked_for_again() -> None:
    async def scenario() -> None:
        async with Fakes(lambda command: RequestTimedOut("sequence 0 of this client is settled")) as fakes:
            channel = fakes.channel()
            with pytest.raises(RequestTimedOut, match="settled"):
                await channel.propose(register_command())
            assert len(fakes.controllers[1].asked) == 1
            await channel.close()

    run(scenario)


def test_a_command_that_is_too_large_is_refused_at_once() -> None:
    async def scenario() -> None:
        async with Fakes(accept) as fakes:
            channel = fakes.channel()
            command = register_command()
            command.register_broker.rack = "r" * (40 << 20)
            with pytest.raises(MessageTooLarge, match=str(MAX_COMMAND_BYTES)):
                await channel.propose(command)
            assert fakes.controllers[1].asked == []
            await channel.close()

    run(scenario)


def test_a_controller_that_answers_nonsense_is_left_for_another_one() -> None:
    async def scenario() -> None:
        async with Fakes(accept, accept) as fakes:
            await fakes.servers[0].stop(None)
            garbage = aio.server()
            garbage.add_generic_rpc_handlers((Nonsense(),))
            garbage.add_insecure_port(fakes.endpoints[1].address)
            await garbage.start()
            channel = fakes.channel()
            channel._hinted = 1
            assert await channel.propose(register_command()) == CommandResult(10)
            with pytest.raises(RequestTimedOut, match="is not a response"):
                await ControllerChannel(9, {1: fakes.endpoints[1]}, lambda: "c").describe_quorum(0.1)
            stream = RemoteHeartbeats(channel._stub(1).Heartbeat(), "x", lambda response: None, lambda error: None)
            await stream.send(HeartbeatRequest())
            with pytest.raises(BrokerUnavailable):
                await stream.receive()
            await channel.close()
            await garbage.stop(None)

    run(scenario)


def test_a_call_that_somebody_cancels_is_a_broken_stream() -> None:
    async def scenario() -> None:
        (port,) = free_ports(1)
        server = aio.server()
        server.add_generic_rpc_handlers((Nonsense(),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        channel = ControllerChannel(9, {1: Endpoint("127.0.0.1", port)}, lambda: "c")
        call = channel._stub(1).Heartbeat()
        stream = RemoteHeartbeats(call, "x", lambda response: None, lambda error: None)
        receiving = asyncio.create_task(stream.receive())
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(BrokerUnavailable):
            await receiving
        await channel.close()
        await server.stop(None)

    run(scenario)
