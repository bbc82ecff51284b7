"""The disk as a port: what the partition log asks of a file system.

`OsStorage` is the real one; tests and the cluster simulation have one in memory that tells volatile from durable
bytes, crashes at any operation and fails on demand. Every method may raise `OSError`; nothing else knows `errno`
but `faults.py`.

Durability follows POSIX to the letter: written bytes are durable after `File.datasync`, a name that was created,
renamed or removed after `Storage.sync_dir` of its directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from raftlog.format import Buffer


class SyncFailed(OSError):
    """fdatasync or fsync itself failed. Final whatever its errno: the kernel may have dropped the dirty pages."""


@contextlib.contextmanager
def rewritten_anyway() -> Iterator[None]:
    """Judge a failing sync like a failing write: nobody relies on these bytes, the next attempt writes them anew."""
    try:
        yield
    except SyncFailed as error:
        raise OSError(error.errno, error.strerror, error.filename) from error


class File(Protocol):
    """An open file. It is closed when the last reference goes, so that a reader never meets a reused descriptor."""

    def size(self) -> int:
        """Return the length in bytes."""
        ...

    def read(self, size: int, position: int) -> bytes:
        """Return up to `size` bytes at `position`; fewer only at the end of the file. May wait for the disk."""
        ...

    def read_nowait(self, size: int, position: int) -> bytes | None:
        """Return exactly `size` bytes at `position`, or None when that would wait for the disk (or cannot be told)."""
        ...

    def write(self, buffers: Sequence[Buffer], position: int) -> None:
        """Write all buffers, one after the other, at `position`; after an error any prefix may be there."""
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
        """Whether a file or directory of that name is there."""
        ...

    def make_dir(self, path: str) -> None:
        """Make a directory, with its parents; nothing happens when it is there already."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename a file or directory; a file that is in the way is replaced."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; nothing happens when it is missing."""
        ...

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory; nothing happens when it is missing."""
        ...

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable.

        Raises:
            SyncFailed: the fsync failed, which is final.
            OSError: the directory could not be opened.
        """
        ...

    def lock(self, path: str) -> DirectoryLock:
        """Lock the file at `path`, made when missing.

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
    """Put `data` into `directory`/`name`, all or nothing and durably: aside, fsync, rename, fsync of the directory."""
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
