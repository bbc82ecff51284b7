"""The sink at least once: its tasks and commits, with a producer that only remembers."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructType
from pyspark_raftlog import DefaultSource, sink
from pyspark_raftlog.sink import TaskWritten

import raftlog
from raftlog.errors import NotEnoughReplicas

SCHEMA = StructType().add("value", StringType()).add("topic", StringType())


class Sent:
    """A delivery with a known outcome."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def result(self) -> None:
        """Return or raise the outcome."""
        if self._error is not None:
            raise self._error


class RememberingProducer:
    """Stands in for `raftlog.Producer`; `errors` are the outcomes of the next sends."""

    made: list[RememberingProducer]
    errors: list[Exception | None]

    def __init__(self, bootstrap: str, config: dict[str, str]) -> None:
        self.bootstrap, self.config = bootstrap, config
        self.sent: list[tuple[str, list[dict[str, Any]]]] = []
        self.flushed = self.closed = False
        self.made.append(self)

    def send_batch(self, topic: str, records: Any) -> Sent:
        self.sent.append((topic, records.to_pylist()))
        return Sent(self.errors.pop(0) if self.errors else None)

    def flush(self) -> None:
        self.flushed = True

    def close(self, timeout: float) -> None:
        assert timeout == 0, f"a failed task must not wait for records, but close was given {timeout} s"
        self.closed = True


@pytest.fixture
def producers(monkeypatch: pytest.MonkeyPatch) -> type[RememberingProducer]:
    monkeypatch.setattr(raftlog, "Producer", RememberingProducer, raising=False)
    monkeypatch.setattr(sink, "_producers", {})
    RememberingProducer.made, RememberingProducer.errors = [], []
    return RememberingProducer


def stream_sink(**options: str) -> Any:
    source = DefaultSource({"bootstrap.servers": "a:1", "delivery": "at-least-once", **options})
    return pickle.loads(pickle.dumps(source.streamWriter(SCHEMA, overwrite=False)))  # noqa: S301 # as Spark sends it


def batches(*rows: tuple[str, str]) -> list[pa.RecordBatch]:
    return [pa.record_batch({"value": [value], "topic": [topic]}) for value, topic in rows]


def test_a_task_sends_all_rows_and_its_worker_keeps_the_producer(producers: type[RememberingProducer]) -> None:
    writer = stream_sink(acks="1")
    assert writer.write(iter(batches(("1", "x"), ("2", "y")))).rows == 2
    assert writer.write(iter(batches(("3", "x")))).rows == 1
    [producer] = producers.made
    assert producer.sent == [("x", [{"value": b"1"}]), ("y", [{"value": b"2"}]), ("x", [{"value": b"3"}])]
    assert (producer.bootstrap, producer.config["acks"], producer.flushed) == ("a:1", "1", True)


def test_a_refused_record_fails_the_task_and_the_next_one_begins_with_a_new_producer(
    producers: type[RememberingProducer],
) -> None:
    producers.errors = [None, NotEnoughReplicas("one of two")]
    writer = stream_sink()
    with pytest.raises(NotEnoughReplicas, match="one of two"):
        writer.write(iter(batches(("1", "x"), ("2", "x"))))
    assert [producer.closed for producer in producers.made] == [True]
    writer.write(iter(batches(("1", "x"))))
    assert [producer.closed for producer in producers.made] == [True, False]


def test_other_options_get_another_producer(producers: type[RememberingProducer]) -> None:
    stream_sink(acks="1").write(iter(()))
    stream_sink(acks="all").write(iter(()))
    assert [(producer.config["acks"], producer.closed) for producer in producers.made] == [("1", True), ("all", False)]


def test_a_task_that_says_nothing_fails_the_commit() -> None:
    """The continuous trigger sends None; a commit would forget unwritten records."""
    writer = stream_sink()
    writer.commit([TaskWritten(0, 5), TaskWritten(1, 0)], 7)
    with pytest.raises(RuntimeError, match="1 of 2 tasks did not report their writes"):
        writer.commit([TaskWritten(0, 5), None], 7)
    batch = DefaultSource({"bootstrap.servers": "a:1", "delivery": "at-least-once"}).writer(SCHEMA, overwrite=False)
    with pytest.raises(RuntimeError, match="continuous"):
        batch.commit([None])
