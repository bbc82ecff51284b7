"""What is counted, and the form that Prometheus wants it in."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from broker.observability.counters import Counters, Histogram, TopicCounters
from broker.observability.metrics import ElectionCounter
from raftmeta.image import MetadataImage, partition_record
from tests.support.metadata import accept, cluster, create_topic, down, settled, up


def test_a_value_is_in_its_bucket_and_in_all_above() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.1, 0.11, 5.0):
        histogram.observe(value)
    assert histogram.counts == [1, 1, 1], "the upper end of a bucket must be inclusive"
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
    """A name; its look-up lets another thread run."""

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
    assert [name.partition("-")[0] for name in counters.topics] == ["new"], (
        "a topic that is added during the call must stay"
    )
    counters = Counters()
    counters.topics[OtherThread("gone", counters.topics.clear)] = TopicCounters()
    counters.keep_topics(frozenset())
    assert counters.topics == {}


def test_only_another_leader_of_a_partition_that_was_there_counts_and_only_at_the_active_controller() -> None:
    counters, active = Counters(), True
    image = cluster(3)
    counter = ElectionCounter(counters, lambda: active, image)

    def go_on(changed: MetadataImage) -> int:
        nonlocal image
        before, image = counters.leader_elections, changed
        counter(
            changed,
            [partition_record(topic.topic_id, part) for topic in changed.topics.values() for part in topic.partitions],
        )
        return counters.leader_elections - before

    made, _ = accept(image, create_topic("orders", 1, partitions=2, replication_factor=2))
    assert go_on(made) == 0, "the first leaders of new partitions must not count as elections"
    first = made.topic("orders")
    assert first is not None
    leader = first.partitions[0].leader
    moved = settled(down(image, leader))
    changed = sum(
        part.leader != before.leader and part.leader >= 0
        for part, before in zip(moved.topic("orders").partitions, first.partitions, strict=True)  # type: ignore[union-attr]
    )
    assert changed >= 1
    assert go_on(moved) == changed
    assert go_on(moved) == 0, "the same image must not be counted twice"
    active = False
    back = settled(up(image, leader))
    last = next(each for each in (1, 2, 3) if each != leader)
    go_on(back)
    assert go_on(settled(down(back, last))) == 0, "only the active controller must count elections"
    counter(image, None)
    assert counters.unclean_leader_elections == 0
