"""What this broker asks of the controller for its replicas.

`IsrChanges` proposes the ISR changes that `replication.leader` decides (AlterPartition), one at a time for a partition.
`OfflineReplicas` reports replicas without a working log, so that none of them counts or leads.
`FullStorage` reports that the disk is full, so that other replicas lead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from typing import Final

from broker.log.log_dir import PartitionKey
from broker.observability.counters import Counters
from broker.partition.partition import Partition
from raftlog.errors import InternalError, RaftlogError
from raftlog.v1 import records_pb2
from raftmeta.decide import CommandResult
from raftmeta.features import FULL_STORAGE_LEVEL, metadata_version
from raftmeta.image import MetadataImage
from replication.isr import IsrChange

logger = logging.getLogger(__name__)

Propose = Callable[[records_pb2.MetadataCommand], Awaitable[CommandResult]]
MAX_UNDER_WAY: Final = 32
"""AlterPartition commands under way at a time; the controller batches commands that arrive together."""
MAX_PER_COMMAND: Final = 500
"""Offline replicas in one command."""
FULL_FOR_MS: Final = 60_000
"""How long a disk counts as full after it has refused a write, so that leaderships do not go to and fro."""


class IsrChanges:
    """Proposes the ISR changes that the partitions of this broker want.

    `active` returns broker epochs by broker id, of the brokers that are neither fenced nor shutting down; `full` those
    whose disk is full.
    `has_lease` says whether this broker may decide anything. Without that check, a leader that receives nothing, but
    can still send, would remove its followers from the ISR before it is deposed, and no replica could replace it.
    """

    def __init__(
        self,
        broker_id: int,
        broker_epoch: int,
        propose: Propose,
        active: Callable[[], Mapping[int, int]],
        full: Callable[[], Set[int]],
        has_lease: Callable[[], bool],
        counters: Counters | None = None,
    ) -> None:
        self._broker_id = broker_id
        self._broker_epoch = broker_epoch
        self._propose = propose
        self._active = active
        self._full = full
        self._has_lease = has_lease
        self._counters = counters or Counters()
        self._room = asyncio.Semaphore(MAX_UNDER_WAY)
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self, partition: Partition) -> None:
        """Propose the change that a partition wants now, if any; returns at once."""
        if not self._has_lease():
            return
        change = partition.wanted_isr(self._active(), self._full())
        if change is not None:
            task = asyncio.get_running_loop().create_task(self._ask(partition, change), name="alter-isr")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def look_at_all(self, partitions: Iterable[Partition]) -> None:
        """Do the same for all partitions: a follower that has lagged for too long is found by the clock alone."""
        if not self._has_lease():
            return
        for partition in partitions:
            try:
                self.look(partition)
            except Exception:  # a bug in one partition must not keep the others from their changes
                logger.exception("checking the ISR of %s failed", partition.topic_partition)

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
        except Exception as failure:  # the partition must hear that the outcome of its change is unknown
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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class OfflineReplicas:
    """Reports each lost replica that the metadata does not show as offline.

    `lost` returns the replicas of this broker that have no working log, of partitions with other replicas; `image` the
    newest metadata. A granted report holds until its image is here. If that image, or a later one, shows the replica as
    online (a leader that did not know of the report has taken it into the ISR), the replica is reported again.
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
        """The metadata offset at which each report takes effect."""
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._more = False

    def restored(self, key: PartitionKey) -> None:
        """Note that a replica has a working log again, so that another failure is reported."""
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
        """Report the lost replicas that are not reported yet; returns at once."""
        self._more = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._report_all(), name="report-offline-replicas")

    async def _report_all(self) -> None:
        while self._more:
            self._more = False
            await self.report()

    async def report(self) -> None:
        """Report the lost replicas that are not reported yet; after a failure the next call reports the rest."""
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
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class FullStorage:
    """Tells the controller whether a log directory of this broker refuses writes for want of space.

    The controller then lets other members of the ISR lead, except where they are full as well. The storage counts as
    full for FULL_FOR_MS after the last refusal (`times_full`). A broker that follows goes on trying to append what its
    leaders send, so a disk without space keeps refusing.
    """

    def __init__(
        self,
        broker_id: int,
        broker_epoch: int,
        propose: Propose,
        times_full: Callable[[], int],
        image: Callable[[], MetadataImage],
        now_ms: Callable[[], float],
    ) -> None:
        self._broker_id = broker_id
        self._broker_epoch = broker_epoch
        self._propose = propose
        self._times_full = times_full
        self._image = image
        self._now_ms = now_ms
        self._seen = times_full()
        self._refused_ms = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Report a change; returns at once. Call it often: a report that fails is repeated with the next call."""
        times_full, now_ms = self._times_full(), self._now_ms()
        if times_full != self._seen:
            self._seen, self._refused_ms = times_full, now_ms
        full = now_ms - self._refused_ms < FULL_FOR_MS
        image = self._image()
        known = image.brokers.get(self._broker_id)
        if known is None or known.broker_epoch != self._broker_epoch or known.storage_full == full:
            return
        if metadata_version(image) >= FULL_STORAGE_LEVEL and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._report(full), name="report-full-storage")

    async def _report(self, full: bool) -> None:
        command = records_pb2.AlterBrokerCommand(
            broker_id=self._broker_id, broker_epoch=self._broker_epoch, storage_full=full
        )
        try:
            await self._propose(records_pb2.MetadataCommand(alter_broker=command))
        except RaftlogError as error:
            logger.warning("the controller does not know yet whether the disk is full: %s", error)
            return
        if full:
            logger.error("the disk is full; other replicas lead where they can", extra={"event": "storage_full"})
        else:
            logger.info("the disk has space again", extra={"event": "storage_has_space"})

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
