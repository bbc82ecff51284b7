"""How catching up gives way to live records. Pure; the caller passes the time.

A piece that catches up costs both brokers a few milliseconds of their event loop, processor and disk. Without pauses
one piece follows another, and every live record waits behind a part of one. So while live records flow, a stream
pauses after each piece for a multiple of the time that the piece took: a loaded machine makes pieces and pauses longer.

A pause costs speed, and a replica must not fall behind for ever. While the leader's log grows more than half as fast as
the copy, the pauses become shorter, down to none.
"""

from __future__ import annotations

from typing import Final

LIVE_MS: Final = 1_000.0
"""Live records flow for so long after the last one."""
MOST_PAUSE: Final = 1.0
"""The pause after a piece, as a multiple of the time that the piece took, at most."""
LEAST_PAUSE: Final = 0.25
"""A shorter pause is none."""
MOST_TIME_MS: Final = 50.0
"""A piece that took longer, on a slow disk, counts as this: the pause keeps a bound."""
JUDGED_BYTES: Final = 16 << 20
"""After so many bytes the pause is adjusted."""


class LiveTraffic:
    """Whether live records flow through this broker, in or out; all streams of a broker share it."""

    __slots__ = ("_last_ms",)

    def __init__(self) -> None:
        self._last_ms = float("-inf")

    def note(self, now_ms: float) -> None:
        """Note that live records were sent or received."""
        self._last_ms = now_ms

    def flows(self, now_ms: float) -> bool:
        """Return whether there were live records a moment ago."""
        return now_ms < self.ends_ms

    @property
    def ends_ms(self) -> float:
        """When it counts as over, unless more records come."""
        return self._last_ms + LIVE_MS


class CatchUpPace:
    """When one stream may continue to catch up.

    Invariants: pause is 0, or from LEAST_PAUSE to MOST_PAUSE; a wait is at most MOST_PAUSE * MOST_TIME_MS.
    """

    __slots__ = ("_began_ms", "_copied", "_grown", "_live", "_ready_ms", "pause")

    def __init__(self, live: LiveTraffic) -> None:
        self._live = live
        self._began_ms = float("-inf")
        self._ready_ms = float("-inf")
        self._copied = 0.0
        self._grown = 0.0
        self.pause = MOST_PAUSE
        """The present pause, as a multiple of the time of a piece."""

    def begin(self, now_ms: float) -> None:
        """Note that the next piece may be sent from now on."""
        self._began_ms = now_ms

    def done(self, now_ms: float) -> None:
        """Note that what `begin` allowed is done, or a part of it; the pause begins."""
        took_ms = min(now_ms - self._began_ms, MOST_TIME_MS)
        self._ready_ms = max(self._ready_ms, now_ms + self.pause * took_ms)

    def ready_at_ms(self, now_ms: float) -> float:
        """Return when the stream may continue: `now_ms`, or later while live records flow."""
        if not self._live.flows(now_ms):
            return now_ms
        return max(now_ms, min(self._ready_ms, self._live.ends_ms))

    def is_live(self, now_ms: float) -> bool:
        """Return whether live records flow, so that pieces should be small."""
        return self._live.flows(now_ms)

    def note_progress(self, copied_bytes: int, copied_offsets: int, grown_offsets: int) -> None:
        """Count a piece, and by how much its partition grew at the leader since the last one; adjust the pause."""
        self._copied += copied_bytes
        self._grown += copied_bytes * grown_offsets / max(1, copied_offsets)
        if self._copied < JUDGED_BYTES:
            return
        if self._grown * 2 > self._copied:
            self.pause = self.pause / 2 if self.pause > LEAST_PAUSE else 0.0
        elif self._grown * 4 < self._copied:
            self.pause = min(MOST_PAUSE, max(LEAST_PAUSE, self.pause * 2))
        self._copied = self._grown = 0.0
        assert self.pause == 0 or LEAST_PAUSE <= self.pause <= MOST_PAUSE
