"""Permissions: who may do what with which resource (KIP-11, KIP-290). Pure; `broker.security` asks here.

Deny wins over allow. READ, WRITE, DELETE and ALTER allow DESCRIBE as well, ALTER_CONFIGS allows DESCRIBE_CONFIGS, ALL
allows everything; a denial stands for what it names, or for everything if it names ALL.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from ipaddress import IPv6Address, ip_address
from operator import attrgetter
from typing import Any, Final, TypeAlias

from raftlog.errors import InvalidRequestError
from raftlog.v1 import records_pb2, security_pb2
from raftlog.v1.records_pb2 import MetadataRecord
from raftlog.v1.security_pb2 import Acl as WireAcl
from raftmeta.user_names import is_hidden, why_no_name

Operation: TypeAlias = WireAcl.Operation.ValueType
Permission: TypeAlias = WireAcl.Permission.ValueType
PatternType: TypeAlias = WireAcl.PatternType.ValueType
ResourceType: TypeAlias = WireAcl.ResourceType.ValueType

WILDCARD: Final = "*"
CLUSTER_NAME: Final = "raftlog-cluster"
"""The name of the one resource of type CLUSTER."""
USER_PREFIX: Final = "User:"
EVERYBODY: Final = "User:*"
ANONYMOUS: Final = "User:ANONYMOUS"

IMPLIED_BY: Final = {
    WireAcl.DESCRIBE: frozenset({WireAcl.READ, WireAcl.WRITE, WireAcl.DELETE, WireAcl.ALTER}),
    WireAcl.DESCRIBE_CONFIGS: frozenset({WireAcl.ALTER_CONFIGS}),
}
"""Allowing one of these allows the key, too."""
OPERATIONS: Final = {
    WireAcl.TOPIC: frozenset(
        {
            WireAcl.ALL,
            WireAcl.READ,
            WireAcl.WRITE,
            WireAcl.CREATE,
            WireAcl.DELETE,
            WireAcl.ALTER,
            WireAcl.DESCRIBE,
            WireAcl.DESCRIBE_CONFIGS,
            WireAcl.ALTER_CONFIGS,
        }
    ),
    WireAcl.GROUP: frozenset({WireAcl.ALL, WireAcl.READ, WireAcl.DELETE, WireAcl.DESCRIBE}),
    WireAcl.CLUSTER: frozenset(
        {
            WireAcl.ALL,
            WireAcl.CREATE,
            WireAcl.ALTER,
            WireAcl.DESCRIBE,
            WireAcl.CLUSTER_ACTION,
            WireAcl.DESCRIBE_CONFIGS,
            WireAcl.ALTER_CONFIGS,
            WireAcl.IDEMPOTENT_WRITE,
        }
    ),
    WireAcl.TRANSACTIONAL_ID: frozenset({WireAcl.ALL, WireAcl.WRITE, WireAcl.DESCRIBE}),
}
"""What can be done with each type of resource, as Kafka's `AclEntry.supportedOperations` has it."""
MAX_RESOURCE_CHARACTERS: Final = 255
"""Of the longest names that resources have: groups and transactional ids."""


@dataclass(frozen=True, slots=True, order=True)
class Acl:
    """One permission. `host`: an address or `*`; `principal`: `User:name`, or `User:*` for everybody."""

    resource_type: ResourceType
    resource_name: str
    pattern_type: PatternType
    principal: str
    host: str
    operation: Operation
    permission: Permission

    def __str__(self) -> str:
        """Return it for people: `ALLOW User:alice READ TOPIC LITERAL 'orders' from *`."""
        return (
            f"{_name(WireAcl.Permission, self.permission)} {self.principal} "
            f"{_name(WireAcl.Operation, self.operation)} {_name(WireAcl.ResourceType, self.resource_type)} "
            f"{_name(WireAcl.PatternType, self.pattern_type)} {self.resource_name!r} from {self.host}"
        )

    def canonical(self) -> Acl:
        """Return it with the host as `canonical_host` has it."""
        host = canonical_host(self.host)
        return self if host == self.host else replace(self, host=host)

    @classmethod
    def from_wire(cls, wire: security_pb2.Acl) -> Acl:
        """Return what a message says, as it is; nothing is checked."""
        return cls(
            wire.resource_type,
            wire.resource_name,
            wire.pattern_type,
            wire.principal,
            wire.host,
            wire.operation,
            wire.permission,
        )

    def to_wire(self) -> security_pb2.Acl:
        """Return it as it travels and rests."""
        return security_pb2.Acl(
            resource_type=self.resource_type,
            resource_name=self.resource_name,
            pattern_type=self.pattern_type,
            principal=self.principal,
            host=self.host,
            operation=self.operation,
            permission=self.permission,
        )

    def to_record(self) -> MetadataRecord:
        """Return the record that adds it."""
        return MetadataRecord(acl=records_pb2.AclRecord(acl=self.to_wire()))

    def to_removal(self) -> MetadataRecord:
        """Return the record that takes it away."""
        return MetadataRecord(remove_acl=records_pb2.RemoveAclRecord(acl=self.to_wire()))


