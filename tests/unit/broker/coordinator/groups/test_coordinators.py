"""Which partition a group belongs to, which broker coordinates it, and how __consumer_offsets is created."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from broker.clock import SystemClock
from broker.config.config import BrokerConfig
from broker.coordinator.groups.assignors import BUILT_IN
from broker.coordinator.groups.commands import GroupConfig
from broker.coordinator.groups.coordinators import (
    GroupCoordinators,
    check_group_id,
    java_hash,
    partition_for,
    warn_of_timeouts,
)
from broker.coordinator.internal_topics import CONSUMER_OFFSETS, TRANSACTION_STATE, InternalTopics, replicas_needed
from broker.coordinator.shards import ImageTopics, topics_changed
from broker.server.broker_role import load_assignors
from raftlog.errors import CoordinatorNotAvailable, InvalidConfig, InvalidGroupId, StorageError
from raftlog.v1.records_pb2 import CreatePartitionsCommand, CreateTopicCommand, DeleteTopicCommand, MetadataCommand
from raftmeta.features import LIVE_GROUPS_LEVEL
from raftmeta.image import MetadataImage
from tests.support import virtual_time
from tests.support.broker_parts import SwitchedLease
from tests.support.logged import records_of
from tests.support.memory_metadata import MemoryMetadata
from tests.support.metadata import alter_broker, update_feature


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0),
        ("a", 97),
        ("hello", 99162322),
        ("polygenelubricants", -2147483648),
        ("\N{GRINNING FACE}", 1772899),
    ],
)
def test_the_hash_is_javas(text: str, value: int) -> None:
    """Values of java.lang.String.hashCode; "polygenelubricants" is known for the one that has no absolute value."""
    assert java_hash(text) == value


def test_a_group_goes_to_the_partition_that_kafka_would_choose() -> None:
    """Utils.abs(groupId.hashCode()) % numPartitions, with 0 for the one number without an absolute value."""
    assert partition_for("hello", 50) == 22
    assert partition_for("polygenelubricants", 50) == 0
    assert partition_for("zzzzzz", 50) == abs(java_hash("zzzzzz")) % 50


@pytest.mark.parametrize("group_id", ["", "x" * 256, "x" * 300])
def test_a_group_id_has_1_to_255_characters(group_id: str) -> None:
    with pytest.raises(InvalidGroupId, match=f"{len(group_id)} characters"):
        check_group_id(group_id)
    check_group_id("g")
    check_group_id("\N{SNOWMAN}" * 255)


def config(**values: object) -> BrokerConfig:
    return BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data", **values})


@pytest.mark.parametrize(
    ("brokers", "voters", "is_set", "needed"),
    [
        (1, 0, False, 1),
        (2, 0, False, 2),
        (3, 0, False, 3),
        (9, 0, False, 3),
        (1, 3, False, 3),  # three nodes that are about to come up
        (1, 0, True, 3),
    ],
)
def test_it_has_three_replicas_or_as_many_as_the_cluster_has_brokers(
    brokers: int, voters: int, is_set: bool, needed: int
) -> None:
    image = MetadataImage(brokers=dict.fromkeys(range(brokers)))  # type: ignore[arg-type] # only how many there are counts
    assert replicas_needed(image, 3, is_set=is_set, voters=voters) == needed


def test_the_first_to_ask_has_it_made_and_everyone_after_finds_it() -> None:
    async def scenario() -> None:
        metadata = MemoryMetadata()
        await metadata.add_broker(1)
        topics = InternalTopics(metadata, config(**{"offsets.topic.num.partitions": 7}))
        made = await asyncio.gather(*(topics.consumer_offsets() for _ in range(3)))
        assert {len(topic.partitions) for topic in made} == {7}
        topic = metadata.image.topic(CONSUMER_OFFSETS)
        assert topic is not None
        assert topic.internal
        assert topic.configs == {"cleanup.policy": "compact", "segment.bytes": str(100 << 20)}
        assert [part.replicas for part in topic.partitions] == [(1,)] * 7

    virtual_time.run(scenario())


def test_a_broker_without_a_lease_names_others_but_not_itself() -> None:
    """Cut off from the controllers it would send clients that still reach it back to itself."""

    async def scenario() -> None:
        metadata = MemoryMetadata()
        for broker_id in (1, 2):
            await metadata.add_broker(broker_id)
        await InternalTopics(metadata, config(**{"offsets.topic.num.partitions": 8})).consumer_offsets()
        lease = SwitchedLease()
        with ThreadPoolExecutor(1) as executor:
            coordinators = GroupCoordinators(
                1,
                lambda: metadata.image,
                GroupConfig(),
                {},
                executor=executor,
                clock=SystemClock(),
                lease=lease,
                most_of_user=1,
            )
        named = {coordinators.named(f"g{number}").broker.broker_id for number in range(20)}
        assert named == {1, 2}
        lease.end()
        for number in range(20):
            group_id = f"g{number}"
            if coordinators.find(group_id).broker.broker_id == 1:
                with pytest.raises(CoordinatorNotAvailable, match="no lease"):
                    coordinators.named(group_id)
            else:
                assert coordinators.named(group_id).broker.broker_id == 2
        lease.renew()
        assert {coordinators.named(f"g{number}").broker.broker_id for number in range(20)} == {1, 2}

    virtual_time.run(scenario())


def test_live_groups_move_up_from_the_level_on_that_all_brokers_know_them() -> None:
    async def scenario() -> None:
        metadata = MemoryMetadata()
        await metadata.add_broker(1)
        with ThreadPoolExecutor(1) as executor:
            coordinators = GroupCoordinators(
                1,
                lambda: metadata.image,
                GroupConfig(),
                BUILT_IN,
                executor=executor,
                clock=SystemClock(),
                lease=SwitchedLease(),
                most_of_user=1,
            )
        core = coordinators._make_core(0)
        assert not core._context.may_upgrade()
        await metadata.propose(update_feature("metadata.version", LIVE_GROUPS_LEVEL))
        assert core._context.may_upgrade()

    virtual_time.run(scenario())


def test_without_enough_brokers_it_is_not_made_and_says_how_many_are_missing() -> None:
    async def scenario() -> None:
        metadata = MemoryMetadata()
        await metadata.add_broker(1)
        topics = InternalTopics(metadata, config(**{"offsets.topic.replication.factor": 3}))
        with pytest.raises(CoordinatorNotAvailable, match="needs 3 brokers to be made, 1 is up"):
            await topics.consumer_offsets()
        await metadata.add_broker(2)
        await metadata.add_broker(3)
        assert len((await topics.consumer_offsets()).partitions[0].replicas) == 3

    virtual_time.run(scenario())


def test_brokers_that_are_cordoned_or_drained_do_not_count_and_the_topic_does_not_get_fewer_replicas() -> None:
    async def scenario() -> None:
        metadata = MemoryMetadata()
        for broker_id in (1, 2, 3):
            await metadata.add_broker(broker_id)
        topics = InternalTopics(metadata, config())
        await metadata.propose(alter_broker(2, cordoned=True))
        await metadata.propose(alter_broker(3, drained=True))
        with pytest.raises(CoordinatorNotAvailable) as refused:
            await topics.consumer_offsets()
        assert str(refused.value) == (
            "__consumer_offsets needs 3 brokers to be made, 1 is up and may have replicas; start more, uncordon or "
            "undrain those 2 that are set aside, or set offsets.topic.replication.factor"
        )
        await metadata.propose(alter_broker(2, cordoned=False))
        await metadata.propose(alter_broker(3, drained=False))
        assert len((await topics.consumer_offsets()).partitions[0].replicas) == 3

    virtual_time.run(scenario())


@pytest.mark.parametrize(("brokers", "replicas", "min_isr"), [(1, 1, "1"), (2, 2, "2"), (3, 3, "2"), (5, 3, "2")])
def test_the_topic_of_transactions_asks_for_as_many_in_sync_as_it_can_have(
    brokers: int, replicas: int, min_isr: str
) -> None:
    """Kafka's default of 2 would keep a node alone from ever writing to it."""

    async def scenario() -> None:
        metadata = MemoryMetadata()
        for broker_id in range(1, brokers + 1):
            await metadata.add_broker(broker_id)
        values = {"transaction.state.log.num.partitions": 5, "transaction.state.log.segment.bytes": 4096}
        topics = InternalTopics(metadata, config(**values))
        topic = await topics.transaction_state()
        assert topic.name == TRANSACTION_STATE
        assert len(topic.partitions) == 5
        assert {len(part.replicas) for part in topic.partitions} == {replicas}
        assert topic.configs == {
            "cleanup.policy": "compact",
            "segment.bytes": "4096",
            "min.insync.replicas": min_isr,
        }
        assert metadata.image.topic(CONSUMER_OFFSETS) is None

    virtual_time.run(scenario())


