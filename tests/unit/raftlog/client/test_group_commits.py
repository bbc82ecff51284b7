"""Offsets that members of a group commit, when told to and by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from raftlog import Consumer, OffsetAndMetadata, Record, TopicPartition
from raftlog.errors import (
    CoordinatorNotAvailable,
    InvalidRequestError,
    PartitionNotOwned,
    RaftlogError,
    UnreleasedInstanceId,
)
from tests.support.fake_broker import FakeCluster
from tests.support.group_world import ONE, THREE, TWO, ZERO, Told, World, until


@pytest.fixture
def world() -> Iterator[World]:
    with FakeCluster(nodes=2) as cluster:
        world = World(cluster)
        yield world
        world.close()


class TestCommits:
    def test_forms(self, world: World) -> None:
        world.send(8)
        consumer = world.consumer(enable_auto_commit=False)
        consumer.subscribe("t")
        read: list[Record] = []
        while len(read) < 8:
            read += consumer.poll(1)
        assert consumer.committed(ZERO) == {ZERO: None}
        consumer.commit(read[0])
        part = TopicPartition(read[0].topic, read[0].partition)
        assert consumer.committed(part)[part] == OffsetAndMetadata(read[0].offset + 1)
        consumer.commit({ZERO: 1, ONE: OffsetAndMetadata(2, "note", 0)})
        assert consumer.committed(ZERO, ONE) == {ZERO: OffsetAndMetadata(1), ONE: OffsetAndMetadata(2, "note", 0)}
        consumer.commit()
        assert {offset.offset for offset in consumer.committed().values() if offset is not None} == {2}

    def test_a_seek_back_may_be_committed(self, world: World) -> None:
        world.send(8)
        consumer = world.consumer(enable_auto_commit=False)
        consumer.subscribe("t")
        consumer.commit({ZERO: 2})
        consumer.seek(ZERO, 1)
        consumer.commit()
        assert world.committed() == 1

    def test_what_cannot_be_committed(self, world: World) -> None:
        consumer = world.consumer()
        consumer.subscribe("t")
        wrong: list[Any] = [{ZERO: -1}, {ZERO: True}, {ZERO: "1"}, [ZERO], 7]
        for argument in wrong:
            with pytest.raises(InvalidRequestError):
                consumer.commit(argument)
        with pytest.raises(PartitionNotOwned, match="elsewhere-0"):
            consumer.commit({TopicPartition("elsewhere", 0): 1})
        with Consumer(world.cluster.bootstrap) as alone:
            for call in (alone.commit, alone.commit_async, alone.committed, alone.group_metadata, alone.group_note):
                with pytest.raises(InvalidRequestError, match="needs a consumer with a group_id"):
                    call()
            with pytest.raises(InvalidRequestError, match="a listener needs a consumer with a group_id"):
                alone.subscribe("t", listener=Told())

    def test_in_the_background_in_order_whatever_breaks(self, world: World) -> None:
        consumer = world.consumer(enable_auto_commit=False)
        consumer.subscribe("t")
        world.members.break_commits = 2
        world.members.refuse_commits = [CoordinatorNotAvailable("not now")]
        over: list[tuple[int, RaftlogError | None]] = []
        for offset in range(1, 30):
            consumer.commit_async({ZERO: offset}, lambda offsets, error: over.append((offsets[ZERO].offset, error)))
        consumer.commit({ZERO: 30})
        assert over == [(offset, None) for offset in range(1, 30)]
        taken = [offsets[ZERO] for _, _, offsets in world.members.commits if ZERO in offsets]
        assert taken == sorted(taken)
        assert taken[-1] == 30
        assert consumer.assignment() == [ZERO, ONE, TWO, THREE], "a stream that breaks is not a loss"

    def test_of_a_partition_that_was_lost(self, world: World) -> None:
        consumer, told = world.consumer(), Told()
        consumer.subscribe("t", listener=told)
        world.members.refuse_joins = [UnreleasedInstanceId("not yet")] * 3
        world.do(lambda: world.members.fence(world.member_id(consumer)))
        until(lambda: not consumer._engine.positions.states)
        with pytest.raises(PartitionNotOwned):
            consumer.commit({ZERO: 1})
        assert consumer.assignment() == [ZERO, ONE, TWO, THREE], "until the application was told"
        assert told.events[1:] == [], "the application is told in its own thread"
        until(lambda: len(told.events) == 3, consumer)
        assert [kind for kind, _ in told.events] == ["assigned", "lost", "assigned"]
        assert consumer.group_metadata().member_epoch > 1

    def test_inside_a_listener_before_others_get_the_partitions(self, world: World) -> None:
        world.send(8)
        first, second = world.consumer(enable_auto_commit=False), world.consumer()

        class Careful(Told):
            def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
                super().on_partitions_revoked(partitions)
                first.commit(dict.fromkeys(partitions, 1))

        first.subscribe("t", listener=Careful())
        until(lambda: first.position(THREE) == 2, first)
        second.subscribe("t")
        until(lambda: world.committed(ONE) == 1, first)
        read = until(lambda: len(second.assignment()) == 2 and second.position(ONE) == 2, second)
        assert [(record.partition, record.offset) for record in read if record.partition == 1] == [(1, 1)]


class TestAutomaticCommits:
    def test_polled_records_are_done_when_the_next_ones_are_asked_for(self, world: World) -> None:
        world.send(8, partition=0)
        consumer = world.consumer(auto_commit_interval_ms=0, max_poll_records=4)
        consumer.subscribe("t")
        assert len(consumer.poll(30)) == 4
        time.sleep(0.1)
        assert world.committed() in (None, 0)
        assert len(consumer.poll(30)) == 4
        until(lambda: world.committed() == 4)
        time.sleep(0.1)
        assert world.committed() == 4

    def test_a_yielded_record_is_done_when_the_next_one_is_asked_for(self, world: World) -> None:
        world.send(8, partition=0)
        consumer = world.consumer(auto_commit_interval_ms=0)
        consumer.subscribe("t")
        for record in consumer:
            time.sleep(0.05)
            assert world.committed() in (None, *range(record.offset + 1)), "not while it is being worked on"
            if record.offset == 3:
                break
        consumer.close()
        assert world.committed() == 3

    def test_while_iteration_waits_for_more(self, world: World) -> None:
        world.send(2, partition=0)
        consumer = world.consumer(auto_commit_interval_ms=50)
        consumer.subscribe("t")
        assert [next(consumer).offset for _ in range(2)] == [0, 1]
        consumer._engine.options = replace(consumer._engine.options, consumer_timeout_ms=60_000)

        def send_once_it_has() -> None:
            until(lambda: world.committed() == 2)
            world.send(1, partition=0)

        sending = threading.Thread(target=send_once_it_has)
        sending.start()
        assert next(consumer).offset == 2
        sending.join()

    @pytest.mark.parametrize("explicitly", [True, False])
    def test_closing_commits_what_was_polled_but_not_under_an_exception(self, world: World, explicitly: bool) -> None:
        world.send(8, partition=0)
        with world.consumer() as consumer:
            consumer.subscribe("t")
            assert len(consumer.poll(30, max_records=4)) == 4
        assert world.committed() == 4
        consumer = world.consumer()
        with pytest.raises(ZeroDivisionError):
            if explicitly:
                try:
                    consumer.subscribe("t")
                    consumer.poll(30)
                    _ = 1 / 0
                finally:
                    consumer.close()
            else:
                with consumer:
                    consumer.subscribe("t")
                    consumer.poll(30)
                    _ = 1 / 0
        assert world.committed() == 4

    def test_arrow_counts_as_well(self, world: World) -> None:
        world.send(8, partition=0)
        consumer = world.consumer(auto_commit_interval_ms=0)
        consumer.subscribe("t")
        assert consumer.poll_arrow(30, max_records=3).num_rows == 3
        time.sleep(0.05)
        assert world.committed() in (None, 0)
        consumer.poll_arrow(30)
        until(lambda: world.committed() == 3)
