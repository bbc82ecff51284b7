"""What TLS, logins with permissions, and quotas cost, for batches of 64 KiB: in throughput and in CPU time.

Each way to run is compared with the way without the one thing that it adds, in pairs of short rounds, one right after
the other, whose order alternates:

    TLS                  beside plaintext
    logins and ACLs      beside TLS
    byte rates           beside plaintext without quotas; never reached
    request_percentage   beside byte rates; never reached

`security` uses clusters of one server, where clients are the larger part of the work, and produces and fetches;
`security-replicated` clusters of three with three replicas and acks=all, where TLS among nodes counts as well, and also
sends one record at a time. CPU time is read from each process's own clock, to the nanosecond; the client is this one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Final

from bench.report import Report
from raftlog import AclBinding, AclOperation, Admin, Consumer, Producer, QuotaEntity, ResourceType, TopicPartition
from raftlog.testing import Cluster

TOPIC: Final = "written"
PLACE: Final = TopicPartition("read", 0)
"""Holds what a round fetches and no more, so that no consumer reads ahead in the next round's time."""
BATCH_BYTES: Final = 64 << 10
VALUE: Final = os.urandom(BATCH_BYTES - 200)
BATCHES: Final = 600
"""Of one round, some 40 MB."""
ROUNDS: Final = 40
"""A round takes 0.04 s or more: the medians of 15 differ by a fifth from run to run."""
REPLICATED_ROUNDS: Final = 15
SINGLES: Final = 100
"""Records of 1 KB sent one at a time, each after the acknowledgement of the previous one."""
USERS: Final = {"admin": "admin's", "tenant": "tenant's"}
UNREACHED: Final[Mapping[str, float]] = {
    "producer_byte_rate": 1e12,
    "consumer_byte_rate": 1e12,
    "request_percentage": 1e5,
}
TLS_KEEPS: Final = 0.75
PERMISSIONS_KEEP: Final = 0.95
QUOTAS_KEEP: Final = 0.98


@dataclass(frozen=True, slots=True)
class Spent:
    """What one round took: MB/s, and milliseconds of CPU time for a MB."""

    mb_per_s: float
    servers_ms: float
    client_ms: float


@dataclass(frozen=True, slots=True)
class Compared:
    """A way, what it is compared with, and the least share of throughput that it is to keep."""

    name: str
    base: str
    keeps: float


PLAIN, TLS, PERMISSIONS, BYTE_RATES, TIME = "plaintext", "TLS", "logins and ACLs", "byte rates", "request_percentage"
COMPARED: Final = (
    Compared(TLS, PLAIN, TLS_KEEPS),
    Compared(PERMISSIONS, TLS, PERMISSIONS_KEEP),
    Compared(BYTE_RATES, PLAIN, QUOTAS_KEEP),
    Compared(TIME, BYTE_RATES, QUOTAS_KEEP),
)
QUOTAS: Final[Mapping[str, frozenset[str]]] = {
    PLAIN: frozenset(),
    BYTE_RATES: frozenset({"producer_byte_rate", "consumer_byte_rate"}),
    TIME: frozenset(UNREACHED),
}
"""The ways that share the plaintext cluster, and the quotas that each has."""


