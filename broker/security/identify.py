"""Who calls on the listener for clients: an interceptor that finds it out, before anything of a request is read.

    token, `authorization: Bearer TOKEN`    User:NAME
    certificate that names nodes            Node:ID, a super user
    certificate                             User:COMMON NAME
    neither                                 User:ANONYMOUS, or refused where everybody has to have a token

What is served finds it in the context variable `caller`. A stream that came with a token ends, with UNAUTHENTICATED, as
soon as the credential changes or goes that its client had authenticated with; streams do not end with their token's
time, calls do.

Where everybody has to have a token, `Authenticate` alone is served to strangers. Few of its calls are under way at a
time, and none waits for long for its request, so that whoever begins calls and does not go on with them takes no room
from those who have a token. Where callers may be anonymous he still can, with other calls, as he can wherever nobody
authenticates: there it is up to the network who gets near.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final
from urllib.parse import unquote

import grpc

from broker.clock import Clock
from broker.observability.counters import Counters
from broker.security.audit import network_of
from broker.security.authorizer import NODE_PREFIX
from broker.security.caller import Authorizer, Caller, caller
from broker.security.tokens import Login, Tokens
from broker.security.users import Users
from broker.services.rewritten import RewrittenHandlers
from raftlog.v1.security_pb2 import UNKNOWN_MECHANISM
from raftmeta.acls import ANONYMOUS, USER_PREFIX, canonical_host
from raftmeta.quorum.peer_identity import node_ids_of
from raftmeta.user_names import RESERVED, why_no_name

AUTHENTICATE: Final = "/raftlog.v1.Security/Authenticate"
"""The only call that nobody has to authenticate for."""
MAX_KNOWN: Final = 10_000
"""Tokens, and addresses, that are remembered."""
MAX_STRANGERS: Final = 500
"""Calls of `Authenticate` that are under way at a time."""
MAX_STRANGERS_OF_NETWORK: Final = 50
"""Those of one network; who knows the password is a few ms in each."""
REQUEST_S: Final = 10.0
"""Until the request has come whose call has begun."""
assert MAX_STRANGERS_OF_NETWORK < MAX_STRANGERS
_SCHEME: Final = "Bearer "
_MAX_SHOWN_NODES: Final = 10

FAILED: Final = "AuthenticationFailed"
EXPIRED: Final = "TokenExpired"
NO_TOKEN: Final = (
    f"{FAILED}: this listener asks for a user and a password; set security.protocol = sasl_ssl, sasl.username and "
    "sasl.password"
)
_NOT_OURS: Final = f"{EXPIRED}: this broker has not issued the token since it started; authenticate anew"
_OLD: Final = f"{EXPIRED}: the token's time is over; authenticate anew"
_CROWDED: Final = "too many clients are authenticating; try again"
_CHANGED: Final = f"{EXPIRED}: the user's password has changed, or the user is gone; authenticate anew"


class _Refused(Exception):
    """What a caller is told."""


_NOBODY: Final = Login("", UNKNOWN_MECHANISM, 0, 0)
"""Who shows no token."""
_login: ContextVar[Login | None] = ContextVar("login", default=None)
"""Of the call that has just arrived; None: nobody has looked."""
_why: ContextVar[str] = ContextVar("why", default="")


class _Stream:
    """A standing stream, and whether it was ended here."""

    __slots__ = ("ended", "login", "task")

    def __init__(self, login: Login, task: asyncio.Task[Any]) -> None:
        self.login = login
        self.task = task
        self.ended = False


class _Strangers:
    """The calls of `Authenticate` that are under way, by network."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0
        self._of_network: Counter[str] = Counter()

    def enter(self, host: str) -> bool:
        """Count the call that this task serves, until the task is over; False: there are too many.

        The task outlives its handler: it ends when the client has taken the answer, for which a client may leave no
        room in its window (RFC 9113, section 6.9). gRPC has no deadline for that, so such calls stay counted.
        """
        network = network_of(host)
        if self._total >= self._most or self._of_network[network] >= MAX_STRANGERS_OF_NETWORK:
            return False
        task = asyncio.current_task()
        assert task is not None, "gRPC serves each call in a task"
        self._total += 1
        self._of_network[network] += 1

        def leave(_: object) -> None:
            self._total -= 1
            self._of_network[network] -= 1
            if not self._of_network[network]:
                del self._of_network[network]

        task.add_done_callback(leave)
        return True


