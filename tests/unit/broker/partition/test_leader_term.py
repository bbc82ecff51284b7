"""A partition that leads: when producers are answered, the followers' reports, and the limits of a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.config.config import BrokerConfig
from broker.net.services.log import LogService
from broker.partition.partition import Partition
from broker.quotas.disk_reads import DiskReads
from broker.quotas.heavy_work import HeavyWork
from broker.server.lease import ServingLease
from raftlog.errors import (
    FencedLeaderEpoch,
    InvalidRequestError,
    InvalidUpdateVersion,
    LeaderNotAvailable,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeader,
    OffsetOutOfRange,
    RaftlogError,
    StaleBrokerEpoch,
    UnknownLeaderEpoch,
    UnknownTopicId,
    from_wire,
    to_wire,
)
from raftlog.v1 import log_pb2
from raftmeta.image import MetadataImage
from replication.leader import FULL_LAG_TIME_MAX_MS, Membership
from replication.ports import Accepted, Diverging, OutOfRange, Replica
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, image_with, partition_records
from tests.support.fresh import examples
from tests.support.log_driver import FakeClock
from tests.support.replica_link import settle

Answers = list[BaseException | None]
FOLLOWER = Replica(2, 1)


def no_change() -> None:
    """A stream that need not look."""


def image(offset: int, isr: tuple[int, ...] = (1, 2, 3), *, epoch: int = 3, leader: int = 1) -> MetadataImage:
    return image_with(
        1, offset=offset, leader=leader, leader_epoch=epoch, replicas=(1, 2, 3), isr=isr, partition_epoch=offset
    )


def lead(partition: Partition, isr: tuple[int, ...], *, partition_epoch: int = 1, enough: int = 2) -> None:
    partition.lead(3, Membership((1, 2, 3), isr, partition_epoch, enough))


def produce(partition: Partition, value: bytes = b"v", *, all_replicas: bool = True) -> Answers:
    answers: Answers = []
    partition.append(batch_of(value), 3, answers.append, all_replicas=all_replicas)
    return answers


def opened(partition: Partition, replica: Replica = FOLLOWER, on_change: Callable[[], None] = no_change) -> None:
    """Take a follower on that has everything."""
    end = partition.log_end_offset
    answer = partition.open_replica(
        replica,
        leader_epoch=partition.leader_epoch,
        fetch_offset=end,
        last_fetched_epoch=partition.log.leader_epochs.latest_epoch,
        durable_end_offset=end,
        on_change=on_change,
    )
    assert answer == Accepted()


def run(tmp_path: Path, scenario: Callable[[Parts, Partition], Awaitable[None]]) -> None:
    """Run with partition 0 led by node 1, replicas 1 to 3 in sync, min.insync.replicas=2."""

    async def main() -> None:
        parts = Parts(tmp_path)
        parts.image = image(1)
        async with parts:
            partition = parts.registry.find(TOPIC_ID, 0)
            lead(partition, (1, 2, 3))
            await scenario(parts, partition)

    asyncio.run(main())


def test_all_waits_for_every_replica_in_sync_and_one_for_the_leader_alone(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        opened(partition)
        opened(partition, Replica(3, 1), lambda: None)
        everyone, leader_only = produce(partition), produce(partition, all_replicas=False)
        assert (everyone, leader_only) == ([], []), "no request may be acknowledged before the record is on disk"
        await settle()
        assert (everyone, leader_only) == ([], [None])
        partition.replica_acked(FOLLOWER, no_change, 2)
        assert (everyone, partition.high_watermark) == ([], 0)
        with pytest.raises(FencedLeaderEpoch):
            partition.replica_acked(Replica(3, 1), no_change, 2)
        opened(partition, Replica(3, 1), lambda: None)
        assert (everyone, partition.high_watermark) == ([None], 2)

    run(tmp_path, scenario)


def test_records_are_deleted_once_every_replica_in_sync_says_so(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        produce(partition)
        await settle()
        third = Replica(3, 1)
        opened(partition)
        opened(partition, third, other_change := lambda: None)
        assert partition.is_deleted_in_sync(0)
        assert not partition.is_deleted_in_sync(1), "the leader itself has not deleted it"
        partition.log.delete_records(1)
        partition.replica_acked(FOLLOWER, no_change, 1, 1)
        assert not partition.is_deleted_in_sync(1)
        partition.replica_acked(third, other_change, 1, 1)
        assert partition.is_deleted_in_sync(1)
        opened(partition)
        assert not partition.is_deleted_in_sync(1), "its process may be another one, which has not deleted it"
        lead(partition, (1, 3), partition_epoch=2)
        assert partition.is_deleted_in_sync(1)

    run(tmp_path, scenario)


def test_the_answer_to_delete_records_waits_for_the_followers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        config = BrokerConfig.from_values({"node.id": 1, "log.dirs": str(tmp_path / "unused")})
        service = LogService(parts.registry, config, DiskReads(parts.disk), HeavyWork(parts.disk))

        def delete(before_offset: int) -> asyncio.Task[log_pb2.DeleteRecordsResponse]:
            part = log_pb2.DeleteRecordsPartition(topic_id=TOPIC_ID, partition=0, before_offset=before_offset)
            request = log_pb2.DeleteRecordsRequest(partitions=[part])
            return asyncio.create_task(service.DeleteRecords(request, None))  # type: ignore[arg-type] # not looked at

        lead(partition, (1, 2), partition_epoch=2)
        for _ in range(3):
            produce(partition)
        await settle()
        opened(partition)
        answer = delete(1)
        done, _ = await asyncio.wait([answer], timeout=0.1)
        assert not done, "the follower has not deleted the record"
        partition.replica_acked(FOLLOWER, no_change, 3, 1)
        [result] = (await answer).results
        assert (result.log_start_offset, result.error.code) == (1, 0)

        monkeypatch.setattr("broker.net.services.log.DELETE_WAIT_S", 0.05)
        [result] = (await delete(2)).results
        assert (result.log_start_offset, result.error.code) == (2, 0), "a follower of an earlier version says nothing"

        monkeypatch.setattr("broker.net.services.log.DELETE_WAIT_S", 60.0)
        answer = delete(3)
        await asyncio.wait([answer], timeout=0.1)
        await parts.apply(image(5, epoch=4, leader=2))
        [result] = (await answer).results
        assert isinstance(from_wire(result.error), NotLeader)

    run(tmp_path, scenario)


def test_what_followers_hold_counts_for_nobody_before_the_leader_holds_it(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        lead(partition, (1, 2), partition_epoch=2)
        opened(partition)
        parts.disk.held = True
        answers = produce(partition)
        await settle()
        partition.replica_acked(FOLLOWER, no_change, 1)
        assert (answers, partition.high_watermark) == ([], 0)
        parts.disk.release()
        await settle()
        assert (answers, partition.high_watermark) == ([None], 1)

    run(tmp_path, scenario)


@pytest.mark.parametrize("all_replicas", [True, False])
def test_without_a_lease_nobody_hears_of_what_is_held(tmp_path: Path, all_replicas: bool) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        lead(partition, (1, 2), partition_epoch=2)
        opened(partition)
        answers = produce(partition, all_replicas=all_replicas)
        parts.lease.end()
        await settle()
        partition.replica_acked(FOLLOWER, no_change, 1)
        assert (answers, partition.high_watermark) == ([], 0)
        parts.lease.renew()
        assert (answers, partition.high_watermark) == ([None], 1)

    run(tmp_path, scenario)


def test_too_few_in_sync_refuse_before_and_answer_after_an_append(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        opened(partition)
        answers, leader_only = produce(partition), produce(partition, all_replicas=False)
        lead(partition, (1,), partition_epoch=2)
        assert [type(error) for error in answers] == [NotEnoughReplicasAfterAppend]
        end = partition.log_end_offset
        with pytest.raises(NotEnoughReplicas, match=r"1 replica is in sync, acks=all needs min.insync.replicas=2"):
            produce(partition)
        assert partition.log_end_offset == end
        await settle()
        assert leader_only == [None], "acks=1 must be acknowledged by the leader alone"
        assert partition.high_watermark == 0, (
            "the high watermark must not move while too few replicas are in sync (KIP-966)"
        )
        lead(partition, (1, 2), partition_epoch=3)
        partition.replica_acked(FOLLOWER, no_change, 2)
        assert partition.high_watermark == 2
        assert [type(error) for error in answers] == [NotEnoughReplicasAfterAppend], "the request must be answered once"

    run(tmp_path, scenario)


def test_a_smaller_isr_commits_what_its_members_hold(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        opened(partition)
        answers = produce(partition)
        await settle()
        partition.replica_acked(FOLLOWER, no_change, 1)
        assert answers == []
        lead(partition, (1, 2), partition_epoch=2)
        assert answers == [None]
        lead(partition, (1, 2, 3), partition_epoch=1)
        assert partition.is_live(2)
        assert not partition.is_live(3), "older metadata must be ignored"

    run(tmp_path, scenario)


def test_who_waits_is_refused_with_the_new_leader_however_leadership_is_lost(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        changes: list[int] = []
        opened(partition, on_change=lambda: changes.append(1))
        answers = [produce(partition), produce(partition, all_replicas=False)]
        await parts.apply(image(5, epoch=4, leader=2))
        for (error,) in answers:
            assert isinstance(error, NotLeader)
            assert (error.leader_id, error.leader_epoch, error.host, error.port) == (2, 4, "broker-2", 9092)
        assert changes, "the followers' streams must be woken"
        assert partition.following is not None
        with pytest.raises(NotLeader):
            partition.replica_acked(FOLLOWER, no_change, 1)
        await settle()

    run(tmp_path, scenario)


def test_a_later_term_of_the_same_leader_does_not_answer_for_the_earlier_one(tmp_path: Path) -> None:
    """Others may have led in between, by an image that this broker did not see."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        opened(partition)
        answers = produce(partition)
        await parts.apply(image(5, epoch=7))
        assert [type(error) for error in answers] == [NotLeader]
        with pytest.raises(FencedLeaderEpoch):
            partition.replica_acked(FOLLOWER, no_change, 1)

    run(tmp_path, scenario)


