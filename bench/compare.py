"""raftlog beside Kafka and NATS JetStream: three nodes each, three replicas, Python clients, by turns on one machine.

Kafka and NATS are fetched on the first run, into build/bench: Kafka's jars with Maven, the NATS server with Go, its
client and the plotting library with pip. What cannot be fetched is left out, and the page says so. On an idle machine
the page is docs/benchmarks.md; that of a busy one, whose figures mislead, goes to build/bench/benchmarks.md.

    ./dev bench compare                                      measures, prints, writes the page
    python -m bench.compare WORKLOAD SYSTEM ADDRESS TOPIC    the process of its clients
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

import psutil

from bench.produce import UNSAFE
from bench.report import Report, quantile
from bench.small import Measured, measure
from raftlog import Admin, Consumer, Producer, TopicPartition
from raftlog.aio import Producer as AwaitableProducer
from raftlog.testing import Cluster

ROOT: Final = Path(__file__).parent.parent
CACHE: Final = ROOT / "build" / "bench"
PAGE: Final = ROOT / "docs" / "benchmarks.md"
KAFKA: Final = "4.3.1"
NATS: Final = "v2.15.2"
CONNECTOR: Final = "4.2.0"
"""Of Spark's connector for Kafka. One of a minor version before Spark's own works, and there may be no newer one."""
CLIENT_PACKAGES: Final = ("nats-py==2.16.0", "matplotlib==3.11.2")
NODES: Final = 3
PARTITIONS: Final = 3
VALUE: Final = os.urandom(1_000)
SMALL_VALUE: Final = os.urandom(100)
ROUNDS: Final = 5
"""Rounds that count, after one that warms up: a JVM compiles what is hot only after some thousand requests."""
IDLE_LOAD: Final = 0.5
"""The load average of an idle machine, at most, for each core."""
TOPIC: Final = "bench"
SYNCED: Final = "bench-synced"
START_S: Final = 120.0
FETCH_S: Final = 900.0
BEGIN: Final = "<!-- figures: ./dev bench compare writes what follows -->"


@dataclass(frozen=True, slots=True)
class Workload:
    """What the clients of one process do, in one of these ways:

    one-by-one    each producer has one record in flight, and waits for its acknowledgement
    stream        a producer sends as fast as it can
    read          a consumer reads as fast as it can what a stream has written
    through       a record is sent once a consumer has the one before
    """

    name: str
    title: str
    producers: int
    records: int
    way: str = "one-by-one"
    value: bytes = VALUE
    prefix: str = ""
    """Of the names of its topics: what is read was not sent one by one."""

    @property
    def is_timed(self) -> bool:
        """Whether each record has a latency."""
        return self.way in ("one-by-one", "through")

    @property
    def waits_for_disks(self) -> bool:
        """Whether it matters when a record is acknowledged."""
        return self.way != "read"


WORKLOADS: Final = (
    Workload("one", "one producer, one record in flight", 1, 300),
    Workload("many-32", "32 producers, one record in flight each", 32, 1_600),
    Workload("many-100", "100 producers, one record in flight each", 100, 2_000),
    Workload("stream", "one producer, as fast as it can", 1, 100_000, "stream", prefix="bulk-"),
    Workload("stream-small", "one producer, as fast as it can, 100 bytes", 1, 100_000, "stream", SMALL_VALUE, "small-"),
    Workload("read", "one consumer, as fast as it can", 1, 100_000, "read", prefix="bulk-"),
    Workload("through", "one record at a time, until a consumer has it", 1, 300, "through"),
)
PREFIXES: Final = sorted({workload.prefix for workload in WORKLOADS})


# The client's process


class Client(Protocol):
    """A system's clients in this process."""

    def one(self, number: int) -> None:
        """Send one record of a producer, and return once it is acknowledged."""

    def stream(self, records: int) -> None:
        """Send records, and return once all are acknowledged."""

    def follow(self) -> None:
        """Have a consumer at the end of the topic."""

    def through(self) -> None:
        """Send one record, and return once the consumer has it."""

    def read(self, records: int) -> int:
        """Read at least so many records from the topic's beginning; return how many."""


