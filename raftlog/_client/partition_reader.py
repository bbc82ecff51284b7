"""The consumer's side that any thread may call: rows go out in the caller's thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable
from typing import Final

from raftlog._client.fetcher import Fetcher, monotonic_ms
from raftlog._client.options import ConsumerOptions
from raftlog._core.fetched import Rows
from raftlog._core.positions import Fetched, Mark, PartitionState
from raftlog.errors import (
    ClosedError,
    InvalidRequestError,
    OffsetOutOfRange,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from raftlog.types import TopicPartition

_UNTIL_SEEK: Final = (OffsetOutOfRange, UnknownTopicId, UnknownTopicOrPartition)
"""What does not pass by itself. Anything else may be whole elsewhere or mended soon: it is tried again."""


PASSED_WAIT_S: Final = 0.05
"""How long a poll goes on waiting for records once positions have moved on over markers, or what was aborted: who reads
up to an end is there then, and nothing more may ever come."""


class PartitionReader(Fetcher):
    """What is fetched, polled; positions, sought. Made on the event loop; its calls come from any thread."""

    def __init__(self, bootstrap: list[str], options: ConsumerOptions, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(bootstrap, options, loop)
        self.subscribed = False
        """Whether there is a subscription, which may have no partitions yet."""
        self._pid = os.getpid()
        self._undone: list[dict[PartitionState, Mark]] = []
        """What was taken by polls that were interrupted, so that nobody got it; `settle` reads it again."""
        self._raised_last = False
        """Whether the last poll raised: then it is the turn of the records, however many partitions are broken."""

    def check_open(self) -> None:
        """Refuse when closed, or carried over into another process.

        Raises:
            ClosedError: says which.
        """
        if self.closed is not None:
            raise type(self.closed)(str(self.closed))
        if self._pid != os.getpid():
            raise ClosedError(f"this consumer was made in process {self._pid}; make one in each process")

    def abandon_after_fork(self) -> None:
        """In a forked child: let go of everything without touching it."""
        self.lock = threading.RLock()  # the old one may be held by a thread that does not exist here
        self.closed = ClosedError(f"this consumer was made in process {self._pid}; make one in each process")

    def take(self, max_rows: int, marks: dict[PartitionState, Mark]) -> list[Rows]:
        """Return rows that are there already; the positions move on. Where they stood before is in `marks`.

        Who does not get to hand the rows out, whatever came between, calls `take_back` with them.

        Raises:
            RaftlogError: a partition failed and wants `seek`, or the subscription cannot go on.
        """
        self.check_open()
        now_s = monotonic_ms() / 1_000
        self.figures.polled(now_s)
        spent: list[Fetched] = []
        try:
            with self.lock:
                if not self.positions.states and not self.subscribed:
                    raise InvalidRequestError(
                        "nothing to poll: call subscribe or assign first, in raftlog.aio with await"
                    )
                inbox = self._inbox
                while inbox:
                    state, fetched = inbox[0]
                    if not self.positions.receive(state, fetched):
                        spent.append(fetched)
                    inbox.popleft()  # last: a signal may come between, and twice does no harm
                if not self._raised_last:
                    self._raise_pending()
                taken = self.positions.take(max_rows, spent, check_crcs=self.options.check_crcs, marks=marks)
                if self.positions.doubtful:
                    self._ask_again()
                if not taken:
                    self._raise_pending()
                self._raised_last = False
                for rows in taken:
                    self.figures.handed_out(rows.topic_partition.topic, len(rows), now_s)
                return taken
        finally:
            if spent:
                self._call_soon(self._give_back, spent)

    def take_back(self, marks: dict[PartitionState, Mark]) -> None:
        """What was taken under these marks was handed to nobody: it is read again."""
        self._undone.append(marks)  # a second Ctrl-C may come while the first one is seen to
        self.settle()

    def settle(self) -> None:
        """Take back what is to be taken back still."""
        while self._undone:
            with self.lock:
                for marks in self._undone:
                    self._stale(self.positions.take_back(marks))
                self._undone.clear()
            self.request_sync()

    def _raise_pending(self) -> None:
        """Raise the error of a partition, once in a backoff, so that polls between hand out what the others have."""
        now_ms = monotonic_ms()
        state = self.positions.failed(now_ms)
        if state is None:
            return
        error = state.error
        assert error is not None, "it has failed"
        self._raised_last = True
        state.raised += 1
        pause_ms = self.options.pauses.after_ms(error, state.raised)
        state.raise_not_before_ms = now_ms + pause_ms
        if isinstance(error, _UNTIL_SEEK):
            self._call_soon(self._remind, pause_ms)
        else:
            state.error = None
            state.not_before_ms = state.raise_not_before_ms
            self.request_sync()
        raise type(error)(str(error))

    def _remind(self, pause_ms: float) -> None:
        self.loop.call_later(pause_ms / 1000 + 0.001, lambda: self.on_data())

    def place(self, topic_partition: TopicPartition, offset: int) -> None:
        """Go on at another offset."""
        self.check_open()
        self.settle()
        with self.lock:
            self._stale(self._state(topic_partition).place(offset))
        self.request_sync()

    def pause(self, partitions: Iterable[TopicPartition], paused: bool) -> None:
        """Stop fetching partitions, or go on."""
        self.check_open()
        with self.lock:
            for topic_partition in partitions:
                state = self._state(topic_partition)
                if paused and not state.paused:
                    self._stale(state.unsubscribe())
                state.paused = paused
        self.request_sync()

    def _state(self, topic_partition: TopicPartition) -> PartitionState:
        state = self.positions.states.get(TopicPartition(*topic_partition))
        if state is None:
            raise InvalidRequestError(f"{TopicPartition(*topic_partition)} is not assigned to this consumer")
        return state

    def assigned(self) -> list[TopicPartition]:
        """Return what is read, as far as the application knows."""
        with self.lock:
            return sorted(self.positions.states)

    def position_now(self, topic_partition: TopicPartition) -> int | None:
        """Return the offset of the next record, None while the start is being looked up.

        Raises:
            InvalidRequestError: not assigned. OffsetOutOfRange: no position, and no policy to get one.
        """
        self.check_open()
        with self.lock:
            state = self._state(topic_partition)
            if state.position is None and state.error is not None:
                raise type(state.error)(str(state.error))
            return state.position

    async def close(self) -> None:
        """Stop; on the event loop."""
        self.closed = self.closed or ClosedError("the consumer is closed")
        self.on_data()
        await super().close()
