"""The sink exactly once, driven as Spark drives it, and as it would on hosts that fail: attempts, replays, zombies."""

from __future__ import annotations

import logging
import pickle
import random
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark_raftlog import DefaultSource
from pyspark_raftlog import sink as staged
from pyspark_raftlog.sink import OldCheckpoint, TaskWritten

from raftlog._staged_writer import Staging
from raftlog.errors import CorruptRecordError, RequestTimedOut, SinkMismatch, StageExpired
from tests.support.fake_stages import FakeStageCluster
from tests.support.patience import refusal
from tests.support.spark_query import QUERY, SCHEMA, Context, Query


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStageCluster]:
    monkeypatch.setattr(staged, "_stagings", {})
    monkeypatch.setattr(staged, "_last_committed", {})
    monkeypatch.setattr("pyspark.TaskContext.get", Context.get)
    with FakeStageCluster() as cluster:
        cluster.create_topic("t", 2)
        yield cluster
        for staging in staged._stagings.values():
            staging.close()


@pytest.fixture
def query(cluster: FakeStageCluster) -> Query:
    return Query(cluster.bootstrap)


def values(*rows: str) -> list[bytes]:
    return sorted(row.encode() for row in rows)


def test_a_batch_is_readable_when_it_is_committed(cluster: FakeStageCluster, query: Query) -> None:
    messages = [query.task(0, ["a", "b"]), query.task(0, ["c"], partition=1), query.task(0, [], partition=2)]
    assert [message.rows for message in messages] == [2, 1, 0]
    assert cluster.committed("t") == []
    query.commit(0, messages)
    assert cluster.committed("t") == values("a", "b", "c")
    [sink] = cluster.stages.sinks
    assert sink == f"spark/{QUERY}/fake/t"
    attempts = sorted(stage.attempt for stage in cluster.stages.stages.values())
    assert attempts == ["run r, partition 0, attempt 0, task 0", "run r, partition 1, attempt 0, task 100"]


def test_a_replayed_batch_is_skipped_whatever_its_partitions_are_now(cluster: FakeStageCluster, query: Query) -> None:
    """Spark writes a batch again when it died between the sink's commit and its own note of it (SPARK-28650)."""
    query.commit(0, [query.task(0, ["a", "b"]), query.task(0, ["c"], partition=1)])
    untouched = iter([pa.record_batch({"value": ["c", "b", "a"]})])
    again = [query.task(0, untouched)]
    assert (again[0].rows, len(list(untouched))) == (0, 1), "the rows of a committed batch must not even be read"
    query.commit(0, again)
    query.commit(1, [query.task(1, ["d"])])
    assert cluster.committed("t") == values("a", "b", "c", "d")


def test_a_checkpoint_that_is_older_than_what_was_written_is_refused(cluster: FakeStageCluster, query: Query) -> None:
    """Its batches have numbers that are there, and other rows: whatever came since then belongs to the next batch."""
    for batch_id, row in enumerate("abc"):
        query.commit(batch_id, [query.task(batch_id, [row])])
    with pytest.raises(OldCheckpoint, match="has committed batch 2, and this query writes batch 1"):
        query.task(1, ["b", "c", "d"])
    assert cluster.committed("t") == values("a", "b", "c")
    assert query.task(2, ["c"]).rows == 0, "the last batch may be a replay"
    renamed = Query(cluster.bootstrap, **{"txn.app.id": "since-the-restore"})
    renamed.commit(1, [renamed.task(1, ["b", "c", "d"])])
    assert cluster.committed("t") == values("a", "b", "b", "c", "c", "d")


def test_a_batch_without_tasks_commits_nothing(cluster: FakeStageCluster, query: Query) -> None:
    query.commit(0, [])
    assert cluster.stages.calls == []
    query.commit(1, [query.task(1, [])])
    assert cluster.stages.sinks[f"spark/{QUERY}/fake/t"].last_batch_id == 1


