"""The real file system behind the `Storage` port (Linux)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence

from broker.log.storage import SyncFailed
from raftlog.format import Buffer

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
        """Return the bytes if the page cache has them all; where the kernel cannot tell, always None."""
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
        missing = sum(map(len, buffers)) - written
        if missing:
            self._write_rest(b"".join(buffers), written, position)

    def _write_rest(self, data: bytes, written: int, position: int) -> None:
        view = memoryview(data)
        while written < len(data):
            written += os.pwrite(self._fd, view[written:], position + written)

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
    """An flock on an open file; it vanishes with the process, however that ends."""

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
        return OsFile(os.open(path, flags, 0o644))

    def list_sizes(self, path: str) -> dict[str, int]:
        """Return the names in a directory with their sizes in bytes; -1 for a directory."""
        sizes = {}
        with os.scandir(path) as entries:
            for entry in entries:
                sizes[entry.name] = -1 if entry.is_dir() else entry.stat().st_size
        return sizes

    def exists(self, path: str) -> bool:
        """Whether a file or directory of that name is there; an error other than its absence is raised."""
        try:
            os.stat(path)
        except FileNotFoundError:
            return False
        return True

    def make_dir(self, path: str) -> None:
        """Make a directory with its parents."""
        os.makedirs(path, exist_ok=True)

    def rename(self, source: str, target: str) -> None:
        """Rename; a file in the way is replaced."""
        os.replace(source, target)

    def remove(self, path: str) -> None:
        """Remove a file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory if it is there."""
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
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return OsLock(fd)
