"""The plans of the source, against a cluster that is a dictionary."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows
from pyspark_raftlog import DefaultSource, source
from pyspark_raftlog import source as planner
from pyspark_raftlog import source as tasks
from pyspark_raftlog.ranges import Range
from pyspark_raftlog.source import DataLoss

from raftlog import _range_reader
from raftlog._core.cluster import PartitionView, TopicView
from raftlog.errors import OffsetOutOfRange, UnknownTopicId, UnknownTopicOrPartition
from raftlog.types import OffsetAndTimestamp, TopicPartition

LATEST, EARLIEST = -1, -2
ALL = ReadAllAvailable()


@dataclass
class Topic:
    """A topic: its id, and where each partition begins and ends."""

    topic_id: bytes
    bounds: list[tuple[int, int]] = field(default_factory=list)


class Cluster:
    """Stands in for `RangeReader`: every one made sees the same topics."""

    topics_now: ClassVar[dict[str, Topic]]
    on_find: ClassVar[Callable[[], None]]
    made: ClassVar[list[Cluster]]

    def __init__(self, bootstrap: str, config: Mapping[str, str]) -> None:
        self.bootstrap, self.config = bootstrap, config
        self.closed = False
        self.made.append(self)

    def topics(
        self, names: Iterable[str] | None = None, pattern: re.Pattern[str] | None = None, *, fresh: bool = False
    ) -> dict[str, TopicView]:
        return {
            name: TopicView(name, topic.topic_id, tuple(PartitionView(n, 1, 0) for n in range(len(topic.bounds))))
            for name, topic in self.topics_now.items()
            if (pattern.fullmatch(name) if pattern is not None else name in set(names or ()))
        }

    def topic_id(self, name: str) -> bytes | None:
        return self.topics_now[name].topic_id if name in self.topics_now else None

    def find(self, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """A record's time is its offset here."""
        found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
        for part, at in wanted.items():
            first, last = self.topics_now[part.topic].bounds[part.partition]
            offset = last if at == LATEST else first if at == EARLIEST else max(at, first)
            found[part] = None if at >= 0 and offset >= last else OffsetAndTimestamp(offset, offset)
        type(self).on_find()
        return found

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> type[Cluster]:
    monkeypatch.setattr(_range_reader, "RangeReader", Cluster)
    monkeypatch.setattr(planner, "_AGAIN_S", 0.0)
    Cluster.topics_now = {"t": Topic(b"\1", [(0, 100), (0, 50)])}
    Cluster.on_find = lambda: None
    Cluster.made = []
    return Cluster


def stream(**options: object) -> Any:
    given = {"bootstrap.servers": "a:1", "subscribe": "t", "startingOffsets": "earliest", **options}
    made = DefaultSource({key: str(value) for key, value in given.items() if value is not None})
    return made.streamReader(made.schema())


def offsets(*numbers: int, topic: str = "t", topic_id: str = "01") -> dict[str, Any]:
    positions = {str(partition): number for partition, number in enumerate(numbers)}
    return {topic: positions, "@topic_ids": {topic: topic_id}}


def spans(ranges: Iterable[Any]) -> list[tuple[str, int, int, int]]:
    return [(each.topic, each.partition, each.start, each.end) for each in ranges]


def test_nothing_is_asked_of_the_cluster_before_the_query_runs(cluster: type[Cluster]) -> None:
    made = stream()
    pickle.loads(pickle.dumps(made))  # noqa: S301 # as Spark sends it to the tasks
    assert cluster.made == []
    made.stop()
    made = stream()
    made.initialOffset()
    made.stop()
    assert [reader.closed for reader in cluster.made] == [True]


def test_a_stream_is_read_in_batches_that_fit_together() -> None:
    made = stream()
    start = made.initialOffset()
    assert start == offsets(0, 0)
    end = made.latestOffset(start, ReadMaxRows(30))
    assert end == offsets(20, 10)
    assert spans(made.partitions(start, end)) == [("t", 0, 0, 20), ("t", 1, 0, 10)]
    last = made.latestOffset(end, ALL)
    assert last == made.reportLatestOffset() == offsets(100, 50)
    assert spans(made.partitions(end, last)) == [("t", 0, 20, 100), ("t", 1, 10, 50)]
    assert made.latestOffset(last, ALL) is last, "with nothing new the very same object must be returned"
    assert made.partitions(last, last) == []


