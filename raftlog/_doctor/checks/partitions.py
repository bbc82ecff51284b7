"""Partitions that do not work, or have no replica to spare at the moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raftlog._core.lost_logs import why_lost
from raftlog._core.words import counted
from raftlog._descriptions import PartitionDescription, TopicDescription
from raftlog._doctor.picture import Finding, Picture, ids, named
from raftlog._doctor.report import Check


def _settled(part: PartitionDescription) -> list[int]:
    """Return the replicas that are not new."""
    return [replica for replica in part.replicas if replica not in part.adding_replicas]


def _missing(part: PartitionDescription) -> list[int]:
    return [replica for replica in _settled(part) if replica not in part.isr]


def offline(picture: Picture) -> Iterator[Finding]:
    """Find partitions that nobody can write to or read."""
    found = []
    awaited: set[int] = set()
    for topic, part in picture.partitions():
        down = part.leader in part.offline_replicas
        if (part.leader >= 0 and not down) or _why_lost(topic, part) is not None:
            continue
        candidates = sorted({*part.isr, *part.eligible_leader_replicas} & set(part.offline_replicas)) or part.isr
        awaited |= set(candidates)
        why = f"leader {part.leader} is down" if down else "nobody leads it"
        found.append(f"{named(topic.name, part.partition)} ({why}; has every record: {ids(candidates)})")
    if found:
        yield Finding(
            "partition-offline",
            "error",
            f"{counted(len(found), 'partition')} can neither be written nor read",
            tuple(found),
            f"start one of the brokers that have every record again: {ids(awaited)}. Only when they are gone for good: "
            "raftlog partition elect TOPIC --unclean has another replica lead, and loses what that one lacks",
        )


def log_lost(picture: Picture) -> Iterator[Finding]:
    """Find partitions that nobody leads because the log is gone with the disk of the only one in sync."""
    for topic, part in picture.partitions():
        why = _why_lost(topic, part)
        if why is not None:
            where = named(topic.name, part.partition)
            what, _, advice = why.partition("; ")
            yield Finding("partition-log-lost", "error", f"nobody leads {where}: {what}", (), advice)


def _why_lost(topic: TopicDescription, part: PartitionDescription) -> str | None:
    return why_lost(topic.name, part.leader, part.replicas, part.isr, part.lost_replicas)


def leader_silent(picture: Picture) -> Iterator[Finding]:
    """Find brokers that lead partitions and do not answer."""
    for broker_id, why in sorted(picture.silent_leaders.items()):
        led = [named(topic.name, part.partition) for topic, part in picture.partitions() if part.leader == broker_id]
        yield Finding(
            "leader-silent",
            "error",
            f"broker {broker_id} leads {counted(len(led), 'partition')} and does not answer from here: {why}",
            tuple(led),
            f"see whether clients reach broker {broker_id} at the address that raftlog broker list shows: its process, "
            "its load, firewalls, advertised.listeners",
        )


def under_min_isr(picture: Picture) -> Iterator[Finding]:
    """Find partitions that refuse acks=all, though they have the replicas for it."""
    found = []
    missing: set[int] = set()
    for topic, part in picture.partitions():
        least = picture.min_insync_replicas(topic.name)
        if part.leader >= 0 and len(part.isr) < least <= len(_settled(part)):
            missing |= set(_missing(part))
            found.append(
                f"{named(topic.name, part.partition)} (in sync: {ids(part.isr)} of {ids(_settled(part))}; "
                f"needs {least})"
            )
    if found:
        yield Finding(
            "partition-under-min-isr",
            "error",
            f"{counted(len(found), 'partition refuses', 'partitions refuse')} writes with acks=all: fewer replicas are "
            "in sync than min.insync.replicas",
            tuple(found),
            _bring_back(picture, missing),
        )


def under_replicated(picture: Picture) -> Iterator[Finding]:
    """Find partitions with a replica that is out of sync."""
    found = []
    missing: set[int] = set()
    for topic, part in picture.partitions():
        out = _missing(part)
        if out:
            missing |= set(out)
            found.append(f"{named(topic.name, part.partition)} (out of sync: {ids(out)})")
    if found:
        yield Finding(
            "partition-under-replicated",
            "warning",
            f"{counted(len(found), 'partition has', 'partitions have')} replicas out of sync",
            tuple(found),
            _bring_back(picture, missing),
        )


def _bring_back(picture: Picture, missing: set[int]) -> str:
    brokers = picture.brokers()
    down = {each for each in missing if each not in brokers or brokers[each].fenced}
    slow = missing - down
    said = []
    if down:
        said.append(f"start {_brokers(sorted(down))} again, which {'is' if len(down) == 1 else 'are'} down")
    if slow:
        said.append(
            f"see why {_brokers(sorted(slow))} {'lags' if len(slow) == 1 else 'lag'}: raftlog topic describe shows by "
            "how much, and the log of that broker why; disks that are slow or full, a throttle, a network between "
            "brokers that is cut are what it mostly is"
        )
    return "; ".join(said)


def _brokers(found: Sequence[int]) -> str:
    return f"broker{'' if len(found) == 1 else 's'} {ids(found)}"


def replica_offline(picture: Picture) -> Iterator[Finding]:
    """Find replicas that do not work though their broker does."""
    live = {broker.broker_id for broker in picture.live_brokers()}
    found: dict[int, list[str]] = {}
    for topic, part in picture.partitions():
        for replica in part.offline_replicas:
            if replica in live:
                found.setdefault(replica, []).append(named(topic.name, part.partition))
    for broker_id, parts in sorted(found.items()):
        yield Finding(
            "replica-offline",
            "error",
            f"broker {broker_id} runs, and has no working log for {counted(len(parts), 'partition')}",
            tuple(parts),
            f"the log of broker {broker_id} says which file or directory is damaged or gone; mend or replace the disk "
            "and start the broker again: what is missing is fetched from the leaders",
        )


def replica_unknown(picture: Picture) -> Iterator[Finding]:
    """Find partitions that count on brokers which are not registered."""
    brokers = picture.brokers()
    found: dict[int, list[str]] = {}
    for topic, part in picture.partitions():
        for replica in part.replicas:
            if replica not in brokers:
                found.setdefault(replica, []).append(named(topic.name, part.partition))
    for broker_id, parts in sorted(found.items()):
        yield Finding(
            "replica-of-unknown-broker",
            "error",
            f"{counted(len(parts), 'partition has', 'partitions have')} a replica on broker {broker_id}, which is not "
            "registered",
            tuple(parts),
            f"start broker {broker_id}, or move the replicas elsewhere: raftlog partition reassign --generate --topic "
            "TOPIC --brokers ID,... makes a plan",
        )


CHECKS = (
    Check("partition-offline", "partitions without a leader that works", ("topics",), offline),
    Check("partition-log-lost", "partitions whose log is gone with a disk", ("topics",), log_lost),
    Check("leader-silent", "leaders that do not answer", ("topics", "replicas"), leader_silent),
    Check("partition-under-min-isr", "partitions that refuse acks=all", ("topics", "configs"), under_min_isr),
    Check("partition-under-replicated", "replicas out of sync", ("topics", "cluster"), under_replicated),
    Check("replica-offline", "replicas without a working log", ("topics", "cluster"), replica_offline),
    Check(
        "replica-of-unknown-broker", "replicas on brokers that there are not", ("topics", "cluster"), replica_unknown
    ),
)
