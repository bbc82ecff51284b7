"""`StagedWriter` against a coordinator in memory: its requests, its failures, and what is committed."""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from raftlog import StagedWriter, StageToken
from raftlog._client.producer import ProducerEngine
from raftlog.errors import (
    BatchAlreadyCommitted,
    ClosedError,
    CoordinatorLoadInProgress,
    CorruptRecordError,
    InvalidConfig,
    InvalidProducerEpoch,
    InvalidRequestError,
    NotEnoughReplicas,
    NotLeader,
    RaftlogError,
    RequestTimedOut,
    SinkMismatch,
    StageExpired,
)
from tests.support.fake_stages import FakeStageCluster

FAST: dict[str, Any] = {"linger_ms": 0.5, "retry_backoff_ms": 1, "retry_backoff_max_ms": 20}


@pytest.fixture
def cluster() -> Iterator[FakeStageCluster]:
    with FakeStageCluster(nodes=2) as cluster:
        cluster.create_topic("t", 3)
        yield cluster


@pytest.fixture
def writer(cluster: FakeStageCluster) -> Iterator[StagedWriter]:
    with StagedWriter(cluster.bootstrap, "sink", "t", **FAST) as writer:
        yield writer


def staged(writer: StagedWriter, batch_id: int, values: list[bytes]) -> StageToken:
    with writer.stage(batch_id) as stage:
        stage.send_batch("t", values)
        return stage.finish(30)


