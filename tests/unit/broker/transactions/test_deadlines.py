"""Deadlines: none is early, none is forgotten, and they do not pile up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.transactions.deadlines import Deadlines

KEYS = st.sampled_from("abc")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, st.integers(0, 20)),
        st.tuples(st.just("forget"), KEYS, st.just(0)),
        st.tuples(st.just("wait"), st.just(""), st.integers(0, 10)),
    )
)


@given(STEPS)
def test_what_is_due_is_taken_once_and_on_time(steps: list[tuple[str, str, int]]) -> None:
    deadlines: Deadlines[str] = Deadlines()
    model: dict[str, float] = {}
    now_ms = 0.0
    for kind, key, number in steps:
        if kind == "set":
            deadlines.set(key, now_ms + number)
            model[key] = now_ms + number
        elif kind == "forget":
            deadlines.forget(key)
            model.pop(key, None)
        else:
            now_ms += number
            taken = set()
            while (due := deadlines.take(now_ms)) is not None:
                taken.add(due)
            assert taken == {each for each, due_ms in model.items() if due_ms <= now_ms}
            for each in taken:
                del model[each]
        next_ms = deadlines.next_ms()
        if model:
            assert next_ms is not None
            assert next_ms <= min(model.values())


def test_thousands_of_transactions_of_one_id_are_one_entry() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for number in range(10_000):
        deadlines.set("x", number + 60_000)
        deadlines.forget("x")
    assert len(deadlines._heap) == 1


def test_thousands_of_ids_that_are_done_leave_little_behind() -> None:
    deadlines: Deadlines[int] = Deadlines()
    deadlines.set(-1, 5)
    for number in range(10_000):
        deadlines.set(number, number + 60_000)
        deadlines.forget(number)
    assert len(deadlines._heap) < 1100
    assert deadlines.take(5) == -1
    assert deadlines.take(100_000) is None
