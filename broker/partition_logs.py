"""Logs for partitions: opened or made, taken away, set aside, off the event loop.

A log is deleted only because a committed change says that its partition is gone, or has moved away from here. What is
merely found to be in nobody's image is set aside and reported: the image may be the one that is wrong.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from functools import partial

from broker.log.config import LogConfig
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from raftlog.errors import RaftlogError
from raftmeta.image import NO_LEADER, MetadataImage, PartitionImage, TopicImage

logger = logging.getLogger(__name__)

PartitionKey = tuple[bytes, int]


class PartitionLogs:
    """What the registry asks of the `LogManager`."""

    def __init__(self, node_id: int, logs: LogManager, disk: Executor) -> None:
        self._node_id = node_id
        self._logs = logs
        self._disk = disk

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
        log.update_config(config)
        return log

    def _others_have_it(self, part: PartitionImage) -> bool:
        """Whether a leader has every record, and this replica counts for nothing, so that it may begin anew."""
        me = self._node_id
        return part.leader not in (NO_LEADER, me) and me not in part.isr and me not in part.eligible_leader_replicas

    def is_lost(self, key: PartitionKey) -> bool:
        """Whether a replica has no working log, for a reason that does not pass by itself."""
        return self._logs.is_lost(*key)

    async def delete(self, key: PartitionKey) -> None:
        """Delete the log of a partition that is gone, or not here any more."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._disk, self._logs.delete, *key)
        except RaftlogError as error:  # it will be found as a stray when the disk works again
            logger.error("the log of topic id %s partition %d cannot be deleted: %s", key[0].hex(), key[1], error)

    async def set_strays_aside(self, image: MetadataImage) -> list[PartitionKey]:
        """Move logs away that are no replicas of this broker, by a whole image; return whose they are.

        The topic was deleted or the partition moved away while this broker was down, or the image is wrong.
        """
        known = [(log.topic_id, log.partition, log.directory) for log in self._logs.logs()]
        damaged = [(*key, corrupt.directory) for key, corrupt in list(self._logs.corrupt_logs.items())]
        strays = []
        for topic_id, partition, directory in (*known, *damaged):
            part = image.partition(topic_id, partition)
            if part is not None and self._node_id in part.replicas:
                continue
            strays.append((topic_id, partition))
            try:
                where = await asyncio.get_running_loop().run_in_executor(
                    self._disk, self._logs.set_aside, topic_id, partition
                )
            except RaftlogError as error:
                logger.error("log %s of an unknown partition cannot be set aside: %s", directory, error)
                continue
            what = (
                f"topic id {topic_id.hex()}, which the cluster does not know"
                if topic_id not in image.topics
                else f"partition {partition} of {image.topics[topic_id].name}, which has no replica here"
            )
            logger.warning(
                "log %s belongs to %s; it was moved to %s and stays there: delete it by hand when it is not needed",
                directory,
                what,
                where,
            )
        return strays
