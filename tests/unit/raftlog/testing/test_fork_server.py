"""Processes that the fork server starts: how they begin, what they inherit, how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftlog import _installed
from raftlog.testing import server_process
from raftlog.testing.dependent_process import ForkedProcess, ForkFailed, ForkServer, fixed_at_start
from raftlog.testing.server_process import ServerFailed, ServerProcess
from tests.support.patience import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server needs Linux")

PROGRAM = """
import json, os, signal, sys, time
print("imported by", os.getpid(), flush=True)

if "TIED_LATE" in os.environ:
    from raftlog.testing import dependent_process
    die_with = dependent_process.die_with
    def die_with_late(parent):
        time.sleep(0.5)
        die_with(parent)
        print("tied", flush=True)
    dependent_process.die_with = die_with_late

def run():
    what = sys.argv[1]
    if what == "tell":
        told = dict(
            arguments=sys.argv[2:], cwd=os.getcwd(), value=os.environ["VALUE"], only=sorted(os.environ) == ["VALUE"],
            descriptors=sorted(set(map(int, os.listdir("/proc/self/fd"))) & set(range(64))), group=os.getpgid(0),
            extra="extra_module" in sys.modules, imported_by=os.getppid(),
        )
        print(json.dumps(told), flush=True)
        os._exit(7)
    if what == "fail":
        raise ValueError("such a thing")
    while True:
        time.sleep(600)
"""
PARENT = """
import os, sys
from pathlib import Path
from raftlog.testing.dependent_process import ForkServer
fork_server = ForkServer(os.environ)  # without this name it would end at once, and its server with it
with open(os.devnull, "ab") as nothing:
    forked = fork_server.start(["sleep"], os.environ, Path("/"), nothing.fileno())
print(forked.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of servers whose program is the one above."""
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker" / "__init__.py").touch()
    (tmp_path / "broker" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "extra_module.py").touch()
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(_installed.server_root())])}


@pytest.fixture
def fork_server(environment: dict[str, str]) -> Iterator[ForkServer]:
    one = ForkServer(environment)
    yield one
    one.close()


def started(fork_server: ForkServer, log: Path, *arguments: str, modules: tuple[str, ...] = ()) -> ForkedProcess:
    with log.open("ab") as output:
        return fork_server.start(arguments, {"VALUE": "as told"}, log.parent, output.fileno(), modules)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_server_has_what_it_was_started_with_and_nothing_of_others(fork_server: ForkServer, tmp_path: Path) -> None:
    other = started(fork_server, tmp_path / "other.log", "sleep")
    told = []
    for number in range(2):
        log = tmp_path / f"{number}.log"
        one = started(fork_server, log, "tell", str(number), modules=("extra_module", "no_such_module"))
        assert one.wait(60) == 7
        assert (one.poll(), one.wait(0)) == (7, 7)
        one.kill()  # does nothing to whoever has its process id now
        lines = log.read_text().splitlines()
        told.append(json.loads(lines[0]))
        assert len(lines) == 1, "the program was imported before, elsewhere"
        assert told[-1] | {"descriptors": 0, "imported_by": 0} == {
            "arguments": [str(number)],
            "cwd": str(tmp_path),
            "value": "as told",
            "only": True,
            "group": one.pid,
            "extra": True,
            "descriptors": 0,
            "imported_by": 0,
        }
    assert told[0]["descriptors"] == told[1]["descriptors"], "neither has descriptors of the servers before it"
    assert told[0]["imported_by"] == told[1]["imported_by"] != os.getpid()
    assert other.poll() is None
    other.kill()
    assert other.wait(60) == -signal.SIGKILL


def test_signals_reach_a_server_and_its_failure_is_in_its_log(fork_server: ForkServer, tmp_path: Path) -> None:
    sleeping = started(fork_server, tmp_path / "log", "sleep")
    with pytest.raises(subprocess.TimeoutExpired):
        sleeping.wait(0.01)
    sleeping.send_signal(signal.SIGSTOP)
    until(lambda: " T " in Path(f"/proc/{sleeping.pid}/stat").read_text(), "it is paused", within_s=60)
    sleeping.send_signal(signal.SIGCONT)
    sleeping.terminate()
    assert sleeping.wait(60) == -signal.SIGTERM
    assert started(fork_server, tmp_path / "log", "fail").wait(60) == 1
    assert "ValueError: such a thing" in (tmp_path / "log").read_text()


def test_servers_end_with_their_fork_server_and_no_more_are_started(
    fork_server: ForkServer, environment: dict[str, str], tmp_path: Path
) -> None:
    first = started(fork_server, tmp_path / "log", "sleep")
    fork_server.close()
    assert first.wait(60) == -signal.SIGKILL
    until(lambda: is_gone(first.pid), "the server has ended", within_s=60)
    with pytest.raises(ForkFailed):
        started(fork_server, tmp_path / "log", "sleep")


def test_a_server_ends_with_its_fork_server_as_soon_as_it_is_known(environment: dict[str, str], tmp_path: Path) -> None:
    """One that is paused before that would stay for ever."""
    fork_server = ForkServer(environment | {"TIED_LATE": "yes"})
    try:
        log = tmp_path / "log"
        started(fork_server, log, "sleep")
        assert "tied\n" in log.read_text()
    finally:
        fork_server.close()


@pytest.mark.parametrize("paused", [False, True])
def test_servers_end_with_the_process_that_started_them(environment: dict[str, str], paused: bool) -> None:
    command = [sys.executable, "-P", "-c", PARENT]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert not is_gone(pid)
            if paused:
                os.kill(pid, signal.SIGSTOP)
        finally:
            parent.kill()
    until(lambda: is_gone(pid), "the server has ended", within_s=60)


def test_what_the_loader_reads_cannot_be_changed_by_a_fork(environment: dict[str, str]) -> None:
    fixed = fixed_at_start(environment)
    assert fixed_at_start(environment | {"VALUE": "another"}) == fixed
    assert fixed_at_start(environment | {"LD_PRELOAD": "/lib/faults.so"}) != fixed
    assert fixed_at_start(environment | {"PYTHONPATH": "elsewhere"}) != fixed


def test_servers_start_in_the_usual_way_where_forks_are_impossible_or_unwanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def command(*arguments: str) -> list[str]:
        commands.append(arguments)
        return ["/bin/sh", "-c", "exec sleep 60"]

    monkeypatch.setattr(server_process, "dependent_server_command", command)

    def start() -> None:
        server = ServerProcess(1, tmp_path / "node", {}, serves_clients=False)
        server.launch()
        with pytest.raises(ServerFailed):
            server.wait_ready(time.monotonic())
        assert server.ending == "by SIGKILL"

    monkeypatch.setenv("RAFTLOG_SERVER_START", "exec")
    start()
    monkeypatch.delenv("RAFTLOG_SERVER_START")
    monkeypatch.setattr(server_process, "_fork_servers", {})
    monkeypatch.delattr(os, "pidfd_open")
    start()
    assert len(commands) == 2
