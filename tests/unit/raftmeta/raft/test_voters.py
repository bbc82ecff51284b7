"""`meta.properties`, and the guard against a voter that lost its data."""

from __future__ import annotations

import errno
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftlog.errors import (
    CorruptRecordError,
    InconsistentClusterId,
    InconsistentVoters,
    InvalidConfig,
    RaftlogError,
    StorageError,
    StorageFull,
    UnsupportedVersion,
)
from raftlog.v1.raft_pb2 import FRESH, JOINING, VIRGIN, VOTER
from raftmeta.raft.consensus import RaftOptions
from raftmeta.raft.voters import PROPERTIES_NAME, JoinGuard, MetadataDirectory, VoterStateValue, parse_properties
from raftmeta.raft.wal import ABSTAINED, WriteAheadLog
from tests.support.fresh import examples
from tests.support.metadata_disk import MemoryDisk, everything_survives, nothing_survives
from tests.support.raft_cluster import raft_cluster

ID = uuid.UUID(int=5)


def opened(
    disk: MemoryDisk, node_id: int = 1, cluster_id: str = "c", voters: tuple[int, ...] = (3, 1, 2)
) -> MetadataDirectory:
    return MetadataDirectory.open(disk, node_id, cluster_id, voters, lambda: ID)


def formatted(state: VoterStateValue = VOTER) -> MemoryDisk:
    disk = MemoryDisk()
    directory = opened(disk)
    become(directory, state)
    directory.close()
    return disk


def become(directory: MetadataDirectory, state: VoterStateValue) -> None:
    wal = WriteAheadLog(directory.disk, directory.directory_id)
    wal.open()
    wal.begin()
    directory.become(state)


def test_a_fresh_directory_is_formatted_once_asked_to() -> None:
    disk = MemoryDisk()
    directory = opened(disk)
    assert directory.state == FRESH
    assert disk.names() == []
    become(directory, JOINING)
    directory.become(VOTER)
    directory.close()
    again = MetadataDirectory.open(disk.survivor(nothing_survives), 1, "c", [1, 2, 3])
    assert (again.state, again.directory_id, again.voters, again.node_id) == (VOTER, ID, (1, 2, 3), 1)


def test_golden_properties() -> None:
    assert formatted(JOINING).read(PROPERTIES_NAME).decode() == (
        "format.version=1\ncluster.id=c\nnode.id=1\n"
        "directory.id=00000000-0000-0000-0000-000000000005\nvoters=1,2,3\nvoter.state=JOINING\n"
    )


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (InvalidConfig, "node.id=2, but .* belongs to node 1", {"node_id": 2}),
        (InconsistentClusterId, "cluster.id=d, but .* says c", {"cluster_id": "d"}),
        (InconsistentVoters, "raftlog quorum set-voters", {"voters": (1, 2, 4)}),
    ],
)
def test_a_directory_of_somebody_else_is_refused_and_unlocked(
    error: type[RaftlogError], match: str, arguments: dict[str, object]
) -> None:
    disk = formatted()
    with pytest.raises(error, match=match):
        opened(disk, **arguments)  # type: ignore[arg-type] # of mixed types
    opened(disk)


def test_a_directory_has_one_user_at_a_time() -> None:
    disk = formatted()
    opened(disk)
    with pytest.raises(StorageError, match="in use by another process"):
        opened(disk)


@pytest.mark.parametrize("name", ["wal-00000000000000000001", "raft-snapshot-00000000000000000002"])
def test_metadata_without_properties_is_damage(name: str) -> None:
    disk = MemoryDisk()
    disk.put(name, b"x")
    with pytest.raises(CorruptRecordError, match=r"meta\.properties is missing|damaged"):
        opened(disk)


def test_the_metadata_of_a_version_without_a_quorum_is_not_touched() -> None:
    disk = MemoryDisk()
    disk.put("format", b"format.version=1\nnode.id=1\n")
    with pytest.raises(InvalidConfig, match="without a quorum"):
        opened(disk)
    assert disk.names() == ["format"]


