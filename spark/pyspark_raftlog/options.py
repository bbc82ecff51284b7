"""The sink's options: what the connector knows itself, and producer settings that pass through."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from pyspark_raftlog.values import did_you_mean, given_twice, whole_number

_BOOTSTRAP: Final = "bootstrap.servers"
_PREFIX: Final = "kafka."
AT_LEAST_ONCE, EXACTLY_ONCE = "at-least-once", "exactly-once"
_APP_ID, _VERSION = "txn.app.id", "txn.version"
_STAGE_TIMEOUT: Final = "transaction.timeout.ms"
_OWN: Final = frozenset({_BOOTSTRAP, "topic", "delivery", _APP_ID, _VERSION, _STAGE_TIMEOUT})
_SPARKS: Final = frozenset({"checkpointlocation", "queryname", "outputmode", "truncate", "numrows"})
"""Spark hands its own options of a query on to the sink."""
_ASYNC_PROGRESS: Final = "asyncprogresstracking"
_DEFAULTS: Final = {
    # A task writes as fast as it can and waits at its end: larger batches cost nothing in latency.
    "linger.ms": "20",
    "batch.size": str(1 << 20),
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Checked options. `producer` holds producer settings under the producer's own names; a password may be among them,
    so they are not shown."""

    bootstrap: str
    topic: str | None
    producer: tuple[tuple[str, str], ...] = field(repr=False)
    exactly_once: bool = True
    app_id: str | None = None
    """`txn.app.id`: the sink id, instead of one that the connector makes."""
    version: int | None = None
    """`txn.version`: the batch id of a batch write."""

    @staticmethod
    def parse(options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
        """Return the options of a query, whose names Spark does not tell apart by case.

        Raises:
            ValueError: unknown, contradictory, or asking for what cannot be.
            InvalidConfig: a producer setting with a bad value.
        """
        given = _own_and_producers(options)
        bootstrap = given.pop(_BOOTSTRAP, "")
        if not bootstrap:
            raise ValueError(f'the address of the cluster is missing; add option("{_BOOTSTRAP}", "host:port")')
        _check_bootstrap(bootstrap)
        delivery = given.pop("delivery", EXACTLY_ONCE).lower()
        if delivery not in (EXACTLY_ONCE, AT_LEAST_ONCE):
            raise ValueError(f"delivery={delivery}: expected {EXACTLY_ONCE} (the default) or {AT_LEAST_ONCE}")
        exactly_once = delivery == EXACTLY_ONCE
        if given.get("topic") == "":
            raise ValueError("option topic is empty; name a topic, or leave it out and have a column topic")
        topic, app_id, version = given.pop("topic", None), given.pop(_APP_ID, None), given.pop(_VERSION, None)
        _check_app(app_id, version, exactly_once=exactly_once, streaming=streaming)
        _check_delivery(given, exactly_once=exactly_once)
        producer = {**_DEFAULTS, **given}
        _check_producer(producer, exactly_once=exactly_once)
        return SinkOptions(
            bootstrap,
            topic,
            tuple(sorted(producer.items())),
            exactly_once,
            app_id,
            int(version) if version is not None else None,
        )


def _own_and_producers(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options that are neither Spark's nor unknown, under the producer's names."""
    # Not at the top: Spark imports this module where gRPC must not be, in processes that fork.
    from raftlog._client.options import PRODUCER_KEYS, refuse_security

    known = _OWN.union(key.name for key in PRODUCER_KEYS)
    given: dict[str, str] = {}
    for name, value in options.items():
        lowered = name.lower()
        if lowered.startswith(_ASYNC_PROGRESS):
            _refuse_async_progress(name, value)
            continue
        if lowered in _SPARKS:
            continue
        key = lowered.removeprefix(_PREFIX)
        refuse_security(key)
        if key == "transactional.id":
            raise ValueError(
                f"option {name} is not the sink's: every task attempt is a transactional producer of its own, and "
                f"{_APP_ID} names what they write together; leave {name} out"
            )
        if key == "path":
            raise ValueError(
                "the raftlog sink has no option path: option topic, or a column topic, says where it writes; leave the "
                "path out of save(), or start()"
            )
        if key not in known:
            raise ValueError(_unknown(name, known))
        if given.setdefault(key, value) != value:
            raise ValueError(given_twice(key, given[key], value))
    return given


def _check_bootstrap(bootstrap: str) -> None:
    """Have an address that is none refused where the query starts, not in its tasks."""
    from raftlog._core.bootstrap import parse_bootstrap

    parse_bootstrap(bootstrap)


def _refuse_async_progress(name: str, value: str) -> None:
    if name.lower() == "asyncprogresstrackingenabled" and value.strip().lower() == "true":
        raise ValueError(
            "async progress tracking (asyncProgressTrackingEnabled=true) is not for this sink: Spark then does not "
            "keep what each batch held, so that after a restart the same batch number may stand for other rows; leave "
            "the option out"
        )


def _check_app(app_id: str | None, version: str | None, *, exactly_once: bool, streaming: bool) -> None:
    """Refuse `txn.app.id` and `txn.version` where they would mean nothing, or too little."""
    from raftlog._core.staging import MAX_ID_CHARACTERS

    for name, value in ((_APP_ID, app_id), (_VERSION, version)):
        if value is not None and not exactly_once:
            raise ValueError(f"option {name} is for delivery={EXACTLY_ONCE}; leave it or delivery={AT_LEAST_ONCE} out")
    if app_id is not None and not 0 < len(app_id) <= MAX_ID_CHARACTERS:
        raise ValueError(f"option {_APP_ID} has {len(app_id)} characters, expected 1 to {MAX_ID_CHARACTERS}")
    if streaming and version is not None:
        raise ValueError(
            f"option {_VERSION} is for batch writes: the batches of a stream are numbered by Spark; leave it out"
        )
    if streaming:
        return
    if (app_id is None) != (version is None):
        given, missing = (_APP_ID, _VERSION) if version is None else (_VERSION, _APP_ID)
        raise ValueError(
            f"option {given} needs {missing}: a write of the same {_APP_ID} with a {_VERSION} not above the last one "
            "is taken for a repetition and writes nothing; give both, or neither"
        )
    if version is not None and whole_number(version) is None:
        raise ValueError(f"{_VERSION}={version}: expected a number from 0 on, higher with every write")


def _check_delivery(given: Mapping[str, str], *, exactly_once: bool) -> None:
    if not exactly_once:
        if given.get("acks", "all") == "0":
            raise ValueError(
                "acks=0 is not at least once: nobody would know what arrived; use acks=all (the default) or 1"
            )
        if _STAGE_TIMEOUT in given:
            raise ValueError(
                f"option {_STAGE_TIMEOUT} is for delivery={EXACTLY_ONCE}; leave it or delivery={AT_LEAST_ONCE} out"
            )
        return
    from raftlog._client.stage_options import not_exactly_once

    if reason := not_exactly_once(given):
        raise ValueError(f"{reason}; leave it out, or use delivery={AT_LEAST_ONCE}")


def _check_producer(producer: Mapping[str, str], *, exactly_once: bool) -> None:
    """Have a bad value refused where the query starts, not in its tasks."""
    if exactly_once:
        from raftlog._client.stage_options import StageOptions

        StageOptions.make(producer, {})
    else:
        from raftlog._client.options import ProducerOptions

        ProducerOptions.make(producer, {})


def _unknown(name: str, known: Set[str]) -> str:
    names = sorted(known)
    advice = did_you_mean(name.lower().removeprefix(_PREFIX), names, f"the sink knows {', '.join(names)}")
    return f"the raftlog sink has no option {name}; {advice}"
