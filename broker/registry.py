"""The partitions on this broker, kept as the metadata image says.

Changes of the image are applied one after the other, off the event loop where they touch the disk. A log whose topic
the image does not know is set aside and reported, never deleted: the image may be the one that is wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial

from broker.clock import Clock
from broker.lease import Lease
from broker.log.config import LogConfig
from broker.log.group_commit import GroupCommit
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.partition import Partition, check_topic_id, unknown_partition
from raftlog.errors import InternalError, NotLeader, RaftlogError, RetriableError, StorageError, UnknownTopicId
from raftlog.v1 import records_pb2
from raftmeta.image import NO_LEADER, MetadataImage, PartitionImage, TopicImage

logger = logging.getLogger(__name__)

MIN_INSYNC_REPLICAS = "min.insync.replicas"
PartitionKey = tuple[bytes, int]
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
        self._group_commit = group_commit
        self._clock = clock
        self._topic_defaults = topic_defaults
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._partitions: dict[PartitionKey, Partition] = {}
        self._failed: dict[PartitionKey, RaftlogError] = {}
        self._image = MetadataImage()
        self._queue: asyncio.Queue[_Step] = asyncio.Queue()
        self._gained = self._lost = 0
        self._applied_offset = -1
        self._applied = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

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
            try:
                if records is None:
                    self._close_unknown(image)
                    await self._set_strays_aside(image)
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
            if partition is not None:
                partition.close(reason)
                self._failed[topic.topic_id, part.partition] = reason

    async def _apply_topic(self, image: MetadataImage, topic: TopicImage) -> None:
        configs = {**self._topic_defaults, **image.topic_configs(topic.name, self._node_id)}
        config = LogConfig.from_topic_configs(configs)
        min_insync_replicas = int(configs.get(MIN_INSYNC_REPLICAS, "1"))
        for part in topic.partitions:
            key = (topic.topic_id, part.partition)
            partition = self._partitions.get(key)
            if partition is None and self._node_id in part.replicas:
                partition = await self._open(topic, part, config)
            if partition is None:
                continue
            if partition.log.config != config:
                partition.log.update_config(config)
                partition.apply_config()
            if part.leader == self._node_id:
                if partition.lead(part.leader_epoch, len(part.isr), min_insync_replicas):
                    self._gained += 1
            else:
                alone = part.leader == NO_LEADER and part.replicas == (self._node_id,)
                if partition.resign(part.leader_epoch, self._refusal(topic, part), keep_waiting=alone):
                    self._lost += 1

    async def _open(self, topic: TopicImage, part: PartitionImage, config: LogConfig) -> Partition | None:
        key = (topic.topic_id, part.partition)
        log = self._logs.get(*key)
        if log is None:
            # Nothing has happened to the partition since it was created: it cannot lie in a directory that is offline.
            is_new = part.partition_epoch == 0
            create = partial(self._logs.create, topic.name, *key, config, is_new=is_new)
            try:
                log = await self._loop.run_in_executor(self._disk, create)
            except RaftlogError as error:
                if str(error) != str(self._failed.get(key)):
                    logger.error("partition %s-%d cannot be opened: %s", topic.name, part.partition, error)
                self._failed[key] = error
                return None
        log.update_config(config)
        self._failed.pop(key, None)
        opened = Partition(
            log,
            self._group_commit,
            self._clock,
            self.lease,
            on_storage_error=self._on_storage_error,
        )
        self._partitions[key] = opened
        return opened

    async def _remove_topic(self, topic_id: bytes) -> None:
        for key in [key for key in (*self._partitions, *self._failed) if key[0] == topic_id]:
            self._failed.pop(key, None)
            partition = self._partitions.pop(key, None)
            if partition is not None:
                partition.close(UnknownTopicId(f"{partition.topic_partition} was deleted"))
            try:
                await self._loop.run_in_executor(self._disk, self._logs.delete, *key)
            except RaftlogError as error:  # it will be found as a stray when the disk works again
                logger.error("the log of topic id %s partition %d cannot be deleted: %s", key[0].hex(), key[1], error)

    def _close_unknown(self, image: MetadataImage) -> None:
        """Close the partitions of topics that a whole image does not have any more."""
        for key in [key for key in (*self._partitions, *self._failed) if key[0] not in image.topics]:
            self._failed.pop(key, None)
            partition = self._partitions.pop(key, None)
            if partition is not None:
                partition.close(UnknownTopicId(f"{partition.topic_partition} was deleted"))

    async def _set_strays_aside(self, image: MetadataImage) -> None:
        """Move logs of unknown topics away: the topic was deleted while this broker was down, or the image is wrong."""
        known = [(log.topic_id, log.partition, log.directory) for log in self._logs.logs()]
        damaged = [(*key, corrupt.directory) for key, corrupt in self._logs.corrupt_logs.items()]
        for topic_id, partition, directory in (*known, *damaged):
            if topic_id in image.topics:
                continue
            try:
                where = await self._loop.run_in_executor(self._disk, self._logs.set_aside, topic_id, partition)
            except RaftlogError as error:
                logger.error("log %s of an unknown topic cannot be set aside: %s", directory, error)
                continue
            logger.warning(
                "log %s belongs to topic id %s, which the cluster does not know; it was moved to %s and stays there: "
                "delete it by hand when it is not needed",
                directory,
                topic_id.hex(),
                where,
            )

    # Disk trouble

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
            if partition is not None:
                partition.close(reason)

    # End

    async def stop(self) -> None:
        """Stop applying; the partitions stay as they are."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def close_all(self, reason: RaftlogError) -> None:
        """Answer everyone who waits with `reason`."""
        for partition in self._partitions.values():
            partition.close(reason)