def test_of_attempts_of_a_task_only_the_winner_counts(cluster: FakeStageCluster, query: Query) -> None:
    """Speculation, and a zombie that finishes after its batch was committed."""
    first = query.task(0, ["a", "b"])
    second = query.task(0, ["b", "a"], attempt=1)
    zombie = query.task(0, ["a", "b"], attempt=2)
    query.commit(0, [second])
    assert first != second != zombie
    assert cluster.committed("t") == values("a", "b")
    query.commit(0, [zombie])
    assert query.task(0, ["a", "b"], attempt=3).rows == 0, "nothing must be staged for a committed batch"
    states = [stage.state for stage in cluster.stages.stages.values()]
    assert sorted(states) == ["aborted", "aborted", "committed"]
    assert cluster.committed("t") == values("a", "b")


def test_a_task_that_fails_leaves_nothing_and_the_next_attempt_is_another_stage(
    cluster: FakeStageCluster, query: Query
) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"value": ["a"]})
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        query.task(0, failing())
    cluster.faults.refuse = [CorruptRecordError("bad")]
    with pytest.raises(CorruptRecordError):
        query.task(0, ["a", "b"], attempt=1)
    query.commit(0, [query.task(0, ["a", "b"], attempt=2)])
    assert cluster.committed("t") == values("a", "b")
    assert {stage.state for stage in cluster.stages.stages.values()} == {"aborted", "committed"}


def test_two_drivers_on_one_checkpoint_write_every_batch_once(cluster: FakeStageCluster) -> None:
    one, two = (Query(cluster.bootstrap) for _ in range(2))
    wanted = []
    for batch_id in range(4):
        rows = [f"{batch_id}-{number}" for number in range(5)]
        wanted += rows
        by_one = [one.task(batch_id, rows[:3]), one.task(batch_id, rows[3:], partition=1)]
        by_two = [two.task(batch_id, rows[::-1])]
        first, second = ((one, by_one), (two, by_two))[:: 1 if batch_id % 2 else -1]
        first[0].commit(batch_id, first[1])
        second[0].commit(batch_id, second[1])
    assert cluster.committed("t") == values(*wanted)


def test_half_a_batch_that_was_overtaken_is_never_committed(cluster: FakeStageCluster) -> None:
    """One driver's task finds the batch committed by the other, while its sibling had staged before that."""
    slow, fast = (Query(cluster.bootstrap) for _ in range(2))
    before = slow.task(0, ["a"])
    fast.commit(0, [fast.task(0, ["b", "a"])])
    after = slow.task(0, ["b"], partition=1)
    slow.commit(0, [before, after])
    assert cluster.committed("t") == values("a", "b")


def test_a_stage_that_expired_fails_the_commit_and_the_replay_succeeds(cluster: FakeStageCluster, query: Query) -> None:
    messages = [query.task(0, ["a"]), query.task(0, ["b"], partition=1)]
    cluster.call(lambda: cluster.stages.abort(list(cluster.stages.stages)[:1]))
    with pytest.raises(StageExpired, match=r"restart the query from its checkpoint.*transaction\.timeout\.ms"):
        query.commit(0, messages)
    query.abort(0, messages)
    assert cluster.committed("t") == []
    query.restart()
    query.commit(0, [query.task(0, ["b", "a"])])
    assert cluster.committed("t") == values("a", "b")


def test_a_commit_without_an_answer_ends_in_time_and_says_what_to_do(cluster: FakeStageCluster) -> None:
    messages = [Query(cluster.bootstrap).task(0, ["a"])]

    def commit(limit_s: float) -> None:
        limits = {"delivery.timeout.ms": f"{limit_s * 1_000:.0f}", "request.timeout.ms": "200"}
        Query(cluster.bootstrap, **limits).commit(0, messages)

    cluster.stages.delay_s = lambda method: 120.0 if method == "CommitBatch" else 0.0
    words = "Whether batch 0 was committed is unknown: restart the query"
    refusal(RequestTimedOut, words, commit, 0.5, 5.0, 25.0)


def test_abort_drops_what_is_known_and_fails_nothing(cluster: FakeStageCluster, query: Query) -> None:
    committed = [query.task(0, ["a"])]
    query.commit(0, committed)
    query.abort(0, committed)  # as after a commit whose answer was lost
    query.abort(1, [query.task(1, ["b"]), None])
    assert cluster.committed("t") == values("a")
    assert sorted(stage.state for stage in cluster.stages.stages.values()) == ["aborted", "committed"]


