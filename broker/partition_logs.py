"""Logs for partitions: opened or made, taken away, set aside, off the event loop.

A log is deleted only because a committed change says that its partition is gone, or has moved away from here. What is
merely found to be in nobody's image is set aside and reported: the image may be the one that is wrong.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from concurrent.futures import Executor
from functools import partial

from broker.log.config import LogConfig
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from raftlog.errors import CorruptRecordError, RaftlogError, StorageError
from raftmeta.image import NO_LEADER, MetadataImage, PartitionImage, TopicImage

logger = logging.getLogger(__name__)

PartitionKey = tuple[bytes, int]


class Leaving(enum.Enum):
    """What becomes of a log that is no replica of this broker any more."""

    DELETED = "deleted"
    SET_ASIDE = "set aside"


class PartitionLogs:
    """What the registry asks of the `LogManager`."""

    def __init__(self, node_id: int, logs: LogManager, disk: Executor) -> None:
        self._node_id = node_id
        self._logs = logs
        self._disk = disk

    def online(self, key: PartitionKey) -> PartitionLog | None:
        """Return a log that is open, without waiting for anything."""
        log = self._logs.get(*key)
        return None if log is None or log.log_dir.offline_reason is not None else log

    async def open(self, topic: TopicImage, part: PartitionImage, config: LogConfig) -> PartitionLog:
        """Return the log of a partition, made if there is none, or if the damaged one may be given up.

        Raises:
            RaftlogError: why there is none.
        """
        key = (topic.topic_id, part.partition)
        log = self._logs.get(*key)
        if log is None:
            loop = asyncio.get_running_loop()
            if key in self._logs.corrupt_logs and self._others_have_it(part):
                where = await loop.run_in_executor(self._disk, self._logs.set_aside, *key)
                logger.warning(
                    "the damaged log of %s-%d was moved to %s; its records are fetched from broker %d",
                    topic.name,
                    part.partition,
                    where,
                    part.leader,
                )
            # Nothing has happened to the partition since it was created: it cannot lie in a directory that is offline.
            is_new = part.partition_epoch == 0
            create = partial(self._logs.create, topic.name, *key, config, is_new=is_new)
            log = await loop.run_in_executor(self._disk, create)
        if log.log_dir.offline_reason is not None:
            raise log.log_dir.offline_reason
        if self._logs.get(*key) is not log:
            raise StorageError(f"the log of {topic.name}-{part.partition} was taken away while it was opened")
        log.update_config(config)
        return log

    def _others_have_it(self, part: PartitionImage) -> bool:
        """Whether a leader has every record, and this replica counts for nothing, so that it may begin anew."""
        me = self._node_id
        return part.leader not in (NO_LEADER, me) and me not in part.isr and me not in part.eligible_leader_replicas

    def is_lost(self, key: PartitionKey) -> bool:
        """Whether a replica has no working log, for a reason that does not pass by itself."""
        log = self._logs.get(*key)
        return self._logs.is_lost(*key) if log is None else log.log_dir.offline_reason is not None

    def is_hopeless(self, key: PartitionKey, part: PartitionImage) -> bool:
        """Whether it is of no use to try to open a replica, by the metadata as it is now."""
        return self.is_lost(key) and not (key in self._logs.corrupt_logs and self._others_have_it(part))

    async def mark_corrupt(self, log: PartitionLog, error: CorruptRecordError) -> None:
        """Have an open log count as damaged, from now on and after a restart."""
        await asyncio.get_running_loop().run_in_executor(self._disk, self._logs.mark_corrupt, log, error)

    # What is no replica of this broker

    def strays(self, image: MetadataImage) -> list[PartitionKey]:
        """Return whose logs are here, damaged or not, and are no replicas of this broker, by a whole image."""
        here = {(log.topic_id, log.partition): None for log in self._logs.logs()} | dict.fromkeys(
            list(self._logs.corrupt_logs)
        )
        parts = ((key, image.partition(*key)) for key in here)
        return [key for key, part in parts if part is None or self._node_id not in part.replicas]

    async def take_away(self, key: PartitionKey, leaving: Leaving, image: MetadataImage) -> None:
        """Delete a log, or move it away, as `leaving` says.

        Raises:
            RaftlogError: it is here still.
        """
        if leaving is Leaving.DELETED:
            await asyncio.get_running_loop().run_in_executor(self._disk, self._logs.delete, *key)
            return
        topic_id, partition = key
        log, damaged = self._logs.get(*key), self._logs.corrupt_logs.get(key)
        where = await asyncio.get_running_loop().run_in_executor(self._disk, self._logs.set_aside, *key)
        if where is None:
            return
        what = (
            f"topic id {topic_id.hex()}, which the cluster does not know"
            if topic_id not in image.topics
            else f"partition {partition} of {image.topics[topic_id].name}, which has no replica here"
        )
        logger.warning(
            "log %s belongs to %s; it was moved to %s and stays there: delete it by hand when it is not needed",
            log.directory if log is not None else damaged.directory if damaged is not None else "",
            what,
            where,
        )

    def cannot_leave(self, key: PartitionKey, leaving: Leaving, error: RaftlogError) -> None:
        """Say that a log is here still; it will be found as a stray when the disk works again."""
        logger.error("the log of topic id %s partition %d cannot be %s: %s", key[0].hex(), key[1], leaving.value, error)
