"""The fetch session with one broker: subscriptions and credit out, frames in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final, cast

import grpc

from raftlog._client.connections import from_grpc
from raftlog._core.positions import PartitionState
from raftlog.errors import BrokerUnavailable, RaftlogError
from raftlog.v1 import log_pb2
from raftlog.wire import Frame, decode_fetch

if TYPE_CHECKING:
    from raftlog._client.fetcher import Fetcher

logger = logging.getLogger(__name__)

PARTS_AT_A_TIME: Final = 5_000
"""Partitions in one request; brokers take twice as many."""


class FetchSession:
    """One stream. It ends with the first failure; the engine opens another one.

    Credit: what the broker may still send, plus what lies here unread, is at most `share_bytes` (and one frame more).
    """

    def __init__(self, engine: Fetcher, node_id: int, address: str) -> None:
        self.node_id = node_id
        self.subscriptions: dict[int, PartitionState] = {}
        self._engine = engine
        self._address = address
        self._granted_bytes = engine.share_bytes()
        self._held_bytes = 0
        self._out: deque[log_pb2.FetchRequest] = deque()
        self._ready = asyncio.Event()
        self._out.append(
            log_pb2.FetchRequest(
                open=log_pb2.OpenFetchSession(
                    isolation_level=engine.options.isolation_level,
                    max_frame_bytes=engine.options.max_partition_fetch_bytes,
                    client_id=engine.options.client_id,
                    credit_bytes=self._granted_bytes,
                    rack=engine.options.client_rack,
                )
            )
        )
        self.heard_at_s = engine.loop.time()
        self.patience_s = 0.0
        """How long the session may be silent after `heard_at_s` before somebody looks what is the matter."""
        self.closed = False
        self._task = engine.loop.create_task(self._run())

    def send(self, request: log_pb2.FetchRequest) -> None:
        """Queue a request."""
        self._out.append(request)
        self._ready.set()

    def subscribe(self, partitions: list[log_pb2.FetchPartition]) -> None:
        """Subscribe; the broker is to say something of each soon."""
        for at in range(0, len(partitions), PARTS_AT_A_TIME):
            some = partitions[at : at + PARTS_AT_A_TIME]
            self.send(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=some)))
        self._engine.heard(self)

    def give_back(self, used_bytes: int) -> None:
        """Fetched bytes are not held any more: grant as much again, in few messages."""
        self._held_bytes -= used_bytes
        if self.closed:
            return
        share_bytes = self._engine.share_bytes()
        missing = share_bytes - self._granted_bytes - self._held_bytes
        if missing > 0 and (missing * 8 >= share_bytes or self._held_bytes == 0):
            self._granted_bytes += missing
            self.send(log_pb2.FetchRequest(credit=log_pb2.GrantCredit(bytes=missing)))

    async def close(self) -> None:
        """End the stream."""
        self.closed = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        error: RaftlogError
        try:
            await self._stream()
            error = BrokerUnavailable(f"{self._address} closed the fetch session")
        except (grpc.RpcError, asyncio.InvalidStateError, RaftlogError) as broke:
            error = from_grpc(broke, self._address)
        except Exception as bug:  # one of ours: it must not strand the partitions, which are subscribed again
            logger.exception("fetch session with broker %d failed", self.node_id)
            error = from_grpc(bug, self._address)
        self.closed = True
        self._engine.session_lost(self, error)

    async def _stream(self) -> None:
        method = self._engine.connections.channel(self._address).stream_stream(
            "/raftlog.v1.Log/Fetch",
            request_serializer=log_pb2.FetchRequest.SerializeToString,
            response_deserializer=decode_fetch,
        )
        call = method()
        writer = asyncio.get_running_loop().create_task(self._write(call))
        try:
            while True:
                frames = await call.read()
                if frames is grpc.aio.EOF:
                    code = await call.code()
                    if code is not grpc.StatusCode.OK:
                        raise BrokerUnavailable(f"the fetch session ended: {code.name}: {await call.details()}")
                    return
                self._on_frames(cast(list[Frame], frames))
        finally:
            call.cancel()
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.RpcError, asyncio.InvalidStateError):
                await writer

    async def _write(self, call: Any) -> None:
        while True:
            while self._out:
                await call.write(self._out.popleft())
            self._ready.clear()
            await self._ready.wait()

    def _on_frames(self, frames: list[Frame]) -> None:
        self._engine.heard(self)
        for frame in frames:
            size = len(frame.records)
            self._granted_bytes -= size
            self._held_bytes += size
            state = self.subscriptions.get(frame.head.subscription_id)
            if state is None or state.subscription_id != frame.head.subscription_id:
                self.give_back(size)  # stale: the position was changed meanwhile
            elif frame.head.HasField("error") and frame.head.error.code:
                del self.subscriptions[frame.head.subscription_id]
                self._engine.refused(state, frame.head.error)
                self.give_back(size)
            elif frame.head.HasField("preferred_read_replica"):
                del self.subscriptions[frame.head.subscription_id]
                self._engine.redirected(state, frame.head.preferred_read_replica)
            else:
                self._engine.received(self, state, frame)
