"""Metadata keeps its promises under any sequence of events in a cluster."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.security.acls import check_acl, check_permission, check_principal, check_role_name
from raftlog.errors import RaftlogError, StaleBrokerEpoch
from raftlog.v1.records_pb2 import ConfigResource, ElectLeadersCommand, PartitionRecord, PartitionRef
from raftmeta.decide import CommandResult, decide
from raftmeta.decide.security import check_credential
from raftmeta.elections import settle, still_holds, unsettled
from raftmeta.features import (
    ALTER_PARTITIONS_LEVEL,
    METADATA_VERSION,
    ROLES_LEVEL,
    SECURITY_LEVEL,
    metadata_version,
)
from raftmeta.image import NO_LEADER, BrokerLoad, MetadataImage, PartitionImage, TopicImage, metric_name
from raftmeta.replay import image_from_records
from tests.support.metadata import accept, alter_partition, alter_partitions, elect, settled, uuid_of
from tests.support.metadata_histories import Event, Step, disk_lives, flagged_lives, live, lives, security_lives

Life = list[tuple[Step, int, int]]


@given(lives, st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 1), st.integers(-1, 1)), min_size=1))
def test_a_batch_of_alterations_decides_each_as_a_command_of_its_own(
    life: Life, wishes: list[tuple[int, int, int]]
) -> None:
    """`wishes`: which replicas are to be in sync, and how far the epochs are off, for one partition after the other."""
    for event in live(life):
        image = replace(event.after, features={METADATA_VERSION: ALTER_PARTITIONS_LEVEL})
        keys = [(number, each.partition) for number in (1, 2) for each in _partitions_of(image, number)]
        singles = []
        for (number, partition), (members, leader_off, partition_off) in zip(keys, itertools.cycle(wishes)):
            known = image.topics[uuid_of(number)].partitions[partition]
            isr = [known.leader, *(each for each in known.replicas[:members] if each != known.leader)]
            single = alter_partition(image, isr, number, partition)
            single.alter_partition.leader_epoch += max(0, leader_off)
            single.alter_partition.partition_epoch += max(0, partition_off)
            singles.append(single)
        for broker_id in image.brokers:
            for single in singles:
                single.alter_partition.broker_id = broker_id
                single.alter_partition.broker_epoch = image.brokers[broker_id].broker_epoch
            alone = [decide(image, single, event.offset + 1) for single in singles]
            batch = alter_partitions(image, *singles, broker_id=broker_id)
            together = decide(image, batch, event.offset + 1)
            assert together.records == tuple(record for each in alone for record in each.records)
            if image.brokers[broker_id].fenced:
                assert isinstance(together.outcome, StaleBrokerEpoch)
                continue
            assert isinstance(together.outcome, CommandResult)
            for outcome, single_decision in zip(together.outcome.alterations, alone, strict=True):
                if isinstance(single_decision.outcome, RaftlogError):
                    assert outcome.error.code == single_decision.outcome.code
                else:
                    assert not outcome.HasField("error")
                    assert outcome.partition_epoch == single_decision.outcome.partitions[0].partition_epoch


def _partitions_of(image: MetadataImage, number: int) -> tuple[PartitionImage, ...]:
    topic = image.topics.get(uuid_of(number))
    return () if topic is None else topic.partitions


@given(st.one_of(lives, disk_lives, security_lives))
def test_the_image_keeps_its_invariants(life: Life) -> None:
    for event in live(life):
        check_image(event.after)
        for topic in event.after.topics.values():
            for partition in topic.partitions:
                check_partition(event.after, topic, partition)


def check_image(image: MetadataImage) -> None:
    assert {topic.name: topic_id for topic_id, topic in image.topics.items()} == image.topic_id_by_name
    dotted = {metric_name(name): name for name in image.topic_id_by_name if "." in name}
    assert image.dotted_names == dotted
    assert len({metric_name(name) for name in image.topic_id_by_name}) == len(image.topics), (
        "two topics have names that are the same in metrics"
    )
    assert image.load == recounted_load(image)
    assert all(image.configs.values()), "an empty mapping of configs was left behind"
    assert all(resource.type == ConfigResource.BROKER for resource in image.configs)
    assert all(level > 0 for level in image.features.values())
    for key, credential in image.credentials.items():
        assert credential.key == key
        assert 0 < credential.version <= image.offset
        check_credential(credential.to_wire())
    for acl in image.acls:
        assert acl.canonical() == acl
        check_acl(acl)
    for name, role in image.roles.items():
        assert role.name == name
        check_role_name(name)
        for acl in role.permissions:
            assert acl.canonical() == acl
            assert acl.principal == f"Role:{name}"
            check_permission(acl)
        for principal in role.principals:
            check_principal(principal)
    assert not image.roles or metadata_version(image) >= ROLES_LEVEL
    assert (not image.acls and not image.credentials) or metadata_version(image) >= SECURITY_LEVEL
    assert len({broker.broker_epoch for broker in image.brokers.values()}) == len(image.brokers)
    for broker in image.brokers.values():
        assert broker.fenced or not (broker.unclean or broker.unsynced_topic_ids)
        assert not (broker.unclean and broker.unsynced_topic_ids)
        assert broker.unclean or not broker.former_directory_ids
        assert not broker.former_directory_ids or not set(broker.former_directory_ids).issubset(broker.directory_ids)
        assert broker.drained or not broker.drained_until_restart
        assert broker.broker_epoch <= image.offset
    for topic_id, topic in image.topics.items():
        assert topic.topic_id == topic_id
        assert [partition.partition for partition in topic.partitions] == list(range(len(topic.partitions)))
        assert topic.partitions


def recounted_load(image: MetadataImage) -> dict[int, BrokerLoad]:
    partitions = [partition for topic in image.topics.values() for partition in topic.partitions]
    holders = {replica for partition in partitions for replica in partition.replicas}
    return {
        broker_id: BrokerLoad(
            leaderships=sum(partition.leader == broker_id for partition in partitions),
            replicas=sum(broker_id in partition.replicas for partition in partitions),
            preferred=sum(partition.replicas[0] == broker_id for partition in partitions),
        )
        for broker_id in holders
    }


def check_partition(image: MetadataImage, topic: TopicImage, partition: PartitionImage) -> None:
    replicas, isr = set(partition.replicas), set(partition.isr)
    assert len(replicas) == len(partition.replicas) > 0
    assert len(isr) == len(partition.isr) > 0
    assert isr <= replicas <= image.brokers.keys()
    assert partition.leader in isr or partition.leader == NO_LEADER
    assert set(partition.eligible_leader_replicas) <= replicas - isr
    assert set(partition.adding_replicas) <= replicas
    assert not set(partition.adding_replicas) & set(partition.removing_replicas)
    if partition.removing_replicas:
        assert partition.replicas[-len(partition.removing_replicas) :] == partition.removing_replicas
        assert len(replicas) > len(partition.removing_replicas)
    check_offline(image, topic, partition)
    check_lost(image, topic, partition)
    if partition.revoked_leader is None:
        assert partition.revoked_at_offset == 0
    else:
        assert partition.leader == NO_LEADER
        assert 0 < partition.revoked_at_offset <= image.offset


def check_offline(image: MetadataImage, topic: TopicImage, partition: PartitionImage) -> None:
    marked = [broker_id for broker_id, _ in partition.offline_replicas]
    assert marked == sorted(set(marked) & set(partition.replicas))
    offline = {broker_id for broker_id in marked if image.is_offline(partition, broker_id)}
    assert partition.leader not in offline
    assert not offline & set(partition.eligible_leader_replicas)
    check_in_sync(image, topic, partition, offline)


def without_log(image: MetadataImage, partition: PartitionImage) -> set[int]:
    return {each for each in partition.replicas if image.is_offline(partition, each) or image.is_lost(partition, each)}


def check_in_sync(image: MetadataImage, topic: TopicImage, partition: PartitionImage, missing: set[int]) -> None:
    """Replicas without a log leave the ISR, unless all of them do; a log that came back counts at the next settling."""
    if missing & set(partition.isr) and not without_log(image, partition) >= set(partition.isr):
        assert partition.leader == NO_LEADER
        partition = settle(image, topic, partition, offset=image.offset + 1)
        assert not missing & set(partition.isr)


def check_lost(image: MetadataImage, topic: TopicImage, partition: PartitionImage) -> None:
    marked = [broker_id for broker_id, _ in partition.lost_replicas]
    assert marked == sorted(set(marked) & set(partition.replicas))
    assert all(directory_ids for _, directory_ids in partition.lost_replicas)
    lost = {broker_id for broker_id in marked if image.is_lost(partition, broker_id)}
    assert partition.leader not in lost
    assert not lost & set(partition.eligible_leader_replicas)
    check_in_sync(image, topic, partition, lost)


@given(st.one_of(lives, disk_lives, security_lives))
def test_every_replica_decides_the_same_also_after_a_restart(life: Life) -> None:
    for event in live(life):
        restarted = image_from_records(event.before.to_records(), event.before.offset)
        assert restarted == event.before
        assert list(restarted.to_records()) == list(event.before.to_records())
        elsewhere = decide(restarted, event.command, event.offset)
        assert elsewhere.records == event.decision.records
        assert str(elsewhere.outcome) == str(event.decision.outcome)


@given(st.one_of(lives, security_lives))
def test_a_refusal_changes_nothing_and_can_travel(life: Life) -> None:
    for event in live(life):
        outcome = event.decision.outcome
        if isinstance(outcome, RaftlogError):
            assert event.decision.records == ()
            assert outcome.code is not None
            assert outcome.__traceback__ is None, (
                "a refusal must keep no traceback, which would keep an old image in memory"
            )
        else:
            assert outcome.offset == event.after.offset
            assert bool(event.decision.records) == (event.after.offset == event.offset)


def changes(event: Event) -> list[tuple[TopicImage, PartitionImage, PartitionImage, PartitionRecord]]:
    """Return (topic, before, after, record) of the partitions that were there before and changed."""
    changed = []
    for record in event.decision.records:
        if record.HasField("partition"):
            before = event.before.partition(record.partition.topic_id, record.partition.partition)
            after = event.after.partition(record.partition.topic_id, record.partition.partition)
            if before is not None and after is not None:
                changed.append((event.after.topics[record.partition.topic_id], before, after, record.partition))
    return changed


@given(lives)
def test_epochs_only_grow_and_tell_of_every_change(life: Life) -> None:
    for event in live(life):
        assert event.after.controller_epoch >= event.before.controller_epoch
        assert event.after.next_producer_id >= event.before.next_producer_id
        for broker_id, broker in event.before.brokers.items():
            if broker_id in event.after.brokers:
                assert event.after.brokers[broker_id].broker_epoch >= broker.broker_epoch
        for _, before, after, _ in changes(event):
            assert after != before
            assert after.partition_epoch == before.partition_epoch + 1
            assert after.leader_epoch == before.leader_epoch + (after.leader != before.leader)


@given(lives)
def test_nobody_leads_while_somebody_else_may_still(life: Life) -> None:
    """A leader that is up is never replaced directly, and a revoked one only once it has let go.

    Or says itself, in its present life, that it has no working log: then it has let go.
    """
    for event in live(life):
        command = event.command
        handed_over = command.WhichOneof("command") == "elect_leaders" and command.elect_leaders.handed_over_as_of > 0
        reported = command.WhichOneof("command") == "offline_replicas"
        for _, before, after, _ in changes(event):
            leader = event.before.brokers.get(before.leader)
            itself = reported and command.offline_replicas.broker_id in (before.leader, before.revoked_leader)
            if after.leader != before.leader and leader is not None and not leader.fenced and not itself:
                assert after.leader == NO_LEADER
                assert after.revoked_leader == before.leader
                assert after.revoked_at_offset == event.offset
            if after.leader != NO_LEADER and before.leader == NO_LEADER:
                assert handed_over or itself or not still_holds(event.before, before)
                elected = event.before.brokers[after.leader]
                assert elected.active, f"broker {after.leader} was elected, though it is fenced or shuts down"


@given(flagged_lives)
def test_cordoned_and_drained_brokers_get_no_new_replicas(life: Life) -> None:
    for event in live(life):
        for record in event.decision.records:
            if record.HasField("partition"):
                before = event.before.partition(record.partition.topic_id, record.partition.partition)
                given = set(record.partition.replicas) - set(() if before is None else before.replicas)
                for broker_id in given:
                    broker = event.before.brokers[broker_id]
                    assert not broker.cordoned
                    assert not broker.drained


@given(flagged_lives)
def test_drained_brokers_lead_only_what_nobody_else_in_sync_can(life: Life) -> None:
    """No partition is without a leader because of them: they lead where no other replica can."""
    for event in live(life):
        for _, before, after, record in changes(event):
            elected = after.leader not in (before.leader, NO_LEADER) and not record.unclean_election
            if elected and event.before.brokers[after.leader].drained:
                assert not others_who_would_lead(event.after, after)
        image = handed_over(settled(event.after))
        for topic in image.topics.values():
            for partition in topic.partitions:
                if partition.leader == NO_LEADER:
                    assert not any(can_lead(image, partition, member) for member in partition.isr)
                elif image.brokers[partition.leader].drained:
                    assert not others_who_would_lead(image, partition)


def handed_over(image: MetadataImage) -> MetadataImage:
    """Return the image once every revoked leader has let go, and all is settled."""
    revoked = [
        PartitionRef(topic_id=topic.topic_id, partition=partition.partition)
        for topic in image.topics.values()
        for partition in topic.partitions
        if partition.revoked_leader is not None
    ]
    return settled(accept(image, elect(revoked, handed_over=True, epoch=image.controller_epoch))[0])


def can_lead(image: MetadataImage, partition: PartitionImage, broker_id: int) -> bool:
    return image.brokers[broker_id].active and broker_id not in without_log(image, partition)


def others_who_would_lead(image: MetadataImage, partition: PartitionImage) -> list[int]:
    return [
        member
        for member in partition.isr
        if member != partition.leader and can_lead(image, partition, member) and not image.brokers[member].drained
    ]


@given(st.one_of(lives, disk_lives))
def test_settling_comes_to_rest_and_finds_all_there_is_to_do(life: Life) -> None:
    image = MetadataImage()
    for event in live(life):
        image = event.after
        found = {(ref.topic_id, ref.partition) for ref in unsettled(image)}
        for topic_id, topic in image.topics.items():
            for partition in topic.partitions:
                once = settle(image, topic, partition, offset=image.offset + 1)
                assert (once is not partition) == ((topic_id, partition.partition) in found)
                # A move can become complete by what settling did to the ISR.
                twice = settle(image, topic, once, offset=image.offset + 2)
                assert twice is once or (once.removing_replicas and not twice.removing_replicas)
                assert settle(image, topic, twice, offset=image.offset + 3) is twice
    assert not list(unsettled(settled(image)))


@given(lives)
def test_whoever_leads_has_every_committed_record(life: Life) -> None:
    """Against the worst of worlds (KIP-966): leaders commit whenever they may, and unclean stops lose the tail.

    Replicas without a working log hold nothing. `full` is who has every committed record. A leader outside it was
    elected uncleanly and said to be so, where that was allowed; or nobody was left who has them.
    """
    full: dict[tuple[bytes, int], set[int]] = {}
    for event in live(life):
        for lost in event.decision.records:
            for (topic_id, _), holders in full.items():
                if lost.HasField("broker") and (lost.broker.unclean or topic_id in lost.broker.unsynced_topic_ids):
                    holders.discard(lost.broker.broker_id)
        asked = event.command
        if asked.WhichOneof("command") == "offline_replicas" and event.decision.records:
            for ref in asked.offline_replicas.partitions:
                full.get((ref.topic_id, ref.partition), set()).discard(asked.offline_replicas.broker_id)
        for topic, before, after, record in changes(event):
            holders = full[topic.topic_id, after.partition]
            if asked.WhichOneof("command") == "alter_partition":
                holders |= set(after.isr) - set(before.isr)  # caught up, says the leader
            if after.leader in (NO_LEADER, before.leader):
                assert not record.unclean_election
            elif record.unclean_election:
                wanted = (
                    asked.WhichOneof("command") == "elect_leaders"
                    and asked.elect_leaders.type == ElectLeadersCommand.UNCLEAN
                )
                assert wanted or event.before.unclean_election_enabled(topic)
                assert after.isr == (after.leader,)
                full[topic.topic_id, after.partition] = {after.leader}
            elif holders:
                assert after.leader in holders
        for topic_id, topic in event.after.topics.items():
            minimum = event.after.min_insync_replicas(topic)
            for partition in topic.partitions:
                key = (topic_id, partition.partition)
                full.setdefault(key, set(partition.isr))
                if partition.leader != NO_LEADER and len(partition.isr) >= min(minimum, len(partition.replicas)):
                    full[key] = set(partition.isr)


@given(disk_lives)
def test_nobody_is_elected_cleanly_with_another_disk_than_its_log_was_on(life: Life) -> None:
    """`logs`: the directory in which a replica has the partition's log. It is there when the partition is made.

    Another one has it once the replica is taken into the ISR, or is elected uncleanly. Nobody who lacks it leads
    otherwise, and an unclean election takes such a one only where no other replica that is up and works has a log.
    Who has the log that is waited for leads as soon as he is up.
    """
    logs: dict[tuple[bytes, int], dict[int, bytes]] = {}
    for event in live(life):
        for topic, before, after, record in changes(event):
            places = logs[topic.topic_id, after.partition]
            brokers = event.after.brokers
            for gone in set(before.replicas) - set(after.replicas):
                places.pop(gone, None)
            if event.command.WhichOneof("command") == "alter_partition":
                places |= {each: brokers[each].directory_id for each in set(after.isr) - set(before.isr)}
            if after.leader not in (NO_LEADER, before.leader):
                having = [each for each in after.replicas if places.get(each) == brokers[each].directory_id]
                if record.unclean_election:
                    assert event.command.elect_leaders.type == ElectLeadersCommand.UNCLEAN
                if record.unclean_election and after.leader not in having:
                    assert not any(can_lead(event.before, before, each) for each in having)
                    places[after.leader] = brokers[after.leader].directory_id
                else:
                    assert after.leader in having
        for topic_id, topic in event.after.topics.items():
            for partition in topic.partitions:
                here = {each: event.after.brokers[each].directory_id for each in partition.replicas}
                logs.setdefault((topic_id, partition.partition), here)
    image = handed_over(settled(event.after))
    for topic_id, topic in image.topics.items():
        for partition in topic.partitions:
            places = logs[topic_id, partition.partition]
            if partition.leader == NO_LEADER:
                for member in partition.isr:
                    has_log = places.get(member) == image.brokers[member].directory_id
                    assert not (has_log and can_lead(image, partition, member)), (
                        f"the partition has no leader, though broker {member} could lead it"
                    )
