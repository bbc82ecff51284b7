"""The `Log` service: streams go to sessions, look-ups to partitions.

Errors are values in responses; a gRPC status ends only the stream of a client that breaks the protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence, Sized
from typing import Any, Final, Protocol, TypeVar

import grpc
from grpc import aio

from broker.config.config import BrokerConfig
from broker.coordinator.internal_topics import refuse_internal
from broker.coordinator.transactions.verifier import ProducerChecks
from broker.net.calls import note_used_stream
from broker.net.interceptors import send_headers, sends_many_requests
from broker.net.services.calls import Answer, end_stream
from broker.partition.fetch_session import MAX_PARTS, FetchSession, readable_end
from broker.partition.partition import Partition
from broker.partition.produce_session import TURN_BYTES, ProduceSession
from broker.quotas.disk_reads import DiskReads
from broker.quotas.heavy_work import HeavyWork
from broker.quotas.manager import QuotaManager
from broker.replicas.replica_manager import ReplicaManager
from broker.security.caller import Caller, Decisions, caller
from broker.turns import SharedTurns, in_turns
from raftlog.errors import BrokerOverloaded, InvalidRequestError, RaftlogError, ThrottlingQuotaExceeded, to_wire
from raftlog.format import wire
from raftlog.v1 import common_pb2, log_pb2
from raftlog.v1.security_pb2 import Acl

logger = logging.getLogger(__name__)

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
DELETE_WAIT_S: Final = 5.0
"""How long `DeleteRecords` waits for the followers."""


class _Named(Protocol):
    """The part of a request for one partition."""

    @property
    def topic_id(self) -> bytes: ...
    @property
    def partition(self) -> int: ...


class _Result(Answer, Protocol):
    def Clear(self) -> None: ...


T = TypeVar("T")
PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT", bound=_Result)


class LogService:
    """Produce, fetch and the look-ups around them, for the partitions of one broker."""

    def __init__(
        self,
        registry: ReplicaManager,
        config: BrokerConfig,
        disk_reads: DiskReads,
        heavy_work: HeavyWork,
        producers: Callable[[Caller], ProducerChecks] | None = None,
        quotas: QuotaManager | None = None,
    ) -> None:
        """`producers`: makes the checks of a stream's producer ids; None, as for `quotas`: as `ProduceSession`."""
        self._quotas = quotas
        self._registry = registry
        self._config = config
        self._disk_reads = disk_reads
        self._heavy_work = heavy_work
        self._produce_turns = SharedTurns(TURN_BYTES)
        self._producers = producers
        self._streams = 0

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service's handlers; `wire` reads and writes the two hot messages instead of generated code."""
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
                self.Produce, wire.begin_produce, log_pb2.ProduceResponse.SerializeToString
            ),
            "Fetch": grpc.stream_stream_rpc_method_handler(
                self.Fetch, log_pb2.FetchRequest.FromString, wire.encode_fetch
            ),
        }
        return grpc.method_handlers_generic_handler("raftlog.v1.Log", {**look_ups, **streams})

    async def Produce(
        self, request_iterator: AsyncIterator[wire.Produce | wire.Decoding], context: aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve a stream of produce requests."""
        who = caller.get()
        many = sends_many_requests(context)
        if many:  # the client waits for this before it sends for a second producer
            await send_headers(context)
        session = ProduceSession(
            self._registry,
            self._produce_turns,
            self._heavy_work,
            max_in_flight=self._config.max_in_flight_requests,
            default_timeout_ms=self._config.request_timeout_ms,
            who=who,
            producers=None if self._producers is None else self._producers(who),
            quotas=self._quotas,
            many=many,
        )
        await self._stream("produce", context, session, session.run(request_iterator, context))

    async def Fetch(
        self, request_iterator: AsyncIterator[log_pb2.FetchRequest], context: aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve a fetch session."""
        session = FetchSession(
            self._registry,
            self._disk_reads,
            max_frame_bytes=self._config.fetch_max_bytes,
            max_subscriptions=self._config.max_subscriptions,
            who=caller.get(),
            quotas=self._quotas,
        )
        await self._stream("fetch", context, session, session.run(request_iterator, context))

    async def _stream(
        self,
        kind: str,
        context: aio.ServicerContext[Any, Any],
        session: ProduceSession | FetchSession,
        running: Coroutine[Any, Any, None],
    ) -> None:
        if self._streams >= self._config.max_streams:
            running.close()
            await end_stream(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                BrokerOverloaded(f"this broker serves max.streams={self._config.max_streams} streams already"),
            )
        self._streams += 1
        self._registry.counters.streams[kind] += 1
        try:
            await running
        except InvalidRequestError as error:
            await end_stream(context, grpc.StatusCode.INVALID_ARGUMENT, error)
        except (BrokerOverloaded, ThrottlingQuotaExceeded) as error:
            await end_stream(context, grpc.StatusCode.RESOURCE_EXHAUSTED, error)
        finally:
            if session.was_used:
                note_used_stream()
            self._streams -= 1
            self._registry.counters.streams[kind] -= 1

    # Look-ups

    async def ListOffsets(
        self, request: log_pb2.ListOffsetsRequest, context: aio.ServicerContext[Any, Any]
    ) -> log_pb2.ListOffsetsResponse:
        """Return offsets by timestamp, or by name: latest, earliest, largest timestamp."""
        await _check_bounds(request.partitions, context)
        return await self.list_offsets(request)

    async def list_offsets(self, request: log_pb2.ListOffsetsRequest) -> log_pb2.ListOffsetsResponse:
        """Answer `ListOffsets` of a client, or of a broker that coordinates a group."""
        response = log_pb2.ListOffsetsResponse()
        describes = Decisions.of(caller.get(), Acl.DESCRIBE, Acl.TOPIC)

        async def list_offset(part: log_pb2.ListOffsetsPartition, result: log_pb2.ListOffsetsResult) -> None:
            self._check(describes, part)
            await self._list_offset(part, request.isolation_level, result)

        await self._each(request.partitions, response.results.add, list_offset)
        return response

    async def _each(
        self,
        parts: Iterable[PartT],
        add: Callable[[], ResultT],
        fill: Callable[[PartT, ResultT], Awaitable[None]],
    ) -> None:
        """Add and fill in a result for each part; an error becomes that result's own."""
        async for part in in_turns(parts):
            result = add()
            try:
                await fill(part, result)
            except RaftlogError as error:
                result.Clear()
                result.error.CopyFrom(to_wire(error))

    def _check(self, decisions: Decisions | None, part: _Named) -> None:
        """Check the caller's permission for a partition; an unknown partition passes, `find` refuses it.

        Raises:
            TopicAuthorizationFailed: the caller lacks the permission.
        """
        if decisions is not None:
            topic = self._registry.topic_name(part.topic_id, part.partition)
            if topic is not None:
                decisions.check(topic, part.topic_id)

    async def _read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function that may wait for the disk."""
        return await self._disk_reads.read(caller.get().share, function, *arguments)

    async def _list_offset(
        self,
        part: log_pb2.ListOffsetsPartition,
        isolation: common_pb2.IsolationLevel.ValueType,
        result: log_pb2.ListOffsetsResult,
    ) -> None:
        """Answer for one partition; READ_COMMITTED sees records below the last stable offset only (KIP-98)."""
        partition = self._registry.find(part.topic_id, part.partition)
        partition.check_serving(part.leader_epoch)
        result.leader_epoch = partition.leader_epoch
        result.timestamp_ms = -1
        if part.HasField("at_offset"):
            await self._record_at(partition, part, isolation, result)
            return
        match part.timestamp_ms:
            case wanted if wanted == LATEST:
                partition.check_confirmed()
                result.offset = readable_end(partition, isolation)
            case wanted if wanted == EARLIEST:
                result.offset = partition.log.log_start_offset
            case wanted if wanted >= 0 or wanted == MAX_TIMESTAMP:
                log, end = partition.log, readable_end(partition, isolation)
                if wanted == MAX_TIMESTAMP:
                    found = await self._read(log.max_timestamp, end)
                else:
                    found = await self._read(log.offset_for_time, wanted, end)
                partition.check_serving(part.leader_epoch)  # again: leadership may have moved during the search
                if found is None:
                    partition.check_confirmed()  # a record above the high watermark may already be committed
                    result.offset = -1
                else:
                    result.offset, result.timestamp_ms = found.offset, found.timestamp_ms
            case unknown:
                raise InvalidRequestError(
                    f"timestamp {unknown} is not valid: use ms since 1970, or -1 for latest, -2 for earliest, "
                    "-3 for the largest timestamp"
                )

    async def _record_at(
        self,
        partition: Partition,
        part: log_pb2.ListOffsetsPartition,
        isolation: common_pb2.IsolationLevel.ValueType,
        result: log_pb2.ListOffsetsResult,
    ) -> None:
        """Fill in the first record at or after an offset; its timestamp says how far behind a reader there is."""
        if part.at_offset < 0:
            raise InvalidRequestError(f"at_offset {part.at_offset} is negative")
        result.offset = -1
        end = readable_end(partition, isolation)
        if part.at_offset >= end:
            partition.check_confirmed()
            return
        found = await self._read(partition.log.first_from, part.at_offset, end)
        partition.check_serving(part.leader_epoch)  # again: leadership may have moved during the search
        if found is not None:
            result.offset, result.timestamp_ms = found.offset, found.timestamp_ms

    async def OffsetForLeaderEpoch(
        self, request: log_pb2.OffsetForLeaderEpochRequest, context: aio.ServicerContext[Any, Any]
    ) -> log_pb2.OffsetForLeaderEpochResponse:
        """Return where leader epochs ended (KIP-320): a client learns from it that records it read were truncated."""
        await _check_bounds(request.partitions, context)
        response = log_pb2.OffsetForLeaderEpochResponse()
        describes = Decisions.of(caller.get(), Acl.DESCRIBE, Acl.TOPIC)

        async def end_offset(part: log_pb2.EpochPartition, result: log_pb2.EpochEndOffset) -> None:
            result.leader_epoch = result.end_offset = -1
            self._check(describes, part)
            partition = self._registry.find(part.topic_id, part.partition)
            partition.check_serving(part.current_leader_epoch)
            partition.check_confirmed()
            bounds = partition.log.bounds()
            found = bounds.leader_epochs.end_offset_for(part.leader_epoch, bounds.log_end_offset)
            if found is not None:
                result.end_offset, result.leader_epoch = found

        await self._each(request.partitions, response.results.add, end_offset)
        return response

    async def DeleteRecords(
        self, request: log_pb2.DeleteRecordsRequest, context: aio.ServicerContext[Any, Any]
    ) -> log_pb2.DeleteRecordsResponse:
        """Raise the log start offset of partitions."""
        await _check_bounds(request.partitions, context)
        response = log_pb2.DeleteRecordsResponse()
        deletes = Decisions.of(caller.get(), Acl.DELETE, Acl.TOPIC)
        deleted: list[tuple[Partition, log_pb2.DeleteRecordsResult]] = []

        async def delete(part: log_pb2.DeleteRecordsPartition, result: log_pb2.DeleteRecordsResult) -> None:
            self._check(deletes, part)
            partition = self._registry.find(part.topic_id, part.partition)
            refuse_internal(partition.log.topic, "its records are the cluster's to delete")
            target = partition.delete_target(part.before_offset)
            await self._read(partition.log.delete_records, target)
            partition.log_start_moved()
            result.log_start_offset = partition.log.log_start_offset
            deleted.append((partition, result))

        await self._each(request.partitions, response.results.add, delete)
        await _in_sync(deleted)
        return response


async def _in_sync(deleted: Sequence[tuple[Partition, log_pb2.DeleteRecordsResult]]) -> None:
    """Wait until the replicas in sync have deleted the records as well, so that the next leader has.

    A result becomes an error if this broker leads the partition no more. A follower of an earlier version does not say
    what it has deleted, so the wait ends after `DELETE_WAIT_S`.
    """
    loop = asyncio.get_running_loop()
    deadline_s, pause_s = loop.time() + DELETE_WAIT_S, 0.001
    waiting = deleted
    while waiting := [each async for each in in_turns(waiting) if not _is_in_sync(*each)]:
        if loop.time() >= deadline_s:
            logger.warning("not all replicas in sync say that they have deleted records of %d partitions", len(waiting))
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _is_in_sync(partition: Partition, result: log_pb2.DeleteRecordsResult) -> bool:
    try:
        return partition.is_deleted_in_sync(result.log_start_offset)
    except RaftlogError as error:
        result.Clear()
        result.error.CopyFrom(to_wire(error))
        return True


async def _check_bounds(parts: Sized, context: aio.ServicerContext[Any, Any]) -> None:
    """End a call that names more than MAX_PARTS partitions."""
    if len(parts) > MAX_PARTS:
        error = InvalidRequestError(f"a request names at most {MAX_PARTS} partitions, not {len(parts)}: split it")
        await end_stream(context, grpc.StatusCode.INVALID_ARGUMENT, error)
