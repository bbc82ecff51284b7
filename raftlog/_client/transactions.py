"""A producer's transactions on the event loop: begun at their coordinator, decided there, and what comes between."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from raftlog._client.openings import Openings, Places
from raftlog._client.producer_ids import ProducerId
from raftlog._client.transaction_calls import Outdated, TransactionCalls
from raftlog._client.transaction_offsets import TransactionOffsets
from raftlog._client.turns import Turns
from raftlog._core.transaction_state import Numbers, TransactionPhase, TransactionState
from raftlog._delivery import Deadline, wait_async
from raftlog.errors import (
    FencedMemberEpoch,
    InvalidProducerEpoch,
    InvalidRequestError,
    InvalidTxnState,
    RaftlogError,
    RequestTimedOut,
    TransactionAbortable,
)
from raftlog.types import GroupMetadata, OffsetAndMetadata, TopicPartition

if TYPE_CHECKING:
    from raftlog._client.producer import ProducerEngine

logger = logging.getLogger(__name__)

LAST_ABORT_S: Final = 5.0
"""How long a program that ends, or is interrupted, may take to abort; the coordinator does it later by itself."""
_OVER: Final = (InvalidProducerEpoch, InvalidTxnState)
"""What partitions say of a transaction that has ended; why, its coordinator knows."""


class Transactions:
    """The transactions of one engine, whose gate this is: `raftlog._core.transaction_state` says what follows what.

    The first record for a partition asks the coordinator to add it; while that is under way more partitions gather for
    the next call, and their batches wait. Whatever fails for good makes the transaction one that can only be aborted.

    Nothing that comes late does harm: each transaction has an epoch of its own, so what is still on its way from one
    that has ended is refused wherever it arrives (KIP-890).
    """

    def __init__(self, engine: ProducerEngine) -> None:
        options = engine.options
        assert options.transactional_id
        self.state = TransactionState(options.transactional_id)
        self._engine = engine
        self._id = options.transactional_id
        self._calls = TransactionCalls(engine.metadata, engine.connections, options)
        self._offsets = TransactionOffsets(engine.metadata, engine.connections, options)
        self._turns = Turns(self.state)
        """Of init, commit, abort and offsets."""
        self._partitions = Openings(engine, self._add, self._not_added)
        self._groups: set[str] = set()
        self._asked = False
        """Whether the coordinator may know of the transaction."""
        self._certain = True
        """Whether every call that adds to it was answered."""
        self._sweeping = False
        """Whether what is not acknowledged is about to fail, as the transaction has."""
        self._asking_why: asyncio.Task[None] | None = None
        self.aborts_on_close = False
        """Whether it is no mistake of the application to close with a transaction open."""

    # The engine's gate

    @property
    def last_error(self) -> RaftlogError | None:
        """Why partitions are not added yet."""
        return self._calls.last_error

    def may_send(self, topic_partition: TopicPartition, topic_id: bytes) -> bool:
        """As `PartitionGate.may_send`."""
        place = (topic_id, topic_partition.partition)
        if place in self._partitions:
            return True
        if self.state.writable:
            self._partitions.want(place, topic_partition)
        return False

    def check_may_send(self) -> None:
        """As `PartitionGate.check_may_send`."""
        self.state.check_may_send()

    def on_failure(self, topic_partition: TopicPartition, error: RaftlogError) -> None:
        """As `PartitionGate.on_failure`."""
        self._fail(error)

    def on_over(self, topic_partition: TopicPartition, error: RaftlogError) -> RaftlogError | None:
        """As `PartitionGate.on_over`: the record waits until the coordinator has said why."""
        self._fail(error)
        return None if self._sweeping else error

    def on_not_sent(self, error: Exception) -> None:
        """As `PartitionGate.on_not_sent`: without the record the rest is not committed, either."""
        if self.state.phase is TransactionPhase.OPEN and not isinstance(error, InvalidTxnState):
            self._fail(error if isinstance(error, RaftlogError) else InvalidRequestError(str(error)))

    def _fail(self, error: RaftlogError) -> None:
        """The transaction can only be aborted; under the engine's lock."""
        if self.state.fail(error) and not self._sweeping:
            logger.info("%s has failed: %s", self.state, error)
            self._sweeping = True
            self._engine.loop.call_soon_threadsafe(self._sweep)

    def _sweep(self) -> None:
        state = self.state
        if state.phase is TransactionPhase.FAILED and isinstance(state.cause, _OVER):
            self._asking_why = self._engine.spawn(self._ask_why())
        else:
            self._fail_rest()

    async def _ask_why(self) -> None:
        try:
            await self._clarify(self._deadline(None))
        except RaftlogError:
            pass  # who calls next is told
        finally:
            self._asking_why = None

    def _fail_rest(self) -> None:
        """What has not arrived yet will never be read: send no more of it."""
        with self._engine.lock:
            self._sweeping = False
            state = self.state
            if state.phase not in (TransactionPhase.FAILED, TransactionPhase.FATAL) or state.cause is None:
                return
            error = state.abortable() if state.phase is TransactionPhase.FAILED else state.cause
        self._engine.fail_incomplete(error)

    async def _add(self, places: Places, outdated: Outdated) -> bool:
        if not self.state.writable or self.state.numbers is None:
            return False
        self._asked = True
        try:
            numbers = ProducerId(*self.state.numbers)
            await self._calls.add(self._id, numbers, Deadline(None), partitions=places, outdated=outdated)
        except BaseException:
            self._certain = False
            raise
        return True

    def _not_added(self, error: RaftlogError) -> None:
        with self._engine.lock:
            self._fail(error)

    async def _stop_asking(self) -> None:
        await self._partitions.stop()
        if self._asking_why is not None:
            self._asking_why.cancel()
            await asyncio.gather(self._asking_why, return_exceptions=True)
            self._asking_why = None
        self._sweeping = False

    # What the application calls

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._engine.options.max_block_ms / 1000 if timeout is None else timeout)

    async def init(self, timeout: float | None) -> None:
        """Get numbers for the next transaction, unless they are there.

        Raises:
            RequestTimedOut, ProducerFenced, RaftlogError: see `Producer.init_transactions`.
        """
        deadline = self._deadline(timeout)
        async with self._turns.take(deadline.left()):
            self._engine.check_open()
            self.state.check_usable()
            if self.state.phase is not TransactionPhase.NEW:
                return
            had = self.state.numbers
            try:
                given = await self._calls.init_producer_id(
                    self._id,
                    self._engine.options.transaction_timeout_ms,
                    ProducerId(*had) if had is not None else None,
                    deadline,
                )
            except RaftlogError as error:
                with self._engine.lock:
                    self.state.refused(error)
                self.state.check_usable()
                raise
            with self._engine.lock:
                self.state.initialized(Numbers(*given))

    def begin(self) -> bool:
        """Open a transaction; False when `init` comes first. In any thread, under the engine's lock.

        Raises:
            InvalidTxnState: one is open. FencedError: another producer has the transactional id.
        """
        self._engine.check_open()
        self.state.check_usable()
        if self.state.phase is TransactionPhase.NEW:
            return False
        numbers = self.state.begin()
        self._engine.renumber(ProducerId(*numbers))
        self._partitions.clear()
        self._groups.clear()
        self._asked, self._certain = False, True
        return True

    async def commit(self, timeout: float | None) -> None:
        """Flush, decide, and return when that is visible.

        Raises:
            TransactionAbortable, InvalidTxnState, RequestTimedOut, ProducerFenced: see `Producer.commit_transaction`.
        """
        deadline = self._deadline(timeout)
        async with self._turns.take(deadline.left()):
            self._engine.check_open()
            await self._clarify(deadline)
            with self._engine.lock:
                self.state.flush()
            try:
                if self.state.phase is TransactionPhase.FLUSHING:
                    await self._flush(None if timeout is None else deadline)
                    await self._stop_asking()
                    await self._clarify(deadline)
            except BaseException:
                with self._engine.lock:
                    self.state.resume()
                raise
            with self._engine.lock:
                self.state.commit()
            await self._end(deadline, commit=True)

    async def _flush(self, deadline: Deadline | None) -> None:
        """Wait until all is acknowledged, or something has failed: `delivery.timeout.ms` at most."""
        engine = self._engine
        engine.close_batches()
        with engine.lock:
            waiting = list(engine.accumulator.incomplete)
        try:
            async with asyncio.timeout(None if deadline is None else deadline.left()):
                for batch in waiting:
                    await wait_async(batch)
        except TimeoutError:
            left = sum(not batch.done for batch in waiting)
            raise RequestTimedOut(
                f"{left} batches of {self.state} are not acknowledged in time, and nothing is decided: call "
                "commit_transaction() again, or abort_transaction()"
            ) from None

    async def _clarify(self, deadline: Deadline) -> None:
        """A partition has said that the transaction is over: the coordinator knows whether that is a timeout, or
        another producer with the same transactional id. Nothing of it arrives any more, whatever is known in the end.

        Raises:
            ProducerFenced, RaftlogError: as `TransactionState.check_usable`.
        """
        state, known = self.state, self._partitions.some()
        if state.phase is not TransactionPhase.FAILED or not isinstance(state.cause, _OVER):
            return
        numbers = state.numbers
        assert numbers is not None
        try:
            if known:
                await self._calls.add(self._id, ProducerId(*numbers), deadline, partitions=known)
        except RaftlogError as error:
            with self._engine.lock:
                if state.phase is not TransactionPhase.FAILED or state.numbers != numbers:
                    return  # it was aborted meanwhile
                if isinstance(error, TransactionAbortable):
                    state.cause = error
                else:
                    state.refused(error)
        self._fail_rest()
        state.check_usable()

    async def abort(self, timeout: float | None) -> None:
        """Let go of what is not acknowledged, and decide that nothing of it is read.

        Raises:
            InvalidTxnState, RequestTimedOut, ProducerFenced: see `Producer.abort_transaction`.
        """
        deadline = self._deadline(timeout)
        async with self._turns.take(deadline.left()):
            await self._abort(deadline)

    async def _abort(self, deadline: Deadline) -> None:
        self._engine.check_open()
        with self._engine.lock:
            self.state.abort()
        await self._stop_asking()
        self._engine.fail_incomplete(
            TransactionAbortable(f"{self.state} was aborted before the record was acknowledged")
        )
        await self._end(deadline, commit=False)

    async def give_up(self, timeout: float | None) -> bool:
        """Abort what a commit has not decided that did not come to its end; False: it may be decided.

        Raises:
            RequestTimedOut, RaftlogError: as `abort`.
        """
        deadline = self._deadline(timeout)
        async with self._turns.take(deadline.left()):
            phase = self.state.phase
            if self.state.writable or phase in (TransactionPhase.FAILED, TransactionPhase.ABORTING):
                await self._abort(deadline)
            return phase is not TransactionPhase.COMMITTING

    async def _end(self, deadline: Deadline, *, commit: bool) -> None:
        assert self.state.numbers is not None
        had = ProducerId(*self.state.numbers)
        if not self._asked:  # nobody knows of it
            with self._engine.lock:
                self.state.ended(self.state.numbers)
            return
        try:
            next_one = await self._calls.end(self._id, had, deadline, commit=commit)
        except RequestTimedOut as late:
            what = "commit_transaction" if commit else "abort_transaction"
            raise RequestTimedOut(f"{late}; whether it is decided is not known: call {what}() again") from late
        except TransactionAbortable as over:
            with self._engine.lock:
                if not commit:  # it is aborted already
                    self.state.ended(self.state.numbers, known=False)
                    return
                self.state.refused(over)
            raise
        except RaftlogError as error:
            with self._engine.lock:
                self.state.refused(error)
            self.state.check_usable()
            raise
        with self._engine.lock:
            # With the same epoch once more, a call that is late could still begin a transaction with it.
            known = self._certain or next_one != had
            self.state.ended(Numbers(*next_one), known=known)

    async def send_offsets(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], group: GroupMetadata, timeout: float | None
    ) -> None:
        """Commit a group's offsets with the transaction.

        Raises:
            TransactionAbortable, InvalidTxnState, FencedError: see `Producer.send_offsets_to_transaction`.
        """
        deadline = self._deadline(timeout)
        async with self._turns.take(deadline.left()):
            with self._engine.lock:
                self._engine.check_may_send()
            if not offsets:
                return
            assert self.state.numbers is not None
            numbers = ProducerId(*self.state.numbers)
            try:
                if group.member_id and group.member_epoch < 0:
                    raise FencedMemberEpoch(
                        f"the consumer is no member of {group.group_id} at the moment, and others may have its "
                        "partitions: abort, and poll again"
                    )
                if group.group_id not in self._groups:
                    self._asked = True
                    await self._calls.add(self._id, numbers, deadline, group_ids=[group.group_id])
                    self._groups.add(group.group_id)
                await self._offsets.commit(self._id, numbers, offsets, group, deadline)
            except asyncio.CancelledError:
                self._certain = False
                with self._engine.lock:
                    self._fail(RequestTimedOut(f"committing offsets with {self.state} was interrupted"))
                raise
            except RaftlogError as error:
                self._certain = False
                with self._engine.lock:
                    self._fail(error)
                self.state.check_usable()
                raise

    # End

    async def close(self, timeout: float | None = None) -> None:
        """Abort what is open, if that is quick; the coordinator does it after the transaction's timeout anyway.

        A call that another thread, or task, has under way may come to its end as long; then it raises `ClosedError`.
        """
        deadline = Deadline(LAST_ABORT_S if timeout is None else min(timeout, LAST_ABORT_S))
        if self.state.writable or self.state.phase is TransactionPhase.FAILED:
            if self.state.writable and not self.aborts_on_close:
                logger.warning("%s was open when its producer was closed, and is aborted: commit it before", self.state)
            try:
                await self.abort(deadline.left())
            except RaftlogError as error:
                logger.info("%s was left open, and is aborted after transaction.timeout.ms: %s", self.state, error)
        elif self._turns.is_taken:
            with contextlib.suppress(RequestTimedOut):
                async with self._turns.take(deadline.left()):
                    pass
        await self._turns.close()
        await self._stop_asking()
        await self._calls.close()
        await self._offsets.close()
