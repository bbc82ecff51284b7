"""The replica manager: partitions, roles and moves by the metadata, whatever the disk does; what is logged of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.log.config import LogConfig
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.partition.partition import Partition
from broker.replicas import replica_manager
from broker.replicas.partition_logs import PartitionLogs
from raftlog.errors import (
    CorruptRecordError,
    InvalidConfig,
    InvalidRequestError,
    NotLeader,
    RaftlogError,
    StorageError,
    StorageFull,
    UnknownTopicId,
)
from raftlog.format import Attributes
from raftlog.format.control import Marker, encode_control
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import ConfigResource
from raftmeta.decide import decide
from raftmeta.image import (
    CLUSTER_DEFAULT,
    NO_LEADER,
    BrokerImage,
    MetadataImage,
    PartitionImage,
    ResourceKey,
    TopicImage,
    broker_record,
    config_record,
    partition_record,
)
from raftmeta.replay import replay_all
from replication.ports import Diverging, Replica
from tests.support import virtual_time
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, image_with, partition_records, removal
from tests.support.logged import records_of
from tests.support.memory_storage import Fault, MemoryStorage
from tests.support.replica_link import settle


async def apply_again(parts: Parts) -> None:
    parts.registry.retry_failed()
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_partition_that_could_not_be_made_is_made_when_there_is_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = LogManager.create
    full = True

    def create(self: LogManager, *arguments: Any, **options: Any) -> Any:
        if full:
            raise StorageFull("no space left")
        return make(self, *arguments, **options)

    monkeypatch.setattr(LogManager, "create", create)

    async def scenario() -> None:
        nonlocal full
        async with Parts(tmp_path, partitions=2) as parts:
            with pytest.raises(StorageFull):
                parts.registry.find(TOPIC_ID, 0)
            await apply_again(parts)
            with pytest.raises(StorageFull):
                parts.registry.find(TOPIC_ID, 1)
            full = False
            await apply_again(parts)
            assert [parts.registry.find(TOPIC_ID, number).leader_epoch for number in (0, 1)] == [3, 3]

    asyncio.run(scenario())


async def make_damaged(root: Path) -> None:
    """Leave a log behind that ends below its recovery point."""
    async with Parts(root) as parts:
        parts.registry.find(TOPIC_ID, 0).append(batch_of(b"lost"), 3, None)
    (segment,) = (root / "logs-0" / "t-0").glob("*.log")
    segment.write_bytes(b"")
    (root / "logs-0" / "clean-shutdown").unlink()


async def test_a_damaged_log_goes_with_its_topic(tmp_path: Path) -> None:
    await make_damaged(tmp_path)
    async with Parts(tmp_path) as parts:
        with pytest.raises(StorageError):
            parts.registry.find(TOPIC_ID, 0)
        image = type(parts.image)(offset=2)
        parts.registry.on_metadata(image, [removal()])
        await parts.registry.wait_applied(2)
        assert not (tmp_path / "logs-0" / "t-0").exists()
        with pytest.raises(UnknownTopicId):
            parts.registry.find(TOPIC_ID, 0)


async def test_a_damaged_log_of_an_unknown_topic_is_set_aside(tmp_path: Path) -> None:
    await make_damaged(tmp_path)
    parts = Parts(tmp_path)
    parts.image = replace(parts.image, topics={}, topic_id_by_name={})
    async with parts:
        names = [path.name for path in (tmp_path / "logs-0").iterdir() if path.is_dir()]
        assert names == [f"~stray-{TOPIC_ID.hex()}-0"]


async def test_what_is_no_topic_id_is_said_to_be_none(tmp_path: Path) -> None:
    async with Parts(tmp_path) as parts:
        with pytest.raises(InvalidRequestError, match="16 bytes"):
            parts.registry.find(b"x" * 1_000, 0)


async def test_a_topic_whose_metadata_cannot_be_applied_is_not_served_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a leadership that was taken away would go on here, and the controller would hear that it was let go."""
    async with Parts(tmp_path) as parts:
        partition = parts.registry.find(TOPIC_ID, 0)

        def fail(configs: object) -> None:
            raise ValueError("no such value")

        monkeypatch.setattr(LogConfig, "from_topic_configs", fail)
        moved = image_with(1, offset=2, leader_epoch=4, leader=2, replicas=(1, 2))
        parts.registry.on_metadata(moved, partition_records(moved))
        await parts.registry.wait_applied(2)
        with pytest.raises(StorageError, match="cannot apply"):
            parts.registry.find(TOPIC_ID, 0)
        with pytest.raises(StorageError):
            partition.append(batch_of(b"a"), -1, None)


KEY = (TOPIC_ID, 0)


def image(
    offset: int,
    leader: int = 2,
    *,
    epoch: int = 3,
    replicas: tuple[int, ...] = (1, 2),
    isr: tuple[int, ...] | None = None,
) -> MetadataImage:
    return image_with(
        1, offset=offset, leader=leader, leader_epoch=epoch, replicas=replicas, isr=isr, partition_epoch=offset
    )


def with_topic(made: MetadataImage, **changes: object) -> MetadataImage:
    topic: TopicImage = replace(made.topics[TOPIC_ID], **changes)  # type: ignore[arg-type] # the tests' values
    return replace(made, topics={TOPIC_ID: topic})


