"""The clients' settings for TLS, their errors when it fails, and new certificates."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
import socket
import ssl
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc import aio

import raftlog.aio
from raftlog import Admin, Consumer, Producer, StagedWriter
from raftlog._client import connections as client_connections
from raftlog._client.connections import CertificateRefused, Connections, TlsFailed, from_grpc, in_words, unavailable
from raftlog._client.options import AdminOptions, ConsumerOptions, ProducerOptions
from raftlog._client.security import ChannelTls
from raftlog._client.stage_options import StageOptions
from raftlog.errors import BrokerUnavailable, InvalidConfig
from raftlog.testing import CertificateAuthority

NOBODY = "127.0.0.1:1"
KINDS: list[Any] = [AdminOptions, ConsumerOptions, ProducerOptions]
CLIENTS: list[Any] = [Admin, Consumer, Producer, lambda bootstrap, **more: StagedWriter(bootstrap, "sink", **more)]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("other-ca"), "another CA")


@pytest.mark.parametrize("kind", KINDS)
def test_plaintext_is_the_default(kind: Any) -> None:
    assert kind.make(None, {}).pem is None
    assert kind.make({"security.protocol": "PLAINTEXT"}, {}).pem is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spelling", ["ssl", "SSL"])
def test_ssl_takes_the_files(kind: Any, spelling: str) -> None:
    pem = kind.make({"ssl.ca.location": "ca", "ssl.certificate.location": "c"}, {"security_protocol": spelling}).pem
    assert (pem.ca, pem.certificate, pem.key_file) == ("ca", "c", "c")


def test_stages_take_them_as_producers_do() -> None:
    options = StageOptions.make({"security.protocol": "ssl", "ssl.ca.location": "ca"}, {})
    assert options.producer.pem is not None
    assert options.producer.pem.ca == "ca"


@pytest.mark.parametrize("name", ["ssl.ca.location", "ssl.certificate.location", "ssl.key.location"])
def test_files_without_ssl_are_refused_since_nothing_would_be_encrypted(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{name}='x' has no effect without security.protocol=ssl"):
        AdminOptions.make({name: "x"}, {})


@pytest.mark.parametrize("client", CLIENTS)
def test_a_file_that_is_not_there_is_said_at_once(client: Any, tmp_path: Path) -> None:
    settings = {"security.protocol": "ssl", "ssl.ca.location": str(tmp_path / "ca.pem")}
    with pytest.raises(InvalidConfig, match=r"ssl.ca.location='.*ca.pem' cannot be read: No such file"):
        client(NOBODY, config=settings)


def test_a_key_without_its_certificate_is_refused(authority: CertificateAuthority) -> None:
    settings = {"security.protocol": "ssl", "ssl.key.location": str(authority.issue("k"))}
    with pytest.raises(InvalidConfig, match=r"ssl.key.location=.* without ssl.certificate.location"):
        Admin(NOBODY, config=settings)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ssl.truststore.location", "ssl.ca.location names a PEM file"),
        ("ssl.keystore.location", "ssl.certificate.location and ssl.key.location"),
        ("ssl_key_password", "ssl.key.password.location names a file"),
        ("ssl.endpoint.identification.algorithm", "is always checked"),
        ("sasl.jaas.config", "sasl.username and sasl.password.location"),
        ("sasl.kerberos.service.name", "sasl_ssl with sasl.username"),
        ("security.providers", "security.protocol=ssl"),
    ],
)
def test_what_kafka_has_besides_is_answered_with_what_there_is(name: str, instead: str) -> None:
    with pytest.raises(InvalidConfig, match=f"not in this version: {name}; leave it out: .*{re.escape(instead)}"):
        Producer(NOBODY, config={name: "x"})


def test_a_typing_error_is_answered_as_one() -> None:
    with pytest.raises(InvalidConfig, match=r"unknown admin option 'ssl.ca.locatoin'; did you mean 'ssl.ca.location'"):
        Admin(NOBODY, config={"ssl.ca.locatoin": "x"})


# Channels


class _Certificates:
    """Stands for `ChannelTls`: channels are counted, and `version` is set by hand."""

    def __init__(self) -> None:
        self.version = 1
        self.opened: list[_Channel] = []

    def open(self, address: str, options: object) -> _Channel:
        self.opened.append(_Channel())
        return self.opened[-1]


class _Channel:
    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True


async def test_channels_are_opened_anew_when_the_certificates_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connections, "_LAST_CALLS_S", 0.0)
    tls = _Certificates()
    connections = Connections(cast(ChannelTls, tls))
    first = connections.channel("a:1")
    assert connections.channel("a:1") is first
    tls.version = 2
    second = connections.channel("a:1")
    assert second is not first
    assert not cast(Any, first).closed, "the former channel must stay open for the calls on it"
    tls.version = 3
    connections.channel("b:1")
    await asyncio.sleep(0)
    assert [channel.closed for channel in tls.opened] == [True, False, False]
    await connections.close()
    assert all(channel.closed for channel in tls.opened)


def _credentials(authority: CertificateAuthority, file: Path, *, ask: bool) -> grpc.ServerCredentials:
    pem, roots = file.read_bytes(), authority.ca_file.read_bytes()
    return grpc.ssl_server_credentials([(pem, pem)], roots if ask else None, ask)


@asynccontextmanager
async def _server(authority: CertificateAuthority | None, file: Path | None, *, ask: bool) -> AsyncIterator[str]:
    """A gRPC server that answers nothing but UNIMPLEMENTED."""
    server = aio.server()
    if authority is None or file is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", _credentials(authority, file, ask=ask))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def _what_is_said(address: str, settings: dict[str, str]) -> str:
    pem = AdminOptions.make(settings, {}).pem
    connections = Connections(ChannelTls(pem) if pem is not None else None)
    try:
        ask: Any = connections.channel(address).unary_unary("/none/none")
        await ask(b"", timeout=30)
    except aio.AioRpcError as error:
        return str(from_grpc(error, address))
    finally:
        await connections.close()
    raise AssertionError("a call to a broker that does not serve has succeeded")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("all is well", "does not know this call"),
        ("another CA", "its certificate is not from a CA that is trusted here"),
        ("another CA of the same name", "its certificate is not from a CA that is trusted here"),
        ("expired", "its certificate has expired"),
        ("another name", "its certificate does not name this address"),
        ("plaintext to TLS", "it closed the new connection; is the port right? A listener for Kafka clients"),
        ("plaintext to TLS", "a listener with TLS to plaintext clients (security.protocol)"),
        ("TLS to plaintext", "it does not speak TLS; is security.protocol right, and the port?"),
        ("no certificate", "clients without a certificate that it trusts (ssl.certificate.location)"),
        ("certificate of another CA", "clients without a certificate that it trusts (ssl.certificate.location)"),
    ],
)
def test_what_goes_wrong_is_said_in_words(
    authority: CertificateAuthority, stranger: CertificateAuthority, tmp_path: Path, case: str, words: str
) -> None:
    settings = authority.client_config()
    file = authority.issue("server")
    ask = False
    match case:
        case "another CA of the same name":
            twin = CertificateAuthority(tmp_path)
            settings = {"security.protocol": "ssl", "ssl.ca.location": str(twin.ca_file)}
        case "another CA":
            settings = {"security.protocol": "ssl", "ssl.ca.location": str(stranger.ca_file)}
        case "expired":
            file = authority.issue("server", lasts=-datetime.timedelta(hours=1))
        case "another name":
            file = authority.issue("server", hosts=["broker.example"])
        case "plaintext to TLS":
            settings = {}
        case "no certificate":
            ask, settings = True, {"security.protocol": "ssl", "ssl.ca.location": str(authority.ca_file)}
        case "certificate of another CA":
            ask = True
            settings = {**stranger.client_config(), "ssl.ca.location": str(authority.ca_file)}

    async def scenario() -> str:
        secured = case != "TLS to plaintext"
        async with _server(authority if secured else None, file if secured else None, ask=ask) as address:
            return await _what_is_said(address, settings)

    assert words in asyncio.run(scenario())


# A certificate that brokers refuse

OTHERS = "another CA"


def _client_files(authority: CertificateAuthority, certificate: Path | None, ca: Path | None = None) -> dict[str, str]:
    files = {"security.protocol": "ssl", "ssl.ca.location": str(ca or authority.ca_file)}
    return files if certificate is None else {**files, "ssl.certificate.location": str(certificate)}


def _tls_of(settings: dict[str, str]) -> ChannelTls:
    pem = AdminOptions.make(settings, {}).pem
    assert pem is not None
    return ChannelTls(pem)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("trusted", ""),
        ("none", "it asks for a certificate, and this client has none; set ssl.certificate.location"),
        (OTHERS, "it refuses this client's certificate: no CA in ssl.ca.location has issued it; use one of a CA"),
        ("expired", "it refuses this client's certificate: it has expired"),
        ("of a server", "it refuses this client's certificate: it is not issued for clients"),
        ("of a CA that only the client knows", "it refuses this client's certificate: they do not say why"),
    ],
)
async def test_why_a_broker_refuses_a_certificate(
    authority: CertificateAuthority, stranger: CertificateAuthority, tmp_path: Path, case: str, words: str
) -> None:
    issue: dict[str, Any] = {
        "trusted": lambda: authority.issue("ada", hosts=()),
        "none": lambda: None,
        OTHERS: lambda: stranger.issue("ada", hosts=()),
        "expired": lambda: authority.issue("ada", hosts=(), lasts=-datetime.timedelta(hours=1)),
        "of a server": lambda: authority.issue("ada", servers_only=True),
        "of a CA that only the client knows": lambda: stranger.issue("ada", hosts=()),
    }
    ca = tmp_path / "both.pem"
    ca.write_bytes(authority.ca_file.read_bytes() + stranger.ca_file.read_bytes())
    files = _client_files(authority, issue[case](), ca if case == "of a CA that only the client knows" else None)
    async with _server(authority, authority.issue("server"), ask=True) as address:
        found = await _tls_of(files).why_refused(address)
    assert found.startswith(words)
    assert bool(found) == bool(words), f"a certificate that the broker takes is called refused: {found}"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("trusted", ""),
        ("none", "it asks for a certificate"),
        (OTHERS, "brokers do not trust its CA"),
        ("expired", "it has expired"),
    ],
)
def test_why_a_server_refuses_a_certificate_that_says_so(
    authority: CertificateAuthority, stranger: CertificateAuthority, case: str, words: str
) -> None:
    """As proxies before brokers do, with TLS's alert after the handshake."""
    issue: dict[str, Any] = {
        "trusted": lambda: authority.issue("ada", hosts=()),
        "none": lambda: None,
        OTHERS: lambda: stranger.issue("ada", hosts=()),
        "expired": lambda: authority.issue("ada", hosts=(), lasts=-datetime.timedelta(hours=1)),
    }
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca_file)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(authority.issue("server"))
    context.set_alpn_protocols(["h2"])

    def serve(listening: socket.socket) -> None:
        accepted, _ = listening.accept()
        # OpenSSL sends the alert before the error is raised; asyncio would drop it.
        with accepted, contextlib.suppress(OSError), context.wrap_socket(accepted, server_side=True) as opened:
            opened.sendall(b"an HTTP/2 frame")
            opened.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, listening)
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        found = asyncio.run(_tls_of(_client_files(authority, issue[case]())).why_refused(address))
        served.result(60)
    assert words in found
    assert bool(found) == bool(words), f"a certificate that the server takes is called refused: {found}"


