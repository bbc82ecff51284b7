"""Looks at certificates before anything depends on them: a handshake of a node with itself, in memory.

What that refuses, others would refuse without saying much. Only the standard library is needed, which tells what a
certificate says only of one that it has verified.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from raftlog._client.pem import Pem, PemFiles
from raftlog.errors import InvalidConfig
from raftmeta.quorum.peer_identity import node_ids_named

_ROUNDS: Final = 10
"""A handshake takes two or three."""
_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
_WRONG_PURPOSE: Final = 26
"""X509_V_ERR_*."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a certificate says. `until` as OpenSSL writes it; `names` are DNS names and IP addresses."""

    until: str
    names: tuple[str, ...]
    node_ids: frozenset[int]


def look_at(files: PemFiles, pem: Pem) -> Facts:
    """Return what a certificate says.

    Raises:
        InvalidConfig: it counts no more, or not yet.
    """
    server = _server(files)
    client = _client()
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever has issued it, it trusts itself
    client.load_verify_locations(cadata=pem.certificate.decode("ascii", "ignore"))
    try:
        found = _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise InvalidConfig(f"{_named(files)} {_in_words(error)}") from None
    except ssl.SSLError as error:
        raise InvalidConfig(f"{_named(files)} cannot be used: {error.reason or error}") from None
    alternatives = found.get("subjectAltName", ())
    common_names = [value for part in found.get("subject", ()) for name, value in part if name == "commonName"]
    return Facts(
        until=str(found.get("notAfter", "")),
        names=tuple(value for kind, value in alternatives if kind in ("DNS", "IP Address")),
        node_ids=node_ids_named([value for kind, value in alternatives if kind == "URI"], common_names),
    )


def check_trusted(files: PemFiles, pem: Pem) -> None:
    """Check that whoever trusts the CAs trusts this certificate, as a server's and as a client's.

    Raises:
        InvalidConfig: they do not.
    """
    server, client = _server(files), _client()
    server.verify_mode = ssl.CERT_REQUIRED
    for context in (server, client):
        context.load_verify_locations(cadata=pem.ca.decode("ascii", "ignore"))
    client.load_cert_chain(files.certificate, files.key_file, password="")
    try:
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        trusts = f"with the CAs in {files.names.ca}={files.ca!r} other nodes"
        raise InvalidConfig(f"{_named(files)} {_in_words(error)}; {trusts} would refuse it") from None
    except ssl.SSLError as error:
        raise InvalidConfig(f"{_named(files)} cannot be used: {error.reason or error}") from None


def _named(files: PemFiles) -> str:
    return f"{files.names.certificate}={files.certificate!r}: the certificate"


def _in_words(error: ssl.SSLCertVerificationError) -> str:
    match error.verify_code:
        case code if code == _EXPIRED:
            return "has expired, or one of its CAs has; issue a new one"
        case code if code == _NOT_YET_VALID:
            return "does not count yet; is this machine's clock right?"
        case code if code == _WRONG_PURPOSE:
            return (
                "may not be used for this: nodes are servers and clients to each other, issue it for both "
                "(extendedKeyUsage = serverAuth, clientAuth)"
            )
        case _:
            return f"is not of a CA that is trusted here ({error.verify_message})"


def _server(files: PemFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key_file, password="")
    return context


def _client() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return context


def _shake_hands(server_context: ssl.SSLContext, client_context: ssl.SSLContext) -> dict[str, Any]:
    """Return what the server's certificate says, as `ssl.SSLSocket.getpeercert` does.

    Raises:
        ssl.SSLError: one of them refuses the other.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_side=False)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_ROUNDS):
        for side in (client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return dict(client.getpeercert() or {})
