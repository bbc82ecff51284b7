"""The single node: nothing is answered or visible before it is durable, and whatever was answered survives."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from raftlog.errors import (
    BrokerOverloaded,
    InternalError,
    InvalidConfig,
    InvalidRequestError,
    NotController,
    RaftlogError,
    ShuttingDown,
    StorageError,
    StorageFull,
    TopicAlreadyExists,
)
from raftlog.v1.records_pb2 import MetadataCommand, MetadataRecord
from raftmeta import single_node
from raftmeta.image import MetadataImage
from raftmeta.journal import MetadataJournal
from raftmeta.port import MetadataPort
from raftmeta.single_node import SingleNodeMetadata
from tests.support.metadata import alter, claim, create_partitions, create_topic, delete_topic, register
from tests.support.metadata_disk import Chooser, MemoryDisk, everything_survives, nothing_survives

COMPACT_AT_BYTES = 300
"""Small, so that the scenario below compacts more than once."""


def scenario() -> list[MetadataCommand]:
    """Commands that touch everything; epoch 0 lets the node fill in its own."""
    commands = [
        register(),
        create_topic("a", 1, partitions=3, configs={"retention.ms": "1s"}),
        create_topic("a", 9),
        alter("a", {"segment.ms": "1h"}),
        create_topic("b", 2),
        create_partitions("b", 4),
        delete_topic("a"),
        register(incarnation=2),
        create_topic("a", 3),
    ]
    for command in commands:
        command.controller_epoch = 0
    return commands


def node(disk: MemoryDisk, executor: ThreadPoolExecutor, **options: object) -> SingleNodeMetadata:
    settings = {"node_id": 1, "cluster_id": "test", "compact_at_bytes": COMPACT_AT_BYTES, **options}
    return SingleNodeMetadata(disk, executor, lambda: 1_000, **settings)  # type: ignore[arg-type] # the tests' options


def run(disk: MemoryDisk, work: Callable[[SingleNodeMetadata], Awaitable[None]], **options: object) -> None:
    """Start a node, do the work, close it."""

    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            metadata = node(disk, executor, **options)
            await metadata.start()
            try:
                await work(metadata)
            finally:
                await metadata.close()

    asyncio.run(main())


def recovered_image(disk: MemoryDisk) -> MetadataImage:
    journal = MetadataJournal(disk, 1, 1 << 20)
    image = journal.open().image
    journal.close()
    return image


async def _nothing(metadata: SingleNodeMetadata) -> None:
    pass


def test_it_is_a_metadata_port() -> None:
    with ThreadPoolExecutor(1) as executor:
        port: MetadataPort = node(MemoryDisk(), executor)
    assert port.image == MetadataImage()


def test_a_start_claims_the_next_controller_epoch() -> None:
    disk = MemoryDisk()
    for epoch in (1, 2, 3):
        run(disk, _nothing)
        image = recovered_image(disk)
        assert (image.controller_id, image.controller_epoch, image.cluster_id) == (1, epoch, "test")


def test_a_cluster_id_is_made_up_once_and_a_foreign_one_is_refused() -> None:
    disk = MemoryDisk()
    run(disk, _nothing, cluster_id="")
    cluster_id = recovered_image(disk).cluster_id
    assert cluster_id
    run(disk, _nothing, cluster_id="")
    run(disk, _nothing, cluster_id=cluster_id)
    assert recovered_image(disk).cluster_id == cluster_id
    with pytest.raises(InvalidConfig, match=r"cluster\.id='other', but this metadata belongs to the cluster"):
        run(disk, _nothing, cluster_id="other")
    assert not disk.locked


def test_answers_come_with_an_image_that_shows_them() -> None:
    async def work(metadata: SingleNodeMetadata) -> None:
        for command in scenario():
            try:
                result = await metadata.propose(command)
            except TopicAlreadyExists:
                continue
            assert result.offset == metadata.image.offset
        assert sorted(metadata.image.topic_id_by_name) == ["a", "b"]

    disk = MemoryDisk()
    run(disk, work)
    assert sorted(recovered_image(disk).topic_id_by_name) == ["a", "b"]


def test_a_command_that_names_another_epoch_is_refused() -> None:
    async def work(metadata: SingleNodeMetadata) -> None:
        with pytest.raises(NotController):
            await metadata.propose(register(epoch=7))

    run(MemoryDisk(), work)


def test_listeners_see_every_change_once_and_in_order_although_others_fail() -> None:
    async def work(metadata: SingleNodeMetadata) -> None:
        seen: list[tuple[int, int]] = []
        start = metadata.image.offset

        def broken(image: MetadataImage, records: Sequence[MetadataRecord]) -> None:
            raise RuntimeError("a bug of the test's")

        metadata.subscribe(broken)
        unsubscribe = metadata.subscribe(lambda image, records: seen.append((image.offset, len(records))))
        await asyncio.gather(*(metadata.propose(command) for command in scenario()[:5]), return_exceptions=True)
        assert [offset for offset, _ in seen] == [start + 1, start + 2, start + 3, start + 4]
        assert [count for _, count in seen] == [1, 5, 1, 2]
        unsubscribe()
        unsubscribe()
        await metadata.propose(scenario()[5])
        assert len(seen) == 4

    run(MemoryDisk(), work)


def test_changes_since_covers_what_the_journal_kept() -> None:
    disk = MemoryDisk()

    async def first(metadata: SingleNodeMetadata) -> None:
        for command in scenario()[:2]:
            await metadata.propose(command)

    async def second(metadata: SingleNodeMetadata) -> None:
        changes = metadata.changes_since(1)
        assert changes is not None
        assert [change.offset for change in changes] == [2, 3, 4]
        assert [change.controller_epoch for change in changes] == [1, 1, 2]
        assert metadata.changes_since(4) == []
        assert metadata.changes_since(5) is None
        assert metadata.changes_since(-1) is None

    run(disk, first, compact_at_bytes=1 << 20)
    run(disk, second, compact_at_bytes=1 << 20)


def test_commands_at_once_share_an_fsync() -> None:
    disk = MemoryDisk()

    async def work(metadata: SingleNodeMetadata) -> None:
        before = sum(step.startswith("sync ") for step in disk.trace)
        await metadata.propose(scenario()[0])
        await asyncio.gather(*(metadata.propose(create_topic(f"t{i}", i + 10, epoch=0)) for i in range(50)))
        assert sum(step.startswith("sync ") for step in disk.trace) - before <= 3
        assert metadata.image.offset == 52

    run(disk, work, compact_at_bytes=1 << 20)
    assert len(recovered_image(disk).topics) == 50


def test_a_refusal_waits_for_what_it_refers_to() -> None:
    """Of two creations at once the second is refused because of the first, which has to be durable by then."""
    disk = MemoryDisk()

    async def work(metadata: SingleNodeMetadata) -> None:
        await metadata.propose(scenario()[0])
        disk.fail("append", errno.ENOSPC)
        create = create_topic("a", 1, epoch=0)
        first, second = await asyncio.gather(metadata.propose(create), metadata.propose(create), return_exceptions=True)
        assert isinstance(first, StorageFull)
        assert isinstance(second, StorageFull), "there is no such topic: it was never created"
        assert "a" not in metadata.image.topic_id_by_name
        await metadata.propose(create)

    run(disk, work)


def test_a_proposer_that_gives_up_does_not_hold_up_the_others() -> None:
    async def work(metadata: SingleNodeMetadata) -> None:
        await metadata.propose(scenario()[0])
        impatient = asyncio.create_task(metadata.propose(create_topic("a", 1, epoch=0)))
        patient = asyncio.create_task(metadata.propose(create_topic("b", 2, epoch=0)))
        await asyncio.sleep(0)
        impatient.cancel()
        await patient
        assert sorted(metadata.image.topic_id_by_name) == ["a", "b"]

    run(MemoryDisk(), work)


def test_a_failed_disk_stops_the_node_once_and_for_all() -> None:
    fatal: list[RaftlogError] = []
    disk = MemoryDisk()

    async def work(metadata: SingleNodeMetadata) -> None:
        offset = metadata.image.offset
        disk.fail("sync", errno.EIO)
        results = await asyncio.gather(*(metadata.propose(c) for c in scenario()[:2]), return_exceptions=True)
        assert [type(result) for result in results] == [StorageError, StorageError]
        assert metadata.image.offset == offset
        with pytest.raises(StorageError):
            await metadata.propose(scenario()[0])

    run(disk, work, on_fatal=fatal.append)
    assert len(fatal) == 1
    assert isinstance(fatal[0], StorageError)


def test_a_bug_in_deciding_stops_the_node_before_it_becomes_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    fatal: list[RaftlogError] = []
    disk = MemoryDisk()

    async def work(metadata: SingleNodeMetadata) -> None:
        def broken(image: MetadataImage, command: MetadataCommand) -> None:
            raise KeyError("a bug of the test's")

        monkeypatch.setattr(single_node, "decide", broken)
        with pytest.raises(InternalError, match="KeyError"):
            await metadata.propose(scenario()[0])

    run(disk, work, on_fatal=fatal.append)
    assert len(fatal) == 1
    assert recovered_image(disk).offset == 1


def test_bounds_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_node, "MAX_PENDING", 2)

    async def work(metadata: SingleNodeMetadata) -> None:
        with pytest.raises(InvalidRequestError, match="at most 1048576 are allowed"):
            await metadata.propose(create_topic("x" * (1 << 20), 1))
        results = await asyncio.gather(*(metadata.propose(register(epoch=0)) for _ in range(4)), return_exceptions=True)
        assert [type(result) is BrokerOverloaded for result in results] == [False, False, True, True]

    run(MemoryDisk(), work)


def test_closing_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    disk = MemoryDisk()

    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            metadata = node(disk, executor)
            with pytest.raises(ShuttingDown, match="not been started"):
                await metadata.propose(claim())
            await metadata.start()
            accepted = [asyncio.create_task(metadata.propose(command)) for command in scenario()[:2]]
            await asyncio.sleep(0)
            await metadata.close()
            assert all(task.done() and task.exception() is None for task in accepted)
            with pytest.raises(ShuttingDown, match="is stopping"):
                await metadata.propose(scenario()[0])
            assert not disk.locked

    asyncio.run(main())
    assert "a" in recovered_image(disk).topic_id_by_name


# Power loss between any two disk operations


def images_by_offset() -> tuple[dict[int, MetadataImage], int]:
    """Run the scenario undisturbed; return the image at every offset, and how many disk operations it takes."""
    images = {0: MetadataImage()}
    disk = MemoryDisk()

    async def work(metadata: SingleNodeMetadata) -> None:
        images[metadata.image.offset] = metadata.image
        metadata.subscribe(lambda image, records: images.__setitem__(image.offset, image))
        await _propose_one_by_one(metadata, [])

    run(disk, work)
    assert sum("snapshot" in step and step.startswith("rename") for step in disk.trace) >= 2, "compacts twice or more"
    return images, disk.operations


async def _propose_one_by_one(metadata: SingleNodeMetadata, answered: list[int]) -> None:
    for command in scenario():
        try:
            answered.append((await metadata.propose(command)).offset)
        except TopicAlreadyExists:
            answered.append(metadata.image.offset)
        except StorageError:
            return


def answered_before_power_loss(disk: MemoryDisk) -> list[int]:
    """Run the scenario until the power goes; return the offsets of the answers that came out before."""
    answered = [0]

    async def main() -> None:
        with ThreadPoolExecutor(1) as executor:
            metadata = node(disk, executor)
            try:
                await metadata.start()
            except StorageError:
                return
            answered.append(metadata.image.offset)
            metadata.subscribe(lambda image, records: answered.append(image.offset))
            await _propose_one_by_one(metadata, answered)
            await metadata.close()

    asyncio.run(main())
    return answered


def test_power_loss_between_any_two_disk_operations_keeps_every_answered_command() -> None:
    images, operations = images_by_offset()
    for power_off_at in range(operations):
        disk = MemoryDisk(power_off_at)
        answered = max(answered_before_power_loss(disk))
        seeds = [random.Random(f"{power_off_at}-{seed}") for seed in range(6)]
        choosers: list[Chooser] = [nothing_survives, everything_survives, *(seed.randrange for seed in seeds)]
        for choose in choosers:
            survivor = disk.survivor(choose)
            image = recovered_image(survivor)
            assert image.offset >= answered, f"lost: power off at operation {power_off_at}, {disk.trace[-3:]}"
            assert image == images[image.offset]
        killed = disk.after_kill()
        image = recovered_image(killed)
        assert image.offset >= answered
        # Visible now although its fsync never came: it must still be there after a power loss.
        assert recovered_image(killed.survivor(nothing_survives)) == image
        run(killed, _nothing)
        assert recovered_image(killed.survivor(nothing_survives)) == recovered_image(killed)


def test_after_a_power_loss_the_node_goes_on_where_it_was() -> None:
    _, operations = images_by_offset()

    async def work(metadata: SingleNodeMetadata) -> None:
        for command in scenario():
            with contextlib.suppress(InvalidRequestError):  # done before the power went
                await metadata.propose(command)
        assert sorted(metadata.image.topic_id_by_name) == ["a", "b"]

    for power_off_at in range(0, operations, 3):
        disk = MemoryDisk(power_off_at)
        answered_before_power_loss(disk)
        survivor = disk.survivor(random.Random(power_off_at).randrange)
        run(survivor, work)
        assert sorted(recovered_image(survivor).topic_id_by_name) == ["a", "b"]
