"""Classic groups: the coordinator as Kafka's clients know it, played through decisions, records and restarts."""

from __future__ import annotations

import itertools
import struct
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.coordinator.groups.classic.commands import (
    Alive,
    HeartbeatClassic,
    JoinClassic,
    Joined,
    LeaveClassic,
    Left,
    SyncClassic,
    Synced,
)
from broker.coordinator.groups.classic.consumer import assigned_partitions, subscribed_topics
from broker.coordinator.groups.classic.machine import MAX_BYTES, WHOLE_GROUP, ClassicConfig, ClassicGroup, State
from broker.coordinator.groups.commands import (
    Command,
    CommitOffsets,
    DeleteGroup,
    DeleteOffsets,
    GroupConfig,
    ListGroups,
)
from raftlog.errors import (
    FencedInstanceId,
    GroupMaxSizeReached,
    IllegalGeneration,
    InconsistentGroupProtocol,
    InvalidRequestError,
    InvalidSessionTimeout,
    MemberIdRequired,
    RaftlogError,
    RebalanceInProgress,
    UnknownMemberId,
)
from raftlog.v1 import common_pb2, group_pb2
from tests.support.fresh import examples
from tests.support.group_driver import GroupDriver, Stream, topic_id

T = topic_id("t")
SESSION_MS = 10_000
REBALANCE_MS = 60_000


def subscription(*topics: str) -> bytes:
    """Return a consumer's protocol metadata."""
    names = b"".join(struct.pack(">h", len(name)) + name.encode() for name in topics)
    return struct.pack(">hi", 0, len(topics)) + names + struct.pack(">i", -1)


def assignment(topic: str, *partitions: int) -> bytes:
    """Return the assignment that the leading consumer makes."""
    numbers = b"".join(struct.pack(">i", number) for number in partitions)
    name = struct.pack(">h", len(topic)) + topic.encode()
    return struct.pack(">hi", 0, 1) + name + struct.pack(">i", len(partitions)) + numbers + struct.pack(">i", -1)


MEMBERS = itertools.count()
"""Numbers of member ids: none is given twice."""


@dataclass(eq=False)
class Client:
    """A Kafka client in the group `g`."""

    driver: GroupDriver
    instance: str = ""
    member_id: str = ""
    generation: int = -1
    protocols: tuple[tuple[str, bytes], ...] = (("range", subscription("t")), ("roundrobin", subscription("t")))
    waiting: Stream = field(default_factory=Stream)

    def ask(self, command: Command) -> Any:
        """Return the answer, or None while it waits."""
        self.driver.decide(command)
        return self.answer()

    def answer(self) -> Any:
        got = self.waiting.got[-1] if self.waiting.got else None
        if isinstance(got, Joined):
            self.member_id = got.member_id
            if got.error is None:
                self.generation = got.generation
        return got

    def join(self, **changes: Any) -> Any:
        self.waiting = Stream()
        given = {
            "to": self.waiting,
            "group_id": "g",
            "member_id": self.member_id,
            "new_member_id": f"{self.instance or 'm'}-{next(MEMBERS)}",
            "instance_id": self.instance,
            "client_id": "client",
            "host": "10.0.0.1",
            "protocol_type": "consumer",
            "protocols": self.protocols,
            "session_timeout_ms": SESSION_MS,
            "rebalance_timeout_ms": REBALANCE_MS,
        }
        return self.ask(JoinClassic(**{**given, **changes}))

    def sync(self, assignments: dict[str, bytes] | None = None, **changes: Any) -> Any:
        self.waiting = Stream()
        given = {
            "to": self.waiting,
            "group_id": "g",
            "member_id": self.member_id,
            "instance_id": self.instance,
            "generation": self.generation,
            "protocol_type": "consumer",
            "assignments": assignments or {},
        }
        return self.ask(SyncClassic(**{**given, **changes}))

    def heartbeat(self) -> Any:
        self.waiting = Stream()
        return self.ask(HeartbeatClassic(self.waiting, "g", self.member_id, self.instance, self.generation))

    def leave(self) -> Any:
        self.waiting = Stream()
        return self.ask(LeaveClassic(self.waiting, "g", ((self.member_id, self.instance),)))

    def commit(self, offset: int, partition: int = 0) -> common_pb2.ErrorCode.ValueType:
        """Commit an offset of a partition; return the error's code."""
        self.waiting = Stream()
        request = group_pb2.CommitOffsetsRequest(
            group_id="g",
            member_id=self.member_id,
            member_epoch=self.generation,
            instance_id=self.instance,
            offsets=[group_pb2.CommitOffset(topic_id=T, partition=partition, offset=offset, leader_epoch=-1)],
        )
        answer = self.ask(CommitOffsets(self.waiting, request))
        if isinstance(answer, RaftlogError):
            return answer.code  # type: ignore[return-value] # every refusal of a group has one
        code: common_pb2.ErrorCode.ValueType = answer.results[0].error.code
        return code


