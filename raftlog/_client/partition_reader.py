"""The consumer's fetching side: partitions stay subscribed at their leaders, rows go out in the caller's thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from raftlog._client.connections import Connections
from raftlog._client.fetch_session import FetchSession
from raftlog._client.metadata import MetadataCache
from raftlog._client.options import ConsumerOptions
from raftlog._core.fetched import Rows
from raftlog._core.positions import Fetched, PartitionState, Positions
from raftlog.errors import (
    ClosedError,
    FencedError,
    InvalidRequestError,
    OffsetOutOfRange,
    RaftlogError,
    RetriableError,
    UnknownTopicId,
    UnknownTopicOrPartition,
    from_wire,
)
from raftlog.types import TopicPartition
from raftlog.v1 import common_pb2, log_pb2
from raftlog.wire import Frame

logger = logging.getLogger(__name__)

_UNTIL_SEEK: Final = (OffsetOutOfRange, UnknownTopicId, UnknownTopicOrPartition)
"""What does not pass by itself. Anything else may be whole elsewhere or mended soon: it is tried again."""


def monotonic_ms() -> float:
    """Return milliseconds since some instant."""
    return time.monotonic() * 1000.0


class PartitionReader:
    """Positions, metadata and one fetch session for each broker that leads something.

    Frames go from the loop to the caller through `_inbox` without a lock, so that neither waits while the other one
    decodes or reads. `lock` guards the positions. Made on the event loop; what stands under "From any thread" may
    be called from any.
    """

    def __init__(self, bootstrap: list[str], options: ConsumerOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.options = options
        self.loop = loop
        self.lock = threading.RLock()
        self.positions = Positions()
        self.subscribed = False
        """Whether there is a subscription, which may have no partitions yet."""
        self.closed: RaftlogError | None = None
        self.on_data: Callable[[], None] = lambda: None
        """Called on the loop when a poll may have something to return or to raise."""
        self.connections = Connections()
        self.metadata = MetadataCache(
            self.connections,
            bootstrap,
            max_age_ms=options.metadata_max_age_ms,
            request_timeout_ms=options.request_timeout_ms,
            pauses=options.pauses,
        )
        self._pid = os.getpid()
        self._inbox: deque[tuple[PartitionState, Fetched]] = deque()
        self._sessions: dict[int, FetchSession] = {}
        self._session_failures: dict[int, tuple[int, float]] = {}
        self._next_subscription_id = 0
        self._raised_last = False
        """Whether the last poll raised: then it is the turn of the records, however many partitions are broken."""
        self._sync_pending = False
        self._sync_timer: asyncio.TimerHandle | None = None

    def _start_placing(self, states: list[PartitionState]) -> None:
        """Look up where these unplaced partitions begin; on the event loop."""
        raise NotImplementedError

    def _synced(self) -> None:
        """Told on the event loop after whatever changed has been looked at."""

    # From any thread

    def check_open(self) -> None:
        """Refuse when closed, or carried over into another process.

        Raises:
            ClosedError: says which.
        """
        if self.closed is not None:
            raise type(self.closed)(str(self.closed))
        if self._pid != os.getpid():
            raise ClosedError(f"this consumer was made in process {self._pid}; make one in each process")

    def abandon_after_fork(self) -> None:
        """In a forked child: let go of everything without touching it."""
        self.lock = threading.RLock()  # the old one may be held by a thread that does not exist here
        self.closed = ClosedError(f"this consumer was made in process {self._pid}; make one in each process")

    def take(self, max_rows: int) -> list[Rows]:
        """Return rows that are there already; the positions move on.

        Raises:
            RaftlogError: a partition failed and wants `seek`, or the subscription cannot go on.
        """
        self.check_open()
        spent: list[Fetched] = []
        try:
            with self.lock:
                if not self.positions.states and not self.subscribed:
                    raise InvalidRequestError(
                        "nothing to poll: call subscribe or assign first, in raftlog.aio with await"
                    )
                inbox = self._inbox
                while inbox:
                    state, fetched = inbox.popleft()
                    if not self.positions.receive(state, fetched):
                        spent.append(fetched)
                if not self._raised_last:
                    self._raise_pending()
                taken = self.positions.take(max_rows, spent, check_crcs=self.options.check_crcs)
                if not taken:
                    self._raise_pending()
                self._raised_last = False
                return taken
        finally:
            if spent:
                self._call_soon(self._give_back, spent)

    def _raise_pending(self) -> None:
        """Raise the error of a partition, once in a backoff, so that polls between hand out what the others have."""
        now_ms = monotonic_ms()
        state = self.positions.failed(now_ms)
        if state is None:
            return
        error = state.error
        assert error is not None, "it has failed"
        self._raised_last = True
        state.raised += 1
        pause_ms = self.options.pauses.after_ms(error, state.raised)
        state.raise_not_before_ms = now_ms + pause_ms
        if isinstance(error, _UNTIL_SEEK):
            self._call_soon(self._remind, pause_ms)
        else:
            state.error = None
            state.not_before_ms = state.raise_not_before_ms
            self.request_sync()
        raise type(error)(str(error))

    def _remind(self, pause_ms: float) -> None:
        self.loop.call_later(pause_ms / 1000 + 0.001, lambda: self.on_data())

    def place(self, topic_partition: TopicPartition, offset: int) -> None:
        """Go on at another offset."""
        self.check_open()
        with self.lock:
            self._stale(self._state(topic_partition).place(offset))
        self.request_sync()

    def pause(self, partitions: Iterable[TopicPartition], paused: bool) -> None:
        """Stop fetching partitions, or go on."""
        self.check_open()
        with self.lock:
            for topic_partition in partitions:
                state = self._state(topic_partition)
                if paused and not state.paused:
                    self._stale(state.unsubscribe())
                state.paused = paused
        self.request_sync()

    def _state(self, topic_partition: TopicPartition) -> PartitionState:
        state = self.positions.states.get(TopicPartition(*topic_partition))
        if state is None:
            raise InvalidRequestError(f"{TopicPartition(*topic_partition)} is not assigned to this consumer")
        return state

    def position_now(self, topic_partition: TopicPartition) -> int | None:
        """Return the offset of the next record, None while the start is being looked up.

        Raises:
            InvalidRequestError: not assigned. OffsetOutOfRange: no position, and no policy to get one.
        """
        self.check_open()
        with self.lock:
            state = self._state(topic_partition)
            if state.position is None and state.error is not None:
                raise type(state.error)(str(state.error))
            return state.position

    def _stale(self, frames: list[Fetched]) -> None:
        if frames:
            self._call_soon(self._give_back, frames)

    def _call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the interpreter, or asyncio.run, has ended
            self.loop.call_soon_threadsafe(function, *arguments)

    def request_sync(self) -> None:
        """Have the loop subscribe what wants it."""
        if not self._sync_pending:
            self._sync_pending = True
            self._call_soon(self._sync)

    # On the event loop

    def _fail(self, state: PartitionState, error: RaftlogError) -> None:
        self._stale(state.unsubscribe())
        state.error = error
        self.on_data()

    def share_bytes(self) -> int:
        """Return how much of `fetch.max.bytes` one session may take."""
        return max(1024, self.options.fetch_max_bytes // max(1, len(self._sessions)))

    def _give_back(self, frames: list[Fetched]) -> None:
        sizes: dict[FetchSession, int] = {}
        for frame in frames:
            sizes[frame.source] = sizes.get(frame.source, 0) + len(frame.records)
        for session, size in sizes.items():
            session.give_back(size)

    def _sync(self) -> None:
        """Unsubscribe what is stale, subscribe what wants it, at the leaders that are known."""
        self._sync_pending = False
        if self.closed is not None:
            return
        with self.lock:
            for session in list(self._sessions.values()):
                stale = [
                    subscription_id
                    for subscription_id, state in session.subscriptions.items()
                    if state.subscription_id != subscription_id
                    or self.positions.states.get(state.topic_partition) is not state
                ]
                for subscription_id in stale:
                    del session.subscriptions[subscription_id]
                if stale:
                    session.send(log_pb2.FetchRequest(unsubscribe=log_pb2.Unsubscribe(subscription_ids=stale)))
            by_node: dict[int, list[log_pb2.FetchPartition]] = {}
            now_ms = monotonic_ms()
            leaderless = False
            unplaced: list[PartitionState] = []
            again_ms = math.inf
            for state in self.positions.states.values():
                if not state.fetchable and not state.unplaced:
                    continue
                if state.not_before_ms > now_ms:
                    again_ms = min(again_ms, state.not_before_ms)
                    continue
                if state.unplaced:
                    unplaced.append(state)
                    continue
                leader = self.metadata.view.leader(*state.topic_partition)
                if leader is None:
                    leaderless = True
                    continue
                _, not_before_ms = self._session_failures.get(leader.broker_id, (0, 0.0))
                if not_before_ms > now_ms:
                    again_ms = min(again_ms, not_before_ms)
                    continue
                by_node.setdefault(leader.broker_id, []).append(self._subscription(state, leader.broker_id))
        for node_id, partitions in by_node.items():
            self._sessions[node_id].send(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=partitions)))
        if leaderless:
            self.metadata.request_refresh()
        if unplaced:
            self._start_placing(unplaced)
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync_timer = None
        if again_ms < math.inf:  # a little later: timers may fire early
            self._sync_timer = self.loop.call_later((again_ms - now_ms) / 1000 + 0.001, self._sync)
        self._synced()

    def _subscription(self, state: PartitionState, node_id: int) -> log_pb2.FetchPartition:
        session = self._sessions.get(node_id)
        if session is None:
            address = self.metadata.address(node_id)
            assert address is not None, "a leader is a broker that is known"
            session = self._sessions[node_id] = FetchSession(self, node_id, address)
        self._next_subscription_id += 1
        assert state.position is not None, "what is fetchable has a position"
        state.subscription_id = self._next_subscription_id
        state.node_id = node_id
        session.subscriptions[state.subscription_id] = state
        view = self.metadata.view.partition(state.topic_partition)
        return log_pb2.FetchPartition(
            subscription_id=state.subscription_id,
            topic_id=state.topic_id,
            partition=state.topic_partition.partition,
            offset=state.position,
            leader_epoch=view.leader_epoch if view is not None else -1,
            last_fetched_epoch=state.last_epoch,
        )

    def received(self, session: FetchSession, state: PartitionState, frame: Frame) -> None:
        """Take a frame in."""
        head = frame.head
        state.high_watermark = max(state.high_watermark, head.high_watermark)
        state.failures = 0
        self._session_failures.pop(session.node_id, None)
        if len(frame.records):
            self._inbox.append((state, Fetched(head.subscription_id, frame.records, session)))
            self.on_data()

    def refused(self, state: PartitionState, wire_error: common_pb2.Error) -> None:
        """The broker has dropped a subscription: decide whether to start over, wait and ask again, or fail."""
        error = from_wire(wire_error)
        topic_partition = state.topic_partition
        text = self._named(state, error)
        with self.lock:
            unread = state.has_data or any(waiting is state for waiting, _ in self._inbox)
            self._stale(state.unsubscribe())
            if isinstance(error, OffsetOutOfRange) and not unread:
                if self.options.auto_offset_reset == "none":
                    self._fail(state, OffsetOutOfRange(f"{text}; seek to an offset that is there"))
                else:
                    logger.warning("%s; starting over at the %s", text, self.options.auto_offset_reset)
                    state.unplace(self.options.auto_offset_reset)
            elif isinstance(error, (RetriableError, FencedError, OffsetOutOfRange)):
                # Out of range with unread records: the position lies before, ask from there.
                self._back_off(state, error)
                self.metadata.learn(topic_partition.topic, topic_partition.partition, wire_error)
            else:
                self._fail(state, type(error)(text))
        self.request_sync()

    def _back_off(self, state: PartitionState, error: RaftlogError) -> None:
        state.failures += 1
        state.not_before_ms = monotonic_ms() + self.options.pauses.after_ms(error, state.failures)

    @staticmethod
    def _named(state: PartitionState, error: RaftlogError) -> str:
        text = str(error)  # brokers name the partition as well
        name = f"{state.topic_partition}:"
        return text if text.startswith(name) else f"{name} {text}"

    def session_lost(self, session: FetchSession, error: RaftlogError) -> None:
        """The stream has ended: what was subscribed there is subscribed again, where its leader then is."""
        logger.debug("fetch session with broker %d ended: %s", session.node_id, error)
        if self._sessions.get(session.node_id) is session:
            del self._sessions[session.node_id]
        failures = self._session_failures.get(session.node_id, (0, 0.0))[0] + 1
        pause_ms = self.options.pauses.after_ms(error, failures)
        self._session_failures[session.node_id] = (failures, monotonic_ms() + pause_ms)
        with self.lock:
            for subscription_id, state in session.subscriptions.items():
                if state.subscription_id == subscription_id:
                    state.unsubscribe()
                    if not isinstance(error, RetriableError):
                        self._fail(state, error)
        if self.closed is None:
            self.metadata.request_refresh()
            self.request_sync()

    async def close(self) -> None:
        """Stop."""
        self.closed = self.closed or ClosedError("the consumer is closed")
        self.on_data()
        if self._sync_timer is not None:
            self._sync_timer.cancel()
        await asyncio.gather(*(session.close() for session in self._sessions.values()), return_exceptions=True)
        await self.metadata.close()
        await self.connections.close()
