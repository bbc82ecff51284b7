"""The member's core and the coordinator's, against each other."""

from __future__ import annotations

from random import Random

import pytest

from broker.groups.config import GroupConfig
from raftlog.types import TopicPartition
from tests.support.group_driver import GroupDriver
from tests.support.group_link import GroupWorld

PARTITIONS = 7
CONFIG = GroupConfig(session_timeout_ms=3000, heartbeat_interval_ms=500, rebalance_timeout_ms=60_000)


def world_of(seed: int, members: int) -> GroupWorld:
    world = GroupWorld(Random(seed), GroupDriver({"t": PARTITIONS}, CONFIG))
    for number in range(members):
        world.add(number, ["t"])
    return world


def settle(world: GroupWorld, within_ms: float) -> float:
    """Let everything go well; return how long it took until everybody had his share."""
    world.calm = True
    began_ms = world.driver.now_ms
    wanted = {TopicPartition("t", number) for number in range(PARTITIONS)}
    while not (world.settled and world.owners().keys() == wanted):
        assert world.driver.now_ms < began_ms + within_ms, (world.owners(), [m.core.state for m in world.members])
        world.step()
    return world.driver.now_ms - began_ms


def test_they_come_to_share_without_waiting_for_a_heartbeat_interval() -> None:
    world = world_of(1, 3)
    settle(world, 5000.0)
    world.add(3, ["t"])
    assert settle(world, 5000.0) < 1500.0
    assert sorted(len(member.core.owned) for member in world.members) == [1, 2, 2, 2]


@pytest.mark.parametrize("seed", range(60))
def test_no_partition_has_two_owners_and_nothing_is_stuck(seed: int) -> None:
    world = world_of(seed, 3)
    chance, number = world.chance, 3
    for _ in range(chance.randrange(200, 500)):
        world.step()
        now_ms = world.driver.now_ms
        what = chance.random()
        member = chance.choice(world.members)
        if what < 0.02:
            world.restart()
        elif what < 0.05:
            member.drop(now_ms)
        elif what < 0.06:
            member.not_before_ms = now_ms + 5000.0  # out of reach, for longer than its session
            member.drop(now_ms)
            member.not_before_ms = now_ms + 5000.0
        elif what < 0.07:
            member.polls = not member.polls
        elif what < 0.08 and len(world.members) > 2:
            world.members.remove(member)
            if chance.random() < 0.5:
                member.leave(now_ms)
        elif what < 0.10 and len(world.members) < 6:
            world.add(number, ["t"])
            number += 1
    for member in world.members:
        member.polls = True
    settle(world, 30_000.0)
