"""A file system in memory that forgets what was not synced, fails on demand and can lose power at any operation.

What survives `crash`, as POSIX has it: contents up to a file's last `datasync`, names up to their directory's last
`sync_dir`, and of everything newer whatever the dice say: any prefix of the changes, or (writes) any subset, the last
one torn anywhere. `crash(None)` is the end of a process, not of the machine: everything survives.
"""

from __future__ import annotations

import errno
import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from broker.log.storage import SyncFailed
from raftlog.format import Buffer


class PowerLoss(BaseException):
    """The machine stops here; nothing but a test may catch it."""


_T = TypeVar("_T")


def moments(storage: MemoryStorage, script: Callable[[], object], stopped: Callable[[], _T]) -> list[_T]:
    """Run `script`; return what `stopped` returned before each of its storage operations, where power may be lost.

    One run serves all moments, where `crash_at` takes a run for each.
    """
    found: list[_T] = []
    assert storage.on_step is None, "the storage is watched by another observer already"
    storage.on_step = lambda op, path: None if op == "read" else found.append(stopped())
    script()
    storage.on_step = None
    return found


class _Node:
    def copy(self, copied: Callable[[_Node], _Node]) -> _Node:
        """Return another node in the same state; `copied` returns the copy of any node below."""
        raise NotImplementedError


class _FileNode(_Node):
    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = bytearray()
        self.pending: list[tuple[int, bytes | None]] = []
        """(position, bytes written) or (size, None) for a truncation."""
        self.spoiled = False
        """Whether a test may change `data` by other means, so that `pending` does not have every change."""

    def write(self, position: int, data: bytes) -> None:
        self._apply(self.data, position, data)
        self.pending.append((position, data))

    def truncate(self, size: int) -> None:
        self._apply(self.data, size, None)
        self.pending.append((size, None))

    @staticmethod
    def _apply(target: bytearray, position: int, data: bytes | None) -> None:
        if len(target) < position:
            target.extend(bytes(position - len(target)))
        if data is None:
            del target[position:]
        else:
            target[position : position + len(data)] = data

    def copy(self, copied: Callable[[_Node], _Node]) -> _FileNode:
        made = _FileNode()
        made.data, made.durable, made.pending = self.data[:], self.durable[:], self.pending[:]
        made.spoiled = self.spoiled
        return made

    def sync(self) -> None:
        if self.spoiled:
            self.durable = self.data[:]
        else:  # a large log grows by little
            for position, data in self.pending:
                self._apply(self.durable, position, data)
        self.pending.clear()

    def crash(self, dice: Random) -> None:
        survived = self.durable[:]
        kept = dice.randint(0, len(self.pending))
        scattered = dice.random() < 0.3
        for number, (position, data) in enumerate(self.pending[: kept + 1]):
            torn = number == kept
            if data is None:
                if not torn:
                    self._apply(survived, position, None)
            elif torn:
                self._apply(survived, position, data[: dice.randint(0, len(data))])
            elif not scattered or dice.random() < 0.7:
                self._apply(survived, position, data)
        self.data, self.durable = survived, survived[:]
        self.pending.clear()


class _DirectoryNode(_Node):
    def __init__(self) -> None:
        self.entries: dict[str, _Node] = {}
        self.durable: dict[str, _Node] = {}
        self.pending: list[dict[str, _Node | None]] = []
        """Changes that belong together: what each name stands for from then on, None for nothing."""

    def change(self, change: dict[str, _Node | None]) -> None:
        self._apply(self.entries, change)
        self.pending.append(change)

    @staticmethod
    def _apply(target: dict[str, _Node], change: dict[str, _Node | None]) -> None:
        for name, node in change.items():
            if node is None:
                target.pop(name, None)
            else:
                target[name] = node

    def copy(self, copied: Callable[[_Node], _Node]) -> _DirectoryNode:
        made = _DirectoryNode()
        made.entries = {name: copied(node) for name, node in self.entries.items()}
        made.durable = {name: copied(node) for name, node in self.durable.items()}
        made.pending = [
            {name: None if node is None else copied(node) for name, node in change.items()} for change in self.pending
        ]
        return made

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.pending.clear()

    def crash(self, dice: Random) -> None:
        survived = dict(self.durable)
        for change in self.pending[: dice.randint(0, len(self.pending))]:
            self._apply(survived, change)
        self.entries = survived
        self.sync()
        for node in self.entries.values():
            if isinstance(node, _FileNode | _DirectoryNode):
                node.crash(dice)


