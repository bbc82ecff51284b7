"""What is left to be said of producers when neither the log nor a snapshot has all that they appended."""

from __future__ import annotations

import errno
from random import Random

import pytest

from broker.log.config import LogConfig
from broker.log.producer_snapshots import snapshot_offsets
from broker.log.producer_state import ProducerState, ProducerStates, RememberedBatch
from broker.log.transactions import Undecided
from raftlog.errors import InvalidProducerEpoch, OutOfOrderSequence
from raftlog.format import validate_produced
from raftlog.format.control import Marker
from tests.support.log_driver import LOG_DIR, LogDriver, timed_batch
from tests.support.memory_storage import Fault, MemoryStorage, PowerLoss
from tests.support.transactional_log import transactional_batch

DIRECTORY = f"{LOG_DIR}/topic-0"
CONFIG = LogConfig(segment_bytes=600, index_interval_bytes=0, retention_bytes=1_000, retention_ms=None)


def opened() -> LogDriver:
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    return driver


def snapshots(driver: LogDriver) -> list[int]:
    return snapshot_offsets(driver.storage.list_sizes(DIRECTORY))


def produce(driver: LogDriver, epoch: int, sequence: int, *, transactional: bool = False) -> None:
    """Append a batch of producer 5, as its leader."""
    numbers = (5, epoch, sequence)
    batch = transactional_batch([(None, b"x")], 1, numbers) if transactional else _batch(*numbers)
    header = validate_produced(batch)
    assert driver.log.check_producer(header, driver.clock.now) is None
    driver.log.append(batch, header, leader_epoch=1, now_ms=driver.clock.now)


def _batch(producer_id: int, epoch: int, sequence: int) -> bytes:
    return timed_batch([1], 0, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)


def end(driver: LogDriver, epoch: int, *, commit: bool) -> None:
    driver.log.append_markers([Marker(5, epoch, commit, 1)], leader_epoch=1, now_ms=driver.clock.now)


def settle(driver: LogDriver) -> None:
    """Roll, and let everything be committed and written that is to be."""
    driver.log.roll()
    driver.log.high_watermark = driver.log.flush()


def test_a_snapshot_from_before_a_gap_says_nothing_of_batches() -> None:
    """A committed record was cut, and with it the snapshot that had what retention took; the one before is too old."""
    driver = opened()
    for _ in range(2):
        driver.append([0], 0)
    driver.log.roll()
    driver.flush()
    for _ in range(3):
        driver.append([0], 900)
    driver.log.roll()
    driver.flush()
    driver.checkpoint()
    driver.truncate(4)
    assert snapshots(driver) == [2]
    assert [segment.base_offset for segment in driver.log.segments] == [4], "what told of offset 3 is gone"
    fence = ProducerState(0, driver.clock.now, ())
    assert list(driver.log.producers.items()) == [(7, fence), (9, fence)]
    driver.check()
    driver.crash(None)
    assert list(driver.log.producers.items()) == [(7, fence), (9, fence)]
    driver.check()
    driver.append([0], 0)
    driver.flush()
    driver.crash(Random(1))
    driver.check()


def restarted_behind_a_gap(*, transactional: bool, goes_on: bool = False) -> LogDriver:
    """Return a log of producer 5 that knows what it had written up to sequence 1 of epoch 3, and not what came next.

    `goes_on`: sequence 3 is in the log again; else a transaction has ended in the gap.
    """
    driver = opened()
    produce(driver, 2, 0)
    for sequence in (0, 1):
        produce(driver, 3, sequence, transactional=transactional)
    settle(driver)
    fault = Fault("write", "*.snapshot*", errno.ENOSPC)
    driver.storage.faults.append(fault)
    produce(driver, 3, 2, transactional=transactional)
    if transactional and not goes_on:
        end(driver, 4, commit=True)
    settle(driver)
    gap_end = driver.log.log_end_offset
    if goes_on:
        produce(driver, 3, 3, transactional=transactional)
        settle(driver)
    driver.log.delete_records(gap_end)
    assert driver.manager is not None
    driver.manager.run_housekeeping_once(driver.clock.now)
    driver.storage.crash(None)
    driver.storage.faults.remove(fault)
    driver.open()
    assert snapshots(driver) == [3]
    assert driver.log.segments[0].base_offset == gap_end > 3
    driver.log.high_watermark = driver.log.log_end_offset
    return driver


