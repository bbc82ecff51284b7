"""Who leads, who follows and who waits on this broker, as the metadata has it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from broker.partition import Partition
from broker.partition_logs import PartitionKey
from broker.registry_parts import Fetchers, NoFetchers
from raftlog.errors import NotLeader
from raftlog.v1 import records_pb2
from raftmeta.image import NO_LEADER, MetadataImage, PartitionImage, TopicImage
from raftmeta.replica_marks import why_leaderless
from replication.leader import Membership

logger = logging.getLogger(__name__)

LINES: Final = 100
"""Leaderships gained and lost in one second that are logged one by one; the others are, too, at level debug."""


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
        self._log_lost: set[PartitionKey] = set()
        """Of which it was said that they wait since this broker's disk was replaced."""
        self._cut: dict[Partition, asyncio.Task[None]] = {}
        self._lines, self._lines_since_s = 0, float("-inf")

    def note_election(self, record: records_pb2.PartitionRecord) -> None:
        """Keep in mind how this broker has become the leader."""
        if record.unclean_election and record.leader == self._node_id:
            self._unclean[record.topic_id, record.partition] = record.leader_epoch

    def forget(self, key: PartitionKey) -> None:
        """The partition is gone for good."""
        self._led.pop(key, None)
        self._unclean.pop(key, None)
        self._log_lost.discard(key)

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
        self._note_log_lost(key, image, topic, part)
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
            self._note_lost(partition, part)
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
            self._note_lost(partition, part)

    def _note_lost(self, partition: Partition, part: PartitionImage) -> None:
        self.lost += 1
        fields = {"partition": str(partition.topic_partition), "leader_epoch": part.leader_epoch, "leader": part.leader}
        logger.log(self._level(), "leads no longer", extra={"event": "leader_lost", **fields})

    def _note_gained(self, partition: Partition, part: PartitionImage) -> None:
        self.gained += 1
        fields = {"partition": str(partition.topic_partition), "leader_epoch": part.leader_epoch, "isr": list(part.isr)}
        logger.log(self._level(), "leads", extra={"event": "leader_gained", **fields})

    def _level(self) -> int:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._lines_since_s >= 1.0:
            self._lines, self._lines_since_s = 0, now_s
        self._lines += 1
        return logging.INFO if self._lines <= LINES else logging.DEBUG

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
            self._note_gained(partition, part)
            self._led[key] = epoch
            if self._unclean.pop(key, -1) == epoch:
                logger.warning(
                    "leads %s after an unclean election from offset %d: committed records may be lost",
                    partition.topic_partition,
                    partition.log_end_offset,
                    extra={"event": "unclean_leader_gained", "partition": str(partition.topic_partition)},
                )
        if part.offline_replicas or partition.has_offline_replicas:
            offline = (broker_id for broker_id, _ in part.offline_replicas if image.is_offline(part, broker_id))
            partition.replicas_offline(frozenset(offline))

    def _note_log_lost(self, key: PartitionKey, image: MetadataImage, topic: TopicImage, part: PartitionImage) -> None:
        if part.leader != NO_LEADER:
            self._log_lost.discard(key)
        elif part.lost_replicas and self._node_id in part.isr and key not in self._log_lost:
            why = why_leaderless(image, topic.name, part)
            if why is not None:
                self._log_lost.add(key)
                where = f"{topic.name}-{part.partition}"
                logger.error("nobody leads %s: %s", where, why, extra={"event": "replica_log_lost", "partition": where})

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
        why = why_leaderless(image, topic.name, part)
        return NotLeader(
            f"{what} has no leader at the moment{'' if why is None else f': {why}'}", NO_LEADER, part.leader_epoch
        )
    leader = image.brokers.get(part.leader)
    host, port = (leader.host, leader.port) if leader is not None else ("", 0)
    return NotLeader(
        f"broker {part.leader} leads {what} in epoch {part.leader_epoch}, not this one",
        part.leader,
        part.leader_epoch,
        host,
        port,
    )
