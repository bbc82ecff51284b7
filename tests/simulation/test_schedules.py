"""Hours of random schedules and scenarios of every kind; one that fails names the command that replays it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.simulation import workloads
from tests.simulation.hours import Summary, simulate, turns
from tests.simulation.runner import KINDS, new_pool

ROOT = Path(__file__).resolve().parents[2]
LEAST_HOURS = 5.0
"""All kinds together, in every test run."""
LONG = 10
"""So many times as much with --long."""
FIRST_LONG_SEED = 10_000
WORKERS = os.cpu_count() or 1


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with new_pool(WORKERS) as workers:
        yield workers


def run_hours(pool: ProcessPoolExecutor, kind: str, hours: float, first_seed: int) -> None:
    """Every other schedule is a random mixture, the others are the kind's scenarios in turn."""
    summary = Summary(hours, first_seed)
    simulate(summary, turns(first_seed, [kind], between=1), pool, WORKERS, lambda summary: None)
    assert [f"{each}\n  {each.job.command()} --trace" for each in summary.failed] == []
    assert [what for what in KINDS[kind].happens if not summary.kinds[kind].counts[what]] == []
    for name, counts in summary.scenarios.items():
        happens = () if name is None else workloads.load(name).happens
        assert (name, [what for what in happens if not counts[what]]) == (name, [])
    fitting = {name for name in workloads.names() if kind in workloads.load(name).kinds}
    assert fitting - {"random-mixture"} == summary.scenarios.keys() - {None}, "each scenario had its turn"


@pytest.mark.parametrize("kind", KINDS)
def test_schedules(pool: ProcessPoolExecutor, kind: str) -> None:
    run_hours(pool, kind, KINDS[kind].hours, 0)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_more_schedules(pool: ProcessPoolExecutor, kind: str) -> None:
    run_hours(pool, kind, KINDS[kind].hours * LONG, FIRST_LONG_SEED)


def test_that_is_enough() -> None:
    assert sum(kind.hours for kind in KINDS.values()) >= LEAST_HOURS


@pytest.fixture(scope="module")
def traces() -> list[dict[str, str]]:
    """What one seed of each kind comes to, in two interpreters that hash differently."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _PRINT_TRACES, *KINDS],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("0", "1")
    ]
    printed = [run.communicate()[0].split(_BETWEEN) for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    return [dict(zip(KINDS, each, strict=True)) for each in printed]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_a_whole_run(traces: list[dict[str, str]], kind: str) -> None:
    """The same events in the same order in any interpreter, whatever its hash seed is."""
    one, other = (each[kind] for each in traces)
    assert len(one.splitlines()) > 20
    assert one == other


_BETWEEN = "----\n"
_PRINT_TRACES = f"""
import sys
from tests.simulation.runner import Job, run_job
for number, kind in enumerate(sys.argv[1:]):
    print(end={_BETWEEN!r} if number else "")
    print(sorted(run_job(Job(7, kind, 3), print).counts.items()))
"""
