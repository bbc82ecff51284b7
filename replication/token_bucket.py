"""A rate with a burst, for bytes and other amounts. Pure; the caller passes the time."""

from __future__ import annotations

from typing import Final

BURST_MS: Final = 200.0
"""The burst of replication after a pause: the bytes of this time at the full rate."""
PIECE_MS: Final = 100.0
"""The size of one piece, so that traffic flows smoothly: the bytes of this time at the full rate."""

LOOK_AGAIN_MS: Final = 500.0
"""Longest wait before a caller asks the bucket again."""


class TokenBucket:
    """Bytes that may be sent, or requested. Taking more than are left makes a debt, and later traffic waits for it.

    So a batch larger than the burst still passes, and the rate holds on average. A rate of None sets no limit.

    Invariant: tokens <= rate * burst_ms.
    """

    __slots__ = ("_burst_ms", "_filled_ms", "_most", "_rate", "_tokens", "throttled_ms")

    def __init__(self, rate_bytes_per_s: float | None = None, burst_ms: float = BURST_MS) -> None:
        self._burst_ms = burst_ms
        self._rate = rate_bytes_per_s
        self._most = self._tokens = 0.0 if rate_bytes_per_s is None else self._burst(rate_bytes_per_s)
        self._filled_ms: float | None = None
        self.throttled_ms = 0.0
        """For how long, in all, a debt has stopped the traffic."""

    @property
    def rate_bytes_per_s(self) -> float | None:
        """The limit; None: no limit."""
        return self._rate

    @property
    def piece_bytes(self) -> int | None:
        """The most to send in one piece, unless a single batch is larger; None: no limit."""
        return None if self._rate is None else max(1, int(self._rate * PIECE_MS / 1000))

    def set_rate(self, rate_bytes_per_s: float | None, now_ms: float) -> None:
        """Change the limit from now on. A debt remains, unless the new limit, or the former one, is None."""
        assert rate_bytes_per_s is None or rate_bytes_per_s > 0, "at a rate of 0 nothing would ever pass"
        self._fill(now_ms)
        was_limited, self._rate = self._rate is not None, rate_bytes_per_s
        if rate_bytes_per_s is not None:
            self._most = self._burst(rate_bytes_per_s)
            self._tokens = min(self._tokens, self._most) if was_limited else self._most

    def take(self, size_bytes: float, now_ms: float) -> None:
        """Count bytes that are sent or requested."""
        if self._rate is not None:
            self._fill(now_ms)
            self._tokens -= size_bytes

    def ready_at_ms(self, now_ms: float) -> float:
        """Return when traffic may flow again: `now_ms`, or later during a debt."""
        if self._rate is None:
            return now_ms
        self._fill(now_ms)
        if self._tokens > 0:
            return now_ms
        return now_ms + (1 - self._tokens) / self._rate * 1000

    def charge(self, amount: float, now_ms: float) -> float:
        """Take, and return for how many ms traffic has to wait from now on: `ready_at_ms` without a second look."""
        if self._rate is None:
            return 0.0
        self._fill(now_ms)
        self._tokens -= amount
        return 0.0 if self._tokens > 0 else (1 - self._tokens) / self._rate * 1000

    def look_again_at_ms(self, now_ms: float) -> float:
        """Return when to ask `ready_at_ms` again: then, or a little earlier, since the rate may change meanwhile."""
        return min(self.ready_at_ms(now_ms), now_ms + LOOK_AGAIN_MS)

    def _fill(self, now_ms: float) -> None:
        last_ms, self._filled_ms = self._filled_ms, now_ms
        if self._rate is None or last_ms is None or now_ms <= last_ms:
            return
        if self._tokens <= 0:
            self.throttled_ms += min(now_ms - last_ms, (1 - self._tokens) / self._rate * 1000)
        filled = self._tokens + self._rate * (now_ms - last_ms) / 1000
        self._tokens = filled if filled < self._most else self._most  # `min` costs more than all the rest

    def _burst(self, rate_bytes_per_s: float) -> float:
        return max(1.0, rate_bytes_per_s * self._burst_ms / 1000)
