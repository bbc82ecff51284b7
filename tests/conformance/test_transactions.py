"""What Kafka's improvement proposals ask of transactions in a partition's log, in our words, proved on a real one."""

from __future__ import annotations

from random import Random

import pytest

from broker.log.transactions import MarkerFate
from raftlog.errors import InvalidProducerEpoch, InvalidTxnState
from raftlog.format import Attributes, parse_batch
from raftlog.format.control import Marker
from tests.support.batches import batch_of
from tests.support.transaction_histories import TransactionHistory, chain_of

TRANSACTIONAL = int(Attributes.TRANSACTIONAL)


def late_batch(producer_id: int, epoch: int, sequence: int = 0) -> bytes:
    """A record of a transaction as its producer has sent it."""
    return batch_of(
        b"late", producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, attributes=TRANSACTIONAL
    )


def visible(history: TransactionHistory) -> list[int]:
    """Return the offsets that a reader of committed records gets from the leader."""
    log = history.log
    return history._visible(log, log.log_start_offset, log.last_stable_offset)


# KIP-98


def test_kip_98_the_last_stable_offset() -> None:
    """Below the last stable offset it is decided of every transactional record whether it is committed or aborted."""
    history = TransactionHistory()
    history.produce(-1)
    history.produce(1)
    history.produce(2)
    history.mark([2], True)
    history.settle()
    assert history.log.last_stable_offset == 1
    history.mark([1], False)
    assert history.log.last_stable_offset == 1, "the last stable offset must wait until the marker is committed"
    history.settle()
    assert history.log.last_stable_offset == history.log.high_watermark == 5
    history.check()


def test_kip_98_only_non_transactional_or_committed_ones_are_read() -> None:
    """Readers of committed records get those of no transaction and those of committed ones, in the log's order."""
    history = TransactionHistory()
    for producer_id in (1, 2, -1, 1, 2):
        history.produce(producer_id)
    history.mark([1], True)
    history.mark([2], False)
    history.settle()
    assert visible(history) == [0, 2, 3]


def test_kip_98_aborted_transactions_of_a_fetch() -> None:
    """A fetch names the aborted transactions that have records in its range, and no others."""
    history = TransactionHistory()
    for producer_id in (1, 2, 3):
        history.produce(producer_id)
        history.mark([producer_id], producer_id == 2)
    history.settle()
    found = history.log.aborted_transactions
    assert [each[:3] for each in found(0, 6)] == [(1, 0, 1), (3, 4, 5)]
    assert [each[:3] for each in found(0, 4)] == [(1, 0, 1)]
    assert found(2, 4) == []
    assert [each[:3] for each in found(5, 6)] == [(3, 4, 5)]


def test_kip_98_the_transaction_index_is_rebuilt() -> None:
    """The index of aborted transactions stands for nothing that the log does not say."""
    for how in (0, 1):
        history = TransactionHistory()
        for number in range(12):
            history.produce(number % 3, 3)
            history.mark([number % 3], False)
        history.settle()
        assert history.log.segment_count > 3
        before = [each[:3] for each in history.log.aborted_transactions(0, history.high_watermark)]
        history.harm(history.leader, how)
        assert [each[:3] for each in history.log.aborted_transactions(0, history.high_watermark)] == before
        history.check()


def test_kip_98_state_survives_the_loss_of_power() -> None:
    """Snapshots save reading the log; with or without them, what is open stays open."""
    for seed in range(8):
        history = TransactionHistory()
        history.produce(1)
        for number in range(9):
            history.produce(2 + number % 2, 2)
            history.mark([2 + number % 2], number % 3 == 0)
        history.settle()
        history.produce(4)
        history.restart(history.leader, 2 + seed)
        history.check()
        history.chain = chain_of(history.log)
        history.check_log(history.log)
        assert history.log.last_stable_offset == 0, (
            f"seed {Random(seed)}: the last stable offset must stay before the open transaction of producer 1"
        )


# KIP-890


def test_kip_890_a_late_batch_never_joins_the_next_transaction() -> None:
    """A record of one transaction that comes late is not added to the next: each has an epoch of its own."""
    history = TransactionHistory()
    history.produce(1)
    history.mark([1], True)
    log = history.log
    with pytest.raises(InvalidProducerEpoch):
        log.check_producer(parse_batch(late_batch(1, 0, 1)), history.now_ms)
    history.produce(1)
    with pytest.raises(InvalidProducerEpoch):
        log.check_producer(parse_batch(late_batch(1, 0, 1)), history.now_ms)


def test_kip_890_a_late_batch_does_not_open_a_hanging_transaction() -> None:
    """A record that arrives after its transaction was aborted begins none, even if the partition did not know the
    producer."""
    history = TransactionHistory()
    markers = [Marker(7, 1, False, 0)]
    assert history.log.check_markers(markers, history.now_ms) == [MarkerFate.APPENDED]
    history.log.append_markers(markers, leader_epoch=0, now_ms=history.now_ms)
    with pytest.raises(InvalidProducerEpoch):
        history.log.check_producer(parse_batch(late_batch(7, 0)), history.now_ms)
    assert history.log.first_unstable_offset is None


def test_kip_890_a_late_marker_does_not_end_the_next_transaction() -> None:
    """The marker of one transaction that comes late is not applied to the next, whose epoch it has."""
    history = TransactionHistory()
    history.produce(1)
    history.mark([1], False)
    history.produce(1)
    assert history.log.check_markers([Marker(1, 1, False, 0)], history.now_ms) == [MarkerFate.REPEATED]
    [other] = history.log.check_markers([Marker(1, 1, True, 0)], history.now_ms)
    assert isinstance(other, InvalidTxnState), (
        "a marker that contradicts the decision must be refused, not taken for a repetition"
    )
    history.mark([1], True, 0)
    history.mark([1], False, -1)
    history.settle()
    assert history.log.last_stable_offset == 2
    history.mark([1], True)
    history.settle()
    assert visible(history) == [2]


def test_kip_890_the_epoch_runs_to_its_end() -> None:
    """The last epoch is a marker's (KAFKA-18660)."""
    history = TransactionHistory()
    history.mark([1], True, 32_766)
    history.produce(1)
    history.mark([1], True)
    history.settle()
    state = history.log.producers.get(1)
    assert state is not None
    assert state.epoch == 32_767
    assert visible(history) == [1]
