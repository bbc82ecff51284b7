"""Encoding and decoding of the messages between voters (`raft.proto`).

    message             sent by      leaves                  answered by
    append_entries      leader       at once                 append_answer
    snapshot_chunk      leader       at once                 append_answer
    append_answer       follower     once the log is synced
    vote_request        candidate    once the vote is synced  vote_granted, or nothing
    vote_granted        voter        once the vote is synced
    pre_vote_request    follower     at once                 pre_vote_answer
    pre_vote_answer     voter        at once
    timeout_now         leader       at once                 vote_request
    read_probe          leader       at once                 read_answer
    read_answer         follower     at once
    term_notice         any node     at once
    voter_notice        any node     at once

Each carries its sender's term. "At once" is true if that term is durable; otherwise the message waits for the sync too.

A term is at most MAX_TERM, the largest controller epoch (int32). A node adopts any higher term that it sees, durably: a
term without a successor would leave the quorum without a leader for good.
"""

from __future__ import annotations

from typing import Final

from raftlog.v1.raft_pb2 import (
    AppendAnswer,
    AppendEntries,
    PreVoteAnswer,
    PreVoteRequest,
    RaftMessage,
    ReadAnswer,
    ReadProbe,
    SnapshotChunk,
    TermNotice,
    TimeoutNow,
    VoteGranted,
    VoteRequest,
    VoterNotice,
)
from raftmeta.raft.voters import VoterStateValue
from raftmeta.raft.wal import Entry

MAX_TERM: Final = 2**31 - 1
_WITH_TERM: Final = frozenset(
    {"append_entries", "snapshot_chunk", "vote_request", "vote_granted", "pre_vote_request", "timeout_now"}
)


def flaw(message: RaftMessage) -> str:
    """Return why a received message is invalid, as text; "" if it is valid."""
    kind = message.WhichOneof("body")
    if kind is None:
        return "a message that is empty, or of a kind that this version does not know"
    term = message.sender_term
    if kind in _WITH_TERM:
        body = getattr(message, kind)
        term = max(term, body.term)
        if kind == "append_entries":
            wrong = _flaw_in_entries(body)
            if wrong:
                return wrong
    return f"term {term}, beyond {MAX_TERM}" if term > MAX_TERM else ""


def _flaw_in_entries(body: AppendEntries) -> str:
    """Return why these entries cannot be part of a leader's log. Followers append them unchanged."""
    index, term = body.previous_index, body.previous_term
    for entry in body.entries:
        if entry.term > body.term:
            return f"an entry of a later term than that of its leader, {body.term}"
        if entry.index != index + 1:
            return f"entry {entry.index} behind entry {index}"
        if entry.term < term:
            return f"entry {entry.index} of term {entry.term} behind one of term {term}"
        if not entry.data:
            return f"entry {entry.index} without content"
        index, term = entry.index, entry.term
    return ""


def append_entries(
    term: int, commit_index: int, previous_index: int, previous_term: int, entries: list[Entry]
) -> RaftMessage:
    """Entries that follow the one at `previous_index`; none of them: a heartbeat."""
    message = RaftMessage(sender_term=term)
    body = message.append_entries
    body.term = term
    body.commit_index = commit_index
    body.previous_index = previous_index
    body.previous_term = previous_term
    add = body.entries.add
    for data, index, entry_term in entries:
        add(index=index, term=entry_term, data=data)
    return message


def entries_of(body: AppendEntries) -> list[Entry]:
    """Return the entries of a message as the log has them."""
    return [(entry.data, entry.index, entry.term) for entry in body.entries]


def append_answer(
    term: int, next_index: int, *, success: bool, reset: bool = False, chunk: int | None = None
) -> RaftMessage:
    """`success`: below `next_index` the follower's log is the leader's; `reset`: the leader goes on at `next_index`."""
    return RaftMessage(
        sender_term=term, append_answer=AppendAnswer(next_index=next_index, success=success, reset=reset, chunk=chunk)
    )


def snapshot_chunk(
    term: int, commit_index: int, sequence: int, data: bytes, *, first: bool = False, last: bool = False
) -> RaftMessage:
    """A part of a snapshot's file."""
    return RaftMessage(
        sender_term=term,
        snapshot_chunk=SnapshotChunk(
            term=term, commit_index=commit_index, sequence=sequence, data=data, first=first, last=last
        ),
    )


def snapshot_heartbeat(term: int, commit_index: int) -> RaftMessage:
    """Keeps a follower that waits for a snapshot from campaigning."""
    return RaftMessage(
        sender_term=term, snapshot_chunk=SnapshotChunk(term=term, commit_index=commit_index, not_ready=True)
    )


def vote_request(term: int, last_index: int, last_term: int, *, transfer: bool) -> RaftMessage:
    """The sender campaigns in `term`."""
    return RaftMessage(
        sender_term=term,
        vote_request=VoteRequest(term=term, last_index=last_index, last_term=last_term, transfer=transfer),
    )


def vote_granted(term: int) -> RaftMessage:
    """The receiver has the sender's vote in `term`."""
    return RaftMessage(sender_term=term, vote_granted=VoteGranted(term=term))


def pre_vote_request(term: int, last_index: int, last_term: int, round_number: int) -> RaftMessage:
    """Would the receiver vote for the sender in the next term?"""
    return RaftMessage(
        sender_term=term,
        pre_vote_request=PreVoteRequest(term=term + 1, last_index=last_index, last_term=last_term, round=round_number),
    )


def pre_vote_answer(term: int, round_number: int, *, granted: bool) -> RaftMessage:
    """Answers the request of that round."""
    return RaftMessage(sender_term=term, pre_vote_answer=PreVoteAnswer(granted=granted, round=round_number))


def timeout_now(term: int) -> RaftMessage:
    """The leader of `term` asks the receiver to campaign at once."""
    return RaftMessage(sender_term=term, timeout_now=TimeoutNow(term=term))


def read_probe(term: int, round_number: int) -> RaftMessage:
    """Does the receiver still follow?"""
    return RaftMessage(sender_term=term, read_probe=ReadProbe(round=round_number))


def read_answer(term: int, round_number: int) -> RaftMessage:
    """Yes, as far as all rounds up to this one."""
    return RaftMessage(sender_term=term, read_answer=ReadAnswer(round=round_number))


def term_notice(term: int) -> RaftMessage:
    """Nothing but the sender's term, which is higher than the receiver's."""
    return RaftMessage(sender_term=term, term_notice=TermNotice())


def voter_notice(term: int, state: VoterStateValue) -> RaftMessage:
    """The sender is no longer what its hello said."""
    return RaftMessage(sender_term=term, voter_notice=VoterNotice(voter_state=state))
