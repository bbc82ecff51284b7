"""What PySyncObj as shipped gets wrong, each as a scenario that this engine must come through.

The planted bugs of the kind "quorum" (docs/reliability-mutations.md) open these holes again and have to be caught.
"""

from __future__ import annotations

import pysyncobj.serializer
import pysyncobj.syncobj
import pysyncobj.tcp_connection
import pytest

from raftlog.errors import CorruptRecordError, InternalError, StorageError, UnsupportedVersion
from raftlog.v1.raft_pb2 import RaftMessage
from raftmeta.raft import messages
from raftmeta.raft.consensus import PickleRefused, RaftOptions
from raftmeta.raft.node import Applied, ProposalOutcome, Unknown
from raftmeta.raft.snapshots import Snapshot, encode_snapshot
from tests.support.raft_cluster import RaftCluster, raft_cluster


def log_of(cluster: RaftCluster, node_id: int) -> list[tuple[int, int]]:
    return [(index, term) for _, index, term in cluster.hosts[node_id].wal[:]]


def answers_to(cluster: RaftCluster, sender: int) -> list[RaftMessage]:
    return [m for a, _, m in cluster.sent if a == sender and m.WhichOneof("body") == "append_answer"]


def test_h1_an_acknowledgement_of_an_older_term_counts_for_nothing() -> None:
    """H1: acknowledgements carry no term, so a leader that was elected again counts old ones for new entries."""
    with raft_cluster(5) as cluster:
        cluster.elect(1)
        cluster.isolate(1, 5)
        old = cluster.propose(1, *[b"old%d" % i for i in range(8)])
        cluster.held.add((5, 1))  # 5 has them; its acknowledgement is on its way, for a long time
        cluster.settle()
        assert log_of(cluster, 5)[-1] == log_of(cluster, 1)[-1]
        late = list(cluster.links[5, 1])
        assert late
        assert cluster.run(5, lambda: cluster.leader(2, 3, 4) is not None)
        cluster.heal()
        cluster.run(1)
        assert old == [Unknown()] * 8
        cluster.elect(1)
        cluster.isolate(1, 4)
        new = cluster.propose(1, b"new0", b"new1", b"new2")
        cluster.settle()
        for message in late:
            cluster[1].receive(5, message)
        cluster.hosts[1].step()
        cluster.settle()
        assert new == [], "entries were committed that only 1 and 4 of five nodes have"
        assert cluster[1].peers()[5].match_index < cluster[1].last_index


def test_h2_a_snapshot_chunk_commits_nothing() -> None:
    """H2: a snapshot chunk's commit index commits any tail that the follower has."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.isolate(1)
        outcomes = cluster.propose(1, *[b"lost%d" % i for i in range(5)])
        chunk = messages.snapshot_chunk(cluster[1].term + 1, 100, 1, b"part", first=True)
        before = cluster[1].commit_index
        cluster[1].receive(2, chunk)
        cluster.hosts[1].step()
        assert cluster[1].commit_index == before
        assert outcomes == [Unknown()] * 5
        assert cluster.hosts[1].state.commands == []


def test_h2_a_heartbeat_commits_only_what_was_compared() -> None:
    """H2, without a snapshot: a heartbeat that agrees about an old entry says nothing about the tail behind it."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.isolate(1)
        agreed, term = log_of(cluster, 1)[-1]
        cluster.propose(1, *[b"lost%d" % i for i in range(5)])
        cluster[1].receive(2, messages.append_entries(term + 1, agreed + 5, agreed, term, []))
        cluster.hosts[1].step()
        assert cluster[1].last_index == agreed + 5
        assert cluster[1].commit_index == agreed
        assert cluster.hosts[1].state.commands == []


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_h3_a_snapshot_that_does_not_parse_is_not_acknowledged(damage: str) -> None:
    """H3: a snapshot that cannot be loaded is nevertheless acknowledged, for the old log."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.isolate(1)
        cluster.propose(1, *[b"tail%d" % i for i in range(50)])
        data = bytearray(encode_snapshot(Snapshot(40, 2, 2, b"\x00x", b"state")))
        if damage == "flip":
            data[60] ^= 1
        else:
            del data[-5:]
        cluster.sent.clear()
        term = cluster[1].term + 1
        cluster[1].receive(2, messages.snapshot_chunk(term, 40, 1, bytes(data), first=True, last=True))
        cluster.hosts[1].step()
        cluster.settle()
        found = answers_to(cluster, 1)
        assert found
        assert not any(message.append_answer.success for message in found)
        assert all(message.append_answer.reset for message in found)
        assert cluster[1].snapshot_index == 0
        assert cluster[1].fatal is None


def test_h3_a_snapshot_whose_state_does_not_parse_stops_the_node() -> None:
    """H3, the other half: the checksum is right and the state machine cannot read it."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.isolate(1)
        cluster.sent.clear()
        data = encode_snapshot(Snapshot(40, 2, 2, b"\x00x", b"not what encode makes"))
        cluster[1].receive(2, messages.snapshot_chunk(cluster[1].term + 1, 40, 1, data, first=True, last=True))
        with pytest.raises(CorruptRecordError, match="cut off"):
            for _ in range(3):
                cluster.hosts[1].step()
        assert not any(message.append_answer.success for message in answers_to(cluster, 1))


