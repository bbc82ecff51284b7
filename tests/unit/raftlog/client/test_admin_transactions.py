"""The admin client on transactions: whom it asks, what it makes of the answers, and what it takes for hanging."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from raftlog import Admin, TopicPartition, aio
from raftlog._client import admin_transactions
from raftlog.errors import (
    CoordinatorLoadInProgress,
    InvalidRequestError,
    InvalidTxnState,
    LeaderNotAvailable,
    NotCoordinator,
    NotEnoughReplicas,
    NotLeader,
    RaftlogError,
    TransactionalIdNotFound,
    UnknownTopicOrPartition,
    to_wire,
)
from raftlog.v1 import transaction_pb2
from tests.support.fake_transaction_tools import ToolCluster

A0, A1, A2 = (TopicPartition("a", number) for number in range(3))


@pytest.fixture
def cluster() -> Iterator[ToolCluster]:
    """Partition i of topic `a` is led by broker i + 1."""
    with ToolCluster(nodes=3) as cluster:
        cluster.create_topic("a", 3)
        yield cluster


@pytest.fixture
def admin(cluster: ToolCluster) -> Iterator[Admin]:
    with Admin(cluster.bootstrap, default_api_timeout_ms=60_000, retry_backoff_ms=5) as admin:
        yield admin


@pytest.fixture
def hasty(cluster: ToolCluster) -> Iterator[Admin]:
    """A client whose calls have no time for a second try: they raise what the first one was answered."""
    with Admin(cluster.bootstrap, default_api_timeout_ms=30_000, retry_backoff_ms=120_000) as admin:
        yield admin


class TestList:
    def test_every_broker_is_asked_for_its_own(self, cluster: ToolCluster, admin: Admin) -> None:
        tools = cluster.tools
        tools.transaction("c", (1, 0), coordinator=1, open_for_s=3_000)
        tools.transaction("b", (2, 4), transaction_pb2.COMPLETE_COMMIT, coordinator=2)
        tools.transaction("a", (3, 1), transaction_pb2.PREPARE_ABORT, coordinator=3, open_for_s=5)
        tools.transaction("d", (4, 0), transaction_pb2.TRANSACTION_EMPTY, coordinator=3)
        tools.sink("s", 4, "orders", coordinator=2)
        tools.stage("s", 9, 5, {"a": [1]})
        found = [
            (each.transactional_id, each.sink_id, each.producer_id, each.state, each.coordinator_id)
            for each in admin.list_transactions()
        ]
        assert found == [
            ("a", "", 3, "prepare_abort", 3),
            ("b", "", 2, "complete_commit", 2),
            ("c", "", 1, "ongoing", 1),
            ("d", "", 4, "empty", 3),
            ("", "s", 9, "ongoing", 2),
        ]
        assert [each.transactional_id for each in admin.list_transactions(["Empty", "prepare_abort"])] == ["a", "d"]
        assert [each.producer_id for each in admin.list_transactions(producer_ids=[2, 9, 77])] == [2, 9]
        assert admin.list_transactions(producer_ids=[]) == []
        assert [each.producer_id for each in admin.list_transactions(running_longer_than_ms=1_000_000)] == [1]
        (sink,) = admin.list_sinks()
        assert (sink.sink_id, sink.target, sink.last_batch_id, sink.open_stages, sink.coordinator_id) == (
            "s",
            "orders",
            4,
            1,
            2,
        )

    def test_many_producers_are_asked_for_some_at_a_time(
        self, cluster: ToolCluster, admin: Admin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A coordinator refuses a request that names too many."""
        monkeypatch.setattr(admin_transactions, "_IDS_AT_A_TIME", 2)
        for number in range(5):
            cluster.tools.transaction(f"id-{number}", (number, 0))
        cluster.tools.loading[2] = CoordinatorLoadInProgress("__transaction_state-3 is being loaded")
        missing: list[RaftlogError] = []
        found = admin.list_transactions(producer_ids=range(4), missing=missing)
        assert [each.producer_id for each in found] == [0, 1, 2, 3]
        assert list(map(str, missing)) == ["__transaction_state-3 is being loaded"]
        assert cluster.tools.calls.count((1, "ListTransactions")) == 2

    def test_a_state_that_is_none(self, admin: Admin) -> None:
        with pytest.raises(InvalidRequestError, match="there are empty, ongoing, prepare_commit"):
            admin.list_transactions(["done"])

    def test_a_list_with_holes_is_an_error_unless_that_is_asked_for(
        self, cluster: ToolCluster, admin: Admin, hasty: Admin
    ) -> None:
        cluster.tools.transaction("a", (1, 0))
        cluster.tools.loading[2] = CoordinatorLoadInProgress("__transaction_state-3 is being loaded")
        with pytest.raises(CoordinatorLoadInProgress):
            hasty.list_transactions()
        with pytest.raises(CoordinatorLoadInProgress):
            hasty.list_sinks()
        missing: list[RaftlogError] = []
        assert [each.transactional_id for each in admin.list_transactions(missing=missing)] == ["a"]
        assert list(map(str, missing)) == ["__transaction_state-3 is being loaded"]

    def test_a_coordinator_without_a_leader_is_missed(self, cluster: ToolCluster, admin: Admin) -> None:
        cluster.create_topic("__transaction_state", 3)
        cluster.call(lambda: setattr(cluster.topics["__transaction_state"].partitions[1], "leader", -1))
        missing: list[RaftlogError] = []
        assert admin.list_transactions(missing=missing) == []
        assert list(map(str, missing)) == ["__transaction_state has partitions without a leader: 1"]


