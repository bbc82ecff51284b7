"""Planted bugs of the SDK; `tests.simulation.mutations` plants them and says how they are hunted."""

from __future__ import annotations

from tests.simulation.mutations import Mutation, Rewrite

SCHEDULES = 20
"""Within so many any mixture of faults shows a bug."""


def _bug(why: str, *rewrites: Rewrite, story: str | None = None) -> Mutation:
    return Mutation(why, rewrites, schedules=SCHEDULES, story=story, kind="cluster")


def _in(target: str, old: str, new: str) -> Rewrite:
    return Rewrite(f"raftlog.{target}", old, new)


CLUSTER_MUTATIONS: dict[str, Mutation] = {
    # Producers
    "acknowledged when it is sent": _bug(
        "a delivery is reported as done once its request is sent, as with acks=0",
        _in(
            "_client.producer:ProduceCall._write",
            "if message.head.acks == log_pb2.NO_ACK:",
            "if True:",
        ),
    ),
    "sent again under new numbers": _bug(
        "a batch that is sent again after a broken connection gets a new sequence, so that no broker recognises it",
        _in(
            "_core.accumulator:PartitionQueue.recovered",
            "if self.wants_number:",
            "if self.wants_number or (self.numbering is not None and self.numbering.has_id):",
        ),
    ),
    # Consumers
    "aborted ranges not looked at": _bug(
        "a consumer that reads only committed records gets those of aborted transactions",
        _in(
            "_client.consumer:ConsumerEngine.received",
            "AbortedRanges(head.aborted) if head.aborted else None",
            "None",
        ),
    ),
    "position advanced before the delivery": _bug(
        "the position moves to the end of a batch when its first records are handed out, so that the rest is skipped",
        _in(
            "_core.positions:PartitionState._take",
            "self._advance(rows.offset_after(max_rows))",
            "self._advance(rows.header.next_offset)",
        ),
    ),
    "frames of a former subscription": _bug(
        "records that were fetched before a seek, or over a broken connection, are handed out for the new position",
        _in(
            "_core.positions:Positions.receive",
            "state.subscription_id != fetched.subscription_id or ",
            "",
        ),
        _in(
            "_core.positions:PartitionState.unsubscribe",
            "self.frames.clear()\n    self.source = self.rows = None",
            "self.rows = None; stale = []",
        ),
    ),
    # Members
    "committed while it is handed out": _bug(
        "auto-commit commits records that a poll is only about to return, so that a crash skips them",
        _in(
            "aio._consumer:Consumer._wait_for_rows",
            "rows = engine.take(max_rows, marks)",
            "rows = engine.take(max_rows, marks)\n"
            "        if rows and group is not None and group.progress.auto:\n"
            "            group.progress._let_go()\n"
            "            group.progress.auto_commit(math.inf)",
        ),
    ),
    "a session that never ends": _bug(
        "a member that is cut off keeps reading partitions that the group has given to others",
        _in(
            "_core.membership:Membership._answered",
            "self.session_deadline_ms = sent_ms + self._session_timeout_ms * _MARGIN",
            "self.session_deadline_ms = math.inf",
        ),
        story="test_a_member_that_is_cut_off_has_let_go_when_its_partition_is_given_away",
    ),
    "let go before it is": _bug(
        "a member tells the group that it has released a partition that it still reads",
        _in(
            "_core.membership:Membership._claims",
            "for part, assigned in self.assigned.items()} | self.owned",
            "for part, assigned in self.assigned.items()}",
        ),
    ),
    # Transactions and stages
    "committed before the flush": _bug(
        "a transaction is committed although not all of its records are acknowledged",
        _in(
            "_client.producer:Transactions.commit",
            "await self._flush(None if timeout is None else deadline)",
            "pass",
        ),
    ),
    "finished before the flush": _bug(
        "a stage gives its token although not all of its records are acknowledged",
        _in("_client.stages:StageWork.finish", "await self.engine.drain()", "pass"),
    ),
    # What a hostile client does with producer ids
    "producer ids without a check": _bug(
        "a plain batch is accepted with any producer id: one that was never issued, or one of another user",
        Rewrite(
            "broker.coordinator.transactions.verifier:ProducerChecks.check_id",
            "self._check_bound(self._principal, producer_id)",
            "pass",
        ),
    ),
    "another's id under one's own name": _bug(
        "a transactional batch may carry any producer id, as long as the client may use the transactional id that it "
        "names, and the transaction is open in the partition",
        Rewrite(
            "broker.coordinator.transactions.verifier:ProducerChecks._check_transactional",
            "self._check_bound(owner, producer_id)",
            "pass",
        ),
        Rewrite(
            "broker.coordinator.transactions.verifier:ProducerChecks.verify",
            "if is_bound and partition.verified_owners.get(producer_id) == (producer_epoch, owner):",
            "if is_bound:",
        ),
    ),
    "any owner of an open transaction": _bug(
        "a leader does not compare the owner for which its coordinator confirmed an open transaction, so that a client "
        "whose transactional id has the same tag writes into it",
        Rewrite(
            "broker.coordinator.transactions.verifier:ProducerChecks.verify",
            "partition.verified_owners.get(producer_id) == (producer_epoch, owner):",
            "partition.verified_owners.get(producer_id, (-1, owner))[0] == producer_epoch:",
        ),
    ),
    "transactions that no coordinator knows": _bug(
        "a transaction begins in a partition although its coordinator was not asked (KIP-890)",
        Rewrite(
            "broker.coordinator.transactions.verifier:ProducerChecks.verify",
            "if owner is None or not self._is_enforced:",
            "if True:",
        ),
    ),
}