def test_who_waits_for_one_internal_topic_is_not_told_of_the_other() -> None:
    async def scenario() -> None:
        metadata = MemoryMetadata()
        await metadata.add_broker(1)
        topics = InternalTopics(metadata, config(**{"transaction.state.log.replication.factor": 3}))
        offsets, refused = await asyncio.gather(
            topics.consumer_offsets(), topics.transaction_state(), return_exceptions=True
        )
        assert not isinstance(offsets, BaseException)
        assert str(refused) == (
            "__transaction_state needs 3 brokers to be made, 1 is up; start more, or set "
            "transaction.state.log.replication.factor"
        )

    virtual_time.run(scenario())


def only_a_broker(**values: object) -> BrokerConfig:
    voters = "9@controller:9093"
    return config(
        **{
            "process.roles": "broker",
            "controller.quorum.voters": voters,
            "inter.node.listener": "127.0.0.1:9193",
            **values,
        }
    )


def test_where_controllers_are_no_brokers_the_first_broker_waits_for_others() -> None:
    """It made a topic of one replica, for ever, because the others came up a second later."""

    async def scenario() -> None:
        metadata = MemoryMetadata()
        await metadata.add_broker(1)
        topics = InternalTopics(metadata, only_a_broker())
        with pytest.raises(CoordinatorNotAvailable, match="waits up to 10 s for more brokers than 1"):
            await topics.consumer_offsets()
        await metadata.add_broker(2)
        await metadata.add_broker(3)
        assert len((await topics.consumer_offsets()).partitions[0].replicas) == 3

    virtual_time.run(scenario())


