"""ACLs and roles: names of users, filters, and decisions (KIP-11, KIP-140, KIP-290). Pure.

`verdict` is the whole rule: the broker's authorizer decides by it, and the console shows what it says and why.

A denial overrides a permission. READ, WRITE, DELETE and ALTER also allow DESCRIBE, ALTER_CONFIGS allows
DESCRIBE_CONFIGS, ALL allows every operation. A denial covers the operation that it names; ALL covers every operation.

SCRAM (RFC 5802, section 5.1) prepares a user's name with SASLprep (RFC 4013), so only names that SASLprep leaves
unchanged can log in. `,` and `=` are allowed, because SCRAM escapes them. The tables are those of Unicode 3.2, not of
this Python's Unicode, so that all controllers decide alike.

`AclIndex` decides in microseconds:

    (principal, resource type) ─ patterns ─┬ literal   name  ─┐
                                           └ prefixed  start ─┴ host ─ (operations allowed, operations denied)

A decision looks up the principal, `User:*` and the roles of both; under each the name, `*`, and the name's prefixes of
the lengths that occur there; under each of those the host, `*`, and the networks that the host can be in, 32 of IPv4.
Its time does not depend on the number of other ACLs.

A role is a named set of permissions, which are ACLs of the principal `Role:NAME`. No caller has such a principal: a
principal that was granted the role has the role's permissions beside its own ACLs. So a denial wins wherever it stands.
"""

from __future__ import annotations

import stringprep
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from operator import attrgetter
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar
from unicodedata import ucd_3_2_0

from raftlog.errors import InvalidRequestError
from raftlog.v1 import records_pb2, security_pb2
from raftlog.v1.records_pb2 import MetadataRecord
from raftlog.v1.security_pb2 import Acl as WireAcl

MAX_USER_CHARACTERS: Final = 255
RESERVED: Final = ("*", "ANONYMOUS")
"""`User:*` stands for all users, `User:ANONYMOUS` for clients that have not logged in."""

_FORBIDDEN: Final = (
    stringprep.in_table_a1,  # not assigned
    stringprep.in_table_b1,  # mapped to nothing
    stringprep.in_table_c12,  # spaces other than ' '
    stringprep.in_table_c21_c22,  # control characters
    stringprep.in_table_c3,  # private use
    stringprep.in_table_c4,  # no characters
    stringprep.in_table_c5,  # surrogates
    stringprep.in_table_c6,  # not for plain text
    stringprep.in_table_c7,  # not for canonical representation
    stringprep.in_table_c8,  # change how others are shown
    stringprep.in_table_c9,  # tags
)


def why_no_name(name: str) -> str | None:
    """Return why this cannot be the name of a principal, or None.

    A name from a certificate may be one that could not log in with a password.
    """
    if not 1 <= len(name) <= MAX_USER_CHARACTERS:
        return f"it has {len(name)} characters, it may have 1 to {MAX_USER_CHARACTERS}"
    for character in name:
        if is_hidden(character):
            return f"it has the control character {character!a}"
    return None


def why_no_user(name: str) -> str | None:
    """Return why this cannot be the name of a user with a password, or None."""
    why = why_no_name(name)
    if why is not None:
        return why
    if name in RESERVED:
        return "that name is reserved"
    if name != name.strip(" "):
        return "it begins or ends with a space"
    for character in name:
        if any(forbidden(character) for forbidden in _FORBIDDEN):
            return f"it has {character!a}, which SASLprep (RFC 4013) does not allow"
    if ucd_3_2_0.normalize("NFKC", name) != name:
        return "SASLprep (RFC 4013) makes another name of it; give it in Unicode's form NFKC"
    if any(map(stringprep.in_table_d1, name)) and not (
        stringprep.in_table_d1(name[0])
        and stringprep.in_table_d1(name[-1])
        and not any(map(stringprep.in_table_d2, name))
    ):
        return "it mixes scripts written from right to left with others, which SASLprep (RFC 4013) does not allow"
    return None


def is_hidden(character: str) -> bool:
    """Whether a character is invisible in logs and terminals, or changes how others are shown."""
    return stringprep.in_table_c21_c22(character) or stringprep.in_table_c8(character)


