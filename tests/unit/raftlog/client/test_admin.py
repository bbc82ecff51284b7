"""The admin client: its deadlines, and what it asks about groups, replicas and transactions."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raftlog import Admin, Producer, TopicPartition, aio
from raftlog._client import admin as engine
from raftlog._client import metadata
from raftlog.console.view import View
from raftlog.errors import (
    BrokerUnavailable,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    GroupIdNotFound,
    GroupSubscribedToTopic,
    InvalidGroupId,
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidRequestError,
    InvalidTxnState,
    LeaderNotAvailable,
    NonEmptyGroup,
    NoReassignmentInProgress,
    NotCoordinator,
    NotEnoughReplicas,
    NotLeader,
    OffsetMetadataTooLarge,
    PolicyViolation,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
    TransactionalIdNotFound,
    UnknownTopicOrPartition,
    to_wire,
)
from raftlog.types import OffsetAndMetadata
from raftlog.v1 import admin_pb2, group_pb2, transaction_pb2
from replication.leader import ReplicaView
from tests.support.admin_service import AdminServer, Description, Led, LogName
from tests.support.batches import batch_of
from tests.support.fake_broker import FakeCluster
from tests.support.fake_groups import member
from tests.support.fake_transaction_tools import ToolCluster
from tests.support.metadata import broker_epoch, create_topic, fence, register, uuid_of
from tests.support.patience import quickest_s


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("timeout_ms", [300, 1_200])
def test_the_timeout_is_kept_when_nobody_answers(silent: str, timeout_ms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (engine, "_ADDRESS_TIMEOUT_S"),
        (engine, "_FIRST_CONTACT_S"),
        (metadata, "_ADDRESS_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, 120.0)
    enough_s = timeout_ms / 1000 + 0.4
    with Admin(silent, default_api_timeout_ms=timeout_ms, request_timeout_ms=120_000) as admin:
        for call in (admin.describe_cluster, admin.list_topics):

            def attempt(call: Callable[[], object] = call) -> float:
                started = time.monotonic()
                with pytest.raises((BrokerUnavailable, RequestTimedOut)):
                    call()
                return time.monotonic() - started

            assert quickest_s(attempt, enough_s) < enough_s


def test_what_a_broker_says_wins_over_those_that_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def respond(self: Any, address: str, method: str, request: Any, deadline: float, *service: Any) -> Any:
        if address.endswith(":1"):
            raise BrokerUnavailable("no connection")
        return admin_pb2.DescribeClusterResponse(error=to_wire(RequestTimedOut("controllers 2, 4 are missing")))

    monkeypatch.setattr(engine.AdminEngine, "_response", respond)
    said = pytest.raises(RequestTimedOut, match=r"127\.0\.0\.1:2: controllers 2, 4 are missing")
    with Admin("127.0.0.1:1,127.0.0.1:2", default_api_timeout_ms=300) as admin, said:
        admin.describe_cluster(linearizable=True)


def test_a_broker_that_cannot_say_is_followed_by_the_next_and_that_one_is_asked_first_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def respond(self: Any, address: str, method: str, request: Any, deadline: float, *service: Any) -> Any:
        asked.append(address[-1])
        if address.endswith(":1"):
            return admin_pb2.DescribeClusterResponse(error=to_wire(RequestTimedOut("cut off")))
        return admin_pb2.DescribeClusterResponse(cluster_id="c")

    monkeypatch.setattr(engine.AdminEngine, "_response", respond)
    with Admin("127.0.0.1:1,127.0.0.1:2") as admin:
        assert admin.describe_cluster(linearizable=True).cluster_id == "c"
        assert admin.describe_cluster(linearizable=True).cluster_id == "c"
    assert asked == ["1", "2", "2"]


@pytest.mark.parametrize("change", ["delete", "partitions"])
@pytest.mark.parametrize("first", [RequestTimedOut("applied late"), BrokerUnavailable("no connection")])
def test_a_change_that_is_there_after_an_attempt_without_an_answer_is_done(
    monkeypatch: pytest.MonkeyPatch, change: str, first: RaftlogError
) -> None:
    refusals = {
        "delete": UnknownTopicOrPartition("there is no topic"),
        "partitions": InvalidPartitions("has 4 already"),
    }

    async def respond(self: Any, address: str, method: str, request: Any, deadline: float, *service: Any) -> Any:
        if address.endswith(":1"):
            raise first
        return admin_pb2.DeleteTopicResponse(error=to_wire(refusals[change]))

    monkeypatch.setattr(engine.AdminEngine, "_response", respond)
    with Admin("127.0.0.1:1,127.0.0.1:2", default_api_timeout_ms=300) as admin:

        def make() -> None:
            if change == "delete":
                admin.delete_topic("a")
            else:
                admin.create_partitions("a", 4)

        if isinstance(first, RequestTimedOut):
            make()
        else:  # no broker can have heard of it: then it is a mistake
            with pytest.raises(type(refusals[change])):
                make()


def test_a_topic_is_asked_for_with_one_id_however_often(monkeypatch: pytest.MonkeyPatch) -> None:
    ids: list[bytes] = []

    async def respond(self: Any, address: str, method: str, request: Any, deadline: float, *service: Any) -> Any:
        ids.append(request.topic_id)
        if len(ids) < 3:
            raise RequestTimedOut("making 2 000 partitions takes a while")
        return admin_pb2.CreateTopicResponse(error=to_wire(PolicyViolation("enough")))

    monkeypatch.setattr(engine.AdminEngine, "_response", respond)
    with Admin("127.0.0.1:1,127.0.0.1:2") as admin:
        with pytest.raises(PolicyViolation):
            admin.create_topic("a")
        with pytest.raises(PolicyViolation):
            admin.create_topic("a")
    assert len(ids[0]) == 16
    assert ids[0] == ids[1] == ids[2] != ids[3]


A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(nodes=3) as cluster:
        cluster.create_topic("a", 2)
        yield cluster


@pytest.fixture
def admin(cluster: FakeCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap, default_api_timeout_ms=60_000, retry_backoff_ms=5) as admin:
        yield admin


@pytest.fixture
def hasty(cluster: FakeCluster) -> Iterator[Admin]:
    """A client whose calls have no time for a second attempt: they raise the first attempt's error."""
    with Admin(cluster.bootstrap, default_api_timeout_ms=30_000, retry_backoff_ms=120_000) as admin:
        yield admin


def fill(cluster: FakeCluster, partition: int, *timestamps_ms: int) -> None:
    for at in timestamps_ms:
        cluster.append("a", batch_of(b"x", timestamp_ms=at), partition)


