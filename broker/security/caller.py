"""The caller of a call on the listener for clients, with its permissions.

`Decisions` caches one caller's permissions on one type of resource, for sessions and lists that ask again and again.
`authorized_operations` is the one answer to what a caller may do with a resource (KIP-430), for every protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Final, Protocol, TypeAlias, TypeVar

from broker.turns import in_turns
from raftlog._core.security.acls import ANONYMOUS, USER_PREFIX
from raftlog.errors import AuthorizationError, TopicAuthorizationFailed
from raftlog.v1.security_pb2 import Acl

Operation: TypeAlias = Acl.Operation.ValueType
ResourceType: TypeAlias = Acl.ResourceType.ValueType


@lru_cache(4_096)  # it is asked for with each request, and parsing takes 5 us
def network_of(host: str) -> str:
    """Return an IPv6 address's /64, of which one client may use any address; any other address as it is."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    return f"{IPv6Address(int(address) >> 64 << 64)}/64" if isinstance(address, IPv6Address) else host


class Authorizer(Protocol):
    """Decides what principals may do, and writes the audit log."""

    @property
    def version(self) -> object:
        """A value that stays equal while no decision changes; until then decisions may be cached."""
        ...

    def may(
        self, principal: str, host: str, operation: Operation, resource: ResourceType, name: str, *, log: bool = True
    ) -> bool:
        """Whether the principal may; with `log`, a refusal goes into the audit log."""
        ...

    def may_any(self, principal: str, host: str, operation: Operation, resource: ResourceType) -> bool:
        """Whether the principal may with at least one resource of that type (KIP-679)."""
        ...

    def refusal(
        self, principal: str, operation: Operation, resource: ResourceType, name: str, host: str = ""
    ) -> AuthorizationError:
        """Return the error that names the missing permission and how to grant it; `host`: the caller's address."""
        ...


@dataclass(frozen=True, slots=True)
class Caller:
    """A principal at an address. Without an authorizer everything is allowed.

    `client_id`: the name that the client gives itself; quotas may depend on it, permissions do not.
    """

    principal: str = ANONYMOUS
    host: str = ""
    authorizer: Authorizer | None = None
    client_id: str = ""

    @property
    def version(self) -> object:
        """As `Authorizer.version`."""
        return None if self.authorizer is None else self.authorizer.version

    @property
    def user(self) -> str:
        """The user that a bound on users is about; "" for nodes, and for User:ANONYMOUS, which is no single user."""
        return self.principal if self.principal.startswith(USER_PREFIX) and self.principal != ANONYMOUS else ""

    @property
    def share(self) -> str:
        """The name under which this caller has its part of what users share: without a login, that of its network."""
        return network_of(self.host) if self.principal == ANONYMOUS else self.principal

    def may(self, operation: Operation, resource: ResourceType, name: str, *, log: bool = True) -> bool:
        """Whether this is allowed; pass `log=False` to filter a list without an audit line for each entry."""
        return self.authorizer is None or self.authorizer.may(
            self.principal, self.host, operation, resource, name, log=log
        )

    def may_any(self, operation: Operation, resource: ResourceType) -> bool:
        """Whether this is allowed with at least one resource of that type."""
        return self.authorizer is None or self.authorizer.may_any(self.principal, self.host, operation, resource)

    def check(self, operation: Operation, resource: ResourceType, name: str, topic_id: bytes = b"") -> None:
        """Check that this is allowed. `topic_id`: what the caller has named the topic by.

        Raises:
            AuthorizationError: it is not; the class depends on the type of the resource.
        """
        if self.authorizer is not None and not self.may(operation, resource, name):
            raise self.refusal(self.authorizer, operation, resource, name, topic_id)

    def refusal(
        self, authorizer: Authorizer, operation: Operation, resource: ResourceType, name: str, topic_id: bytes = b""
    ) -> AuthorizationError:
        """Return the refusal; without the name of a topic that the caller gave by id and may not describe."""
        if topic_id and not self.may(Acl.DESCRIBE, resource, name, log=False):
            return TopicAuthorizationFailed(
                f"{self.principal} may not {Acl.Operation.Name(operation)} the topic with id {topic_id.hex()}, and may "
                "not describe it, so its name is not shown here; an administrator grants permissions: raftlog acl add"
            )
        return authorizer.refusal(self.principal, operation, resource, name, self.host)


EVERYTHING_ALLOWED: Final = Caller()
"""The caller between nodes, and of every call on a broker without an authorizer."""
caller: ContextVar[Caller] = ContextVar("caller", default=EVERYTHING_ALLOWED)
"""The caller of the call being served; a session reads it once, when its stream begins."""


MAX_NAME: Final = 256
"""No valid name is longer (topics 249, groups and transactional ids 255); a longer one is cut for the decision."""
MAX_KNOWN: Final = 10_000
"""Decisions that one stream caches."""
MAX_REFUSALS: Final = 500
"""Texts of refusals that one stream caches, some hundred bytes each."""

