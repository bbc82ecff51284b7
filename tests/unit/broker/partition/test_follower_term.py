"""A partition that follows: the leader's bytes and marks, truncation by leader epoch, changes while the disk works."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.log.config import LogConfig
from broker.partition.partition import Partition
from raftlog.errors import (
    CorruptRecordError,
    FencedLeaderEpoch,
    NotLeader,
    OffsetOutOfRange,
    RaftlogError,
    UnknownTopicId,
)
from raftmeta.image import MetadataImage
from replication.ports import Diverging, Replica
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, image_with, removal
from tests.support.replica_link import ReplicaLink, settle

Answers = list[BaseException | None]


def image(offset: int, leader: int, epoch: int, isr: tuple[int, ...] = (1, 2)) -> MetadataImage:
    return image_with(
        1, offset=offset, leader=leader, leader_epoch=epoch, replicas=(1, 2), isr=isr, partition_epoch=offset
    )


class Pair:
    """Nodes 1 and 2, both with a replica of partition 0; they act on the same images."""

    def __init__(self, nodes: dict[int, Parts]) -> None:
        self.nodes = nodes
        self.offset = 0

    async def elect(self, leader: int, epoch: int, isr: tuple[int, ...] = (1, 2), *, only: int | None = None) -> None:
        """Have both, or `only` one of them, act on a new leader."""
        self.offset += 1
        for number, parts in self.nodes.items():
            if only in (None, number):
                await parts.apply(image(self.offset, leader, epoch, isr))

    def partition(self, node: int) -> Partition:
        return self.nodes[node].registry.find(TOPIC_ID, 0)

    def link(self, leader: int, follower: int) -> ReplicaLink:
        following = self.partition(follower).following
        assert following is not None
        return ReplicaLink(self.partition(leader), following, Replica(follower, 1))

    async def joined(self, leader: int, follower: int) -> ReplicaLink:
        link = self.link(leader, follower)
        await link.open()
        await link.pump()
        return link

    def stored(self, node: int) -> bytes:
        log = self.partition(node).log
        read = log.read(log.log_start_offset, 1 << 24, log.log_end_offset, blocking=True)
        assert read is not None
        return read.records

    def assert_equal(self) -> None:
        assert self.stored(1) == self.stored(2)
        one, two = self.partition(1).log, self.partition(2).log
        assert one.leader_epochs.entries == two.leader_epochs.entries


@contextlib.asynccontextmanager
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    nodes = {number: Parts(tmp_path / str(number), node_id=number) for number in (1, 2)}
    async with contextlib.AsyncExitStack() as stack:
        for parts in nodes.values():
            parts.image = image(0, -1, 0)
            await stack.enter_async_context(parts)
        yield Pair(nodes)


def produce(partition: Partition, *values: bytes, all_replicas: bool = True) -> list[Answers]:
    answers: list[Answers] = []
    for value in values:
        mine: Answers = []
        partition.append(batch_of(value), -1, mine.append, all_replicas=all_replicas)
        answers.append(mine)
    return answers


async def test_a_follower_has_the_leaders_bytes_and_marks_and_its_ack_commits(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await two.elect(1, 1)
        link = await two.joined(1, 2)
        answers = produce(two.partition(1), b"a", b"b", b"c")
        await settle()
        assert answers == [[], [], []]
        await link.pump()
        assert answers == [[None], [None], [None]]
        await link.pump()
        assert [two.partition(node).high_watermark for node in (1, 2)] == [3, 3]
        two.partition(1).log.delete_records(2)
        await link.pump()
        assert two.partition(2).log_start_offset == 2
        two.assert_equal()


async def test_a_follower_acks_what_was_fsynced_and_no_more(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await two.elect(1, 1)
        link = await two.joined(1, 2)
        two.nodes[2].disk.held = True
        (answer,) = produce(two.partition(1), b"a")
        await settle()
        await link.pump()
        assert two.partition(2).log_end_offset == 1
        assert answer == []
        link.follower.take_marks(1, 0, 1)
        assert two.partition(2).high_watermark == 0, "the high watermark must not pass what the follower has on disk"
        two.nodes[2].disk.release()
        await settle()
        assert answer == [None]
        assert two.partition(2).high_watermark == 1, (
            "once the record is on disk, the follower must take the high watermark that it was told"
        )


async def test_what_a_follower_has_said_it_holds_is_not_taken_back_by_another_flush_config(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await two.elect(1, 1)
        link = await two.joined(1, 2)
        partition = two.partition(2)
        partition.log.log_dir.note_unsynced({partition.log.topic_id})
        partition.log.update_config(LogConfig(flush_messages=1_000))
        partition.apply_config()
        heard: list[int] = []
        produce(two.partition(1), b"a", b"b")
        await settle()
        records = two.stored(1)
        link.follower.append_replicated(records, 1, heard.append)
        assert heard == [2], "with flush.messages above 1 an append must be reported before the flush"
        two.nodes[2].disk.held = True
        partition.log.update_config(LogConfig())
        partition.apply_config()
        await settle()
        assert heard == [2]
        assert partition.durable_end_offset == 0
        two.nodes[2].disk.release()
        await settle()
        assert partition.durable_end_offset == 2, "the log must be flushed after its time, even without further appends"


async def test_the_high_watermark_outlives_the_leader_and_the_process(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await two.elect(1, 1)
        link = await two.joined(1, 2)
        produce(two.partition(1), b"a", b"b")
        await settle()
        await link.pump()
        await link.pump()
        await two.elect(2, 2)
        assert two.partition(2).high_watermark == 2
        two.nodes[2].logs.checkpoint_marks()
        log = two.partition(2).log
        assert log.log_dir.marks_of((TOPIC_ID, 0)) == (0, 2, 2)
    async with pair(tmp_path) as two:
        assert two.partition(2).high_watermark == 2


async def test_what_only_the_old_leader_had_is_cut_and_replaced_by_the_new_ones(tmp_path: Path) -> None:
    """KIP-101: by leader epoch, though the high watermark of the old leader was behind what both had."""
    async with pair(tmp_path) as two:
        await two.elect(1, 1)
        link = await two.joined(1, 2)
        produce(two.partition(1), b"both")
        await settle()
        await link.pump()
        lost = produce(two.partition(1), b"lost", b"lost too")
        await settle()
        await two.elect(2, 2)
        assert [type(error) for (error,) in lost] == [NotLeader] * 2
        kept = produce(two.partition(2), b"kept")
        back = await two.joined(2, 1)
        assert back.truncations == [1]
        await settle()
        assert kept == [[None]]
        two.assert_equal()
        assert two.partition(1).log.leader_epochs.entries == ((1, 0), (2, 1))


async def test_back_to_back_failovers_end_in_equal_logs(tmp_path: Path) -> None:
    """KIP-279: each writes alone for several epochs, then they meet."""
    async with pair(tmp_path) as two:
        for epoch, leader in ((1, 1), (3, 2), (4, 1), (7, 2), (8, 1)):
            await two.elect(leader, epoch, (leader,))
            produce(two.partition(leader), *[b"%d" % epoch] * epoch)
            await settle()
        await two.elect(2, 9, (2,))
        link = await two.joined(2, 1)
        assert link.truncations == sorted(link.truncations, reverse=True)
        two.assert_equal()
        produce(two.partition(2), b"on")
        await link.pump()
        two.assert_equal()


async def test_a_follower_below_the_log_start_starts_over(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await two.elect(1, 1, (1,))
        produce(two.partition(1), *[b"x"] * 9)
        await settle()
        two.partition(1).log.delete_records(6)
        link = await two.joined(1, 2)
        assert link.truncations == [6]
        state = two.partition(2)
        assert (state.log_start_offset, state.log_end_offset) == (6, 9)
        await link.pump()
        assert state.high_watermark == 9


async def test_a_log_of_which_nothing_is_the_leaders_starts_over_where_the_leader_begins(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await two.elect(1, 3, (1,))
        produce(two.partition(1), *[b"x"] * 4)
        await two.elect(2, 5, (2,))
        produce(two.partition(2), *[b"y"] * 8)
        await settle()
        two.partition(2).log.delete_records(6)
        await two.elect(1, 9, (1,))
        link = await two.joined(1, 2)
        assert link.truncations == [0]
        two.assert_equal()


async def test_bytes_that_do_not_check_are_refused_and_what_came_before_stays(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await two.elect(1, 1)
        link = await two.joined(1, 2)
        produce(two.partition(1), b"a", b"b")
        await settle()
        good = two.stored(1)
        torn = good[:-1] + bytes([good[-1] ^ 1])
        with pytest.raises(CorruptRecordError):
            link.follower.append_replicated(torn, 1, link.on_durable)
        await settle()
        assert two.partition(2).log_end_offset == two.partition(2).durable_end_offset == 1
        with pytest.raises(CorruptRecordError, match="does not follow"):
            link.follower.append_replicated(good, 1, link.on_durable)
        with pytest.raises(FencedLeaderEpoch):
            link.follower.append_replicated(b"", 2, link.on_durable)


# Changes while the disk works


async def test_a_flush_under_way_at_a_change_of_leader_acks_nothing_that_is_cut(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await two.elect(1, 1)
        await two.joined(1, 2)
        two.nodes[1].disk.held = True
        lost = produce(two.partition(1), b"a", b"b", all_replicas=False)
        await settle()
        await two.elect(2, 2)
        new = produce(two.partition(2), b"new")
        await settle()
        link = two.link(2, 1)
        opening = link.try_open()
        assert isinstance(opening, Diverging)
        done: list[RaftlogError | None] = []
        link.follower.truncate(opening, 2, done.append)
        await settle()
        assert done == [], "the truncation must wait for the disk"
        two.nodes[1].disk.release()
        await settle()
        assert done == [None]
        assert two.partition(1).log_end_offset == 0
        assert [type(error) for (error,) in lost] == [NotLeader] * 2
        assert new == [[]]
        await link.open()
        two.nodes[1].disk.held = True
        await link.pump()
        assert new == [[]], "the leader must not be told of a record that is not on disk yet"
        two.nodes[1].disk.release()
        await settle()
        assert new == [[None]]
        two.assert_equal()


async def test_what_a_truncation_leaves_is_flushed_though_the_flush_before_it_counts_no_more(tmp_path: Path) -> None:
    """No append may come for a long time, and records count as committed only after the follower's ack."""
    async with pair(tmp_path) as two:
        await two.elect(1, 1)
        link = await two.joined(1, 2)
        produce(two.partition(1), b"kept", b"cut")
        await settle()
        disk, done = two.nodes[2].disk, list[RaftlogError | None]()
        disk.held = True
        await link.pump()
        link.follower.truncate(Diverging(1, 1), 1, done.append)
        disk.release()
        await settle()
        assert done == [None]
        assert link.follower.fetch_state() == (1, 1, 1)


