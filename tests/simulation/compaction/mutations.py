"""Bugs that the simulation of a compacted partition has to find: each is planted in the real code."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker.log import cleaner
from broker.log.partition_log import PartitionLog, SealedSegments
from broker.log.producer_state import ProducerStates
from raftlog.format import BatchHeader

Plant = Callable[[pytest.MonkeyPatch], None]


def what_is_not_committed_supersedes(patch: pytest.MonkeyPatch) -> None:
    """A marker, or a sequence, goes for a newer one above the high watermark, which may be truncated."""

    def planted(self: PartitionLog, sealed: SealedSegments, now_ms: int) -> ProducerStates:
        return self.producers

    patch.setattr(PartitionLog, "producers_at_end", planted)


def no_sequence_from_before_a_marker_stays(patch: pytest.MonkeyPatch) -> None:
    """Compaction takes the numbers of the last batch before a producer's marker, so its next sequence is unknown."""
    original = ProducerStates.remembers

    def planted(self: ProducerStates, header: BatchHeader) -> bool:
        state = self.get(header.producer_id)
        return state is not None and bool(state.batches) and original(self, header)

    patch.setattr(ProducerStates, "remembers", planted)


def no_sequence_stays(patch: pytest.MonkeyPatch) -> None:
    """Compaction takes the numbers of every batch, so that a replica that copies the log knows no sequence."""
    patch.setattr(ProducerStates, "remembers", lambda self, header: False)


def any_marker_may_go(patch: pytest.MonkeyPatch) -> None:
    """Compaction removes a producer's last marker, so that a fenced producer is fenced no more."""
    patch.setattr(ProducerStates, "needs_epoch", lambda self, producer_id, epoch: False)


def open_transactions_are_compacted(patch: pytest.MonkeyPatch) -> None:
    """Compaction goes up to the high watermark, so that rows count as committed whose transaction is open."""
    patch.setattr(cleaner, "committed_end", lambda log: log.high_watermark)


MUTATIONS: list[Plant] = [
    what_is_not_committed_supersedes,
    no_sequence_from_before_a_marker_stays,
    no_sequence_stays,
    any_marker_may_go,
    open_transactions_are_compacted,
]
