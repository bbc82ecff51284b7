"""Converting batches does not hold up the event loop, whatever they inflate to."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from broker.kafka import errors, produce, record_batches
from broker.kafka import fetch as fetch_module
from broker.kafka.codec import Fields
from broker.kafka.fetch import Fetch
from broker.kafka.produce import EXPECTED_COST, Produce
from broker.kafka.record_batches import LOOP_COST
from broker.log.partition_log import ReadResult
from broker.observability.counters import Counters
from broker.quotas.heavy_work import THREADS, TOTAL_COST, HeavyWork
from broker.quotas.new_producers import NewProducers
from broker.security.caller import Caller
from raftlog.format import Codec, Columns, InflateLimits, encode_batch, parse_header, validate_produced
from raftmeta.image import MetadataImage
from tests.support.kafka_batches import to_kafka
from tests.support.turns import counted_turns

ALICE = Caller(principal="User:alice")
POOL = ThreadPoolExecutor(THREADS)


def growing(size: int) -> bytes:
    """A value that is a few bytes as long as it is compressed."""
    return random.Random(1).randbytes(size // 500) + bytes(size - size // 500)


def batch_of(values: list[bytes], codec: Codec = Codec.NONE) -> bytes:
    return encode_batch(Columns(pa.array(values, pa.binary())), 1, codec=codec)


@asynccontextmanager
async def turns_left_to_others() -> AsyncIterator[Callable[[], int]]:
    """Count the turns; a thread's work leaves the event loop as many as it can take."""
    async with counted_turns() as turns:
        begun = turns.count
        yield lambda: turns.count - begun


# Produce


class Appended:
    """A broker with one partition, which notes in which thread a batch was checked."""

    def __init__(self) -> None:
        self.on_loop: list[bool] = []
        self.batches: list[bytes] = []
        self.work = HeavyWork(POOL)
        partition = SimpleNamespace(
            check_serving=lambda: None,
            inflate_limits=InflateLimits(),
            traces=None,
            check=self._check,
            append=self._append,
            log_end_offset=0,
            leader_epoch=1,
            log=SimpleNamespace(log_start_offset=0, topic_id=bytes(16), partition=0),
        )
        replica_manager: Any = SimpleNamespace(
            counters=Counters(),
            new_producers=NewProducers(lambda: 0.0),
            find=lambda topic_id, index: partition,
        )
        image: Any = SimpleNamespace(topic=lambda name: SimpleNamespace(name=name, topic_id=bytes(16)))
        self.produce = Produce(replica_manager, lambda: image, self.work, 1_000)

    def _check(self, batch: bytes) -> Any:
        self.on_loop.append(threading.current_thread() is threading.main_thread())
        return validate_produced(batch)

    def _append(self, batch: bytes, epoch: int, answer: Any, **_: Any) -> tuple[int, int]:
        self.batches.append(batch)
        answer(None)
        return 0, 0

    async def send(self, *batches: bytes) -> list[Fields]:
        """Produce each to a partition, and return their answers."""
        parts = [{"index": number, "records": batch} for number, batch in enumerate(batches)]
        request = {"acks": -1, "timeout_ms": 1_000, "transactional_id": None}
        topics = [{"name": "t", "topic_id": bytes(16), "partition_data": parts}]
        begun = await self.produce.begin({**request, "topic_data": topics}, 8, ALICE)
        (topic,) = (await begun)["responses"]
        answers: list[Fields] = topic["partition_responses"]
        return answers


def code_of(answer: Fields) -> int:
    return int(answer.get("error_code", errors.NONE))


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("size", [600_000, 3 << 20])
async def test_a_few_bytes_that_inflate_to_many_are_converted_beside_the_event_loop(codec: Codec, size: int) -> None:
    """200 such batches of 3 MiB each, in one request of 674 KB, took the broker's lease."""
    broker = Appended()
    (sent,) = to_kafka(batch_of([growing(size)], codec))
    assert len(sent) < 64 << 10 or codec is Codec.SNAPPY
    async with turns_left_to_others() as turns:
        answers = await broker.send(sent, sent)
        assert turns() > 0
    assert list(map(code_of, answers)) == [errors.NONE] * 2
    assert broker.on_loop == [False] * 2
    assert broker.work.room.free == TOTAL_COST


