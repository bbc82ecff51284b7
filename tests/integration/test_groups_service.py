"""The Group service of real servers, over raw stubs: look-up, offsets, sessions, and what a failover leaves of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import StatusCode, aio

import raftlog
from raftlog.errors import InvalidTopic
from raftlog.testing import Cluster
from raftlog.v1 import common_pb2, group_pb2, group_pb2_grpc, log_pb2, log_pb2_grpc, metadata_pb2, metadata_pb2_grpc
from tests.support.steady import PATIENT, STEADY
from tests.support.up_to_date import heard_everywhere

NODES = (1, 2, 3)
OFFSETS = "__consumer_offsets"
TIMEOUT_S = 90.0
CALL_S = 20.0
SESSION_MS = 3_000
ATTEMPTS = 5
RETRIABLE = {
    common_pb2.COORDINATOR_LOAD_IN_PROGRESS,
    common_pb2.COORDINATOR_NOT_AVAILABLE,
    common_pb2.NOT_COORDINATOR,
    common_pb2.REQUEST_TIMED_OUT,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    config = {
        **PATIENT,
        "group.consumer.session.timeout.ms": 60_000,
        "group.consumer.heartbeat.interval.ms": 500,
    }
    with Cluster(nodes=3, config=config) as made:
        with raftlog.Admin(made.bootstrap) as admin:
            admin.create_topic("t", partitions=4, replication_factor=3)
        heard_everywhere(made)
        yield made


@pytest.fixture(autouse=True)
def everyone_is_up(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.start_all()


class Client:
    """Channels to all brokers, and the coordinator of a group."""

    def __init__(self, bootstrap: str) -> None:
        self.addresses = bootstrap.split(",")
        self._channels: dict[str, aio.Channel] = {}

    def channel(self, address: str) -> aio.Channel:
        if address not in self._channels:
            self._channels[address] = aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        return self._channels[address]

    def stub(self, address: str) -> Any:
        return group_pb2_grpc.GroupStub(self.channel(address))

    async def find(self, group_id: str) -> group_pb2.FindCoordinatorResponse:
        """Return who coordinates the group, asked of everyone until somebody knows."""
        until_s = time.monotonic() + TIMEOUT_S
        response: group_pb2.FindCoordinatorResponse | None = None
        while time.monotonic() < until_s:
            for address in self.addresses:
                try:
                    response = await self.stub(address).FindCoordinator(
                        group_pb2.FindCoordinatorRequest(group_id=group_id), timeout=CALL_S
                    )
                except aio.AioRpcError:
                    continue
                if not response.HasField("error"):
                    return response
                assert response.error.code in RETRIABLE, response.error
            await asyncio.sleep(0.05)
        raise AssertionError(f"nobody coordinates {group_id}: {response}")

    async def of(self, group_id: str) -> Any:
        found = await self.find(group_id)
        return self.stub(f"{found.host}:{found.port}")

    async def ask(self, group_id: str, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return what the coordinator answers, once nothing that passes stands in between."""
        until_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                answer = await call(await self.of(group_id))
            except aio.AioRpcError:
                answer = None
            if answer is not None and not (answer.HasField("error") and answer.error.code in RETRIABLE):
                return answer
            assert time.monotonic() < until_s, answer
            await asyncio.sleep(0.05)

    async def commit(self, group_id: str, **offsets: int) -> group_pb2.CommitOffsetsResponse:
        """Commit as nobody in particular: t0=5 is offset 5 of partition 0."""
        request = group_pb2.CommitOffsetsRequest(
            group_id=group_id,
            member_epoch=-1,
            offsets=[
                group_pb2.CommitOffset(topic="t", partition=int(name[1:]), offset=offset, leader_epoch=-1)
                for name, offset in offsets.items()
            ],
        )
        answer: group_pb2.CommitOffsetsResponse = await self.ask(
            group_id, lambda stub: stub.CommitOffsets(request, timeout=TIMEOUT_S)
        )
        return answer

    async def committed(self, group_id: str) -> dict[int, int]:
        request = group_pb2.FetchOffsetsRequest(group_id=group_id, member_epoch=-1, all=True)
        answer = await self.ask(group_id, lambda stub: stub.FetchOffsets(request, timeout=TIMEOUT_S))
        assert not answer.HasField("error"), answer
        return {each.partition: each.offset for each in answer.offsets}

    async def describe(self, group_id: str) -> group_pb2.GroupDescription:
        stub = await self.of(group_id)
        answer = await stub.DescribeGroups(group_pb2.DescribeGroupsRequest(group_ids=[group_id]), timeout=TIMEOUT_S)
        description: group_pb2.GroupDescription = answer.groups[0]
        return description

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


