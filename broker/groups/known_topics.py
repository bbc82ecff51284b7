"""Which partitions a group has seen from the beginning, and which are newer than its subscription (KAFKA-20030).

A consumer that begins at the end of a partition misses what was written before it noticed the partition. So those that
were made after the group first saw the topic, and topics that appeared under a subscription, are read from their
start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from broker.groups.group import Head, Subscription
from broker.groups.topics import TopicsView

MAX_PATTERNS: Final = 100
"""Remembered for a group; the oldest is forgotten first."""


def subscribed(
    head: Head, before: Subscription, after: Subscription, topics: TopicsView
) -> tuple[Mapping[bytes, int], tuple[str, ...]]:
    """Return the known topics and patterns once a member with one subscription has another.

    What exists when it is asked for is known with the partitions that it has. What is new under a pattern that the
    group knows was not there when the pattern was matched first: none of its partitions is known.
    """
    known = dict(head.known_topics)
    patterns = head.patterns
    pattern = after.pattern
    new_matches = pattern != "" and pattern in patterns
    already = set(before.topics) if before.pattern == pattern else set()
    for name in after.topics:
        topic = topics.by_name(name)
        if topic is not None and topic.topic_id not in known:
            # One that the member waited for by name is newer than the subscription, too.
            known[topic.topic_id] = 0 if new_matches or name in already else topic.partitions
    if pattern and not new_matches:
        patterns = (*patterns, pattern)[-MAX_PATTERNS:]
    return known, patterns


def appeared(head: Head, names: Iterable[str], topics: TopicsView) -> Mapping[bytes, int]:
    """Return the known topics once metadata has changed: subscribed ones that are not known yet are new."""
    known = {topic_id: count for topic_id, count in head.known_topics.items() if topics.by_id(topic_id) is not None}
    for name in names:
        topic = topics.by_name(name)
        if topic is not None:
            known.setdefault(topic.topic_id, 0)
    return known
