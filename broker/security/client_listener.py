"""Security of the listener for clients, put together: users, tokens, the authorizer, and who ends streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from broker.clock import Clock
from broker.config import BrokerConfig
from broker.observability.counters import Counters
from broker.security.audit import Audit
from broker.security.authorizer import AclAuthorizer
from broker.security.identify import MAX_STRANGERS, Identify
from broker.security.scram import ScramExchanges
from broker.security.tokens import LIFETIME_MS, Tokens
from broker.security.users import Users
from broker.security.users_file import UsersFile
from broker.security_keys import ACL, PLAINTEXT, SASL_SSL, super_users
from raftlog._core.bootstrap import is_loopback
from raftlog.errors import SecurityDisabled
from raftlog.v1.security_pb2 import AuthenticateResponse
from raftmeta.credentials import Credential, CredentialKey
from raftmeta.image import MetadataImage

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
"""How often it is seen whether the file with users has changed."""
UNKNOWN_HOST: Final = "unknown"
"""Stands for all addresses where none is seen. No ACL can name it, as it is none: only those for `*` count."""


class _BehindProxy(Identify):
    """Sees all connections come from the same process, which passes them on: it knows nobody's address."""

    def host_of(self, peer: str) -> str:
        """Return what stands for every address: 127.0.0.1 would be one that ACLs can name."""
        return UNKNOWN_HOST


class ClientSecurity:
    """What one broker has of it. `interceptor` is None where nothing is secured, and nothing is looked at then.

    `on_metadata` is called with every image, `watch` runs as a task.
    """

    def __init__(
        self, config: BrokerConfig, image: Callable[[], MetadataImage], clock: Clock, counters: Counters
    ) -> None:
        """Read the file with users, if there is one, which takes a while. Raises InvalidConfig: it is no good."""
        self._clock = clock
        self._protocol = config.listener_security_protocol
        self._audit = Audit(clock)
        self._tokens = Tokens()
        self._users = Users(image)
        self._takes_tls = self._protocol != PLAINTEXT or config.listener_security_migration
        if config.sasl_users_location and self._takes_tls:
            self._users.file = UsersFile(config.sasl_users_location, config.sasl_enabled_mechanisms)
        self._exchanges = ScramExchanges(self._users, config.sasl_enabled_mechanisms, clock, counters, self._audit)
        self.authorizer: AclAuthorizer | None = None
        if config.authorizer == ACL:
            self.authorizer = AclAuthorizer(
                image,
                super_users(config.super_users),
                self._audit,
                everyone_if_none=config.allow_everyone_if_no_acl_found,
                refusals=counters.authorization_refusals,
            )
        self.interceptor: Identify | None = None
        if self._takes_tls or self.authorizer is not None:
            identify = _BehindProxy if config.listener_security_migration else Identify
            self.interceptor = identify(
                self._tokens,
                self._users,
                clock,
                counters,
                self.authorizer,
                required=self._protocol == SASL_SSL and not config.listener_security_migration,
                certificates=self._takes_tls and config.asks_for_certificates,
                max_strangers=min(MAX_STRANGERS, config.max_streams),
            )
        self._credentials: Mapping[CredentialKey, Credential] = image().credentials
        has_users = bool(self._credentials) or bool(self._users.file)
        if self._protocol == SASL_SSL and not has_users and not config.asks_for_certificates:
            logger.warning(
                "there are no users yet, so nobody can log in: set sasl.users.location, and keep the first ones there"
            )
        _warn(config)

    def on_metadata(self, image: MetadataImage) -> None:
        """End the streams of users whose passwords have changed."""
        if image.credentials is not self._credentials:
            self._credentials = image.credentials
            self._end_streams()

    async def watch(self) -> None:
        """See whether the file with users has changed, for ever."""
        file = self._users.file
        while file is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            if await asyncio.to_thread(file.look):
                self._end_streams()

    def _end_streams(self) -> None:
        ended = 0 if self.interceptor is None else self.interceptor.check()
        if ended:
            logger.info(
                "streams ended, their users' passwords are not those any more",
                extra={"event": "streams_ended", "streams": ended},
            )

    # Authentication

    def begin(self, mechanism: str, message: bytes, context: Any) -> AuthenticateResponse:
        """Answer a first message.

        Raises:
            SecurityDisabled: passwords are for connections with TLS only.
            RaftlogError: as `ScramExchanges.begin`.
        """
        self._check_tls(context)
        host = "" if self.interceptor is None else self.interceptor.host_of(context.peer())
        exchange_id, answer = self._exchanges.begin(mechanism, message, host)
        return AuthenticateResponse(exchange_id=exchange_id, message=answer)

    def finish(self, exchange_id: bytes, message: bytes, context: Any) -> AuthenticateResponse:
        """Answer a final message, with a token.

        Raises:
            SecurityDisabled: as `begin`.
            AuthenticationFailed: as `ScramExchanges.finish`.
        """
        self._check_tls(context)
        credential, answer = self._exchanges.finish(exchange_id, message)
        token = self._tokens.issue(credential, self._clock.monotonic_ms())
        return AuthenticateResponse(message=answer, token=token, lifetime_ms=LIFETIME_MS)

    def _check_tls(self, context: Any) -> None:
        """Refuse to give a token to who sends it back in plaintext."""
        if not self._takes_tls:
            raise SecurityDisabled(
                "this broker takes no passwords: listener.security.protocol = plaintext, which sasl_ssl would change"
            )
        if b"ssl" not in context.auth_context().get("transport_security_type", ()):
            raise SecurityDisabled("passwords are for connections with TLS: set security.protocol = sasl_ssl")


def _warn(config: BrokerConfig) -> None:
    """Say what is allowed, and is hardly meant."""
    if config.authorizer != ACL:
        return
    shows_certificates = config.listener_security_protocol != PLAINTEXT and config.asks_for_certificates
    if not super_users(config.super_users) and not shows_certificates:
        logger.warning(
            "authorizer=acl without super.users: nobody can give permissions, unless there are some for that already; "
            "set super.users = User:NAME"
        )
    between_nodes = config.inter_node_listener
    takes_plaintext = config.security_inter_broker_protocol == PLAINTEXT or config.listener_security_migration
    if between_nodes is not None and not is_loopback(between_nodes[0]) and takes_plaintext:
        logger.warning(
            "authorizer=acl, and nodes take plaintext of each other: whoever reaches inter.node.listener may do "
            "everything; set security.inter.broker.protocol = ssl and listener.security.migration = false"
        )
    authenticates = config.listener_security_protocol == SASL_SSL or shows_certificates
    if not is_loopback(config.listener[0]) and (not authenticates or config.listener_security_migration):
        logger.warning(
            "authorizer=acl, and not all clients have to say who they are: the others are User:ANONYMOUS, and may do "
            "what that or User:* may; set listener.security.protocol = sasl_ssl and listener.security.migration = false"
        )
