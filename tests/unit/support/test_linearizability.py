"""The checker itself: it accepts histories that have an order, and rejects those that have none."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.linearizability import NO_ANSWER, NotLinearizable, Operation, check, check_by_key


class Register:
    """Requests are ("write", value) answered "ok", and ("read",) answered by the value."""

    initial: object = None

    def step(self, state: object, request: object, answer: object) -> tuple[bool, object]:
        assert isinstance(request, tuple)
        if request[0] == "write":
            return True, request[1]
        return answer in (state, NO_ANSWER), state


def write(start: float, end: float | None, value: object, client: int = 0) -> Operation:
    return Operation(client, start, end, ("write", value), NO_ANSWER if end is None else "ok")


def read(start: float, end: float, value: object, client: int = 0) -> Operation:
    return Operation(client, start, end, ("read",), value)


def rejects(*history: Operation) -> str:
    with pytest.raises(NotLinearizable) as caught:
        check(history, Register())
    return str(caught.value)


def test_one_after_the_other() -> None:
    history = [write(0, 1, "a"), read(2, 3, "a"), write(4, 5, "b"), read(6, 7, "b")]
    assert check(history, Register()) == history


def test_overlapping_operations_take_the_order_that_explains_them() -> None:
    late, early = write(0, 10, "a"), write(1, 9, "b")
    assert check([late, early, read(11, 12, "a")], Register())[:2] == [early, late]


def test_a_stale_read_is_rejected() -> None:
    message = rejects(write(0, 1, "a"), write(2, 3, "b"), read(4, 5, "a"))
    assert "('read',) -> a" in message


def test_reads_that_go_back_are_rejected_even_while_the_write_is_under_way() -> None:
    rejects(write(0, 1, "a"), write(2, 20, "b"), read(3, 4, "b"), read(5, 6, "a"))


def test_a_lost_acknowledged_write_is_rejected() -> None:
    rejects(write(0, 1, "a"), read(2, 3, None))


def test_a_read_from_the_future_is_rejected() -> None:
    rejects(read(0, 1, "a"), write(2, 3, "a"))


def test_a_write_without_an_answer_may_have_happened() -> None:
    assert len(check([write(0, None, "a"), read(5, 6, "a")], Register())) == 2


def test_a_write_without_an_answer_may_happen_late() -> None:
    check([write(0, None, "a"), read(5, 6, None), read(7, 8, "a")], Register())


def test_a_write_without_an_answer_may_never_happen() -> None:
    assert len(check([write(0, None, "a"), read(5, 6, None)], Register())) == 1


def test_a_write_without_an_answer_happens_once() -> None:
    rejects(write(0, None, "a"), read(1, 2, "a"), write(3, 4, "b"), read(5, 6, "b"), read(7, 8, "a"))


def test_an_operation_that_begins_when_another_ends_overlaps_it() -> None:
    check([write(0, 1, "a"), read(1, 2, None)], Register())


def test_keys_are_checked_by_themselves_and_named() -> None:
    good, bad = write(0, 1, "a", client=1), read(2, 3, "z", client=2)
    with pytest.raises(NotLinearizable, match=r"^2: "):
        check_by_key([good, bad], Register(), key_of=lambda each: each.client)
    assert check_by_key([good], Register(), key_of=lambda each: each.client) == {1: 1}


def test_a_long_history_takes_no_long_time() -> None:
    history = []
    for at in range(3_000):
        history += [write(at, at + 1.5, at, client=at % 3), read(at + 0.2, at + 0.9, at - 1 if at else None)]
    with pytest.raises(NotLinearizable):
        check([*history, read(9_000, 9_001, 5)], Register())


class Impatient(Register):
    """A register that is asked a bounded number of times."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def step(self, state: object, request: object, answer: object) -> tuple[bool, object]:
        self.steps -= 1
        assert self.steps >= 0, "the search has taken more steps than it may"
        return super().step(state, request, answer)


@pytest.mark.parametrize("values", [1, 40])
def test_writes_without_an_answer_do_not_multiply(values: int) -> None:
    lost = [write(at / 100, None, f"lost-{at % values}", client=at) for at in range(40)]
    history = [*lost, *(write(at, at + 1.5, at, client=at % 3) for at in range(1, 50))]
    check([*history, read(60, 61, "lost-0"), read(62, 63, f"lost-{values - 1}")], Impatient(200_000))
    with pytest.raises(NotLinearizable):
        check([*history, read(60, 61, "never written")], Impatient(200_000))


def test_reads_at_one_time_do_not_multiply() -> None:
    reads = [read(0, 10, None, client=at) for at in range(40)]
    with pytest.raises(NotLinearizable):
        check([*reads, read(11, 12, "never written")], Impatient(5_000))


def test_many_operations_that_ask_for_the_same_do_not_multiply() -> None:
    """Clients of a cluster that is down for long have many that were never answered."""
    unanswered = [write(at, None, value) for at in range(10) for value in "ab"]
    answered = [operation for at in range(30, 40) for operation in (write(at, at + 0.5, "c"), read(at, at + 0.9, "a"))]
    with pytest.raises(NotLinearizable):
        check([*unanswered, *answered, read(60, 61, "z")], Impatient(100_000))


@st.composite
def small_histories(draw: st.DrawFn) -> list[Operation]:
    operations = []
    for client in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, 6))
        end = draw(st.one_of(st.none(), st.integers(start, 8)))
        if end is not None and draw(st.booleans()):
            operations.append(read(start, end, draw(st.sampled_from([None, "a", "b"])), client))
        else:
            operations.append(write(start, end, draw(st.sampled_from(["a", "b"])), client))
    return operations


def brute_force(history: list[Operation]) -> bool:
    """Try every order of every subset that leaves out only operations without an answer."""
    optional = [each for each in history if each.returned_at is None]
    needed = [each for each in history if each.returned_at is not None]
    for count in range(len(optional) + 1):
        for some in itertools.combinations(optional, count):
            for order in itertools.permutations([*needed, *some]):
                if _keeps_real_time(order) and _explains(order):
                    return True
    return False


def _keeps_real_time(order: tuple[Operation, ...]) -> bool:
    return not any(
        later.returned_at is not None and later.returned_at < earlier.invoked_at
        for at, earlier in enumerate(order)
        for later in order[at + 1 :]
    )


def _explains(order: tuple[Operation, ...]) -> bool:
    model, state = Register(), Register.initial
    for each in order:
        fits, state = model.step(state, each.request, each.answer)
        if not fits:
            return False
    return True


@given(small_histories())
def test_it_says_what_trying_every_order_says(history: list[Operation]) -> None:
    try:
        check(history, Register())
    except NotLinearizable:
        assert not brute_force(history)
    else:
        assert brute_force(history)
