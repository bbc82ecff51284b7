"""`roundrobin`: all partitions of all topics in turn."""

from __future__ import annotations

from bisect import bisect_left

from broker.groups.assignors.protocol import GroupSpec
from broker.groups.topics import TopicPartition


class RoundRobinAssignor:
    """Kafka's RoundRobinAssignor: topics by name, partitions by number, each to the next member that subscribes."""

    name = "roundrobin"

    def assign(self, group: GroupSpec) -> dict[str, list[TopicPartition]]:
        """Go round the members in their order; who does not subscribe to a topic is passed over."""
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
