"""The transaction coordinator's core under chance: what must never be so, and that everything comes to its end."""

from __future__ import annotations

import pytest

from broker.coordinator.transactions import checks, coordinator, records, transaction
from tests.simulation.transactions.mutations import MUTATIONS, Plant
from tests.simulation.transactions.partitions import Broken
from tests.simulation.transactions.world import World
from tests.support.fresh import one_of


def play(seed: int, run_ms: float = 40_000, crash_at_step: int | None = None) -> World:
    world = World(seed)
    world.crash_at_step = crash_at_step
    world.run(run_ms)
    world.heal()
    return world


@pytest.mark.parametrize("seed", range(25))
def test_transactions_survive_chance(seed: int) -> None:
    play(seed)


def test_without_faults_everybody_commits() -> None:
    world = World(0, faults=False)
    world.run(20_000)
    world.heal()
    assert world.checker.committed > 80
    assert len(world.batches["s"].told) > 20


def use_up_epochs(patch: pytest.MonkeyPatch, max_epoch: int) -> None:
    for module in (transaction, coordinator, records):
        patch.setattr(module, "MAX_EPOCH", max_epoch)
    assert not hasattr(checks, "MAX_EPOCH")


@pytest.mark.parametrize("seed", range(100, 110))
def test_epochs_are_used_up(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """KAFKA-18660: after the last epoch comes another producer id, under any faults."""
    use_up_epochs(monkeypatch, 3)
    world = play(seed)
    epochs = [epoch for _, epoch in world.checker.transactions]
    assert max(epochs) == 3
    assert len({producer_id for producer_id, _ in world.checker.transactions}) > 20


def quiet(crash_at_step: int | None = None) -> World:
    """A short run in which nothing goes wrong, but for one failover."""
    world = World(3, faults=False)
    world.commit_takes_ms = [1, 5]
    world.crash_at_step = crash_at_step
    world.run(700)
    return world


EVERY = 3
"""So many runs together meet every step."""


@pytest.mark.parametrize("nth", one_of(range(EVERY)))
def test_a_failover_at_every_step(nth: int) -> None:
    """The coordinator fails at each event of a run in turn: at every third one, and --long at all."""
    whole = quiet()
    assert whole.checker.committed > 10
    assert sum(len(batches.told) for batches in whole.batches.values()) > 5
    for step in range(1 + nth, whole.steps + 1, EVERY):
        world = quiet(step)
        assert world.term == 1
        world.heal(20_000)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 700))
def test_transactions_survive_a_lot_of_chance(seed: int) -> None:
    play(seed, 120_000)


@pytest.mark.parametrize("plant", MUTATIONS)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Broken):
        for seed in range(60):
            play(seed)