def fill(partition: Partition) -> None:
    partition.append(batch_of(b"v"), -1, None)


def directories(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "logs-0").iterdir() if path.is_dir())


async def test_the_fetchers_hear_of_every_epoch_before_it_matters_and_of_the_end(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1)
    async with parts:
        followed, leader = parts.followed.now[KEY]
        assert (followed.leader_epoch, leader) == (3, 2)
        await parts.apply(image(2, isr=(2,)))
        assert parts.followed.now[KEY] == (followed, 2)
        await parts.apply(image(3, epoch=4))
        followed, leader = parts.followed.now[KEY]
        assert (followed.leader_epoch, leader) == (4, 2)
        await parts.apply(image(4, leader=-1, epoch=5))
        assert parts.followed.now == {}
        await parts.apply(image(5, leader=2, epoch=6))
        await parts.apply(image(6, leader=1, epoch=7))
        assert parts.followed.now == {}
        assert parts.registry.find(*KEY).leads
        await parts.apply(image(7, leader=2, epoch=8))
        assert parts.followed.now[KEY][0].leader_epoch == 8
        parts.registry._on_storage_error(parts.registry.find(*KEY).log, OSError(5, "broken"))
        await settle()
        assert parts.followed.now == {}


async def test_a_replica_that_is_moved_away_is_deleted(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1, leader=1)
    async with parts:
        partition = parts.registry.find(*KEY)
        fill(partition)
        await parts.apply(image(2, leader=2, epoch=4, replicas=(1, 2)))
        await parts.apply(image(3, leader=2, epoch=4, replicas=(2, 3)))
        assert parts.followed.now == {}
        with pytest.raises(NotLeader) as refused:
            parts.registry.find(*KEY)
        assert refused.value.leader_id == 2
        assert [name for name in directories(tmp_path) if not name.startswith("~delete")] == []
        await parts.apply(image(4, leader=2, epoch=4, replicas=(1, 2, 3)))
        assert parts.registry.find(*KEY).log_end_offset == 0, "the replica must begin with an empty log and fetch it"
        assert KEY in parts.followed.now


async def test_a_replica_that_was_moved_away_meanwhile_is_set_aside(tmp_path: Path) -> None:
    """The image came as a whole, so no record said that the topic was deleted."""
    parts = Parts(tmp_path)
    parts.image = image(1)
    async with parts:
        pass
    parts = Parts(tmp_path)
    parts.image = image(5, replicas=(2, 3))
    async with parts:
        assert directories(tmp_path) == [f"~stray-{TOPIC_ID.hex()}-0"]
        with pytest.raises(NotLeader):
            parts.registry.find(*KEY)


async def damaged(root: Path) -> Parts:
    """Return the next life of a node whose log lost fsynced records."""
    parts = Parts(root)
    parts.image = image(1, leader=1)
    async with parts:
        fill(parts.registry.find(*KEY))
        await settle()
    (segment,) = (root / "logs-0" / "t-0").glob("*.log")
    segment.write_bytes(b"")
    (root / "logs-0" / "clean-shutdown").unlink()
    return Parts(root)


def offline(parts: Parts) -> list[records_pb2.OfflineReplicasCommand]:
    return [each.offline_replicas for each in parts.proposals.commands if each.HasField("offline_replicas")]


async def test_a_damaged_replica_is_reported_and_fetched_anew_once_it_counts_for_nothing(tmp_path: Path) -> None:
    parts = await damaged(tmp_path)
    parts.image = image(2, leader=-1, epoch=4)
    async with parts:
        assert offline(parts) == []
        await parts.registry.report_offline_replicas()
        (command,) = offline(parts)
        assert (command.broker_id, command.broker_epoch) == (1, 1)
        assert list(command.partitions) == [records_pb2.PartitionRef(topic_id=TOPIC_ID, partition=0)]
        await parts.registry.report_offline_replicas()
        assert len(offline(parts)) == 1
        with pytest.raises(StorageError):
            parts.registry.find(*KEY)
        for offset, leader, isr in ((3, 2, (1, 2)), (4, -1, (2,)), (5, 1, (1, 2))):
            await parts.apply(image(offset, leader=leader, epoch=4, isr=isr))
            with pytest.raises(StorageError):
                parts.registry.find(*KEY)
        eligible = image(6, leader=2, epoch=6, isr=(2,))
        (part,) = eligible.topics[TOPIC_ID].partitions
        await parts.apply(with_topic(eligible, partitions=(replace(part, eligible_leader_replicas=(1,)),)))
        with pytest.raises(StorageError):
            parts.registry.find(*KEY)
        await parts.apply(image(7, leader=2, epoch=6, isr=(2,)))
        assert parts.registry.find(*KEY).log_end_offset == 0
        assert KEY in parts.followed.now
        assert directories(tmp_path) == ["t-0", f"~stray-{TOPIC_ID.hex()}-0"], (
            "the damaged log must be kept in a stray directory"
        )


async def test_the_only_replica_is_neither_reported_nor_given_up(tmp_path: Path) -> None:
    parts = await damaged(tmp_path)
    parts.image = image(2, leader=1, replicas=(1,))
    async with parts:
        await parts.registry.report_offline_replicas()
        assert offline(parts) == []
        with pytest.raises(StorageError):
            parts.registry.find(*KEY)


