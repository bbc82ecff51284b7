"""The audit log: refusals, failed logins, changes of users, ACLs and quotas. Logger `raftlog.audit`.

Refusals and failed logins are logged at level info, allowed requests at debug. Every changed user, ACL or quota has
its own line at info. The same refusal is logged once a minute, and so are the failed logins of one network, whatever
names they use. Refusals and failed logins each have LINES_PER_S; the next line after a gap counts the lines left out. A
principal that uses up the shared lines does not silence others: each principal also has OWN_LINES_PER_S of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from broker.clock import Clock
from broker.security.caller import caller, network_of
from raftlog.errors import RaftlogError

logger = logging.getLogger("raftlog.audit")

REPEAT_MS: Final = 60_000
LINES_PER_S: Final = 5
BURST_LINES: Final = 100
OWN_LINES_PER_S: Final = 0.1
OWN_BURST_LINES: Final = 10
"""Lines reserved for one principal."""
RESERVED_LINES_PER_S: Final = 20.0
RESERVED_BURST_LINES: Final = 500
"""Bound on the reserved lines of all principals together."""
MAX_REMEMBERED: Final = 10_000
MAX_PRINCIPALS: Final = 1_000
MAX_SHOWN: Final = 255
"""Characters shown of a name. No valid name is longer, but a client may send one."""
MAX_CHANGE: Final = 1_000
"""Characters shown of a changed user, ACL or quota."""
assert OWN_BURST_LINES < BURST_LINES < RESERVED_BURST_LINES

Fact = tuple[str, ...]


class Audit:
    """Writes the audit log of one broker."""

    def __init__(self, clock: Clock) -> None:
        self._refusals = _Lines(clock)
        self._failed_logins = _Lines(clock)

    @property
    def shows_allowed(self) -> bool:
        """Whether allowed requests are logged."""
        return logger.isEnabledFor(logging.DEBUG)

    def allowed(self, principal: str, host: str, operation: str, resource_type: str, resource: str) -> None:
        """Log an allowed request."""
        fact = (principal, host, operation, resource_type, resource[:MAX_SHOWN])
        _write(logging.DEBUG, "allowed", fact, allowed=True)

    def refused(self, principal: str, host: str, operation: str, resource_type: str, resource: str) -> None:
        """Log a refused request."""
        fact = (principal, host, operation, resource_type, resource[:MAX_SHOWN])
        self._refusals.write(fact, fact, principal)

    def not_authenticated(self, user: str, host: str, mechanism: str) -> None:
        """Log a wrong name or password; limited by network, since a client may use any number of names."""
        fact = (f"User:{user[:MAX_SHOWN]}", host, "AUTHENTICATE", "USER", mechanism)
        self._failed_logins.write(fact, (network_of(host), mechanism))


def note_change(fact: Fact, *, is_certain: bool) -> None:
    """Log a change of a user, an ACL or a quota: (principal, host, operation, resource type, resource).

    Not `is_certain`: the change was proposed, and this broker does not know whether it was committed.
    """
    principal, host, operation, resource_type, resource = fact
    fact = (principal, host, operation, resource_type, resource[:MAX_CHANGE])
    _write(logging.INFO, "changed" if is_certain else "may have been changed", fact, allowed=True)


@contextmanager
def changes_noted(facts: Iterable[Fact]) -> Iterator[None]:
    """Log the changes that the block proposes, also if the block ends without knowing whether they were committed.

    The outcome is unknown after a retriable error, and if the caller goes away or its deadline passes. A refused change
    has no line.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, RaftlogError) or error.retriable:
            _note(facts, is_certain=False)
        raise
    _note(facts, is_certain=True)


def _note(facts: Iterable[Fact], *, is_certain: bool) -> None:
    for fact in facts:
        note_change(fact, is_certain=is_certain)


class _Budget:
    """A token bucket of log lines: `burst` at once, `per_s` a second."""

    __slots__ = ("_burst", "_left", "_per_s", "_refilled_ms")

    def __init__(self, per_s: float, burst: int, now_ms: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = float(burst)
        self._refilled_ms = now_ms

    def take(self, now_ms: float) -> bool:
        """Take a line; return False if none is left."""
        self._left = min(self._burst, self._left + (now_ms - self._refilled_ms) / 1_000 * self._per_s)
        self._refilled_ms = now_ms
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _Lines:
    """Lines of one kind, each at most once a minute, and bounded in number."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        now_ms = clock.monotonic_ms()
        self._written_ms: dict[Fact, float] = {}
        self._repeated: dict[Fact, int] = {}
        self._shared = _Budget(LINES_PER_S, BURST_LINES, now_ms)
        self._reserved = _Budget(RESERVED_LINES_PER_S, RESERVED_BURST_LINES, now_ms)
        self._own: dict[str, _Budget] = {}
        """Budgets of principals; the one that wrote last comes last."""
        self._left_out = 0

    def write(self, fact: Fact, key: Fact, principal: str | None = None) -> None:
        """Write a line, unless one with this key was written lately or no line is left to `principal`."""
        now_ms = self._clock.monotonic_ms()
        written_ms = self._written_ms.get(key)
        if written_ms is not None and now_ms - written_ms < REPEAT_MS:
            self._repeated[key] = self._repeated.get(key, 0) + 1
            return
        if not self._take(principal, now_ms):
            self._left_out += 1
            return
        if len(self._written_ms) >= MAX_REMEMBERED:
            self._written_ms.clear()
            self._repeated.clear()
        self._written_ms[key] = now_ms
        more = {"repeated": self._repeated.pop(key, 0), "left_out": self._left_out}
        self._left_out = 0
        _write(logging.INFO, "refused", fact, allowed=False, **{name: count for name, count in more.items() if count})

    def _take(self, principal: str | None, now_ms: float) -> bool:
        """Take a shared line, or else a reserved one; either counts as one of the principal's own."""
        if principal is None:
            return self._shared.take(now_ms)
        own = self._own.pop(principal, None) or _Budget(OWN_LINES_PER_S, OWN_BURST_LINES, now_ms)
        if len(self._own) >= MAX_PRINCIPALS:
            del self._own[next(iter(self._own))]
        self._own[principal] = own
        is_own = own.take(now_ms)
        return self._shared.take(now_ms) or (is_own and self._reserved.take(now_ms))


def _write(level: int, message: str, fact: Fact, *, allowed: bool, **counts: int) -> None:
    principal, host, operation, resource_type, resource = fact
    client_id = caller.get().client_id  # the client's own word: the console's, a tool's
    fields = {
        "principal": principal,
        "host": host,
        **({"client_id": client_id} if client_id else {}),
        "operation": operation,
        "resource_type": resource_type,
        "resource": resource,
        "allowed": allowed,
        **counts,
    }
    logger.log(level, message, extra=fields)
