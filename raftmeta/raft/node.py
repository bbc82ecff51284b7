"""One voter of the metadata quorum.

The owner carries messages and calls `cycle`:

    cycle() → send take_immediate() → make the log durable, if it is dirty → send take_durable() → wait for a message,
    a proposal, a change of a stream, or next_deadline_s()

A node stops for good (`fatal`) when it can no longer be trusted to agree with the others: its disk failed, an applied
entry raised, a leader contradicts what is committed.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
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
from raftlog.v1.raft_pb2 import FRESH, JOINING, VIRGIN, VOTER, RaftHello, RaftMessage
from raftmeta.raft import engine, messages
from raftmeta.raft.consensus import CANDIDATE, FOLLOWER, LEADER, Consensus, Peer
from raftmeta.raft.elections import CAMPAIGN_ROOM_BYTES, Elections
from raftmeta.raft.options import RaftOptions
from raftmeta.raft.ports import Applied, ProposalOutcome, RaftListener, ReplicatedState, RunOffLoop, Unknown, run_inline
from raftmeta.raft.proposals import ProposalDone, Proposals
from raftmeta.raft.reads import ReadDone, ReadRounds
from raftmeta.raft.receiving import Receiver
from raftmeta.raft.replication import Replication
from raftmeta.raft.snapshots import SnapshotStore
from raftmeta.raft.snapshotting import Snapshotter
from raftmeta.raft.status import PeerStatus
from raftmeta.raft.transport import Outgoing, RaftTransport
from raftmeta.raft.voters import JoinGuard, MetadataDirectory, VoterStateValue
from raftmeta.raft.wal import ABSTAINED, Entry, WriteAheadLog

__all__ = ["Applied", "PeerStatus", "ProposalOutcome", "RaftNode", "Unknown"]

logger = logging.getLogger(__name__)

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
        clock: Callable[[], float] = engine.monotonic_s,
        run_off_loop: RunOffLoop = run_inline,
    ) -> None:
        """Take over an open directory and an open log; restores the newest snapshot.

        Raises:
            RaftlogError: snapshot and log cannot be read or do not fit; nothing was changed.
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
        """When followers are told a commit index that no entry has carried to them before."""
        self._probe_again_s = math.inf
        self._hand_over_again_s = -math.inf
        self._last_contact_s: dict[int, float] = {}
        self._peer_states: dict[int, VoterStateValue] = {}
        self._state_changed = False
        """Whether hellos of this process may say what is over."""
        self._untold: set[int] = set()
        """Peers that have to hear of the present state."""

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
        """What the node is in the current term."""
        return _ROLES[self._consensus.role]

    @property
    def term(self) -> int:
        """The current term."""
        return self._consensus.term

    @property
    def leader_id(self) -> int:
        """Who leads, as far as this node knows; -1 when it does not, or has not heard of it for an election timeout."""
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
        """Return what is known of the other voters."""
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

    # Input; whatever comes in is processed by the next cycle

    def receive(self, peer_id: int, message: RaftMessage) -> None:
        """Take a message in that came on the newest stream from `peer_id`, behind all earlier ones of it."""
        self._inbox.append((peer_id, message))

    def hello_from(self, peer_id: int, hello: RaftHello) -> None:
        """Note an accepted hello, on a stream in either direction."""
        self._last_contact_s[peer_id] = self._clock()
        self._peer_states[peer_id] = hello.voter_state
        if hello.voter_state in (FRESH, JOINING):
            self._consensus.forget_match(self._peers[peer_id])
        self._guard.heard(peer_id, hello.voter_state, hello.current_term)

    def link_up(self, peer_id: int, hello: RaftHello) -> None:
        """Our stream to `peer_id` is there, and nothing was sent on it yet."""
        self.hello_from(peer_id, hello)
        self._transport.drop(peer_id)
        self._elections.connected.add(peer_id)
        self._consensus.connected(self._peers[peer_id])
        self._replication.link_up(peer_id)
        if self._state_changed:
            self._untold.add(peer_id)

    def link_down(self, peer_id: int) -> None:
        """Our stream to `peer_id` is gone."""
        self._elections.connected.discard(peer_id)
        self._consensus.disconnected(self._peers[peer_id])
        self._replication.link_down(peer_id)

    def stream_lost(self, peer_id: int) -> None:
        """The stream from `peer_id` to us is gone."""
        if self._consensus.leader is self._peers[peer_id]:
            self._elections.leader_stream_lost(self._clock())

    # Asking

    def propose(self, command: bytes, done: ProposalDone) -> None:
        """Have a command committed; `done` is called in the cycle in which it is applied, or in which that is given up.

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
        """Whether a cycle would do something now, whatever the time is."""
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
        """Process what has come in and do what is due.

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
        self._guard.applied(consensus.last_applied, self._wal.term_at)
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
        """Make on disk what the guard has decided."""
        guard, before = self._guard, self._directory.state
        if guard.state != before:
            if guard.state == VOTER and before == FRESH and self.has_peers:
                logger.info("node %d formats its metadata directory: all voters are new", self.node_id)
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
        """Note a change of role; who waits for something is told at the end of the cycle."""
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
