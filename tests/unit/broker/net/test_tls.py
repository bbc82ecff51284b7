"""The checks of a node's certificates before it listens with them; new certificates take effect without a restart."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import ssl
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from grpc import aio

from broker.config.config import BrokerConfig
from broker.net.tls import KafkaContexts, NodeTls, look_at, node_tls
from raftlog._client import security
from raftlog._client.security import FreshPem, Names, PemFiles, read_pem, shake_hands
from raftlog.errors import InvalidConfig
from raftlog.testing import CertificateAuthority
from tests.support.logged import lines_of

HOUR = datetime.timedelta(hours=1)
VOTERS = "1@127.0.0.1:19093,2@127.0.0.1:19094,3@127.0.0.1:19095"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("other-ca"), "another CA")


def node(authority: CertificateAuthority, keystore: Path, **more: object) -> BrokerConfig:
    """A voter with this certificate."""
    return BrokerConfig.from_values(
        {
            "node.id": 1,
            "cluster.id": "c",
            "log.dirs": "/data",
            "controller.quorum.voters": VOTERS,
            "listener.security.protocol": "SSL",
            "ssl.keystore.location": str(keystore),
            "ssl.truststore.location": str(authority.ca_file),
            **{name.replace("_", "."): value for name, value in more.items()},
        }
    )


def test_a_good_certificate_is_taken(authority: CertificateAuthority) -> None:
    tls = node_tls(node(authority, authority.issue("good", node_ids=[1])))
    assert tls is not None
    assert tls.channels is not None
    assert abs(tls.expires_ms / 1_000 - time.time() - 3650 * 86_400) < 86_400
    tls.client_credentials()
    tls.inter_node_credentials()


def test_without_ssl_there_is_none(authority: CertificateAuthority) -> None:
    plain = node(authority, Path("/nowhere"), listener_security_protocol="plaintext")
    assert node_tls(plain) is None


def test_several_nodes_may_share_a_certificate(authority: CertificateAuthority) -> None:
    NodeTls(node(authority, authority.issue("shared", node_ids=[3, 2, 1])))


def test_the_common_name_names_a_node_where_no_uri_does(authority: CertificateAuthority) -> None:
    NodeTls(node(authority, authority.issue("raftlog-node-1")))
    with pytest.raises(InvalidConfig, match=r"does not name this node \(it names nodes: 2\)"):
        NodeTls(node(authority, authority.issue("raftlog-node-1", node_ids=[2])))


@pytest.mark.parametrize(("node_ids", "named"), [([], "none"), ([2, 3], "2, 3")])
def test_a_certificate_that_does_not_name_the_node_is_refused(
    authority: CertificateAuthority, node_ids: list[int], named: str
) -> None:
    file = authority.issue("not-mine", node_ids=node_ids)
    with pytest.raises(InvalidConfig, match=rf"it names nodes: {named}\); issue one with the URI raftlog://node/1"):
        NodeTls(node(authority, file))


def test_what_clients_connect_to_alone_needs_no_node(authority: CertificateAuthority) -> None:
    file = authority.issue("for-clients")
    tls = NodeTls(node(authority, file, security_inter_broker_protocol="plaintext"))
    assert tls.channels is None


def test_an_expired_certificate_is_refused(authority: CertificateAuthority) -> None:
    with pytest.raises(InvalidConfig, match=r"ssl.keystore.location=.*expired.pem.*has expired"):
        NodeTls(node(authority, authority.issue("expired", node_ids=[1], lasts=-HOUR)))


def test_a_certificate_of_another_ca_is_refused(
    authority: CertificateAuthority, stranger: CertificateAuthority
) -> None:
    with pytest.raises(InvalidConfig, match=r"not issued by a trusted CA.*ssl.truststore.location=.* refuse it"):
        NodeTls(node(authority, stranger.issue("node", node_ids=[1])))


def test_a_certificate_for_servers_only_is_refused(authority: CertificateAuthority) -> None:
    file = authority.issue("server-only", node_ids=[1], servers_only=True)
    with pytest.raises(InvalidConfig, match="clientAuth"):
        NodeTls(node(authority, file))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "has no certificate in PEM form"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "has no private key in PEM form"),
        (
            b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----\nAA\n",
            "certificate or key is damaged",
        ),
        (
            b"-----BEGIN CERTIFICATE-----\n-----BEGIN ENCRYPTED PRIVATE KEY-----\n",
            "private key is encrypted; name a file with its password in ssl.key.password.location",
        ),
    ],
)
def test_files_that_are_no_good_are_named(
    authority: CertificateAuthority, tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "node.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidConfig, match=rf"ssl.keystore.location=.*{words}"):
        NodeTls(node(authority, file))


def test_a_key_of_another_certificate_is_refused(authority: CertificateAuthority) -> None:
    one, other = authority.issue("one", node_ids=[1]), authority.issue("other", node_ids=[1])
    with pytest.raises(InvalidConfig, match="do not belong together"):
        NodeTls(node(authority, one, ssl_keystore_key_location=str(other)))


def test_an_address_that_the_certificate_lacks_is_warned_of(
    authority: CertificateAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    file = authority.issue("elsewhere", node_ids=[1], hosts=["*.brokers.example", "10.1.2.3"])
    with caplog.at_level(logging.WARNING):
        NodeTls(node(authority, file, advertised_inter_node_listener="b1.brokers.example:9093"))
    assert lines_of(caplog, "broker") == [
        "the certificate does not name 127.0.0.1, which clients connect to, so they will refuse it; issue one with "
        "this name among its subject alternative names"
    ]


def fresh(authority: CertificateAuthority, file: Path) -> tuple[FreshPem, list[float]]:
    """What is in a file, by a clock that stands until it is moved on."""
    clock = [0.0]
    files = PemFiles(Names("ca", "certificate", "key"), str(authority.ca_file), str(file))

    def check(pem: object) -> None:
        look_at(files, read_pem(files)[0])

    return FreshPem(files, check, lambda: clock[0]), clock


def test_a_new_certificate_counts_once_it_is_looked_at(authority: CertificateAuthority) -> None:
    file = authority.issue("renewed")
    found, clock = fresh(authority, file)
    before, version = found.current()
    authority.issue("renewed")
    assert found.current() == (before, version)  # not looked at again so soon
    clock[0] += 1.0
    after, higher = found.current()
    assert (after.certificate, higher) == (file.read_bytes(), version + 1)
    assert after.certificate != before.certificate


@pytest.mark.parametrize("broken", ["gone", "no PEM", "expired"])
def test_the_one_before_stays_while_what_is_there_is_no_good(
    authority: CertificateAuthority, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    name = f"kept-{broken.replace(' ', '-')}"
    file = authority.issue(name)
    found, clock = fresh(authority, file)
    before = found.current()
    match broken:
        case "gone":
            file.unlink()
        case "no PEM":
            file.write_bytes(b"x")
        case _:
            authority.issue(name, lasts=-HOUR)
    for _ in range(3):
        clock[0] += 1.0
        assert found.current() == before
    (line,) = lines_of(caplog, "raftlog._client.security")  # said once
    assert "the previous ones stay in use" in line
    authority.issue(name)
    clock[0] += 1.0
    assert found.current()[1] == before[1] + 1


def test_what_was_refused_for_the_time_being_counts_later(authority: CertificateAuthority) -> None:
    file = authority.issue("early")
    files = PemFiles(Names("ca", "certificate", "key"), str(authority.ca_file), str(file))
    clock, counts_from_s = [0.0], 0.0

    def check(pem: object) -> None:
        if clock[0] < counts_from_s:
            raise InvalidConfig("the certificate does not count yet")

    found = FreshPem(files, check, lambda: clock[0])
    version, counts_from_s = found.current()[1], 40.0
    authority.issue("early")
    seen = []
    for clock[0] in (1.0, 30.0, 31.5, 45.0, 62.0):
        seen.append(found.current()[1] - version)
    assert seen == [0, 0, 0, 0, 1], "the files must be looked at again every half minute"


def test_a_mounted_secret_is_seen_to_change(authority: CertificateAuthority, tmp_path: Path) -> None:
    """Kubernetes puts files into a new directory and turns a symbolic link to it."""
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tls.pem").write_bytes(authority.issue(f"mounted-{version}").read_bytes())
    (tmp_path / "data").symlink_to("v1")
    found, clock = fresh(authority, tmp_path / "data" / "tls.pem")
    (tmp_path / "aside").symlink_to("v2")
    os.replace(tmp_path / "aside", tmp_path / "data")
    clock[0] += 1.0
    assert found.current()[0].certificate == (tmp_path / "v2" / "tls.pem").read_bytes()


class _Anything(grpc.GenericRpcHandler):
    """Answers every request with itself."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def echo(request: bytes, context: object) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


