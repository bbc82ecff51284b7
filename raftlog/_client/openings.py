"""The partitions that a transaction, or a stage, has told its coordinator of, and those that it still has to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from raftlog._client.transaction_calls import TOPIC_UNKNOWN, Outdated
from raftlog.errors import InvalidRequestError, RaftlogError
from raftlog.types import TopicPartition

if TYPE_CHECKING:
    from raftlog._client.producer import ProducerEngine

logger = logging.getLogger(__name__)

Places = dict[tuple[bytes, int], TopicPartition]
"""Partitions by topic id and number."""
Tell = Callable[[Places, Outdated], Awaitable[bool]]
"""Has the coordinator add partitions; raises as `TransactionCalls.call`. False: it takes no more."""


class Openings:
    """Opens the gate of an engine, partition by partition: each once the coordinator knows of it.

    While a call is under way more partitions gather for the next one. `on_failure` gets what the coordinator refuses
    for good, outside of the engine's lock.
    """

    def __init__(self, engine: ProducerEngine, tell: Tell, on_failure: Callable[[RaftlogError], None]) -> None:
        self._engine = engine
        self._tell = tell
        self._on_failure = on_failure
        self._open: set[tuple[bytes, int]] = set()
        self._wanted: Places = {}
        self._telling: asyncio.Task[None] | None = None

    def __contains__(self, place: tuple[bytes, int]) -> bool:
        return place in self._open

    def some(self) -> list[tuple[bytes, int]]:
        """Return one that the coordinator knows of, if there is any."""
        return list(self._open)[:1]

    def want(self, place: tuple[bytes, int], topic_partition: TopicPartition) -> None:
        """Tell the coordinator of a partition, with all that come meanwhile. On the event loop."""
        self._wanted.setdefault(place, topic_partition)
        if self._telling is None:
            self._telling = self._engine.spawn(self._run())

    async def _run(self) -> None:
        try:
            await asyncio.sleep(0)  # more of them come in this turn of the loop
            while self._wanted:
                told = dict(self._wanted)

                async def outdated(told: Places = told) -> bool:
                    return await self._drop_outdated(told)

                try:
                    if not await self._tell(told, outdated):
                        return
                    self._open.update(told)
                    for place in told:
                        self._wanted.pop(place, None)
                except TOPIC_UNKNOWN:
                    if told.keys() <= self._wanted.keys():
                        raise  # else the rest is asked for again
                self._engine.gate_opened()
        except RaftlogError as error:
            self._on_failure(error)
        except Exception as bug:  # one of ours: batches must not wait for ever
            logger.exception("telling a coordinator of partitions failed")
            self._on_failure(InvalidRequestError(f"telling a coordinator of partitions failed: {bug!r}"))
        finally:
            self._telling = None

    async def _drop_outdated(self, told: Places) -> bool:
        """As `Outdated`: what is for a topic that was deleted asks again, by the id of the one in its place."""
        gone = await self._engine.outdated(told)
        for place in gone:
            self._wanted.pop(place, None)
        return bool(gone)

    async def stop(self) -> None:
        """Tell nothing more; whoever still wants something asks again."""
        telling = self._telling
        if telling is not None:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            if self._telling is telling:  # cancelled before its first step it has not said so itself
                self._telling = None
        self._wanted.clear()

    def clear(self) -> None:
        """Forget all: what comes next is another transaction."""
        self._open.clear()
        self._wanted.clear()
