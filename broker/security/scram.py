"""SCRAM exchanges (RFC 5802, RFC 7677). `scramp` implements the protocol.

An exchange is two messages of the client; the second has to come within EXCHANGE_MS. There are at most MAX_EXCHANGES,
and MAX_EXCHANGES_OF_NETWORK from one network; a further one ends the oldest, so that a client that begins many does not
keep others from authenticating. A network has MAX_FAILURES guesses a minute for each user name, existing or not.

PLAIN (RFC 4616), in which a client sends the password itself, is checked against the same credentials (`check_plain`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Any, Final
from unicodedata import ucd_3_2_0

from scramp import ScramException, ScramMechanism

from broker.clock import Clock
from broker.config.checks import PLAIN
from broker.observability.counters import Counters
from broker.security.audit import Audit
from broker.security.caller import network_of
from broker.security.users import Users
from raftlog._core.security.acls import MAX_USER_CHARACTERS
from raftlog.errors import AuthenticationFailed, BrokerOverloaded, RaftlogError
from raftlog.v1.security_pb2 import SCRAM_SHA_256, SCRAM_SHA_512
from raftmeta.credentials import MECHANISM_NAMES, Credential, Mechanism

EXCHANGE_MS: Final = 10_000
MAX_EXCHANGES: Final = 1_000
MAX_EXCHANGES_OF_NETWORK: Final = 250
MAX_FAILURES: Final = 20
"""Wrong passwords of one user from one network, within FAILURES_MS of the first."""
FAILURES_MS: Final = 60_000
MAX_COUNTED: Final = 10_000
"""Pairs of user and network whose failures are counted; as many others have to fail to evict one."""
MAX_MESSAGE_BYTES: Final = 4_096
EXCHANGE_ID_BYTES: Final = 16
FAILURE_DELAY_S: Final = 0.1
"""A failed authentication is answered after this delay."""
MAX_DELAYED: Final = 200
"""Failures that are delayed at once; further ones are answered immediately with BrokerOverloaded."""
MAX_PLAIN_CHECKS: Final = 4
"""Passwords that are checked at once; each takes a thread for as long as its iterations do."""
_SHOWN: Final = 100
_BY_NAME: Final = {name: mechanism for mechanism, name in MECHANISM_NAMES.items()}
_HASHES: Final = {SCRAM_SHA_256: "sha256", SCRAM_SHA_512: "sha512"}
_Guesser = tuple[str, str]
"""A user's name and a network."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    server: Any
    credential: Credential
    is_user: bool
    host: str
    expires_ms: float

    @property
    def guesser(self) -> _Guesser:
        """The key under which failures are counted."""
        return self.credential.user, network_of(self.host)


@dataclass(slots=True)
class _Failed:
    since_ms: float
    times: int = 0


