"""The journal: what was appended is found again, and damage is never repaired by forgetting."""

from __future__ import annotations

import errno
from collections.abc import Iterable

import pytest

from raftlog.errors import (
    CorruptRecordError,
    InvalidConfig,
    RaftlogError,
    StorageError,
    StorageFull,
    UnsupportedVersion,
)
from raftlog.v1.records_pb2 import MetadataCommand, MetadataEntry
from raftmeta.decide import decide
from raftmeta.frames import FRAME_OVERHEAD_BYTES, HEADER_BYTES, JOURNAL_MAGIC, encode_frame, encode_header, split_frames
from raftmeta.image import MetadataImage
from raftmeta.journal import MetadataJournal
from raftmeta.replay import replay_all
from tests.support.metadata import alter, claim, create_topic, delete_topic, register
from tests.support.metadata_disk import MemoryDisk

JOURNAL_0 = f"journal-{0:020d}"
COMMANDS = [
    claim(),
    register(),
    create_topic("a", 1, partitions=2, configs={"retention.ms": "1s"}),
    create_topic("b", 2),
    alter("a", {"segment.ms": "1h"}),
    delete_topic("b"),
]


def entry_for(image: MetadataImage, command: MetadataCommand) -> tuple[MetadataImage, MetadataEntry]:
    records = decide(image, command).records
    assert records
    image = replay_all(image, records, image.offset + 1)
    return image, MetadataEntry(offset=image.offset, controller_epoch=image.controller_epoch, records=records)


def written(
    disk: MemoryDisk, commands: Iterable[MetadataCommand] = COMMANDS, compact_after: Iterable[int] = ()
) -> list[MetadataImage]:
    """Write commands, each an entry and an fsync of its own; return the images by offset."""
    journal = MetadataJournal(disk, node_id=1, compact_at_bytes=1 << 20)
    images = [journal.open().image]
    for command in commands:
        image, entry = entry_for(images[-1], command)
        journal.append([entry])
        images.append(image)
        if image.offset in set(compact_after):
            journal.compact(image)
    journal.close()
    return images


def reopened(disk: MemoryDisk, node_id: int = 1) -> MetadataImage:
    journal = MetadataJournal(disk, node_id=node_id, compact_at_bytes=1 << 20)
    image = journal.open().image
    journal.close()
    return image


def _is_due(journal: MetadataJournal) -> bool:
    return journal.needs_compaction


def test_a_new_directory_is_set_up_and_empty() -> None:
    disk = MemoryDisk()
    assert reopened(disk) == MetadataImage()
    assert sorted(disk.names()) == ["format", JOURNAL_0]
    assert disk.read("format") == b"format.version=1\nnode.id=1\n"


def test_what_was_appended_is_found_again_with_its_entries() -> None:
    disk = MemoryDisk()
    images = written(disk)
    journal = MetadataJournal(disk, 1, 1 << 20)
    recovered = journal.open()
    assert recovered.image == images[-1]
    assert [entry.offset for entry in recovered.entries] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("compact_after", [(1,), (3,), (6,), (2, 4), (1, 2, 3, 4, 5, 6)])
def test_compaction_keeps_the_image_and_leaves_one_pair_of_files(compact_after: tuple[int, ...]) -> None:
    disk = MemoryDisk()
    images = written(disk, compact_after=compact_after)
    assert reopened(disk) == images[-1]
    last = max(compact_after)
    assert sorted(disk.names()) == ["format", f"journal-{last:020d}", f"snapshot-{last:020d}"]


def test_compaction_is_due_when_the_journal_exceeds_its_bound_and_the_bound_follows_the_image() -> None:
    disk = MemoryDisk()
    journal = MetadataJournal(disk, 1, compact_at_bytes=200)
    image = journal.open().image
    compacted_at = []
    for command in [claim(), register(), *(create_topic(f"t{i}", i) for i in range(40))]:
        image, entry = entry_for(image, command)
        journal.append([entry])
        if journal.needs_compaction:
            journal.compact(image)
            compacted_at.append(image.offset)
    assert compacted_at[0] < 6
    assert len(compacted_at) <= 6, "compaction must not cost more the larger the image is"
    journal.close()
    assert reopened(disk) == image


