"""Producer ids for the producers that ask this broker, from blocks that the controller allocates (KIP-730).

No id is given out twice in a cluster. A block belongs to the process that asked for it; ids left when the process ends
are never used, nor is a block whose answer was lost.

A block holds numbers; `raftmeta.producer_ids` makes an id of a number and the owner. Below metadata.version 5 the
numbers are the ids. A block from that time is dropped when the cluster has its secret.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from raftlog.errors import CoordinatorNotAvailable, RaftlogError, RequestTimedOut
from raftlog.v1.records_pb2 import AllocateProducerIdsCommand, MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.features import PRODUCER_OWNERS_LEVEL, metadata_version
from raftmeta.image import MetadataImage
from raftmeta.producer_ids import ProducerIdKey, ProducerOwner

logger = logging.getLogger(__name__)

Propose = Callable[[MetadataCommand], Awaitable[CommandResult]]
ImageFrom = Callable[[int], Awaitable[MetadataImage]]
"""Returns this broker's image once it has reached a metadata offset."""

LOW_WATER: Final = 100
"""With fewer ids left the next block is requested, so that producers rarely wait for one."""
WAIT_S: Final = 10.0
"""How long a producer waits for an id before it is told to try again."""


class ProducerIds:
    """Gives out ids; on the event loop.

    idle -> asking    fewer than `LOW_WATER` ids are left, and a producer needs one
    asking -> idle    a block has come, or was refused, which fails the waiting callers

    At most one block is requested at a time.
    """

    def __init__(
        self,
        broker_id: int,
        propose: Propose,
        image: Callable[[], MetadataImage],
        image_from: ImageFrom,
        new_secret: Callable[[], bytes],
    ) -> None:
        self._broker_id = broker_id
        self._propose = propose
        self._image = image
        self._image_from = image_from
        self._new_secret = new_secret
        self._broker_epoch: int | None = None
        self._next_id = 0
        self._end_id = 0
        self._following: range | None = None
        """The block after this one, if it has come already."""
        self._asking: asyncio.Task[None] | None = None

    def serve(self, broker_epoch: int) -> None:
        """Begin with the epoch in which this broker has registered; before that there are no ids."""
        self._broker_epoch = broker_epoch

    def close(self) -> None:
        """Stop asking; waiting callers are told that the broker stops."""
        self._broker_epoch = None
        if self._asking is not None:
            self._asking.cancel()

    @property
    def left(self) -> int:
        """The number of ids that can be given out without the controller."""
        return self._end_id - self._next_id + len(self._following or ())

    async def take(self, owner: ProducerOwner) -> int:
        """Return an unused id that only this owner can use.

        Raises:
            CoordinatorNotAvailable: this broker is starting or stopping.
            RequestTimedOut: the controller has not answered yet.
            RaftlogError: the controller refused; trying again is safe in any case.
        """
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while True:
            key = await self._key(deadline)
            self._drop_unbound(key)
            if self.left < LOW_WATER:
                self._ask()
            if self._next_id == self._end_id and self._following is not None:
                self._next_id, self._end_id, self._following = self._following.start, self._following.stop, None
            if self._next_id < self._end_id:
                self._next_id += 1
                return self._next_id - 1 if key is None else key.bind(self._next_id - 1, owner)
            assert self._asking is not None, "without ids a block was asked for"
            await self._wait(self._asking, deadline)

    async def key(self) -> ProducerIdKey | None:
        """Return what ids are bound to their owners with; None below metadata.version 5.

        The first call at that version gives the cluster its secret.

        Raises:
            CoordinatorNotAvailable, RequestTimedOut, RaftlogError: as `take`.
        """
        return await self._key(asyncio.get_running_loop().time() + WAIT_S)

    async def _key(self, deadline: float) -> ProducerIdKey | None:
        while True:
            image = self._image()
            if image.producer_id_key is not None or metadata_version(image) < PRODUCER_OWNERS_LEVEL:
                return image.producer_id_key
            if self._broker_epoch is None:
                raise _not_serving()
            self._ask()  # the block comes with the secret
            assert self._asking is not None, "a block was asked for"
            await self._wait(self._asking, deadline)

    def _drop_unbound(self, key: ProducerIdKey | None) -> None:
        """Drop blocks from before the cluster had a secret: their numbers cannot be bound."""
        if key is None or self._next_id >= key.first_number or not self.left:
            return
        self._next_id = self._end_id
        if self._following is not None and self._following.start < key.first_number:
            self._following = None

    def _ask(self) -> None:
        if self._broker_epoch is None:
            if self.left:
                return
            raise _not_serving()
        if self._asking is None or self._asking.done():
            command = AllocateProducerIdsCommand(broker_id=self._broker_id, broker_epoch=self._broker_epoch)
            if self._image().producer_id_key is None:
                command.new_secret = self._new_secret()
            self._asking = asyncio.create_task(self._fetch(command), name="producer ids")
            self._asking.add_done_callback(_retrieve)

    async def _fetch(self, command: AllocateProducerIdsCommand) -> None:
        result = await self._propose(MetadataCommand(allocate_producer_ids=command))
        await self._image_from(result.offset)  # it has the secret that the block may have begun with
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
            raise CoordinatorNotAvailable("the broker is stopping; ask another one for a producer id") from None


def _not_serving() -> CoordinatorNotAvailable:
    return CoordinatorNotAvailable("this broker gives out no producer ids now: it is starting or stopping; try again")


def _retrieve(asking: asyncio.Task[None]) -> None:
    """Log a refusal, because there may be no waiting caller to report it to."""
    error = None if asking.cancelled() else asking.exception()
    if error is not None:
        level = logging.WARNING if isinstance(error, RaftlogError) else logging.ERROR
        logger.log(level, "no producer ids were allocated: %s", error)
