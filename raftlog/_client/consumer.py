"""The consumer's engine: which partitions are read, and where each begins."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from typing import Final

from raftlog._client.metadata import UNKNOWN_TOPIC_GRACE_S
from raftlog._client.offsets import EARLIEST, LATEST, OffsetLookup
from raftlog._client.options import ConsumerOptions
from raftlog._client.partition_reader import PartitionReader
from raftlog._core.cluster import TopicView
from raftlog._core.positions import PartitionState
from raftlog.errors import (
    OffsetOutOfRange,
    RaftlogError,
    RetriableError,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from raftlog.types import TopicPartition

logger = logging.getLogger(__name__)

_RESET_TIMESTAMPS: Final = {"earliest": EARLIEST, "latest": LATEST}


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
        self._placing: asyncio.Task[None] | None = None

    # What to read

    async def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions; what was assigned before and stays keeps its position.

        Raises:
            UnknownTopicOrPartition: no such topic or partition.
            BrokerUnavailable: nobody answered within `default.api.timeout.ms`.
        """
        self.check_open()
        wanted = [TopicPartition(*topic_partition) for topic_partition in partitions]
        views = {}
        for topic in dict.fromkeys(topic_partition.topic for topic_partition in wanted):
            views[topic] = await self.metadata.topic(topic, self.options.default_api_timeout_ms)
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
        await self.placed()

    async def subscribe(self, names: Iterable[str] | None, pattern: re.Pattern[str] | None) -> None:
        """Read all partitions of these topics, or of all topics that match, and follow new ones."""
        self.check_open()
        self._names = set(names) if names is not None else None
        self._pattern = pattern
        self.subscribed = True
        self._followed = None
        self.metadata.all_topics = pattern is not None
        if self._names is not None:
            self.metadata.wanted |= self._names
        deadline = self.loop.time() + self.options.default_api_timeout_ms / 1000
        failures = 0
        while True:
            try:
                await self.metadata.refresh()
                if self._names is None or all(
                    name in self.metadata.view.topics or name in self.metadata.view.missing for name in self._names
                ):
                    break
            except RetriableError:
                if self.loop.time() > deadline:
                    raise
            failures += 1
            await asyncio.sleep(self.options.backoff.pause_ms(failures) / 1000)
        self._follow()
        await self.placed()

    async def unsubscribe(self) -> None:
        """Read nothing."""
        self._names = self._pattern = self._followed = None
        self.subscribed = False
        with self.lock:
            self._keep_only(set())
        self._sync()

    def _keep_only(self, wanted: set[TopicPartition]) -> None:
        for topic_partition in self.positions.states.keys() - wanted:
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
                if found is None and topic in view.missing:
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

    async def placed(self) -> None:
        """Subscribe, and wait until every partition has a position or an error."""
        self._sync()
        while self._placing is not None:
            await asyncio.shield(self._placing)

    def _start_placing(self) -> None:
        if self._placing is None:
            self._placing = self.loop.create_task(self._place_all())

    async def _place_all(self) -> None:
        try:
            while wanting := self._unplaced():
                for reset in ("earliest", "latest", "none"):
                    states = [state for state in wanting if state.reset == reset]
                    if reset == "none":
                        self._refuse_start(states)
                    elif states:
                        await self._place(states, _RESET_TIMESTAMPS[reset])
        finally:
            self._placing = None
            self.request_sync()

    def _unplaced(self) -> list[PartitionState]:
        with self.lock:
            return [state for state in self.positions.states.values() if state.position is None and state.error is None]

    def _refuse_start(self, states: list[PartitionState]) -> None:
        with self.lock:
            for state in states:
                self._fail(
                    state,
                    OffsetOutOfRange(
                        f"{state.topic_partition} has no position and auto.offset.reset=none; seek to one"
                    ),
                )

    async def _place(self, states: list[PartitionState], timestamp_ms: int) -> None:
        wanted = {state.topic_partition: timestamp_ms for state in states}
        error: RaftlogError | None = None
        try:
            found = await self.lookup.find(wanted, self.options.isolation_level)
        except RaftlogError as failed:
            found, error = {}, failed
        with self.lock:
            for state in states:
                if state.position is not None or state.error is not None:
                    continue  # a seek was faster
                answer = found.get(state.topic_partition)
                if answer is not None:
                    state.position = answer.offset
                elif not isinstance(error, RetriableError):
                    self._fail(state, error or OffsetOutOfRange(f"{state.topic_partition} has no offsets"))
                elif self._followed is None:
                    self._fail(state, error)

    async def close(self) -> None:
        """Stop."""
        if self._placing is not None:
            self._placing.cancel()
        await super().close()
