"""A partition on this broker: produce and fetch. `partition_roles.py` says what lies beneath, and who does what."""

from __future__ import annotations

from typing import Final

from broker.leading import Leading
from broker.log.partition_log import ReadResult
from broker.partition_replicas import PartitionDescription
from broker.partition_roles import Host
from broker.partition_transactions import MarkedPartition
from raftlog.errors import (
    DuplicateSequence,
    InvalidProducerEpoch,
    InvalidRecord,
    InvalidRequestError,
    InvalidTxnState,
    LeaderNotAvailable,
    MessageTooLarge,
    OffsetOutOfRange,
    OutOfOrderSequence,
    SequenceError,
    UnknownLeaderEpoch,
    UnknownTopicId,
)
from raftlog.format import Attributes, BatchHeader, Buffer, validate_produced
from replication.divergence import check_prefix
from replication.pending_acks import Answer
from replication.ports import Diverging

_TRANSACTIONAL: Final = int(Attributes.TRANSACTIONAL)

__all__ = ["TOPIC_ID_BYTES", "Host", "Partition", "PartitionDescription", "check_topic_id", "unknown_partition"]


class Partition(MarkedPartition):
    """One partition, as the services and sessions see it."""

    def check_confirmed(self) -> None:
        """Refuse to say where the committed records end before this term's high watermark is known (KIP-207).

        Raises:
            LeaderNotAvailable: a high watermark that an earlier leader gave out may have been further.
        """
        if self._leading is not None and not self._leading.has_confirmed:
            raise LeaderNotAvailable(
                f"{self.topic_partition}: the leader of epoch {self.leader_epoch} is new, and the replicas in sync "
                "have not confirmed yet how far the committed records go; try again"
            )

    # Produce

    def check(self, batch: Buffer) -> BatchHeader:
        """Return the header of a batch that may be appended. May run in any thread.

        Raises:
            MessageTooLarge: beyond `max.message.bytes`; and what `validate_produced` raises, a record without key
                in a compacted topic among them.
        """
        limit = self.log.config.max_message_bytes
        if len(batch) > limit:
            raise MessageTooLarge(
                f"{self.topic_partition}: the batch has {len(batch)} bytes, max.message.bytes={limit}; "
                "send smaller batches or raise the topic's limit"
            )
        return validate_produced(batch, limits=self.inflate_limits, needs_keys=self.log.config.compacts)

    def append(
        self,
        batch: Buffer,
        leader_epoch: int,
        answer: Answer | None,
        *,
        all_replicas: bool = False,
        checked: BatchHeader | None = None,
    ) -> tuple[int, int]:
        """Validate and append one produced batch; return (base offset, log append time in ms or -1).

        A batch of an idempotent producer that was appended before is not appended again: the answer is that of the
        first time, and comes when that one is held as asked.

        `answer` is called once the batch is held as asked, or with the error that came in between; it may be called
        before this returns. None: nobody waits (acks=0). `all_replicas` (acks=all): the high watermark has to pass it,
        and at least `min.insync.replicas` be in sync; else this replica has to hold it, as the topic's flush config
        says. `checked`: what `check` returned for it.

        Raises:
            NotEnoughReplicas: fewer are in sync with `all_replicas`; nothing was appended.
            LeaderNotAvailable: a batch before this one is missing here, and it is too early to say that it is lost.
            OutOfOrderSequence, UnknownProducerId: it is lost, or was deleted: no later leader can have it either.
            InvalidProducerEpoch, InvalidTxnState: it belongs to no transaction that can be open here now.
            InvalidRecord: transactional, but not with `all_replicas`, or in an internal topic.
            RaftlogError: refused otherwise; nothing was appended.
        """
        leading = self._leading
        if leading is None or leader_epoch != self.leader_epoch or not self._lease.valid():
            self.check_serving(leader_epoch)
            leading = self._leading
            assert leading is not None, "only a leader serves"
        if all_replicas and not leading.has_enough_in_sync:
            raise leading.not_enough()
        header = checked or self.check(batch)
        now_ms = self._clock.now_ms()
        if header.producer_id >= 0:
            if header.attributes & _TRANSACTIONAL and (self.is_internal or not all_replicas):
                raise self._no_transaction()
            found = self._appended_before(leading, header, now_ms, answer, all_replicas=all_replicas)
            if found is not None:
                return found
        result = self.log.append(batch, header, leader_epoch=self.leader_epoch, now_ms=now_ms)
        leading.appended(result.last_offset + 1, answer, all_replicas=all_replicas)
        return result.base_offset, result.timestamp_ms

    def _no_transaction(self) -> InvalidRecord:
        if self.is_internal:
            return InvalidRecord(f"{self.topic_partition}: an internal topic has no transactions")
        return InvalidRecord(
            f"{self.topic_partition}: a transactional batch needs acks=all: what was committed must not vanish"
        )

    def _appended_before(
        self, leading: Leading, header: BatchHeader, now_ms: int, answer: Answer | None, *, all_replicas: bool
    ) -> tuple[int, int] | None:
        """See to a batch of an idempotent producer that is in the log already; None: it is to be appended.

        A refusal lets the producer number anew what it has not heard of (docs/adr/0012), so it has to be true of every
        later leader as well.
        """
        try:
            duplicate = self.log.check_producer(header, now_ms)
        except DuplicateSequence as refusal:
            return self._appended_long_before(leading, header, refusal, answer, all_replicas=all_replicas)
        except (SequenceError, InvalidProducerEpoch, InvalidTxnState) as refusal:
            if not leading.may_deny:
                raise LeaderNotAvailable(
                    f"{self.topic_partition}: {refusal}; the leader of epoch {self.leader_epoch} is new, and a replica "
                    "in sync may have what is missing; try again"
                ) from None
            if not isinstance(refusal, InvalidTxnState):  # that one lets nobody number anything anew
                leading.deny(header.producer_id, header.producer_epoch)
            raise type(refusal)(f"{self.topic_partition}: {refusal}") from None
        if duplicate is None:
            if leading.has_denied(header.producer_id, header.producer_epoch):
                raise OutOfOrderSequence(
                    f"{self.topic_partition}: a batch of producer id {header.producer_id} was missing, and its epoch "
                    f"{header.producer_epoch} has ended with that; begin the next one with sequence 0"
                )
            return None
        if answer is not None:
            leading.repeated(duplicate.last_offset + 1, answer, all_replicas=all_replicas)
        return duplicate.base_offset, duplicate.timestamp_ms

    def _appended_long_before(
        self,
        leading: Leading,
        header: BatchHeader,
        refusal: DuplicateSequence,
        answer: Answer | None,
        *,
        all_replicas: bool,
    ) -> tuple[int, int]:
        """Say that a batch was appended once everything of its producer is held as asked: where, nobody knows."""
        # Housekeeping may have forgotten the producer since: then everything that is there has to be held.
        state = self.log.producers.get(header.producer_id)
        end_offset = self.log.log_end_offset if state is None else state.last_offset + 1
        error = DuplicateSequence(f"{self.topic_partition}: {refusal}")
        if answer is None:
            raise error from None

        def held(failure: BaseException | None) -> None:
            assert answer is not None
            answer(error if failure is None else failure)

        leading.repeated(end_offset, held, all_replicas=all_replicas)
        return -1, -1

    # Fetch

    def check_position(self, offset: int, last_fetched_epoch: int, *, from_follower: bool = False) -> None:
        """Refuse a reader that has read what was truncated since (KIP-320); -1: it does not know what it has read.

        Raises:
            OffsetOutOfRange: it has; names where its records part from these. A follower says so of what lies below
                its own high watermark only.
            UnknownLeaderEpoch: it has read what a later leader gave it, of whom this broker has not heard yet.
        """
        if last_fetched_epoch < 0 or offset < 0:  # nothing was read, and `read` refuses what cannot be
            return
        if last_fetched_epoch > self.leader_epoch:
            raise UnknownLeaderEpoch(
                f"{self.topic_partition}: a record of leader epoch {last_fetched_epoch} was read; "
                f"this broker knows of epoch {self.leader_epoch}"
            )
        start, end, epochs = self.log.bounds()
        # What a follower has above its high watermark is not known to be committed, and may be cut.
        if from_follower and offset > (end if self.leads else self.high_watermark):
            return
        found = check_prefix(epochs, start, end, offset, last_fetched_epoch)
        if isinstance(found, Diverging):
            raise OffsetOutOfRange(
                f"{self.topic_partition}: the record before offset {offset} is not the one of leader epoch "
                f"{last_fetched_epoch} that was read: it was truncated in an unclean election; the log has epoch "
                f"{found.leader_epoch} up to offset {found.end_offset}"
            )

    def read(
        self, offset: int, max_bytes: int, end_offset: int, *, blocking: bool, from_follower: bool = False
    ) -> ReadResult | None:
        """Return whole batches from `offset` up to `end_offset` (exclusive); None when that would wait for the disk.

        Above `end_offset`, but not above what may have been committed, there is nothing yet: a high watermark that is
        behind what the reader has seen of an earlier leader's catches up. The caller sees to the lease: it asks once
        more right before the records leave.

        Raises:
            OffsetOutOfRange: below the log start, or above everything that may have been committed.
            NotLeader: or the reason why this partition is closed; a follower refers to its leader below its log start.
        """
        refusal = self.refusal(from_follower=from_follower)
        if refusal is not None:
            raise refusal
        log, leading = self.log, self._leading
        if offset < log.log_start_offset and leading is None and self.refused_by is not None:
            raise self.refused_by
        if offset > end_offset and (leading is None or not leading.has_confirmed or offset <= log.log_end_offset):
            return ReadResult(b"", offset)
        if offset > end_offset or offset < log.log_start_offset:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: offset {offset} is out of range, "
                f"the log has {log.log_start_offset} to {end_offset}"
            )
        return log.read(offset, max_bytes, end_offset, blocking=blocking)

    def delete_target(self, before_offset: int) -> int:
        """Return the log start that `DeleteRecords` asks for; -1 means the high watermark.

        Raises:
            OffsetOutOfRange: above the high watermark.
            InvalidRequestError: negative and not -1.
            NotLeader: or the reason why this partition is closed.
        """
        self.check_serving()
        if before_offset < -1:
            raise InvalidRequestError(f"before_offset {before_offset} is negative; -1 means the high watermark")
        target = self.high_watermark if before_offset == -1 else before_offset
        if target > self.high_watermark:
            raise OffsetOutOfRange(
                f"{self.topic_partition}: cannot delete up to {target}, the high watermark is {self.high_watermark}"
            )
        return target


TOPIC_ID_BYTES: Final = 16


def check_topic_id(topic_id: bytes) -> None:
    """Check that a topic id has 16 bytes.

    Raises:
        InvalidRequestError: another length.
    """
    if len(topic_id) != TOPIC_ID_BYTES:
        raise InvalidRequestError(f"a topic id has {TOPIC_ID_BYTES} bytes, this one has {len(topic_id)}")


def unknown_partition(topic_id: bytes, partition: int) -> UnknownTopicId:
    """Return the refusal for a partition that is not here."""
    return UnknownTopicId(
        f"topic id {topic_id.hex()} partition {partition} is not on this broker: deleted, moved, or not created yet"
    )
