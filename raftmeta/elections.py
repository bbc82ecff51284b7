"""Elections of partition leaders, and the ISR: `settle` returns a partition as it should be, given the live brokers.

    leader       state of its broker           what settle does
    L            up                            L stays; it is never replaced directly, since it may still serve
    L            up, another should lead       leader := none, L is revoked and has to resign first
    L            fenced or gone                leader := none; its lease has expired, so another may be elected
    none         the revoked one is still up   nothing, until the controller knows that it has resigned (`handed_over`)
    none         otherwise                     the first replica that is up and in the ISR; else one that is up and
                                               eligible (KIP-966); else, if allowed, any that is up (unclean)

A replica that its broker has reported as having no working log (`PartitionImage.offline_replicas`) is never elected, is
not eligible, and leaves the ISR unless the ISR would be empty. A leader reports this only after it has stopped serving,
so it is replaced at once (`take_offline`).

A replica whose broker has returned without the directories of its log (`PartitionImage.lost_replicas`) is treated
alike, except that an unclean election takes it if no other replica is up: then no records can be saved.

A drained broker stays in sync. Another replica should lead its partitions as soon as one in the ISR is not drained; a
drained one is elected only if no other of the same rank is available, and keeps the partitions that no other can lead.
The same is true of a broker whose storage is full.

Every change raises the partition epoch by one, and a change of leader the leader epoch. Settling twice changes nothing
more. The result depends only on the image and the arguments, so that all controllers come to the same one.

Marks on single replicas of a partition, and how long they last:

    offline   its broker runs and reports no working log for it      until that broker registers again
    lost      its broker has returned without its log directories    until all of those are back

Both end when the replica joins the ISR or stops being a replica. A lost replica that is elected uncleanly has a new
log, which is the partition's from then on.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import TypeAlias

from raftlog._core.cluster import why_lost
from raftlog.v1.records_pb2 import ElectLeadersCommand, PartitionRef
from raftmeta.image import NO_LEADER, BrokerImage, MetadataImage, PartitionImage, TopicImage


def with_marks(image: MetadataImage, partition: PartitionImage) -> PartitionImage:
    """Return the partition with the marks that the brokers ask for; the same object when it has them already."""
    offline, lost = partition.offline_replicas, partition.lost_replicas
    if offline:
        offline = tuple(each for each in offline if image.is_offline(partition, each[0]))
    replaced = {
        broker.broker_id: broker.former_directory_ids
        for broker in map(image.brokers.get, partition.replicas)
        if broker is not None and broker.former_directory_ids
    }
    if lost or replaced:
        # A mark that is void stays until its broker is unfenced: the log is not in `former_directory_ids`.
        held = {each: ids for each, ids in lost if each in replaced or image.is_lost(partition, each)}
        lost = tuple(sorted({**replaced, **held}.items()))
    if offline == partition.offline_replicas and lost == partition.lost_replicas:
        return partition
    return replace(partition, offline_replicas=offline, lost_replicas=lost)


def without_marks(partition: PartitionImage, broker_ids: Container[int]) -> PartitionImage:
    """Return the partition without any mark of replicas on these brokers; the same object when there is none."""
    offline = tuple(each for each in partition.offline_replicas if each[0] not in broker_ids)
    lost = tuple(each for each in partition.lost_replicas if each[0] not in broker_ids)
    if offline == partition.offline_replicas and lost == partition.lost_replicas:
        return partition
    return replace(partition, offline_replicas=offline, lost_replicas=lost)


def lacks_mark(partition: PartitionImage, broker: BrokerImage) -> bool:
    """Whether a replica on a broker that came back without its log directories is not marked as lost yet."""
    return (
        bool(broker.former_directory_ids)
        and broker.broker_id in partition.replicas
        and all(marked != broker.broker_id for marked, _ in partition.lost_replicas)
    )


def has_log(image: MetadataImage, partition: PartitionImage, broker_id: int) -> bool:
    """Whether the replica is marked neither as offline nor as lost."""
    return not image.is_offline(partition, broker_id) and not image.is_lost(partition, broker_id)


def why_leaderless(image: MetadataImage, topic: str, partition: PartitionImage) -> str | None:
    """Return cause and remedy if the partition has no leader because its log was lost with a disk; else None."""
    lost = [each for each, _ in partition.lost_replicas if image.is_lost(partition, each)]
    return why_lost(topic, partition.leader, partition.replicas, partition.isr, lost)


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
    """Return the partition as it should be; the same object if it needs no change.

    `offset`: the metadata offset of the command, at which a leader is revoked. `handed_over`: the controller knows that
    a revoked leader has resigned. PREFERRED also revokes a live leader in favor of the preferred replica, UNCLEAN
    allows an unclean election as unclean.leader.election.enable does.
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
    isr = _in_sync(image, topic, shrunk, leader)
    if leader == NO_LEADER and revoked is None:
        allow_unclean = election == UNCLEAN or image.unclean_election_enabled(topic)
        leader, isr = _elect(image, shrunk, isr, allow_unclean=allow_unclean)
    # If the leader may lack committed records, no replica is known to have them.
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
    """Return the partition with its live leader revoked; the same object if no other replica can lead."""
    leader = partition.leader
    if leader == NO_LEADER or not _up(image, leader) or not _successors(image, partition):
        return partition
    isr = _in_sync(image, topic, partition, NO_LEADER)
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
    """Return the partition after `broker` has reported no working log for it; the same object if that is known already.

    A leader that reports this has resigned already, so the same step elects the next one. The only member of the ISR
    stays in it: until a new process of its broker has the log again, only an unclean election can elect another.
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
    """Return `after` with raised epochs; `before` itself if nothing changed."""
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
    """Whether the revoked leader may still act as leader, by the image.

    It may not if it is fenced, since its lease has expired, or if it has registered again, as another process.
    """
    revoked = partition.revoked_leader
    broker = None if revoked is None else image.brokers.get(revoked)
    return broker is not None and not broker.fenced and broker.broker_epoch <= partition.revoked_at_offset


def eligible_replicas(
    image: MetadataImage, topic: TopicImage, before: PartitionImage, isr: Sequence[int]
) -> tuple[int, ...]:
    """Return the eligible replicas beside the new `isr`: earlier ones, and those that leave an ISR that is too small.

    An ISR smaller than min.insync.replicas commits nothing, so replicas that were in sync when it shrank have all that
    its members have (KIP-966). Brokers that return from an unclean stop may lack what they acknowledged, so they are
    not eligible (KAFKA-15586), unless they had fsynced everything first; neither are replicas without a working log.
    """
    if len(isr) >= min(image.min_insync_replicas(topic), len(before.replicas)):
        return ()
    were = {*before.eligible_leader_replicas, *before.isr}.difference(isr)
    return tuple(
        replica for replica in before.replicas if replica in were and not _lacking(image, topic, before, replica)
    )


def with_replicas(
    image: MetadataImage, partition: PartitionImage, replicas: tuple[int, ...], offset: int
) -> PartitionImage | None:
    """Return the partition with only these of its replicas and no move under way; None if none of them is in sync.

    A live leader that is not among them has to resign first, so another live replica must remain. The epochs do not
    change here.
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
    """End a reassignment once all added replicas are up and in sync (KIP-455)."""
    if not partition.adding_replicas and not partition.removing_replicas:
        return partition
    if not all(replica in partition.isr and _up(image, replica) for replica in partition.adding_replicas):
        return partition
    wanted = tuple(replica for replica in partition.replicas if replica not in partition.removing_replicas)
    return with_replicas(image, partition, wanted, offset) or partition