def test_a_query_that_is_stopped_in_the_middle_of_a_batch_leaves_no_stage_open(
    cluster: FakeStageCluster, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark aborts such a batch with nothing but None: its tasks were ended before they could tell."""
    monkeypatch.setattr("raftlog._staged_writer.Stage.abort", lambda stage, timeout=None: None)
    monkeypatch.setattr(staged, "_last_committed", {})

    def states() -> list[str]:
        return [stage.state for stage in cluster.stages.stages.values()]

    query.task(0, ["a"])
    query.abort(0, [None, None])
    assert states() == ["open"], "the stage must stay open, as no task has told which sink it belongs to"
    query.commit(0, [query.task(0, ["a"], attempt=1)])
    assert states() == ["aborted", "committed"]
    query.task(1, ["b"])
    query.task(1, ["c"], partition=1)
    query.abort(0, [None])
    assert states()[2:] == ["open", "open"], "the stages must stay open, as they belong to a later batch"
    query.abort(1, [None, None])
    assert states()[2:] == ["aborted", "aborted"]


def test_a_query_that_is_stopped_stops_no_other_query_of_its_driver(
    cluster: FakeStageCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two queries of one driver may write to one topic with the same options; an abort has only a batch number."""
    monkeypatch.setattr("raftlog._staged_writer.Stage.abort", lambda stage, timeout=None: None)
    slow = Query(cluster.bootstrap, run_id="slow")
    fast = Query(cluster.bootstrap, query_id=QUERY.replace("1", "6"), run_id="fast")
    for batch_id in range(3):
        fast.commit(batch_id, [fast.task(batch_id, [f"fast {batch_id}"])])
    slow.commit(0, [slow.task(0, ["slow 0"])])
    fast.task(3, ["fast 3"])
    fast.abort(3, [None])
    assert [stage.state for stage in cluster.stages.stages.values()][-1] == "aborted"
    for batch_id in range(1, 5):
        slow.commit(batch_id, [slow.task(batch_id, [f"slow {batch_id}"])])
    assert cluster.committed("t") == values(*(f"fast {n}" for n in range(3)), *(f"slow {n}" for n in range(5)))


def test_a_query_whose_last_batch_is_not_known_aborts_no_other_queries_batch(
    cluster: FakeStageCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have committed the batch before, so either could be the one that is stopped: its stages time out."""
    queries = [Query(cluster.bootstrap, query_id=QUERY.replace("1", number), run_id=number) for number in "67"]
    for query in queries:
        query.commit(0, [query.task(0, ["a"])])
    first, second = queries
    written = [second.task(1, ["b"])]
    first.abort(1, [None])
    second.commit(1, written)
    assert cluster.committed("t") == values("a", "a", "b")


def test_abort_finds_what_never_told_the_driver(
    monkeypatch: pytest.MonkeyPatch, cluster: FakeStageCluster, query: Query
) -> None:
    """A worker that was killed leaves a stage open, and readers would wait for its timeout. Other runs' stay."""
    monkeypatch.setattr("raftlog._staged_writer.Stage.abort", lambda stage, timeout=None: None)

    def failing() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"value": ["a"]})
        while not cluster.stages.stages:
            time.sleep(0.001)
        raise OSError("killed")

    with pytest.raises(OSError, match="killed"):
        query.task(0, failing())
    told = query.task(0, ["b"], partition=1)
    other = Query(cluster.bootstrap, run_id="another")
    others = other.task(0, ["b", "a"])
    query.abort(0, [None, told])
    assert [stage.state for stage in cluster.stages.stages.values()] == ["aborted", "aborted", "open"]
    other.commit(0, [others])
    assert cluster.committed("t") == values("a", "b")


def test_a_batch_write_that_fails_drops_what_never_told_the_driver(cluster: FakeStageCluster, query: Query) -> None:
    made = DefaultSource(query.options).writer(SCHEMA, overwrite=False)
    made.write(iter([pa.record_batch({"value": ["a"]})]))
    made.abort([None])
    assert [stage.state for stage in cluster.stages.stages.values()] == ["aborted"]


