"""The sink's options: what the connector knows itself, and producer settings that pass through."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Set
from dataclasses import dataclass

_BOOTSTRAP = "bootstrap.servers"
_PREFIX = "kafka."
_AT_LEAST_ONCE, _EXACTLY_ONCE = "at-least-once", "exactly-once"
_OWN = frozenset({_BOOTSTRAP, "topic", "delivery"})
_SPARKS = frozenset({"checkpointlocation", "queryname", "outputmode", "path", "truncate", "numrows"})
"""Spark hands its own options of a query on to the sink."""
_ASYNC_PROGRESS = "asyncprogresstracking"
"""Spark itself refuses to start a query with this switched on for a sink that does not offer it."""
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
            InvalidConfig: a producer setting with a bad value.
        """
        # Not at the top: Spark imports this module where gRPC must not be, in processes that fork.
        from raftlog._client.options import PRODUCER_KEYS, ProducerOptions, refuse_security

        known = _OWN.union(key.name for key in PRODUCER_KEYS)
        given: dict[str, str] = {}
        for name, value in options.items():
            lowered = name.lower()
            if lowered in _SPARKS or lowered.startswith(_ASYNC_PROGRESS):
                continue
            key = lowered.removeprefix(_PREFIX)
            refuse_security(key)
            if key not in known:
                raise ValueError(_unknown(name, known))
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
        if given.get("acks", "all") == "0":
            raise ValueError(
                "acks=0 is not at least once: nobody would know what arrived; use acks=all (the default) or 1"
            )
        if given.get("topic") == "":
            raise ValueError("option topic is empty; name a topic, or leave it out and have a column topic")
        bootstrap, topic = given.pop(_BOOTSTRAP), given.pop("topic", None)
        producer = {**_DEFAULTS, **given}
        ProducerOptions.make(producer, {})
        return SinkOptions(bootstrap, topic, tuple(sorted(producer.items())))


def _unknown(name: str, known: Set[str]) -> str:
    near = difflib.get_close_matches(name.lower().removeprefix(_PREFIX), known, n=1, cutoff=0.7)
    advice = f"did you mean {near[0]}?" if near else f"the sink knows {', '.join(sorted(known))}"
    return f"the raftlog sink has no option {name}; {advice}"
