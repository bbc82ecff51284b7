"""Plans of where partitions are to be: what is read, what is refused with which words, and what is made up."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.cli.plans import (
    Move,
    balanced,
    moves_from_arguments,
    moves_from_json,
    plan_of,
    throttled_replicas,
)
from raftlog.types import TopicPartition


def move(topic: str, partition: int, *replicas: int) -> Move:
    return Move(TopicPartition(topic, partition), replicas)


def test_arguments_name_a_partition_and_brokers() -> None:
    assert moves_from_arguments(["events-0=1,2,3", "a-b-12=4", "x-7"]) == [
        move("events", 0, 1, 2, 3),
        move("a-b", 12, 4),
        move("x", 7),
    ]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("events=1,2", "write TOPIC-PARTITION=BROKER"),
        ("events-0=", "write TOPIC-PARTITION=BROKER"),
        ("events-0=1,,2", "write TOPIC-PARTITION=BROKER"),
        ("events-0=-1", "write TOPIC-PARTITION=BROKER"),
        ("-0=1", "write TOPIC-PARTITION=BROKER"),
        ("events-0=1,1", "names a broker twice"),
    ],
)
def test_a_wrong_argument_is_told(argument: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        moves_from_arguments([argument])
    with pytest.raises(ValueError, match="named twice"):
        moves_from_arguments(["a-0=1", "a-0=2"])


def test_a_plan_is_that_of_kafkas_tool() -> None:
    """As kafka-reassign-partitions --generate prints it, log_dirs and all."""
    text = (
        '{"version":1,"partitions":[{"topic":"foo","partition":0,"replicas":[3,4],"log_dirs":["any","any"]},'
        '{"topic":"foo","partition":1,"replicas":[2]}]}'
    )
    moves = moves_from_json(text)
    assert moves == [move("foo", 0, 3, 4), move("foo", 1, 2)]
    assert moves_from_json(json.dumps(plan_of(moves))) == moves


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "a plan is"),
        ('{"partitions": 1}', "a plan is"),
        ('{"version": 2, "partitions": []}', "version 2"),
        ('{"partitions": [1]}', r"partitions\[0\] of the plan needs"),
        ('{"partitions": [{"topic": "a", "partition": 0}]}', "needs topic, partition and replicas"),
        ('{"partitions": [{"topic": "a", "partition": 0, "replicas": [1], "x": 1}]}', "nothing else"),
        ('{"partitions": [{"topic": 1, "partition": 0, "replicas": [1]}]}', "topic is a text"),
        ('{"partitions": [{"topic": "a", "partition": -1, "replicas": [1]}]}', "partition a number"),
        ('{"partitions": [{"topic": "a", "partition": true, "replicas": [1]}]}', "partition a number"),
        ('{"partitions": [{"topic": "a", "partition": 0, "replicas": []}]}', "replicas are the ids"),
        ('{"partitions": [{"topic": "a", "partition": 0, "replicas": ["1"]}]}', "replicas are the ids"),
        ('{"partitions": [{"topic": "a", "partition": 0, "replicas": [1, 1]}]}', "names a broker twice"),
        ('{"partitions": [{"topic": "a", "partition": 0, "replicas": [1], "log_dirs": ["/x"]}]}', "cannot be chosen"),
    ],
)
def test_what_is_no_plan_is_told(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        moves_from_json(text)


def test_a_plan_leaves_what_is_balanced_where_it_is() -> None:
    now = [move("a", 0, 1, 2), move("a", 1, 2, 3), move("a", 2, 3, 1)]
    assert balanced(now, {1: "", 2: "", 3: ""}) == now


def test_a_new_broker_gets_its_share() -> None:
    now = [move("a", n, n % 2 + 1) for n in range(8)]
    placed = balanced(now, {1: "", 2: "", 3: "", 4: ""})
    assert Counter(each.replicas[0] for each in placed) == {1: 2, 2: 2, 3: 2, 4: 2}
    assert sum(new == old for new, old in zip(placed, now, strict=True)) == 4


def test_replicas_are_put_into_racks_of_their_own() -> None:
    racks = {1: "x", 2: "x", 3: "y", 4: "y"}
    for each in balanced([move("a", n, 9, 8) for n in range(6)], racks):
        assert len({racks[replica] for replica in each.replicas}) == 2


def test_more_replicas_than_brokers_cannot_be() -> None:
    with pytest.raises(ValueError, match="3 replicas need as many brokers, 2 are named"):
        balanced([move("a", 0, 1, 2, 3)], {1: "", 2: ""})


@given(st.integers(1, 6), st.integers(0, 30), st.data())
def test_every_plan_is_even(brokers: int, partitions: int, data: st.DataObject) -> None:
    factor = data.draw(st.integers(1, brokers))
    ids = st.lists(st.integers(1, 9), min_size=factor, max_size=factor, unique=True)
    now = [move("a", n, *data.draw(ids)) for n in range(partitions)]
    placed = balanced(now, dict.fromkeys(range(1, brokers + 1), ""))
    assert [each.part for each in placed] == [each.part for each in now]
    held = Counter(replica for each in placed for replica in each.replicas)
    led = Counter(each.replicas[0] for each in placed)
    for each in placed:
        assert len(set(each.replicas)) == factor
        assert set(each.replicas) <= set(range(1, brokers + 1))
    if placed:
        assert max(held.values()) <= -(-partitions * factor // brokers) + 1
        assert max(led.values()) <= -(-partitions // brokers) + factor


def test_who_sends_and_who_receives_is_held_back() -> None:
    """KIP-73: those who hold it now send, those who are new receive; who stays is never held back."""
    before = [move("a", 0, 1, 2), move("a", 1, 2, 3), move("b", 0, 1), move("c", 0, 1)]
    after = {each.part: each for each in (move("a", 0, 2, 3, 4), move("a", 1, 3, 2), move("b", 0, 5))}
    assert throttled_replicas(before, after) == {
        "a": {
            "leader.replication.throttled.replicas": "0:1,0:2",
            "follower.replication.throttled.replicas": "0:3,0:4",
        },
        "b": {"leader.replication.throttled.replicas": "0:1", "follower.replication.throttled.replicas": "0:5"},
    }