def driver_of(delay_ms: int = 10, **config: Any) -> GroupDriver:
    return GroupDriver({"t": 4}, GroupConfig(classic=ClassicConfig(initial_rebalance_delay_ms=delay_ms, **config)))


def stable(driver: GroupDriver, *instances: str) -> list[Client]:
    """Return the members of a new stable group, the leader first; each has its own number as its partition."""
    clients = [Client(driver, instance) for instance in instances]
    for client in clients:
        client.join()
    driver.wait(20)
    assert [client.answer().generation for client in clients] == [1] * len(clients)
    given = {client.member_id: assignment("t", number) for number, client in enumerate(clients)}
    for client in clients:
        client.sync(given if client is clients[0] else None)
    for number, client in enumerate(clients):
        assert client.answer() == Synced("consumer", "range", assignment("t", number))
    return clients


def state(driver: GroupDriver) -> str:
    return group_pb2.GroupState.Name(driver.described().state)


# The way to an assignment


def test_the_first_member_leads_and_assigns() -> None:
    driver = driver_of(delay_ms=3_000)
    client = Client(driver)
    assert client.join() is None
    assert state(driver) == "PREPARING_REBALANCE"
    driver.wait(2_999)
    assert client.answer() is None
    driver.wait(1)
    joined = client.answer()
    assert (joined.generation, joined.leader, joined.protocol) == (1, client.member_id, "range")
    assert joined.members == ((client.member_id, "", subscription("t")),)
    assert state(driver) == "COMPLETING_REBALANCE"
    assert client.sync({client.member_id: assignment("t", 0, 1)}) == Synced("consumer", "range", assignment("t", 0, 1))
    described = driver.described()
    assert (described.state, described.type) == (group_pb2.STABLE, group_pb2.GROUP_TYPE_CLASSIC)
    (member,) = described.members
    assert [(part.topic, list(part.partitions)) for part in member.assigned] == [("t", [0, 1])]
    assert list(member.subscription.topics) == ["t"]
    assert isinstance(client.heartbeat(), Alive)


def test_the_initial_delay_is_extended_while_members_come_but_not_beyond_the_rebalance_timeout() -> None:
    driver = driver_of(delay_ms=3_000)
    clients = [Client(driver) for _ in range(30)]
    for client in clients:
        client.join()
        driver.wait(2_500)
    assert [client.generation == 1 for client in map(_answered, clients)] == [True] * 24 + [False] * 6


def _answered(client: Client) -> Client:
    client.answer()
    return client


def test_a_second_member_makes_the_first_join_again() -> None:
    driver = driver_of()
    (first,) = stable(driver, "")
    second = Client(driver)
    assert second.join() is None
    assert isinstance(first.heartbeat(), RebalanceInProgress)
    assert isinstance(first.sync(), RebalanceInProgress)
    assert first.join().generation == 2
    assert second.answer().generation == 2
    assert second.answer().members == ()
    assert second.answer().leader == first.member_id
    assert second.sync() is None
    first.sync({first.member_id: assignment("t", 0), second.member_id: assignment("t", 1)})
    assert second.answer().assignment == assignment("t", 1)


