"""Asking the controller for changes of the ISR: AlterPartition, one at a time for a partition.

What is wanted, and what counts meanwhile, is `replication.leader`'s to say; here it is carried to the controller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from broker.observability.counters import Counters
from broker.partition import Partition
from raftlog.errors import InternalError, RaftlogError
from raftlog.v1 import records_pb2
from raftmeta.decide import CommandResult
from replication.isr import IsrChange

logger = logging.getLogger(__name__)

Propose = Callable[[records_pb2.MetadataCommand], Awaitable[CommandResult]]
MAX_UNDER_WAY: Final = 32
"""Commands to the controller at a time; it batches what comes together."""


class IsrChanges:
    """The changes that the partitions of this broker want.

    `active` returns broker epochs by broker id, of the brokers that are neither fenced nor shutting down.
    `has_lease` says whether this broker may decide anything: one that hears nobody, and is heard, would otherwise put
    its followers out of the ISR before it is deposed, and nobody could be elected in its place.
    """

    def __init__(
        self,
        broker_id: int,
        broker_epoch: int,
        propose: Propose,
        active: Callable[[], Mapping[int, int]],
        has_lease: Callable[[], bool],
        counters: Counters | None = None,
    ) -> None:
        self._broker_id = broker_id
        self._broker_epoch = broker_epoch
        self._propose = propose
        self._active = active
        self._has_lease = has_lease
        self._counters = counters or Counters()
        self._room = asyncio.Semaphore(MAX_UNDER_WAY)
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self, partition: Partition) -> None:
        """Ask for what a partition wants now, if anything; returns at once."""
        if not self._has_lease():
            return
        change = partition.wanted_isr(self._active())
        if change is not None:
            task = asyncio.get_running_loop().create_task(self._ask(partition, change), name="alter-isr")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def look_at_all(self, partitions: Iterable[Partition]) -> None:
        """Do the same for all of them: who has not been caught up for too long is found by the clock alone."""
        if not self._has_lease():
            return
        for partition in partitions:
            try:
                self.look(partition)
            except Exception:  # a bug in one partition is no reason to leave the others alone
                logger.exception("looking at the ISR of %s failed", partition.topic_partition)

    async def _ask(self, partition: Partition, change: IsrChange) -> None:
        members = [member.broker_id for member in change.members]
        fields = {"partition": str(partition.topic_partition), "isr": members, "leader_epoch": change.leader_epoch}
        before = partition.isr
        error: RaftlogError | None = None
        try:
            async with self._room:
                await self._propose(self._command(partition, change))
        except RaftlogError as refused:
            error = refused
        except Exception as failure:  # whatever it was, the partition must hear that its change is not known to be in
            logger.exception("a change of the ISR failed", extra=fields)
            error = InternalError(f"the change of the ISR failed: {failure}")
        if error is None:
            logger.info("isr changed", extra={"event": "isr_changed", "was": sorted(before), **fields})
            self._counters.isr_shrinks += bool(before - set(members))
            self._counters.isr_expands += bool(set(members) - before)
        else:
            logger.info("isr not changed: %s", error, extra={"event": "isr_change_refused", **fields})
        partition.isr_answered(change, error)

    def _command(self, partition: Partition, change: IsrChange) -> records_pb2.MetadataCommand:
        return records_pb2.MetadataCommand(
            alter_partition=records_pb2.AlterPartitionCommand(
                broker_id=self._broker_id,
                broker_epoch=self._broker_epoch,
                topic_id=partition.log.topic_id,
                partition=partition.log.partition,
                leader_epoch=change.leader_epoch,
                partition_epoch=change.partition_epoch,
                new_isr=[
                    records_pb2.IsrMember(broker_id=member.broker_id, broker_epoch=member.broker_epoch)
                    for member in change.members
                ],
            )
        )

    async def close(self) -> None:
        """Ask for nothing any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
