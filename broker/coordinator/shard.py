"""One led partition of a coordinator's topic: loaded, then decide, append, replay; effects leave once committed.

    submit -> queue -> turn: decide and replay each, append what they wrote as one batch -> committed: effects

A turn is one round of the event loop: all commands received meanwhile share one append, one fsync and one round to the
followers. While `MAX_UNCOMMITTED` appends are under way there is no turn; only answers that depend on no uncommitted
record (`Core.at_once`: a plain heartbeat) are sent meanwhile.

`load` replays the log of a coordinator's partition into a core, in pieces that are read and decoded off the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar, cast

from google.protobuf.message import Message

from broker.clock import Clock
from broker.coordinator.core import (
    Core,
    Decision,
    Listener,
    Notice,
    Now,
    Recipient,
    Record,
    Reply,
    Send,
    decode,
    encode,
)
from broker.log.partition_log import ReadResult
from broker.observability.event_loop import report
from broker.partition.partition import Partition
from broker.server.lease import Lease
from raftlog.errors import (
    BrokerOverloaded,
    CoordinatorLoadInProgress,
    CoordinatorNotAvailable,
    CorruptRecordError,
    InternalError,
    NotCoordinator,
    NotEnoughReplicas,
    OffsetOutOfRange,
    RaftlogError,
)

PIECE_BYTES: Final = 1 << 20
REPLAY_SLICE_RECORDS: Final = 500
REPLAY_SLICE_S: Final = 0.004
"""After this many replayed records, or this time, other tasks get a turn on the event loop."""


class ReadableLog(Protocol):
    """The part of a partition's log that loading needs."""

    @property
    def log_start_offset(self) -> int:
        """The first offset that can be read."""
        ...

    def read(self, offset: int, max_bytes: int, end_offset: int, *, blocking: bool) -> ReadResult | None:
        """Return whole batches from `offset` on, none at or above `end_offset`."""
        ...


async def load(
    log: ReadableLog, end_offset: int, replay: Callable[[bytes, bytes | None], None], executor: Executor
) -> int:
    """Replay every record from the log's start up to `end_offset` (exclusive); return how many there were.

    Raises:
        CorruptRecordError: bytes that do not check, or a record that `replay` refuses; names the offset.
        StorageError: the log directory is offline.
    """
    loop = asyncio.get_running_loop()
    position, count = log.log_start_offset, 0
    while position < end_offset:
        try:
            records, next_offset = await loop.run_in_executor(executor, _read, log, position, end_offset)
        except OffsetOutOfRange:
            if log.log_start_offset <= position:
                raise
            position = log.log_start_offset  # it has moved meanwhile
            continue
        number, until_s = 0, loop.time() + REPLAY_SLICE_S
        for offset, key, value in records:
            try:
                replay(key, value)
            except CorruptRecordError as error:
                raise CorruptRecordError(f"the record at offset {offset}: {error}") from error
            number += 1
            if number == REPLAY_SLICE_RECORDS or loop.time() > until_s:
                await asyncio.sleep(0)
                number, until_s = 0, loop.time() + REPLAY_SLICE_S
        count += len(records)
        if next_offset <= position:
            raise CorruptRecordError(f"nothing can be read at offset {position}, the log ends at {end_offset}")
        position = next_offset
    return count


def _read(log: ReadableLog, position: int, end_offset: int) -> tuple[list[tuple[int, bytes, bytes | None]], int]:
    result = log.read(position, PIECE_BYTES, end_offset, blocking=True)
    assert result is not None, "a blocking read waits"
    # The first batch may begin below the position: the log's start can lie within one.
    return [record for record in decode(result.records) if record[0] >= position], result.next_offset


logger = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
TopicsT = TypeVar("TopicsT")

