"""Holding moves back (KIP-73): rates of brokers, and the replicas of topics that they count for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import raftlog
from raftlog.cli.plans import Move, throttled_replicas
from raftlog.types import TopicPartition

RATES: Final = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
THROTTLED: Final = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")
STAYS: Final = (
    "the throttle stays on until raftlog partition reassign --verify with the same moves finds them done and takes it "
    "off"
)


def put_on(admin: raftlog.Admin, before: Sequence[Move], goals: Mapping[TopicPartition, Move], rate: int) -> None:
    """Hold moves back before they begin."""
    involved = {broker for move in (*before, *goals.values()) for broker in move.replicas}
    for broker in sorted(involved & {each.broker_id for each in admin.describe_cluster().brokers}):
        admin.alter_configs(broker=broker, set=dict.fromkeys(RATES, rate))
    for topic, configs in throttled_replicas(before, goals).items():
        admin.alter_configs(topic=topic, set=configs)


def take_off(admin: raftlog.Admin, topics: Collection[str]) -> None:
    """Let these topics, which are there, go at full speed, and everything once nothing is being moved any more."""
    for topic in sorted(topics):
        admin.alter_configs(topic=topic, unset=THROTTLED)
    if admin.list_reassignments():
        return  # others are held back by the same rates
    for broker in admin.describe_cluster().brokers:
        admin.alter_configs(broker=broker.broker_id, unset=RATES)
