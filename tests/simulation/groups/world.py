"""A group, its members and its coordinator in one thread: time is a number, the network a heap, chance a seed.

The coordinator is the real core. Its decisions are committed a while later; a crash cuts the log at a random place in
the uncommitted part, and another core loads the rest. The members are a small model of a client that keeps the rules of
`raftlog.v1.group` (one unanswered heartbeat, none before the first assignment of a stream).

After every event is checked (`Broken` is raised):
    no partition has two owners, by what members believe before their session is over on their own clocks
    no record gives a partition to two members
    no committed offset goes back (members here never seek)
    now and then: the records, compacted up to a random offset, replay to the state of the coordinator, which counts the
    groups of each user right
and after `heal`: every partition has a reader again, and the group is stable.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from random import Random

from google.protobuf.message import Message

from broker.coordinator.groups.assignors import BUILT_IN
from broker.coordinator.groups.classic.commands import JoinClassic
from broker.coordinator.groups.commands import (
    Command,
    CommitOffsets,
    CommitTransactionOffsets,
    Decision,
    Disconnected,
    GroupConfig,
    Heartbeat,
    Join,
    Now,
)
from broker.coordinator.groups.coordinator import GroupCoordinator, Rest
from broker.coordinator.groups.group import Group
from broker.coordinator.groups.topics import TopicPartition
from raftlog.errors import RaftlogError
from raftlog.v1.group_records_pb2 import AssignmentValue, GroupRecordKey, OffsetValue
from tests.simulation.groups.client import Client
from tests.simulation.groups.network import Link
from tests.support.group_driver import WALL_MS, Topics

Record = tuple[bytes, bytes | None]
USER = "User:a"


class Broken(AssertionError):
    """An invariant of the simulation is violated."""


def compacted(log: list[Record], upto: int, *, tombstones: bool) -> list[Record]:
    """Return the log with only the last record of each key below `upto`; tombstones there may be gone, too."""
    last = {key: index for index, (key, _) in enumerate(log[:upto])}
    kept = [log[index] for index in sorted(last.values())]
    return [record for record in kept if tombstones or record[1] is not None] + log[upto:]


class RecordsChecker:
    """Follows the records as they are appended."""

    def __init__(self) -> None:
        self._has: dict[str, set[TopicPartition]] = {}
        self.committed: dict[TopicPartition, int] = {}

    def note(self, key: bytes, value: bytes | None) -> None:
        parsed = GroupRecordKey.FromString(key)
        kind = parsed.WhichOneof("kind")
        if kind == "assignment_of":
            assignment = AssignmentValue.FromString(value or b"")
            has = {
                (topic.topic_id, number)
                for topics in (assignment.assigned, assignment.pending_revocation)
                for topic in topics
                for number in topic.partitions
            }
            for other, theirs in self._has.items():
                if other != parsed.assignment_of and has & theirs:
                    raise Broken(f"the records give {has & theirs} to {other} and to {parsed.assignment_of} at once")
            self._has[parsed.assignment_of] = has
        elif kind == "offset" and value is not None:
            partition = parsed.offset.topic_id, parsed.offset.partition
            offset = OffsetValue.FromString(value).offset
            if offset < self.committed.get(partition, 0):
                raise Broken(
                    f"the committed offset of partition {partition[1]} goes back from "
                    f"{self.committed[partition]} to {offset}"
                )
            self.committed[partition] = offset


class World:
    """One run: `run` with faults, then `heal`."""

    def __init__(self, seed: int, *, members: int = 4, faults: bool = True) -> None:
        self.random = Random(seed)
        self.faults = faults
        self.now_ms = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.topics = Topics({"t": self.random.randint(1, 6), "u": self.random.randint(1, 3)})
        self.config = self._make_config()
        self.checker = self._make_checker()
        self.log: list[Record] = []
        self._uncommitted: list[tuple[list[Record], Decision]] = []
        self._commits_at_ms = 0.0
        self.up = True
        self.term = 0
        self.links: list[Link] = []
        self.core = self._load(self.log)
        self.clients: list[Client] = []
        self._names = count()
        for _ in range(members):
            self._start_client()

    @property
    def now(self) -> Now:
        return Now(self.now_ms, WALL_MS + int(self.now_ms))

    def at(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self.now_ms + delay_ms, next(self._order), action))

    def _make_checker(self) -> RecordsChecker:
        return RecordsChecker()

    def _make_config(self) -> GroupConfig:
        return GroupConfig(session_timeout_ms=6000, heartbeat_interval_ms=1500, rebalance_timeout_ms=4000)

    # The coordinator

    def _load(self, log: list[Record]) -> GroupCoordinator:
        core = GroupCoordinator(self.config, self.topics, BUILT_IN)
        for key, value in log:
            core.replay(key, value)
        return core

    def crash(self) -> None:
        """Lose the coordinator, with part of its uncommitted records; another one starts after a while."""
        if not self.up:
            return
        self.up = False
        self.term += 1
        uncommitted = [record for records, _ in self._uncommitted for record in records]
        cut = len(self.log) - self.random.randint(0, len(uncommitted))
        self.log = self.log[:cut]
        self._uncommitted.clear()
        self.checker = self._make_checker()
        for record in self.log:
            self.checker.note(*record)
        for link in self.links:
            link.break_off(self.delay())
        self.links.clear()
        self.at(self.random.uniform(10, 3000), self._come_up)

    def _come_up(self) -> None:
        if not self.up:
            self.up = True
            upto = self.random.randint(0, len(self.log))
            self.core = self._load(compacted(self.log, upto, tombstones=self.random.random() < 0.5))
            self.core.loaded(self.now)

    def submit(self, command: Command) -> None:
        """A request arrives."""
        if not self.up:
            return
        if (answer := self.core.at_once(command, self.now)) is not None:
            assert isinstance(command, Heartbeat)
            assert callable(command.to)
            command.to(answer)  # before all that is under way
            return
        if isinstance(command, Join | JoinClassic | CommitOffsets | CommitTransactionOffsets):
            command = replace(command, user=USER)
        decision = self.core.decide(command, self.now)
        self._apply(decision)
        while decision.rest is not None:
            assert isinstance(decision.rest, Rest)
            decision = self.core.decide(decision.rest, self.now)
            self._apply(decision)

    def _apply(self, decision: Decision) -> None:
        for key, value in decision.records:
            self.checker.note(key, value)
            self.log.append((key, value))
            self.core.replay(key, value)
        self._uncommitted.append((decision.records, decision))
        held_ms = self.random.choice([1, 5, 20, 300]) if decision.records else 0
        self._commits_at_ms = max(self._commits_at_ms, self.now_ms + held_ms)
        term = self.term
        self.at(self._commits_at_ms - self.now_ms, lambda: self._committed(term))

    def _committed(self, term: int) -> None:
        if term == self.term and self._uncommitted:
            _, decision = self._uncommitted.pop(0)
            for effect in decision.effects:
                assert callable(effect.to)
                effect.to(effect.message)

    # The network

    def delay(self) -> float:
        """How long something is under way."""
        if self.faults and self.random.random() < 0.03:
            return self.random.uniform(100, 8000)
        return self.random.uniform(0.5, 20)

    def open(self, client: Client) -> Link:
        """A stream to the coordinator."""
        link = Link(self, client)
        self.links.append(link)
        return link

    def call(
        self,
        make: Callable[[object], Command],
        answer: Callable[[Message | RaftlogError | None], None],
        not_before_ms: float = 0.0,
    ) -> None:
        """A unary call: it may be lost on either way."""
        term = self.term

        def answered(message: Message | RaftlogError | None) -> None:
            self.at(self.delay(), lambda: answer(message))

        def arrive() -> None:
            if term == self.term:
                self.submit(make(answered))

        self.at(max(self.delay(), not_before_ms - self.now_ms), arrive)

    def server_notices(self, link: Link) -> None:
        """The coordinator's end of a stream that was given up."""
        if self.up and link.term == self.term and link.joined is not None:
            self.submit(Disconnected(link.deliver, "g", link.joined))

    # Chance

    def _start_client(self, instance: str = "") -> None:
        name = f"m{next(self._names)}"
        free = sorted({"i0", "i1", "i2"} - {client.instance for client in self.clients})
        if not instance and free and self.random.random() < 0.3:
            instance = self.random.choice(free)
        topics = self.random.choice([("t",), ("t", "u"), ("t", "u"), ("u",)])
        self.clients.append(self._make_client(name, topics, instance))

    def _make_client(self, name: str, topics: tuple[str, ...], instance: str) -> Client:
        return Client(self, name, topics, instance)

    def _mishap(self) -> None:
        """Inject a fault."""
        if not self.faults:
            return
        chance, client = self.random.random(), self.random.choice(self.clients)
        if chance < 0.12:
            self.crash()
        elif chance < 0.3:
            if client.link is not None:
                client.link.break_off(self.delay())
        elif chance < 0.45:
            client.pause(self.random.choice([500.0, 3000.0, 12_000.0]))
        elif chance < 0.55:
            client.kill()
            self.clients.remove(client)
            self._start_client(client.instance)
        elif chance < 0.65:
            client.leave()
            self.clients.remove(client)
            self._start_client(client.instance)
        elif chance < 0.75:
            client.subscribe(self.random.choice([("t",), ("t", "u"), ("u",)]))
        elif chance < 0.8 and sum(self.topics.counts.values()) < 12:
            name = self.random.choice("tu")
            self.topics = Topics(self.topics.counts | {name: self.topics.counts[name] + 1})
            if self.up:
                self._apply(self.core.on_topics(self.topics, self.now))
        elif chance < 0.9:
            client.slow = not client.slow
        self.at(self.random.uniform(50, 2500), self._mishap)

    # Time

    def run(self, for_ms: float) -> None:
        """Let time go by, with mishaps where there are faults."""
        if self.faults:
            self.at(0, self._mishap)
        self._run(for_ms)

    def heal(self) -> None:
        """End the faults: slow or paused processes continue, and the group comes to rest."""
        self.faults = False
        if not self.up:
            self._come_up()
        for client in self.clients:
            client.slow = False
            client.pause(0)
        self._run(40_000)
        wanted = {
            (topic.topic_id, number)
            for client in self.clients
            for name in client.topics
            if (topic := self.topics.by_name(name))
            for number in range(topic.partitions)
        }
        read = {partition for client in self.clients for partition in client.believed()}
        if read != wanted:
            raise Broken(
                f"{len(wanted - read)} of {len(wanted)} partitions have no reader, and {len(read - wanted)} are "
                "read that no member wants"
            )
        self.check_replay()

    def _run(self, for_ms: float) -> None:
        until_ms = self.now_ms + for_ms
        steps = 0
        while True:
            due_ms = self.core.next_deadline_ms() if self.up else None
            event_ms = self._events[0][0] if self._events else until_ms
            if min(event_ms, event_ms if due_ms is None else due_ms) >= until_ms:
                break
            if due_ms is not None and due_ms <= event_ms:
                self.now_ms = max(self.now_ms, due_ms)
                self._apply(self.core.on_time(self.now))
            else:
                self.now_ms, _, action = heapq.heappop(self._events)
                action()
            self._check()
            steps += 1
            if steps % 500 == 0:
                self.check_replay()
        self.now_ms = until_ms

    # What must be so

    def _check(self) -> None:
        owners: dict[TopicPartition, str] = {}
        for client in self.clients:
            for partition in client.believed():
                if partition in owners:
                    raise Broken(f"{owners[partition]} and {client.name} own partition {partition[1]} at once")
                owners[partition] = client.name

    def check_replay(self) -> None:
        """A replay of the log gives the coordinator's state, however the log was compacted."""
        if not self.up:
            return
        upto = self.random.randint(0, len(self.log))
        for log in (self.log, compacted(self.log, upto, tombstones=False), compacted(self.log, upto, tombstones=True)):
            other = self._load(log)
            if hard(other) != hard(self.core):
                raise Broken(
                    f"a replay of the log, compacted up to {upto} of {len(self.log)} records, gives another "
                    "state than the coordinator has"
                )
            if other.made.counts != self.core.made.counts:
                raise Broken(f"a replay counts {other.made.counts}, the coordinator {self.core.made.counts}")
        counted = Counter(group.user for group in self.core.groups.values() if group.user)
        if counted != self.core.made.counts:
            raise Broken(f"users have made {dict(counted)}, and the coordinator counts {self.core.made.counts}")


def hard(core: GroupCoordinator) -> dict[str, dict[str, object]]:
    """Return all that has to outlive a coordinator."""

    def state(group: Group) -> dict[str, object]:
        return {name: value for name, value in vars(group).items() if name != "topic_names"}

    return {group_id: state(group) for group_id, group in core.groups.items()}
