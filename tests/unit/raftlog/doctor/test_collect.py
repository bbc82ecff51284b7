"""The doctor's questions, and their order."""

from __future__ import annotations

from typing import Any, cast

import raftlog
from raftlog._core.descriptions import ClusterDescription, LogDirDescription, LogDirPartition
from raftlog._doctor.checks import CHECKS
from raftlog._doctor.collect import collect
from raftlog._doctor.report import examine
from raftlog.cli.doctor import FailOn, is_bad, told
from raftlog.errors import (
    ClusterAuthorizationFailed,
    RaftlogError,
    RequestTimedOut,
    TopicAuthorizationFailed,
    UnknownTopicOrPartition,
)
from tests.support import pictures
from tests.support.pictures import broker


class LaterFenced:
    """An admin client of a cluster that hears of a broker's death between two looks, and answers nothing else."""

    def __init__(self) -> None:
        self.looks = 0

    def describe_cluster(self, **_: Any) -> ClusterDescription:
        self.looks += 1
        found: ClusterDescription = pictures.cluster(broker(1), broker(2, fenced=self.looks > 1))
        return found

    def __getattr__(self, question: str) -> Any:
        def ask(*_: Any, **__: Any) -> Any:
            raise RequestTimedOut(f"{question}: nobody says")

        return ask


def test_the_second_look_is_at_the_brokers_as_well() -> None:
    admin = cast(raftlog.Admin, LaterFenced())
    assert [each.fenced for each in collect(admin, interval_s=0.01).brokers().values()] == [False, True]
    assert [each.fenced for each in collect(cast(raftlog.Admin, LaterFenced()), interval_s=0).brokers().values()] == [
        False,
        False,
    ]


class SeesTheClusterOnly:
    """An admin client of a user with Describe and DescribeConfigs of the cluster, where there are two topics."""

    def __init__(self) -> None:
        self.whole = pictures.healthy()

    def describe_cluster(self, **_: Any) -> Any:
        return self.whole.cluster

    def describe_quorum(self, **_: Any) -> Any:
        return self.whole.quorum

    def describe_node(self, node_id: int, **_: Any) -> Any:
        return pictures.node(node_id, configs=pictures.configs({"authorizer": "acl", "super.users": "User:admin"}))

    def describe_log_dirs(self, broker: int, **_: Any) -> Any:
        names = ("orders", "__consumer_offsets", "gone") if broker == 1 else ("orders",)
        parts = [LogDirPartition(name, 0, 0, 1, 0, 0, 0) for name in names]
        return [LogDirDescription(broker, "/data", None, 1, 1, parts)]

    def describe_topics(self, names: Any = None, **_: Any) -> Any:
        if names is None:
            return []
        if names == ["gone"]:
            raise UnknownTopicOrPartition("there is no topic 'gone'")
        raise TopicAuthorizationFailed(f"User:ops may not DESCRIBE topic {names[0]!r}; raftlog acl add ...")

    def describe_replicas(self, *_: Any, **__: Any) -> Any:
        return {}

    def list_groups(self, **_: Any) -> Any:
        return []

    list_transactions = find_hanging_transactions = list_groups

    def group_lags(self, group_ids: list[str], **_: Any) -> Any:
        raise AssertionError("the lag of groups was asked for, but there are no groups")

    def describe_topic_configs(self, topics: list[str], **_: Any) -> Any:
        raise AssertionError("the configs of topics were asked for, but there are no topics")


def test_topics_that_may_not_be_described_are_no_all_clear() -> None:
    picture = collect(cast(raftlog.Admin, SeesTheClusterOnly()), interval_s=0)
    assert picture.hidden_topics == ["__consumer_offsets", "orders"]
    report = examine(picture, CHECKS)
    assert is_bad(report, FailOn.WARNING)
    [found] = [each for each in report.findings if each.check == "not-all-seen"]
    assert found.where == ("some of the topics", "topic __consumer_offsets", "topic orders")
    assert found.remedy == (
        "raftlog acl add --allow-principal User:ops --operation Describe --operation DescribeConfigs --topic '*'"
    )
    lines = list(told(report, picture, 200))
    assert "0 of 2 topics, 0 partitions" in lines[-1]
    assert "all fine" not in lines[-1]


class MayNothing(SeesTheClusterOnly):
    """The same for a user without permissions."""

    def describe_replicas(self, *_: Any, silent: Any, **__: Any) -> Any:
        silent[1] = ClusterAuthorizationFailed("User:ops may not DESCRIBE the cluster; ...")
        return {}

    def describe_quorum(self, **_: Any) -> Any:
        raise ClusterAuthorizationFailed("User:ops may not DESCRIBE the cluster; ...")

    def describe_topics(self, names: Any = None, **_: Any) -> Any:
        return [pictures.topic("orders", pictures.partition(0, [1]))]

    def describe_topic_configs(
        self, topics: list[str], *, missing: dict[str, RaftlogError] | None = None, **_: Any
    ) -> Any:
        assert missing is not None
        for topic in topics:
            missing[topic] = TopicAuthorizationFailed(f"User:ops may not DESCRIBE_CONFIGS topic {topic!r}; ...")
        return {}

    def describe_node(self, node_id: int, **_: Any) -> Any:
        return self.describe_quorum()

    def describe_log_dirs(self, broker: int, **_: Any) -> Any:
        return self.describe_quorum()


def test_a_refusal_is_no_outage() -> None:
    report = examine(collect(cast(raftlog.Admin, MayNothing()), interval_s=0), CHECKS)
    results = {each.check: each.result for each in report.checked}
    assert (results["leader-silent"], results["node-silent"], results["topic-unwritable"]) == ("skipped",) * 3
    [found] = [each for each in report.findings if each.check == "not-all-seen"]
    wanted = {
        "quorum",
        "node 1",
        "node 2",
        "node 3",
        "settings of topic orders",
        "the progress of replicas, at leader 1",
    }
    assert set(found.where) == wanted | {"topics, groups and transactions that lists may leave out"}
    lines = list(told(report, collect(cast(raftlog.Admin, MayNothing()), interval_s=0), 10_000))
    (skipped,) = [line for line in lines if line.startswith("skipped") and "DESCRIBE the cluster" in line]
    assert "quorum-no-leader, quorum-no-slack, " in skipped, (
        "checks that were skipped for the same reason must share one line"
    )
    for option in ("--cluster", "--topic '*'", "--group '*'", "--transactional-id '*'"):
        assert option in found.remedy
    assert "raftlog acl add --allow-principal User:ops --operation Describe" in found.remedy