async def test_what_a_partition_s_batches_inflate_to_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[int | None] = []
    converted = produce._converted

    def noted(partition: Any, records: Any, epoch: int | None, most_cost: int | None = None) -> Any:
        bounds.append(most_cost)
        return converted(partition, records, epoch, most_cost)

    monkeypatch.setattr(produce, "_converted", noted)
    (large,) = to_kafka(batch_of([growing(600_000)], Codec.ZSTD))
    (small,) = to_kafka(batch_of([b"v"], Codec.ZSTD))
    broker = Appended()
    for sent in (large, large, small, small, large):
        await broker.send(sent)
    assert bounds == [LOOP_COST, EXPECTED_COST, EXPECTED_COST, LOOP_COST, LOOP_COST, LOOP_COST, EXPECTED_COST]


async def test_many_records_of_few_bytes_are_converted_beside_the_event_loop() -> None:
    broker = Appended()
    (sent,) = to_kafka(batch_of([b""] * 5_000, Codec.ZSTD))
    (small,) = to_kafka(batch_of([b"v" * 100] * 100, Codec.ZSTD))
    await broker.send(sent, small)
    assert broker.on_loop == [False, True]
    assert [parse_header(batch).record_count for batch in broker.batches] == [5_000, 100]


async def test_the_event_loop_has_its_turns_among_many_cheap_batches() -> None:
    """A hundred of 60 KiB were converted between two turns."""
    broker = Appended()
    (sent,) = to_kafka(batch_of([bytes(60_000)]))
    (packed,) = to_kafka(batch_of([bytes(60_000)], Codec.GZIP))
    refused = sent[:-1] + b"x"
    for batch in (sent, packed, refused):
        async with turns_left_to_others() as turns:
            await broker.send(*[batch] * 40)
            assert turns() >= 40 // 3, "three cost more than LOOP_COST"
    assert all(broker.on_loop)


async def test_too_many_records_are_too_large_a_message() -> None:
    """For which Kafka's clients split a batch, or tell their caller."""
    (sent,) = to_kafka(batch_of([b""] * 100, Codec.GZIP))
    broker = Appended()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_batches, "MAX_RECORDS", 99)
        (answer,) = await broker.send(sent)
    assert answer["error_code"] == 10  # MESSAGE_TOO_LARGE
    assert "at most 99" in answer["error_message"]


# Fetch


class Reading:
    """A broker with one partition that has one batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batch: bytes) -> None:
        nothing: Any = SimpleNamespace(
            lease=SimpleNamespace(valid=lambda: True, stop_waiting=lambda wake: None), counters=Counters()
        )
        self.suspected: list[int] = []
        self.work = HeavyWork(POOL)
        self.fetch = Fetch(nothing, MetadataImage, nothing, self.work)
        partition = SimpleNamespace(
            wait=lambda wake, from_follower: None,
            stop_waiting=lambda wake: None,
            suspect=self.suspected.append,
            high_watermark=9,
            last_stable_offset=9,
            log=SimpleNamespace(log_start_offset=0, topic_id=bytes(16), partition=0),
            traces=None,
        )

        async def read_one(*_: Any, **__: Any) -> tuple[Any, ReadResult, bool]:
            return partition, ReadResult(batch, 9), False

        monkeypatch.setattr(self.fetch, "topic", lambda named, reads: SimpleNamespace(name="t"))
        monkeypatch.setattr(self.fetch, "read_one", read_one)

    async def records(self, offset: int = 0, who: Caller = ALICE) -> list[bytes]:
        """Fetch from an offset, and return the batches of the response."""
        part = {"current_leader_epoch": 0, "partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
        request: Fields = {
            "session_id": 0,
            "session_epoch": -1,
            "topics": [{"topic": "t", "partitions": [part]}],
            "forgotten_topics_data": (),
            "isolation_level": 0,
            "max_wait_ms": 0,
            "min_bytes": 1,
            "max_bytes": 1 << 20,
            "rack_id": "",
        }

        async def take(most: int, within_s: float) -> Any:
            return SimpleNamespace(size=most, resize=lambda size: None, give=lambda: None)

        response = await self.fetch.serve(request, 11, who, take)
        (topic,) = response["responses"]
        found: list[bytes] = topic["partitions"][0]["records"]
        return found


async def test_a_few_bytes_of_very_many_records_are_converted_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three million empty records, 12 KB, stopped a broker for 20 seconds."""
    batch = batch_of([b""] * 200_000, Codec.GZIP)
    assert len(batch) < 2_000
    broker = Reading(monkeypatch, batch)
    async with turns_left_to_others() as turns:
        found = await broker.records()
        assert turns() > 0
    assert found == to_kafka(batch)
    assert broker.work.room.free == TOTAL_COST


