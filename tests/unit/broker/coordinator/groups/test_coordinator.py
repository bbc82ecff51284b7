"""The group coordinator's core: members, topics, committed offsets, and work in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest

from broker.coordinator.groups import change, coordinator
from broker.coordinator.groups import coordinator as answers
from broker.coordinator.groups.assignors import BUILT_IN, GroupSpec
from broker.coordinator.groups.checks import MAX_PARTITIONS, check_offsets, check_partitions
from broker.coordinator.groups.commands import (
    Command,
    CommitOffsets,
    Decision,
    DeleteGroup,
    DeleteOffsets,
    DescribeGroup,
    DescriptionRoom,
    DescriptionShare,
    FetchOffsets,
    GroupConfig,
    Heartbeat,
    ListGroups,
)
from broker.coordinator.groups.coordinator import GroupCoordinator, Rest
from broker.coordinator.groups.group import Committed, Head
from broker.coordinator.groups.records import head_record, offset_record
from broker.coordinator.groups.topics import TopicPartition
from raftlog.errors import (
    BrokerOverloaded,
    FencedInstanceId,
    FencedMemberEpoch,
    GroupIdNotFound,
    GroupMaxSizeReached,
    InvalidGroupId,
    InvalidRequestError,
    RaftlogError,
    UnknownMemberId,
    UnreleasedInstanceId,
    UnsupportedAssignor,
)
from raftlog.v1 import common_pb2, group_pb2
from tests.support.group_driver import WALL_MS, GroupDriver, Stream, partitions_of, topic_id

T = topic_id("t")


def test_the_first_member_gets_everything() -> None:
    driver = GroupDriver({"t": 4})
    stream = driver.join("a", "t")
    assert partitions_of(stream.assignment) == {("t", 0), ("t", 1), ("t", 2), ("t", 3)}
    assert stream.assignment.member_epoch == 1
    assert stream.assignment.session_timeout_ms == 15_000
    assert driver.described().state == group_pb2.STABLE


def test_a_member_that_waits_for_one_partition_says_so() -> None:
    driver = GroupDriver({"t": 2})
    driver.follow(driver.join("a", "t"))
    assert driver.join("b", "t").assignment.note == "waits for 1 partition that other members are letting go"


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
    assert partitions_of(second.assignment) == set(), (
        "the second member must get nothing yet, as the first may not have heard that it is fenced"
    )
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
    assert partitions_of(second.assignment) == set(), (
        "the heartbeat was sent before the member may have had the second assignment, so it frees no partition"
    )
    assert first.assignments[1] == first.assignments[2], (
        "the coordinator must send the same assignment again, so that the member reports at once"
    )
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
    """Nothing has to be let go first, so no other event would assign it: the partition had no owner for ever."""
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


def test_members_of_a_group_subscribe_to_so_many_topics_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change, "MAX_NAMES", 10)
    driver = GroupDriver({"t": 1})
    first = driver.join("a", *"bcdefg")
    refused = driver.join("b", *"hijkl")
    assert isinstance(refused.error, GroupMaxSizeReached)
    assert "would subscribe to 11 topics together" in str(refused.error)
    assert "b" not in driver.core.groups["g"].members
    driver.join("c", *"hijk")
    longer = Heartbeat(
        first,
        "g",
        "a",
        group_pb2.GroupHeartbeat(member_epoch=1, subscription=group_pb2.Subscription(topics=list("bcdefgh"))),
    )
    driver.decide(longer)
    assert isinstance(first.error, GroupMaxSizeReached)
    driver.join("d", *"hijk", group_id="other")
    driver.wait(60_000)  # all are silent
    driver.join("e", *"bcdefghijk")
    assert list(driver.core.groups["g"].members) == ["e"]


def test_the_more_topics_members_subscribe_to_the_fewer_assignments_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change, "NAMES_PER_MS", 1)
    driver = GroupDriver({"t": 1})
    driver.join("a", *(f"{number}" for number in range(500)))
    driver.wait(600)
    epoch = driver.described().assignment_epoch
    for number in range(10):
        driver.join(f"m{number}", "t")
    assert driver.described().assignment_epoch <= epoch + 1
    driver.wait(600)
    described = driver.described()
    assert described.assignment_epoch == described.group_epoch


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


def first_new(stream: Stream) -> dict[str, int]:
    return {topic.topic: topic.first_new_partition for topic in stream.assignment.topics}


def test_partitions_that_are_added_are_new() -> None:
    driver = GroupDriver({"t": 2})
    stream = driver.join("a", "t")
    assert first_new(stream) == {"t": 2}
    driver.change_topics({"t": 4})
    assert partitions_of(stream.assignment) == {("t", n) for n in range(4)}
    assert first_new(stream) == {"t": 2}
    driver.restart()
    assert first_new(driver.join("a", "t", epoch=2)) == {"t": 2}


def test_what_was_added_while_nobody_coordinated_is_noticed() -> None:
    driver = GroupDriver({"t": 2})
    stream = driver.join("a", "t", "u")
    driver.follow(stream)
    driver.topics = type(driver.topics)({"t": 3, "u": 1})
    driver.restart()
    again = driver.join("a", "t", "u", epoch=1, owned={(topic_id("t"), 0), (topic_id("t"), 1)})
    assert partitions_of(again.assignment) == {("t", 0), ("t", 1), ("t", 2), ("u", 0)}
    assert first_new(again) == {"t": 2, "u": 0}


def test_a_topic_that_was_waited_for_is_new() -> None:
    driver = GroupDriver({"t": 2})
    stream = driver.join("a", "u")
    assert stream.assignment.note == "waits for a topic that does not exist: u"
    driver.change_topics({"t": 2, "u": 3})
    assert partitions_of(stream.assignment) == {("u", 0), ("u", 1), ("u", 2)}
    assert first_new(stream) == {"u": 0}
    assert stream.assignment.note == ""


def test_a_topic_made_anew_under_its_name_is_new() -> None:
    driver = GroupDriver({"t": 2})
    stream = driver.join("a", "t")
    driver.follow(stream)
    driver.change_topics({"t": 2}, {"t": 1})
    assert partitions_of(stream.assignment) == set()
    driver.follow(stream)
    assert {topic.topic_id for topic in stream.assignment.topics} == {topic_id("t", 1)}
    assert first_new(stream) == {"t": 0}


def test_what_appears_under_a_pattern_is_new() -> None:
    driver = GroupDriver({"ab": 2, "ac": 1})
    first = driver.join("a", "ab", pattern="a.*")
    assert first_new(first) == {"ab": 2}
    driver.heartbeat(first, 1, subscription=group_pb2.Subscription(topics=["ab", "ac"], pattern="a.*"))
    assert first_new(first) == {"ab": 2, "ac": 0}
    second = driver.join("b", "ac", pattern="ac")
    driver.follow(first)
    assert driver.core.groups["g"].head is not None
    assert driver.core.groups["g"].head.patterns == ("a.*", "ac")
    assert first_new(second) in ({}, {"ac": 0})


def test_a_deleted_topic_is_let_go() -> None:
    driver = GroupDriver({"t": 1, "u": 1})
    stream = driver.join("a", "t", "u")
    driver.follow(stream)
    driver.change_topics({"t": 1})
    assert partitions_of(stream.assignment) == {("t", 0)}
    driver.follow(stream)
    assert driver.described().state == group_pb2.STABLE
    assert stream.assignment.note == "waits for a topic that does not exist: u"


class Broken:
    """An assignor that does what none may do."""

    name = "broken"

    def __init__(self, result: Mapping[str, Iterable[TopicPartition]] | Exception) -> None:
        self.result = result

    def assign(self, group: GroupSpec) -> Mapping[str, Iterable[TopicPartition]]:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


T0 = (topic_id("t"), 0)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (KeyError("rack"), "it raised KeyError"),
        ({"a": [T0], "b": [T0]}, "to two members"),
        ({"z": [T0]}, "which is no member"),
        ({"a": [(topic_id("t"), 5)]}, "which cannot read it"),
        ({"a": [(topic_id("u"), 0)]}, "which cannot read it"),
    ],
)
def test_an_assignor_that_fails_is_replaced_and_named(
    result: Mapping[str, Iterable[TopicPartition]] | Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver = GroupDriver({"t": 2, "u": 1}, assignors={**BUILT_IN, "broken": Broken(result)})
    first, second = driver.join("a", "t", assignor="broken"), driver.join("b", "t", assignor="broken")
    driver.follow(first)
    assert reason in caplog.text
    assert "assignor broken failed, sticky is used" in caplog.text
    assert len(partitions_of(first.assignment) | partitions_of(second.assignment)) == 2


def test_the_wish_of_most_members_counts() -> None:
    driver = GroupDriver({"t": 2})
    driver.join("a", "t")
    assert driver.described().assignor == "sticky"
    driver.join("b", "t", assignor="range")
    assert driver.described().assignor == "range", "a member that names no assignor must not count"
    driver.join("c", "t", assignor="roundrobin")
    assert driver.described().assignor == "range", (
        "of assignors with as many members, the first in the server's order must be chosen"
    )
    driver.join("d", "t", assignor="roundrobin")
    assert driver.described().assignor == "roundrobin"


T, U = topic_id("t"), topic_id("u")
DAY_MS = 24 * 60 * 60 * 1000.0


def errors(results: object) -> list[int]:
    """Return the error codes of results; 0: none."""
    return [result.error.code for result in results]  # type: ignore[attr-defined] # repeated results


def shown(driver: GroupDriver) -> dict[tuple[str, int], int]:
    return {(offset.topic, offset.partition): offset.offset for offset in driver.committed().offsets}


def test_anybody_commits_while_the_group_has_no_members() -> None:
    driver = GroupDriver({"t": 4})
    assert errors(driver.commit({(T, 0): 5, (T, 3): 7}).results) == [0, 0]
    assert shown(driver) == {("t", 0): 5, ("t", 3): 7}
    driver.restart()
    assert shown(driver) == {("t", 0): 5, ("t", 3): 7}
    driver.join("a", "t")
    with pytest.raises(UnknownMemberId, match="has 1 members, and only they commit"):
        driver.commit({(T, 0): 6})


def test_a_member_commits_what_it_has_since_it_has_it() -> None:
    driver = GroupDriver({"t": 2})
    first = driver.join("a", "t")
    driver.follow(first)
    assert errors(driver.commit({(T, 0): 5, (T, 1): 6}, "a", 1).results) == [0, 0]
    second = driver.join("b", "t")
    assert errors(driver.commit({(T, 0): 6, (T, 1): 7}, "a", 1).results) == [0, 0], (
        "the member must be able to commit until it has released its partitions"
    )
    driver.follow(first)
    driver.follow(second)
    (mine,) = first.assignment.topics[0].partitions
    (theirs,) = second.assignment.topics[0].partitions
    assert errors(driver.commit({(T, mine): 8, (T, theirs): 8}, "a", 2).results) == [0, common_pb2.PARTITION_NOT_OWNED]
    assert errors(driver.commit({(T, mine): 7}, "a", 1).results) == [0], (
        "a member that has kept its partition since epoch 1 may commit with that epoch, and also go back"
    )
    assert errors(driver.commit({(T, theirs): 9}, "b", 1).results) == [common_pb2.STALE_MEMBER_EPOCH]
    assert errors(driver.commit({(T, theirs): 9}, "b", 2).results) == [0]
    with pytest.raises(FencedMemberEpoch):
        driver.commit({(T, mine): 9}, "a", 3)
    with pytest.raises(UnknownMemberId):
        driver.commit({(T, mine): 9}, "c", 2)
    assert shown(driver) == {("t", mine): 7, ("t", theirs): 9}


def test_a_commit_over_a_stream_that_was_replaced_is_refused() -> None:
    driver = GroupDriver({"t": 1})
    first = driver.join("a", "t")
    driver.follow(first)
    assert not driver.commit_in_session(first, 1, {(T, 0): 5}).HasField("error")
    again = driver.join("a", "t", epoch=1, owned={(T, 0)})
    assert errors(driver.commit_in_session(again, 1, {(T, 0): 9}).results) == [0]
    late = driver.commit_in_session(first, 1, {(T, 0): 5})
    assert late.error.code == common_pb2.FENCED_MEMBER_EPOCH
    assert late.correlation_id == 7
    assert shown(driver) == {("t", 0): 9}


def test_a_commit_from_before_a_member_lost_its_session_is_refused() -> None:
    driver = GroupDriver({"t": 1})
    first = driver.join("a", "t")
    driver.follow(first)
    again = driver.join("a", "t")
    driver.follow(again)
    assert again.assignment.member_epoch == 2
    driver.commit({(T, 0): 9}, "a", 2)
    assert errors(driver.commit({(T, 0): 5}, "a", 1).results) == [common_pb2.STALE_MEMBER_EPOCH]
    assert shown(driver) == {("t", 0): 9}


def test_bad_commits_are_refused_one_by_one() -> None:
    driver = GroupDriver({"t": 4}, GroupConfig(offset_metadata_max_bytes=10))
    call = Stream()
    request = group_pb2.CommitOffsetsRequest(
        group_id="g",
        member_epoch=-1,
        offsets=[
            group_pb2.CommitOffset(topic="t", partition=0, offset=1, metadata="ten bytes!"),
            group_pb2.CommitOffset(topic="t", partition=4, offset=1),
            group_pb2.CommitOffset(topic="t", partition=-1, offset=1),
            group_pb2.CommitOffset(topic="nope", partition=0, offset=1),
            group_pb2.CommitOffset(topic_id=b"x" * 16, partition=0, offset=1),
            group_pb2.CommitOffset(topic="t", partition=1, offset=-1),
            group_pb2.CommitOffset(topic="t", partition=1, offset=1, metadata="ten bytes! "),
        ],
    )
    driver.decide(CommitOffsets(call, request))
    assert isinstance(call.last, group_pb2.CommitOffsetsResponse)
    assert errors(call.last.results) == [
        0,
        common_pb2.UNKNOWN_TOPIC_OR_PARTITION,
        common_pb2.UNKNOWN_TOPIC_OR_PARTITION,
        common_pb2.UNKNOWN_TOPIC_OR_PARTITION,
        common_pb2.UNKNOWN_TOPIC_ID,
        common_pb2.INVALID_REQUEST,
        common_pb2.OFFSET_METADATA_TOO_LARGE,
    ]


def test_fetched_offsets_say_what_is_not_committed_and_what_is_not_the_members() -> None:
    driver = GroupDriver({"t": 4})
    driver.commit({(T, 0): 5})
    answer = driver.committed(partitions=[(T, 0), (T, 1), (b"\xff" * 16, 0)])
    assert [offset.offset for offset in answer.offsets] == [5, -1, -1]
    assert [offset.error.code for offset in answer.offsets] == [0, 0, common_pb2.UNKNOWN_TOPIC_ID]
    assert answer.offsets[0].topic == "t"
    first = driver.join("a", "t")
    driver.follow(first)
    second = driver.join("b", "t")
    driver.follow(first)
    driver.follow(second)
    (number, *_) = second.assignment.topics[0].partitions
    answer = driver.committed(member_id="a", epoch=2, partitions=[(T, number)])
    assert answer.offsets[0].error.code == common_pb2.PARTITION_NOT_OWNED
    with pytest.raises(UnknownMemberId):
        driver.committed(member_id="c", epoch=2, partitions=[(T, 0)])
    assert [offset.offset for offset in driver.committed("never").offsets] == []


def test_offsets_of_an_empty_group_expire_and_then_the_group() -> None:
    driver = GroupDriver({"t": 2})
    stream = driver.join("a", "t")
    driver.follow(stream)
    driver.commit({(T, 0): 5}, "a", 1)
    driver.leave(stream)
    driver.wait(6 * DAY_MS)
    driver.restart()
    assert driver.committed().offsets, "offsets must be kept for seven days, also by a coordinator that has just begun"
    driver.wait(1.1 * DAY_MS)
    assert not driver.committed().offsets
    assert driver.described().state == group_pb2.DEAD
    assert not driver.core.groups
    driver.restart()
    assert not driver.core.groups


def test_members_that_stay_lose_no_offsets() -> None:
    driver = GroupDriver({"t": 2}, GroupConfig(offsets_retention_ms=60_000, offsets_retention_check_interval_ms=5_000))
    stream = driver.join("a", "t")
    driver.follow(stream)
    driver.commit({(T, 0): 5}, "a", 1)
    for _ in range(100):
        driver.wait(10_000)
        driver.heartbeat(stream, 1)
    assert shown(driver) == {("t", 0): 5}
    driver.leave(stream)
    driver.wait(55_000)
    assert shown(driver) == {("t", 0): 5}
    driver.wait(15_000)
    assert shown(driver) == {}


def test_offsets_of_a_group_that_never_had_members_expire_by_their_own_age() -> None:
    driver = GroupDriver({"t": 4}, GroupConfig(offsets_retention_ms=60_000, offsets_retention_check_interval_ms=5_000))
    driver.commit({(T, 0): 5})
    driver.wait(40_000)
    driver.commit({(T, 1): 5})
    driver.wait(30_000)
    assert shown(driver) == {("t", 1): 5}


def test_offsets_of_a_deleted_topic_are_forgotten_in_pieces() -> None:
    driver = GroupDriver({"t": 1500, "u": 1})
    driver.commit({(T, number): 1 for number in range(1500)} | {(U, 0): 2})
    driver.change_topics({"t": 1500, "u": 1}, {"t": 1})
    assert shown(driver) == {("u", 0): 2}
    driver.restart()
    assert shown(driver) == {("u", 0): 2}
    driver.topics = type(driver.topics)({"t": 1})
    driver.restart()
    assert shown(driver) == {}


def test_delete_of_offsets_and_groups() -> None:
    driver = GroupDriver({"t": 2, "u": 1})
    driver.commit({(T, 0): 5, (U, 0): 6})
    stream = driver.join("a", "t")
    call = Stream()

    def asked(*names: str) -> DeleteOffsets:
        partitions = [group_pb2.TopicPartitions(topic=name, partitions=[0]) for name in names]
        return DeleteOffsets(call, group_pb2.DeleteOffsetsRequest(group_id="g", partitions=partitions))

    driver.decide(asked("t", "u", "v"))
    assert isinstance(call.last, group_pb2.DeleteOffsetsResponse)
    assert errors(call.last.results) == [
        common_pb2.GROUP_SUBSCRIBED_TO_TOPIC,
        0,
        common_pb2.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert shown(driver) == {("t", 0): 5}

    def deleted() -> int:
        driver.decide(DeleteGroup(call, "g"))
        result = call.got[-1]
        assert isinstance(result, group_pb2.CommitOffsetResult)
        return result.error.code

    assert deleted() == common_pb2.NON_EMPTY_GROUP
    driver.leave(stream)
    assert deleted() == 0
    assert deleted() == common_pb2.GROUP_ID_NOT_FOUND
    driver.restart()
    assert not driver.core.groups
    driver.decide(DeleteOffsets(call, group_pb2.DeleteOffsetsRequest(group_id="g")))
    assert isinstance(call.got[-1], GroupIdNotFound)


def test_who_is_away_keeps_a_group_from_being_deleted_and_is_named() -> None:
    driver = GroupDriver({"t": 1})
    stream = driver.join("m", "t", instance="worker-1")
    call = Stream()

    def refusal() -> str:
        driver.decide(DeleteGroup(call, "g"))
        result = call.got[-1]
        assert isinstance(result, group_pb2.CommitOffsetResult)
        assert result.error.code == common_pb2.NON_EMPTY_GROUP
        return result.error.message

    assert refusal() == "the group 'g' has 1 member; stop it first"
    driver.leave(stream, keep=True)
    assert refusal().endswith("(worker-1 is away, and in the group until the session timeout is over)")


def test_groups_are_listed_by_state() -> None:
    driver = GroupDriver({"t": 1})
    driver.commit({(T, 0): 1}, group_id="b")
    driver.join("m", "t", group_id="a")

    def listed(*states: group_pb2.GroupState.ValueType) -> list[tuple[str, int, int]]:
        call = Stream()
        driver.decide(ListGroups(call, group_pb2.ListGroupsRequest(states=states)))
        assert isinstance(call.last, group_pb2.ListGroupsResponse)
        return [(group.group_id, group.state, group.members) for group in call.last.groups]

    assert listed() == [("a", group_pb2.STABLE, 1), ("b", group_pb2.EMPTY, 0)]
    assert listed(group_pb2.EMPTY) == [("b", group_pb2.EMPTY, 0)]


RECORDS_A_PIECE = 250


def commit_of(count: int, group_id: str = "g", **member: object) -> group_pb2.CommitOffsetsRequest:
    offsets = [group_pb2.CommitOffset(topic="t", partition=number, offset=number) for number in range(count)]
    return group_pb2.CommitOffsetsRequest(group_id=group_id, offsets=offsets, **({"member_epoch": -1} | member))  # type: ignore[arg-type] # fields


def pieces(driver: GroupDriver, command: Command) -> list[Decision]:
    """Play a command piece by piece."""
    decisions: list[Decision] = []
    rest: object = command
    while rest is not None:
        decision = driver._apply(driver.core.decide(rest, driver.now))  # type: ignore[arg-type] # the core's own
        decisions.append(decision)
        rest = decision.rest
    return decisions


def test_a_large_commit_is_decided_in_pieces_and_answered_once() -> None:
    driver, call = GroupDriver({"t": 1000}), Stream()
    decisions = pieces(driver, CommitOffsets(call, commit_of(1000)))
    assert max(len(decision.records) for decision in decisions) <= answers.PIECE
    (answer,) = call.got
    assert isinstance(answer, group_pb2.CommitOffsetsResponse)
    assert len(answer.results) == 1000
    assert not any(result.HasField("error") for result in answer.results)
    assert len(driver.core.groups["g"].offsets) == 1000


def test_what_is_left_of_a_large_commit_is_refused_when_its_member_is_gone_meanwhile() -> None:
    driver, call = GroupDriver({"t": 250}), Stream()
    member = driver.join("a", "t")
    driver.follow(member)
    first = driver._apply(
        driver.core.decide(CommitOffsets(call, commit_of(250, member_id="a", member_epoch=1)), driver.now)
    )
    assert isinstance(first.rest, Rest)
    driver.leave(member)
    driver._apply(driver.core.decide(first.rest, driver.now))
    (answer,) = call.got
    assert isinstance(answer, group_pb2.CommitOffsetsResponse)
    refused = [result.error.code == UnknownMemberId.code for result in answer.results]
    assert refused == [False] * answers.PIECE + [True] * (250 - answers.PIECE)


def test_offsets_are_read_and_a_group_is_deleted_in_pieces() -> None:
    driver, call = GroupDriver({"t": 350}), Stream()
    pieces(driver, CommitOffsets(call, commit_of(350)))
    asked = group_pb2.FetchOffsetsRequest(group_id="g", member_epoch=-1, all=True)
    assert len(pieces(driver, FetchOffsets(call, asked))) == 4
    answer = call.last
    assert isinstance(answer, group_pb2.FetchOffsetsResponse)
    assert [(shown.partition, shown.offset) for shown in answer.offsets] == [(n, n) for n in range(350)]
    decisions = pieces(driver, DeleteGroup(call, "g"))
    assert max(len(decision.records) for decision in decisions) <= answers.PIECE + 1
    assert not driver.core.groups


def test_long_members_are_described_few_at_a_time_and_within_the_room() -> None:
    driver = GroupDriver({"t": 1})
    for number in range(30):
        driver.join(f"m{number:02d}", *(f"{number:02d}-{each:0240d}" for each in range(100)))
    one_bytes = driver.described().members[0].ByteSize()
    room, call = DescriptionRoom(30 * one_bytes + 100), Stream()
    share = DescriptionShare(room)
    described = pieces(driver, DescribeGroup(call, "g", share))
    assert len(described) >= 30 * one_bytes // (answers.PIECE_BYTES + one_bytes)
    assert isinstance(call.last, group_pb2.GroupDescription)
    assert len(call.last.members) == 30
    refused = Stream()
    pieces(driver, DescribeGroup(refused, "g", DescriptionShare(room)))
    assert isinstance(refused.last, BrokerOverloaded)
    share.give_back()
    with pytest.raises(BrokerOverloaded, match="at most"):
        driver.described(max_bytes=29 * one_bytes)


@pytest.mark.parametrize(
    "check",
    [
        lambda: check_offsets(commit_of(MAX_PARTITIONS + 1).offsets),
        lambda: check_partitions([group_pb2.TopicPartitions(topic="t", partitions=range(MAX_PARTITIONS + 1))]),
        lambda: check_partitions([group_pb2.TopicPartitions()] * (MAX_PARTITIONS + 1)),
    ],
)
def test_what_is_about_too_much_is_refused_and_told_to_split(check: Callable[[], None]) -> None:
    with pytest.raises(InvalidRequestError, match="split it into several"):
        check()


def test_what_names_a_partition_twice_is_refused() -> None:
    check_offsets(commit_of(MAX_PARTITIONS).offsets)
    check_partitions([group_pb2.TopicPartitions(topic="t", partitions=range(MAX_PARTITIONS))])
    with pytest.raises(InvalidRequestError, match="two offsets of one partition"):
        check_offsets([group_pb2.CommitOffset(topic="t", partition=3)] * 2)
    with pytest.raises(InvalidRequestError, match="a partition twice"):
        check_partitions([group_pb2.TopicPartitions(topic="t", partitions=[3, 3])])


def test_a_member_reads_no_more_than_it_has() -> None:
    driver = GroupDriver({"t": 4})
    member = driver.join("a", "t")
    driver.heartbeat(member, 1, [(b"x" * 16, number) for number in range(5)])
    assert isinstance(member.error, FencedMemberEpoch)
    again = driver.join("a", "t", epoch=1, owned=[(b"x" * 16, number) for number in range(5)])
    assert isinstance(again.error, FencedMemberEpoch)


def loaded(groups: int, offsets: int, *, retention_ms: int = 60_000) -> GroupDriver:
    """A coordinator of many groups without members."""
    driver = GroupDriver({"t": 1000}, GroupConfig(offsets_retention_ms=retention_ms))
    core = GroupCoordinator(driver.config, driver.topics, BUILT_IN)
    for number in range(groups):
        core.replay(*head_record(f"g{number:05d}", Head(1, 1, "sticky", WALL_MS, {T: 10}, ())))
        for partition in range(offsets):
            record = offset_record(f"g{number:05d}", (T, partition), Committed(5, 1, "", WALL_MS, "t"))
            core.replay(*record)
    driver.core = core
    core.loaded(driver.now)
    return driver


def slices(driver: GroupDriver) -> list[Decision]:
    """Do what is due, one call at a time."""
    decisions = []
    while (due_ms := driver.core.next_deadline_ms()) is not None and due_ms <= driver.now_ms:
        decisions.append(driver._apply(driver.core.on_time(driver.now)))
    return decisions


def test_a_load_with_many_groups_is_looked_through_in_slices() -> None:
    """70 000 groups stopped the loop for longer than a broker's session, and the same happened to the next leader."""
    driver = loaded(5000, 1)
    assert len(slices(driver)) >= 5000 * coordinator.GROUP_WORK / coordinator.MAX_WORK


