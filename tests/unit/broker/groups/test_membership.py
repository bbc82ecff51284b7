"""Members of a group: they join, come back, let go, leave, and are given up."""

from __future__ import annotations

import pytest

from broker.groups.config import GroupConfig
from raftlog.errors import (
    FencedInstanceId,
    FencedMemberEpoch,
    GroupMaxSizeReached,
    InvalidGroupId,
    InvalidRequestError,
    UnknownMemberId,
    UnreleasedInstanceId,
    UnsupportedAssignor,
)
from raftlog.v1 import group_pb2
from tests.support.group_driver import GroupDriver, partitions_of, topic_id

T = topic_id("t")


def test_the_first_member_gets_everything() -> None:
    driver = GroupDriver({"t": 4})
    stream = driver.join("a", "t")
    assert partitions_of(stream.assignment) == {("t", 0), ("t", 1), ("t", 2), ("t", 3)}
    assert stream.assignment.member_epoch == 1
    assert stream.assignment.session_timeout_ms == 15_000
    assert driver.described().state == group_pb2.STABLE


def test_a_second_member_gets_its_part_once_the_first_has_let_go() -> None:
    driver = GroupDriver({"t": 4})
    first = driver.join("a", "t")
    driver.follow(first)
    second = driver.join("b", "t")
    assert partitions_of(second.assignment) == set()
    assert second.assignment.note == "waits for 2 partitions that other members are letting go"
    assert len(partitions_of(first.assignment)) == 2
    assert first.assignment.member_epoch == 1
    assert driver.described().state == group_pb2.RECONCILING
    driver.follow(first)
    assert len(partitions_of(second.assignment)) == 2
    assert first.assignment.member_epoch == second.assignment.member_epoch == 2
    assert partitions_of(first.assignment) | partitions_of(second.assignment) == {("t", n) for n in range(4)}
    driver.follow(second)
    assert driver.described().state == group_pb2.STABLE


def test_who_leaves_gives_everything_back() -> None:
    driver = GroupDriver({"t": 4})
    first, second = driver.join("a", "t"), driver.join("b", "t")
    driver.follow(first)
    driver.leave(second)
    assert second.last is None
    assert partitions_of(first.assignment) == {("t", n) for n in range(4)}
    driver.leave(first)
    assert driver.described().state == group_pb2.EMPTY


def test_who_is_silent_is_given_up_after_the_session_timeout() -> None:
    driver = GroupDriver({"t": 4})
    first, second = driver.join("a", "t"), driver.join("b", "t")
    driver.follow(first)
    for _ in range(5):
        driver.wait(2999)
        driver.heartbeat(first, first.assignment.member_epoch)
        assert len(partitions_of(first.assignment)) == 2
    driver.wait(10)
    assert isinstance(second.error, UnknownMemberId)
    assert len(partitions_of(first.assignment)) == 4


def test_a_stream_that_ends_is_no_leave() -> None:
    driver = GroupDriver({"t": 4})
    first = driver.join("a", "t")
    owned = {(T, n) for n in range(4)}
    driver.heartbeat(first, 1, owned)
    driver.disconnect(first)
    epoch = driver.described().group_epoch
    again = driver.join("a", "t", epoch=1, owned=owned)
    assert partitions_of(again.assignment) == {("t", n) for n in range(4)}
    assert driver.described().group_epoch == epoch


def test_a_restarted_coordinator_takes_members_back() -> None:
    driver = GroupDriver({"t": 4})
    first, second = driver.join("a", "t"), driver.join("b", "t")
    driver.follow(first)
    driver.follow(second)
    before = driver.described()
    driver.restart()
    assert [member.connected for member in driver.described().members] == [False, False]
    again = driver.join(
        "a", "t", epoch=2, owned={(T, n) for n in range(4) if ("t", n) in partitions_of(first.assignment)}
    )
    assert partitions_of(again.assignment) == partitions_of(first.assignment)
    driver.wait(14_000)
    driver.heartbeat(again, 2)
    assert driver.described().group_epoch == before.group_epoch
    driver.wait(2_000)
    assert len(partitions_of(again.assignment)) == 4