class TestOne:
    def test_described_by_its_coordinator(self, cluster: ToolCluster, admin: Admin) -> None:
        cluster.tools.transaction(
            "billing",
            (7, 3),
            transaction_pb2.PREPARE_COMMIT,
            {"a": [2, 0]},
            pending={"a": [2]},
            coordinator=2,
            group_ids=["g"],
        )
        found = admin.describe_transaction("billing")
        assert (found.state, found.producer_id, found.producer_epoch) == ("prepare_commit", 7, 3)
        assert (found.partitions, found.pending, found.group_ids) == ([A0, A2], [A2], ["g"])
        assert (found.coordinator_id, found.state_partition, found.timeout_ms) == (2, 7, 60_000)
        cluster.call(lambda: cluster.tools.coordinator.update(billing=3))
        assert admin.describe_transaction("billing").state == "prepare_commit", "it has moved"
        with pytest.raises(TransactionalIdNotFound):
            admin.describe_transactions(["billing", "nobody"])

    def test_aborted(self, cluster: ToolCluster, admin: Admin) -> None:
        cluster.tools.transaction("billing", (7, 3), coordinator=2)
        cluster.tools.refuse = [NotCoordinator("not I")]
        admin.abort_transaction("billing")
        assert admin.describe_transaction("billing").state == "complete_abort"
        with pytest.raises(InvalidTxnState):
            admin.abort_transaction("billing")
        with pytest.raises(TransactionalIdNotFound):
            admin.abort_transaction("nobody")

    def test_a_sink(self, cluster: ToolCluster, admin: Admin) -> None:
        cluster.tools.sink("s", 4, "orders", coordinator=3)
        cluster.tools.stage("s", 9, 5, {"a": [1, 0]})
        found = admin.describe_sink("s")
        assert (found.sink_id, found.target, found.last_batch_id) == ("s", "orders", 4)
        (stage,) = found.stages
        assert (stage.producer_id, stage.batch_id, stage.state, stage.attempt) == (9, 5, "ongoing", "task 9")
        assert stage.partitions == [A0, A1]
        with pytest.raises(TransactionalIdNotFound, match="there is no sink 'other'"):
            admin.describe_sink("other")


