"""What Kafka's improvement proposals say of idempotent producers, each sentence proved on the core or on a real log."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.config.config import BrokerConfig
from broker.log.producer_state import Duplicate, ProducerLimits, ProducerStates
from raftlog.errors import (
    DuplicateSequence,
    InvalidConfig,
    InvalidProducerEpoch,
    LeaderNotAvailable,
    OutOfOrderSequence,
    UnknownProducerId,
)
from raftlog.format import BatchHeader, parse_batch
from replication.ports import Accepted, Replica
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, image_with
from tests.support.log_driver import LogDriver

NOW = 1_700_000_000_000
DAY_MS = 86_400_000


def header(sequence: int, *, producer_id: int = 1, epoch: int = 0, offset: int = 0) -> BatchHeader:
    """One record of a producer."""
    return parse_batch(
        batch_of(b"v", producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, base_offset=offset)
    )


def after(count: int, limits: ProducerLimits | None = None) -> ProducerStates:
    """What is remembered after so many records of producer 1."""
    states = ProducerStates(limits)
    for sequence in range(count):
        states.note(header(sequence, offset=sequence), NOW)
    return states


# KIP-98


def test_kip_98_consecutive_sequence_numbers() -> None:
    """ "The broker will reject a produce request if its sequence number is not exactly one greater than the last
    committed message from that PID/TopicPartition pair." """
    states = after(3)
    assert states.check(header(3), NOW) is None
    for sequence in (4, 5, 100):
        with pytest.raises(OutOfOrderSequence):
            states.check(header(sequence), NOW)


def test_kip_98_duplicates() -> None:
    """ "Messages with a lower sequence number result in a duplicate error, which can be ignored by the producer." """
    with pytest.raises(DuplicateSequence):
        after(10).check(header(2), NOW)


def test_kip_98_out_of_sequence() -> None:
    """ "Messages with a higher number result in an out-of-sequence error, which indicates that some messages have been
    lost, and is fatal." Here fatal for the epoch: docs/adr/0012."""
    with pytest.raises(OutOfOrderSequence):
        after(3).check(header(4), NOW)


def test_kip_98_sequences_start_from_zero() -> None:
    """ "For a given PID, sequence numbers will start from zero and be monotonically increasing, with one sequence
    number per topic partition produced to." """
    states = ProducerStates()
    with pytest.raises(UnknownProducerId):
        states.check(header(1), NOW)
    assert states.check(header(0), NOW) is None


def test_kafka_5494_five_in_flight() -> None:
    """KAFKA-5494: idempotence with max.in.flight.requests.per.connection up to 5."""
    states = after(20)
    assert [states.check(header(sequence), NOW) for sequence in range(15, 20)] == [
        Duplicate(offset, offset, -1) for offset in range(15, 20)
    ]


# KIP-360


def test_kip_360_a_bumped_epoch_begins_anew() -> None:
    """After a loss the producer raises its epoch and numbers from 0 again, in that partition only."""
    states = after(3)
    assert states.check(header(0, epoch=1), NOW) is None
    states.note(header(0, epoch=1, offset=3), NOW)
    with pytest.raises(InvalidProducerEpoch):
        states.check(header(3), NOW)


def test_kip_360_state_outlives_the_records() -> None:
    """ "...we will alter the behavior of the broker to retain the cached producer state even after it has been removed
    from the log." """
    driver = LogDriver()
    driver.open()
    for _ in range(8):
        driver.append()
    driver.flush()
    before = driver.log.producers.copy()
    driver.log.roll()
    driver.delete_records(driver.end)
    driver.checkpoint()
    driver.clock.now += driver.config.file_delete_delay_ms + 1
    driver.checkpoint()
    driver.crash(None)
    assert driver.log.size_bytes == 0
    assert driver.log.producers == before


def test_kip_360_denied_only_for_sure(tmp_path: Path) -> None:
    """ "Resetting the sequence number is safe only if we are guaranteed that the produce request was not written to the
    log." Whatever replica in sync comes to lead."""

    async def main() -> None:
        parts = Parts(tmp_path)
        parts.image = image_with(1, offset=1, replicas=(1, 2))
        async with parts:
            partition = parts.registry.find(TOPIC_ID, 0)
            late = batch_of(b"v", producer_id=1, producer_epoch=0, base_sequence=1)
            with pytest.raises(LeaderNotAvailable):
                partition.append(late, 3, None)
            answer = partition.open_replica(
                Replica(2, 1),
                leader_epoch=3,
                fetch_offset=0,
                last_fetched_epoch=-1,
                durable_end_offset=0,
                on_change=lambda: None,
            )
            assert answer == Accepted()
            with pytest.raises(UnknownProducerId):
                partition.append(late, 3, None)

    asyncio.run(main())


# KIP-854


def test_kip_854_an_expiration_of_their_own() -> None:
    """producer.id.expiration.ms, a day by default, independent of the topic's retention."""
    assert ProducerLimits().expiration_ms == DAY_MS
    states = after(1)
    assert states.expire(NOW + DAY_MS) == 0
    assert states.expire(NOW + DAY_MS + 1) == 1


def test_kip_854_live_producers_do_not_expire() -> None:
    """The time that a producer may take to deliver has to be within it, so less than ten minutes is refused."""
    values = {"node.id": 1, "log.dirs": "/tmp/none"}
    assert BrokerConfig.from_values(values).producer_limits() == ProducerLimits()
    with pytest.raises(InvalidConfig, match=r"producer\.id\.expiration\.ms"):
        BrokerConfig.from_values(values | {"producer.id.expiration.ms": 599_999})