class TestList:
    def test_every_broker_is_asked_for_its_own(self, cluster: FakeCluster, admin: Admin) -> None:
        for number, group_id in enumerate("cba", start=1):
            cluster.groups.add(group_id, number)
        cluster.groups.add("busy", 2, members=[member("m", {"a": [0, 1]})])
        found = [(group.group_id, group.state, group.members, group.coordinator_id) for group in admin.list_groups()]
        assert found == [("a", "empty", 0, 3), ("b", "empty", 0, 2), ("busy", "stable", 1, 2), ("c", "empty", 0, 1)]
        assert [group.group_id for group in admin.list_groups(["stable"])] == ["busy"]
        assert [group.group_id for group in admin.list_groups(["Stable", "reconciling"])] == ["busy"]
        with pytest.raises(InvalidRequestError, match=r"no state 'dead'.*empty, assigning, reconciling, stable"):
            admin.list_groups(["dead"])

    def test_no_group_is_left_out_without_a_word(self, cluster: FakeCluster, admin: Admin, hasty: Admin) -> None:
        cluster.groups.add("seen", 1)
        cluster.groups.loading[2] = CoordinatorLoadInProgress("partition 7 is being read")
        with pytest.raises(CoordinatorLoadInProgress, match="partition 7"):
            hasty.list_groups()
        missing: list[RaftlogError] = []
        assert [group.group_id for group in admin.list_groups(missing=missing)] == ["seen"]
        assert [str(error) for error in missing] == ["partition 7 is being read"]
        cluster.groups.loading.clear()
        assert len(admin.list_groups(missing=missing)) == 1
        assert missing == []

    def test_a_broker_that_does_not_answer_is_named(self, cluster: FakeCluster, admin: Admin) -> None:
        cluster.groups.add("seen", 1)
        admin.list_groups()
        servers = cluster.ports[3]
        cluster.kill(3)
        missing: list[RaftlogError] = []
        assert [group.group_id for group in admin.list_groups(missing=missing)] == ["seen"]
        assert str(missing[0]).startswith(f"broker 3: no connection to 127.0.0.1:{servers}")

    def test_offsets_that_nobody_leads_are_missed(self, cluster: FakeCluster, admin: Admin, hasty: Admin) -> None:
        cluster.create_topic("__consumer_offsets", 3)
        assert admin.list_groups() == []
        cluster.move_leader("__consumer_offsets", 1, -1)
        with pytest.raises(CoordinatorNotAvailable, match=r"without a leader: 1$"):
            hasty.list_groups()


class TestDescribe:
    def test_members_and_what_they_read(self, cluster: FakeCluster, admin: Admin) -> None:
        one = member("m1", {"a": [1, 0]}, host="10.0.0.1", client_id="c", instance_id="i", last_heartbeat_ms=250)
        cluster.groups.add("g", 2, members=[one])
        found = admin.describe_group("g")
        assert found._replace(members=[]) == ("g", "stable", 3, 3, "sticky", 2, 7, 0, [], None, "consumer")
        [shown] = found.members
        assert shown.assigned == shown.target == [A0, A1]
        assert (shown.host, shown.client_id, shown.instance_id, shown.member_epoch) == ("10.0.0.1", "c", "i", 3)
        assert (shown.topics, shown.last_heartbeat_ms, shown.connected) == (["a"], 250, True)

    def test_a_coordinator_is_asked_once_for_all_of_its_groups(self, cluster: FakeCluster, admin: Admin) -> None:
        for number in range(9):
            cluster.groups.add(f"g{number}", 1 + number % 3)
        admin.list_groups()
        found = admin.describe_groups([f"g{number}" for number in reversed(range(9))])
        assert list(found) == [f"g{number}" for number in reversed(range(9))]
        assert {group.coordinator_id for group in found.values()} == {1, 2, 3}
        assert cluster.groups.found == 0, "no coordinator must be looked up, as the list of groups names them"

    def test_a_group_that_moved_is_found_again(self, cluster: FakeCluster, admin: Admin) -> None:
        cluster.groups.add("g", 2)
        admin.describe_group("g")
        cluster.groups.move("g", 3)
        assert admin.describe_group("g").coordinator_id == 3

    def test_an_unknown_group_is_an_error(self, cluster: FakeCluster, admin: Admin) -> None:
        with pytest.raises(GroupIdNotFound, match="no group 'nobody'"):
            admin.describe_group("nobody")
        cluster.groups.add("dead", 1).state = group_pb2.DEAD
        with pytest.raises(GroupIdNotFound, match="no group 'dead'"):
            admin.describe_group("dead")

    @pytest.mark.parametrize("group_id", ["", "x" * 256])
    def test_names_are_checked_before_anybody_is_asked(self, admin: Admin, group_id: str) -> None:
        for ask in (admin.describe_group, admin.group_offsets, admin.group_lag):
            with pytest.raises(InvalidGroupId, match=f"has {len(group_id)}"):
                ask(group_id)
        with pytest.raises(InvalidGroupId):
            admin.delete_groups(["fine", group_id])
        with pytest.raises(InvalidGroupId):
            admin.alter_group_offsets(group_id, {A0: 1})


class TestOffsets:
    def test_they_are_set_shown_and_forgotten(self, cluster: FakeCluster, admin: Admin) -> None:
        admin.alter_group_offsets("new", {A1: 7, A0: OffsetAndMetadata(3, "by hand", 2)})
        assert admin.group_offsets("new") == {A0: OffsetAndMetadata(3, "by hand", 2), A1: OffsetAndMetadata(7)}
        assert list(admin.group_offsets("new")) == [A0, A1]
        admin.delete_group_offsets("new", [A0])
        assert admin.group_offsets("new") == {A1: OffsetAndMetadata(7)}
        assert admin.group_offsets("never-heard-of") == {}

    def test_members_know_better(self, cluster: FakeCluster, admin: Admin) -> None:
        cluster.groups.add("g", 2, {A0: 5}, [member("m", {"a": [0, 1]})])
        with pytest.raises(NonEmptyGroup, match="stop them first"):
            admin.alter_group_offsets("g", {A0: 1})
        with pytest.raises(GroupSubscribedToTopic, match="2 of 2 were refused"):
            admin.delete_group_offsets("g", [A0, A1])
        assert admin.group_offsets("g")[A0].offset == 5

    def test_what_does_not_exist_is_refused_at_once(self, cluster: FakeCluster, admin: Admin) -> None:
        with pytest.raises(UnknownTopicOrPartition, match="has no partition 2; it has 2, from 0"):
            admin.alter_group_offsets("g", {TopicPartition("a", 2): 0})
        with pytest.raises(UnknownTopicOrPartition):
            admin.alter_group_offsets("g", {TopicPartition("b", 0): 0})
        with pytest.raises(InvalidRequestError, match="a-0 has no offset -1"):
            admin.alter_group_offsets("g", {A0: -1})
        assert cluster.groups.calls == []

    def test_refusals_that_may_pass_are_retried(self, cluster: FakeCluster, admin: Admin) -> None:
        cluster.groups.refuse += [CoordinatorLoadInProgress("wait"), NotCoordinator("not me")]
        admin.alter_group_offsets("g", {A0: 4})
        assert admin.group_offsets("g")[A0].offset == 4
        cluster.groups.refuse.append(OffsetMetadataTooLarge("too long"))
        with pytest.raises(OffsetMetadataTooLarge):
            admin.alter_group_offsets("g", {A0: OffsetAndMetadata(4, "x" * 5000)})

    def test_a_lost_answer_is_asked_for_again(self, cluster: FakeCluster, admin: Admin) -> None:
        cluster.groups.mislaid_answers = 1
        admin.alter_group_offsets("g", {A0: 4})
        assert admin.group_offsets("g")[A0].offset == 4


