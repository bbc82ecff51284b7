"""The sink's options: the connector's own, and settings of the producer.

`check_cluster` asks the cluster on the driver before any task runs, so that an error is reported once and not by every
task. A process asks only once for the same options: Spark keeps the driver's Python workers between batches.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pyspark_raftlog.values import whole_number
from pyspark_raftlog.vocabulary import BOOTSTRAP, IGNORED_BY_SINK, REFUSED_BY_SINK, Vocabulary

if TYPE_CHECKING:
    from raftlog import Admin


AT_LEAST_ONCE, EXACTLY_ONCE = "at-least-once", "exactly-once"
_APP_ID, _VERSION = "txn.app.id", "txn.version"
_STAGE_TIMEOUT: Final = "transaction.timeout.ms"
_OWN: Final = {name: name for name in (BOOTSTRAP, "topic", "delivery", _APP_ID, _VERSION, _STAGE_TIMEOUT)}
_SPARKS: Final = frozenset({"checkpointlocation", "queryname", "outputmode", "truncate", "numrows"})
"""Spark's own options of a query, which it passes to the sink too."""
_ASYNC_PROGRESS: Final = "asyncprogresstracking"
_DEFAULTS: Final = {
    # A task writes as fast as it can and waits only at its end, so large batches do not delay it.
    "linger.ms": "20",
    "batch.size": str(1 << 20),
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Checked options. `producer` has the producer's settings; the repr omits it because it may have a password."""

    bootstrap: str
    topic: str | None
    producer: tuple[tuple[str, str], ...] = field(repr=False)
    exactly_once: bool = True
    app_id: str | None = None
    """`txn.app.id`: the sink id, instead of a generated one."""
    version: int | None = None
    """`txn.version`: the batch id of a batch write."""

    @staticmethod
    def parse(options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
        """Return the options of a query; Spark ignores the case of their names.

        Raises:
            ValueError: an option is unknown or invalid, or options contradict each other.
            InvalidConfig: a producer setting with a bad value.
        """
        given = _given(options)
        bootstrap = given.pop(BOOTSTRAP)
        delivery = given.pop("delivery", EXACTLY_ONCE).lower()
        if delivery not in (EXACTLY_ONCE, AT_LEAST_ONCE):
            raise ValueError(f"delivery={delivery}: expected {EXACTLY_ONCE} (the default) or {AT_LEAST_ONCE}")
        exactly_once = delivery == EXACTLY_ONCE
        if given.get("topic") == "":
            raise ValueError("option topic is empty; name a topic, or leave it out and add a column topic")
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


def _given(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options that are not Spark's, under the producer's names; unknown ones raise."""
    # Not at the top: Spark imports this module in processes that fork, where gRPC must not be loaded.
    from raftlog._client.options import PRODUCER_KEYS

    producers = [key.name for key in PRODUCER_KEYS]
    vocabulary = Vocabulary("sink", _OWN, producers, IGNORED_BY_SINK, REFUSED_BY_SINK)
    return vocabulary.collect({name: value for name, value in options.items() if not _is_sparks(name, value)})


def _is_sparks(name: str, value: str) -> bool:
    """Return whether an option is one of Spark's own for the query.

    Raises:
        ValueError: the option turns on a feature that the sink does not support.
    """
    if name.lower().startswith(_ASYNC_PROGRESS):
        _refuse_async_progress(name, value)
        return True
    return name.lower() in _SPARKS


def _refuse_async_progress(name: str, value: str) -> None:
    if name.lower() == "asyncprogresstrackingenabled" and value.strip().lower() == "true":
        raise ValueError(
            "this sink does not support async progress tracking (asyncProgressTrackingEnabled=true): Spark then does "
            "not record the content of each batch, so after a restart the same batch number may mean other rows; leave "
            "the option out"
        )


def _check_app(app_id: str | None, version: str | None, *, exactly_once: bool, streaming: bool) -> None:
    """Refuse `txn.app.id` and `txn.version` where they have no meaning, or where one of them is missing."""
    from raftlog._core.staging import MAX_ID_CHARACTERS

    for name, value in ((_APP_ID, app_id), (_VERSION, version)):
        if value is not None and not exactly_once:
            raise ValueError(f"option {name} needs delivery={EXACTLY_ONCE}; leave it or delivery={AT_LEAST_ONCE} out")
    if app_id is not None and not 0 < len(app_id) <= MAX_ID_CHARACTERS:
        raise ValueError(f"option {_APP_ID} has {len(app_id)} characters, expected 1 to {MAX_ID_CHARACTERS}")
    if streaming and version is not None:
        raise ValueError(f"option {_VERSION} is for batch writes: Spark numbers the batches of a stream; leave it out")
    if streaming:
        return
    if (app_id is None) != (version is None):
        given, missing = (_APP_ID, _VERSION) if version is None else (_VERSION, _APP_ID)
        raise ValueError(
            f"option {given} needs {missing}: a write with the same {_APP_ID} and a {_VERSION} not above the last one "
            "counts as a repetition and writes nothing; give both, or neither"
        )
    if version is not None and whole_number(version) is None:
        raise ValueError(f"{_VERSION}={version}: expected a whole number of at least 0, higher with every write")


def _check_delivery(given: Mapping[str, str], *, exactly_once: bool) -> None:
    if not exactly_once:
        if given.get("acks", "all") == "0":
            raise ValueError(
                "acks=0 cannot deliver at least once: records are not acknowledged; use acks=all (the default) or 1"
            )
        if _STAGE_TIMEOUT in given:
            raise ValueError(
                f"option {_STAGE_TIMEOUT} needs delivery={EXACTLY_ONCE}; leave it or delivery={AT_LEAST_ONCE} out"
            )
        return
    from raftlog._client.stage_options import not_exactly_once

    if reason := not_exactly_once(given):
        raise ValueError(f"{reason}; leave it out, or use delivery={AT_LEAST_ONCE}")


def _check_producer(producer: Mapping[str, str], *, exactly_once: bool) -> None:
    """Refuse an invalid setting when the query starts, not in its tasks."""
    if exactly_once:
        from raftlog._client.stage_options import StageOptions

        StageOptions.make(producer, {})
    else:
        from raftlog._client.options import ProducerOptions

        ProducerOptions.make(producer, {})


logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 10.0
_MOST: Final = "transaction.max.timeout.ms"
_checked: set[tuple[str, str | None, tuple[tuple[str, str], ...], bool]] = set()
"""Options whose check succeeded, without those that number batch writes."""


def check_cluster(options: SinkOptions) -> None:
    """Check that the topic exists, and that the cluster allows the timeout of stages.

    If the cluster does not answer, it only logs that: tasks wait for the cluster as long as their options say.

    Raises:
        ValueError: no task could write a row; the message says what to do.
    """
    from raftlog import Admin
    from raftlog._client.options import SECURITY_KEYS
    from raftlog.errors import ClusterAuthorizationFailed, RetriableError

    asked = (options.bootstrap, options.topic, options.producer, options.exactly_once)
    if asked in _checked:
        return
    try:
        secured = {key.name for key in SECURITY_KEYS}
        settings = {name: value for name, value in options.producer if name in secured}
        with Admin(options.bootstrap, config=settings) as admin:
            if options.topic is not None:
                _check_topic(admin, options.topic)
            if options.exactly_once:
                with suppress(ClusterAuthorizationFailed):  # writing does not need this permission; tasks would report
                    _check_timeout(admin, options)
    except (RetriableError, TimeoutError) as error:
        logger.warning("the cluster could not be asked whether this query can write to it: %s", error)
        return
    _checked.add(asked)


def _check_topic(admin: Admin, topic: str) -> None:
    from raftlog.errors import UnknownTopicOrPartition

    try:
        admin.describe_topic(topic, timeout=_TIMEOUT_S)
    except UnknownTopicOrPartition:
        raise ValueError(
            f"topic {topic} does not exist, and writing does not create it; create it first, for example with: "
            f"raftlog topic create {topic} --partitions 3"
        ) from None


def _check_timeout(admin: Admin, options: SinkOptions) -> None:
    from raftlog._client.stage_options import STAGE_TIMEOUT, StageOptions

    timeout_ms = StageOptions.make(dict(options.producer), {}).timeout_ms
    for broker in admin.describe_cluster(timeout=_TIMEOUT_S).brokers:
        if broker.fenced:
            continue
        found = admin.describe_configs(broker=broker.broker_id, timeout=_TIMEOUT_S).get(_MOST)
        if found is not None and timeout_ms > int(found.value):
            raise ValueError(
                f"{STAGE_TIMEOUT}={timeout_ms} is above {_MOST}={found.value} of broker {broker.broker_id}; set the "
                f"option {STAGE_TIMEOUT} to at most {found.value}, or raise {_MOST} on all brokers"
            )
