"""The commands of classic groups, and their replies. A refusal is a RaftlogError in place of the reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from broker.coordinator.core import Reply
from raftlog.errors import RaftlogError

Protocols: TypeAlias = tuple[tuple[str, bytes], ...]
"""The assignors that a member offers, the one that it prefers first: name, and what it says to the leader."""


@dataclass(frozen=True, slots=True)
class JoinClassic:
    """Answered with `Joined` once the group has its next generation.

    `new_member_id`: the id to give to a member that has none. `requires_id`: such a member gets the id first, and joins
    with it (KIP-394). `can_skip_assignment`: a static leader that is back understands that it need not assign.
    `user`: for which a new group counts; "": for none.
    """

    to: object
    group_id: str
    member_id: str
    new_member_id: str
    instance_id: str
    client_id: str
    host: str
    protocol_type: str
    protocols: Protocols
    session_timeout_ms: int
    rebalance_timeout_ms: int
    requires_id: bool = False
    can_skip_assignment: bool = False
    user: str = ""


@dataclass(frozen=True, slots=True)
class SyncClassic:
    """Answered with `Synced` once the leader has sent its assignment. None: the client does not say which protocol."""

    to: object
    group_id: str
    member_id: str
    instance_id: str
    generation: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignments: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeartbeatClassic:
    """Answered with `Alive`."""

    to: object
    group_id: str
    member_id: str
    instance_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class LeaveClassic:
    """Answered with `Left`. `members`: (member id, instance id); a member id may be empty for a static member."""

    to: object
    group_id: str
    members: tuple[tuple[str, str], ...]


ClassicCommand: TypeAlias = JoinClassic | SyncClassic | HeartbeatClassic | LeaveClassic


@dataclass(frozen=True, slots=True)
class Joined(Reply):
    """A member's place in a generation. `members`, for the leader only: (member id, instance id, what it says).

    With `error` only `member_id` counts.
    """

    member_id: str
    generation: int = -1
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: tuple[tuple[str, str, bytes], ...] = ()
    skip_assignment: bool = False
    error: RaftlogError | None = None


@dataclass(frozen=True, slots=True)
class Synced(Reply):
    """The leader's assignment for a member."""

    protocol_type: str
    protocol: str
    assignment: bytes


@dataclass(frozen=True, slots=True)
class Alive(Reply):
    """The member is one, in this generation."""


@dataclass(frozen=True, slots=True)
class Left(Reply):
    """A result for each member, in order; None: it is gone."""

    errors: tuple[RaftlogError | None, ...]
