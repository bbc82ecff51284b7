"""Identifies callers on the listener for clients: an interceptor that runs before any byte of a request is read.

    token, `authorization: Bearer TOKEN`    User:NAME
    certificate that names nodes            Node:ID, a super user
    certificate                             User:COMMON NAME, or as `ssl.principal.mapping.rules` have it
    neither                                 User:ANONYMOUS, or refused if the listener requires a token

Handlers read the caller from the context variable `caller`. A stream that was opened with a token ends with
UNAUTHENTICATED as soon as the credential behind the token changes or is deleted. An expired token ends no open stream,
but no call is admitted with it; after a login by OAUTHBEARER, whose end the issuer has set, it ends streams, too.

If the listener requires a token, unauthenticated clients can call `Authenticate` only. Its concurrent calls are few and
each waits for its request for a short time, so a client that begins calls and never finishes them takes no room from
authenticated clients. gRPC assembles a request as soon as it is to be read, however long it is; so only a few requests
of unauthenticated clients are read at a time, and of the others there is no more than HTTP/2's window. If callers may
be anonymous, other calls are open to such attacks; then the network has to decide which clients reach the broker.

Only the process that issued a token accepts it: each process makes its own key.

    token     body "." mac, both base64url without padding
    body      JSON: [user, mechanism, version of the credential, expiry in ms of the process's monotonic clock]
    mac       HMAC-SHA256 of the body
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import hmac
import inspect
import itertools
import json
import logging
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, NoReturn, cast

import grpc

from broker.clock import Clock
from broker.net.interceptors import (
    EXPIRED,
    REVOKED,
    Rarely,
    RewrittenHandlers,
    Unread,
    certificate_of,
    host_of,
    is_resumed_and_expired,
    send_headers,
)
from broker.net.revocation import RevocationLists
from broker.observability.counters import MTLS, Counters
from broker.security.caller import Authorizer, Caller, caller, network_of
from broker.security.mapping import DEFAULT, Rule, name_of, name_of_subject
from broker.security.users import Users
from raftlog._client.connections import refuse
from raftlog._core.security.acls import ANONYMOUS, NODE_PREFIX, RESERVED, USER_PREFIX, why_no_name
from raftlog.errors import AuthenticationFailed, BrokerOverloaded, InvalidRequestError, RequestTimedOut, TokenExpired
from raftlog.v1.common_pb2 import SASL_AUTHENTICATION_FAILED
from raftlog.v1.security_pb2 import UNKNOWN_MECHANISM
from raftmeta.credentials import Credential, Mechanism
from raftmeta.quorum.peer_identity import node_ids_named, node_ids_of

logger = logging.getLogger(__name__)

LIFETIME_MS: Final = 3_600_000
MAX_TOKEN_CHARS: Final = 4_096
KEY_BYTES: Final = 32
_MAC_CHARS: Final = 43


class Login(NamedTuple):
    """The content of a token: the credential that the client authenticated with, and its expiry in `monotonic_ms`."""

    user: str
    mechanism: Mechanism
    version: int
    expires_ms: int


OF_BEARER: Final = cast(Mechanism, -1)
"""Stands for the mechanism in a login by OAUTHBEARER, which has no credential and is current until it expires."""


class Tokens:
    """Issues tokens, and verifies that it issued a token."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(KEY_BYTES) if key is None else key

    def issue(self, credential: Credential, now_ms: float) -> str:
        """Return a token for a client that has just proved that it knows the password; `now_ms` is monotonic."""
        login = Login(credential.user, credential.mechanism, credential.version, int(now_ms) + LIFETIME_MS)
        return self.issue_to(login)

    def issue_to(self, login: Login) -> str:
        """Return a token for a client that has just proved to be the login's user."""
        body = _encode(json.dumps(login, separators=(",", ":"), ensure_ascii=False).encode())
        return f"{body}.{self._mac(body)}"

    def read(self, token: str) -> Login | None:
        """Return a token's content, None if this process did not issue it. Does not check the expiry."""
        body, _, mac = token.rpartition(".")
        if len(token) > MAX_TOKEN_CHARS or len(mac) != _MAC_CHARS or not token.isascii():
            return None
        if not hmac.compare_digest(mac, self._mac(body)):
            return None
        try:
            return Login(*json.loads(urlsafe_b64decode(body + "=" * (-len(body) % 4))))
        except (ValueError, TypeError, binascii.Error):  # cannot happen with a valid mac
            return None

    def _mac(self, body: str) -> str:
        return _encode(hmac.digest(self._key, body.encode(), hashlib.sha256))


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


