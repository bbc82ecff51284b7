"""An operator that cordons and drains brokers and undoes it, and what must hold of drained brokers meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.image import NO_LEADER, MetadataImage, PartitionImage
from tests.simulation.process import Host, Process
from tests.simulation.requests import Requester

if TYPE_CHECKING:
    from tests.simulation.schedule import Simulation
    from tests.simulation.voter import Committed

FIRST_OPERATOR = 95
"""The operator's host."""
SHARE = 0.5
"""The share of schedules with an operator."""
MEAN_PAUSE_S = 0.7


class Drains:
    """One broker after the other, drawn from a chance of its own. What is drained in the end stays so."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = random.Random(f"drains of {simulation.seed}")

    def start(self) -> None:
        """Begin, in some of the schedules; the drains end by themselves."""
        if self._random.random() < SHARE:
            self._process = Process(Host(self._simulation, FIRST_OPERATOR))
            self._requester = Requester(self._process, self._random)
            self._process.after(1.0, self._next)

    def _next(self) -> None:
        if self._simulation.winding_down:
            return
        command = records_pb2.AlterBrokerCommand(broker_id=self._random.choice(self._simulation.broker_ids))
        match self._random.randrange(5):
            case 0:
                command.cordoned = self._random.random() < 0.5
            case 1:
                command.drained, command.until_restart = True, True
            case 2 | 3:
                command.drained = True
            case _:
                command.drained = False
        self._requester.propose(MetadataCommand(alter_broker=command), self._answered)

    def _answered(self, answer: Committed) -> None:
        self._simulation.counts["brokers drained, cordoned, and back"] += 1
        self._process.after(self._random.expovariate(1 / MEAN_PAUSE_S), self._next)


def misled(image: MetadataImage, partition: PartitionImage) -> str | None:
    """Return why a drained broker should not lead a partition, if it does: another replica in sync could."""
    leader = image.brokers.get(partition.leader)
    if partition.leader == NO_LEADER or leader is None or not leader.drained:
        return None
    for member in partition.isr:
        broker = image.brokers.get(member)
        if broker is not None and broker.takes_leaderships and not image.is_offline(partition, member):
            return f"broker {partition.leader} is drained and leads, although {member} is in sync: {partition}"
    return None


def newly_elected(before: MetadataImage, after: MetadataImage) -> Iterator[tuple[str, PartitionImage]]:
    """Yield the partitions that got another leader, with their names."""
    for topic_id, topic in after.topics.items():
        if before.topics.get(topic_id) is topic:
            continue
        for partition in topic.partitions:
            was = before.partition(topic_id, partition.partition)
            if partition.leader != NO_LEADER and (was is None or was.leader != partition.leader):
                yield f"{topic.name}-{partition.partition}", partition