def test_groups_with_members_begin_in_slices_and_who_is_back_before_has_its_session() -> None:
    before = GroupDriver({"t": 4})
    for number in range(200):
        stream = before.join("m", "t", group_id=f"g{number}")
        before.follow(stream, f"g{number}")
    core = GroupCoordinator(before.config, before.topics, BUILT_IN)
    for record in before.log:
        core.replay(*record)
    before.core = core
    core.loaded(before.now)
    back = before.join("m", "t", group_id="g199", epoch=1, owned={(T, n) for n in range(4)})
    assert len(partitions_of(back.assignment)) == 4
    begun = [group_id for group_id in core.groups if group_id in core._soft]
    assert len(begun) == 200, "a join must finish what the load has left for later, for all 200 groups"
    before.wait(14_000)
    before.heartbeat(back, 1, group_id="g199")
    before.wait(2_000)
    assert [group_id for group_id, group in core.groups.items() if group.members] == ["g199"]


def test_offsets_expire_in_slices() -> None:
    driver = loaded(300, 30)
    slices(driver)
    driver.now_ms = 1_000_000.0
    decisions = slices(driver)
    assert not driver.core.groups
    assert max(len(decision.records) for decision in decisions) <= 2 * RECORDS_A_PIECE


def test_offsets_of_a_deleted_topic_go_in_slices() -> None:
    driver = loaded(300, 30)
    slices(driver)
    driver.topics = type(driver.topics)({"u": 1})
    assert not driver.core.on_topics(driver.topics, driver.now).records
    decisions = slices(driver)
    assert max(len(decision.records) for decision in decisions) <= 2 * RECORDS_A_PIECE
    assert not any(group.offsets for group in driver.core.groups.values())


