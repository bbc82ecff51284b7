"""The caller is identified before a request is read; tokens pass only with the process that issued them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from broker.config.config import BrokerConfig
from broker.net.interceptors import RequestBounds, host_of, send_headers
from broker.net.listeners import WINDOW_BYTES, server_options
from broker.observability.counters import Counters
from broker.security import identify
from broker.security.caller import Caller, caller
from broker.security.identify import (
    AUTHENTICATE,
    FAILED_LOGIN,
    LIFETIME_MS,
    MAX_TOKEN_CHARS,
    NO_LOGIN,
    OUT_OF_TURN,
    Identify,
    Login,
    Refusal,
    Tokens,
    principal_of,
)
from raftlog.errors import BrokerOverloaded
from raftlog.format.wire import MANY_REQUESTS
from raftlog.v1.common_pb2 import BROKER_OVERLOADED, NONE, SASL_AUTHENTICATION_FAILED, Error, ErrorCode
from raftlog.v1.security_pb2 import AuthenticateResponse
from tests.support.frames import ACK, DATA, END_STREAM, PREFACE, SETTINGS, Frames, frame, headers
from tests.support.held_timeouts import hold_timeouts
from tests.support.sasl_client import bearer
from tests.support.scram_parts import Book, Hands, credential

Metadata = list[tuple[str, str]]
PATIENCE_S = 60.0
MALFORMED = b"\xff\xff\xff"


class World:
    """A server with a method of each kind that returns the caller, behind the interceptor."""

    def __init__(
        self,
        *,
        required: bool = True,
        slots: int | None = None,
        max_strangers: int = identify.MAX_STRANGERS,
        host: str | None = None,
        bounded: bool = False,
    ) -> None:
        self._slots = slots
        self._bounded = [RequestBounds()] if bounded else []
        self.book, self.clock, self.tokens, self.counters = Book(), Hands(), Tokens(), Counters()
        self.identify = Identify(
            self.tokens,
            self.book.users,
            self.clock,
            self.counters,
            required=required,
            certificates=False,
            max_strangers=max_strangers,
            host=host,
        )
        self.parsed: list[bytes] = []
        self.ended: list[str] = []
        self.standing = 0
        self.both_ended = asyncio.Event()
        self.stubborn = False
        self.failure: ErrorCode.ValueType = NONE
        """With what logins are answered."""
        self.answered: list[ErrorCode.ValueType] = []
        """The answers to logins that gRPC has begun to send."""
        self.port = 0
        self.channel: aio.Channel = None  # type: ignore[assignment] # `run` sets it

    def token(self, user: str) -> Metadata:
        """Return a token of a user whose password is set."""
        (credential,) = self.book.image.credentials_of(user)
        return bearer(self.tokens.issue(credential, self.clock.ms))

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Run a scenario while the server serves."""
        asyncio.run(self._run(scenario))

    async def _run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        options = server_options(BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data"}), most_connections=100)
        server = aio.server(
            interceptors=[self.identify, *self._bounded], options=options, maximum_concurrent_rpcs=self._slots
        )
        handlers: dict[str, Any] = {
            "Unary": grpc.unary_unary_rpc_method_handler(self._unary, self._parse),
            "Write": grpc.unary_stream_rpc_method_handler(self._write, self._parse),
            "Revoked": grpc.unary_stream_rpc_method_handler(self._revoked, self._parse),
            "Yield": grpc.unary_stream_rpc_method_handler(self._yield, self._parse),
            "Both": grpc.stream_stream_rpc_method_handler(self._both, self._parse),
            "Unread": grpc.stream_stream_rpc_method_handler(self._unread, self._parse),
            "Collect": grpc.stream_unary_rpc_method_handler(self._collect, self._parse),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
        authenticate: dict[str, Any] = {
            "Authenticate": grpc.unary_unary_rpc_method_handler(self._authenticate, self._parse, self._serialize)
        }
        service = AUTHENTICATE.split("/")[1]
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, authenticate),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            self.port = port
            async with aio.insecure_channel(f"127.0.0.1:{port}") as self.channel:
                await asyncio.wait_for(scenario(), PATIENCE_S)
        finally:
            await server.stop(0)

    def _parse(self, data: bytes) -> bytes:
        self.parsed.append(data)
        if data == MALFORMED:
            raise DecodeError("malformed")
        return data

    async def _unary(self, request: bytes, context: Any) -> bytes:
        return repr(caller.get()).encode()

    async def _authenticate(self, request: bytes, context: Any) -> AuthenticateResponse:
        return AuthenticateResponse(message=repr(caller.get()).encode(), error=Error(code=self.failure))

    def _serialize(self, answer: AuthenticateResponse) -> bytes:
        self.answered.append(answer.error.code)
        return answer.message

    async def _write(self, request: bytes, context: Any) -> None:
        await context.write(caller.get().principal.encode())
        await self._stand()

    async def _revoked(self, request: bytes, context: Any) -> None:
        """Write; the password changes as soon as the write has begun."""
        self.book.set("alice", "changed")
        asyncio.get_running_loop().call_soon(self.identify.check)
        await context.write(request)

    async def _yield(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield caller.get().principal.encode()
        await self._stand()

    async def _both(self, requests: Any, context: Any) -> None:
        async for request in requests:
            await context.write(caller.get().principal.encode() + request)

    async def _unread(self, requests: Any, context: Any) -> None:
        await self._stand()

    async def _collect(self, requests: Any, context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def _stand(self) -> None:
        self.standing += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            if len(self.ended) == 2:
                self.both_ended.set()
            if not self.stubborn:
                raise

    # Calls

    async def unary(self, token: Metadata | None, method: str = "/t.T/Unary") -> str:
        stub: Any = self.channel.unary_unary(method)
        answer: bytes = await stub(b"body", metadata=token)
        return answer.decode()

    async def served(self, token: Metadata | None, method: str = "/t.T/Unary") -> str:
        """Return the answer once there is room: a call has its slot a little longer than its client waits for it."""
        while True:
            try:
                return await self.unary(token, method)
            except aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            await asyncio.sleep(0.01)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return once that holds, which gRPC brings about in its own time."""
        while not holds():  # noqa: ASYNC110 # nothing of ours hears of it
            await asyncio.sleep(0.01)

    async def headers(self) -> Any:
        """Begin a call of `Authenticate`, and send no request; its code says if it was refused meanwhile."""
        call: Any = self.channel.stream_unary(AUTHENTICATE)()
        with contextlib.suppress(aio.AioRpcError):
            await call.wait_for_connection()
        return call

    async def refusal(self, token: Metadata | None) -> str:
        return await refusal_of(self.unary(token))


async def refusal_of(call: Awaitable[Any]) -> str:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    return caught.value.details() or ""


def test_a_call_has_the_user_of_its_token_and_the_address() -> None:
    world = World()
    world.book.set("alice", "secret")

    async def scenario() -> None:
        expected = repr(Caller("User:alice", "127.0.0.1"))
        assert await world.unary(world.token("alice")) == expected
        assert await world.unary(world.token("alice")) == expected, "the second call must be identified from memory"

    world.run(scenario)
    assert world.counters.unauthenticated_calls == 0


def test_who_has_no_token_is_refused_before_anything_is_read() -> None:
    world = World()
    world.book.set("alice", "secret")
    told: list[tuple[str, Refusal]] = []
    world.identify.refused = lambda peer, host, cost: told.append((host, cost))

    async def scenario() -> None:
        assert (await world.refusal(None)).startswith("AuthenticationFailed: ")
        assert (await world.refusal([("authorization", "Basic YTpi")])).startswith("AuthenticationFailed: ")
        assert (await world.refusal(bearer("nonsense"))).startswith("TokenExpired: ")
        for kind in ("unary_stream", "stream_stream", "stream_unary"):
            method = {"unary_stream": "Yield", "stream_stream": "Both", "stream_unary": "Collect"}[kind]
            call: Any = getattr(world.channel, kind)(f"/t.T/{method}")
            assert await (call(b"body") if kind == "unary_stream" else call()).code() is grpc.StatusCode.UNAUTHENTICATED

    world.run(scenario)
    assert world.parsed == []
    assert world.counters.unauthenticated_calls == 6
    assert told == [("127.0.0.1", NO_LOGIN)] * 6


def test_a_call_of_a_user_that_is_shut_out_is_refused_before_anything_is_read_or_sent() -> None:
    world = World()
    for user in ("alice", "mallory"):
        world.book.set(user, "secret")

    async def turn_out(context: Any, principal: str, host: str) -> None:
        if (principal, host) == ("User:mallory", "127.0.0.1"):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "shut out")

    world.identify.turn_out = turn_out

    async def scenario() -> None:
        assert "User:alice" in await world.unary(world.token("alice"))
        method: Any = world.channel.stream_stream("/t.T/Both")
        call = method(metadata=world.token("mallory"))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert list(await call.initial_metadata()) == [], "the refusal must come in headers with the status only"
        with pytest.raises(aio.AioRpcError) as caught:
            await world.unary(world.token("mallory"))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    world.run(scenario)
    assert world.identify.count_streams() == 0


def test_who_wants_to_authenticate_needs_no_token() -> None:
    world = World()

    async def scenario() -> None:
        assert "User:ANONYMOUS" in await world.unary(None, AUTHENTICATE)
        assert "User:ANONYMOUS" in await world.unary(bearer("an old one"), AUTHENTICATE)

    world.run(scenario)


@pytest.mark.parametrize(
    ("failure", "cost"),
    [(SASL_AUTHENTICATION_FAILED, FAILED_LOGIN), (BROKER_OVERLOADED, NO_LOGIN)],
    ids=["wrong password", "user who is shut out"],
)
def test_a_login_that_fails_is_told_of_once_the_client_has_its_answer(
    failure: ErrorCode.ValueType, cost: Refusal
) -> None:
    world = World()
    told: list[tuple[str, str, Refusal]] = []

    def refused(peer: str, host: str, cost: Refusal) -> None:
        assert world.answered == [NONE, failure], "a connection that is closed earlier takes the answer with it"
        told.append((peer, host, cost))

    world.identify.refused = refused

    async def scenario() -> None:
        await world.unary(None, AUTHENTICATE)
        world.failure = failure
        await world.unary(None, AUTHENTICATE)
        await world.until(lambda: bool(told))

    world.run(scenario)
    ((peer, host, counted),) = told
    assert (host, counted) == ("127.0.0.1", cost)
    assert peer.startswith("ipv4:127.0.0.1:")


def test_calls_that_strangers_begin_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC waits for a request within the call's slot, for ever; so it is not left to gRPC."""
    monkeypatch.setattr(identify, "MAX_STRANGERS_OF_NETWORK", 4)
    requests = hold_timeouts(monkeypatch, identify)
    world = World(slots=8)
    world.book.set("alice", "secret")

    async def scenario() -> None:
        begun = [await world.headers() for _ in range(8)]
        await world.until(lambda: world.counters.unauthenticated_calls == 4 == len(requests.under_way))
        assert "User:alice" in await world.served(world.token("alice"))
        requests.expire()
        codes = Counter([await call.code() for call in begun])
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED: 7, grpc.StatusCode.DEADLINE_EXCEEDED: 1}
        await world.until(lambda: world.identify._strangers._total == 0)
        assert "User:ANONYMOUS" in await world.served(None, AUTHENTICATE)

    world.run(scenario)
    assert world.counters.unauthenticated_calls == 8
    assert world.parsed == [b"body"] * 2


def test_few_requests_of_strangers_get_room_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC lets a client send all of a message that is to be read; 48 of 30 MiB cost a broker 1.6 GiB."""
    requests = hold_timeouts(monkeypatch, identify)
    world = World()

    async def scenario() -> None:
        connections = [Frames(*await asyncio.open_connection("127.0.0.1", world.port)) for _ in range(4)]
        for number, each in enumerate(connections * 12):
            each.announce(AUTHENTICATE, 1 + 2 * (number // 4), size_bytes=30 << 20)
        unread = identify.MAX_UNREAD_OF_NETWORK
        await world.until(lambda: world.counters.unauthenticated_calls == 48 - unread - identify.MAX_READ_OF_NETWORK)
        assert len(requests.under_way) == unread + identify.MAX_READ_OF_NETWORK
        for _ in range(3):
            for each in connections:
                await each.settle()
        granted = [size for each in connections for stream, size in each.granted.items() if stream]
        assert sum(size > WINDOW_BYTES for size in granted) == identify.MAX_READ_OF_NETWORK
        assert {each.initial_window for each in connections} == {WINDOW_BYTES}
        for each in connections:
            each.close()

    world.run(scenario)


def test_windows_of_calls_that_are_not_read_do_not_grow() -> None:
    """With gRPC's probing, each grows to 8 MiB."""
    world = World(required=False)

    async def scenario() -> None:
        client = Frames(*await asyncio.open_connection("127.0.0.1", world.port))
        client.announce("/t.T/Unread", 1, size_bytes=30 << 20)
        await world.until(lambda: world.standing == 1)
        for _ in range(WINDOW_BYTES // (64 << 10) - 1):
            client.send(1, bytes(16 << 10))
            await client.settle()
        assert client.pings == 0, f"the server sent {client.pings} pings to measure the connection, but must send none"
        assert client.granted[1] <= 0
        client.close()

    world.run(scenario)


def test_strangers_are_read_in_turn_and_those_of_other_networks_meanwhile() -> None:
    async def scenario() -> None:
        turns, over = identify.Turns(), asyncio.Event()
        read: list[str] = []

        async def call(host: str) -> None:
            async with turns.turn(host):
                read.append(host)
                await over.wait()

        hosts = [f"10.0.0.{number}" for number in (1, 1, 2, 2, 3, 4)]
        calls = [asyncio.create_task(call(host)) for host in hosts]
        await asyncio.sleep(0)
        assert read == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
        calls[1].cancel()
        calls[0].cancel()
        await asyncio.wait(calls[:2])
        await asyncio.sleep(0)
        assert read[3:] == ["10.0.0.4"], "the next call must be of a network that has room"
        over.set()
        await asyncio.wait(calls)
        assert read[4:] == ["10.0.0.2"]
        assert not turns._waiting
        assert not turns._reading

    asyncio.run(scenario())


class Silent:
    """Calls that hold their turns until they are ended; `read`: the hosts whose turn has come."""

    def __init__(self) -> None:
        self.turns = identify.Turns()
        self.read: list[str] = []
        self.may_take: list[float] = []
        self.refused: list[str] = []
        self._ends: list[asyncio.Event] = []
        self._calls: list[asyncio.Task[None]] = []

    async def begin(self, *hosts: str) -> None:
        self._calls += [asyncio.create_task(self._call(host)) for host in hosts]
        await self._settle()

    async def end(self) -> None:
        """End the call that has held its turn for longest."""
        self._ends.pop(0).set()
        await self._settle()

    async def end_all(self) -> None:
        while self._ends:
            await self.end()
        await asyncio.wait_for(asyncio.gather(*self._calls), PATIENCE_S)
        assert not self.turns._waiting
        assert not self.turns._reading

    async def _call(self, host: str) -> None:
        try:
            async with self.turns.turn(host) as seconds:
                self.read.append(host)
                self.may_take.append(seconds)
                self._ends.append(asyncio.Event())
                await self._ends[-1].wait()
        except BrokerOverloaded:
            self.refused.append(host)

    async def _settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


ATTACKERS = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
HONEST = "10.1.0.1"


def test_a_new_network_is_read_next_although_others_have_many_calls_waiting() -> None:
    async def scenario() -> None:
        calls = Silent()
        await calls.begin(*ATTACKERS * 9, HONEST)
        assert calls.read == [*ATTACKERS]
        await calls.end()
        assert calls.read[3:] == [HONEST]
        await calls.begin(HONEST)
        for _ in range(4):
            await calls.end()
        assert calls.read[4:] == [*ATTACKERS, HONEST], "the network that was served longest ago must come first"
        await calls.end_all()

    asyncio.run(scenario())


def test_a_full_queue_turns_away_the_newest_of_the_network_with_most() -> None:
    async def scenario() -> None:
        calls = Silent()
        await calls.begin(*ATTACKERS * 9, *["10.0.0.4"] * 8)
        assert len(calls.turns._waiting) == identify.MAX_UNREAD
        await calls.begin(HONEST)
        assert calls.refused == ["10.0.0.4"]
        await calls.begin("10.0.0.4")
        assert calls.refused == ["10.0.0.4"] * 2, (
            "the network has as many waiting calls as others, so its next one must be refused"
        )
        await calls.begin(HONEST)
        assert calls.refused[2:] == ["10.0.0.3"]
        await calls.end()
        assert calls.read[3:] == ["10.0.0.4"], "of the networks that were never served, the first must come first"
        await calls.end()
        assert calls.read[4:] == [HONEST]
        await calls.end_all()
        assert calls.read.count(HONEST) == 2
        assert len(calls.read) + len(calls.refused) == 38

    asyncio.run(scenario())


def test_a_network_that_sends_far_too_long_logins_is_read_ever_more_rarely() -> None:
    long = identify.LongLogins()
    now_ms = 1e6
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        long.count("10.0.0.1", now_ms)
        assert long.is_paused("10.0.0.1", now_ms + 1_000 * pause_s - 1)
        assert not long.is_paused("10.0.0.2", now_ms)
        now_ms += 1_000 * pause_s
        assert not long.is_paused("10.0.0.1", now_ms)
    now_ms += identify.FORGIVEN_MS
    long.count("10.0.0.1", now_ms)
    assert not long.is_paused("10.0.0.1", now_ms + 1_000)
    long.count("fd00::1", now_ms)
    assert long.is_paused("fd00::2", now_ms), "an address of the same IPv6 network must be paused"


def test_networks_with_long_logins_are_bounded_and_none_that_is_paused_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(identify, "MAX_KNOWN", 2)
    long = identify.LongLogins()
    for number in range(4):
        long.count(f"10.0.0.{number}", 0.0)
    assert [long.is_paused(f"10.0.0.{number}", 500.0) for number in range(4)] == [True, True, False, False]
    long.count("10.0.0.9", 2_000.0)
    assert long.is_paused("10.0.0.9", 2_500.0), "the new address must take the place of one whose pause is over"


def test_after_a_login_that_is_far_too_long_no_login_of_the_network_is_read_for_a_while() -> None:
    """Else each of them holds up the event loop, which makes bytes of the message."""
    world = World(bounded=True)

    async def scenario() -> None:
        login: Any = world.channel.unary_unary(AUTHENTICATE)

        async def code(size: int) -> grpc.StatusCode:
            try:
                await login(bytes(size))
            except aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        assert await code(65_536) is grpc.StatusCode.OK
        assert await code(65_537) is grpc.StatusCode.INVALID_ARGUMENT
        assert await code(10) is grpc.StatusCode.RESOURCE_EXHAUSTED
        parsed = len(world.parsed)
        world.clock.ms += 1_000
        assert await code(10) is grpc.StatusCode.OK
        assert len(world.parsed) == parsed + 1

    world.run(scenario)


def test_after_a_short_malformed_login_others_of_the_network_are_read() -> None:
    world = World(bounded=True)

    async def scenario() -> None:
        login: Any = world.channel.unary_unary(AUTHENTICATE)
        for _ in range(2):
            call = login(MALFORMED)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "malformed request" in await call.details()
        assert "User:ANONYMOUS" in (await login(b"well-formed")).decode()

    world.run(scenario)


def test_a_turn_is_shorter_while_others_wait() -> None:
    async def scenario() -> None:
        calls = Silent()
        await calls.begin(*ATTACKERS, ATTACKERS[0], ATTACKERS[0])
        await calls.end_all()
        assert calls.may_take[:3] == [identify.REQUEST_S] * 3
        assert calls.may_take[3:] == [identify.CROWDED_REQUEST_S, identify.REQUEST_S]

    asyncio.run(scenario())


def test_served_networks_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identify, "MAX_KNOWN", 2)

    async def scenario() -> None:
        calls = Silent()
        await calls.begin(*ATTACKERS)
        assert [*calls.turns._served] == [*ATTACKERS[1:]]
        await calls.end_all()

    asyncio.run(scenario())


def test_where_addresses_are_hidden_each_connection_has_bounds_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """While `listener.security.migration` is on, all clients have one host."""
    hold_timeouts(monkeypatch, identify)
    monkeypatch.setattr(identify, "MAX_STRANGERS_OF_NETWORK", 10)
    world = World(host="unknown")

    async def scenario() -> None:
        attacker = Frames(*await asyncio.open_connection("127.0.0.1", world.port))
        for number in range(12):
            attacker.announce(AUTHENTICATE, 1 + 2 * number, size_bytes=30 << 20)
        turns = world.identify._turns
        await world.until(lambda: world.counters.unauthenticated_calls == 3)
        assert (turns._reading.total(), len(turns._waiting)) == (1, identify.MAX_UNREAD_OF_NETWORK)
        assert await world.unary(None, AUTHENTICATE) == repr(Caller("User:ANONYMOUS", "unknown"))
        attacker.close()

    world.run(scenario)


def test_more_strangers_than_may_wait_are_turned_away_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(identify, "MAX_UNREAD", 3)
    world = World()
    told: list[tuple[str, Refusal]] = []
    world.identify.refused = lambda peer, host, cost: told.append((host, cost))

    async def scenario() -> None:
        begun = [await world.headers() for _ in range(4)]
        await world.until(lambda: len(world.identify._turns._waiting) == 3)
        for _ in range(4):
            assert await (await world.headers()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await world.until(lambda: told == [("127.0.0.1", OUT_OF_TURN)] * 4)
        for each in begun:
            each.cancel()
        assert "User:ANONYMOUS" in await world.served(None, AUTHENTICATE)

    world.run(scenario)
    lines = [line for line in caplog.records if getattr(line, "event", "") == "logins_refused"]
    assert [line.host for line in lines] == ["127.0.0.1"]  # type: ignore[attr-defined] # given as `extra`


def test_strangers_of_all_networks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(identify, "network_of", lambda host: str(next(numbers)))
    world = World(slots=8, max_strangers=4)

    async def scenario() -> None:
        begun = [await world.headers() for _ in range(4)]
        assert await (await world.headers()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        begun[0].cancel()
        begun[1].cancel()
        await begun[2].write(b"late")
        await begun[2].done_writing()
        assert b"User:ANONYMOUS" in await begun[2]
        assert "User:ANONYMOUS" in await world.served(None, AUTHENTICATE)
        await begun[3].done_writing()
        assert await begun[3].code() is grpc.StatusCode.INVALID_ARGUMENT

        await world.until(lambda: world.identify._strangers._total == 0)
        assert not world.identify._strangers._of_network

    world.run(scenario)


def test_who_does_not_take_the_answer_leaves_room_for_others() -> None:
    """A client whose window has no room for it, so that gRPC keeps its call: there are only so many such calls."""
    world = World(slots=4, max_strangers=2)
    world.book.set("alice", "secret")

    async def crowded() -> str:
        """Return why there is no room for one more; for want of a slot it may be, as in `served`."""
        with pytest.raises(aio.AioRpcError) as caught:
            await world.unary(None, AUTHENTICATE)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return caught.value.details() or ""

    async def scenario() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(calls_without_a_window(AUTHENTICATE, b"body", streams=(1, 3, 5, 7)))
        await world.until(lambda: world.counters.unauthenticated_calls == 2)
        assert "User:alice" in await world.served(world.token("alice"))
        while "too many clients are authenticating" not in await crowded():  # noqa: ASYNC110 # as in `until`
            await asyncio.sleep(0.01)
        writer.close()
        assert "User:ANONYMOUS" in await world.served(None, AUTHENTICATE)

    world.run(scenario)


def calls_without_a_window(method: str, request: bytes, streams: tuple[int, ...]) -> bytes:
    """Return the bytes of a client that calls, and allows the server to send no data (RFC 9113, section 6.9.2)."""
    said = PREFACE + frame(SETTINGS, 0, 0, b"\0\4" + bytes(4)) + frame(SETTINGS, ACK, 0, b"")
    for stream in streams:
        said += headers(method, stream) + frame(DATA, END_STREAM, stream, b"\0" + len(request).to_bytes(4) + request)
    return said


def test_where_it_is_not_required_callers_are_anonymous_but_no_liars() -> None:
    world = World(required=False)
    world.book.set("alice", "secret")

    async def scenario() -> None:
        assert await world.unary(None) == repr(Caller("User:ANONYMOUS", "127.0.0.1"))
        assert "User:alice" in await world.unary(world.token("alice"))
        assert (await world.refusal(bearer("nonsense"))).startswith("TokenExpired: ")

    world.run(scenario)


def test_tokens_end_with_their_time_and_with_the_password() -> None:
    world = World()
    world.book.set("alice", "secret")

    async def scenario() -> None:
        old = world.token("alice")
        world.clock.ms += LIFETIME_MS - 1
        await world.unary(old)
        world.clock.ms += 1
        assert "the token has expired" in await world.refusal(old)
        token = world.token("alice")
        await world.unary(token)
        world.book.set("alice", "changed")
        assert "the user's password has changed" in await world.refusal(token), (
            "a changed password must end tokens at once"
        )
        await world.unary(world.token("alice"))
        token = world.token("alice")
        world.book.delete("alice")
        assert (await world.refusal(token)).startswith("TokenExpired: ")

    world.run(scenario)


def test_a_request_that_comes_later_than_its_call_is_not_served_after_the_password_has_changed() -> None:
    world = World()
    world.book.set("alice", "secret")

    async def scenario() -> None:
        begun: Any = world.channel.stream_stream("/t.T/Unary")(metadata=world.token("alice"))
        await begun.wait_for_connection()
        await world.unary(world.token("alice"))  # the server has seen the call before this one
        world.book.set("alice", "changed")
        await begun.write(b"late")
        assert await begun.code() is grpc.StatusCode.UNAUTHENTICATED

    world.run(scenario)


@pytest.mark.parametrize("method", ["Write", "Yield"])
@pytest.mark.parametrize("stubborn", [False, True])
def test_streams_end_when_the_password_changes(method: str, stubborn: bool) -> None:
    world = World()
    world.stubborn = stubborn
    world.book.set("alice", "secret")
    world.book.set("bob", "secret")

    async def scenario() -> None:
        stream: Any = world.channel.unary_stream(f"/t.T/{method}")
        calls = [stream(b"", metadata=world.token(user)) for user in ("alice", "bob")]
        assert [await call.read() for call in calls] == [b"User:alice", b"User:bob"]
        assert world.identify.count_streams() == 2
        await world.until(lambda: world.standing == 2)  # a client may have its response before the write is over here
        assert world.identify.check() == 0
        world.book.set("alice", "changed")
        assert world.identify.check() == 1
        assert await calls[0].code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await calls[0].details()).startswith("TokenExpired: ")
        assert not calls[1].done()
        assert world.ended == ["cancelled"]
        assert world.identify.count_streams() == 1
        world.clock.ms += LIFETIME_MS
        assert world.identify.check() == 0, "the stream must end when its token expires"
        calls[1].cancel()
        await world.both_ended.wait()
        assert world.ended == ["cancelled", "cancelled"]

    world.run(scenario)


@pytest.mark.parametrize("size", [1, 3_000_000], ids=["sent at once", "more than the client's window"])
def test_a_stream_ends_when_the_password_changes_while_its_first_response_is_sent(size: int) -> None:
    world = World()
    world.book.set("alice", "secret")

    async def scenario() -> None:
        stream: Any = world.channel.unary_stream("/t.T/Revoked")
        call = stream(b"x" * size, metadata=world.token("alice"))
        with pytest.raises(aio.AioRpcError) as caught:
            while await call.read() is not aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (caught.value.details() or "").startswith("TokenExpired: ")

    world.run(scenario)


@pytest.mark.parametrize(
    ("asked", "answered"), [((MANY_REQUESTS,), (MANY_REQUESTS,)), ((), ()), ((("other", "x"),), ())], ids=repr
)
def test_headers_of_a_stream_go_once_with_what_the_client_asked_for(
    asked: Sequence[tuple[str, str]], answered: Sequence[tuple[str, str]]
) -> None:
    """Identification sends them for a user that has logged in, and the handler of produce streams would, too."""
    sent: list[object] = []

    class Context:
        def invocation_metadata(self) -> Sequence[tuple[str, str]]:
            return asked

        async def send_initial_metadata(self, metadata: object) -> None:
            assert not sent, "the initial metadata is sent a second time"
            sent.append(metadata)

    async def serve(context: Context) -> None:
        await send_headers(context)  # identification
        await asyncio.ensure_future(send_headers(context))  # the handler, in a task of its own

    async def scenario() -> None:
        await asyncio.create_task(serve(Context()))
        assert sent.pop() == answered
        await asyncio.create_task(serve(Context()))  # another call
        assert sent == [answered]

    asyncio.run(scenario())


def test_streams_of_all_kinds_are_served_as_before() -> None:
    world = World()
    world.book.set("alice", "secret")

    async def scenario() -> None:
        token = world.token("alice")
        both: Any = world.channel.stream_stream("/t.T/Both")(metadata=token)
        await both.write(b"-1")
        assert await both.read() == b"User:alice-1"
        await both.done_writing()
        assert await both.read() is aio.EOF
        assert await both.code() is grpc.StatusCode.OK
        collect: Any = world.channel.stream_unary("/t.T/Collect")
        assert await collect(iter([b"a", b"b"]), metadata=token) == b"ab"
        assert world.identify.count_streams() == 0

    world.run(scenario)


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.1.2.3:4321", "10.1.2.3"),
        ("ipv6:%5B::1%5D:4321", "::1"),
        ("ipv6:[::ffff:10.1.2.3]:4321", "10.1.2.3"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4321", "fe80::1"),
        ("unix:", ""),
    ],
)
def test_addresses_are_those_that_acls_name(peer: str, host: str) -> None:
    assert host_of(peer) == host


@pytest.mark.parametrize(
    ("context", "principal"),
    [
        ({}, "User:ANONYMOUS"),
        ({"transport_security_type": [b"ssl"]}, "User:ANONYMOUS"),
        ({"transport_security_type": [b"ssl"], "x509_common_name": [b"orders"]}, "User:orders"),
        ({"transport_security_type": [b"ssl"], "x509_common_name": [b"a", b"b"]}, "User:ANONYMOUS"),
        ({"transport_security_type": [b"ssl"], "x509_common_name": [b"a\nb"]}, "User:ANONYMOUS"),
        ({"transport_security_type": [b"ssl"], "x509_common_name": [b"raftlog-node-7"]}, "Node:7"),
        (
            {
                "transport_security_type": [b"ssl"],
                "x509_common_name": [b"pods"],
                "peer_uri": [b"raftlog://node/2", b"raftlog://node/1"],
            },
            "Node:1,2",
        ),
        ({"transport_security_type": [b"ssl"], "x509_common_name": [b"*"]}, "User:ANONYMOUS"),
        ({"transport_security_type": [b"ssl"], "x509_common_name": [b"ANONYMOUS"]}, "User:ANONYMOUS"),
    ],
)
def test_certificates_name_users_and_nodes(context: dict[str, list[bytes]], principal: str) -> None:
    assert principal_of(context) == principal


ALICE = credential("alice", "secret", version=7)
TOKENS = Tokens(b"k" * 32)
ISSUED = TOKENS.issue(ALICE, 1_000.7)


def test_a_token_says_who_with_which_credential_and_until_when() -> None:
    assert TOKENS.read(ISSUED) == Login("alice", ALICE.mechanism, 7, 1_000 + LIFETIME_MS)


def test_another_process_does_not_know_it() -> None:
    assert Tokens().read(ISSUED) is None
    assert Tokens().read(Tokens().issue(ALICE, 0)) is None
    assert Tokens(b"k" * 32).read(ISSUED) is not None


@given(st.integers(min_value=0, max_value=len(ISSUED) - 1), st.characters())
def test_no_character_can_be_changed(at: int, character: str) -> None:
    forged = ISSUED[:at] + character + ISSUED[at + 1 :]
    assert (TOKENS.read(forged) is None) == (forged != ISSUED)


@given(st.text())
def test_no_text_passes_for_a_token(text: str) -> None:
    assert TOKENS.read(text) is None
    assert TOKENS.read(f"{text}.{ISSUED.rpartition('.')[2]}") is None


def test_users_with_the_longest_names_get_tokens_that_are_read() -> None:
    longest = credential("\U0001f600" * 255, "secret")
    token = TOKENS.issue(longest, 2**52)
    assert len(token) <= MAX_TOKEN_CHARS
    found = TOKENS.read(token)
    assert found is not None
    assert found.user == longest.user
    assert TOKENS.read("A" * MAX_TOKEN_CHARS + ISSUED) is None
