"""Gets producer ids: any broker that answers gives one that nobody has had."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import grpc

from raftlog._client.connections import Connections, from_grpc
from raftlog._client.metadata import MetadataCache
from raftlog._core.backoff import Pauses
from raftlog.errors import AuthorizationError, RaftlogError, UnsupportedVersion, from_wire
from raftlog.v1 import transaction_pb2, transaction_pb2_grpc

logger = logging.getLogger(__name__)

_HEDGE_S: Final = 0.2
"""A broker that has not answered for so long is not waited for alone: the next one is asked as well."""
_ADDRESS_TIMEOUT_S: Final = 3.0
"""How long one broker may take at all."""


class ProducerId(NamedTuple):
    """A producer id and the epoch it starts with."""

    producer_id: int
    producer_epoch: int


class ProducerIds:
    """The producer id of one producer: asked for in the background, and again when it is used up.

    Transitions:
        none   -> asking   `want`
        asking -> here     a broker has answered; `on_here` is called
        asking -> none     no broker can give one, ever: `on_refused` is called with the reason
        here   -> none     `retire`: queues to come take another one
    """

    def __init__(
        self,
        connections: Connections,
        metadata: MetadataCache,
        pauses: Pauses,
        *,
        on_here: Callable[[], None],
        on_refused: Callable[[RaftlogError], None],
    ) -> None:
        self.current: ProducerId | None = None
        self.last_error: RaftlogError | None = None
        """Why there is none yet."""
        self._connections = connections
        self._metadata = metadata
        self._pauses = pauses
        self._on_here = on_here
        self._on_refused = on_refused
        self._asking: asyncio.Task[None] | None = None

    def want(self) -> None:
        """See to it that there will be an id."""
        if self.current is None and self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    def retire(self, producer_id: int) -> None:
        """Let nobody take this id any more."""
        if self.current is not None and self.current.producer_id == producer_id:
            self.current = None

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self) -> None:
        failures = 0
        error: RaftlogError
        try:
            while True:
                try:
                    self.current = await self._ask_all()
                except (AuthorizationError, UnsupportedVersion) as final:
                    self.last_error = final
                    break
                except RaftlogError as broke:
                    error = broke
                    logger.debug("no producer id yet: %s", error)
                except Exception as bug:  # one of ours: whoever waits for an id must not wait for ever
                    logger.exception("asking for a producer id failed")
                    error = from_grpc(bug, "the cluster")
                else:
                    self.last_error = None
                    break
                self.last_error = error
                failures += 1
                await asyncio.sleep(self._pauses.after_ms(error, failures) / 1000)
        finally:
            self._asking = None
        if self.current is not None:
            self._on_here()
        elif self.last_error is not None:
            self._on_refused(self.last_error)

    def _addresses(self) -> list[str]:
        """Return whom to ask, those that are silent last."""
        brokers = self._metadata.view.brokers
        silent = {brokers[each].address for each in brokers if self._metadata.silent_since(each) is not None}
        known = [broker.address for broker in brokers.values()]
        addresses = list(dict.fromkeys([*known, *self._metadata.bootstrap]))
        return sorted(addresses, key=lambda address: address in silent)

    async def _ask_all(self) -> ProducerId:
        """Ask one broker after the other until one answers.

        Raises:
            UnsupportedVersion: all that answer are too old to know of producer ids.
            RaftlogError: nobody gives one at the moment.
        """
        loop = asyncio.get_running_loop()
        addresses = self._addresses()
        asked: dict[asyncio.Task[ProducerId], str] = {}
        errors: list[RaftlogError] = []
        waiting = list(addresses)
        try:
            while asked or waiting:
                if waiting:
                    address = waiting.pop(0)
                    asked[loop.create_task(self._ask_one(address))] = address
                done, _ = await asyncio.wait(
                    asked, timeout=_HEDGE_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    del asked[task]
                    try:
                        return task.result()
                    except RaftlogError as error:
                        errors.append(error)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        # Too old is final only if all are; in a cluster that is being updated others answer, or will.
        raise next((error for error in errors if not isinstance(error, UnsupportedVersion)), errors[0])

    async def _ask_one(self, address: str) -> ProducerId:
        stub = transaction_pb2_grpc.TransactionStub(self._connections.channel(address))  # type: ignore[no-untyped-call,unused-ignore] # generated
        try:
            response = await stub.InitProducerId(transaction_pb2.InitProducerIdRequest(), timeout=_ADDRESS_TIMEOUT_S)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise from_grpc(error, address) from None
        if response.error.code:
            raise from_wire(response.error)
        return ProducerId(response.producer_id, response.producer_epoch)