T = TypeVar("T")

SUPPORTED_OPERATIONS: Final[Mapping[ResourceType, tuple[Operation, ...]]] = {
    Acl.TOPIC: (
        Acl.READ,
        Acl.WRITE,
        Acl.CREATE,
        Acl.DELETE,
        Acl.ALTER,
        Acl.DESCRIBE,
        Acl.DESCRIBE_CONFIGS,
        Acl.ALTER_CONFIGS,
    ),
    Acl.GROUP: (Acl.READ, Acl.DELETE, Acl.DESCRIBE),
    Acl.CLUSTER: (
        Acl.CREATE,
        Acl.ALTER,
        Acl.DESCRIBE,
        Acl.CLUSTER_ACTION,
        Acl.DESCRIBE_CONFIGS,
        Acl.ALTER_CONFIGS,
        Acl.IDEMPOTENT_WRITE,
    ),
    Acl.TRANSACTIONAL_ID: (Acl.WRITE, Acl.DESCRIBE),
}
"""The operations that make sense on each type of resource."""


def authorized_operations(who: Caller, resource: ResourceType, name: str) -> int:
    """Return what the caller may do with a resource (KIP-430): bit n is set for operation number n.

    The number is the one that Kafka's responses carry. Asking is no attempt, so nothing of it goes into the audit log.
    """
    bits = 0
    for operation in SUPPORTED_OPERATIONS[resource]:
        if who.may(operation, resource, name[:MAX_NAME], log=False):
            bits |= 1 << operation
    return bits


class Decisions:
    """One caller's permissions for one operation on one type of resource, cached by name until an ACL changes.

    Made with `Decisions.of`, which returns None without an authorizer, so that a session then spends no time on it. A
    refusal goes into the audit log when it is decided, not when the cache repeats it.
    """

    __slots__ = ("_authorizer", "_caller", "_known", "_log", "_operation", "_refusals", "_resource", "_version")

    def __init__(
        self, who: Caller, authorizer: Authorizer, operation: Operation, resource: ResourceType, *, log: bool
    ) -> None:
        self._caller = who
        self._authorizer = authorizer
        self._operation = operation
        self._resource = resource
        self._log = log
        self._version: object = authorizer.version
        self._known: dict[str | None, bool] = {}
        self._refusals: dict[tuple[str, bytes], tuple[type[AuthorizationError], str]] = {}

    @classmethod
    def of(cls, who: Caller, operation: Operation, resource: ResourceType, *, log: bool = True) -> Decisions | None:
        """Return a caller's decisions; None if everything is allowed for good. `log`: as for `may`."""
        return None if who.authorizer is None else cls(who, who.authorizer, operation, resource, log=log)

    @property
    def version(self) -> object:
        """As `Authorizer.version`: when it changes, long-lived subscriptions have to be checked again."""
        return self._authorizer.version

    def allow(self, name: str) -> bool:
        """Whether the operation is allowed on the resource of that name."""
        self._follow()
        name = name[:MAX_NAME]
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._caller.may(self._operation, self._resource, name, log=self._log)
        return found

    def check(self, name: str, topic_id: bytes = b"") -> None:
        """Check that the operation is allowed on the resource of that name. `topic_id`: as `Caller.check`.

        Raises:
            AuthorizationError: it is not.
        """
        if not self.allow(name):
            raise self.refusal(name, topic_id)

    def check_any(self) -> None:
        """Check that the operation is allowed on at least one resource.

        Raises:
            AuthorizationError: it is not.
        """
        self._follow()
        found = self._known.get(None)
        if found is None:
            found = self._known[None] = self._caller.may_any(self._operation, self._resource)
        if not found:
            raise self.refusal("*")

    def refusal(self, name: str, topic_id: bytes = b"") -> AuthorizationError:
        """Return the refusal for that name: a new exception each time, since raising one adds a traceback to it.

        `topic_id`: as `Caller.check`.
        """
        name = name[:MAX_NAME]
        found = self._refusals.get((name, topic_id))
        if found is None:
            error = self._caller.refusal(self._authorizer, self._operation, self._resource, name, topic_id)
            if len(self._refusals) >= MAX_REFUSALS:
                self._refusals.clear()
            found = self._refusals[name, topic_id] = type(error), str(error)
        kind, text = found
        return kind(text)

    def _follow(self) -> None:
        """Clear the cache when an ACL has changed or the cache is full."""
        version = self._authorizer.version
        if version != self._version or len(self._known) >= MAX_KNOWN:
            if version != self._version:
                self._refusals.clear()  # their texts depend on what else is allowed
            self._version = version
            self._known.clear()


async def allowed_of(decisions: Decisions | None, listed: list[T], name: Callable[[T], str]) -> list[T]:
    """Return the allowed entries of a list, by `name` of each; yields to the event loop in between."""
    if decisions is None:
        return listed
    return [each async for each in in_turns(listed) if decisions.allow(name(each))]
