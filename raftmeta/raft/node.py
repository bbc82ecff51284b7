"""One voter of the metadata quorum.

The owner carries messages and calls `cycle`:

    cycle() → send take_immediate() → make the log durable, if it is dirty → send take_durable() → wait for a message,
    a proposal, a change of a stream, or next_deadline_s()

A node stops for good (`fatal`) when it can no longer be trusted to agree with the others: its disk failed, an applied
entry raised, a leader contradicts what is committed.

`Proposals` holds a leader's proposals until their outcome is known.

`ReadRounds` serves linearizable reads without a log entry (Raft thesis, 6.4: ReadIndex), many in one round. A round
asks all followers whether they still follow in this term. Once a majority with the leader has confirmed it, no newer
leader had been elected when the round began, so the commit index of that moment was the newest. It counts only once the
first entry of the leader's own term is committed, because before that the leader's commit index may lag.

`Receiver` handles messages before PySyncObj sees them:

- An invalid message (`messages.flaw`) is dropped, and nothing in it is used.
- A message of an older term is dropped, or answered with a term notice; a higher term is adopted first.
- Only new entries are passed on. Matching entries are never truncated, committed ones never replaced, and only compared
  entries are acknowledged. A rejection names the next index, so that one round trip finds the common entry.
- A commit index counts only as far as entries were compared.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from raftlog.errors import (
    InternalError,
    MessageTooLarge,
    NotController,
    RaftlogError,
    StorageError,
    StorageFull,
    UnsupportedVersion,
)
from raftlog.v1.raft_pb2 import FRESH, JOINING, VIRGIN, VOTER, AppendEntries, RaftHello, RaftMessage, SnapshotChunk
from raftmeta.raft import consensus, messages
from raftmeta.raft.consensus import CANDIDATE, FOLLOWER, LEADER, Consensus, Outgoing, Peer, RaftOptions, RaftTransport
from raftmeta.raft.elections import CAMPAIGN_ROOM_BYTES, Elections
from raftmeta.raft.ports import Applied, ProposalOutcome, RaftListener, ReplicatedState, RunOffLoop, Unknown, run_inline
from raftmeta.raft.replication import Replication
from raftmeta.raft.snapshots import SnapshotStore, Snapshotter
from raftmeta.raft.voters import JoinGuard, MetadataDirectory, VoterStateValue
from raftmeta.raft.wal import ABSTAINED, ENTRY_OVERHEAD_BYTES, Entry, WriteAheadLog


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Another voter, as this node sees it."""

    connected: bool
    """Whether this node's stream to it is up."""
    match_index: int
    """The last index at which its log is known to match the leader's; 0 if this node does not lead."""
    last_contact_s: float | None
    """Seconds since its last message; None if there was none."""
    state: VoterStateValue
    """Its voter state, by its last hello."""


ProposalDone = Callable[[ProposalOutcome], None]
COMMAND = b"\x00"
"""Prefix of a command in an entry's data."""


class Proposals:
    """Proposals that wait to be appended, or to be applied."""

    def __init__(self, wal: WriteAheadLog) -> None:
        self._wal = wal
        self.waiting: list[tuple[bytes, ProposalDone]] = []
        self._waiting_bytes = 0
        self._pending: dict[int, tuple[int, ProposalDone]] = {}
        """Index → (term, callback of the proposer)."""
        self._abandoned: list[ProposalDone] = []

    def add(self, command: bytes, done: ProposalDone) -> bool:
        """Accept a command; False if there is no room for it on the disk."""
        size = len(command) + len(COMMAND) + ENTRY_OVERHEAD_BYTES
        if not self._wal.has_room(self._waiting_bytes + size):
            return False
        self._waiting_bytes += size
        self.waiting.append((command, done))
        return True

    def append(self, term: int) -> None:
        """Move the waiting proposals into the log."""
        waiting, self.waiting, self._waiting_bytes = self.waiting, [], 0
        index = self._wal.last_index
        add, pending = self._wal.add, self._pending
        for command, done in waiting:
            index += 1
            add(COMMAND + command, index, term)
            pending[index] = (term, done)

    def applied(self, index: int, term: int, result: object) -> None:
        """Answer the proposer of the entry at `index`."""
        if not self._pending:
            return
        waiting = self._pending.pop(index, None)
        if waiting is None:
            return
        if waiting[0] == term:
            waiting[1](Applied(index, term, result))
        else:
            self._abandoned.append(waiting[1])

    def abandon(self) -> None:
        """This node leads no longer, so the outcomes will not be known."""
        self._abandoned += [done for _, done in self._pending.values()]
        self._abandoned += [done for _, done in self.waiting]
        self._pending.clear()
        self.waiting, self._waiting_bytes = [], 0

    def tell_abandoned(self) -> None:
        """Answer the proposers whose outcome is unknown."""
        abandoned, self._abandoned = self._abandoned, []
        for done in abandoned:
            done(Unknown())


