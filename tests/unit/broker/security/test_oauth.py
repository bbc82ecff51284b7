"""Tokens of a trusted issuer are accepted; everything else is refused, and keys come from nowhere else."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from joserfc import jwt
from joserfc.jwk import ECKey, OctKey, RSAKey

from broker.security.oauth import MOST_LEFT_MS, Bearers, OauthConfig, fetch_keys, is_public, keys_of, token_of
from raftlog.errors import AuthenticationFailed, BrokerOverloaded, InvalidConfig
from tests.support.issuer import AUDIENCE, ISSUER, Issuer, message_of, web_server
from tests.support.scram_parts import Hands

LATER = 100_000


def config(url: str, **values: Any) -> OauthConfig:
    return OauthConfig(url, ISSUER, (AUDIENCE, "other"), **values)


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
def bearers(issuer: Issuer, tmp_path: Path) -> Bearers:
    return Bearers(config(issuer.write(tmp_path / "keys.json")), Hands())


def refused(bearers: Bearers, token: str) -> str:
    with pytest.raises(AuthenticationFailed) as caught:
        bearers.verify(message_of(token))
    assert token not in str(caught.value)
    return str(caught.value)


def test_a_token_of_the_issuer_is_its_user(bearers: Bearers, issuer: Issuer) -> None:
    bearer = bearers.verify(message_of(issuer.token("alice", lifetime_s=600)))
    assert bearer.user == "alice"
    assert bearer.expires_s == pytest.approx(time.time() + 600, abs=60)
    assert 0 < bearers.left_ms(bearer) <= 631_000
    assert bearers.verify(message_of(issuer.token("bob", aud=["x", "other"]))).user == "bob"


@pytest.mark.parametrize(
    ("claims", "word"),
    [
        ({"iss": "https://issuer.test/"}, "iss"),
        ({"iss": None}, "iss"),
        ({"aud": "raftlog"}, "aud"),
        ({"aud": []}, "aud"),
        ({"aud": None}, "aud"),
        ({"exp": 1_000}, "expired"),
        ({"exp": None}, "exp"),
        ({"exp": "tomorrow"}, "exp"),
        ({"exp": float("nan")}, ""),
        ({"nbf": int(time.time()) + LATER}, "not valid"),
        ({"iat": int(time.time()) + LATER}, "not valid"),
        ({"sub": None}, "'sub'"),
        ({"sub": 7}, ""),
        ({"sub": "*"}, "reserved"),
        ({"sub": "ANONYMOUS"}, "reserved"),
        ({"sub": ""}, "characters"),
        ({"sub": "x" * 300}, "characters"),
        ({"sub": "a\nb"}, "cannot be one"),
    ],
)
def test_claims_that_are_wrong_are_refused(bearers: Bearers, issuer: Issuer, claims: dict[str, Any], word: str) -> None:
    assert word in refused(bearers, issuer.token(**{"user": None, "sub": "alice", **claims}))


def _part(content: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


def test_another_signer_is_refused_whatever_the_header_says(bearers: Bearers, issuer: Issuer) -> None:
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 600}
    stranger = ECKey.generate_key("P-256", auto_kid=True)
    kid = issuer.keys[0].kid
    assert "does not know" in refused(bearers, jwt.encode({"alg": "ES256", "kid": stranger.kid}, claims, stranger))
    assert refused(bearers, jwt.encode({"alg": "ES256", "kid": kid}, claims, stranger))
    # The public key as the secret of a symmetric algorithm, the classic confusion.
    signed = f"{_part({'alg': 'HS256', 'kid': kid})}.{_part(claims)}"
    mac = hmac.digest(issuer.keys[0].as_pem(private=False), signed.encode(), hashlib.sha256)
    assert refused(bearers, f"{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}")
    # No signature at all.
    assert refused(bearers, f"{_part({'alg': 'none', 'kid': kid})}.{_part(claims)}.")
    # A good signature under other claims.
    one, other = issuer.token("alice").split("."), issuer.token("mallory").split(".")
    assert refused(bearers, ".".join((one[0], other[1], one[2])))
    # An algorithm that is not a configured one.
    rsa = RSAKey.generate_key(2048, auto_kid=True)
    assert refused(bearers, jwt.encode({"alg": "RS512", "kid": rsa.kid}, claims, rsa, algorithms=["RS512"]))


def test_a_token_that_never_expires_counts_for_a_year(bearers: Bearers, issuer: Issuer) -> None:
    bearer = bearers.verify(message_of(issuer.token("alice", exp=10**30)))
    assert bearers.left_ms(bearer) == MOST_LEFT_MS


def _signed(issuer: Issuer, header: bytes, claims: bytes) -> str:
    """Return a token with a valid signature over any bytes."""
    front = b".".join(base64.urlsafe_b64encode(each).rstrip(b"=") for each in (header, claims))
    key: Any = issuer.keys[-1]
    signature = key.private_key.sign(front, ECDSA(SHA256()))
    parts = b"".join(number.to_bytes(32, "big") for number in decode_dss_signature(signature))
    return f"{front.decode()}.{base64.urlsafe_b64encode(parts).rstrip(b'=').decode()}"


def test_a_token_that_is_nested_too_deeply_is_refused(bearers: Bearers, issuer: Issuer) -> None:
    deep = b"[" * 5_500
    header = json.dumps({"alg": "ES256", "kid": issuer.keys[-1].kid}).encode()
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 600}
    signed = _signed(issuer, header, json.dumps(claims).encode())
    assert bearers.verify(message_of(signed)).user == "alice", "signed as a valid one"
    assert refused(bearers, _signed(issuer, header, deep))
    assert refused(bearers, _signed(issuer, deep, b"{}"))


@pytest.mark.parametrize("text", ["", ".", "..", "a.b.c", "a.b.c.d.e", "é", "eyJ" * 3_000])
def test_what_is_no_token_is_refused(bearers: Bearers, text: str) -> None:
    assert refused(bearers, text) if text else True


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"n,,",
        b"n,,\x01\x01",
        b"n,,\x01auth=Basic abc\x01\x01",
        b"n,,\x01auth=Bearer \x01\x01",
        b"n,a=other,\x01auth=Bearer x\x01\x01",
        b"p=tls-unique,,\x01auth=Bearer x\x01\x01",
        b"\xff",
        b"n,,\x01auth=Bearer " + b"x" * 20_000 + b"\x01\x01",
    ],
)
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(AuthenticationFailed, match="OAUTHBEARER"):
        token_of(message)


def test_extensions_are_skipped_and_the_scheme_has_any_case() -> None:
    assert token_of(b"n,,\x01host=a\x01auth=bearer abc\x01traceId=1\x01\x01") == "abc"


def test_keys_of_a_file_are_read_again_when_it_changes(issuer: Issuer, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    bearers = Bearers(config(issuer.write(path)), Hands())
    issuer.rotate()
    token = issuer.token()
    refused(bearers, token)
    assert not bearers.refresh()
    issuer.write(path)
    with pytest.MonkeyPatch.context() as patched:

        def refuse(config: object) -> bytes:
            raise InvalidConfig("too many open files")

        patched.setattr(bearers, "_fetch", refuse)
        assert not bearers.refresh()
    assert bearers.refresh(), "the keys must be read again after a failed attempt"
    assert bearers.verify(message_of(token)).user == "alice"
    path.write_text("{}")
    assert not bearers.refresh()
    assert bearers.verify(message_of(token)).user == "alice", "an invalid file must keep the previous keys"
    path.unlink()
    assert not bearers.refresh()
    assert bearers.verify(message_of(token)).user == "alice"


def test_a_url_is_asked_again_for_an_unknown_key_but_not_often(issuer: Issuer) -> None:
    asked = []

    def fetch(settings: OauthConfig) -> bytes:
        asked.append(1)
        return issuer.jwks().encode()

    hands = Hands()
    url = "https://issuer.test/keys"
    bearers = Bearers(config(url, allowed_urls=(url,)), hands, fetch=fetch)
    assert not bearers.refresh()
    issuer.rotate()
    token = issuer.token()
    refused(bearers, token)
    assert not bearers.refresh(), "invalid tokens must not make the broker fetch keys each time"
    hands.ms += 10_000
    assert bearers.refresh()
    assert bearers.verify(message_of(token)).user == "alice"
    hands.ms += 10_000
    bearers.refresh()
    assert len(asked) == 2, "the keys must not be fetched while none is missing"
    hands.ms += 3_600_000
    bearers.refresh()
    assert len(asked) == 3


def test_without_keys_clients_are_told_to_try_again(issuer: Issuer) -> None:
    def fetch(settings: OauthConfig) -> bytes:
        raise InvalidConfig("the URL does not answer")

    url = "https://issuer.test/keys"
    bearers = Bearers(config(url, allowed_urls=(url,)), Hands(), fetch=fetch)
    with pytest.raises(BrokerOverloaded, match="does not have the keys"):
        bearers.verify(message_of(issuer.token()))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://issuer.test/keys", "not one of sasl.oauthbearer.allowed.urls"),
        ("http://issuer.test/keys", "write https"),
        ("ftp://issuer.test/keys", "write https"),
        ("https://user@issuer.test/keys", "write https"),
        ("file://host/keys", "write https"),
        ("", "write https"),
        ("file:///no/such/file", "cannot be read"),
    ],
)
def test_other_urls_are_refused_at_the_start(url: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        Bearers(config(url, allowed_urls=("https://user@issuer.test/keys", "http://issuer.test/keys")), Hands())


def test_private_addresses_are_asked_only_if_allowed_and_redirects_are_not_followed(issuer: Issuer) -> None:
    paths = []

    def answer(path: str, headers: dict[str, str], body: str) -> tuple[int, dict[str, str], str]:
        paths.append(path)
        if path == "/away":
            return 302, {"Location": "/keys"}, ""
        return 200, {}, issuer.jwks() if path == "/keys" else "x" * ((1 << 20) + 1)

    with web_server(answer) as base:
        allowed = config(f"{base}/keys", private_addresses_allow=True)
        assert keys_of(fetch_keys(allowed)).keys[0].kid == issuer.keys[0].kid
        with pytest.raises(InvalidConfig, match=r"127\.0\.0\.1, which is not public"):
            fetch_keys(allowed._replace(private_addresses_allow=False))
        assert paths == ["/keys"], "a private address must not even be connected to"
        with pytest.raises(InvalidConfig, match="the status 302; redirects are not followed"):
            fetch_keys(allowed._replace(jwks_endpoint_url=f"{base}/away"))
        with pytest.raises(InvalidConfig, match="more than"):
            fetch_keys(allowed._replace(jwks_endpoint_url=f"{base}/large"))
    with pytest.raises(InvalidConfig, match="does not answer"):
        fetch_keys(allowed)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "169.254.169.254",
        "224.0.0.1",
        "::ffff:10.0.0.1",
        "::127.0.0.1",  # IPv4-compatible
        "64:ff9b::a9fe:a9fe",  # NAT64 of 169.254.169.254
        "2002:7f00:1::1",  # 6to4 of 127.0.0.1
        "ff0e::1",
        "fe80::1%eth0",
    ],
)
def test_an_address_that_stands_for_a_private_one_is_not_asked(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """A name server that answers with such an address must not make the broker ask its own network."""
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, 443))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    def connect(*_: object) -> None:
        raise AssertionError("the broker connected to an address that it must refuse")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(InvalidConfig, match="not public"):
        fetch_keys(config("https://issuer.test/keys"))


def test_public_addresses_are_asked() -> None:
    for address in ("8.8.8.8", "2001:4860:4860::8888", "64:ff9b::808:808", "2002:808:808::1"):
        assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"keys": 1}',
        b'{"keys": []}',
        b'{"keys": [1]}',
        b'{"keys": [{"kty": "EC"}]}',
    ],
)
def test_what_is_no_set_of_public_keys_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidConfig, match="key"):
        keys_of(raw)


def test_keys_that_can_sign_are_refused() -> None:
    for secret in (OctKey.generate_key(256), ECKey.generate_key("P-256")):
        with pytest.raises(InvalidConfig, match="private or symmetric"):
            keys_of(json.dumps({"keys": [secret.as_dict(private=True)]}).encode())
