"""The Python in README.md runs as it stands there, against a real broker."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from raftlog import Admin, Consumer, Record
from raftlog.testing import Cluster
from tests.support.patient_polls import patient_polls

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def block_with(words: str) -> str:
    (found,) = [block for block in BLOCKS if words in block]
    return str(found)


def test_the_sdk_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    with Cluster(nodes=1) as cluster, patient_polls(monkeypatch, cluster.bootstrap, gathering=True):
        for words in ("delivery.result", "producer.transaction"):
            code = block_with(words).replace("127.0.0.1:9092", cluster.bootstrap)
            exec(compile(code, "README", "exec"), names)
        with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
            consumer.subscribe(["readings"])
            found: set[bytes | None] = set()
            deadline = time.monotonic() + 120
            while len(found) < 3 and time.monotonic() < deadline:
                found.update(record.value for record in consumer.poll(1.0))
    printed = capsys.readouterr().out
    assert "RecordMetadata(topic='readings'" in printed
    assert "b'sensor-7' b'21.5'" in printed
    assert found == {b"21.5", b"-10", b"+10"}


def test_the_testing_example() -> None:
    exec(compile(block_with("raftlog.testing"), "README", "exec"), {})


@pytest.mark.spark
def test_the_spark_example(tmp_path: Path, spark: Any) -> None:
    code = block_with("writeStream").replace("/data/checkpoints/events", str(tmp_path / "checkpoint"))
    with Cluster(nodes=1) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("events", 2, timeout=60)
        events = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
        names: dict[str, Any] = {"spark": spark, "events": events.withColumnRenamed("value", "id")}
        exec(compile(code.replace("127.0.0.1:9092", cluster.bootstrap), "README", "exec"), names)
        try:
            with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
                consumer.subscribe(["events"])
                records: list[Record] = []
                deadline = time.monotonic() + 120
                while len(records) < 10 and time.monotonic() < deadline:
                    records += consumer.poll(1.0)
        finally:
            names["query"].stop()
        assert len(records) >= 10
        assert all(record.key is not None and record.value is not None for record in records)
        assert names["readings"].isStreaming