Operation: TypeAlias = WireAcl.Operation.ValueType
Permission: TypeAlias = WireAcl.Permission.ValueType
PatternType: TypeAlias = WireAcl.PatternType.ValueType
ResourceType: TypeAlias = WireAcl.ResourceType.ValueType

WILDCARD: Final = "*"
CLUSTER_NAME: Final = "raftlog-cluster"
"""The name of the one resource of type CLUSTER."""
USER_PREFIX: Final = "User:"
ROLE_PREFIX: Final = "Role:"
EVERYBODY: Final = "User:*"
ANONYMOUS: Final = "User:ANONYMOUS"

IMPLIED_BY: Final = {
    WireAcl.DESCRIBE: frozenset({WireAcl.READ, WireAcl.WRITE, WireAcl.DELETE, WireAcl.ALTER}),
    WireAcl.DESCRIBE_CONFIGS: frozenset({WireAcl.ALTER_CONFIGS}),
}
"""Each of these operations, if allowed, also allows the key."""
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
"""The operations on each type of resource, as in Kafka's `AclEntry.supportedOperations`."""
MAX_RESOURCE_CHARACTERS: Final = 255
"""The length of the longest names of resources: groups and transactional ids."""


@dataclass(frozen=True, slots=True, order=True)
class Acl:
    """One permission. `host`: an address, a network or `*`; `principal`: `User:name`, or `User:*` for all users."""

    resource_type: ResourceType
    resource_name: str
    pattern_type: PatternType
    principal: str
    host: str
    operation: Operation
    permission: Permission

    def __str__(self) -> str:
        """Return the ACL as text for users: `ALLOW User:alice READ TOPIC LITERAL 'orders' from *`."""
        return (
            f"{_name(WireAcl.Permission, self.permission)} {self.principal} "
            f"{_name(WireAcl.Operation, self.operation)} {_name(WireAcl.ResourceType, self.resource_type)} "
            f"{_name(WireAcl.PatternType, self.pattern_type)} {self.resource_name!r} from {self.host}"
        )

    def canonical(self) -> Acl:
        """Return the ACL with its host in the form of `canonical_host`."""
        host = canonical_host(self.host)
        return self if host == self.host else replace(self, host=host)

    @classmethod
    def from_wire(cls, wire: security_pb2.Acl) -> Acl:
        """Return the ACL of a message, unchecked."""
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
        """Return the wire form."""
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
        """Return the record that adds the ACL."""
        return MetadataRecord(acl=records_pb2.AclRecord(acl=self.to_wire()))

    def to_removal(self) -> MetadataRecord:
        """Return the record that removes the ACL."""
        return MetadataRecord(remove_acl=records_pb2.RemoveAclRecord(acl=self.to_wire()))


def canonical_host(host: str) -> str:
    """Return an address in canonical form: IPv6 shortened and without its zone, IPv4 within IPv6 as IPv4.

    A network of one address is that address. A text that is neither an address nor a network is returned unchanged.
    """
    if "/" in host:
        try:
            network = ip_network(host)
        except ValueError:
            return host
        return str(network.network_address) if network.num_addresses == 1 else str(network)
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def check_acl(acl: Acl) -> None:
    """Check that a canonical ACL is valid.

    Raises:
        InvalidRequestError: it is not; the message names the field, its value and the valid values.
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
    check_principal(acl.principal)
    if acl.host != WILDCARD and not _is_address(acl.host):
        raise InvalidRequestError(
            f"the host of an ACL is an IP address, a network (10.0.0.0/8, no bits beyond its length) or {WILDCARD}, "
            f"not {acl.host[:100]!r}"
        )


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


def check_principal(principal: str) -> None:
    """Check that this can be the principal of an ACL, and one that a role is granted to.

    Raises:
        InvalidRequestError: it cannot.
    """
    if not principal.startswith(USER_PREFIX):
        raise InvalidRequestError(
            f"a principal is {USER_PREFIX}NAME, or {EVERYBODY} for all users, not {principal[:100]!r}"
        )
    why = why_no_name(principal.removeprefix(USER_PREFIX))
    if why is not None:
        raise InvalidRequestError(f"a principal is {USER_PREFIX} and a name, which is wrong here: {why}")


@dataclass(frozen=True, slots=True)
class Role:
    """A named set of permissions, and the principals that have it.

    Invariant: the principal of each permission is that of the role, its host is canonical.
    """

    name: str
    permissions: frozenset[Acl] = frozenset()
    principals: frozenset[str] = frozenset()

    @property
    def principal(self) -> str:
        """The principal of the role's permissions."""
        return ROLE_PREFIX + self.name

    def changed_by(self, record: records_pb2.RoleRecord) -> Role:
        """Return the role after a record."""
        return Role(
            self.name,
            self.permissions.difference(map(Acl.from_wire, record.removals)).union(
                map(Acl.from_wire, record.additions)
            ),
            self.principals.difference(record.revocations).union(record.grants),
        )

    def to_wire(self) -> security_pb2.Role:
        """Return the wire form, in the order of the fields."""
        permissions = [acl.to_wire() for acl in sorted(self.permissions, key=field_order)]
        return security_pb2.Role(name=self.name, permissions=permissions, principals=sorted(self.principals))

    def to_records(self) -> Iterator[MetadataRecord]:
        """Yield records that make the role from none; several, if one of them would be long."""
        wire = self.to_wire()
        permissions, principals = list(wire.permissions), list(wire.principals)
        for start in range(0, max(1, len(permissions), len(principals)), ROLE_PARTS_PER_RECORD):
            part = slice(start, start + ROLE_PARTS_PER_RECORD)
            record = records_pb2.RoleRecord(name=self.name, additions=permissions[part], grants=principals[part])
            yield MetadataRecord(role=record)


