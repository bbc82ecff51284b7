"""One request that names very many things does not hold up the event loop, and names a bounded number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.config.config import BrokerConfig
from broker.kafka import errors, messages
from broker.kafka.admin import AdminApis
from broker.kafka.apis import Apis, Services
from broker.kafka.codec import Fields
from broker.kafka.fetch import Refusal, Sessions
from broker.kafka.parts import MAX_NAMED
from broker.kafka.produce import Produce
from broker.kafka.transactions import TransactionApis
from broker.net.services.admin import AdminService
from broker.net.services.groups import GroupService
from broker.net.services.log import LogService
from broker.net.services.transactions import TransactionService
from broker.observability.counters import Counters
from broker.quotas.heavy_work import HeavyWork
from broker.security.caller import Caller
from raftlog.errors import InvalidRequestError
from raftlog.v1 import admin_pb2, group_pb2, log_pb2, transaction_pb2
from raftmeta.image import MetadataImage
from tests.support.broker_parts import HeldDisk
from tests.support.fake_authorizer import FakeAuthorizer
from tests.support.loop_turns import calls_in_a_turn

MANY = MAX_NAMED
MAX_CALLS = MANY // 2
"""Of functions in one turn: a millisecond or two. Each of MANY parts takes more than one."""


class Answers:
    """The services, as far as their answers have a part for each of the request's."""

    async def list_offsets(self, request: log_pb2.ListOffsetsRequest) -> log_pb2.ListOffsetsResponse:
        return log_pb2.ListOffsetsResponse(results=[log_pb2.ListOffsetsResult()] * len(request.partitions))

    async def OffsetForLeaderEpoch(self, request: Any, context: object) -> log_pb2.OffsetForLeaderEpochResponse:
        return log_pb2.OffsetForLeaderEpochResponse(results=[log_pb2.EpochEndOffset()] * len(request.partitions))

    async def DeleteRecords(self, request: Any, context: object) -> log_pb2.DeleteRecordsResponse:
        return log_pb2.DeleteRecordsResponse(results=[log_pb2.DeleteRecordsResult()] * len(request.partitions))

    async def CommitOffsets(self, request: Any, context: object) -> group_pb2.CommitOffsetsResponse:
        return group_pb2.CommitOffsetsResponse(results=[group_pb2.CommitOffsetResult()] * len(request.offsets))

    async def DescribeGroups(self, request: Any, context: object) -> group_pb2.DescribeGroupsResponse:
        return group_pb2.DescribeGroupsResponse(groups=[group_pb2.GroupDescription()])

    async def DescribeQuorum(self, request: Any, context: object) -> admin_pb2.AdminDescribeQuorumResponse:
        return admin_pb2.AdminDescribeQuorumResponse()

    async def DescribeProducers(self, request: Any, context: object) -> transaction_pb2.DescribeProducersResponse:
        answer = transaction_pb2.DescribeProducersResponse()
        for _ in request.partitions:
            answer.partitions.add()
        return answer


def config() -> BrokerConfig:
    return BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data"})


def handlers(image: MetadataImage) -> Any:
    answers: Any = Answers()
    services = Services(
        cast(LogService, answers),
        cast(GroupService, answers),
        cast(TransactionService, answers),
        cast(AdminService, answers),
    )
    apis = Apis(services, config(), lambda: image)
    verifier: Any = None
    return {
        **apis.handlers,
        **AdminApis(apis, services, config(), lambda: image).handlers,
        **TransactionApis(apis, services, verifier).handlers,
    }


def known(name: str) -> MetadataImage:
    """An image with a topic, as far as its id is asked for."""
    image: Any = SimpleNamespace(
        topic_id_by_name={name: b"t" * 16}, topics={}, topic=lambda _: None, brokers={}, cluster_id="c"
    )
    return cast(MetadataImage, image)


def of_one_topic(name: str, index: str, **fields: Any) -> Fields:
    return {"topics": [{name: "t", "partitions": [{index: each, **fields} for each in range(MANY)]}]}


REQUESTS: list[Any] = [
    pytest.param(key, request, id=f"{messages.api_name(key)}-{number}")
    for number, (key, request) in enumerate(
        (
            (
                messages.LIST_OFFSETS,
                {"isolation_level": 0, **of_one_topic("name", "partition_index", current_leader_epoch=0, timestamp=-1)},
            ),
            (
                messages.OFFSET_FOR_LEADER_EPOCH,
                of_one_topic("topic", "partition", current_leader_epoch=0, leader_epoch=0),
            ),
            (messages.DELETE_RECORDS, of_one_topic("name", "partition_index", offset=0)),
            (messages.DESCRIBE_PRODUCERS, {"topics": [{"name": "t", "partition_indexes": list(range(MANY))}]}),
            (messages.METADATA, {"topics": [{"name": f"t{each}", "topic_id": bytes(16)} for each in range(MANY)]}),
            (messages.DESCRIBE_GROUPS, {"groups": [f"g{each}" for each in range(MANY)]}),
            (
                messages.OFFSET_COMMIT,
                {
                    "group_id": "g",
                    "member_id": "",
                    "generation_id_or_member_epoch": -1,
                    "group_instance_id": None,
                    **of_one_topic(
                        "name",
                        "partition_index",
                        committed_offset=0,
                        committed_leader_epoch=0,
                        committed_metadata=None,
                    ),
                },
            ),
            (
                messages.ALTER_PARTITION_REASSIGNMENTS,
                {"allow_replication_factor_change": False, **of_one_topic("name", "partition_index", replicas=[])},
            ),
            (
                messages.DESCRIBE_QUORUM,
                {
                    "topics": [
                        {
                            "topic_name": "__cluster_metadata",
                            "partitions": [{"partition_index": each} for each in range(MANY)],
                        }
                    ]
                },
            ),
            (
                messages.WRITE_TXN_MARKERS,
                {
                    "markers": [
                        {
                            "producer_id": 1,
                            "producer_epoch": 1,
                            "transaction_result": False,
                            "topics": [{"name": "t", "partition_indexes": list(range(MANY))}],
                        }
                    ]
                },
            ),
            (
                messages.CREATE_TOPICS,
                {
                    "timeout_ms": 1,
                    "validate_only": False,
                    "topics": [
                        {"name": "t", "configs": [{"name": f"c{each}", "value": "1"} for each in range(MANY)]},
                    ],
                },
            ),
        )
    )
]


