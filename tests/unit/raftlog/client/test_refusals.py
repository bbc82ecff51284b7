"""A refused call carries an `Error` in the details of its status; whatever its text is, it fits into the metadata."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.status_pb2 import Status

from raftlog._client.connections import DETAILS, from_grpc, refusal_of, refuse
from raftlog.errors import AuthenticationFailed, NotLeader, RaftlogError, TokenExpired, TopicAuthorizationFailed
from raftlog.v1 import common_pb2, metadata_pb2

ROOT = Path(__file__).parents[4]
METHOD = "/raftlog.v1.Metadata/Get"


async def refused_call(error: RaftlogError, status: grpc.StatusCode, text: str | None = None) -> grpc.aio.AioRpcError:
    """Return a client's error for a call that a real server refuses."""

    async def handler(request: Any, context: Any) -> Any:
        await refuse(context, status, error, text)

    server = grpc.aio.server()
    calls: dict[str, Any] = {"Get": grpc.unary_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raftlog.v1.Metadata", calls),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                call: Any = channel.unary_unary(METHOD)
                await call(b"", wait_for_ready=True)
        return caught.value
    finally:
        await server.stop(None)


def seen(error: RaftlogError, status: grpc.StatusCode, text: str | None = None) -> grpc.aio.AioRpcError:
    return asyncio.run(refused_call(error, status, text))


def test_text_and_details_arrive() -> None:
    found = seen(TopicAuthorizationFailed("User:a may not READ b"), grpc.StatusCode.PERMISSION_DENIED)
    assert found.details() == "TopicAuthorizationFailed: User:a may not READ b"
    refusal = refusal_of(found.trailing_metadata())
    assert isinstance(refusal, TopicAuthorizationFailed)
    assert str(refusal) == "User:a may not READ b"
    raw = dict(found.trailing_metadata() or ())[DETAILS]
    assert isinstance(raw, bytes)
    assert Status.FromString(raw).code == 7  # as gRPC numbers PERMISSION_DENIED
    wire = common_pb2.Error()
    assert Status.FromString(raw).details[0].Unpack(wire)
    assert wire.code == common_pb2.TOPIC_AUTHORIZATION_FAILED


def test_hints_arrive_too() -> None:
    refusal = refusal_of(seen(NotLeader("moved", 3, 9, "a", 1), grpc.StatusCode.UNAVAILABLE).trailing_metadata())
    assert isinstance(refusal, NotLeader)
    assert (refusal.leader_id, refusal.leader_epoch, refusal.host, refusal.port) == (3, 9, "a", 1)


@pytest.mark.parametrize("text", ["x" * 60_000, "漢" * 20_000, "%" * 20_000, "\x01" * 20_000, "\n" * 20_000])
def test_long_texts_are_cut_to_fit(text: str) -> None:
    found = seen(TopicAuthorizationFailed(text), grpc.StatusCode.PERMISSION_DENIED)
    assert found.code() is grpc.StatusCode.PERMISSION_DENIED
    assert isinstance(refusal_of(found.trailing_metadata()), TopicAuthorizationFailed)


def test_the_sdk_believes_the_details_rather_than_the_text() -> None:
    found = seen(TokenExpired("log in"), grpc.StatusCode.UNAUTHENTICATED, "whatever it says")
    error = from_grpc(found, "a:1")
    assert isinstance(error, AuthenticationFailed)
    assert "requires a login" in str(error), "the error must say that a login is required, as the client has none"
    denied = seen(TopicAuthorizationFailed("no"), grpc.StatusCode.PERMISSION_DENIED, "whatever it says")
    assert isinstance(from_grpc(denied, "a:1"), TopicAuthorizationFailed)


@pytest.mark.parametrize("value", [b"\xff", b"", Status(code=7).SerializeToString()])
def test_details_that_are_none_of_ours_are_nothing(value: bytes) -> None:
    assert refusal_of(((DETAILS, value),)) is None
    assert refusal_of(((DETAILS, "text"), ("other", b"x"))) is None
    assert refusal_of(None) is None
    foreign = Status(code=7)
    foreign.details.add().Pack(metadata_pb2.MetadataRequest())
    assert refusal_of(((DETAILS, foreign.SerializeToString()),)) is None


def aborts(source: str) -> list[int]:
    """Return the lines that end a gRPC call directly."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("abort", "abort_with_status", "set_code", "set_details")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "context"
    ]


def test_no_call_is_refused_with_prose_alone() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for package in ("broker", "raftmeta", "replication", "raftlog")
        for path in (ROOT / package).rglob("*.py")
        if path.parent.name != "v1" and (lines := aborts(path.read_text()))
    }
    assert list(found) == ["raftlog/_client/connections.py"], (
        f"files that abort calls without an Error in the details; use `refuse`: {sorted(found)}"
    )
    assert aborts("async def f(context):\n    await context.abort(1, 'x')\n") == [2]
