"""A CA and certificates for the nodes and clients of a test cluster on loopback. Not for any other use.

Only this module needs the package `cryptography`: `pip install '.[testing]'`.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from raftlog._installed import needs
from raftlog.errors import InvalidConfig

CA_FILE: Final = "ca.pem"
CA_KEY_FILE: Final = "ca-key.pem"
_LIFETIME: Final = datetime.timedelta(days=3650)
_BEFORE: Final = datetime.timedelta(days=1)
"""Certificates are valid from yesterday on, because clocks differ."""
_ONLY_SIGNS_CERTIFICATES: Final = (False, False, False, False, False, True, False, False, False)
"""The arguments of `x509.KeyUsage`: only `key_cert_sign`. Python 3.13 requires this extension, and key identifiers."""
NODE_URI: Final = "raftlog://node/"
"""The same as in `raftmeta.quorum.peer_identity`, which is not part of the SDK."""


class CertificateAuthority:
    """A CA with its files in a directory; created there unless they exist."""

    def __init__(self, directory: Path, name: str = "raftlog test CA") -> None:
        """Open the CA of the directory, or create it.

        Raises:
            InvalidConfig: the package `cryptography` is missing.
        """
        self.directory = directory
        self.ca_file = directory / CA_FILE
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.ca_file.exists():
            _make_ca(self.ca_file, directory / CA_KEY_FILE, name)

    def issue(
        self,
        name: str,
        *,
        node_ids: Sequence[int] = (),
        hosts: Sequence[str] = ("127.0.0.1", "localhost"),
        lasts: datetime.timedelta = _LIFETIME,
        servers_only: bool = False,
    ) -> Path:
        """Return a file with a new certificate and its key; the certificate expires after `lasts`.

        `name` is the certificate's name and the file's; an existing file is replaced. With `node_ids` the certificate
        is for these nodes, otherwise for a client. `servers_only`: clients may not use it.
        """
        x509 = _cryptography()
        alternatives = [_host(host) for host in hosts]
        alternatives += [x509.UniformResourceIdentifier(f"{NODE_URI}{node_id}") for node_id in node_ids]
        extensions = [x509.SubjectAlternativeName(alternatives)] if alternatives else []
        if servers_only:
            extensions.append(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]))
        file = self.directory / f"{name}.pem"
        _issue(self.ca_file, self.directory / CA_KEY_FILE, file, _name(name), extensions, lasts)
        return file

    def node_config(self, node_id: int) -> dict[str, str]:
        """Return a server's config for TLS, with its own certificate."""
        file = self.directory / f"node-{node_id}.pem"
        if not file.exists():
            self.issue(file.stem, node_ids=[node_id])
        return {
            "listener.security.protocol": "ssl",
            "ssl.keystore.location": str(file),
            "ssl.truststore.location": str(self.ca_file),
        }

    def client_config(self, name: str = "client") -> dict[str, str]:
        """Return a client's config for TLS, with its own certificate."""
        file = self.directory / f"{name}.pem"
        if not file.exists():
            self.issue(name, hosts=())
        return {
            "security.protocol": "ssl",
            "ssl.ca.location": str(self.ca_file),
            "ssl.certificate.location": str(file),
            "ssl.key.location": str(file),
        }


def _cryptography() -> Any:
    try:
        import cryptography.x509
    except ImportError:
        raise InvalidConfig(needs("a test cluster with TLS", "cryptography", "testing")) from None
    return cryptography.x509


def _name(common_name: str) -> Any:
    x509 = _cryptography()
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])


def _builder(subject: Any, issuer: Any, key: Any, lasts: datetime.timedelta) -> Any:
    x509 = _cryptography()
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + lasts)
    )


def _make_ca(ca_file: Path, key_file: Path, name: str) -> None:
    x509 = _cryptography()
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_name(name), _name(name), key, _LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(*_ONLY_SIGNS_CERTIFICATES), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(key_file, _key_pem(key))
    _write(ca_file, _certificate_pem(certificate))


def _issue(
    ca_file: Path,
    ca_key_file: Path,
    file: Path,
    subject: Any,
    extensions: Sequence[Any],
    lasts: datetime.timedelta,
) -> None:
    x509 = _cryptography()
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    ca = x509.load_pem_x509_certificate(ca_file.read_bytes())
    ca_key: Any = serialization.load_pem_private_key(ca_key_file.read_bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(subject, ca.subject, key, lasts)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key())
    builder = builder.add_extension(issuer, critical=False)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    certificate = builder.sign(ca_key, hashes.SHA256())
    _write(file, _certificate_pem(certificate) + _key_pem(key))


def _host(host: str) -> Any:
    x509 = _cryptography()
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem


def _certificate_pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    pem: bytes = certificate.public_bytes(Encoding.PEM)
    return pem


def _write(file: Path, content: bytes) -> None:
    """Write a file atomically, readable by its owner only."""
    aside = file.with_suffix(".tmp")
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(content)
    aside.replace(file)
