"""What an `OSError` of the disk means: no space, out of descriptors for the moment, or a broken disk."""

from __future__ import annotations

import errno
from typing import Final, Protocol

from raftlog.errors import StorageError, StorageFull

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Conditions of the process or the machine, not of the disk."""


def is_full(error: BaseException) -> bool:
    """Whether the error only says that there is no space."""
    return isinstance(error, OSError) and error.errno in _FULL


def is_passing(error: BaseException) -> bool:
    """Whether the error says nothing about the disk (too many open files, no memory)."""
    return isinstance(error, OSError) and error.errno in _PASSING


def full(directory: str, wanted_bytes: int) -> StorageFull:
    """Return the refusal of a write for want of space."""
    return StorageFull(
        f"no space left in log directory {directory}: {wanted_bytes} bytes could not be written and nothing was "
        "appended; free space or shorten retention, reads go on and writes resume by themselves"
    )


def passing(error: OSError, doing: str) -> StorageError:
    """Return the refusal for a condition that passes."""
    return StorageError(
        f"{doing} failed: {error.strerror}; nothing was changed, raise the limit on open files or memory"
    )


class FaultSink(Protocol):
    """Whoever takes a log directory offline."""

    @property
    def offline_reason(self) -> StorageError | None:
        """Why the directory is offline, or None while it works."""
        ...

    def fail(self, error: BaseException, doing: str) -> StorageError:
        """Take the directory offline for good and return what to raise; the first error is the one that counts."""
        ...