async def _is_let_in(port: int, ca: bytes, client: bytes) -> bool:
    credentials = grpc.ssl_channel_credentials(ca, client, client)
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        ask: Any = channel.unary_unary("/a/b")
        try:
            return bool(await ask(b"x", timeout=60) == b"x")
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False


def test_clients_of_another_ca_are_let_in_once_it_is_trusted_and_not_any_longer(
    tmp_path: Path, stranger: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How a cluster moves to another CA: without a restart, and with both for a while."""
    monkeypatch.setattr(security, "LOOK_EVERY_S", 0.0)
    authority = CertificateAuthority(tmp_path)
    tls = NodeTls(node(authority, authority.issue("moving", node_ids=[1])))
    first, second = authority.ca_file.read_bytes(), stranger.ca_file.read_bytes()
    old, new = authority.issue("old", hosts=()).read_bytes(), stranger.issue("new", hosts=()).read_bytes()

    def trust(content: bytes) -> None:
        aside = tmp_path / "aside.pem"
        aside.write_bytes(content)
        aside.replace(authority.ca_file)

    async def scenario() -> list[tuple[bool, bool]]:
        server = aio.server()
        server.add_generic_rpc_handlers((_Anything(),))
        port = server.add_secure_port("127.0.0.1:0", tls.client_credentials())
        await server.start()
        try:
            found = [(await _is_let_in(port, first, old), await _is_let_in(port, first, new))]
            trust(first + second)
            found.append((await _is_let_in(port, first, old), await _is_let_in(port, first, new)))
            stranger.issue("moved", node_ids=[1])
            (stranger.directory / "moved.pem").replace(tmp_path / "moving.pem")
            trust(second)
            found.append((await _is_let_in(port, second, old), await _is_let_in(port, second, new)))
            return found
        finally:
            await server.stop(0)

    assert asyncio.run(scenario()) == [(True, False), (True, True), (False, True)]


def _encrypt(file: Path, password: str, form: serialization.PrivateFormat) -> None:
    """Encrypt the key in a file with a certificate and a key."""
    content = file.read_bytes()
    key = serialization.load_pem_private_key(content[content.index(b"-----BEGIN PRIVATE") :], None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM, form, serialization.BestAvailableEncryption(password.encode())
    )
    file.write_bytes(content[: content.index(b"-----BEGIN PRIVATE")] + encrypted)


@pytest.mark.parametrize("form", [serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL])
def test_an_encrypted_key_is_opened_with_a_password(
    authority: CertificateAuthority, tmp_path: Path, form: serialization.PrivateFormat
) -> None:
    file, password = authority.issue("encrypted", node_ids=[1]), tmp_path / "password"
    plain = read_pem(PemFiles(Names("ca", "certificate", "key"), "", str(file)))[0].key
    _encrypt(file, "open, sesame", form)
    password.write_text("open, sesame\n")
    for settings in (
        {"ssl_key_password_location": str(password)},
        {"ssl_key_password_command": f"cat {password}"},
    ):
        tls = NodeTls(node(authority, file, **settings))
        tls.client_credentials()
        assert tls.kafka_contexts().current() is not None
        found = tls._pem.current()[0].key
        same = serialization.load_pem_private_key(found, None)
        original = serialization.load_pem_private_key(plain[plain.index(b"-----BEGIN PRIVATE") :], None)
        assert same.private_numbers() == original.private_numbers()  # type: ignore[union-attr] # of elliptic curves
    for content, words in (("another", "the password does not open the private key"), ("", "gives no password")):
        password.write_text(content)
        with pytest.raises(InvalidConfig, match=words):
            NodeTls(node(authority, file, ssl_key_password_location=str(password)))
    for settings, words in (
        ({"ssl_key_password_location": "/no/such/file"}, "ssl.key.password.location=.* cannot be read"),
        ({"ssl_key_password_command": "false"}, "ssl.key.password.command=.* ended with 1"),
        ({"ssl_key_password_command": "echo a", "ssl_key_password_location": "b"}, "are both set"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            NodeTls(node(authority, file, **settings))


def test_a_changed_password_and_key_are_read_again(authority: CertificateAuthority, tmp_path: Path) -> None:
    clock = [0.0]
    file, password = authority.issue("renewed", node_ids=[1]), tmp_path / "password"
    _encrypt(file, "first", serialization.PrivateFormat.PKCS8)
    password.write_text("first")
    files = PemFiles(Names("ca", "certificate", "key"), "", str(file), "", str(password))
    fresh = FreshPem(files, clock_s=lambda: clock[0])
    before, version = fresh.current()
    authority.issue("renewed", node_ids=[1])
    _encrypt(file, "second", serialization.PrivateFormat.PKCS8)
    clock[0] += security.LOOK_EVERY_S
    assert fresh.current() == (before, version), (
        "the previous certificate must stay, as the old password does not open the new key"
    )
    password.write_text("second")
    clock[0] += security.LOOK_EVERY_S
    assert fresh.current()[1] == version + 1


def test_kafka_clients_see_a_new_certificate_and_the_one_before_while_its_key_cannot_be_opened(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    clock = [0.0]
    file, password = authority.issue("kafka", node_ids=[1]), tmp_path / "password"
    _encrypt(file, "open, sesame", serialization.PrivateFormat.PKCS8)
    password.write_text("open, sesame")
    files = PemFiles(Names("ca", "certificate", "key"), str(authority.ca_file), str(file), "", str(password))
    fresh = FreshPem(files, clock_s=lambda: clock[0])
    contexts = KafkaContexts(fresh, files, ask=False, clock_s=lambda: clock[0])
    client = ssl.create_default_context(cafile=authority.ca_file)
    client.check_hostname = False

    def serial() -> object:
        return shake_hands(contexts.current(), client)["serialNumber"]

    before = serial()
    assert serial() == before
    authority.issue("kafka", node_ids=[1])
    _encrypt(file, "open, sesame", serialization.PrivateFormat.PKCS8)
    clock[0] += security.LOOK_EVERY_S
    fresh.current()  # reads the new files
    password.unlink()
    assert serial() == before
    password.write_text("open, sesame")
    assert serial() == before, "the password must not be read again for each connection"
    clock[0] += security.TRY_AGAIN_S
    assert serial() != before
