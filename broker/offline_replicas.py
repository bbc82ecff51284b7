"""Telling the controller of replicas that have no working log here, so that none of them counts or leads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from broker.isr_changes import Propose
from broker.partition_logs import PartitionKey
from raftlog.errors import RaftlogError
from raftlog.v1 import records_pb2
from raftmeta.image import MetadataImage

logger = logging.getLogger(__name__)

MAX_PER_COMMAND: Final = 500


class OfflineReplicas:
    """Reports in this life of the broker, whenever a replica is lost and the metadata does not say so.

    `lost` returns the replicas that have no working log now and others could do without; `image` the newest metadata. A
    report that was heard counts until the image that has come of it is here: one that is taken into the ISR by a leader
    which has not heard of it yet has lost its mark, and is reported again.
    """

    def __init__(
        self,
        broker_id: int,
        broker_epoch: int,
        propose: Propose,
        lost: Callable[[], Iterable[PartitionKey]],
        image: Callable[[], MetadataImage],
    ) -> None:
        self._broker_id = broker_id
        self._broker_epoch = broker_epoch
        self._propose = propose
        self._lost = lost
        self._image = image
        self._reported: dict[PartitionKey, int] = {}
        """The metadata offset at which a report is in effect."""
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._more = False

    def restored(self, key: PartitionKey) -> None:
        """A replica has a working log again, so that another failure would be news."""
        self._reported.pop(key, None)

    def is_news(self, key: PartitionKey) -> bool:
        """Whether the controller has to be told that this replica is lost."""
        image = self._image()
        part = image.partition(*key)
        if part is None or image.is_offline(part, self._broker_id):
            return False
        reported = self._reported.get(key)
        return reported is None or image.offset >= reported

    def report_soon(self) -> None:
        """Report what is not reported yet; returns at once."""
        self._more = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._report_all(), name="report-offline-replicas")

    async def _report_all(self) -> None:
        while self._more:
            self._more = False
            await self.report()

    async def report(self) -> None:
        """Report what is not reported yet. What the controller cannot be told now is told at the next call."""
        async with self._lock:
            keys = sorted(key for key in self._lost() if self.is_news(key))
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
                    result = await self._propose(command)
                except RaftlogError as error:
                    logger.warning("%d offline replicas are not reported yet: %s", len(some), error)
                    return
                self._reported.update(dict.fromkeys(some, result.offset))
                logger.warning(
                    "replicas without a working log were reported",
                    extra={"event": "replicas_offline", "replicas": len(some)},
                )

    async def close(self) -> None:
        """Report nothing any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
