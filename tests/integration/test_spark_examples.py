"""The pipelines of spark/examples, as their users run them, with kills on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raftlog_demo import flights as flight_data

import raftlog
from raftlog.testing import Cluster
from tests.support.spark_session import JVM_OPTIONS, spark_home

pytestmark = pytest.mark.spark("own")
_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = _ROOT / "spark" / "examples"
_FLIGHTS = 8_000
_WAIT_S = 600
_SPARK_CONF = f"""\
spark.master local[2,3]
spark.ui.enabled false
spark.ui.showConsoleProgress false
spark.driver.memory 1g
spark.log.level ERROR
spark.sql.session.timeZone UTC
spark.sql.shuffle.partitions 2
spark.python.unix.domain.socket.enabled true
spark.sql.parquet.compression.codec snappy
spark.driver.extraJavaOptions {JVM_OPTIONS}
"""


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pa.Table]:
    """The first nine days of January, in one file: the topic is to have them in the order of the hours."""
    table = flight_data.load().slice(0, _FLIGHTS)
    path = tmp_path_factory.mktemp("flights") / "january.parquet"
    pq.write_table(table, path)
    return path, table


class Example:
    """Runs one of the scripts."""

    def __init__(self, name: str, directory: Path, *arguments: str) -> None:
        conf = directory / "spark.conf"
        conf.write_text(_SPARK_CONF + f"spark.local.dir {directory}/local\n")
        self._command = [sys.executable, str(_EXAMPLES / f"{name}.py"), *arguments]
        self._directory = directory
        # As for `/some/venv/bin/python job.py`: neither a variable nor the path tells Spark of this Python.
        path = [each for each in os.environ["PATH"].split(os.pathsep) if each != str(Path(sys.executable).parent)]
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")},
            "PATH": os.pathsep.join(path),
            "PYSPARK_SUBMIT_ARGS": f"--properties-file {conf} pyspark-shell",
            "PYTHONPATH": os.pathsep.join((str(_ROOT), str(_ROOT / "spark"))),
            "SPARK_HOME": str(spark_home()),
        }

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            env=self._environment,
            cwd=self._directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # so that the driver and its JVM can be killed together
        )

    def run(self, expected: int = 0) -> str:
        process = self.start()
        try:
            output, _ = process.communicate(timeout=_WAIT_S)
        finally:
            kill(process)
        assert process.returncode == expected, output[-6000:]
        return output

    def run_with_kills(self, commits: Path, at_batches: Sequence[int]) -> str:
        """Kill it, JVM and all, when its checkpoint has so many batches; then let it end."""
        for batches in at_batches:
            process = self.start()
            deadline = time.monotonic() + _WAIT_S
            try:
                while len(list(commits.glob("[0-9]*"))) < batches and process.poll() is None:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                assert process.poll() is None, (
                    f"the example ended before it could be killed: {process.communicate()[0][-6000:]}"
                )
            finally:
                kill(process)
        return self.run()


def kill(process: subprocess.Popen[str]) -> None:
    """Kill -9 a process and all that it has started; leaves its output, which may have been read."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


def make_topic(cluster: Cluster, name: str, partitions: int = 2) -> str:
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=partitions, configs={"retention.ms": "-1"}, timeout=60)
    return name


def send(cluster: Cluster, flights: pa.Table, topic: str) -> None:
    """Put flights into a topic in their order, as the back-fill does."""
    values = [
        json.dumps({name: value for name, value in row.items() if value is not None}).encode()
        for row in flights.to_pylist()
    ]
    with raftlog.Producer(cluster.bootstrap) as producer:
        producer.send_batch(topic, pa.record_batch({"key": flights["tailnum"].combine_chunks(), "value": values}))
        producer.flush()


def load(cluster: Cluster, flights: Path, topic: str, directory: Path) -> Example:
    named = ("--bootstrap", cluster.bootstrap, "--topic", topic, "--name", f"{topic}-load")
    return Example("backfill", directory, *named, "--key", "tailnum", "--time", "time_hour", str(flights))


def read_values(cluster: Cluster, topic: str, count: int) -> list[Any]:
    """Return all values, once there are so many: a commit is told of moments before all of it can be read."""
    deadline = time.monotonic() + _WAIT_S
    while len(found := read_now(cluster, topic)) < count:
        assert time.monotonic() < deadline, f"only {len(found)} of {count} values can be read after {_WAIT_S:g} s"
        time.sleep(0.1)
    return found


def read_now(cluster: Cluster, topic: str) -> list[Any]:
    found: list[Any] = []
    with raftlog.Consumer(cluster.bootstrap) as consumer:
        places = consumer.partitions_for(topic)
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        ends = consumer.end_offsets(places)
        while any(consumer.position(place) < ends[place] for place in places):
            found += consumer.poll_arrow(0.2)["value"].to_pylist()
    return found