class TestDelete:
    def test_all_are_tried_and_the_first_refusal_is_raised(self, cluster: FakeCluster, admin: Admin) -> None:
        cluster.groups.add("a", 1)
        cluster.groups.add("busy", 2, members=[member("m", {"a": [0]})])
        cluster.groups.add("z", 3)
        with pytest.raises(NonEmptyGroup, match="'busy' has members; 1 of 3 was refused"):
            admin.delete_groups(["a", "busy", "z"])
        assert list(cluster.groups.groups) == ["busy"]
        with pytest.raises(GroupIdNotFound):
            admin.delete_groups(["a"])

    def test_a_group_that_the_first_attempt_deleted_is_no_error(self, cluster: FakeCluster, admin: Admin) -> None:
        cluster.groups.add("g", 2)
        cluster.groups.mislaid_answers = 1
        admin.delete_groups(["g"])
        assert cluster.groups.groups == {}


class TestOneName:
    """A string, or a partition, where several may be named is one, and not its letters or its fields."""

    def test_groups(self, cluster: FakeCluster, admin: Admin) -> None:
        for group_id in ("x", "y", "xy"):
            cluster.groups.add(group_id, 1)
        assert list(admin.describe_groups("xy")) == ["xy"]
        admin.delete_groups("xy")
        assert list(cluster.groups.groups) == ["x", "y"]
        assert [group.group_id for group in admin.list_groups("empty")] == ["x", "y"]

    def test_topics(self, cluster: FakeCluster, admin: Admin) -> None:
        cluster.create_topic("ab", 1)
        assert [topic.name for topic in admin.describe_topics("ab")] == ["ab"]

    def test_offsets(self, cluster: FakeCluster, admin: Admin) -> None:
        group = cluster.groups.add("g", 1, {A0: 1, A1: 2})
        admin.delete_group_offsets("g", A0)  # type: ignore[arg-type] # a tuple of two is easily taken for a list
        assert list(group.offsets) == [A1]

    def test_the_asynchronous_client(self, cluster: FakeCluster) -> None:
        for group_id in ("x", "y", "xy"):
            cluster.groups.add(group_id, 1)

        async def work() -> None:
            async with aio.Admin(cluster.bootstrap) as admin:
                await admin.delete_groups("xy")

        asyncio.run(work())
        assert list(cluster.groups.groups) == ["x", "y"]


