"""What is counted, and the form that Prometheus wants it in."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from broker.observability.counters import Counters, Histogram, TopicCounters


def test_a_value_is_in_its_bucket_and_in_all_above() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.11, 5.0):
        histogram.observe(value)
    assert histogram.counts == [1, 1, 1], "upper ends are inclusive"
    assert histogram.cumulative() == [("0.1", 1.0), ("1.0", 2.0), ("+Inf", 3.0)]
    assert histogram.total == pytest.approx(5.21)


def test_what_is_counted_stays_until_its_topic_is_gone() -> None:
    counters = Counters()
    counters.topic("orders").bytes_in += 7
    counters.topic("gone").bytes_in += 1
    counters.keep_topics(frozenset({"orders", "never seen"}))
    assert counters.topics.keys() == {"orders"}
    assert counters.topic("orders").bytes_in == 7
    counters.request("Produce").outcomes["NONE"] += 1
    assert counters.request("Produce").outcomes == {"NONE": 1}
    counters.flushed("/data", 0.002)
    assert sum(counters.flushes["/data"].counts) == 1


class OtherThread(str):
    """A name at whose look-up another thread gets its turn."""

    def __new__(cls, name: str, turn: Callable[[], object]) -> OtherThread:
        made = super().__new__(cls, name)
        made.turn = turn
        return made

    turn: Callable[[], object]

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        self.turn()
        return str.__hash__(self)


def test_a_scrape_is_not_disturbed_by_new_topics_nor_by_another_scrape() -> None:
    counters, new = Counters(), itertools.count()
    counters.topics[OtherThread("gone", lambda: counters.topic(f"new-{next(new)}"))] = TopicCounters()
    counters.keep_topics(frozenset())
    assert [name.partition("-")[0] for name in counters.topics] == ["new"], "what comes meanwhile stays"
    counters = Counters()
    counters.topics[OtherThread("gone", counters.topics.clear)] = TopicCounters()
    counters.keep_topics(frozenset())
    assert counters.topics == {}
