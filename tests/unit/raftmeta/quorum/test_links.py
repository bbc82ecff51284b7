"""Streams between voters: in order, several messages to a frame, dropped when silent or clogged, dialled again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc import aio

from raftlog._client.security import dial
from raftlog.errors import InconsistentVoters
from raftlog.v1 import raft_pb2_grpc
from raftlog.v1.raft_pb2 import AppendEntries, RaftEntry, RaftFrame, RaftHello, RaftMessage, ReadProbe, TermNotice
from raftmeta.quorum import links as links_module
from raftmeta.quorum.config import CHANNEL_OPTIONS, SERVER_OPTIONS, Endpoint
from raftmeta.quorum.links import RaftExchange, RaftLinks
from tests.support.held_timeouts import hold_timeouts
from tests.support.quorum import eventually, free_ports, run


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream is given up because one end takes long."""
    for module in (links_module, links_module):
        monkeypatch.setattr(module, "HELLO_TIMEOUT_S", 60.0)
        monkeypatch.setattr(module, "SILENCE_S", 60.0)


class Core:
    """Writes down what links tell it."""

    def __init__(self, node_id: int, incarnation: int = 1) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.received: list[int] = []
        self.events: list[str] = []
        self.greeted: list[int] = []

    def hello(self) -> RaftHello:
        return RaftHello(cluster_id="c", node_id=self.node_id, voters=(1, 2), incarnation=self.incarnation)

    def hello_from(self, peer_id: int, hello: RaftHello) -> None:
        assert hello.node_id == peer_id
        self.greeted.append(peer_id)

    def receive(self, peer_id: int, message: RaftMessage) -> None:
        self.received.append(message.read_probe.round or len(message.append_entries.entries[0].data))

    def link_up(self, peer_id: int, hello: RaftHello) -> None:
        self.events.append(f"up {peer_id}")

    def link_down(self, peer_id: int) -> None:
        self.events.append(f"down {peer_id}")

    def stream_lost(self, peer_id: int) -> None:
        self.events.append(f"lost {peer_id}")


def kick() -> None:
    """Stand in for the driver."""


def probe(number: int) -> RaftMessage:
    return RaftMessage(read_probe=ReadProbe(round=number))


class Silent(raft_pb2_grpc.RaftServicer):
    """Accepts a hello, and then neither says nor, if so told, reads anything."""

    def __init__(self, reads: bool) -> None:
        self.reads = reads

    async def Exchange(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # as the real one
        await context.read()
        await context.write(RaftFrame(hello=Core(2).hello()))
        while self.reads and (await context.read()) is not aio.EOF:
            pass
        await asyncio.sleep(60)


async def serve(servicer: raft_pb2_grpc.RaftServicer, port: int) -> aio.Server:
    server = aio.server(options=SERVER_OPTIONS)
    raft_pb2_grpc.add_RaftServicer_to_server(servicer, server)
    assert server.add_insecure_port(f"127.0.0.1:{port}") == port
    await server.start()
    return server


def with_link(
    servicer: raft_pb2_grpc.RaftServicer, scenario: Callable[[Core, RaftLinks, int], Awaitable[None]]
) -> None:
    """Run a scenario with a link of node 1 to node 2, which `servicer` is."""

    async def whole() -> None:
        (port,) = free_ports(1)
        server = await serve(servicer, port)
        core = Core(1)
        links = RaftLinks(core, {2: Endpoint("127.0.0.1", port)}, kick, random.Random(1))
        links.start()
        try:
            await eventually(lambda: core.events[:1] == ["up 2"], "a link")
            await scenario(core, links, port)
        finally:
            await links.close()
            await server.stop(None)

    run(whole)


def test_messages_arrive_in_order_however_large() -> None:
    there = Core(2)

    async def scenario(core: Core, links: RaftLinks, port: int) -> None:
        for number in range(1, 2_001):
            links.send(2, probe(number))
        big = RaftMessage(append_entries=AppendEntries(entries=[RaftEntry(index=1, data=bytes(6 << 20))]))
        for _ in range(3):
            links.send(2, big)
        links.send(2, probe(2_001))
        await eventually(lambda: len(there.received) == 2_004, "all messages")
        assert there.received == [*range(1, 2_001), *[6 << 20] * 3, 2_001]

    with_link(RaftExchange(there, kick), scenario)


def test_both_ends_hear_of_the_end_of_a_stream() -> None:
    there = Core(2)

    async def scenario(core: Core, links: RaftLinks, port: int) -> None:
        assert links.troubles() == {}
        links.send(2, probe(1))
        await eventually(lambda: there.received == [1], "the message")
        await links.close()
        await eventually(lambda: there.events == ["lost 1"], "the accepting end notices")
        assert core.events == ["up 2", "down 2"]
        links.send(2, probe(2))  # nowhere to go: dropped
        assert links.troubles()[2]

    with_link(RaftExchange(there, kick), scenario)


def test_a_link_comes_back_by_itself_soon_after_the_peer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    dials = 0

    def counted(*arguments: Any) -> aio.Channel:
        nonlocal dials
        dials += 1
        return dial(*arguments)

    monkeypatch.setattr(links_module, "dial", counted)

    async def whole() -> None:
        (port,) = free_ports(1)
        core, there = Core(1), Core(2)
        links = RaftLinks(core, {2: Endpoint("127.0.0.1", port)}, kick, random.Random(1))
        links.start()
        for _ in range(3):
            server = await serve(RaftExchange(there, kick), port)
            before = len(core.events)
            dials_before = dials
            await eventually(lambda before=before: "up 2" in core.events[before:], "a link")  # type: ignore[misc]
            assert dials <= dials_before + 1, (
                f"the first call after the peer came back must succeed, but {dials - dials_before} were needed"
            )
            await server.stop(None)
            await eventually(lambda: core.events[-1] == "down 2", "the end of the link")
        await links.close()

    run(whole)


@pytest.mark.parametrize("reads", [True, False])
def test_a_silent_peer_is_dropped(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "SILENCE_S", 0.3)
    monkeypatch.setattr(links_module, "PING_AFTER_S", 0.1)

    async def scenario(core: Core, links: RaftLinks, port: int) -> None:
        await eventually(lambda: "down 2" in core.events, "the link is given up")

    with_link(Silent(reads), scenario)


def test_a_peer_that_does_not_read_fast_enough_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "MAX_QUEUED_BYTES", 8 << 20)

    async def scenario(core: Core, links: RaftLinks, port: int) -> None:
        for _ in range(10):
            links.send(2, RaftMessage(append_entries=AppendEntries(entries=[RaftEntry(index=1, data=bytes(1 << 20))])))
        await eventually(lambda: "down 2" in core.events, "the link is given up")

    with_link(Silent(reads=False), scenario)


