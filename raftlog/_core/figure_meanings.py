"""What the figures of clients mean, by name, for the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

MEANINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "assigned-partitions": "Partitions that are read.",
        "batch-size": "Bytes of a batch as it is sent, compressed.",
        "batch-split": "Batches that were halved, because the topic takes none so large.",
        "buffer-available-bytes": "Room in `buffer.memory`.",
        "buffer-total-bytes": "`buffer.memory`.",
        "bufferpool-wait-ratio": "Share of the time in which some thread waits for room in `buffer.memory`.",
        "bufferpool-wait-time-ns": "Nanoseconds that threads have waited for it.",
        "byte": "Bytes of batches, compressed.",
        "bytes-consumed": "Bytes of batches that were fetched, compressed.",
        "commit": "Commits of offsets that were answered.",
        "commit-latency": "Until a commit was answered.",
        "compression-rate": "Size of batches as they are sent, in relation to their records.",
        "connection-count": "Brokers with a stream for records.",
        "failed-commit": "Commits that were refused for some partition, or not answered.",
        "fetch": "Messages with records that brokers have sent.",
        "fetch-size": "Bytes of one of them.",
        "last-poll-seconds-ago": "Since the application has asked for records; -1: never.",
        "outgoing-byte": "Bytes of batches, compressed.",
        "rebalance": "Times that the application was told of partitions that came or went.",
        "record-error": "Records whose delivery has failed for good.",
        "record-queue-time": "From the first record of a batch until it was sent first.",
        "record-retry": "Records that were sent again.",
        "record-send": "Records that were acknowledged.",
        "record-size": "Bytes of a record, uncompressed, with what is counted for it.",
        "records-consumed": "Records that the application was given.",
        "records-lag": "Records from the position to the high watermark, as it was told last.",
        "records-per-request": "Records in a request, or in a message that was fetched.",
        "request": "Requests that were sent.",
        "request-error": "Requests that were not answered.",
        "request-latency": "Until a request was answered.",
        "request-size": "Bytes of batches in a request.",
        "requests-in-flight": "Requests without an answer.",
    }
)
"""Without the suffixes `-rate` (a second), `-total`, `-avg` and `-max`."""


def meaning_of(name: str) -> str:
    """Return what a figure tells.

    Raises:
        KeyError: there is none of that name.
    """
    if name in MEANINGS:
        return MEANINGS[name]
    stem, _, suffix = name.rpartition("-")
    assert suffix in ("rate", "total", "avg", "max"), f"no figure ends so: {name}"
    return MEANINGS[stem]
