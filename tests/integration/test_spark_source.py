"""The Spark source against a real server: streaming and batch, what is read, what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark_raftlog import lag

import raftlog
from raftlog.testing import Cluster
from raftlog.types import TopicPartition

pytestmark = pytest.mark.spark
_WAIT_S = 240
_names = count()


@pytest.fixture
def topic(cluster: Cluster) -> str:
    return make_topic(cluster)


def make_topic(cluster: Cluster, partitions: int = 3, **configs: str) -> str:
    name = f"source.{next(_names)}"
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(
            name, partitions=partitions, configs={k.replace("_", "."): v for k, v in configs.items()}, timeout=60
        )
    return name


def produce(cluster: Cluster, topic: str, numbers: range, partitions: int = 3) -> None:
    """Send each number as its text to the partition that it leaves as a rest."""
    with raftlog.Producer(cluster.bootstrap) as producer:
        for number in numbers:
            producer.send(topic, str(number).encode(), partition=number % partitions)
        producer.flush()


def reader(spark: Any, cluster: Cluster, topic: str | None, **options: object) -> Any:
    named = {"bootstrap.servers": cluster.bootstrap, "subscribe": topic, **options}
    return spark.read.format("raftlog").options(**{key: value for key, value in named.items() if value is not None})


def numbers_of(frame: Any) -> list[int]:
    return sorted(int(row[0]) for row in frame.selectExpr("cast(value as string)").collect())


class Stream:
    """A query into memory, whose checkpoint stays, so that it can be started again."""

    def __init__(self, spark: Any, cluster: Cluster, topic: str, directory: Path, **options: object) -> None:
        self._spark, self._directory = spark, directory
        named = {"bootstrap.servers": cluster.bootstrap, "subscribe": topic, "startingOffsets": "earliest", **options}
        self.options = {key: str(value) for key, value in named.items() if value is not None}
        self.rows: list[Any] = []
        self.batches: list[tuple[int, int, int]] = []
        """Id, rows and tasks of each batch."""

    def start(self, **trigger: object) -> Any:
        frame = self._spark.readStream.format("raftlog").options(**self.options).load()

        def note(batch: Any, batch_id: int) -> None:
            found = batch.selectExpr("topic", "partition", "offset", "cast(value as string)").collect()
            self.batches.append((batch_id, len(found), batch.rdd.getNumPartitions()))
            self.rows += [tuple(row) for row in found]

        writer = frame.writeStream.foreachBatch(note).option("checkpointLocation", str(self._directory))
        return (writer.trigger(**trigger) if trigger else writer).start()

    def run(self) -> list[dict[str, Any]]:
        """Read the available records, and return Spark's reports."""
        query = self.start(availableNow=True)
        try:
            assert query.awaitTermination(_WAIT_S)
        finally:
            query.stop()
        return [json.loads(progress.json) for progress in query.recentProgress]

    @property
    def numbers(self) -> list[int]:
        return sorted(int(value) for *_, value in self.rows)


def wait_until(condition: Callable[[], bool], query: Any) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        assert query.exception() is None
        assert time.monotonic() < deadline, query.status
        time.sleep(0.05)


# Batch queries


def test_every_column_is_there_as_kafka_has_it(spark: Any, cluster: Cluster, topic: str) -> None:
    with raftlog.Producer(cluster.bootstrap) as producer:
        full = producer.send(
            topic, b"v", key=b"k", partition=2, headers=[("h", b"1"), ("h", None)], timestamp_ms=1234567
        )
        producer.send(topic, None, partition=1, timestamp_ms=1).result(60)
        producer.send(topic, b"", key=b"", partition=1, timestamp_ms=2).result(60)
        assert full.result(60).offset == 0
    frame = reader(spark, cluster, topic, includeHeaders="true").load()
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    rows = [row.asDict(recursive=True) for row in frame.orderBy("partition", "offset").collect()]
    assert [(row["partition"], row["offset"], row["key"], row["value"]) for row in rows] == [
        (1, 0, None, None),
        (1, 1, b"", b""),
        (2, 0, b"k", b"v"),
    ]
    assert rows[2]["headers"] == [{"key": "h", "value": b"1"}, {"key": "h", "value": None}]
    assert [row["headers"] for row in rows[:2]] == [None, None]
    assert {row["topic"] for row in rows} == {topic}
    assert {row["timestampType"] for row in rows} == {0}
    stamped = frame.selectExpr("partition", "offset", "unix_millis(timestamp)").orderBy("partition", "offset").collect()
    assert [row[2] for row in stamped] == [1, 2, 1234567]
    assert "headers" not in reader(spark, cluster, topic).load().columns


