"""Hundreds of random schedules; a failing one names the command that replays it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.simulation.runner import new_pool, run_one

ROOT = Path(__file__).resolve().parents[2]
SCHEDULES = 300
LONG_SCHEDULES = 5_000
CHUNK = 25
assert SCHEDULES % CHUNK == LONG_SCHEDULES % CHUNK == 0


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with new_pool() as workers:
        yield workers


def run_chunk(pool: ProcessPoolExecutor, first: int) -> None:
    outcomes = [each.result() for each in [pool.submit(run_one, seed) for seed in range(first, first + CHUNK)]]
    failed = [f"{each}\n  ./dev sim {each.seed} --trace" for each in outcomes if each.violation is not None]
    assert failed == []
    assert all(each.counts["acknowledged"] for each in outcomes)


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_schedules(pool: ProcessPoolExecutor, first: int) -> None:
    run_chunk(pool, first)


@pytest.mark.long
@pytest.mark.parametrize("first", range(SCHEDULES, SCHEDULES + LONG_SCHEDULES, CHUNK))
def test_many_more_schedules(pool: ProcessPoolExecutor, first: int) -> None:
    run_chunk(pool, first)


def test_a_seed_is_a_whole_run() -> None:
    """The same events in the same order in any interpreter, whatever its hash seed is."""
    traces = [
        subprocess.run(
            [sys.executable, "-c", _PRINT_TRACE],
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
print(run_one(7, 5, 10.0, trace=print).counts)
"""
