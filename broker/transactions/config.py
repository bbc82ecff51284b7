"""What the coordinator of transactions is configured with; Kafka's keys where Kafka has them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransactionConfig:
    """`max_timeout_ms`: transaction.max.timeout.ms. `id_expiration_ms`: transactional.id.expiration.ms.

    `sink_expiration_ms`: how long a sink's last batch is remembered after it, at least.
    """

    max_timeout_ms: int = 900_000
    id_expiration_ms: int = 7 * 24 * 60 * 60 * 1000
    sink_expiration_ms: int = 365 * 24 * 60 * 60 * 1000
    expiration_check_interval_ms: int = 60 * 60 * 1000
    """Between two looks for ids and sinks that were idle too long."""
    answer_within_ms: int = 1000
    """After which who ends a transaction is answered even though markers are missing still."""
    complete_after_ms: int = 5
    """How long the record that all markers are written may wait for others, so that they share an append."""

    def __post_init__(self) -> None:
        assert self.max_timeout_ms > 0
        assert self.id_expiration_ms > 0
        assert self.sink_expiration_ms > 0
        assert self.expiration_check_interval_ms > 0
        assert 0 <= self.complete_after_ms < self.answer_within_ms