async def test_a_role_begins_once_the_truncation_of_the_one_before_has_ended(tmp_path: Path) -> None:
    """Else a new leader would append to a log whose end is about to go."""
    async with pair(tmp_path) as two:
        await two.elect(1, 1, (1,))
        produce(two.partition(1), b"a", b"b", b"c")
        await settle()
        await two.elect(2, 2, (2,))
        link = two.link(2, 1)
        opening = link.try_open()
        assert isinstance(opening, Diverging)
        disk, done = two.nodes[1].disk, list[RaftlogError | None]()
        disk.held = True
        link.follower.truncate(opening, 2, done.append)
        elections = [asyncio.create_task(two.elect(*change, only=1)) for change in ((2, 3), (1, 4), (2, 5), (1, 6))]
        await asyncio.gather(*elections)
        partition = two.partition(1)
        assert two.nodes[1].registry.applied_offset == 6, "the slow disk must not keep back work on other metadata"
        assert (partition.leads, partition.following) == (False, None)
        disk.release()
        await settle()
        assert partition.leader_epoch == 6
        assert partition.leads
        assert partition.log_end_offset in (0, 3), "the log must be cut, or not be touched"
        assert len(done) == 1
        assert produce(partition, b"d", all_replicas=False) == [[]]
        await settle()
        assert partition.log_end_offset == partition.durable_end_offset


