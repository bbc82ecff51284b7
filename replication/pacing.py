"""When a stream may send: pieces that catch up give way to live records, and small live records gather. Pure.

The caller passes the time.

A piece that catches up costs both brokers a few milliseconds of their event loop, processor and disk. Without pauses
one piece follows another, and every live record waits behind a part of one. So while live records flow, a stream
pauses after each piece for a multiple of the time that the piece took: a loaded machine makes pieces and pauses longer.

A pause costs speed, and a replica must not fall behind for ever. While the leader's log grows more than half as fast as
the copy, the pauses become shorter, down to none.

A message costs both ends far more than a small record in it does. So live records gather while small messages before
them are not acknowledged (Nagle's algorithm, RFC 896; a Kafka follower has one fetch in flight at a time). Producers
that each wait for their own record then share messages, even if each has its own connection (docs/adr/0058).
"""

from __future__ import annotations

import sys
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
"""No record waits for a message of this size or more, nor for a full one: one fast producer fills the connection."""
FEW_RECORDS: Final = 4
"""Fewer unacknowledged records hold up no others: with few producers, waiting would cost more than sharing saves."""
GATHER_MS: Final = 20.0
"""The longest that records wait for the acknowledgement of earlier ones."""
QUICK_FLUSH_MS: Final = 3.0
"""A disk whose fsync takes longer is a slow one."""
GATHER_BESIDE_SLOW_FLUSH_MS: Final = 2.0
"""GATHER_MS of a slow disk: there a record that waited longer would also miss the next fsync."""


def gather_ms(flush_ms: float) -> float:
    """Return the longest that records wait for an acknowledgement that comes after an fsync of `flush_ms`."""
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

    They do while FEW_RECORDS or more records of small messages are not acknowledged. A message counts as acknowledged
    once one of its partitions is, the last one in it.
    """

    __slots__ = ("_sent", "_unacknowledged", "_until_ms")

    def __init__(self) -> None:
        self._sent: deque[tuple[object, int, int]] = deque()
        """Of each unacknowledged message: its last partition, the end offset in that, and its number of records."""
        self._unacknowledged = 0
        self._until_ms = 0.0

    def sent(self, partition: object, end_offset: int, count: int, until_ms: float) -> None:
        """Note a small message of `count` records, acknowledged once `partition` is, up to `end_offset`.

        `until_ms`: how long other records gather at most.
        """
        self._sent.append((partition, end_offset, count))
        self._unacknowledged += count
        self._until_ms = until_ms

    def acked(self, partition: object, end_offset: int) -> None:
        """Note that the follower holds `partition` up to `end_offset`, and so all messages sent before that."""
        reached = 0
        for number, (awaited, end, _) in enumerate(self._sent, 1):
            if awaited is partition and end <= end_offset:
                reached = number
        self._drop(reached)

    def ended(self, partition: object) -> None:
        """Note that no further acknowledgement of `partition` comes."""
        self.acked(partition, sys.maxsize)

    def _drop(self, messages: int) -> None:
        for _ in range(messages):
            self._unacknowledged -= self._sent.popleft()[2]

    @property
    def gathers(self) -> bool:
        """Whether records gather, as long as their time is not over (`until_ms`)."""
        return self._unacknowledged >= FEW_RECORDS

    def until_ms(self, now_ms: float) -> float | None:
        """Return when records stop gathering at the latest; None: they go at once."""
        if not self.gathers:
            return None
        if now_ms >= self._until_ms:
            self._drop(len(self._sent))
            return None
        return self._until_ms
