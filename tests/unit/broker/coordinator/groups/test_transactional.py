"""Offsets of transactions: pending until the marker, then committed or dropped; and which producers may send them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.coordinator.groups import transactional
from broker.coordinator.groups.checks import MAX_PRODUCER_EPOCH, check_transaction_offsets
from broker.coordinator.groups.commands import (
    DeleteGroup,
    DeleteOffsets,
    EndTransactionOffsets,
    GroupConfig,
    ListGroups,
)
from broker.coordinator.groups.coordinator import GroupCoordinator
from broker.coordinator.groups.group import Committed, Fence, Pending
from broker.coordinator.groups.records import fence_record, pending_record
from raftlog.errors import (
    BrokerOverloaded,
    ConcurrentTransactions,
    FencedInstanceId,
    FencedMemberEpoch,
    GroupIdNotFound,
    InvalidProducerEpoch,
    InvalidRequestError,
    UnknownMemberId,
)
from raftlog.v1 import common_pb2, group_pb2
from tests.support.group_driver import GroupDriver, Stream, topic_id

T, U = topic_id("t"), topic_id("u")
P = (7, 0)
"""A producer, and the epoch of its first transaction."""
DAY_MS = 24 * 60 * 60 * 1000.0


def errors(results: object) -> list[int]:
    """Return the error codes of results; 0: none."""
    return [result.error.code for result in results]  # type: ignore[attr-defined] # repeated results


def shown(driver: GroupDriver, group_id: str = "g") -> dict[tuple[str, int], int]:
    return {(offset.topic, offset.partition): offset.offset for offset in driver.committed(group_id).offsets}


def unstable(driver: GroupDriver) -> list[tuple[str, int]]:
    """Return the partitions whose offsets may still change, as a request for stable offsets finds them."""
    return [
        (offset.topic, offset.partition)
        for offset in driver.committed(stable=True).offsets
        if offset.error.code == common_pb2.UNSTABLE_OFFSET_COMMIT
    ]


def test_pending_offsets_become_the_groups_with_the_marker_of_a_commit() -> None:
    driver = GroupDriver({"t": 4})
    driver.commit({(T, 0): 1, (T, 2): 2})
    assert errors(driver.commit_in_transaction(P, {(T, 0): 5, (T, 1): 6}).results) == [0, 0]
    assert shown(driver) == {("t", 0): 1, ("t", 2): 2}
    assert unstable(driver) == [("t", 0), ("t", 1)]
    driver.restart()
    assert shown(driver) == {("t", 0): 1, ("t", 2): 2}
    assert unstable(driver) == [("t", 0), ("t", 1)]
    driver.mark(P, commit=True)
    assert shown(driver) == {("t", 0): 5, ("t", 1): 6, ("t", 2): 2}
    assert unstable(driver) == []
    driver.restart()
    assert shown(driver) == {("t", 0): 5, ("t", 1): 6, ("t", 2): 2}


def test_the_last_offset_sent_in_a_transaction_counts() -> None:
    driver = GroupDriver({"t": 1})
    driver.commit_in_transaction(P, {(T, 0): 5})
    driver.commit_in_transaction(P, {(T, 0): 9})
    driver.mark(P, commit=True)
    assert shown(driver) == {("t", 0): 9}


def test_a_marker_may_come_again_and_too_late() -> None:
    driver = GroupDriver({"t": 2})
    driver.commit_in_transaction(P, {(T, 0): 5})
    assert driver.mark(P, commit=True).records
    driver.commit_in_transaction((7, 1), {(T, 0): 9})
    assert not driver.mark(P, commit=True).records, (
        "a repeated marker must write nothing, though the next transaction is open by now"
    )
    driver.mark((7, 1), commit=False)
    driver.commit_in_transaction((7, 2), {(T, 1): 4})
    for late in (P, (7, 1)):
        for commit in (True, False):
            assert not driver.mark(late, commit=commit).records
    assert shown(driver) == {("t", 0): 5}
    assert unstable(driver) == [("t", 1)]
    driver.mark((7, 2), commit=True)
    assert shown(driver) == {("t", 0): 5, ("t", 1): 4}


def test_offsets_of_a_transaction_that_has_ended_are_refused() -> None:
    driver = GroupDriver({"t": 2})
    driver.commit_in_transaction(P, {(T, 0): 5})
    driver.mark(P, commit=True)
    with pytest.raises(InvalidProducerEpoch, match="of producer 7 with epoch 0 has ended for the group 'g'"):
        driver.commit_in_transaction(P, {(T, 0): 9})
    driver.restart()
    with pytest.raises(InvalidProducerEpoch):
        driver.commit_in_transaction(P, {(T, 0): 9})
    assert shown(driver) == {("t", 0): 5}
    driver.commit_in_transaction((7, 1), {(T, 0): 9})
    assert unstable(driver) == [("t", 0)]


def test_offsets_below_the_epoch_that_is_open_are_refused() -> None:
    driver = GroupDriver({"t": 2})
    driver.commit_in_transaction((7, 2), {(T, 0): 9})
    with pytest.raises(InvalidProducerEpoch, match="open in epoch 2, and this is of 1"):
        driver.commit_in_transaction((7, 1), {(T, 0): 5})
    driver.mark((7, 2), commit=True)
    assert shown(driver) == {("t", 0): 9}


def test_a_marker_fences_a_group_that_has_heard_nothing_of_the_transaction() -> None:
    driver = GroupDriver({"t": 2})
    driver.mark(P, commit=False)
    with pytest.raises(InvalidProducerEpoch):
        driver.commit_in_transaction(P, {(T, 0): 5})
    assert driver.described().state == group_pb2.DEAD
    assert driver.described().error.code == common_pb2.GROUP_ID_NOT_FOUND
    assert _listed(driver) == []
    with pytest.raises(GroupIdNotFound):
        _delete_offsets(driver, ("t", 0))
    assert _delete(driver) == common_pb2.GROUP_ID_NOT_FOUND
    driver.restart()
    assert driver.core.groups["g"].fences.keys() == {7}


def test_a_later_transaction_waits_for_the_marker_of_the_one_before() -> None:
    driver = GroupDriver({"t": 2})
    driver.commit_in_transaction(P, {(T, 0): 5})
    with pytest.raises(ConcurrentTransactions, match="with epoch 0 is not known to the group 'g' yet; try again"):
        driver.commit_in_transaction((7, 1), {(T, 1): 6})
    driver.mark(P, commit=True)
    driver.commit_in_transaction((7, 1), {(T, 1): 6})
    driver.mark((7, 1), commit=True)
    assert shown(driver) == {("t", 0): 5, ("t", 1): 6}


def test_what_a_transaction_left_that_never_named_the_group_is_not_committed_by_a_later_one() -> None:
    driver = GroupDriver({"t": 2})
    driver.commit_in_transaction(P, {(T, 0): 5})
    driver.mark((7, 3), commit=True)
    assert shown(driver) == {}
    assert unstable(driver) == []
    driver.restart()
    assert not driver.core.groups["g"].pending


def test_the_last_epoch_of_a_producer_id() -> None:
    driver = GroupDriver({"t": 2})
    last = (7, MAX_PRODUCER_EPOCH)
    driver.commit_in_transaction(last, {(T, 0): 5})
    driver.mark(last, commit=True)
    assert shown(driver) == {("t", 0): 5}
    with pytest.raises(InvalidProducerEpoch):
        driver.commit_in_transaction(last, {(T, 0): 6})


def test_producers_do_not_end_each_others_transactions() -> None:
    driver = GroupDriver({"t": 4})
    driver.commit_in_transaction((1, 4), {(T, 0): 10, (T, 1): 11})
    driver.commit_in_transaction((2, 0), {(T, 2): 22})
    driver.mark((1, 4), commit=True)
    assert shown(driver) == {("t", 0): 10, ("t", 1): 11}
    assert unstable(driver) == [("t", 2)]
    driver.mark((2, 0), commit=False)
    assert shown(driver) == {("t", 0): 10, ("t", 1): 11}


@pytest.mark.parametrize("step_ms", [0, 5, -5])
def test_the_offset_that_was_sent_last_counts_whenever_transactions_end(step_ms: int) -> None:
    """Kafka goes by the order of the commits' records as well. The clock may stand, or be set back."""
    driver = GroupDriver({"t": 1})
    driver.now_ms = 1_000

    def sent() -> None:
        driver.now_ms += step_ms

    driver.commit_in_transaction((1, 0), {(T, 0): 10})
    sent()
    driver.commit_in_transaction((2, 0), {(T, 0): 20})
    sent()
    driver.mark((2, 0), commit=True)
    driver.mark((1, 0), commit=True)
    assert shown(driver) == {("t", 0): 20}
    driver.commit_in_transaction((1, 1), {(T, 0): 30})
    sent()
    driver.commit({(T, 0): 7})
    driver.mark((1, 1), commit=True)
    assert shown(driver) == {("t", 0): 7}, "an offset that was committed later than that of the transaction must stay"
    driver.commit({(T, 0): 8})
    sent()
    driver.commit_in_transaction((1, 2), {(T, 0): 40})
    driver.mark((1, 2), commit=True)
    assert shown(driver) == {("t", 0): 40}


