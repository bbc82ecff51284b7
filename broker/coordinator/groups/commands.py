"""The commands to a coordinator of groups, and its configuration.

The frame (`broker.coordinator`) turns requests into commands and carries out decisions. `to` is a token of the frame,
one for each stream or unary call; the core returns it in `Send`, and only compares it by identity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from broker.coordinator.core import Decision, Now, Send
from broker.coordinator.groups.classic.commands import ClassicCommand, JoinClassic
from broker.coordinator.groups.classic.machine import ClassicConfig
from broker.coordinator.groups.group import Member
from raftlog.errors import BrokerOverloaded
from raftlog.v1 import group_pb2


class Migration(Enum):
    """How a group with members may move between the classic protocol and KIP-848 (group.consumer.migration.policy)."""

    BIDIRECTIONAL = "bidirectional"
    UPGRADE = "upgrade"
    DOWNGRADE = "downgrade"
    DISABLED = "disabled"

    @property
    def upgrades(self) -> bool:
        """Whether a classic group may become one in which the coordinator assigns."""
        return self in (Migration.BIDIRECTIONAL, Migration.UPGRADE)

    @property
    def downgrades(self) -> bool:
        """Whether a group in which the coordinator assigns may become a classic one."""
        return self in (Migration.BIDIRECTIONAL, Migration.DOWNGRADE)


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """`offsets_retention_ms` is offsets.retention.minutes; -1: nothing expires. `max_size`: members of a group.

    `producer_id_expiration_ms`: how long late offsets of a transaction that has ended are recognized.
    """

    session_timeout_ms: int = 15_000
    heartbeat_interval_ms: int = 3_000
    rebalance_timeout_ms: int = 60_000
    max_size: int = 10_000
    offsets_retention_ms: int = 7 * 24 * 60 * 60 * 1000
    offsets_retention_check_interval_ms: int = 600_000
    offset_metadata_max_bytes: int = 4096
    producer_id_expiration_ms: int = 24 * 60 * 60 * 1000
    classic: ClassicConfig = field(default_factory=ClassicConfig)
    migration: Migration = Migration.BIDIRECTIONAL

    def __post_init__(self) -> None:
        assert 0 < self.heartbeat_interval_ms < self.session_timeout_ms
        assert self.rebalance_timeout_ms > 0
        assert self.max_size > 0
        assert self.offsets_retention_check_interval_ms > 0
        assert self.offset_metadata_max_bytes >= 0
        assert self.producer_id_expiration_ms > 0

    def session_timeout_ms_of(self, member: Member) -> int:
        """Return how long a member may be silent: a classic one has asked for a time."""
        return self.session_timeout_ms if member.classic is None else member.classic.session_timeout_ms


__all__ = [
    "Command",
    "CommitInSession",
    "CommitOffsets",
    "CommitTransactionOffsets",
    "Decision",
    "DeleteGroup",
    "DeleteOffsets",
    "DescribeGroup",
    "Disconnected",
    "EndTransactionOffsets",
    "FetchOffsets",
    "Heartbeat",
    "Join",
    "Leave",
    "ListGroups",
    "Migration",
    "Now",
    "Send",
]


# Members: one stream each


@dataclass(frozen=True, slots=True)
class Join:
    """The first request of a stream. `host`: where it comes from, for people. `user`: see `user_of`.

    `reports_late`: the member is a Kafka client, which reports a partition only once it reads it (`Session`).

    Answered with `GroupResponse.assignment` (at once for a member that is back, else when the assignment is made), or
    with an error, which ends the stream.
    """

    to: object
    request: group_pb2.JoinGroup
    host: str = ""
    user: str = ""
    reports_late: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Answered with `GroupResponse.heartbeat`. From a stream that is not the member's (any more): with an error.

    `told`: partitions of the assignments that a Kafka client was sent in responses since its last heartbeat. It gets
    only the newest of those that the coordinator has pushed meanwhile.
    """

    to: object
    group_id: str
    member_id: str
    request: group_pb2.GroupHeartbeat
    told: frozenset[tuple[bytes, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class CommitInSession:
    """Answered with `GroupResponse.commit`, refused or not."""

    to: object
    group_id: str
    member_id: str
    request: group_pb2.SessionCommit


@dataclass(frozen=True, slots=True)
class Leave:
    """Answered with None: the stream ends, and the member is gone."""

    to: object
    group_id: str
    member_id: str
    request: group_pb2.LeaveGroup


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The stream is over, however it ended. Not a leave; nothing is sent to it any more, and there is no answer."""

    to: object
    group_id: str
    member_id: str


# Unary calls: answered with the message named, or with a RaftlogError as the error of all


@dataclass(frozen=True, slots=True)
class CommitOffsets:
    """Answered with CommitOffsetsResponse. `user`: see `user_of`."""

    to: object
    request: group_pb2.CommitOffsetsRequest
    user: str = ""


@dataclass(frozen=True, slots=True)
class CommitTransactionOffsets:
    """Offsets that count once their transaction commits (KIP-98, KIP-447). Answered with CommitOffsetsResponse.

    `user`: see `user_of`.
    """

    to: object
    request: group_pb2.CommitTransactionOffsetsRequest
    user: str = ""


@dataclass(frozen=True, slots=True)
class EndTransactionOffsets:
    """A transaction's marker for a group: its offsets are committed, or forgotten. May come any number of times.

    `producer_epoch`: the marker's, one above that of the transaction. Answered with an empty CommitOffsetResult.
    """

    to: object
    group_id: str
    producer_id: int
    producer_epoch: int
    commit: bool


@dataclass(frozen=True, slots=True)
class FetchOffsets:
    """Answered with FetchOffsetsResponse."""

    to: object
    request: group_pb2.FetchOffsetsRequest


@dataclass(frozen=True, slots=True)
class DeleteOffsets:
    """Answered with DeleteOffsetsResponse."""

    to: object
    request: group_pb2.DeleteOffsetsRequest


@dataclass(frozen=True, slots=True)
class ListGroups:
    """The groups of this shard. Answered with ListGroupsResponse, by group id."""

    to: object
    request: group_pb2.ListGroupsRequest


class DescriptionRoom:
    """Bytes of descriptions that may be in memory at a time. A description can be far longer than what asks for it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._left_bytes = max_bytes

    def take(self, size_bytes: int) -> None:
        """Take room for a part of a description.

        Raises:
            BrokerOverloaded: there is not so much.
        """
        if size_bytes > self._left_bytes:
            raise BrokerOverloaded(
                f"descriptions of groups for one user take at most {self._max_bytes} bytes at a time: read those under "
                "way, and ask again for this group; one whose description alone is longer cannot be described"
            )
        self._left_bytes -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Give back what was taken."""
        self._left_bytes += size_bytes
        assert self._left_bytes <= self._max_bytes, "no more is given back than was taken"


class DescriptionShare:
    """What one call has taken of a room."""

    def __init__(self, room: DescriptionRoom) -> None:
        self._room = room
        self._taken_bytes = 0

    def take(self, size_bytes: int) -> None:
        """As `DescriptionRoom.take`."""
        self._room.take(size_bytes)
        self._taken_bytes += size_bytes

    def give_back(self) -> None:
        """Give back all of it."""
        self._room.give_back(self._taken_bytes)
        self._taken_bytes = 0


@dataclass(frozen=True, slots=True)
class DescribeGroup:
    """Answered with GroupDescription (its error inside); the frame adds coordinator_id and offsets_partition.

    `share`: room is taken from it for each member; the group is refused if there is none left.
    """

    to: object
    group_id: str
    share: DescriptionShare


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """Answered with CommitOffsetResult: what stands in DeleteGroupsResponse for this group."""

    to: object
    group_id: str


Command: TypeAlias = (
    Join
    | Heartbeat
    | CommitInSession
    | Leave
    | Disconnected
    | CommitOffsets
    | CommitTransactionOffsets
    | EndTransactionOffsets
    | FetchOffsets
    | DeleteOffsets
    | ListGroups
    | DescribeGroup
    | DeleteGroup
    | ClassicCommand
)


def user_of(command: Command) -> str | None:
    """Return the user for which a group counts that the command makes, "" for none; None: it makes none.

    A new member makes a group, and so do committed offsets.
    """
    match command:
        case Join() | JoinClassic() | CommitOffsets() | CommitTransactionOffsets():
            return command.user
        case _:
            return None
