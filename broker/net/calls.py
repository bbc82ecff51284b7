"""Limits on the calls of gRPC's listener for clients: how many streams at a time, and how fast calls may come.

`CallLimits`, an interceptor, counts the calls of each user and address, and refuses one too many with
RESOURCE_EXHAUSTED before its first message is read. A call costs the event loop as much if it is refused. So `ShutOuts`
finds the users that flood a broker: with streams that end soon, with streams that they give up without using them, or
with calls that are refused again and again. For some time such a user can neither log in nor call, and the connections
on which it goes on are closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NoReturn

import grpc

from broker.clock import Clock
from broker.net.answers import MAX_UNTAKEN_ANSWERS, Answer, Answers
from broker.net.connections import MAX_RATES, remembered
from broker.net.interceptors import Rarely, RewrittenHandlers, calls_of, calls_of_request, host_of, preceded
from broker.security.caller import Caller, caller, network_of
from broker.security.client_listener import UNKNOWN_HOST
from broker.security.identify import AUTHENTICATE, Refusal
from raftlog._client.connections import refuse
from raftlog._core.security.acls import ANONYMOUS, NODE_PREFIX
from raftlog.errors import BrokerOverloaded, RaftlogError, ThrottlingQuotaExceeded
from replication.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

MAX_STREAMS_PER_USER: Final = "max.streams.per.user"
MAX_STREAMS_PER_IP: Final = "max.streams.per.ip"
MAX_SHORT_STREAM_RATE: Final = "max.short.stream.rate"
MAX_UNUSED_STREAM_RATE: Final = "max.unused.stream.rate"
MAX_CALL_RATE: Final = "max.call.rate"
MAX_REFUSED_CALL_RATE: Final = "max.refused.call.rate"
SHORT_MS: Final = 10_000.0
"""A stream that ends sooner is short."""
BURST_MS: Final = 5_000.0
"""A user may have at once as many calls as its rate allows in this time."""
MOST_DELAY_MS: Final = 5_000.0
"""No caller is told to wait for longer, and no connection is left unread for longer, on account of `max.call.rate`."""
REFUSED_OF_PEER: Final = 10.0
"""Refused calls a second of one connection that do not count against its user; ten times as many at once. A client that
waits before it tries again stays below, and so do any number of such clients."""
STRANGE_OF_PEER: Final = 2.0
"""Refused calls a second of one connection whose client has no login, that do not count against its network; ten times
as many at once. After a restart of a broker its clients come with old tokens, and are refused once for each call."""
_CARRY_RECORDS: Final = frozenset({"/raftlog.v1.Log/Produce", "/raftlog.v1.Log/Fetch"})
UNUSED_OF_PEER: Final = 1.0
"""Unused streams a second that one connection may give up and that do not count against its user; twenty times as many
at once."""
UNUSED_AFTER_S: Final = 0.5
"""A stream was given up if its connection is still there after this time: clients that end give up their streams first,
and close their connections then."""
_REFUSED: Final = grpc.StatusCode.RESOURCE_EXHAUSTED
"""A stream with this status was refused for a limit, or ended for a quota. It is not a short one."""
SHUT_OUT_MS: Final = 60_000.0
"""How long a user that had too many is shut out; twice as long each further time, until it has kept within the rate."""
MAX_SHUT_OUT_MS: Final = 3_600_000.0


_FLOODS: Final = {
    MAX_SHORT_STREAM_RATE: "opened and ended streams",
    MAX_UNUSED_STREAM_RATE: "given up streams without using them",
    MAX_REFUSED_CALL_RATE: "gone on with calls that were refused",
}
"""What a user has done that is shut out, by the limit."""


class ShutOuts:
    """Which users, or addresses, are shut out for calls that came too fast. Pure; the caller passes the time.

        followed ── more calls of a kind than its rate allows ──> shut out until `until_ms`
        shut out ── its time is over ──> followed; too fast again soon ──> shut out for twice as long

    Kinds of calls have rates of their own, and are named by the key that sets the rate. Streams that stay open count
    nowhere, however many they are, and so no rate is in the way of clients that connect all at once.
    """

    @dataclass(slots=True)
    class _Pace:
        buckets: dict[str, TokenBucket] = field(default_factory=dict)
        """By kind."""
        until_ms: float = 0.0
        shut_out_ms: float = 0.0
        limit: str = ""
        """The kind for which it was shut out."""

    def __init__(self, most: int = MAX_RATES) -> None:
        """`most`: names that are followed at a time, and as many that are shut out."""
        self._most = most
        self._paces: dict[str, ShutOuts._Pace] = {}
        self._shut_out: dict[str, ShutOuts._Pace] = {}
        """Those that are, or were a short time ago: what is followed of others never takes their place."""

    def until_ms(self, name: str) -> float:
        """Return until when a name is shut out; 0.0: it never was."""
        pace = self._shut_out.get(name)
        return 0.0 if pace is None else pace.until_ms

    def limit_of(self, name: str) -> str:
        """Return the limit for which a name is shut out."""
        return self._shut_out[name].limit

    def count(self, name: str, kind: str, rate: float, now_ms: float, calls: int = 1) -> None:
        """Count a call of a kind that may come `rate` times a second, and at once as often as in `BURST_MS`.

        `calls`: as how many it counts. Those of a name that is shut out do not count.
        """
        pace = self._shut_out.get(name) or remembered(self._paces, name, self._Pace, self._most)
        if now_ms < pace.until_ms:
            return
        bucket = pace.buckets.get(kind)
        if bucket is None:
            bucket = pace.buckets[kind] = TokenBucket(rate, BURST_MS)
        bucket.take(calls, now_ms)
        if bucket.ready_at_ms(now_ms) > now_ms and (name in self._shut_out or self._has_room(now_ms)):
            again = now_ms - pace.until_ms < pace.shut_out_ms
            pace.shut_out_ms = min(MAX_SHUT_OUT_MS, 2 * pace.shut_out_ms) if again else SHUT_OUT_MS
            pace.until_ms = now_ms + pace.shut_out_ms
            pace.limit = kind
            self._paces.pop(name, None)
            self._shut_out[name] = pace

    def _has_room(self, now_ms: float) -> bool:
        """Whether another name can be shut out; forgets those whose time was over long ago."""
        if len(self._shut_out) >= self._most:
            self._shut_out = {
                name: pace for name, pace in self._shut_out.items() if now_ms - pace.until_ms < pace.shut_out_ms
            }
        return len(self._shut_out) < self._most


class CallRates:
    """The unary calls of each user, or address. Pure; the caller passes the time."""

    @dataclass(slots=True)
    class _Calls:
        bucket: TokenBucket
        next_turn_ms: float = 0.0
        """When the next caller is to come that has to wait."""

    def __init__(self, rate: float, most: int = MAX_RATES) -> None:
        """`rate`: calls a second."""
        self._rate = rate
        self._most = most
        self._calls: dict[str, CallRates._Calls] = {}

    def charge(self, name: str, now_ms: float, calls: int = 1) -> float:
        """Count one call or more that were served, and return for how many ms the next one has to wait.

        A debt stays below what `MOST_DELAY_MS` pay off, however many connections add to it.
        """
        bucket = self._of(name).bucket
        if bucket.ready_at_ms(now_ms) - now_ms < MOST_DELAY_MS:
            bucket.take(calls, now_ms)
        return min(MOST_DELAY_MS, bucket.ready_at_ms(now_ms) - now_ms)

    def delay_ms(self, name: str, now_ms: float, calls: int = 1) -> float:
        """Count one call or more, and return 0; or count nothing, and return for how many ms the caller has to wait.

        Those that have to wait get different turns, or they would all come back at the same time.
        """
        waiting = self._of(name)
        ready_ms = waiting.bucket.ready_at_ms(now_ms)
        if ready_ms <= now_ms:
            waiting.bucket.take(calls, now_ms)
            return 0.0
        turn_ms = max(ready_ms, waiting.next_turn_ms)
        waiting.next_turn_ms = turn_ms + 1_000 / self._rate
        return min(MOST_DELAY_MS, turn_ms - now_ms)

    def _of(self, name: str) -> _Calls:
        return remembered(self._calls, name, lambda: self._Calls(TokenBucket(self._rate, BURST_MS)), self._most)


class FreeCalls:
    """The calls of each connection that do not count against its user or network. Pure; the caller passes the time."""

    def __init__(self, rate: float, burst_ms: float) -> None:
        """`rate`: calls a second, and at once as many as it allows in `burst_ms`."""
        self._make = partial(TokenBucket, rate, burst_ms)
        self._of_peers: dict[str, TokenBucket] = {}

    def take(self, peer: str, now_ms: float, calls: int = 1) -> bool:
        """Return whether a connection has such a call left, and take it; `calls`: as how many it counts."""
        of_peer = remembered(self._of_peers, peer, self._make)
        if of_peer.ready_at_ms(now_ms) > now_ms:
            return False
        of_peer.take(calls, now_ms)
        return True


@dataclass(slots=True)
class _Stream:
    """A stream that is served by this task."""

    is_unused: bool


_stream: ContextVar[_Stream] = ContextVar("stream")


def note_used_stream() -> None:
    """Say, before the stream that this task serves ends, that it was used: a batch came, or a partition was read."""
    stream = _stream.get(None)
    if stream is not None:
        stream.is_unused = False


class CallLimits(RewrittenHandlers):
    """Bounds the calls of each user, or of each address whose clients have no login. Runs after the identification.

    User:ANONYMOUS is no single user, and has no limit of its own; nor have addresses that a front hides, nor nodes.
    Logins have limits of their own (`broker.security.identify`).

    A stream that is refused for a limit is not a short one: a user with more clients than the limit keeps those that it
    has, as long as the others wait before they try again.
    """

    def __init__(
        self,
        per_user: int,
        per_ip: int,
        clock: Clock,
        *,
        short_rate: float,
        unused_rate: float,
        call_rate: float,
        refused_rate: float,
        shut_outs: ShutOuts | None = None,
    ) -> None:
        """`per_user`, `per_ip`: open streams. `short_rate`, `unused_rate`, `call_rate`, `refused_rate`: short streams,
        short ones that were given up without use, unary calls and refused calls a second."""
        super().__init__()
        self._per_user = per_user
        self._per_ip = per_ip
        self._short_rate = short_rate
        self._unused_rate = unused_rate
        self._refused_rate = refused_rate
        self._calls = CallRates(call_rate)
        self._shut_outs = ShutOuts() if shut_outs is None else shut_outs
        self._clock = clock
        self._answers = Answers()
        self._open: Counter[tuple[str, str]] = Counter()
        self._free_refused = FreeCalls(REFUSED_OF_PEER, 10_000.0)
        self._free_strange = FreeCalls(STRANGE_OF_PEER, 10_000.0)
        self._free_unused = FreeCalls(UNUSED_OF_PEER, 20_000.0)
        self._logged = Rarely()
        self.refused: Counter[str] = Counter()
        """Refused calls and logins, by the limit."""
        self.end_connection: Callable[[str, str], None] = lambda peer, limit: None
        """Closes the connection of a peer, for a limit; the listener's, once there is one."""
        self.is_connected: Callable[[str], bool] = lambda peer: False
        """Whether the connection of a peer is certainly there; the listener's, likewise."""

    @property
    def open(self) -> int:
        """How many pairs of limit and user or address have open streams."""
        return len(self._open)

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler with the check before it."""
        if method == AUTHENTICATE:
            return handler
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=self._answered(handler), response_serializer=None)
        return preceded(handler, partial(self._enter, carries_records=method in _CARRY_RECORDS))

    def shut_out(self, name: str, host: str) -> BrokerOverloaded | None:
        """Count, and log rarely, what a user or address asks for while it is shut out, and return the refusal of it.

        None: it is not shut out.
        """
        left_ms = self._shut_outs.until_ms(name) - self._clock.monotonic_ms()
        if left_ms <= 0:
            return None
        limit = self._shut_outs.limit_of(name)
        self._note(limit, name, host)
        back = f"it may come back in {left_ms / 1_000:.0f} s"
        return BrokerOverloaded(f"{name} has {_FLOODS[limit]} too fast ({limit}); {back}")

    def refusal_of(self, who: Caller) -> BrokerOverloaded | None:
        """As `shut_out`, of the client of a Kafka connection that asks for something new."""
        name = _name_of(who)
        return self.shut_out(name, who.host) if name else None

    def served(self, who: Caller) -> float:
        """Count a request of a Kafka client; return for how many ms its connection is not to be read."""
        return self._served(who, "")

    def member_said(self, who: Caller, host: str, size: int) -> float:
        """Count a message of a group's member at an address; return for how many ms its stream is not to be read.

        `size`: of the message, in bytes; a long one counts as several, as a long request does.

        The rate is that of unary calls, and counts by itself: heartbeats of many members leave a user its calls.
        """
        return self._served(who if who.host else replace(who, host=host), " in groups", calls_of(size))

    def _served(self, who: Caller, where: str, calls: int = 1) -> float:
        name = _name_of(who)
        if not name:
            return 0.0
        name += where
        delay_ms = self._calls.charge(name, self._clock.monotonic_ms(), calls)
        if delay_ms > 0:
            self._note(MAX_CALL_RATE, name, who.host)
        return max(0.0, delay_ms)

    def refused_stranger(self, peer: str, host: str, cost: Refusal) -> None:
        """Count a call that was refused for want of a login, a login out of turn, or a login that failed.

        Some of each connection do not count, so that clients whose tokens have expired, or that have waited for their
        turn, lose nothing. Beyond the rate of its network, a connection is closed that goes on. Clients of such a
        network that have a token, or log in, are served.
        """
        if host == UNKNOWN_HOST:
            return
        name, now_ms = f"clients of {network_of(host)} without a login", self._clock.monotonic_ms()
        if self._free_strange.take(peer, now_ms, cost.of_peer):
            return
        if self._shut_outs.until_ms(name) > now_ms:
            self._note(MAX_REFUSED_CALL_RATE, name, host)
            self.end_connection(peer, MAX_REFUSED_CALL_RATE)
        else:
            self._shut_outs.count(name, MAX_REFUSED_CALL_RATE, self._refused_rate, now_ms, cost.of_network)

    async def turn_out(self, context: Any, name: str, host: str) -> None:
        """Refuse a call of a user or address that is shut out, and close its connection; return if it is not."""
        refusal = self.shut_out(name, host)
        if refusal is not None:
            peer = context.peer()  # gRPC does not name the peer of a finished call
            try:
                await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
            finally:  # once the client has its status
                self.end_connection(peer, self._shut_outs.limit_of(name))

    def _who(self, context: Any) -> tuple[str, str, str]:
        """Return the caller's user, its address, and the name by which its calls count; each "" if it has no limit."""
        who = caller.get()
        if who.principal.startswith(NODE_PREFIX):
            return "", "", ""
        host = who.host or host_of(context.peer())
        if host == UNKNOWN_HOST:
            host = ""
        return who.user, host, who.user or network_of(host)

    def _answered(self, handler: Any) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return the behavior of a unary call with the check before it, which returns the answer's bytes."""
        behavior, serialize = handler.unary_unary, handler.response_serializer or (lambda data: data)

        async def answered(request: Any, context: Any) -> Any:
            answer = await self._enter_call(context)
            data = serialize(await behavior(request, context))
            if answer is not None:
                answer.made(len(data))
            return data  # gRPC would keep the message, several times as large, for as long as the caller takes

        return answered

    async def _enter_call(self, context: Any) -> Answer | None:
        """Count a unary call, a long one as several, and bound its answer; or abort it."""
        user, host, name = self._who(context)
        if not name:
            return None
        await self.turn_out(context, name, host)
        if (full := self._answers.refusal_of(name)) is not None:
            await self._refuse(context, MAX_UNTAKEN_ANSWERS, name, host, full)
        delay_ms = self._calls.delay_ms(name, self._clock.monotonic_ms(), calls_of_request())
        if delay_ms > 0:
            text = f"{name} makes too many calls a second ({MAX_CALL_RATE}); try again in {delay_ms:.0f} ms"
            await self._refuse(context, MAX_CALL_RATE, name, host, ThrottlingQuotaExceeded(text, max(1, int(delay_ms))))
        leave = await self._take_places(context, user, host, name)
        context.add_done_callback(leave)
        return self._answers.begin(context, name, partial(self._end_untaken, context.peer(), name, host))

    def _end_untaken(self, peer: str, name: str, host: str) -> None:
        self._note(MAX_UNTAKEN_ANSWERS, name, host)
        self.end_connection(peer, MAX_UNTAKEN_ANSWERS)

    async def _enter(self, context: Any, *, carries_records: bool) -> None:
        """Count a stream until its task ends, or abort it. `carries_records`: whether the method transfers records."""
        user, host, name = self._who(context)
        if not name:
            return
        await self.turn_out(context, name, host)
        leave_places = await self._take_places(context, user, host, name)
        begun_ms = self._clock.monotonic_ms()
        peer = context.peer()  # gRPC does not name the peer of a finished call
        stream = _Stream(is_unused=carries_records)
        _stream.set(stream)

        def leave(_: object) -> None:
            leave_places(_)
            ended_ms = self._clock.monotonic_ms()
            if ended_ms - begun_ms < SHORT_MS and context.code() != _REFUSED:
                self._shut_outs.count(name, MAX_SHORT_STREAM_RATE, self._short_rate, ended_ms)
                if stream.is_unused:
                    self._count_unused(peer, name, ended_ms)

        task = asyncio.current_task()
        assert task is not None, "gRPC serves each call in a task"
        task.add_done_callback(leave)

    async def _take_places(self, context: Any, user: str, host: str, name: str) -> Callable[[object], None]:
        """Count a stream or a call of a user and an address until the returned function is called, or abort it."""
        places = [(MAX_STREAMS_PER_USER, user, self._per_user)] if user else []
        if host:
            places.append((MAX_STREAMS_PER_IP, host, self._per_ip))
        for key, counted_by, limit in places:
            if self._open[key, counted_by] >= limit:
                text = f"{counted_by} has {key}={limit} open streams and calls; end some, and try again"
                await self._refuse(context, key, name, host, BrokerOverloaded(text))
        counted = [(key, counted_by) for key, counted_by, _ in places]
        self._open.update(counted)

        def leave(_: object) -> None:
            for place in counted:
                self._open[place] -= 1
                if not self._open[place]:
                    del self._open[place]

        return leave

    def _count_unused(self, peer: str, name: str, now_ms: float) -> None:
        """Count a short stream that was not used, unless it turns out to have ended with its connection."""
        if not self._free_unused.take(peer, now_ms):
            asyncio.get_running_loop().call_later(UNUSED_AFTER_S, self._count_given_up, peer, name)

    def _count_given_up(self, peer: str, name: str) -> None:
        if self.is_connected(peer):
            now_ms = self._clock.monotonic_ms()
            self._shut_outs.count(name, MAX_UNUSED_STREAM_RATE, self._unused_rate, now_ms)

    def count_refused(self, context: Any) -> None:
        """Count a call that was refused for a limit or a quota: a caller that goes on regardless is shut out.

        A few refusals of a connection do not count: many clients that all wait before they try again are no flood.
        """
        _, _, name = self._who(context)
        if not name:
            return
        peer, now_ms = context.peer(), self._clock.monotonic_ms()
        if not self._free_refused.take(peer, now_ms):
            self._shut_outs.count(name, MAX_REFUSED_CALL_RATE, self._refused_rate, now_ms)

    async def _refuse(self, context: Any, limit: str, name: str, host: str, error: RaftlogError) -> NoReturn:
        self.count_refused(context)
        self._note(limit, name, host)
        await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, error)

    def _note(self, limit: str, name: str, host: str) -> None:
        self.refused[limit] += 1
        if self._logged.may_log((limit, host), self._clock.monotonic_ms()):
            logger.warning(
                "calls refused", extra={"event": "streams_refused", "host": host, "of": name, "limit": limit}
            )


def _name_of(who: Caller) -> str:
    """Return the name by which a caller with a known or hidden address counts; "": it has no limit."""
    if who.principal.startswith(NODE_PREFIX) or (who.principal == ANONYMOUS and who.host == UNKNOWN_HOST):
        return ""
    return who.share
