"""Nodes in a small cluster: electing, committing, reading, handing over, stopping; hostile messages."""

from __future__ import annotations

import errno
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import CorruptRecordError, InternalError, MessageTooLarge, NotController, StorageError, StorageFull
from raftlog.v1.raft_pb2 import (
    FRESH,
    JOINING,
    VIRGIN,
    VOTER,
    AppendEntries,
    RaftEntry,
    RaftMessage,
    SnapshotChunk,
    TermNotice,
    VoteRequest,
)
from raftmeta.raft import messages
from raftmeta.raft.consensus import RaftOptions
from raftmeta.raft.messages import MAX_TERM
from raftmeta.raft.node import Applied, ProposalOutcome, Unknown
from raftmeta.raft.ports import Work, WorkDone
from raftmeta.raft.snapshots import Snapshot, encode_snapshot
from raftmeta.raft.wal import ABSTAINED, Entry
from tests.support.metadata_disk import MemoryDisk
from tests.support.raft_cluster import RaftCluster, raft_cluster


def test_one_voter_elects_itself_and_commits_after_its_own_sync() -> None:
    with raft_cluster(1) as cluster:
        host = cluster.hosts[1]
        cluster.hold_syncs = True
        for _ in range(3):
            host.step()
        assert host.node.role == "leader"
        assert cluster.leader() is None, "an only voter must not lead before its own disk has the entry"
        host.wal.sync()
        assert host.node.wants_cycle
        host.step()
        assert cluster.leader() == 1
        outcomes = cluster.propose(1, b"one")
        host.step()
        assert outcomes == []
        host.wal.sync()
        host.step()
        assert outcomes == [Applied(3, 1, b"one")]
        assert host.events.told == ["active 1"]


def test_three_fresh_voters_form_a_quorum_and_commit() -> None:
    with raft_cluster() as cluster:
        assert cluster.run(5, lambda: cluster.leader() is not None)
        leader = cluster.leader()
        assert leader is not None
        outcomes = cluster.propose(leader, b"a", b"b")
        cluster.settle()
        assert [type(outcome) for outcome in outcomes] == [Applied, Applied]
        assert [cluster.hosts[i].state.commands for i in cluster.ids] == [[b"a", b"b"]] * 3
        assert {cluster[i].leader_id for i in cluster.ids} == {leader}


def test_a_new_quorum_waits_for_no_leader_but_a_restarted_one_does() -> None:
    options = RaftOptions(first_election_s=(0.01, 0.05))
    with raft_cluster(options=options) as cluster:
        assert cluster.run(5, lambda: all(cluster[i].voter_state == VOTER for i in cluster.ids))
        assert cluster.run(0.1, lambda: cluster.leader() is not None), "all voters are new: none of them leads"
        for node_id in cluster.ids:
            cluster.kill(node_id)
        for node_id in cluster.ids:
            cluster.start(node_id)
        began = cluster.now
        assert cluster.run(5, lambda: cluster.leader() is not None)
        assert cluster.now - began > options.election_timeout_s[0] / 2, "there may be a leader that has not spoken yet"


def test_a_killed_leader_is_replaced_and_nothing_is_lost() -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.propose(1, b"kept")
        cluster.settle()
        cluster.kill(1)
        began = cluster.now
        assert cluster.run(5, lambda: cluster.leader(2, 3) is not None)
        assert cluster.now - began < 0.3, "a broken stream must start the election at once"
        leader = cluster.leader(2, 3)
        assert leader is not None
        assert cluster.hosts[leader].state.commands == [b"kept"]
        cluster.start(1)
        cluster.run(1)
        assert cluster.hosts[1].state.commands == [b"kept"]


def test_a_deposed_leader_tells_its_proposers_that_the_outcome_is_unknown() -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.isolate(1)
        outcomes = cluster.propose(1, b"lost")
        assert cluster.run(3, lambda: not cluster[1].active)
        assert outcomes == [Unknown()]
        assert cluster.hosts[1].events.told == ["active 1", "inactive"]
        with pytest.raises(NotController):
            cluster[1].propose(b"x", outcomes.append)