def test_a_topic_that_grows_under_many_groups_concerns_them_in_slices() -> None:
    driver = GroupDriver({"t": 1})
    streams = {f"g{number}": driver.join("m", "t", group_id=f"g{number}") for number in range(150)}
    driver.topics = type(driver.topics)({"t": 2})
    assert not driver.core.on_topics(driver.topics, driver.now).records
    decisions = slices(driver)
    assert max(len(decision.records) for decision in decisions) <= 2 * RECORDS_A_PIECE
    assert all(len(partitions_of(stream.assignment)) == 2 for stream in streams.values())


def test_groups_are_listed_in_slices_by_id() -> None:
    driver, call = loaded(1000, 1), Stream()
    assert len(pieces(driver, ListGroups(call, group_pb2.ListGroupsRequest()))) == 5
    (answer,) = call.got
    assert isinstance(answer, group_pb2.ListGroupsResponse)
    assert [group.group_id for group in answer.groups] == [f"g{number:05d}" for number in range(1000)]


def test_nothing_is_kept_of_groups_that_are_gone() -> None:
    """Console consumers come and go: each left its id for as long as the coordinator lived."""
    core = loaded(0, 0).core
    for number in range(1000):
        key, value = offset_record(f"g{number}", (T, 0), Committed(5, 1, "", WALL_MS, "t"))
        core.replay(key, value)
        core.replay(key, value)
        core.replay(key, None)
    assert not core.groups
    assert len(core._committed) == 0
    core.replay(*offset_record("h", (T, 0), Committed(5, 1, "", WALL_MS, "t")))
    core.replay(*offset_record("h", (T, 1), Committed(5, 1, "", WALL_MS, "t")))
    core.replay(*offset_record("h", (T, 0), None))
    assert len(core._committed) == 1


