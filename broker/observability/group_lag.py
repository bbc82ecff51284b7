"""The lag of groups, in records and in seconds, on the broker that coordinates them.

Every few seconds the sampler gathers the committed offsets of its groups and asks the leaders of their partitions where
these begin and end. The lag in seconds is the time since the high watermark passed the committed offset, by the
samples in `WatermarkHistory`; if that was before the first sample, since the timestamp of the first unread record.

A scrape, on another thread, shows the last round: a `GroupSample` never changes.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Final, NamedTuple, Protocol, TypeVar

from broker.clock import Clock
from broker.coordinator.groups.describe import state_of
from broker.coordinator.groups.group import Group
from broker.coordinator.groups.topics import TopicPartition
from raftlog.v1 import group_pb2

MAX_MARKS: Final = 64
"""Marks of one partition; beyond it, every second mark of the older half is dropped."""


class Mark(NamedTuple):
    """The first and the last sample, in monotonic ms, at which the high watermark was `offset`."""

    offset: int
    first_ms: float
    last_ms: float


class WatermarkHistory:
    """Samples of one partition's high watermark: when it passed an offset. Pure.

    Between two samples the high watermark is assumed to rise evenly, so a lag in seconds is wrong by at most the time
    between two samples. Offsets below the first sample are unknown, unless `began` adds the time of their record.

    Invariant: marks ascend by offset and by time, and are at most MAX_MARKS.
    """

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks: list[Mark] = []

    def __len__(self) -> int:
        return len(self._marks)

    @property
    def known_from(self) -> int | None:
        """The least committed offset with a known lag in seconds; None without any sample."""
        return self._marks[0].offset if self._marks else None

    def seen(self, high_watermark: int, now_ms: float) -> None:
        """Add a sample. A high watermark that went back (records were lost) drops the marks above it."""
        marks = self._marks
        while marks and marks[-1].offset > high_watermark:
            marks.pop()
        if marks and marks[-1].offset == high_watermark:
            marks[-1] = marks[-1]._replace(last_ms=now_ms)
            return
        marks.append(Mark(high_watermark, now_ms, now_ms))
        self._thin()

    def began(self, offset: int, at_ms: float) -> None:
        """Note when the record at `offset`, below all samples, was written."""
        if self._marks and offset < self._marks[0].offset:
            at_ms = min(at_ms, self._marks[0].first_ms)
            self._marks.insert(0, Mark(offset, at_ms, at_ms))
            self._thin()

    def forget_below(self, offset: int) -> None:
        """Drop the marks that only committed offsets below `offset` need."""
        keep_from = bisect_right(self._marks, offset, key=_offset) - 1
        if keep_from > 0:
            del self._marks[:keep_from]

    def lag_s(self, committed: int, now_ms: float) -> float | None:
        """Return the seconds since the high watermark passed a committed offset; 0 if it has not, None if unknown."""
        marks = self._marks
        if not marks or committed < marks[0].offset:
            return None
        after = bisect_right(marks, committed, key=_offset)
        if after == len(marks):
            return 0.0
        low, high = marks[after - 1], marks[after]
        share = (committed - low.offset) / (high.offset - low.offset)
        overtaken_ms = low.last_ms + (high.first_ms - low.last_ms) * share
        return max(0.0, now_ms - overtaken_ms) / 1_000

    def _thin(self) -> None:
        if len(self._marks) > MAX_MARKS:
            half = len(self._marks) // 2
            self._marks = [*self._marks[:half:2], *self._marks[half:]]


def _offset(mark: Mark) -> int:
    return mark.offset


logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SERIES: Final = 10_000
"""Partitions of groups, and groups, that one broker shows: the largest lags, and the groups with the most members.

Beyond it each user that has made groups has a share, so that one with thousands of large lags hides no other user's.
"""
MAX_LOOK_UPS: Final = 200
"""Timestamps looked up in one round; each may cost the leader a read from its disk."""
SLICE: Final = 1_000
"""Offsets between two turns of the event loop."""


class Ends(NamedTuple):
    """A partition's log start offset and its high watermark."""

    start: int
    end: int


