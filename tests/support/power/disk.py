"""A directory whose processes write through the layer, and whose power can be cut."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Final

from tests.support.power.journal import Change, Kind, Node, Tree, make_journal, read_journal
from tests.support.power.loss import CONTENT_KINDS, NAME_KINDS, Durable, choose_content, choose_names

SOURCES: Final = Path(__file__).with_name("layer")


def missing() -> str | None:
    """Return why there is no layer on this machine, or None."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return "power can only be cut on a 64-bit Linux: the layer is a library that is preloaded there"
    return None if shutil.which("gcc") else "power cannot be cut without gcc, which builds the layer"


@cache
def layer() -> Path:
    """Return the library, built for this process."""
    directory = Path(tempfile.mkdtemp(prefix="raftlog-power-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    library = directory / "layer.so"
    command = ["gcc", "-shared", "-fPIC", "-O2", "-pthread", "-Wall", "-Wextra", "-Werror", "-o", str(library)]
    subprocess.run([*command, *map(str, sorted(SOURCES.glob("*.c")))], check=True)
    return library


@contextmanager
def powered(*, sync_us: int = 2_000, lie: str = "") -> Iterator[None]:
    """Preload the layer into processes that are started meanwhile in the directory of a `PoweredDisk`.

    Args:
        sync_us: how long a fsync takes at most.
        lie: patterns with colons between; the fsync of matching paths below `data` does nothing and says it did.
    """
    settings = {"LD_PRELOAD": str(layer()), "POWER_HOME": "power", "POWER_SYNC_US": str(sync_us), "POWER_LIE": lie}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass
class Loss:
    """The result of a cut, for messages."""

    names: str
    lost_names: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    fates: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return "; ".join([f"names: {self.names}", *self.lost_names, *self.files])

    @property
    def size(self) -> int:
        """How many files and names have lost something."""
        return len(self.files) + len(self.lost_names)


@dataclass
class Outcome:
    """What is left: `tree` has the names, `places` where each file is now, `contents` those that are not as there."""

    tree: Tree
    places: dict[Node, Path]
    loss: Loss
    contents: dict[Node, bytes] = field(default_factory=dict)

    def files(self) -> Iterator[tuple[str, Node]]:
        """Give every name of a file below the directory, with its file."""
        where = {self.tree.root: ""}
        for node, names in self.tree.reachable():
            for name, child in names.items():
                if child in self.tree.names:
                    where[child] = f"{where[node]}{name}/"
                else:
                    yield where[node] + name, child

    def lose_content(self, name: str, node: Node, changes: Sequence[Change], chance: Random) -> None:
        """Lose some of the changes of a file that are not durable."""
        content = self.places[node].read_bytes()
        fate, left = choose_content(content, changes, chance)
        self.loss.fates[fate.value] += 1
        if left != content:
            self.contents[node] = left
            how = f"{len(changes)} writes {fate.value}, {len(content)} -> {len(left)} bytes"
            self.loss.files.append(f"{name}: {how}")

    def read(self) -> dict[str, bytes]:
        """Return all files by name."""
        return {
            name: self.contents[node] if node in self.contents else self.places[node].read_bytes()
            for name, node in self.files()
        }

    def make(self, directory: Path) -> None:
        """Make a directory of it, out of the same files."""
        directory.mkdir()
        made = {self.tree.root: directory}
        for node, names in self.tree.reachable():
            for name, child in names.items():
                path = made[node] / name
                if child in self.tree.names:
                    path.mkdir()
                    made[child] = path
                else:
                    os.link(self.places[child], path)
        for node, left in self.contents.items():
            with self.places[node].open("r+b") as file:  # in place: it may have several names
                file.write(left)
                file.truncate()


class PoweredDisk:
    """DIRECTORY/data with a journal of what is written there; no process writes there when this is made, or cut."""

    def __init__(self, directory: Path) -> None:
        self.data = directory / "data"
        self._home = directory / "power"
        self.data.mkdir(parents=True, exist_ok=True)
        self._begin()

    def _begin(self) -> None:
        """Make the present content durable."""
        shutil.rmtree(self._home, ignore_errors=True)
        (self._home / "graveyard").mkdir(parents=True)
        self._baseline = Tree.scan(self.data)
        self._settled: dict[int, Change | None] = {}
        make_journal(self._home / "journal")

    def settle(self) -> None:
        """Find out what became of the changes in whose middle a process was killed: due before another one starts."""
        now = Tree.scan(self.data)
        for change in read_journal(self._home / "journal"):
            if change.under_way and change.position not in self._settled:
                self._settled[change.position] = _settle(change, now)

    def outcome(self, chance: Random) -> Outcome:
        """Return what the disk might have if the power went now; nothing changes.

        Raises:
            AssertionError: `data` is not what the journal says: something was written past the layer.
        """
        self.settle()
        now = Tree.scan(self.data)
        found = (self._settled.get(change.position, change) for change in read_journal(self._home / "journal"))
        changes = [change for change in found if change is not None]
        self._check(changes, now)
        durable = Durable(changes)
        fate, kept = choose_names(changes, durable, chance)
        lost = [_describe(change) for change in changes if change.kind in NAME_KINDS and change not in kept]
        outcome = Outcome(self._tree_after(kept), self._places(now), Loss(fate.value, lost))
        loose: dict[Node, list[Change]] = defaultdict(list)
        for change in changes:
            if change.kind in CONTENT_KINDS and not durable.has(change):
                loose[change.node].append(change)
        for name, node in sorted(outcome.files()):
            if node in loose:
                outcome.lose_content(name, node, loose.pop(node), chance)
        return outcome

    def cut(self, chance: Random) -> Loss:
        """Turn `data` into a possible content after a power cut; all of it is durable then. Raises as `outcome`."""
        outcome = self.outcome(chance)
        fresh = self.data.with_name("data.new")
        outcome.make(fresh)
        shutil.rmtree(self.data)
        fresh.rename(self.data)
        self._begin()
        return outcome.loss

    def _tree_after(self, changes: Sequence[Change]) -> Tree:
        tree = Tree(self._baseline.root, {node: dict(names) for node, names in self._baseline.names.items()})
        for change in changes:
            tree.apply(change)
        return tree

    def _places(self, now: Tree) -> dict[Node, Path]:
        """Return where each file is, with a name or without one."""
        buried = {int(path.name[1:]): path for path in (self._home / "graveyard").glob("f*")}
        return buried | {node: now.paths[node] for node in now.sizes}

    def _check(self, changes: Sequence[Change], now: Tree) -> None:
        """See that the journal tells everything."""
        tree = self._tree_after([change for change in changes if change.kind in NAME_KINDS])
        sizes = dict(self._baseline.sizes)
        for change in changes:
            if change.kind is Kind.CREATE:
                sizes.setdefault(change.node, 0)
            elif change.kind in CONTENT_KINDS:
                sizes[change.node] = change.new_size
        said = dict(tree.reachable())
        assert said == now.names, (
            f"the recording layer missed changes of names: its journal has {said}, the directory {now.names}"
        )
        wrong = {
            now.paths[node]: (size, sizes.get(node)) for node, size in now.sizes.items() if sizes.get(node) != size
        }
        assert not wrong, f"the recording layer missed writes, by path (size found, size recorded): {wrong}"


def _settle(change: Change, now: Tree) -> Change | None:
    """Return a change as it was made, or None if it was not."""
    there = now.names.get(change.directory, {}).get(change.name)
    match change.kind:
        case Kind.CREATE | Kind.MAKE_DIRECTORY:
            return replace(change, result=0, node=there) if there is not None else None
        case Kind.REMOVE:
            return replace(change, result=0) if there != change.node else None
        case Kind.RENAME:
            target = now.names.get(change.target_directory, {}).get(change.target_name)
            return replace(change, result=0) if target == change.node else None
        case Kind.RESIZE:
            return replace(change, result=0, length=now.sizes.get(change.node, change.old_size))
        case _:
            written = now.sizes.get(change.node, 0) - change.offset
            return replace(change, result=max(0, min(change.length, written)))


def _describe(change: Change) -> str:
    to = f" to {change.target_name}" if change.target_name else ""
    return f"no {change.kind.name} of {change.name}{to}"