def test_a_newer_format_is_refused() -> None:
    disk = formatted()
    disk.put(PROPERTIES_NAME, disk.read(PROPERTIES_NAME).replace(b"version=1", b"version=2"))
    with pytest.raises(UnsupportedVersion, match="says format 2"):
        opened(disk)


@given(st.binary(max_size=200) | st.text(alphabet="format.version=1\nclusterid", max_size=100).map(str.encode))
def test_arbitrary_properties_are_refused_with_an_error_of_ours(data: bytes) -> None:
    with pytest.raises((CorruptRecordError, UnsupportedVersion)):
        parse_properties(data, "here")


def test_a_crash_while_formatting_leaves_fresh_or_formatted() -> None:
    whole = formatted()
    for survival in (nothing_survives, everything_survives):
        for power_off_at in range(whole.operations):
            disk = MemoryDisk(power_off_at)
            directory = opened(disk)
            with pytest.raises(StorageError):
                become(directory, VOTER)
            left = disk.survivor(survival)
            again = opened(left)
            assert again.state in (FRESH, VOTER)
            become(again, VOTER)
            again.close()
            assert opened(left.survivor(nothing_survives)).state == VOTER


def test_a_formatted_directory_without_its_log_is_damage() -> None:
    """A voter that lost its log has forgotten its vote: it must not start as if nothing had happened."""
    for state in (VOTER, JOINING):
        disk = formatted(state)
        for name in disk.names():
            if name.startswith("wal-"):
                disk.remove(name)
        with pytest.raises(CorruptRecordError, match=r"log \(wal-\*\) is missing.*empty it, so that the node joins"):
            opened(disk)
        assert disk.names() == [PROPERTIES_NAME]
        assert not disk.locked


def test_a_log_that_holds_nothing_without_properties_is_a_format_that_was_interrupted() -> None:
    disk = MemoryDisk()
    wal = WriteAheadLog(disk, ID)
    wal.begin()
    directory = MetadataDirectory.open(disk, 1, "c", [1, 2, 3])
    assert (directory.state, directory.directory_id) == (FRESH, ID)
    directory.close()
    wal.setCurrentTerm(1, 2)
    wal.sync()
    with pytest.raises(CorruptRecordError, match=r"wal-0+1\) but meta.properties is missing"):
        opened(disk)


def test_a_full_disk_is_no_broken_one() -> None:
    disk = MemoryDisk()
    disk.free_bytes = 0
    directory = opened(disk)
    with pytest.raises(StorageFull, match=r"no space is left in /metadata.*make room and restart"):
        become(directory, VOTER)
    disk.free_bytes = None
    WriteAheadLog(disk, ID).begin()
    disk.fail("write", errno.ENOSPC)
    with pytest.raises(StorageFull, match=r"no space is left for /metadata/meta\.properties"):
        directory.become(VOTER)
    directory.close()
    assert opened(disk).state == FRESH


def test_a_damaged_file_is_described_and_not_poured_out() -> None:
    disk = formatted()
    for at, line in ((20, 2), (60, 4)):
        data = bytearray(disk.read(PROPERTIES_NAME))
        data[at] ^= 0x80
        with pytest.raises(CorruptRecordError, match=rf"line {line} is to be .*restore the directory") as said:
            parse_properties(bytes(data), "here")
        assert len(str(said.value)) < 350


# The guard


def test_the_only_voter_is_one_from_the_start() -> None:
    assert JoinGuard(1, [1], FRESH).state == VOTER


def test_all_new_voters_form_a_quorum() -> None:
    guard = JoinGuard(1, [1, 2, 3], FRESH)
    states = []
    for peer_id, state in ((2, FRESH), (3, VIRGIN)):
        assert not guard.may_vote
        assert not guard.may_take_entries
        guard.heard(peer_id, state, 0)
        states.append(guard.state)
    assert states == [FRESH, VOTER]


