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

from tests.simulation.dataplane.schedule import DataSimulation
from tests.simulation.parts import Violation
from tests.simulation.schedule import Simulation

SECONDS = {"quorum": 20.0, "brokers": 10.0}
"""How long faults go on."""
KINDS: dict[str, type[Simulation]] = {"quorum": Simulation, "brokers": DataSimulation}
"""What is simulated: a metadata quorum, or whole brokers around one."""
VOTERS = {"quorum": (3, 5, 3, 1, 3), "brokers": (1, 3)}
"""How many voters the schedules of a kind have, in turn."""


@dataclass(frozen=True)
class Outcome:
    """What came of one schedule; `violation` is None if nothing was wrong."""

    seed: int
    voters: int
    kind: str
    wall_s: float
    counts: Counter[str] = field(default_factory=Counter)
    violation: str | None = None

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.kind}, {self.voters} voters: {self.violation or 'ok'}"


def voters_of(seed: int, kind: str = "quorum") -> int:
    """Return how many voters a schedule has unless told otherwise."""
    return VOTERS[kind][seed % len(VOTERS[kind])]


def seconds_of(kind: str) -> float:
    """Return how long the faults of a schedule go on unless told otherwise."""
    return SECONDS[kind]


def run_one(
    seed: int,
    voters: int | None = None,
    seconds: float | None = None,
    mutation: str | None = None,
    trace: Callable[[str], None] | None = None,
    kind: str = "quorum",
) -> Outcome:
    """Run one schedule in this process."""
    from tests.simulation.mutations import planted

    logging.disable(logging.CRITICAL)
    voters = voters or voters_of(seed, kind)
    started = time.perf_counter()
    try:
        with planted(mutation) as parts:
            counts = KINDS[kind](seed, voters, parts, trace).run(seconds or seconds_of(kind))
    except Violation as violation:
        return Outcome(seed, voters, kind, time.perf_counter() - started, violation=str(violation))
    except Exception as error:  # what the simulation itself stumbles over is no pass either
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
        return Outcome(seed, voters, kind, time.perf_counter() - started, violation=message)
    finally:
        logging.disable(logging.NOTSET)
    return Outcome(seed, voters, kind, time.perf_counter() - started, counts)


def new_pool(workers: int | None = None) -> ProcessPoolExecutor:
    """Return workers whose hash seed is fixed."""
    os.environ["PYTHONHASHSEED"] = "0"  # read by the interpreters that are spawned, not by this one
    return ProcessPoolExecutor(workers or os.cpu_count() or 1, mp_context=multiprocessing.get_context("spawn"))


def run_many(
    seeds: Iterable[int],
    voters: int | None = None,
    seconds: float | None = None,
    mutation: str | None = None,
    workers: int | None = None,
    kind: str = "quorum",
) -> Iterator[Outcome]:
    """Run schedules on all cores; outcomes come in the order of the seeds."""
    with new_pool(workers) as pool:
        futures = [pool.submit(run_one, seed, voters, seconds, mutation, None, kind) for seed in seeds]
        for future in futures:
            yield future.result()


def run_alone(seed: int, voters: int | None = None, seconds: float | None = None, kind: str = "quorum") -> Outcome:
    """Run one schedule as `run_many` would."""
    return next(run_many([seed], voters, seconds, workers=1, kind=kind))
