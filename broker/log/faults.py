"""What an `OSError` of the disk means: no space, something else that passes, or a broken disk.

`LogDir.judge` is the one place that turns an error into what is raised and, for a broken disk, into its end.
"""

from __future__ import annotations

import errno
from typing import Final

from broker.log.storage import SyncFailed
from raftlog.errors import StorageError, StorageFull

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Conditions of the process or the machine, not of the disk."""


def is_full(error: BaseException) -> bool:
    """Whether the error only says that there is no space."""
    return isinstance(error, OSError) and error.errno in _FULL and not isinstance(error, SyncFailed)


def is_passing(error: BaseException) -> bool:
    """Whether the error says nothing about the disk (too many open files, no memory)."""
    if isinstance(error, OSError):
        return error.errno in _PASSING and not isinstance(error, SyncFailed)
    return isinstance(error, MemoryError)


def is_refusal(error: BaseException) -> bool:
    """Whether the same operation may succeed later: no space, or a condition that passes. Anything else is final."""
    return is_full(error) or is_passing(error)


def full(directory: str, wanted_bytes: int) -> StorageFull:
    """Return the refusal of a write for want of space."""
    return StorageFull(
        f"no space left in log directory {directory}: {wanted_bytes} bytes could not be written and nothing was "
        "appended; free space or shorten retention, reads go on and writes resume by themselves"
    )


def passing(error: BaseException, doing: str) -> StorageError:
    """Return the refusal for a condition that passes."""
    reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
    return StorageError(f"{doing} failed: {reason}; try again later, and raise the limit on open files or memory")
