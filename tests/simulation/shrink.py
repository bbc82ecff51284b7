"""Finds a smallest run that still fails in the same way: with fewer faults, and in less time.

Faults are left out by delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input",
2002): it tries halves, quarters and so on of the remaining faults, and the complements of such parts. A fault and its
time depend on its number alone (`fault_maker`), so leaving faults out does not change the others; only the state that
these meet may differ.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from tests.simulation.runner import Job, Outcome, run_job

BUDGET_S = 120.0
RUNS = 400
PARALLEL = 2
"""Candidates that are tried at the same time."""
SHORTER = (0.25, 0.5, 0.75)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Shrunk:
    """The least that was found. `trace` is what happens in it, line by line."""

    before: Outcome
    outcome: Outcome
    trace: tuple[str, ...]
    runs: int

    def report(self) -> str:
        """Return the texts that an analysis needs."""
        faults, fewer = (sum(each.happened for each in one.faults) for one in (self.before, self.outcome))
        return "\n".join(
            [
                str(self.before),
                f"  {self.before.job.command()} --trace",
                f"shrunk in {self.runs} runs from {faults} faults and {self.before.virtual_s:.1f} s to {fewer} faults "
                f"and {self.outcome.virtual_s:.1f} s:",
                f"  {self.outcome.job.command()} --trace",
                *self.trace,
                str(self.outcome),
                self.outcome.state,
            ]
        )


def signature(violation: str) -> str:
    """Return what kind of violation it is: its words, without numbers, names of bytes and lists."""
    text = re.sub(r"^at [\d.]+ s: ", "", violation)
    text = re.sub(r"b'[^']*'|\b[0-9a-f]{8,}\b", "", text)
    inner, text = "", re.sub(r"-?\d+(\.\d+)?", "#", text)
    while inner != text:  # from the innermost outwards
        inner, text = text, re.sub(r"\w*[\[({][^\[({\])}]*[\])}]", "", text)
    return text


def run_traced(job: Job) -> tuple[Outcome, tuple[str, ...]]:
    """Run one schedule, and keep what happens."""
    lines: list[str] = []
    return run_job(job, lines.append), tuple(lines)


def shrink(
    failed: Outcome, pool: Executor, say: Say = lambda line: None, *, budget_s: float = BUDGET_S, runs: int = RUNS
) -> Shrunk:
    """Return the least that fails as this one did, as far as it is found within the budget."""
    return _Shrinker(failed, pool, say, budget_s, runs).run()


class _Shrinker:
    """`_least` always fails as the first one did."""

    def __init__(self, failed: Outcome, pool: Executor, say: Say, budget_s: float, runs: int) -> None:
        assert failed.violation is not None
        self._first = self._least = failed
        self._wanted = signature(failed.violation)
        self._pool = pool
        self._say = say
        self._end_s = time.monotonic() + budget_s
        self._runs_left = self._runs = runs

    def run(self) -> Shrunk:
        job = self._first.job.settled()
        assert job.seconds is not None
        if self._first.virtual_s < job.seconds:  # what would come after the violation is none of it
            job = replace(job, seconds=math.ceil(self._first.virtual_s * 1_000) / 1_000)
        idle = {each.number for each in self._first.faults if not each.happened}
        self._try([replace(job, without=job.without | idle)])
        self._shorten()
        self._leave_out()
        self._shorten()
        outcome, trace = self._pool.submit(run_traced, self._least.job).result()
        return Shrunk(self._first, outcome, trace, self._runs - self._runs_left)

    def _shorten(self) -> None:
        """Let the faults be over sooner, while that is enough."""
        while True:
            seconds = self._least.job.settled().seconds
            assert seconds is not None
            shorter = [round(seconds * share, 3) for share in SHORTER]
            if not self._try([replace(self._least.job, seconds=each) for each in shorter]):
                return

    def _leave_out(self) -> None:
        kept = self._kept()
        if kept and self._try([self._with([])]):
            return
        parts = 2
        while len(kept) > 1:
            size = math.ceil(len(kept) / parts)
            chunks = [kept[start : start + size] for start in range(0, len(kept), size)]
            rests = [[each for each in kept if each not in chunk] for chunk in chunks] if len(chunks) > 2 else []
            if self._try([self._with(some) for some in (*chunks, *rests)]):
                kept = self._kept()
                parts = max(2, min(len(kept), parts - 1))
            elif self._is_over() or parts >= len(kept):
                return
            else:
                parts = min(len(kept), parts * 2)

    def _kept(self) -> list[int]:
        return [each.number for each in self._least.faults if each.number not in self._least.job.without]

    def _with(self, kept: Sequence[int]) -> Job:
        job = self._least.job
        return replace(job, without=job.without | (set(self._kept()) - set(kept)))

    def _try(self, jobs: Sequence[Job]) -> bool:
        """Run these until one fails as the first one did; that one is the least from then on."""
        for start in range(0, len(jobs), PARALLEL):
            if self._is_over():
                return False
            some = jobs[start : start + PARALLEL]
            self._runs_left -= len(some)
            outcomes = [run.result() for run in [self._pool.submit(run_job, job) for job in some]]
            for outcome in outcomes:
                if outcome.violation is not None and signature(outcome.violation) == self._wanted:
                    self._least = outcome
                    self._say(
                        f"run {self._runs - self._runs_left}: {len(self._kept())} faults in "
                        f"{outcome.job.settled().seconds:g} s fail as well"
                    )
                    return True
        return False

    def _is_over(self) -> bool:
        return self._runs_left <= 0 or time.monotonic() > self._end_s
