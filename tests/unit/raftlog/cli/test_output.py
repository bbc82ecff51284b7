"""Tables on a terminal, how the process of a command ends, and commands that are interrupted."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import typer

from raftlog.cli.groups.groups import LAG_COLUMNS, LAG_OPTIONAL, MEMBER_COLUMNS, MEMBER_OPTIONAL
from raftlog.cli.output import Output, Row, orderly_end, print_rows, short_ids
from tests.support import patience
from tests.support.command_line import Run
from tests.support.fake_broker import FakeCluster

IDS = ["3f2a9c01aaaa4bbbb5ccccddddeeeeff", "3f2a9c01bbbb4bbbb5ccccddddeeeeff", "77777777777777777777777777777777"]


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def lag_rows() -> list[Row]:
    return [
        {
            "topic": "customer-orders",
            "partition": number,
            "current_offset": None if number == 2 else 123_456_789,
            "log_end_offset": 123_456_999,
            "lag": 210,
            "lag_seconds": 12.5,
            "member_id": IDS[number],
            "host": "192.168.100.1",
            "client_id": "raftlog-python",
        }
        for number in range(3)
    ]


def printed(
    monkeypatch: pytest.MonkeyPatch,
    width: int,
    rows: list[Row],
    columns: tuple[str, ...] = LAG_COLUMNS[1:],
    optional: tuple[str, ...] = LAG_OPTIONAL,
) -> list[str]:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    print_rows(rows, columns, Output.TABLE, ids=("member_id",), optional=optional)
    return re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()


def test_on_a_wide_terminal_every_row_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    header, *lines = printed(monkeypatch, 200, lag_rows())
    assert header.split() == [name.upper() for name in LAG_COLUMNS[1:]]
    assert len(lines) == 3
    assert lines[0].split()[-3:] == ["3f2a9c01a", "192.168.100.1", "raftlog-python"]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_nothing_is_broken_on_a_narrow_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    lines = printed(monkeypatch, width, lag_rows())
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines if "customer-orders" in line]
    assert len(rows) == 3
    assert rows[0][:7] == ["customer-orders", "0", "123456789", "123456999", "210", "12.5", "3f2a9c01a"]
    words = " ".join(lines[: len(lines) - 3]).split()
    assert {"PARTITION", "LAG"} <= set(words)
    assert all(word in "_".join(LAG_COLUMNS).upper() for word in words)
    said = capsys.readouterr().err
    assert ("client_id" in said) == ("raftlog-python" not in "".join(lines))


def test_numbers_stay_at_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = [{"lag": 5, "seconds": 0.5}, {"lag": None, "seconds": None}, {"lag": 12345, "seconds": 10.25}]
    assert [line.rstrip() for line in printed(monkeypatch, 80, rows, ("lag", "seconds"), ())] == [
        "  LAG  SECONDS",
        "    5      0.5",
        "    -        -",
        "12345    10.25",
    ]


def test_columns_without_anything_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = [{"topic": "a", "partition": 0, "current_offset": 5, "log_end_offset": 5, "lag": 0}]
    header = printed(monkeypatch, 100, rows)[0]
    assert header.split() == ["TOPIC", "PARTITION", "CURRENT_OFFSET", "LOG_END_OFFSET", "LAG"]


def test_members(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = [
        {
            "member_id": each,
            "instance_id": None,
            "client_id": "raftlog-python",
            "host": "127.0.0.1",
            "epoch": 12,
            "partitions": 20,
            "assigned": "customer-orders:0-9,12 payments:0-8",
            "to_get": None,
            "to_let_go": None,
            "last_heartbeat_ms": 1500,
            "connected": True,
            "subscription": ["customer-orders", "payments"],
        }
        for each in IDS
    ]
    lines = printed(monkeypatch, 80, rows, MEMBER_COLUMNS[1:], MEMBER_OPTIONAL)
    assert max(map(len, lines)) <= 80
    assert "INSTANCE" not in lines[0]
    assert "customer-orders:0-9,12" in "\n".join(lines)
    assert "payments:0-8" in "\n".join(lines)


def test_ids_are_shortened_as_far_as_they_stay_different() -> None:
    assert short_ids(IDS) == {IDS[0]: "3f2a9c01a", IDS[1]: "3f2a9c01b", IDS[2]: "777777777"}
    assert short_ids(["a", "ab"]) == {"a": "a", "ab": "ab"}
    assert short_ids([]) == {}


_COMMAND = """
import atexit, sys
import raftlog.cli as cli

