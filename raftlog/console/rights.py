"""Who may do what: the brokers' own rule (`raftlog._core.security.acls.verdict`) over all ACLs and roles. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from raftlog import security
from raftlog._core.descriptions import ConfigDescription
from raftlog._core.security.acls import (
    ANONYMOUS,
    EVERYBODY,
    NODE_PREFIX,
    OPERATIONS,
    ROLE_PREFIX,
    USER_PREFIX,
    WILDCARD,
    Acl,
    AclIndex,
    Ground,
    Role,
    Verdict,
    canonical_host,
    super_users_of,
    verdict,
)
from raftlog.security import AclOperation, ResourceType
from raftlog.v1.security_pb2 import Acl as Wire


class Right(NamedTuple):
    """Whether a principal may do an operation, and the rule that says so, in words."""

    operation: AclOperation
    allowed: bool
    rule: str


@dataclass(frozen=True, slots=True)
class Rights:
    """What decides in a cluster. `enforced`: whether brokers have an authorizer. `principals`: those that are named
    anywhere, in order."""

    index: AclIndex
    super_users: frozenset[str]
    everyone_if_none: bool
    enforced: bool
    principals: tuple[str, ...]
    roles: Mapping[str, tuple[str, ...]]
    """The names of the roles of each principal."""

    @classmethod
    def of(
        cls,
        users: Iterable[str],
        bindings: Iterable[security.AclBinding],
        roles: Sequence[security.Role],
        configs: Mapping[str, ConfigDescription],
    ) -> Rights:
        """Return them. `configs`: of a broker, whose authorizer decides."""
        acls = list(map(acl_of, bindings))
        supers = super_users_of(_value(configs, "super.users"))
        granted: dict[str, tuple[str, ...]] = {}
        for role in roles:
            for principal in role.principals:
                granted[principal] = (*granted.get(principal, ()), role.name)
        named = {*supers, *granted, *(acl.principal for acl in acls), *(USER_PREFIX + user for user in users)}
        return cls(
            AclIndex(
                acls,
                {
                    each.name: Role(each.name, frozenset(map(acl_of, each.permissions)), frozenset(each.principals))
                    for each in roles
                },
            ),
            supers,
            _value(configs, "allow.everyone.if.no.acl.found") == "true",
            _value(configs, "authorizer") not in ("", "none"),
            tuple(sorted(named, key=lambda each: (each == EVERYBODY, each.lower()))),
            granted,
        )

    def rights(self, principal: str, host: str, kind: ResourceType, name: str) -> list[Right]:
        """Return what a principal may do with a resource. `host`: where it comes from; empty: of rules about single
        addresses none counts."""
        if not self.enforced:
            return [Right(each, True, "open: brokers have no authorizer") for each in operations_of(kind)]
        return [
            Right(operation, found.allowed, _words(found))
            for operation in operations_of(kind)
            for found in [self._verdict(principal, host, operation, kind, name)]
        ]

    def names(self, principal: str) -> bool:
        """Whether a user, an ACL, a role or a broker's config names the principal."""
        return principal in self.principals or principal in ANYBODY

    def may_something(self, principal: str, host: str, kind: ResourceType, name: str) -> bool:
        """Whether a principal may do anything with a resource."""
        return not self.enforced or any(
            self._verdict(principal, host, each, kind, name).allowed for each in operations_of(kind)
        )

    def _verdict(self, principal: str, host: str, operation: AclOperation, kind: ResourceType, name: str) -> Verdict:
        does: Any = operation.value  # the numbers are the same
        what: Any = kind.value
        supers, everyone = self.super_users, self.everyone_if_none
        return verdict(self.index, supers, principal, host, does, what, name, everyone_if_none=everyone)


def operations_of(kind: ResourceType) -> list[AclOperation]:
    """Return the operations on that type of resource, as the page shows them."""
    number: Any = kind.value  # the numbers are the same
    return sorted(AclOperation(each) for each in OPERATIONS[number] if each != Wire.ALL)


def principal_of(text: str) -> str:
    """Return the principal that a person means: a name is that of a user."""
    text = text.strip()
    return text if not text or text.startswith((USER_PREFIX, NODE_PREFIX)) else USER_PREFIX + text


def host_of(text: str) -> str:
    """Return an address as brokers compare it."""
    return canonical_host(text.strip())


def role_of(acl: Acl) -> str | None:
    """Return the name of the role that has a permission; None: it is an ACL."""
    return acl.principal.removeprefix(ROLE_PREFIX) if acl.principal.startswith(ROLE_PREFIX) else None


def _words(found: Verdict) -> str:
    match found.ground:
        case Ground.SUPER_USER:
            return "super user"
        case Ground.INTERNAL:
            return "internal topic, for super users only"
        case Ground.NO_ACL_OPEN:
            return "open: no ACL is about it"
        case Ground.NO_ACL:
            return "no ACL or role allows it"
        case Ground.ACL:
            assert found.acl is not None
            return _of_acl(found.acl)


def _of_acl(acl: Acl) -> str:
    role = role_of(acl)
    verb = "allows" if acl.permission == Wire.ALLOW else "denies"
    said = f"ACL of {acl.principal}" if role is None else f"role {role}"
    operation = AclOperation(acl.operation).name.lower().replace("_", " ")
    if acl.resource_type == Wire.CLUSTER:
        where = ""
    elif acl.resource_name == WILDCARD:
        where = " on every name"
    elif acl.pattern_type == Wire.PREFIXED:
        where = f" on names that begin with {acl.resource_name}"
    else:
        where = f" on {acl.resource_name}"
    return f"{said}: {verb} {operation}{where}" + ("" if acl.host == WILDCARD else f" from {acl.host}")


def acl_of(each: security.AclBinding) -> Acl:
    """Return an ACL as brokers hold it."""
    numbers: list[Any] = [  # the same as on the wire
        each.resource_type.value,
        each.pattern_type.value,
        each.operation.value,
        each.permission.value,
    ]
    kind, pattern, operation, permission = numbers
    return Acl(kind, each.resource_name, pattern, each.principal, each.host, operation, permission)


def _value(configs: Mapping[str, ConfigDescription], key: str) -> str:
    found = configs.get(key)
    return "" if found is None else found.value or ""


ANYBODY: Final = (EVERYBODY, ANONYMOUS)
"""Principals that need not be named anywhere."""