class TestLag:
    def test_in_records_and_in_seconds(self, cluster: FakeCluster, admin: Admin) -> None:
        now_ms = int(time.time() * 1000)
        fill(cluster, 0, now_ms - 90_000, now_ms - 60_000, now_ms - 30_000)
        fill(cluster, 1, now_ms)
        cluster.groups.add("g", 2, {A0: 1, A1: 1}, [member("m", {"a": [0]})])
        found = admin.group_lag("g")
        assert list(found) == [A0, A1]
        assert (found[A0].offset, found[A0].log_end_offset, found[A0].lag, found[A0].member_id) == (1, 3, 2, "m")
        age = found[A0].lag_seconds
        assert age is not None
        assert 59 < age < 61 + time.time() - now_ms / 1000
        assert (found[A1].lag, found[A1].lag_seconds, found[A1].member_id) == (0, 0.0, "")

    @pytest.mark.parametrize("tells_committed", [True, False], ids=["now", "an older broker"])
    def test_of_many_groups(self, cluster: FakeCluster, admin: Admin, tells_committed: bool) -> None:
        cluster.groups.tells_committed = tells_committed
        fill(cluster, 0, *range(1_000, 11_000, 1_000))
        for number in range(5):
            cluster.groups.add(f"g{number}", 1 + number % 2, {A0: 2 * number})
        missing: dict[str, RaftlogError] = {}
        found = admin.group_lags(["g3", "g0", "g1", "none", "g4", "g0"], missing=missing)
        assert {group: lags[A0].lag for group, lags in found.items()} == {"g3": 4, "g0": 10, "g1": 8, "g4": 2}
        ages = {group: lags[A0].lag_seconds for group, lags in found.items()}
        assert sorted(ages, key=lambda group: ages[group] or 0) == ["g4", "g3", "g1", "g0"]
        assert list(missing) == ["none"]
        assert isinstance(missing["none"], GroupIdNotFound)
        asked = {method for _, method in cluster.groups.calls}
        assert asked == ({"DescribeGroups"} if tells_committed else {"DescribeGroups", "FetchOffsets"})
        with pytest.raises(GroupIdNotFound):
            admin.group_lags(["g0", "none"])
        assert admin.group_lags([]) == {}

    def test_the_timeout_counts_once_for_groups_that_are_asked_one_by_one(
        self, cluster: FakeCluster, admin: Admin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cluster.groups.tells_committed = False
        names = [f"g{number}" for number in range(12)]
        for name in names:
            cluster.groups.add(name, 1, {A0: 0})
        running = most = 0

        async def silence(_: Any, group_id: str, timeout: float) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(timeout)
            running -= 1
            raise RequestTimedOut(group_id)

        monkeypatch.setattr(engine.AdminEngine, "_committed", silence)
        missing: dict[str, RaftlogError] = {}
        started = time.monotonic()
        assert admin.group_lags(names, missing=missing, timeout=1) == {}
        assert time.monotonic() - started < 6, (
            "the groups must be asked at the same time: one after the other they take 12 s"
        )
        assert {type(error) for error in missing.values()} == {RequestTimedOut}
        assert sorted(missing) == sorted(names)
        assert most == 8
        with pytest.raises(RequestTimedOut):
            admin.group_lags(names, timeout=0.2)

    def test_what_retention_took_is_no_backlog(self, cluster: FakeCluster, admin: Admin) -> None:
        fill(cluster, 0, 1_000, 2_000, int(time.time() * 1000) - 5_000)
        cluster.groups.add("g", 2, {A0: 0})
        admin.delete_records({A0: 2})
        found = admin.group_lag("g")[A0]
        assert (found.offset, found.log_start_offset, found.log_end_offset, found.lag) == (0, 2, 3, 1)
        assert found.lag_seconds is not None
        assert 4 < found.lag_seconds < 20

    def test_a_partition_without_a_commit_is_shown_with_its_reader(self, cluster: FakeCluster, admin: Admin) -> None:
        fill(cluster, 1, 1_000)
        cluster.groups.add("g", 2, {}, [member("m", {"a": [1]})])
        found = admin.group_lag("g")[A1]
        assert (found.offset, found.log_end_offset, found.lag, found.lag_seconds) == (None, 1, None, None)
        assert (found.member_id, found.error) == ("m", None)

    def test_what_is_not_known_is_said(
        self, cluster: FakeCluster, admin: Admin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(engine, "_LOOK_UP_PATIENCE_S", 120.0)
        fill(cluster, 1, 1_000)
        gone = TopicPartition("gone", 0)
        cluster.groups.add("g", 2, {gone: 4, A0: 1, A1: 1})
        cluster.move_leader("a", 0, -1)
        started = time.monotonic()
        found = admin.group_lag("g")
        assert time.monotonic() - started < 40
        assert (found[gone].offset, found[gone].lag, found[gone].error) == (4, None, "gone-0 does not exist")
        assert (found[A0].lag, found[A0].error) == (None, "a-0 has no leader at the moment")
        assert (found[A1].lag, found[A1].error) == (0, None)

    def test_of_an_offset_above_the_end_nobody_knows_the_lag(self, cluster: FakeCluster, admin: Admin) -> None:
        fill(cluster, 0, 1_000)
        cluster.groups.add("g", 2, {A0: 50})
        found = admin.group_lag("g")[A0]
        assert (found.offset, found.log_end_offset, found.lag, found.lag_seconds) == (50, 1, None, None)
        assert found.error is not None
        assert found.error.startswith("a-0: the committed offset 50 is beyond the log end 1: ")


def test_offsets_of_partitions_by_name_and_by_time(cluster: FakeCluster, admin: Admin) -> None:
    fill(cluster, 0, 1_000, 2_000, 3_000)
    admin.delete_records({A0: 1})
    for which, offset in (("earliest", 1), ("latest", 3), (1_500, 1), (2_500, 2)):
        found = admin.list_offsets({A0: which})[A0]
        assert found is not None
        assert found.offset == offset
    assert admin.list_offsets({A0: 3_001, A1: 5}) == {A0: None, A1: None}
    with pytest.raises(InvalidRequestError, match="'newest': name a time in ms, or one of earliest, latest"):
        admin.list_offsets({A0: "newest"})
    with pytest.raises(InvalidRequestError, match="-5: name a time"):
        admin.list_offsets({A0: -5})
    with pytest.raises(UnknownTopicOrPartition):
        admin.list_offsets({TopicPartition("a", 9): "latest"})


async def test_the_asynchronous_client_does_the_same(cluster: FakeCluster) -> None:
    async with aio.Admin(cluster.bootstrap) as admin:
        await admin.alter_group_offsets("g", {A0: 1})
        assert [group.group_id for group in await admin.list_groups()] == ["g"]
        assert (await admin.describe_group("g")).state == "empty"
        assert (await admin.group_lag("g"))[A0].offset == 1
        assert (await admin.list_offsets({A0: "latest"}))[A0] is not None
        await admin.delete_group_offsets("g", [A0])
        assert await admin.group_offsets("g") == {}
        await admin.delete_groups(["g"])
        assert await admin.list_groups() == []


def test_calls_share_metadata_of_the_age_that_they_allow(cluster: FakeCluster) -> None:
    def asked(call: Callable[[], object]) -> int:
        before = len(cluster.metadata_asked)
        call()
        return len(cluster.metadata_asked) - before

    with Admin(cluster.bootstrap, metadata_max_age_ms=600_000) as admin:
        assert asked(admin.list_topics) == 1
        for call in (
            admin.list_groups,
            lambda: admin.describe_topics(["a"]),
            lambda: admin.describe_topic("a"),
            admin.list_topics,
            lambda: admin.group_lags(["g"], missing={}),
        ):
            assert asked(call) == 0
        cluster.create_topic("younger")
        assert asked(lambda: admin.describe_topic("younger")) == 1, (
            "a topic that is not known must be asked for, as it may be younger than the metadata"
        )
        assert asked(admin.list_topics) == 0
    with Admin(cluster.bootstrap) as admin:
        assert [asked(admin.list_topics) for _ in range(2)] == [1, 1], "without metadata.max.age.ms each call must ask"


def test_only_what_a_call_is_about_is_asked_for(cluster: FakeCluster) -> None:
    """Metadata of all that a client has ever seen would make the thousandth topic a hundred times as costly."""
    for name in ("b", "c", "d"):
        cluster.create_topic(name)
    with Admin(cluster.bootstrap) as admin:
        for name in ("a", "b", "c"):
            admin.describe_topic(name)
        admin.describe_topics(["c", "d"])
        assert cluster.topics_asked == [["a"], ["b"], ["c"], ["c", "d"]]
        admin.list_groups()
        assert cluster.topics_asked[-1] == ["__consumer_offsets"]
        cluster.topics_asked.clear()
        with Producer(cluster.bootstrap) as producer:
            for name in ("a", "b", "c"):
                producer.send(name, b"").result(30)
        assert cluster.topics_asked == [["a"], ["b"], ["c"]]


async def test_calls_that_wait_for_a_request_share_the_next_one(cluster: FakeCluster) -> None:
    names = [f"t{number}" for number in range(40)]
    for name in names:
        cluster.create_topic(name)
    async with aio.Admin(cluster.bootstrap) as admin:
        await asyncio.gather(*(admin.describe_topic(name) for name in names))
    assert len(cluster.topics_asked) <= 3
    assert sorted({name for asked in cluster.topics_asked for name in asked}) == sorted(names)


def test_a_topic_that_does_not_exist_is_asked_for_once_by_a_console(cluster: FakeCluster) -> None:
    view = View(cluster.bootstrap, {})
    assert isinstance(view.topic("missing").error, UnknownTopicOrPartition)
    view.close()
    assert len(cluster.metadata_asked) == 1


def test_an_error_ends_the_use_of_known_metadata(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with Admin(cluster.bootstrap, metadata_max_age_ms=600_000) as admin:
        admin.describe_topics(["a"])
        with pytest.raises(UnknownTopicOrPartition):
            admin.describe_topics(["missing"])
        before = len(cluster.metadata_asked)
        admin.list_topics()
        assert len(cluster.metadata_asked) == before + 1


@pytest.fixture
def server() -> Iterator[AdminServer]:
    """Three brokers; topic `a` has partition 0 led by broker 1, which knows of it, and partition 1 led by broker 2."""
    with AdminServer(3) as server:
        command = create_topic("a", 1, 2, 2)
        for replicas in ([1, 2], [2, 3]):
            command.create_topic.assignments.add(replicas=replicas)
        server.propose(command)
        views = [ReplicaView(1, 10, 0, 5_000, True), ReplicaView(2, 7, 3, 4_000, True)]
        server.cluster.partitions = [
            Led(LogName(uuid_of(1), 0), Description(0, 1, 7, 10, views)),
            Led(LogName(uuid_of(99), 0), Description(0, 0, 0, 0, views)),
        ]
        yield server


@pytest.fixture
def silent_leader() -> Iterator[int]:
    """The port of a server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def move_broker(server: AdminServer, broker_id: int, port: int) -> None:
    """Let a broker be somewhere else."""
    server.propose(register(broker_id, incarnation=broker_id, port=port))


def test_replicas_are_described_as_their_leader_sees_them(server: AdminServer) -> None:
    with Admin(server.bootstrap, retry_backoff_ms=5, retry_backoff_max_ms=5) as admin:
        found = admin.describe_replicas()
        assert list(found) == [TopicPartition("a", 0)], "the replica of a topic with another id must be left out"
        part = found[TopicPartition("a", 0)]
        assert (part.leader, part.log_start_offset, part.high_watermark, part.log_end_offset) == (1, 1, 7, 10)
        assert part.replicas[1] == (2, 7, 3, 1_000, True)
        assert admin.describe_replicas(["a"]) == found
        assert admin.describe_replicas([]) == {}
        with pytest.raises(UnknownTopicOrPartition):
            admin.describe_replicas(["zzz"])


def test_a_leader_that_says_nothing_does_not_keep_the_answers_of_others_back(
    server: AdminServer, silent_leader: int
) -> None:
    move_broker(server, 2, silent_leader)

    def attempt() -> float:
        with Admin(server.bootstrap) as admin:  # a new one, which does not know the silent broker
            started = time.monotonic()
            found = list(admin.describe_replicas(timeout=1.0))
            return time.monotonic() - started if found == [TopicPartition("a", 0)] else math.inf

    assert quickest_s(attempt, 1.1) < 1.1


def test_when_no_leader_answers_it_is_said(server: AdminServer, silent_leader: int) -> None:
    move_broker(server, 1, silent_leader)
    move_broker(server, 2, silent_leader)
    with Admin(server.bootstrap) as admin, pytest.raises(RetriableError):
        admin.describe_replicas(timeout=0.6)


def test_moves_begin_are_listed_and_cancelled(server: AdminServer) -> None:
    part = TopicPartition("a", 1)
    with Admin(server.bootstrap) as admin:
        admin.alter_reassignments({part: [3, 1]})
        assert admin.list_reassignments() == {part: ([3, 1], [1], [2])}
        described = admin.describe_topic("a").partitions[1]
        assert (described.replicas, described.adding_replicas, described.removing_replicas) == ([3, 1, 2], [1], [2])
        admin.alter_reassignments({part: None})
        assert admin.list_reassignments() == {}
        with pytest.raises(NoReassignmentInProgress):
            admin.alter_reassignments({part: None})
        with pytest.raises(ValueError, match="None cancels"):
            admin.alter_reassignments({part: []})


def test_what_is_refused_is_raised_once_all_were_tried(server: AdminServer) -> None:
    command = create_topic("many", 2, 600, 1)
    server.propose(command)
    wanted: dict[TopicPartition, list[int] | None] = {TopicPartition("many", 0): [9], TopicPartition("many", 1): [8]}
    for partition in range(2, 600):
        wanted[TopicPartition("many", partition)] = [1, 2, 3]
    with Admin(server.bootstrap) as admin:
        with pytest.raises(InvalidReplicaAssignment, match=r"many-0: broker 9 .*; 2 of 600 were refused"):
            admin.alter_reassignments(wanted)
        assert len(admin.list_reassignments()) == 598


def test_offline_and_eligible_replicas_are_told(server: AdminServer) -> None:
    server.propose(fence(2, broker_epoch(server.image, 2)))

    async def scenario() -> None:
        async with aio.Admin(server.bootstrap) as admin:
            [topic] = await admin.describe_topics(["a"])
            assert [part.offline_replicas for part in topic.partitions] == [[2], [2]]
            assert topic.partitions[0].eligible_leader_replicas == []
            assert await admin.describe_topics() == [topic]

    asyncio.run(scenario())


def test_replicas_can_be_placed_by_hand(server: AdminServer) -> None:
    with Admin(server.bootstrap) as admin:
        created = admin.create_topic("placed", replica_assignment=[[3, 1], [1, 2]])
        assert created is not None
        assert [part.replicas for part in created.partitions] == [[3, 1], [1, 2]]
        with pytest.raises(InvalidReplicaAssignment):
            admin.create_topic("not", replica_assignment=[[3, 1], [1]])


def test_a_client_that_allows_old_metadata_sees_its_own_changes(server: AdminServer) -> None:
    with Admin(server.bootstrap, metadata_max_age_ms=600_000) as admin:
        assert admin.list_topics() == ["a"]
        admin.create_topic("b")
        assert admin.list_topics() == ["a", "b"]


A0, A1, A2 = (TopicPartition("a", number) for number in range(3))


@pytest.fixture
def tool_cluster() -> Iterator[ToolCluster]:
    """Partition i of topic `a` is led by broker i + 1."""
    with ToolCluster(nodes=3) as tool_cluster:
        tool_cluster.create_topic("a", 3)
        yield tool_cluster


@pytest.fixture
def tool_admin(tool_cluster: ToolCluster) -> Iterator[Admin]:
    with Admin(tool_cluster.bootstrap, default_api_timeout_ms=60_000, retry_backoff_ms=5) as tool_admin:
        yield tool_admin


@pytest.fixture
def hasty_admin(tool_cluster: ToolCluster) -> Iterator[Admin]:
    """A client whose calls have no time for a second attempt: they raise the first attempt's error."""
    with Admin(tool_cluster.bootstrap, default_api_timeout_ms=30_000, retry_backoff_ms=120_000) as tool_admin:
        yield tool_admin


class TestListOfTransactions:
    def test_every_broker_is_asked_for_its_own(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        tools = tool_cluster.tools
        tools.transaction("c", (1, 0), coordinator=1, open_for_s=3_000)
        tools.transaction("b", (2, 4), transaction_pb2.COMPLETE_COMMIT, coordinator=2)
        tools.transaction("a", (3, 1), transaction_pb2.PREPARE_ABORT, coordinator=3, open_for_s=5)
        tools.transaction("d", (4, 0), transaction_pb2.TRANSACTION_EMPTY, coordinator=3)
        tools.sink("s", 4, "orders", coordinator=2)
        tools.stage("s", 9, 5, {"a": [1]})
        found = [
            (each.transactional_id, each.sink_id, each.producer_id, each.state, each.coordinator_id)
            for each in tool_admin.list_transactions()
        ]
        assert found == [
            ("a", "", 3, "prepare_abort", 3),
            ("b", "", 2, "complete_commit", 2),
            ("c", "", 1, "ongoing", 1),
            ("d", "", 4, "empty", 3),
            ("", "s", 9, "ongoing", 2),
        ]
        assert [each.transactional_id for each in tool_admin.list_transactions(["Empty", "prepare_abort"])] == [
            "a",
            "d",
        ]
        assert [each.producer_id for each in tool_admin.list_transactions(producer_ids=[2, 9, 77])] == [2, 9]
        assert tool_admin.list_transactions(producer_ids=[]) == []
        assert [each.producer_id for each in tool_admin.list_transactions(running_longer_than_ms=1_000_000)] == [1]
        (sink,) = tool_admin.list_sinks()
        assert (sink.sink_id, sink.target, sink.last_batch_id, sink.open_stages, sink.coordinator_id) == (
            "s",
            "orders",
            4,
            1,
            2,
        )

    def test_many_producers_are_asked_for_some_at_a_time(
        self, tool_cluster: ToolCluster, tool_admin: Admin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A coordinator refuses a request that names too many."""
        monkeypatch.setattr(engine, "_NAMES_AT_A_TIME", 2)
        for number in range(5):
            tool_cluster.tools.transaction(f"id-{number}", (number, 0))
        tool_cluster.tools.loading[2] = CoordinatorLoadInProgress("__transaction_state-3 is being loaded")
        missing: list[RaftlogError] = []
        found = tool_admin.list_transactions(producer_ids=range(4), missing=missing)
        assert [each.producer_id for each in found] == [0, 1, 2, 3]
        assert list(map(str, missing)) == ["__transaction_state-3 is being loaded"]
        assert tool_cluster.tools.calls.count((1, "ListTransactions")) == 2

    def test_a_state_that_is_none(self, tool_admin: Admin) -> None:
        with pytest.raises(InvalidRequestError, match="there are empty, ongoing, prepare_commit"):
            tool_admin.list_transactions(["done"])

    def test_a_list_with_holes_is_an_error_unless_that_is_asked_for(
        self, tool_cluster: ToolCluster, tool_admin: Admin, hasty_admin: Admin
    ) -> None:
        tool_cluster.tools.transaction("a", (1, 0))
        tool_cluster.tools.loading[2] = CoordinatorLoadInProgress("__transaction_state-3 is being loaded")
        with pytest.raises(CoordinatorLoadInProgress):
            hasty_admin.list_transactions()
        with pytest.raises(CoordinatorLoadInProgress):
            hasty_admin.list_sinks()
        missing: list[RaftlogError] = []
        assert [each.transactional_id for each in tool_admin.list_transactions(missing=missing)] == ["a"]
        assert list(map(str, missing)) == ["__transaction_state-3 is being loaded"]

    def test_a_coordinator_without_a_leader_is_missed(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        tool_cluster.create_topic("__transaction_state", 3)
        tool_cluster.call(lambda: setattr(tool_cluster.topics["__transaction_state"].partitions[1], "leader", -1))
        missing: list[RaftlogError] = []
        assert tool_admin.list_transactions(missing=missing) == []
        assert list(map(str, missing)) == ["__transaction_state has partitions without a leader: 1"]


class TestOne:
    def test_described_by_its_coordinator(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        tool_cluster.tools.transaction(
            "billing",
            (7, 3),
            transaction_pb2.PREPARE_COMMIT,
            {"a": [2, 0]},
            pending={"a": [2]},
            coordinator=2,
            group_ids=["g"],
        )
        found = tool_admin.describe_transaction("billing")
        assert (found.state, found.producer_id, found.producer_epoch) == ("prepare_commit", 7, 3)
        assert (found.partitions, found.pending, found.group_ids) == ([A0, A2], [A2], ["g"])
        assert (found.coordinator_id, found.state_partition, found.timeout_ms) == (2, 7, 60_000)
        tool_cluster.call(lambda: tool_cluster.tools.coordinator.update(billing=3))
        assert tool_admin.describe_transaction("billing").state == "prepare_commit", (
            "the transaction must be found at its new coordinator"
        )
        with pytest.raises(TransactionalIdNotFound):
            tool_admin.describe_transactions(["billing", "nobody"])

    def test_a_transaction_is_aborted_once(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        tool_cluster.tools.transaction("billing", (7, 3), coordinator=2)
        tool_cluster.tools.refuse = [NotCoordinator("not I")]
        tool_admin.abort_transaction("billing")
        assert tool_admin.describe_transaction("billing").state == "complete_abort"
        with pytest.raises(InvalidTxnState):
            tool_admin.abort_transaction("billing")
        with pytest.raises(TransactionalIdNotFound):
            tool_admin.abort_transaction("nobody")

    def test_a_sink_is_described_with_its_open_stages(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        tool_cluster.tools.sink("s", 4, "orders", coordinator=3)
        tool_cluster.tools.stage("s", 9, 5, {"a": [1, 0]})
        found = tool_admin.describe_sink("s")
        assert (found.sink_id, found.target, found.last_batch_id) == ("s", "orders", 4)
        (stage,) = found.stages
        assert (stage.producer_id, stage.batch_id, stage.state, stage.attempt) == (9, 5, "ongoing", "task 9")
        assert stage.partitions == [A0, A1]
        with pytest.raises(TransactionalIdNotFound, match="there is no sink 'other'"):
            tool_admin.describe_sink("other")


class TestStages:
    """The open stages that a dead driver has left; readers wait behind them."""

    def sink(self, tool_cluster: ToolCluster) -> None:
        tool_cluster.tools.sink("s", 4, "orders", coordinator=3)
        tool_cluster.tools.stage("s", 9, 5, {"a": [1, 0]})
        tool_cluster.tools.stage("s", 10, 5, {"a": [2]})
        tool_cluster.tools.stage("s", 11, 6, {"a": [2]})
        tool_cluster.tools.stage("s", 12, 4, {"a": [2]}, transaction_pb2.PREPARE_COMMIT)

    def states(self, tool_admin: Admin) -> dict[int, str]:
        return {stage.producer_id: stage.state for stage in tool_admin.describe_sink("s").stages}

    def test_the_stages_of_one_batch_are_aborted(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        self.sink(tool_cluster)
        tool_cluster.tools.mislaid_answers = 1
        ended = tool_admin.abort_stages("s", 5)
        assert [(stage.producer_id, stage.batch_id, stage.attempt) for stage in ended] == [
            (9, 5, "task 9"),
            (10, 5, "task 10"),
        ]
        assert ended[0].partitions == [A0, A1]
        assert self.states(tool_admin) == {9: "prepare_abort", 10: "prepare_abort", 11: "ongoing", 12: "prepare_commit"}
        assert tool_admin.abort_stages("s", 5) == []
        assert tool_admin.abort_stages("s", 4) == [], "a stage that is decided must not be aborted"

    def test_without_a_batch_all_open_stages_are_aborted(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        self.sink(tool_cluster)
        assert [stage.producer_id for stage in tool_admin.abort_stages("s")] == [9, 10, 11]
        assert self.states(tool_admin)[12] == "prepare_commit"
        tool_cluster.call(lambda: tool_cluster.tools.calls.clear())
        assert tool_admin.abort_stages("s") == []
        assert tool_cluster.tools.calls == [(3, "LastBatch")], (
            "without an open stage only the last batch must be asked for"
        )

    def test_an_unknown_sink_has_no_stages_to_abort(self, tool_admin: Admin) -> None:
        with pytest.raises(TransactionalIdNotFound, match="there is no sink 'other'"):
            tool_admin.abort_stages("other")

    def test_a_sink_that_is_taken_for_a_transactional_id(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        tool_cluster.tools.sink("s/1 x", 4, "orders", coordinator=3)
        with pytest.raises(TransactionalIdNotFound, match=r"sink of staged batches.*raftlog txn abort-stages 's/1 x'"):
            tool_admin.abort_transaction("s/1 x")

    def test_one_that_is_taken_for_hanging(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        self.sink(tool_cluster)
        tool_cluster.tools.writes(A0, (9, 0), start_offset=10, open_for_s=1_000)
        with pytest.raises(InvalidTxnState, match=r"is not hanging.*raftlog txn abort-stages s --batch 5"):
            tool_admin.abort_hanging("a", 0, 10)
        tool_cluster.tools.transaction("billing 7", (7, 3), partitions={"a": [1]}, coordinator=2)
        tool_cluster.tools.writes(A1, (7, 3), start_offset=20, open_for_s=1_000)
        with pytest.raises(InvalidTxnState, match=r"is not hanging.*raftlog txn abort 'billing 7'"):
            tool_admin.abort_hanging("a", 1, 20)


class TestProducers:
    def test_leaders_are_asked(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        tool_cluster.tools.writes(A1, (7, 3), start_offset=100, open_for_s=10)
        tool_cluster.tools.writes(A1, (5, 0))
        tool_cluster.tools.refuse = [NotLeader("not any more")]
        found = tool_admin.describe_producers("a")
        assert list(found) == [A0, A1, A2]
        assert (found[A1].last_stable_offset, found[A1].high_watermark) == (100, 120)
        first, second = found[A1].producers
        assert (first.producer_id, first.transaction_start_offset, first.transaction_started_ms) == (5, None, None)
        assert (second.producer_id, second.producer_epoch, second.transaction_start_offset) == (7, 3, 100)
        assert list(tool_admin.describe_producers("a", 1)) == [A1]

    def test_what_is_not_there(self, tool_admin: Admin) -> None:
        with pytest.raises(UnknownTopicOrPartition, match="it has 3, from 0"):
            tool_admin.describe_producers("a", 3)
        with pytest.raises(UnknownTopicOrPartition):
            tool_admin.describe_producers("b")

    def test_a_leader_that_is_not_there(self, tool_cluster: ToolCluster, hasty_admin: Admin) -> None:
        tool_cluster.call(lambda: setattr(tool_cluster.topics["a"].partitions[1], "leader", -1))
        with pytest.raises(LeaderNotAvailable, match="a-1 has no leader"):
            hasty_admin.describe_producers("a")
        missing: list[RaftlogError] = []
        assert hasty_admin.find_hanging_transactions(missing=missing) == []
        assert list(map(str, missing)) == ["a-1 has no leader at the moment"]


class TestHanging:
    def hanging(self, tool_admin: Admin) -> list[tuple[int, int, int]]:
        return [
            (each.partition, each.producer_id, each.start_offset) for each in tool_admin.find_hanging_transactions()
        ]

    def test_what_no_coordinator_knows_for_too_long(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        tool_cluster.tools.writes(A0, (1, 0), start_offset=10, open_for_s=1_000)
        tool_cluster.tools.writes(A1, (2, 0), start_offset=20, open_for_s=800)
        tool_cluster.tools.writes(A2, (3, 0))
        assert self.hanging(tool_admin) == [(0, 1, 10)]
        found = tool_admin.find_hanging_transactions(["a"], max_transaction_timeout_ms=60_000)
        assert [each.producer_id for each in found] == [1, 2]
        with pytest.raises(UnknownTopicOrPartition):
            tool_admin.find_hanging_transactions(["a", "b"])

    def test_what_a_coordinator_knows_there_does_not_hang(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        tools = tool_cluster.tools
        for producer_id, part in ((1, A0), (2, A1), (3, A2), (4, A0), (5, A0)):
            tools.writes(part, (producer_id, 0), start_offset=producer_id * 10, open_for_s=1_000)
        tools.transaction("open", (1, 0), partitions={"a": [0, 1]}, coordinator=2)
        tools.transaction("told", (2, 1), transaction_pb2.PREPARE_COMMIT, {"a": [1]}, coordinator=3)
        tools.transaction("elsewhere", (3, 0), partitions={"a": [0]}, coordinator=1)
        tools.transaction("ended", (4, 1), transaction_pb2.COMPLETE_ABORT, {"a": [0]}, coordinator=1)
        tools.sink("s", 4, "a", coordinator=2)
        tools.stage("s", 5, 5, {"a": [0]})
        assert self.hanging(tool_admin) == [(0, 4, 40), (2, 3, 30)]

    @pytest.mark.parametrize("state", [transaction_pb2.PREPARE_COMMIT, transaction_pb2.PREPARE_ABORT])
    def test_what_is_decided_does_not_hang_while_its_marker_is_on_its_way(
        self, tool_cluster: ToolCluster, tool_admin: Admin, state: transaction_pb2.TransactionState.ValueType
    ) -> None:
        """Its abort would take a part out of what is committed. A stage is known wherever it is open."""
        tools = tool_cluster.tools
        tools.writes(A0, (5, 0), start_offset=50, open_for_s=1_000)
        tools.writes(A1, (6, 0), start_offset=60, open_for_s=1_000)
        tools.sink("s", 4, "a", coordinator=2)
        tools.stage("s", 5, 4, {}, state)
        tools.transaction("told", (6, 1), state, {"a": [1]}, coordinator=3)
        assert self.hanging(tool_admin) == []
        for partition, start_offset in ((0, 50), (1, 60)):
            with pytest.raises(InvalidTxnState, match="is not hanging: its coordinator knows it"):
                tool_admin.abort_hanging("a", partition, start_offset)
        assert tools.producers[A0].producers[0].transaction_start_offset == 50

    def test_coordinators_all_have_to_say(
        self, tool_cluster: ToolCluster, tool_admin: Admin, hasty_admin: Admin
    ) -> None:
        tool_cluster.tools.writes(A0, (1, 0), start_offset=10, open_for_s=1_000)
        tool_cluster.tools.loading[2] = CoordinatorLoadInProgress("__transaction_state-3 is being loaded")
        with pytest.raises(CoordinatorLoadInProgress):
            hasty_admin.find_hanging_transactions(missing=[])
        with pytest.raises(CoordinatorLoadInProgress):
            hasty_admin.abort_hanging("a", 0, 10)
        assert tool_admin.abort_hanging("a", 0, 10, force=True).producer_id == 1

    def test_what_ends_meanwhile_does_not_hang(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        """It is not open at the coordinator when that is asked, nor on the partition when that is asked again."""
        tool_cluster.tools.writes(A0, (1, 0), start_offset=10, open_for_s=1_000)
        engine = tool_admin._engine
        original = engine._coordinated

        async def ended_by_now(producer_ids: object, timeout: float | None) -> object:
            tool_cluster.tools.producers[A0].producers[0].transaction_start_offset = -1
            return await original(producer_ids, timeout)  # type: ignore[arg-type] # passed on

        engine._coordinated = ended_by_now  # type: ignore[method-assign,assignment] # of this one
        assert self.hanging(tool_admin) == []

    def test_aborted_where_it_hangs(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        tool_cluster.tools.writes(A1, (1, 4), start_offset=10, open_for_s=5)
        tool_cluster.tools.writes(A1, (2, 0), start_offset=15, open_for_s=5)
        tool_cluster.tools.transaction("known", (2, 0), partitions={"a": [1]}, coordinator=3)
        tool_cluster.tools.mislaid_answers = 1
        ended = tool_admin.abort_hanging("a", 1, 10)
        assert (ended.producer_id, ended.producer_epoch, ended.start_offset) == (1, 4, 10)
        assert [each.transaction_start_offset for each in tool_admin.describe_producers("a", 1)[A1].producers] == [
            None,
            15,
        ]
        with pytest.raises(InvalidTxnState, match="begins at offset 10; those that are open begin at 15"):
            tool_admin.abort_hanging("a", 1, 10)
        with pytest.raises(InvalidTxnState, match="is not hanging: its coordinator knows it"):
            tool_admin.abort_hanging("a", 1, 15)
        with pytest.raises(InvalidTxnState, match="none is open there"):
            tool_admin.abort_hanging("a", 0, 15)
        tool_cluster.tools.refuse = [InvalidTxnState("something else begins there")]
        with pytest.raises(InvalidTxnState, match="something else"):
            tool_admin.abort_hanging("a", 1, 15, force=True)

    def test_ended_by_somebody_else_before_the_retry(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        """The first attempt is refused, so it has not done it; what the coordinator has done then is told as it is."""
        tool_cluster.tools.writes(A1, (1, 4), start_offset=10, open_for_s=5)
        real = tool_admin._engine.ask_transactions
        refusals: list[RaftlogError] = [NotEnoughReplicas("1 of 2"), InvalidTxnState("none is open")]

        async def ask(address: str, method: str, request: Any, deadline: float) -> Any:
            if method == "AbortHanging":
                return transaction_pb2.AbortHangingResponse(error=to_wire(refusals.pop(0)))
            return await real(address, method, request, deadline)

        tool_admin._engine.ask_transactions = ask  # type: ignore[method-assign] # of this one
        with pytest.raises(InvalidTxnState, match="none is open"):
            tool_admin.abort_hanging("a", 1, 10)
        assert not refusals

    def test_who_has_ended_it_is_not_known(self, tool_cluster: ToolCluster, tool_admin: Admin) -> None:
        """The answer is lost, and with --force no coordinator was asked whether it could end the transaction."""
        tool_cluster.tools.writes(A1, (1, 4), start_offset=10, open_for_s=5)
        tool_cluster.tools.mislaid_answers = 1
        with pytest.raises(InvalidTxnState, match="is over, but it is not known what has ended it"):
            tool_admin.abort_hanging("a", 1, 10, force=True)


def test_the_same_awaitable(tool_cluster: ToolCluster) -> None:
    tool_cluster.tools.transaction("billing", (7, 3), partitions={"a": [0]}, coordinator=2)
    tool_cluster.tools.sink("s", 4, "orders", coordinator=3)
    tool_cluster.tools.writes(A0, (1, 0), start_offset=10, open_for_s=1_000)

    async def ask() -> None:
        async with aio.Admin(tool_cluster.bootstrap, default_api_timeout_ms=60_000) as tool_admin:
            assert [each.transactional_id for each in await tool_admin.list_transactions()] == ["billing"]
            assert (await tool_admin.describe_transaction("billing")).partitions == [A0]
            assert list(await tool_admin.describe_transactions(["billing"])) == ["billing"]
            await tool_admin.abort_transaction("billing")
            assert [each.sink_id for each in await tool_admin.list_sinks()] == ["s"]
            assert (await tool_admin.describe_sink("s")).last_batch_id == 4
            assert await tool_admin.abort_stages("s", 5) == []
            assert list(await tool_admin.describe_producers("a")) == [A0, A1, A2]
            assert len(await tool_admin.find_hanging_transactions()) == 1
            assert (await tool_admin.abort_hanging("a", 0, 10)).producer_id == 1

    asyncio.run(ask())
