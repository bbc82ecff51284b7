"""The transactional id of a producer: what the coordinator knows of it, and how that may change.

    (unknown)            -> EMPTY            InitProducerId with a fresh producer id, epoch 0
    EMPTY, COMPLETE_*    -> EMPTY            InitProducerId: the next epoch, or a fresh producer id when none is left
    EMPTY, COMPLETE_*    -> ONGOING          AddToTransaction: begins
    EMPTY, COMPLETE_*    -> COMPLETE_*       EndTransaction with nothing begun: the next epoch, nobody to be told
    ONGOING              -> ONGOING          AddToTransaction: more partitions, more groups
    ONGOING              -> PREPARE_COMMIT   EndTransaction
    ONGOING              -> PREPARE_ABORT    EndTransaction, timeout, InitProducerId, AbortTransaction: the next epoch
    PREPARE_COMMIT       -> COMPLETE_COMMIT  all markers are written
    PREPARE_ABORT        -> COMPLETE_ABORT   all markers are written
    PREPARE_*            -> ONGOING          as from COMPLETE_*, when markers are written and that is not recorded yet
    PREPARE_*            -> EMPTY            likewise
    EMPTY, COMPLETE_*    -> (unknown)        idle for transactional.id.expiration.ms

Each transaction has an epoch of its own (KIP-890): e while ONGOING, and e + 1 from the decision on, which is the epoch
of its markers and of the next transaction. Also where nothing was begun: so an EndTransaction that comes late, or
twice, can never end a transaction that began after it was sent. A prepared transaction only ever goes forward.

`client_epoch`: the epoch e that ended, while its owner may ask again. With `timed_out` the coordinator has ended it by
itself; its owner may abort what is aborted, or go on by InitProducerId (KIP-360). NONE once somebody else has taken
over, or the next transaction has begun: whoever comes with an older epoch is fenced then. Aborted with NONE and without
`timed_out`: by a tool, on an operator's word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple

from broker.groups.topics import TopicPartition
from raftlog.v1 import transaction_pb2

MAX_EPOCH: Final = 32_766
"""The last epoch of a transaction; its markers carry one more, an int16's last."""
NONE: Final = -1


class State(Enum):
    """As on the wire."""

    EMPTY = transaction_pb2.TRANSACTION_EMPTY
    ONGOING = transaction_pb2.TRANSACTION_ONGOING
    PREPARE_COMMIT = transaction_pb2.PREPARE_COMMIT
    PREPARE_ABORT = transaction_pb2.PREPARE_ABORT
    COMPLETE_COMMIT = transaction_pb2.COMPLETE_COMMIT
    COMPLETE_ABORT = transaction_pb2.COMPLETE_ABORT


PREPARED: Final = frozenset({State.PREPARE_COMMIT, State.PREPARE_ABORT})
IDLE: Final = frozenset({State.EMPTY, State.COMPLETE_COMMIT, State.COMPLETE_ABORT})
COMMITS: Final = frozenset({State.PREPARE_COMMIT, State.COMPLETE_COMMIT})


class Former(NamedTuple):
    """What a producer has had before its epochs were used up."""

    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class Transaction:
    """What is known of one transactional id; see the module. `started_ms`: 0 where none is open or prepared."""

    producer_id: int
    producer_epoch: int
    state: State
    timeout_ms: int
    updated_ms: int
    started_ms: int = 0
    partitions: frozenset[TopicPartition] = frozenset()
    group_ids: frozenset[str] = frozenset()
    client_epoch: int = NONE
    timed_out: bool = False
    former: Former | None = None
    """While the producer id is fresh, and its owner may ask for it again: the answer may have been lost."""

    @property
    def is_prepared(self) -> bool:
        """Whether it is decided, and markers may be missing."""
        return self.state in PREPARED

    @property
    def is_idle(self) -> bool:
        """Whether nothing is open and nothing prepared."""
        return self.state in IDLE

    @property
    def aborted_by_tool(self) -> bool:
        """Whether an operator has ended the last transaction, and nobody has begun since."""
        is_aborted = self.state in (State.PREPARE_ABORT, State.COMPLETE_ABORT)
        return is_aborted and self.client_epoch == NONE and not self.timed_out

    @property
    def commits(self) -> bool:
        """Whether the last decision was to commit."""
        return self.state in COMMITS

    def added(self, partitions: frozenset[TopicPartition], group_ids: frozenset[str], now_ms: int) -> Transaction:
        """Begin it if it has not begun, and add to it."""
        assert not self.is_prepared
        assert self.producer_epoch <= MAX_EPOCH
        begins = self.state is not State.ONGOING
        return replace(
            self,
            state=State.ONGOING,
            started_ms=now_ms if begins else self.started_ms,
            updated_ms=now_ms,
            partitions=self.partitions | partitions,
            group_ids=self.group_ids | group_ids,
            client_epoch=NONE,
            timed_out=False,
            former=None,
        )

    def decided(
        self, commit: bool, now_ms: int, *, owner_may_ask: bool = True, by_coordinator: bool = False
    ) -> Transaction:
        """Decide it, once and for all. `owner_may_ask`: its producer goes on; else it is fenced."""
        assert self.state is State.ONGOING
        assert not (commit and by_coordinator), "what the coordinator ends by itself it aborts"
        return replace(
            self,
            state=State.PREPARE_COMMIT if commit else State.PREPARE_ABORT,
            producer_epoch=self.producer_epoch + 1,
            updated_ms=now_ms,
            client_epoch=self.producer_epoch if owner_may_ask else NONE,
            timed_out=by_coordinator,
        )

    def completed(self, now_ms: int) -> Transaction:
        """All markers are written."""
        assert self.is_prepared
        return replace(
            self,
            state=State.COMPLETE_COMMIT if self.commits else State.COMPLETE_ABORT,
            updated_ms=now_ms,
            started_ms=0,
            partitions=frozenset(),
            group_ids=frozenset(),
        )

    def ended_empty(self, commit: bool, now_ms: int) -> Transaction:
        """End what was never begun: the epoch is used all the same."""
        assert self.is_idle
        assert self.producer_epoch <= MAX_EPOCH
        return replace(
            self,
            state=State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT,
            producer_epoch=self.producer_epoch + 1,
            updated_ms=now_ms,
            client_epoch=self.producer_epoch,
            timed_out=False,
            former=None,
        )
