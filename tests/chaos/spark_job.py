"""A streaming query of Spark's in a process of its own, which writes files' rows into a topic."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

import raftlog
from tests.support import spark_driver

_FILES: Final = 8
_ROWS: Final = 200
_MAX_S: Final = 600.0
_ROOT: Final = Path(__file__).resolve().parents[2]


class SparkJob:
    """Runs from entering the context until all files' rows are written, exactly once by default."""

    def __init__(self, bootstrap: str, topic: str, directory: Path) -> None:
        self._bootstrap, self._topic = bootstrap, topic
        self._source, self._checkpoint = directory / "in", directory / "checkpoint"
        self._log = directory / "driver.log"
        self._source.mkdir()
        self._files = 0

    def __enter__(self) -> SparkJob:
        self._start()
        return self

    def _start(self) -> None:
        for number in range(self._files, self._files + _FILES):
            values = [f"{number * _ROWS + row:06}" for row in range(_ROWS)]
            pq.write_table(pa.table({"value": values}), self._source / f"{number:03}.parquet")
        self._files += _FILES
        arguments = [str(self._source), str(self._checkpoint), self._bootstrap, self._topic, "7"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.spark_driver", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join((str(_ROOT), str(_ROOT / "spark")))},
                cwd=_ROOT,
                process_group=0,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    @property
    def is_running(self) -> bool:
        """Whether there is still something to write."""
        return self._process.poll() is None

    @property
    def batches(self) -> int:
        """How many batches Spark has taken note of."""
        return len(list(self._checkpoint.glob("commits/[0-9]*")))

    def wait_for_batches(self, more: int) -> None:
        """Wait until Spark has noted so many more, or has written everything.

        Raises:
            AssertionError: neither in time, or the query has failed.
        """
        wanted, deadline_s = self.batches + more, time.monotonic() + _MAX_S
        while self.is_running and self.batches < wanted:
            assert time.monotonic() < deadline_s, (
                f"the job has finished no batch within the time allowed: {self._log.read_text()[-4000:]}"
            )
            time.sleep(0.05)
        assert self._process.poll() in (None, 0), self._log.read_text()[-4000:]

    def go_on(self) -> None:
        """Once everything is written, write as much again with another driver. Raises as `finish`."""
        self.finish()
        self._start()

    def finish(self) -> None:
        """Wait until everything is written. Raises as `wait_for_batches`."""
        out, _ = self._process.communicate(timeout=_MAX_S)
        assert self._process.returncode == 0, self._log.read_text()[-4000:]
        assert spark_driver.FINISHED in out, f"the job ended without saying that it has finished: {out[-4000:]}"

    def check(self) -> None:
        """See that every row is in the topic, once.

        Raises:
            AssertionError: it is not.
        """
        wanted = {f"{number:06}".encode() for number in range(self._files * _ROWS)}
        deadline_s = time.monotonic() + _MAX_S
        while (found := self._read(deadline_s)).total() < len(wanted):
            assert time.monotonic() < deadline_s, (
                f"only {found.total()} of {len(wanted)} rows can be read within the time allowed"
            )
            time.sleep(0.2)  # a commit is told of moments before all of it can be read
        assert not found.keys() - wanted, (
            f"the job wrote rows that were not in its source: {list(found.keys() - wanted)[:5]}"
        )
        assert not wanted - found.keys(), f"{len(wanted - found.keys())} rows of the source are missing"
        assert max(found.values()) == 1, (
            f"the job wrote rows twice: {[row for row, times in found.items() if times > 1][:5]}"
        )

    def _read(self, deadline_s: float) -> Counter[bytes]:
        found: Counter[bytes] = Counter()
        with raftlog.Consumer(self._bootstrap) as consumer:
            places = consumer.partitions_for(self._topic)
            consumer.assign(places)
            consumer.seek_to_beginning(*places)
            ends = consumer.end_offsets(places)
            while any(consumer.position(place) < ends[place] for place in places):
                assert time.monotonic() < deadline_s, (
                    "the reader has not reached the end of the topic within the time allowed"
                )
                found.update(consumer.poll_arrow(1.0)["value"].to_pylist())
        return found
