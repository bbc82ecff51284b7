"""Offsets that are committed with a transaction (KIP-98, KIP-447): pending, then the group's, or gone.

    commit offsets ─▶ pending ─▶ marker of a commit ─▶ the group's offset, unless a later one was committed meanwhile
                              └▶ marker of an abort ─▶ forgotten

Pending offsets are separate records, by producer id, so that compaction keeps them until the marker, a command here,
turns them into offsets or removes them. Every transaction has its own epoch (KIP-890), and its marker the next one:

    offsets of epoch      below the fence                  InvalidProducerEpoch: their transaction is over
                          below that of pending ones       InvalidProducerEpoch: a later transaction is open
                          above that of pending ones       ConcurrentTransactions: the marker of those is on its way
    marker of epoch m     pending of m - 1                 decided
                          pending of an epoch below        forgotten: a transaction that ended without naming the group
                          pending of m or above            of a later transaction: not touched
                          fence at m or above              a repeat

The fence is the first record of a decision, so no more offsets of the transaction are accepted once a part of the
decision is in the log. If the coordinator dies in between, the repeated marker completes the decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Final

from broker.coordinator.groups import offsets
from broker.coordinator.groups.change import Change
from broker.coordinator.groups.commands import EndTransactionOffsets
from broker.coordinator.groups.group import Committed, Fence, Group, Pending, kept_bytes
from broker.coordinator.groups.topics import TopicPartition
from raftlog.errors import (
    BrokerOverloaded,
    ConcurrentTransactions,
    FencedInstanceId,
    InvalidProducerEpoch,
    RaftlogError,
    UnknownMemberId,
    to_wire,
)
from raftlog.v1 import group_pb2

MAX_TRANSACTIONS: Final = 10_000
"""The most producers with pending offsets in a group, so that invented ids cannot fill the coordinator's memory."""
_NAMED: Final = 3


def commit(
    change: Change, request: group_pb2.CommitTransactionOffsetsRequest, piece: Iterable[group_pb2.CommitOffset]
) -> list[group_pb2.CommitOffsetResult]:
    """Add offsets to a transaction; return a result for each of `piece`, in order.

    Raises:
        UnknownMemberId, FencedMemberEpoch, FencedInstanceId: the member may commit none of them, as in `offsets`.
        InvalidProducerEpoch, ConcurrentTransactions, BrokerOverloaded: this transaction may commit none of them.
        PolicyViolation: the offsets of the user's groups would take too much.
    """
    _check_member(change, request)
    _check_producer(change, request.producer_id, request.producer_epoch)
    results = []
    accepted: list[tuple[TopicPartition, Committed]] = []
    for offset in piece:
        result = group_pb2.CommitOffsetResult()
        try:
            partition, committed = offsets.read(change, request.member_id, request.member_epoch, offset)
            before = change.draft.offsets.get(partition)
            if before is not None and committed.committed_at_ms < before.committed_at_ms:
                committed = replace(committed, committed_at_ms=before.committed_at_ms)
            accepted.append((partition, committed))
        except RaftlogError as error:
            result.error.CopyFrom(to_wire(error))
        results.append(result)
    change.context.kept.check(change.draft.user, sum(kept_bytes(committed) for _, committed in accepted))
    for partition, committed in accepted:
        change.draft.set_pending(request.producer_id, partition, Pending(committed, request.producer_epoch))
    return results


def _check_member(change: Change, request: group_pb2.CommitTransactionOffsetsRequest) -> None:
    try:
        offsets.check_member(
            change, request.member_id, request.member_epoch, request.instance_id, commits=True, transactional=True
        )
    except UnknownMemberId as error:
        if request.member_id:
            raise
        raise UnknownMemberId(f"{error}: send them with the consumer's group metadata") from None
    if change.soft.classic is not None:
        return  # checked with the others
    instance = change.draft.instances.get(request.instance_id) if request.instance_id else request.member_id
    if instance != request.member_id:
        raise FencedInstanceId(
            f"the instance {request.instance_id!r} of {change.group_id!r} is another member now: join again"
        )


