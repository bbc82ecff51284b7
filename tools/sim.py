"""`./dev sim`: runs simulated schedules of the metadata quorum, replays one, or shows that planted bugs are caught."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from tests.simulation.mutations import MUTATIONS, hunt
from tests.simulation.runner import SECONDS, Outcome, new_pool, run_many, run_one

HASH_SEED = "0"


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments ask for; 1 if a schedule failed, or a planted bug was not caught."""
    parser = argparse.ArgumentParser(prog="./dev sim", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=0, help="the schedule, or the first one with --count")
    parser.add_argument("--count", type=int, metavar="N", help="run N schedules on all cores")
    parser.add_argument("--voters", type=int, choices=(1, 3, 5), help="by default the seed decides")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="virtual seconds with faults")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    names = ", ".join(f'"{name}"' for name in sorted(MUTATIONS))
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), metavar="NAME", help=f"plant this bug: {names}")
    parser.add_argument("--mutations", action="store_true", help="plant each bug in turn and print what caught it")
    chosen = parser.parse_args(arguments)
    if chosen.mutations:
        return _print_mutations()
    if chosen.count is not None:
        return _print_many(chosen)
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:  # see tests.simulation.runner
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tools.sim", *(arguments or sys.argv[1:])])
    trace = (lambda line: print(line)) if chosen.trace else None
    outcome = run_one(chosen.seed, chosen.voters, chosen.seconds, chosen.mutation, trace)
    print(outcome)
    _print_counts(outcome.counts)
    return 1 if outcome.violation else 0


def _print_many(chosen: argparse.Namespace) -> int:
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    failed: list[Outcome] = []
    seeds = range(chosen.seed, chosen.seed + chosen.count)
    for outcome in run_many(seeds, chosen.voters, chosen.seconds, chosen.mutation):
        counts += outcome.counts
        if outcome.violation:
            failed.append(outcome)
            print(
                f"{outcome}\n  ./dev sim {outcome.seed} --voters {outcome.voters} --seconds {chosen.seconds:g} --trace"
            )
    print(f"{len(seeds)} schedules in {time.perf_counter() - started:.0f} s, {len(failed)} failed")
    _print_counts(counts)
    return 1 if failed else 0


def _print_counts(counts: Counter[str]) -> None:
    if counts:
        print("  " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))


def _print_mutations() -> int:
    missed = 0
    width = max(map(len, MUTATIONS))
    print(f"{'planted bug':<{width}}  schedules  caught by")
    with new_pool() as pool:
        for name in MUTATIONS:
            caught = hunt(name, pool)
            missed += caught is None
            if caught is None:
                print(f"{name:<{width}}  {'-':>9}  NOT CAUGHT", flush=True)
            else:
                print(
                    f"{name:<{width}}  {caught.schedules or '-':>9}  {caught.violation.splitlines()[0][:140]}",
                    flush=True,
                )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
