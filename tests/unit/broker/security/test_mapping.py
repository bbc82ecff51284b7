"""Names of certificates become names of users by rules (KIP-371), the same at both listeners."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc import aio

from broker.config.config import BrokerConfig
from broker.security.identify import principal_of, principal_of_certificate
from broker.security.mapping import name_of, name_of_subject, parse
from raftlog.errors import InvalidConfig

DN = "CN=Orders,OU=Billing,O=Example,C=DE"


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        ("DEFAULT", "Orders"),
        ("", "Orders"),
        ("RULE:^CN=(.*?),OU=(.*?),.*$/$1@$2/", "Orders@Billing"),
        ("RULE:^CN=(.*?),OU=.*$/$1/L", "orders"),
        ("RULE:^CN=(.*?),OU=.*$/$1/U, DEFAULT", "ORDERS"),
        ("RULE:^CN=(.*?),OU=Sales.*$/$1/L,RULE:^.*OU=(.*?),O=.*$/team-$1/L", "team-billing"),
        ("RULE:^CN=nobody.*$/x/,DEFAULT", "Orders"),
        ("RULE:^CN=nobody.*$/x/", None),
        ("RULE:CN=Orders/x/", None),  # the whole name has to match
        (r"RULE:.*/a\/b\\c/", r"a/b\c"),
        (r"RULE:.*/\$1/", "$1"),
    ],
)
def test_the_first_rule_that_applies_makes_the_name(rules: str, name: str | None) -> None:
    assert name_of(parse(rules), DN, ["Orders"]) == name


def test_default_needs_one_common_name() -> None:
    assert name_of(parse("DEFAULT"), "O=Example", []) is None
    assert name_of(parse("DEFAULT"), "CN=a,CN=b", ["a", "b"]) is None


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("CN=(.*)", "write DEFAULT or RULE"),
        ("RULE:a", "write DEFAULT or RULE"),
        ("RULE:a/b/X", "write DEFAULT or RULE"),
        ("DEFAULT DEFAULT", "write DEFAULT or RULE"),
        ("RULE:(/b/", "is no pattern"),
        ("RULE:(a)/$2/", "has $2, and '(a)' has 1 groups"),
    ],
)
def test_other_rules_are_refused_at_the_start(rules: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=r"ssl\.principal\.mapping\.rules") as caught:
        BrokerConfig.from_values({"node.id": 1, "log.dirs": "/data", "ssl.principal.mapping.rules": rules})
    assert words in str(caught.value)


def test_a_rule_makes_no_node_and_no_reserved_name() -> None:
    rules = parse("RULE:CN=(.*)/$1/")
    for user, principal in (("ANONYMOUS", "User:ANONYMOUS"), ("*", "User:ANONYMOUS"), ("ok", "User:ok")):
        assert principal_of({"x509_subject": [f"CN={user}".encode()]}, rules) == principal
        assert principal_of_certificate({"subject": ((("commonName", user),),)}, rules) == principal
    node = {"transport_security_type": [b"ssl"], "x509_subject": [b"CN=x"], "peer_uri": [b"raftlog://node/3"]}
    assert principal_of(node, rules) == "Node:3"


def _certificate(directory: Path, name: str, subject: x509.Name) -> bytes:
    """Write a certificate that signs itself, with its key, and return both."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = made.public_bytes(serialization.Encoding.PEM) + private
    (directory / name).write_bytes(pem)
    return pem


def test_both_listeners_see_the_same_distinguished_name(tmp_path: Path) -> None:
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COUNTRY_NAME, "DE"),
            x509.NameAttribute(NameOID.STATE_OR_PROVINCE_NAME, "Berlin"),
            x509.NameAttribute(NameOID.LOCALITY_NAME, "Mitte"),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, 'Example, "Inc" + <Sons>; \\'),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "#1 "),
            x509.NameAttribute(NameOID.DOMAIN_COMPONENT, "example"),
            x509.NameAttribute(NameOID.USER_ID, "7"),
            x509.NameAttribute(NameOID.EMAIL_ADDRESS, "a@example.org"),
            x509.NameAttribute(NameOID.COMMON_NAME, "Zoë"),
        ]
    )
    pem = _certificate(tmp_path, "client.pem", subject)
    server_pem = _certificate(tmp_path, "server.pem", x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")]))

    async def seen_by_grpc() -> str:
        async def handler(request: Any, context: Any) -> bytes:
            (found,) = context.auth_context()["x509_subject"]
            return bytes(found)

        server = aio.server()
        calls: dict[str, Any] = {"Subject": grpc.unary_unary_rpc_method_handler(handler)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", calls),))
        credentials = grpc.ssl_server_credentials([(server_pem, server_pem)], pem, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        try:
            trusted = grpc.ssl_channel_credentials(server_pem, pem, pem)
            options = [("grpc.ssl_target_name_override", "localhost")]
            async with aio.secure_channel(f"127.0.0.1:{port}", trusted, options=options) as channel:
                call: Any = channel.unary_unary("/t.T/Subject")
                answer: bytes = await call(b"", timeout=60)
                return answer.decode()
        finally:
            await server.stop(None)

    decoded: dict[str, Any] = ssl._ssl._test_decode_cert(str(tmp_path / "client.pem"))  # type: ignore[attr-defined] # what getpeercert returns
    assert asyncio.run(seen_by_grpc()) == name_of_subject(decoded["subject"])
