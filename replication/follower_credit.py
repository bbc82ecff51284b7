"""How much a follower lets its leader send ahead: one window for each kind of records. Pure.

    kind        for                                             goes back
    live        partitions whose ISR this broker is in          once it is appended
    catch-up    the others                                      once it is held, or nothing can be said of it any more
    throttled   those of the others that are throttled          in pieces, as fast as the throttle allows

What waits for the disk while catching up delays every other fsync, so it is kept small. A log whose flush does not come
back would keep all of the catch-up credit: `stalled` names it, and it is to be closed until it is held. It is seldom
alone on its disk, so the others have less time from then on.
"""

from __future__ import annotations

from typing import Final

from raftlog.v1 import replication_pb2
from replication.followed import Followed
from replication.token_bucket import TokenBucket

RETURN_FRACTION: Final = 4
"""Credit goes back with an ack, or alone once it is this part of the window."""
STALLED_MS: Final = 500.0
"""A flush that takes longer than this keeps credit from others no longer."""
STALLED_TOO_MS: Final = 100.0
"""The same while there is one already."""
LOOK_AGAIN_MS: Final = 500.0
"""A wait for the throttle is never longer than this, since the rate may have changed meanwhile."""
UNTHROTTLED_PIECE_BYTES: Final = 64 << 10
"""Granted to a partition that was opened as a throttled one once there is no rate any more."""


class FollowerCredit:
    """Of one stream; `throttle` is shared by all of them (`follower.replication.throttled.rate`).

    Invariant: `_unheld_since` has exactly those that have something unheld, the longest wait first.
    """

    def __init__(self, live_window: int, catch_up_window: int, throttle: TokenBucket) -> None:
        self._windows = live_window, catch_up_window
        self._throttle = throttle
        self._live = 0
        self._catch_up = 0
        self._unheld_since: dict[Followed, float] = {}
        self._throttled: set[Followed] = set()
        self._throttled_left = 0
        """Granted and not used; below zero when a batch was larger than what was granted."""
        self._has_new_deadline = False
        self._patience_ms = STALLED_MS

    @property
    def is_limited(self) -> bool:
        """Whether throttled partitions have a rate to keep to."""
        return self._throttle.rate_bytes_per_s is not None

    def begin(self, request: replication_pb2.ReplicateRequest) -> None:
        """Grant the windows of a new stream; nothing is left of the former one."""
        self._live = self._catch_up = self._throttled_left = 0
        request.live_credit_bytes, request.catch_up_credit_bytes = self._windows

    def opened(self, followed: Followed) -> None:
        """Grant something for it too, if it is throttled."""
        if followed.throttled:
            self._throttled.add(followed)
            self._has_new_deadline = True

    def over(self, followed: Followed) -> None:
        """It has no subscription any more: nothing will be heard of what was sent on it."""
        self._throttled.discard(followed)
        self._catch_up += followed.forget_unheld()
        self._unheld_since.pop(followed, None)

    def received(
        self, followed: Followed | None, head: replication_pb2.ReplicaFrame, size_bytes: int, now_ms: float
    ) -> None:
        """Count records that were taken, or passed over with None or a partition that has no subscription now."""
        counts = size_bytes if head.catch_up and not head.throttled else 0
        if not head.catch_up:
            self._live += size_bytes
            return
        if head.throttled:
            self._has_new_deadline = True
            self._throttled_left -= size_bytes
            self._throttle.take(max(0, min(size_bytes, -self._throttled_left)), now_ms)
        if followed is None or not followed.note_unheld(counts):
            self._catch_up += counts
        else:
            self._has_new_deadline = self._has_new_deadline or not self._unheld_since
            self._unheld_since.setdefault(followed, now_ms)

    def held(self, followed: Followed, held_end_offset: int, now_ms: float) -> None:
        """Give back what is held now; for the rest the wait begins anew, since the disk is at work."""
        if self._unheld_since.pop(followed, None) is not None:
            self._catch_up += followed.take_held(held_end_offset)
            if followed.unheld:
                self._unheld_since[followed] = now_ms

    def stalled(self, now_ms: float, *, beside_others: bool) -> list[Followed]:
        """Return those whose flush takes too long; `beside_others` that were closed for it and still wait."""
        self._patience_ms = STALLED_TOO_MS if beside_others else STALLED_MS
        stalled = []
        for followed, since_ms in self._unheld_since.items():
            if now_ms < since_ms + self._patience_ms:
                break
            stalled.append(followed)
        return stalled

    def put_into(self, request: replication_pb2.ReplicateRequest, now_ms: float) -> None:
        """Give credit back, if it is enough to be worth a request or there is one anyway."""
        waits_for_throttle = self._throttled and self._throttled_left <= 0
        if waits_for_throttle and self._throttle.ready_at_ms(now_ms) <= now_ms:
            piece = self._throttle.piece_bytes or UNTHROTTLED_PIECE_BYTES
            self._throttle.take(piece, now_ms)
            request.throttled_credit_bytes = piece - self._throttled_left
            self._throttled_left = piece
        goes_anyway = request.ByteSize() > 0
        if self._live and (goes_anyway or self._live >= self._windows[0] // RETURN_FRACTION):
            request.live_credit_bytes += self._live
            self._live = 0
        if self._catch_up and (goes_anyway or self._catch_up >= self._windows[1] // RETURN_FRACTION):
            request.catch_up_credit_bytes += self._catch_up
            self._catch_up = 0

    def take_is_due(self) -> bool:
        """Return whether something is worth a request now, or has a deadline that was not there the last time."""
        live, catch_up = self._windows
        had_new_deadline, self._has_new_deadline = self._has_new_deadline, False
        return (
            had_new_deadline
            or (self._live > 0 and self._live >= live // RETURN_FRACTION)
            or (self._catch_up > 0 and self._catch_up >= catch_up // RETURN_FRACTION)
        )

    def deadlines_ms(self, now_ms: float) -> list[float]:
        """Return when there is something to do although nothing happens."""
        deadlines = []
        if self._unheld_since:
            deadlines.append(next(iter(self._unheld_since.values())) + self._patience_ms)
        if self._throttled and self._throttled_left <= 0:
            deadlines.append(min(self._throttle.ready_at_ms(now_ms), now_ms + LOOK_AGAIN_MS))
        return deadlines

    def lost(self) -> None:
        """The stream is over, and every subscription with it."""
        for followed in self._unheld_since:
            followed.forget_unheld()
        self._unheld_since.clear()
        self._throttled.clear()
        self._live = self._catch_up = self._throttled_left = 0
