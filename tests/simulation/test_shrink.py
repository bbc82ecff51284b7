"""A failure is made smaller: fewer faults and less time, and it is the same failure still."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation.runner import Job, Outcome, new_pool, read_spans, run_job, spans
from tests.simulation.shrink import run_traced, shrink, signature

PLANTED = "acknowledged without a lease"
MANY_FAULTS = 8


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with new_pool() as workers:
        yield workers


@pytest.fixture(scope="module")
def failing(pool: ProcessPoolExecutor) -> Outcome:
    """The first schedule that notices a planted bug only after many faults."""
    for seed in range(200):
        outcome = pool.submit(run_job, Job(seed, seconds=8.0, mutation=PLANTED)).result()
        if outcome.violation is not None and sum(each.happened for each in outcome.faults) >= MANY_FAULTS:
            return outcome
    raise AssertionError(
        f"none of 200 schedules with the planted bug {PLANTED!r} failed after {MANY_FAULTS} faults or more"
    )


def test_the_least_that_fails_fails_in_the_same_way_and_is_much_shorter(
    pool: ProcessPoolExecutor, failing: Outcome
) -> None:
    before = failing
    said: list[str] = []
    shrunk = shrink(before, pool, said.append, budget_s=600, runs=60)
    assert before.violation is not None
    assert shrunk.outcome.violation is not None
    assert signature(shrunk.outcome.violation) == signature(before.violation)
    _, trace_before = pool.submit(run_traced, before.job).result()
    assert len(shrunk.trace) < len(trace_before) / 2
    kept, happened = (sum(each.happened for each in one.faults) for one in (shrunk.outcome, before))
    assert kept < happened / 2
    assert said, "the shrinker reported no progress"
    report = shrunk.report()
    assert before.job.command() in report
    assert shrunk.outcome.job.command() in report
    assert "controller 1: " in report, "the report lacks the state of the nodes at the violation"


def test_the_budget_is_kept(pool: ProcessPoolExecutor, failing: Outcome) -> None:
    assert shrink(failing, pool, runs=3).runs <= 4


def test_what_is_left_out_changes_nothing_of_the_other_faults(pool: ProcessPoolExecutor) -> None:
    whole, without = (
        pool.submit(run_job, Job(4, "brokers", seconds=6.0, without=numbers)).result()
        for numbers in (frozenset(), frozenset({1, 3, 4}))
    )
    assert len(whole.faults) > 6
    assert [each[:3] for each in whole.faults] == [each[:3] for each in without.faults]
    assert [each.number for each in without.faults if each.number in {1, 3, 4} and each.happened] == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("at 3.1 s: node 1 leads in term 3, and so did node 2", "at 12 s: node 2 leads in term 14, and so did node 1"),
        ("broker 1 is in the ISR (1, 2) of topic-1-0", "broker 3 is in the ISR (3,) of topic-2-1"),
        ("lost: Image(a=(X(b=1),), c=b'x)')", "lost: Image(a=(), c=b'')"),
    ],
)
def test_the_same_kind_of_violation(one: str, other: str) -> None:
    assert signature(one) == signature(other)


def test_another_kind_of_violation() -> None:
    assert signature("at 3 s: node 1 leads in term 3") != signature("at 3 s: node 1 votes in term 3")


def test_spans() -> None:
    assert spans([5, 1, 2, 3, 7]) == "1-3,5,7"
    assert read_spans("1-3,5,7") == {1, 2, 3, 5, 7}
    assert read_spans(spans(range(4, 40))) == frozenset(range(4, 40))
    with pytest.raises(ValueError, match="invalid"):
        read_spans("1,x")