def test_cut_at_every_byte_a_prefix_is_left() -> None:
    disk = MemoryDisk()
    images = written(disk)
    data = disk.read(JOURNAL_0)
    offsets = []
    for cut in range(HEADER_BYTES, len(data) + 1):
        torn = disk.survivor(lambda count: 0)
        torn.put(JOURNAL_0, data[:cut])
        image = reopened(torn)
        assert image == images[image.offset]
        offsets.append(image.offset)
        assert reopened(torn) == image, "the tail that was dropped stays dropped"
    assert offsets == sorted(offsets)
    assert set(offsets) == set(range(len(images)))


def test_a_tail_that_was_dropped_is_written_over() -> None:
    disk = MemoryDisk()
    images = written(disk, COMMANDS[:3])
    disk.put(JOURNAL_0, disk.read(JOURNAL_0)[:-1])
    journal = MetadataJournal(disk, 1, 1 << 20)
    image = journal.open().image
    assert image == images[2]
    image, entry = entry_for(image, create_topic("c", 3))
    journal.append([entry])
    journal.close()
    assert reopened(disk) == image


def test_every_flipped_byte_is_refused_unless_it_is_in_the_last_frame() -> None:
    disk = MemoryDisk()
    images = written(disk)
    data = disk.read(JOURNAL_0)
    payloads, _ = split_frames(data, JOURNAL_0)
    last_frame = len(data) - FRAME_OVERHEAD_BYTES - len(payloads[-1])
    assert HEADER_BYTES < last_frame < len(data)
    for position in range(len(data)):
        damaged = disk.survivor(lambda count: 0)
        damaged.put(JOURNAL_0, data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :])
        if position < last_frame:
            with pytest.raises(CorruptRecordError, match="is damaged"):
                reopened(damaged)
            assert len(damaged.read(JOURNAL_0)) == len(data), "nothing may be truncated"
            assert not damaged.locked
        else:
            assert reopened(damaged) == images[-2]


def test_every_flipped_byte_of_a_snapshot_is_refused() -> None:
    """A snapshot that does not parse stops the node and is never deleted (nats #7556)."""
    disk = MemoryDisk()
    written(disk, compact_after=[6])
    name = f"snapshot-{6:020d}"
    data = disk.read(name)
    for position in range(len(data)):
        damaged = disk.survivor(lambda count: 0)
        damaged.put(name, data[:position] + bytes([data[position] ^ 0x01]) + data[position + 1 :])
        with pytest.raises((CorruptRecordError, UnsupportedVersion)):
            reopened(damaged)
        assert name in damaged.names()


def test_missing_files_stop_the_start() -> None:
    def without(name: str) -> MemoryDisk:
        disk = MemoryDisk()
        written(disk, compact_after=[3])
        disk.remove(name)
        return disk

    with pytest.raises(CorruptRecordError, match="'format' is missing"):
        reopened(without("format"))
    with pytest.raises(CorruptRecordError, match=f"journal-{3:020d} is missing"):
        reopened(without(f"journal-{3:020d}"))
    with pytest.raises(CorruptRecordError, match=f"{JOURNAL_0} is missing|snapshot-{3:020d} is missing"):
        reopened(without(f"snapshot-{3:020d}"))


def test_a_journal_with_entries_but_without_its_snapshot_stops_the_start() -> None:
    disk = MemoryDisk()
    written(disk, COMMANDS[:2])
    newer = MemoryDisk()
    written(newer, compact_after=[4])
    disk.put(f"journal-{4:020d}", newer.read(f"journal-{4:020d}"))
    with pytest.raises(CorruptRecordError, match=f"has entries, but snapshot-{4:020d} is missing"):
        reopened(disk)


