"""A disk in memory for the metadata journal: it loses power between operations and forgets what was not synced."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field

Chooser = Callable[[int], int]
"""Given n, one of 0..n-1: which of n possible remains a power loss leaves."""


def nothing_survives(count: int) -> int:
    """Only what was synced is left."""
    return 0


def everything_survives(count: int) -> int:
    """All that was written is left, as after kill -9."""
    return count - 1


class PowerLoss(OSError):
    """The machine is off."""


@dataclass
class _File:
    content: bytes = b""
    states: list[bytes] = field(default_factory=lambda: [b""])
    """Contents that may be found after a power loss: the synced one first, then each one since."""

    def write(self, content: bytes) -> None:
        self.content = content
        self.states.append(content)


class MemoryDisk:
    """A `MetadataDisk`. `operations` counts what could be interrupted; the one numbered `power_off_at` is, half done.

    `fail(operation, error)` makes the next such operation raise `error`; an append writes half of its data before.
    """

    path = "/metadata"

    def __init__(self, power_off_at: int | None = None) -> None:
        self.operations = 0
        self.trace: list[str] = []
        self.locked = False
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
        for name, file in names.items():
            at = choose(len(file.states))
            content = file.states[at]
            before = file.states[max(0, at - 1)]
            if at and len(content) > len(before) and content.startswith(before):  # of an append, any part
                content = content[: len(before) + 1 + choose(len(content) - len(before))]
            disk._names[name] = _File(content, [content])
        disk._name_states = [dict(disk._names)]
        return disk

    def after_kill(self) -> MemoryDisk:
        """Return the disk as the next process finds it: everything is there, but synced is only what was before."""
        disk = MemoryDisk()
        copies = {
            id(file): _File(file.content, list(file.states)) for state in self._name_states for file in state.values()
        }
        disk._name_states = [{name: copies[id(f)] for name, f in state.items()} for state in self._name_states]
        disk._names = dict(disk._name_states[-1])
        return disk

    def put(self, name: str, content: bytes) -> None:
        """Place a file from outside, durable."""
        self._names[name] = _File(content, [content])
        self._name_states = [dict(self._names)]

    def _begin(self, operation: str, name: str = "") -> bool:
        """Count the operation; return whether the power goes in the midst of it."""
        fault = self._faults.pop(operation, None)
        if fault is not None and operation != "append":
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
        return self._names[name].content

    def write(self, name: str, data: bytes) -> None:
        last = self._begin("write", name)
        file = self._names.get(name)
        if file is None:
            file = self._names[name] = _File()
            self._name_states.append(dict(self._names))
        else:
            file.write(b"")
        file.write(data)
        self._end(last)

    def append(self, name: str, data: bytes) -> None:
        last = self._begin("append", name)
        file = self._names[name]
        if self._pending_fault is not None:
            file.write(file.content + data[: len(data) // 2])
            raise self._pending_fault
        file.write(file.content + data)
        self._end(last)

    def truncate(self, name: str, size_bytes: int) -> None:
        last = self._begin("truncate", name)
        self._names[name].write(self._names[name].content[:size_bytes])
        self._end(last)

    def sync(self, name: str) -> None:
        last = self._begin("sync", name)
        self._end(last)  # interrupted: nothing is promised
        file = self._names[name]
        file.states = [file.content]

    def rename(self, old: str, new: str) -> None:
        last = self._begin("rename", f"{old} {new}")
        self._names[new] = self._names.pop(old)
        self._name_states.append(dict(self._names))
        self._end(last)

    def remove(self, name: str) -> None:
        last = self._begin("remove", name)
        del self._names[name]
        self._name_states.append(dict(self._names))
        self._end(last)

    def sync_dir(self) -> None:
        last = self._begin("sync_dir")
        self._end(last)
        self._name_states = [dict(self._names)]
