"""Which ACLs a filter selects, to be described or deleted (KIP-140, KIP-290). Pure."""

from __future__ import annotations

from collections.abc import Set

from raftlog.errors import InvalidRequestError
from raftlog.v1.security_pb2 import Acl as WireAcl
from raftmeta.acls import WILDCARD, Acl, field_order


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
    """Whether a filter can select at most the ACL that it is itself."""
    return (
        bool(pattern.resource_name and pattern.principal and pattern.host)
        and pattern.resource_type != WireAcl.ANY_RESOURCE
        and pattern.pattern_type in (WireAcl.LITERAL, WireAcl.PREFIXED)
        and pattern.operation != WireAcl.ANY_OPERATION
        and pattern.permission != WireAcl.ANY_PERMISSION
    )


def check_filter(pattern: Acl) -> None:
    """Check that a filter says for each field what it may be, or that it may be anything.

    Raises:
        InvalidRequestError: it leaves a field open, or has a value that this version does not know. It may come from
            a newer client, so nobody knows what it was to select.
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