ROLE_PARTS_PER_RECORD: Final = 1_000
NO_ROLES: Final[Mapping[str, Role]] = {}


def check_permission(acl: Acl) -> None:
    """Check that a canonical ACL can be a permission of its role.

    Raises:
        InvalidRequestError: as `check_acl`, or the role's name is not allowed.
    """
    check_role_name(acl.principal.removeprefix(ROLE_PREFIX))
    check_acl(replace(acl, principal=EVERYBODY))


def check_role_name(name: str) -> None:
    """Check that a role may have this name.

    Raises:
        InvalidRequestError: it may not.
    """
    why = why_no_name(name)
    if why is None and (name == WILDCARD or name != name.strip()):
        why = "it is * or has space around it"
    if why is not None:
        raise InvalidRequestError(f"{name[:MAX_USER_CHARACTERS]!a} cannot be the name of a role: {why}")


def _is_address(host: str) -> bool:
    """Whether this is an address or a network; one of IPv4 within IPv6 is written as IPv4."""
    try:
        network = ip_network(host) if "/" in host else ip_address(host)
    except ValueError:
        return False
    first = getattr(network, "network_address", network)
    return not (isinstance(first, IPv6Address) and first.ipv4_mapped is not None)


def is_network(host: str) -> bool:
    """Whether the host of an ACL is meant as a network."""
    return "/" in host


@lru_cache(4_096)
def _places_of(host: str) -> tuple[str, ...]:
    """Return all hosts of ACLs that cover an address: itself, every one, and the networks that it is in."""
    try:
        address = ip_address(host)
    except ValueError:  # a caller whose address is hidden
        return host, WILDCARD
    networks = (ip_network((address, length), strict=False) for length in range(address.max_prefixlen))
    return (host, WILDCARD, *map(str, networks))


def _name(enum: Any, number: int) -> str:
    """Return the name of an enum's value, or its number if this version does not know it."""
    return str(enum.Name(number)) if number in enum.values() else str(number)


def _names(enum: Any, numbers: Iterable[int]) -> str:
    return ", ".join(_name(enum, number) for number in sorted(numbers))


field_order = attrgetter(*Acl.__slots__)
"""A sort key for ACLs with the order of comparisons, in a tenth of the time."""


def matching(acls: Set[Acl], pattern: Acl) -> list[Acl]:
    """Return the ACLs that a filter selects, in the order of their fields.

    Empty strings and ANY stand for all. A name goes with LITERAL and PREFIXED patterns of just that name, with ANY of
    both, with MATCH for all ACLs about the resource of that name. Looks at every ACL, unless only one can match.

    Raises:
        InvalidRequestError: the filter leaves a field open.
    """
    pattern = pattern.canonical()
    check_filter(pattern)
    if _is_concrete(pattern):
        return [pattern] if pattern in acls else []
    return sorted((acl for acl in acls if _selects(pattern, acl)), key=field_order)


