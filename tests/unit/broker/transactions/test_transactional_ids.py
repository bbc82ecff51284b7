"""Producers with a transactional id: begin, add, end, fencing, retries, and what each of them writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.transactions.commands import InitProducer, MarkersWritten, NeedsProducerId
from broker.transactions.records import transaction_record
from broker.transactions.transaction import MAX_EPOCH, State
from raftlog.errors import (
    ConcurrentTransactions,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTxnState,
    ProducerFenced,
)
from raftlog.v1 import transaction_pb2
from tests.support.transaction_driver import Call, Producer, TransactionDriver, error_of, hard, parts


def state(driver: TransactionDriver, transactional_id: str = "x") -> State:
    return driver.core.transactions[transactional_id].state


def test_a_transaction_from_begin_to_end() -> None:
    driver = TransactionDriver()
    producer = driver.init()
    assert (producer.producer_id, producer.producer_epoch) == (4000, 0)
    assert state(driver) is State.EMPTY
    driver.add(producer, 0, 1)
    assert state(driver) is State.ONGOING
    driver.add(producer, 2, groups=["g"])
    call = driver.end(producer)
    assert state(driver) is State.PREPARE_COMMIT
    (markers,) = driver.pending
    assert (markers.producer_id, markers.producer_epoch, markers.commit) == (4000, 1, True)
    assert markers.partitions == frozenset(parts(0, 1, 2))
    assert markers.group_ids == {"g"}
    assert not call.is_answered()
    driver.write_markers()
    assert driver.next(producer, call).producer_epoch == 1
    driver.wait(10)
    assert state(driver) is State.COMPLETE_COMMIT
    assert driver.core.transactions["x"].partitions == frozenset()


def test_every_transaction_has_an_epoch_of_its_own() -> None:
    driver = TransactionDriver()
    producer = driver.init()
    for epoch, commit in enumerate([True, False, True]):
        assert producer.producer_epoch == epoch
        driver.add(producer, 0)
        producer = driver.ended(producer, commit)
    assert producer.producer_epoch == 3


def test_what_is_added_already_writes_nothing() -> None:
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0, 1, groups=["g"])
    before = list(driver.log)
    driver.add(producer, 1, groups=["g"])
    assert driver.log == before


def test_an_answer_waits_for_its_markers_but_not_for_ever() -> None:
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    call = driver.end(producer)
    driver.wait(999)
    assert not call.is_answered()
    driver.wait(1)
    after = driver.next(producer, call)
    assert after.producer_epoch == 1
    assert state(driver) is State.PREPARE_COMMIT
    driver.write_markers()
    driver.wait(10)
    assert state(driver) is State.COMPLETE_COMMIT


@pytest.mark.parametrize("commit", [True, False])
def test_a_retry_has_the_same_answer_and_the_other_decision_has_none(commit: bool) -> None:
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    first, second = driver.end(producer, commit), driver.end(producer, commit)
    assert isinstance(error_of(driver.end(producer, not commit)), InvalidTxnState)
    driver.write_markers()
    late = driver.end(producer, commit)
    assert {driver.next(producer, call).producer_epoch for call in (first, second, late)} == {1}
    driver.wait(10)
    assert driver.next(producer, driver.end(producer, commit)).producer_epoch == 1
    assert isinstance(error_of(driver.end(producer, not commit)), InvalidTxnState)


def test_a_retry_after_a_failover_waits_for_the_markers() -> None:
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    driver.end(producer)
    driver.restart()
    call = driver.end(producer)
    assert not call.is_answered()
    assert len(driver.pending) == 1
    driver.write_markers()
    assert driver.next(producer, call).producer_epoch == 1


def test_nothing_begins_while_markers_are_missing() -> None:
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    call = driver.end(producer)
    driver.wait(1000)
    after = driver.next(producer, call)
    with pytest.raises(ConcurrentTransactions):
        driver.add(after, 0)
    with pytest.raises(ConcurrentTransactions):
        driver.init()
    with pytest.raises(ConcurrentTransactions):
        driver.init(goes_on=after)
    assert isinstance(error_of(driver.end(after)), ConcurrentTransactions)
    driver.write_markers()
    driver.add(after, 0)
    assert state(driver) is State.ONGOING


def test_a_transaction_begins_without_waiting_for_the_record_that_the_last_is_over() -> None:
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    after = driver.ended(producer)
    assert state(driver) is State.PREPARE_COMMIT
    driver.add(after, 1)
    known = driver.core.transactions["x"]
    assert (known.state, known.partitions, known.producer_epoch) == (State.ONGOING, frozenset(parts(1)), 1)
    records = len(driver.log)
    driver.wait(100)
    assert len(driver.log) == records
    before = hard(driver.core)
    driver.restart()
    assert hard(driver.core) == before
    assert not driver.pending


def test_markers_written_late_or_twice_or_of_another_transaction_change_nothing() -> None:
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    driver.end(producer)
    (old,) = driver.pending
    driver.write_markers()
    driver.submit(MarkersWritten(old))
    after = Producer("x", 4000, 1)
    driver.add(after, 0)
    driver.submit(MarkersWritten(old))
    assert state(driver) is State.ONGOING
    driver.end(after)
    driver.submit(MarkersWritten(old))
    driver.wait(100)
    assert state(driver) is State.PREPARE_COMMIT


def test_an_end_that_comes_late_cannot_end_the_next_transaction() -> None:
    """PITFALLS: a delayed marker, or request, commits or aborts the next transaction (KIP-890)."""
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    after = driver.ended(producer)
    driver.add(after, 0)
    for commit in (True, False):
        assert isinstance(error_of(driver.end(producer, commit)), ProducerFenced)
    assert state(driver) is State.ONGOING


@pytest.mark.parametrize("commit", [True, False])
def test_an_end_of_nothing_uses_its_epoch_too(commit: bool) -> None:
    """Else its second copy, come late, would end the transaction that began after it."""
    driver = TransactionDriver()
    producer = driver.init()
    after = driver.next(producer, driver.end(producer, commit))
    assert after.producer_epoch == 1
    assert not driver.pending
    driver.add(after, 0)
    assert isinstance(error_of(driver.end(producer, commit)), ProducerFenced)
    assert state(driver) is State.ONGOING


# InitProducerId


def test_who_begins_anew_fences_who_was_there_and_aborts_what_it_left_open() -> None:
    driver = TransactionDriver()
    zombie = driver.init()
    driver.add(zombie, 0)
    with pytest.raises(ConcurrentTransactions):
        driver.init()
    (markers,) = driver.pending
    assert (markers.producer_epoch, markers.commit) == (1, False)
    with pytest.raises(ConcurrentTransactions):
        driver.init()
    driver.write_markers()
    producer = driver.init()
    assert (producer.producer_id, producer.producer_epoch) == (4000, 2)
    with pytest.raises(ProducerFenced):
        driver.add(zombie, 0)
    with pytest.raises(ProducerFenced):
        driver.init(goes_on=zombie)
    for commit in (True, False):
        assert isinstance(error_of(driver.end(zombie, commit)), ProducerFenced)
    driver.add(producer, 0)


def test_who_is_fenced_learns_no_epoch_from_the_abort_that_fences_it() -> None:
    driver = TransactionDriver()
    zombie = driver.init()
    driver.add(zombie, 0)
    with pytest.raises(ConcurrentTransactions):
        driver.init()
    assert isinstance(error_of(driver.end(zombie, commit=False)), ProducerFenced)
    driver.write_markers()
    driver.wait(10)
    assert isinstance(error_of(driver.end(zombie, commit=False)), ProducerFenced)


def test_a_producer_that_goes_on_has_a_new_epoch_and_the_same_answer_twice() -> None:
    """KIP-360: InitProducerId with the numbers a producer has."""
    driver = TransactionDriver()
    producer = driver.init()
    after = driver.init(goes_on=producer)
    assert after.producer_epoch == 1
    assert driver.init(goes_on=producer) == after
    driver.add(after, 0)
    with pytest.raises(ProducerFenced):
        driver.init(goes_on=producer)
    with pytest.raises(ConcurrentTransactions):
        driver.init(goes_on=after)
    driver.write_markers()
    assert driver.init(goes_on=after).producer_epoch == 2


def test_a_producer_goes_on_with_what_was_told_to_nobody() -> None:
    driver = TransactionDriver()
    producer = driver.init()
    for request, error in [
        (Producer("x", 4000, 1), InvalidProducerEpoch),
        (Producer("x", 17, 0), InvalidProducerIdMapping),
        (Producer("unknown", 4000, 0), InvalidProducerIdMapping),
    ]:
        with pytest.raises(error):
            driver.init(request.transactional_id, goes_on=request)
        with pytest.raises(error):
            driver.add(request, 0)
        assert isinstance(error_of(driver.end(request)), error)
    assert driver.init(goes_on=producer).producer_epoch == 1


def used_up(driver: TransactionDriver, epoch: int) -> Producer:
    """A producer that has come to this epoch."""
    producer = driver.init()
    known = replace(driver.core.transactions["x"], producer_epoch=epoch)
    driver.core.replay(*transaction_record("x", known))
    driver.log.append(transaction_record("x", known))
    return Producer("x", producer.producer_id, epoch)


def test_epochs_are_used_up() -> None:
    """KAFKA-18660: an epoch that runs over."""
    driver = TransactionDriver()
    producer = used_up(driver, MAX_EPOCH)
    driver.add(producer, 0)
    call = driver.end(producer)
    (markers,) = driver.pending
    assert markers.producer_epoch == 32767
    driver.write_markers()
    after = driver.next(producer, call)
    assert after.producer_epoch == 32767
    driver.wait(10)
    with pytest.raises(InvalidProducerEpoch, match="InitProducerId gives another one"):
        driver.add(after, 0)
    assert driver.next(after, driver.end(after)).producer_epoch == 32767
    fresh = driver.init(goes_on=after)
    assert (fresh.producer_id, fresh.producer_epoch) == (4001, 0)
    with pytest.raises(InvalidProducerIdMapping):
        driver.add(after, 0)
    driver.add(fresh, 0)


@pytest.mark.parametrize(("epoch", "given"), [(MAX_EPOCH - 1, 4000), (MAX_EPOCH, 4001), (MAX_EPOCH + 1, 4001)])
def test_the_last_epoch_is_given_out_and_the_one_after_it_is_not(epoch: int, given: int) -> None:
    driver = TransactionDriver()
    used_up(driver, epoch)
    assert driver.init().producer_id == given


def test_a_timed_out_transaction_in_the_last_epoch_ends_with_a_fresh_id() -> None:
    driver = TransactionDriver()
    producer = used_up(driver, MAX_EPOCH)
    driver.add(producer, 0)
    driver.wait(60_000)
    driver.write_markers()
    fresh = driver.init(goes_on=producer)
    assert (fresh.producer_id, fresh.producer_epoch) == (4001, 0)


@pytest.mark.parametrize("times_out", [False, True])
@pytest.mark.parametrize("fails_over", [False, True])
def test_a_fresh_id_whose_answer_was_lost_is_given_again(times_out: bool, fails_over: bool) -> None:
    """Else the producer's own retry would look like somebody else's take-over, which is fatal."""
    driver = TransactionDriver()
    producer = used_up(driver, MAX_EPOCH)
    driver.add(producer, 0)
    if times_out:
        driver.wait(60_000)
        driver.write_markers()
    else:
        producer = driver.ended(producer)
    fresh = driver.init(goes_on=producer)
    assert (fresh.producer_id, fresh.producer_epoch) == (4001, 0)
    if fails_over:
        driver.restart()
    before = list(driver.log)
    assert driver.init(goes_on=producer) == fresh
    assert driver.log == before
    with pytest.raises(InvalidProducerIdMapping):
        driver.init(goes_on=replace(producer, producer_epoch=producer.producer_epoch - 1))
    driver.add(fresh, 0)
    with pytest.raises(InvalidProducerIdMapping):  # it has heard: this is an old call that comes late
        driver.init(goes_on=producer)


def test_a_fresh_id_is_given_again_only_until_somebody_takes_over() -> None:
    driver = TransactionDriver()
    producer = used_up(driver, MAX_EPOCH)
    driver.add(producer, 0)
    producer = driver.ended(producer)
    driver.init(goes_on=producer)
    assert driver.init().producer_epoch == 1
    with pytest.raises(InvalidProducerIdMapping):
        driver.init(goes_on=producer)


def test_a_fresh_id_is_asked_for_only_where_one_is_needed() -> None:
    driver = TransactionDriver()
    request = transaction_pb2.InitProducerIdRequest(transactional_id="x", transaction_timeout_ms=1)
    call = Call()
    decision = driver.submit(InitProducer(call, request))
    assert isinstance(error_of(call), NeedsProducerId)
    assert not decision.records
    driver.submit(InitProducer(Call(), request, 7))
    again = Call()
    driver.submit(InitProducer(again, request, 8))
    assert again.answer(transaction_pb2.InitProducerIdResponse).producer_id == 7
