"""The lease: whether this broker may serve, and the callbacks that wait until it may again.

Without a lease from the active controller, other brokers may lead this broker's partitions by now, and it may not know.
So it appends nothing, withholds its responses and serves no reads until it has a lease again. The data plane checks
the lease once for each batch or response. `raftmeta.quorum.sessions` has the proof.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from broker.clock import Clock
from raftlog.errors import NotLeader
from raftmeta.quorum.sessions import BrokerLease

logger = logging.getLogger(__name__)

Wake = Callable[[], None]


class Lease(Protocol):
    """The lease as the data plane sees it."""

    def valid(self) -> bool:
        """Whether this broker may serve at this moment; checked right before a response leaves."""
        ...

    def call_when_renewed(self, wake: Wake) -> None:
        """Call `wake` once, when the next lease is granted; registering it twice has no effect."""
        ...

    def stop_waiting(self, wake: Wake) -> None:
        """Remove `wake`, if it still waits."""
        ...


class ServingLease:
    """The lease of this process: heartbeats renew it, the data plane checks it. For the event loop only.

    States: none -> held -> none (it expired, or `revoke`) -> held ...; each transition is logged once.
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
        """Call `wake` once, when the next lease is granted."""
        self._waiting[wake] = None

    def stop_waiting(self, wake: Wake) -> None:
        """Remove `wake`, if it still waits."""
        self._waiting.pop(wake, None)

    def sent(self, sequence: int) -> None:
        """Note that a heartbeat is about to be sent: its lease counts from now."""
        self.check()
        self._lease.sent(sequence, self._clock.monotonic_ms())

    def granted(self, sequence: int, lease_ms: float) -> None:
        """Take a heartbeat's answer; if the lease is valid now, call the waiting callbacks."""
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
        """End the lease, for the reason `why`."""
        self._lease.revoke()
        self._ended(why)

    def give_up(self) -> None:
        """Give up the lease, because this broker is stopping."""
        self._lease.revoke()
        self._held = False

    def check(self) -> None:
        """Log the end of an expired lease."""
        if not self.valid():
            self._ended("it expired: no controller with a majority has answered in time")

    def _ended(self, why: str) -> None:
        if self._held:
            self._held = False
            logger.warning(
                "lease ended, this broker serves nothing until it has a new one: %s",
                why,
                extra={"event": "lease_ended", "reason": why},
            )


def without_lease(what: str) -> NotLeader:
    """Return the refusal of a broker without a lease."""
    return NotLeader(
        f"{what}: this broker has no lease from the controller at the moment, so another broker may lead by now; "
        "refresh metadata and try again"
    )