def test_members_are_fenced_as_with_any_commit() -> None:
    driver = GroupDriver({"t": 2})
    first = driver.join("a", "t", instance="i")
    driver.follow(first)
    with pytest.raises(UnknownMemberId, match="send them with the consumer's group metadata"):
        driver.commit_in_transaction(P, {(T, 0): 5})
    with pytest.raises(UnknownMemberId):
        driver.commit_in_transaction(P, {(T, 0): 5}, "b", 1)
    with pytest.raises(FencedMemberEpoch):
        driver.commit_in_transaction(P, {(T, 0): 5}, "a", 2)
    with pytest.raises(FencedInstanceId, match="'i' of 'g' is another member now"):
        second = driver.join("b", "t")
        driver.follow(first)
        driver.follow(second)
        driver.commit_in_transaction(P, {(T, 0): 5}, "b", 2, instance="i")
    (mine,) = first.assignment.topics[0].partitions
    (theirs,) = second.assignment.topics[0].partitions
    sent = {(T, mine): 5, (T, theirs): 6}
    assert errors(driver.commit_in_transaction(P, sent, "a", 2, instance="i").results) == [
        0,
        common_pb2.PARTITION_NOT_OWNED,
    ]
    assert errors(driver.commit_in_transaction(P, {(T, theirs): 6}, "b", 1).results) == [common_pb2.STALE_MEMBER_EPOCH]
    driver.mark(P, commit=True)
    assert shown(driver) == {("t", mine): 5}


