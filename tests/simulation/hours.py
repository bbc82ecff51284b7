"""Simulates for hours: all kinds and scenarios in turn on all cores, and what came of it so far."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from tests.simulation import workloads
from tests.simulation.runner import KINDS, Job, Outcome, run_job

MIXTURE = "random-mixture"
SCENARIOS_BETWEEN = 3
"""So many scenarios come between two random mixtures."""
AHEAD = 2
"""Jobs that wait for each worker."""
LOOK_S = 0.5


def turns(seed: int, kinds: Sequence[str] | None = None, between: int = SCENARIOS_BETWEEN) -> Iterator[Job]:
    """Yield jobs without end: random mixtures of each kind in turn, and so many scenarios between two of them.

    Each kind's mixture, and each scenario, counts its seeds from `seed` on.
    """
    kinds = list(kinds or KINDS)
    scenarios = [
        (name, kind)
        for name in workloads.names()
        if name != MIXTURE
        for kind in workloads.load(name).kinds
        if kind in kinds
    ]
    mixtures, others = itertools.cycle(kinds), itertools.cycle(scenarios)
    counts: Counter[tuple[str, str]] = Counter()
    while True:
        turn = [(MIXTURE, next(mixtures)), *itertools.islice(others, between if scenarios else 0)]
        for name, kind in turn:
            yield Job(seed + counts[name, kind], kind, scenario=None if name == MIXTURE else name)
            counts[name, kind] += 1


@dataclass
class Tally:
    """What came of the schedules of one kind."""

    schedules: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    events: int = 0
    failed: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        """Count one more."""
        self.schedules += 1
        self.virtual_s += outcome.virtual_s
        self.cpu_s += outcome.cpu_s
        self.events += outcome.events
        self.failed += outcome.violation is not None
        self.counts += outcome.counts

    @property
    def hours(self) -> float:
        """Simulated so far."""
        return self.virtual_s / 3_600

    @property
    def acknowledged(self) -> int:
        """Changes of metadata, records, commits of groups, and decisions of transactions that clients were told of."""
        names = ("acknowledged", "acks=all", "acks=1", "commits", "transactions committed", "batches committed")
        return sum(self.counts[name] for name in names)

    @property
    def elections(self) -> int:
        """Of controllers, and of partitions' leaders."""
        return self.counts["leaders"] + self.counts["elections"]

    @property
    def faults(self) -> Counter[str]:
        """How often each has happened, without the word."""
        found = {name: count for name, count in self.counts.items() if name.startswith("fault ")}
        return Counter({name.removeprefix("fault "): count for name, count in found.items()})


class Summary:
    """What came of everything so far."""

    def __init__(self, hours: float | None, seed: int) -> None:
        self.wanted_hours = hours
        """None: as many as there are jobs for."""
        self.seed = seed
        self.kinds: dict[str, Tally] = defaultdict(Tally)
        self.failed: list[Outcome] = []
        self.scenarios: dict[str | None, Counter[str]] = defaultdict(Counter)
        """What was counted by scenario; None: random mixtures."""
        self._started_s = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        """Count one more."""
        self.kinds[outcome.kind].add(outcome)
        self.scenarios[outcome.job.scenario] += outcome.counts
        if outcome.violation is not None:
            self.failed.append(outcome)

    @property
    def hours(self) -> float:
        """Simulated so far."""
        return sum(each.hours for each in self.kinds.values())

    @property
    def wall_s(self) -> float:
        """How long it has taken."""
        return time.monotonic() - self._started_s

    def total(self) -> Tally:
        """Return all kinds together."""
        whole = Tally()
        for each in self.kinds.values():
            whole.schedules += each.schedules
            whole.virtual_s += each.virtual_s
            whole.cpu_s += each.cpu_s
            whole.events += each.events
            whole.failed += each.failed
            whole.counts += each.counts
        return whole

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield a line for each kind, and one for all: what `HEADINGS` says."""
        for name, each in [*sorted(self.kinds.items()), ("all", self.total())]:
            yield (
                name,
                f"{each.schedules:,}",
                f"{each.hours:.2f}",
                f"{each.virtual_s / max(each.cpu_s, 1e-9):.1f}",
                f"{each.events:,}",
                f"{each.acknowledged:,}",
                f"{each.elections:,}",
                f"{sum(each.faults.values()):,}",
                f"{each.failed:,}",
            )

    def line(self) -> str:
        """Return it in one line."""
        whole = self.total()
        return (
            f"{self.hours:.2f} {f'of {self.wanted_hours:g} ' if self.wanted_hours else ''}simulated hours in "
            f"{self.wall_s:.0f} s "
            f"({whole.virtual_s / max(self.wall_s, 1e-9):.0f} to 1), {whole.schedules} schedules, "
            f"{whole.events:,} events, {sum(whole.faults.values()):,} faults, {whole.acknowledged:,} acknowledged, "
            f"{whole.elections:,} elections, {whole.failed} failed"
        )

    def faults(self) -> str:
        """Return which faults happened, the most frequent first."""
        return ", ".join(f"{name} {count:,}" for name, count in self.total().faults.most_common())


HEADINGS = (
    "kind", "schedules", "hours", "s per CPU s", "events", "acknowledged", "elections", "faults", "failed",
)  # fmt: skip


def simulate(
    summary: Summary,
    jobs: Iterator[Job],
    pool: ProcessPoolExecutor,
    workers: int,
    show: Show,
    ahead: int = AHEAD,
) -> None:
    """Run jobs until so many hours are simulated, and `show` now and then what came of them.

    Each worker has `ahead` jobs. With one, none is run in vain at the end; with more, no worker ever waits.
    """
    running: set[Future[Outcome]] = set()
    try:
        while summary.wanted_hours is None or summary.hours < summary.wanted_hours:
            missing = workers * ahead - len(running)
            running |= {pool.submit(run_job, job) for job in itertools.islice(jobs, missing)}
            if not running:
                break
            done, running = wait(running, timeout=LOOK_S, return_when=FIRST_COMPLETED)
            for each in done:
                summary.add(each.result())
            show(summary)
        for each in running:
            if not each.cancel():
                summary.add(each.result())
    finally:
        for each in running:
            each.cancel()
    show(summary)


Show = Callable[[Summary], None]
