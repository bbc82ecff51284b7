"""Producer ids for the producers that ask this broker, from blocks that the controller gives out (KIP-730).

No id is given twice, in the whole cluster and for ever: a block belongs to the process that asked for it, and what is
left of it when that ends is never used. A block whose answer was lost is lost too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from raftlog.errors import BrokerUnavailable, RaftlogError, RequestTimedOut
from raftlog.v1.records_pb2 import AllocateProducerIdsCommand, MetadataCommand
from raftmeta.decide import CommandResult

logger = logging.getLogger(__name__)

Propose = Callable[[MetadataCommand], Awaitable[CommandResult]]

LOW_WATER: Final = 100
"""With fewer ids left the next block is asked for, so that hardly anybody waits for one."""
WAIT_S: Final = 10.0
"""How long a producer waits for an id before it is told to try again."""


class ProducerIds:
    """Gives out ids; on the event loop.

    idle -> asking    fewer than `LOW_WATER` ids are left, and somebody wants one
    asking -> idle    a block has come; or it was refused, then everyone who waits hears of it

    At most one block is asked for at a time.
    """

    def __init__(self, broker_id: int, propose: Propose) -> None:
        self._broker_id = broker_id
        self._propose = propose
        self._broker_epoch: int | None = None
        self._next_id = 0
        self._end_id = 0
        self._following: range | None = None
        """The block after this one, if it has come already."""
        self._asking: asyncio.Task[None] | None = None

    def serve(self, broker_epoch: int) -> None:
        """Take the epoch in which this broker has registered; before that there are no ids."""
        self._broker_epoch = broker_epoch

    def close(self) -> None:
        """Stop asking; who waits hears that the broker stops."""
        self._broker_epoch = None
        if self._asking is not None:
            self._asking.cancel()

    @property
    def left(self) -> int:
        """How many ids can be given out without a word from the controller."""
        return self._end_id - self._next_id + len(self._following or ())

    async def take(self) -> int:
        """Return an id that nobody has had.

        Raises:
            BrokerUnavailable: this broker is starting or stopping.
            RequestTimedOut: the controller has not answered yet.
            RaftlogError: it gave no ids; trying again is safe in any case.
        """
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while True:
            if self.left < LOW_WATER:
                self._ask()
            if self._next_id == self._end_id and self._following is not None:
                self._next_id, self._end_id, self._following = self._following.start, self._following.stop, None
            if self._next_id < self._end_id:
                self._next_id += 1
                return self._next_id - 1
            assert self._asking is not None, "without ids a block was asked for"
            await self._wait(self._asking, deadline)

    def _ask(self) -> None:
        if self._broker_epoch is None:
            if self.left:
                return
            raise BrokerUnavailable("this broker gives out no producer ids now: it is starting or stopping; try again")
        if self._asking is None or self._asking.done():
            command = AllocateProducerIdsCommand(broker_id=self._broker_id, broker_epoch=self._broker_epoch)
            self._asking = asyncio.create_task(self._fetch(command), name="producer ids")
            self._asking.add_done_callback(_retrieve)

    async def _fetch(self, command: AllocateProducerIdsCommand) -> None:
        result = await self._propose(MetadataCommand(allocate_producer_ids=command))
        block = range(result.first_producer_id, result.first_producer_id + result.producer_ids)
        logger.info("producer ids allocated", extra={"first": block.start, "count": len(block)})
        if self._next_id == self._end_id and self._following is None:
            self._next_id, self._end_id = block.start, block.stop
        else:
            self._following = block

    async def _wait(self, asking: asyncio.Task[None], deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.shield(asking)
        except TimeoutError:
            raise RequestTimedOut(
                f"the controller has allocated no producer ids within {WAIT_S:.0f} s; try again"
            ) from None
        except asyncio.CancelledError:
            if not asking.cancelled():
                raise
            raise BrokerUnavailable("the broker is stopping; ask another one for a producer id") from None


def _retrieve(asking: asyncio.Task[None]) -> None:
    """Log a refusal, which those who wait hear as well: perhaps nobody does."""
    error = None if asking.cancelled() else asking.exception()
    if error is not None:
        level = logging.WARNING if isinstance(error, RaftlogError) else logging.ERROR
        logger.log(level, "no producer ids were allocated: %s", error)
