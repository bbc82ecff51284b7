"""The part of PySyncObj that is used, under names of our own; nothing else here knows its private ones.

PySyncObj keeps the roles, terms, votes, the follower's log, and counts what a majority holds. What this class replaces
of it, by overriding:

    sending entries          `replication`: pipelined, never sent twice on one stream, snapshots in paced chunks
    applying entries         a batch at a time, each exactly once; only what the own disk has counts as held here
    taking proposals         from the node's queue; commands are never forwarded
    compaction, snapshots    `snapshotting`
    the random timeout       from the node's own generator
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Protocol

from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from raftmeta.raft import engine
from raftmeta.raft.options import RaftOptions
from raftmeta.raft.wal import Entry, WriteAheadLog

FOLLOWER, CANDIDATE, LEADER = 0, 1, 2
"""PySyncObj's numbers of the roles."""
_NEVER = 1 << 60


class Peer(Node):  # type: ignore[misc] # PySyncObj has no types
    """Another voter. There is one object for each, so identity is equality."""

    def __init__(self, node_id: int) -> None:
        super().__init__(node_id)
        self.node_id = node_id

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return self.node_id


class Hooks(Protocol):
    """What the engine asks of the node during a tick."""

    def apply_entries(self, entries: list[Entry]) -> None:
        """Apply committed entries, in order."""
        ...

    def send_entries(self, heartbeat: bool) -> None:
        """Send followers what they lack; with `heartbeat` a message to each, whatever it lacks."""
        ...

    def append_proposals(self) -> None:
        """Move waiting proposals into the log, if this node leads."""
        ...

    def role_changed(self, before: int, now: int) -> None:
        """Note a change of role."""
        ...


