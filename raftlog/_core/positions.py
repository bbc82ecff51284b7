"""Where a consumer stands in each partition, and what it has fetched and not handed out yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from raftlog._core.fetched import Rows, Skipped, wanted_rows
from raftlog.errors import CorruptRecordError, RaftlogError, UnsupportedVersion
from raftlog.format import Buffer
from raftlog.format.aborted import AbortedRanges
from raftlog.types import TopicPartition

MAX_COMPLAINTS: Final = 6
"""Times that a batch which does not check is asked for again: the replica that it came from may be the damaged one."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One frame's records: under which subscription they came, and whom to give the credit back to.

    `aborted`: of which transactions they are that were aborted, if any (isolation.level=read_committed).
    """

    subscription_id: int
    records: Buffer
    source: Any
    aborted: AbortedRanges | None = None


class NearReplica(NamedTuple):
    """A follower to read from (KIP-392), while this is the leader epoch and the time has not come to ask again."""

    node_id: int
    leader_epoch: int
    until_ms: float


class Mark(NamedTuple):
    """Where a partition stood before something of it was taken out."""

    position: int
    last_epoch: int
    topic_id: bytes


class PartitionState:
    """One partition that the consumer reads.

    Transitions:
        unplaced    -> placed      the start was looked up, or `seek`
        placed      -> subscribed  the shell subscribed at `position`; frames of that subscription count
        subscribed  -> placed      seek, pause, refusal, broken stream, another leader or a nearer replica to read
                                   from, a batch that does not check: frames of the old subscription are stale
        any         -> unplaced    out of range with a policy to start over
        any         -> failed      `error` is raised by a poll, again and again with pauses between; seek ends it
        failed      -> as before   the error was raised and may be over: it is tried again after the pause

    Invariants: frames are only kept under the current subscription; `position` is the offset of the next record to
    hand out and moves only forward, but for `seek` and a start that was looked up.
    """

    __slots__ = (
        "complaints",
        "error",
        "failures",
        "frames",
        "high_watermark",
        "last_epoch",
        "leader_epoch",
        "missing_since_ms",
        "near",
        "node_id",
        "not_before_ms",
        "paused",
        "position",
        "queued",
        "raise_not_before_ms",
        "raised",
        "refusal",
        "reset",
        "rows",
        "source",
        "subscription_id",
        "topic_id",
        "topic_partition",
    )

    def __init__(self, topic_partition: TopicPartition, topic_id: bytes, reset: str) -> None:
        self.topic_partition = topic_partition
        self.topic_id = topic_id
        self.position: int | None = None
        self.reset = reset
        """Where to begin while unplaced: earliest, latest, or none."""
        self.refusal: RaftlogError | None = None
        """What its leader last said instead of a start."""
        self.last_epoch = -1
        """Leader epoch of the record before `position`, to detect truncation (KIP-320); -1: not known."""
        self.paused = False
        self.error: RaftlogError | None = None
        self.subscription_id: int | None = None
        self.node_id = -1
        self.leader_epoch = -1
        """The leader epoch that it was subscribed under last."""
        self.missing_since_ms: float | None = None
        """Since when nobody gives any records, or says where it begins: there is no leader, or he is another one."""
        self.near: NearReplica | None = None
        """The follower that the leader has named as nearer to this client."""
        self.frames: deque[Fetched] = deque()
        self.source: Iterator[Rows | Skipped] | None = None
        self.rows: Rows | None = None
        self.queued = False
        self.high_watermark = -1
        self.failures = 0
        self.not_before_ms = 0.0
        """When to ask the broker again, after `failures` refusals in a row."""
        self.complaints = 0
        """Times that the batch at `position` did not check; above zero, brokers are told so with the next subscription.

        They look at their disks then, and another replica takes over from a damaged one.
        """
        self.raised = 0
        """Errors that polls have raised for it since its last record."""
        self.raise_not_before_ms = 0.0

    def place(self, position: int) -> list[Fetched]:
        """Go on at `position`; return the frames that are stale now."""
        self.position = position
        self.last_epoch = -1
        self.error = None
        self.failures = self.raised = self.complaints = 0
        self.not_before_ms = self.raise_not_before_ms = 0.0
        return self.unsubscribe()

    def unplace(self, reset: str) -> list[Fetched]:
        """Look up where to begin; return the frames that are stale now."""
        self.position = None
        self.reset = reset
        self.last_epoch = -1
        self.error = None
        self.complaints = 0
        return self.unsubscribe()

    def unsubscribe(self) -> list[Fetched]:
        """Drop the subscription and what came under it; return the frames, whose credit goes back."""
        self.subscription_id = None
        self.node_id = -1
        stale = list(self.frames)
        self.frames.clear()
        self.source = self.rows = None
        return stale

    @property
    def fetchable(self) -> bool:
        """Whether it wants a subscription."""
        return self.position is not None and not self.paused and self.error is None and self.subscription_id is None

    @property
    def unplaced(self) -> bool:
        """Whether it wants a start."""
        return self.position is None and self.error is None

    @property
    def has_data(self) -> bool:
        """Whether there may be something to hand out."""
        return self.rows is not None or self.source is not None or bool(self.frames)

    def take(self, max_rows: int, spent: list[Fetched], *, check_crcs: bool) -> Rows | None:
        """Hand out the next rows of at most one batch and move on; used-up frames are added to `spent`.

        Raises:
            CorruptRecordError: the frame is dropped with the subscription; the position stays before what is broken.
                So it does for whatever else comes out of here, KeyboardInterrupt among it.
        """
        try:
            return self._take(max_rows, spent, check_crcs)
        except BaseException:  # a generator that has raised is at its end: what it had left must not count as read
            spent += self.unsubscribe()
            raise

    def _take(self, max_rows: int, spent: list[Fetched], check_crcs: bool) -> Rows | None:
        while self.rows is None:
            if self.source is None:
                if not self.frames:
                    return None
                assert self.position is not None
                self.source = wanted_rows(
                    self.topic_partition,
                    self.frames[0].records,
                    self.position,
                    check_crcs=check_crcs,
                    end_offset=self.high_watermark if self.high_watermark >= 0 else None,
                    aborted=self.frames[0].aborted,
                )
            found = next(self.source, None)
            if found is None:
                self.source = None
                spent.append(self.frames.popleft())
            elif isinstance(found, Skipped):
                self._advance(found.next_offset)
                self.last_epoch = found.leader_epoch
            else:
                self.rows = found
        rows = self.rows
        if len(rows) > max_rows:
            self._advance(rows.offset_after(max_rows))
            self.rows = rows.tail(max_rows)
            rows = rows.head(max_rows)
        else:
            self._advance(rows.header.next_offset)
            self.rows = None
        self.last_epoch = rows.header.leader_epoch
        self.raised = self.complaints = 0
        return rows

    def complain(self) -> bool:
        """The batch at the position did not check: whether to ask for it again, before that is an error."""
        self.complaints += 1
        return self.complaints <= MAX_COMPLAINTS

    def _advance(self, position: int) -> None:
        assert self.position is not None
        assert position >= self.position, "a position never goes back by itself"
        self.position = position


class Positions:
    """All partitions of a consumer, taken from in turn so that none waits for another one to run dry."""

    def __init__(self) -> None:
        self.states: dict[TopicPartition, PartitionState] = {}
        self._turn: deque[PartitionState] = deque()
        self.doubtful: list[tuple[PartitionState, RaftlogError]] = []
        """Whose next batch did not check, and is to be asked for again after a pause."""
        self.passed = 0
        """Grows whenever a position has moved on over something of which nothing is handed out."""

    def add(self, state: PartitionState) -> None:
        """Begin to read a partition."""
        self.states[state.topic_partition] = state

    def remove(self, topic_partition: TopicPartition) -> list[Fetched]:
        """Stop reading a partition; return its frames, whose credit goes back."""
        return self.states.pop(topic_partition).unsubscribe()

    def receive(self, state: PartitionState, fetched: Fetched) -> bool:
        """Keep a frame; False when it is stale."""
        if state.subscription_id != fetched.subscription_id or self.states.get(state.topic_partition) is not state:
            return False
        if not state.queued:
            self._turn.append(state)  # a signal may come between any two steps: twice does no harm, never would
            state.queued = True
        state.frames.append(fetched)
        return True

    def take(
        self, max_rows: int, spent: list[Fetched], *, check_crcs: bool, marks: dict[PartitionState, Mark] | None = None
    ) -> list[Rows]:
        """Hand out rows of at most `max_rows` together; the partition that comes next is another one every time.

        Where each partition stands is put in `marks`, if it is not there, before it moves: `take_back` undoes what its
        caller could not make use of. A partition whose next batch is corrupt is listed in `doubtful`, to be asked for
        again, or gets that as its `error` when that was done often enough; the others go on.
        """
        taken: list[Rows] = []
        left = max_rows
        turn = self._turn
        while left > 0 and turn:
            state = turn[0]
            if marks is not None and state not in marks and state.position is not None:
                marks[state] = Mark(state.position, state.last_epoch, state.topic_id)
            position = state.position
            try:
                rows = state.take(left, spent, check_crcs=check_crcs)
            except RaftlogError as error:
                state.queued = False
                turn.popleft()
                if isinstance(error, (CorruptRecordError, UnsupportedVersion)) and state.complain():
                    self.doubtful.append((state, error))
                else:
                    state.error = error
                continue
            if rows is None:  # used up, or made stale
                self.passed += state.position != position
                state.queued = False
                turn.popleft()
                continue
            taken.append(rows)
            left -= len(rows)
        if turn:
            turn.rotate(-1)
        return taken

    def take_back(self, marks: dict[PartitionState, Mark]) -> list[Fetched]:
        """Go back to where partitions stood before something was taken that nobody got; return stale frames.

        What is another topic by now stays where it is. May be interrupted, and done again: `marks` has what is left.
        """
        stale: list[Fetched] = []
        for state in list(marks):
            mark = marks[state]
            current = self.states.get(state.topic_partition) is state and state.topic_id == mark.topic_id
            if current and state.position is not None and state.position >= mark.position:
                stale += state.unsubscribe()
                state.position, state.last_epoch = mark.position, mark.last_epoch
            del marks[state]
        return stale

    def failed(self, now_ms: float) -> PartitionState | None:
        """Return the first partition with an error that it is time to raise."""
        return next(
            (
                state
                for state in self.states.values()
                if state.error is not None and state.raise_not_before_ms <= now_ms
            ),
            None,
        )
