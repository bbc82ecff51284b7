"""The high watermark: below it, records are committed. The whole rule is this one function.

A record is committed once every member of the *maximal ISR* holds it durably, and then it is never lost while one of
them survives with its disk. The maximal ISR is the ISR that the controller has committed and whoever the leader has
asked to take in: the controller may have agreed already without the leader knowing, and could elect that replica.

Producers with acks=all are answered up to the high watermark, consumers read up to it, and a replica has to hold what
lies below it before it may join the ISR.
"""

from __future__ import annotations

from collections.abc import Iterable


def high_watermark(current: int, held_by_member: Iterable[int | None], *, may_commit: bool) -> int:
    """Return the high watermark, given how far each member of the maximal ISR holds the log (exclusive).

    It is what all of them hold, and:

    - it never goes back: who has read a record finds it again, and who was promised it keeps it. A new leader goes on
      from what it has heard as a follower, which may be behind; it catches up as the ISR confirms.
    - it stands still while a member has not confirmed (None) that its log is a prefix of this leader's: of what such
      a replica holds nothing can be said.
    - it stands still while `may_commit` is false: the committed ISR is smaller than min.insync.replicas, or than the
      number of replicas where that is less. Then whoever was in sync when it became so small still holds everything
      committed, and stays eligible to lead (KIP-966).

    Invariant: the result lies at or above `current`, and above it only if every member holds it.
    """
    if not may_commit:
        return current
    lowest: int | None = None
    for held in held_by_member:
        if held is None:
            return current
        if lowest is None or held < lowest:
            lowest = held
    return current if lowest is None or lowest < current else lowest
