"""When a stream may send: catching up gives way to live records, and small messages to larger ones. Pure.

The caller passes the time.

A piece that catches up costs both brokers a few milliseconds of their event loop, processor and disk. Without pauses
one piece follows another, and every live record waits behind a part of one. So while live records flow, a stream
pauses after each piece for a multiple of the time that the piece took: a loaded machine makes pieces and pauses longer.

A pause costs speed, and a replica must not fall behind for ever. While the leader's log grows more than half as fast as
the copy, the pauses become shorter, down to none.

A message costs both ends far more than a small record in it does. So live records gather while earlier ones, in small
messages, have not been acknowledged (Nagle's idea, RFC 896; Kafka's followers have one fetch at a time under way).
Producers that each wait for their own record then share messages, however many connections they have.
"""

from __future__ import annotations

from collections import deque
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
SMALL_BYTES: Final = 48 << 10
"""A message with more bytes is not waited for, nor a full one: one producer in a hurry fills the connection."""
FEW_RECORDS: Final = 4
"""Fewer records without an acknowledgement hold up no others: few producers would gain little from it, and wait."""
GATHER_MS: Final = 20.0
"""Records wait no longer for the acknowledgement of the message before."""
QUICK_FLUSH_MS: Final = 3.0
"""A disk that needs no longer for an fsync is a quick one."""
GATHER_BESIDE_SLOW_FLUSH_MS: Final = 2.0
"""As GATHER_MS, on a slow disk: a record that waited longer there would miss the next fsync too."""


def gather_ms(flush_ms: float) -> float:
    """Return how long records wait at most for an acknowledgement that comes after an fsync of `flush_ms`."""
    return GATHER_MS if flush_ms <= QUICK_FLUSH_MS else GATHER_BESIDE_SLOW_FLUSH_MS


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


class LivePace:
    """Whether live records gather for the next message of one stream, and until when.

    They do while FEW_RECORDS or more of small messages have no acknowledgement. Of each message it waits for one
    partition's.
    """

    __slots__ = ("_sent", "_unacknowledged", "_until_ms")

    def __init__(self) -> None:
        self._sent: deque[tuple[object, int, int]] = deque()
        """What is waited for, of each message: a partition, its end offset, and the message's number of records."""
        self._unacknowledged = 0
        self._until_ms = 0.0

    def sent(self, what: object, end_offset: int, count: int, until_ms: float) -> None:
        """Note a small message of `count` records; it is acknowledged once `what` is up to `end_offset`.

        `until_ms`: records gather no longer than until this time.
        """
        self._sent.append((what, end_offset, count))
        self._unacknowledged += count
        self._until_ms = until_ms

    def acked(self, what: object, end_offset: int) -> None:
        """Note that the follower holds the records of `what` up to `end_offset`, and all that was sent before them."""
        reached = 0
        for number, (awaited, end, _) in enumerate(self._sent, 1):
            if awaited is what and end <= end_offset:
                reached = number
        self._drop(reached)

    def over(self, what: object) -> None:
        """Note that no acknowledgement of `what` comes any more."""
        self._drop(max((number for number, (awaited, _, _) in enumerate(self._sent, 1) if awaited is what), default=0))

    def _drop(self, messages: int) -> None:
        for _ in range(messages):
            self._unacknowledged -= self._sent.popleft()[2]

    @property
    def gathers(self) -> bool:
        """Whether records gather, unless their time is over: see `until_ms`."""
        return self._unacknowledged >= FEW_RECORDS

    def until_ms(self, now_ms: float) -> float | None:
        """Return until when records gather at the longest; None: they go at once."""
        if not self.gathers:
            return None
        if now_ms >= self._until_ms:
            self._drop(len(self._sent))
            return None
        return self._until_ms
