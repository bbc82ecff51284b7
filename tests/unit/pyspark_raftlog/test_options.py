"""Options of the sink: names, defaults, refusals."""

from __future__ import annotations

import pytest
from pyspark_raftlog.options import SinkOptions

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
    assert options.exactly_once, "the default"
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
        ({**ADDRESS, "zzz": "5"}, ["zzz", "the sink knows acks, "]),
        ({**ADDRESS, "kafka.bootstrap.servers": "b:2"}, ["twice", "127.0.0.1:9092", "b:2"]),
        ({**ADDRESS, **PLAIN, "acks": "0"}, ["acks=0", "acks=all"]),
        ({**ADDRESS, "delivery": "perhaps"}, ["delivery=perhaps", "exactly-once", "at-least-once"]),
        (
            {**ADDRESS, "acks": "1"},
            ["acks=1 is not exactly once: what one broker alone holds", "leave it out, or use delivery=at-least-once"],
        ),
        (
            {**ADDRESS, "enable.idempotence": "false"},
            ["enable.idempotence=false is not exactly once: what is sent again", "or use delivery=at-least-once"],
        ),
        ({**ADDRESS, "retries": "0"}, ["retries=0"]),
        ({**ADDRESS, "kafka.transactional.id": "x"}, ["kafka.transactional.id", "txn.app.id"]),
        ({**ADDRESS, "transaction.timeout.ms": "soon"}, ["transaction.timeout.ms='soon'", "milliseconds"]),
        ({**ADDRESS, **PLAIN, "transaction.timeout.ms": "5"}, ["transaction.timeout.ms is for delivery=exactly-once"]),
        ({**ADDRESS, **PLAIN, "txn.app.id": "x"}, ["txn.app.id is for delivery=exactly-once"]),
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
        ({"txn.app.id": "x", "txn.version": "-1"}, ["txn.version=-1", "from 0 on"]),
        ({"txn.app.id": "x", "txn.version": str(1 << 63)}, ["from 0 on"]),
        ({"txn.app.id": "x", "txn.version": "9" * 5000}, ["from 0 on"]),
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
