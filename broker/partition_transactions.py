"""Markers of transactions in a partition, while this broker leads it, and what is known of its producers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from broker.lease import without_lease
from broker.log.transactions import NO_COORDINATOR, MarkerFate, decision_epoch
from broker.partition_replicas import LedReplicas
from raftlog.errors import InternalError, InvalidRequestError, InvalidTxnState, RaftlogError
from raftlog.format.control import MAX_PRODUCER_EPOCH, Marker

MarkersAnswer = Callable[[list[RaftlogError | None]], None]
"""Called once with an error for each marker, in their order; None: it is in the log, and committed."""


class ActiveProducer(NamedTuple):
    """What a partition knows of one producer (KIP-664)."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    """-1: nothing was appended in this epoch."""
    last_append_ms: int
    transaction_start_offset: int
    """-1: none is open."""
    transaction_started_ms: int
    """0: none is open."""


class MarkedPartition(LedReplicas):
    """A partition that transactions end in."""

    def check_serving(self, leader_epoch: int = -1) -> None:
        """Refuse what only a leader with a lease may do, on top of `check_leader_epoch`.

        Raises:
            NotLeader: no lease; and what `check_leader_epoch` raises.
        """
        self.check_leader_epoch(leader_epoch)
        if not self._lease.valid():
            raise without_lease(str(self.topic_partition))

    def check_append(self, leader_epoch: int) -> None:
        """Refuse what `append` with `all_replicas` would refuse now, whatever the batch.

        Raises:
            NotLeader: no lease; and what `check_leader_epoch` raises.
            NotEnoughReplicas: fewer are in sync than min.insync.replicas.
        """
        self.check_serving(leader_epoch)
        assert self._leading is not None, "only a leader serves"
        if not self._leading.has_enough_in_sync:
            raise self._leading.not_enough()

    def append_markers(self, markers: Sequence[Marker], leader_epoch: int, answer: MarkersAnswer) -> None:
        """Append one control batch with those of `markers` that apply, and answer once all of them are committed.

        In the order of `markers`: None for one that is in the log, also when it was there before (then nothing is
        appended); InvalidProducerEpoch for one of a transaction that ended before the producer's last one did
        (KIP-890); InvalidTxnState for one that contradicts what has ended the transaction here; BrokerOverloaded while
        the partition cannot remember another producer id; the reason in the place of each when it is not known whether
        they are committed, then it may be asked again. `answer` may be called before this returns. `leader_epoch` -1:
        whichever it is.

        Raises:
            NotLeader, NotEnoughReplicas: as `check_append`; nothing was appended, and `answer` is not called.
            InvalidRequestError: a producer id or epoch that cannot be, or the topic is internal; likewise.
            StorageFull, StorageError: likewise.
        """
        self._check_marked(markers)
        self.check_append(leader_epoch)
        leading = self._leading
        assert leading is not None, "only a leader serves"
        now_ms = self._clock.now_ms()
        fates = self.log.check_markers(markers, now_ms)
        errors = [fate if isinstance(fate, RaftlogError) else None for fate in fates]

        def done(failure: BaseException | None) -> None:
            answer(errors if failure is None else [_as_raftlog(failure)] * len(markers))

        fresh = [marker for marker, fate in zip(markers, fates, strict=True) if fate is MarkerFate.APPENDED]
        if fresh:
            result = self.log.append_markers(fresh, leader_epoch=self.leader_epoch, now_ms=now_ms)
            leading.appended(result.last_offset + 1, done, all_replicas=True)
        else:  # they are in the log, at an offset that nobody has kept
            leading.repeated(self.log.log_end_offset, done, all_replicas=True)

    def _check_marked(self, markers: Sequence[Marker]) -> None:
        if self.is_internal:
            raise InvalidRequestError(f"{self.topic_partition}: an internal topic has no transactions")
        for marker in markers:
            if marker.producer_id < 0 or not 0 <= marker.producer_epoch <= MAX_PRODUCER_EPOCH:
                raise InvalidRequestError(
                    f"{self.topic_partition}: producer id {marker.producer_id} with epoch {marker.producer_epoch} "
                    f"has no transactions; ids are not negative, epochs lie between 0 and {MAX_PRODUCER_EPOCH}"
                )

    def abort_hanging(
        self, producer_id: int, producer_epoch: int, start_offset: int, answer: Callable[[RaftlogError | None], None]
    ) -> None:
        """Abort a transaction that no coordinator knows of, if it is the one that is meant (KIP-664).

        `answer` is called once the marker is committed, or with the reason why that is not known.

        Raises:
            InvalidTxnState: no such transaction is open here.
            NotLeader, NotEnoughReplicas, StorageFull, StorageError: as `append_markers`.
        """
        self.check_append(-1)
        found = self.log.producers.transactions.get(producer_id)
        if found is None or (found.epoch, found.first_offset) != (producer_epoch, start_offset):
            there = "none is open" if found is None else f"epoch {found.epoch} from offset {found.first_offset} on is"
            raise InvalidTxnState(
                f"{self.topic_partition}: no transaction of producer id {producer_id} with epoch {producer_epoch} from "
                f"offset {start_offset} on is open here, {there}; describe the partition's producers again"
            )
        marker = Marker(producer_id, decision_epoch(producer_epoch), commit=False, coordinator_epoch=NO_COORDINATOR)
        self.append_markers([marker], -1, lambda errors: answer(errors[0]))

    def describe_producers(self) -> list[ActiveProducer]:
        """Return what this replica knows of its producers, the longest idle first. May run in any thread."""
        return [
            ActiveProducer(
                producer_id,
                state.epoch,
                state.last_sequence,
                state.last_append_ms,
                state.first_offset,
                state.started_ms,
            )
            for producer_id, state in self.log.producers_now()
        ]


def _as_raftlog(failure: BaseException) -> RaftlogError:
    return failure if isinstance(failure, RaftlogError) else InternalError(f"{type(failure).__name__}: {failure}")
