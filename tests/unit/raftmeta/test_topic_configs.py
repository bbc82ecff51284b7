"""The table of topic configs; placement; the persistent map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import InvalidConfig, InvalidReplicaAssignment, InvalidReplicationFactor
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide.topics import place_partitions
from raftmeta.image import MetadataImage
from raftmeta.topic_configs import (
    BROKER_KEY_BY_TOPIC_KEY,
    DYNAMIC_BROKER_CONFIGS,
    TOPIC_CONFIGS,
    TOPIC_KEY_BY_BROKER_KEY,
    check_limits,
    is_throttled,
)
from tests.support.metadata import accept, claim, create_topic, down, image_after, refusal, register, uuid_of

ONLY_OF_ONE_TOPIC = {"leader.replication.throttled.replicas", "follower.replication.throttled.replicas"}
ONLY_OF_A_BROKER = {"leader.replication.throttled.rate", "follower.replication.throttled.rate"}


def test_every_topic_key_has_a_broker_key_with_the_same_default() -> None:
    assert BROKER_KEY_BY_TOPIC_KEY.keys() | ONLY_OF_ONE_TOPIC == {key.name for key in TOPIC_CONFIGS}
    assert TOPIC_KEY_BY_BROKER_KEY.keys() | ONLY_OF_A_BROKER == {key.name for key in DYNAMIC_BROKER_CONFIGS}
    for topic_key, broker_key in BROKER_KEY_BY_TOPIC_KEY.items():
        assert DYNAMIC_BROKER_CONFIGS.key(broker_key).default == TOPIC_CONFIGS.key(topic_key).default


@pytest.mark.parametrize("key", sorted(ONLY_OF_ONE_TOPIC))
def test_throttled_replicas_are_none_all_or_named(key: str) -> None:
    """KIP-73."""
    assert TOPIC_CONFIGS.canonical({key: ""}) == {key: ""}
    assert TOPIC_CONFIGS.canonical({key: " * "}) == {key: "*"}
    assert TOPIC_CONFIGS.canonical({key: "0:1, 12:30"}) == {key: "0:1,12:30"}
    for wrong in ("1", "0:1,", "0:1;0:2", "*,0:1", "a:1", "-1:2", "0:-1", "01:2", "0:1:2", "٣:1", "9" * 12 + ":1"):
        with pytest.raises(InvalidConfig, match=key.replace(".", r"\.")):
            TOPIC_CONFIGS.parse({key: wrong})


def test_a_throttled_replica_is_found_in_the_value() -> None:
    assert is_throttled("*", 7, 3)
    assert is_throttled("0:1,12:30", 12, 30)
    assert not is_throttled("0:1,12:30", 2, 30)
    assert not is_throttled("", 0, 1)


def test_a_long_value_is_split_once_for_all_partitions() -> None:
    class Counted(str):
        splits = 0

        def split(self, *arguments: object, **named: object) -> list[str]:
            Counted.splits += 1
            return str(self).split(",")

    value = Counted("7:1,8:2")
    assert [partition for partition in range(1_000) if is_throttled(value, partition, 1)] == [7]
    assert Counted.splits == 1


REPLICAS_OF_1000 = ",".join(f"{partition}:{broker}" for partition in range(1_000) for broker in (1, 2, 3))


@pytest.mark.parametrize(
    ("configs", "complaint"),
    [
        ({"leader.replication.throttled.replicas": "0:1," * 250_000 + "0:1"}, "has 1000003 characters"),
        ({"leader_replication_throttled_replicas": REPLICAS_OF_1000}, "names 3000 replicas; at most 30 may be"),
        ({"follower.replication.throttled.replicas": "0:1,0:2, 0:1"}, "names '0:1' twice"),
        ({"cleanup.policy": "delete," * 100 + "delete"}, "names 'delete' twice"),
        ({"log.cleanup.policy": "compact,delete,compact"}, "names 'compact' twice"),
        ({"retention.ms": " " * 5_000 + "1"}, "has 5001 characters, at most 4096"),
        ({"nonsense": "x" * 5_000}, "has 5000 characters, at most 4096"),
        ({"file.delete.delay.ms": str((1 << 63) - 1)}, "stay for one day at most"),
        ({"log.segment.delete.delay.ms": "25h"}, "stay for one day at most"),
        ({"segment.bytes": "1024"}, "min.segment.bytes=1048576"),
        ({"log_segment_bytes": "1023KiB"}, "min.segment.bytes=1048576"),
        ({"segment.bytes": "100"}, "^segment.bytes=100: the broker's min.segment.bytes=1048576"),
        ({"log.segment.bytes": "-5"}, "^log.segment.bytes=-5: the broker's min.segment.bytes=1048576"),
        ({"segment.bytes": "3GiB"}, "segment.bytes='3GiB': expected bytes, .*1GiB, at most 2147483647$"),
    ],
)
def test_values_that_would_burden_the_brokers_are_refused(configs: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidConfig, match=complaint) as refused:
        check_limits(configs, min_segment_bytes=1 << 20, max_throttled_replicas=30)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "configs",
    [
        {},
        {"leader.replication.throttled.replicas": REPLICAS_OF_1000},
        {"leader.replication.throttled.replicas": "*", "follower.replication.throttled.replicas": ""},
        {"cleanup.policy": "compact, delete"},
        {"segment_bytes": "1MiB", "file.delete.delay.ms": "1d", "log.segment.delete.delay.ms": "0"},
        {"nonsense": "is for the controllers to refuse"},
    ],
)
def test_values_within_the_limits_pass(configs: dict[str, str]) -> None:
    check_limits(configs, min_segment_bytes=1 << 20, max_throttled_replicas=3_000)


def test_a_decision_on_a_command_from_before_the_limits_stays_as_it_was() -> None:
    """Controllers decide again on the commands in their logs, so that a limit there would divide them."""
    configs = {
        "segment.bytes": "1024",
        "file.delete.delay.ms": str((1 << 63) - 1),
        "cleanup.policy": ",".join(["delete"] * 1_000),
        "leader.replication.throttled.replicas": ",".join(["0:1"] * 50_000),
    }
    image = image_after(claim(), register(1), create_topic("a", 1, configs=configs))
    assert image.topic_configs("a") == configs


def test_a_throttle_is_a_rate_above_nothing() -> None:
    for key in ONLY_OF_A_BROKER:
        assert DYNAMIC_BROKER_CONFIGS.canonical({key: "1MiB"}) == {key: str(1 << 20)}
        with pytest.raises(InvalidConfig):
            DYNAMIC_BROKER_CONFIGS.parse({key: "0"})


def test_defaults_that_carry_a_promise() -> None:
    defaults = {key.name: key.format(key.default) for key in TOPIC_CONFIGS}
    assert defaults["flush.messages"] == "1"
    assert defaults["max.message.bytes"] == str(4 << 20)
    assert defaults["max.inflate.bytes"] == str(64 << 20)
    assert defaults["unclean.leader.election.enable"] == "false"
    assert defaults["retention.ms"] == str(7 * 24 * 3600 * 1000)
    assert defaults["retention.bytes"] == "-1"


@pytest.mark.parametrize(("key", "value"), [("compression.type", "zstd"), ("cleanup.policy", "tiered")])
def test_what_is_not_built_is_refused_and_not_ignored(key: str, value: str) -> None:
    with pytest.raises(InvalidConfig, match=key.replace(".", r"\.")):
        TOPIC_CONFIGS.parse({key: value})


def cluster(racks: list[str], *, newest: bool = False) -> MetadataImage:
    return image_after(claim(newest=newest), *(register(broker_id, rack=rack) for broker_id, rack in enumerate(racks)))


@given(st.integers(1, 6), st.integers(1, 40), st.data())
def test_leaders_and_replicas_are_spread_evenly(brokers: int, partitions: int, data: st.DataObject) -> None:
    replication_factor = data.draw(st.integers(1, brokers))
    image = cluster([""] * brokers, newest=data.draw(st.booleans()))
    placed = list(place_partitions(image, partitions, replication_factor))
    assert len(placed) == partitions
    assert all(len(set(replicas)) == replication_factor for replicas in placed)
    leaders = Counter(replicas[0] for replicas in placed)
    held = Counter(broker for replicas in placed for broker in replicas)
    assert max(leaders.values()) - min(leaders[b] for b in range(brokers)) <= 1
    assert max(held.values()) - min(held[b] for b in range(brokers)) <= 1


def test_below_level_9_those_lead_that_lead_fewest_now() -> None:
    image = image_after(claim(), register(1), create_topic("a", 1, partitions=3), register(2))
    assert list(place_partitions(image, 4, 1)) == [(2,), (2,), (2,), (1,)]


def test_a_topic_is_spread_over_brokers_whatever_they_lead_now() -> None:
    """A broker that has just come back leads nothing, and it got all partitions of new topics."""
    newest = claim(newest=True)
    image = image_after(newest, register(1), create_topic("a", 1, partitions=4), register(2), register(3))
    assert [each[0] for each in place_partitions(image, 6, 3)] == [2, 3, 1, 2, 3, 1]
    [topic] = image.topics.values()
    assert [each[0] for each in place_partitions(image, 6, 1, topic.partitions)] == [2, 3, 2, 3, 2, 3]
    led = replace(image, load={**image.load, 1: replace(image.load[1], leaderships=0)})
    assert list(place_partitions(led, 1, 1)) == [(2,)], (
        "the replica must go to broker 2, as broker 1 is preferred by four partitions, though it leads none now"
    )


@given(st.integers(1, 30))
def test_replicas_stand_in_different_racks(partitions: int) -> None:
    racks = ["x", "x", "x", "y", "z"]
    for replicas in place_partitions(cluster(racks), partitions, 3):
        assert {racks[broker] for broker in replicas} == {"x", "y", "z"}


def test_fenced_brokers_and_those_that_are_shutting_down_get_nothing() -> None:
    image = cluster(["", "", ""])
    fenced = replace(image.brokers[0], fenced=True)
    stopping = replace(image.brokers[2], in_controlled_shutdown=True)
    image = replace(image, brokers={**image.brokers, 0: fenced, 2: stopping})
    assert list(place_partitions(image, 2, 1)) == [(1,), (1,)]
    with pytest.raises(InvalidReplicationFactor, match=r"of 3 registered brokers 1 is up, so it can be 1$"):
        place_partitions(image, 1, 2)
    fenced_too = replace(image.brokers[1], fenced=True)
    with pytest.raises(InvalidReplicationFactor, match=r"of 3 registered brokers none is up$"):
        place_partitions(replace(image, brokers={**image.brokers, 1: fenced_too}), 1, 1)


def assigned(*replicas: Sequence[int], partitions: int | None = None, factor: int | None = None) -> MetadataCommand:
    command = create_topic("t", 1, len(replicas) if partitions is None else partitions)
    command.create_topic.replication_factor = len(replicas[0]) if factor is None else factor
    for each in replicas:
        command.create_topic.assignments.add(replicas=each)
    return command


def test_replicas_that_somebody_has_chosen_are_taken_as_they_are() -> None:
    image, _ = accept(cluster([""] * 4), assigned([3, 1], [3, 2]))
    topic = image.topics[uuid_of(1)]
    assert [(part.replicas, part.isr, part.leader) for part in topic.partitions] == [
        ((3, 1), (3, 1), 3),
        ((3, 2), (3, 2), 3),
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (assigned([1, 1]), "names no broker, or one of them twice"),
        (assigned([]), "names no broker"),
        (assigned([1, 9]), "broker 9 is not registered, or not up"),
        (assigned([1, 3]), "broker 3 is not registered, or not up"),
        (assigned([1, 2], [1]), "2 partitions need as many assignments of 2 replicas each"),
        (assigned([1, 2], partitions=2), "2 partitions need"),
        (assigned([1, 2], factor=1), "of 1 replicas each"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(command: MetadataCommand, words: str) -> None:
    error = refusal(down(cluster([""] * 4), 3), command)
    assert isinstance(error, InvalidReplicaAssignment)
    assert words in str(error)


@pytest.mark.parametrize(
    ("key", "words"),
    [("message.format.version", "there is one format"), ("remote.storage.enable", "on the disks of brokers only")],
)
def test_a_topic_config_of_kafkas_is_refused_with_what_there_is_instead(key: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=f"unknown topic config '{key}': leave it out: .*{words}"):
        TOPIC_CONFIGS.key(key)


def test_a_broker_config_that_cannot_change_while_brokers_run_says_where_it_stands() -> None:
    with pytest.raises(
        InvalidConfig, match=r"'listeners'; any other key is in the file of each server, and takes effect"
    ):
        DYNAMIC_BROKER_CONFIGS.key("listeners")
