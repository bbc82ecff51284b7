"""The options of a staged writer. Imports nothing of gRPC: Spark checks options in processes that fork."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from raftlog._client.options import PRODUCER_KEYS, ProducerOptions
from raftlog.errors import InvalidConfig

STAGE_TIMEOUT: Final = "transaction.timeout.ms"
DEFAULT_TIMEOUT_MS: Final = 900_000
"""The timeout of a stage: the maximum that servers allow by default (transaction.max.timeout.ms)."""
_TRANSACTIONAL_ID: Final = "transactional.id"
_IDEMPOTENCE: Final = "enable.idempotence"
_NOT_EXACTLY_ONCE: Final = {
    "acks": ({"0", "1"}, "a committed record that only one broker holds may be lost"),
    _IDEMPOTENCE: ({"false"}, "a retried batch would be written twice"),
}


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The producer options of every stage, and how long a stage may stay uncommitted."""

    producer: ProducerOptions
    timeout_ms: int

    @property
    def delivery_timeout_s(self) -> float:
        """The time limit of calls without a timeout of their own."""
        return self.producer.delivery_timeout_ms / 1000

    @classmethod
    def make(cls, config: Mapping[str, object] | None, options: Mapping[str, object]) -> StageOptions:
        """Return the options from a producer's config and keywords, and `transaction.timeout.ms`.

        Raises:
            InvalidConfig: an option is unknown, out of range, or breaks exactly-once.
        """
        given = _dotted(config, options)
        if _TRANSACTIONAL_ID in given:
            raise InvalidConfig(
                f"{_TRANSACTIONAL_ID}={given[_TRANSACTIONAL_ID]} is not for a staged writer: every stage is its own "
                "producer, and the sink id identifies them all; leave it out"
            )
        timeout_ms = PRODUCER_KEYS.key(STAGE_TIMEOUT).parse(given.pop(STAGE_TIMEOUT, DEFAULT_TIMEOUT_MS))
        assert isinstance(timeout_ms, int), "by its kind"
        if reason := not_exactly_once(given):
            raise InvalidConfig(f"{reason}; leave it out")
        producer = ProducerOptions.make({_IDEMPOTENCE: True, **given}, {})
        assert producer.enable_idempotence, "not_exactly_once refuses every other value"
        return cls(producer, timeout_ms)


def not_exactly_once(given: Mapping[str, object]) -> str | None:
    """Return the producer setting that breaks exactly-once, with the reason, or None."""
    for name, (weak, reason) in _NOT_EXACTLY_ONCE.items():
        if name in given and str(given[name]).strip().lower() in weak:
            return f"{name}={given[name]} is not exactly once: {reason}"
    return None


def _dotted(config: Mapping[str, object] | None, options: Mapping[str, object]) -> dict[str, object]:
    """Return the given options by their Kafka names; None counts as left out."""
    given: dict[str, object] = {}
    for name, value in [*(config or {}).items(), *options.items()]:
        dotted = name.replace("_", ".")
        if dotted in given:
            raise InvalidConfig(f"{name} is given twice, as a keyword and in config")
        if value is not None:
            given[dotted] = value
    return given