def test_a_backfill_that_is_run_twice_is_there_once(
    cluster: Cluster, flights: tuple[Path, pa.Table], tmp_path: Path
) -> None:
    path, table = flights
    topic = make_topic(cluster, "backfill")
    example = load(cluster, path, topic, tmp_path)
    assert f"{_FLIGHTS:,} records are in backfill" in example.run()
    assert "was written before" in example.run()
    values = [json.loads(value) for value in read_values(cluster, topic, _FLIGHTS)]
    assert sorted(value["number"] for value in values) == [*range(_FLIGHTS)]
    by_number = {value["number"]: value for value in values}
    for row in table.slice(0, 100).to_pylist():
        assert by_number[row["number"]] == {name: value for name, value in row.items() if value is not None}


def test_departures_are_counted_exactly_once_whatever_is_killed(
    cluster: Cluster, flights: tuple[Path, pa.Table], tmp_path: Path
) -> None:
    _, table = flights
    source, results = make_topic(cluster, "flights"), make_topic(cluster, "departures")
    send(cluster, table, source)
    checkpoint = tmp_path / "checkpoint"
    named = ("--bootstrap", cluster.bootstrap, "--source", source, "--results", results)
    limits = ("--once", "--max-events", "3000", "--late", "2 days")
    example = Example("departures", tmp_path, *named, "--checkpoint", str(checkpoint), *limits)
    example.run_with_kills(checkpoint / "commits", (1,))
    expected = hours_of(table, until_days_before_end=2)
    found = [json.loads(value) for value in read_values(cluster, results, len(expected))]
    windows = Counter((value["origin"], value["hour"]) for value in found)
    assert max(windows.values()) == 1, "a window was written twice"
    assert {key for key in windows if key not in expected} == set()
    assert len(expected) > 300
    assert {(value["origin"], value["hour"]): value for value in found} == expected


def hours_of(table: pa.Table, until_days_before_end: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the windows that the watermark has closed, counted in the plainest way."""
    from datetime import datetime, timedelta

    def parsed(text: str) -> datetime:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))

    rows = table.select(["origin", "time_hour", "dep_delay"]).to_pylist()
    delays: dict[tuple[str, str], list[int | None]] = defaultdict(list)
    for row in rows:
        delays[row["origin"], row["time_hour"]].append(row["dep_delay"])
    watermark = max(parsed(row["time_hour"]) for row in rows) - timedelta(days=until_days_before_end)
    found = {}
    for (origin, hour), all_delays in delays.items():
        if parsed(hour) + timedelta(hours=1) > watermark:
            continue
        known = [delay for delay in all_delays if delay is not None]
        value: dict[str, Any] = {"origin": origin, "hour": hour.replace("Z", ".000Z"), "flights": len(all_delays)}
        value["cancelled"] = len(all_delays) - len(known)
        if known:  # JSON leaves out what is null
            value["mean_delay_min"] = pytest.approx(sum(known) / len(known), abs=0.0051)
            value["max_delay_min"] = float(max(known))
        found[origin, value["hour"]] = value
    return found


def files_of(archive: Path) -> list[str]:
    """Return the files that count: those of killed attempts lie beside them (Spark's log of its file sink)."""
    found = set()
    for log in (archive / "_spark_metadata").glob("[0-9]*"):
        for line in log.read_text().splitlines()[1:]:
            entry = json.loads(line)
            assert entry["action"] == "add"
            found.add(entry["path"].removeprefix("file://"))
    return sorted(found)


@pytest.mark.parametrize("kills", [(), pytest.param((1,), marks=pytest.mark.long)], ids=["calm", "killed"])
def test_the_archive_has_every_record_once_and_says_what_is_wrong(
    cluster: Cluster, flights: tuple[Path, pa.Table], tmp_path: Path, kills: tuple[int, ...]
) -> None:
    _, table = flights
    topic = make_topic(cluster, f"archived-{len(kills)}")
    send(cluster, table, topic)
    bad = [b"{", b"[1]", b'{"number": 1}', b'{"time_hour": "2013-01-05T10:00:00Z", "origin": "JFK"}', None]
    late = b'{"time_hour": "2013-01-05T10:00:00Z", "origin": "JFK", "dest": "LAX", "dep_delay": 5000}'
    with raftlog.Producer(cluster.bootstrap) as producer:
        for value in (*bad, late):
            producer.send(topic, value)
        producer.flush()
    archive, checkpoint = tmp_path / "archive", tmp_path / "checkpoint"
    named = ("--bootstrap", cluster.bootstrap, "--topic", topic, "--archive", str(archive))
    example = Example("archive", tmp_path, *named, "--checkpoint", str(checkpoint), "--max-events", "3000")
    example.run_with_kills(checkpoint / "commits", kills)
    report = json.loads((archive / "_report.json").read_text())
    assert (report["records"], report["missing"], report["doubled"]) == (_FLIGHTS + len(bad) + 1, 0, 0)
    assert report["problems"] == {
        "delay out of range": 1,
        "no JSON": 2,
        "no route": 1,
        "no time": 1,
        "no value": 1,
    }
    assert report["without_delay"] == table["dep_delay"].null_count
    assert sorted(path.name for path in archive.glob("day=2013-*"))[0] == "day=2013-01-01"
    kept = pq.read_table(files_of(archive), columns=["flight", "problem"])
    numbers = [row["flight"]["number"] for row in kept.to_pylist() if row["problem"] is None]
    assert sorted(numbers) == [*range(_FLIGHTS)]
    assert sum(report["days"].values()) == report["records"]