def test_a_wiped_voter_joins_and_takes_nothing_before_it_heard_everybody() -> None:
    guard = JoinGuard(1, [1, 2, 3], FRESH)
    guard.heard(2, VOTER, 7)
    takes, states = [guard.may_take_entries], [guard.state]
    guard.told_commit(7, 0)
    guard.applied(100, lambda index: 7)
    states.append(guard.state)
    guard.heard(3, VOTER, 9)
    takes.append(guard.may_take_entries)
    assert takes == [False, True]
    assert not guard.may_vote
    assert guard.lowest_term == 9
    guard.told_commit(9, 50)
    terms = {49: 9, 50: 8, 60: 9}  # the commit index of an older term may lag
    for last_applied in terms:
        guard.applied(last_applied, terms.get)
        states.append(guard.state)
        guard.told_commit(9, 60)
    assert states == [JOINING, JOINING, JOINING, JOINING, VOTER]


def test_entries_for_a_fresh_node_show_that_there_is_a_quorum() -> None:
    guard = JoinGuard(1, [1, 2, 3], FRESH)
    guard.offered_entries()
    assert guard.state == JOINING


STATES = st.sampled_from([FRESH, VIRGIN, JOINING, VOTER])


@settings(max_examples=examples(3))
@given(
    st.sampled_from([FRESH, JOINING]),
    st.lists(
        st.tuples(st.just("heard"), st.integers(2, 5), STATES, st.integers(0, 9))
        | st.tuples(st.just("told"), st.integers(0, 9), st.integers(0, 30))
        | st.tuples(st.just("applied"), st.integers(0, 30), st.integers(0, 9))
        | st.tuples(st.just("offered")),
        max_size=40,
    ),
)
def test_whatever_happens_a_node_without_data_votes_only_when_it_may(
    state: VoterStateValue, steps: list[tuple[object, ...]]
) -> None:
    guard = JoinGuard(1, range(1, 6), state)
    heard: dict[int, set[object]] = {}
    told_after_all: list[tuple[object, object]] = []
    joined = state == JOINING
    highest = 0
    for step in steps:
        was = guard.state
        match step:
            case ("heard", int(peer), said, int(term)):
                guard.heard(peer, said, term)  # type: ignore[arg-type] # from a strategy
                if was != VOTER:
                    heard.setdefault(peer, set()).add(said)
                    highest = max(highest, term)
            case ("told", int(term), int(index)):
                guard.told_commit(term, index)
                if len(heard) == 4:
                    told_after_all.append((term, index))
            case ("applied", int(index), int(term)):
                guard.applied(index, lambda _index, term=term: term)  # type: ignore[misc] # bound now
                if was == JOINING and guard.state == VOTER:
                    assert any(t == term and i <= index for t, i in told_after_all)  # type: ignore[operator]
            case _:
                guard.offered_entries()
        joined = joined or guard.state == JOINING
        if was != VOTER:
            assert guard.lowest_term == highest
        if guard.may_take_entries or guard.may_vote:
            assert heard.keys() == {2, 3, 4, 5}
        if guard.state == VOTER and not joined:
            assert all(any(said in (FRESH, VIRGIN) for said in saids) for saids in heard.values())
        assert not (was == VOTER and guard.state != VOTER)


# In a cluster


