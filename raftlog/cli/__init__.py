"""The command `raftlog`. It uses only the public SDK, so a program can do the same."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn

__all__ = ["main", "run"]

_EXIT_ERROR = 1
_EXIT_INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line; never returns.

    Its imports take most of a second; Ctrl-C ends them at once, without a traceback. If the extra `cli` is missing, the
    error says how to install it.
    """
    before = signal.getsignal(signal.SIGINT)
    quiet = before is signal.default_int_handler  # otherwise it is ignored, or another handler is set
    if quiet:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_EXIT_INTERRUPTED))
    try:
        from raftlog.cli.app import main as command
    except ModuleNotFoundError as error:
        from raftlog._installed import is_of, needs

        if not is_of(error, "cli"):
            raise
        print(f"error: {needs('the command raftlog', error.name, 'cli')}", file=sys.stderr)
        sys.exit(_EXIT_ERROR)
    finally:
        if quiet:
            signal.signal(signal.SIGINT, before)
    command()


def run() -> NoReturn:
    """Run `main` as the whole process, and exit right after it without the interpreter's own cleanup.

    That cleanup has crashed while gRPC threads were running: a group member left its group cleanly and then died of
    SIGSEGV.
    """
    from raftlog._installed import keep_pandas_out

    keep_pandas_out()
    try:
        main()
    except SystemExit as left:
        if isinstance(left.code, str):
            raise
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
                stream.flush()
        os._exit(left.code or 0)
