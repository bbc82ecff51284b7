"""Sinks: stages, the one decision on a batch, and commits that come too late (DESIGN section 10)."""

from __future__ import annotations

import pytest

from broker.coordinator.transactions import checks
from broker.coordinator.transactions.commands import (
    CommitBatch,
    InitStage,
    NeedsProducerId,
    PendingMarkers,
    TransactionConfig,
)
from broker.coordinator.transactions.transaction import FENCE_MS, MAX_FENCES, State
from raftlog.errors import (
    BatchAlreadyCommitted,
    BrokerOverloaded,
    InvalidRequestError,
    InvalidTransactionTimeout,
    RaftlogError,
    SinkMismatch,
    StageExpired,
)
from raftlog.v1 import transaction_pb2
from raftlog.v1.transaction_records_pb2 import TransactionRecordKey
from tests.support.transaction_driver import Call, TransactionDriver, error_of, hard, parts


def decisions(driver: TransactionDriver) -> dict[int, bool]:
    """Return the outcome of each stage by its pending markers."""
    assert all(markers.sink_id and markers.producer_epoch == 1 for markers in driver.pending)
    found = {markers.producer_id: markers.commit for markers in driver.pending}
    assert len(found) == len(driver.pending)
    return found


def committed(call: Call) -> tuple[int, bool]:
    answer = call.answer(transaction_pb2.CommitBatchResponse)
    return answer.last_batch_id, answer.already_committed


def test_one_record_decides_a_batch() -> None:
    driver = TransactionDriver()
    winner, loser, other = driver.init_stage(0, 0), driver.init_stage(0, 1, attempt="task 1.0"), driver.init_stage(0)
    driver.add_to_stage(other, 0, 1)
    before = len(driver.log)
    call = driver.commit(0, winner, other)
    assert len(driver.log) == before + 1
    assert TransactionRecordKey.FromString(driver.log[-1][0]).sink_id == "s"
    assert decisions(driver) == {winner: True, other: True, loser: False}
    assert {markers.producer_id: markers.partitions for markers in driver.pending} == {
        winner: frozenset(parts(0)),
        loser: frozenset(parts(1)),
        other: frozenset(parts(0, 1)),
    }
    driver.write_markers(2)
    assert not call.is_answered()
    driver.write_markers()
    assert committed(call) == (0, False)
    driver.wait(10)
    sink = driver.core.sinks["s"]
    assert sink.stages == {}
    assert sink.head is not None
    assert sink.head.committing == {winner, other}


def test_an_answer_waits_for_markers_but_not_for_ever() -> None:
    driver = TransactionDriver()
    call = driver.commit(0, driver.init_stage(0, 0))
    driver.wait(999)
    assert not call.is_answered()
    driver.wait(1)
    assert committed(call) == (0, False)


def test_a_retry_of_the_same_commit_has_the_same_answer() -> None:
    driver = TransactionDriver()
    stage = driver.init_stage(0, 0)
    first, retry = driver.commit(0, stage), driver.commit(0, stage)
    driver.restart()
    after_failover = driver.commit(0, stage)
    assert not after_failover.is_answered()
    driver.write_markers()
    assert committed(after_failover) == (0, False)
    assert committed(driver.commit(0, stage)) == (0, False)
    driver.wait(10)
    driver.restart()
    assert committed(driver.commit(0, stage)) == (0, False)
    assert not first.is_answered()  # the frame has told them that their coordinator is gone
    assert not retry.is_answered()


def test_a_batch_is_committed_once() -> None:
    """Two drivers on one checkpoint: the second one's stages of the batch are gone, and it hears that it is done."""
    driver = TransactionDriver()
    mine, theirs = driver.init_stage(4, 0), driver.init_stage(4, 0)
    call = driver.commit(4, mine)
    assert committed(driver.commit(4, theirs)) == (4, True)
    assert decisions(driver) == {mine: True, theirs: False}
    driver.write_markers()
    assert committed(call) == (4, False)
    for batch_id in (4, 3, 0):
        assert committed(driver.commit(batch_id, theirs)) == (4, True)
        with pytest.raises(BatchAlreadyCommitted, match="has committed batch 4"):
            driver.init_stage(batch_id)
    assert driver.last().last_batch_id == 4


