"""What one broker's sessions, services and listeners charge to their clients' quotas.

Produce and fetch are charged after the work, and the delay is reported in the answer. Until it has passed, the stream's
requests are not read, or no records are sent on it (KIP-219). HTTP/2's flow control then stops a client that does not
obey.
A change of the metadata, and every unary call of a client over its request_percentage, is refused with
THROTTLING_QUOTA_EXCEEDED before any work, so a client over its quota occupies no handler while it waits.

Group sessions are never held: members would miss their heartbeats. Nodes have no quotas.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import grpc

from broker.clock import Clock
from broker.net.interceptors import RewrittenHandlers, preceded
from broker.quotas.client_quotas import Bucket, ClientQuotas, Usage
from broker.security.caller import Caller, caller
from raftlog._client.connections import refuse
from raftlog._core.security.acls import ANONYMOUS
from raftlog.errors import ThrottlingQuotaExceeded
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide.security import parts_of_role
from raftmeta.image import MetadataImage
from raftmeta.quotas import (
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    QuotaEntity,
)

LOOK_AGAIN_MS: Final = 500.0
"""A held client learns within this time that its quota was raised or removed."""
CLIENT_ID: Final = "client-id"
"""Metadata of a call: the client's name, percent-encoded where it is not ASCII."""
MAX_CLIENT_ID: Final = 255
MAX_HELD_OF_USER: Final = 64
"""Produce streams of one user that are left unread at a time; of User:ANONYMOUS, which is no single user, MAX_HELD."""
MAX_HELD: Final = 256
"""Produce streams that are left unread at a time: each may hold HTTP/2's window of data, some 600 KiB of memory."""
_NEVER_HELD: Final = frozenset({"/raftlog.v1.Security/Authenticate", "/raftlog.v1.Admin/AlterClientQuotas"})

T = TypeVar("T")


class QuotaManager:
    """The quotas of one broker. On the event loop only."""

    def __init__(self, image: Callable[[], MetadataImage], clock: Clock, window_ms: float) -> None:
        """`window_ms`: as for `ClientQuotas`."""
        self._image = image
        self._clock = clock
        self._core = ClientQuotas(window_ms)
        self._quotas: Mapping[QuotaEntity, Mapping[str, float]] = {}
        self._held: Counter[str] = Counter()
        """Streams that are held unread, by principal."""

    def usage(self) -> list[Usage]:
        """Return what clients with quotas have used."""
        return self._core.usage()

    def account(self, who: Caller, bytes_key: str) -> Account:
        """Return what a stream of this client charges its messages to; `bytes_key`: the quota of their bytes."""
        return Account(self, who, bytes_key)

    def now_ms(self) -> float:
        """Return the time by which delays are counted."""
        return self._clock.monotonic_ms()

    def produced(self, who: Caller, size_bytes: int) -> float:
        """Charge produced bytes; return for how many ms the client is to be held."""
        return self._charge(who, PRODUCER_BYTE_RATE, size_bytes)

    def fetched(self, who: Caller, size_bytes: int) -> float:
        """Charge fetched bytes; return for how many ms the client is to be held."""
        return self._charge(who, CONSUMER_BYTE_RATE, size_bytes)

    def worked(self, who: Caller, took_ms: float) -> float:
        """Charge time of the event loop; return for how many ms the client is to be held."""
        return self._charge(who, REQUEST_PERCENTAGE, took_ms)

    def counts_time(self, who: Caller) -> bool:
        """Whether the time of this client's requests has to be measured."""
        return bool(self._follow()) and self._core.find(who.principal, who.client_id, REQUEST_PERCENTAGE) is not None

    def admit_call(self, who: Caller) -> None:
        """Check that the client may make another call.

        Raises:
            ThrottlingQuotaExceeded: it is over its request_percentage.
        """
        delay_ms = self._charge(who, REQUEST_PERCENTAGE, 0)
        if delay_ms > 0:
            raise _exceeded(who, REQUEST_PERCENTAGE, delay_ms)

    def admit_commands(self, who: Caller, *commands: MetadataCommand) -> None:
        """Check that the client may change the metadata, and charge the changes: all commands of a call at once.

        So one call may exceed the quota, whatever it is made of.

        Raises:
            ThrottlingQuotaExceeded: it is over its controller_mutation_rate.
        """
        if not self._follow():
            return
        image = self._image()
        changes = sum(mutations(image, command) for command in commands)
        if not changes:
            return
        now_ms = self._clock.monotonic_ms()
        delay_ms = self._core.admit(who.principal, who.client_id, CONTROLLER_MUTATION_RATE, changes, now_ms)
        if delay_ms > 0:
            raise _exceeded(who, CONTROLLER_MUTATION_RATE, delay_ms)

    def held_ms(self, who: Caller, *keys: str) -> float:
        """Return for how many ms a client has to be held from now on, by these quotas."""
        return max(self._charge(who, key, 0) for key in keys)

    async def hold(self, who: Caller, key: str, delay_ms: float) -> None:
        """Return after the delay, or soon after a change of the quotas has made it shorter."""
        version = self._core.version
        now_ms = self._clock.monotonic_ms()
        until_ms = now_ms + delay_ms
        while until_ms > now_ms:
            await asyncio.sleep(min(until_ms - now_ms, LOOK_AGAIN_MS) / 1_000)
            now_ms = self._clock.monotonic_ms()
            self._follow()
            if self._core.version != version:
                version = self._core.version
                until_ms = min(until_ms, now_ms + self._core.delay_ms(who.principal, who.client_id, key, now_ms))

    async def hold_unread(self, who: Caller, key: str, delay_ms: float) -> None:
        """As `hold`, for a stream whose client may go on to send, into a window that the broker holds in memory.

        Raises:
            ThrottlingQuotaExceeded: too many are held already; the stream is to be ended.
        """
        of_user = MAX_HELD if who.principal == ANONYMOUS else MAX_HELD_OF_USER
        if self._held[who.principal] >= of_user or self._held.total() >= MAX_HELD:
            raise _exceeded(who, key, delay_ms)
        self._held[who.principal] += 1
        try:
            await self.hold(who, key, delay_ms)
        finally:
            self._held[who.principal] -= 1
            self._held += Counter()  # without principals that have none

    def _charge(self, who: Caller, key: str, amount: float) -> float:
        if not self._follow():
            return 0.0
        return self._core.charge(who.principal, who.client_id, key, amount, self._clock.monotonic_ms())

    def _follow(self) -> Mapping[QuotaEntity, Mapping[str, float]]:
        """Return the quotas of the present metadata, by which the core works from now on."""
        quotas = self._image().quotas
        if quotas is not self._quotas:
            self._quotas = quotas
            self._core.follow(quotas, self._clock.monotonic_ms())
        return quotas


