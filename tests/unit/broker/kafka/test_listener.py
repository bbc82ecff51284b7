"""Connections of Kafka clients: order, bounds, and what slow or silent clients cost; the APIs behind are stand-ins."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker.clock import SystemClock
from broker.config.config import BrokerConfig
from broker.kafka import listener as module
from broker.kafka import messages
from broker.kafka.apis import PERMISSIONS
from broker.kafka.codec import MAX_TAGGED_FIELDS, Fields, varint
from broker.kafka.fetch import Fetch, TakeRoom
from broker.kafka.listener import KafkaListener
from broker.kafka.produce import Produce
from broker.kafka.sasl import OPEN, Door, door_of
from broker.net.calls import MAX_REFUSED_CALL_RATE, CallLimits, ShutOuts
from broker.net.connections import ConnectionLimits
from broker.net.revocation import RevocationLists
from broker.net.tls import KafkaContexts, NodeTls
from broker.observability.counters import Counters
from broker.quotas import room as sharing
from broker.quotas.manager import QuotaManager
from broker.quotas.room import Room
from broker.security.caller import Caller
from broker.security.client_listener import ClientSecurity
from broker.server.lease import Wake
from raftlog._client.security import FreshPem, Names, PemFiles
from raftlog.testing import CertificateAuthority
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import MetadataImage
from raftmeta.quotas import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE, REQUEST_PERCENTAGE, QuotaEntity
from tests.support.fake_authorizer import FakeAuthorizer
from tests.support.revocation import InTwoHours, revoke
from tests.support.scram_parts import Book, Hands


class HeldLease:
    """A lease that a test takes away and gives back."""

    def __init__(self) -> None:
        self.is_valid = True
        self._waiting: list[Wake] = []

    def valid(self) -> bool:
        return self.is_valid

    def call_when_renewed(self, wake: Wake) -> None:
        self._waiting.append(wake)

    def stop_waiting(self, wake: Wake) -> None:
        self._waiting = [each for each in self._waiting if each != wake]

    def renew(self) -> None:
        self.is_valid = True
        for wake in self._waiting:
            wake()


class SlowProduce:
    """Produces that a test answers itself."""

    def __init__(self) -> None:
        self.begun: list[asyncio.Future[Fields]] = []
        self.checks: list[object] = []
        """What each has checked producer ids with."""

    def checks_of(self, who: Caller) -> object:
        return object()

    async def begin(self, request: Fields, version: int, who: Caller, checks: object) -> asyncio.Future[Fields]:
        self.checks.append(checks)
        self.begun.append(asyncio.get_running_loop().create_future())
        return self.begun[-1]


class EmptyFetch:
    def __init__(self) -> None:
        self.served = 0
        self.reads = 0
        """Bytes of records in each response, if there is room for them."""

    async def serve(self, request: Fields, version: int, who: Caller, take: TakeRoom) -> Fields:
        self.served += 1
        if not self.reads:
            return {"responses": []}
        room = await take(self.reads, 0.05)
        records = [] if room is None else [bytes(room.size)]
        return {"responses": [{"topic": "t", "partitions": [{"partition_index": 0, "records": records}]}]}

    def held(self, request: Fields, version: int, who: Caller) -> Fields:
        return {"responses": []}


ANSWER = {"responses": [{"name": "t", "partition_responses": [{"index": 0, "base_offset": 5}]}]}


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.client_id = b"c"
        self.body = b""
        """Of the last response."""

    def send(self, key: int, version: int, correlation_id: int, request: Fields) -> None:
        body = b"".join(messages.REQUESTS[key].encode(request, version))
        size, name = len(body) + 10 + len(self.client_id), self.client_id
        self.writer.write(struct.pack(">ihhih", size, key, version, correlation_id, len(name)) + name + body)

    def produce(self, correlation_id: int) -> None:
        self.send(messages.PRODUCE, 8, correlation_id, {"acks": -1, "topic_data": []})

    def fetch(self, correlation_id: int) -> None:
        self.send(messages.FETCH, 11, correlation_id, {"topics": []})

    async def received(self) -> int:
        """Return the correlation id of the next response."""
        size, correlation_id = struct.unpack(">ii", await self._reader.readexactly(8))
        self.body = await self._reader.readexactly(size - 4)
        return int(correlation_id)

    async def is_closed(self) -> bool:
        try:
            return await self._reader.read(1) == b""
        except (ConnectionResetError, ssl.SSLError):
            return True


class Bed:
    """A listener, and clients of it."""

    def __init__(self, door: Door) -> None:
        self.lease = HeldLease()
        self.produce = SlowProduce()
        self.fetch = EmptyFetch()
        self.counters = Counters()

        self.answer: Fields = {}
        self.image = MetadataImage()
        self.busy_s = 0.0
        """How long a request keeps the event loop busy."""
        self.served = 0

        async def serve(request: Fields, version: int, who: Caller) -> Fields:
            time.sleep(self.busy_s)  # noqa: ASYNC251 # as work does
            self.served += 1
            return dict(self.answer)

        own = (messages.PRODUCE, messages.FETCH, messages.SASL_HANDSHAKE, messages.SASL_AUTHENTICATE)
        handlers = {key: serve for key in messages.REQUESTS if key not in own}
        self.listener = KafkaListener(
            handlers,
            cast(Produce, self.produce),
            cast(Fetch, self.fetch),
            self.lease,
            self.counters,
            max_frame_bytes=1 << 20,
            door=door,
            limits=ConnectionLimits(most=3 if door is OPEN else 8, per_ip=1_000),
            quotas=QuotaManager(lambda: self.image, SystemClock(), 1_000.0),
        )

    async def client(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.listener.port))


@asynccontextmanager
async def opened(door: Door) -> AsyncIterator[Bed]:
    bed = Bed(door)
    bed.listener.bind("127.0.0.1", 0)
    await bed.listener.open()
    try:
        yield bed
    finally:
        await bed.listener.close()


def run(scenario: Callable[[Bed], Awaitable[None]], door: Door = OPEN) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), opened(door) as bed:
            await scenario(bed)

    asyncio.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 # nothing that a test looks at has an event
        await asyncio.sleep(0.001)


def test_produces_are_pipelined_and_answered_in_order() -> None:
    async def scenario(bed: Bed) -> None:
        client = await bed.client()
        for number in range(3):
            client.produce(number)
        client.fetch(3)
        await until(lambda: len(bed.produce.begun) == 3)
        bed.produce.begun[2].set_result(ANSWER)
        bed.produce.begun[1].set_result(ANSWER)
        await asyncio.sleep(0.01)
        assert bed.counters.produces_unanswered == 3
        bed.produce.begun[0].set_result(ANSWER)
        assert [await client.received() for _ in range(4)] == [0, 1, 2, 3]
        assert bed.counters.produces_unanswered == 0

    run(scenario)


def test_a_connection_remembers_which_producer_ids_were_checked() -> None:
    async def scenario(bed: Bed) -> None:
        clients = [await bed.client() for _ in range(2)]
        for number, client in enumerate((*clients, *clients), 1):
            client.produce(number)
            await until(lambda: len(bed.produce.begun) == number)  # noqa: B023 # called at once
        first, second, *again = bed.produce.checks
        assert first is not second
        assert again == [first, second]

    run(scenario)


def test_a_client_with_many_unanswered_produces_is_not_read() -> None:
    async def scenario(bed: Bed) -> None:
        client = await bed.client()
        for number in range(2 * module.MAX_UNANSWERED):
            client.produce(number)
        await until(lambda: len(bed.produce.begun) == module.MAX_UNANSWERED)
        await asyncio.sleep(0.02)
        assert len(bed.produce.begun) == module.MAX_UNANSWERED
        bed.produce.begun[0].set_result(ANSWER)
        await until(lambda: len(bed.produce.begun) == module.MAX_UNANSWERED + 1)

    run(scenario)


def test_nothing_is_acknowledged_without_a_lease() -> None:
    async def scenario(bed: Bed) -> None:
        client = await bed.client()
        client.produce(1)
        await until(lambda: len(bed.produce.begun) == 1)
        bed.lease.is_valid = False
        bed.produce.begun[0].set_result(ANSWER)
        received = asyncio.ensure_future(client.received())
        await asyncio.sleep(0.02)
        assert not received.done()
        bed.lease.renew()
        assert await received == 1

    run(scenario)


def test_a_frame_that_does_not_come_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte at a time (slow-loris), or nothing at all; other clients do not notice."""
    monkeypatch.setattr(module, "FRAME_S", 0.3)
    monkeypatch.setattr(module, "FIRST_S", 0.2)

    async def scenario(bed: Bed) -> None:
        slow, silent, good = [await bed.client() for _ in range(3)]
        good.fetch(1)
        assert await good.received() == 1
        frame = struct.pack(">ihhih", 1_000, messages.METADATA, 1, 1, 1)

        async def trickle() -> None:
            for position in range(len(frame)):
                slow.writer.write(frame[position : position + 1])
                await asyncio.sleep(0.01)

        sending = asyncio.ensure_future(trickle())
        assert await slow.is_closed()
        assert await silent.is_closed()
        await sending
        good.fetch(2)
        assert await good.received() == 2
        assert bed.listener.connections == 1

    run(scenario)