def test_a_late_commit_of_a_committed_batch_leaves_the_next_one_alone() -> None:
    driver = TransactionDriver()
    driver.committed(0, driver.init_stage(0, 0))
    later = driver.init_stage(1, 0)
    assert committed(driver.commit(0, later)) == (0, True)
    assert driver.commit(1, later)
    assert decisions(driver) == {later: True}


@pytest.mark.parametrize("how", ["unknown", "aborted", "timed out", "of another batch", "named before"])
def test_a_winner_that_is_gone_fails_the_batch_and_nothing_changes(how: str) -> None:
    driver = TransactionDriver()
    winner = driver.init_stage(1, 0, timeout_ms=900_000)
    gone = 17
    if how == "aborted":
        gone = driver.init_stage(1, 1)
        driver.abort_stages(gone)
    elif how == "timed out":
        gone = driver.init_stage(1, 1, timeout_ms=1_000)
        driver.wait(1_000)
    elif how == "of another batch":
        gone = driver.init_stage(2, 1)
    elif how == "named before":
        gone = driver.init_stage(0, 1)
        driver.committed(0, gone)
    driver.write_markers()
    driver.wait(10)
    before = list(driver.log)
    assert isinstance(error_of(driver.commit(1, winner, gone)), StageExpired)
    assert driver.log == before
    assert not driver.pending
    driver.add_to_stage(winner, 3)
    driver.commit(1, winner)
    assert decisions(driver)[winner]


def test_a_batch_without_winners_is_legal() -> None:
    driver = TransactionDriver()
    assert committed(driver.commit(0)) == (0, False)
    loser = driver.init_stage(1, 0)
    call = driver.commit(1)
    assert decisions(driver) == {loser: False}
    driver.write_markers()
    assert committed(call) == (1, False)
    assert driver.last().last_batch_id == 1


def test_stages_of_later_batches_stay_and_those_of_earlier_ones_go() -> None:
    driver = TransactionDriver()
    stages = {batch_id: driver.init_stage(batch_id, 0) for batch_id in range(4)}
    driver.commit(2, stages[2])
    assert decisions(driver) == {stages[0]: False, stages[1]: False, stages[2]: True}
    driver.add_to_stage(stages[3], 1)
    with pytest.raises(StageExpired):
        driver.add_to_stage(stages[1], 1)


def test_winners_keep_standing_until_their_markers_are_written() -> None:
    driver = TransactionDriver()
    slow = driver.init_stage(0, 0)
    driver.commit(0, slow)
    (markers,) = driver.pending
    quick = driver.init_stage(1, 0)
    driver.commit(1, quick)
    driver.restart()
    assert decisions(driver) == {slow: True, quick: True}
    driver.pending.reverse()
    driver.write_markers(1)
    driver.wait(10)
    last = driver.init_stage(2, 0)
    driver.commit(2, last)
    head = driver.core.sinks["s"].head
    assert head is not None
    assert head.committing == {slow, last}
    driver.restart()
    assert decisions(driver) == {slow: True, last: True}
    assert markers in driver.pending


def test_a_winner_stands_in_the_next_record_until_its_own_is_gone() -> None:
    """Its markers are written, that is not on record, and the coordinator fails: it is a winner still."""
    driver = TransactionDriver()
    driver.committed(0, first := driver.init_stage(0, 0))
    driver.commit(1, second := driver.init_stage(1, 0))
    driver.restart()
    assert decisions(driver) == {first: True, second: True}
    driver.write_markers()
    driver.wait(10)
    assert driver.core.sinks["s"].stages == {}
    driver.commit(2)
    head = driver.core.sinks["s"].head
    assert head is not None
    assert head.committing == set()


def test_a_commit_waits_for_losers_too_as_they_hold_the_last_stable_offset() -> None:
    driver = TransactionDriver()
    winner, loser = driver.init_stage(0, 0), driver.init_stage(0, 0)
    driver.abort_stages(loser)
    call = driver.commit(0, winner)
    driver.pending = [markers for markers in driver.pending if markers.commit]
    driver.write_markers()
    assert not call.is_answered()
    driver.wait(1000)
    assert committed(call) == (0, False)


# Stages