def test_a_member_joins_with_the_id_that_it_was_given() -> None:
    driver = driver_of(delay_ms=0)
    client = Client(driver)
    required = client.join(requires_id=True)
    assert isinstance(required.error, MemberIdRequired)
    assert client.member_id
    assert driver.described().state == group_pb2.EMPTY
    assert client.join(requires_id=True).generation == 1


def test_an_id_that_is_not_used_holds_the_group_up_for_a_session_only() -> None:
    driver = driver_of()
    (first,) = stable(driver, "")
    late = Client(driver)
    late.join(requires_id=True)
    second = Client(driver)
    second.join()
    assert first.join() is None
    driver.wait(SESSION_MS)
    assert first.answer().generation == 2
    assert isinstance(late.join(), UnknownMemberId)


def test_members_that_offer_nothing_in_common_are_refused() -> None:
    driver = driver_of()
    (first,) = stable(driver, "")
    other = Client(driver)
    assert isinstance(other.join(protocols=(("sticky", b""),)), InconsistentGroupProtocol)
    assert isinstance(other.join(protocol_type="connect"), InconsistentGroupProtocol)
    assert isinstance(other.join(protocols=()), InconsistentGroupProtocol)
    assert isinstance(other.join(session_timeout_ms=5_999), InvalidSessionTimeout)
    assert isinstance(other.join(protocols=(("range", b""), ("range", b""))), InvalidRequestError)
    assert isinstance(other.join(protocols=(("range", bytes(MAX_BYTES)),)), InvalidRequestError)
    assert isinstance(first.sync(protocol="roundrobin"), InconsistentGroupProtocol)
    assert isinstance(first.sync(protocol_type="connect"), InconsistentGroupProtocol)
    assert isinstance(first.heartbeat(), Alive)


def test_the_protocol_is_what_most_prefer_of_what_all_offer() -> None:
    driver = driver_of(delay_ms=1_000)
    clients = [Client(driver, protocols=protocols) for protocols in (_named("abc"), _named("cb"), _named("bca"))]
    for client in clients:
        client.join()
    driver.wait(2_000)
    assert [client.answer().protocol for client in clients] == ["b"] * 3


def _named(names: str) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, name.encode()) for name in names)


def test_a_full_group_takes_no_more_members() -> None:
    driver = driver_of(max_size=2)
    stable(driver, "", "")
    assert isinstance(Client(driver).join(), GroupMaxSizeReached)


def test_a_lost_answer_to_a_join_is_given_again() -> None:
    driver = driver_of()
    (first,) = stable(driver, "")
    second = Client(driver)
    second.join()
    first.join()
    second.answer()
    assert second.join().generation == first.generation == 2
    assert state(driver) == "COMPLETING_REBALANCE"


def test_a_leader_that_joins_again_has_reason_for_a_rebalance() -> None:
    driver = driver_of()
    leader, follower = stable(driver, "", "")
    assert follower.join().generation == leader.generation
    assert leader.join() is None
    assert state(driver) == "PREPARING_REBALANCE"


# Members that go


def test_a_rebalance_costs_each_member_the_same_however_many_there_are() -> None:
    def calls(members: int) -> int:
        """Return how often a function is called, or a generator gives an element, in a rebalance of so many."""
        group, count = ClassicGroup("g", ClassicConfig(initial_rebalance_delay_ms=10)), 0

        def join(member_id: str, new: str = "") -> None:
            said = ("range", subscription("t")), ("roundrobin", subscription("t"))
            command = JoinClassic(
                object(), "g", member_id, new, "", "client", "h", "consumer", said, SESSION_MS, REBALANCE_MS
            )
            group.join(command, 0.0)

        def sync() -> None:
            for member_id in list(group.members):
                group.sync(SyncClassic(object(), "g", member_id, "", group.generation), 20.0)

        def note(_frame: object, event: str, _of: object) -> None:
            nonlocal count
            count += event == "call"

        for number in range(members):
            join("", f"m{number}")
        for now_ms in (20.0, 40.0):  # the delay is extended once
            group.on_deadline(WHOLE_GROUP, now_ms)
        sync()
        sys.setprofile(note)
        try:
            for member_id in list(group.members):
                join(member_id)
            sync()
        finally:
            sys.setprofile(None)
        assert (group.generation, group.state) == (2, State.STABLE)
        return count

    assert calls(400) / calls(100) < 5