class Account:
    """What the messages of one stream are charged to, looked up anew only when a quota has changed.

    A message is charged in one go: bytes and time of the event loop, with one reading of the clock.
    """

    __slots__ = ("_bytes", "_bytes_key", "_manager", "_time", "_version", "_who")

    def __init__(self, manager: QuotaManager, who: Caller, bytes_key: str) -> None:
        self._manager = manager
        self._who = who
        self._bytes_key = bytes_key
        self._bytes: Bucket | None = None
        self._time: Bucket | None = None
        self._version = 0

    def charge(self, size_bytes: int, took_ms: float) -> tuple[str, float]:
        """Charge a message; return the quota that holds the client longest, and for how many ms."""
        manager = self._manager
        manager._follow()
        core = manager._core
        while self._version != core.version:  # looking up may end other buckets, which counts as a change too
            self._version = core.version
            self._bytes = core.find(self._who.principal, self._who.client_id, self._bytes_key)
            self._time = core.find(self._who.principal, self._who.client_id, REQUEST_PERCENTAGE)
        if self._bytes is None and self._time is None:
            return self._bytes_key, 0.0
        now_ms = manager.now_ms()
        delay_ms = 0.0 if self._bytes is None else self._bytes.charge(size_bytes, now_ms)
        if self._time is not None and (for_time_ms := self._time.charge(took_ms, now_ms)) > delay_ms:
            return REQUEST_PERCENTAGE, for_time_ms
        return self._bytes_key, delay_ms


def whole_ms(delay_ms: float) -> int:
    """Return a delay as the wire has it: at least as long."""
    return math.ceil(max(0.0, delay_ms))


def _exceeded(who: Caller, key: str, delay_ms: float) -> ThrottlingQuotaExceeded:
    named = f" with client id {who.client_id!r}" if who.client_id else ""
    return ThrottlingQuotaExceeded(
        f"{who.principal}{named} is over its {key}; try again in {whole_ms(delay_ms)} ms; "
        "raftlog quota list shows the quotas",
        whole_ms(delay_ms),
    )


