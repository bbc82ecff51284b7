"""The interceptor: who lacks something is refused before the handler is called, and nobody else notices it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from broker.security.caller import Caller, caller
from broker.security.decisions import MAX_NAME, MAX_REFUSALS, Decisions, allowed_of
from broker.security.permissions import MAX_DETAILS, Permissions
from raftlog.errors import AuthorizationError, TopicAuthorizationFailed
from raftlog.v1 import admin_pb2, metadata_pb2, transaction_pb2
from raftlog.v1.group_pb2 import DeleteOffsetsRequest, TopicPartitions
from raftlog.v1.security_pb2 import Acl
from raftmeta.acls import CLUSTER_NAME
from raftmeta.image import MetadataImage
from tests.support.fake_authorizer import FakeAuthorizer
from tests.support.memory_metadata import MemoryMetadata
from tests.support.metadata import create_topic, uuid_of
from tests.support.turns import counted_turns

CREATE_CLUSTER = (Acl.CREATE, Acl.CLUSTER, CLUSTER_NAME)
DESCRIBE_CLUSTER = (Acl.DESCRIBE, Acl.CLUSTER, CLUSTER_NAME)


class Aborted(Exception):
    """What a context raises."""


class FakeContext:
    """A call's context that can be aborted."""

    async def abort(self, status: grpc.StatusCode, details: str) -> None:
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
    """Return what the handler behind the interceptor returns."""
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
    assert "may not READ b" in refused("Transaction/DescribeProducers", both, only_a, image=lambda: image)[1]


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
        assert "nothing says who may call /raftlog.v1.Admin/NoSuchMethod" in details


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
    assert len(set(map(id, raised))) == 3, "else tracebacks pile up in it"
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
