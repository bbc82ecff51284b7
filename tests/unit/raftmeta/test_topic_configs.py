"""The table of topic configs agrees with itself and with what the design promises."""

from __future__ import annotations

import pytest

from raftlog.errors import InvalidConfig
from raftmeta.topic_configs import (
    BROKER_KEY_BY_TOPIC_KEY,
    DYNAMIC_BROKER_CONFIGS,
    TOPIC_CONFIGS,
    TOPIC_KEY_BY_BROKER_KEY,
    is_throttled,
)

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
