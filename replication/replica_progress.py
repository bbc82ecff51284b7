"""What a leader knows of one follower: which life of it, how much it holds, and when it last had everything."""

from __future__ import annotations

from raftlog.errors import InvalidRequestError, StaleBrokerEpoch
from replication.ports import Replica

NEVER_MS = float("-inf")
"""A time before all others."""


class ReplicaProgress:
    """One follower, in one term of its leader.

    States, and what moves between them:

        unheard     -> open    `open`: its log is a prefix of the leader's
        open, shut  -> open    `open` again; by the same life it sets what it holds, lower too (its log was lost),
                               by a later life it begins anew
        open        -> open    `ack` raises what it holds
        open        -> shut    `close`: its stream is gone
        open, shut  -> unheard `forget`: what it held may be gone; earlier lives are still refused

    What it holds counts from the first `open` on, in `shut` as well: it is on its disk. Time is the leader's, in
    monotonic milliseconds.

    "Caught up at time t": it holds everything that the leader's log had at t. That is told by a *mark*, the leader's
    log end at some time. Once the follower holds everything up to the mark it was caught up at the mark's time, and
    the next mark is set. So a follower that is always some records behind a busy leader counts as caught up
    a moment ago, as it should, and one that stands still does not, whatever the number of records.

    Invariants: held_end_offset is None in `unheard` only; the times never go back; a mark lies at or above what the
    follower held when it was set.
    """

    __slots__ = (
        "_mark_end_offset",
        "_mark_ms",
        "broker_epoch",
        "broker_id",
        "held_end_offset",
        "is_open",
        "last_caught_up_ms",
    )

    def __init__(self, broker_id: int) -> None:
        self.broker_id = broker_id
        self.broker_epoch = -1
        """Of the latest life heard of; -1 without one."""
        self.held_end_offset: int | None = None
        """Exclusive: what it holds durably."""
        self.is_open = False
        """Whether a stream serves it."""
        self.last_caught_up_ms = NEVER_MS
        self._mark_end_offset = 0
        self._mark_ms = NEVER_MS

    @property
    def replica(self) -> Replica | None:
        """The life that was heard of last; None in `unheard`."""
        return None if self.held_end_offset is None else Replica(self.broker_id, self.broker_epoch)

    def give_time(self, now_ms: float) -> None:
        """Count it as caught up now, although nothing was heard: it is in the ISR, and the leader is new."""
        self.last_caught_up_ms = max(self.last_caught_up_ms, now_ms)

    def open(self, replica: Replica, held_end_offset: int, leader_end_offset: int, now_ms: float) -> None:
        """Begin to follow it, from what it holds.

        Raises:
            StaleBrokerEpoch: a later life of it has been heard of (KIP-903).
            InvalidRequestError: it claims to hold what the leader does not have.
        """
        self._check_life(replica)
        self._check_end(held_end_offset, leader_end_offset)
        self.broker_epoch = replica.broker_epoch
        self.is_open = True
        self.held_end_offset = held_end_offset
        self._mark_end_offset, self._mark_ms = leader_end_offset, now_ms
        if held_end_offset == leader_end_offset:
            self.last_caught_up_ms = now_ms

    def ack(self, replica: Replica, held_end_offset: int, leader_end_offset: int, now_ms: float) -> bool:
        """Count what it holds; return whether that is more than before.

        Raises:
            StaleBrokerEpoch: a later life of it has been heard of (KIP-903).
            InvalidRequestError: it has not been opened, holds what the leader does not have, or less than before.
        """
        if replica.broker_epoch != self.broker_epoch or not self.is_open:
            self._check_life(replica)
            raise InvalidRequestError(
                f"broker {replica.broker_id} with epoch {replica.broker_epoch} acknowledges what it holds, "
                "but has not opened the partition"
            )
        before = self.held_end_offset
        assert before is not None, "it is open"
        if not before <= held_end_offset <= leader_end_offset:
            self._check_end(held_end_offset, leader_end_offset)
            raise InvalidRequestError(
                f"broker {self.broker_id} acknowledges up to {held_end_offset} after {before}: what is held stays held"
            )
        self.held_end_offset = held_end_offset
        if held_end_offset == leader_end_offset:
            self.last_caught_up_ms = now_ms
        elif held_end_offset >= self._mark_end_offset:
            self.last_caught_up_ms = self._mark_ms
            self._mark_end_offset, self._mark_ms = leader_end_offset, now_ms
        return held_end_offset > before

    def leader_appended(self, end_offset_before: int, end_offset: int, now_ms: float) -> None:
        """Note that the leader's log has grown: whoever held all of it was caught up until now."""
        if self.held_end_offset == end_offset_before:
            self.last_caught_up_ms = now_ms
            self._mark_end_offset, self._mark_ms = end_offset, now_ms

    def close(self, replica: Replica) -> None:
        """Note that the stream of this life is gone; that of another one is no matter."""
        if replica.broker_epoch == self.broker_epoch:
            self.is_open = False

    def forget(self) -> None:
        """Count nothing of it any more until it opens: its disk is gone, or is being replaced."""
        self.is_open = False
        self.held_end_offset = None

    def lags(self, leader_end_offset: int, now_ms: float, lag_time_max_ms: float) -> bool:
        """Whether it lacks something, and has not been caught up for more than `lag_time_max_ms`."""
        return self.held_end_offset != leader_end_offset and now_ms - self.last_caught_up_ms > lag_time_max_ms

    def _check_life(self, replica: Replica) -> None:
        if replica.broker_epoch < self.broker_epoch:
            raise StaleBrokerEpoch(
                f"broker {replica.broker_id} has been heard of with epoch {self.broker_epoch}, "
                f"this is an earlier life, with {replica.broker_epoch}"
            )

    def _check_end(self, held_end_offset: int, leader_end_offset: int) -> None:
        if not 0 <= held_end_offset <= leader_end_offset:
            raise InvalidRequestError(
                f"broker {self.broker_id} says that it holds everything up to {held_end_offset}, "
                f"the leader's log has 0 to {leader_end_offset}"
            )
