"""Alive, started, ready: what an orchestrator asks of a node, and what it does with the answer.

/livez      the event loop turns; anything else is no reason to kill a process, which would only make it worse
/startupz   the node has been ready once; until then the answer says how far recovery is
/readyz     it serves now: registered, recovered, unfenced, with a lease. Never the ISR: a broker that is taken out
            of service because its followers lag makes an outage of a delay
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from broker.clock import Clock

OK: Final = 200
UNAVAILABLE: Final = 503

Answer = tuple[int, dict[str, Any]]
"""Status and JSON document."""


class Health:
    """What a node says when it is asked. Written on the event loop, read from other threads.

    Phases: starting -> recovering -> joining -> serving -> stopping; only forward. `beat` is called by a timer on the
    loop. `why_not` says why a serving node does not serve at the moment; "" when it does.
    """

    def __init__(self, clock: Clock, liveness_timeout_ms: int) -> None:
        self._clock = clock
        self._liveness_timeout_ms = liveness_timeout_ms
        self._beat_ms = clock.monotonic_ms()
        self._phase = "starting"
        self._recovered = 0
        self._of = 0
        self._started = False
        self.why_not: Callable[[], str] = lambda: ""

    def beat(self) -> None:
        """The event loop has turned."""
        self._beat_ms = self._clock.monotonic_ms()

    def recovering(self, recovered: int, of: int) -> None:
        """So many logs of all are recovered."""
        self._phase, self._recovered, self._of = "recovering", recovered, of

    def joining(self) -> None:
        """What is on the disk is read; the cluster is next."""
        self._phase = "joining"

    def serving(self) -> None:
        """The start is over."""
        self._phase, self._started = "serving", True

    def stopping(self) -> None:
        """The stop has begun."""
        self._phase = "stopping"

    def live(self) -> Answer:
        """Answer `/livez`."""
        late_ms = self._clock.monotonic_ms() - self._beat_ms
        alive = late_ms <= self._liveness_timeout_ms
        return (OK if alive else UNAVAILABLE), {"live": alive, "event_loop_last_turned_ms_ago": round(late_ms)}

    def startup(self) -> Answer:
        """Answer `/startupz`."""
        document: dict[str, Any] = {"started": self._started, "phase": self._phase}
        if self._of:
            document |= {"recovered": self._recovered, "of": self._of}
        return (OK if self._started else UNAVAILABLE), document

    def ready(self) -> Answer:
        """Answer `/readyz`."""
        reason = self.why_not() if self._phase == "serving" else f"the node is {self._phase}"
        document: dict[str, Any] = {"ready": not reason}
        if reason:
            document["reason"] = reason
        return (UNAVAILABLE if reason else OK), document
