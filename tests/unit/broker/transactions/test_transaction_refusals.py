"""What others than the producer ask of a transactional id, and what nobody may ask."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.transactions.checks import MAX_PARTITIONS
from broker.transactions.commands import AddTo, InitProducer, Verify
from broker.transactions.transaction import State
from raftlog.errors import (
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
)
from raftlog.v1 import group_pb2, transaction_pb2
from tests.support.transaction_driver import Call, Producer, TransactionDriver, error_of


def state(driver: TransactionDriver, transactional_id: str = "x") -> State:
    return driver.core.transactions[transactional_id].state


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
