"""The Spark sink against a real server: streaming and batch, what arrives, what is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import raftlog
from raftlog.testing import Cluster

pytestmark = pytest.mark.spark
_WAIT_S = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    name = f"topic-{abs(hash(request.node.nodeid))}"
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=3)
    return name


def read_all(bootstrap: str, topic: str) -> pa.Table:
    tables = []
    with raftlog.Consumer(bootstrap) as consumer:
        places = consumer.partitions_for(topic)
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        ends = consumer.end_offsets(places)
        while any(consumer.position(place) < ends[place] for place in places):
            tables.append(consumer.poll_arrow(1.0))
    return pa.concat_tables(tables) if tables else pa.table({"value": []})


def test_a_stream_of_several_batches_arrives_exactly(spark: Any, cluster: Cluster, topic: str, tmp_path: Path) -> None:
    source = tmp_path / "in"
    for number in range(4):
        frame = spark.range(number * 2500, (number + 1) * 2500, numPartitions=2)
        frame.selectExpr("cast(id as string) as key", "concat('value ', id) as value").write.parquet(
            str(source / f"{number}")
        )
    stream = (
        spark.readStream.schema("key string, value string")
        .option("maxFilesPerTrigger", 2)
        .option("recursiveFileLookup", "true")
        .parquet(str(source))
        .writeStream.format("raftlog")
        .option("kafka.bootstrap.servers", cluster.bootstrap)
        .option("topic", topic)
        .option("kafka.linger.ms", "1")
        .option("compression.type", "lz4")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert stream.awaitTermination(_WAIT_S)
    assert stream.exception() is None
    assert len([progress for progress in stream.recentProgress if progress["numInputRows"]]) >= 3
    found = read_all(cluster.bootstrap, topic)
    assert sorted(found["value"].to_pylist()) == sorted(f"value {number}".encode() for number in range(10_000))
    by_key = dict(zip(found["key"].to_pylist(), found["partition"].to_pylist(), strict=True))
    with raftlog.Producer(cluster.bootstrap) as producer:
        for key in (b"0", b"17", b"9999"):
            assert producer.send(topic, b"", key=key).result(30).partition == by_key[key]


def test_every_column_arrives(spark: Any, cluster: Cluster, topic: str) -> None:
    frame = spark.sql(
        """
        select 'k' as key, cast('v' as binary) as value, 2 as partition, timestamp_millis(1234567) as timestamp,
               array(struct('h' as key, cast('1' as binary) as value),
                     struct('n' as key, cast(null as binary) as value)) as headers
        union all select null, null, 1, null, null
        """
    )
    frame.write.format("raftlog").mode("append").option("bootstrap.servers", cluster.bootstrap).option(
        "topic", topic
    ).save()
    rows = {row["partition"]: row for row in read_all(cluster.bootstrap, topic).to_pylist()}
    assert sorted(rows) == [1, 2]
    assert (rows[2]["key"], rows[2]["value"]) == (b"k", b"v")
    assert [tuple(header) for header in rows[2]["headers"]] == [("h", b"1"), ("n", None)]
    assert rows[2]["timestamp"].timestamp() == 1234.567
    assert (rows[1]["key"], rows[1]["value"], rows[1]["headers"] or []) == (None, None, [])
    assert rows[1]["timestamp"].year > 2020


def test_rows_go_to_the_topics_of_the_column_unless_the_option_overrides_it(
    spark: Any, cluster: Cluster, topic: str
) -> None:
    others = [f"{topic}-{name}" for name in "ab"]
    with raftlog.Admin(cluster.bootstrap) as admin:
        for other in others:
            admin.create_topic(other)
    frame = spark.range(1000).selectExpr(
        f"concat('{topic}-', if(id % 3 = 0, 'a', 'b')) as topic", "cast(id as string) value"
    )
    writer = frame.write.format("raftlog").mode("append").option("bootstrap.servers", cluster.bootstrap)
    writer.save()
    for other, wanted in zip(others, (range(0, 1000, 3), (n for n in range(1000) if n % 3)), strict=True):
        values = read_all(cluster.bootstrap, other)["value"].to_pylist()
        assert sorted(values) == sorted(str(number).encode() for number in wanted)
    writer.option("topic", topic).save()
    assert read_all(cluster.bootstrap, topic).num_rows == 1000


@pytest.mark.parametrize(
    ("options", "columns", "words"),
    [
        ({}, "id", "there is no column value among id"),
        ({}, "cast(id as string) value, id as vlaue", "did you mean value?"),
        ({}, "id as value", "column value is bigint, expected binary or string"),
        ({"linger": "5"}, "cast(id as string) value", "did you mean linger.ms?"),
        ({"delivery": "exactly-once"}, "cast(id as string) value", "comes with transactions"),
        ({"acks": "some"}, "cast(id as string) value", "acks"),
        ({"asyncProgressTrackingEnabled": "true"}, "cast(id as string) value", "async progress tracking"),
    ],
)
def test_what_cannot_be_ends_the_query_when_it_starts(
    spark: Any, cluster: Cluster, topic: str, tmp_path: Path, options: dict[str, str], columns: str, words: str
) -> None:
    from pyspark.errors import PySparkException

    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    writer = rate.selectExpr("value as id").selectExpr(*columns.split(", ")).writeStream.format("raftlog")
    for key, value in {"bootstrap.servers": cluster.bootstrap, "topic": topic, **options}.items():
        writer = writer.option(key, value)

    def start() -> None:
        writer.option("checkpointLocation", str(tmp_path)).start().awaitTermination(_WAIT_S)

    with pytest.raises(PySparkException) as caught:
        start()
    assert words in str(caught.value)
    assert read_all(cluster.bootstrap, topic).num_rows == 0


def test_complete_mode_and_overwriting_are_refused(spark: Any, cluster: Cluster, topic: str, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    frame = spark.range(3).selectExpr("cast(id as string) value")
    with pytest.raises(PySparkException, match="append"):
        frame.write.format("raftlog").mode("overwrite").option("bootstrap.servers", cluster.bootstrap).option(
            "topic", topic
        ).save()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("schema", [None, "value binary"])
def test_reading_is_refused_in_words(spark: Any, cluster: Cluster, streaming: bool, schema: str | None) -> None:
    from pyspark.errors import PySparkException

    source = (spark.readStream if streaming else spark.read).format("raftlog")
    source = source.option("bootstrap.servers", cluster.bootstrap).option("subscribe", "t")
    if schema is not None:
        source = source.schema(schema)

    def read() -> None:
        frame = source.load()
        if streaming:
            frame.writeStream.format("noop").start().awaitTermination(_WAIT_S)
        else:
            frame.collect()

    with pytest.raises(PySparkException) as caught:
        read()
    assert "has the sink only" in str(caught.value)
    assert "the source comes with transactions" in str(caught.value)
    assert "is not implemented" not in str(caught.value)


def test_rows_with_and_without_a_key_keep_their_order(spark: Any, cluster: Cluster) -> None:
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("mixed-keys")
    frame = spark.range(0, 1000, numPartitions=1).selectExpr(
        "if(id % 2 = 0, 'k', null) as key", "format_string('%04d', id) as value"
    )
    frame.write.format("raftlog").mode("append").option("bootstrap.servers", cluster.bootstrap).option(
        "topic", "mixed-keys"
    ).save()
    assert read_all(cluster.bootstrap, "mixed-keys")["value"].to_pylist() == [b"%04d" % n for n in range(1000)]


def test_without_a_mode_spark_itself_asks_for_append(spark: Any, cluster: Cluster, topic: str) -> None:
    """docs/spark.md says so; a Spark that does otherwise makes that line wrong."""
    from pyspark.errors import PySparkException

    writer = spark.range(3).selectExpr("cast(id as string) value").write.format("raftlog")
    with pytest.raises(PySparkException, match=r"(?i)ErrorIfExists.*append"):
        writer.option("bootstrap.servers", cluster.bootstrap).option("topic", topic).save()


def test_a_topic_that_is_not_there_fails_the_query_and_names_it(spark: Any, cluster: Cluster) -> None:
    from pyspark.errors import PySparkException

    frame = spark.range(3).selectExpr("cast(id as string) value")
    with pytest.raises(PySparkException, match="nowhere"):
        frame.write.format("raftlog").mode("append").option("bootstrap.servers", cluster.bootstrap).option(
            "topic", "nowhere"
        ).option("max.block.ms", "500").save()


def test_a_stream_goes_on_over_a_killed_server_and_loses_nothing(spark: Any, tmp_path: Path) -> None:
    """At least once: what a task repeats may be there twice, but everything is there."""
    rows_per_batch = 20_000
    with Cluster() as cluster:
        with raftlog.Admin(cluster.bootstrap) as admin:
            admin.create_topic("t", partitions=3)
        query = (
            spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", rows_per_batch)
            .load()
            .selectExpr("cast(value as string) as value")
            .writeStream.format("raftlog")
            .option("bootstrap.servers", cluster.bootstrap)
            .option("topic", "t")
            .option("checkpointLocation", str(tmp_path))
            .start()
        )
        try:
            wait_for_batches(query, 2)
            for _ in range(2):
                cluster.kill(1)
                cluster.start(1)
                wait_for_batches(query, len(query.recentProgress) + 2)
        finally:
            query.stop()
        committed = query.lastProgress["batchId"] + 1
        values = set(read_all(cluster.bootstrap, "t")["value"].to_pylist())
    missing = [number for number in range(committed * rows_per_batch) if str(number).encode() not in values]
    assert missing == []


def wait_for_batches(query: Any, count: int) -> None:
    deadline = time.monotonic() + _WAIT_S
    while len(query.recentProgress) < count:
        assert query.exception() is None
        assert time.monotonic() < deadline, query.status
        time.sleep(0.05)
