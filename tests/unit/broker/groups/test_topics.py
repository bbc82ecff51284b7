"""Topics come, grow, and are deleted; what is newer than the subscription is read from its start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from broker.groups.assignors import BUILT_IN, GroupSpec
from broker.groups.topics import TopicPartition
from raftlog.v1 import group_pb2
from tests.support.group_driver import GroupDriver, Stream, partitions_of, topic_id


def first_new(stream: Stream) -> dict[str, int]:
    return {topic.topic: topic.first_new_partition for topic in stream.assignment.topics}


def test_partitions_that_are_added_are_new() -> None:
    driver = GroupDriver({"t": 2})
    stream = driver.join("a", "t")
    assert first_new(stream) == {"t": 2}
    driver.change_topics({"t": 4})
    assert partitions_of(stream.assignment) == {("t", n) for n in range(4)}
    assert first_new(stream) == {"t": 2}
    driver.restart()
    assert first_new(driver.join("a", "t", epoch=2)) == {"t": 2}


def test_what_was_added_while_nobody_coordinated_is_noticed() -> None:
    driver = GroupDriver({"t": 2})
    stream = driver.join("a", "t", "u")
    driver.follow(stream)
    driver.topics = type(driver.topics)({"t": 3, "u": 1})
    driver.restart()
    again = driver.join("a", "t", "u", epoch=1, owned={(topic_id("t"), 0), (topic_id("t"), 1)})
    assert partitions_of(again.assignment) == {("t", 0), ("t", 1), ("t", 2), ("u", 0)}
    assert first_new(again) == {"t": 2, "u": 0}


def test_a_topic_that_was_waited_for_is_new() -> None:
    driver = GroupDriver({"t": 2})
    stream = driver.join("a", "u")
    assert stream.assignment.note == "waits for a topic that does not exist: u"
    driver.change_topics({"t": 2, "u": 3})
    assert partitions_of(stream.assignment) == {("u", 0), ("u", 1), ("u", 2)}
    assert first_new(stream) == {"u": 0}
    assert stream.assignment.note == ""


def test_a_topic_made_anew_under_its_name_is_new() -> None:
    driver = GroupDriver({"t": 2})
    stream = driver.join("a", "t")
    driver.follow(stream)
    driver.change_topics({"t": 2}, {"t": 1})
    assert partitions_of(stream.assignment) == set()
    driver.follow(stream)
    assert {topic.topic_id for topic in stream.assignment.topics} == {topic_id("t", 1)}
    assert first_new(stream) == {"t": 0}


def test_what_appears_under_a_pattern_is_new() -> None:
    driver = GroupDriver({"ab": 2, "ac": 1})
    first = driver.join("a", "ab", pattern="a.*")
    assert first_new(first) == {"ab": 2}
    driver.heartbeat(first, 1, subscription=group_pb2.Subscription(topics=["ab", "ac"], pattern="a.*"))
    assert first_new(first) == {"ab": 2, "ac": 0}
    second = driver.join("b", "ac", pattern="ac")
    driver.follow(first)
    assert driver.core.groups["g"].head is not None
    assert driver.core.groups["g"].head.patterns == ("a.*", "ac")
    assert first_new(second) in ({}, {"ac": 0})


def test_a_deleted_topic_is_let_go() -> None:
    driver = GroupDriver({"t": 1, "u": 1})
    stream = driver.join("a", "t", "u")
    driver.follow(stream)
    driver.change_topics({"t": 1})
    assert partitions_of(stream.assignment) == {("t", 0)}
    driver.follow(stream)
    assert driver.described().state == group_pb2.STABLE
    assert stream.assignment.note == "waits for a topic that does not exist: u"


class Broken:
    """An assignor that does what none may do."""

    name = "broken"

    def __init__(self, result: Mapping[str, Iterable[TopicPartition]] | Exception) -> None:
        self.result = result

    def assign(self, group: GroupSpec) -> Mapping[str, Iterable[TopicPartition]]:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


T0 = (topic_id("t"), 0)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (KeyError("rack"), "it raised KeyError"),
        ({"a": [T0], "b": [T0]}, "to two members"),
        ({"z": [T0]}, "which is no member"),
        ({"a": [(topic_id("t"), 5)]}, "which cannot read it"),
        ({"a": [(topic_id("u"), 0)]}, "which cannot read it"),
    ],
)
def test_an_assignor_that_fails_is_replaced_and_named(
    result: Mapping[str, Iterable[TopicPartition]] | Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = GroupDriver({"t": 2, "u": 1}, assignors={**BUILT_IN, "broken": Broken(result)})
    first, second = driver.join("a", "t", assignor="broken"), driver.join("b", "t", assignor="broken")
    driver.follow(first)
    assert reason in caplog.text
    assert "assignor broken failed, sticky is used" in caplog.text
    assert len(partitions_of(first.assignment) | partitions_of(second.assignment)) == 2


def test_the_wish_of_most_members_counts() -> None:
    driver = GroupDriver({"t": 2})
    driver.join("a", "t")
    assert driver.described().assignor == "sticky"
    driver.join("b", "t", assignor="range")
    assert driver.described().assignor == "range", "who wishes for nothing does not count"
    driver.join("c", "t", assignor="roundrobin")
    assert driver.described().assignor == "range", "as the server orders them"
    driver.join("d", "t", assignor="roundrobin")
    assert driver.described().assignor == "roundrobin"
