"""What a node makes of the messages it receives, before PySyncObj sees them.

- A message that cannot be (`messages.flaw`) is dropped: nothing in it is believed.
- A message of an older term is dropped, or answered with a term notice; a higher term is adopted first.
- Entries are cut down to those that are new: what matches is never truncated, what is committed never at all, and
  only what was compared is acknowledged. A rejection says where to go on, so that one round trip finds the place.
- A commit index counts only as far as entries were compared.
"""

from __future__ import annotations

import logging

from raftlog.errors import InternalError
from raftlog.v1.raft_pb2 import AppendEntries, RaftMessage, SnapshotChunk
from raftmeta.raft import messages
from raftmeta.raft.consensus import LEADER, Consensus, Peer
from raftmeta.raft.elections import Elections
from raftmeta.raft.reads import ReadRounds
from raftmeta.raft.replication import Replication
from raftmeta.raft.snapshotting import Snapshotter
from raftmeta.raft.transport import RaftTransport
from raftmeta.raft.voters import JoinGuard
from raftmeta.raft.wal import ENTRY_OVERHEAD_BYTES, WriteAheadLog

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
        """(term, up to where the log was compared with the leader's of that term)"""
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
        """Whether a message from a leader of this term is to be looked at."""
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