def _is_concrete(pattern: Acl) -> bool:
    """Whether a filter can select only the ACL with the same fields."""
    return (
        bool(pattern.resource_name and pattern.principal and pattern.host)
        and pattern.resource_type != WireAcl.ANY_RESOURCE
        and pattern.pattern_type in (WireAcl.LITERAL, WireAcl.PREFIXED)
        and pattern.operation != WireAcl.ANY_OPERATION
        and pattern.permission != WireAcl.ANY_PERMISSION
    )


def check_filter(pattern: Acl) -> None:
    """Check that a filter sets each field, to a value or to ANY.

    Raises:
        InvalidRequestError: a field is not set, or has a value that this version does not know, for example from a
            newer client.
    """
    for what, enum, number, unknown in (
        ("resource type", WireAcl.ResourceType, pattern.resource_type, WireAcl.UNKNOWN_RESOURCE),
        ("pattern", WireAcl.PatternType, pattern.pattern_type, WireAcl.UNKNOWN_PATTERN),
        ("operation", WireAcl.Operation, pattern.operation, WireAcl.UNKNOWN_OPERATION),
        ("permission", WireAcl.Permission, pattern.permission, WireAcl.UNKNOWN_PERMISSION),
    ):
        if number == unknown or number not in enum.values():
            raise InvalidRequestError(f"the {what} of a filter is {number}, which is not known here; 1 stands for any")


def _selects(pattern: Acl, acl: Acl) -> bool:
    """Whether a filter selects an ACL."""
    return (
        pattern.resource_type in (WireAcl.ANY_RESOURCE, acl.resource_type)
        and pattern.operation in (WireAcl.ANY_OPERATION, acl.operation)
        and pattern.permission in (WireAcl.ANY_PERMISSION, acl.permission)
        and pattern.principal in ("", acl.principal)
        and pattern.host in ("", acl.host)
        and pattern.pattern_type in (WireAcl.ANY_PATTERN, WireAcl.MATCH, acl.pattern_type)
        and (not pattern.resource_name or _selects_name(pattern, acl))
    )


def _selects_name(pattern: Acl, acl: Acl) -> bool:
    name = pattern.resource_name
    if pattern.pattern_type != WireAcl.MATCH:
        return name == acl.resource_name
    if acl.pattern_type == WireAcl.PREFIXED:
        return name.startswith(acl.resource_name)
    return acl.resource_name in (name, WILDCARD)


V = TypeVar("V")


class Decision(NamedTuple):
    """Whether an operation is allowed, and the ACL that decides; None: no ACL applies, so it is not allowed."""

    allowed: bool
    acl: Acl | None


_NOTHING_SAID: Final = Decision(False, None)


class _Operations(NamedTuple):
    """Bit sets of operations that are allowed and denied: `1 << operation`, ALL included."""

    allowed: int = 0
    denied: int = 0


_NONE: Final = _Operations()
_NAMED: Final = [number for number in WireAcl.Operation.values() if number >= WireAcl.ALL]
_ALLOWED_BY: Final = {
    number: sum(1 << each for each in {number, WireAcl.ALL, *IMPLIED_BY.get(number, ())}) for number in _NAMED
}
"""The operations of which one must be allowed for an operation to be allowed."""
_DENIED_BY: Final = {number: 1 << number | 1 << WireAcl.ALL for number in _NAMED}

_Hosts = dict[str, _Operations]
_Holder = tuple[str, ResourceType]


