"""Members of a group where something ends in the wrong moment, is too large, or is not what was meant."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raftlog import Consumer, OffsetAndMetadata, RebalanceListener, Record, TopicPartition, aio
from raftlog.errors import (
    ClosedError,
    InvalidConfig,
    InvalidGroupId,
    InvalidRequestError,
    InvalidTopic,
    OffsetMetadataTooLarge,
    PartitionNotOwned,
    RaftlogError,
    UnreleasedInstanceId,
)
from tests.support.fake_broker import FakeCluster
from tests.support.group_world import ONE, THREE, TWO, ZERO, Told, World, until

ALL = [ZERO, ONE, TWO, THREE]


@pytest.fixture
def world() -> Iterator[World]:
    with FakeCluster(nodes=2) as cluster:
        world = World(cluster)
        yield world
        for consumer in world.open:
            consumer.close()


class TestLosses:
    def lose(self, world: World, consumer: Consumer) -> None:
        world.members.refuse_joins = [UnreleasedInstanceId("not yet")] * 3
        world.do(lambda: world.members.fence(world.member_id(consumer)))
        until(lambda: not consumer._engine.positions.states)

    def test_a_commit_of_what_was_lost_fails_once(self, world: World) -> None:
        world.send(8)
        consumer = world.consumer(enable_auto_commit=False)
        consumer.subscribe("t")
        read: list[Record] = []
        while len(read) < 8:
            read += consumer.poll(1)
        consumer.commit({ZERO: 2})
        self.lose(world, consumer)
        with pytest.raises(PartitionNotOwned, match=r"has lost t-1, t-2, t-3 before"):
            consumer.commit()
        consumer.commit()
        assert world.committed(ONE) is None

    def test_also_when_it_is_a_member_again(self, world: World) -> None:
        world.send(4, partition=0)
        consumer, told = world.consumer(enable_auto_commit=False), Told()
        consumer.subscribe("t", listener=told)
        assert len(consumer.poll(30)) == 4
        self.lose(world, consumer)
        assert consumer.assignment() == ALL, "the application was not told"
        until(lambda: len(told.events) == 3, consumer)
        assert consumer.assignment() == ALL
        over: list[tuple[dict[TopicPartition, OffsetAndMetadata], RaftlogError | None]] = []
        consumer.commit_async(callback=lambda offsets, error: over.append((offsets, error)))
        until(lambda: over)
        assert over[0][0] == {ZERO: OffsetAndMetadata(4)}
        assert isinstance(over[0][1], PartitionNotOwned)
        consumer.commit()

    def test_nothing_handed_out_is_nothing_lost(self, world: World) -> None:
        world.send(4, partition=0)
        consumer = world.consumer(enable_auto_commit=False)
        consumer.subscribe("t")
        self.lose(world, consumer)
        consumer.commit()

    def test_what_was_revoked_is_not_lost(self, world: World) -> None:
        world.send(8)
        first, second = world.consumer(enable_auto_commit=False), world.consumer()
        first.subscribe("t")
        until(lambda: all(first.position(part) == 2 for part in ALL), first)
        second.subscribe("t")
        until(lambda: len(first.assignment()) == 2, first)
        first.commit()
        assert world.committed(ZERO) == 2


class TestEnds:
    @pytest.mark.parametrize("call", ["close", "unsubscribe"])
    def test_in_a_listener(self, world: World, call: str) -> None:
        consumer = world.consumer()

        class Ending(Told):
            def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
                super().on_partitions_revoked(partitions)
                getattr(consumer, call)()

        told = Ending()
        consumer.subscribe("t", listener=told)
        getattr(consumer, call)()
        assert [kind for kind, _ in told.events] == ["assigned", "revoked"]
        until(lambda: not world.members.members)

    def test_in_a_listener_out_of_poll(self, world: World) -> None:
        first, second = world.consumer(), world.consumer()

        class Ending(Told):
            def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
                super().on_partitions_revoked(partitions)
                first.close()

        told = Ending()
        first.subscribe("t", listener=told)
        second.subscribe("t")
        with pytest.raises(ClosedError):
            until(lambda: False, first)
        assert sorted(part for kind, parts in told.events if kind == "revoked" for part in parts) == ALL

    def test_from_another_thread_what_is_being_worked_on_is_not_done(self, world: World) -> None:
        world.send(4, partition=0)
        consumer = world.consumer()
        consumer.subscribe("t")
        assert len(consumer.poll(30)) == 4
        closer = threading.Thread(target=consumer.close)
        closer.start()
        closer.join()
        assert world.committed() in (None, 0)

    def test_subscribing_to_more_is_not_coming_back(self, world: World) -> None:
        world.cluster.create_topic("u", 1)
        world.send(8, partition=0)
        consumer = world.consumer(auto_commit_interval_ms=0)
        consumer.subscribe("t")
        for expected in range(3):
            assert next(consumer).offset == expected
        consumer.subscribe(["t", "u"])
        time.sleep(0.1)
        assert world.committed() in (None, 0, 1, 2)
        assert next(consumer).offset == 3
        until(lambda: world.committed() == 3)
        polled = world.consumer(auto_commit_interval_ms=0)
        consumer.close()
        polled.subscribe("t")
        assert len(polled.poll(30)) == 5
        polled.subscribe(["u"])  # the partition is revoked, and what is done of it committed
        assert world.committed() == 3

    def test_waiting_for_the_group_is_not_staying_away(self, world: World) -> None:
        world.members.refuse_joins = [UnreleasedInstanceId("not yet")] * 8
        consumer = world.consumer(max_poll_interval_ms=200)
        began = time.monotonic()
        consumer.subscribe("t")
        assert consumer.assignment() == ALL
        assert time.monotonic() - began > 0.2
        until(lambda: not world.members.members)

    def test_a_forked_child_gets_nothing_of_what_was_fetched(self, world: World) -> None:
        world.send(4, partition=0)
        consumer = world.consumer()
        consumer.subscribe("t")
        assert next(consumer).offset == 0
        consumer._engine.abandon_after_fork()  # what the child does first
        with pytest.raises(ClosedError, match="make one in each process"):
            next(consumer)
        with pytest.raises(ClosedError):
            consumer.poll(0)
        assert os.getpid() == consumer._engine._pid


class TestSizes:
    def test_more_than_one_request_takes(self, world: World) -> None:
        world.cluster.create_topic("wide", 2100)
        for member in (True, False):
            consumer = world.consumer(enable_auto_commit=False)
            parts = [TopicPartition("wide", number) for number in range(2100)]
            if member:
                consumer.subscribe("wide")
            else:
                consumer.assign(parts)
            assert consumer.assignment() == parts
            consumer.commit({part: OffsetAndMetadata(7, "x" * 1000) for part in parts})
            found = consumer.committed(parts)
            assert {offset and offset.offset for offset in found.values()} == {7}
            consumer.close()
        assert max(world.cluster.groups.sizes) < 300_000

    def test_a_commit_that_cannot_be_read_fails_and_the_membership_goes_on(self, world: World) -> None:
        consumer, told = world.consumer(enable_auto_commit=False), Told()
        consumer.subscribe("t", listener=told)
        world.members.unreadable = "commit"
        with pytest.raises(InvalidRequestError, match="INVALID_ARGUMENT: what is that"):
            consumer.commit({ZERO: 1})
        world.members.unreadable = ""
        consumer.commit({ZERO: 1})
        assert [kind for kind, _ in told.events] == ["assigned"]

    def test_a_join_that_cannot_be_read_is_final_and_named(self, world: World) -> None:
        world.members.unreadable = "join"
        with pytest.raises(InvalidRequestError, match="INVALID_ARGUMENT: what is that"):
            world.consumer().subscribe("t")


class TestArguments:
    def test_offsets_that_cannot_be_sent_fail_alone(self, world: World, caplog: pytest.LogCaptureFixture) -> None:
        consumer = world.consumer()
        consumer.subscribe("t")
        wrong: list[Any] = [
            {ONE: 1 << 63},
            {ONE: OffsetAndMetadata(1, leader_epoch=1 << 31)},
            {ONE: OffsetAndMetadata(1, None)},  # type: ignore[arg-type]
            {ONE: OffsetAndMetadata(1, "\ud800")},
            {("t", 1 << 31): 1},
            {"t": 1},
            {("t", "1"): 1},
            Record("t", 1, (1 << 63) - 1, 0, None, None, ()),
        ]
        over: list[RaftlogError | None] = []
        for argument in wrong:
            consumer.commit_async({ZERO: 1}, lambda offsets, error: over.append(error))
            with pytest.raises(InvalidRequestError, match="t"):
                consumer.commit_async(argument)
        with pytest.raises(OffsetMetadataTooLarge):
            consumer.commit({ONE: OffsetAndMetadata(1, "x" * 1_000_000)})
        until(lambda: len(over) == len(wrong))
        assert set(over) == {None}
        assert "Traceback" not in caplog.text

    def test_lists_are_taken_and_other_things_named(self, world: World) -> None:
        consumer = world.consumer()
        consumer.subscribe("t")
        assert consumer.committed([ZERO]) == consumer.committed(ZERO) == {ZERO: None}
        consumer.pause([ZERO, ONE])
        assert consumer.paused() == [ZERO, ONE]
        consumer.resume([ZERO])
        consumer.seek_to_beginning([ZERO])
        consumer.seek_to_end([ZERO])
        broken: Any = consumer
        for call in (broken.assign, broken.position, broken.committed, broken.pause, broken.beginning_offsets):
            with pytest.raises(InvalidRequestError, match=r"TopicPartition\('orders', 0\)"):
                call("orders")
        for call in (broken.committed, broken.assign):
            with pytest.raises(InvalidRequestError, match="takes partitions: 'orders' is not a partition"):
                call(["orders"])
        with pytest.raises(InvalidRequestError, match="is not a partition"):
            broken.seek("orders", 0)

    @pytest.mark.parametrize("name", ["a b", "", ".", "x" * 250, "ä"])
    def test_topics_that_no_cluster_can_have(self, world: World, name: str) -> None:
        with pytest.raises(InvalidTopic, match="no topic can have the name"):
            world.consumer().subscribe([name])
        with pytest.raises(InvalidRequestError, match="by name"):
            broken: Any = world.consumer()
            broken.subscribe([ZERO])

    @pytest.mark.parametrize("client", [Consumer, aio.Consumer])
    def test_options_of_groups(self, client: Any) -> None:
        for options in ({"group_instance_id": "one"}, {"config": {"group.instance.id": "one"}}):
            with pytest.raises(InvalidConfig, match=r"set group\.id"):
                client("127.0.0.1:1", **options)
        with pytest.raises(InvalidConfig, match=r"group\.instance\.id is empty"):
            client("127.0.0.1:1", group_id="g", group_instance_id="")
        with pytest.raises(InvalidGroupId, match="5 is not a string"):
            client("127.0.0.1:1", group_id=5)


def test_listeners_need_no_override() -> None:
    assert RebalanceListener().on_partitions_lost([ZERO]) is None
