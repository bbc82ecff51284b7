"""Short random histories of a small cluster; the simulation in tests/simulation goes much further."""

from __future__ import annotations

import random

import pytest

from raftlog.v1.raft_pb2 import VOTER
from raftmeta.raft.node import Applied, ProposalOutcome
from raftmeta.raft.options import RaftOptions
from tests.support.metadata_disk import MemoryDisk
from tests.support.raft_cluster import RaftCluster, raft_cluster

OPTIONS = RaftOptions(
    snapshot_after_entries=15, log_tail_entries=4, snapshot_chunk_bytes=200, batch_bytes=300, max_command_bytes=1000
)


class History:
    """What was acknowledged, and checks of it."""

    def __init__(self, cluster: RaftCluster) -> None:
        self.cluster = cluster
        self.acknowledged: dict[int, bytes] = {}
        self.applied: dict[int, tuple[int, bytes]] = {}
        self.leaders: dict[int, int] = {}
        self.count = 0

    def propose(self, node_id: int, size: int) -> None:
        self.count += 1
        command = b"%d-" % self.count + b"x" * size

        def done(outcome: ProposalOutcome) -> None:
            if isinstance(outcome, Applied):
                assert outcome.result == command
                self.acknowledged[outcome.index] = command

        self.cluster[node_id].propose(command, done)

    def check(self) -> None:
        for host in self.cluster.hosts.values():
            if not host.running:
                continue
            for index, term, command in host.state.applied:
                assert self.applied.setdefault(index, (term, command)) == (term, command), "two commands at one index"
            if host.node.role == "leader":
                assert self.leaders.setdefault(host.node.term, host.node_id) == host.node_id, "two leaders in a term"
        for index, command in self.acknowledged.items():
            assert self.applied[index][1] == command


def one_history(seed: int, nodes: int, steps: int, *, wipe: bool) -> History:
    rng = random.Random(seed)
    with raft_cluster(nodes, OPTIONS) as cluster:
        history = History(cluster)
        for _ in range(steps):
            up = [host.node_id for host in cluster.hosts.values() if host.running]
            down = [node_id for node_id in cluster.ids if node_id not in up]
            what = rng.random()
            if what < 0.5:
                for node_id in up:
                    if cluster[node_id].active and not cluster[node_id]._elections.handing_over:
                        for _ in range(rng.choice([1, 3, 20])):
                            history.propose(node_id, rng.randrange(120))
                        cluster.hosts[node_id].step()
            elif what < 0.6:
                cluster.isolate(*rng.sample(cluster.ids, rng.randrange(1, nodes)))
            elif what < 0.7:
                cluster.heal()
            elif what < 0.75:
                a, b = rng.sample(cluster.ids, 2)
                cluster.break_link(a, b)
                cluster.connect()
            elif what < 0.82 and up and (len(down) < nodes // 2 or rng.random() < 0.3):
                victim = rng.choice(up)
                cluster.kill(victim, power=rng.random() < 0.5)
                whole = all(host.directory.state == VOTER for host in cluster.hosts.values())
                if wipe and rng.random() < 0.3 and not down and whole:
                    cluster.hosts[victim].disk = MemoryDisk()
                    cluster.start(victim)
                    cluster.heal()  # one loss of data at a time is what a quorum is promised to survive
                    for _ in range(30):
                        cluster.run(1.0)
                    assert cluster.hosts[victim].directory.state == VOTER
            elif what < 0.92 and down:
                cluster.start(rng.choice(down))
            elif what < 0.94:
                for node_id in up:
                    cluster[node_id].transfer_leadership()
            links = list(cluster.links)
            cluster.held = set(rng.sample(links, rng.randrange(len(links) // 3 + 1)))
            cluster.run(rng.choice([0.001, 0.05, 0.3, 1.0]))
            history.check()
        for node_id in cluster.ids:
            if not cluster.hosts[node_id].running:
                cluster.start(node_id)
        cluster.heal()
        assert cluster.run(20, lambda: cluster.leader() is not None), "no leader although everybody is there"
        cluster.run(3)
        history.check()
        newest = {cluster[node_id].last_applied for node_id in cluster.ids}
        assert len(newest) == 1, "somebody does not catch up"
        states = [cluster.hosts[node_id].state.applied for node_id in cluster.ids]
        assert all(state == states[0] for state in states)
        for command in history.acknowledged.values():
            assert command in cluster.hosts[1].state.commands
        return history


@pytest.mark.parametrize("seed", range(12))
def test_three_voters(seed: int) -> None:
    one_history(seed, 3, 60, wipe=False)


@pytest.mark.parametrize("seed", range(5))
def test_five_voters(seed: int) -> None:
    one_history(100 + seed, 5, 60, wipe=False)


@pytest.mark.parametrize("seed", range(5))
def test_three_voters_that_lose_their_disks_one_at_a_time(seed: int) -> None:
    one_history(200 + seed, 3, 60, wipe=True)


def test_the_histories_are_not_empty() -> None:
    history = one_history(1, 3, 60, wipe=False)
    assert len(history.acknowledged) > 30
    assert len(history.leaders) > 1