def test_stages_are_aborted_by_name_and_those_that_are_gone_are_passed_over() -> None:
    driver = TransactionDriver()
    first, second, third = (driver.init_stage(0, number) for number in range(3))
    driver.abort_stages(first, 17, first, second)
    driver.abort_stages(first, second)
    assert decisions(driver) == {first: False, second: False}
    with pytest.raises(StageExpired):
        driver.add_to_stage(first, 5)
    driver.write_markers()
    driver.wait(10)
    assert set(driver.core.sinks["s"].stages) == {third}
    driver.abort_stages(first, sink_id="unknown")


def test_attempts_that_were_given_up_begin_no_stage_any_more() -> None:
    driver = TransactionDriver()
    mine, others = driver.init_stage(3, 0, attempt="run a, task 1"), driver.init_stage(3, 0, attempt="run b, task 1")
    later, elsewhere = (
        driver.init_stage(4, 0, attempt="run a, task 1"),
        driver.init_stage(3, sink_id="else", attempt="run a"),
    )
    driver.fence(3, "run a")
    assert decisions(driver) == {mine: False}
    driver.write_markers()
    driver.wait(10)
    for _ in range(2):
        with pytest.raises(StageExpired, match=r"batch 3 of the sink 's' was given up .* by 'run a, task 2'"):
            driver.init_stage(3, 0, attempt="run a, task 2")
        driver.restart()
    also = driver.init_stage(3, 1, attempt="run b, task 2")
    driver.committed(3, others, also)
    driver.committed(4, later)
    driver.fence(4, "run b")
    assert driver.core.sinks["s"].head is not None
    assert driver.core.sinks["s"].head.fences == (), "a batch that is complete must keep no fences"
    driver.commit(3, elsewhere, sink_id="else")
    assert decisions(driver) == {elsewhere: True}


def test_a_fence_is_there_before_the_first_stage_and_is_forgotten_in_time() -> None:
    """A task that is slow to begin: its driver has given up before the coordinator has heard of the sink."""
    driver = TransactionDriver()
    driver.fence(0, "run a")
    driver.wait(FENCE_MS - 1)
    with pytest.raises(StageExpired):
        driver.init_stage(0, 0, attempt="run a, task 1")
    driver.init_stage(0, 0, attempt="run b, task 1", timeout_ms=1)
    with pytest.raises(StageExpired):
        driver.init_stage(0, 0, attempt="run a, task 1")
    driver.wait(1)
    driver.write_markers()
    driver.wait(2 * FENCE_MS)
    assert "s" not in driver.core.sinks


def test_the_newest_fences_are_kept_and_each_once() -> None:
    driver = TransactionDriver()
    for number in range(MAX_FENCES + 1):
        driver.fence(0, f"run {number},")
        driver.fence(0, f"run {number},")
    driver.init_stage(0, 0, attempt="run 0, task 1")
    for number in range(1, MAX_FENCES + 1):
        with pytest.raises(StageExpired):
            driver.init_stage(0, 0, attempt=f"run {number}, task 1")


@pytest.mark.parametrize(("batch_id", "words"), [(-1, "run"), (0, "x" * 256)])
def test_a_fence_that_can_be_nobodys_is_refused(batch_id: int, words: str) -> None:
    driver = TransactionDriver()
    stage = driver.init_stage(0, 0)
    before = list(driver.log)
    with pytest.raises(InvalidRequestError):
        driver.fence(batch_id, words, stage)
    assert driver.log == before


def test_who_was_named_cannot_be_aborted() -> None:
    driver = TransactionDriver()
    stage = driver.init_stage(0, 0, timeout_ms=1_000)
    driver.commit(0, stage)
    driver.abort_stages(stage)
    driver.wait(100_000)
    assert decisions(driver) == {stage: True}


def test_a_stage_times_out_unless_it_is_named_also_after_a_failover() -> None:
    driver = TransactionDriver()
    stage = driver.init_stage(0, 0, timeout_ms=5_000)
    driver.wait(3_000)
    driver.restart()
    driver.wait(1_999)
    assert not driver.pending
    driver.add_to_stage(stage, 1)
    driver.wait(1)
    assert decisions(driver) == {stage: False}
    assert isinstance(error_of(driver.commit(0, stage)), StageExpired)
    driver.restart()
    assert decisions(driver) == {stage: False}


