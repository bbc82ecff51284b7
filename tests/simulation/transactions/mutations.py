"""Bugs that the simulation has to find: each is planted in the real core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from broker.coordinator.core import Decision, Now
from broker.coordinator.transactions import coordinator, records, staging
from broker.coordinator.transactions.coordinator import Outcome, TransactionCoordinator
from broker.coordinator.transactions.state import HardState
from broker.coordinator.transactions.transaction import NONE, Sink, Stage, State, Transaction

Plant = Callable[[pytest.MonkeyPatch], None]


def ends_nothing_without_a_new_epoch(patch: pytest.MonkeyPatch) -> None:
    """EndTransaction of an empty transaction does not raise the epoch, so that its late copy may end the next one."""
    original = coordinator.end

    def planted(known: Transaction | None, request: Any, now_ms: int) -> Outcome:
        outcome = original(known, request, now_ms)
        if known is not None and known.is_idle and outcome.write is not None:
            return Outcome(coordinator._ended(known))
        return outcome

    patch.setattr(coordinator, "end", planted)


def gives_the_next_transaction_the_epoch_of_the_last(patch: pytest.MonkeyPatch) -> None:
    """A decision does not raise the epoch, so that a marker and the next transaction have the same (before KIP-890)."""
    original = Transaction.decided

    def planted(self: Transaction, commit: bool, now_ms: int, **how: bool) -> Transaction:
        return replace(original(self, commit, now_ms, **how), producer_epoch=self.producer_epoch)

    patch.setattr(Transaction, "decided", planted)


def takes_requests_of_any_epoch(patch: pytest.MonkeyPatch) -> None:
    """A late EndTransaction of an earlier epoch ends the open transaction."""
    original = coordinator.check_owner

    def planted(known: Transaction | None, transactional_id: str, producer_id: int, epoch: int) -> Transaction:
        if known is not None and known.producer_id == producer_id and epoch < known.producer_epoch:
            return known
        return original(known, transactional_id, producer_id, epoch)

    patch.setattr(coordinator, "check_owner", planted)


def does_not_fence(patch: pytest.MonkeyPatch) -> None:
    """InitProducerId keeps the epoch, so a process that was replaced can still write."""
    original = coordinator.init

    def planted(known: Transaction | None, *rest: Any) -> Outcome:
        if known is not None and known.is_idle:
            return Outcome(coordinator._begun(known))
        return original(known, *rest)

    patch.setattr(coordinator, "init", planted)


def lets_a_producer_go_on_in_its_epoch(patch: pytest.MonkeyPatch) -> None:
    """InitProducerId with a producer id and epoch gives the same ones back, so that late requests still count."""
    original = coordinator.init

    def planted(known: Transaction | None, command: Any, *rest: Any) -> Outcome:
        request = command.request
        if known is not None and known.state is State.ONGOING and request.HasField("producer_id"):
            return Outcome(coordinator._begun(known))
        return original(known, command, *rest)

    patch.setattr(coordinator, "init", planted)


def forgets_markers_at_a_failover(patch: pytest.MonkeyPatch) -> None:
    """A new coordinator does not send the markers that the former one left unsent."""
    original = TransactionCoordinator.loaded

    def planted(self: TransactionCoordinator, now: Now) -> None:
        self._undone.unsent.clear()
        original(self, now)

    patch.setattr(TransactionCoordinator, "loaded", planted)


def begins_while_markers_are_missing(patch: pytest.MonkeyPatch) -> None:
    """A transaction begins before all markers of the previous one are written."""
    original = coordinator.add

    def planted(known: Transaction | None, command: Any, now_ms: int, *rest: Any) -> Outcome:
        if known is not None and known.is_prepared:
            known = known.completed(now_ms)
        return original(known, command, now_ms, *rest)

    patch.setattr(coordinator, "add", planted)


def begins_anew_while_markers_are_missing(patch: pytest.MonkeyPatch) -> None:
    """InitProducerId does not wait until all markers of the previous transaction are written."""
    original = coordinator.init

    def planted(known: Transaction | None, *rest: Any) -> Outcome:
        if known is not None and known.is_prepared:
            known = known.completed(known.updated_ms)
        return original(known, *rest)

    patch.setattr(coordinator, "init", planted)


def aborts_what_is_prepared(patch: pytest.MonkeyPatch) -> None:
    """InitProducerId aborts a transaction that is already decided as committed."""
    original = coordinator.init

    def planted(known: Transaction | None, *rest: Any) -> Outcome:
        if known is not None and known.is_prepared:
            aborting = replace(known, state=State.PREPARE_ABORT)
            return Outcome(coordinator._concurrent("", aborting), aborting)
        return original(known, *rest)

    patch.setattr(coordinator, "init", planted)


def says_committed_of_what_timed_out(patch: pytest.MonkeyPatch) -> None:
    """A commit that comes after the timeout is answered as a success, though the transaction was aborted."""
    original = coordinator.end

    def planted(known: Transaction | None, request: Any, now_ms: int) -> Outcome:
        if known is not None and known.timed_out and request.producer_epoch == known.client_epoch:
            return Outcome(coordinator._ended(known))
        return original(known, request, now_ms)

    patch.setattr(coordinator, "end", planted)


def answers_before_the_markers(patch: pytest.MonkeyPatch) -> None:
    """EndTransaction is answered before the markers are written."""
    original = coordinator.end

    def planted(*arguments: Any) -> Outcome:
        return replace(original(*arguments), waits=False)

    patch.setattr(coordinator, "end", planted)


def takes_any_report_for_its_own(patch: pytest.MonkeyPatch) -> None:
    """A late report that the markers of an earlier transaction are written completes the present one."""
    original = TransactionCoordinator._written

    def planted(self: TransactionCoordinator, markers: Any, now: Now) -> Any:
        known = self.transactions.get(markers.transactional_id)
        if known is not None:
            markers = replace(
                markers, producer_id=known.producer_id, producer_epoch=known.producer_epoch, commit=known.commits
            )
        return original(self, markers, now)

    patch.setattr(TransactionCoordinator, "_written", planted)


def forgets_ids_that_are_not_idle(patch: pytest.MonkeyPatch) -> None:
    """A transactional id expires although markers of its transaction are missing."""
    original = TransactionCoordinator._expire

    def planted(self: TransactionCoordinator, now: Now, decision: Decision) -> None:
        for transactional_id, known in self.transactions.items():
            if known.is_prepared and known.updated_ms + 2_000 < now.wall_ms:
                decision.records.append(records.transaction_record(transactional_id, None))
        original(self, now, decision)

    patch.setattr(TransactionCoordinator, "_expire", planted)


def commits_what_is_aborted(patch: pytest.MonkeyPatch) -> None:
    """A batch is committed with a stage that has timed out."""

    def planted(self: Sink, producer_id: int) -> Stage | None:
        stage = self.stages.get(producer_id)
        return stage if stage is not None and stage.batch_id > self.last_batch_id else None

    patch.setattr(Sink, "open_stage", planted)


def commits_a_batch_twice(patch: pytest.MonkeyPatch) -> None:
    """A batch that is committed is committed again, with other stages."""
    original = staging._committed_before

    def planted(sink: Sink, batch_id: int, winners: frozenset[int], is_written: Any) -> Any:
        outcome = original(sink, batch_id, winners, is_written)
        if sink.head is None or batch_id != sink.head.last_batch_id or not winners <= sink.stages.keys():
            return outcome
        head = replace(sink.head, committing=sink.head.committing | winners)
        return replace(outcome, records=[records.sink_record(sink.sink_id, head)])

    patch.setattr(staging, "_committed_before", planted)


def commits_what_is_left_of_a_batch(patch: pytest.MonkeyPatch) -> None:
    """A batch is committed without the stages that have expired, so that their rows are missing."""
    original = staging.commit_batch

    def planted(sink: Sink, request: Any, is_written: Any, now_ms: int) -> Any:
        if request.batch_id > sink.last_batch_id:
            left = [each for each in request.producer_ids if sink.open_stage(each) is not None]
            request = type(request)(
                sink_id=request.sink_id, batch_id=request.batch_id, target=request.target, producer_ids=left
            )
        return original(sink, request, is_written, now_ms)

    patch.setattr(staging, "commit_batch", planted)


def forgets_winners_of_earlier_batches(patch: pytest.MonkeyPatch) -> None:
    """The commit of the next batch forgets stages of the previous one that still lack markers."""
    original = staging.commit_batch

    def planted(sink: Sink, request: Any, is_written: Any, now_ms: int) -> Any:
        if sink.head is not None and request.batch_id > sink.last_batch_id:
            sink = Sink(sink.sink_id, replace(sink.head, committing=frozenset()), sink.stages)
        return original(sink, request, is_written, now_ms)

    patch.setattr(staging, "commit_batch", planted)


def forgets_the_last_batch(patch: pytest.MonkeyPatch) -> None:
    """LastBatch names an earlier batch, so that a driver writes a committed one again."""
    original = staging.last_batch

    def planted(sink: Sink) -> Any:
        response = original(sink)
        response.last_batch_id = max(NONE, response.last_batch_id - 1 - response.last_batch_id % 2)
        return response

    patch.setattr(staging, "last_batch", planted)


def lets_stages_stand_for_ever_after_a_failover(patch: pytest.MonkeyPatch) -> None:
    """A new coordinator gives open transactions and stages no deadline, so that they may stay open for ever."""

    def planted(self: TransactionCoordinator, now: Now) -> None:
        self._expiry_ms = now.monotonic_ms + self._config.expiration_check_interval_ms

    patch.setattr(TransactionCoordinator, "loaded", planted)


def loses_losers(patch: pytest.MonkeyPatch) -> None:
    """A stage that lost against the one that was committed gets no marker, and stays open for ever."""
    original = HardState._note_stage

    def planted(self: HardState, sink: Sink, producer_id: int, stage: Stage) -> None:
        original(self, sink, producer_id, stage)
        if sink.state_of(producer_id, stage) is State.PREPARE_ABORT and not stage.aborting:
            self.undone.unsent = {owner: None for owner in self.undone.unsent if owner.producer_id != producer_id}

    patch.setattr(HardState, "_note_stage", planted)


MUTATIONS: list[Plant] = [
    ends_nothing_without_a_new_epoch,
    gives_the_next_transaction_the_epoch_of_the_last,
    takes_requests_of_any_epoch,
    does_not_fence,
    lets_a_producer_go_on_in_its_epoch,
    forgets_markers_at_a_failover,
    begins_while_markers_are_missing,
    begins_anew_while_markers_are_missing,
    aborts_what_is_prepared,
    says_committed_of_what_timed_out,
    answers_before_the_markers,
    takes_any_report_for_its_own,
    forgets_ids_that_are_not_idle,
    commits_what_is_aborted,
    commits_a_batch_twice,
    commits_what_is_left_of_a_batch,
    forgets_winners_of_earlier_batches,
    forgets_the_last_batch,
    lets_stages_stand_for_ever_after_a_failover,
    loses_losers,
]
