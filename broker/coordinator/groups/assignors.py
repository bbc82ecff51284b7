"""Assignors distribute partitions over the members of a group. `BUILT_IN` has those that come with raftlog:

    sticky       equally many partitions for all members, with as few moves as possible
    range        each topic is cut into as many runs of partitions as it has subscribers
    roundrobin   all partitions of all topics in turn

Your own assignor is a class with `name` and `assign`. Name it in `group.consumer.assignors`, and declare it as an entry
point of the group `raftlog.assignors` in a package that is installed on every broker:

    [project.entry-points."raftlog.assignors"]
    nearest = "my_package:NearestAssignor"
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Protocol

from broker.coordinator.groups.topics import Topic, TopicPartition


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """A member: the ids of the existing topics that it subscribes to, and its target until now."""

    member_id: str
    instance_id: str
    rack: str
    topics: frozenset[bytes]
    target: frozenset[TopicPartition]

    @property
    def place(self) -> tuple[bool, str]:
        """Sort key of a member, stable over restarts of static members: these first, by instance id (KIP-345)."""
        return (False, self.instance_id) if self.instance_id else (True, self.member_id)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group: members by their place, and the topics that at least one of them subscribes to, by name."""

    members: tuple[MemberSpec, ...]
    topics: tuple[Topic, ...]


class Assignor(Protocol):
    """Distributes partitions. Has no state: brokers change, and the same input gives the same output on each."""

    @property
    def name(self) -> str:
        """The name in members' requests and in `group.consumer.assignors`."""
        ...

    def assign(self, group: GroupSpec) -> Mapping[str, Iterable[TopicPartition]]:
        """Return the target of each member, by member id.

        A partition goes to one member at most, and to one that subscribes to its topic. A member that is left out gets
        nothing. What breaks this, or raises, is not applied: the coordinator says so in its log and uses `sticky`.
        """
        ...


class RangeAssignor:
    """Kafka's RangeAssignor.

    Topics with equally many partitions and the same subscribers are cut alike, so that one member reads the same
    partition numbers of each: what was written with the same keys can be joined (co-partitioning).
    """

    name = "range"

    def assign(self, group: GroupSpec) -> dict[str, list[TopicPartition]]:
        """Give the first `partitions % subscribers` members one more than the others, in the members' order."""
        assignment: dict[str, list[TopicPartition]] = {member.member_id: [] for member in group.members}
        subscribers: dict[bytes, list[str]] = {topic.topic_id: [] for topic in group.topics}
        for member in group.members:
            for topic_id in member.topics:
                subscribers[topic_id].append(member.member_id)
        for topic in group.topics:
            readers = subscribers[topic.topic_id]
            each, extra = divmod(topic.partitions, len(readers))
            first = 0
            for index, member_id in enumerate(readers[: topic.partitions]):
                count = each + (index < extra)
                assignment[member_id] += [(topic.topic_id, number) for number in range(first, first + count)]
                first += count
        return assignment


class RoundRobinAssignor:
    """Kafka's RoundRobinAssignor: topics by name, partitions by number, each to the next member that subscribes."""

    name = "roundrobin"

    def assign(self, group: GroupSpec) -> dict[str, list[TopicPartition]]:
        """Go round the members in their order, skipping those that do not subscribe to a topic."""
        assignment: list[list[TopicPartition]] = [[] for _ in group.members]
        subscribers: dict[bytes, list[int]] = {topic.topic_id: [] for topic in group.topics}
        for index, member in enumerate(group.members):
            for topic_id in member.topics:
                subscribers[topic_id].append(index)
        turn = 0
        for topic in group.topics:
            readers = subscribers[topic.topic_id]
            for number in range(topic.partitions):
                at = bisect_left(readers, turn)
                reader = readers[at] if at < len(readers) else readers[0]
                assignment[reader].append((topic.topic_id, number))
                turn = reader + 1
        return {member.member_id: assignment[index] for index, member in enumerate(group.members)}


class StickyAssignor:
    """Balance first, then as few moves as possible (KIP-54, KIP-429; as `uniform` of KIP-848).

    Members with equal subscriptions have equally many partitions, or one apart. Where all members subscribe to the
    same, no balanced assignment moves fewer partitions.
    """

    name = "sticky"

    def assign(self, group: GroupSpec) -> Mapping[str, Iterable[TopicPartition]]:
        """Start from the target until now."""
        if not group.members:
            return {}
        first = group.members[0].topics
        if all(member.topics == first for member in group.members):
            return _equal(group)
        return _Loads(group).balanced()


