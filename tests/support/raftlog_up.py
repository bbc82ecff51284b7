"""`raftlog up` as a process of its own, which ends with the test in any case."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_STOP_S = 60.0


@contextmanager
def raftlog_up(*options: str) -> Iterator[subprocess.Popen[str]]:
    """Run it on free ports; a test that fails does not wait for it for ever."""
    command = [sys.executable, "-P", "-m", "raftlog", "up", "--port", "0", "--no-console", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
