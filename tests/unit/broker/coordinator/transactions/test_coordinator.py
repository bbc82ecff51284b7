"""The transaction coordinator's core: begin, add, end, fencing, retries, timeouts, refusals and listings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.coordinator.transactions import listing
from broker.coordinator.transactions.checks import MAX_PARTITIONS
from broker.coordinator.transactions.commands import (
    Abort,
    AddTo,
    End,
    InitProducer,
    MarkersWritten,
    NeedsProducerId,
    PendingMarkers,
    Verify,
)
from broker.coordinator.transactions.coordinator import MAX_NAMED_AT_ONCE, Deadlines
from broker.coordinator.transactions.records import partition_messages, transaction_record
from broker.coordinator.transactions.transaction import MAX_EPOCH, State
from raftlog.errors import (
    ConcurrentTransactions,
    InvalidGroupId,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidRequestError,
    InvalidTransactionTimeout,
    InvalidTxnState,
    ProducerFenced,
    RaftlogError,
    TransactionAbortable,
    TransactionalIdNotFound,
    from_wire,
)
from raftlog.v1 import group_pb2, transaction_pb2
from raftlog.v1.transaction_pb2 import ListTransactionsRequest
from tests.support.transaction_driver import WALL_MS, Call, Producer, TransactionDriver, error_of, hard, parts


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


class Keeper:
    """A client that keeps the epoch of InitProducerId over all of its transactions (before transaction.version 2)."""

    def __init__(self, driver: TransactionDriver, producer: Producer | None = None) -> None:
        self.driver = driver
        self.producer = producer or driver.init()

    def _names(self) -> dict[str, Any]:
        producer = self.producer
        return {
            "transactional_id": producer.transactional_id,
            "producer_id": producer.producer_id,
            "producer_epoch": producer.producer_epoch,
            "keeps_epoch": True,
        }

    def add(self, *numbers: int) -> None:
        call = Call()
        request = transaction_pb2.AddToTransactionRequest(
            **self._names(), partitions=partition_messages(parts(*numbers))
        )
        self.driver.submit(AddTo(call, request))
        call.answer(transaction_pb2.AddToTransactionResponse)

    def end(self, *, commit: bool = True) -> None:
        call = Call()
        request = transaction_pb2.EndTransactionRequest(**self._names(), commit=commit)
        self.driver.submit(End(call, request))
        self.driver.write_markers()
        call.answer(transaction_pb2.EndTransactionResponse)

    def epoch(self, *numbers: int) -> int:
        """Return the epoch of the open transaction, as a partition's leader asks for it."""
        call = Call()
        partitions = partition_messages(parts(*numbers))
        self.driver.submit(
            Verify(call, transaction_pb2.VerifyTransactionRequest(**self._names(), partitions=partitions))
        )
        return call.answer(transaction_pb2.VerifyTransactionResponse).producer_epoch

    def goes_on(self) -> Keeper:
        request = transaction_pb2.InitProducerIdRequest(**self._names(), transaction_timeout_ms=60_000)
        answer = self.driver._init(InitProducer(Call(), request, next(self.driver.producer_ids)))
        return Keeper(self.driver, Producer("x", answer.producer_id, answer.producer_epoch))


@pytest.mark.parametrize("fails_over", [False, True])
def test_a_client_that_keeps_its_epoch_has_an_epoch_for_each_transaction_here(fails_over: bool) -> None:
    driver = TransactionDriver()
    keeper = Keeper(driver)
    for number in range(4):
        keeper.add(0)
        assert keeper.epoch(0) == number
        keeper.end(commit=number != 2)
        keeper.end(commit=number != 2)  # the answer was lost
        with pytest.raises(InvalidTxnState, match="before"):
            keeper.end(commit=number == 2)
        if fails_over:
            driver.restart()
            driver.write_markers()
    assert keeper.producer.producer_epoch == 0


def test_a_client_that_keeps_its_epoch_is_fenced_by_its_successor() -> None:
    driver = TransactionDriver()
    old = Keeper(driver)
    old.add(0)
    old.end()
    old.add(0)
    with pytest.raises(ConcurrentTransactions):
        driver.init()
    driver.write_markers()
    new = Keeper(driver)
    for zombie in (lambda: old.add(0), old.end, old.goes_on):
        with pytest.raises(ProducerFenced):
            zombie()
    with pytest.raises(InvalidProducerEpoch):
        old.epoch(0)
    new.add(0)
    assert new.epoch(0) == new.producer.producer_epoch
    new.end()


