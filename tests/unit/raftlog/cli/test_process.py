"""How the process of a command ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
