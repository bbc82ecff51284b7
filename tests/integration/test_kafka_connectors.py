"""Spark's connector for Kafka, and Kafka Connect, as clients of the Kafka listener.

They need Java, and Maven or their jars (`tests/support/kafka_java.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import raftlog
from bench.compare import spark_jars
from raftlog.testing import Cluster
from tests.support.kafka_java import JVM, jars_or_skip
from tests.support.patience import until
from tests.support.up_to_date import heard_everywhere

pytestmark = pytest.mark.long

ROOT: Final = Path(__file__).parents[2]
TIMEOUT_S: Final = 300.0
ROWS: Final = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, kafka=True) as started:
        with raftlog.Admin(started.bootstrap) as admin:
            for topic in ("source", "target", "lines"):
                admin.create_topic(topic, partitions=2, replication_factor=3)
        heard_everywhere(started)
        yield started


def test_spark_writes_streams_and_reads(cluster: Cluster, tmp_path: Path) -> None:
    jars = jars_or_skip(spark_jars)
    arguments = cluster.kafka_bootstrap, str(jars), str(tmp_path), "source", "target", str(ROWS)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.spark_kafka", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    rows = [(str(number), str(2 * number)) for number in range(ROWS)]
    assert sorted(found) == sorted([*row, "of", "spark"] for row in rows)
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([raftlog.TopicPartition("target", number) for number in range(2)])
        table = consumer.read_to_end(timeout=TIMEOUT_S)
    read = zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)
    assert sorted(read) == sorted((key.encode(), value.encode()) for key, value in rows)


class Connect:
    """A worker of Kafka Connect that brings the lines of one file through a topic to another file."""

    def __init__(self, jars: Path, cluster: Cluster, directory: Path) -> None:
        self._jars = jars
        self._directory = directory
        text = "org.apache.kafka.connect.storage.StringConverter"
        file = "org.apache.kafka.connect.file.FileStream"
        self._write(
            "worker",
            {
                "bootstrap.servers": cluster.kafka_bootstrap,
                "key.converter": text,
                "value.converter": text,
                "offset.storage.file.filename": directory / "offsets",
                "offset.flush.interval.ms": 1_000,
                "listeners": "http://127.0.0.1:0",
                "plugin.discovery": "service_load",
            },
        )
        source = {
            "name": "from",
            "connector.class": f"{file}SourceConnector",
            "file": directory / "in",
            "topic": "lines",
        }
        self._write("source", source)
        sink = {"name": "to", "connector.class": f"{file}SinkConnector", "file": directory / "out", "topics": "lines"}
        self._write("sink", sink)

    def _write(self, name: str, properties: dict[str, object]) -> None:
        lines = (f"{key}={value}\n" for key, value in properties.items())
        (self._directory / f"{name}.properties").write_text("".join(lines))

    def run(self, lines: list[str]) -> None:
        """Run it until the other file has these lines; then stop it as an operator does."""
        files = [str(self._directory / f"{name}.properties") for name in ("worker", "source", "sink")]
        command = [*JVM, "-cp", f"{self._jars}/*", "org.apache.kafka.connect.cli.ConnectStandalone", *files]
        with (self._directory / "log").open("a") as log:
            worker = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until(lambda: self._is_there(lines, worker), "the lines have arrived", within_s=TIMEOUT_S, pause_s=0.2)
            worker.terminate()
            worker.wait(TIMEOUT_S)
        finally:
            worker.kill()
            worker.wait()

    def _is_there(self, lines: list[str], worker: subprocess.Popen[bytes]) -> bool:
        assert worker.poll() is None, (self._directory / "log").read_text()[-4_000:]
        out = self._directory / "out"
        return out.exists() and {*out.read_text().split()} == {*lines}


def test_connect_brings_a_file_through_a_topic_to_another(cluster: Cluster, tmp_path: Path) -> None:
    connect, lines = Connect(jars_or_skip(), cluster, tmp_path), [f"line-{number}" for number in range(200)]
    with (tmp_path / "in").open("w") as source:
        for begin, end in ((0, 100), (100, 200)):
            source.writelines(f"{line}\n" for line in lines[begin:end])
            source.flush()
            connect.run(lines[:end])
    assert sorted((tmp_path / "out").read_text().split()) == sorted(lines), "each line must be copied exactly once"
    with raftlog.Admin(cluster.bootstrap) as admin:
        assert sum(offset.offset for offset in admin.group_offsets("connect-to").values()) == len(lines)