def test_a_client_that_keeps_its_epoch_is_fenced_by_a_tool() -> None:
    driver = TransactionDriver()
    keeper = Keeper(driver)
    keeper.add(0)
    keeper.end()
    keeper.add(0)
    driver.submit(Abort(Call(), "x"))
    driver.write_markers()
    for fenced in (lambda: keeper.add(0), keeper.end, keeper.goes_on):
        with pytest.raises(ProducerFenced):
            fenced()


def test_a_client_that_keeps_its_epoch_hears_of_a_timeout_once() -> None:
    driver = TransactionDriver()
    keeper = Keeper(driver)
    keeper.add(0)
    keeper.end()
    keeper.add(0)
    driver.wait(60_000)
    with pytest.raises(ConcurrentTransactions):
        keeper.end(commit=False)
    driver.write_markers()
    for late in (lambda: keeper.add(0), keeper.end, lambda: keeper.epoch(0)):
        with pytest.raises(TransactionAbortable):
            late()
    keeper.end(commit=False)
    keeper.end(commit=False)  # the answer was lost
    keeper.add(0)
    assert keeper.epoch(0) == 2
    keeper.end()


@pytest.mark.parametrize("times_out", [False, True])
def test_a_client_that_keeps_its_epoch_goes_on_after_an_error(times_out: bool) -> None:
    """KIP-360; the answer may be lost."""
    driver = TransactionDriver()
    keeper = Keeper(driver)
    keeper.add(0)
    keeper.end()
    keeper.add(0)
    if times_out:
        driver.wait(60_000)
    else:
        with pytest.raises(ConcurrentTransactions):
            keeper.goes_on()
    driver.write_markers()
    after, again = keeper.goes_on(), keeper.goes_on()
    assert after.producer == again.producer
    assert after.producer.producer_epoch == 2
    after.add(0)
    assert after.epoch(0) == 2
    after.end()
    with pytest.raises(ProducerFenced):
        keeper.add(0)


def test_a_client_that_keeps_its_epoch_gets_a_fresh_id_when_they_are_used_up() -> None:
    driver = TransactionDriver()
    keeper = Keeper(driver)
    driver.core.replay(
        *transaction_record("x", replace(driver.core.transactions["x"], producer_epoch=MAX_EPOCH, state=State.EMPTY))
    )
    keeper.add(0)
    keeper.end()
    with pytest.raises(InvalidProducerIdMapping, match="InitProducerId gives another one"):
        keeper.add(0)
    fresh = keeper.goes_on()
    assert fresh.producer.producer_id != keeper.producer.producer_id
    fresh.add(0)
    assert fresh.epoch(0) == 0


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
    """Else the producer's own retry would look like a take-over by another process, which is fatal."""
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


# AbortTransaction


def test_an_administrator_aborts_what_is_open_and_fences_its_producer() -> None:
    driver = TransactionDriver()
    assert isinstance(error_of(driver.abort()), TransactionalIdNotFound)
    producer = driver.init()
    assert isinstance(error_of(driver.abort()), InvalidTxnState)
    driver.add(producer, 0)
    call = driver.abort()
    assert isinstance(error_of(driver.abort()), InvalidTxnState)
    driver.write_markers()
    call.answer(transaction_pb2.AbortTransactionResponse)
    with pytest.raises(ProducerFenced, match="was aborted by an operator's tool"):
        driver.add(producer, 0)
    driver.restart()
    for commit in (True, False):
        error = error_of(driver.end(producer, commit))
        assert isinstance(error, ProducerFenced)
        assert "raftlog txn abort" in str(error)
    driver.write_markers()
    driver.init()
    with pytest.raises(ProducerFenced, match="another producer uses this transactional id"):
        driver.add(producer, 0)


def test_what_is_prepared_is_never_aborted() -> None:
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    driver.end(producer)
    assert isinstance(error_of(driver.abort()), InvalidTxnState)
    driver.wait(10 * 24 * 60 * 60 * 1000)
    assert state(driver) is State.PREPARE_COMMIT


