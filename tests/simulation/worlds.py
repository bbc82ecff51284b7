"""The simulations of parts of a broker, and the bugs planted there, for the table.

Cores of coordinators (`groups`, `transactions`), and replicas of a compacted log (`compaction`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from tests.simulation.compaction import mutations as compaction
from tests.simulation.compaction.world import World as CompactionWorld
from tests.simulation.groups import mutations as groups
from tests.simulation.groups.transactions import TransactionWorld
from tests.simulation.groups.world import World as GroupWorld
from tests.simulation.mutations import Caught
from tests.simulation.transactions import mutations as transactions
from tests.simulation.transactions.world import World as TransactionCoordinatorWorld

Plant = Callable[[pytest.MonkeyPatch], None]
SEEDS = 60
"""A planted bug has to be found within so many."""


class PartWorld(NamedTuple):
    """One simulation of a part."""

    make: Callable[[int], Any]
    run_ms: float
    plants: Sequence[Plant]
    test: str


WORLDS = {
    "group core": PartWorld(
        GroupWorld, 60_000, groups.MUTATIONS, "tests/simulation/groups/test_groups.py::test_a_planted_bug_is_found"
    ),
    "group core with transactions": PartWorld(
        TransactionWorld,
        60_000,
        groups.TRANSACTION_MUTATIONS,
        "tests/simulation/groups/test_groups.py::test_a_planted_bug_of_transactions_is_found",
    ),
    "transaction core": PartWorld(
        TransactionCoordinatorWorld,
        40_000,
        transactions.MUTATIONS,
        "tests/simulation/transactions/test_transactions.py::test_a_planted_bug_is_found",
    ),
    "compaction": PartWorld(
        CompactionWorld,
        12_000,
        compaction.MUTATIONS,
        "tests/simulation/compaction/test_compaction.py::test_a_planted_bug_is_found",
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
