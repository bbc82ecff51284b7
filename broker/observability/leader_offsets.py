"""Asks the leaders of partitions where these begin and end: this broker, or others on their inter-node listeners.

A broker that does not answer, or no longer leads, is skipped; the next round asks the present leader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from grpc import aio

from broker.coordinator.groups.topics import TopicPartition
from broker.net.services.calls import LIST_OFFSETS, SERVICE, ListOffsets
from broker.net.services.log import EARLIEST, LATEST
from broker.observability.group_lag import Ends
from raftlog._client.connections import Connections
from raftlog._client.security import ChannelTls
from raftlog.v1 import log_pb2
from raftmeta.image import NO_LEADER, MetadataImage

logger = logging.getLogger(__name__)

CALL_S: Final = 2.0
AT_A_TIME: Final = 200
"""Partitions in one request, so that the leader's event loop turns between two requests."""

Asked = Sequence[log_pb2.ListOffsetsPartition]


class LeaderOffsets:
    """Implements `group_lag.Leaders`. `address_of`: returns where a broker listens for other nodes, None if unknown."""

    def __init__(
        self,
        node_id: int,
        image: Callable[[], MetadataImage],
        here: ListOffsets,
        address_of: Callable[[int], str | None],
        tls: ChannelTls | None = None,
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._here = here
        self._address_of = address_of
        self._connections = Connections(tls)

    async def ends(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, Ends]:
        """Return where partitions begin and end."""
        asked = [
            log_pb2.ListOffsetsPartition(topic_id=topic_id, partition=partition, leader_epoch=-1, timestamp_ms=which)
            for topic_id, partition in partitions
            for which in (EARLIEST, LATEST)
        ]
        answers = await self._ask(asked)
        found = {}
        for at in partitions:
            start, end = answers.get((*at, EARLIEST)), answers.get((*at, LATEST))
            if start is not None and end is not None:
                found[at] = Ends(start.offset, end.offset)
        return found

    async def written_ms(self, wanted: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        """Return the timestamp of the first record at or after an offset, in ms since 1970, for each partition."""
        asked = [
            log_pb2.ListOffsetsPartition(topic_id=topic_id, partition=partition, leader_epoch=-1, at_offset=offset)
            for (topic_id, partition), offset in wanted.items()
        ]
        answers = await self._ask(asked)
        return {
            at: answers[(*at, 0)].timestamp_ms
            for at in wanted
            if (*at, 0) in answers and answers[(*at, 0)].timestamp_ms >= 0
        }

    async def close(self) -> None:
        """End the connections."""
        await self._connections.close()

    async def _ask(self, asked: Asked) -> dict[tuple[bytes, int, int], log_pb2.ListOffsetsResult]:
        """Return the results by topic, partition and requested timestamp, without errors."""
        by_leader = self._by_leader(asked)
        answers = await asyncio.gather(*(self._ask_leader(*each) for each in by_leader.items()))
        return {
            (part.topic_id, part.partition, part.timestamp_ms): result
            for parts, results in zip(by_leader.values(), answers, strict=True)
            for part, result in zip(parts, results, strict=False)
            if not result.error.code
        }

    def _by_leader(self, asked: Asked) -> dict[int, list[log_pb2.ListOffsetsPartition]]:
        image = self._image()
        found: dict[int, list[log_pb2.ListOffsetsPartition]] = {}
        for (topic_id, partition), parts in groupby(asked, lambda part: (part.topic_id, part.partition)):
            state = image.partition(topic_id, partition)
            if state is not None and state.leader != NO_LEADER:
                found.setdefault(state.leader, []).extend(parts)
        return found

    async def _ask_leader(self, leader: int, asked: Asked) -> list[log_pb2.ListOffsetsResult]:
        """Return a leader's results, as many as arrived."""
        results: list[log_pb2.ListOffsetsResult] = []
        try:
            for request in _requests(asked):
                results += (await self._call(leader, request)).results
        except (aio.AioRpcError, asyncio.InvalidStateError, OSError) as error:
            logger.debug("broker %d does not answer ListOffsets: %s", leader, error)
        return results

    async def _call(self, leader: int, request: log_pb2.ListOffsetsRequest) -> log_pb2.ListOffsetsResponse:
        if leader == self._node_id:
            response = await self._here(request)
            await asyncio.sleep(0)
            return response
        address = self._address_of(leader)
        if address is None:
            raise OSError(f"the inter-node address of broker {leader} is unknown")
        call: Any = self._connections.channel(address).unary_unary(
            f"/{SERVICE}/{LIST_OFFSETS}",
            request_serializer=log_pb2.ListOffsetsRequest.SerializeToString,
            response_deserializer=log_pb2.ListOffsetsResponse.FromString,
        )
        answer: log_pb2.ListOffsetsResponse = await call(request, timeout=CALL_S)
        return answer


def _requests(asked: Asked) -> Iterator[log_pb2.ListOffsetsRequest]:
    for first in range(0, len(asked), AT_A_TIME):
        yield log_pb2.ListOffsetsRequest(partitions=asked[first : first + AT_A_TIME])
