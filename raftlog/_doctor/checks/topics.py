"""Topics whose settings leave too little room for a failure, even while all replicas are in sync."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raftlog._core.words import counted
from raftlog._descriptions import TopicDescription
from raftlog._doctor.picture import Finding, Picture, ids, named, one_topic
from raftlog._doctor.report import Check

_MORE_REPLICAS = "give it more replicas (raftlog partition reassign)"


def _least_replicas(topic: TopicDescription) -> int:
    return min((len(set(part.replicas) - set(part.removing_replicas)) for part in topic.partitions), default=0)


def _of(found: Sequence[str]) -> str:
    """Return the topic for a command, of places that begin with its name."""
    return one_topic([place.partition(" ")[0] for place in found])


def _three(picture: Picture) -> str:
    """Return brokers for an example."""
    return ",".join(str(broker.broker_id) for broker in picture.live_brokers()[:3])


def unwritable(picture: Picture) -> Iterator[Finding]:
    """Find topics that have to have more replicas in sync than they have."""
    found = []
    for topic in picture.topics or ():
        replicas, least = _least_replicas(topic), picture.min_insync_replicas(topic.name)
        if topic.partitions and replicas < least:
            found.append(f"{topic.name} (replicas: {replicas}, min.insync.replicas: {least})")
    if found:
        yield Finding(
            "topic-unwritable",
            "error",
            f"{counted(len(found), 'topic')} can never be written to with acks=all: min.insync.replicas is above the "
            "number of replicas",
            tuple(found),
            f"{_MORE_REPLICAS}, or lower the setting: raftlog topic alter {_of(found)} --config min.insync.replicas=N",
        )


def no_slack(picture: Picture) -> Iterator[Finding]:
    """Find topics that take no writes as soon as one replica is out of sync."""
    found = []
    for topic in picture.topics or ():
        replicas, least = _least_replicas(topic), picture.min_insync_replicas(topic.name)
        if replicas > 1 and replicas == least:
            found.append(f"{topic.name} (replicas: {replicas}, min.insync.replicas: {least})")
    if found:
        yield Finding(
            "topic-no-slack",
            "warning",
            f"{counted(len(found), 'topic refuses', 'topics refuse')} acks=all as soon as one broker stops, for a "
            "restart as well: min.insync.replicas is the number of replicas",
            tuple(found),
            f"{_MORE_REPLICAS}, or lower it by one: raftlog topic alter {_of(found)} --config min.insync.replicas=N",
        )


def single_replica(picture: Picture) -> Iterator[Finding]:
    """Find topics that are gone with one disk, where other brokers could hold a copy."""
    alone = len(picture.brokers()) < 2
    found = [topic.name for topic in picture.topics or () if topic.partitions and _least_replicas(topic) == 1]
    if found:
        yield Finding(
            "topic-single-replica",
            "note" if alone else "warning",
            f"{counted(len(found), 'topic has', 'topics have')} partitions with one replica: with its disk the records "
            "are gone, and while its broker restarts nobody writes or reads",
            tuple(found),
            "a cluster of one broker has no place for copies: add brokers for what must not be lost"
            if alone
            else f"give them more: raftlog partition reassign {_of(found)}-0={_three(picture)}; and new ones by "
            "default.replication.factor=3, offsets.topic.replication.factor=3 and "
            "transaction.state.log.replication.factor=3 in the servers' configuration",
        )


def min_isr_one(picture: Picture) -> Iterator[Finding]:
    """Find topics whose leader may acknowledge alone."""
    found = [
        topic.name
        for topic in picture.topics or ()
        if _least_replicas(topic) > 1 and picture.topic_config(topic.name, "min.insync.replicas") == "1"
    ]
    if found:
        yield Finding(
            "topic-min-isr-one",
            "note",
            f"{counted(len(found), 'topic has', 'topics have')} several replicas and min.insync.replicas=1: when the "
            "others are out of sync, the leader acknowledges alone what is then on one disk",
            tuple(found),
            f"with three replicas: raftlog topic alter {_of(found)} --config min.insync.replicas=2",
        )


def unclean(picture: Picture) -> Iterator[Finding]:
    """Find topics that a replica may lead which lacks records."""
    found = [
        topic.name
        for topic in picture.topics or ()
        if picture.topic_config(topic.name, "unclean.leader.election.enable") == "true"
    ]
    if found:
        yield Finding(
            "topic-unclean-election",
            "warning",
            f"{counted(len(found), 'topic')} may lose acknowledged records: unclean.leader.election.enable lets a "
            "replica lead that lacks some",
            tuple(found),
            f"where that is not meant: raftlog topic alter {_of(found)} --unset unclean.leader.election.enable",
        )


def unflushed(picture: Picture) -> Iterator[Finding]:
    """Find topics whose records count as held before they are on the disk."""
    found = [
        topic.name
        for topic in picture.topics or ()
        if (picture.topic_config(topic.name, "flush.messages") or "1") != "1"
    ]
    if found:
        yield Finding(
            "topic-not-flushed",
            "warning",
            f"{counted(len(found), 'topic acknowledges', 'topics acknowledge')} records before they are on the disk "
            "(flush.messages above 1): when several machines lose their power at once, records are lost",
            tuple(found),
            f"where that is not meant: raftlog topic alter {_of(found)} --unset flush.messages",
        )


def one_rack(picture: Picture) -> Iterator[Finding]:
    """Find partitions whose replicas all stand in one rack, though there are several."""
    racks = {broker_id: broker.rack for broker_id, broker in picture.brokers().items()}
    if len({rack for rack in racks.values() if rack}) < 2:
        return
    found = []
    for topic, part in picture.partitions():
        replicas = [each for each in part.replicas if each not in part.removing_replicas]
        stands = {racks.get(each, "") for each in replicas}
        if len(replicas) > 1 and len(stands) == 1 and "" not in stands:
            found.append(f"{named(topic.name, part.partition)} (rack {stands.pop()}: {ids(replicas)})")
    if found:
        yield Finding(
            "partition-one-rack",
            "warning",
            f"{counted(len(found), 'partition has', 'partitions have')} all replicas in one rack; with it they are "
            "gone",
            tuple(found),
            "raftlog partition reassign --generate --topic TOPIC makes a plan that spreads them over the racks",
        )


CHECKS = (
    Check("topic-unwritable", "min.insync.replicas above the replicas", ("topics", "configs"), unwritable),
    Check("topic-no-slack", "min.insync.replicas equal to the replicas", ("topics", "configs"), no_slack),
    Check("topic-single-replica", "topics with one replica", ("topics", "cluster"), single_replica),
    Check("topic-min-isr-one", "leaders that may acknowledge alone", ("topics", "configs"), min_isr_one),
    Check("topic-unclean-election", "topics that may lose records by election", ("topics", "configs"), unclean),
    Check("topic-not-flushed", "topics that acknowledge before the disk has it", ("topics", "configs"), unflushed),
    Check("partition-one-rack", "replicas that share one rack", ("topics", "cluster"), one_rack),
)
