"""How much replication traffic may flow: bytes a second with a small burst; pure, time is passed in."""

from __future__ import annotations

from typing import Final

BURST_MS: Final = 200.0
"""What may flow at once after a pause: this much of the rate."""
PIECE_MS: Final = 100.0
"""What is sent or asked for in one piece, so that it flows smoothly: this much of the rate."""


class TokenBucket:
    """Bytes that may be sent or asked for. Whoever takes more than there is goes into debt, and the next one waits.

    So a batch larger than the burst still passes, and the rate holds on average. `rate` None: no limit.

    Invariant: tokens <= rate * BURST_MS.
    """

    __slots__ = ("_filled_ms", "_rate", "_tokens", "throttled_ms")

    def __init__(self, rate_bytes_per_s: int | None = None) -> None:
        self._rate = rate_bytes_per_s
        self._tokens = 0.0 if rate_bytes_per_s is None else self._burst(rate_bytes_per_s)
        self._filled_ms: float | None = None
        self.throttled_ms = 0.0
        """For how long there has been a debt, so that nothing might flow."""

    @property
    def rate_bytes_per_s(self) -> int | None:
        """The limit; None: there is none."""
        return self._rate

    @property
    def piece_bytes(self) -> int | None:
        """How much to let pass in one piece, but for a larger batch; None: there is no limit."""
        return None if self._rate is None else max(1, int(self._rate * PIECE_MS / 1000))

    def set_rate(self, rate_bytes_per_s: int | None, now_ms: float) -> None:
        """Change the limit from now on. A debt is kept, so that a change does not forgive it; None does."""
        assert rate_bytes_per_s is None or rate_bytes_per_s > 0, "a rate of nothing would never let anything pass"
        self._fill(now_ms)
        was_limited, self._rate = self._rate is not None, rate_bytes_per_s
        if rate_bytes_per_s is not None:
            burst = self._burst(rate_bytes_per_s)
            self._tokens = min(self._tokens, burst) if was_limited else burst

    def take(self, size_bytes: int, now_ms: float) -> None:
        """Count what flows."""
        if self._rate is not None:
            self._fill(now_ms)
            self._tokens -= size_bytes

    def ready_at_ms(self, now_ms: float) -> float:
        """Return when something may flow again: `now_ms`, or later while there is a debt."""
        if self._rate is None:
            return now_ms
        self._fill(now_ms)
        if self._tokens > 0:
            return now_ms
        return now_ms + (1 - self._tokens) / self._rate * 1000

    def _fill(self, now_ms: float) -> None:
        last_ms, self._filled_ms = self._filled_ms, now_ms
        if self._rate is not None and last_ms is not None and now_ms > last_ms:
            if self._tokens <= 0:
                self.throttled_ms += min(now_ms - last_ms, (1 - self._tokens) / self._rate * 1000)
            self._tokens = min(self._burst(self._rate), self._tokens + self._rate * (now_ms - last_ms) / 1000)

    @staticmethod
    def _burst(rate_bytes_per_s: int) -> float:
        return max(1.0, rate_bytes_per_s * BURST_MS / 1000)
