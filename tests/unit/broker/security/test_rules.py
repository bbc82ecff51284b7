"""What each call needs: every method has a rule, and the rules say what Kafka's do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest
from google.protobuf import symbol_database
from google.protobuf.descriptor import MethodDescriptor
from grpc import aio

from broker.broker_role import BrokerRole
from broker.security.rules import RULES, Need, anybody, inside
from broker.services.log import LogService
from raftlog.v1 import (
    admin_pb2,
    group_pb2,
    log_pb2,
    metadata_pb2,
    node_pb2,
    security_pb2,
    transaction_pb2,
)
from raftlog.v1.group_pb2 import CommitOffset, TopicPartitions
from raftlog.v1.records_pb2 import ConfigResource
from raftlog.v1.security_pb2 import Acl
from raftmeta.acls import CLUSTER_NAME

IDS = {b"id-of-a": "a", b"id-of-b": "b"}
TOPIC, GROUP, CLUSTER, TXN = Acl.TOPIC, Acl.GROUP, Acl.CLUSTER, Acl.TRANSACTIONAL_ID
MODULES = (admin_pb2, group_pb2, log_pb2, metadata_pb2, node_pb2, security_pb2, transaction_pb2)


class Registered:
    """A server that notes which services it is given."""

    def __init__(self) -> None:
        self.services: set[str] = set()

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        for handler in handlers:
            self.services.add(handler.service_name())

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        self.services.add(service)


@pytest.fixture
def on_the_clients_listener(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the services that a broker offers to clients."""
    server = Registered()
    monkeypatch.setattr(aio, "server", lambda *args, **kwargs: server)
    role = MagicMock()
    role._log_service = LogService(MagicMock(), MagicMock(), MagicMock())
    BrokerRole._make_server(role, MagicMock())
    return server.services


def methods(service: str) -> Iterator[MethodDescriptor]:
    pool = symbol_database.Default().pool  # type: ignore[attr-defined] # not in the stubs
    yield from pool.FindServiceByName(service).methods


def test_every_method_that_clients_can_call_has_a_rule_and_the_other_way_round(
    on_the_clients_listener: set[str],
) -> None:
    assert {"raftlog.v1.Log", "raftlog.v1.Metadata", "raftlog.v1.Admin"} <= on_the_clients_listener
    callable_ = {f"/{service}/{method.name}" for service in on_the_clients_listener for method in methods(service)}
    assert callable_ == set(RULES)


def test_streams_of_requests_are_looked_at_by_their_sessions() -> None:
    for name, rule in RULES.items():
        _, service, method = name.split("/")
        [descriptor] = [each for each in methods(service) if each.name == method]
        if descriptor.client_streaming:
            assert rule is inside, name


def test_what_looks_itself_is_no_more_than_this() -> None:
    """Each of these has tests of its own; whoever adds one adds those."""
    assert {name.removeprefix("/raftlog.v1.") for name, rule in RULES.items() if rule is inside} == {
        "Log/Produce",
        "Log/Fetch",
        "Log/ListOffsets",
        "Log/OffsetForLeaderEpoch",
        "Log/DeleteRecords",
        "Metadata/Get",
        "Group/Session",
        "Group/ListGroups",
        "Transaction/ListTransactions",
    }
    assert {name.removeprefix("/raftlog.v1.") for name, rule in RULES.items() if rule is anybody} == {
        "Admin/DescribeCluster",
        "Security/Authenticate",
    }


def one(operation: Acl.Operation.ValueType, resource: Acl.ResourceType.ValueType, name: str) -> tuple[Need, ...]:
    return (Need(operation, resource, name),)


def cluster(operation: Acl.Operation.ValueType) -> tuple[Need, ...]:
    return one(operation, CLUSTER, CLUSTER_NAME)


TWO = [TopicPartitions(topic_id=b"id-of-a"), TopicPartitions(topic_id=b"id-of-b"), TopicPartitions(topic_id=b"id-of-a")]
OFFSETS = [CommitOffset(topic="b"), CommitOffset(topic_id=b"id-of-a", topic="b"), CommitOffset(topic="b", partition=1)]
ON_TOPIC = ConfigResource(type=ConfigResource.TOPIC, name="a")
ON_BROKER = ConfigResource(type=ConfigResource.BROKER, name="1")
UNKNOWN = ConfigResource.FromString(b"\x08\x63")  # a type of a later version
ON_LOGGER = ConfigResource(type=ConfigResource.BROKER_LOGGER, name="1")