def _check_producer(change: Change, producer_id: int, producer_epoch: int) -> None:
    group = change.group
    fence = group.fences.get(producer_id)
    if fence is not None and producer_epoch < fence.producer_epoch:
        raise InvalidProducerEpoch(
            f"the transaction of producer {producer_id} with epoch {producer_epoch} has ended for the group "
            f"{group.group_id!r}; the epoch is {fence.producer_epoch} now"
        )
    pending = group.pending.get(producer_id)
    if pending is None:
        if len(group.pending) >= MAX_TRANSACTIONS:
            raise BrokerOverloaded(
                f"{len(group.pending)} open transactions have offsets of the group {group.group_id!r} pending, which "
                "is as many as may be; try again"
            )
        return
    pending_epoch = next(iter(pending.values())).producer_epoch
    if producer_epoch < pending_epoch:
        raise InvalidProducerEpoch(
            f"producer {producer_id} has a transaction open in epoch {pending_epoch}, and this is of {producer_epoch}"
        )
    if producer_epoch > pending_epoch:
        raise ConcurrentTransactions(
            f"what became of the transaction of producer {producer_id} with epoch {pending_epoch} is not known to the "
            f"group {group.group_id!r} yet; try again"
        )


def ended(group: Group, marker: EndTransactionOffsets) -> list[TopicPartition]:
    """Return the partitions that a marker decides about."""
    pending = group.pending.get(marker.producer_id, {})
    return [partition for partition, each in pending.items() if each.producer_epoch < marker.producer_epoch]


def end(change: Change, marker: EndTransactionOffsets, piece: Iterable[TopicPartition], *, is_first: bool) -> None:
    """Decide the pending offsets in `piece`. The first piece ends the transaction for all other offsets."""
    group, producer_id = change.group, marker.producer_id
    if is_first:
        fence = group.fences.get(producer_id)
        if fence is None or fence.producer_epoch < marker.producer_epoch:
            change.draft.set_fence(producer_id, Fence(marker.producer_epoch, change.now.wall_ms))
    for partition in piece:
        pending = group.pending[producer_id][partition]
        if (
            marker.commit
            and pending.producer_epoch == marker.producer_epoch - 1
            and _counts(change, partition, pending)
        ):
            change.draft.set_offset(partition, pending.committed)
        change.draft.set_pending(producer_id, partition, None)


def _counts(change: Change, partition: TopicPartition, pending: Pending) -> bool:
    """Whether a pending offset becomes the group's: the topic exists, and no later commit was made meanwhile."""
    if change.context.topics.by_id(partition[0]) is None:
        return False
    before = change.draft.offsets.get(partition)
    return before is None or pending.committed.committed_at_ms >= before.committed_at_ms


def pending_refusal(group: Group) -> str:
    """Return why a group with pending offsets cannot be deleted."""
    producer_ids = sorted(group.pending)
    named = ", ".join(map(str, producer_ids[:_NAMED])) + (", ..." if len(producer_ids) > _NAMED else "")
    return (
        f"open transactions have offsets of the group {group.group_id!r} pending (producer id {named}): wait until "
        "they have ended, or abort them (raftlog txn list)"
    )


def may_forget(group: Group, retention_ms: int, wall_ms: int) -> bool:
    """Whether `forget` has to look at a group: its oldest fence is the first, unless the clock was set back since."""
    oldest = next(iter(group.fences.values()), None)
    return oldest is not None and not wall_ms - retention_ms < oldest.ended_at_ms <= wall_ms


def forget(change: Change, most: int) -> bool:
    """Forget fences that are old enough, `most` at a time; return whether there are more.

    Not that of a producer with pending offsets: a late marker may still be about them.
    """
    before_ms = change.now.wall_ms - change.context.config.producer_id_expiration_ms
    group = change.group
    aged = (
        producer_id
        for producer_id, fence in group.fences.items()
        if fence.ended_at_ms <= before_ms and producer_id not in group.pending
    )
    old = list(islice(aged, most + 1))
    for producer_id in old[:most]:
        change.draft.set_fence(producer_id, None)
    return len(old) > most