@pytest.mark.parametrize("is_allowed", [True, False])
@pytest.mark.parametrize(("key", "request_"), REQUESTS)
async def test_other_clients_have_their_turns(key: int, request_: Fields, is_allowed: bool) -> None:
    who = Caller(authorizer=None if is_allowed else FakeAuthorizer())
    defaults = {"include_authorized_operations": False, "include_topic_authorized_operations": False}
    defaults["include_cluster_authorized_operations"] = False

    async def ask() -> None:
        try:
            await handlers(known("t"))[key]({**defaults, **request_}, 1, who)
        except (AttributeError, KeyError):  # what stands for the services can do no more
            assert is_allowed

    _, calls = await calls_in_a_turn(ask())
    assert calls <= MAX_CALLS


async def test_a_produce_to_very_many_partitions_lets_others_have_their_turns() -> None:
    replica_manager: Any = SimpleNamespace(counters=Counters())
    produce = Produce(replica_manager, lambda: known("t"), HeavyWork(HeldDisk()), 1_000)
    parts = [{"index": each, "records": b""} for each in range(MANY)]
    request = {"acks": -1, "timeout_ms": 1, "transactional_id": None}
    topics = [{"name": "t", "topic_id": bytes(16), "partition_data": parts}]
    begun, calls = await calls_in_a_turn(produce.begin({**request, "topic_data": topics}, 8, Caller()))
    (topic,) = (await begun)["responses"]
    assert len(topic["partition_responses"]) == MANY
    assert calls <= 2 * MAX_CALLS


@pytest.mark.parametrize(
    "key",
    [messages.LIST_OFFSETS, messages.OFFSET_FOR_LEADER_EPOCH, messages.DELETE_RECORDS, messages.DESCRIBE_PRODUCERS],
)
async def test_a_request_names_a_bounded_number_of_partitions(key: int) -> None:
    parts = [{"partition": each, "partition_index": each} for each in range(MAX_NAMED // 2 + 1)]
    topics = [
        {"name": name, "topic": name, "partitions": parts, "partition_indexes": [*range(len(parts))]} for name in "tu"
    ]
    with pytest.raises(InvalidRequestError, match="at most 10000 partitions, not 10002"):
        await handlers(known("t"))[key]({"topics": topics, "isolation_level": 0}, 1, Caller())


@pytest.mark.parametrize("key", [messages.METADATA, messages.DESCRIBE_TOPIC_PARTITIONS])
async def test_a_request_names_a_bounded_number_of_topics(key: int) -> None:
    topics = [{"name": f"t{each}", "topic_id": bytes(16)} for each in range(MAX_NAMED + 1)]
    with pytest.raises(InvalidRequestError, match="at most 10000 topics, not 10001"):
        await handlers(known("t"))[key]({"topics": topics}, 1, Caller())


def test_a_fetch_session_has_a_bounded_number_of_partitions() -> None:
    def asked(session_id: int, epoch: int, numbers: range) -> Fields:
        fields = {"current_leader_epoch": 0, "fetch_offset": 0, "partition_max_bytes": 1}
        parts = [{"partition": each, **fields} for each in numbers]
        topics = [{"topic": "t", "topic_id": b"t" * 16, "partitions": parts}]
        return {"session_id": session_id, "session_epoch": epoch, "topics": topics, "forgotten_topics_data": []}

    sessions = Sessions(lambda: 0.0)
    with pytest.raises(InvalidRequestError, match="at most 10000 partitions"):
        sessions.enter(asked(0, 0, range(MAX_NAMED + 1)), 12, "User:a")
    session, parts = sessions.enter(asked(0, 0, range(MAX_NAMED)), 12, "User:a")
    assert session is not None
    assert len(parts) == MAX_NAMED
    with pytest.raises(Refusal) as refused:
        sessions.enter(asked(session.id, 1, range(MAX_NAMED, MAX_NAMED + 1)), 12, "User:a")
    assert refused.value.code == errors.FETCH_SESSION_ID_NOT_FOUND
    assert (len(sessions), sessions.cached) == (0, 0)
