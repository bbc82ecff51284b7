"""Descriptions of producers: a short request has no answer of gigabytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from broker.kafka import errors, messages
from broker.kafka.apis import Apis, Services
from broker.kafka.transactions import TransactionApis
from broker.net.services import transactions
from broker.net.services.transactions import TransactionService
from broker.partition.partition import ActiveProducer
from broker.security.caller import Caller
from raftlog.errors import BrokerOverloaded, InvalidRequestError
from raftlog.v1 import transaction_pb2 as pb
from raftlog.v1.group_pb2 import TopicPartitions
from tests.unit.broker.kafka.test_turns import config, known

TOPIC = b"t" * 16


class Counted:
    """A partition with producers, which says how often these were described."""

    def __init__(self, number: int, producers: int) -> None:
        self.topic_partition = f"t-{number}"
        self.log = SimpleNamespace(producers=range(producers))
        self.last_stable_offset = self.high_watermark = 0
        self.described = 0

    def check_serving(self) -> None: ...

    def describe_producers(self) -> list[ActiveProducer]:
        self.described += 1
        return [ActiveProducer(number, 0, 0, 0, -1, 0) for number in self.log.producers]


def service(*partitions: Counted) -> TransactionService:
    unused: Any = None
    found: Any = lambda topic_id, number: partitions[number]  # noqa: E731 - a port
    return TransactionService(unused, unused, unused, unused, unused, unused, found)


async def describe(of: TransactionService, *numbers: int) -> list[pb.PartitionProducers]:
    context: Any = None
    request = pb.DescribeProducersRequest(partitions=[TopicPartitions(topic_id=TOPIC, partitions=numbers)])
    return list((await of.DescribeProducers(request, context)).partitions)


async def test_a_partition_is_described_once() -> None:
    """One with 100,000 producers, named a thousand times in 1 KB, was an answer of 4 GB."""
    partition = Counted(0, 3)
    answers = await describe(service(partition), *[0] * 1_000)
    assert {answer.error.code for answer in answers} == {InvalidRequestError.code}
    assert not partition.described
    (answer,) = await describe(service(partition), 0)
    assert [each.producer_id for each in answer.producers] == [0, 1, 2]


async def test_an_answer_has_so_many_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "MAX_PRODUCERS", 10)
    partitions = [Counted(0, 6), Counted(1, 5), Counted(2, 4), Counted(3, 11)]
    answers = await describe(service(*partitions), 0, 1, 2, 3)
    assert [len(each.producers) for each in answers] == [6, 0, 4, 0]
    assert [each.error.code for each in answers] == [0, BrokerOverloaded.code, 0, BrokerOverloaded.code]
    assert [each.described for each in partitions] == [1, 0, 1, 0]
    assert "describe it in another request" in answers[1].error.message
    (rest,) = await describe(service(*partitions), 1)
    assert len(rest.producers) == 5, "clients ask for the others again"


async def test_an_answer_to_a_kafka_client_has_a_bound_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.kafka.transactions.MAX_PRODUCERS", 1_000)
    monkeypatch.setattr("broker.kafka.transactions.DESCRIBED_AT_A_TIME", 2)
    partitions = [Counted(number, 400) for number in range(9)]
    unused: Any = None
    services = Services(unused, unused, service(*partitions), unused)
    apis = Apis(services, config(), lambda: known("t"))
    handler = TransactionApis(apis, services, unused).handlers[messages.DESCRIBE_PRODUCERS]
    request = {"topics": [{"name": "t", "partition_indexes": list(range(9))}]}
    answer = await handler(request, 0, Caller("User:a", "127.0.0.1"))
    rows = answer["topics"][0]["partitions"]
    assert [len(each["active_producers"]) for each in rows] == [400] * 4 + [0] * 5
    assert {each["error_code"] for each in rows[4:]} == {errors.code_of(BrokerOverloaded(""))}
