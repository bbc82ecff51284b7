"""One `Log.Fetch` stream: the client subscribes partitions and grants credit, the broker pushes committed records.

A client that names its rack is redirected to a replica there, once one is in sync (KIP-392). It returns to the leader
by itself.

Permissions: READ of the topic, from the subscription on and as long as it lasts. After a change of permissions the
session checks all subscriptions again before it makes the next frame, so no record leaves without permission. While
nothing happens on the stream, a forbidden subscription stays.

Quotas (KIP-13, KIP-124): a message is charged when it is made, and its last frame carries the delay. No records are
read or sent before the delay is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from typing import Final, TypeVar

from broker.log.partition_log import ReadResult
from broker.log.transactions import AbortedTransaction
from broker.partition.partition import Partition, RecordTruncated
from broker.partition.produce_session import ResponseWriter
from broker.quotas.disk_reads import DiskReads
from broker.quotas.manager import LOOK_AGAIN_MS, QuotaManager, whole_ms
from broker.replicas.replica_manager import ReplicaManager
from broker.security.caller import EVERYTHING_ALLOWED, Caller, Decisions
from broker.server.lease import Wake
from raftlog.errors import BrokerOverloaded, CorruptRecordError, InvalidRequestError, RaftlogError, to_wire
from raftlog.format.wire import Frame
from raftlog.v1 import common_pb2, log_pb2
from raftlog.v1.security_pb2 import Acl
from raftmeta.quotas import CONSUMER_BYTE_RATE, REQUEST_PERCENTAGE

logger = logging.getLogger(__name__)

T = TypeVar("T")

SMALLEST_FRAME_BYTES = 4096
"""The least frame size that a client can ask for; a frame holds at least one batch anyway."""
MAX_PARTS: Final = 10_000
"""Partitions that one request may name; clients split larger requests."""
AT_A_TIME: Final = 500
"""Partitions of a request, or subscriptions with something to send, that are handled before other tasks get a turn on
the event loop. Also the most frames of a message, and the most refusals that may wait to be read."""


def readable_end(partition: Partition, isolation: common_pb2.IsolationLevel.ValueType) -> int:
    """Return the end (exclusive) of the records for a reader: with READ_COMMITTED the last stable offset."""
    return partition.high_watermark if isolation == common_pb2.READ_UNCOMMITTED else partition.last_stable_offset


class _Subscription:
    """One partition that the client has subscribed.

    States: queued (may have something to send) -> parked (waits at the end) -> queued ...; dropped is final.
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
        self.announced = False  # the client has received the marks once
        self.dropped = False
        self.wake: Wake = lambda: None  # the session sets it


