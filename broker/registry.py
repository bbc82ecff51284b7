"""The partitions on this broker, kept as the metadata image says.

    on_metadata -> queue -> each partition that a change touches (`_touch`):
        at once          what is not this broker's any more is let go, roles begin (`role_changes.py`)
        after the disk   logs are made, deleted, set aside (`DiskWork`), and the role begins with the metadata as it is
                         by then

A log whose topic the image does not know is set aside and reported, never deleted: the image may be the one that is
wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from broker.clock import Clock
from broker.isr_changes import IsrChanges, Propose
from broker.lease import Lease
from broker.log.group_commit import GroupCommit
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.offline_replicas import OfflineReplicas
from broker.partition import Partition, check_topic_id, unknown_partition
from broker.partition_logs import Leaving, PartitionKey
from broker.registry_parts import Fetchers, Pace
from broker.replicas_here import ReplicasHere
from broker.role_changes import refusal
from raftlog.errors import RaftlogError, RetriableError
from raftlog.v1 import records_pb2
from raftmeta.image import MetadataImage

logger = logging.getLogger(__name__)

_Step = tuple[MetadataImage, Sequence[records_pb2.MetadataRecord] | None]
"""An image and the records that led to it; None: everything in it may be new."""


class PartitionRegistry(ReplicasHere):
    """(topic id, partition) to `Partition`, and the task that keeps it in step with the image."""

    def __init__(
        self,
        node_id: int,
        logs: LogManager,
        group_commit: GroupCommit,
        clock: Clock,
        topic_defaults: Mapping[str, str],
        disk: Executor,
        lease: Lease,
    ) -> None:
        super().__init__(node_id, logs, group_commit, clock, topic_defaults, disk, lease)
        self._pace = Pace(self._loop)
        self._queue: asyncio.Queue[_Step] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def serve(self, *, broker_epoch: int, propose: Propose, fetchers: Fetchers, replica_lag_time_max_ms: float) -> None:
        """Take part in replication, in this life of the broker; before `start`."""
        assert self._task is None, "partitions begin with what is given here"
        self._host = replace(self._host, replica_lag_time_max_ms=replica_lag_time_max_ms)
        self._roles.fetchers = fetchers
        self._isr_changes = IsrChanges(
            self._node_id, broker_epoch, propose, lambda: self._active, self.lease.valid, self.counters
        )
        self._offline_replicas = OfflineReplicas(
            self._node_id, broker_epoch, propose, self._lost_replicas, lambda: self._image
        )

    # Look-ups

    def find(self, topic_id: bytes, partition: int) -> Partition:
        """Return the partition.

        Raises:
            InvalidRequestError: no topic id.
            NotLeader: it is on other brokers; names the leader.
            UnknownTopicId: there is none, or it is not here yet.
            StorageError: it is, but its log directory is offline or its log corrupt.
        """
        found = self._partitions.get((topic_id, partition))
        if found is not None:
            return found
        check_topic_id(topic_id)
        failed = self._failed.get((topic_id, partition))
        raise failed if failed is not None else self._elsewhere(topic_id, partition)

    def _elsewhere(self, topic_id: bytes, partition: int) -> RaftlogError:
        topic, part = self._image.topics.get(topic_id), self._image.partition(topic_id, partition)
        if topic is None or part is None or part.leader == self._node_id:
            return unknown_partition(topic_id, partition)
        return refusal(self._image, topic, part)

    def topic_name(self, topic_id: bytes, partition: int) -> str | None:
        """Return the topic of a partition that `find` returns, or says something of; None: it knows no such topic."""
        found = self._partitions.get((topic_id, partition))
        if found is not None:
            return found.log.topic
        topic = self._image.topics.get(topic_id)
        return None if topic is None else topic.name

    def partitions(self) -> list[Partition]:
        """Return the partitions as they are now."""
        return list(self._partitions.values())

    def held_by_all(self, log: PartitionLog) -> int:
        """Return up to where all replicas of a log hold it, exclusive; 0 where that is not for this broker to know."""
        partition = self._partitions.get((log.topic_id, log.partition))
        return partition.held_by_all if partition is not None and partition.log is log else 0

    def __len__(self) -> int:
        return len(self._partitions)

    # Applying metadata

    def start(self, image: MetadataImage) -> None:
        """Start applying, beginning with everything in `image`."""
        self._first_offset = image.offset
        self._queue.put_nowait((image, None))
        self._task = asyncio.create_task(self._apply_loop(), name="apply-metadata")

    def on_metadata(self, image: MetadataImage, records: Sequence[records_pb2.MetadataRecord] | None) -> None:
        """Take a committed change; returns at once. Without records everything may have changed."""
        self._queue.put_nowait((image, records))

    def retry_failed(self) -> None:
        """Try again to open the partitions that could not be opened for a reason that passes; returns at once."""
        again = [
            key for key, error in self._failed.items() if isinstance(error, RetriableError) and self._may_open(key)
        ]
        for key in (*self._leaving, *again):
            if key not in self._disk_work:
                self._disk_work.ask(key, None)
        if self._offline_replicas is not None and self._failed:
            self._offline_replicas.report_soon()

    @property
    def applied_offset(self) -> int:
        """The metadata offset up to which everything was let go that is not this broker's; -1 before the first image.

        Logs may still be made, and roles begin a little later.
        """
        return self._applied_offset

    async def wait_applied(self, metadata_offset: int) -> None:
        """Return once every change up to `metadata_offset` is in effect here, save roles that wait for truncations."""
        await self._waiters.wait(metadata_offset)

    async def _apply_loop(self) -> None:
        while True:
            image, records = await self._queue.get()
            if image.offset < self._image.offset:
                logger.error("metadata at offset %d came after %d; passed over", image.offset, self._image.offset)
                continue
            before, self._image = self._image, image
            self._active = {b.broker_id: b.broker_epoch for b in image.brokers.values() if b.active}
            try:
                touched = self._everything(image) if records is None else self._touched(before, image, records)
            except Exception:  # whatever the records say, the image holds
                logger.exception("metadata records cannot be read at offset %d", image.offset)
                touched = self._everything(image)
            for key in sorted(touched, key=self._keeps):  # first of all is let go what others are to have
                self._touch(key)
                await self._pace.keep()
            self._applied_offset = image.offset
            try:
                self._tell(always=True)
            except Exception:  # what it was told for is in effect; the next change must be too
                logger.exception("telling of metadata offset %d failed", image.offset)
            await self._pace.keep()

    def _everything(self, image: MetadataImage) -> dict[PartitionKey, None]:
        touched = dict.fromkeys(
            (topic.topic_id, part.partition)
            for topic in image.topics.values()
            for part in topic.partitions
            if self._node_id in part.replicas
        )
        try:
            strays = self._partition_logs.strays(image)
        except Exception:  # they stay where they are; roles matter more
            logger.exception("logs that are no replicas here cannot be found")
            strays = []
        for key in strays:
            self._leaving.setdefault(key, Leaving.SET_ASIDE)
        return touched | dict.fromkeys((*strays, *self._here()))

    def _here(self) -> list[PartitionKey]:
        return [*self._partitions, *self._failed, *self._disk_work.keys]

    def _touched(
        self, before: MetadataImage, image: MetadataImage, records: Sequence[records_pb2.MetadataRecord]
    ) -> dict[PartitionKey, None]:
        touched: dict[PartitionKey, None] = {}
        for record in records:
            match record.WhichOneof("record"):
                case "remove_topic":
                    topic = before.topics.get(record.remove_topic.topic_id)
                    numbers = range(len(topic.partitions)) if topic is not None else ()
                    removed = [(record.remove_topic.topic_id, number) for number in numbers]
                    if topic is None:  # made and removed at once, or a step was passed over
                        removed = [key for key in self._here() if key[0] == record.remove_topic.topic_id]
                    touched.update(dict.fromkeys(removed))
                    for key in removed:
                        self._delete(key)
                case "partition":
                    key = (record.partition.topic_id, record.partition.partition)
                    touched[key] = None
                    self._roles.note_election(record.partition)
                    if self._node_id not in record.partition.replicas:
                        self._delete(key)
                case "config" if record.config.resource.type == records_pb2.ConfigResource.TOPIC:
                    topic = image.topic(record.config.resource.name)
                    keys = ((topic.topic_id, part.partition) for part in topic.partitions) if topic is not None else ()
                    touched.update(dict.fromkeys(key for key in keys if key in self._partitions))
                case "broker" if record.broker.broker_id == self._node_id:  # what it did not lead while fenced
                    touched.update(dict.fromkeys(key for key, part in self._partitions.items() if not part.leads))
                case "config":  # a broker's default holds for every topic that does not say otherwise
                    touched.update(dict.fromkeys(self._partitions))
                case _:
                    pass
        return touched

    def _delete(self, key: PartitionKey) -> None:
        if key in self._partitions or key in self._failed or key in self._disk_work:
            self._leaving[key] = Leaving.DELETED

    def _keeps(self, key: PartitionKey) -> bool:
        partition = self._partitions.get(key)
        if partition is None or not partition.leads:
            return True
        part = self._image.partition(*key)
        return part is not None and part.leader == self._node_id and key not in self._leaving

    # In sync

    def housekeep(self) -> None:
        """Do what is due by time in every partition."""
        for partition in self.partitions():
            try:
                partition.housekeep()
            except Exception:  # a bug in one partition must not take those after it along
                logger.exception("housekeeping of %s failed", partition.topic_partition)

    def check_isr(self) -> None:
        """Ask for the changes of ISRs that the clock alone calls for; housekeeping calls it."""
        if self._isr_changes is not None:
            self._isr_changes.look_at_all(self._partitions.values())

    def preferred_replica(self, partition: Partition, rack: str) -> int | None:
        """Return the follower in `rack` that a reader there is to be sent to (KIP-392); None: nobody is nearer."""
        brokers = self._image.brokers.values()
        return partition.nearer_replica({b.broker_id for b in brokers if b.active and b.rack == rack})

    # End

    async def stop(self) -> None:
        """Stop applying; the partitions stay as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for part in (self._disk_work, self._roles, self._isr_changes, self._offline_replicas):
            if part is not None:
                await part.close()

    def close_all(self, reason: RaftlogError) -> None:
        """Answer everyone who waits with `reason`."""
        for partition in self._partitions.values():
            partition.close(reason)
