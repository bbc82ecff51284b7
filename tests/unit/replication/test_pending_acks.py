"""Answers are given in order, once, and never before the records below them are held."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from replication.pending_acks import PendingAcks

steps = st.lists(st.one_of(st.integers(1, 5), st.tuples(st.integers(0, 12))), max_size=30)


@given(steps)
def test_an_answer_comes_exactly_when_its_records_are_held(script: list[int | tuple[int]]) -> None:
    acks, answered, end, held = PendingAcks(), list[int](), 0, 0
    owed: list[int] = []
    for step in script:
        if isinstance(step, int):
            end += step
            owed.append(end)

            def note(error: BaseException | None, mine: int = end) -> None:
                assert error is None
                answered.append(mine)

            acks.wait(end, note)
        else:
            held = max(held, min(end, held + step[0]))
            acks.advance(held)
        assert answered == [offset for offset in owed if offset <= held] or answered == owed[: len(answered)]
        assert all(offset <= held for offset in answered)
    acks.advance(end)
    assert answered == owed
    assert len(acks) == 0


def test_failing_answers_everyone_once_with_the_reason() -> None:
    acks, answers = PendingAcks(), list[BaseException | None]()
    note: Callable[[BaseException | None], None] = answers.append
    acks.wait(3, note)
    acks.wait(5, note)
    acks.advance(3)
    reason = RuntimeError("gone")
    acks.fail(reason)
    acks.advance(9)
    assert answers == [None, reason]


def test_an_answer_may_append_and_wait_again() -> None:
    acks, answers = PendingAcks(), list[str]()

    def first(error: BaseException | None) -> None:
        answers.append("first")
        acks.wait(2, lambda error: answers.append("second"))

    acks.wait(1, first)
    acks.advance(1)
    assert answers == ["first"]
    acks.advance(2)
    assert answers == ["first", "second"]
