"""Liveness of brokers: sessions at the active controller, leases at the brokers.

The states of a broker in the controller's `BrokerSessions`, with the events that change them:

    fenced    --(UnfenceBroker applied)-->                    live
    live      --(session over, or lease over after its stream broke; `expired` says so)--> fencing
    fencing   --(FenceBroker applied, or a new registration)--> fenced
    live      --(FenceBroker applied: controlled shutdown)-->  fenced

Only a live broker gets leases (`may_lease`). *Fencing* begins when `expired` has named the broker: the command that
fences it is under way, so no heartbeat is answered with a lease any more. Otherwise the next leader would be elected
while that lease is valid. Only a committed record ends this state.

A lease must not be used with an old image. A broker that was fenced and has returned may not know yet which
leaderships it has lost, so it gets a lease only once it has applied the metadata offset at which it became live. A
newly elected controller does not know those offsets; it asks every broker to reach its own.

It is safe to fence after a session, or after a lease if the stream broke. A session counts from the last heartbeat
received, or from the election of this controller. Every lease that the broker may hold was requested by a heartbeat
sent no later than that: a deposed controller's grants were confirmed by a majority that had not elected this one yet,
so they were requested before its election. The rest is the argument below.

A broker leads a partition while its image says so *and* its lease is valid. A controller that elects another leader
waits until that lease has expired, so two brokers never lead at once, regardless of the network, the scheduler and
deposed controllers. The argument, in order of time:

1. The broker sends a heartbeat at `sent`. A lease granted for it ends `lease_ms` after `sent`.
2. A controller receives it at `received >= sent`, and only then begins a round with a majority of the voters. It
   answers with a lease once that round has confirmed that it still leads.
3. So no later term had a leader when the round began, and a controller that deposes this one is elected after `sent`.
   It gives every broker a full session from its own election, and a session is longer than a lease.
4. The granting controller itself fences the broker one session after the last heartbeat it received, which is at
   least one session after `sent`. Once it has decided to fence, no heartbeat gets a lease (`BrokerSessions`).

Counting from the *answer* would break 3 and 4, because an answer may wait in a socket for any time.

Each clock is compared only with itself, as a duration. Each side allows for an error of DRIFT_PPM: the broker shortens
the lease by it, the controller waits that much longer. The clock must advance while the process is paused, so that a
broker that resumes sees that its lease has expired before it answers a client.
"""

from __future__ import annotations

from dataclasses import dataclass

from raftmeta.image import BrokerImage, MetadataImage

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


PAUSE_SHARE = 0.1
"""Of a session: a controller that looks this much too late has itself stood still."""
GRACE_SHARE = 0.25
"""Of a session: what a broker then gets, once, for the heartbeats that wait in the controller's sockets."""
SILENT_SHARE = 0.5
"""Of a lease, which is longer than two heartbeat intervals."""

assert 0 < PAUSE_SHARE < GRACE_SHARE < 1


@dataclass(slots=True)
class _Session:
    """One broker. Invariant: a fenced broker is not `fencing`."""

    broker_epoch: int
    fenced: bool
    counts_from_ms: float
    """The last heartbeat received, or the election, or when the broker was first seen."""
    lease_from_offset: int
    """The metadata offset that the broker has to have applied before it gets a lease."""
    last_heartbeat_ms: float | None = None
    stream_lost: bool = False
    fencing: bool = False
    extra_ms: float = 0.0
    """Grace after a pause of the controller; once for each heartbeat."""


