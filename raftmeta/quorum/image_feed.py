"""What every `MetadataPort` does with committed images: keep the newest, tell listeners, wake who waits for one."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Sequence
from typing import Any

from raftlog.errors import RaftlogError
from raftmeta.history import ChangeHistory
from raftmeta.image import MetadataImage
from raftmeta.port import Change, Listener, Unsubscribe

logger = logging.getLogger(__name__)


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

    def close(self, reason: RaftlogError) -> None:
        """Answer everyone who waits with `reason`."""
        self._closed_by = reason
        waiters, self._waiters = self._waiters, []
        for _, _, waiter in waiters:
            if not waiter.done():
                waiter.set_exception(reason)