# Heartbeats that reveal nothing


def echoed(driver: GroupDriver, stream: Stream, **fields: object) -> object:
    request = group_pb2.GroupHeartbeat(**fields)  # type: ignore[arg-type] # fields
    return driver.core.at_once(Heartbeat(stream, "g", stream.name, request), driver.now)


def test_a_mere_heartbeat_is_answered_at_once_with_what_the_member_said_and_renews_its_session() -> None:
    driver = GroupDriver({"t": 4})
    member = driver.join("a", "t")
    driver.follow(member)
    for _ in range(5):
        driver.wait(10_000)
        answer = echoed(driver, member, member_epoch=1)
        assert answer == group_pb2.GroupResponse(heartbeat=group_pb2.HeartbeatAnswer(member_epoch=1))
    driver.wait(15_001)
    assert isinstance(member.error, UnknownMemberId)
    assert echoed(driver, member, member_epoch=1) is None


def test_what_says_or_reveals_more_is_decided_in_its_turn() -> None:
    driver = GroupDriver({"t": 4})
    member = driver.join("a", "t")
    driver.follow(member)
    assert echoed(driver, member, member_epoch=2) is None, (
        "the member must get no immediate answer, as its epoch is wrong"
    )
    assert echoed(driver, Stream("a"), member_epoch=1) is None, (
        "the member must get no immediate answer over another stream"
    )
    assert echoed(driver, member, member_epoch=1, owned=group_pb2.Owned()) is None
    assert echoed(driver, member, member_epoch=1, subscription=group_pb2.Subscription(topics=["t"])) is None
    driver.join("b", "t")
    assert echoed(driver, member, member_epoch=1) is None, (
        "the member must get no immediate answer, as it has a partition to release"
    )
    driver.restart()
    assert echoed(driver, member, member_epoch=1) is None, (
        "the member must get no immediate answer before it has come back to the new coordinator"
    )


