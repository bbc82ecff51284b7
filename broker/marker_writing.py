"""Markers written where this broker leads: into the logs of partitions, and to the coordinators of groups.

For markers of other brokers' coordinators (`services/markers.py`), and for those of its own (`marker_sender.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from google.protobuf.message import Message

from broker.group_coordinators import GroupCoordinators
from broker.groups.commands import EndTransactionOffsets
from broker.partition import Partition
from raftlog.errors import (
    InternalError,
    InvalidProducerEpoch,
    InvalidRequestError,
    InvalidTxnState,
    RaftlogError,
    from_wire,
)
from raftlog.format.control import MAX_PRODUCER_EPOCH, Marker
from raftlog.v1 import transaction_pb2
from raftlog.v1.common_pb2 import NONE
from raftlog.v1.group_pb2 import CommitOffsetResult
from raftmeta.image import MetadataImage

logger = logging.getLogger(__name__)

Target: TypeAlias = tuple[bytes, int] | str
"""Who is to be told of a decision: (topic id, partition), or a group's id."""
Errors: TypeAlias = Sequence[RaftlogError | None]
"""One for each marker, in order; None: it is written and committed, or nothing is left for it to decide."""
Answer: TypeAlias = Callable[[Errors], None]


class RemoteMarkers(Protocol):
    """The way of markers to other brokers; see `broker.marker_links.MarkerLinks`."""

    def put(self, broker_id: int, target: Target, markers: Sequence[Marker], answer: Answer) -> None:
        """Have markers sent with the next `flush`; `answer` is called once, later."""
        ...

    def flush(self) -> None:
        """Send what was put, as far as there is room."""
        ...

    def on_metadata(self, image: MetadataImage) -> None:
        """Give up what waits for brokers that are fenced, or gone."""
        ...

    async def close(self) -> None:
        """End everything; nobody is answered any more."""
        ...


def from_message(marker: transaction_pb2.Marker) -> Marker:
    """Return a marker as logs have it."""
    return Marker(marker.producer_id, marker.producer_epoch, marker.commit, marker.coordinator_epoch)


def check_possible(markers: Sequence[Marker]) -> None:
    """Check that these can be markers: what is written of them has to be read again.

    Raises:
        InvalidRequestError: one has a producer or an epoch that there is not.
    """
    for marker in markers:
        if marker.producer_id < 0 or not 0 <= marker.producer_epoch <= MAX_PRODUCER_EPOCH:
            raise InvalidRequestError(
                f"a marker of producer id {marker.producer_id} with epoch {marker.producer_epoch}: ids begin with 0, "
                f"and epochs go from 0 to {MAX_PRODUCER_EPOCH}"
            )


def to_message(marker: Marker) -> transaction_pb2.Marker:
    """Return a marker as it travels."""
    return transaction_pb2.Marker(
        producer_id=marker.producer_id,
        producer_epoch=marker.producer_epoch,
        commit=marker.commit,
        coordinator_epoch=marker.coordinator_epoch,
    )


class LocalMarkers:
    """Writes markers on this broker; on the event loop.

    Answers come once, when the markers are committed or it is known that they are not going to be by this attempt;
    perhaps before `write` or `write_group` has returned, perhaps never while too few replicas are in sync.

    A marker that comes so late that the producer has a newer epoch there is taken for written: whatever it was to
    decide was decided before that epoch began (KIP-890). One that contradicts what was decided there counts as written
    too, since no repetition would change anything; the log says so as an error.
    """

    def __init__(self, find: Callable[[bytes, int], Partition], groups: GroupCoordinators) -> None:
        self._find = find
        self._groups = groups

    def write(self, topic_id: bytes, partition: int, markers: Sequence[Marker], answer: Answer) -> None:
        """Append the markers of a partition that this broker leads, as one control batch."""

        def answered(errors: Errors) -> None:
            answer([_settled(error, marker) for error, marker in zip(errors, markers, strict=True)])

        try:
            check_possible(markers)
            found = self._find(topic_id, partition)
            found.append_markers(markers, found.leader_epoch, answered)
        except RaftlogError as error:
            answer([error] * len(markers))
        except Exception as error:  # a bug must not keep a transaction open for ever: who sent it tries again
            logger.exception("markers for partition %d of topic id %s failed", partition, topic_id.hex())
            answer([InternalError(f"{type(error).__name__}: {error}")] * len(markers))

    def write_group(self, group_id: str, markers: Sequence[Marker], answer: Answer) -> None:
        """Have the offsets of transactions committed or forgotten by a group that this broker coordinates."""
        try:
            check_possible(markers)
            shard = self._groups.shard_of(group_id)[1]
        except RaftlogError as error:
            answer([error] * len(markers))
            return

        def answered(errors: Errors) -> None:
            answer([_settled(error, marker) for error, marker in zip(errors, markers, strict=True)])

        answers = _Answers(len(markers), answered)
        for index, marker in enumerate(markers):
            to = _GroupAnswer(answers, index)
            epoch = marker.producer_epoch
            shard.submit(EndTransactionOffsets(to, group_id, marker.producer_id, epoch, marker.commit), to)


def _settled(error: RaftlogError | None, marker: Marker) -> RaftlogError | None:
    if isinstance(error, InvalidProducerEpoch):
        logger.warning("a marker comes too late and changes nothing: %s", error, extra={"marker": marker})
        return None
    if isinstance(error, InvalidTxnState):
        logger.error("A TRANSACTION IS NOT ATOMIC: %s", error, extra={"marker": marker})
        return None
    return error


class _Answers:
    """Gathers the answers of single markers."""

    def __init__(self, count: int, answer: Answer) -> None:
        self._errors: list[RaftlogError | None] = [None] * count
        self._left = count
        self._answer = answer

    def take(self, index: int, error: RaftlogError | None) -> None:
        self._errors[index] = error
        self._left -= 1
        if not self._left:
            self._answer(self._errors)


class _GroupAnswer:
    """A frame's recipient that is answered once: one marker for a group."""

    is_stream = False

    def __init__(self, answers: _Answers, index: int) -> None:
        self._answers: _Answers | None = answers
        self._index = index

    def deliver(self, message: Message | RaftlogError | None) -> None:
        """Take the answer; a second one is passed over."""
        answers, self._answers = self._answers, None
        if answers is None:
            return
        error = message if isinstance(message, RaftlogError) else None
        if isinstance(message, CommitOffsetResult) and message.error.code != NONE:
            error = from_wire(message.error)
        answers.take(self._index, error)
