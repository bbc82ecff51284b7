"""Elections of a Raft node: pre-vote, the sticky leader, votes by identity, handing leadership over.

A node first asks whether it would be elected (pre-vote, Raft thesis 9.6), so that a node that was cut off does not
depose a working leader with a higher term when it returns. Nodes that hear a leader answer neither a pre-vote nor a
candidate, unless the leader itself asked for the election.
"""

from __future__ import annotations

import logging
import math
import random

from raftlog.v1.raft_pb2 import PreVoteAnswer, PreVoteRequest, VoteRequest
from raftmeta.raft import messages
from raftmeta.raft.consensus import LEADER, Consensus, Peer, RaftOptions, RaftTransport
from raftmeta.raft.voters import JoinGuard
from raftmeta.raft.wal import WriteAheadLog

logger = logging.getLogger(__name__)

CAMPAIGN_ROOM_BYTES = 4 << 10
"""Space that a node must have on its disk before it campaigns."""


class Elections:
    """One node's part in elections."""

    def __init__(
        self,
        peers: dict[int, Peer],
        consensus: Consensus,
        wal: WriteAheadLog,
        transport: RaftTransport,
        guard: JoinGuard,
        rng: random.Random,
        options: RaftOptions,
    ) -> None:
        self._peers, self._consensus, self._wal, self._transport = peers, consensus, wal, transport
        self._guard, self._rng, self._options = guard, rng, options
        self._needed = (len(peers) + 1) // 2
        """The number of other voters that form a majority with this node."""
        self.connected: set[int] = set()
        self.last_heard_s: dict[int, float] = {}
        """The time of each peer's last message of the current term."""
        self._leader_heard_s = -math.inf
        self._leader_suspected = False
        self._round = 0
        self._pre_votes: set[int] | None = None
        """The peers that granted the pre-vote under way."""
        self._pre_vote_term = 0
        self._elected_beforehand = False
        self._votes: set[int] = set()
        self._votes_term = 0
        self._transfer_to: int | None = None
        self._transfer_until_s = 0.0
        self._transfer_sent = False
        self._asked_until_s = -math.inf
        """Until when a leader's request to campaign at once is valid."""
        self._said_last_term = False
        self._said_full = False

    # The leader

    def heard_leader(self, now_s: float) -> None:
        """Note a message of the current term's leader."""
        self._leader_heard_s = now_s
        self._leader_suspected = False

    def leader_stream_lost(self, now_s: float) -> None:
        """Note that the leader's stream broke, which shows a killed process long before a timeout."""
        self._leader_suspected = True
        soon = now_s + self._rng.uniform(*self._options.prevote_after_break_s)
        if self._consensus.election_deadline_s > soon:
            self._consensus.election_deadline_s = soon

    def quorum_begins(self, now_s: float) -> None:
        """Note that all voters are new: none of them leads, so there is no leader to wait for."""
        if self._options.first_election_s is not None:
            self._consensus.election_deadline_s = now_s + self._rng.uniform(*self._options.first_election_s)

    def hears_leader(self, now_s: float) -> bool:
        """Whether this node leads, or has heard the leader that it knows within the shortest election timeout."""
        if self._consensus.role == LEADER:
            return True
        return not self._leader_suspected and now_s - self._leader_heard_s < self._options.election_timeout_s[0]

    def _leader_alive(self, now_s: float) -> bool:
        if self._consensus.role == LEADER:
            heard = sorted((self.last_heard_s.get(peer, -math.inf) for peer in self._peers), reverse=True)
            return not heard or now_s - heard[self._needed - 1] < self._options.election_timeout_s[0]
        return self.hears_leader(now_s)

    # Campaigning

    def before_tick(self, now_s: float) -> None:
        """Decide whether a campaign that is due may take place in the tick that follows."""
        consensus = self._consensus
        if consensus.role == LEADER or consensus.election_deadline_s >= now_s:
            return
        may = self._guard.may_vote and self._has_room() and self._has_terms_left()
        if consensus.transfer_in_progress and not (may and self.connected and now_s <= self._asked_until_s):
            # Nothing comes of it, and PySyncObj would find it due in every tick from now on.
            consensus.forget_transfer()
            self._transport.transfer_term = 0
            self._postpone(now_s)
        elif not may:
            self._postpone(now_s)
        elif self._peers and not self._elected_beforehand and not consensus.transfer_in_progress:
            self._postpone(now_s)
            self._ask(now_s)
        else:
            logger.info(
                "campaigning for term %d",
                consensus.term + 1,
                extra={"event": "raft_campaign", "term": consensus.term + 1},
            )
        self._elected_beforehand = False

    def _has_room(self) -> bool:
        has_room = self._wal.has_room(CAMPAIGN_ROOM_BYTES)
        if not has_room and not self._said_full:
            logger.warning(
                "no space is left in the metadata directory: this node cannot campaign; make room",
                extra={"event": "metadata_disk_full"},
            )
        self._said_full = not has_room
        return has_room

    def _has_terms_left(self) -> bool:
        if self._consensus.term < messages.MAX_TERM:
            return True
        if not self._said_last_term:
            self._said_last_term = True
            logger.error("term %d is the last one there is: this node cannot campaign any more", messages.MAX_TERM)
        return False

    def _postpone(self, now_s: float) -> None:
        self._consensus.election_deadline_s = now_s + self._rng.uniform(0.5, 1.0) * self._options.election_timeout_s[0]

    def _ask(self, now_s: float) -> None:
        self._round += 1
        self._pre_votes, self._pre_vote_term = set(), self._consensus.term
        message = messages.pre_vote_request(self._pre_vote_term, self._wal.last_index, self._wal.last_term, self._round)
        for peer_id in sorted(self.connected):
            self._transport.post(peer_id, message)

    def pre_vote_requested(self, peer_id: int, body: PreVoteRequest, now_s: float) -> None:
        """Answer whether this node would vote for the sender."""
        term = self._consensus.term
        granted = (
            self._guard.may_vote
            and body.term > term
            and (body.last_term, body.last_index) >= (self._wal.last_term, self._wal.last_index)
            and not self._leader_alive(now_s)
        )
        self._transport.post(peer_id, messages.pre_vote_answer(term, body.round, granted=granted))

    def pre_vote_answered(self, peer_id: int, body: PreVoteAnswer) -> None:
        """Count an answer; with a majority the campaign begins in this cycle."""
        if self._pre_votes is None or body.round != self._round or self._pre_vote_term != self._consensus.term:
            return
        if body.granted:
            self._pre_votes.add(peer_id)
        if len(self._pre_votes) >= self._needed:
            self._pre_votes = None
            self._elected_beforehand = True
            self._consensus.election_deadline_s = -math.inf

    # Votes

    def vote_requested(self, peer: Peer, body: VoteRequest, now_s: float) -> None:
        """Let PySyncObj decide on a vote, unless the request must be ignored."""
        term = self._consensus.term
        if body.term < term:
            self._transport.post(peer.node_id, messages.term_notice(term))
            return
        if not self._guard.may_vote:
            return
        if body.term > term and not body.transfer and self._leader_alive(now_s):
            return
        self._consensus.deliver(
            peer,
            {
                "type": "request_vote",
                "term": body.term,
                "last_log_index": body.last_index,
                "last_log_term": body.last_term,
            },
        )

    def vote_granted(self, peer: Peer, term: int) -> None:
        """Count a vote, once for each voter and term."""
        if term != self._consensus.term:
            return
        if self._votes_term != term:
            self._votes, self._votes_term = set(), term
        if peer.node_id not in self._votes:
            self._votes.add(peer.node_id)
            self._consensus.deliver(peer, {"type": "response_vote", "term": term})

    # Handing over

    @property
    def handing_over(self) -> bool:
        """Whether leadership is being handed over: no new proposals are accepted meanwhile."""
        return self._transfer_to is not None

    def hand_over(self, progress: dict[int, tuple[int, int]], now_s: float) -> bool:
        """Begin to hand leadership to the most caught-up of the peers in `progress`: (preference, match index)."""
        if not progress:
            return False
        self._transfer_to = max(progress, key=lambda peer_id: (progress[peer_id], -peer_id))
        self._transfer_until_s = now_s + self._options.election_timeout_s[0]
        self._transfer_sent = False
        return True

    def continue_handover(self, now_s: float) -> None:
        """Ask the chosen peer to campaign once it has the whole log; give up after a while."""
        if self._transfer_to is None:
            return
        consensus = self._consensus
        if consensus.role != LEADER or now_s > self._transfer_until_s or self._transfer_to not in self.connected:
            self._transfer_to = None
        elif not self._transfer_sent and (
            consensus.match_index[self._peers[self._transfer_to]] == self._wal.last_index
        ):
            self._transport.post(self._transfer_to, messages.timeout_now(consensus.term))
            self._transfer_sent = True

    def asked_to_campaign(self, peer: Peer, term: int, now_s: float) -> None:
        """Campaign at once, if the leader asks for it and this node may; the wish expires after an election timeout."""
        consensus = self._consensus
        if term == consensus.term and consensus.leader is peer and self._guard.may_vote:
            self._asked_until_s = now_s + self._options.election_timeout_s[0]
            self._transport.transfer_term = term + 1
            consensus.deliver(peer, {"type": "timeout_now", "term": term})
            consensus.election_deadline_s = -math.inf
