"""The bytes that consumers exchange in a classic group: the topics of a subscription, the partitions of an assignment.

In a classic group the broker passes these bytes on unread. It looks into them only to show a group to people, and to
keep the offsets of topics that are read. So bytes of another form, or of a protocol type other than `consumer`, are no
error there. In a group in which the coordinator assigns they are what a classic member says and gets.

    subscription    version i16, topics [string], user data,
                    from version 1 owned partitions [topic string, partitions [i32]], 2 generation i32, 3 rack string
    assignment      version i16, [topic string, partitions [i32]], user data
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

CONSUMER: Final = "consumer"
MAX_TOPICS: Final = 10_000
MAX_PARTITIONS: Final = 100_000
NAMES_FROM: Final = 6
"""Bytes of a subscription before its first topic name: the version, and the number of names."""
OWNED_FROM: Final = 1
RACK_FROM: Final = 3
NEWEST: Final = 3


@dataclass(frozen=True, slots=True)
class Said:
    """What a consumer says when it joins: topics ascending, and the partitions that it reads, by topic."""

    version: int
    topics: tuple[str, ...]
    owned: Mapping[str, Sequence[int]]
    rack: str = ""


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(value)

    def count(self, most: int) -> int:
        count = self.number(">i")
        if not 0 <= count <= most:
            raise ValueError(f"{count} elements")
        return count

    def text(self) -> str:
        return self._take(self.number(">h")).decode()

    def skip_data(self) -> None:
        length = self.number(">i")
        if length > 0:
            self._take(length)

    def text_or_none(self) -> str:
        length = self.number(">h")
        return self._take(length).decode() if length > 0 else ""

    def _take(self, length: int) -> bytes:
        if not 0 <= length <= len(self._data) - self._at:
            raise ValueError(f"a field of {length} bytes")
        self._at += length
        return self._data[self._at - length : self._at]

    def topics(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for _ in range(self.count(MAX_TOPICS)):
            topic = self.text()
            found[topic] = sorted(self.number(">i") for _ in range(self.count(MAX_PARTITIONS)))
        return found


def read_said(said: bytes) -> Said:
    """Return a subscription. Versions after the newest are read as that one, as Kafka does.

    Raises:
        ValueError: these bytes are none.
    """
    data = _Bytes(said)
    try:
        version = data.number(">h")
        if version < 0:
            raise ValueError(f"version {version}")
        topics = tuple(sorted({data.text() for _ in range(data.count(MAX_TOPICS))}))
        owned: Mapping[str, Sequence[int]] = {}
        rack = ""
        data.skip_data()
        if version >= OWNED_FROM:
            owned = data.topics()
        if version >= OWNED_FROM + 1:
            data.number(">i")
        if version >= RACK_FROM:
            rack = data.text_or_none()
    except struct.error as error:
        raise ValueError(str(error)) from None
    return Said(min(version, NEWEST), topics, owned, rack)


def written_assignment(version: int, topics: Mapping[str, Sequence[int]]) -> bytes:
    """Return an assignment as a consumer reads it, without user data."""
    parts = [struct.pack(">hi", version, len(topics))]
    for topic, numbers in sorted(topics.items()):
        name = topic.encode()
        parts.append(struct.pack(">h", len(name)) + name)
        parts.append(struct.pack(f">i{len(numbers)}i", len(numbers), *numbers))
    parts.append(struct.pack(">i", -1))
    return b"".join(parts)


def count_named(said: bytes) -> int:
    """Return the number of topics that a subscription claims to name; no more are read, even of invalid bytes."""
    if len(said) < NAMES_FROM:
        return 0
    (count,) = struct.unpack_from(">i", said, NAMES_FROM - 4)
    return max(0, min(int(count), MAX_TOPICS, (len(said) - NAMES_FROM) // 2))


def subscribed_topics(protocol_type: str, said: bytes) -> tuple[str, ...]:
    """Return the topics that a member subscribes to, ascending; none if the bytes do not say."""
    if protocol_type != CONSUMER:
        return ()
    data = _Bytes(said)
    try:
        data.number(">h")
        return tuple(sorted({data.text() for _ in range(data.count(MAX_TOPICS))}))
    except (struct.error, ValueError):
        return ()


def assigned_partitions(protocol_type: str, assignment: bytes) -> dict[str, list[int]]:
    """Return the partitions by topic that a member was given; none if the bytes do not say."""
    if protocol_type != CONSUMER:
        return {}
    data = _Bytes(assignment)
    try:
        data.number(">h")
        return data.topics()
    except (struct.error, ValueError):
        return {}
