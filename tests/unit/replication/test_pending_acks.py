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


def test_who_asks_again_is_put_in_its_place() -> None:
    acks, answered = PendingAcks(), list[str]()
    for end_offset in (2, 4, 4, 6):
        acks.wait(end_offset, lambda error, name=f"first {end_offset}": answered.append(name))  # type: ignore[misc]
    for end_offset in (4, 2, 7):
        acks.wait_again(end_offset, lambda error, name=f"again {end_offset}": answered.append(name))  # type: ignore[misc]
    acks.advance(2)
    assert answered == ["first 2", "again 2"]
    acks.advance(5)
    assert answered[2:] == ["first 4", "first 4", "again 4"]
    acks.wait(7, lambda error: answered.append("last"))
    acks.advance(7)
    assert answered[5:] == ["first 6", "again 7", "last"]


class CountedOffset(int):
    """An offset that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        CountedOffset.compared += 1
        return int(self) < int(other)

    def __le__(self, other: int) -> bool:
        CountedOffset.compared += 1
        return int(self) <= int(other)

    def __gt__(self, other: int) -> bool:
        CountedOffset.compared += 1
        return int(self) > int(other)


def test_asking_again_does_not_look_at_everything_that_is_owed() -> None:
    """A client may send what it has in flight again as often as it likes; all of it runs on the event loop."""
    acks, answered, count = PendingAcks(), list[int](), 2_000
    for end in range(1, count + 1):
        acks.wait(CountedOffset(end), lambda error, mine=end: answered.append(mine))  # type: ignore[misc]
    CountedOffset.compared = 0
    for number in range(count):
        end = 1 + number * 7 % 50
        acks.wait_again(CountedOffset(end), lambda error, mine=end: answered.append(mine))  # type: ignore[misc]
    assert CountedOffset.compared < 20 * count
    assert len(acks) == 2 * count
    acks.advance(count)
    assert answered == sorted(answered)
    assert len(answered) == 2 * count


def test_failing_answers_those_who_asked_again_as_well() -> None:
    acks, answers = PendingAcks(), list[BaseException | None]()
    acks.wait(3, answers.append)
    acks.wait_again(2, answers.append)
    reason = RuntimeError("gone")
    acks.fail(reason)
    assert answers == [reason, reason]
    assert len(acks) == 0
