"""Commands that are interrupted: what they say, and in which state they leave things."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from raftlog.cli.signals import orderly_end
from tests.support.fake_broker import FakeCluster

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


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
            os.kill(os.getpid(), number)  # somebody is impatient
            left = True
    assert (ended.value.exit_code, left) == (code, True)
    assert signal.getsignal(number) is before