def test_a_wiped_voter_never_helps_to_elect_a_leader_without_the_data() -> None:
    """What 1 and 3 have committed must survive 3's disk: 2, which lacks it, may not lead with the help of a wiped 3."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.isolate(2)
        outcomes = cluster.propose(1, b"precious")
        cluster.settle()
        assert len(outcomes) == 1
        cluster.kill(1)
        cluster.kill(3)
        cluster.hosts[3].disk = MemoryDisk()
        cluster.cut.clear()
        cluster.start(3)
        cluster.run(10)
        assert cluster.leader() is None
        assert cluster[3].voter_state == JOINING
        assert cluster[2].peers()[3].state == JOINING
        cluster.start(1)
        assert cluster.run(10, lambda: cluster.leader() == 1)
        cluster.run(2)
        assert [cluster.hosts[i].state.commands for i in cluster.ids] == [[b"precious"]] * 3
        assert cluster[3].voter_state == VOTER
        assert cluster.hosts[3].directory.state == VOTER
        assert [cluster[i].peers()[3].state for i in (1, 2)] == [VOTER, VOTER], (
            "the voters must show node 3 as a voter, no longer as joining"
        )


def test_a_wiped_voter_is_one_again_once_it_has_its_log_on_its_disk() -> None:
    """It applies entries before that. As a voter without them it would elect a leader that never had them."""
    with raft_cluster(3) as cluster:
        cluster.elect(1)
        cluster.settle()
        cluster.run(1)
        cluster.isolate(2)
        cluster.propose(1, b"committed")
        cluster.settle()
        cluster.run(0.3)
        cluster.kill(3)
        wiped = cluster.hosts[3]
        wiped.disk = MemoryDisk()
        wiped.start()
        cluster.cut -= {(2, 3), (3, 2)}
        cluster.connect()
        for _ in range(4_000):
            cluster.now += 0.002
            cluster.deliver()
            for voter in (1, 2):
                cluster.hosts[voter].step()
            wiped.node.cycle()
            if wiped.directory.state == VOTER:
                break
            cluster.carry(3, wiped.node.take_immediate())
            wiped.wal.sync()
            cluster.carry(3, wiped.node.take_durable())
        cluster.kill(3)
        cluster.kill(1)
        cluster.start(3)
        cluster.run(10, lambda: cluster.leader(2, 3) is not None)
        leader = cluster.leader(2, 3)
        assert leader is not None
        assert b"committed" in cluster.hosts[leader].state.commands


def test_a_joining_voter_abstains_in_the_highest_term() -> None:
    """It may have voted in that term before it lost its data."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.propose(1, b"x")
        cluster.settle()
        cluster.kill(3)
        cluster.hosts[3].disk = MemoryDisk()
        cluster.start(3)
        cluster.hosts[3].step()
        cluster.hosts[3].step()
        assert cluster[3].term == cluster[1].term
        assert cluster.hosts[3].wal.getVotedForNodeId() == ABSTAINED


def test_a_wiped_voter_of_an_idle_quorum_becomes_a_voter() -> None:
    """The node applies nothing more when it learns for the first time how far the leader has committed."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        for _ in range(3):
            cluster.kill(3)
            cluster.hosts[3].disk = MemoryDisk()
            cluster.start(3)
            assert cluster.run(2, lambda: cluster[3].voter_state == VOTER)


def test_a_voter_without_its_log_does_not_start_and_helps_nobody_to_lead() -> None:
    """What 1 and 3 have committed must survive the deletion of 3's log: 2, which lacks it, may not lead."""
    with raft_cluster() as cluster:
        cluster.elect(1)
        cluster.isolate(2)
        cluster.propose(1, b"precious")
        cluster.settle()
        cluster.kill(1)
        cluster.kill(3)
        disk = cluster.hosts[3].disk
        for name in disk.names():
            if name.startswith("wal-"):
                disk.remove(name)
        cluster.cut.clear()
        with pytest.raises(CorruptRecordError, match="is missing"):
            cluster.start(3)
        assert disk.names() == [PROPERTIES_NAME]
        cluster.run(10)
        assert cluster.leader() is None


def test_a_wiped_voter_gets_a_snapshot_where_the_log_is_gone() -> None:
    with raft_cluster(options=RaftOptions(commit_notice_s=0, snapshot_after_entries=10, log_tail_entries=2)) as cluster:
        cluster.elect(1)
        for i in range(40):
            cluster.propose(1, b"%d" % i)
            cluster.settle()
        cluster.kill(2)
        cluster.hosts[2].disk = MemoryDisk()
        cluster.start(2)
        assert cluster.run(5, lambda: cluster[2].voter_state == VOTER)
        assert cluster.hosts[2].state.commands == cluster.hosts[1].state.commands