# Bad input


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"transactional_id": "", "transaction_timeout_ms": 1}, InvalidRequestError),
        ({"transactional_id": "x" * 256, "transaction_timeout_ms": 1}, InvalidRequestError),
        ({"transactional_id": "x"}, InvalidTransactionTimeout),
        ({"transactional_id": "x", "transaction_timeout_ms": 900_001}, InvalidTransactionTimeout),
        ({"transactional_id": "x", "transaction_timeout_ms": 1, "producer_id": 1}, InvalidRequestError),
        ({"transactional_id": "x", "transaction_timeout_ms": 1, "producer_epoch": 1}, InvalidRequestError),
    ],
)
def test_what_can_never_be_initialized(request_: dict[str, object], error: type[RaftlogError]) -> None:
    driver = TransactionDriver()
    call = Call()
    decision = driver.submit(InitProducer(call, transaction_pb2.InitProducerIdRequest(**request_), 1))  # type: ignore[arg-type] # fields by name
    assert isinstance(error_of(call), error)
    assert not decision.records


def test_what_can_never_be_added() -> None:
    driver = TransactionDriver()
    producer = driver.init()
    with pytest.raises(InvalidRequestError, match="neither"):
        driver.add(producer)
    with pytest.raises(InvalidGroupId):
        driver.add(producer, groups=[""])
    with pytest.raises(InvalidRequestError, match="below 0"):
        driver.add(producer, -1)
    with pytest.raises(InvalidRequestError, match="1000"):
        driver.add(producer, groups=[str(number) for number in range(1001)])
    driver.add(producer, *range(MAX_PARTITIONS))
    with pytest.raises(InvalidRequestError, match="10001 partitions"):
        driver.add(producer, MAX_PARTITIONS)
    assert len(driver.core.transactions["x"].partitions) == MAX_PARTITIONS


def test_requests_that_name_too_much_are_refused_before_it_is_looked_at() -> None:
    driver = TransactionDriver()
    driver.init()
    for request in (
        transaction_pb2.AddToTransactionRequest(group_ids=[""] * 1_001),
        transaction_pb2.AddToTransactionRequest(partitions=[group_pb2.TopicPartitions()] * 10_001),
    ):
        request.transactional_id, request.producer_id = "x", 4000
        call = Call()
        driver.submit(AddTo(call, request))
        error = error_of(call)
        assert isinstance(error, InvalidRequestError)
        assert "it may name" in str(error)


# Verify: whether a group is going to have the marker (KIP-890)


def verified(driver: TransactionDriver, producer: Producer, group_id: str = "g") -> None:
    """Ask whether a group may keep offsets for a transaction."""
    call = Call()
    request = transaction_pb2.VerifyTransactionRequest(
        transactional_id=producer.transactional_id,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        group_id=group_id,
    )
    before = list(driver.log)
    driver.submit(Verify(call, request))
    assert driver.log == before
    call.answer(transaction_pb2.VerifyTransactionResponse)


def test_only_groups_of_an_open_transaction_get_its_marker() -> None:
    driver = TransactionDriver()
    producer = driver.init()
    with pytest.raises(InvalidTxnState, match="was not added"):
        verified(driver, producer)
    driver.add(producer, 0, groups=["g"])
    verified(driver, producer)
    with pytest.raises(InvalidTxnState, match="the group 'other' was not added"):
        verified(driver, producer, "other")
    for stranger in (replace(producer, producer_id=77), replace(producer, transactional_id="nobody")):
        with pytest.raises(InvalidProducerIdMapping):
            verified(driver, stranger)
    with pytest.raises(InvalidProducerEpoch, match="never given out"):
        verified(driver, replace(producer, producer_epoch=1))
    driver.end(producer)
    with pytest.raises(InvalidProducerEpoch):  # the marker is on its way: it may have been at the group already
        verified(driver, producer)
    driver.write_markers()
    with pytest.raises(InvalidProducerEpoch):
        verified(driver, producer)
    with pytest.raises(InvalidTxnState):
        verified(driver, replace(producer, producer_epoch=1))


def test_a_group_hears_that_the_transaction_has_timed_out() -> None:
    driver = TransactionDriver()
    producer = driver.init(timeout_ms=1_000)
    driver.add(producer, groups=["g"])
    driver.wait(1_000)
    with pytest.raises(TransactionAbortable):
        verified(driver, producer)


