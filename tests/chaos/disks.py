"""Small ext4 file systems of their own, on loop devices, so that a disk can be full."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from tests.chaos.host import run

BYTES: Final = 192 << 20
_SPARE_BLOCKS: Final = 64
UID: Final = 10001
"""The user that the image's servers run as."""


class Disk:
    """A file system at `path`, which a server's container mounts."""

    def __init__(self, directory: Path) -> None:
        self._image = directory / "disk.img"
        self.path = directory / "data"
        self.path.mkdir(parents=True)
        with self._image.open("wb") as image:
            image.truncate(BYTES)
        run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(self._image))
        run("mount", "-o", "loop", str(self._image), str(self.path))
        os.chown(self.path, UID, UID)

    def fill(self) -> None:
        """Leave no block free."""
        ballast = os.open(self._ballast, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            there = os.statvfs(self.path)
            most = (there.f_bavail - _SPARE_BLOCKS) * there.f_frsize
            if most > 0:
                os.posix_fallocate(ballast, 0, most)
            block = bytes(there.f_frsize)
            while True:  # the rest, of which the file's own bookkeeping takes some
                os.write(ballast, block)
                os.fsync(ballast)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        finally:
            os.close(ballast)

    def empty(self) -> None:
        """Give the space back."""
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it."""
        run("umount", "--lazy", str(self.path), check=False)
        self._image.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"
