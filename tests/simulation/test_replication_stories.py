"""Known faults of replicated logs, from other systems or found by reasoning, each told as a story.

The ledger checks all the time that replicas in sync hold the committed records, that these never change, and that
clients see nothing else. A story brings about a sequence of events that random faults rarely reach.
"""

from __future__ import annotations

import itertools

import pytest

from raftlog.errors import OffsetOutOfRange
from raftlog.v1.records_pb2 import (
    AlterReassignmentsCommand,
    CreateTopicCommand,
    DeleteTopicCommand,
    ElectLeadersCommand,
    MetadataCommand,
    PartitionRef,
)
from tests.simulation.dataplane.messages import Failed, Fetched, PartitionKey
from tests.simulation.dataplane.scenario import CONTROLLER, FRAMES, IMAGE, OUTCOME, PROPOSAL, REQUESTS, DataStory
from tests.simulation.parts import Parts
from tests.simulation.voter import Propose


@pytest.fixture
def parts() -> Parts:
    """The real ones."""
    return Parts()


def test_records_are_replicated_and_read(parts: Parts) -> None:
    """No fault at all."""
    with DataStory(parts) as story:
        key = story.topic(min_insync_replicas=2)
        sent = story.produce(key, 5)
        story.holds(key, sent)
        story.all_equal()


def test_a_topic_made_again_by_a_late_request_does_not_get_the_logs_of_the_first_one(parts: Parts) -> None:
    """A broker that was away has a log of the deleted topic, and takes it for a stray log."""
    create = CreateTopicCommand(name="t", topic_id=bytes(range(16)), partitions=1, replication_factor=2)
    with DataStory(parts) as story:
        simulation = story.simulation
        story.topic()  # a client has to ask
        simulation.propose(MetadataCommand(create_topic=create))
        story.until(lambda: bool(simulation.id_of("t")), "the topic is there")
        first = simulation.id_of("t")
        story.produce((first, 0), 3)
        _, follower = story.partition((first, 0)).replicas
        story.reaches(follower, (first, 0), 3)
        story.kill(follower)
        simulation.propose(MetadataCommand(delete_topic=DeleteTopicCommand(name="t")))
        story.until(lambda: not simulation.id_of("t"), "the topic is gone")
        simulation.propose(MetadataCommand(create_topic=create))
        story.until(lambda: bool(simulation.id_of("t")), "the topic is there again")
        assert simulation.id_of("t") != first
        story.boot(follower)
        story.produce((simulation.id_of("t"), 0))
        story.all_equal()


def test_a_replica_whose_log_vanished_never_leads_with_an_empty_one(parts: Parts) -> None:
    """All brokers stop cleanly, and a log directory of one is removed: the others keep the committed records."""
    for order in itertools.permutations((2, 3, 4)):
        with DataStory(parts) as story:
            key = story.topic(min_insync_replicas=2)
            sent = story.produce(key, 3)
            for node_id in (3, 4):
                story.reaches(node_id, key, 3)
            story.shut_down(2, 3, 4)
            story.lose_log(2, key)
            for node_id in order:
                story.boot(node_id)
                story.run(3.0)
            story.in_sync(key, 2, 3, 4)
            story.holds(key, sent)
            story.all_equal()


@pytest.mark.parametrize(
    "what",
    [
        "the first segment",
        "a middle segment",
        "the last segment",
        "the checkpoint",
        "what an older copy of the log lacks",
        "what an older copy of the disk lacks",
    ],
)
@pytest.mark.parametrize("cleanly", [True, False])
def test_a_replica_that_lost_files_never_cuts_what_was_committed(parts: Parts, what: str, cleanly: bool) -> None:
    """All brokers stop, files of one vanish, and they start in any order; `min.insync.replicas` does not help."""
    for order in itertools.permutations((2, 3, 4)):
        with DataStory(parts) as story:
            key = story.topic(segment_bytes="1024")
            sent = story.produce(key, 4)
            story.shut_down(2)
            copy = story.copy_disk(2)
            story.leads(key, 3, 4)
            story.boot(2)
            story.in_sync(key, 2, 3, 4)
            sent += story.produce(key, 12)
            for node_id in (2, 3, 4):
                story.reaches(node_id, key, 16)
            story.run(2.0)  # checkpoints
            if cleanly:
                story.shut_down(2, 3, 4)
            else:
                story.kill(2, 3, 4)
            story.lose_files(2, key, what, copy)
            for node_id in order:
                story.boot(node_id)
                story.run(3.0)
            story.in_sync(key, 2, 3, 4)
            story.holds(key, sent)
            story.all_equal()


