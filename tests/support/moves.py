"""Partitions that move, on metadata in memory: what leaders, brokers and the controller would do about it meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raftlog.v1.records_pb2 import ConfigResource, MetadataCommand, PartitionRef
from raftmeta.elections import unsettled
from tests.support.admin_service import AdminServer
from tests.support.metadata import broker_epoch, create_topic, elect, fence
from tests.support.pauses import instead_of_sleeping

ON_THREE = ([1, 2, 3], [2, 3, 1], [3, 1, 2], [1, 3, 2])
"""Where the partitions of a topic are while broker 4 has none."""


def topic_on(number: int, name: str, *replicas: list[int], min_insync_replicas: int = 1) -> MetadataCommand:
    """Create a topic with a partition for each of these assignments."""
    configs = {"min.insync.replicas": str(min_insync_replicas)}
    command = create_topic(name, number, len(replicas), len(replicas[0]), configs)
    for each in replicas:
        command.create_topic.assignments.add(replicas=each)
    return command


def catch_up(server: AdminServer) -> int:
    """Bring every replica that is being added into the ISR; return how many partitions had one."""
    settle(server)
    up = {each.broker_id for each in server.image.brokers.values() if each.active}
    moving_now = [
        (topic.name, part)
        for topic in list(server.image.topics.values())
        for part in topic.partitions
        if part.adding_replicas or part.removing_replicas
    ]
    for name, part in moving_now:
        server.set_isr(name, [each for each in part.replicas if each in up], part.partition)
    settle(server)
    return len(moving_now)


def placed(server: AdminServer, topic: str = "a") -> list[tuple[int, ...]]:
    """Return the replicas of every partition of a topic."""
    found = server.image.topic(topic)
    assert found is not None
    return [part.replicas for part in found.partitions]


def replicas_on(server: AdminServer, broker_id: int) -> int:
    """Return of how many partitions a broker has a replica."""
    return sum(broker_id in part.replicas for topic in server.image.topics.values() for part in topic.partitions)


def is_cordoned(server: AdminServer, broker_id: int) -> bool:
    """Whether it gets no new replicas."""
    return server.image.brokers[broker_id].cordoned


def throttles(server: AdminServer) -> list[str]:
    """Return the names of brokers and topics with a throttle."""
    found = [
        str(broker_id)
        for broker_id in (1, 2, 3, 4)
        if any("throttled" in key for key in server.image.resource_configs(ConfigResource.BROKER, str(broker_id)))
    ]
    names = sorted(topic.name for topic in server.image.topics.values())
    return found + [name for name in names if any("throttled" in key for key in server.image.topic_configs(name))]


def settle(server: AdminServer) -> None:
    """Act as the controller after every change: elect leaders that are due, once the previous ones have released."""
    while partitions := [
        *unsettled(server.image),
        *(
            PartitionRef(topic_id=topic.topic_id, partition=part.partition)
            for topic in server.image.topics.values()
            for part in topic.partitions
            if part.revoked_leader is not None
        ),
    ]:
        server.propose(elect(partitions, handed_over=True))


def stop(server: AdminServer, broker_id: int) -> None:
    """Have a broker be down."""
    server.propose(fence(broker_id, broker_epoch(server.image, broker_id)))
    settle(server)


def interrupt_at_look(monkeypatch: pytest.MonkeyPatch, number: int, before: Callable[[], object]) -> None:
    """Press Ctrl-C at the look with this number; `before` happens at every one earlier."""
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == number:
            raise KeyboardInterrupt
        before()

    instead_of_sleeping(monkeypatch, sleep)
