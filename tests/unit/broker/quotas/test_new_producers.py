"""A user begins a bounded number of producers within a time, in all partitions that a broker leads together."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from broker.partition.produce_session import TURN_BYTES, ProduceSession
from broker.quotas.heavy_work import HeavyWork
from broker.quotas.new_producers import SLOT_MS, WINDOW_MS, NewProducers
from broker.security.caller import Caller
from broker.turns import SharedTurns
from raftlog.errors import BrokerOverloaded, StorageFull
from raftlog.format import wire
from raftlog.v1 import common_pb2, log_pb2
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, ProduceWriter, Requests
from tests.support.raw_client import RawClient

ALICE, BOB = "User:alice", "User:bob"


def begun(producers: NewProducers, name: str) -> int:
    """Return how many producers count for a user."""
    counts = producers._begun.get(name)
    return 0 if counts is None else counts.count


class Limited:
    def __init__(self, most: int) -> None:
        self.now_ms = 5 * SLOT_MS + 1.0
        self.producers = NewProducers(lambda: self.now_ms, most)

    def begin(self, name: str, count: int) -> int:
        """Begin some; return how many were admitted."""
        for number in range(count):
            try:
                self.producers.admit(name)()
            except BrokerOverloaded:
                return number
        return count


def test_a_user_begins_no_more_producers_than_the_bound_within_the_window() -> None:
    limited = Limited(100)
    assert limited.begin(ALICE, 60) == 60
    limited.now_ms += 5 * SLOT_MS
    assert limited.begin(ALICE, 60) == 40
    assert limited.begin(BOB, 60) == 60
    with pytest.raises(BrokerOverloaded, match="User:alice has begun 100 producers within the last 11 minutes"):
        limited.producers.admit(ALICE)
    limited.now_ms += WINDOW_MS - 5 * SLOT_MS - 2
    assert limited.begin(ALICE, 1) == 0, "the first ones may still be live"
    limited.now_ms += SLOT_MS
    assert limited.begin(ALICE, 100) == 60, "those of five minutes later still count"


def test_users_without_new_producers_are_forgotten_after_the_window() -> None:
    limited = Limited(100)
    for number in range(1_000):
        limited.begin(f"User:{number}", 3)
    limited.now_ms += 2 * WINDOW_MS
    limited.begin(ALICE, 1)
    assert limited.producers._begun.keys() == {ALICE}
    assert begun(limited.producers, ALICE) == 1


async def test_new_producers_count_in_each_partition_and_others_go_on(tmp_path: Path) -> None:
    """Nothing bounded them in sum: 100,000 in each partition, each of 600 bytes and more."""
    async with Parts(tmp_path, partitions=3) as parts:
        parts.registry.new_producers = NewProducers(parts.clock.monotonic_ms, most=4)
        sent = 0

        async def send(name: str, producer_id: int, partition: int, sequence: int = 0) -> int:
            """Send a batch over a stream of its own; return the error's code."""
            nonlocal sent
            sent += 1
            batch = batch_of(b"", producer_id=producer_id, producer_epoch=min(producer_id, 0), base_sequence=sequence)
            requests, writer = Requests[wire.Produce](), ProduceWriter()
            session = ProduceSession(
                parts.registry,
                SharedTurns(TURN_BYTES),
                HeavyWork(parts.disk),
                max_in_flight=5,
                default_timeout_ms=30_000,
                who=Caller(name),
            )
            requests.send(RawClient.request(sent, [(TOPIC_ID, partition, 3, 1, batch)], log_pb2.LEADER))
            requests.end()
            await session.run(aiter(requests), writer)
            return writer.written[0].results[0].error.code

        ok = common_pb2.NONE
        assert [await send(ALICE, 1, partition) for partition in range(3)] == [ok] * 3
        assert await send(ALICE, 2, 0) == ok
        assert await send(ALICE, 3, 0) == common_pb2.BROKER_OVERLOADED
        assert await send(ALICE, 2, 1) == common_pb2.BROKER_OVERLOADED
        assert await send(ALICE, 1, 1, sequence=1) == ok, "a producer that the partition knows goes on"
        assert await send(ALICE, 1, 1) == ok, "a batch that is sent again begins nothing"
        assert await send(ALICE, -1, 1, sequence=-1) == ok, "a producer without an id is not remembered"
        assert await send(BOB, 3, 0) == ok
        assert begun(parts.registry.new_producers, ALICE) == 4


async def test_a_batch_that_is_not_appended_begins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers send it again for as long as the disk is full: each attempt would count for eleven minutes."""
    async with Parts(tmp_path) as parts:
        parts.registry.new_producers = NewProducers(parts.clock.monotonic_ms, most=4)
        partition = parts.registry.find(TOPIC_ID, 0)

        def send() -> None:
            partition.append(
                batch_of(b"", producer_id=1, producer_epoch=0, base_sequence=0),
                partition.leader_epoch,
                None,
                admit_producer=partial(parts.registry.new_producers.admit, ALICE),
            )

        def full(*arguments: object, **named: object) -> None:
            raise StorageFull("no space left")

        with monkeypatch.context() as patched:
            patched.setattr(partition.log, "append", full)
            for _ in range(10):
                with pytest.raises(StorageFull):
                    send()
        assert begun(parts.registry.new_producers, ALICE) == 0
        send()
        assert begun(parts.registry.new_producers, ALICE) == 1
