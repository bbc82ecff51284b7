"""Limits on connections and streams: how many at a time, how many of one address or user, and how fast they may come.

`ConnectionLimits` decides, for one listener; the caller passes the time. The Kafka listener and `EitherFront` accept
connections themselves and ask it first. gRPC accepts its own: it enforces max.connections itself, as a channel option.
`ConnectionWatch` looks for new connections among this process's descriptors and shuts down those beyond the other
limits. So clients reach gRPC directly, without a copy of a byte.

A connection that is refused is closed before it is served. A client sees that as a broken connection, and tries again.

`StreamLimits`, an interceptor, counts the streams of each user and address, and refuses one too many with
RESOURCE_EXHAUSTED and BROKER_OVERLOADED before its first message is read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import grpc

from broker.clock import Clock
from broker.config.config import BrokerConfig
from broker.net.interceptors import Rarely, RewrittenHandlers, host_of, preceded
from broker.security.authorizer import NODE_PREFIX
from broker.security.caller import caller
from broker.security.client_listener import UNKNOWN_HOST
from raftlog._client.connections import refuse
from raftlog.errors import BrokerOverloaded
from raftmeta.acls import ANONYMOUS, USER_PREFIX, canonical_host
from raftmeta.image import MetadataImage
from raftmeta.quotas import limit_of_ip
from replication.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

MAX_RATES: Final = 10_000
"""Addresses whose rate is followed; beyond it, the oldest one begins anew."""
MAX_DESCRIPTORS: Final = 1 << 20
_NO_LIMIT: Final = 2**31 - 1


class ConnectionLimits:
    """The open connections of one listener, by address. On the event loop only."""

    def __init__(
        self,
        *,
        most: int,
        per_ip: int,
        overrides: Mapping[str, int] | None = None,
        rate: Callable[[str], float | None] = lambda host: None,
        window_ms: float = 1_000.0,
    ) -> None:
        """`overrides`: in place of `per_ip`, by address. `rate`: an address's new connections a second; None: no limit.

        `window_ms`: an address may open at once what its rate allows in this time.
        """
        self._most = most
        self._per_ip = per_ip
        self._overrides = {canonical_host(host): limit for host, limit in (overrides or {}).items()}
        self._rate = rate
        self._window_ms = window_ms
        self._open: Counter[str] = Counter()
        self._total = 0
        self._rates: dict[str, TokenBucket] = {}
        self._logged = Rarely()
        self.refused: Counter[str] = Counter()
        """Refused connections, by the limit."""

    @property
    def most(self) -> int:
        """How many connections may be open at a time."""
        return self._most

    @property
    def total(self) -> int:
        """How many connections are open."""
        return self._total

    def count(self, host: str) -> int:
        """Return how many connections of one address are open."""
        return self._open[host]

    def open(self, host: str, now_ms: float) -> str:
        """Count a new connection and return "", or the limit that refuses it. Then it does not count."""
        limit = self._overrides.get(host, self._per_ip)
        if self._total >= self._most:
            return self._refuse(host, "max.connections", self._most, now_ms)
        if self._open[host] >= limit:
            return self._refuse(host, "max.connections.per.ip", limit, now_ms)
        rate = self._rate(host)
        if rate is not None and not self._may_open(host, rate, now_ms):
            return self._refuse(host, "connection_creation_rate", rate, now_ms)
        self._total += 1
        self._open[host] += 1
        return ""

    def close(self, host: str) -> None:
        """Forget a connection that counted."""
        assert self._open[host] > 0, "only a connection that counted is closed"
        self._total -= 1
        self._open[host] -= 1
        if not self._open[host]:
            del self._open[host]

    def _may_open(self, host: str, rate: float, now_ms: float) -> bool:
        bucket = self._rates.get(host)
        if bucket is None:
            if len(self._rates) >= MAX_RATES:
                del self._rates[next(iter(self._rates))]
            bucket = self._rates[host] = TokenBucket(rate, self._window_ms)
        elif bucket.rate_bytes_per_s != rate:
            bucket.set_rate(rate, now_ms)
        if bucket.ready_at_ms(now_ms) > now_ms:
            return False
        bucket.take(1, now_ms)
        return True

    def _refuse(self, host: str, limit: str, value: float, now_ms: float) -> str:
        self.refused[limit] += 1
        if self._logged.may_log((host, limit), now_ms):
            logger.warning(
                "connections refused",
                extra={
                    "event": "connections_refused",
                    "host": host,
                    "limit": limit,
                    "value": value,
                    "open": self._total,
                },
            )
        return limit


def descriptors_for_connections() -> int:
    """Raise this process's limit of descriptors as far as the system allows; return how many connections may have.

    Half of them are kept back for files: the segments of partitions, checkpoints, and connections to other nodes.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(MAX_DESCRIPTORS, MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            pass  # it stays as it is
    return min(MAX_DESCRIPTORS, soft if soft != resource.RLIM_INFINITY else MAX_DESCRIPTORS) // 2


def limits_of(config: BrokerConfig, image: Callable[[], MetadataImage]) -> ConnectionLimits:
    """Return the limits of one of a broker's listeners for clients; two listeners share the descriptors."""
    listeners = 1 if config.kafka_listener is None else 2
    default_rate = config.max_connection_creation_rate

    def rate(host: str) -> float | None:
        own = limit_of_ip(image().quotas, host)
        return own if own is not None else None if default_rate == _NO_LIMIT else default_rate

    return ConnectionLimits(
        most=max(1, min(config.max_connections, descriptors_for_connections() // listeners)),
        per_ip=config.max_connections_per_ip,
        overrides=dict(_override(each) for each in config.max_connections_per_ip_overrides),
        rate=rate,
        window_ms=config.quota_window_num * config.quota_window_size_seconds * 1_000,
    )


def _override(text: str) -> tuple[str, int]:
    host, _, limit = text.rpartition(":")
    return host.strip("[]"), int(limit)


# Connections that gRPC has accepted

LOOK_EVERY_S: Final = 0.1
SHARE_OF_TIME: Final = 0.02
"""Looking takes at most this share of a core: with very many connections, the pauses grow."""
_DESCRIPTORS: Final = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"


class _Found(NamedTuple):
    fd: int
    inode: int
    host: str


class ConnectionWatch:
    """Shuts down the connections of a port of this process that are beyond a limit; `run` runs as a task.

    A connection is served until the watch sees it, some tenths of a second at most. One that was opened and closed in
    between does not count.
    """

    def __init__(self, port: int, limits: ConnectionLimits, clock: Clock) -> None:
        self._port = port
        self._limits = limits
        self._clock = clock
        self._known: dict[int, str | None] = {}
        """Sockets by inode: the address of a connection that counts; None: not of this port, or refused."""

    async def run(self) -> None:
        """Look again and again, for ever."""
        while True:
            begun_ms = self._clock.monotonic_ms()
            try:
                await self.look()
            except OSError as error:  # no descriptor is left to look with
                logger.warning("connections are not watched: %s", error.strerror or error)
            took_s = (self._clock.monotonic_ms() - begun_ms) / 1_000
            await asyncio.sleep(max(LOOK_EVERY_S, took_s / SHARE_OF_TIME - took_s))

    async def look(self) -> None:
        """Count the connections that are new, shut down those beyond a limit, and forget those that are gone."""
        found, present = await asyncio.to_thread(self._scan, frozenset(self._known))
        now_ms = self._clock.monotonic_ms()
        for inode in self._known.keys() - present:
            host = self._known.pop(inode)
            if host is not None:
                self._limits.close(host)
        for each in found:
            refused = bool(each.host) and bool(self._limits.open(each.host, now_ms))
            self._known[each.inode] = None if refused or not each.host else each.host
            if refused:
                _shut_down(each)

    def _scan(self, known: frozenset[int]) -> tuple[list[_Found], set[int]]:
        """Return the sockets that are new, and the inodes of all."""
        found, present = [], set()
        for name in os.listdir(_DESCRIPTORS):
            try:
                status = os.fstat(int(name))
            except OSError:  # closed meanwhile
                continue
            if stat.S_ISSOCK(status.st_mode):
                present.add(status.st_ino)
                if status.st_ino not in known:
                    host = self._host(int(name), status.st_ino)
                    if host is not None:
                        found.append(_Found(int(name), status.st_ino, host))
        return found, present

    def _host(self, fd: int, inode: int) -> str | None:
        """Return the peer's address; "" if the socket is no connection of the port, None if it is gone."""
        try:
            with socket.socket(fileno=os.dup(fd)) as own:
                if os.fstat(own.fileno()).st_ino != inode:
                    return None
                if own.family not in (socket.AF_INET, socket.AF_INET6) or own.getsockname()[1] != self._port:
                    return ""
                return canonical_host(str(own.getpeername()[0]))
        except OSError:  # the listening socket, or a connection that has just ended
            return ""


def _shut_down(found: _Found) -> None:
    """Shut a connection down, unless its descriptor has become another one's; gRPC then closes it."""
    try:
        with socket.socket(fileno=os.dup(found.fd)) as own:
            if os.fstat(own.fileno()).st_ino == found.inode:
                own.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the client was quicker


class StreamLimits(RewrittenHandlers):
    """Bounds the open streams of each user and of each address. Runs after the identification.

    User:ANONYMOUS is no single user, and has no limit of its own; nor have addresses that a front hides.
    """

    def __init__(self, per_user: int, per_ip: int, clock: Clock) -> None:
        super().__init__()
        self._per_user = per_user
        self._per_ip = per_ip
        self._clock = clock
        self._open: Counter[tuple[str, str]] = Counter()
        self._logged = Rarely()

    @property
    def open(self) -> int:
        """How many pairs of limit and user or address have open streams."""
        return len(self._open)

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler of a stream with the check before it."""
        return handler if handler.unary_unary is not None else preceded(handler, self._enter)

    async def _enter(self, context: Any) -> None:
        """Count the stream until its task ends, or abort it."""
        who = caller.get()
        host = who.host or host_of(context.peer())
        places = []
        if who.principal != ANONYMOUS and who.principal.startswith(USER_PREFIX):
            places.append(("max.streams.per.user", who.principal, self._per_user))
        if host != UNKNOWN_HOST and not who.principal.startswith(NODE_PREFIX):
            places.append(("max.streams.per.ip", host, self._per_ip))
        for key, name, limit in places:
            if self._open[key, name] >= limit:
                self._log(key, name, limit, host)
                await refuse(
                    context,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    BrokerOverloaded(f"{name} has {key}={limit} open streams; close some, and try again"),
                )
        task = asyncio.current_task()
        assert task is not None, "gRPC serves each call in a task"
        counted = [(key, name) for key, name, _ in places]
        self._open.update(counted)

        def leave(_: object) -> None:
            for place in counted:
                self._open[place] -= 1
                if not self._open[place]:
                    del self._open[place]

        task.add_done_callback(leave)

    def _log(self, key: str, name: str, limit: int, host: str) -> None:
        if self._logged.may_log((key, host), self._clock.monotonic_ms()):
            logger.warning(
                "streams refused",
                extra={"event": "streams_refused", "host": host, "of": name, "limit": key, "value": limit},
            )
