"""The security of the listeners for clients, put together: users, tokens, the authorizer, the interceptor.

Both listeners, gRPC's and Kafka's, have the same users, exchanges, limits, authorizer and audit log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from broker.clock import Clock
from broker.config.checks import ACL, OAUTHBEARER, WITH_SASL
from broker.config.config import BrokerConfig
from broker.config.endpoints import PLAINTEXT, SASL_SSL
from broker.net.interceptors import Rarely
from broker.net.revocation import RevocationLists
from broker.observability.counters import Counters
from broker.security import mapping
from broker.security.audit import Audit
from broker.security.authorizer import AclAuthorizer
from broker.security.identify import LIFETIME_MS, MAX_STRANGERS, OF_BEARER, Identify, Login, Tokens
from broker.security.scram import ScramExchanges
from broker.security.users import Users, UsersFile
from raftlog._core.cluster import is_loopback
from raftlog._core.security.acls import USER_PREFIX, super_users_of
from raftlog.errors import AuthenticationFailed, RaftlogError, SecurityDisabled
from raftlog.v1.security_pb2 import AuthenticateResponse
from raftmeta.credentials import Credential, CredentialKey
from raftmeta.image import MetadataImage

if TYPE_CHECKING:
    from broker.security.oauth import Bearers

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
"""How often the file with users is checked for changes."""
UNKNOWN_HOST: Final = "unknown"
"""The host of a client whose address is hidden. No ACL can name this host, so only ACLs for the host `*` match."""


class Connection(Protocol):
    """An open connection of a client that has logged in, or has a certificate."""

    @property
    def login(self) -> Login | None:
        """The credential that it was opened with; None: it has none, but a certificate."""
        ...

    @property
    def certificate(self) -> bytes:
        """The client's certificate; b"" without one."""
        ...

    def end(self) -> None:
        """Close it."""
        ...