def test_reads_wait_for_a_majority_that_still_follows() -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.propose(1, b"a")
        cluster.settle()
        found: list[int | None] = []
        cluster[1].read_index(found.append)
        cluster.hosts[1].step()
        assert found == []
        cluster.settle()
        assert found == [cluster[1].last_applied]
        cluster.isolate(1)
        cluster[1].read_index(found.append)
        cluster.run(3)
        assert found[1:] == [None]
        cluster[2].read_index(found.append)


def test_leadership_is_handed_over_without_a_timeout() -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.propose(1, b"a")
        assert cluster[1].transfer_leadership()
        with pytest.raises(NotController):
            cluster[1].propose(b"b", lambda outcome: None)
        began = cluster.now
        assert cluster.run(1, lambda: cluster.leader() not in (None, 1))
        assert cluster.now - began < 0.2
        assert cluster.hosts[2].state.commands == [b"a"]


def test_too_large_commands_are_refused_and_the_largest_ones_are_carried() -> None:
    with raft_cluster(options=RaftOptions(commit_notice_s=0, max_command_bytes=3000, batch_bytes=1000)) as cluster:
        cluster.elect(1)
        with pytest.raises(MessageTooLarge, match="3001"):
            cluster[1].propose(bytes(3001), lambda outcome: None)
        outcomes = cluster.propose(1, *[bytes([i]) * 3000 for i in range(20)])
        cluster.settle()
        assert len(outcomes) == 20
        cluster.run(0.5)
        assert all(len(cluster.hosts[i].state.commands) == 20 for i in cluster.ids)


def test_a_follower_too_far_behind_gets_a_snapshot_and_what_follows() -> None:
    options = RaftOptions(commit_notice_s=0, snapshot_after_entries=20, log_tail_entries=5, snapshot_chunk_bytes=64)
    with raft_cluster(options=options) as cluster:
        cluster.elect(1)
        cluster.isolate(3)
        outcomes: list[ProposalOutcome] = []
        for i in range(100):
            outcomes += cluster.propose(1, b"command %d" % i)
            cluster.settle()
        assert cluster[1].snapshot_index > 80
        assert cluster[1].first_index > 70
        cluster.heal()
        cluster.run(3)
        assert cluster.hosts[3].state.commands == cluster.hosts[1].state.commands
        assert cluster[3].snapshot_index > 80
        cluster.kill(3)
        cluster.start(3)
        cluster.run(1)
        assert cluster.hosts[3].state.commands == cluster.hosts[1].state.commands


def test_all_killed_at_once_come_back_with_everything() -> None:
    options = RaftOptions(commit_notice_s=0, snapshot_after_entries=20, log_tail_entries=5)
    with raft_cluster(options=options) as cluster:
        cluster.elect(2)
        for i in range(50):
            cluster.propose(2, b"%d" % i)
            cluster.settle()
        for node_id in cluster.ids:
            cluster.kill(node_id)
        cluster.start()
        assert cluster.run(5, lambda: cluster.leader() is not None)
        cluster.run(0.5)
        expected = [b"%d" % i for i in range(50)]
        assert [cluster.hosts[i].state.commands for i in cluster.ids] == [expected] * 3


# Elections


def test_a_node_that_was_cut_off_deposes_nobody_when_it_comes_back() -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        term = cluster[1].term
        cluster.isolate(3)
        cluster.run(10)
        assert cluster[3].term == term, "the term must not rise, as the isolated node gets no answers to its pre-votes"
        cluster.heal()
        cluster.run(2)
        assert (cluster.leader(), cluster[1].term) == (1, term)


def test_followers_of_a_living_leader_vote_for_nobody_else() -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.run(0.2)
        term = cluster[1].term
        for transfer in (False, True):
            cluster.sent.clear()
            request = messages.vote_request(term + 1, 100, term, transfer=transfer)
            cluster[2].receive(3, request)
            cluster.hosts[2].step()
            granted = [m for a, _, m in cluster.sent if a == 2 and m.WhichOneof("body") == "vote_granted"]
            assert len(granted) == int(transfer)


def test_a_vote_counts_once_for_each_voter() -> None:
    with raft_cluster(5) as cluster:
        cluster.elect(1)
        cluster.held = {link for link in cluster.links if 2 in link}
        node = cluster[2]
        node._consensus.election_deadline_s = cluster.now - 1
        node._elections._elected_beforehand = True
        cluster.hosts[2].step()
        roles = [str(node.role)]
        for votes in ([3, 3, 3, 3], [3], [4]):
            for voter in votes:
                node.receive(voter, messages.vote_granted(node.term))
            cluster.hosts[2].step()
            roles.append(node.role)
        assert roles == ["candidate", "candidate", "candidate", "leader"]