def test_a_silent_member_is_removed() -> None:
    driver = driver_of()
    first, second = stable(driver, "", "")
    for _ in range(4):
        driver.wait(3_000)
        last = first.heartbeat()
    assert isinstance(last, RebalanceInProgress)
    assert first.join().members == ((first.member_id, "", subscription("t")),)
    assert isinstance(second.heartbeat(), UnknownMemberId)


def test_a_member_that_does_not_join_again_is_removed_after_the_rebalance_timeout() -> None:
    driver = driver_of()
    first, second = stable(driver, "", "")
    third = Client(driver)
    third.join()
    first.join()
    for _ in range(20):  # it is alive all the time
        driver.wait(REBALANCE_MS / 20)
        second.heartbeat()
    assert {member_id for member_id, _, _ in first.answer().members} == {first.member_id, third.answer().member_id}
    assert isinstance(second.heartbeat(), UnknownMemberId)


def test_a_member_that_does_not_sync_is_removed_after_the_rebalance_timeout() -> None:
    driver = driver_of()
    first, second = stable(driver, "", "")
    first.join()
    second.join()
    leader, follower = (first, second) if first.answer().leader == first.member_id else (second, first)
    leader.sync({})
    for _ in range(20):
        driver.wait(REBALANCE_MS / 20)
        follower.heartbeat()
        last = leader.heartbeat()
    assert isinstance(last, RebalanceInProgress)
    assert isinstance(follower.heartbeat(), UnknownMemberId)


def test_a_leader_that_does_not_assign_is_replaced() -> None:
    driver = driver_of()
    first, second = stable(driver, "", "")
    first.join()
    second.join()
    leader, follower = (first, second) if first.answer().leader == first.member_id else (second, first)
    assert follower.sync() is None
    for _ in range(20):
        assert follower.answer() is None
        leader.heartbeat()
        driver.wait(REBALANCE_MS / 20)
    assert isinstance(follower.answer(), RebalanceInProgress)
    assert follower.join().leader == follower.member_id
    assert isinstance(leader.sync(), UnknownMemberId)


def test_the_last_member_leaves_an_empty_group_with_its_offsets() -> None:
    driver = driver_of()
    (only,) = stable(driver, "")
    assert only.commit(7) == common_pb2.NONE
    answer = Stream()
    driver.decide(DeleteGroup(answer, "g"))
    assert answer.last.error.code == common_pb2.NON_EMPTY_GROUP  # type: ignore[union-attr] # a result
    assert only.leave() == Left((None,))
    assert state(driver) == "EMPTY"
    driver.restart()
    assert state(driver) == "EMPTY"
    driver.decide(DeleteGroup(answer, "g"))
    assert not answer.last.HasField("error")  # type: ignore[union-attr] # a result
    assert state(driver) == "DEAD"


def test_leaving_in_the_name_of_others() -> None:
    driver = driver_of()
    first, _ = stable(driver, "a", "")
    answer = Stream()
    driver.decide(LeaveClassic(answer, "g", (("", "a"), ("", "b"), ("nobody", ""), ("nobody", "a"))))
    assert isinstance(answer.last, Left)
    assert [type(error) for error in answer.last.errors] == [
        type(None),
        UnknownMemberId,
        UnknownMemberId,
        UnknownMemberId,
    ]
    assert isinstance(first.heartbeat(), UnknownMemberId)


# Static members (KIP-345)


