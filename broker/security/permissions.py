"""The permissions that each call on the clients' listener needs, and the interceptor that checks them.

One table maps a method's full name to its rule. A rule yields the needs of a request; of each `Either` one need has to
be met. The rules are Kafka's ("Operations in Kafka", KIP-11, KIP-277, KIP-290, KIP-679), with these decisions:

- A missing permission refuses the whole call. Services that answer each partition separately also refuse each
  separately; their rule is `inside`, which leaves the check to the service. So does the rule of every stream.
- A sink of staged batches needs the permissions of a transactional id.
- This broker's metadata translates topic ids into names. An unknown id needs no permission: the handler uses the same
  metadata and answers UnknownTopicId to every caller.
- Configs of brokers and loggers belong to the cluster.

With an authorizer, a method that is not in the table is refused. The interceptor runs after the one that identifies the
caller; without an authorizer it costs one look-up of the caller.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import grpc

from broker.net.interceptors import RewrittenHandlers, preceded
from broker.security.caller import MAX_NAME, Caller, Operation, ResourceType, caller
from broker.turns import in_turns
from raftlog._client.connections import refuse
from raftlog._core.security.acls import CLUSTER_NAME
from raftlog.errors import AuthorizationError, ClusterAuthorizationFailed
from raftlog.v1.records_pb2 import ConfigResource
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import MetadataImage


class Need(NamedTuple):
    """One permission. `name` None: on at least one resource of that type (KIP-679)."""

    operation: Operation
    resource: ResourceType
    name: str | None
    topic_id: bytes = b""
    """What the request names the topic by; empty: by its name."""


Either = tuple[Need, ...]
"""Alternatives; a refusal names the first."""
NameOf = Callable[[bytes], str | None]
"""Returns the name of the topic with that id, None if this broker's metadata lacks it."""
Rule = Callable[[Any, NameOf], Iterable[Either]]


def anybody(request: Any, name_of: NameOf) -> Iterable[Either]:
    """Need no permission."""
    return ()


def inside(request: Any, name_of: NameOf) -> Iterable[Either]:
    """Leave the check to the service, which checks each part of a stream, or filters its answer."""
    return ()


# Building blocks of rules


def _cluster(operation: Operation) -> Rule:
    needed = ((Need(operation, Acl.CLUSTER, CLUSTER_NAME),),)
    return lambda request, name_of: needed


def _field(operation: Operation, resource: ResourceType, field: str) -> Rule:
    """Return the rule of a request that names one resource."""
    return lambda request, name_of: ((Need(operation, resource, getattr(request, field)),),)


def _fields(operation: Operation, resource: ResourceType, field: str) -> Rule:
    """Return the rule of a request that names several resources."""
    return lambda request, name_of: (
        (Need(operation, resource, name),) for name in dict.fromkeys(getattr(request, field))
    )


def _partitions(operation: Operation, field: str = "partitions") -> Rule:
    """Return the rule of a request whose parts name topics, by id or by name."""
    return lambda request, name_of: (
        (Need(operation, Acl.TOPIC, name, topic_id),)
        for name, topic_id in topic_names(getattr(request, field), name_of).items()
    )


def _all(*rules: Rule) -> Rule:
    """Return the rule that combines several."""
    return lambda request, name_of: (either for rule in rules for either in rule(request, name_of))


def topic_names(parts: Iterable[Any], name_of: NameOf) -> Mapping[str, bytes]:
    """Return the topics in the parts of a request: by name, the id that a part names it by, or b""."""
    names: dict[str, bytes] = {}
    for part in parts:
        name = name_of(part.topic_id) if part.topic_id else getattr(part, "topic", "")
        if name and (name not in names or not part.topic_id):
            names[name] = part.topic_id
    return names


# Rules of single methods


def _create_topic(request: Any, name_of: NameOf) -> Iterator[Either]:
    yield Need(Acl.CREATE, Acl.TOPIC, request.name), Need(Acl.CREATE, Acl.CLUSTER, CLUSTER_NAME)


def _configs(operation: Operation) -> Rule:
    def rule(request: Any, name_of: NameOf) -> Iterator[Either]:
        if request.resource.type == ConfigResource.TOPIC:
            yield (Need(operation, Acl.TOPIC, request.resource.name),)
        else:
            yield (Need(operation, Acl.CLUSTER, CLUSTER_NAME),)

    return rule


def _init_producer_id(request: Any, name_of: NameOf) -> Iterator[Either]:
    """Without a transactional id, for an idempotent producer, WRITE on any topic is enough (KIP-679)."""
    if request.transactional_id:
        yield (Need(Acl.WRITE, Acl.TRANSACTIONAL_ID, request.transactional_id),)
    else:
        yield Need(Acl.IDEMPOTENT_WRITE, Acl.CLUSTER, CLUSTER_NAME), Need(Acl.WRITE, Acl.TOPIC, None)


