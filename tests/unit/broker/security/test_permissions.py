"""The interceptor refuses a call before its handler is called; every method has a rule, as in Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest
from google.protobuf import symbol_database
from google.protobuf.descriptor import MethodDescriptor
from grpc import aio

from broker.net.services.log import LogService
from broker.security.caller import MAX_NAME, MAX_REFUSALS, Caller, Decisions, allowed_of, caller
from broker.security.permissions import MAX_DETAILS, RULES, Need, Permissions, anybody, inside
from broker.server.broker_role import BrokerRole
from raftlog._client.connections import refusal_of
from raftlog._core.security.acls import CLUSTER_NAME
from raftlog.errors import AuthorizationError, TopicAuthorizationFailed
from raftlog.v1 import admin_pb2, group_pb2, log_pb2, metadata_pb2, node_pb2, security_pb2, transaction_pb2
from raftlog.v1.group_pb2 import CommitOffset, DeleteOffsetsRequest, TopicPartitions
from raftlog.v1.records_pb2 import ConfigResource
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import MetadataImage
from tests.support.fake_authorizer import FakeAuthorizer
from tests.support.memory_metadata import MemoryMetadata
from tests.support.metadata import create_topic, uuid_of
from tests.support.turns import counted_turns

CREATE_CLUSTER = (Acl.CREATE, Acl.CLUSTER, CLUSTER_NAME)
DESCRIBE_CLUSTER = (Acl.DESCRIBE, Acl.CLUSTER, CLUSTER_NAME)


class Aborted(Exception):
    """The exception that a context raises."""


class FakeContext:
    """A call's context that can be aborted."""

    async def abort(
        self, status: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> None:
        assert isinstance(refusal_of(trailing_metadata), AuthorizationError), (
            "a refusal came without its error in the trailing metadata"
        )
        raise Aborted(status, details)


async def echo(request: Any, context: Any) -> Any:
    return request


async def each(request: Any, context: Any) -> Any:
    yield request


def call(
    method: str,
    request: Any,
    who: Caller,
    handler: Any = None,
    image: Callable[[], MetadataImage] = MetadataImage,
) -> Any:
    """Return the result of the handler behind the interceptor."""
    rewritten = Permissions(image).rewrite(
        f"/raftlog.v1.{method}", handler or grpc.unary_unary_rpc_method_handler(echo)
    )

    async def main() -> Any:
        caller.set(who)
        behavior = rewritten.unary_unary or rewritten.unary_stream or rewritten.stream_stream
        answer = behavior(request, FakeContext())
        return await answer if asyncio.iscoroutine(answer) else [each async for each in answer]

    return asyncio.run(main())


def refused(method: str, request: Any, who: Caller, **values: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(Aborted) as raised:
        call(method, request, who, **values)
    status, details = raised.value.args
    return status, details


def test_without_an_authorizer_everything_passes() -> None:
    request = admin_pb2.DeleteTopicRequest(name="orders")
    assert call("Admin/DeleteTopic", request, Caller()) is request
    assert call("Admin/NoSuchMethod", request, Caller()) is request


def test_who_may_passes() -> None:
    request = admin_pb2.DeleteTopicRequest(name="orders")
    assert call("Admin/DeleteTopic", request, FakeAuthorizer((Acl.DELETE, Acl.TOPIC, "orders")).caller()) is request


def test_who_may_not_is_told_the_class_and_what_is_missing() -> None:
    authorizer = FakeAuthorizer((Acl.DELETE, Acl.TOPIC, "other"))
    status, details = refused("Admin/DeleteTopic", admin_pb2.DeleteTopicRequest(name="orders"), authorizer.caller())
    assert status is grpc.StatusCode.PERMISSION_DENIED
    assert details == "TopicAuthorizationFailed: User:alice may not DELETE orders"
    assert authorizer.logged == [(Acl.DELETE, Acl.TOPIC, "orders")]


@pytest.mark.parametrize("allowed", [CREATE_CLUSTER, (Acl.CREATE, Acl.TOPIC, "new")])
def test_one_of_several_is_enough_and_nothing_is_logged(allowed: Any) -> None:
    authorizer = FakeAuthorizer(allowed)
    call("Admin/CreateTopic", admin_pb2.CreateTopicRequest(name="new"), authorizer.caller())
    assert authorizer.logged == []


def test_none_of_several_is_logged_once_about_the_first() -> None:
    authorizer = FakeAuthorizer((Acl.CREATE, Acl.TOPIC, "old"))
    _, details = refused("Admin/CreateTopic", admin_pb2.CreateTopicRequest(name="new"), authorizer.caller())
    assert details.startswith("TopicAuthorizationFailed: ")
    assert authorizer.logged == [(Acl.CREATE, Acl.TOPIC, "new")]


def test_who_may_write_anywhere_may_have_a_producer_id() -> None:
    request = transaction_pb2.InitProducerIdRequest()
    call("Transaction/InitProducerId", request, FakeAuthorizer((Acl.WRITE, Acl.TOPIC, "any")).caller())
    _, details = refused("Transaction/InitProducerId", request, FakeAuthorizer((Acl.READ, Acl.TOPIC, "any")).caller())
    assert details.startswith("ClusterAuthorizationFailed: ")


def test_all_that_a_request_names_has_to_be_allowed_and_ids_are_names() -> None:
    async def images() -> MetadataImage:
        metadata = MemoryMetadata()
        await metadata.add_broker()
        await metadata.propose(create_topic("a", 1))
        await metadata.propose(create_topic("b", 2))
        return metadata.image

    image = asyncio.run(images())
    parts = [TopicPartitions(topic_id=image.topic_id_by_name[name]) for name in ("a", "b")]
    unknown = TopicPartitions(topic_id=uuid_of(77))
    only_a = FakeAuthorizer((Acl.READ, Acl.TOPIC, "a")).caller()
    request = transaction_pb2.DescribeProducersRequest(partitions=[parts[0], unknown])
    assert call("Transaction/DescribeProducers", request, only_a, image=lambda: image) is request
    both = transaction_pb2.DescribeProducersRequest(partitions=parts)
    described = FakeAuthorizer((Acl.READ, Acl.TOPIC, "a"), (Acl.DESCRIBE, Acl.TOPIC, "b")).caller()
    assert "may not READ b" in refused("Transaction/DescribeProducers", both, described, image=lambda: image)[1]
    assert uuid_of(2).hex() in refused("Transaction/DescribeProducers", both, only_a, image=lambda: image)[1]


def test_a_method_without_a_rule_is_refused_whatever_it_is() -> None:
    mighty = FakeAuthorizer(CREATE_CLUSTER, DESCRIBE_CLUSTER).caller()
    handlers: tuple[Any, ...] = (
        grpc.unary_unary_rpc_method_handler(echo),
        grpc.unary_stream_rpc_method_handler(each),
        grpc.unary_stream_rpc_method_handler(echo),
        grpc.stream_stream_rpc_method_handler(each),
        grpc.stream_stream_rpc_method_handler(echo),
    )
    for handler in handlers:
        status, details = refused("Admin/NoSuchMethod", "x", mighty, handler=handler)
        assert status is grpc.StatusCode.PERMISSION_DENIED
        assert "/raftlog.v1.Admin/NoSuchMethod has no permission rule" in details


def test_a_stream_of_answers_is_refused_before_it_begins() -> None:
    watch: Any = grpc.unary_stream_rpc_method_handler(echo)
    request = metadata_pb2.WatchRequest()
    assert call("Metadata/Watch", request, FakeAuthorizer(DESCRIBE_CLUSTER).caller(), handler=watch) is request
    _, details = refused("Metadata/Watch", request, FakeAuthorizer().caller(), handler=watch)
    assert details.startswith("ClusterAuthorizationFailed: ")


def test_a_request_that_needs_much_leaves_others_their_turns() -> None:
    topics = [f"t{number}" for number in range(2_000)]
    read = [(Acl.READ, Acl.TOPIC, topic) for topic in topics]
    authorizer = FakeAuthorizer((Acl.DELETE, Acl.GROUP, "g"), *read)
    handler = Permissions(MetadataImage).rewrite(
        "/raftlog.v1.Group/DeleteOffsets", grpc.unary_unary_rpc_method_handler(echo)
    )
    request = DeleteOffsetsRequest(group_id="g", partitions=[TopicPartitions(topic=topic) for topic in topics])

    async def main() -> None:
        caller.set(authorizer.caller())
        async with counted_turns() as turns:
            assert await handler.unary_unary(request, FakeContext()) is request
            assert turns.count >= 3
        assert len(authorizer.asked) == 2_001

    asyncio.run(main())


def test_names_without_end_are_cut() -> None:
    authorizer = FakeAuthorizer()
    _, details = refused("Admin/DeleteTopic", admin_pb2.DeleteTopicRequest(name="x" * 500_000), authorizer.caller())
    assert len(details) < MAX_DETAILS
    assert [len(name) for _, _, name in authorizer.asked] == [MAX_NAME]


def test_decisions_are_kept_until_the_version_changes() -> None:
    read_a = (Acl.READ, Acl.TOPIC, "a")
    authorizer = FakeAuthorizer(read_a)
    decisions = Decisions.of(authorizer.caller(), Acl.READ, Acl.TOPIC)
    assert decisions is not None
    for _ in range(3):
        decisions.check("a")
        with pytest.raises(TopicAuthorizationFailed, match="may not READ b"):
            decisions.check("b")
    assert authorizer.asked == [read_a, (Acl.READ, Acl.TOPIC, "b")]
    authorizer.change((Acl.READ, Acl.TOPIC, "b"))
    assert not decisions.allow("a")
    assert decisions.allow("b")
    decisions.check_any()
    authorizer.change()
    with pytest.raises(TopicAuthorizationFailed):
        decisions.check_any()
    assert Decisions.of(Caller(), Acl.READ, Acl.TOPIC) is None


def test_a_refusal_is_made_once_and_raised_anew() -> None:
    class Counting(FakeAuthorizer):
        made = 0

        def refusal(self, *what: Any) -> AuthorizationError:
            self.made += 1
            return super().refusal(*what)

    authorizer = Counting()
    decisions = Decisions.of(authorizer.caller(), Acl.READ, Acl.TOPIC)
    assert decisions is not None
    raised = [decisions.refusal("a" * MAX_NAME + tail) for tail in ("", "b", "c")]
    assert authorizer.made == 1
    assert len(set(map(id, raised))) == 3, "each refusal must be an exception of its own, or tracebacks pile up in one"
    assert {(type(error), str(error)) for error in raised} == {
        (TopicAuthorizationFailed, f"User:alice may not READ {'a' * MAX_NAME}")
    }
    for number in range(3 * MAX_REFUSALS):
        decisions.refusal(str(number))
    assert len(decisions._refusals) <= MAX_REFUSALS
    assert str(decisions.refusal("7")) == "User:alice may not READ 7"


def test_lists_keep_what_is_allowed_in_its_order() -> None:
    def numbers(count: int) -> Iterator[str]:
        return (str(number) for number in range(count))

    async def main() -> None:
        authorizer = FakeAuthorizer(*((Acl.DESCRIBE, Acl.GROUP, name) for name in list(numbers(2_500))[::2]))
        decisions = Decisions.of(authorizer.caller(), Acl.DESCRIBE, Acl.GROUP, log=False)
        assert await allowed_of(decisions, list(numbers(2_500)), str) == list(numbers(2_500))[::2]
        assert authorizer.logged == []
        assert await allowed_of(None, ["a"], str) == ["a"]

    asyncio.run(main())


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
    role._config.grpc_health_enable = role._config.grpc_reflection_enable = False
    role._config.max_streams = role._config.max_streams_per_connection = 1
    role._log_service = LogService(MagicMock(), MagicMock(), MagicMock(), MagicMock())
    BrokerRole._make_server(role, MagicMock(), MagicMock())
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
    """Each of these has tests of its own; an addition needs tests, too."""
    assert {name.removeprefix("/raftlog.v1.") for name, rule in RULES.items() if rule is inside} == {
        "Log/Produce",
        "Log/Fetch",
        "Log/ListOffsets",
        "Log/OffsetForLeaderEpoch",
        "Log/DeleteRecords",
        "Metadata/Get",
        "Admin/DescribeTopicConfigs",
        "Group/Session",
        "Group/ListGroups",
        "Transaction/ListTransactions",
    }
    assert {name.removeprefix("/raftlog.v1.") for name, rule in RULES.items() if rule is anybody} == {
        "Admin/DescribeCluster",
        "Metadata/ApiVersions",
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
    ("Metadata/ApiVersions", metadata_pb2.ApiVersionsRequest(), []),
    ("Admin/DescribeQuorum", admin_pb2.AdminDescribeQuorumRequest(), [cluster(Acl.DESCRIBE)]),
    ("Admin/ElectLeaders", admin_pb2.ElectLeadersRequest(topic="a"), [cluster(Acl.ALTER)]),
    ("Admin/UnregisterBroker", admin_pb2.AdminUnregisterBrokerRequest(), [cluster(Acl.ALTER)]),
    ("Admin/AlterBroker", admin_pb2.AdminAlterBrokerRequest(), [cluster(Acl.ALTER)]),
    ("Admin/UpdateFeature", admin_pb2.AdminUpdateFeatureRequest(), [cluster(Acl.ALTER)]),
    ("Admin/DescribeReplicas", admin_pb2.DescribeReplicasRequest(), [cluster(Acl.DESCRIBE)]),
    ("Admin/AlterReassignments", admin_pb2.AdminAlterReassignmentsRequest(), [cluster(Acl.ALTER)]),
    ("Admin/DescribeClientQuotas", admin_pb2.DescribeClientQuotasRequest(), [cluster(Acl.DESCRIBE_CONFIGS)]),
    ("Admin/AlterClientQuotas", admin_pb2.AlterClientQuotasRequest(), [cluster(Acl.ALTER_CONFIGS)]),
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
    ("Security/DescribeRoles", security_pb2.DescribeRolesRequest(), [cluster(Acl.DESCRIBE)]),
    ("Security/AlterRoles", security_pb2.AlterRolesRequest(), [cluster(Acl.ALTER)]),
]


@pytest.mark.parametrize(("method", "request_", "needed"), CASES, ids=[case[0] for case in CASES])
def test_what_a_request_needs(method: str, request_: Any, needed: list[tuple[Need, ...]]) -> None:
    found = list(RULES[f"/raftlog.v1.{method}"](request_, IDS.get))
    ids = {need.name: need.topic_id for either in found for need in either if need.topic_id}
    assert all(IDS[topic_id] == name for name, topic_id in ids.items())
    assert [tuple(need._replace(topic_id=b"") for need in either) for either in found] == needed


def test_no_rule_is_without_a_case() -> None:
    cases = {f"/raftlog.v1.{method}" for method, _, _ in CASES}
    assert {method for method, rule in RULES.items() if rule is not inside} == cases


def test_the_services_handlers_are_as_the_descriptors_say() -> None:
    """The Log service makes its handlers itself: none is served that its descriptor does not have."""
    handlers: Any = LogService(MagicMock(), MagicMock(), MagicMock(), MagicMock()).handlers()
    for method in methods("raftlog.v1.Log"):
        details = MagicMock(method=f"/raftlog.v1.Log/{method.name}")
        assert isinstance(handlers.service(details), grpc.RpcMethodHandler), method.name