class TestStages:
    """What a driver that died has left open, and keeps readers waiting."""

    def sink(self, cluster: ToolCluster) -> None:
        cluster.tools.sink("s", 4, "orders", coordinator=3)
        cluster.tools.stage("s", 9, 5, {"a": [1, 0]})
        cluster.tools.stage("s", 10, 5, {"a": [2]})
        cluster.tools.stage("s", 11, 6, {"a": [2]})
        cluster.tools.stage("s", 12, 4, {"a": [2]}, transaction_pb2.PREPARE_COMMIT)

    def states(self, admin: Admin) -> dict[int, str]:
        return {stage.producer_id: stage.state for stage in admin.describe_sink("s").stages}

    def test_those_of_a_batch(self, cluster: ToolCluster, admin: Admin) -> None:
        self.sink(cluster)
        cluster.tools.mislaid_answers = 1
        ended = admin.abort_stages("s", 5)
        assert [(stage.producer_id, stage.batch_id, stage.attempt) for stage in ended] == [
            (9, 5, "task 9"),
            (10, 5, "task 10"),
        ]
        assert ended[0].partitions == [A0, A1]
        assert self.states(admin) == {9: "prepare_abort", 10: "prepare_abort", 11: "ongoing", 12: "prepare_commit"}
        assert admin.abort_stages("s", 5) == []
        assert admin.abort_stages("s", 4) == [], "what is decided is not aborted"

    def test_all(self, cluster: ToolCluster, admin: Admin) -> None:
        self.sink(cluster)
        assert [stage.producer_id for stage in admin.abort_stages("s")] == [9, 10, 11]
        assert self.states(admin)[12] == "prepare_commit"
        cluster.call(lambda: cluster.tools.calls.clear())
        assert admin.abort_stages("s") == []
        assert cluster.tools.calls == [(3, "LastBatch")], "without one there is nothing to ask for"

    def test_of_no_sink(self, admin: Admin) -> None:
        with pytest.raises(TransactionalIdNotFound, match="there is no sink 'other'"):
            admin.abort_stages("other")

    def test_a_sink_that_is_taken_for_a_transactional_id(self, cluster: ToolCluster, admin: Admin) -> None:
        cluster.tools.sink("s/1 x", 4, "orders", coordinator=3)
        with pytest.raises(TransactionalIdNotFound, match=r"sink of staged batches.*raftlog txn abort-stages 's/1 x'"):
            admin.abort_transaction("s/1 x")

    def test_one_that_is_taken_for_hanging(self, cluster: ToolCluster, admin: Admin) -> None:
        self.sink(cluster)
        cluster.tools.writes(A0, (9, 0), start_offset=10, open_for_s=1_000)
        with pytest.raises(InvalidTxnState, match=r"is not hanging.*raftlog txn abort-stages s --batch 5"):
            admin.abort_hanging("a", 0, 10)
        cluster.tools.transaction("billing 7", (7, 3), partitions={"a": [1]}, coordinator=2)
        cluster.tools.writes(A1, (7, 3), start_offset=20, open_for_s=1_000)
        with pytest.raises(InvalidTxnState, match=r"is not hanging.*raftlog txn abort 'billing 7'"):
            admin.abort_hanging("a", 1, 20)


class TestProducers:
    def test_leaders_are_asked(self, cluster: ToolCluster, admin: Admin) -> None:
        cluster.tools.writes(A1, (7, 3), start_offset=100, open_for_s=10)
        cluster.tools.writes(A1, (5, 0))
        cluster.tools.refuse = [NotLeader("not any more")]
        found = admin.describe_producers("a")
        assert list(found) == [A0, A1, A2]
        assert (found[A1].last_stable_offset, found[A1].high_watermark) == (100, 120)
        first, second = found[A1].producers
        assert (first.producer_id, first.transaction_start_offset, first.transaction_started_ms) == (5, None, None)
        assert (second.producer_id, second.producer_epoch, second.transaction_start_offset) == (7, 3, 100)
        assert list(admin.describe_producers("a", 1)) == [A1]

    def test_what_is_not_there(self, admin: Admin) -> None:
        with pytest.raises(UnknownTopicOrPartition, match="it has 3, from 0"):
            admin.describe_producers("a", 3)
        with pytest.raises(UnknownTopicOrPartition):
            admin.describe_producers("b")

    def test_a_leader_that_is_not_there(self, cluster: ToolCluster, hasty: Admin) -> None:
        cluster.call(lambda: setattr(cluster.topics["a"].partitions[1], "leader", -1))
        with pytest.raises(LeaderNotAvailable, match="a-1 has no leader"):
            hasty.describe_producers("a")
        missing: list[RaftlogError] = []
        assert hasty.find_hanging_transactions(missing=missing) == []
        assert list(map(str, missing)) == ["a-1 has no leader at the moment"]


