"""Revoked certificates: which lists count, and that their holders are refused at every listener."""

from __future__ import annotations

import asyncio
import datetime
import errno
import logging
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.x509.name import _ASN1Type
from grpc import aio
from grpc.experimental import session_cache

from broker.clock import SystemClock
from broker.config.config import BrokerConfig
from broker.kafka.sasl import NotAdmitted, door_of
from broker.net import interceptors, revocation
from broker.net.interceptors import NodesOnly
from broker.net.listeners import Listener
from broker.net.revocation import RevocationLists
from broker.observability.counters import Counters
from broker.security.client_listener import ClientSecurity
from broker.security.identify import AUTHENTICATE, Identify, Tokens
from raftlog._client.connections import from_grpc
from raftlog.errors import AuthenticationFailed, InvalidConfig
from raftlog.testing.certificates import CertificateAuthority
from raftlog.v1.security_pb2 import AuthenticateResponse
from tests.support.revocation import InTwoHours, revoke
from tests.support.scram_parts import Book, Hands

WAIT_S = 60.0
DAMAGED = x509.UnrecognizedExtension(x509.CRLNumber.oid, b"no number")
"""Signed all the same, and not parsed before it is asked for."""


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    made = CertificateAuthority(tmp_path / "ca")
    for name in ("server", "alice", "mallory"):
        made.issue(name)
    return made


def pem(authority: CertificateAuthority, name: str) -> Path:
    return authority.directory / f"{name}.pem"


def lists(authority: CertificateAuthority, file: Path) -> RevocationLists:
    return RevocationLists(str(file), str(authority.ca_file))


