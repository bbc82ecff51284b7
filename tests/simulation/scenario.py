"""Scripted faults: a cluster without random ones, and words to tell a story about it.

story = Story(voters=5)
story.lead(1)
story.hold("append_answer", source=5, target=1)
story.separate({1, 5}, {2, 3, 4})
asked = story.propose(1)
story.run(0.3)
story.nobody_acknowledged(asked)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Self

import raftmeta.raft.wal as wal_module
from raftlog.v1 import records_pb2
from raftlog.v1.raft_pb2 import RaftMessage
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.raft import consensus
from raftmeta.raft.consensus import RaftOptions
from tests.simulation.parts import Parts
from tests.simulation.schedule import Simulation
from tests.simulation.voter import Committed, HelloBytes, Voter

PATIENCE_S = 20.0


@dataclass
class Asked:
    """A command that was proposed, and what came back."""

    topic: str
    answers: list[object] = field(default_factory=list)

    @property
    def acknowledged(self) -> bool:
        """Whether it was committed, as far as the proposer knows."""
        return any(isinstance(answer, Committed) for answer in self.answers)


@dataclass
class Hold:
    """What is kept back, and what that was so far."""

    kind: str
    source: int | None
    target: int | None
    kept: list[Callable[[], None]] = field(default_factory=list)


class Story:
    """A cluster whose faults are told one by one. Use it as a context: it borrows the engine's clock."""

    def __init__(self, voters: int = 3, options: RaftOptions | None = None, parts: Parts | None = None) -> None:
        self.simulation = self._new_simulation(voters, parts)
        self.simulation.options = options or RaftOptions()
        self.simulation.segment_bytes = wal_module.SEGMENT_BYTES
        self.simulation.network.late_share = 0.0
        self.simulation.network.hook = self._hook
        self.seen: list[tuple[float, int, int, object]] = []
        """(time, from, to, payload) of everything that went between hosts but Raft messages."""
        self._holds: list[Hold] = []
        self._kept: list[Callable[[], None]] = []
        self._topics = 0
        self._clock = consensus.use_clock(self.simulation.clock_s)
        self.simulation.start()

    @staticmethod
    def _new_simulation(voters: int, parts: Parts | None) -> Simulation:
        return Simulation(1, voters, parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        consensus.use_clock(self._clock)

    # Time

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.simulation.scheduler.run_until(self.simulation.scheduler.now_s + seconds)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Let time pass until something is so."""
        end_s = self.simulation.scheduler.now_s + PATIENCE_S
        while not condition():
            assert self.simulation.scheduler.now_s < end_s, f"not within {PATIENCE_S:g} s of virtual time: {what}"
            self.run(0.01)

    # Leaders

    def voter(self, node_id: int) -> Voter:
        """Return a running voter."""
        found = self.simulation.voter_on(node_id)
        assert found is not None
        return found

    def serving(self, among: Iterable[int] | None = None) -> int | None:
        """Return the node that serves as controller; of several, the one in the highest epoch."""
        candidates = [self.voter(each) for each in among or self.simulation.voters]
        serving = [each for each in candidates if each.controller.serving]
        return max(serving, key=lambda each: each.node.term).host.node_id if serving else None

    def lead(self, node_id: int) -> None:
        """Bring it about that this node, the lowest that can, serves as controller and all others follow."""
        for _ in range(20):
            self.until(lambda: self.simulation.what_is_wrong() is None, "a controller that serves")
            leader = self.serving()
            assert leader is not None
            if leader == node_id:
                return
            self.voter(leader).process.run(self.voter(leader).transfer)
            self.run(0.5)
        raise AssertionError(f"node {node_id} did not become the controller in 20 transfers")

    def another_leads(self, among: Iterable[int]) -> int:
        """Wait until one of these nodes serves as controller; return which."""
        nodes = list(among)
        self.until(lambda: self.serving(nodes) is not None, f"a controller among {nodes}")
        serving = self.serving(nodes)
        assert serving is not None
        return serving

    # Faults

    def separate(self, some: Iterable[int], others: Iterable[int]) -> None:
        """Let no packets through between two groups of nodes; connections stay as they are."""
        others = list(others)
        for one in some:
            for other in others:
                self.simulation.network.cut(one, other)
                self.simulation.network.cut(other, one)

    def break_connections(self, some: Iterable[int], others: Iterable[int]) -> None:
        """Reset all connections between two groups of nodes; what is under way is lost."""
        others = list(others)
        for one in some:
            for other in others:
                self.simulation.network.break_between(one, other)

    def heal(self) -> None:
        """Let all packets through; holds stay."""
        self.simulation.network.heal()

    def hold(self, kind: str, source: int | None = None, target: int | None = None) -> Hold:
        """Keep Raft messages of a kind ("raft": of any), or payloads of a class, back from now on."""
        self._holds.append(Hold(kind, source, target))
        return self._holds[-1]

    def drop(self, hold: Hold) -> None:
        """Hold these no more; held messages are lost."""
        self._holds.remove(hold)

    def hold_no_more(self) -> None:
        """Let new messages through; what is held stays so."""
        self._kept += [deliver for hold in self._holds for deliver in hold.kept]
        self._holds = []

    def release(self) -> int:
        """Deliver everything that was held, late as it is, and hold nothing more; return how many messages that is."""
        self.hold_no_more()
        kept, self._kept = self._kept, []
        for deliver in kept:
            deliver()
        return len(kept)

    def _hook(self, source: int, target: int, payload: object, deliver: Callable[[], None]) -> bool:
        if isinstance(payload, bytes) and not isinstance(payload, HelloBytes):
            kinds = ("raft", RaftMessage.FromString(payload).WhichOneof("body"))
        else:
            kinds = (type(payload).__name__, None)
            self.seen.append((self.simulation.scheduler.now_s, source, target, payload))
        for hold in self._holds:
            if hold.kind in kinds and hold.source in (source, None) and hold.target in (target, None):
                hold.kept.append(deliver)
                return False
        return True

    # Commands

    def propose(self, node_id: int, count: int = 1) -> list[Asked]:
        """Have a node propose commands that create topics, if it takes itself for the controller."""
        asked = []
        for _ in range(count):
            self._topics += 1
            one = Asked(f"told-{self._topics}")
            create = records_pb2.CreateTopicCommand(
                name=one.topic, topic_id=self._topics.to_bytes(16, "big"), partitions=1, replication_factor=1
            )
            voter = self.voter(node_id)
            voter.process.run(voter.propose, MetadataCommand(create_topic=create), one.answers.append)
            asked.append(one)
        return asked

    def commit(self, node_id: int, count: int = 1) -> None:
        """Propose commands, and wait until they are acknowledged."""
        asked = self.propose(node_id, count)
        self.until(lambda: all(each.acknowledged for each in asked), f"{count} commands of node {node_id} committed")

    def topics(self, node_id: int) -> set[str]:
        """Return the names of the topics in a node's image."""
        return set(self.voter(node_id).image.topic_id_by_name)

    def all_well(self) -> None:
        """Wait until everything works again."""
        self.until(lambda: self.simulation.what_is_wrong() is None, "everything well")