def test_what_a_stage_has_already_writes_nothing() -> None:
    driver = TransactionDriver()
    stage = driver.init_stage(0, 0, 1)
    before = list(driver.log)
    driver.add_to_stage(stage, 1)
    assert driver.log == before


def test_thousands_of_stages_are_aborted_a_piece_at_a_time() -> None:
    driver = TransactionDriver()
    stages = [driver.init_stage(0, 0) for _ in range(700)]
    driver.abort_stages(*stages)
    assert decisions(driver) == dict.fromkeys(stages, False)
    driver.write_markers()
    driver.wait(10)
    assert not driver.core.sinks["s"].stages


def test_a_fresh_id_is_asked_for_only_where_one_is_needed() -> None:
    driver = TransactionDriver()
    call = Call()
    request = transaction_pb2.InitStageRequest(sink_id="s", target="t", timeout_ms=1)
    assert not driver.submit(InitStage(call, request)).records
    assert isinstance(error_of(call), NeedsProducerId)
    driver.commit(0)
    again = Call()
    driver.submit(InitStage(again, request))
    answer = again.answer(transaction_pb2.InitStageResponse)
    assert answer.last_batch_id == 0
    assert answer.HasField("error")


# Targets


def test_a_sink_writes_to_one_target() -> None:
    driver = TransactionDriver()
    stage = driver.init_stage(0, 0, target="a")
    with pytest.raises(SinkMismatch, match="'a', not to 'b'"):
        driver.init_stage(0, target="b")
    assert isinstance(error_of(driver.commit(0, stage, target="b")), SinkMismatch)
    driver.commit(0, stage, target="a")
    driver.write_markers()
    driver.wait(10)
    with pytest.raises(SinkMismatch):
        driver.init_stage(1, target="b")
    assert isinstance(error_of(driver.commit(1, target="b")), SinkMismatch)
    assert driver.last().target == "a"


def test_a_target_that_nothing_was_ever_committed_to_may_be_put_right() -> None:
    driver = TransactionDriver()
    driver.abort_stages(driver.init_stage(0, 0, target="typo"))
    driver.write_markers()
    driver.wait(10)
    driver.init_stage(0, 0, target="topic")
    assert driver.last().target == "topic"


# LastBatch


def test_the_last_batch_and_the_stages_that_stand() -> None:
    """Also decided ones: until their markers are written they are not over (and not hanging, KIP-664)."""
    driver = TransactionDriver()
    assert (driver.last().last_batch_id, driver.last().target) == (-1, "")
    stages = [driver.init_stage(0, 0, attempt=f"{number}.0") for number in range(500)]
    driver.abort_stages(stages[7])
    shown = driver.last()
    assert shown.last_batch_id == -1
    assert {stage.producer_id: stage.state for stage in shown.stages} == {
        producer_id: transaction_pb2.PREPARE_ABORT if producer_id == stages[7] else transaction_pb2.TRANSACTION_ONGOING
        for producer_id in stages
    }
    assert shown.stages[0].attempt == "0.0"
    winner = driver.init_stage(3, 1)
    committed_ms = driver.now.wall_ms
    driver.commit(3, winner)
    shown = driver.last()
    assert {stage.producer_id: stage.state for stage in shown.stages} == dict.fromkeys(
        stages, transaction_pb2.PREPARE_ABORT
    ) | {winner: transaction_pb2.PREPARE_COMMIT}
    driver.write_markers()
    shown = driver.last()
    assert (shown.last_batch_id, len(shown.stages)) == (3, 0), (
        "a stage whose markers are written must be gone, even before a record says so"
    )
    assert shown.updated_ms == committed_ms


# Bounds and age


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"sink_id": "", "timeout_ms": 1}, InvalidRequestError),
        ({"sink_id": "s" * 256, "timeout_ms": 1}, InvalidRequestError),
        ({"sink_id": "s", "timeout_ms": 1, "batch_id": -1}, InvalidRequestError),
        ({"sink_id": "s", "timeout_ms": 1, "target": "t" * 1025}, InvalidRequestError),
        ({"sink_id": "s", "timeout_ms": 1, "attempt": "a" * 256}, InvalidRequestError),
        ({"sink_id": "s"}, InvalidTransactionTimeout),
        ({"sink_id": "s", "timeout_ms": 900_001}, InvalidTransactionTimeout),
    ],
)
def test_what_can_never_be_staged(request_: dict[str, object], error: type[RaftlogError]) -> None:
    driver = TransactionDriver()
    call = Call()
    assert not driver.submit(InitStage(call, transaction_pb2.InitStageRequest(**request_), 1)).records  # type: ignore[arg-type] # fields by name
    assert isinstance(error_of(call), error)
    assert not driver.core.sinks


