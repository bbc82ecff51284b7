"""What no voter ever says is not believed, whoever sends it; and nothing makes a node spin."""

from __future__ import annotations

import pytest

from raftlog.errors import CorruptRecordError
from raftlog.v1.raft_pb2 import AppendEntries, RaftEntry, RaftMessage, SnapshotChunk, TermNotice, VoteRequest
from raftmeta.raft import messages
from raftmeta.raft.messages import MAX_TERM
from raftmeta.raft.snapshots import Snapshot, encode_snapshot
from raftmeta.raft.wal import ABSTAINED
from tests.support.raft_cluster import RaftCluster, raft_cluster

TOO_HIGH = MAX_TERM + 1

IMPOSSIBLE = [
    RaftMessage(),
    RaftMessage(sender_term=5),
    RaftMessage.FromString(b"\xfa\x07\x00"),  # a body of a kind that is not known
    RaftMessage(sender_term=2**64 - 1, term_notice=TermNotice()),
    messages.term_notice(TOO_HIGH),
    RaftMessage(sender_term=1, vote_request=VoteRequest(term=TOO_HIGH, last_index=99, last_term=99, transfer=True)),
    RaftMessage(sender_term=1, append_entries=AppendEntries(term=TOO_HIGH, previous_index=1)),
    RaftMessage(sender_term=1, snapshot_chunk=SnapshotChunk(term=TOO_HIGH, not_ready=True)),
    RaftMessage(
        sender_term=3, append_entries=AppendEntries(term=3, previous_index=1, entries=[RaftEntry(index=2, term=4)])
    ),
]


@pytest.mark.parametrize("message", IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_what_no_voter_says_changes_nothing(message: RaftMessage) -> None:
    assert messages.flaw(message)
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.settle()
        for node_id in cluster.ids:
            for peer_id in cluster.ids:
                if peer_id != node_id:
                    cluster[node_id].receive(peer_id, message)
        cluster.run(2)
        assert {cluster[node_id].term for node_id in cluster.ids} == {1}
        assert cluster.leader() == 1
        outcomes = cluster.propose(1, b"a")
        cluster.settle()
        assert len(outcomes) == 1


def test_nobody_campaigns_beyond_the_last_term(caplog: pytest.LogCaptureFixture) -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.settle()
        for node_id in cluster.ids:
            cluster[node_id]._consensus.adopt_term(MAX_TERM, ABSTAINED)
        cluster.run(5)
        assert {cluster[node_id].term for node_id in cluster.ids} == {MAX_TERM}
        assert caplog.text.count("the last one there is") == 3, "said once by each"


def test_a_node_that_is_asked_to_campaign_and_reaches_nobody_does_not_spin() -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.propose(1, b"a")
        cluster.settle()
        for peer_id in (1, 3):
            cluster.break_link(2, peer_id)
            cluster.cut.add((2, peer_id))
        cluster[2].receive(1, messages.timeout_now(cluster[1].term))
        cluster.hosts[2].step()
        assert not cluster[2]._consensus.transfer_in_progress
        assert cluster[2].next_deadline_s() > cluster.now
        cluster.run(3)
        assert cluster.leader() == 1


def snapshot_from(cluster: RaftCluster, leader: int, snapshot: Snapshot) -> RaftMessage:
    return messages.snapshot_chunk(cluster[leader].term, 1, 1, encode_snapshot(snapshot), first=True, last=True)


def test_a_snapshot_whose_state_cannot_be_read_is_not_written_down() -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.propose(1, b"a", b"b")
        cluster.settle()
        follower = cluster.hosts[2]
        before, files = list(follower.state.applied), follower.disk.names()
        unreadable = Snapshot(index=50, term=1, previous_term=1, entry=b"\0x", state=b"cut off")
        cluster[2].receive(1, snapshot_from(cluster, 1, unreadable))
        with pytest.raises(CorruptRecordError, match="cut off"):
            cluster.settle()
        assert follower.disk.names() == files
        assert follower.state.applied == before
        cluster.start(2)
        cluster.run(1)
        assert follower.state.commands == [b"a", b"b"]


@pytest.mark.parametrize(
    ("index", "term", "previous_term"),
    [(2**64 - 1, 1, 1), (2**63, 1, 1), (50, 2, 1), (50, 2**64 - 1, 1), (50, 1, 2)],
    ids=["last index", "index", "term after the leader's", "last term", "terms that go back"],
)
def test_a_snapshot_that_no_leader_of_that_term_has_is_refused(index: int, term: int, previous_term: int) -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.propose(1, b"a")
        cluster.settle()
        files = cluster.hosts[2].disk.names()
        impossible = Snapshot(index=index, term=term, previous_term=previous_term, entry=b"\0x", state=b"")
        cluster[2].receive(1, snapshot_from(cluster, 1, impossible))
        cluster.settle()
        assert cluster.hosts[2].disk.names() == files
        assert cluster.hosts[2].state.commands == [b"a"]