def test_a_member_that_left_before_the_marker_has_committed_all_the_same() -> None:
    driver = GroupDriver({"t": 1})
    stream = driver.join("a", "t")
    driver.follow(stream)
    driver.commit_in_transaction(P, {(T, 0): 5}, "a", 1)
    driver.leave(stream)
    assert unstable(driver) == [("t", 0)]
    driver.mark(P, commit=True)
    assert shown(driver) == {("t", 0): 5}


def test_bad_offsets_are_refused_one_by_one() -> None:
    driver = GroupDriver({"t": 2})
    answer = driver.commit_in_transaction(P, {(T, 0): 5, (T, 2): 1, (b"x" * 16, 0): 1, (T, 1): -1})
    assert errors(answer.results) == [
        0,
        common_pb2.UNKNOWN_TOPIC_OR_PARTITION,
        common_pb2.UNKNOWN_TOPIC_ID,
        common_pb2.INVALID_REQUEST,
    ]
    driver.mark(P, commit=True)
    assert shown(driver) == {("t", 0): 5}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"transactional_id": ""}, "1 to 255 characters, this one has 0"),
        ({"transactional_id": "x" * 256}, "this one has 256"),
        ({"producer_id": -1}, "not -1 and 0"),
        ({"producer_epoch": -1}, "not 7 and -1"),
        ({"producer_epoch": 32_767}, "not 7 and 32767"),
    ],
)
def test_requests_that_are_no_transactions(fields: dict[str, object], why: str) -> None:
    known: dict[str, object] = {"group_id": "g", "transactional_id": "id", "producer_id": 7, "producer_epoch": 0}
    good = group_pb2.CommitTransactionOffsetsRequest(**known)  # type: ignore[arg-type] # by name
    check_transaction_offsets(good)
    with pytest.raises(InvalidRequestError, match=why):
        check_transaction_offsets(
            group_pb2.CommitTransactionOffsetsRequest(**known | fields)  # type: ignore[arg-type] # by name
        )
    good.offsets.add(topic="t", offset=1)
    good.offsets.add(topic="t", offset=2)
    with pytest.raises(InvalidRequestError, match="two offsets of one partition"):
        check_transaction_offsets(good)


