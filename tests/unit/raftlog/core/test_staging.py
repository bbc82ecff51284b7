"""Stage tokens, and what a commit of some comes to."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from raftlog._core.staging import NO_PRODUCER, StageToken, check_batch_id, check_sink_id, plan_commit, stages_of
from raftlog.errors import InvalidRequestError


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
    assert plan.producer_ids == [5], "to be dropped"


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
        with pytest.raises(InvalidRequestError, match="from 0 on"):
            check_batch_id(bad_batch)
    with pytest.raises(TypeError):
        check_batch_id(True)
