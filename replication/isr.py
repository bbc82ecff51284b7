"""The ISR as its leader sees it: the members that the controller has committed, and one proposed change."""

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
    """A leader's proposal to the controller: this ISR, if the partition is still as the leader knows it.

    `members`: in order of preference, the leader among them, each with the broker epoch that it has told the leader
    (KIP-903). Becomes an AlterPartition command.
    """

    leader_epoch: int
    partition_epoch: int
    members: tuple[Replica, ...]


class Pending(enum.Enum):
    """What the leader knows of its last proposal."""

    NONE = "no change is proposed, or newer metadata has settled the proposal"
    ASKED = "the controller has not answered"
    AWAITED = "granted, or the partition has changed otherwise: newer metadata is on its way"
    DOUBTFUL = "it is unknown whether it was granted: the leader proposes it again"
    REFUSED = "refused and dropped; the leader may propose a change after a pause"


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
        any                  an answer to another change than the pending one    unchanged

    A proposal carries the partition epoch as compare-and-set, so newer metadata either includes the change or rules it
    out. A refusal of a repeated proposal rules it out too: the controller settles a broker's commands in order
    (`raftmeta.state`), so the refusal covers the earlier attempts.

    Invariant: `maximal` = the committed members and those that the pending change adds; REFUSED and NONE add none. So
    any ISR that the controller has committed, even before the leader knows, is a subset of `maximal`.
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
        """The brokers that have to hold a record before it is committed."""

    @property
    def may_propose(self) -> bool:
        """Whether a change may be proposed; one at a time."""
        return self.pending not in (Pending.ASKED, Pending.AWAITED)

    def committed(self, members: frozenset[int], partition_epoch: int) -> bool:
        """Adopt newer metadata; return False when it is not newer."""
        if partition_epoch <= self.partition_epoch:
            return False
        self.members, self.partition_epoch = members, partition_epoch
        self._drop(Pending.NONE)
        return True

    def propose(self, change: IsrChange) -> None:
        """Note that `change` may be granted from now on, so that its members count."""
        assert self.may_propose, f"one change at a time, {self.change} is {self.pending.name}"
        assert change.partition_epoch == self.partition_epoch, f"{change} was made before {self.partition_epoch}"
        if self.pending is Pending.DOUBTFUL:
            assert self.change is not None, "a doubtful change is kept"
            same = _broker_ids(change) == _broker_ids(self.change)
            assert same, "a doubtful change is proposed again before any other"
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
        assert self.change is not None or self.maximal == self.members, "without a change no member is added"


def _broker_ids(change: IsrChange) -> list[int]:
    return [member.broker_id for member in change.members]
