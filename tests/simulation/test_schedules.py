"""Random schedules and scenarios of every kind; one that fails names the command that replays it.

Three sets: a small one with fixed seeds, until everything that a kind is about has happened; the seeds that have
failed before (`regressions.toml`); and seeds that no run has had yet: `./dev test` draws them and prints
`SIMULATION_SEED=...`, which repeats them. `--long` simulates for hours.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.simulation import workloads
from tests.simulation.hours import Summary, simulate, turns
from tests.simulation.runner import KINDS, Job, new_pool, pool_size, run_job

ROOT = Path(__file__).resolve().parents[2]
LEAST_HOURS = 5.0
"""All kinds together, with --long."""
SMALL = {"quorum": 0.33, "brokers": 0.25, "groups": 0.3, "transactions": 0.25, "cluster": 0.006}
"""Hours with fixed seeds in every run, at most: they end once all has happened that has to."""
SOON = {"transactions": 1_000, "brokers": 2_000}
"""The first fixed seed where it is not 0: all happens sooner."""
FRESH = {"quorum": 0.12, "brokers": 0.04, "groups": 0.12, "transactions": 0.04, "cluster": 0.003}
"""Hours with seeds of its own in every run."""
SCENARIOS_BETWEEN = 3
"""Scenarios between two random mixtures of the fixed seeds, so that each has its turn soon; fresh seeds have one."""
FIRST_FRESH_SEED = int(os.environ.get("SIMULATION_SEED") or random.SystemRandom().randrange(10**6, 10**9))
REGRESSIONS = tomllib.loads(Path(__file__).with_name("regressions.toml").read_text(encoding="utf-8"))["seed"]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with new_pool() as workers:
        yield workers


def run_hours(
    pool: ProcessPoolExecutor,
    kind: str,
    hours: float,
    first_seed: int,
    enough: Callable[[Summary], bool] | None = None,
    between: int = 1,
) -> Summary:
    """Random mixtures, and `between` two of them so many of the kind's scenarios in turn.

    No further one begins once there is `enough`.
    """
    summary = Summary(hours, first_seed)
    jobs = turns(first_seed, [kind], between=between)
    if enough is not None:
        jobs = itertools.takewhile(lambda job: not enough(summary), jobs)
    simulate(summary, jobs, pool, pool_size(), lambda summary: None, ahead=1)
    assert [f"{each}\n  {each.job.command()} --trace" for each in summary.failed] == []
    return summary


def what_has_not_happened(summary: Summary, kind: str) -> list[str]:
    missing = [what for what in KINDS[kind].happens if not summary.kinds[kind].counts[what]]
    for name, counts in summary.scenarios.items():
        happens = () if name is None else workloads.load(name).happens
        missing += [f"{what} in {name}" for what in happens if not counts[what]]
    fitting = {name for name in workloads.names() if kind in workloads.load(name).kinds} - {"random-mixture"}
    return missing + [f"a turn of {name}" for name in fitting - summary.scenarios.keys()]


@pytest.mark.parametrize("kind", KINDS)
def test_schedules(pool: ProcessPoolExecutor, kind: str) -> None:
    first_seed = SOON.get(kind, 0)
    summary = run_hours(
        pool,
        kind,
        SMALL[kind],
        first_seed,
        enough=lambda summary: not what_has_not_happened(summary, kind),
        between=SCENARIOS_BETWEEN,
    )
    assert what_has_not_happened(summary, kind) == []


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_that_no_run_has_had(pool: ProcessPoolExecutor, kind: str) -> None:
    print(f"SIMULATION_SEED={FIRST_FRESH_SEED}")
    summary = run_hours(pool, kind, FRESH[kind], FIRST_FRESH_SEED)
    assert summary.kinds[kind].schedules > 0


@pytest.mark.parametrize("job", [Job(**each["job"]) for each in REGRESSIONS], ids=str)
def test_what_has_failed_before(pool: ProcessPoolExecutor, job: Job) -> None:
    outcome = pool.submit(run_job, job).result()
    assert outcome.violation is None, f"{outcome}\n  {job.command()} --trace"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_hours_of_schedules(pool: ProcessPoolExecutor, kind: str) -> None:
    summary = run_hours(pool, kind, KINDS[kind].hours, FIRST_FRESH_SEED)
    assert what_has_not_happened(summary, kind) == []


def test_that_is_enough() -> None:
    assert sum(kind.hours for kind in KINDS.values()) >= LEAST_HOURS
    assert KINDS.keys() == SMALL.keys() == FRESH.keys()


@pytest.fixture(scope="module")
def traces() -> list[dict[str, str]]:
    """The traces of one seed of each kind, in two interpreters with different hash seeds."""
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
    """The same events in the same order in any interpreter, with any hash seed."""
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