# KIP-101, KIP-279, KAFKA-7164: where logs part


def test_kip_101_first_scenario_a_follower_truncates_and_becomes_the_leader(parts: Parts) -> None:
    """ "The follower ... truncates its log to the high watermark ... before it has fetched the leader fails." """
    with DataStory(parts) as story:
        key = story.topic()
        story.produce(key)
        story.run(0.1)
        # The others hold the second record too, and do not hear that it is committed.
        story.slow_disk(3, 4, seconds=0.3)
        second = story.send(key)
        story.until(lambda: story.log_end(3, key) == story.log_end(4, key) == 2, "all have it")
        held = story.hold(FRAMES, source=2)
        story.until(lambda: second[0].acknowledged, "it is committed")
        story.kill(2)
        story.drop(held)
        # Broker 3 leads; broker 4 changes leaders, and must keep what it has.
        assert story.leads(key, 3, 4) == 3
        story.run(0.3)
        story.kill(3)
        story.leads(key, 4)
        story.holds(key, second)
        story.all_equal()


def test_kip_101_second_scenario_logs_part_after_a_power_cut_of_both(parts: Parts) -> None:
    """ "Replica A and B ... messages at the same offset ... diverged": same length, other records."""
    with DataStory(parts) as story:
        key = story.topic()
        story.produce(key)
        story.cut_off(2)
        lost = story.send(key, 2, acks="1")
        story.until(lambda: story.log_end(2, key) == 2, "the old leader has a record for itself")
        story.leads(key, 3)
        kept = story.produce(key)
        assert kept[0].offset == 1
        story.power_cut(2, 3, 4)
        story.heal()
        story.boot(2)
        story.run(1.0)
        story.boot(3, 4)
        story.all_equal()
        assert not lost[0].acknowledged or story.simulation.ledger.of(key).end == 2
        story.holds(key, kept)


def test_kip_279_two_failovers_in_a_row(parts: Parts) -> None:
    """ "Fix log divergence between leader and follower after fast leader fail over": the answer names its epoch."""
    with DataStory(parts) as story:
        key = story.topic(replication_factor=2, unclean_leader_election_enable="true")
        story.produce(key)
        story.kill(3)
        story.in_sync(key, 2)
        story.produce(key, 2)  # 2 has offsets 0 1 2 of the first epoch, 3 has 0
        story.kill(2)
        story.boot(3)
        story.leads(key, 3)
        story.produce(key, 3)  # 3 has offsets 1 2 3 of the second leader
        story.kill(3)
        story.boot(2)
        story.leads(key, 2)
        story.produce(key)  # 2 has offset 3 of the third
        story.boot(3)
        story.all_equal()
        assert story.simulation.ledger.counts["unclean elections"] == 2


def test_kafka_7164_a_follower_that_missed_epochs_still_truncates(parts: Parts) -> None:
    """ "Follower should truncate after every leader epoch change", those included that it never heard of."""
    with DataStory(parts) as story:
        key = story.topic()
        story.produce(key)
        story.cut_off(2)
        story.send(key, 2, count=3, acks="1")
        story.until(lambda: story.log_end(2, key) == 4, "the old leader has three records for itself")
        story.leads(key, 3)
        first = story.produce(key, 2)
        story.kill(3)
        story.leads(key, 4)
        second = story.produce(key, 2)
        story.heal()  # two leaders later
        story.all_equal()
        story.holds(key, [*first, *second])


def test_a_flush_of_what_was_truncated_counts_for_nothing(parts: Parts) -> None:
    """A flush begins, the log is cut and grows again, and then the flush ends: it says nothing of what came since."""
    with DataStory(parts) as story:
        key = story.topic()
        story.produce(key)
        story.part(2, 3)  # only broker 4 gets what follows
        story.slow_disk(4, seconds=4.0)
        story.send(key, records=5, acks="1")
        story.until(lambda: story.log_end(4, key) == 6, "broker 4 has records that it flushes slowly")
        story.quick_disk(4)
        story.kill(2)
        story.heal()
        assert story.leads(key, 3, 4) == 3
        story.until(lambda: story.log_end(4, key) == 1, "broker 4 has cut its log")
        story.slow_disk(4, seconds=0.5)
        sent = story.send(key, count=2)
        story.until(lambda: story.log_end(4, key) == 3, "broker 4 has other records")
        story.run(5.0)
        story.in_sync(key, 3, 4)
        # The first flush was of more offsets. Now there is another record that it seems to cover, not on the disk yet.
        story.slow_disk(4, seconds=5.0)
        sent += story.send(key)
        story.until(lambda: story.log_end(4, key) == 4, "broker 4 has one more")
        story.break_connections({3}, {4})
        story.run(0.5)
        assert not sent[-1].acknowledged
        story.all_equal()


