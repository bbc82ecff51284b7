"""Batches of one partition between the application and the broker, in order whatever is refused on the way."""

from __future__ import annotations

from collections import deque

from raftlog._core.batch import Batch
from raftlog.errors import BrokerUnavailable, RaftlogError


class PartitionQueue:
    """What is waiting for, and what is in flight to, the leader of one partition.

    Transitions:
        flowing     -> recovering  an in-flight batch is refused, or its stream breaks
        recovering  -> flowing     every in-flight batch has its answer; the refused ones go back in front, in order,
                                   under a larger `chain`

    While recovering nothing new is sent, so a refused batch is never overtaken: the broker refuses what was already
    in flight behind it until it sees the larger chain.

    Invariants: `waiting` is ordered by `Batch.order`, and everything in it comes after everything in flight, except
    while recovering; all in-flight batches were sent to `node_id`.
    """

    __slots__ = (
        "chain",
        "failures",
        "in_flight",
        "last_error",
        "last_order",
        "node_id",
        "not_before_ms",
        "open",
        "partition",
        "recovering",
        "refused",
        "refused_since_ms",
        "sent_epoch",
        "topic",
        "waiting",
    )

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.open: Batch | None = None
        self.waiting: deque[Batch] = deque()
        self.in_flight: dict[Batch, None] = {}
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

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    def next_order(self) -> tuple[int, ...]:
        """Return the order of the next batch."""
        self.last_order += 1
        return (self.last_order,)

    @property
    def sendable(self) -> bool:
        """Whether the first waiting batch may be sent, but for time and leader."""
        return bool(self.waiting) and not self.recovering and self.waiting[0].encoded is not None

    @property
    def busy(self) -> bool:
        """Whether anything has still to be sent or answered."""
        return bool(self.waiting or self.in_flight or self.refused)

    def take(self, node_id: int, room_bytes: int, *, at_least_one: bool, leader_epoch: int = -1) -> list[Batch]:
        """Move encoded batches of at most `room_bytes` in all from waiting to in flight, and return them.

        Nothing while batches are in flight to another node: answers from two leaders would race. Who does not want to
        wait for those answers any more gives the batches up first (`on_refused`).
        """
        taken: list[Batch] = []
        if self.recovering or (self.in_flight and self.node_id != node_id):
            return taken
        waiting = self.waiting
        while waiting:
            batch = waiting[0]
            if batch.done:  # timed out meanwhile
                waiting.popleft()
                continue
            if batch.encoded is None:
                break
            size = len(batch.encoded)
            if size > room_bytes and not (at_least_one and not taken):
                break
            room_bytes -= size
            batch.sent = True
            taken.append(waiting.popleft())
        if taken:
            self.node_id = node_id
            self.sent_epoch = leader_epoch
            self.in_flight.update(dict.fromkeys(taken))
        return taken

    def on_accepted(self, batch: Batch) -> None:
        """The broker has answered: held."""
        self.in_flight.pop(batch, None)
        self.failures = 0
        self.refused_since_ms = None

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
        self._check_invariants()
        return True

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
