"""Every method of every service, on a real node over gRPC: every request is answered or refused.

A bug shows as a status or an error code that says so, as a traceback in the log, as silence, or when the requests of a
good client, which come after every input, do not succeed any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message

from broker.net.interceptors import MAX_REQUEST_BYTES
from raftlog.v1 import common_pb2
from tests.fuzz.batches import any_batch, valid_batch
from tests.fuzz.choices import Choices
from tests.fuzz.messages import FILES, Known, encoded, message_of, type_of
from tests.fuzz.oracle import Violation, require
from tests.fuzz.server import ANSWER_S, OTHER_TOPIC, TOPIC, Node, node

LISTEN_S: Final = 0.1
"""How long a stream is listened to that has nothing more to say."""
INTER_NODE: Final = frozenset({"Raft", "Controller", "Replication", "Markers"})
UNPARSED: Final = "deserializ"
_REFUSALS: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.OK,
    }
)  # fmt: skip


@cache
def methods() -> dict[str, MethodDescriptor]:
    """Return every method of the wire contract by its path."""
    found = {}
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                found[f"/{service.full_name}/{method.name}"] = method
    return found


def known_to(server: Node) -> Known:
    """Return what exists on the node."""
    ids = [*server.topic_ids.values(), bytes(16)]
    names = (TOPIC, OTHER_TOPIC, "g", "x", "s", "__consumer_offsets", "__transaction_state", "")
    return Known(
        fields={
            "partition": (0, 1), "broker_id": (1, 2, -1), "node_id": (1, 2), "cluster_id": ("fuzz", ""),
            "leader_id": (1,), "leader_epoch": (-1, 0, 1), "current_leader_epoch": (-1, 0), "group_id": ("g", "h"),
            "transactional_id": ("x", "y", ""), "sink_id": ("s",), "member_epoch": (-1, 0, 1), "timeout_ms": (100, 0),
            "credit_bytes": (1 << 20, 0), "bytes": (1 << 10,), "subscription_id": (1, 2, 3), "voters": (1,),
            "producer_id": (0, 1, 2, 1000), "producer_epoch": (0, 1, 32_767), "min_metadata_offset": (0, 1, 50),
            "partitions": (1, 2, 0), "replication_factor": (1, 0), "offset": (0, 1, -1, -2), "acks": (1, -1, 0),
            "name": (TOPIC, OTHER_TOPIC, "1", "v"), "batch_id": (0, 1, 2), "timestamp_ms": (0, -1, -2),
            "metadata_offset": (0, 1), "since_offset": (0, 1), "sequence": (1, 2), "member_id": ("m", ""),
        },
        texts=names,
        blobs=ids,
        numbers=(0, 1, -1, 2),
    )  # fmt: skip


def unary_target(data: bytes) -> None:
    """A call of a method that has one request and one answer."""
    choices = Choices(data)
    paths = sorted(path for path, m in methods().items() if not m.client_streaming and not m.server_streaming)
    path = choices.pick(paths)
    request = _request(choices, methods()[path])
    server = node()
    with _harmless(server, path):
        call: Any = _channel(server, path).unary_unary(path)
        try:
            answer = call(request, timeout=ANSWER_S)
        except grpc.RpcError as error:
            _check_status(path, error, [request])
        else:
            _check_answer(path, answer)


def stream_target(data: bytes) -> None:
    """Send a few requests on a stream, one message after the other, and return the responses of a short time."""
    choices = Choices(data)
    paths = sorted(path for path, m in methods().items() if m.client_streaming or m.server_streaming)
    path = choices.pick(paths)
    method = methods()[path]
    requests = [_request(choices, method) for _ in range(1 + choices.below(5) if method.client_streaming else 1)]
    server = node()
    with _harmless(server, path):
        channel: Any = _channel(server, path)
        if method.client_streaming:
            call: Any = channel.stream_stream(path)(iter(requests), timeout=ANSWER_S)
        else:
            call = channel.unary_stream(path)(requests[0], timeout=ANSWER_S)
        _listen(path, call, requests)


def _listen(path: str, call: Any, requests: list[bytes]) -> None:
    """Read answers until the stream ends or falls silent."""
    silent = threading.Timer(LISTEN_S, call.cancel)
    silent.start()
    try:
        for number, answer in enumerate(call):
            _check_answer(path, answer)
            if number > 100:
                call.cancel()
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.CANCELLED:
            _check_status(path, error, requests)
    finally:
        silent.cancel()
        silent.join()


def _request(choices: Choices, method: MethodDescriptor) -> bytes:
    if choices.byte() % 16 == 15:
        return choices.blob()
    known = known_to(node())
    batches = (valid_batch(choices), any_batch(choices)) if method.input_type.name == "ProduceRequest" else ()
    if batches:
        known = Known(
            {**known.fields, "records": batches, "topic_id": known.blobs}, known.texts, known.blobs, known.numbers
        )
    message = message_of(type_of(method.input_type), choices, known)
    return encoded(message, choices)


def _channel(server: Node, path: str) -> grpc.Channel:
    return server.nodes if path.split(".")[-1].split("/")[0] in INTER_NODE else server.clients


@contextlib.contextmanager
def _harmless(server: Node, path: str) -> Iterator[None]:
    """Check that the node is what it was, when a request has been answered."""
    server.complaints.take()
    try:
        yield
    except Violation as error:
        for told in server.complaints.take():
            error.add_note(told)
        server.restart()
        raise
    tracebacks = [each for each in server.complaints.take() if UNPARSED not in each]
    if tracebacks:
        server.restart()
        raise Violation(f"{path}: the call left a traceback in the node's log: {tracebacks[0]}")
    trusted = "/raftlog.v1.Controller/" in path  # a peer that may propose may also claim to be another broker
    try:
        server.set_up()
        require(trusted or server.failure is None, f"{path}: the node has stopped: {server.failure}")
    except Exception as error:
        server.restart()
        if not trusted:
            raise Violation(f"{path}: after the call, requests of a well-behaved client fail: {error}") from error
    if server.failure is not None:
        server.restart()


def _check_status(path: str, error: Any, requests: list[bytes]) -> None:
    code, details = error.code(), error.details() or ""
    if code in _REFUSALS:
        require(code == grpc.StatusCode.OK or len(details) > 5, f"{path}: the refusal with {code} gives no reason")
        return
    if code == grpc.StatusCode.UNIMPLEMENTED:
        raise Violation(f"{path}: the node does not serve the call: {details}")
    unread = any(_does_not_parse(path, request) or len(request) > MAX_REQUEST_BYTES for request in requests)
    if UNPARSED in details or (unread and code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)):
        require(unread, f"{path}: the request was refused as one that cannot be parsed, but it can: {details}")
        return
    raise Violation(f"{path}: the call ended with {code}, which no refusal has: {details}")


def _does_not_parse(path: str, request: bytes) -> bool:
    try:
        type_of(methods()[path].input_type).FromString(request)
    except DecodeError:
        return True
    return False


def _check_answer(path: str, answer: bytes) -> None:
    message = type_of(methods()[path].output_type).FromString(answer)
    for error in _errors(message):
        require(error.code != common_pb2.INTERNAL, f"{path}: the answer is an internal error: {error.message}")
        require(error.code == 0 or error.message, f"{path}: the error {error.code} has no message")


def _errors(message: Message) -> Iterator[common_pb2.Error]:
    """Yield all errors in a message, wherever they are."""
    if isinstance(message, common_pb2.Error):
        yield message
        return
    for each, value in message.ListFields():
        if each.message_type is None or each.message_type.GetOptions().map_entry:
            continue
        for inner in value if each.is_repeated else (value,):
            yield from _errors(inner)
