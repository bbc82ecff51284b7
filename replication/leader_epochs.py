"""Which leader epoch wrote which offsets, and where the logs of two replicas diverge.

An entry (epoch, start offset) of the cache says that the leader of `epoch` appended the records from `start offset` up
to the next entry's. Followers truncate by these entries, never by the high watermark, which they hear late (KIP-101,
KIP-279).

Only epochs with records have entries. An epoch whose leader appended nothing leaves no trace in the log, so every
replica derives the same entries from the same bytes. The answer to a question for such an epoch names the largest known
epoch below it; otherwise the dialogue below might never end (KAFKA-20961).

The dialogue, until the leader accepts:

    follower                                         leader
    my log ends at `fetch_offset`, its last  ----->  `check_prefix`: my record before that offset is of that epoch,
    record is of `last_fetched_epoch`                so your log is a prefix of mine: Accepted
                                             <-----  or: Diverging(largest epoch of mine not above it, where it ends)
    `truncation_offset`: the lesser of that
    end and my own end of that epoch
    truncate, ask again                      ----->  ...

Why an equal epoch at an equal offset is enough: an epoch has one leader, which assigns each offset once and in order,
and a follower appends only to a log that was found to be a prefix. So two logs with the same epoch at an offset are
equal up to there. Why the dialogue ends: every answer but the last makes the follower's log shorter, by at least one of
its epochs or down to the end that the leader names (KIP-101, KIP-279, KIP-595).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from raftlog.errors import InvalidRequestError
from replication.ports import Accepted, Diverging, Opening, OutOfRange


class EpochEntry(NamedTuple):
    """`start_offset` is the first offset written in `leader_epoch`."""

    leader_epoch: int
    start_offset: int


class OffsetAndEpoch(NamedTuple):
    """`end_offset` (exclusive) of `leader_epoch`."""

    end_offset: int
    leader_epoch: int


class LeaderEpochCache:
    """The entries of one log, ascending in both epoch and start offset."""

    def __init__(self, entries: Iterable[EpochEntry] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        for entry in entries:
            self._epochs.append(entry.leader_epoch)
            self._starts.append(entry.start_offset)
        self._check_invariants()

    @property
    def entries(self) -> tuple[EpochEntry, ...]:
        return tuple(map(EpochEntry, self._epochs, self._starts))

    @property
    def latest_epoch(self) -> int:
        """Epoch of the last record, or -1 without records."""
        return self._epochs[-1] if self._epochs else -1

    def assign(self, leader_epoch: int, start_offset: int) -> bool:
        """Note that the record at `start_offset` is of `leader_epoch`; return whether that made a new entry.

        Called for the batch at the log's end. Epochs in a log never go back.
        """
        assert leader_epoch >= self.latest_epoch, f"epoch {leader_epoch} after epoch {self.latest_epoch}"
        if leader_epoch == self.latest_epoch:
            return False
        self.truncate_from_end(start_offset)
        if leader_epoch == self.latest_epoch:
            return False
        self._epochs.append(leader_epoch)
        self._starts.append(start_offset)
        self._check_invariants()
        return True

    def epoch_for(self, offset: int) -> int:
        """Return the epoch that wrote `offset`, or -1 when it is below every entry."""
        index = bisect_right(self._starts, offset) - 1
        return self._epochs[index] if index >= 0 else -1

    def end_offset_for(self, leader_epoch: int, log_end_offset: int) -> OffsetAndEpoch | None:
        """Return where `leader_epoch` ended, or None if it predates this cache.

        Exclusive: the first offset *not* written in that epoch. For an epoch without records the answer is the largest
        epoch below it, with its end. The follower truncates to the lesser of the answer and its own end for the
        answer's epoch, and asks again (KIP-101, KIP-279).
        """
        index = bisect_right(self._epochs, leader_epoch)
        if index == 0:
            return None
        end_offset = self._starts[index] if index < len(self._starts) else log_end_offset
        return OffsetAndEpoch(end_offset, self._epochs[index - 1])

    def truncate_from_end(self, end_offset: int) -> bool:
        """Drop entries that start at or after `end_offset`; return whether any did."""
        keep = bisect_left(self._starts, end_offset)
        dropped = keep < len(self._starts)
        del self._epochs[keep:], self._starts[keep:]
        return dropped

    def truncate_from_start(self, start_offset: int) -> bool:
        """Forget what lies below `start_offset`; return whether anything changed.

        The entry that covers `start_offset` stays and then starts there, so that its epoch remains known.
        """
        first = bisect_right(self._starts, start_offset) - 1
        if first < 0 or (first == 0 and self._starts[0] == start_offset):
            return False
        del self._epochs[:first], self._starts[:first]
        self._starts[0] = start_offset
        self._check_invariants()
        return True

    def clear(self) -> None:
        self._epochs.clear()
        self._starts.clear()

    def _check_invariants(self) -> None:
        pairs = zip(self._epochs, self._starts, self._epochs[1:], self._starts[1:], strict=False)
        assert all(e1 < e2 and s1 < s2 for e1, s1, e2, s2 in pairs), f"entries not ascending: {self.entries}"


NO_EPOCH = -1
"""The last epoch of a log without records."""


def check_prefix(
    cache: LeaderEpochCache,
    log_start_offset: int,
    log_end_offset: int,
    fetch_offset: int,
    last_fetched_epoch: int,
    *,
    leader_epoch: int | None = None,
) -> Opening:
    """Return whether a log that ends at `fetch_offset`, with a record of `last_fetched_epoch`, is a prefix of this one.

    The first three arguments describe this log, the next two the other one. `leader_epoch`: the epoch in which this
    broker leads, so that no record of a later epoch exists; None: this broker does not know that.

        fetch_offset below the log start        OutOfRange: the records between were deleted
        no records (-1), within this log        Accepted: nothing contradicts
        no records (-1), above the log end      OutOfRange: starting over loses nothing
        at the log start, an epoch before all   Accepted: all records that could contradict were deleted
        same epoch at fetch_offset - 1          Accepted
        otherwise                               Diverging(epoch, end): the largest epoch here that is not above
                                                the follower's, or (-1, log start) without one

    Raises:
        InvalidRequestError: a negative offset, or an epoch below -1 or above `leader_epoch`.
    """
    if fetch_offset < 0 or last_fetched_epoch < NO_EPOCH:
        raise InvalidRequestError(
            f"no log ends at offset {fetch_offset} with a record of epoch {last_fetched_epoch}; "
            f"offsets are at least 0, epochs at least {NO_EPOCH}"
        )
    if leader_epoch is not None and last_fetched_epoch > leader_epoch:
        raise InvalidRequestError(
            f"no record of epoch {last_fetched_epoch} can exist: the partition is in epoch {leader_epoch}"
        )
    if fetch_offset < log_start_offset:
        return OutOfRange(log_start_offset)
    if last_fetched_epoch == NO_EPOCH:
        return Accepted() if fetch_offset <= log_end_offset else OutOfRange(log_start_offset)
    if fetch_offset <= log_end_offset and cache.epoch_for(fetch_offset - 1) == last_fetched_epoch:
        return Accepted()
    found = cache.end_offset_for(last_fetched_epoch, log_end_offset)
    if found is not None and found.leader_epoch == last_fetched_epoch and found.end_offset >= fetch_offset:
        # Here the epoch begins at or above `fetch_offset`: the logs can share only records of earlier epochs.
        found = cache.end_offset_for(last_fetched_epoch - 1, log_end_offset)
    if found is not None:
        return Diverging(found.leader_epoch, found.end_offset)
    return Accepted() if fetch_offset == log_start_offset else Diverging(NO_EPOCH, log_start_offset)


def truncation_offset(cache: LeaderEpochCache, log_end_offset: int, diverging: Diverging) -> int:
    """Return the offset to which a follower truncates its log, given the leader's answer.

    It is the lesser of the leader's end of that epoch and the follower's own end of it, or of the largest epoch below
    it. If all of the follower's records are of later epochs, all go. The offset lies strictly below `log_end_offset`,
    so that the dialogue ends. If it lies below the log start, the follower drops everything.

    Raises:
        InvalidRequestError: the answer contradicts nothing in this log, so it is invalid.
    """
    own = cache.end_offset_for(diverging.leader_epoch, log_end_offset)
    if own is not None:
        target = min(diverging.end_offset, own.end_offset)
    elif cache.entries:
        target = min(diverging.end_offset, cache.entries[0].start_offset)
    else:
        target = diverging.end_offset
    if not 0 <= target < log_end_offset:
        raise InvalidRequestError(
            f"the leader answers that epoch {diverging.leader_epoch} ends at {diverging.end_offset}, "
            f"which this log, ending at {log_end_offset}, does not contradict"
        )
    return target
