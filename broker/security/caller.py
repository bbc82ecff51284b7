"""Who is at the other end of a call on the listener for clients, and what they may do."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from raftlog.errors import AuthorizationError
from raftlog.v1.security_pb2 import Acl
from raftmeta.acls import ANONYMOUS

Operation: TypeAlias = Acl.Operation.ValueType
ResourceType: TypeAlias = Acl.ResourceType.ValueType


class Authorizer(Protocol):
    """Decides what principals may do, and keeps the audit log."""

    @property
    def version(self) -> object:
        """Compares equal to what it was as long as no decision has changed; what was decided may be kept till then."""
        ...

    def may(
        self, principal: str, host: str, operation: Operation, resource: ResourceType, name: str, *, log: bool = True
    ) -> bool:
        """Whether they may; `log`: a refusal goes into the audit log."""
        ...

    def may_any(self, principal: str, host: str, operation: Operation, resource: ResourceType) -> bool:
        """Whether there is any resource of that type with which they may (KIP-679)."""
        ...

    def refusal(
        self, principal: str, operation: Operation, resource: ResourceType, name: str, host: str = ""
    ) -> AuthorizationError:
        """Return the error that says what is missing, and what would allow it; `host`: from where they asked."""
        ...


@dataclass(frozen=True, slots=True)
class Caller:
    """A principal at an address. Without an authorizer everything is allowed."""

    principal: str = ANONYMOUS
    host: str = ""
    authorizer: Authorizer | None = None

    @property
    def version(self) -> object:
        """As `Authorizer.version`."""
        return None if self.authorizer is None else self.authorizer.version

    def may(self, operation: Operation, resource: ResourceType, name: str, *, log: bool = True) -> bool:
        """Whether this is allowed; `log=False` for what is only left out of a list."""
        return self.authorizer is None or self.authorizer.may(
            self.principal, self.host, operation, resource, name, log=log
        )

    def may_any(self, operation: Operation, resource: ResourceType) -> bool:
        """Whether it is allowed with any resource of that type."""
        return self.authorizer is None or self.authorizer.may_any(self.principal, self.host, operation, resource)

    def check(self, operation: Operation, resource: ResourceType, name: str) -> None:
        """Check that it is allowed.

        Raises:
            AuthorizationError: it is not; the class says what kind of resource it was about.
        """
        if self.authorizer is not None and not self.may(operation, resource, name):
            raise self.authorizer.refusal(self.principal, operation, resource, name, self.host)


EVERYTHING_ALLOWED: Final = Caller()
"""Who calls where nobody looks: nodes among each other, and everybody without an authorizer."""
caller: ContextVar[Caller] = ContextVar("caller", default=EVERYTHING_ALLOWED)
"""Of the call being served; sessions take it once, when their stream begins."""
