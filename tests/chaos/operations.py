"""The operations of clients and the faults of servers, in one list: the history of a run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["ok", "failed", "unknown"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a client. Times are of the monotonic clock of the test's process; `ended_s` None: never.

    `kind`: append, transaction, fault, or what else a workload does. `who`: the client, or for a fault its name.
    `node`: the server that it was about, if one in particular. `outcome`: "unknown" where it may have happened or not.
    """

    kind: str
    who: str
    started_s: float
    ended_s: float | None
    outcome: Outcome
    node: int | None = None
    partition: int | None = None
    detail: str = ""


class Operations:
    """The list; any thread adds to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Operation] = []

    def add(self, operation: Operation) -> None:
        """Note an operation that is over."""
        with self._lock:
            self._all.append(operation)

    @property
    def all(self) -> list[Operation]:
        """Everything so far, by when it began."""
        with self._lock:
            return sorted(self._all, key=lambda each: each.started_s)

    @contextmanager
    def during(self, kind: str, who: str, *, node: int | None = None) -> Iterator[None]:
        """Record an operation over a block; it has failed if an exception leaves the block."""
        started_s = time.monotonic()
        outcome: Outcome = "failed"
        try:
            yield
            outcome = "ok"
        finally:
            self.add(Operation(kind, who, started_s, time.monotonic(), outcome, node))

    def write(self, path: Path) -> None:
        """Write a line of JSON for each."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in self.all))
