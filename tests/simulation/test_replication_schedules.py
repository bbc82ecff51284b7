"""Random schedules of whole brokers; a failing one names the command that replays it. And planted bugs are caught."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.simulation.dataplane.mutations import BROKER_MUTATIONS
from tests.simulation.mutations import hunt, planted
from tests.simulation.runner import new_pool, run_one

ROOT = Path(__file__).resolve().parents[2]
SCHEDULES = 90
LONG_SCHEDULES = 3_000
CHUNK = 15
assert SCHEDULES % CHUNK == LONG_SCHEDULES % CHUNK == 0


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with new_pool() as workers:
        yield workers


def run_chunk(pool: ProcessPoolExecutor, first: int) -> None:
    seeds = range(first, first + CHUNK)
    runs = [pool.submit(run_one, seed, None, None, None, None, "brokers") for seed in seeds]
    outcomes = [each.result() for each in runs]
    failed = [f"{each}\n  ./dev sim {each.seed} --kind brokers --trace" for each in outcomes if each.violation]
    assert failed == []
    counts = sum((each.counts for each in outcomes), Counter[str]())
    happened = ("acks=all", "acks=1", "batches served", "elections", "isr shrinks", "isr grows", "truncations")
    assert all(counts[what] for what in happened), counts


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_schedules(pool: ProcessPoolExecutor, first: int) -> None:
    run_chunk(pool, first)


@pytest.mark.long
@pytest.mark.parametrize("first", range(SCHEDULES, SCHEDULES + LONG_SCHEDULES, CHUNK))
def test_many_more_schedules(pool: ProcessPoolExecutor, first: int) -> None:
    run_chunk(pool, first)


@pytest.mark.parametrize("name", BROKER_MUTATIONS)
def test_a_planted_bug_is_caught(pool: ProcessPoolExecutor, name: str) -> None:
    assert hunt(name, pool) is not None


@pytest.mark.parametrize("name", BROKER_MUTATIONS)
def test_what_a_planted_bug_rewrites_is_there(name: str) -> None:
    with planted(name):
        pass


def test_a_seed_is_a_whole_run() -> None:
    """The same events in the same order in any interpreter, whatever its hash seed is."""
    traces = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _PRINT_TRACE],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1")
    ]
    assert len(traces[0].splitlines()) > 20
    assert traces[0] == traces[1]


_PRINT_TRACE = """
from tests.simulation.runner import run_one
print(sorted(run_one(7, 3, 10.0, trace=print, kind="brokers").counts.items()))
"""
