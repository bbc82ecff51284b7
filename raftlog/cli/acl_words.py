"""Permissions in words: as options and files spell them, and as people read them. Pure."""

from __future__ import annotations

import difflib
import enum
import ipaddress
from collections.abc import Iterable
from typing import Final, TypeVar

from raftlog.cli.output import Row
from raftlog.security import (
    CLUSTER_NAME,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermission,
    PatternType,
    ResourceType,
)

COLUMNS: Final = ("principal", "permission", "operation", "resource_type", "resource_name", "pattern_type", "host")
WILDCARD: Final = "*"
LONGEST_NAME: Final = 255
"""Characters that the name of a resource or a user has."""
_PREFIX: Final = "User:"

OPERATIONS: Final = {
    ResourceType.TOPIC: (
        AclOperation.READ,
        AclOperation.WRITE,
        AclOperation.CREATE,
        AclOperation.DESCRIBE,
        AclOperation.DELETE,
        AclOperation.ALTER,
        AclOperation.DESCRIBE_CONFIGS,
        AclOperation.ALTER_CONFIGS,
    ),
    ResourceType.GROUP: (AclOperation.READ, AclOperation.DESCRIBE, AclOperation.DELETE),
    ResourceType.CLUSTER: (
        AclOperation.CREATE,
        AclOperation.CLUSTER_ACTION,
        AclOperation.DESCRIBE_CONFIGS,
        AclOperation.ALTER_CONFIGS,
        AclOperation.IDEMPOTENT_WRITE,
        AclOperation.ALTER,
        AclOperation.DESCRIBE,
    ),
    ResourceType.TRANSACTIONAL_ID: (AclOperation.DESCRIBE, AclOperation.WRITE),
}
"""What can be done with each kind of resource, besides ALL (Kafka's AclEntry.supportedOperations)."""

E = TypeVar("E", bound=enum.IntEnum)


def word(value: enum.IntEnum) -> str:
    """Return a value as people write it: Read, DescribeConfigs; transactional-id, literal, allow."""
    if isinstance(value, AclOperation):
        return "".join(part.capitalize() for part in value.name.split("_"))
    return value.name.lower().replace("_", "-")


def parse(kind: type[E], text: str, allowed: Iterable[E]) -> E:
    """Return what a word stands for; case, dashes and underscores do not matter.

    Raises:
        ValueError: none that is allowed; says which are.
    """
    known = {_plain(each.name): each for each in allowed}
    found = known.get(_plain(text))
    if found is None:
        close = difflib.get_close_matches(_plain(text), known, n=1)
        guess = f"did you mean {word(known[close[0]])}? " if close else ""
        raise ValueError(f"{text!r}: {guess}there are {', '.join(map(word, known.values()))}")
    return found


def operation(text: str, resource_type: ResourceType | None = None) -> AclOperation:
    """Return an operation that there is, with that kind of resource.

    Raises:
        ValueError: there is none.
    """
    every = [each for each in AclOperation if each is not AclOperation.ANY]
    found = parse(AclOperation, text, every)
    if resource_type is not None:
        check_operation(found, resource_type)
    return found


def check_operation(wanted: AclOperation, resource_type: ResourceType) -> None:
    """Check that a kind of resource has an operation.

    Raises:
        ValueError: it has not; says which it has.
    """
    there = (AclOperation.ALL, *OPERATIONS[resource_type])
    if wanted not in there:
        raise ValueError(f"a {word(resource_type)} has no {word(wanted)}; it has {', '.join(map(word, there))}")


def principal(text: str) -> str:
    """Return a principal.

    Raises:
        ValueError: it does not say User:NAME.
    """
    if not text.startswith(_PREFIX) or text == _PREFIX:
        raise ValueError(f"{text!r}: write User:NAME, or User:* for everybody")
    if not text.isprintable():
        raise ValueError(f"{text!a}: a name has no control characters")
    return text


def resource_name(text: str, pattern: PatternType) -> str:
    """Return the name of a resource, or what it begins with.

    Raises:
        ValueError: it cannot be one.
    """
    if not 1 <= len(text) <= LONGEST_NAME:
        raise ValueError(f"it has {len(text)} characters; a name has 1 to {LONGEST_NAME}, and * is every one")
    if text == WILDCARD and pattern is PatternType.PREFIXED:
        raise ValueError("* is every one, and literal; a prefix is written without it")
    return text


def host(text: str) -> str:
    """Return an address in the form in which brokers compare it, or `*`: IPv4 within IPv6 as IPv4, without a zone.

    Raises:
        ValueError: a name; brokers know callers by their addresses.
    """
    if text == WILDCARD:
        return text
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        raise ValueError(f"{text!r}: write an IP address, or * for every one; names are not looked up") from None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def row(acl: AclBinding) -> Row:
    """Return a permission as lists have it."""
    return {
        "principal": acl.principal,
        "permission": word(acl.permission),
        "operation": word(acl.operation),
        "resource_type": word(acl.resource_type),
        "resource_name": acl.resource_name,
        "pattern_type": word(acl.pattern_type),
        "host": acl.host,
    }


def sentence(acl: AclBinding) -> str:
    """Return a permission in a sentence: User:orders may Write topic orders."""
    allowed = acl.permission is AclPermission.ALLOW
    what = word(acl.operation)
    if acl.operation is AclOperation.ALL:
        what = f"do {'everything' if allowed else 'anything'} with"
    where = "" if acl.host == WILDCARD else f" from {acl.host}"
    return f"{acl.principal} may {'' if allowed else 'not '}{what} {_resource(acl)}{where}"


def exactly(acl: AclBinding) -> AclFilter:
    """Return the filter that means this permission and no other."""
    return AclFilter(
        acl.principal,
        acl.operation,
        acl.resource_type,
        acl.resource_name,
        acl.pattern_type,
        acl.permission,
        acl.host,
    )


def in_order(acls: Iterable[AclBinding]) -> list[AclBinding]:
    """Return permissions by resource, then principal; what is denied first."""
    return sorted(
        set(acls),
        key=lambda acl: (
            acl.resource_type,
            acl.resource_name,
            acl.pattern_type,
            acl.principal,
            acl.permission,
            acl.operation,
            acl.host,
        ),
    )


def _resource(acl: AclBinding) -> str:
    if acl.resource_type is ResourceType.CLUSTER and acl.resource_name == CLUSTER_NAME:
        return "the cluster"
    kind = word(acl.resource_type).replace("-", " ")
    if acl.pattern_type is PatternType.PREFIXED:
        return f"every {kind} that begins with {acl.resource_name}"
    return f"every {kind}" if acl.resource_name == WILDCARD else f"{kind} {acl.resource_name}"


def _plain(text: str) -> str:
    return text.replace("_", "").replace("-", "").lower()
