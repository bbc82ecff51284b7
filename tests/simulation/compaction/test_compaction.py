"""Replicas that compact a log each at its own time, under chance: what readers get, and what leaders know."""

from __future__ import annotations

import pytest

from tests.simulation.compaction.mutations import MUTATIONS, Plant
from tests.simulation.compaction.world import World
from tests.support.fresh import SEED

RUN_MS = 12_000


def play(seed: int, run_ms: float = RUN_MS) -> None:
    world = World(seed)
    world.run(run_ms)
    world.heal()


@pytest.mark.parametrize("number", range(8))
def test_compacted_replicas_survive_chance(number: int) -> None:
    play(SEED * 1_000 + number)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200))
def test_compacted_replicas_survive_a_lot_of_chance(seed: int) -> None:
    play(seed, 30_000)


@pytest.mark.parametrize("plant", MUTATIONS)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(60):
            play(seed)
