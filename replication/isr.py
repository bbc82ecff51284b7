"""The ISR as its leader sees it: what the controller has committed, and one change that it has been asked for."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from raftlog.errors import (
    FencedLeaderEpoch,
    InternalError,
    InvalidUpdateVersion,
    RaftlogError,
    RetriableError,
)
from replication.ports import Replica


@dataclass(frozen=True, slots=True)
class IsrChange:
    """What a leader asks the controller for: this ISR, if the partition is still as the leader knows it.

    `members` in order of preference, the leader among them, each with the broker epoch that the leader has heard from
    it (KIP-903). Becomes an AlterPartition command.
    """

    leader_epoch: int
    partition_epoch: int
    members: tuple[Replica, ...]


class Pending(enum.Enum):
    """What is known of the change that was asked for last."""

    NONE = "nothing is asked for, or what was has come with newer metadata"
    ASKED = "the controller has not answered"
    AWAITED = "it was granted, or the partition has changed otherwise: newer metadata is on its way"
    DOUBTFUL = "nobody knows whether it was granted: it is to be asked for again"
    REFUSED = "it was refused, and is dropped; something may be asked for after a while"


class IsrState:
    """Committed ISR, partition epoch, and the pending change.

        pending              event                                               pending afterwards
        NONE, REFUSED        propose                                             ASKED
        DOUBTFUL             propose, the same members                           ASKED
        ASKED                granted                                             AWAITED
        ASKED                InvalidUpdateVersion, FencedLeaderEpoch             AWAITED
        ASKED                another refusal: nothing was changed                REFUSED
        ASKED                any other error: unknown outcome                    DOUBTFUL
        any                  newer metadata                                      NONE
        NONE, AWAITED, ...   an answer to something else than the pending change unchanged

    A change is asked for with the partition epoch as compare-and-set, so once newer metadata is here it was either
    part of that or will never come. Asked for again and then refused, it will never come either: a broker's commands
    are settled in order (`raftmeta.client_sessions`), so the refusal speaks for the earlier attempts too.

    Invariant: `maximal` = committed members and those that the pending change adds; only REFUSED and NONE add nobody.
    So whatever the controller has committed without the leader knowing is a subset of `maximal`.
    """

    __slots__ = ("change", "maximal", "members", "partition_epoch", "pending")

    def __init__(self, members: frozenset[int], partition_epoch: int) -> None:
        self.members = members
        """The committed ISR."""
        self.partition_epoch = partition_epoch
        self.pending = Pending.NONE
        self.change: IsrChange | None = None
        """The pending change; None when there is none."""
        self.maximal = members
        """Who has to hold a record before it is committed."""

    @property
    def may_propose(self) -> bool:
        """Whether something may be asked for: one change at a time."""
        return self.pending not in (Pending.ASKED, Pending.AWAITED)

    def committed(self, members: frozenset[int], partition_epoch: int) -> bool:
        """Take over what newer metadata says; return False when it is not newer."""
        if partition_epoch <= self.partition_epoch:
            return False
        self.members, self.partition_epoch = members, partition_epoch
        self._drop(Pending.NONE)
        return True

    def propose(self, change: IsrChange) -> None:
        """Count on it that `change` may be granted from now on."""
        assert self.may_propose, f"one change at a time, {self.change} is {self.pending.name}"
        assert change.partition_epoch == self.partition_epoch, f"{change} was made before {self.partition_epoch}"
        if self.pending is Pending.DOUBTFUL:
            assert self.change is not None, "there is one"
            same = _broker_ids(change) == _broker_ids(self.change)
            assert same, "what is doubtful is asked for again"
        self.pending, self.change = Pending.ASKED, change
        self.maximal = self.members.union(_broker_ids(change))
        self._check_invariants()

    def answered(self, change: IsrChange, error: BaseException | None) -> None:
        """Take the controller's answer to `change`; None: granted."""
        if self.pending is not Pending.ASKED or change != self.change:
            return
        match error:
            case None | InvalidUpdateVersion() | FencedLeaderEpoch():
                self.pending = Pending.AWAITED
            case RetriableError() | InternalError():
                self.pending = Pending.DOUBTFUL
            case RaftlogError():
                self._drop(Pending.REFUSED)
            case _:
                self.pending = Pending.DOUBTFUL
        self._check_invariants()

    def _drop(self, pending: Pending) -> None:
        self.pending, self.change, self.maximal = pending, None, self.members
        self._check_invariants()

    def _check_invariants(self) -> None:
        assert self.members <= self.maximal, f"{set(self.members)} are in sync, {set(self.maximal)} are counted"
        assert (self.change is None) == (self.pending in (Pending.NONE, Pending.REFUSED)), f"{self.pending}"
        assert self.change is not None or self.maximal == self.members, "nobody is added"


def _broker_ids(change: IsrChange) -> list[int]:
    return [member.broker_id for member in change.members]