def test_a_stage_named_twice_and_a_batch_below_zero() -> None:
    driver = TransactionDriver()
    stage = driver.init_stage(0, 0)
    assert isinstance(error_of(driver.commit(0, stage, stage)), InvalidRequestError)
    assert isinstance(error_of(driver.commit(-1)), InvalidRequestError)
    with pytest.raises(InvalidRequestError):
        driver.last("")
    with pytest.raises(InvalidRequestError):
        driver.abort_stages(sink_id="")


def test_a_sink_has_a_bounded_number_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.coordinator.transactions.staging.MAX_STAGES", 3)
    assert checks.MAX_STAGES == 10_000
    driver = TransactionDriver()
    stages = [driver.init_stage(0, 0) for _ in range(3)]
    with pytest.raises(BrokerOverloaded, match="3 stages"):
        driver.init_stage(0)
    driver.abort_stages(stages[0])
    driver.write_markers()
    driver.wait(10)
    driver.init_stage(0)


def test_a_sink_is_remembered_for_a_year_and_for_as_long_as_a_stage_stands() -> None:
    driver = TransactionDriver()
    day_ms = 24 * 60 * 60 * 1000
    driver.commit(5)
    driver.commit(5, sink_id="held")
    driver.now_ms += 364 * day_ms
    driver.settle()
    assert set(driver.core.sinks) == {"s", "held"}
    driver.init_stage(6, 0, sink_id="held")
    driver.now_ms += 2 * day_ms
    driver.settle()  # the stage has timed out, and its markers are never written
    assert set(driver.core.sinks) == {"held"}
    assert driver.last().last_batch_id == -1


# Replay


def test_every_prefix_of_the_log_decides_each_stage_in_one_way() -> None:
    driver = TransactionDriver()
    first, second, third = driver.init_stage(0, 0), driver.init_stage(0, 1), driver.init_stage(1, 0)
    driver.committed(0, first)
    driver.wait(10)
    driver.abort_stages(third)
    driver.write_markers()
    driver.wait(10)
    log, told = list(driver.log), dict[int, bool]()
    for cut in range(len(log) + 1):
        driver.restart(log[:cut])
        for producer_id, commit in decisions(driver).items():
            assert told.setdefault(producer_id, commit) is commit
    assert told == {first: True, second: False, third: False}
    before = hard(driver.core)
    driver.restart()
    assert hard(driver.core) == before


def test_pending_markers_name_no_groups() -> None:
    driver = TransactionDriver()
    driver.abort_stages(stage := driver.init_stage(0, 0))
    assert driver.pending == [PendingMarkers("", "s", stage, 1, False, frozenset(parts(0)))]
    assert driver.core.sinks["s"].state_of(stage, driver.core.sinks["s"].stages[stage]) is State.PREPARE_ABORT


def test_too_many_winners_are_refused_before_they_are_looked_at() -> None:
    driver = TransactionDriver()
    error = error_of(driver.commit(0, *[7] * (checks.MAX_STAGES + 1)))
    assert isinstance(error, InvalidRequestError)
    assert "names 10001 stages" in str(error)


# Sinks that are not used again

HOUR_MS = 60 * 60 * 1000


def commit_one_off(driver: TransactionDriver, batch_id: int, expire_after_ms: int) -> None:
    call = Call()
    request = transaction_pb2.CommitBatchRequest(
        sink_id="s", batch_id=batch_id, target="t", expire_after_ms=expire_after_ms
    )
    driver.submit(CommitBatch(call, request))
    assert committed(call) == (batch_id, False)


def test_a_sink_may_be_forgotten_sooner_than_others() -> None:
    driver = TransactionDriver()
    driver.committed(0, sink_id="other")
    commit_one_off(driver, 0, 24 * HOUR_MS)
    driver.restart()
    driver.wait(23 * HOUR_MS)
    assert driver.last().last_batch_id == 0
    driver.wait(2 * HOUR_MS)
    assert set(driver.core.sinks) == {"other"}
    before = hard(driver.core)
    driver.restart()
    assert hard(driver.core) == before


