"""What members of groups may, and what lists and descriptions of groups and transactions show."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from broker.coordinator.groups.checks import MAX_TOPICS
from broker.coordinator.groups.commands import Command, CommitInSession, Disconnected, Heartbeat, Join, Leave
from broker.coordinator.groups.coordinators import GroupShard
from broker.net.services import groups as group_permissions
from broker.net.services.groups import (
    COMMITTED_AT_A_TIME,
    GroupSession,
    MemberPermissions,
    add_committed,
    check_described,
    committed,
    fetched,
    leave_out_offsets,
    shown_groups,
)
from broker.net.services.transactions import leave_out_topics
from broker.security.caller import Caller
from broker.turns import AT_A_TIME
from raftlog._core.security.acls import CLUSTER_NAME
from raftlog.errors import TopicAuthorizationFailed
from raftlog.v1 import common_pb2
from raftlog.v1.common_pb2 import Error
from raftlog.v1.group_pb2 import (
    CommitOffset,
    CommitOffsetResult,
    CommitOffsetsRequest,
    CommitOffsetsResponse,
    CommittedOffset,
    FetchOffsetsRequest,
    FetchOffsetsResponse,
    GroupDescription,
    GroupHeartbeat,
    GroupMember,
    GroupRequest,
    GroupResponse,
    JoinGroup,
    LeaveGroup,
    ListedGroup,
    SessionCommit,
    SessionCommitResult,
    Subscription,
    TopicPartitions,
)
from raftlog.v1.security_pb2 import Acl
from tests.support.broker_parts import Requests, Writer
from tests.support.fake_authorizer import FakeAuthorizer, Permission
from tests.support.loop_turns import calls_in_a_turn
from tests.support.replica_link import settle
from tests.support.turns import counted_turns

GROUP = (Acl.READ, Acl.GROUP, "g")
IDS = {b"id-of-a": "a", b"id-of-b": "b"}
TOPIC_REFUSED, GROUP_REFUSED = common_pb2.TOPIC_AUTHORIZATION_FAILED, common_pb2.GROUP_AUTHORIZATION_FAILED


def describe(*topics: str) -> tuple[Permission, ...]:
    return tuple((Acl.DESCRIBE, Acl.TOPIC, topic) for topic in topics)


def read(*topics: str) -> tuple[Permission, ...]:
    return tuple((Acl.READ, Acl.TOPIC, topic) for topic in topics)


class Served:
    """A session under way, and what reaches the coordinator."""

    def __init__(self, authorizer: FakeAuthorizer) -> None:
        self.authorizer = authorizer
        self.commands: list[Command] = []
        self.said_bytes, self.pace_ms = 0, 0.0
        self.requests: Requests[GroupRequest] = Requests()
        self.writer: Writer[GroupResponse] = Writer()
        self.session = GroupSession(
            lambda group_id: cast(GroupShard, self),
            "10.0.0.1",
            MemberPermissions.of(authorizer.caller(), IDS.get),
            self._pace,
        )
        self.task = asyncio.ensure_future(self.session.run(aiter(self.requests), self.writer))

    def _pace(self, size: int) -> float:
        self.said_bytes += size
        return self.pace_ms

    def submit(self, command: Command, recipient: object = None) -> None:
        self.commands.append(command)

    def detach(self, recipient: object) -> None:
        pass

    async def join(self, *topics: str, pattern: str = "") -> None:
        subscription = Subscription(topics=topics, pattern=pattern)
        self.requests.send(GroupRequest(join=JoinGroup(group_id="g", member_id="m", subscription=subscription)))
        await settle()

    async def send(self, **request: Any) -> None:
        self.requests.send(GroupRequest(**request))
        await settle()

    async def ended(self) -> list[int]:
        """Return the codes of the errors that the session has ended with."""
        async with asyncio.timeout(60):
            await self.task
        return [each.error.code for each in self.writer.written if each.HasField("error")]


def run(scenario: Callable[[Served], Awaitable[None]], *allowed: Permission) -> None:
    async def main() -> None:
        served = Served(FakeAuthorizer(*allowed))
        try:
            await scenario(served)
        finally:
            served.task.cancel()
            await asyncio.gather(served.task, return_exceptions=True)

    asyncio.run(main())


def test_who_may_not_read_the_group_is_no_member() -> None:
    async def scenario(served: Served) -> None:
        await served.join()
        assert await served.ended() == [GROUP_REFUSED]
        assert served.commands == []

    run(scenario, (Acl.DESCRIBE, Acl.GROUP, "g"))


def test_a_topic_that_is_named_and_may_not_be_described_refuses_the_member() -> None:
    async def scenario(served: Served) -> None:
        await served.join("a", "b")
        assert await served.ended() == [TOPIC_REFUSED]
        assert served.commands == []

    run(scenario, GROUP, *describe("a"))


def test_of_what_a_pattern_has_matched_such_topics_are_left_out() -> None:
    async def scenario(served: Served) -> None:
        await served.join("a", "b", pattern=".*")
        [join] = served.commands
        assert isinstance(join, Join)
        assert list(join.request.subscription.topics) == ["a"]
        heartbeat = GroupHeartbeat(subscription=Subscription(topics=["b", "a"], pattern=".*"))
        await served.send(heartbeat=heartbeat)
        assert isinstance(served.commands[1], Heartbeat)
        assert list(served.commands[1].request.subscription.topics) == ["a"]

    run(scenario, GROUP, *describe("a"))


def test_another_subscription_is_looked_at_as_the_first() -> None:
    async def scenario(served: Served) -> None:
        await served.join("a")
        await served.send(heartbeat=GroupHeartbeat(member_epoch=1))
        await served.send(heartbeat=GroupHeartbeat(member_epoch=1, subscription=Subscription(topics=["b"])))
        assert await served.ended() == [TOPIC_REFUSED]
        assert [type(command) for command in served.commands] == [Join, Heartbeat, Disconnected]

    run(scenario, GROUP, *describe("a"))


def test_a_member_that_may_not_read_the_group_any_more_is_told_with_its_next_request() -> None:
    async def scenario(served: Served) -> None:
        await served.join("a")
        served.authorizer.change(*describe("a"))
        await served.send(heartbeat=GroupHeartbeat(member_epoch=1))
        assert await served.ended() == [GROUP_REFUSED]
        assert [type(command) for command in served.commands] == [Join, Disconnected]

    run(scenario, GROUP, *describe("a"))


def test_a_member_may_leave_whatever_it_may() -> None:
    async def scenario(served: Served) -> None:
        await served.join("a")
        served.authorizer.change()
        await served.send(leave=LeaveGroup())
        assert isinstance(served.commands[1], Leave)

    run(scenario, GROUP, *describe("a"))


def test_a_commit_is_answered_for_each_partition() -> None:
    async def scenario(served: Served) -> None:
        await served.join("a", "b")
        offsets = [
            CommitOffset(topic_id=b"id-of-b", partition=0),
            CommitOffset(topic_id=b"id-of-a", partition=0),
            CommitOffset(topic="b", partition=1),
            CommitOffset(topic_id=b"unknown", partition=0),
        ]
        await served.send(commit=SessionCommit(correlation_id=3, offsets=offsets))
        command = served.commands[1]
        assert isinstance(command, CommitInSession)
        assert list(command.request.offsets) == [offsets[1], offsets[3]], (
            "the group must get the offsets of topics that do not exist, and say so itself"
        )
        unknown = CommitOffsetResult(error=Error(code=common_pb2.UNKNOWN_TOPIC_ID))
        results = [CommitOffsetResult(), unknown]
        served.session.deliver(GroupResponse(commit=SessionCommitResult(correlation_id=3, results=results)))
        [written] = await served.writer.wait_for(1)
        codes = [result.error.code for result in written.commit.results]
        assert codes == [TOPIC_REFUSED, 0, TOPIC_REFUSED, common_pb2.UNKNOWN_TOPIC_ID]
        assert "may not READ b" in written.commit.results[0].error.message

    run(scenario, GROUP, *describe("a", "b"), *read("a"))


def test_a_commit_of_nothing_that_is_allowed_does_not_get_to_the_group() -> None:
    async def scenario(served: Served) -> None:
        await served.join("b")
        await served.send(commit=SessionCommit(correlation_id=4, offsets=[CommitOffset(topic="b")]))
        [written] = await served.writer.wait_for(1)
        assert written.commit.correlation_id == 4
        assert [result.error.code for result in written.commit.results] == [TOPIC_REFUSED]
        assert [type(command) for command in served.commands] == [Join]

    run(scenario, GROUP, *describe("b"))


def test_a_refused_commit_counts_as_much_as_any_other_message() -> None:
    async def scenario(served: Served) -> None:
        await served.join("a")
        refused = SessionCommit(correlation_id=7, offsets=[CommitOffset(topic=f"t{number}") for number in range(100)])
        served.pace_ms = 60_000.0
        for _ in range(2):
            await served.send(commit=refused)
        assert served.said_bytes == GroupRequest(commit=refused).ByteSize()
        assert len([each for each in served.writer.written if each.HasField("commit")]) == 1, "the second is not read"

    run(scenario, GROUP, *describe("a"))


def test_an_error_of_a_whole_commit_stays_one() -> None:
    async def scenario(served: Served) -> None:
        await served.join("a", "b")
        offsets = [CommitOffset(topic="a"), CommitOffset(topic="b")]
        await served.send(commit=SessionCommit(correlation_id=5, offsets=offsets))
        stale = SessionCommitResult(correlation_id=5, error=Error(code=common_pb2.STALE_MEMBER_EPOCH))
        served.session.deliver(GroupResponse(commit=stale))
        [written] = await served.writer.wait_for(1)
        assert written.commit.error.code == common_pb2.STALE_MEMBER_EPOCH
        assert not written.commit.results

    run(scenario, GROUP, *describe("a", "b"), *read("a"))


@pytest.mark.parametrize("answered", [1, 3])
def test_an_answer_that_does_not_fit_its_commit_is_an_error_of_all_of_it(answered: int) -> None:
    async def scenario(served: Served) -> None:
        await served.join("a", "b")
        offsets = [CommitOffset(topic=topic, partition=number) for number, topic in enumerate("aba")]
        await served.send(commit=SessionCommit(correlation_id=3, offsets=offsets))
        results = [CommitOffsetResult()] * answered
        served.session.deliver(GroupResponse(commit=SessionCommitResult(correlation_id=3, results=results)))
        [written] = await served.writer.wait_for(1)
        assert written.commit.error.code == common_pb2.INTERNAL
        assert f"{answered} of 2" in written.commit.error.message
        assert not written.commit.results

    run(scenario, GROUP, *describe("a", "b"), *read("a"))


@pytest.mark.parametrize("pattern", ["", ".*"])
@pytest.mark.parametrize("joined", [True, False])
def test_a_subscription_to_too_much_is_refused_before_anything_is_decided(pattern: str, *, joined: bool) -> None:
    async def scenario(served: Served) -> None:
        topics = [f"t{number}" for number in range(MAX_TOPICS + 1)]
        if joined:
            await served.join("a")
            subscription = Subscription(topics=topics, pattern=pattern)
            await served.send(heartbeat=GroupHeartbeat(member_epoch=1, subscription=subscription))
        else:
            await served.join(*topics, pattern=pattern)
        assert await served.ended() == [common_pb2.INVALID_REQUEST]
        assert f"{MAX_TOPICS} topics at most" in served.writer.written[-1].error.message
        assert [type(command) for command in served.commands] == ([Join, Disconnected] if joined else [])
        assert not {name for _, _, name in served.authorizer.asked} & set(topics)

    run(scenario, GROUP, *describe("a"))


def test_what_takes_many_decisions_leaves_others_their_turns() -> None:
    async def scenario(served: Served) -> None:
        topics = [f"t{number}" for number in range(10 * AT_A_TIME)]
        async with counted_turns() as turns:
            permissions = MemberPermissions.of(served.authorizer.caller(), IDS.get)
            assert permissions is not None
            await permissions.check_subscription(Subscription(topics=topics, pattern=".*"))
            assert turns.count >= 9
            await permissions.check_subscription(Subscription(topics=["a"] * 10 * AT_A_TIME))
            assert turns.count >= 18
            commit = SessionCommit(offsets=[CommitOffset(topic=topic) for topic in topics])
            assert await permissions.admit(commit) is not None
            assert turns.count >= 27

    run(scenario, GROUP, *describe("a"))


@pytest.mark.parametrize("topics", [1, 10 * AT_A_TIME])
async def test_refused_offsets_are_answered_in_turns(topics: int) -> None:
    """However many partitions a topic has: each has a refusal of its own."""
    named = [
        TopicPartitions(topic=f"t{number}", partitions=range(10 * AT_A_TIME // topics)) for number in range(topics)
    ]

    async def fetch(request: FetchOffsetsRequest) -> FetchOffsetsResponse:
        raise AssertionError("nothing of it may be fetched")

    who = FakeAuthorizer().caller()
    request = FetchOffsetsRequest(group_id="g", partitions=named)
    response, most = await calls_in_a_turn(fetched(request, who, IDS.get, fetch))
    assert len(response.offsets) == 10 * AT_A_TIME
    assert most < 50 * AT_A_TIME


def test_without_an_authorizer_there_is_nothing_to_look_at() -> None:
    assert MemberPermissions.of(Caller(), IDS.get) is None


async def test_a_list_shows_the_groups_that_may_be_described_or_all_to_who_sees_the_cluster() -> None:
    groups = [ListedGroup(group_id=name) for name in ("g", "h", "i")]
    some = FakeAuthorizer((Acl.DESCRIBE, Acl.GROUP, "h"))
    assert await shown_groups(groups, some.caller()) == groups[1:2]
    assert some.logged == []
    assert await shown_groups(groups, FakeAuthorizer((Acl.DESCRIBE, Acl.CLUSTER, CLUSTER_NAME)).caller()) == groups
    assert await shown_groups(groups, Caller()) == groups


def test_all_committed_offsets_are_those_of_topics_that_may_be_described() -> None:
    offsets = [CommittedOffset(topic=topic, offset=1) for topic in ("a", "b", "a")]
    response = FetchOffsetsResponse(offsets=offsets)
    asyncio.run(leave_out_offsets(response, Caller()))
    assert list(response.offsets) == offsets
    asyncio.run(leave_out_offsets(response, FakeAuthorizer(*describe("a")).caller()))
    assert [offset.topic for offset in response.offsets] == ["a", "a"]


@pytest.mark.parametrize(
    "member",
    [
        GroupMember(subscription=Subscription(topics=["a", "b"])),
        GroupMember(assigned=[TopicPartitions(topic="b")]),
        GroupMember(target=[TopicPartitions(topic="a"), TopicPartitions(topic="b")]),
        GroupMember(pending_revocation=[TopicPartitions(topic="b")]),
    ],
)
def test_a_group_is_shown_whole_or_not_at_all(member: GroupMember) -> None:
    group = GroupDescription(group_id="g", members=[GroupMember(), member])
    check_described(group, Caller())
    check_described(group, FakeAuthorizer(*describe("a", "b")).caller())
    with pytest.raises(TopicAuthorizationFailed) as raised:
        check_described(group, FakeAuthorizer(*describe("a")).caller())
    assert "'b'" not in str(raised.value), "the refusal must not name the topic, which would tell that it exists"


def test_a_transaction_is_shown_with_the_topics_that_may_be_described() -> None:
    topics = [TopicPartitions(topic="a"), TopicPartitions(topic="b"), TopicPartitions(topic_id=b"gone")]
    leave_out_topics(topics, Caller())
    assert len(topics) == 3
    leave_out_topics(topics, FakeAuthorizer(*describe("b")).caller())
    assert [topic.topic for topic in topics] == ["b"]


def asked(partitions: int = 1, **values: Any) -> FetchOffsetsRequest:
    topics = [TopicPartitions(topic_id=key, partitions=range(partitions)) for key in (b"id-of-b", b"id-of-a", b"no")]
    return FetchOffsetsRequest(group_id="g", partitions=topics, **values)


@pytest.mark.parametrize(
    ("allowed", "codes"),
    [
        ((), [TOPIC_REFUSED, TOPIC_REFUSED, TOPIC_REFUSED, TOPIC_REFUSED, 0, 0]),
        (("a",), [TOPIC_REFUSED, TOPIC_REFUSED, 0, 0, 0, 0]),
        (("a", "b"), [0] * 6),
    ],
)
def test_offsets_are_fetched_of_what_may_be_described(allowed: tuple[str, ...], codes: list[int]) -> None:
    """An unknown topic is passed on: the group answers that it is unknown."""
    reached: list[FetchOffsetsRequest] = []

    async def fetch(request: FetchOffsetsRequest) -> FetchOffsetsResponse:
        reached.append(request)
        return FetchOffsetsResponse(
            offsets=[
                CommittedOffset(topic_id=part.topic_id, partition=number, offset=10 + number)
                for part in request.partitions
                for number in part.partitions
            ]
        )

    async def main() -> None:
        who = FakeAuthorizer(*describe(*allowed)).caller()
        response = await fetched(asked(2), who, IDS.get, fetch)
        assert [offset.error.code for offset in response.offsets] == codes
        assert [(offset.topic_id, offset.partition) for offset in response.offsets] == [
            (key, number) for key in (b"id-of-b", b"id-of-a", b"no") for number in (0, 1)
        ]
        assert [offset.offset for offset in response.offsets] == [
            -1 if code else 10 + number % 2 for number, code in enumerate(codes)
        ]
        assert (await fetched(asked(2), Caller(), IDS.get, fetch)).offsets[0].offset == 10
        assert reached[-1] == asked(2)

    asyncio.run(main())


def test_an_error_of_a_whole_fetch_stays_one() -> None:
    async def fetch(request: FetchOffsetsRequest) -> FetchOffsetsResponse:
        return FetchOffsetsResponse(error=Error(code=common_pb2.NOT_COORDINATOR))

    response = asyncio.run(fetched(asked(), FakeAuthorizer(*describe("a")).caller(), IDS.get, fetch))
    assert (response.error.code, len(response.offsets)) == (common_pb2.NOT_COORDINATOR, 0)


def test_all_offsets_are_fetched_without_those_of_other_topics() -> None:
    async def fetch(request: FetchOffsetsRequest) -> FetchOffsetsResponse:
        return FetchOffsetsResponse(offsets=[CommittedOffset(topic=topic) for topic in ("a", "b")])

    request = FetchOffsetsRequest(group_id="g", all=True)
    response = asyncio.run(fetched(request, FakeAuthorizer(*describe("b")).caller(), IDS.get, fetch))
    assert [offset.topic for offset in response.offsets] == ["b"]


@pytest.mark.parametrize(("allowed", "codes"), [((), [TOPIC_REFUSED] * 3), (("a",), [TOPIC_REFUSED, 0, TOPIC_REFUSED])])
def test_offsets_are_committed_of_what_may_be_read(allowed: tuple[str, ...], codes: list[int]) -> None:
    offsets = [CommitOffset(topic="b"), CommitOffset(topic_id=b"id-of-a"), CommitOffset(topic_id=b"id-of-b")]
    reached: list[CommitOffset] = []

    async def commit(request: CommitOffsetsRequest) -> CommitOffsetsResponse:
        assert (request.group_id, request.member_epoch) == ("g", 4)
        reached.extend(request.offsets)
        return CommitOffsetsResponse(results=[CommitOffsetResult()] * len(request.offsets))

    request = CommitOffsetsRequest(group_id="g", member_epoch=4, offsets=offsets)
    response = asyncio.run(committed(request, FakeAuthorizer(*read(*allowed)).caller(), IDS.get, commit))
    assert [result.error.code for result in response.results] == codes
    assert reached == offsets[1 : 1 + len(allowed)]


def test_answers_that_do_not_fit_their_call_are_errors_of_all_of_it() -> None:
    async def commit(request: CommitOffsetsRequest) -> CommitOffsetsResponse:
        return CommitOffsetsResponse(results=[CommitOffsetResult()] * 3)

    async def fetch(request: FetchOffsetsRequest) -> FetchOffsetsResponse:
        return FetchOffsetsResponse(offsets=[CommittedOffset(topic="a")])

    offsets = [CommitOffset(topic="b"), CommitOffset(topic_id=b"id-of-a")]
    who = FakeAuthorizer(*read("a"), *describe("a")).caller()
    wrote = asyncio.run(committed(CommitOffsetsRequest(group_id="g", offsets=offsets), who, IDS.get, commit))
    assert (wrote.error.code, len(wrote.results)) == (common_pb2.INTERNAL, 0)
    got = asyncio.run(fetched(asked(), who, IDS.get, fetch))
    assert (got.error.code, len(got.offsets)) == (common_pb2.INTERNAL, 0)


def test_a_description_of_groups_has_committed_offsets_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client asks for those of the other groups one by one (`raftlog/_client/admin.py`)."""
    monkeypatch.setattr(group_permissions, "MAX_COMMITTED", 3 * COMMITTED_AT_A_TIME)
    groups = [GroupDescription(group_id=f"g{number}") for number in range(10 * COMMITTED_AT_A_TIME)]
    asked: list[str] = []

    async def fetch(group_id: str) -> FetchOffsetsResponse:
        asked.append(group_id)
        if group_id == "g1":
            return FetchOffsetsResponse(error=Error(code=GROUP_REFUSED))
        return FetchOffsetsResponse(offsets=[CommittedOffset(topic="t", partition=number) for number in range(2)])

    asyncio.run(add_committed(groups, fetch))
    most = 3 * COMMITTED_AT_A_TIME // 2 + 1
    assert [each.HasField("committed") for each in groups] == [number < most and number != 1 for number in range(500)]
    assert groups[1].error.code == GROUP_REFUSED
    assert asked == [each.group_id for each in groups[: 2 * COMMITTED_AT_A_TIME]]


def test_groups_whose_offsets_do_not_fit_leave_room_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_permissions, "MAX_COMMITTED", 10)
    sizes = [11, 4, 0, 7, 6, 1]
    groups = [GroupDescription(group_id=str(number)) for number in range(len(sizes))]

    async def fetch(group_id: str) -> FetchOffsetsResponse:
        return FetchOffsetsResponse(offsets=[CommittedOffset(topic="t")] * sizes[int(group_id)])

    asyncio.run(add_committed(groups, fetch))
    told = [len(each.committed.offsets) if each.HasField("committed") else None for each in groups]
    assert told == [None, 4, 0, None, 6, None]


def test_the_offsets_of_few_groups_are_fetched_in_vain() -> None:
    groups = [GroupDescription(group_id=f"g{number}") for number in range(10 * COMMITTED_AT_A_TIME)]
    asked: list[str] = []
    many = FetchOffsetsResponse(offsets=[CommittedOffset()] * (group_permissions.MAX_COMMITTED + 1))

    async def fetch(group_id: str) -> FetchOffsetsResponse:
        asked.append(group_id)
        return many

    asyncio.run(add_committed(groups, fetch))
    assert len(asked) == group_permissions.MAX_SKIPPED == COMMITTED_AT_A_TIME
