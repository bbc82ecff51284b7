"""The interface to PySyncObj, the Raft engine; no other module uses its private names.

PySyncObj keeps roles, terms, votes and the follower's log, and counts majorities. `Consensus` overrides:

    sending entries          `replication`: pipelined, never sent twice on one stream, snapshots in paced chunks
    applying entries         a batch at a time, each exactly once; this node's entries count once its disk has them
    taking proposals         from the node's queue; commands are never forwarded
    compaction, snapshots    `snapshotting`
    the random timeout       from the node's own generator

At import, the engine is checked and adapted:

- Its version must be the known one, and every private name that this package reads, writes or overrides must exist.
  PySyncObj guarantees none of them, so another version is refused until it has been reviewed.
- `createJournal` accepts a journal object: the write-ahead log replaces PySyncObj's own file.
- Nothing is pickled or unpickled: `pickle` raises in every module of PySyncObj that uses it, and so does the
  replacement of PySyncObj's own snapshot files, which are not used (it does not sync).
- `createPoller` makes a poller without a file descriptor, because no socket of PySyncObj is used.

`RaftTransport` is PySyncObj's `Transport` with two queues instead of sockets. Every message carries its sender's term.
A message that promises something (an acknowledgement, a vote, a candidacy), or that shows a term which is not durable
yet, goes to the durable queue; the owner empties that queue only after a sync of the log.
"""

from __future__ import annotations

import random
import socket
from _socket import inet_ntop as _inet_ntop
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn, Protocol

import pysyncobj.journal as _journal
import pysyncobj.serializer as _serializer
import pysyncobj.syncobj as _syncobj
import pysyncobj.tcp_connection as _tcp_connection
from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.node import Node
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION as FOUND_VERSION

from raftlog.v1.raft_pb2 import RaftMessage
from raftmeta.raft import messages
from raftmeta.raft.wal import Entry, WriteAheadLog

socket.inet_ntop = _inet_ntop  # PySyncObj puts one in its place that only works on Windows


@dataclass(frozen=True, slots=True)
class RaftOptions:
    """Timeouts in seconds, sizes in bytes.

    The relations that safety and liveness need are checked here; a violation is a bug of the caller, which validates
    the user's settings.
    """

    heartbeat_interval_s: float = 0.1
    """Interval of a leader's messages while there is nothing else to send."""
    election_timeout_s: tuple[float, float] = (0.5, 1.0)
    """A follower that hears no leader for a random time in this range asks for an election."""
    commit_notice_s: float = 0.002
    """How long a leader waits for an entry to send with a new commit index, which followers do not need at once."""
    leader_fallback_s: float = 0.8
    """A leader that hears no majority for this time steps down."""
    prevote_after_break_s: tuple[float, float] = (0.01, 0.15)
    """How soon a follower asks for an election after the leader's stream broke, which a killed process causes."""
    first_election_s: tuple[float, float] | None = None
    """How soon a voter of a new quorum, which has no leader yet, asks for an election; None: as any follower."""
    max_command_bytes: int = 1 << 20
    """Larger commands are refused when proposed."""
    snapshot_after_entries: int = 20_000
    snapshot_after_bytes: int = 20 << 20
    """A snapshot is taken after this many entries, or bytes of entries, whichever comes first."""
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
        if self.first_election_s is not None:
            assert 0 < self.first_election_s[0] < self.first_election_s[1] <= shortest
        assert self.max_command_bytes > 0
        assert self.snapshot_after_entries > 0
        assert self.snapshot_after_bytes > 0
        assert self.log_tail_entries >= 0
        assert self.snapshot_chunk_bytes > 0
        assert self.batch_bytes > 0


PYSYNCOBJ_VERSION = "0.3.17"