class Consensus(SyncObj):  # type: ignore[misc] # PySyncObj has no types
    """PySyncObj, driven by `tick` and `deliver`."""

    def __init__(
        self,
        me: Peer,
        peers: Iterable[Peer],
        wal: WriteAheadLog,
        transport: Transport,
        hooks: Hooks,
        rng: random.Random,
        options: RaftOptions,
    ) -> None:
        # Before the superclass, which looks at every attribute.
        self._wal, self._hooks, self._rng, self._options = wal, hooks, rng, options
        self._commit_before = 1
        self.heartbeat_deadline_s = 0.0
        shortest, longest = options.election_timeout_s
        conf = SyncObjConf(
            autoTick=False,
            journalFile=wal,
            useFork=False,
            commandsWaitLeader=False,
            dynamicMembershipChange=False,
            appendEntriesUseBatch=True,
            appendEntriesPeriod=options.heartbeat_interval_s,
            raftMinTimeout=shortest,
            raftMaxTimeout=longest,
            connectionTimeout=max(3.5, longest),
            leaderFallbackTimeout=options.leader_fallback_s,
            logCompactionMinEntries=_NEVER,
            logCompactionMinTime=_NEVER,
            onStateChanged=hooks.role_changed,
        )
        super().__init__(me, list(peers), conf, transport=transport)

    # Reading

    @property
    def role(self) -> int:
        """FOLLOWER, CANDIDATE or LEADER."""
        role: int = self._SyncObj__raftState
        return role

    @property
    def term(self) -> int:
        """The current term."""
        term: int = self._SyncObj__raftCurrentTerm
        return term

    @property
    def leader(self) -> Peer | None:
        """Who leads, as far as this node knows; possibly itself."""
        leader: Peer | None = self._SyncObj__raftLeader
        return leader

    @property
    def commit_index(self) -> int:
        """Entries up to this one are committed."""
        index: int = self._SyncObj__raftCommitIndex
        return index

    @property
    def last_applied(self) -> int:
        """Entries up to this one were applied."""
        index: int = self._SyncObj__raftLastApplied
        return index

    @property
    def match_index(self) -> dict[Peer, int]:
        """A leader's: up to where each follower's log is known to be its own, durably."""
        index: dict[Peer, int] = self._SyncObj__raftMatchIndex
        return index

    @property
    def election_deadline_s(self) -> float:
        """When a follower campaigns."""
        deadline: float = self._SyncObj__raftElectionDeadline
        return deadline

    @election_deadline_s.setter
    def election_deadline_s(self, deadline: float) -> None:
        self._SyncObj__raftElectionDeadline = deadline

    @property
    def heartbeat_deadline_s(self) -> float:
        """When a leader has to say something."""
        deadline: float = self._SyncObj__newAppendEntriesTime
        return deadline

    @heartbeat_deadline_s.setter
    def heartbeat_deadline_s(self, deadline: float) -> None:
        self._SyncObj__newAppendEntriesTime = deadline

    @property
    def transfer_in_progress(self) -> bool:
        """Whether the leader has asked this node to campaign at once."""
        in_progress: bool = self._SyncObj__transferInProgress
        return in_progress

    def forget_transfer(self) -> None:
        """Go on as if the leader had not asked this node to campaign."""
        self._SyncObj__transferInProgress = False

    def random_timeout_s(self) -> float:
        """Return a new election timeout."""
        return self._rng.uniform(*self._options.election_timeout_s)

    # Driving

    def tick(self) -> None:
        """Do what is due: campaign, commit, apply, heartbeat, append what was proposed."""
        self._commit_before = self.commit_index
        self._onTick(0.0)

    def deliver(self, peer: Peer, message: dict[str, object]) -> None:
        """Let PySyncObj process a message."""
        self._SyncObj__onMessageReceived(peer, message)

    def adopt_term(self, term: int, voted_for: int | None = None) -> None:
        """Go on as a follower in a higher term that somebody has shown."""
        assert term > self.term
        self._SyncObj__setCurrentTerm(term, voted_for)
        self._SyncObj__setState(FOLLOWER)
        self._SyncObj__raftLeader = None

    def heard_leader(self, leader: Peer, term: int) -> None:
        """Do what any message of the leader of `term` does, as PySyncObj would: follow it, and wait anew."""
        self.deliver(leader, {"type": "append_entries", "term": term, "commit_index": 0})

    def connected(self, peer: Peer) -> None:
        """Note that messages to a peer can be sent."""
        self._SyncObj__onNodeConnected(peer)

    def disconnected(self, peer: Peer) -> None:
        """Note that messages to a peer cannot be sent."""
        self._SyncObj__onNodeDisconnected(peer)

    def note_answer(self, peer: Peer, now_s: float) -> None:
        """Note that a follower answered, for the leader's fallback."""
        self._SyncObj__lastResponseTime[peer] = now_s

    def forget_match(self, peer: Peer) -> None:
        """Count nothing as held by a follower that has lost its log."""
        if peer in self.match_index:
            self.match_index[peer] = 0

    def jump_to(self, index: int) -> None:
        """Go on from a snapshot at `index`, which was restored."""
        self._SyncObj__raftLastApplied = index
        self._SyncObj__raftCommitIndex = max(index, self.commit_index)

    # What of PySyncObj is replaced: its calls of these names come here.

    def _SyncObj__applyLogEntries(self) -> bool:
        if self.role == LEADER:
            # PySyncObj counts a leader as holding whatever is in its log; it counts once its own disk has it.
            self._SyncObj__raftCommitIndex = max(self._commit_before, min(self.commit_index, self._wal.synced_index))
        if self.commit_index > self.last_applied:
            self._hooks.apply_entries(self._wal.entries(self.last_applied + 1, self.commit_index + 1))
        return False

    def applied(self, index: int) -> None:
        """Note that the entry at `index` was applied."""
        self._SyncObj__raftLastApplied = index

    def _SyncObj__sendAppendEntries(self) -> None:
        self.heartbeat_deadline_s = engine.monotonic_s() + self._options.heartbeat_interval_s
        self._hooks.send_entries(heartbeat=True)

    def _checkCommandsToApply(self) -> None:
        self._hooks.append_proposals()

    def _SyncObj__tryLogCompaction(self) -> None:
        """Nothing: `snapshotting` decides when."""

    def _SyncObj__generateRaftTimeout(self) -> float:
        return self.random_timeout_s()
