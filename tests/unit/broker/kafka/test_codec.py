"""Kafka's messages, against those of another implementation, and against bytes that are no messages."""

from __future__ import annotations

import random
import struct
from typing import Any

import kafka.protocol.admin
import kafka.protocol.consumer
import kafka.protocol.metadata
import kafka.protocol.producer
import kafka.protocol.sasl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.kafka import messages
from broker.kafka.codec import (
    MAX_ELEMENTS,
    MAX_TAGGED_FIELDS,
    MAX_WITH_REPLICAS,
    LargeMessage,
    Message,
    definitions,
    varint,
)
from broker.kafka.messages import REQUESTS, RESPONSES
from raftlog.errors import InvalidRequestError

THEIRS: dict[str, Any] = {
    name: each
    for module in (
        kafka.protocol.admin,
        kafka.protocol.consumer,
        kafka.protocol.metadata,
        kafka.protocol.producer,
        kafka.protocol.sasl,
    )
    for name, each in vars(module).items()
}
LACKING = ("ConsumerGroup",)
"""Messages that the other implementation does not have; librdkafka and Java's clients judge them."""
ALL = [*REQUESTS.values(), *RESPONSES.values()]
EACH = [
    pytest.param(message, version, id=f"{message.name}-{version}")
    for message in ALL
    for version in range(message.first, message.last + 1)
]


def some(fields: list[Any], version: int, draw: random.Random) -> dict[str, Any]:
    """Return a message with random contents."""
    return {each.name: some_of(each, version, draw) for each in fields if each.first <= version <= each.last}


def some_of(each: Any, version: int, draw: random.Random) -> Any:
    if version >= each.null_from and draw.random() < 0.3:
        return None
    if each.is_array:
        return [one(each, version, draw) for _ in range(draw.randrange(3))]
    return one(each, version, draw)


def one(each: Any, version: int, draw: random.Random) -> Any:
    match each.kind:
        case "struct":
            return some(each.fields, version, draw)
        case "string":
            return draw.choice(["", "a", "topic-é"])
        case "bytes" | "records":
            return draw.choice([b"", b"abc"])
        case "uuid":
            return draw.randbytes(16)
        case "bool":
            return draw.random() < 0.5
        case "float64":
            return draw.choice([0.0, -1.5, 1e300])
        case "uint16":
            return draw.choice([0, 1, 65_535])
        case number:
            largest = (1 << {"int8": 7, "int16": 15, "int32": 31, "int64": 63}[number]) - 1
            return draw.choice([0, 1, -1, largest, -largest - 1])


@pytest.mark.parametrize(("message", "version"), EACH)
def test_another_implementation_reads_and_writes_the_same_bytes(message: Message, version: int) -> None:
    draw = random.Random(f"{message.name} {version}")
    for _ in range(8):
        encoded = b"".join(message.encode(some(message.fields, version, draw), version))
        decoded = message.decode(memoryview(encoded), version)
        assert b"".join(message.encode(decoded, version)) == encoded
        if message.name == "ApiVersionsResponse" or message.name.startswith(LACKING):  # they guess the former's version
            continue
        theirs = THEIRS[message.name].decode(encoded, version=version)
        theirs._header = None  # its encoder asks for the attribute
        assert bytes(theirs.encode(version=version)) == encoded


def test_every_request_has_a_response_of_the_same_versions() -> None:
    for key, request in REQUESTS.items():
        response = RESPONSES[key]
        assert (request.first, request.last) == (response.first, response.last)
        assert request.flexible_from == response.flexible_from


def test_produce_is_advertised_from_0() -> None:
    """Else librdkafka drops compression silently (KAFKA-18659)."""
    assert messages.ADVERTISED_FROM == {messages.PRODUCE: 0}


@pytest.mark.parametrize(
    "table",
    ["Fetch 1 4-5", "XRequest 1 0-1 flexible 1\n    name: text", "XRequest 1 0-1 flexible 1\n        name: string"],
)
def test_a_table_of_another_form_is_refused(table: str) -> None:
    with pytest.raises(ValueError, match=r"line|type|indented|another form"):
        definitions(table)


