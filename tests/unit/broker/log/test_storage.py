"""The real file system behind the port."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from broker.log.config import LogConfig
from broker.log.storage import OsFile, OsStorage, Storage, make_dir_durably, read_file, replace_file
from raftlog.format import validate_produced
from tests.support.log_driver import open_manager, timed_batch
from tests.support.memory_storage import MemoryStorage


def test_writes_are_gathered_and_read_back(tmp_path: Path) -> None:
    file = OsStorage().open(str(tmp_path / "f"), create=True)
    file.write((b"ab", memoryview(b"cdef")), 0)
    file.write((b"XY",), 3)
    file.datasync()
    assert file.size() == 6
    assert file.read(100, 1) == b"bcXYf"
    assert file.read(2, 100) == b""
    file.truncate(2)
    assert file.read(100, 0) == b"ab"


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OsStorage().open(str(tmp_path / "f"), create=True)
    whole = os.pwrite

    def half(fd: int, data: memoryview, position: int) -> int:
        return whole(fd, data[: max(1, len(data) // 2)], position)

    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, position: whole(fd, buffers[0][:1], position))
    monkeypatch.setattr(os, "pwrite", half)
    file.write((b"abcd", b"efghij"), 0)
    assert file.read(100, 0) == b"abcdefghij"


def test_reads_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OsStorage().open(str(tmp_path / "f"), create=True)
    file.write((b"abcdef",), 0)
    assert file.read_nowait(3, 1) in (b"bcd", None)  # None where the file system cannot tell
    assert file.read_nowait(10, 1) is None, "a read beyond the end must return None, not a part"

    def would_block(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "would block")

    monkeypatch.setattr(os, "preadv", would_block)
    assert file.read_nowait(3, 1) is None


def test_a_file_system_without_nowait_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def unsupported(*_: object) -> int:
        calls.append(1)
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "preadv", unsupported)
    file = OsStorage().open(str(tmp_path / "f"), create=True)
    assert file.read_nowait(3, 0) is None
    assert file.read_nowait(3, 0) is None
    assert calls == [1]


def test_a_descriptor_is_closed_with_its_last_reference(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    file = OsFile(fd)
    other = file
    del file
    os.fstat(fd)
    del other
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_names(tmp_path: Path) -> None:
    storage, root = OsStorage(), str(tmp_path)
    make_dir_durably(storage, f"{root}/a/b")
    replace_file(storage, f"{root}/a", "f", b"one")
    replace_file(storage, f"{root}/a", "f", b"two")
    assert storage.list_sizes(f"{root}/a") == {"b": -1, "f": 3}
    assert read_file(storage, f"{root}/a/f") == b"two"
    assert read_file(storage, f"{root}/a/none") is None
    storage.rename(f"{root}/a/f", f"{root}/a/g")
    storage.remove(f"{root}/a/g")
    storage.remove(f"{root}/a/g")
    storage.remove_dir(f"{root}/a/b")
    storage.remove_dir(f"{root}/a/b")
    assert not storage.exists(f"{root}/a/b")
    with pytest.raises(FileNotFoundError):
        storage.open(f"{root}/a/none")


def test_the_lock_is_exclusive_and_can_be_given_up(tmp_path: Path) -> None:
    lock = OsStorage().lock(str(tmp_path / "l"))
    with pytest.raises(BlockingIOError):
        OsStorage().lock(str(tmp_path / "l"))
    lock.release()
    lock.release()
    OsStorage().lock(str(tmp_path / "l")).release()


def test_a_log_leaves_the_same_bytes_on_a_real_disk_as_in_memory(tmp_path: Path) -> None:
    def live(storage: Storage, root: str) -> dict[str, bytes]:
        config = LogConfig(segment_bytes=2_000, index_interval_bytes=300)
        manager = open_manager(storage, config=config, log_dirs=(root,))
        log = manager.create("t", bytes(16), 0)
        for number in range(20):
            batch = timed_batch([number, 5])
            log.append(batch, validate_produced(batch), leader_epoch=number // 7, now_ms=1)
        log.flush()
        log.high_watermark = 40
        manager.checkpoint()
        manager.close()
        found = {}
        for name in storage.list_sizes(f"{root}/t-0"):
            found[name] = read_file(storage, f"{root}/t-0/{name}") or b""
        manager = open_manager(storage, config=config, log_dirs=(root,))
        assert [log.log_end_offset for log in manager.logs()] == [40]
        manager.close()
        return found

    real = live(OsStorage(), str(tmp_path))
    assert live(MemoryStorage(), "/data") == real
    assert len(real) > 10
