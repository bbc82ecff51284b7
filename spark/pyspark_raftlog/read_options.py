"""The source's options: what to read, from where to where, how much at a time; consumer settings pass through.

Names and meanings are those of Kafka's source. Spark does not tell names of options apart by case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from pyspark_raftlog.bounds import EARLIEST, LATEST, Bound, ending, starting
from pyspark_raftlog.values import as_bool, as_count, as_duration_ms, as_partitions, did_you_mean, given_twice

_BOOTSTRAP: Final = "bootstrap.servers"
_PREFIX: Final = "kafka."
_TOPICS: Final = ("subscribe", "subscribePattern", "assign")
_ENDS: Final = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")
_OWN: Final = {
    name.lower(): name
    for name in (
        _BOOTSTRAP,
        *_TOPICS,
        "startingOffsets",
        "startingOffsetsByTimestamp",
        "startingOffsetsByTimestampStrategy",
        "startingTimestamp",
        *_ENDS,
        "failOnDataLoss",
        "includeHeaders",
        "maxOffsetsPerTrigger",
        "maxRecordsPerPartition",
        "maxTriggerDelay",
        "minOffsetsPerTrigger",
        "minPartitions",
        "kafkaConsumer.pollTimeoutMs",
    )
}
"""As Spark hands them over, and as they are written."""
_NO_GROUP: Final = "the source reads without a consumer group, the query's checkpoint has its offsets; leave it out"
_REFUSED: Final = {
    "groupidprefix": _NO_GROUP,
    "group.id": _NO_GROUP,
    "group.instance.id": _NO_GROUP,
    "group.remote.assignor": _NO_GROUP,
    "enable.auto.commit": _NO_GROUP,
    "auto.commit.interval.ms": _NO_GROUP,
    "max.poll.interval.ms": _NO_GROUP,
    "auto.offset.reset": "startingOffsets says where a query begins, and failOnDataLoss=false lets it go on when "
    "offsets are gone",
    "max.poll.records": "rows leave the source as whole Arrow batches; maxOffsetsPerTrigger limits a trigger",
    "consumer.timeout.ms": "kafkaConsumer.pollTimeoutMs says how long a task waits for records",
    "fetchoffset.numretries": "offsets are asked for until default.api.timeout.ms has passed",
    "fetchoffset.retryintervalms": "retry.backoff.ms is the pause between two tries",
    "topic": "that is the sink's; a source has subscribe",
    "path": "a source has no path; subscribe names its topics",
}
_BATCH_ONLY: Final = "a streaming query has no end; leave it out, or read the range with spark.read"
_STREAM_ONLY: Final = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_DEFAULT_DELAY_MS: Final = 15 * 60_000.0
_DEFAULT_PATIENCE_MS: Final = 120_000.0


@dataclass(frozen=True)
class SourceOptions:
    """Checked options; times in the unit that their names say.

    Exactly one of `topics`, `pattern` and `assigned` is there. `consumer` holds the consumer's settings, under its own
    names; a password may be among them, so they are not shown. `read_timeout_s`: how long a task waits for records that
    are to be there.
    """

    bootstrap: str
    topics: tuple[str, ...] | None
    pattern: str | None
    assigned: tuple[tuple[str, int], ...] | None
    start: Bound
    end: Bound
    fail_on_data_loss: bool
    include_headers: bool
    max_offsets: int | None
    min_offsets: int | None
    max_delay_ms: float
    min_partitions: int | None
    max_records: int | None
    read_timeout_s: float
    consumer: tuple[tuple[str, str], ...] = field(repr=False)

    @staticmethod
    def parse(options: Mapping[str, str], *, streaming: bool | None = None) -> SourceOptions:
        """Return the options of a query; with `streaming` None what only one kind of query can have is not checked.

        Raises:
            ValueError: unknown, missing, contradictory, or nothing that the value can mean.
            InvalidConfig: a consumer setting with a bad value.
        """
        # Not at the top: Spark imports this module where gRPC must not be, in processes that fork.
        from raftlog._client.options import CONSUMER_KEYS, ConsumerOptions, refuse_security
        from raftlog._core.bootstrap import parse_bootstrap

        known = _OWN.keys() | {key.name for key in CONSUMER_KEYS} - _REFUSED.keys()
        given: dict[str, str] = {}
        for name, value in options.items():
            key = name.lower()
            key = key if key in _OWN else key.removeprefix(_PREFIX)
            refuse_security(key)
            if key in _REFUSED:
                raise ValueError(f"the raftlog source has no option {name}: {_REFUSED[key]}")
            if key not in known:
                raise ValueError(_unknown(name, known))
            if given.setdefault(key, value) != value:
                raise ValueError(given_twice(key, given[key], value))
        own = {name: given.pop(key) for key, name in _OWN.items() if key in given}
        if _BOOTSTRAP not in own:
            raise ValueError(f'the address of the cluster is missing; add option("{_BOOTSTRAP}", "host:port")')
        parse_bootstrap(own[_BOOTSTRAP])
        _check_kind(own, streaming)
        topics, pattern, assigned = _what(own)
        consumer = {**given, "auto.offset.reset": "none"}
        ConsumerOptions.make(consumer, {})
        delay_ms = as_duration_ms("maxTriggerDelay", own.get("maxTriggerDelay"))
        patience_ms = as_duration_ms("kafkaConsumer.pollTimeoutMs", own.get("kafkaConsumer.pollTimeoutMs"))
        if patience_ms == 0:
            raise ValueError(
                "kafkaConsumer.pollTimeoutMs=0: expected more than 0, since no task would wait for its records; leave "
                f"it out for {_DEFAULT_PATIENCE_MS:.0f} ms"
            )
        max_offsets = as_count("maxOffsetsPerTrigger", own.get("maxOffsetsPerTrigger"))
        min_offsets = as_count("minOffsetsPerTrigger", own.get("minOffsetsPerTrigger"))
        if max_offsets is not None and min_offsets is not None and min_offsets > max_offsets:
            raise ValueError(
                f"minOffsetsPerTrigger={min_offsets} is more than maxOffsetsPerTrigger={max_offsets}; lower one of them"
            )
        return SourceOptions(
            own[_BOOTSTRAP],
            topics,
            pattern,
            assigned,
            starting(own, LATEST if streaming else EARLIEST),
            ending(own),
            as_bool("failOnDataLoss", own.get("failOnDataLoss"), True),
            as_bool("includeHeaders", own.get("includeHeaders"), False),
            max_offsets,
            min_offsets,
            _DEFAULT_DELAY_MS if delay_ms is None else delay_ms,
            as_count("minPartitions", own.get("minPartitions")),
            as_count("maxRecordsPerPartition", own.get("maxRecordsPerPartition")),
            (_DEFAULT_PATIENCE_MS if patience_ms is None else patience_ms) / 1000,
            tuple(sorted(consumer.items())),
        )


def _check_kind(own: Mapping[str, str], streaming: bool | None) -> None:
    """Refuse what a streaming query, or a batch query, cannot have.

    Raises:
        ValueError: says which.
    """
    if streaming:
        for name in _ENDS:
            if name in own:
                raise ValueError(f"option {name}: {_BATCH_ONLY}")
    elif streaming is not None:
        for name in _STREAM_ONLY:
            if name in own:
                raise ValueError(f"option {name}: a batch query has no triggers; leave it out")
        if own.get("startingOffsets", "").strip().lower() == LATEST:
            raise ValueError("startingOffsets=latest: a batch query would find nothing; use earliest, or offsets")
    if own.get("endingOffsets", "").strip().lower() == EARLIEST:
        raise ValueError("endingOffsets=earliest: nothing would be read; use latest, or offsets")


def _what(
    own: Mapping[str, str],
) -> tuple[tuple[str, ...] | None, str | None, tuple[tuple[str, int], ...] | None]:
    """Return the topics, or their pattern, or partitions that are to be read.

    Raises:
        ValueError: none of them or several, or a value that cannot be.
    """
    named = [name for name in _TOPICS if name in own]
    if len(named) != 1:
        found = f"there are {' and '.join(named)}" if named else "there is none"
        raise ValueError(f"say what to read with one of the options {', '.join(_TOPICS)}; {found}")
    [name] = named
    value = own[name].strip()
    if name == "assign":
        parts = as_partitions(name, value)
        return None, None, tuple(parts)
    if name == "subscribePattern":
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"subscribePattern {value!r} is no regular expression of Python: {error}") from None
        return None, value, None
    topics = tuple(dict.fromkeys(topic.strip() for topic in value.split(",") if topic.strip()))
    if not topics:
        raise ValueError("subscribe names no topic; give one, or several with commas between them")
    return topics, None, None


def _unknown(name: str, known: Set[str]) -> str:
    written = sorted(_OWN.get(key, key) for key in known)
    advice = did_you_mean(name.lower().removeprefix(_PREFIX), written, f"the source knows {', '.join(written)}")
    return f"the raftlog source has no option {name}; {advice}"
