"""The disk as the metadata sees it: one directory of named files."""

from __future__ import annotations

import errno
from typing import Final, Protocol

NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers that say that space is missing, and nothing about the disk."""
DAMAGE_REMEDY: Final = (
    "restore the directory from a copy; or, unless this node is the only voter, empty it, so that the node joins anew "
    "and takes everything from the others (docs/quorum.md)"
)
"""What every message about damage ends with."""


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
        """Write at the end of a file that is there; after an error any part of `data` may have been written."""
        ...

    def allocate(self, name: str, size_bytes: int) -> None:
        """Make a file that is there at least so long, zeros behind its content, and have the space for it."""
        ...

    def write_at(self, name: str, position: int, data: bytes) -> None:
        """Write into a file that is there; after an error any part of `data` may have been written."""
        ...

    def truncate(self, name: str, size_bytes: int) -> None:
        """Cut a file off."""
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
        """Give the directory up."""
        ...
