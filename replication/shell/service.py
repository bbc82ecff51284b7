"""The `Replication` service on the inter-node listener: each stream has a `LeaderSession`.

Errors of partitions are values in frames. A stream ends with a gRPC status when the protocol is broken, the follower is
not the expected broker, or this broker is starting or stopping.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from raftlog._client.connections import refuse
from raftlog.errors import (
    AuthorizationError,
    BrokerOverloaded,
    FencedError,
    InternalError,
    InvalidRequestError,
    RaftlogError,
    RequestTimedOut,
    ShuttingDown,
)
from raftlog.format import wire
from raftlog.v1 import replication_pb2
from replication.leader_session import MARKS_DELAY_MS, LeaderSession, ReadDone
from replication.pacing import LiveTraffic
from replication.ports import LedPartition, Read, Replica, Wake
from replication.token_bucket import TokenBucket


def now_ms() -> float:
    """Return the time that sessions are given: monotonic, in milliseconds."""
    return time.monotonic() * 1000


class WakeTimer:
    """What the loop of a stream waits for: `ring`, or a deadline.

    It has at most one timer, and keeps one that is early enough, so that a message does not cost a timer.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0.0

    def ring(self) -> None:
        """Wake the waiting call of `wait`, or the next one."""
        self._event.set()

    def ring_within(self, delay_ms: float) -> None:
        """Ring after this long at the latest."""
        self._set_timer(now_ms() + delay_ms)

    def clear(self) -> None:
        """Forget earlier rings; called before looking for work, so that no ring is missed."""
        self._event.clear()

    async def wait(self, deadline_ms: float | None) -> None:
        """Return after `ring`, or at `deadline_ms`, or at an earlier call's deadline."""
        if not self._event.is_set():
            if deadline_ms is not None:
                self._set_timer(deadline_ms)
            await self._event.wait()

    def _set_timer(self, deadline_ms: float) -> None:
        if self._timer is None or deadline_ms < self._timer_ms:
            self.close()
            self._timer_ms = deadline_ms
            delay_s = max(0.0, (deadline_ms - now_ms()) / 1000)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._event.set()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


logger = logging.getLogger(__name__)

SERVICE: Final = "raftlog.v1.Replication"
METHOD: Final = "Replicate"
SIGN_OF_LIFE_MS: Final = 500.0
"""How often a stream without frames sends an empty message, to show that the leader lives."""
WELCOME: Final = ("raftlog-replicate", "open")
"""Sent in the initial metadata of an accepted stream; that of a refused call is empty."""
HELLO_TIMEOUT_S: Final = 5.0
"""A stream without a hello for this long ends, since the number of streams is limited."""
CLEAN_UP_S: Final = 3.0
MAX_STREAMS: Final = 1_000
"""Several times the number of brokers, as streams that broke may not be noticed yet."""

_Context = aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class LedPartitions:
    """What the service needs of its broker; see `LeaderSession`. `reads`: threads that may wait for disks."""

    me: int
    cluster_id: str
    find: Callable[[bytes, int], LedPartition]
    check_replica: Callable[[Replica], None]
    reads: Executor
    max_frame_bytes: int
    throttle: TokenBucket
    live: LiveTraffic = field(default_factory=LiveTraffic)


class ReplicationService:
    """States: closed -> open (`open`: the broker is registered) -> closed (`close`: it stops)."""

    def __init__(self) -> None:
        self._led: LedPartitions | None = None
        self._streams: set[_Stream] = set()

    def __len__(self) -> int:
        return len(self._streams)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service's handler, with the generated names; `wire` encodes the responses."""
        stream = grpc.stream_stream_rpc_method_handler(
            self.Replicate, replication_pb2.ReplicateRequest.FromString, wire.encode_replicate
        )
        handlers: dict[str, Any] = {METHOD: stream}
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def open(self, led: LedPartitions) -> None:
        """Serve followers from now on."""
        self._led = led

    def close(self) -> None:
        """End every stream, and refuse new ones."""
        self._led = None
        for stream in self._streams:
            stream.end(ShuttingDown("the broker is stopping"))

    async def Replicate(self, request_iterator: object, context: _Context) -> None:
        if self._led is None:
            await _abort(context, ShuttingDown("the broker is starting or stopping, or keeps no partitions"))
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
    """A session, a task that reads requests into it, and the loop that writes its frames."""

    def __init__(self, led: LedPartitions, context: _Context) -> None:
        self._context = context
        self._reads = led.reads
        self._loop = asyncio.get_running_loop()
        self._wake_timer = WakeTimer()
        self._requests_done = False
        self._ended_by: RaftlogError | None = None
        self._session = LeaderSession(
            find=led.find,
            me=led.me,
            cluster_id=led.cluster_id,
            check_replica=led.check_replica,
            wake=self._wake_timer.ring,
            wake_soon=partial(self._wake_timer.ring_within, MARKS_DELAY_MS),
            read_later=self._read_later,
            max_frame_bytes=led.max_frame_bytes,
            throttle=led.throttle,
            live=led.live,
        )

    @property
    def replica(self) -> Replica | None:
        """The follower at the other end, by its own hello."""
        return self._session.replica

    def end(self, error: RaftlogError) -> None:
        self._ended_by = self._ended_by or error
        self._wake_timer.ring()

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
                raise RequestTimedOut(f"no hello came on this stream within {HELLO_TIMEOUT_S:g} s") from None
            # Tells the follower that the stream is accepted, before any frame.
            await self._context.send_initial_metadata((WELCOME,))
            reader = asyncio.create_task(self._read(), name="replica-requests")
            await self._write()
        finally:
            self._session.close()
            self._wake_timer.close()
            if reader is not None:
                reader.cancel()
                await asyncio.wait([reader], timeout=CLEAN_UP_S)

    async def _take_next(self) -> bool:
        """Handle the next request; return False at the end of the stream."""
        try:
            request = await self._context.read()
        except DecodeError as error:
            raise InvalidRequestError(f"a request is not a ReplicateRequest: {error}") from None
        if request is aio.EOF:
            return False
        if request is None:
            raise InvalidRequestError("a request is not a ReplicateRequest")
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
            self._wake_timer.ring()

    async def _write(self) -> None:
        session, timer, context = self._session, self._wake_timer, self._context
        sent_ms = now_ms()
        while self._ended_by is None and not self._requests_done:
            timer.clear()
            looked_ms = now_ms()
            frames = session.take_frames(looked_ms)
            if frames or looked_ms - sent_ms >= SIGN_OF_LIFE_MS:
                sent_ms = looked_ms
                await context.write(frames)
            due_ms = session.next_deadline_ms(looked_ms)
            sign_ms = sent_ms + SIGN_OF_LIFE_MS
            await timer.wait(sign_ms if due_ms is None else min(due_ms, sign_ms))
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
    with contextlib.suppress(asyncio.InvalidStateError):  # the call has ended meanwhile
        await refuse(context, _status(error), error)
