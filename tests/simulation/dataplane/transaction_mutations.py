"""Planted bugs of transactions; `tests.simulation.mutations` plants them and says how they are hunted."""

from __future__ import annotations

from tests.simulation.mutations import Mutation, Rewrite

SCHEDULES = 150


def _bug(why: str, *rewrites: Rewrite, story: str | None = None) -> Mutation:
    return Mutation(why, rewrites, schedules=0 if story else SCHEDULES, story=story, kind="transactions")


TRANSACTION_MUTATIONS: dict[str, Mutation] = {
    # Epochs
    "marker with the unbumped epoch": _bug(
        "a marker carries the epoch of its transaction, not one more, so that late records are not fenced (KIP-890)",
        Rewrite(
            "broker.coordinator.transactions.marker_sender:_Job.__init__",
            "pending.producer_epoch, pending.commit",
            "pending.producer_epoch - 1, pending.commit",
        ),
    ),
    "the next transaction has the epoch of the last": _bug(
        "a decision does not raise the producer epoch, so that late requests and records hit the next transaction",
        Rewrite(
            "broker.coordinator.transactions.transaction:Transaction.completed",
            "return replace(\n        self,",
            "return replace(\n        self,\n        producer_epoch=self.producer_epoch - 1,",
        ),
    ),
    "a marker of the same epoch is applied": _bug(
        "a marker that arrives again ends the next transaction of its producer",
        Rewrite(
            "broker.log.producer_state:ProducerStates.check_markers",
            "if epoch == known and not self._ends_last(marker):",
            "if False:",
        ),
    ),
    "late records are taken": _bug(
        "a late record of a transaction that has ended is appended, and no marker will ever decide it",
        Rewrite(
            "broker.log.producer_state:ProducerStates.check",
            "if epoch < state.epoch:",
            "if epoch < state.epoch and base == 0:\n        return None\n    if epoch < state.epoch:",
        ),
    ),
    # The last stable offset
    "markers above the high watermark decide": _bug(
        "the last stable offset passes a transaction as soon as its marker is appended",
        Rewrite("broker.log.transactions:OpenTransactions.first_unstable", "if not self._undecided:", "if True:"),
    ),
    "a follower does not note transactions": _bug(
        "a follower does not note the transactions that it appends, so that it knows of none when it leads",
        Rewrite(
            "broker.log.partition_log:PartitionLog._append_run",
            "self.producers.note(header, now_ms)",
            "self.producers.note(header._replace(attributes=0), now_ms)",
        ),
    ),
    "aborted ranges are lost at a restart": _bug(
        "a restart does not load the index of aborted transactions of the active segment",
        Rewrite("broker.log.recovery:_Recovery.read_producers", "if len(txn_index):", "if False:"),
    ),
    "aborted ranges of a follower": _bug(
        "a follower keeps no index of aborted transactions, so that its readers get their records",
        Rewrite(
            "broker.log.partition_log:PartitionLog._append_run",
            "self._note_markers(markers, now_ms)",
            "self.producers.note_markers(markers, now_ms)",
        ),
    ),
    "a truncation cuts no transactions": _bug(
        "transactions whose records or markers were cut off stay open, or stay decided",
        Rewrite("broker.log.partition_log:PartitionLog._cut_producers", "self.producers = producers", "pass"),
    ),
    # The coordinator
    "a coordinator answers before it is committed": _bug(
        "a response leaves as soon as the leader has appended its records, which may still be lost",
        Rewrite("broker.coordinator.shard:Shard._look", "self._uncommitted[0].end_offset <= high_watermark", "True"),
    ),
    "markers before the decision is committed": _bug(
        "markers are sent as soon as a decision is appended, which may still be lost",
        Rewrite(
            "broker.coordinator.shard:Shard._apply",
            "effects.extend(decision.effects)",
            "self._release([each for each in decision.effects if isinstance(each.message, Notice)])\n"
            "    effects.extend(each for each in decision.effects if not isinstance(each.message, Notice))",
        ),
    ),
    "a prepared transaction times out": _bug(
        "the timeout aborts a transaction that is decided as committed, while its markers are on their way",
        Rewrite(
            "broker.coordinator.transactions.coordinator:TransactionCoordinator._write",
            "is not State.ONGOING",
            "is None",
        ),
        Rewrite(
            "broker.coordinator.transactions.coordinator:TransactionCoordinator._time_out",
            "if owner not in self._state.open:",
            "known = self._state.transactions.get(owner.transactional_id)\n"
            "    if owner not in self._state.open and (known is None or not known.is_prepared):",
        ),
        Rewrite(
            "broker.coordinator.transactions.coordinator:time_out",
            "return known.decided(",
            "if known.is_prepared:\n        return replace(known, state=State.PREPARE_ABORT)\n"
            "    return known.decided(",
        ),
    ),
    "begun before the last one is over": _bug(
        "a transaction begins while markers of the last one are missing",
        Rewrite("broker.coordinator.transactions.coordinator:add", "if known.is_prepared:", "if False:"),
        Rewrite("broker.coordinator.transactions.transaction:Transaction.added", "assert not self.is_prepared", "pass"),
    ),
    "markers are forgotten at a failover": _bug(
        "a new coordinator does not send the markers that the former one left unsent",
        Rewrite(
            "broker.coordinator.transactions.coordinator:TransactionCoordinator.loaded",
            "self._expiry_ms =",
            "self._undone.unsent.clear()\n    self._expiry_ms =",
        ),
    ),
    # Markers
    "a marker that failed counts as written": _bug(
        "a marker that a partition refused is not sent again",
        Rewrite(
            "broker.coordinator.transactions.marker_sender:MarkerSender._answered", "if error is not None:", "if False:"
        ),
    ),
    "a marker held by its leader alone": _bug(
        "a marker counts as written before it is committed, and may be lost with its leader",
        Rewrite(
            "broker.partition.partition:Partition.append_markers",
            "leading.appended(result.last_offset + 1, done, all_replicas=True)",
            "leading.appended(result.last_offset + 1, done, all_replicas=False)",
        ),
    ),
    # Clients
    "added to the transaction without waiting": _bug(
        "a client sends records before the coordinator has their partition on record",
        Rewrite(
            "tests.simulation.dataplane.transaction_producers:TransactionalProducer._added_to",
            "await added",
            "asyncio.ensure_future(added)",
        ),
    ),
    "readers do not drop what was aborted": _bug(
        "a reader of committed records does not leave out records of aborted transactions",
        Rewrite("raftlog.format.aborted:AbortedRanges.hold", "if ranges is None:", "if True:"),
    ),
    # Groups
    "offsets count while they are pending": _bug(
        "an offset is the group's before its transaction is decided",
        Rewrite(
            "broker.coordinator.groups.transactional:commit",
            "change.draft.set_pending(",
            "change.draft.set_offset(partition, committed)\n        change.draft.set_pending(",
        ),
    ),
    "offsets of aborted transactions count": _bug(
        "the marker of an abort commits the offsets that are pending",
        Rewrite("broker.coordinator.groups.transactional:end", "marker.commit\n", "True\n"),
    ),
    # Sinks
    "losers are committed": _bug(
        "a batch is committed with all of its open stages, also those that the driver did not name",
        Rewrite(
            "broker.coordinator.transactions.staging:commit_batch",
            "winners | kept,",
            "winners | kept | {p for p, stage in sink.stages.items() if stage.batch_id == request.batch_id},",
        ),
    ),
    "a batch is committed twice": _bug(
        "a batch that is committed is committed again, with other stages",
        Rewrite(
            "broker.coordinator.transactions.staging:commit_batch",
            "if request.batch_id <= sink.last_batch_id:",
            "if request.batch_id < sink.last_batch_id:",
        ),
        Rewrite(
            "broker.coordinator.transactions.staging:init_stage",
            "if request.batch_id <= sink.last_batch_id:",
            "if request.batch_id < sink.last_batch_id:",
        ),
        Rewrite(
            "broker.coordinator.transactions.transaction:Sink.state_of",
            "stage.batch_id <= self.last_batch_id",
            "stage.batch_id < self.last_batch_id",
        ),
    ),
    # Bounds of users
    "any number of transactional ids": _bug(
        "a user with rights to a prefix makes transactional ids until a coordinator has no memory left",
        Rewrite("broker.coordinator.transactions.coordinator:init", "bound.check(command.user)", "pass"),
        story="test_a_user_makes_no_more_transactional_ids_than_it_may",
    ),
    "any number of sinks": _bug(
        "a user that has made as many transactional ids as it may makes sinks instead",
        Rewrite("broker.coordinator.transactions.staging:init_stage", "bound.check(sink.user)", "pass"),
        story="test_sinks_count_as_transactional_ids",
    ),
    "any number of sinks by fences": _bug(
        "a user makes sinks without a limit by giving up attempts, or by committing empty batches",
        Rewrite(
            "broker.coordinator.transactions.coordinator:TransactionCoordinator._check_room",
            "if sink.is_gone and written:",
            "if False:",
        ),
        story="test_every_request_that_makes_a_sink_counts",
    ),
    "any number of groups in transactions": _bug(
        "a user names other groups in each transaction, whose ends groups keep, until a coordinator has no memory left",
        Rewrite("broker.coordinator.transactions.coordinator:add", "if named is not None:", "if False:"),
        story="test_the_transactions_of_a_user_name_no_more_groups_than_they_may",
    ),
    "groups that were named long ago count": _bug(
        "groups that transactions have named count for ever, so that their user is refused others for good",
        Rewrite(
            "broker.coordinator.user_bound:NamedGroups._forget",
            "if next(iter(named.values())) > wall_ms - self._counts_ms:",
            "if True:",
        ),
        story="test_the_transactions_of_a_user_name_no_more_groups_than_they_may",
    ),
    "groups of long transactions do not count": _bug(
        "a user keeps transactions open until the groups that they named count no more, and then ends all of them",
        Rewrite(
            "broker.coordinator.user_bound:NamedGroups.__init__",
            "self._counts_ms = kept_ms + open_ms",
            "self._counts_ms = kept_ms",
        ),
        story="test_the_transactions_of_a_user_name_no_more_groups_than_they_may",
    ),
    "groups of ids without a user do not count": _bug(
        "a user names groups without a limit with a transactional id that an earlier version made",
        Rewrite(
            "broker.coordinator.transactions.coordinator:add",
            "known.user or command.user",
            "known.user",
        ),
        story="test_groups_count_for_the_caller_where_a_transactional_id_has_no_user",
    ),
    "ids that have expired count": _bug(
        "transactional ids count for their user after they have expired, so that it is refused for good",
        Rewrite("broker.coordinator.user_bound:Made.changed", "if before:", "if False:"),
        story="test_what_expires_makes_room",
    ),
    "a new producer id hides the user": _bug(
        "a transactional id counts for no user any more once it has another producer id",
        Rewrite(
            "broker.coordinator.transactions.coordinator:init",
            "return _fresh(command, now_ms, known.user)",
            "return _fresh(command, now_ms, '')",
        ),
        story="test_an_id_counts_for_its_user_whatever_becomes_of_it",
    ),
}