def test_made_up_producer_ids_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactional, "MAX_TRANSACTIONS", 3)
    driver = GroupDriver({"t": 4})
    for producer_id in range(3):
        driver.commit_in_transaction((producer_id, 0), {(T, 0): producer_id})
    with pytest.raises(BrokerOverloaded, match="3 open transactions"):
        driver.commit_in_transaction((3, 0), {(T, 0): 3})
    driver.commit_in_transaction((2, 0), {(T, 1): 3})
    driver.mark((0, 0), commit=False)
    driver.commit_in_transaction((3, 0), {(T, 0): 3})


# What may not touch pending offsets


def _delete_offsets(driver: GroupDriver, *asked: tuple[str, int]) -> list[int]:
    call = Stream()
    partitions = [group_pb2.TopicPartitions(topic=name, partitions=[number]) for name, number in asked]
    driver.decide(DeleteOffsets(call, group_pb2.DeleteOffsetsRequest(group_id="g", partitions=partitions)))
    if isinstance(call.last, group_pb2.DeleteOffsetsResponse):
        return errors(call.last.results)
    raise call.error


def _delete(driver: GroupDriver) -> int:
    call = Stream()
    driver.decide(DeleteGroup(call, "g"))
    assert isinstance(call.last, group_pb2.CommitOffsetResult)
    return call.last.error.code


def _listed(driver: GroupDriver) -> list[str]:
    call = Stream()
    driver.decide(ListGroups(call, group_pb2.ListGroupsRequest()))
    assert isinstance(call.last, group_pb2.ListGroupsResponse)
    return [group.group_id for group in call.last.groups]


def test_a_group_with_pending_offsets_does_not_expire() -> None:
    """PITFALLS: offset expiry tombstones offsets staged by an open transaction (redpanda #31483)."""
    config = GroupConfig(offsets_retention_ms=60_000, offsets_retention_check_interval_ms=5_000)
    driver = GroupDriver({"t": 4}, config)
    driver.commit({(T, 0): 1, (T, 1): 2})
    driver.commit_in_transaction(P, {(T, 0): 5, (T, 2): 6})
    driver.wait(300_000)
    driver.restart()
    driver.wait(300_000)
    assert shown(driver) == {("t", 0): 1, ("t", 1): 2}
    assert unstable(driver) == [("t", 0), ("t", 2)]
    driver.mark(P, commit=False)
    driver.wait(10_000)
    assert shown(driver) == {}, "the offsets must have expired, as no member has committed for ten minutes"
    driver.commit_in_transaction((7, 1), {(T, 0): 5, (T, 2): 6})
    driver.wait(55_000)
    driver.mark((7, 1), commit=True)
    assert shown(driver) == {("t", 0): 5, ("t", 2): 6}


def test_a_group_with_pending_offsets_is_there_and_not_deleted() -> None:
    driver = GroupDriver({"t": 4})
    driver.commit({(T, 1): 1})
    driver.commit_in_transaction(P, {(T, 0): 5})
    assert _listed(driver) == ["g"]
    assert driver.described().state == group_pb2.EMPTY
    assert _delete(driver) == common_pb2.NON_EMPTY_GROUP
    assert _delete_offsets(driver, ("t", 0), ("t", 1)) == [common_pb2.UNSTABLE_OFFSET_COMMIT, 0]
    driver.mark(P, commit=True)
    assert shown(driver) == {("t", 0): 5}
    assert _delete(driver) == 0
    with pytest.raises(InvalidProducerEpoch):
        driver.commit_in_transaction(P, {(T, 0): 5})
    assert _listed(driver) == []


