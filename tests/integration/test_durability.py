"""Of a hundred thousand acknowledged records none is lost, in the long form of a million, while leaders are killed.

Idempotent producers with acks=all write all the while; leaders, and leaders that are the controller, are killed
(SIGKILL), and others frozen for longer than their session. In the end each replica is read from its start: every record
is there once, in order, where it was acknowledged. How long writes paused is printed, and the long form compares that
with what is promised.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import pytest

from raftlog import Admin
from raftlog.errors import ElectionNotNeeded
from tests.support.durable_writes import TOPIC, DurableWrites
from tests.support.history.recorder import Recorder, WatchedCluster
from tests.support.history.workloads import of_durable_writes

NODES: Final = (1, 2, 3)
RACKS: Final = {1: "a", 2: "b", 3: "c"}
PARTITIONS: Final = 6
WRITERS: Final = 3
PROGRESS_S: Final = 30.0
SETTLE_S: Final = 1.0


@dataclass
class Breaker:
    """Breaks one thing and mends it, and notes how long the partitions that it led had no acknowledgement."""

    cluster: WatchedCluster
    writes: DurableWrites
    chance: Random
    pauses_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def kill_leader(self) -> None:
        """Kill a leader that is not the controller."""

        def others(admin: Admin) -> list[int]:
            controller = admin.describe_cluster(linearizable=True).controller_id
            led_by = {part.leader for part in admin.describe_topic(TOPIC).partitions}
            found = sorted(led_by & set(NODES) - {controller})
            if not found:  # a broker that was paused for too long leads nothing any more
                admin.elect_leaders(TOPIC)
            return found

        found = self.cluster.wait_for(others, timeout_s=120, what="a leader that is not the controller")
        self._kill("a leader killed", self.chance.choice(found))

    def kill_controller(self) -> None:
        """Kill the controller, which leads as well."""
        controller = self.cluster.controller()
        what = "a leader killed that was the controller" if controller in self._leaders() else "the controller killed"
        self._kill(what, controller)

    def freeze_leader(self) -> None:
        """Freeze a leader until others lead what it led."""
        node_id = self.chance.choice(list(self._leaders()))
        self._measure("a leader frozen", node_id, self.cluster.pause)
        self.cluster.resume(node_id)

    def _kill(self, what: str, node_id: int) -> None:
        self._measure(what, node_id, self.cluster.kill)
        self.cluster.start(node_id)

    def _leaders(self) -> dict[int, list[int]]:
        """Return the leader of each partition, once each has one."""

        def leaders(admin: Admin) -> list[int]:
            found = [part.leader for part in admin.describe_topic(TOPIC).partitions]
            return found if set(found) <= set(NODES) else []

        led: dict[int, list[int]] = defaultdict(list)
        for number, leader in enumerate(self.cluster.wait_for(leaders, timeout_s=120, what="a leader everywhere")):
            led[leader].append(number)
        return led

    def _measure(self, what: str, node_id: int, end: Callable[[int], None]) -> None:
        partitions = self._leaders()[node_id]
        begun_s = time.monotonic()
        end(node_id)
        waiting = set(range(PARTITIONS))
        for partition in partitions:
            self.cluster.leader(TOPIC, partition, other_than=node_id)
        led_s = time.monotonic()
        while waiting:
            assert time.monotonic() < led_s + PROGRESS_S, (
                f"the partitions {waiting} acknowledge nothing within {PROGRESS_S:g} s after {what}"
            )
            time.sleep(0.01)
            waiting = {each for each in waiting if self.writes.last_answer_at(each) <= led_s}
        self.pauses_s[what] += [self.writes.longest_gap_s(each, begun_s) for each in partitions]

    def mended(self) -> None:
        """Wait until every replica is in sync, and leaders are spread over all servers again."""

        def whole(admin: Admin) -> bool:
            return all(len(part.isr) == len(NODES) for part in admin.describe_topic(TOPIC).partitions)

        def spread(admin: Admin) -> bool:
            with contextlib.suppress(ElectionNotNeeded):
                admin.elect_leaders(TOPIC)
            return {part.leader for part in admin.describe_topic(TOPIC).partitions} == set(NODES)

        self.cluster.wait_for(whole, timeout_s=120, what="every replica in sync")
        self.cluster.wait_for(spread, timeout_s=120, what="leaders on every server")
        time.sleep(SETTLE_S)  # they are handed over one by one

    def report(self) -> str:
        """Return a line for each kind of fault."""
        return "\n".join(
            f"{what}: {len(pauses)} partitions, p50 {quantile(pauses, 0.5):.2f} s, p99 {quantile(pauses, 0.99):.2f} s, "
            f"longest {max(pauses):.2f} s"
            for what, pauses in sorted(self.pauses_s.items())
            if pauses
        )


FAULTS: Final = (Breaker.kill_leader, Breaker.kill_controller, Breaker.freeze_leader)
WEIGHTS: Final = (5, 4, 2)


def quantile(values: list[float], share: float) -> float:
    """Return a quantile of measurements."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def torment(directory: Path, records: int, rate: int, least_faults: int) -> Breaker:
    """Write until so many records are acknowledged and so many things were broken, then check everything."""
    with WatchedCluster(nodes=3, racks=RACKS, directory=directory) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, PARTITIONS, replication_factor=3, configs={"min.insync.replicas": "2"})
        writes = DurableWrites(cluster.bootstrap, PARTITIONS, writers=WRITERS, rate=rate, records=records)
        breaker = Breaker(cluster, writes, Random(7))
        begun_s = time.monotonic()
        with Recorder(cluster, TOPIC, PROGRESS_S, lambda: of_durable_writes(writes)) as notes:
            writes.start()
            faults = 0
            while faults < least_faults or writes.acknowledged < records:
                fault = FAULTS[faults] if faults < len(FAULTS) else breaker.chance.choices(FAULTS, WEIGHTS)[0]
                with notes.fault(fault.__name__):
                    fault(breaker)
                faults += 1
                breaker.mended()
            writes.stop()
        wrote_s = time.monotonic() - begun_s
        assert writes.acknowledged >= records
        count = writes.check(RACKS)
        assert count == writes.acknowledged
        print(f"\n{count} records acknowledged in {wrote_s:.0f} s over {faults} faults, all there once in each replica")
        print(breaker.report())
        return breaker


def test_nothing_of_a_hundred_thousand_records_is_lost(tmp_path: Path) -> None:
    torment(tmp_path, 100_000, rate=3_000, least_faults=3)


@pytest.mark.long
def test_nothing_of_a_million_records_is_lost(tmp_path: Path) -> None:
    breaker = torment(tmp_path, 1_000_000, rate=2_500, least_faults=60)
    pauses_s = breaker.pauses_s["a leader killed"]
    assert quantile(pauses_s, 0.5) < 1.5
    assert quantile(pauses_s, 0.99) < 3.0
    assert quantile(breaker.pauses_s["a leader killed that was the controller"], 0.99) < 5.0
