"""What goes wrong: each fault is a method that says whether it had anything to be done to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftlog.v1.raft_pb2 import VOTER
from raftlog.v1.records_pb2 import MetadataCommand, PartitionRef, RevokeLeadersCommand
from tests.simulation.fault_maker import FaultMaker
from tests.simulation.process import Host

if TYPE_CHECKING:
    from tests.simulation.schedule import Simulation

PAUSE_S = (0.2, 1.0, 3.0)
CUT_S = (0.3, 1.0, 1.5, 2.5)
SICK_DISK_S = (0.3, 1.0, 3.0)


class Faults(FaultMaker):
    """What may happen to any cluster; a schedule draws its own mixture."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self._kinds = [
            (self._kill, 4),
            (self._cut_power, 3),
            (self._die_writing, 3),
            (self._cut_power_of_all, 1),
            (self._pause, 4),
            (self._isolate, 3),
            (self._split, 2),
            (self._part_minority, 1),
            (self._part_majority, 1),
            (self._bridge, 1),
            (self._cut_one_way, 3),
            (self._break_connections, 3),
            (self._slow_path, 2),
            (self._slow_disk, 2),
            (self._full_disk, 1),
            (self._step_clock, 1),
            (self._broken_disk, 0.7),
            (self._wipe, 0.7),
            (self._transfer, 1),
            (self._shut_down, 2),
            (self._old_leader_returns, 0.7),
            (self._revoke_behind_a_cut, 1),
            (self._depose, 1),
            (self._slow_answers, 1),
        ]
        # Some schedules are about few things: those find what an even mixture covers up.
        keep = self._random.choice((1.0, 1.0, 0.5, 0.3))
        self._weights = [weight * (self._random.random() < keep) for _, weight in self._kinds]
        if not any(self._weights):
            self._weights[0] = 1
        sequences = (self._old_leader_returns, self._revoke_behind_a_cut, self._depose, self._slow_answers)
        if self._random.random() < 0.2:  # long sequences, which others would only disturb
            self._weights = [float(fault in sequences) for fault, _ in self._kinds]
            self._mean_pause_s = 4.0

    def _pick(self) -> Host:
        """Pick a host, the leader's more often than others."""
        leader = self._simulation.leader()
        if leader is not None and self._random.random() < 0.4:
            return leader.host
        return self._random.choice(self._simulation.hosts)

    # Processes and machines

    def _kill(self) -> bool:
        return self._stop(self._pick(), "killed")

    def _cut_power(self) -> bool:
        return self._stop(self._pick(), "powerless", power=True)

    @staticmethod
    def _stop(host: Host, why: str, *, power: bool = False) -> bool:
        was_alive = host.alive
        host.stop(why, power)
        return was_alive

    def _die_writing(self) -> bool:
        host = self._pick()
        self._trace(host, "dying-soon within one of its next disk operations")
        host.disk.die_after(self._random.randrange(6))
        return host.alive

    def _cut_power_of_all(self) -> bool:
        return sum(self._stop(host, "powerless with all others", power=True) for host in self._simulation.hosts) > 0

    def _pause(self) -> bool:
        host = self._pick()
        process = host.process
        if process is None or process.paused:
            return False
        self._trace(host, "paused")
        process.pause()
        self._after(self._random.choice(PAUSE_S), self._resume, host, host.boots)
        return True

    def _resume(self, host: Host, boots: int) -> None:
        if host.process is not None and host.boots == boots and host.process.paused:
            self._trace(host, "resumed")
            host.process.resume()

    # Network

    def _isolate(self) -> bool:
        host = self._pick()
        return self._part({host.node_id}, "isolated")

    def _split(self) -> bool:
        """Part the hosts into two groups."""
        group = {host.node_id for host in self._simulation.hosts if self._random.random() < 0.5}
        return self._part(group, "split")

    def _part(self, group: set[int], what: str) -> bool:
        rest = [host.node_id for host in self._simulation.hosts if host.node_id not in group]
        paths = [(one, other) for one in sorted(group) for other in rest]
        return self._cut([*paths, *((other, one) for one, other in paths)], what)

    def _part_minority(self) -> bool:
        """The active controller finds itself among the lesser part of the voters."""
        return self._part(self._side_of_the_leader((len(self._simulation.voters) - 1) // 2), "in-the-minority")

    def _part_majority(self) -> bool:
        """The active controller keeps a bare majority, and loses sight of the others."""
        return self._part(self._side_of_the_leader(len(self._simulation.voters) // 2 + 1), "in-the-majority")

    def _side_of_the_leader(self, voters: int) -> set[int]:
        """Return hosts: so many voters, the leader first, and about half of the hosts that are only brokers."""
        leader, rest = self._simulation.leader(), list(self._simulation.voters)
        self._random.shuffle(rest)
        rest.sort(key=lambda each: leader is None or each != leader.host.node_id)
        others = [host.node_id for host in self._simulation.hosts if host.node_id not in rest]
        return {*rest[:voters], *(each for each in others if self._random.random() < 0.5)}

    def _bridge(self) -> bool:
        """Two halves hear only one host in common, and that one hears both."""
        hosts = [host.node_id for host in self._simulation.hosts]
        self._random.shuffle(hosts)
        half = len(hosts) // 2
        paths = [(one, other) for one in sorted(hosts[:half]) for other in sorted(hosts[half + 1 :])]
        return self._cut([*paths, *((other, one) for one, other in paths)], f"bridge over node {hosts[half]}")

    def _cut_one_way(self) -> bool:
        host = self._pick()
        others = [each for each in self._simulation.hosts if each is not host]
        if not others:
            return False
        if self._random.random() < 0.5:
            others = [self._random.choice(others)]
        paths = [(host.node_id, each.node_id) for each in others]
        if self._random.random() < 0.5:
            paths = [path[::-1] for path in paths]
        return self._cut(paths, "cut-one-way")

    def _cut(self, paths: list[tuple[int, int]], what: str) -> bool:
        self._trace(None, f"{what} {paths}")
        for path in paths:
            self._network.cut(*path)
        if self._random.random() < 0.5:
            for path in paths:
                self._network.break_between(*path)
        self._after(self._random.choice(CUT_S), self._mend_paths, paths)
        return bool(paths)

    def _mend_paths(self, paths: list[tuple[int, int]]) -> None:
        for path in paths:
            self._network.mend(*path)

    def _break_connections(self) -> None:
        host = self._pick()
        others = [each for each in self._simulation.hosts if each is not host and self._random.random() < 0.7]
        self._trace(host, f"reset to {[each.node_id for each in others]}")
        for other in others:
            self._network.break_between(host.node_id, other.node_id)

    def _slow_path(self) -> None:
        pair = (self._pick().node_id, self._pick().node_id)
        latency_s = self._random.choice((0.0005, 0.005, 0.05, 0.3))
        self._trace(None, f"slow path {pair}: {latency_s} s")
        self._network.slow_s[pair] = latency_s

    # Disks

    def _slow_disk(self) -> None:
        host = self._pick()
        self._trace(host, "slow-disk")
        host.sync_s = self._random.choice(((0.02, 0.05), (0.1, 0.4), (0.001, 1.0)))
        self._after(self._random.choice(SICK_DISK_S), self._mend, host)

    def _full_disk(self) -> None:
        host = self._pick()
        self._trace(host, "full-disk")
        host.disk.full = True
        self._after(self._random.choice(SICK_DISK_S), self._mend, host)

    def _broken_disk(self) -> None:
        host = self._pick()
        self._trace(host, "broken-disk")
        host.disk.broken = True
        self._after(self._random.choice(SICK_DISK_S), self._mend, host)

    def _step_clock(self) -> None:
        """The clock of a host is set: its time of day jumps by up to an hour; its monotonic time does not."""
        host = self._pick()
        step_ms = self._random.choice((1, -1)) * self._random.choice((500, 5_000, 3_600_000))
        self._trace(host, f"clock jumps by {step_ms} ms")
        host.wall_offset_ms += step_ms

    def _wipe(self) -> bool:
        """Replace the disk of one voter, unless another one has yet to catch up: a majority keeps what it promised."""
        voters = self._simulation.voters
        states = {each: self._simulation.voter_on(each) for each in voters}
        if len(voters) < 3 or any(each is None or each.node.voter_state != VOTER for each in states.values()):
            return False
        host = self._simulation.host(self._random.choice(voters))
        self._trace(host, "wiped")
        host.stop("gets an empty disk")
        host.disk.wipe()
        self._simulation.wiped.add(host.node_id)
        return True

    # Leadership

    def _shut_down(self) -> bool:
        """Let a broker leave in good order; its process starts again afterwards."""
        host = self._pick()
        broker = self._simulation.brokers.get(host.node_id)
        if broker is None:
            return False
        self._trace(host, "shutting-down")
        broker.wants_shutdown = True
        return True

    def _transfer(self) -> bool:
        leader = self._simulation.leader()
        if leader is None or not leader.process.alive or leader.process.paused:
            return False
        self._trace(leader.host, "transfers the leadership")
        leader.process.run(leader.transfer)
        return True

    # Sequences that single faults come to once in a million schedules

    def _old_leader_returns(self) -> bool:
        """A leader is cut off with one follower, and leads again when that one's answers of then arrive."""
        leader = self._simulation.leader()
        others = [each for each in self._simulation.voters if leader is None or each != leader.host.node_id]
        if leader is None or len(others) < 2:
            return False
        old, follower = leader.host.node_id, self._random.choice(others)
        self._trace(leader.host, f"old-leader cut off with node {follower}")
        rest = [each for each in others if each != follower]
        self._network.slow_s[follower, old] = 0.3
        paths = [path for one in (old, follower) for each in rest for path in ((one, each), (each, one))]
        for path in paths:
            self._network.cut(*path)
            self._network.break_between(*path)
        for turn in range(8):  # a tail longer than what the others commit meanwhile
            self._after(0.02 * turn, leader.process.run, self._simulation.bursts.propose, leader, 10)
        self._after(0.25, self._network.break_between, old, follower, self._random.uniform(1.5, 3.0))
        self._after(0.25, self._network.slow_s.pop, (follower, old), None)
        self._after(1.2, self._mend_paths, paths)
        for turn in range(12):
            self._after(1.4 + turn * 0.15, self._transfer_unless, old)
        return True

    def _depose(self) -> bool:
        """A leader is cut off at once and for long, with the broker on its own host."""
        leader = self._simulation.leader()
        if leader is None:
            return False
        here = leader.host.node_id
        paths = [(here, each.node_id) for each in self._simulation.hosts if each is not leader.host]
        self._trace(leader.host, "deposed")
        for path in paths:
            self._network.cut(*path)
            self._network.cut(*path[::-1])
            self._network.break_between(*path)
        self._after(2.5, self._mend_paths, [*paths, *(path[::-1] for path in paths)])
        return True

    def _slow_answers(self) -> bool:
        """The leader's answers to a broker take almost as long as a lease; then it receives nothing from the broker."""
        leader = self._simulation.leader()
        others = [each for each in self._simulation.hosts if leader is None or each is not leader.host]
        if leader is None or not others:
            return False
        here, there = leader.host.node_id, self._random.choice(others).node_id
        self._trace(leader.host, f"slow-answers to node {there}")
        self._network.slow_s[here, there] = 0.6
        self._after(1.0, self._network.cut, there, here)
        self._after(1.5, self._network.slow_s.pop, (here, there), None)
        self._after(3.5, self._network.mend, there, here)
        return True

    def _transfer_unless(self, node_id: int) -> None:
        leader = self._simulation.leader()
        if not self._stopped and leader is not None and leader.host.node_id != node_id:
            leader.process.run(leader.transfer)

    def _revoke_behind_a_cut(self) -> bool:
        """Leaderships move away from a broker that cannot hear of it."""
        host = self._simulation.host(self._random.choice(self._simulation.broker_ids))
        others = [each.node_id for each in self._simulation.hosts if each is not host]
        self._cut([path for each in others for path in ((host.node_id, each), (each, host.node_id))], "isolated")
        image = self._simulation.invariants.truth
        refs = [
            PartitionRef(topic_id=topic_id, partition=partition.partition)
            for topic_id, topic in sorted(image.topics.items())
            for partition in topic.partitions
            if partition.leader == host.node_id
        ]
        command = MetadataCommand(revoke_leaders=RevokeLeadersCommand(partitions=refs[:50]))
        for delay_s in (0.05, 0.5):
            self._after(delay_s, self._propose, command)
        return bool(refs)

    def _propose(self, command: MetadataCommand) -> None:
        for node_id in self._simulation.voters:
            voter = self._simulation.voter_on(node_id)
            if voter is not None:
                voter.process.run(voter.propose, command, lambda answer: None)