def test_votes_and_acknowledgements_wait_for_the_sync() -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.run(0.2)
        cluster.hold_syncs = True
        term = cluster[1].term
        cluster[2].receive(3, messages.vote_request(term + 1, 100, term, transfer=True))
        cluster[2].cycle()
        assert cluster[2].take_immediate() == []
        cluster[2].receive(3, messages.read_probe(term + 1, 1))
        cluster[2].cycle()
        assert cluster[2].take_immediate() == [], "no message may show a term that is not durable"
        kinds = [message.WhichOneof("body") for _, message in cluster[2].take_durable()]
        assert kinds == ["vote_granted", "read_answer"]


# A full disk


def fill(cluster: RaftCluster, node_id: int) -> None:
    host = cluster.hosts[node_id]
    host.disk.free_bytes = 0
    host.wal._allocated = 0


def test_a_leader_without_room_refuses_proposals_and_hands_leadership_over() -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.run(0.3)
        fill(cluster, 1)
        with pytest.raises(StorageFull, match="make room"):
            cluster[1].propose(b"x", lambda outcome: None)
        assert cluster.run(3, lambda: cluster.leader() in (2, 3))
        leader = cluster.leader()
        assert leader is not None
        outcomes = cluster.propose(leader, b"goes on")
        cluster.settle()
        assert [type(outcome) for outcome in outcomes] == [Applied]


def test_a_follower_without_room_acknowledges_nothing_and_does_not_campaign() -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.isolate(3)
        fill(cluster, 2)
        outcomes = cluster.propose(1, b"x")
        cluster.settle()
        assert outcomes == []
        assert cluster[2].fatal is None
        cluster.kill(1)
        cluster.run(5)
        assert cluster[2].role == "follower"
        cluster.start(1)
        cluster.hosts[2].disk.free_bytes = None
        cluster.heal()
        assert cluster.run(5, lambda: cluster.leader() is not None)


def test_a_node_that_does_not_campaign_for_want_of_room_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.isolate(2)
        cluster.run(5)
        assert "cannot campaign" not in caplog.text
        fill(cluster, 2)
        cluster.run(5)
        assert caplog.text.count("cannot campaign") == 1, "many elections were due, and one line is enough"


def test_one_voter_refuses_without_room_and_goes_on_when_there_is_some() -> None:
    with raft_cluster(1) as cluster:
        cluster.run(0.5)
        fill(cluster, 1)
        with pytest.raises(StorageFull):
            cluster[1].propose(b"x", lambda outcome: None)
        cluster.hosts[1].disk.free_bytes = 50 << 20
        outcomes = cluster.propose(1, b"x")
        cluster.settle()
        assert [type(outcome) for outcome in outcomes] == [Applied]


def test_no_space_for_a_snapshot_is_no_reason_to_stop() -> None:
    with raft_cluster(
        1, RaftOptions(commit_notice_s=0, snapshot_after_entries=10, snapshot_after_bytes=2000)
    ) as cluster:
        cluster.run(0.5)
        cluster.hosts[1].disk.fail("write", errno.ENOSPC)
        for i in range(40):
            cluster.propose(1, b"%d" % i + bytes(50))
            cluster.settle()
        assert cluster[1].fatal is None
        assert cluster[1].snapshot_index > 20


def test_what_was_left_of_a_snapshot_is_removed_at_the_start() -> None:
    with raft_cluster(1, start=False) as cluster:
        cluster.hosts[1].disk.put("raft-snapshot-00000000000000000010.tmp", b"half of it")
        cluster.start()
        cluster.run(0.5)
        assert sorted(cluster.hosts[1].disk.names()) == ["meta.properties", "wal-00000000000000000001"]


def test_an_io_error_in_a_snapshot_stops_the_node() -> None:
    with raft_cluster(1, RaftOptions(commit_notice_s=0, snapshot_after_entries=10)) as cluster:
        cluster.run(0.5)
        cluster.hosts[1].disk.fail("rename", errno.EIO)
        with pytest.raises(StorageError, match="snapshot"):
            for i in range(20):
                cluster.propose(1, b"%d" % i)
                cluster.settle()