def test_where_no_others_come_it_is_made_with_a_warning_that_names_the_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("broker.coordinator.internal_topics.SETTLE_S", 0.05)

    async def scenario() -> None:
        metadata = MemoryMetadata()
        await metadata.add_broker(1)
        topics = InternalTopics(metadata, only_a_broker())
        with pytest.raises(CoordinatorNotAvailable):
            await topics.consumer_offsets()
        await asyncio.sleep(0.06)
        assert len((await topics.consumer_offsets()).partitions[0].replicas) == 1

    virtual_time.run(scenario())
    (warning,) = (r.getMessage() for r in records_of(caplog, "broker") if r.levelname == "WARNING")
    assert "made with 1 of 3 replicas" in warning
    assert "set offsets.topic.replication.factor" in warning


def test_who_has_set_the_replication_factor_does_not_wait() -> None:
    async def scenario() -> None:
        metadata = MemoryMetadata()
        await metadata.add_broker(1)
        topics = InternalTopics(metadata, only_a_broker(**{"offsets.topic.replication.factor": 1}))
        assert len((await topics.consumer_offsets()).partitions[0].replicas) == 1

    virtual_time.run(scenario())


def test_a_session_timeout_that_a_slow_follower_can_outlast_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_timeouts(15_000, 10_000)
    assert not records_of(caplog, "broker")
    warn_of_timeouts(10_000, 10_000)
    assert "group.consumer.session.timeout.ms=10000 is not above replica.lag.time.max.ms=10000" in caplog.text


def test_a_refusal_is_told_and_the_next_one_tries_again() -> None:
    async def scenario() -> None:
        metadata = MemoryMetadata()
        await metadata.add_broker(1)
        metadata.refuse_with.append(StorageError("the disk is gone"))
        topics = InternalTopics(metadata, config())
        with pytest.raises(CoordinatorNotAvailable, match="cannot be made: the disk is gone"):
            await topics.consumer_offsets()
        assert (await topics.consumer_offsets()).name == CONSUMER_OFFSETS

    virtual_time.run(scenario())


def test_groups_hear_of_topics_that_come_grow_and_go_and_of_nothing_else() -> None:
    async def scenario() -> None:
        metadata = MemoryMetadata()
        await metadata.add_broker(1)
        seen: list[bool] = []
        before = metadata.image

        def listener(image: MetadataImage, records: object) -> None:
            nonlocal before
            seen.append(topics_changed(before, image, records))  # type: ignore[arg-type] # as the port has them
            before = image

        metadata.subscribe(listener)
        create = CreateTopicCommand(name="t", topic_id=bytes(16), partitions=2, replication_factor=1)
        topic_id = (await metadata.propose(MetadataCommand(create_topic=create))).topic_id
        seen_topic = ImageTopics(metadata.image).by_name("t")
        assert seen_topic is not None
        assert (seen_topic.topic_id, seen_topic.partitions) == (topic_id, 2)
        grow = CreatePartitionsCommand(topic="t", partitions=3)
        await metadata.propose(MetadataCommand(create_partitions=grow))
        await metadata.add_broker(2)
        await metadata.propose(MetadataCommand(delete_topic=DeleteTopicCommand(name="t")))
        assert seen[:2] == [True, True]
        assert seen[-1]
        assert not any(seen[2:-1])
        assert ImageTopics(metadata.image).by_id(topic_id) is None

    virtual_time.run(scenario())


def test_assignors_are_those_that_the_configuration_names_in_its_order(tmp_path: Path) -> None:
    assert list(load_assignors(("range", "sticky"))) == ["range", "sticky"]
    with pytest.raises(InvalidConfig, match="'nearest' is neither a built-in assignor"):
        load_assignors(("nearest",))


def test_an_entry_point_adds_an_assignor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[raftlog.assignors]\nnearest = plugged:Nearest\nbroken = plugged:Missing\n")
    (tmp_path / "plugged.py").write_text(
        "class Nearest:\n    name = 'nearest'\n    def assign(self, group):\n        return {}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = load_assignors(("nearest", "sticky"))
    assert list(loaded) == ["nearest", "sticky"]
    assert loaded["nearest"].name == "nearest"
    with pytest.raises(InvalidConfig, match="'broken' cannot be loaded"):
        load_assignors(("broken",))


def test_two_heartbeats_fit_into_a_session() -> None:
    with pytest.raises(InvalidConfig, match=r"group.consumer.session.timeout.ms=5000 ends when one heartbeat is late"):
        config(**{"group.consumer.session.timeout.ms": 5_000})
