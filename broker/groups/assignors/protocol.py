"""What an assignor is given, and what it has to return.

raftlog comes with `sticky`, `range` and `roundrobin`. One of your own is a class with a `name` and `assign`, made
known by an entry point of the group `raftlog.assignors` in a package that is installed on every broker, and by its
name in `group.consumer.assignors`:

    [project.entry-points."raftlog.assignors"]
    nearest = "my_package:NearestAssignor"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from broker.groups.topics import Topic, TopicPartition


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """A member: which topics it subscribes to (ids, those that exist), and what it was to have until now."""

    member_id: str
    instance_id: str
    rack: str
    topics: frozenset[bytes]
    target: frozenset[TopicPartition]

    @property
    def place(self) -> tuple[bool, str]:
        """Order among members that stays when a static one is started anew: those first, by instance id (KIP-345)."""
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
        """What members and `group.consumer.assignors` call it."""
        ...

    def assign(self, group: GroupSpec) -> Mapping[str, Iterable[TopicPartition]]:
        """Return what each member (by member id) is to have.

        A partition goes to one member at most, and to one that subscribes to its topic. A member that is left out gets
        nothing. What breaks this, or raises, is not applied: the coordinator says so in its log and uses `sticky`.
        """
        ...
