"""Consumers with a group against a scripted coordinator: sharing, commits, sessions and their ends."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from raftlog import Consumer, OffsetAndMetadata, Producer, RebalanceListener, Record, TopicPartition, aio
from raftlog._client import connections as client_connections
from raftlog._client import group_consumer
from raftlog._client.groups import checked
from raftlog._core import membership
from raftlog.errors import (
    AuthenticationFailed,
    BrokerUnavailable,
    ClosedError,
    CoordinatorNotAvailable,
    FencedInstanceId,
    GroupAuthorizationFailed,
    InvalidConfig,
    InvalidGroupId,
    InvalidRequestError,
    InvalidTopic,
    OffsetMetadataTooLarge,
    PartitionNotOwned,
    RaftlogError,
    TopicAuthorizationFailed,
    UnknownMemberId,
    UnreleasedInstanceId,
    UnstableOffsetCommit,
    UnsupportedAssignor,
)
from raftlog.v1 import group_pb2
from tests.support.batches import batch_of
from tests.support.fake_broker import FakeCluster
from tests.support.group_world import ONE, THREE, TWO, ZERO, Told, World, until
from tests.support.patience import refusal


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
        assert world.committed(ZERO) is None, "the offset must not be committed, as the partition stays"
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

    def test_the_listener_hears_of_partitions_that_go_also_if_the_commit_before_is_interrupted(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a call of the awaitable consumer is that its caller gives up."""
        world.cluster.create_topic("u", 1)
        consumer, told = world.consumer(), Told()
        consumer.subscribe("t", listener=told)
        group = consumer._group
        assert group is not None
        commits = group._commit_now
        interrupted: list[object] = []

        def interrupt_once(*arguments: Any) -> None:
            if not interrupted:
                interrupted.append(arguments)
                raise KeyboardInterrupt
            commits(*arguments)

        monkeypatch.setattr(group, "_commit_now", interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            consumer.subscribe(["u"])
        assert told.events[1:] == [("revoked", [ZERO, ONE, TWO, THREE])]

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

    def test_a_seek_amid_the_look_up_of_the_end_commits_nothing(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The records that a poll has returned since are not processed: a later member has to get them."""
        world.send(8)
        consumer = world.consumer(auto_offset_reset="latest", enable_auto_commit=False)
        engine = consumer._engine
        assert isinstance(engine, group_consumer.GroupEngine)
        ask, asked, answered = engine.lookup.ask, threading.Event(), asyncio.Event()

        async def late(*arguments: Any) -> Any:
            asked.set()
            await answered.wait()
            return await ask(*arguments)

        class Seeking(RebalanceListener):
            def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
                assert asked.wait(30)
                for part in partitions:
                    consumer.seek(part, 0)

        monkeypatch.setattr(engine.lookup, "ask", late)
        consumer.subscribe("t", listener=Seeking())
        left = world.sent
        while left:
            left -= len(consumer.poll(30))
        engine.loop.call_soon_threadsafe(answered.set)
        until(lambda: not engine._placing)
        consumer.commit({ONE: 1})  # behind every earlier commit
        assert [world.committed(part) for part in (ZERO, ONE, TWO, THREE)] == [None, 1, None, None]

    def test_an_offset_that_a_transaction_may_replace_is_waited_for(self, world: World) -> None:
        """KIP-447: a consumer that begins at it would read again what the transaction has processed."""
        world.send(8)
        group = world.cluster.groups.groups["g"]
        group.pending.add(ZERO)
        began_s = time.monotonic()
        world.consumer(default_api_timeout_ms=120_000).assign([ZERO])
        assert time.monotonic() - began_s < 40, (
            "assign must not wait for a pending transaction, as polls can wait for it"
        )
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
    def test_members_of_aio_read_every_record_once(self, world: World) -> None:
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


class TestCommits:
    def test_a_commit_takes_a_record_offsets_or_nothing(self, world: World) -> None:
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
        assert consumer.assignment() == [ZERO, ONE, TWO, THREE], "a stream that breaks must not lose the partitions"

    def test_of_a_partition_that_was_lost(self, world: World) -> None:
        consumer, told = world.consumer(), Told()
        consumer.subscribe("t", listener=told)
        world.members.refuse_joins = [UnreleasedInstanceId("not yet")] * 3
        world.do(lambda: world.members.fence(world.member_id(consumer)))
        until(lambda: not consumer._engine.positions.states)
        with pytest.raises(PartitionNotOwned):
            consumer.commit({ZERO: 1})
        assert consumer.assignment() == [ZERO, ONE, TWO, THREE], (
            "the partitions must stay assigned until the application was told of the loss"
        )
        for part in consumer.assignment():
            consumer.seek(part, 0)
        consumer.pause(consumer.assignment())
        consumer.resume(consumer.assignment())
        assert told.events[1:] == [], "the listener must be called in the application's own thread, in a poll"
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
            assert world.committed() in (None, *range(record.offset + 1)), (
                "a record was committed while the application was working on it"
            )
            if record.offset == 3:
                break
        consumer.close()
        assert world.committed() == 3

    def test_while_iteration_waits_for_more(self, world: World) -> None:
        world.send(2, partition=0)
        consumer = world.consumer(auto_commit_interval_ms=50)
        consumer.subscribe("t")
        assert [next(consumer).offset for _ in range(2)] == [0, 1]
        consumer._engine.options = consumer._engine.options.but(consumer_timeout_ms=60_000)

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


def over_in(seconds: float, consumer: Consumer) -> None:
    """Let a member's session, of a minute, be over so soon, unless an answer comes."""
    found = consumer._group.engine.membership  # type: ignore[union-attr] # it has one
    consumer._thread.loop.call_soon_threadsafe(
        lambda: setattr(found, "session_deadline_ms", time.monotonic() * 1000 + seconds * 1000)
    )


def await_heartbeat(consumer: Consumer) -> None:
    """Wait until a heartbeat is under way that was sent from now on: what was before has had its answer then."""
    found = consumer._group.engine.membership  # type: ignore[union-attr] # it has one
    now_ms = time.monotonic() * 1000
    until(lambda: (found._unanswered or (0.0, 0))[0] > now_ms)


class TestSessions:
    def test_a_new_coordinator_is_told_what_is_read_and_nothing_is_lost(self, world: World) -> None:
        consumer, told = world.consumer(), Told()
        consumer.subscribe("t", listener=told)
        world.do(lambda: world.cluster.groups.move("g", 2))
        member = world.members.members[world.member_id(consumer)]
        until(lambda: len(member.joins) >= 2, consumer)
        again = member.joins[1]
        assert (again.member_epoch, again.member_id) == (1, world.member_id(consumer))
        assert [list(each.partitions) for each in again.owned] == [[0, 1, 2, 3]]
        world.send(4)
        parts = (ZERO, ONE, TWO, THREE)
        assert len(until(lambda: all(consumer.position(part) == 1 for part in parts), consumer)) == 4
        assert len(told.events) == 1

    @pytest.mark.parametrize("how", ["kill", "freeze"])
    def test_a_coordinator_that_goes_away(self, world: World, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(membership, "_SILENCE", 1 / 60)
        consumer, told = world.consumer(), Told()
        consumer.subscribe("t", listener=told)
        getattr(world.cluster, how)(1)
        for partition in range(4):
            world.cluster.move_leader("t", partition, 2)
        world.do(lambda: world.cluster.groups.move("g", 2))
        member = world.members.members[world.member_id(consumer)]
        until(lambda: len(member.joins) >= 2, consumer)
        consumer.commit({ZERO: 0})
        assert len(told.events) == 1
        if how == "freeze":
            world.cluster.thaw(1)

    def test_without_answers_everything_is_lost_before_the_session_timeout_is_over(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        consumer, told = world.consumer(), Told()
        consumer.subscribe("t", listener=told)
        world.send(4)
        world.members.mute = True
        await_heartbeat(consumer)
        began = time.monotonic()
        over_in(0.8, consumer)
        until(lambda: len(told.events) == 2, consumer)
        assert told.events[1] == ("lost", [ZERO, ONE, TWO, THREE])
        assert 0.7 < time.monotonic() - began < 30, "the partitions must be lost when the session is over, after 0.8 s"
        assert "no answer from the coordinator within the session timeout" in caplog.text
        world.members.mute = False
        until(lambda: len(told.events) == 3, consumer)

    def test_a_poll_beside_the_end_of_the_session_returns_no_record(self, world: World) -> None:
        """The clients' event loop has noticed the end, and is about to take the partitions from the polling thread."""
        world.send(8, partition=0)
        consumer, told = world.consumer(), Told()
        consumer.subscribe("t", listener=told)
        assert [record.offset for record in consumer.poll(30, max_records=1)] == [0]
        noticed, go_on = threading.Event(), threading.Event()

        class Held(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "joining again" in record.getMessage():
                    noticed.set()
                    assert go_on.wait(60)

        world.members.mute = True
        world.members.refuse_joins = [UnreleasedInstanceId("not yet")] * 100
        held, of_clients = Held(), logging.getLogger("raftlog._client.groups")
        of_clients.addHandler(held)
        try:
            await_heartbeat(consumer)
            over_in(0.0, consumer)
            consumer._thread.loop.call_soon_threadsafe(consumer._group.engine.session.tick)  # type: ignore[union-attr] # it has one
            assert noticed.wait(60)
            threading.Timer(0.3, go_on.set).start()
            assert consumer.poll(0.1) == []
        finally:
            go_on.set()
            of_clients.removeHandler(held)
        assert told.events[1:] == [("lost", [ZERO, ONE, TWO, THREE])]

    def test_records_that_wait_in_an_iteration_are_not_handed_out_after_a_loss(self, world: World) -> None:
        world.send(8, partition=0)
        consumer = world.consumer()
        consumer.subscribe("t")
        assert next(consumer).offset == 0
        consumer._engine.options = consumer._engine.options.but(consumer_timeout_ms=300)
        world.members.refuse_joins = [UnreleasedInstanceId("not yet")] * 100
        world.do(lambda: world.members.fence(world.member_id(consumer)))
        until(lambda: not consumer._engine.positions.states)
        assert list(consumer) == []

    def test_who_stays_away_from_poll_leaves_and_comes_back(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        interval_ms = 600_000
        consumer, told = world.consumer(max_poll_interval_ms=interval_ms), Told()
        consumer.subscribe("t", listener=told)
        engine = consumer._group.engine  # type: ignore[union-attr] # it has one

        def send_while_it_waits() -> None:
            until(lambda: engine.polled_ms == math.inf)  # waiting for records is not staying away
            world.send(1)

        sending = threading.Thread(target=send_while_it_waits)
        sending.start()
        assert len(consumer.poll(60)) == 1
        sending.join()
        assert len(world.members.members) == 1
        engine.polled_ms -= interval_ms
        until(lambda: not world.members.members)
        assert "max.poll.interval.ms" in caplog.text
        until(lambda: len(told.events) == 3, consumer)
        assert [kind for kind, _ in told.events] == ["assigned", "lost", "assigned"]

    @pytest.mark.parametrize("error", [UnsupportedAssignor("no such"), FencedInstanceId("somebody else")])
    def test_what_is_refused_for_good_is_raised(self, world: World, error: RaftlogError) -> None:
        world.members.refuse_joins = [error]
        consumer = world.consumer()
        with pytest.raises(type(error)):
            consumer.subscribe("t")
        with pytest.raises(type(error)):
            consumer.poll(30)
        consumer.subscribe("t")
        assert len(consumer.assignment()) == 4, "a subscription after the error must work"

    def test_a_static_member_that_was_replaced_says_so_out_of_poll(self, world: World) -> None:
        consumer, told = world.consumer(group_instance_id="one"), Told()
        consumer.subscribe("t", listener=told)
        world.do(lambda: world.members.remove(world.member_id(consumer), FencedInstanceId("somebody else has it")))
        with pytest.raises(FencedInstanceId):
            until(lambda: False, consumer)
        assert told.events[-1][0] == "lost"

    def test_static_members_keep_their_partitions_for_a_while(self, world: World) -> None:
        consumer = world.consumer(group_instance_id="one")
        consumer.subscribe("t")
        member = world.members.members[world.member_id(consumer)]
        assert member.joins[0].instance_id == "one"
        consumer.close()
        until(lambda: world.members.leaves)
        assert world.members.leaves[-1].keep_assignment

    def test_a_group_without_a_coordinator(self, world: World) -> None:
        world.cluster.groups.unavailable["g"] = CoordinatorNotAvailable("needs 3 brokers, 1 is up")
        consumer = world.consumer(default_api_timeout_ms=250)
        with pytest.raises(RaftlogError):
            consumer.subscribe("t")
        found = consumer._group.engine.membership  # type: ignore[union-attr] # it has one
        until(lambda: isinstance(found.refusal, CoordinatorNotAvailable))

        def subscribe(limit_s: float) -> None:
            engine = consumer._engine
            engine.options = engine.options.but(default_api_timeout_ms=limit_s * 1000)
            consumer.subscribe("t")

        refusal(CoordinatorNotAvailable, "needs 3 brokers", subscribe, 0.25, 10.0, 30.0)
        del world.cluster.groups.unavailable["g"]
        until(lambda: len(consumer.assignment()) == 4, consumer)

    def test_what_the_group_says_is_logged_once_and_told(self, world: World, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        world.members.note = "more members than partitions"
        consumer = world.consumer()
        consumer.subscribe("t")
        assert consumer.group_note() == "more members than partitions"
        consumer.poll(0.3)
        assert caplog.text.count("more members than partitions") == 1

    @pytest.mark.parametrize("group_id", ["", "x" * 256, 7])
    @pytest.mark.parametrize("client", [Consumer, aio.Consumer])
    def test_a_group_id_has_1_to_255_characters(self, group_id: Any, client: Any) -> None:
        with pytest.raises(InvalidGroupId, match="1 to 255 characters"):
            client("127.0.0.1:1", group_id=group_id)


@pytest.mark.parametrize(
    "error",
    [
        GroupAuthorizationFailed("not this group"),
        TopicAuthorizationFailed("not this topic"),
        AuthenticationFailed("not with this password"),
        InvalidConfig("the password's file is empty, since it is being written"),
    ],
)
class TestRefusalsThatMayPass:
    """A permission is given, or a password's file written: it goes on by itself, as Kafka's consumers do."""

    def test_each_poll_asks_once_more(
        self, world: World, error: RaftlogError, caplog: pytest.LogCaptureFixture
    ) -> None:
        world.members.refuse_joins = [error] * 3
        world.send(4)
        consumer = world.consumer()
        with pytest.raises(type(error)):
            consumer.subscribe("t")
        for left in (1, 0):
            with pytest.raises(type(error), match=str(error)):
                consumer.poll(30)
            assert len(world.members.refuse_joins) == left, "after each error the member must try to join once more"
        parts = consumer.assignment
        read = until(lambda: parts() and all(consumer.position(part) == 1 for part in parts()), consumer)
        assert len(read) == 4
        assert str(error) not in caplog.text, "an error that a call raises must not be a warning in the log besides"

    def test_a_member_that_is_put_out_loses_what_it_read_and_comes_back(
        self, world: World, error: RaftlogError
    ) -> None:
        consumer, told = world.consumer(), Told()
        consumer.subscribe("t", listener=told)
        world.do(lambda: world.members.remove(world.member_id(consumer), error))
        with pytest.raises(type(error), match=str(error)):
            until(lambda: False, consumer)
        assert not world.members.members, "the consumer must not join again before it is polled"
        until(lambda: len(told.events) == 3, consumer)
        assert [kind for kind, _ in told.events] == ["assigned", "lost", "assigned"]

    def test_asynchronously(self, world: World, error: RaftlogError) -> None:
        world.members.refuse_joins = [error] * 2
        world.send(4)

        async def scenario() -> int:
            async with aio.Consumer(world.cluster.bootstrap, "g", auto_offset_reset="earliest") as consumer:
                with pytest.raises(type(error)):
                    await consumer.subscribe("t")
                with pytest.raises(type(error), match=str(error)):
                    await consumer.poll(30)
                found = 0
                async with asyncio.timeout(60):
                    while found < 4:
                        found += len(await consumer.poll(1))
                return found

        assert asyncio.run(scenario()) == 4

    def test_also_when_nobody_told_what_topics_there_are(self, world: World, error: RaftlogError) -> None:
        """The login that is refused is that of the first call of all."""
        world.send(4)
        world.members.refuse_joins = [error]
        consumer = world.consumer()
        metadata = consumer._engine.metadata
        asks = metadata.refresh

        async def refused(*_: Any, **__: Any) -> None:
            metadata.refresh = asks  # type: ignore[method-assign] # from the next time on
            raise error

        metadata.refresh = refused  # type: ignore[method-assign]
        with pytest.raises(type(error)):
            consumer.subscribe("t")
        with pytest.raises(type(error)):
            consumer.poll(30)
        assert len(until(lambda: consumer.assignment() and consumer.position(ZERO) == 1, consumer)) > 0


def test_a_subscription_that_found_no_broker_is_followed_further_on(world: World) -> None:
    for node in (1, 2):
        world.cluster.freeze(node)
    consumer = world.consumer(default_api_timeout_ms=500)
    with pytest.raises(BrokerUnavailable):
        consumer.subscribe("t")
    for node in (1, 2):
        world.cluster.thaw(node)
    until(lambda: len(consumer.assignment()) == 4, consumer)


def test_a_member_whose_channels_are_replaced_reads_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """When certificates are replaced for the second time, channels of before the first time are closed."""
    monkeypatch.setattr(client_connections, "_LAST_CALLS_S", 0.01)
    consumer = world.consumer(auto_offset_reset="earliest")
    consumer.subscribe("t")
    until(lambda: len(consumer.assignment()) == 4, consumer)
    [member] = world.members.members.values()
    channels = consumer._engine.connections

    def replace() -> None:
        channels._renew(1)
        channels._renew(2)

    consumer._thread.loop.call_soon_threadsafe(replace)
    until(lambda: len(member.joins) == 2, consumer)
    world.cluster.append("t", batch_of(b"after"), 2)
    there = TopicPartition("t", 2)
    records = until(lambda: consumer.position(there) == 1, consumer)
    assert [record.value for record in records] == [b"after"]
    assert len(consumer.assignment()) == 4


def test_a_loop_over_poll_asks_with_a_backoff(world: World) -> None:
    """At the soonest after 80, 160 and 320 ms more: at random the backoff is shorter by up to a fifth."""
    count = 1000
    world.members.refuse_joins = [GroupAuthorizationFailed("not this group") for _ in range(count)]
    consumer = world.consumer(retry_backoff_ms=100)
    began_s = time.monotonic()
    with pytest.raises(GroupAuthorizationFailed):
        consumer.subscribe("t")
    told = 1
    while told < 4:
        assert time.monotonic() - began_s < 60
        try:
            consumer.poll(0.01)
        except GroupAuthorizationFailed:
            told += 1
    took_s = time.monotonic() - began_s
    refused = count - len(world.members.refuse_joins)
    assert refused in (told, told + 1), f"each refusal must be reported once, but of {refused} refusals {told} were"
    assert took_s > 0.5, f"the fourth try must come after three pauses, but came after {took_s:.2f} s"


def test_unknown_member_is_a_loss_not_an_end(world: World) -> None:
    consumer, told = world.consumer(), Told()
    consumer.subscribe("t", listener=told)
    world.members.refuse_joins = [UnknownMemberId("you are none of us")]
    world.do(lambda: world.cluster.groups.move("g", 2))
    until(lambda: len(told.events) == 3, consumer)
    assert [kind for kind, _ in told.events] == ["assigned", "lost", "assigned"]


ALL = [ZERO, ONE, TWO, THREE]


@pytest.fixture
def paced_world() -> Iterator[World]:
    with FakeCluster(nodes=2) as cluster:
        paced_world = World(cluster)
        yield paced_world
        for consumer in paced_world.open:
            consumer.close()


class TestLosses:
    def lose(self, paced_world: World, consumer: Consumer) -> None:
        paced_world.members.refuse_joins = [UnreleasedInstanceId("not yet")] * 3
        paced_world.do(lambda: paced_world.members.fence(paced_world.member_id(consumer)))
        until(lambda: not consumer._engine.positions.states)

    def test_a_commit_of_what_was_lost_fails_once(self, paced_world: World) -> None:
        paced_world.send(8)
        consumer = paced_world.consumer(enable_auto_commit=False)
        consumer.subscribe("t")
        read: list[Record] = []
        while len(read) < 8:
            read += consumer.poll(1)
        consumer.commit({ZERO: 2})
        self.lose(paced_world, consumer)
        with pytest.raises(PartitionNotOwned, match=r"lost t-1, t-2, t-3 before"):
            consumer.commit()
        consumer.commit()
        assert paced_world.committed(ONE) is None

    def test_also_when_it_is_a_member_again(self, paced_world: World) -> None:
        paced_world.send(4, partition=0)
        consumer, told = paced_world.consumer(enable_auto_commit=False), Told()
        consumer.subscribe("t", listener=told)
        assert len(consumer.poll(30)) == 4
        self.lose(paced_world, consumer)
        assert consumer.assignment() == ALL, "the partitions must stay assigned, as the application was not told"
        until(lambda: len(told.events) == 3, consumer)
        assert consumer.assignment() == ALL
        over: list[tuple[dict[TopicPartition, OffsetAndMetadata], RaftlogError | None]] = []
        consumer.commit_async(callback=lambda offsets, error: over.append((offsets, error)))
        until(lambda: over)
        assert over[0][0] == {ZERO: OffsetAndMetadata(4)}
        assert isinstance(over[0][1], PartitionNotOwned)
        consumer.commit()

    def test_nothing_handed_out_is_nothing_lost(self, paced_world: World) -> None:
        paced_world.send(4, partition=0)
        consumer = paced_world.consumer(enable_auto_commit=False)
        consumer.subscribe("t")
        self.lose(paced_world, consumer)
        consumer.commit()

    def test_what_was_revoked_is_not_lost(self, paced_world: World) -> None:
        paced_world.send(8)
        first, second = paced_world.consumer(enable_auto_commit=False), paced_world.consumer()
        first.subscribe("t")
        until(lambda: all(first.position(part) == 2 for part in ALL), first)
        second.subscribe("t")
        until(lambda: len(first.assignment()) == 2, first)
        first.commit()
        assert paced_world.committed(ZERO) == 2


class TestEnds:
    @pytest.mark.parametrize("call", ["close", "unsubscribe"])
    def test_in_a_listener(self, paced_world: World, call: str) -> None:
        consumer = paced_world.consumer()

        class Ending(Told):
            def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
                super().on_partitions_revoked(partitions)
                getattr(consumer, call)()

        told = Ending()
        consumer.subscribe("t", listener=told)
        getattr(consumer, call)()
        assert [kind for kind, _ in told.events] == ["assigned", "revoked"]
        until(lambda: not paced_world.members.members)

    def test_in_a_listener_out_of_poll(self, paced_world: World) -> None:
        first, second = paced_world.consumer(), paced_world.consumer()

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

    def test_from_another_thread_what_is_being_worked_on_is_not_done(self, paced_world: World) -> None:
        paced_world.send(4, partition=0)
        consumer = paced_world.consumer()
        consumer.subscribe("t")
        assert len(consumer.poll(30)) == 4
        closer = threading.Thread(target=consumer.close)
        closer.start()
        closer.join()
        assert paced_world.committed() in (None, 0)

    def test_subscribing_to_more_is_not_coming_back(self, paced_world: World) -> None:
        paced_world.cluster.create_topic("u", 1)
        paced_world.send(8, partition=0)
        consumer = paced_world.consumer(auto_commit_interval_ms=0)
        consumer.subscribe("t")
        for expected in range(3):
            assert next(consumer).offset == expected
        consumer.subscribe(["t", "u"])
        time.sleep(0.1)
        assert paced_world.committed() in (None, 0, 1, 2)
        assert next(consumer).offset == 3
        until(lambda: paced_world.committed() == 3)
        polled = paced_world.consumer(auto_commit_interval_ms=0)
        consumer.close()
        polled.subscribe("t")
        assert len(polled.poll(30)) == 5
        polled.subscribe(["u"])  # the partition is revoked, and what is done of it committed
        assert paced_world.committed() == 3

    def test_waiting_for_the_group_is_not_staying_away(self, paced_world: World) -> None:
        paced_world.members.refuse_joins = [UnreleasedInstanceId("not yet")] * 8
        consumer = paced_world.consumer(max_poll_interval_ms=200)
        began = time.monotonic()
        consumer.subscribe("t")
        assert consumer.assignment() == ALL
        assert time.monotonic() - began > 0.2
        until(lambda: not paced_world.members.members)

    def test_a_forked_child_gets_nothing_of_what_was_fetched(self, paced_world: World) -> None:
        paced_world.send(4, partition=0)
        consumer = paced_world.consumer()
        consumer.subscribe("t")
        assert next(consumer).offset == 0
        consumer._engine.abandon_after_fork()  # what the child does first
        with pytest.raises(ClosedError, match="make one in each process"):
            next(consumer)
        with pytest.raises(ClosedError):
            consumer.poll(0)
        assert os.getpid() == consumer._engine._pid
        consumer._engine.closed = None  # here, the engine still runs
        consumer.close()


class TestSizes:
    def test_more_than_one_request_takes(self, paced_world: World) -> None:
        paced_world.cluster.create_topic("wide", 2100)
        for member in (True, False):
            consumer = paced_world.consumer(enable_auto_commit=False)
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
        assert max(paced_world.cluster.groups.sizes) < 300_000

    def test_a_commit_that_cannot_be_read_fails_and_the_membership_goes_on(self, paced_world: World) -> None:
        consumer, told = paced_world.consumer(enable_auto_commit=False), Told()
        consumer.subscribe("t", listener=told)
        paced_world.members.unreadable = "commit"
        with pytest.raises(InvalidRequestError, match="INVALID_ARGUMENT: what is that"):
            consumer.commit({ZERO: 1})
        paced_world.members.unreadable = ""
        consumer.commit({ZERO: 1})
        assert [kind for kind, _ in told.events] == ["assigned"]

    def test_a_join_that_cannot_be_read_is_final_and_named(self, paced_world: World) -> None:
        paced_world.members.unreadable = "join"
        with pytest.raises(InvalidRequestError, match="INVALID_ARGUMENT: what is that"):
            paced_world.consumer().subscribe("t")


class TestArguments:
    def test_offsets_that_cannot_be_sent_fail_alone(self, paced_world: World, caplog: pytest.LogCaptureFixture) -> None:
        consumer = paced_world.consumer()
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

    def test_lists_are_taken_and_other_things_named(self, paced_world: World) -> None:
        consumer = paced_world.consumer()
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
    def test_topics_that_no_cluster_can_have(self, paced_world: World, name: str) -> None:
        with pytest.raises(InvalidTopic, match="no topic can have the name"):
            paced_world.consumer().subscribe([name])
        with pytest.raises(InvalidRequestError, match="by name"):
            broken: Any = paced_world.consumer()
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


def test_offsets_of_a_data_frame_are_committed_as_numbers() -> None:
    """NumPy's numbers are no `int`; what is no whole number, or too large, is refused."""
    part = TopicPartition("t", np.int64(1))  # type: ignore[arg-type] # as a program may have it
    found = checked({part: np.int64(5)})  # type: ignore[dict-item]
    assert found == {TopicPartition("t", 1): OffsetAndMetadata(5)}
    assert [type(number) for number in (*(each.partition for each in found), found[part].offset)] == [int, int]
    for wrong in (5.0, True, None, -1, 1 << 63):
        with pytest.raises(InvalidRequestError, match="t-1 has no offset"):
            checked({part: wrong})  # type: ignore[dict-item]
