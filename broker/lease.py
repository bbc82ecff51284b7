"""Whether this broker may serve at all, and who waits until it may again.

A broker without a lease from the active controller may have been replaced as the leader of everything it leads, without
having heard of it. So it appends nothing, answers nothing that it owes and reads nothing for anybody, until a lease
comes. `raftmeta.quorum.leases` has the proof; here is what the data plane asks, once for each batch or answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from broker.clock import Clock
from raftlog.errors import NotLeader
from raftmeta.quorum.leases import BrokerLease

logger = logging.getLogger(__name__)

Wake = Callable[[], None]


class Lease(Protocol):
    """What the data plane knows of the lease."""

    def valid(self) -> bool:
        """Whether this broker may serve at this moment; asked right before something leaves."""
        ...

    def call_when_renewed(self, wake: Wake) -> None:
        """Call `wake` once, when a lease has come; asking again before that changes nothing."""
        ...

    def stop_waiting(self, wake: Wake) -> None:
        """Forget `wake`, if it still waits."""
        ...


class ServingLease:
    """The lease of this process: heartbeats fill it, the data plane asks it. Lives on the event loop.

    States: none -> held -> none (it ran out, or `revoke`) -> held ...; each is logged once.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lease = BrokerLease()
        self._waiting: dict[Wake, None] = {}
        self._held = False

    def valid(self) -> bool:
        """Whether this broker may serve at this moment."""
        return self._lease.valid(self._clock.monotonic_ms())

    def call_when_renewed(self, wake: Wake) -> None:
        """Call `wake` once, when a lease has come."""
        self._waiting[wake] = None

    def stop_waiting(self, wake: Wake) -> None:
        """Forget `wake`."""
        self._waiting.pop(wake, None)

    def sent(self, sequence: int) -> None:
        """Note that a heartbeat is about to leave."""
        self.check()
        self._lease.sent(sequence, self._clock.monotonic_ms())

    def granted(self, sequence: int, lease_ms: float) -> None:
        """Take what a heartbeat was answered with, and wake who waits if the lease is valid now."""
        if not self._lease.granted(sequence, lease_ms, self._clock.monotonic_ms()):
            return
        if not self._held:
            self._held = True
            logger.info(
                "lease granted: this broker serves", extra={"event": "lease_granted", "waiting": len(self._waiting)}
            )
        waiting, self._waiting = self._waiting, {}
        for wake in waiting:
            wake()

    def revoke(self, why: str) -> None:
        """Take the lease away."""
        self._lease.revoke()
        self._ended(why)

    def give_up(self) -> None:
        """Give the lease up: this broker is stopping."""
        self._lease.revoke()
        self._held = False

    def check(self) -> None:
        """Say so when the lease has run out; asked now and then, for the log only."""
        if not self.valid():
            self._ended("it ran out: no controller with a majority has answered in time")

    def _ended(self, why: str) -> None:
        if self._held:
            self._held = False
            logger.warning(
                "lease ended, nothing is served until there is a new one: %s",
                why,
                extra={"event": "lease_ended", "reason": why},
            )


def without_lease(what: str) -> NotLeader:
    """Return the refusal of a broker that does not know whether it still leads."""
    return NotLeader(
        f"{what}: this broker has no lease from the controller at the moment, so another one may lead by now; "
        "refresh metadata and try again"
    )
