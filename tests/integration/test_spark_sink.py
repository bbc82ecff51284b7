"""The Spark sink against a real server: streaming and batch, what arrives, what is refused."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import raftlog
from raftlog.testing import Cluster

pytestmark = pytest.mark.spark
_WAIT_S = 240


@pytest.fixture
def topic(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    name = f"topic-{abs(hash(request.node.nodeid))}"
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=3, timeout=60)
    return name


def read_all(bootstrap: str, topic: str, rows: int = 0) -> pa.Table:
    """Return what there is, once it is so many rows: a commit is told of moments before all of it can be read."""
    deadline = time.monotonic() + _WAIT_S
    while (found := read_now(bootstrap, topic)).num_rows < rows:
        assert time.monotonic() < deadline, f"only {found.num_rows} of {rows} rows can be read after {_WAIT_S:g} s"
        time.sleep(0.1)
    return found


def read_now(bootstrap: str, topic: str) -> pa.Table:
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
    found = read_all(cluster.bootstrap, topic, 10_000)
    assert sorted(found["value"].to_pylist()) == sorted(f"value {number}".encode() for number in range(10_000))
    by_key = dict(zip(found["key"].to_pylist(), found["partition"].to_pylist(), strict=True))
    with raftlog.Producer(cluster.bootstrap) as producer:
        for key in (b"0", b"17", b"9999"):
            assert producer.send(topic, b"", key=key).result(60).partition == by_key[key]


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
    rows = {row["partition"]: row for row in read_all(cluster.bootstrap, topic, 2).to_pylist()}
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
            admin.create_topic(other, timeout=60)
    frame = spark.range(1000).selectExpr(
        f"concat('{topic}-', if(id % 3 = 0, 'a', 'b')) as topic", "cast(id as string) value"
    )
    writer = frame.write.format("raftlog").mode("append").option("bootstrap.servers", cluster.bootstrap)
    writer.save()
    for other, wanted in zip(others, (range(0, 1000, 3), [n for n in range(1000) if n % 3]), strict=True):
        values = read_all(cluster.bootstrap, other, len(wanted))["value"].to_pylist()
        assert sorted(values) == sorted(str(number).encode() for number in wanted)
    writer.option("topic", topic).save()
    assert read_all(cluster.bootstrap, topic, 1000).num_rows == 1000


@pytest.mark.parametrize(
    ("options", "columns", "words"),
    [
        ({}, "id", "the query has no column value, only id"),
        ({}, "cast(id as string) value, id as vlaue", "did you mean value?"),
        ({}, "id as value", "column value has the type bigint, expected binary or string"),
        ({"linger": "5"}, "cast(id as string) value", "did you mean linger.ms?"),
        ({"delivery": "exactly"}, "cast(id as string) value", "expected exactly-once (the default) or at-least-once"),
        ({"acks": "1"}, "cast(id as string) value", "is not exactly once"),
        ({"txn.version": "1"}, "cast(id as string) value", "is for batch writes"),
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


def test_rows_with_and_without_a_key_keep_their_order(spark: Any, cluster: Cluster) -> None:
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("mixed-keys", timeout=60)
    frame = spark.range(0, 1000, numPartitions=1).selectExpr(
        "if(id % 2 = 0, 'k', null) as key", "format_string('%04d', id) as value"
    )
    frame.write.format("raftlog").mode("append").option("bootstrap.servers", cluster.bootstrap).option(
        "topic", "mixed-keys"
    ).save()
    values = read_all(cluster.bootstrap, "mixed-keys", 1000)["value"].to_pylist()
    assert values == [b"%04d" % n for n in range(1000)]


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


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_stream_goes_on_over_a_killed_server(spark: Any, tmp_path: Path, delivery: str) -> None:
    """With at-least-once delivery, rows of a repeated task may be there twice, but none is missing; exactly once has no
    repeats."""
    rows_per_batch = 20_000
    with Cluster() as cluster:
        with raftlog.Admin(cluster.bootstrap) as admin:
            admin.create_topic("t", partitions=3, timeout=60)
        query = (
            spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", rows_per_batch)
            .load()
            .selectExpr("cast(value as string) as value")
            .writeStream.format("raftlog")
            .option("bootstrap.servers", cluster.bootstrap)
            .option("topic", "t")
            .option("delivery", delivery)
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
        values = Counter(read_all(cluster.bootstrap, "t", committed * rows_per_batch)["value"].to_pylist())
    missing = [number for number in range(committed * rows_per_batch) if str(number).encode() not in values]
    assert missing == []
    if delivery == "exactly-once":
        assert max(values.values()) == 1


def files_of(spark: Any, directory: Path, count: int, rows: int) -> None:
    for number in range(count):
        frame = spark.range(number * rows, (number + 1) * rows, numPartitions=2)
        frame.selectExpr("cast(id as string) as value").write.mode("overwrite").parquet(str(directory / str(number)))


def run_files(
    spark: Any, cluster: Cluster, source: Path, checkpoint: Path, topic: str, partitions: int, **options: str
) -> Any:
    """Stream what is new in `source`, in other partitions and another order every time."""
    query = (
        spark.readStream.schema("value string")
        .option("recursiveFileLookup", "true")
        .option("maxFilesPerTrigger", 2)
        .parquet(str(source))
        .repartition(partitions)
        .writeStream.format("raftlog")
        .option("bootstrap.servers", cluster.bootstrap)
        .option("topic", topic)
        .option("checkpointLocation", str(checkpoint))
        .options(**options)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(_WAIT_S)
    return query


def test_batches_that_spark_replays_are_there_once(spark: Any, cluster: Cluster, topic: str, tmp_path: Path) -> None:
    """As after a driver that died between the sink's commit and its own note of it: the note is gone, all of them
    even, and partitions and order differ."""
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    files_of(spark, source, 3, 700)
    run_files(spark, cluster, source, checkpoint, topic, 2)
    assert read_all(cluster.bootstrap, topic, 2100).num_rows == 2100
    commits = sorted((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    assert len(commits) >= 2
    for path in (commits[-1], checkpoint / "commits" / f".{commits[-1].name}.crc"):
        path.unlink(missing_ok=True)
    query = run_files(spark, cluster, source, checkpoint, topic, 5)
    assert query.exception() is None
    assert read_all(cluster.bootstrap, topic).num_rows == 2100
    files_of(spark, tmp_path / "more", 1, 10)
    (tmp_path / "more" / "0").rename(source / "more")
    run_files(spark, cluster, source, checkpoint, topic, 3)
    assert read_all(cluster.bootstrap, topic, 2110).num_rows == 2110


def test_a_new_checkpoint_under_an_old_name_is_refused(
    spark: Any, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    """Its batches begin at 0 again, and would be taken for batches that exist already."""
    source = tmp_path / "in"
    files_of(spark, source, 1, 10)
    run_files(spark, cluster, source, tmp_path / "one", topic, 1, **{"txn.app.id": topic})
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match=r"txn\.app\.id=.* is in use"):
        run_files(spark, cluster, source, tmp_path / "two", topic, 1, **{"txn.app.id": topic})
    assert read_all(cluster.bootstrap, topic, 10).num_rows == 10


def test_a_batch_write_that_fails_leaves_nothing(spark: Any, cluster: Cluster, topic: str) -> None:
    from pyspark.errors import PySparkException

    frame = spark.range(0, 100_000, numPartitions=4).selectExpr(
        "cast(if(id = 99999, raise_error('the last row'), id) as string) as value"
    )
    writer = frame.write.format("raftlog").mode("append").option("bootstrap.servers", cluster.bootstrap)
    with pytest.raises(PySparkException, match="the last row"):
        writer.option("topic", topic).save()
    with raftlog.Producer(cluster.bootstrap) as producer:
        for partition in range(3):
            producer.send(topic, b"behind", partition=partition).result(60)
    deadline = time.monotonic() + _WAIT_S
    while (found := read_all(cluster.bootstrap, topic)["value"].to_pylist()) != [b"behind"] * 3:
        assert time.monotonic() < deadline, (
            f"after {_WAIT_S:g} s {len(found)} rows can be read, but only the three sent after the failed save must be"
        )
        time.sleep(0.1)


def test_a_numbered_batch_write_happens_once(spark: Any, cluster: Cluster, topic: str) -> None:
    for version in (1, 1, 2, 1):
        spark.range(50).selectExpr(f"concat('{version}-', id) as value").write.format("raftlog").mode("append").options(
            **{
                "bootstrap.servers": cluster.bootstrap,
                "topic": topic,
                "txn.app.id": f"backfill-{topic}",
                "txn.version": str(version),
            }
        ).save()
    values = Counter(read_all(cluster.bootstrap, topic, 100)["value"].to_pylist())
    assert values == Counter(f"{version}-{number}".encode() for version in (1, 2) for number in range(50))


def test_the_recipe_of_foreach_batch_outlives_its_checkpoint(spark: Any, cluster: Cluster, tmp_path: Path) -> None:
    """As docs/spark.md has it. Batches of a new checkpoint begin at 0 again, and must not pass for repetitions."""
    page = (Path(__file__).parents[2] / "docs/spark.md").read_text()
    [recipe] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def to_both" in block]
    names: dict[str, Any] = {}
    exec(recipe.replace("127.0.0.1:9092", cluster.bootstrap), names)
    with raftlog.Admin(cluster.bootstrap) as admin:
        for name in ("orders", "audit"):
            admin.create_topic(name, timeout=60)
    source = tmp_path / "in"

    def add(*values: str) -> None:
        spark.createDataFrame([(value,) for value in values], "value string").coalesce(1).write.mode("append").parquet(
            str(source)
        )

    def run(checkpoint: str) -> None:
        stream = (
            spark.readStream.schema("value string")
            .parquet(str(source))
            .writeStream.foreachBatch(names["to_both"])
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert stream.awaitTermination(_WAIT_S)
        assert stream.exception() is None

    add("a", "b")
    run("first")
    for note in (tmp_path / "first/commits").glob("*0*"):
        note.unlink()  # as if the driver had died before it noted batch 0
    run("first")
    for name in ("orders", "audit"):
        assert sorted(read_all(cluster.bootstrap, name, 2)["value"].to_pylist()) == [b"a", b"b"], (
            "a batch that is run again must not be written twice"
        )
    add("c")
    run("second")
    for name in ("orders", "audit"):
        found = sorted(read_all(cluster.bootstrap, name, 5)["value"].to_pylist())
        assert found == [b"a", b"a", b"b", b"b", b"c"], (
            "a query with a new checkpoint must write all rows again, and the new one"
        )


def test_rows_of_every_kind(spark: Any, cluster: Cluster, topic: str) -> None:
    """Null keys and values, empty ones, rows of nearly a MiB, partitions without rows."""
    frame = (
        spark.range(0, 40, numPartitions=8)
        .where("id % 5 = 0 and id > 4")
        .selectExpr(
            "if(id % 2 = 0, null, cast(id as string)) as key",
            "case when id = 5 then null when id = 10 then '' when id = 15 then repeat('x', 900000) "
            "else cast(id as string) end as value",
        )
    )
    frame.write.format("raftlog").mode("append").option("bootstrap.servers", cluster.bootstrap).option(
        "topic", topic
    ).save()
    rows = {(row["key"], row["value"]) for row in read_all(cluster.bootstrap, topic, 7).to_pylist()}
    assert rows == {
        (b"5", None),
        (None, b""),
        (b"15", b"x" * 900_000),
        (None, b"20"),
        (b"25", b"25"),
        (None, b"30"),
        (b"35", b"35"),
    }


@pytest.mark.parametrize(("mode", "words"), [("complete", "a query can only append"), ("update", "(?i)update mode")])
def test_other_output_modes_than_append_are_refused(
    spark: Any, cluster: Cluster, topic: str, tmp_path: Path, mode: str, words: str
) -> None:
    from pyspark.errors import PySparkException

    stream = spark.readStream.format("rate").option("rowsPerSecond", 10).load().groupBy("value").count()
    writer = writer_of(stream, cluster, topic, tmp_path).outputMode(mode)
    with pytest.raises(PySparkException, match=words):
        writer.start().awaitTermination(_WAIT_S)
    assert read_all(cluster.bootstrap, topic).num_rows == 0


def test_the_continuous_trigger_commits_nothing(spark: Any, cluster: Cluster, topic: str, tmp_path: Path) -> None:
    """It writes nothing and reports no error; Spark does not end the query, but records no epoch."""
    stream = spark.readStream.format("rate").option("rowsPerSecond", 1000).option("numPartitions", 1).load()
    query = writer_of(stream, cluster, topic, tmp_path).trigger(continuous="1 second").start()
    try:
        query.awaitTermination(6)
    finally:
        query.stop()
    assert read_all(cluster.bootstrap, topic).num_rows == 0
    assert list((tmp_path / "commits").glob("[0-9]*")) == []


def writer_of(stream: Any, cluster: Cluster, topic: str, checkpoint: Path) -> Any:
    return (
        stream.selectExpr("cast(value as string) as value")
        .writeStream.format("raftlog")
        .option("bootstrap.servers", cluster.bootstrap)
        .option("topic", topic)
        .option("checkpointLocation", str(checkpoint))
    )


def wait_for_batches(query: Any, count: int) -> None:
    deadline = time.monotonic() + _WAIT_S
    while len(query.recentProgress) < count:
        assert query.exception() is None
        assert time.monotonic() < deadline, query.status
        time.sleep(0.05)
