"""The bytes that consumers exchange in a classic group: the topics of a subscription, the partitions of an assignment.

The broker passes these bytes on unread. It looks into them only to show a group to people, and to keep the offsets of
topics that are read. So bytes of another form, or of a protocol type other than `consumer`, are no error.

    subscription    version i16, topics [string], user data, ...
    assignment      version i16, [topic string, partitions [i32]], user data
"""

from __future__ import annotations

import struct
from typing import Final

CONSUMER: Final = "consumer"
MAX_TOPICS: Final = 10_000
MAX_PARTITIONS: Final = 100_000


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
        length = self.number(">h")
        if not 0 <= length <= len(self._data) - self._at:
            raise ValueError(f"a text of {length} bytes")
        self._at += length
        return self._data[self._at - length : self._at].decode()


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
    found: dict[str, list[int]] = {}
    try:
        data.number(">h")
        for _ in range(data.count(MAX_TOPICS)):
            topic = data.text()
            found[topic] = sorted(data.number(">i") for _ in range(data.count(MAX_PARTITIONS)))
    except (struct.error, ValueError):
        return {}
    return found