AUTHENTICATE: Final = "/raftlog.v1.Security/Authenticate"
"""The only call that needs no authentication."""
MAX_KNOWN: Final = 10_000
"""Cached tokens, cached addresses, and networks whose requests were read."""
MAX_STRANGERS: Final = 500
"""Concurrent calls of `Authenticate`."""
MAX_STRANGERS_OF_NETWORK: Final = 50
"""Those of one network; a well-behaved client needs a few ms for each."""
MAX_READ: Final = 3
"""Requests of unauthenticated clients that are read at a time, each of up to socket.request.max.bytes."""
MAX_READ_OF_NETWORK: Final = 1
MAX_UNREAD: Final = 32
"""Such requests that wait for their turn to be read, each with up to a window of data (`WINDOW_BYTES`)."""
MAX_UNREAD_OF_NETWORK: Final = 8
TURN_S: Final = 10.0
"""How long a request waits for its turn."""
REQUEST_S: Final = 2.0
"""How long a request may take once it is its turn; a login is sent together with the headers of its call."""
CROWDED_REQUEST_S: Final = 1.0
"""The same if others wait when its turn begins."""
LONG_LOGIN_MS: Final = 1_000.0
"""For how long no login of a network is read after one that was far too long; twice as long each further time."""
MAX_LONG_LOGIN_MS: Final = 60_000.0
FORGIVEN_MS: Final = 600_000.0
"""After so long without another one it begins anew."""
assert MAX_STRANGERS_OF_NETWORK < MAX_STRANGERS
assert MAX_READ_OF_NETWORK < MAX_READ
assert MAX_UNREAD_OF_NETWORK < MAX_UNREAD

_SCHEME: Final = "Bearer "
_MAX_SHOWN_NODES: Final = 10

NO_TOKEN: Final = (
    "this listener asks for a user and a password; set security.protocol = sasl_ssl, sasl.username and sasl.password"
)
_NOT_OURS: Final = "this broker has not issued the token since it started; authenticate again"
_OLD: Final = "the token has expired; authenticate again"
_CROWDED: Final = "too many clients are authenticating; try again"
_CHANGED: Final = "the user's password has changed, or the user was deleted; authenticate again"


_NO_LOGIN: Final = Login("", UNKNOWN_MECHANISM, 0, 0)
"""A call without a token."""
_login: ContextVar[Login | None] = ContextVar("login", default=None)
"""The login of the call that has just arrived; None if the interceptor has not run."""
_why: ContextVar[AuthenticationFailed] = ContextVar("why")


class _Stream:
    """An open stream; `ended`: why this interceptor ended it; None: it did not."""

    __slots__ = ("certificate", "ended", "login", "task")

    def __init__(self, login: Login, certificate: bytes, task: asyncio.Task[Any]) -> None:
        self.login = login
        self.certificate = certificate
        self.task = task
        self.ended: AuthenticationFailed | None = None


class Strangers:
    """Clients that have not authenticated yet, by network: calls of `Authenticate`, or connections."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0
        self._of_network: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return their number."""
        return self._total

    def enter(self, host: str) -> Callable[[], None] | None:
        """Count one more; return what ends its count, None if there are too many already."""
        network = network_of(host)
        if self._total >= self._most or self._of_network[network] >= MAX_STRANGERS_OF_NETWORK:
            return None
        self._total += 1
        self._of_network[network] += 1

        def leave() -> None:
            self._total -= 1
            self._of_network[network] -= 1
            if not self._of_network[network]:
                del self._of_network[network]

        return leave

    def enter_task(self, host: str) -> bool:
        """Count the call of the current task until the task ends; return False if there are too many calls.

        The task outlives its handler: it ends when the client has taken the response. A client may leave no room for
        the response in its window (RFC 9113, section 6.9), and gRPC sets no deadline for that; such calls stay counted.
        """
        leave = self.enter(host)
        if leave is None:
            return False
        task = asyncio.current_task()
        assert task is not None, "gRPC serves each call in a task"
        task.add_done_callback(lambda _: leave())
        return True


