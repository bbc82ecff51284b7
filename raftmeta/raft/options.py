"""The timeouts and limits of a Raft node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RaftOptions:
    """Timeouts in seconds, sizes in bytes.

    The relations that safety or liveness rests on are checked when the options are made; a wrong one is a bug of the
    caller, who validates what users may set.
    """

    heartbeat_interval_s: float = 0.1
    """How often a leader says that it is there, when there is nothing else to say."""
    election_timeout_s: tuple[float, float] = (0.5, 1.0)
    """A follower that hears no leader for a random time within these asks for an election."""
    commit_notice_s: float = 0.002
    """How long a leader waits for an entry to send along with a new commit index: followers do not hurry to know it."""
    leader_fallback_s: float = 0.8
    """A leader that hears no majority for so long steps down."""
    prevote_after_break_s: tuple[float, float] = (0.01, 0.15)
    """How soon a follower asks for an election after the leader's stream broke, which a killed process causes."""
    max_command_bytes: int = 1 << 20
    """Larger commands are refused when proposed."""
    snapshot_after_entries: int = 20_000
    snapshot_after_bytes: int = 20 << 20
    """A snapshot is taken after so many entries, or bytes of entries, whatever comes first."""
    log_tail_entries: int = 2_000
    """Entries older than the snapshot that stay in the log, for followers that are a little behind."""
    snapshot_chunk_bytes: int = 256 << 10
    batch_bytes: int = 1 << 20
    """About how many bytes of entries one message carries; it carries at least one entry."""

    def __post_init__(self) -> None:
        """Check the relations between the values."""
        shortest, longest = self.election_timeout_s
        assert self.heartbeat_interval_s > 0
        assert 0 <= self.commit_notice_s < self.heartbeat_interval_s
        assert shortest > 3 * self.heartbeat_interval_s, "a lost heartbeat or two must not cause an election"
        assert longest > shortest, "equal timeouts split votes for ever"
        assert self.leader_fallback_s > 2 * self.heartbeat_interval_s, "acknowledgements come once a heartbeat"
        assert 0 < self.prevote_after_break_s[0] <= self.prevote_after_break_s[1] <= shortest
        assert self.max_command_bytes > 0
        assert self.snapshot_after_entries > 0
        assert self.snapshot_after_bytes > 0
        assert self.log_tail_entries >= 0
        assert self.snapshot_chunk_bytes > 0
        assert self.batch_bytes > 0
