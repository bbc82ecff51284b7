"""What each call on the clients' listener needs: one table, by the method's full name.

A rule looks at a request and yields what it needs: of each `Either` one need has to be met. It is Kafka's ("Operations
in Kafka", KIP-11, KIP-277, KIP-290, KIP-679), with these answers of its own:

- A call is refused as a whole if anything may not be used that the rule names. Where a client asks for the partitions
  of several topics at once and each is answered by itself, so is each refused: those are `inside` the service.
- A sink of staged batches is a transactional id.
- Topic ids are turned into names with the metadata of this broker. An id that it does not know needs nothing: the
  handler goes by the same metadata and answers UnknownTopicId, to whoever asks.
- Configs of brokers and loggers are the cluster's.

A method that is not in the table is refused to everybody whom an authorizer looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from broker.security.caller import Operation, ResourceType
from raftlog.v1.records_pb2 import ConfigResource
from raftlog.v1.security_pb2 import Acl
from raftmeta.acls import CLUSTER_NAME


class Need(NamedTuple):
    """One permission. `name` None: with any resource of that type will do (KIP-679)."""

    operation: Operation
    resource: ResourceType
    name: str | None


Either = tuple[Need, ...]
"""One of them is enough; a refusal speaks of the first."""
NameOf = Callable[[bytes], str | None]
"""The name of the topic with an id, as far as this broker has heard."""
Rule = Callable[[Any, NameOf], Iterable[Either]]


def anybody(request: Any, name_of: NameOf) -> Iterable[Either]:
    """Nothing is needed."""
    return ()


def inside(request: Any, name_of: NameOf) -> Iterable[Either]:
    """The service looks itself: at each part of a stream, or at what an answer may show."""
    return ()


# What rules are made of


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
        (Need(operation, Acl.TOPIC, name),) for name in topic_names(getattr(request, field), name_of)
    )


def _all(*rules: Rule) -> Rule:
    """Return the rule of a request to which several apply."""
    return lambda request, name_of: (either for rule in rules for either in rule(request, name_of))


def topic_names(parts: Iterable[Any], name_of: NameOf) -> Iterable[str]:
    """Return the topics that parts of a request are about, each once; those without an id by their name."""
    names: dict[str, None] = {}
    for part in parts:
        name = name_of(part.topic_id) if part.topic_id else getattr(part, "topic", "")
        if name:
            names[name] = None
    return names


# Rules of their own


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
    """Without a transactional id it is for an idempotent producer: who may write anywhere may have one (KIP-679)."""
    if request.transactional_id:
        yield (Need(Acl.WRITE, Acl.TRANSACTIONAL_ID, request.transactional_id),)
    else:
        yield Need(Acl.IDEMPOTENT_WRITE, Acl.CLUSTER, CLUSTER_NAME), Need(Acl.WRITE, Acl.TOPIC, None)


_TRANSACTION: Final = _field(Acl.WRITE, Acl.TRANSACTIONAL_ID, "transactional_id")
_SINK: Final = _field(Acl.WRITE, Acl.TRANSACTIONAL_ID, "sink_id")

_LOG: Final[dict[str, Rule]] = {
    "Produce": inside,  # WRITE topic, for each part; broker/produce_session.py
    "Fetch": inside,  # READ topic, for each subscription and as long as it stands; broker/fetch_session.py
    "ListOffsets": inside,  # DESCRIBE topic, for each partition; services/log.py
    "OffsetForLeaderEpoch": inside,  # DESCRIBE topic, likewise
    "DeleteRecords": inside,  # DELETE topic, likewise
}
_METADATA: Final[dict[str, Rule]] = {
    "Get": inside,  # DESCRIBE topic: others are left out, or an error where they are named
    "Watch": _cluster(Acl.DESCRIBE),  # and no credentials; services/metadata.py
}
_ADMIN: Final[dict[str, Rule]] = {
    "CreateTopic": _create_topic,
    "DeleteTopic": _field(Acl.DELETE, Acl.TOPIC, "name"),
    "CreatePartitions": _field(Acl.ALTER, Acl.TOPIC, "topic"),
    "DescribeConfigs": _configs(Acl.DESCRIBE_CONFIGS),
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
}
_GROUP: Final[dict[str, Rule]] = {
    "FindCoordinator": _field(Acl.DESCRIBE, Acl.GROUP, "group_id"),
    "Session": inside,  # READ group; READ topics of commits, DESCRIBE subscribed ones; services/group_permissions.py
    "CommitOffsets": _field(Acl.READ, Acl.GROUP, "group_id"),  # and READ topic, inside, for each partition
    "CommitTransactionOffsets": _all(
        _TRANSACTION, _field(Acl.READ, Acl.GROUP, "group_id"), _partitions(Acl.READ, "offsets")
    ),
    # And DESCRIBE topic, inside, for each partition that is named; with `all` the others are left out.
    "FetchOffsets": _field(Acl.DESCRIBE, Acl.GROUP, "group_id"),
    "DeleteOffsets": _all(_field(Acl.DELETE, Acl.GROUP, "group_id"), _partitions(Acl.READ)),
    "ListGroups": inside,  # DESCRIBE cluster sees all, DESCRIBE group that one
    "DescribeGroups": _fields(Acl.DESCRIBE, Acl.GROUP, "group_ids"),  # and DESCRIBE of all topics that it would show
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
    "ListTransactions": inside,  # those that may be described
    "DescribeTransactions": _fields(Acl.DESCRIBE, Acl.TRANSACTIONAL_ID, "transactional_ids"),  # their topics likewise
    "AbortTransaction": _TRANSACTION,
    "DescribeProducers": _partitions(Acl.READ),
    "AbortHanging": _cluster(Acl.ALTER),
}
_NODE: Final[dict[str, Rule]] = {
    "DescribeNode": _cluster(Acl.DESCRIBE),  # its configs only with DESCRIBE_CONFIGS
}
_SECURITY: Final[dict[str, Rule]] = {
    "Authenticate": anybody,
    "DescribeUsers": _cluster(Acl.DESCRIBE),
    "AlterUsers": _cluster(Acl.ALTER),
    "DescribeAcls": _cluster(Acl.DESCRIBE),
    "CreateAcls": _cluster(Acl.ALTER),
    "DeleteAcls": _cluster(Acl.ALTER),
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
