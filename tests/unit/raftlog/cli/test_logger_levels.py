"""`raftlog config ... broker-logger`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.support.command_line import Run


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The server lives in this process, and so do its loggers."""
    found = logging.getLogger("broker.server.lease")
    yield
    found.setLevel(logging.NOTSET)


def test_levels_are_set_shown_and_put_back(run: Run) -> None:
    done = run("config", "set", "broker-logger", "1", "broker.server.lease=debug")
    assert (done.code, done.out) == (0, "set for broker-logger 1: broker.server.lease\n"), done.err
    shown = run("config", "describe", "broker-logger", "1", "--output", "json").json
    assert {(row["key"], row["value"], row["source"]) for row in shown if row["key"] == "broker.server.lease"} == {
        ("broker.server.lease", "DEBUG", "dynamic_broker_logger")
    }
    assert {row["key"] for row in shown} == {"root", "broker.server.lease"}, (
        "only loggers whose level was set must be shown"
    )
    everything = run("config", "describe", "broker-logger", "1", "--all", "--output", "json").json
    assert len(everything) > 10
    assert run("config", "unset", "broker-logger", "1", "broker.server.lease").code == 0
    (root,) = run("config", "describe", "broker-logger", "1", "--output", "json").json
    assert root["key"] == "root"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("set", "broker-logger", "1", "broker.server.lease=loud"), "is not a level: use one of DEBUG, INFO, WARN"),
        (("set", "broker-logger", "1", "brokr=DEBUG"), "there is no logger 'brokr'"),
        (("set", "broker-logger", "default", "root=DEBUG"), "is not a broker's id"),
        (("unset", "broker-logger", "9", "root"), "there is no broker 9"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(run: Run, arguments: tuple[str, ...], words: str) -> None:
    done = run("config", *arguments)
    assert done.code != 0
    assert words in " ".join(done.err.replace("│", " ").split()), done.err
