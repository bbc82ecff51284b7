"""The audit log: who was refused what, who could not authenticate, who changed users and ACLs. Logger `raftlog.audit`.

What is refused stands there at level info, what is allowed at debug. Each user and ACL that is changed has a line at
info, whoever does it and however many they are. A client that is refused the same again and again
gets a line a minute, and so does a network whose logins fail, with whatever names. Refusals and failed logins each have
LINES_PER_S, beyond which there are none, and the next one says how many there would have been. Where somebody is
refused so much that nothing is left of that, others have lines of their own, OWN_LINES_PER_S each.
"""

from __future__ import annotations

import logging
from ipaddress import IPv6Address, ip_address
from typing import Final

from broker.clock import Clock

logger = logging.getLogger("raftlog.audit")

REPEAT_MS: Final = 60_000
LINES_PER_S: Final = 5
BURST_LINES: Final = 100
OWN_LINES_PER_S: Final = 0.1
OWN_BURST_LINES: Final = 10
"""Lines about one principal that no other can take away."""
RESERVED_LINES_PER_S: Final = 20.0
RESERVED_BURST_LINES: Final = 500
"""All those of all principals."""
MAX_REMEMBERED: Final = 10_000
MAX_PRINCIPALS: Final = 1_000
MAX_SHOWN: Final = 255
"""Characters of a name; there are none longer, but clients may ask for some."""
MAX_CHANGE: Final = 1_000
"""Characters of what was changed."""
assert OWN_BURST_LINES < BURST_LINES < RESERVED_BURST_LINES

Fact = tuple[str, ...]


def network_of(host: str) -> str:
    """Return what counts as one address where somebody might have many: of IPv6 the /64, else the address itself."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    return f"{IPv6Address(int(address) >> 64 << 64)}/64" if isinstance(address, IPv6Address) else host


class Audit:
    """Writes the audit log of one broker."""

    def __init__(self, clock: Clock) -> None:
        self._refusals = _Lines(clock)
        self._failed_logins = _Lines(clock)

    @property
    def shows_allowed(self) -> bool:
        """Whether somebody reads what is allowed."""
        return logger.isEnabledFor(logging.DEBUG)

    def allowed(self, principal: str, host: str, operation: str, resource_type: str, resource: str) -> None:
        """Note what somebody may do."""
        fact = (principal, host, operation, resource_type, resource[:MAX_SHOWN])
        _write(logging.DEBUG, "allowed", fact, allowed=True)

    def refused(self, principal: str, host: str, operation: str, resource_type: str, resource: str) -> None:
        """Note what somebody may not do."""
        fact = (principal, host, operation, resource_type, resource[:MAX_SHOWN])
        self._refusals.write(fact, fact, principal)

    def not_authenticated(self, user: str, host: str, mechanism: str) -> None:
        """Note that somebody gave a wrong name or password; names cost nothing, so each does not get its line."""
        fact = (f"User:{user[:MAX_SHOWN]}", host, "AUTHENTICATE", "USER", mechanism)
        self._failed_logins.write(fact, (network_of(host), mechanism))


def note_change(fact: Fact, *, is_certain: bool) -> None:
    """Note a change of a user or an ACL, as (principal, host, operation, resource type, resource).

    Not `is_certain`: it was asked for, and nobody here heard whether it was done.
    """
    principal, host, operation, resource_type, resource = fact
    fact = (principal, host, operation, resource_type, resource[:MAX_CHANGE])
    _write(logging.INFO, "changed" if is_certain else "may have been changed", fact, allowed=True)


class _Budget:
    """Lines that may be written, so many at once and so many a second."""

    __slots__ = ("_burst", "_left", "_per_s", "_refilled_ms")

    def __init__(self, per_s: float, burst: int, now_ms: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = float(burst)
        self._refilled_ms = now_ms

    def take(self, now_ms: float) -> bool:
        """Take a line; False: there is none."""
        self._left = min(self._burst, self._left + (now_ms - self._refilled_ms) / 1_000 * self._per_s)
        self._refilled_ms = now_ms
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _Lines:
    """Lines of one kind: none twice a minute, and not too many."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        now_ms = clock.monotonic_ms()
        self._written_ms: dict[Fact, float] = {}
        self._repeated: dict[Fact, int] = {}
        self._shared = _Budget(LINES_PER_S, BURST_LINES, now_ms)
        self._reserved = _Budget(RESERVED_LINES_PER_S, RESERVED_BURST_LINES, now_ms)
        self._own: dict[str, _Budget] = {}
        """Who has had a line last stands last."""
        self._left_out = 0

    def write(self, fact: Fact, key: Fact, whom: str | None = None) -> None:
        """Write a line, unless there was one with that key, or there are too many; `whom` has lines of his own."""
        now_ms = self._clock.monotonic_ms()
        written_ms = self._written_ms.get(key)
        if written_ms is not None and now_ms - written_ms < REPEAT_MS:
            self._repeated[key] = self._repeated.get(key, 0) + 1
            return
        if not self._take(whom, now_ms):
            self._left_out += 1
            return
        if len(self._written_ms) >= MAX_REMEMBERED:
            self._written_ms.clear()
            self._repeated.clear()
        self._written_ms[key] = now_ms
        more = {"repeated": self._repeated.pop(key, 0), "left_out": self._left_out}
        self._left_out = 0
        _write(logging.INFO, "refused", fact, allowed=False, **{name: count for name, count in more.items() if count})

    def _take(self, whom: str | None, now_ms: float) -> bool:
        """Take a line of all, which is one of his own as well; where there is none, one of his own that is left."""
        if whom is None:
            return self._shared.take(now_ms)
        own = self._own.pop(whom, None) or _Budget(OWN_LINES_PER_S, OWN_BURST_LINES, now_ms)
        if len(self._own) >= MAX_PRINCIPALS:
            del self._own[next(iter(self._own))]
        self._own[whom] = own
        is_own = own.take(now_ms)
        return self._shared.take(now_ms) or (is_own and self._reserved.take(now_ms))


def _write(level: int, message: str, fact: Fact, *, allowed: bool, **counts: int) -> None:
    principal, host, operation, resource_type, resource = fact
    fields = {
        "principal": principal,
        "host": host,
        "operation": operation,
        "resource_type": resource_type,
        "resource": resource,
        "allowed": allowed,
        **counts,
    }
    logger.log(level, message, extra=fields)
