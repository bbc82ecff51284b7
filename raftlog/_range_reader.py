"""Reads given ranges of offsets, for engines that plan their reads (the Spark source).

Private: applications use `Consumer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from raftlog._consumer import Consumer
from raftlog._core.cluster import TopicView
from raftlog._core.positions import Rows
from raftlog.errors import RequestTimedOut, RetriableError, UnknownTopicId, UnknownTopicOrPartition
from raftlog.types import OffsetAndTimestamp, TopicPartition

_LOOK_S: Final = 1.0
"""How often a waiting reader checks for how long it has waited."""


class RangeReader:
    """Reads one range of offsets after the other with a consumer, each to its end.

    The end of a range is an offset, not a number of records: control records, aborted transactions and compaction
    leave gaps. Make the consumer with `auto_offset_reset="none"`, so that missing records are an error.
    """

    def __init__(self, bootstrap: str | Sequence[str], **options: Any) -> None:
        self.consumer = Consumer(bootstrap, **options)
        self._engine = self.consumer._engine
        self._thread = self.consumer._thread

    def close(self) -> None:
        """Close the consumer."""
        self.consumer.close()

    def beginning_offset(self, topic_partition: TopicPartition) -> int:
        """Return the partition's first offset. Raises as `Consumer.beginning_offsets`."""
        return self.consumer.beginning_offsets([topic_partition])[topic_partition]

    def topics(
        self, names: Iterable[str] | None = None, pattern: re.Pattern[str] | None = None, *, fresh: bool = False
    ) -> dict[str, TopicView]:
        """Return the topics with these names, or all topics that are not internal and match the pattern as a whole.

        Missing topics are left out. The answer comes from the client's metadata, which is refreshed every
        `metadata.max.age.ms`, or now if `fresh`.

        Raises:
            BrokerUnavailable: no broker answered within `default.api.timeout.ms`.
        """
        self._engine.check_open()
        timeout_ms = self._engine.options.default_api_timeout_ms
        if pattern is not None:
            return self._thread.run(self._matching(pattern, fresh, timeout_ms))
        return self._thread.run(self._named(sorted(set(names or ())), fresh, timeout_ms))

    async def _named(self, names: list[str], fresh: bool, timeout_ms: float) -> dict[str, TopicView]:
        engine = self._engine
        found: dict[str, TopicView] = {}
        for name in names:
            with contextlib.suppress(UnknownTopicOrPartition):
                found[name] = await engine.metadata.topic(name, timeout_ms, fresh=fresh, along=names)
            fresh = False  # the first response covers all of them
        return found

    async def _matching(self, pattern: re.Pattern[str], fresh: bool, timeout_ms: float) -> dict[str, TopicView]:
        engine = self._engine
        metadata = engine.metadata
        deadline = engine.loop.time() + timeout_ms / 1000
        failures = 0
        fresh = fresh or not metadata.all_topics
        metadata.all_topics = True
        while fresh:
            try:
                await metadata.refresh()
                fresh = False
            except RetriableError as error:
                left_s = deadline - engine.loop.time()
                if left_s <= 0:
                    raise
                failures += 1
                await asyncio.sleep(min(engine.options.pauses.after_ms(error, failures) / 1000, left_s))
        views = sorted(metadata.view.topics.items())
        return {name: view for name, view in views if not view.internal and pattern.fullmatch(name)}

    def find(self, timestamps_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the first offset at or after each time (ms since 1970; or `EARLIEST`, `LATEST`).

        Raises:
            UnknownTopicOrPartition: there is no such topic or partition.
            BrokerUnavailable: no broker answered within `default.api.timeout.ms`.
        """
        return self.consumer._find(timestamps_ms)

    def topic_id(self, topic: str) -> bytes | None:
        """Return the topic's present id; a topic that was deleted and created again has another one."""
        view = self._engine.metadata.view.topics.get(topic)
        return None if view is None else view.topic_id

    def read(
        self, topic_partition: TopicPartition, topic_id: bytes | None, start: int, end: int, patience_s: float
    ) -> Iterator[Rows]:
        """Yield the rows at the offsets from `start` (inclusive) to `end` (exclusive), then unassign the partition.

        With `topic_id` None, any topic of that name is read.

        Raises:
            UnknownTopicOrPartition, UnknownTopicId: the topic is gone, or another topic has its name.
            OffsetOutOfRange: the log no longer has, or does not have yet, records of the range.
            RequestTimedOut, BrokerUnavailable: no records came for `patience_s` seconds.
            RaftlogError: as `Consumer.poll`.
        """
        if start >= end:
            return
        began_s = time.monotonic()
        self._check_topic(topic_partition, topic_id, began_s + patience_s)
        self.consumer.assign([topic_partition])
        try:
            self.consumer.seek(topic_partition, start)
            yield from self._read(topic_partition, start, end, patience_s, began_s)
        finally:
            self.consumer.assign(())

    def _check_topic(self, topic_partition: TopicPartition, topic_id: bytes | None, deadline_s: float) -> None:
        topic = topic_partition.topic
        if not self._topic_until(topic, deadline_s):
            raise UnknownTopicOrPartition(f"there is no topic {topic!r}")
        if topic_id is not None and self.topic_id(topic) != topic_id:
            self._topic_until(topic, deadline_s, fresh=True)  # the metadata may be older than the range
            if self.topic_id(topic) != topic_id:
                raise UnknownTopicId(f"{topic_partition}: the topic was deleted and created again")

    def _topic_until(self, topic: str, deadline_s: float, *, fresh: bool = False) -> dict[str, TopicView]:
        self._engine.check_open()
        left_ms = max(0.0, deadline_s - time.monotonic()) * 1000
        timeout_ms = min(left_ms, self._engine.options.default_api_timeout_ms)
        return self._thread.run(self._named([topic], fresh, timeout_ms))

    def _read(
        self, topic_partition: TopicPartition, start: int, end: int, patience_s: float, heard_s: float
    ) -> Iterator[Rows]:
        engine, data = self._engine, self.consumer._data
        position = start
        while position < end:
            data.clear()
            for rows in engine.take(end - position, {}):
                wanted = rows.below(end)
                if len(wanted):
                    yield wanted
            reached = engine.position_now(topic_partition)
            if reached is not None and reached > position:
                position, heard_s = reached, time.monotonic()
                continue
            left_s = heard_s + patience_s - time.monotonic()
            if left_s <= 0:
                raise RequestTimedOut(self._why_nothing(topic_partition, position, end, patience_s))
            data.wait(min(left_s, _LOOK_S))

    def _why_nothing(self, topic_partition: TopicPartition, position: int, end: int, patience_s: float) -> str:
        reason = self._thread.run(self._engine.out_of_reach()).get(topic_partition)
        text = f"{topic_partition}: no records came for {patience_s:g} s at offset {position}; the range ends at {end}"
        return f"{text}; {reason}" if reason else text