METADATA = REQUESTS[messages.METADATA]


def test_lengths_are_checked_against_the_bytes_that_are_left() -> None:
    for claimed in (1 << 30, 5, -2):
        with pytest.raises(InvalidRequestError, match="claims"):
            METADATA.decode(memoryview(struct.pack(">i", claimed)), 1)
    with pytest.raises(InvalidRequestError, match="claims"):
        METADATA.decode(memoryview(struct.pack(">ih", 1, 30_000)), 1)
    with pytest.raises(InvalidRequestError, match="varint"):
        METADATA.decode(memoryview(b"\xff" * 8), 12)


def test_a_message_has_a_bounded_number_of_elements() -> None:
    topics = struct.pack(">i", MAX_ELEMENTS + 1) + b"\0\0" * (MAX_ELEMENTS + 1)
    with pytest.raises(InvalidRequestError, match="split it"):
        METADATA.decode(memoryview(topics), 1)


def test_only_requests_with_lists_of_replicas_have_more_elements() -> None:
    more = {messages.CREATE_TOPICS, messages.CREATE_PARTITIONS, messages.ALTER_PARTITION_REASSIGNMENTS}
    assert {key for key, each in REQUESTS.items() if each.max_elements > MAX_ELEMENTS} == more
    message = REQUESTS[messages.CREATE_PARTITIONS]
    count = MAX_WITH_REPLICAS
    for claimed in (count, count + 1):
        topics = struct.pack(">i", claimed) + (b"\0\0" + struct.pack(">ii", 1, -1)) * claimed + bytes(5)
        if claimed == count:
            assert len(message.decode(memoryview(topics), 0)["topics"]) == count
        else:
            with pytest.raises(InvalidRequestError, match="100000 array elements"):
                message.decode(memoryview(topics), 0)


def test_a_long_array_in_a_tagged_field_is_as_large_as_any_other() -> None:
    (message,) = definitions("ManyRequest 0 0-0 flexible 0\n    many: []int32 0+ tag0\n").values()
    encoded = b"".join(message.encode({"many": list(range(20))}, 0))
    with pytest.raises(LargeMessage):
        message.decode(memoryview(encoded), 0, most=10)
    assert message.decode(memoryview(encoded), 0) == {"many": list(range(20))}


@pytest.mark.parametrize("message", [each for each in REQUESTS.values() if each.is_flexible(each.last)])
def test_a_structure_has_a_bounded_number_of_tagged_fields(message: Message) -> None:
    """A client without a login could make the broker skip thousands of empty ones in each request."""
    untagged = [each for each in message.fields if each.tag is None]
    encoded = b"".join(message.encode(some(untagged, message.last, random.Random(message.name)), message.last))
    many = MAX_TAGGED_FIELDS + 1
    for count in (MAX_TAGGED_FIELDS, many):
        tagged = encoded[:-1] + varint(count) + (varint(200) + varint(0)) * count
        if count < many:
            message.decode(memoryview(tagged), message.last)
        else:
            with pytest.raises(InvalidRequestError, match="17 tagged fields"):
                message.decode(memoryview(tagged), message.last)


def test_unknown_tagged_fields_are_skipped() -> None:
    encoded = b"".join(METADATA.encode({"topics": None}, 12))
    tagged = encoded[:-1] + b"\x02" + varint(7) + varint(3) + b"abc" + varint(200) + varint(0)
    assert METADATA.decode(memoryview(tagged), 12) == METADATA.decode(memoryview(encoded), 12)


def test_bytes_after_a_message_are_ignored() -> None:
    """librdkafka sends some after a request for all topics."""
    encoded = b"".join(METADATA.encode({"topics": None}, 12)) + b"\1\0\0"
    assert METADATA.decode(memoryview(encoded), 12)["topics"] is None


@given(st.sampled_from([*REQUESTS.values()]), st.data())
def test_any_bytes_decode_or_are_refused(message: Message, data: Any) -> None:
    version = data.draw(st.integers(message.first, message.last))
    try:
        decoded = message.decode(memoryview(data.draw(st.binary(max_size=200))), version)
    except InvalidRequestError:
        return
    message.encode(decoded, version)
