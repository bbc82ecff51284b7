"""Requests that name many things: each is answered once, other clients get their turns, results come by topic.

A request has at most `Message.max_elements` (`codec.py`), and its answer must not grow with how often it names the same
thing: a topic of a thousand partitions, named 10 000 times in 1 MiB, would be an answer of gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Final, TypeVar

from broker.kafka.codec import Fields
from broker.turns import QUICK_AT_A_TIME, in_turns
from raftlog.errors import InvalidRequestError

MAX_NAMED: Final = 10_000
"""Topics, or partitions, that one request may name, as at gRPC's listener. Kafka's clients and tools ask each broker
only for the partitions that it leads, and a broker has 20,000 replicas on average (max.partitions.per.broker)."""

T = TypeVar("T")


def check_count(count: int, what: str) -> None:
    """Check how many things a request names. Raises InvalidRequestError, which closes the connection: too many."""
    if count > MAX_NAMED:
        raise InvalidRequestError(f"a request names at most {MAX_NAMED} {what}, not {count}: split it")


def parts_of(topics: Iterable[Fields], name: str = "partitions") -> Iterator[tuple[Fields, Any]]:
    """Yield (topic, part) for each partition that a request names. `name`: of the topics' field with partitions."""
    return ((topic, part) for topic in topics for part in topic[name])


async def once(named: Iterable[T], key: Callable[[T], Hashable] = lambda each: each) -> list[T]:
    """Return the things without those whose key came before."""
    found: dict[Hashable, T] = {}
    async for each in in_turns(named, QUICK_AT_A_TIME):
        found.setdefault(key(each), each)
    return list(found.values())


async def by_topic(topics: Iterable[Fields], results: Iterable[Fields], name: str = "name") -> list[Fields]:
    """Return the results of a request's partitions, which come in its order, by topic. `name`: of the topic's field."""
    each = iter(results)
    return [
        {name: topic[name], "partitions": [next(each) async for _ in in_turns(topic["partitions"], QUICK_AT_A_TIME)]}
        async for topic in in_turns(topics, weight=lambda topic: 1 + len(topic["partitions"]))
    ]