async def test_a_directory_that_fails_is_reported_at_once_and_again_until_it_is_heard(tmp_path: Path) -> None:
    storage = MemoryStorage()
    parts = Parts(tmp_path, storage=storage)
    parts.image = image(1, leader=1)
    parts.proposals.refusal = StorageError("the controller has no disk either")
    async with parts:
        partition = parts.registry.find(*KEY)
        storage.faults.append(Fault("datasync", "*.log"))
        answers: list[BaseException | None] = []
        partition.append(batch_of(b"v"), -1, answers.append)
        await settle()
        assert [type(error) for error in answers] == [StorageError]
        assert len(offline(parts)) == 1
        parts.proposals.refusal = None
        parts.registry.retry_failed()
        await settle()
        assert len(offline(parts)) == 2
        parts.registry.retry_failed()
        await settle()
        assert len(offline(parts)) == 2


async def test_a_leadership_of_an_earlier_life_is_not_taken_up(tmp_path: Path) -> None:
    """In the same epoch that life may have given out offsets which this one knows nothing of."""
    parts = Parts(tmp_path)
    made = image(1, leader=1)
    fenced = BrokerImage(1, bytes(16), 1, "broker-1", 9091, fenced=True)
    parts.image = replace(made, brokers={**made.brokers, 1: fenced})
    async with parts:
        partition = parts.registry.find(*KEY)
        assert not partition.leads
        up = replace(fenced, fenced=False)
        unfenced = replace(made, offset=2, brokers={**made.brokers, 1: up})
        parts.registry.on_metadata(unfenced, [broker_record(up)])
        await parts.registry.wait_applied(2)
        assert partition.leads


async def test_the_larger_min_insync_replicas_of_controller_and_broker_counts(tmp_path: Path) -> None:
    """KAFKA-16540: a broker whose file says less than the cluster must not acknowledge with less."""
    parts = Parts(tmp_path)
    parts.registry._topic_defaults = {"min.insync.replicas": "1"}
    parts.image = with_topic(image(1, leader=1), configs={"min.insync.replicas": "2"})
    async with parts:
        leading = parts.registry.find(*KEY)._leading
        assert leading is not None
        assert leading.state.membership.min_insync_replicas == 2
        parts.registry._topic_defaults = {"min.insync.replicas": "3"}
        await parts.apply(image(2, leader=1))
        assert leading.state.membership.min_insync_replicas == 3


