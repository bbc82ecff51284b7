"""Warnings of topics that nobody can write to with acks=all: min.insync.replicas above the number of replicas.

Kafka takes such settings as well: they may come before the move that brings the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Final

import raftlog
from raftlog.cli.output import counted, print_note
from raftlog.errors import RaftlogError
from raftlog.types import TopicPartition

KEY: Final = "min.insync.replicas"
_NAMED: Final = 5


def of_topic(admin: raftlog.Admin, topic: str) -> int:
    """Return min.insync.replicas as it is in effect for a topic."""
    return int(admin.describe_configs(topic=topic)[KEY].value)


def known(admin: raftlog.Admin) -> Callable[[str], int]:
    """Return a function that says what is in effect for a topic, and asks about each one once."""
    return cache(lambda topic: of_topic(admin, topic))


def warn_of_topics(admin: raftlog.Admin, topics: Iterable[str] | None) -> None:
    """Warn of partitions of these topics, or of all, that have fewer replicas than have to be in sync."""
    try:
        found = admin.describe_topics(topics)
        counts = {
            TopicPartition(topic.name, part.partition): len(set(part.replicas) - set(part.removing_replicas))
            for topic in found
            for part in topic.partitions
        }
        warn(admin, counts)
    except RaftlogError as error:  # what was asked for has been done
        print_note(f"note: whether there are replicas enough for {KEY} is not known: {error}")


def warn(admin: raftlog.Admin, replicas: dict[TopicPartition, int]) -> None:
    """Warn where so many replicas are, or will be, too few."""
    minimum = {topic: of_topic(admin, topic) for topic in sorted({part.topic for part in replicas})}
    short = [part for part, count in sorted(replicas.items()) if count < minimum[part.topic]]
    for part in short[:_NAMED]:
        print_note(
            f"warning: {part} has {counted(replicas[part], 'replica')} and {KEY}={minimum[part.topic]}: writes with "
            "acks=all are refused; give it more replicas (raftlog partition reassign), or lower the setting"
        )
    if len(short) > _NAMED:
        print_note(f"warning: so it is with {counted(len(short) - _NAMED, 'more partition', 'more partitions')}")
