"""Transactions of the asynchronous producer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from raftlog._client.commit_arguments import checked
from raftlog._client.producer import ProducerEngine
from raftlog._transactions import (
    OffsetsArgument,
    abort_timeout,
    check_not_ended,
    give_up_timeout,
    group_of,
    note_failed_abort,
    note_undecided,
    transactions_of,
)
from raftlog.errors import RaftlogError
from raftlog.types import GroupMetadata


class TransactionMethods:
    """As `raftlog.Producer`'s, awaitable."""

    def _engine(self) -> ProducerEngine:
        raise NotImplementedError

    async def init_transactions(self, timeout: float | None = None) -> None:
        """As `raftlog.Producer.init_transactions`."""
        await transactions_of(self._engine()).init(timeout)

    async def begin_transaction(self) -> None:
        """As `raftlog.Producer.begin_transaction`."""
        engine = self._engine()
        transactions = transactions_of(engine)
        while True:
            with engine.lock:
                if transactions.begin():
                    return
            await transactions.init(None)

    async def commit_transaction(self, timeout: float | None = None) -> None:
        """As `raftlog.Producer.commit_transaction`; cancelled in the middle, its outcome is not known, either."""
        await transactions_of(self._engine()).commit(timeout)

    async def abort_transaction(self, timeout: float | None = None) -> None:
        """As `raftlog.Producer.abort_transaction`."""
        await transactions_of(self._engine()).abort(timeout)

    async def send_offsets_to_transaction(
        self, offsets: OffsetsArgument, group: GroupMetadata | str, timeout: float | None = None
    ) -> None:
        """As `raftlog.Producer.send_offsets_to_transaction`."""
        await transactions_of(self._engine()).send_offsets(checked(offsets), group_of(group), timeout)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """As `raftlog.Producer.transaction`.

        >>> import asyncio
        >>> from raftlog import aio
        >>> async def transfer():
        ...     async with aio.Producer(cluster.bootstrap, transactional_id="aio-transfers") as producer:
        ...         async with producer.transaction():
        ...             await producer.send("accounts", b"-10", key=b"ada")
        ...             got = await producer.send("accounts", b"+10", key=b"bob")
        ...         return got.done()
        >>> asyncio.run(transfer())
        True
        """
        await self.begin_transaction()
        try:
            yield
        except BaseException as error:
            await self._abort_for(error)
            raise
        check_not_ended(transactions_of(self._engine()))
        try:
            await self.commit_transaction()
        except BaseException as error:
            await self._give_up_for(error)
            raise

    async def _give_up_for(self, error: BaseException) -> None:
        try:
            if not await transactions_of(self._engine()).give_up(give_up_timeout(error)):
                note_undecided(error)
        except RaftlogError as failed:
            note_failed_abort(error, failed)

    async def _abort_for(self, error: BaseException) -> None:
        try:
            await self.abort_transaction(abort_timeout(error))
        except RaftlogError as failed:
            note_failed_abort(error, failed)
