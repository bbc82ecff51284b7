"""The logs of partitions: opened, made, deleted and set aside, off the event loop.

A log is deleted only if a committed change says that its partition is gone, or has moved away from this broker. A log
that the image merely does not know is set aside and reported: the image may be wrong.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from concurrent.futures import Executor
from functools import partial

from broker.log.config import LogConfig
from broker.log.log_dir import PartitionKey
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from raftlog.errors import CorruptRecordError, StorageError
from raftmeta.image import NO_LEADER, MetadataImage, PartitionImage, TopicImage

logger = logging.getLogger(__name__)


class Leaving(enum.Enum):
    """What happens to a log that is no longer a replica of this broker."""

    DELETED = "deleted"
    SET_ASIDE = "set aside"


class PartitionLogs:
    """What the replica manager asks of the `LogManager`."""

    def __init__(self, node_id: int, logs: LogManager, disk: Executor) -> None:
        self._node_id = node_id
        self._logs = logs
        self._disk = disk

    def online(self, key: PartitionKey) -> PartitionLog | None:
        """Return the open log of a partition, or None if there is none or its directory is offline; never waits."""
        log = self._logs.get(*key)
        return None if log is None or log.log_dir.offline_reason is not None else log

    async def open(self, topic: TopicImage, part: PartitionImage, config: LogConfig) -> PartitionLog:
        """Return the log of a partition. Make it if there is none, or if a damaged or missing one may be replaced.

        Raises:
            RaftlogError: the log can be neither opened nor made.
        """
        key = (topic.topic_id, part.partition)
        log = self._logs.get(*key)
        if log is None:
            loop = asyncio.get_running_loop()
            is_elsewhere = self._others_have_it(part)
            if key in self._logs.corrupt_logs:
                given_up = await loop.run_in_executor(self._disk, self._logs.is_given_up, topic.name, part.partition)
                if is_elsewhere or given_up:
                    where = await loop.run_in_executor(self._disk, self._logs.set_aside, *key)
                    logger.warning(
                        "the log of %s-%d was %s; %s",
                        topic.name,
                        part.partition,
                        "missing" if where is None else f"damaged and moved to {where}",
                        f"its records are fetched from broker {part.leader}"
                        if is_elsewhere
                        else "an operator has given its records up, so it begins empty",
                    )
            # The partition has not changed since it was created, so no offline directory can have its log.
            is_new = part.partition_epoch == 0
            create = partial(self._logs.create, topic.name, *key, config, is_new=is_new, is_elsewhere=is_elsewhere)
            log = await loop.run_in_executor(self._disk, create)
        if log.log_dir.offline_reason is not None:
            raise log.log_dir.offline_reason
        if self._logs.get(*key) is not log:
            raise StorageError(f"the log of {topic.name}-{part.partition} was removed while it was opened; try again")
        if config.flush_messages > 1 and topic.topic_id not in log.log_dir.unsynced_topic_ids:
            await asyncio.get_running_loop().run_in_executor(self._disk, self._logs.note_unsynced, log)
        log.update_config(config)
        return log

    def _others_have_it(self, part: PartitionImage) -> bool:
        """Whether another broker leads, and this replica, neither in sync nor electable, may begin anew."""
        me = self._node_id
        return part.leader not in (NO_LEADER, me) and me not in part.isr and me not in part.eligible_leader_replicas

    def is_lost(self, key: PartitionKey) -> bool:
        """Whether a replica has no working log, for a reason that does not pass by itself."""
        log = self._logs.get(*key)
        return self._logs.is_lost(*key) if log is None else log.log_dir.offline_reason is not None

    def is_hopeless(self, key: PartitionKey, part: PartitionImage) -> bool:
        """Whether opening a replica must fail, by the metadata as it is now."""
        return self.is_lost(key) and not (key in self._logs.corrupt_logs and self._others_have_it(part))

    async def mark_corrupt(self, log: PartitionLog, error: CorruptRecordError) -> None:
        """Mark an open log as damaged, from now on and after a restart."""
        await asyncio.get_running_loop().run_in_executor(self._disk, self._logs.mark_corrupt, log, error)

    # Logs that are no replicas of this broker

    def strays(self, image: MetadataImage) -> list[PartitionKey]:
        """Return the logs on this broker, damaged ones too, that are no replicas of it by this image."""
        here = {(log.topic_id, log.partition): None for log in self._logs.logs()} | dict.fromkeys(
            list(self._logs.corrupt_logs)
        )
        parts = ((key, image.partition(*key)) for key in here)
        return [key for key, part in parts if part is None or self._node_id not in part.replicas]

    async def take_away(self, key: PartitionKey, leaving: Leaving, image: MetadataImage) -> None:
        """Delete a log, or move it away, as `leaving` says.

        Raises:
            RaftlogError: the log is still in place.
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
