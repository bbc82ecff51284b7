"""Files and directories of the server are for its own user alone: they hold records, and keys made of passwords."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.log.storage import OsStorage
from raftmeta.disk import OsDisk


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Run with the umask that hides least."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*")}


def test_the_logs_files(tmp_path: Path) -> None:
    storage = OsStorage()
    storage.make_dir(f"{tmp_path}/data/logs/t-0")
    storage.open(f"{tmp_path}/data/logs/t-0/0.log", create=True)
    storage.lock(f"{tmp_path}/data/logs/.lock").release()
    assert modes(tmp_path) == {
        "data": 0o700,
        "data/logs": 0o700,
        "data/logs/t-0": 0o700,
        "data/logs/t-0/0.log": 0o600,
        "data/logs/.lock": 0o600,
    }


def test_the_metadatas_files(tmp_path: Path) -> None:
    disk = OsDisk(tmp_path / "data" / "metadata")
    disk.lock()
    disk.write("0.wal", b"x")
    disk.close()
    assert modes(tmp_path) == {
        "data": 0o700,
        "data/metadata": 0o700,
        "data/metadata/.lock": 0o600,
        "data/metadata/0.wal": 0o600,
    }
