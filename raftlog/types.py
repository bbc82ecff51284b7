"""The small value types that the SDK takes and returns."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, NewType

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    K = TypeVar("K", default=bytes)
    V = TypeVar("V", default=bytes)
else:
    from typing import TypeVar

    K, V = TypeVar("K"), TypeVar("V")
"""The types of keys and values: bytes, unless a client has functions that convert them."""

VERSION: Final = "0.1.0"
"""The version of this package, as in pyproject.toml."""


class Codec(IntEnum):
    """Compression of a batch's body (attributes bits 0-2); the numbers are Kafka's."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


NodeId = NewType("NodeId", int)
Offset = NewType("Offset", int)
LeaderEpoch = NewType("LeaderEpoch", int)
TopicId = NewType("TopicId", bytes)
"""16 bytes; a topic that is deleted and created again has another one."""

Header = tuple[str, bytes | None]

NO_LEADER_EPOCH = LeaderEpoch(-1)


class TopicPartition(NamedTuple):
    """One partition of a topic, by name."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Record(NamedTuple, Generic[K, V]):
    """One record as a consumer sees it. `timestamp_ms` is Unix time in milliseconds, UTC.

    `key` and `value` are bytes, or what the consumer's `key_deserializer` and `value_deserializer` make of them.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: K | None
    value: V | None
    headers: tuple[Header, ...] = ()

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition of the record."""
        return TopicPartition(self.topic, self.partition)


class RecordMetadata(NamedTuple):
    """The place of a record in the log. `timestamp_ms` is Unix time in milliseconds, UTC.

    `offset` is -1 if it is unknown: with `acks=0` brokers send no offsets, and for a retried record the broker may only
    know that it is in the log, once.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int

    @property
    def topic_partition(self) -> TopicPartition:
        """The partition of the record."""
        return TopicPartition(self.topic, self.partition)


class OffsetAndTimestamp(NamedTuple):
    """The result of a look-up by time: the first record at or after that time, with its timestamp in ms since 1970."""

    offset: int
    timestamp_ms: int
    leader_epoch: int = -1


class OffsetAndMetadata(NamedTuple):
    """A committed offset: that of the next record to read.

    `metadata` is a short text of the application. `leader_epoch` is that of the record before the offset; -1: unknown.
    """

    offset: int
    metadata: str = ""
    leader_epoch: int = -1


class GroupMetadata(NamedTuple):
    """A consumer's present identity in its group; `member_epoch` is -1 while it is not a member."""

    group_id: str
    member_id: str
    member_epoch: int
    group_instance_id: str = ""
