"""The `Replication` service on the inter-node listener: each stream a `LeaderSession`.

Errors of partitions are values in frames; a stream ends with a gRPC status when the protocol is broken, the follower
is not who it should be, or this broker is starting or stopping.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from raftlog import wire
from raftlog.errors import (
    AuthorizationError,
    BrokerOverloaded,
    BrokerUnavailable,
    FencedError,
    InternalError,
    InvalidRequestError,
    RaftlogError,
    ShuttingDown,
)
from raftlog.v1 import replication_pb2
from replication.leader_session import LeaderSession
from replication.ports import LedPartition, Read, Replica, Wake
from replication.push_queue import ReadDone
from replication.shell.alarm import Alarm, now_ms
from replication.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

SERVICE: Final = "raftlog.v1.Replication"
METHOD: Final = "Replicate"
SIGN_OF_LIFE_MS: Final = 500.0
"""A stream with nothing to send says this often, with an empty message, that the leader lives."""
WELCOME: Final = ("raftlog-replicate", "open")
"""In the initial metadata: a call that is refused has none of its own, and ends with an empty one."""
HELLO_TIMEOUT_S: Final = 5.0
"""Who opens a stream and says nothing does not keep it from others."""
CLEAN_UP_S: Final = 3.0
MAX_STREAMS: Final = 1_000
"""More than there are brokers, several times over: streams that broke may not be noticed yet."""

_Context = aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class LedPartitions:
    """What the service needs of the broker behind it; see `LeaderSession`. `reads`: threads that may wait for disks."""

    me: int
    cluster_id: str
    find: Callable[[bytes, int], LedPartition]
    check_replica: Callable[[Replica], None]
    reads: Executor
    max_frame_bytes: int
    throttle: TokenBucket


class ReplicationService:
    """States: closed -> open (`open`: the broker is registered) -> closed (`close`: it stops)."""

    def __init__(self) -> None:
        self._led: LedPartitions | None = None
        self._streams: set[_Stream] = set()

    def __len__(self) -> int:
        """How many streams there are."""
        return len(self._streams)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service's handler: the generated one's names, responses written by `wire`."""
        stream = grpc.stream_stream_rpc_method_handler(
            self.Replicate, replication_pb2.ReplicateRequest.FromString, wire.encode_replicate
        )
        handlers: dict[str, Any] = {METHOD: stream}
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def open(self, led: LedPartitions) -> None:
        """Serve followers from now on."""
        self._led = led

    def close(self) -> None:
        """End every stream, and take no other."""
        self._led = None
        for stream in self._streams:
            stream.end(ShuttingDown("the broker is stopping"))

    async def Replicate(self, request_iterator: object, context: _Context) -> None:
        """One follower's stream."""
        if self._led is None:
            await _abort(context, BrokerUnavailable("the broker is starting or stopping, or keeps no partitions"))
            return
        if len(self._streams) >= MAX_STREAMS:
            await _abort(context, BrokerOverloaded(f"this broker has {MAX_STREAMS} followers' streams already"))
            return
        stream = _Stream(self._led, context)
        self._streams.add(stream)
        try:
            await stream.run()
        except RaftlogError as error:
            if not isinstance(error, ShuttingDown):
                logger.warning("ended a follower's stream: %s", error, extra={"replica": stream.replica})
            await _abort(context, error)
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the follower is gone
        finally:
            self._streams.discard(stream)


