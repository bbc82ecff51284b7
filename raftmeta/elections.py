"""Who is in sync and who leads, given which brokers are up: one function, `settle`, that all elections come down to.

    leader       state of its broker           what settle does
    L            up                            L stays; it is never replaced directly, since it may still serve
    L            up, others should lead        leader := none, L is revoked and has to let go first
    L            fenced or gone                leader := none; its lease is over, so another may be elected
    none         the revoked one is still up   nothing, until the controller knows that it has let go (`handed_over`)
    none         otherwise                     the first replica that is up and in the ISR; else one that is up and
                                               eligible (KIP-966); else, where that is allowed, any that is up (unclean)

A replica whose broker has said that it has no working log for it (`PartitionImage.offline_replicas`) is never elected,
leaves the ISR where that leaves somebody, and is not eligible. A leader says so only when it has stopped serving, so
it is replaced at once (`take_offline`).

A replica whose broker has come back without the directories that its log was in (`PartitionImage.lost_replicas`) is
treated likewise, but that an unclean election takes it where nobody else is up: then nothing is left to be had.

A drained broker stays in sync, and "others should lead" what it leads as soon as somebody else in the ISR takes
leaderships; it is elected where nobody else of the same standing is there. Partitions with nobody else are led on.

Every change raises the partition epoch by one, and one of the leader the leader epoch. Settling twice changes nothing
more. Only images and arguments count here: every controller comes to the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from raftlog.v1.records_pb2 import ElectLeadersCommand, PartitionRef
from raftmeta.image import NO_LEADER, BrokerImage, MetadataImage, PartitionImage, TopicImage
from raftmeta.replica_marks import has_log, lacks_mark, with_marks, without_marks

SETTLE = ElectLeadersCommand.SETTLE
PREFERRED = ElectLeadersCommand.PREFERRED
UNCLEAN = ElectLeadersCommand.UNCLEAN
ElectionType: TypeAlias = ElectLeadersCommand.Type.ValueType


def settle(
    image: MetadataImage,
    topic: TopicImage,
    partition: PartitionImage,
    *,
    offset: int,
    election: ElectionType = SETTLE,
    handed_over: bool = False,
) -> PartitionImage:
    """Return the partition as it should be; the same object when it is so already.

    `offset` is that of the command that asks, from which a revoked leader counts. `handed_over`: the controller knows
    that a revoked leader has let go. PREFERRED also takes the leadership from a live leader for the preferred replica,
    UNCLEAN allows what unclean.leader.election.enable does.
    """
    marked = with_marks(image, partition)
    shrunk = _complete_reassignment(image, marked, offset)
    leader, revoked, revoked_at = shrunk.leader, shrunk.revoked_leader, shrunk.revoked_at_offset
    if leader != NO_LEADER and not _up(image, leader):
        leader = NO_LEADER
    elif leader != NO_LEADER and _should_let_go(image, shrunk, election):
        leader, revoked, revoked_at = NO_LEADER, leader, offset
    elif partition.revoked_leader is not None and (handed_over or not still_holds(image, partition)):
        revoked, revoked_at = None, 0
    eligible = eligible_replicas(image, topic, shrunk, shrunk.isr)
    shrunk = replace(shrunk, eligible_leader_replicas=eligible)
    isr = _in_sync(image, shrunk, leader)
    if leader == NO_LEADER and revoked is None:
        allow_unclean = election == UNCLEAN or image.unclean_election_enabled(topic)
        leader, isr = _elect(image, shrunk, isr, allow_unclean=allow_unclean)
    # Where the leader may lack committed records, nobody is known to have them.
    eligible = () if is_unclean(image, marked, leader) else eligible_replicas(image, topic, shrunk, isr)
    if image.is_lost(shrunk, leader):
        shrunk = without_marks(shrunk, (leader,))  # what it has is the partition's log from now on
    settled = replace(
        shrunk,
        isr=isr,
        leader=leader,
        eligible_leader_replicas=eligible,
        revoked_leader=revoked,
        revoked_at_offset=revoked_at,
    )
    return with_new_epochs(partition, settled)


def revoke(image: MetadataImage, topic: TopicImage, partition: PartitionImage, *, offset: int) -> PartitionImage:
    """Return the partition without its live leader, which has to let go; the same object when nobody can follow."""
    leader = partition.leader
    if leader == NO_LEADER or not _up(image, leader) or not _successors(image, partition):
        return partition
    isr = _in_sync(image, partition, NO_LEADER)
    revoked = replace(
        partition,
        isr=isr,
        leader=NO_LEADER,
        eligible_leader_replicas=eligible_replicas(image, topic, partition, isr),
        revoked_leader=leader,
        revoked_at_offset=offset,
    )
    return with_new_epochs(partition, revoked)


def take_offline(
    image: MetadataImage, topic: TopicImage, partition: PartitionImage, broker: BrokerImage, *, offset: int
) -> PartitionImage:
    """Return the partition once `broker` has said that it has no working log for it; the same object when it knows.

    A leader that says so has let go already: who follows is elected in the same step. The only member of the ISR stays
    in it, and nobody else can be elected, unless uncleanly, before another process of that broker has the log again.
    """
    if broker.broker_id not in partition.replicas:
        return partition
    others = (each for each in partition.offline_replicas if each[0] != broker.broker_id)
    revoked = partition.revoked_leader == broker.broker_id
    altered = replace(
        partition,
        offline_replicas=tuple(sorted((*others, (broker.broker_id, broker.broker_epoch)))),
        leader=NO_LEADER if partition.leader == broker.broker_id else partition.leader,
        revoked_leader=None if revoked else partition.revoked_leader,
        revoked_at_offset=0 if revoked else partition.revoked_at_offset,
    )
    return with_new_epochs(partition, settle(image, topic, altered, offset=offset))


def with_new_epochs(before: PartitionImage, after: PartitionImage) -> PartitionImage:
    """Return `after` with the epochs that the change asks for; `before` itself when nothing changed."""
    if after == before:
        return before
    return replace(
        after,
        leader_epoch=before.leader_epoch + (after.leader != before.leader),
        partition_epoch=before.partition_epoch + 1,
    )


def is_unclean(image: MetadataImage, before: PartitionImage, leader: int) -> bool:
    """Whether making `leader` the leader may lose committed records: not in sync nor eligible, or its log is lost."""
    if leader == NO_LEADER:
        return False
    return leader not in (*before.isr, *before.eligible_leader_replicas) or image.is_lost(before, leader)


def still_holds(image: MetadataImage, partition: PartitionImage) -> bool:
    """Whether the revoked leader may still act as leader, as far as the image tells.

    Not when it is fenced, since its lease is over, nor when it has registered anew since: its process is another one.
    """
    revoked = partition.revoked_leader
    broker = None if revoked is None else image.brokers.get(revoked)
    return broker is not None and not broker.fenced and broker.broker_epoch <= partition.revoked_at_offset


def eligible_replicas(
    image: MetadataImage, topic: TopicImage, before: PartitionImage, isr: Sequence[int]
) -> tuple[int, ...]:
    """Return who is eligible besides the new `isr`: those that were, and those that leave an ISR that is now too small.

    An ISR smaller than min.insync.replicas commits nothing, so who was in sync when it shrank stays as good as its
    members (KIP-966). Brokers back from an unclean stop may lack what they acknowledged, and are not eligible
    (KAFKA-15586), nor are those without a working log.
    """
    if len(isr) >= min(image.min_insync_replicas(topic), len(before.replicas)):
        return ()
    were = {*before.eligible_leader_replicas, *before.isr}.difference(isr)
    return tuple(replica for replica in before.replicas if replica in were and not _lacking(image, before, replica))


def with_replicas(
    image: MetadataImage, partition: PartitionImage, replicas: tuple[int, ...], offset: int
) -> PartitionImage | None:
    """Return the partition with only these of its replicas and no move under way; None if nobody in sync remains.

    A live leader that is not among them has to let go first, like any other, so somebody who is up must remain then.
    The epochs are still the old ones.
    """
    isr = tuple(member for member in partition.isr if member in replicas)
    leader, revoked, revoked_at = partition.leader, partition.revoked_leader, partition.revoked_at_offset
    if leader != NO_LEADER and leader not in replicas:
        if _up(image, leader):
            if not any(_electable(image, partition, member) for member in isr):
                return None
            revoked, revoked_at = leader, offset
        leader = NO_LEADER
    if not isr:
        return None
    return replace(
        partition,
        replicas=replicas,
        isr=isr,
        leader=leader,
        adding_replicas=(),
        removing_replicas=(),
        eligible_leader_replicas=tuple(r for r in partition.eligible_leader_replicas if r in replicas),
        offline_replicas=tuple(each for each in partition.offline_replicas if each[0] in replicas),
        lost_replicas=tuple(each for each in partition.lost_replicas if each[0] in replicas),
        revoked_leader=revoked,
        revoked_at_offset=revoked_at,
    )


def _complete_reassignment(image: MetadataImage, partition: PartitionImage, offset: int) -> PartitionImage:
    """End a move under way once all that were to be added are up and in sync (KIP-455)."""
    if not partition.adding_replicas and not partition.removing_replicas:
        return partition
    if not all(replica in partition.isr and _up(image, replica) for replica in partition.adding_replicas):
        return partition
    wanted = tuple(replica for replica in partition.replicas if replica not in partition.removing_replicas)
    return with_replicas(image, partition, wanted, offset) or partition


def unsettled(image: MetadataImage, topic_ids: Iterable[bytes] | None = None) -> Iterator[PartitionRef]:
    """Yield the partitions that `settle` would change, of these topics or of all, in the same order everywhere.

    Lazy, and cheap for partitions all of whose brokers are up: about 20 ms for 100 000 of those.
    """
    active = {broker_id for broker_id, broker in image.brokers.items() if broker.active}
    leading = {broker_id for broker_id, broker in image.brokers.items() if broker.takes_leaderships}
    replaced = {broker_id for broker_id, broker in image.brokers.items() if broker.former_directory_ids}
    for topic_id in sorted(image.topics) if topic_ids is None else topic_ids:
        topic = image.topics.get(topic_id)
        for partition in () if topic is None else topic.partitions:
            if (
                partition.leader in leading
                and active.issuperset(partition.isr)
                and not partition.eligible_leader_replicas
                and not partition.adding_replicas
                and not partition.removing_replicas
                and not partition.offline_replicas
                and not partition.lost_replicas
                and (not replaced or replaced.isdisjoint(partition.replicas))
            ):
                continue
            if topic is not None and settle(image, topic, partition, offset=image.offset + 1) is not partition:
                yield PartitionRef(topic_id=topic_id, partition=partition.partition)


def has_unsettled(image: MetadataImage, broker_id: int) -> bool:
    """Whether a partition that counts a broker as in sync, or eligible, or as having a log, waits to be settled."""
    broker = image.brokers[broker_id]
    return any(
        lacks_mark(partition, broker)
        or (
            (broker_id in partition.isr or broker_id in partition.eligible_leader_replicas)
            and settle(image, topic, partition, offset=image.offset + 1) is not partition
        )
        for topic in image.topics.values()
        for partition in topic.partitions
    )


def not_preferred(image: MetadataImage) -> Iterator[PartitionRef]:
    """Yield the partitions whose live leader should let go for the preferred replica, which is up and in sync."""
    for topic_id in sorted(image.topics):
        for partition in image.topics[topic_id].partitions:
            if partition.leader not in (NO_LEADER, partition.replicas[0]) and _prefers_another(image, partition):
                yield PartitionRef(topic_id=topic_id, partition=partition.partition)


# What settle asks


def _up(image: MetadataImage, broker_id: int) -> bool:
    broker = image.brokers.get(broker_id)
    return broker is not None and not broker.fenced


def _active(image: MetadataImage, broker_id: int) -> bool:
    broker = image.brokers.get(broker_id)
    return broker is not None and broker.active


def _takes_leaderships(image: MetadataImage, broker_id: int) -> bool:
    broker = image.brokers.get(broker_id)
    return broker is not None and broker.takes_leaderships


def _unclean(image: MetadataImage, broker_id: int) -> bool:
    broker = image.brokers.get(broker_id)
    return broker is None or broker.unclean


def _electable(image: MetadataImage, partition: PartitionImage, broker_id: int) -> bool:
    return _active(image, broker_id) and has_log(image, partition, broker_id)


def _lacking(image: MetadataImage, partition: PartitionImage, broker_id: int) -> bool:
    """Whether a replica may lack what it acknowledged, or has no working log at all."""
    return _unclean(image, broker_id) or not has_log(image, partition, broker_id)


def _successors(image: MetadataImage, partition: PartitionImage) -> list[int]:
    return [member for member in partition.isr if member != partition.leader and _electable(image, partition, member)]


def _prefers_another(image: MetadataImage, partition: PartitionImage) -> bool:
    preferred = partition.replicas[0]
    return (
        partition.leader != preferred
        and preferred in partition.isr
        and _electable(image, partition, preferred)
        and _takes_leaderships(image, preferred)
    )


def _should_let_go(image: MetadataImage, partition: PartitionImage, election: ElectionType) -> bool:
    if election == PREFERRED and _prefers_another(image, partition):
        return True
    if _takes_leaderships(image, partition.leader):
        return False
    successors = _successors(image, partition)
    if _active(image, partition.leader):  # and drained: it leads on where others would as well rather not
        return any(_takes_leaderships(image, successor) for successor in successors)
    return bool(successors)


def _in_sync(image: MetadataImage, partition: PartitionImage, leader: int) -> tuple[int, ...]:
    """Return who stays in the ISR: never nobody.

    Fenced brokers leave, and those that are about to stop, so that no write waits for them. When that leaves nobody,
    the ISR stays: nothing is committed without a leader, so its members go on holding all that was. Only those that
    lost their tail in an unclean stop, or have no working log, or lost it with their disk, then leave, for others that
    did not.
    """
    isr = partition.isr
    staying = tuple(member for member in isr if member == leader or _electable(image, partition, member))
    staying = staying or tuple(m for m in isr if _up(image, m) and has_log(image, partition, m))
    staying = staying or tuple(member for member in isr if not _lacking(image, partition, member))
    if not staying:
        eligible = [r for r in partition.eligible_leader_replicas if not _lacking(image, partition, r)]
        staying = tuple(eligible[:1])
    staying = staying or tuple(member for member in isr if has_log(image, partition, member))
    return staying or tuple(member for member in isr if not image.is_lost(partition, member)) or isr


def _elect(
    image: MetadataImage, partition: PartitionImage, isr: tuple[int, ...], *, allow_unclean: bool
) -> tuple[int, tuple[int, ...]]:
    """Return the leader to be and the ISR with it. Replicas stand in order of preference, drained ones come last.

    If the election is unclean, one that is only being added comes after all that have been replicas, and one whose log
    is lost after those.
    """
    candidates = [replica for replica in partition.replicas if _electable(image, partition, replica)]
    candidates.sort(key=lambda replica: not _takes_leaderships(image, replica))  # stable
    for candidate in candidates:
        if candidate in isr:
            return candidate, isr
    for candidate in candidates:
        if candidate in partition.eligible_leader_replicas:
            return candidate, (candidate,)
    if allow_unclean:
        candidates.sort(key=lambda replica: replica in partition.adding_replicas)
        candidates += [each for each in partition.replicas if _active(image, each) and image.is_lost(partition, each)]
        for candidate in candidates:
            if not image.is_offline(partition, candidate):
                return candidate, (candidate,)
    return NO_LEADER, isr
