"""`./dev sim`: runs simulated schedules: one, many, or for hours; shows that planted bugs are found."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tests.simulation import workloads
from tests.simulation.hours import HEADINGS, Show, Summary, simulate, turns
from tests.simulation.mutation_table import PAGE, after, markdown, planted_bugs
from tests.simulation.mutations import Caught, all_mutations, hunt
from tests.simulation.runner import KINDS, Job, Outcome, new_pool, read_spans, run_job
from tests.simulation.shrink import shrink
from tests.simulation.workloads import ScenarioError

LINE_S = 10.0
LOG_COLUMNS = 120


@contextlib.contextmanager
def shown(summary: Summary, console: Console | None = None) -> Iterator[Show]:
    """Yield a function that shows the summary: in place on a terminal, otherwise as a line from time to time.

    A failed schedule is printed as soon as it has failed, also in the middle of a long run.
    """
    console = console or Console(width=None if sys.stdout.isatty() else LOG_COLUMNS)
    console.print(f"seeds from {summary.seed} on")
    if console.is_terminal:
        with Live(console=console, refresh_per_second=2) as live:
            yield lambda summary: live.update(view(summary))
        return
    last_s = time.monotonic()
    told = 0

    def line(summary: Summary) -> None:
        nonlocal last_s, told
        for each in summary.failed[told:]:
            console.print(f"FAILED: {each.job.command()}", highlight=False, soft_wrap=True)
        told = len(summary.failed)
        if time.monotonic() - last_s >= LINE_S:
            last_s = time.monotonic()
            console.print(summary.line(), highlight=False, soft_wrap=True)

    yield line
    console.print(_table(summary))


def view(summary: Summary) -> Group:
    """Return the results so far."""
    failed = [Text(f"{each}\n  {each.job.command()}", style="red") for each in summary.failed]
    return Group(Text(summary.line()), _table(summary), Text(f"faults: {summary.faults()}", style="dim"), *failed)


def _table(summary: Summary) -> Table:
    table = Table()
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for row in summary.rows():
        table.add_row(*row)
    return table


HASH_SEED = "0"
SHRUNK = 3
"""How many failures of a long run are shrunk."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 1 if a schedule failed, or a planted bug was not caught."""
    chosen = _parser().parse_args(arguments)
    if chosen.scenarios:
        return _print_scenarios()
    if chosen.mutations:
        return _print_mutations(chosen.markdown)
    try:
        jobs = _jobs(chosen)
    except ScenarioError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if chosen.hours is not None or chosen.count is not None:
        return _many(chosen, jobs)
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:  # see tests.simulation.runner
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tools.sim", *(arguments or sys.argv[1:])])
    return max([_print_one(job, chosen.trace, chosen.shrink) for job in jobs])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./dev sim", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=0, help="the schedule, or the first one with --count")
    parser.add_argument("--count", type=int, metavar="N", help="run N schedules on all cores")
    parser.add_argument("--hours", type=float, metavar="H", help="simulate H hours of all kinds and scenarios in turn")
    parser.add_argument(
        "--seed", dest="first", type=int, metavar="N", help="the first schedule of --hours; by default a random one"
    )
    parser.add_argument("--kind", choices=sorted(KINDS), help="only this kind; by default all, one after the other")
    parser.add_argument("--scenario", metavar="NAME", help="a workload and its faults, by name")
    parser.add_argument("--scenarios", action="store_true", help="list the scenarios")
    parser.add_argument("--voters", type=int, choices=workloads.VOTERS, help="by default the seed decides")
    parser.add_argument("--seconds", type=float, metavar="S", help="virtual seconds with faults")
    parser.add_argument("--without", type=read_spans, metavar="3,5-9", help="leave out the faults with these numbers")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="do not shrink failures")
    parser.add_argument("--trace", action="store_true", help="print all events")
    mutations = sorted(all_mutations())
    names = ", ".join(f'"{name}"' for name in mutations)
    parser.add_argument("--mutation", choices=mutations, metavar="NAME", help=f"plant this bug: {names}")
    parser.add_argument("--mutations", action="store_true", help="plant each bug in turn and print what caught it")
    parser.add_argument("--markdown", action="store_true", help=f"with --mutations: write docs/{PAGE.name}")
    return parser


