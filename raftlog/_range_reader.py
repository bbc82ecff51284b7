"""Reads given ranges of offsets, for engines that plan what is read beforehand (the Spark source).

Not part of the public names: `Consumer` is what applications use.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np

from raftlog._consumer import Consumer
from raftlog._core.cluster import TopicView
from raftlog._core.fetched import Rows
from raftlog.errors import RequestTimedOut, RetriableError, UnknownTopicId, UnknownTopicOrPartition
from raftlog.types import OffsetAndTimestamp, TopicPartition

_LOOK_S: Final = 1.0
"""How often a reader that waits for records looks whether it has waited too long."""


class RangeReader(Consumer):
    """A consumer that is told what to read one range after the other, each to its end.

    The end of a range is reached by position, not by a number of records: control records, aborted transactions and
    compaction leave gaps. Make it with `auto_offset_reset="none"`: whatever is not there any more is an error.
    """

    def topics(
        self, names: Iterable[str] | None = None, pattern: re.Pattern[str] | None = None, *, fresh: bool = False
    ) -> dict[str, TopicView]:
        """Return the topics of these names, or all that are not internal and whose whole name matches.

        What is not there is left out. What is known is given out as it is known, unless it is to be `fresh`; it is
        asked for again every `metadata.max.age.ms`.

        Raises:
            BrokerUnavailable: nobody answered within `default.api.timeout.ms`.
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
                found[name] = await engine.metadata.topic(name, timeout_ms, fresh=fresh)
            fresh = False  # one answer has them all that were asked for before
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
        """Return the first offset at or after each time (ms), or at `LATEST` and `EARLIEST` of the client's offsets.

        Raises:
            UnknownTopicOrPartition, BrokerUnavailable: within `default.api.timeout.ms`.
        """
        return self._find(timestamps_ms)

    def topic_id(self, topic: str) -> bytes | None:
        """Return the id that a topic is known by now; what was found under another one is of another topic."""
        view = self._engine.metadata.view.topics.get(topic)
        return None if view is None else view.topic_id

    def read(
        self, topic_partition: TopicPartition, topic_id: bytes | None, start: int, end: int, patience_s: float
    ) -> Iterator[Rows]:
        """Yield the rows at the offsets from `start` up to and without `end`; nothing of the partition stays behind.

        `topic_id` None takes the topic that has the name, whichever it is.

        Raises:
            UnknownTopicOrPartition, UnknownTopicId: the topic is gone, or another one has its name.
            OffsetOutOfRange: records of the range are not there any more, or not yet.
            RequestTimedOut, BrokerUnavailable: nothing has come for `patience_s`.
            RaftlogError: whatever else a poll raises.
        """
        if start >= end:
            return
        began_s = time.monotonic()
        self._check_topic(topic_partition, topic_id, began_s + patience_s)
        self.assign([topic_partition])
        try:
            self.seek(topic_partition, start)
            yield from self._read(topic_partition, start, end, patience_s, began_s)
        finally:
            self.assign(())

    def _check_topic(self, topic_partition: TopicPartition, topic_id: bytes | None, deadline_s: float) -> None:
        topic = topic_partition.topic
        if not self._topic_until(topic, deadline_s):
            raise UnknownTopicOrPartition(f"there is no topic {topic!r}")
        if topic_id is not None and self.topic_id(topic) != topic_id:
            self._topic_until(topic, deadline_s, fresh=True)  # what is known may be older than the range
            if self.topic_id(topic) != topic_id:
                raise UnknownTopicId(f"{topic_partition}: the topic was deleted and made again")

    def _topic_until(self, topic: str, deadline_s: float, *, fresh: bool = False) -> dict[str, TopicView]:
        self._engine.check_open()
        left_ms = max(0.0, deadline_s - time.monotonic()) * 1000
        timeout_ms = min(left_ms, self._engine.options.default_api_timeout_ms)
        return self._thread.run(self._named([topic], fresh, timeout_ms))

    def _read(
        self, topic_partition: TopicPartition, start: int, end: int, patience_s: float, heard_s: float
    ) -> Iterator[Rows]:
        engine, data = self._engine, self._data
        position = start
        while position < end:
            data.clear()
            for rows in engine.take(end - position, {}):
                wanted = _up_to(rows, end)
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
        text = f"{topic_partition}: nothing has come for {patience_s:g} s at offset {position}, {end} is to be reached"
        return f"{text}; {reason}" if reason else text


def _up_to(rows: Rows, end: int) -> Rows:
    """Return the rows below the offset `end`."""
    if rows.header.next_offset <= end:
        return rows
    if rows.offsets is not None:
        return rows.head(int(np.searchsorted(rows.offsets, end)))
    return rows.head(min(len(rows), max(0, end - rows.first_offset)))