def test_the_certificates_of_the_lists_are_revoked_and_others_are_not(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    mallory, alice = pem(authority, "mallory").read_bytes(), pem(authority, "alice").read_bytes()
    file = revoke(authority, tmp_path / "crl.pem", pem(authority, "mallory"))
    found = lists(authority, file)
    for _ in range(2):  # the second time from what is remembered
        assert found.is_revoked(mallory)
        assert found.is_revoked(ssl.PEM_cert_to_DER_cert(mallory[: mallory.index(b"-----END CERT") + 25].decode()))
        assert not found.is_revoked(alice)
        assert not found.is_revoked(b"")
        assert found.is_revoked(b"damaged")
    revoke(authority, file, pem(authority, "alice"))
    found.refresh()
    assert (found.is_revoked(mallory), found.is_revoked(alice)) == (False, True)


def test_a_certificate_of_another_ca_with_the_same_number_is_not_revoked(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    other = CertificateAuthority(tmp_path / "other", "another CA")
    both = tmp_path / "both.pem"
    both.write_bytes(authority.ca_file.read_bytes() + other.ca_file.read_bytes())
    file = revoke(other, tmp_path / "crl.pem", pem(authority, "mallory"))
    assert not RevocationLists(str(file), str(both)).is_revoked(pem(authority, "mallory").read_bytes())


def test_a_list_that_no_trusted_ca_has_signed_is_refused(authority: CertificateAuthority, tmp_path: Path) -> None:
    same_name = CertificateAuthority(tmp_path / "other")
    file = revoke(same_name, tmp_path / "crl.pem", pem(authority, "alice"))
    with pytest.raises(InvalidConfig, match=r"no CA in ssl\.truststore\.location"):
        lists(authority, file)


def test_a_list_of_some_certificates_only_is_refused(authority: CertificateAuthority, tmp_path: Path) -> None:
    file = revoke(authority, tmp_path / "crl.pem", extension=x509.DeltaCRLIndicator(1))
    with pytest.raises(InvalidConfig, match="critical extension"):
        lists(authority, file)


@pytest.mark.parametrize("content", [b"", b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n"])
def test_a_file_without_a_valid_list_ends_the_start_and_later_keeps_the_previous_lists(
    content: bytes, authority: CertificateAuthority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "crl.pem"
    file.write_bytes(content)
    with pytest.raises(InvalidConfig, match=r"ssl\.crl\.location"):
        lists(authority, file)
    found = lists(authority, revoke(authority, file, pem(authority, "mallory")))
    file.unlink()
    file.write_bytes(content)
    found.refresh()
    assert found.is_revoked(pem(authority, "mallory").read_bytes())
    assert "the previous ones stay in use" in caplog.text


def test_a_signed_list_with_a_damaged_part_ends_the_start_and_later_keeps_the_previous_lists(
    authority: CertificateAuthority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = revoke(authority, tmp_path / "crl.pem", extension=DAMAGED)
    with pytest.raises(InvalidConfig, match=r"ssl\.crl\.location=.*crl\.pem.* is damaged \(error parsing"):
        lists(authority, file)
    found = lists(authority, revoke(authority, file, pem(authority, "mallory")))
    revoke(authority, file, extension=DAMAGED)
    for _ in range(3):
        found.refresh()
    assert found.is_revoked(pem(authority, "mallory").read_bytes())
    assert caplog.text.count("the previous ones stay in use") == 1


def test_a_list_that_could_not_be_read_for_a_moment_is_read_later(
    authority: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mallory = pem(authority, "mallory")
    found = lists(authority, revoke(authority, tmp_path / "crl.pem"))
    revoke(authority, tmp_path / "crl.pem", mallory)

    def no_file(*args: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(revocation, "open", no_file, raising=False)
        for _ in range(3):
            found.refresh()
    assert not found.is_revoked(mallory.read_bytes())
    assert caplog.text.count("Too many open files") == 1
    found.refresh()
    assert found.is_revoked(mallory.read_bytes())


def test_a_list_whose_issuer_has_other_types_of_strings_counts(authority: CertificateAuthority, tmp_path: Path) -> None:
    (ca,) = x509.load_pem_x509_certificates(authority.ca_file.read_bytes())
    issuer = x509.Name([x509.NameAttribute(each.oid, each.value, _ASN1Type.PrintableString) for each in ca.subject])
    assert issuer.public_bytes() != ca.subject.public_bytes()
    mallory = pem(authority, "mallory")
    file = revoke(authority, tmp_path / "crl.pem", mallory, issuer=issuer)
    assert lists(authority, file).is_revoked(mallory.read_bytes())


def test_a_slow_reading_of_an_older_list_does_not_replace_a_newer_one(
    authority: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mallory = pem(authority, "mallory")
    file = revoke(authority, tmp_path / "crl.pem")
    found = lists(authority, file)
    read_old, go_on = threading.Event(), threading.Event()
    content_of = revocation._content

    def first_is_slow(named: str, path: str) -> bytes:
        content = content_of(named, path)
        if path == str(file) and not read_old.is_set():
            read_old.set()
            assert go_on.wait(WAIT_S)
        return content

    monkeypatch.setattr(revocation, "_content", first_is_slow)
    revoke(authority, file, pem(authority, "alice"))
    slow = threading.Thread(target=found.refresh)
    slow.start()
    assert read_old.wait(WAIT_S)
    revoke(authority, file, mallory)
    newer = threading.Thread(target=found.refresh)
    newer.start()
    newer.join(0.5)  # long enough to finish, if it does not wait for the slow one
    go_on.set()
    for each in (slow, newer):
        each.join(WAIT_S)
    assert found.is_revoked(mallory.read_bytes()), "the older list must not replace the newer one"
    assert not found.is_revoked(pem(authority, "alice").read_bytes())


def test_an_overdue_list_still_counts(
    authority: CertificateAuthority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = revoke(authority, tmp_path / "crl.pem", pem(authority, "mallory"), lasts=datetime.timedelta(hours=1))
    with caplog.at_level(logging.WARNING):
        assert lists(authority, file).is_revoked(pem(authority, "mallory").read_bytes())
    assert "overdue" in caplog.text


# At the listeners


@asynccontextmanager
async def serving(authority: CertificateAuthority, interceptor: aio.ServerInterceptor) -> AsyncIterator[int]:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async def stream(requests: Any, context: Any) -> None:
        async for request in requests:
            await context.write(request)

    async def log_in(request: bytes, context: Any) -> AuthenticateResponse:
        return AuthenticateResponse(message=request)

    running = aio.server(interceptors=[interceptor])
    methods: dict[str, Any] = {
        "Call": grpc.unary_unary_rpc_method_handler(echo),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    logins: dict[str, Any] = {
        "Authenticate": grpc.unary_unary_rpc_method_handler(log_in, None, lambda answer: answer.message)
    }
    running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", methods),))
    service = AUTHENTICATE.split("/")[1]
    running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, logins),))
    own = pem(authority, "server").read_bytes()
    ca = authority.ca_file.read_bytes()
    credentials = grpc.ssl_server_credentials([(own, own)], ca, require_client_auth=True)
    port = running.add_secure_port("127.0.0.1:0", credentials)
    await running.start()
    try:
        yield port
    finally:
        await running.stop(0)


def channel(authority: CertificateAuthority, port: int, name: str) -> aio.Channel:
    own = pem(authority, name).read_bytes()
    credentials = grpc.ssl_channel_credentials(authority.ca_file.read_bytes(), own, own)
    return aio.secure_channel(f"127.0.0.1:{port}", credentials)


async def refusal(call: Any, why: str = "revoked") -> AuthenticationFailed:
    with pytest.raises(aio.AioRpcError) as caught:
        await asyncio.wait_for(call, WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    told = from_grpc(caught.value, "broker")
    assert isinstance(told, AuthenticationFailed)
    assert why in str(told)
    return told


async def test_a_client_with_a_revoked_certificate_is_refused_and_its_open_streams_end(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    file = revoke(authority, tmp_path / "crl.pem")
    revoked = lists(authority, file)
    book, counters = Book(), Counters()
    identify = Identify(Tokens(), book.users, Hands(), counters, required=False, certificates=True, revoked=revoked)
    async with (
        serving(authority, identify) as port,
        channel(authority, port, "alice") as honest,
        channel(authority, port, "mallory") as theirs,
    ):
        streams = []
        for each in (honest, theirs):
            method: Any = each.stream_stream("/t.T/Stream")
            streams.append(method())
            await streams[-1].write(b"x")
            assert await asyncio.wait_for(streams[-1].read(), WAIT_S) == b"x"
        assert identify.check() == identify.count_streams() == 0
        revoke(authority, file, pem(authority, "mallory"))
        revoked.refresh()
        assert identify.check() == 1
        await refusal(streams[1].read())
        for name in ("/t.T/Call", AUTHENTICATE):
            unary: Any = theirs.unary_unary(name)
            await refusal(unary(b"x", timeout=WAIT_S))
            unary = honest.unary_unary(name)
            assert await unary(b"x", timeout=WAIT_S) == b"x"
        assert counters.authentications == {("mTLS", "failure"): 2}
        await streams[0].write(b"y")
        assert await asyncio.wait_for(streams[0].read(), WAIT_S) == b"y"
        streams[0].cancel()


async def test_a_node_with_a_revoked_certificate_is_refused_and_others_are_served_although_a_new_list_is_damaged(
    authority: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revocation, "LOOK_EVERY_S", 0.0)
    for node_id in (1, 2):
        authority.issue(f"node-{node_id}", node_ids=[node_id])
    file = revoke(authority, tmp_path / "crl.pem", pem(authority, "node-2"))
    async with (
        serving(authority, NodesOnly(lists(authority, file))) as port,
        channel(authority, port, "node-1") as ours,
        channel(authority, port, "node-2") as theirs,
    ):
        for extension in (None, DAMAGED):
            if extension is not None:
                revoke(authority, file, extension=extension)
            unary: Any = ours.unary_unary("/t.T/Call")
            assert await unary(b"x", timeout=WAIT_S) == b"x"
            unary = theirs.unary_unary("/t.T/Call")
            await refusal(unary(b"x", timeout=WAIT_S))


def closed_lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the lines of the log that tell of closed connections."""
    return [each for each in caplog.records if "closed connections of nodes" in each.getMessage()]


@pytest.mark.parametrize("both", [False, True])
async def test_the_open_streams_of_a_node_end_when_its_certificate_is_revoked(
    both: bool,
    authority: CertificateAuthority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`both`: TLS and plaintext at one port, through `EitherFront`."""
    for module in (revocation, interceptors):
        monkeypatch.setattr(module, "LOOK_EVERY_S", 0.01)
    for node_id in (1, 2):
        authority.issue(f"node-{node_id}", node_ids=[node_id])
    file = revoke(authority, tmp_path / "crl.pem")
    nodes = NodesOnly(lists(authority, file))
    ended: list[str] = []

    async def stream(requests: Any, context: Any) -> None:
        try:
            async for request in requests:
                await context.write(request)
        finally:
            ended.append(context.peer())

    server = aio.server(interceptors=[nodes])
    methods: dict[str, Any] = {"Stream": grpc.stream_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", methods),))
    own, ca = pem(authority, "server").read_bytes(), authority.ca_file.read_bytes()
    credentials = grpc.ssl_server_credentials([(own, own)], ca, require_client_auth=True)
    listener = Listener(server, "127.0.0.1", 0, credentials, both=both)
    await server.start()
    await listener.open()
    watching = asyncio.create_task(nodes.watch(listener.end_connections))
    try:
        async with (
            channel(authority, listener.port, "node-1") as ours,
            channel(authority, listener.port, "node-2") as theirs,
        ):
            streams: list[Any] = []
            for each in (ours, theirs, theirs):
                method: Any = each.stream_stream("/t.T/Stream")
                streams.append(method())
                await streams[-1].write(b"x")
                assert await asyncio.wait_for(streams[-1].read(), WAIT_S) == b"x"
            assert nodes.followed == 2
            revoke(authority, file, pem(authority, "node-2"))
            for each in streams[1:]:
                with pytest.raises(aio.AioRpcError) as caught:
                    await asyncio.wait_for(each.read(), WAIT_S)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            async with asyncio.timeout(WAIT_S):
                code = grpc.StatusCode.UNAVAILABLE  # perhaps on the connection that has just been closed
                while code is grpc.StatusCode.UNAVAILABLE:
                    method = theirs.stream_stream("/t.T/Stream")
                    code = await method().code()
                assert code is grpc.StatusCode.UNAUTHENTICATED
                while nodes.followed > 1:  # noqa: ASYNC110 # gRPC ends the calls without an event
                    await asyncio.sleep(0.01)
            assert len(ended) == 2, "and is followed no longer"
            async with asyncio.timeout(WAIT_S):
                while not closed_lines(caplog):  # noqa: ASYNC110 # it comes once all have been closed
                    await asyncio.sleep(0.01)
            await streams[0].write(b"y")
            assert await asyncio.wait_for(streams[0].read(), WAIT_S) == b"y"
            streams[0].cancel()
    finally:
        watching.cancel()
        await server.stop(0)
        await listener.close()
    (closed,) = closed_lines(caplog)
    assert vars(closed)["nodes"] == [2]


class _Context:
    """The part of a call's context that identifies its caller."""

    def __init__(self, certificate: bytes) -> None:
        self._certificate = certificate

    def auth_context(self) -> dict[str, list[bytes]]:
        return {
            "transport_security_type": [b"ssl"],
            "x509_pem_cert": [self._certificate],
            "peer_uri": [b"raftlog://node/2"],
        }

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4321"


@asynccontextmanager
async def _open_call(nodes: NodesOnly, certificate: bytes) -> AsyncIterator[None]:
    """Hold a call of node 2 open."""
    admitted, leave = asyncio.Event(), asyncio.Event()

    async def behavior(request: Any, context: Any) -> None:
        admitted.set()
        await leave.wait()

    handler: Any = nodes.rewrite("/t.T/Stream", grpc.stream_stream_rpc_method_handler(behavior))
    call = asyncio.create_task(handler.stream_stream(None, _Context(certificate)))
    await asyncio.wait_for(admitted.wait(), WAIT_S)
    try:
        yield
    finally:
        leave.set()
        await call


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "too many open files"), RuntimeError("can't start new thread")]
)
async def test_connections_that_could_not_be_closed_are_closed_later(
    error: Exception, authority: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptors, "LOOK_EVERY_S", 0.01)
    file = revoke(authority, tmp_path / "crl.pem")
    found = lists(authority, file)
    nodes = NodesOnly(found)
    failures, closed = [error], asyncio.Event()

    async def end_connections(peers: Any) -> None:
        assert list(peers) == ["ipv4:127.0.0.1:4321"]
        if failures:
            raise failures.pop()
        closed.set()

    async with _open_call(nodes, pem(authority, "mallory").read_bytes()):
        revoke(authority, file, pem(authority, "mallory"))
        found.refresh()
        watching = asyncio.create_task(nodes.watch(end_connections))
        waiting = asyncio.create_task(closed.wait())
        try:
            await asyncio.wait({watching, waiting}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            assert closed.is_set()
        finally:
            waiting.cancel()
            watching.cancel()


async def test_a_call_that_comes_while_a_list_is_read_is_ended_when_the_list_counts(
    authority: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = revoke(authority, tmp_path / "crl.pem")
    found = lists(authority, file)
    nodes = NodesOnly(found)
    closed: list[str] = []

    async def end_connections(peers: Any) -> None:
        closed.extend(peers)

    begun, go_on = threading.Event(), threading.Event()
    read = found._read

    def held() -> Any:
        begun.set()
        assert go_on.wait(WAIT_S)
        return read()

    monkeypatch.setattr(found, "_read", held)
    revoke(authority, file, pem(authority, "mallory"))
    reading = asyncio.create_task(asyncio.to_thread(found.refresh))
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    monkeypatch.setattr(revocation, "LOOK_EVERY_S", WAIT_S)  # the call does not look by itself
    async with _open_call(nodes, pem(authority, "mallory").read_bytes()):
        await nodes.end_revoked(end_connections)
        assert not closed, "the previous list counts"
        go_on.set()
        await reading
        await nodes.end_revoked(end_connections)
        assert closed == ["ipv4:127.0.0.1:4321"]


@pytest.mark.parametrize("both", [False, True])
async def test_no_session_is_resumed_with_a_certificate_that_has_expired_or_was_revoked(
    both: bool, authority: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the listener for nodes; with `both` at that for clients, through `EitherFront`."""
    file = revoke(authority, tmp_path / "crl.pem")
    revoked = lists(authority, file)
    interceptor: aio.ServerInterceptor = NodesOnly(revoked)
    if both:
        users = Book().users
        interceptor = Identify(Tokens(), users, Hands(), Counters(), required=False, certificates=True, revoked=revoked)

    async def call(request: bytes, context: Any) -> bytes:
        return b"".join(context.auth_context()["ssl_session_reused"])

    server = aio.server(interceptors=[interceptor])
    methods: dict[str, Any] = {"Call": grpc.unary_unary_rpc_method_handler(call)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", methods),))
    own, ca = pem(authority, "server").read_bytes(), authority.ca_file.read_bytes()
    credentials = grpc.ssl_server_credentials([(own, own)], ca, require_client_auth=True)
    listener = Listener(server, "127.0.0.1", 0, credentials, both=both)
    await server.start()
    await listener.open()
    new_cache: Any = session_cache.ssl_session_cache_lru
    sessions = {name: new_cache(1) for name in ("short", "lasting")}

    async def answer_to(name: str) -> bytes:
        """Return what a new connection's first call is answered with."""
        own = pem(authority, name).read_bytes()
        options = [("grpc.ssl_session_cache", sessions[name]), ("grpc.use_local_subchannel_pool", 1)]
        host = f"localhost:{listener.port}"  # no sessions are kept of addresses
        async with aio.secure_channel(host, grpc.ssl_channel_credentials(ca, own, own), options) as opened:
            unary: Any = opened.unary_unary("/t.T/Call")
            return bytes(await unary(b"", timeout=WAIT_S))

    try:
        authority.issue("lasting", node_ids=[1])
        authority.issue("short", node_ids=[2], lasts=datetime.timedelta(hours=1))
        for is_resumed in (b"false", b"true"):
            assert [await answer_to(name) for name in sessions] == [is_resumed] * 2
        monkeypatch.setattr("broker.net.revocation.datetime", InTwoHours)
        assert await answer_to("lasting") == b"true"
        await refusal(answer_to("short"), "has expired")
        revoke(authority, file, pem(authority, "lasting"))
        revoked.refresh()
        await refusal(answer_to("lasting"))
    finally:
        await server.stop(0)
        await listener.close()


class _Tls:
    """The part of `ssl.SSLObject` that a door looks at."""

    def __init__(self, file: Path) -> None:
        text = file.read_text()
        self._der = ssl.PEM_cert_to_DER_cert(text[: text.index("-----END CERT") + 25])

    def getpeercert(self, binary_form: bool = False) -> Any:
        return self._der if binary_form else {"subject": ((("commonName", "someone"),),)}


def test_a_kafka_client_with_a_revoked_certificate_is_not_admitted_or_disconnected(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    file = revoke(authority, tmp_path / "crl.pem")
    revoked = lists(authority, file)
    keys = {"node.id": 1, "log.dirs": "/data", "listeners": "127.0.0.1:1,kafka://127.0.0.1:2"}
    config, book = BrokerConfig.from_values(keys), Book()
    security = ClientSecurity(config, lambda: book.image, Hands(), Counters(), revoked)
    door = door_of(config, security, None, SystemClock(), Counters())
    tls: Any = _Tls(pem(authority, "mallory"))
    session = door.session("10.0.0.1", tls)
    ended = []

    class Connection:
        login = None
        certificate = session.certificate

        def end(self) -> None:
            ended.append(self)

    security.connections.add(Connection())
    security._end_streams()
    assert (ended, security.count_authenticated()) == ([], 0)
    revoke(authority, file, pem(authority, "mallory"))
    revoked.refresh()
    security._end_streams()
    assert len(ended) == 1
    with pytest.raises(NotAdmitted, match="revoked"):
        door.session("10.0.0.1", tls)
    assert door.session("10.0.0.1", _Tls(pem(authority, "alice"))).is_admitted  # type: ignore[arg-type] # as above