class _Patterns(Generic[V]):
    """Values by pattern of names, for one type of resource. Immutable once it belongs to an index.

    Invariant: `lengths` are those of the keys of `prefixed`, rising.
    """

    __slots__ = ("lengths", "literal", "prefixed")

    def __init__(self, base: _Patterns[V] | None = None) -> None:
        self.literal: dict[str, V] = {} if base is None else dict(base.literal)
        self.prefixed: dict[str, V] = {} if base is None else dict(base.prefixed)
        self.lengths: tuple[int, ...] = () if base is None else base.lengths

    def of(self, pattern_type: PatternType) -> dict[str, V]:
        return self.literal if pattern_type == WireAcl.LITERAL else self.prefixed

    def starts_of(self, name: str) -> list[str]:
        """Return the prefixes with which a name begins, the shortest first."""
        prefixed, longest = self.prefixed, len(name)
        return [start for length in self.lengths if length <= longest and (start := name[:length]) in prefixed]

    def matching(self, name: str) -> Iterator[tuple[PatternType, str, V]]:
        """Yield (type of pattern, its name, its value) of the patterns that a name matches."""
        for each in (name, WILDCARD):
            found = self.literal.get(each)
            if found is not None:
                yield WireAcl.LITERAL, each, found
        for start in self.starts_of(name):
            yield WireAcl.PREFIXED, start, self.prefixed[start]


class AclIndex:
    """All ACLs and roles, ready for decisions; immutable, so threads may share it.

    Callers write hosts as `canonical_host` does, and name one operation and one type of resource.
    """

    __slots__ = ("_acls", "_granted", "_held", "_resources", "_roles")

    def __init__(self, acls: Iterable[Acl] = (), roles: Mapping[str, Role] = NO_ROLES) -> None:
        self._acls = frozenset(acls)
        self._roles = roles
        self._granted = _granted(roles)
        edit = _Edit({}, {})
        for acl in self._acls:
            edit.add(acl)
        for role in roles.values():
            for acl in role.permissions:
                edit.add(acl)
        self._held, self._resources = edit.done()

    def changed_to(self, acls: frozenset[Acl], roles: Mapping[str, Role] = NO_ROLES) -> AclIndex:
        """Return the index of other ACLs and roles; quick if most of them are in this one as well."""
        if acls is self._acls and roles is self._roles:
            return self
        edit = _Edit(self._held, self._resources)
        sets = [(self._acls, acls)]
        if roles is not self._roles:
            none = Role("")
            for name in self._roles.keys() | roles.keys():
                before, after = self._roles.get(name, none), roles.get(name, none)
                if before is not after:
                    sets.append((before.permissions, after.permissions))
        for were, are in sets:
            for acl in were - are:
                edit.remove(acl)
            for acl in are - were:
                edit.add(acl)
        index = AclIndex.__new__(AclIndex)
        index._acls = acls
        index._roles = roles
        index._granted = self._granted if roles is self._roles else _granted(roles)
        index._held, index._resources = edit.done()
        return index

    def _holders(self, principal: str) -> tuple[str, ...]:
        """Return the principals whose ACLs apply to one: itself, `User:*`, and the roles of both."""
        granted = self._granted
        if not granted:
            return principal, EVERYBODY
        return principal, EVERYBODY, *granted.get(principal, ()), *granted.get(EVERYBODY, ())

    def decide(
        self, principal: str, host: str, operation: Operation, resource_type: ResourceType, name: str
    ) -> Decision:
        """Decide whether a principal at an address may do this. A denial wins; without an ACL it is not allowed."""
        allowing, denying = _ALLOWED_BY[operation], _DENIED_BY[operation]
        allowed: Acl | None = None
        for who in self._holders(principal):
            patterns = self._held.get((who, resource_type))
            if patterns is None:
                continue
            for pattern_type, pattern, hosts in patterns.matching(name):
                for where in _places_of(host):
                    said = hosts.get(where)
                    if said is None:
                        continue
                    if by := said.denied & denying:
                        return Decision(
                            False, Acl(resource_type, pattern, pattern_type, who, where, _lowest(by), WireAcl.DENY)
                        )
                    if allowed is None and (by := said.allowed & allowing):
                        allowed = Acl(resource_type, pattern, pattern_type, who, where, _lowest(by), WireAcl.ALLOW)
        return _NOTHING_SAID if allowed is None else Decision(True, allowed)

    def has_acls(self, resource_type: ResourceType, name: str) -> bool:
        """Whether any ACL, for any user, or a permission of a role covers that resource."""
        resources = self._resources.get(resource_type)
        return resources is not None and next(resources.matching(name), None) is not None

    def may_any(
        self,
        principal: str,
        host: str,
        operation: Operation,
        resource_type: ResourceType,
        *,
        everyone_if_none: bool = False,
    ) -> bool:
        """Whether the principal may do this with at least one resource of the type (KIP-679).

        Several denials do not outweigh a wider permission, because no number of them covers it. `everyone_if_none`:
        resources without ACLs are open to all users.
        """
        if resource_type == WireAcl.CLUSTER:
            if everyone_if_none and not self.has_acls(resource_type, CLUSTER_NAME):
                return True
            return self.decide(principal, host, operation, resource_type, CLUSTER_NAME).allowed
        resources = self._resources.get(resource_type)
        if everyone_if_none and (resources is None or WILDCARD not in resources.literal):
            return True
        allowing, denying = _ALLOWED_BY[operation], _DENIED_BY[operation]
        held = [each for who in self._holders(principal) if (each := self._held.get((who, resource_type))) is not None]
        if any(_at(each.literal.get(WILDCARD), host).denied & denying for each in held):
            return False

        def denied_below(name: str) -> bool:
            return any(
                _at(each.prefixed[start], host).denied & denying for each in held for start in each.starts_of(name)
            )

        def denied(name: str) -> bool:
            return denied_below(name) or any(_at(each.literal.get(name), host).denied & denying for each in held)

        return any(
            _at(hosts, host).allowed & allowing and (name == WILDCARD or not denied(name))
            for each in held
            for name, hosts in each.literal.items()
        ) or any(
            _at(hosts, host).allowed & allowing and not denied_below(start)
            for each in held
            for start, hosts in each.prefixed.items()
        )


