"""What this broker asks of the controller for its replicas.

`IsrChanges` proposes the ISR changes that `replication.leader` decides, those of many partitions in one command.
`OfflineReplicas` reports replicas without a working log, so that none of them counts or leads.
`FullStorage` reports that the disk is full, so that other replicas lead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import Final, NamedTuple

from broker.log.log_dir import PartitionKey
from broker.observability.counters import Counters
from broker.partition.partition import Partition
from raftlog.errors import InternalError, RaftlogError, from_wire
from raftlog.v1 import records_pb2
from raftmeta.decide import MAX_ALTERATIONS_PER_COMMAND, CommandResult
from raftmeta.features import ALTER_PARTITIONS_LEVEL, FULL_STORAGE_LEVEL, metadata_version
from raftmeta.image import MetadataImage
from replication.isr import IsrChange

logger = logging.getLogger(__name__)

Propose = Callable[[records_pb2.MetadataCommand], Awaitable[CommandResult]]
MAX_BATCH_BYTES: Final = 64 << 10
"""Of the ISR changes in one command, which the controller decides in one go."""
MAX_UNDER_WAY: Final = 32
"""ISR changes under way at a time while each is a command of its own."""
MAX_PER_COMMAND: Final = 500
"""Offline replicas in one command."""
FULL_FOR_MS: Final = 60_000
"""How long a disk counts as full after it has refused a write, so that leaderships do not go to and fro."""
SLICE_S: Final = 0.004
"""How long partitions are asked for their changes before other tasks get a turn on the event loop."""


class _Proposed(NamedTuple):
    """A change that its partition counts as proposed from now on."""

    partition: Partition
    change: IsrChange
    before: frozenset[int]
    """The ISR that it is to replace."""
    alteration: records_pb2.PartitionAlteration


class IsrChanges:
    """Proposes the ISR changes that the partitions of this broker want, in batches.

        idle -> calling    `look`: what was noted by the time the task runs is one call
        calling -> calling the call has ended: what was noted meanwhile is the next one, up to its bounds
        calling -> idle    nothing was noted meanwhile

    One call is under way at a time, so a lone change waits for nothing, and the busier the controller is, the more
    changes share a call. A partition says what it wants when its call is made, not when it is noted: so a change is
    never older than the metadata here. Below metadata.version 10 each change is a command of its own (`image` says
    which version it is), since older controllers know no other.

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
        image: Callable[[], MetadataImage],
        counters: Counters | None = None,
    ) -> None:
        self._broker_id = broker_id
        self._broker_epoch = broker_epoch
        self._propose = propose
        self._active = active
        self._full = full
        self._has_lease = has_lease
        self._image = image
        self._counters = counters or Counters()
        self._noted: dict[Partition, None] = {}
        """Partitions to ask what they want, in the order in which they were noted."""
        self._task: asyncio.Task[None] | None = None

    def look(self, partition: Partition) -> None:
        """Propose the change that a partition wants, if any; returns at once."""
        self.look_at_all((partition,))

    def look_at_all(self, partitions: Iterable[Partition]) -> None:
        """Do the same for many: a follower that has lagged for too long is found by the clock alone."""
        if not self._has_lease():
            return
        self._noted.update(dict.fromkeys(partitions))
        if self._noted and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run(), name="alter-isr")

    async def _run(self) -> None:
        while self._noted:
            batched = metadata_version(self._image()) >= ALTER_PARTITIONS_LEVEL
            batch = await self._next_batch(MAX_ALTERATIONS_PER_COMMAND if batched else MAX_UNDER_WAY)
            if not batch:
                continue
            if batched:
                await self._ask_for_all(batch)
            else:
                await asyncio.gather(*map(self._ask_for_one, batch))

    async def _next_batch(self, max_changes: int) -> list[_Proposed]:
        """Ask noted partitions what they want, until a command is full or none is left."""
        batch: list[_Proposed] = []
        size = 0
        loop = asyncio.get_running_loop()
        turn_ends_s = float("-inf")
        while self._noted and len(batch) < max_changes and size < MAX_BATCH_BYTES:
            if loop.time() >= turn_ends_s:
                await asyncio.sleep(0)
                turn_ends_s = loop.time() + SLICE_S
                if not self._has_lease():
                    self._noted.clear()
                    break
            partition = next(iter(self._noted))
            del self._noted[partition]
            try:
                before, change = partition.isr, partition.wanted_isr(self._active(), self._full())
            except Exception:  # a bug in one partition must not keep the others from their changes
                logger.exception("checking the ISR of %s failed", partition.topic_partition)
                continue
            if change is not None:
                alteration = _alteration(partition, change)
                size += alteration.ByteSize()
                batch.append(_Proposed(partition, change, before, alteration))
        return batch

    async def _ask_for_all(self, batch: Sequence[_Proposed]) -> None:
        command = records_pb2.AlterPartitionsCommand(
            broker_id=self._broker_id,
            broker_epoch=self._broker_epoch,
            alterations=[each.alteration for each in batch],
        )
        result = await self._outcome(records_pb2.MetadataCommand(alter_partitions=command))
        if isinstance(result, RaftlogError):
            errors: list[RaftlogError | None] = [result] * len(batch)
        else:
            errors = [from_wire(each.error) if each.HasField("error") else None for each in result.alterations]
            if len(errors) != len(batch):
                wrong = InternalError(f"{len(batch)} changes of the ISR have {len(errors)} answers")
                errors = [wrong] * len(batch)
        for proposed, error in zip(batch, errors, strict=True):
            self._answered(proposed, error)

    async def _ask_for_one(self, proposed: _Proposed) -> None:
        asked = proposed.alteration
        command = records_pb2.AlterPartitionCommand(
            broker_id=self._broker_id,
            broker_epoch=self._broker_epoch,
            topic_id=asked.topic_id,
            partition=asked.partition,
            leader_epoch=asked.leader_epoch,
            partition_epoch=asked.partition_epoch,
            new_isr=asked.new_isr,
        )
        result = await self._outcome(records_pb2.MetadataCommand(alter_partition=command))
        self._answered(proposed, result if isinstance(result, RaftlogError) else None)

    async def _outcome(self, command: records_pb2.MetadataCommand) -> CommandResult | RaftlogError:
        try:
            return await self._propose(command)
        except RaftlogError as refused:
            return refused
        except Exception as failure:  # the partitions must hear that the outcome of their changes is unknown
            logger.exception("proposing changes of the ISR failed")
            return InternalError(f"the change of the ISR failed: {failure}")

    def _answered(self, proposed: _Proposed, error: RaftlogError | None) -> None:
        """Tell a partition what became of its change; None: granted."""
        partition, change, before = proposed.partition, proposed.change, proposed.before
        members = [member.broker_id for member in change.members]
        fields = {"partition": str(partition.topic_partition), "isr": members, "leader_epoch": change.leader_epoch}
        if error is None:
            logger.info("isr changed", extra={"event": "isr_changed", "was": sorted(before), **fields})
            self._counters.isr_shrinks += bool(before - set(members))
            self._counters.isr_expands += bool(set(members) - before)
        else:
            logger.info("isr not changed: %s", error, extra={"event": "isr_change_refused", **fields})
        try:
            partition.isr_answered(change, error)
        except Exception:  # a bug in one partition must not keep the others from their answers
            logger.exception("the ISR of %s is in doubt", partition.topic_partition)

    async def close(self) -> None:
        self._noted.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _alteration(partition: Partition, change: IsrChange) -> records_pb2.PartitionAlteration:
    return records_pb2.PartitionAlteration(
        topic_id=partition.log.topic_id,
        partition=partition.log.partition,
        leader_epoch=change.leader_epoch,
        partition_epoch=change.partition_epoch,
        new_isr=[
            records_pb2.IsrMember(broker_id=member.broker_id, broker_epoch=member.broker_epoch)
            for member in change.members
        ],
    )


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
