"""Sessions of a group's members: how they end, and what is lost with them."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from raftlog import Consumer, aio
from raftlog._core import membership
from raftlog.errors import (
    AuthenticationFailed,
    BrokerUnavailable,
    CoordinatorNotAvailable,
    FencedInstanceId,
    GroupAuthorizationFailed,
    InvalidConfig,
    InvalidGroupId,
    RaftlogError,
    TopicAuthorizationFailed,
    UnknownMemberId,
    UnreleasedInstanceId,
    UnsupportedAssignor,
)
from tests.support.fake_broker import FakeCluster
from tests.support.group_world import ONE, THREE, TWO, ZERO, Told, World, until
from tests.support.patience import refusal


@pytest.fixture
def world() -> Iterator[World]:
    with FakeCluster(nodes=2) as cluster:
        world = World(cluster)
        yield world
        world.close()


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
        assert 0.7 < time.monotonic() - began < 30, "when it is over here, the core's tests say exactly"
        assert "no answer from the coordinator within the session timeout" in caplog.text
        world.members.mute = False
        until(lambda: len(told.events) == 3, consumer)

    def test_records_that_wait_in_an_iteration_are_not_handed_out_after_a_loss(self, world: World) -> None:
        world.send(8, partition=0)
        consumer = world.consumer()
        consumer.subscribe("t")
        assert next(consumer).offset == 0
        consumer._engine.options = replace(consumer._engine.options, consumer_timeout_ms=300)
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
        assert len(consumer.assignment()) == 4, "asked once more it goes on"

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
            engine.options = replace(engine.options, default_api_timeout_ms=limit_s * 1000)
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
    def test_names(self, group_id: Any, client: Any) -> None:
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

    def test_each_poll_asks_once_more(self, world: World, error: RaftlogError) -> None:
        world.members.refuse_joins = [error] * 3
        world.send(4)
        consumer = world.consumer()
        with pytest.raises(type(error)):
            consumer.subscribe("t")
        for left in (1, 0):
            with pytest.raises(type(error), match=str(error)):
                consumer.poll(30)
            assert len(world.members.refuse_joins) == left, "asked anew, once"
        parts = consumer.assignment
        read = until(lambda: parts() and all(consumer.position(part) == 1 for part in parts()), consumer)
        assert len(read) == 4

    def test_a_member_that_is_put_out_loses_what_it_read_and_comes_back(
        self, world: World, error: RaftlogError
    ) -> None:
        consumer, told = world.consumer(), Told()
        consumer.subscribe("t", listener=told)
        world.do(lambda: world.members.remove(world.member_id(consumer), error))
        with pytest.raises(type(error), match=str(error)):
            until(lambda: False, consumer)
        assert not world.members.members, "who does not poll does not ask"
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

        async def refused() -> None:
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
    assert refused in (told, told + 1), "each refusal is told once"
    assert took_s > 0.5, "the fourth comes after three pauses"


def test_unknown_member_is_a_loss_not_an_end(world: World) -> None:
    consumer, told = world.consumer(), Told()
    consumer.subscribe("t", listener=told)
    world.members.refuse_joins = [UnknownMemberId("you are none of us")]
    world.do(lambda: world.cluster.groups.move("g", 2))
    until(lambda: len(told.events) == 3, consumer)
    assert [kind for kind, _ in told.events] == ["assigned", "lost", "assigned"]
