"""`range`: each topic is cut into as many runs of partitions as it has subscribers."""

from __future__ import annotations

from broker.groups.assignors.protocol import GroupSpec
from broker.groups.topics import TopicPartition


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
