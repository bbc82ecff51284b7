"""A cluster of metadata alone behind the real services, and commands run in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest

from raftlog.cli import main
from tests.support.admin_service import AdminServer
from tests.support.command_line import Ran, Run, Terminal
from tests.support.metadata import create_topic


@pytest.fixture
def server() -> Iterator[AdminServer]:
    """Four brokers; topic `a` has two partitions of three replicas, led by 1 and 2, min.insync.replicas=2."""
    with AdminServer() as server:
        command = create_topic("a", 1, 2, 3, {"min.insync.replicas": "2"})
        for replicas in ([1, 2, 3], [2, 3, 1]):
            command.create_topic.assignments.add(replicas=replicas)
        server.propose(command)
        yield server


@pytest.fixture
def run(server: AdminServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process; `stdin`: its input, `terminal`: the lines that a user types."""
    monkeypatch.setenv("RAFTLOG_BOOTSTRAP", server.bootstrap)

    def call(*arguments: str, stdin: str = "", terminal: str | None = None) -> Ran:
        monkeypatch.setattr(sys, "argv", ["raftlog", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin) if terminal is None else Terminal(terminal))
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Ran(int(ended.value.code or 0), printed.out, printed.err)

    return call
