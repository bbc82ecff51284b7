"""The registry with several replicas: roles, moves, damaged logs, and what the controller is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from broker.partition import Partition
from raftlog.errors import CorruptRecordError, NotLeader, StorageError
from raftlog.format import Attributes
from raftlog.format.control import Marker, encode_control
from raftlog.v1 import records_pb2
from raftmeta.image import BrokerImage, MetadataImage, TopicImage, broker_record
from replication.ports import Replica
from tests.support.batches import batch_of
from tests.support.broker_parts import TOPIC_ID, Parts, image_with
from tests.support.memory_storage import Fault, MemoryStorage
from tests.support.replica_link import settle

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


def test_the_fetchers_hear_of_every_epoch_before_it_matters_and_of_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_a_replica_that_is_moved_away_is_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
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
            assert parts.registry.find(*KEY).log_end_offset == 0, "it comes back empty, and is fetched"
            assert KEY in parts.followed.now

    asyncio.run(scenario())


def test_a_replica_that_was_moved_away_meanwhile_is_set_aside(tmp_path: Path) -> None:
    """The image came whole, so nobody has said that it was to be deleted."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


async def damaged(root: Path) -> Parts:
    """Return the next life of a node whose log lost what was fsynced."""
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


def test_a_damaged_replica_is_reported_and_fetched_anew_once_it_counts_for_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
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
            with pytest.raises(CorruptRecordError):
                parts.registry.find(*KEY)
            for offset, leader, isr in ((3, 2, (1, 2)), (4, -1, (2,)), (5, 1, (1, 2))):
                await parts.apply(image(offset, leader=leader, epoch=4, isr=isr))
                with pytest.raises(CorruptRecordError):
                    parts.registry.find(*KEY)
            eligible = image(6, leader=2, epoch=6, isr=(2,))
            (part,) = eligible.topics[TOPIC_ID].partitions
            await parts.apply(with_topic(eligible, partitions=(replace(part, eligible_leader_replicas=(1,)),)))
            with pytest.raises(CorruptRecordError):
                parts.registry.find(*KEY)
            await parts.apply(image(7, leader=2, epoch=6, isr=(2,)))
            assert parts.registry.find(*KEY).log_end_offset == 0
            assert KEY in parts.followed.now
            assert directories(tmp_path) == ["t-0", f"~stray-{TOPIC_ID.hex()}-0"], "kept for whoever wants to look"

    asyncio.run(scenario())


def test_the_only_replica_is_neither_reported_nor_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = await damaged(tmp_path)
        parts.image = image(2, leader=1, replicas=(1,))
        async with parts:
            await parts.registry.report_offline_replicas()
            assert offline(parts) == []
            with pytest.raises(CorruptRecordError):
                parts.registry.find(*KEY)

    asyncio.run(scenario())


def test_a_directory_that_fails_is_reported_at_once_and_again_until_it_is_heard(tmp_path: Path) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_a_leadership_of_an_earlier_life_is_not_taken_up(tmp_path: Path) -> None:
    """In the same epoch that life may have given out offsets which this one knows nothing of."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_the_larger_min_insync_replicas_of_controller_and_broker_counts(tmp_path: Path) -> None:
    """KAFKA-16540: a broker whose file says less than the cluster must not acknowledge with less."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_the_nearer_replica_is_an_active_one_in_the_readers_rack(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path)
        made = image(1, leader=1)
        racks = {number: replace(broker, rack=f"r{number}") for number, broker in made.brokers.items()}
        parts.image = replace(made, brokers=racks)
        async with parts:
            partition = parts.registry.find(*KEY)
            assert parts.registry.preferred_replica(partition, "r2") is None, "it has not been heard of"
            fetched = partition.open_replica(
                replica=Replica(2, 1),
                leader_epoch=3,
                fetch_offset=0,
                last_fetched_epoch=-1,
                held_end_offset=0,
                on_change=lambda: None,
            )
            assert fetched == ()
            assert parts.registry.preferred_replica(partition, "r2") == 2
            assert parts.registry.preferred_replica(partition, "r1") is None, "the leader is as near"
            assert parts.registry.preferred_replica(partition, "elsewhere") is None
            gone = {**racks, 2: replace(racks[2], fenced=True)}
            parts.registry.on_metadata(replace(parts.image, offset=2, brokers=gone), [broker_record(gone[2])])
            await parts.registry.wait_applied(2)
            assert parts.registry.preferred_replica(partition, "r2") is None

    asyncio.run(scenario())


def test_a_follower_whose_log_lacks_a_marker_is_taken_out_of_service(tmp_path: Path) -> None:
    async def scenario() -> None:
        parts = Parts(tmp_path)
        parts.image = image(1)
        async with parts:
            partition = parts.registry.find(*KEY)
            assert partition.following is not None
            assert parts.registry.held_by_all(partition.log) == 0, "only a leader knows"
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
            with pytest.raises(StorageError, match="copied anew"):
                partition.following.append_replicated(marker, 3, lambda held: None)
            await settle()
            with pytest.raises(CorruptRecordError, match="lacks the marker"):
                parts.registry.find(*KEY)

    asyncio.run(scenario())