# Time to let go


def test_who_lets_everything_go_in_time_stays_although_rebalances_follow_each_other() -> None:
    """It was expelled one rebalance timeout after the first of them."""
    driver = GroupDriver({"t": 64}, GroupConfig(rebalance_timeout_ms=10_000))
    slow = driver.join("a", "t")
    driver.follow(slow)
    has = [(T, number) for number in range(64)]
    others: list[Stream] = []
    told: list[tuple[float, set[tuple[str, int]]]] = [(0.0, {("t", n) for n in range(64)})]
    for second in range(60):
        if second % 4 == 0:
            others.append(driver.join(f"m{second:02d}", "t"))
        driver.wait(1000)
        if partitions_of(slow.assignment) != told[-1][1]:
            told.append((driver.now_ms, partitions_of(slow.assignment)))
        # It reads each partition for 6 s after it was asked to let it go, of 10 that it has.
        reads = [said for at, said in told if at <= driver.now_ms - 6000][-1:] or [told[0][1]]
        has = [(T, n) for n in range(64) if ("t", n) in reads[0]]
        driver.heartbeat(slow, slow.assignment.member_epoch, has)
        assert not isinstance(slow.last, RaftlogError), (second, slow.last)
        for other in others:
            if other.assignments:
                driver.heartbeat(
                    other, other.assignment.member_epoch, {(T, n) for _, n in partitions_of(other.assignment)}
                )


def test_who_keeps_one_partition_too_long_is_expelled_whatever_else_it_lets_go() -> None:
    driver = GroupDriver({"t": 8}, GroupConfig(rebalance_timeout_ms=10_000))
    member = driver.join("a", "t")
    driver.follow(member)
    driver.join("b", "t")
    kept = min({("t", n) for n in range(8)} - partitions_of(member.assignment))
    for second in range(10):
        driver.wait(1000)
        if isinstance(member.last, RaftlogError):
            break
        if second == 4:
            driver.join("c", "t")
        owned = {(T, n) for _, n in {*partitions_of(member.assignment), kept}}
        driver.heartbeat(member, 1, owned)
    driver.wait(1000)
    assert isinstance(member.error, FencedMemberEpoch)