_METHODS = (
    "__applyLogEntries",
    "__generateRaftTimeout",
    "__onBecomeLeader",
    "__onMessageReceived",
    "__onNodeConnected",
    "__onNodeDisconnected",
    "__sendAppendEntries",
    "__sendNextNodeIdx",
    "__setCurrentTerm",
    "__setState",
    "__tryLogCompaction",
    "_checkCommandsToApply",
    "_getLeader",
    "_isLeader",
    "_onTick",
)
"""Methods that are called or overridden, most of them by their mangled names."""
_ATTRIBUTES = (
    "__lastResponseTime",
    "__newAppendEntriesTime",
    "__raftCommitIndex",
    "__raftCurrentTerm",
    "__raftElectionDeadline",
    "__raftLastApplied",
    "__raftLeader",
    "__raftMatchIndex",
    "__raftState",
    "__transferInProgress",
    "__votedForNodeId",
)
"""Attributes that `SyncObj.__init__` sets and this package uses."""


def _mangled(name: str) -> str:
    return f"_SyncObj{name}" if name.startswith("__") else name


def missing_internals(engine: type = SyncObj) -> list[str]:
    """Return the names that this package needs and `engine` lacks."""
    known = engine.__init__.__code__.co_names  # type: ignore[misc] # a class's __init__, not an instance's
    missing = [name for name in _METHODS if not hasattr(engine, _mangled(name))]
    return missing + [name for name in _ATTRIBUTES if _mangled(name) not in known]


def check_engine(version: str, missing: list[str]) -> None:
    """Check that the engine is the one this package was written for.

    Raises:
        RuntimeError: it is another version, or lacks something.
    """
    if version != PYSYNCOBJ_VERSION:
        raise RuntimeError(
            f"raftlog relies on internals of PySyncObj {PYSYNCOBJ_VERSION} and found {version}; "
            f"install pysyncobj=={PYSYNCOBJ_VERSION}"
        )
    if missing:
        raise RuntimeError(
            f"PySyncObj {version} lacks {', '.join(missing)}, which raftlog relies on; "
            f"reinstall pysyncobj=={PYSYNCOBJ_VERSION}"
        )


class PickleRefused(RuntimeError):
    """PySyncObj tried to pickle or unpickle something."""


class _NoPickle:
    """Replaces `pysyncobj.pickle`."""

    @staticmethod
    def _refuse(*args: object, **kwargs: object) -> NoReturn:
        raise PickleRefused("nothing in raftlog is pickled")

    load = loads = dump = dumps = to_bytes = _refuse


class _NoPoller:
    """Waits for nothing."""

    def subscribe(self, descriptor: object, callback: object, event_mask: object) -> None:
        raise AssertionError("PySyncObj opens no sockets here")

    def unsubscribe(self, descriptor: object) -> None:
        raise AssertionError("PySyncObj opens no sockets here")

    def poll(self, timeout: float) -> None:
        """Return at once."""


def _refuse_replace(old_path: str, new_path: str) -> NoReturn:
    raise RuntimeError("snapshots are written by raftmeta.raft.snapshots only")


def _install() -> None:
    create_journal = _syncobj.createJournal

    def journal_or_file(journal: object = None) -> object:
        return journal if isinstance(journal, _journal.Journal) else create_journal(journal)

    _syncobj.createJournal = journal_or_file
    _syncobj.createPoller = lambda kind: _NoPoller()
    for module in (_syncobj, _serializer, _tcp_connection):
        module.pickle = _NoPickle
    _journal.loads = _journal.dumps = _journal.to_bytes = _NoPickle._refuse
    _serializer.atomicReplace = _refuse_replace


check_engine(FOUND_VERSION, missing_internals())
_install()


def monotonic_s() -> float:
    """Return the time of PySyncObj's own clock, for comparison with its deadlines.

    On Linux that is CLOCK_MONOTONIC_RAW, which drifts away from `time.monotonic` by milliseconds an hour.
    """
    now: float = _syncobj.monotonicTime()
    return now


