"""Transactional ids and time: timeouts, ids that are idle, and coordinators that come after one another."""

from __future__ import annotations

import pytest

from broker.transactions.transaction import State
from raftlog.errors import (
    ConcurrentTransactions,
    InvalidProducerIdMapping,
    ProducerFenced,
    TransactionAbortable,
)
from tests.support.transaction_driver import Producer, TransactionDriver, error_of


def state(driver: TransactionDriver, transactional_id: str = "x") -> State:
    return driver.core.transactions[transactional_id].state


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
