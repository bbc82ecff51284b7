"""What a staged writer can be told. Imports nothing of gRPC: Spark checks options in processes that fork."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from raftlog._client.options import PRODUCER_KEYS, ProducerOptions
from raftlog.errors import InvalidConfig

STAGE_TIMEOUT: Final = "transaction.timeout.ms"
DEFAULT_TIMEOUT_MS: Final = 900_000
"""Of a stage: what servers allow at most, unless their transaction.max.timeout.ms is another."""
_TRANSACTIONAL_ID: Final = "transactional.id"
_IDEMPOTENCE: Final = "enable.idempotence"
_NOT_EXACTLY_ONCE: Final = {
    "acks": ({"0", "1"}, "what one broker alone holds may be lost after it was committed"),
    _IDEMPOTENCE: ({"false"}, "what is sent again would be there twice"),
}


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The producer's options of every stage, and how long a stage may stay unnamed."""

    producer: ProducerOptions
    timeout_ms: int

    @property
    def delivery_timeout_s(self) -> float:
        """How long a call may take that is given no other limit."""
        return self.producer.delivery_timeout_ms / 1000

    @classmethod
    def make(cls, config: Mapping[str, object] | None, options: Mapping[str, object]) -> StageOptions:
        """Return the options from what the caller gave: a producer's, and `transaction.timeout.ms`.

        Raises:
            InvalidConfig: unknown, out of range, or contradicting what a stage is.
        """
        given = _dotted(config, options)
        if _TRANSACTIONAL_ID in given:
            raise InvalidConfig(
                f"{_TRANSACTIONAL_ID}={given[_TRANSACTIONAL_ID]} is not for a staged writer: every stage is a producer "
                "of its own, and the sink id stands for all of them; leave it out"
            )
        timeout_ms = PRODUCER_KEYS.key(STAGE_TIMEOUT).parse(given.pop(STAGE_TIMEOUT, DEFAULT_TIMEOUT_MS))
        assert isinstance(timeout_ms, int), "by its kind"
        if reason := not_exactly_once(given):
            raise InvalidConfig(f"{reason}; leave it out")
        producer = ProducerOptions.make({_IDEMPOTENCE: True, **given}, {})
        assert producer.enable_idempotence, "any other word for it was refused"
        return cls(producer, timeout_ms)


def not_exactly_once(given: Mapping[str, object]) -> str | None:
    """Return which setting of a producer keeps what it stages from being exactly once, and why; None: none does."""
    for name, (weak, reason) in _NOT_EXACTLY_ONCE.items():
        if name in given and str(given[name]).strip().lower() in weak:
            return f"{name}={given[name]} is not exactly once: {reason}"
    return None


def _dotted(config: Mapping[str, object] | None, options: Mapping[str, object]) -> dict[str, object]:
    """Return all that was given by Kafka's names; what is None counts as left out."""
    given: dict[str, object] = {}
    for name, value in [*(config or {}).items(), *options.items()]:
        dotted = name.replace("_", ".")
        if dotted in given:
            raise InvalidConfig(f"{name} is given twice, as a keyword and in config")
        if value is not None:
            given[dotted] = value
    return given
