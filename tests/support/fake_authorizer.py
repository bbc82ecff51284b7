"""An authorizer that allows what a test configures, and records the questions."""

from __future__ import annotations

from broker.security.caller import Caller, Operation, ResourceType
from raftlog.errors import (
    AuthorizationError,
    ClusterAuthorizationFailed,
    GroupAuthorizationFailed,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
)
from raftlog.v1.security_pb2 import Acl

ERRORS = {
    Acl.TOPIC: TopicAuthorizationFailed,
    Acl.GROUP: GroupAuthorizationFailed,
    Acl.CLUSTER: ClusterAuthorizationFailed,
    Acl.TRANSACTIONAL_ID: TransactionalIdAuthorizationFailed,
}

Permission = tuple[Operation, ResourceType, str]


class FakeAuthorizer:
    """No permission implies another, and there is no super user."""

    def __init__(self, *allowed: Permission) -> None:
        self.allowed = set(allowed)
        self.asked: list[Permission] = []
        self.logged: list[Permission] = []
        self.changes = 0

    @property
    def version(self) -> object:
        """Which of the test's permissions are in force."""
        return self.changes

    def change(self, *allowed: Permission) -> None:
        """Put others in the place of what is allowed."""
        self.allowed = set(allowed)
        self.changes += 1

    def may(
        self, principal: str, host: str, operation: Operation, resource: ResourceType, name: str, *, log: bool = True
    ) -> bool:
        """Whether the test allows it."""
        permission = (operation, resource, name)
        self.asked.append(permission)
        if log and permission not in self.allowed:
            self.logged.append(permission)
        return permission in self.allowed

    def may_any(self, principal: str, host: str, operation: Operation, resource: ResourceType) -> bool:
        """Whether the test allows it with anything."""
        return any((operation, resource) == permission[:2] for permission in self.allowed)

    def refusal(
        self, principal: str, operation: Operation, resource: ResourceType, name: str, host: str = ""
    ) -> AuthorizationError:
        """Say so."""
        return ERRORS[resource](f"{principal} may not {Acl.Operation.Name(operation)} {name}")

    def caller(self, principal: str = "User:alice") -> Caller:
        """Return a caller that this authorizer checks."""
        return Caller(principal, "10.0.0.1", self)