def _jobs(chosen: argparse.Namespace) -> list[Job]:
    """Return a job for each kind.

    Raises:
        ScenarioError: the scenario is unknown, or not for that kind.
    """
    kinds = [chosen.kind] if chosen.kind else list(KINDS)
    if chosen.mutation:
        kinds = [all_mutations()[chosen.mutation].kind]
    if chosen.scenario:
        fitting = workloads.load(chosen.scenario).kinds
        kinds = [kind for kind in kinds if kind in fitting]
        if not kinds:
            raise ScenarioError(f"{chosen.scenario} is for {' and '.join(fitting)}")
    without = chosen.without or frozenset()
    return [
        Job(chosen.seed, kind, chosen.voters, chosen.seconds, chosen.scenario, chosen.mutation, without)
        for kind in kinds
    ]


def _print_scenarios() -> int:
    width = max(map(len, workloads.names()))
    for name in workloads.names():
        scenario = workloads.load(name)
        print(f"{name:<{width}}  {', '.join(scenario.kinds)}: {scenario.about}")
    return 0


def _print_one(job: Job, trace: bool, shrinks: bool) -> int:
    outcome = run_job(job, (lambda line: print(line)) if trace else None)
    print(outcome)
    if outcome.state:
        print(outcome.state)
    if outcome.counts:
        print("  " + ", ".join(f"{name} {count}" for name, count in sorted(outcome.counts.items())))
    if outcome.violation and shrinks:
        with new_pool() as pool:
            _print_shrunk([outcome], pool)
    return 1 if outcome.violation else 0


def _print_shrunk(failed: Iterable[Outcome], pool: ProcessPoolExecutor) -> None:
    for outcome in failed:
        print(f"shrinking seed {outcome.seed} of {outcome.kind}", file=sys.stderr, flush=True)
        shrunk = shrink(outcome, pool, lambda line: print(f"  {line}", file=sys.stderr, flush=True))
        print(f"\n{shrunk.report()}", flush=True)


def _many(chosen: argparse.Namespace, jobs: list[Job]) -> int:
    """Run many schedules on all cores; after Ctrl-C, print the results so far."""
    first = chosen.first if chosen.first is not None else random.randrange(10**9)
    if chosen.count is not None:
        turn: Iterator[Job] = (replace(job, seed=job.seed + number) for number in range(chosen.count) for job in jobs)
    elif chosen.scenario or chosen.mutation:
        turn = (replace(job, seed=first + number) for number in range(10**9) for job in jobs)
    else:
        any_of = turns(first, [chosen.kind] if chosen.kind else None)
        turn = (replace(job, voters=chosen.voters, seconds=chosen.seconds) for job in any_of)
    summary = Summary(chosen.hours, chosen.seed if chosen.count is not None else first)
    workers = os.cpu_count() or 1
    with new_pool(workers) as pool:
        try:
            with shown(summary) as show:
                simulate(summary, turn, pool, workers, show)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            pool.shutdown(wait=False, cancel_futures=True)
        for outcome in summary.failed:
            print(f"{outcome}\n  {outcome.job.command()} --trace")
        if summary.failed and chosen.shrink:
            with new_pool(workers) as others:
                _print_shrunk(summary.failed[:SHRUNK], others)
    print(summary.line())
    print(f"faults: {summary.faults()}")
    return 1 if summary.failed else 0


def _print_mutations(write: bool) -> int:
    mutations = planted_bugs()
    found: dict[str, Caught | None] = {}
    width = max(map(len, mutations))
    print(f"{'planted bug':<{width}}  {'after':<26}  caught by")
    with new_pool() as pool:
        hunts = {name: pool.submit(hunt, name) for name in mutations}
        for name, hunted in hunts.items():
            caught = found[name] = hunted.result()
            if caught is None:
                print(f"{name:<{width}}  {'-':<26}  NOT CAUGHT", flush=True)
            else:
                said = caught.violation.splitlines()[0][:140]
                print(f"{name:<{width}}  {after(caught):<26}  {caught.test}\n{'':<{width}}  {said}", flush=True)
    hours = sum(caught.virtual_s for caught in found.values() if caught) / 3_600
    missed = [name for name, caught in found.items() if caught is None]
    print(f"{len(found) - len(missed)} of {len(found)} planted bugs are caught, in {hours:.1f} simulated hours")
    if write:
        PAGE.write_text(markdown(found), encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