MAX_QUEUED: Final = 20_000
"""Commands that may wait for their turn; a bound on memory while nothing can be appended."""
TURN_COMMANDS: Final = 500
TURN_BYTES: Final = 256 << 10
MAX_UNCOMMITTED: Final = 1
"""The most appends under way at a time; commands received meanwhile share the next append."""
TURN_S: Final = 0.004
"""After this many commands, bytes of records or seconds, the rest waits for the next turn, because other tasks use
the loop too. A piece of the work on passed deadlines is done in every turn."""
RETRY_LOAD_S: Final = 30.0
RELOAD_S: Final = 1.0
"""The pause before a reload after a refused append, which leaves the log unchanged."""
BLOCKED_LOOK_S: Final = 0.1
"""Interval of the check whether enough replicas are in sync again."""


class State(Enum):
    """See `Shard`."""

    LOADING = "loading"
    ACTIVE = "active"
    FAILED = "failed"
    GONE = "gone"


class _Uncommitted:
    """Effects that wait for the high watermark to reach `end_offset`."""

    __slots__ = ("effects", "end_offset")

    def __init__(self, end_offset: int, effects: list[Send]) -> None:
        self.end_offset = end_offset
        self.effects = effects


class Shard(Generic[CommandT, TopicsT]):
    """The coordinator of one partition in one leader epoch. Lives on the event loop.

    Transitions:
        (made)  -> loading   `begin`
        loading -> active    replayed up to the log's end, and everything there is committed
        loading -> failed    a record cannot be read, or the disk fails
        active  -> failed    an append was refused unexpectedly, or the core has a bug: the replayed records are not
                             in the log, so the state is dropped
        failed  -> loading   after a pause
        any     -> gone      another broker leads the partition, or none; final

    Commands are refused in every state but active; when that state ends, waiting callers and streams get an error.
    While this broker has no lease, or too few replicas are in sync, nothing is decided: commands of streams wait, calls
    are refused (too few in sync) or wait (no lease: it is soon renewed, or lost).

    Invariants: the core's state is the replay of the log; `_uncommitted` ends at the log's end, in order.
    """

    def __init__(
        self,
        partition: Partition,
        make_core: Callable[[], Core[CommandT, TopicsT]],
        topics: Callable[[], TopicsT],
        *,
        executor: Executor,
        clock: Clock,
        lease: Lease,
    ) -> None:
        self.partition = partition
        self.leader_epoch: int = partition.leader_epoch
        self.state = State.LOADING
        self.failure: RaftlogError | None = None
        """Why commands are refused, while the state is failed or gone."""
        self._make_core = make_core
        self._topics = topics
        self._executor = executor
        self._clock = clock
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        self._core = make_core()
        self._queue: deque[tuple[CommandT, Recipient | None]] = deque()
        self._attached: dict[Recipient, None] = {}
        self._uncommitted: deque[_Uncommitted] = deque()
        self._loading: asyncio.Task[None] | None = None
        self._loaded_to = -1
        """The end of the replayed log; -1 before it is replayed."""
        self._scheduled = False
        self._missed_turn = False
        """Whether a turn was skipped because enough appends were under way."""
        self._topics_changed = False
        self._due_by: Now | None = None
        """The time of the next `on_time`, which runs once the `_heard_first` commands received before it are decided.
        So a member whose heartbeat waits in the queue does not count as silent, even if the queue stays full."""
        self._heard_first = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = 0.0
        """The time of the timer; if it fires too early, because deadlines have moved, it is set again."""

    def __repr__(self) -> str:
        return f"<shard {self.partition.topic_partition} epoch {self.leader_epoch} {self.state.value}>"

    @property
    def core(self) -> Core[CommandT, TopicsT] | None:
        """The coordinator's state, read-only; None in every state but active."""
        return self._core if self.state is State.ACTIVE else None

    @property
    def queued(self) -> int:
        """The number of waiting commands."""
        return len(self._queue)

    # Life

    def begin(self) -> None:
        """Start to load. Called once."""
        self._load()

    def _load(self) -> None:
        self.state, self.failure = State.LOADING, None
        self._loaded_to = -1
        self._core = self._make_core()
        self._loading = self._loop.create_task(self._run_load(), name=f"load-{self.partition.topic_partition}")

    async def _run_load(self) -> None:
        started_ms = self._clock.monotonic_ms()
        log = self.partition.log
        end_offset = log.log_end_offset
        try:
            count = await load(log, end_offset, self._core.replay, self._executor)
        except Exception as error:  # a bug while replaying ends this shard only
            if isinstance(error, CorruptRecordError):
                logger.error("%s cannot be loaded: %s", self.partition.topic_partition, error)
            else:
                logger.error("%s cannot be loaded", self.partition.topic_partition, exc_info=error)
            self._fail(f"cannot be loaded: {error}", RETRY_LOAD_S)
            return
        logger.info(
            "coordinator loaded",
            extra={
                "event": "coordinator_loaded",
                "partition": str(self.partition.topic_partition),
                "leader_epoch": self.leader_epoch,
                "records": count,
                "end_offset": end_offset,
                "took_ms": round(self._clock.monotonic_ms() - started_ms),
            },
        )
        self._loaded_to = end_offset
        self._look()

    def _activate(self) -> None:
        self._loaded_to = -1
        self.state = State.ACTIVE
        try:
            self._core.loaded(self._now())
        except Exception as error:
            self._bug(error)
            return
        self.topics_changed()

    def _is_over(self) -> bool:
        return not self.partition.leads or self.partition.leader_epoch != self.leader_epoch

    def end(self) -> None:
        """Drop the state: another broker leads, or none. Waiting callers are told the new leader, if it is known."""
        if self.state is State.GONE:
            return
        self.state = State.GONE
        reason = self.partition.refused_by
        why = str(reason) if reason is not None else f"{self.partition.topic_partition}: a later leader epoch has begun"
        self.failure = NotCoordinator(why)
        if self._loading is not None:
            self._loading.cancel()
        self.partition.stop_waiting(self._look)
        self._lease.stop_waiting(self._schedule)
        self._drop(self.failure)

    def _fail(self, why: str, retry_s: float) -> None:
        if self.state is State.GONE:
            return
        self.state = State.FAILED
        self.failure = CoordinatorNotAvailable(f"{self.partition.topic_partition} {why}")
        self._drop(self.failure)
        self._timer = self._loop.call_later(retry_s, self._retry)

    def _retry(self) -> None:
        self._timer = None
        if self.state is not State.FAILED:
            return
        if self._is_over():
            self.end()
        else:
            self._load()

    def _bug(self, error: Exception) -> None:
        logger.error("%s: the coordinator has a bug", self.partition.topic_partition, exc_info=error)
        self._fail(f"is loaded again after an internal error: {type(error).__name__}: {error}", RELOAD_S)

    def _drop(self, reason: RaftlogError) -> None:
        """Drop all commands under way, and fail their recipients."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._queue.clear()
        self._due_by = None
        self._uncommitted.clear()
        self._core = self._make_core()
        attached, self._attached = self._attached, {}
        for recipient in attached:
            self._deliver(recipient, reason)

    # Commands

    @property
    def refusal(self) -> RaftlogError | None:
        """Why commands are refused now; None if they are accepted."""
        if self.state is State.ACTIVE:
            return None
        if self.state is State.LOADING:
            return CoordinatorLoadInProgress(f"{self.partition.topic_partition} is being loaded; try again")
        return self.failure

    def submit(self, command: CommandT, recipient: Recipient | None = None) -> None:
        """Queue a command for a decision; its effects go to their recipients.

        `recipient` gets an error if the command is refused; None: no recipient. A stream stays attached until `detach`.
        """
        refusal = self.refusal
        if refusal is None and len(self._queue) >= MAX_QUEUED:
            refusal = BrokerOverloaded(
                f"{self.partition.topic_partition}: {len(self._queue)} commands wait for the coordinator; try later"
            )
        if refusal is not None:
            if recipient is not None:
                recipient.deliver(refusal)
            return
        if recipient is not None:
            self._attached[recipient] = None
            if recipient.is_stream and (answer := self._at_once(command)) is not None:
                recipient.deliver(answer)
                return
        self._queue.append((command, recipient))
        self._schedule()

    def tell(self, command: CommandT) -> None:
        """Queue a command of this broker itself: it needs no room in the queue and has no recipient.

        It is ignored in every state but active: a coordinator that loads the log must find out again what it says.
        """
        if self.state is State.ACTIVE:
            self._queue.append((command, None))
            self._schedule()

    def _at_once(self, command: CommandT) -> Message | None:
        try:
            self.partition.check_serving(self.leader_epoch)
        except RaftlogError:
            return None
        return self._core.at_once(command, self._now())

    def detach(self, recipient: Recipient) -> None:
        """Drop a recipient that has ended."""
        self._attached.pop(recipient, None)

    def topics_changed(self) -> None:
        """Have the core look at the cluster's topics again, in the next turn."""
        if self.state is State.ACTIVE:
            self._topics_changed = True
            self._schedule()

    # Turns

    def _schedule(self) -> None:
        if not self._scheduled and self.state is State.ACTIVE:
            self._scheduled = True
            self._loop.call_soon(self._run_turn)

    def _run_turn(self) -> None:
        self._scheduled = False
        if self.state is not State.ACTIVE:
            return
        try:
            if not self._may_append():
                return
            if len(self._uncommitted) >= MAX_UNCOMMITTED:
                self._missed_turn = True  # the next commit makes one
            else:
                self._turn()
        except Exception as error:  # after any error, state and log may differ
            self._bug(error)

    def _may_append(self) -> bool:
        """Whether records may be appended; if not, schedule another turn for when they may."""
        if self._is_over():
            self.end()
            return False
        try:
            self.partition.check_append(self.leader_epoch)
            return True
        except NotEnoughReplicas as error:
            self._refuse_calls(CoordinatorNotAvailable(str(error)))
            self._set_timer(BLOCKED_LOOK_S)
        except RaftlogError as error:
            if self.partition.refused_by is None:  # no lease
                self._lease.call_when_renewed(self._schedule)
            else:
                logger.info("%s cannot go on: %s", self.partition.topic_partition, error)
                self.end()
        return False

    def _refuse_calls(self, reason: RaftlogError) -> None:
        queue, self._queue = self._queue, deque()
        for command, recipient in queue:
            if recipient is None or recipient.is_stream:
                self._queue.append((command, recipient))
            else:
                self._attached.pop(recipient, None)
                self._deliver(recipient, reason)
        self._heard_first = min(self._heard_first, len(self._queue))

    def _turn(self) -> None:
        now = self._now()
        until_s = self._loop.time() + TURN_S
        records: list[Record] = []
        effects: list[Send] = []
        size = 0
        self._note_due(now)
        for _ in range(TURN_COMMANDS):
            if not self._queue or size >= TURN_BYTES or self._loop.time() > until_s:
                break
            command, recipient = self._queue.popleft()
            try:
                decision = self._core.decide(command, now)
            except Exception as error:  # nothing was applied; the others' commands shall not suffer
                logger.exception("%s: a command failed", self.partition.topic_partition)
                if recipient is not None:
                    effects.append(Send(recipient, InternalError(f"{type(error).__name__}: {error}")))
                decision = Decision()
            if decision.rest is not None:
                self._queue.appendleft((cast(CommandT, decision.rest), recipient))
            elif self._heard_first:
                self._heard_first -= 1
            size += self._apply(decision, records, effects)
        if self._topics_changed:
            self._topics_changed = False
            self._apply(self._core.on_topics(self._topics(), now), records, effects)
        deadline_ms = self._note_due(now)
        while self._is_due():
            assert self._due_by is not None, "else nothing is due"
            size += self._apply(self._core.on_time(self._due_by), records, effects)
            deadline_ms = self._core.next_deadline_ms()
            if size >= TURN_BYTES or self._loop.time() > until_s + TURN_S:
                break
        if self._append(records, effects, now):
            self._go_on(deadline_ms)

    def _note_due(self, now: Now) -> float | None:
        """Schedule `on_time` for after the commands that are queued now, which may be heartbeats.

        Return the core's next deadline.
        """
        deadline_ms = self._core.next_deadline_ms()
        if self._due_by is None and deadline_ms is not None and deadline_ms <= now.monotonic_ms:
            self._due_by, self._heard_first = now, len(self._queue)
        return deadline_ms

    def _is_due(self) -> bool:
        """Whether a deadline of the core has passed and may be handled now."""
        if self._due_by is None or self._heard_first:
            return False
        deadline_ms = self._core.next_deadline_ms()
        if deadline_ms is None or deadline_ms > self._due_by.monotonic_ms:
            self._due_by = None
        return self._due_by is not None

    def _apply(self, decision: Decision, records: list[Record], effects: list[Send]) -> int:
        size = 0
        for key, value in decision.records:
            self._core.replay(key, value)
            records.append((key, value))
            size += len(key) + len(value or b"")
        effects.extend(decision.effects)
        return size

    def _append(self, records: list[Record], effects: list[Send], now: Now) -> bool:
        """Append the decided records; False if that failed, which drops the state."""
        if records:
            batch, header = encode(records, now.wall_ms)
            try:
                self.partition.append(batch, self.leader_epoch, None, all_replicas=True, checked=header)
            except RaftlogError as error:
                logger.error("%s: an append was refused: %s", self.partition.topic_partition, error)
                self._fail(f"could not be written, and is loaded again: {error}", RELOAD_S)
                return False
            self._uncommitted.append(_Uncommitted(self.partition.log_end_offset, effects))
            self._look()
        elif self._uncommitted:
            self._uncommitted[-1].effects.extend(effects)
        else:
            self._release(effects)
        return self.state is State.ACTIVE

    def _go_on(self, deadline_ms: float | None) -> None:
        if self._queue or self._topics_changed:
            self._schedule()
        if deadline_ms is not None:
            self._set_timer(max(0.0, deadline_ms - self._clock.monotonic_ms()) / 1_000)
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, delay_s: float) -> None:
        at_s = self._loop.time() + delay_s
        if self._timer is not None:
            if self._timer_at_s <= at_s:
                return
            self._timer.cancel()
        self._timer, self._timer_at_s = self._loop.call_later(delay_s, self._on_timer), at_s

    def _on_timer(self) -> None:
        self._timer = None
        self._schedule()

    def _now(self) -> Now:
        return Now(self._clock.monotonic_ms(), self._clock.now_ms())

    # What is committed

    def _look(self) -> None:
        """Send the effects up to the high watermark; called again when it moves, or when a role ends."""
        if self.state is State.GONE:
            return
        if self._is_over():
            self.end()
            return
        high_watermark = self.partition.high_watermark
        while self._uncommitted and self._uncommitted[0].end_offset <= high_watermark:
            self._release(self._uncommitted.popleft().effects)
            if self._missed_turn:
                self._missed_turn = False
                self._schedule()
        if 0 <= self._loaded_to <= high_watermark:
            self._activate()
        if self._uncommitted or self._loaded_to >= 0:
            self.partition.wait(self._look)

    def _release(self, effects: list[Send]) -> None:
        for effect in effects:
            if isinstance(effect.message, Notice):
                try:
                    cast(Listener, effect.to).notify(effect.message)
                except Exception as error:  # as in `_deliver`
                    report(f"{self.partition.topic_partition}: a notice could not be delivered", error)
                continue
            recipient = cast(Recipient, effect.to)  # the core gives back what it was given
            if not recipient.is_stream:
                self._attached.pop(recipient, None)
            self._deliver(recipient, effect.message)

    def _deliver(self, recipient: Recipient, message: Message | Reply | RaftlogError | None) -> None:
        try:
            recipient.deliver(message)
        except Exception as error:  # a bug of this one: what the others are owed is committed, and they shall have it
            report(f"{self.partition.topic_partition}: an answer could not be delivered", error)