INTERNAL_PREFIX: Final = "__"
"""The names of internal topics begin with it."""
NODE_PREFIX: Final = "Node:"
"""Prefix of the principal of a caller with a node's certificate; no user's principal has it."""
_OF_CLUSTER_ITSELF: Final = frozenset(
    {WireAcl.READ, WireAcl.WRITE, WireAcl.CREATE, WireAcl.DELETE, WireAcl.ALTER, WireAcl.ALTER_CONFIGS}
)
"""Operations on internal topics that only super users may do."""


class Ground(Enum):
    """What a verdict rests on."""

    SUPER_USER = "super user"
    INTERNAL = "internal topic"
    """Only super users may do this with an internal topic."""
    ACL = "ACL"
    """Of the principal, of `User:*`, or of a role."""
    NO_ACL_OPEN = "no ACL, open"
    """The resource has no ACL, and `allow.everyone.if.no.acl.found` is on."""
    NO_ACL = "no ACL"


class Verdict(NamedTuple):
    """Whether a principal may do something. `acl`: the one that decides, for `Ground.ACL`."""

    allowed: bool
    ground: Ground
    acl: Acl | None = None


def is_super_user(principal: str, super_users: Set[str]) -> bool:
    """Whether the principal may do everything: `super.users` names it, or it is a node of the cluster."""
    return principal in super_users or principal.startswith(NODE_PREFIX)


def is_of_cluster(operation: Operation, resource_type: ResourceType, name: str) -> bool:
    """Whether only super users may do this, as the topic belongs to the cluster itself."""
    return resource_type == WireAcl.TOPIC and name.startswith(INTERNAL_PREFIX) and operation in _OF_CLUSTER_ITSELF


def verdict(
    index: AclIndex,
    super_users: Set[str],
    principal: str,
    host: str,
    operation: Operation,
    resource_type: ResourceType,
    name: str,
    *,
    everyone_if_none: bool,
) -> Verdict:
    """Decide whether a principal at an address may do this, and say why. `everyone_if_none`: the broker's
    `allow.everyone.if.no.acl.found`."""
    if is_super_user(principal, super_users):
        return Verdict(True, Ground.SUPER_USER)
    if is_of_cluster(operation, resource_type, name):
        return Verdict(False, Ground.INTERNAL)
    decision = index.decide(principal, host, operation, resource_type, name)
    if decision.acl is not None:
        return Verdict(decision.allowed, Ground.ACL, decision.acl)
    if everyone_if_none and not index.has_acls(resource_type, name):
        return Verdict(True, Ground.NO_ACL_OPEN)
    return Verdict(False, Ground.NO_ACL)


def super_users_of(text: str) -> frozenset[str]:
    """Return the principals of `super.users`: `User:a;User:b`."""
    return frozenset(filter(None, map(str.strip, text.split(";"))))