class _RaftlogClient:
    def __init__(self, where: str, topic: str, workload: Workload) -> None:
        self._where, self._topic, self._value = where, topic, workload.value
        at_once = {"linger.ms": 0} if workload.is_timed else {}
        self._producers = [Producer(where, config=at_once) for _ in range(workload.producers)]

    def one(self, number: int) -> None:
        self._producers[number].send(self._topic, self._value).result(60)

    def stream(self, records: int) -> None:
        producer = self._producers[0]
        for _ in range(records):
            producer.send(self._topic, self._value)
        producer.flush(120)

    def _consumer(self) -> Consumer[bytes, bytes]:
        consumer: Consumer[bytes, bytes] = Consumer(self._where)
        consumer.assign([TopicPartition(self._topic, number) for number in range(PARTITIONS)])
        return consumer

    def follow(self) -> None:
        self._following = self._consumer()
        self._following.seek_to_end()
        for number in range(PARTITIONS):
            self._following.position(TopicPartition(self._topic, number))

    def through(self) -> None:
        self._producers[0].send(self._topic, self._value)
        while not self._following.poll(1.0):
            pass

    def read(self, records: int) -> int:
        found = 0
        with self._consumer() as consumer:
            consumer.seek_to_beginning()
            while found < records:
                found += len(consumer.poll(1.0))
        return found


class _KafkaClient:
    def __init__(self, where: str, topic: str, workload: Workload) -> None:
        import confluent_kafka

        self._api: Any = confluent_kafka
        self._where, self._topic, self._value = where, topic, workload.value
        config = {"bootstrap.servers": where, "acks": "all", "enable.idempotence": True, "log_level": 3}
        at_once = {"linger.ms": 0} if workload.is_timed else {}
        self._producers = [confluent_kafka.Producer({**config, **at_once}) for _ in range(workload.producers)]
        self._lost: list[Any] = []

    def _check(self, error: Any, _message: Any) -> None:
        if error is not None:
            self._lost.append(error)

    def one(self, number: int) -> None:
        producer = self._producers[number]
        producer.produce(self._topic, self._value, on_delivery=self._check)
        while len(producer):
            producer.poll(1)
        assert not self._lost, self._lost[0]

    def stream(self, records: int) -> None:
        producer = self._producers[0]
        for _ in range(records):
            while True:
                try:
                    producer.produce(self._topic, self._value, on_delivery=self._check)
                    break
                except BufferError:
                    producer.poll(0.01)
            producer.poll(0)
        assert producer.flush(120) == 0, "not every record was acknowledged within 120 s"
        assert not self._lost, self._lost[0]

    def _consumer(self, offset: int) -> Any:
        config = {"bootstrap.servers": self._where, "group.id": "bench", "enable.auto.commit": False, "log_level": 3}
        consumer = self._api.Consumer(config)
        consumer.assign([self._api.TopicPartition(self._topic, number, offset) for number in range(PARTITIONS)])
        return consumer

    def follow(self) -> None:
        self._following = self._consumer(self._api.OFFSET_END)
        assert self._following.poll(1.0) is None, "the end of the topic must have no record"

    def through(self) -> None:
        self._producers[0].produce(self._topic, self._value, on_delivery=self._check)
        while (found := self._following.poll(1.0)) is None:
            pass
        assert found.error() is None, found.error()
        self._producers[0].poll(0)

    def read(self, records: int) -> int:
        found = 0
        consumer = self._consumer(self._api.OFFSET_BEGINNING)
        while found < records:
            read = consumer.consume(500, 1.0)
            assert all(each.error() is None for each in read), "a record could not be read"
            found += len(read)
        consumer.close()
        return found