def test_a_gap_in_the_offsets_stops_the_start() -> None:
    disk = MemoryDisk()
    written(disk, COMMANDS[:2])
    journal = MetadataJournal(disk, 1, 1 << 20)
    journal.open()
    journal.append([MetadataEntry(offset=9)])
    journal.close()
    with pytest.raises(CorruptRecordError, match="offset 9 follows offset 2"):
        reopened(disk)


def test_a_frame_that_is_no_entry_stops_the_start() -> None:
    disk = MemoryDisk()
    written(disk, [])
    disk.put(JOURNAL_0, encode_header(JOURNAL_MAGIC, 0) + encode_frame(b"\xff\xff\xff"))
    with pytest.raises(CorruptRecordError, match="not metadata entries"):
        reopened(disk)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (b"format.version=2\nnode.id=1\n", UnsupportedVersion, "says format 2, this version reads up to 1"),
        (b"format.version=1\nnode.id=7\n", InvalidConfig, "node.id=1, but /metadata belongs to node 7"),
        (b"format.version=1\n", CorruptRecordError, "/metadata/format is damaged"),
        (b"\xff\xfe", CorruptRecordError, "/metadata/format is damaged"),
        (b"", CorruptRecordError, "/metadata/format is damaged"),
    ],
)
def test_a_foreign_directory_is_refused(content: bytes, error: type[RaftlogError], words: str) -> None:
    disk = MemoryDisk()
    written(disk)
    disk.put("format", content)
    with pytest.raises(error, match=words):
        reopened(disk)


def test_a_directory_in_use_is_refused() -> None:
    disk = MemoryDisk()
    MetadataJournal(disk, 1, 1 << 20).open()
    with pytest.raises(StorageError, match="in use by another process"):
        MetadataJournal(disk, 1, 1 << 20).open()


def test_without_space_the_entry_is_refused_and_the_journal_goes_on() -> None:
    disk = MemoryDisk()
    journal = MetadataJournal(disk, 1, 1 << 20)
    image, entry = entry_for(journal.open().image, claim())
    disk.fail("append", errno.ENOSPC)
    with pytest.raises(StorageFull, match="no space is left in /metadata"):
        journal.append([entry])
    journal.append([entry])
    image, entry = entry_for(image, register())
    journal.append([entry])
    journal.close()
    assert reopened(disk) == image


def test_an_fsync_error_is_final() -> None:
    disk = MemoryDisk()
    journal = MetadataJournal(disk, 1, 1 << 20)
    _, entry = entry_for(journal.open().image, claim())
    disk.fail("sync", errno.ENOSPC)
    with pytest.raises(StorageError, match=r"failed: .*repair the disk and restart"):
        journal.append([entry])


def test_compaction_without_space_changes_nothing_and_comes_again_later() -> None:
    disk = MemoryDisk()
    journal = MetadataJournal(disk, 1, compact_at_bytes=100)
    image = journal.open().image
    for epoch in range(1, 10):
        image, entry = entry_for(image, claim(epoch))
        journal.append([entry])
    assert _is_due(journal)
    before = sorted(disk.names())
    disk.fail("write", errno.ENOSPC)
    journal.compact(image)
    assert sorted(disk.names()) == before
    assert not _is_due(journal)
    image, entry = entry_for(image, register(epoch=image.controller_epoch))
    journal.append([entry])
    journal.compact(image)
    journal.close()
    assert reopened(disk) == image
    assert f"snapshot-{image.offset:020d}" in disk.names()


@pytest.mark.parametrize("operation", ["rename", "sync_dir", "remove"])
def test_a_compaction_that_fails_after_it_became_visible_is_final(operation: str) -> None:
    """Entries appended to the old journal from then on would be lost at the next start."""
    disk = MemoryDisk()
    journal = MetadataJournal(disk, 1, 1 << 20)
    image, entry = entry_for(journal.open().image, claim())
    journal.append([entry])
    disk.fail(operation, errno.ENOSPC)
    with pytest.raises(StorageError, match="repair the disk and restart"):
        journal.compact(image)
