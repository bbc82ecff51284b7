"""Commands in this process, their results, and a person at the terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple
from unittest import mock

import pytest

from raftlog.cli import main


class Ran(NamedTuple):
    """The result of a command: its exit code and its output."""

    code: int
    out: str
    err: str

    @property
    def table(self) -> list[dict[str, str]]:
        """The lines of the table by column."""
        header, *lines = (line.split("\t") for line in self.out.splitlines())
        return [dict(zip(header, line, strict=True)) for line in lines]

    @property
    def json(self) -> Any:
        """The document."""
        return json.loads(self.out)


Run = Callable[..., Ran]


class Terminal(io.StringIO):
    """Standard input of a person that presses Ctrl-C when there is no line left."""

    def isatty(self) -> bool:
        """Return True."""
        return True

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override] # as the base class in the stubs has it
        """Return what is typed next."""
        line = super().readline()
        if not line:
            raise KeyboardInterrupt
        return line


def run_here(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in this process, without the second that another one takes to start; no variable configures it.

    A test of what a process does (signals, exits, output while it runs) starts one.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAFTLOG_")}
    with (
        mock.patch.dict(os.environ, variables, clear=True),
        mock.patch.object(sys, "argv", ["raftlog", *arguments]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8")),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        main()
    printed = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(arguments, int(left.value.code or 0), *printed)