async def test_a_few_bytes_that_inflate_to_many_leave_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Reading(monkeypatch, batch_of([growing(3 << 20)], Codec.ZSTD))
    async with turns_left_to_others() as turns:
        assert len(await broker.records()) == 1
        assert turns() > 0


async def test_cheap_batches_are_converted_on_the_event_loop_which_has_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HeavyWork, "conversion", None)
    batch = batch_of([bytes(1_000)] * 60, Codec.ZSTD)
    broker = Reading(monkeypatch, batch * 20)
    async with turns_left_to_others() as turns:
        assert len(await broker.records()) == 20
        assert turns() >= 5


async def test_one_response_after_the_other_goes_through_a_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_batches, "PIECE_RECORDS", 1_000)
    monkeypatch.setattr(fetch_module, "MAX_RESPONSE_RECORDS", 2_000)
    batch = batch_of([b"v"] * 5_500, Codec.GZIP)
    broker = Reading(monkeypatch, batch)
    pieces = to_kafka(batch)
    assert len(pieces) == 6
    assert await broker.records(0) == pieces[:2]
    assert await broker.records(1_500) == pieces[1:3]
    assert await broker.records(4_000) == pieces[4:]
    assert await broker.records(5_499) == pieces[5:]


async def test_a_corrupt_batch_is_suspected_wherever_it_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in (batch_of([b"v"]), batch_of([b""] * 100_000, Codec.GZIP)):
        broker = Reading(monkeypatch, batch[:80] + bytes(len(batch) - 80))
        assert not await broker.records(7)
        assert broker.suspected == [7]


async def test_a_conversion_ends_when_its_client_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_batches, "PIECE_RECORDS", 1_000)
    monkeypatch.setattr(fetch_module, "STEP_COST", 1)
    stepping, may_step = threading.Event(), threading.Event()
    steps = 0

    class Slow(record_batches.ToKafka):
        def step(self, most_cost: int | None = None) -> list[bytes]:
            nonlocal steps
            steps += 1
            stepping.set()
            assert may_step.wait(10)
            return super().step(most_cost)

    monkeypatch.setattr(fetch_module, "ToKafka", Slow)
    broker = Reading(monkeypatch, batch_of([b""] * 20_000, Codec.GZIP))
    fetching = asyncio.ensure_future(broker.records())
    await asyncio.to_thread(stepping.wait)
    fetching.cancel()
    await asyncio.sleep(0)
    assert broker.work.room.held("User:alice"), "a step cannot be cancelled, and holds what it holds"
    may_step.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert steps == 1
    assert broker.work.room.free == TOTAL_COST


def test_without_a_login_a_network_has_a_share() -> None:
    assert Caller(host="10.0.0.1").share == "10.0.0.1"
    assert ALICE.share == "User:alice"


def test_a_bound_of_ordinary_batches_covers_what_runs_on_the_event_loop() -> None:
    assert produce.EXPECTED_RATIO * LOOP_COST < EXPECTED_COST
