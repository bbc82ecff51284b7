"""Batches of a log as Kafka clients get them."""

from __future__ import annotations

from broker.kafka.record_batches import ToKafka
from raftlog.format import Buffer


def to_kafka(batches: Buffer, *, takes_zstd: bool = True, most_bytes: int | None = None) -> list[bytes]:
    """Return whole batches of a log in Kafka's format, by one step of `ToKafka`.

    Raises:
        CorruptRecordError: a batch of the log does not decode.
    """
    return ToKafka(batches, takes_zstd=takes_zstd, most_bytes=most_bytes).step()
