"""How long a server process may take to become ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raftlog.testing import ServerFailed, server_process
from raftlog.testing.server_process import ServerProcess
from tests.support.patience import until

Launch = Callable[[str, int], ServerProcess]
IS_READY = "echo '{}' >$READY"


def recovers(*recovered: int) -> str:
    """Return commands that log how many logs are recovered."""
    return "; ".join(f"echo 'INFO recovering logs [recovered={number} of=8]'" for number in recovered)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Start a server whose program is a script of the shell, `$READY` its ready file; return after so many lines."""
    launched: list[ServerProcess] = []

    def start(script: str, lines: int) -> ServerProcess:
        def command(*arguments: str) -> list[str]:
            ready = arguments[arguments.index("--ready-file") + 1]
            return ["/bin/sh", "-c", f"READY='{ready}'; {script}; exec sleep 60"]

        monkeypatch.setenv("RAFTLOG_SERVER_START", "exec")
        monkeypatch.setattr(server_process, "dependent_server_command", command)
        server = ServerProcess(1, tmp_path, {}, serves_clients=False)
        server.launch()
        launched.append(server)
        until(lambda: len(server.log_file.read_text().splitlines()) >= lines, f"{lines} lines", within_s=60)
        return server

    yield start
    for server in launched:
        if server.is_running:
            server.kill()


def test_a_server_that_recovers_its_logs_is_waited_for(launch: Launch) -> None:
    recovering = launch(f"{recovers(1)}; sleep 0.5; {IS_READY}", 1)
    recovering.wait_ready(time.monotonic())
    assert recovering.is_running


def test_a_long_recovery_is_waited_for_while_it_makes_progress(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "_SAME_PROGRESS_MAX", 3)
    slow = launch(f"{recovers(1, 1, 2, 2, 3)}; sleep 0.5; {IS_READY}", 5)
    slow.wait_ready(time.monotonic())
    assert slow.is_running


def test_a_recovery_without_progress_is_ended(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "_SAME_PROGRESS_MAX", 3)
    hanging = launch(f"{recovers(1, 2, 2, 2)}; sleep 20; {IS_READY}", 4)
    with pytest.raises(ServerFailed, match="is not ready after"):
        hanging.wait_ready(time.monotonic())
    assert not hanging.is_running


@pytest.mark.parametrize("script", ["echo starting", "echo recovering logs"], ids=["silent", "no longer recovering"])
def test_a_server_that_does_nothing_is_killed(script: str, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "_AFTER_RECOVERING_S", 0.1)
    hanging = launch(script, 1)
    with pytest.raises(ServerFailed, match="is not ready after"):
        hanging.wait_ready(time.monotonic())
    assert not hanging.is_running
