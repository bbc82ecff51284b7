"""What the write-ahead log needs of a disk: the real one and the one in memory agree."""

from __future__ import annotations

import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raftmeta.disk import MetadataDisk
from raftmeta.os_disk import OsDisk
from raftmeta.raft.snapshots import SnapshotStore
from raftmeta.raft.wal import WriteAheadLog
from tests.support.metadata_disk import MemoryDisk, nothing_survives


@pytest.fixture(params=["os", "memory"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> MetadataDisk:
    made: MetadataDisk = OsDisk(tmp_path / "meta") if request.param == "os" else MemoryDisk()
    made.lock()
    return made


def test_writing_into_reserved_space(disk: MetadataDisk) -> None:
    disk.write("a", b"0123")
    disk.allocate("a", 10)
    assert disk.read("a") == b"0123" + bytes(6)
    disk.allocate("a", 5)
    assert len(disk.read("a")) == 10
    disk.write_at("a", 2, b"xyz")
    disk.sync("a")
    assert disk.read("a") == b"01xyz" + bytes(5)
    disk.write_at("a", 8, b"beyond")
    assert disk.read("a") == b"01xyz" + bytes(3) + b"beyond"
    disk.append("a", b"!")
    disk.truncate("a", 3)
    disk.sync("a")
    assert disk.read("a") == b"01x"
    disk.close()


def test_a_file_that_was_replaced_is_not_written_through_an_old_handle(disk: MetadataDisk) -> None:
    disk.write("a", b"old")
    disk.write_at("a", 0, b"O")
    disk.write("b", b"new")
    disk.write_at("b", 0, b"N")
    disk.rename("b", "a")
    disk.write_at("a", 1, b"E")
    disk.sync("a")
    assert disk.read("a") == b"NEw"
    disk.close()


def test_log_and_snapshots_use_one_directory_from_two_threads(tmp_path: Path) -> None:
    disk = OsDisk(tmp_path)
    disk.lock()
    wal = WriteAheadLog(disk, uuid.UUID(int=1), segment_bytes=5000)
    wal.open()
    store = SnapshotStore(disk)

    def snapshots() -> None:
        for index in range(2, 40):
            store.write(index, random.Random(index).randbytes(10_000))
            store.remove_older(index)

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(snapshots)
        for index in range(2, 300):
            assert wal.has_room(200)
            wal.add(b"\x00" * 100, index, 1)
            wal.sync()
            wal.trim(index - 20)
        running.result()
    again = WriteAheadLog(disk, uuid.UUID(int=1))
    again.open()
    assert again.last_index == 299
    assert store.newest() == 39
    disk.close()


def test_a_power_loss_takes_back_what_was_written_over() -> None:
    disk = MemoryDisk()
    disk.write("a", b"0123456789")
    disk.sync("a")
    disk.sync_dir()
    disk.write_at("a", 2, b"xx")
    disk.truncate("a", 5)
    assert disk.survivor(nothing_survives).read("a") == b"0123456789"
    assert disk.survivor(lambda count: min(1, count - 1)).read("a") == b"01xx456789"
    assert disk.survivor(lambda count: count - 1).read("a") == b"01xx4"