def test_a_transaction_times_out_and_its_producer_recovers_by_aborting() -> None:
    driver = TransactionDriver()
    producer = driver.init(timeout_ms=5_000)
    driver.add(producer, 0)
    driver.wait(4_999)
    driver.add(producer, 1)
    assert state(driver) is State.ONGOING
    driver.wait(1)
    assert state(driver) is State.PREPARE_ABORT
    with pytest.raises(TransactionAbortable, match="timed out after 5000 ms; abort it and begin another"):
        driver.add(producer, 2)
    assert isinstance(error_of(driver.end(producer, commit=True)), TransactionAbortable)
    call = driver.end(producer, commit=False)
    assert not call.is_answered()
    driver.write_markers()
    after = driver.next(producer, call)
    assert after.producer_epoch == 1
    assert isinstance(error_of(driver.end(producer, commit=True)), TransactionAbortable)
    driver.add(after, 0)


def test_a_transaction_times_out_and_its_producer_goes_on_by_init_producer_id() -> None:
    driver = TransactionDriver()
    producer = driver.init(timeout_ms=5_000)
    driver.add(producer, 0)
    driver.wait(5_000)
    with pytest.raises(ConcurrentTransactions):
        driver.init(goes_on=producer)
    driver.write_markers()
    after = driver.init(goes_on=producer)
    assert driver.init(goes_on=producer) == after
    driver.add(after, 0)


def test_nobody_goes_on_after_a_timeout_once_somebody_else_has_taken_over() -> None:
    driver = TransactionDriver()
    zombie = driver.init(timeout_ms=5_000)
    driver.add(zombie, 0)
    driver.wait(5_000)
    driver.write_markers()
    driver.init()
    with pytest.raises(ProducerFenced):
        driver.init(goes_on=zombie)
    assert isinstance(error_of(driver.end(zombie, commit=False)), ProducerFenced)


@pytest.mark.parametrize(
    ("away_ms", "ahead_ms", "left_ms"), [(2_000, 0, 3_000), (2_000, -9_000_000, 5_000), (0, 9_000_000, 0)]
)
def test_a_timeout_survives_a_failover_by_the_wall_clock(away_ms: int, ahead_ms: int, left_ms: int) -> None:
    """And a clock that is wrong costs a transaction its timeout once more, at most."""
    driver = TransactionDriver()
    producer = driver.init(timeout_ms=5_000)
    driver.add(producer, 0)
    driver.wait(away_ms)
    driver.wall_ahead_ms = ahead_ms
    driver.restart()
    if left_ms:
        driver.wait(left_ms - 1)
        assert state(driver) is State.ONGOING
        driver.wait(1)
    assert state(driver) is State.PREPARE_ABORT
    assert not driver.pending[0].commit


def test_the_clock_of_the_next_transaction_is_its_own() -> None:
    driver = TransactionDriver()
    producer = driver.init(timeout_ms=5_000)
    driver.add(producer, 0)
    driver.wait(4_000)
    producer = driver.ended(producer)
    driver.add(producer, 0)
    driver.wait(4_999)
    assert state(driver) is State.ONGOING
    driver.wait(1)
    assert state(driver) is State.PREPARE_ABORT


def test_ids_that_are_idle_for_a_week_are_forgotten() -> None:
    driver = TransactionDriver()
    week_ms = 7 * 24 * 60 * 60 * 1000
    driver.init("idle")
    busy = driver.init("busy", timeout_ms=900_000)
    driver.add(driver.init("open"), 0)
    driver.add(driver.init("prepared"), 0)
    driver.wait(week_ms - 60_000)
    assert set(driver.core.transactions) == {"idle", "busy", "open", "prepared"}
    driver.add(busy, 0)
    driver.wait(2 * 60 * 60 * 1000)
    assert set(driver.core.transactions) == {"busy", "open", "prepared"}
    with pytest.raises(InvalidProducerIdMapping, match="idle"):
        driver.add(Producer("idle", 4000, 0), 0)


def test_thousands_of_ids_expire_a_piece_at_a_time() -> None:
    driver = TransactionDriver()
    for number in range(1000):
        driver.init(str(number))
    driver.now_ms += 8 * 24 * 60 * 60 * 1000
    decision = driver.core.on_time(driver.now)
    assert 0 < len(decision.records) <= 200
    driver._apply(decision)
    driver.settle()
    assert not driver.core.transactions


