"""The checks of the sink on the driver, and in a task, on a real server, without a JVM."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, StructType
from pyspark_raftlog import DefaultSource
from pyspark_raftlog import options as preflight

import raftlog
from raftlog.errors import InvalidPartitions
from raftlog.testing import Cluster
from tests.support.spark_query import SCHEMA
from tests.support.steady import STEADY


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(config=STEADY) as cluster:
        with raftlog.Admin(cluster.bootstrap) as admin:
            admin.create_topic("there", timeout=60)
        yield cluster


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_checked", set())


def make(streaming: bool, bootstrap: str, **options: str) -> Any:
    source = DefaultSource({"bootstrap.servers": bootstrap, **options})
    return (source.streamWriter if streaming else source.writer)(SCHEMA, overwrite=False)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_topic_that_is_not_there_is_found_before_a_task_runs(
    cluster: Cluster, streaming: bool, delivery: str
) -> None:
    with pytest.raises(
        ValueError, match=r"topic nowhere does not exist.*does not create it.*raftlog topic create nowhere"
    ):
        make(streaming, cluster.bootstrap, topic="nowhere", delivery=delivery)
    make(streaming, cluster.bootstrap, topic="there", delivery=delivery)


def test_a_timeout_that_no_server_allows_is_found_before_a_task_runs(cluster: Cluster) -> None:
    most = r"transaction\.timeout\.ms=3600000 is above transaction\.max\.timeout\.ms=900000 of broker 1; set .* 900000"
    for value in ("1h", "3600000"):
        with pytest.raises(ValueError, match=most):
            make(True, cluster.bootstrap, topic="there", **{"transaction.timeout.ms": value})
    make(True, cluster.bootstrap, topic="there", **{"transaction.timeout.ms": "15m"})


def test_the_cluster_is_asked_once_for_the_same_options(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    make(True, cluster.bootstrap, topic="there")
    monkeypatch.setattr(raftlog, "Admin", None)
    make(True, cluster.bootstrap, topic="there")


def test_a_cluster_that_is_away_is_no_reason_to_refuse(caplog: pytest.LogCaptureFixture) -> None:
    """Its tasks wait for it, as they would in the middle of a query."""
    with caplog.at_level(logging.WARNING, "pyspark_raftlog.options"):
        make(True, "127.0.0.1:1", topic="there")
    assert "could not be asked" in caplog.text


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_partition_of_the_source_that_the_topic_does_not_have_names_the_column(
    cluster: Cluster, delivery: str
) -> None:
    """A query from a topic of 12 partitions to one of fewer: the rows carry their old number."""
    options = {"bootstrap.servers": cluster.bootstrap, "topic": "there", "delivery": delivery}
    writer = DefaultSource(options).writer(
        StructType([*SCHEMA.fields]).add("partition", IntegerType()), overwrite=False
    )
    rows = pa.record_batch({"value": ["a", "b"], "partition": pa.array([0, 11], pa.int32())})
    with pytest.raises(InvalidPartitions, match=r'no partition 11; .* column partition.*frame\.drop\("partition"\)'):
        writer.write(iter([rows]))
