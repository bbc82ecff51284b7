"""The next proposals of the active controller, from the image and the brokers' reports; pure.

`scan` looks at all partitions. It needs nothing but an image, so the caller may run it in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from raftlog.v1.records_pb2 import MetadataRecord, PartitionRef
from raftmeta.decide import MAX_PARTITIONS_PER_COMMAND
from raftmeta.elections import not_preferred
from raftmeta.image import MetadataImage

PARTITIONS_PER_COMMAND: Final = 100
"""Fewer than a command may have, because its decision must not block the event loop."""
assert PARTITIONS_PER_COMMAND <= MAX_PARTITIONS_PER_COMMAND

BROKER_KINDS: Final = frozenset({"broker", "remove_broker"})
WATCHED_KINDS: Final = BROKER_KINDS | {"config", "partition", "remove_topic"}
"""Kinds of records that may need an action of the controller."""

PartitionKey = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class Revoked:
    """A leadership that was revoked from a live broker, which has resigned once it has applied `at_offset`."""

    broker_id: int
    at_offset: int


@dataclass(slots=True)
class BrokerReport:
    """A broker's newest heartbeat, and the last answer to it."""

    broker_epoch: int
    applied_offset: int = -1
    wants_shutdown: bool = False
    lease_released: bool = False
    heard_ms: float = float("-inf")
    catch_up_to: int = -1
    """The metadata offset that a fenced broker must apply before it may serve."""
    stands_since_ms: float = float("inf")
    """The time since which it is behind and applies nothing."""

    def applied(self, applied_offset: int, metadata_offset: int, now_ms: float) -> None:
        """Note a heartbeat; `metadata_offset` is the committed offset at its arrival."""
        if applied_offset > self.applied_offset:
            self.applied_offset = applied_offset
            self.stands_since_ms = float("inf")
        if self.applied_offset >= metadata_offset:
            self.stands_since_ms = float("inf")
        elif self.stands_since_ms == float("inf"):
            self.stands_since_ms = now_ms


def revoked_in(image: MetadataImage) -> dict[PartitionKey, Revoked]:
    """Return every partition whose leadership was revoked and not handed over yet."""
    return {
        (topic.topic_id, partition.partition): Revoked(partition.revoked_leader, partition.revoked_at_offset)
        for topic in image.topics.values()
        for partition in topic.partitions
        if partition.revoked_leader is not None
    }


def follow_revoked(revoked: dict[PartitionKey, Revoked], records: Iterable[MetadataRecord]) -> None:
    """Bring `revoked` up to date with the records of a change."""
    for record in records:
        match record.WhichOneof("record"):
            case "partition":
                partition = record.partition
                key = (partition.topic_id, partition.partition)
                if partition.HasField("revoked_leader"):
                    revoked[key] = Revoked(partition.revoked_leader, partition.revoked_at_offset)
                else:
                    revoked.pop(key, None)
            case "remove_topic":
                for key in [key for key in revoked if key[0] == record.remove_topic.topic_id]:
                    del revoked[key]
            case _:
                pass


@dataclass(slots=True)
class Unsettled:
    """The topics to check for partitions that need another ISR or leader, or all topics."""

    everything: bool = True
    topic_ids: set[bytes] = field(default_factory=set)

    def note(self, image: MetadataImage, records: Iterable[MetadataRecord]) -> None:
        """Follow a change: of a broker, of configs, or of a partition while some broker is not up or drained."""
        for record in records:
            match record.WhichOneof("record"):
                case "broker" | "remove_broker" | "config":
                    self.everything = True
                case "partition" if (
                    record.partition.offline_replicas
                    or record.partition.lost_replicas
                    or not all(broker.takes_leaderships for broker in image.brokers.values())
                ):
                    self.topic_ids.add(record.partition.topic_id)
                case _:
                    pass

    def take(self) -> Unsettled:
        """Return the topics to check, and begin anew."""
        taken = Unsettled(self.everything, self.topic_ids)
        self.everything, self.topic_ids = False, set()
        return taken

    def __bool__(self) -> bool:
        return self.everything or bool(self.topic_ids)