def test_a_group_of_nothing_but_pending_offsets_is_there() -> None:
    driver = GroupDriver({"t": 4})
    driver.commit_in_transaction(P, {(T, 0): 5})
    driver.restart()
    assert _listed(driver) == ["g"]
    assert _delete(driver) == common_pb2.NON_EMPTY_GROUP
    assert _delete_offsets(driver, ("t", 0)) == [common_pb2.UNSTABLE_OFFSET_COMMIT]
    driver.mark(P, commit=False)
    assert _listed(driver) == []


def test_pending_offsets_of_a_deleted_topic_are_not_committed() -> None:
    driver = GroupDriver({"t": 1, "u": 1})
    driver.commit_in_transaction(P, {(T, 0): 5, (U, 0): 6})
    driver.change_topics({"t": 1})
    driver.mark(P, commit=True)
    assert shown(driver) == {("t", 0): 5}
    driver.restart()
    assert not driver.core.groups["g"].pending
    assert shown(driver) == {("t", 0): 5}


def test_fences_are_forgotten_after_a_while() -> None:
    config = GroupConfig(producer_id_expiration_ms=3_600_000, offsets_retention_ms=-1)
    driver = GroupDriver({"t": 4}, config)
    stream = driver.join("a", "t")
    driver.follow(stream)
    for producer_id in range(500):
        driver.mark((producer_id, 0), commit=True)
    driver.wait(1_800_000)
    driver.mark((499, 1), commit=True)
    driver.restart()
    driver.wait(2_400_000)
    assert driver.core.groups["g"].fences.keys() == {499}
    driver.wait(3_600_000)
    assert "g" not in driver.core.groups or not driver.core.groups["g"].fences
    driver.restart()
    assert "g" not in driver.core.groups or not driver.core.groups["g"].fences


def test_a_fence_of_a_time_when_the_clock_was_ahead_keeps_no_others() -> None:
    """It is the first one for as long as the clock is behind it, and newer ones are not forgotten before it."""
    driver = GroupDriver({"t": 4})
    driver.follow(driver.join("a", "t"))
    driver.wall_ahead_ms = 365 * int(DAY_MS)
    driver.mark((7, 0), commit=True)
    driver.wall_ahead_ms = 0
    driver.mark((8, 0), commit=True)
    driver.wait(DAY_MS * 1.1)
    assert driver.core.groups["g"].fences.keys() == {7}


def test_a_group_of_which_only_fences_are_left_goes_with_them() -> None:
    driver = GroupDriver({"t": 4})
    driver.mark(P, commit=True)
    driver.wait(DAY_MS * 0.9)
    assert "g" in driver.core.groups
    driver.wait(DAY_MS * 0.2)
    assert "g" not in driver.core.groups
    driver.restart()
    assert "g" not in driver.core.groups


def test_the_fence_of_a_producer_with_pending_offsets_is_kept() -> None:
    driver = GroupDriver({"t": 4})
    driver.mark(P, commit=True)
    driver.mark((8, 0), commit=True)
    driver.commit_in_transaction((7, 1), {(T, 0): 5})
    driver.wait(DAY_MS * 2)
    assert driver.core.groups["g"].fences.keys() == {7}
    driver.mark((7, 1), commit=True)
    assert shown(driver) == {("t", 0): 5}


# In pieces, and half of it


def test_a_large_transaction_is_decided_in_pieces_and_a_cut_is_mended_by_the_next_marker() -> None:
    driver = GroupDriver({"t": 1000})
    sent = {(T, number): number + 1 for number in range(1000)}
    driver.commit_in_transaction(P, sent)
    before = len(driver.log)
    driver.mark(P, commit=True)
    complete = shown(driver)
    assert complete == {("t", number): number + 1 for number in range(1000)}
    for cut in (before, before + 1, before + 2, before + 700, len(driver.log) - 1):
        other = GroupDriver({"t": 1000})
        other.log = driver.log[:cut]
        other.restart()
        if cut > before:
            with pytest.raises(InvalidProducerEpoch):
                other.commit_in_transaction(P, {(T, 0): 0})
        stable = {(each.topic, each.partition): each.offset for each in other.committed(stable=True).offsets}
        assert all(offset in (-1, complete[part]) for part, offset in stable.items())
        assert stable.keys() == complete.keys()
        other.mark(P, commit=True)
        assert shown(other) == complete
        assert not other.core.groups["g"].pending


