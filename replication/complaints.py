"""Warnings about partitions of a leader that cannot be followed: many with one reason make one line. Pure."""

from __future__ import annotations

import logging
from typing import Final

from raftlog.errors import RaftlogError

logger = logging.getLogger(__name__)

GATHER_MS: Final = 1_000.0
"""So long after the first one its line waits for others."""
MAX_NAMED: Final = 3


class Complaints:
    """What there is to say about one leader's partitions.

    Bounded: a reason is the kind of an error; of the partitions only the first few are kept.
    """

    def __init__(self, leader_id: int) -> None:
        self._leader_id = leader_id
        self._gathered: dict[str, tuple[RaftlogError, dict[str, None]]] = {}
        self._counts: dict[str, int] = {}
        self.due_ms: float | None = None
        """When `say` has something."""

    def note(self, name: str, error: RaftlogError, now_ms: float) -> None:
        """Remember that a partition cannot be followed."""
        reason = type(error).__name__
        _, names = self._gathered.setdefault(reason, (error, {}))
        if name not in names:
            self._counts[reason] = self._counts.get(reason, 0) + 1
            if len(names) < MAX_NAMED:
                names[name] = None
        if self.due_ms is None:
            self.due_ms = now_ms + GATHER_MS

    def say(self, now_ms: float) -> None:
        """Write a line for each reason, if it is time."""
        if self.due_ms is None or now_ms < self.due_ms:
            return
        for reason, (error, names) in self._gathered.items():
            count = self._counts[reason]
            which = ", ".join(names) + (f" and {count - len(names)} more partitions" if count > len(names) else "")
            logger.warning(
                "cannot follow %s: %s; trying again",
                which,
                error,
                extra={"leader": self._leader_id, "partitions": count, "reason": reason},
            )
        self._gathered.clear()
        self._counts.clear()
        self.due_ms = None
