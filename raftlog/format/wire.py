"""The hot messages of the wire contract, read and written without copying record batches.

The protobuf runtime copies a `bytes` field twice on each side, and every copy of a large batch touches fresh memory.
Here protobuf reads and writes everything except the payload: `ProducePartition.records`, `FetchFrame.records` and
`ReplicaFrame.records` are cut out of the message as views, or put into it with one join. The bytes on the wire are
plain protobuf, so a client with only generated code works as well (tests compare both with the runtime). Cutting is
Python code, so small messages are left to the runtime: there the copies cost less than the cut.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from raftlog.errors import InvalidRequestError
from raftlog.format.header import Buffer
from raftlog.v1 import log_pb2, replication_pb2

MAX_PARTS: Final = 10_000
"""The most partitions in one message; this limits the memory that a small message can make a reader use."""

MAX_REQUESTS: Final = 1_000
"""The most produce requests in one message."""

MAX_PRODUCERS: Final = 100
"""The most producers that a client has on one `Produce` call."""

STEP_PARTS: Final = 256
"""The parts of a request that are decoded in one step, 5 us each."""

SMALL_BYTES: Final = 16 << 10
"""A produce request or a frame of replicas below this size is read by the protobuf runtime, payload and all."""

assert SMALL_BYTES <= 2 * MAX_PARTS, "a part takes two bytes at least, so a small message has no more than MAX_PARTS"

MANY_REQUESTS: Final = ("raftlog-produce", "many-requests")
"""In the metadata of a `Produce` call: the client may send several requests in one message (`ProduceRequest.more`). In
the broker's initial metadata: the broker accepts such messages, and may send several responses in one."""

_NESTED: Final = "a request within `more` has `more` of its own"
_MANY_PARTS: Final = f"at most {MAX_PARTS} parts fit one message"

_VARINT: Final = 0
_FIXED64: Final = 1
LENGTH_DELIMITED: Final = 2
_FIXED32: Final = 5

_PARTITIONS: Final = log_pb2.ProduceRequest.PARTITIONS_FIELD_NUMBER
_MORE: Final = log_pb2.ProduceRequest.MORE_FIELD_NUMBER
_PRODUCE_RECORDS: Final = log_pb2.ProducePartition.RECORDS_FIELD_NUMBER
_FRAMES: Final = log_pb2.FetchResponse.FRAMES_FIELD_NUMBER
_FETCH_RECORDS: Final = log_pb2.FetchFrame.RECORDS_FIELD_NUMBER
_REPLICA_FRAMES: Final = replication_pb2.ReplicateResponse.FRAMES_FIELD_NUMBER
_REPLICA_RECORDS: Final = replication_pb2.ReplicaFrame.RECORDS_FIELD_NUMBER


class ProducePart(NamedTuple):
    """One partition's batch: `head` is everything except the payload."""

    head: log_pb2.ProducePartition
    records: Buffer


class Produce(NamedTuple):
    """A `ProduceRequest`: `head` has no partitions and no further requests."""

    head: log_pb2.ProduceRequest
    parts: Sequence[ProducePart]
    more: Sequence[Produce] = ()
    """Further requests in the same message, without `more` of their own."""


Decoding = Generator[None, None, Produce]
"""A message that is decoded step by step, and then returned."""


class Frame(NamedTuple):
    """A `FetchFrame`: `head` is everything except the payload."""

    head: log_pb2.FetchFrame
    records: Buffer