def _threads(client: Client, workload: Workload) -> dict[str, float]:
    """Run the dialogue with `measure`, with a thread for each producer; return the result."""
    latencies_ms: list[float] = []

    def work(number: int, of_each: int, into: list[float]) -> None:
        for _ in range(of_each):
            begun_s = time.perf_counter()
            if workload.way == "through":
                client.through()
            else:
                client.one(number)
            into.append((time.perf_counter() - begun_s) * 1e3)

    def all_of(of_each: int, into: list[float]) -> None:
        workers = [threading.Thread(target=work, args=(each, of_each, into)) for each in range(workload.producers)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    if workload.way == "through":
        client.follow()
    if workload.waits_for_disks:
        all_of(20, [])  # warms up
    if workload.way == "stream":
        client.stream(workload.records // 10)
    print("ready", flush=True)
    sys.stdin.readline()
    begun_s = time.perf_counter()
    records = workload.records
    if workload.is_timed:
        of_each = workload.records // workload.producers
        all_of(of_each, latencies_ms)
        records = len(latencies_ms)
        assert records == of_each * workload.producers, (
            f"a thread of the producer failed: {records} of {of_each * workload.producers} records were measured"
        )
    elif workload.way == "read":
        records = client.read(records)
    else:
        client.stream(records)
    return _result(records, time.perf_counter() - begun_s, latencies_ms)


def _result(records: int, seconds: float, latencies_ms: list[float]) -> dict[str, float]:
    known = sorted(latencies_ms) or [0.0]
    return {
        "records": records,
        "seconds": seconds,
        "p50_ms": quantile(known, 0.5),
        "p99_ms": quantile(known, 0.99),
    }


async def _one_by_one(send: Callable[[int, int], Awaitable[object]], producers: int, of_each: int) -> list[float]:
    """Have a task for each producer send its records; return the latencies. `send`: by producer and turn."""
    latencies_ms: list[float] = []

    async def work(number: int) -> None:
        for turn in range(of_each):
            begun_s = time.perf_counter()
            await send(number, turn)
            latencies_ms.append((time.perf_counter() - begun_s) * 1e3)

    await asyncio.gather(*map(work, range(producers)))
    return latencies_ms


async def _raftlog_tasks(where: str, topic: str, workload: Workload) -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        producers = [
            await stack.enter_async_context(AwaitableProducer(where, config={"linger.ms": 0}))
            for _ in range(workload.producers)
        ]

        async def send(number: int, _turn: int) -> None:
            await producers[number].send_and_wait(topic, workload.value)

        await _one_by_one(send, workload.producers, 20)  # warms up
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        begun_s = time.perf_counter()
        latencies_ms = await _one_by_one(send, workload.producers, workload.records // workload.producers)
        return _result(len(latencies_ms), time.perf_counter() - begun_s, latencies_ms)


async def _nats_client(where: str, topic: str, workload: Workload) -> dict[str, float]:
    nats: Any = importlib.import_module("nats")
    api: Any = importlib.import_module("nats.js.api")
    value = workload.value
    connections = [await nats.connect(servers=where.split(",")) for _ in range(workload.producers)]
    streams = [connection.jetstream(publish_async_max_pending=1_000, timeout=60) for connection in connections]

    async def send(number: int, turn: int) -> None:
        await streams[number].publish(f"{topic}.{(number + turn) % PARTITIONS}", value)

    async def stream(of_all: int) -> None:
        for turn in range(of_all):
            await streams[0].publish_async(f"{topic}.{turn % PARTITIONS}", value, wait_stall=60)
        await streams[0].publish_async_completed()

    async def consumers(subscribe: Any, policy: Any) -> list[Any]:
        config = api.ConsumerConfig(deliver_policy=policy, ack_policy=api.AckPolicy.NONE)
        return [await subscribe(f"{topic}.{number}", config=config) for number in range(PARTITIONS)]

    async def read(pulled: Any, records: int) -> None:
        while records > 0:
            records -= len(await pulled.fetch(min(500, records), timeout=60))

    async def through(followed: list[Any], of_all: int, into: list[float]) -> None:
        for turn in range(of_all):
            begun_s = time.perf_counter()
            await streams[0].publish_async(f"{topic}.{turn % PARTITIONS}", value, wait_stall=60)
            await followed[turn % PARTITIONS].next_msg(60)
            into.append((time.perf_counter() - begun_s) * 1e3)

    followed: list[Any] = []
    if workload.way == "through":
        followed = await consumers(streams[0].subscribe, api.DeliverPolicy.NEW)
        await through(followed, 20, [])
    elif workload.waits_for_disks:
        await _one_by_one(send, workload.producers, 20)
    if workload.way == "stream":
        await stream(workload.records // 10)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    latencies_ms: list[float] = []
    begun_s = time.perf_counter()
    records = workload.records
    if workload.way == "one-by-one":
        latencies_ms = await _one_by_one(send, workload.producers, workload.records // workload.producers)
    elif workload.way == "through":
        await through(followed, workload.records, latencies_ms)
    elif workload.way == "read":
        begun = await consumers(streams[0].pull_subscribe, api.DeliverPolicy.ALL)
        records = workload.records // PARTITIONS * PARTITIONS
        await asyncio.gather(*(read(found, records // PARTITIONS) for found in begun))
    else:
        await stream(workload.records)
    seconds = time.perf_counter() - begun_s
    for connection in connections:
        await connection.close()
    return _result(len(latencies_ms) or records, seconds, latencies_ms)


def client(arguments: list[str]) -> None:
    """Be the process of one run's clients: the dialogue of `measure`."""
    name, system, where, topic = arguments
    workload = next(each for each in WORKLOADS if each.name == name)
    topic = workload.prefix + topic
    tasks = {"nats": _nats_client, "raftlog-tasks": _raftlog_tasks}.get(system)
    if tasks is not None:
        import uvloop

        result = uvloop.run(tasks(where, topic, workload))
    else:
        made = (_RaftlogClient if system == "raftlog" else _KafkaClient)(where, topic, workload)
        result = _threads(made, workload)
    print(json.dumps(result), flush=True)
    sys.stdin.readline()


# What is fetched


class Missing(Exception):
    """A system cannot be measured here; the text says why."""


def _fetch(what: str, command: list[str], **environment: str) -> None:
    if shutil.which(command[0]) is None:
        raise Missing(f"{what}: {command[0]} is not installed")
    try:
        subprocess.run(
            command, check=True, timeout=FETCH_S, capture_output=True, text=True, env={**os.environ, **environment}
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{what}: `{' '.join(command[:3])} ...` failed") from error


def kafka_jars() -> Path:
    """Return the directory of Kafka's jars, with its tools, Connect and MirrorMaker 2; fetched once, by Maven."""
    names = ("kafka_2.13", "kafka-tools", "connect-file", "connect-json", "connect-mirror", "connect-runtime")
    return maven_jars(f"kafka-{KAFKA}", *(f"org.apache.kafka:{name}:{KAFKA}" for name in names))


def maven_jars(name: str, *artifacts: str, without: str = "") -> Path:
    """Return a directory, of this name, with the jars of GROUP:ARTIFACT:VERSIONs and all that they need; fetched once.

    `without`: the GROUP of jars to leave out.
    """
    jars, pom = CACHE / name, CACHE / f"{name}.xml"
    fetched = jars / "fetched.xml"
    named = "".join(
        "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>".format(
            *artifact.split(":")
        )
        for artifact in artifacts
    )
    project = (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>raftlog</groupId><artifactId>bench</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{named}</dependencies></project>"
    )
    if not fetched.exists() or fetched.read_text() != project:
        if shutil.which("java") is None:
            raise Missing(f"{name}: no Java here")
        CACHE.mkdir(parents=True, exist_ok=True)
        pom.write_text(project)
        copy = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={jars}"]
        left_out = [f"-DexcludeGroupIds={without}"] if without else []
        _fetch(name, ["mvn", "-q", "-B", "-f", str(pom), *copy, *left_out])
        fetched.write_text(project)  # several tests may fetch at once, the same
    return jars


def streams_jars() -> Path:
    """Return the directory of Kafka Streams' jars, with RocksDB for its stores; fetched once, by Maven."""
    return maven_jars(f"kafka-streams-{KAFKA}", f"org.apache.kafka:kafka-streams:{KAFKA}")


def spark_jars() -> Path:
    """Return the directory with Spark's connector for Kafka, without what Spark itself has; fetched once, by Maven."""
    artifact = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{CONNECTOR}"
    without = "org.apache.hadoop,org.scala-lang,org.lz4,org.xerial.snappy"
    return maven_jars(f"spark-kafka-{CONNECTOR}", artifact, without=without)


def _nats_server() -> Path:
    """Return the NATS server; built once, by Go."""
    server = CACHE / "bin" / "nats-server"
    if not server.exists():
        _fetch("NATS", ["go", "install", f"github.com/nats-io/nats-server/v2@{NATS}"], GOBIN=str(server.parent))
    return server


def _python_packages() -> None:
    """Make NATS' client and the plotting library importable here and in the clients' processes."""
    packages = CACHE / "python"
    if not (packages / "nats").is_dir() or not (packages / "matplotlib").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(packages)]
        _fetch("NATS' client and matplotlib", [*pip, *CLIENT_PACKAGES])
    sys.path.append(str(packages))  # last: the project's own versions come first
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(packages)])


# The systems


@dataclass(frozen=True, slots=True)
class System:
    """Running servers, with their addresses as the client's process needs them. `durability`: the meaning of an
    acknowledgement."""

    name: str
    kind: str
    durability: str
    address: str
    topic: str
    servers: Mapping[str, int]

    def does(self, workload: Workload) -> bool:
        """Whether it is measured with a workload.

        Tasks differ from threads only where producers wait, and fsyncs matter only where records are written.
        """
        if self.kind == "raftlog-tasks":
            return workload.way == "one-by-one"
        return workload.waits_for_disks or "fsync" not in self.durability

    @property
    def label(self) -> str:
        """The name, and whether an acknowledged record was fsynced."""
        return f"{self.name}, {'fsync' if 'fsync' in self.durability else 'page cache'}"


@contextlib.contextmanager
def _raftlog() -> Iterator[list[System]]:
    with Cluster(nodes=NODES, kafka=True) as cluster:
        servers = {f"node {number}": cluster.pid(number) for number in cluster.broker_ids}
        own = f"raftlog {version('raftlog')}"
        systems = []
        for name, kind, address in (
            (own, "raftlog", cluster.bootstrap),
            (f"{own} with asyncio", "raftlog-tasks", cluster.bootstrap),
            (f"{own} with Kafka's client", "kafka", cluster.kafka_bootstrap),
        ):
            for durability, topic, configs in (
                ("fsync on all three nodes", f"{kind}-{SYNCED}", {}),
                ("page cache of all three nodes", f"{kind}-{TOPIC}", UNSAFE),
            ):
                with Admin(cluster.bootstrap) as admin:
                    for prefix in PREFIXES:
                        admin.create_topic(prefix + topic, PARTITIONS, NODES, configs=configs)
                systems.append(System(name, kind, durability, address, topic, servers))
        yield systems


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _until(ready: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + START_S
    while not ready():
        if time.monotonic() > deadline_s:
            raise Missing(f"{what} was not ready within {START_S:.0f} s")
        time.sleep(0.2)


def _start(stack: contextlib.ExitStack, command: list[str], log: Path) -> int:
    output = stack.enter_context(log.open("w"))
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process.pid


@contextlib.contextmanager
def kafka_brokers() -> Iterator[list[System]]:
    """Run three Kafka brokers; yield them with a topic that is fsynced, then without."""
    from confluent_kafka import KafkaException

    admin_api: Any = importlib.import_module("confluent_kafka.admin")

    java = ["java", "-Xms512m", "-Xmx512m", "-XX:+UseG1GC", "-cp", f"{kafka_jars()}/*"]
    ports = _free_ports(2 * NODES)
    voters = ",".join(f"{number}@127.0.0.1:{ports[NODES + number - 1]}" for number in range(1, NODES + 1))
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raftlog-bench-kafka-")))
        servers = {}
        for number in range(1, NODES + 1):
            config = directory / f"{number}.properties"
            listeners = f"PLAINTEXT://127.0.0.1:{ports[number - 1]},CONTROLLER://127.0.0.1:{ports[NODES + number - 1]}"
            config.write_text(
                f"process.roles=broker,controller\nnode.id={number}\ncontroller.quorum.voters={voters}\n"
                f"listeners={listeners}\ncontroller.listener.names=CONTROLLER\n"
                "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT\n"
                f"log.dirs={directory}/{number}\noffsets.topic.replication.factor={NODES}\n"
            )
            storage = ["kafka.tools.StorageTool", "format", "-t", "bench0bench0bench0benQ", "-c", str(config)]
            _fetch("Kafka", [*java, *storage])
            servers[f"node {number}"] = _start(stack, [*java, "kafka.Kafka", str(config)], directory / f"{number}.out")
        address = ",".join(f"127.0.0.1:{port}" for port in ports[:NODES])
        admin = admin_api.AdminClient({"bootstrap.servers": address, "log_level": 0})

        def complete() -> bool:
            try:
                return len(admin.list_topics(timeout=2).brokers) == NODES
            except KafkaException:
                return False

        _until(complete, "Kafka")
        topics = [
            admin_api.NewTopic(prefix + name, PARTITIONS, NODES, config=config)
            for prefix in PREFIXES
            for name, config in ((TOPIC, {}), (SYNCED, {"flush.messages": "1"}))
        ]
        for made in admin.create_topics(topics).values():
            made.result(60)
        name = f"Kafka {KAFKA}"
        yield [
            System(name, "kafka", "fsync on all three nodes (flush.messages=1)", address, SYNCED, servers),
            System(name, "kafka", "page cache of all three nodes", address, TOPIC, servers),
        ]


@contextlib.contextmanager
def _nats() -> Iterator[list[System]]:
    server = _nats_server()
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(_nats_cluster(server, "fsync on a majority (sync_interval: always)", "always")),
            stack.enter_context(_nats_cluster(server, "page cache of a majority", "2m")),
        ]


@contextlib.contextmanager
def _nats_cluster(server: Path, durability: str, sync_interval: str) -> Iterator[System]:
    nats: Any = importlib.import_module("nats")
    api: Any = importlib.import_module("nats.js.api")
    ports = _free_ports(2 * NODES)
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports[NODES:])
    address = ",".join(f"nats://127.0.0.1:{port}" for port in ports[:NODES])
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raftlog-bench-nats-")))
        servers = {}
        for number in range(1, NODES + 1):
            config = directory / f"{number}.conf"
            config.write_text(
                f'server_name: "n{number}"\nlisten: "127.0.0.1:{ports[number - 1]}"\n'
                f'jetstream {{ store_dir: "{directory}/{number}", sync_interval: {sync_interval} }}\n'
                f'cluster {{ name: bench, listen: "127.0.0.1:{ports[NODES + number - 1]}", routes: [{routes}] }}\n'
            )
            servers[f"node {number}"] = _start(stack, [str(server), "-c", str(config)], directory / f"{number}.out")

        async def ignore(_error: Exception) -> None:
            """Be silent about servers that are starting."""

        async def make_streams() -> bool:
            try:
                connection = await nats.connect(servers=address.split(","), connect_timeout=2, error_cb=ignore)
            except Exception:  # of several libraries; `_until` tells how it ends
                return False
            try:
                for prefix in PREFIXES:
                    for number in range(PARTITIONS):
                        subjects = [f"{prefix}{TOPIC}.{number}"]
                        wanted = api.StreamConfig(f"{prefix}bench-{number}", subjects=subjects, num_replicas=NODES)
                        await connection.jetstream(timeout=5).add_stream(wanted)
                return True
            except Exception:  # the servers have not elected a leader yet
                return False
            finally:
                await connection.close()

        _until(lambda: asyncio.run(make_streams()), "NATS")
        yield System(f"NATS {NATS.lstrip('v')}", "nats", durability, address, TOPIC, servers)


# The run


def run(report: Report) -> None:
    """Measure every workload of every system, by turns, and write the page."""
    started_s = time.perf_counter()
    load = psutil.getloadavg()[0]
    missing: list[str] = []
    results: dict[str, dict[str, list[Measured]]] = {workload.name: {} for workload in WORKLOADS}
    with contextlib.ExitStack() as stack:
        systems: list[System] = []
        try:
            _python_packages()
        except Missing as reason:
            missing.append(str(reason))
        for make in (_raftlog, kafka_brokers, _nats):
            try:
                systems += stack.enter_context(make())
            except (Missing, ImportError) as reason:
                missing.append(str(reason))
                report.add("compare", "left out", str(reason))
        for workload in WORKLOADS:  # the order of the page: who waits for the same is side by side
            for system in sorted(systems, key=lambda system: "fsync" not in system.durability):
                if system.does(workload):
                    results[workload.name][system.label] = []
        for number in range(ROUNDS + 1):
            turn = systems[number % len(systems) :] + systems[: number % len(systems)]
            for workload in WORKLOADS:
                for system in turn:
                    if system.label not in results[workload.name]:
                        continue
                    process = ["bench.compare", workload.name, system.kind, system.address, system.topic]
                    got = measure(process, system.servers)
                    if number:
                        results[workload.name][system.label].append(got)
                    progress = f"round {number}: {workload.title}, {system.label}: {got.per_s:,.0f}/s"
                    print(progress, file=sys.stderr, flush=True)
        memory = {}
        for number, system in enumerate(systems):
            if all(system.servers is not other.servers for other in systems[:number]):
                memory[system.label] = _memory(system)
    for workload in WORKLOADS:
        for label, runs in results[workload.name].items():
            report.add("compare", f"{workload.title}: {label}", f"{median(run.per_s for run in runs):,.0f}/s")
    durability = {system.label: system.durability for system in systems}
    page = PAGE if load <= IDLE_LOAD * (os.cpu_count() or 1) else CACHE / PAGE.name
    pictures = page.with_suffix("")
    figures = _markdown(results, durability, missing, load) + _memory_table(memory)
    with contextlib.suppress(ImportError):
        _draw(results, pictures)
        figures += _PICTURES
    page.write_text(PAGE.read_text().partition(BEGIN)[0] + BEGIN + "\n\n" + figures)
    report.add("compare", "took", f"{time.perf_counter() - started_s:.0f} s; the page is {page.relative_to(ROOT)}")


def _memory(system: System) -> list[int]:
    """Return the resident memory of each server, in bytes."""
    return [psutil.Process(pid).memory_info().rss for pid in system.servers.values()]


def _memory_table(memory: Mapping[str, list[int]]) -> str:
    lines = ["", "### Memory of a node, at the end of the run", "", "| system | resident MiB, each node |", "|---|---|"]
    for label, nodes in memory.items():
        name = label if label.startswith("NATS") else label.partition(",")[0]  # of NATS there are two clusters
        lines.append(f"| {name} | {', '.join(str(each >> 20) for each in sorted(nodes))} |")
    return "\n".join([*lines, "", ""])


def _spread(figures: list[float], form: str) -> str:
    """Return the median, with the least and the most in brackets."""
    return f"{median(figures):{form}} ({min(figures):{form}}-{max(figures):{form}})"


def _cpu(runs: list[Measured]) -> str:
    """Return the medians of CPU time per record: the servers, the busiest first, and the client."""
    servers = [sorted((us for name, us in run.cpu_us.items() if name != "client"), reverse=True) for run in runs]
    each = " + ".join(f"{median(node):.0f}" for node in zip(*servers, strict=True))
    return f"{each}, client {median(run.cpu_us['client'] for run in runs):.0f}"


def _machine(load: float) -> str:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), model)
    memory_gib = psutil.virtual_memory().total / (1 << 30)
    after = psutil.getloadavg()[0]
    return (
        f"{datetime.now(UTC):%Y-%m-%d}. {os.cpu_count()} cores ({model}), {memory_gib:.0f} GiB, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, confluent-kafka {version('confluent-kafka')}. "
        f"Load average before the run {load:.1f}, after it {after:.1f}: a load above the number of cores before the "
        "run means that the machine did other work as well, and then only ratios within this run mean something."
    )


def _markdown(
    results: Mapping[str, Mapping[str, list[Measured]]], durability: Mapping[str, str], missing: list[str], load: float
) -> str:
    lines = [_machine(load), ""]
    if missing:
        lines += ["Left out in this run: " + "; ".join(missing) + ".", ""]
    for workload in WORKLOADS:
        runs_of = results[workload.name]
        lines += [f"### {workload.title[0].upper()}{workload.title[1:]}", ""]
        if workload.is_timed:
            lines += [
                "| system | acknowledged after | records/s | p50 ms | p99 ms | CPU us per record |",
                "|---|---|---|---|---|---|",
            ]
        else:
            lines += ["| system | acknowledged after | records/s | CPU us per record |", "|---|---|---|---|"]
        for label, runs in runs_of.items():
            row = [label.partition(",")[0], durability[label], _spread([run.per_s for run in runs], ",.0f")]
            if workload.is_timed:
                row.append(_spread([run.p50_ms for run in runs], ".2f"))
                row.append(_spread([run.p99_ms for run in runs], ".1f"))
            lines.append("| " + " | ".join([*row, _cpu(runs)]) + " |")
        lines.append("")
    return "\n".join(lines)


_PICTURES: Final = """\
### Pictures

The bars are medians, the thin lines reach from the least to the most.

![Records per second of each workload](benchmarks/rates.svg)

![CPU time per record of each workload](benchmarks/cpu.svg)
"""


def _draw(results: Mapping[str, Mapping[str, list[Measured]]], into: Path) -> None:
    """Draw records per second, and CPU time per record, of each workload."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "raftlog"
    pyplot: Any = importlib.import_module("matplotlib.pyplot")

    colours = {"raftlog": "#1f6feb", "Kafka": "#8b949e", "NATS": "#3fb950"}
    shades = {"asyncio": "#0a3069", "Kafka's client": "#79b8ff"}
    kinds: tuple[tuple[str, str, Callable[[Measured], float]], ...] = (
        ("rates", "records/s", lambda run: run.per_s),
        ("cpu", "CPU us per record, all processes", lambda run: sum(run.cpu_us.values())),
    )
    into.mkdir(parents=True, exist_ok=True)
    for name, unit, of in kinds:
        figure, axes = pyplot.subplots(-(-len(WORKLOADS) // 2), 2, figsize=(11, 14), layout="constrained")
        for axis in axes.flat[len(WORKLOADS) :]:
            axis.remove()
        for workload, axis in zip(WORKLOADS, axes.flat, strict=False):
            labels = list(results[workload.name])
            values = [[of(run) for run in runs] for runs in results[workload.name].values()]
            middle = [median(each) for each in values]
            low = [mid - min(each) for mid, each in zip(middle, values, strict=True)]
            high = [max(each) - mid for mid, each in zip(middle, values, strict=True)]
            colour = [
                shades.get(label.partition(" with ")[2].partition(",")[0], colours[label.split()[0]])
                for label in labels
            ]
            axis.barh(labels, middle, xerr=[low, high], color=colour, error_kw={"elinewidth": 1, "ecolor": "#24292f"})
            axis.invert_yaxis()
            axis.set_title(workload.title, fontsize=10, loc="left")
            axis.set_xlabel(unit, fontsize=9)
            axis.tick_params(labelsize=8)
            axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6))  # more numbers would overlap
            axis.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
        (into / f"{name}.svg").write_text("".join(line.rstrip() + "\n" for line in picture.getvalue().splitlines()))
        pyplot.close(figure)


if __name__ == "__main__":
    client(sys.argv[1:])
