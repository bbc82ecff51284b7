"""Runs schedules, one here or many on all cores, and says what came of each.

Workers are new interpreters with one fixed hash seed, so that a seed means the same everywhere: PySyncObj keeps nodes
in sets, whose order hangs on it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tests.simulation.cluster.schedule import ClusterSimulation
from tests.simulation.dataplane.group_schedule import GroupSimulation
from tests.simulation.dataplane.schedule import DataSimulation
from tests.simulation.dataplane.transaction_schedule import TransactionSimulation
from tests.simulation.fault_maker import Drawn
from tests.simulation.parts import Violation
from tests.simulation.plan import Plan
from tests.simulation.schedule import Simulation
from tests.simulation.state import describe


class Kind(NamedTuple):
    """What is simulated, and what its schedules are like unless they are told otherwise."""

    simulation: type[Simulation]
    seconds: float
    """How long faults go on."""
    voters: tuple[int, ...]
    """How many voters schedules have, in turn."""
    hours: float = 0.1
    """How long a test run simulates."""
    happens: tuple[str, ...] = ()
    """What has to be counted by then."""


KINDS: dict[str, Kind] = {
    "quorum": Kind(
        Simulation,
        20.0,
        (3, 5, 3, 1, 3),
        2.2,
        (
            "acknowledged",
            "records acknowledged",
            "reads",
            "fencings",
            "revocations",
            "snapshots restored",
            "brokers drained, cordoned, and back",
            "isr changes in batches",
            "batches of mixed outcomes",
        ),
    ),
    "brokers": Kind(
        DataSimulation,
        10.0,
        (1, 3),
        0.4,
        (
            "acks=all",
            "acks=1",
            "batches served",
            "elections",
            "isr shrinks",
            "isr grows",
            "isr changes in batches",
            "truncations",
        ),
    ),
    "groups": Kind(
        GroupSimulation,
        12.0,
        (1, 3),
        2.0,
        (
            "assignments",
            "commits",
            "offsets found",
            "members died",
            "members paused",
            "session NotCoordinator",
            "sessions over",
            "elections",
        ),
    ),
    "transactions": Kind(
        TransactionSimulation,
        10.0,
        (1, 3),
        0.4,
        (
            "AddToTransaction ConcurrentTransactions",
            "aborted ranges told",
            "batches committed before",
            "batches committed to sinks",
            "decided by a timeout or another producer",
            "elections",
            "last stable offset below the high watermark",
            "markers committed",
            "markers of aborts",
            "of unknown outcome",
            "offsets seen",
            "producer ids used up",
            "producers died",
            "producers stood still",
            "records made from others",
            "requests replayed",
            "stages expired",
            "stages that lost",
            "transactional ids lost by ProducerFenced",
            "truncations",
        ),
    ),
    "cluster": Kind(
        ClusterSimulation,
        6.0,
        (1, 3),
        0.02,
        (
            "batches of sinks readable",
            "deals aborted",
            "deals committed",
            "elections",
            "offsets committed",
            "records acknowledged",
            "records given",
            "records made from others",
        ),
    ),
}
"""A metadata quorum, whole brokers around one, these with members of groups, or transactions, and with the SDK."""


@dataclass(frozen=True)
class Job:
    """One schedule. What is None, the scenario decides, then the kind."""

    seed: int
    kind: str = "quorum"
    voters: int | None = None
    seconds: float | None = None
    scenario: str | None = None
    mutation: str | None = None
    without: frozenset[int] = frozenset()
    """Numbers of faults that are left out."""

    def settled(self) -> Job:
        """Return it with nothing left to be decided."""
        told = _plan_of(self).options.get("voters")
        voters = self.voters or (told if isinstance(told, int) else voters_of(self.seed, self.kind))
        return replace(self, voters=voters, seconds=self.seconds or self._seconds())

    def _seconds(self) -> float:
        from tests.simulation.workloads import load

        told = None if self.scenario is None else load(self.scenario).seconds
        return told or seconds_of(self.kind)

    def command(self) -> str:
        """Return what replays it."""
        job = self.settled()
        words = [f"./dev sim {job.seed} --kind {job.kind} --voters {job.voters} --seconds {job.seconds:g}"]
        words += [f"--scenario {job.scenario}"] if job.scenario else []
        words += [f'--mutation "{job.mutation}"'] if job.mutation else []
        words += [f"--without {spans(job.without)}"] if job.without else []
        return " ".join(words)


@dataclass(frozen=True)
class Outcome:
    """What came of one schedule; `violation` is None if nothing was wrong."""

    job: Job
    wall_s: float
    cpu_s: float
    virtual_s: float = 0.0
    events: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: tuple[Drawn, ...] = ()
    violation: str | None = None
    state: str = ""
    """The state of every node at the moment of the violation."""

    @property
    def seed(self) -> int:
        """Of the schedule."""
        return self.job.seed

    @property
    def voters(self) -> int:
        """How many there were."""
        return self.job.settled().voters or 0

    @property
    def kind(self) -> str:
        """Of the schedule."""
        return self.job.kind

    def __str__(self) -> str:
        name = f"{self.kind}{f', {self.job.scenario}' if self.job.scenario else ''}"
        return f"seed {self.seed}, {name}, {self.voters} voters: {self.violation or 'ok'}"


def voters_of(seed: int, kind: str = "quorum") -> int:
    """Return how many voters a schedule has unless told otherwise."""
    return KINDS[kind].voters[seed % len(KINDS[kind].voters)]


def seconds_of(kind: str) -> float:
    """Return how long the faults of a schedule go on unless told otherwise."""
    return KINDS[kind].seconds


def _plan_of(job: Job) -> Plan:
    from tests.simulation.workloads import load

    plan = Plan() if job.scenario is None else load(job.scenario).plan
    return replace(plan, without=job.without)


def run_job(job: Job, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run one schedule in this process."""
    from tests.simulation.mutations import planted

    logging.disable(logging.CRITICAL)
    job = job.settled()
    assert job.voters is not None
    assert job.seconds is not None
    started, cpu_started = time.perf_counter(), time.process_time()
    simulation: Simulation | None = None
    counts: Counter[str] = Counter()
    violation: str | None = None
    try:
        with planted(job.mutation) as parts:
            simulation = KINDS[job.kind].simulation(job.seed, job.voters, replace(parts, plan=_plan_of(job)), trace)
            counts = simulation.run(job.seconds)
    except Violation as error:
        violation = str(error)
    except Exception as error:  # what the simulation itself stumbles over is no pass either
        where = traceback.extract_tb(error.__traceback__)[-1]
        violation = f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
    finally:
        logging.disable(logging.NOTSET)
    outcome = Outcome(job, time.perf_counter() - started, time.process_time() - cpu_started, violation=violation)
    if simulation is None:
        return outcome
    return replace(
        outcome,
        virtual_s=simulation.scheduler.now_s,
        events=simulation.scheduler.events,
        counts=counts or simulation.counts,
        faults=() if simulation.faults is None else tuple(simulation.faults.drawn),
        state=describe(simulation) if violation else "",
    )


def pool_size() -> int:
    """Return a process for each core, or one where xdist has a worker for each."""
    return 1 if "PYTEST_XDIST_WORKER" in os.environ else os.cpu_count() or 1


def new_pool(workers: int | None = None) -> ProcessPoolExecutor:
    """Return workers, by default `pool_size`, whose hash seed is fixed."""
    os.environ["PYTHONHASHSEED"] = "0"  # read by the interpreters that are spawned, not by this one
    return ProcessPoolExecutor(
        workers or pool_size(), mp_context=multiprocessing.get_context("spawn"), initializer=_leave_interrupts
    )


def _leave_interrupts() -> None:
    """Ctrl-C is for the process that has started the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def spans(numbers: Iterable[int]) -> str:
    """Return numbers as a text: 1-3,7."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in found)


def read_spans(text: str) -> frozenset[int]:
    """Return the numbers that `spans` has written.

    Raises:
        ValueError: it is no such text.
    """
    found: set[int] = set()
    for span in text.split(","):
        first, _, last = span.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
