"""The group coordinator's core under chance: what must never be so, and that groups come to rest."""

from __future__ import annotations

import pytest

from broker.coordinator.groups import rebalance
from tests.simulation.groups.both_protocols import BothProtocols, ClassicClient
from tests.simulation.groups.client import Client
from tests.simulation.groups.mutations import MUTATIONS, TRANSACTION_MUTATIONS, Plant
from tests.simulation.groups.transactions import TransactionWorld
from tests.simulation.groups.world import World


def play(seed: int, run_ms: float = 60_000, world: type[World] = World) -> None:
    played = world(seed)
    played.run(run_ms)
    played.heal()


@pytest.mark.parametrize("seed", range(25))
def test_groups_survive_chance(seed: int) -> None:
    play(seed)


def test_without_faults_members_read_on() -> None:
    world = World(1, faults=False)
    world.run(60_000)
    world.heal()
    assert sum(world.checker.committed.values()) > 100


@pytest.mark.parametrize("seed", range(100, 108))
def test_members_that_are_reconciled_one_by_one_get_there(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalance, "PIECE", 1)
    play(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 500))
def test_groups_survive_a_lot_of_chance(seed: int) -> None:
    play(seed, 120_000)


@pytest.mark.parametrize("seed", range(25))
def test_groups_that_move_between_the_protocols_survive_chance(seed: int) -> None:
    play(seed, world=BothProtocols)


def test_without_faults_groups_move_between_the_protocols() -> None:
    world = BothProtocols(2, faults=False)
    world.run(10_000)
    types = world.types
    assert types, "the group does not exist"
    for make in (ClassicClient, Client, ClassicClient):
        for client in list(world.clients):
            world.clients.remove(client)
            world.clients.append(make(world, f"{client.name}+", client.topics, ""))
            client.leave()
            world.run(5_000)
    world.heal()
    assert {"classic", "consumer"} <= types
    assert sum(world.checker.committed.values()) > 100


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 500))
def test_groups_that_move_between_the_protocols_survive_a_lot_of_chance(seed: int) -> None:
    play(seed, 120_000, BothProtocols)


@pytest.mark.parametrize("seed", range(25))
def test_transactions_survive_chance(seed: int) -> None:
    play(seed, world=TransactionWorld)


def test_without_faults_transactions_commit() -> None:
    world = TransactionWorld(1, faults=False)
    world.run(60_000)
    world.heal()
    assert sum(world.checker.committed.values()) > 100
    assert sum(bool(each.decision) for each in world.transactions.values()) > 100


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 500))
def test_transactions_survive_a_lot_of_chance(seed: int) -> None:
    play(seed, 120_000, TransactionWorld)


@pytest.mark.parametrize("plant", TRANSACTION_MUTATIONS)
def test_a_planted_bug_of_transactions_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(60):
            play(seed, world=TransactionWorld)


@pytest.mark.parametrize("plant", MUTATIONS)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(FIRST_SEED.get(plant.__name__, 0), 60):
            play(seed)


FIRST_SEED = {
    "takes_any_silence_for_an_acknowledgement": 22,
    "gives_up_at_the_rebalance_timeout": 5,
    "takes_commits_of_any_epoch": 9,
}
"""Where what a bug needs is rare: the first that has it."""
