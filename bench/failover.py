"""How long writes pause when a leader dies or stops: the longest gap between acks=all records, one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Final

from bench.report import Report, quantile
from raftlog import Admin, Producer, TopicPartition
from raftlog.errors import RaftlogError
from raftlog.testing import Cluster

KILLS: Final = 12
CONTROLLER_KILLS: Final = 6
RESTARTS: Final = 12
SETTLE_S: Final = 1.0
TOPIC: Final = "writes"


class Writer:
    """Writes one record at a time in a thread, and notes the time of each acknowledgement."""

    def __init__(self, bootstrap: str) -> None:
        self.acknowledged_s: list[float] = []
        self.errors: list[RaftlogError] = []
        self._bootstrap = bootstrap
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with Producer(self._bootstrap, acks="all") as producer:
            while not self._stopping.is_set():
                try:
                    producer.send(TOPIC, b"x" * 100).result(30)
                except RaftlogError as error:
                    self.errors.append(error)
                else:
                    self.acknowledged_s.append(time.monotonic())

    def longest_gap_s(self, since_s: float) -> float:
        """Return the longest time without an acknowledgement that ended after `since_s`.

        It waits for one that comes after the call: an acknowledgement that was on its way at `since_s` ends no pause.
        """
        called_s = time.monotonic()
        while not self.acknowledged_s or self.acknowledged_s[-1] <= called_s:
            time.sleep(0.005)
        times = [moment for moment in self.acknowledged_s[-100_000:] if moment > since_s - 1]
        gaps = [later - earlier for earlier, later in pairwise(times) if later > since_s]
        return max(gaps)

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(60)


def run(report: Report) -> None:
    """kill -9 of a leader, of a leader that is the controller, and a clean restart."""
    with Cluster(nodes=3) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, replication_factor=3, configs={"min.insync.replicas": "2"})
        gaps_s = _gaps(cluster, KILLS, lambda: _leader_apart_from_controller(cluster), cluster.kill)[0]
        _judge(report, "kill -9 of a leader", gaps_s, 1.5, 3.0)
        gaps_s = _gaps(cluster, CONTROLLER_KILLS, lambda: _leader_that_is_controller(cluster), cluster.kill)[0]
        _judge(report, "kill -9 of a leader that is the controller", gaps_s, None, 5.0)
        gaps_s, errors = _gaps(cluster, RESTARTS, lambda: cluster.leader(TOPIC), cluster.stop)
        _judge(report, "drained restart of a leader", gaps_s, None, 0.5)
        report.add("failover", "errors that the client of drained restarts saw", str(errors), "0", errors == 0)


def _judge(report: Report, what: str, gaps_s: list[float], p50_s: float | None, p99_s: float) -> None:
    half, most = quantile(gaps_s, 0.5), max(gaps_s)
    figure = f"p50 {half:.2f} s, slowest of {len(gaps_s)} {most:.2f} s"
    targets = ([f"p50 < {p50_s:g} s"] if p50_s else []) + [f"slowest < {p99_s:g} s"]
    report.add("failover", what, figure, ", ".join(targets), (p50_s is None or half < p50_s) and most < p99_s)


def _gaps(
    cluster: Cluster, count: int, choose: Callable[[], int], end: Callable[[int], None]
) -> tuple[list[float], int]:
    gaps_s = []
    with _writing(cluster) as writer:
        for _ in range(count):
            victim = choose()
            time.sleep(SETTLE_S)
            begun_s = time.monotonic()
            end(victim)
            cluster.leader(TOPIC, other_than=victim)
            time.sleep(SETTLE_S)
            gaps_s.append(writer.longest_gap_s(begun_s))
            cluster.start(victim)
            _all_in_sync(cluster)
        return gaps_s, len(writer.errors)


@contextmanager
def _writing(cluster: Cluster) -> Iterator[Writer]:
    writer = Writer(cluster.bootstrap)
    try:
        yield writer
    finally:
        writer.stop()


def _all_in_sync(cluster: Cluster) -> None:
    cluster.wait_for(lambda admin: len(admin.describe_topic(TOPIC).partitions[0].isr) == 3, what="all replicas in sync")


def _leader_that_is_controller(cluster: Cluster) -> int:
    controller = cluster.controller()
    _lead(cluster, controller)
    return controller


def _leader_apart_from_controller(cluster: Cluster) -> int:
    controller = cluster.controller()
    leader = cluster.leader(TOPIC)
    if leader == controller:
        leader = next(each for each in cluster.broker_ids if each != controller)
        _lead(cluster, leader)
    return leader


def _lead(cluster: Cluster, node_id: int) -> None:
    """Make a broker the preferred replica and leader of the partition."""
    others = [each for each in cluster.broker_ids if each != node_id]
    with Admin(cluster.bootstrap) as admin:
        admin.alter_reassignments({TopicPartition(TOPIC, 0): [node_id, *others]})
        if cluster.leader(TOPIC) != node_id:
            admin.elect_leaders(TOPIC)
    cluster.wait_for(lambda admin: admin.describe_topic(TOPIC).partitions[0].leader == node_id, what="the leader moved")
