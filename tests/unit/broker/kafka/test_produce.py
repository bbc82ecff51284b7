"""Several requests of an idempotent Kafka producer under way, the first of which is refused for the moment.

Java's clients and librdkafka send both again, in order, and give neither up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from broker.kafka import errors
from broker.kafka.produce import Produce
from broker.partition.partition import Partition
from broker.quotas.heavy_work import HeavyWork
from broker.security.caller import Caller
from replication.leader import Membership
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, HeldDisk, Parts, image_with
from tests.support.kafka_batches import to_kafka

ENOUGH, TOO_FEW = (Membership((1, 2), isr, 1, min_isr) for isr, min_isr in (((1,), 1), ((1,), 2)))
Send = Callable[..., Awaitable[int]]


def run(tmp_path: Path, scenario: Callable[[Send, Partition], Awaitable[None]]) -> None:
    """Run with a partition that node 1 leads; `send` returns the code of the answer to one batch."""

    async def main() -> None:
        parts = Parts(tmp_path)
        parts.image = image_with(1, offset=1, replicas=(1, 2), isr=(1,))
        async with parts:
            partition = parts.registry.find(TOPIC_ID, 0)
            partition.lead(3, ENOUGH)
            produce = Produce(parts.registry, lambda: parts.image, HeavyWork(HeldDisk()), 1_000)

            async def send(sequence: int, epoch: int = 0) -> int:
                (records,) = to_kafka(
                    batch_of(b"%d" % sequence, producer_id=7, producer_epoch=epoch, base_sequence=sequence)
                )
                request: dict[str, Any] = {"acks": -1, "timeout_ms": 1_000, "transactional_id": None}
                topic = {"name": "t", "topic_id": TOPIC_ID, "partition_data": [{"index": 0, "records": records}]}
                begun = await produce.begin({**request, "topic_data": [topic]}, 8, Caller())
                (answered,) = (await begun)["responses"]
                (answer,) = answered["partition_responses"]
                return int(answer.get("error_code", errors.NONE))

            await scenario(send, partition)

    asyncio.run(main())


def test_a_batch_behind_a_refused_one_does_not_end_its_producer_s_epoch(tmp_path: Path) -> None:
    async def scenario(send: Send, partition: Partition) -> None:
        assert await send(0) == errors.NONE
        partition.lead(3, TOO_FEW)
        assert await send(1) == errors.NOT_ENOUGH_REPLICAS
        partition.lead(3, ENOUGH)
        assert await send(2) == errors.NOT_ENOUGH_REPLICAS, "it must be sent again, behind the first"
        assert await send(0) == errors.NONE, "a batch that is in the log must still be acknowledged"
        assert await send(2) == errors.NOT_ENOUGH_REPLICAS
        assert [await send(sequence) for sequence in (1, 2, 3)] == [errors.NONE] * 3
        assert partition.log_end_offset == 4

    run(tmp_path, scenario)


def test_a_gap_that_no_refusal_explains_ends_the_epoch(tmp_path: Path) -> None:
    """As ADR 0012 has it; also once the refused batch is in the log, or the term of that leader is over."""

    async def scenario(send: Send, partition: Partition) -> None:
        partition.lead(3, TOO_FEW)
        assert await send(0) == errors.NOT_ENOUGH_REPLICAS
        partition.lead(3, ENOUGH)
        assert await send(0) == errors.NONE
        assert await send(2) == errors.OUT_OF_ORDER_SEQUENCE_NUMBER
        partition.lead(3, TOO_FEW)
        assert await send(0, epoch=1) == errors.NOT_ENOUGH_REPLICAS
        partition.lead(4, ENOUGH)
        assert await send(1, epoch=1) == errors.OUT_OF_ORDER_SEQUENCE_NUMBER

    run(tmp_path, scenario)
