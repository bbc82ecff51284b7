"""The sink's options: what the connector knows itself, and producer settings that pass through."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

PRODUCER_KEYS = frozenset(
    {
        "acks",
        "batch.size",
        "buffer.memory",
        "client.id",
        "compression.level",
        "compression.type",
        "delivery.timeout.ms",
        "linger.ms",
        "max.block.ms",
        "max.in.flight.requests.per.connection",
        "max.request.size",
        "metadata.max.age.ms",
        "request.timeout.ms",
        "retries",
        "retry.backoff.max.ms",
        "retry.backoff.ms",
    }
)
"""Settings of `raftlog.Producer` that an option may carry, with or without the prefix `kafka.`. Their values are
checked by the producer; a test compares the names with the producer's own."""

_BOOTSTRAP = "bootstrap.servers"
_PREFIX = "kafka."
_AT_LEAST_ONCE, _EXACTLY_ONCE = "at-least-once", "exactly-once"
_OWN = frozenset({_BOOTSTRAP, "topic", "delivery"})
_SPARKS = frozenset({"checkpointlocation", "queryname", "outputmode", "path", "truncate", "numrows"})
"""Spark hands its own options of a query on to the sink."""
_ASYNC_PROGRESS = "asyncprogresstracking"
_DEFAULTS = {
    # A task writes as fast as it can and waits at its end: larger batches cost nothing in latency.
    "linger.ms": "20",
    "batch.size": str(1 << 20),
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Checked options. `producer` holds producer settings under the producer's own names."""

    bootstrap: str
    topic: str | None
    producer: tuple[tuple[str, str], ...]

    @staticmethod
    def parse(options: Mapping[str, str]) -> SinkOptions:
        """Return the options of a query, whose names Spark does not tell apart by case.

        Raises:
            ValueError: unknown, contradictory, or asking for what this version cannot do.
        """
        given: dict[str, str] = {}
        for name, value in options.items():
            lowered = name.lower()
            if lowered.startswith(_ASYNC_PROGRESS):
                _refuse_async_progress(lowered, value)
                continue
            key = lowered.removeprefix(_PREFIX)
            if key in _SPARKS:
                continue
            if key not in _OWN and key not in PRODUCER_KEYS:
                raise ValueError(_unknown(name))
            if given.setdefault(key, value) != value:
                raise ValueError(f"option {key} is given twice, as {given[key]!r} and as {value!r}; give it once")
        if _BOOTSTRAP not in given:
            raise ValueError(f'the address of the cluster is missing; add option("{_BOOTSTRAP}", "host:port")')
        delivery = given.pop("delivery", _AT_LEAST_ONCE).lower()
        if delivery == _EXACTLY_ONCE:
            raise ValueError(
                f"delivery={_EXACTLY_ONCE} is not there yet, it comes with transactions; "
                f"use delivery={_AT_LEAST_ONCE} and tell repeated records apart by something in the value"
            )
        if delivery != _AT_LEAST_ONCE:
            raise ValueError(f"delivery={delivery}: expected {_AT_LEAST_ONCE} (the default)")
        if given.get("topic") == "":
            raise ValueError("option topic is empty; name a topic, or leave it out and have a column topic")
        bootstrap, topic = given.pop(_BOOTSTRAP), given.pop("topic", None)
        return SinkOptions(bootstrap, topic, tuple(sorted({**_DEFAULTS, **given}.items())))


def _unknown(name: str) -> str:
    known = sorted(_OWN | PRODUCER_KEYS)
    near = difflib.get_close_matches(name.lower().removeprefix(_PREFIX), known, n=1, cutoff=0.7)
    advice = f"did you mean {near[0]}?" if near else f"the sink knows {', '.join(known)}"
    return f"the raftlog sink has no option {name}; {advice}"


def _refuse_async_progress(name: str, value: str) -> None:
    if name == "asyncprogresstrackingenabled" and value.lower() == "true":
        raise ValueError(
            "asyncProgressTrackingEnabled=true: Spark would record progress in its own time, and a restart repeat "
            "batches that it has forgotten; leave the option out"
        )
