"""The disk port of the metadata, `MetadataDisk`: one directory of named files; and `OsDisk`, on the operating system.

`OsDisk` keeps written files open, so that a sync costs one system call.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final, Protocol

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
"""Modes of everything that a server makes: records, and keys made of passwords, are for its own user alone."""
NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers for missing space, which say nothing about the state of the disk."""
DAMAGE_REMEDY: Final = (
    "restore the directory from a copy; or, unless this node is the only voter, empty it, so that the node joins anew "
    "and takes everything from the others (docs/quorum.md)"
)
"""The end of every message about damage."""


class MetadataDisk(Protocol):
    """Blocking file operations in one directory; all raise OSError.

    What a power loss keeps: file contents up to the last `sync` of that file, names up to the last `sync_dir`, and
    of anything newer any part. Two threads may use it at the same time as long as they use different files.
    """

    @property
    def path(self) -> str:
        """The directory, for messages."""
        ...

    def lock(self) -> None:
        """Make sure that no other process uses the directory, until `close`; BlockingIOError when one does."""
        ...

    def names(self) -> list[str]:
        """Return the names of the files."""
        ...

    def read(self, name: str) -> bytes:
        """Return a whole file."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Make a file with this content, or replace its content."""
        ...

    def append(self, name: str, data: bytes) -> None:
        """Append to an existing file; after an error any part of `data` may have been written."""
        ...

    def allocate(self, name: str, size_bytes: int) -> None:
        """Make a file that is there at least so long, zeros behind its content, and have the space for it."""
        ...

    def write_at(self, name: str, position: int, data: bytes) -> None:
        """Write into an existing file; after an error any part of `data` may have been written."""
        ...

    def truncate(self, name: str, size_bytes: int) -> None:
        """Truncate a file."""
        ...

    def sync(self, name: str) -> None:
        """Return once the file's content is durable."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file, atomically replacing one that has the new name."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file."""
        ...

    def sync_dir(self) -> None:
        """Return once the names are durable."""
        ...

    def close(self) -> None:
        """Unlock the directory."""
        ...


LOCK_NAME = ".lock"


class OsDisk:
    """One real directory. One thread at a time for each file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._directory = Path(path)
        self._lock_fd: int | None = None
        self._open_fds: dict[str, int] = {}

    @property
    def path(self) -> str:
        """The directory, for messages."""
        return str(self._directory)

    def lock(self) -> None:
        """Make the directory where it is missing and lock it."""
        self._make_directory(self._directory)
        fd = os.open(self._directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        self._lock_fd = fd

    def names(self) -> list[str]:
        """Return the names of the files, without the lock."""
        return [entry.name for entry in os.scandir(self._directory) if entry.is_file() and entry.name != LOCK_NAME]

    def read(self, name: str) -> bytes:
        """Return a whole file."""
        return (self._directory / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Make a file with this content, or replace its content."""
        self._close_file(name)
        fd = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            _write_all(fd, data)
        finally:
            os.close(fd)

    def append(self, name: str, data: bytes) -> None:
        """Append to an existing file."""
        fd = self._fd(name)
        os.lseek(fd, 0, os.SEEK_END)
        _write_all(fd, data)

    def allocate(self, name: str, size_bytes: int) -> None:
        """Make a file that is there at least so long, zeros behind its content, and have the space for it."""
        os.posix_fallocate(self._fd(name), 0, size_bytes)

    def write_at(self, name: str, position: int, data: bytes) -> None:
        """Write into an existing file."""
        fd = self._fd(name)
        rest = memoryview(data)
        while rest:
            written = os.pwrite(fd, rest, position)
            rest, position = rest[written:], position + written

    def truncate(self, name: str, size_bytes: int) -> None:
        """Cut a file off."""
        os.truncate(self._directory / name, size_bytes)

    def sync(self, name: str) -> None:
        """Return once the file's content is durable."""
        fd = self._open_fds.get(name)
        if fd is not None:
            os.fdatasync(fd)
            return
        _sync_path(self._directory / name)

    def rename(self, old: str, new: str) -> None:
        """Rename a file, atomically replacing one that has the new name."""
        self._close_file(old)
        self._close_file(new)
        os.rename(self._directory / old, self._directory / new)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._close_file(name)
        os.unlink(self._directory / name)

    def sync_dir(self) -> None:
        """Return once the names are durable."""
        _sync_path(self._directory)

    def close(self) -> None:
        """Close the open files and unlock the directory."""
        for name in list(self._open_fds):
            self._close_file(name)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _fd(self, name: str) -> int:
        fd = self._open_fds.get(name)
        if fd is None:
            fd = self._open_fds[name] = os.open(self._directory / name, os.O_WRONLY | os.O_CLOEXEC)
        return fd

    def _close_file(self, name: str) -> None:
        fd = self._open_fds.pop(name, None)
        if fd is not None:
            os.close(fd)

    def _make_directory(self, directory: Path) -> None:
        if directory.is_dir():
            return
        self._make_directory(directory.parent)
        directory.mkdir(DIRECTORY_MODE, exist_ok=True)
        _sync_path(directory.parent)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
