"""The source's options: topics, start and end, the amount to read at a time, and settings of the consumer.

Names and meanings are those of Kafka's source. Spark ignores the case of names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pyspark_raftlog.values import (
    MAX_INT64,
    as_bool,
    as_count,
    as_duration_ms,
    as_partition_numbers,
    as_partitions,
    whole_number,
)
from pyspark_raftlog.vocabulary import BOOTSTRAP, IGNORED_BY_SOURCE, REFUSED_BY_SOURCE, Vocabulary

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
OFFSETS: Final = "offsets"
TIMES: Final = "times"
TIME: Final = "time"

_LATEST_OFFSET: Final = -1
_EARLIEST_OFFSET: Final = -2


@dataclass(frozen=True)
class Bound:
    """The start or the end of what a query reads. `option`: the option that sets it, for messages.

    `kind`: EARLIEST, LATEST; OFFSETS: `numbers` has an offset for each partition (-1 latest, -2 earliest); TIMES:
    `numbers` has a time (ms) for each partition; TIME: `time_ms` is for all partitions. If a partition has no record at
    or after the time, the bound is its end with `or_latest`, and an error otherwise.
    """

    option: str
    kind: str
    numbers: tuple[tuple[tuple[str, int], int], ...] = ()
    time_ms: int = 0
    or_latest: bool = True


def starting(own: Mapping[str, str], default: str) -> Bound:
    """Return the start of the query: one time, or else times, offsets, or the default.

    Raises:
        ValueError: an invalid value.
    """
    strategy = own.get("startingOffsetsByTimestampStrategy", "error").strip().lower()
    if strategy not in ("error", LATEST):
        raise ValueError(f"option startingOffsetsByTimestampStrategy={strategy}: expected error or latest")
    return _bound(own, "starting", default, or_latest=strategy == LATEST)


def ending(own: Mapping[str, str]) -> Bound:
    """Return the end of a batch query, like `starting`; by default the end of each partition.

    Raises:
        ValueError: an invalid value.
    """
    return _bound(own, "ending", LATEST, or_latest=True)


def _bound(own: Mapping[str, str], side: str, default: str, *, or_latest: bool) -> Bound:
    name = f"{side}Timestamp"
    if name in own:
        time_ms = whole_number(own[name])
        if time_ms is None:
            raise ValueError(f"option {name}={own[name]}: expected Unix time in milliseconds, at most {MAX_INT64}")
        return Bound(name, TIME, time_ms=time_ms, or_latest=or_latest)
    name = f"{side}OffsetsByTimestamp"
    if name in own:
        times = as_partition_numbers(name, own[name], 0)
        return Bound(name, TIMES, tuple(sorted(times.items())), or_latest=or_latest)
    name = f"{side}Offsets"
    text = own.get(name, default).strip()
    if text.lower() in (EARLIEST, LATEST):
        return Bound(name, text.lower())
    if not text.startswith("{"):
        raise ValueError(f'option {name}={text}: expected earliest, latest, or JSON like {{"topicA": {{"0": 23}}}}')
    least = _EARLIEST_OFFSET if side == "starting" else _LATEST_OFFSET
    return Bound(name, OFFSETS, tuple(sorted(as_partition_numbers(name, text, least).items())))


_TOPICS: Final = ("subscribe", "subscribePattern", "assign")
_ENDS: Final = ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp")
_OWN: Final = {
    name.lower(): name
    for name in (
        BOOTSTRAP,
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
"""The documented name of each option, by the lower-case name that Spark passes."""
_BATCH_ONLY: Final = "a streaming query has no end; leave it out, or read the range with spark.read"
_STREAM_ONLY: Final = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_DEFAULT_DELAY_MS: Final = 15 * 60_000.0
_DEFAULT_PATIENCE_MS: Final = 120_000.0


@dataclass(frozen=True)
class SourceOptions:
    """Checked options.

    Exactly one of `topics`, `pattern` and `assigned` is set. `consumer` has the consumer's settings under its own
    names; the repr omits it because it may have a password. `read_timeout_s`: how long a task waits for records that
    should exist.
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
        """Return the options of a query; with `streaming` None, rules for only one kind of query are not checked.

        Raises:
            ValueError: an option is unknown, missing or invalid, or options contradict each other.
            InvalidConfig: a consumer setting with a bad value.
        """
        # Not at the top: Spark imports this module in processes that fork, where gRPC must not be loaded.
        from raftlog._client.options import CONSUMER_KEYS, ConsumerOptions

        consumers = [key.name for key in CONSUMER_KEYS]
        given = Vocabulary("source", _OWN, consumers, IGNORED_BY_SOURCE, REFUSED_BY_SOURCE).collect(options)
        own = {name: given.pop(key) for key, name in _OWN.items() if key in given}
        _check_kind(own, streaming)
        topics, pattern, assigned = _what(own)
        consumer = {**given, "auto.offset.reset": "none"}
        ConsumerOptions.make(consumer, {})
        delay_ms = as_duration_ms("maxTriggerDelay", own.get("maxTriggerDelay"))
        patience_ms = as_duration_ms("kafkaConsumer.pollTimeoutMs", own.get("kafkaConsumer.pollTimeoutMs"))
        if patience_ms == 0:
            raise ValueError(
                "kafkaConsumer.pollTimeoutMs=0: expected more than 0: tasks have to wait for records; leave it out "
                f"for {_DEFAULT_PATIENCE_MS:.0f} ms"
            )
        max_offsets = as_count("maxOffsetsPerTrigger", own.get("maxOffsetsPerTrigger"))
        min_offsets = as_count("minOffsetsPerTrigger", own.get("minOffsetsPerTrigger"))
        if max_offsets is not None and min_offsets is not None and min_offsets > max_offsets:
            raise ValueError(
                f"minOffsetsPerTrigger={min_offsets} is more than maxOffsetsPerTrigger={max_offsets}; lower one of them"
            )
        return SourceOptions(
            own[BOOTSTRAP],
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
    """Refuse options that this kind of query does not support.

    Raises:
        ValueError: the message names the option.
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
            raise ValueError("startingOffsets=latest: a batch query would read nothing; use earliest, or offsets")
    if own.get("endingOffsets", "").strip().lower() == EARLIEST:
        raise ValueError("endingOffsets=earliest: nothing would be read; use latest, or offsets")


def _what(
    own: Mapping[str, str],
) -> tuple[tuple[str, ...] | None, str | None, tuple[tuple[str, int], ...] | None]:
    """Return the topics, their pattern, or the partitions to read.

    Raises:
        ValueError: none or several of them are given, or a value is invalid.
    """
    named = [name for name in _TOPICS if name in own]
    if len(named) != 1:
        found = f"not {' and '.join(named)}" if named else "none is given"
        raise ValueError(f"give exactly one of the options {', '.join(_TOPICS)}; {found}")
    [name] = named
    value = own[name].strip()
    if name == "assign":
        parts = as_partitions(name, value)
        return None, None, tuple(parts)
    if name == "subscribePattern":
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"subscribePattern {value!r} is not a regular expression of Python: {error}") from None
        return None, value, None
    topics = tuple(dict.fromkeys(topic.strip() for topic in value.split(",") if topic.strip()))
    if not topics:
        raise ValueError("subscribe names no topic; give one, or several with commas between them")
    return topics, None, None