def test_a_log_starts_over_where_its_leader_s_begins_in_the_midst_of_a_batch(parts: Parts) -> None:
    """Kafka's UnexpectedAppendOffsetException: the leader's first batch begins below the requested offset."""
    with DataStory(parts) as story:
        key = story.topic()
        story.produce(key, records=3)
        story.cut_off(4)
        story.in_sync(key, 2, 3)
        sent = story.produce(key, 3, records=3)
        story.delete_records(key, 4)
        story.heal()
        story.in_sync(key, 2, 3, 4)
        story.holds(key, sent[1:])
        story.all_equal()


# Page caches, power cuts


def test_a_replica_that_lost_its_page_cache_is_not_elected(parts: Parts) -> None:
    """Fluss #662, KIP-966: with flush.messages above 1 a power cut takes records that a replica had acknowledged."""
    with DataStory(parts) as story:
        key = story.topic(flush_messages="1000")
        story.produce(key)
        story.cut_off(4)
        story.in_sync(key, 2, 3)
        sent = story.produce(key, 5)
        story.kill(3, CONTROLLER)
        story.power_cut(2)
        story.boot(CONTROLLER)  # it misses both at the same time, so that both stay in sync
        story.until(lambda: story.partition(key).leader == -1, "nobody leads")
        assert set(story.partition(key).isr) == {2, 3}
        story.boot(2)
        story.run(3.0)
        assert story.partition(key).leader == -1
        story.boot(3)
        story.leads(key, 3)
        story.holds(key, sent)
        story.all_equal()


def test_two_of_three_lead_on_after_all_lost_their_power_at_once(parts: Parts) -> None:
    """Acknowledged records were fsynced, so a broker that returns has them; the third may never come back."""
    lose_power_and_return_without_the_third(parts, controller=False)


def test_two_of_three_lead_on_after_all_and_the_controller_lost_their_power_at_once(parts: Parts) -> None:
    """A new controller gives the third a session, in which it looks live."""
    lose_power_and_return_without_the_third(parts, controller=True)


def lose_power_and_return_without_the_third(parts: Parts, *, controller: bool) -> None:
    with DataStory(parts) as story:
        key = story.topic()
        sent = story.produce(key, 5)
        if controller:
            story.kill(CONTROLLER)
        story.power_cut(2, 3, 4)
        if controller:
            story.boot(CONTROLLER)
        story.run(0.8)
        story.boot(2, 3)
        story.leads(key, 2, 3)
        story.holds(key, sent)
        sent += story.produce(key)
        story.all_equal()
        story.holds(key, sent)


def test_only_the_topics_that_were_not_fsynced_wait_for_the_third(parts: Parts) -> None:
    """KIP-966's rule stays where flush.messages is above 1: broker 4 alone is known to have what it acknowledged."""
    with DataStory(parts) as story:
        key, unsynced = story.topic(), story.topic(flush_messages="1000")
        sent, more = story.produce(key, 2), story.produce(unsynced, 2)
        story.power_cut(2, 3)
        story.boot(2, 3)
        story.leads(key, 4)
        story.in_sync(key, 2, 3, 4)
        story.in_sync(unsynced, 2, 3, 4)
        story.kill(CONTROLLER, 4)
        story.power_cut(2, 3)
        story.run(0.8)
        story.boot(CONTROLLER, 2, 3)
        story.leads(key, 2, 3)
        story.run(3.0)
        assert story.partition(unsynced).leader == -1
        assert story.partition(unsynced).isr == (4,)
        story.boot(4)
        story.leads(unsynced, 4)
        story.holds(key, sent)
        story.holds(unsynced, more)
        story.all_equal()


