"""The member's state machine, message by message; `tests.simulation` has it against coordinators."""

from __future__ import annotations

import math

import pytest

from raftlog._core.membership import Identity, Membership, MemberState
from raftlog.errors import (
    BrokerUnavailable,
    FencedInstanceId,
    FencedMemberEpoch,
    GroupMaxSizeReached,
    InternalError,
    NotCoordinator,
    RaftlogError,
    UnreleasedInstanceId,
)
from raftlog.types import TopicPartition
from raftlog.v1 import group_pb2

T_ID, U_ID = b"t" * 16, b"u" * 16
ZERO, ONE, TWO = (TopicPartition("t", number) for number in range(3))


def assignment(*numbers: int, epoch: int = 1, topic_id: bytes = T_ID) -> group_pb2.GroupAssignment:
    topics = [group_pb2.AssignedTopic(topic="t", topic_id=topic_id, partitions=numbers, first_new_partition=2)]
    return group_pb2.GroupAssignment(
        member_epoch=epoch,
        topics=topics if numbers else [],
        heartbeat_interval_ms=3000,
        session_timeout_ms=15_000,
    )


def owned_in(request: group_pb2.GroupRequest | None) -> list[int] | None:
    """Return the partitions that a heartbeat reports as read; None: it reports none."""
    if request is None or not request.heartbeat.HasField("owned"):
        return None
    return [number for each in request.heartbeat.owned.partitions for number in each.partitions]


def joined(*numbers: int, now_ms: float = 0.0, instance_id: str = "") -> Membership:
    """Return a member that has just received an assignment and told the coordinator that it takes it."""
    member = Membership(Identity("g", "m", instance_id))
    member.subscribe(["t"], "")
    member.join()
    member.opened(now_ms)
    member.on_assignment(assignment(*numbers), now_ms)
    answer(member, now_ms)
    return member


def answer(member: Membership, now_ms: float) -> list[int] | None:
    """Have a heartbeat sent and answered; return what it says is read."""
    request = member.heartbeat(now_ms)
    assert request is not None
    member.on_heartbeat(group_pb2.HeartbeatAnswer(member_epoch=member.member_epoch))
    return owned_in(request)


def reading(*numbers: int) -> Membership:
    """Return a member that reads what it was given."""
    member = joined(*numbers)
    member.taken(member.to_take())
    return member


def test_an_assignment_of_the_subscription_before_is_told_from_one_that_follows() -> None:
    member = reading(0)
    follows = [member.follows]
    member.subscribe(["u"], "")
    follows.append(member.follows)
    for message in (assignment(0, 1, epoch=2), assignment(epoch=2)):
        member.on_assignment(message, 0.0)
        follows.append(member.follows)
    assert follows == [True, False, False, True]


def test_it_joins_with_what_it_wants() -> None:
    member = Membership(Identity("g", "m", "one", "client", "rack", 300_000, "range"))
    assert not member.wants_stream
    assert member.subscribe(["u", "t"], "")
    assert not member.subscribe(["t", "u"], ""), "the same topics in another order must not count as a change"
    member.join()
    join = member.opened(0.0).join
    assert (join.group_id, join.member_id, join.member_epoch, join.instance_id) == ("g", "m", 0, "one")
    assert (join.client_id, join.rack, join.rebalance_timeout_ms) == ("client", "rack", 300_000)
    assert (list(join.subscription.topics), join.subscription.assignor) == (["t", "u"], "range")
    member.on_assignment(assignment(0, 1), 5.0)
    assert member.state is MemberState.MEMBER
    assert member.to_take() == [ZERO, ONE]
    assert member.owned == {}
    assert member.taken([ZERO, ONE])[ONE].first_new_partition == 2
    assert member.to_take() == []


class TestLettingGo:
    def test_what_is_not_assigned_any_more_is_owned_until_released(self) -> None:
        member = reading(0, 1)
        member.on_assignment(assignment(0), 10.0)
        assert member.to_release() == [ONE]
        assert answer(member, 10.0) is None, "the partition must not be released while it is read"
        member.released([ONE])
        assert answer(member, 20.0) == [0]
        assert member.heartbeat(21.0) is None, "a release must be reported once"

    def test_a_topic_made_again_is_let_go_before_it_is_taken(self) -> None:
        member = reading(0)
        member.on_assignment(assignment(0, topic_id=U_ID), 10.0)
        assert (member.to_release(), member.to_take()) == ([ZERO], [])
        member.released([ZERO])
        assert member.to_take() == [ZERO]
        assert member.taken([ZERO])[ZERO].topic_id == U_ID

    def test_what_may_be_taken_counts_as_read_from_the_moment_it_is_known(self) -> None:
        """A heartbeat that was under way before never lets go of what came meanwhile."""
        member = reading(0)
        member.on_assignment(assignment(0, 1, 2), 10.0)
        assert answer(member, 10.0) == [0, 1, 2]
        member.on_assignment(assignment(0, 1), 11.0)
        assert answer(member, 11.0) == [0, 1], (
            "the member must not report a partition that was taken back before it took it"
        )
        assert member.taken([ONE, TWO]).keys() == {ONE}

    def test_every_assignment_is_answered_but_one_heartbeat_at_most_is_under_way(self) -> None:
        """So the coordinator knows: what was pushed before an answer has arrived when the next heartbeat is sent."""
        member = reading(0)
        assert member.heartbeat(3000.0) is not None
        member.on_assignment(assignment(0, 1), 3001.0)
        member.on_assignment(assignment(0), 3002.0)
        assert member.heartbeat(3003.0) is None
        assert member.next_ms() == 6000.0, "the next deadline must be that of a coordinator which is silent too long"
        member.on_heartbeat(group_pb2.HeartbeatAnswer(member_epoch=1))
        assert member.next_ms() == -math.inf
        assert answer(member, 3004.0) is None
        assert member.heartbeat(3005.0) is None

    def test_a_member_that_joins_anew_says_at_once_that_it_reads_nothing(self) -> None:
        """The coordinator may have it as the owner still, and waits for its word."""
        member = reading(0)
        assert member.expire(member.session_deadline_ms)
        member.closed()
        member.opened(20_000.0)
        member.on_assignment(assignment(), 20_001.0)
        assert member.heartbeat(20_001.0) is not None

    def test_what_is_lost_cannot_be_released_or_taken(self) -> None:
        member = joined(0, 1)
        member.taken([ZERO])
        member.on_error(FencedMemberEpoch("over"))
        assert member.lost == {ZERO}
        assert member.taken([ONE]) == {}
        member.released([ZERO])
        member.told_of_loss([ZERO])
        assert member.lost == set()


