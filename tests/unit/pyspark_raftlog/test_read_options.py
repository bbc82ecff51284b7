"""The source's options: Kafka's names, and messages that say what to do."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark_raftlog.bounds import EARLIEST, LATEST, OFFSETS, TIME, TIMES
from pyspark_raftlog.read_options import SourceOptions

from raftlog.errors import InvalidConfig

LEAST = {"bootstrap.servers": "a:1", "subscribe": "t"}


def parse(streaming: bool | None = True, **options: Any) -> SourceOptions:
    given = {**LEAST, **{name.replace("__", "."): value for name, value in options.items()}}
    return SourceOptions.parse(
        {name: str(value) for name, value in given.items() if value is not None}, streaming=streaming
    )


def test_a_query_that_says_little_reads_as_kafkas_does() -> None:
    stream, batch = parse(True), parse(False)
    assert (stream.bootstrap, stream.topics, stream.pattern, stream.assigned) == ("a:1", ("t",), None, None)
    assert (stream.start.kind, batch.start.kind, batch.end.kind) == (LATEST, EARLIEST, LATEST)
    assert (stream.fail_on_data_loss, stream.include_headers) == (True, False)
    assert (stream.max_offsets, stream.min_offsets, stream.min_partitions, stream.max_records) == (None,) * 4
    assert (stream.max_delay_ms, stream.read_timeout_s) == (900_000, 120)
    assert stream.consumer == (("auto.offset.reset", "none"),)


def test_spark_does_not_tell_names_apart_by_case_and_kafkas_prefix_is_taken() -> None:
    options = SourceOptions.parse(
        {
            "kafka.bootstrap.servers": "a:1,b:2",
            "subscribepattern": "t.*",
            "FAILONDATALOSS": "False",
            "minpartitions": "3",
            "kafka.isolation.level": "read_uncommitted",
            "client.rack": "r",
            "kafkaconsumer.polltimeoutms": "512",
            "maxtriggerdelay": "90s",
        },
        streaming=True,
    )
    assert (options.bootstrap, options.pattern, options.fail_on_data_loss) == ("a:1,b:2", "t.*", False)
    assert (options.min_partitions, options.read_timeout_s, options.max_delay_ms) == (3, 0.512, 90_000)
    assert dict(options.consumer) == {
        "isolation.level": "read_uncommitted",
        "client.rack": "r",
        "auto.offset.reset": "none",
    }


@pytest.mark.parametrize(
    ("text", "ms"), [("500", 500), ("3s", 3000), ("15m", 900_000), ("2 min", 120_000), ("1h", 3.6e6), ("1d", 8.64e7)]
)
def test_times_are_written_as_spark_does(text: str, ms: float) -> None:
    assert parse(maxTriggerDelay=text).max_delay_ms == ms


def test_bounds_are_named_timed_or_numbered() -> None:
    assert parse(startingOffsets="Earliest").start.kind == EARLIEST
    numbered = parse(startingOffsets='{"t": {"1": -2, "0": 5}}').start
    assert (numbered.kind, numbered.numbers) == (OFFSETS, ((("t", 0), 5), (("t", 1), -2)))
    timed = parse(False, endingOffsetsByTimestamp='{"t": {"0": 5}}', endingOffsets="latest").end
    assert (timed.kind, timed.numbers, timed.or_latest) == (TIMES, ((("t", 0), 5),), True)
    one = parse(startingTimestamp="77", startingOffsetsByTimestamp='{"t": {"0": 5}}').start
    assert (one.kind, one.time_ms, one.or_latest) == (TIME, 77, False)
    assert parse(startingTimestamp="77", startingOffsetsByTimestampStrategy="LATEST").start.or_latest


@pytest.mark.parametrize(
    ("streaming", "options", "words"),
    [
        (None, {"bootstrap__servers": None}, "address of the cluster is missing"),
        (None, {"subscribe": None}, "with one of the options subscribe, subscribePattern, assign; there is none"),
        (None, {"assign": '{"t": [0]}'}, "there are subscribe and assign"),
        (None, {"subscribe": " , "}, "names no topic"),
        (None, {"subscribe": None, "subscribePattern": "("}, "no regular expression"),
        (None, {"subscribe": None, "assign": "t"}, "it is no JSON"),
        (None, {"subscribe": None, "assign": '{"t": 0}'}, "expected JSON like"),
        (None, {"subscribe": None, "assign": '{"t": [-1]}'}, "-1 is no number from 0 on"),
        (None, {"subscribe": None, "assign": "{}"}, "names no partition"),
        (None, {"maxOffsetPerTrigger": "5"}, "did you mean maxOffsetsPerTrigger?"),
        (None, {"fetch__max__byte": "5"}, "did you mean fetch.max.bytes?"),
        (None, {"zzz": "5"}, "the source knows "),
        (None, {"topic": "t"}, "a source has subscribe"),
        (None, {"path": "t"}, "subscribe names its topics"),
        (None, {"groupIdPrefix": "g"}, "without a consumer group"),
        (None, {"kafka__group__id": "g"}, "without a consumer group"),
        (None, {"kafka__auto__offset__reset": "latest"}, "startingOffsets says where"),
        (None, {"fetchOffset__numRetries": "3"}, "default.api.timeout.ms"),
        (None, {"minPartitions": "0"}, "a whole number above 0"),
        (None, {"minPartitions": "many"}, "a whole number above 0"),
        (None, {"maxTriggerDelay": "soon"}, "as 15m"),
        (None, {"failOnDataLoss": "perhaps"}, "true or false"),
        (None, {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "lower one of them"),
        (None, {"startingOffsets": "first"}, "expected earliest, latest, or JSON"),
        (None, {"startingOffsets": '{"t": {"0": -3}}'}, "-3 is no number from -2 on"),
        (None, {"startingOffsets": '{"t": {"x": 3}}'}, "'x' is no partition"),
        (None, {"startingOffsets": '{"t": 3}'}, "expected JSON like"),
        (None, {"endingOffsets": '{"t": {"0": -2}}'}, "-2 is no number from -1 on"),
        (None, {"startingTimestamp": "now"}, "Unix time in milliseconds"),
        (None, {"startingTimestamp": str(1 << 63)}, "Unix time in milliseconds, at most 9223372036854775807"),
        (None, {"endingTimestamp": "9" * 5000}, "Unix time in milliseconds, at most"),
        (None, {"maxOffsetsPerTrigger": "9" * 5000}, "a whole number above 0"),
        (None, {"kafkaConsumer__pollTimeoutMs": "0"}, "kafkaConsumer.pollTimeoutMs=0: expected more than 0"),
        (None, {"startingOffsetsByTimestampStrategy": "none"}, "expected error or latest"),
        (None, {"endingOffsets": "earliest"}, "nothing would be read"),
        (True, {"endingOffsets": "latest"}, "a streaming query has no end"),
        (True, {"endingTimestamp": "5"}, "a streaming query has no end"),
        (False, {"startingOffsets": "latest"}, "would find nothing"),
        (False, {"maxOffsetsPerTrigger": "5"}, "has no triggers"),
        (None, {"kafka__subscribe": "u"}, "given twice"),
    ],
)
def test_what_cannot_be_is_refused_in_words(streaming: bool | None, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(streaming, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kafka__fetch__max__bytes": "many"}, "fetch.max.bytes"),
        ({"bootstrap__servers": ""}, "bootstrap is empty; name at least one broker as host:port"),
        ({"bootstrap__servers": "nohost"}, "'nohost' is not host:port"),
        ({"isolation__level": "some"}, "isolation.level"),
        ({"kafka__security__protocol": "SASL_PLAINTEXT"}, "security.protocol"),
        ({"kafka__security__protocol": "SASL_SSL"}, "sasl_ssl without sasl.username"),
        ({"kafka__sasl__mechanism": "PLAIN"}, "sasl.mechanism"),
    ],
)
def test_settings_of_the_consumer_are_checked_by_the_consumer(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse(**options)
    assert words in str(caught.value)
