"""OAUTHBEARER (RFC 7628, KIP-255, KIP-768): a client logs in with a JSON Web Token of a trusted issuer.

`Bearers.verify` takes the one message of the mechanism and returns the user and when the token ends. Both listeners
reach it by `ClientSecurity.verify_bearer`. `joserfc` checks signatures.

A token is accepted if

- its algorithm is one of `sasl.oauthbearer.algorithms`, all of which are asymmetric: no key of the broker can sign
- one of the issuer's keys, which names that algorithm or none, has signed it
- `iss` and `aud` are the configured ones, `exp` is ahead and `nbf` and `iat` are not, give or take
  `sasl.oauthbearer.clock.skew.seconds`
- the claim `sasl.oauthbearer.sub.claim.name` is a name that a user can have

A JSON Web Key Set comes from a file or a URL. The file is read again when it changes. The URL is asked again every
`sasl.oauthbearer.jwks.endpoint.refresh.ms`, and sooner after a token with an unknown key, but at most once in
REFRESH_AT_LEAST_S. An unreadable file or answer leaves the previous keys in use. A URL has to be one of
`sasl.oauthbearer.allowed.urls`.

No redirect and no proxy is followed, and no address that is not public is asked, unless
`sasl.oauthbearer.private.addresses.allow` says so: neither a wrong setting nor a name server makes the broker ask its
own network (server-side request forgery). The connection goes to the address that was checked.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from broker.clock import Clock
from broker.config.config import BrokerConfig
from broker.security.users import stamp_of
from raftlog._core.security.acls import why_no_user
from raftlog.errors import AuthenticationFailed, BrokerOverloaded, InvalidConfig

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 16_384
MAX_KEYS_BYTES: Final = 1 << 20
TIMEOUT_S: Final = 5.0
"""For each step of a request for the keys."""
REFRESH_AT_LEAST_S: Final = 10.0
MOST_LEFT_MS: Final = 365 * 24 * 60 * 60 * 1_000
"""A login counts no longer, whatever its token says: times on the wire have 64 bits."""
_SHOWN: Final = 100
_FILE: Final = "file"


class OauthConfig(NamedTuple):
    """The settings; their keys are `sasl.oauthbearer.` and these names, with dots."""

    jwks_endpoint_url: str
    expected_issuer: str
    expected_audience: tuple[str, ...]
    algorithms: tuple[str, ...] = ("RS256", "PS256", "ES256")
    sub_claim_name: str = "sub"
    clock_skew_s: int = 30
    refresh_ms: float = 3_600_000
    allowed_urls: tuple[str, ...] = ()
    private_addresses_allow: bool = False

    @classmethod
    def of(cls, config: BrokerConfig) -> OauthConfig:
        """Return a broker's settings."""
        return cls(
            config.sasl_oauthbearer_jwks_endpoint_url,
            config.sasl_oauthbearer_expected_issuer,
            config.sasl_oauthbearer_expected_audience,
            config.sasl_oauthbearer_algorithms,
            config.sasl_oauthbearer_sub_claim_name,
            config.sasl_oauthbearer_clock_skew_seconds,
            config.sasl_oauthbearer_jwks_endpoint_refresh_ms,
            config.sasl_oauthbearer_allowed_urls,
            config.sasl_oauthbearer_private_addresses_allow,
        )


class Bearer(NamedTuple):
    """The content of an accepted token that counts here: the user, and its end in Unix seconds."""

    user: str
    expires_s: float


