"""The queues of one topic, and which partition a record goes to."""

from __future__ import annotations

from collections.abc import Callable

from raftlog._core.cluster import TopicView
from raftlog._core.murmur2 import key_hash
from raftlog._core.numbering import Numbering
from raftlog._core.partition_queue import PartitionQueue
from raftlog.errors import InvalidPartitions, InvalidRequestError

Partitioner = Callable[[str, bytes | None, int], int]
"""A partitioner of one's own: (topic, key, number of partitions) -> partition."""


class TopicQueues:
    """Queues by partition, and the sticky partition for records that name neither partition nor key.

    Records without a key fill one batch, then the next partition has its turn: few large batches instead of many
    small ones (KIP-480), spread evenly. Partitions without a leader are passed over while others have one.
    """

    def __init__(self, view: TopicView, partitioner: Partitioner | None, *, idempotent: bool = False) -> None:
        self.topic = view.name
        self.topic_id = view.topic_id
        self.queues: list[PartitionQueue] = []
        self.sticky = 0
        self._available: list[int] = []
        self._partitioner = partitioner
        self._idempotent = idempotent
        self.update(view)

    def update(self, view: TopicView) -> None:
        """Take over the partitions of newer metadata; a topic that was made again may have fewer."""
        self.topic_id = view.topic_id
        for partition in range(len(self.queues), len(view.partitions)):
            self.queues.append(PartitionQueue(self.topic, partition, Numbering() if self._idempotent else None))
        self.partition_count = len(view.partitions)
        led = [part.partition for part in view.partitions if part.leader >= 0]
        self._available = led or [part.partition for part in view.partitions]
        if self.sticky not in self._available:
            self.next_sticky()

    def next_sticky(self) -> int:
        """Let the next available partition have its turn, and return it."""
        self.sticky = next((part for part in self._available if part > self.sticky), self._available[0])
        return self.sticky

    def sticky_turns(self, count: int) -> list[int]:
        """Return the sticky partitions of `count` turns to come, the current one first, and leave them behind."""
        turns = []
        for _ in range(count):
            turns.append(self.sticky)
            self.next_sticky()
        return turns

    def queue_for(self, key: bytes | None, partition: int | None) -> PartitionQueue:
        """Return the queue of a record: the partition it names, else by key as Kafka does, else the sticky one.

        Raises:
            InvalidPartitions: there is no such partition.
        """
        if partition is None:
            if self._partitioner is not None:
                partition = self.ask_partitioner(key)
            elif key is not None:
                partition = key_hash(key) % self.partition_count
            else:
                partition = self.sticky
        self.check_partition(partition)
        return self.queues[partition]

    @property
    def takes_turns(self) -> bool:
        """Whether records that name neither partition nor key go to more than one."""
        return self._partitioner is None and len(self._available) > 1

    @property
    def custom(self) -> bool:
        """Whether a partitioner of the user's own decides."""
        return self._partitioner is not None

    def ask_partitioner(self, key: bytes | None) -> int:
        """Return what the custom partitioner says.

        Raises:
            InvalidRequestError: it returned something else than a number.
        """
        assert self._partitioner is not None
        partition = self._partitioner(self.topic, key, self.partition_count)
        if not isinstance(partition, int):
            raise InvalidRequestError(f"the partitioner returned {partition!r} for topic {self.topic!r}; return an int")
        return partition

    def check_partition(self, partition: int) -> None:
        """Refuse a partition that is not there.

        Raises:
            InvalidPartitions: names the topic and what it has.
        """
        if not 0 <= partition < self.partition_count:
            raise InvalidPartitions(
                f"topic {self.topic!r} has partitions 0 to {self.partition_count - 1}, "
                f"there is no partition {partition}"
            )
