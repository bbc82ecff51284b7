"""What the partitions of a delay queue wait for: what a reader keeps, what it pauses, and until when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from raftlog._core.delays import Delayed
from raftlog.types import TopicPartition

HORIZON_MS: Final = 1000
"""Records due within this time are kept in memory; later ones are dropped and fetched again."""
LEAD_MS: Final = 300
"""So long before its head is due a partition is fetched again."""
HELD_MAX: Final = 2000
"""Records of a partition that are kept in memory at most, but for those of one poll."""
assert LEAD_MS < HORIZON_MS, "what is fetched again is kept, else it would be fetched over and over"


@dataclass(slots=True)
class _Waiting:
    """One partition.

    Invariants: what is held is in order of offsets, and directly before what is fetched next; `fetch_at_ms` is set
    while the record to be fetched next is known and lies beyond the horizon.
    """

    held: deque[Delayed] = field(default_factory=deque)
    fetch_at_ms: int | None = None
    paused: bool = False


def _head_ms(held: deque[Delayed]) -> int:
    return held[0].ready_ms


class Reading(NamedTuple):
    """What to do with a consumer before it polls next."""

    pause: list[TopicPartition]
    resume: list[TopicPartition]


class Waits:
    """What each partition waits for. Changed by what was polled, by time, and by partitions that come and go."""

    def __init__(self) -> None:
        self._partitions: dict[TopicPartition, _Waiting] = {}

    def offer(self, partition: TopicPartition, polled: Sequence[Delayed], now_ms: int) -> int | None:
        """Keep what a poll gave of a partition; return the offset to seek to if not all of it is worth keeping."""
        waiting = self._partitions.setdefault(partition, _Waiting())
        for delayed in polled:
            if delayed.ready_ms > now_ms + HORIZON_MS:
                waiting.fetch_at_ms = delayed.ready_ms - LEAD_MS
                return delayed.record.offset
            waiting.held.append(delayed)
        return None

    def take(self, now_ms: int, limit: int) -> list[Delayed]:
        """Return what is ready, by partition in order, and `limit` records at most: if more, those ready longest."""
        taken: list[Delayed] = []
        for held in sorted((each.held for each in self._partitions.values() if each.held), key=_head_ms):
            while held and held[0].ready_ms <= now_ms and len(taken) < limit:
                taken.append(held.popleft())
        return taken

    def give_back(self, rest: Sequence[Delayed]) -> None:
        """Keep again what `take` returned last of some partitions."""
        for delayed in reversed(rest):
            self._partitions[delayed.partition].held.appendleft(delayed)

    def reading(self, now_ms: int) -> Reading:
        """Return which partitions to pause and to resume; it is taken for granted that this is done."""
        pause: list[TopicPartition] = []
        resume: list[TopicPartition] = []
        for partition, waiting in self._partitions.items():
            if waiting.fetch_at_ms is not None and waiting.fetch_at_ms <= now_ms:
                waiting.fetch_at_ms = None
            full = len(waiting.held) >= (HELD_MAX // 2 if waiting.paused else HELD_MAX)
            stand_still = full or waiting.fetch_at_ms is not None
            if stand_still != waiting.paused:
                waiting.paused = stand_still
                (pause if stand_still else resume).append(partition)
        return Reading(pause, resume)

    def next_at_ms(self) -> int | None:
        """Return when there is something to do without a record being polled: a head is ready, or to be fetched."""
        times = [waiting.held[0].ready_ms for waiting in self._partitions.values() if waiting.held]
        times += [waiting.fetch_at_ms for waiting in self._partitions.values() if waiting.fetch_at_ms is not None]
        return min(times, default=None)

    def put_off(self, partitions: Iterable[TopicPartition], until_ms: int) -> None:
        """Leave partitions alone for a while, of which nothing is kept."""
        for partition in partitions:
            self._partitions[partition] = _Waiting(fetch_at_ms=until_ms)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop what was kept of partitions that others read from now on."""
        for partition in partitions:
            self._partitions.pop(TopicPartition(*partition), None)
