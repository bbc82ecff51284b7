"""What a node says about the other voters."""

from __future__ import annotations

from dataclasses import dataclass

from raftmeta.raft.voters import VoterStateValue


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Another voter, as this node sees it."""

    connected: bool
    """Whether our stream to it is up."""
    match_index: int
    """Up to where its log is known to be the leader's; 0 when this node does not lead."""
    last_contact_s: float | None
    """Seconds since something was last heard from it; None if nothing was."""
    state: VoterStateValue
    """What it said last of itself."""