def test_h4_entries_sent_again_truncate_nothing() -> None:
    """H4: a repeated, older AppendEntries cuts off entries that were acknowledged since."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        for i in range(20):
            cluster.propose(1, b"%d" % i)
            cluster.settle()
        before = log_of(cluster, 2)
        data, index, term = cluster.hosts[1].wal.entry(5)
        previous = cluster.hosts[1].wal.term_at(4)
        assert previous is not None
        cluster.sent.clear()
        again = messages.append_entries(cluster[1].term, 1, 4, previous, [(data, index, term)])
        cluster[2].receive(1, again)
        cluster.hosts[2].step()
        assert log_of(cluster, 2) == before
        assert answers_to(cluster, 2)[-1].append_answer.success


def test_h4_committed_entries_are_never_truncated() -> None:
    """H4: no message may remove entries at or below the commit index."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        for i in range(5):
            cluster.propose(1, b"%d" % i)
            cluster.settle()
        cluster.run(0.3)
        term = cluster[2].term + 1
        bad = messages.append_entries(term, 1, 4, log_of(cluster, 2)[3][1], [(b"\x00other", 5, term)])
        cluster[2].receive(3, bad)
        with pytest.raises(InternalError, match="committed entry 5"):
            cluster.hosts[2].step()


def test_h4b_pipelined_entries_are_sent_once() -> None:
    """H4b: every acknowledgement rewinds what is sent next, so that everything under way is sent again."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.run(0.3)
        cluster.sent.clear()
        outcomes: list[ProposalOutcome] = []
        for i in range(200):
            cluster[1].propose(b"%d" % i, outcomes.append)
            cluster.hosts[1].step()
            if i % 5 == 4:  # answers come late and one by one
                for link in ((1, 2), (2, 1)):
                    if cluster.links[link]:
                        cluster[link[1]].receive(link[0], cluster.links[link].popleft())
                cluster.hosts[2].step()
        cluster.settle()
        entries = [
            entry.index
            for _, receiver, message in cluster.sent
            if receiver == 2 and message.WhichOneof("body") == "append_entries"
            for entry in message.append_entries.entries
        ]
        assert len(outcomes) == 200
        assert len(entries) == len(set(entries)) == 200


def test_h4c_a_log_never_gets_shorter_than_what_it_acknowledged() -> None:
    """H4c: with nothing but latency a follower's log shrinks below what it has acknowledged."""
    with raft_cluster(options=RaftOptions(commit_notice_s=0, batch_bytes=4096)) as cluster:
        cluster.elect(1)
        cluster.isolate(3)
        acknowledged = 0
        for i in range(400):
            cluster[1].propose(bytes(300), lambda outcome: None)
            cluster.hosts[1].step()
            if i % 80 == 79:
                link = cluster.links[1, 2]
                for at in range(len(link) // 2 + 1):
                    if at % 4 == 0:
                        cluster.deliver({(2, 1)})
                        cluster.hosts[1].step()
                    if link:
                        cluster[2].receive(1, link.popleft())
                        cluster.hosts[2].step()
                    for message in answers_to(cluster, 2):
                        if message.append_answer.success:
                            acknowledged = max(acknowledged, message.append_answer.next_index - 1)
                    cluster.sent.clear()
                    assert cluster[2].last_index >= acknowledged
        assert acknowledged > 100


def test_h5_a_crash_after_a_snapshot_became_durable_keeps_the_tail() -> None:
    """H5: a crash between the snapshot's rename and the log's trim removes entries that were acknowledged since."""
    with raft_cluster(options=RaftOptions(commit_notice_s=0, snapshot_after_entries=10, log_tail_entries=2)) as cluster:
        cluster.elect(1)
        cluster.run_off_loop = lambda work, done: work()  # the process dies before it hears that it is done
        for host in cluster.hosts.values():
            host.node._snapshotter._run_off_loop = cluster.run_off_loop
        for i in range(30):
            cluster.propose(1, b"%d" % i)
            cluster.settle()
        assert any(name.startswith("raft-snapshot") for name in cluster.hosts[2].disk.names())
        before = cluster[2].last_index
        cluster.kill(1)
        cluster.kill(2)
        cluster.start(2)
        assert cluster[2].last_index == before
        assert cluster[2].last_applied > 1


def test_h6_no_commit_index_outlives_the_process() -> None:
    """H6: a commit index on disk that is ahead of the log lets a leader that is cut off acknowledge alone."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        for i in range(30):
            cluster.propose(1, b"%d" % i)
        cluster.settle()
        cluster.run(0.3)
        for node_id in cluster.ids:
            cluster.kill(node_id)
        cluster.start()
        assert cluster[1].commit_index == 1
        cluster.elect(1)
        cluster.isolate(1)
        outcomes = cluster.propose(1, b"phantom")
        for _ in range(3):
            cluster.hosts[1].step()
        assert outcomes == []


def test_h7_a_damaged_log_is_refused_and_term_and_vote_survive() -> None:
    """H7: the journal has no checksum, and an empty meta file silently forgets term and vote."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        for i in range(30):
            cluster.propose(1, b"%d" % i)
            cluster.settle()
        host = cluster.hosts[2]
        term, vote = host.wal.getCurrentTerm(), host.wal.getVotedForNodeId()
        assert (term, vote) == (1, 1)
        cluster.kill(2)
        (name,) = [name for name in host.disk.names() if name.startswith("wal-")]
        whole = host.disk.read(name)
        damaged = bytearray(whole)
        damaged[200] ^= 1
        host.disk.put(name, bytes(damaged))
        with pytest.raises(CorruptRecordError, match="damaged at byte"):
            host.start()
        host.disk.close()
        host.disk.put(name, whole)
        host.start()
        assert (host.wal.getCurrentTerm(), host.wal.getVotedForNodeId()) == (term, vote)


def test_h8_a_failing_apply_stops_the_node_at_once() -> None:
    """H8: an exception in apply is retried at every tick, with its effects, and the log is stuck."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.hosts[1].state.fail_on = b"boom"
        outcomes = cluster.propose(1, b"boom", b"next")
        with pytest.raises(InternalError, match="cannot apply"):
            cluster.settle()
        host = cluster.hosts[1]
        assert host.node.last_applied < host.node.commit_index
        assert host.state.commands == []
        assert outcomes == []
        with pytest.raises(InternalError):
            host.node.cycle()


def test_h9_nothing_is_pickled() -> None:
    """H9: PySyncObj unpickles all bytes that reach its port; here the port is never opened, and pickle refuses."""
    for module in (pysyncobj.syncobj, pysyncobj.serializer, pysyncobj.tcp_connection):
        for name in ("load", "loads", "dump", "dumps", "to_bytes"):
            with pytest.raises(PickleRefused):
                getattr(module.pickle, name)(b"")


def test_h10_voters_do_not_change() -> None:
    """H10: PySyncObj takes on several membership changes at once; here a membership entry is refused by all."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        wal = cluster.hosts[1].wal
        wal.add(b"\x02whatever", wal.last_index + 1, cluster[1].term)
        with pytest.raises(UnsupportedVersion, match="unknown kind 2"):
            cluster.hosts[1].step()
            cluster.settle()


def test_h12_an_entry_of_an_unknown_kind_stops_the_node_before_it_counts_as_applied() -> None:
    """H12: an unsupported VERSION entry is skipped without counting, so that later entries are applied repeatedly."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        wal = cluster.hosts[1].wal
        wal.add(b"\x03", wal.last_index + 1, cluster[1].term)
        at = wal.last_index
        with pytest.raises(UnsupportedVersion, match=f"entry {at} is of the unknown kind 3"):
            cluster.hosts[1].step()
            cluster.settle()
        assert cluster[1].last_applied == at - 1
        assert cluster.hosts[1].state.commands == []


def test_an_io_error_of_the_log_stops_the_node_without_an_acknowledgement() -> None:
    """No fsync, no promise: after EIO the kernel may have dropped the pages, so a retry would lie."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.hosts[2].disk.fail("sync", 5)
        cluster.sent.clear()
        cluster.propose(1, b"x")
        with pytest.raises(StorageError):
            cluster.settle()
        assert answers_to(cluster, 2) == []


def test_power_loss_of_a_leader_before_its_sync_loses_nothing_acknowledged() -> None:
    """A leader's own copy counts once it is durable: one follower and an unsynced leader are no majority."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.isolate(3)
        cluster.hold_syncs = True
        outcomes = cluster.propose(1, b"x")
        cluster.deliver({(1, 2)})
        cluster.hold_syncs = False
        cluster.hosts[2].step()
        cluster.hold_syncs = True
        cluster.deliver({(2, 1)})
        for _ in range(3):
            cluster.hosts[1].step()
        assert outcomes == []
        assert cluster[1].commit_index < cluster[1].last_index
        cluster.hosts[1].wal.sync()
        cluster.hosts[1].step()
        assert [type(outcome) for outcome in outcomes] == [Applied]


def test_a_chunk_out_of_sequence_begins_the_snapshot_anew() -> None:
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.isolate(1)
        term = cluster[1].term + 1
        cluster.sent.clear()
        cluster[1].receive(2, messages.snapshot_chunk(term, 9, 1, b"a", first=True))
        cluster[1].receive(2, messages.snapshot_chunk(term, 9, 3, b"c", last=True))
        cluster.hosts[1].step()
        first, second = [message.append_answer for message in answers_to(cluster, 1)]
        assert (first.chunk, first.reset, first.success) == (1, False, False)
        assert (second.chunk, second.reset, second.success) == (3, True, False)