def test_behind_a_gap_whoever_was_fenced_is_fenced_and_numbers_are_not_known() -> None:
    driver = restarted_behind_a_gap(transactional=False)
    with pytest.raises(InvalidProducerEpoch):
        produce(driver, 2, 1)
    with pytest.raises(OutOfOrderSequence):
        produce(driver, 3, 2)  # the log had it
    produce(driver, 4, 0)
    produce(driver, 4, 1)


def test_behind_a_gap_numbers_go_on_where_the_log_does() -> None:
    driver = restarted_behind_a_gap(transactional=False, goes_on=True)
    (batch,) = driver.log.producers_now()[0][1].batches
    assert batch == RememberedBatch(3, 3, 4, 4, -1)
    produce(driver, 3, 4)


def test_a_transaction_that_may_have_ended_in_a_gap_holds_nobody_back() -> None:
    driver = restarted_behind_a_gap(transactional=True)
    assert not driver.log.producers.transactions.holds_back
    assert driver.log.producers.get(5) == ProducerState(3, driver.clock.now, ())
    with pytest.raises(InvalidProducerEpoch):
        produce(driver, 2, 0, transactional=True)
    end(driver, 4, commit=True)
    settle(driver)
    assert driver.log.last_stable_offset == driver.log.log_end_offset


def test_a_transaction_that_goes_on_behind_a_gap_is_open_from_there() -> None:
    driver = restarted_behind_a_gap(transactional=True, goes_on=True)
    assert dict(driver.log.producers.transactions.items())[5].first_offset == 4
    assert driver.log.last_stable_offset == 4
    end(driver, 4, commit=False)
    settle(driver)
    assert driver.log.last_stable_offset == driver.log.log_end_offset == 6
    (aborted,) = driver.log.aborted_transactions(4, 6)
    assert aborted[:3] == (5, 4, 5)


def test_fences_are_all_that_holds_whatever_comes() -> None:
    batches = (RememberedBatch(0, 0, 7, 7, -1),)
    states = ProducerStates(
        None,
        [
            (1, ProducerState(4, 100, (), decision=True)),
            (2, ProducerState(2, 200, batches, 7, 150)),
            (3, ProducerState(0, 300, batches, decision=False)),
        ],
        [Undecided(8, 6)],
    )
    fences = states.fences()
    assert list(fences.items()) == [
        (1, ProducerState(4, 100, (), decision=True)),
        (2, ProducerState(2, 200, ())),
        (3, ProducerState(0, 300, (), decision=False)),
    ]
    assert not fences.transactions.holds_back
    assert fences.expire(400 + fences.limits.expiration_ms) == 3, "their markers wait for nothing"
    assert len(states) == 3


def test_what_retention_took_while_there_was_no_room_for_a_snapshot_is_written_as_soon_as_there_is() -> None:
    driver = opened()
    for _ in range(6):
        driver.append([0], 0)
    driver.log.roll()
    fault = Fault("write", "*.snapshot*", errno.ENOSPC)
    driver.storage.faults.append(fault)
    driver.flush()
    driver.delete_records(driver.end)
    driver.checkpoint()
    assert snapshots(driver) == []
    assert driver.log.segment_count == 1
    driver.storage.faults.remove(fault)
    driver.checkpoint()
    driver.crash(Random(1))
    assert len(driver.log.producers) == 2
    driver.check()


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_log_that_starts_over_forgets_its_producers_wherever_it_is_stopped(seed: int | None) -> None:
    """A copy is made anew when what is known here may be wrong (`MarkerMissing`), so nothing of it may come back."""

    def live(driver: LogDriver) -> None:
        driver.open()
        for _ in range(6):
            driver.append([0], 0)
        driver.log.roll()
        driver.flush()
        driver.delete_records(driver.end)
        driver.checkpoint()
        driver.append([0], 0)
        driver.flush()
        begun.append(driver.storage.operations)
        driver.start_over(20)

    begun: list[int] = []
    whole = LogDriver(MemoryStorage(), CONFIG)
    live(whole)
    assert whole.storage.operations > begun[0] + 5
    for crash_at in range(begun[0], whole.storage.operations):
        driver = LogDriver(MemoryStorage(crash_at=crash_at), CONFIG)
        with pytest.raises(PowerLoss):
            live(driver)
        driver.crash(None if seed is None else Random(seed))
        if driver.log.log_start_offset == driver.log.log_end_offset:
            assert not driver.log.producers, crash_at
