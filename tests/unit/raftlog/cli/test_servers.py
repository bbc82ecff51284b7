"""`raftlog up` where the packages of the console are not installed."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from raftlog.cli import servers
from tests.support.command_line import Run

NEEDED = (
    "the console needs the package starlette, which is not installed; install it with pip install 'raftlog[console]'"
)


class Ended(nullcontext[None]):
    """A cluster of one server, which has stopped."""

    bootstrap, kafka_bootstrap, directory = "127.0.0.1:9092", "", Path("/data")
    node_ids = controller_ids = broker_ids = (1,)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def is_running(self, node_id: int) -> bool:
        return False

    def ending(self, node_id: int) -> str:
        return "with exit code 0"

    def config_file(self, node_id: int) -> Path:
        return self.directory / "server.toml"


@pytest.fixture(autouse=True)
def without_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "Cluster", Ended)
    monkeypatch.setattr(servers, "missing_from", lambda extra: "starlette" if extra == "console" else None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers


def test_it_says_why_there_is_no_console(run: Run) -> None:
    ran = run("up")
    assert ran.code == 0, ran.err
    assert NEEDED in ran.out
    assert "console" not in run("up", "--no-console").out


def test_a_console_that_is_asked_for_is_an_error(run: Run) -> None:
    ran = run("up", "--console")
    assert (ran.code, ran.out) == (1, "")
    assert NEEDED in ran.err
