"""Runs many schedules on all cores and says what came of each.

Workers are new interpreters with one fixed hash seed, so that a seed means the same everywhere: PySyncObj keeps nodes
in sets, whose order hangs on it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.simulation.parts import Violation
from tests.simulation.schedule import Simulation

SECONDS = 20.0
VOTERS = (3, 5, 3, 1, 3)
"""How many voters the schedules have, in turn."""


@dataclass(frozen=True)
class Outcome:
    """What came of one schedule; `violation` is None if nothing was wrong."""

    seed: int
    voters: int
    wall_s: float
    counts: Counter[str] = field(default_factory=Counter)
    violation: str | None = None

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.voters} voters: {self.violation or 'ok'}"


def voters_of(seed: int) -> int:
    """Return how many voters a schedule has unless told otherwise."""
    return VOTERS[seed % len(VOTERS)]


def run_one(
    seed: int,
    voters: int | None = None,
    seconds: float = SECONDS,
    mutation: str | None = None,
    trace: Callable[[str], None] | None = None,
) -> Outcome:
    """Run one schedule in this process."""
    from tests.simulation.mutations import planted

    logging.disable(logging.CRITICAL)
    voters = voters or voters_of(seed)
    started = time.perf_counter()
    try:
        with planted(mutation) as parts:
            counts = Simulation(seed, voters, parts, trace).run(seconds)
    except Violation as violation:
        return Outcome(seed, voters, time.perf_counter() - started, violation=str(violation))
    except Exception as error:  # what the simulation itself stumbles over is no pass either
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
        return Outcome(seed, voters, time.perf_counter() - started, violation=message)
    finally:
        logging.disable(logging.NOTSET)
    return Outcome(seed, voters, time.perf_counter() - started, counts)


def new_pool(workers: int | None = None) -> ProcessPoolExecutor:
    """Return workers whose hash seed is fixed."""
    os.environ["PYTHONHASHSEED"] = "0"  # read by the interpreters that are spawned, not by this one
    return ProcessPoolExecutor(workers or os.cpu_count() or 1, mp_context=multiprocessing.get_context("spawn"))


def run_many(
    seeds: Iterable[int],
    voters: int | None = None,
    seconds: float = SECONDS,
    mutation: str | None = None,
    workers: int | None = None,
) -> Iterator[Outcome]:
    """Run schedules on all cores; outcomes come in the order of the seeds."""
    with new_pool(workers) as pool:
        futures = [pool.submit(run_one, seed, voters, seconds, mutation) for seed in seeds]
        for future in futures:
            yield future.result()


def run_alone(seed: int, voters: int | None = None, seconds: float = SECONDS) -> Outcome:
    """Run one schedule as `run_many` would."""
    return next(run_many([seed], voters, seconds, workers=1))
