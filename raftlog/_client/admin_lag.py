"""The admin client's part that says how far consumer groups are behind: in records, and in seconds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from raftlog._client.admin_groups import GroupAdmin
from raftlog._client.offsets import EARLIEST, LARGEST_TIMESTAMP, LATEST, Answer, AtOffset
from raftlog._group_descriptions import PartitionLag
from raftlog.errors import InvalidRequestError, RaftlogError, RetriableError, UnknownTopicOrPartition
from raftlog.types import OffsetAndTimestamp, TopicPartition
from raftlog.v1 import common_pb2, group_pb2

_LOOK_UP_PATIENCE_S: Final = 5.0
"""How long leaders are asked where partitions end: what is committed is worth showing without that."""
_BY_NAME: Final = {"earliest": EARLIEST, "latest": LATEST, "max_timestamp": LARGEST_TIMESTAMP}


class _Place(NamedTuple):
    """Where a partition begins and ends, and the first record that a group has not read; None: there is none."""

    start: Answer
    end: Answer
    first_unread: Answer

    @property
    def error(self) -> RaftlogError | None:
        """Why one of them is not known."""
        return next((each for each in self if isinstance(each, RaftlogError)), None)


class LagAdmin(GroupAdmin):
    """Offsets of partitions, and what groups have yet to read of them."""

    async def list_offsets(
        self, wanted: Mapping[TopicPartition, int | str], timeout: float | None
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return offsets by time or by name."""
        asked = {TopicPartition(*part): _which(which) for part, which in wanted.items()}

        async def attempt(deadline: float) -> dict[TopicPartition, OffsetAndTimestamp | None]:
            await self._topic_ids(asked, timeout)
            answers = await self._offsets.find_some(asked, common_pb2.READ_UNCOMMITTED, self._limit_s(timeout))
            found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
            for part in asked:
                answer = answers[part]
                if isinstance(answer, RaftlogError):
                    raise answer
                found[part] = answer
            return found

        return await self._retried(attempt, timeout)

    async def group_lag(self, group_id: str, timeout: float | None) -> dict[TopicPartition, PartitionLag]:
        """Return how far a group is in all partitions that it reads or has committed an offset for."""
        described = (await self.describe_groups([group_id], timeout))[group_id]
        committed = await self._committed(group_id, timeout)
        reader = {part: member.member_id for member in described.members for part in member.assigned}
        parts = sorted({*committed, *reader})
        places = await self._places({part: committed[part].offset if part in committed else None for part in parts})
        return {
            part: _lag(committed.get(part), places[part], reader.get(part, ""), time.time() * 1000) for part in parts
        }

    async def _places(self, offsets: Mapping[TopicPartition, int | None]) -> dict[TopicPartition, _Place]:
        """Return where partitions begin and end, and how old what comes at the given offsets is."""
        self._metadata.wanted.update(topic for topic, _ in offsets)
        with contextlib.suppress(RetriableError):  # then what was known counts
            await self._metadata.refresh()
        there = [part for part in offsets if self._metadata.view.partition(part) is not None]
        starts, ends = await asyncio.gather(
            self._look_up(dict.fromkeys(there, EARLIEST)), self._look_up(dict.fromkeys(there, LATEST))
        )
        unread: dict[TopicPartition, int] = {}
        for part in there:
            start, end, offset = starts[part], ends[part], offsets[part]
            if offset is not None and isinstance(start, OffsetAndTimestamp) and isinstance(end, OffsetAndTimestamp):
                first = max(offset, start.offset)
                if first < end.offset:
                    unread[part] = AtOffset(first)
        ages = await self._look_up(unread)
        places = {}
        for part in offsets:
            if part not in starts:
                gone = UnknownTopicOrPartition(f"{part} does not exist")
                places[part] = _Place(gone, gone, None)
            else:
                places[part] = _Place(starts[part], ends[part], ages.get(part))
        return places

    async def _look_up(self, wanted: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, Answer]:
        if not wanted:
            return {}
        try:
            return await self._offsets.find_some(
                wanted, common_pb2.READ_UNCOMMITTED, patience_s=_LOOK_UP_PATIENCE_S, raises=False
            )
        except RaftlogError as error:
            return dict.fromkeys(wanted, error)


def _lag(committed: group_pb2.CommittedOffset | None, place: _Place, member_id: str, now_ms: float) -> PartitionLag:
    start = place.start.offset if isinstance(place.start, OffsetAndTimestamp) else None
    end = place.end.offset if isinstance(place.end, OffsetAndTimestamp) else None
    lag: int | None = None
    seconds: float | None = None
    error = str(place.error) if place.error is not None else None
    if committed is not None and end is not None and committed.offset > end:
        error = (
            f"{committed.topic}-{committed.partition}: the committed offset {committed.offset} is beyond the log end "
            f"{end}: records were lost there, or the topic is another one; the group goes on at its auto.offset.reset"
        )
    elif committed is not None and start is not None and end is not None:
        lag = max(0, end - max(committed.offset, start))
        if lag == 0 or place.first_unread is None:  # no record is left of what there was
            seconds = 0.0
        elif isinstance(place.first_unread, OffsetAndTimestamp):
            seconds = max(0.0, (now_ms - place.first_unread.timestamp_ms) / 1000)
    return PartitionLag(
        committed.offset if committed is not None else None,
        start,
        end,
        lag,
        seconds,
        committed.metadata if committed is not None else "",
        committed.committed_at_ms if committed is not None else None,
        member_id,
        error,
    )


def _which(which: int | str) -> int:
    if isinstance(which, str) and which in _BY_NAME:
        return _BY_NAME[which]
    if isinstance(which, str) or which < 0:
        raise InvalidRequestError(f"{which!r}: name a time in ms, or one of {', '.join(_BY_NAME)}")
    return which
