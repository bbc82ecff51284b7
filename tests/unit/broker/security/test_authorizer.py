"""Decisions as ACLs say, remembered until one changes; refusals that say what to do, and a bounded audit log."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial

import pytest

from broker.security.audit import BURST_LINES, LINES_PER_S, MAX_SHOWN, REPEAT_MS, Audit
from broker.security.authorizer import AclAuthorizer
from broker.security.caller import Caller, Decisions, authorized_operations
from raftlog._core.security.acls import CLUSTER_NAME, Acl, Role
from raftlog.errors import (
    ClusterAuthorizationFailed,
    GroupAuthorizationFailed,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
)
from raftlog.v1.security_pb2 import Acl as Wire
from raftmeta.image import MetadataImage
from tests.support.scram_parts import Hands

ALICE = "User:alice"


def acl(principal: str, operation: Wire.Operation.ValueType, topic: str, host: str = "*", *, deny: bool = False) -> Acl:
    permission = Wire.DENY if deny else Wire.ALLOW
    return Acl(Wire.TOPIC, topic, Wire.LITERAL, principal, host, operation, permission)


class World:
    def __init__(self, *acls: Acl, everyone: bool = False) -> None:
        self.image = MetadataImage(acls=frozenset(acls))
        self.clock = Hands()
        self.refusals: Counter[str] = Counter()
        self.authorizer = AclAuthorizer(
            lambda: self.image,
            frozenset({"User:root"}),
            Audit(self.clock),
            everyone_if_none=everyone,
            refusals=self.refusals,
        )

    def set(self, *acls: Acl) -> None:
        self.image = MetadataImage(acls=frozenset(acls))

    def may(self, principal: str, operation: Wire.Operation.ValueType, topic: str, host: str = "10.0.0.1") -> bool:
        return self.authorizer.may(principal, host, operation, Wire.TOPIC, topic)


def test_what_an_acl_allows_is_allowed_and_nothing_else() -> None:
    world = World(acl(ALICE, Wire.WRITE, "orders", "10.0.0.1"))
    assert world.may(ALICE, Wire.WRITE, "orders")
    assert world.may(ALICE, Wire.DESCRIBE, "orders"), "Write on a topic must include Describe"
    assert not world.may(ALICE, Wire.READ, "orders")
    assert not world.may(ALICE, Wire.WRITE, "others")
    assert not world.may(ALICE, Wire.WRITE, "orders", "10.0.0.2")
    assert not world.may("User:bob", Wire.WRITE, "orders")
    assert world.refusals == {"READ": 1, "WRITE": 3}
    assert world.authorizer.may_any(ALICE, "10.0.0.1", Wire.WRITE, Wire.TOPIC)
    assert not world.authorizer.may_any("User:bob", "10.0.0.1", Wire.WRITE, Wire.TOPIC)


def test_decisions_are_remembered_until_an_acl_changes() -> None:
    world = World(acl(ALICE, Wire.WRITE, "orders"))
    before = world.authorizer.version
    assert world.may(ALICE, Wire.WRITE, "orders")
    world.image = MetadataImage(offset=9, acls=world.image.acls)
    assert world.authorizer.version == before, "the version must stay, as no ACL has changed"
    world.set(acl(ALICE, Wire.WRITE, "orders"), acl(ALICE, Wire.WRITE, "orders", deny=True))
    assert not world.may(ALICE, Wire.WRITE, "orders")
    assert world.authorizer.version != before
    world.set()
    assert not world.may(ALICE, Wire.WRITE, "orders")
    world.set(acl(ALICE, Wire.WRITE, "orders"))
    assert world.may(ALICE, Wire.WRITE, "orders")


def test_roles_are_followed_as_acls_are() -> None:
    world = World()
    before = world.authorizer.version
    assert not world.may(ALICE, Wire.WRITE, "orders")
    clerk = Role("clerk", frozenset({acl("Role:clerk", Wire.WRITE, "orders")}), frozenset({ALICE}))
    world.image = MetadataImage(roles={"clerk": clerk})
    assert world.may(ALICE, Wire.WRITE, "orders")
    assert world.authorizer.version != before
    assert world.authorizer.may_any(ALICE, "10.0.0.1", Wire.WRITE, Wire.TOPIC)
    assert not world.may("User:clerk", Wire.WRITE, "orders")
    world.image = MetadataImage(roles={"clerk": Role("clerk", clerk.permissions)})
    assert not world.may(ALICE, Wire.WRITE, "orders"), "alice must lose the permission, as the role was deleted"


def test_a_refusal_by_a_role_names_it_and_what_lifts_it() -> None:
    world = World(acl(ALICE, Wire.WRITE, "orders"))
    denial = acl("Role:no writers", Wire.WRITE, "orders", "10.0.0.1", deny=True)
    world.image = MetadataImage(
        acls=world.image.acls, roles={"no writers": Role("no writers", frozenset({denial}), frozenset({"User:*"}))}
    )
    with pytest.raises(TopicAuthorizationFailed) as caught:
        Caller(ALICE, "10.0.0.1", world.authorizer).check(Wire.WRITE, Wire.TOPIC, "orders")
    assert str(caught.value) == (
        "User:alice may not WRITE to topic 'orders'; role 'no writers' denies it: "
        "raftlog acl list --topic orders --resource-pattern-type match; "
        "raftlog role remove 'no writers' --deny --host 10.0.0.1 --operation Write --topic orders"
    )


@pytest.mark.parametrize("principal", ["User:root", "Node:1", "Node:1,2"])
def test_super_users_and_nodes_may_do_everything(principal: str) -> None:
    world = World(acl("User:*", Wire.ALL, "*", deny=True))
    assert world.may(principal, Wire.WRITE, "orders")
    assert world.may(principal, Wire.WRITE, "__consumer_offsets")
    assert world.authorizer.may_any(principal, "h", Wire.WRITE, Wire.TOPIC)
    assert not world.may("User:Node:1", Wire.WRITE, "orders"), (
        "a user whose name looks like that of a node must not count as a node"
    )


def test_the_clusters_own_topics_are_for_super_users() -> None:
    world = World(acl("User:*", Wire.ALL, "*"), everyone=True)
    assert world.may(ALICE, Wire.WRITE, "orders")
    assert world.may(ALICE, Wire.DESCRIBE, "__consumer_offsets")
    for operation in (Wire.READ, Wire.WRITE, Wire.DELETE, Wire.ALTER, Wire.ALTER_CONFIGS):
        assert not world.may(ALICE, operation, "__consumer_offsets")
    said = str(world.authorizer.refusal(ALICE, Wire.READ, Wire.TOPIC, "__consumer_offsets"))
    assert "the topic is internal, and only super users may" in said
    assert "raftlog acl add" not in said


def test_everyone_may_what_no_acl_is_about_if_that_is_set() -> None:
    world = World(acl(ALICE, Wire.WRITE, "orders"), everyone=True)
    assert world.may("User:bob", Wire.WRITE, "others")
    assert not world.may("User:bob", Wire.WRITE, "orders")
    assert not world.may(ALICE, Wire.READ, "orders")
    assert world.authorizer.may_any("User:bob", "h", Wire.WRITE, Wire.TOPIC)
    assert not World(acl(ALICE, Wire.WRITE, "orders")).may("User:bob", Wire.WRITE, "others")


@pytest.mark.parametrize(
    ("resource", "name", "operation", "error", "words"),
    [
        (
            Wire.TOPIC,
            "orders",
            Wire.WRITE,
            TopicAuthorizationFailed,
            "User:alice may not WRITE to topic 'orders'; "
            "raftlog acl add --allow-principal User:alice --operation Write --topic orders",
        ),
        (
            Wire.TOPIC,
            "orders",
            Wire.DESCRIBE,
            TopicAuthorizationFailed,
            "User:alice may not DESCRIBE topic 'orders'; "
            "raftlog acl add --allow-principal User:alice --operation Describe --topic orders; "
            "to consume or produce, add Read or Write instead, which imply Describe",
        ),
        (
            Wire.GROUP,
            "my group",
            Wire.READ,
            GroupAuthorizationFailed,
            "User:alice may not READ group 'my group'; "
            "raftlog acl add --allow-principal User:alice --operation Read --group 'my group'",
        ),
        (
            Wire.GROUP,
            "g",
            Wire.DESCRIBE,
            GroupAuthorizationFailed,
            "User:alice may not DESCRIBE group 'g'; "
            "raftlog acl add --allow-principal User:alice --operation Read --group g; "
            "Describe is enough for commands that only show the group",
        ),
        (
            Wire.TRANSACTIONAL_ID,
            "it's",
            Wire.DESCRIBE,
            TransactionalIdAuthorizationFailed,
            'User:alice may not DESCRIBE transactional id "it\'s"; '
            "raftlog acl add --allow-principal User:alice --operation Describe --transactional-id 'it'\"'\"'s'; "
            "to produce with it, add Write instead, which implies Describe",
        ),
        (
            Wire.CLUSTER,
            CLUSTER_NAME,
            Wire.IDEMPOTENT_WRITE,
            ClusterAuthorizationFailed,
            "User:alice may not IDEMPOTENT_WRITE the cluster; "
            "a producer needs Write on a topic: "
            "raftlog acl add --allow-principal User:alice --operation Write --topic TOPIC",
        ),
    ],
)
def test_a_refusal_says_what_would_allow_it(
    resource: Wire.ResourceType.ValueType,
    name: str,
    operation: Wire.Operation.ValueType,
    error: type[Exception],
    words: str,
) -> None:
    caller = Caller(ALICE, "10.0.0.1", World().authorizer)
    with pytest.raises(error) as caught:
        caller.check(operation, resource, name)
    assert str(caught.value) == words


def test_a_refusal_quotes_a_name_once() -> None:
    refusal = World().authorizer.refusal(ALICE, Wire.WRITE, Wire.TOPIC, "a\tit's")
    assert str(refusal) == (
        'User:alice may not WRITE to topic "a\\tit\'s"; '
        "raftlog acl add --allow-principal User:alice --operation Write --topic $'a\\tit\\'s'"
    )


@pytest.mark.parametrize(
    ("denial", "from_host", "remedy"),
    [
        (
            acl(ALICE, Wire.WRITE, "orders", deny=True),
            "10.0.0.1",
            "raftlog acl remove --deny-principal User:alice --operation Write --topic orders",
        ),
        (
            Acl(Wire.TOPIC, "or", Wire.PREFIXED, "User:*", "10.0.0.9", Wire.ALL, Wire.DENY),
            "10.0.0.9",
            "raftlog acl remove --deny-principal 'User:*' --deny-host 10.0.0.9 --operation All --topic or "
            "--resource-pattern-type prefixed",
        ),
    ],
)
def test_a_denial_is_not_lifted_by_allowing_more(denial: Acl, from_host: str, remedy: str) -> None:
    authorizer = World(acl(ALICE, Wire.WRITE, "orders"), denial).authorizer
    caller = Caller(ALICE, from_host, authorizer)
    decisions = Decisions.of(caller, Wire.WRITE, Wire.TOPIC)
    assert decisions is not None
    for refused in (partial(caller.check, Wire.WRITE, Wire.TOPIC, "orders"), partial(decisions.check, "orders")):
        with pytest.raises(TopicAuthorizationFailed) as caught:
            refused()
        assert str(caught.value) == (
            "User:alice may not WRITE to topic 'orders'; an ACL denies it: "
            f"raftlog acl list --topic orders --resource-pattern-type match; {remedy}"
        )


def test_a_producer_without_any_topic_is_told_of_write_or_of_what_denies_it() -> None:
    authorizer = World(acl("User:*", Wire.WRITE, "*", deny=True)).authorizer
    said = str(authorizer.refusal(ALICE, Wire.IDEMPOTENT_WRITE, Wire.CLUSTER, CLUSTER_NAME, "10.0.0.1"))
    assert "raftlog acl remove --deny-principal 'User:*' --operation Write --topic '*'" in said
    assert "acl add" not in said


def test_a_denial_from_elsewhere_is_not_what_is_in_the_way() -> None:
    authorizer = World(acl(ALICE, Wire.WRITE, "orders", "10.0.0.9", deny=True)).authorizer
    with pytest.raises(TopicAuthorizationFailed, match="raftlog acl add --allow-principal User:alice"):
        Caller(ALICE, "10.0.0.1", authorizer).check(Wire.WRITE, Wire.TOPIC, "orders")


def test_of_the_clusters_own_topics_it_is_said_at_once_that_seeing_them_is_all() -> None:
    said = str(World().authorizer.refusal(ALICE, Wire.DESCRIBE, Wire.TOPIC, "__consumer_offsets"))
    assert "only super users may read or change it; to describe it: raftlog acl add" in said


def test_long_and_strange_names_are_cut() -> None:
    authorizer = World().authorizer
    assert len(str(authorizer.refusal(ALICE, Wire.READ, Wire.TOPIC, "x" * 100_000))) < 1_000
    assert "\n" not in str(authorizer.refusal(ALICE, Wire.READ, Wire.GROUP, "a\nb"))


# The audit log


def _lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "raftlog.audit"]


def test_refusals_are_written_with_who_and_what(caplog: pytest.LogCaptureFixture) -> None:
    world = World(acl(ALICE, Wire.READ, "orders"))
    with caplog.at_level(logging.INFO):
        world.may(ALICE, Wire.WRITE, "orders")
        world.may(ALICE, Wire.READ, "orders")
        world.authorizer.may(ALICE, "h", Wire.DELETE, Wire.TOPIC, "orders", log=False)
    (line,) = _lines(caplog)
    said = vars(line)
    assert {key: said[key] for key in ("principal", "host", "operation", "resource_type", "resource", "allowed")} == {
        "principal": ALICE,
        "host": "10.0.0.1",
        "operation": "WRITE",
        "resource_type": "TOPIC",
        "resource": "orders",
        "allowed": False,
    }
    assert world.refusals == {"WRITE": 1}
    with caplog.at_level(logging.DEBUG, "raftlog.audit"):
        world.may(ALICE, Wire.READ, "orders")
    assert [vars(each)["allowed"] for each in _lines(caplog)] == [False, True]


def test_the_same_refusal_has_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.INFO):
        for _ in range(1_000):
            world.may(ALICE, Wire.WRITE, "orders")
        assert len(_lines(caplog)) == 1
        world.clock.ms += REPEAT_MS
        world.may(ALICE, Wire.WRITE, "orders")
    assert [vars(each).get("repeated") for each in _lines(caplog)] == [None, 999]
    assert world.refusals == {"WRITE": 1_001}, "each refusal must be counted, also without a line in the log"


def test_many_refusals_cannot_fill_a_disk(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.INFO):
        for number in range(5_000):
            world.may(ALICE, Wire.WRITE, f"{number:05}" + "x" * 100_000)
        assert len(_lines(caplog)) == BURST_LINES
        world.clock.ms += 1_000
        for number in range(5_000):
            world.may(ALICE, Wire.READ, f"{number:05}")
    lines = _lines(caplog)
    assert len(lines) == BURST_LINES + LINES_PER_S
    assert [vars(each).get("left_out") for each in lines if hasattr(each, "left_out")] == [5_000 - BURST_LINES]
    assert all(len(vars(each)["resource"]) <= MAX_SHOWN for each in lines)


def test_the_operations_that_a_caller_may_do_have_kafkas_bits() -> None:
    """KIP-430. Numbers: READ 3, WRITE 4, CREATE 5, DELETE 6, ALTER 7, DESCRIBE 8, two for configs 10 and 11."""
    world = World(acl(ALICE, Wire.WRITE, "orders"), acl(ALICE, Wire.DESCRIBE, "orders", deny=True))
    alice = Caller(ALICE, "10.0.0.1", world.authorizer)
    assert authorized_operations(alice, Wire.TOPIC, "orders") == 1 << 4
    assert authorized_operations(alice, Wire.TOPIC, "others") == 0
    world.set(acl(ALICE, Wire.READ, "orders"))
    assert authorized_operations(alice, Wire.TOPIC, "orders") == 1 << 3 | 1 << 8, (
        "Read on a topic must include Describe"
    )
    assert world.refusals == Counter(), "a question about permissions must not count as a refusal"
    root = Caller("User:root", "10.0.0.1", world.authorizer)
    for everything in (root, Caller()):
        assert authorized_operations(everything, Wire.TOPIC, "orders") == 0b1101_1111_1000
        assert authorized_operations(everything, Wire.GROUP, "readers") == 1 << 3 | 1 << 6 | 1 << 8
        assert authorized_operations(everything, Wire.CLUSTER, CLUSTER_NAME) == 0b1_1111_1010_0000
        assert authorized_operations(everything, Wire.TRANSACTIONAL_ID, "sink") == 1 << 4 | 1 << 8


@pytest.mark.parametrize(
    ("principal", "user"),
    [("User:alice", "User:alice"), ("User:ANONYMOUS", ""), ("Node:1", ""), ("User:CN=a", "User:CN=a")],
)
def test_bounds_are_of_users_and_neither_of_nodes_nor_of_clients_without_a_login(principal: str, user: str) -> None:
    assert Caller(principal).user == user
