"""The consumer's engine: which partitions are read, and where each begins."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Iterable
from typing import Final

from raftlog._client.connections import from_grpc
from raftlog._client.fetcher import monotonic_ms
from raftlog._client.metadata import UNKNOWN_TOPIC_GRACE_S
from raftlog._client.offsets import EARLIEST, LATEST, STRAGGLER_GRACE_S, OffsetLookup, may_pass
from raftlog._client.options import ConsumerOptions
from raftlog._client.partition_reader import PartitionReader
from raftlog._core.cluster import TopicView
from raftlog._core.positions import PartitionState
from raftlog.errors import (
    AuthorizationError,
    OffsetOutOfRange,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
    TopicAuthorizationFailed,
    UnknownTopicId,
    UnknownTopicOrPartition,
    UnstableOffsetCommit,
)
from raftlog.types import TopicPartition

logger = logging.getLogger(__name__)

_RESET_TIMESTAMPS: Final = {"earliest": EARLIEST, "latest": LATEST}
_NAMED: Final = 5
"""How many partitions one line of the log names."""


class ConsumerEngine(PartitionReader):
    """Assignment or subscription, and the look-up of starts. Everything here runs on the event loop."""

    def __init__(self, bootstrap: list[str], options: ConsumerOptions, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(bootstrap, options, loop)
        self.lookup = OffsetLookup(self.metadata, self.connections, options)
        self.metadata.on_change(self._on_metadata)
        self._names: set[str] | None = None
        self._pattern: re.Pattern[str] | None = None
        self._followed: set[str] | None = None
        """Topics of the subscription that were there at its first look; partitions beyond are new."""
        self._missing_since_s: dict[str, float] = {}
        self._asking: set[PartitionState] = set()
        """Partitions whose start a leader is being asked for."""
        self._placing: dict[asyncio.Task[None], None] = {}
        self._looked = asyncio.Event()

    # What to read

    async def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions; what was assigned before and stays keeps its position.

        Waits for starts as `placed` does.

        Raises:
            UnknownTopicOrPartition: no such topic or partition.
            BrokerUnavailable: nobody answered within `default.api.timeout.ms`.
        """
        self.check_open()
        deadline = self._api_deadline()
        wanted = [TopicPartition(*topic_partition) for topic_partition in partitions]
        views = {}
        for topic in dict.fromkeys(topic_partition.topic for topic_partition in wanted):
            views[topic] = await self.metadata.topic(topic, max(0.0, deadline - self.loop.time()) * 1000)
        for topic_partition in wanted:
            if not 0 <= topic_partition.partition < len(views[topic_partition.topic].partitions):
                count = len(views[topic_partition.topic].partitions)
                raise UnknownTopicOrPartition(f"{topic_partition} does not exist: the topic has {count} partitions")
        self._names = self._pattern = self._followed = None
        self.subscribed = False
        self.metadata.all_topics = False
        with self.lock:
            self._keep_only(set(wanted))
            for topic_partition in wanted:
                if topic_partition not in self.positions.states:
                    self._add(views[topic_partition.topic], topic_partition.partition, self.options.auto_offset_reset)
        await self.placed(deadline)

    async def subscribe(self, names: Iterable[str] | None, pattern: re.Pattern[str] | None) -> None:
        """Read all partitions of these topics, or of all topics that match, and follow new ones.

        Waits for starts as `placed` does.

        Raises:
            BrokerUnavailable: nobody answered within `default.api.timeout.ms`; nothing is subscribed then.
            TopicAuthorizationFailed: some of them this user may not read; the others are read.
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
        except BaseException:  # interrupted as well: whoever polls hears that nothing is subscribed
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
        """Wait until brokers have said of each topic of the subscription what it is, or that it is not there.

        What is not known by the deadline is followed once it is there.
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
        """Return the topics of the subscription that this user may not use, and what brokers say of them."""
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
        """Bring the assignment in line with the subscription; what is new since its first look begins at its start
        (KAFKA-20030: a consumer at `latest` must not miss what came before it noticed the partition)."""
        if self._names is None and self._pattern is None:
            return
        topics = self.metadata.view.topics
        matching = {
            name
            for name, view in topics.items()
            if (name in self._names if self._names is not None else self._matches(name, view))
        }
        wanted = {TopicPartition(name, part.partition) for name in matching for part in topics[name].partitions}
        denied = self._denied()  # their partitions stay, so that `poll` says it
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
        """The topic was deleted and another one of its name made: never go on in it as if it were the old one."""
        message = f"{state.topic_partition}: the topic was deleted and made again; its offsets mean other records now"
        state.topic_id = found.topic_id
        if self.options.auto_offset_reset == "none":
            self._stale(state.unplace("none"))
            self._fail(state, UnknownTopicId(f"{message}; seek to go on"))
            return
        logger.warning("%s; reading it from its start", message)
        self._stale(state.unplace("earliest"))

    # Where to begin

    def _api_deadline(self) -> float:
        return self.loop.time() + self.options.default_api_timeout_ms / 1000

    async def placed(self, deadline: float | None = None) -> None:
        """Subscribe, and wait until every partition has a position or an error.

        It goes on with what is placed STRAGGLER_GRACE_S after the first one is, or once nothing but open transactions
        stands in the way, and at the deadline (loop time; by default in `default.api.timeout.ms`) in any case. What is
        not placed then is asked for again and again in the background, and read once it has answered.
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
                "no start found yet for %d partitions, going on without them: %s",
                len(left),
                "; ".join(
                    self._named(state, state.refusal or RequestTimedOut("its leader has not answered yet"))
                    for state in left[:_NAMED]
                ),
            )

    def _synced(self) -> None:
        self._looked.set()

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

    def _unplaced(self) -> list[PartitionState]:
        with self.lock:
            return [state for state in self.positions.states.values() if state.unplaced]

    async def out_of_reach(self) -> dict[TopicPartition, str]:
        """Return the assigned partitions whose leaders this client has no contact with, and why."""
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
            return f"{part} is not there"
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

    def _refuse_start(self, states: list[PartitionState]) -> None:
        with self.lock:
            for state in states:
                self._fail(
                    state,
                    OffsetOutOfRange(
                        f"{state.topic_partition} has no position and auto.offset.reset=none; seek to one"
                    ),
                )

    async def _place(self, node_id: int, states: list[PartitionState]) -> None:
        """Ask one leader where these begin: who waits for one broker waits for no other one."""
        wanted = {state.topic_partition: _RESET_TIMESTAMPS[state.reset] for state in states}
        for state in states:
            view = self.metadata.view.partition(state.topic_partition)
            state.leader_epoch = view.leader_epoch if view is not None else -1
        asked_as = [(state, state.reset, state.topic_id) for state in states]
        try:
            answers = await self.lookup.ask(node_id, wanted, self.options.isolation_level)
        except Exception as bug:  # one of ours: it must not strand the partitions, which are asked for again
            logger.exception("looking up starts at broker %d failed", node_id)
            answers = dict.fromkeys(wanted, from_grpc(bug, f"broker {node_id}"))
        finally:
            self._asking.difference_update(states)
        with self.lock:
            for state, reset, topic_id in asked_as:
                current = self.positions.states.get(state.topic_partition) is state
                if not current or not state.unplaced or (state.reset, state.topic_id) != (reset, topic_id):
                    continue  # a seek was faster, or it is another question now
                answer = answers[state.topic_partition]
                if answer is None:
                    self._fail(state, OffsetOutOfRange(f"{state.topic_partition} has no offsets"))
                elif isinstance(answer, RaftlogError):
                    self._start_refused(state, answer)
                else:
                    state.position = answer.offset
                    state.failures = 0
                    state.missing_since_ms = None
        self.request_sync()

    def _start_refused(self, state: PartitionState, error: RaftlogError) -> None:
        """A partition does not say where it begins: ask it again later, and raise what does not look temporary."""
        state.refusal = error
        state.missing_since_ms = state.missing_since_ms or monotonic_ms()
        self._back_off(state, error)
        if not may_pass(error):
            self._fail(state, type(error)(self._named(state, error)))

    async def close(self) -> None:
        """Stop."""
        for task in list(self._placing):
            task.cancel()
        await super().close()
        self._looked.set()


def _wait_for_transactions(states: list[PartitionState]) -> bool:
    """Whether the partitions would all have a start if transactions were not open that may replace it."""
    return all(isinstance(state.refusal, UnstableOffsetCommit) for state in states)
