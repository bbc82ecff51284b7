"""Consumers with a group, against a coordinator that does what the test wants: who reads what, and from where."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raftlog import Producer, RebalanceListener, Record, TopicPartition, aio
from raftlog._client import group_consumer
from raftlog.errors import (
    InvalidRequestError,
    RaftlogError,
    UnstableOffsetCommit,
)
from raftlog.v1 import group_pb2
from tests.support.fake_broker import FakeCluster
from tests.support.group_world import ONE, THREE, TWO, ZERO, Told, World, until


@pytest.fixture
def world() -> Iterator[World]:
    with FakeCluster(nodes=2) as cluster:
        world = World(cluster)
        yield world
        world.close()


class TestSharing:
    def test_a_member_alone_reads_everything_and_returns_when_it_knows(self, world: World) -> None:
        consumer, told = world.consumer(), Told()
        consumer.subscribe("t", listener=told)
        assert consumer.assignment() == [ZERO, ONE, TWO, THREE]
        assert told.events == [("assigned", [ZERO, ONE, TWO, THREE])]
        assert [consumer.position(part) for part in consumer.assignment()] == [0] * 4
        metadata = consumer.group_metadata()
        assert (metadata.group_id, metadata.member_epoch, len(metadata.member_id)) == ("g", 1, 32)

    def test_without_a_subscription_it_is_nobody_in_its_group(self, world: World) -> None:
        """So its offsets can be committed in a transaction, as they can be without one."""
        consumer = world.consumer()
        consumer.assign([ZERO])
        assert consumer.group_metadata() == ("g", "", -1, "")

    def test_it_is_no_member_until_the_application_has_heard_of_a_loss(self, world: World) -> None:
        """It is back already, in another epoch, in which offsets of what was read before the loss are not to count."""
        world.send(4)
        consumer = world.consumer()
        consumer.subscribe("t")
        until(lambda: consumer.group_metadata().member_epoch > 0, consumer)
        membership = consumer._group.engine.membership  # type: ignore[union-attr] # it has one
        before = membership.member_epoch
        world.do(lambda: world.members.fence(world.member_id(consumer)))
        until(lambda: membership.lost and membership.is_member and membership.member_epoch > before)
        assert consumer.group_metadata().member_epoch == -1
        until(lambda: consumer.group_metadata().member_epoch > 0, consumer)

    def test_only_partitions_that_move_are_revoked_and_nothing_is_read_twice(self, world: World) -> None:
        world.send(8)
        first, second, told = world.consumer(), world.consumer(), Told()
        first.subscribe("t", listener=told)
        read: list[Record] = []
        while len(read) < 8:
            read += first.poll(1)
        second.subscribe("t")
        read += until(lambda: len(second.assignment()) == 2 and len(first.assignment()) == 2, first, second)
        assert told.events[1:] == [("revoked", [ONE, THREE])]
        assert world.committed(ONE) == 2
        assert world.committed(ZERO) is None, "it stays, so nothing has to be committed yet"
        world.send(8)
        while len(read) < 16:
            read += first.poll(0.02) + second.poll(0.02)
        assert sorted(int(record.value or b"") for record in read) == list(range(16))

    def test_what_a_leaving_member_had_goes_to_the_others(self, world: World) -> None:
        first, second = world.consumer(), world.consumer()
        first.subscribe("t")
        second.subscribe("t")
        until(lambda: len(second.assignment()) == 2, first, second)
        second.close()
        until(lambda: len(first.assignment()) == 4, first)

    def test_an_assignment_that_is_taken_back_before_a_poll_takes_it_does_not_block_others(self, world: World) -> None:
        first, second, told = world.consumer(), world.consumer(), Told()
        first.subscribe("t", listener=told)
        second.subscribe("t")
        until(lambda: len(second.assignment()) == 2, first, second)
        world.do(lambda: world.members.fence(world.member_id(first)))  # all of it is offered to the second one
        until(lambda: ("lost", [ZERO, TWO]) in told.events, first)
        until(lambda: len(first.assignment()) == 2, first)  # while the second one does not poll

    def test_subscribing_to_something_else_moves_on(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(group_consumer, "_PUSH_GRACE_S", 60.0)
        world.cluster.create_topic("u", 1)
        consumer, told = world.consumer(), Told()
        consumer.subscribe("t", listener=told)
        consumer.subscribe(["u"])
        assert consumer.assignment() == [TopicPartition("u", 0)]
        assert ("revoked", [ZERO, ONE, TWO, THREE]) in told.events

    def test_a_pattern_is_resolved_here_and_follows_new_topics(self, world: World) -> None:
        world.members.first_new["t2"] = 0
        consumer = world.consumer(metadata_max_age_ms=100, auto_offset_reset="latest")
        consumer.subscribe(pattern="t.*")
        assert len(consumer.assignment()) == 4
        world.cluster.create_topic("t2", 1)
        with Producer(world.cluster.bootstrap) as producer:
            producer.send("t2", b"before anybody noticed").result(30)
        read = until(lambda: len(consumer.assignment()) == 5, consumer)
        read += until(lambda: consumer.position(TopicPartition("t2", 0)) == 1, consumer)
        assert [record.value for record in read] == [b"before anybody noticed"]

    def test_assign_reads_without_membership_and_uses_the_offsets(self, world: World) -> None:
        world.send(4, partition=0)
        first = world.consumer()
        first.assign([ZERO])
        assert len(first.poll(30)) == 4
        first.commit()
        assert world.committed() == 4
        assert world.members.members == {}
        second = world.consumer()
        second.assign([ZERO])
        assert second.position(ZERO) == 4

    def test_unsubscribing_leaves(self, world: World) -> None:
        consumer, told = world.consumer(), Told()
        consumer.subscribe("t", listener=told)
        consumer.unsubscribe()
        assert told.events[-1] == ("revoked", [ZERO, ONE, TWO, THREE])
        until(lambda: not world.members.members)
        assert consumer.assignment() == []
        with pytest.raises(InvalidRequestError, match="nothing to poll"):
            consumer.poll(0)
        consumer.subscribe("t")
        assert len(consumer.assignment()) == 4


class TestStarts:
    def test_a_committed_offset_wins(self, world: World) -> None:
        world.send(8)
        world.cluster.groups.groups["g"].offsets.update(world.cluster.groups.add("other", 1, {ONE: 1}).offsets)
        consumer = world.consumer()
        consumer.subscribe("t")
        assert [consumer.position(part) for part in (ZERO, ONE)] == [0, 1]

    def test_partitions_newer_than_the_groups_interest_are_read_from_their_start(self, world: World) -> None:
        world.send(8)
        world.members.first_new["t"] = 3
        consumer = world.consumer(auto_offset_reset="latest")
        consumer.subscribe("t")
        assert [consumer.position(part) for part in (TWO, THREE)] == [2, 0]

    def test_latest_once_found_is_kept(self, world: World) -> None:
        world.send(8)
        consumer = world.consumer(auto_offset_reset="latest", enable_auto_commit=False)
        consumer.subscribe("t")
        until(lambda: [world.committed(part) for part in (ZERO, ONE, TWO, THREE)] == [2] * 4)

    def test_an_offset_that_a_transaction_may_replace_is_waited_for(self, world: World) -> None:
        """KIP-447: who begins at it would read again what the transaction has dealt with."""
        world.send(8)
        group = world.cluster.groups.groups["g"]
        group.pending.add(ZERO)
        began_s = time.monotonic()
        world.consumer(default_api_timeout_ms=120_000).assign([ZERO])
        assert time.monotonic() - began_s < 40, "that may take as long as a transaction; polls go on"
        waiting, hasty = world.consumer(), world.consumer(isolation_level="read_uncommitted")
        for consumer in (waiting, hasty):
            consumer.assign([ZERO, ONE])
        assert until(lambda: waiting.position(ONE) == 2, waiting)
        with pytest.raises(UnstableOffsetCommit):
            world.consumer(retry_backoff_ms=120_000).committed(ZERO)  # no time for another try
        assert hasty.position(ZERO) == 0
        both = until(lambda: hasty.position(ZERO) == hasty.position(ONE) == 2, hasty)
        assert {record.partition for record in both} == {0, 1}
        assert waiting.poll(0.2) == []
        world.do(lambda: group.offsets.update({ZERO: group_pb2.CommitOffset(topic="t", partition=0, offset=1)}))
        world.do(lambda: group.pending.clear())
        assert [record.offset for record in until(lambda: waiting.position(ZERO) == 2, waiting)] == [1]

    def test_none_is_an_error(self, world: World) -> None:
        consumer = world.consumer(auto_offset_reset="none")
        consumer.subscribe("t")
        with pytest.raises(RaftlogError, match="auto\\.offset\\.reset=none"):
            consumer.poll(30)


class TestAsynchronous:
    def test_everything_once(self, world: World) -> None:
        world.send(8)
        options: dict[str, Any] = {"auto_offset_reset": "earliest", "auto_commit_interval_ms": 0}
        events: list[tuple[str, int]] = []

        class Awaited(RebalanceListener):
            async def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
                await asyncio.sleep(0)
                events.append(("assigned", len(partitions)))

            async def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
                await first.commit()
                events.append(("revoked", len(partitions)))

            def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
                events.append(("lost", len(partitions)))

        async def read(consumer: aio.Consumer, done: Callable[[], object]) -> list[Record]:
            found: list[Record] = []
            async with asyncio.timeout(60):
                while not done():
                    found += await consumer.poll(0.02)
            return found

        async def main() -> None:
            second = aio.Consumer(world.cluster.bootstrap, "g", **options)
            async with first, second:
                await first.subscribe("t", listener=Awaited())
                records: list[Record] = []
                while len(records) < 8:
                    records += await first.poll(1)
                first.commit_async({ZERO: 1})
                await first.commit(records[0])
                assert len(await first.committed()) == 4
                task = asyncio.create_task(read(second, lambda: len(second.assignment()) == 2))
                await second.subscribe("t")
                await read(first, lambda: len(first.assignment()) == 2)
                await task
                world.do(lambda: world.members.fence(first.group_metadata().member_id))
                await read(first, lambda: len(events) == 4)
                assert first.group_note() == ""
            with pytest.raises(InvalidRequestError, match="group_id"):
                await aio.Consumer(world.cluster.bootstrap).commit()

        first = aio.Consumer(world.cluster.bootstrap, "g", **options)
        asyncio.run(main())
        assert events[:4] == [("assigned", 4), ("revoked", 2), ("lost", 2), ("assigned", 2)]
        assert events[4:] == [("revoked", 2)]

    def test_a_yielded_record_is_not_committed_under_way(self, world: World) -> None:
        world.send(4, partition=0)

        async def main() -> None:
            async with aio.Consumer(world.cluster.bootstrap, "g", "earliest", auto_commit_interval_ms=0) as consumer:
                await consumer.subscribe("t")
                async for record in consumer:
                    await asyncio.sleep(0.05)
                    assert world.committed() in (None, *range(record.offset + 1))
                    if record.offset == 2:
                        break

        asyncio.run(main())
        assert world.committed() == 2
