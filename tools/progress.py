"""Progress of long steps on stderr: one rewritten line on a terminal, plain lines in a log."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

_INTERVAL_TTY_S = 0.2
_INTERVAL_LOG_S = 15.0
_TAIL_LINES = 25


class StepFailed(Exception):
    """A step failed; the message says what to do."""


class Progress:
    """Shows what a step does now, and how many seconds it has taken."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._detail = ""
        self._title = ""
        self._started = time.monotonic()
        self._done = threading.Event()
        self._tty = sys.stderr.isatty()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._ticker.join()
        if self._tty:
            sys.stderr.write("\r\x1b[K")
        outcome = "done" if error is None else "failed"
        sys.stderr.write(f"{self._label}: {self._title}: {outcome} in {self._seconds():.1f} s\n")
        sys.stderr.flush()

    def say(self, title: str) -> None:
        """Name the step."""
        self._title = title
        if not self._tty:
            sys.stderr.write(f"{self._label}: {title}\n")
            sys.stderr.flush()

    def detail(self, text: str) -> None:
        """Set the current detail of the step."""
        self._detail = text

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _tick(self) -> None:
        while not self._done.wait(_INTERVAL_TTY_S if self._tty else _INTERVAL_LOG_S):
            line = f"{self._label}: {self._title} ({self._seconds():.0f} s) {self._detail}"
            sys.stderr.write(f"\r\x1b[K{line[:110]}" if self._tty else f"{line[:160]}\n")
            sys.stderr.flush()


def run_logged(
    progress: Progress, command: list[str], *, log: Path, cwd: Path, environment: Mapping[str, str] | None = None
) -> None:
    """Run `command` with its output in `log`, and its last line as the progress' detail.

    Without `environment` it has this process's.

    Raises:
        StepFailed: its exit code is not 0; the message has the end of the output.
    """
    lines: list[str] = []
    with (
        log.open("a") as file,
        subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            lines = [*lines[-_TAIL_LINES:], line]
            progress.detail(line.strip())
    if process.returncode != 0:
        raise StepFailed(
            f"this command ended with exit code {process.returncode}:\n  {' '.join(command)}\n"
            + "".join(f"  | {line}" for line in lines)
            + f"the whole output is in {log}"
        )
