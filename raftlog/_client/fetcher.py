"""The consumer's fetching side on the event loop: every partition stays subscribed where it is to be read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from raftlog._client.connections import connections
from raftlog._client.fetch_session import FetchSession
from raftlog._client.metadata import MetadataCache
from raftlog._client.options import ConsumerOptions
from raftlog._core.client_figures import ConsumerFigures, Figures
from raftlog._core.positions import Fetched, NearReplica, PartitionState, Positions
from raftlog._core.read_source import ReadSource, has_moved, leads_anew, read_source
from raftlog.errors import CorruptRecordError, FencedError, OffsetOutOfRange, RaftlogError, RetriableError, from_wire
from raftlog.format.aborted import AbortedRanges
from raftlog.v1 import common_pb2, log_pb2
from raftlog.wire import Frame

logger = logging.getLogger(__name__)

_PATIENCE_S: Final = 1.0
_PATIENCE_GROWTH: Final = 1.4
"""A session that is silent may be one where nothing happens, or a frozen or deposed leader's: it is looked at after a
second, and in growing distances up to `metadata.max.age.ms`."""


def monotonic_ms() -> float:
    """Return milliseconds since some instant."""
    return time.monotonic() * 1000.0


class _Trouble(NamedTuple):
    """Sessions with a broker that broke, in a row."""

    failures: int
    not_before_ms: float
    since_ms: float


_NO_TROUBLE: Final = _Trouble(0, 0.0, math.inf)


class Fetcher:
    """Positions, metadata and one fetch session for each broker that something is read from.

    Frames go from here to the caller's thread through `_inbox` without a lock, so that neither waits while the other
    one decodes or reads. `lock` guards the positions. Made on the event loop, where everything here runs but for
    `request_sync`.
    """

    def __init__(self, bootstrap: list[str], options: ConsumerOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.options = options
        self.loop = loop
        self.lock = threading.RLock()
        self.positions = Positions()
        self.closed: RaftlogError | None = None
        self.on_data: Callable[[], None] = lambda: None
        """Called on the loop when a poll may have something to return or to raise."""
        self.connections = connections(options.pem, options.sasl)
        self.metadata = MetadataCache(
            self.connections,
            bootstrap,
            max_age_ms=options.metadata_max_age_ms,
            request_timeout_ms=options.request_timeout_ms,
            pauses=options.pauses,
        )
        self._inbox: deque[tuple[PartitionState, Fetched]] = deque()
        self._sessions: dict[int, FetchSession] = {}
        self._troubles: dict[int, _Trouble] = {}
        self._next_subscription_id = 0
        self.figures = ConsumerFigures(monotonic_ms() / 1_000)
        self._sync_pending = False
        self._sync_timer: asyncio.TimerHandle | None = None
        self._silence_timer: asyncio.TimerHandle | None = None

    def _start_placing(self, states: list[PartitionState]) -> None:
        """Look up where these unplaced partitions begin."""
        raise NotImplementedError

    def _synced(self) -> None:
        """Told after whatever changed has been looked at."""

    def metrics(self) -> Figures:
        """Return what `Consumer.metrics` does; from any thread."""
        with self.lock:
            states = list(self.positions.states.values())
        lags = {
            state.topic_partition: max(0, state.high_watermark - state.position)
            for state in states
            if state.position is not None and state.high_watermark >= 0
        }
        now_s = monotonic_ms() / 1_000
        return self.figures.show(now_s, lags=lags, assigned=len(states), connections=len(self._sessions))

    def request_sync(self) -> None:
        """Have the loop subscribe what wants it; from any thread."""
        if not self._sync_pending:
            self._sync_pending = True
            self._call_soon(self._sync)

    def _call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the interpreter, or asyncio.run, has ended
            self.loop.call_soon_threadsafe(function, *arguments)

    # Credit

    def share_bytes(self) -> int:
        """Return how much of `fetch.max.bytes` one session may take."""
        return max(1024, self.options.fetch_max_bytes // max(1, len(self._sessions)))

    def _stale(self, frames: list[Fetched]) -> None:
        if frames:
            self._call_soon(self._give_back, frames)

    def _give_back(self, frames: list[Fetched]) -> None:
        sizes: dict[FetchSession, int] = {}
        for frame in frames:
            sizes[frame.source] = sizes.get(frame.source, 0) + len(frame.records)
        for session, size in sizes.items():
            session.give_back(size)

    # What is subscribed where

    def _sync(self) -> None:
        """Unsubscribe what is stale or to be read elsewhere, subscribe what wants it where it is to be read."""
        self._sync_pending = False
        if self.closed is not None:
            return
        now_ms = monotonic_ms()
        with self.lock:
            self._leave_silent_followers()
            view = self.metadata.view
            sources = {state: read_source(state, view, now_ms) for state in self.positions.states.values()}
            for state, source in sources.items():
                if source is not None and has_moved(state, source):
                    self._stale(state.unsubscribe())
            self._drop_stale()
            unplaced: list[PartitionState] = []
            by_node: dict[int, list[log_pb2.FetchPartition]] = {}
            again_ms = math.inf
            missing_since_ms = -math.inf
            for state, source in sources.items():
                if not state.fetchable and not state.unplaced:
                    continue
                if state.not_before_ms > now_ms and not leads_anew(state, source):
                    again_ms = min(again_ms, state.not_before_ms)
                    missing_since_ms = max(missing_since_ms, state.missing_since_ms or -math.inf)
                elif state.unplaced:
                    unplaced.append(state)
                elif source is None:
                    state.missing_since_ms = state.missing_since_ms or now_ms
                    missing_since_ms = max(missing_since_ms, state.missing_since_ms)
                elif (trouble := self._troubles.get(source.node_id, _NO_TROUBLE)).not_before_ms > now_ms:
                    again_ms = min(again_ms, trouble.not_before_ms)
                    missing_since_ms = max(missing_since_ms, trouble.since_ms)
                else:
                    by_node.setdefault(source.node_id, []).append(self._subscription(state, source))
        for node_id, partitions in by_node.items():
            self._sessions[node_id].subscribe(partitions)
        if missing_since_ms > -math.inf:
            self._request_refresh(missing_since_ms)
        self._look_at_silence()
        if unplaced:
            self._start_placing(unplaced)
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync_timer = None
        if again_ms < math.inf:  # a little later: timers may fire early
            self._sync_timer = self.loop.call_later((again_ms - now_ms) / 1000 + 0.001, self._sync)
        self._synced()

    def _drop_stale(self) -> None:
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

    def _subscription(self, state: PartitionState, source: ReadSource) -> log_pb2.FetchPartition:
        session = self._sessions.get(source.node_id)
        if session is None:
            address = self.metadata.address(source.node_id)
            assert address is not None, "who leads or is read from is a broker that is known"
            session = self._sessions[source.node_id] = FetchSession(self, source.node_id, address)
        self._next_subscription_id += 1
        assert state.position is not None, "what is fetchable has a position"
        state.subscription_id = self._next_subscription_id
        state.node_id, state.leader_epoch = source.node_id, source.leader_epoch
        if not source.from_follower:
            state.near = None
        session.subscriptions[state.subscription_id] = state
        return log_pb2.FetchPartition(
            subscription_id=state.subscription_id,
            topic_id=state.topic_id,
            partition=state.topic_partition.partition,
            offset=state.position,
            leader_epoch=source.leader_epoch,
            last_fetched_epoch=state.last_epoch,
            from_follower=source.from_follower,
            damaged_offset=state.position if state.complaints else None,
        )

    def _request_refresh(self, missing_since_ms: float, probe: int | None = None) -> None:
        waited_s = (monotonic_ms() - missing_since_ms) / 1000
        self.metadata.request_refresh(missing_since_s=self.loop.time() - waited_s, probe=probe)

    # Who says nothing

    def _look_at_silence(self) -> None:
        """Ask about brokers whose sessions have been silent for long; set the timer for the next look."""
        if self._silence_timer is not None:
            self._silence_timer.cancel()
            self._silence_timer = None
        if self.closed is not None:
            return
        now_s = self.loop.time()
        next_s = math.inf
        for session in self._sessions.values():
            if not session.subscriptions:
                continue
            silent_since_s = self.metadata.silent_since(session.node_id)
            if silent_since_s is not None:  # nobody else will say when that is over
                self.metadata.request_refresh(missing_since_s=silent_since_s, probe=session.node_id)
            if now_s - session.heard_at_s >= session.patience_s:
                session.patience_s *= _PATIENCE_GROWTH
                self.metadata.request_refresh(probe=session.node_id)
            if session.patience_s * 1000 < self.options.metadata_max_age_ms:
                next_s = min(next_s, session.heard_at_s + session.patience_s)
        if next_s < math.inf:
            self._silence_timer = self.loop.call_later(max(0.0, next_s - now_s) + 0.001, self._look_at_silence)

    def _leave_silent_followers(self) -> None:
        for state in self.positions.states.values():
            if state.near is not None and self.metadata.silent_since(state.near.node_id) is not None:
                self._leave_follower(state, RetriableError(f"broker {state.near.node_id} does not answer"))

    def _leave_follower(self, state: PartitionState, error: RaftlogError) -> None:
        """Go back to the leader, after a pause: it may send us to the same one again."""
        self._stale(state.unsubscribe())
        state.near = None
        self._back_off(state, error)

    # What sessions tell

    def heard(self, session: FetchSession) -> None:
        """A session was told something."""
        session.heard_at_s = self.loop.time()
        session.patience_s = _PATIENCE_S
        if self._silence_timer is None:
            self._look_at_silence()

    def received(self, session: FetchSession, state: PartitionState, frame: Frame) -> None:
        """Take a frame in."""
        head = frame.head
        state.high_watermark = max(state.high_watermark, head.high_watermark)
        state.failures = 0
        state.missing_since_ms = None
        self._troubles.pop(session.node_id, None)
        if len(frame.records):
            self.figures.received(state.topic_partition.topic, len(frame.records), monotonic_ms() / 1_000)
            aborted = AbortedRanges(head.aborted) if head.aborted else None
            self._inbox.append((state, Fetched(head.subscription_id, frame.records, session, aborted)))
            self.on_data()

    def redirected(self, state: PartitionState, node_id: int) -> None:
        """The leader has dropped a subscription because a follower is nearer (KIP-392)."""
        with self.lock:
            self._stale(state.unsubscribe())
            until_ms = monotonic_ms() + self.options.metadata_max_age_ms
            state.near = NearReplica(node_id, state.leader_epoch, until_ms)
            broker = self.metadata.view.brokers.get(node_id)
            if broker is None or broker.fenced:
                self._leave_follower(state, RetriableError(f"broker {node_id} is not known, or fenced"))
                self.metadata.request_refresh()
        self.request_sync()

    def refused(self, state: PartitionState, wire_error: common_pb2.Error) -> None:
        """The broker has dropped a subscription: decide whether to start over, wait and ask again, or fail."""
        error = from_wire(wire_error)
        topic_partition = state.topic_partition
        text = self._named(state, error)
        with self.lock:
            unread = state.has_data or any(waiting is state for waiting, _ in self._inbox)
            from_follower = state.near is not None
            self._stale(state.unsubscribe())
            if from_follower:  # what it does not know the leader may know, and the leader decides
                logger.debug("%s; going back to the leader", text)
                self._leave_follower(state, error)
                if wire_error.HasField("leader"):
                    self.metadata.learn(topic_partition.topic, topic_partition.partition, wire_error)
            elif isinstance(error, OffsetOutOfRange) and not unread:
                if self.options.auto_offset_reset == "none":
                    self._fail(state, OffsetOutOfRange(f"{text}; seek to an offset that is there"))
                else:
                    logger.warning("%s; starting over at the %s", text, self.options.auto_offset_reset)
                    state.unplace(self.options.auto_offset_reset)
            elif isinstance(error, (RetriableError, FencedError, OffsetOutOfRange)) or (
                isinstance(error, CorruptRecordError) and state.complain()
            ):
                # Out of range with unread records: the position lies before, ask from there. Damaged: another replica
                # is to take over.
                self._back_off(state, error)
                state.missing_since_ms = state.missing_since_ms or monotonic_ms()
                self.metadata.learn(topic_partition.topic, topic_partition.partition, wire_error)
            else:
                self._fail(state, type(error)(text))
        self.request_sync()

    def _ask_again(self) -> None:
        """Ask for what did not check once more, and say so: it may come from another replica then. Under the lock."""
        for state, error in self.positions.doubtful:
            logger.warning("%s; asking for it again", error)
            self._back_off(state, error)
        self.positions.doubtful.clear()
        self.request_sync()

    def _fail(self, state: PartitionState, error: RaftlogError) -> None:
        self._stale(state.unsubscribe())
        state.error = error
        self.on_data()

    def _back_off(self, state: PartitionState, error: RaftlogError) -> None:
        state.failures += 1
        failures = max(state.failures, state.complaints)
        state.not_before_ms = monotonic_ms() + self.options.pauses.after_ms(error, failures)

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
        now_ms = monotonic_ms()
        before = self._troubles.get(session.node_id, _NO_TROUBLE)
        failures, since_ms = before.failures + 1, min(before.since_ms, now_ms)
        pause_ms = self.options.pauses.after_ms(error, failures)
        self._troubles[session.node_id] = _Trouble(failures, now_ms + pause_ms, since_ms)
        with self.lock:
            for subscription_id, state in session.subscriptions.items():
                if state.subscription_id == subscription_id:
                    state.unsubscribe()
                    state.near = None
                    if not isinstance(error, RetriableError):
                        self._fail(state, error)
        if self.closed is None:
            self._request_refresh(since_ms)
            self.request_sync()

    async def close(self) -> None:
        """Stop."""
        for timer in (self._sync_timer, self._silence_timer):
            if timer is not None:
                timer.cancel()
        await asyncio.gather(*(session.close() for session in self._sessions.values()), return_exceptions=True)
        await self.metadata.close()
        await self.connections.close()
