"""What the coordinator of groups is configured with; Kafka's keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """`offsets_retention_ms` is offsets.retention.minutes; -1: nothing expires. `max_size`: members of a group.

    `producer_id_expiration_ms`: how long late offsets of a transaction that has ended are recognized.
    """

    session_timeout_ms: int = 15_000
    heartbeat_interval_ms: int = 3_000
    rebalance_timeout_ms: int = 60_000
    max_size: int = 10_000
    offsets_retention_ms: int = 7 * 24 * 60 * 60 * 1000
    offsets_retention_check_interval_ms: int = 600_000
    offset_metadata_max_bytes: int = 4096
    producer_id_expiration_ms: int = 24 * 60 * 60 * 1000

    def __post_init__(self) -> None:
        assert 0 < self.heartbeat_interval_ms < self.session_timeout_ms
        assert self.rebalance_timeout_ms > 0
        assert self.max_size > 0
        assert self.offsets_retention_check_interval_ms > 0
        assert self.offset_metadata_max_bytes >= 0
        assert self.producer_id_expiration_ms > 0
