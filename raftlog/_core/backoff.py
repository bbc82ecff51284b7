"""How long to wait before trying again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raftlog.errors import BrokerUnavailable, RaftlogError


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
        return whole * (1.0 - 0.2 * self.random())


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
