"""Whether a broker may stop, or lead nothing any more, without harm to a partition; pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from raftlog._core.words import some
from raftlog._descriptions import PartitionDescription, TopicDescription
from raftlog.cli import min_isr
from raftlog.cli import partition_health as health
from raftlog.types import TopicPartition

_NAMED: Final = 5


class NeededPartition(NamedTuple):
    """A partition that takes no acks=all without this broker, and would with more of its replicas in sync."""

    partition: TopicPartition
    isr: tuple[int, ...]
    min_insync_replicas: int

    def __str__(self) -> str:
        return f"{self.partition} (in sync: {', '.join(map(str, self.isr))}; {min_isr.KEY}={self.min_insync_replicas})"


def needed(
    topics: Iterable[TopicDescription], broker_id: int, min_insync_replicas: Callable[[str], int]
) -> list[NeededPartition]:
    """Return the partitions for which it is worth waiting before a broker stops.

    Not those that have no replicas to spare even when all are in sync: no waiting would help them.
    """
    found = []
    for name, part in _partitions(topics):
        if broker_id not in part.isr or not health.is_under_replicated(part):
            continue
        least = min_insync_replicas(name)
        if len(part.isr) - 1 < least <= len(_settled(part)) - 1:
            found.append(NeededPartition(TopicPartition(name, part.partition), tuple(part.isr), least))
    return found


class Leaderships(NamedTuple):
    """What a drained broker still leads.

    `moving`: somebody else leads soon, or does once he is in sync. `staying`: no other replica could lead.
    """

    moving: list[TopicPartition]
    staying: list[TopicPartition]


def leaderships(topics: Iterable[TopicDescription], broker_id: int, drained: Collection[int]) -> Leaderships:
    """Return what a broker leads that is being drained; `drained`: all brokers that are."""
    moving: list[TopicPartition] = []
    staying: list[TopicPartition] = []
    for name, part in _partitions(topics):
        others = [replica for replica in _settled(part) if replica != broker_id and replica not in drained]
        if part.leader == broker_id:
            (moving if others else staying).append(TopicPartition(name, part.partition))
            continue
        ready = any(member in part.isr and member not in part.offline_replicas for member in others)
        if part.leader < 0 and broker_id in part.isr and ready:  # between two leaders
            moving.append(TopicPartition(name, part.partition))
    return Leaderships(moving, staying)


class Astray(NamedTuple):
    """A partition that prefers a broker and is led by another, or nobody. `ready`: it is in sync, and may lead."""

    partition: TopicPartition
    ready: bool


def astray(topics: Iterable[TopicDescription], broker_id: int) -> list[Astray]:
    """Return the partitions whose preferred leader is this broker, and which it does not lead."""
    return [
        Astray(
            TopicPartition(name, part.partition),
            ready=part.leader >= 0 and broker_id in part.isr and broker_id not in part.offline_replicas,
        )
        for name, part in _partitions(topics)
        if part.replicas[0] == broker_id and part.leader != broker_id
    ]


def named(partitions: Sequence[object]) -> str:
    """Return the first partitions by name, and how many more there are."""
    return some(partitions, _NAMED)


def _partitions(topics: Iterable[TopicDescription]) -> Iterator[tuple[str, PartitionDescription]]:
    for topic in topics:
        for part in topic.partitions:
            yield topic.name, part


def _settled(part: PartitionDescription) -> set[int]:
    """Return the replicas that have their part of the log, as far as membership goes."""
    return set(part.replicas) - set(part.adding_replicas)