class _Stream:
    """A session, a task that reads into it, and the loop that writes what it has."""

    def __init__(self, led: LedPartitions, context: _Context) -> None:
        self._context = context
        self._reads = led.reads
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm()
        self._requests_done = False
        self._ended_by: RaftlogError | None = None
        self._session = LeaderSession(
            find=led.find,
            me=led.me,
            cluster_id=led.cluster_id,
            check_replica=led.check_replica,
            wake=self._alarm.ring,
            read_later=self._read_later,
            max_frame_bytes=led.max_frame_bytes,
            throttle=led.throttle,
        )

    @property
    def replica(self) -> Replica | None:
        """Who is at the other end, as it says."""
        return self._session.replica

    def end(self, error: RaftlogError) -> None:
        """Have `run` raise `error`."""
        self._ended_by = self._ended_by or error
        self._alarm.ring()

    async def run(self) -> None:
        """Serve the stream until the follower ends it.

        Raises:
            RaftlogError: the stream has to end.
        """
        reader: asyncio.Task[None] | None = None
        try:
            try:
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    if not await self._take_next():
                        return
            except TimeoutError:
                raise BrokerUnavailable(f"nothing was said on this stream for {HELLO_TIMEOUT_S:g} s") from None
            # Tells the follower that it is welcome, before there is anything to send.
            await self._context.send_initial_metadata((WELCOME,))
            reader = asyncio.create_task(self._read(), name="replica-requests")
            await self._write()
        finally:
            self._session.close()
            self._alarm.close()
            if reader is not None:
                reader.cancel()
                await asyncio.wait([reader], timeout=CLEAN_UP_S)

    async def _take_next(self) -> bool:
        """Take a request; return False at the end of the stream."""
        try:
            request = await self._context.read()
        except DecodeError as error:
            raise InvalidRequestError(f"a request is no ReplicateRequest: {error}") from None
        if request is aio.EOF:
            return False
        if request is None:
            raise InvalidRequestError("a request is no ReplicateRequest")
        self._session.handle(request, now_ms())
        return True

    async def _read(self) -> None:
        try:
            while await self._take_next():
                pass
        except RaftlogError as error:
            self.end(error)
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the follower is gone
        except Exception as error:  # a bug; the follower opens another stream
            logger.exception("a follower's stream failed")
            self.end(InternalError(f"{type(error).__name__}: {error}"))
        finally:
            self._requests_done = True
            self._alarm.ring()

    async def _write(self) -> None:
        session, alarm, context = self._session, self._alarm, self._context
        sent_ms = now_ms()
        while self._ended_by is None and not self._requests_done:
            alarm.clear()
            looked_ms = now_ms()
            frames = session.take_frames(looked_ms)
            if frames or looked_ms - sent_ms >= SIGN_OF_LIFE_MS:
                sent_ms = looked_ms
                await context.write(frames)
            else:
                due_ms = session.next_deadline_ms(looked_ms)
                sign_ms = sent_ms + SIGN_OF_LIFE_MS
                await alarm.wait(sign_ms if due_ms is None else min(due_ms, sign_ms))
        if self._ended_by is not None:
            raise self._ended_by

    def _read_later(
        self, partition: LedPartition, on_change: Wake, offset: int, max_bytes: int, done: ReadDone
    ) -> None:
        def finished(reading: asyncio.Future[Read | None]) -> None:
            error = asyncio.CancelledError() if reading.cancelled() else reading.exception()
            if error is None:
                read = reading.result()
                assert read is not None, "a blocking read waits"
                done(read)
            elif isinstance(error, RaftlogError):
                done(error)
            else:
                logger.error("reading for a follower failed", exc_info=error)
                done(InternalError(f"reading failed: {type(error).__name__}: {error}"))

        read = partial(partition.read_for_replica, on_change, offset, max_bytes, blocking=True)
        self._loop.run_in_executor(self._reads, read).add_done_callback(finished)


def _status(error: RaftlogError) -> grpc.StatusCode:
    if isinstance(error, BrokerOverloaded):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if error.retriable:
        return grpc.StatusCode.UNAVAILABLE
    if isinstance(error, AuthorizationError):
        return grpc.StatusCode.PERMISSION_DENIED
    if isinstance(error, (InvalidRequestError, FencedError)):
        return grpc.StatusCode.FAILED_PRECONDITION
    return grpc.StatusCode.INTERNAL


async def _abort(context: _Context, error: RaftlogError) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # it ended by itself meanwhile
        await context.abort(_status(error), f"{type(error).__name__}: {error}")
