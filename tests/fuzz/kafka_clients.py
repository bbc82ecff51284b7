"""Inputs of Kafka clients: requests in every version, record batches, requests before a login, arbitrary frames."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final, cast

import google_crc32c
import pyarrow as pa

from broker.config.config import BrokerConfig
from broker.kafka import messages
from broker.kafka.codec import Fields
from broker.kafka.fetch import Fetch
from broker.kafka.listener import HEAD_BYTES, KafkaListener, body_at
from broker.kafka.produce import Produce
from broker.kafka.record_batches import from_kafka
from broker.kafka.sasl import MAX_BEFORE_BYTES, Door
from broker.net.connections import ConnectionLimits
from broker.observability.counters import Counters
from broker.security.client_listener import ClientSecurity
from broker.security.scram import FailureDelay
from broker.server.lease import ServingLease
from raftlog.errors import CorruptRecordError, InvalidRequestError, RaftlogError
from raftlog.format import Codec, Columns, InflateLimits, encode_batch, validate_produced
from raftlog.format.columns import HEADERS_TYPE
from tests.fuzz.choices import Choices, mutate
from tests.fuzz.oracle import Violation, require
from tests.fuzz.server import node
from tests.support.kafka_batches import to_kafka
from tests.support.scram_parts import Book, Hands, client

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
        require(len(str(error)) > 20, f"a refusal gives no reason: {error}")
        return
    require(len(frame) >= HEAD_BYTES, "a body was accepted from a frame shorter than a head")
    again = b"".join(request.encode(decoded, version))
    require(
        request.decode(memoryview(again), version) == decoded, "the request was written again, and decodes differently"
    )


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
        require(len(str(error)) > 20, f"a refusal gives no reason: {error}")
        return
    (returned,) = to_kafka(batch)
    require(from_kafka(returned) == batch, "the batch was turned into Kafka's form and back, and differs")


_MECHANISMS: Final = ("SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN")
_CONFIG: Final = BrokerConfig.from_values(
    {"node.id": 1, "log.dirs": "/data", "listeners": "127.0.0.1:1,kafka+sasl://127.0.0.1:2"}
)
_BOOK: Final = Book()
_BOOK.set("ada", secrets.token_hex())


class _AtOnce(FailureDelay):
    """Failures are answered at once."""

    async def of(self, error: RaftlogError) -> RaftlogError:
        return error


class _Guarded:
    """A listener that asks for a password that no client here knows."""

    def __init__(self) -> None:
        self.reached: list[int] = []
        """APIs whose handlers were called."""
        self.security = ClientSecurity(_CONFIG, lambda: _BOOK.image, Hands(), Counters())
        door = Door("sasl_ssl", security=self.security, mechanisms=_MECHANISMS, clock=Hands())
        door.delay = _AtOnce()
        self.door = door
        own = (messages.PRODUCE, messages.FETCH, messages.SASL_HANDSHAKE, messages.SASL_AUTHENTICATE)
        self.listener = KafkaListener(
            {key: self._handler(key) for key in messages.REQUESTS if key not in own},
            cast(Produce, self),
            cast(Fetch, self),
            ServingLease(Hands()),
            Counters(),
            max_frame_bytes=1 << 20,
            door=door,
            limits=ConnectionLimits(most=10, per_ip=10),
        )

    def _handler(self, key: int) -> Any:
        async def serve(request: Fields, version: int, who: object) -> Fields:
            self.reached.append(key)
            return {}

        return serve

    async def begin(self, request: Fields, who: object) -> Any:
        """In place of Produce."""
        self.reached.append(messages.PRODUCE)
        raise AssertionError

    async def serve(self, request: Fields, version: int, who: object) -> Fields:
        """In place of Fetch."""
        self.reached.append(messages.FETCH)
        return {}

    async def take(self, sent: bytes) -> bytes:
        """Serve one connection that sends this, and return the answers."""
        here, there = socket.socketpair()
        with there:
            here.setblocking(False)
            there.settimeout(20.0)
            served = asyncio.ensure_future(self.listener._serve(here, "10.0.0.7"))
            await asyncio.to_thread(there.sendall, sent)
            there.shutdown(socket.SHUT_WR)
            await served
            received = b""
            while True:
                try:
                    piece = await asyncio.to_thread(there.recv, 1 << 16)
                except ConnectionResetError:
                    return received
                if not piece:
                    return received
                received += piece


def _frames(choices: Choices) -> Iterator[bytes]:
    """Yield possible inputs of a client: logins that are almost right, other requests, and arbitrary frames."""
    mechanism = "PLAIN"
    for _ in range(1 + choices.below(24)):
        match choices.below(7):
            case 0:
                yield _request(messages.API_VERSIONS, choices.below(4), {}, choices)
            case 1:
                mechanism = choices.pick((*_MECHANISMS, "GSSAPI", ""))
                yield _request(messages.SASL_HANDSHAKE, choices.below(2), {"mechanism": mechanism}, choices)
            case 2:
                yield _request(messages.SASL_AUTHENTICATE, choices.below(3), {"auth_bytes": _token(choices)}, choices)
            case 3:
                token = _token(choices)
                yield struct.pack(">i", len(token)) + token
            case 4:
                key = choices.pick(sorted(messages.REQUESTS))
                yield _request(key, messages.REQUESTS[key].last, {}, choices)
            case 5:
                yield struct.pack(">i", choices.integer(-(1 << 31), (1 << 31) - 1)) + choices.blob()
            case _:
                yield choices.blob()


def _token(choices: Choices) -> bytes:
    user = choices.pick(("ada", "stranger", "", "ad\0a", "a" * 300))
    first = client("ada", "wrong").get_client_first().encode()
    tokens = (f"\0{user}\0wrong".encode(), first, b"c=biws,r=x,p=eA==", b"\0" * choices.below(MAX_BEFORE_BYTES), b"")
    return mutate(choices.pick(tokens), choices)


def _request(key: int, version: int, body: Fields, choices: Choices) -> bytes:
    message = messages.REQUESTS[key]
    tags = b"\0" if message.is_flexible(version) else b""
    whole = struct.pack(">hhih", key, version, 1, 1) + b"c" + tags + b"".join(message.encode(body, version))
    return struct.pack(">i", len(whole)) + (mutate(whole, choices) if choices.one_in(4) else whole)


def authentication_target(data: bytes) -> None:
    """No client gets in without a password: it reaches no other API, and its connection leaves no state behind."""
    guarded = _Guarded()
    failures: list[logging.LogRecord] = []

    class Failures(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            failures.append(record)

    log, noted = logging.getLogger("broker.kafka.listener"), Failures(logging.ERROR)
    log.addHandler(noted)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        asyncio.run(guarded.take(b"".join(_frames(Choices(data)))))
    finally:
        log.removeHandler(noted)
        log.setLevel(level)
    require(
        set(guarded.reached) <= {messages.API_VERSIONS}, f"requests were served before any login: {guarded.reached}"
    )
    require(not guarded.security.connections, "a connection is still known as logged in after its end")
    newcomers = guarded.listener.newcomers
    require(len(newcomers) == newcomers.limits.total == 0, "a connection is still counted after its end")
    require(not failures, "a bug: " + "; ".join(each.getMessage() for each in failures))


_ANSWER_S: Final = 60.0
_WAITING: Final = (messages.FETCH, messages.JOIN_GROUP, messages.SYNC_GROUP)
"""Their answers may take as long as a request says."""
_FLOOD: Final = 1 << 16


def connection_target(data: bytes) -> None:
    """Frames on a real connection, of most APIs and versions and of none, are answered or closed; no other client is
    affected."""
    choices = Choices(data)
    server = node()
    with (
        socket.create_connection(server.kafka_address, timeout=_ANSWER_S) as connection,
        contextlib.suppress(ConnectionError),  # closed before all was sent
    ):
        for _ in range(1 + choices.below(4)):
            connection.sendall(_frame(choices))
        with contextlib.suppress(OSError):  # not connected any more
            connection.shutdown(socket.SHUT_WR)
        received = 0
        while piece := connection.recv(_FLOOD):
            received += len(piece)
            require(received <= 64 << 20, "the answer is longer than 64 MiB")
    if server.failure is not None:
        failure = server.failure
        server.restart()
        raise Violation(f"the node has stopped after these bytes: {failure!r}")
    complaints = server.complaints.take()
    require(not complaints, "a traceback in the log: " + "\n".join(complaints[:1]))
    _good_client(server.kafka_address)


def _frame(choices: Choices) -> bytes:
    kind = choices.below(6)
    if kind == 0:  # no frame at all
        return choices.rest()[:200]
    key = choices.pick([*(each for each in messages.REQUESTS if each not in _WAITING), 4, 7, 90, -1])
    request = messages.REQUESTS.get(key)
    version = (
        choices.below(20) - 1
        if request is None or choices.one_in(8)
        else request.first + choices.below(request.last - request.first + 1)
    )
    flexible = request is not None and request.is_flexible(version)
    body = struct.pack(">hhih", key, version, 7, 1) + b"c" + (b"\0" if flexible else b"") + _body(choices)
    size = len(body)
    if kind == 1:  # a size that is not that of the frame: 2 GB, or less than a head
        size = choices.pick([(1 << 31) - 1, -1, 0, 5, size + 1, max(size - 1, 0)])
    return struct.pack(">i", size) + body


def _body(choices: Choices) -> bytes:
    """Return a body made of lengths, counts, ids and garbage, in small pieces."""
    pieces = (
        b"\0", b"\1", b"\2", b"\xff\xff\xff\xff", b"\0\0\0\1", b"\0\1t", b"\2t", b"\x7f\xff\xff\xff", bytes(16),
        b"\xff\xff", b"\0\0\0\0\0\0\0\1", b"\x80\x80\x80\x80\x08",
    )  # fmt: skip
    return b"".join(choices.pick(pieces) for _ in range(choices.below(40)))


def _good_client(address: tuple[str, int]) -> None:
    """Ask for the versions on a connection of one's own."""
    request = struct.pack(">hhih", messages.API_VERSIONS, 0, 9, 1) + b"g"
    with socket.create_connection(address, timeout=_ANSWER_S) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        answer = connection.recv(8, socket.MSG_WAITALL)
    require(len(answer) == 8 and struct.unpack(">ii", answer)[1] == 9, "a well-behaved client got no answer")
