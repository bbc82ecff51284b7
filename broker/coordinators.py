"""Who coordinates what, and the coordinators of this broker: shards of an internal topic.

What has an id belongs to partition `hash(id) % partitions` of its topic, as in Kafka; the partition's leader
coordinates it. `group_coordinators.py` and `transaction_coordinators.py` say which topic, which ids, and what a
coordinator is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import ClassVar, Final, Generic, NamedTuple, TypeVar

from broker.clock import Clock
from broker.coordinator.core import Core
from broker.coordinator.shard import Shard
from broker.coordinator.shards import Shards
from broker.group_topics import ImageTopics, topics_changed
from broker.lease import Lease
from broker.partition_roles import PartitionRoles
from raftlog.errors import CoordinatorLoadInProgress, CoordinatorNotAvailable, NotCoordinator
from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.image import BrokerImage, MetadataImage

CommandT = TypeVar("CommandT")
TopicsT = TypeVar("TopicsT")

_MIN_INT32: Final = -(1 << 31)


def java_hash(text: str) -> int:
    """Return Java's `String.hashCode`: over UTF-16 code units, as a signed 32-bit number."""
    code_units = memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")
    value = 0
    for unit in code_units:
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def partition_for(key: str, partitions: int) -> int:
    """Return the partition of an internal topic that an id belongs to; the same one as in Kafka."""
    value = java_hash(key)
    return (0 if value == _MIN_INT32 else abs(value)) % partitions


class Coordination(NamedTuple):
    """Where something is coordinated."""

    partition: int
    broker: BrokerImage


class Coordinators(ABC, Generic[CommandT, TopicsT]):
    """All shards of one internal topic on this broker.

    Wire `on_term` to the registry, and `on_metadata` to the metadata. `TOPIC` is the internal topic's name, `WHAT` what
    an id is of, for people.
    """

    TOPIC: ClassVar[str]
    WHAT: ClassVar[str]

    def __init__(
        self,
        node_id: int,
        image: Callable[[], MetadataImage],
        *,
        executor: Executor,
        clock: Clock,
        lease: Lease,
    ) -> None:
        self._node_id = node_id
        self._newest_image = image
        self._lease = lease
        self._image = image()
        """What the shards have been told of, as far as topics go."""
        self._shards: Shards[CommandT, TopicsT] = Shards(
            self.TOPIC, self._make_core, self._topics, executor=executor, clock=clock, lease=lease
        )

    @abstractmethod
    def _make_core(self, partition: int) -> Core[CommandT, TopicsT]:
        """Return a new core for a partition."""

    @abstractmethod
    def _topics(self) -> TopicsT:
        """Return how the cores see the topics now."""

    @abstractmethod
    def _check(self, key: str) -> None:
        """Refuse what can be no id."""

    def _image_topics(self) -> ImageTopics:
        return ImageTopics(self._image)

    def topic_name(self, topic_id: bytes) -> str | None:
        """Return the name of a topic; None if nobody here has heard of it."""
        topic = self._newest_image().topics.get(topic_id)
        return None if topic is None else topic.name

    def on_term(self, partition: PartitionRoles) -> None:
        """Take note that this broker's term as a partition's leader begins or ends; returns at once."""
        self._shards.on_term(partition)

    def on_metadata(self, image: MetadataImage, records: Sequence[MetadataRecord] | None) -> None:
        """Tell the shards of topics that came, went or grew; returns at once."""
        before, self._image = self._image, image
        if topics_changed(before, image, records):
            self._shards.topics_changed()

    def shards(self) -> list[tuple[int, Shard[CommandT, TopicsT]]]:
        """Return (partition, shard) of all that this broker leads, by partition."""
        return self._shards.shards()

    def awaited(self) -> list[int]:
        """Return the partitions that this broker leads by the metadata, and has no shard of yet."""
        topic = self._newest_image().topic(self.TOPIC)
        if topic is None:
            return []
        return [
            part.partition
            for part in topic.partitions
            if part.leader == self._node_id and self._shards.find(part.partition) is None
        ]

    def about_to_be_loaded(self, partition: int) -> CoordinatorLoadInProgress:
        """Return the refusal of a broker that has only just heard of its leadership."""
        return CoordinatorLoadInProgress(f"{self.TOPIC}-{partition} is about to be loaded; try again")

    def find(self, key: str) -> Coordination:
        """Return who coordinates an id, by the metadata.

        Raises:
            InvalidRequestError: nothing can have this id (InvalidGroupId where it is a group's).
            CoordinatorNotAvailable: nobody does at the moment.
        """
        self._check(key)
        image = self._newest_image()
        topic = image.topic(self.TOPIC)
        if topic is None:
            raise CoordinatorNotAvailable(f"{self.TOPIC} is not there yet; it is made for the first {self.WHAT}")
        partition = partition_for(key, len(topic.partitions))
        leader = topic.partitions[partition].leader
        broker = image.brokers.get(leader)
        if broker is None:
            raise CoordinatorNotAvailable(f"{self.TOPIC}-{partition} has no leader at the moment; try again")
        return Coordination(partition, broker)

    def named(self, key: str) -> Coordination:
        """Return who coordinates an id, to be told to a client.

        Raises:
            InvalidRequestError, CoordinatorNotAvailable: as `find`; the latter also where it is this broker, which has
                no lease: cut off from the controllers it would not know that there is another one by now.
        """
        found = self.find(key)
        if found.broker.broker_id == self._node_id and not self._lease.valid():
            raise CoordinatorNotAvailable(
                f"broker {self._node_id} led {self.TOPIC}-{found.partition}, and has no lease now; ask another"
            )
        return found

    def shard_of(self, key: str) -> tuple[int, Shard[CommandT, TopicsT]]:
        """Return (partition, shard) of an id that this broker coordinates; the shard may still be loading.

        Raises:
            NotCoordinator: another broker does; names it.
            InvalidRequestError, CoordinatorNotAvailable: as `find`.
            CoordinatorLoadInProgress: this broker is to, and has only just heard so.
        """
        partition, broker = self.find(key)
        shard = self._shards.find(partition)
        if shard is not None:
            return partition, shard
        if broker.broker_id != self._node_id:
            raise NotCoordinator(
                f"{self.WHAT} {key!r} is coordinated by broker {broker.broker_id} at {broker.host}:{broker.port}, "
                f"which leads {self.TOPIC}-{partition}"
            )
        raise self.about_to_be_loaded(partition)

    def close(self) -> None:
        """End all shards; who waits hears of it."""
        self._shards.close()