ReadDone = Callable[[int | None], None]


class ReadRounds:
    """The waiting reads and the rounds under way, of a leader. Pure."""

    def __init__(self, majority: int) -> None:
        self._needed = majority - 1
        self._waiting: list[ReadDone] = []
        self._rounds: deque[tuple[int, int, list[ReadDone]]] = deque()
        """(round, commit index when it began, callbacks of its readers)"""
        self._confirmed: dict[int, int] = {}
        self._round = 0

    @property
    def waiting(self) -> bool:
        """Whether reads wait for a round to begin."""
        return bool(self._waiting)

    @property
    def under_way(self) -> bool:
        """Whether reads wait for answers."""
        return bool(self._rounds)

    def add(self, done: ReadDone) -> None:
        """Let a read wait for the next round."""
        self._waiting.append(done)

    def begin(self, commit_index: int) -> int:
        """Begin a round for all waiting reads, and return its number for the answers."""
        self._round += 1
        if self._waiting:
            self._rounds.append((self._round, commit_index, self._waiting))
            self._waiting = []
        return self._round

    def confirm(self, peer_id: int, round_number: int) -> None:
        """Note that a follower has confirmed this round and all earlier ones."""
        if round_number > self._confirmed.get(peer_id, 0):
            self._confirmed[peer_id] = round_number

    def ready(self) -> list[tuple[int, list[ReadDone]]]:
        """Return (commit index, reads) of the rounds that a majority has confirmed."""
        found = []
        while self._rounds:
            round_number, commit_index, reads = self._rounds[0]
            if sum(confirmed >= round_number for confirmed in self._confirmed.values()) < self._needed:
                break
            self._rounds.popleft()
            found.append((commit_index, reads))
        return found

    def abandon(self) -> list[ReadDone]:
        """Drop all rounds, because this node leads no longer; return the callbacks of their readers."""
        reads = [read for _, _, waiting in self._rounds for read in waiting] + self._waiting
        self._rounds.clear()
        self._confirmed.clear()
        self._waiting = []
        return reads


logger = logging.getLogger(__name__)


