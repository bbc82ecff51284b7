"""The topics that members subscribe to: which of them have changed since they were looked at."""

from __future__ import annotations

from collections import Counter

from broker.groups.group import Member
from broker.groups.topics import TopicsView


class WatchedTopics:
    """Names by group, with how many members subscribe; and the metadata that was looked at last.

    A change of metadata costs two look-ups for each name that anybody subscribes to, and no more.
    """

    def __init__(self, topics: TopicsView) -> None:
        self._names: dict[str, Counter[str]] = {}
        self._groups: dict[str, dict[str, None]] = {}
        self._topics = topics

    def changed(self, group_id: str, before: Member | None, after: Member | None) -> None:
        """A member has come, changed or gone."""
        old = before.subscription.topics if before is not None else ()
        new = after.subscription.topics if after is not None else ()
        if old == new:
            return
        names = self._names.setdefault(group_id, Counter())
        for name in new:
            names[name] += 1
            if names[name] == 1:
                self._groups.setdefault(name, {})[group_id] = None
        for name in old:
            names[name] -= 1
            if not names[name]:
                self._forget(group_id, names, name)
        if not names:
            del self._names[group_id]

    def _forget(self, group_id: str, names: Counter[str], name: str) -> None:
        del names[name]
        groups = self._groups[name]
        groups.pop(group_id, None)
        if not groups:
            del self._groups[name]

    def look(self, topics: TopicsView) -> list[str]:
        """Look at all of them; return the groups for which something is different."""
        before, self._topics = self._topics, topics
        groups: dict[str, None] = {}
        for name, readers in self._groups.items():
            if before.by_name(name) != topics.by_name(name):
                groups |= readers
        return list(groups)

    def is_read(self, group_id: str, name: str) -> bool:
        """Whether a member of a group subscribes to a topic."""
        return group_id in self._groups.get(name, ())

    def names_of(self, group_id: str) -> list[str]:
        """Return what the members of a group subscribe to, each once, ascending."""
        return sorted(self._names.get(group_id, ()))
