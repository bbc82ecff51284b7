"""Committed images in every `MetadataPort`: the newest is kept, listeners are told, waiting callers are woken.

A bounded list of the newest changes serves watchers that are a little behind.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from raftlog.errors import RaftlogError
from raftmeta.image import MetadataImage
from raftmeta.port import Change, Listener, Unsubscribe

logger = logging.getLogger(__name__)

MAX_CHANGES = 10_000
MAX_RECORDS = 100_000
READY_ATTEMPT_S: Final = 5.0
READY_RETRY_S: Final = 0.1


class ChangeHistory:
    """Every change above some offset, the newest ones last.

    Invariants: offsets rise, with gaps where the log held no change; at most `max_changes` changes, and at most
    `max_records` records unless one change alone has more.
    """

    def __init__(self, offset: int, *, max_changes: int = MAX_CHANGES, max_records: int = MAX_RECORDS) -> None:
        self._changes: deque[Change] = deque()
        self._base_offset = offset
        self._records = 0
        self._max_changes = max_changes
        self._max_records = max_records

    @property
    def end_offset(self) -> int:
        """The offset of the newest change, or the one that the history began with."""
        return self._changes[-1].offset if self._changes else self._base_offset

    def add(self, change: Change) -> None:
        """Add the change that came after the last one, and drop old ones beyond the bounds."""
        assert change.offset > self.end_offset, f"{change.offset} after {self.end_offset}"
        self._changes.append(change)
        self._records += len(change.records)
        while len(self._changes) > self._max_changes or (self._records > self._max_records and len(self._changes) > 1):
            dropped = self._changes.popleft()
            self._base_offset = dropped.offset
            self._records -= len(dropped.records)

    def since(self, offset: int) -> Sequence[Change] | None:
        """Return the changes above `offset`; None when some of them are gone, [] when it is at the newest or ahead."""
        if offset < self._base_offset:
            return None
        newer: list[Change] = []
        for change in reversed(self._changes):
            if change.offset <= offset:
                break
            newer.append(change)
        newer.reverse()
        return newer


class ImageFeed:
    """The newest image of a node. Invariant: neither its offset nor its controller epoch ever goes back."""

    def __init__(self, image: MetadataImage | None = None) -> None:
        self._image = image or MetadataImage()
        self._history = ChangeHistory(self._image.offset)
        self._listeners: dict[object, Listener] = {}
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._closed_by: RaftlogError | None = None

    @property
    def image(self) -> MetadataImage:
        """The newest image."""
        return self._image

    def subscribe(self, listener: Listener) -> Unsubscribe:
        """Call `listener` for every change from now on."""
        token = object()
        self._listeners[token] = listener

        def unsubscribe() -> None:
            self._listeners.pop(token, None)

        return unsubscribe

    def changes_since(self, offset: int) -> Sequence[Change] | None:
        """Return the changes above `offset`, or None when they are not all kept."""
        return self._history.since(offset)

    def publish(self, image: MetadataImage, change: Change) -> None:
        """Take the next change."""
        assert image.offset == change.offset, f"image {image.offset}, change {change.offset}"
        assert image.offset > self._image.offset, f"{image.offset} after {self._image.offset}"
        assert image.controller_epoch >= self._image.controller_epoch
        self._image = image
        self._history.add(change)
        self._tell(image, change.records)

    def reset(self, image: MetadataImage) -> None:
        """Take an image as a whole."""
        assert image.offset >= self._image.offset, f"{image.offset} after {self._image.offset}"
        self._image = image
        self._history = ChangeHistory(image.offset)
        self._tell(image, None)

    def _tell(self, image: MetadataImage, records: Sequence[Any] | None) -> None:
        for listener in list(self._listeners.values()):
            try:
                listener(image, records)
            except Exception:  # one listener's bug must not keep the change from the others
                logger.exception("a metadata listener failed at offset %d", image.offset)
        while self._waiters and self._waiters[0][0] <= image.offset:
            waiter = heapq.heappop(self._waiters)[2]
            if not waiter.done():
                waiter.set_result(None)

    async def reached(self, offset: int) -> None:
        """Return once the image is at `offset` or beyond.

        Raises:
            RaftlogError: what `close` was given.
        """
        if self._image.offset >= offset:
            return
        if self._closed_by is not None:
            raise self._closed_by
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (offset, next(self._order), waiter))
        await waiter

    async def wait_ready(
        self, barrier: Callable[[float], Awaitable[int]], is_final: Callable[[Exception], bool]
    ) -> None:
        """Return once an active controller has been heard and the image is as new as what it had committed by then.

        `barrier`: asks, within so many seconds, for an offset that covers all that is committed. It is asked until it
        answers, or fails with an error that `is_final`.
        """
        while True:
            try:
                offset = await barrier(READY_ATTEMPT_S)
                async with asyncio.timeout(READY_ATTEMPT_S):
                    await self.reached(offset)
            except (TimeoutError, RaftlogError) as error:
                if is_final(error):
                    raise
                logger.debug("not ready: %s", error)
                await asyncio.sleep(READY_RETRY_S)  # it may have failed at once
                continue
            if self._image.controller_epoch > 0:
                return

    def close(self, reason: RaftlogError) -> None:
        """Fail all waiting callers with `reason`."""
        self._closed_by = reason
        waiters, self._waiters = self._waiters, []
        for _, _, waiter in waiters:
            if not waiter.done():
                waiter.set_exception(reason)
