"""A transactional producer's states, and stage tokens."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.accumulator import LAST_EPOCH
from raftlog._core.staging import NO_PRODUCER, StageToken, check_batch_id, check_sink_id, plan_commit, stages_of
from raftlog._core.transaction_state import Numbers, TransactionPhase, TransactionState
from raftlog.errors import (
    BrokerUnavailable,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidRequestError,
    InvalidTxnState,
    MessageTooLarge,
    ProducerFenced,
    RaftlogError,
    TransactionAbortable,
)

NEW, READY, OPEN = TransactionPhase.NEW, TransactionPhase.READY, TransactionPhase.OPEN
FLUSHING, COMMITTING, ABORTING = TransactionPhase.FLUSHING, TransactionPhase.COMMITTING, TransactionPhase.ABORTING
FAILED, FATAL = TransactionPhase.FAILED, TransactionPhase.FATAL
NEXT = Numbers(7, 4)

ROADS: dict[TransactionPhase, list[Callable[[TransactionState], object]]] = {}
ROADS[NEW] = []
ROADS[READY] = [lambda state: state.initialized(Numbers(7, 3))]
ROADS[OPEN] = [*ROADS[READY], lambda state: state.begin()]
ROADS[FLUSHING] = [*ROADS[OPEN], lambda state: state.flush()]
ROADS[COMMITTING] = [*ROADS[FLUSHING], lambda state: state.commit()]
ROADS[ABORTING] = [*ROADS[OPEN], lambda state: state.abort()]
ROADS[FAILED] = [*ROADS[OPEN], lambda state: state.fail(MessageTooLarge("a large one"))]
ROADS[FATAL] = [*ROADS[OPEN], lambda state: state.refused(ProducerFenced("epoch 5 has begun"))]


def at(phase: TransactionPhase) -> TransactionState:
    state = TransactionState("transfers")
    for step in ROADS[phase]:
        step(state)
    assert state.phase is phase
    return state


CALLS: dict[str, Callable[[TransactionState], object]] = {
    "send": TransactionState.check_may_send,
    "begin": TransactionState.begin,
    "commit": TransactionState.flush,
    "abort": TransactionState.abort,
}
ALLOWED = {
    "send": {OPEN: OPEN},
    "begin": {READY: OPEN},
    "commit": {OPEN: FLUSHING, COMMITTING: COMMITTING},
    "abort": {OPEN: ABORTING, FLUSHING: ABORTING, FAILED: ABORTING, ABORTING: ABORTING},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("phase", [phase for phase in TransactionPhase if phase is not NEW])
def test_every_call_is_allowed_in_these_states_only(call: str, phase: TransactionPhase) -> None:
    state = at(phase)
    if phase in ALLOWED[call]:
        CALLS[call](state)
        assert state.phase is ALLOWED[call][phase]
        return
    wanted: type[RaftlogError] = InvalidTxnState
    if phase is FATAL:
        wanted = ProducerFenced
    elif phase is FAILED and call in ("send", "commit"):
        wanted = TransactionAbortable
    with pytest.raises(wanted):
        CALLS[call](state)
    assert state.phase is phase, "a refused call must not change the phase"


@pytest.mark.parametrize(
    ("phase", "call", "says"),
    [
        (NEW, "send", "call begin_transaction.. first, or send within `with producer.transaction..:`"),
        (READY, "send", "call begin_transaction"),
        (READY, "commit", "nothing to commit: call begin_transaction.. first"),
        (READY, "abort", "nothing to abort"),
        (OPEN, "begin", "commit or abort it first"),
        (COMMITTING, "begin", "call commit_transaction.. again to learn the outcome"),
        (COMMITTING, "abort", "call commit_transaction.. again"),
        (COMMITTING, "send", "takes no more records"),
        (ABORTING, "commit", "call abort_transaction.. first"),
        (FAILED, "begin", "call abort_transaction.. first"),
        (FAILED, "send", "can only be aborted: a large one; call abort_transaction"),
        (FATAL, "begin", "transfers' no longer belongs to this producer.*epoch 5 has begun.*close this producer"),
    ],
)
def test_a_refused_call_says_what_to_do(phase: TransactionPhase, call: str, says: str) -> None:
    with pytest.raises(RaftlogError, match=says):
        CALLS[call](at(phase))


def test_the_next_transaction_has_the_numbers_of_the_answer() -> None:
    state = at(COMMITTING)
    state.ended(NEXT)
    assert state.phase is READY
    assert state.begin() == NEXT


@pytest.mark.parametrize("phase", [COMMITTING, ABORTING])
def test_after_the_last_epoch_another_producer_id_is_needed(phase: TransactionPhase) -> None:
    state = at(phase)
    state.ended(Numbers(7, LAST_EPOCH))
    assert state.phase is NEW
    assert state.numbers == (7, LAST_EPOCH), "the numbers must stay, as they prove that the same producer asks"
    state.initialized(Numbers(8, 0))
    assert state.begin() == (8, 0)


def test_a_flush_that_takes_too_long_leaves_the_transaction_open() -> None:
    state = at(FLUSHING)
    state.resume()
    assert state.phase is OPEN
    failed = at(FLUSHING)
    failed.fail(MessageTooLarge("a large one"))
    failed.resume()
    assert failed.phase is FAILED


@pytest.mark.parametrize(
    ("phase", "error", "then"),
    [
        (OPEN, MessageTooLarge("large"), FAILED),
        (FLUSHING, TransactionAbortable("timed out"), FAILED),
        (OPEN, InvalidProducerEpoch("a marker was there before"), FAILED),
        (OPEN, ProducerFenced("fenced"), FATAL),
        (OPEN, InvalidProducerIdMapping("another id"), FATAL),
        (COMMITTING, MessageTooLarge("late"), COMMITTING),
        (ABORTING, MessageTooLarge("late"), ABORTING),
        (READY, MessageTooLarge("late"), READY),
        (FAILED, MessageTooLarge("the second"), FAILED),
    ],
)
def test_an_error_of_a_record_moves_to_the_phase_that_follows(
    phase: TransactionPhase, error: RaftlogError, then: TransactionPhase
) -> None:
    state = at(phase)
    assert state.fail(error) == (phase in (OPEN, FLUSHING))
    assert state.phase is then


@pytest.mark.parametrize(
    ("phase", "error", "then"),
    [
        (COMMITTING, TransactionAbortable("timed out"), FAILED),
        (COMMITTING, ProducerFenced("fenced"), FATAL),
        (COMMITTING, InvalidProducerEpoch("never given out"), FATAL),
        (COMMITTING, InvalidTxnState("aborted before"), FATAL),
        (COMMITTING, BrokerUnavailable("nobody"), COMMITTING),
        (ABORTING, ProducerFenced("fenced"), FATAL),
        (ABORTING, BrokerUnavailable("nobody"), ABORTING),
        (NEW, ProducerFenced("fenced"), FATAL),
        (NEW, BrokerUnavailable("nobody"), NEW),
    ],
)
def test_what_the_coordinator_refuses(phase: TransactionPhase, error: RaftlogError, then: TransactionPhase) -> None:
    state = at(phase)
    state.refused(error)
    assert state.phase is then


def test_the_cause_goes_with_the_error() -> None:
    state = at(FAILED)
    with pytest.raises(TransactionAbortable) as raised:
        state.check_may_send()
    assert isinstance(raised.value.__cause__, MessageTooLarge)
    timed_out = at(OPEN)
    timed_out.fail(TransactionAbortable("it timed out after 100 ms; abort it"))
    with pytest.raises(TransactionAbortable, match=r"^it timed out after 100 ms; abort it$"):
        timed_out.check_may_send()


EVENTS: list[Callable[[TransactionState], object]] = [
    *CALLS.values(),
    TransactionState.resume,
    lambda state: state.commit() if state.phase in (FLUSHING, COMMITTING, FAILED) else None,
    lambda state: state.initialized(Numbers(8, 0)) if state.phase is NEW else None,
    lambda state: state.ended(NEXT) if state.phase in (COMMITTING, ABORTING) else None,
    lambda state: state.ended(NEXT, known=False) if state.phase is ABORTING else None,
    lambda state: state.fail(MessageTooLarge("m")),
    lambda state: state.fail(ProducerFenced("f")),
    lambda state: state.refused(TransactionAbortable("t")),
    lambda state: state.refused(InvalidTxnState("i")),
]


@given(st.lists(st.integers(0, len(EVENTS) - 1), max_size=30))
def test_no_order_of_events_leaves_the_table(order: list[int]) -> None:
    """Fatal is for ever, what is being committed is never written to or aborted, and there is always a way out."""
    state = TransactionState("transfers")
    for index in order:
        before = state.phase
        if before is NEW and EVENTS[index] is TransactionState.begin:
            continue
        try:
            EVENTS[index](state)
        except RaftlogError:
            assert state.phase is before
        if before is FATAL:
            assert state.phase is FATAL
        if before is COMMITTING:
            assert state.phase in (COMMITTING, READY, FAILED, FATAL)
        if state.phase in (FAILED, FATAL):
            assert state.cause is not None
    if state.phase in (OPEN, FLUSHING, FAILED, ABORTING):
        state.abort()
        state.ended(NEXT)
        assert state.phase is READY


@pytest.mark.parametrize("error", [ProducerFenced("epoch 5 has begun"), InvalidProducerIdMapping("forgotten")])
def test_an_id_that_is_lost_while_a_commit_waits_for_its_records_is_told_by_the_commit(error: RaftlogError) -> None:
    state = at(FLUSHING)
    assert state.fail(error)  # what a record that was on its way is refused with
    with pytest.raises(ProducerFenced):
        state.commit()
    assert state.phase is FATAL


def token(producer_id: int, **more: Any) -> StageToken:
    return StageToken("s", 7, producer_id, records=10)._replace(**more)


def test_a_token_travels_pickled_and_as_json() -> None:
    for each in (token(5), token(NO_PRODUCER), token(NO_PRODUCER, already_committed=True)):
        assert StageToken.from_json(each.to_json()) == each
        assert pickle.loads(pickle.dumps(each)) == each  # noqa: S301 # as Spark sends it
    assert json.loads(token(5).to_json())["producer_id"] == 5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        '{"sink_id": "s"}',
        '{"sink_id": "s", "batch_id": 7, "more": 1}',
        '{"sink_id": "", "batch_id": 7}',
        '{"sink_id": "s", "batch_id": -1}',
        '{"sink_id": "s", "batch_id": 7, "producer_id": -2}',
        '{"sink_id": "s", "batch_id": 7, "producer_id": 1.5}',
        '{"sink_id": "s", "batch_id": 7, "already_committed": 1}',
        '{"sink_id": 5, "batch_id": 7}',
        '{"sink_id": "s", "batch_id": true}',
    ],
)
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises((InvalidRequestError, TypeError)):
        StageToken.from_json(text)


def test_a_commit_names_the_stages_that_hold_something() -> None:
    plan = plan_commit("s", 7, [token(5), token(NO_PRODUCER, records=0), token(6)])
    assert plan.producer_ids == [5, 6]
    assert (plan.repeated, plan.records) == (False, 20)
    assert plan_commit("s", 7, []).producer_ids == []


def test_one_stage_that_found_the_batch_committed_says_so_for_all() -> None:
    plan = plan_commit("s", 7, [token(5), token(NO_PRODUCER, already_committed=True)])
    assert plan.repeated
    assert plan.producer_ids == [5], "the stage must be listed, so that it is dropped"


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([token(5, sink_id="other")], "sink 'other'"),
        ([token(5, batch_id=8)], "batch 8"),
        ([token(5), token(5)], "twice"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tokens: list[StageToken], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        plan_commit("s", 7, tokens)


def test_what_is_no_token_is_no_token_of_a_commit() -> None:
    with pytest.raises(TypeError, match="StageToken"):
        plan_commit("s", 7, ["5"])  # type: ignore[list-item] # what is tested
    with pytest.raises(TypeError, match="StageToken"):
        stages_of("s", [None])  # type: ignore[list-item] # what is tested


def test_stages_to_abort_may_be_of_several_batches_and_twice() -> None:
    assert stages_of("s", [token(5), token(5), token(6, batch_id=3), token(NO_PRODUCER)]) == [5, 6]
    with pytest.raises(InvalidRequestError, match="sink 'other'"):
        stages_of("s", [token(5, sink_id="other")])


def test_ids_are_checked() -> None:
    assert check_sink_id("s" * 255)
    for bad in ("", "s" * 256):
        with pytest.raises(InvalidRequestError, match="1 to 255"):
            check_sink_id(bad)
    for bad_batch in (-1, 1 << 63):
        with pytest.raises(InvalidRequestError, match="from 0, each"):
            check_batch_id(bad_batch)
    with pytest.raises(TypeError):
        check_batch_id(True)
