"""Bugs that the simulation has to find: each is planted in the real core.

Two more bugs need a request that comes late at exactly the worst time, so a unit test finds them
(tests/unit/broker/coordinator/groups/test_coordinator.py): a join that acknowledges partitions that it does not list,
and a join with epoch 0 that frees all partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

import pytest

from broker.coordinator.groups import change as reconcile
from broker.coordinator.groups import membership, offsets, transactional
from broker.coordinator.groups.change import Change, Draft
from broker.coordinator.groups.commands import EndTransactionOffsets
from broker.coordinator.groups.coordinator import GroupCoordinator
from broker.coordinator.groups.group import Assignment, Group
from broker.coordinator.groups.sessions import Kind, Session
from broker.coordinator.groups.topics import TopicPartition
from raftlog.errors import PartitionNotOwned

Plant = Callable[[pytest.MonkeyPatch], None]


def gives_what_is_not_free(patch: pytest.MonkeyPatch) -> None:
    """A member gets a partition before its former owner has released it. (An assertion of `Draft` catches it.)"""
    original = reconcile.reconcile

    def planted(current: Assignment, target: Any, epoch: int, let_go: Any, is_free: Any) -> Assignment:
        return original(current, target, epoch, let_go, lambda partition: True)

    patch.setattr("broker.coordinator.groups.change.reconcile", planted)


def revokes_at_once(patch: pytest.MonkeyPatch) -> None:
    """A partition is taken from a member without waiting until the member has released it."""
    original = reconcile.reconcile

    def planted(current: Assignment, target: Any, epoch: int, let_go: Any, is_free: Any) -> Assignment:
        following = original(current, target, epoch, let_go, is_free)
        return Assignment(following.member_epoch, following.previous_member_epoch, following.assigned, {})

    patch.setattr("broker.coordinator.groups.change.reconcile", planted)


def takes_any_silence_for_an_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """A heartbeat that was sent before the member knew of a partition counts as its release."""

    def heard(
        self: Session, owned: frozenset[TopicPartition] | None, pending: Set[TopicPartition]
    ) -> frozenset[TopicPartition]:
        self.owned = self.owned if owned is None else owned
        return frozenset(pending - self.owned)

    patch.setattr(Session, "heard", heard)


def gives_up_at_the_rebalance_timeout(patch: pytest.MonkeyPatch) -> None:
    """A member that misses the rebalance timeout loses all partitions at once, though it may still read them."""
    original = membership.on_deadline

    def planted(change: Change, member_id: str, timer_ms: float) -> None:
        original(change, member_id, timer_ms)
        session = change.soft.sessions.get(member_id)
        if session is not None and session.expelled:
            membership.give_up(change, member_id)

    patch.setattr(membership, "on_deadline", planted)


def gives_members_no_time_after_a_load(patch: pytest.MonkeyPatch) -> None:
    """A new coordinator removes members that have not come back within 30 % of the session timeout."""
    original = GroupCoordinator._begin

    def planted(self: GroupCoordinator, group: Any, work: Any) -> bool:
        begins = group.group_id not in self._soft
        more = original(self, group, work)
        if begins and (soft := self._soft.get(group.group_id)) is not None:
            for member_id, session in soft.sessions.items():
                session.deadline_ms -= self._context.config.session_timeout_ms * 0.7
                session.timer_ms = session.deadline_ms
                self._timers.at(session.deadline_ms, Kind.MEMBER, group.group_id, member_id)
        return more

    patch.setattr(GroupCoordinator, "_begin", planted)


def takes_commits_of_any_epoch(patch: pytest.MonkeyPatch) -> None:
    """A commit counts if the member has the partition now, even if it was sent in an earlier assignment."""

    def planted(change: Change, member_id: str, member_epoch: int, partition: TopicPartition) -> None:
        if change.draft.since(member_id, partition) is None:
            raise PartitionNotOwned

    patch.setattr(offsets, "_check_owner", planted)


def takes_commits_of_any_member(patch: pytest.MonkeyPatch) -> None:
    """A commit counts if any member of the group sends it, even for a partition of another one."""
    patch.setattr(offsets, "_check_owner", lambda *_: None)


def takes_commits_over_old_streams(patch: pytest.MonkeyPatch) -> None:
    """A commit counts even if it comes over a stream that the member has given up."""

    def planted(change: Change, to: object, member_id: str) -> Session:
        return change.soft.sessions[member_id]

    patch.setattr(membership, "session_of", planted)


def never_waits_for_the_others(patch: pytest.MonkeyPatch) -> None:
    """A partition that becomes free is never given to the member that waits for it."""
    patch.setattr(Change, "_waiting_for", lambda *_: [])


def forgets_the_assignment_that_was_due(patch: pytest.MonkeyPatch) -> None:
    """A new coordinator does not finish the rebalance that the former one began."""
    patch.setattr("broker.coordinator.groups.rebalance.after_load", lambda change: None)


def forgets_to_write_what_it_gives(patch: pytest.MonkeyPatch) -> None:
    """An assignment that frees partitions is not written to the log."""
    original = Draft.set_assignment

    def planted(self: Draft, member_id: str, assignment: Assignment | None) -> list[TopicPartition]:
        freed = original(self, member_id, assignment)
        if assignment is not None and freed:
            self.records.pop()
        return freed

    patch.setattr(Draft, "set_assignment", planted)


def gives_pending_offsets_for_committed_ones(patch: pytest.MonkeyPatch) -> None:
    """A request for stable offsets gets the offset from before an open transaction instead of an error to retry."""
    patch.setattr(offsets, "_check_stable", lambda *_: None)


def takes_late_offsets_of_a_transaction(patch: pytest.MonkeyPatch) -> None:
    """Offsets that arrive after the marker stay pending for ever, or are committed with the next transaction."""
    patch.setattr(Draft, "set_fence", lambda *_: None)


def forgets_fences_with_the_coordinator(patch: pytest.MonkeyPatch) -> None:
    """A new coordinator accepts late offsets of a transaction that has ended."""
    original = Draft.set_fence

    def planted(self: Draft, producer_id: int, fence: Any) -> None:
        original(self, producer_id, fence)
        key, value = self.records.pop()
        self.records += [(key, value), (key, None)]

    patch.setattr(Draft, "set_fence", planted)


def decides_whatever_is_pending(patch: pytest.MonkeyPatch) -> None:
    """A late marker decides the transaction that is open by then."""

    def ended(group: Group, marker: EndTransactionOffsets) -> list[TopicPartition]:
        return list(group.pending.get(marker.producer_id, {}))

    def end(change: Change, marker: EndTransactionOffsets, piece: Any, *, is_first: bool) -> None:
        for partition in piece:
            pending = change.group.pending[marker.producer_id][partition]
            if marker.commit:
                change.draft.set_offset(partition, pending.committed)
            change.draft.set_pending(marker.producer_id, partition, None)

    patch.setattr(transactional, "ended", ended)
    patch.setattr(transactional, "end", end)


def commits_what_is_to_be_aborted(patch: pytest.MonkeyPatch) -> None:
    """The marker of an abort commits the offsets of its transaction."""
    original = transactional.end

    def planted(change: Change, marker: EndTransactionOffsets, piece: Any, *, is_first: bool) -> None:
        original(change, replace(marker, commit=True), piece, is_first=is_first)

    patch.setattr(transactional, "end", planted)


def keeps_pending_offsets_in_memory(patch: pytest.MonkeyPatch) -> None:
    """The pending offsets of a transaction are lost when the coordinator moves (as in redpanda #6018)."""
    original = GroupCoordinator.loaded

    def planted(self: GroupCoordinator, now: Any) -> None:
        for group in self.groups.values():
            group.pending, group.pending_at = {}, {}
        original(self, now)

    patch.setattr(GroupCoordinator, "loaded", planted)


TRANSACTION_MUTATIONS: list[Plant] = [
    gives_pending_offsets_for_committed_ones,
    takes_late_offsets_of_a_transaction,
    forgets_fences_with_the_coordinator,
    decides_whatever_is_pending,
    commits_what_is_to_be_aborted,
    keeps_pending_offsets_in_memory,
]

MUTATIONS: list[Plant] = [
    gives_what_is_not_free,
    revokes_at_once,
    takes_any_silence_for_an_acknowledgement,
    gives_up_at_the_rebalance_timeout,
    gives_members_no_time_after_a_load,
    takes_commits_of_any_epoch,
    takes_commits_of_any_member,
    takes_commits_over_old_streams,
    never_waits_for_the_others,
    forgets_the_assignment_that_was_due,
    forgets_to_write_what_it_gives,
]