def test_a_topic_that_stamps_records_itself_says_so(spark: Any, cluster: Cluster) -> None:
    topic = make_topic(cluster, message_timestamp_type="LogAppendTime")
    with raftlog.Producer(cluster.bootstrap) as producer:
        stamp_ms = producer.send(topic, b"v", timestamp_ms=1).result(60).timestamp_ms
    row = reader(spark, cluster, topic).load().selectExpr("timestampType", "unix_millis(timestamp)").first()
    assert tuple(row) == (1, stamp_ms)
    assert stamp_ms > 1_600_000_000_000


def test_topics_are_named_matched_or_assigned(spark: Any, cluster: Cluster) -> None:
    names = [make_topic(cluster, 2, retention_ms="-1") for _ in range(3)]
    for index, name in enumerate(names):
        produce(cluster, name, range(index * 10, index * 10 + 10), 2)
    two = reader(spark, cluster, f"{names[0]}, {names[2]}").load()
    assert numbers_of(two) == [*range(10), *range(20, 30)]
    pattern = "|".join(name.replace(".", r"\.") for name in names[:2])
    assert numbers_of(reader(spark, cluster, None, subscribePattern=pattern).load()) == [*range(20)]
    assert numbers_of(reader(spark, cluster, None, subscribePattern="no such.*").load()) == []
    assigned = json.dumps({names[0]: [1], names[1]: [0]})
    found = numbers_of(reader(spark, cluster, None, assign=assigned).load())
    assert found == [*range(1, 10, 2), *range(10, 20, 2)]


def test_a_batch_query_reads_between_offsets_or_times(spark: Any, cluster: Cluster) -> None:
    topic = make_topic(cluster, 2, retention_ms="-1")
    with raftlog.Producer(cluster.bootstrap) as producer:
        for number in range(40):
            producer.send(topic, str(number).encode(), partition=number % 2, timestamp_ms=1000 + number)
        producer.flush()

    def read(**options: object) -> list[int]:
        given = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in options.items()}
        return numbers_of(reader(spark, cluster, topic, **given).load())

    assert read(startingOffsets={topic: {"0": 15, "1": -2}}, endingOffsets={topic: {"0": -1, "1": 3}}) == [
        *(1, 3, 5),
        *range(30, 40, 2),
    ]
    assert read(startingTimestamp=1035) == [35, 36, 37, 38, 39]
    assert read(startingTimestamp=1010, endingTimestamp=1013) == [10, 11, 12]
    by_partition = {topic: {"0": 1036, "1": 1037}}
    assert read(startingOffsetsByTimestamp=by_partition) == [36, 37, 38, 39]
    assert read(endingOffsetsByTimestamp={topic: {"0": 1002, "1": 1003}}) == [0, 1]
    beyond = {topic: {"0": 1036, "1": 9999}}
    latest = {"startingOffsetsByTimestampStrategy": "latest"}
    assert read(startingOffsetsByTimestamp=beyond, **latest) == [36, 38]
    assert read(startingOffsets={topic: {"0": 20, "1": 20}}) == []


def test_small_partitions_make_more_tasks(spark: Any, cluster: Cluster) -> None:
    topic = make_topic(cluster, 2)
    produce(cluster, topic, range(1000), 2)
    frame = reader(spark, cluster, topic, minPartitions="7").load()
    assert frame.rdd.getNumPartitions() in (7, 8)
    assert numbers_of(frame) == [*range(1000)]
    frame = reader(spark, cluster, topic, maxRecordsPerPartition="100").load()
    assert frame.rdd.getNumPartitions() == 10
    assert numbers_of(frame) == [*range(1000)]


