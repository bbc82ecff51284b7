"""What becomes of a batch whose producer numbers the broker refuses (docs/adr/0012)."""

from __future__ import annotations

import logging

from raftlog._client.gate import Identity
from raftlog._client.gated_buffer import GatedBuffer
from raftlog._client.producer_buffer import Callbacks, ProducerBuffer
from raftlog._core.batch import Batch
from raftlog._core.numbering import Numbering
from raftlog.errors import DuplicateSequence, InvalidProducerEpoch, InvalidTxnState, SequenceError, UnknownProducerId

logger = logging.getLogger(__name__)


def on_numbers_refused(
    engine: ProducerBuffer,
    ids: Identity,
    batch: Batch,
    error: SequenceError | InvalidProducerEpoch,
    callbacks: Callbacks,
) -> None:
    """Do as the batch's queue says; under the lock.

    `DuplicateSequence`: it is in the log, and where is not known any more; or as part of a batch that was too large
    only when it was sent again. `OutOfOrderSequence`, `UnknownProducerId`:
    it is not, the queue is numbered anew (KIP-360). `InvalidProducerEpoch`: somebody else uses the producer id.
    """
    queue = batch.queue
    numbering = queue.numbering
    assert numbering is not None
    queue.note_failure(error)
    if isinstance(error, DuplicateSequence):
        queue.on_accepted(batch)
        engine.complete(batch, callbacks)
    elif isinstance(error, InvalidProducerEpoch):
        logger.warning("%s: producer id %d is used by somebody else: %s", queue, batch.number.producer_id, error)
        ids.retire(batch.number.producer_id)
        for doubtful in queue.on_fenced(batch):
            engine.complete(doubtful, callbacks, error=error)
    else:
        if queue.is_first_in_flight(batch):
            _tell_of_loss(numbering, batch, error)
        queue.on_denied(batch)


def on_transactional_numbers_refused(
    engine: GatedBuffer,
    batch: Batch,
    error: SequenceError | InvalidProducerEpoch | InvalidTxnState,
    callbacks: Callbacks,
) -> None:
    """Settle a batch of a transaction, whose numbers are the coordinator's: never numbered anew; under the lock.

    `DuplicateSequence`: it is in the log. `InvalidProducerEpoch`, `InvalidTxnState`: a marker was there before it, so
    its transaction has ended. Else something before it is missing: of the first batch in flight that is the truth, and
    the transaction can only be aborted; of another one it means nothing yet.
    """
    queue = batch.queue
    if batch.done:  # of a transaction that is over
        queue.on_refused(batch, resend=False, counts=False)
        return
    queue.note_failure(error)
    if isinstance(error, DuplicateSequence):
        queue.on_accepted(batch)
        engine.complete(batch, callbacks)
    elif not isinstance(error, SequenceError):
        queue.on_refused(batch, resend=False, counts=False)
        engine.over(batch, error, callbacks)
    elif queue.is_first_in_flight(batch):
        queue.on_refused(batch, resend=False, counts=False)
        engine.complete(batch, callbacks, error=error)
    else:
        queue.on_refused(batch, resend=True, counts=False)


def _tell_of_loss(numbering: Numbering, batch: Batch, error: SequenceError) -> None:
    """Say in the log when what was acknowledged is not there, or not known, any more."""
    number = batch.number
    if not numbering.follows_acknowledged(number):
        logger.debug("%s: a batch before sequence %d has failed, so numbers begin anew", batch.queue, number[2])
    elif isinstance(error, UnknownProducerId):
        logger.info(
            "%s: the broker does not know producer %d any more: it was idle for longer than producer.id.expiration.ms, "
            "or the topic was made again; it goes on in a new epoch",
            batch.queue,
            number.producer_id,
        )
    else:
        logger.warning(
            "%s: records that were acknowledged before sequence %d of producer %d are not in the log any more (%s); "
            "this happens when a replica has become leader that was not in sync (unclean.leader.election.enable), or "
            "when disks were lost; what was not acknowledged yet is sent in a new epoch",
            batch.queue,
            number.base_sequence,
            number.producer_id,
            error,
        )
