"""raftlog beside Kafka and NATS JetStream: three nodes each, three replicas, Python clients, by turns on one machine.

Kafka and NATS are fetched on the first run, into build/bench: Kafka's jars with Maven, the NATS server with Go, its
client and the plotting library with pip. What cannot be fetched is left out, and the page says so. On an idle machine
the page is docs/benchmarks.md; that of a busy one, whose figures mislead, goes to build/bench/benchmarks.md.

    ./dev bench compare                                                        measures, prints, writes the page
    python -m bench.compare WORKLOAD SYSTEM ADDRESS TOPIC PRODUCERS RECORDS    the client's process
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

from bench.produce import UNSAFE
from bench.report import Report, quantile
from bench.small import Measured, measure
from raftlog import Admin, Producer
from raftlog.testing import Cluster

ROOT: Final = Path(__file__).parent.parent
CACHE: Final = ROOT / "build" / "bench"
PAGE: Final = ROOT / "docs" / "benchmarks.md"
KAFKA: Final = "4.3.1"
NATS: Final = "v2.15.2"
CLIENT_PACKAGES: Final = ("nats-py==2.16.0", "matplotlib==3.11.2")
NODES: Final = 3
PARTITIONS: Final = 3
VALUE: Final = os.urandom(1_000)
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
    """Producers of one process; `one_by_one`: each has one record in flight, and waits for its acknowledgement."""

    name: str
    title: str
    producers: int
    records: int
    one_by_one: bool = True


WORKLOADS: Final = (
    Workload("one", "one producer, one record in flight", 1, 300),
    Workload("many-32", "32 producers, one record in flight each", 32, 1_600),
    Workload("many-100", "100 producers, one record in flight each", 100, 2_000),
    Workload("stream", "one producer, as fast as it can", 1, 50_000, one_by_one=False),
)


# The client's process


Send = Callable[[int], None]
"""Send one record of a producer, and return once it is acknowledged."""


def _raftlog_client(where: str, topic: str, count: int) -> tuple[Send, Callable[[int], None]]:
    producers = [Producer(where) for _ in range(count)]

    def send(number: int) -> None:
        producers[number].send(topic, VALUE).result(60)

    def stream(records: int) -> None:
        for _ in range(records):
            producers[0].send(topic, VALUE)
        producers[0].flush(120)

    return send, stream


def _kafka_client(where: str, topic: str, count: int) -> tuple[Send, Callable[[int], None]]:
    import confluent_kafka

    config = {"bootstrap.servers": where, "acks": "all", "enable.idempotence": True, "log_level": 3}
    one_by_one = {"linger.ms": 0} if count > 1 or sys.argv[1] != "stream" else {}
    producers = [confluent_kafka.Producer({**config, **one_by_one}) for _ in range(count)]
    lost: list[Any] = []

    def check(error: Any, _message: Any) -> None:
        if error is not None:
            lost.append(error)

    def send(number: int) -> None:
        producer = producers[number]
        producer.produce(topic, VALUE, on_delivery=check)
        while len(producer):
            producer.poll(1)
        assert not lost, lost[0]

    def stream(records: int) -> None:
        producer = producers[0]
        for _ in range(records):
            while True:
                try:
                    producer.produce(topic, VALUE, on_delivery=check)
                    break
                except BufferError:
                    producer.poll(0.01)
            producer.poll(0)
        assert producer.flush(120) == 0, "not every record was acknowledged within 120 s"
        assert not lost, lost[0]

    return send, stream


def _threads(send: Send, stream: Callable[[int], None], count: int, records: int, one_by_one: bool) -> dict[str, float]:
    """Run the dialogue with `measure`, with a thread for each producer; return the result."""
    latencies_ms: list[float] = []

    def work(number: int, of_each: int, into: list[float]) -> None:
        for _ in range(of_each):
            begun_s = time.perf_counter()
            send(number)
            into.append((time.perf_counter() - begun_s) * 1e3)

    def all_of(of_each: int, into: list[float]) -> None:
        workers = [threading.Thread(target=work, args=(number, of_each, into)) for number in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    all_of(20, [])  # warms up
    if not one_by_one:
        stream(records // 10)
    print("ready", flush=True)
    sys.stdin.readline()
    begun_s = time.perf_counter()
    if one_by_one:
        all_of(records // count, latencies_ms)
        assert len(latencies_ms) == records // count * count, (
            f"a thread of the producer failed: {len(latencies_ms)} of {records // count * count} records were measured"
        )
    else:
        stream(records)
    return _result(records if not one_by_one else len(latencies_ms), time.perf_counter() - begun_s, latencies_ms)


def _result(records: int, seconds: float, latencies_ms: list[float]) -> dict[str, float]:
    known = sorted(latencies_ms) or [0.0]
    return {
        "records": records,
        "seconds": seconds,
        "p50_ms": quantile(known, 0.5),
        "p99_ms": quantile(known, 0.99),
    }


async def _nats_client(where: str, topic: str, count: int, records: int, one_by_one: bool) -> dict[str, float]:
    nats: Any = importlib.import_module("nats")
    connections = [await nats.connect(servers=where.split(",")) for _ in range(count)]
    streams = [connection.jetstream(publish_async_max_pending=1_000, timeout=60) for connection in connections]

    async def one(number: int, of_each: int, into: list[float]) -> None:
        for turn in range(of_each):
            begun_s = time.perf_counter()
            await streams[number].publish(f"{topic}.{(number + turn) % PARTITIONS}", VALUE)
            into.append((time.perf_counter() - begun_s) * 1e3)

    async def stream(of_all: int) -> None:
        for turn in range(of_all):
            await streams[0].publish_async(f"{topic}.{turn % PARTITIONS}", VALUE, wait_stall=60)
        await streams[0].publish_async_completed()

    await asyncio.gather(*(one(number, 20, []) for number in range(count)))
    if not one_by_one:
        await stream(records // 10)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    latencies_ms: list[float] = []
    begun_s = time.perf_counter()
    if one_by_one:
        await asyncio.gather(*(one(number, records // count, latencies_ms) for number in range(count)))
    else:
        await stream(records)
    seconds = time.perf_counter() - begun_s
    for connection in connections:
        await connection.close()
    return _result(records if not one_by_one else len(latencies_ms), seconds, latencies_ms)


def client(arguments: list[str]) -> None:
    """Be the process of one run's producers: the dialogue of `measure`."""
    workload, system, where, topic = arguments[:4]
    count, records = (int(number) for number in arguments[4:6])
    one_by_one = workload != "stream"
    if system == "nats":
        import uvloop

        result = uvloop.run(_nats_client(where, topic, count, records, one_by_one))
    else:
        send, stream = (_raftlog_client if system == "raftlog" else _kafka_client)(where, topic, count)
        result = _threads(send, stream, count, records, one_by_one)
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
    """Return the directory of Kafka's jars, with its tools and Connect; fetched once, by Maven."""
    names = ("kafka_2.13", "kafka-tools", "connect-file", "connect-json", "connect-runtime")
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

    @property
    def label(self) -> str:
        """The name, and whether an acknowledged record was fsynced."""
        return f"{self.name}, {'fsync' if 'fsync' in self.durability else 'page cache'}"


