"""A disk of one host: sectors that a power loss keeps or not, one by one, unless they were synced.

kill -9 leaves everything that was written, as the page cache belongs to the machine. A power cut leaves of each sector
written since the last `sync` either the old or the new content, of each file's unsynced size either one, and of the
names changed since the last `sync_dir` the first few changes.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field

SECTOR_BYTES = 512


class PowerLoss(OSError):
    """The process is gone in the midst of an operation. Not caught by the code under test: it stops there."""


class DiskError(OSError):
    """A failure that the simulation planned: no space, or a broken device."""


@dataclass(eq=False)
class _Inode:
    """`content` is the readers' view; `durable` is certain to survive a loss of power."""

    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: set[int] = field(default_factory=set)
    """Sectors that may differ between the two."""
    allocated_bytes: int = 0

    def put(self, position: int, data: bytes) -> None:
        end = position + len(data)
        if len(self.content) < end:
            self.content.extend(bytes(end - len(self.content)))
        self.content[position:end] = data
        if data:
            self.unsynced.update(range(position // SECTOR_BYTES, (end - 1) // SECTOR_BYTES + 1))

    def cut(self, size_bytes: int) -> None:
        self.unsynced.update(range(size_bytes // SECTOR_BYTES, len(self.content) // SECTOR_BYTES + 1))
        del self.content[size_bytes:]
        self.allocated_bytes = size_bytes

    def synced(self) -> None:
        """Sectors not in `unsynced` are equal already; beyond the durable size they are zero."""
        grown = len(self.content) - len(self.durable)
        if grown < 0:
            del self.durable[grown:]
        else:
            self.durable.extend(bytes(grown))
        for sector in self.unsynced:
            at = slice(sector * SECTOR_BYTES, min((sector + 1) * SECTOR_BYTES, len(self.content)))
            if at.start < at.stop:
                self.durable[at] = self.content[at]
        self.unsynced.clear()

    def lose_power(self, chance: random.Random) -> None:
        survives = chance.choice((0.0, 0.5, 0.9, 1.0))
        size = len(chance.choice((self.durable, self.content)))
        found = bytearray(size)
        found[: len(self.durable)] = self.durable[:size]
        for sector in sorted(self.unsynced):
            if chance.random() < survives:
                at = slice(sector * SECTOR_BYTES, min((sector + 1) * SECTOR_BYTES, size, len(self.content)))
                if at.start < at.stop:
                    found[at] = self.content[at]
        self.content, self.durable = found, bytearray(found)
        self.unsynced.clear()
        self.allocated_bytes = size


class SimDisk:
    """A `MetadataDisk`, and the switches with which the simulation plays on it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.full = False
        self.broken = False
        self.failed = False
        """Whether it has failed the process that runs now."""
        self._dies_after: int | None = None
        self._locked = False
        self._names: dict[str, _Inode] = {}
        self._name_states: list[dict[str, _Inode]] = [{}]
        """Names after each change since the last `sync_dir`, the synced ones first."""

    def die_after(self, operations: int) -> None:
        """Let the process die within one of its next disk operations: PowerLoss is raised out of it."""
        self._dies_after = operations

    @property
    def dead(self) -> bool:
        """Whether the process died within an operation."""
        return self._dies_after is not None and self._dies_after < 0

    def process_died(self) -> None:
        """The process's lock ends; its writes stay."""
        self._locked = self.failed = False
        self._dies_after = None

    def lose_power(self, chance: random.Random) -> None:
        """Lose all unsynced bytes, or some of them."""
        self.process_died()
        self._names = dict(chance.choice(self._name_states))
        self._name_states = [dict(self._names)]
        for name in sorted(self._names):
            self._names[name].lose_power(chance)

    def wipe(self) -> None:
        """The disk was replaced by an empty one."""
        self.process_died()
        self._names = {}
        self._name_states = [{}]

    def _change(self, grows: bool = False) -> None:
        self._step()
        if self.broken:
            self.failed = True
            raise DiskError(errno.EIO, "simulated failure of the device")
        if grows and self.full:
            self.failed = True
            raise DiskError(errno.ENOSPC, "simulated full disk")

    def _step(self) -> None:
        if self._dies_after is not None:
            self._dies_after -= 1
            if self._dies_after < 0:
                raise PowerLoss(errno.EIO, "the process is gone")

    def _names_changed(self) -> None:
        self._name_states.append(dict(self._names))

    def lock(self) -> None:
        if self._locked:
            raise BlockingIOError(errno.EAGAIN, "locked")
        self._locked = True

    def close(self) -> None:
        self._locked = False

    def names(self) -> list[str]:
        return sorted(self._names)

    def read(self, name: str) -> bytes:
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return bytes(self._names[name].content)

    def write(self, name: str, data: bytes) -> None:
        self._change(grows=True)
        inode = self._names.get(name)
        if inode is None:
            inode = self._names[name] = _Inode()
            self._names_changed()
        else:
            inode.cut(0)
        inode.put(0, data)

    def append(self, name: str, data: bytes) -> None:
        self._change(grows=True)
        inode = self._names[name]
        inode.put(len(inode.content), data)

    def allocate(self, name: str, size_bytes: int) -> None:
        inode = self._names.get(name)
        self._change(grows=inode is None or size_bytes > inode.allocated_bytes)
        if inode is None:
            inode = self._names[name] = _Inode()
            self._names_changed()
        if size_bytes > len(inode.content):
            inode.content.extend(bytes(size_bytes - len(inode.content)))
        inode.allocated_bytes = max(inode.allocated_bytes, size_bytes)

    def write_at(self, name: str, position: int, data: bytes) -> None:
        inode = self._names[name]
        self._change(grows=position + len(data) > max(inode.allocated_bytes, len(inode.content)))
        if self._dies_after is not None and self._dies_after == 0:  # the next one kills: half of this one is done
            data = data[: len(data) // 2]
        inode.put(position, data)

    def truncate(self, name: str, size_bytes: int) -> None:
        self._change()
        inode = self._names[name]
        if size_bytes <= len(inode.content):
            inode.cut(size_bytes)
        else:
            inode.content.extend(bytes(size_bytes - len(inode.content)))

    def sync(self, name: str) -> None:
        self._change()
        self._names[name].synced()

    def rename(self, old: str, new: str) -> None:
        self._change()
        self._names[new] = self._names.pop(old)
        self._names_changed()

    def remove(self, name: str) -> None:
        self._change()
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        del self._names[name]
        self._names_changed()

    def sync_dir(self) -> None:
        self._change()
        self._name_states = [dict(self._names)]
