"""The `Log` service: streams to sessions, look-ups to partitions.

Errors are values in responses; only a client that breaks the protocol has its stream ended with a gRPC status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Executor
from typing import Any, NoReturn

import grpc
from grpc import aio

from broker.config import BrokerConfig
from broker.fetch_session import FetchSession
from broker.produce_session import ProduceSession
from broker.registry import PartitionRegistry
from raftlog import wire
from raftlog.errors import BrokerOverloaded, InvalidRequestError, RaftlogError, to_wire
from raftlog.v1 import log_pb2

logger = logging.getLogger(__name__)

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3


class LogService:
    """Produce, fetch and the look-ups around them, for the partitions of one broker."""

    def __init__(self, registry: PartitionRegistry, config: BrokerConfig, disk: Executor) -> None:
        self._registry = registry
        self._config = config
        self._disk = disk
        self._streams = 0

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service's handlers: the generated ones' names, the two hot streams read and written by `wire`."""
        look_ups: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                getattr(self, name), request.FromString, response.SerializeToString
            )
            for name, request, response in (
                ("ListOffsets", log_pb2.ListOffsetsRequest, log_pb2.ListOffsetsResponse),
                ("OffsetForLeaderEpoch", log_pb2.OffsetForLeaderEpochRequest, log_pb2.OffsetForLeaderEpochResponse),
                ("DeleteRecords", log_pb2.DeleteRecordsRequest, log_pb2.DeleteRecordsResponse),
            )
        }
        streams: dict[str, Any] = {
            "Produce": grpc.stream_stream_rpc_method_handler(
                self.Produce, wire.decode_produce, log_pb2.ProduceResponse.SerializeToString
            ),
            "Fetch": grpc.stream_stream_rpc_method_handler(
                self.Fetch, log_pb2.FetchRequest.FromString, wire.encode_fetch
            ),
        }
        return grpc.method_handlers_generic_handler("raftlog.v1.Log", {**look_ups, **streams})

    async def Produce(
        self, request_iterator: AsyncIterator[wire.Produce], context: aio.ServicerContext[Any, Any]
    ) -> None:
        """Pipelined produce."""
        session = ProduceSession(
            self._registry,
            self._disk,
            max_in_flight=self._config.max_in_flight_requests,
            default_timeout_ms=self._config.request_timeout_ms,
        )
        await self._stream(context, session.run(request_iterator, context))

    async def Fetch(
        self, request_iterator: AsyncIterator[log_pb2.FetchRequest], context: aio.ServicerContext[Any, Any]
    ) -> None:
        """A fetch session."""
        session = FetchSession(
            self._registry,
            self._disk,
            max_frame_bytes=self._config.fetch_max_bytes,
            max_subscriptions=self._config.max_subscriptions,
        )
        await self._stream(context, session.run(request_iterator, context))

    async def _stream(self, context: aio.ServicerContext[Any, Any], session: Coroutine[Any, Any, None]) -> None:
        if self._streams >= self._config.max_streams:
            session.close()
            await _abort(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                BrokerOverloaded(f"this broker serves max.streams={self._config.max_streams} streams already"),
            )
        self._streams += 1
        try:
            await session
        except InvalidRequestError as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, error)
        except BrokerOverloaded as error:
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, error)
        finally:
            self._streams -= 1

    # Look-ups

    async def ListOffsets(
        self, request: log_pb2.ListOffsetsRequest, context: aio.ServicerContext[Any, Any]
    ) -> log_pb2.ListOffsetsResponse:
        """Offsets by timestamp, or by the names latest, earliest, largest timestamp."""
        response = log_pb2.ListOffsetsResponse()
        for part in request.partitions:
            result = response.results.add()
            try:
                await self._list_offset(part, result)
            except RaftlogError as error:
                result.Clear()
                result.error.CopyFrom(to_wire(error))
        return response

    async def _list_offset(self, part: log_pb2.ListOffsetsPartition, result: log_pb2.ListOffsetsResult) -> None:
        partition = self._registry.find(part.topic_id, part.partition)
        partition.check_serving(part.leader_epoch)
        result.leader_epoch = partition.leader_epoch
        result.timestamp_ms = -1
        match part.timestamp_ms:
            case wanted if wanted == LATEST:
                partition.check_confirmed()
                result.offset = partition.last_stable_offset
            case wanted if wanted == EARLIEST:
                result.offset = partition.log.log_start_offset
            case wanted if wanted >= 0 or wanted == MAX_TIMESTAMP:
                log = partition.log
                loop = asyncio.get_running_loop()
                if wanted == MAX_TIMESTAMP:
                    found = await loop.run_in_executor(self._disk, log.max_timestamp)
                else:
                    found = await loop.run_in_executor(self._disk, log.offset_for_time, wanted)
                partition.check_serving(part.leader_epoch)  # again: that may have taken a while
                if found is None or found.offset >= partition.last_stable_offset:
                    partition.check_confirmed()  # else it may be committed all the same
                    result.offset = -1
                else:
                    result.offset, result.timestamp_ms = found.offset, found.timestamp_ms
            case unknown:
                raise InvalidRequestError(
                    f"timestamp {unknown} means nothing: "
                    "use ms since 1970, or -1 latest, -2 earliest, -3 largest timestamp"
                )

    async def OffsetForLeaderEpoch(
        self, request: log_pb2.OffsetForLeaderEpochRequest, context: aio.ServicerContext[Any, Any]
    ) -> log_pb2.OffsetForLeaderEpochResponse:
        """Where a leader epoch ended (KIP-320): how a client finds out that what it read was truncated."""
        response = log_pb2.OffsetForLeaderEpochResponse()
        for part in request.partitions:
            result = response.results.add(leader_epoch=-1, end_offset=-1)
            try:
                partition = self._registry.find(part.topic_id, part.partition)
                partition.check_serving(part.current_leader_epoch)
                partition.check_confirmed()
                bounds = partition.log.bounds()
                found = bounds.leader_epochs.end_offset_for(part.leader_epoch, bounds.log_end_offset)
                if found is not None:
                    result.leader_epoch, result.end_offset = found
            except RaftlogError as error:
                result.Clear()
                result.error.CopyFrom(to_wire(error))
        return response

    async def DeleteRecords(
        self, request: log_pb2.DeleteRecordsRequest, context: aio.ServicerContext[Any, Any]
    ) -> log_pb2.DeleteRecordsResponse:
        """Raise the log start offset."""
        response = log_pb2.DeleteRecordsResponse()
        for part in request.partitions:
            result = response.results.add()
            try:
                partition = self._registry.find(part.topic_id, part.partition)
                target = partition.delete_target(part.before_offset)
                await asyncio.get_running_loop().run_in_executor(self._disk, partition.log.delete_records, target)
                partition.log_start_moved()
                result.log_start_offset = partition.log.log_start_offset
            except RaftlogError as error:
                result.Clear()
                result.error.CopyFrom(to_wire(error))
        return response


async def _abort(context: aio.ServicerContext[Any, Any], status: grpc.StatusCode, error: RaftlogError) -> NoReturn:
    await context.abort(status, f"{type(error).__name__}: {error}")
    raise AssertionError("abort raises")
