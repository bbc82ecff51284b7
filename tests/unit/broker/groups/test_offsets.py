"""Committed offsets: who may commit what, and when they are forgotten."""

from __future__ import annotations

import pytest

from broker.groups.commands import CommitOffsets, DeleteGroup, DeleteOffsets, ListGroups
from broker.groups.config import GroupConfig
from raftlog.errors import FencedMemberEpoch, GroupIdNotFound, UnknownMemberId
from raftlog.v1 import common_pb2, group_pb2
from tests.support.group_driver import GroupDriver, Stream, topic_id

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
    assert errors(driver.commit({(T, 0): 6, (T, 1): 7}, "a", 1).results) == [0, 0], "before it has let go"
    driver.follow(first)
    driver.follow(second)
    (mine,) = first.assignment.topics[0].partitions
    (theirs,) = second.assignment.topics[0].partitions
    assert errors(driver.commit({(T, mine): 8, (T, theirs): 8}, "a", 2).results) == [0, common_pb2.PARTITION_NOT_OWNED]
    assert errors(driver.commit({(T, mine): 7}, "a", 1).results) == [0], "its own since epoch 1; back is legal"
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
    assert driver.committed().offsets, "six days, and a coordinator that has just begun"
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
