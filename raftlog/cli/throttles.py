"""Holding moves back (KIP-73): rates of brokers, and the replicas of topics that they count for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import typer

import raftlog
from raftlog._core.words import some
from raftlog.cli.output import print_note
from raftlog.cli.plans import Move, throttled_replicas
from raftlog.config import parse_size_bytes
from raftlog.types import TopicPartition

RATES: Final = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
THROTTLED: Final = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")
MAX_NAMED: Final = 5
STAYS: Final = (
    "the throttle stays on until raftlog partition reassign --verify with the same moves finds them done and takes it "
    "off"
)


def rate_of(text: str) -> int:
    """Return the bytes a second that `--throttle` says.

    Raises:
        typer.BadParameter: it says none.
    """
    try:
        rate = parse_size_bytes(text)
    except ValueError:
        rate = 0
    if rate < 1:
        raise typer.BadParameter(f"--throttle {text}: write bytes a second, for example 20MiB")
    return rate


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


def take_off_forgotten(admin: raftlog.Admin, broker_id: int | None = None) -> None:
    """Do that to every topic of which single replicas are held back, as `put_on` does it; or those of one broker.

    An earlier run that was interrupted may have left some behind. Those of a move under way stay.
    """
    moving = {part.topic for part in admin.list_reassignments()}
    names = {topic.name for topic in admin.describe_topics(internal=True)}
    take_off(admin, {name for name in names - moving if _is_named(admin, name, broker_id)})


def settle(admin: raftlog.Admin, rate: int | None) -> None:
    """When nothing is left to move: take off what is still on if this run has a throttle, else say that it is."""
    if rate is None:
        tell_if_on(admin)
    else:
        take_off_forgotten(admin)


def tell_if_on(admin: raftlog.Admin) -> None:
    """Say which topics are still held back, as `put_on` does it, and what takes that off."""
    held = sorted(topic.name for topic in admin.describe_topics() if _is_named(admin, topic.name, None))
    if held:
        print_note(
            f"note: a throttle from before is still on ({some(held, MAX_NAMED)}); raftlog cluster rebalance --execute "
            "--throttle SIZE takes it off in the end"
        )


def _is_named(admin: raftlog.Admin, topic: str, broker_id: int | None) -> bool:
    configs = admin.describe_configs(topic=topic)
    entries = [entry for key in THROTTLED for entry in configs[key].value.split(",") if ":" in entry]
    return any(broker_id is None or entry.endswith(f":{broker_id}") for entry in entries)
