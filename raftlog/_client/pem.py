"""Certificates and keys in PEM files: read, checked, and read again when they change. Imports nothing of gRPC."""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from raftlog.errors import InvalidConfig

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
"""How long files are taken for unchanged after a look at them."""
TRY_AGAIN_S: Final = 30.0
"""How long unchanged files that were refused stay so: a certificate may only not count yet."""
_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_KEY: Final = b"PRIVATE KEY-----"
_ENCRYPTED: Final = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")
_ATTEMPTS: Final = 3
"""Files that are being replaced while they are read are read again."""


class Names(NamedTuple):
    """What the settings are called that name the files."""

    ca: str
    certificate: str
    key: str


@dataclass(frozen=True, slots=True)
class PemFiles:
    """Which files there are; "" for none. Without `key` the key is in the file of the certificate."""

    names: Names
    ca: str = ""
    certificate: str = ""
    key: str = ""

    @property
    def key_file(self) -> str:
        """Where the key is."""
        return self.key or self.certificate


Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Pem:
    """What is in the files; empty where there is no file."""

    ca: bytes
    certificate: bytes
    key: bytes


def read_pem(files: PemFiles) -> tuple[Pem, Stamp]:
    """Return what is in the files, and what tells whether they have changed since.

    Raises:
        InvalidConfig: a file cannot be read, is not what it should be, or the key is of another certificate; says
            which setting names it.
    """
    stamp = _stamp(files)
    for _ in range(_ATTEMPTS):
        try:
            pem = _read_once(files)
        except InvalidConfig:
            if (now := _stamp(files)) == stamp:
                raise
        else:
            if (now := _stamp(files)) == stamp:
                return pem, stamp
        stamp = now
    raise InvalidConfig(
        f"{files.names.certificate}={files.certificate!r} changes all the time; put new files there by renaming them"
    )


def _read_once(files: PemFiles) -> Pem:
    ca = certificate = key = b""
    if files.ca:
        ca = _content(files.names.ca, files.ca, _CERTIFICATE, "certificate of a CA")
        _check_ca(files, ca)
    if files.certificate:
        certificate = _content(files.names.certificate, files.certificate, _CERTIFICATE, "certificate")
        key_name = files.names.key if files.key else files.names.certificate
        key = _content(key_name, files.key_file, _KEY, "private key")
        if any(mark in key for mark in _ENCRYPTED):
            raise InvalidConfig(
                f"{key_name}={files.key_file!r}: the private key is encrypted, which is not supported; decrypt it with "
                "`openssl pkey -in FILE -out NEW`, and keep others from reading that"
            )
        _check_pair(files)
    elif files.key:
        raise InvalidConfig(
            f"{files.names.key}={files.key!r} without {files.names.certificate}: a key needs its certificate"
        )
    return Pem(ca, certificate, key)


def _content(name: str, path: str, mark: bytes, what: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise InvalidConfig(f"{name}={path!r} cannot be read: {error.strerror}") from None
    if mark not in content:
        raise InvalidConfig(f"{name}={path!r} has no {what} in PEM form (-----BEGIN ...)")
    return content


def _check_ca(files: PemFiles, ca: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
    except ssl.SSLError as error:
        raise InvalidConfig(f"{files.names.ca}={files.ca!r}: a certificate in it is damaged ({error.reason})") from None


def _check_pair(files: PemFiles) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.certificate, files.key_file, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidConfig(
                f"{files.names.certificate}={files.certificate!r} and the key in {files.key_file!r} do not belong "
                "together; a certificate stands before those of its CAs"
            ) from None
        raise InvalidConfig(
            f"{files.names.certificate}={files.certificate!r}: certificate or key is damaged ({error.reason or error})"
        ) from None
    except OSError as error:
        raise InvalidConfig(
            f"{files.names.certificate}={files.certificate!r} cannot be read: {error.strerror}"
        ) from None


def _stamp(files: PemFiles) -> Stamp:
    stamps = []
    for path in filter(None, (files.ca, files.certificate, files.key)):
        try:
            found = os.stat(path)
        except OSError:
            stamps.append((0, 0, 0))
        else:
            stamps.append((found.st_mtime_ns, found.st_ino, found.st_size))
    return tuple(stamps)


class FreshPem:
    """What is in the files now; what they had before for as long as what is there is no good. From any thread.

    `check` is asked about what was read before it counts, and raises InvalidConfig.
    """

    def __init__(
        self,
        files: PemFiles,
        check: Callable[[Pem], None] = lambda pem: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the files. Raises InvalidConfig as `read_pem`, or as `check` does."""
        self.files = files
        self._check = check
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._pem, self._stamp = read_pem(files)
        check(self._pem)
        self._looked_s = clock_s()
        self._version = 1
        self._refused = ""
        """Why the files of now are no good."""
        self._refused_s = 0.0

    def current(self) -> tuple[Pem, int]:
        """Return what counts, and a number that rises when it changes."""
        with self._lock:
            now_s = self._clock_s()
            if now_s - self._looked_s >= LOOK_EVERY_S:
                self._looked_s = now_s
                late = self._refused and now_s - self._refused_s >= TRY_AGAIN_S
                if late or _stamp(self.files) != self._stamp:
                    self._read_again(now_s)
            return self._pem, self._version

    def _read_again(self, now_s: float) -> None:
        self._stamp = _stamp(self.files)
        try:
            pem, self._stamp = read_pem(self.files)
            self._check(pem)
        except InvalidConfig as error:
            self._refused_s = now_s
            if str(error) != self._refused:
                self._refused = str(error)
                logger.error("the certificates have changed, and the ones before stay in use: %s", error)
            return
        self._refused = ""
        if pem != self._pem:
            self._pem = pem
            self._version += 1
            logger.info("certificates read again", extra={"file": self.files.certificate or self.files.ca})
