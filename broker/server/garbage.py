"""Short collections of garbage, however many objects live as long as the server.

Python looks for garbage in its oldest generation as a whole, each time a quarter has been added. Meanwhile nothing else
runs: 430 ms with 10,000 partitions, seven times a minute under load. Here, what such a collection leaves is frozen
(`gc.freeze`), so the next one looks only at what has come since. Frozen objects go with their last reference, as all
do; only a cycle of them stays once it is garbage, with the buffers that it holds. So there is a whole collection when
the frozen objects have doubled, or GROWN_BYTES more are in use; these may take a hundredth of the time together.

    young ── survives a collection of the oldest generation ──> frozen ── thawed for a whole collection ──> frozen
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from raftlog._installed import allocated_bytes

logger = logging.getLogger(__name__)

THRESHOLDS: Final = (5_000, 4, 2)
"""As for `gc.set_threshold`: collections of 5,000, 25,000 and 75,000 new objects, of which the last takes 30 ms. With
Python's 700 the requests under way are often more than that, and survive collection after collection."""
LEAST: Final = 100_000
"""A whole collection of so many objects is short enough at any time."""
GROWN_BYTES: Final = 64 << 20
REST: Final = 100
"""After a whole collection the next one waits this many times as long as it took."""
OLDEST: Final = 2


class GarbageCollection:
    """How this process collects garbage from `start` on. One for a process, since Python's collector is one."""

    def __init__(self, soon: Callable[[Callable[[], None]], object]) -> None:
        """`soon`: calls a function a little later, on the thread that may take the time for a whole collection."""
        self._soon = soon
        self._added = 0
        """Objects frozen since they were counted."""
        self._base, self._base_bytes = LEAST, 0
        """Objects and bytes in use after the last whole collection."""
        self._not_before_s = 0.0
        self._due = True

    def start(self) -> None:
        """Freeze what survives from now on; without whole collections until `settle`."""
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(self._collected)

    def settle(self) -> None:
        """The server has loaded what it needs: what is frozen now is what later growth is compared with."""
        self._rebase()

    def _rebase(self) -> None:
        self._base, self._base_bytes = max(LEAST, gc.get_freeze_count()), allocated_bytes()
        self._added, self._due = 0, False

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase != "stop" or info["generation"] != OLDEST:
            return
        self._added += len(gc.get_objects(generation=OLDEST))
        gc.freeze()
        if not self._due and (self._added >= self._base or self._holds_more()):
            self._due = True
            self._soon(self._look)

    def _holds_more(self) -> bool:
        return time.monotonic() >= self._not_before_s and allocated_bytes() > self._base_bytes + GROWN_BYTES

    def _look(self) -> None:
        """Most that was frozen is gone again by now: what a request needs while it is under way."""
        if gc.get_freeze_count() < 2 * self._base and not self._holds_more():
            self._added, self._due = 0, False
            return
        begun_s = time.monotonic()
        gc.unfreeze()
        freed = gc.collect()
        self._rebase()
        gc.collect()  # of nothing: else the next one would wait until a quarter of all is new
        took_s = time.monotonic() - begun_s
        self._not_before_s = begun_s + took_s * (1 + REST)
        logger.info(
            "a whole collection of garbage",
            extra={
                "event": "garbage_collected",
                "ms": round(1e3 * took_s),
                "kept": self._base,
                "freed": freed,
                "bytes": self._base_bytes,
            },
        )
