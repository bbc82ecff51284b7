"""Requests that cannot be parsed, or are too long, against a real server."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc import aio

from broker.net.interceptors import MAX_REQUEST_BYTES, MalformedRequest, RequestBounds, _bounded
from raftlog.v1 import log_pb2

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