async def test_the_nearer_replica_is_an_active_one_in_the_readers_rack(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    made = image(1, leader=1)
    racks = {number: replace(broker, rack=f"r{number}") for number, broker in made.brokers.items()}
    parts.image = replace(made, brokers=racks)
    async with parts:
        partition = parts.registry.find(*KEY)
        assert parts.registry.preferred_replica(partition, "r2") is None, (
            "no replica may be recommended before it was heard of"
        )
        fetched = partition.open_replica(
            replica=Replica(2, 1),
            leader_epoch=3,
            fetch_offset=0,
            last_fetched_epoch=-1,
            durable_end_offset=0,
            on_change=lambda: None,
        )
        assert fetched == ()
        assert parts.registry.preferred_replica(partition, "r2") == 2
        assert parts.registry.preferred_replica(partition, "r1") is None, (
            "the leader must be read if it is in the reader's rack"
        )
        assert parts.registry.preferred_replica(partition, "elsewhere") is None
        gone = {**racks, 2: replace(racks[2], fenced=True)}
        parts.registry.on_metadata(replace(parts.image, offset=2, brokers=gone), [broker_record(gone[2])])
        await parts.registry.wait_applied(2)
        assert parts.registry.preferred_replica(partition, "r2") is None


async def test_a_follower_whose_log_lacks_a_marker_is_taken_out_of_service(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1)
    async with parts:
        partition = parts.registry.find(*KEY)
        assert partition.following is not None
        assert parts.registry.durable_on_all(partition.log) == 0, (
            "a follower does not know what all replicas have on disk"
        )
        opened = batch_of(
            b"v",
            producer_id=7,
            producer_epoch=0,
            base_sequence=0,
            attributes=int(Attributes.TRANSACTIONAL),
            leader_epoch=3,
        )
        partition.following.append_replicated(opened, 3, lambda held: None)
        marker = encode_control([Marker(7, 2, True, 0, 1)], 0, base_offset=1, leader_epoch=3)
        with pytest.raises(StorageError, match="copied again from the leader"):
            partition.following.append_replicated(marker, 3, lambda held: None)
        await settle()
        with pytest.raises(StorageError, match="lacks the marker"):
            parts.registry.find(*KEY)


OTHER = b"other-id-16bytes"


def two_of(offset: int, *leaders: tuple[int, int]) -> MetadataImage:
    """Return an image of a topic with a (leader, leader epoch) for each partition."""
    made = image_with(len(leaders), offset=offset, replicas=(1, 2), partition_epoch=offset)
    parts = zip(made.topics[TOPIC_ID].partitions, leaders, strict=True)
    return with_topic(made, partitions=tuple(replace(part, leader=who, leader_epoch=e) for part, (who, e) in parts))


def changed(before: MetadataImage, number: int, **changes: Any) -> tuple[MetadataImage, records_pb2.MetadataRecord]:
    """Return the next image, with one partition changed, and its record."""
    partitions = list(before.topics[TOPIC_ID].partitions)
    part = partitions[number] = replace(
        partitions[number], partition_epoch=partitions[number].partition_epoch + 1, **changes
    )
    made = replace(with_topic(before, partitions=tuple(partitions)), offset=before.offset + 1)
    return made, partition_record(TOPIC_ID, part)


async def apply(parts: Parts, made: MetadataImage, *records: records_pb2.MetadataRecord) -> None:
    parts.registry.on_metadata(made, records)
    await parts.registry.wait_applied(made.offset)


def leads(partition: Partition) -> bool:
    return partition.leads


def is_following(partition: Partition) -> bool:
    return partition.following is not None


def nothing() -> None:
    """No callback."""


def open_follower(leader: Partition, epoch: int = 3) -> None:
    leader.open_replica(
        Replica(2, 1),
        leader_epoch=epoch,
        fetch_offset=leader.log_end_offset,
        last_fetched_epoch=-1 if leader.log_end_offset == 0 else epoch,
        durable_end_offset=leader.log_end_offset,
        on_change=nothing,
    )


# Truncations


async def test_the_truncation_of_one_partition_holds_up_no_other_one(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = two_of(1, (1, 1), (2, 1))
    async with parts:
        zero, one = (parts.registry.find(TOPIC_ID, number) for number in (0, 1))
        fill(zero)
        await settle()
        await parts.apply(two_of(2, (2, 2), (2, 1)))
        parts.disk.held = True
        assert zero.following is not None
        zero.following.truncate(Diverging(0, 0), 2, lambda error: None)
        await parts.apply(two_of(3, (2, 3), (1, 2)))
        assert leads(one)
        assert parts.registry.applied_offset == 3
        await parts.apply(two_of(4, (2, 3), (2, 3)))
        assert not leads(one), "the broker must stop leading as soon as it applies the change"
        assert not is_following(zero), "the next term must wait, though the former one is over"
        assert (TOPIC_ID, 0) not in parts.followed.now
        parts.disk.release()
        await settle()
        assert is_following(zero)
        assert zero.leader_epoch == 3
        assert parts.followed.now[TOPIC_ID, 0][1] == 2


async def test_the_role_after_a_truncation_is_the_newest_one(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = two_of(1, (1, 1))
    told: list[bool] = []
    async with parts:
        zero = parts.registry.find(*KEY)
        fill(zero)
        await settle()
        await parts.apply(two_of(2, (2, 2)))
        parts.disk.held = True
        assert zero.following is not None
        zero.following.truncate(Diverging(0, 0), 2, lambda error: None)
        await parts.apply(two_of(3, (1, 3)))
        with pytest.raises(NotLeader, match="once the log is truncated"):
            zero.append(batch_of(b"v"), -1, None)
        await parts.apply(two_of(4, (2, 4)))
        await parts.apply(two_of(5, (1, 5)))
        parts.registry.on_applied = told.append
        parts.disk.release()
        await settle()
        assert (zero.leads, zero.leader_epoch) == (True, 5)
        assert told == [True]


# Limits of what a topic's configs may ask for


def test_a_topics_segments_are_no_smaller_than_the_operator_allows() -> None:
    image = with_topic(image_with(1, offset=1), configs={"segment.bytes": "1024", "segment.ms": "1"})
    [topic] = image.topics.values()
    rules = replica_manager.topic_rules(image, topic, {}, 1, 1 << 20)
    assert (rules.log.segment_bytes, rules.log.segment_ms) == (1 << 20, 1_000)


@pytest.mark.parametrize(
    ("of_file", "dynamic", "most"),
    [({}, None, 64 << 20), ({"max.inflate.bytes": "4096"}, None, 4096), ({"max.inflate.bytes": "4096"}, "8192", 8192)],
)
def test_a_topic_from_before_the_limit_inflates_what_its_broker_does(
    of_file: dict[str, str], dynamic: str | None, most: int
) -> None:
    image = with_topic(image_with(1, offset=1), configs={"max.inflate.bytes": str(1 << 30)})
    if dynamic is not None:
        image = replace(
            image,
            configs={ResourceKey(ConfigResource.BROKER, CLUSTER_DEFAULT): {"max.inflate.bytes": dynamic}},
        )
    [topic] = image.topics.values()
    assert replica_manager.topic_rules(image, topic, of_file, 1).log.max_inflate_bytes == most


# What a record costs


async def test_a_record_is_applied_to_its_partition_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(tmp_path)
    parts.image = image_with(20, offset=1, replicas=(1, 2, 3), isr=(1, 2))
    async with parts:
        touched: list[tuple[bytes, int]] = []
        worked_out: list[str] = []
        bring_up, rules = parts.registry._bring_up, replica_manager.topic_rules

        def noted(key: tuple[bytes, int]) -> None:
            touched.append(key)
            bring_up(key)

        def counted(made: MetadataImage, topic: TopicImage, *arguments: Any) -> replica_manager.TopicRules:
            worked_out.append(topic.name)
            return rules(made, topic, *arguments)

        monkeypatch.setattr(parts.registry, "_bring_up", noted)
        monkeypatch.setattr(replica_manager, "topic_rules", counted)
        made, record = changed(parts.image, 7, isr=(1, 2, 3))
        await apply(parts, made, record)
        assert touched == [(TOPIC_ID, 7)]
        assert worked_out == []
        leading = parts.registry.find(TOPIC_ID, 7)._leading
        assert leading is not None
        assert leading.state.isr == {1, 2, 3}
        configs = {"min.insync.replicas": "2"}
        made = replace(with_topic(made, configs=configs), offset=3)
        record = config_record(ResourceKey(records_pb2.ConfigResource.TOPIC, "t"), "min.insync.replicas", "2")
        await apply(parts, made, record)
        assert len(touched) == 21
        assert worked_out == ["t"], "the limit must be worked out once for all partitions of the topic"
        assert leading.state.membership.min_insync_replicas == 2


def test_a_long_queue_lets_others_have_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_manager, "SLICE_S", 0.0)

    async def scenario() -> None:
        parts = Parts(tmp_path)
        parts.image = image_with(1, offset=1, replicas=(1, 2), isr=(1,))
        async with parts:
            made, seen = parts.image, list[int]()
            for number in range(50):
                made, record = changed(made, 0, isr=(1, 2) if number % 2 else (1,))
                parts.registry.on_metadata(made, [record])
            while parts.registry.applied_offset < made.offset:
                seen.append(parts.registry.applied_offset)
                await asyncio.sleep(0)
            assert len(set(seen)) > 10

    asyncio.run(scenario())


async def test_a_lost_replica_is_not_opened_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(tmp_path, dirs=2)
    parts.image = image_with(4, offset=1, leader=2, replicas=(1, 2), partition_epoch=1)
    async with parts:
        asked: list[int] = []
        create = LogManager.create

        def counted(self: LogManager, topic: str, topic_id: bytes, partition: int, *rest: Any, **named: Any) -> Any:
            asked.append(partition)
            return create(self, topic, topic_id, partition, *rest, **named)

        monkeypatch.setattr(LogManager, "create", counted)
        parts.logs.mark_dir_offline(min(parts.logs.directory_ids), OSError(5, "broken"))
        await settle()
        lost = [number for number in range(4) if (TOPIC_ID, number) in parts.registry._failed]
        assert len(lost) == 2
        made = parts.image
        for number in range(4):
            made, record = changed(made, number, isr=(2,))
            await apply(parts, made, record)
        parts.registry.retry_failed()
        await settle()
        assert asked == []
        for number in lost:
            with pytest.raises(StorageError, match="is offline"):
                parts.registry.find(TOPIC_ID, number)


async def test_logs_are_made_side_by_side_while_the_metadata_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(tmp_path)
    parts.image = image_with(1, offset=1, replicas=(1, 2))
    async with parts:
        led = parts.registry.find(*KEY)
        under_way, most = 0, 0
        gate = asyncio.Event()
        really_open = PartitionLogs.open

        async def slow(self: PartitionLogs, *arguments: Any) -> PartitionLog:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await gate.wait()
            under_way -= 1
            return await really_open(self, *arguments)

        monkeypatch.setattr(PartitionLogs, "open", slow)
        made = image_with(9, offset=2, replicas=(1, 2))
        parts.registry.on_metadata(made, partition_records(made))
        gone, record = changed(made, 0, leader=2, leader_epoch=4)
        parts.registry.on_metadata(gone, [record])
        await settle()
        assert parts.registry.applied_offset == 3
        assert not leads(led)
        waiting = asyncio.create_task(parts.registry.wait_applied(2))
        await settle()
        assert not waiting.done(), "the call that created the topic must wait until its logs are made"
        assert most == 4
        gate.set()
        await waiting
        await parts.registry.wait_applied(3)
        assert all(parts.registry.find(TOPIC_ID, number).leads for number in range(1, 9))


async def test_a_topic_that_goes_while_its_log_is_made_leaves_nothing(tmp_path: Path) -> None:
    parts = Parts(tmp_path, partitions=0)
    async with parts:
        parts.disk.held = True
        made = image_with(1, offset=2)
        parts.registry.on_metadata(made, partition_records(made))
        await settle()
        parts.registry.on_metadata(MetadataImage(offset=3, brokers=made.brokers), [removal()])
        await settle()
        assert parts.registry.applied_offset == 3
        parts.disk.release()
        await parts.registry.wait_applied(3)
        assert len(parts.registry) == 0
        assert [name for name in directories(tmp_path) if not name.startswith("~delete")] == []


# Disks that fail


async def test_a_log_whose_directory_fails_right_after_it_was_made_is_not_served(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = image_with(0, offset=1)
    async with parts:
        made = image_with(1, offset=2, replicas=(1, 2), partition_epoch=1)
        parts.disk.held = True
        parts.registry.on_metadata(made, partition_records(made))
        await settle()
        parts.disk.release()
        parts.logs.mark_dir_offline(next(iter(parts.logs.directory_ids)), OSError(5, "broken"))
        await settle()
        with pytest.raises(StorageError, match="offline"):
            parts.registry.find(*KEY)
        assert len(offline(parts)) == 1


def decided(
    before: MetadataImage, command: records_pb2.MetadataCommand, offset: int
) -> tuple[MetadataImage, tuple[records_pb2.MetadataRecord, ...]]:
    """Return the controller's decision on a command."""
    sent = records_pb2.MetadataCommand()
    sent.CopyFrom(command)
    sent.controller_epoch = before.controller_epoch
    decision = decide(before, sent, offset)
    return replay_all(before, decision.records, offset), tuple(decision.records)


async def test_a_replica_without_a_log_is_not_taken_into_the_isr_by_what_was_heard_of_it_before(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1, leader=1, isr=(1, 2))
    async with parts:
        leader = parts.registry.find(*KEY)
        open_follower(leader)
        report = records_pb2.MetadataCommand(
            offline_replicas=records_pb2.OfflineReplicasCommand(
                broker_id=2,
                broker_epoch=1,
                partitions=[records_pb2.PartitionRef(topic_id=TOPIC_ID, partition=0)],
            )
        )
        made, records = decided(parts.image, report, 2)
        assert made.topics[TOPIC_ID].partitions[0].isr == (1,)
        await apply(parts, made, *records)
        parts.registry.check_isr()
        await settle()
        assert parts.proposals.commands == []
        with pytest.raises(RaftlogError, match="open it again"):
            leader.replica_acked(Replica(2, 1), nothing, 0)
        open_follower(leader)  # with the log that it has made anew
        await settle()
        (asked,) = parts.proposals.commands
        assert [member.broker_id for member in asked.alter_partition.new_isr] == [1, 2]
        again, record = changed(made, 0)
        await apply(parts, again, record)
        leader.replica_acked(Replica(2, 1), nothing, 0)  # the mark is an old one


async def test_a_lost_replica_is_reported_again_when_its_mark_is_gone(tmp_path: Path) -> None:
    """A leader that has not heard of it yet has taken it into the ISR."""
    parts = Parts(tmp_path)
    parts.image = image(1, leader=2)
    async with parts:
        parts.registry._on_storage_error(parts.registry.find(*KEY).log, OSError(5, "broken"))
        await settle()
        (report,) = (each for each in parts.proposals.commands if each.HasField("offline_replicas"))
        parts.registry._offline_replicas._reported[KEY] = 2  # type: ignore[union-attr] # where it is committed
        made, records = decided(parts.image, report, 2)
        await apply(parts, made, *records)
        parts.registry.retry_failed()
        await settle()
        assert len(offline(parts)) == 1
        joined, record = changed(made, 0, isr=(1, 2), offline_replicas=())
        await apply(parts, joined, record)
        await settle()
        assert len(offline(parts)) == 2


# Damage found while serving


async def test_a_damaged_replica_is_closed_reported_and_fetched_anew(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1, leader=1)
    async with parts:
        partition = parts.registry.find(*KEY)
        fill(partition)
        await settle()
        parts.registry.on_damaged(partition.log, CorruptRecordError("t-0 position 0: damaged"))
        await settle()
        assert not leads(partition)
        with pytest.raises(StorageError, match="position 0"):
            parts.registry.find(*KEY)
        assert len(offline(parts)) == 1
        await parts.apply(image(2, leader=2, epoch=4, isr=(2,)))
        anew = parts.registry.find(*KEY)
        assert (anew.log_end_offset, anew.leads) == (0, False)
        assert parts.followed.now[KEY][1] == 2
        assert directories(tmp_path) == ["t-0", f"~stray-{TOPIC_ID.hex()}-0"]


async def test_a_followers_log_with_a_record_of_an_epoch_that_never_was_is_fetched_anew(tmp_path: Path) -> None:
    """A bit flipped in a batch's leader epoch, outside its checksum; the leader refuses a follower with such a log."""
    parts = Parts(tmp_path)
    parts.image = image(1, leader=1, epoch=35)
    async with parts:
        fill(parts.registry.find(*KEY))
        await settle()
    parts = Parts(tmp_path)
    parts.image = image(0, leader=2, epoch=3, isr=(2,))
    async with parts:
        await settle()
        assert is_following(parts.registry.find(*KEY)), (
            "the partition must be followed, as metadata from before the registration may lack epoch 35"
        )
        await parts.apply(image(1, leader=2, epoch=4))
        await settle()
        assert parts.registry.find(*KEY).log_end_offset == 1, (
            "the log must stay, as a member of the ISR may have records that no other replica has"
        )
        assert offline(parts) == []
        await parts.apply(image(2, leader=2, epoch=4, isr=(2,)))
        await settle()
        assert parts.registry.find(*KEY).log_end_offset == 0
        assert parts.followed.now[KEY][1] == 2
        assert directories(tmp_path) == ["t-0", f"~stray-{TOPIC_ID.hex()}-0"]


@pytest.mark.parametrize(("replicas", "isr"), [((1,), (1,)), ((1, 2), (1,))])
async def test_a_damaged_replica_that_nobody_can_stand_in_for_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, replicas: tuple[int, ...], isr: tuple[int, ...]
) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1, leader=1, replicas=replicas, isr=isr)
    async with parts:
        partition = parts.registry.find(*KEY)
        parts.registry.on_damaged(partition.log, CorruptRecordError("00.log position 7: damaged"))
        await settle()
        assert parts.registry.find(*KEY).leads
        assert offline(parts) == []
        (line,) = (each for each in records_of(caplog, "broker") if each.levelno == logging.ERROR)
        assert "00.log position 7" in line.getMessage()


async def test_the_damage_of_a_log_that_was_replaced_meanwhile_is_nobodys(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1, leader=2)
    async with parts:
        old = parts.registry.find(*KEY).log
        await parts.apply(image(2, leader=2, replicas=(2, 3)))
        await parts.apply(image(3, leader=2, replicas=(2, 1)))
        parts.registry.on_damaged(old, CorruptRecordError("damaged"))
        await settle()
        assert parts.registry.find(*KEY).log is not old
        assert offline(parts) == []


# What cannot be applied


async def test_what_was_given_up_stays_closed_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would lead again in its epoch, without the broker that it had asked to be taken into the ISR."""
    parts = Parts(tmp_path)
    parts.image = image(1, leader=1, isr=(1,))
    async with parts:
        partition = parts.registry.find(*KEY)
        open_follower(partition)
        await settle()
        assert partition.wanted_isr({}) is None
        rules = replica_manager.topic_rules

        def broken(*arguments: object) -> None:
            raise InvalidConfig("one that this broker does not take")

        monkeypatch.setattr(replica_manager, "topic_rules", broken)
        configs = {"retention.ms": "1"}
        await parts.apply(with_topic(image(2, leader=1, isr=(1,)), configs=configs))
        monkeypatch.setattr(replica_manager, "topic_rules", rules)
        for offset, epoch in ((3, 3), (4, 4)):
            await parts.apply(with_topic(image(offset, leader=1, epoch=epoch, isr=(1,)), configs=configs))
            parts.registry.retry_failed()
            await settle()
            with pytest.raises(StorageError, match="restart it"):
                parts.registry.find(*KEY)
        assert not leads(partition)
        assert len(offline(parts)) == 1


async def test_no_epoch_is_led_twice(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    made = parts.image = image(1, leader=1, isr=(1,))
    async with parts:
        partition = parts.registry.find(*KEY)
        assert leads(partition)
        for offset, is_fenced in ((2, True), (3, False)):
            broker = BrokerImage(1, bytes(16), 1, "broker-1", 9091, fenced=is_fenced)
            made = replace(made, offset=offset, brokers={**made.brokers, 1: broker})
            await apply(parts, made, broker_record(broker), *partition_records(made))
            assert not leads(partition)
        with pytest.raises(NotLeader, match="wait for the next"):
            partition.append(batch_of(b"v"), -1, None)
        await parts.apply(image(4, leader=1, epoch=4, isr=(1,)))
        assert leads(partition)


async def test_an_unexpected_error_keeps_no_leadership_that_was_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(tmp_path)
    base = image(1, leader=1)
    other = TopicImage("other", OTHER, (PartitionImage(0, (1, 2), (1, 2), 1, 5, 1),))
    parts.image = replace(base, topics={**base.topics, OTHER: other}, topic_id_by_name={"t": TOPIC_ID, "o": OTHER})
    async with parts:
        led = parts.registry.find(OTHER, 0)
        assert leads(led)

        def no_thread(*arguments: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(parts.logs, "delete", no_thread)
        gone = replace(
            other, partitions=(PartitionImage(0, (1, 2), (1, 2), -1, 6, 2, revoked_leader=1, revoked_at_offset=2),)
        )
        made = replace(parts.image, offset=2, topics={OTHER: gone}, topic_id_by_name={"o": OTHER})
        await apply(parts, made, removal(), partition_record(OTHER, gone.partitions[0]))
        assert not leads(led)
        assert (tmp_path / "logs-0" / "t-0").exists()
        monkeypatch.undo()
        parts.registry.retry_failed()
        await settle()
        assert not (tmp_path / "logs-0" / "t-0").exists()


async def test_a_whole_image_gives_roles_also_when_strays_cannot_be_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1, leader=1)
    async with parts:
        partition = parts.registry.find(*KEY)

        def fail(*arguments: object) -> None:
            raise RuntimeError("no thread")

        monkeypatch.setattr(parts.logs, "set_aside", fail)
        monkeypatch.setattr(PartitionLogs, "strays", fail)
        await parts.apply(image(2, leader=2, epoch=4), whole=True)
        assert not leads(partition)
        assert is_following(partition)


# The rest


async def test_a_leader_by_an_unclean_election_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts(tmp_path)
    parts.image = image(1, leader=1)
    async with parts:
        fill(parts.registry.find(*KEY))
        await settle()
        await parts.apply(image(2, leader=-1, epoch=4, isr=(2,)))
        made = image(3, leader=1, epoch=5, isr=(1,))
        record = partition_record(TOPIC_ID, made.topics[TOPIC_ID].partitions[0], unclean_election=True)
        await apply(parts, made, record)
        later, record = changed(made, 0, isr=(1, 2))
        await apply(parts, later, record)
    (line,) = (each for each in caplog.records if "unclean" in each.getMessage())
    assert line.levelno == logging.WARNING
    assert line.getMessage() == ("leads t-0 after an unclean election from offset 1: committed records may be lost")


async def test_one_partitions_error_ends_neither_housekeeping_nor_the_look_at_isrs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(tmp_path, partitions=3)
    async with parts:
        kept: list[int] = []

        def work(self: Partition, *arguments: object) -> None:
            if self.log.partition == 1:
                raise ValueError("a bug")
            kept.append(self.log.partition)

        for partition in parts.registry.partitions():
            partition.log.update_config(replace(partition.log.config, flush_ms=60_000))
            partition.apply_config()
        monkeypatch.setattr(Partition, "housekeep", work)
        monkeypatch.setattr(Partition, "wanted_isr", work)
        parts.registry.housekeep()
        parts.registry.check_isr()
        await settle()
        assert kept == [0, 2, 0, 2]


async def test_housekeeping_looks_at_partitions_with_work_for_it_and_at_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may have thousands of partitions, and looks many times a second where one flushes by time."""
    parts = Parts(tmp_path, partitions=3)
    async with parts:
        looked: list[int] = []
        housekeep = Partition.housekeep

        def look(self: Partition) -> None:
            looked.append(self.log.partition)
            housekeep(self)

        def by_time() -> bool:
            return parts.registry.flushes_by_time

        monkeypatch.setattr(Partition, "housekeep", look)
        parts.registry.housekeep()
        assert looked == []
        assert not by_time()
        first, second, third = parts.registry.partitions()
        config = first.log.config
        first.log.update_config(replace(config, flush_ms=60_000))
        first.apply_config()
        assert by_time()
        for _ in range(2):
            parts.registry.housekeep()
        assert looked == [0, 0]
        first.log.update_config(config)
        first.apply_config()
        assert not by_time()
        for _ in range(2):
            parts.registry.housekeep()
        assert looked == [0, 0, 0], "the look that finds no more work is the last one"
        monkeypatch.setattr(third.log, "_unfinished_cut", True)
        third._cuts.run(lambda: None, lambda error: None)
        await third.settled()
        await settle()
        parts.registry.housekeep()
        assert looked[3:] == [2], "a truncation that the disk refused is tried again"
        second.log.update_config(replace(config, flush_ms=60_000))
        second.apply_config()
        second.close(StorageError("gone"))
        for _ in range(2):
            parts.registry.housekeep()
        assert looked.count(1) == 1
        assert not by_time()


def counts(caplog: pytest.LogCaptureFixture, level: int) -> Counter[str]:
    events = (vars(record).get("event", "") for record in caplog.records if record.levelno == level)
    return Counter(event for event in events if event.startswith("leader"))


def test_each_has_a_line_but_for_many_that_change_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_manager, "LINES", 3)
    caplog.set_level(logging.DEBUG)

    async def scenario() -> None:
        async with Parts(tmp_path, partitions=5) as parts:
            assert counts(caplog, logging.INFO) == {"leader_gained": 3}, (
                "the first three changes must have lines of the level INFO, even if logs are made one by one"
            )
            assert counts(caplog, logging.DEBUG) == {"leader_gained": 2, "leaderships_changed": 5}
            first = next(record for record in caplog.records if vars(record).get("event") == "leader_gained")
            assert vars(first)["partition"] == "t-0"
            assert vars(first)["leader_epoch"] == 3
            caplog.clear()
            topic = parts.image.topics[TOPIC_ID]
            gone = tuple(replace(part, leader=2, leader_epoch=4, isr=(2,)) for part in topic.partitions)
            image = replace(parts.image, offset=2, topics={TOPIC_ID: replace(topic, partitions=gone)})
            parts.registry.on_metadata(image, None)
            await parts.registry.wait_applied(2)
            (together,) = [record for record in caplog.records if vars(record).get("event") == "leaderships_changed"]
            assert (vars(together)["gained"], vars(together)["lost"]) == (0, 5)
            assert together.levelno == logging.INFO
            assert sum(counts(caplog, level)["leader_lost"] for level in (logging.INFO, logging.DEBUG)) == 5

    virtual_time.run(scenario())  # so that it all happens within a second


def test_a_partition_whose_log_went_with_the_disk_is_named_once_and_told_to_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if vars(record).get("event") == "replica_log_lost"]

    async def scenario() -> None:
        async with Parts(tmp_path) as parts:
            topic = parts.image.topics[TOPIC_ID]
            [part] = topic.partitions
            me = part.leader
            for offset in (2, 3):
                gone = replace(
                    part,
                    leader=NO_LEADER,
                    leader_epoch=4,
                    isr=(me,),
                    partition_epoch=part.partition_epoch + offset,
                    lost_replicas=((me, (b"a disk of before",)),),
                )
                image = replace(parts.image, offset=offset, topics={TOPIC_ID: replace(topic, partitions=(gone,))})
                parts.registry.on_metadata(image, None)
                await parts.registry.wait_applied(offset)
            (line,) = lines()
            assert line.levelno == logging.ERROR
            assert vars(line)["partition"] == "t-0"
            refused = replica_manager.refusal(image, image.topics[TOPIC_ID], gone)
            for text in (line.getMessage(), str(refused)):
                assert f"broker {me} alone had every record and came back without the log" in text
                assert "raftlog partition elect t --unclean" in text

    asyncio.run(scenario())
