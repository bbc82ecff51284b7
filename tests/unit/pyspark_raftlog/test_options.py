"""Options of the sink: names, defaults, refusals."""

from __future__ import annotations

import pytest
from pyspark_raftlog.options import SinkOptions

from raftlog.errors import InvalidConfig

ADDRESS = {"bootstrap.servers": "127.0.0.1:9092"}


def test_kafkas_option_names_are_taken() -> None:
    options = SinkOptions.parse({"kafka.bootstrap.servers": "a:1", "topic": "t", "kafka.acks": "1", "linger.ms": "7"})
    assert options.bootstrap == "a:1"
    assert options.topic == "t"
    assert dict(options.producer) == {"acks": "1", "linger.ms": "7", "batch.size": "1048576"}


def test_names_do_not_depend_on_case_and_sparks_own_options_are_passed_over() -> None:
    options = SinkOptions.parse(
        {"Bootstrap.Servers": "a:1", "checkpointLocation": "/tmp/c", "queryName": "q", "Compression.Type": "zstd"}
    )
    assert options.topic is None
    assert dict(options.producer)["compression.type"] == "zstd"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topic": "t"}, ["bootstrap.servers", "host:port"]),
        ({**ADDRESS, "tpoic": "t"}, ["tpoic", "did you mean topic?"]),
        ({**ADDRESS, "kafka.linger": "5"}, ["kafka.linger", "did you mean linger.ms?"]),
        ({**ADDRESS, "kafka.security.protocol": "SASL_SSL"}, ["not in this version: security.protocol"]),
        ({**ADDRESS, "kafka.sasl.jaas.config": "x"}, ["not in this version: sasl.jaas.config"]),
        ({**ADDRESS, "ssl.truststore.location": "x"}, ["not in this version: ssl.truststore.location"]),
        ({**ADDRESS, "zzz": "5"}, ["zzz", "the sink knows acks, "]),
        ({**ADDRESS, "kafka.bootstrap.servers": "b:2"}, ["twice", "127.0.0.1:9092", "b:2"]),
        ({**ADDRESS, "acks": "0"}, ["acks=0", "acks=all"]),
        ({**ADDRESS, "delivery": "exactly-once"}, ["exactly-once", "not there yet", "at-least-once"]),
        ({**ADDRESS, "delivery": "perhaps"}, ["delivery=perhaps", "at-least-once"]),
        ({**ADDRESS, "topic": ""}, ["topic is empty"]),
        ({**ADDRESS, "acks": "some"}, ["acks", "some", "all"]),
    ],
)
def test_what_cannot_be_is_refused_in_words(options: dict[str, str], words: list[str]) -> None:
    with pytest.raises((ValueError, InvalidConfig)) as caught:
        SinkOptions.parse(options)
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_same_value_twice_and_a_switched_off_async_progress_are_no_contradiction() -> None:
    options = SinkOptions.parse(
        {**ADDRESS, "kafka.bootstrap.servers": ADDRESS["bootstrap.servers"], "asyncProgressTrackingEnabled": "false"}
    )
    assert options.bootstrap == "127.0.0.1:9092"