def test_a_piece_is_small() -> None:
    driver = GroupDriver({"t": 1000})
    driver.commit_in_transaction(P, {(T, number): 1 for number in range(1000)})
    decision = driver.core.decide(EndTransactionOffsets(Stream(), "g", 7, 1, True), driver.now)
    assert decision.rest is not None
    assert len(decision.records) <= 101
    assert not decision.effects


# Records


SENDS = st.tuples(
    st.just("send"), st.integers(0, 2), st.integers(0, 3), st.dictionaries(st.integers(0, 3), st.integers(0, 99))
)
MARKS = st.tuples(st.just("mark"), st.integers(0, 2), st.integers(0, 3), st.booleans())
COMMITS = st.tuples(st.just("commit"), st.dictionaries(st.integers(0, 3), st.integers(0, 99)))
WAITS = st.tuples(st.just("wait"), st.sampled_from([1.0, 1_000.0, 3_600_000.0]))


@given(st.lists(st.one_of(SENDS, MARKS, COMMITS, WAITS), max_size=30), st.data())
def test_the_records_say_all(steps: list[tuple[object, ...]], data: st.DataObject) -> None:
    """After any requests in any order, the log, compacted up to any offset, has the same state as the coordinator."""
    config = GroupConfig(producer_id_expiration_ms=3_000_000, offsets_retention_ms=5_000_000)
    driver = GroupDriver({"t": 4}, config)
    for step in steps:
        match step:
            case ("send", int(producer), int(epoch), dict(offsets)):
                sent = {(T, number): offset for number, offset in offsets.items()}
                with suppress(InvalidProducerEpoch, ConcurrentTransactions):
                    driver.commit_in_transaction((producer, epoch), sent)
            case ("mark", int(producer), int(epoch), bool(commit)):
                driver.mark((producer, epoch), commit=commit)
            case ("commit", dict(offsets)):
                driver.commit({(T, each): offset for each, offset in offsets.items()})
            case ("wait", float(elapsed_ms)):
                driver.wait(elapsed_ms)
        _check(driver)
    upto = data.draw(st.integers(0, len(driver.log)))
    last = {key: index for index, (key, _) in enumerate(driver.log[:upto])}
    kept = [driver.log[index] for index in sorted(last.values())]
    for log in (driver.log, [record for record in kept if record[1] is not None] + driver.log[upto:]):
        other = GroupCoordinator(config, driver.topics, driver.assignors)
        for key, value in log:
            other.replay(key, value)
        assert _state(other) == _state(driver.core)


def _state(core: GroupCoordinator) -> dict[str, dict[str, object]]:
    return {name: vars(group) for name, group in core.groups.items()}


def _check(driver: GroupDriver) -> None:
    for group in driver.core.groups.values():
        for producer_id, pending in group.pending.items():
            assert len({each.producer_epoch for each in pending.values()}) == 1
            epoch = next(iter(pending.values())).producer_epoch
            assert epoch >= group.fences.get(producer_id, Fence(0, 0)).producer_epoch
        at = {(part, producer_id) for producer_id, pending in group.pending.items() for part in pending}
        assert at == {(part, producer_id) for part, ids in group.pending_at.items() for producer_id in ids}


def test_golden_bytes() -> None:
    pending = Pending(Committed(5, -1, "m", 7, "t"), 3)
    assert pending_record("g", 9, (b"i" * 16, 3), pending) == (
        bytes.fromhex("0a01673a1608091210") + b"i" * 16 + bytes.fromhex("1803"),
        bytes.fromhex("080510ffffffffffffffffff011a016d20072a01743003"),
    )
    assert fence_record("g", 0, Fence(4, 9)) == (bytes.fromhex("0a01674000"), bytes.fromhex("08041009"))