def test_an_older_copy_of_a_disk_counts_for_nothing(parts: Parts) -> None:
    """The copy is from an earlier life of the broker, and lacks records that the broker has acknowledged since."""
    with DataStory(parts) as story:
        key = story.topic()
        sent = story.produce(key, 2)
        story.power_cut(2)
        copy = story.copy_disk(2)
        story.leads(key, 3)
        story.boot(2)
        story.in_sync(key, 2, 3, 4)
        sent += story.produce(key, 3)
        story.kill(2, 3, 4)
        story.put_back(2, copy)
        story.boot(2)
        story.run(3.0)
        assert story.partition(key).leader == -1
        story.boot(3)
        story.leads(key, 3)
        story.in_sync(key, 2, 3)
        story.holds(key, sent)
        story.all_equal()


def test_power_loss_of_all_at_once_keeps_what_was_acknowledged(parts: Parts) -> None:
    """What acks=all has answered was on the disks of all in sync; the rest may be lost, the same on all of them."""
    with DataStory(parts) as story:
        key = story.topic(min_insync_replicas=2)
        sent = story.produce(key, 5)
        story.slow_disk(3, 4)
        waiting = story.send(key, count=5)
        story.until(lambda: story.log_end(3, key) == story.log_end(4, key) == 10, "all have it in their page caches")
        assert not any(each.acknowledged for each in waiting)
        story.power_cut(2, 3, 4)
        story.boot(2, 3, 4)
        story.leads(key, 2, 3, 4)
        story.holds(key, sent)
        story.all_equal()


def test_a_leader_whose_disk_is_full_lets_another_one_lead(parts: Parts) -> None:
    with DataStory(parts) as story:
        key = story.topic()
        sent = story.produce(key)
        story.fill_disk(2)
        refused = story.send(key)
        story.leads(key, 3, 4)
        assert not refused[0].acknowledged
        sent += story.produce(key, 3)
        story.in_sync(key, 3, 4)
        story.mend_disk(2)
        story.in_sync(key, 2, 3, 4)
        assert story.full_disks() == [2], (
            "the broker must still report its disk as full for a while after the last refusal"
        )
        story.run(61)
        assert story.full_disks() == []
        story.holds(key, sent)
        story.all_equal()


def test_leaderships_do_not_go_round_where_all_disks_are_full(parts: Parts) -> None:
    with DataStory(parts) as story:
        key = story.topic()
        sent = story.produce(key)
        story.fill_disk(2, 3, 4)
        for _ in range(20):
            story.send(key)
            story.run(0.5)
        epoch = story.partition(key).leader_epoch
        assert epoch <= 6, (
            "the leaderships go round: each of three brokers leads once, and a hand-over takes two epochs, so 6 is "
            "the most"
        )
        for _ in range(20):
            story.send(key)
            story.run(0.5)
        assert story.partition(key).leader_epoch == epoch
        story.mend_disk(2, 3, 4)
        sent += story.produce(key)
        story.holds(key, sent)
        story.all_equal()


def test_a_damaged_log_is_set_aside_and_fetched_anew(parts: Parts) -> None:
    """nats #7549: "bit rot on a minority deletes the majority's data". It is the damaged one that begins anew."""
    with DataStory(parts) as story:
        key = story.topic(min_insync_replicas=2)
        sent = story.produce(key, 5)
        log = story.simulation.ledger.log_of(key, 2)
        disk = story.simulation.host(2).log_disk
        assert log is not None
        assert disk is not None
        story.run(1.0)
        story.power_cut(2)
        disk.lose_half(log.segments[0].log_path)
        story.boot(2)
        story.leads(key, 3)
        story.in_sync(key, 2, 3, 4)
        assert any("stray" in name for name in disk.storage.list_sizes("/logs")), (
            "the damaged log must be kept in a stray directory, not deleted"
        )
        story.holds(key, sent)
        story.all_equal()


# The ISR, and eligible replicas


def test_kip_966_the_last_replica_standing_commits_nothing_alone(parts: Parts) -> None:
    """ "Last replica standing": with min.insync.replicas=2 the last one in the ISR may be lost with its disk."""
    with DataStory(parts) as story:
        key = story.topic(min_insync_replicas=2)
        sent = story.produce(key, 2)
        story.cut_off(4)
        story.in_sync(key, 2, 3)
        sent += story.produce(key, 2)
        story.cut_off(3)
        story.in_sync(key, 2)
        assert story.partition(key).eligible_leader_replicas == (3,)
        alone = story.send(key, acks="1")
        story.run(0.5)
        assert alone[0].acknowledged, "acks=1 must be acknowledged, as the leader holds the record"
        story.power_cut(2)
        story.heal()
        assert story.leads(key, 3, 4) == 3, "broker 3 must lead, as broker 4 lacks what was committed without it"
        story.holds(key, sent)
        story.all_equal()


