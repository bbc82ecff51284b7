"""Who leads, who follows and who waits on this broker, as the metadata has it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from broker.partition import Partition
from broker.partition_logs import PartitionKey
from broker.registry_parts import Fetchers, NoFetchers
from raftlog.errors import NotLeader
from raftlog.v1 import records_pb2
from raftmeta.image import NO_LEADER, MetadataImage, PartitionImage, TopicImage
from replication.leader import Membership

logger = logging.getLogger(__name__)


class RoleChanges:
    """Gives partitions their roles; never waits.

    A role ends at once. The next one begins at once too, unless a truncation of the one before is under way: then the
    partition waits, and `look_again` is called when the truncation has ended, for the metadata as it is by then.

    In an epoch in which this process has led, and leads no more, it does not lead again: whom it had asked to be taken
    into the ISR is forgotten, and may be in it.
    """

    def __init__(self, node_id: int, look_again: Callable[[PartitionKey, Partition], None]) -> None:
        self.fetchers: Fetchers = NoFetchers()
        self.gained = self.lost = 0
        """Leaderships that came and went since somebody set these to 0."""
        self._node_id = node_id
        self._look_again = look_again
        self._led: dict[PartitionKey, int] = {}
        """The last epoch in which this process has led."""
        self._unclean: dict[PartitionKey, int] = {}
        """The epoch that began with an unclean election, until this broker leads in it."""
        self._cut: dict[Partition, asyncio.Task[None]] = {}

    def note_election(self, record: records_pb2.PartitionRecord) -> None:
        """Keep in mind how this broker has become the leader."""
        if record.unclean_election and record.leader == self._node_id:
            self._unclean[record.topic_id, record.partition] = record.leader_epoch

    def forget(self, key: PartitionKey) -> None:
        """The partition is gone for good."""
        self._led.pop(key, None)
        self._unclean.pop(key, None)

    def take(
        self,
        image: MetadataImage,
        topic: TopicImage,
        part: PartitionImage,
        partition: Partition,
        min_insync_replicas: int,
    ) -> None:
        """Have a partition lead, follow or wait as the metadata says."""
        key = (topic.topic_id, part.partition)
        leads_here, alone = part.leader == self._node_id, part.replicas == (self._node_id,)
        if part.leader == NO_LEADER or (leads_here and is_fenced(image, self._node_id)):
            self._wait(key, part, partition, refusal(image, topic, part), keep_waiting=alone)
            return
        if part.leader_epoch > partition.leader_epoch or not (partition.leads or partition.following):
            self.fetchers.unfollow(*key)
            if partition.is_cut:
                self._wait(key, part, partition, self._not_yet(topic, part), keep_waiting=alone)
                self._look_after_cut(key, partition)
                return
        if leads_here:
            self._lead(key, image, topic, part, partition, min_insync_replicas)
            return
        if partition.follow(part.leader_epoch, part.leader, refusal(image, topic, part)):
            self.lost += 1
        if partition.following is not None:
            self.fetchers.follow(partition.following, part.leader)

    def _wait(
        self,
        key: PartitionKey,
        part: PartitionImage,
        partition: Partition,
        reason: NotLeader,
        *,
        keep_waiting: bool,
    ) -> None:
        self.fetchers.unfollow(*key)
        if partition.resign(part.leader_epoch, reason, keep_waiting=keep_waiting):
            self.lost += 1

    def _not_yet(self, topic: TopicImage, part: PartitionImage) -> NotLeader:
        return NotLeader(
            f"{topic.name}-{part.partition}: leader epoch {part.leader_epoch} begins here once the log has been cut",
            NO_LEADER if part.leader == self._node_id else part.leader,
            part.leader_epoch,
        )

    def _lead(
        self,
        key: PartitionKey,
        image: MetadataImage,
        topic: TopicImage,
        part: PartitionImage,
        partition: Partition,
        min_insync_replicas: int,
    ) -> None:
        epoch = part.leader_epoch
        if not partition.leads and epoch <= self._led.get(key, -1):
            what = f"{topic.name}-{part.partition}: this broker has given leader epoch {epoch} up; wait for the next"
            self._wait(key, part, partition, NotLeader(what, NO_LEADER, epoch), keep_waiting=len(part.replicas) == 1)
            return
        if partition.lead(epoch, Membership(part.replicas, part.isr, part.partition_epoch, min_insync_replicas)):
            self.gained += 1
            self._led[key] = epoch
            if self._unclean.pop(key, -1) == epoch:
                logger.warning(
                    "leads %s after an unclean election from offset %d: committed records may be lost",
                    partition.topic_partition,
                    partition.log_end_offset,
                )
        if part.offline_replicas or partition.has_offline_replicas:
            offline = (broker_id for broker_id, _ in part.offline_replicas if image.is_offline(part, broker_id))
            partition.replicas_offline(frozenset(offline))

    def _look_after_cut(self, key: PartitionKey, partition: Partition) -> None:
        if partition not in self._cut:
            task = asyncio.get_running_loop().create_task(self._after_cut(key, partition), name="role-after-cut")
            self._cut[partition] = task

    async def _after_cut(self, key: PartitionKey, partition: Partition) -> None:
        await partition.settled()
        del self._cut[partition]
        self._look_again(key, partition)

    async def close(self) -> None:
        """Begin no role any more."""
        for task in self._cut.values():
            task.cancel()
        await asyncio.gather(*self._cut.values(), return_exceptions=True)


def is_fenced(image: MetadataImage, broker_id: int) -> bool:
    """Whether the broker is fenced, so that a leadership is one of an earlier life, and about to be taken.

    In the same epoch that life may have given out offsets which this one does not know of.
    """
    broker = image.brokers.get(broker_id)
    return broker is not None and broker.fenced


def refusal(image: MetadataImage, topic: TopicImage, part: PartitionImage) -> NotLeader:
    """Return what a client is told that takes this broker for the leader: who leads, and where that one is."""
    what = f"{topic.name}-{part.partition}"
    if part.leader == NO_LEADER:
        return NotLeader(f"{what} has no leader at the moment", NO_LEADER, part.leader_epoch)
    leader = image.brokers.get(part.leader)
    host, port = (leader.host, leader.port) if leader is not None else ("", 0)
    return NotLeader(
        f"broker {part.leader} leads {what} in epoch {part.leader_epoch}, not this one",
        part.leader,
        part.leader_epoch,
        host,
        port,
    )