def test_large_frames_share_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame waits for room before it is read, and the room comes back, also when the client goes."""

    async def scenario(bed: Bed) -> None:
        bed.listener.room = room = Room(2 * module.LARGE_BYTES)
        head = struct.pack(">ihhih", 4 * module.LARGE_BYTES, messages.PRODUCE, 8, 1, 1)
        hog, other = await bed.client(), await bed.client()
        hog.writer.write(head + bytes(2 * module.LARGE_BYTES))
        await until(lambda: room.free == 0)
        body = {"acks": -1, "topic_data": [{"name": "t", "partition_data": [{"records": bytes(80_000)}]}]}
        other.send(messages.PRODUCE, 8, 2, body)
        await asyncio.sleep(0.02)
        assert bed.produce.begun == []
        hog.writer.close()
        await until(lambda: len(bed.produce.begun) == 1)
        bed.produce.begun[0].set_result(ANSWER)
        assert await other.received() == 2
        await until(lambda: room.free == 2 * module.LARGE_BYTES)

    run(scenario)


def users_by_client_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client id has a share of its own, as each user has."""
    monkeypatch.setattr(Caller, "share", property(lambda who: who.client_id))


LARGE = {"acks": -1, "topic_data": [{"name": "t", "partition_data": [{"records": bytes(80_000)}]}]}


async def known(bed: Bed, client_id: bytes) -> Client:
    """Return a client that the broker has heard of."""
    client = await bed.client()
    client.client_id = client_id
    client.fetch(0)
    assert await client.received() == 0
    return client


