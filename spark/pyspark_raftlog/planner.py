"""The driver's side of the source: which partitions there are, where they begin and end, and what a query reads."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from pyspark_raftlog.bounds import EARLIEST, LATEST, OFFSETS, TIME, Bound
from pyspark_raftlog.ranges import Offsets
from pyspark_raftlog.read_options import SourceOptions
from raftlog.types import TopicPartition

if TYPE_CHECKING:
    from raftlog._core.cluster import TopicView
    from raftlog._range_reader import RangeReader

logger = logging.getLogger(__name__)

_LATEST: Final = -1
_EARLIEST: Final = -2
"""As the client's look-ups name them."""
_AGAIN_S: Final = 0.2
_TRIES: Final = 5


class DataLoss(RuntimeError):
    """Records that the query was to read are not there any more."""


class Planner:
    """Asks the cluster for what a query needs to know. Made when it is first needed, where it stays: never pickled."""

    def __init__(self, options: SourceOptions) -> None:
        from raftlog._range_reader import RangeReader

        self.options = options
        self._pattern = re.compile(options.pattern) if options.pattern is not None else None
        self._reader: RangeReader = RangeReader(options.bootstrap, config=dict(options.consumer))

    def close(self) -> None:
        """Close the connections."""
        self._reader.close()

    def lose(self, what: str) -> None:
        """Say that records are gone: an error, unless the query is to go on.

        Raises:
            DataLoss: `failOnDataLoss` is true.
        """
        if self.options.fail_on_data_loss:
            raise DataLoss(
                f"{what}. Records that were to be read are lost to this query; to go on without them set "
                'option("failOnDataLoss", "false")'
            )
        logger.warning("%s; going on, since failOnDataLoss=false", what)

    # What there is

    def partitions(self, *, fresh: bool = False, at_start: bool = False) -> dict[TopicPartition, str]:
        """Return the partitions that the query reads at the moment, in order, with the ids (hex) of their topics.

        Raises:
            UnknownTopicOrPartition: `at_start` of a query a topic, or a partition, that its options name is not there.
        """
        from raftlog.errors import UnknownTopicOrPartition

        options = self.options
        names = options.topics if options.topics is not None else sorted({name for name, _ in options.assigned or ()})
        views = self._reader.topics(names, self._pattern, fresh=fresh)
        if self._pattern is None and at_start:
            for name in names:
                if name not in views:
                    raise UnknownTopicOrPartition(
                        f"there is no topic {name!r}; create it before the query starts, for example with "
                        f"`raftlog topic create {name}`, or mend the option"
                    )
        if options.assigned is None:
            return {
                TopicPartition(name, part.partition): view.topic_id.hex()
                for name, view in sorted(views.items())
                for part in view.partitions
            }
        return {part: view.topic_id.hex() for part, view in self._assigned(views, at_start)}

    def _assigned(self, views: Mapping[str, TopicView], at_start: bool) -> Iterable[tuple[TopicPartition, TopicView]]:
        from raftlog.errors import UnknownTopicOrPartition

        for name, partition in self.options.assigned or ():
            view = views.get(name)
            if view is not None and partition < len(view.partitions):
                yield TopicPartition(name, partition), view
            elif at_start:
                raise UnknownTopicOrPartition(
                    f"there is no partition {name}-{partition}; they are counted from 0; mend the option assign"
                )

    # Where it begins and ends

    def ends(self, *, fresh: bool = False) -> Offsets:
        """Return the end of each partition that the query reads: behind the last record that it may see."""
        return self._at(self.partitions(fresh=fresh), _LATEST)

    def _at(self, partitions: Mapping[TopicPartition, str], which: int) -> Offsets:
        """Return the earliest or the latest offset of partitions, all of the topics that have these ids."""
        while True:
            ids = {part.topic: topic_id for part, topic_id in partitions.items()}
            found = self._find(dict.fromkeys(partitions, which))
            changed = {topic for topic, known in ids.items() if self._id_of(topic) != known}
            if not changed:
                return Offsets({part: found[part] for part in partitions}, ids)
            logger.info("topics were made again while their offsets were looked up: %s", ", ".join(sorted(changed)))
            partitions = self.partitions(fresh=True)

    def _id_of(self, topic: str) -> str:
        topic_id = self._reader.topic_id(topic)
        return "" if topic_id is None else topic_id.hex()

    def _find(self, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return offsets; a partition that has none from the time on is left out."""
        found = self._reader.find(wanted) if wanted else {}
        return {part: answer.offset for part, answer in found.items() if answer is not None}

    def earliest(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the first offsets of those partitions that are there."""
        wanted = list(partitions)
        there = self.partitions() if wanted else {}
        return self._find(dict.fromkeys([part for part in wanted if part in there], _EARLIEST))

    def start(self) -> tuple[Offsets, bool]:
        """Return where the query begins, and whether the same would be found later: `latest` moves on.

        Raises:
            ValueError: offsets or times are missing for partitions, or are there for others; no record is from the
                time on. DataLoss: an offset is not in the log.
        """
        return self._resolve(self.options.start)

    def end(self) -> Offsets:
        """Return where a batch query ends; raises as `start`."""
        return self._resolve(self.options.end)[0]

    def _resolve(self, bound: Bound) -> tuple[Offsets, bool]:
        partitions = self.partitions(fresh=True, at_start=True)
        if bound.kind in (EARLIEST, LATEST):
            return self._at(partitions, _LATEST if bound.kind == LATEST else _EARLIEST), bound.kind == EARLIEST
        ids = {part.topic: topic_id for part, topic_id in partitions.items()}
        if bound.kind == TIME:
            positions, stays = self._by_time(bound, dict.fromkeys(partitions, bound.time_ms))
        else:
            numbers = _for_all(bound, partitions)
            positions, stays = (self._by_offset if bound.kind == OFFSETS else self._by_time)(bound, numbers)
        return Offsets(positions, ids), stays

    def _by_time(self, bound: Bound, times_ms: Mapping[TopicPartition, int]) -> tuple[dict[TopicPartition, int], bool]:
        found = self._find(times_ms)
        beyond = sorted(times_ms.keys() - found.keys())
        if beyond and not bound.or_latest:
            raise ValueError(
                f"{bound.option}: {beyond[0]} has no record from {times_ms[beyond[0]]} on; choose an earlier time, or "
                "set startingOffsetsByTimestampStrategy=latest to begin at its end"
            )
        return {**found, **self._find(dict.fromkeys(beyond, _LATEST))}, not beyond

    def _by_offset(self, bound: Bound, numbers: Mapping[TopicPartition, int]) -> tuple[dict[TopicPartition, int], bool]:
        first = self.earliest(numbers)
        last = self._find(dict.fromkeys(numbers, _LATEST))
        found: dict[TopicPartition, int] = {}
        for part, number in numbers.items():
            if number < 0:
                found[part] = last[part] if number == _LATEST else first[part]
                continue
            found[part] = min(max(number, first[part]), last[part])
            if found[part] != number:
                self.lose(f"{bound.option}: {part} has offsets from {first[part]} up to {last[part]}, not {number}")
        return found, _LATEST not in numbers.values()

    # Going on

    def carried_on(self, start: Offsets, now: Offsets) -> tuple[Offsets, Offsets]:
        """Return where each partition that is there now goes on, and its end; what is new begins at its first record.

        Raises:
            DataLoss: partitions that were read are gone, a topic was made again, or a log has become shorter, and
                `failOnDataLoss` is true.
        """
        made_again = {
            topic for topic, topic_id in start.topic_ids.items() if now.topic_ids.get(topic, topic_id) != topic_id
        }
        for topic in sorted(made_again):
            self.lose(f"topic {topic} was deleted and made again: its offsets mean other records now")
        gone = [part for part in start.positions if part not in now.positions and part.topic not in made_again]
        if gone:
            self.lose(f"partitions are gone: {', '.join(map(str, sorted(gone)))}")
        going_on = {
            part: position
            for part, position in start.positions.items()
            if part in now.positions and part.topic not in made_again
        }
        now = self._not_shorter(going_on, now)
        new = self.earliest(part for part in now.positions if part not in going_on)
        for part, first in sorted(new.items()):
            if first > 0 and part.topic not in made_again:
                self.lose(f"partition {part} is new and begins at {first}, not at 0")
        positions = {
            part: new[part] if part in new else min(going_on[part], now.positions[part]) for part in now.positions
        }
        ends = {part: max(now.positions[part], positions[part]) for part in positions}
        return Offsets(positions, now.topic_ids), Offsets(ends, now.topic_ids)

    def _not_shorter(self, positions: Mapping[TopicPartition, int], now: Offsets) -> Offsets:
        for tries_left in reversed(range(_TRIES)):
            shorter = [part for part, position in positions.items() if now.positions[part] < position]
            if not shorter:
                return now
            if tries_left:  # a leader that has just begun may not know yet
                time.sleep(_AGAIN_S)
                again = self._find(dict.fromkeys(shorter, _LATEST))
                now = Offsets({**now.positions, **again}, now.topic_ids)
        for part in sorted(shorter):
            self.lose(f"{part} ends at {now.positions[part]}, but was read up to {positions[part]}: its log was cut")
        return now


def _for_all(bound: Bound, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """Return the numbers of an option, which are to be there for exactly the partitions that are read.

    Raises:
        ValueError: some are missing, or too many.
    """
    numbers = {TopicPartition(*part): number for part, number in bound.numbers}
    wanted = set(partitions)
    for problem, parts in (
        ("has nothing for", wanted - numbers.keys()),
        ("has more than is read:", numbers.keys() - wanted),
    ):
        if parts:
            raise ValueError(
                f"{bound.option} {problem} {', '.join(map(str, sorted(parts)))}; it has to name every partition that "
                "is read, and no other"
            )
    return numbers