@asynccontextmanager
async def client_of(cluster: Cluster) -> AsyncIterator[Client]:
    client = Client(cluster.bootstrap)
    try:
        yield client
    finally:
        await client.close()


class Missed(AssertionError):
    """The coordinator has ended a member's session, of which it has not heard for too long."""


class Member:
    """One member by hand."""

    def __init__(self, stub: Any, group_id: str, *, member_id: str = "", epoch: int = 0, owned: Any = ()) -> None:
        self.member_id = member_id or uuid.uuid4().hex
        self.epoch = epoch
        self.partitions: set[int] = set()
        self.assigned: Any = ()
        self._stub = stub
        self.call = stub.Session()
        self._join = group_pb2.GroupRequest(
            join=group_pb2.JoinGroup(
                group_id=group_id,
                member_id=self.member_id,
                member_epoch=epoch,
                client_id="by-hand",
                subscription=group_pb2.Subscription(topics=["t"]),
                owned=owned,
            )
        )

    async def join(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not await self.has_joined():
                await asyncio.sleep(0.05)  # the coordinator is known before it has loaded its groups
                self.call = self._stub.Session()

    async def has_joined(self) -> bool:
        """Ask to be taken in; return False when that is refused only for now."""
        await self.call.write(self._join)
        response = await self.read()
        if response.error.code in RETRIABLE:
            return False
        assert response.WhichOneof("response") == "assignment", response
        self._take(response.assignment)
        return True

    async def read(self) -> group_pb2.GroupResponse:
        response = await asyncio.wait_for(self.call.read(), TIMEOUT_S)
        if not isinstance(response, group_pb2.GroupResponse):
            raise Missed(await self.call.details())
        return response

    def _take(self, assignment: group_pb2.GroupAssignment) -> None:
        self.epoch = assignment.member_epoch
        self.partitions = {number for topic in assignment.topics for number in topic.partitions}
        self.assigned = [
            group_pb2.TopicPartitions(topic_id=topic.topic_id, topic=topic.topic, partitions=topic.partitions)
            for topic in assignment.topics
        ]

    async def beat(self) -> None:
        """Say what it reads, and take what comes until that is answered."""
        heartbeat = group_pb2.GroupHeartbeat(member_epoch=self.epoch, owned=group_pb2.Owned(partitions=self.assigned))
        try:
            await self.call.write(group_pb2.GroupRequest(heartbeat=heartbeat))
        except aio.AioRpcError as ended:
            raise Missed(ended.details()) from None
        while True:
            response = await self.read()
            match response.WhichOneof("response"):
                case "assignment":
                    self._take(response.assignment)
                case "heartbeat":
                    self.epoch = response.heartbeat.member_epoch
                    return
                case "error" if response.error.code == common_pb2.UNKNOWN_MEMBER_ID:
                    raise Missed(response.error.message)
                case _:
                    raise AssertionError(response)

    async def until(self, count: int) -> None:
        """Heartbeat until it has `count` partitions."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.partitions) != count:
                await self.beat()
                await asyncio.sleep(0.05)


def run(cluster: Cluster, scenario: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        async with client_of(cluster) as client:
            await scenario(client)

    asyncio.run(main())


async def until(is_so: Callable[[], Awaitable[object]], what: str) -> None:
    """Wait until something is so."""
    until_s = time.monotonic() + TIMEOUT_S
    while not await is_so():
        assert time.monotonic() < until_s, what
        await asyncio.sleep(0.05)


async def named_by(stub: Any, group_id: str) -> int:
    """Return the coordinator that a broker names, once it has heard of the topic and of who leads it."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            answer = await stub.FindCoordinator(group_pb2.FindCoordinatorRequest(group_id=group_id))
            if answer.error.code not in RETRIABLE:
                node_id: int = answer.node_id
                return node_id
            await asyncio.sleep(0.05)


def test_the_first_group_has_the_topic_made_and_all_brokers_name_one_coordinator(cluster: Cluster) -> None:
    async def scenario(client: Client) -> None:
        found = await client.find("hello")
        assert found.partition == 22  # as Kafka has it

        async def all_agree() -> bool:
            return len({await named_by(client.stub(address), "hello") for address in client.addresses}) == 1

        await until(all_agree, "all name one coordinator")

    run(cluster, scenario)
    with raftlog.Admin(cluster.bootstrap) as admin:
        described = admin.describe_topic(OFFSETS)
        assert len(described.partitions) == 50
        assert {len(partition.replicas) for partition in described.partitions} == {3}


@pytest.mark.parametrize("group_id", ["", "x" * 300])
def test_a_group_name_of_0_or_300_characters_is_refused_everywhere(cluster: Cluster, group_id: str) -> None:
    async def scenario(client: Client) -> None:
        stub = client.stub(client.addresses[0])
        invalid = common_pb2.INVALID_GROUP_ID
        found = await stub.FindCoordinator(group_pb2.FindCoordinatorRequest(group_id=group_id))
        assert found.error.code == invalid
        committed = await stub.CommitOffsets(group_pb2.CommitOffsetsRequest(group_id=group_id))
        assert committed.error.code == invalid
        fetched = await stub.FetchOffsets(group_pb2.FetchOffsetsRequest(group_id=group_id))
        assert fetched.error.code == invalid
        described = await stub.DescribeGroups(group_pb2.DescribeGroupsRequest(group_ids=[group_id]))
        assert described.groups[0].error.code == invalid
        deleted = await stub.DeleteGroups(group_pb2.DeleteGroupsRequest(group_ids=[group_id]))
        assert deleted.results[0].error.code == invalid
        session = stub.Session()
        await session.write(group_pb2.GroupRequest(join=group_pb2.JoinGroup(group_id=group_id)))
        assert (await session.read()).error.code == invalid

    run(cluster, scenario)


def test_a_session_that_does_not_begin_with_join_ends_with_a_status(cluster: Cluster) -> None:
    async def scenario(client: Client) -> None:
        session = client.stub(client.addresses[0]).Session()
        await session.write(group_pb2.GroupRequest(heartbeat=group_pb2.GroupHeartbeat()))
        with pytest.raises(aio.AioRpcError, match="the first request of a session is `join`") as ended:
            await session.read()
        assert ended.value.code() is StatusCode.INVALID_ARGUMENT

    run(cluster, scenario)


def test_another_broker_names_the_coordinator(cluster: Cluster) -> None:
    async def scenario(client: Client) -> None:
        async def another_says_so() -> bool:
            found = await client.find("elsewhere")
            other = next(a for a in client.addresses if a != f"{found.host}:{found.port}")
            named = await named_by(client.stub(other), "elsewhere")
            answer = await client.stub(other).FetchOffsets(
                group_pb2.FetchOffsetsRequest(group_id="elsewhere", member_epoch=-1, all=True)
            )
            return (
                named == found.node_id
                and answer.error.code == common_pb2.NOT_COORDINATOR
                and f"broker {found.node_id} at {found.host}:{found.port}" in answer.error.message
            )

        await until(another_says_so, "another broker names the coordinator, and refuses to be it")

    run(cluster, scenario)


def test_offsets_survive_the_death_of_their_coordinator(cluster: Cluster) -> None:
    async def scenario(client: Client) -> None:
        assert not (await client.commit("survives", t0=5, t1=7)).HasField("error")
        assert not (await client.commit("survives", t0=6)).HasField("error")
        found = await client.find("survives")
        cluster.kill(found.node_id)
        assert await client.committed("survives") == {0: 6, 1: 7}

        async def another_is_named() -> bool:
            return (await client.find("survives")).node_id != found.node_id

        await until(another_is_named, "nobody names the one that is dead")
        answer = await client.commit("survives", t1=8)
        assert [each.HasField("error") for each in answer.results] == [False]
        cluster.start(found.node_id)
        assert await client.committed("survives") == {0: 6, 1: 8}

    run(cluster, scenario)


def test_offsets_survive_a_restart_of_the_whole_cluster(cluster: Cluster) -> None:
    async def before(client: Client) -> None:
        assert not (await client.commit("restarts", t2=11)).HasField("error")

    async def after(client: Client) -> None:
        assert await client.committed("restarts") == {2: 11}

    run(cluster, before)
    for node in NODES:
        cluster.kill(node)
    cluster.start_all()
    run(cluster, after)


def test_two_members_share_a_topic_and_one_that_dies_leaves_its_part_to_the_other() -> None:
    async def share(client: Client, group_id: str) -> None:
        stub = await client.of(group_id)
        first, second = Member(stub, group_id), Member(stub, group_id)
        await first.join()
        await first.until(4)
        await second.join()
        async with asyncio.timeout(TIMEOUT_S):
            while not len(first.partitions) == len(second.partitions) == 2:
                await first.beat()
                await second.beat()
        assert first.partitions | second.partitions == {0, 1, 2, 3}
        described = await client.describe(group_id)
        for member in (first, second):
            await member.beat()  # one that was missed meanwhile hears it here
        assert {member.member_id for member in described.members} == {first.member_id, second.member_id}
        assert {member.client_id for member in described.members} == {"by-hand"}
        assert {member.host for member in described.members} == {"127.0.0.1"}
        assert described.coordinator_id == (await client.find(group_id)).node_id
        second.call.cancel()
        await first.until(4)
        first.call.cancel()

    async def scenario(client: Client) -> None:
        for attempt in range(ATTEMPTS):
            with contextlib.suppress(Missed):  # it was this process that stood still
                return await share(client, f"shares-{attempt}")
        raise AssertionError("members are missed, however often they are heard of")

    short = {**STEADY, "group.consumer.session.timeout.ms": SESSION_MS, "group.consumer.heartbeat.interval.ms": 500}
    with Cluster(nodes=1, config=short) as alone:
        with raftlog.Admin(alone.bootstrap) as admin:
            admin.create_topic("t", partitions=4)
        run(alone, scenario)


def test_a_member_is_back_after_the_death_of_its_coordinator_and_has_what_it_had(cluster: Cluster) -> None:
    async def scenario(client: Client) -> None:
        found = await client.find("moves")
        member = Member(client.stub(f"{found.host}:{found.port}"), "moves")
        await member.join()
        await member.until(4)
        await member.beat()
        epoch = member.epoch
        cluster.kill(found.node_id)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                stub = await client.of("moves")
                back = Member(stub, "moves", member_id=member.member_id, epoch=epoch, owned=member.assigned)
                try:
                    await back.join()
                    break
                except (AssertionError, aio.AioRpcError):
                    await asyncio.sleep(0.05)
        assert back.partitions == member.partitions
        assert back.epoch == epoch
        commit = group_pb2.SessionCommit(
            correlation_id=3,
            member_epoch=back.epoch,
            offsets=[group_pb2.CommitOffset(topic="t", partition=1, offset=9, leader_epoch=-1)],
        )
        await back.call.write(group_pb2.GroupRequest(commit=commit))
        while (response := await back.read()).WhichOneof("response") in ("assignment", "heartbeat"):
            pass
        assert response.commit.correlation_id == 3
        assert not response.commit.HasField("error")
        assert not response.commit.results[0].HasField("error")
        await back.call.write(group_pb2.GroupRequest(leave=group_pb2.LeaveGroup()))
        assert await asyncio.wait_for(back.call.read(), TIMEOUT_S) is aio.EOF
        assert await client.committed("moves") == {1: 9}

    run(cluster, scenario)


def test_a_stream_is_told_when_its_coordinator_stops(cluster: Cluster) -> None:
    async def scenario(client: Client) -> None:
        joined: list[tuple[int, Member]] = []

        async def has_joined() -> bool:
            found = await client.find("told")
            member = Member(client.stub(f"{found.host}:{found.port}"), "told")
            joined.append((found.node_id, member))
            return await member.has_joined()

        await until(has_joined, "its coordinator takes it in")
        node_id, member = joined[-1]
        stopping = asyncio.get_running_loop().run_in_executor(None, cluster.stop, node_id)
        while (response := await member.read()).WhichOneof("response") != "error":
            pass
        assert response.error.code == common_pb2.NOT_COORDINATOR
        await stopping

    run(cluster, scenario)


def test_groups_are_listed_by_their_coordinator_and_can_be_deleted(cluster: Cluster) -> None:
    async def listed(client: Client) -> set[str]:
        groups: set[str] = set()
        for address in client.addresses:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    answer = await client.stub(address).ListGroups(group_pb2.ListGroupsRequest())
                    if not answer.loading:
                        break
                    await asyncio.sleep(0.1)
            groups |= {group.group_id for group in answer.groups}
        return groups

    async def scenario(client: Client) -> None:
        for number in range(5):
            await client.commit(f"listed-{number}", t0=number)
        names = {f"listed-{number}" for number in range(5)}

        async def all_are_listed() -> bool:
            return names <= await listed(client)

        async def is_deleted() -> bool:
            stub = await client.of("listed-3")
            answer = await stub.DeleteGroups(group_pb2.DeleteGroupsRequest(group_ids=["listed-3"]))
            error = answer.results[0].error
            assert not error.code or error.code in RETRIABLE, error
            return not error.code

        async def only_the_others_are_listed() -> bool:
            return names - await listed(client) == {"listed-3"}

        await until(all_are_listed, "somebody lists each")
        await until(is_deleted, "the coordinator deletes it")
        await until(only_the_others_are_listed, "it is gone, and the others are there")
        assert await client.committed("listed-3") == {}

    run(cluster, scenario)


def test_the_offsets_of_a_deleted_topic_go_with_it(cluster: Cluster) -> None:
    async def scenario(client: Client) -> None:
        request = group_pb2.CommitOffsetsRequest(
            group_id="topicless",
            member_epoch=-1,
            offsets=[
                group_pb2.CommitOffset(topic="passing", partition=0, offset=1, leader_epoch=-1),
                group_pb2.CommitOffset(topic="t", partition=3, offset=2, leader_epoch=-1),
            ],
        )
        answer = await client.ask("topicless", lambda stub: stub.CommitOffsets(request))
        assert not any(each.HasField("error") for each in answer.results)
        with raftlog.Admin(cluster.bootstrap) as admin:
            admin.delete_topic("passing")
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                if await client.committed("topicless") == {3: 2}:
                    break
                await asyncio.sleep(0.05)

    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("passing", replication_factor=3)
    heard_everywhere(cluster)
    run(cluster, scenario)


def test_clients_read_internal_topics_and_do_not_change_them(cluster: Cluster) -> None:
    async def scenario(client: Client) -> None:
        await client.commit("seen", t0=1)

    run(cluster, scenario)
    heard_everywhere(cluster)
    with raftlog.Admin(cluster.bootstrap) as admin:
        with pytest.raises(InvalidTopic, match="not deleted"):
            admin.delete_topic(OFFSETS)
        with pytest.raises(InvalidTopic, match="number of partitions"):
            admin.create_partitions(OFFSETS, 60)
        assert admin.describe_topic(OFFSETS).partitions
    with raftlog.Producer(cluster.bootstrap) as producer, pytest.raises(InvalidTopic, match="not written to"):
        producer.send(OFFSETS, b"v").result(TIMEOUT_S)
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([raftlog.TopicPartition(OFFSETS, number) for number in range(50)])
        until_s = time.monotonic() + TIMEOUT_S
        while not consumer.poll(1.0):
            assert time.monotonic() < until_s


def test_the_record_at_an_offset_says_how_old_what_follows_is(cluster: Cluster) -> None:
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("aged", replication_factor=3)
    with raftlog.Producer(cluster.bootstrap) as producer:
        for number in range(3):
            producer.send("aged", b"v", timestamp_ms=5_000 - number).result(TIMEOUT_S)
    leader = cluster.leader("aged", 0)

    async def scenario(client: Client) -> None:
        channel = client.channel(client.addresses[NODES.index(leader)])
        got = await metadata_pb2_grpc.MetadataStub(channel).Get(metadata_pb2.MetadataRequest(topics=["aged"]))
        parts = [
            log_pb2.ListOffsetsPartition(topic_id=got.topics[0].topic_id, leader_epoch=-1, at_offset=offset)
            for offset in (0, 2, 3, 99, -1)
        ]
        answer = await log_pb2_grpc.LogStub(channel).ListOffsets(log_pb2.ListOffsetsRequest(partitions=parts))
        found = [(each.offset, each.timestamp_ms) for each in answer.results]
        assert found[:4] == [(0, 5_000), (2, 4_998), (-1, -1), (-1, -1)]
        assert answer.results[4].error.code == common_pb2.INVALID_REQUEST

    run(cluster, scenario)