@dataclass
class Fault:
    """Operations `op` on paths like `path` raise `errno`, after `skip` of them went well."""

    op: str
    path: str = "*"
    errno: int = errno.EIO
    skip: int = 0


class MemoryFile:
    """An open file."""

    def __init__(self, storage: MemoryStorage, path: str, node: _FileNode) -> None:
        self._storage = storage
        self._path = path
        self._node = node
        self._boot = storage.boots

    def _step(self, op: str) -> None:
        assert self._boot == self._storage.boots, (
            f"{self._path}: a file that was opened before the crash is used after it"
        )
        self._storage.step(op, self._path)

    def size(self) -> int:
        """Length in bytes."""
        return len(self._node.data)

    def read(self, size: int, position: int) -> bytes:
        """Read."""
        self._step("read")
        return bytes(self._node.data[position : position + size])

    def read_nowait(self, size: int, position: int) -> bytes | None:
        """Read, unless `storage.cold`."""
        self._step("read")
        if self._storage.cold or position + size > len(self._node.data):
            return None
        return bytes(self._node.data[position : position + size])

    def write(self, buffers: Sequence[Buffer], position: int) -> None:
        """Write; with too little space a part of it."""
        data = b"".join(buffers)
        room = self._storage.room_for(max(0, position + len(data) - len(self._node.data)))
        try:
            self._step("write")
        except OSError:
            self._node.write(position, data[: len(data) // 2])
            raise
        if room < 0:
            self._node.write(position, data[: max(0, len(data) + room)])
            raise OSError(errno.ENOSPC, "No space left on device", self._path)
        self._node.write(position, data)

    def truncate(self, size: int) -> None:
        """Cut."""
        self._step("truncate")
        if size != len(self._node.data):
            self._node.truncate(size)

    def datasync(self) -> None:
        """Make durable."""
        self._step("datasync")
        self._node.sync()


class MemoryLock:
    """A lock that vanishes with its machine."""

    def __init__(self, storage: MemoryStorage, path: str) -> None:
        self._storage = storage
        self._path = path

    def release(self) -> None:
        """Unlock."""
        self._storage.locked.discard(self._path)


@dataclass
class MemoryStorage:
    """See the module; implements `broker.log.storage.Storage`."""

    capacity_bytes: int | None = None
    crash_at: int | None = None
    """Number of the operation (reads do not count) at which power is lost."""
    cold: bool = False
    """Nothing is in the page cache."""
    faults: list[Fault] = field(default_factory=list)
    locked: set[str] = field(default_factory=set)
    operations: int = 0
    boots: int = 0
    on_step: Callable[[str, str], Any] | None = None
    _root: _DirectoryNode = field(default_factory=_DirectoryNode)

    # Trouble

    def step(self, op: str, path: str) -> None:
        """Count an operation; fail or lose power where that is due."""
        if op != "read":
            if self.crash_at is not None and self.operations >= self.crash_at:
                raise PowerLoss(f"at operation {self.operations}: {op} {path}")
            self.operations += 1
        if self.on_step is not None:
            self.on_step(op, path)
        self.fail_if_due(op, path)

    def fail_if_due(self, op: str, path: str) -> None:
        """Raise the error that a fault has for this operation."""
        for fault in self.faults:
            if fault.op == op and fnmatch.fnmatch(path, fault.path):
                if fault.skip:
                    fault.skip -= 1
                else:
                    kind = SyncFailed if op in ("datasync", "sync_dir") else OSError
                    raise kind(fault.errno, f"injected into {op}", path)

    def crash(self, dice: Random | None) -> None:
        """Stop the machine (None: only the process) and start it again."""
        if dice is not None:
            self._root.crash(dice)
        self.locked.clear()
        self.crash_at = None
        self.boots += 1

    def used_bytes(self) -> int:
        """Bytes in all files."""

        def count(node: _Node) -> int:
            if isinstance(node, _DirectoryNode):
                return sum(map(count, node.entries.values()))
            return len(node.data) if isinstance(node, _FileNode) else 0

        return count(self._root)

    def room_for(self, more_bytes: int) -> int:
        """Return the space left after `more_bytes`, negative when they do not fit."""
        if self.capacity_bytes is None:
            return 1
        return self.capacity_bytes - self.used_bytes() - more_bytes

    def content(self, path: str) -> bytearray:
        """Return a file's contents, only to look at."""
        return self._file(path).data

    def raw(self, path: str) -> bytearray:
        """Return a file's contents for a test to look at or spoil."""
        node = self._file(path)
        node.spoiled = True
        return node.data

    def lose_durably(self, path: str, size: int) -> None:
        """Cut a file that is at rest to `size` bytes, for good; no operation of a process, so no fault that is due."""
        node = self._file(path)
        node.spoiled = True
        del node.data[size:]
        node.sync()

    def copy(self) -> MemoryStorage:
        """Return another machine in the same state, also in what is not durable yet; nothing is due to fail there."""
        made: dict[_Node, _Node] = {}  # a node may have several names, before the change of one is durable

        def copied(node: _Node) -> _Node:
            if node not in made:
                made[node] = node.copy(copied)
            return made[node]

        root = copied(self._root)
        assert isinstance(root, _DirectoryNode)
        return MemoryStorage(
            self.capacity_bytes, cold=self.cold, locked=set(self.locked), operations=self.operations, _root=root
        )

    def clone(self) -> MemoryStorage:
        """Return another machine with the same contents, all of them durable."""

        def copy(node: _Node) -> _Node:
            if isinstance(node, _FileNode):
                made = _FileNode()
                made.data, made.durable = node.data[:], node.data[:]
                return made
            assert isinstance(node, _DirectoryNode)
            directory = _DirectoryNode()
            directory.entries = {name: copy(child) for name, child in node.entries.items()}
            directory.sync()
            return directory

        root = copy(self._root)
        assert isinstance(root, _DirectoryNode)
        return MemoryStorage(capacity_bytes=self.capacity_bytes, _root=root)

    # Storage

    def _find(self, path: str) -> _Node:
        node: _Node = self._root
        for name in filter(None, path.split("/")):
            if not isinstance(node, _DirectoryNode) or name not in node.entries:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            node = node.entries[name]
        return node

    def _file(self, path: str) -> _FileNode:
        node = self._find(path)
        assert isinstance(node, _FileNode), path
        return node

    def _parent(self, path: str) -> tuple[_DirectoryNode, str]:
        parent, _, name = path.rpartition("/")
        node = self._find(parent)
        assert isinstance(node, _DirectoryNode)
        return node, name

    def open(self, path: str, *, create: bool = False) -> MemoryFile:
        """Open."""
        self.step("open", path)
        parent, name = self._parent(path)
        node = parent.entries.get(name)
        if node is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            if self.room_for(1) < 0:
                raise OSError(errno.ENOSPC, "No space left on device", path)
            node = _FileNode()
            parent.change({name: node})
        assert isinstance(node, _FileNode), path
        return MemoryFile(self, path, node)

    def list_sizes(self, path: str) -> dict[str, int]:
        """List."""
        self.step("read", path)
        node = self._find(path)
        assert isinstance(node, _DirectoryNode)
        return {n: len(e.data) if isinstance(e, _FileNode) else -1 for n, e in node.entries.items()}

    def exists(self, path: str) -> bool:
        """Look."""
        self.step("read", path)
        try:
            self._find(path)
        except FileNotFoundError:
            return False
        return True

    def make_dir(self, path: str) -> None:
        """Make a directory and its parents."""
        self.step("make_dir", path)
        node = self._root
        for name in filter(None, path.split("/")):
            if name not in node.entries:
                node.change({name: _DirectoryNode()})
            child = node.entries[name]
            assert isinstance(child, _DirectoryNode), path
            node = child

    def rename(self, source: str, target: str) -> None:
        """Rename within a directory."""
        self.step("rename", source)
        parent, old = self._parent(source)
        other, new = self._parent(target)
        assert parent is other, f"{source} to {target}: the log never moves a file to another directory"
        if old not in parent.entries:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", source)
        parent.change({old: None, new: parent.entries[old]})

    def remove(self, path: str) -> None:
        """Remove a file."""
        self.step("remove", path)
        parent, name = self._parent(path)
        if name in parent.entries:
            parent.change({name: None})

    def remove_dir(self, path: str) -> None:
        """Remove an empty directory."""
        self.step("remove_dir", path)
        parent, name = self._parent(path)
        node = parent.entries.get(name)
        if isinstance(node, _DirectoryNode):
            assert not node.entries, f"{path} is not empty"
            parent.change({name: None})

    def sync_dir(self, path: str) -> None:
        """Make names durable."""
        self.fail_if_due("open", path)  # it takes a descriptor
        self.step("sync_dir", path)
        node = self._find(path)
        assert isinstance(node, _DirectoryNode)
        node.sync()

    def lock(self, path: str) -> MemoryLock:
        """Lock."""
        self.step("lock", path)
        if path in self.locked:
            raise BlockingIOError(errno.EAGAIN, "locked", path)
        self.open(path, create=True)
        self.locked.add(path)
        return MemoryLock(self, path)
