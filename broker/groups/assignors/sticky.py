"""`sticky`: everybody has as much as the others, and only what has to move moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from itertools import chain

from broker.groups.assignors.protocol import GroupSpec
from broker.groups.topics import TopicPartition


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
    """All subscribe to the same: who has too much gives up the surplus, and the others are filled up.

    `extra` members may have one more than the others; those who have more already come first, so that nothing moves
    for its sake.
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
        """Keep what may be kept, hand out the rest (topics with few subscribers first), and level."""
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
        """Return the subscriber with the least. An entry that is out of date is put right when it comes up."""
        heap = self._heaps[topic_id]
        while True:
            load, index = heap[0]
            if self._load[index] == load:
                return index
            heappop(heap)
            heappush(heap, (self._load[index], index))

    def _level(self) -> bool:
        """Let everybody give away what somebody with at least two less can take; return whether any was moved."""
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