def test_closing_answers_everybody(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        answers = [produce(partition), produce(partition, all_replicas=False)]
        reason = NotLeader("over")
        partition.close(reason)
        assert answers == [[reason], [reason]]
        await settle()
        assert not partition.lead(9, Membership((1,), (1,), 9, 1))
        assert answers == [[reason], [reason]]

    run(tmp_path, scenario)


# A new leader


def test_a_new_leader_tells_nobody_where_the_committed_records_end_before_it_knows(tmp_path: Path) -> None:
    """KIP-207; and a reader that has seen more of the leader before is neither refused nor sent back."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        for _ in range(3):
            produce(partition, all_replicas=False)
        await settle()
        await parts.apply(image(5, (1, 2), epoch=4))
        partition.lead(4, Membership((1, 2, 3), (1, 2), 5, 2))
        assert partition.high_watermark == 0
        with pytest.raises(LeaderNotAvailable):
            partition.check_confirmed()
        for offset in (1, 3, 8):
            read = partition.read(offset, 1000, partition.high_watermark, blocking=False)
            assert read == (b"", offset)
        opened(partition)
        partition.check_confirmed()
        assert partition.high_watermark == 3
        read = partition.read(1, 1000, 3, blocking=False)
        assert read is not None
        assert read.next_offset == 3
        with pytest.raises(OffsetOutOfRange):
            partition.read(8, 1000, 3, blocking=False)

    run(tmp_path, scenario)


def test_a_reader_above_the_high_watermark_waits_for_it(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        produce(partition)
        await settle()
        assert partition.read(1, 1000, partition.high_watermark, blocking=False) == (b"", 1)
        with pytest.raises(OffsetOutOfRange):
            partition.read(2, 1000, partition.high_watermark, blocking=False)

    run(tmp_path, scenario)


def test_a_reader_of_what_was_truncated_is_told_so(tmp_path: Path) -> None:
    """KIP-320."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        for _ in range(3):
            produce(partition)
        partition.check_position(2, 3)
        partition.check_position(2, -1)
        partition.check_position(-1, 0)  # `read` refuses it as out of range
        with pytest.raises(OffsetOutOfRange, match="it was truncated"):
            partition.check_position(5, 2)
        partition.check_position(5, 2, from_follower=True)  # it is only behind
        await settle()

    run(tmp_path, scenario)


# What a follower may claim


def open_with(partition: Partition, replica: Replica = FOLLOWER, **claims: int) -> object:
    values = {"leader_epoch": 3, "fetch_offset": 0, "last_fetched_epoch": -1, "durable_end_offset": 0, **claims}
    return partition.open_replica(replica, on_change=no_change, **values)


@pytest.mark.parametrize(
    ("replica", "claims", "error"),
    [
        (FOLLOWER, {"leader_epoch": 2}, FencedLeaderEpoch),
        (FOLLOWER, {"leader_epoch": 4}, UnknownLeaderEpoch),
        (FOLLOWER, {"leader_epoch": -1}, InvalidRequestError),
        (Replica(9, 1), {}, InvalidRequestError),
        (Replica(1, 1), {}, InvalidRequestError),
        (FOLLOWER, {"fetch_offset": 2, "durable_end_offset": 3, "last_fetched_epoch": 3}, InvalidRequestError),
        (FOLLOWER, {"durable_end_offset": -1}, InvalidRequestError),
        (FOLLOWER, {"fetch_offset": -1}, InvalidRequestError),
        (FOLLOWER, {"fetch_offset": 2, "last_fetched_epoch": 9}, InvalidRequestError),
    ],
)
def test_impossible_claims_are_refused_and_change_nothing(
    tmp_path: Path, replica: Replica, claims: dict[str, int], error: type[RaftlogError]
) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        lead(partition, (1, 2), partition_epoch=2)
        answers = [produce(partition) for _ in range(3)]
        await settle()
        with pytest.raises(error):
            open_with(partition, replica, **claims)
        with pytest.raises(FencedLeaderEpoch):
            partition.replica_acked(replica, no_change, 3)
        assert answers == [[], [], []]

    run(tmp_path, scenario)


def test_an_earlier_life_of_a_follower_is_refused_and_acks_have_bounds(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        lead(partition, (1, 2), partition_epoch=2)
        produce(partition)
        await settle()
        opened(partition, Replica(2, 5))
        with pytest.raises(StaleBrokerEpoch):
            open_with(partition, FOLLOWER, fetch_offset=1, last_fetched_epoch=3)
        with pytest.raises(InvalidRequestError):
            partition.replica_acked(Replica(2, 5), no_change, 2)
        with pytest.raises(FencedLeaderEpoch):
            partition.replica_acked(FOLLOWER, no_change, 1)

    run(tmp_path, scenario)


def test_logs_that_part_are_told_where_and_count_for_nothing(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        for _ in range(3):
            produce(partition)
        await settle()
        assert open_with(partition, fetch_offset=5, last_fetched_epoch=3) == Diverging(3, 3)
        partition.log.high_watermark = 3
        partition.log.delete_records(2)
        assert open_with(partition, fetch_offset=1, last_fetched_epoch=3) == OutOfRange(2)
        with pytest.raises(FencedLeaderEpoch):
            partition.read_for_replica(no_change, 1, 100, blocking=True)

    run(tmp_path, scenario)


def test_a_second_stream_of_a_follower_takes_over_from_the_first(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        woken: list[str] = []

        def first() -> None:
            woken.append("first")

        def second() -> None:
            woken.append("second")

        opened(partition, on_change=first)
        opened(partition, on_change=second)
        assert woken == ["first"]
        with pytest.raises(FencedLeaderEpoch):
            partition.read_for_replica(first, 0, 100, blocking=False)
        partition.close_replica(FOLLOWER, first)
        produce(partition)
        assert woken == ["first", "second"]
        read = partition.read_for_replica(second, 0, 100, blocking=False)
        assert read is not None
        assert len(read.records) > 0
        partition.close_replica(FOLLOWER, second)
        produce(partition)
        assert woken == ["first", "second"]
        await settle()

    run(tmp_path, scenario)


# The ISR


def test_who_has_caught_up_joins_by_its_ack_and_counts_from_then_on(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        await parts.apply(image(2, (1, 2)))
        lead(partition, (1, 2), partition_epoch=2)
        opened(partition)
        third = Replica(3, 1)
        answers = produce(partition)
        await settle()
        partition.replica_acked(FOLLOWER, no_change, 1)
        assert answers == [None]
        stream = lambda: None  # noqa: E731 - a stream is told apart by its callback
        open_with_third = partition.open_replica(
            third, leader_epoch=3, fetch_offset=0, last_fetched_epoch=-1, durable_end_offset=0, on_change=stream
        )
        assert open_with_third == Accepted()
        await settle()
        assert parts.proposals.commands == [], (
            "a follower that lacks a committed record must not be proposed for the ISR"
        )
        partition.replica_acked(third, stream, 1)
        partition.replica_acked(third, stream, 1)
        await settle()
        (command,) = parts.proposals.commands
        asked = command.alter_partition
        assert [(member.broker_id, member.broker_epoch) for member in asked.new_isr] == [(1, 1), (2, 1), (3, 1)]
        assert (asked.broker_id, asked.broker_epoch, asked.leader_epoch, asked.partition_epoch) == (1, 1, 3, 2)
        later = produce(partition)
        await settle()
        partition.replica_acked(FOLLOWER, no_change, 2)
        assert later == [], "the record must wait for the new member, which the controller may have added already"
        partition.replica_acked(third, stream, 2)
        assert later == [None]

    run(tmp_path, scenario)


async def test_who_stays_behind_leaves_by_the_clock(tmp_path: Path) -> None:
    parts = Parts(tmp_path, lag_time_max_ms=30.0)
    parts.image = image(1)
    async with parts:
        partition = parts.registry.find(TOPIC_ID, 0)
        opened(partition)
        answers = produce(partition)
        await settle()
        partition.replica_acked(FOLLOWER, no_change, 1)
        await asyncio.sleep(0.06)
        parts.proposals.refusal = InvalidUpdateVersion("not yet")
        parts.registry.check_isr()
        await settle()
        parts.registry.check_isr()
        await settle()
        (command,) = parts.proposals.commands
        assert [member.broker_id for member in command.alter_partition.new_isr] == [1, 2]
        assert answers == [], "the record must wait until the controller has granted the smaller ISR"
        await parts.apply(image(2, (1, 2)))
        assert answers == [None]


async def test_who_has_a_full_disk_and_lacks_records_leaves_soon(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1)
    async with parts:
        partition = parts.registry.find(TOPIC_ID, 0)
        opened(partition)
        produce(partition)
        await asyncio.sleep(FULL_LAG_TIME_MAX_MS / 1000 + 0.05)
        parts.registry.check_isr()
        await settle()
        assert parts.proposals.commands == []
        made = image(2)
        brokers = {**made.brokers, 2: replace(made.brokers[2], storage_full=True)}
        await parts.apply(replace(made, brokers=brokers))
        assert parts.registry.has_full_followers
        parts.registry.check_isr()
        await settle()
        (command,) = parts.proposals.commands
        assert [member.broker_id for member in command.alter_partition.new_isr] == [1, 3]
        gone = {**brokers, 2: replace(brokers[2], fenced=True)}
        await parts.apply(replace(image(3), brokers=gone))
        assert not parts.registry.has_full_followers, (
            "a fenced broker is in no ISR, so that no follower with a full disk is left"
        )


def test_progress_is_told_of_every_replica(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        opened(partition)
        produce(partition)
        await settle()
        described = partition.describe_replicas()
        assert (described.leader_epoch, described.log_end_offset, described.high_watermark) == (3, 1, 0)
        assert [(r.broker_id, r.durable_end_offset, r.lag, r.in_sync) for r in described.replicas] == [
            (1, 1, 0, True),
            (2, 0, 1, True),
            (3, -1, -1, True),
        ]
        await parts.apply(image(5, epoch=4, leader=2))
        with pytest.raises(NotLeader):
            partition.describe_replicas()

    run(tmp_path, scenario)


@pytest.mark.parametrize(("leader", "throttled"), [("", False), ("0:2,1:1", False), ("0:1,0:2", True), ("*", True)])
def test_a_leader_throttles_a_partition_if_the_topic_names_its_own_replica(
    tmp_path: Path, leader: str, throttled: bool
) -> None:
    """KIP-73: `leader.replication.throttled.replicas` names the sending replicas, as a move sets it."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        partition.throttle(leader, "0:2")
        assert partition.is_throttled == throttled

    run(tmp_path, scenario)


async def test_who_cannot_be_woken_stops_nobody_else(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        partition = parts.registry.find(TOPIC_ID, 0)
        woken: list[int] = []

        def broken() -> None:
            raise RuntimeError("a bug of this one")

        partition.wait(broken)
        partition.wait(lambda: woken.append(partition.high_watermark))
        answers = produce(partition)
        await settle()
        assert (woken, answers) == ([1], [None])


def appended(partition: Partition, value: bytes = b"v", epoch: int = 3) -> Answers:
    answers: Answers = []
    partition.append(batch_of(value), epoch, answers.append)
    return answers


async def follow(parts: Parts, **image: int | tuple[int, ...]) -> None:
    """Give the registry an image in which something else holds for partition 0."""
    made = image_with(1, **image)  # type: ignore[arg-type] # the tests' values
    parts.registry.on_metadata(made, partition_records(made))
    await parts.registry.wait_applied(made.offset)


def run_leased(tmp_path: Path, scenario: Callable[[Parts, Partition], object]) -> None:
    async def main() -> None:
        async with Parts(tmp_path) as parts:
            await scenario(parts, parts.registry.find(TOPIC_ID, 0))  # type: ignore[misc] # a coroutine function

    asyncio.run(main())


def test_an_append_without_a_lease_is_refused_and_names_nobody(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        parts.lease.end()
        with pytest.raises(NotLeader, match="no lease") as refused:
            appended(partition)
        assert refused.value.leader_id == -1
        assert partition.log.log_end_offset == 0
        parts.lease.renew()
        answers = appended(partition)
        await settle()
        assert answers == [None]

    run_leased(tmp_path, scenario)


def test_what_was_appended_under_a_lease_is_answered_under_the_next_one(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        parts.disk.held = True
        answers = appended(partition)
        await settle()
        parts.lease.end()
        parts.disk.release()  # it is durable now, and no answer may leave
        await settle()
        assert (answers, partition.high_watermark) == ([], 0)
        parts.lease.renew()
        assert (answers, partition.high_watermark) == ([None], 1)

    run_leased(tmp_path, scenario)


def test_what_is_owed_ends_with_the_new_leaders_address_when_leadership_moves(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        parts.disk.held = True
        answers = appended(partition)
        await settle()
        parts.lease.end()
        await follow(parts, offset=2, leader=2, leader_epoch=4, replicas=(1, 2))
        [error] = answers
        assert isinstance(error, NotLeader)
        assert (error.leader_id, error.leader_epoch, error.host, error.port) == (2, 4, "broker-2", 9092)
        hint = to_wire(error).leader
        assert (hint.leader_id, hint.leader_epoch, hint.host, hint.port) == (2, 4, "broker-2", 9092)
        read_back = from_wire(to_wire(error))
        assert isinstance(read_back, NotLeader)
        assert (read_back.host, read_back.port) == ("broker-2", 9092)
        parts.lease.renew()
        with pytest.raises(NotLeader, match="broker 2 leads t-0 in epoch 4"):
            appended(partition)
        parts.disk.release()

    run_leased(tmp_path, scenario)


def test_the_only_replica_keeps_what_it_owes_while_nobody_leads(tmp_path: Path) -> None:
    """Fenced for a pause and back: no other broker can have led, so the records are there and the answer is true."""

    async def scenario(parts: Parts, partition: Partition) -> None:
        parts.disk.held = True
        answers = appended(partition)
        await settle()
        parts.lease.end()
        await follow(parts, offset=2, leader=-1, leader_epoch=4)
        parts.disk.release()
        await settle()
        assert answers == []
        with pytest.raises(NotLeader, match="no leader at the moment"):
            appended(partition)
        parts.lease.renew()
        await settle()
        assert answers == [], (
            "a broker that got its lease back must not acknowledge before its metadata says that it leads"
        )
        await follow(parts, offset=3, leader=1, leader_epoch=5)
        await settle()
        assert answers == [None]
        with pytest.raises(FencedLeaderEpoch):
            appended(partition, epoch=3)

    run_leased(tmp_path, scenario)


def test_with_other_replicas_what_is_owed_is_refused_as_soon_as_leadership_is_revoked(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        parts.disk.held = True
        answers = appended(partition)
        await follow(parts, offset=2, leader=-1, leader_epoch=4, replicas=(1, 2))
        assert [type(error) for error in answers] == [NotLeader]
        parts.disk.release()

    run_leased(tmp_path, scenario)


def test_an_older_image_changes_nothing(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        await follow(parts, offset=5, leader=1, leader_epoch=6)
        older = image_with(1, offset=4, leader=2, leader_epoch=4, replicas=(1, 2))
        parts.registry.on_metadata(older, None)
        await settle()
        assert partition.leader_epoch == 6
        assert partition.leads
        assert parts.registry.applied_offset == 5

    run_leased(tmp_path, scenario)


def test_a_whole_image_moves_leadership_and_closes_what_is_gone(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        moved = image_with(1, offset=2, leader=2, leader_epoch=4, replicas=(1, 2))
        parts.registry.on_metadata(moved, None)
        await parts.registry.wait_applied(2)
        assert isinstance(partition.refused_by, NotLeader)
        parts.registry.on_metadata(type(moved)(offset=3), None)
        await parts.registry.wait_applied(3)
        assert isinstance(partition.refused_by, UnknownTopicId)
        with pytest.raises(UnknownTopicId):
            parts.registry.find(TOPIC_ID, 0)

    run_leased(tmp_path, scenario)


async def test_a_partition_of_other_brokers_is_refused_with_its_leader(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = image_with(1, offset=1, leader=2, replicas=(2,))
    async with parts:
        with pytest.raises(NotLeader) as refused:
            parts.registry.find(TOPIC_ID, 0)
        assert (refused.value.leader_id, refused.value.host) == (2, "broker-2")
        with pytest.raises(UnknownTopicId):
            parts.registry.find(TOPIC_ID, 1)


def test_look_ups_need_a_lease_as_well(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        parts.lease.end()
        for ask in (partition.check_serving, lambda: partition.delete_target(-1)):
            with pytest.raises(NotLeader, match="no lease"):
                ask()

    run_leased(tmp_path, scenario)


# The lease of the process


def test_a_lease_counts_from_when_the_heartbeat_left_and_ends_by_the_clock_alone() -> None:
    clock, lease, woken = FakeClock(0), None, []
    lease = ServingLease(clock)
    lease.call_when_renewed(lambda: woken.append(clock.now))
    assert not lease.valid()
    lease.sent(1)
    clock.now = 1_000
    lease.granted(1, 1_200)
    assert lease.valid()
    assert woken == [1_000]
    clock.now = 1_300
    assert not lease.valid(), "the lease must end 1,200 ms after the heartbeat was sent, not after it was answered"
    lease.sent(2)
    lease.granted(2, 1_200)
    assert lease.valid()
    lease.revoke("fenced")
    assert not lease.valid()


def test_a_pause_ends_the_lease_before_the_first_answer_and_a_late_grant_is_worth_nothing() -> None:
    clock = FakeClock(0)
    lease = ServingLease(clock)
    lease.sent(1)
    clock.now = 60_000  # stopped and resumed
    woken: list[bool] = []
    lease.call_when_renewed(lambda: woken.append(True))
    lease.granted(1, 1_200)
    assert not lease.valid()
    assert woken == []


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.none()),
        st.tuples(st.just("lease"), st.booleans()),
        st.tuples(st.just("disk"), st.booleans()),
        st.tuples(st.just("leader"), st.sampled_from([1, 2, -1])),
    ),
    max_size=25,
)


@settings(max_examples=examples(0.6))
@given(steps)
def test_no_success_leaves_without_lease_and_leadership_and_nobody_is_answered_twice(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, bool | int | None]]
) -> None:
    async def main() -> None:
        async with Parts(tmp_path_factory.mktemp("p")) as parts:
            partition = parts.registry.find(TOPIC_ID, 0)
            answers: list[Answers] = []
            offset, epoch = 1, 3

            def owe() -> Callable[[BaseException | None], None]:
                mine: Answers = []
                answers.append(mine)

                def answer(error: BaseException | None) -> None:
                    mine.append(error)
                    if error is None:
                        assert parts.lease.valid()
                        assert partition.leads

                return answer

            for kind, value in drawn:
                match kind:
                    case "append":
                        may = parts.lease.valid() and partition.leads
                        try:
                            partition.append(batch_of(b"v"), -1, owe())
                            assert may
                        except RaftlogError:
                            assert not may
                            answers.pop()
                    case "lease":
                        (parts.lease.renew if value else parts.lease.end)()
                    case "disk" if value:
                        parts.disk.release()
                    case "disk":
                        parts.disk.held = True
                    case _:
                        offset, epoch = offset + 1, epoch + 1
                        assert isinstance(value, int)
                        parts.disk.held, held = False, parts.disk.held
                        isr = (value,) if value > 0 else (1, 2)
                        await follow(parts, offset=offset, leader=value, leader_epoch=epoch, replicas=(1, 2), isr=isr)
                        parts.disk.held = held
                await settle()
            parts.disk.release()
            await follow(parts, offset=offset + 1, leader=1, leader_epoch=epoch + 1, replicas=(1, 2), isr=(1,))
            parts.lease.renew()
            await settle()
            assert [len(each) for each in answers] == [1] * len(answers)
            assert partition.high_watermark == partition.log.log_end_offset

    asyncio.run(main())
