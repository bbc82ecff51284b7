"""The metadata image as the coordinator of groups sees it (`broker.groups.topics.TopicsView`)."""

from __future__ import annotations

from collections.abc import Sequence

from broker.groups.topics import Topic
from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.image import MetadataImage, TopicImage


class ImageTopics:
    """The topics of one image: two look-ups, nothing is copied."""

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
    """Whether topics came, went or grew between two images: what groups have to know of. None: anything may have."""
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
