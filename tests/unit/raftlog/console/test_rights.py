"""What the console says of who may do what: as the brokers' authorizer decides, with the rule."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from broker.security.authorizer import AclAuthorizer
from raftlog._core.descriptions import ConfigDescription
from raftlog._core.security.acls import Role as BrokersRole
from raftlog.console.rights import Rights, acl_of, host_of, operations_of, principal_of
from raftlog.security import CLUSTER_NAME, AclBinding, AclOperation, AclPermission, PatternType, ResourceType, Role

ALLOW, DENY = AclPermission.ALLOW, AclPermission.DENY
LITERAL, PREFIXED = PatternType.LITERAL, PatternType.PREFIXED
TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
ACLS = [
    AclBinding("User:ada", AclOperation.READ, TOPIC, "orders"),
    AclBinding("User:ada", AclOperation.ALL, TOPIC, "own-", PREFIXED),
    AclBinding("User:ada", AclOperation.DELETE, TOPIC, "own-log", LITERAL, DENY),
    AclBinding("User:*", AclOperation.DESCRIBE, TOPIC, "*"),
    AclBinding("User:bob", AclOperation.WRITE, TOPIC, "orders", host="10.0.0.0/8"),
    AclBinding("User:bob", AclOperation.ALL, TOPIC, "*"),
    AclBinding("User:*", AclOperation.ALTER, CLUSTER, CLUSTER_NAME, LITERAL, DENY),
]
ROLES = [
    Role("reader", (AclBinding("Role:reader", AclOperation.READ, GROUP, "*"),), ("User:ada", "User:carl")),
    Role("locked", (AclBinding("Role:locked", AclOperation.WRITE, TOPIC, "own-", PREFIXED, DENY),), ("User:ada",)),
]
WHO = ("User:ada", "User:bob", "User:carl", "User:boss", "User:nobody", "User:*", "Node:1")
WHAT = [(TOPIC, name) for name in ("orders", "own-log", "own-x", "other", "__consumer_offsets")] + [
    (GROUP, "billing"),
    (CLUSTER, CLUSTER_NAME),
    (ResourceType.TRANSACTIONAL_ID, "transfers"),
]


def rights_of(authorizer: str = "acl", everyone: str = "false") -> Rights:
    configs = {"authorizer": authorizer, "super.users": "User:boss;User:root"}
    configs["allow.everyone.if.no.acl.found"] = everyone
    described = {key: ConfigDescription(key, value, "static_broker", True, "") for key, value in configs.items()}
    return Rights.of(["dora"], ACLS, ROLES, described)


@pytest.mark.parametrize("everyone", [True, False])
def test_the_console_says_what_the_authorizer_decides(everyone: bool) -> None:
    roles = {
        each.name: BrokersRole(each.name, frozenset(map(acl_of, each.permissions)), frozenset(each.principals))
        for each in ROLES
    }
    image: Any = SimpleNamespace(acls=frozenset(map(acl_of, ACLS)), roles=roles)
    audit: Any = None  # nothing is logged
    decides = AclAuthorizer(lambda: image, frozenset({"User:boss", "User:root"}), audit, everyone_if_none=everyone)
    shown = rights_of(everyone=str(everyone).lower())
    allowed = set()
    for who, (kind, name), host in product(WHO, WHAT, ("", "10.1.2.3", "192.168.0.1")):
        for right in shown.rights(who, host, kind, name):
            operation: Any = right.operation.value
            resource: Any = kind.value
            assert right.allowed is decides.may(who, host, operation, resource, name, log=False), (who, name, right)
            allowed.add(right.allowed)
    assert allowed == {True, False}


@pytest.mark.parametrize(
    ("who", "operation", "name", "allowed", "rule"),
    [
        ("User:ada", "READ", "orders", True, "ACL of User:ada: allows read on orders"),
        ("User:ada", "DESCRIBE", "orders", True, "ACL of User:ada: allows read on orders"),
        ("User:ada", "ALTER", "own-x", True, "ACL of User:ada: allows all on names that begin with own-"),
        ("User:ada", "DELETE", "own-log", False, "ACL of User:ada: denies delete on own-log"),
        ("User:ada", "WRITE", "own-x", False, "role locked: denies write on names that begin with own-"),
        ("User:carl", "DESCRIBE", "x", True, "ACL of User:*: allows describe on every name"),
        ("User:carl", "READ", "x", False, "no ACL or role allows it"),
        ("User:boss", "DELETE", "__audit", True, "super user"),
        ("User:bob", "WRITE", "__audit", False, "internal topic, for super users only"),
    ],
)
def test_the_rule_is_told(who: str, operation: str, name: str, allowed: bool, rule: str) -> None:
    (found,) = [each for each in rights_of().rights(who, "", TOPIC, name) if each.operation.name == operation]
    assert (found.allowed, found.rule) == (allowed, rule)


def test_without_an_authorizer_everything_is_allowed() -> None:
    shown = rights_of("none").rights("User:nobody", "", TOPIC, "orders")
    assert {(each.allowed, each.rule) for each in shown} == {(True, "open: brokers have no authorizer")}


def test_principals_are_those_that_are_named_anywhere() -> None:
    found = rights_of()
    assert found.principals == ("User:ada", "User:bob", "User:boss", "User:carl", "User:dora", "User:root", "User:*")
    assert found.roles["User:ada"] == ("reader", "locked")
    assert (found.names("User:ada"), found.names("User:zoe"), found.names("User:ANONYMOUS")) == (True, False, True)


def test_what_a_person_types_becomes_a_principal_and_an_address() -> None:
    assert [principal_of(each) for each in (" ada ", "User:ada", "")] == ["User:ada", "User:ada", ""]
    assert (host_of(" ::ffff:10.0.0.1 "), host_of("")) == ("10.0.0.1", "")
    assert AclOperation.ALL not in operations_of(TOPIC)
