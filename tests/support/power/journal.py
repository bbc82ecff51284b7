"""What the layer has noted: the records of a journal, and the names and sizes that follow from them.

The file: "POWER 1 ", u64 end of the records, then a lock of the layer's; from byte 4096 records, each `_HEAD`, name,
target name, data, padded to 8 bytes. `layer/journal.c` writes the same.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final

HEADER_BYTES: Final = 4096
_MAGIC: Final = b"POWER 1\0"
_HEAD: Final = struct.Struct("<IIqQQQQqqqIIQ")
_UNDER_WAY: Final = -(1 << 63)

Node = int
"""The inode number of a file or a directory; none is given twice between two cuts, since the graveyard keeps them."""


class Kind(IntEnum):
    """The kinds of records."""

    CREATE = 1
    MAKE_DIRECTORY = 2
    REMOVE = 3
    RENAME = 4
    WRITE = 5
    RESIZE = 6
    SYNC = 7
    SYNC_ALL = 8


@dataclass(frozen=True, slots=True)
class Change:
    """One record. `length` is the new size of a RESIZE; `old` what was at `offset` before; `upto` of a SYNC.

    A process that was killed in the middle of a change leaves `under_way`: whether it was made, the directory knows.
    """

    position: int
    kind: Kind
    result: int
    node: Node
    directory: Node
    target_directory: Node
    replaced: Node
    offset: int
    length: int
    old_size: int
    name: str
    target_name: str
    old: bytes

    @property
    def under_way(self) -> bool:
        """Whether its end was never noted."""
        return self.result == _UNDER_WAY

    @property
    def entries(self) -> tuple[tuple[Node, str], ...]:
        """The names that it changes, by directory."""
        if self.kind is Kind.RENAME:
            return (self.directory, self.name), (self.target_directory, self.target_name)
        return ((self.directory, self.name),)

    @property
    def new_size(self) -> int:
        """The size of the file when it was made, as far as it was."""
        if self.kind is Kind.RESIZE:
            return self.length
        return max(self.old_size, self.offset + self.result) if self.result > 0 else self.old_size


def make_journal(path: Path) -> None:
    """Make an empty journal."""
    path.write_bytes(_MAGIC + HEADER_BYTES.to_bytes(8, "little") + bytes(HEADER_BYTES - 16))


def read_journal(path: Path) -> list[Change]:
    """Return the changes that did not fail."""
    data = path.read_bytes()
    assert data[:8] == _MAGIC, f"{path} does not begin as a journal does"
    end = int.from_bytes(data[8:16], "little")
    return [change for change in _changes(data, end) if change.result >= 0 or change.under_way]


def _changes(data: bytes, end: int) -> Iterator[Change]:
    position = HEADER_BYTES
    while position < end:
        size, kind, result, node, directory, target_directory, replaced, *rest = _HEAD.unpack_from(data, position)
        offset, length, old_size, name_bytes, target_bytes, data_bytes = rest
        at = position + _HEAD.size
        name, at = data[at : at + name_bytes].decode(), at + name_bytes
        target, at = data[at : at + target_bytes].decode(), at + target_bytes
        nodes = (node, directory, target_directory, replaced)
        numbers = (offset, length, old_size)
        yield Change(position, Kind(kind), result, *nodes, *numbers, name, target, data[at : at + data_bytes])
        position += size


@dataclass
class Tree:
    """Names and sizes below a directory."""

    root: Node
    names: dict[Node, dict[str, Node]] = field(default_factory=dict)
    """By directory."""
    sizes: dict[Node, int] = field(default_factory=dict)
    """By file."""
    paths: dict[Node, Path] = field(default_factory=dict)
    """Where each was found; one of several for a file with several names."""

    @classmethod
    def scan(cls, directory: Path) -> Tree:
        """Return what lies in a directory."""
        tree = cls(directory.stat().st_ino)
        tree._scan(tree.root, directory)
        return tree

    def _scan(self, node: Node, directory: Path) -> None:
        names = self.names[node] = {}
        self.paths[node] = directory
        with os.scandir(directory) as found:
            for entry in found:
                status = entry.stat(follow_symlinks=False)
                names[entry.name] = status.st_ino
                if entry.is_dir(follow_symlinks=False):
                    self._scan(status.st_ino, Path(entry.path))
                else:
                    self.sizes[status.st_ino] = status.st_size
                    self.paths[status.st_ino] = Path(entry.path)

    def apply(self, change: Change) -> None:
        """Change names as a change of names does; one that has become impossible does what is left of it."""
        names = self.names.setdefault(change.directory, {})
        match change.kind:
            case Kind.CREATE | Kind.MAKE_DIRECTORY:
                names[change.name] = change.node
                if change.kind is Kind.MAKE_DIRECTORY:
                    self.names.setdefault(change.node, {})
            case Kind.REMOVE:
                if names.get(change.name) == change.node:
                    del names[change.name]
            case Kind.RENAME:
                if names.get(change.name) == change.node:
                    del names[change.name]
                self.names.setdefault(change.target_directory, {})[change.target_name] = change.node
            case _:
                raise AssertionError(
                    f"a journal entry of the kind {change.kind.name} has no place among changes of names"
                )

    def reachable(self) -> Iterator[tuple[Node, dict[str, Node]]]:
        """Give every directory that a path leads to, from the root on, with its names."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node, self.names[node]
            waiting += [child for child in self.names[node].values() if child in self.names]
