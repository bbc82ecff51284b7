"""The answers to an orchestrator's probes: alive, started, ready.

/livez      the event loop turns; no other problem is solved by killing the process
/startupz   the node has been ready once; until then the answer shows the progress of the recovery, and what the start
            waits for
/readyz     the node serves now: registered, recovered, unfenced, with a lease. Independent of the ISR: taking a broker
            out of service because its followers lag would turn a delay into an outage
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
    """A node's state for probes. Written on the event loop, and by the thread that recovers logs;
    read from other threads.

    Phases: starting -> recovering -> joining -> serving -> stopping; only forward. A timer on the loop calls `beat`.
    `why_not` returns why the node does not serve at the moment, or what its start waits for; "" if there is no reason.
    """

    def __init__(self, clock: Clock, liveness_timeout_ms: int) -> None:
        self._clock = clock
        self._liveness_timeout_ms = liveness_timeout_ms
        self._beat_ms = clock.monotonic_ms()
        self._phase = "starting"
        self._recovery: dict[str, int] = {}
        self._started = False
        self.why_not: Callable[[], str] = lambda: ""

    def beat(self) -> None:
        """Note that the event loop has turned."""
        self._beat_ms = self._clock.monotonic_ms()

    def recovering(self, identified: int, recovered: int, of: int) -> None:
        """Note that of `of` logs the metadata of `identified` is read, and `recovered` are recovered."""
        self._phase = "recovering"
        self._recovery = {"identified": identified, "recovered": recovered, "of": of}

    @property
    def recovery(self) -> dict[str, int]:
        """The numbers that `recovering` noted last, by its parameters; empty: none yet."""
        return self._recovery

    def joining(self) -> None:
        """Note that the logs are recovered and the node joins the cluster."""
        self._phase = "joining"

    def serving(self) -> None:
        """Note that the start is complete."""
        self._phase, self._started = "serving", True

    def stopping(self) -> None:
        """Note that the stop has begun."""
        self._phase = "stopping"

    def live(self) -> Answer:
        """Answer `/livez`."""
        late_ms = self._clock.monotonic_ms() - self._beat_ms
        alive = late_ms <= self._liveness_timeout_ms
        return (OK if alive else UNAVAILABLE), {"live": alive, "event_loop_last_turned_ms_ago": round(late_ms)}

    def startup(self) -> Answer:
        """Answer `/startupz`."""
        document: dict[str, Any] = {"started": self._started, "phase": self._phase, **self._recovery}
        if not self._started and self._phase != "stopping" and (reason := self.why_not()):
            document["waiting_for"] = reason
        return (OK if self._started else UNAVAILABLE), document

    def ready(self) -> Answer:
        """Answer `/readyz`."""
        reason = "" if self._phase == "stopping" else self.why_not()
        if self._phase != "serving":
            reason = f"the node is {self._phase}" + (f": {reason}" if reason else "")
        document: dict[str, Any] = {"ready": not reason}
        if reason:
            document["reason"] = reason
        return (UNAVAILABLE if reason else OK), document
