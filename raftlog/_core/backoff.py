"""Pauses before retries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from raftlog.errors import BrokerUnavailable, RaftlogError, ThrottlingQuotaExceeded

_JITTER: Final = 0.2
"""The share by which a pause is shortened at random: clients that lost the same broker must not all return at once."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from `first_ms` to `max_ms`, each shortened at random by up to 20 % (KIP-580).

    `random` returns a number in [0, 1); it is a port, so that tests choose it.
    """

    first_ms: float
    max_ms: float
    random: Callable[[], float]

    def pause_ms(self, failures: int) -> float:
        """Return the pause after this number of failures in a row (from 1)."""
        whole = min(self.max_ms, self.first_ms * 2.0 ** min(failures - 1, 30))
        return whole * (1.0 - _JITTER * self.random())


@dataclass(frozen=True, slots=True)
class Pauses:
    """Two backoffs: after refusals of a broker, and after connections that broke or failed.

    A broker that refuses needs time. An attempt to connect to a restarting broker costs nothing, and frequent attempts
    find it soon.
    """

    retry: Backoff
    reconnect: Backoff

    def after_ms(self, error: RaftlogError | None, failures: int) -> float:
        """Return the pause after this number of failures in a row (from 1), of which `error` is the last."""
        backoff = self.reconnect if isinstance(error, BrokerUnavailable) else self.retry
        pause_ms = backoff.pause_ms(failures)
        if isinstance(error, ThrottlingQuotaExceeded):
            pause_ms = max(pause_ms, error.throttle_time_ms)
        return pause_ms


@dataclass(frozen=True, slots=True)
class Pace:
    """The pauses of a search for something missing: each is a share of the time that it has been missing.

    So the search ends late by at most that share of the time, whether it takes 100 ms or a minute, and attempts become
    rarer the longer it lasts. Pauses are shortened at random, as those of a `Backoff`.
    """

    random: Callable[[], float]
    share: float = 1 / 12
    first_ms: float = 20.0
    max_ms: float = 1000.0

    def pause_ms(self, missing_ms: float) -> float:
        """Return the pause before the next attempt."""
        whole = min(self.max_ms, max(self.first_ms, missing_ms * self.share))
        return whole * (1.0 - _JITTER * self.random())