def hold_back(client: Client, size: int) -> None:
    """Claim a frame of a produce request, and send all of it but the end."""
    client.writer.write(struct.pack(">ihhih", size, messages.PRODUCE, 8, 1, 1) + bytes(size - 100))


def test_frames_that_one_user_holds_back_leave_room_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without permissions could stop all large produces of a broker, again and again."""
    users_by_client_id(monkeypatch)

    async def scenario(bed: Bed) -> None:
        bed.listener.room = room = Room(8 * module.LARGE_BYTES)
        hogs = [await known(bed, b"hog") for _ in range(2)]
        honest = await known(bed, b"honest")
        for hog in hogs:
            hold_back(hog, 3 * module.LARGE_BYTES)
        await until(lambda: room.waiting == 1)
        honest.send(messages.PRODUCE, 8, 2, LARGE)
        await until(lambda: len(bed.produce.begun) == 1)
        assert room.held("hog") == 3 * module.LARGE_BYTES
        assert room.waiting == 1

    run(scenario)


def test_a_frame_that_hardly_arrives_gives_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sharing, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "FRAME_STALL_S", 0.05)
    users_by_client_id(monkeypatch)

    async def scenario(bed: Bed) -> None:
        bed.listener.room = room = Room(4 * module.LARGE_BYTES)
        hog, honest = await known(bed, b"c"), await known(bed, b"c")
        hog.produce(1)
        hold_back(hog, 3 * module.LARGE_BYTES)
        await until(lambda: room.free == module.LARGE_BYTES)
        bed.produce.begun.pop().set_result(ANSWER)
        assert await hog.received() == 1, "a response to the request before, which changes nothing"
        await asyncio.sleep(0.1)
        assert not hog.writer.transport.is_closing()
        assert bed.listener.connections == 2
        honest.send(messages.PRODUCE, 8, 2, LARGE)
        await until(lambda: len(bed.produce.begun) == 1)
        assert await hog.is_closed()
        bed.produce.begun[0].set_result(ANSWER)
        assert await honest.received() == 2

    run(scenario)
    (line,) = [each for each in caplog.records if getattr(each, "event", "") == "kafka_disconnected"]
    assert vars(line)["of"] == "c"
    assert vars(line)["reason"] == "a large request that hardly arrives, while others wait"


def test_responses_that_one_user_does_not_take_leave_room_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    users_by_client_id(monkeypatch)
    size = 16 << 20  # more than the buffers of a socket

    async def scenario(bed: Bed) -> None:
        bed.listener.untaken = room = Room(2 * size)
        hog, second, honest = await known(bed, b"hog"), await known(bed, b"hog"), await known(bed, b"honest")
        bed.fetch.reads = size
        hog.writer.transport.pause_reading()  # type: ignore[attr-defined] # asyncio's have it
        hog.fetch(1)
        await until(lambda: room.held("hog") == size)
        second.fetch(1)
        assert await second.received() == 1
        assert len(second.body) < 100, "there was no room for its records"
        honest.fetch(1)
        assert await honest.received() == 1
        assert len(honest.body) > size
        hog.writer.transport.resume_reading()  # type: ignore[attr-defined] # as above
        assert await hog.received() == 1
        second.fetch(2)
        assert await second.received() == 2
        assert len(second.body) > size
        await until(lambda: room.free == 2 * size)

    run(scenario)


@example([1, module.CHUNK_BYTES + 1, 1, module.CHUNK_BYTES + 1, 1])
@example([0, module.CHUNK_BYTES + 1, 0, module.CHUNK_BYTES + 1, 0])
@given(st.lists(st.integers(0, 3 * module.CHUNK_BYTES), max_size=5))
@example([0, module.CHUNK_BYTES + 1, 0, module.CHUNK_BYTES + 1, 0])
@example([1, module.CHUNK_BYTES + 1, 1, module.CHUNK_BYTES + 1, 1])
def test_a_response_leaves_in_chunks(sizes: list[int]) -> None:
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]
    found = [*module.chunks(pieces)]
    assert b"".join(found) == b"".join(pieces)
    assert all(len(each) <= module.CHUNK_BYTES for each in found)
    assert len(found) <= 2 * sum(sizes) // module.CHUNK_BYTES + 2


def test_a_response_over_tls_is_held_until_its_client_takes_it(tmp_path: Path) -> None:
    """asyncio's TLS takes all that it is given at once, and says that it has left."""
    authority = CertificateAuthority(tmp_path)
    server = authority.issue("server")
    files = PemFiles(Names("ca", "certificate", "key"), str(authority.ca_file), str(server))
    size = 16 << 20
    security = ClientSecurity(
        BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data"}), lambda: Book().image, Hands(), Counters()
    )

    async def scenario(bed: Bed) -> None:
        context = ssl.create_default_context(cafile=str(authority.ca_file))
        context.check_hostname = False
        client = Client(*await asyncio.open_connection("127.0.0.1", bed.listener.port, ssl=context))
        client.fetch(1)
        assert await client.received() == 1
        bed.fetch.reads = size
        client.writer.transport.pause_reading()  # type: ignore[attr-defined] # asyncio's have it
        client.fetch(2)
        await until(lambda: bed.fetch.served == 2)
        await asyncio.sleep(0.1)
        assert bed.listener.untaken.free == module.MAX_UNTAKEN_BYTES - size
        client.writer.transport.resume_reading()  # type: ignore[attr-defined] # as above
        assert await client.received() == 2
        await until(lambda: bed.listener.untaken.free == module.MAX_UNTAKEN_BYTES)

    run(scenario, Door("SSL", security=security, contexts=KafkaContexts(FreshPem(files), files, ask=False)))


