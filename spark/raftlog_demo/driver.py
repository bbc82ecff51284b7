"""Spark's driver as a separate process: it is killed once, and continues from its checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SPARK_LOG = "spark.log"
"""The file of Spark's own messages, in the demo's directory."""
_MIDDLE_OF_A_BATCH_S = 0.4
"""The pause after the report of a batch, after which the next batch is being written or committed."""


class DriverFailed(RuntimeError):
    """Spark's driver has ended by itself before all rows were streamed."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Spark's report of a micro-batch."""

    number: int
    rows: int
    busy_ms: int


@dataclass(frozen=True, slots=True)
class Ride:
    """The run of the query. `batches`: each reported batch once."""

    batches: list[Batch]
    killed_at_rows: int
    restart_s: float
    """The seconds from the kill until the next driver reported a batch."""


class Driver:
    """Runs the query of `raftlog_demo.stream` to its end, with one kill -9 of the driver and its JVM."""

    def __init__(self, directory: Path, source: Path, bootstrap: str, topic: str) -> None:
        self._log = directory / SPARK_LOG
        self._arguments = [str(source), str(directory / "checkpoint"), bootstrap, topic, str(directory)]
        self._process: subprocess.Popen[str] | None = None
        self._reported: dict[int, Batch] = {}

    @property
    def rows(self) -> int:
        """Return the number of rows reported so far."""
        return sum(batch.rows for batch in self._reported.values())

    def run(self, kill_at_rows: int, on_rows: Callable[[int], None]) -> Ride:
        """Stream all files; kill the driver in the middle of a batch after `kill_at_rows` rows.

        Raises:
            DriverFailed: the driver ended by itself too early, or with an error.
        """
        try:
            self._follow(on_rows, until_rows=kill_at_rows)
            killed_at_rows = self.rows
            time.sleep(_MIDDLE_OF_A_BATCH_S)
            self.kill()
            killed_s = time.monotonic()
            back_s: list[float] = []

            def on_more(rows: int) -> None:
                back_s.append(time.monotonic() - killed_s)
                on_rows(rows)

            self._follow(on_more)
        finally:
            self.kill()
        batches = [self._reported[number] for number in sorted(self._reported)]
        return Ride(batches, killed_at_rows, back_s[0] if back_s else 0.0)

    def kill(self) -> None:
        """Kill the driver, with its JVM and all Python workers (SIGKILL)."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def log_tail(self, characters: int) -> str:
        """Return the end of Spark's log."""
        return self._log.read_text()[-characters:] if self._log.exists() else ""

    def _follow(self, on_rows: Callable[[int], None], until_rows: int | None = None) -> None:
        """Start a driver, and read its reports until it ends or has reported `until_rows`."""
        with self._log.open("a") as log:
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "raftlog_demo.stream", *self._arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
            )
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            report = json.loads(line)
            self._reported[report["batch"]] = Batch(report["batch"], report["rows"], report["busy_ms"])
            on_rows(self.rows)
            if until_rows is not None and self.rows >= until_rows:
                return
        process.wait()
        if process.returncode != 0:
            raise DriverFailed(f"Spark's driver ended with exit code {process.returncode}")
        if until_rows is not None:
            raise DriverFailed(f"the stream ended before {until_rows} rows were written; the driver was not killed")
