"""Spark's driver and JVM, and the servers, die while a query runs; every row is in the topic once.

The queries run in processes of their own (tests/support/spark_driver.py), which are killed with SIGKILL at random
moments and at the points that matter, and started again from their checkpoint with other partitions, until all is
there.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raftlog
from raftlog.testing import Cluster
from tests.support import spark_driver
from tests.support.steady import PATIENT

pytestmark = pytest.mark.spark("own")
ROOT = Path(__file__).resolve().parents[2]
_FILES, _ROWS = 8, 300
_KILLS = 20
_MAX_RUN_S = 600.0
POINTS = ("after-commit", "in-write", "before-commit", "after-write")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=3, config=PATIENT) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    name = f"topic-{abs(hash(request.node.nodeid))}"
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=3, replication_factor=3, configs={"min.insync.replicas": "2"}, timeout=60)
    return name


class Drivers:
    """Starts drivers of one query, and kills them with everything that they have started."""

    def __init__(self, directory: Path, cluster: Cluster, topic: str) -> None:
        self.source, self.checkpoint = directory / "in", directory / "checkpoint"
        self._log = directory / "driver.log"
        self._cluster, self._topic = cluster, topic
        self._running: list[subprocess.Popen[str]] = []
        self._files = 0
        self.source.mkdir()
        self.add_files()

    def add_files(self) -> None:
        """Give the query more to do, for a driver that is started from now on."""
        for number in range(self._files, self._files + _FILES):
            values = [f"{number * _ROWS + row:06}" for row in range(_ROWS)]
            pq.write_table(pa.table({"value": values}), self.source / f"{number:03}.parquet")
        self._files += _FILES

    def start(self, seed: int, fault: str = "") -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "spark")))}
        arguments = [str(self.source), str(self.checkpoint), self._cluster.bootstrap, self._topic, str(seed)]
        with self._log.open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.spark_driver", *arguments, *([fault] if fault else [])],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=ROOT,
                process_group=0,
            )
        self._running.append(process)
        return process

    def noted(self) -> int:
        """Return how many batches Spark has taken note of."""
        return len(list(self.checkpoint.glob("commits/[0-9]*")))

    @staticmethod
    def java(process: subprocess.Popen[str]) -> int | None:
        """Return the process id of a driver's JVM, if it has one."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                if child.name() == "java":
                    return child.pid
        return None

    def kill(self, process: subprocess.Popen[str], *, what: str) -> None:
        """Kill the JVM, the Python driver, or both; what is left of them is gone afterwards."""
        java = self.java(process)
        if what in ("jvm", "both") and java is not None:
            os.kill(java, signal.SIGKILL)
        if what in ("driver", "both"):
            process.kill()
        if what == "jvm":  # the driver's Python finds out
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        elif java is not None:  # a JVM without its driver may still write for a moment: it is not waited for
            pass
        self.clean(process, keep_java=what == "driver")

    def clean(self, process: subprocess.Popen[str], *, keep_java: bool = False) -> None:
        """End everything of a driver's process group."""
        if not keep_java:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def close(self) -> None:
        for process in self._running:
            self.clean(process)

    def finish(self, seed: int) -> None:
        """Run a driver to the end."""
        process = self.start(seed)
        out, _ = process.communicate(timeout=_MAX_RUN_S)
        assert process.returncode == 0, self.tail()
        assert spark_driver.FINISHED in out

    def tail(self) -> str:
        return self._log.read_text()[-6000:]

    def wait_for_progress(self, process: subprocess.Popen[str], noted: int) -> bool:
        """Wait until a batch more is noted; False when the driver has ended."""
        deadline_s = time.monotonic() + _MAX_RUN_S
        while process.poll() is None and self.noted() <= noted:
            assert time.monotonic() < deadline_s, self.tail()
            time.sleep(0.02)
        return process.poll() is None

    def check(self) -> None:
        """Every row is there once."""
        deadline_s = time.monotonic() + _MAX_RUN_S
        while (found := Counter(read_all(self._cluster.bootstrap, self._topic))).total() < self._files * _ROWS:
            assert time.monotonic() < deadline_s, (
                f"only {found.total()} of {self._files * _ROWS} rows can be read after {_MAX_RUN_S:g} s"
            )
            time.sleep(0.2)  # a commit is told of moments before all of it can be read
        wanted = {f"{number:06}".encode() for number in range(self._files * _ROWS)}
        assert found.keys() - wanted == set()
        assert wanted - found.keys() == set(), "rows of the source are missing in the topic"
        assert max(found.values()) == 1, (
            f"rows were written twice: {[row for row, times in found.items() if times > 1][:5]}"
        )