_TRANSACTION: Final = _field(Acl.WRITE, Acl.TRANSACTIONAL_ID, "transactional_id")
_SINK: Final = _field(Acl.WRITE, Acl.TRANSACTIONAL_ID, "sink_id")

_LOG: Final[dict[str, Rule]] = {
    "Produce": inside,  # WRITE topic, for each part; broker/partition/produce_session.py
    "Fetch": inside,  # READ topic, for each subscription as long as it lasts; broker/partition/fetch_session.py
    "ListOffsets": inside,  # DESCRIBE topic, for each partition; broker/net/services/log.py
    "OffsetForLeaderEpoch": inside,  # DESCRIBE topic, likewise
    "DeleteRecords": inside,  # DELETE topic, likewise
}
_METADATA: Final[dict[str, Rule]] = {
    "Get": inside,  # DESCRIBE topic: others are left out, or answered with an error if they are named
    "ApiVersions": anybody,
    "Watch": _cluster(Acl.DESCRIBE),  # and never credentials; broker/net/services/metadata.py
}
_ADMIN: Final[dict[str, Rule]] = {
    "CreateTopic": _create_topic,
    "DeleteTopic": _field(Acl.DELETE, Acl.TOPIC, "name"),
    "CreatePartitions": _field(Acl.ALTER, Acl.TOPIC, "topic"),
    "DescribeConfigs": _configs(Acl.DESCRIBE_CONFIGS),
    "DescribeTopicConfigs": inside,  # DESCRIBE_CONFIGS topic, for each topic
    "AlterConfigs": _configs(Acl.ALTER_CONFIGS),
    "DescribeLogDirs": _cluster(Acl.DESCRIBE),
    "DescribeCluster": anybody,
    "DescribeQuorum": _cluster(Acl.DESCRIBE),
    "ElectLeaders": _cluster(Acl.ALTER),
    "UnregisterBroker": _cluster(Acl.ALTER),
    "AlterBroker": _cluster(Acl.ALTER),
    "UpdateFeature": _cluster(Acl.ALTER),
    "DescribeReplicas": _cluster(Acl.DESCRIBE),
    "AlterReassignments": _cluster(Acl.ALTER),
    "DescribeClientQuotas": _cluster(Acl.DESCRIBE_CONFIGS),
    "AlterClientQuotas": _cluster(Acl.ALTER_CONFIGS),
}
_GROUP: Final[dict[str, Rule]] = {
    "FindCoordinator": _field(Acl.DESCRIBE, Acl.GROUP, "group_id"),
    "Session": inside,  # READ group; READ topics of commits, DESCRIBE subscribed ones; broker/net/services/groups.py
    "CommitOffsets": _field(Acl.READ, Acl.GROUP, "group_id"),  # and READ topic, inside, for each partition
    "CommitTransactionOffsets": _all(
        _TRANSACTION, _field(Acl.READ, Acl.GROUP, "group_id"), _partitions(Acl.READ, "offsets")
    ),
    # And DESCRIBE topic, inside, for each named partition; with `all` the others are left out.
    "FetchOffsets": _field(Acl.DESCRIBE, Acl.GROUP, "group_id"),
    "DeleteOffsets": _all(_field(Acl.DELETE, Acl.GROUP, "group_id"), _partitions(Acl.READ)),
    "ListGroups": inside,  # DESCRIBE cluster shows all groups, DESCRIBE group that group
    "DescribeGroups": _fields(Acl.DESCRIBE, Acl.GROUP, "group_ids"),  # and DESCRIBE on all topics in the answer
    "DeleteGroups": _fields(Acl.DELETE, Acl.GROUP, "group_ids"),
}
_TRANSACTIONS: Final[dict[str, Rule]] = {
    "InitProducerId": _init_producer_id,
    "FindCoordinator": _field(Acl.DESCRIBE, Acl.TRANSACTIONAL_ID, "id"),
    "AddToTransaction": _all(_TRANSACTION, _partitions(Acl.WRITE), _fields(Acl.READ, Acl.GROUP, "group_ids")),
    "EndTransaction": _TRANSACTION,
    "InitStage": _all(_SINK, _partitions(Acl.WRITE)),
    "AddToStage": _all(_SINK, _partitions(Acl.WRITE)),
    "AbortStages": _SINK,
    "CommitBatch": _SINK,
    "LastBatch": _SINK,
    "ListTransactions": inside,  # shows those with DESCRIBE
    "DescribeTransactions": _fields(Acl.DESCRIBE, Acl.TRANSACTIONAL_ID, "transactional_ids"),  # shows topics likewise
    "AbortTransaction": _TRANSACTION,
    "DescribeProducers": _partitions(Acl.READ),
    "AbortHanging": _cluster(Acl.ALTER),
}
_NODE: Final[dict[str, Rule]] = {
    "DescribeNode": _cluster(Acl.DESCRIBE),  # with its configs only if the caller has DESCRIBE_CONFIGS
}
_SECURITY: Final[dict[str, Rule]] = {
    "Authenticate": anybody,
    "DescribeUsers": _cluster(Acl.DESCRIBE),
    "AlterUsers": _cluster(Acl.ALTER),
    "DescribeAcls": _cluster(Acl.DESCRIBE),
    "CreateAcls": _cluster(Acl.ALTER),
    "DeleteAcls": _cluster(Acl.ALTER),
    "DescribeRoles": _cluster(Acl.DESCRIBE),
    "AlterRoles": _cluster(Acl.ALTER),
}