class Identify(RewrittenHandlers):
    """The interceptor; has to be the outermost one. `check` is called when credentials may have changed.

    `required`: who shows neither a token nor a node's certificate is refused. `certificates`: all are asked for one.
    `max_strangers`: calls of `Authenticate` at a time; fewer than those that the server takes in all.
    """

    def __init__(
        self,
        tokens: Tokens,
        users: Users,
        clock: Clock,
        counters: Counters,
        authorizer: Authorizer | None = None,
        *,
        required: bool,
        certificates: bool,
        max_strangers: int = MAX_STRANGERS,
    ) -> None:
        super().__init__()
        self._tokens = tokens
        self._users = users
        self._clock = clock
        self._counters = counters
        self._authorizer = authorizer
        self._required = required
        self._certificates = certificates
        self._known: dict[str, Login] = {}
        """What was shown, and found to be of this process."""
        self._hosts: dict[str, str] = {}
        self._streams: set[_Stream] = set()
        self._strangers = _Strangers(max_strangers)

    def count_streams(self) -> int:
        """How many streams stand that came with a token."""
        return len(self._streams)

    def check(self) -> int:
        """End the streams whose credentials are not what counts any more; return how many."""
        ended = [stream for stream in self._streams if not self._is_current(stream.login)]
        for stream in ended:
            stream.ended = True
            stream.task.cancel()
        return len(ended)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler, or one that refuses, and reads nothing."""
        try:
            login = self._login_of(handler_call_details)
        except _Refused as refused:
            self._counters.unauthenticated_calls += 1
            _why.set(str(refused))
            return _REFUSING  # type: ignore[no-any-return] # as below
        _login.set(login)
        return await super().intercept_service(continuation, handler_call_details)

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler with a caller."""
        if method == AUTHENTICATE:  # a stream of one request is the same on the wire, and can be waited for here
            authenticate = self._authenticate(handler.unary_unary)
            return handler._replace(request_streaming=True, unary_unary=None, stream_unary=authenticate)
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=self._call(handler.unary_unary))
        for kind in ("unary_stream", "stream_unary", "stream_stream"):
            behavior = getattr(handler, kind)
            if behavior is not None:
                return handler._replace(**{kind: self._stream(behavior)})
        raise AssertionError("a handler serves one kind of call")

    # Who it is

    def _login_of(self, details: grpc.HandlerCallDetails) -> Login:
        for name, value in details.invocation_metadata or ():
            if name == "authorization" and details.method != AUTHENTICATE:
                return self._verified(value)
        if self._required and not self._certificates and details.method != AUTHENTICATE:
            raise _Refused(NO_TOKEN)
        return _NOBODY

    def _verified(self, shown: str | bytes) -> Login:
        known = self._known.get(shown)  # type: ignore[arg-type] # bytes are in it never
        if known is None:
            known = self._read(shown)
        if known.expires_ms <= self._clock.monotonic_ms():
            raise _Refused(_OLD)
        self._check_current(known)
        return known

    def _read(self, shown: str | bytes) -> Login:
        if not isinstance(shown, str) or not shown.startswith(_SCHEME):
            raise _Refused(NO_TOKEN)
        login = self._tokens.read(shown[len(_SCHEME) :])
        if login is None:
            raise _Refused(_NOT_OURS)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[shown] = login
        return login

    def _is_current(self, login: Login) -> bool:
        return self._users.is_current(login.user, login.mechanism, login.version)

    def _check_current(self, login: Login) -> None:
        if not self._is_current(login):
            raise _Refused(_CHANGED)

    def _caller(self, login: Login | None, context: Any, open_to_all: bool) -> Caller:
        if login is None:  # fails closed: then calls come another way than they do now
            raise _Refused(NO_TOKEN)
        if login is not _NOBODY:
            self._check_current(login)  # the request itself may have come much later
            principal = USER_PREFIX + login.user
        else:
            principal = principal_of(context.auth_context()) if self._certificates else ANONYMOUS
            if self._required and not open_to_all and not principal.startswith(NODE_PREFIX):
                raise _Refused(NO_TOKEN)
        return Caller(principal, self.host_of(context.peer()), self._authorizer)

    def host_of(self, peer: str) -> str:
        """Return the address of what gRPC calls a peer, `ipv4:127.0.0.1:4321`, as ACLs have it."""
        host = self._hosts.get(peer)
        if host is None:
            if len(self._hosts) >= MAX_KNOWN:
                self._hosts.clear()
            host = self._hosts[peer] = host_of(peer)
        return host

    # What is served

    def _authenticate(self, call: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def identified(requests: Any, context: Any) -> Any:
            found = self._caller(_NOBODY, context, open_to_all=True)
            if not self._strangers.enter(found.host):
                self._counters.unauthenticated_calls += 1
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _CROWDED)
            try:
                async with asyncio.timeout(REQUEST_S):
                    request = await anext(aiter(requests), None)
            except TimeoutError:
                self._counters.unauthenticated_calls += 1
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no request came within {REQUEST_S:g} s")
            if request is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a request")
            caller.set(found)
            return await call(request, context)

        return identified

    def _call(self, call: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def identified(request: Any, context: Any) -> Any:
            try:
                found = self._caller(_login.get(), context, open_to_all=False)
            except _Refused as refused:
                self._counters.unauthenticated_calls += 1
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(refused))
            caller.set(found)
            return await call(request, context)

        return identified

    def _stream(self, behavior: Any) -> Any:
        serve = _written(behavior) if inspect.isasyncgenfunction(behavior) else behavior

        async def identified(request: Any, context: Any) -> Any:
            login = _login.get()
            try:
                found = self._caller(login, context, open_to_all=False)
            except _Refused as refused:
                self._counters.unauthenticated_calls += 1
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(refused))
            caller.set(found)
            if login is None or login is _NOBODY:
                return await serve(request, context)
            task = asyncio.ensure_future(serve(request, context))
            stream = _Stream(login, task)
            self._streams.add(stream)
            try:
                await _settled(task)
            finally:
                self._streams.discard(stream)
            if stream.ended and (task.cancelled() or task.exception() is None):
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, _CHANGED)
            return task.result()

        return identified