@pytest.fixture
def drivers(tmp_path: Path, cluster: Cluster, topic: str) -> Iterator[Drivers]:
    made = Drivers(tmp_path, cluster, topic)
    yield made
    made.close()


def read_all(bootstrap: str, topic: str) -> list[bytes]:
    found: list[bytes] = []
    with raftlog.Consumer(bootstrap) as consumer:
        places = consumer.partitions_for(topic)
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        ends = consumer.end_offsets(places)
        deadline_s = time.monotonic() + _MAX_RUN_S
        while any(consumer.position(place) < ends[place] for place in places):
            assert time.monotonic() < deadline_s
            found += consumer.poll_arrow(1.0)["value"].to_pylist()
    return found


@pytest.mark.long
def test_drivers_and_jvms_are_killed_at_random(drivers: Drivers) -> None:
    """SPARK-28650: a replay has other partitions and another order."""
    rng = random.Random(_KILLS)
    done = 0
    while done < _KILLS:
        noted = drivers.noted()
        process = drivers.start(seed=done)
        # Half the kills come after some progress, the others at any moment from the start of the first task on.
        if rng.random() < 0.5:
            drivers.wait_for_progress(process, noted)
        time.sleep(rng.uniform(0, 1.5) + (4 if drivers.noted() == noted else 0))
        if process.poll() is not None:  # it was quicker than its killer
            assert process.returncode == 0, drivers.tail()
            drivers.add_files()
            continue
        drivers.kill(process, what=rng.choice(("jvm", "driver", "both")))
        done += 1
    drivers.finish(seed=99)
    drivers.check()


@pytest.mark.parametrize(
    "points", [POINTS[:1], pytest.param(POINTS[1:], marks=pytest.mark.long)], ids=lambda points: "+".join(points)
)
def test_the_jvm_is_killed_at_the_points_that_matter(drivers: Drivers, tmp_path: Path, points: tuple[str, ...]) -> None:
    """Between the sink's commit and Spark's note of it above all: the batch is replayed, and recognised."""
    for number, point in enumerate(points):
        marker = tmp_path / f"marker-{number}"
        process = drivers.start(seed=number, fault=f"{point}:{drivers.noted() + 1}:{marker}")
        process.wait(_MAX_RUN_S)
        assert marker.exists(), drivers.tail()
        assert process.returncode != 0, "the driver must have been killed, but ended with exit code 0"
        drivers.clean(process)
    drivers.finish(seed=99)
    drivers.check()


@pytest.mark.long
def test_a_driver_that_was_taken_for_dead_goes_on(drivers: Drivers, tmp_path: Path) -> None:
    """Two drivers on one checkpoint: the first one is frozen in the middle of a batch, and comes back as a zombie."""
    drivers.add_files()
    first = drivers.start(seed=1)
    assert drivers.wait_for_progress(first, 1), drivers.tail()
    os.killpg(first.pid, signal.SIGSTOP)
    second = drivers.start(seed=2)
    assert drivers.wait_for_progress(second, drivers.noted()), drivers.tail()
    os.killpg(first.pid, signal.SIGCONT)
    for process in (first, second):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_MAX_RUN_S)
        drivers.clean(process)
    drivers.finish(seed=3)
    drivers.check()


def test_servers_are_killed_while_a_query_runs(drivers: Drivers, cluster: Cluster, topic: str) -> None:
    """Leaders and coordinators, during writes and commits; Spark hears of nothing, or replays."""
    rng = random.Random(5)
    process = drivers.start(seed=7)
    killed = 0
    assert drivers.wait_for_progress(process, 0), drivers.tail()
    try:
        while (process.poll() is None or killed < 2) and killed < 8:
            if process.poll() is not None:  # it was quicker than its killer
                drivers.clean(process)
                drivers.add_files()
                process = drivers.start(seed=7 + killed)
                drivers.wait_for_progress(process, drivers.noted())
            victim = cluster.leader(topic, rng.randrange(3)) if rng.random() < 0.5 else rng.choice(cluster.node_ids)
            cluster.kill(victim)
            killed += 1
            time.sleep(rng.uniform(0, 0.5))
            cluster.start(victim)
            time.sleep(rng.uniform(0, 0.7))
        process.wait(_MAX_RUN_S)
    finally:
        cluster.start_all()
        drivers.clean(process)
    drivers.finish(seed=8)
    drivers.check()
    assert killed >= 2