class Receiver:
    """Handles the messages of one node."""

    def __init__(
        self,
        peers: dict[int, Peer],
        consensus: Consensus,
        wal: WriteAheadLog,
        transport: RaftTransport,
        guard: JoinGuard,
        elections: Elections,
        replication: Replication,
        reads: ReadRounds,
        snapshotter: Snapshotter,
    ) -> None:
        self._peers, self._consensus, self._wal, self._transport = peers, consensus, wal, transport
        self._guard, self._elections, self._replication = guard, elections, replication
        self._reads, self._snapshotter = reads, snapshotter
        self._verified = (0, 0)
        """(term, last index at which the log was compared with that of the term's leader)"""
        self._answer: tuple[bool, int] | None = None
        """(success, next index) in place of what PySyncObj answers."""
        transport.answer = self._send_answer

    def handle(self, peer_id: int, message: RaftMessage, now_s: float) -> None:
        """Process one message."""
        flaw = messages.flaw(message)
        if flaw:
            logger.warning("dropped a message of node %d: %s", peer_id, flaw)
            return
        kind = message.WhichOneof("body")
        peer, sender_term, term = self._peers[peer_id], message.sender_term, self._consensus.term
        if kind == "append_entries":
            self._append_entries(peer, message.append_entries, now_s)
            return
        if kind == "snapshot_chunk":
            self._snapshot_chunk(peer, message.snapshot_chunk, now_s)
            return
        if kind == "vote_request":
            self._elections.vote_requested(peer, message.vote_request, now_s)
            return
        if kind == "pre_vote_request":
            self._elections.pre_vote_requested(peer_id, message.pre_vote_request, now_s)
            return
        if kind == "read_probe":
            if sender_term < term:
                self._transport.post(peer_id, messages.term_notice(term))
            elif sender_term == term and self._guard.may_take_entries:
                self._transport.post(peer_id, messages.read_answer(term, message.read_probe.round))
            return
        if sender_term > term:
            if self._guard.may_take_entries:
                self._consensus.adopt_term(sender_term)
            return
        if sender_term < term and kind != "pre_vote_answer":
            return
        self._elections.last_heard_s[peer_id] = now_s
        if kind == "append_answer":
            if self._consensus.role == LEADER:
                self._replication.answered(peer_id, message.append_answer, now_s)
        elif kind == "read_answer":
            if self._consensus.role == LEADER:
                self._consensus.note_answer(peer, now_s)
                self._reads.confirm(peer_id, message.read_answer.round)
        elif kind == "vote_granted":
            self._elections.vote_granted(peer, message.vote_granted.term)
        elif kind == "pre_vote_answer":
            self._elections.pre_vote_answered(peer_id, message.pre_vote_answer)
        elif kind == "timeout_now":
            self._elections.asked_to_campaign(peer, message.timeout_now.term, now_s)

    def _follows(self, peer: Peer, leader_term: int, now_s: float) -> bool:
        """Whether to process a message from a leader of this term."""
        self._guard.offered_entries()
        if not self._guard.may_take_entries:
            return False
        term = self._consensus.term
        if leader_term < term:
            self._transport.post(peer.node_id, messages.term_notice(term))
            return False
        if leader_term == term and self._consensus.role == LEADER:
            raise InternalError(f"nodes {peer.node_id} and this one both lead in term {term}")
        self._elections.heard_leader(now_s)
        if self._verified[0] != leader_term:
            self._verified = (leader_term, 0)
        return True

    # Entries

    def _append_entries(self, peer: Peer, body: AppendEntries, now_s: float) -> None:
        leader_term = body.term
        if not self._follows(peer, leader_term, now_s):
            return
        wal, consensus = self._wal, self._consensus
        committed = consensus.commit_index
        first_index, last_index = wal.first_index, wal.last_index
        previous = body.previous_index
        previous_term: int | None = body.previous_term
        if previous > last_index or (previous >= first_index and wal.term_at(previous) != previous_term):
            if previous <= max(committed, wal.known_committed):
                raise InternalError(
                    f"node {peer.node_id}, leader of term {leader_term}, disagrees about the committed entry {previous}"
                )
            hint = max(committed, self._verified[1]) + 1
            if previous > last_index and wal.last_term == leader_term:
                hint = last_index + 1
            consensus.heard_leader(peer, leader_term)
            self._post_answer(peer, success=False, next_index=hint, reset=True)
            return
        entries = messages.entries_of(body)
        size = sum([len(entry[0]) for entry in entries]) + ENTRY_OVERHEAD_BYTES * len(entries)
        if entries and not wal.has_room(size):
            consensus.heard_leader(peer, leader_term)
            return  # no answer: nothing may be promised
        verified, known = previous, 0
        if entries and entries[0][1] <= last_index:
            for _, index, term in entries:
                if index > last_index or (index >= first_index and wal.term_at(index) != term):
                    break
                verified, known = index, known + 1
            del entries[:known]
        # Everything up to the first entry of the log is committed.
        verified = max(verified, first_index)
        if entries:
            if entries[0][1] <= max(committed, consensus.last_applied, wal.known_committed):
                raise InternalError(
                    f"node {peer.node_id}, leader of term {leader_term}, would replace the committed entry "
                    f"{entries[0][1]}"
                )
            previous, previous_term = verified, wal.term_at(verified)
            verified = entries[-1][1]
        else:
            previous, previous_term = last_index, wal.last_term
        commit_index = min(body.commit_index, verified)
        verified = max(verified, committed)
        if verified > self._verified[1]:
            self._verified = (leader_term, verified)
        self._answer = (True, verified + 1)
        consensus.deliver(
            peer,
            {
                "type": "append_entries",
                "term": leader_term,
                "commit_index": commit_index,
                "entries": entries,
                "prevLogIdx": previous,
                "prevLogTerm": previous_term,
            },
        )
        self._answer = None
        self._guard.told_commit(leader_term, body.commit_index)

    def _send_answer(self, peer: Peer, message: dict[str, object]) -> None:
        assert self._answer is not None, "PySyncObj answers only to entries that were delivered to it"
        assert message["success"], "what was delivered to PySyncObj fits its log"
        success, next_index = self._answer
        self._post_answer(peer, success=success, next_index=next_index)

    def _post_answer(
        self, peer: Peer, *, success: bool, next_index: int, reset: bool = False, chunk: int | None = None
    ) -> None:
        self._transport.post_durable(
            peer.node_id,
            messages.append_answer(self._consensus.term, next_index, success=success, reset=reset, chunk=chunk),
        )

    # Snapshots

    def _snapshot_chunk(self, peer: Peer, body: SnapshotChunk, now_s: float) -> None:
        if not self._follows(peer, body.term, now_s):
            return
        self._consensus.heard_leader(peer, body.term)
        self._guard.told_commit(body.term, body.commit_index)
        if body.not_ready:
            self._post_answer(peer, success=False, next_index=self._wal.last_index + 1)
            return
        wanted, complete = self._snapshotter.collect(peer.node_id, body.term, body)
        if not (complete and wanted and self._snapshotter.arrived is not None):
            self._post_answer(
                peer, success=False, next_index=self._wal.last_index + 1, reset=not wanted, chunk=body.sequence
            )

    def finish_snapshot(self) -> None:
        """Install a leader's snapshot that has become durable, and acknowledge it.

        Raises:
            RaftlogError: the state in it does not parse.
        """
        if self._snapshotter.arrived is None:
            return
        incoming, snapshot = self._snapshotter.arrived
        self._snapshotter.arrived = None
        own_term = self._wal.term_at(snapshot.index)
        committed = max(self._consensus.commit_index, self._wal.known_committed)
        if snapshot.index <= committed and own_term not in (None, snapshot.term):
            raise InternalError(
                f"node {incoming.peer_id}, leader of term {incoming.term}, disagrees about the committed entry "
                f"{snapshot.index}: it is of term {own_term} here and of {snapshot.term} in its snapshot"
            )
        if snapshot.index > self._consensus.commit_index and not self._snapshotter.already_has(snapshot):
            self._snapshotter.install(snapshot, incoming.state, self._consensus)
        if incoming.term == self._consensus.term:
            verified = max(snapshot.index, self._consensus.commit_index)
            if verified > self._verified[1]:
                self._verified = (incoming.term, verified)
            self._post_answer(self._peers[incoming.peer_id], success=True, next_index=verified + 1)


