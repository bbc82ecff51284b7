"""The simulations of coordinators' cores (`groups`, `transactions`), and the bugs planted there, for the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from tests.simulation.groups import mutations as groups
from tests.simulation.groups.transactions import TransactionWorld
from tests.simulation.groups.world import World as GroupWorld
from tests.simulation.mutations import Caught
from tests.simulation.transactions import mutations as transactions
from tests.simulation.transactions.world import World as TransactionCoordinatorWorld

Plant = Callable[[pytest.MonkeyPatch], None]
SEEDS = 60
"""A planted bug has to be found within so many."""


class CoordinatorWorld(NamedTuple):
    """One simulation of a core."""

    make: Callable[[int], Any]
    run_ms: float
    plants: Sequence[Plant]
    test: str


WORLDS = {
    "group core": CoordinatorWorld(
        GroupWorld, 60_000, groups.MUTATIONS, "tests/simulation/groups/test_groups.py::test_a_planted_bug_is_found"
    ),
    "group core with transactions": CoordinatorWorld(
        TransactionWorld,
        60_000,
        groups.TRANSACTION_MUTATIONS,
        "tests/simulation/groups/test_groups.py::test_a_planted_bug_of_transactions_is_found",
    ),
    "transaction core": CoordinatorWorld(
        TransactionCoordinatorWorld,
        40_000,
        transactions.MUTATIONS,
        "tests/simulation/transactions/test_transactions.py::test_a_planted_bug_is_found",
    ),
}


def hunt_in_world(name: str) -> Caught | None:
    """Play seed after seed with a planted bug until something notices; None if nothing does."""
    [(world, plant)] = [
        (world, plant)
        for world in WORLDS.values()
        for plant in world.plants
        if plant.__name__.replace("_", " ") == name
    ]
    virtual_s = 0.0
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for seed in range(SEEDS):
            played = world.make(seed)
            try:
                played.run(world.run_ms)
                played.heal()
            except AssertionError as error:
                said = str(error).splitlines()[0] if str(error) else "an invariant of the core"
                return Caught(seed + 1, seed, said, virtual_s + played.now_ms / 1_000, world.test)
            virtual_s += played.now_ms / 1_000
    return None