class _Failures:
    """Failed logins by user and network, for a minute from the first one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failed: dict[_Guesser, _Failed] = {}
        """In the order of their first failures."""

    def check(self, guesser: _Guesser) -> None:
        """Check that another guess is allowed.

        Raises:
            BrokerOverloaded: there were MAX_FAILURES.
        """
        self._expire()
        failed = self._failed.get(guesser)
        if failed is not None and failed.times >= MAX_FAILURES:
            user, network = guesser
            raise BrokerOverloaded(
                f"logins of user {user[:_SHOWN]!r} from {network} have failed {MAX_FAILURES} times within a minute; "
                "wait a minute, and check the name and the password"
            )

    def add(self, guesser: _Guesser) -> None:
        """Count a failure."""
        failed = self._failed.get(guesser)
        if failed is None:
            if len(self._failed) >= MAX_COUNTED:
                del self._failed[next(iter(self._failed))]
            failed = self._failed[guesser] = _Failed(self._clock.monotonic_ms())
        failed.times += 1

    def clear(self, guesser: _Guesser) -> None:
        """Forget failures, after the right password."""
        self._failed.pop(guesser, None)

    def _expire(self) -> None:
        too_old_ms = self._clock.monotonic_ms() - FAILURES_MS
        while self._failed:
            oldest = next(iter(self._failed))
            if self._failed[oldest].since_ms > too_old_ms:
                return
            del self._failed[oldest]


class FailureDelay:
    """Delays the answers to failed authentications."""

    def __init__(self) -> None:
        self._delayed = 0

    async def of(self, error: RaftlogError) -> RaftlogError:
        """Return the error after FAILURE_DELAY_S; BrokerOverloaded at once instead, if MAX_DELAYED others wait."""
        if self._delayed >= MAX_DELAYED:
            return BrokerOverloaded("too many clients are failing to authenticate; try again")
        self._delayed += 1
        try:
            await asyncio.sleep(FAILURE_DELAY_S)
        finally:
            self._delayed -= 1
        return error


class ScramExchanges:
    """The exchanges of one broker, each a `begin` and a `finish`. `mechanisms`: names of the enabled ones."""

    def __init__(
        self, users: Users, mechanisms: tuple[str, ...], clock: Clock, counters: Counters, audit: Audit
    ) -> None:
        self._users = users
        self._mechanisms = mechanisms
        self._clock = clock
        self._counters = counters
        self._audit = audit
        self._exchanges: dict[bytes, _Exchange] = {}
        """In the order in which they began and will expire."""
        self._of_network: dict[str, dict[bytes, None]] = {}
        """The same exchanges by network, oldest first."""
        self._dropped: dict[bytes, None] = {}
        """Exchanges lately dropped to make room; their clients are told to try again."""
        self._failures = _Failures(clock)
        self._plain_checks = asyncio.Semaphore(MAX_PLAIN_CHECKS)

    def __len__(self) -> int:
        """Return the number of open exchanges."""
        self._expire()
        return len(self._exchanges)

    def begin(self, mechanism: str, message: bytes, host: str) -> tuple[bytes, bytes]:
        """Take a client's first message; return the exchange's id and the server's answer, also for an unknown user.

        Raises:
            AuthenticationFailed: the message is not SCRAM's, or the mechanism is not enabled.
            BrokerOverloaded: there were too many wrong passwords for that user lately.
        """
        if mechanism not in self._mechanisms:
            self._counters.authentications["other", "failure"] += 1
            raise AuthenticationFailed(
                f"mechanism {mechanism[:_SHOWN]!r} is not enabled here; this broker takes {', '.join(self._mechanisms)}"
            )
        chosen: list[tuple[Credential, bool]] = []

        def credential_of(user: str) -> tuple[bytes, bytes, bytes, int]:
            found = self._users.find(user, _BY_NAME[mechanism])
            credential = self._users.imitation(user, _BY_NAME[mechanism]) if found is None else found
            chosen.append((credential, found is not None))
            return credential.salt, credential.stored_key, credential.server_key, credential.iterations

        try:
            first = _first(message)
            server = ScramMechanism(mechanism).make_server(credential_of)
            server.set_client_first(first)
            answer = server.get_server_first().encode()
        except ScramException as error:
            self._counters.authentications[mechanism, "failure"] += 1
            raise AuthenticationFailed(f"the message is not a first message of {mechanism}: {_words(error)}") from None
        exchange_id = secrets.token_bytes(EXCHANGE_ID_BYTES)
        ((credential, is_user),) = chosen
        exchange = _Exchange(server, credential, is_user, host, self._clock.monotonic_ms() + EXCHANGE_MS)
        self._failures.check(exchange.guesser)
        self._expire()
        self._make_room(network_of(host))
        self._exchanges[exchange_id] = exchange
        self._of_network.setdefault(network_of(host), {})[exchange_id] = None
        return exchange_id, answer

    def finish(self, exchange_id: bytes, message: bytes) -> tuple[Credential, bytes]:
        """Take the final message; return the credential whose password the client proved, and the server's answer.

        Raises:
            AuthenticationFailed: the password is wrong, the user is unknown, or the exchange is unknown or expired.
            BrokerOverloaded: as `begin`, before the password is checked; or the exchange was dropped to make room.
        """
        self._expire()
        exchange = self._take(exchange_id)
        if exchange is None:
            if exchange_id in self._dropped:
                raise BrokerOverloaded("too many clients are authenticating; try again")
            raise AuthenticationFailed(
                f"the exchange is unknown, or it began more than {EXCHANGE_MS // 1_000} s ago; begin another"
            )
        credential = exchange.credential
        self._failures.check(exchange.guesser)  # again: many exchanges may have begun before the first failure
        answer = b""
        try:
            exchange.server.set_client_final(_text(message))
            answer = exchange.server.get_server_final().encode()
            is_right = exchange.is_user and self._is_current(credential)  # no imitation, and unchanged since `begin`
        except ScramException:
            is_right = False
        self._settle(credential, exchange.host, MECHANISM_NAMES[credential.mechanism], is_right=is_right)
        return credential, answer

    async def check_plain(self, message: bytes, host: str) -> Credential:
        """Take PLAIN's only message; return the credential whose password it has.

        Raises:
            AuthenticationFailed: the password is wrong, the user is unknown, or the message is not PLAIN's.
            BrokerOverloaded: there were too many wrong passwords for that user lately.
        """
        try:
            on_behalf_of, user, password = _text(message).split("\0")
        except (ScramException, ValueError):
            self._counters.authentications[PLAIN, "failure"] += 1
            raise AuthenticationFailed(f"the message is not one of {PLAIN}") from None
        if on_behalf_of not in ("", user):
            self._counters.authentications[PLAIN, "failure"] += 1
            raise AuthenticationFailed("a user cannot act for another one: leave the authorization id out")
        by_strength = sorted(self._mechanisms, reverse=True)  # the longest hash first
        users_own = (self._users.find(user, _BY_NAME[each]) for each in by_strength)
        found = next((each for each in users_own if each is not None), None)
        credential = found or self._users.imitation(user, _BY_NAME[by_strength[0]])
        guesser = credential.user, network_of(host)
        self._failures.check(guesser)
        async with self._plain_checks:
            matches = len(user) <= MAX_USER_CHARACTERS and await asyncio.to_thread(_has_password, credential, password)
        self._failures.check(guesser)  # as in `finish`
        is_right = matches and found is not None and self._is_current(credential)
        self._settle(credential, host, PLAIN, is_right=is_right)
        return credential

    def _is_current(self, credential: Credential) -> bool:
        return self._users.is_current(credential.user, credential.mechanism, credential.version)

    def _settle(self, credential: Credential, host: str, mechanism: str, *, is_right: bool) -> None:
        """Count a password that was checked. Raises AuthenticationFailed: it is wrong."""
        guesser = credential.user, network_of(host)
        if is_right:
            self._failures.clear(guesser)
            self._counters.authentications[mechanism, "success"] += 1
            return
        self._counters.authentications[mechanism, "failure"] += 1
        self._failures.add(guesser)
        self._audit.not_authenticated(credential.user, host, mechanism)
        raise AuthenticationFailed(f"there is no user {credential.user[:_SHOWN]!r}, or the password is wrong")

    def _take(self, exchange_id: bytes) -> _Exchange | None:
        exchange = self._exchanges.pop(exchange_id, None)
        if exchange is not None:
            network = network_of(exchange.host)
            del self._of_network[network][exchange_id]
            if not self._of_network[network]:
                del self._of_network[network]
        return exchange

    def _make_room(self, network: str) -> None:
        """If the network or the broker is at its limit, drop the oldest exchange of the network or of all."""
        own = self._of_network.get(network, {})
        if len(own) >= MAX_EXCHANGES_OF_NETWORK:
            oldest = next(iter(own))
        elif len(self._exchanges) >= MAX_EXCHANGES:
            oldest = next(iter(self._exchanges))
        else:
            return
        self._take(oldest)
        if len(self._dropped) >= MAX_EXCHANGES:
            del self._dropped[next(iter(self._dropped))]
        self._dropped[oldest] = None

    def _expire(self) -> None:
        now_ms = self._clock.monotonic_ms()
        while self._exchanges:
            oldest = next(iter(self._exchanges))
            if self._exchanges[oldest].expires_ms > now_ms:
                return
            self._take(oldest)


def keys_of(salted_password: bytes, mechanism: Mechanism) -> tuple[bytes, bytes]:
    """Return the stored key and the server key of a salted password (RFC 5802, section 3)."""
    hashed = _HASHES[mechanism]
    client_key = hmac.digest(salted_password, b"Client Key", hashed)
    return hashlib.new(hashed, client_key).digest(), hmac.digest(salted_password, b"Server Key", hashed)


def _has_password(credential: Credential, password: str) -> bool:
    """Whether this is the password. Takes a while: the credential's iterations."""
    scram = ScramMechanism(MECHANISM_NAMES[credential.mechanism])
    try:
        _, stored_key, _, _ = scram.make_auth_info(password, credential.iterations, credential.salt)
    except ScramException:  # SASLprep forbids it, so it is no user's password
        return False
    return hmac.compare_digest(stored_key, credential.stored_key)


def _text(message: bytes) -> str:
    if len(message) > MAX_MESSAGE_BYTES:
        raise ScramException("it is too long")
    try:
        return message.decode()
    except UnicodeDecodeError:
        raise ScramException("it is not UTF-8") from None


def _first(message: bytes) -> str:
    """Return a first message as text, if its name is short and normalized as users' names are (`why_no_user`).

    The check precedes SASLprep, which is slow and expands some characters to 18, for a client that has not
    authenticated yet.

    Raises:
        ScramException: the message is too long or not UTF-8, or no user can have this name.
    """
    text = _text(message)
    for part in text.split(","):
        if not part.startswith("n="):
            continue
        name = part[len("n=") :].replace("=2C", ",").replace("=3D", "=")
        if len(name) > MAX_USER_CHARACTERS:
            raise ScramException("the name is too long")
        if ucd_3_2_0.normalize("NFKC", name) != name:
            raise ScramException("the name is not in Unicode's form NFKC, as names of users are")
    return text


def _words(error: ScramException) -> str:
    return str(error.args[0])[:_SHOWN]