__all__ = ["Applied", "PeerStatus", "ProposalOutcome", "RaftNode", "Unknown"]


_ROLES: dict[int, Literal["leader", "candidate", "follower"]] = {
    FOLLOWER: "follower",
    CANDIDATE: "candidate",
    LEADER: "leader",
}
_DEFAULT_OPTIONS = RaftOptions()


class RaftNode:
    """A voter: see the module. One thread; callbacks are called within `cycle`, unless they say otherwise."""

    def __init__(
        self,
        *,
        node_id: int,
        voters: Sequence[int],
        directory: MetadataDirectory,
        wal: WriteAheadLog,
        snapshots: SnapshotStore,
        state: ReplicatedState,
        listener: RaftListener,
        rng: random.Random,
        options: RaftOptions = _DEFAULT_OPTIONS,
        clock: Callable[[], float] = consensus.monotonic_s,
        run_off_loop: RunOffLoop = run_inline,
    ) -> None:
        """Take over an open directory and an open log; restores the newest snapshot.

        Raises:
            RaftlogError: snapshot and log cannot be read or do not fit each other; nothing was changed.
        """
        assert node_id in voters
        self.node_id, self.voters = node_id, tuple(sorted(voters))
        self.has_peers = len(self.voters) > 1
        self.fatal: RaftlogError | None = None
        self._directory, self._wal, self._state, self._listener = directory, wal, state, listener
        self._options, self._clock = options, clock
        self._incarnation = rng.getrandbits(64)
        self._inbox: list[tuple[int, RaftMessage]] = []
        self._proposals = Proposals(wal)
        self._unread: list[ReadDone] = []
        self._active_term = 0
        self._was_active = False
        self._sent_index = self._sent_commit = 0
        self._notice_due_s = math.inf
        """When followers are sent a commit index that no entry has carried to them yet."""
        self._probe_again_s = math.inf
        self._hand_over_again_s = -math.inf
        self._last_contact_s: dict[int, float] = {}
        self._peer_states: dict[int, VoterStateValue] = {}
        self._peer_incarnations: dict[int, int] = {}
        self._state_changed = False
        """Whether an earlier hello of this process may show an outdated state."""
        self._untold: set[int] = set()
        """Peers that must be told the present state."""

        self._peers = {peer_id: Peer(peer_id) for peer_id in self.voters if peer_id != node_id}
        peers = list(self._peers.values())
        self._guard = JoinGuard(node_id, self.voters, directory.state)
        self._transport = RaftTransport(wal)
        self._snapshotter = Snapshotter(snapshots, wal, state, options, run_off_loop)
        restored = self._snapshotter.load()
        self._reads = ReadRounds(len(self.voters) // 2 + 1)
        self._replication = Replication(
            peers, lambda: self._consensus, wal, self._transport, snapshots, options, run_off_loop
        )
        self._consensus = Consensus(Peer(node_id), peers, wal, self._transport, self, rng, options)
        if restored:
            self._consensus.jump_to(restored)
        self._elections = Elections(self._peers, self._consensus, wal, self._transport, self._guard, rng, options)
        self._receiver = Receiver(
            self._peers,
            self._consensus,
            wal,
            self._transport,
            self._guard,
            self._elections,
            self._replication,
            self._reads,
            self._snapshotter,
        )
        self._follow_guard()
        if not self.has_peers:
            self._consensus.election_deadline_s = -math.inf

    # Status

    @property
    def role(self) -> Literal["leader", "candidate", "follower"]:
        """The node's role in the current term."""
        return _ROLES[self._consensus.role]

    @property
    def term(self) -> int:
        """The current term."""
        return self._consensus.term

    @property
    def leader_id(self) -> int:
        """The leader, as far as this node knows; -1 if unknown, or silent for an election timeout."""
        leader = self._consensus.leader
        if leader is None or not self._elections.hears_leader(self._clock()):
            return -1
        return leader.node_id

    @property
    def active(self) -> bool:
        """Whether this node leads and has applied everything that was committed before its term."""
        return self._consensus.role == LEADER and self._active_term == self._consensus.term

    @property
    def commit_index(self) -> int:
        """Entries up to this one are committed."""
        return self._consensus.commit_index

    @property
    def last_applied(self) -> int:
        """Entries up to this one were applied."""
        return self._consensus.last_applied

    @property
    def last_index(self) -> int:
        """The newest entry of the log."""
        return self._wal.last_index

    @property
    def first_index(self) -> int:
        """The oldest entry of the log."""
        return self._wal.first_index

    @property
    def snapshot_index(self) -> int:
        """The last entry in the newest snapshot, 0 if there is none."""
        return self._snapshotter.index

    @property
    def voter_state(self) -> VoterStateValue:
        """FRESH, VIRGIN, JOINING or VOTER."""
        state = self._guard.state
        if state == VOTER and self._consensus.term == 0 and self._wal.last_index == 1:
            return VIRGIN
        return state

    @property
    def in_flight(self) -> bool:
        """Whether entries of the log are not committed yet."""
        return self._consensus.commit_index < self._wal.last_index

    def peers(self) -> Mapping[int, PeerStatus]:
        """Return the status of the other voters."""
        now, leads = self._clock(), self._consensus.role == LEADER
        found = {}
        for peer_id, peer in self._peers.items():
            heard = self._last_contact_s.get(peer_id)
            found[peer_id] = PeerStatus(
                connected=peer_id in self._elections.connected,
                match_index=self._consensus.match_index[peer] if leads else 0,
                last_contact_s=None if heard is None else now - heard,
                state=self._peer_states.get(peer_id, FRESH),
            )
        return found

    def hello(self, peer_id: int = 0) -> RaftHello:
        """Return how this node introduces itself to `peer_id`."""
        return RaftHello(
            cluster_id=self._directory.cluster_id,
            node_id=self.node_id,
            peer_id=peer_id,
            voters=self.voters,
            incarnation=self._incarnation,
            current_term=self._consensus.term,
            voter_state=self.voter_state,
        )

    # Input, which the next cycle processes

    def receive(self, peer_id: int, message: RaftMessage) -> None:
        """Take a message of the newest stream from `peer_id`, in the stream's order."""
        self._inbox.append((peer_id, message))

    def hello_from(self, peer_id: int, hello: RaftHello) -> None:
        """Note an accepted hello, on a stream in either direction."""
        self._last_contact_s[peer_id] = self._clock()
        state = hello.voter_state
        if hello.incarnation == self._peer_incarnations.get(peer_id):
            known = self._peer_states[peer_id]
            if known == VOTER or (known == VIRGIN and state != VOTER):
                state = known  # the hello was made before its notice, which came on the stream in the other direction
        self._peer_incarnations[peer_id] = hello.incarnation
        self._peer_states[peer_id] = state
        if state in (FRESH, JOINING):
            self._consensus.forget_match(self._peers[peer_id])
        self._guard.heard(peer_id, state, hello.current_term)

    def link_up(self, peer_id: int, hello: RaftHello) -> None:
        """Note that this node's stream to `peer_id` is up, with nothing sent on it yet."""
        self.hello_from(peer_id, hello)
        self._transport.drop(peer_id)
        self._elections.connected.add(peer_id)
        self._consensus.connected(self._peers[peer_id])
        self._replication.link_up(peer_id)
        if self._state_changed:
            self._untold.add(peer_id)

    def link_down(self, peer_id: int) -> None:
        """Note that this node's stream to `peer_id` is gone."""
        self._elections.connected.discard(peer_id)
        self._consensus.disconnected(self._peers[peer_id])
        self._replication.link_down(peer_id)

    def stream_lost(self, peer_id: int) -> None:
        """Note that the stream from `peer_id` to this node is gone."""
        if self._consensus.leader is self._peers[peer_id]:
            self._elections.leader_stream_lost(self._clock())

    # Asking

    def propose(self, command: bytes, done: ProposalDone) -> None:
        """Propose a command; `done` is called in the cycle that applies it, or gives it up.

        Raises:
            NotController: this node is not active, or is handing leadership over.
            MessageTooLarge: the command is beyond `max_command_bytes`.
            StorageFull: there is no room for it on the disk.
        """
        if self.fatal is not None or not self.active or self._elections.handing_over:
            raise NotController(f"node {self.node_id} is not the active controller")
        size = len(command)
        if size > self._options.max_command_bytes:
            raise MessageTooLarge(f"a command of {size} bytes is beyond the {self._options.max_command_bytes} allowed")
        if not self._proposals.add(command, done):
            raise StorageFull("no space is left in the metadata directory of the active controller; make room")

    def read_index(self, done: ReadDone) -> None:
        """Call `done` with an index once this node has applied everything that was committed when this was called.

        With None when it does not lead, or stops leading before it knows; then at once or in a cycle.
        """
        if self.fatal is not None or self._consensus.role != LEADER:
            done(None)
        else:
            self._reads.add(done)

    def transfer_leadership(self) -> bool:
        """Begin to hand leadership to the most caught-up peer; False if there is none. Until it is elected, or for
        one election timeout, proposals are refused.
        """
        if not self.active:
            return False
        candidates = {
            peer_id: (int(status.state in (VOTER, VIRGIN)), status.match_index)
            for peer_id, status in self.peers().items()
            if status.connected and status.match_index
        }
        return self._elections.hand_over(candidates, self._clock())

    # Driving

    @property
    def wants_cycle(self) -> bool:
        """Whether a cycle would do something now, regardless of timers."""
        if self._inbox or self._proposals.waiting or self._snapshotter.arrived is not None or self._snapshotter.failed:
            return True
        if self._consensus.role == LEADER:
            if self._reads.waiting and self.active:
                return True
            if not self.has_peers:
                return self._consensus.commit_index < min(self._wal.synced_index, self._wal.last_index)
        return False

    def next_deadline_s(self) -> float:
        """When a cycle is due if nothing happens before, on the node's clock."""
        if self._consensus.role == LEADER:
            return min(self._consensus.heartbeat_deadline_s, self._notice_due_s)
        return self._consensus.election_deadline_s

    def take_immediate(self) -> Outgoing:
        """Return messages that may leave now."""
        return self._transport.take_immediate()

    def take_durable(self) -> Outgoing:
        """Return messages that may leave once everything the log has collected by now is durable."""
        return self._transport.take_durable()

    def cycle(self) -> None:
        """Process the input and do what is due.

        Raises:
            RaftlogError: the node has stopped for good; every later cycle raises it again.
        """
        if self.fatal is not None:
            raise self.fatal
        try:
            self._cycle()
        except RaftlogError as error:
            self.fatal = error
        except OSError as error:
            self.fatal = StorageError(f"the metadata directory failed: {error}; repair the disk and restart")
            self.fatal.__cause__ = error
        except Exception as error:  # anything unexpected: going on could make this replica differ from the others
            self.fatal = InternalError(f"the metadata node {self.node_id} stopped: {type(error).__name__}: {error}")
            self.fatal.__cause__ = error
        if self.fatal is not None:
            logger.critical("node %d stops: %s", self.node_id, self.fatal)
            raise self.fatal

    def _cycle(self) -> None:
        now, consensus = self._clock(), self._consensus
        if self._snapshotter.failed is not None:
            raise self._snapshotter.failed
        applied_before = consensus.last_applied
        self._follow_guard()
        self._receiver.finish_snapshot()
        inbox, self._inbox = self._inbox, []
        for peer_id, message in inbox:
            self._last_contact_s[peer_id] = now
            if message.HasField("voter_notice"):
                self._peer_states[peer_id] = message.voter_notice.voter_state
            self._receiver.handle(peer_id, message, now)
        self._elections.before_tick(now)
        consensus.tick()
        if consensus.role == LEADER:
            self._lead(now)
        # A follower applies what is not durable yet. A voter that loses it in a crash could elect a leader without it.
        self._guard.applied(min(consensus.last_applied, self._wal.synced_index), self._wal.term_at)
        self._wal.note_committed(consensus.last_applied)
        if consensus.last_applied > applied_before:
            self._snapshotter.maybe_begin(consensus.last_applied)
            self._listener.on_applied(consensus.last_applied)
        self._follow_guard()
        if self._untold:
            for peer_id in self._untold & self._elections.connected:
                self._transport.post(peer_id, messages.voter_notice(consensus.term, self.voter_state))
            self._untold -= self._elections.connected
        self._tell_abandoned()

    def _lead(self, now: float) -> None:
        consensus = self._consensus
        if consensus.commit_index != self._sent_commit and self._notice_due_s == math.inf:
            self._notice_due_s = now + self._options.commit_notice_s
        if self._wal.last_index != self._sent_index or self._replication.behind or now >= self._notice_due_s:
            self.send_entries(heartbeat=False)
        if self.active and (self._reads.waiting or (self._reads.under_way and now >= self._probe_again_s)):
            self._probe_again_s = now + self._options.heartbeat_interval_s
            message = messages.read_probe(consensus.term, self._reads.begin(consensus.commit_index))
            for peer_id in self._elections.connected:
                self._transport.post(peer_id, message)
        if self._reads.under_way:
            for commit_index, reads in self._reads.ready():
                for read in reads:
                    read(max(commit_index, consensus.last_applied))
        if self._elections.handing_over:
            self._elections.continue_handover(now)
        elif now >= self._hand_over_again_s and self.has_peers:
            self._hand_over_again_s = now + self._options.election_timeout_s[0]
            if not self._wal.has_room(CAMPAIGN_ROOM_BYTES) and self.transfer_leadership():
                logger.warning("no space is left in the metadata directory: handing leadership over")

    def _follow_guard(self) -> None:
        """Make the guard's decision durable."""
        guard, before = self._guard, self._directory.state
        if guard.state != before:
            if guard.state == VOTER and before == FRESH and self.has_peers:
                logger.info("node %d formats its metadata directory: all voters are new", self.node_id)
                self._elections.quorum_begins(self._clock())
            self._wal.begin()
            self._directory.become(guard.state)
            self._state_changed, self._untold = True, set(self._peers)
            logger.info(
                "node %d is now %s",
                self.node_id,
                "a voter" if guard.state == VOTER else "joining",
                extra={"event": "raft_membership_changed", "votes": guard.state == VOTER},
            )
        if guard.state == JOINING and guard.may_take_entries and guard.lowest_term > self._consensus.term:
            self._consensus.adopt_term(guard.lowest_term, ABSTAINED)

    def _tell_abandoned(self) -> None:
        if self._was_active and not self.active:
            self._was_active = False
            self._listener.on_inactive()
        self._proposals.tell_abandoned()
        if self._unread:
            unread, self._unread = self._unread, []
            for read in unread:
                read(None)

    # Hooks of the engine

    def apply_entries(self, entries: list[Entry]) -> None:
        """Apply committed entries; an exception stops the node before it counts the entry as applied."""
        consensus, apply, told = self._consensus, self._state.apply, self._proposals.applied
        for data, index, term in entries:
            if data[0] == 0:
                result = apply(index, term, data[1:])
                consensus.applied(index)
                told(index, term, result)
            elif data[0] == 1:
                self._state.begin_term(index, term)
                consensus.applied(index)
                if term == consensus.term and consensus.role == LEADER:
                    self._active_term = term
                    self._was_active = True
                    self._listener.on_active(term)
            else:
                raise UnsupportedVersion(f"entry {index} is of the unknown kind {data[0]}; run a newer version")

    def append_proposals(self) -> None:
        """Append what was proposed since the last cycle."""
        if self._proposals.waiting and self._consensus.role == LEADER:
            self._proposals.append(self._consensus.term)

    def send_entries(self, heartbeat: bool) -> None:
        """Send followers what they lack."""
        self._sent_index, self._sent_commit = self._wal.last_index, self._consensus.commit_index
        self._notice_due_s = math.inf
        self._replication.send(self._clock(), heartbeat=heartbeat)

    def role_changed(self, before: int, now: int) -> None:
        """Note a change of role; waiting callers are answered at the end of the cycle."""
        if now == LEADER:
            self._replication.begin_term_at(self._wal.last_index + 1)
            logger.info(
                "node %d leads in term %d",
                self.node_id,
                self._consensus.term,
                extra={"event": "raft_leader_gained", "term": self._consensus.term},
            )
        if before == LEADER:
            logger.info(
                "node %d leads no longer",
                self.node_id,
                extra={"event": "raft_leader_lost", "term": self._consensus.term},
            )
            self._proposals.abandon()
            self._unread += self._reads.abandon()
