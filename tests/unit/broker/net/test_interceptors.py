"""Requests that cannot be parsed, or are too long, against a real server."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import AsyncIterator, Iterable
from contextvars import copy_context
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc import aio

from broker.net.interceptors import (
    CALL_BYTES,
    MAX_FIELDS,
    MAX_OBJECTS,
    MAX_REQUEST_BYTES,
    MalformedRequest,
    RequestBounds,
    Unread,
    _bounded,
    calls_of_request,
)
from raftlog.v1 import admin_pb2, group_pb2, log_pb2, metadata_pb2, records_pb2

UNARY, STREAM = "/test.Service/Unary", "/test.Service/Stream"
MALFORMED = b"\xff" * 5


async def _unary(request: log_pb2.ListOffsetsRequest, context: Any) -> log_pb2.ListOffsetsResponse:
    return log_pb2.ListOffsetsResponse()


async def _stream(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[log_pb2.ListOffsetsResponse]:
    async for _ in requests:
        yield log_pb2.ListOffsetsResponse()


async def statuses(requests: Iterable[tuple[str, bytes]]) -> list[tuple[grpc.StatusCode, str]]:
    """Return the status of each call, with its details; a stream sends one valid request first."""
    server = aio.server(interceptors=[RequestBounds()])
    types: dict[str, Any] = {
        "request_deserializer": log_pb2.ListOffsetsRequest.FromString,
        "response_serializer": log_pb2.ListOffsetsResponse.SerializeToString,
    }
    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(_unary, **types),
        "Stream": grpc.stream_stream_rpc_method_handler(_stream, **types),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            return [await _status(channel, method, request) for method, request in requests]
    finally:
        await server.stop(None)


async def _status(channel: Any, method: str, request: bytes) -> tuple[grpc.StatusCode, str]:
    call: Any
    try:
        if method == UNARY:
            call = channel.unary_unary(method)(request)
            await call
        else:
            call = channel.stream_stream(method)(iter([b"", request]))
            async for _ in call:
                pass
    except aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return await call.code(), await call.details()


@pytest.mark.parametrize("method", [UNARY, STREAM])
async def test_a_malformed_request_is_refused_and_logged_once_without_a_traceback(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        found = await statuses([(method, MALFORMED)] * 5 + [(method, b"")])
    assert [code for code, _ in found] == [grpc.StatusCode.INVALID_ARGUMENT] * 5 + [grpc.StatusCode.OK]
    assert found[0][1].startswith("malformed request: ")
    (line,) = [record for record in caplog.records if record.name != "asyncio"]
    assert (line.levelname, line.__dict__["peer"], line.__dict__["method"]) == ("WARNING", "127.0.0.1", method)
    assert line.exc_info is None


class Message:
    """Stands for bytes, of which none can be followed with a weak reference."""

    def __len__(self) -> int:
        return MAX_REQUEST_BYTES + 1


@pytest.mark.parametrize("most", [MAX_REQUEST_BYTES, None], ids=["too long", "malformed"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_refused_request_is_not_held_until_the_next_garbage_collection(is_stream: bool, most: int | None) -> None:
    def parse(data: Any) -> Any:
        raise DecodeError("malformed")

    refusals: list[object] = []
    message: Any = Message()
    lives = weakref.ref(message)
    gc.disable()
    try:
        try:
            refusals.append(_bounded(parse, most, is_stream=is_stream)(message))
        except MalformedRequest as error:
            refusals.append(error)
        del message
        assert lives() is None
    finally:
        gc.enable()
    assert refusals


@pytest.mark.parametrize("method", [UNARY, STREAM])
async def test_a_request_that_is_too_long_is_refused(method: str) -> None:
    ((code, details),) = await statuses([(method, bytes(MAX_REQUEST_BYTES + 1))])
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"this method takes at most {MAX_REQUEST_BYTES}" in details


@pytest.mark.parametrize("method", [UNARY, STREAM])
async def test_a_request_of_many_empty_elements_is_refused(method: str) -> None:
    many = log_pb2.ListOffsetsRequest(partitions=[log_pb2.ListOffsetsPartition()] * 500_000).SerializeToString()
    assert len(many) <= MAX_REQUEST_BYTES
    ((code, details),) = await statuses([(method, many)])
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"more than {MAX_OBJECTS} elements" in details


NESTED = group_pb2.GroupRequest(
    join=group_pb2.JoinGroup(subscription=group_pb2.Subscription(topics=["t"] * (MAX_OBJECTS + 1)))
)
"""The elements are within the only field of the request."""
FLAGS = b"\x38\x01" * (MAX_FIELDS + 1)
"""A field that no request has, with a number as value."""


def _parser(kind: Any) -> Any:
    """Return the parser of unary requests of a type, which keeps nothing in this context."""
    parse = _bounded(kind.FromString, MAX_REQUEST_BYTES, is_stream=False)
    return lambda data: copy_context().run(parse, data)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (group_pb2.GroupRequest, NESTED.SerializeToString()),
        (
            metadata_pb2.MetadataRequest,
            metadata_pb2.MetadataRequest(topics=["t"] * (MAX_OBJECTS + 1)).SerializeToString(),
        ),
        (log_pb2.ListOffsetsRequest, FLAGS),
    ],
    ids=["nested", "texts", "unknown numbers"],
)
def test_what_would_become_many_objects_is_not_even_parsed(kind: Any, data: bytes) -> None:
    refused = _parser(kind)(data)
    assert isinstance(refused, Unread)
    assert refused.too_long


@pytest.mark.parametrize(
    "request_",
    [
        log_pb2.ListOffsetsRequest(
            partitions=[
                log_pb2.ListOffsetsPartition(topic_id=bytes(16), partition=number, leader_epoch=7, timestamp_ms=1)
                for number in range(1, 10_001)
            ]
        ),
        metadata_pb2.MetadataRequest(topics=[f"topic-{number}" for number in range(10_000)]),
        admin_pb2.AlterClientQuotasRequest(
            alterations=[
                records_pb2.QuotaRecord(
                    entity=records_pb2.QuotaEntity(user=f"user-{number}", client_id=""),
                    key="producer_byte_rate",
                    value=1,
                )
                for number in range(10_000)
            ]
        ),
    ],
    ids=["partitions", "names", "quotas"],
)
def test_a_request_that_names_as_much_as_one_may_is_read(request_: Any) -> None:
    assert _parser(type(request_))(request_.SerializeToString()) == request_


@pytest.mark.parametrize(
    "data", [b"\x0b" * 70_000, b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff" * 9_000, b"\x0a" + b"\xff" * 70_000]
)
def test_a_long_request_that_is_no_message_is_refused(data: bytes) -> None:
    assert isinstance(_parser(log_pb2.ListOffsetsRequest)(data), Unread)


def test_a_long_request_counts_as_many_calls() -> None:
    parse = _bounded(metadata_pb2.MetadataRequest.FromString, MAX_REQUEST_BYTES, is_stream=False)
    counts = []
    for names in (1, 10_000):
        data = metadata_pb2.MetadataRequest(topics=["some-topic"] * names).SerializeToString()
        task = copy_context()
        task.run(parse, data)
        counts.append((task.run(calls_of_request), 1 + len(data) // CALL_BYTES))
    assert counts[0] == (1, 1)
    assert counts[1][0] == counts[1][1] > 20
