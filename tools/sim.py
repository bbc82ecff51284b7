"""`./dev sim`: runs simulated schedules of quorums and of whole brokers, replays one, or shows that bugs are caught."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from tests.simulation.mutations import all_mutations, hunt
from tests.simulation.runner import KINDS, Outcome, new_pool, run_many, run_one, seconds_of

HASH_SEED = "0"


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments ask for; 1 if a schedule failed, or a planted bug was not caught."""
    parser = argparse.ArgumentParser(prog="./dev sim", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=0, help="the schedule, or the first one with --count")
    parser.add_argument("--count", type=int, metavar="N", help="run N schedules on all cores")
    parser.add_argument("--voters", type=int, choices=(1, 3, 5), help="by default the seed decides")
    parser.add_argument("--kind", choices=sorted(KINDS), help="quorum or brokers only; else both, one after the other")
    parser.add_argument("--seconds", type=float, metavar="S", help="virtual seconds with faults")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    mutations = all_mutations()
    names = ", ".join(f'"{name}"' for name in sorted(mutations))
    parser.add_argument("--mutation", choices=sorted(mutations), metavar="NAME", help=f"plant this bug: {names}")
    parser.add_argument("--mutations", action="store_true", help="plant each bug in turn and print what caught it")
    chosen = parser.parse_args(arguments)
    if chosen.mutations:
        return _print_mutations()
    kinds = [chosen.kind] if chosen.kind else list(KINDS)
    if chosen.mutation:
        kinds = [mutations[chosen.mutation].kind]
    if chosen.count is not None:
        return max([_print_many(chosen, kind) for kind in kinds])
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:  # see tests.simulation.runner
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tools.sim", *(arguments or sys.argv[1:])])
    return max([_print_one(chosen, kind) for kind in kinds])


def _print_one(chosen: argparse.Namespace, kind: str) -> int:
    trace = (lambda line: print(line)) if chosen.trace else None
    outcome = run_one(chosen.seed, chosen.voters, chosen.seconds, chosen.mutation, trace, kind)
    print(outcome)
    _print_counts(outcome.counts)
    return 1 if outcome.violation else 0


def _print_many(chosen: argparse.Namespace, kind: str) -> int:
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    failed: list[Outcome] = []
    seeds = range(chosen.seed, chosen.seed + chosen.count)
    for outcome in run_many(seeds, chosen.voters, chosen.seconds, chosen.mutation, kind=kind):
        counts += outcome.counts
        if outcome.violation:
            failed.append(outcome)
            replay = f"./dev sim {outcome.seed} --kind {kind} --voters {outcome.voters}"
            print(f"{outcome}\n  {replay} --seconds {chosen.seconds or seconds_of(kind):g} --trace")
    print(f"{len(seeds)} schedules of {kind} in {time.perf_counter() - started:.0f} s, {len(failed)} failed")
    _print_counts(counts)
    return 1 if failed else 0


def _print_counts(counts: Counter[str]) -> None:
    if counts:
        print("  " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))


def _print_mutations() -> int:
    missed = 0
    mutations = all_mutations()
    width = max(map(len, mutations))
    print(f"{'planted bug':<{width}}  schedules  caught by")
    with new_pool() as pool:
        for name in mutations:
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