def test_who_left_the_isr_is_not_eligible_while_the_others_commit(parts: Parts) -> None:
    """KIP-966: only a replica that left an ISR that no longer commits is eligible."""
    with DataStory(parts) as story:
        key = story.topic(min_insync_replicas=2)
        story.produce(key)
        story.cut_off(4)
        story.in_sync(key, 2, 3)
        sent = story.produce(key, 2)
        story.kill(2, 3)
        story.heal()
        story.run(4.0)
        assert story.partition(key).leader == -1
        story.boot(2, 3)
        story.leads(key, 2, 3)
        story.holds(key, sent)
        story.all_equal()


def test_who_is_about_to_join_counts_already(parts: Parts) -> None:
    """KIP-497: the leader has asked to take a replica in, and does not hear that the controller has agreed."""
    with DataStory(parts) as story:
        key = story.topic()
        story.produce(key)
        story.cut_off(4)
        story.in_sync(key, 2, 3)
        story.produce(key)
        asked = story.hold(PROPOSAL, source=2, target=CONTROLLER)
        story.heal()
        story.until(lambda: len(asked.kept) > 0, "the leader has asked for broker 4")
        story.hold_no_more()
        story.hold(IMAGE, source=CONTROLLER, target=2)
        story.hold(OUTCOME, source=CONTROLLER, target=2)
        asked.kept[0]()
        story.in_sync(key, 2, 3, 4)
        story.hold(REQUESTS, source=4, target=2)
        sent = story.send(key)
        story.until(lambda: story.log_end(4, key) == 3, "broker 4 has the record, and its leader does not hear of it")
        story.run(0.3)
        assert not sent[0].acknowledged
        story.release()
        story.until(lambda: sent[0].acknowledged, "it is committed")
        story.all_equal()


def test_a_late_change_of_the_isr_is_refused(parts: Parts) -> None:
    """AlterPartition is compared with the partition epoch: asked on metadata that is over, it changes nothing."""
    with DataStory(parts) as story:
        key = story.topic()
        story.produce(key)
        story.part(2, 3)
        late = story.hold(PROPOSAL, source=2, target=CONTROLLER)
        story.send(key)
        story.until(lambda: len(late.kept) > 0, "the leader has asked for 2 and 4: broker 3 lags")
        story.cut_off(4)
        story.in_sync(key, 2, 3)  # it is the controller that has taken broker 4 out
        story.heal()
        story.part(2, 4)
        story.produce(key, 2)
        story.until(lambda: 4 in story._up(), "broker 4 is up, in the same life, and lags")
        for deliver in late.kept:
            deliver()
        story.run(0.3)
        story.hold_no_more()
        story.all_equal()


def test_a_refused_change_of_an_isr_spoils_no_other_in_its_batch(parts: Parts) -> None:
    """One of the partitions has changed meanwhile: its change is refused, and the others are granted."""
    with DataStory(parts) as story:
        keys = [key for key in (story.topic() for _ in range(9)) if story.partition(key).leader == 2]
        assert len(keys) >= 3
        story.cut_off(4)
        for key in keys:
            story.in_sync(key, 2, 3)
            story.produce(key)
        late = story.hold(PROPOSAL, source=2, target=CONTROLLER)
        story.heal()

        def batches() -> list[list[PartitionKey]]:
            asked = [
                payload.command for _, source, _, payload in story.seen if source == 2 and type(payload) is Propose
            ]
            return [
                [(each.topic_id, each.partition) for each in command.alter_partitions.alterations]
                for command in asked
                if command.HasField("alter_partitions")
            ]

        story.until(lambda: len(batches()) > 0, "the leader has asked for broker 4 in one of them")
        before = len(batches())
        story.run(0.2)
        for deliver in late.kept:
            deliver()
        story.until(lambda: len(batches()) > before and len(batches()[-1]) > 1, "and then for the others together")
        changed, *others = batches()[-1]
        name = story.simulation.invariants.truth.topics[changed[0]].name
        move = AlterReassignmentsCommand(topic=name, partition=0, replicas=[3, 2, 4])
        story.simulation.propose(MetadataCommand(alter_reassignments=move))
        story.until(lambda: story.partition(changed).replicas == (3, 2, 4), "the partition has changed")
        assert all(4 not in story.partition(key).isr for key in (changed, *others))
        for deliver in late.kept:
            deliver()
        story.hold_no_more()
        for key in others:
            story.in_sync(key, 2, 3, 4)
        story.all_equal()