async def test_other_failures_are_no_refusal_of_a_certificate(
    authority: CertificateAuthority, stranger: CertificateAuthority
) -> None:
    own = _tls_of(_client_files(authority, authority.issue("ada", hosts=())))
    async with _server(None, None, ask=False) as plaintext:
        assert await own.why_refused(plaintext) == ""
    async with _server(stranger, stranger.issue("server"), ask=True) as not_trusted:
        assert await own.why_refused(not_trusted) == ""
    assert await own.why_refused(NOBODY) == ""


@pytest.mark.parametrize("certificate", ["none", OTHERS])
async def test_clients_whose_certificate_is_refused_learn_that_at_once(
    authority: CertificateAuthority, stranger: CertificateAuthority, certificate: str
) -> None:
    settings = _client_files(authority, None if certificate == "none" else stranger.issue("ada", hosts=()))
    words = r"\(no connection to 127.*: it (asks for a certificate|refuses this client's certificate)"
    async with _server(authority, authority.issue("server"), ask=True) as address, asyncio.timeout(60):
        for kind in (raftlog.aio.Admin, raftlog.aio.Producer):
            more = {"default.api.timeout.ms": 600_000} if kind is raftlog.aio.Admin else {"max.block.ms": 600_000}
            client: Any = kind(address, config={**settings, **more})
            async with client:
                asked = client.describe_cluster() if kind is raftlog.aio.Admin else client.send("t", b"x")
                with pytest.raises(CertificateRefused, match=words) as refused:
                    await asked
            assert refused.value.why.startswith("no CA in ssl.ca.location" if certificate == OTHERS else "")


