"""Nobody's request, and no number of groups, takes the event loop for long: work comes in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker.groups import answers, coordinator
from broker.groups.answers import Rest
from broker.groups.assignors import BUILT_IN
from broker.groups.checks import MAX_PARTITIONS, check_offsets, check_partitions
from broker.groups.commands import Command, CommitOffsets, Decision, DeleteGroup, FetchOffsets, Heartbeat, ListGroups
from broker.groups.config import GroupConfig
from broker.groups.coordinator import GroupCoordinator
from broker.groups.group import Committed, Head
from broker.groups.records import head_record, offset_record
from raftlog.errors import FencedMemberEpoch, InvalidRequestError, RaftlogError, UnknownMemberId
from raftlog.v1 import group_pb2
from tests.support.group_driver import WALL_MS, GroupDriver, Stream, partitions_of, topic_id

T = topic_id("t")
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
    assert len(begun) == 200, "`join` settles"
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
    assert echoed(driver, member, member_epoch=2) is None, "it is fenced"
    assert echoed(driver, Stream("a"), member_epoch=1) is None, "another stream's"
    assert echoed(driver, member, member_epoch=1, owned=group_pb2.Owned()) is None
    assert echoed(driver, member, member_epoch=1, subscription=group_pb2.Subscription(topics=["t"])) is None
    driver.join("b", "t")
    assert echoed(driver, member, member_epoch=1) is None, "it has to let something go"
    driver.restart()
    assert echoed(driver, member, member_epoch=1) is None, "it is not back yet"


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
