"""Text checkpoints: readable, and a torn or altered one is noticed."""

from __future__ import annotations

import pytest

from broker.log.log_dir import (
    META_PROPERTIES,
    Marks,
    MetaProperties,
    PartitionMetadata,
    decode_lines,
    encode_lines,
    load_damage,
    load_leader_epochs,
    load_marks,
    load_meta_properties,
    load_partition_metadata,
    store_damage,
    store_leader_epochs,
    store_marks,
    store_meta_properties,
    store_partition_metadata,
)
from broker.log.storage import replace_file
from raftlog.errors import CorruptRecordError, UnsupportedVersion
from replication.leader_epochs import EpochEntry
from tests.support.memory_storage import MemoryStorage

KEY = (bytes(range(16)), 3)


def stored() -> MemoryStorage:
    storage = MemoryStorage()
    storage.make_dir("/d")
    store_marks(storage, "/d", {KEY: Marks(1, 20, 15)})
    return storage


def test_golden_bytes() -> None:
    assert bytes(stored().raw("/d/offset-checkpoint")) == (
        b"offsets 1\n1 bd5ef25e\n000102030405060708090a0b0c0d0e0f 3 1 20 15\n"
    )


def test_round_trips() -> None:
    storage = stored()
    assert load_marks(storage, "/d") == {KEY: Marks(1, 20, 15)}
    entries = [EpochEntry(1, 0), EpochEntry(4, 17)]
    store_leader_epochs(storage, "/d", entries)
    assert load_leader_epochs(storage, "/d") == entries
    metadata = PartitionMetadata(KEY[0], "a.b_c-7", 3)
    store_partition_metadata(storage, "/d", metadata)
    assert load_partition_metadata(storage, "/d") == metadata


def test_missing_is_none() -> None:
    storage = MemoryStorage()
    assert load_marks(storage, "/d") is None
    assert load_leader_epochs(storage, "/d") is None
    assert load_partition_metadata(storage, "/d") is None


def test_every_cut_is_noticed() -> None:
    whole = bytes(stored().raw("/d/offset-checkpoint"))
    for cut in range(len(whole)):
        with pytest.raises(CorruptRecordError, match="offset-checkpoint is damaged"):
            decode_lines("/d/offset-checkpoint", "offsets", whole[:cut])


def test_every_altered_byte_is_noticed() -> None:
    storage = stored()
    data = storage.raw("/d/offset-checkpoint")
    for position in range(len(data)):
        data[position] ^= 0x01
        with pytest.raises((CorruptRecordError, UnsupportedVersion)):
            load_marks(storage, "/d")
        data[position] ^= 0x01


def test_a_newer_format_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedVersion, match="format version 2, this raftlog reads 1"):
        decode_lines("/d/x", "offsets", b"offsets 2\nwhatever")


def test_what_is_damaged_is_kept_line_by_line() -> None:
    storage = stored()
    assert load_damage(storage, "/d") is None
    store_damage(storage, "/d", "the batch at 4\nand more")
    assert load_damage(storage, "/d") == "the batch at 4 and more"


@pytest.mark.parametrize("directory_id", ["", "12", "0123456789abcdef0123456789abcdeg", "0" * 33])
def test_a_directory_id_that_is_none_is_damage(directory_id: str) -> None:
    storage = stored()
    meta = MetaProperties("c", 1, "0123456789abcdef0123456789abcdef")
    store_meta_properties(storage, "/d", meta)
    assert load_meta_properties(storage, "/d") == meta
    lines = ("cluster_id c", "node_id 1", f"directory_id {directory_id}")
    replace_file(storage, "/d", META_PROPERTIES, encode_lines("log-dir", lines))
    with pytest.raises(CorruptRecordError, match=r"/d/meta.properties is damaged: directory_id .* 32 hex digits"):
        load_meta_properties(storage, "/d")
