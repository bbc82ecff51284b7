"""Hostile clients: five attacks at once against three secured servers, beside honest clients.

The servers use TLS, logins, ACLs and quotas. The attacks are those of strangers and of a user with few rights:

    messages    anonymous logins of 30 MiB each, 48 at a time
    sockets     5 000 silent TCP connections and 2 800 that stop in the middle of a TLS handshake, opened again as they
                are closed, from eight addresses
    streams     fetch streams of a user without rights on twelve connections, as many as each takes in a second, given
                up and opened again
    ids         a user with Write on one topic, who writes there with producer ids and epochs that it made up
    logins      wrong passwords for many names, forty exchanges at a time

Honest clients send one record after the other to each partition. Their 99th percentile, the memory of the servers and
the epochs of leaders, brokers and controller are compared with those of calm rounds of the same run. Attackers run in
processes of low priority: they have the time that the servers leave them, as attackers on other machines would.

Even so, they take processors from the servers, which attackers on other machines would not. So there is a third kind of
round, beside processes of the same priority that compute for as long as the attackers did, and attack nothing: what an
attack does beyond that is what it does to the servers.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPException
from statistics import median
from typing import Any, Final
from urllib.request import urlopen

import grpc
import psutil
import pyarrow as pa
from scramp import ScramClient

from bench.report import Report, quantile
from raftlog import AclBinding, AclOperation, Admin, Producer, QuotaEntity, ResourceType
from raftlog.errors import RaftlogError
from raftlog.format import Columns, encode_batch
from raftlog.format import wire as format_wire
from raftlog.testing import Cluster
from raftlog.v1 import log_pb2, security_pb2, security_pb2_grpc

NODES: Final = 3
TOPIC, OWN = "honest", "mallorys"
USERS: Final = {"admin": "admin's", "honest": "honest's", "mallory": "mallory's", "guessed": "guessed's"}
"""Of `guessed` the attackers guess the password, so brokers refuse that user from their address, which is ours."""
ROUNDS: Final = 3
CALM_S: Final = 15.0
ATTACK_S: Final = 30.0
SETTLE_S: Final = 3.0
"""Before an attack counts: its connections are open by then."""
PACE_S: Final = 0.02
"""Between two records of an honest client."""
MIB: Final = 1 << 20
MESSAGES, MESSAGE_BYTES = 48, 30 * MIB
SILENT, HALF = 5_000, 2_800
ADDRESSES: Final = tuple(f"127.0.0.{number}" for number in range(2, 10))
STREAMS, STREAMS_PER_CONNECTION = 12_000, 1_000
LOGINS: Final = 40
ATTACKS: Final = ("messages", "sockets", "streams", "ids", "logins")
SLOWER: Final = 2.0
PIECE_S: Final = 0.005
"""Processes that only compute do so for this time without a pause."""
MEMORY_BYTES: Final = 256 * MIB
WAIT_S: Final = 60.0


@dataclass
class Figures:
    """What calm rounds and rounds under attack have measured. Times in s."""

    calm: list[list[float]] = field(default_factory=list)
    attacked: list[list[float]] = field(default_factory=list)
    busy: list[list[float]] = field(default_factory=list)
    """Beside processes that compute for as long as the attackers."""
    failures: list[str] = field(default_factory=list)
    """Errors that honest clients saw."""
    grown_bytes: dict[int, int] = field(default_factory=dict)
    """By node: the most memory under attack beyond the most in calm."""
    epochs: list[object] = field(default_factory=list)
    """Epochs of leaders, brokers and the controller before and after each round."""
    lost_leases: int = 0
    done: dict[str, dict[str, int]] = field(default_factory=dict)
    """What each attack did."""

    def slower(self, others: list[list[float]]) -> float:
        """Return the 99th percentile under attack as a multiple of that of the other round beside it; the median."""
        return median(
            quantile(under, 0.99) / quantile(other, 0.99) for other, under in zip(others, self.attacked, strict=True)
        )


def secured_cluster() -> Cluster:
    """Return three servers with all that defends them, for attackers who know a user with few rights."""
    config: dict[str, Any] = {"authorizer": "acl", "super.users": "User:admin", "metrics.listener": "127.0.0.1:0"}
    return Cluster(NODES, users=USERS, config=config)


def prepare(cluster: Cluster) -> None:
    """Create topics, permissions and quotas."""
    with Admin(cluster.bootstrap, config=cluster.client_config_of("admin")) as admin:
        admin.create_topic(TOPIC, partitions=NODES, replication_factor=NODES, configs={"min.insync.replicas": "2"})
        admin.create_topic(OWN, partitions=NODES, replication_factor=NODES)
        for user, topic in (("honest", TOPIC), ("mallory", OWN)):
            admin.create_acls(AclBinding(f"User:{user}", AclOperation.WRITE, ResourceType.TOPIC, topic))
        admin.alter_client_quotas({QuotaEntity(user=""): {"producer_byte_rate": 10e6, "request_percentage": 50}})


def measure(
    cluster: Cluster, attacks: tuple[str, ...] = ATTACKS, rounds: int = ROUNDS, *, busy: bool = False
) -> Figures:
    """Run calm rounds and rounds under attack by turns, with `busy` also those beside processes that only compute."""
    figures = Figures()
    with Honest(cluster) as honest, Memory(cluster, figures) as memory, _attackers(cluster, attacks) as attackers:
        honest.round(SETTLE_S)
        for _ in range(rounds):
            figures.epochs.append(_epochs(cluster))
            memory.is_calm = True
            figures.calm.append(honest.round(CALM_S))
            memory.is_calm = False
            for attacker in attackers:
                attacker.command("attack")
            honest.round(SETTLE_S)
            computed_s = [attacker.computed_s() for attacker in attackers]
            figures.attacked.append(honest.round(ATTACK_S))
            computed_s = [attacker.computed_s() - s for attacker, s in zip(attackers, computed_s, strict=True)]
            for attacker in attackers:
                attacker.command("rest")
            honest.round(SETTLE_S)
            figures.epochs.append(_epochs(cluster))
            if busy:
                with _computing([s / ATTACK_S for s in computed_s]):
                    figures.busy.append(honest.round(ATTACK_S))
        figures.failures = honest.failures
        for attacker in attackers:
            figures.done[attacker.name] = attacker.counts()
    return figures


def _epochs(cluster: Cluster) -> object:
    with Admin(cluster.bootstrap, config=cluster.client_config_of("admin")) as admin:
        cluster_ = admin.describe_cluster()
        leaders = [(part.leader, part.leader_epoch) for part in admin.describe_topic(TOPIC).partitions]
        brokers = sorted((broker.broker_id, broker.broker_epoch, broker.fenced) for broker in cluster_.brokers)
        return leaders, brokers, admin.describe_quorum().leader_epoch


class Honest:
    """Clients that send one record at a time to each partition, and measure."""

    def __init__(self, cluster: Cluster) -> None:
        self.failures: list[str] = []
        config = {"linger.ms": 0, **cluster.client_config_of("honest")}
        self._producers = [Producer(cluster.bootstrap, config=config) for _ in range(NODES)]

    def __enter__(self) -> Honest:
        return self

    def __exit__(self, *_: object) -> None:
        for producer in self._producers:
            producer.close()

    def round(self, for_s: float) -> list[float]:
        """Send for so long; return how long each record took."""
        found: list[float] = []
        until_s = time.monotonic() + for_s

        def send(producer: Producer, partition: int) -> None:
            while (begun_s := time.monotonic()) < until_s:
                try:
                    producer.send(TOPIC, b"v" * 1_000, partition=partition).result(WAIT_S)
                except RaftlogError as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                took_s = time.monotonic() - begun_s
                found.append(took_s)
                time.sleep(max(0.0, PACE_S - took_s))

        threads = [
            threading.Thread(target=send, args=(producer, number)) for number, producer in enumerate(self._producers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


class Memory(threading.Thread):
    """Watches the servers: their memory, and whether each says that it has its lease."""

    def __init__(self, cluster: Cluster, figures: Figures) -> None:
        super().__init__(daemon=True)
        self.is_calm = True
        self._figures = figures
        self._servers = {node: psutil.Process(cluster.pid(node)) for node in cluster.node_ids}
        ready = {node: cluster.config_file(node).parent / "ready.json" for node in cluster.node_ids}
        self._metrics = {node: json.loads(path.read_bytes())["metrics"] for node, path in ready.items()}
        self._most: dict[tuple[int, bool], int] = {}
        self._over = threading.Event()

    def __enter__(self) -> Memory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()
        for node in self._servers:
            self._figures.grown_bytes[node] = self._most.get((node, False), 0) - self._most.get((node, True), 0)

    def run(self) -> None:
        number = 0
        while not self._over.wait(0.1):
            for node, server in self._servers.items():
                key = (node, self.is_calm)
                self._most[key] = max(self._most.get(key, 0), server.memory_info().rss)
            number += 1
            if number % 10 == 0:
                self._figures.lost_leases += sum(not self._has_lease(node) for node in self._servers)

    def _has_lease(self, node: int) -> bool:
        """Whether a server says that it has its lease: one that does not answer counts as one without."""
        try:
            with urlopen(f"http://{self._metrics[node]}/metrics", timeout=WAIT_S) as page:
                return b"raftlog_broker_has_lease 1" in page.read()
        except (OSError, HTTPException):
            return False


def run(report: Report) -> None:
    """Each attack alone, and all at once."""
    for attacks in (*((name,) for name in ATTACKS), ATTACKS):
        with secured_cluster() as cluster:
            prepare(cluster)
            figures = measure(cluster, attacks, busy=True)
        what = attacks[0] if len(attacks) == 1 else "all at once"
        for others, name in ((figures.calm, "calm"), (figures.busy, "as much computing without an attack")):
            slower = figures.slower(others)
            before, under = (
                quantile([s for each in rounds for s in each], 0.99) for rounds in (others, figures.attacked)
            )
            report.add(
                "hostile",
                f"{what}: 99th percentile of honest clients, against {name}",
                f"{slower:.2f} times; {1e3 * before:.0f} and {1e3 * under:.0f} ms",
                f"<= {SLOWER:g} times",
                slower <= SLOWER,
            )
        grown = max(figures.grown_bytes.values())
        target = f"<= {MEMORY_BYTES >> 20} MiB"
        report.add("hostile", f"{what}: memory of a server", f"{grown >> 20} MiB more", target, grown <= MEMORY_BYTES)
        stayed = figures.lost_leases == 0 and all(each == figures.epochs[0] for each in figures.epochs)
        report.add("hostile", f"{what}: leases and epochs", "kept" if stayed else "lost or changed", "kept", stayed)
        failed = len(figures.failures)
        report.add("hostile", f"{what}: errors of honest clients", f"{failed}", "0", failed == 0)
        report.add("hostile", f"{what}: what the attackers saw", json.dumps(figures.done))


# Attackers, each in a process of its own


class Attacker:
    """A process that attacks when it is told to."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        said = {
            "bootstrap": cluster.bootstrap,
            "ca": cluster.client_config["ssl.ca.location"],
            "topic_id": "",
        }
        if name == "ids":
            with Admin(cluster.bootstrap, config=cluster.client_config_of("admin")) as admin:
                said["topic_id"] = admin.describe_topic(OWN).topic_id.hex()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.hostile", name, json.dumps(said)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def command(self, word: str) -> None:
        """Tell it to `attack` or to `rest`."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def counts(self) -> dict[str, int]:
        """Return what it has done, by outcome."""
        self.command("count")
        assert self._process.stdout is not None
        found: dict[str, int] = json.loads(self._process.stdout.readline())
        return found

    def computed_s(self) -> float:
        """Return how long it has computed."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