def test_a_static_member_that_is_back_gets_its_assignment_without_a_rebalance() -> None:
    driver = driver_of()
    leader, follower = stable(driver, "a", "b")
    again = Client(driver, "b")
    joined = again.join()
    assert (joined.generation, joined.leader) == (1, leader.member_id)
    assert again.member_id != follower.member_id
    assert again.sync().assignment == assignment("t", 1)
    assert isinstance(leader.heartbeat(), Alive)
    assert isinstance(follower.heartbeat(), FencedInstanceId)
    assert follower.commit(1) == common_pb2.FENCED_INSTANCE_ID
    assert isinstance(follower.join(), FencedInstanceId)
    driver.restart()
    assert isinstance(again.heartbeat(), Alive)
    assert isinstance(follower.heartbeat(), FencedInstanceId)


@pytest.mark.parametrize("can_skip", [False, True])
def test_a_static_leader_that_is_back_does_not_assign(can_skip: bool) -> None:
    driver = driver_of()
    leader, _ = stable(driver, "a", "b")
    again = Client(driver, "a")
    joined = again.join(can_skip_assignment=can_skip)
    assert joined.skip_assignment is can_skip
    assert bool(joined.members) is can_skip
    assert joined.leader == (again.member_id if can_skip else leader.member_id)
    assert again.sync().assignment == assignment("t", 0)


def test_a_static_member_that_is_back_with_another_preference_makes_a_rebalance_only_if_the_protocol_changes() -> None:
    driver = driver_of()
    stable(driver, "a")
    same = Client(driver, "a", protocols=(("range", subscription("t", "u")),))
    assert same.join().generation == 1
    other = Client(driver, "a", protocols=(("range", b"1"), ("roundrobin", b"2")))
    assert other.join().generation == 1
    changed = Client(driver, "a", protocols=(("roundrobin", b"2"), ("range", b"1")))
    assert changed.join().generation == 2


def test_a_static_member_keeps_its_place_while_others_rebalance_until_its_session_ends() -> None:
    driver = driver_of()
    _, dynamic = stable(driver, "a", "")
    another = Client(driver)
    another.join()
    dynamic.join()
    driver.wait(SESSION_MS)
    assert dynamic.answer().generation == 2
    assert {instance for _, instance, _ in dynamic.answer().members or another.answer().members} == {""}


def test_a_static_member_that_dies_while_it_waits_for_its_assignment_is_removed() -> None:
    driver = driver_of()
    leader, static = stable(driver, "", "i")
    for _ in range(150):  # until the time for the first join, five minutes, is over
        driver.wait(2_000)
        leader.heartbeat()
        static.heartbeat()
    third = Client(driver)
    for each in (third, static, leader):
        each.join()
    assert third.answer().leader == leader.member_id
    static.answer()
    third.sync()
    static.sync()  # and dies, while the leader lives and assigns nothing
    for _ in range(20):
        leader.heartbeat()
        driver.wait(REBALANCE_MS / 20)
    assert isinstance(static.answer(), RebalanceInProgress)
    assert isinstance(third.answer(), RebalanceInProgress)
    third.join()
    driver.wait(SESSION_MS + REBALANCE_MS)
    assert [instance for _, instance, _ in third.answer().members] == [""]


def test_a_static_member_that_is_back_ends_the_wait_of_its_former_self() -> None:
    driver = driver_of()
    first, second = stable(driver, "a", "b")
    assert first.join() is None
    again = Client(driver, "a")
    again.join()
    assert isinstance(first.answer(), FencedInstanceId)
    second.join()
    assert again.answer().generation == second.generation == 2


# Offsets


