"""A broker's next process proves by its lock that the one before is dead; a copy of its directory proves nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from broker.lock_identity import IDENTITY_BYTES, lock_identity
from broker.log.log_dir import LOCK_FILE


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A log directory with its lock file, and a boot id beside it."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / LOCK_FILE).touch()
    (tmp_path / "boot").write_text("one\n")
    return tmp_path


def identity(directory: Path, logs: str = "logs") -> bytes:
    return lock_identity(str(directory / logs), "d1", directory / "boot")


def test_the_same_file_under_the_same_kernel_is_the_same_lock(directory: Path) -> None:
    assert identity(directory) == identity(directory)
    assert len(identity(directory)) == IDENTITY_BYTES


def test_a_copy_of_the_directory_is_another_lock(directory: Path) -> None:
    shutil.copytree(directory / "logs", directory / "copy")
    assert identity(directory, "copy") != identity(directory)


def test_after_a_boot_or_on_another_machine_it_is_another_lock(directory: Path) -> None:
    before = identity(directory)
    (directory / "boot").write_text("two\n")
    assert identity(directory) != before


def test_where_the_kernel_does_not_say_nothing_is_proved(directory: Path) -> None:
    (directory / "boot").unlink()
    assert identity(directory) != identity(directory)