@contextmanager
def _attackers(cluster: Cluster, names: tuple[str, ...]) -> Iterator[list[Attacker]]:
    found: list[Attacker] = []
    try:
        found.extend(Attacker(cluster, name) for name in names)
        yield found
    finally:
        for each in found:
            each.close()


@contextmanager
def _computing(shares: list[float]) -> Iterator[None]:
    """Have a process of the attackers' priority compute for each of these shares of the time."""
    found: list[subprocess.Popen[bytes]] = []
    try:
        for share in shares:
            command = [sys.executable, "-m", "bench.hostile", "computing", str(share)]
            found.append(subprocess.Popen(command))
        yield
    finally:
        for each in found:
            each.kill()
            each.wait()


def _compute(share: float) -> None:
    """Compute for a share of the time, in pieces, for ever."""
    while True:
        begun_s, computed_s = time.monotonic(), time.process_time()
        while time.process_time() - computed_s < PIECE_S:
            sum(range(1_000))
        time.sleep(max(0.0, PIECE_S / max(share, 0.001) - (time.monotonic() - begun_s)))


class Battlefield:
    """The state of an attacking process; it counts attempts by outcome."""

    def __init__(self, bootstrap: str, ca: str, topic_id: str) -> None:
        self.addresses = bootstrap.split(",")
        with open(ca, "rb") as file:
            self.ca = file.read()
        self.topic_id = bytes.fromhex(topic_id)
        self.counts: dict[str, int] = {}

    def count(self, what: str) -> None:
        """Count an outcome."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def channel(self, address: str, number: int = 0) -> grpc.aio.Channel:
        """Open a connection of its own."""
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
            ("hostile.number", number),
        ]
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(self.ca), options)

    async def token(self, channel: grpc.aio.Channel, user: str, password: str) -> str:
        """Log in."""
        stub: Any = security_pb2_grpc.SecurityStub(channel)
        client = ScramClient(["SCRAM-SHA-512"], user, password)
        message = client.get_client_first().encode()
        first = security_pb2.AuthenticateRequest(mechanism="SCRAM-SHA-512", message=message)
        answer = await stub.Authenticate(first, timeout=WAIT_S)
        if answer.HasField("error"):
            return ""
        client.set_server_first(answer.message.decode())
        message = client.get_client_final().encode()
        final = security_pb2.AuthenticateRequest(exchange_id=answer.exchange_id, message=message)
        return str((await stub.Authenticate(final, timeout=WAIT_S)).token)


async def _messages(field_: Battlefield, number: int) -> None:
    """Send logins that are far larger than any login is."""
    channel = field_.channel(field_.addresses[0], number)
    stub: Any = security_pb2_grpc.SecurityStub(channel)
    request = security_pb2.AuthenticateRequest(mechanism="SCRAM-SHA-512", message=bytes(MESSAGE_BYTES))
    try:
        await stub.Authenticate(request, timeout=WAIT_S)
        field_.count("answered")
    except grpc.aio.AioRpcError as error:
        field_.count(error.code().name)
    finally:
        await channel.close()


async def _logins(field_: Battlefield, number: int) -> None:
    """Guess passwords, of a user that exists and of names that do not."""
    address = field_.addresses[number % len(field_.addresses)]
    channel = field_.channel(address, number)
    try:
        for guess in range(20):
            user = "guessed" if guess % 4 == 0 else f"user-{number}-{guess}"
            field_.count("let in" if await field_.token(channel, user, "a guess") else "refused")
    except grpc.aio.AioRpcError as error:
        field_.count(error.code().name)
    finally:
        await channel.close()


async def _streams(field_: Battlefield, number: int) -> None:
    """Open as many fetch streams as one connection takes, give them up and open others, on the same connection."""
    channel = field_.channel(field_.addresses[number % len(field_.addresses)], number)
    calls: list[Any] = []
    try:
        token = await field_.token(channel, "mallory", USERS["mallory"])
        fetch: Any = channel.stream_stream("/raftlog.v1.Log/Fetch")
        opening = log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=1 << 20)).SerializeToString()
        for _ in range(10):
            with suppress(TimeoutError):  # no further one: HTTP/2 lets it wait
                async with asyncio.timeout(1.0):
                    for _ in range(STREAMS_PER_CONNECTION):
                        call: Any = fetch(metadata=[("authorization", f"Bearer {token}")])
                        calls.append(call)
                        await call.write(opening)
                        field_.count("opened")
            for call in calls:
                call.cancel()
            calls.clear()
    except grpc.aio.AioRpcError as error:
        field_.count(error.code().name)
        await asyncio.sleep(0.05)
    except asyncio.InvalidStateError:
        field_.count("ended")
        await asyncio.sleep(0.05)
    finally:
        for call in calls:
            call.cancel()
        await channel.close()


async def _ids(field_: Battlefield, number: int) -> None:
    """Send records with producer ids that no broker has given out, and with made-up epochs and sequence numbers."""
    channel = field_.channel(field_.addresses[number % len(field_.addresses)], number)
    try:
        token = await field_.token(channel, "mallory", USERS["mallory"])
        produce: Any = channel.stream_stream(
            "/raftlog.v1.Log/Produce",
            request_serializer=format_wire.encode_produce,
            response_deserializer=log_pb2.ProduceResponse.FromString,
        )(metadata=[("authorization", f"Bearer {token}")])
        values = Columns(pa.array([b"x"], pa.binary()))
        for attempt in range(500):
            producer_id = attempt if number % 2 else int.from_bytes(os.urandom(8)) >> 1
            batch = encode_batch(
                values, 1, producer_id=producer_id, producer_epoch=32_767 - attempt % 2, base_sequence=0
            )
            head = log_pb2.ProduceRequest(correlation_id=attempt, acks=log_pb2.ALL, timeout_ms=10_000)
            part = log_pb2.ProducePartition(
                topic_id=field_.topic_id, partition=number % NODES, leader_epoch=-1, chain=attempt
            )
            await produce.write(format_wire.Produce(head, [format_wire.ProducePart(part, batch)]))
            answer = await produce.read()
            if answer is grpc.aio.EOF:
                break
            field_.count("taken" if not answer.results[0].error.code else "refused")
    except grpc.aio.AioRpcError as error:
        field_.count(error.code().name)
    finally:
        await channel.close()


@cache
def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


async def _sockets(field_: Battlefield, number: int) -> None:
    """Open a connection, say nothing or half of a handshake, and wait until the broker closes it."""
    loop = asyncio.get_running_loop()
    place = socket.socket()
    place.setblocking(False)
    try:
        place.bind((ADDRESSES[number % len(ADDRESSES)], 0))
        host, _, port = field_.addresses[number % len(field_.addresses)].rpartition(":")
        await loop.sock_connect(place, (host, int(port)))
        field_.count("opened")
        if number >= SILENT:
            await loop.sock_sendall(place, _client_hello()[:-10])
        while await loop.sock_recv(place, 4_096):
            pass
        field_.count("closed")
    except OSError as error:
        field_.count(type(error).__name__)
    finally:
        place.close()
    await asyncio.sleep(1.0)


_WAYS: Final[dict[str, tuple[Callable[[Battlefield, int], Coroutine[Any, Any, None]], int]]] = {
    "messages": (_messages, MESSAGES),
    "sockets": (_sockets, SILENT + HALF),
    "streams": (_streams, STREAMS // STREAMS_PER_CONNECTION),
    "ids": (_ids, 6),
    "logins": (_logins, LOGINS),
}


async def _attack(name: str, field_: Battlefield) -> None:
    """Follow the words on standard input; end with it."""
    work, workers = _WAYS[name]
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def repeat(number: int) -> None:
        await asyncio.sleep(number / workers)  # not all in one moment
        while True:
            await work(field_, number)

    tasks: list[asyncio.Task[None]] = []
    print("ready", flush=True)
    while word := (await reader.readline()).decode().strip():
        if word == "attack":
            tasks = [asyncio.create_task(repeat(number)) for number in range(workers)]
        elif word == "rest":
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        else:
            print(json.dumps(field_.counts), flush=True)


def main() -> None:
    """Be one attacker, or a process that only computes."""
    os.nice(19)
    name, said = sys.argv[1:]
    if name == "computing":
        _compute(float(said))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_attack(name, Battlefield(**json.loads(said))))


if __name__ == "__main__":
    main()
