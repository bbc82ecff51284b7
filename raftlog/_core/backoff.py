"""How long to wait before trying again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from raftlog.errors import BrokerUnavailable, RaftlogError

_JITTER: Final = 0.2
"""Clients that lost the same broker do not come back in step."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential from `first_ms` to `max_ms`, each pause shortened at random by up to 20 % (KIP-580).

    `random` returns a number in [0, 1); it is a port, so that tests decide.
    """

    first_ms: float
    max_ms: float
    random: Callable[[], float]

    def pause_ms(self, failures: int) -> float:
        """Return the pause after the given number of failures in a row (from 1)."""
        whole = min(self.max_ms, self.first_ms * 2.0 ** min(failures - 1, 30))
        return whole * (1.0 - _JITTER * self.random())


@dataclass(frozen=True, slots=True)
class Pauses:
    """Two backoffs: for what a broker refused, and for connections that broke or did not come about.

    A broker that refuses wants to be left alone for a while; one that is being started again costs nothing to try,
    and should not be found late.
    """

    retry: Backoff
    reconnect: Backoff

    def after_ms(self, error: RaftlogError | None, failures: int) -> float:
        """Return the pause after the given number of failures in a row (from 1), the last one being `error`."""
        backoff = self.reconnect if isinstance(error, BrokerUnavailable) else self.retry
        return backoff.pause_ms(failures)


@dataclass(frozen=True, slots=True)
class Pace:
    """How often to look for what is missing, while it is: each pause is a share of the time that it has been missing.

    So it is found late by a share of what it took anyway, whether that was 100 ms or a minute, and what stays away
    costs less and less. Shortened at random as a `Backoff` is.
    """

    random: Callable[[], float]
    share: float = 1 / 12
    first_ms: float = 20.0
    max_ms: float = 1000.0

    def pause_ms(self, missing_ms: float) -> float:
        """Return the pause before the next look."""
        whole = min(self.max_ms, max(self.first_ms, missing_ms * self.share))
        return whole * (1.0 - _JITTER * self.random())
