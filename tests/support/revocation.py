"""Revocation lists of the CA of `raftlog.testing`."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from raftlog.testing.certificates import CA_KEY_FILE, CertificateAuthority


class InTwoHours(datetime.datetime):
    """Takes the place of `datetime` in a module for which certificates of an hour are to have expired."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        """Return the time in two hours."""
        return datetime.datetime.now(tz) + datetime.timedelta(hours=2)


def revoke(
    authority: CertificateAuthority,
    file: Path,
    *certificates: Path,
    lasts: datetime.timedelta = datetime.timedelta(days=1),
    extension: Any = None,
    issuer: x509.Name | None = None,
) -> Path:
    """Write a list of these certificates, and return its file; `lasts` from a day ago on, by the CA or `issuer`."""
    (ca,) = x509.load_pem_x509_certificates(authority.ca_file.read_bytes())
    key = serialization.load_pem_private_key((authority.directory / CA_KEY_FILE).read_bytes(), None)
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject if issuer is None else issuer)
        .last_update(since)
        .next_update(since + lasts + datetime.timedelta(hours=1))
    )
    for each in certificates:
        number = x509.load_pem_x509_certificate(each.read_bytes()).serial_number
        entry = x509.RevokedCertificateBuilder().serial_number(number).revocation_date(since).build()
        builder = builder.add_revoked_certificate(entry)
    if extension is not None:
        builder = builder.add_extension(extension, critical=True)
    made = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type] # the CA's key is elliptic
    new = file.with_suffix(".new")
    new.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    os.replace(new, file)
    return file