def test_a_response_that_a_client_does_not_take_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "RESPONSE_STALL_S", 0.02)
    size = 16 << 20

    async def scenario(bed: Bed) -> None:
        bed.listener.untaken = room = Room(2 * size)
        hog, other = await known(bed, b"c"), await known(bed, b"c")
        bed.fetch.reads = size
        hog.writer.transport.pause_reading()  # type: ignore[attr-defined] # asyncio's have it
        hog.fetch(1)
        await until(lambda: room.held("127.0.0.1") == size)
        number = 0
        while len(other.body) < size // 2:
            other.fetch(number := number + 1)
            assert await other.received() == number
        await until(lambda: bed.listener.connections == 1)

    run(scenario)


@pytest.mark.parametrize("may_write", [False, True])
def test_a_user_that_may_write_to_no_topic_sends_no_large_produce(
    monkeypatch: pytest.MonkeyPatch, may_write: bool
) -> None:
    monkeypatch.setattr(module, "MAX_REQUEST_BYTES", 50_000)
    allowed = ((Acl.WRITE, Acl.TOPIC, "other"),) if may_write else ()

    async def scenario(bed: Bed) -> None:
        client = await bed.client()
        client.produce(1)
        client.send(messages.PRODUCE, 8, 2, LARGE)
        await until(lambda: len(bed.produce.begun) == 1 + may_write)
        if not may_write:
            assert await client.is_closed()

    run(scenario, Door("PLAINTEXT", authorizer=FakeAuthorizer(*allowed)))


