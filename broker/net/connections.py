"""Limits on connections: how many at a time, how many of one address, and how fast they may come.

`ConnectionLimits` decides, for one listener; the caller passes the time. The Kafka listener and `EitherFront` accept
connections themselves and ask it first. gRPC accepts its own: it enforces max.connections itself, as a channel option.
`ConnectionWatch` looks for new connections among this process's descriptors and shuts down those beyond the other
limits. So clients reach gRPC directly, without a copy of a byte.

By then gRPC has paid for the connection: memory, a TLS handshake, a timer. So the watch also counts the connections of
each network on which no user logs in, or that a limit refuses (`UnusedConnections`). If they come too fast, `SynFilter`
has the kernel drop that network's further attempts for a while.

A connection that is refused is closed before it is served. A client sees that as a broken connection, and tries again.

`broker/net/calls.py` limits the calls on them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import struct
import sys
import time
from asyncio.trsock import TransportSocket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes import addressof, create_string_buffer
from ipaddress import IPv6Address, ip_address
from itertools import takewhile
from typing import Final, NamedTuple, TypeVar

from broker.clock import Clock
from broker.config.config import BrokerConfig
from broker.descriptors import descriptors
from broker.net.interceptors import Rarely, host_of
from broker.security.caller import network_of
from raftlog._core.security.acls import canonical_host
from raftmeta.image import MetadataImage
from raftmeta.quotas import limit_of_ip
from replication.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

MAX_RATES: Final = 10_000
"""Addresses whose rate is followed; beyond it, the oldest one begins anew."""
MAX_CONNECTIONS: Final = "max.connections"
MAX_CONNECTIONS_PER_IP: Final = "max.connections.per.ip"
LOGIN_TIMEOUT: Final = "connection.login.timeout.ms"
MAX_UNUSED_CONNECTION_RATE: Final = "max.unused.connection.rate"
NO_LIMIT: Final = 2**31 - 1


T = TypeVar("T")


def remembered(kept: dict[str, T], name: str, make: Callable[[], T], most: int = MAX_RATES) -> T:
    """Return what is kept of a name, made now if the name is new. Beyond `most` names the oldest one is dropped."""
    found = kept.get(name)
    if found is None:
        if len(kept) >= most:
            del kept[next(iter(kept))]
        found = kept[name] = make()
    return found


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
        """Refused connections, by the limit; of max.unused.connection.rate, how often a network was held back."""

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
            return self.refuse(host, MAX_CONNECTIONS, self._most, now_ms)
        if self._open[host] >= limit:
            return self.refuse(host, MAX_CONNECTIONS_PER_IP, limit, now_ms)
        rate = self._rate(host)
        if rate is not None and not self._may_open(host, rate, now_ms):
            return self.refuse(host, "connection_creation_rate", rate, now_ms)
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

    def refuse(self, host: str, limit: str, value: float, now_ms: float) -> str:
        """Count and log a connection that is closed for a limit; return the limit."""
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

    def _may_open(self, host: str, rate: float, now_ms: float) -> bool:
        bucket = remembered(self._rates, host, lambda: TokenBucket(rate, self._window_ms))
        if bucket.rate_bytes_per_s != rate:
            bucket.set_rate(rate, now_ms)
        if bucket.ready_at_ms(now_ms) > now_ms:
            return False
        bucket.take(1, now_ms)
        return True


def limits_of(config: BrokerConfig, image: Callable[[], MetadataImage]) -> ConnectionLimits:
    """Return the limits of one of a broker's listeners for clients; two listeners share the descriptors."""
    listeners = 1 if config.kafka_listener is None else 2
    default_rate = config.max_connection_creation_rate

    def rate(host: str) -> float | None:
        own = limit_of_ip(image().quotas, host)
        return own if own is not None else None if default_rate == NO_LIMIT else default_rate

    return ConnectionLimits(
        most=max(1, min(config.max_connections, descriptors().connections // listeners)),
        per_ip=config.max_connections_per_ip,
        overrides=dict(_override(each) for each in config.max_connections_per_ip_overrides),
        rate=rate,
        window_ms=config.quota_window_num * config.quota_window_size_seconds * 1_000,
    )


def _override(text: str) -> tuple[str, int]:
    host, _, limit = text.rpartition(":")
    return host.strip("[]"), int(limit)


# Connections that a listener of our own accepts

GIVES_WAY_MS: Final = 2_000.0
"""A connection without a login gives way to others after this time, which is longer than an honest login takes."""


class Newcomer:
    """A connection that counts. `end` closes it; its listener then calls `close`."""

    __slots__ = ("_newcomers", "_timer", "end", "host", "is_open", "opened_ms")

    def __init__(self, newcomers: Newcomers, host: str, end: Callable[[], object], opened_ms: float) -> None:
        self._newcomers = newcomers
        self.opened_ms = opened_ms
        self._timer: asyncio.TimerHandle | None = None
        self.host = host
        self.end = end
        self.is_open = True

    def wait_for_login(self, login_ms: float, late: Callable[[Newcomer], None]) -> None:
        """Call `late` after that time."""
        self._timer = asyncio.get_running_loop().call_later(login_ms / 1_000, late, self)

    def logged_in(self) -> None:
        """Note that the client has logged in, or need not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._newcomers.forget(self)

    def close(self) -> None:
        """Count it no longer; the second time has no effect."""
        self.logged_in()
        if self.is_open:
            self.is_open = False
            self._newcomers.limits.close(self.host)


class Newcomers:
    """Counts the connections of a listener that accepts them itself, and follows those that have not logged in.

    Those have `login_ms` to do so; there are at most `most` of them, and `most_of_network` of one network. Of too many
    the oldest gives way, of that network or of the one that has most. When max.connections.per.ip is reached, the
    oldest one of the address gives way to a new connection. So silent connections keep no client out, not even one of
    their own network. If the oldest is younger than `GIVES_WAY_MS`, the new one is refused instead: of many clients
    that connect at once, those that came first finish their logins. On the event loop only.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        clock: Clock,
        *,
        login_ms: float | None = None,
        most: int | None = None,
        most_of_network: int | None = None,
    ) -> None:
        """`login_ms`: None if clients need not log in. `most`: at most, and by default, half of max.connections."""
        self.limits = limits
        self._clock = clock
        self._login_ms = login_ms
        self._most = max(1, min(limits.most // 2, limits.most if most is None else most))
        self._most_of_network = most_of_network
        self._waiting: dict[str, dict[Newcomer, None]] = {}
        """Those without a login by network, the oldest first."""
        self._total = 0

    def __len__(self) -> int:
        """Return how many have not logged in."""
        return self._total

    def open(self, host: str, end: Callable[[], object]) -> Newcomer | None:
        """Count a new connection; None: it is refused. `end` closes it, if it has to go before its client does."""
        network, now_ms = network_of(host), self._clock.monotonic_ms()
        limit = self.limits.open(host, now_ms)
        if limit == MAX_CONNECTIONS_PER_IP:
            oldest = next((each for each in self._waiting.get(network, ()) if each.host == host), None)
            if oldest is not None and now_ms - oldest.opened_ms >= GIVES_WAY_MS:
                self._drop(oldest)
                limit = self.limits.open(host, now_ms)
        if limit:
            return None
        opened = Newcomer(self, host, end, now_ms)
        if self._login_ms is not None:
            if not self._make_room(network, host, now_ms):
                self.limits.close(host)
                return None
            self._waiting.setdefault(network, {})[opened] = None
            self._total += 1
            opened.wait_for_login(self._login_ms, self._late)
        return opened

    def _make_room(self, network: str, host: str, now_ms: float) -> bool:
        """Have the oldest connection give way if there are too many; return whether there is room for a new one."""
        of_network = self._waiting.get(network, {})
        if self._most_of_network is not None and len(of_network) >= self._most_of_network:
            oldest, limit, value = next(iter(of_network)), MAX_CONNECTIONS_PER_IP, self._most_of_network
        elif self._total >= self._most:
            crowded = max(self._waiting.values(), key=len)
            oldest, limit, value = next(iter(crowded)), MAX_CONNECTIONS, self._most
        else:
            return True
        if now_ms - oldest.opened_ms < GIVES_WAY_MS:
            self.limits.refuse(host, limit, value, now_ms)
            return False
        self._refuse(oldest, limit, value)
        return True

    def forget(self, connection: Newcomer) -> None:
        """Follow a connection no longer: it has logged in, or is gone."""
        network = network_of(connection.host)
        del self._waiting[network][connection]
        if not self._waiting[network]:
            del self._waiting[network]
        self._total -= 1

    def _late(self, connection: Newcomer) -> None:
        assert self._login_ms is not None, "else there is no timer"
        self._refuse(connection, LOGIN_TIMEOUT, self._login_ms)

    def _refuse(self, connection: Newcomer, limit: str, value: float) -> None:
        self.limits.refuse(connection.host, limit, value, self._clock.monotonic_ms())
        self._drop(connection)

    def _drop(self, connection: Newcomer) -> None:
        connection.close()
        connection.end()


# Connections that come to nothing

UNUSED_BURST_S: Final = 10.0
"""A network may open as many unused connections at once as its rate allows in this time; then some are dropped."""
UNUSED_DEBT_S: Final = 5.0
"""All are dropped once a network has opened what its rate allows in this further time, and for as long at most: so an
honest client there has its turn soon after a flood."""
ENDED_COUNTS: Final = 10
"""As how many a connection counts that had no login, and went on with calls that were refused until it was ended: each
one brings hundreds of calls, which cost more than a connection that is silent."""
MAX_HELD_NETWORKS: Final = 128
"""Networks that the kernel holds back at a time. Each adds instructions to the filter, which the kernel runs for each
new connection, and which has to fit into `net.core.optmem_max`."""


class UnusedConnections:
    """The networks that open connections and do not use them, faster than a rate. Pure; the caller passes the time.

    A connection is unused until its client logs in, or if a limit refuses it. So a fleet of honest clients that
    connects at once goes on as fast as its logins are done. Of a network beyond its burst a share of the attempts is
    dropped, which grows with what counts: about as many get through as the rate allows, evenly spread in time (as RED
    does with packets: Floyd and Jacobson, 1993).

    Invariants: a level is at most the burst and two debts; a network above its burst is in `_beyond`.
    """

    def __init__(self, rate: float) -> None:
        """`rate`: unused connections a second of one network, without limit; `UNUSED_BURST_S` of them at once."""
        self.rate = rate
        self._burst = rate * UNUSED_BURST_S
        self._debt = rate * UNUSED_DEBT_S
        self._levels: dict[str, tuple[float, float]] = {}
        """By network: the unused connections that count, of which `rate` are forgotten each second, and the time."""
        self._beyond: set[str] = set()
        """Networks whose level was above the burst."""

    def opened(self, network: str, now_ms: float, connections: int = 1) -> None:
        """Count a connection that is not used yet, or that a limit has refused; `connections`: as how many."""
        level = min(self._burst + 2 * self._debt, self._level(network, now_ms) + connections)
        remembered(self._levels, network, lambda: (0.0, now_ms))
        self._levels[network] = level, now_ms
        if level > self._burst:
            self._beyond.add(network)

    def used(self, network: str, now_ms: float) -> None:
        """Count a connection no longer: its client has logged in."""
        if network in self._levels:
            self._levels[network] = max(0.0, self._level(network, now_ms) - 1), now_ms

    def dropped(self, now_ms: float) -> dict[str, float]:
        """Return the share of further attempts to drop, above 0 and at most 1, of each network beyond its burst."""
        shares = {network: (self._level(network, now_ms) - self._burst) / self._debt for network in self._beyond}
        self._beyond = {network for network, share in shares.items() if share > 0}
        most = sorted(self._beyond, key=lambda network: -shares[network])[:MAX_HELD_NETWORKS]
        return {network: min(1.0, shares[network]) for network in most}

    def _level(self, network: str, now_ms: float) -> float:
        level, at_ms = self._levels.get(network, (0.0, now_ms))
        return max(0.0, level - self.rate * (now_ms - at_ms) / 1_000)


SO_ATTACH_FILTER: Final = 26
SO_DETACH_FILTER: Final = 27
_SKIP, _TAKE = 0, 0xFFFF_FFFF
"""What a filter returns: how many bytes of a segment pass."""
_NETWORK_HEADER: Final = 0xFFF0_0000
"""SKF_NET_OFF: offsets from here count from the IP header, others from the TCP header."""
_RANDOM: Final = 0xFFFF_F000 + 56
"""SKF_AD_OFF + SKF_AD_RANDOM: here is a random number of 32 bits."""


def syn_filter(dropped: Mapping[str, float]) -> bytes:
    """Return a program of classic BPF that drops a share of the attempts to connect, by network.

    An array of `struct sock_filter`, each u16 code, u8 jump if true, u8 jump if false, u32 operand, in the machine's
    byte order (Linux, Documentation/networking/filter.rst). A connection inherits the program of its listener, so all
    segments but the first one of a connection (SYN without ACK) have to pass.
    """
    load_byte, load_word, and_, if_equal, if_greater, go, return_ = 0x30, 0x20, 0x54, 0x15, 0x25, 0x05, 0x06
    v4, v6 = [], []
    for network, share in dropped.items():
        verdict = [
            (load_word, 0, 0, _RANDOM),
            (if_greater, 1, 0, min(_TAKE, int(share * 2**32))),
            (return_, 0, 0, _SKIP),
            (return_, 0, 0, _TAKE),
        ]
        address = ip_address(network.removesuffix("/64"))
        if isinstance(address, IPv6Address):
            high, low = struct.unpack(">II", address.packed[:8])
            v6 += [
                (load_word, 0, 0, _NETWORK_HEADER + 8),
                (if_equal, 0, len(verdict) + 2, high),
                (load_word, 0, 0, _NETWORK_HEADER + 12),
                (if_equal, 0, len(verdict), low),
                *verdict,
            ]
        else:
            v4 += [(if_equal, 0, len(verdict), int(address)), *verdict]
    program = [
        (load_byte, 0, 0, 13),  # the flags of the TCP header
        (and_, 0, 0, 0x12),
        (if_equal, 1, 0, 0x02),  # SYN without ACK
        (return_, 0, 0, _TAKE),
        (load_byte, 0, 0, _NETWORK_HEADER),
        (and_, 0, 0, 0xF0),
        (if_equal, 0, 1, 0x60),
        (go, 0, 0, len(v4) + 2),
        (load_word, 0, 0, _NETWORK_HEADER + 12),  # the source address
        *v4,
        (return_, 0, 0, _TAKE),
        *v6,
        (return_, 0, 0, _TAKE),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


class SynFilter:
    """Has the kernel drop attempts to connect to a port of this process; Linux only, elsewhere it does nothing.

    The client's kernel tries again after 1, 3, 7, 15 s…, so an honest client comes late and sees no error.
    """

    def __init__(self) -> None:
        self.dropped: dict[str, float] = {}
        """The shares that it drops, by network."""
        self._works = sys.platform.startswith("linux")

    def drop(self, listening: Iterable[tuple[int, int]], dropped: dict[str, float]) -> None:
        """Drop these shares of attempts from now on, by network. `listening`: descriptors and inodes of the port."""
        if dropped == self.dropped:
            return
        self.dropped = dropped
        if not self._works:
            return
        try:
            for fd, inode in listening:
                with _socket_of(fd, inode) as own:
                    if own is not None:
                        self._attach(own, dropped)
        except OSError as error:
            self._works = False
            logger.warning("the kernel does not hold floods of connections back: %s", error.strerror or error)

    @staticmethod
    def _attach(own: socket.socket, dropped: dict[str, float]) -> None:
        if dropped:
            program = syn_filter(dropped)
            place = create_string_buffer(program, len(program))
            fprog = struct.pack("@HP", len(program) // 8, addressof(place))
            own.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, fprog)
        else:
            own.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


# Connections that gRPC has accepted

LOOK_EVERY_S: Final = 0.1
SHARE_OF_TIME: Final = 0.02
"""Looking takes at most this share of a core: with very many connections, the pauses grow."""
URGENT_SHARE_OF_TIME: Final = 0.1
"""The same while a connection is to be shut down that no look has seen."""
_ESTABLISHED: Final = b"\x01"
"""The state of a TCP connection, the first byte of Linux' TCP_INFO. Elsewhere no connection is certainly there."""
_DESCRIPTORS: Final = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"


class _Found(NamedTuple):
    fd: int
    inode: int
    host: str
    """Of the peer; "": no connection of the port."""
    port: int
    listens: bool = False
    """Whether it is the port's listening socket."""


class ConnectionWatch:
    """Shuts down the connections of a port of this process that are beyond a limit; `run` runs as a task.

    A connection is served until the watch sees it, some tenths of a second at most. One that was opened and closed in
    between does not count.

    With `login_ms`, clients have to log in within that time. When max.connections.per.ip is reached, the oldest
    connection of the address without a login gives way to the new one. Such connections are at most half of
    max.connections; of too many, the addresses that have most lose their oldest ones.

    A network that opens more than `unused_rate` connections a second without a use for them is held back
    (`UnusedConnections`): the kernel drops its attempts to connect for some seconds.
    """

    def __init__(
        self,
        port: int,
        limits: ConnectionLimits,
        clock: Clock,
        login_ms: float | None = None,
        unused_rate: float = NO_LIMIT,
    ) -> None:
        self._unused = UnusedConnections(unused_rate)
        self._filter = SynFilter()
        self._listening: dict[int, int] = {}
        """The inodes of the port's listening sockets by descriptor."""
        self._login_ms = login_ms
        self._strangers: dict[str, dict[int, tuple[_Found, float]]] = {}
        """Connections without a login, by address and peer's port, each with its first sight; the oldest first."""
        self._logins: set[tuple[str, int]] = set()
        """Peers that were logged in since the last look began."""
        self._port = port
        self._limits = limits
        self._clock = clock
        self._known: dict[int, _Found | None] = {}
        """Sockets by inode: a connection that counts; None: not of this port, or refused."""
        self._peers: dict[tuple[str, int], _Found] = {}
        """Connections that count, by the peer's address and port."""
        self._ended: set[int] = set()
        """Those of them that `end` has shut down, by inode."""
        self._ending: dict[tuple[str, int], str] = {}
        """Peers that no look has seen, whose connections the next one shuts down; each with the limit that is why."""
        self._is_urgent = asyncio.Event()
        self._busy_s = 0.0

    def end(self, peer: str, limit: str) -> None:
        """Shut down the connection of a gRPC peer, `ipv4:127.0.0.1:4321`: at once, or by a look that comes soon."""
        address = address_of(peer)
        if (found := self._peers.get(address)) is not None:
            self._end(found, limit)
        else:
            self._ending[address] = limit
            self._is_urgent.set()

    def is_connected(self, peer: str) -> bool:
        """Return whether a look has seen the connection of a gRPC peer, and neither end has closed it since."""
        found = self._peers.get(address_of(peer))
        return found is not None and _is_established(found)

    def logged_in(self, peer: str) -> None:
        """Note that a gRPC peer has made a call with a login."""
        self._logins.add(address_of(peer))

    @property
    def strangers(self) -> int:
        """How many connections have not logged in."""
        return sum(map(len, self._strangers.values()))

    async def run(self) -> None:
        """Look again and again, for ever."""
        while True:
            try:
                await self.look()
            except OSError as error:  # no descriptor is left to look with
                logger.warning("connections are not watched: %s", error.strerror or error)
            shortest_s = self._busy_s / URGENT_SHARE_OF_TIME - self._busy_s
            await asyncio.sleep(shortest_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.pause_s - shortest_s):
                    await self._is_urgent.wait()

    @property
    def pause_s(self) -> float:
        """The pause after the last look: by the processor's time that it took, since waiting costs no share of a core.

        On a machine that is overrun a look may wait for seconds; just then the next one has to come soon.
        """
        return max(LOOK_EVERY_S, self._busy_s / SHARE_OF_TIME - self._busy_s)

    async def look(self) -> None:
        """Count the connections that are new, shut down those beyond a limit, and forget those that are gone."""
        ending, self._ending = self._ending, {}
        self._is_urgent.clear()
        logins, self._logins = self._logins, set()
        try:
            (found, present), scanning_s = await asyncio.to_thread(self._timed_scan, frozenset(self._known))
        except OSError:
            self._logins |= logins
            self._ending = {**ending, **self._ending}
            raise
        begun_s = time.thread_time()
        now_ms = self._clock.monotonic_ms()
        for inode in self._known.keys() - present:
            gone = self._known.pop(inode)
            if gone is not None:
                self._limits.close(gone.host)
                self._is_no_stranger(gone)
                self._is_no_peer(gone)
        logins |= self._logins
        self._let_in(logins, now_ms)
        # A socket that another thread looks at has a second descriptor for a moment: the next look counts it, once.
        descriptors = Counter(each.inode for each in found)
        for each in found:
            if descriptors[each.inode] > 1:
                continue
            self._known[each.inode] = each if each.host and self._admit(each, now_ms) else None
            if each.listens:
                self._listening[each.fd] = each.inode
        self._let_in(logins, now_ms)
        self._turn_out(now_ms)
        self._hold_back(now_ms)
        for address, limit in ending.items():
            if (known := self._peers.get(address)) is not None:
                self._end(known, limit)
        self._busy_s = scanning_s + time.thread_time() - begun_s

    def _hold_back(self, now_ms: float) -> None:
        """Have the kernel drop the attempts of networks that open too many connections without a use for them."""
        dropped = self._unused.dropped(now_ms)
        for network in dropped.keys() - self._filter.dropped.keys():
            self._limits.refuse(network, MAX_UNUSED_CONNECTION_RATE, self._unused.rate, now_ms)
        self._filter.drop(self._listening.items(), dropped)

    def _end(self, found: _Found, limit: str) -> None:
        if found.inode not in self._ended:
            self._ended.add(found.inode)
            self._limits.refused[limit] += 1
            if found.port in self._strangers.get(found.host, {}):
                self._unused.opened(network_of(found.host), self._clock.monotonic_ms(), ENDED_COUNTS)
            _shut_down(found)

    def _is_no_peer(self, found: _Found) -> None:
        self._ended.discard(found.inode)
        address = found.host, found.port
        if (present := self._peers.get(address)) is not None and present.inode == found.inode:
            del self._peers[address]

    def _admit(self, found: _Found, now_ms: float) -> bool:
        """Count a new connection, and return True; or shut it down."""
        limit = self._limits.open(found.host, now_ms)
        if limit == MAX_CONNECTIONS_PER_IP and self._strangers.get(found.host):
            oldest, _ = next(iter(self._strangers[found.host].values()))
            self._drop(oldest)
            limit = self._limits.open(found.host, now_ms)
        if limit:
            self._unused.opened(network_of(found.host), now_ms)
            _shut_down(found)
            return False
        self._peers[found.host, found.port] = found
        if self._login_ms is not None:
            self._unused.opened(network_of(found.host), now_ms)
            self._strangers.setdefault(found.host, {})[found.port] = found, now_ms
        return True

    def _let_in(self, logins: set[tuple[str, int]], now_ms: float) -> None:
        for host, port in logins:
            if self._strangers.get(host, {}).pop(port, None) is not None:
                self._unused.used(network_of(host), now_ms)

    def _turn_out(self, now_ms: float) -> None:
        """Shut down connections that have not logged in in time, and some of too many."""
        login_ms = self._login_ms
        if login_ms is None:
            return
        self._strangers = {host: each for host, each in self._strangers.items() if each}
        late: list[_Found] = []
        for each in self._strangers.values():
            late += [found for found, _ in takewhile(lambda stranger: now_ms - stranger[1] > login_ms, each.values())]
        for found in late:
            self._limits.refuse(found.host, LOGIN_TIMEOUT, login_ms, now_ms)
            self._drop(found)
        excess = self.strangers - max(1, self._limits.most // 2)
        if excess > 0:
            # Of n of an address the oldest has rank -n, so each one dropped is of the address that then has most.
            ranked = sorted(
                (index - len(each), seen_ms, found)
                for each in self._strangers.values()
                for index, (found, seen_ms) in enumerate(each.values())
            )
            for _, _, found in ranked[:excess]:
                self._limits.refuse(found.host, MAX_CONNECTIONS, self._limits.most, now_ms)
                self._drop(found)

    def _drop(self, found: _Found) -> None:
        self._is_no_stranger(found)
        self._is_no_peer(found)
        self._limits.close(found.host)
        self._known[found.inode] = None
        _shut_down(found)

    def _is_no_stranger(self, found: _Found) -> None:
        of_host = self._strangers.get(found.host, {})
        if found.port in of_host and of_host[found.port][0].inode == found.inode:
            del of_host[found.port]

    def _timed_scan(self, known: frozenset[int]) -> tuple[tuple[list[_Found], set[int]], float]:
        """Return what `_scan` does, and the processor's time that it took."""
        begun_s = time.thread_time()
        return self._scan(known), time.thread_time() - begun_s

    def _scan(self, known: frozenset[int]) -> tuple[list[_Found], set[int]]:
        return _sockets_at(self._port, known)


def _sockets_at(port: int, known: frozenset[int]) -> tuple[list[_Found], set[int]]:
    """Return the process's sockets that are not `known`, and the inodes of all; only those at `port` have a host."""
    found, present = [], set()
    for name in os.listdir(_DESCRIPTORS):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed meanwhile
            continue
        if stat.S_ISSOCK(status.st_mode):
            present.add(status.st_ino)
            if status.st_ino not in known:
                socket_ = _found(port, int(name), status.st_ino)
                if socket_ is not None:
                    found.append(socket_)
    return found, present


def _found(local_port: int, fd: int, inode: int) -> _Found | None:
    """Return what the socket is, None if it is gone."""
    try:
        with _socket_of(fd, inode) as own:
            if own is None:
                return None
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockname()[1] == local_port:
                if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return _Found(fd, inode, "", 0, listens=True)
                host, port = own.getpeername()[:2]
                return _Found(fd, inode, canonical_host(str(host)), port)
    except OSError:
        pass  # a connection that has just ended
    return _Found(fd, inode, "", 0)


def shut_down_peers(port: int, peers: Iterable[str]) -> None:
    """Shut down the connections of gRPC peers, `ipv4:127.0.0.1:4321`, at a port of this process. For any thread.

    Raises:
        OSError: no descriptor is left to look with.
    """
    addresses = {address_of(peer) for peer in peers}
    found, _ = _sockets_at(port, frozenset())
    for each in found:
        if (each.host, each.port) in addresses:
            _shut_down(each)


def address_of(peer: str) -> tuple[str, int]:
    """Return the address and port of a gRPC peer, `ipv4:127.0.0.1:4321`."""
    return host_of(peer), int(peer.rpartition(":")[2])


@contextmanager
def _socket_of(fd: int, inode: int) -> Iterator[socket.socket | None]:
    """Yield a socket that the process has under a descriptor; None: that has become another one's, or a file's.

    Raises:
        OSError: it is closed.
    """
    own_fd = os.dup(fd)
    try:
        own = socket.socket(fileno=own_fd) if os.fstat(own_fd).st_ino == inode else None
    except OSError:
        os.close(own_fd)
        raise
    if own is None:
        os.close(own_fd)
        yield None
        return
    with own:
        yield own


def is_established(own: socket.socket | TransportSocket) -> bool:
    """Return whether neither end of a connection has closed it; False where the system does not say."""
    try:
        return own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == _ESTABLISHED
    except (AttributeError, OSError):
        return False


def _is_established(found: _Found) -> bool:
    try:
        with _socket_of(found.fd, found.inode) as own:
            return own is not None and is_established(own)
    except OSError:
        return False


def _shut_down(found: _Found) -> None:
    """Shut a connection down, unless its descriptor has become another one's; gRPC then closes it."""
    try:
        with _socket_of(found.fd, found.inode) as own:
            if own is not None:
                own.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the client was quicker