@pytest.mark.parametrize("starts", [True, False])
async def test_deletion_during_a_truncation(tmp_path: Path, starts: bool) -> None:
    async with pair(tmp_path) as two:
        await two.elect(1, 1, (1,))
        produce(two.partition(1), b"a", b"b", b"c")
        await settle()
        await two.elect(2, 2, (2,))
        link = two.link(2, 1)
        opening = link.try_open()
        assert isinstance(opening, Diverging)
        parts, done = two.nodes[1], list[RaftlogError | None]()
        parts.disk.held = not starts
        link.follower.truncate(opening, 2, done.append)
        parts.registry.on_metadata(type(parts.image)(offset=9), [removal()])
        await settle()
        parts.disk.release()
        await parts.registry.wait_applied(9)
        await settle()
        assert len(done) == 1
        assert not (tmp_path / "1" / "logs-0" / "t-0").exists()
        with pytest.raises(UnknownTopicId):
            two.partition(1)


async def test_a_term_that_is_over_appends_and_acks_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path) as two:
        await two.elect(1, 1)
        link = await two.joined(1, 2)
        heard: list[int] = []
        two.nodes[2].disk.held = True
        produce(two.partition(1), b"a")
        link.follower.append_replicated(two.stored(1), 1, heard.append)
        await two.elect(1, 2)
        two.nodes[2].disk.release()
        await settle()
        assert heard == []
        with pytest.raises(NotLeader):
            link.follower.append_replicated(two.stored(1), 1, heard.append)
        link.follower.take_marks(1, 0, 1)
        assert two.partition(2).high_watermark == 0
        done: list[RaftlogError | None] = []
        link.follower.truncate(Diverging(1, 0), 1, done.append)
        await settle()
        assert len(done) == 1
        assert isinstance(done[0], NotLeader)
        assert two.partition(2).log_end_offset == 1


