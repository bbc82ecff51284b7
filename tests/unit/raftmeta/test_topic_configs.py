"""The table of topic configs agrees with itself and with what the design promises."""

from __future__ import annotations

import pytest

from raftlog.errors import InvalidConfig
from raftmeta.topic_configs import (
    BROKER_KEY_BY_TOPIC_KEY,
    DYNAMIC_BROKER_CONFIGS,
    TOPIC_CONFIGS,
    TOPIC_KEY_BY_BROKER_KEY,
)


def test_every_topic_key_has_a_broker_key_with_the_same_default() -> None:
    assert BROKER_KEY_BY_TOPIC_KEY.keys() == {key.name for key in TOPIC_CONFIGS}
    assert TOPIC_KEY_BY_BROKER_KEY.keys() == {key.name for key in DYNAMIC_BROKER_CONFIGS}
    for key in TOPIC_CONFIGS:
        assert DYNAMIC_BROKER_CONFIGS.key(BROKER_KEY_BY_TOPIC_KEY[key.name]).default == key.default


def test_defaults_that_carry_a_promise() -> None:
    defaults = {key.name: key.format(key.default) for key in TOPIC_CONFIGS}
    assert defaults["flush.messages"] == "1"
    assert defaults["max.message.bytes"] == str(4 << 20)
    assert defaults["max.inflate.bytes"] == str(64 << 20)
    assert defaults["unclean.leader.election.enable"] == "false"
    assert defaults["retention.ms"] == str(7 * 24 * 3600 * 1000)
    assert defaults["retention.bytes"] == "-1"


@pytest.mark.parametrize(("key", "value"), [("compression.type", "zstd"), ("cleanup.policy", "compact")])
def test_what_is_not_built_is_refused_and_not_ignored(key: str, value: str) -> None:
    with pytest.raises(InvalidConfig, match=key.replace(".", r"\.")):
        TOPIC_CONFIGS.parse({key: value})
