"""Assignors by name: those that are built in, and the entry points that the server's configuration asks for.

Nothing is loaded that `group.consumer.assignors` does not name: which code runs is the operator's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Final

from broker.groups.assignors import BUILT_IN, Assignor
from raftlog.errors import InvalidConfig

ENTRY_POINTS: Final = "raftlog.assignors"


def load_assignors(names: Sequence[str]) -> dict[str, Assignor]:
    """Return the assignors of these names, in this order. Once, at the start.

    Raises:
        InvalidConfig: there is none of that name, or it cannot be loaded.
    """
    return {name: BUILT_IN.get(name) or _load(name) for name in names}


def _load(name: str) -> Assignor:
    found = entry_points(group=ENTRY_POINTS, name=name)
    if not found:
        known = sorted({*BUILT_IN, *entry_points(group=ENTRY_POINTS).names})
        raise InvalidConfig(
            f"group.consumer.assignors: there is no assignor {name!r} and no entry point {ENTRY_POINTS} of that name; "
            f"known are {', '.join(known)}"
        )
    try:
        loaded = next(iter(found)).load()
        assignor: Assignor = loaded() if isinstance(loaded, type) else loaded
        if assignor.name != name or not callable(assignor.assign):
            raise TypeError(f"it calls itself {assignor.name!r}, or has no method `assign`")
    except Exception as error:  # code of others: whatever it raises, this server cannot use it
        raise InvalidConfig(f"group.consumer.assignors: the entry point {name!r} cannot be loaded: {error}") from error
    return assignor