@pytest.mark.parametrize("topics", [10, 5_000])
def test_large_requests_and_responses_leave_the_event_loop_alone(monkeypatch: pytest.MonkeyPatch, topics: int) -> None:
    """What has thousands of elements takes long to read and to write: others are served meanwhile."""
    on_loop = []

    def noted(convert: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            converted = convert(*arguments)
            on_loop.append(threading.current_thread() is threading.main_thread())
            return converted

        return run

    request, response = messages.REQUESTS[messages.METADATA], messages.RESPONSES[messages.METADATA]
    body = {"topics": [{"name": f"topic-{number}"} for number in range(topics)]}

    async def scenario(bed: Bed) -> None:
        bed.answer = {"brokers": [], "topics": [{**each, "partitions": []} for each in body["topics"]]}
        client = await bed.client()
        monkeypatch.setattr(request, "decode", noted(request.decode))
        monkeypatch.setattr(response, "encode", noted(response.encode))
        client.send(messages.METADATA, 1, 1, body)
        assert await client.received() == 1

    run(scenario)
    assert on_loop == [topics == 10] * 2


def test_large_requests_of_one_user_leave_room_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without permissions could have 30 requests with 100,000 names each answered at a time."""
    users_by_client_id(monkeypatch)
    begun: list[str] = []
    may_go_on = asyncio.Event()

    async def slow(request: Fields, version: int, who: Caller) -> Fields:
        begun.append(request["client_id"])
        await may_go_on.wait()
        return {"brokers": [], "topics": []}

    async def scenario(bed: Bed) -> None:
        bed.listener.elements = room = Room(4 * module.LISTED_ELEMENTS)
        monkeypatch.setitem(cast(Any, bed.listener.handlers), messages.METADATA, slow)
        clients = [await bed.client() for _ in range(3)]
        clients[2].client_id = b"other"
        for client in clients[:2]:
            client.send(messages.METADATA, 1, 1, {"topics": [{"name": "t"}] * 2_000})
        await until(lambda: room.waiting == 1)
        clients[2].send(messages.METADATA, 1, 1, {"topics": None})
        await until(lambda: sorted(begun) == ["c", "other"])
        await asyncio.sleep(0.02)
        assert len(begun) == 2
        may_go_on.set()
        for client in clients:
            assert await client.received() == 1
        await until(lambda: room.free == 4 * module.LISTED_ELEMENTS)

    run(scenario)


@pytest.mark.parametrize(
    ("key", "goes_on"), [(messages.OFFSET_FOR_LEADER_EPOCH, False), (messages.DELETE_TOPICS, True)]
)
def test_a_question_is_given_up_when_its_client_has_gone(
    monkeypatch: pytest.MonkeyPatch, key: int, goes_on: bool
) -> None:
    begun, over = asyncio.Event(), asyncio.Event()
    may_go_on = asyncio.Event()
    finished = False

    async def slow(request: Fields, version: int, who: Caller) -> Fields:
        nonlocal finished
        try:
            begun.set()
            await may_go_on.wait()
            finished = True
        finally:
            over.set()
        return {}

    async def scenario(bed: Bed) -> None:
        monkeypatch.setitem(cast(Any, bed.listener.handlers), key, slow)
        client = await bed.client()
        client.send(key, 2, 1, {"topic_names": [], "timeout_ms": 1, "topics": []})
        await begun.wait()
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.writer.transport.abort()
        if goes_on:
            await asyncio.sleep(0.02)
            assert not over.is_set()
            may_go_on.set()
        await over.wait()
        assert finished == goes_on
        await until(lambda: bed.listener.connections == 0)

    run(scenario)


def test_a_fetch_is_given_up_when_its_client_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have millions of records still to convert."""
    begun, over = asyncio.Event(), asyncio.Event()

    async def slow(request: Fields, version: int, who: Caller, take: TakeRoom) -> Fields:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            over.set()
        return {}

    async def scenario(bed: Bed) -> None:
        monkeypatch.setattr(bed.fetch, "serve", slow)
        client = await bed.client()
        client.fetch(1)
        await begun.wait()
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.writer.transport.abort()
        await over.wait()
        await until(lambda: bed.listener.connections == 0)

    run(scenario)


def test_connections_are_limited() -> None:
    async def scenario(bed: Bed) -> None:
        clients = [await bed.client() for _ in range(3)]
        await until(lambda: bed.listener.connections == 3)
        assert await (await bed.client()).is_closed()
        clients[0].writer.close()
        await until(lambda: bed.listener.connections == 2)
        again = await bed.client()
        again.fetch(1)
        assert await again.received() == 1

    run(scenario)


def test_a_stop_lets_answers_leave() -> None:
    async def scenario(bed: Bed) -> None:
        client, idle = await bed.client(), await bed.client()
        client.produce(1)
        await until(lambda: len(bed.produce.begun) == 1)
        closing = asyncio.ensure_future(bed.listener.close())
        await asyncio.sleep(0.01)
        bed.produce.begun[0].set_result(ANSWER)
        assert await client.received() == 1
        await closing
        assert await client.is_closed()
        assert await idle.is_closed()

    run(scenario)


@pytest.mark.parametrize("count", [1, 16, 17, 8_000])
def test_a_header_with_many_tagged_fields_closes_the_connection(count: int) -> None:
    """Clients send none there; before a login, each would cost the event loop time."""

    async def scenario(bed: Bed) -> None:
        client = await bed.client()
        request = struct.pack(">hhih", messages.API_VERSIONS, 3, 7, 1) + b"c"
        request += varint(count) + (varint(5) + varint(0)) * count + b"\2a\2b\0"
        client.writer.write(struct.pack(">i", len(request)) + request)
        if count <= MAX_TAGGED_FIELDS:
            assert await client.received() == 7
        else:
            assert await client.is_closed()

    run(scenario)


def test_a_body_that_exceeds_its_frame_is_refused() -> None:
    async def scenario(bed: Bed) -> None:
        client = await bed.client()
        head: Any = struct.pack(">ihhih", 11, messages.METADATA, 1, 1, 30_000)
        client.writer.write(head + b"c")
        assert await client.is_closed()

    run(scenario)


def test_a_throttled_client_has_its_answer_at_once_and_is_not_read_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """KIP-219."""

    async def scenario(bed: Bed) -> None:
        client = await bed.client()

        async def throttled(request: Fields, version: int, who: Caller, take: TakeRoom) -> Fields:
            return {"throttle_time_ms": 300, "responses": []}

        monkeypatch.setattr(bed.listener.fetch, "serve", throttled)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        client.fetch(1)
        assert await client.received() == 1
        monkeypatch.undo()
        client.fetch(2)
        assert await client.received() == 2
        assert loop.time() - begun_s >= 0.3

    run(scenario)


def test_a_client_with_too_many_requests_is_not_read_for_a_while() -> None:
    """Its produces and fetches do not count."""

    class Calls:
        counted: ClassVar[list[str]] = []

        def served(self, who: Caller) -> float:
            self.counted.append(who.principal)
            return 300.0 if len(self.counted) == 1 else 0.0

        def refusal_of(self, who: Caller) -> None:
            return None

    async def scenario(bed: Bed) -> None:
        bed.listener.calls = cast(CallLimits, Calls())
        client = await bed.client()
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        for number in range(1, 4):
            client.send(messages.OFFSET_FOR_LEADER_EPOCH, 2, number, {"topics": []})
        for number in range(1, 4):
            assert await client.received() == number
        assert loop.time() - begun_s >= 0.3
        client.fetch(4)
        assert await client.received() == 4

    run(scenario)
    assert Calls.counted == ["User:ANONYMOUS"] * 3


def test_what_is_refused_at_little_cost_counts_as_a_request_too() -> None:
    class Calls:
        counted: ClassVar[list[str]] = []

        def served(self, who: Caller) -> float:
            self.counted.append(who.principal)
            return 0.0

        def refusal_of(self, who: Caller) -> None:
            return None

    async def scenario(bed: Bed) -> None:
        bed.listener.calls = cast(CallLimits, Calls())
        client = await bed.client()
        client.send(messages.SASL_HANDSHAKE, 1, 1, {"mechanism": "PLAIN"})
        client.send(messages.SASL_AUTHENTICATE, 1, 2, {"auth_bytes": b""})
        client.writer.write(struct.pack(">ihhih", 11, messages.API_VERSIONS, 99, 3, 1) + b"c")
        for number in range(1, 4):
            assert await client.received() == number

    run(scenario)
    assert Calls.counted == ["User:ANONYMOUS"] * 3


# Before authentication


class Guarded:
    """A door that asks for passwords, and its users."""

    def __init__(self, login_ms: float = 60_000.0) -> None:
        self.book = Book()
        self.book.set("ada", "secret")
        keys = {"node.id": 1, "log.dirs": "/data", "listeners": "127.0.0.1:1,kafka+sasl://127.0.0.1:2"}
        self.security = ClientSecurity(BrokerConfig.from_values(keys), lambda: self.book.image, Hands(), Counters())
        self.door = Door(
            "sasl_ssl",
            security=self.security,
            mechanisms=("PLAIN",),
            clock=Hands(),
            max_strangers=2,
            login_ms=login_ms,
        )


class Certified:
    """A door that asks for certificates, and who issues them. `trusted`: whose certificates it takes."""

    def __init__(self, directory: Path) -> None:
        self.trusted = CertificateAuthority(directory / "trusted")
        self.stranger = CertificateAuthority(directory / "stranger", "another CA")
        self.revoked_certificate = self.trusted.issue("carol", hosts=())
        crl = revoke(self.trusted, directory / "crl.pem", self.revoked_certificate)
        keys = {
            "node.id": 1,
            "log.dirs": "/data",
            "listeners": "127.0.0.1:1,kafka+ssl://127.0.0.1:2",
            **self.trusted.node_config(1),
            "ssl.crl.location": str(crl),
        }
        config, counters = BrokerConfig.from_values(keys), Counters()
        tls = NodeTls(config)
        security = ClientSecurity(config, MetadataImage, Hands(), counters, tls.revoked)
        self.door = door_of(config, security, tls, Hands(), counters)

    async def client(self, bed: Bed, certificate: Path | None) -> Client:
        """Return a client whose own part of the handshake is over: brokers refuse certificates after that."""
        context = ssl.create_default_context(cafile=self.trusted.ca_file)
        if certificate is not None:
            context.load_cert_chain(certificate)
        return Client(*await asyncio.open_connection("127.0.0.1", bed.listener.port, ssl=context))


@pytest.mark.parametrize("case", ["none", "of another CA", "expired", "revoked"])
def test_a_certificate_that_is_refused_counts_as_a_failed_authentication(tmp_path: Path, case: str) -> None:
    world = Certified(tmp_path)
    certificates: dict[str, Path | None] = {
        "none": None,
        "of another CA": world.stranger.issue("ada", hosts=()),
        "expired": world.trusted.issue("ada", hosts=(), lasts=-timedelta(hours=1)),
        "revoked": world.revoked_certificate,
    }

    async def scenario(bed: Bed) -> None:
        assert await (await world.client(bed, certificates[case])).is_closed()
        await until(lambda: bed.listener.connections == 0)
        assert world.door.counters.authentications == {("mTLS", "failure"): 1}

    run(scenario, world.door)


def test_a_certificate_that_is_taken_counts_as_an_authentication(tmp_path: Path) -> None:
    world = Certified(tmp_path)

    async def scenario(bed: Bed) -> None:
        client = await world.client(bed, world.trusted.issue("ada", hosts=()))
        client.fetch(1)
        assert await client.received() == 1
        assert world.door.counters.authentications == {("mTLS", "success"): 1}

    run(scenario, world.door)


def test_what_is_not_tls_is_no_failed_authentication(tmp_path: Path) -> None:
    world = Certified(tmp_path)

    async def scenario(bed: Bed) -> None:
        client = await bed.client()
        client.fetch(1)
        while not await client.is_closed():  # after TLS's alert
            pass
        assert world.door.counters.authentications == {}

    run(scenario, world.door)


async def log_in(client: Client, user: str = "ada", password: str = "secret") -> None:
    client.send(messages.SASL_HANDSHAKE, 1, 1, {"mechanism": "PLAIN"})
    assert await client.received() == 1
    client.send(messages.SASL_AUTHENTICATE, 1, 2, {"auth_bytes": f"\0{user}\0{password}".encode()})
    assert await client.received() == 2


def test_of_clients_that_have_not_authenticated_there_are_few_and_the_oldest_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So silent connections keep no honest client of their own address out, and close none that has logged in."""
    monkeypatch.setattr("broker.net.connections.GIVES_WAY_MS", 0.0)
    guarded = Guarded()

    async def scenario(bed: Bed) -> None:
        newcomers = bed.listener.newcomers
        first = await bed.client()
        await log_in(first)
        silent = []
        for number in range(5):
            silent.append(await bed.client())
            await until(lambda: newcomers.limits.total == min(number, 1) + 2)  # noqa: B023 # waited for at once
        for each in silent[:3]:
            assert await each.is_closed()
        assert newcomers.limits.refused == {"max.connections": 3}
        late = await bed.client()
        await log_in(late)
        for client in (first, late):
            client.fetch(3)
            assert await client.received() == 3
        assert len(guarded.security.connections) == 2
        assert len(newcomers) == 1

    run(scenario, guarded.door)
    assert not guarded.security.connections


def test_a_silent_client_is_put_out() -> None:
    guarded = Guarded(login_ms=50.0)

    async def scenario(bed: Bed) -> None:
        assert await (await bed.client()).is_closed()
        assert len(bed.listener.newcomers) == bed.listener.limits.total == 0
        assert bed.listener.limits.refused == {"connection.login.timeout.ms": 1}

    run(scenario, guarded.door)


def test_a_client_that_has_authenticated_stays() -> None:
    guarded = Guarded()

    async def scenario(bed: Bed) -> None:
        client = await bed.client()
        await until(lambda: len(bed.listener.newcomers) == 1)
        ((newcomer,),) = bed.listener.newcomers._waiting.values()
        timer = newcomer._timer
        assert timer is not None
        await log_in(client)
        assert timer.cancelled()
        assert len(bed.listener.newcomers) == 0

    run(scenario, guarded.door)


def shut_out(bed: Bed, name: str, security: ClientSecurity | None = None) -> None:
    """Shut a user or a network out, as a flood at gRPC's listener does."""
    clock, shut_outs = SystemClock(), ShutOuts()
    for _ in range(100):
        shut_outs.count(name, MAX_REFUSED_CALL_RATE, 1.0, clock.monotonic_ms())
    bed.listener.calls = CallLimits(
        10, 10, clock, short_rate=500, unused_rate=50, call_rate=1_000, refused_rate=1, shut_outs=shut_outs
    )
    if security is not None:
        security.shut_out = bed.listener.calls.shut_out


def test_a_user_that_is_shut_out_is_disconnected_when_it_asks_for_something_new() -> None:
    """What would go on at gRPC's listener in streams that are open goes on, and what is owed leaves first."""
    guarded = Guarded()
    guarded.book.set("eve", "secret")

    async def scenario(bed: Bed) -> None:
        client, other = await bed.client(), await bed.client()
        await log_in(client)
        await log_in(other, "eve")
        shut_out(bed, "User:ada", guarded.security)
        client.fetch(3)
        assert await client.received() == 3
        client.send(messages.HEARTBEAT, 0, 4, {"group_id": "g", "generation_id": 1, "member_id": "m"})
        assert await client.received() == 4
        served = bed.served
        client.produce(5)
        client.send(messages.OFFSET_FOR_LEADER_EPOCH, 2, 6, {"topics": []})
        await until(lambda: len(bed.produce.begun) == 1)
        bed.produce.begun[0].set_result(ANSWER)
        assert await client.received() == 5
        assert await client.is_closed()
        assert bed.served == served, "a request of a user that is shut out must not be served"
        other.send(messages.OFFSET_FOR_LEADER_EPOCH, 2, 3, {"topics": []})
        assert await other.received() == 3, "another user of the same address must be served"
        again = await bed.client()
        again.send(messages.SASL_HANDSHAKE, 1, 1, {"mechanism": "PLAIN"})
        assert await again.received() == 1
        again.send(messages.SASL_AUTHENTICATE, 1, 2, {"auth_bytes": b"\0ada\0secret"})
        assert await again.is_closed()

    run(scenario, guarded.door)


def test_where_clients_have_no_login_an_address_is_shut_out() -> None:
    async def scenario(bed: Bed) -> None:
        client = await bed.client()
        client.fetch(1)
        assert await client.received() == 1
        shut_out(bed, "127.0.0.1")
        client.fetch(2)
        assert await client.received() == 2
        client.send(messages.OFFSET_FOR_LEADER_EPOCH, 2, 3, {"topics": []})
        assert await client.is_closed()
        assert bed.served == 0
        another = await bed.client()
        another.fetch(1)
        assert await another.is_closed(), "a new connection must not be served, whatever it asks for"
        assert bed.fetch.served == 2

    run(scenario)


def test_a_changed_password_closes_a_connection() -> None:
    guarded = Guarded()

    async def scenario(bed: Bed) -> None:
        client = await bed.client()
        await log_in(client)
        guarded.book.set("ada", "changed")
        guarded.security.on_metadata(guarded.book.image)
        assert await client.is_closed()
        await until(lambda: not guarded.security.connections)

    run(scenario, guarded.door)


def test_what_comes_instead_of_authentication_closes_the_connection() -> None:
    async def scenario(bed: Bed) -> None:
        for key in (messages.FETCH, messages.METADATA, messages.PRODUCE):
            client = await bed.client()
            client.send(key, messages.REQUESTS[key].first, 1, {"topics": [], "topic_data": [], "acks": 0})
            assert await client.is_closed()
        client = await bed.client()
        client.writer.write(struct.pack(">ihhih", 17 << 10, messages.SASL_AUTHENTICATE, 1, 1, 1) + b"c")
        assert await client.is_closed()

    run(scenario, Guarded().door)


def test_an_api_without_declared_permissions_is_refused_with_an_authorizer(monkeypatch: pytest.MonkeyPatch) -> None:
    left = {key: methods for key, methods in PERMISSIONS.items() if key != messages.LIST_OFFSETS}
    monkeypatch.setattr(module, "PERMISSIONS", left)

    async def scenario(bed: Bed) -> None:
        client = await bed.client()
        client.send(messages.OFFSET_FOR_LEADER_EPOCH, 2, 1, {"topics": []})
        assert await client.received() == 1
        client.send(messages.LIST_OFFSETS, 1, 2, {"replica_id": -1, "topics": []})
        assert await client.is_closed()

    run(scenario, Door("plaintext", authorizer=FakeAuthorizer()))


# Quotas


def test_the_time_of_the_event_loop_is_charged_told_and_then_the_client_is_not_read() -> None:
    """KIP-124, KIP-219. Group members are charged, and never held; a change of the quota ends the wait."""

    async def scenario(bed: Bed) -> None:
        bed.image = replace(bed.image, quotas={QuotaEntity(client_id="c"): {REQUEST_PERCENTAGE: 1.0}})
        bed.busy_s = 0.1  # of 10 ms a second
        client = await bed.client()
        beat = {"group_id": "g", "generation_id": 1, "member_id": "m"}
        for number in (1, 2):
            client.send(messages.HEARTBEAT, 3, number, beat)
            assert await client.received() == number
        client.send(messages.METADATA, 1, 3, {"topics": None})
        bed.answer = {"throttle_time_ms": 0}
        assert await client.received() == 3
        client.fetch(4)
        client.send(messages.METADATA, 1, 5, {"topics": None})
        await asyncio.sleep(0.1)
        assert bed.served == 3
        assert bed.counters.request("Kafka.Fetch").outcomes["NONE"] == 0
        bed.image = MetadataImage()
        assert [await client.received() for _ in range(2)] == [4, 5]

    run(scenario)


def test_a_new_connection_gets_no_records_before_the_debt_of_others_is_paid() -> None:
    """Else a client over its quota would connect again and again, and get a response of records each time."""

    async def scenario(bed: Bed) -> None:
        bed.image = replace(bed.image, quotas={QuotaEntity(client_id="c"): {CONSUMER_BYTE_RATE: 1_000.0}})
        quotas = bed.listener.quotas
        assert quotas is not None
        quotas.fetched(Caller(client_id="c"), 10_000)
        client = await bed.client()
        served = bed.fetch.served
        client.fetch(1)
        assert await client.received() == 1
        assert bed.fetch.served == served
        assert client.body[:4] >= struct.pack(">i", 8_900), "throttle_time_ms"

    run(scenario)


def test_a_new_connection_is_not_read_before_the_debt_of_others_is_paid() -> None:
    """Once it has said its client id: a producer would connect again and again, and have a batch appended each time."""

    async def scenario(bed: Bed) -> None:
        bed.image = replace(bed.image, quotas={QuotaEntity(client_id="c"): {PRODUCER_BYTE_RATE: 1_000.0}})
        quotas = bed.listener.quotas
        assert quotas is not None
        quotas.produced(Caller(client_id="c"), 10_000)
        client = await bed.client()
        client.send(messages.METADATA, 1, 1, {"topics": None})
        assert await client.received() == 1
        client.produce(2)
        await asyncio.sleep(0.05)
        assert bed.produce.begun == []
        bed.image = MetadataImage()
        await until(lambda: len(bed.produce.begun) == 1)

    run(scenario)


def test_a_new_connection_shares_the_debt_of_others() -> None:
    """It is served once, since only a request says which client it is, and then waits as the others do."""

    async def scenario(bed: Bed) -> None:
        bed.image = replace(bed.image, quotas={QuotaEntity(client_id="c"): {REQUEST_PERCENTAGE: 1.0}})
        bed.busy_s = 0.1
        first = await bed.client()
        first.send(messages.METADATA, 1, 1, {"topics": None})
        assert await first.received() == 1
        other, bed.busy_s = await bed.client(), 0.0
        other.send(messages.METADATA, 1, 1, {"topics": None})
        assert await other.received() == 1
        other.send(messages.METADATA, 1, 2, {"topics": None})
        await asyncio.sleep(0.1)
        assert bed.served == 2

    run(scenario)


class _TlsClient:
    """A client with a certificate that resumes the TLS session of its first connection."""

    def __init__(self, authority: CertificateAuthority, certificate: Path, version: ssl.TLSVersion, port: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False
        self._context.load_verify_locations(str(authority.ca_file))
        self._context.load_cert_chain(str(certificate))
        self._context.minimum_version = self._context.maximum_version = version
        self._port = port
        self._session: ssl.SSLSession | None = None
        self.is_resumed = False

    async def is_served(self) -> bool:
        """Return whether a new connection's first request is answered."""
        return await asyncio.to_thread(self._is_served)

    def _is_served(self) -> bool:
        plain = socket.create_connection(("127.0.0.1", self._port), timeout=60)
        try:
            with self._context.wrap_socket(plain, session=self._session) as connection:
                self.is_resumed = bool(connection.session_reused)
                connection.sendall(struct.pack(">ihhih", 11, messages.API_VERSIONS, 0, 7, 1) + b"c")
                answer = connection.recv(8)
                self._session = self._session or connection.session
                return answer[4:] == struct.pack(">i", 7)
        except (ssl.SSLError, ConnectionError):
            return False
        finally:
            plain.close()


def test_no_session_is_resumed_with_a_certificate_that_has_expired_or_was_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = CertificateAuthority(tmp_path)
    server, lasting = authority.issue("server"), authority.issue("lasting")
    files = PemFiles(Names("ca", "certificate", "key"), str(authority.ca_file), str(server))
    list_file = revoke(authority, tmp_path / "crl.pem")
    revoked = RevocationLists(str(list_file), str(authority.ca_file))
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data"})
    security = ClientSecurity(config, lambda: Book().image, Hands(), Counters(), revoked)
    contexts = KafkaContexts(FreshPem(files), files, ask=True)

    async def scenario(bed: Bed) -> None:
        versions = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
        short = authority.issue("short", lasts=timedelta(hours=1))
        clients = [
            _TlsClient(authority, certificate, version, bed.listener.port)
            for certificate in (short, lasting)
            for version in versions
        ]
        for resumes in (False, True):
            assert [await each.is_served() for each in clients] == [True] * 4
            assert [each.is_resumed for each in clients] == [resumes, False] * 2, "with TLS 1.3 it never is"
        monkeypatch.setattr("broker.net.revocation.datetime", InTwoHours)
        assert [await each.is_served() for each in clients] == [False, False, True, True]
        revoke(authority, list_file, lasting)
        revoked.refresh()
        assert [await each.is_served() for each in clients] == [False] * 4

    run(scenario, Door("SSL", security=security, contexts=contexts))
