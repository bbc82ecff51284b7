"""One `Log.Fetch` stream: the client subscribes partitions and grants credit, the broker pushes what is committed.

A client that says where it stands is sent to a replica there, once one is in sync (KIP-392); it comes back to the
leader by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from functools import partial
from typing import Protocol

from broker.lease import Wake
from broker.partition import Partition
from broker.registry import PartitionRegistry
from raftlog.errors import BrokerOverloaded, CorruptRecordError, InvalidRequestError, RaftlogError, to_wire
from raftlog.v1 import common_pb2, log_pb2
from raftlog.wire import Frame

logger = logging.getLogger(__name__)

SMALLEST_FRAME_BYTES = 4096
"""Even a client that asks for less gets frames of this size: a frame holds at least one batch anyway."""


class FrameWriter(Protocol):
    """The part of a gRPC context that a session needs."""

    async def write(self, message: list[Frame]) -> None:
        """Send one message; returns when the transport has taken it."""
        ...


def _nothing() -> None:
    """Stands in until the session has made the real one."""


class _Subscription:
    """One partition that the client follows.

    States: queued (has something to send) -> parked (waits at the end) -> queued ...; dropped is final.
    """

    __slots__ = (
        "announced",
        "dropped",
        "from_follower",
        "id",
        "last_fetched_epoch",
        "partition",
        "position",
        "queued",
        "wake",
    )

    def __init__(self, partition: Partition, part: log_pb2.FetchPartition) -> None:
        self.id = part.subscription_id
        self.from_follower = part.from_follower
        self.last_fetched_epoch = part.last_fetched_epoch if part.HasField("last_fetched_epoch") else -1
        self.partition = partition
        self.position = part.offset
        self.queued = False
        self.announced = False  # the client has seen the marks once
        self.dropped = False
        self.wake: Wake = _nothing


class FetchSession:
    """State of one stream.

    Bounded: a frame is built only while the client's credit is above zero and after the transport has taken the one
    before, so a client that does not read costs one frame.
    """

    def __init__(
        self,
        registry: PartitionRegistry,
        disk: Executor,
        *,
        max_frame_bytes: int,
        max_subscriptions: int,
    ) -> None:
        self._registry = registry
        self._disk = disk
        self._max_frame_bytes = max_frame_bytes
        self._max_subscriptions = max_subscriptions
        self._lease = registry.lease
        self._committed_only = True
        self._rack = ""
        self._opened = False
        self._credit = 0
        self._subscriptions: dict[int, _Subscription] = {}
        self._highest_id = -1
        self._queue: deque[_Subscription] = deque()
        self._refusals: deque[Frame] = deque()
        self._changed = asyncio.Event()
        self._requests_done = False

    async def run(self, requests: AsyncIterator[log_pb2.FetchRequest], writer: FrameWriter) -> None:
        """Serve the stream until the client ends it.

        Raises:
            InvalidRequestError: the client breaks the protocol; the stream ends.
        """
        reader = asyncio.ensure_future(self._read(requests))
        try:
            while not self._requests_done:
                frames = await self._next_frames()
                if frames and await self._may_leave(frames):
                    await writer.write(frames)
                elif not frames and not self._requests_done:
                    await self._changed.wait()
                    self._changed.clear()
            await reader
        finally:
            reader.cancel()
            self._lease.stop_waiting(self._wake_up)
            for subscription in list(self._subscriptions.values()):
                self._drop(subscription)

    # Requests

    async def _read(self, requests: AsyncIterator[log_pb2.FetchRequest]) -> None:
        try:
            async for request in requests:
                self._handle(request)
                self._changed.set()
        finally:
            self._requests_done = True
            self._changed.set()

    def _handle(self, request: log_pb2.FetchRequest) -> None:
        kind = request.WhichOneof("request")
        if (kind == "open") == self._opened:
            raise InvalidRequestError("a fetch session is opened once, before anything else")
        match kind:
            case "open":
                self._opened = True
                self._committed_only = request.open.isolation_level == common_pb2.READ_COMMITTED
                wanted = request.open.max_frame_bytes or self._max_frame_bytes
                self._max_frame_bytes = max(SMALLEST_FRAME_BYTES, min(wanted, self._max_frame_bytes))
                self._credit = request.open.credit_bytes
                self._rack = request.open.rack
            case "subscribe":
                for part in request.subscribe.partitions:
                    self._subscribe(part)
            case "unsubscribe":
                for subscription_id in request.unsubscribe.subscription_ids:
                    subscription = self._subscriptions.get(subscription_id)
                    if subscription is not None:
                        self._drop(subscription)
            case "credit":
                if request.credit.bytes <= 0:
                    raise InvalidRequestError(f"a credit of {request.credit.bytes} bytes grants nothing")
                self._credit += request.credit.bytes
            case _:
                raise InvalidRequestError("an empty fetch request")

    def _subscribe(self, part: log_pb2.FetchPartition) -> None:
        if part.subscription_id <= self._highest_id:
            raise InvalidRequestError(
                f"subscription_id {part.subscription_id} is not above {self._highest_id}: ids of a session only grow"
            )
        self._highest_id = part.subscription_id
        try:
            if len(self._subscriptions) >= self._max_subscriptions:
                raise BrokerOverloaded(f"a fetch session follows at most {self._max_subscriptions} partitions")
            partition = self._registry.find(part.topic_id, part.partition)
            partition.check_leader_epoch(part.leader_epoch, from_follower=part.from_follower)
            if part.HasField("damaged_offset"):
                partition.suspect(part.damaged_offset)
        except RaftlogError as error:
            self._refusals.append(_refusal(part.subscription_id, error))
            if len(self._refusals) > self._max_subscriptions:
                raise BrokerOverloaded("the client does not read its refusals") from None
            return
        subscription = _Subscription(partition, part)

        def wake() -> None:
            if not subscription.queued and not subscription.dropped:
                subscription.queued = True
                self._queue.append(subscription)
                self._changed.set()

        subscription.wake = wake
        self._subscriptions[part.subscription_id] = subscription
        wake()

    def _drop(self, subscription: _Subscription) -> None:
        subscription.dropped = True
        subscription.partition.stop_waiting(subscription.wake)
        self._lease.stop_waiting(subscription.wake)
        self._subscriptions.pop(subscription.id, None)

    # Frames

    async def _next_frames(self) -> list[Frame]:
        """Return what goes into the next message: as much as fits `max_frame_bytes`; nothing when there is none."""
        frames: list[Frame] = []
        room = self._max_frame_bytes
        while self._refusals:
            frames.append(self._refusals.popleft())
        while room > 0 and self._credit > 0 and self._queue:
            subscription = self._queue.popleft()
            subscription.queued = False
            if subscription.dropped:
                continue
            from_follower = subscription.from_follower
            if not self._lease.valid() and subscription.partition.refusal(from_follower=from_follower) is None:
                # the first of the two: a lease, or another leader
                subscription.partition.wait(subscription.wake, from_follower=from_follower)
                self._lease.call_when_renewed(subscription.wake)
                continue
            used = await self._add_frame(frames, subscription, room)
            room -= used
            self._credit -= used
        return frames

    async def _may_leave(self, frames: list[Frame]) -> bool:
        """Return once there is a lease, if the frames tell of records; False when the client has gone before that."""
        while not self._lease.valid() and not all(frame.head.HasField("error") for frame in frames):
            if self._requests_done:
                return False
            self._lease.call_when_renewed(self._wake_up)
            self._changed.clear()
            await self._changed.wait()
        return True

    def _wake_up(self) -> None:
        self._changed.set()

    async def _add_frame(self, frames: list[Frame], subscription: _Subscription, room: int) -> int:
        partition, from_follower = subscription.partition, subscription.from_follower
        if self._rack and not from_follower and self._send_away(frames, subscription):
            return 0
        end = partition.last_stable_offset if self._committed_only else partition.high_watermark
        read = partial(partition.read, subscription.position, room, end, from_follower=from_follower)
        try:
            if not subscription.announced and partition.refusal(from_follower=from_follower) is None:
                # Here, with a lease: who may be deposed does not know what others have committed since.
                partition.check_position(
                    subscription.position, subscription.last_fetched_epoch, from_follower=from_follower
                )
            result = read(blocking=False)
            if result is None:  # not in the page cache
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._disk, partial(read, blocking=True))
                assert result is not None, "a blocking read waits"
        except RaftlogError as error:
            if isinstance(error, CorruptRecordError):
                partition.suspect(subscription.position)
            if not subscription.dropped:
                self._drop(subscription)
                frames.append(_refusal(subscription.id, error))
            return 0
        if subscription.dropped:
            return 0
        records = result.records
        subscription.position = max(subscription.position, result.next_offset)
        if records or not subscription.announced:
            subscription.announced = True
            head = log_pb2.FetchFrame(
                subscription_id=subscription.id,
                high_watermark=partition.high_watermark,
                last_stable_offset=partition.last_stable_offset,
                log_start_offset=partition.log.log_start_offset,
            )
            frames.append(Frame(head, records))
        current_end = partition.last_stable_offset if self._committed_only else partition.high_watermark
        if subscription.position < current_end:
            subscription.wake()
        else:
            partition.wait(subscription.wake, from_follower=from_follower)
        return len(records)

    def _send_away(self, frames: list[Frame], subscription: _Subscription) -> bool:
        """Drop a subscription with the name of a nearer replica, if there is one."""
        nearer = self._registry.preferred_replica(subscription.partition, self._rack)
        if nearer is None:
            return False
        self._drop(subscription)
        head = log_pb2.FetchFrame(subscription_id=subscription.id, preferred_read_replica=nearer)
        frames.append(Frame(head, b""))
        return True


def _refusal(subscription_id: int, error: RaftlogError) -> Frame:
    return Frame(log_pb2.FetchFrame(subscription_id=subscription_id, error=to_wire(error)), b"")
