"""How long writes paused, against promise 5, without the time in which this machine ran no process."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


def longest_pause(acknowledged_at: Mapping[int, Iterable[float]], since_s: float, until_s: float) -> tuple[float, int]:
    """Return the longest time within these two in which a partition acknowledged nothing, and the partition."""
    longest = (0.0, -1)
    for partition, times in acknowledged_at.items():
        ordered = sorted(times)
        inside = ordered[bisect_left(ordered, since_s) : bisect_right(ordered, until_s)]
        longest = max(
            longest, *((after - before, partition) for before, after in pairwise([since_s, *inside, until_s]))
        )
    return longest


@dataclass(frozen=True)
class Starvation:
    """How long threads that wanted to run had to wait for a processor, as the kernel counts it, by process."""

    waited_s: dict[int, float]

    @classmethod
    def now(cls, server_pids: Iterable[int]) -> Starvation:
        """Read the counters: of the main threads of servers, which run their event loops, and of all of ours."""
        servers = {pid: _waited_s(Path(f"/proc/{pid}")) for pid in server_pids}
        waited = {pid: each for pid, each in servers.items() if each is not None}
        own = [_waited_s(task) for task in Path("/proc/self/task").iterdir()]
        waited[os.getpid()] = sum(each for each in own if each is not None)
        return cls(waited)

    def until(self, later: Starvation) -> float:
        """Return the sum of what was waited since, by all processes that were there both times.

        What resumes a write goes from one of them to the next, so that each may have held it up once, and by no more.
        """
        lasting = self.waited_s.keys() & later.waited_s.keys()
        return sum(max(0.0, later.waited_s[pid] - self.waited_s[pid]) for pid in lasting)


def _waited_s(task: Path) -> float | None:
    """Return the counter of a thread, or None if it has ended, or the kernel has none."""
    try:
        return int((task / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return None
