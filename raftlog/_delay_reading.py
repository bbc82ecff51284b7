"""What both delay queues share: what to do before a poll, what to keep of it, what to commit."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Final, NamedTuple

from raftlog._core.delay_waits import Waits
from raftlog._core.delays import (
    Delayed,
    Level,
    Levels,
    as_delay_ms,
    by_partition,
    ends_of,
    first_runs,
    goes_on,
    starts_of,
    understood,
)
from raftlog._group_listener import RebalanceListener
from raftlog.errors import FencedError, InvalidRequestError
from raftlog.types import Record, TopicPartition

logger = logging.getLogger(__name__)

POLLED_MAX: Final = 1000
"""Records that the consumer is asked for at once."""
ROUND_MAX: Final = 500
"""Due records that are handed over, and committed, at once."""
STOP_POLL_S: Final = 0.5
"""So often `run` looks whether it is to stop."""
_PUT_OFF_MS: Final = 500
"""So long a partition is left alone whose head could not be handed over."""
DEFAULT_REPLICAS: Final = 3
RETENTION: Final = timedelta(days=7)


unless_lost: Final = contextlib.suppress(InvalidRequestError)
"""Around `pause`, `resume` and `seek`: a session may end between two polls; the next one tells the listener so."""


def now_ms() -> int:
    """Return the wall clock, which due times are compared with."""
    return time.time_ns() // 1_000_000


def sent_now_ms() -> int:
    """Return the wall clock, which due times are reckoned from: rounded up, so that nothing is due too early."""
    return -(-time.time_ns() // 1_000_000)


def consumer_config(config: Mapping[str, object] | None) -> dict[str, object]:
    """Return the options of a queue's consumer."""
    own = {"enable.auto.commit": False, "isolation.level": "read_committed"}
    given = {name: value for name, value in (config or {}).items() if name.replace("_", ".") not in own}
    return {"auto.offset.reset": "earliest", **given, **own}


def topic_configs(level: Level, retention: timedelta) -> dict[str, str]:
    """Return the configs of a level's topic: what waits there is kept until it is due, and for a while then.

    Raises:
        TypeError, InvalidRequestError: the retention is none.
    """
    return {"retention.ms": str(level.delay_ms + as_delay_ms(retention, "retention"))}


class BeforePoll(NamedTuple):
    """What to do with the consumer, and how long to poll at most."""

    pause: list[TopicPartition]
    resume: list[TopicPartition]
    timeout_s: float | None


class DelayReading(RebalanceListener):
    """Where the queue is in its levels. The listener of its consumer: what others read from now on is forgotten."""

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self._waits = Waits()
        self.taken_at_ms = 0
        """When `take` was called last."""
        self.given: dict[TopicPartition, int] = {}
        """Where the group is once the records that were handed over last are done with."""

    def take(self, limit: int) -> list[Delayed]:
        """Return records whose time at their level is over; of one partition all go on, or all are for a worker."""
        self.taken_at_ms = now_ms()
        taken, rest = first_runs(self._waits.take(self.taken_at_ms, limit), self.taken_at_ms)
        self._waits.give_back(rest)
        return taken

    def going_on(self, taken: Iterable[Delayed]) -> dict[TopicPartition, int]:
        """Return where the group is once those of these records are handed over that are not for a worker."""
        return ends_of(each for each in taken if goes_on(each, self.taken_at_ms))

    def before_poll(self, left_s: float | None) -> BeforePoll:
        """Return what to do when there is nothing to take."""
        at_ms = now_ms()
        reading = self._waits.reading(at_ms)
        next_ms = self._waits.next_at_ms()
        if next_ms is not None:
            until_s = max(0, next_ms - at_ms) / 1000
            left_s = until_s if left_s is None else min(left_s, until_s)
        return BeforePoll(reading.pause, reading.resume, left_s)

    def after_poll(self, polled: Iterable[Record]) -> dict[TopicPartition, int]:
        """Keep what is worth it; return where to seek to fetch the rest again, later."""
        at_ms = now_ms()
        seeks: dict[TopicPartition, int] = {}
        for partition, records in by_partition(polled).items():
            level = self._levels.of(partition.topic)
            later = self._waits.offer(partition, [understood(record, level) for record in records], at_ms)
            if later is not None:
                seeks[partition] = later
        return seeks

    def done(self, taken: Iterable[Delayed]) -> None:
        """Note that these are handed over: what a worker has is done with once he comes back."""
        self.given = ends_of(each for each in taken if not goes_on(each, self.taken_at_ms))

    def put_back(self, taken: Iterable[Delayed], assigned: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Forget records that could not be handed over; return where to seek to get them again."""
        starts = starts_of(taken)
        self._waits.forget(starts)
        mine = set(assigned)
        return {partition: offset for partition, offset in starts.items() if partition in mine}

    def put_off(self, partitions: Iterable[TopicPartition]) -> None:
        """Let others go first while the target of these does not take what it is sent."""
        self._waits.put_off(partitions, now_ms() + _PUT_OFF_MS)

    def fenced(self, error: FencedError) -> None:
        """A commit came too late: others are given these records again, which at least once allows."""
        parts = ", ".join(map(str, sorted(self.given)))
        logger.warning("delay queue %s: %s went to another worker, which repeats: %s", self._levels.name, parts, error)

    def left_to_others(self, taken: Iterable[Delayed], error: FencedError) -> None:
        """Records could not be handed over any more: another worker does."""
        parts = ", ".join(map(str, sorted(self.going_on(taken))))
        logger.info("delay queue %s: another worker has %s, and hands over: %s", self._levels.name, parts, error)

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """What was handed over of them is committed already: every round begins with that."""
        self._waits.forget(partitions)
