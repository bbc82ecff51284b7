"""The certificate with which a person logs in: read from what they give, and held in memory for clients to use.

Clients read certificates from files. On Linux the file lies in memory (memfd_create) and has no name in any directory;
elsewhere it is a temporary file that only its owner may read.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from raftlog.errors import InvalidRequestError

MOST_BYTES: Final = 64 << 10
"""A certificate with its chain and key has 3 to 10 KB."""
NODE: Final = "raftlog://node/"


@dataclass(frozen=True)
class Certificate:
    """`name`: the common name, or the whole subject without one. `pem`: the certificate, its chain, the bare key."""

    name: str
    pem: bytes = field(repr=False)

    @contextlib.contextmanager
    def lent(self) -> Iterator[str]:
        """Give the path of a file with all of it, for as long as the block runs."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
            try:
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(self.pem)
                yield f"/proc/self/fd/{descriptor}"
            finally:
                os.close(descriptor)
        else:
            with tempfile.NamedTemporaryFile(prefix="raftlog-console-", suffix=".pem") as named:
                named.write(self.pem)
                named.flush()
                yield named.name


def read_certificate(text: str, passphrase: str, now: datetime | None = None) -> Certificate:
    """Return the certificate in a text with PEM blocks: the certificate, those of CAs after it, and the private key.

    `passphrase`: of the key; "" for none.

    Raises:
        InvalidRequestError: something is missing or does not fit; the message says what to do.
    """
    from cryptography import x509  # here: most consoles never need it, and it takes memory
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.x509.oid import NameOID

    given = text.encode()
    if len(given) > MOST_BYTES:
        raise InvalidRequestError(f"a certificate with its key has at most {MOST_BYTES >> 10} KB")
    blocks = _key_blocks(given)
    if b"-----BEGIN CERTIFICATE-----" not in given:
        raise InvalidRequestError("there is no certificate in it; the block begins with -----BEGIN CERTIFICATE-----")
    if not blocks:
        raise InvalidRequestError(
            "the private key is missing; add the block that ends with -----END PRIVATE KEY----- or similar"
        )
    try:
        chain = x509.load_pem_x509_certificates(given)
    except ValueError:
        raise InvalidRequestError("the certificate is damaged; copy its file anew") from None
    try:
        key = serialization.load_pem_private_key(blocks[0], passphrase.encode() or None)
    except TypeError:
        said = "has no passphrase; leave that field empty" if passphrase else "is encrypted; give its passphrase"
        raise InvalidRequestError(f"the private key {said}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise InvalidRequestError("the passphrase is wrong, or the private key is damaged") from None
    encoding = serialization.Encoding
    public = (encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if chain[0].public_key().public_bytes(*public) != key.public_key().public_bytes(*public):
        raise InvalidRequestError(
            "the private key belongs to another certificate; yours must come before those of its CAs"
        )
    now = now or datetime.now(UTC)
    if chain[0].not_valid_after_utc < now:
        raise InvalidRequestError(f"the certificate expired on {chain[0].not_valid_after_utc:%Y-%m-%d}; renew it")
    if chain[0].not_valid_before_utc > now:
        raise InvalidRequestError(f"the certificate is not valid before {chain[0].not_valid_before_utc:%Y-%m-%d}")
    with contextlib.suppress(x509.ExtensionNotFound):
        names = chain[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        if any(uri.startswith(NODE) for uri in names.get_values_for_type(x509.UniformResourceIdentifier)):
            raise InvalidRequestError("this is the certificate of a node, which may do everything; use one of a person")
    common = chain[0].subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    name = str(common[0].value) if common else chain[0].subject.rfc4514_string()
    bare = key.private_bytes(encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Certificate(name, b"".join(each.public_bytes(encoding.PEM) for each in chain) + bare)


def _key_blocks(pem: bytes) -> list[bytes]:
    """Return the private keys in a text."""
    found = []
    for piece in pem.split(b"-----BEGIN ")[1:]:
        label, _, rest = piece.partition(b"-----")
        end = b"-----END " + label + b"-----"
        if label.endswith(b"PRIVATE KEY") and end in rest:
            found.append(b"-----BEGIN " + label + b"-----" + rest.partition(end)[0] + end + b"\n")
    return found
