"""What Kafka clients send: requests in every version, and record batches."""

from __future__ import annotations

import struct
from typing import Final

import google_crc32c
import pyarrow as pa

from broker.kafka import messages
from broker.kafka.listener import HEAD_BYTES, body_at
from broker.kafka.record_batches import from_kafka, to_kafka
from raftlog.errors import CorruptRecordError, InvalidRequestError
from raftlog.format import Codec, Columns, InflateLimits, encode_batch, validate_produced
from raftlog.format.columns import HEADERS_TYPE
from tests.fuzz.choices import Choices, mutate
from tests.fuzz.oracle import require

_LIMITS: Final = InflateLimits(max_bytes=4 << 20)


def request_target(data: bytes) -> None:
    """A request is refused, or comes back as it is when it is encoded and decoded again."""
    choices = Choices(data)
    request = list(messages.REQUESTS.values())[choices.below(len(messages.REQUESTS))]
    version = request.first + choices.below(request.last - request.first + 1)
    flexible = request.is_flexible(version)
    frame = struct.pack(">hhih", request.api_key, version, 1, 1) + b"c" + (b"\0" if flexible else b"") + choices.rest()
    try:
        decoded = request.decode(memoryview(frame), version, body_at(frame, flexible=flexible))
    except InvalidRequestError as error:
        require(len(str(error)) > 20, "a refusal without a reason")
        return
    require(len(frame) >= HEAD_BYTES, "a body without a head")
    again = b"".join(request.encode(decoded, version))
    require(request.decode(memoryview(again), version) == decoded, "another request than was decoded")


def batch_target(data: bytes) -> None:
    """A batch is refused, or it is valid in format 1 and comes back with the same records."""
    choices = Choices(data)
    codec = list(Codec)[choices.below(len(Codec))]
    count = 1 + choices.below(4)
    columns = Columns(
        value=pa.array([None if choices.one_in(4) else b"value" * choices.below(5) for _ in range(count)], pa.binary()),
        key=pa.array([None if choices.one_in(4) else b"key" for _ in range(count)], pa.binary()),
        timestamp_ms=pa.array([1_000 + choices.below(9) for _ in range(count)], pa.int64()),
        headers=pa.array([[("h", b"1"), ("h", None)] if choices.one_in(2) else None] * count, HEADERS_TYPE),
    )
    (sent,) = to_kafka(encode_batch(columns, 1_000, codec=codec, producer_id=5, producer_epoch=0, base_sequence=7))
    sent = mutate(sent, choices)
    if len(sent) > 61 and not choices.one_in(4):  # what a hostile producer sends has the right length and checksum
        whole = bytearray(sent)
        struct.pack_into(">i", whole, 8, len(whole) - 12)
        struct.pack_into(">I", whole, 17, google_crc32c.value(bytes(whole[21:])))
        sent = bytes(whole)
    try:
        batch = from_kafka(sent, _LIMITS)
        validate_produced(batch)
    except CorruptRecordError as error:
        require(len(str(error)) > 20, "a refusal without a reason")
        return
    (returned,) = to_kafka(batch)
    require(from_kafka(returned) == batch, "another batch than was taken")
