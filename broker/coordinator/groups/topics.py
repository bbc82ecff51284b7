"""The topics of the cluster, as the coordinator of groups sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

TopicPartition: TypeAlias = tuple[bytes, int]
"""(topic id, partition)."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic that exists. `partitions` only rises; a topic made anew under the name has another id."""

    topic_id: bytes
    name: str
    partitions: int


class TopicsView(Protocol):
    """A state of the metadata. It costs nothing to make one: an image behind two look-ups."""

    def by_name(self, name: str) -> Topic | None:
        """Return the topic of that name, or None where there is none now."""
        ...

    def by_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic of that id, or None: it was deleted."""
        ...
