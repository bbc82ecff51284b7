"""The admin client on groups: whom it asks, what it makes of the answers, and what it says when some are missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from raftlog import Admin, TopicPartition, aio
from raftlog._client import admin_lag
from raftlog.errors import (
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    GroupIdNotFound,
    GroupSubscribedToTopic,
    InvalidGroupId,
    InvalidRequestError,
    NonEmptyGroup,
    NotCoordinator,
    OffsetMetadataTooLarge,
    RaftlogError,
    UnknownTopicOrPartition,
)
from raftlog.types import OffsetAndMetadata
from raftlog.v1 import group_pb2
from tests.support.batches import batch_of
from tests.support.fake_broker import FakeCluster
from tests.support.fake_groups import member

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
    """A client whose calls have no time for a second try: they raise what the first one was answered."""
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
        assert found._replace(members=[]) == ("g", "stable", 3, 3, "sticky", 2, 7, 0, [])
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
        assert cluster.groups.found == 0, "the list says who coordinates"

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
        monkeypatch.setattr(admin_lag, "_LOOK_UP_PATIENCE_S", 120.0)
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


def test_the_asynchronous_client_does_the_same(cluster: FakeCluster) -> None:
    async def work() -> None:
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

    asyncio.run(work())
