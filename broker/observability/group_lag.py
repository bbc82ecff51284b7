"""How far groups are behind, on the broker that coordinates them: in records, and in seconds.

Every few seconds the committed offsets of the groups here are gathered, and the leaders of their partitions asked where
those begin and end. Seconds: how long ago the high watermark passed the committed offset, by what was seen of it
(`watermark_history.py`); for what was passed before anybody looked, the timestamp of the first unread record counts.

A scrape shows the last round as it was, on another thread; `GroupFigures` never change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, NamedTuple, Protocol, TypeVar

from broker.clock import Clock
from broker.groups.describe import state_of
from broker.groups.group import Group
from broker.groups.topics import TopicPartition
from broker.observability.watermark_history import WatermarkHistory
from raftlog.v1 import group_pb2

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SERIES: Final = 10_000
"""Partitions of groups, and groups, that one broker shows: the largest lags, and the groups with most members."""
MAX_LOOK_UPS: Final = 200
"""Records whose timestamps are looked up in one round: each may cost a leader a read from its disk."""
SLICE: Final = 1_000
"""Offsets that are gone through until others may use the loop."""


class Ends(NamedTuple):
    """Where a partition begins, and its high watermark."""

    start: int
    end: int


class Leaders(Protocol):
    """Who knows where partitions end; what they do not say is left out."""

    async def ends(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, Ends]:
        """Return where partitions begin and end."""
        ...

    async def written_ms(self, wanted: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        """Return the timestamp of the first record at or after an offset, in ms since 1970, for each partition."""
        ...


class GroupLag(NamedTuple):
    """One partition that a group has committed an offset of. `seconds` is None while it is not known."""

    group: str
    topic: str
    partition: int
    records: int
    seconds: float | None


class GroupSize(NamedTuple):
    """A group, its state in Kafka's words, and its members."""

    group: str
    state: str
    members: int


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """What the last round found; `left_out`: partitions and groups beyond MAX_SERIES."""

    lags: Sequence[GroupLag] = ()
    sizes: Sequence[GroupSize] = ()
    left_out: int = 0


class _Offset(NamedTuple):
    group: str
    topic: str
    at: TopicPartition
    committed: int


class GroupLagSampler:
    """`start`, then `figures`; `close` ends it. On the event loop. `groups` returns those that are coordinated here."""

    def __init__(self, groups: Callable[[], Iterable[Group]], leaders: Leaders, clock: Clock, interval_ms: int) -> None:
        self._groups = groups
        self._leaders = leaders
        self._clock = clock
        self._interval_ms = interval_ms
        self._histories: dict[TopicPartition, WatermarkHistory] = {}
        self._task: asyncio.Task[None] | None = None
        self.figures = GroupFigures()

    def start(self) -> None:
        """Look from now on."""
        self._task = asyncio.create_task(self._run(), name="group-lag")

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # figures only: whatever it is, the next round may do better
                logger.exception("the lag of groups could not be measured")
            await asyncio.sleep(self._interval_ms / 1_000)

    async def look(self) -> None:
        """Do one round."""
        offsets, sizes = await self._gather()
        partitions = list(dict.fromkeys(offset.at for offset in offsets))
        for gone in self._histories.keys() - set(partitions):
            del self._histories[gone]
        ends = await self._leaders.ends(partitions) if partitions else {}
        now_ms = self._clock.monotonic_ms()
        for at, found in ends.items():
            self._histories.setdefault(at, WatermarkHistory()).seen(found.end, now_ms)
        await self._look_back(offsets, ends)
        lags = []
        for index, offset in enumerate(offsets):
            if (place := ends.get(offset.at)) is not None:
                lags.append(self._lag(offset, place, now_ms))
            if index % SLICE == SLICE - 1:
                await asyncio.sleep(0)
        shown = _most(lags, lambda lag: lag.records)
        groups = _most(sizes, lambda size: size.members)
        self.figures = GroupFigures(shown, groups, len(lags) - len(shown) + len(sizes) - len(groups))

    async def _gather(self) -> tuple[list[_Offset], list[GroupSize]]:
        """Return what groups have committed, and how large they are."""
        offsets: list[_Offset] = []
        sizes: list[GroupSize] = []
        seen = 0
        for group in list(self._groups()):
            if not group.exists:
                continue
            sizes.append(GroupSize(group.group_id, _state_name(group), len(group.members)))
            offsets += [
                _Offset(group.group_id, committed.topic, at, committed.offset)
                for at, committed in group.offsets.items()
            ]
            if len(offsets) + len(sizes) - seen >= SLICE:
                seen = len(offsets) + len(sizes)
                await asyncio.sleep(0)
        return offsets, sizes

    async def _look_back(self, offsets: Sequence[_Offset], ends: Mapping[TopicPartition, Ends]) -> None:
        """Find out since when there is more than the least committed offset of partitions where nobody saw it pass."""
        least: dict[TopicPartition, int] = {}
        for offset in offsets:
            if offset.at in ends:
                first = max(offset.committed, ends[offset.at].start)
                least[offset.at] = min(first, least.get(offset.at, first))
        wanted: dict[TopicPartition, int] = {}
        for at, first in least.items():
            history = self._histories[at]
            history.forget_below(first)
            if history.known_from is not None and first < history.known_from and len(wanted) < MAX_LOOK_UPS:
                wanted[at] = first
        if not wanted:
            return
        found = await self._leaders.written_ms(wanted)
        wall_ms, now_ms = self._clock.now_ms(), self._clock.monotonic_ms()
        for at, written_ms in found.items():
            self._histories[at].began(wanted[at], now_ms - max(0, wall_ms - written_ms))

    def _lag(self, offset: _Offset, place: Ends, now_ms: float) -> GroupLag:
        first = max(offset.committed, place.start)
        records = max(0, place.end - first)
        seconds = self._histories[offset.at].lag_s(first, now_ms) if records else 0.0
        return GroupLag(offset.group, offset.topic, offset.at[1], records, seconds)


def _most(found: list[T], key: Callable[[T], int]) -> list[T]:
    """Return MAX_SERIES of them: those with the most."""
    return found if len(found) <= MAX_SERIES else nlargest(MAX_SERIES, found, key=key)


def _state_name(group: Group) -> str:
    return group_pb2.GroupState.Name(state_of(group)).lower()
