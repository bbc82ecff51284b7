"""`raftlog up` where the packages of the console are not installed, and where servers take long to start."""

from __future__ import annotations

import signal
import socket
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from raftlog.cli import servers
from tests.support.command_line import Run

NEEDED = (
    "the console needs the package starlette, which is not installed; install it with pip install '.[console]' "
    "in the checkout, or pip install 'raftlog[console] @ file:///WHEEL' of its wheel"
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


def test_a_port_of_the_console_that_is_taken_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "missing_from", lambda extra: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = run("up", "--console-port", str(port))
    assert (ran.code, ran.out) == (1, "")
    assert f"another process listens at 127.0.0.1:{port}; choose another --console-port" in ran.err


class Slow(Ended):
    """A cluster whose server recovers its logs until its log has been read three times."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self._looks = 0
        self._long_enough = threading.Event()

    def __enter__(self) -> None:
        assert self._long_enough.wait(60.0), "nothing is said"

    def is_running(self, node_id: int) -> bool:
        return not self._long_enough.is_set()

    def log_tail(self, node_id: int) -> str:
        self._looks += 1
        if self._looks == 3:
            self._long_enough.set()
        return f"node_starting\nrecovering logs [recovered={self._looks} of=9]"


def test_a_start_that_takes_long_says_what_it_waits_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "Cluster", Slow)
    monkeypatch.setattr(servers, "_TELL_EVERY_S", 0.01)
    ran = run("up", "--no-console")
    assert ran.code == 0, ran.err
    assert "server 1 is not ready yet; its log ends with: recovering logs [recovered=1 of=9]\n" in ran.err
    assert "[recovered=2 of=9]" in ran.err
    assert "node_starting" not in ran.err