def test_a_task_that_begins_after_its_driver_gave_up_stages_nothing(cluster: FakeStageCluster, query: Query) -> None:
    """Spark does not wait for tasks that it kills, so one may have rows in hand and no stage yet."""
    late = pickle.loads(pickle.dumps(DefaultSource(query.options).writer(SCHEMA, overwrite=False)))  # noqa: S301
    late.abort([None, None])
    with pytest.raises(StageExpired, match="given up"):
        late.write(iter([pa.record_batch({"value": ["a"]})]))
    query.abort(3, [query.task(3, ["a"]), None])
    with pytest.raises(StageExpired, match="given up"):
        query.task(3, ["b"], partition=1)
    assert [stage.state for stage in cluster.stages.stages.values()] == ["aborted"]
    query.task(4, ["of a batch that nobody gave up"])
    query.restart()
    query.commit(3, [query.task(3, ["a", "b"])])
    assert cluster.committed("t") == values("a", "b")


def test_messages_that_do_not_belong_together_are_refused(cluster: FakeStageCluster, query: Query) -> None:
    with pytest.raises(
        RuntimeError, match="1 of 2 tasks did not report their writes, as happens under the continuous trigger"
    ):
        query.commit(0, [query.task(0, ["a"]), None])
    with pytest.raises(RuntimeError, match="nothing was committed"):
        query.commit(1, [query.task(0, ["a"])])
    assert cluster.committed("t") == []


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"__is_continuous_processing": "true", "sql.streaming.queryId": QUERY}, "continuous trigger"),
        ({"sql.streaming.queryId": QUERY}, "does not tell the batch"),
        ({"streaming.sql.batchId": "0"}, "does not tell the batch"),
    ],
)
def test_a_task_of_no_batch_is_refused(
    cluster: FakeStageCluster, query: Query, properties: dict[str, str], words: str
) -> None:
    Context.enter(Context(0, 0, properties))
    with pytest.raises(RuntimeError, match=words):
        query.writer().write(iter(()))
    Context.enter(None)
    with pytest.raises(RuntimeError, match="continuous trigger"):
        query.writer().write(iter(()))


def test_a_named_sink_is_one_checkpoints_and_one_topics(cluster: FakeStageCluster) -> None:
    """A new checkpoint begins at batch 0 again: to take its batches for repetitions would lose them without a word."""
    query = Query(cluster.bootstrap, **{"txn.app.id": "orders"})
    query.commit(0, [query.task(0, ["a"])])
    assert list(cluster.stages.sinks) == ["orders"]
    for other in (
        Query(cluster.bootstrap, "another", **{"txn.app.id": "orders"}),
        Query(cluster.bootstrap, **{"txn.app.id": "orders", "topic": "u"}),
    ):
        with pytest.raises(SinkMismatch, match=r"txn\.app\.id=orders is in use"):
            other.task(0, ["b"])
    query.commit(1, [query.task(1, ["c"])])
    assert cluster.committed("t") == values("a", "c")


def test_long_topics_have_sink_ids_that_fit(cluster: FakeStageCluster) -> None:
    names = [f"{'t' * 247}-{number}" for number in range(2)]
    for name in names:
        cluster.create_topic(name)
        query = Query(cluster.bootstrap, topic=name)
        query.commit(0, [query.task(0, ["a"])])
        assert cluster.committed(name) == [b"a"]
    assert len(cluster.stages.sinks) == 2
    assert all(len(sink) <= 255 for sink in cluster.stages.sinks)


def test_a_batch_write_is_a_sink_of_its_own(cluster: FakeStageCluster, query: Query) -> None:
    for value in "ab":
        made = DefaultSource(query.options).writer(SCHEMA, overwrite=False)
        writer = pickle.loads(pickle.dumps(made))  # noqa: S301 # as Spark sends it to its tasks, and to the commit
        messages = [writer.write(iter([pa.record_batch({"value": [value]})])) for _ in range(2)]
        assert cluster.committed("t").count(value.encode()) == 0
        made.commit(messages)
    assert cluster.committed("t") == values("a", "a", "b", "b")
    assert len(cluster.stages.sinks) == 2
    assert {sink.expire_after_ms for sink in cluster.stages.sinks.values()} == {24 * 60 * 60 * 1000}
    assert "LastBatch" not in cluster.stages.calls, "the sink must not be asked for its last batch, as it is new"


