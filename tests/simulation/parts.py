"""What is simulated: the real parts, and the switches that planted bugs turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from raftmeta.quorum.sessions import BrokerLease, BrokerSessions
from raftmeta.raft.consensus import RaftOptions
from raftmeta.raft.node import RaftNode
from raftmeta.raft.wal import WriteAheadLog
from raftmeta.state import MetadataState
from tests.simulation.plan import Plan

LEASE_MS = 1_200
SESSION_TIMEOUT_MS = 1_500


class Violation(AssertionError):
    """Something happened that must never happen."""


def _real_sessions() -> BrokerSessions:
    return BrokerSessions(SESSION_TIMEOUT_MS, LEASE_MS)


@dataclass
class Parts:
    """Makers of the parts, and the simulation's work around them."""

    wal: Callable[..., WriteAheadLog] = WriteAheadLog
    node: Callable[..., RaftNode] = RaftNode
    state: Callable[[], MetadataState] = MetadataState
    sessions: Callable[[], BrokerSessions] = _real_sessions
    lease: Callable[[], BrokerLease] = BrokerLease
    sends_before_sync: bool = False
    leases_without_majority: bool = False
    checks_lease: bool = True
    plan: Plan = field(default_factory=Plan)
    """What the run is told, where its seed does not decide."""


def quick_options(chance: random.Random) -> RaftOptions:
    """Return the default timeouts, with limits so small that snapshots and batches come up within seconds."""
    return RaftOptions(
        snapshot_after_entries=chance.choice((15, 60, 100_000)),
        log_tail_entries=chance.choice((0, 5, 50)),
        snapshot_chunk_bytes=chance.choice((200, 2_000, 100_000)),
        batch_bytes=chance.choice((300, 5_000, 1 << 20)),
        max_command_bytes=4_096,
    )
