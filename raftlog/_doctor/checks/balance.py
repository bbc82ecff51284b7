"""Brokers that have much more to do than others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from raftlog._core.words import counted
from raftlog._doctor.picture import Finding, Picture, named
from raftlog._doctor.report import Check

SHARE: Final = 0.5
"""A broker with so much more, or less, than the mean is worth a word."""
LEAST: Final = 4
"""But not when it is about fewer than that: among few partitions such shares come by chance."""
NOT_PREFERRED: Final = 0.1
"""Share of partitions led by others than their first replica: what leader.imbalance.per.broker.percentage has as
default, above which the controller moves leaderships back by itself."""


def _uneven(loads: Mapping[int, int]) -> list[str]:
    """Return the brokers whose load is far from the mean."""
    if len(loads) < 2:
        return []
    mean = sum(loads.values()) / len(loads)
    return [
        f"broker {broker_id} ({load}, the mean is {mean:.1f})"
        for broker_id, load in sorted(loads.items())
        if abs(load - mean) >= max(LEAST, SHARE * mean)
    ]


def _at_work(picture: Picture) -> list[int]:
    """Return the brokers that are meant to have a share."""
    return [broker.broker_id for broker in picture.live_brokers() if not (broker.cordoned or broker.drained)]


def replica_skew(picture: Picture) -> Iterator[Finding]:
    """Find brokers that hold many more replicas than others, or fewer."""
    loads = dict.fromkeys(_at_work(picture), 0)
    for _, part in picture.partitions():
        for replica in part.replicas:
            if replica in loads:
                loads[replica] += 1
    uneven = _uneven(loads)
    if uneven:
        yield Finding(
            "replica-skew",
            "warning",
            "replicas are spread unevenly over the brokers",
            tuple(uneven),
            "raftlog cluster rebalance shows a plan that moves the fewest; with --execute --throttle SIZE it is done",
        )


def leader_skew(picture: Picture) -> Iterator[Finding]:
    """Find brokers that lead many more partitions than others, or fewer."""
    loads = dict.fromkeys(_at_work(picture), 0)
    for _, part in picture.partitions():
        if part.leader in loads:
            loads[part.leader] += 1
    uneven = _uneven(loads)
    if uneven:
        yield Finding(
            "leader-skew",
            "warning",
            "leaderships are spread unevenly over the brokers: all writes and reads go to leaders",
            tuple(uneven),
            "raftlog partition elect TOPIC has the first replicas lead; where these are uneven, raftlog cluster "
            "rebalance shows a plan",
        )


def not_preferred(picture: Picture) -> Iterator[Finding]:
    """Find partitions that are led by another than their first replica, which could."""
    ready = set(_at_work(picture))
    found = []
    total = 0
    for topic, part in picture.partitions():
        total += 1
        first = part.replicas[0] if part.replicas else -1
        moving = part.adding_replicas or part.removing_replicas
        if part.leader not in (-1, first) and first in part.isr and first in ready and not moving:
            found.append(f"{named(topic.name, part.partition)} (led by {part.leader}, not {first})")
    if found:
        yield Finding(
            "leader-not-preferred",
            "warning" if len(found) > NOT_PREFERRED * total and len(found) >= LEAST else "note",
            f"{counted(len(found), 'partition is', 'partitions are')} not led by the first of the replicas, which is "
            "in sync",
            tuple(found),
            "the controller mends that every leader.imbalance.check.interval.ms, where there are enough and "
            "auto.leader.rebalance.enable is on; at once: raftlog partition elect TOPIC",
        )


CHECKS = (
    Check("replica-skew", "replicas spread unevenly", ("topics", "cluster"), replica_skew),
    Check("leader-skew", "leaderships spread unevenly", ("topics", "cluster"), leader_skew),
    Check("leader-not-preferred", "leaders that are not the first replica", ("topics", "cluster"), not_preferred),
)