def test_the_limit_is_what_the_options_say() -> None:
    assert stream().getDefaultReadLimit() == ALL
    assert stream(maxOffsetsPerTrigger=5).getDefaultReadLimit() == ReadMaxRows(5)
    assert stream(minOffsetsPerTrigger=5).getDefaultReadLimit() == ReadMinRows(5)
    assert stream(minOffsetsPerTrigger=5, maxOffsetsPerTrigger=9).getDefaultReadLimit() == ReadMaxRows(9)


def test_latest_begins_with_an_empty_batch(cluster: type[Cluster]) -> None:
    """Batch 0's start is not written down: what it ends with must not hold records."""
    made = stream(startingOffsets="latest")
    start = made.initialOffset()
    cluster.topics_now["t"].bounds = [(0, 110), (0, 50)]
    assert made.initialOffset() == start, "a second question must get the same start"
    assert made.latestOffset(start, ALL) == start
    assert made.partitions(start, start) == []
    assert made.latestOffset(start, ALL) == offsets(110, 50)


def test_batch_0_of_latest_that_is_repeated_is_empty_again(cluster: type[Cluster]) -> None:
    cluster.topics_now["t"].bounds = [(0, 900), (0, 50)]
    made = stream(startingOffsets="latest")
    written = offsets(100, 50)
    assert made.partitions(made.initialOffset(), written) == []
    assert made.latestOffset(written, ALL) == offsets(900, 50)


def test_batch_0_of_earliest_that_is_repeated_after_records_expired_is_a_loss(cluster: type[Cluster]) -> None:
    cluster.topics_now["t"].bounds = [(200, 900), (0, 50)]
    made = stream()
    with pytest.raises(DataLoss, match="t-0 should be read from 200 to 100"):
        made.partitions(made.initialOffset(), offsets(100, 50))


def test_new_partitions_and_topics_begin_at_their_first_record(cluster: type[Cluster]) -> None:
    made = stream(subscribe=None, subscribePattern="t|u")
    start = made.initialOffset()
    cluster.topics_now["t"].bounds.append((0, 7))
    cluster.topics_now["u"] = Topic(b"\2", [(0, 3)])
    end = made.latestOffset(start, ALL)
    assert spans(made.partitions(start, end)) == [
        *(("t", 0, 0, 100), ("t", 1, 0, 50), ("t", 2, 0, 7)),
        ("u", 0, 0, 3),
    ]
    cluster.topics_now["t"].bounds.append((5, 7))
    with pytest.raises(DataLoss, match="t-3 is new and begins at 5, not at 0"):
        made.latestOffset(end, ALL)


def test_the_first_records_of_a_new_partition_that_expire_before_they_are_read_are_a_loss(
    cluster: type[Cluster],
) -> None:
    """The checkpoint does not say where a new partition began: also a batch that is repeated asks for it again."""
    start = stream().initialOffset()
    cluster.topics_now["t"].bounds.append((0, 7))
    end = stream().latestOffset(start, ALL)
    cluster.topics_now["t"].bounds[2] = (3, 9)
    with pytest.raises(DataLoss, match="t-2 is new and begins at 3, not at 0"):
        stream().partitions(start, end)
    assert spans(stream(failOnDataLoss=False).partitions(start, end))[-1] == ("t", 2, 3, 7)


@pytest.fixture
def behind(cluster: type[Cluster], monkeypatch: pytest.MonkeyPatch) -> Callable[[Topic | None], None]:
    """Have brokers that lag behind answer all questions but the fresh ones, which come later."""
    topics = Cluster.topics

    def answer_with(earlier: Topic | None) -> None:
        now = cluster.topics_now["t"]

        def asked(self: Cluster, *arguments: Any, fresh: bool = False, **named: Any) -> Any:
            if fresh:
                cluster.topics_now["t"] = now
            return topics(self, *arguments, fresh=fresh, **named)

        monkeypatch.setattr(Cluster, "topics", asked)
        if earlier is None:
            del cluster.topics_now["t"]
        else:
            cluster.topics_now["t"] = earlier

    return answer_with


def test_a_new_partition_of_a_repeated_batch_is_read_although_not_every_broker_knows_it(
    behind: Callable[[Topic | None], None],
) -> None:
    """Else its records would be lost without a word: the checkpoint says that the batch has read them."""
    behind(Topic(b"\1", [(0, 100)]))
    made = stream(failOnDataLoss=False)
    assert spans(made.partitions(offsets(100), offsets(100, 50))) == [("t", 1, 0, 50)]


