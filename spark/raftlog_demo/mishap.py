"""Kills the server that leads most partitions while the stream runs, and starts it again."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import raftlog
from raftlog.testing import Cluster

_POLL_S = 0.02
_TIMEOUT_S = 60.0
_Condition = Callable[[Sequence[int], int], bool]
"""Returns whether a partition's ISR and leader are as wanted."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result. `new_leaders_s`: from the kill until every partition had a running leader."""

    node_id: int
    partitions: int
    at_rows: int
    new_leaders_s: float
    in_sync_s: float
    """The seconds from the restart until all of the server's replicas were in sync."""


class LeaderKill:
    """Kills the busiest leader of a topic after `at_rows` rows, and starts it again; in a thread."""

    def __init__(self, cluster: Cluster, topic: str, at_rows: int) -> None:
        self._cluster = cluster
        self._topic = topic
        self._at_rows = at_rows
        self._thread: threading.Thread | None = None
        self._report: Report | None = None
        self._error: Exception | None = None

    def on_rows(self, rows: int) -> None:
        """Take note of the number of rows written so far."""
        if rows >= self._at_rows and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(rows,), name="mishap")
            self._thread.start()

    def result(self) -> Report:
        """Wait for the end, and return the result.

        Raises:
            RuntimeError: the stream ended before the kill.
            RaftlogError: the server or its replicas did not come back.
        """
        if self._thread is None:
            raise RuntimeError(f"the stream ended before {self._at_rows} rows were written; no server was killed")
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._report is not None, "a thread that ended without an error has reported"
        return self._report

    def _run(self, rows: int) -> None:
        try:
            self._report = self._kill_and_start(rows)
        except Exception as error:  # raised again by `result`
            self._error = error

    def _kill_and_start(self, rows: int) -> Report:
        with raftlog.Admin(self._cluster.bootstrap) as admin:
            leaders = Counter(each.leader for each in admin.describe_topic(self._topic).partitions)
            (victim, led), *_ = leaders.most_common(1)
            killed_s = time.monotonic()
            self._cluster.kill(victim)
            self._wait(admin, lambda isr, leader: leader not in (-1, victim) and victim not in isr)
            new_leaders_s = time.monotonic() - killed_s
            self._cluster.start(victim)
            started_s = time.monotonic()
            self._wait(admin, lambda isr, leader: victim in isr and leader != -1)
        return Report(victim, led, rows, new_leaders_s, time.monotonic() - started_s)

    def _wait(self, admin: raftlog.Admin, condition: _Condition) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            partitions = admin.describe_topic(self._topic).partitions
            if all(condition(each.isr, each.leader) for each in partitions):
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self._topic} did not recover within {_TIMEOUT_S:g} s: {partitions}")
            time.sleep(_POLL_S)