class LongLogins:
    """Which networks have sent logins of a length that no login has. Pure; the caller passes the time.

    gRPC makes bytes of a message on the event loop before the broker sees how long it is: 30 MiB take some hundredths
    of a second, in which nothing else is served. So a network that sends such messages is read ever more rarely.
    """

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}
        """By network: the end of its pause, and how long that is."""

    def is_paused(self, host: str, now_ms: float) -> bool:
        """Whether no login of the address's network is to be read at the moment."""
        return bool(self._until) and self._until.get(network_of(host), (0.0, 0.0))[0] > now_ms

    def count(self, host: str, now_ms: float) -> None:
        """Count a login that was far too long."""
        network = network_of(host)
        until_ms, pause_ms = self._until.pop(network, (0.0, 0.0))
        again = pause_ms and now_ms - until_ms < FORGIVEN_MS
        pause_ms = min(MAX_LONG_LOGIN_MS, 2 * pause_ms) if again else LONG_LOGIN_MS
        if len(self._until) >= MAX_KNOWN:
            self._until = {name: each for name, each in self._until.items() if each[0] > now_ms}
        if len(self._until) < MAX_KNOWN:
            self._until[network] = now_ms + pause_ms, pause_ms


class Turns:
    """Lets few requests of unauthenticated clients be read at a time.

    The next one is of the network that was served longest ago, and there the one that came first: so a network whose
    requests never come delays its own clients, and others by a turn at a time. When too many wait, the newest of the
    network with most of them is turned away.
    """

    def __init__(self) -> None:
        self._reading: Counter[str] = Counter()
        """By network."""
        self._waiting: dict[asyncio.Future[bool], str] = {}
        """With their networks, as they came; the result: whether it is the request's turn, or it is turned away."""
        self._served: dict[str, int] = {}
        """The number of each network's last turn, in order."""
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def turn(self, host: str) -> AsyncIterator[float]:
        """Enter when it is the request's turn, with the seconds that the request may take.

        Raises:
            BrokerOverloaded: too many are waiting, or waiting took TURN_S.
        """
        network = network_of(host)
        if list(self._waiting.values()).count(network) >= MAX_UNREAD_OF_NETWORK:
            raise BrokerOverloaded(_CROWDED)
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[admitted] = network
        self._admit()
        self._turn_away()
        try:
            try:
                async with asyncio.timeout(TURN_S):
                    is_turn = await admitted
            except TimeoutError:
                is_turn = False
            if not is_turn:
                raise BrokerOverloaded(_CROWDED)
            yield CROWDED_REQUEST_S if self._waiting else REQUEST_S
        finally:
            self._waiting.pop(admitted, None)
            if admitted.done() and not admitted.cancelled() and admitted.result():
                self._reading[network] -= 1
                self._reading += Counter()  # without networks that have none
                self._admit()

    def _admit(self) -> None:
        while self._reading.total() < MAX_READ:
            ready = [
                (admitted, network)
                for admitted, network in self._waiting.items()
                if self._reading[network] < MAX_READ_OF_NETWORK and not admitted.done()
            ]
            if not ready:
                return
            admitted, network = min(ready, key=lambda each: self._served.get(each[1], 0))
            del self._waiting[admitted]
            self._reading[network] += 1
            self._served.pop(network, None)
            self._served[network] = next(self._numbers)
            if len(self._served) > MAX_KNOWN:
                del self._served[next(iter(self._served))]
            admitted.set_result(True)

    def _turn_away(self) -> None:
        waiting = [(admitted, network) for admitted, network in self._waiting.items() if not admitted.done()]
        if len(waiting) <= MAX_UNREAD:
            return
        of_network = Counter(network for _, network in waiting)
        newest, _ = max(reversed(waiting), key=lambda each: of_network[each[1]])
        del self._waiting[newest]
        newest.set_result(False)


class Refusal(NamedTuple):
    """As how many calls counts what a client without a login was refused: of its connection's, and of its network's."""

    of_peer: int
    of_network: int


OUT_OF_TURN: Final = Refusal(1, 1)
"""A login, since there were too many at a time; honest clients are many after a restart of a broker."""
NO_LOGIN: Final = Refusal(1, 20)
"""A call without a valid token; honest clients have one or a few after a restart, and log in."""
FAILED_LOGIN: Final = Refusal(5, 100)
"""A wrong password or token, which costs two calls with cryptography; honest clients rarely try twice."""


