"""What can be committed at all: seen here, since one commit that cannot be sent fails all that go with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from raftlog.errors import InvalidRequestError, OffsetMetadataTooLarge
from raftlog.types import OffsetAndMetadata, TopicPartition

MAX_METADATA_BYTES: Final = 128 * 1024
"""Fits in one request, whatever else there is to one; servers allow a few thousand (offset.metadata.max.bytes)."""
_MOST: Final = {"partition": (1 << 31) - 1, "offset": (1 << 63) - 1, "leader epoch": (1 << 31) - 1}


def checked(offsets: Mapping[TopicPartition, int | OffsetAndMetadata]) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return offsets that can be committed, as far as that can be seen here.

    Raises:
        InvalidRequestError: not a partition, or a value that is no offset, epoch or text. OffsetMetadataTooLarge.
    """
    if not isinstance(offsets, Mapping):
        raise InvalidRequestError(
            f"offsets are a mapping, as {{TopicPartition('orders', 0): 5}} is one, not {offsets!r}"
        )
    found: dict[TopicPartition, OffsetAndMetadata] = {}
    for given, value in offsets.items():
        part = as_partition(given)
        wanted = value if isinstance(value, OffsetAndMetadata) else OffsetAndMetadata(value)
        if not _fits("offset", wanted.offset, 0):
            raise InvalidRequestError(
                f"{part} has no offset {wanted.offset!r}: it takes a number from 0, or OffsetAndMetadata"
            )
        if not _fits("leader epoch", wanted.leader_epoch, -1):
            raise InvalidRequestError(f"{part}: {wanted.leader_epoch!r} is no leader epoch; -1: not known")
        if not isinstance(wanted.metadata, str):
            raise InvalidRequestError(f"{part}: metadata is text, not {wanted.metadata!r}")
        try:
            size = len(wanted.metadata.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"{part}: metadata cannot be written as UTF-8: {error}") from None
        if size > MAX_METADATA_BYTES:
            raise OffsetMetadataTooLarge(f"{part}: metadata has {size} bytes, no server takes more than a few thousand")
        found[part] = wanted
    return found


def as_partition(given: object) -> TopicPartition:
    """Return what was given as a partition.

    Raises:
        InvalidRequestError: it is none.
    """
    if isinstance(given, tuple) and len(given) == 2:
        topic, partition = given
        if isinstance(topic, str) and _fits("partition", partition, 0):
            return TopicPartition(topic, partition)
    raise InvalidRequestError(f"{given!r} is not a partition, as TopicPartition('orders', 0) is one")


def _fits(what: str, value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST[what]
