"""The settings of compaction, and that a compacted topic takes no record without key."""

from __future__ import annotations

import pyarrow as pa
import pytest

from broker.log.config import LogConfig
from raftlog.errors import InvalidConfig, InvalidRecord
from raftlog.format import Columns, encode_batch, validate_produced
from raftmeta.topic_configs import BROKER_KEY_BY_TOPIC_KEY, TOPIC_CONFIGS
from tests.support.keyed_log import keyed_batch


def test_topic_configs_reach_the_log() -> None:
    typed = TOPIC_CONFIGS.canonical(
        {
            "cleanup.policy": "compact,delete",
            "min.cleanable.dirty.ratio": "0.25",
            "delete.retention.ms": "1h",
            "min.compaction.lag.ms": 5,
            "max.compaction.lag.ms": "2h",
        }
    )
    config = LogConfig.from_topic_configs(typed)
    assert (config.compacts, config.deletes) == (True, True)
    assert config.min_cleanable_dirty_ratio == 0.25
    assert (config.delete_retention_ms, config.min_compaction_lag_ms) == (3_600_000, 5)
    assert config.max_compaction_lag_ms == config.roll_ms == 7_200_000


def test_defaults_are_kafkas() -> None:
    defaults = {key.name: key.format(key.default) for key in TOPIC_CONFIGS}
    config = LogConfig.from_topic_configs(defaults)
    assert config == LogConfig(max_message_bytes=config.max_message_bytes)
    assert not config.compacts
    assert config.max_compaction_lag_ms is None
    assert defaults["min.cleanable.dirty.ratio"] == "0.5"
    assert defaults["delete.retention.ms"] == "86400000"
    assert BROKER_KEY_BY_TOPIC_KEY["min.cleanable.dirty.ratio"] == "log.cleaner.min.cleanable.ratio"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("min.cleanable.dirty.ratio", "1.1"),
        ("min.cleanable.dirty.ratio", "half"),
        ("delete.retention.ms", "-1"),
        ("max.compaction.lag.ms", "0"),
        ("cleanup.policy", ""),
    ],
)
def test_bad_values_are_refused(key: str, value: str) -> None:
    with pytest.raises(InvalidConfig, match=key.replace(".", r"\.")):
        TOPIC_CONFIGS.parse({key: value})
    if value:
        with pytest.raises(InvalidConfig, match=key.replace(".", r"\.")):
            LogConfig.from_topic_configs({key: value})


def test_an_active_segment_is_rolled_no_later_than_it_has_to_be_compacted() -> None:
    assert LogConfig(max_compaction_lag_ms=5).roll_ms == LogConfig().segment_ms, (
        "max.compaction.lag.ms must not roll segments of a topic that is not compacted"
    )
    assert LogConfig(cleanup_policy="compact", max_compaction_lag_ms=5, segment_ms=3).roll_ms == 3


@pytest.mark.parametrize(
    "batch",
    [
        encode_batch(Columns(pa.array([b"v", b"w"])), 1),
        keyed_batch([(b"k", b"v"), (None, b"w")]),
    ],
)
def test_a_record_without_key_is_refused_where_the_topic_is_compacted(batch: bytes) -> None:
    validate_produced(batch)
    with pytest.raises(InvalidRecord, match="of 2 records have no key"):
        validate_produced(batch, needs_keys=True)


def test_an_empty_key_is_a_key() -> None:
    validate_produced(keyed_batch([(b"", None)]), needs_keys=True)


def test_a_broker_brings_values_from_before_the_limits_within_them() -> None:
    before = LogConfig(segment_bytes=1024, segment_ms=1, file_delete_delay_ms=(1 << 63) - 1)
    config = before.within_limits(1 << 20)
    assert (config.segment_bytes, config.segment_ms, config.file_delete_delay_ms) == (1 << 20, 1_000, 86_400_000)
    within = LogConfig(segment_bytes=2 << 20, segment_ms=5_000, file_delete_delay_ms=0)
    assert within.within_limits(1 << 20) == within
