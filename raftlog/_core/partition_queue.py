"""Batches of one partition between the application and the broker, in order whatever is refused on the way."""

from __future__ import annotations

from collections import deque

from raftlog._core.batch import Batch
from raftlog._core.numbering import BATCHES_REMEMBERED, Numbering
from raftlog.errors import BrokerUnavailable, RaftlogError


class PartitionQueue:
    """What is waiting for, and what is in flight to, the leader of one partition.

    Transitions:
        flowing     -> recovering  an in-flight batch is refused, or its stream breaks
        recovering  -> flowing     every in-flight batch has its answer; the refused ones go back in front, in order,
                                   under a larger `chain`

    While recovering nothing new is sent, so a refused batch is never overtaken: the broker refuses what was already
    in flight behind it until it sees the larger chain.

    With `numbering` the producer is idempotent. A batch keeps its number through all retries. What failed for good
    leaves a gap; what comes behind it is sent under its number all the same, since nobody can say whether the gap is
    one for the broker. Only when the first batch in flight is denied (`on_denied`) nothing from it on is in the log:
    then everything is numbered anew, once all answers are there (docs/adr/0012).

    Invariants: `waiting` is ordered by `Batch.order`, and everything in it comes after everything in flight, except
    while recovering; all in-flight batches were sent to `node_id`; numbered batches wait before those without a number,
    and the first one in flight is among the last five that were sent, so that the broker knows it again.
    """

    __slots__ = (
        "chain",
        "failures",
        "in_flight",
        "last_error",
        "last_order",
        "node_id",
        "not_before_ms",
        "numbering",
        "open",
        "partition",
        "places",
        "recovering",
        "refused",
        "refused_since_ms",
        "renumbered",
        "sent_epoch",
        "topic",
        "waiting",
        "wants_id",
        "wants_number",
    )

    def __init__(self, topic: str, partition: int, numbering: Numbering | None = None) -> None:
        self.topic = topic
        self.partition = partition
        self.open: Batch | None = None
        self.waiting: deque[Batch] = deque()
        self.in_flight: dict[Batch, None] = {}
        """In the order of sending."""
        self.refused: list[Batch] = []
        self.recovering = False
        self.chain = 0
        self.node_id = -1
        self.sent_epoch = -1
        """The leader epoch that the last batch was sent under."""
        self.failures = 0
        """Refusals in a row, for the backoff."""
        self.refused_since_ms: float | None = None
        self.last_error: RaftlogError | None = None
        self.not_before_ms = 0.0
        self.last_order = 0
        self.numbering = numbering
        """None: nothing is numbered, and what is sent again may be in the log twice."""
        self.places = 0
        """How many batches were numbered: the place of the next one among them."""
        self.wants_number = False
        """Whether everything is to be numbered anew once it has recovered."""
        self.wants_id = False
        """Whether that takes another producer id."""
        self.renumbered = 0
        """How often that was done since a batch was accepted."""

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    def next_order(self) -> tuple[int, ...]:
        """Return the order of the next batch."""
        self.last_order += 1
        return (self.last_order,)

    @property
    def sendable(self) -> bool:
        """Whether the first waiting batch may be sent, but for time, leader, and those in flight."""
        if self.recovering:
            return False
        first = next((batch for batch in self.waiting if not batch.done), None)
        return first is not None and first.encoded is not None

    @property
    def lacks_id(self) -> bool:
        """Whether nothing can be sent before there is a producer id."""
        return self.numbering is not None and not self.numbering.has_id

    def close(self, batch: Batch) -> None:
        """Queue a batch that takes no more rows; its number is predicted, so that it is encoded with it."""
        if self.numbering is not None:
            batch.number = self.numbering.predict(batch.count)
        self.waiting.append(batch)

    @property
    def busy(self) -> bool:
        """Whether anything has still to be sent or answered."""
        return bool(self.waiting or self.in_flight or self.refused)

    def take(self, node_id: int, room_bytes: int, *, at_least_one: bool, leader_epoch: int = -1) -> list[Batch]:
        """Move encoded batches of at most `room_bytes` in all from waiting to in flight, and return them.

        Nothing while batches are in flight to another node: answers from two leaders would race. Who does not want to
        wait for those answers any more gives the batches up first (`on_refused`). Batches of an idempotent producer
        get their numbers here.
        """
        taken: list[Batch] = []
        if self.recovering or (self.in_flight and self.node_id != node_id) or self.lacks_id:
            return taken
        waiting, numbering = self.waiting, self.numbering
        mispredicted = False
        while waiting:
            batch = waiting[0]
            if batch.done:  # timed out meanwhile
                waiting.popleft()
                mispredicted = True
                continue
            if batch.encoded is None:
                break
            if numbering is not None and self.in_flight:
                place = batch.place if batch.numbered else self.places
                if place - next(iter(self.in_flight)).place >= BATCHES_REMEMBERED:
                    break
            size = len(batch.encoded)
            if size > room_bytes and not (at_least_one and not taken):
                break
            room_bytes -= size
            batch.sent = True
            if numbering is not None and not batch.numbered:
                batch.stamp(numbering.take(batch.count))
                batch.place = self.places
                self.places += 1
            taken.append(waiting.popleft())
            self.in_flight[batch] = None
        if mispredicted:
            self._repredict()
        if taken:
            self.node_id = node_id
            self.sent_epoch = leader_epoch
        return taken

    def on_accepted(self, batch: Batch) -> None:
        """The broker has answered: held."""
        self.in_flight.pop(batch, None)
        self.failures = self.renumbered = 0
        self.refused_since_ms = None
        if self.numbering is not None:
            self.numbering.on_acknowledged(batch.number, batch.count)

    def is_first_in_flight(self, batch: Batch) -> bool:
        """Whether every batch sent before this one has an answer that settles it."""
        return next(iter(self.in_flight), None) is batch and not any(
            before.order < batch.order and not before.done for before in self.refused
        )

    def on_denied(self, batch: Batch) -> None:
        """The broker says that what comes before this batch is missing in the log, and the batch is not there.

        Of the first batch in flight that is the truth about all of the queue: as the broker appends in order only, and
        denies only what no replica in sync may have, nothing from this batch on is in the log, and all of it is
        numbered anew. Of another batch the word means nothing yet: it is sent again.
        """
        self.wants_number |= self.is_first_in_flight(batch)
        self.on_refused(batch, resend=True, counts=self.renumbered > 0)

    def on_fenced(self, batch: Batch) -> list[Batch]:
        """Somebody else has used the producer id in a later epoch: go on with another one.

        Returns batches that may be in the log from an earlier try; the caller gives them up, since under another id
        they would be there twice.
        """
        if not self.is_first_in_flight(batch):
            self.on_refused(batch, resend=True, counts=False)
            return []
        doubtful = [each for each in (*self.in_flight, *self.refused, *self.waiting) if each.in_doubt and not each.done]
        self.wants_number = self.wants_id = True
        self.on_refused(batch, resend=not batch.in_doubt, counts=self.renumbered > 0)
        return doubtful

    def on_refused(self, batch: Batch, *, resend: bool, counts: bool) -> None:
        """The broker has refused the batch, or its stream broke. `counts`: one more failure for the backoff."""
        self.in_flight.pop(batch, None)
        self.recovering = True
        if counts:
            self.failures += 1
        if resend and not batch.done:
            self.refused.append(batch)

    def note_failure(self, error: RaftlogError) -> None:
        """Remember why nothing gets through. What the first broker answers that is reached again is not the latest of
        many refusals, and does not wait as if it were."""
        if isinstance(error, BrokerUnavailable) != isinstance(self.last_error, BrokerUnavailable):
            self.failures = 0
        self.last_error = error

    def forgive(self) -> None:
        """Somebody else leads now: what the one before refused says nothing about him."""
        self.failures = 0
        self.refused_since_ms = None
        self.not_before_ms = 0.0

    def replace(self, batch: Batch, parts: tuple[Batch, Batch]) -> None:
        """The broker has refused the batch as too large: its halves take its place."""
        self.in_flight.pop(batch, None)
        self.recovering = True
        if batch.numbered:  # one more than there were
            for later in (*self.in_flight, *self.refused, *self.waiting):
                later.place += later.numbered and later.place > batch.place
            self.places += 1
        self.refused.extend(parts)

    def recovered(self) -> bool:
        """Go back to flowing if nothing is in flight any more; return whether that happened."""
        if not self.recovering or self.in_flight:
            return False
        self.refused.sort(key=lambda batch: batch.order)
        self.waiting.extendleft(reversed(self.refused))
        self.refused.clear()
        self.recovering = False
        self.chain += 1
        if self.wants_number:
            self._number_anew()
        self._check_invariants()
        return True

    def _number_anew(self) -> None:
        assert self.numbering is not None
        self.renumbered += 1
        if self.wants_id:
            self.numbering.forget()
        elif self.numbering.has_id:
            self.numbering.start_over()
        self.wants_number = self.wants_id = False
        for batch in self.waiting:
            batch.numbered = batch.in_doubt = False
        self._repredict()

    def adopt(self, producer_id: int, producer_epoch: int) -> None:
        """Number what waits with a producer id of one's own from now on."""
        assert self.numbering is not None
        assert all(batch.done for batch in self.in_flight), "what has a number of another producer id is over"
        self.numbering.adopt(producer_id, producer_epoch)
        self._repredict()

    def drop_id(self) -> None:
        """Let the producer id go at the end of its transaction: `adopt` begins the next one, from sequence 0."""
        assert self.numbering is not None
        assert all(batch.done or not batch.numbered for batch in (*self.in_flight, *self.refused, *self.waiting))
        self.numbering.forget()

    def _repredict(self) -> None:
        """Batches that wait will have other numbers than those they were closed with: so will those to come."""
        if self.numbering is not None:
            self.numbering.repredict(
                sum(batch.count for batch in self.waiting if not batch.numbered and not batch.done)
            )

    def take_out(self) -> list[Batch]:
        """Take out everything that is not in flight and return it; the caller completes it with an error."""
        failed = [*self.refused, *self.waiting]
        if self.open is not None:
            failed.append(self.open)
        self.refused.clear()
        self.waiting.clear()
        self.open = None
        return failed

    def _check_invariants(self) -> None:
        orders = [batch.order for batch in self.waiting]
        assert orders == sorted(orders), "waiting batches are ordered"
        if self.numbering is not None:
            numbered = [batch.numbered for batch in self.waiting if not batch.done]
            assert numbered == sorted(numbered, reverse=True), "numbered batches wait in front"
