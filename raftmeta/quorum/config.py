"""What a voter, or an observer, of the quorum is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from raftlog._client.security import ChannelTls

MAX_COMMAND_BYTES: Final = 1 << 20
MAX_MESSAGE_BYTES: Final = 32 << 20
"""Of one gRPC message between nodes: above a batch of entries, a snapshot chunk, and a frame of several of them."""

CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.http2.lookahead_bytes", 1 << 20),
]
SERVER_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second server on the same port fails instead of stealing connections
    ("grpc.http2.lookahead_bytes", 1 << 20),
]
"""For the server of the inter-node listener."""


class Endpoint(NamedTuple):
    """Where a node listens for other nodes."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """The form that gRPC takes."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Clock(Protocol):
    """Two clocks: one that stamps records and commands, one that measures durations. Simulations have their own."""

    def now_ms(self) -> int:
        """Unix time in milliseconds; may jump."""
        ...

    def monotonic_ms(self) -> float:
        """Milliseconds since some instant; never goes back."""
        ...


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """How the active controller works; times in milliseconds, see docs/quorum.md for how they hang together."""

    session_timeout_ms: float = 1_500.0
    lease_ms: int = 1_200
    auto_leader_rebalance: bool = True
    leader_imbalance_check_interval_ms: float = 300_000.0
    leader_imbalance_percentage: float = 10.0
    digest_after_entries: int = 5_000

    def __post_init__(self) -> None:
        assert 0 < self.lease_ms < self.session_timeout_ms
        assert self.digest_after_entries > 0


@dataclass(frozen=True, slots=True)
class QuorumConfig:
    """A voter. `voters` has every voter's inter-node endpoint; empty: this node is the only one, without a network.

    `controllers` of an observer are the same mapping. `cluster_id` may be empty on an only voter. `tls` is what this
    node shows to others; None: plaintext.
    """

    node_id: int
    directory: str
    cluster_id: str = ""
    voters: Mapping[int, Endpoint] = field(default_factory=dict)
    snapshot_bytes: int = 20 << 20
    election_timeout_ms: float = 500.0
    request_timeout_ms: float = 30_000.0
    controller: ControllerOptions = ControllerOptions()
    tls: ChannelTls | None = None

    def __post_init__(self) -> None:
        assert not self.voters or self.node_id in self.voters

    @property
    def voter_ids(self) -> tuple[int, ...]:
        """All voters, this one included, in order."""
        return tuple(sorted(self.voters)) or (self.node_id,)


@dataclass(frozen=True, slots=True)
class ObserverConfig:
    """A node that watches the quorum and has no vote in it."""

    node_id: int
    controllers: Mapping[int, Endpoint]
    cluster_id: str = ""
    request_timeout_ms: float = 30_000.0
    tls: ChannelTls | None = None

    def __post_init__(self) -> None:
        assert self.controllers