class FetchSession:
    """State of one stream.

    Bounded: a frame is built only while the client's credit is above zero, and after the transport has accepted the
    previous one, so a client that does not read costs one frame. Nor are its subscriptions read while it leaves
    refusals unread. A session subscribes each partition once: a record wakes every subscription of its partition.
    """

    def __init__(
        self,
        replica_manager: ReplicaManager,
        disk_reads: DiskReads,
        *,
        max_frame_bytes: int,
        max_subscriptions: int,
        who: Caller = EVERYTHING_ALLOWED,
        quotas: QuotaManager | None = None,
    ) -> None:
        """`quotas`: None limits no rate; a broker always has them."""
        self.was_used = False
        """Whether a partition was read, be it to its end at once."""
        self._who = who
        self._quotas = quotas
        self._account = None if quotas is None else quotas.account(who, CONSUMER_BYTE_RATE)
        self._waited_s = 0.0
        """For how long the message being built has waited for the disk."""
        self._held_until_ms = 0.0
        """No records leave before, by the client's quota; 0: it is not held."""
        self._unholding: asyncio.TimerHandle | None = None
        self._replica_manager = replica_manager
        self._disk_reads = disk_reads
        self._max_frame_bytes = max_frame_bytes
        self._max_subscriptions = max_subscriptions
        self._lease = replica_manager.lease
        self._counters = replica_manager.counters
        self._requests = replica_manager.counters.request("Fetch")
        self._isolation: common_pb2.IsolationLevel.ValueType = common_pb2.READ_COMMITTED
        self._rack = ""
        self._opened = False
        self._credit = 0
        self._subscriptions: dict[int, _Subscription] = {}
        self._subscribed: dict[Partition, int] = {}
        """The ids of `_subscriptions`, by partition."""
        self._highest_id = -1
        self._queue: deque[_Subscription] = deque()
        self._refusals: deque[Frame] = deque()
        self._refusals_left = asyncio.Event()
        """Set when refusals have left."""
        self._changed = asyncio.Event()
        self._requests_done = False
        self._topics = Decisions.of(who, Acl.READ, Acl.TOPIC)
        self._permitted_at: object = None
        """Version of the permissions by which all subscriptions were checked last."""
        self._traced: list[tuple[_Subscription, int, int, int]] = []
        """Records of traced partitions in the next message: first offset, end (exclusive), bytes."""

    async def run(self, requests: AsyncIterator[log_pb2.FetchRequest], writer: ResponseWriter[list[Frame]]) -> None:
        """Serve the stream until the client ends it.

        Raises:
            InvalidRequestError: the client breaks the protocol; the stream ends.
        """
        reader = asyncio.ensure_future(self._read(requests))
        try:
            while not self._requests_done:
                begun_s, self._waited_s = time.monotonic(), 0.0
                self._hold_for_debt()
                frames = await self._next_frames()
                built_s = time.monotonic()
                worked_s = built_s - begun_s - self._waited_s
                if frames and await self._may_leave(frames):
                    self._charge(frames, worked_s)
                    try:
                        await writer.write(frames)
                    finally:  # a client that has the message may end the call before gRPC says that it was written
                        if self._traced:
                            self._trace(begun_s)
                    self._count(begun_s, built_s)
                elif not frames and not self._requests_done:
                    await self._changed.wait()
                    self._changed.clear()
            await reader
        finally:
            reader.cancel()
            if self._unholding is not None:
                self._unholding.cancel()
            self._lease.stop_waiting(self._wake_up)
            for subscription in list(self._subscriptions.values()):
                self._drop(subscription)

    def _count(self, begun_s: float, built_s: float) -> None:
        """Count a message: reading is the stage `local`, waiting for a slow reader `response`."""
        now_s = time.monotonic()
        self._requests.outcomes["NONE"] += 1
        stages = self._requests.stages
        stages["local"].observe(built_s - begun_s)
        stages["response"].observe(now_s - built_s)
        stages["total"].observe(now_s - begun_s)

    def _trace(self, begun_s: float) -> None:
        """Make the spans of the message that was just sent, or whose client has left meanwhile."""
        traced, self._traced = self._traced, []
        for subscription, begin, end, size_bytes in traced:
            traces = subscription.partition.traces
            if traces is not None:
                traces.fetched(begin, end, size_bytes, begun_s, from_follower=subscription.from_follower)

    # Requests

    async def _read(self, requests: AsyncIterator[log_pb2.FetchRequest]) -> None:
        try:
            async for request in requests:
                await self._handle(request)
                self._changed.set()
        finally:
            self._requests_done = True
            self._changed.set()

    async def _handle(self, request: log_pb2.FetchRequest) -> None:
        kind = request.WhichOneof("request")
        if (kind == "open") == self._opened:
            raise InvalidRequestError("a fetch session is opened once, before anything else")
        match kind:
            case "open":
                self._opened = True
                self._isolation = request.open.isolation_level
                wanted = request.open.max_frame_bytes or self._max_frame_bytes
                self._max_frame_bytes = max(SMALLEST_FRAME_BYTES, min(wanted, self._max_frame_bytes))
                self._credit = request.open.credit_bytes
                self._rack = request.open.rack
            case "subscribe":
                await self._subscribe_all(request.subscribe.partitions)
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
                raise InvalidRequestError("a fetch request is empty; send open, subscribe, unsubscribe or credit")

    async def _subscribe_all(self, parts: Collection[log_pb2.FetchPartition]) -> None:
        if len(parts) > MAX_PARTS:
            raise InvalidRequestError(f"one request subscribes at most {MAX_PARTS} partitions, not {len(parts)}")
        for number, part in enumerate(parts, 1):
            self._subscribe(part)
            while len(self._refusals) >= AT_A_TIME:
                self._refusals_left.clear()
                self._changed.set()
                await self._refusals_left.wait()
            if number % AT_A_TIME == 0:
                self._changed.set()
                await asyncio.sleep(0)

    def _subscribe(self, part: log_pb2.FetchPartition) -> None:
        if part.subscription_id <= self._highest_id:
            raise InvalidRequestError(
                f"subscription_id {part.subscription_id} is not above {self._highest_id}: ids of a session only grow"
            )
        self._highest_id = part.subscription_id
        try:
            if len(self._subscriptions) >= self._max_subscriptions:
                raise BrokerOverloaded(
                    f"a fetch session follows at most {self._max_subscriptions} partitions; open another one"
                )
            if self._topics is not None:
                topic = self._replica_manager.topic_name(part.topic_id, part.partition)
                if topic is not None:
                    self._topics.check(topic, part.topic_id)
            partition = self._replica_manager.find(part.topic_id, part.partition)
            partition.check_leader_epoch(part.leader_epoch, from_follower=part.from_follower)
            if (already := self._subscribed.get(partition)) is not None:
                raise InvalidRequestError(
                    f"{partition.topic_partition} has the subscription {already} of this session already; unsubscribe "
                    "that one first"
                )
            if part.HasField("damaged_offset"):
                partition.suspect(part.damaged_offset)
        except RaftlogError as error:
            self._requests.outcomes[type(error).__name__] += 1
            self._refusals.append(_refusal(part.subscription_id, error))
            return
        subscription = _Subscription(partition, part)

        def wake() -> None:
            if not subscription.queued and not subscription.dropped:
                subscription.queued = True
                self._queue.append(subscription)
                self._changed.set()

        subscription.wake = wake
        self._subscriptions[part.subscription_id] = subscription
        self._subscribed[partition] = part.subscription_id
        wake()

    def _drop(self, subscription: _Subscription) -> None:
        subscription.dropped = True
        subscription.partition.stop_waiting(subscription.wake)
        self._lease.stop_waiting(subscription.wake)
        if self._subscriptions.pop(subscription.id, None) is not None:
            del self._subscribed[subscription.partition]

    async def _drop_forbidden(self, topics: Decisions) -> None:
        """Drop the subscriptions that the client may no longer read."""
        self._permitted_at = topics.version
        for number, subscription in enumerate(list(self._subscriptions.values()), 1):
            topic = subscription.partition.log.topic
            if not subscription.dropped and not topics.allow(topic):
                error = topics.refusal(topic, subscription.partition.log.topic_id)
                self._requests.outcomes[type(error).__name__] += 1
                self._drop(subscription)
                self._refusals.append(_refusal(subscription.id, error))
            if number % AT_A_TIME == 0:
                await asyncio.sleep(0)

    # Frames

    async def _next_frames(self) -> list[Frame]:
        """Return the frames of the next message, at most about `max_frame_bytes`; none if there is nothing to send."""
        frames: list[Frame] = []
        room = self._max_frame_bytes
        while self._topics is not None and self._topics.version != self._permitted_at:
            await self._drop_forbidden(self._topics)
        while self._refusals and len(frames) < AT_A_TIME:
            frames.append(self._refusals.popleft())
        self._refusals_left.set()
        seen = 0
        while room > 0 and self._credit > 0 and self._queue and not self._held_until_ms and len(frames) < AT_A_TIME:
            if seen == AT_A_TIME:
                seen = 0
                await asyncio.sleep(0)
                continue
            seen += 1
            subscription = self._queue.popleft()
            subscription.queued = False
            if subscription.dropped:
                continue
            from_follower = subscription.from_follower
            if not self._lease.valid() and subscription.partition.refusal(from_follower=from_follower) is None:
                # woken by whichever comes first: a lease, or another leader
                subscription.partition.wait(subscription.wake, from_follower=from_follower)
                self._lease.call_when_renewed(subscription.wake)
                continue
            used = await self._add_frame(frames, subscription, room)
            room -= used
            self._credit -= used
        return frames

    async def _may_leave(self, frames: list[Frame]) -> bool:
        """Wait for a lease, unless all frames are errors; return False if the client has gone before it came."""
        while not self._lease.valid() and not all(frame.head.HasField("error") for frame in frames):
            if self._requests_done:
                return False
            self._lease.call_when_renewed(self._wake_up)
            self._changed.clear()
            await self._changed.wait()
        return True

    def _hold_for_debt(self) -> None:
        """Hold what follows while the client owes time for messages of other streams, which a new one does not end."""
        if self._account is None or self._held_until_ms:
            return
        _, delay_ms = self._account.charge(0, 0.0)
        if delay_ms > 0:
            self._hold(delay_ms)

    def _hold(self, delay_ms: float) -> None:
        assert self._quotas is not None, "without quotas there is no delay"
        self._held_until_ms = self._quotas.now_ms() + delay_ms
        self._look_again(delay_ms)

    def _charge(self, frames: list[Frame], took_s: float) -> None:
        """Charge a message that is about to leave; note the delay in it, and hold what follows."""
        if self._account is None:
            return
        _, delay_ms = self._account.charge(sum(len(frame.records) for frame in frames), took_s * 1_000)
        if delay_ms <= 0:
            return
        frames[-1].head.throttle_time_ms = whole_ms(delay_ms)
        if self._unholding is not None:  # refusals leave while records are held
            self._unholding.cancel()
        self._hold(delay_ms)

    def _look_again(self, delay_ms: float) -> None:
        self._unholding = asyncio.get_running_loop().call_later(min(delay_ms, LOOK_AGAIN_MS) / 1_000, self._unhold)

    def _unhold(self) -> None:
        """Let records leave again, if the delay is over, or a change of the quotas has ended it."""
        assert self._quotas is not None, "without quotas nothing is held"
        owed_ms = self._quotas.held_ms(self._who, CONSUMER_BYTE_RATE, REQUEST_PERCENTAGE)
        left_ms = min(self._held_until_ms - self._quotas.now_ms(), owed_ms)
        if left_ms > 0:
            self._look_again(left_ms)
            return
        self._unholding = None
        self._held_until_ms = 0.0
        self._changed.set()

    def _wake_up(self) -> None:
        self._changed.set()

    async def _add_frame(self, frames: list[Frame], subscription: _Subscription, room: int) -> int:
        partition, from_follower = subscription.partition, subscription.from_follower
        if self._rack and not from_follower and self._send_away(frames, subscription):
            return 0
        end = readable_end(partition, self._isolation)
        read = partial(partition.read, subscription.position, room, end, from_follower=from_follower)
        try:
            if not subscription.announced and partition.refusal(from_follower=from_follower) is None:
                # Only here, under a lease: a deposed leader does not know what its successor has committed.
                partition.check_position(
                    subscription.position, subscription.last_fetched_epoch, from_follower=from_follower
                )
            result = read(blocking=False)
            if result is None:  # not in the page cache
                self._counters.reads_from_disk += 1
                result = await self._on_a_thread(partial(read, blocking=True))
                assert result is not None, "a blocking read waits"
            elif result.records:
                self._counters.reads_from_cache += 1
            aborted = await self._aborted(subscription, result) if result.records else ()
        except RaftlogError as error:
            self._requests.outcomes[type(error).__name__] += 1
            if isinstance(error, CorruptRecordError):
                partition.suspect(subscription.position)
            if not subscription.dropped:
                self._drop(subscription)
                frames.append(_refusal(subscription.id, error))
            return 0
        if subscription.dropped:
            return 0
        records = result.records
        self._counters.topic(partition.log.topic).bytes_out += len(records)
        if records and partition.traces:
            self._traced.append((subscription, subscription.position, result.next_offset, len(records)))
        subscription.position = max(subscription.position, result.next_offset)
        if records or not subscription.announced:
            subscription.announced = self.was_used = True
            head = log_pb2.FetchFrame(
                subscription_id=subscription.id,
                high_watermark=partition.high_watermark,
                last_stable_offset=partition.last_stable_offset,
                log_start_offset=partition.log.log_start_offset,
            )
            for transaction in aborted:
                head.aborted.add(
                    producer_id=transaction.producer_id,
                    first_offset=transaction.first_offset,
                    last_offset=transaction.last_offset,
                )
            frames.append(Frame(head, records))
        if subscription.position < readable_end(partition, self._isolation):
            subscription.wake()
        else:
            partition.wait(subscription.wake, from_follower=from_follower)
        return len(records)

    async def _aborted(self, subscription: _Subscription, read: ReadResult) -> Sequence[AbortedTransaction]:
        """Return the aborted transactions that may have records in `read`; none for READ_UNCOMMITTED."""
        if self._isolation == common_pb2.READ_UNCOMMITTED:
            return ()
        log, begin, end = subscription.partition.log, subscription.position, read.next_offset
        found = log.aborted_transactions(begin, end, blocking=False)
        if found is None:
            found = await self._on_a_thread(partial(log.aborted_transactions, begin, end))
        return found

    async def _on_a_thread(self, read: Callable[[], T]) -> T:
        """Read from the disk. The event loop does other work meanwhile, so the client is not charged for this time."""
        begun_s = time.monotonic()
        try:
            return await self._disk_reads.read(self._who.share, read)
        finally:
            self._waited_s += time.monotonic() - begun_s

    def _send_away(self, frames: list[Frame], subscription: _Subscription) -> bool:
        """Redirect a subscription to a nearer replica, if there is one; return whether."""
        nearer = self._replica_manager.preferred_replica(subscription.partition, self._rack)
        if nearer is None:
            return False
        self._drop(subscription)
        head = log_pb2.FetchFrame(subscription_id=subscription.id, preferred_read_replica=nearer)
        frames.append(Frame(head, b""))
        return True


def _refusal(subscription_id: int, error: RaftlogError) -> Frame:
    diverging_offset = error.diverging_offset if isinstance(error, RecordTruncated) else None
    head = log_pb2.FetchFrame(subscription_id=subscription_id, error=to_wire(error), diverging_offset=diverging_offset)
    return Frame(head, b"")
