"""The small values that the SDK hands out and takes."""

from __future__ import annotations

from typing import NamedTuple, NewType

NodeId = NewType("NodeId", int)
Offset = NewType("Offset", int)
LeaderEpoch = NewType("LeaderEpoch", int)
TopicId = NewType("TopicId", bytes)
"""16 bytes; a topic that is deleted and made again has another one."""

Header = tuple[str, bytes | None]

NO_LEADER_EPOCH = LeaderEpoch(-1)


class TopicPartition(NamedTuple):
    """One partition of a topic, by name."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Record(NamedTuple):
    """One record as a consumer sees it. `timestamp_ms` is Unix time in milliseconds, UTC."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


class RecordMetadata(NamedTuple):
    """Where a record was put. `offset` is -1 where it is not known: with `acks=0` nobody answers, and of a record that
    was sent again the broker may only know that it is in the log, once."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int


class OffsetAndTimestamp(NamedTuple):
    """Answer of a look-up by time: the first offset at or after it, with that record's timestamp."""

    offset: int
    timestamp_ms: int
    leader_epoch: int = -1


class OffsetAndMetadata(NamedTuple):
    """A committed offset: that of the next record to be read.

    `metadata` is a short text of the committer's; `leader_epoch` is that of the record before, -1: not known.
    """

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


class GroupMetadata(NamedTuple):
    """Who a consumer is in its group at the moment; `member_epoch` is -1 while it is no member."""

    group_id: str
    member_id: str
    member_epoch: int
    group_instance_id: str = ""
