"""Settings of one partition log, from a topic's configs over the broker's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from raftlog.errors import InvalidConfig

MAX_SEGMENT_BYTES: Final = (1 << 31) - 1
"""Positions in the index are u32; a segment may exceed `segment.bytes` by one batch, which is below 2 GiB."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """All immutable; `PartitionLog.update_config` swaps the whole. None means without limit."""

    segment_bytes: int = 1 << 30
    """segment.bytes: a segment that would grow beyond this is rolled first."""
    segment_ms: int = 7 * 24 * 3_600_000
    """segment.ms: a segment is rolled when its first append is this long ago (a restart counts anew)."""
    retention_ms: int | None = 7 * 24 * 3_600_000
    """retention.ms (-1: None): a segment goes when its largest timestamp is older than this."""
    retention_bytes: int | None = None
    """retention.bytes (-1: None): the oldest segments go while the rest still has this size."""
    index_interval_bytes: int = 4096
    """index.interval.bytes: log bytes between two entries of the sparse indexes."""
    max_message_bytes: int = 1_048_588
    """max.message.bytes: largest batch a producer may send."""
    max_inflate_bytes: int = 64 << 20
    """max.inflate.bytes: largest size a compressed batch may inflate to."""
    flush_messages: int = 1
    """flush.messages: 1 means fsync before a record counts as held; anything larger is unsafe at power loss."""
    flush_ms: int | None = None
    """flush.ms (Kafka's largest long: None): fsync at least this often when flush.messages is above 1."""
    message_timestamp_type: str = "CreateTime"
    """message.timestamp.type: CreateTime or LogAppendTime."""
    cleanup_policy: str = "delete"
    """cleanup.policy: delete, compact or both with a comma."""
    min_cleanable_dirty_ratio: float = 0.5
    """min.cleanable.dirty.ratio: a compacted log is cleaned when more than this share of its bytes is new."""
    delete_retention_ms: int = 24 * 3_600_000
    """delete.retention.ms: how long a tombstone can be read after the cleaning that first came past it."""
    min_compaction_lag_ms: int = 0
    """min.compaction.lag.ms: a segment with a record younger than this is not cleaned, nor what follows it."""
    max_compaction_lag_ms: int | None = None
    """max.compaction.lag.ms (Kafka's largest long: None): a log is cleaned when a new record is older than this."""
    file_delete_delay_ms: int = 60_000
    """file.delete.delay.ms: time between the renaming of a segment that is not wanted any more and its removal."""

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
        """Whether of each key only the last record is wanted, so that every record needs a key."""
        return "compact" in self.cleanup_policy

    @property
    def roll_ms(self) -> int:
        """segment.ms, or max.compaction.lag.ms where that is less: an active segment is never cleaned (KIP-354)."""
        if self.compacts and self.max_compaction_lag_ms is not None:
            return min(self.segment_ms, self.max_compaction_lag_ms)
        return self.segment_ms

    @staticmethod
    def from_topic_configs(configs: Mapping[str, str], defaults: LogConfig | None = None) -> LogConfig:
        """Return `defaults` with what the topic sets; keys that are no business of the log are passed over.

        Raises:
            InvalidConfig: a value that is not allowed; the message names key and value.
        """
        changes: dict[str, Any] = {}
        for key, parse in _KEYS.items():
            if key in configs:
                changes[key.replace(".", "_")] = parse(key, configs[key])
        return replace(defaults or LogConfig(), **changes)


def _integer(minimum: int, maximum: int = (1 << 63) - 1) -> Callable[[str, str], int]:
    def parse(key: str, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise InvalidConfig(f"{key}={text!r} is not a whole number") from None
        if not minimum <= value <= maximum:
            raise InvalidConfig(f"{key}={value} is out of range; allowed are {minimum} to {maximum}")
        return value

    return parse


def _limit(unlimited: int, minimum: int) -> Callable[[str, str], int | None]:
    parse_integer = _integer(minimum)

    def parse(key: str, text: str) -> int | None:
        if text.strip() == str(unlimited):
            return None
        return parse_integer(key, text)

    return parse


def _ratio(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidConfig(f"{key}={text!r} is not a number") from None
    if not 0 <= value <= 1:
        raise InvalidConfig(f"{key}={text} is out of range; allowed are 0 to 1")
    return value


def _choice(*allowed: str) -> Callable[[str, str], str]:
    def parse(key: str, text: str) -> str:
        if text not in allowed:
            raise InvalidConfig(f"{key}={text!r} is not allowed; choose one of {', '.join(allowed)}")
        return text

    return parse


def _policies(key: str, text: str) -> str:
    policies = [policy.strip() for policy in text.split(",")]
    if not set(policies) <= {"delete", "compact"}:
        raise InvalidConfig(f"{key}={text!r} is not allowed; choose delete, compact or delete,compact")
    return ",".join(policies)


_KEYS: Final[dict[str, Callable[[str, str], Any]]] = {
    "segment.bytes": _integer(1, MAX_SEGMENT_BYTES),
    "segment.ms": _integer(1),
    "retention.ms": _limit(-1, 0),
    "retention.bytes": _limit(-1, 0),
    "index.interval.bytes": _integer(0, 1 << 30),
    "max.message.bytes": _integer(0, (1 << 31) - 1),
    "max.inflate.bytes": _integer(1),
    "flush.messages": _integer(1),
    "flush.ms": _limit((1 << 63) - 1, 0),
    "message.timestamp.type": _choice("CreateTime", "LogAppendTime"),
    "cleanup.policy": _policies,
    "min.cleanable.dirty.ratio": _ratio,
    "delete.retention.ms": _integer(0),
    "min.compaction.lag.ms": _integer(0),
    "max.compaction.lag.ms": _limit((1 << 63) - 1, 1),
    "file.delete.delay.ms": _integer(0),
}