def test_an_idle_link_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each end hears of the other, and puts off what would end the link."""
    monkeypatch.setattr(links_module, "PING_AFTER_S", 0.1)
    monkeypatch.setattr(links_module, "PING_AFTER_S", 0.1)
    silences = hold_timeouts(monkeypatch, links_module)
    there = Core(2)

    async def scenario(core: Core, links: RaftLinks, port: int) -> None:
        def put_off_to() -> float:
            (deadline,) = silences.under_way
            return deadline.when() or 0.0

        await eventually(lambda: len(silences.under_way) == 1, "the accepting end waits for messages")
        for _ in range(4):
            heard_s, until_s = links._links[2]._heard_s, put_off_to()
            await eventually(lambda heard_s=heard_s: links._links[2]._heard_s > heard_s, "the peer is heard")  # type: ignore[misc] # of this round
            await eventually(lambda until_s=until_s: put_off_to() > until_s, "this end is heard")  # type: ignore[misc] # as above
        assert core.events == ["up 2"]
        assert there.events == []

    with_link(RaftExchange(there, kick), scenario)


async def open_stream(port: int, hello: RaftHello) -> tuple[aio.Channel, Any, Any]:
    channel = aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)
    call = raft_pb2_grpc.RaftStub(channel).Exchange()
    await call.write(RaftFrame(hello=hello))
    return channel, call, await call.read()


def test_a_newer_stream_of_the_same_process_takes_over_without_a_loss() -> None:
    async def whole() -> None:
        (port,) = free_ports(1)
        there = Core(2)
        server = await serve(RaftExchange(there, kick), port)
        hello = Core(1, incarnation=7).hello()
        old_channel, old, _ = await open_stream(port, hello)
        await old.write(RaftFrame(messages=[probe(1)]))
        await eventually(lambda: there.received == [1], "the first message")
        new_channel, new, _ = await open_stream(port, hello)
        await old.write(RaftFrame(messages=[probe(2)]))
        await new.write(RaftFrame(messages=[probe(3)]))
        await eventually(lambda: 3 in there.received, "a message of the newer stream")
        await asyncio.sleep(0.05)
        assert there.received == [1, 3], "late messages of the older stream must be dropped"
        assert there.events == []
        await new_channel.close()
        await eventually(lambda: there.events == ["lost 1"], "the end of the newest stream")
        await old_channel.close()
        await server.stop(None)

    run(whole)


def test_a_second_process_is_refused_while_the_first_lives_and_welcome_afterwards() -> None:
    async def whole() -> None:
        (port,) = free_ports(1)
        there = Core(2)
        server = await serve(RaftExchange(there, kick), port)
        channel, _, first = await open_stream(port, Core(1, incarnation=7).hello())
        assert not first.hello.HasField("error")
        other_channel, _, second = await open_stream(port, Core(1, incarnation=8).hello())
        assert second.hello.error.code == InconsistentVoters.code
        await channel.close()
        await other_channel.close()
        await eventually(lambda: there.events == ["lost 1"], "the end of the first")
        again_channel, _, again = await open_stream(port, Core(1, incarnation=8).hello())
        assert not again.hello.HasField("error")
        await again_channel.close()
        await server.stop(None)

    run(whole)


def test_rubbish_in_place_of_a_hello_harms_nobody() -> None:
    async def whole() -> None:
        (port,) = free_ports(1)
        there = Core(2)
        server = await serve(RaftExchange(there, kick), port)
        channel = aio.insecure_channel(f"127.0.0.1:{port}")
        call = raft_pb2_grpc.RaftStub(channel).Exchange()
        await call.write(RaftFrame(messages=[probe(1)]))
        assert (await call.read()) is aio.EOF
        await channel.close()
        assert there.received == []
        await server.stop(None)

    run(whole)


class Nonsense(grpc.GenericRpcHandler):
    """Answers with bytes that are no frame, at once or after a good hello."""

    def __init__(self, *, hello: bool) -> None:
        self.hello = hello

    def service(self, handler_call_details: Any) -> Any:
        async def stream(requests: Any, context: Any) -> None:
            await context.read()
            if self.hello:
                await context.write(RaftFrame(hello=Core(2).hello()).SerializeToString())
            await context.write(b"\xff\xff nonsense")
            await asyncio.sleep(60)

        return grpc.stream_stream_rpc_method_handler(stream)


@pytest.mark.parametrize("hello", [False, True])
def test_a_peer_that_talks_nonsense_is_dialled_again(hello: bool) -> None:
    async def whole() -> None:
        (port,) = free_ports(1)
        garbage = aio.server()
        garbage.add_generic_rpc_handlers((Nonsense(hello=hello),))
        garbage.add_insecure_port(f"127.0.0.1:{port}")
        await garbage.start()
        core, there = Core(1), Core(2)
        links = RaftLinks(core, {2: Endpoint("127.0.0.1", port)}, kick, random.Random(1))
        links.start()
        await eventually(lambda: "is it a raftlog controller?" in links.troubles().get(2, ""), "it is noticed")
        assert core.events[:2] == (["up 2", "down 2"] if hello else [])
        await garbage.stop(None)
        server = await serve(RaftExchange(there, kick), port)
        await eventually(lambda: there.greeted == [1], "a link to the real one")
        await eventually(lambda: core.events[-1:] == ["up 2"], "the same, here")
        links.send(2, probe(1))
        await eventually(lambda: there.received == [1], "the message")
        await links.close()
        await server.stop(None)

    run(whole)


def test_a_link_whose_core_raises_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Core(2)
    raised: list[int] = []

    def hello_from(self: Core, peer_id: int, hello: RaftHello) -> None:
        if self.node_id == 1 and not raised:
            raised.append(peer_id)
            raise ValueError("a bug")

    monkeypatch.setattr(Core, "hello_from", hello_from)

    async def whole() -> None:
        (port,) = free_ports(1)
        server = await serve(RaftExchange(there, kick), port)
        core = Core(1)
        links = RaftLinks(core, {2: Endpoint("127.0.0.1", port)}, kick, random.Random(1))
        links.start()
        await eventually(lambda: core.events[-1:] == ["up 2"], "a link")
        assert raised == [2]
        await links.close()
        await server.stop(None)

    run(whole)


def test_a_call_that_somebody_cancels_is_dialled_again() -> None:
    async def scenario(core: Core, links: RaftLinks, port: int) -> None:
        links._links[2]._call.cancel()
        await eventually(lambda: core.events == ["up 2", "down 2", "up 2"], "another link")

    with_link(RaftExchange(Core(2), kick), scenario)


@pytest.mark.parametrize(
    "messages",
    [
        [RaftMessage()],
        [probe(1), RaftMessage(sender_term=2**64 - 1, term_notice=TermNotice())],
        [RaftMessage()] * 2_000_000,
        [probe(1)] * (links_module.MAX_FRAME_MESSAGES + 1),
    ],
    ids=["empty", "term", "very many", "many"],
)
def test_a_stream_with_what_no_voter_sends_is_ended_and_nothing_of_it_believed(messages: list[RaftMessage]) -> None:
    async def whole() -> None:
        (port,) = free_ports(1)
        there = Core(2)
        server = await serve(RaftExchange(there, kick), port)
        channel, call, _ = await open_stream(port, Core(1).hello())
        await call.write(RaftFrame(messages=messages))
        while (frame := await call.read()) is not aio.EOF:
            assert not frame.messages
        assert there.received == []
        await eventually(lambda: there.events == ["lost 1"], "the end of the stream")
        await channel.close()
        await server.stop(None)

    run(whole)


def test_more_messages_than_a_frame_takes_go_in_several() -> None:
    there = Core(2)

    async def scenario(core: Core, links: RaftLinks, port: int) -> None:
        count = 2 * links_module.MAX_FRAME_MESSAGES + 5
        for number in range(1, count + 1):
            links.send(2, probe(number))
        await eventually(lambda: len(there.received) == count, "all messages")
        assert core.events == ["up 2"]

    with_link(RaftExchange(there, kick), scenario)