class Identify(RewrittenHandlers):
    """The interceptor; it has to be the outermost one. Call `check` when credentials may have changed.

    `required`: refuse callers without a token or a node's certificate. `certificates`: the listener asks for
    certificates. `max_strangers`: concurrent calls of `Authenticate`; fewer than the server's concurrent calls.
    `host`: the address of all callers, where a proxy hides theirs; each connection is a network of its own then.
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
        rules: Sequence[Rule] = DEFAULT,
        host: str | None = None,
        revoked: RevocationLists | None = None,
    ) -> None:
        super().__init__()
        self._rules = rules
        self._revoked = revoked if certificates else None
        self._host = host
        self._tokens = tokens
        self._users = users
        self._clock = clock
        self._counters = counters
        self._authorizer = authorizer
        self._required = required
        self._certificates = certificates
        self._known: dict[str, Login] = {}
        """Cached `authorization` values with a token of this process."""
        self._hosts: dict[str, str] = {}
        self._streams: set[_Stream] = set()
        self._strangers = Strangers(max_strangers)
        self._turns = Turns()
        self._long_logins = LongLogins()
        self._logged = Rarely()
        self.logged_in: Callable[[str], None] = lambda peer: None
        """Called with the peer of each call that is let in; the listener's, once there is one."""
        self.refused: Callable[[str, str, Refusal], None] = lambda peer, host, cost: None
        """Called with peer and address of each call that was refused for want of a login, or of a turn to log in, and
        of each login that failed."""
        self._refusing: Any = grpc.stream_stream_rpc_method_handler(self._refuse)
        """Serves calls of every kind: it reads no request and writes no response."""
        self.turn_out: Callable[[Any, str, str], Awaitable[None]] = _let_in
        """Called with context, principal and address of each call of a user; aborts it if the user is shut out."""

    def count_streams(self) -> int:
        """Return the number of open streams with a token. For any thread."""
        return sum(stream.login is not _NO_LOGIN for stream in self._streams.copy())

    def check(self) -> int:
        """End streams whose credential has changed or is gone, or whose certificate is revoked; return their number."""
        ended = 0
        for stream in self._streams:
            if self._is_revoked(stream.certificate):
                stream.ended = AuthenticationFailed(REVOKED)
            elif stream.login is not _NO_LOGIN and not self._is_current(stream.login):
                stream.ended = TokenExpired(_OLD if stream.login.mechanism == OF_BEARER else _CHANGED)
            else:
                continue
            stream.task.cancel()
            ended += 1
        return ended

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler, or a handler that refuses without reading the request."""
        try:
            login = self._login_of(handler_call_details)
        except AuthenticationFailed as refused:
            self._counters.unauthenticated_calls += 1
            _why.set(refused)
            return self._refusing  # type: ignore[no-any-return] # as below
        _login.set(login)
        return await super().intercept_service(continuation, handler_call_details)

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler with `caller` set."""
        if method == AUTHENTICATE:  # as a stream, equal on the wire, its request can be awaited with a time-out
            authenticate = self._authenticate(handler.unary_unary)
            return handler._replace(request_streaming=True, unary_unary=None, stream_unary=authenticate)
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=self._call(handler.unary_unary))
        for kind in ("unary_stream", "stream_unary", "stream_stream"):
            behavior = getattr(handler, kind)
            if behavior is not None:
                return handler._replace(**{kind: self._stream(behavior)})
        raise AssertionError("a handler serves one kind of call")

    async def _refuse(self, requests: Any, context: Any) -> None:
        peer = context.peer()  # gRPC does not name the peer of a finished call
        try:
            await refuse(context, grpc.StatusCode.UNAUTHENTICATED, _why.get())
        finally:
            self.refused(peer, self.host_of(peer), NO_LOGIN)

    # Identification

    def _login_of(self, details: grpc.HandlerCallDetails) -> Login:
        for name, value in details.invocation_metadata or ():
            if name == "authorization" and details.method != AUTHENTICATE:
                return self._verified(value)
        if self._required and not self._certificates and details.method != AUTHENTICATE:
            raise AuthenticationFailed(NO_TOKEN)
        return _NO_LOGIN

    def _verified(self, shown: str | bytes) -> Login:
        known = self._known.get(shown)  # type: ignore[arg-type] # no key is bytes
        if known is None:
            known = self._read(shown)
        if known.expires_ms <= self._clock.monotonic_ms():
            raise TokenExpired(_OLD)
        self._check_current(known)
        return known

    def _read(self, shown: str | bytes) -> Login:
        if not isinstance(shown, str) or not shown.startswith(_SCHEME):
            raise AuthenticationFailed(NO_TOKEN)
        login = self._tokens.read(shown[len(_SCHEME) :])
        if login is None:
            raise TokenExpired(_NOT_OURS)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[shown] = login
        return login

    def _is_current(self, login: Login) -> bool:
        if login.mechanism == OF_BEARER:
            return login.expires_ms > self._clock.monotonic_ms()
        return self._users.is_current(login.user, login.mechanism, login.version)

    def _check_current(self, login: Login) -> None:
        if not self._is_current(login):
            raise TokenExpired(_OLD if login.mechanism == OF_BEARER else _CHANGED)

    def _caller(self, login: Login | None, context: Any, open_to_all: bool) -> Caller:
        if login is None:  # cannot happen while gRPC runs the interceptor first; refused to be safe
            raise AuthenticationFailed(NO_TOKEN)
        if self._is_revoked(self._certificate_of(context)):
            self._counters.authentications[MTLS, "failure"] += 1
            raise AuthenticationFailed(REVOKED)
        if self._certificates and is_resumed_and_expired(context.auth_context()):
            self._counters.authentications[MTLS, "failure"] += 1
            raise AuthenticationFailed(EXPIRED)
        if login is not _NO_LOGIN:
            self._check_current(login)  # again: the request may have arrived much later than its call
            principal = USER_PREFIX + login.user
        else:
            principal = principal_of(context.auth_context(), self._rules) if self._certificates else ANONYMOUS
            if self._required and not open_to_all and not principal.startswith(NODE_PREFIX):
                raise AuthenticationFailed(NO_TOKEN)
        return Caller(principal, self.host_of(context.peer()), self._authorizer)

    def _certificate_of(self, context: Any) -> bytes:
        """Return the certificate of a call, if any may be revoked."""
        return b"" if self._revoked is None else certificate_of(context.auth_context())

    def _is_revoked(self, certificate: bytes) -> bool:
        return self._revoked is not None and self._revoked.is_revoked(certificate)

    def host_of(self, peer: str) -> str:
        """Return the address of a gRPC peer, `ipv4:127.0.0.1:4321`, as ACLs spell it."""
        if self._host is not None:
            return self._host
        host = self._hosts.get(peer)
        if host is None:
            if len(self._hosts) >= MAX_KNOWN:
                self._hosts.clear()
            host = self._hosts[peer] = host_of(peer)
        return host

    # Handlers

    def _authenticate(self, call: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def identified(requests: Any, context: Any) -> Any:
            try:
                found = self._caller(_NO_LOGIN, context, open_to_all=True)
            except AuthenticationFailed as refused:
                self._counters.unauthenticated_calls += 1
                await refuse(context, grpc.StatusCode.UNAUTHENTICATED, refused)
            source = found.host if self._host is None else context.peer()
            if not self._strangers.enter_task(source):
                await self._turn_away(context, found.host)
            request = await self._request_of(requests, context, source, found.host)
            if isinstance(request, Unread) and request.too_long:  # the handler refuses it
                self._long_logins.count(source, self._clock.monotonic_ms())
            caller.set(found)
            answer = await call(request, context)
            if answer.error.code:
                peer = context.peer()  # gRPC does not name the peer of a finished call
                cost = FAILED_LOGIN if answer.error.code == SASL_AUTHENTICATION_FAILED else NO_LOGIN
                context.add_done_callback(lambda _: self.refused(peer, found.host, cost))
            return answer

        return identified

    async def _request_of(self, requests: Any, context: Any, source: str, host: str) -> Any:
        """Return the request of an unauthenticated client in its turn, or abort the call."""
        seconds = REQUEST_S
        try:
            self._check_pause(source)
            async with self._turns.turn(source) as seconds, asyncio.timeout(seconds):
                self._check_pause(source)
                request = await anext(aiter(requests), None)
        except BrokerOverloaded:
            await self._turn_away(context, host)
        except TimeoutError:
            self._counters.unauthenticated_calls += 1
            late = f"no request came within {seconds:g} s"
            await refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, RequestTimedOut(late), late)
        if request is None:
            empty = "the call ended without a request"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError(empty), empty)
        return request

    def _check_pause(self, source: str) -> None:
        if self._long_logins.is_paused(source, self._clock.monotonic_ms()):
            raise BrokerOverloaded(_CROWDED)

    async def _turn_away(self, context: Any, host: str) -> NoReturn:
        """Abort the call of an unauthenticated client, one of too many."""
        self._counters.unauthenticated_calls += 1
        if self._logged.may_log(host, self._clock.monotonic_ms()):
            logger.warning("logins refused: too many at a time", extra={"event": "logins_refused", "host": host})
        peer = context.peer()
        try:
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, BrokerOverloaded(_CROWDED), _CROWDED)
        finally:
            self.refused(peer, host, OUT_OF_TURN)

    async def _set_caller(self, context: Any) -> Login | None:
        """Set `caller` and return the login, or abort the call."""
        login = _login.get()
        try:
            found = self._caller(login, context, open_to_all=False)
        except AuthenticationFailed as refused:
            self._counters.unauthenticated_calls += 1
            await refuse(context, grpc.StatusCode.UNAUTHENTICATED, refused)
        caller.set(found)
        if found.principal != ANONYMOUS:
            await self.turn_out(context, found.principal, found.host)
        self.logged_in(context.peer())
        return login

    def _call(self, call: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def identified(request: Any, context: Any) -> Any:
            await self._set_caller(context)
            return await call(request, context)

        return identified

    def _stream(self, behavior: Any) -> Any:
        serve = _written(behavior) if inspect.isasyncgenfunction(behavior) else behavior

        async def identified(request: Any, context: Any) -> Any:
            login = await self._set_caller(context)
            certificate = self._certificate_of(context)
            if login is None or (login is _NO_LOGIN and not certificate):
                return await serve(request, context)
            # The headers go first, by themselves: gRPC notes that they were sent when the write that carries them is
            # over. If `check` cancelled that write, gRPC would send them again with the status, which fails, and the
            # call would never end.
            await send_headers(context)
            task = asyncio.ensure_future(serve(request, context))
            stream = _Stream(login, certificate, task)
            self._streams.add(stream)
            try:
                await _settled(task)
            finally:
                self._streams.discard(stream)
            if stream.ended is not None and (task.cancelled() or task.exception() is None):
                await refuse(context, grpc.StatusCode.UNAUTHENTICATED, stream.ended)
            return task.result()

        return identified


async def _let_in(context: Any, principal: str, host: str) -> None:
    pass


async def _settled(task: asyncio.Task[Any]) -> None:
    """Return when a task has ended in any way; a cancellation cancels the task and waits for its end."""
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


def _written(behavior: Any) -> Any:
    """Return an async generator as a coroutine that writes the yielded responses."""

    async def writing(request: Any, context: Any) -> None:
        async for response in behavior(request, context):
            await context.write(response)

    return writing


def principal_of(auth_context: Mapping[str, Sequence[bytes]], rules: Sequence[Rule] = DEFAULT) -> str:
    """Return the principal of a connection's certificate; `User:ANONYMOUS` without a certificate or a valid name."""
    names = [name.decode("utf-8", "replace") for name in auth_context.get("x509_common_name", ())]
    (subject,) = auth_context.get("x509_subject", ()) or (b"",)
    return principal_named(node_ids_of(auth_context) or (), name_of(rules, subject.decode("utf-8", "replace"), names))


def principal_of_certificate(certificate: Mapping[str, Any], rules: Sequence[Rule] = DEFAULT) -> str:
    """Return the principal of a certificate, given as `ssl.SSLObject.getpeercert` does; as `principal_of`."""
    names = [value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"]
    uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    user = name_of(rules, name_of_subject(certificate.get("subject", ())), names)
    return principal_named(node_ids_named(uris, names), user)


def principal_named(node_ids: Iterable[int], user: str | None) -> str:
    """Return the principal of a certificate with these nodes and that user."""
    nodes = sorted(node_ids)
    if nodes:
        return NODE_PREFIX + ",".join(map(str, nodes[:_MAX_SHOWN_NODES]))
    if user is None or user in RESERVED or why_no_name(user) is not None:
        return ANONYMOUS
    return USER_PREFIX + user
