"""How a Kafka client gets in: by TLS, a certificate, or a password (SASL; KIP-43, KIP-152, KIP-368).

    listener                    a connection is admitted               its principal
    kafka://                    at once                                User:ANONYMOUS
    kafka+ssl://                after the TLS handshake                of its certificate, as at gRPC's listener
    kafka+sasl://, +sasl+ssl    when it has proved a password          User:NAME

    SASL    start ── SaslHandshake ── SaslAuthenticate, twice with SCRAM ── admitted
            start ── SaslHandshake v0 ── messages without a header ── admitted
            admitted ── SaslHandshake ── SaslAuthenticate ── admitted (before connections.max.reauth.ms are over)

With OAUTHBEARER the connection is admitted until its token expires, and SaslAuthenticate comes once (KIP-255).

Users, exchanges, limits on guesses, the audit log and the counters are those of gRPC's listener (`ClientSecurity`). A
connection whose user's password has changed is closed, as a stream there ends.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from typing import Final

from broker.clock import Clock
from broker.config.checks import OAUTHBEARER, PLAIN, WITH_SASL
from broker.config.config import BrokerConfig
from broker.config.endpoints import PLAINTEXT, SASL_SSL
from broker.kafka import errors
from broker.kafka.codec import Fields
from broker.net.interceptors import EXPIRED, REVOKED
from broker.net.revocation import has_expired
from broker.net.tls import KafkaContexts, NodeTls
from broker.observability.counters import MTLS, Counters
from broker.security import mapping
from broker.security.caller import Authorizer, Caller
from broker.security.client_listener import ClientSecurity
from broker.security.identify import MAX_STRANGERS, OF_BEARER, Login, principal_of_certificate
from broker.security.mapping import DEFAULT, Rule
from broker.security.scram import FailureDelay
from raftlog._core.security.acls import ANONYMOUS, USER_PREFIX
from raftlog.errors import AuthenticationFailed, BrokerOverloaded
from raftmeta.credentials import Credential, Mechanism

MAX_BEFORE_BYTES: Final = 16 << 10
"""Of a request before authentication."""
MAX_BEFORE: Final = 16
"""Requests before authentication; a client needs four."""
AUTHENTICATE_MS: Final = 30_000.0
"""How long a client may take from connecting to the end of its authentication; connection.login.timeout.ms."""


class NotAdmitted(Exception):
    """The connection is to be closed without an answer; the text says why."""


class Door:
    """How connections of one listener get in."""

    def __init__(
        self,
        protocol: str,
        *,
        authorizer: Authorizer | None = None,
        security: ClientSecurity | None = None,
        mechanisms: tuple[str, ...] = (),
        contexts: KafkaContexts | None = None,
        session_ms: int = 0,
        clock: Clock | None = None,
        counters: Counters | None = None,
        max_strangers: int = MAX_STRANGERS,
        login_ms: float = AUTHENTICATE_MS,
        rules: Sequence[Rule] = DEFAULT,
    ) -> None:
        """`protocol`: Kafka's name. `session_ms`: a login's lifetime, 0 for no end. `rules`: of certificates' users.

        `max_strangers`: connections that have not authenticated; `login_ms`: how long each may take to do so.
        """
        self._rules = rules
        self.authorizer = authorizer
        self.security = security
        self.mechanisms = mechanisms
        self.contexts = contexts
        self.session_ms = session_ms
        self.clock = clock
        self.counters = counters or Counters()
        self.asks_for_password = protocol in WITH_SASL
        self.max_strangers = max_strangers
        self.login_ms = login_ms
        self.delay = FailureDelay()
        assert not self.asks_for_password or (security is not None and mechanisms and clock is not None)

    @property
    def is_guarded(self) -> bool:
        """Whether connections begin with a handshake or a login."""
        return self.asks_for_password or self.contexts is not None

    def session(self, host: str, tls: ssl.SSLObject | None) -> Session:
        """Return the session of a connection whose TLS handshake, if any, is over.

        Raises:
            NotAdmitted: the client's certificate is revoked, or has expired.
        """
        principal, certificate = ANONYMOUS, b""
        if tls is not None:
            certificate = tls.getpeercert(binary_form=True) or b""
            revoked = None if self.security is None else self.security.revoked
            if revoked is not None and revoked.is_revoked(certificate):
                self.counters.authentications[MTLS, "failure"] += 1
                raise NotAdmitted(REVOKED)
            if has_expired(certificate):  # TLS does not look again where the client resumes a session
                self.counters.authentications[MTLS, "failure"] += 1
                raise NotAdmitted(EXPIRED)
            if not self.asks_for_password:
                if certificate:
                    self.counters.authentications[MTLS, "success"] += 1
                principal = principal_of_certificate(tls.getpeercert() or {}, self._rules)
        who = Caller(principal, host, self.authorizer)
        return Session(self, who, certificate, is_admitted=not self.asks_for_password)


def door_of(
    config: BrokerConfig, security: ClientSecurity, tls: NodeTls | None, clock: Clock, counters: Counters
) -> Door:
    """Return the door of a broker's listener for Kafka clients.

    Raises:
        InvalidConfig: the certificate cannot be used.
    """
    protocol = config.kafka_security_protocol
    # In plaintext PLAIN would send the password itself.
    mechanisms = config.sasl_enabled_mechanisms if protocol == SASL_SSL else config.scram_mechanisms
    contexts = None
    if config.kafka_speaks_tls:
        assert tls is not None, "a node with a listener with TLS has certificates"
        contexts = tls.kafka_contexts()
    return Door(
        protocol,
        authorizer=security.authorizer,
        security=security,
        mechanisms=mechanisms,
        contexts=contexts,
        session_ms=config.connections_max_reauth_ms,
        clock=clock,
        counters=counters,
        max_strangers=min(MAX_STRANGERS, config.max_streams),
        login_ms=config.connection_login_timeout_ms,
        rules=mapping.parse(config.ssl_principal_mapping_rules),
    )


OPEN: Final = Door(PLAINTEXT)
"""The door of a listener without any security."""


class Session:
    """One connection's authentication.

    Attributes:
        who: the caller of its requests.
        certificate: the client's, DER; b"" without one.
        is_admitted: whether it may send requests other than those of the authentication.
        takes_messages: whether its next frame is a message of SASL without a header (SaslHandshake v0).
        login: the credential that it has proved, None without a password.
        closing: why it is to be closed after the present response; "": it is not.
    """

    def __init__(self, door: Door, who: Caller, certificate: bytes = b"", *, is_admitted: bool) -> None:
        self._door = door
        self.who = who
        self.certificate = certificate
        self.is_admitted = is_admitted
        self.takes_messages = False
        self.login: Login | None = None
        self.closing = ""
        self.on_admitted: Callable[[], None] = lambda: None
        """Called each time when a password has been proved."""
        self._mechanism = ""
        self._exchange_id = b""
        self._chosen = ""
        """The mechanism of the first authentication, which those after it keep."""
        self._requests = 0
        self._session_ms = 0
        self._ends_ms: float | None = None

    def check_request(self, name: str, size: int, *, authenticates: bool) -> None:
        """Check that a request may be read. `authenticates`: it is one of those that may come before a login.

        Raises:
            NotAdmitted: it may not.
        """
        if self.is_admitted:
            if not authenticates and self._has_ended():
                self._door.counters.unauthenticated_calls += 1
                raise NotAdmitted("the session has ended and the client did not authenticate again")
            return
        self._requests += 1
        if not authenticates:
            self._door.counters.unauthenticated_calls += 1
            raise NotAdmitted(f"a request before authentication: {name}; set security.protocol to SASL_SSL")
        if size > MAX_BEFORE_BYTES:
            raise NotAdmitted(f"a request of {size} bytes before authentication, at most {MAX_BEFORE_BYTES} are taken")
        if self._requests > MAX_BEFORE:
            raise NotAdmitted(f"more than {MAX_BEFORE} requests before authentication")

    def handshake(self, request: Fields, version: int) -> Fields:
        """Answer SaslHandshake: the client chooses a mechanism."""
        door, mechanism = self._door, request["mechanism"]
        if not door.asks_for_password or (self.is_admitted and (version == 0 or self._ends_ms is None)):
            return {"error_code": errors.ILLEGAL_SASL_STATE, "mechanisms": []}
        if mechanism not in door.mechanisms or (self._chosen and mechanism != self._chosen):
            self.closing = f"a SASL mechanism that is not enabled here: {mechanism[:100]}"
            door.counters.authentications["other", "failure"] += 1
            offered = [self._chosen] if self._chosen else list(door.mechanisms)
            return {"error_code": errors.UNSUPPORTED_SASL_MECHANISM, "mechanisms": offered}
        self._mechanism, self._exchange_id = mechanism, b""
        self.takes_messages = version == 0
        return {"error_code": errors.NONE, "mechanisms": list(door.mechanisms)}

    async def authenticate(self, request: Fields) -> Fields:
        """Answer SaslAuthenticate: one message of the mechanism.

        Raises:
            NotAdmitted: there are too many failures or clients at the moment, or the user is shut out; the client is to
                try again, as clients do after a closed connection.
        """
        if not self._mechanism:
            self.closing = "SaslAuthenticate without SaslHandshake" if not self.is_admitted else ""
            return _refused(errors.ILLEGAL_SASL_STATE, "SaslHandshake comes first")
        try:
            answer = await self._take(request["auth_bytes"])
        except AuthenticationFailed as error:
            failure = await self._door.delay.of(error)
            if isinstance(failure, BrokerOverloaded):
                raise NotAdmitted(str(failure)) from None
            self.closing = f"authentication failed: {error}"
            return _refused(errors.SASL_AUTHENTICATION_FAILED, str(error))
        except BrokerOverloaded as error:
            raise NotAdmitted(str(error)) from None
        lifetime_ms = 0 if self._mechanism else self._session_ms
        return {"error_code": errors.NONE, "auth_bytes": answer, "session_lifetime_ms": lifetime_ms}

    async def take_message(self, message: bytes) -> bytes:
        """Answer a message without a header (SaslHandshake v0).

        Raises:
            NotAdmitted: as `authenticate`, or the password is wrong.
        """
        answer = await self.authenticate({"auth_bytes": message})
        if answer["error_code"]:
            raise NotAdmitted(self.closing)
        found: bytes = answer["auth_bytes"]
        return found

    async def _take(self, message: bytes) -> bytes:
        assert self._door.security is not None, "a mechanism was chosen"
        exchanges, host = self._door.security.exchanges, self.who.host
        if self._mechanism == PLAIN:
            await self._admit(await exchanges.check_plain(message, host))
            return b""
        if self._mechanism == OAUTHBEARER:
            user, left_ms = self._door.security.verify_bearer(message, host)
            await self._admit_as(user, OF_BEARER, 0, max(1, min(self._door.session_ms or left_ms, left_ms)))
            return b""
        if not self._exchange_id:
            self._exchange_id, answer = exchanges.begin(self._mechanism, message, host)
            return answer
        credential, answer = exchanges.finish(self._exchange_id, message)
        await self._admit(credential)
        return answer

    async def _admit(self, credential: Credential) -> None:
        """Let the client in, or go on.

        Raises:
            AuthenticationFailed: it was another user before.
            NotAdmitted: its user is shut out. Only a client that has proved to be the user meets this, after a pause.
        """
        await self._admit_as(credential.user, credential.mechanism, credential.version, self._door.session_ms)

    async def _admit_as(self, user: str, mechanism: Mechanism, version: int, session_ms: float) -> None:
        """As `_admit`. `session_ms`: after this long the client has to authenticate again; 0: never."""
        principal = USER_PREFIX + user
        if self.is_admitted and principal != self.who.principal:
            raise AuthenticationFailed(f"this connection is {self.who.principal}'s, and cannot become {principal}'s")
        assert self._door.security is not None, "a mechanism was chosen"
        if (refusal := self._door.security.shut_out(principal, self.who.host)) is not None:
            raise NotAdmitted(str(await self._door.delay.of(refusal)))
        self._session_ms = int(session_ms)
        if session_ms:
            self._ends_ms = self._now_ms() + session_ms
        self.login = Login(user, mechanism, version, int(self._ends_ms or 0))
        self.who = Caller(principal, self.who.host, self.who.authorizer)
        self.is_admitted = True
        self._chosen, self._mechanism, self.takes_messages = self._mechanism, "", False
        self.on_admitted()

    def _has_ended(self) -> bool:
        return self._ends_ms is not None and self._ends_ms <= self._now_ms()

    def _now_ms(self) -> float:
        assert self._door.clock is not None, "a door that asks for passwords has a clock"
        return self._door.clock.monotonic_ms()


def _refused(code: int, why: str) -> Fields:
    return {"error_code": code, "error_message": why}
