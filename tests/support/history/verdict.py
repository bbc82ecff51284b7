"""What is said of a run in the end: whether anything is wrong, and what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from tests.support import append_checker, group_checker
from tests.support.history.model import Problem

_NAMED: Final = 5
"""So many problems of a name are described, the rest is counted."""


def of_logs(history: append_checker.History) -> list[Problem]:
    """Return what is wrong with appends and polls: lost, doubled, reordered, two values at an offset, and more."""
    return [Problem(each.kind.name, each.kind.value, each.what) for each in append_checker.check(history)]


def of_groups(history: group_checker.History) -> list[Problem]:
    """Return what is wrong with a group: committed offsets that went back, two owners of a partition, and more."""
    return [Problem(each.kind.name, each.kind.value, each.what) for each in group_checker.check(history)]


def summary(problems: Iterable[Problem]) -> str:
    """Return the names, with how many there are of each."""
    return ", ".join(f"{count} × {name}" for name, count in Counter(each.name for each in problems).items())


def describe(problems: Sequence[Problem]) -> str:
    """Return a text that describes some of each name."""
    by_name: dict[str, list[Problem]] = {}
    for each in problems:
        by_name.setdefault(each.name, []).append(each)
    lines = []
    for name, found in by_name.items():
        lines += [f"{len(found)} x {name}: {found[0].meaning}", *(f"    {each.what}" for each in found[:_NAMED])]
    return "\n".join(lines)