def test_not_later_than_others_and_by_what_the_last_batch_says() -> None:
    driver = TransactionDriver(TransactionConfig(sink_expiration_ms=48 * HOUR_MS))
    commit_one_off(driver, 0, 24 * HOUR_MS)
    driver.committed(1)
    driver.wait(47 * HOUR_MS)
    assert driver.last().last_batch_id == 1
    commit_one_off(driver, 2, 1000 * HOUR_MS)
    driver.wait(50 * HOUR_MS)
    assert not driver.core.sinks


def test_a_sink_that_has_committed_nothing_goes_with_its_last_stage() -> None:
    driver = TransactionDriver()
    driver.init_stage(0, 0)
    driver.wait(2 * HOUR_MS)
    assert driver.core.sinks, "the sink must stay as long as it has a stage"
    driver.write_markers()
    driver.wait(2 * HOUR_MS)
    assert not driver.core.sinks


def owed_by_hand(driver: TransactionDriver) -> dict[str, int]:
    """What the transactions and stages of each user name, counted anew."""
    counts: dict[str, int] = {}
    for transaction in driver.core.transactions.values():
        named = len(transaction.partitions) + len(transaction.group_ids)
        counts[transaction.user] = counts.get(transaction.user, 0) + named
    for sink in driver.core.sinks.values():
        for stage in sink.stages.values():
            counts[sink.user] = counts.get(sink.user, 0) + len(stage.partitions)
    return {user: count for user, count in counts.items() if user and count}


def test_what_is_named_counts_until_all_markers_are_written() -> None:
    driver = TransactionDriver()
    producer = driver.init("x", user="User:a")
    driver.add(producer, 0, 1, groups=["g"])
    stages = [driver.init_stage(1, 0, 1, 2, user="User:b") for _ in range(3)]
    driver.add_to_stage(stages[0], 2, 3)
    without_user = driver.init("y")
    driver.add(without_user, 0)
    assert driver.core.owed == owed_by_hand(driver) == {"User:a": 3, "User:b": 10}
    driver.restart()
    assert driver.core.owed == {"User:a": 3, "User:b": 10}, "the next coordinator counts the same"
    driver.end(producer)
    driver.commit(1, stages[0])
    assert driver.core.owed == {"User:a": 3, "User:b": 10}, "their markers are still to be written"
    driver.settle()
    driver.write_markers()
    driver.wait(driver.config.complete_after_ms)
    assert driver.core.owed == owed_by_hand(driver) == {}


def test_stages_count_for_their_sinks_user_whichever_record_comes_first() -> None:
    """A compacted log has the sink's last record, which is behind those of its stages."""
    driver = TransactionDriver()
    driver.init_stage(1, 0, 1, user="User:b")
    (head,) = [each for each in driver.log if TransactionRecordKey.FromString(each[0]).WhichOneof("kind") == "sink_id"]
    driver.restart([each for each in driver.log if each != head] + [head])
    assert driver.core.owed == owed_by_hand(driver) == {"User:b": 2}


def test_a_user_that_names_too_much_is_refused_until_some_of_it_has_ended() -> None:
    driver = TransactionDriver(most_owed=5)
    producer = driver.init("x", user="User:a")
    driver.add(producer, 0, 1)
    stage = driver.init_stage(1, 0, 1, user="User:a")
    driver.add(driver.init("y", user="User:b"), 0, 1, 2)
    with pytest.raises(BrokerOverloaded, match="name 4 partitions and groups at this broker, and may name 5: 2 more"):
        driver.add(producer, 2, groups=["g"])
    with pytest.raises(BrokerOverloaded):
        driver.init_stage(1, 0, 1, user="User:a")
    with pytest.raises(BrokerOverloaded):
        driver.add_to_stage(stage, 2, 3)
    driver.add(producer, 0, 1, 2)  # one more
    assert driver.core.owed["User:a"] == 5
    driver.add(producer, 0, 1)  # nothing more
    driver.add_to_stage(stage, 0)
    driver.end(producer)
    driver.settle()
    driver.write_markers()
    driver.wait(driver.config.complete_after_ms)
    driver.init_stage(1, 0, 1, user="User:a")