# Failover


def test_a_coordinator_that_has_loaded_a_decision_sends_its_markers() -> None:
    driver = TransactionDriver()
    producer = driver.init()
    driver.add(producer, 0)
    log = list(driver.log)
    for cut in range(len(log) + 1):
        driver.restart(log[:cut])
        assert not driver.pending
    driver.end(producer, commit=False)
    (before,) = driver.pending
    driver.restart()
    assert driver.pending == [before]
    driver.write_markers()
    driver.wait(10)
    assert state(driver) is State.COMPLETE_ABORT
    driver.restart()
    assert not driver.pending


def test_decisions_are_sent_a_piece_at_a_time_after_a_load() -> None:
    driver = TransactionDriver()
    for number in range(500):
        producer = driver.init(str(number))
        driver.add(producer, 0)
        driver.end(producer)
    driver.restart(driver.log)
    assert len(driver.pending) == 500
    driver.core.replay(*driver.log[-1])
    assert len(driver.core.on_time(driver.now).effects) == 1


KEYS = st.sampled_from("abc")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, st.integers(0, 20)),
        st.tuples(st.just("forget"), KEYS, st.just(0)),
        st.tuples(st.just("wait"), st.just(""), st.integers(0, 10)),
    )
)


@given(STEPS)
def test_what_is_due_is_taken_once_and_on_time(steps: list[tuple[str, str, int]]) -> None:
    deadlines: Deadlines[str] = Deadlines()
    model: dict[str, float] = {}
    now_ms = 0.0
    for kind, key, number in steps:
        if kind == "set":
            deadlines.set(key, now_ms + number)
            model[key] = now_ms + number
        elif kind == "forget":
            deadlines.forget(key)
            model.pop(key, None)
        else:
            now_ms += number
            taken = set()
            while (due := deadlines.take(now_ms)) is not None:
                taken.add(due)
            assert taken == {each for each, due_ms in model.items() if due_ms <= now_ms}
            for each in taken:
                del model[each]
        next_ms = deadlines.next_ms()
        if model:
            assert next_ms is not None
            assert next_ms <= min(model.values())


def test_thousands_of_transactions_of_one_id_are_one_entry() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for number in range(10_000):
        deadlines.set("x", number + 60_000)
        deadlines.forget("x")
    assert len(deadlines._heap) == 1


def test_thousands_of_ids_that_are_done_leave_little_behind() -> None:
    deadlines: Deadlines[int] = Deadlines()
    deadlines.set(-1, 5)
    for number in range(10_000):
        deadlines.set(number, number + 60_000)
        deadlines.forget(number)
    assert len(deadlines._heap) < 1100
    assert deadlines.take(5) == -1
    assert deadlines.take(100_000) is None


@pytest.fixture
def driver() -> TransactionDriver:
    """Ids in every state, and a sink with a stage in every state."""
    driver = TransactionDriver()
    for name in ("empty", "ongoing", "committing", "aborting", "committed", "aborted"):
        producer = driver.init(name)
        if name == "empty":
            continue
        driver.add(producer, 0)
        if name.startswith("commit"):
            driver.end(producer, commit=True)
        elif name.startswith("abort"):
            driver.end(producer, commit=False)
        if name in ("committed", "aborted"):
            driver.pending.insert(0, driver.pending.pop())
            driver.write_markers(1)
    first, second = driver.init_stage(0, 0), driver.init_stage(0, 0)
    driver.commit(0, first)
    driver.init_stage(1, 0, attempt="3.1")
    driver.wait(10)
    assert second
    return driver


def ids(response: transaction_pb2.ListTransactionsResponse) -> list[tuple[str, str]]:
    return [
        (each.transactional_id or each.sink_id, transaction_pb2.TransactionState.Name(each.state))
        for each in response.transactions
    ]


EVERYTHING = [
    ("aborted", "COMPLETE_ABORT"),
    ("aborting", "PREPARE_ABORT"),
    ("committed", "COMPLETE_COMMIT"),
    ("committing", "PREPARE_COMMIT"),
    ("empty", "TRANSACTION_EMPTY"),
    ("ongoing", "TRANSACTION_ONGOING"),
    ("s", "PREPARE_COMMIT"),
    ("s", "PREPARE_ABORT"),
    ("s", "TRANSACTION_ONGOING"),
]


