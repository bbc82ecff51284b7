"""Faults that were found by thinking, each told as a story. The sentences quoted are what it takes to survive them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raftmeta.raft.consensus import RaftOptions
from tests.simulation.controller import HeartbeatAnswer
from tests.simulation.mutations import planted
from tests.simulation.parts import Parts
from tests.simulation.scenario import Story


@pytest.fixture
def parts() -> Parts:
    """The real ones."""
    return Parts()


def test_a_stale_acknowledgement_counts_for_nothing_after_a_re_election(parts: Parts) -> None:
    """ "Acks carry no term, so a re-elected leader counts stale ones and loses acknowledged commands." """
    with Story(voters=5, parts=parts) as story:
        story.lead(1)
        story.commit(1)

        # Node 5 takes sixty entries of the first leadership; that it has them is not heard for now.
        story.hold("append_answer", source=5, target=1)
        story.separate({1, 5}, {2, 3, 4})
        lost = story.propose(1, count=60)
        story.run(0.2)
        story.hold_no_more()

        # The others elect a leader, which removes these sixty entries from both logs.
        story.separate({1}, {5})
        second = story.another_leads({2, 3, 4})
        story.commit(second)
        story.heal()
        story.run(1.0)
        assert not any(each.acknowledged for each in lost)

        # Node 1 leads again. Only node 4 hears it, and the old acknowledgements arrive at last.
        story.lead(1)
        story.separate({1, 4}, {2, 3, 5})
        asked = story.propose(1, count=3)
        assert story.release() > 0
        story.run(0.4)
        assert not any(each.acknowledged for each in asked), (
            "a command was acknowledged, but only two of five voters have its entry"
        )

        story.heal()
        story.all_well()
        assert not story.topics(1) & {each.topic for each in lost}


def test_the_first_chunk_of_a_snapshot_commits_nothing_of_an_unverified_tail(parts: Parts) -> None:
    """ "A snapshot chunk moves the commit index over an unverified tail, so a deposed leader reports SUCCESS." """
    options = RaftOptions(snapshot_after_entries=10, log_tail_entries=0, snapshot_chunk_bytes=100)
    with Story(options=options, parts=parts) as story:
        story.lead(1)
        story.separate({1}, {2, 3})
        lost = story.propose(1, count=3)
        second = story.another_leads({2, 3})
        story.commit(second, count=40)
        story.run(2.0)
        assert story.voter(second).node.first_index > 5, (
            "the new leader still has its first entries, so that node 1 needs no snapshot"
        )
        story.break_connections({1}, {2, 3})

        story.heal()
        story.all_well()
        assert not any(each.acknowledged for each in lost)
        for node_id in (1, 2, 3):
            assert not story.topics(node_id) & {each.topic for each in lost}


def test_a_follower_that_falls_behind_during_a_snapshot_gets_the_next_one(parts: Parts) -> None:
    """The snapshot that it has was sent to it again and again, for ever."""
    options = RaftOptions(snapshot_after_entries=10, log_tail_entries=0)
    with Story(options=options, parts=parts) as story:
        story.lead(1)
        story.separate({3}, {1, 2})
        story.break_connections({3}, {1, 2})
        story.commit(1, count=30)
        story.run(1.0)
        story.hold("append_answer", source=3, target=1)
        story.heal()
        behind = story.voter(3).node
        first = behind.last_applied
        story.until(lambda: behind.last_applied > first, "a snapshot at node 3")
        story.commit(1, count=30)
        story.until(lambda: story.voter(1).node.first_index > behind.last_applied, "node 3 too far behind again")
        story.release()
        story.all_well()
        assert behind.last_applied == story.voter(1).node.last_applied


def test_a_deposed_leader_does_not_hand_out_a_lease(parts: Parts) -> None:
    """ "A heartbeat's answer grants a lease only after a majority round that began after the heartbeat arrived." """
    with Story(parts=parts) as story:
        story.lead(1)
        # Heartbeats still go through; the voters do not hear node 1 any more, nor it them.
        for peer in (2, 3):
            story.hold("raft", source=1, target=peer)
            story.hold("raft", source=peer, target=1)
        since_s = story.simulation.scheduler.now_s + 0.01  # rounds under way may end
        story.seen.clear()
        story.run(0.6)
        assert story.voter(1).controller.serving, "the cut-off controller must not know yet that it is deposed"
        granted = [
            (at_s, payload)
            for at_s, source, _, payload in story.seen
            if source == 1 and at_s > since_s and isinstance(payload, HeartbeatAnswer) and payload.lease_ms
        ]
        assert granted == []

        second = story.another_leads({2, 3})
        story.release()
        story.all_well()
        assert story.serving() == second


def test_an_answer_that_lay_in_a_socket_makes_no_longer_lease(parts: Parts) -> None:
    """ "The broker counts the lease from when it sent the heartbeat." """
    with Story(parts=parts) as story:
        story.lead(1)
        story.hold("HeartbeatAnswer", source=1, target=3)
        story.run(0.5)
        silent_since_s = story.simulation.scheduler.now_s
        silent = story.hold("Heartbeat", source=3, target=1)
        story.run(0.9)
        story.drop(silent)
        story.simulation.network.cut(3, 1)
        story.release()
        broker = story.simulation.brokers[3]
        left_ms = broker.lease.expires_at_ms - broker.host.local_s() * 1_000
        assert left_ms < (silent_since_s + 1.2 - story.simulation.scheduler.now_s) * 1_000
        story.run(3.0)
        story.heal()
        story.all_well()


def test_a_broker_that_speaks_while_it_is_being_fenced_gets_no_lease(parts: Parts) -> None:
    """The fencing is under way: a lease given now would be valid when the next leader is elected."""
    with Story(parts=parts) as story:
        story.lead(1)
        silent = story.hold("Heartbeat", source=3, target=1)
        story.run(0.8)
        story.hold("append_answer", target=1)  # nothing is committed from here on
        story.run(0.9)
        story.seen.clear()
        story.drop(silent)
        story.run(0.5)
        answers = [
            payload
            for _, source, target, payload in story.seen
            if (source, target) == (1, 3) and isinstance(payload, HeartbeatAnswer)
        ]
        assert answers
        assert not any(answer.lease_ms for answer in answers)
        assert not story.simulation.invariants.truth.brokers[3].fenced, (
            "broker 3 is fenced, but the fencing was not committed yet"
        )
        story.release()
        story.all_well()


def test_a_leader_alone_neither_commits_nor_reads(parts: Parts) -> None:
    """ "A cut-off leader acknowledges commands with no quorum." """
    with Story(parts=parts) as story:
        story.lead(1)
        story.separate({1}, {2, 3})
        asked = story.propose(1)
        read: list[object] = []
        story.voter(1).process.run(story.voter(1).read, read.append)
        story.run(3.0)
        assert not asked[0].acknowledged
        assert read == [None]
        assert not story.voter(1).node.active


def test_a_voter_that_lost_its_disk_helps_nobody_to_be_elected_without_the_data(parts: Parts) -> None:
    """ "A wiped voter can never help elect a leader without the data." """
    with Story(parts=parts) as story:
        story.lead(1)
        story.separate({3}, {1, 2})  # node 3 misses what 1 and 2 commit
        story.commit(1, count=5)
        held = story.voter(1).node.last_applied

        for node_id in (1, 2):
            story.simulation.host(node_id).stop("killed")
        story.simulation.host(2).disk.wipe()
        story.heal()
        story.simulation.host(2).boot()  # node 1, the only one that has the five, stays away
        story.simulation.host(1).disk.broken = True
        story.run(10.0)
        assert not any(story.voter(node_id).controller.serving for node_id in (2, 3))

        story.simulation.host(1).disk.broken = False
        story.all_well()
        assert story.voter(3).node.last_applied >= held
        assert {f"told-{number}" for number in range(1, 6)} <= story.topics(2)


@pytest.mark.parametrize(
    ("story", "bug"),
    [
        (test_a_stale_acknowledgement_counts_for_nothing_after_a_re_election, "term stamp off"),
        (test_the_first_chunk_of_a_snapshot_commits_nothing_of_an_unverified_tail, "snapshot guard off"),
        (test_a_deposed_leader_does_not_hand_out_a_lease, "lease without a majority round"),
        (test_an_answer_that_lay_in_a_socket_makes_no_longer_lease, "lease counted from the answer"),
        (test_a_broker_that_speaks_while_it_is_being_fenced_gets_no_lease, "lease while being fenced"),
        (test_a_leader_alone_neither_commits_nor_reads, "read without a round"),
        (test_a_voter_that_lost_its_disk_helps_nobody_to_be_elected_without_the_data, "wiped-voter guard off"),
    ],
)
def test_a_story_notices_the_bug_that_it_is_about(story: Callable[[Parts], None], bug: str) -> None:
    with planted(bug) as parts, pytest.raises(AssertionError):
        story(parts)