def _equal(group: GroupSpec) -> dict[str, list[TopicPartition]]:
    """Assign with equal subscriptions: members with too many partitions give up the surplus, and the others are filled.

    `extra` members may have one more than the others. Members that already have more come first, to avoid moves.
    """
    everything = {(topic.topic_id, number) for topic in group.topics for number in range(topic.partitions)}
    each, extra = divmod(len(everything), len(group.members))
    kept = [sorted(member.target & everything) for member in group.members]
    order = sorted(range(len(kept)), key=lambda index: len(kept[index]) <= each)
    quotas = [each] * len(kept)
    for index in order[:extra]:
        quotas[index] += 1
    for index, quota in enumerate(quotas):
        del kept[index][quota:]
    free = sorted(everything.difference(chain.from_iterable(kept)), reverse=True)
    for index, quota in enumerate(quotas):
        while len(kept[index]) < quota:
            kept[index].append(free.pop())
    assert not free, "the quotas add up to all partitions"
    return {member.member_id: kept[index] for index, member in enumerate(group.members)}


class _Loads:
    """Subscriptions differ: each partition to the subscriber with the least, then from the rich to the poor.

    A move from a to b is made only while a has at least two more, so every move makes the sum of the squares less and
    there is an end; then members that could swap (as those with equal subscriptions can) are at most one apart.
    """

    def __init__(self, group: GroupSpec) -> None:
        self._group = group
        self._subscribers: dict[bytes, list[int]] = {topic.topic_id: [] for topic in group.topics}
        for index, member in enumerate(group.members):
            for topic_id in member.topics:
                self._subscribers[topic_id].append(index)
        self._has: list[dict[bytes, list[int]]] = [{} for _ in group.members]
        self._load = [0] * len(group.members)
        self._heaps: dict[bytes, list[tuple[int, int]]] = {}

    def balanced(self) -> dict[str, list[TopicPartition]]:
        """Keep valid assignments, assign the rest (topics with few subscribers first), and balance the members."""
        free = {topic.topic_id: set(range(topic.partitions)) for topic in self._group.topics}
        for index, member in enumerate(self._group.members):
            for topic_id, number in sorted(member.target):
                if topic_id in member.topics and number in free[topic_id]:
                    free[topic_id].remove(number)
                    self._give(index, topic_id, number)
        for topic_id, readers in self._subscribers.items():
            self._heaps[topic_id] = [(self._load[index], index) for index in readers]
            heapify(self._heaps[topic_id])
        for topic_id in sorted(free, key=lambda topic_id: (len(self._subscribers[topic_id]), topic_id)):
            for number in sorted(free[topic_id]):
                self._give(self._poorest(topic_id), topic_id, number)
        while self._level():
            pass
        return {
            member.member_id: [(topic_id, number) for topic_id, numbers in has.items() for number in numbers]
            for member, has in zip(self._group.members, self._has, strict=True)
        }

    def _give(self, index: int, topic_id: bytes, number: int) -> None:
        self._has[index].setdefault(topic_id, []).append(number)
        self._load[index] += 1

    def _poorest(self, topic_id: bytes) -> int:
        """Return the subscriber with the fewest partitions; outdated entries are corrected on the way."""
        heap = self._heaps[topic_id]
        while True:
            load, index = heap[0]
            if self._load[index] == load:
                return index
            heappop(heap)
            heappush(heap, (self._load[index], index))

    def _level(self) -> bool:
        """Move partitions from each member to members that have at least two fewer; return whether any moved."""
        for topic_id, readers in self._subscribers.items():
            self._heaps[topic_id] = [(self._load[index], index) for index in readers]
            heapify(self._heaps[topic_id])
        moved = False
        for index in sorted(range(len(self._load)), key=lambda index: -self._load[index]):
            for topic_id, numbers in self._has[index].items():
                while numbers and self._load[poorest := self._poorest(topic_id)] + 1 < self._load[index]:
                    self._give(poorest, topic_id, numbers.pop())
                    self._load[index] -= 1
                    heappush(self._heaps[topic_id], (self._load[index], index))
                    moved = True
        return moved


__all__ = ["BUILT_IN", "Assignor", "GroupSpec", "MemberSpec", "RangeAssignor", "RoundRobinAssignor", "StickyAssignor"]

BUILT_IN: Mapping[str, Assignor] = {
    assignor.name: assignor for assignor in (StickyAssignor(), RangeAssignor(), RoundRobinAssignor())
}
"""In the order of the default of `group.consumer.assignors`."""
