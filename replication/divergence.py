"""Where two logs part: the leader's answer to a follower that opens, and what the follower then drops.

The dialogue, until the leader accepts:

    follower                                         leader
    my log ends at `fetch_offset`, its last  ----->  `check_prefix`: my record before that offset is of that epoch,
    record is of `last_fetched_epoch`                so your log is a prefix of mine: Accepted
                                             <-----  or: Diverging(largest epoch of mine not above it, where it ends)
    `truncation_offset`: the lesser of that
    end and my own end of that epoch
    truncate, ask again                      ----->  ...

Why an equal epoch at an equal offset is enough: an epoch has one leader, which gives out offsets once and in order; and
a follower appends only to what was found to be a prefix. So two logs that have the same epoch at an offset are
the same up to there. Why it ends: every answer but the last one makes the follower's log shorter, and by at least one
of its epochs or down to the end that the leader names (KIP-101, KIP-279, KIP-595). Never by the high watermark,
which a follower hears late (KIP-101).
"""

from __future__ import annotations

from raftlog.errors import InvalidRequestError
from replication.leader_epochs import LeaderEpochCache
from replication.ports import Accepted, Diverging, Opening, OutOfRange

NO_EPOCH = -1
"""Of a log without records."""


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

    The first four say what this log has. `leader_epoch`: the epoch that this broker leads in, above which nobody has
    records; None where that is not known to be so.

        fetch_offset below the log start        OutOfRange: what lies between is gone
        no records (-1), within this log        Accepted: nothing contradicts
        no records (-1), above the log end      OutOfRange: nothing is lost by starting over
        at the log start, an epoch before all   Accepted: what could contradict is gone
        same epoch at fetch_offset - 1          Accepted
        otherwise                               Diverging(epoch, end): the largest epoch here that is not above
                                                the follower's, or (-1, log start) without one

    Raises:
        InvalidRequestError: negative, or of an epoch that nobody has led in.
    """
    if fetch_offset < 0 or last_fetched_epoch < NO_EPOCH:
        raise InvalidRequestError(
            f"a log that ends at {fetch_offset} with a record of epoch {last_fetched_epoch} cannot be"
        )
    if leader_epoch is not None and last_fetched_epoch > leader_epoch:
        raise InvalidRequestError(
            f"a record of epoch {last_fetched_epoch} cannot be: the partition is in epoch {leader_epoch}"
        )
    if fetch_offset < log_start_offset:
        return OutOfRange(log_start_offset)
    if last_fetched_epoch == NO_EPOCH:
        return Accepted() if fetch_offset <= log_end_offset else OutOfRange(log_start_offset)
    if fetch_offset <= log_end_offset and cache.epoch_for(fetch_offset - 1) == last_fetched_epoch:
        return Accepted()
    found = cache.end_offset_for(last_fetched_epoch, log_end_offset)
    if found is not None and found.leader_epoch == last_fetched_epoch and found.end_offset >= fetch_offset:
        # The epoch begins only above, which no two logs of one history can have: what they share lies before it.
        found = cache.end_offset_for(last_fetched_epoch - 1, log_end_offset)
    if found is not None:
        return Diverging(found.leader_epoch, found.end_offset)
    return Accepted() if fetch_offset == log_start_offset else Diverging(NO_EPOCH, log_start_offset)


def truncation_offset(cache: LeaderEpochCache, log_end_offset: int, diverging: Diverging) -> int:
    """Return the end that a follower's log is to be cut back to, given the leader's answer.

    The lesser of the leader's end of that epoch and the follower's own, or of the largest epoch below it; where all of
    its records are of later epochs, everything goes. Lies strictly below `log_end_offset`, so that the dialogue ends,
    and perhaps below the log start: then the follower starts over there.

    Raises:
        InvalidRequestError: the answer contradicts nothing in this log, so no leader may give it.
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
            f"the leader's epoch {diverging.leader_epoch} is said to end at {diverging.end_offset}, "
            f"which this log, ending at {log_end_offset}, does not contradict"
        )
    return target