def canonical_host(host: str) -> str:
    """Return an address in the one way in which it is written here; what is none, as it is.

    IPv6 in short and without its zone, IPv4 within IPv6 as IPv4.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def check_acl(acl: Acl) -> None:
    """Check that a canonical ACL says something that can hold.

    Raises:
        InvalidRequestError: it does not; the message names the field, the value and what it may be.
    """
    operations = OPERATIONS.get(acl.resource_type)
    if operations is None:
        raise InvalidRequestError(
            f"an ACL is about {_names(WireAcl.ResourceType, OPERATIONS)}, not "
            f"{_name(WireAcl.ResourceType, acl.resource_type)}"
        )
    if acl.operation not in operations:
        raise InvalidRequestError(
            f"with {_name(WireAcl.ResourceType, acl.resource_type)} goes {_names(WireAcl.Operation, operations)}, not "
            f"{_name(WireAcl.Operation, acl.operation)}"
        )
    if acl.permission not in (WireAcl.ALLOW, WireAcl.DENY):
        raise InvalidRequestError(
            f"the permission of an ACL is ALLOW or DENY, not {_name(WireAcl.Permission, acl.permission)}"
        )
    if acl.pattern_type not in (WireAcl.LITERAL, WireAcl.PREFIXED):
        raise InvalidRequestError(
            f"the pattern of an ACL is LITERAL or PREFIXED, not {_name(WireAcl.PatternType, acl.pattern_type)}"
        )
    _check_name(acl)
    _check_principal(acl.principal)
    if acl.host != WILDCARD and not _is_address(acl.host):
        raise InvalidRequestError(f"the host of an ACL is an IP address or {WILDCARD}, not {acl.host[:100]!r}")


def _check_name(acl: Acl) -> None:
    name = acl.resource_name
    if not 1 <= len(name) <= MAX_RESOURCE_CHARACTERS:
        raise InvalidRequestError(
            f"the resource of an ACL has a name of {len(name)} characters, it may have 1 to {MAX_RESOURCE_CHARACTERS}"
        )
    if any(map(is_hidden, name)):
        raise InvalidRequestError(f"the resource of an ACL has a control character in its name: {name!a}")
    if name == WILDCARD and acl.pattern_type != WireAcl.LITERAL:
        raise InvalidRequestError(
            f"a pattern {WILDCARD} stands for every name and has to be LITERAL; a prefix is written without it"
        )
    if acl.resource_type == WireAcl.CLUSTER and (name, acl.pattern_type) != (CLUSTER_NAME, WireAcl.LITERAL):
        raise InvalidRequestError(f"the one resource of type CLUSTER is LITERAL {CLUSTER_NAME!r}, not {name!r}")


def _check_principal(principal: str) -> None:
    if not principal.startswith(USER_PREFIX):
        raise InvalidRequestError(
            f"the principal of an ACL is {USER_PREFIX}NAME, or {EVERYBODY} for everybody, not {principal[:100]!r}"
        )
    why = why_no_name(principal.removeprefix(USER_PREFIX))
    if why is not None:
        raise InvalidRequestError(f"the principal of an ACL is {USER_PREFIX} and a name, which is wrong here: {why}")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _name(enum: Any, number: int) -> str:
    """Return what a value of one of the enums is called; its number if this version has no name for it."""
    return str(enum.Name(number)) if number in enum.values() else str(number)


def _names(enum: Any, numbers: Iterable[int]) -> str:
    return ", ".join(_name(enum, number) for number in sorted(numbers))


field_order = attrgetter(*Acl.__slots__)
"""The key that sorts ACLs as comparing them does, in a tenth of the time."""