async def test_a_broker_that_is_down_does_not_hide_a_refusal(
    authority: CertificateAuthority, stranger: CertificateAuthority
) -> None:
    connections = Connections(_tls_of(_client_files(authority, stranger.issue("ada", hosts=()))))
    async with _server(authority, authority.issue("server"), ask=True) as address:
        closed = f"no connection to {address}: {in_words('failed to connect to all addresses: Socket closed')}"
        for other, is_final in (("connection refused", True), ("it does not answer", False)):
            error = await connections.unavailable([address, NOBODY], [closed, f"no connection to {NOBODY}: {other}"])
            assert isinstance(error, CertificateRefused) == is_final
            assert "no CA in ssl.ca.location has issued it" in str(error)
            assert other in str(error)
    await connections.close()


def test_a_producer_does_not_wait_for_ever_for_a_ca_that_is_wrong(
    authority: CertificateAuthority, stranger: CertificateAuthority
) -> None:
    settings = {**stranger.client_config(), "max.block.ms": 600_000}

    async def scenario() -> None:
        async with (
            _server(authority, authority.issue("server"), ask=False) as address,
            raftlog.aio.Producer(address, config=settings) as producer,
            asyncio.timeout(60),
        ):
            with pytest.raises(BrokerUnavailable, match="not from a CA that is trusted here"):
                await producer.send("t", b"x")

    asyncio.run(scenario())


def test_tls_that_fails_everywhere_is_not_waited_for() -> None:
    reason = f"no connection to a:1: {in_words('CERTIFICATE_VERIFY_FAILED: self signed certificate')}"
    error = unavailable(["a:1"], [reason])
    assert isinstance(error, TlsFailed)
    assert "check the addresses, security.protocol and ssl.ca.location" in str(error)
    assert type(unavailable(["a:1", "b:1"], [reason, "b:1 did not answer in time"])) is BrokerUnavailable