def main():
    sys.stdout.write("said")   # nothing has flushed it yet
    sys.exit({code})

cli.main = main
atexit.register(lambda: print("the interpreter was taken apart"))
cli.run()
"""


@pytest.mark.parametrize(("left_with", "code"), [("0", 0), ("None", 0), ("143", 143)])
def test_what_was_said_is_out_and_the_process_is_gone_at_once(left_with: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _COMMAND.format(code=left_with)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "said", "")


def test_a_reason_is_printed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _COMMAND.format(code="'no'")], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (1, "no\n")


@pytest.mark.parametrize("key", ["transactional.id", "transactional_id"])
def test_records_from_the_command_line_are_in_no_transaction(run: Run, key: str) -> None:
    ran = run("produce", "a", "--config", f"{key}=x", stdin="hello\n")
    assert ran.code == 2
    assert f"--config {key}" in ran.err
    assert "uses no transactions" in ran.err


WAIT_S = 60.0


@pytest.fixture
def server() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        cluster.create_topic("a", 1)
        yield cluster


class Producing:
    """`raftlog produce a` in a process of its own that is fed line by line."""

    def __init__(self, server: FakeCluster, directory: Path) -> None:
        self._err = directory / "err"
        command = [sys.executable, "-P", "-m", "raftlog", "produce", "a", "--bootstrap", server.bootstrap]
        with self._err.open("wb") as err:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=err)

    def feed(self, lines: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"x\n" * lines)
        self.process.stdin.flush()

    @property
    def said(self) -> str:
        return self._err.read_text().lstrip("\n")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


until = partial(patience.until, within_s=WAIT_S, pause_s=0.02)


@pytest.fixture
def producing(server: FakeCluster, tmp_path: Path) -> Iterator[Producing]:
    """Its first two records are acknowledged."""
    producing = Producing(server, tmp_path)
    try:
        producing.feed(2)
        until(lambda: len(server.values("a")) == 2 and server.answered == len(server.requests))
        yield producing
    finally:
        producing.process.kill()
        producing.process.communicate()


def test_produce_waits_for_what_it_has_sent_and_says_so(server: FakeCluster, producing: Producing) -> None:
    server.hold_acks()
    producing.feed(3)
    until(lambda: len(server.values("a")) == 5)
    producing.interrupt()
    until(lambda: producing.said.endswith("\n"))
    assert producing.said == "waiting for 3 records, Ctrl-C again to give up\n"
    server.release_acks()
    assert producing.process.wait(WAIT_S) == 130
    assert producing.said.count("\n") == 1
    assert len(server.values("a")) == 5


def test_a_second_ctrl_c_counts_what_was_not_acknowledged(server: FakeCluster, producing: Producing) -> None:
    server.hold_acks()
    producing.feed(3)
    until(lambda: len(server.values("a")) == 5)
    producing.interrupt()
    until(lambda: "waiting for 3 records" in producing.said)
    producing.interrupt()
    assert producing.process.wait(WAIT_S) == 130
    assert producing.said.endswith("\n3 of 5 records not acknowledged\n")


def test_ctrl_c_with_everything_acknowledged_is_silent(producing: Producing) -> None:
    producing.interrupt()
    assert producing.process.wait(WAIT_S) == 130
    assert producing.said == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_what_is_asked_to_end_leaves_its_contexts(number: signal.Signals, code: int) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(number)
    left = False
    with pytest.raises(typer.Exit) as ended, orderly_end():
        try:
            os.kill(os.getpid(), number)
            time.sleep(WAIT_S)
        finally:
            os.kill(os.getpid(), number)  # an impatient user
            left = True
    assert (ended.value.exit_code, left) == (code, True)
    assert signal.getsignal(number) is before