def use_clock(clock: Callable[[], float]) -> Callable[[], float]:
    """Make every node of this process run on `clock`, for simulation; returns the clock that was in use."""
    previous: Callable[[], float] = _syncobj.monotonicTime
    _syncobj.monotonicTime = clock
    return previous


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
        """Send followers the entries they lack; with `heartbeat`, a message even to those that lack none."""
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
        """The leader, as far as this node knows; possibly itself."""
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
        """Continue as a follower in a higher term that another node has shown."""
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
            # PySyncObj counts the leader's log as durable at once; here it counts once this node's disk has it.
            self._SyncObj__raftCommitIndex = max(self._commit_before, min(self.commit_index, self._wal.synced_index))
        if self.commit_index > self.last_applied:
            self._hooks.apply_entries(self._wal.entries(self.last_applied + 1, self.commit_index + 1))
        return False

    def applied(self, index: int) -> None:
        """Note that the entry at `index` was applied."""
        self._SyncObj__raftLastApplied = index

    def _SyncObj__sendAppendEntries(self) -> None:
        self.heartbeat_deadline_s = monotonic_s() + self._options.heartbeat_interval_s
        self._hooks.send_entries(heartbeat=True)

    def _checkCommandsToApply(self) -> None:
        self._hooks.append_proposals()

    def _SyncObj__tryLogCompaction(self) -> None:
        """Nothing: `snapshotting` decides when."""

    def _SyncObj__generateRaftTimeout(self) -> float:
        return self.random_timeout_s()


Outgoing = list[tuple[int, RaftMessage]]


class RaftTransport(Transport):  # type: ignore[misc] # PySyncObj has no types
    """The outgoing messages of one node, in order for each peer and queue."""

    def __init__(self, wal: WriteAheadLog) -> None:
        super().__init__(None, None, None)
        self._wal = wal
        self._immediate: Outgoing = []
        self._durable: Outgoing = []
        self.answer: Callable[[Peer, dict[str, object]], None] | None = None
        """Sends what PySyncObj answers to entries, in the terms of `receiving`."""
        self.transfer_term = 0
        """The term in which this node campaigns because the leader asked it to."""

    def send(self, node: Peer, message: dict[str, object]) -> bool:
        """Queue what PySyncObj sends by itself: answers and votes. Commands are never forwarded."""
        kind = message["type"]
        if kind == "next_node_idx":
            assert self.answer is not None
            self.answer(node, message)
        elif kind == "request_vote":
            term, index, last_term = message["term"], message["last_log_index"], message["last_log_term"]
            assert isinstance(term, int)
            assert isinstance(index, int)
            assert isinstance(last_term, int)
            self.post_durable(
                node.node_id,
                messages.vote_request(term, index, last_term, transfer=term == self.transfer_term),
            )
        elif kind == "response_vote":
            term = message["term"]
            assert isinstance(term, int)
            self.post_durable(node.node_id, messages.vote_granted(term))
        else:
            raise AssertionError(f"PySyncObj sent {kind!r}, which nothing here answers")
        return True

    def post(self, peer_id: int, message: RaftMessage) -> None:
        """Queue a message that promises nothing but its term."""
        queue = self._immediate if message.sender_term <= self._wal.synced_term else self._durable
        queue.append((peer_id, message))

    def post_durable(self, peer_id: int, message: RaftMessage) -> None:
        """Queue a message that may leave only after the log was synced."""
        self._durable.append((peer_id, message))

    def drop(self, peer_id: int) -> None:
        """Forget what was queued for a peer on a stream that is gone."""
        self._immediate = [item for item in self._immediate if item[0] != peer_id]
        self._durable = [item for item in self._durable if item[0] != peer_id]

    def take_immediate(self) -> Outgoing:
        """Return what may leave now, and forget it."""
        taken, self._immediate = self._immediate, []
        return taken

    def take_durable(self) -> Outgoing:
        """Return what may leave once everything that the log has collected by now is durable, and forget it."""
        taken, self._durable = self._durable, []
        return taken