def test_a_new_partition_of_a_repeated_batch_that_is_gone_is_a_loss(cluster: type[Cluster]) -> None:
    cluster.topics_now["t"].bounds.pop()
    with pytest.raises(DataLoss, match="partitions are gone: t-1"):
        stream().partitions(offsets(100), offsets(100, 50))
    assert stream(failOnDataLoss=False).partitions(offsets(100), offsets(100, 50)) == []


@pytest.mark.parametrize("earlier", [None, Topic(b"\1", [(0, 100)]), Topic(b"\0", [(0, 100), (0, 100)])])
def test_nothing_is_taken_for_lost_because_a_broker_lags_behind(
    behind: Callable[[Topic | None], None], earlier: Topic | None
) -> None:
    behind(earlier)
    start = offsets(100, 50)
    assert stream().latestOffset(start, ALL) is start


def test_available_now_keeps_the_place_in_partitions_that_its_first_look_did_not_find(
    cluster: type[Cluster],
) -> None:
    cluster.topics_now["t"].bounds = [(0, 200)]
    made = stream()
    made.prepareForTriggerAvailableNow()
    cluster.topics_now["t"].bounds = [(0, 200), (0, 90)]
    end = made.latestOffset(offsets(100, 50), ALL)
    assert end == offsets(200, 50)
    assert made.latestOffset(end, ALL) is end


def test_available_now_reads_up_to_where_it_began(cluster: type[Cluster]) -> None:
    made = stream(minOffsetsPerTrigger=1000)
    made.prepareForTriggerAvailableNow()
    start = made.initialOffset()
    cluster.topics_now["t"].bounds = [(0, 500), (0, 500), (0, 500)]
    first = made.latestOffset(start, ReadMaxRows(75))
    assert first == offsets(50, 25)
    last = made.latestOffset(first, ReadMaxRows(75))
    assert last == offsets(100, 50)
    assert made.latestOffset(last, ReadMaxRows(75)) is last
    beyond = offsets(120, 50)  # written by the run before, when it was at the end
    assert made.latestOffset(beyond, ALL) is beyond


def test_small_batches_wait_until_they_are_large_or_old(
    cluster: type[Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=lambda: now_s))
    made = stream(minOffsetsPerTrigger=200, maxTriggerDelay="10s")
    start = made.initialOffset()
    limit = made.getDefaultReadLimit()
    assert made.latestOffset(start, limit) is start
    cluster.topics_now["t"].bounds = [(0, 150), (0, 50)]
    end = made.latestOffset(start, limit)
    assert end == offsets(150, 50)
    cluster.topics_now["t"].bounds = [(0, 151), (0, 50)]
    now_s += 9.9
    assert made.latestOffset(end, limit) is end
    assert made.latestOffset(end, ALL) == offsets(151, 50), "Spark must get all offsets when it asks for all"
    now_s += 0.2
    assert made.latestOffset(end, limit) == offsets(151, 50)


@pytest.mark.parametrize(
    ("change", "words", "begins"),
    [
        (lambda topics: topics.pop("t"), "partitions are gone: t-0, t-1", []),
        (lambda topics: topics.update(t=Topic(b"\1", [(0, 100)])), "partitions are gone: t-1", []),
        (lambda topics: topics.update(t=Topic(b"\2", [(3, 9)])), "deleted and created again", [("t", 0, 3, 9)]),
        (
            lambda topics: topics.update(t=Topic(b"\1", [(0, 70), (0, 50)])),
            "t-0 ends at 70, but was read up to 100",
            [],
        ),
    ],
)
def test_what_is_lost_ends_the_query_unless_told_otherwise(
    cluster: type[Cluster],
    change: Callable[[dict[str, Topic]], object],
    words: str,
    begins: list[tuple[str, int, int, int]],
) -> None:
    start = offsets(100, 50)
    change(cluster.topics_now)
    with pytest.raises(DataLoss, match=words) as caught:
        stream().latestOffset(start, ALL)
    assert 'option("failOnDataLoss", "false")' in str(caught.value)
    made = stream(failOnDataLoss=False)
    end = made.latestOffset(start, ALL)
    assert spans(made.partitions(start, end)) == begins
    assert made.latestOffset(end, ALL) is end


