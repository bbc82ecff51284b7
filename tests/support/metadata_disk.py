"""A disk in memory for the metadata: it loses power between operations and forgets what was not synced."""

from __future__ import annotations

import errno
from collections.abc import Callable

Chooser = Callable[[int], int]
"""Given n, one of 0..n-1: which of n possible remains a power loss leaves."""


def nothing_survives(count: int) -> int:
    """Keep only the synced content."""
    return 0


def everything_survives(count: int) -> int:
    """All that was written is left, as after kill -9."""
    return count - 1


class PowerLoss(OSError):
    """The machine is off."""


class _File:
    """What a file holds, what of it is durable, and what was done to it since.

    Zeros at the end that only an allocation made are counted, not held. What is durable is the first part of the
    content, until something overwrites it.
    """

    def __init__(self, content: bytes = b"", zeros: int = 0) -> None:
        self.content = bytearray(content)
        self.zeros = zeros
        self.changes: list[tuple[int, bytes | None]] = []
        """Since the last sync: (position, bytes written there), or (new size, None)."""
        self._synced: bytes | None = None
        self._synced_size = len(content)
        self._synced_zeros = zeros

    @property
    def whole(self) -> bytes:
        return bytes(self.content) + bytes(self.zeros)

    def sync(self) -> None:
        self.changes.clear()
        self._synced, self._synced_size, self._synced_zeros = None, len(self.content), self.zeros

    def change(self, position: int, data: bytes | None) -> None:
        """Write `data` at `position`, or with None make the file end there."""
        if position < self._synced_size and self._synced is None:
            self._synced = bytes(self.content[: self._synced_size])
        self.changes.append((position, data))
        self._apply(position, data)

    def _apply(self, position: int, data: bytes | None) -> None:
        size = len(self.content)
        if data is None:
            del self.content[position:]
            self.zeros = max(0, position - len(self.content))
            return
        if position > size:
            self.content += bytes(position - size)
        self.content[position : position + len(data)] = data
        self.zeros = max(0, self.zeros - (len(self.content) - size))

    def copy(self) -> _File:
        other = _File(bytes(self.content), self.zeros)
        other.changes = list(self.changes)
        other._synced, other._synced_size = self._synced, self._synced_size
        other._synced_zeros = self._synced_zeros
        return other

    def survivor(self, choose: Chooser) -> _File:
        """Return the content after a power loss: of the changes since the sync, the first few; of the last write, any
        part."""
        synced = self.content[: self._synced_size] if self._synced is None else self._synced
        left = _File(bytes(synced), self._synced_zeros)
        kept = choose(len(self.changes) + 1)
        for position, data in self.changes[: max(0, kept - 1)]:
            left._apply(position, data)
        if kept:
            position, data = self.changes[kept - 1]
            left._apply(position, data[: 1 + choose(len(data))] if data else data)
        left.sync()
        return left


