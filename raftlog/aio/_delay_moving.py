"""How a delay queue hands records over exactly once, for asyncio."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

from raftlog._core.delays import Outgoing
from raftlog._delay_moving import expect_abort, is_over, mover_config, reason_of
from raftlog.aio._producer import Producer
from raftlog.errors import ClosedError, InvalidTxnState, RaftlogError, RetriableError, TransactionAbortable
from raftlog.types import GroupMetadata, TopicPartition


class Mover:
    """A producer that sends records on, and commits the offsets behind them, both or neither."""

    def __init__(self, bootstrap: str | Sequence[str], name: str, config: Mapping[str, object] | None) -> None:
        self._producer = Producer(bootstrap, config=mover_config(name, config))
        self.in_doubt = False
        """Whether a commit was asked for, and what became of it is not known."""

    @property
    def is_over(self) -> bool:
        """Whether nothing can be handed over with this one any more."""
        return is_over(self._producer._engine())

    async def move(
        self, outgoing: Iterable[Outgoing], ends: Mapping[TopicPartition, int], group: GroupMetadata
    ) -> None:
        """Hand over, and return when it is decided.

        Raises:
            FencedError: others have the partitions, and hand over what was in them.
            RaftlogError: a target has refused a record, or the cluster is away; nothing was handed over.
        """
        producer = self._producer
        try:
            await producer.begin_transaction()
        except InvalidTxnState:  # the one before could not be aborted in time
            await producer.abort_transaction()
            await producer.begin_transaction()
        try:
            for topic, value, key, headers, timestamp_ms in outgoing:
                await producer.send(topic, value, key, headers=headers, timestamp_ms=timestamp_ms)
            await producer.send_offsets_to_transaction(ends, group)
        except BaseException as error:
            await self._abort()
            if isinstance(error, TransactionAbortable):
                raise reason_of(error) from None
            raise
        self.in_doubt = True
        await self.settle()

    async def settle(self) -> None:
        """Learn what became of a transaction whose outcome is not known, asking as long as it takes; if there is one.

        Raises:
            RaftlogError: it is aborted, nothing was handed over. ClosedError: the queue was closed meanwhile.
        """
        while self.in_doubt:
            try:
                await self._producer.commit_transaction()
            except RetriableError:
                continue
            except TransactionAbortable as error:
                self.in_doubt = False
                await self._abort()
                raise reason_of(error) from None
            except ClosedError:
                raise
            except RaftlogError:
                self.in_doubt = False
                raise
            self.in_doubt = False

    async def _abort(self) -> None:
        with contextlib.suppress(RaftlogError):  # the next one tries again, and else the coordinator does it
            await self._producer.abort_transaction()

    async def close(self) -> None:
        """Stop; what is open is aborted."""
        if self._producer._made is not None:
            expect_abort(self._producer._made)
        await self._producer.close()
