"""Real controllers are killed and frozen while clients change and read metadata; the history must have an order.

The short form kills and freezes a leader, a follower and all servers once. The long form goes on until a hundred
thousand commands were acknowledged.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest

from raftlog.errors import RaftlogError
from raftlog.testing import ServerFailed
from tests.support.history.recorder import Recorder, WatchedCluster
from tests.support.history.workloads import of_calls
from tests.support.linearizability import NotLinearizable, Operation, check
from tests.support.metadata_workload import ConfigModel, Workload, check_barriers, without_unread_values

FAULTS_PAUSE_S = (0.5, 2.0)
"""At most three restarts a second, also after all servers were killed."""
PAUSE_S = 30.0
"""Longer than this no change is without an answer while a majority could exist."""
FREEZE_S = (0.3, 1.0, 2.5)


@dataclass
class Monkey:
    """Breaks one thing after the other, and mends it."""

    cluster: WatchedCluster
    notes: Recorder
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)

    def kill(self, role: str) -> None:
        """Kill the server with this role, and start it again."""
        node_id = self._find(role)
        self.done[f"kill {role}"] += 1
        with self.notes.fault(f"kill {role}", node_id):
            self.cluster.kill(node_id)
            time.sleep(self.chance.choice((0.0, 0.3, 1.5)))
            self.cluster.start(node_id)

    def freeze(self, role: str) -> None:
        """Freeze the server with this role for a while."""
        node_id = self._find(role)
        self.done[f"freeze {role}"] += 1
        with self.notes.fault(f"freeze {role}", node_id):
            self.cluster.pause(node_id)
            time.sleep(self.chance.choice(FREEZE_S))
            self.cluster.resume(node_id)

    def kill_all(self) -> None:
        """Kill all servers, and start them again."""
        self.done["kill all"] += 1
        with self.notes.fault("kill all"):
            for node_id in self.cluster.node_ids:
                self.cluster.kill(node_id)
            self.cluster.start_all()

    def _find(self, role: str) -> int:
        try:
            leader = self.cluster.controller(timeout_s=10)
        except (RaftlogError, ServerFailed):
            leader = self.chance.choice(self.cluster.node_ids)
        if role == "leader":
            return leader
        return self.chance.choice([each for each in self.cluster.node_ids if each != leader])

    def anything(self) -> None:
        """Do one of the above."""
        what = self.chance.random()
        role = self.chance.choice(("leader", "leader", "follower"))
        if what < 0.45:
            self.kill(role)
        elif what < 0.90:
            self.freeze(role)
        else:
            self.kill_all()

    def rest(self) -> None:
        """Let the cluster alone for a moment."""
        time.sleep(self.chance.uniform(*FAULTS_PAUSE_S))


async def torment(workload: Workload, monkey: Monkey, long: bool, enough: int) -> None:
    """Run clients and faults side by side until there is enough, then read everything."""
    over = False

    def faults() -> None:
        if not long:
            monkey.rest()
            monkey.kill("leader")
            monkey.rest()
            monkey.freeze("leader")
            monkey.rest()
            monkey.kill("follower")
            monkey.rest()
            monkey.kill_all()
            monkey.rest()
            return
        while not over:
            monkey.anything()
            monkey.rest()

    breaking = asyncio.create_task(asyncio.to_thread(faults))
    deadline_s = time.monotonic() + (1_800 if long else 180)

    def until() -> bool:
        gone = breaking.done() and breaking.exception() is not None
        finished = workload.acknowledged >= enough and (long or breaking.done())
        return gone or finished or time.monotonic() > deadline_s

    await workload.run(until)
    over = True
    await breaking
    await asyncio.wait_for(workload.read_all(), 120)


@pytest.mark.parametrize(
    ("enough", "clients", "topics", "seed"),
    [
        pytest.param(300, 6, 24, 1, id="short"),
        pytest.param(100_000, 48, 120, 2, id="long", marks=pytest.mark.long),
    ],
)
def test_what_clients_saw_has_an_order(enough: int, clients: int, topics: int, seed: int) -> None:
    long = enough > 10_000

    calls: list[tuple[str, Operation]] = []

    async def run() -> Workload:
        workload = Workload(cluster.bootstrap, clients, topics, seed, history=calls)
        try:
            await torment(workload, monkey, long, enough)
        finally:
            await workload.close()
        return workload

    with (
        WatchedCluster(nodes=3) as cluster,
        Recorder(cluster, None, PAUSE_S, lambda: of_calls(calls), writes=("admin",)) as notes,
    ):
        monkey = Monkey(cluster, notes, random.Random(seed))
        workload = asyncio.run(run())
        assert [cluster.is_running(node_id) for node_id in cluster.node_ids] == [True] * 3
    print(f"{workload.acknowledged} acknowledged, {len(workload.barriers)} linearizable reads, {dict(monkey.done)}")
    assert workload.acknowledged >= enough
    check_barriers(workload.barriers)
    by_topic: dict[str, list[Operation]] = defaultdict(list)
    for name, operation in workload.history:
        by_topic[name].append(operation)
    for name, operations in by_topic.items():
        try:
            check(without_unread_values(operations), ConfigModel())
        except NotLinearizable as error:
            raise NotLinearizable(f"{name}: {error}") from None
    assert len(by_topic) == topics
