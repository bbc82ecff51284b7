"""The active controller's side of liveness: when a broker counts as gone, and whether it may have a lease.

The states of a broker here, with what moves it:

    fenced    --(UnfenceBroker applied)-->                    live
    live      --(session over, or lease over after its stream broke; `expired` says so)--> fencing
    fencing   --(FenceBroker applied, or a new registration)--> fenced
    live      --(FenceBroker applied: controlled shutdown)-->  fenced

Only a live broker gets leases (`may_lease`). *Fencing* begins the moment `expired` has named the broker: the command
that fences it is under way, so a heartbeat that comes in now must not be answered with a lease, or the next leader
would be elected under a valid one. It ends only with what the log says.

A lease must not make an old image powerful either. A broker that was fenced and came back has lost leaderships that it
may not have heard of yet; it gets a lease only once it has applied the metadata offset at which it became live. After
an election the controller does not know those offsets, so that everyone has to have reached the controller's own.

Why it is safe to fence after a session, and after a lease where the stream broke: see `raftmeta.quorum.leases`. What
remains to be shown is that every lease a broker may hold was asked for by a heartbeat sent no later than the time
from which its session counts. That time is the last heartbeat received, or the election of this controller: a
deposed controller's grants were confirmed by a majority that had not elected this one yet, so they were asked for
before.
"""

from __future__ import annotations

from dataclasses import dataclass

from raftmeta.image import BrokerImage, MetadataImage
from raftmeta.quorum.leases import CLOCK_GRAIN_MS, DRIFT_PPM

PAUSE_SHARE = 0.1
"""Of a session: a controller that looks this much too late has itself stood still."""
GRACE_SHARE = 0.25
"""Of a session: what a broker then gets, once, for the heartbeats that wait in the controller's sockets."""

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
        """If this controller stood still, heartbeats wait in its sockets: let them be read before anyone is fenced."""
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
