"""`./dev sim --hours`: the order of runs, the counts, and the report of a failure."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from tests.simulation import workloads
from tests.simulation.hours import SCENARIOS_BETWEEN, Summary, turns
from tests.simulation.runner import KINDS, Job, Outcome
from tools.sim import shown, view

ROOT = Path(__file__).resolve().parents[2]
QUICK = "own entries count before the sync"
"""A planted bug that shows at once."""


def outcome(job: Job, counts: dict[str, int], violation: str | None = None) -> Outcome:
    return Outcome(job, 2.0, 1.0, 1_800.0, 100, Counter(counts), violation=violation)


def test_everything_has_its_turn() -> None:
    jobs = list(itertools.islice(turns(100), 1_000))
    pairs = {(name, kind) for name in workloads.names() for kind in workloads.load(name).kinds}
    assert {(job.scenario or "random-mixture", job.kind) for job in jobs} == pairs
    mixtures = [job.kind for job in jobs if job.scenario is None]
    assert mixtures[: len(KINDS)] == list(KINDS)
    assert len(mixtures) == len(jobs) / (SCENARIOS_BETWEEN + 1)
    assert len(set(jobs)) == len(jobs), "a job comes twice"
    assert min(job.seed for job in jobs) == 100


def test_one_kind_alone() -> None:
    jobs = list(itertools.islice(turns(0, ["groups"], between=1), 40))
    assert {job.kind for job in jobs} == {"groups"}
    assert sum(job.scenario is None for job in jobs) == 20


def test_a_summary_adds_up() -> None:
    summary = Summary(2.0, 0)
    summary.add(outcome(Job(1, "brokers"), {"fault kill": 3, "elections": 2, "acks=all": 7}))
    summary.add(
        outcome(Job(2, "quorum", scenario="metadata-churn-disks"), {"fault kill": 1, "leaders": 4}, "two leaders")
    )
    assert summary.hours == 1.0
    assert summary.total().faults == {"kill": 4}
    assert "1.00 of 2 simulated hours" in summary.line()
    assert "7 acknowledged, 6 elections, 1 failed" in summary.line()
    rows = {row[0]: row[1:] for row in summary.rows()}
    assert rows["brokers"] == ("1", "0.50", "1800.0", "100", "7", "2", "3", "0")
    assert rows["all"][-1] == "1"
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(view(summary))
    with shown(summary, console) as show:
        show(summary)
        show(summary)
        assert console.export_text(clear=False).count("FAILED: ./dev sim 2 --kind quorum") == 1, (
            "a failure must be printed at once, and only once"
        )
    assert "two leaders" in console.export_text()


@pytest.mark.parametrize("how", [["0"], ["--hours", "0.001", "--seed", "0"]])
def test_a_failure_is_shrunk_and_its_command_named(how: list[str]) -> None:
    words = [sys.executable, "-W", "ignore", "-m", "tools.sim", *how, "--voters", "1", "--mutation", QUICK]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    assert f'--mutation "{QUICK}"' in run.stdout
    assert "shrunk in" in run.stdout
    assert "controller 1: " in run.stdout
    assert "shrinking seed" in run.stderr
