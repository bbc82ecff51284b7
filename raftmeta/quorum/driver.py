"""Drives the Raft core from the event loop.

    message, proposal, link event or deadline -> cycle -> send what may leave at once
                                                       -> sync the log in the `wal` thread -> send what waited for it

One cycle at a time; what arrives while the log is being synced waits for the next one. Many causes make one cycle:
`kick` only asks for it. While a round of replication is under way, proposals are held back until the answer that ends
the round, so that they share the next one (Nagle).

Any unexpected exception is final: nothing more is sent or answered, and `on_fatal` is called once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Final, Protocol

from raftlog.errors import InternalError, NotController, RaftlogError, ShuttingDown, StorageError, UnknownOutcome
from raftlog.v1.raft_pb2 import RaftMessage
from raftmeta.raft.ports import Applied, ProposalOutcome

logger = logging.getLogger(__name__)

NAGLE_S: Final = 0.003
"""A proposal is held back this long at most."""
TIMER_GRAIN_S: Final = 0.001
"""Timers of the event loop are rounded to milliseconds: being late by one spares a second wakeup."""


class WriteAheadPort(Protocol):
    """The part of the write-ahead log that the driver uses."""

    @property
    def dirty(self) -> bool:
        """Whether there is something to sync."""
        ...

    def take(self) -> Any:
        """Return the next write."""
        ...

    def write(self, pending: Any) -> None:
        """Write and sync it; blocking, in any thread."""
        ...

    def done(self, pending: Any) -> None:
        """Note that the write is durable; on the event loop."""
        ...


class RaftPort(Protocol):
    """The part of the core that the driver uses; see `raftmeta.raft.node.RaftNode`."""

    @property
    def wants_cycle(self) -> bool:
        """Whether there is something to do at once."""
        ...

    def cycle(self) -> None:
        """Take one deterministic step."""
        ...

    def next_deadline_s(self) -> float:
        """Return when the next step is due if nothing happens before."""
        ...

    def take_immediate(self) -> Sequence[tuple[int, RaftMessage]]:
        """Return messages that promise nothing."""
        ...

    def take_durable(self) -> Sequence[tuple[int, RaftMessage]]:
        """Return messages that may leave once the log is synced."""
        ...

    def propose(self, command: bytes, done: Callable[[ProposalOutcome], None]) -> None:
        """Append a command; `done` is called with its outcome."""
        ...

    def read_index(self, done: Callable[[int | None], None]) -> None:
        """Ask a majority whether this is still the leader."""
        ...

    @property
    def has_peers(self) -> bool:
        """Whether there are other voters."""
        ...

    @property
    def in_flight(self) -> bool:
        """Whether entries wait for a majority."""
        ...


class Driver:
    """States: new -> running (`start`) -> closed (`close`) or failed; both are final."""

    def __init__(
        self,
        wal: WriteAheadPort,
        clock_s: Callable[[], float],
        executor: Executor,
        on_fatal: Callable[[RaftlogError], None],
    ) -> None:
        self._wal = wal
        self._clock_s = clock_s
        self._executor = executor
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._node: RaftPort | None = None
        self._send: Callable[[int, RaftMessage], None] = _drop
        self._syncer: ThreadPoolExecutor | None = None
        self._soon = False
        self._syncing = False
        self._again = False
        self._proposed = False
        self._held_back = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = float("inf")
        self._background: set[asyncio.Future[None]] = set()
        self._idle = asyncio.Event()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._stopped_by: RaftlogError | None = ShuttingDown("the quorum has not been started yet")
        self.on_commit: Callable[[float], None] = lambda seconds: None
        """Called with the time of each command from its proposal until it was applied."""

    @property
    def failed(self) -> bool:
        """Whether it has stopped for good because something broke."""
        return self._stopped_by is not None and not isinstance(self._stopped_by, ShuttingDown)

    # Asking

    def propose(self, command: bytes) -> asyncio.Future[Applied]:
        """Append a command; the future ends with the core's `Applied`.

        It fails with UnknownOutcome when the leadership ended before it was applied.

        Raises:
            NotController: this is not the active controller.
            RaftlogError: refused; nothing was appended.
        """
        node = self._running()
        answer: asyncio.Future[Applied] = self._loop.create_future()
        began_s = self._clock_s()

        def done(outcome: ProposalOutcome) -> None:
            self._waiting.discard(answer)
            if answer.done():
                return
            if isinstance(outcome, Applied):
                self.on_commit(self._clock_s() - began_s)
                answer.set_result(outcome)
            else:
                answer.set_exception(
                    UnknownOutcome("the controller stepped down before it knew whether the command is committed")
                )

        node.propose(command, done)
        self._waiting.add(answer)
        self._proposed = True
        if not self._syncing:
            self._cycle_for_proposals(node)
        return answer

    def _cycle_for_proposals(self, node: RaftPort) -> None:
        if node.has_peers and node.in_flight:
            self._hold_back()
        else:
            self.kick()

    def read_index(self) -> asyncio.Future[int]:
        """Ask for a round with a majority that begins now; the future ends with an index that is applied here.

        It fails with NotController when this is not the leader any more.

        Raises:
            NotController: as above, known at once.
        """
        node = self._running()
        answer: asyncio.Future[int] = self._loop.create_future()

        def done(index: int | None) -> None:
            self._waiting.discard(answer)
            if answer.done():
                return
            if index is None:
                answer.set_exception(NotController("this controller was deposed; ask the active one"))
            else:
                answer.set_result(index)

        self._waiting.add(answer)
        node.read_index(done)
        self.kick()
        return answer

    def _running(self) -> RaftPort:
        if self._stopped_by is not None:
            raise self._stopped_by
        assert self._node is not None
        return self._node

    # Work that the core wants done elsewhere

    def run_off_loop(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Run `work` in a thread, then `done` on the event loop with what it raised: for encoding snapshots."""

        def finish(future: asyncio.Future[None]) -> None:
            self._background.discard(future)
            if self._stopped_by is not None or future.cancelled():
                return
            try:
                done(future.exception())
            except Exception as error:
                self._fail(error)
                return
            self.kick()

        future = self._loop.run_in_executor(self._executor, work)
        self._background.add(future)
        future.add_done_callback(finish)

    # Driving

    def start(self, node: RaftPort, send: Callable[[int, RaftMessage], None]) -> None:
        """Begin to drive."""
        assert self._node is None
        self._node, self._send = node, send
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="wal")
        self._stopped_by = None
        self.kick()

    def kick(self) -> None:
        """Ask for a cycle; cheap, and may be called at any rate."""
        if self._syncing:
            self._again = True
        elif not self._soon and self._stopped_by is None:
            self._soon = True
            self._loop.call_soon(self._cycle)

    def _hold_back(self) -> None:
        if not self._held_back and not self._soon:
            self._held_back = True
            self._loop.call_later(NAGLE_S, self._release)

    def _release(self) -> None:
        if self._held_back:
            self._held_back = False
            self.kick()

    def _cycle(self) -> None:
        self._soon = False
        if self._stopped_by is not None or self._syncing:
            return
        self._held_back = self._proposed = False
        node = self._node
        assert node is not None
        try:
            node.cycle()
            for peer_id, message in node.take_immediate():
                self._send(peer_id, message)
            if self._wal.dirty:
                self._sync()
            else:
                self._finish(node)
        except Exception as error:
            self._fail(error)

    def _sync(self) -> None:
        assert self._syncer is not None
        self._syncing = True
        pending = self._wal.take()
        future = self._syncer.submit(self._wal.write, pending)
        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._synced, pending, future))

    def _synced(self, pending: Any, future: Any) -> None:
        self._syncing = False
        self._idle.set()
        if self._stopped_by is not None:
            return
        node = self._node
        assert node is not None
        try:
            future.result()
            self._wal.done(pending)
            self._finish(node)
        except Exception as error:
            self._fail(error)

    def _finish(self, node: RaftPort) -> None:
        for peer_id, message in node.take_durable():
            self._send(peer_id, message)
        if self._again:
            self._again = False
            self.kick()
        elif self._proposed:
            self._cycle_for_proposals(node)
            self._arm(node.next_deadline_s())
        elif node.wants_cycle:
            self.kick()
        else:
            self._arm(node.next_deadline_s())

    def _arm(self, due_s: float) -> None:
        """Arm a timer that fires no later than `due_s`; one that fires earlier finds nothing due and is armed again.

        A deadline mostly moves away; leaving the old timer in place is cheaper than moving it each time.
        """
        if self._timer is not None:
            if self._timer_due_s <= due_s:
                return
            self._timer.cancel()
        self._timer_due_s = due_s
        self._timer = self._loop.call_later(max(0.0, due_s - self._clock_s()) + TIMER_GRAIN_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._timer_due_s = float("inf")
        if self._stopped_by is not None or self._syncing or self._soon:
            return
        assert self._node is not None
        due_s = self._node.next_deadline_s()
        if due_s > self._clock_s():
            self._arm(due_s)
        else:
            self._cycle()

    # End

    def _fail(self, error: Exception) -> None:
        if self._stopped_by is not None:
            return
        if isinstance(error, RaftlogError):
            fatal: RaftlogError = error
        elif isinstance(error, OSError):
            fatal = StorageError(f"the metadata log cannot be written: {error}; repair the disk and restart the node")
        else:
            logger.exception("the quorum core failed", exc_info=error)
            fatal = InternalError(f"the quorum core failed: {type(error).__name__}: {error}")
        logger.error("this node stops taking part in the quorum: %s", fatal)
        self._end(fatal)
        self._on_fatal(fatal)

    def _end(self, reason: RaftlogError) -> None:
        self._stopped_by = reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, set()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(UnknownOutcome(f"the command may or may not be committed: {reason}"))

    async def close(self) -> None:
        """Stop driving; a sync under way is waited for, so that the log can be closed afterwards."""
        if self._stopped_by is None:
            self._end(ShuttingDown("this controller is stopping; ask another one"))
        while self._syncing:
            self._idle.clear()
            await self._idle.wait()
        if self._background:
            await asyncio.wait(set(self._background))
        if self._syncer is not None:
            self._syncer.shutdown(wait=True)
            self._syncer = None


def _drop(peer_id: int, message: RaftMessage) -> None:
    """Drop messages until there are links."""