class TestHanging:
    def hanging(self, admin: Admin) -> list[tuple[int, int, int]]:
        return [(each.partition, each.producer_id, each.start_offset) for each in admin.find_hanging_transactions()]

    def test_what_no_coordinator_knows_for_too_long(self, cluster: ToolCluster, admin: Admin) -> None:
        cluster.tools.writes(A0, (1, 0), start_offset=10, open_for_s=1_000)
        cluster.tools.writes(A1, (2, 0), start_offset=20, open_for_s=800)
        cluster.tools.writes(A2, (3, 0))
        assert self.hanging(admin) == [(0, 1, 10)]
        found = admin.find_hanging_transactions(["a"], max_transaction_timeout_ms=60_000)
        assert [each.producer_id for each in found] == [1, 2]
        with pytest.raises(UnknownTopicOrPartition):
            admin.find_hanging_transactions(["a", "b"])

    def test_what_a_coordinator_knows_there_does_not_hang(self, cluster: ToolCluster, admin: Admin) -> None:
        tools = cluster.tools
        for producer_id, part in ((1, A0), (2, A1), (3, A2), (4, A0), (5, A0)):
            tools.writes(part, (producer_id, 0), start_offset=producer_id * 10, open_for_s=1_000)
        tools.transaction("open", (1, 0), partitions={"a": [0, 1]}, coordinator=2)
        tools.transaction("told", (2, 1), transaction_pb2.PREPARE_COMMIT, {"a": [1]}, coordinator=3)
        tools.transaction("elsewhere", (3, 0), partitions={"a": [0]}, coordinator=1)
        tools.transaction("ended", (4, 1), transaction_pb2.COMPLETE_ABORT, {"a": [0]}, coordinator=1)
        tools.sink("s", 4, "a", coordinator=2)
        tools.stage("s", 5, 5, {"a": [0]})
        assert self.hanging(admin) == [(0, 4, 40), (2, 3, 30)]

    @pytest.mark.parametrize("state", [transaction_pb2.PREPARE_COMMIT, transaction_pb2.PREPARE_ABORT])
    def test_what_is_decided_does_not_hang_while_its_marker_is_on_its_way(
        self, cluster: ToolCluster, admin: Admin, state: transaction_pb2.TransactionState.ValueType
    ) -> None:
        """Its abort would take a part out of what is committed. A stage is known wherever it is open."""
        tools = cluster.tools
        tools.writes(A0, (5, 0), start_offset=50, open_for_s=1_000)
        tools.writes(A1, (6, 0), start_offset=60, open_for_s=1_000)
        tools.sink("s", 4, "a", coordinator=2)
        tools.stage("s", 5, 4, {}, state)
        tools.transaction("told", (6, 1), state, {"a": [1]}, coordinator=3)
        assert self.hanging(admin) == []
        for partition, start_offset in ((0, 50), (1, 60)):
            with pytest.raises(InvalidTxnState, match="is not hanging: its coordinator knows it"):
                admin.abort_hanging("a", partition, start_offset)
        assert tools.producers[A0].producers[0].transaction_start_offset == 50

    def test_coordinators_all_have_to_say(self, cluster: ToolCluster, admin: Admin, hasty: Admin) -> None:
        cluster.tools.writes(A0, (1, 0), start_offset=10, open_for_s=1_000)
        cluster.tools.loading[2] = CoordinatorLoadInProgress("__transaction_state-3 is being loaded")
        with pytest.raises(CoordinatorLoadInProgress):
            hasty.find_hanging_transactions(missing=[])
        with pytest.raises(CoordinatorLoadInProgress):
            hasty.abort_hanging("a", 0, 10)
        assert admin.abort_hanging("a", 0, 10, force=True).producer_id == 1

    def test_what_ends_meanwhile_does_not_hang(self, cluster: ToolCluster, admin: Admin) -> None:
        """It is not open at the coordinator when that is asked, nor on the partition when that is asked again."""
        cluster.tools.writes(A0, (1, 0), start_offset=10, open_for_s=1_000)
        engine = admin._engine
        original = engine._coordinated

        async def ended_by_now(producer_ids: object, timeout: float | None) -> object:
            cluster.tools.producers[A0].producers[0].transaction_start_offset = -1
            return await original(producer_ids, timeout)  # type: ignore[arg-type] # passed on

        engine._coordinated = ended_by_now  # type: ignore[method-assign,assignment] # of this one
        assert self.hanging(admin) == []

    def test_aborted_where_it_hangs(self, cluster: ToolCluster, admin: Admin) -> None:
        cluster.tools.writes(A1, (1, 4), start_offset=10, open_for_s=5)
        cluster.tools.writes(A1, (2, 0), start_offset=15, open_for_s=5)
        cluster.tools.transaction("known", (2, 0), partitions={"a": [1]}, coordinator=3)
        cluster.tools.mislaid_answers = 1
        ended = admin.abort_hanging("a", 1, 10)
        assert (ended.producer_id, ended.producer_epoch, ended.start_offset) == (1, 4, 10)
        assert [each.transaction_start_offset for each in admin.describe_producers("a", 1)[A1].producers] == [None, 15]
        with pytest.raises(InvalidTxnState, match="begins at offset 10; those that are open begin at 15"):
            admin.abort_hanging("a", 1, 10)
        with pytest.raises(InvalidTxnState, match="is not hanging: its coordinator knows it"):
            admin.abort_hanging("a", 1, 15)
        with pytest.raises(InvalidTxnState, match="none is open there"):
            admin.abort_hanging("a", 0, 15)
        cluster.tools.refuse = [InvalidTxnState("something else begins there")]
        with pytest.raises(InvalidTxnState, match="something else"):
            admin.abort_hanging("a", 1, 15, force=True)

    def test_ended_by_somebody_else_before_the_retry(self, cluster: ToolCluster, admin: Admin) -> None:
        """The first attempt is refused, so it has not done it; what the coordinator has done then is told as it is."""
        cluster.tools.writes(A1, (1, 4), start_offset=10, open_for_s=5)
        real = admin._engine.ask_transactions
        refusals: list[RaftlogError] = [NotEnoughReplicas("1 of 2"), InvalidTxnState("none is open")]

        async def ask(address: str, method: str, request: Any, deadline: float) -> Any:
            if method == "AbortHanging":
                return transaction_pb2.AbortHangingResponse(error=to_wire(refusals.pop(0)))
            return await real(address, method, request, deadline)

        admin._engine.ask_transactions = ask  # type: ignore[method-assign] # of this one
        with pytest.raises(InvalidTxnState, match="none is open"):
            admin.abort_hanging("a", 1, 10)
        assert not refusals

    def test_who_has_ended_it_is_not_known(self, cluster: ToolCluster, admin: Admin) -> None:
        """The answer is lost, and with --force nobody has asked whether a coordinator could end it, too."""
        cluster.tools.writes(A1, (1, 4), start_offset=10, open_for_s=5)
        cluster.tools.mislaid_answers = 1
        with pytest.raises(InvalidTxnState, match="is over, but it is not known who has ended it"):
            admin.abort_hanging("a", 1, 10, force=True)


def test_the_same_awaitable(cluster: ToolCluster) -> None:
    cluster.tools.transaction("billing", (7, 3), partitions={"a": [0]}, coordinator=2)
    cluster.tools.sink("s", 4, "orders", coordinator=3)
    cluster.tools.writes(A0, (1, 0), start_offset=10, open_for_s=1_000)

    async def ask() -> None:
        async with aio.Admin(cluster.bootstrap, default_api_timeout_ms=60_000) as admin:
            assert [each.transactional_id for each in await admin.list_transactions()] == ["billing"]
            assert (await admin.describe_transaction("billing")).partitions == [A0]
            assert list(await admin.describe_transactions(["billing"])) == ["billing"]
            await admin.abort_transaction("billing")
            assert [each.sink_id for each in await admin.list_sinks()] == ["s"]
            assert (await admin.describe_sink("s")).last_batch_id == 4
            assert await admin.abort_stages("s", 5) == []
            assert list(await admin.describe_producers("a")) == [A0, A1, A2]
            assert len(await admin.find_hanging_transactions()) == 1
            assert (await admin.abort_hanging("a", 0, 10)).producer_id == 1

    asyncio.run(ask())
