"""Three real brokers are killed, frozen, cut off and drained while clients append and poll.

Nothing acknowledged may be lost or move, no offset may have two values, nothing may be read that is gone later,
nothing that an idempotent producer sends may be there twice, acknowledged or not, and when everything is mended,
all servers continue, and the replicas are the same byte for byte.
The short form does each thing of two kinds once, after everything is well again: kills, and a kind that the run's seed
picks; the long form does all of them, and goes on at random.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from raftlog import Admin
from raftlog.errors import OffsetOutOfRange, RaftlogError
from raftlog.testing import ServerFailed
from tests.support.append_checker import assert_sound
from tests.support.append_workload import TOPIC, AppendWorkload, read_replicas
from tests.support.fresh import one_of
from tests.support.history.recorder import Recorder, WatchedCluster
from tests.support.history.workloads import of_appends
from tests.support.up_to_date import up_to_date

NODES = (1, 2, 3)
PARTITIONS = 3
RACKS = {2: "b", 3: "c"}
LONG_S = 900.0
PAUSE_S = 30.0
"""Longer than this no partition is without an acknowledgement while a majority could exist."""


@dataclass
class Monkey:
    """Breaks one thing and mends it. Each fault ends with every server running and every link open.

    While one server is away the others must go on, if every replica was in sync before (`whole`): after everybody was
    killed the only one that is in sync may be the one that goes away next.
    """

    cluster: WatchedCluster
    workload: AppendWorkload
    chance: random.Random
    notes: Recorder
    whole: bool = True

    def do(self, fault: Callable[[Monkey], None]) -> None:
        """Let a fault happen, and note it."""
        with self.notes.fault(fault.__name__):
            fault(self)

    def leader(self) -> int:
        """Return the leader of partition 0, or any node."""
        try:
            return self.cluster.leader(TOPIC, 0, timeout_s=10)
        except (RaftlogError, ServerFailed):
            return self.chance.choice(NODES)

    def controller(self) -> int:
        """Return the controller, or any node."""
        try:
            return self.cluster.controller(timeout_s=10)
        except (RaftlogError, ServerFailed):
            return self.chance.choice(NODES)

    def look_on(self) -> None:
        """See that the others go on."""
        if self.whole:
            self.workload.wait_for_progress()
        time.sleep(self.chance.choice((0.0, 1.0)))

    def others(self, node_id: int) -> list[int]:
        """Return all servers but one."""
        return [each for each in NODES if each != node_id]

    def kill_leader(self) -> None:
        """Kill the leader; the others go on without it."""
        self._kill(self.leader())

    def kill_and_start_at_once(self) -> None:
        """Kill the leader, which is back before it is missed, while the lease of its former life is valid."""
        node_id = self.leader()
        self.cluster.kill(node_id)
        self.cluster.start(node_id)

    def kill_controller(self) -> None:
        """Kill the controller after it was made a leader too, if it was none."""
        controller = self.controller()
        with Admin(self.cluster.bootstrap) as admin:
            led = [part.leader for part in admin.describe_topic(TOPIC).partitions]
        if controller not in led:  # it is none of all partitions: then this is just another kill
            controller = self.leader()
        self._kill(controller)

    def _kill(self, node_id: int) -> None:
        self.cluster.kill(node_id)
        self.look_on()
        self.cluster.start(node_id)

    def freeze_leader(self) -> None:
        """Freeze the leader for longer than its session; the others go on, and it must not, when it wakes up."""
        node_id = self.leader()
        self.cluster.pause(node_id)
        self.look_on()
        self.cluster.resume(node_id)

    def freeze_shortly(self) -> None:
        """Freeze a server for about as long as its lease, so that it wakes up around the time of the election."""
        node_id = self.chance.choice(NODES)
        self.cluster.pause(node_id)
        time.sleep(self.chance.uniform(0.8, 2.0))
        self.cluster.resume(node_id)

    def freeze_two(self) -> None:
        """Freeze two servers, the leader among them, so that no majority is left; they wake up one after the other."""
        node_id = self.leader()
        frozen = [node_id, self.chance.choice(self.others(node_id))]
        for each in frozen:
            self.cluster.pause(each)
        time.sleep(self.chance.uniform(1.0, 3.0))
        self.chance.shuffle(frozen)
        for each in frozen:
            self.cluster.resume(each)
            time.sleep(self.chance.choice((0.0, 0.5)))

    def isolate_leader(self) -> None:
        """Cut the leader off from both others, a minority."""
        node_id = self.leader()
        self._cut([node_id], self.others(node_id))

    def isolate_follower(self) -> None:
        """Cut a server off that does not lead partition 0."""
        node_id = self.chance.choice(self.others(self.leader()))
        self._cut([node_id], self.others(node_id))

    def mute_leader(self) -> None:
        """No node hears the leader, which hears all others."""
        node_id = self.leader()
        self._cut([node_id], self.others(node_id), one_way=True)

    def deafen_leader(self) -> None:
        """The leader hears no node, and all others hear it."""
        node_id = self.leader()
        self._cut(self.others(node_id), [node_id], one_way=True)

    def leave_a_bridge(self) -> None:
        """Cut the leader off from one of the others; the third one reaches both."""
        node_id = self.leader()
        self._cut([node_id], [self.chance.choice(self.others(node_id))])

    def _cut(self, some: list[int], others: list[int], *, one_way: bool = False) -> None:
        self.cluster.partition(some, others, one_way=one_way)
        try:
            self.look_on()
        finally:
            self.cluster.heal()

    def cut_everybody_off(self) -> None:
        """No node reaches another: nothing is acknowledged before the network heals."""
        for some, others in (([1], [2]), ([2], [3]), ([1], [3])):
            self.cluster.partition(some, others)
        time.sleep(3.0)
        self.cluster.heal()

    def kill_the_other_side(self) -> None:
        """Cut the leader off, let the others go on, and kill these before it hears of anything."""
        node_id = self.leader()
        self.cluster.partition([node_id], self.others(node_id))
        try:
            self.look_on()
            for each in self.others(node_id):
                self.cluster.kill(each)
            time.sleep(self.chance.choice((0.0, 1.0)))
        finally:
            self.cluster.heal()
        self.cluster.start_all()

    def restart_in_turn(self) -> None:
        """Stop each server cleanly and start it again, as an update does."""
        for node_id in NODES:
            self.cluster.stop(node_id)
            self.cluster.start(node_id)
            self.wait_for_isr()

    def kill_all(self) -> None:
        """Kill all servers, and start them again."""
        for node_id in NODES:
            self.cluster.kill(node_id)
        self.cluster.start_all()

    def lose_one_after_the_other(self) -> None:
        """Kill all servers in turn, the last one with the newest records; the others come back first, without these."""
        order = [each for each in NODES if each != (last := self.leader())]
        self.chance.shuffle(order)
        for node_id in (*order, last):
            self.cluster.kill(node_id)
            time.sleep(self.chance.choice((0.2, 2.5)))
        for node_id in (*order, last):
            self.cluster.start(node_id, wait=False)
            time.sleep(self.chance.choice((0.2, 2.5)))
        self.cluster.start_all()

    def wait_for_isr(self) -> None:
        """Wait until every replica is in sync again."""

        def complete(admin: Admin) -> bool:
            described = up_to_date(admin).describe_topic(TOPIC)
            return all(len(part.isr) == len(NODES) for part in described.partitions)

        self.cluster.wait_for(complete, timeout_s=120, what="every replica in sync")

    def mended(self) -> None:
        """See that everything goes on."""
        self.workload.wait_for_progress()
        self.wait_for_isr()


FAULTS: dict[str, tuple[Callable[[Monkey], None], ...]] = {
    "kills": (
        Monkey.kill_leader,
        Monkey.kill_controller,
        Monkey.kill_and_start_at_once,
        Monkey.kill_all,
        Monkey.lose_one_after_the_other,
    ),
    "freezes": (Monkey.freeze_leader, Monkey.freeze_shortly, Monkey.freeze_two),
    "cuts": (
        Monkey.isolate_leader,
        Monkey.isolate_follower,
        Monkey.mute_leader,
        Monkey.deafen_leader,
        Monkey.leave_a_bridge,
        Monkey.cut_everybody_off,
        Monkey.kill_the_other_side,
    ),
    "restarts": (Monkey.restart_in_turn,),
}


@contextmanager
def tormented() -> Iterator[Monkey]:
    """A cluster with clients at work; at the end it is whole, and the clients' observations are checked."""
    options = {"replica.lag.time.max.ms": 2_000}
    with WatchedCluster(nodes=3, can_be_partitioned=True, racks=RACKS, config=options) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(
                TOPIC, PARTITIONS, replication_factor=3, configs={"min.insync.replicas": "2"}, timeout=60
            )
        workload = AppendWorkload(cluster.bootstrap, PARTITIONS, racks=RACKS)
        with Recorder(cluster, TOPIC, PAUSE_S, lambda: of_appends(workload)) as notes:
            workload.start()
            workload.wait_for_progress()
            monkey = Monkey(cluster, workload, random.Random(7), notes)
            yield monkey
            monkey.mended()
            workload.stop()
            monkey.wait_for_isr()  # a replica that fell behind has the last ones once it is back in
            _check(monkey)


