"""The broker's side of liveness: until when it may act as the leader of anything.

A broker leads a partition while the image says so *and* its lease is valid. Whoever would elect somebody else has to
wait until that lease has run out, so the two can never lead at once, whatever the network, the scheduler and a deposed
controller do. Why that holds, in the order in which things happen:

1. The broker sends a heartbeat at `sent`. Its lease, should one be granted for it, ends `lease_ms` after `sent`.
2. A controller receives it at `received >= sent`, and only then begins a round with a majority of the voters. It
   answers with a lease once that round has confirmed that it still leads.
3. So when the round began no later term had a leader, and a controller that deposes this one is elected after `sent`.
   It gives every broker a full session from its own election on, and a session is longer than a lease.
4. The granting controller itself fences the broker a session after the last heartbeat it received: later than `sent`
   by a session at least. Once it has decided to fence, no heartbeat gets a lease any more (`BrokerSessions`).

Counting from the *answer* instead would break 3 and 4: an answer may lie in a socket for any time.

Clocks are compared with themselves only, as durations. Each side mistrusts its own by DRIFT_PPM: the broker takes that
off the lease, the controller waits that much longer. The clock must go on while the process stands still, so that a
broker resumed from a pause finds its lease gone before it answers anybody.
"""

from __future__ import annotations

DRIFT_PPM = 1_000
"""How far a clock may run from true time, in parts of a million; NTP slews by at most 500."""
CLOCK_GRAIN_MS = 1.0
"""Callers may round the time to whole milliseconds."""
MAX_UNANSWERED = 256
"""Heartbeats remembered while their answers are out; the oldest is forgotten, and its lease with it."""

assert 0 <= DRIFT_PPM < 100_000


class BrokerLease:
    """The lease of one broker, over all streams and controllers it has talked to.

    Invariant: `expires_at_ms` never goes back except by `revoke`.
    """

    def __init__(self, drift_ppm: int = DRIFT_PPM) -> None:
        assert 0 <= drift_ppm < 1_000_000
        self._drift = drift_ppm / 1_000_000
        self._sent_at_ms: dict[int, float] = {}
        self._last_sequence = -1
        self._expires_at_ms = float("-inf")

    @property
    def expires_at_ms(self) -> float:
        """When the lease ends on the broker's clock; -inf before the first and after `revoke`."""
        return self._expires_at_ms

    def valid(self, now_ms: float) -> bool:
        """Return whether the broker may act as a leader at this moment. Ask right before an answer leaves."""
        return now_ms < self._expires_at_ms

    def sent(self, sequence: int, now_ms: float) -> None:
        """Note when a heartbeat leaves; call it *before* handing the heartbeat to the network.

        Sequences rise over all streams of the process: a late answer on an old stream is then never taken for
        the answer to a newer heartbeat.
        """
        assert sequence > self._last_sequence, f"heartbeat {sequence} after {self._last_sequence}"
        self._last_sequence = sequence
        self._sent_at_ms[sequence] = now_ms
        if len(self._sent_at_ms) > MAX_UNANSWERED:
            del self._sent_at_ms[next(iter(self._sent_at_ms))]

    def granted(self, sequence: int, lease_ms: float, now_ms: float) -> bool:
        """Take the answer to a heartbeat; `lease_ms` 0 grants nothing and takes nothing away.

        Returns whether the lease is valid now. A lease that arrives later than it lasts changes nothing.
        """
        sent_at_ms = self._sent_at_ms.pop(sequence, None)
        if sent_at_ms is None or lease_ms <= 0:
            return self.valid(now_ms)
        for older in [each for each in self._sent_at_ms if each < sequence]:
            del self._sent_at_ms[older]  # answers come in order on a stream: these had none, or an older stream's
        self._expires_at_ms = max(self._expires_at_ms, sent_at_ms + lease_ms * (1 - self._drift) - CLOCK_GRAIN_MS)
        return self.valid(now_ms)

    def revoke(self) -> None:
        """Give the lease up, and those that were asked for: after a new registration, or when shutting down."""
        self._sent_at_ms.clear()
        self._expires_at_ms = float("-inf")