class ClientSecurity:
    """The security of one broker. `interceptor` is None if nothing at gRPC's listener is secured.

    `exchanges` logs clients in. `connections`: those of Kafka clients with a login or a certificate; they add and
    remove themselves.

    `on_metadata` is called with every image, `watch` runs as a task.
    """

    def __init__(
        self,
        config: BrokerConfig,
        image: Callable[[], MetadataImage],
        clock: Clock,
        counters: Counters,
        revoked: RevocationLists | None = None,
    ) -> None:
        """Read the file with users, if configured, which takes a while. Raises InvalidConfig if it is not valid."""
        self.revoked = revoked
        self._clock = clock
        self._counters = counters
        self._bearers: Bearers | None = None
        if OAUTHBEARER in config.sasl_enabled_mechanisms:
            from broker.security.oauth import Bearers, OauthConfig  # here: most brokers take no such tokens

            self._bearers = Bearers(OauthConfig.of(config), clock)
        self._protocol = config.listener_security_protocol
        self._audit = Audit(clock)
        self._logged = Rarely()
        self._tokens = Tokens()
        self._users = Users(image)
        self._takes_tls = self._protocol != PLAINTEXT or config.listener_security_migration
        self.takes_logins = self._takes_tls
        """Whether `Authenticate` takes logins: without TLS it never does."""
        takes_kafka_logins = config.kafka_security_protocol in WITH_SASL
        if config.sasl_users_location and (self._takes_tls or takes_kafka_logins):
            self._users.file = UsersFile(config.sasl_users_location, config.scram_mechanisms)
        self.exchanges = ScramExchanges(self._users, config.scram_mechanisms, clock, counters, self._audit)
        self.connections: set[Connection] = set()
        self.shut_out: Callable[[str, str], RaftlogError | None] = lambda principal, host: None
        """Returns why a principal at an address may not log in for now, None if it may; as `CallLimits.shut_out`."""
        self.authorizer: AclAuthorizer | None = None
        if config.authorizer == ACL:
            self.authorizer = AclAuthorizer(
                image,
                super_users_of(config.super_users),
                self._audit,
                everyone_if_none=config.allow_everyone_if_no_acl_found,
                refusals=counters.authorization_refusals,
            )
        self.interceptor: Identify | None = None
        if self._takes_tls or self.authorizer is not None:
            self.interceptor = Identify(
                self._tokens,
                self._users,
                clock,
                counters,
                self.authorizer,
                required=self._protocol == SASL_SSL and not config.listener_security_migration,
                certificates=self._takes_tls and config.asks_for_certificates,
                max_strangers=min(MAX_STRANGERS, config.max_streams),
                rules=mapping.parse(config.ssl_principal_mapping_rules),
                revoked=revoked,
                # `EitherFront` hides the clients' addresses; the one that is seen, 127.0.0.1, could match ACLs.
                host=UNKNOWN_HOST if config.listener_security_migration else None,
            )
        self._credentials: Mapping[CredentialKey, Credential] = image().credentials
        has_users = bool(self._credentials) or bool(self._users.file)
        if self._protocol == SASL_SSL and not has_users and not config.asks_for_certificates:
            logger.warning(
                "there are no users yet, so no client can log in: set sasl.users.location to a file with the first ones"
            )
        _warn(config)

    def on_metadata(self, image: MetadataImage) -> None:
        """End the streams of users whose passwords have changed."""
        if image.credentials is not self._credentials:
            self._credentials = image.credentials
            self._end_streams()

    async def watch(self) -> None:
        """Watch the file with users, OAUTHBEARER's keys and revocation lists, for ever; end what counts no more."""
        file, bearers, revoked = self._users.file, self._bearers, self.revoked
        looks: list[Callable[[], Awaitable[bool | None]]] = []
        if revoked is not None:
            looks.append(revoked.fresh)
        if file is not None:
            looks.append(partial(asyncio.to_thread, file.look))
        if bearers is not None:
            looks.append(partial(asyncio.to_thread, bearers.refresh))
        while looks:
            await asyncio.sleep(LOOK_EVERY_S)
            ends = bearers is not None or revoked is not None
            for look in looks:
                with self._survived():
                    ends = await look() or ends
            if ends:
                with self._survived():
                    self._end_streams()

    @contextmanager
    def _survived(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # without this task no password, key or certificate would ever end
            if self._logged.may_log(("watch", type(error)), self._clock.monotonic_ms()):
                logger.exception("a look at the users, keys or revocation lists failed; the next one is soon")

    def count_authenticated(self) -> int:
        """Return how many streams with a token, and Kafka connections with a login, are open. For any thread."""
        streams = 0 if self.interceptor is None else self.interceptor.count_streams()
        return streams + sum(each.login is not None for each in self.connections.copy())

    def is_current(self, login: Login) -> bool:
        """Whether the credential that a client logged in with is still the user's."""
        if login.mechanism == OF_BEARER:
            return login.expires_ms > self._clock.monotonic_ms()
        return self._users.is_current(login.user, login.mechanism, login.version)

    def _end_streams(self) -> None:
        ended = 0 if self.interceptor is None else self.interceptor.check()
        for connection in [each for each in self.connections if not self._may_stay(each)]:
            connection.end()
            ended += 1
        if ended:
            logger.info(
                "streams ended: their passwords, users, tokens or certificates no longer count",
                extra={"event": "streams_ended", "streams": ended},
            )

    def _may_stay(self, connection: Connection) -> bool:
        if self.revoked is not None and self.revoked.is_revoked(connection.certificate):
            return False
        return connection.login is None or self.is_current(connection.login)

    # Authentication

    def begin(self, mechanism: str, message: bytes, context: Any) -> AuthenticateResponse:
        """Answer a first message.

        Raises:
            SecurityDisabled: the connection has no TLS.
            RaftlogError: as `ScramExchanges.begin`.
        """
        self._check_tls(context)
        host = "" if self.interceptor is None else self.interceptor.host_of(context.peer())
        if mechanism == OAUTHBEARER and self._bearers is not None:
            return self._begin_bearer(message, host)
        exchange_id, answer = self.exchanges.begin(mechanism, message, host)
        return AuthenticateResponse(exchange_id=exchange_id, message=answer)

    def _begin_bearer(self, message: bytes, host: str) -> AuthenticateResponse:
        """Answer the one message of OAUTHBEARER with a token that lives as long as the client's own, or LIFETIME_MS."""
        user, left_ms = self.verify_bearer(message, host)
        self._check_shut_out(user, host)
        lifetime_ms = min(LIFETIME_MS, left_ms)
        login = Login(user, OF_BEARER, 0, int(self._clock.monotonic_ms()) + lifetime_ms)
        return AuthenticateResponse(token=self._tokens.issue_to(login), lifetime_ms=lifetime_ms)

    def verify_bearer(self, message: bytes, host: str) -> tuple[str, int]:
        """Return the user of a client's message of OAUTHBEARER, and for how many ms its token still counts.

        Raises:
            AuthenticationFailed: the mechanism is not enabled, or the token is not acceptable.
            BrokerOverloaded: the issuer's keys are not known yet.
        """
        if self._bearers is None:
            raise AuthenticationFailed("mechanism 'OAUTHBEARER' is not enabled here: sasl.enabled.mechanisms")
        try:
            bearer = self._bearers.verify(message)
        except AuthenticationFailed:
            self._counters.authentications[OAUTHBEARER, "failure"] += 1
            self._audit.not_authenticated("", host, OAUTHBEARER)
            raise
        self._counters.authentications[OAUTHBEARER, "success"] += 1
        return bearer.user, self._bearers.left_ms(bearer)

    def finish(self, exchange_id: bytes, message: bytes, context: Any) -> AuthenticateResponse:
        """Answer a final message, with a token.

        Raises:
            SecurityDisabled: the connection has no TLS.
            RaftlogError: as `ScramExchanges.finish`, or the user is shut out.
        """
        self._check_tls(context)
        credential, answer = self.exchanges.finish(exchange_id, message)
        self._check_shut_out(
            credential.user, "" if self.interceptor is None else self.interceptor.host_of(context.peer())
        )
        token = self._tokens.issue(credential, self._clock.monotonic_ms())
        return AuthenticateResponse(message=answer, token=token, lifetime_ms=LIFETIME_MS)

    def _check_shut_out(self, user: str, host: str) -> None:
        """Refuse a user that floods the broker; only a client that has proved to be the user learns it."""
        if (refusal := self.shut_out(USER_PREFIX + user, host)) is not None:
            raise refusal

    def _check_tls(self, context: Any) -> None:
        """Refuse a plaintext connection, on which the token would be sent in plaintext as well.

        Raises:
            SecurityDisabled: the connection has no TLS.
        """
        if not self._takes_tls:
            raise SecurityDisabled(
                "this broker takes no passwords: listener.security.protocol = plaintext; set it to sasl_ssl"
            )
        if b"ssl" not in context.auth_context().get("transport_security_type", ()):
            raise SecurityDisabled("passwords need a connection with TLS: set security.protocol = sasl_ssl")


def _warn(config: BrokerConfig) -> None:
    """Log settings that allow more or less than an administrator is likely to want."""
    if config.authorizer != ACL:
        return
    shows_certificates = config.listener_security_protocol != PLAINTEXT and config.asks_for_certificates
    if not super_users_of(config.super_users) and not shows_certificates:
        logger.warning(
            "authorizer=acl without super.users: unless ACLs allow it already, no user can grant permissions; "
            "set super.users = User:NAME"
        )
    between_nodes = config.inter_node_listener
    takes_plaintext = config.security_inter_broker_protocol == PLAINTEXT or config.listener_security_migration
    if between_nodes is not None and not is_loopback(between_nodes[0]) and takes_plaintext:
        logger.warning(
            "authorizer=acl, but nodes accept plaintext from each other: any client that reaches inter.node.listener "
            "may do everything; set security.inter.broker.protocol = ssl and listener.security.migration = false"
        )
    authenticates = config.listener_security_protocol == SASL_SSL or shows_certificates
    if not is_loopback(config.listener[0]) and (not authenticates or config.listener_security_migration):
        logger.warning(
            "authorizer=acl, but clients need not authenticate: one that does not is User:ANONYMOUS, with the "
            "permissions of that user and of User:*; set listener.security.protocol = sasl_ssl and "
            "listener.security.migration = false"
        )
