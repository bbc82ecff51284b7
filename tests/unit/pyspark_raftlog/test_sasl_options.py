"""A login among the options of a query: it gets to the clients, and into no text."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pyspark_raftlog.options import SinkOptions
from pyspark_raftlog.read_options import SourceOptions

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