class ReplicaFrame(NamedTuple):
    """A `replication_pb2.ReplicaFrame`: `head` is everything except the payload."""

    head: replication_pb2.ReplicaFrame
    records: Buffer


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: memoryview | bytes, position: int) -> tuple[int, int]:
    """Return a varint, and the position after it. Raises IndexError or ValueError if there is none."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than ten bytes")


def skip(data: memoryview | bytes, wire_type: int, position: int) -> int:
    """Return the position after a field that is not length-delimited. Raises as `read_varint`; ValueError: a group."""
    if wire_type == _VARINT:
        return read_varint(data, position)[1]
    if wire_type == _FIXED64:
        return position + 8
    if wire_type == _FIXED32:
        return position + 4
    raise ValueError(f"wire type {wire_type}")


def _cut(data: memoryview, *fields: int) -> tuple[bytes, tuple[list[memoryview], ...]]:
    """Return the message without its length-delimited `fields`, and the contents of each of these."""
    rest: list[memoryview] = []
    found: tuple[list[memoryview], ...] = tuple([] for _ in fields)
    position = 0
    while position < len(data):
        position = _cut_some(data, position, MAX_PARTS + 1, fields, rest, found)
    return b"".join(rest), found


def _cut_some(
    data: memoryview,
    position: int,
    most: int,
    fields: tuple[int, ...],
    rest: list[memoryview],
    found: tuple[list[memoryview], ...],
) -> int:
    """Add to `rest` and `found` what lies from `position` on, up to `most` fields; return the position after it."""
    kept, end = position, len(data)
    while position < end and most:
        most -= 1
        start = position
        tag, position = read_varint(data, position)
        if tag & 7 != LENGTH_DELIMITED:
            position = skip(data, tag & 7, position)
        else:
            length, position = read_varint(data, position)
            if tag >> 3 in fields:
                rest.append(data[kept:start])
                kept = position + length
                found[fields.index(tag >> 3)].append(data[position:kept])
            position += length
        if position > end:
            raise ValueError("a field goes beyond the end of the message")
    if sum(map(len, found)) > MAX_PARTS:
        raise ValueError(_MANY_PARTS)
    rest.append(data[kept:position])
    return position


def _parts(messages: Iterable[memoryview], inner: int) -> list[tuple[bytes, Buffer]]:
    parts: list[tuple[bytes, Buffer]] = []
    for message in messages:
        part, (payloads,) = _cut(message, inner)
        parts.append((part, payloads[-1] if payloads else b""))  # protobuf: the last occurrence of a field counts
    return parts


def _taken_apart(data: bytes, outer: int, inner: int) -> tuple[bytes, list[tuple[bytes, Buffer]]]:
    """Return the message without its parts, and its parts.

    Raises:
        InvalidRequestError: the data is not such a message.
    """
    try:
        head, (messages,) = _cut(memoryview(data), outer)
        return head, _parts(messages, inner)
    except (ValueError, IndexError) as error:
        raise _not_protobuf(error) from None


def _not_protobuf(error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"the message is not protobuf as expected: {error or 'cut short'}")


def _join(head: bytes, outer: int, inner: int, parts: Iterable[tuple[bytes, Buffer]]) -> bytes:
    out: list[Buffer] = [head]
    outer_tag = _varint(outer << 3 | LENGTH_DELIMITED)
    inner_tag = _varint(inner << 3 | LENGTH_DELIMITED)
    for part, payload in parts:
        payload_front = inner_tag + _varint(len(payload)) if len(payload) else b""
        out += (outer_tag, _varint(len(part) + len(payload_front) + len(payload)), part, payload_front, payload)
    return b"".join(out)


def encode_produce(request: Produce) -> bytes:
    """Return the bytes of a `ProduceRequest`."""
    first = _encode_one(request)
    if not request.more:
        return first
    out: list[Buffer] = [first]
    tag = _varint(_MORE << 3 | LENGTH_DELIMITED)
    for each in request.more:
        data = _encode_one(each)
        out += (tag, _varint(len(data)), data)
    return b"".join(out)


def _encode_one(request: Produce) -> bytes:
    return _join(
        request.head.SerializeToString(),
        _PARTITIONS,
        _PRODUCE_RECORDS,
        [(part.head.SerializeToString(), part.records) for part in request.parts],
    )


def decode_produce(data: bytes) -> Produce:
    """Return a `ProduceRequest`; the payloads of a large one are views of `data`.

    Raises:
        InvalidRequestError: the data is not such a message.
    """
    begun = begin_produce(data)
    while not isinstance(begun, Produce):
        try:
            next(begun)
        except StopIteration as end:
            begun = end.value
    return begun


def begin_produce(data: bytes) -> Produce | Decoding:
    """As `decode_produce`, in steps: return what yields after each of them, and the request, if one is not enough."""
    if len(data) < SMALL_BYTES:
        return _decode_small(data)
    steps = _decoding(data)
    try:
        next(steps)
    except StopIteration as end:
        request: Produce = end.value
        return request
    return steps


def _decode_small(data: bytes) -> Produce:
    try:
        message = log_pb2.ProduceRequest.FromString(data)
        if not message.more:
            return _small(message)
        _check_requests(len(message.more))
        more = [_small(each) for each in message.more]
        message.ClearField("more")
        return _small(message)._replace(more=more)
    except DecodeError as error:
        raise _no_request(error) from None
    except (ValueError, IndexError) as error:
        raise _not_protobuf(error) from None


def _decoding(data: bytes) -> Decoding:
    try:
        return (yield from _large(memoryview(data)))
    except DecodeError as error:
        raise _no_request(error) from None
    except (ValueError, IndexError) as error:
        raise _not_protobuf(error) from None


def _no_request(error: DecodeError) -> InvalidRequestError:
    return InvalidRequestError(f"the message is not a ProduceRequest: {error}")


def _small(request: log_pb2.ProduceRequest) -> Produce:
    """Take apart a request that the protobuf runtime has read."""
    if request.more:
        raise ValueError(_NESTED)
    parts = [ProducePart(part, part.records) for part in request.partitions]
    for part, _ in parts:
        part.ClearField("records")
    request.ClearField("partitions")
    return Produce(request, parts)


def _large(data: memoryview, *, most: int = MAX_PARTS, within: bool = False) -> Decoding:
    """Take apart a request of at most `most` parts; `within`: it is one of the further requests of another.

    Yields after each `STEP_PARTS`.
    """
    if within and len(data) < SMALL_BYTES:
        message = log_pb2.ProduceRequest.FromString(bytes(data))
        if len(message.partitions) > most:
            raise ValueError(_MANY_PARTS)
        return _small(message)
    rest: list[memoryview] = []
    found: tuple[list[memoryview], list[memoryview]] = [], []
    messages, further = found
    position = _cut_some(data, 0, STEP_PARTS, (_PARTITIONS, _MORE), rest, found)
    while position < len(data):
        yield
        position = _cut_some(data, position, STEP_PARTS, (_PARTITIONS, _MORE), rest, found)
    if further and within:
        raise ValueError(_NESTED)
    if len(messages) > most:  # before any of them is built
        raise ValueError(_MANY_PARTS)
    parts: list[ProducePart] = []
    for begin in range(0, len(messages), STEP_PARTS):
        if begin:
            yield
        parts += [
            ProducePart(log_pb2.ProducePartition.FromString(part), records)
            for part, records in _parts(messages[begin : begin + STEP_PARTS], _PRODUCE_RECORDS)
        ]
    _check_requests(len(further))
    more: list[Produce] = []
    left, done = most - len(parts), 0
    for each in further:
        if done >= STEP_PARTS:
            done = 0
            yield
        more.append((yield from _large(each, most=left, within=True)))
        left -= len(more[-1].parts)
        done += 1 + len(more[-1].parts)
    return Produce(log_pb2.ProduceRequest.FromString(b"".join(rest)), parts, more)


def _check_requests(further: int) -> None:
    if further >= MAX_REQUESTS:
        raise ValueError(f"at most {MAX_REQUESTS} requests fit one message")


def encode_fetch(frames: Sequence[Frame]) -> bytes:
    """Return the bytes of a `FetchResponse`."""
    return _join(b"", _FRAMES, _FETCH_RECORDS, [(frame.head.SerializeToString(), frame.records) for frame in frames])


def decode_fetch(data: bytes) -> list[Frame]:
    """Return the frames of a `FetchResponse`; their payloads are views of `data`.

    Raises:
        InvalidRequestError: the data is not such a message.
    """
    head, parts = _taken_apart(data, _FRAMES, _FETCH_RECORDS)
    try:
        if head:
            log_pb2.FetchResponse.FromString(head)
        return [Frame(log_pb2.FetchFrame.FromString(part), records) for part, records in parts]
    except DecodeError as error:
        raise InvalidRequestError(f"the message is not a FetchResponse: {error}") from None


def encode_replicate(frames: Sequence[ReplicaFrame]) -> bytes:
    """Return the bytes of a `ReplicateResponse`."""
    parts = [(frame.head.SerializeToString(), frame.records) for frame in frames]
    return _join(b"", _REPLICA_FRAMES, _REPLICA_RECORDS, parts)


def decode_replicate(data: bytes) -> list[ReplicaFrame]:
    """Return the frames of a `ReplicateResponse`; the payloads of a large one are views of `data`.

    Raises:
        InvalidRequestError: the data is not such a message.
    """
    try:
        if len(data) < SMALL_BYTES:
            small = [
                ReplicaFrame(frame, frame.records)
                for frame in replication_pb2.ReplicateResponse.FromString(data).frames
            ]
            for frame, _ in small:
                frame.ClearField("records")
            return small
        head, parts = _taken_apart(data, _REPLICA_FRAMES, _REPLICA_RECORDS)
        if head:
            replication_pb2.ReplicateResponse.FromString(head)
        return [ReplicaFrame(replication_pb2.ReplicaFrame.FromString(part), records) for part, records in parts]
    except DecodeError as error:
        raise InvalidRequestError(f"the message is not a ReplicateResponse: {error}") from None
