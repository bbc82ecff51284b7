"""The disk as a port: what the partition log asks of a file system, and the real one (Linux).

`OsStorage` is the real file system; tests and the simulation have one in memory that tells volatile from durable
bytes, crashes at any operation and fails on demand. Every method may raise `OSError`; `log_dir.py` judges its `errno`.

Durability follows POSIX to the letter: written bytes are durable after `File.datasync`; a name that was created,
renamed or removed is durable after `Storage.sync_dir` of its directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from typing import Protocol

from raftlog.format import Buffer
from raftmeta.disk import DIRECTORY_MODE, FILE_MODE


class SyncFailed(OSError):
    """fdatasync or fsync itself failed. Final whatever its errno: the kernel may have dropped the dirty pages."""


@contextlib.contextmanager
def rewritten_anyway() -> Iterator[None]:
    """Turn `SyncFailed` into an ordinary `OSError`, for files that the next attempt writes anew in full."""
    try:
        yield
    except SyncFailed as error:
        raise OSError(error.errno, error.strerror, error.filename) from error


class File(Protocol):
    """An open file, closed with its last reference, so that a reader never meets a reused descriptor."""

    def size(self) -> int:
        """Return the length in bytes."""
        ...

    def read(self, size: int, position: int) -> bytes:
        """Return up to `size` bytes at `position`; fewer only at the end of the file. May wait for the disk."""
        ...

    def read_nowait(self, size: int, position: int) -> bytes | None:
        """Return exactly `size` bytes at `position`; None: the read would wait for the disk, or might."""
        ...

    def write(self, buffers: Sequence[Buffer], position: int) -> None:
        """Write all buffers, one after the other, at `position`; after an error any prefix may be written."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""
        ...

    def datasync(self) -> None:
        """Make the contents durable.

        Raises:
            SyncFailed: final; the kernel may have dropped the dirty pages.
        """
        ...


class DirectoryLock(Protocol):
    """An exclusive lock among processes, held until released or the process ends."""

    def release(self) -> None:
        """Give the lock up."""
        ...


class Storage(Protocol):
    """A file system. Paths are absolute strings with `/` between names."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing; `create` makes the file when it is missing."""
        ...

    def list_sizes(self, path: str) -> dict[str, int]:
        """Return the names in a directory with their sizes in bytes; -1 for a directory."""
        ...

    def exists(self, path: str) -> bool:
        """Whether a file or directory of that name exists."""
        ...

    def make_dir(self, path: str) -> None:
        """Make a directory with its parents; does nothing when it exists."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename a file or directory; a file of the new name is replaced."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; does nothing when it is missing."""
        ...

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory; does nothing when it is missing."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable.

        Raises:
            SyncFailed: the fsync failed, which is final.
            OSError: the directory could not be opened.
        """
        ...

    def lock(self, path: str) -> DirectoryLock:
        """Lock the file at `path`, which is created when missing.

        Raises:
            BlockingIOError: another process holds it.
        """
        ...


TEMPORARY_SUFFIX = ".tmp"


def read_file(storage: Storage, path: str) -> bytes | None:
    """Return a whole small file, or None when it is missing."""
    try:
        file = storage.open(path)
    except FileNotFoundError:
        return None
    return file.read(file.size(), 0)


def replace_file(storage: Storage, directory: str, name: str, data: bytes) -> None:
    """Replace `directory`/`name`, all or nothing and durably: temporary file, fsync, rename, fsync of the directory."""
    path = f"{directory}/{name}"
    aside = storage.open(path + TEMPORARY_SUFFIX, create=True)
    aside.truncate(0)
    aside.write((data,), 0)
    with rewritten_anyway():
        aside.datasync()
    storage.rename(path + TEMPORARY_SUFFIX, path)
    storage.sync_dir(directory)


def make_dir_durably(storage: Storage, path: str) -> None:
    """Make a directory and its parents, and make their names durable."""
    missing = []
    while path and not storage.exists(path):
        missing.append(path)
        path = path.rpartition("/")[0]
    if missing:
        storage.make_dir(missing[0])
        for made in reversed(missing):
            storage.sync_dir(made.rpartition("/")[0] or "/")


_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class OsFile:
    """A file descriptor, closed with the last reference."""

    __slots__ = ("_fd", "_nowait")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._nowait = bool(_NOWAIT)

    def __del__(self) -> None:
        os.close(self._fd)

    def size(self) -> int:
        """Return the length in bytes."""
        return os.fstat(self._fd).st_size

    def read(self, size: int, position: int) -> bytes:
        """Return up to `size` bytes; a short answer is completed unless the file ends."""
        data = os.pread(self._fd, size, position)
        if len(data) == size or not data:
            return data
        parts = [data]
        while data:
            size -= len(data)
            position += len(data)
            data = os.pread(self._fd, size, position)
            parts.append(data)
        return b"".join(parts)

    def read_nowait(self, size: int, position: int) -> bytes | None:
        """Return the bytes if the page cache holds them all; always None if the kernel cannot tell."""
        if not self._nowait:
            return None
        scratch = bytearray(size)
        try:
            got = os.preadv(self._fd, (scratch,), position, _NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            self._nowait = False
            return None
        return bytes(scratch) if got == size else None

    def write(self, buffers: Sequence[Buffer], position: int) -> None:
        """Write all buffers with one system call, more only when the kernel takes less than all."""
        written = os.pwritev(self._fd, buffers, position)
        if written < sum(map(len, buffers)):
            data = memoryview(b"".join(buffers))
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], position + written)

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes."""
        os.ftruncate(self._fd, size)

    def datasync(self) -> None:
        """fdatasync: contents and the length, without the times."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise SyncFailed(error.errno, error.strerror) from error


class OsLock:
    """An flock on an open file; the kernel releases it when the process ends."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class OsStorage:
    """Files of the operating system."""

    def open(self, path: str, *, create: bool = False) -> OsFile:
        """Open for reading and writing."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return OsFile(os.open(path, flags, FILE_MODE))

    def list_sizes(self, path: str) -> dict[str, int]:
        """Return the names in a directory with their sizes in bytes; -1 for a directory."""
        sizes = {}
        with os.scandir(path) as entries:
            for entry in entries:
                sizes[entry.name] = -1 if entry.is_dir() else entry.stat().st_size
        return sizes

    def exists(self, path: str) -> bool:
        """Whether a file or directory of that name exists. Raises any error other than its absence."""
        try:
            os.stat(path)
        except FileNotFoundError:
            return False
        return True

    def make_dir(self, path: str) -> None:
        """Make a directory with its parents, all of them for this user alone."""
        parent = os.path.dirname(path)
        if parent and not os.path.isdir(parent):
            self.make_dir(parent)  # makedirs gives parents the mode of the umask
        os.makedirs(path, DIRECTORY_MODE, exist_ok=True)

    def rename(self, source: str, target: str) -> None:
        """Rename; a file of the new name is replaced."""
        os.replace(source, target)

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(path)

    def sync_dir(self, path: str) -> None:
        """fsync of the directory."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            raise SyncFailed(error.errno, error.strerror, path) from error
        finally:
            os.close(fd)

    def lock(self, path: str) -> OsLock:
        """flock, exclusive and without waiting."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return OsLock(fd)