def _granted(roles: Mapping[str, Role]) -> Mapping[str, tuple[str, ...]]:
    """Return the principals of the roles that each principal was granted."""
    granted: dict[str, tuple[str, ...]] = {}
    for name in sorted(roles):
        for principal in roles[name].principals:
            granted[principal] = (*granted.get(principal, ()), roles[name].principal)
    return granted


class _Edit:
    """Builds a changed index; it copies each part before it writes to it."""

    def __init__(self, held: dict[_Holder, _Patterns[_Hosts]], resources: dict[ResourceType, _Patterns[int]]) -> None:
        self._held = dict(held)
        self._resources = dict(resources)
        self._own_held: dict[_Holder, set[tuple[PatternType, str]]] = {}
        """The copied parts: holders, and the patterns of each."""
        self._own_resources: set[ResourceType] = set()

    def add(self, acl: Acl) -> None:
        hosts = self._hosts(acl)
        said = hosts.get(acl.host, _NONE)
        bit = 1 << acl.operation
        if acl.permission == WireAcl.ALLOW:
            hosts[acl.host] = _Operations(said.allowed | bit, said.denied)
        else:
            hosts[acl.host] = _Operations(said.allowed, said.denied | bit)
        counts = self._counts(acl)
        counts[acl.resource_name] = counts.get(acl.resource_name, 0) + 1

    def remove(self, acl: Acl) -> None:
        hosts = self._hosts(acl)
        said = hosts[acl.host]
        bit = 1 << acl.operation
        if acl.permission == WireAcl.ALLOW:
            assert said.allowed & bit, acl
            said = _Operations(said.allowed & ~bit, said.denied)
        else:
            assert said.denied & bit, acl
            said = _Operations(said.allowed, said.denied & ~bit)
        if said == _NONE:
            del hosts[acl.host]
        else:
            hosts[acl.host] = said
        counts = self._counts(acl)
        counts[acl.resource_name] -= 1
        if not counts[acl.resource_name]:
            del counts[acl.resource_name]

    def done(self) -> tuple[dict[_Holder, _Patterns[_Hosts]], dict[ResourceType, _Patterns[int]]]:
        """Return the new index; the edit must not be used any more."""
        for holder, written in self._own_held.items():
            patterns = self._held[holder]
            for pattern_type, name in written:
                named = patterns.of(pattern_type)
                if not named[name]:
                    del named[name]
            if patterns.literal or patterns.prefixed:
                patterns.lengths = _lengths(patterns.prefixed)
            else:
                del self._held[holder]
        for resource_type in self._own_resources:
            resources = self._resources[resource_type]
            resources.lengths = _lengths(resources.prefixed)
        return self._held, self._resources

    def _hosts(self, acl: Acl) -> _Hosts:
        """Return the writable hosts of one principal and pattern."""
        holder = acl.principal, acl.resource_type
        written = self._own_held.get(holder)
        if written is None:
            written = self._own_held[holder] = set()
            self._held[holder] = _Patterns(self._held.get(holder))
        named = self._held[holder].of(acl.pattern_type)
        place = acl.pattern_type, acl.resource_name
        if place not in written:
            written.add(place)
            named[acl.resource_name] = dict(named.get(acl.resource_name, ()))
        return named[acl.resource_name]

    def _counts(self, acl: Acl) -> dict[str, int]:
        """Return the writable numbers of ACLs by pattern."""
        if acl.resource_type not in self._own_resources:
            self._own_resources.add(acl.resource_type)
            self._resources[acl.resource_type] = _Patterns(self._resources.get(acl.resource_type))
        return self._resources[acl.resource_type].of(acl.pattern_type)


def _lengths(names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted(set(map(len, names))))


def _lowest(bits: int) -> Operation:
    """Return the first operation of a set."""
    return _OPERATION_OF[bits & -bits]


_OPERATION_OF: Final = {1 << number: number for number in _NAMED}


def _at(hosts: _Hosts | None, host: str) -> _Operations:
    """Return the operations for an address."""
    if hosts is None:
        return _NONE
    found = _NONE
    for where in _places_of(host):
        said = hosts.get(where)
        if said is not None:
            found = _Operations(found.allowed | said.allowed, found.denied | said.denied)
    return found