@contextlib.contextmanager
def _raftlog() -> Iterator[list[System]]:
    with Cluster(nodes=NODES) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, PARTITIONS, NODES, configs=UNSAFE)
            admin.create_topic(SYNCED, PARTITIONS, NODES)
        servers = {f"node {number}": cluster.pid(number) for number in cluster.broker_ids}
        name = f"raftlog {version('raftlog')}"
        yield [
            System(name, "raftlog", "fsync on all three nodes", cluster.bootstrap, SYNCED, servers),
            System(name, "raftlog", "page cache of all three nodes", cluster.bootstrap, TOPIC, servers),
        ]


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
            admin_api.NewTopic(TOPIC, PARTITIONS, NODES),
            admin_api.NewTopic(SYNCED, PARTITIONS, NODES, config={"flush.messages": "1"}),
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
                for number in range(PARTITIONS):
                    wanted = api.StreamConfig(f"bench-{number}", subjects=[f"{TOPIC}.{number}"], num_replicas=NODES)
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
        for runs_by_system in results.values():  # the order of the page: who waits for the same is side by side
            for system in sorted(systems, key=lambda system: "fsync" not in system.durability):
                runs_by_system[system.label] = []
        for number in range(ROUNDS + 1):
            turn = systems[number % len(systems) :] + systems[: number % len(systems)]
            for workload in WORKLOADS:
                for system in turn:
                    size = [str(workload.producers), str(workload.records)]
                    process = ["bench.compare", workload.name, system.kind, system.address, system.topic, *size]
                    got = measure(process, system.servers)
                    if number:
                        results[workload.name][system.label].append(got)
                    progress = f"round {number}: {workload.title}, {system.label}: {got.per_s:,.0f}/s"
                    print(progress, file=sys.stderr, flush=True)
    for workload in WORKLOADS:
        for label, runs in results[workload.name].items():
            report.add("compare", f"{workload.title}: {label}", f"{median(run.per_s for run in runs):,.0f}/s")
    durability = {system.label: system.durability for system in systems}
    page = PAGE if load <= IDLE_LOAD * (os.cpu_count() or 1) else CACHE / PAGE.name
    pictures = page.with_suffix("")
    figures = _markdown(results, durability, missing, load)
    with contextlib.suppress(ImportError):
        _draw(results, pictures)
        figures += _PICTURES
    page.write_text(PAGE.read_text().partition(BEGIN)[0] + BEGIN + "\n\n" + figures)
    report.add("compare", "took", f"{time.perf_counter() - started_s:.0f} s; the page is {page.relative_to(ROOT)}")


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
        if workload.one_by_one:
            lines += [
                "| system | acknowledged after | records/s | p50 ms | p99 ms | CPU us per record |",
                "|---|---|---|---|---|---|",
            ]
        else:
            lines += ["| system | acknowledged after | records/s | CPU us per record |", "|---|---|---|---|"]
        for label, runs in runs_of.items():
            row = [label.partition(",")[0], durability[label], _spread([run.per_s for run in runs], ",.0f")]
            if workload.one_by_one:
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
    kinds: tuple[tuple[str, str, Callable[[Measured], float]], ...] = (
        ("rates", "records/s", lambda run: run.per_s),
        ("cpu", "CPU us per record, all processes", lambda run: sum(run.cpu_us.values())),
    )
    into.mkdir(parents=True, exist_ok=True)
    for name, unit, of in kinds:
        figure, axes = pyplot.subplots(2, 2, figsize=(11, 6.4), layout="constrained")
        for workload, axis in zip(WORKLOADS, axes.flat, strict=True):
            labels = list(results[workload.name])
            values = [[of(run) for run in runs] for runs in results[workload.name].values()]
            middle = [median(each) for each in values]
            low = [mid - min(each) for mid, each in zip(middle, values, strict=True)]
            high = [max(each) - mid for mid, each in zip(middle, values, strict=True)]
            colour = [colours[label.split()[0]] for label in labels]
            axis.barh(labels, middle, xerr=[low, high], color=colour, error_kw={"elinewidth": 1, "ecolor": "#24292f"})
            axis.invert_yaxis()
            axis.set_title(workload.title, fontsize=10, loc="left")
            axis.set_xlabel(unit, fontsize=9)
            axis.tick_params(labelsize=8)
            axis.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
        (into / f"{name}.svg").write_text("".join(line.rstrip() + "\n" for line in picture.getvalue().splitlines()))
        pyplot.close(figure)


if __name__ == "__main__":
    client(sys.argv[1:])
