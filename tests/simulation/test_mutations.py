"""Planted bugs are caught: the quick ones here, all of them in the long run and by `./dev sim --mutations`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation.mutations import MUTATIONS, hunt, planted
from tests.simulation.runner import new_pool

QUICK = [
    "append rewrite off",
    "deduplication off",
    "epoch fence off",
    "fenced at once when the stream breaks",
    "no session after an election",
    "own entries count before the sync",
    "read without a round",
    "session shorter than the lease",
    "snapshot not synced",
]
"""Caught within a few schedules."""


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with new_pool() as workers:
        yield workers


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_caught(pool: ProcessPoolExecutor, name: str) -> None:
    assert hunt(name, pool, at_most=40) is not None


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(MUTATIONS.keys() - set(QUICK)))
def test_every_planted_bug_is_caught(pool: ProcessPoolExecutor, name: str) -> None:
    assert hunt(name, pool) is not None


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_a_planted_bug_rewrites_is_there(name: str) -> None:
    with planted(name):
        pass