class BrokerSessions:
    """The sessions of all registered brokers, as one controller in one of its terms sees them.

    `activate` first; then `observe` with every image that a committed change made, in order. Times are of one clock
    that never goes back, in milliseconds.
    """

    def __init__(self, session_timeout_ms: float, lease_ms: float, drift_ppm: int = DRIFT_PPM) -> None:
        assert lease_ms > 0
        assert 0 <= drift_ppm < 1_000_000
        self.session_timeout_ms = session_timeout_ms
        self.lease_ms = lease_ms
        self._lease_over_ms = lease_ms * (1 + drift_ppm / 1_000_000) + CLOCK_GRAIN_MS
        assert self._lease_over_ms < session_timeout_ms, "a lease, drift included, ends before the session does"
        self._sessions: dict[int, _Session] = {}

    def activate(self, now_ms: float, image: MetadataImage) -> None:
        """Begin as the active controller, `now_ms` being no earlier than the election; every broker gets a session."""
        self._sessions.clear()
        self.observe(now_ms, image)

    def observe(self, now_ms: float, image: MetadataImage) -> None:
        """Follow the image: brokers that came, went, registered anew, were fenced or unfenced."""
        for broker_id in self._sessions.keys() - image.brokers.keys():
            del self._sessions[broker_id]
        for broker_id, broker in image.brokers.items():
            session = self._sessions.get(broker_id)
            if session is None or session.broker_epoch != broker.broker_epoch:
                self._sessions[broker_id] = _begin(broker, now_ms, image.offset)
            elif session.fenced != broker.fenced:
                session.fenced = broker.fenced
                session.fencing = False
                session.lease_from_offset = image.offset

    def heartbeat(self, broker_id: int, broker_epoch: int, now_ms: float) -> bool:
        """Take a heartbeat, `now_ms` being when it was read: no earlier than it was sent.

        False: it counts for nothing and gets no lease, ever: the broker is unknown, of another epoch, or about to be
        fenced. True: a lease may follow if `may_lease` says so once a majority round that began after this call
        has confirmed the controller.
        """
        session = self._sessions.get(broker_id)
        if session is None or session.broker_epoch != broker_epoch or session.fencing:
            return False
        session.counts_from_ms = max(session.counts_from_ms, now_ms)
        session.last_heartbeat_ms = session.counts_from_ms
        session.stream_lost = False
        session.extra_ms = 0.0
        return True

    def may_lease(self, broker_id: int, broker_epoch: int, applied_offset: int) -> bool:
        """Return whether a heartbeat that said `applied_offset` may be answered with a lease now."""
        session = self._sessions.get(broker_id)
        return (
            session is not None
            and session.broker_epoch == broker_epoch
            and not session.fenced
            and not session.fencing
            and applied_offset >= session.lease_from_offset
        )

    def is_live(self, broker_id: int, broker_epoch: int, now_ms: float) -> bool:
        """Return whether a broker, fenced or not, has sent a heartbeat within the last session, on a stream that has
        not broken since: it may be unfenced."""
        session = self._sessions.get(broker_id)
        return (
            session is not None
            and session.broker_epoch == broker_epoch
            and not session.fencing
            and not session.stream_lost
            and session.last_heartbeat_ms is not None
            and now_ms < session.last_heartbeat_ms + self.session_timeout_ms
        )

    def is_silent(self, broker_id: int, now_ms: float) -> bool:
        """Return whether a broker that is not fenced has missed a heartbeat: it may be dead.

        None has come since `activate`, its stream is broken, or the last one is older than SILENT_SHARE of a lease.
        """
        session = self._sessions.get(broker_id)
        if session is None or session.fenced:
            return False
        heard_ms = session.last_heartbeat_ms
        return heard_ms is None or session.stream_lost or now_ms - heard_ms > SILENT_SHARE * self.lease_ms

    def silent(self, now_ms: float) -> frozenset[int]:
        """Return all silent brokers."""
        return frozenset(broker_id for broker_id in self._sessions if self.is_silent(broker_id, now_ms))

    def stream_lost(self, broker_id: int, now_ms: float) -> None:
        """The broker's heartbeat stream broke: it need not be waited for longer than a lease may last.

        A heartbeat on another stream makes it a full session again. Call it for the broker's newest stream only.
        """
        session = self._sessions.get(broker_id)
        if session is not None and now_ms >= session.counts_from_ms:
            session.stream_lost = True

    def begin_fencing(self, broker_id: int, broker_epoch: int) -> None:
        """No lease from now on: the controller is about to fence a broker for another reason than silence."""
        session = self._sessions.get(broker_id)
        if session is not None and session.broker_epoch == broker_epoch and not session.fenced:
            session.fencing = True

    def expired(self, now_ms: float, image: MetadataImage) -> list[tuple[int, int]]:
        """Return (broker id, broker epoch) of every broker to be fenced, until the image shows that it is.

        The same broker comes back on every call while its command is under way, or should that have failed.
        """
        self.observe(now_ms, image)
        self._forgive_own_pause(now_ms)
        for session in self._sessions.values():
            if not session.fenced and now_ms >= self._deadline_ms(session):
                session.fencing = True
        return sorted(
            (broker_id, session.broker_epoch) for broker_id, session in self._sessions.items() if session.fencing
        )

    def next_deadline_ms(self) -> float | None:
        """Return when `expired` has to be asked next; None while no session runs."""
        return min(
            (self._deadline_ms(each) for each in self._sessions.values() if not each.fenced and not each.fencing),
            default=None,
        )

    def last_heartbeat_ms(self, broker_id: int) -> float | None:
        """Return when the broker's last heartbeat came; None if none has come since `activate`."""
        session = self._sessions.get(broker_id)
        return None if session is None else session.last_heartbeat_ms

    def forget(self, broker_id: int) -> None:
        """Drop a broker; if the image still has it, `observe` begins a new session."""
        self._sessions.pop(broker_id, None)

    def _deadline_ms(self, session: _Session) -> float:
        allowed_ms = self._lease_over_ms if session.stream_lost else self.session_timeout_ms
        return session.counts_from_ms + allowed_ms + session.extra_ms

    def _forgive_own_pause(self, now_ms: float) -> None:
        """If this controller was paused, heartbeats wait in its sockets: let it read them before it fences brokers."""
        due_ms = self.next_deadline_ms()
        if due_ms is None or now_ms - due_ms < PAUSE_SHARE * self.session_timeout_ms:
            return
        until_ms = now_ms + GRACE_SHARE * self.session_timeout_ms
        for session in self._sessions.values():
            if not session.extra_ms:
                session.extra_ms = max(0.0, until_ms - self._deadline_ms(session))


def _begin(broker: BrokerImage, now_ms: float, offset: int) -> _Session:
    return _Session(
        broker_epoch=broker.broker_epoch, fenced=broker.fenced, counts_from_ms=now_ms, lease_from_offset=offset
    )