def let_go(
    image: MetadataImage, revoked: Mapping[PartitionKey, Revoked], reports: Mapping[int, BrokerReport]
) -> list[PartitionKey]:
    """Return the revoked partitions whose former leader has resigned: it applied the revocation, or cannot lead."""
    free_up_to: dict[int, float] = {}
    for broker_id in {each.broker_id for each in revoked.values()}:
        broker = image.brokers.get(broker_id)
        report = reports.get(broker_id)
        if broker is None or broker.fenced:
            free_up_to[broker_id] = float("inf")
        else:
            # What was revoked before it registered belonged to another process.
            free_up_to[broker_id] = broker.broker_epoch - 1
            if report is not None and report.broker_epoch == broker.broker_epoch:
                free_up_to[broker_id] = max(report.applied_offset, free_up_to[broker_id])
    return sorted(key for key, each in revoked.items() if each.at_offset <= free_up_to[each.broker_id])


def to_unfence(
    image: MetadataImage, reports: Mapping[int, BrokerReport], settled: Iterable[int]
) -> list[tuple[int, int]]:
    """Return (broker id, broker epoch) of fenced brokers that may serve again.

    They have applied their own registration, and what was committed at their first heartbeat or when they were fenced
    for standing still (fixed offsets: one that moved on with a busy log would never be reached, KAFKA-13959), do not
    want to go, and are in `settled`: live, and none of their partitions waits for the consequences of an unclean stop.
    """
    ready = []
    for broker_id in settled:
        broker = image.brokers.get(broker_id)
        report = reports.get(broker_id)
        if broker is None or report is None or not broker.fenced or broker.in_controlled_shutdown:
            continue
        if report.wants_shutdown or report.broker_epoch != broker.broker_epoch:
            continue
        if report.applied_offset >= max(broker.broker_epoch, report.catch_up_to):
            ready.append((broker_id, broker.broker_epoch))
    return sorted(ready)


def standing_still(
    image: MetadataImage, reports: Mapping[int, BrokerReport], now_ms: float, *, patience_ms: float
) -> list[tuple[int, int]]:
    """Return (broker id, broker epoch) of unfenced brokers that are behind and have applied nothing for a while.

    Their heartbeats arrive but the metadata does not reach them, so they would not learn of partitions given to them.
    """
    return sorted(
        (broker_id, report.broker_epoch)
        for broker_id, report in reports.items()
        if now_ms - report.stands_since_ms >= patience_ms
        and (broker := image.brokers.get(broker_id)) is not None
        and broker.broker_epoch == report.broker_epoch
        and not broker.fenced
    )


def to_begin_shutdown(image: MetadataImage, reports: Mapping[int, BrokerReport]) -> list[tuple[int, int]]:
    """Return (broker id, broker epoch) of brokers that ask to shut down and are not marked so yet."""
    return sorted(
        (broker_id, broker.broker_epoch)
        for broker_id, broker in image.brokers.items()
        if not broker.fenced
        and not broker.in_controlled_shutdown
        and (report := reports.get(broker_id)) is not None
        and report.broker_epoch == broker.broker_epoch
        and report.wants_shutdown
    )


def may_shut_down(
    image: MetadataImage, broker_id: int, revoked: Mapping[PartitionKey, Revoked], *, settled: bool
) -> bool:
    """Whether other brokers have taken over every leadership that they can.

    `settled`: no partition needs to be settled after a broker's change.
    """
    broker = image.brokers.get(broker_id)
    if broker is None or broker.fenced:
        return True
    if not broker.in_controlled_shutdown or not settled:
        return False
    return not any(each.broker_id == broker_id for each in revoked.values())


def imbalanced(image: MetadataImage, percentage: float) -> list[PartitionKey]:
    """Return the partitions to move to their preferred replica, of brokers that lead too few of those preferring them.

    A broker counts when more than `percentage` of the partitions that prefer it are led by others.
    """
    preferring: dict[int, int] = {}
    elsewhere: dict[int, list[PartitionKey]] = {}
    for topic in image.topics.values():
        for partition in topic.partitions:
            preferred = partition.replicas[0]
            preferring[preferred] = preferring.get(preferred, 0) + 1
    for reference in not_preferred(image):
        preferred = image.topics[reference.topic_id].partitions[reference.partition].replicas[0]
        elsewhere.setdefault(preferred, []).append((reference.topic_id, reference.partition))
    return sorted(
        key
        for broker_id, keys in elsewhere.items()
        if len(keys) * 100 > percentage * preferring[broker_id]
        for key in keys
    )


def chunks(keys: Sequence[PartitionKey]) -> Iterator[list[PartitionRef]]:
    """Yield the partitions in pieces for one command each."""
    for start in range(0, len(keys), PARTITIONS_PER_COMMAND):
        yield [
            PartitionRef(topic_id=topic_id, partition=partition)
            for topic_id, partition in keys[start : start + PARTITIONS_PER_COMMAND]
        ]
