"""Members and coordinators of a group are killed and frozen while records are sent.

Every record is processed, no committed offset goes back, no two members own a partition in the same epoch, a member
that has lost its partitions is not handed their records any more, and when everything is mended, the group goes on.
The short form does each thing once of the kind that the run's seed picks; the long form of both, and goes on at random.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from raftlog import Admin
from tests.support.fresh import one_of
from tests.support.group_checker import assert_sound
from tests.support.group_workload import GROUP, TOPIC, GroupWorkload, MemberProcess
from tests.support.history.recorder import Recorder, WatchedCluster
from tests.support.history.workloads import of_group

PARTITIONS = 6
SESSION_MS = 2_000
LONG_S = 900.0
PAUSE_S = 30.0
"""Longer than this no partition is without an acknowledgement while a majority could exist."""
CONFIG = {
    "group.consumer.session.timeout.ms": SESSION_MS,
    "group.consumer.heartbeat.interval.ms": 300,
    "offsets.topic.num.partitions": 4,
}


@dataclass
class Monkey:
    """Breaks one thing and mends it. Each fault ends with every server running, and as many members as before."""

    cluster: WatchedCluster
    workload: GroupWorkload
    chance: random.Random
    notes: Recorder
    waits: list[float] = field(default_factory=list)

    def do(self, fault: Callable[[Monkey], None]) -> None:
        """Let a fault happen, and note it."""
        with self.notes.fault(fault.__name__):
            fault(self)

    def coordinator(self) -> int:
        """Return the server that coordinates the group."""
        return self.cluster.wait_for(lambda admin: admin.describe_group(GROUP).coordinator_id)

    def member(self, instance: bool = False) -> MemberProcess:
        """Return a member, a dynamic or a static one."""
        return self.chance.choice([each for each in self.workload.members if bool(each.instance) == instance])

    def mended(self) -> None:
        """See that everything goes on."""
        self.waits.append(self.workload.wait_for_progress())

    # Members

    def kill_member(self) -> None:
        """Kill a member; the others take its partitions over, and a new one comes."""
        member = self.member()
        member.kill()
        self.mended()
        self.workload.replace(member)

    def kill_and_replace_at_once(self) -> None:
        """Kill a member and start another one before the first is missed."""
        member = self.member()
        member.kill()
        self.workload.replace(member)

    def freeze_member(self) -> None:
        """Freeze a member for longer than its session; the others go on, and it must not, when it wakes up."""
        member = self.member()
        member.pause()
        self.mended()
        member.resume()

    def freeze_member_shortly(self) -> None:
        """Freeze a member for about as long as its session."""
        member = self.member()
        member.pause()
        time.sleep(SESSION_MS / 1000 * self.chance.uniform(0.7, 1.2))
        member.resume()

    def leave_and_join(self) -> None:
        """A member leaves cleanly, and another one comes."""
        member = self.member()
        member.stop()
        self.workload.replace(member)

    def restart_static_member(self) -> None:
        """A static member goes and is back."""
        member = self.member(instance=True)
        member.stop()
        self.workload.replace(member)

    # Coordinators

    def kill_coordinator(self) -> None:
        """Kill the coordinator; the group goes on with the next one."""
        node_id = self.coordinator()
        self.cluster.kill(node_id)
        self.mended()
        self.cluster.start(node_id)

    def kill_coordinator_and_start_at_once(self) -> None:
        """Kill the coordinator, which is back before it is missed."""
        node_id = self.coordinator()
        self.cluster.kill(node_id)
        self.cluster.start(node_id)

    def freeze_coordinator(self) -> None:
        """Freeze the coordinator until there is another one, which it must believe when it wakes up."""
        node_id = self.coordinator()
        self.cluster.pause(node_id)
        self.mended()
        self.cluster.resume(node_id)

    def kill_coordinator_and_member(self) -> None:
        """Kill a member, and the coordinator before it has missed it: the next one has to."""
        member = self.member()
        node_id = self.coordinator()
        member.kill()
        self.cluster.kill(node_id)
        self.mended()
        self.workload.replace(member)
        self.cluster.start(node_id)

    def kill_coordinator_in_a_rebalance(self) -> None:
        """Kill the coordinator while a member comes and another one goes."""
        node_id = self.coordinator()
        member = self.member()
        member.terminate()
        newcomer = self.workload.add_member(member.commits)
        time.sleep(self.chance.uniform(0.3, 0.8))
        self.cluster.kill(node_id)
        member.wait_ended()
        self.workload.members.remove(member)
        self.mended()
        self.cluster.start(node_id)
        assert newcomer in self.workload.members


FAULTS: dict[str, tuple[Callable[[Monkey], None], ...]] = {
    "members": (
        Monkey.kill_member,
        Monkey.kill_and_replace_at_once,
        Monkey.freeze_member,
        Monkey.freeze_member_shortly,
        Monkey.leave_and_join,
        Monkey.restart_static_member,
    ),
    "coordinators": (
        Monkey.kill_coordinator,
        Monkey.kill_coordinator_and_start_at_once,
        Monkey.freeze_coordinator,
        Monkey.kill_coordinator_and_member,
        Monkey.kill_coordinator_in_a_rebalance,
    ),
}


@contextmanager
def tormented(directory: Path) -> Iterator[Monkey]:
    """A cluster with a group at work; at the end the group has read everything, and the notes are checked."""
    with WatchedCluster(nodes=3, config=CONFIG) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, PARTITIONS, replication_factor=3, configs={"min.insync.replicas": "2"})
        workload = GroupWorkload(cluster.bootstrap, PARTITIONS, directory)
        with Recorder(cluster, TOPIC, PAUSE_S, lambda: of_group(workload)) as recorder:
            monkey = Monkey(cluster, workload, random.Random(7), recorder)
            try:
                workload.start()
                for commits, instance in (("sync", ""), ("async", ""), ("auto", ""), ("sync", "static-1")):
                    workload.add_member(commits, instance)
                monkey.mended()
                yield monkey
                monkey.mended()
                workload.stop()
            finally:
                workload.abandon()
            _check(workload, max(monkey.waits))


def _check(workload: GroupWorkload, longest_wait_s: float) -> None:
    """See that nothing is wrong with what members did."""
    notes = workload.notes()
    print(
        f"{sum(workload.ends.values())} records, {sum(each.processed for each in notes.values())} processed, "
        f"{sum(len(each.spans) for each in notes.values())} spans, "
        f"{sum(len(each.commits) for each in notes.values())} commits, "
        f"refused {sorted(error for each in notes.values() for error in each.refused)[:5]}, "
        f"longest wait {longest_wait_s:.2f} s"
    )
    assert_sound(workload.history())
    for life in workload.lives:
        found = notes[life.name]
        assert found.broken is None, f"{life.name}: {found.broken}"
        assert not found.errors, f"{life.name}: {found.errors[:3]}"
        assert found.left or life.killed, f"{life.name} has ended without leaving the group, though it was not killed"


@pytest.mark.parametrize("kind", one_of(list(FAULTS)))
def test_one_fault_after_the_other(kind: str, tmp_path: Path) -> None:
    with tormented(tmp_path) as monkey:
        for fault in FAULTS[kind]:
            monkey.do(fault)
            monkey.mended()


@pytest.mark.long
def test_faults_at_random(tmp_path: Path) -> None:
    faults = [fault for kind in FAULTS.values() for fault in kind]
    with tormented(tmp_path) as monkey:
        until = time.monotonic() + LONG_S
        while time.monotonic() < until:
            monkey.do(monkey.chance.choice(faults))
            if monkey.chance.random() < 0.7:  # else the next one comes while the group is still on its way
                monkey.mended()
