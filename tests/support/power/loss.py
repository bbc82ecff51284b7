"""The possible contents of a disk after a power cut: names and bytes. Chance decides; durable content stays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import Enum
from random import Random
from typing import Final

from tests.support.power.journal import Change, Kind, Node

SECTOR_BYTES: Final = 512
NAME_KINDS: Final = (Kind.CREATE, Kind.MAKE_DIRECTORY, Kind.REMOVE, Kind.RENAME)
CONTENT_KINDS: Final = (Kind.WRITE, Kind.RESIZE)


class Fate(Enum):
    """What becomes of the changes of a file that were not synced."""

    LOST = "lost"
    KEPT = "kept"
    TORN = "kept up to a sector"
    SCATTERED = "kept in some sectors"
    ZEROED = "zeros"


class NameFate(Enum):
    """What becomes of the names that were not synced."""

    LOST = "lost"
    KEPT = "kept"
    ORDERED = "kept up to some moment"
    SCATTERED = "kept one by one"


_FATES: Final = (Fate.LOST, Fate.KEPT, Fate.TORN, Fate.TORN, Fate.SCATTERED, Fate.SCATTERED, Fate.ZEROED)
_NAME_FATES: Final = (NameFate.LOST, NameFate.KEPT, NameFate.ORDERED, NameFate.ORDERED, *[NameFate.SCATTERED] * 2)


class Durable:
    """Up to where of the journal the changes of each file and directory are durable."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._upto: dict[Node, int] = defaultdict(int)
        self._all = 0
        for change in changes:
            if change.kind is Kind.SYNC:
                self._upto[change.node] = max(self._upto[change.node], change.offset)
            elif change.kind is Kind.SYNC_ALL:
                self._all = max(self._all, change.offset)

    def has(self, change: Change) -> bool:
        """Whether a change survives for certain."""
        nodes = [directory for directory, _ in change.entries] if change.kind in NAME_KINDS else [change.node]
        return all(change.position < max(self._all, self._upto[node]) for node in nodes)


def choose_names(changes: Sequence[Change], durable: Durable, chance: Random) -> tuple[NameFate, list[Change]]:
    """Return which changes of names survive, in their order."""
    changes = [change for change in changes if change.kind in NAME_KINDS]
    loose = [change for change in changes if not durable.has(change)]
    fate = chance.choice(_NAME_FATES)
    until = chance.choice(loose).position if loose else 0
    lost: set[int] = set()
    touched: set[tuple[Node, str]] = set()
    for change in loose:
        keep = {
            NameFate.LOST: False,
            NameFate.KEPT: True,
            NameFate.ORDERED: change.position <= until,
            NameFate.SCATTERED: chance.random() < 0.5,
        }[fate]
        if not keep or touched.intersection(change.entries):  # nothing builds upon a name that never was
            lost.add(change.position)
            touched.update(change.entries)
    return fate, [change for change in changes if change.position not in lost]


def choose_content(content: bytes, changes: Sequence[Change], chance: Random) -> tuple[Fate, bytes]:
    """Return what is left of a file: `content` as it was seen last, `changes` those that are not durable."""
    assert changes, "the file has no writes that a power cut could lose"
    newer = len(changes) if chance.random() < 0.5 else chance.randint(0, len(changes))
    barrier = next((at for at in range(newer, 0, -1) if _cuts(changes[at - 1])), 0)
    older = barrier if chance.random() < 0.5 else chance.randint(barrier, newer)
    now = bytearray(content)
    _undo(now, changes[newer:])
    later = bytes(now)
    _undo(now, changes[older:newer])
    fate = chance.choice(_FATES)
    between = changes[older:newer]
    if not between:
        return fate, later
    first = min(min(change.offset, change.old_size) for change in between)
    return fate, _mix(fate, bytes(now), later, first, chance)


def _cuts(change: Change) -> bool:
    return change.kind is Kind.RESIZE and change.length < change.old_size


def _undo(content: bytearray, changes: Sequence[Change]) -> None:
    """Undo changes, the last one first; each change has the content before it."""
    for change in reversed(changes):
        if change.old:
            if len(content) < change.offset + len(change.old):
                content.extend(bytes(change.offset + len(change.old) - len(content)))
            content[change.offset : change.offset + len(change.old)] = change.old
        del content[change.old_size :]
        content.extend(bytes(change.old_size - len(content)))


def _mix(fate: Fate, before: bytes, after: bytes, first: int, chance: Random) -> bytes:
    """Return a file of which some sectors are as after, the others as before; nothing below `first` differs."""
    assert len(after) >= len(before), (
        f"a power cut must not make up a truncation: {len(before)} bytes before, {len(after)} after"
    )
    assert before[:first] == after[:first], (
        f"bytes differ before offset {first}, below the first write that may be lost"
    )
    padded = before + bytes(len(after) - len(before))
    sectors = range(first // SECTOR_BYTES, -(-len(after) // SECTOR_BYTES))
    match fate:
        case Fate.LOST:
            return before
        case Fate.KEPT:
            return after
        case Fate.ZEROED:
            return padded
        case Fate.TORN:
            at = SECTOR_BYTES * chance.choice(sectors or range(1))
            return (after[:at] + padded[at:])[: chance.choice((_end(before, after, at), len(after)))]
        case Fate.SCATTERED:
            mixed = bytearray(padded)
            for sector in sectors:
                here = slice(sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES)
                if chance.random() < 0.5:
                    mixed[here] = after[here]
            at = SECTOR_BYTES * chance.choice(sectors or range(1))
            return bytes(mixed[: chance.choice((_end(before, after, at), len(after)))])


def _end(before: bytes, after: bytes, at: int) -> int:
    """Return the size of a file that has grown up to a sector."""
    return max(len(before), min(at, len(after)))
