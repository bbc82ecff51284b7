"""What both consumers check and share, around the engine."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

from raftlog._client.consumer import ConsumerEngine
from raftlog._core.fetched import Rows
from raftlog._core.tables import table
from raftlog.errors import InvalidRequestError
from raftlog.types import Record, TopicPartition

ALL_ROWS: Final = 1 << 62


def refuse_group(group_id: str | None) -> None:
    """Refuse what is not there yet.

    Raises:
        InvalidRequestError: says what to do without.
    """
    if group_id is not None:
        raise InvalidRequestError(
            f"group_id={group_id!r}: this version has no consumer groups, they come with a later one; "
            "leave group_id out to read all partitions of the topics"
        )


def as_names(
    topics: str | Iterable[str] | None, pattern: str | None
) -> tuple[list[str] | None, re.Pattern[str] | None]:
    """Return what `subscribe` was given as names, or as a compiled pattern.

    Raises:
        InvalidRequestError: both, neither, or not a regular expression.
    """
    if (topics is None) == (pattern is None):
        raise InvalidRequestError("subscribe takes topics or a pattern, one of the two")
    if pattern is not None:
        try:
            return None, re.compile(pattern)
        except re.error as error:
            raise InvalidRequestError(f"pattern {pattern!r} is not a regular expression: {error}") from None
    assert topics is not None
    names = [topics] if isinstance(topics, str) else list(topics)
    return names, None


def table_of(rows: list[Rows], engine: ConsumerEngine) -> Any:
    """Return the rows as a table whose topic dictionary names all assigned topics."""
    topics = {part.topic for part in engine.positions.states} | {chunk.topic_partition.topic for chunk in rows}
    return table(rows, sorted(topics))


class Unread:
    """Records that were polled for iteration and not yielded yet."""

    def __init__(self) -> None:
        self.records: deque[Record] = deque()

    def take_all(self) -> list[Record]:
        """Return them all."""
        records = list(self.records)
        self.records.clear()
        return records

    def first_offsets(self) -> dict[TopicPartition, int]:
        """Return by partition where a reader has really come to."""
        found: dict[TopicPartition, int] = {}
        for record in self.records:
            found.setdefault(TopicPartition(record.topic, record.partition), record.offset)
        return found

    def put_back(self, engine: ConsumerEngine) -> None:
        """Let the engine fetch them again: positions are about to change."""
        for topic_partition, offset in self.first_offsets().items():
            if topic_partition in engine.positions.states:
                engine.place(topic_partition, offset)
        self.records.clear()


def check_offset(offset: int) -> None:
    """Refuse an offset that cannot be.

    Raises:
        InvalidRequestError: negative.
    """
    if offset < 0:
        raise InvalidRequestError(f"offset {offset} is negative; seek_to_end and seek_to_beginning name the ends")


def check_times(timestamps_ms: Mapping[TopicPartition, int]) -> None:
    """Refuse a time that cannot be.

    Raises:
        InvalidRequestError: negative.
    """
    for topic_partition, timestamp_ms in timestamps_ms.items():
        if timestamp_ms < 0:
            raise InvalidRequestError(f"{TopicPartition(*topic_partition)}: timestamp {timestamp_ms} is negative")