def test_only_members_of_the_generation_commit() -> None:
    driver = driver_of()
    first, second = stable(driver, "", "")
    assert first.commit(1) == common_pb2.NONE
    outsider = Client(driver)
    assert outsider.commit(2) == common_pb2.UNKNOWN_MEMBER_ID
    outsider.member_id, outsider.generation = "another", 1
    assert outsider.commit(2) == common_pb2.UNKNOWN_MEMBER_ID
    first.generation += 1
    assert first.commit(2) == common_pb2.ILLEGAL_GENERATION
    first.generation -= 1
    second.leave()
    assert first.commit(3) == common_pb2.NONE  # while it is asked to join again
    first.join()
    assert first.commit(4) == common_pb2.REBALANCE_IN_PROGRESS
    first.sync({})
    assert first.commit(5) == common_pb2.NONE
    first.leave()
    anybody = Client(driver)
    assert anybody.commit(6) == common_pb2.NONE


def test_an_older_generation_is_refused_whatever_it_asks() -> None:
    driver = driver_of()
    leader, follower = stable(driver, "", "")
    leader.join()
    follower.join()
    assert leader.answer().generation == follower.generation == 2
    for client in (leader, follower):
        client.generation = 1
        assert isinstance(client.sync({follower.member_id: b"old"}), IllegalGeneration)
        assert isinstance(client.heartbeat(), IllegalGeneration)
        assert client.commit(1) == common_pb2.ILLEGAL_GENERATION
        client.generation = 2
    assert follower.sync() is None
    leader.sync({follower.member_id: b"new"})
    assert follower.answer().assignment == b"new"


def test_offsets_of_topics_that_members_read_are_not_deleted() -> None:
    driver = driver_of()
    (only,) = stable(driver, "")
    only.commit(1)

    def delete() -> int:
        answer = Stream()
        named = group_pb2.TopicPartitions(topic="t", partitions=[0])
        driver.decide(DeleteOffsets(answer, group_pb2.DeleteOffsetsRequest(group_id="g", partitions=[named])))
        assert isinstance(answer.last, group_pb2.DeleteOffsetsResponse)
        return answer.last.results[0].error.code

    assert delete() == common_pb2.GROUP_SUBSCRIBED_TO_TOPIC
    only.leave()
    assert delete() == common_pb2.NONE


def test_a_commit_is_a_sign_of_life() -> None:
    driver = driver_of()
    (only,) = stable(driver, "")
    for offset in range(5):
        driver.wait(SESSION_MS - 1)
        assert only.commit(offset) == common_pb2.NONE
    driver.wait(SESSION_MS)
    assert only.commit(9) == common_pb2.UNKNOWN_MEMBER_ID


# Types


def test_an_empty_group_changes_its_type_and_its_generations_go_on() -> None:
    driver = driver_of()
    (classic,) = stable(driver, "")
    generation = classic.generation
    classic.leave()
    stream = driver.join("raftlog", "t")
    assert stream.assignment.member_epoch > generation
    assert driver.described().type == group_pb2.GROUP_TYPE_CONSUMER
    driver.leave(stream)
    again = Client(driver)
    again.join()
    driver.wait(10)
    joined = again.answer()
    assert joined.generation > stream.assignment.member_epoch
    assert driver.described().type == group_pb2.GROUP_TYPE_CLASSIC


def test_groups_are_listed_by_type_and_state() -> None:
    driver = driver_of()
    stable(driver, "")
    driver.join("raftlog", "t", group_id="h")

    def listed(**asked: Any) -> list[tuple[str, str]]:
        answer = Stream()
        driver.decide(ListGroups(answer, group_pb2.ListGroupsRequest(**asked)))
        assert isinstance(answer.last, group_pb2.ListGroupsResponse)
        return [(each.group_id, each.protocol_type) for each in answer.last.groups]

    assert listed() == [("g", "consumer"), ("h", "consumer")]
    assert listed(types=[group_pb2.GROUP_TYPE_CLASSIC]) == [("g", "consumer")]
    assert listed(types=[group_pb2.GROUP_TYPE_CONSUMER]) == [("h", "consumer")]
    Client(driver).join()
    assert listed(states=[group_pb2.PREPARING_REBALANCE]) == [("g", "consumer")]


# The coordinator's failover


