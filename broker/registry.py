"""The partitions on this broker, kept as the metadata image says.

Changes of the image are applied one after the other, off the event loop where they touch the disk. A log whose topic
the image does not know is set aside and reported, never deleted: the image may be the one that is wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from broker.clock import Clock
from broker.isr_changes import IsrChanges, Propose
from broker.lease import Lease
from broker.log.config import LogConfig
from broker.log.group_commit import GroupCommit
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.offline_replicas import OfflineReplicas
from broker.partition import Host, Partition, check_topic_id, unknown_partition
from broker.partition_logs import PartitionKey, PartitionLogs
from broker.registry_parts import Fetchers, NoFetchers, topic_rules
from raftlog.errors import InternalError, NotLeader, RaftlogError, RetriableError, StorageError, UnknownTopicId
from raftlog.v1 import records_pb2
from raftmeta.image import NO_LEADER, MetadataImage, PartitionImage, TopicImage
from replication.leader import Membership

logger = logging.getLogger(__name__)

_Step = tuple[MetadataImage, Sequence[records_pb2.MetadataRecord] | None]
"""An image and the records that led to it; None: everything in it may be new."""


class PartitionRegistry:
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
        self.lease = lease
        self.on_applied: Callable[[bool], None] | None = None
        """Called after every change that is in effect; True when leaderships came or went."""
        self._node_id = node_id
        self._logs = logs
        self._partition_logs = PartitionLogs(node_id, logs, disk)
        self._topic_defaults = topic_defaults
        self._loop = asyncio.get_running_loop()
        self._host = Host(
            node_id,
            group_commit,
            clock,
            lease,
            disk,
            on_storage_error=self._on_storage_error,
            on_isr_wish=self._on_isr_wish,
        )
        self._fetchers: Fetchers = NoFetchers()
        self._isr_changes: IsrChanges | None = None
        self._offline_replicas: OfflineReplicas | None = None
        self._partitions: dict[PartitionKey, Partition] = {}
        self._failed: dict[PartitionKey, RaftlogError] = {}
        self._image = MetadataImage()
        self._active: dict[int, int] = {}
        self._queue: asyncio.Queue[_Step] = asyncio.Queue()
        self._gained = self._lost = 0
        self._applied_offset = -1
        self._applied = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    def serve(self, *, broker_epoch: int, propose: Propose, fetchers: Fetchers, replica_lag_time_max_ms: float) -> None:
        """Take part in replication, in this life of the broker; before `start`."""
        assert self._task is None, "partitions begin with what is given here"
        self._host = replace(self._host, replica_lag_time_max_ms=replica_lag_time_max_ms)
        self._fetchers = fetchers
        self._isr_changes = IsrChanges(self._node_id, broker_epoch, propose, lambda: self._active, self.lease.valid)
        self._offline_replicas = OfflineReplicas(self._node_id, broker_epoch, propose, self._lost_replicas)

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
        topic = self._image.topics.get(topic_id)
        if topic is None or not 0 <= partition < len(topic.partitions):
            return unknown_partition(topic_id, partition)
        part = topic.partitions[partition]
        return unknown_partition(topic_id, partition) if part.leader == self._node_id else self._refusal(topic, part)

    def _refusal(self, topic: TopicImage, part: PartitionImage) -> NotLeader:
        """Return what a client is told that takes this broker for the leader: who leads, and where that one is."""
        what = f"{topic.name}-{part.partition}"
        if part.leader == NO_LEADER:
            return NotLeader(f"{what} has no leader at the moment", NO_LEADER, part.leader_epoch)
        leader = self._image.brokers.get(part.leader)
        host, port = (leader.host, leader.port) if leader is not None else ("", 0)
        return NotLeader(
            f"broker {part.leader} leads {what} in epoch {part.leader_epoch}, not this one",
            part.leader,
            part.leader_epoch,
            host,
            port,
        )

    def partitions(self) -> list[Partition]:
        """Return the partitions as they are now."""
        return list(self._partitions.values())

    def __len__(self) -> int:
        return len(self._partitions)

    # Applying metadata

    def start(self, image: MetadataImage) -> None:
        """Start applying, beginning with everything in `image`."""
        self._queue.put_nowait((image, None))
        self._task = asyncio.create_task(self._apply_loop(), name="apply-metadata")

    def on_metadata(self, image: MetadataImage, records: Sequence[records_pb2.MetadataRecord] | None) -> None:
        """Take a committed change; returns at once. Without records everything may have changed."""
        self._queue.put_nowait((image, records))

    def retry_failed(self) -> None:
        """Try again to open the partitions that could not be opened; returns at once."""
        if self._queue.empty() and any(isinstance(error, RetriableError) for error in self._failed.values()):
            self._queue.put_nowait((self._image, ()))
        if self._offline_replicas is not None:
            self._offline_replicas.report_soon()

    @property
    def applied_offset(self) -> int:
        """The metadata offset up to which this broker acts; -1 before the first image."""
        return self._applied_offset

    async def wait_applied(self, metadata_offset: int) -> None:
        """Return once every change up to `metadata_offset` is in effect here."""
        async with self._applied:
            await self._applied.wait_for(lambda: self._applied_offset >= metadata_offset)

    async def _apply_loop(self) -> None:
        while True:
            image, records = await self._queue.get()
            if image.offset < self._image.offset:
                logger.error("metadata at offset %d came after %d; passed over", image.offset, self._image.offset)
                continue
            self._image = image
            self._active = {b.broker_id: b.broker_epoch for b in image.brokers.values() if b.active}
            try:
                if records is None:
                    self._close_unknown(image)
                    await self._partition_logs.set_strays_aside(image)
                    await self._apply_topics(image, image.topics.values())
                else:
                    await self._apply_records(image, records)
            except Exception:  # one topic that fails must not stop the changes after it
                logger.exception("applying metadata failed at offset %d", image.offset)
            changed = bool(self._gained or self._lost)
            if changed:
                logger.info(
                    "leaderships changed",
                    extra={"gained": self._gained, "lost": self._lost, "metadata_offset": image.offset},
                )
                self._gained = self._lost = 0
            async with self._applied:
                self._applied_offset = image.offset
                self._applied.notify_all()
            if self.on_applied is not None:
                self.on_applied(changed)

    async def _apply_records(self, image: MetadataImage, records: Sequence[records_pb2.MetadataRecord]) -> None:
        touched: dict[bytes, None] = dict.fromkeys(topic_id for topic_id, _ in self._failed)
        for record in records:
            match record.WhichOneof("record"):
                case "remove_topic":
                    await self._remove_topic(record.remove_topic.topic_id)
                case "partition":
                    touched[record.partition.topic_id] = None
                case "config" if record.config.resource.type == records_pb2.ConfigResource.TOPIC:
                    topic_id = image.topic_id_by_name.get(record.config.resource.name)
                    if topic_id is not None:
                        touched[topic_id] = None
                case "broker" if record.broker.broker_id == self._node_id:  # what it did not lead while fenced
                    touched.update(dict.fromkeys(key[0] for key, part in self._partitions.items() if not part.leads))
                case "config":  # a broker's default holds for every topic that does not say otherwise
                    touched.update(dict.fromkeys(image.topics))
                case _:
                    pass
        await self._apply_topics(image, (image.topics[t] for t in touched if t in image.topics))

    async def _apply_topics(self, image: MetadataImage, topics: Iterable[TopicImage]) -> None:
        for topic in topics:
            try:
                await self._apply_topic(image, topic)
            except Exception as error:  # a topic that fails must not take those after it along
                logger.exception("applying the metadata of topic %s failed", topic.name)
                self._give_up(topic, error)

    def _give_up(self, topic: TopicImage, error: Exception) -> None:
        """Close a topic's partitions: what was not applied may have taken their leadership away."""
        reason = InternalError(f"this broker cannot apply the metadata of topic {topic.name}: {error}; restart it")
        for part in topic.partitions:
            partition = self._partitions.pop((topic.topic_id, part.partition), None)
            self._fetchers.unfollow(topic.topic_id, part.partition)
            if partition is not None:
                partition.close(reason)
                self._failed[topic.topic_id, part.partition] = reason

    async def _apply_topic(self, image: MetadataImage, topic: TopicImage) -> None:
        rules = topic_rules(image, topic, self._topic_defaults, self._node_id)
        for part in topic.partitions:
            key = (topic.topic_id, part.partition)
            if self._node_id not in part.replicas:
                await self._remove(key, self._refusal(topic, part))
                continue
            partition = self._partitions.get(key) or await self._open(topic, part, rules.log)
            if partition is None:
                continue
            if partition.log.config != rules.log:
                partition.log.update_config(rules.log)
                partition.apply_config()
            partition.throttle(rules.throttled_leaders, rules.throttled_followers)
            await self._take_role(image, topic, part, partition, rules.min_insync_replicas)

    async def _take_role(
        self,
        image: MetadataImage,
        topic: TopicImage,
        part: PartitionImage,
        partition: Partition,
        min_insync_replicas: int,
    ) -> None:
        """Lead, follow or wait as the metadata says; a role begins once truncations of the one before have ended."""
        key = (topic.topic_id, part.partition)
        if part.leader == NO_LEADER or (part.leader == self._node_id and self._is_fenced(image)):
            self._fetchers.unfollow(*key)
            alone = part.replicas == (self._node_id,)
            if partition.resign(part.leader_epoch, self._refusal(topic, part), keep_waiting=alone):
                self._lost += 1
            return
        if part.leader_epoch > partition.leader_epoch or not (partition.leads or partition.following):
            self._fetchers.unfollow(*key)
            await partition.settled()
        if part.leader == self._node_id:
            membership = Membership(part.replicas, part.isr, part.partition_epoch, min_insync_replicas)
            if partition.lead(part.leader_epoch, membership):
                self._gained += 1
            return
        if partition.follow(part.leader_epoch, part.leader, self._refusal(topic, part)):
            self._lost += 1
        if partition.following is not None:
            self._fetchers.follow(partition.following, part.leader)

    def _is_fenced(self, image: MetadataImage) -> bool:
        """Whether this broker is fenced, so that a leadership is one of an earlier life, and about to be taken.

        In the same epoch that life may have given out offsets which this one does not know of.
        """
        broker = image.brokers.get(self._node_id)
        return broker is not None and broker.fenced

    async def _open(self, topic: TopicImage, part: PartitionImage, config: LogConfig) -> Partition | None:
        key = (topic.topic_id, part.partition)
        try:
            log = await self._partition_logs.open(topic, part, config)
        except RaftlogError as error:
            if str(error) != str(self._failed.get(key)):
                logger.error("partition %s-%d cannot be opened: %s", topic.name, part.partition, error)
            self._failed[key] = error
            if self._offline_replicas is not None and self._applied_offset >= 0:
                self._offline_replicas.report_soon()
            return None
        self._failed.pop(key, None)
        if self._offline_replicas is not None:
            self._offline_replicas.restored(key)
        opened = self._partitions[key] = Partition(log, self._host)
        return opened

    async def _remove_topic(self, topic_id: bytes) -> None:
        for key in [key for key in (*self._partitions, *self._failed) if key[0] == topic_id]:
            await self._remove(key, UnknownTopicId(f"topic id {topic_id.hex()} was deleted"))

    async def _remove(self, key: PartitionKey, reason: RaftlogError) -> None:
        """Delete a replica that the metadata does not have here any more, if it is here."""
        if key not in self._partitions and key not in self._failed:
            return
        self._forget(key, reason)
        await self._partition_logs.delete(key)

    def _forget(self, key: PartitionKey, reason: RaftlogError) -> None:
        self._failed.pop(key, None)
        self._fetchers.unfollow(*key)
        partition = self._partitions.pop(key, None)
        if partition is not None:
            self._lost += partition.leads
            partition.close(reason)

    def _close_unknown(self, image: MetadataImage) -> None:
        """Close the partitions that a whole image does not have here; their logs are set aside, not deleted."""
        for key in [*self._partitions, *self._failed]:
            topic, part = image.topics.get(key[0]), image.partition(*key)
            if topic is None or part is None:
                self._forget(key, UnknownTopicId(f"topic id {key[0].hex()} partition {key[1]} was deleted"))
            elif self._node_id not in part.replicas:
                self._forget(key, self._refusal(topic, part))

    # In sync

    def check_isr(self) -> None:
        """Ask for the changes of ISRs that the clock alone calls for; housekeeping calls it."""
        if self._isr_changes is not None:
            self._isr_changes.look_at_all(self._partitions.values())

    def _on_isr_wish(self, partition: object) -> None:
        if self._isr_changes is not None:
            assert isinstance(partition, Partition)
            self._isr_changes.look(partition)

    def preferred_replica(self, partition: Partition, rack: str) -> int | None:
        """Return the follower in `rack` that a reader there is to be sent to (KIP-392); None: nobody is nearer."""
        brokers = self._image.brokers.values()
        return partition.nearer_replica({b.broker_id for b in brokers if b.active and b.rack == rack})

    # Disk trouble

    async def report_offline_replicas(self) -> None:
        """Tell the controller of the replicas that have no working log; before the first heartbeat."""
        if self._offline_replicas is not None:
            await self._offline_replicas.report()

    def _lost_replicas(self) -> list[PartitionKey]:
        """Return the replicas without a working log that have others beside them."""
        return [
            key
            for key in self._failed
            if self._partition_logs.is_lost(key)
            and (part := self._image.partition(*key)) is not None
            and len(part.replicas) > 1
        ]

    def _on_storage_error(self, log: PartitionLog, error: BaseException) -> None:
        self._logs.mark_dir_offline(self._logs.dir_of(log), error)

    def on_dir_offline(self, path: str, error: BaseException, logs: Sequence[PartitionLog]) -> None:
        """Close every partition of a log directory that failed; may be called from any thread, in any place."""
        self._loop.call_soon_threadsafe(self._close_dir, path, error, logs)

    def _close_dir(self, path: str, error: BaseException, logs: Sequence[PartitionLog]) -> None:
        reason = StorageError(f"log directory {path} is offline: {error}; repair the disk and restart the broker")
        for log in logs:
            key = (log.topic_id, log.partition)
            partition = self._partitions.pop(key, None)
            self._failed[key] = reason
            self._fetchers.unfollow(*key)
            if partition is not None:
                self._lost += partition.leads
                partition.close(reason)
        if self._offline_replicas is not None:
            self._offline_replicas.report_soon()

    # End

    async def stop(self) -> None:
        """Stop applying; the partitions stay as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for asking in (self._isr_changes, self._offline_replicas):
            if asking is not None:
                await asking.close()

    def close_all(self, reason: RaftlogError) -> None:
        """Answer everyone who waits with `reason`."""
        for partition in self._partitions.values():
            partition.close(reason)
