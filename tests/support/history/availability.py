"""How long clients waited for answers, compared with a promised limit.

A partition is unavailable from the request of a write until any write to it is acknowledged; the cluster is unavailable
in the same sense, over all partitions. Time without a possible majority does not count: the limit counts from its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple

from tests.support.history.model import History, Operation, Problem, Window

CLUSTER: Final = None
"""In place of a partition: all of them."""
_NEVER: Final = float("inf")
_SEEN_S: Final = 0.2
"""Shorter pauses are noise: no promise is that short."""


class Outage(NamedTuple):
    """A time without an acknowledgement despite requests. `counted`: its longest part in which one was possible."""

    partition: int | None
    window: Window
    counted: Window

    def __str__(self) -> str:
        what = "the cluster" if self.partition is CLUSTER else f"partition {self.partition}"
        excused_s = self.window.length_s - self.counted.length_s
        excused = f" ({self.window.length_s:.2f} s with what no majority could change)" if excused_s > 0.001 else ""
        return f"{what} acknowledged nothing for {self.counted.length_s:.3f} s{excused}"


def check(history: History, promised_s: float, cluster_promised_s: float | None = None) -> list[Problem]:
    """Return a problem for every outage that is longer than promised for a partition, or for the cluster."""
    cluster_s = promised_s if cluster_promised_s is None else cluster_promised_s
    begin_s = history.extent.begin_s
    return [
        Problem("UNAVAILABLE", "writes paused for longer than promised",
                f"{each}, from {each.window.begin_s - begin_s:.2f} s on; promised {allowed_s:g} s")
        for each in outages(history)
        if each.counted.length_s > (allowed_s := cluster_s if each.partition is CLUSTER else promised_s)
    ]  # fmt: skip


def outages(history: History, least_s: float = _SEEN_S) -> list[Outage]:
    """Return what is at least so long, by partition, the cluster last. An operation without a partition is on all."""
    writes = [each for each in history.operations if each.kind in history.writes]
    partitions = sorted({each.partition for each in writes if each.partition is not None})
    end_s, excused = history.extent.end_s, no_majority(history)
    found: list[Outage] = []
    for partition in (*partitions, CLUSTER):
        chosen = [each for each in writes if partition is CLUSTER or each.partition in (partition, None)]
        for window in unanswered(chosen, end_s):
            if window.length_s >= least_s:
                left = without(window, excused)
                counted = max(left, key=lambda each: each.length_s, default=Window(window.begin_s, window.begin_s))
                found.append(Outage(partition, window, counted))
    return found


def unanswered(operations: Iterable[Operation], until_s: float) -> Iterator[Window]:
    """Yield each time from a request to the next acknowledgement, or to `until_s`."""
    by_end = sorted((_NEVER if each.end_s is None else each.end_s, each.begin_s) for each in operations)
    ends = [end for end, _ in by_end]
    first_begin = [_NEVER] * (len(by_end) + 1)  # of the operations that end then or later
    for index in range(len(by_end) - 1, -1, -1):
        first_begin[index] = min(first_begin[index + 1], by_end[index][1])
    answered = sorted(each.end_s for each in operations if each.end_s is not None and each.outcome == "ok")
    for before_s, after_s in pairwise([-_NEVER, *answered, until_s]):
        asked_s = max(before_s, first_begin[bisect_right(ends, before_s)])
        if asked_s < after_s:
            yield Window(asked_s, after_s)


def no_majority(history: History) -> list[Window]:
    """Return when no voter that runs reached, and was reached by, enough others that run for a majority."""
    voters = tuple(history.voters or history.nodes)
    until_s = history.extent.end_s
    away = [each for each in history.conditions if each.ill != "hampered" and each.node in voters]
    spans = [(each.begin_s, each.end_s) for each in away] + [(each.begin_s, each.end_s) for each in history.cuts]
    moments = sorted({at for begin, end in spans for at in (begin, until_s if end is None else end)})
    found: list[Window] = []
    for begin_s, end_s in pairwise(moments):
        middle_s = (begin_s + end_s) / 2
        gone = {each.node for each in away if _holds(each.begin_s, each.end_s, middle_s)}
        deaf = {
            frozenset((each.sender, each.receiver))
            for each in history.cuts
            if _holds(each.begin_s, each.end_s, middle_s)
        }
        alive = [each for each in voters if each not in gone]
        reached = (sum(frozenset((one, other)) not in deaf for other in alive) for one in alive)
        if max(reached, default=0) * 2 <= len(voters):
            if found and found[-1].end_s == begin_s:
                found[-1] = Window(found[-1].begin_s, end_s)
            else:
                found.append(Window(begin_s, end_s))
    return found


def without(window: Window, others: Iterable[Window]) -> list[Window]:
    """Return what is left of a window outside of others, which are in order and apart."""
    left, at_s = [], window.begin_s
    for other in others:
        if other.begin_s > at_s:
            left.append(Window(at_s, min(other.begin_s, window.end_s)))
        at_s = max(at_s, other.end_s)
        if at_s >= window.end_s:
            break
    if at_s < window.end_s:
        left.append(Window(at_s, window.end_s))
    return [each for each in left if each.length_s > 0]


def _holds(begin_s: float, end_s: float | None, at_s: float) -> bool:
    return begin_s <= at_s and (end_s is None or at_s < end_s)
