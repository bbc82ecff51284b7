"""A small deterministic cluster of Raft nodes: one thread, a virtual clock, streams that deliver in order."""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

from raftlog.errors import CorruptRecordError, RaftlogError
from raftlog.v1.raft_pb2 import RaftMessage
from raftmeta.raft import consensus
from raftmeta.raft.consensus import RaftOptions
from raftmeta.raft.node import ProposalOutcome, RaftNode
from raftmeta.raft.ports import Work, WorkDone, run_inline
from raftmeta.raft.snapshots import SnapshotStore
from raftmeta.raft.voters import MetadataDirectory
from raftmeta.raft.wal import WriteAheadLog
from tests.support.metadata_disk import MemoryDisk, nothing_survives

CLUSTER_ID = "cluster-under-test"
_ITEM = struct.Struct("<QQI")


class ListState:
    """Remembers every command that was applied, with index and term."""

    def __init__(self) -> None:
        self.applied: list[tuple[int, int, bytes]] = []
        self.terms: list[int] = []
        self.fail_on: bytes | None = None

    @property
    def commands(self) -> list[bytes]:
        return [command for _, _, command in self.applied]

    def apply(self, index: int, term: int, command: bytes) -> object:
        if command == self.fail_on:
            raise ValueError(f"cannot apply {command!r}")
        self.applied.append((index, term, command))
        return command

    def begin_term(self, index: int, term: int) -> None:
        self.terms.append(term)

    def capture(self) -> object:
        return tuple(self.applied)

    def encode(self, captured: object) -> bytes:
        assert isinstance(captured, tuple)
        return b"".join(_ITEM.pack(index, term, len(command)) + command for index, term, command in captured)

    def decode(self, data: bytes, index: int, term: int) -> list[tuple[int, int, bytes]]:
        applied = []
        position = 0
        while position < len(data):
            if position + _ITEM.size > len(data):
                raise CorruptRecordError("cut off")
            at, at_term, size = _ITEM.unpack_from(data, position)
            position += _ITEM.size + size
            if position > len(data):
                raise CorruptRecordError("cut off")
            applied.append((at, at_term, data[position - size : position]))
        return applied

    def adopt(self, decoded: object) -> None:
        assert isinstance(decoded, list)
        self.applied = decoded


@dataclass
class Events:
    """A listener that writes down what it is told."""

    told: list[str] = field(default_factory=list)

    def on_active(self, term: int) -> None:
        self.told.append(f"active {term}")

    def on_inactive(self) -> None:
        self.told.append("inactive")

    def on_applied(self, index: int) -> None:
        pass


class Host:
    """A machine: a disk that outlives the node on it."""

    def __init__(self, cluster: RaftCluster, node_id: int) -> None:
        self.cluster, self.node_id = cluster, node_id
        self.disk = MemoryDisk()
        self.starts = 0
        self.running = False

    def start(self) -> None:
        cluster = self.cluster
        self.starts += 1
        self.state, self.events = ListState(), Events()
        self.directory = MetadataDirectory.open(
            self.disk, self.node_id, CLUSTER_ID, cluster.ids, lambda: UUID(int=self.node_id * 1000 + self.starts)
        )
        self.wal = WriteAheadLog(self.disk, self.directory.directory_id)
        self.wal.open()
        self.node = RaftNode(
            node_id=self.node_id,
            voters=cluster.ids,
            directory=self.directory,
            wal=self.wal,
            snapshots=SnapshotStore(self.disk),
            state=self.state,
            listener=self.events,
            rng=random.Random(f"{cluster.seed}-{self.node_id}-{self.starts}"),
            options=cluster.options,
            run_off_loop=cluster.run_off_loop,
        )
        self.running = True

    def step(self) -> None:
        """One turn of the owner's loop; an error of the disk or the node ends the process."""
        if not self.running:
            return
        try:
            self.node.cycle()
            self.cluster.carry(self.node_id, self.node.take_immediate())
            if not self.cluster.hold_syncs:
                self.wal.sync()
                self.cluster.carry(self.node_id, self.node.take_durable())
        except RaftlogError:
            self.cluster.kill(self.node_id)
            raise


