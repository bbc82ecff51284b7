"""Moves of partitions that do not get on, and throttles that were left behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from raftlog._core.words import counted
from raftlog._descriptions import PartitionReplicas
from raftlog._doctor.picture import Finding, Picture, ids, named
from raftlog._doctor.report import Check
from raftlog.types import TopicPartition

RATES: Final = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
THROTTLED: Final = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")


def _moving(picture: Picture) -> Iterator[tuple[TopicPartition, list[int], list[int]]]:
    """Yield what is being moved, to which brokers, and from which."""
    for topic, part in picture.partitions():
        if part.adding_replicas or part.removing_replicas:
            yield TopicPartition(topic.name, part.partition), part.adding_replicas, part.removing_replicas


def forgotten_throttles(picture: Picture) -> Iterator[Finding]:
    """Find throttles that are on while nothing is moved: they hold replicas back that fell behind."""
    if any(_moving(picture)):
        return
    rates = [
        f"broker {node_id}: {key}={found.value}"
        for node_id, node in sorted(picture.broker_nodes().items())
        for key in RATES
        if (found := node.configs.get(key)) is not None and found.source == "dynamic_broker"
    ]
    replicas = [
        f"topic {topic}: {key}={found.value}"
        for topic, configs in sorted((picture.configs or {}).items())
        for key in THROTTLED
        if (found := configs.get(key)) is not None and found.value and found.source == "dynamic_topic"
    ]
    if rates or replicas:
        yield Finding(
            "throttle-forgotten",
            "warning" if rates and replicas else "note",
            "throttles of replication are on while no partition is moved"
            + ("; replicas that fall behind catch up slowly or never" if rates and replicas else ""),
            (*rates, *replicas),
            "an interrupted rebalance or decommission takes them off when the same command is given again; else "
            "raftlog config unset broker ID leader.replication.throttled.rate follower.replication.throttled.rate, and "
            "raftlog topic alter TOPIC --unset leader.replication.throttled.replicas --unset "
            "follower.replication.throttled.replicas",
        )


def stuck(picture: Picture) -> Iterator[Finding]:
    """Find moves whose new replicas are down, or have got nothing between two looks."""
    brokers = picture.brokers()
    found = []
    for part, adding, _ in _moving(picture):
        down = [each for each in adding if each not in brokers or brokers[each].fenced]
        if down:
            found.append(f"{named(*part)} (new replica down: broker {ids(down)})")
            continue
        still = _without_progress(part, adding, picture.replicas or {}, picture.replicas_before or {})
        if still:
            found.append(f"{named(*part)} (no progress within {picture.apart_s:.0f} s on broker {ids(still)})")
    if found:
        yield Finding(
            "reassignment-stuck",
            "warning",
            f"{counted(len(found), 'move')} of partitions do not get on"
            if len(found) > 1
            else "1 move of a partition does not get on",
            tuple(found),
            "start the brokers that are to get replicas, or raise the throttle: raftlog partition reassign with the "
            "same moves and --throttle SIZE; or go back: raftlog partition reassign --cancel with the same moves",
        )


def _without_progress(
    part: TopicPartition,
    adding: list[int],
    now: Mapping[TopicPartition, PartitionReplicas],
    before: Mapping[TopicPartition, PartitionReplicas],
) -> list[int]:
    """Return the new replicas that are behind, and hold as much as they did."""
    if part not in now or part not in before:
        return []
    held = {each.broker_id: each.log_end_offset for each in before[part].replicas}
    return [
        each.broker_id
        for each in now[part].replicas
        if each.broker_id in adding
        and not each.in_sync
        and each.lag != 0
        and each.log_end_offset <= held.get(each.broker_id, -2)
    ]


def under_way(picture: Picture) -> Iterator[Finding]:
    """Tell of moves that are under way."""
    found = [f"{named(*part)} (to {ids(adding)}; from {ids(removing)})" for part, adding, removing in _moving(picture)]
    if found:
        yield Finding(
            "reassignment-under-way",
            "note",
            f"{counted(len(found), 'partition is', 'partitions are')} being moved",
            tuple(found),
            "raftlog partition reassign --list shows how far they are",
        )


CHECKS = (
    Check("throttle-forgotten", "throttles without a move", ("topics", "nodes", "configs"), forgotten_throttles),
    Check("reassignment-stuck", "moves that do not get on", ("topics", "cluster"), stuck),
    Check("reassignment-under-way", "moves that are under way", ("topics",), under_way),
)