@pytest.mark.parametrize("lenient", [False, True])
def test_a_topic_that_goes_away_during_the_query_is_lost_as_between_two_runs(
    cluster: type[Cluster], monkeypatch: pytest.MonkeyPatch, lenient: bool
) -> None:
    """The client's metadata still names it, and its leader refuses the look-up."""
    cluster.topics_now["u"] = Topic(b"\2", [(0, 3)])
    made = stream(subscribe="t,u", failOnDataLoss=not lenient)
    start = made.latestOffset(made.initialOffset(), ALL)
    topics, find = Cluster.topics, Cluster.find
    deleted = {"u"}

    def asked(self: Cluster, *arguments: Any, fresh: bool = False, **named: Any) -> Any:
        for name in deleted if fresh else ():
            cluster.topics_now.pop(name, None)
        return topics(self, *arguments, fresh=fresh, **named)

    def looked_up(self: Cluster, wanted: Mapping[TopicPartition, int]) -> Any:
        for part in wanted:
            if part.topic in deleted:
                raise UnknownTopicOrPartition(f"{part} does not exist")
        return find(self, wanted)

    monkeypatch.setattr(Cluster, "topics", asked)
    monkeypatch.setattr(Cluster, "find", looked_up)
    if lenient:
        assert made.latestOffset(start, ALL) == offsets(100, 50)
    else:
        with pytest.raises(DataLoss, match="partitions are gone: u-0"):
            made.latestOffset(start, ALL)


def test_a_look_up_that_is_refused_for_good_ends_the_query(
    cluster: type[Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stream(failOnDataLoss=False)
    start = made.initialOffset()

    def refused(self: Cluster, wanted: Mapping[TopicPartition, int]) -> Any:
        raise UnknownTopicOrPartition("t-0 does not exist")

    monkeypatch.setattr(Cluster, "find", refused)
    with pytest.raises(UnknownTopicOrPartition):
        made.latestOffset(start, ALL)


def test_a_leader_that_does_not_know_its_end_yet_is_asked_again(cluster: type[Cluster]) -> None:
    cluster.topics_now["t"].bounds = [(0, 90), (0, 50)]

    def catch_up() -> None:
        cluster.topics_now["t"].bounds = [(0, 101), (0, 50)]

    cluster.on_find = staticmethod(catch_up)
    assert stream().latestOffset(offsets(100, 50), ALL) == offsets(101, 50)


def test_offsets_are_never_those_of_another_topic_of_the_name(cluster: type[Cluster]) -> None:
    """The topic is made again while its ends are looked up: they are looked up again."""

    def make_again() -> None:
        if cluster.topics_now["t"].topic_id == b"\1":
            cluster.topics_now["t"] = Topic(b"\2", [(0, 5)])

    cluster.on_find = staticmethod(make_again)
    made = stream()
    assert made.initialOffset() == offsets(0, topic_id="02")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": "t,nope"}, "topic 'nope' does not exist"),
        ({"subscribe": None, "assign": '{"t": [0, 2]}'}, "partition t-2 does not exist"),
        ({"startingOffsets": '{"t": {"0": 1}}'}, "startingOffsets lacks t-1"),
        ({"startingOffsets": '{"t": {"0": 1, "1": 2, "2": 3}}'}, "names partitions that are not read: t-2"),
        ({"startingOffsets": '{"t": {"0": 1, "1": 51}}'}, "t-1 has offsets from 0 up to 50, not 51"),
        ({"startingTimestamp": 60}, "t-1 has no record from 60 on"),
    ],
)
def test_where_a_query_begins_has_to_be_there(options: dict[str, object], words: str) -> None:
    with pytest.raises((ValueError, DataLoss, UnknownTopicOrPartition)) as caught:
        stream(**options).initialOffset()
    assert words in str(caught.value)


def test_where_a_query_begins() -> None:
    assert stream(startingOffsets='{"t": {"0": -1, "1": -2}}').initialOffset() == offsets(100, 0)
    assert stream(startingTimestamp=40).initialOffset() == offsets(40, 40)
    strategy = {"startingOffsetsByTimestampStrategy": "latest"}
    late = stream(startingTimestamp=60, **strategy)
    assert late.initialOffset() == offsets(60, 50)
    assert late.latestOffset(offsets(60, 50), ALL) == offsets(60, 50), (
        "the first batch must be empty, as with startingOffsets=latest"
    )
    lenient = stream(startingOffsets='{"t": {"0": 1, "1": 51}}', failOnDataLoss=False)
    assert lenient.initialOffset() == offsets(1, 50)