class MemoryDisk:
    """A `MetadataDisk`. `operations` counts what could be interrupted; the one numbered `power_off_at` is, half done.

    `fail(operation, error)` makes the next such operation raise `error`; an append or write_at writes half of its data
    before. `free_bytes`, when it is set, is what `allocate` may still take.
    """

    path = "/metadata"

    def __init__(self, power_off_at: int | None = None) -> None:
        self.operations = 0
        self.trace: list[str] = []
        self.locked = False
        self.free_bytes: int | None = None
        self._power_off_at = power_off_at
        self._names: dict[str, _File] = {}
        self._name_states: list[dict[str, _File]] = [{}]
        self._faults: dict[str, OSError] = {}

    def fail(self, operation: str, error_number: int) -> None:
        """Make the next `operation` raise OSError with this number."""
        self._faults[operation] = OSError(error_number, errno.errorcode[error_number])

    def survivor(self, choose: Chooser) -> MemoryDisk:
        """Return the disk as it is found after a power loss now."""
        disk = MemoryDisk()
        names = self._name_states[choose(len(self._name_states))]
        disk._names = {name: file.survivor(choose) for name, file in names.items()}
        disk._name_states = [dict(disk._names)]
        return disk

    def after_kill(self) -> MemoryDisk:
        """Return the disk as the next process finds it: all content is there, but only the content from before is
        synced."""
        disk = MemoryDisk()
        copies = {id(file): file.copy() for state in self._name_states for file in state.values()}
        disk._name_states = [{name: copies[id(f)] for name, f in state.items()} for state in self._name_states]
        disk._names = dict(disk._name_states[-1])
        return disk

    def put(self, name: str, content: bytes) -> None:
        """Place a file from outside, durable."""
        self._names[name] = _File(content)
        self._name_states = [dict(self._names)]

    def _begin(self, operation: str, name: str = "") -> bool:
        """Count the operation; return whether the power goes in the midst of it."""
        fault = self._faults.pop(operation, None)
        if fault is not None and operation not in ("append", "write_at"):
            raise fault
        self._pending_fault = fault
        if self._power_off_at is not None and self.operations > self._power_off_at:
            raise PowerLoss(errno.EIO, "the power is off")
        last = self.operations == self._power_off_at
        self.operations += 1
        self.trace.append(f"{operation} {name}".rstrip())
        return last

    def _end(self, last: bool) -> None:
        if last:
            raise PowerLoss(errno.EIO, "the power is off")

    def lock(self) -> None:
        if self.locked:
            raise BlockingIOError(errno.EAGAIN, "locked")
        self.locked = True

    def close(self) -> None:
        self.locked = False

    def names(self) -> list[str]:
        return list(self._names)

    def read(self, name: str) -> bytes:
        return self._names[name].whole

    def write(self, name: str, data: bytes) -> None:
        last = self._begin("write", name)
        file = self._names.get(name)
        if file is None:
            file = self._names[name] = _File()
            self._name_states.append(dict(self._names))
        else:
            file.change(0, None)
        file.change(0, data)
        self._end(last)

    def append(self, name: str, data: bytes) -> None:
        last = self._begin("append", name)
        file = self._names[name]
        self._write(file, len(file.content) + file.zeros, data)
        self._end(last)

    def allocate(self, name: str, size_bytes: int) -> None:
        last = self._begin("allocate", name)
        file = self._names[name]
        missing = size_bytes - len(file.content) - file.zeros
        if missing > 0:
            if self.free_bytes is not None:
                if missing > self.free_bytes:
                    raise OSError(errno.ENOSPC, "no space is left")
                self.free_bytes -= missing
            file.change(size_bytes, None)
        self._end(last)

    def write_at(self, name: str, position: int, data: bytes) -> None:
        last = self._begin("write_at", name)
        self._write(self._names[name], position, data)
        self._end(last)

    def _write(self, file: _File, position: int, data: bytes) -> None:
        if self._pending_fault is not None:
            file.change(position, data[: len(data) // 2])
            raise self._pending_fault
        file.change(position, data)

    def truncate(self, name: str, size_bytes: int) -> None:
        last = self._begin("truncate", name)
        self._names[name].change(size_bytes, None)
        self._end(last)

    def sync(self, name: str) -> None:
        last = self._begin("sync", name)
        self._end(last)  # interrupted: nothing is promised
        self._names[name].sync()

    def rename(self, old: str, new: str) -> None:
        last = self._begin("rename", f"{old} {new}")
        self._names[new] = self._names.pop(old)
        self._name_states.append(dict(self._names))
        self._end(last)

    def remove(self, name: str) -> None:
        last = self._begin("remove", name)
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        del self._names[name]
        self._name_states.append(dict(self._names))
        self._end(last)

    def sync_dir(self) -> None:
        last = self._begin("sync_dir")
        self._end(last)
        self._name_states = [dict(self._names)]
