"""Every planted bug is caught; `./dev sim --mutations` prints by what, and docs/reliability-mutations.md has it.

An ordinary run hunts those that matter most, and some of those in files that the last commits have touched, which its
`SIMULATION_SEED` draws; `--long` hunts all.
"""

from __future__ import annotations

import random
import subprocess
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.simulation.mutation_table import PAGE, named, planted_bugs
from tests.simulation.mutations import Caught, all_mutations, hunt, planted
from tests.simulation.runner import new_pool
from tests.support.fresh import SEED

SEEDS = {
    "a batch is committed twice": 3,
    "a former term answers": 5,
    "a truncation cuts no transactions": 17,
    "aborted ranges are lost at a restart": 1,
    "acknowledged without a lease": 12,
    "an append that was refused is forgotten": 7,
    "another's id under one's own name": 2,
    "answered before it is committed": 2,
    "checksum of the log off": 5,
    "commit index past what was compared": 17,
    "fenced at once when the stream breaks": 2,
    "handed over before it was let go": 2,
    "high watermark at the log end": 7,
    "lease for an old image": 3,
    "let go before it is": 4,
    "no lease asked for": 1,
    "producers are not recovered": 4,
    "read without a round": 5,
    "snapshot guard off": 1,
    "snapshot not synced": 2,
    "term stamp off": 2,
    "too few in sync": 1,
    "vote not durable": 4,
    "wiped-voter guard off": 4,
}
"""Where the first schedules do not notice: one that does. It is tried before them."""
assert all_mutations().keys() >= SEEDS.keys()
NAMED = {
    "held before fsync",
    "high watermark at the log end",
    "epoch fence off",
    "truncated by the high watermark",
    "no batches remembered",
    "marker with the unbumped epoch",
    "lease without a majority round",
    "takes commits of any member",
    "committed while it is handed out",
}
"""Every simulation of a log broker must catch these."""

RECENT = "3 days ago"
DRAWN = 24
"""So many others are hunted in an ordinary run."""


def touched_modules() -> set[str] | None:
    """Return the modules that recent commits and the work tree have touched; None where git does not know."""
    root = Path(__file__).resolve().parents[2]
    commands = (["log", f"--since={RECENT}", "--name-only", "--format="], ["diff", "--name-only", "HEAD"])
    names: set[str] = set()
    for command in commands:
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return None
        names |= set(done.stdout.split())
    return {name.removesuffix(".py").replace("/", ".") for name in names}


def cases() -> Iterator[object]:
    """Yield every planted bug; those that are not drawn are for --long."""
    touched = touched_modules()
    others = []
    for name, mutation in all_mutations().items():
        modules = {rewrite.target.partition(":")[0] for rewrite in mutation.rewrites}
        if name not in NAMED and (touched is None or not modules or modules & touched):
            others.append(name)
    hunted = NAMED | set(random.Random(SEED).sample(others, min(DRAWN, len(others))))
    for name in all_mutations():
        yield pytest.param(name, marks=() if name in hunted else pytest.mark.long)


def begin(pool: ProcessPoolExecutor, name: str) -> Future[Caught | None]:
    """Hunt a bug; one that has a story is not waited for in schedules, which come to it rarely."""
    if all_mutations()[name].story is not None:
        return pool.submit(hunt, name, 0)
    return pool.submit(hunt, name, first=SEEDS.get(name))


@pytest.fixture(scope="module")
def hunts(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Caught | None]]]:
    """All hunts that are asked for, under way on all cores."""
    function = "test_a_planted_bug_is_caught"
    names: list[str] = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and item.originalname == function
    ]
    with new_pool() as pool:
        yield {name: begin(pool, name) for name in names}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", list(cases()))
def test_a_planted_bug_is_caught(hunts: dict[str, Future[Caught | None]], name: str) -> None:
    caught = hunts[name].result()
    assert caught is not None
    if name in SEEDS and all_mutations()[name].story is None and caught.seed != SEEDS[name]:
        warnings.warn(f"SEEDS: seed {SEEDS[name]} does not notice {name!r} any more, {caught.seed} does", stacklevel=1)


@pytest.mark.parametrize("name", all_mutations())
def test_what_a_planted_bug_rewrites_is_there(name: str) -> None:
    with planted(name):
        pass


def test_those_that_matter_most_are_among_them() -> None:
    assert planted_bugs().keys() >= NAMED
    assert len(planted_bugs()) >= 100


def test_the_page_names_exactly_those_that_exist() -> None:
    assert named() == list(planted_bugs()), (
        f"{PAGE.name} names other planted bugs than there are; ./dev sim --mutations --markdown writes it anew"
    )


def test_the_page_has_all_of_them_caught() -> None:
    assert "not caught" not in PAGE.read_text(encoding="utf-8")
