"""Every planted bug is caught; `./dev sim --mutations` prints by what."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.simulation.mutations import MUTATIONS, hunt, planted
from tests.simulation.runner import new_pool


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with new_pool() as workers:
        yield workers


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(pool: ProcessPoolExecutor, name: str) -> None:
    assert hunt(name, pool) is not None


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_a_planted_bug_rewrites_is_there(name: str) -> None:
    with planted(name):
        pass
