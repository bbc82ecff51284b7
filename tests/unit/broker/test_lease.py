"""Without a lease nothing is appended, answered or read; with the next one what was owed goes out (DESIGN 5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.lease import ServingLease
from broker.partition import Partition
from raftlog.errors import FencedLeaderEpoch, NotLeader, RaftlogError, UnknownTopicId, from_wire, to_wire
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, image_with, partition_records
from tests.support.log_driver import FakeClock

Answers = list[BaseException | None]


def appended(partition: Partition, value: bytes = b"v", epoch: int = 3) -> Answers:
    answers: Answers = []
    partition.append(batch_of(value), epoch, answers.append)
    return answers


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def follow(parts: Parts, **image: int | tuple[int, ...]) -> None:
    """Give the registry an image in which something else holds for partition 0."""
    made = image_with(1, **image)  # type: ignore[arg-type] # the tests' values
    parts.registry.on_metadata(made, partition_records(made))
    await parts.registry.wait_applied(made.offset)


def run(tmp_path: Path, scenario: Callable[[Parts, Partition], object]) -> None:
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

    run(tmp_path, scenario)


def test_what_was_appended_under_a_lease_is_answered_under_the_next_one(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        parts.disk.held = True
        answers = appended(partition)
        await settle()
        parts.lease.end()
        parts.disk.release()  # it is durable now, and nobody may say so
        await settle()
        assert (answers, partition.high_watermark) == ([], 0)
        parts.lease.renew()
        assert (answers, partition.high_watermark) == ([None], 1)

    run(tmp_path, scenario)


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

    run(tmp_path, scenario)


def test_the_only_replica_keeps_what_it_owes_while_nobody_leads(tmp_path: Path) -> None:
    """Fenced for a pause and back: nobody else can have led, so the records are there and the answer is true."""

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
        assert answers == [], "a lease alone does not make a leader"
        await follow(parts, offset=3, leader=1, leader_epoch=5)
        await settle()
        assert answers == [None]
        with pytest.raises(FencedLeaderEpoch):
            appended(partition, epoch=3)

    run(tmp_path, scenario)


def test_with_other_replicas_what_is_owed_is_refused_as_soon_as_leadership_is_revoked(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        parts.disk.held = True
        answers = appended(partition)
        await follow(parts, offset=2, leader=-1, leader_epoch=4, replicas=(1, 2))
        assert [type(error) for error in answers] == [NotLeader]
        parts.disk.release()

    run(tmp_path, scenario)


def test_an_older_image_changes_nothing(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        await follow(parts, offset=5, leader=1, leader_epoch=6)
        older = image_with(1, offset=4, leader=2, leader_epoch=4, replicas=(1, 2))
        parts.registry.on_metadata(older, None)
        await settle()
        assert partition.leader_epoch == 6
        assert partition.leads
        assert parts.registry.applied_offset == 5

    run(tmp_path, scenario)


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

    run(tmp_path, scenario)


def test_a_partition_of_other_brokers_is_refused_with_its_leader(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path)
        parts.image = image_with(1, offset=1, leader=2, replicas=(2,))
        async with parts:
            with pytest.raises(NotLeader) as refused:
                parts.registry.find(TOPIC_ID, 0)
            assert (refused.value.leader_id, refused.value.host) == (2, "broker-2")
            with pytest.raises(UnknownTopicId):
                parts.registry.find(TOPIC_ID, 1)

    asyncio.run(scenario())


def test_look_ups_need_a_lease_as_well(tmp_path: Path) -> None:
    async def scenario(parts: Parts, partition: Partition) -> None:
        parts.lease.end()
        for ask in (partition.check_serving, lambda: partition.delete_target(-1)):
            with pytest.raises(NotLeader, match="no lease"):
                ask()

    run(tmp_path, scenario)


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
    assert not lease.valid(), "1200 ms after it was sent, not after it was answered"
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


@settings(max_examples=60)
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
