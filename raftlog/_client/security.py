"""TLS and logins of clients: PEM files, SCRAM logins (RFC 5802), and channels that use both.

`FreshPem` reads certificates and keys again when their files change; `ChannelTls` opens channels with them, for clients
and between nodes. `why_refused` finds out why a server refuses a client's certificate. `TokenSource` gets JSON Web
Tokens for OAUTHBEARER. `Logins` holds the tokens that calls carry. For each call, gRPC asks for the token in a thread;
that thread logs in if there is no token, and concurrent calls wait for its login. Each broker issues its own tokens.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import re
import shlex
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
import weakref
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote, urlencode, urlsplit

import grpc

from raftlog import errors
from raftlog._core.cluster import is_loopback
from raftlog.errors import AuthenticationFailed, BrokerUnavailable, InvalidConfig, RaftlogError, RetriableError
from raftlog.v1 import security_pb2, security_pb2_grpc

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
"""Files are checked for changes at most this often."""
TRY_AGAIN_S: Final = 30.0
"""Refused files are read again after this long, even if they have not changed: a certificate may have become valid."""
_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_KEY: Final = b"PRIVATE KEY-----"
_ENCRYPTED: Final = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")
_ENCRYPTED_KEY: Final = re.compile(rb"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?-----END \1-----", re.DOTALL)
KEY_PASSWORD: Final = "ssl.key.password.location"
KEY_PASSWORD_COMMAND: Final = "ssl.key.password.command"
_COMMAND_S: Final = 10.0
_ATTEMPTS: Final = 3
"""How often files that change during a read are read again."""


def _output_of(named: str, command: str) -> str:
    """Return what a command prints.

    Raises:
        InvalidConfig: it fails; the message names the setting.
    """
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise InvalidConfig(f"{named} cannot be run: {error}") from None
    if done.returncode != 0:
        raise InvalidConfig(f"{named} ended with {done.returncode}: {done.stderr.strip()[:500]}")
    return done.stdout


class Names(NamedTuple):
    """The names of the settings for the files."""

    ca: str
    certificate: str
    key: str


@dataclass(frozen=True, slots=True)
class PemFiles:
    """Paths of PEM files; "" for none. Without `key`, the certificate's file has the key too."""

    names: Names
    ca: str = ""
    certificate: str = ""
    key: str = ""
    password_location: str = ""
    """The file with the password of an encrypted key."""
    password_command: str = ""
    """A command that prints the password, run without a shell."""

    def password(self) -> str:
        """Return the password of the key; "" if none is configured.

        Raises:
            InvalidConfig: the file cannot be read, the command fails, or there is no password in it.
        """
        if not self.password_location and not self.password_command:
            return ""
        if self.password_location and self.password_command:
            raise InvalidConfig(f"{KEY_PASSWORD} and {KEY_PASSWORD_COMMAND} are both set; leave one of them out")
        if self.password_command:
            name = f"{KEY_PASSWORD_COMMAND}={self.password_command!r}"
            found = _output_of(name, self.password_command)
        else:
            name = f"{KEY_PASSWORD}={self.password_location!r}"
            try:
                with open(self.password_location, encoding="utf-8") as file:
                    found = file.read()
            except OSError as error:
                raise InvalidConfig(f"{name} cannot be read: {error.strerror}") from None
            except UnicodeDecodeError:
                raise InvalidConfig(f"{name} is not UTF-8 text") from None
        found = found.removesuffix("\n").removesuffix("\r")
        if not found:
            raise InvalidConfig(f"{name} gives no password")
        return found

    @property
    def key_file(self) -> str:
        """The file with the key."""
        return self.key or self.certificate


Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Pem:
    """The contents of the files; empty where there is no file."""

    ca: bytes
    certificate: bytes
    key: bytes


