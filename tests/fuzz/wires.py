"""The hot messages are decoded without the protobuf runtime, which has to agree with every accepted message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final
from unittest import mock

from google.protobuf.message import DecodeError, Message

from raftlog.errors import InvalidRequestError
from raftlog.format import wire
from raftlog.v1 import log_pb2, replication_pb2
from tests.fuzz.choices import Choices, mutate
from tests.fuzz.messages import Known, message_of
from tests.fuzz.oracle import require

_KNOWN: Final = Known(blobs=(bytes(16), b"topic-id-16bytes", b""))
_Parts = Sequence[tuple[Message, bytes]]


def _produce(data: bytes) -> _Parts:
    request = wire.decode_produce(data)
    return [(request.head, b""), *((part.head, bytes(part.records)) for part in request.parts)]


def _fetch(data: bytes) -> _Parts:
    return [(frame.head, bytes(frame.records)) for frame in wire.decode_fetch(data)]


def _replicate(data: bytes) -> _Parts:
    return [(frame.head, bytes(frame.records)) for frame in wire.decode_replicate(data)]


_READERS: Final[tuple[tuple[type[Message], Callable[[bytes], _Parts], str], ...]] = (
    (log_pb2.ProduceRequest, _produce, "partitions"),
    (log_pb2.FetchResponse, _fetch, "frames"),
    (replication_pb2.ReplicateResponse, _replicate, "frames"),
)


def target(data: bytes) -> None:
    """An accepted message is read as the protobuf runtime reads it, and written back as the same message."""
    choices = Choices(data)
    kind, read, repeated = _READERS[choices.below(len(_READERS))]
    if choices.one_in(4):
        message = choices.rest()
    else:
        message = mutate(message_of(kind, choices, _KNOWN).SerializeToString(), choices)
    try:
        with mock.patch.object(wire, "SMALL_BYTES", 0):  # else the runtime reads it, and there is nothing to compare
            parts = read(message)
    except InvalidRequestError as error:
        require(len(str(error)) > 20, f"a refusal gives no reason: {error}")
        return
    try:
        known: Any = kind.FromString(message)
    except DecodeError as error:
        raise AssertionError(f"the message was accepted, but the protobuf runtime refuses it: {error}") from None
    heads = parts[1:] if repeated == "partitions" else parts
    theirs = list(getattr(known, repeated))
    require(len(heads) == len(theirs), f"{len(heads)} parts were decoded, but the protobuf runtime finds {len(theirs)}")
    for (head, records), their in zip(heads, theirs, strict=True):
        require(records == their.records, "other records were decoded than by the protobuf runtime")
        their.ClearField("records")
        ours: Any = type(their).FromString(head.SerializeToString())
        require(
            ours.SerializeToString() == their.SerializeToString(),
            "another head was decoded than by the protobuf runtime",
        )
