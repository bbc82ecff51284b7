"""What both consumers check and share, around the engine."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from raftlog._client.commit_arguments import as_partition
from raftlog._client.consumer import ConsumerEngine
from raftlog._core.fetched import Rows
from raftlog._core.tables import table
from raftlog.errors import InvalidRequestError, InvalidTopic
from raftlog.types import Record, TopicPartition

ALL_ROWS: Final = 1 << 62
_LONGEST_NAME: Final = 249
_TOPIC_NAME: Final = re.compile(rf"[a-zA-Z0-9._-]{{1,{_LONGEST_NAME}}}")


def as_names(
    topics: str | Iterable[str] | None, pattern: str | None
) -> tuple[list[str] | None, re.Pattern[str] | None]:
    """Return what `subscribe` was given as names, or as a compiled pattern.

    Raises:
        InvalidRequestError: both, neither, or not a regular expression. InvalidTopic: a name that no topic can have.
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
    for name in names:
        if not isinstance(name, str):
            raise InvalidRequestError(f"subscribe takes topics by name, not {name!r}")
        if _TOPIC_NAME.fullmatch(name) is None or name in (".", ".."):
            raise InvalidTopic(
                f"no topic can have the name {name[:_LONGEST_NAME]!r}: names have 1 to {_LONGEST_NAME} characters "
                "a-z A-Z 0-9 . _ -; pattern= takes a regular expression"
            )
    return names, None


def as_partitions(call: str, given: Iterable[object]) -> list[TopicPartition]:
    """Return the partitions that a call was given, one by one or as one list.

    Raises:
        InvalidRequestError: something else; says what is wanted.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"{call} takes partitions, as TopicPartition('orders', 0) is one, not {given!r}")
    items = [given] if isinstance(given, TopicPartition) else list(given)
    if len(items) == 1 and not isinstance(items[0], (str, tuple)) and isinstance(items[0], Iterable):
        items = list(items[0])
    try:
        return [as_partition(item) for item in items]
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{call} takes partitions: {error}") from None


def table_of(rows: list[Rows], engine: ConsumerEngine) -> Any:
    """Return the rows as a table whose topic dictionary names all assigned topics."""
    topics = {part.topic for part in engine.positions.states} | {chunk.topic_partition.topic for chunk in rows}
    return table(rows, sorted(topics))


class Unread:
    """Records that were polled for iteration and not yielded yet."""

    def __init__(self) -> None:
        self.records: deque[Record] = deque()

    def take_all(self, noted: Callable[[list[Record]], None] | None) -> list[Record]:
        """Return them all; `noted` is called with them before.

        Nothing comes between letting go of them and returning them, so that a signal loses none.
        """
        records, nothing = list(self.records), deque[Record]()
        if noted is not None:
            noted(records)
        self.records = nothing
        return records

    def first_offsets(self) -> dict[TopicPartition, int]:
        """Return by partition where a reader has really come to."""
        found: dict[TopicPartition, int] = {}
        for record in self.records:
            found.setdefault(TopicPartition(record.topic, record.partition), record.offset)
        return found

    def drop(self, partitions: set[TopicPartition], engine: ConsumerEngine | None) -> None:
        """Forget the records of these partitions; an engine is to fetch them again."""
        if not self.records:
            return
        if engine is not None:
            for topic_partition, offset in self.first_offsets().items():
                if topic_partition in partitions and topic_partition in engine.positions.states:
                    engine.place(topic_partition, offset)
        kept = [record for record in self.records if TopicPartition(record.topic, record.partition) not in partitions]
        self.records.clear()
        self.records.extend(kept)

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
