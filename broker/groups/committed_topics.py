"""Which groups have committed offsets of which topics: who has to forget some when a topic is deleted."""

from __future__ import annotations

from broker.groups.topics import TopicsView


class CommittedTopics:
    """Topic id -> group id -> how many of the topic's partitions the group has offsets of, if any."""

    def __init__(self) -> None:
        self._counts: dict[bytes, dict[str, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._counts.values()))

    def changed(self, group_id: str, topic_id: bytes, had: bool, has: bool) -> None:
        """An offset was committed or forgotten."""
        if had == has:
            return
        if has:
            groups = self._counts.setdefault(topic_id, {})
            groups[group_id] = groups.get(group_id, 0) + 1
            return
        groups = self._counts.get(topic_id, {})
        if groups.get(group_id, 0) > 1:
            groups[group_id] -= 1
            return
        groups.pop(group_id, None)
        if not groups:
            self._counts.pop(topic_id, None)

    def take_deleted(self, topics: TopicsView) -> list[str]:
        """Return the groups that have offsets of topics which are no more; they are not returned again for those."""
        deleted = [topic_id for topic_id in self._counts if topics.by_id(topic_id) is None]
        groups: dict[str, None] = {}
        for topic_id in deleted:
            groups |= dict.fromkeys(self._counts.pop(topic_id))
        return list(groups)