def test_who_reads_what_is_not_its_own_is_fenced() -> None:
    driver = GroupDriver({"t": 4})
    first, second = driver.join("a", "t"), driver.join("b", "t")
    driver.follow(first)
    stream = driver.join("a", "t", epoch=2, owned={(T, n) for n in range(4)})
    assert isinstance(stream.error, FencedMemberEpoch)
    assert isinstance(driver.join("a", "t", epoch=3).error, FencedMemberEpoch)
    assert isinstance(driver.join("c", "t", epoch=3).error, UnknownMemberId)
    assert len(partitions_of(second.assignment)) == 2


def test_who_does_not_let_go_is_expelled_and_given_up_with_its_session() -> None:
    driver = GroupDriver({"t": 4})
    first = driver.join("a", "t", rebalance_timeout_ms=4000)
    driver.follow(first)
    owned = {(T, n) for n in range(4)}
    second = driver.join("b", "t")
    driver.wait(3000)
    driver.heartbeat(first, 1, owned)
    driver.heartbeat(second, 2)
    driver.wait(1500)
    assert isinstance(first.error, FencedMemberEpoch)
    assert partitions_of(second.assignment) == set(), "the first may not have heard of it"
    driver.heartbeat(first, 1, owned)
    assert isinstance(first.error, FencedMemberEpoch)
    assert isinstance(driver.join("a", "t", epoch=1, owned=owned).error, FencedMemberEpoch)
    driver.wait(10_000)
    driver.heartbeat(second, 2)
    driver.wait(4_000)
    assert len(partitions_of(second.assignment)) == 4


def test_who_was_expelled_may_join_again_and_that_frees_what_it_had() -> None:
    driver = GroupDriver({"t": 4})
    first = driver.join("a", "t", rebalance_timeout_ms=4000)
    driver.follow(first)
    second = driver.join("b", "t")
    driver.wait(4500)
    again = driver.join("a", "t")
    assert partitions_of(again.assignment) == set()
    assert partitions_of(second.assignment) == set()
    driver.follow(again)
    assert len(partitions_of(second.assignment)) == 2
    assert len(partitions_of(again.assignment)) == 2
    assert again.assignment.member_epoch > 1


def test_a_join_that_comes_late_lets_nothing_go() -> None:
    driver = GroupDriver({"t": 4})
    first = driver.join("a", "t")
    driver.follow(first)
    second = driver.join("b", "t")
    late = driver.join("a", "t", epoch=1)
    assert partitions_of(second.assignment) == set()
    assert isinstance(first.error, FencedMemberEpoch)
    driver.heartbeat(late, 1)
    assert len(partitions_of(second.assignment)) == 2


def test_what_was_never_taken_is_let_go_by_a_heartbeat_that_follows_the_assignment() -> None:
    driver = GroupDriver({"t": 4})
    first = driver.join("a", "t")
    driver.heartbeat(first, 1, ())
    second = driver.join("b", "t")
    assert len(first.assignments) == 2
    driver.heartbeat(first, 1)
    assert partitions_of(second.assignment) == set(), "sent before the member may have had the second assignment"
    assert first.assignments[1] == first.assignments[2], "so that it says so at once"
    driver.heartbeat(first, 1)
    assert len(partitions_of(second.assignment)) == 2


def test_a_static_member_comes_back_to_what_it_had_without_a_rebalance() -> None:
    driver = GroupDriver({"t": 4})
    first, second = driver.join("a", "t", instance="one"), driver.join("b", "t", instance="two")
    driver.follow(first)
    driver.follow(second)
    had, epoch = partitions_of(first.assignment), driver.described().group_epoch
    assert isinstance(driver.join("c", "t", instance="one").error, UnreleasedInstanceId)
    driver.leave(first, keep=True)
    told = second.assignments
    driver.wait(10_000)
    driver.heartbeat(second, 2)
    again = driver.join("c", "t", instance="one")
    assert partitions_of(again.assignment) == had
    assert driver.described().group_epoch == epoch
    assert second.assignments == told
    assert isinstance(driver.join("a", "t", epoch=2, instance="one").error, FencedInstanceId)


