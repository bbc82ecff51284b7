"""A round of a delay queue: what is due is done together, and apart where a target does not take its share."""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from raftlog._core.delays import Delayed, SortedOut, goes_on
from raftlog._delay_reading import DelayReading
from raftlog.errors import (
    BrokerUnavailable,
    ClosedError,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    FencedError,
    NotCoordinator,
    RaftlogError,
    RequestTimedOut,
)
from raftlog.types import Record, TopicPartition

logger = logging.getLogger(__name__)

_OF_NO_TARGET: Final = (
    FencedError,
    ClosedError,
    BrokerUnavailable,
    RequestTimedOut,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    NotCoordinator,
)
"""What all that is due fails by: trying it in parts would take longer and change nothing."""


class Round:
    """What one call hands over. Parts are tried in turn: all that was taken, or one partition each after a failure.

    Invariants: every record that was added is done, or put back, or left to others, or in doubt; of a partition whose
    head failed nothing is handed over.
    """

    def __init__(self, reading: DelayReading) -> None:
        self.given: list[Record] = []
        """For the worker."""
        self.handed_over = 0
        self.error: RaftlogError | None = None
        """The first failure that belongs to a target; notes name the partitions."""
        self.over = False
        """Whether the last failure ends the round."""
        self.doubtful: list[Delayed] = []
        """What a transaction contains whose outcome is not known."""
        self._reading = reading
        self._todo: deque[list[Delayed]] = deque()
        self._for_worker: list[Delayed] = []
        self._late: set[TopicPartition] = set()

    def add(self, taken: list[Delayed]) -> None:
        """Try these next."""
        self._todo.append(taken)

    def next(self) -> list[Delayed] | None:
        """Return what is to be tried next."""
        return self._todo.popleft() if self._todo else None

    def done(self, part: list[Delayed], found: SortedOut) -> None:
        """A part is handed over."""
        self.given += found.given
        self.handed_over += found.handed_over
        self._for_worker += [each for each in part if self._stays(each)]
        self._reading.done(self._for_worker)

    def _stays(self, delayed: Delayed) -> bool:
        return not goes_on(delayed, self._reading.taken_at_ms)

    def failed(self, part: list[Delayed], error: BaseException, *, in_doubt: bool) -> list[Delayed]:
        """A part was not handed over, or that is in doubt; return what is to be put back."""
        if isinstance(error, FencedError) and not in_doubt:
            self._reading.left_to_others(part, error)
            return part
        if isinstance(error, RaftlogError) and not in_doubt and not isinstance(error, _OF_NO_TARGET):
            apart: dict[TopicPartition, list[Delayed]] = {}
            for each in part:
                apart.setdefault(each.partition, []).append(each)
            if len(apart) > 1:
                self._todo.extendleft(reversed(apart.values()))
                return []
            self._note(part, error)
            return part
        self.over = True
        back = [each for rest in self._todo for each in rest]
        self._todo.clear()
        back += self._for_worker
        self._reading.done([])
        if in_doubt:
            self.doubtful = [each for each in part if not self._stays(each)]
            return back + [each for each in part if self._stays(each)]
        return back + part

    def _note(self, part: list[Delayed], error: RaftlogError) -> None:
        head = part[0]
        self._late.add(head.partition)
        where = f"{head.partition} from offset {head.record.offset} on"
        logger.warning("%s could not be handed over, and waits: %s", where, error)
        if self.error is None:
            self.error = error
            error.add_note(f"({where} could not be handed over, and waits; what is in other partitions goes on)")
        else:
            self.error.add_note(f"({where} neither: {type(error).__name__}: {error})")

    def put_off(self) -> None:
        """What a target did not take, and was put back, is tried again after the others."""
        self._reading.put_off(self._late)
        self._late.clear()