RULES: Final[Mapping[str, Rule]] = {
    f"/raftlog.v1.{service}/{method}": rule
    for service, rules in (
        ("Log", _LOG),
        ("Metadata", _METADATA),
        ("Admin", _ADMIN),
        ("Group", _GROUP),
        ("Transaction", _TRANSACTIONS),
        ("Node", _NODE),
        ("Security", _SECURITY),
    )
    for method, rule in rules.items()
}

TOOLS: Final[Mapping[str, Rule]] = {
    "/grpc.health.v1.Health/Check": anybody,
    "/grpc.health.v1.Health/List": anybody,
    "/grpc.health.v1.Health/Watch": anybody,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": anybody,
}
"""Of gRPC's own services, which a key each turns on. They show the broker's state and the contract in proto/, which
are no secrets; callers must be identified as for any call."""


MAX_DETAILS: Final = 2_000
"""Characters of a refusal, which travels in a header."""


class Permissions(RewrittenHandlers):
    """Aborts with PERMISSION_DENIED and `ErrorClass: text` before the handler sees the request."""

    def __init__(self, image: Callable[[], MetadataImage], rules: Mapping[str, Rule] = RULES) -> None:
        super().__init__()
        self._image = image
        self._rules = {**TOOLS, **rules}

    def rewrite(self, method: str, handler: Any) -> Any:
        """Return the handler with a check of the request's needs before it."""
        rule = self._rules.get(method)
        if rule in (anybody, inside):
            return handler
        if rule is None:
            rule = _no_rule(method)
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=self._before(rule, handler.unary_unary))
        if handler.unary_stream is not None and not inspect.isasyncgenfunction(handler.unary_stream):
            return handler._replace(unary_stream=self._before(rule, handler.unary_stream))

        async def refuse(context: Any) -> None:
            if caller.get().authorizer is not None:
                await _abort(context, _no_rule_error(method))

        return preceded(handler, refuse)  # a stream whose requests no rule can check

    def _before(self, rule: Rule, behavior: Any) -> Any:
        async def permitted(request: Any, context: Any) -> Any:
            who = caller.get()
            if who.authorizer is not None and (refusal := await self._refusal(who, rule, request)) is not None:
                await _abort(context, refusal)
            return await behavior(request, context)

        return permitted

    async def _refusal(self, who: Caller, rule: Rule, request: Any) -> AuthorizationError | None:
        try:
            async for either in in_turns(rule(request, self._name_of)):
                check(who, either)
        except AuthorizationError as refusal:
            return refusal
        return None

    def _name_of(self, topic_id: bytes) -> str | None:
        topic = self._image().topics.get(topic_id)
        return None if topic is None else topic.name


def check(who: Caller, either: Either) -> None:
    """Check that one of these needs is met.

    Raises:
        AuthorizationError: none is met; the error names the first.
    """
    if len(either) > 1 and any(_may(who, need) for need in either):
        return
    first = either[0]
    assert first.name is not None, "a refusal names a resource"
    who.check(first.operation, first.resource, first.name[:MAX_NAME], first.topic_id)


def _may(who: Caller, need: Need) -> bool:
    if need.name is None:
        return who.may_any(need.operation, need.resource)
    return who.may(need.operation, need.resource, need.name[:MAX_NAME], log=False)


def _no_rule(method: str) -> Rule:
    def rule(request: Any, name_of: Any) -> Any:
        raise _no_rule_error(method)

    return rule


def _no_rule_error(method: str) -> AuthorizationError:
    return ClusterAuthorizationFailed(f"{method} has no permission rule, so it is refused: this is a bug of the broker")


async def _abort(context: Any, refusal: AuthorizationError) -> None:
    details = f"{type(refusal).__name__}: {refusal}"
    await refuse(context, grpc.StatusCode.PERMISSION_DENIED, refusal, details[:MAX_DETAILS])
