"""Asks the leaders of partitions where those begin and end: this broker, or others on their inter-node listeners.

Who does not answer, or does not lead any more, is passed over: the next round asks whoever leads by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from grpc import aio

from broker.groups.topics import TopicPartition
from broker.observability.group_lag import Ends
from broker.services.log import EARLIEST, LATEST
from broker.services.look_ups import LIST_OFFSETS, SERVICE, ListOffsets
from raftlog._client.connections import Connections
from raftlog._client.tls import ChannelTls
from raftlog.v1 import log_pb2
from raftmeta.image import NO_LEADER, MetadataImage

logger = logging.getLogger(__name__)

CALL_S: Final = 2.0
AT_A_TIME: Final = 200
"""Questions in a request: the leader's event loop is free again between two of them."""

Asked = Sequence[log_pb2.ListOffsetsPartition]


class LeaderOffsets:
    """Implements `group_lag.Leaders`. `address_of`: where a broker listens for other nodes; None: not known."""

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
        """Return the answers by topic, partition and timestamp asked for; those that are errors are left out."""
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
        """Return a leader's answers, as far as it gave any."""
        results: list[log_pb2.ListOffsetsResult] = []
        try:
            for request in _requests(asked):
                results += (await self._call(leader, request)).results
        except (aio.AioRpcError, asyncio.InvalidStateError, OSError) as error:
            logger.debug("broker %d does not say where partitions end: %s", leader, error)
        return results

    async def _call(self, leader: int, request: log_pb2.ListOffsetsRequest) -> log_pb2.ListOffsetsResponse:
        if leader == self._node_id:
            response = await self._here(request)
            await asyncio.sleep(0)
            return response
        address = self._address_of(leader)
        if address is None:
            raise OSError(f"it is not known where broker {leader} listens for other nodes")
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