@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_everything_by_id_a_piece_at_a_time(
    driver: TransactionDriver, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PIECE", piece)
    shown = driver.list(ListTransactionsRequest())
    assert ids(shown) == EVERYTHING
    (sink,) = shown.sinks
    assert (sink.sink_id, sink.target, sink.last_batch_id, sink.open_stages) == ("s", "t", 0, 1)
    assert sink.updated_ms == WALL_MS + 1000


def test_by_state_and_by_producer_id_no_sinks_are_shown(driver: TransactionDriver) -> None:
    shown = driver.list(ListTransactionsRequest(states=[transaction_pb2.PREPARE_ABORT]))
    assert ids(shown) == [each for each in EVERYTHING if each[1] == "PREPARE_ABORT"]
    assert not shown.sinks
    producer_id = driver.core.transactions["ongoing"].producer_id
    shown = driver.list(ListTransactionsRequest(producer_ids=[producer_id]))
    assert ids(shown) == [("ongoing", "TRANSACTION_ONGOING")]
    assert not shown.sinks


def test_those_that_run_for_longer(driver: TransactionDriver) -> None:
    driver.wait(9_000)
    driver.add(driver.init("young"), 0)
    shown = driver.list(ListTransactionsRequest(running_longer_than_ms=5_000))
    assert [each[0] for each in ids(shown)] == ["aborting", "committing", "ongoing", "s", "s", "s"]


def test_a_description(driver: TransactionDriver) -> None:
    shown = driver.describe("committing")
    assert shown.state == transaction_pb2.PREPARE_COMMIT
    assert shown.producer_epoch == 1
    assert shown.started_ms == WALL_MS + 1000
    assert [(each.topic_id, *each.partitions) for each in shown.partitions] == parts(0)
    assert shown.pending == shown.partitions
    shown = driver.describe("ongoing")
    assert (shown.timeout_ms, len(shown.partitions), len(shown.pending)) == (60_000, 1, 0)
    assert isinstance(from_wire(driver.describe("unknown").error), TransactionalIdNotFound)


def test_a_list_by_too_many_ids_is_refused(driver: TransactionDriver) -> None:
    with pytest.raises(InvalidRequestError, match="names 10001 producer ids, it may name 10000"):
        driver.list(ListTransactionsRequest(producer_ids=range(10_001)))


def test_what_is_asked_for_is_read_once_for_all_pieces(
    driver: TransactionDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[ListTransactionsRequest] = []
    real = listing.wanted

    def noted(request: ListTransactionsRequest, now_ms: int) -> listing.Shown:
        read.append(request)
        return real(request, now_ms)

    monkeypatch.setattr(listing, "PIECE", 1)
    monkeypatch.setattr(listing, "wanted", noted)
    assert ids(driver.list(ListTransactionsRequest(producer_ids=range(10_000)))) == EVERYTHING
    assert len(read) == 1


def test_what_times_out_at_once_is_ended_and_sent_in_pieces_of_so_many_partitions() -> None:
    """200 stages of 10,000 partitions held up the event loop for seconds."""
    driver = TransactionDriver()
    stages = {driver.init_stage(1, *range(MAX_NAMED_AT_ONCE // 2), timeout_ms=1_000) for _ in range(7)}
    producers = [driver.init(f"x{number}", timeout_ms=1_000) for number in range(3)]
    for producer in producers:
        driver.add(producer, *range(MAX_NAMED_AT_ONCE // 2))
    driver.now_ms += 1_000
    sent: list[PendingMarkers] = []
    calls = 0
    while (due_ms := driver.core.next_deadline_ms()) is not None and due_ms <= driver.now_ms:
        decision = driver.core.on_time(driver.now)
        assert len(decision.records) <= 2
        told = [each.message for each in decision.effects if isinstance(each.message, PendingMarkers)]
        assert len(told) <= 2
        sent += told
        calls += 1
        for key, value in decision.records:
            driver.core.replay(key, value)
    assert {markers.producer_id for markers in sent} == stages | {producer.producer_id for producer in producers}
    assert len(sent) == 10
    assert calls < 20
