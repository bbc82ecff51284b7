"""Requests that name many things: each is answered once, other clients get their turns, results come by topic.

A request has at most `MAX_ELEMENTS` (`codec.py`), and its answer must not grow with how often it names the same thing:
a topic of a thousand partitions, named 50 000 times in 1 MiB, would be an answer of gigabytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from typing import Final, TypeVar

from broker.kafka.codec import Fields

AT_A_TIME: Final = 100
"""Things between two turns of the event loop."""

T = TypeVar("T")


def once(named: Iterable[T], key: Callable[[T], Hashable] = lambda each: each) -> list[T]:
    """Return the things without those whose key came before."""
    found: dict[Hashable, T] = {}
    for each in named:
        found.setdefault(key(each), each)
    return list(found.values())


async def in_turns(things: Iterable[T], at_a_time: int = AT_A_TIME) -> AsyncIterator[T]:
    """Yield the things, and let the event loop do other work in between."""
    for number, each in enumerate(things, 1):
        yield each
        if number % at_a_time == 0:
            await asyncio.sleep(0)


def by_topic(topics: Iterable[Fields], results: Iterable[Fields], name: str = "name") -> list[Fields]:
    """Return the results of a request's partitions, which come in its order, by topic. `name`: of the topic's field."""
    each = iter(results)
    return [{name: topic[name], "partitions": [next(each) for _ in topic["partitions"]]} for topic in topics]
