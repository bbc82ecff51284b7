"""Planted bugs of replication; `tests.simulation.mutations` plants them and says how they are hunted."""

from __future__ import annotations

from tests.simulation.mutations import Mutation, Rewrite

SCHEDULES = 40
"""Within so many any mixture of faults shows a bug that has no story of its own."""


def _bug(why: str, *rewrites: Rewrite, story: str | None = None) -> Mutation:
    return Mutation(why, rewrites, schedules=0 if story else SCHEDULES, story=story, kind="brokers")


BROKER_MUTATIONS: dict[str, Mutation] = {
    # What a replica holds
    "held before fsync": _bug(
        "a record counts as durable once it is in the page cache (nats #7564)",
        Rewrite(
            "broker.log.flush:Flushing.durable_end_offset",
            "return self._log.flushed_end_offset",
            "return self._log.log_end_offset",
        ),
    ),
    "an empty log for a missing one": _bug(
        "a replica whose log directory has vanished begins with an empty log, counts as in sync, and leads",
        Rewrite("broker.log.manager:LogManager._list_missing", "if self._unread_dirs:", "if True:"),
        story="test_a_replica_whose_log_vanished_never_leads_with_an_empty_one",
    ),
    "flush of what was truncated": _bug(
        "a flush that began before a truncation counts for what was appended after it",
        Rewrite(
            "broker.log.partition_log:PartitionLog.finish_flush",
            "if ticket.truncations == self._truncations and not self.closed:",
            "if not self.closed:",
        ),
        story="test_a_flush_of_what_was_truncated_counts_for_nothing",
    ),
    "acknowledged by the leader alone": _bug(
        "acks=all is answered when the leader holds the record",
        Rewrite(
            "broker.partition.leader_term:Leading.appended",
            "(self._acks.committed if all_replicas else self._acks.durable).wait(log_end_offset, answer)",
            "self._acks.durable.wait(log_end_offset, answer)",
        ),
    ),
    "no lease asked for": _bug(
        "a leader answers by its metadata only, without a lease",
        Rewrite("broker.partition.leader_term:Leading.advance", "if not self._lease.valid():", "if False:"),
        Rewrite("broker.partition.partition:Partition.check_serving", "if not self._lease.valid():", "if False:"),
    ),
    "answered by a later leadership": _bug(
        "requests that wait when a leadership ends are acknowledged by the high watermark of the next term",
        Rewrite("broker.partition.partition:Partition.follow", "self._acks.fail(refusal)", "pass"),
        Rewrite("broker.partition.partition:Partition.resign", "self._acks.fail(reason)", "pass"),
        Rewrite("broker.partition.partition:Partition.lead", "self._acks.fail(over)", "pass"),
        story="test_who_waits_for_a_deposed_leader_is_not_answered_by_its_next_term",
    ),
    "a topic under the id asked for": _bug(
        "a late copy of a request to create a deleted topic creates it with the same id, and it gets the old logs",
        Rewrite(
            "raftmeta.decide.topics:_new_topic",
            "if metadata_version(image) >= OWN_TOPIC_ID_LEVEL:",
            "if False:",
        ),
        story="test_a_topic_made_again_by_a_late_request_does_not_get_the_logs_of_the_first_one",
    ),
    # Where logs part
    "truncated by the high watermark": _bug(
        "a follower cuts its log to its own high watermark before it follows, and loses committed records (KIP-101)",
        Rewrite(
            "broker.partition.follower_term:Following.begin",
            "self._flushing.catch_up()",
            "self._log.truncate_to(self._log.high_watermark, now_ms=0)",
        ),
        story="test_kip_101_first_scenario_a_follower_truncates_and_becomes_the_leader",
    ),
    "never truncated": _bug(
        "a follower keeps records that its leader does not have",
        Rewrite(
            "broker.partition.follower_term:Following.truncate",
            "log.truncate_to(offset, now_ms=self._clock.now_ms())",
            "pass",
        ),
        story="test_kafka_7164_a_follower_that_missed_epochs_still_truncates",
    ),
    "taken on without a look": _bug(
        "a leader takes a follower's log for a prefix of its own without comparing the last epoch (KIP-101)",
        Rewrite(
            "broker.partition.leader_term:Leading.open_replica",
            "if isinstance(opening, Accepted):",
            "opening = Accepted() if fetch_offset <= log.log_end_offset else opening\n"
            "    if isinstance(opening, Accepted):",
        ),
        story="test_kip_101_second_scenario_logs_part_after_a_power_cut_of_both",
    ),
    "epoch of the answer not looked at": _bug(
        "a follower cuts its log at the offset that the leader names, whatever its own epochs say (KIP-279)",
        Rewrite(
            "broker.partition.follower_term:truncation_offset",
            "target = min(diverging.end_offset, own.end_offset)",
            "target = min(diverging.end_offset, log_end_offset - 1)",
        ),
        Rewrite(
            "broker.partition.leader_term:check_prefix",
            "cache.epoch_for(fetch_offset - 1) == last_fetched_epoch",
            "cache.latest_epoch >= last_fetched_epoch",
        ),
        story="test_kip_279_two_failovers_in_a_row",
    ),
    # The high watermark
    "committed ISR only": _bug(
        "the high watermark does not wait for a follower that is about to join the ISR (the maximal ISR of KIP-497)",
        Rewrite(
            "replication.leader:LeaderState._count_members",
            "maximal = self._isr.maximal",
            "maximal = self._isr.members",
        ),
        story="test_who_is_about_to_join_counts_already",
    ),
    "too few in sync": _bug(
        "the high watermark moves although the ISR is smaller than min.insync.replicas (KIP-966)",
        Rewrite(
            "replication.leader:LeaderState._count_members",
            "self._may_commit = len(self._isr.members) >= enough",
            "self._may_commit = True",
        ),
    ),
    "high watermark at the log end": _bug(
        "a new leader takes its whole log for committed",
        Rewrite(
            "broker.partition.leader_term:Leading.__init__",
            "high_watermark=min(log.high_watermark, durable)",
            "high_watermark=durable",
        ),
    ),
    "followers are not waited for": _bug(
        "the high watermark rises without an in-sync follower that has not yet fetched in this leader epoch",
        Rewrite(
            "replication.leader:high_watermark",
            "if durable is None:\n            return current",
            "if durable is None:\n            continue",
        ),
        story="test_a_high_watermark_that_is_behind_does_not_send_readers_back",
    ),
    # Idempotence
    "producers not read again": _bug(
        "a truncation leaves the producer state as it was, so that a batch that was cut off is taken for a duplicate",
        Rewrite("broker.log.partition_log:PartitionLog._cut_producers", "self.producers = producers", "pass"),
        story="test_a_batch_that_was_truncated_is_no_duplicate",
    ),
    "snapshots of what was cut": _bug(
        "a truncation leaves producer snapshots of records that were cut off, and a restart loads them",
        Rewrite("broker.log.producer_state:SnapshotFiles.remove_gone", "if self._gone:", "if False:"),
        story="test_a_snapshot_of_what_was_truncated_counts_for_nothing",
    ),
    "denied at once": _bug(
        "a new leader says that a batch is lost, though another replica in sync may have it",
        Rewrite("broker.partition.partition:Partition._appended_before", "if not leading.may_deny:", "if False:"),
        story="test_a_new_leader_does_not_deny_what_another_replica_may_have",
    ),
    "denied by the high watermark": _bug(
        "a term that begins at its high watermark counts as confirmed, though a replica in sync may have more",
        Rewrite(
            "broker.partition.leader_term:Leading.may_deny",
            "self.has_confirmed and self.has_enough_in_sync and self.state.has_heard_all_in_sync",
            "self.has_confirmed",
        ),
        story="test_a_new_leader_does_not_deny_what_another_replica_may_have",
    ),
    "a refusal that is not kept": _bug(
        "late copies of a batch that was refused as lost, and of the batches behind it, are appended all the same",
        Rewrite("broker.partition.leader_term:Leading.has_denied", "return producer_epoch <=", "return False and"),
        story="test_a_late_copy_of_a_missing_batch_lets_nothing_in_that_was_denied",
    ),
    "no batches remembered": _bug(
        "a broker does not recognise a batch that it has appended, so that a retry writes it twice",
        Rewrite(
            "broker.log.producer_state:ProducerStates._known",
            "for batch in reversed(state.batches):",
            "raise OutOfOrderSequence('forgotten')\n    for batch in ():",
        ),
    ),
    "duplicates before they are committed": _bug(
        "a batch that is sent again is acknowledged before the first copy is committed, and may be lost",
        Rewrite("broker.partition.leader_term:Leading.repeated", "if end_offset <= reached:", "if True:"),
    ),
    "a follower does not note": _bug(
        "a follower does not keep producer state, so that it recognises no retries when it leads",
        Rewrite(
            "broker.log.partition_log:PartitionLog._append_run",
            "if header.producer_id >= 0:",
            "if False:",
        ),
    ),
    "producers are not recovered": _bug(
        "a restarted broker does not load its producer state, so that a retry writes a batch twice",
        Rewrite("broker.log.recovery:_Recovery.read_producers", "recovered.producers = ", "_ = "),
    ),
    # The ISR
    "joins below the high watermark": _bug(
        "a follower joins the ISR before it holds what is committed",
        Rewrite(
            "replication.leader:LeaderState._may_join",
            "and durable >= self._high_watermark\n        and durable >= self.epoch_start_offset",
            "",
        ),
        Rewrite(
            "replication.leader:LeaderState._holds_committed",
            "return durable is None or durable >= self._high_watermark",
            "return True",
        ),
    ),
    "no broker epoch": _bug(
        "AlterPartition does not compare broker epochs, so that a broker joins the ISR by what it had before a restart"
        " (KIP-903)",
        Rewrite(
            "raftmeta.decide.leadership:_check_members", "if member.broker_epoch != broker.broker_epoch:", "if False:"
        ),
        story="test_kip_903_a_broker_that_was_restarted_does_not_join_by_what_it_was_before",
    ),
    "no partition epoch": _bug(
        "AlterPartition does not compare partition epochs, so that a late change of the ISR is applied",
        Rewrite(
            "raftmeta.decide.leadership:_check_versions",
            "if command.partition_epoch != partition.partition_epoch:",
            "if False:",
        ),
        story="test_a_late_change_of_the_isr_is_refused",
    ),
    "one refusal for a whole batch": _bug(
        "a refused change of an ISR has all changes refused that travel with it",
        Rewrite(
            "raftmeta.decide:alter_partitions",
            "        except RaftlogError as error:\n",
            "        except RaftlogError as error:\n            raise\n",
        ),
        story="test_a_refused_change_of_an_isr_spoils_no_other_in_its_batch",
    ),
    "unclean stop forgotten": _bug(
        "a broker that may have lost records in an unclean stop stays in sync (Fluss #662, KAFKA-15586)",
        Rewrite("raftmeta.decide.brokers:_may_lack", "return False, tuple(sorted(lacking))", "return False, ()"),
        story="test_a_replica_that_lost_its_page_cache_is_not_elected",
    ),
    "every unclean stop is a loss": _bug(
        "a broker leaves the ISR after an unclean stop though it had fsynced all that it acknowledged",
        Rewrite("raftmeta.decide.brokers:_may_lack", "or not (clean or synced)", "or not clean"),
        story="test_two_of_three_lead_on_after_all_lost_their_power_at_once",
    ),
    "an ISR left to the dead": _bug(
        "brokers that return after all failed leave the ISR to one that never comes back, so that no broker can lead",
        Rewrite("raftmeta.elections:leaves_it_to", "return isr < set(partition.isr) and isr <= silent", "return False"),
        story="test_two_of_three_lead_on_after_all_and_the_controller_lost_their_power_at_once",
    ),
    "no note of what is not fsynced": _bug(
        "with flush.messages above 1 records count before they are fsynced, and the log directory does not say so",
        Rewrite("broker.log.log_dir:store_served", "sorted(served.unsynced_topic_ids)", "()"),
        story="test_a_replica_that_lost_its_page_cache_is_not_elected",
    ),
    "any mark vouches": _bug(
        "a broker that starts with an older copy of its disk counts as in sync",
        Rewrite("raftmeta.decide.brokers:_may_lack", "and command.synced_broker_epoch == known.broker_epoch", ""),
        story="test_an_older_copy_of_a_disk_counts_for_nothing",
    ),
    "a full disk is kept quiet": _bug(
        "a leader whose disk is full goes on leading although another replica could take writes",
        Rewrite("broker.replicas.isr:FullStorage.look", "known.storage_full == full", "True"),
        story="test_a_leader_whose_disk_is_full_lets_another_one_lead",
    ),
    "eligible for ever": _bug(
        "a replica that left the ISR stays eligible as leader while the others commit without it (KIP-966)",
        Rewrite(
            "raftmeta.elections:eligible_replicas",
            "if len(isr) >= min(image.min_insync_replicas(topic), len(before.replicas)):",
            "if False:",
        ),
        story="test_who_left_the_isr_is_not_eligible_while_the_others_commit",
    ),
}
