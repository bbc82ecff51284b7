"""What clients notice of maintenance: rolling restarts, and a decommission; with a producer and a group at work."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from bench.report import Report, quantile
from raftlog import Admin, Consumer, Producer
from raftlog.errors import RaftlogError
from raftlog.testing import Cluster

PARTITIONS: Final = 24
MEMBERS: Final = 3
ROUNDS: Final = 2
RECORDS_PER_S: Final = 1_000
RECORD_BYTES: Final = 1_000
MIN_INSYNC: Final = 2
TICK_S: Final = 0.005
LOOK_EVERY_S: Final = 0.1
SETTLE_S: Final = 2.0
WAIT_S: Final = 60.0
TOPIC: Final = "orders"
GROUP: Final = "billing"
AWAIT: Final = ("await-safe-stop",)
DRAIN: Final = ("drain", "--until-restart")
"""Commands of `raftlog broker`, with options, that run before a stop."""


class Load:
    """A producer at a steady rate, a group that reads and commits, and a thread that checks ISRs.

    Attributes:
        latencies_s: for every acknowledged record the time of sending, and the seconds until the acknowledgement.
        errors: the errors of clients.
        below_min_isr: how often a check found a partition below min.insync.replicas.
        looks: the number of checks.
    """

    def __init__(self, bootstrap: str, records_per_s: int = RECORDS_PER_S) -> None:
        self.latencies_s: list[tuple[float, float]] = []
        self.errors: list[RaftlogError] = []
        self.below_min_isr: Counter[str] = Counter()
        self.looks = 0
        self._bootstrap = bootstrap
        self._records_per_s = records_per_s
        self._sent = 0
        self._read = [Counter[int]() for _ in range(MEMBERS)]
        self._producing, self._reading = threading.Event(), threading.Event()
        self._producing.set()
        self._reading.set()
        self._producer = self._thread(self._produce)
        self._others = [self._thread(self._watch)]
        self._others += [self._thread(partial(self._consume, read)) for read in self._read]

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except RaftlogError as error:
                self.errors.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def _produce(self) -> None:
        with Producer(self._bootstrap, acks="all") as producer:
            begun_s = time.monotonic()
            while self._producing.is_set():
                due = int((time.monotonic() - begun_s) * self._records_per_s)
                while self._sent < due:
                    self._send(producer)
                time.sleep(TICK_S)

    def _send(self, producer: Producer) -> None:
        sent_s = time.monotonic()
        delivery = producer.send(TOPIC, (b"%d" % self._sent).ljust(RECORD_BYTES))
        self._sent += 1

        def done(_: object) -> None:
            error = delivery.exception(0)
            if error is None:
                self.latencies_s.append((sent_s, time.monotonic() - sent_s))
            else:
                self.errors.append(error)

        delivery.add_done_callback(done)

    def _consume(self, read: Counter[int]) -> None:
        with Consumer(
            self._bootstrap, group_id=GROUP, auto_offset_reset="earliest", auto_commit_interval_ms=200
        ) as consumer:
            consumer.subscribe([TOPIC])
            while self._reading.is_set():
                read.update(int(record.value or b"") for record in consumer.poll(0.2))

    def _watch(self) -> None:
        with Admin(self._bootstrap) as admin:
            while self._reading.is_set():
                for topic in admin.describe_topics(None, internal=True):
                    for part in topic.partitions:
                        self.below_min_isr[f"{topic.name}-{part.partition}"] += len(part.isr) < MIN_INSYNC
                self.looks += 1
                time.sleep(LOOK_EVERY_S)

    @property
    def read(self) -> int:
        """The number of different records that the group has read."""
        return len(set().union(*self._read))

    def settle(self) -> None:
        """Wait until every member of the group reads.

        Raises:
            TimeoutError: a member does not read after a minute.
        """
        deadline_s = time.monotonic() + WAIT_S
        while not all(self._read):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the group does not read; errors so far: {self.errors[:3]}")
            time.sleep(LOOK_EVERY_S)

    def stop(self) -> tuple[int, int]:
        """Stop sending, let the group read the rest; return the numbers of its missing and repeated records."""
        self._producing.clear()
        self._producer.join(WAIT_S)
        deadline_s = time.monotonic() + WAIT_S
        while self.read < self._sent and time.monotonic() < deadline_s:
            time.sleep(LOOK_EVERY_S)
        self._reading.clear()
        for thread in self._others:
            thread.join(WAIT_S)
        return self._sent - self.read, sum(read.total() for read in self._read) - self.read

    def report(self, report: Report, name: str, missing: int) -> None:
        """Add rows for what must not have happened; `missing`: from `stop`."""
        report.add(name, "errors that a client saw", str(len(self.errors)), "0", not self.errors)
        for error in self.errors[:5]:
            report.add(name, "one of them", f"{type(error).__name__}: {error}")
        below = self.below_min_isr.total()
        looks = f"below min.insync.replicas, {self.looks} looks at all partitions"
        report.add(name, looks, str(below), "0", not below)
        report.add(name, "records that the group lacks", str(missing), "0", not missing)


def restart(cluster: Cluster, node_id: int, first: Sequence[str]) -> tuple[float, float]:
    """Restart a server after a `raftlog broker` command; return the times of its stop and of its readiness.

    Raises:
        CalledProcessError: the command failed.
    """
    command = [sys.executable, "-P", "-m", "raftlog.cli", "broker", first[0], str(node_id), *first[1:]]
    subprocess.run([*command, "--bootstrap", cluster.bootstrap], capture_output=True, check=True, timeout=2 * WAIT_S)
    went_s = time.monotonic()
    cluster.stop(node_id)
    cluster.start(node_id)
    return went_s, time.monotonic()


def run_rolling_restart(report: Report) -> None:
    """Roll a cluster of three servers, each controller and broker; the active controller is last."""
    with Cluster(nodes=3, config={"min.insync.replicas": MIN_INSYNC}) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=3)
        load = Load(cluster.bootstrap)
        load.settle()
        for first in (AWAIT, DRAIN):
            time.sleep(SETTLE_S)
            _roll(cluster, load, first, report)
        missing, again = load.stop()
    load.report(report, "rolling", missing)
    report.add("rolling", "records that the group read again", str(again))


def _roll(cluster: Cluster, load: Load, first: Sequence[str], report: Report) -> None:
    begun_s, times = time.monotonic(), []
    for _ in range(ROUNDS):
        last = cluster.controller()
        order = sorted(cluster.node_ids, key=lambda each: each == last)
        times += [restart(cluster, each, first) for each in order]
    time.sleep(SETTLE_S)
    took_s = [took for sent, took in load.latencies_s if sent >= begun_s]
    p50_s, p99_s = quantile(took_s, 0.5), quantile(took_s, 0.99)
    what = f"{len(times)} restarts after {first[0]}: produce, acks=all, {RECORDS_PER_S} records/s"
    figure = f"p50 {p50_s * 1e3:.0f} ms, p99 {p99_s * 1e3:.0f} ms, slowest of {len(took_s)} {max(took_s):.2f} s"
    report.add("rolling", what, figure, "p99 < 0.5 s", p99_s < 0.5)
    report.add("rolling", "a server is away", f"{quantile([back - went for went, back in times], 0.5):.1f} s, p50")


DECOMMISSION_PARTITIONS: Final = 100
LEAVING: Final = 4
FILL_S: Final = 20.0
"""How long records are written before the decommission."""
DECOMMISSION_SETTLE_S: Final = 3.0
TIMEOUT_S: Final = 300
_PLACES: Final = ([LEAVING, 1, 2], [2, LEAVING, 3], [3, 1, LEAVING])
"""The replicas of partitions: the leaving broker has one of each partition, and leads a third of them."""


def run_decommission(report: Report) -> None:
    """Decommission a broker with default batches, and stop its process when it has no replicas."""
    with Cluster(nodes=4, config={"min.insync.replicas": MIN_INSYNC}) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, replica_assignment=[_PLACES[each % 3] for each in range(DECOMMISSION_PARTITIONS)])
        load = Load(cluster.bootstrap, RECORDS_PER_S)
        load.settle()
        time.sleep(FILL_S)
        with Admin(cluster.bootstrap) as admin:
            size = sum(log.size_bytes for each in admin.describe_log_dirs(LEAVING) for log in each.partitions)
        begun_s = time.monotonic()
        empty_s = _decommission(cluster, report)
        took_s = [took for sent, took in load.latencies_s if sent >= begun_s]
        time.sleep(DECOMMISSION_SETTLE_S)
        missing, _ = load.stop()
    moved = f"{DECOMMISSION_PARTITIONS} partitions with {size / 2**20:.0f} MiB move off a broker"
    report.add("decommission", moved, f"{empty_s:.1f} s")
    p50_s, p99_s = quantile(took_s, 0.5), quantile(took_s, 0.99)
    figure = f"p50 {p50_s * 1e3:.0f} ms, p99 {p99_s * 1e3:.0f} ms, slowest of {len(took_s)} {max(took_s):.2f} s"
    report.add("decommission", f"produce meanwhile, acks=all, {RECORDS_PER_S} records/s", figure)
    load.report(report, "decommission", missing)


def _decommission(cluster: Cluster, report: Report) -> float:
    """Decommission the broker; return the seconds until it had no replicas.

    Raises:
        TimeoutExpired: it was not unregistered after its process had stopped.
    """
    command = [sys.executable, "-P", "-m", "raftlog.cli", "broker", "decommission", str(LEAVING), "--wait"]
    more = ["--timeout", str(TIMEOUT_S), "--bootstrap", cluster.bootstrap]
    begun_s = time.monotonic()
    with subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as leaving:
        assert leaving.stderr is not None
        said = []
        for line in leaving.stderr:
            said.append(line)
            if "stop its process" in line:
                break
        empty_s = time.monotonic() - begun_s
        cluster.stop(LEAVING)
        code = leaving.wait(TIMEOUT_S)
    report.add("decommission", "exit of the command", f"exit code {code}", "0", code == 0)
    if code != 0:
        report.add("decommission", "its last line on stderr", said[-1].strip() if said else "nothing")
    return empty_s
