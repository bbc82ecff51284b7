"""Random schedules and scenarios of every kind; one that fails names the command that replays it.

Three sets: a small one with fixed seeds, until everything has happened that a kind and its scenarios are about; the
seeds that have failed before (`regressions.toml`); and seeds that no run has had yet: `./dev test` draws them and
prints `SIMULATION_SEED=...`, which repeats them. `--long` simulates for hours.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.simulation import workloads
from tests.simulation.hours import Summary, simulate, turns
from tests.simulation.runner import KINDS, Job, new_pool, pool_size, run_job, seconds_of

ROOT = Path(__file__).resolve().parents[2]
LEAST_HOURS = 5.0
"""All kinds together, with --long."""
SMALL = {"quorum": 0.33, "brokers": 0.25, "groups": 0.3, "transactions": 0.25, "cluster": 0.006}
"""Hours with fixed seeds in every run, at most: they end once all has happened that has to."""
SOON = {"cluster": 5, "groups": 12, "transactions": 1_000, "brokers": 2_000}
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
    pool: ProcessPoolExecutor, kind: str, hours: float, first_seed: int, *, until_shown: bool = False
) -> Summary:
    """Random mixtures, and between them the kind's scenarios in turn.

    `until_shown`: without those that have shown what they are about, until all have.
    """
    summary = Summary(hours, first_seed)
    jobs = turns(first_seed, [kind], between=SCENARIOS_BETWEEN if until_shown else 1)
    if until_shown:
        jobs = itertools.takewhile(lambda _: what_has_not_happened(summary, kind), jobs)
        jobs = (job for job in jobs if not_shown_yet(summary, kind, job.scenario))
    simulate(summary, jobs, pool, pool_size(), lambda summary: None, ahead=1)
    assert [f"{each}\n  {each.job.command()} --trace" for each in summary.failed] == []
    return summary


def not_shown_yet(summary: Summary, kind: str, name: str | None) -> list[str]:
    """Return what a scenario's runs have not shown yet, or for None what no run of the kind has."""
    if name is None:
        missing = [what for what in KINDS[kind].happens if not summary.kinds[kind].counts[what]]
    else:
        happens = workloads.load(name).happens
        missing = [f"{what} in {name}" for what in happens if not summary.scenarios[name][what]]
    return missing or ([] if name in summary.scenarios else [f"a turn of {name}"])


def what_has_not_happened(summary: Summary, kind: str) -> list[str]:
    fitting = {name for name in workloads.names() if kind in workloads.load(name).kinds} - {"random-mixture"}
    return [what for name in (None, *sorted(fitting)) for what in not_shown_yet(summary, kind, name)]


@pytest.mark.parametrize("kind", KINDS)
def test_schedules(pool: ProcessPoolExecutor, kind: str) -> None:
    summary = run_hours(pool, kind, SMALL[kind], SOON.get(kind, 0), until_shown=True)
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


@pytest.fixture(scope="module", params=[0.5, pytest.param(1.0, marks=pytest.mark.long)], ids="{:g} of the time".format)
def traces(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """The traces of one seed of each kind, in two interpreters with different hash seeds."""
    jobs = [argument for kind in KINDS for argument in (kind, str(request.param * seconds_of(kind)))]
    runs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _PRINT_TRACES, *jobs],
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
for number, (kind, seconds) in enumerate(zip(sys.argv[1::2], sys.argv[2::2])):
    print(end={_BETWEEN!r} if number else "")
    print(sorted(run_job(Job(7, kind, 3, float(seconds)), print).counts.items()))
"""