class RaftCluster:
    """Hosts 1 to `nodes`, all started and linked. Use `raft_cluster`, which sets the clock."""

    def __init__(self, nodes: int, options: RaftOptions, seed: int = 0) -> None:
        self.ids = list(range(1, nodes + 1))
        self.options, self.seed, self.now = options, seed, 1000.0
        self.hold_syncs = False
        self.run_off_loop: Callable[[Work, WorkDone], None] = run_inline
        self.links: dict[tuple[int, int], deque[RaftMessage]] = {}
        self.held: set[tuple[int, int]] = set()
        """Streams that deliver nothing for now."""
        self.cut: set[tuple[int, int]] = set()
        """Streams that cannot be opened."""
        self.hosts = {node_id: Host(self, node_id) for node_id in self.ids}
        self.sent: list[tuple[int, int, RaftMessage]] = []

    def __getitem__(self, node_id: int) -> RaftNode:
        return self.hosts[node_id].node

    def start(self, *ids: int) -> None:
        for node_id in ids or self.ids:
            self.hosts[node_id].start()
        self.connect()

    def connect(self) -> None:
        """Open every stream that is missing and not cut."""
        for a in self.ids:
            for b in self.ids:
                both = self.hosts[a].running and self.hosts[b].running
                if a != b and both and (a, b) not in self.links and (a, b) not in self.cut:
                    self.links[a, b] = deque()
                    self[a].link_up(b, self[b].hello(a))
                    self[b].hello_from(a, self[a].hello(b))

    def break_link(self, a: int, b: int) -> None:
        if self.links.pop((a, b), None) is None:
            return
        if self.hosts[a].running:
            self[a].link_down(b)
        if self.hosts[b].running:
            self[b].stream_lost(a)

    def isolate(self, *ids: int) -> None:
        """Cut these nodes off from all others, though not from one another."""
        others = [other for other in self.ids if other not in ids]
        for a in ids:
            for b in others:
                for link in ((a, b), (b, a)):
                    self.cut.add(link)
                    self.break_link(*link)

    def heal(self) -> None:
        self.cut.clear()
        self.held.clear()
        self.connect()

    def kill(self, node_id: int, *, power: bool = True) -> None:
        """End a process; with `power`, its machine loses unsynced content."""
        host = self.hosts[node_id]
        host.running = False
        for other in self.ids:
            if other != node_id:
                self.break_link(node_id, other)
                self.break_link(other, node_id)
        host.disk = host.disk.survivor(nothing_survives) if power else host.disk.after_kill()

    def carry(self, sender: int, outgoing: list[tuple[int, RaftMessage]]) -> None:
        for receiver, message in outgoing:
            link = self.links.get((sender, receiver))
            self.sent.append((sender, receiver, message))
            if link is not None:
                link.append(RaftMessage.FromString(message.SerializeToString()))

    def deliver(self, only: set[tuple[int, int]] | None = None) -> bool:
        """Hand over what is on the way; returns whether there was something."""
        found = False
        for link, queue in list(self.links.items()):
            if link in self.held or (only is not None and link not in only):
                continue
            while queue:
                found = True
                self[link[1]].receive(link[0], queue.popleft())
        return found

    def settle(self, only: set[tuple[int, int]] | None = None, limit: int = 1000) -> None:
        """Deliver messages and cycle until there is nothing left to do, without moving the clock."""
        for _ in range(limit):
            busy = self.deliver(only)
            for host in self.hosts.values():
                if host.running and host.node.wants_cycle:
                    busy = True
                    host.step()
            if not busy:
                return
        raise AssertionError("the cluster still has messages to deliver or steps to take after the limit of rounds")

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass from one deadline to the next; returns whether `until` came true."""
        end = self.now + seconds
        while self.now < end:
            if until is not None and until():
                return True
            running = [host for host in self.hosts.values() if host.running]
            due = min((host.node.next_deadline_s() for host in running), default=end)
            self.now = min(max(due, self.now) + 0.001, end)
            for host in running:
                if host.node.next_deadline_s() < self.now:
                    host.step()
            self.settle()
        return until is not None and until()

    def leader(self, *among: int) -> int | None:
        """Return the active node of the highest term."""
        active = [
            (host.node.term, host.node_id)
            for host in self.hosts.values()
            if host.running and host.node.active and (not among or host.node_id in among)
        ]
        return max(active)[1] if active else None

    def elect(self, node_id: int) -> None:
        """Make a node the leader."""
        for _ in range(50):
            if self.leader() == node_id:
                return
            for other in self.ids:
                if self.hosts[other].running:
                    soon = self.now - 1 if other == node_id else self.now + 2.0
                    self[other]._elections._leader_suspected = True  # or they would stand by the leader they have
                    if self[other].role != "leader":
                        self[other]._consensus.election_deadline_s = soon
            self.hosts[node_id].step()
            self.settle()
            if self.leader() != node_id:
                self.now += 0.2
                self.settle()
        raise AssertionError(f"node {node_id} was not elected within the limit of rounds")

    def propose(self, node_id: int, *commands: bytes) -> list[ProposalOutcome]:
        """Propose at a node and let it cycle once; outcomes are appended to the list as they come."""
        outcomes: list[ProposalOutcome] = []
        for command in commands:
            self[node_id].propose(command, outcomes.append)
        self.hosts[node_id].step()
        return outcomes


@contextmanager
def raft_cluster(nodes: int = 3, options: RaftOptions | None = None, *, start: bool = True) -> Iterator[RaftCluster]:
    """Yield a cluster whose clock is the engine's."""
    cluster = RaftCluster(nodes, options or RaftOptions(commit_notice_s=0))
    previous = consensus.use_clock(lambda: cluster.now)
    try:
        if start:
            cluster.start()
            cluster.settle()
        yield cluster
    finally:
        consensus.use_clock(previous)
