"""Options of the sink and the source: Kafka's names, defaults, logins, and refusals."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark_raftlog import vocabulary
from pyspark_raftlog.options import SinkOptions
from pyspark_raftlog.read_options import EARLIEST, LATEST, OFFSETS, TIME, TIMES, SourceOptions

from raftlog.errors import InvalidConfig

ADDRESS = {"bootstrap.servers": "127.0.0.1:9092"}
PLAIN = {"delivery": "at-least-once"}


def test_kafkas_option_names_are_taken() -> None:
    options = SinkOptions.parse(
        {
            "kafka.bootstrap.servers": "a:1",
            "topic": "t",
            "kafka.acks": "1",
            "linger.ms": "7",
            "delivery": "At-Least-Once",
        },
        streaming=True,
    )
    assert not options.exactly_once
    assert options.bootstrap == "a:1"
    assert options.topic == "t"
    assert dict(options.producer) == {"acks": "1", "linger.ms": "7", "batch.size": "1048576"}


def test_names_do_not_depend_on_case_and_sparks_own_options_are_passed_over() -> None:
    options = SinkOptions.parse(
        {"Bootstrap.Servers": "a:1", "checkpointLocation": "/tmp/c", "queryName": "q", "Compression.Type": "zstd"},
        streaming=True,
    )
    assert options.exactly_once, "exactly_once must be the default"
    assert options.topic is None
    assert dict(options.producer)["compression.type"] == "zstd"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topic": "t"}, ["bootstrap.servers", "host:port"]),
        ({"bootstrap.servers": "nohost"}, ["'nohost' is not host:port"]),
        ({"bootstrap.servers": "a:1,b:99999"}, ["'b:99999' is not host:port"]),
        ({"bootstrap.servers": " , "}, ["bootstrap is empty"]),
        ({**ADDRESS, "path": "/x"}, ["the raftlog sink has no option path", "option topic", "leave the path out of"]),
        ({**ADDRESS, "tpoic": "t"}, ["tpoic", "did you mean topic?"]),
        ({**ADDRESS, "kafka.linger": "5"}, ["kafka.linger", "did you mean linger.ms?"]),
        ({**ADDRESS, "kafka.security.protocol": "SASL_PLAINTEXT"}, ["plaintext, ssl, sasl_ssl"]),
        ({**ADDRESS, "kafka.security.protocol": "SASL_SSL"}, ["sasl_ssl without sasl.username"]),
        ({**ADDRESS, "kafka.sasl.jaas.config": "x"}, ["not in this version: sasl.jaas.config", "sasl.username"]),
        (
            {**ADDRESS, "ssl.truststore.location": "x"},
            ["not in this version: ssl.trust", "ssl.ca.location"],
        ),
        ({**ADDRESS, "zzz": "5"}, ["zzz", "its options are acks, "]),
        ({**ADDRESS, "kafka.bootstrap.servers": "b:2"}, ["twice", "127.0.0.1:9092", "b:2"]),
        ({**ADDRESS, **PLAIN, "acks": "0"}, ["acks=0", "acks=all"]),
        ({**ADDRESS, "delivery": "perhaps"}, ["delivery=perhaps", "exactly-once", "at-least-once"]),
        (
            {**ADDRESS, "acks": "1"},
            ["acks=1 is not exactly once: a committed record that", "leave it out, or use delivery=at-least-once"],
        ),
        (
            {**ADDRESS, "enable.idempotence": "false"},
            ["enable.idempotence=false is not exactly once: a retried batch", "or use delivery=at-least-once"],
        ),
        ({**ADDRESS, "retries": "0"}, ["retries=0"]),
        ({**ADDRESS, "kafka.transactional.id": "x"}, ["kafka.transactional.id", "txn.app.id"]),
        ({**ADDRESS, "kafka.partitioner.class": "a.B"}, ["no option kafka.partitioner.class", "a column partition"]),
        (
            {**ADDRESS, "kafka.value.serializer": "a.AvroSerializer"},
            ["kafka.value.serializer=a.AvroSerializer", "cast"],
        ),
        ({**ADDRESS, "transaction.timeout.ms": "soon"}, ["transaction.timeout.ms='soon'", "milliseconds"]),
        ({**ADDRESS, **PLAIN, "transaction.timeout.ms": "5"}, ["transaction.timeout.ms needs delivery=exactly-once"]),
        ({**ADDRESS, **PLAIN, "txn.app.id": "x"}, ["txn.app.id needs delivery=exactly-once"]),
        ({**ADDRESS, "txn.app.id": ""}, ["txn.app.id has 0 characters"]),
        ({**ADDRESS, "txn.app.id": "x", "txn.version": "1"}, ["txn.version is for batch writes"]),
        ({**ADDRESS, "txnAppId": "x"}, ["txnAppId", "did you mean txn.app.id?"]),
        ({**ADDRESS, "asyncProgressTrackingEnabled": "true"}, ["async progress tracking", "same batch number"]),
        ({**ADDRESS, "topic": ""}, ["topic is empty"]),
        ({**ADDRESS, "acks": "some"}, ["acks", "some", "all"]),
    ],
)
def test_what_cannot_be_is_refused_in_words(options: dict[str, str], words: list[str]) -> None:
    with pytest.raises((ValueError, InvalidConfig)) as caught:
        SinkOptions.parse(options, streaming=True)
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_same_value_twice_and_a_switched_off_async_progress_are_no_contradiction() -> None:
    options = SinkOptions.parse(
        {**ADDRESS, "kafka.bootstrap.servers": ADDRESS["bootstrap.servers"], "asyncProgressTrackingEnabled": "false"},
        streaming=True,
    )
    assert options.bootstrap == "127.0.0.1:9092"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"txn.app.id": "x"}, ["txn.app.id needs txn.version"]),
        ({"txn.version": "1"}, ["txn.version needs txn.app.id"]),
        ({"txn.app.id": "x", "txn.version": "-1"}, ["txn.version=-1", "at least 0"]),
        ({"txn.app.id": "x", "txn.version": str(1 << 63)}, ["at least 0"]),
        ({"txn.app.id": "x", "txn.version": "9" * 5000}, ["at least 0"]),
        ({"txn.app.id": "x" * 256, "txn.version": "1"}, ["256 characters"]),
    ],
)
def test_a_batch_write_is_named_and_numbered_or_neither(options: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        SinkOptions.parse({**ADDRESS, **options}, streaming=False)
    assert [word for word in words if word not in str(caught.value)] == []
    named = SinkOptions.parse({**ADDRESS, "txn.app.id": "x", "txn.version": "7"}, streaming=False)
    assert (named.app_id, named.version) == ("x", 7)
    assert SinkOptions.parse(ADDRESS, streaming=False).app_id is None


KAFKAS_SOURCE = {
    "kafka.bootstrap.servers": "a:1",
    "subscribe": "t",
    "groupIdPrefix": "g",
    "kafka.group.id": "g",
    "kafka.enable.auto.commit": "false",
    "kafka.max.poll.records": "500",
    "kafka.session.timeout.ms": "45000",
    "kafka.heartbeat.interval.ms": "3000",
    "kafka.fetch.min.bytes": "1",
    "fetchOffset.numRetries": "3",
    "value.deserializer": "org.apache.kafka.common.serialization.StringDeserializer",
    "kafka.client.dns.lookup": "use_all_dns_ips",
}
KAFKAS_SINK = {
    "kafka.bootstrap.servers": "a:1",
    "topic": "t",
    "includeHeaders": "true",
    "kafka.key.serializer": "org.apache.kafka.common.serialization.ByteArraySerializer",
    "kafka.compression.zstd.level": "3",
    "kafka.send.buffer.bytes": "131072",
    "kafka.partitioner.adaptive.partitioning.enable": "false",
}


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    monkeypatch.setattr(vocabulary, "_warned", set())
    with caplog.at_level(logging.WARNING, vocabulary.__name__):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_settings_of_a_kafka_source_that_change_no_row_are_ignored_with_one_warning_each(
    warnings: Callable[[], list[str]],
) -> None:
    plain = SourceOptions.parse(LEAST, streaming=True)
    for _ in range(2):
        assert SourceOptions.parse(KAFKAS_SOURCE, streaming=True) == plain
    assert [line.split()[6] for line in warnings()] == [f"{name}:" for name in list(KAFKAS_SOURCE)[2:]]
    assert warnings()[0] == (
        "the raftlog source ignores the option groupIdPrefix: the source has no consumer group: the query's checkpoint "
        "has its offsets"
    )


def test_settings_of_a_kafka_sink_that_change_no_row_are_ignored_with_one_warning_each(
    warnings: Callable[[], list[str]],
) -> None:
    plain = SinkOptions.parse({"bootstrap.servers": "a:1", "topic": "t"}, streaming=True)
    for _ in range(2):
        assert SinkOptions.parse(KAFKAS_SINK, streaming=True) == plain
    assert [line.split()[6] for line in warnings()] == [f"{name}:" for name in list(KAFKAS_SINK)[2:]]


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
        (
            None,
            {"subscribe": None},
            "give exactly one of the options subscribe, subscribePattern, assign; none is given",
        ),
        (None, {"assign": '{"t": [0]}'}, "not subscribe and assign"),
        (None, {"subscribe": " , "}, "names no topic"),
        (None, {"subscribe": None, "subscribePattern": "("}, "not a regular expression"),
        (None, {"subscribe": None, "assign": "t"}, "it is not JSON"),
        (None, {"subscribe": None, "assign": '{"t": 0}'}, "expected JSON like"),
        (None, {"subscribe": None, "assign": '{"t": [-1]}'}, "-1 is not a number of at least 0"),
        (None, {"subscribe": None, "assign": "{}"}, "names no partition"),
        (None, {"maxOffsetPerTrigger": "5"}, "did you mean maxOffsetsPerTrigger?"),
        (None, {"fetch__max__byte": "5"}, "did you mean fetch.max.bytes?"),
        (None, {"zzz": "5"}, "its options are "),
        (None, {"topic": "t"}, "a source has subscribe"),
        (None, {"path": "t"}, "subscribe names its topics"),
        (None, {"kafka__auto__offset__reset": "latest"}, "startingOffsets sets where"),
        (None, {"kafka__interceptor__classes": "a.B"}, "names code for the JVM"),
        (None, {"kafka__value__deserializer": "a.AvroDeserializer"}, "keys and values are bytes; cast"),
        (None, {"minPartitions": "0"}, "a whole number above 0"),
        (None, {"minPartitions": "many"}, "a whole number above 0"),
        (None, {"maxTriggerDelay": "soon"}, "as 15m"),
        (None, {"failOnDataLoss": "perhaps"}, "true or false"),
        (None, {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "lower one of them"),
        (None, {"startingOffsets": "first"}, "expected earliest, latest, or JSON"),
        (None, {"startingOffsets": '{"t": {"0": -3}}'}, "-3 is not a number of at least -2"),
        (None, {"startingOffsets": '{"t": {"x": 3}}'}, "'x' is not a partition"),
        (None, {"startingOffsets": '{"t": 3}'}, "expected JSON like"),
        (None, {"endingOffsets": '{"t": {"0": -2}}'}, "-2 is not a number of at least -1"),
        (None, {"startingTimestamp": "now"}, "Unix time in milliseconds"),
        (None, {"startingTimestamp": str(1 << 63)}, "Unix time in milliseconds, at most 9223372036854775807"),
        (None, {"endingTimestamp": "9" * 5000}, "Unix time in milliseconds, at most"),
        (None, {"maxOffsetsPerTrigger": "9" * 5000}, "a whole number above 0"),
        (None, {"kafkaConsumer__pollTimeoutMs": "0"}, "kafkaConsumer.pollTimeoutMs=0: expected more than 0"),
        (None, {"startingOffsetsByTimestampStrategy": "none"}, "expected error or latest"),
        (None, {"endingOffsets": "earliest"}, "nothing would be read"),
        (True, {"endingOffsets": "latest"}, "a streaming query has no end"),
        (True, {"endingTimestamp": "5"}, "a streaming query has no end"),
        (False, {"startingOffsets": "latest"}, "would read nothing"),
        (False, {"maxOffsetsPerTrigger": "5"}, "has no triggers"),
        (None, {"kafka__subscribe": "u"}, "given twice"),
    ],
)
def test_what_no_source_can_read_is_refused_in_words(
    streaming: bool | None, options: dict[str, Any], words: str
) -> None:
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


PASSWORD = "Rosebud, or not"
GIVEN = {
    "kafka.bootstrap.servers": "127.0.0.1:9092",
    "kafka.security.protocol": "SASL_SSL",
    "kafka.sasl.mechanism": "SCRAM-SHA-256",
    "kafka.sasl.username": "ada",
    "kafka.sasl.password": PASSWORD,
}
LOGIN = {
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "SCRAM-SHA-256",
    "sasl.username": "ada",
    "sasl.password": PASSWORD,
}


def _source(given: dict[str, str]) -> SourceOptions:
    return SourceOptions.parse({**given, "subscribe": "t"}, streaming=False)


def _sink(given: dict[str, str]) -> SinkOptions:
    return SinkOptions.parse({**given, "topic": "t"}, streaming=False)


@pytest.mark.parametrize("parse", [_source, _sink])
def test_a_login_reaches_the_clients_in_the_tasks_and_no_text(parse: Any) -> None:
    options = parse(GIVEN)
    assert PASSWORD not in repr(options)
    assert PASSWORD not in str(options)
    copy = pickle.loads(pickle.dumps(options))  # noqa: S301 # made here; so it travels to the tasks
    assert copy == options
    settings = dict(copy.consumer if parse is _source else copy.producer)
    assert LOGIN.items() <= settings.items()


@pytest.mark.parametrize("parse", [_source, _sink])
def test_what_is_wrong_with_a_login_is_said_without_the_password(parse: Any) -> None:
    for more in ({"sasl.password": "another one"}, {"kafka.sasl.username": ""}, {"kafka.sasl.password.location": "f"}):
        with pytest.raises((ValueError, Exception), match=r"sasl\.(password|username)") as caught:
            parse({**GIVEN, **more})
        assert PASSWORD not in str(caught.value)
        assert "another one" not in str(caught.value)