def test_a_static_member_that_had_nothing_comes_back_to_what_it_was_to_have_since() -> None:
    """Nothing has to be let go first, so nothing else would bring it there: the partition was nobody's for ever."""
    driver = GroupDriver({"t": 1})
    first = driver.join("a", "t")
    idle = driver.join("b", "t", instance="one")
    driver.follow(first)
    driver.follow(idle)
    driver.leave(idle, keep=True)
    driver.leave(first)  # its partition is the target of the one who is away
    driver.settle()
    back = driver.join("b", "t", instance="one")
    driver.follow(back)
    driver.settle()
    assert partitions_of(back.assignment) == {("t", 0)}
    assert driver.described().state == group_pb2.STABLE


def test_it_is_shown_how_long_ago_a_member_was_heard_of() -> None:
    driver = GroupDriver({"t": 4})
    stream = driver.join("a", "t")
    driver.wait(1_500)
    assert [member.last_heartbeat_ms for member in driver.described().members] == [1_500]
    driver.heartbeat(stream, 1)
    driver.wait(20)
    assert [member.last_heartbeat_ms for member in driver.described().members] == [20]
    driver.restart()
    assert [member.last_heartbeat_ms for member in driver.described().members] == [-1]


def test_a_static_member_that_does_not_come_back_is_given_up() -> None:
    driver = GroupDriver({"t": 4})
    first, second = driver.join("a", "t", instance="one"), driver.join("b", "t")
    driver.follow(first)
    driver.leave(first, keep=True)
    driver.restart()
    again = driver.join("b", "t", epoch=2, owned=())
    for _ in range(4):
        driver.wait(4000)
        driver.heartbeat(again, 2)
    assert len(partitions_of(again.assignment)) == 4
    assert second.last is not None


@pytest.mark.parametrize("group_id", ["", "g" * 300])
def test_group_ids_have_1_to_255_characters(group_id: str) -> None:
    driver = GroupDriver()
    assert isinstance(driver.join("a", "t", group_id=group_id).error, InvalidGroupId)
    assert driver.log == []


def test_what_can_never_be_accepted_is_refused() -> None:
    driver = GroupDriver(config=GroupConfig(max_size=1))
    assert isinstance(driver.join("", "t").error, InvalidRequestError)
    assert isinstance(driver.join("a", "t", epoch=-1).error, InvalidRequestError)
    assert isinstance(driver.join("a", "t", assignor="nearest").error, UnsupportedAssignor)
    assert isinstance(driver.join("a", "x" * 300).error, InvalidRequestError)
    driver.join("a", "t")
    assert isinstance(driver.join("b", "t").error, GroupMaxSizeReached)


def test_notes_say_why_there_is_nothing_to_read() -> None:
    driver = GroupDriver({"t": 1})
    first, second, third = driver.join("a", "t"), driver.join("b", "t", "u", "v"), driver.join("c")
    assert first.assignment.note == ""
    assert second.assignment.note == "waits for topics that do not exist: u, v; idle: more members than partitions"
    assert third.assignment.note == "subscribed to nothing"
    driver.change_topics({"t": 1, "u": 1, "v": 1})
    assert partitions_of(second.assignment) == {("u", 0), ("v", 0)}
    assert second.assignment.note == ""


def test_a_log_that_ends_anywhere_is_gone_on_from() -> None:
    driver = GroupDriver({"t": 4})
    streams = [driver.join(name, "t", instance=name * (name == "c")) for name in "abc"]
    for stream in streams * 3:
        driver.follow(stream)
    begin = len(driver.log)
    driver.leave(streams[2], keep=True)
    driver.join("d", "t", instance="c")
    driver.leave(streams[0])
    log = driver.log
    for end in range(begin, len(log) + 1):
        driver.log = log[:end]
        driver.restart()
        driver.wait(driver.config.session_timeout_ms)
        group = driver.core.groups["g"]
        left = [group.members, group.targets, group.assignments, group.owners, group.target_of]
        assert not any(left), end
        stream = driver.join("e", "t")
        assert len(partitions_of(stream.assignment)) == 4, end
