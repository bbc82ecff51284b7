"""Certificates that count no longer: those in the revocation lists of `ssl.crl.location`, and expired ones.

Their CAs revoke certificates (RFC 5280, section 5). TLS itself refuses an expired one in a handshake, but not where the
client resumes a session that began before (`has_expired`).

gRPC's Python server checks no revocation lists. It shows the certificate of a call, so the listeners check each call,
and each new connection of Kafka clients, themselves.

A list counts if a CA in `ssl.truststore.location` has signed it. One whose next update is overdue still counts: what it
has revoked stays so. Delta lists and lists of other issuers' certificates (indirect ones) are refused.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from raftlog._client.security import Stamp, stamp_of_files
from raftlog.errors import InvalidConfig

logger = logging.getLogger(__name__)

LOCATION: Final = "ssl.crl.location"
LOOK_EVERY_S: Final = 1.0
MAX_KNOWN: Final = 10_000
"""Certificates whose issuer and number, and end, are cached."""
_LIST: Final = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
_PEM: Final = b"-----BEGIN"

_Number = tuple[x509.Name, int]
"""The issuer and the serial number of a certificate. Names with other types of ASN.1 strings are equal."""


class RevocationLists:
    """The revoked certificates of a file. `refresh` is for any thread, everything else for the event loop."""

    def __init__(
        self,
        location: str,
        truststore_location: str,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Read the lists.

        Raises:
            InvalidConfig: the file cannot be read, or a list in it is not valid.
        """
        self._location = location
        self._truststore_location = truststore_location
        self._now = now
        self._known: dict[bytes, _Number | None] = {}
        self._looked_s = time.monotonic()
        self._reading = threading.Lock()
        """Held by a reading, so that a slow one of older lists cannot end last and replace newer ones."""
        self._stamp: Stamp = self._stamp_now()
        """Of the files whose lists are in use."""
        self._revoked = self._read()
        self._failed: tuple[Stamp, str] | None = None
        """The failure that was logged last, and of which files."""

    def is_revoked(self, certificate: bytes) -> bool:
        """Whether a certificate, PEM or DER, is revoked; b"" is none, and one that cannot be read counts as revoked."""
        if not certificate or not self._revoked:
            return False
        try:
            number = self._known[certificate]
        except KeyError:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            number = self._known[certificate] = _number_of(certificate)
        return number is None or number in self._revoked

    async def fresh(self) -> None:
        """Read the file again if it has changed; look at most once a second."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Read the file again if it has changed; while that fails, the previous lists stay in use. Raises nothing.

        A failure may pass without a change of the file (EMFILE, EIO), so each call tries again. It is logged once.
        """
        with self._reading:
            stamp = self._stamp_now()
            if stamp == self._stamp:
                return
            try:
                self._revoked = self._read()
            except Exception as error:  # whatever it is, the caller has other files to watch, or a call to serve
                failed = stamp, str(error) or repr(error)
                if failed != self._failed:
                    self._failed = failed
                    logger.error("the revocation lists have changed, but the previous ones stay in use: %s", failed[1])
            else:
                self._stamp, self._failed = stamp, None

    def _read(self) -> frozenset[_Number]:
        named = f"{LOCATION}={self._location!r}"
        content = _content(named, self._location)
        trusted = _content(f"ssl.truststore.location={self._truststore_location!r}", self._truststore_location)
        found = _LIST.findall(content)
        if not found:
            raise InvalidConfig(f"{named} has no revocation list in PEM form (-----BEGIN X509 CRL-----)")
        revoked: set[_Number] = set()
        try:
            authorities = x509.load_pem_x509_certificates(trusted)
            for each in map(x509.load_pem_x509_crl, found):
                self._check(named, each, authorities)
                issuer = each.issuer
                revoked.update((issuer, entry.serial_number) for entry in each)
        except InvalidConfig:
            raise
        except Exception as error:  # parts are parsed when they are asked for; errors have no common class but this
            raise InvalidConfig(f"{named}: a list, or a certificate of the CAs, is damaged ({error})") from None
        logger.info("revocation lists", extra={"file": self._location, "lists": len(found), "revoked": len(revoked)})
        return frozenset(revoked)

    def _check(self, named: str, found: x509.CertificateRevocationList, authorities: list[x509.Certificate]) -> None:
        issuer = found.issuer.rfc4514_string()
        if not any(each.subject == found.issuer and _has_signed(each, found) for each in authorities):
            raise InvalidConfig(
                f"{named}: no CA in ssl.truststore.location={self._truststore_location!r} has signed the list of "
                f"{issuer}"
            )
        unknown = [each.oid.dotted_string for each in found.extensions if each.critical]
        if unknown:  # a delta list, an indirect one, or one of some reasons only
            raise InvalidConfig(
                f"{named}: the list of {issuer} has a critical extension ({', '.join(unknown)}); use full lists of "
                "each CA's own certificates"
            )
        until = found.next_update_utc
        if until is not None and until < self._now():
            logger.warning(
                "a revocation list is overdue, and still counts; get a new one from its CA",
                extra={"file": self._location, "issuer": issuer, "next_update": until.isoformat()},
            )

    def _stamp_now(self) -> Stamp:
        return stamp_of_files((self._location, self._truststore_location))


def _content(named: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InvalidConfig(f"{named} cannot be read: {error.strerror}") from None


def _has_signed(authority: x509.Certificate, found: x509.CertificateRevocationList) -> bool:
    try:
        return found.is_signature_valid(authority.public_key())  # type: ignore[arg-type] # other keys raise TypeError
    except (InvalidSignature, UnsupportedAlgorithm, TypeError, ValueError):
        return False


def has_expired(certificate: bytes) -> bool:
    """Whether a certificate, PEM or DER, has expired; b"" is none, and one that cannot be read counts as expired."""
    if not certificate:
        return False
    until = _until_of(certificate)
    return until is None or until < datetime.now(UTC)


@lru_cache(MAX_KNOWN)
def _until_of(certificate: bytes) -> datetime | None:
    try:
        return _parsed(certificate).not_valid_after_utc
    except (ValueError, x509.InvalidVersion):
        return None


def _number_of(certificate: bytes) -> _Number | None:
    try:
        found = _parsed(certificate)
        return found.issuer, found.serial_number
    except (ValueError, x509.InvalidVersion):
        return None


def _parsed(certificate: bytes) -> x509.Certificate:
    if certificate.startswith(_PEM):
        return x509.load_pem_x509_certificate(certificate)
    return x509.load_der_x509_certificate(certificate)