def test_empty_topics_and_partitions_are_read(spark: Any, cluster: Cluster, topic: str) -> None:
    assert reader(spark, cluster, topic).load().count() == 0
    produce(cluster, topic, range(0, 30, 3))  # all in partition 0
    assert reader(spark, cluster, topic).load().count() == 10


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ("value binary", {"value": b"7"}),
        ("offset bigint, value binary, partition int", {"offset": 0, "value": b"7", "partition": 1}),
        ("headers array<struct<key: string, value: binary>>", {"headers": None}),
        ("TOPIC string, timestampType int", {"TOPIC": "t", "timestampType": 0}),
    ],
)
def test_a_query_may_say_which_columns_it_wants(
    spark: Any, cluster: Cluster, topic: str, schema: str, found: dict[str, object]
) -> None:
    produce(cluster, topic, range(7, 8))
    row = reader(spark, cluster, topic).schema(schema).load().first().asDict()
    assert row == {**found, **({"TOPIC": topic} if "TOPIC" in found else {})}


def test_huge_rows_arrive_whole(spark: Any, cluster: Cluster) -> None:
    size = 6 << 20
    topic = make_topic(cluster, 1, max_message_bytes=str(8 << 20))
    with raftlog.Producer(cluster.bootstrap, max_request_size=8 << 20) as producer:
        for letter in b"abc":
            producer.send(topic, bytes([letter]) * size).result(60)
    frame = reader(spark, cluster, topic).load().selectExpr("length(value)", "cast(substr(value, -1, 1) as string)")
    assert [tuple(row) for row in frame.collect()] == [(size, letter) for letter in "abc"]


# Streaming queries


