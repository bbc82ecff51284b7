"""Telling the controller of replicas that have no working log here, so that none of them counts or leads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from broker.isr_changes import Propose
from raftlog.errors import RaftlogError
from raftlog.v1 import records_pb2

logger = logging.getLogger(__name__)

PartitionKey = tuple[bytes, int]
MAX_PER_COMMAND: Final = 500


class OfflineReplicas:
    """Reports in this life of the broker; each replica is reported once, until it works again (`restored`).

    `lost` returns the replicas that have no working log now and others could do without.
    """

    def __init__(
        self, broker_id: int, broker_epoch: int, propose: Propose, lost: Callable[[], Iterable[PartitionKey]]
    ) -> None:
        self._broker_id = broker_id
        self._broker_epoch = broker_epoch
        self._propose = propose
        self._lost = lost
        self._reported: set[PartitionKey] = set()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def restored(self, key: PartitionKey) -> None:
        """A replica has a working log again, so that another failure would be news."""
        self._reported.discard(key)

    def report_soon(self) -> None:
        """Report what is not reported yet; returns at once."""
        if (self._task is None or self._task.done()) and not self._reported.issuperset(self._lost()):
            self._task = asyncio.get_running_loop().create_task(self.report(), name="report-offline-replicas")

    async def report(self) -> None:
        """Report what is not reported yet. What the controller cannot be told now is told at the next call."""
        async with self._lock:
            keys = sorted(set(self._lost()) - self._reported)
            for first in range(0, len(keys), MAX_PER_COMMAND):
                some = keys[first : first + MAX_PER_COMMAND]
                command = records_pb2.MetadataCommand(
                    offline_replicas=records_pb2.OfflineReplicasCommand(
                        broker_id=self._broker_id,
                        broker_epoch=self._broker_epoch,
                        partitions=[records_pb2.PartitionRef(topic_id=key[0], partition=key[1]) for key in some],
                    )
                )
                try:
                    await self._propose(command)
                except RaftlogError as error:
                    logger.warning("%d offline replicas are not reported yet: %s", len(some), error)
                    return
                self._reported.update(some)
                logger.warning("replicas without a working log were reported", extra={"replicas": len(some)})

    async def close(self) -> None:
        """Report nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
