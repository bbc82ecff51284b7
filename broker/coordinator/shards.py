"""The coordinators of one internal topic on this broker: a shard for each partition that it leads.

An id belongs to partition `hash(id) % partitions` of the topic, as in Kafka; the partition's leader coordinates it.
`groups/coordinators.py` and `transactions/coordinators.py` define topic, ids and core. `ImageTopics` is the metadata
image as coordinators of groups see it (`broker.coordinator.groups.topics.TopicsView`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import ClassVar, Final, Generic, NamedTuple, TypeVar

from broker.clock import Clock
from broker.coordinator.core import Core
from broker.coordinator.groups.topics import Topic
from broker.coordinator.shard import Shard
from broker.coordinator.user_bound import UserBound
from broker.net.interceptors import Rarely
from broker.partition.partition import Partition
from broker.server.lease import Lease
from raftlog.errors import CoordinatorLoadInProgress, CoordinatorNotAvailable, NotCoordinator
from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.image import BrokerImage, MetadataImage, TopicImage


class ImageTopics:
    """The topics of one image, without copies."""

    __slots__ = ("_image",)

    def __init__(self, image: MetadataImage) -> None:
        self._image = image

    def by_name(self, name: str) -> Topic | None:
        """Return the topic of that name."""
        return _seen(self._image.topic(name))

    def by_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic of that id."""
        return _seen(self._image.topics.get(topic_id))


def _seen(topic: TopicImage | None) -> Topic | None:
    return None if topic is None else Topic(topic.topic_id, topic.name, len(topic.partitions))


def topics_changed(before: MetadataImage, image: MetadataImage, records: Sequence[MetadataRecord] | None) -> bool:
    """Whether topics were created, deleted or extended between two images, which concerns groups. None: unknown."""
    if records is None:
        return True
    for record in records:
        match record.WhichOneof("record"):
            case "topic" | "remove_topic":
                return True
            case "partition":
                key = record.partition.topic_id, record.partition.partition
                if before.partition(*key) is None:
                    return True
            case _:
                pass
    return False


logger = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
TopicsT = TypeVar("TopicsT")


class Shards(Generic[CommandT, TopicsT]):
    """Makes a shard when a term as leader begins, and ends it with the term. `on_term` is the registry's hook."""

    def __init__(
        self,
        topic: str,
        make_core: Callable[[int], Core[CommandT, TopicsT]],
        topics: Callable[[], TopicsT],
        *,
        executor: Executor,
        clock: Clock,
        lease: Lease,
    ) -> None:
        self.topic = topic
        self._make_core = make_core
        self._topics = topics
        self._executor = executor
        self._clock = clock
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        self._shards: dict[int, Shard[CommandT, TopicsT]] = {}

    def find(self, partition: int) -> Shard[CommandT, TopicsT] | None:
        """Return the shard of a partition; None: this broker does not lead it."""
        return self._shards.get(partition)

    def shards(self) -> list[tuple[int, Shard[CommandT, TopicsT]]]:
        """Return (partition, shard) of all shards, by partition."""
        return sorted(self._shards.items())

    def on_term(self, partition: Partition) -> None:
        """Note that this broker's term as leader of a partition, of any topic, began or ended; returns at once.

        The shard changes in the next round of the event loop, because the partition is still being changed.
        """
        if partition.log.topic == self.topic:
            self._loop.call_soon(self._take, partition)

    def _take(self, partition: Partition) -> None:
        number = partition.log.partition
        shard = self._shards.get(number)
        if shard is not None and shard.partition is partition and shard.leader_epoch == partition.leader_epoch:
            if partition.leads:
                return
        elif shard is not None and shard.partition is not partition and not partition.leads:
            return  # the end of a partition that another one has followed already
        if shard is not None:
            del self._shards[number]
            shard.end()
        if partition.leads:
            begun = Shard(
                partition,
                lambda: self._make_core(number),
                self._topics,
                executor=self._executor,
                clock=self._clock,
                lease=self._lease,
            )
            self._shards[number] = begun
            begun.begin()

    def topics_changed(self) -> None:
        """Have every coordinator look at the cluster's topics again."""
        for shard in self._shards.values():
            shard.topics_changed()

    def close(self) -> None:
        """End all of them."""
        shards, self._shards = self._shards, {}
        for shard in shards.values():
            shard.end()


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
    """The place where an id is coordinated."""

    partition: int
    broker: BrokerImage