def test_the_next_coordinator_has_the_members_and_their_assignments() -> None:
    driver = driver_of()
    leader, follower = stable(driver, "", "b")
    before = driver.described()
    driver.restart()
    after = driver.described()
    assert [each.classic_assignment for each in after.members] == [each.classic_assignment for each in before.members]
    assert isinstance(leader.heartbeat(), Alive)
    assert follower.sync().assignment == assignment("t", 1)
    driver.wait(SESSION_MS - 1)
    assert isinstance(leader.heartbeat(), Alive)
    driver.wait(1)
    assert isinstance(leader.heartbeat(), RebalanceInProgress)  # the other one is silent since


def test_a_generation_is_given_out_once_also_by_the_next_coordinator() -> None:
    driver = driver_of()
    first, second = stable(driver, "", "")
    first.join()
    assert second.join().generation == first.answer().generation == 2
    driver.restart()  # after the members have heard of the generation, before it has an assignment
    assert state(driver) == "PREPARING_REBALANCE"
    assert isinstance(first.sync({}), RebalanceInProgress)
    first.join()
    assert second.join().generation == 3


def test_sessions_begin_anew_with_the_next_coordinator() -> None:
    driver = driver_of()
    stable(driver, "")
    driver.wait(SESSION_MS - 1)
    driver.restart()
    driver.wait(SESSION_MS - 1)
    assert state(driver) == "STABLE"
    driver.wait(1)
    assert state(driver) == "EMPTY"


def test_offsets_of_a_classic_group_expire_once_it_is_empty() -> None:
    driver = driver_of()
    (only,) = stable(driver, "")
    only.commit(1)
    for _ in range(3):
        driver.now_ms += 4 * 24 * 3_600_000  # no timer is looked at meanwhile
        assert isinstance(only.heartbeat(), Alive | UnknownMemberId)
    only.leave()
    driver.wait(8 * 24 * 3_600_000)
    assert state(driver) == "DEAD"
    assert not driver.core.groups


# What the bytes say


def test_bytes_of_another_form_say_nothing() -> None:
    assert subscribed_topics("consumer", subscription("b", "a", "b")) == ("a", "b")
    assert assigned_partitions("consumer", assignment("t", 2, 1)) == {"t": [1, 2]}
    for wrong in (b"", b"\0", subscription("t")[:8], b"\0\0\x7f\xff\xff\xff", b"\0\0\0\0\0\1\xff\xff"):
        assert subscribed_topics("consumer", wrong) == ()
        assert assigned_partitions("consumer", wrong) == {}
    assert subscribed_topics("connect", subscription("t")) == ()


# Any schedule


