"""Commits in the order of the calls, also when some are sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest

from raftlog._client.groups import Claim, CommitQueue, Entry, Offsets, in_pieces, to_commit
from raftlog.errors import (
    CoordinatorNotAvailable,
    OffsetMetadataTooLarge,
    PartitionNotOwned,
    RaftlogError,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from raftlog.types import OffsetAndMetadata, TopicPartition
from raftlog.v1 import group_pb2
from tests.support import virtual_time

ZERO, ONE = TopicPartition("t", 0), TopicPartition("t", 1)


class Coordinator:
    """Accepts commits, or acts as the test says."""

    def __init__(self) -> None:
        self.taken: list[dict[TopicPartition, int]] = []
        self.refuse: Callable[[TopicPartition, int], RaftlogError | None] = lambda part, offset: None
        self.fail: list[RaftlogError] = []
        self.owner: object = "me"
        self.known: dict[TopicPartition, int] = {}
        self.topic_id = b""
        self.queue = CommitQueue(self.send, lambda part: self.claim(), lambda error, failures: 1.0, self.note)

    def claim(self) -> Claim:
        return Claim(self.owner, self.topic_id)

    def note(self, offsets: Offsets) -> None:
        self.known |= {part: offset.offset for part, offset in offsets.items()}

    async def send(self, entries: Mapping[TopicPartition, Entry]) -> dict[TopicPartition, RaftlogError | None]:
        offsets = {part: entry.offset for part, entry in entries.items()}
        await asyncio.sleep(0)
        if self.fail:
            raise self.fail.pop(0)
        errors = {part: self.refuse(part, offset.offset) for part, offset in offsets.items()}
        self.taken.append({part: offset.offset for part, offset in offsets.items() if errors[part] is None})
        return errors

    def put(self, offsets: dict[TopicPartition, int], timeout_ms: float = 60_000.0) -> asyncio.Future[None]:
        given = {part: OffsetAndMetadata(offset) for part, offset in offsets.items()}
        return self.queue.put(given, dict.fromkeys(given, self.claim()), timeout_ms)


def play(story: Callable[[Coordinator], Any]) -> None:
    async def main() -> None:
        await asyncio.wait_for(story(Coordinator()), 150)

    asyncio.run(main())


def test_what_is_asked_for_meanwhile_goes_together() -> None:
    async def story(it: Coordinator) -> None:
        first = it.put({ZERO: 1})
        await asyncio.sleep(0)
        later = [it.put({ZERO: offset, ONE: offset}) for offset in (2, 3, 4)]
        await asyncio.gather(first, *later)
        assert it.taken == [{ZERO: 1}, {ZERO: 4, ONE: 4}]
        assert it.known == {ZERO: 4, ONE: 4}
        await it.put({})

    play(story)


def test_a_failure_that_passes_is_tried_again_with_the_latest() -> None:
    async def story(it: Coordinator) -> None:
        it.fail = [CoordinatorNotAvailable("not now")] * 3
        first = it.put({ZERO: 1, ONE: 1})
        await asyncio.sleep(0)
        await asyncio.gather(first, it.put({ZERO: 2}))
        assert it.taken == [{ZERO: 2, ONE: 1}]

    play(story)


def test_what_is_left_of_an_earlier_commit_does_not_take_a_later_one_back() -> None:
    async def story(it: Coordinator) -> None:
        busy = [CoordinatorNotAvailable("not now")]
        it.refuse = lambda part, offset: busy.pop() if part == ONE and busy else None
        first = it.put({ZERO: 1, ONE: 1})
        second = it.put({ZERO: 2})
        await asyncio.gather(first, second)
        assert it.taken == [{ZERO: 2}, {ONE: 1}]

    play(story)


def test_one_partition_that_is_refused_fails_its_call_and_no_other() -> None:
    async def story(it: Coordinator) -> None:
        it.refuse = lambda part, offset: OffsetMetadataTooLarge("too long") if part == ONE else None
        both, other = it.put({ZERO: 1, ONE: 1}), it.put({ZERO: 2})
        with pytest.raises(OffsetMetadataTooLarge, match="t-1: too long"):
            await both
        await other
        assert it.known == {ZERO: 2}

    play(story)


def test_a_later_owners_offset_does_not_go_back_by_what_an_earlier_one_asked_for() -> None:
    async def story(it: Coordinator) -> None:
        it.fail = [CoordinatorNotAvailable("not now")]
        former = it.put({ZERO: 5})
        await asyncio.sleep(0)
        it.owner = "me again, after somebody else"
        with pytest.raises(PartitionNotOwned, match="taken from this consumer"):
            await former
        assert it.taken == []
        await it.put({ZERO: 9})
        assert it.taken == [{ZERO: 9}]

    play(story)


def test_an_offset_of_a_topic_that_was_made_again_does_not_get_into_the_new_one() -> None:
    async def story(it: Coordinator) -> None:
        it.topic_id = b"old"
        it.fail = [CoordinatorNotAvailable("not now")]
        former = it.put({ZERO: 5})
        await asyncio.sleep(0)
        it.topic_id = b"new"
        with pytest.raises(UnknownTopicId, match="deleted and created again"):
            await former
        assert it.taken == []
        await it.put({ZERO: 1})
        assert it.taken == [{ZERO: 1}]

    play(story)


def test_pieces_of_what_is_too_much_for_one_request() -> None:
    entries = [
        (TopicPartition("x" * 72, number), Entry(OffsetAndMetadata(10**12), b"i" * 16)) for number in range(9000)
    ]
    wire = to_commit(entries)
    assert not any(each.topic for each in wire), "a request with topic ids must not repeat the names"
    pieces = list(in_pieces(wire))
    assert [each.partition for piece in pieces for each in piece] == list(range(9000))
    large = [(ONE, Entry(OffsetAndMetadata(1, "x" * 4096), b""))] * 300
    pieces += in_pieces(to_commit(large))
    for piece in pieces:
        assert len(piece) <= 2000
        assert group_pb2.CommitOffsetsRequest(offsets=piece).ByteSize() < 300_000
    assert len(pieces) < 20
    assert list(in_pieces([])) == []


def test_the_last_refusal_after_the_time() -> None:
    async def story(it: Coordinator) -> None:
        it.fail = [CoordinatorNotAvailable("not now")] * 1000
        with pytest.raises(CoordinatorNotAvailable, match="not now"):
            await it.put({ZERO: 1}, 50.0)

        async def silent(offsets: Mapping[TopicPartition, Entry]) -> dict[TopicPartition, RaftlogError | None]:
            await asyncio.sleep(60)
            return {}

        it.queue._send = silent
        with pytest.raises(RaftlogError, match="has not answered in time"):
            await it.put({ZERO: 1}, 50.0)
        waits = it.put({ZERO: 1})
        await asyncio.sleep(0.01)
        await it.queue.close(CoordinatorNotAvailable("closed"))
        with pytest.raises(CoordinatorNotAvailable, match="closed"):
            await waits

    play(story)


def test_a_topic_that_is_denied_for_long_does_not_exist() -> None:
    async def story() -> None:
        it = Coordinator()
        it.refuse = lambda part, offset: UnknownTopicOrPartition("there is none")
        began = asyncio.get_running_loop().time()
        with pytest.raises(UnknownTopicOrPartition):
            await it.put({ZERO: 1}, 120_000.0)
        assert 1.5 < asyncio.get_running_loop().time() - began < 4.0

    virtual_time.run(story())


@pytest.mark.parametrize("seed", range(20))
def test_committed_offsets_never_go_back_at_random(seed: int) -> None:
    async def story(it: Coordinator) -> None:
        chance = Random(seed)

        def refuse(part: TopicPartition, offset: int) -> RaftlogError | None:
            what = chance.random()
            return CoordinatorNotAvailable("") if what < 0.3 else OffsetMetadataTooLarge("") if what < 0.4 else None

        it.refuse = refuse
        calls: list[tuple[dict[TopicPartition, int], asyncio.Future[None]]] = []
        for offset in range(60):
            parts = {part: offset for part in (ZERO, ONE) if chance.random() < 0.7}
            calls.append((parts, it.put(parts)))
            if chance.random() < 0.3:
                await asyncio.sleep(0.002)
            if chance.random() < 0.2:
                it.fail.append(CoordinatorNotAvailable(""))
        await it.queue.flush()
        await asyncio.gather(*(future for _, future in calls), return_exceptions=True)
        reached: dict[TopicPartition, int] = {}
        for sent in it.taken:
            for part, offset in sent.items():
                assert offset > reached.get(part, -1)
                reached[part] = offset
        for parts, future in calls:
            if future.exception() is None:
                assert all(reached[part] >= offset for part, offset in parts.items())

    play(story)