def test_a_batch_query_reads_what_lies_between(cluster: type[Cluster]) -> None:
    made = DefaultSource({"bootstrap.servers": "a:1", "subscribe": "t", "endingTimestamp": "60", "minPartitions": "4"})
    batch = made.reader(made.schema())
    assert spans(batch.partitions()) == [("t", 0, 0, 30), ("t", 0, 30, 60), ("t", 1, 0, 25), ("t", 1, 25, 50)]
    assert [reader.closed for reader in cluster.made] == [True]
    assert list(batch.read(InputPartition(None))) == [], (
        "the task that Spark starts for a query without partitions must return no rows"
    )


class Reading:
    """Stands in for `RangeReader` in a task: reads what `script` has, in turn."""

    made: ClassVar[list[Reading]]
    script: ClassVar[list[list[Any] | Exception]]

    def __init__(self, bootstrap: str, config: Mapping[str, str]) -> None:
        self.consumer = self  # the source asks its `beginning_offsets`
        self.asked: list[tuple[object, ...]] = []
        self.closed = False
        self.made.append(self)

    def read(self, *wanted: object) -> Iterator[Any]:
        self.asked.append(wanted)
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        yield from step

    def beginning_offset(self, _: TopicPartition) -> int:
        return 7

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> type[Reading]:
    monkeypatch.setattr(_range_reader, "RangeReader", Reading)
    monkeypatch.setattr(tasks, "_idle", {})
    Reading.made, Reading.script = [], []
    return Reading


def read(made: Any, wanted: Range) -> list[Any]:
    return list(made.read(wanted))


def test_a_worker_keeps_its_reader_from_task_to_task(reading: type[Reading], monkeypatch: pytest.MonkeyPatch) -> None:
    made = stream()
    reading.script = [[], [], [], []]
    read(made, Range("t", 0, 5, 9, "01"))
    read(made, Range("t", 1, 0, 3, "01"))
    [one] = reading.made
    part = TopicPartition("t", 0)
    assert one.asked == [(part, b"\1", 5, 9, 120.0), (TopicPartition("t", 1), b"\1", 0, 3, 120.0)]
    read(stream(**{"fetch.max.bytes": 5000}), Range("t", 0, 5, 9))
    assert [each.closed for each in reading.made] == [True, False], (
        "other options must have another reader, and the former one must be closed"
    )
    monkeypatch.setattr(os, "getpid", lambda: -5)
    read(made, Range("t", 0, 5, 9))
    assert len(reading.made) == 3, "a forked process must not use the reader of its parent"
    assert not reading.made[1].closed


def test_two_ranges_read_at_once_have_a_reader_each(reading: type[Reading]) -> None:
    reading.script = [[], []]
    made = stream()
    first = made.read(Range("t", 0, 5, 9))
    assert list(made.read(Range("t", 0, 9, 12))) == list(first) == []


def test_a_task_that_fails_leaves_no_reader_behind(reading: type[Reading]) -> None:
    reading.script = [ValueError("broken"), []]
    made = stream()
    with pytest.raises(ValueError, match="broken"):
        read(made, Range("t", 0, 5, 9))
    read(made, Range("t", 0, 5, 9))
    assert [each.closed for each in reading.made] == [True, False]


@pytest.mark.parametrize(
    "error", [OffsetOutOfRange("t-0: 5 is below 7"), UnknownTopicId("made again"), UnknownTopicOrPartition("gone")]
)
def test_a_task_that_finds_records_gone_says_what_to_do(reading: type[Reading], error: Exception) -> None:
    reading.script = [error]
    with pytest.raises(DataLoss) as caught:
        read(stream(), Range("t", 0, 5, 9))
    assert str(error) in str(caught.value)
    assert "some of the offsets 5 to 8 are missing" in str(caught.value)
    assert 'option("failOnDataLoss", "false")' in str(caught.value)


def test_a_task_that_may_goes_on_behind_what_is_gone(reading: type[Reading]) -> None:
    made = stream(failOnDataLoss=False)
    reading.script = [OffsetOutOfRange("below"), []]
    read(made, Range("t", 0, 5, 9))
    assert [asked[2:4] for asked in reading.made[0].asked] == [(5, 9), (7, 9)]
    reading.script = [UnknownTopicId("made again")]
    assert read(made, Range("t", 0, 5, 9)) == []
    reading.script = [OffsetOutOfRange("the end is not there")]
    assert read(made, Range("t", 0, 8, 9)) == []
    assert reading.script == []
