"""The checks of the chaos test notice violations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.linearizability import NO_ANSWER, NotLinearizable, Operation, check
from tests.support.metadata_workload import (
    UNREAD,
    Barrier,
    ConfigModel,
    check_barriers,
    without_unread_values,
)


def op(start: float, end: float | None, answer: object, *request: str) -> Operation:
    return Operation(0, start, end, request, NO_ANSWER if end is None else answer)


def test_a_topic_lives_from_create_to_delete() -> None:
    history = [
        op(0, 1, "unknown", "set", "1"),
        op(2, 3, "ok", "create", "2"),
        op(4, 5, "exists", "create", "3"),
        op(6, 7, "2", "read"),
        op(8, 9, "ok", "set", "4"),
        op(10, 11, "4", "read"),
        op(12, 13, "ok", "delete"),
        op(14, 15, None, "read"),
        op(16, 17, "refused", "create", "5"),
    ]
    assert check(history, ConfigModel()) == history


@pytest.mark.parametrize(
    "last",
    [
        op(4, 5, None, "read"),
        op(4, 5, "1", "read"),
        op(4, 5, "ok", "create", "9"),
        op(4, 5, "unknown", "set", "9"),
        op(4, 5, "unknown", "delete"),
    ],
)
def test_an_acknowledged_change_that_is_lost_is_noticed(last: Operation) -> None:
    with pytest.raises(NotLinearizable):
        check([op(0, 1, "ok", "create", "1"), op(2, 3, "ok", "set", "2"), last], ConfigModel())


def test_a_set_without_an_answer_stays_only_if_its_value_was_read() -> None:
    seen, unseen = op(0, None, None, "set", "1"), op(0, None, None, "set", "2")
    created, read = op(0, 1, "ok", "create", "0"), op(2, 3, "1", "read")
    unread = op(4, None, None, "read")
    kept = [seen, op(0, 1, "ok", "create", UNREAD), read]
    assert without_unread_values([seen, unseen, created, read, unread]) == kept


@st.composite
def small_histories(draw: st.DrawFn) -> list[Operation]:
    history = []
    for value in range(draw(st.integers(1, 7))):
        request = draw(st.sampled_from([("create", str(value)), ("set", str(value)), ("delete",), ("read",)]))
        start = draw(st.integers(0, 6))
        end = draw(st.one_of(st.none(), st.integers(start, 8)))
        values = [None, *map(str, range(7))]
        answers = values if request == ("read",) else ["ok", "exists" if request[0] == "create" else "unknown"]
        history.append(op(start, end, draw(st.sampled_from(answers)), *request))
    return history


@given(small_histories())
def test_leaving_out_what_does_not_matter_changes_no_verdict(history: list[Operation]) -> None:
    def verdict(operations: list[Operation]) -> bool:
        try:
            check(operations, ConfigModel())
        except NotLinearizable:
            return False
        return True

    assert verdict(history) == verdict(without_unread_values(history))


def test_barriers_never_go_back() -> None:
    check_barriers([Barrier(0, 3, 2, 20), Barrier(1, 2, 1, 10), Barrier(4, 5, 2, 20)])
    with pytest.raises(AssertionError, match="offset than 20,"):
        check_barriers([Barrier(0, 1, 2, 20), Barrier(2, 3, 2, 19)])
    with pytest.raises(AssertionError, match="epoch than 2,"):
        check_barriers([Barrier(0, 1, 2, 20), Barrier(2, 3, 1, 21)])
