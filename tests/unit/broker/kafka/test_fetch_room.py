"""A fetch reads as much as there is room for, and holds what its response has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.kafka import fetch as module
from broker.kafka.codec import Fields
from broker.kafka.fetch import Fetch, _Part
from broker.log.partition_log import ReadResult
from broker.quotas.heavy_work import HeavyWork
from broker.quotas.room import Hold, Room
from broker.security.caller import Caller
from raftmeta.image import MetadataImage
from tests.support.broker_parts import HeldDisk

BATCH = 100
AVAILABLE = 1_000


class Growing:
    """A conversion of one step, in which the records grow."""

    cost, spent, records, is_within_batch = 1, 0, 1, False

    def __init__(self, records: bytes, growth: int) -> None:
        self.size = growth * len(records)
        self.is_done = False

    def step(self, most_cost: int) -> list[bytes]:
        self.is_done = True
        return [bytes(self.size)]


class OnePartition:
    """A broker with one partition, whose log has AVAILABLE bytes in batches of BATCH."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nothing: Any = SimpleNamespace(
            lease=SimpleNamespace(valid=lambda: True, stop_waiting=lambda wake: None),
            counters=SimpleNamespace(topic=lambda name: SimpleNamespace(bytes_out=0)),
        )
        self.available = AVAILABLE
        self.growth = 2
        self.partitions = 1
        self.fetch = Fetch(nothing, MetadataImage, nothing, HeavyWork(HeldDisk()))
        self.partition = SimpleNamespace(
            wait=self._wait,
            stop_waiting=lambda wake: None,
            high_watermark=9,
            last_stable_offset=9,
            log=SimpleNamespace(log_start_offset=0),
            traces=None,
        )
        monkeypatch.setattr(self.fetch, "topic", lambda named, reads: SimpleNamespace(name="t"))
        monkeypatch.setattr(self.fetch, "read_one", self._read_one)
        monkeypatch.setattr(module, "ToKafka", lambda records, **_: Growing(records, self.growth))
        self.room = Room(10_000)
        self.holds: list[Hold | None] = []
        self.has_room = True

    def _wait(self, wake: Any, from_follower: bool) -> None:
        if self.available < AVAILABLE:  # more is appended once a fetch waits
            self.available = AVAILABLE
            wake()

    async def _read_one(
        self, wanted: _Part, topic: Any, isolation: Any, rack: str, room: int, who: Any, *, whole: bool
    ) -> tuple[Any, ReadResult, bool]:
        size = min(room, self.available // self.partitions) // BATCH * BATCH
        if not size and whole:
            size = min(BATCH, self.available)
        return self.partition, ReadResult(bytes(size), 9), False

    async def take(self, most: int, within_s: float) -> Hold | None:
        hold = await self.room.take("a", most, 50) if self.has_room else None
        self.holds.append(hold)
        return hold

    async def records(self, max_bytes: int, **fields: Any) -> int:
        """Fetch, and return how many bytes of records the response has."""
        part = {"current_leader_epoch": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 30}
        parts = [{"partition": each, **part} for each in range(self.partitions)]
        request: Fields = {
            "session_id": 0,
            "session_epoch": -1,
            "topics": [{"topic": "t", "partitions": parts}],
            "forgotten_topics_data": (),
            "isolation_level": 0,
            "max_wait_ms": 0,
            "min_bytes": 1,
            "max_bytes": max_bytes,
            "rack_id": "",
            **fields,
        }
        response = await self.fetch.serve(request, 11, Caller(), self.take)
        assert request["topics"] == (), "it may wait long"
        (topic,) = response["responses"]
        return sum(len(batch) for found in topic["partitions"] for batch in cast("list[bytes]", found["records"]))


async def test_a_response_holds_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OnePartition(monkeypatch)
    assert await one.records(500) == 1_000, "twice what was read"
    assert one.room.held("a") == 1_000


async def test_a_fetch_reads_less_where_there_is_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OnePartition(monkeypatch)
    one.room = Room(200)
    assert await one.records(500) == 400
    assert one.room.free == -200
    one.room = Room(60)
    assert await one.records(500) == 200, "a batch goes whole"


async def test_without_room_there_are_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OnePartition(monkeypatch)
    one.has_room = False
    assert await one.records(500) == 0


async def test_a_fetch_that_waits_for_records_holds_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OnePartition(monkeypatch)
    one.available = 0
    assert await one.records(500, max_wait_ms=10_000) == 1_000
    first, second = one.holds
    assert first is not None
    assert first.size == 0
    assert second is not None
    assert one.room.held("a") == second.size == 1_000


async def test_batches_that_grow_end_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer without zstd gets such batches uncompressed: a log of some MiB may be gigabytes then."""
    one = OnePartition(monkeypatch)
    one.partitions, one.growth = 4, module.MAX_RESPONSE_BYTES // 250
    assert await one.records(900) == one.growth * 400
    assert one.room.held("a") == one.growth * 400