def test_a_named_batch_write_happens_once(
    cluster: FakeStageCluster, query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    def write(version: int, value: str) -> None:
        options = {**query.options, "txn.app.id": "nightly", "txn.version": str(version)}
        writer = DefaultSource(options).writer(SCHEMA, overwrite=False)
        writer.commit([writer.write(iter([pa.record_batch({"value": [value]})]))])

    def told() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name.startswith("pyspark_raftlog.")]

    write(20260101, "a")
    assert told() == []
    write(20260101, "again")
    [skipped] = told()
    assert skipped.levelno == logging.WARNING, "a skipped batch must be logged as a warning, or the user would not know"
    for words in ("txn.app.id=nightly", "txn.version=20260101", "nothing was written", "a new checkpoint"):
        assert words in skipped.getMessage()
    write(20260102, "b")
    assert len(told()) == 1
    write(20260101, "late")
    assert len(told()) == 2
    assert cluster.committed("t") == values("a", "b")
    assert cluster.stages.sinks["nightly"].expire_after_ms == 0, (
        "the sink must never expire, as the batch may come again at any time"
    )


def test_a_process_has_the_connections_of_one_cluster_and_its_settings(cluster: FakeStageCluster, query: Query) -> None:
    """A driver that writes thousands of numbered batches, as with foreachBatch, has those of one, and no others."""

    def write(version: int, **options: str) -> Staging:
        numbered = {"txn.app.id": "nightly", "txn.version": str(version)}
        made = DefaultSource({**query.options, **numbered, **options}).writer(SCHEMA, overwrite=False)
        made.commit([made.write(iter([pa.record_batch({"value": [str(version)]})]))])
        [staging] = staged._stagings.values()
        return staging

    first = write(1)
    assert write(2) is first
    assert write(3, **{"linger.ms": "1"}) is not first
    assert first.hub.closed
    assert staged._last_committed == {}
    assert cluster.committed("t") == values("1", "2", "3")


@pytest.mark.parametrize("seed", range(8))
def test_whatever_dies_every_row_is_there_once(cluster: FakeStageCluster, seed: int) -> None:
    """Drivers die before and after a commit, tasks before and after their end; partitions change with every replay."""
    rng = random.Random(seed)
    noted = -1
    drivers = [Query(cluster.bootstrap, run_id=f"run {number}") for number in range(2)]
    kept: list[tuple[int, list[TaskWritten]]] = []
    while noted < 7:
        query, batch_id = rng.choice(drivers), max(0, noted + rng.choice((0, 1, 1)))
        rows = [f"{batch_id}-{number}" for number in range(10)]
        rng.shuffle(rows)
        parts = rng.randint(1, 4)
        messages = []
        try:
            for partition in range(parts):
                for attempt in range(rng.choice((1, 1, 2))):
                    found = query.task(batch_id, rows[partition::parts], partition=partition, attempt=attempt)
                messages.append(found)
        except OldCheckpoint:
            assert batch_id <= noted, "others have gone on"
            continue
        fate = rng.random()
        if fate < 0.2:
            continue  # the driver dies with everything staged
        if fate < 0.3:
            kept.append((batch_id, messages))  # it is slow, and commits when others have
            continue
        if fate < 0.4:
            query.abort(batch_id, messages)
            query.restart()
            continue
        query.commit(batch_id, messages)
        if rng.random() < 0.7:
            noted = max(noted, batch_id)
        if kept and rng.random() < 0.5:
            late_batch, late = kept.pop()
            try:
                rng.choice(drivers).commit(late_batch, late)
            except StageExpired:
                continue
            noted = max(noted, late_batch)
    wanted = values(*(f"{batch_id}-{number}" for batch_id in range(noted + 1) for number in range(10)))
    assert cluster.committed("t") == wanted