class Coordinators(ABC, Generic[CommandT, TopicsT]):
    """All shards of one internal topic on this broker.

    Wire `on_term` to the registry, and `on_metadata` to the metadata. `TOPIC` is the internal topic's name, `WHAT` what
    an id is of, for people. A user may make `most_of_user` ids; `LIMIT` is the key that says so, `COUNTED` their name.
    """

    TOPIC: ClassVar[str]
    WHAT: ClassVar[str]
    LIMIT: ClassVar[str]
    COUNTED: ClassVar[str]

    def __init__(
        self,
        node_id: int,
        image: Callable[[], MetadataImage],
        *,
        executor: Executor,
        clock: Clock,
        lease: Lease,
        most_of_user: int,
    ) -> None:
        self._node_id = node_id
        self._clock = clock
        self._logged = Rarely()
        self.refused_ids = 0
        """New ids that were refused because their users have made enough."""
        self.bound = UserBound(self.LIMIT, self.COUNTED, most_of_user, self._made_by, self.refused)
        self._newest_image = image
        self._lease = lease
        self._image = image()
        """The image whose topics the shards know."""
        self._shards: Shards[CommandT, TopicsT] = Shards(
            self.TOPIC, self._make_core, self._topics, executor=executor, clock=clock, lease=lease
        )

    @abstractmethod
    def _make_core(self, partition: int) -> Core[CommandT, TopicsT]:
        """Return a new core for a partition."""

    @abstractmethod
    def _topics(self) -> TopicsT:
        """Return the present topics as the cores see them."""

    @abstractmethod
    def _check(self, key: str) -> None:
        """Refuse an invalid id."""

    def _image_topics(self) -> ImageTopics:
        return ImageTopics(self._image)

    def topic_name(self, topic_id: bytes) -> str | None:
        """Return the name of a topic; None if it is unknown here."""
        topic = self._newest_image().topics.get(topic_id)
        return None if topic is None else topic.name

    def on_term(self, partition: Partition) -> None:
        """Take note that this broker's term as a partition's leader begins or ends; returns at once."""
        self._shards.on_term(partition)

    def on_metadata(self, image: MetadataImage, records: Sequence[MetadataRecord] | None) -> None:
        """Tell the shards of created, deleted and extended topics; returns at once."""
        before, self._image = self._image, image
        if topics_changed(before, image, records):
            self._shards.topics_changed()

    def shards(self) -> list[tuple[int, Shard[CommandT, TopicsT]]]:
        """Return (partition, shard) of all shards on this broker, by partition."""
        return self._shards.shards()

    def made(self) -> Counter[str]:
        """Return how many ids each user has made, of those that this broker coordinates."""
        counts: Counter[str] = Counter()
        for _, shard in self.shards():
            if shard.core is not None:
                counts.update(dict(shard.core.made.counts))
        return counts

    def _made_by(self, user: str) -> int:
        cores = (shard.core for _, shard in self.shards())
        return sum(core.made.counts.get(user, 0) for core in cores if core is not None)

    def refused(self, user: str) -> None:
        """Count and log that a user was refused an id."""
        self.refused_ids += 1
        if self._logged.may_log(user, self._clock.monotonic_ms()):
            logger.warning(
                "%s of a user refused", self.COUNTED, extra={"event": "ids_refused", "of": user, "limit": self.LIMIT}
            )

    def awaited(self) -> list[int]:
        """Return the partitions that this broker leads by the metadata, but for which it has no shard yet."""
        topic = self._newest_image().topic(self.TOPIC)
        if topic is None:
            return []
        return [
            part.partition
            for part in topic.partitions
            if part.leader == self._node_id and self._shards.find(part.partition) is None
        ]

    def about_to_be_loaded(self, partition: int) -> CoordinatorLoadInProgress:
        """Return the refusal of a broker that leads the partition but has no shard for it yet."""
        return CoordinatorLoadInProgress(f"{self.TOPIC}-{partition} is about to be loaded; try again")

    def find(self, key: str) -> Coordination:
        """Return the coordinator of an id, by the metadata.

        Raises:
            InvalidRequestError: the id is invalid (InvalidGroupId for a group's).
            CoordinatorNotAvailable: it has no coordinator at the moment.
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
        """Return the coordinator of an id, for a client.

        Raises:
            InvalidRequestError, CoordinatorNotAvailable: as `find`; the latter also if it is this broker and its lease
                has expired: another broker may have taken over without its knowledge.
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
        """End all shards; waiting callers get an error."""
        self._shards.close()