def test_kip_903_a_broker_that_was_restarted_does_not_join_by_what_it_was_before(parts: Parts) -> None:
    """ "Replicas with stale broker epoch should not be allowed to join the ISR": it lost what it was taken in for."""
    with DataStory(parts) as story:
        key = story.topic(flush_messages="1000")
        story.produce(key)
        story.cut_off(4)
        story.in_sync(key, 2, 3)
        story.produce(key, 4)
        late = story.hold(PROPOSAL, source=2, target=CONTROLLER)
        story.heal()
        story.until(lambda: len(late.kept) > 0, "the leader has asked for broker 4, which has caught up")
        story.power_cut(4)
        story.part(2, 4)
        story.boot(4)
        story.until(lambda: 4 in story._up(), "broker 4 is back, with less than it had")
        for deliver in late.kept:
            deliver()
        story.run(0.2)
        assert 4 not in story.partition(key).isr
        story.hold_no_more()
        story.all_equal()


# Readers and producers at a failover


def test_a_high_watermark_that_is_behind_does_not_send_readers_back(parts: Parts) -> None:
    """estuary/flow #3092: the new leader's high watermark is below offsets already read; readers made no mistake."""
    with DataStory(parts) as story:
        key = story.topic()
        story.produce(key, 2)
        frames = story.hold(FRAMES, source=2)
        story.run(0.1)
        story.drop(frames)
        sent = story.send(key, count=3)
        story.until(lambda: story.log_end(3, key) == story.log_end(4, key) == 5, "all have them")
        frames = story.hold(FRAMES, source=2)
        story.until(lambda: all(each.acknowledged for each in sent), "committed")
        answer = story.fetch(key, position=4)
        assert isinstance(answer, Fetched)
        assert answer.next_offset == 5
        # The followers have heard of less; broker 4 confirms nothing for a while.
        story.hold(REQUESTS, source=4, target=3)
        story.kill(2)
        story.drop(frames)
        assert story.leads(key, 3) == 3
        leader = story.simulation.data_broker(3)
        assert leader is not None
        here = leader.find(key)
        assert here is not None
        assert here.high_watermark < 5
        answer = story.fetch(key, position=5)
        assert not (isinstance(answer, Failed) and isinstance(answer.error, OffsetOutOfRange)), answer
        story.release()
        more = story.produce(key)
        answer = story.fetch(key, position=5)
        assert isinstance(answer, Fetched)
        assert answer.records
        story.holds(key, [*sent, *more])
        story.all_equal()


def test_who_waits_for_a_deposed_leader_is_not_answered_by_its_next_term(parts: Parts) -> None:
    """A leader loses what it had not committed, leads again, and commits other records at the same offsets."""
    with DataStory(parts) as story:
        key = story.topic()
        story.produce(key)
        story.cut_off(2)
        waiting = story.send(key, 2, count=3)
        story.until(lambda: story.log_end(2, key) == 4, "the old leader has three records for itself")
        story.leads(key, 3)
        kept = story.produce(key, 2)
        story.heal()
        story.in_sync(key, 2, 3, 4)
        elect = ElectLeadersCommand(
            partitions=[PartitionRef(topic_id=key[0], partition=key[1])], type=ElectLeadersCommand.PREFERRED
        )
        story.simulation.propose(MetadataCommand(elect_leaders=elect))
        story.leads(key, 2)
        kept += story.produce(key, 3)
        assert not any(each.acknowledged for each in waiting)
        story.holds(key, kept)
        story.all_equal()


def test_an_unclean_election_loses_what_it_is_said_to_lose_and_nothing_else(parts: Parts) -> None:
    """With unclean.leader.election.enable a replica out of sync may lead; from then on its log is the truth."""
    with DataStory(parts) as story:
        key = story.topic(unclean_leader_election_enable="true")
        kept = story.produce(key, 2)
        story.cut_off(4)
        story.in_sync(key, 2, 3)
        story.produce(key, 3)
        story.kill(2, 3)
        story.heal()
        story.leads(key, 4)
        assert story.simulation.ledger.lost_by_unclean_election == 3
        kept += story.produce(key, 2)
        story.boot(2, 3)
        story.all_equal()
        story.holds(key, kept)
