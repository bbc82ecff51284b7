"""Whom a coordinator asks where partitions end, and what it makes of answers that do not come."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from broker.observability.group_lag import Ends
from broker.observability.leader_offsets import AT_A_TIME, LeaderOffsets
from broker.services.log import EARLIEST
from raftlog.errors import NotLeader, to_wire
from raftlog.v1 import log_pb2
from raftmeta.image import NO_LEADER, MetadataImage

TOPIC = b"t" * 16
LEADERS = {0: 1, 1: 1, 2: 2, 3: NO_LEADER}


def image() -> MetadataImage:
    def partition(topic_id: bytes, number: int) -> Any:
        return SimpleNamespace(leader=LEADERS.get(number, 1)) if topic_id == TOPIC else None

    return cast(MetadataImage, SimpleNamespace(partition=partition))


class Here:
    """Broker 1: every partition has offsets 5 to 5 + its number; number 1 is refused."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def answer(self, request: log_pb2.ListOffsetsRequest) -> log_pb2.ListOffsetsResponse:
        self.sizes.append(len(request.partitions))
        response = log_pb2.ListOffsetsResponse()
        for part in request.partitions:
            if part.partition == 1:
                response.results.add(error=to_wire(NotLeader("not any more")))
            elif part.HasField("at_offset"):
                response.results.add(offset=part.at_offset, timestamp_ms=1_000 if part.at_offset < 9 else -1)
            else:
                response.results.add(offset=5 if part.timestamp_ms == EARLIEST else 5 + part.partition)
        return response


def test_what_is_not_answered_is_left_out() -> None:
    async def scenario() -> None:
        leaders = LeaderOffsets(1, image, Here().answer, lambda broker_id: None)
        wanted = [(TOPIC, number) for number in (0, 1, 2, 3)]
        assert await leaders.ends([*wanted, (b"g" * 16, 0), (TOPIC, 4)]) == {
            (TOPIC, 0): Ends(5, 5),
            (TOPIC, 4): Ends(5, 9),
        }, "1 is refused, where 2 is led is not known, 3 has no leader, and the topic of the last but one is gone"
        found = await leaders.written_ms({(TOPIC, 0): 7, (TOPIC, 1): 7, (TOPIC, 4): 9})
        assert found == {(TOPIC, 0): 1_000}, "no record is left at 9"
        await leaders.close()

    asyncio.run(scenario())


def test_a_leader_is_asked_in_pieces() -> None:
    async def scenario() -> None:
        here = Here()
        leaders = LeaderOffsets(1, image, here.answer, lambda broker_id: None)
        found = await leaders.ends([(TOPIC, number) for number in range(4, 4 + AT_A_TIME)])
        assert len(found) == AT_A_TIME
        assert here.sizes == [AT_A_TIME, AT_A_TIME], "two questions for each partition"

    asyncio.run(scenario())