def test_what_is_staged_is_committed_together(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    assert writer.last_batch() == -1
    tokens = [staged(writer, 0, [b"%d-%d" % (part, n) for n in range(100)]) for part in range(3)]
    assert cluster.committed("t") == []
    assert len({token.producer_id for token in tokens}) == 3, "each stage must have a producer id of its own"
    assert [token.records for token in tokens] == [100] * 3
    answer = writer.commit(0, [pickle.loads(pickle.dumps(token)) for token in tokens])  # noqa: S301 # as Spark does
    assert answer == (0, False, 300)
    assert len(cluster.committed("t")) == 300
    assert writer.last_batch() == 0


def test_the_coordinator_hears_of_a_stage_with_its_first_record_and_of_partitions_together(
    cluster: FakeStageCluster, writer: StagedWriter
) -> None:
    with writer.stage(3, "task 5") as stage:
        assert cluster.stages.calls == []
        stage.send_batch("t", [b"x"] * 3, partition=pa.array([0, 1, 2], pa.int32()))
        stage.flush(30)
        assert cluster.stages.calls.count("InitStage") == 1
        assert len(cluster.stages.calls) <= 2, (
            f"the partitions of one send must be added in one or two calls, not {len(cluster.stages.calls)}"
        )
        before = len(cluster.stages.calls)
        for _ in range(5):
            stage.send("t", b"y", partition=1)
        stage.flush(30)
        assert len(cluster.stages.calls) == before, "partitions that are added must not be added again"
        token = stage.finish(30)
    [known] = cluster.stages.stages.values()
    assert (known.sink_id, known.batch_id, known.attempt, known.timeout_ms) == ("sink", 3, "task 5", 900_000)
    assert len(cluster.by_stage("t")[token.producer_id]) == 8


def test_an_empty_stage_asks_nothing_and_an_empty_batch_counts(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    with writer.stage(4) as stage:
        token = stage.finish()
    assert (token.producer_id, cluster.stages.calls) == (-1, [])
    assert writer.commit(4, [token]) == (4, False, 0)
    assert writer.commit(5, []) == (5, False, 0)
    assert writer.last_batch() == 5


def test_a_batch_without_tokens_is_one_without_records(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    """A batch without records counts, too: else its number would be used again."""
    token = staged(writer, 3, [b"a"])
    assert writer.commit(3, []) == (3, False, 0)
    assert writer.last_batch() == 3
    assert cluster.stages.stages[token.producer_id].state == "aborted"
    assert writer.commit(3, [token]) == (3, True, 0)
    assert cluster.committed("t") == []


@pytest.mark.parametrize("call", [{"value": "text"}, {"value": b"a", "partition": 99}, {"value": bytes(2_000_000)}])
def test_a_stage_without_a_record_that_was_refused_at_once_gives_no_token(
    cluster: FakeStageCluster, writer: StagedWriter, call: dict[str, Any]
) -> None:
    with writer.stage(1) as stage:
        stage.send("t", b"a")
        with pytest.raises((RaftlogError, TypeError)) as refused:
            stage.send("t", **call)
        with pytest.raises(RaftlogError) as failed:
            stage.finish(30)
        assert str(refused.value) in str(failed.value)
    assert cluster.committed("t") == []
    writer.commit(1, [staged(writer, 1, [b"a"])])
    assert cluster.committed("t") == [b"a"]


def test_a_batch_that_is_committed_is_not_committed_again(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    writer.commit(1, [staged(writer, 1, [b"a", b"b"])])
    with pytest.raises(BatchAlreadyCommitted), writer.stage(1) as stage:
        while True:
            stage.send("t", b"again")
            time.sleep(0.001)
    with writer.stage(0) as stage:
        stage.send("t", b"again")
        token = stage.finish(30)
    assert (token.already_committed, token.records, token.producer_id) == (True, 0, -1)
    assert writer.commit(0, [token]).already_committed
    assert cluster.committed("t") == [b"a", b"b"]


def test_two_writers_of_one_batch_have_one_winner(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    with StagedWriter(cluster.bootstrap, "sink", "t", **FAST) as other:
        mine, theirs = staged(writer, 1, [b"a"]), staged(other, 1, [b"b"])
        assert not other.commit(1, [theirs]).already_committed
        assert writer.commit(1, [mine]) == (1, True, 0)
    assert cluster.committed("t") == [b"b"]


def test_a_part_that_found_the_batch_committed_never_makes_the_rest_of_it_one(
    cluster: FakeStageCluster, writer: StagedWriter
) -> None:
    """To commit what the others have staged would be to commit a batch with a part missing."""
    token = staged(writer, 1, [b"a"])
    with pytest.raises(StageExpired, match="has lost its state"):
        writer.commit(1, [token, writer.already_committed(1)])
    assert cluster.committed("t") == []
    writer.commit(1, [])
    assert writer.commit(1, [token, writer.already_committed(1)]).already_committed
    assert cluster.stages.stages[token.producer_id].state == "aborted"


def test_leaving_a_stage_without_finishing_aborts_it(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    with pytest.raises(KeyError), writer.stage(0) as stage:
        stage.send("t", b"a").result(30)
        raise KeyError
    with writer.stage(0) as stage:
        stage.send("t", b"b").result(30)
    assert [each.state for each in cluster.stages.stages.values()] == ["aborted", "aborted"]
    with pytest.raises(InvalidRequestError, match="was aborted"):
        stage.send("t", b"c")
    with pytest.raises(InvalidRequestError, match="was aborted"):
        stage.finish()
    assert writer.commit(0, [staged(writer, 0, [b"d"])]).records == 1
    assert cluster.committed("t") == [b"d"]


def test_a_finished_stage_takes_nothing_more_and_its_engine_serves_the_next_one(
    cluster: FakeStageCluster, writer: StagedWriter
) -> None:
    with writer.stage(0) as first:
        first.send("t", b"a")
        token = first.finish(30)
        assert first.finish() == token
        with writer.stage(0) as second:
            for use in (first.send, first.send_batch):
                with pytest.raises(InvalidRequestError, match="is finished"):
                    use("t", [b"late"] if use == first.send_batch else b"late")  # type: ignore[arg-type] # fits
            with pytest.raises(InvalidRequestError, match="is finished"):
                first.flush()
            second.send("t", b"b")
            tokens = [token, second.finish(30)]
    writer.commit(0, tokens)
    assert cluster.committed("t") == [b"a", b"b"]
    assert all(len(rows) == 1 for rows in cluster.by_stage("t").values())


def test_a_record_that_fails_fails_the_stage(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    refusals: list[RaftlogError] = [CorruptRecordError("bad")]
    cluster.faults.refuse = list(refusals)
    with writer.stage(0) as stage:
        stage.send("t", b"a")
        with pytest.raises(CorruptRecordError, match="bad"):
            stage.finish(30)
        with pytest.raises(CorruptRecordError):
            stage.send("t", b"b")
    assert [each.state for each in cluster.stages.stages.values()] == ["aborted"]


def test_what_passes_is_waited_out(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    cluster.faults.refuse = [NotEnoughReplicas("one of two"), NotLeader("not me")]
    refusals: list[RaftlogError] = [CoordinatorLoadInProgress("loading")] * 3
    cluster.stages.refuse = lambda method, request: refusals.pop() if refusals else None
    cluster.stages.coordinator = 2
    cluster.stages.lose_answers = ["InitStage", "CommitBatch"]
    token = staged(writer, 0, [b"a", b"b"])
    assert not writer.commit(0, [token]).already_committed, (
        "the commit, sent again after a lost answer, must count as its own"
    )
    assert cluster.committed("t") == [b"a", b"b"]


def test_the_coordinator_moves(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    token = staged(writer, 0, [b"a"])
    cluster.stages.coordinator = 2
    with writer.stage(0) as stage:
        stage.send("t", b"b", partition=0)
        stage.flush(30)
        cluster.stages.coordinator = 1
        stage.send("t", b"c", partition=1)
        tokens = [token, stage.finish(30)]
    cluster.stages.coordinator = 2
    writer.commit(0, tokens)
    assert cluster.committed("t") == [b"a", b"b", b"c"]


def test_a_stage_that_is_gone_fails_what_is_written_to_it_and_the_commit(
    cluster: FakeStageCluster, writer: StagedWriter
) -> None:
    with writer.stage(0) as stage:
        stage.send("t", b"a", partition=0).result(30)
        cluster.call(lambda: cluster.stages.abort(list(cluster.stages.stages)))
        stage.send("t", b"b", partition=1)
        with pytest.raises(StageExpired, match="is gone"):
            stage.finish(30)
    token = staged(writer, 0, [b"c"])
    cluster.call(lambda: cluster.stages.abort([token.producer_id]))
    with pytest.raises(StageExpired, match="gone"):
        writer.commit(0, [token])
    assert writer.last_batch() == -1


def test_a_marker_that_came_before_the_record_fails_the_stage(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    cluster.faults.refuse = [InvalidProducerEpoch("epoch 0, the partition has 1")]
    with writer.stage(0) as stage:
        stage.send("t", b"a")
        with pytest.raises(StageExpired, match=r"another attempt has committed.*epoch 0, the partition has 1"):
            stage.finish(30)


def test_a_call_has_a_deadline(cluster: FakeStageCluster) -> None:
    no_second_try = {**FAST, "retry_backoff_ms": 120_000}
    with StagedWriter(cluster.bootstrap, "sink", delivery_timeout_ms=60_000, **no_second_try) as writer:
        cluster.stages.refuse = lambda method, request: CoordinatorLoadInProgress("loading")
        started = time.monotonic()
        for call in (writer.last_batch, lambda: writer.commit(0, [])):
            with pytest.raises(RequestTimedOut, match="loading"):
                call()
        with writer.stage(0) as stage:
            stage.send("t", b"a")
            with pytest.raises(RaftlogError, match="loading"):
                stage.finish()
        with pytest.raises(RequestTimedOut):
            writer.last_batch(0.1)
        assert time.monotonic() - started < 40


def test_a_stage_may_be_finished_again_after_a_timeout(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    cluster.hold_acks()
    with writer.stage(0) as stage:
        stage.send("t", b"a")
        with pytest.raises(TimeoutError):
            stage.finish(0.05)
        with pytest.raises(InvalidRequestError, match="being finished"):
            stage.send("t", b"b")
        cluster.release_acks()
        token = stage.finish(30)
    writer.commit(0, [token])
    assert cluster.committed("t") == [b"a"]


def test_a_timeout_never_loses_a_token(
    cluster: FakeStageCluster,
    writer: StagedWriter,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    close = ProducerEngine.close
    may_close = threading.Event()

    async def slow(engine: ProducerEngine) -> None:
        await asyncio.to_thread(may_close.wait)
        await close(engine)

    monkeypatch.setattr(ProducerEngine, "close", slow)
    request.addfinalizer(may_close.set)
    stages = [writer.stage(0) for _ in range(6)]  # more than are kept for the next ones
    for stage in stages:
        stage.send("t", b"a")
        stage.flush(30)
    tokens = [stage.finish(30) for stage in stages]
    assert [stage.finish(30) for stage in stages] == tokens, (
        "a stage whose finish timed out must return its token in the next call"
    )
    assert len({token.producer_id for token in tokens}) == 6
    for stage in stages:
        stage.abort()
    assert writer.commit(0, tokens).records == 6
    assert len(cluster.committed("t")) == 6


def test_a_token_that_came_just_after_the_timeout_is_given_again(
    cluster: FakeStageCluster, writer: StagedWriter
) -> None:
    for number in range(20):
        with writer.stage(number) as stage:
            stage.send("t", b"a")
            stage.flush(30)
            while True:
                try:
                    token = stage.finish(0.0002)
                    break
                except TimeoutError:
                    continue
        assert writer.commit(number, [token]).records == 1
    assert len(cluster.committed("t")) == 20


def test_another_target_is_another_sink(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    writer.commit(0, [])
    with StagedWriter(cluster.bootstrap, "sink", "u", **FAST) as other:
        with pytest.raises(SinkMismatch, match="'t', not to 'u'"):
            other.last_batch()
        with pytest.raises(SinkMismatch), other.stage(1) as stage:
            stage.send("t", b"a")
            stage.finish(30)
        with pytest.raises(SinkMismatch):
            other.commit(1, [])


def test_aborting_tokens(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    token = staged(writer, 0, [b"a"])
    writer.abort([token, token])
    with pytest.raises(StageExpired):
        writer.commit(0, [token])
    other = staged(writer, 0, [b"b"])
    writer.commit(0, [other])
    writer.abort([other])
    assert cluster.committed("t") == [b"b"]


def test_what_a_process_left_open_is_dropped_by_its_attempt(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    for batch_id, attempt in ((0, "run 1, part 1"), (0, "run 2, part 1"), (1, "run 1, part 1")):
        with writer.stage(batch_id, attempt) as stage:
            stage.send("t", b"a")
            stage.finish(30)
    assert writer.abort_open(0, "run 1,") == 1
    assert [stage.state for stage in cluster.stages.stages.values()] == ["aborted", "open", "open"]
    assert writer.abort_open(0) == 1
    assert writer.abort_open(0) == 0


def test_attempts_that_were_given_up_stage_nothing_any_more(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    with pytest.raises(InvalidRequestError, match="a fence needs the prefix of its attempts"):
        writer.abort_open(0, fence=True)
    assert writer.abort_open(0, "run 1,", fence=True) == 0
    with pytest.raises(StageExpired, match="given up"), writer.stage(0, "run 1, part 1") as stage:
        stage.send("t", b"a")
        stage.finish(30)
    with writer.stage(0, "run 2, part 1") as stage:
        stage.send("t", b"b")
        writer.commit(0, [stage.finish(30)])
    assert cluster.stages.calls.count("AbortStages") == 1
    assert writer.abort_open(0, "run 1,", fence=True) == 0
    assert cluster.stages.calls.count("AbortStages") == 1, "the stages of a committed batch must not be aborted"
    assert cluster.committed("t") == [b"b"]


def test_many_stages_at_once_do_not_mix(cluster: FakeStageCluster, writer: StagedWriter) -> None:
    tokens: list[StageToken] = []
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(3):
                with writer.stage(0) as stage:
                    for n in range(50):
                        stage.send("t", b"%d-%d-%d" % (number, turn, n))
                    if turn == 1:
                        continue  # aborted
                    tokens.append(stage.finish(60))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert writer.commit(0, tokens).records == 800
    wanted = sorted(b"%d-%d-%d" % (number, turn, n) for number in range(8) for turn in (0, 2) for n in range(50))
    assert cluster.committed("t") == wanted


@pytest.mark.parametrize("seed", range(6))
def test_any_faults_leave_every_batch_whole_and_once(cluster: FakeStageCluster, seed: int) -> None:
    """Failed parts are staged again, commits of unknown outcome are repeated."""
    rng = random.Random(seed)

    def refuse(method: str, request: Any) -> RaftlogError | None:
        if rng.random() < 0.05:
            cluster.stages.lose_answers.append(method)
        if rng.random() < 0.03:
            cluster.stages.coordinator = rng.choice((1, 2))
        return CoordinatorLoadInProgress("loading") if rng.random() < 0.1 else None

    cluster.stages.refuse = refuse
    cluster.faults.refuse_when = lambda topic, partition, count: (
        rng.choice((NotEnoughReplicas("few"), NotLeader("not me"), CorruptRecordError("bad")))
        if rng.random() < 0.04
        else None
    )
    with StagedWriter(cluster.bootstrap, "sink", "t", delivery_timeout_ms=20_000, **FAST) as writer:
        for batch_id in range(6):
            done = False
            while not done:
                tokens = []
                for part in range(3):
                    while True:
                        try:
                            tokens.append(
                                staged(writer, batch_id, [b"%d-%d-%d" % (batch_id, part, n) for n in range(20)])
                            )
                            break
                        except CorruptRecordError:
                            continue
                try:
                    writer.commit(batch_id, tokens)
                    done = rng.random() < 0.7  # else as a driver that died before it took note
                except StageExpired:
                    continue
    wanted = sorted(b"%d-%d-%d" % (batch, part, n) for batch in range(6) for part in range(3) for n in range(20))
    assert cluster.committed("t") == wanted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"acks": 1}, "acks=1 is not exactly once: a committed record that only one broker holds .*; leave it out$"),
        ({"enable_idempotence": False}, "enable.idempotence=False is not exactly once: a retried .*; leave it out$"),
        ({"retries": 0}, "retries=0"),
        ({"transactional_id": "x"}, "not for a staged writer"),
        ({"transaction_timeout_ms": 0}, "1 to"),
        ({"transaction_timeout_ms": "soon"}, "milliseconds"),
        ({"linger": 5}, "linger"),
        ({"config": {"acks": "all"}, "acks": "all"}, "twice"),
    ],
)
def test_options_that_contradict_staging_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        StagedWriter("127.0.0.1:1", "sink", **options)


def test_what_travels_is_the_token(writer: StagedWriter) -> None:
    with writer.stage(0) as stage:
        for one, words in (
            (writer, "a StagedWriter has connections.*make one in each process, with the same sink id"),
            (stage, "a Stage has connections.*send the token of its finish"),
        ):
            with pytest.raises(TypeError, match=words):
                pickle.dumps(one)


def test_ids_are_checked_at_once() -> None:
    with pytest.raises(InvalidRequestError, match="1 to 255"):
        StagedWriter("127.0.0.1:1", "")
    with StagedWriter("127.0.0.1:1", "sink") as writer:
        with pytest.raises(InvalidRequestError, match="numbered from 0"):
            writer.stage(-1)
        with pytest.raises(TypeError):
            writer.stage("1")  # type: ignore[arg-type] # what is tested


def test_a_closed_writer_says_so(cluster: FakeStageCluster) -> None:
    writer = StagedWriter(cluster.bootstrap, "sink", **FAST)
    token = staged(writer, 0, [b"a"])
    stage = writer.stage(0)
    stage.send("t", b"b").result(30)
    writer.close()
    writer.close()
    for call in (writer.last_batch, lambda: writer.stage(0), lambda: writer.commit(0, []), lambda: writer.abort([])):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError):
        stage.send("t", b"c")
    with StagedWriter(cluster.bootstrap, "sink", **FAST) as other:
        other.commit(0, [token])
    assert cluster.committed("t") == [b"a"]