class Side:
    """A cluster, with a producer and a consumer of one user."""

    def __init__(
        self, stack: ExitStack, nodes: int, *, tls: bool = False, users: Mapping[str, str] | None = None
    ) -> None:
        config = {"authorizer": "acl", "super.users": "User:admin"} if users else {}
        cluster = stack.enter_context(Cluster(nodes, tls=tls, users=users, config=config))
        self._clocks = [_clock_of(cluster.pid(node)) for node in cluster.node_ids]
        as_admin = cluster.client_config_of("admin") if users else cluster.client_config
        as_tenant = cluster.client_config_of("tenant") if users else cluster.client_config
        self._admin = stack.enter_context(Admin(cluster.bootstrap, config=as_admin))
        for topic in (TOPIC, PLACE.topic):
            self._admin.create_topic(topic, partitions=1, replication_factor=nodes)
            for operation in (AclOperation.READ, AclOperation.WRITE) if users else ():
                self._admin.create_acls(AclBinding("User:tenant", operation, ResourceType.TOPIC, topic))
        options = {"batch.size": BATCH_BYTES, "linger.ms": 0, "compression.type": "none", **as_tenant}
        self._producer = stack.enter_context(Producer(cluster.bootstrap, config=options))
        self._consumer = stack.enter_context(Consumer(cluster.bootstrap, group_id=None, config=as_tenant))
        self._consumer.assign([PLACE])

    def set_quotas(self, keys: frozenset[str]) -> None:
        """Give every user these quotas, and no others."""
        wanted = {key: rate if key in keys else None for key, rate in UNREACHED.items()}
        self._admin.alter_client_quotas({QuotaEntity(user=""): wanted})

    def fill(self) -> None:
        """Write what a round fetches."""
        for _ in range(BATCHES):
            self._producer.send(PLACE.topic, VALUE)
        self._producer.flush(120)

    def measure(self, work: Callable[[Side], None]) -> Spent:
        """Do BATCHES batches of work."""
        servers_ns, client_ns, begun_s = self._servers_ns(), time.process_time_ns(), time.monotonic()
        work(self)
        took_s = time.monotonic() - begun_s
        mb = BATCHES * BATCH_BYTES / 1e6
        return Spent(
            mb / took_s, (self._servers_ns() - servers_ns) / mb / 1e6, (time.process_time_ns() - client_ns) / mb / 1e6
        )

    def _servers_ns(self) -> int:
        return sum(map(time.clock_gettime_ns, self._clocks))

    def produce(self) -> None:
        for _ in range(BATCHES):
            self._producer.send(TOPIC, VALUE, partition=0)
        self._producer.flush(120)

    def fetch(self) -> None:
        self._consumer.seek(PLACE, 0)
        left = BATCHES
        while left > 0:
            left -= self._consumer.poll_arrow(10.0).num_rows

    def one_by_one_ms(self) -> float:
        """Return how long one record takes."""
        begun_s = time.monotonic()
        for _ in range(SINGLES):
            self._producer.send(TOPIC, VALUE[:1_000], partition=0).result(30)
        return (time.monotonic() - begun_s) / SINGLES * 1e3


def _clock_of(pid: int) -> int:
    """Return the number of a process's clock of CPU time, as `clock_getcpuclockid` does on Linux."""
    return (~pid << 3) | 2


def run(report: Report) -> None:
    """Produce to clusters of one server, and fetch."""
    with ExitStack() as stack:
        plain = Side(stack, 1)
        sides = {PLAIN: plain, TLS: Side(stack, 1, tls=True), PERMISSIONS: Side(stack, 1, users=USERS)}
        sides |= {BYTE_RATES: plain, TIME: plain}
        _compare(report, "produce, one replica", sides, Side.produce, ROUNDS)
        for side in (sides[PLAIN], sides[TLS], sides[PERMISSIONS]):
            side.fill()
        _compare(report, "fetch", sides, Side.fetch, ROUNDS)


def run_replicated(report: Report) -> None:
    """Produce to three replicas."""
    with ExitStack() as stack:
        sides = {PLAIN: Side(stack, 3), TLS: Side(stack, 3, tls=True)}
        _compare(report, "produce, three replicas, acks=all", sides, Side.produce, REPLICATED_ROUNDS)
        waits: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(REPLICATED_ROUNDS):
            for name in (TLS, PLAIN) if number % 2 else (PLAIN, TLS):
                waits[name].append(sides[name].one_by_one_ms())
        ratio = median(mine / base for mine, base in zip(waits[TLS], waits[PLAIN], strict=True))
        figure = f"{ratio:.2f} times, {median(waits[TLS]):.2f} ms"
        report.add("security", "one 1 KB record at a time, three replicas, acks=all, TLS", figure)


def _compare(report: Report, what: str, sides: Mapping[str, Side], work: Callable[[Side], None], rounds: int) -> None:
    """Report the medians of the ratios of pairs; the first pair warms up."""
    for each in COMPARED:
        if each.name not in sides:
            continue
        pairs: list[tuple[Spent, Spent]] = []
        for number in range(rounds + 1):
            spent = {}
            for name in (each.name, each.base) if number % 2 else (each.base, each.name):
                side = sides[name]
                if name in QUOTAS:
                    side.set_quotas(QUOTAS[name])
                spent[name] = side.measure(work)
            if number:
                pairs.append((spent[each.name], spent[each.base]))
        rates = [mine.mb_per_s / base.mb_per_s for mine, base in pairs]
        low, _, high = quantiles(rates, n=4)
        servers = median(mine.servers_ms / base.servers_ms for mine, base in pairs)
        client = median(mine.client_ms / base.client_ms for mine, base in pairs)
        report.add(
            "security",
            f"{what}: {each.name} beside {each.base}",
            f"{median(rates):.3f} of the throughput (half of the pairs {low:.2f}-{high:.2f}), "
            f"{median(mine.mb_per_s for mine, _ in pairs):.0f} MB/s; CPU of servers {servers:.3f} times, "
            f"{median(mine.servers_ms for mine, _ in pairs):.2f} ms/MB, of the client {client:.3f} times, "
            f"{median(mine.client_ms for mine, _ in pairs):.2f} ms/MB",
            f">= {each.keeps:g}",
            median(rates) >= each.keeps,
        )
