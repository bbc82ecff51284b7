"""The commands that the active controller proposes, and those that it refuses itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from broker.clock import SystemClock
from raftlog.errors import FeatureUpdateFailed, StaleBrokerEpoch, UnsupportedVersion
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import (
    AlterBrokerCommand,
    AlterPartitionsCommand,
    MetadataCommand,
    MetadataRecord,
    UpdateFeatureCommand,
)
from raftmeta.decide import CommandResult
from raftmeta.features import ALTER_PARTITIONS_LEVEL, METADATA_VERSION, SUPPORTED
from raftmeta.image import NO_LEADER, BrokerImage, MetadataImage, PartitionImage, TopicImage, partition_record
from raftmeta.quorum import controller
from raftmeta.quorum import controller_plan as plan
from raftmeta.quorum.controller import HEAVY_PARTITIONS, Proposals
from raftmeta.quorum.controller_plan import BrokerReport, Revoked, Unsettled
from raftmeta.state import Applied
from tests.support import virtual_time
from tests.support.metadata import create_partitions, create_topic, update_feature
from tests.support.quorum import QuorumCluster, register_command, run

TOPIC = bytes(16)


def broker(broker_id: int, epoch: int = 5, *, fenced: bool = False, leaving: bool = False) -> BrokerImage:
    return BrokerImage(broker_id, bytes(16), epoch, "h", 1, fenced=fenced, in_controlled_shutdown=leaving)


def partition(number: int = 0, leader: int = 1, revoked: int | None = None, at: int = 0) -> PartitionImage:
    return PartitionImage(number, (1, 2), (1, 2), leader, 0, 0, revoked_leader=revoked, revoked_at_offset=at)


def image(*brokers: BrokerImage, partitions: tuple[PartitionImage, ...] = (), offset: int = 50) -> MetadataImage:
    topics = {TOPIC: TopicImage("t", TOPIC, partitions)} if partitions else {}
    return MetadataImage(offset=offset, brokers={each.broker_id: each for each in brokers}, topics=topics)


def report(epoch: int = 5, applied: int = 50, *, leaving: bool = False) -> BrokerReport:
    return BrokerReport(epoch, applied, wants_shutdown=leaving)


# Handing over


def test_a_live_leader_has_let_go_once_it_applied_the_revocation() -> None:
    revoked = {(TOPIC, 0): Revoked(1, 40)}
    present = image(broker(1), broker(2))
    assert plan.let_go(present, revoked, {1: report(applied=39)}) == []
    assert plan.let_go(present, revoked, {1: report(applied=40)}) == [(TOPIC, 0)]
    assert plan.let_go(present, revoked, {}) == []
    assert plan.let_go(present, revoked, {1: report(epoch=4, applied=99)}) == [], (
        "a report of another process of the broker must not count"
    )


@pytest.mark.parametrize("former", [broker(1, fenced=True), broker(1, epoch=41)])
def test_a_leader_that_is_fenced_or_another_process_need_not_be_waited_for(former: BrokerImage) -> None:
    assert plan.let_go(image(former), {(TOPIC, 0): Revoked(1, 40)}, {}) == [(TOPIC, 0)]


def test_a_leader_that_is_gone_need_not_be_waited_for() -> None:
    assert plan.let_go(image(), {(TOPIC, 0): Revoked(1, 40)}, {}) == [(TOPIC, 0)]


def test_revocations_are_followed_record_by_record_as_a_scan_finds_them() -> None:
    before = partition(revoked=1, at=40, leader=NO_LEADER)
    revoked: dict[plan.PartitionKey, Revoked] = {}
    plan.follow_revoked(revoked, [partition_record(TOPIC, before), partition_record(TOPIC, partition(1))])
    assert revoked == plan.revoked_in(image(partitions=(before, partition(1)))) == {(TOPIC, 0): Revoked(1, 40)}
    plan.follow_revoked(revoked, [partition_record(TOPIC, replace(before, revoked_leader=None, leader=2))])
    assert revoked == {}
    plan.follow_revoked(revoked, [partition_record(TOPIC, before)])
    plan.follow_revoked(revoked, [MetadataRecord(remove_topic=records_pb2.RemoveTopicRecord(topic_id=TOPIC))])
    assert revoked == {}


# Fencing and unfencing


def test_a_broker_is_unfenced_when_it_has_applied_its_registration_and_no_later_than_that() -> None:
    # KAFKA-13959: measured against the end of a busy log it would never be.
    fenced = image(broker(1, fenced=True), offset=1_000_000)
    assert plan.to_unfence(fenced, {1: report(applied=4)}, [1]) == []
    assert plan.to_unfence(fenced, {1: report(applied=5)}, [1]) == [(1, 5)]


def test_a_broker_that_lives_and_applies_nothing_is_fenced_and_stays_so_until_it_has_caught_up() -> None:
    up, frozen = image(broker(1), offset=60), report()
    frozen.applied(50, 50, 0)
    frozen.applied(50, 60, 1_000)  # there is something new, and it does not apply it
    frozen.applied(50, 61, 9_000)
    reports = {1: frozen}
    assert plan.standing_still(up, reports, 10_999, patience_ms=10_000) == []
    assert plan.standing_still(up, reports, 11_000, patience_ms=10_000) == [(1, 5)]
    fenced = image(broker(1, fenced=True), offset=62)
    assert plan.standing_still(fenced, reports, 99_000, patience_ms=10_000) == []
    frozen.catch_up_to = 61
    assert plan.to_unfence(fenced, reports, [1]) == []
    frozen.applied(61, 62, 12_000)
    assert plan.to_unfence(fenced, reports, [1]) == [(1, 5)]


def test_a_broker_that_is_behind_and_moves_on_is_left_alone() -> None:
    up, slow = image(broker(1), offset=1_000), report(applied=50)
    for second in range(60):
        slow.applied(50 + second, 1_000, second * 1_000)
        assert plan.standing_still(up, {1: slow}, second * 1_000 + 900, patience_ms=1_000) == []
    assert plan.standing_still(up, {1: slow}, 60_000, patience_ms=1_000) == [(1, 5)]
    assert plan.standing_still(image(broker(1, epoch=9)), {1: slow}, 60_000, patience_ms=1_000) == []
    slow.applied(1_000, 1_000, 60_000)
    assert plan.standing_still(up, {1: slow}, 999_000, patience_ms=1_000) == []


def test_a_broker_stays_fenced_while_it_is_unsettled_leaving_or_another_process() -> None:
    fenced = image(broker(1, fenced=True))
    assert plan.to_unfence(fenced, {1: report()}, []) == []
    assert plan.to_unfence(fenced, {1: report(epoch=4)}, [1]) == []
    assert plan.to_unfence(fenced, {1: report(leaving=True)}, [1]) == []
    assert plan.to_unfence(image(broker(1, fenced=True, leaving=True)), {1: report()}, [1]) == []
    assert plan.to_unfence(image(broker(1)), {1: report()}, [1]) == []
    assert plan.to_unfence(image(), {1: report()}, [1]) == []


# Shutting down


def test_a_shutdown_begins_once() -> None:
    wants = {1: report(leaving=True)}
    assert plan.to_begin_shutdown(image(broker(1)), wants) == [(1, 5)]
    assert plan.to_begin_shutdown(image(broker(1, leaving=True)), wants) == []
    assert plan.to_begin_shutdown(image(broker(1, fenced=True)), wants) == []
    assert plan.to_begin_shutdown(image(broker(1, epoch=6)), wants) == []
    assert plan.to_begin_shutdown(image(broker(1)), {1: report()}) == []


def test_a_broker_may_shut_down_when_nothing_of_it_waits() -> None:
    leaving = image(broker(1, leaving=True))
    assert plan.may_shut_down(leaving, 1, {}, settled=True)
    assert not plan.may_shut_down(leaving, 1, {}, settled=False)
    assert not plan.may_shut_down(leaving, 1, {(TOPIC, 0): Revoked(1, 40)}, settled=True)
    assert plan.may_shut_down(leaving, 1, {(TOPIC, 0): Revoked(2, 40)}, settled=True)
    assert not plan.may_shut_down(image(broker(1)), 1, {}, settled=True), (
        "the broker must not shut down before it has begun to"
    )
    assert plan.may_shut_down(image(broker(1, fenced=True)), 1, {}, settled=False)


# What to look at


def test_brokers_and_configs_ask_to_look_at_everything_and_partitions_at_their_topic() -> None:
    unsettled = Unsettled(everything=False)
    up, one_fenced = image(broker(1), broker(2)), image(broker(1), broker(2, fenced=True))
    record = partition_record(TOPIC, partition())
    unsettled.note(up, [record])
    assert not unsettled, "a change must leave nothing to settle while all brokers are up"
    unsettled.note(one_fenced, [record])
    assert unsettled.topic_ids == {TOPIC}
    assert not unsettled.everything
    unsettled.note(up, [MetadataRecord(broker=records_pb2.BrokerRecord(broker_id=1))])
    taken = unsettled.take()
    assert taken.everything
    assert not unsettled


# Balance


def test_only_brokers_that_lead_too_few_get_their_partitions_back() -> None:
    ten = [partition(number) for number in range(10)]
    both = (broker(1), broker(2))
    one_moved = (replace(ten[0], leader=2), *ten[1:])
    assert plan.imbalanced(image(*both, partitions=one_moved), 10.0) == []
    two_moved = (replace(ten[0], leader=2), replace(ten[1], leader=2), *ten[2:])
    assert plan.imbalanced(image(*both, partitions=two_moved), 10.0) == [(TOPIC, 0), (TOPIC, 1)]
    assert plan.imbalanced(image(broker(1, fenced=True), broker(2), partitions=two_moved), 10.0) == []


def test_commands_have_at_most_a_hundred_partitions() -> None:
    keys = [(TOPIC, number) for number in range(241)]
    pieces = list(plan.chunks(keys))
    assert [len(piece) for piece in pieces] == [100, 100, 41]
    assert [(ref.topic_id, ref.partition) for piece in pieces for ref in piece] == keys


class FakeDriver:
    """Keeps the proposed commands; answers when the test says so."""

    def __init__(self) -> None:
        self.proposed: list[MetadataCommand] = []
        self.answers: list[asyncio.Future[object]] = []

    def propose(self, data: bytes) -> asyncio.Future[object]:
        self.proposed.append(MetadataCommand.FromString(data))
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]

    def answer(self) -> None:
        applied = type("Entry", (), {"result": Applied(CommandResult(1), None)})()
        next(answer for answer in self.answers if not answer.done()).set_result(applied)


def proposals(driver: FakeDriver) -> Proposals:
    return Proposals(driver, SystemClock(), 3)  # type: ignore[arg-type] # as far as it is used


def test_a_level_that_this_controller_does_not_know_is_never_appended() -> None:
    async def scenario() -> None:
        driver = FakeDriver()
        above = SUPPORTED[METADATA_VERSION].max_level + 1
        for name, level in ((METADATA_VERSION, above), ("unknown", 1), ("\x01" * 100_000, 1)):
            with pytest.raises(FeatureUpdateFailed, match="all controllers first") as refused:
                await proposals(driver).commit(update_feature(name, level))
            assert len(str(refused.value)) < 2_000
        assert driver.proposed == []
        for level in (0, 1, -1, above - 1):  # for the state machine to answer
            asked = asyncio.create_task(proposals(driver).commit(update_feature(METADATA_VERSION, level)))
            await asyncio.sleep(0)
            driver.answer()
            await asked
        assert len(driver.proposed) == 4

    virtual_time.run(scenario())


def test_heavy_commands_are_committed_one_at_a_time_and_nothing_else_waits_for_them() -> None:
    async def scenario() -> None:
        driver = FakeDriver()
        commits = proposals(driver)
        heavy = [
            create_topic("a", 1, partitions=HEAVY_PARTITIONS + 1),
            create_partitions("a", 10_000),
            create_topic("b", 2, partitions=10_000),
        ]
        light = [
            create_topic("c", 3, partitions=HEAVY_PARTITIONS),
            MetadataCommand(fence_broker=records_pb2.FenceBrokerCommand(broker_id=1)),
        ]
        tasks = [asyncio.create_task(commits.commit(command)) for command in (*heavy, *light)]
        await asyncio.sleep(0.01)
        kinds = [each.WhichOneof("command") for each in driver.proposed]
        assert kinds == ["create_topic", "create_topic", "fence_broker"]
        tasks[1].cancel()
        for left in range(4, 0, -1):
            driver.answer()
            await asyncio.sleep(0.01)
            assert sum(not task.done() for task in tasks) == left - 1
        assert driver.proposed[-1].create_topic.name == "b", (
            "a command that was given up before its turn must not be proposed"
        )

    virtual_time.run(scenario())


DRAIN = MetadataCommand(alter_broker=AlterBrokerCommand(broker_id=1, drained=True))


def test_a_new_cluster_begins_at_the_highest_levels_and_a_later_controller_leaves_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with QuorumCluster(tmp_path, 1) as cluster:
            await cluster.start()
            await cluster.metadata(1).wait_ready()
            newest = {METADATA_VERSION: SUPPORTED[METADATA_VERSION].max_level}
            assert cluster.metadata(1).image.features == newest
            offset = cluster.metadata(1).image.offset
            await cluster.kill(1)
            await cluster.start()
            await cluster.metadata(1).wait_ready()
            assert cluster.metadata(1).image.features == newest
            records = [r for change in cluster.metadata(1).changes_since(offset) or () for r in change.records]
            assert [record.WhichOneof("record") for record in records] == ["controller"]

    run(scenario)


def test_what_older_controllers_do_not_know_is_not_even_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would stop at it; so the level has to say first that there are none."""
    monkeypatch.setattr(controller, "newest_levels", list)

    async def scenario() -> None:
        async with QuorumCluster(tmp_path, 1) as cluster:
            await cluster.start()
            metadata = cluster.metadata(1)
            await metadata.wait_ready()
            assert metadata.image.features == {}
            await metadata.propose(register_command(1))
            end = metadata.quorum_info().log_end_index
            alter = AlterPartitionsCommand(broker_id=1, broker_epoch=metadata.image.brokers[1].broker_epoch)
            with pytest.raises(UnsupportedVersion, match="features upgrade"):
                await metadata.propose(DRAIN)
            with pytest.raises(UnsupportedVersion, match="features upgrade"):
                await metadata.propose(MetadataCommand(alter_partitions=alter))
            assert metadata.quorum_info().log_end_index == end
            raised = UpdateFeatureCommand(name=METADATA_VERSION, level=2)
            await metadata.propose(MetadataCommand(update_feature=raised))
            await metadata.propose(DRAIN)
            assert metadata.image.brokers[1].drained
            end = metadata.quorum_info().log_end_index
            with pytest.raises(UnsupportedVersion, match="features upgrade"):
                await metadata.propose(MetadataCommand(alter_partitions=alter))
            assert metadata.quorum_info().log_end_index == end
            raised = UpdateFeatureCommand(name=METADATA_VERSION, level=ALTER_PARTITIONS_LEVEL)
            await metadata.propose(MetadataCommand(update_feature=raised))
            with pytest.raises(StaleBrokerEpoch, match="is fenced"):
                await metadata.propose(MetadataCommand(alter_partitions=alter))
            assert metadata.quorum_info().log_end_index > end

    run(scenario)
