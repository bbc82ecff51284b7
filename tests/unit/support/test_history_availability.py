"""Outages are found, measured from the first request to the next answer, and excused while no majority could exist."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.history.availability import CLUSTER, check, no_majority, outages, unanswered, without
from tests.support.history.model import Condition, Cut, Fault, History, Operation, Window

NODES = (1, 2, 3)


def send(begin_s: float, end_s: float | None, partition: int = 0, *, ok: bool = True, client: str = "p") -> Operation:
    return Operation(client, "send", begin_s, end_s, "ok" if ok else "unknown", partition)


def steady(*partitions: int, until: int = 100) -> list[Operation]:
    """An acknowledgement every 0.1 s."""
    return [send(tick / 10, tick / 10 + 0.05, partition) for tick in range(until) for partition in partitions]


def paused(partition: int, from_s: float, to_s: float, *others: int) -> History:
    """One partition acknowledges nothing in between, despite requests."""
    kept = [each for each in steady(partition) if each.end_s is not None and not from_s < each.end_s < to_s]
    return History("t", NODES, NODES, [*kept, send(from_s, to_s, partition), *steady(*others)])


def test_a_steady_history_has_no_outage() -> None:
    history = History("t", NODES, NODES, steady(0, 1))
    assert not outages(history)
    assert not check(history, 0.5)


def test_one_partition_that_pauses_is_found_and_the_cluster_goes_on() -> None:
    history = paused(0, 3.0, 6.0, 1)
    (problem,) = check(history, 2.0)
    assert problem.name == "UNAVAILABLE"
    assert "partition 0 acknowledged nothing for 3.000 s" in problem.what
    assert not check(history, 3.5)


def test_a_cluster_that_pauses_has_a_promise_of_its_own() -> None:
    history = paused(0, 3.0, 6.0)
    assert {each.partition for each in outages(history)} == {0, CLUSTER}
    (problem,) = check(history, 4.0, cluster_promised_s=2.0)
    assert "the cluster" in problem.what


def test_where_nobody_asks_nothing_is_out() -> None:
    assert not check(History("t", NODES, NODES, [send(0, 0.1), send(50, 50.1)]), 1.0)


def test_it_counts_from_who_asked_first_though_that_one_was_refused() -> None:
    history = History("t", NODES, NODES, [send(0, 0.1), send(10, 11, ok=False), send(12, 15)])
    (partition, cluster) = outages(history)
    assert partition.window == Window(10, 15)
    assert cluster.window == Window(10, 15)


def test_one_that_is_never_answered_counts_to_the_end() -> None:
    history = History("t", NODES, NODES, [send(0, 0.1), send(5, None, ok=False)], until_s=35)
    assert [each.window for each in outages(history)] == [Window(5, 35)] * 2


def test_a_transaction_is_on_every_partition() -> None:
    transaction = Operation("t-1", "transaction", 5.0, 9.0)
    history = History("t", NODES, NODES, [send(0, 0.1), send(4, 9), transaction])
    assert outages(history)[0].window == Window(4, 9)


def test_polls_are_no_writes() -> None:
    poll = Operation("c", "poll", 3.5, 4.0, "ok", 0)
    history = paused(0, 3.0, 6.0)
    history.operations.append(poll)
    assert check(history, 2.0)


@pytest.mark.parametrize("how", ["dead", "paused", "cut"])
def test_what_no_majority_could_change_is_excused(how: str) -> None:
    history = paused(0, 3.0, 8.0)
    if how == "cut":
        history.cuts = [Cut(one, other, 3.0, 7.0) for one in NODES for other in NODES if one != other]
    else:
        history.conditions = [Condition(node, "dead" if how == "dead" else "paused", 3.0, 7.0) for node in (1, 2)]
    assert no_majority(history) == [Window(3.0, 7.0)]
    assert not check(history, 1.5)
    assert check(history, 0.5), "the time after a majority is back must count as an unavailability"


def test_a_minority_excuses_nothing() -> None:
    history = paused(0, 3.0, 8.0)
    history.conditions = [Condition(1, "dead", 3.0, 7.0)]
    assert not no_majority(history)
    assert check(history, 4.0)


@pytest.mark.parametrize(
    ("cuts", "there"),
    [
        pytest.param([(1, 2), (2, 1), (1, 3), (3, 1)], True, id="one is alone"),
        pytest.param([(1, 2), (2, 1)], True, id="a bridge"),
        pytest.param([(1, 2), (1, 3)], True, id="nobody hears one"),
        pytest.param([(1, 2), (2, 3), (3, 1)], False, id="each pair hears one another one way only"),
    ],
)
def test_who_reaches_a_majority(cuts: list[tuple[int, int]], there: bool) -> None:
    history = History("t", NODES, NODES, steady(0), cuts=[Cut(one, other, 2.0, 4.0) for one, other in cuts])
    assert no_majority(history) == ([] if there else [Window(2.0, 4.0)])


def test_only_voters_count_for_a_majority() -> None:
    history = History("t", (1, 2, 3, 4, 5, 6), NODES, steady(0))
    history.conditions = [Condition(node, "dead", 2.0, 4.0) for node in (4, 5, 6)]
    assert not no_majority(history)
    history.conditions = [Condition(node, "dead", 2.0, None) for node in (1, 2)]
    assert no_majority(history) == [Window(2.0, history.extent.end_s)]


def test_slow_nodes_are_no_excuse() -> None:
    history = paused(0, 3.0, 8.0)
    history.conditions = [Condition(node, "hampered", 3.0, 8.0) for node in NODES]
    history.faults = [Fault("slow", 3.0, 8.0)]
    assert check(history, 4.0)


times = st.floats(0, 100, allow_nan=False).map(lambda each: round(each, 2))
operations = st.lists(
    st.tuples(times, times, st.booleans(), st.booleans()).map(
        lambda each: send(min(each[:2]), None if each[3] else max(each[:2]), ok=each[2] and not each[3])
    )
)


@given(operations)
def test_an_outage_is_where_something_waits_and_nothing_is_answered(found: list[Operation]) -> None:
    """Against the definition, a moment at a time."""
    windows = list(unanswered(found, 100.0))
    answered = {each.end_s for each in found if each.outcome == "ok" and each.end_s is not None}
    for window in windows:
        assert not any(window.begin_s < at < window.end_s for at in answered)
        assert window.end_s in answered or window.end_s == 100.0
    for each in found:  # an unanswered request lies within outages until the next answer
        later = [at for at in answered if at > each.begin_s] or [100.0]
        if each.begin_s < min(later) and (each.end_s is None or each.end_s > each.begin_s):
            assert any(window.begin_s <= each.begin_s and window.end_s >= min(later) for window in windows)


@given(st.tuples(times, times), st.lists(st.tuples(times, times), max_size=5))
def test_what_is_left_of_a_window(window: tuple[float, float], others: list[tuple[float, float]]) -> None:
    whole = Window(min(window), max(window))
    merged: list[Window] = []
    for begin, end in sorted((min(each), max(each)) for each in others):
        if merged and begin <= merged[-1].end_s:
            merged[-1] = Window(merged[-1].begin_s, max(end, merged[-1].end_s))
        else:
            merged.append(Window(begin, end))
    left = without(whole, merged)
    for tick in range(101):
        at = tick + 0.005
        inside = whole.begin_s < at < whole.end_s and not any(each.begin_s < at < each.end_s for each in merged)
        assert inside == any(each.begin_s < at < each.end_s for each in left)
