"""Messages say what they were made of, on the wire as well."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raftlog.v1.raft_pb2 import RaftMessage
from raftmeta.raft import messages
from raftmeta.raft.wal import Entry

NUMBERS = st.integers(0, 2**63)


def carried(message: RaftMessage) -> RaftMessage:
    return RaftMessage.FromString(message.SerializeToString())


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.lists(st.tuples(st.binary(), NUMBERS, NUMBERS), max_size=5))
def test_entries(term: int, commit: int, previous: int, previous_term: int, entries: list[Entry]) -> None:
    message = carried(messages.append_entries(term, commit, previous, previous_term, entries))
    body = message.append_entries
    assert message.WhichOneof("body") == "append_entries"
    assert (message.sender_term, body.term, body.commit_index) == (term, term, commit)
    assert (body.previous_index, body.previous_term) == (previous, previous_term)
    assert messages.entries_of(body) == entries


@given(NUMBERS, NUMBERS, st.booleans(), st.booleans(), st.none() | st.integers(0, 2**32 - 1))
def test_answers(term: int, next_index: int, success: bool, reset: bool, chunk: int | None) -> None:
    message = carried(messages.append_answer(term, next_index, success=success, reset=reset, chunk=chunk))
    body = message.append_answer
    assert (message.sender_term, body.next_index, body.success, body.reset) == (term, next_index, success, reset)
    assert (body.chunk if body.HasField("chunk") else None) == chunk


@given(NUMBERS, NUMBERS, st.integers(0, 2**32 - 1), st.binary(), st.booleans(), st.booleans())
def test_chunks(term: int, commit: int, sequence: int, data: bytes, first: bool, last: bool) -> None:
    body = carried(messages.snapshot_chunk(term, commit, sequence, data, first=first, last=last)).snapshot_chunk
    assert (body.term, body.commit_index, body.sequence, body.data) == (term, commit, sequence, data)
    assert (body.first, body.last, body.not_ready) == (first, last, False)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_every_message_shows_its_senders_term_and_its_kind(term: int, index: int, number: int) -> None:
    made = {
        "vote_request": messages.vote_request(term, index, number, transfer=True),
        "vote_granted": messages.vote_granted(term),
        "pre_vote_request": messages.pre_vote_request(term, index, number, 1),
        "pre_vote_answer": messages.pre_vote_answer(term, number, granted=True),
        "timeout_now": messages.timeout_now(term),
        "read_probe": messages.read_probe(term, number),
        "read_answer": messages.read_answer(term, number),
        "term_notice": messages.term_notice(term),
        "snapshot_chunk": messages.snapshot_heartbeat(term, index),
    }
    for kind, message in made.items():
        assert carried(message).WhichOneof("body") == kind
        assert carried(message).sender_term == term
    assert made["pre_vote_request"].pre_vote_request.term == term + 1