def unsettled(image: MetadataImage, topic_ids: Iterable[bytes] | None = None) -> Iterator[PartitionRef]:
    """Yield the partitions that `settle` would change, of these topics or of all, in the same order everywhere.

    `leaves_it_to` says which of them have to wait. Lazy, and cheap for partitions all of whose brokers are up: about
    20 ms for 100 000 of those.
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


def leaves_it_to(image: MetadataImage, ref: PartitionRef, silent: Set[int]) -> bool:
    """Whether `settle` would take members out of the ISR and leave only `silent` ones in it.

    The image calls these brokers live, but their heartbeats are missing (`BrokerSessions.is_silent`). When all brokers
    have died at once, and some return, the ISR would lose them and keep one that does not return. The partition would
    have no leader as long as that one is away. So the controller waits until it has heard or fenced the silent ones,
    which takes at most a session.
    """
    topic, partition = image.topics.get(ref.topic_id), image.partition(ref.topic_id, ref.partition)
    if topic is None or partition is None or not silent:
        return False
    isr = set(settle(image, topic, partition, offset=image.offset + 1).isr)
    return isr < set(partition.isr) and isr <= silent


def has_unsettled(image: MetadataImage, broker_id: int) -> bool:
    """Whether a partition must still be settled that counts a broker as in sync, as eligible, or as having a log."""
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
    """Yield the partitions whose live leader should resign for the preferred replica, which is up and in sync."""
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


def _electable(image: MetadataImage, partition: PartitionImage, broker_id: int) -> bool:
    return _active(image, broker_id) and has_log(image, partition, broker_id)


def _lacking(image: MetadataImage, topic: TopicImage, partition: PartitionImage, broker_id: int) -> bool:
    """Whether a replica may lack what it acknowledged, or has no working log at all."""
    broker = image.brokers.get(broker_id)
    return broker is None or broker.may_lack_records(topic.topic_id) or not has_log(image, partition, broker_id)


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
    if _active(image, partition.leader):  # and drained or full: it leads on where others would as well rather not
        return any(_takes_leaderships(image, successor) for successor in successors)
    return bool(successors)


def _in_sync(image: MetadataImage, topic: TopicImage, partition: PartitionImage, leader: int) -> tuple[int, ...]:
    """Return the members that stay in the ISR, at least one.

    Fenced brokers leave, and brokers that are about to stop, so that no write waits for them. If that would empty the
    ISR, its members stay: without a leader nothing is committed, so they still hold every committed record. Then only
    members leave that may have lost their tail in an unclean stop, or that have no log, if a better one remains.
    """
    isr = partition.isr
    staying = tuple(member for member in isr if member == leader or _electable(image, partition, member))
    staying = staying or tuple(m for m in isr if _up(image, m) and has_log(image, partition, m))
    staying = staying or tuple(member for member in isr if not _lacking(image, topic, partition, member))
    if not staying:
        eligible = [r for r in partition.eligible_leader_replicas if not _lacking(image, topic, partition, r)]
        staying = tuple(eligible[:1])
    staying = staying or tuple(member for member in isr if has_log(image, partition, member))
    return staying or tuple(member for member in isr if not image.is_lost(partition, member)) or isr


def _elect(
    image: MetadataImage, partition: PartitionImage, isr: tuple[int, ...], *, allow_unclean: bool
) -> tuple[int, tuple[int, ...]]:
    """Return the elected leader and the ISR with it. Replicas are tried in order of preference, drained ones last.

    In an unclean election, replicas that are being added come after the others, and replicas whose log is lost last.
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
