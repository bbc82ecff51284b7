"""What Kafka's improvement proposals and its source say of the transaction coordinator, each sentence proved on
`broker.coordinator.transactions`."""

from __future__ import annotations

import pytest

from broker.coordinator.transactions import coordinator, records, transaction
from broker.coordinator.transactions.transaction import State
from raftlog.errors import (
    ConcurrentTransactions,
    InvalidProducerEpoch,
    InvalidTxnState,
    ProducerFenced,
    TransactionAbortable,
)
from tests.support.transaction_driver import Producer, TransactionDriver, parts

# KIP-98


def test_kip_98_a_zombie_is_fenced() -> None:
    """ "Bumps up the epoch of the PID, so that the any previous zombie instance of the producer is fenced off and
    cannot move forward with its transaction" (KIP-98, 2.1)."""
    driver = TransactionDriver()
    zombie = driver.init()
    producer = driver.init()
    assert producer.producer_id == zombie.producer_id
    assert producer.producer_epoch > zombie.producer_epoch
    with pytest.raises(ProducerFenced):
        driver.add(zombie, 0)
    assert isinstance(driver.end(zombie).got[0], ProducerFenced)


@pytest.mark.parametrize("decided", [True, False])
def test_kip_98_what_was_left_incomplete_is_rolled_forward_or_back(decided: bool) -> None:
    """ "Recovers (rolls forward or rolls back) any transaction left incomplete by the previous instance of the
    producer" (KIP-98, 2.1)."""
    driver = TransactionDriver()
    before = driver.init()
    driver.add(before, 0)
    if decided:
        driver.end(before)
    driver.restart()
    with pytest.raises(ConcurrentTransactions):
        driver.init()
    (markers,) = driver.pending
    assert markers.commit is decided
    driver.write_markers()
    driver.add(driver.init(), 0)


def test_kip_98_a_partition_is_on_record_before_it_is_written_to() -> None:
    """ "The producer sends this request to the transaction coordinator the first time a new TopicPartition is written
    to as part of a transaction" (KIP-98, 4.1); redpanda #6018: begin kept only in memory is lost on re-election."""
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    driver.add(producer, 1)
    driver.restart()
    known = driver.core.transactions["x"]
    assert (known.state, known.partitions) == (State.ONGOING, frozenset(parts(0, 1)))
    assert known.started_ms == driver.now.wall_ms
    driver.wait(60_000)
    assert driver.pending[0].partitions == frozenset(parts(0, 1))


# KIP-360, KIP-588


def test_kip_360_a_producer_goes_on_with_its_id() -> None:
    """ "Matches current epoch: the current epoch is bumped"; "Epoch is greater than current epoch: return
    INVALID_PRODUCER_EPOCH" (KIP-360)."""
    driver = TransactionDriver()
    producer = driver.init()
    after = driver.init(goes_on=producer)
    assert (after.producer_id, after.producer_epoch) == (producer.producer_id, producer.producer_epoch + 1)
    with pytest.raises(InvalidProducerEpoch):
        driver.init(goes_on=Producer("x", producer.producer_id, 7))


def test_kip_360_a_retry_is_safe() -> None:
    """ "Of course the producer may fail to receive the response from the InitProducerId call, so we need additionally
    to make this API safe for retries" (KIP-360)."""
    driver = TransactionDriver()
    producer = driver.init()
    first = driver.init(goes_on=producer)
    driver.restart()
    assert driver.init(goes_on=producer) == first


def test_kip_588_a_producer_survives_the_timeout_of_its_transaction() -> None:
    """ "When the coordinator times out a transaction, it can remember that fact and allow the existing producer to
    claim the bumped epoch and continue" (KIP-588)."""
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    driver.wait(60_000)
    driver.write_markers()
    driver.wait(10)
    driver.restart()
    with pytest.raises(TransactionAbortable):
        driver.add(producer, 1)
    after = driver.init(goes_on=producer)
    assert after.producer_epoch == producer.producer_epoch + 1
    driver.add(after, 0)


# KIP-890


def test_kip_890_a_transaction_is_its_producer_id_and_epoch() -> None:
    """ "Uniquely identify transactions by bumping the producer epoch after every commit/abort marker. That way, each
    transaction can be identified by (producer id, epoch)" (KIP-890)."""
    driver = TransactionDriver()
    producer = driver.init()
    seen = set()
    for commit in (True, False, True, False):
        seen.add((producer.producer_id, producer.producer_epoch))
        driver.add(producer, 0)
        producer = driver.ended(producer, commit)
    assert len(seen) == 4


def test_kip_890_a_retry_of_the_same_command_has_the_new_epoch() -> None:
    """ "If we retry and see epoch - 1 + ID in last seen fields and are issuing the same command (ie commit not abort)
    we can return (with the new epoch)" (KIP-890)."""
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    first = driver.ended(producer)
    driver.wait(10)
    for _ in range(2):
        assert driver.next(producer, driver.end(producer)) == first
        assert isinstance(driver.end(producer, commit=False).got[0], InvalidTxnState)
        driver.restart()


def test_kip_890_a_delayed_end_completes_nothing() -> None:
    """ "A similar event can occur if a delayed EndTxn marker comes through an a new transaction with the same epoch has
    started when the request is received. This can result in incorrectly completing a transaction" (KIP-890)."""
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    after = driver.ended(producer)
    driver.add(after, 0)
    assert isinstance(driver.end(producer).got[0], ProducerFenced)
    assert driver.core.transactions["x"].state is State.ONGOING


def test_kip_890_markers_carry_the_epoch_of_the_next_transaction() -> None:
    """Markers carry the raised epoch, so partitions refuse late records of the transaction (KIP-890)."""
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    call = driver.end(producer)
    (markers,) = driver.pending
    driver.write_markers()
    assert markers.producer_epoch == producer.producer_epoch + 1 == driver.next(producer, call).producer_epoch


# Apache Kafka's source


def test_an_epoch_that_fences_is_given_to_nobody() -> None:
    """ "Note that this epoch is never returned to the user. We will abort the ongoing transaction and return
    CONCURRENT_TRANSACTIONS to the client. This forces the client to retry, which will ensure that the epoch is bumped a
    second time" (apache/kafka TransactionCoordinator.scala)."""
    driver = TransactionDriver()
    driver.add(driver.init(), 0)
    with pytest.raises(ConcurrentTransactions):
        driver.init()
    assert driver.core.transactions["x"].producer_epoch == 1
    driver.write_markers()
    assert driver.init().producer_epoch == 2


def test_a_fence_that_uses_up_the_epochs_leads_to_a_new_producer_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "In particular, if fencing the current producer exhausts the available epochs for the current producerId, then
    when the client retries, we will generate a new producerId" (apache/kafka TransactionCoordinator.scala)."""
    for module in (transaction, coordinator, records):
        monkeypatch.setattr(module, "MAX_EPOCH", 5)
    driver = TransactionDriver()
    producer = driver.init()
    while producer.producer_epoch < 5:
        producer = driver.init(goes_on=producer)
    driver.add(producer, 0)
    with pytest.raises(ConcurrentTransactions):
        driver.init()
    driver.write_markers()
    fresh = driver.init()
    assert fresh.producer_id != producer.producer_id
    assert fresh.producer_epoch == 0