class Leaders(Protocol):
    """Answers for the leaders of partitions; leaves out the partitions whose leaders do not answer."""

    async def ends(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, Ends]:
        """Return where partitions begin and end."""
        ...

    async def written_ms(self, wanted: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        """Return the timestamp of the first record at or after an offset, in ms since 1970, for each partition."""
        ...


class GroupLag(NamedTuple):
    """The lag of a group in a partition with a committed offset. `seconds` is None while unknown."""

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
class GroupSample:
    """The result of the last round; `left_out` counts partitions and groups beyond MAX_SERIES."""

    lags: Sequence[GroupLag] = ()
    sizes: Sequence[GroupSize] = ()
    left_out: int = 0


class _Offset(NamedTuple):
    group: str
    topic: str
    at: TopicPartition
    committed: int


class GroupLagSampler:
    """Samples in a task on the event loop: `start`, read `latest`, `close`. `groups` returns this broker's groups."""

    def __init__(self, groups: Callable[[], Iterable[Group]], leaders: Leaders, clock: Clock, interval_ms: int) -> None:
        self._groups = groups
        self._leaders = leaders
        self._clock = clock
        self._interval_ms = interval_ms
        self._histories: dict[TopicPartition, WatermarkHistory] = {}
        self._task: asyncio.Task[None] | None = None
        self.latest = GroupSample()

    def start(self) -> None:
        """Start sampling."""
        self._task = asyncio.create_task(self._run(), name="group-lag")

    async def close(self) -> None:
        """Stop sampling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # it costs metrics only, and the next round may succeed
                logger.exception("the lag of groups could not be measured")
            await asyncio.sleep(self._interval_ms / 1_000)

    async def look(self) -> None:
        """Run one round."""
        offsets, sizes, users = await self._gather()
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
        shown = _most(lags, lambda lag: lag.records, lambda lag: users[lag.group])
        groups = _most(sizes, lambda size: size.members, lambda size: users[size.group])
        self.latest = GroupSample(shown, groups, len(lags) - len(shown) + len(sizes) - len(groups))

    async def _gather(self) -> tuple[list[_Offset], list[GroupSize], dict[str, str]]:
        """Return the groups' committed offsets, their sizes, and the users that made them, by group."""
        offsets: list[_Offset] = []
        sizes: list[GroupSize] = []
        users: dict[str, str] = {}
        seen = 0
        for group in list(self._groups()):
            if not group.exists:
                continue
            users[group.group_id] = group.user
            sizes.append(GroupSize(group.group_id, _state_name(group), len(group.members)))
            offsets += [
                _Offset(group.group_id, committed.topic, at, committed.offset)
                for at, committed in group.offsets.items()
            ]
            if len(offsets) + len(sizes) - seen >= SLICE:
                seen = len(offsets) + len(sizes)
                await asyncio.sleep(0)
        return offsets, sizes, users

    async def _look_back(self, offsets: Sequence[_Offset], ends: Mapping[TopicPartition, Ends]) -> None:
        """Look up when the first unread record was written, where it was before the first sample."""
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


def _most(found: list[T], key: Callable[[T], int], user: Callable[[T], str]) -> list[T]:
    """Return the MAX_SERIES entries with the largest `key`, of each user those of its share.

    A user with few entries has all of them, and the others share equally what is left.
    """
    if len(found) <= MAX_SERIES:
        return found
    by_user: dict[str, list[T]] = {}
    for each in found:
        by_user.setdefault(user(each), []).append(each)
    shown: list[T] = []
    for users_before, own in enumerate(sorted(by_user.values(), key=len)):
        share = (MAX_SERIES - len(shown)) // (len(by_user) - users_before)
        shown += nlargest(share, own, key=key)
    return shown


def _state_name(group: Group) -> str:
    return group_pb2.GroupState.Name(state_of(group, None)).lower()