def _check(monkey: Monkey) -> None:
    """See that nothing is wrong with what clients saw, and with what replicas have."""
    cluster, workload = monkey.cluster, monkey.workload
    addresses = dict(zip(cluster.broker_ids, cluster.bootstrap.split(","), strict=True))
    final, raw = asyncio.run(read_replicas(addresses, PARTITIONS))
    workload.stop_pollers(final[1])
    history = workload.history(final)
    print(
        f"{workload.acknowledged} of {len(history.appends)} acknowledged, "
        f"{[poller.read for poller in workload.pollers]} read, "
        f"longest wait {max(each.longest_s for each in workload.appenders if each.retries):.2f} s"
    )
    assert_sound(history)
    assert raw[1] == raw[2] == raw[3], "the logs of the three replicas are not the same byte for byte"
    for appender in workload.appenders:
        assert not appender.retries or not appender.errors, appender.errors[:3]
    for poller in workload.pollers:
        assert not any(isinstance(error, OffsetOutOfRange) for error in poller.errors), poller.errors[:3]
    assert [cluster.is_running(node_id) for node_id in NODES] == [True] * 3


@pytest.mark.parametrize("kind", ["kills", *one_of([kind for kind in FAULTS if kind != "kills"])])
def test_one_fault_after_the_other(kind: str) -> None:
    with tormented() as monkey:
        for fault in FAULTS[kind]:
            monkey.do(fault)
            monkey.mended()


@pytest.mark.long
def test_faults_at_random() -> None:
    faults = [fault for kind in FAULTS.values() for fault in kind]
    with tormented() as monkey:
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            monkey.do(monkey.chance.choice(faults))
            monkey.whole = monkey.chance.random() < 0.7  # else the next one comes while replicas are catching up
            if monkey.whole:
                monkey.mended()