def test_snapshots_off_the_loop_hold_up_nobody() -> None:
    with raft_cluster(options=RaftOptions(commit_notice_s=0, snapshot_after_entries=10, log_tail_entries=2)) as cluster:
        work_left: list[tuple[Work, WorkDone]] = []
        for host in cluster.hosts.values():
            host.node._snapshotter._run_off_loop = lambda work, done: work_left.append((work, done))
        cluster.elect(1)
        for i in range(30):
            cluster.propose(1, b"%d" % i)
            cluster.settle()
        assert cluster[1].snapshot_index == 0
        assert len(work_left) == 3
        for work, done in work_left:
            work()
            done(None)
        assert 10 <= cluster[1].snapshot_index < 20
        assert len(cluster.hosts[1].state.commands) == 30


def test_status_and_hello() -> None:
    with raft_cluster() as cluster:
        assert {cluster[i].voter_state for i in cluster.ids} <= {FRESH, VIRGIN}
        cluster.elect(1)
        hello = cluster[1].hello(2)
        assert (hello.node_id, hello.peer_id, list(hello.voters), hello.voter_state) == (1, 2, [1, 2, 3], VOTER)
        assert hello.current_term == cluster[1].term
        peers = cluster[1].peers()
        assert sorted(peers) == [2, 3]
        assert peers[2].connected
        assert peers[2].match_index == cluster[1].last_index
        assert peers[2].last_contact_s == 0
        assert cluster[1].next_deadline_s() > cluster.now
        assert not cluster[1].in_flight


def test_peers_hear_of_a_new_state_even_if_the_link_was_down_meanwhile() -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.kill(3)
        cluster.hosts[3].disk = MemoryDisk()
        cluster.start(3)
        cluster.break_link(3, 2)
        cluster.cut.add((3, 2))
        assert cluster.run(5, lambda: cluster[3].voter_state == VOTER)
        cluster.run(1)
        assert cluster[1].peers()[3].state == VOTER
        hello = cluster[3].hello(2)
        hello.voter_state = JOINING  # it was made before, and arrives now
        cluster[2].hello_from(3, hello)
        assert cluster[2].peers()[3].state == JOINING
        cluster.links[3, 2] = deque()
        cluster[3].link_up(2, cluster[2].hello(3))
        cluster.run(1)
        assert cluster[2].peers()[3].state == VOTER


def test_a_hello_from_before_a_node_became_a_voter_does_not_undo_that() -> None:
    """Two streams join two nodes. The hello of the second can be older than the notice that came on the first."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.kill(3)
        cluster.hosts[3].disk = MemoryDisk()
        cluster.start(3)
        assert cluster.run(5, lambda: cluster[1].peers()[3].state == VOTER)
        late = cluster[3].hello(1)
        late.voter_state = JOINING
        cluster[1].link_up(3, late)
        assert cluster[1].peers()[3].state == VOTER
        late.incarnation += 1  # another process, on an empty disk
        cluster[1].hello_from(3, late)
        assert cluster[1].peers()[3].state == JOINING


def test_a_late_hello_does_not_undo_that_a_node_is_a_voter_of_a_new_quorum() -> None:
    """Such a voter, without a vote and entries yet, says VIRGIN; its hello may have been made while it was FRESH."""
    with raft_cluster() as cluster:
        hello = cluster[3].hello(1)
        hello.incarnation += 1  # a process that has just begun
        for said, known in ((FRESH, FRESH), (VIRGIN, VIRGIN), (FRESH, VIRGIN), (VOTER, VOTER), (VIRGIN, VOTER)):
            hello.voter_state = said
            cluster[1].hello_from(3, hello)
            assert cluster[1].peers()[3].state == known


def test_a_node_that_has_started_again_still_refuses_to_replace_what_was_committed() -> None:
    """It does not know the commit index again yet; what its log was told of it is enough to notice such a leader."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        for i in range(5):
            cluster.propose(1, b"%d" % i)
            cluster.settle()
        cluster.run(0.3)
        term = cluster[2].term + 1
        cluster.kill(2)
        cluster.isolate(2)
        cluster.start(2)
        follower = cluster.hosts[2]
        assert cluster[2].commit_index == 1 < 5 <= follower.wal.known_committed < cluster[2].last_index
        before = follower.wal.entry(4)
        cluster[2].receive(3, messages.append_entries(term, 1, 4, before[2], [(b"\x00other", 5, term)]))
        with pytest.raises(InternalError, match="would replace the committed entry 5"):
            follower.step()
        assert follower.wal.entry(5)[0] != b"\x00other"