CASES: list[tuple[str, Any, list[tuple[Need, ...]]]] = [
    ("Metadata/Watch", metadata_pb2.WatchRequest(), [cluster(Acl.DESCRIBE)]),
    (
        "Admin/CreateTopic",
        admin_pb2.CreateTopicRequest(name="c"),
        [(Need(Acl.CREATE, TOPIC, "c"), Need(Acl.CREATE, CLUSTER, CLUSTER_NAME))],
    ),
    ("Admin/DeleteTopic", admin_pb2.DeleteTopicRequest(name="c"), [one(Acl.DELETE, TOPIC, "c")]),
    ("Admin/CreatePartitions", admin_pb2.CreatePartitionsRequest(topic="c"), [one(Acl.ALTER, TOPIC, "c")]),
    (
        "Admin/DescribeConfigs",
        admin_pb2.DescribeConfigsRequest(resource=ON_TOPIC),
        [one(Acl.DESCRIBE_CONFIGS, TOPIC, "a")],
    ),
    ("Admin/DescribeConfigs", admin_pb2.DescribeConfigsRequest(resource=ON_BROKER), [cluster(Acl.DESCRIBE_CONFIGS)]),
    ("Admin/DescribeConfigs", admin_pb2.DescribeConfigsRequest(resource=UNKNOWN), [cluster(Acl.DESCRIBE_CONFIGS)]),
    ("Admin/AlterConfigs", admin_pb2.AlterConfigsRequest(resource=ON_TOPIC), [one(Acl.ALTER_CONFIGS, TOPIC, "a")]),
    ("Admin/AlterConfigs", admin_pb2.AlterConfigsRequest(resource=ON_LOGGER), [cluster(Acl.ALTER_CONFIGS)]),
    ("Admin/DescribeLogDirs", admin_pb2.DescribeLogDirsRequest(), [cluster(Acl.DESCRIBE)]),
    ("Admin/DescribeCluster", admin_pb2.DescribeClusterRequest(), []),
    ("Admin/DescribeQuorum", admin_pb2.AdminDescribeQuorumRequest(), [cluster(Acl.DESCRIBE)]),
    ("Admin/ElectLeaders", admin_pb2.ElectLeadersRequest(topic="a"), [cluster(Acl.ALTER)]),
    ("Admin/UnregisterBroker", admin_pb2.AdminUnregisterBrokerRequest(), [cluster(Acl.ALTER)]),
    ("Admin/AlterBroker", admin_pb2.AdminAlterBrokerRequest(), [cluster(Acl.ALTER)]),
    ("Admin/UpdateFeature", admin_pb2.AdminUpdateFeatureRequest(), [cluster(Acl.ALTER)]),
    ("Admin/DescribeReplicas", admin_pb2.DescribeReplicasRequest(), [cluster(Acl.DESCRIBE)]),
    ("Admin/AlterReassignments", admin_pb2.AdminAlterReassignmentsRequest(), [cluster(Acl.ALTER)]),
    ("Group/FindCoordinator", group_pb2.FindCoordinatorRequest(group_id="g"), [one(Acl.DESCRIBE, GROUP, "g")]),
    ("Group/CommitOffsets", group_pb2.CommitOffsetsRequest(group_id="g", offsets=OFFSETS), [one(Acl.READ, GROUP, "g")]),
    (
        "Group/CommitTransactionOffsets",
        group_pb2.CommitTransactionOffsetsRequest(group_id="g", transactional_id="t", offsets=OFFSETS),
        [one(Acl.WRITE, TXN, "t"), one(Acl.READ, GROUP, "g"), one(Acl.READ, TOPIC, "b"), one(Acl.READ, TOPIC, "a")],
    ),
    (
        "Group/FetchOffsets",
        group_pb2.FetchOffsetsRequest(group_id="g", partitions=TWO),
        [one(Acl.DESCRIBE, GROUP, "g")],
    ),
    (
        "Group/DeleteOffsets",
        group_pb2.DeleteOffsetsRequest(group_id="g", partitions=[TopicPartitions(topic="z")]),
        [one(Acl.DELETE, GROUP, "g"), one(Acl.READ, TOPIC, "z")],
    ),
    (
        "Group/DescribeGroups",
        group_pb2.DescribeGroupsRequest(group_ids=["g", "h", "g"]),
        [one(Acl.DESCRIBE, GROUP, "g"), one(Acl.DESCRIBE, GROUP, "h")],
    ),
    ("Group/DeleteGroups", group_pb2.DeleteGroupsRequest(group_ids=["g"]), [one(Acl.DELETE, GROUP, "g")]),
    (
        "Transaction/InitProducerId",
        transaction_pb2.InitProducerIdRequest(transactional_id="t"),
        [one(Acl.WRITE, TXN, "t")],
    ),
    (
        "Transaction/InitProducerId",
        transaction_pb2.InitProducerIdRequest(),
        [(Need(Acl.IDEMPOTENT_WRITE, CLUSTER, CLUSTER_NAME), Need(Acl.WRITE, TOPIC, None))],
    ),
    (
        "Transaction/FindCoordinator",
        transaction_pb2.FindTransactionCoordinatorRequest(id="t"),
        [one(Acl.DESCRIBE, TXN, "t")],
    ),
    (
        "Transaction/AddToTransaction",
        transaction_pb2.AddToTransactionRequest(transactional_id="t", partitions=TWO, group_ids=["g"]),
        [
            one(Acl.WRITE, TXN, "t"),
            one(Acl.WRITE, TOPIC, "a"),
            one(Acl.WRITE, TOPIC, "b"),
            one(Acl.READ, GROUP, "g"),
        ],
    ),
    (
        "Transaction/EndTransaction",
        transaction_pb2.EndTransactionRequest(transactional_id="t"),
        [one(Acl.WRITE, TXN, "t")],
    ),
    (
        "Transaction/InitStage",
        transaction_pb2.InitStageRequest(sink_id="s", partitions=TWO[:1]),
        [one(Acl.WRITE, TXN, "s"), one(Acl.WRITE, TOPIC, "a")],
    ),
    (
        "Transaction/AddToStage",
        transaction_pb2.AddToStageRequest(sink_id="s", partitions=TWO[1:2]),
        [one(Acl.WRITE, TXN, "s"), one(Acl.WRITE, TOPIC, "b")],
    ),
    ("Transaction/AbortStages", transaction_pb2.AbortStagesRequest(sink_id="s"), [one(Acl.WRITE, TXN, "s")]),
    ("Transaction/CommitBatch", transaction_pb2.CommitBatchRequest(sink_id="s"), [one(Acl.WRITE, TXN, "s")]),
    ("Transaction/LastBatch", transaction_pb2.LastBatchRequest(sink_id="s"), [one(Acl.WRITE, TXN, "s")]),
    (
        "Transaction/DescribeTransactions",
        transaction_pb2.DescribeTransactionsRequest(transactional_ids=["t", "u"]),
        [one(Acl.DESCRIBE, TXN, "t"), one(Acl.DESCRIBE, TXN, "u")],
    ),
    (
        "Transaction/AbortTransaction",
        transaction_pb2.AbortTransactionRequest(transactional_id="t"),
        [one(Acl.WRITE, TXN, "t")],
    ),
    (
        "Transaction/DescribeProducers",
        transaction_pb2.DescribeProducersRequest(partitions=[*TWO[:1], TopicPartitions(topic_id=b"nobody's")]),
        [one(Acl.READ, TOPIC, "a")],
    ),
    ("Transaction/AbortHanging", transaction_pb2.AbortHangingRequest(), [cluster(Acl.ALTER)]),
    ("Node/DescribeNode", node_pb2.DescribeNodeRequest(), [cluster(Acl.DESCRIBE)]),
    ("Security/Authenticate", security_pb2.AuthenticateRequest(), []),
    ("Security/DescribeUsers", security_pb2.DescribeUsersRequest(), [cluster(Acl.DESCRIBE)]),
    ("Security/AlterUsers", security_pb2.AlterUsersRequest(), [cluster(Acl.ALTER)]),
    ("Security/DescribeAcls", security_pb2.DescribeAclsRequest(), [cluster(Acl.DESCRIBE)]),
    ("Security/CreateAcls", security_pb2.CreateAclsRequest(), [cluster(Acl.ALTER)]),
    ("Security/DeleteAcls", security_pb2.DeleteAclsRequest(), [cluster(Acl.ALTER)]),
]


@pytest.mark.parametrize(("method", "request_", "needed"), CASES, ids=[case[0] for case in CASES])
def test_what_a_request_needs(method: str, request_: Any, needed: list[tuple[Need, ...]]) -> None:
    assert list(RULES[f"/raftlog.v1.{method}"](request_, IDS.get)) == needed


def test_no_rule_is_without_a_case() -> None:
    cases = {f"/raftlog.v1.{method}" for method, _, _ in CASES}
    assert {method for method, rule in RULES.items() if rule is not inside} == cases


def test_the_services_handlers_are_as_the_descriptors_say() -> None:
    """The Log service makes its handlers itself: none is served that its descriptor does not have."""
    handlers: Any = LogService(MagicMock(), MagicMock(), MagicMock()).handlers()
    for method in methods("raftlog.v1.Log"):
        details = MagicMock(method=f"/raftlog.v1.Log/{method.name}")
        assert isinstance(handlers.service(details), grpc.RpcMethodHandler), method.name