# Readers of a follower


async def test_a_follower_that_is_not_cut_yet_refuses_no_position_above_what_it_knows_to_be_committed(
    tmp_path: Path,
) -> None:
    """Its tail may be of a term that was voted down; the reader's record is committed elsewhere."""
    async with pair(tmp_path) as two:
        await two.elect(2, 1)
        link = await two.joined(2, 1)
        produce(two.partition(2), b"kept")
        await settle()
        await link.pump()
        produce(two.partition(2), *[b"never committed"] * 5)
        await settle()
        await two.elect(1, 2, (1,))
        produce(two.partition(1), *[b"new"] * 4)
        await settle()
        leader, follower = two.partition(1), two.partition(2)
        assert (leader.high_watermark, follower.high_watermark, follower.log_end_offset) == (5, 1, 6)
        leader.check_position(4, 2)
        follower.check_position(4, 2, from_follower=True)
        follower.check_position(1, 1, from_follower=True)
        with pytest.raises(OffsetOutOfRange):
            follower.check_position(1, 0, from_follower=True)


async def test_a_follower_serves_those_who_were_sent_to_it_up_to_its_own_high_watermark(tmp_path: Path) -> None:
    """KIP-392."""
    async with pair(tmp_path) as two:
        await two.elect(1, 1)
        link = await two.joined(1, 2)
        leader, follower = two.partition(1), two.partition(2)
        produce(leader, b"a", b"b")
        await settle()
        await link.pump()
        with pytest.raises(NotLeader):
            follower.read(0, 1000, follower.high_watermark, blocking=False)
        follower.check_leader_epoch(1, from_follower=True)
        read = follower.read(0, 1000, follower.high_watermark, blocking=False, from_follower=True)
        assert read is not None
        assert read.next_offset == 2
        assert follower.read(9, 1000, follower.high_watermark, blocking=False, from_follower=True) == (b"", 9)
        leader.log.delete_records(1)
        await link.pump()
        with pytest.raises(NotLeader, match="broker 1 leads"):
            follower.read(0, 1000, follower.high_watermark, blocking=False, from_follower=True)
        woken: list[int] = []
        follower.wait(lambda: woken.append(1), from_follower=True)
        assert woken == []
        produce(leader, b"c")
        await settle()
        await link.pump()
        assert woken == [1]
        assert leader.nearer_replica({2}) == 2
        assert leader.nearer_replica({1, 2}) is None
        assert leader.nearer_replica({3}) is None
