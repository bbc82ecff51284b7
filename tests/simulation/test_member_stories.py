"""Stories of a group's member that schedules of whole clusters come to rarely."""

from __future__ import annotations

import pytest

from raftlog._core.membership import Identity, Membership
from raftlog.types import TopicPartition
from raftlog.v1 import group_pb2
from tests.simulation.parts import Parts

SESSION_MS = 15_000


@pytest.fixture(name="parts")
def _parts() -> Parts:
    return Parts()


def test_a_member_that_is_cut_off_has_let_go_when_its_partition_is_given_away(parts: Parts) -> None:
    """The coordinator ends a session no earlier than its length after the last heartbeat that it has heard of.

    Only a member whose heartbeats are answered may go on, and then for as long again as the coordinator waits for it.
    """
    member = Membership(Identity("g", "m", ""))
    member.subscribe(["t"], "")
    member.join()
    member.opened(0.0)
    topic = group_pb2.AssignedTopic(topic="t", topic_id=b"t" * 16, partitions=[0], first_new_partition=1)
    member.on_assignment(
        group_pb2.GroupAssignment(
            member_epoch=1, topics=[topic], heartbeat_interval_ms=3_000, session_timeout_ms=SESSION_MS
        ),
        0.0,
    )
    member.heartbeat(0.0)
    member.on_heartbeat(group_pb2.HeartbeatAnswer(member_epoch=1))
    member.taken(member.to_take())
    assert TopicPartition("t", 0) in member.owned
    heard_ms = 0.0
    for sent_ms in (3_100.0, 6_200.0):
        assert member.heartbeat(sent_ms) is not None
        member.on_heartbeat(group_pb2.HeartbeatAnswer(member_epoch=1))
        heard_ms = sent_ms
    assert member.heartbeat(9_300.0) is not None  # the coordinator never gets this one
    assert not member.expire(heard_ms + SESSION_MS / 2), (
        "the member must go on reading as long as the coordinator waits for it"
    )
    member.expire(heard_ms + SESSION_MS)  # another member may own it from now on
    assert TopicPartition("t", 0) not in member.owned
