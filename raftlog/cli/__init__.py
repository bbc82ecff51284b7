"""The command `raftlog`. It does nothing that a program could not do with the public SDK."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn

__all__ = ["main", "run"]

_EXIT_INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line; never returns.

    It takes most of a second to import what it needs: Ctrl-C ends that at once and without a traceback of imports.
    """
    before = signal.getsignal(signal.SIGINT)
    quiet = before is signal.default_int_handler  # else it is ignored, or somebody else's
    if quiet:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_EXIT_INTERRUPTED))
    try:
        from raftlog.cli.app import main as command
    finally:
        if quiet:
            signal.signal(signal.SIGINT, before)
    command()


def run() -> NoReturn:
    """Be the process: as `main`, which leaves everything in order, and gone at once after it.

    Taking the interpreter apart while threads of gRPC are still at work has crashed it: a member that was told to end
    left its group in order, and then ended by SIGSEGV.
    """
    try:
        main()
    except SystemExit as left:
        if isinstance(left.code, str):
            raise
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
                stream.flush()
        os._exit(left.code or 0)