class TestSession:
    def test_heartbeats_go_out_at_the_interval_and_after_changes(self) -> None:
        member = reading(0)
        assert member.next_ms() == 3000.0
        assert member.heartbeat(2999.0) is None
        beat = member.heartbeat(3000.0)
        assert beat is not None
        member.on_heartbeat(group_pb2.HeartbeatAnswer(member_epoch=1))
        assert not beat.heartbeat.HasField("owned")
        assert not beat.heartbeat.HasField("subscription")
        member.subscribe(["t", "u"], "")
        assert member.next_ms() == -math.inf
        changed = member.heartbeat(3001.0)
        assert changed is not None
        assert list(changed.heartbeat.subscription.topics) == ["t", "u"]
        assert member.answered_changes < member.changes
        member.on_heartbeat(group_pb2.HeartbeatAnswer(member_epoch=4))
        assert member.answered_changes == member.changes
        assert member.member_epoch == 4

    def test_an_answer_that_was_on_its_way_does_not_take_the_epoch_back(self) -> None:
        """It repeats the heartbeat's content; an assignment may have arrived between the two."""
        member = reading(0)
        assert member.heartbeat(3000.0) is not None
        member.on_assignment(assignment(0, 1, epoch=9), 3001.0)
        member.on_heartbeat(group_pb2.HeartbeatAnswer(member_epoch=1))
        assert member.member_epoch == 9

    def test_it_is_sure_of_its_session_from_when_the_last_answered_heartbeat_was_sent(self) -> None:
        member = reading(0)
        assert member.session_deadline_ms == 0.98 * 15_000
        member.heartbeat(3000.0)
        assert member.session_deadline_ms == 0.98 * 15_000
        member.on_heartbeat(group_pb2.HeartbeatAnswer(member_epoch=1))
        assert member.session_deadline_ms == 3000.0 + 0.98 * 15_000
        assert not member.expire(member.session_deadline_ms - 1)
        assert member.expire(member.session_deadline_ms)
        assert member.state is MemberState.JOINING
        assert member.lost == {ZERO}
        assert not member.expire(1e9), "once"

    def test_the_session_goes_on_while_the_coordinator_is_looked_for(self) -> None:
        member = reading(0, 1)
        deadline_ms = member.session_deadline_ms
        member.closed()
        member.on_error(NotCoordinator("it is another one"))
        assert member.state is MemberState.AWAY
        assert member.session_deadline_ms == deadline_ms
        again = member.opened(5000.0).join
        assert again.member_epoch == 1
        assert [list(each.partitions) for each in again.owned] == [[0, 1]]
        assert member.session_deadline_ms == deadline_ms, "the session must not be extended without an answer"
        member.on_assignment(assignment(0, 1), 5010.0)
        assert member.session_deadline_ms == 5000.0 + 0.98 * 15_000
        assert member.lost == set()

    def test_a_coordinator_that_owes_an_answer_for_long_is_given_up(self) -> None:
        member = reading(0)
        member.heartbeat(3000.0)
        assert not member.is_silent(5999.0)
        assert member.is_silent(6000.0)
        member.closed()
        assert not member.is_silent(1e9)

    @pytest.mark.parametrize("error", [UnreleasedInstanceId(""), BrokerUnavailable(""), InternalError("")])
    def test_what_passes_changes_nothing(self, error: RaftlogError) -> None:
        member = reading(0)
        member.closed()
        member.on_error(error)
        assert member.state is MemberState.AWAY
        assert member.owned.keys() == {ZERO}
        assert member.refusal is error

    @pytest.mark.parametrize("error", [FencedInstanceId("somebody else"), GroupMaxSizeReached("full")])
    def test_what_does_not_pass_ends_it_until_it_is_asked_to_join_again(self, error: RaftlogError) -> None:
        member = reading(0)
        member.closed()
        member.on_error(error)
        assert member.error is error
        assert member.lost == {ZERO}
        assert not member.wants_stream
        member.join()
        assert member.state is MemberState.JOINING
        assert member.opened(1.0).join.member_epoch == 0

    @pytest.mark.parametrize("instance_id", ["", "one"])
    def test_after_a_leave_no_message_changes_anything(self, instance_id: str) -> None:
        member = joined(0, instance_id=instance_id)
        request = member.leave()
        assert request is not None
        assert request.leave.keep_assignment == bool(instance_id)
        assert member.state is MemberState.OUT
        assert member.leave() is None
        member.on_assignment(assignment(1), 1.0)
        member.on_error(FencedMemberEpoch(""))
        assert member.state is MemberState.OUT, "messages after the leave must change nothing"
        assert member.assigned == {}
