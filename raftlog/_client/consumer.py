"""The consumer's engine: from an assignment to rows in the caller's thread.

`FetchSession` is the fetch stream to one broker: subscriptions and credit out, frames in. `ConsumerEngine` decides
which partitions are read, where each begins and from which broker, and hands rows to `poll`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, cast

import grpc

from raftlog._client.connections import client_id_metadata, connections, from_grpc, is_task_cancelled
from raftlog._client.metadata import (
    EARLIEST,
    LATEST,
    STRAGGLER_GRACE_S,
    UNKNOWN_TOPIC_GRACE_S,
    MetadataCache,
    OffsetLookup,
    may_pass,
    monotonic_ms,
)
from raftlog._client.options import ConsumerOptions
from raftlog._core.cluster import TopicView
from raftlog._core.metrics import ConsumerMetrics, Metrics
from raftlog._core.positions import (
    Fetched,
    Mark,
    NearReplica,
    PartitionState,
    Positions,
    ReadSource,
    Rows,
    has_moved,
    leads_anew,
    read_source,
)
from raftlog._core.words import counted
from raftlog.errors import (
    AuthorizationError,
    BrokerUnavailable,
    ClosedError,
    CorruptRecordError,
    FencedError,
    InvalidRequestError,
    OffsetOutOfRange,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
    TopicAuthorizationFailed,
    UnknownTopicId,
    UnknownTopicOrPartition,
    UnstableOffsetCommit,
    from_wire,
)
from raftlog.format.aborted import AbortedRanges
from raftlog.format.wire import Frame, decode_fetch
from raftlog.types import TopicPartition
from raftlog.v1 import log_pb2

logger = logging.getLogger(__name__)

_PATIENCE_S: Final = 1.0
_PATIENCE_GROWTH: Final = 1.4
"""How long a session may be silent before the engine probes its broker: the session may be idle, or its leader frozen
or deposed. Further probes follow at growing intervals, up to `metadata.max.age.ms`."""


class _Trouble(NamedTuple):
    """Consecutive failures of the sessions with a broker."""

    failures: int
    not_before_ms: float
    since_ms: float


_NO_TROUBLE: Final = _Trouble(0, 0.0, math.inf)


PARTS_AT_A_TIME: Final = 5_000
"""The most partitions in one request; brokers accept twice as many."""


class FetchSession:
    """The fetch stream to one broker. It ends with the first failure; the engine then opens another one.

    Credit: the bytes that the broker may still send plus the unread bytes are at most `share_bytes` plus one frame.
    """

    def __init__(self, engine: ConsumerEngine, node_id: int, address: str) -> None:
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
        """How long the session may be silent after `heard_at_s` before the engine probes the broker."""
        self.closed = False
        self._task = engine.loop.create_task(self._run())

    def send(self, request: log_pb2.FetchRequest) -> None:
        """Queue a request."""
        self._out.append(request)
        self._ready.set()

    def subscribe(self, partitions: list[log_pb2.FetchPartition]) -> None:
        """Subscribe to partitions; the broker is expected to send frames or errors soon."""
        for at in range(0, len(partitions), PARTS_AT_A_TIME):
            some = partitions[at : at + PARTS_AT_A_TIME]
            self.send(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=some)))
        self._engine.heard(self)

    def give_back(self, used_bytes: int) -> None:
        """Grant credit again for frames that are used up, in few messages."""
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
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            error = BrokerUnavailable(f"the channel to {self._address} was replaced")
        except Exception as bug:  # a bug of ours must not strand the partitions
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
        call = method(metadata=client_id_metadata(self._engine.options.client_id))
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
        throttle_time_ms = frames[-1].head.throttle_time_ms if frames else 0
        if throttle_time_ms > 0:
            self._engine.counters.throttled(throttle_time_ms, monotonic_ms() / 1_000)
            self.patience_s += throttle_time_ms / 1_000  # the broker sends nothing for this time
        for frame in frames:
            size = len(frame.records)
            self._granted_bytes -= size
            self._held_bytes += size
            state = self.subscriptions.get(frame.head.subscription_id)
            if state is None or state.subscription_id != frame.head.subscription_id:
                self.give_back(size)  # stale: the position has changed
            elif frame.head.HasField("error") and frame.head.error.code:
                del self.subscriptions[frame.head.subscription_id]
                self._engine.refused(state, frame.head)
                self.give_back(size)
            elif frame.head.HasField("preferred_read_replica"):
                del self.subscriptions[frame.head.subscription_id]
                self._engine.redirected(state, frame.head.preferred_read_replica)
            else:
                self._engine.received(self, state, frame)


_UNTIL_SEEK: Final = (OffsetOutOfRange, UnknownTopicId, UnknownTopicOrPartition)
"""Errors that only a seek ends. After all others the consumer retries, because another replica may not have them."""


PASSED_WAIT_S: Final = 0.05
"""How long a poll still waits for records after positions have moved over markers or aborted records. It returns early
because an application that reads up to an end offset may have reached it, and no record may ever follow."""


_RESET_TIMESTAMPS: Final = {"earliest": EARLIEST, "latest": LATEST}
_NAMED: Final = 5
"""How many partitions a log line names."""


class ConsumerEngine:
    """The engine of a consumer without a group; `GroupEngine` adds the group.

    It runs on the event loop; polls and the methods that say so run in any thread, under `lock`.
    """

    def __init__(self, bootstrap: list[str], options: ConsumerOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.options = options
        self.loop = loop
        self.lock = threading.RLock()
        self.closed: RaftlogError | None = None
        self._pid = os.getpid()
        self.positions = Positions()
        self.on_data: Callable[[], None] = lambda: None
        """Called on the loop when a poll may have rows to return or an error to raise."""
        self.connections = connections(options.pem, options.sasl)
        self.metadata = MetadataCache(
            self.connections,
            bootstrap,
            max_age_ms=options.metadata_max_age_ms,
            request_timeout_ms=options.request_timeout_ms,
            pauses=options.pauses,
        )
        self.lookup = OffsetLookup(self.metadata, self.connections, options)
        self.metadata.on_change(self._on_metadata)
        self.counters = ConsumerMetrics(monotonic_ms() / 1_000)

        # The subscription
        self.subscribed = False
        """Whether there is a subscription, even one without partitions."""
        self._names: set[str] | None = None
        self._pattern: re.Pattern[str] | None = None
        self._followed: set[str] | None = None
        """The topics that the subscription has matched; None before its first look. Partitions found later are new."""
        self._missing_since_s: dict[str, float] = {}

        # Starts
        self._asking: set[PartitionState] = set()
        """Partitions whose start is being looked up."""
        self._placing: dict[asyncio.Task[Any], None] = {}
        self._looked = asyncio.Event()
        """Set after every `_sync`."""

        # Fetching
        self._inbox: deque[tuple[PartitionState, Fetched]] = deque()
        self._sessions: dict[int, FetchSession] = {}
        self._troubles: dict[int, _Trouble] = {}
        self._next_subscription_id = 0
        self._sync_pending = False
        self._sync_timer: asyncio.TimerHandle | None = None
        self._silence_timer: asyncio.TimerHandle | None = None

        # Polls
        self._undone: list[dict[PartitionState, Mark]] = []
        """Marks of interrupted polls whose rows did not reach the application; `settle` lets them be read again."""
        self._raised_last = False
        """Whether the last poll raised an error. If so, the next one prefers to return rows of other partitions."""

    # State that any thread may look at

    def check_open(self) -> None:
        """Refuse if the consumer is closed, or was made in another process.

        Raises:
            ClosedError: the message says which.
        """
        if self.closed is not None:
            raise type(self.closed)(str(self.closed))
        if self._pid != os.getpid():
            raise ClosedError(f"this consumer was made in process {self._pid}; make one in each process")

    def abandon_after_fork(self) -> None:
        """Give up the engine in a forked child, without touching its connections."""
        self.lock = threading.RLock()  # a thread of the parent may hold the old one
        self.closed = ClosedError(f"this consumer was made in process {self._pid}; make one in each process")

    def metrics(self) -> Metrics:
        """As `Consumer.metrics`; from any thread."""
        with self.lock:
            states = list(self.positions.states.values())
        lags = {
            state.topic_partition: max(0, state.high_watermark - state.position)
            for state in states
            if state.position is not None and state.high_watermark >= 0
        }
        now_s = monotonic_ms() / 1_000
        return self.counters.show(now_s, lags=lags, assigned=len(states), connections=len(self._sessions))

    def assigned(self) -> list[TopicPartition]:
        """Return the assigned partitions that the application knows of."""
        with self.lock:
            return sorted(self.positions.states)

    def position_now(self, topic_partition: TopicPartition) -> int | None:
        """Return the offset of the next record, None while the start is being looked up.

        Raises:
            InvalidRequestError: not assigned. RaftlogError: why the partition has no position.
        """
        self.check_open()
        with self.lock:
            state = self._state(topic_partition)
            if state.position is None and state.error is not None:
                raise type(state.error)(str(state.error))
            return state.position

    def _state(self, topic_partition: TopicPartition) -> PartitionState:
        state = self.positions.states.get(TopicPartition(*topic_partition))
        if state is None:
            raise InvalidRequestError(f"{TopicPartition(*topic_partition)} is not assigned to this consumer")
        return state

    async def out_of_reach(self) -> dict[TopicPartition, str]:
        """Return the assigned partitions whose broker is unreachable, with the reasons."""
        found: dict[TopicPartition, str] = {}
        with self.lock:
            for part, state in self.positions.states.items():
                reason = self._why_out_of_reach(state)
                if reason is not None and state.error is None:
                    found[part] = reason
        return dict(sorted(found.items()))

    def _why_out_of_reach(self, state: PartitionState) -> str | None:
        part = state.topic_partition
        view = self.metadata.view.partition(part)
        if view is None:
            return f"{part} does not exist"
        leaderless = self.metadata.view.without_leader(part)
        if leaderless is not None:
            return leaderless
        node_id = state.node_id if state.near is not None else view.leader
        if self.metadata.silent_since(node_id) is not None:
            return f"{part}: broker {node_id} does not answer"
        if node_id in self._troubles:
            return f"{part}: no connection to broker {node_id}"
        if state.unplaced and state.refusal is not None:
            return self._named(state, state.refusal)
        return None

    # Assignment and subscription

    async def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions; those that were assigned before keep their positions.

        Waits for starts as `placed` does.

        Raises:
            UnknownTopicOrPartition: a topic or partition does not exist.
            BrokerUnavailable: no broker answered within `default.api.timeout.ms`.
        """
        self.check_open()
        deadline = self._api_deadline()
        wanted = [TopicPartition(*topic_partition) for topic_partition in partitions]
        views = await self._views_with(wanted, deadline)
        self._names = self._pattern = self._followed = None
        self.subscribed = False
        self.metadata.all_topics = False
        with self.lock:
            self._keep_only(set(wanted))
            for topic_partition in wanted:
                if topic_partition not in self.positions.states:
                    self._add(views[topic_partition.topic], topic_partition.partition, self.options.auto_offset_reset)
        await self.placed(deadline)

    async def _views_with(self, wanted: list[TopicPartition], deadline: float) -> dict[str, TopicView]:
        """Return the topics of these partitions.

        A partition that is not known is asked for again, for UNKNOWN_TOPIC_GRACE_S: the topic may have got it since the
        last look, and not every broker knows yet.

        Raises:
            UnknownTopicOrPartition, BrokerUnavailable: as `assign`.
        """
        topics: dict[str, list[TopicPartition]] = {}
        for topic_partition in wanted:
            topics.setdefault(topic_partition.topic, []).append(topic_partition)
        views = {}
        began_s = self.loop.time()
        failures = 0
        for topic, parts in topics.items():
            while True:
                left_ms = max(0.0, deadline - self.loop.time()) * 1000
                view = await self.metadata.topic(topic, left_ms, fresh=failures > 0, along=topics)
                unknown = [part for part in parts if not 0 <= part.partition < len(view.partitions)]
                if not unknown:
                    break
                error = UnknownTopicOrPartition(
                    f"{unknown[0]} does not exist: the topic has {len(view.partitions)} partitions"
                )
                if unknown[0].partition < 0 or self.loop.time() - began_s >= UNKNOWN_TOPIC_GRACE_S:
                    raise error
                if failures:
                    await asyncio.sleep(self.options.pauses.after_ms(error, failures) / 1000)
                failures += 1
            views[topic] = view
        return views

    async def subscribe(self, names: Iterable[str] | None, pattern: re.Pattern[str] | None) -> None:
        """Read all partitions of these topics, or of all topics that match, and follow new ones.

        Waits for starts as `placed` does.

        Raises:
            BrokerUnavailable: no broker answered within `default.api.timeout.ms`; nothing is subscribed.
            TopicAuthorizationFailed: this user may not read some topics; the consumer reads the others.
        """
        self.check_open()
        self._names = set(names) if names is not None else None
        self._pattern = pattern
        self.subscribed = True
        self._followed = None
        self.metadata.all_topics = pattern is not None
        if self._names is not None:
            self.metadata.wanted |= self._names
        deadline = self._api_deadline()
        try:
            await self._look_up_topics(deadline)
        except BaseException:  # an interrupt too: the next poll says that nothing is subscribed
            await self.unsubscribe()
            raise
        self._follow()
        denied = self._denied()
        unknown = sorted((self._names or set()) - self.metadata.view.topics.keys() - denied.keys())
        if unknown:
            logger.warning("subscribed to topics that do not exist: %s; waiting for them", ", ".join(unknown))
        await self.placed(deadline)
        self._raise_denied()

    async def _look_up_topics(self, deadline: float) -> None:
        """Wait until the metadata knows each topic of the subscription, or knows that it does not exist.

        Topics that are unknown at the deadline are read once they exist.
        """
        failures = 0
        error: RaftlogError | None
        while True:
            try:
                await self.metadata.refresh()
                if self._names is None or all(
                    name in self.metadata.view.topics or name in self.metadata.view.missing for name in self._names
                ):
                    return
                if self.loop.time() > deadline:
                    return
                error = None
            except RetriableError as refused:
                if self.loop.time() > deadline:
                    raise
                error = refused
            failures += 1
            await asyncio.sleep(self.options.pauses.after_ms(error, failures) / 1000)

    def _denied(self) -> dict[str, RaftlogError]:
        """Return the topics of the subscription that this user may not read, with their errors."""
        missing = self.metadata.view.missing
        names = sorted(name for name in self._names or () if isinstance(missing.get(name), AuthorizationError))
        return {name: missing[name] for name in names}

    def _raise_denied(self) -> None:
        if denied := self._denied():
            raise TopicAuthorizationFailed("; ".join(map(str, denied.values())))

    async def unsubscribe(self) -> None:
        """Read nothing."""
        self._names = self._pattern = self._followed = None
        self.subscribed = False
        with self.lock:
            self._keep_only(set())
        self._sync()

    def _keep_only(self, wanted: set[TopicPartition]) -> None:
        for topic_partition in [part for part in self.positions.states if part not in wanted]:
            self._stale(self.positions.remove(topic_partition))

    def _add(self, view: TopicView, partition: int, reset: str) -> None:
        topic_partition = TopicPartition(view.name, partition)
        self.positions.add(PartitionState(topic_partition, view.topic_id, reset))

    def _follow(self) -> None:
        """Align the assignment with the subscription. Partitions that are new since its first look begin at the start,
        so that a consumer at `latest` misses no record from before it noticed them (KAFKA-20030)."""
        if self._names is None and self._pattern is None:
            return
        topics = self.metadata.view.topics
        matching = {
            name
            for name, view in topics.items()
            if (name in self._names if self._names is not None else self._matches(name, view))
        }
        wanted = {TopicPartition(name, part.partition) for name in matching for part in topics[name].partitions}
        denied = self._denied()  # their partitions stay, so that `poll` raises it
        wanted |= {part for part in self.positions.states if part.topic in denied}
        first_look = self._followed is None
        self._followed = (self._followed or set()) | matching
        with self.lock:
            self._keep_only(wanted)
            for topic_partition in sorted(wanted - self.positions.states.keys()):
                reset = self.options.auto_offset_reset if first_look else "earliest"
                self._add(topics[topic_partition.topic], topic_partition.partition, reset)

    def _matches(self, name: str, view: TopicView) -> bool:
        return self._pattern is not None and not view.internal and self._pattern.fullmatch(name) is not None

    def _on_metadata(self) -> None:
        if self._followed is not None:
            self._follow()
        now_s = self.loop.time()
        view = self.metadata.view
        with self.lock:
            for state in self.positions.states.values():
                topic = state.topic_partition.topic
                found = view.topics.get(topic)
                if found is not None and found.topic_id != state.topic_id:
                    self._made_again(state, found)
                refusal = view.missing.get(topic)
                if found is None and isinstance(refusal, AuthorizationError):
                    if state.error is None:
                        self._fail(state, type(refusal)(self._named(state, refusal)))
                elif found is None and topic in view.missing:
                    since_s = self._missing_since_s.setdefault(topic, now_s)
                    if now_s - since_s >= UNKNOWN_TOPIC_GRACE_S and state.error is None:
                        self._fail(state, UnknownTopicOrPartition(f"topic {topic!r} was deleted"))
                elif found is not None:
                    self._missing_since_s.pop(topic, None)
        self._sync()

    def _made_again(self, state: PartitionState, found: TopicView) -> None:
        """The topic was deleted and created again: do not continue at the old positions."""
        message = (
            f"{state.topic_partition}: the topic was deleted and created again; its offsets mean other records now"
        )
        state.topic_id = found.topic_id
        state.high_watermark = -1
        if self.options.auto_offset_reset == "none":
            self._stale(state.unplace("none"))
            self._fail(state, UnknownTopicId(f"{message}; seek to continue"))
            return
        logger.warning("%s; reading it from its start", message)
        self._stale(state.unplace("earliest"))

    def _api_deadline(self) -> float:
        return self.loop.time() + self.options.default_api_timeout_ms / 1000

    # Where partitions begin

    async def placed(self, deadline: float | None = None) -> None:
        """Subscribe, and wait until every partition has a position or an error.

        It returns at the deadline (loop time; by default in `default.api.timeout.ms`), and STRAGGLER_GRACE_S after the
        first partition has a start, or after only open transactions delay the starts. The look-up of missing starts
        continues in the background.
        """
        self._sync()
        until = self._api_deadline() if deadline is None else deadline
        grace_over = math.inf
        while left := self._unplaced():
            self.check_open()
            known = len(left) < len(self.positions.states) or _wait_for_transactions(left)
            if known and grace_over == math.inf:
                grace_over = self.loop.time() + STRAGGLER_GRACE_S
            self._looked.clear()
            try:
                async with asyncio.timeout_at(min(until, grace_over)):
                    await self._looked.wait()
            except TimeoutError:
                break
        if left := self._unplaced():
            logger.warning(
                "no start found yet for %s, continuing without them: %s",
                counted(len(left), "partition"),
                "; ".join(
                    self._named(state, state.refusal or RequestTimedOut("its leader has not answered yet"))
                    for state in left[:_NAMED]
                ),
            )

    def _synced(self) -> None:
        self._looked.set()

    def _unplaced(self) -> list[PartitionState]:
        with self.lock:
            return [state for state in self.positions.states.values() if state.unplaced]

    def _start_placing(self, states: list[PartitionState]) -> None:
        due = {state.topic_partition: state for state in states if state not in self._asking}
        self._refuse_start([state for state in due.values() if state.reset == "none"])
        by_node, refused = self.lookup.by_leader(part for part, state in due.items() if state.reset != "none")
        with self.lock:
            for part, error in refused.items():
                self._start_refused(due[part], error)
        for node_id, parts in by_node.items():
            asked = [due[part] for part in parts]
            self._asking.update(asked)
            task = self.loop.create_task(self._place(node_id, asked))
            self._placing[task] = None
            task.add_done_callback(self._placing.pop)
        if refused:
            self.request_sync()

    def _refuse_start(self, states: list[PartitionState]) -> None:
        with self.lock:
            for state in states:
                self._fail(
                    state,
                    OffsetOutOfRange(
                        f"{state.topic_partition} has no position and auto.offset.reset=none; seek to one"
                    ),
                )

    async def _place(self, node_id: int, states: list[PartitionState]) -> list[PartitionState]:
        """Ask one leader for the starts of these partitions; return those that now begin where the answer says.

        A slow broker delays only its own partitions.
        """
        wanted = {state.topic_partition: _RESET_TIMESTAMPS[state.reset] for state in states}
        for state in states:
            view = self.metadata.view.partition(state.topic_partition)
            state.leader_epoch = view.leader_epoch if view is not None else -1
        asked_as = [(state, state.reset, state.topic_id) for state in states]
        try:
            answers = await self.lookup.ask(node_id, wanted, self.options.isolation_level)
        except Exception as bug:  # a bug of ours must not strand the partitions
            logger.exception("looking up starts at broker %d failed", node_id)
            answers = dict.fromkeys(wanted, from_grpc(bug, f"broker {node_id}"))
        finally:
            self._asking.difference_update(states)
        placed = []
        with self.lock:
            for state, reset, topic_id in asked_as:
                current = self.positions.states.get(state.topic_partition) is state
                if not current or not state.unplaced or (state.reset, state.topic_id) != (reset, topic_id):
                    continue  # a seek came first, or the start has changed
                answer = answers[state.topic_partition]
                if answer is None:
                    self._fail(state, OffsetOutOfRange(f"{state.topic_partition} has no offsets"))
                elif isinstance(answer, RaftlogError):
                    self._start_refused(state, answer)
                else:
                    state.position = answer.offset
                    state.failures = 0
                    state.missing_since_ms = None
                    placed.append(state)
        self.request_sync()
        return placed

    def _start_refused(self, state: PartitionState, error: RaftlogError) -> None:
        """The look-up of a start has failed: retry it later, and let a poll raise errors that look permanent."""
        state.refusal = error
        state.missing_since_ms = state.missing_since_ms or monotonic_ms()
        self._back_off(state, error)
        if not may_pass(error):
            self._fail(state, type(error)(self._named(state, error)))

    # Which broker each partition is fetched from

    def request_sync(self) -> None:
        """Have the loop run `_sync` soon; from any thread."""
        if not self._sync_pending:
            self._sync_pending = True
            self._call_soon(self._sync)

    def _call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the interpreter, or asyncio.run, has ended
            self.loop.call_soon_threadsafe(function, *arguments)

    def _sync(self) -> None:
        """Unsubscribe stale or moved partitions, and subscribe all that need it at the brokers to read from."""
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
            assert address is not None, "a broker to read from is known"
            session = self._sessions[source.node_id] = FetchSession(self, source.node_id, address)
        self._next_subscription_id += 1
        assert state.position is not None, "a fetchable partition has a position"
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

    # Silent brokers

    def _look_at_silence(self) -> None:
        """Probe brokers whose sessions have been silent for long; set the timer for the next look."""
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
            if silent_since_s is not None:  # only a probe shows when the silence is over
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
        """Return to the leader, after a pause, because it may name the same follower again."""
        self._stale(state.unsubscribe())
        state.near = None
        self._back_off(state, error)

    # Events of sessions

    def heard(self, session: FetchSession) -> None:
        """A session has received frames or has just subscribed."""
        session.heard_at_s = self.loop.time()
        session.patience_s = _PATIENCE_S
        if self._silence_timer is None:
            self._look_at_silence()

    def received(self, session: FetchSession, state: PartitionState, frame: Frame) -> None:
        """Keep a frame for the next poll."""
        head = frame.head
        state.high_watermark = max(state.high_watermark, head.high_watermark)
        state.failures = 0
        state.missing_since_ms = None
        self._troubles.pop(session.node_id, None)
        if len(frame.records):
            self.counters.received(state.topic_partition.topic, len(frame.records), monotonic_ms() / 1_000)
            aborted = AbortedRanges(head.aborted) if head.aborted else None
            self._inbox.append((state, Fetched(head.subscription_id, frame.records, session, aborted)))
            self.on_data()

    def redirected(self, state: PartitionState, node_id: int) -> None:
        """The leader has ended a subscription and names a nearer follower (KIP-392)."""
        with self.lock:
            self._stale(state.unsubscribe())
            until_ms = monotonic_ms() + self.options.metadata_max_age_ms
            state.near = NearReplica(node_id, state.leader_epoch, until_ms)
            broker = self.metadata.view.brokers.get(node_id)
            if broker is None or broker.fenced:
                self._leave_follower(state, RetriableError(f"broker {node_id} is not known, or fenced"))
                self.metadata.request_refresh()
        self.request_sync()

    def refused(self, state: PartitionState, head: log_pb2.FetchFrame) -> None:
        """The broker has ended a subscription with an error: start over, retry after a pause, or fail."""
        wire_error = head.error
        error = from_wire(wire_error)
        topic_partition = state.topic_partition
        text = self._named(state, error)
        with self.lock:
            unread = state.has_data or any(waiting is state for waiting, _ in self._inbox)
            from_follower = state.near is not None
            self._stale(state.unsubscribe())
            if from_follower:  # a follower may lag behind; the leader decides
                logger.debug("%s; going back to the leader", text)
                self._leave_follower(state, error)
                if wire_error.HasField("leader"):
                    self.metadata.learn(topic_partition.topic, state.topic_id, topic_partition.partition, wire_error)
            elif isinstance(error, OffsetOutOfRange) and not unread:
                if self.options.auto_offset_reset == "none":
                    self._fail(state, OffsetOutOfRange(f"{text}; seek to an offset that exists"))
                elif head.HasField("diverging_offset") and state.position is not None:
                    # The records from there on are new to the application, and it has read those before.
                    offset = min(state.position, head.diverging_offset)
                    logger.warning("%s; continuing at offset %d", text, offset)
                    state.place(offset)
                    state.high_watermark = -1  # it may be lower now
                else:
                    logger.warning("%s; starting over at the %s", text, self.options.auto_offset_reset)
                    state.unplace(self.options.auto_offset_reset)
            elif isinstance(error, (RetriableError, FencedError, OffsetOutOfRange)) or (
                isinstance(error, CorruptRecordError) and state.complain()
            ):
                # Out of range with unread records: fetch again from the position, which is lower. Corrupt: another
                # replica may take over.
                self._back_off(state, error)
                state.missing_since_ms = state.missing_since_ms or monotonic_ms()
                self.metadata.learn(topic_partition.topic, state.topic_id, topic_partition.partition, wire_error)
            else:
                self._fail(state, type(error)(text))
        self.request_sync()

    def session_lost(self, session: FetchSession, error: RaftlogError) -> None:
        """A stream has ended: its partitions will be subscribed again at their leaders."""
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

    def _ask_again(self) -> None:
        """Fetch corrupt batches again, and log it: another replica may have an intact copy. Under the lock."""
        for state, error in self.positions.doubtful:
            logger.warning("%s; fetching it again", error)
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

    # Credit

    def share_bytes(self) -> int:
        """Return the share of `fetch.max.bytes` of one session."""
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

    # Polls, in the caller's thread

    def take(self, max_rows: int, marks: dict[PartitionState, Mark]) -> list[Rows]:
        """Return rows that have arrived, and move the positions; `marks` gets where they stood.

        A caller that cannot return the rows to the application calls `take_back` with the marks.

        Raises:
            RaftlogError: a partition has failed, or the consumer has nothing to read.
        """
        self.check_open()
        now_s = monotonic_ms() / 1_000
        self.counters.polled(now_s)
        spent: list[Fetched] = []
        try:
            with self.lock:
                if not self.positions.states and not self.subscribed:
                    raise InvalidRequestError(
                        "nothing to poll: call subscribe or assign first, in raftlog.aio with await"
                    )
                inbox = self._inbox
                while inbox:
                    state, fetched = inbox[0]
                    if not self.positions.receive(state, fetched):
                        spent.append(fetched)
                    inbox.popleft()  # last: after a signal before it, the frame is received twice, harmlessly
                if not self._raised_last:
                    self._raise_pending()
                taken = self.positions.take(max_rows, spent, check_crcs=self.options.check_crcs, marks=marks)
                if self.positions.doubtful:
                    self._ask_again()
                if not taken:
                    self._raise_pending()
                self._raised_last = False
                for rows in taken:
                    self.counters.handed_out(rows.topic_partition.topic, len(rows), now_s)
                return taken
        finally:
            if spent:
                self._call_soon(self._give_back, spent)

    def take_back(self, marks: dict[PartitionState, Mark]) -> None:
        """Read the rows taken under these marks again, because the application did not get them."""
        self._undone.append(marks)  # a second Ctrl-C may interrupt `settle`
        self.settle()

    def settle(self) -> None:
        """Finish interrupted `take_back` calls."""
        while self._undone:
            with self.lock:
                for marks in self._undone:
                    self._stale(self.positions.take_back(marks))
                self._undone.clear()
            self.request_sync()

    def _raise_pending(self) -> None:
        """Raise the error of a partition, with backoff, so that polls between return rows of the others."""
        now_ms = monotonic_ms()
        state = self.positions.failed(now_ms)
        if state is None:
            return
        error = state.error
        assert error is not None, "the partition has failed"
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
        """Continue at another offset."""
        self.check_open()
        self.settle()
        with self.lock:
            self._stale(self._state(topic_partition).place(offset))
        self.request_sync()

    def pause(self, partitions: Iterable[TopicPartition], paused: bool) -> None:
        """Pause or resume fetching of partitions."""
        self.check_open()
        with self.lock:
            for topic_partition in partitions:
                state = self._state(topic_partition)
                if paused and not state.paused:
                    self._stale(state.unsubscribe())
                state.paused = paused
        self.request_sync()

    # End

    async def close(self) -> None:
        """Stop; on the event loop."""
        for task in list(self._placing):
            task.cancel()
        self.closed = self.closed or ClosedError("the consumer is closed")
        self.on_data()
        for timer in (self._sync_timer, self._silence_timer):
            if timer is not None:
                timer.cancel()
        await asyncio.gather(*(session.close() for session in self._sessions.values()), return_exceptions=True)
        await self.metadata.close()
        await self.connections.close()
        self._looked.set()


def _wait_for_transactions(states: list[PartitionState]) -> bool:
    """Whether only open transactions, which may still commit offsets, delay the starts of all these partitions."""
    return all(isinstance(state.refusal, UnstableOffsetCommit) for state in states)