def test_a_snapshot_that_contradicts_what_is_committed_stops_the_node() -> None:
    options = RaftOptions(commit_notice_s=0, snapshot_after_entries=10, log_tail_entries=5)
    with raft_cluster(options=options) as cluster:
        cluster.elect(1)
        for i in range(8):
            cluster.propose(1, b"%d" % i)
            cluster.settle()
        cluster.run(0.3)
        term = cluster[2].term + 1
        other = encode_snapshot(Snapshot(5, term, term, b"\x00other", b""))
        cluster[2].receive(3, messages.snapshot_chunk(term, 5, 1, other, first=True, last=True))
        with pytest.raises(InternalError, match="disagrees about the committed entry 5"):
            for _ in range(3):
                cluster.hosts[2].step()
        assert cluster.hosts[2].node.fatal is not None


def test_a_commit_index_waits_a_moment_for_an_entry_to_travel_with() -> None:
    with raft_cluster(options=RaftOptions(commit_notice_s=0.002)) as cluster:
        assert cluster.run(5, lambda: cluster.leader() is not None)
        leader = cluster.leader()
        assert leader is not None
        cluster.run(0.2)
        followers = [cluster.hosts[i] for i in cluster.ids if i != leader]
        cluster.propose(leader, b"a")
        cluster.settle()
        assert cluster.hosts[leader].state.commands == [b"a"]
        assert [host.state.commands for host in followers] == [[], []]
        cluster.run(0.004)
        assert [host.state.commands for host in followers] == [[b"a"], [b"a"]]


def test_a_leader_that_is_not_heard_any_more_is_not_named() -> None:
    with raft_cluster() as cluster:
        assert cluster.run(5, lambda: cluster.leader() is not None)
        leader = cluster.leader()
        assert leader is not None
        alone, other = (node_id for node_id in cluster.ids if node_id != leader)
        cluster.run(0.3)
        assert cluster[alone].leader_id == leader
        cluster.kill(leader)
        cluster.kill(other)
        cluster.run(2.0)
        assert cluster[alone].role != "leader"
        assert cluster[alone].leader_id == -1, (
            "the node must know no leader, as the last one is gone and no majority can elect another"
        )


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
        assert caplog.text.count("the last one there is") == 3, (
            "each of three nodes must log once that the terms are used up"
        )


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


NUMBERS = st.integers(0, 2**63)


def carried(message: RaftMessage) -> RaftMessage:
    return RaftMessage.FromString(message.SerializeToString())


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.lists(st.tuples(st.binary(), NUMBERS, NUMBERS), max_size=5))
def test_entries_travel_as_they_were(
    term: int, commit: int, previous: int, previous_term: int, entries: list[Entry]
) -> None:
    message = carried(messages.append_entries(term, commit, previous, previous_term, entries))
    body = message.append_entries
    assert message.WhichOneof("body") == "append_entries"
    assert (message.sender_term, body.term, body.commit_index) == (term, term, commit)
    assert (body.previous_index, body.previous_term) == (previous, previous_term)
    assert messages.entries_of(body) == entries


@given(NUMBERS, NUMBERS, st.booleans(), st.booleans(), st.none() | st.integers(0, 2**32 - 1))
def test_answers_travel_as_they_were(term: int, next_index: int, success: bool, reset: bool, chunk: int | None) -> None:
    message = carried(messages.append_answer(term, next_index, success=success, reset=reset, chunk=chunk))
    body = message.append_answer
    assert (message.sender_term, body.next_index, body.success, body.reset) == (term, next_index, success, reset)
    assert (body.chunk if body.HasField("chunk") else None) == chunk


@given(NUMBERS, NUMBERS, st.integers(0, 2**32 - 1), st.binary(), st.booleans(), st.booleans())
def test_chunks_travel_as_they_were(
    term: int, commit: int, sequence: int, data: bytes, first: bool, last: bool
) -> None:
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