def mutations(image: MetadataImage, command: MetadataCommand) -> int:
    """Return what a command counts for by controller_mutation_rate.

    Created and deleted partitions count as in KIP-599. Every other change that a client asks for counts as one, which
    Kafka does not count. Commands that only validate, and those that alter quotas, are free.
    """
    match command.WhichOneof("command"):
        case "create_topic":
            create = command.create_topic
            return 0 if create.validate_only else create.partitions
        case "delete_topic":
            topic = image.topic(command.delete_topic.name)
            return 1 if topic is None else len(topic.partitions)
        case "create_partitions":
            topic = image.topic(command.create_partitions.topic)
            return max(1, command.create_partitions.partitions - (0 if topic is None else len(topic.partitions)))
        case "alter_configs":
            return 0 if command.alter_configs.validate_only else 1
        case "update_feature":
            return 0 if command.update_feature.validate_only else 1
        case "alter_users":
            return len(command.alter_users.upsertions) + len(command.alter_users.deletions)
        case "alter_acls":
            return len(command.alter_acls.additions) + len(command.alter_acls.removals)
        case "alter_roles":
            return sum(map(parts_of_role, command.alter_roles.alterations))
        case "elect_leaders":
            return len(command.elect_leaders.partitions)
        case "alter_quotas":
            return 0
        case _:
            return 1


# The interceptor of calls

_client_id: ContextVar[str] = ContextVar("client_id", default="")


class Charging(RewrittenHandlers):
    """Notes the client id in `caller`, and holds unary calls to request_percentage. Runs after the identification."""

    def __init__(self, quotas: QuotaManager, refused: Callable[[Any], None] = lambda context: None) -> None:
        """`refused` is called with the context of each call that is refused."""
        super().__init__()
        self._quotas = quotas
        self._refused = refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method's handler, rewritten."""
        client_id = ""
        for name, value in handler_call_details.invocation_metadata or ():
            if name == CLIENT_ID and isinstance(value, str):
                client_id = unquote(value)[:MAX_CLIENT_ID]
        _client_id.set(client_id)
        return await super().intercept_service(continuation, handler_call_details)

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler with the client id in its `caller`, and a unary one measured."""
        if handler.unary_unary is not None:
            if method in _NEVER_HELD:
                return handler
            return handler._replace(unary_unary=self._measured(handler.unary_unary))
        return preceded(handler, _note_client_id)

    def _measured(self, call: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        quotas = self._quotas

        async def measured(request: Any, context: Any) -> Any:
            await _note_client_id(context)
            who = caller.get()
            if not quotas.counts_time(who):
                return await call(request, context)
            try:
                quotas.admit_call(who)
            except ThrottlingQuotaExceeded as error:
                self._refused(context)
                await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, error)
            work = Measured(call(request, context))
            token = _measure.set(work.meter)
            try:
                return await work
            finally:
                _measure.reset(token)
                quotas.worked(who, work.meter.ms)

        return measured


async def _note_client_id(context: Any) -> None:
    client_id = _client_id.get()
    if client_id:
        caller.set(replace(caller.get(), client_id=client_id))


class Meter:
    """The time that a call or request has taken: of the event loop, and of threads that worked for it."""

    __slots__ = ("ms",)

    def __init__(self) -> None:
        self.ms = 0.0


_measure: ContextVar[Meter | None] = ContextVar("measure", default=None)


class Measured(Awaitable[T]):
    """Awaits a coroutine, and measures how long it kept the event loop busy; its waits do not count."""

    def __init__(self, work: Awaitable[T], meter: Meter | None = None) -> None:
        self._work = work
        self.meter = Meter() if meter is None else meter

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._work.__await__()
        resume: Callable[[], Any] = lambda: next(steps)  # noqa: E731 # replaced below by what sends or throws
        while True:
            begun_s = time.monotonic()
            try:
                yielded = resume()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return] # the work's own result
            finally:
                self.meter.ms += (time.monotonic() - begun_s) * 1_000
            try:
                sent = yield yielded
            except BaseException as error:  # a cancellation: the work decides what to do with it
                resume = _throwing(steps, error)
            else:
                resume = _sending(steps, sent)


def _sending(steps: Any, value: Any) -> Callable[[], Any]:
    return lambda: next(steps) if value is None else steps.send(value)


def _throwing(steps: Any, error: BaseException) -> Callable[[], Any]:
    return lambda: steps.throw(error)


def measured_here(work: Awaitable[T]) -> Awaitable[T]:
    """Return work that runs in a task of its own, and whose time still counts for the call that began it."""
    meter = _measure.get()
    return work if meter is None else Measured(work, meter)


@contextmanager
def charged_to(meter: Meter) -> Iterator[None]:
    """Have `measured_here` and `charge_here` count for a meter until the end of the block."""
    token = _measure.set(meter)
    try:
        yield
    finally:
        _measure.reset(token)


def charge_here(took_ms: float) -> None:
    """Count time that a thread took for the call or request that is being served here."""
    meter = _measure.get()
    if meter is not None:
        meter.ms += took_ms
