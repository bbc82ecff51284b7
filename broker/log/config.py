"""Settings of one partition log: a topic's configs over the broker's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from raftlog.config import MAX_INT64, Value
from raftmeta.topic_configs import MAX_FILE_DELETE_DELAY_MS, TOPIC_CONFIGS

_UNLIMITED: Final = {
    "retention.ms": -1,
    "retention.bytes": -1,
    "flush.ms": MAX_INT64,
    "max.compaction.lag.ms": MAX_INT64,
}
"""The values that stand for no limit."""
MIN_SEGMENT_MS: Final = 1_000
"""Less would let a topic begin a segment, with its files and descriptors, with every batch."""


def _value(name: str, value: Value) -> Any:
    """Return a key's value as `LogConfig` has it."""
    if name in _UNLIMITED and value == _UNLIMITED[name]:
        return None
    return ",".join(value) if isinstance(value, tuple) else value


def _key(name: str) -> Any:
    """Declare a field with the default of a topic key."""
    return field(default=_value(name, TOPIC_CONFIGS.key(name).default))


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The topic keys that concern the log: `segment_bytes` is segment.bytes. None stands for no limit. Immutable.

    `raftmeta/topic_configs.py` declares the keys, their defaults, bounds and meanings. `PartitionLog.update_config`
    replaces the whole.
    """

    segment_bytes: int = _key("segment.bytes")
    segment_ms: int = _key("segment.ms")
    retention_ms: int | None = _key("retention.ms")
    retention_bytes: int | None = _key("retention.bytes")
    index_interval_bytes: int = _key("index.interval.bytes")
    max_message_bytes: int = _key("max.message.bytes")
    max_inflate_bytes: int = _key("max.inflate.bytes")
    flush_messages: int = _key("flush.messages")
    flush_ms: int | None = _key("flush.ms")
    message_timestamp_type: str = _key("message.timestamp.type")
    cleanup_policy: str = _key("cleanup.policy")
    min_cleanable_dirty_ratio: float = _key("min.cleanable.dirty.ratio")
    delete_retention_ms: int = _key("delete.retention.ms")
    min_compaction_lag_ms: int = _key("min.compaction.lag.ms")
    max_compaction_lag_ms: int | None = _key("max.compaction.lag.ms")
    file_delete_delay_ms: int = _key("file.delete.delay.ms")

    @property
    def log_append_time(self) -> bool:
        """Whether the broker stamps its own time on batches."""
        return self.message_timestamp_type == "LogAppendTime"

    @property
    def deletes(self) -> bool:
        """Whether retention applies."""
        return "delete" in self.cleanup_policy.split(",")

    @property
    def compacts(self) -> bool:
        """Whether only the last record of each key is kept, so that every record needs a key."""
        return "compact" in self.cleanup_policy

    @property
    def roll_ms(self) -> int:
        """segment.ms, or max.compaction.lag.ms where that is less: an active segment is never cleaned (KIP-354)."""
        if self.compacts and self.max_compaction_lag_ms is not None:
            return min(self.segment_ms, self.max_compaction_lag_ms)
        return self.segment_ms

    def within_limits(self, min_segment_bytes: int, max_inflate_bytes: int | None = None) -> LogConfig:
        """Return the config as a broker applies it: values from before the limits on them are brought within.

        `max_inflate_bytes`: the broker's own; None: this is the broker's own config.
        """
        return replace(
            self,
            max_inflate_bytes=min(self.max_inflate_bytes, max_inflate_bytes or self.max_inflate_bytes),
            segment_bytes=max(self.segment_bytes, min_segment_bytes),
            segment_ms=max(self.segment_ms, MIN_SEGMENT_MS),
            file_delete_delay_ms=min(self.file_delete_delay_ms, MAX_FILE_DELETE_DELAY_MS),
        )

    @staticmethod
    def from_topic_configs(configs: Mapping[str, str], defaults: LogConfig | None = None) -> LogConfig:
        """Return `defaults` with the values of a topic; ignores keys that do not concern the log.

        Raises:
            InvalidConfig: a value is not allowed; the message names key and value.
        """
        keys = (TOPIC_CONFIGS.key(each.name) for each in fields(LogConfig))
        changes = {
            key.name.replace(".", "_"): _value(key.name, key.parse(configs[key.name]))
            for key in keys
            if key.name in configs
        }
        return replace(defaults or LogConfig(), **changes)