def token_of(message: bytes) -> str:
    """Return the token in a client's message: `n,,` 0x01 `auth=Bearer TOKEN` 0x01 0x01 (RFC 7628).

    Raises:
        AuthenticationFailed: it is none, or it asks to act as another user.
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise AuthenticationFailed(f"the message of OAUTHBEARER has {len(message)} bytes, {MAX_MESSAGE_BYTES} at most")
    try:
        header, *pairs = message.decode("ascii").split("\x01")
    except UnicodeDecodeError:
        raise AuthenticationFailed("the message of OAUTHBEARER is not ASCII") from None
    if header != "n,,":
        raise AuthenticationFailed(
            "the message of OAUTHBEARER does not begin with n,, and 0x01: authorization as another user and channel "
            "binding do not exist here"
        )
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name == "auth":
            scheme, _, token = value.partition(" ")
            if scheme.lower() == "bearer" and token.strip():
                return token.strip()
    raise AuthenticationFailed("the message of OAUTHBEARER has no auth=Bearer TOKEN")


class Bearers:
    """Accepts or refuses tokens. `verify` runs on the event loop, `refresh` in a thread."""

    def __init__(
        self,
        config: OauthConfig,
        clock: Clock,
        *,
        fetch: Callable[[OauthConfig], bytes] | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Read the keys. A file has to be there; a URL that does not answer is asked again.

        Raises:
            InvalidConfig: the file cannot be read or has no keys, or the URL is not an allowed one.
        """
        self._config = config
        self._clock = clock
        self._fetch = fetch or fetch_keys
        self._wall_s = wall_s
        self._keys: KeySet | None = None
        self._raw = b""
        self._asked_ms = -math.inf
        self._unknown_key = False
        self._why_none = ""
        check_url(config)
        self._is_file = urlsplit(config.jwks_endpoint_url).scheme == _FILE
        self._stamp: object = None
        self._registry = jwt.JWTClaimsRegistry(
            now=lambda: int(wall_s()),
            leeway=config.clock_skew_s,
            iss={"essential": True, "value": config.expected_issuer},
            aud={"essential": True, "values": list(config.expected_audience)},
            exp={"essential": True},
        )
        self.refresh()
        if self._keys is None and self._is_file:
            raise InvalidConfig(f"{_URL}={config.jwks_endpoint_url!r}: {self._why_none}")

    # Keys

    def refresh(self) -> bool:
        """Read the keys if they are due, and return whether they have changed; blocks for some seconds at most."""
        now_ms, stamp = self._clock.monotonic_ms(), None
        if self._is_file:
            stamp = stamp_of(_path_of(self._config.jwks_endpoint_url))
            if self._keys is not None and stamp == self._stamp:
                return False
        else:
            missing = self._unknown_key or self._keys is None
            pause_ms = REFRESH_AT_LEAST_S * 1_000 if missing else self._config.refresh_ms
            if now_ms - self._asked_ms < pause_ms:
                return False
        self._asked_ms = now_ms
        self._unknown_key = False
        try:
            raw = self._fetch(self._config)
            if raw == self._raw:
                self._stamp = stamp
                return False
            keys = keys_of(raw)
        except InvalidConfig as error:
            if str(error) != self._why_none:
                logger.error("the keys of OAUTHBEARER could not be read: %s", error)
                self._why_none = str(error)
            return False
        self._keys, self._raw, self._why_none, self._stamp = keys, raw, "", stamp
        logger.info("keys of OAUTHBEARER read", extra={"event": "oauth_keys_read", "keys": len(keys.keys)})
        return True

    # Tokens

    def verify(self, message: bytes) -> Bearer:
        """Return the user of a client's message.

        Raises:
            AuthenticationFailed: the message or its token is not acceptable; the message says why, without the token.
            BrokerOverloaded: the issuer's keys are not known yet.
        """
        token = token_of(message)
        if self._keys is None:
            raise BrokerOverloaded("this broker does not have the keys of the tokens' issuer yet; try again")
        try:
            found = jwt.decode(token, self._keys, algorithms=list(self._config.algorithms))
            self._registry.validate(found.claims)
        except InvalidKeyIdError:
            self._unknown_key = True
            raise AuthenticationFailed("the token is signed with a key that this broker does not know") from None
        except (JoseError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise AuthenticationFailed(f"the token is not valid here: {_words(error)}") from None
        expires_s = found.claims["exp"]
        user = found.claims.get(self._config.sub_claim_name)
        if not isinstance(user, str):
            raise AuthenticationFailed(f"the token has no text in its claim {self._config.sub_claim_name!r}")
        if (why := why_no_user(user)) is not None:
            raise AuthenticationFailed(f"the token's user {user[:_SHOWN]!r} cannot be one here: {why}")
        if not isinstance(expires_s, (int, float)) or not math.isfinite(expires_s):
            raise AuthenticationFailed("the token's claim 'exp' is not a time")
        return Bearer(user, float(expires_s))

    def left_ms(self, bearer: Bearer) -> int:
        """Return how long the token still counts, MOST_LEFT_MS at most.

        Its end has the tolerance for clocks that its check has.
        """
        left_s = bearer.expires_s + self._config.clock_skew_s - self._wall_s()
        return max(0, min(MOST_LEFT_MS, int(left_s * 1_000)))


def _words(error: Exception) -> str:
    return str(getattr(error, "description", "") or error or type(error).__name__)[:_SHOWN]


def keys_of(raw: bytes) -> KeySet:
    """Return the public keys of a JSON Web Key Set; symmetric and private keys are refused.

    Raises:
        InvalidConfig: it is none, or it has a key that must not be in it.
    """
    try:
        found = json.loads(raw)
        listed = found["keys"]
        secret = [each for each in listed if each.get("kty") == "oct" or "d" in each]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InvalidConfig('the keys are no JSON Web Key Set: {"keys": [...]} (RFC 7517)') from None
    if secret:
        raise InvalidConfig("the key set has a private or symmetric key; it must have public keys only")
    try:
        return KeySet.import_key_set({"keys": [each for each in listed if each.get("use", "sig") == "sig"]})
    except (JoseError, ValueError, TypeError) as error:
        raise InvalidConfig(f"the key set has no key that can be used: {_words(error)}") from None


_URL: Final = "sasl.oauthbearer.jwks.endpoint.url"


def check_url(config: OauthConfig) -> None:
    """Check that the keys may be asked for there.

    Raises:
        InvalidConfig: the URL is of another kind, or is not an allowed one.
    """
    url = config.jwks_endpoint_url
    parts = urlsplit(url)
    if parts.scheme == _FILE and parts.path and not parts.netloc:
        return
    https = parts.scheme == "https" or (parts.scheme == "http" and config.private_addresses_allow)
    if not https or not parts.hostname or parts.username or parts.fragment:
        raise InvalidConfig(f"{_URL}={url!r}: write https://HOST/PATH, or file:///PATH for a file with the keys")
    if url not in config.allowed_urls:
        raise InvalidConfig(f"{_URL}={url!r} is not one of sasl.oauthbearer.allowed.urls; name it there as well")


def fetch_keys(config: OauthConfig) -> bytes:
    """Return the bytes of the key set, from its file or its URL.

    Raises:
        InvalidConfig: it cannot be read.
    """
    url = config.jwks_endpoint_url
    if urlsplit(url).scheme == _FILE:
        try:
            with open(_path_of(url), "rb") as file:
                raw = file.read(MAX_KEYS_BYTES + 1)
        except OSError as error:
            raise InvalidConfig(f"the file cannot be read: {error.strerror}") from None
    else:
        raw = _fetch_url(url, private=config.private_addresses_allow)
    if len(raw) > MAX_KEYS_BYTES:
        raise InvalidConfig(f"the key set has more than {MAX_KEYS_BYTES} bytes")
    return raw


def _fetch_url(url: str, *, private: bool) -> bytes:
    parts = urlsplit(url)
    assert parts.hostname is not None, "check_url has seen it"
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connection = http.client.HTTPConnection(parts.hostname, port, timeout=TIMEOUT_S)
    try:
        stream = socket.create_connection((_checked_address(parts.hostname, port, private=private), port), TIMEOUT_S)
        if parts.scheme == "https":
            stream = ssl.create_default_context().wrap_socket(stream, server_hostname=parts.hostname)
        connection.sock = stream  # of the checked address; http.client would ask the name server again
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"Accept": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise InvalidConfig(f"the answer has the status {response.status}; redirects are not followed")
        return response.read(MAX_KEYS_BYTES + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise InvalidConfig(f"the URL does not answer: {type(error).__name__}: {error}") from None
    finally:
        connection.close()


def _checked_address(host: str, port: int, *, private: bool) -> str:
    """Return the first address of the host, if all of them may be asked.

    Raises:
        InvalidConfig: one is not public.
        OSError: the name has no address.
    """
    found = [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in found:
        if not private and not is_public(ip_address(address.partition("%")[0])):
            raise InvalidConfig(
                f"{host} has the address {address}, which is not public; set "
                "sasl.oauthbearer.private.addresses.allow = true if the issuer is in your own network"
            )
    return found[0]


_WITH_IPV4: Final = (IPv6Network("64:ff9b::/96"), IPv6Network("::/96"))
"""IPv6 addresses whose last four bytes are an IPv4 address, which a gateway or the host may reach: those of NAT64
(RFC 6052) and the IPv4-compatible ones (RFC 4291)."""


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is one host of the public internet; of an IPv6 address that stands for an IPv4 one, that."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and any(address in network for network in _WITH_IPV4):
            inner = IPv4Address(address.packed[-4:])
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast


def _path_of(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))