def read_pem(files: PemFiles) -> tuple[Pem, Stamp]:
    """Return the contents of the files, and a stamp that changes with them.

    Raises:
        InvalidConfig: a file cannot be read, has the wrong content, or the key belongs to another certificate; the
            message names the setting.
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
        f"{files.names.certificate}={files.certificate!r} changes all the time; replace files by renaming new ones"
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
        password = files.password()
        if any(mark in key for mark in _ENCRYPTED):
            if not password:
                raise InvalidConfig(
                    f"{key_name}={files.key_file!r}: the private key is encrypted; name a file with its password in "
                    f"{KEY_PASSWORD}, or a command that prints it in {KEY_PASSWORD_COMMAND}"
                )
            key = _decrypted(f"{key_name}={files.key_file!r}", key, password)
        _check_pair(files, password)
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


def _decrypted(named: str, content: bytes, password: str) -> bytes:
    """Return the encrypted key of a file as gRPC takes it, decrypted; it stays in memory."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
    except ModuleNotFoundError:
        raise InvalidConfig(
            f"{named}: an encrypted private key needs the package cryptography, which is not installed; install it "
            "with pip install cryptography"
        ) from None
    found = _ENCRYPTED_KEY.search(content)
    try:
        key = serialization.load_pem_private_key(found[0] if found else content, password.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InvalidConfig(f"{named}: the password does not open the private key, or the key is damaged") from None
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _check_pair(files: PemFiles, password: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(files.certificate, files.key_file, password=password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidConfig(
                f"{files.names.certificate}={files.certificate!r} and the key in {files.key_file!r} do not belong "
                "together; the certificate must come before those of its CAs"
            ) from None
        raise InvalidConfig(
            f"{files.names.certificate}={files.certificate!r}: certificate or key is damaged ({error.reason or error})"
        ) from None
    except OSError as error:
        raise InvalidConfig(
            f"{files.names.certificate}={files.certificate!r} cannot be read: {error.strerror}"
        ) from None


def _stamp(files: PemFiles) -> Stamp:
    return stamp_of_files(filter(None, (files.ca, files.certificate, files.key, files.password_location)))


def stamp_of_files(paths: Iterable[str]) -> Stamp:
    """Return a value that changes with any of the files."""
    stamps = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            stamps.append((0, 0, 0))
        else:
            stamps.append((found.st_mtime_ns, found.st_ino, found.st_size))
    return tuple(stamps)


class FreshPem:
    """The current contents of the files; invalid files keep the previous contents in use. Thread-safe.

    `check` validates new contents, and raises InvalidConfig to refuse them.
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
        """Why the current files are refused; empty: they are valid."""
        self._refused_s = 0.0

    def current(self) -> tuple[Pem, int]:
        """Return the valid contents, and a version that rises when they change."""
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
                logger.error("the certificates have changed, but the previous ones stay in use: %s", error)
            return
        self._refused = ""
        if pem != self._pem:
            self._pem = pem
            self._version += 1
            logger.info("certificates read again", extra={"file": self.files.certificate or self.files.ca})


EXPIRED: Final = 10
NOT_YET_VALID: Final = 9
WRONG_PURPOSE: Final = 26
"""X509_V_ERR_*."""
_ROUNDS: Final = 10
"""An upper bound; a handshake takes two or three."""


def shake_hands(server_context: ssl.SSLContext, client_context: ssl.SSLContext) -> dict[str, Any]:
    """Return the server's certificate as `ssl.SSLSocket.getpeercert` does, after a handshake in memory.

    Raises:
        ssl.SSLError: one side refuses the other.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_side=False)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_ROUNDS):
        for side in (client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return dict(client.getpeercert() or {})


# Why a server refuses the client's certificate

REFUSES: Final = "it refuses this client's certificate: "
_WANTS: Final = "it asks for a certificate, and this client has none; set ssl.certificate.location"
_EXPIRED: Final = "it has expired, or one of its CAs has; issue a new one, unless this machine's clock is wrong"
_NOT_YET: Final = "it is not valid yet; is a clock wrong?"
_PURPOSE: Final = "it is not issued for clients; issue one with extendedKeyUsage = clientAuth"
_UNTRUSTED: Final = "brokers do not trust its CA; use one of a CA in their ssl.truststore.location"
_NOT_OF_CA: Final = (
    "no CA in ssl.ca.location has issued it; use one of a CA that brokers trust (in their ssl.truststore.location)"
)
_UNSAID: Final = "they do not say why; is its CA in their ssl.truststore.location, and are the CAs between in its file?"
_OF_ALERT: Final = {
    "UNKNOWN_CA": _UNTRUSTED,
    "CERTIFICATE_EXPIRED": _EXPIRED,
    "CERTIFICATE_REVOKED": "its CA has revoked it; use another one",
    "UNSUPPORTED_CERTIFICATE": _PURPOSE,
    "BAD_CERTIFICATE": _UNSAID,
    "CERTIFICATE_UNKNOWN": _UNSAID,
    "CERTIFICATE_REQUIRED": "",
}
"""By the end of OpenSSL's name of TLS's alert."""
_OF_CODE: Final = {EXPIRED: _EXPIRED, NOT_YET_VALID: _NOT_YET, WRONG_PURPOSE: _PURPOSE}
_TRY_S: Final = 2.0
"""How long one connection may take to show whether it is refused."""
_TRIES: Final = 2
_BETWEEN_TRIES_S: Final = 0.1


def why_refused(address: str, files: PemFiles, pem: Pem) -> str:
    """Return why a server refuses a client with these files for its certificate; "": it does not, or does not show it.

    gRPC's clients learn nothing but that the connection was closed: in TLS 1.3 their part of the handshake is over
    before the server looks at the certificate. gRPC's servers send no alert either. They close the connection where
    others would get HTTP/2's first frame; so do servers that stop, therefore a second connection must meet the same.
    What is wrong with the certificate is then seen by a handshake with ourselves. Blocks for seconds at most.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if pem.ca:
            context.load_verify_locations(cadata=pem.ca.decode("ascii", "ignore"))
        else:
            context.load_default_certs()
        if pem.certificate:
            context.load_cert_chain(files.certificate, files.key_file, password=files.password())
    except (InvalidConfig, OSError):  # the files are being replaced
        return ""
    context.set_alpn_protocols(["h2"])
    for number in range(_TRIES):
        if number:
            time.sleep(_BETWEEN_TRIES_S)
        alert = _alert(address, context)
        if alert is None:
            return ""
        if alert:
            break
    if not pem.certificate or alert == "CERTIFICATE_REQUIRED":
        return _WANTS
    return REFUSES + (_OF_ALERT[alert] if alert else _own_verdict(files, pem))


def _alert(address: str, context: ssl.SSLContext) -> str | None:
    """Return the alert about a certificate that ends a new connection, "" if it ends without one, None if it goes on.

    None too if it ends for another reason: one that is closed during the handshake, or by a server without HTTP/2.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with (
            socket.create_connection((host, int(port)), _TRY_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as opened,
        ):
            speaks_http2 = opened.selected_alpn_protocol() == "h2"
            try:
                ended = not opened.recv(1)
            except ConnectionResetError:
                ended = True
            return "" if ended and speaks_http2 else None
    except ssl.SSLError as error:
        alert = (error.reason or "").partition("_ALERT_")[2]
        return alert if alert in _OF_ALERT else None
    except OSError:
        return None


def _own_verdict(files: PemFiles, pem: Pem) -> str:
    """Return what a server that trusts the CAs of `pem` would say about its certificate."""
    if not pem.ca:
        return _UNSAID
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED
    try:
        server.load_verify_locations(cadata=pem.ca.decode("ascii", "ignore"))
        for side in (server, client):
            side.load_cert_chain(files.certificate, files.key_file, password=files.password())
        shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        return _OF_CODE.get(error.verify_code, _NOT_OF_CA)
    except (InvalidConfig, OSError):
        pass
    return _UNSAID


OAUTHBEARER: Final = "OAUTHBEARER"
_OAUTH: Final = "sasl.oauthbearer."
_ENDPOINT: Final = f"{_OAUTH}token.endpoint.url"
_COMMAND: Final = f"{_OAUTH}token.command"
_CLIENT_ID: Final = f"{_OAUTH}client.credentials.client.id"
_CLIENT_SECRET: Final = f"{_OAUTH}client.credentials.client.secret"
_SCOPE: Final = f"{_OAUTH}scope"
_MAX_TOKEN_BYTES: Final = 12_000


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Where a client gets its JSON Web Tokens: a file, a command, or an issuer (OAuth's client credentials grant).

    `repr` omits the secret. Each login gets a new token.
    """

    endpoint_url: str = ""
    command: str = ""
    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    scope: str = ""

    def check(self) -> None:
        """Check that the settings agree with each other.

        Raises:
            InvalidConfig: they contradict each other; the message says how.
        """
        if bool(self.endpoint_url) == bool(self.command):
            raise InvalidConfig(
                f"{_MECHANISM}={OAUTHBEARER} takes tokens from one place: set {_ENDPOINT} to https://HOST/PATH of an "
                f"issuer or to file:///PATH, or {_COMMAND} to a command that prints one"
            )
        parts = urlsplit(self.endpoint_url)
        if parts.scheme == "file" or self.command:
            for name, value in ((_CLIENT_ID, self.client_id), (_CLIENT_SECRET, self.client_secret)):
                if value:
                    raise InvalidConfig(f"{name} is for an issuer: {_ENDPOINT}=https://HOST/PATH")
            return
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
            raise InvalidConfig(f"{_ENDPOINT}={self.endpoint_url!r}: write https://HOST/PATH, or file:///PATH")
        if not self.client_id or not self.client_secret:
            raise InvalidConfig(f"{_ENDPOINT} without {_CLIENT_ID} and {_CLIENT_SECRET}: an issuer asks for both")

    def read(self) -> str:
        """Return a new token; blocks for some seconds at most.

        Raises:
            AuthenticationFailed: the issuer refuses the client.
            BrokerUnavailable: the issuer does not answer.
            InvalidConfig: the file or the command has no token.
        """
        if self.command:
            token = self._of_command()
        elif self.endpoint_url.startswith("file:"):
            token = self._of_file(unquote(urlsplit(self.endpoint_url).path))
        else:
            token = self._of_issuer()
        if not token or len(token) > _MAX_TOKEN_BYTES or not token.isascii() or not token.isprintable():
            raise InvalidConfig(f"{self.named} gives no token: it must be one line of ASCII, as a JSON Web Token is")
        return token

    @property
    def named(self) -> str:
        """The setting, for messages."""
        return f"{_COMMAND}={self.command!r}" if self.command else f"{_ENDPOINT}={self.endpoint_url!r}"

    def _of_command(self) -> str:
        return _output_of(self.named, self.command).strip()

    def _of_file(self, path: str) -> str:
        try:
            with open(path, encoding="ascii") as file:
                return file.read(_MAX_TOKEN_BYTES + 2).strip()
        except OSError as error:
            raise InvalidConfig(f"{self.named} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            return ""

    def _of_issuer(self) -> str:
        """Ask the issuer for a token (RFC 6749, section 4.4). It follows no redirect, which would leak the secret."""
        pair = f"{quote(self.client_id, safe='')}:{quote(self.client_secret, safe='')}".encode()
        form = {"grant_type": "client_credentials", **({"scope": self.scope} if self.scope else {})}
        request = urllib.request.Request(
            self.endpoint_url,
            urlencode(form).encode(),
            {"Authorization": f"Basic {b64encode(pair).decode()}", "Accept": "application/json"},
        )
        opener = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=TIMEOUT_S) as response:
                answer = json.loads(response.read(_MAX_TOKEN_BYTES * 2))
        except urllib.error.HTTPError as error:
            if error.code in (400, 401, 403):
                raise AuthenticationFailed(
                    f"{self.named} refuses the client {self.client_id!r} with the status {error.code}; check "
                    f"{_CLIENT_ID}, {_CLIENT_SECRET} and {_SCOPE}"
                ) from None
            raise BrokerUnavailable(f"{self.named} answers with the status {error.code}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise BrokerUnavailable(f"{self.named} does not answer: {error}") from None
        token = answer.get("access_token", "") if isinstance(answer, dict) else ""
        return token if isinstance(token, str) else ""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        """Follow no redirect: urllib then raises the response as an error."""


PROTOCOL: Final = "sasl_ssl"
_MECHANISM: Final = "sasl.mechanism"
_USERNAME, _PASSWORD, _LOCATION = "sasl.username", "sasl.password", "sasl.password.location"


@dataclass(frozen=True, slots=True)
class Sasl:
    """A user with its password or password file. Comparable and picklable; `repr` omits the password."""

    mechanism: str
    username: str
    password: str = field(default="", repr=False)
    location: str = ""
    """The file with the password, read for every login."""
    tokens: TokenSource | None = None
    """The source of tokens with OAUTHBEARER, in place of a user's name and password."""

    def read_password(self) -> str:
        """Return the current password, without a line end at the end of the file.

        Raises:
            InvalidConfig: the file cannot be read, or is empty.
        """
        if not self.location:
            return self.password
        try:
            with open(self.location, encoding="utf-8") as file:
                password = file.read().removesuffix("\n").removesuffix("\r")
        except OSError as error:
            raise InvalidConfig(f"{_LOCATION}={self.location!r} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidConfig(f"{_LOCATION}={self.location!r} is not UTF-8 text") from None
        if not password:
            raise InvalidConfig(f"{_LOCATION}={self.location!r} is empty; put the password into it")
        return password

    @property
    def settings(self) -> str:
        """The settings of the login, for messages: brokers do not say which one is wrong."""
        if self.tokens is not None:
            return f"the token of {self.tokens.named}"
        password = f"{_LOCATION}={self.location!r}" if self.location else _PASSWORD
        return f"{_USERNAME}, {password} and {_MECHANISM}"


def sasl_of(values: Mapping[str, Any], protocol: str) -> Sasl | None:
    """Return the login that the options describe; None: no login.

    Raises:
        InvalidConfig: a login without the protocol for it, the protocol without a login, or two passwords.
    """
    mechanism, username, password, location = (values[name] for name in (_MECHANISM, _USERNAME, _PASSWORD, _LOCATION))
    if protocol != PROTOCOL:
        for name, value in ((_USERNAME, username), (_PASSWORD, password), (_LOCATION, location)):
            if value:
                raise InvalidConfig(f"{name} has no effect without security.protocol={PROTOCOL}; set both")
        return None
    oauth = [str(values[name]) for name in (_ENDPOINT, _COMMAND, _CLIENT_ID, _CLIENT_SECRET, _SCOPE)]
    if mechanism == OAUTHBEARER:
        for name, value in ((_USERNAME, username), (_PASSWORD, password), (_LOCATION, location)):
            if value:
                raise InvalidConfig(f"{name} has no effect with {_MECHANISM}={OAUTHBEARER}: the token names the user")
        tokens = TokenSource(*oauth)
        tokens.check()
        return Sasl(mechanism, "", tokens=tokens)
    if any(oauth):
        raise InvalidConfig(f"{_OAUTH}... has no effect without {_MECHANISM}={OAUTHBEARER}; set both")
    if not username:
        raise InvalidConfig(f"security.protocol={PROTOCOL} without {_USERNAME}; set the user's name")
    if password and location:
        raise InvalidConfig(f"{_PASSWORD} and {_LOCATION} are both set; leave one of them out")
    if not password and not location:
        raise InvalidConfig(
            f"security.protocol={PROTOCOL} without a password for user {username!r}; set {_LOCATION}, or {_PASSWORD}"
        )
    return Sasl(mechanism, username, password, location)


Options = Sequence[tuple[str, Any]]
_EVERY_CHANNEL: Final[dict[str, Any]] = {
    "grpc.use_local_subchannel_pool": 1,  # own connections: no client delays another one
    "grpc.enable_http_proxy": 0,
    "grpc.initial_reconnect_backoff_ms": 50,
    "grpc.min_reconnect_backoff_ms": 1000,  # how long an attempt to connect may take
    "grpc.max_reconnect_backoff_ms": 250,
    # A node that restarts in Kubernetes has another address; gRPC's default asks for a name again after 30 s.
    "grpc.dns_min_time_between_resolutions_ms": 500,
}
"""The options of all channels, of clients and between nodes; the options of one channel add to them or replace them."""


class ChannelTls:
    """Opens channels with the current certificates. The server's name is always checked."""

    def __init__(self, pem: FreshPem | PemFiles, sasl: Sasl | None = None) -> None:
        """Read the files. Raises InvalidConfig as `FreshPem`, and as `Logins` with `sasl`, the login."""
        self._pem = pem if isinstance(pem, FreshPem) else FreshPem(pem)
        self._lock = threading.Lock()
        self._made: tuple[int, grpc.ChannelCredentials] | None = None
        self._logins = None if sasl is None else Logins(sasl, self._open_for_login)

    @property
    def version(self) -> int:
        """A version that rises when the certificates change; existing channels keep using the older certificates."""
        return self._pem.current()[1]

    def open(self, address: str, options: Options) -> grpc.aio.Channel:
        """Return a new channel to an address, host:port."""
        credentials = self._credentials()
        if self._logins is not None:
            credentials = grpc.composite_channel_credentials(credentials, self._logins.credentials(address))
        return grpc.aio.secure_channel(address, credentials, options=_with_every(options))

    async def why_refused(self, address: str) -> str:
        """As the function, of a client with the current certificates; in a thread."""
        return await asyncio.to_thread(why_refused, address, self._pem.files, self._pem.current()[0])

    def _open_for_login(self, address: str) -> grpc.Channel:
        return grpc.secure_channel(address, self._credentials(), options=_with_every(()))

    def _credentials(self) -> grpc.ChannelCredentials:
        pem, version = self._pem.current()
        with self._lock:
            if self._made is None or self._made[0] != version:
                made = grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.certificate or None)
                self._made = version, made
            return self._made[1]


def dial(address: str, options: Options, tls: ChannelTls | None) -> grpc.aio.Channel:
    """Return a new channel to an address, host:port; in plaintext without `tls`."""
    if tls is not None:
        return tls.open(address, options)
    return grpc.aio.insecure_channel(address, options=_with_every(options))


def _with_every(options: Options) -> list[tuple[str, Any]]:
    return list({**_EVERY_CHANNEL, **dict(options)}.items())


TIMEOUT_S: Final = 10.0
"""The time limit of each of the two calls of a login."""
RENEWED_AFTER: Final = 0.8
"""A token is renewed after this share of its lifetime, while it is still valid."""
SECOND_TRY_S: Final = 0.25
"""A refused login is repeated once after this long: the broker may not yet know a new user or password."""
REFUSED_FOR_S: Final = 1.0
"""How long a refusal also answers further calls, which then do not log in."""
_RENEWAL_PAUSE_S: Final = 5.0
assert SECOND_TRY_S < REFUSED_FOR_S < TIMEOUT_S

FROM_PLUGIN: Final = "plugin failed with error: "
"""gRPC's prefix of an error that kept a call from getting its token."""
_NAMED: Final[dict[str, type[RaftlogError]]] = {
    name: each for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, RaftlogError)
}
_all_logins: weakref.WeakSet[Logins] = weakref.WeakSet()

OpenChannel = Callable[[str], grpc.Channel]
"""Opens a channel to an address, for calls without a token."""


def named_error(details: str) -> RaftlogError | None:
    """Return the error of a text such as `ClassName: what is wrong`, or None."""
    name, colon, text = details.rpartition(FROM_PLUGIN)[2].partition(": ")
    found = _NAMED.get(name) if colon else None
    return None if found is None else found(text)


def forget_token(address: str) -> bool:
    """Drop the tokens for a broker in this process, so that the next call logs in; return whether there were logins."""
    logged_in = [logins.forget(address) for logins in list(_all_logins)]
    return any(logged_in)


@dataclass(slots=True)
class _Login:
    """The login at one broker. A login holds the lock; `forget` clears the token without it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    token: str = ""
    renew_s: float = 0.0
    expires_s: float = 0.0
    failure: RaftlogError | None = None
    failed_s: float = 0.0


class Logins:
    """The tokens of one client, by address. Thread-safe; like every client, not used across a fork."""

    def __init__(self, sasl: Sasl, open_channel: OpenChannel, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises InvalidConfig if the password cannot be read. The first call logs in."""
        if sasl.tokens is None:
            sasl.read_password()
        self._sasl = sasl
        self._open_channel = open_channel
        self._clock = clock
        self._lock = threading.Lock()
        self._by_address: dict[str, _Login] = {}
        _all_logins.add(self)

    def credentials(self, address: str) -> grpc.CallCredentials:
        """Return call credentials that give every call of a channel its token."""
        return grpc.metadata_call_credentials(_Bearer(self, address), "raftlog")

    def token(self, address: str) -> str:
        """Return the token for a broker; log in if there is none, or if it must be renewed.

        Raises:
            AuthenticationFailed: the broker refuses the user, or cannot prove that it knows the password.
            BrokerUnavailable: the broker is not reachable.
            InvalidConfig: the password cannot be read any more.
        """
        asked_s = self._clock()
        login = self._login(address)
        with login.lock:
            now_s = self._clock()
            if (token := login.token) and now_s < login.renew_s:
                return token
            if login.failure is not None and self._still_counts(login, asked_s, now_s):
                raise type(login.failure)(str(login.failure))
            try:
                return self._renew(login, address)
            except RaftlogError as error:
                login.failure, login.failed_s = error, self._clock()
                token = login.token
                if not token or login.failed_s >= login.expires_s or not isinstance(error, RetriableError):
                    login.token = ""
                    raise
                login.renew_s = login.failed_s + _RENEWAL_PAUSE_S
                logger.warning("%s: %s; the previous token is still valid", address, error)
                return token

    @staticmethod
    def _still_counts(login: _Login, asked_s: float, now_s: float) -> bool:
        """Whether a failed login answers this call: it ended after the call began, or is a recent refusal."""
        final = isinstance(login.failure, AuthenticationFailed)
        return login.failed_s > asked_s or (final and now_s < login.failed_s + REFUSED_FOR_S)

    def _renew(self, login: _Login, address: str) -> str:
        try:
            begun_s = self._clock()
            answer = self._exchange(address)
        except AuthenticationFailed:
            time.sleep(SECOND_TRY_S)
            begun_s = self._clock()
            answer = self._exchange(address)
        lifetime_s = answer.lifetime_ms / 1000
        login.token, login.failure = answer.token, None
        login.renew_s, login.expires_s = begun_s + RENEWED_AFTER * lifetime_s, begun_s + lifetime_s
        logger.debug("user %s has logged in at %s for %.0f s", self._sasl.username, address, lifetime_s)
        return answer.token

    def forget(self, address: str) -> bool:
        """Drop the token that a broker refuses; return whether this client ever logged in there."""
        with self._lock:
            login = self._by_address.get(address)
        if login is None:
            return False
        login.token = ""  # without the login's lock, which a login in progress holds
        return True

    def _login(self, address: str) -> _Login:
        with self._lock:
            return self._by_address.setdefault(address, _Login())

    def _exchange(self, address: str) -> security_pb2.AuthenticateResponse:
        """Log in: each side proves that it knows the password, which is never sent."""
        import scramp  # imported only for a login

        sasl = self._sasl
        if sasl.tokens is not None:
            message = f"n,,\x01auth=Bearer {sasl.tokens.read()}\x01\x01"
            with closing(self._open_channel(address)) as channel:
                return self._ask(security_pb2_grpc.SecurityStub(channel).Authenticate, address, message)
        try:
            client = scramp.ScramClient([sasl.mechanism], sasl.username, sasl.read_password())
            with closing(self._open_channel(address)) as channel:
                ask = security_pb2_grpc.SecurityStub(channel).Authenticate
                first = self._ask(ask, address, client.get_client_first())
                client.set_server_first(first.message.decode())
                answer = self._ask(ask, address, client.get_client_final(), first.exchange_id)
                client.set_server_final(answer.message.decode())
        except (scramp.ScramException, UnicodeDecodeError) as error:
            raise AuthenticationFailed(
                f"the login of user {sasl.username!r} at {address} with {sasl.mechanism} failed, because the "
                f"broker's answer is wrong ({error}): it does not know the password, or runs another version"
            ) from None
        if not answer.token:
            raise AuthenticationFailed(f"{address} gave user {sasl.username!r} no token: does it run another version?")
        return answer

    def _ask(self, ask: Any, address: str, message: str, exchange_id: bytes = b"") -> security_pb2.AuthenticateResponse:
        request = security_pb2.AuthenticateRequest(
            mechanism=self._sasl.mechanism, exchange_id=exchange_id, message=message.encode()
        )
        try:
            response: security_pb2.AuthenticateResponse = ask(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise self._failure(error, address) from None
        if response.error.code:
            refusal = errors.from_wire(response.error)
            raise refusal if isinstance(refusal, RetriableError) else self._refused(address, str(refusal))
        return response

    def _failure(self, error: Any, address: str) -> RaftlogError:
        """Return the error of a login for a failed call."""
        details = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
                found = named_error(details)
                return self._refused(address, details if found is None else str(found))
            case grpc.StatusCode.UNIMPLEMENTED:
                return self._refused(address, "it knows no users; is security.protocol right, and the port?")
            case _:  # the call that needs the token adds the address
                return BrokerUnavailable(details)

    def _refused(self, address: str, why: str) -> AuthenticationFailed:
        sasl = self._sasl
        who = "the client" if sasl.tokens is not None else f"user {sasl.username!r}"
        return AuthenticationFailed(
            f"{address} does not let {who} in with {sasl.mechanism}: {why}; check {sasl.settings}"
        )


class _Bearer(grpc.AuthMetadataPlugin):
    """Gives calls to one broker their token. gRPC calls it in a thread of its own, so it may block."""

    def __init__(self, logins: Logins, address: str) -> None:
        self._logins = logins
        self._address = address

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        try:
            token = self._logins.token(self._address)
        except RaftlogError as error:
            callback((), RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            callback((("authorization", f"Bearer {token}"),), None)
