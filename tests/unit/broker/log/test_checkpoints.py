"""Text checkpoints: readable, and a torn or altered one is noticed."""

from __future__ import annotations

import pytest

from broker.log.checkpoints import (
    Marks,
    PartitionMetadata,
    decode_lines,
    load_leader_epochs,
    load_marks,
    load_partition_metadata,
    store_leader_epochs,
    store_marks,
    store_partition_metadata,
)
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