def test_a_stream_reads_everything_once_in_limited_batches_and_goes_on_after_a_restart(
    spark: Any, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    produce(cluster, topic, range(900))
    stream = Stream(spark, cluster, topic, tmp_path, maxOffsetsPerTrigger=400, minPartitions=5)
    reports = stream.run()
    assert stream.numbers == [*range(900)]
    assert [rows for _, rows, _ in stream.batches][:2] == [399, 399]
    assert {tasks for _, _, tasks in stream.batches} >= {6}  # the least number above 5 that shares evenly
    source = reports[0]["sources"][0]
    end, latest = source["endOffset"][topic], source["latestOffset"][topic]
    assert (end, latest) == (dict.fromkeys("012", 133), dict.fromkeys("012", 300)), (
        "the progress report must show both the end of the batch and the end of the topic"
    )
    behind = [lag(StreamingQueryProgress.fromJson(report)) for report in reports]
    assert behind[0] == {TopicPartition(topic, partition): 167 for partition in range(3)}
    assert set(behind[-1].values()) == {0}
    produce(cluster, topic, range(900, 1000))
    stream.run()
    assert stream.numbers == [*range(1000)]
    for partition in range(3):
        offsets = [row[2] for row in stream.rows if row[1] == partition]
        assert offsets == sorted(offsets)
    assert stream.run() == [] or stream.numbers == [*range(1000)]


def test_a_stream_follows_what_comes_and_new_partitions(
    spark: Any, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    produce(cluster, topic, range(30))
    stream = Stream(spark, cluster, topic, tmp_path, **{"metadata.max.age.ms": 200})
    query = stream.start()
    try:
        wait_until(lambda: len(stream.rows) >= 30, query)
        produce(cluster, topic, range(30, 60))
        wait_until(lambda: len(stream.rows) >= 60, query)
        with raftlog.Admin(cluster.bootstrap) as admin:
            admin.create_partitions(topic, 5)
        produce(cluster, topic, range(60, 100), partitions=5)
        wait_until(lambda: len(stream.rows) >= 100, query)
    finally:
        query.stop()
    assert stream.numbers == [*range(100)]


def test_available_now_stops_where_the_topic_ended_when_it_began(
    spark: Any, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    produce(cluster, topic, range(90))
    stream = Stream(spark, cluster, topic, tmp_path, maxOffsetsPerTrigger=30, minOffsetsPerTrigger=25)
    query = stream.start(availableNow=True)
    wait_until(lambda: bool(stream.rows), query)
    produce(cluster, topic, range(90, 120))
    assert query.awaitTermination(_WAIT_S)
    assert stream.numbers == [*range(90)]
    stream.run()
    assert stream.numbers == [*range(120)]


def test_latest_loses_nothing_when_batch_0_is_repeated(
    spark: Any, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    """Spark asks `initialOffset` again to repeat batch 0, and by then `latest` is somewhere else."""
    produce(cluster, topic, range(30))
    stream = Stream(spark, cluster, topic, tmp_path, startingOffsets="latest")
    query = stream.start()
    try:
        wait_until(lambda: query.lastProgress is not None, query)
        produce(cluster, topic, range(30, 60))
        wait_until(lambda: len(stream.rows) >= 30, query)
    finally:
        query.stop()
    assert stream.numbers == [*range(30, 60)]
    for log in ("offsets", "commits"):  # as if it had died in batch 0
        for path in (tmp_path / log).iterdir():
            if log == "commits" or path.name.strip(".").split(".")[0] != "0":
                path.unlink()
    stream.rows.clear()
    produce(cluster, topic, range(60, 90))
    stream.run()
    assert stream.numbers == [*range(30, 90)]


def test_small_triggers_wait_for_company(spark: Any, cluster: Cluster, topic: str, tmp_path: Path) -> None:
    produce(cluster, topic, range(9))
    stream = Stream(spark, cluster, topic, tmp_path, minOffsetsPerTrigger=100, maxTriggerDelay="1h")
    query = stream.start()
    try:
        time.sleep(3)
        assert stream.rows == []
        produce(cluster, topic, range(9, 120))
        wait_until(lambda: bool(stream.rows), query)
    finally:
        query.stop()
    assert [rows for _, rows, _ in stream.batches if rows] == [120] or len(stream.rows) >= 100
    delayed = Stream(spark, cluster, topic, tmp_path / "2", minOffsetsPerTrigger=1000, maxTriggerDelay="2s")
    query = delayed.start()
    try:
        wait_until(lambda: len(delayed.rows) == 120, query)
    finally:
        query.stop()


def test_only_committed_records_are_read_unless_told_otherwise(
    spark: Any, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    produce(cluster, topic, range(30))
    with raftlog.Producer(cluster.bootstrap, transactional_id="source") as producer:

        def send(numbers: range) -> None:
            producer.begin_transaction()
            for number in numbers:
                producer.send(topic, str(number).encode(), partition=number % 3)
            producer.flush()

        send(range(30, 60))
        producer.abort_transaction()
        send(range(60, 90))
        producer.commit_transaction()
        send(range(90, 120))
        committed = [*range(30), *range(60, 90)]
        assert numbers_of(reader(spark, cluster, topic).load()) == committed
        uncommitted = reader(spark, cluster, topic, **{"kafka.isolation.level": "read_uncommitted"}).load()
        assert numbers_of(uncommitted) == [*range(120)]
        stream = Stream(spark, cluster, topic, tmp_path, maxOffsetsPerTrigger=20, minPartitions=4)
        stream.run()
        assert stream.numbers == committed
        producer.commit_transaction()
    deadline = time.monotonic() + _WAIT_S
    while len(stream.rows) < 90:  # a commit is told of moments before all of it can be read
        assert time.monotonic() < deadline, stream.numbers
        stream.run()
    assert stream.numbers == [*committed, *range(90, 120)]


# What is gone


def test_a_topic_made_again_ends_the_query_unless_told_otherwise(
    spark: Any, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    produce(cluster, topic, range(30))
    stream = Stream(spark, cluster, topic, tmp_path)
    stream.run()
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.delete_topic(topic)
        admin.create_topic(topic, partitions=2)
    produce(cluster, topic, range(100, 200), 2)
    assert "deleted and created again" in failure_of(stream)
    stream.options["failOnDataLoss"] = "false"
    stream.rows.clear()
    stream.run()
    assert stream.numbers == [*range(100, 200)]


def test_expired_records_end_the_query_unless_told_otherwise(
    spark: Any, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    produce(cluster, topic, range(30))
    stream = Stream(spark, cluster, topic, tmp_path)
    stream.run()
    produce(cluster, topic, range(30, 90))
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.delete_records({TopicPartition(topic, 0): 20})
    text = failure_of(stream)
    assert "failOnDataLoss" in text
    assert f"{topic}-0" in text
    stream.options["failOnDataLoss"] = "false"
    stream.rows.clear()
    stream.run()
    assert stream.numbers == [number for number in range(30, 90) if number % 3 or number >= 60]


def test_a_topic_that_goes_away_ends_the_query(spark: Any, cluster: Cluster, topic: str, tmp_path: Path) -> None:
    produce(cluster, topic, range(30))
    stream = Stream(spark, cluster, topic, tmp_path)
    stream.run()
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.delete_topic(topic)
    assert "partitions are gone" in failure_of(stream)


def failure_of(stream: Stream) -> str:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        stream.run()
    return str(caught.value)


# What cannot be


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": None}, "give exactly one of the options subscribe"),
        ({"subscribe": "nowhere"}, "topic 'nowhere' does not exist"),
        ({"startingOffset": "earliest"}, "did you mean startingOffsets?"),
        ({"startingOffsets": '{"t": {"0": 1}}'}, "lacks"),
        ({"kafka.auto.offset.reset": "latest"}, "startingOffsets sets where a query begins"),
        ({"fetch.max.bytes": "many"}, "fetch.max.bytes"),
    ],
)
def test_what_cannot_be_ends_the_query_when_it_starts(
    spark: Any, cluster: Cluster, topic: str, tmp_path: Path, streaming: bool, options: dict[str, Any], words: str
) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        if streaming:
            Stream(spark, cluster, topic, tmp_path, **options).run()
        else:
            reader(spark, cluster, topic, **options).load().collect()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("value string", "column value of the raftlog source has the type binary"),
        ("vlaue binary", "did you mean value?"),
    ],
)
def test_columns_that_the_source_does_not_have_are_refused(
    spark: Any, cluster: Cluster, topic: str, schema: str, words: str
) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        reader(spark, cluster, topic).schema(schema).load().collect()
    assert words in str(caught.value)


def test_a_cluster_that_is_away_at_the_start_is_named(spark: Any, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    for timeout_ms in (500, 5_000, 30_000):  # without time to hear an answer it names nothing
        frame = spark.read.format("raftlog").options(
            **{"bootstrap.servers": "127.0.0.1:1", "subscribe": "t", "default.api.timeout.ms": str(timeout_ms)}
        )
        with pytest.raises(PySparkException) as caught:
            frame.load().collect()
        if "127.0.0.1:1" in str(caught.value):
            break
    assert "127.0.0.1:1" in str(caught.value)


def test_a_cluster_that_goes_away_ends_the_query_with_its_name_and_the_query_goes_on_later(
    spark: Any, tmp_path: Path
) -> None:
    with Cluster() as cluster:
        topic = make_topic(cluster)
        produce(cluster, topic, range(30))
        timeouts = {"default.api.timeout.ms": 2000, "request.timeout.ms": 1000, "kafkaConsumer.pollTimeoutMs": 2000}
        stream = Stream(spark, cluster, topic, tmp_path, **timeouts)
        query = stream.start()
        deadline = time.monotonic() + _WAIT_S
        while len(stream.rows) < 30:
            assert time.monotonic() < deadline, query.status
            if query.exception() is not None:  # a cluster that is slow for a moment has gone away as well
                query = stream.start()
            time.sleep(0.05)
        cluster.kill(1)
        from pyspark.errors import PySparkException

        with pytest.raises(PySparkException, match=cluster.bootstrap.replace(".", r"\.")):
            query.awaitTermination(_WAIT_S)
        cluster.start(1)
        produce(cluster, topic, range(30, 60))
        for name in timeouts:
            del stream.options[name]
        stream.run()
    assert stream.numbers == [*range(60)]