async def _settled(task: asyncio.Task[Any]) -> None:
    """Return once a task is over, however; whoever cancels this cancels that, and it is over then as well."""
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


def _written(behavior: Any) -> Any:
    """Return a generator's behavior as a coroutine that writes what it yields."""

    async def writing(request: Any, context: Any) -> None:
        async for response in behavior(request, context):
            await context.write(response)

    return writing


async def _refuse(requests: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _why.get())


_REFUSING: Final[Any] = grpc.stream_stream_rpc_method_handler(_refuse)
"""For calls of every kind: it reads no request, and writes no response."""


def principal_of(auth_context: Mapping[str, Sequence[bytes]]) -> str:
    """Return who has shown the certificate of a connection; `User:ANONYMOUS` without one, or where it names nobody."""
    nodes = node_ids_of(auth_context)
    if nodes:
        return NODE_PREFIX + ",".join(map(str, sorted(nodes)[:_MAX_SHOWN_NODES]))
    names = [name.decode("utf-8", "replace") for name in auth_context.get("x509_common_name", ())]
    if len(names) != 1 or names[0] in RESERVED or why_no_name(names[0]) is not None:
        return ANONYMOUS
    return USER_PREFIX + names[0]


def host_of(peer: str) -> str:
    """Return the address of what gRPC calls a peer: `ipv4:127.0.0.1:4321`, `ipv6:%5B::1%5D:4321`."""
    _, _, address = unquote(peer).partition(":")
    return canonical_host(address.rpartition(":")[0].strip("[]") or address)