class Schedule(RuleBasedStateMachine):
    """Clients that join, sync, fall silent and return in any order, over coordinators that come and go.

    A coordinator's end loses the answers under way, and perhaps the records behind them, which are not committed then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.driver = driver_of(delay_ms=100)
        self.clients = [Client(self.driver, instance) for instance in ("", "", "", "s", "s", "z")]
        self.leaders: dict[int, str] = {}
        self.given: dict[int, dict[str, bytes]] = {}
        self.tokens = 0

    def note(self) -> None:
        """Look at all answers that have arrived."""
        for client in self.clients:
            answer = client.answer()
            if isinstance(answer, Joined) and answer.members and not answer.skip_assignment:
                leader = self.leaders.setdefault(answer.generation, answer.member_id)
                assert leader == answer.member_id, (
                    f"generation {answer.generation} has two leaders, {leader} and {answer.member_id}"
                )

    @rule(number=st.integers(0, 5), requires_id=st.booleans())
    def join(self, number: int, requires_id: bool) -> None:
        client = self.clients[number]
        answer = client.join(requires_id=requires_id)
        if isinstance(answer, UnknownMemberId | FencedInstanceId):
            client.member_id, client.generation = "", -1
        self.note()

    @rule(number=st.integers(0, 5))
    def restart_of_a_client(self, number: int) -> None:
        client = self.clients[number]
        client.member_id, client.generation, client.waiting = "", -1, Stream()

    @rule(number=st.integers(0, 5), late=st.booleans())
    def sync(self, number: int, late: bool) -> None:
        client = self.clients[number]
        if not client.member_id or client.generation < 0:
            return
        is_leader = self.leaders.get(client.generation) == client.member_id
        assignments = {}
        if is_leader:
            self.tokens += 1
            machine = self.driver.core._soft["g"].classic
            assert machine is not None
            assignments = dict.fromkeys(machine.members, b"%d of %d" % (self.tokens, client.generation))
        before = self.driver.described().state
        generation = client.generation - late
        answer = client.sync(assignments, generation=generation)
        if late and before != group_pb2.DEAD:
            assert isinstance(answer, IllegalGeneration | UnknownMemberId | FencedInstanceId), (
                f"a SyncGroup of an older generation must be refused, but was answered with {answer}"
            )
        elif is_leader and before == group_pb2.COMPLETING_REBALANCE and isinstance(answer, Synced):
            assert client.generation not in self.given, f"generation {client.generation} was assigned twice"
            self.given[client.generation] = assignments
        self.note()

    @rule(number=st.integers(0, 5))
    def heartbeat(self, number: int) -> None:
        self.clients[number].heartbeat()

    @rule(number=st.integers(0, 5))
    def leave(self, number: int) -> None:
        client = self.clients[number]
        if client.member_id:
            client.leave()
            client.member_id, client.generation = "", -1

    @rule(elapsed_ms=st.sampled_from([50, 100, 1_000, 5_000, SESSION_MS, REBALANCE_MS]))
    def wait(self, elapsed_ms: int) -> None:
        self.driver.wait(elapsed_ms)
        self.note()

    @precondition(lambda self: self.driver.log)
    @rule(number=st.integers(0, 5), is_committed=st.booleans())
    def the_coordinator_dies_with_a_join_under_way(self, number: int, is_committed: bool) -> None:
        committed = list(self.driver.log)
        client = self.clients[number]
        kept, client.waiting = (client.member_id, client.generation), Stream()
        seen = [len(each.waiting.got) for each in self.clients]
        client.join()
        for each, count in zip(self.clients, seen, strict=True):
            del each.waiting.got[count:]
        client.waiting = Stream()
        client.member_id, client.generation = kept
        if not is_committed:
            self.driver.log = committed
        self.driver.restart()

    @invariant()
    def every_member_has_what_the_leader_of_its_generation_gave_it(self) -> None:
        soft = self.driver.core._soft.get("g")
        machine = None if soft is None else soft.classic
        if machine is None or machine.state.value != "Stable":
            return
        given = self.given.get(machine.generation)
        if given is None:
            return  # its records were lost, or its answers with them
        for member in machine.members.values():
            expected = given.get(member.member_id)
            if expected is None:  # static: it is back under another id, with what its former self was given
                assert member.instance_id
                assert member.assignment in (b"", *given.values())
            else:
                assert member.assignment == expected

    @invariant()
    def the_log_says_what_members_were_told(self) -> None:
        group = self.driver.core.groups.get("g")
        for client in self.clients:
            answer = client.answer()
            if isinstance(answer, Joined) and answer.error is None:
                assert group is not None
                assert group.head is not None
                assert answer.generation <= group.head.group_epoch


Schedule.TestCase.settings = settings(max_examples=examples(0.6), stateful_step_count=60, deadline=None)
test_any_schedule = Schedule.TestCase


def test_a_member_that_joins_again_counts_once_against_the_bytes_of_a_group() -> None:
    driver = driver_of()
    large = (("range", bytes(MAX_BYTES * 2 // 3)),)
    (first,) = stable(driver, "")
    assert not isinstance(first.join(protocols=large), InvalidRequestError)
    driver.wait(20)
    assert not isinstance(first.join(protocols=large), InvalidRequestError)
    driver.wait(20)
    assert isinstance(Client(driver).join(protocols=large), InvalidRequestError)
