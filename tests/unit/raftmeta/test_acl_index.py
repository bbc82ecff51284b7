"""Decisions on permissions: examples that read as rules, and decisions against Kafka's rules as they are written."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.security.acls import (
    CLUSTER_NAME,
    OPERATIONS,
    Acl,
    AclIndex,
    Decision,
    Operation,
    ResourceType,
    canonical_host,
    check_acl,
    field_order,
    matching,
)
from raftlog.errors import InvalidRequestError
from raftlog.v1.security_pb2 import Acl as WireAcl
from tests.support.metadata_security import acl

ALICE, BOB, HERE, THERE = "User:alice", "User:bob", "10.0.0.1", "10.0.0.2"
DENY, PREFIXED, LITERAL, MATCH = WireAcl.DENY, WireAcl.PREFIXED, WireAcl.LITERAL, WireAcl.MATCH
NOBODY = Decision(False, None)
EVERYTHING = Acl(WireAcl.ANY_RESOURCE, "", WireAcl.ANY_PATTERN, "", "", WireAcl.ANY_OPERATION, WireAcl.ANY_PERMISSION)


def may(index: AclIndex, operation: Operation = WireAcl.READ, name: str = "orders", who: str = ALICE) -> bool:
    return index.decide(who, HERE, operation, WireAcl.TOPIC, name).allowed


# Rules


def test_what_nobody_has_allowed_is_not_allowed() -> None:
    assert AclIndex().decide(ALICE, HERE, WireAcl.READ, WireAcl.TOPIC, "orders") == NOBODY
    index = AclIndex([acl("orders")])
    for who, operation, resource_type, name in (
        (BOB, WireAcl.READ, WireAcl.TOPIC, "orders"),
        (ALICE, WireAcl.WRITE, WireAcl.TOPIC, "orders"),
        (ALICE, WireAcl.READ, WireAcl.GROUP, "orders"),
        (ALICE, WireAcl.READ, WireAcl.TOPIC, "order"),
        (ALICE, WireAcl.READ, WireAcl.TOPIC, "orders2"),
    ):
        assert index.decide(who, HERE, operation, resource_type, name) == NOBODY


def test_a_decision_names_the_acl_that_made_it() -> None:
    allow, deny = acl("ord", pattern_type=PREFIXED), acl("*", principal="User:*", host=THERE, permission=DENY)
    index = AclIndex([allow, deny])
    assert index.decide(ALICE, HERE, WireAcl.READ, WireAcl.TOPIC, "orders") == Decision(True, allow)
    assert index.decide(ALICE, THERE, WireAcl.READ, WireAcl.TOPIC, "orders") == Decision(False, deny)


def test_a_denial_wins_wherever_it_stands() -> None:
    allow = acl("orders")
    for deny in (
        acl("orders", permission=DENY),
        acl("*", permission=DENY),
        acl("o", permission=DENY, pattern_type=PREFIXED),
        acl("orders", principal="User:*", permission=DENY),
        acl("orders", host=HERE, permission=DENY),
        acl("orders", WireAcl.ALL, permission=DENY),
    ):
        assert not may(AclIndex([allow, deny])), deny
    for other in (
        acl("orders", host=THERE, permission=DENY),
        acl("orders", WireAcl.WRITE, permission=DENY),
        acl("orders", principal=BOB, permission=DENY),
        acl("orders2", pattern_type=PREFIXED, permission=DENY),
    ):
        assert may(AclIndex([allow, other])), other


def test_a_prefix_is_of_whole_characters_and_holds_for_itself() -> None:
    index = AclIndex([acl("shop.ü", pattern_type=PREFIXED)])
    assert may(index, name="shop.ü")
    assert may(index, name="shop.übrig")
    assert not may(index, name="shop.")


def test_the_wildcard_is_one_of_literal_patterns_only() -> None:
    assert may(AclIndex([acl("*")]))
    assert not may(AclIndex([acl("*", pattern_type=PREFIXED)]))


@pytest.mark.parametrize("held", [WireAcl.READ, WireAcl.WRITE, WireAcl.DELETE, WireAcl.ALTER, WireAcl.ALL])
def test_who_may_do_something_may_see_it_but_a_denial_is_of_what_it_names(held: Operation) -> None:
    """KIP-11: READ, WRITE, DELETE and ALTER imply DESCRIBE."""
    assert may(AclIndex([acl(operation=held)]), WireAcl.DESCRIBE)
    denied = AclIndex([acl(operation=held, permission=DENY), acl(operation=WireAcl.DESCRIBE)])
    assert may(denied, WireAcl.DESCRIBE) == (held != WireAcl.ALL)


def test_other_operations_do_not_imply_any() -> None:
    """ALTER_CONFIGS implies DESCRIBE_CONFIGS; CREATE and DESCRIBE imply nothing."""
    assert may(AclIndex([acl(operation=WireAcl.ALTER_CONFIGS)]), WireAcl.DESCRIBE_CONFIGS)
    for held, asked in (
        (WireAcl.CREATE, WireAcl.DESCRIBE),
        (WireAcl.DESCRIBE, WireAcl.READ),
        (WireAcl.ALTER, WireAcl.DESCRIBE_CONFIGS),
        (WireAcl.ALTER_CONFIGS, WireAcl.DESCRIBE),
        (WireAcl.DESCRIBE_CONFIGS, WireAcl.ALTER_CONFIGS),
    ):
        assert not may(AclIndex([acl(operation=held)]), asked)


def test_whether_anything_is_said_about_a_resource() -> None:
    index = AclIndex([acl("a", principal=BOB), acl("b.", pattern_type=PREFIXED, permission=DENY)])
    assert [index.has_acls(WireAcl.TOPIC, name) for name in ("a", "b.c", "b.", "b", "c")] == [True] * 3 + [False] * 2
    assert not index.has_acls(WireAcl.GROUP, "a")
    assert AclIndex([acl("*")]).has_acls(WireAcl.TOPIC, "anything")


# Any resource of a type


def any_topic(*acls: Acl, everyone_if_none: bool = False) -> bool:
    return AclIndex(acls).may_any(ALICE, HERE, WireAcl.WRITE, WireAcl.TOPIC, everyone_if_none=everyone_if_none)


def write(name: str, pattern_type: WireAcl.PatternType.ValueType = LITERAL, **more: object) -> Acl:
    return acl(name, WireAcl.WRITE, pattern_type=pattern_type, **more)  # type: ignore[arg-type] # of acl's own types


def test_one_allowed_resource_is_enough() -> None:
    """KIP-679."""
    assert not any_topic()
    assert not any_topic(acl("a"))
    assert not any_topic(write("a", principal=BOB))
    assert not any_topic(write("a", host=THERE))
    for one in (write("a"), write("a", PREFIXED), write("*"), write("a", principal="User:*"), write("a", host=HERE)):
        assert any_topic(one), one


def test_denials_have_to_cover_all_that_is_allowed() -> None:
    """KIP-679: a literal is dominated by the same literal and by prefixes of it, a prefix by prefixes of it."""
    assert not any_topic(write("ab"), write("ab", permission=DENY))
    assert not any_topic(write("ab"), write("a", PREFIXED, permission=DENY))
    assert not any_topic(write("ab", PREFIXED), write("ab", PREFIXED, permission=DENY))
    assert not any_topic(write("ab", PREFIXED), write("a", PREFIXED, permission=DENY, principal="User:*"))
    assert not any_topic(write("*"), write("*", permission=DENY))
    assert not any_topic(write("a"), write("*", permission=DENY))
    assert any_topic(write("ab", PREFIXED), write("ab", permission=DENY))
    assert any_topic(write("ab", PREFIXED), write("abc", PREFIXED, permission=DENY))
    assert any_topic(write("*"), write("a", PREFIXED, permission=DENY))
    assert any_topic(write("ab"), write("ab", permission=DENY), write("b"))


def test_where_resources_without_acls_are_open_only_a_wildcard_closes_all() -> None:
    assert any_topic(everyone_if_none=True)
    assert any_topic(write("a", PREFIXED, permission=DENY), everyone_if_none=True)
    assert not any_topic(write("*", permission=DENY), everyone_if_none=True)
    assert not any_topic(write("*", principal=BOB), everyone_if_none=True)


def test_there_is_one_cluster() -> None:
    def idempotent(*acls: Acl, everyone_if_none: bool = False) -> bool:
        return AclIndex(acls).may_any(
            ALICE, HERE, WireAcl.IDEMPOTENT_WRITE, WireAcl.CLUSTER, everyone_if_none=everyone_if_none
        )

    allowed = acl(CLUSTER_NAME, WireAcl.IDEMPOTENT_WRITE, resource_type=WireAcl.CLUSTER)
    others = acl(CLUSTER_NAME, WireAcl.ALTER, BOB, resource_type=WireAcl.CLUSTER)
    assert idempotent(allowed)
    assert not idempotent()
    assert idempotent(everyone_if_none=True)
    assert not idempotent(others, everyone_if_none=True)


# Against Kafka's rules

IMPLIED = {
    WireAcl.DESCRIBE: {WireAcl.DESCRIBE, WireAcl.READ, WireAcl.WRITE, WireAcl.DELETE, WireAcl.ALTER},
    WireAcl.DESCRIBE_CONFIGS: {WireAcl.DESCRIBE_CONFIGS, WireAcl.ALTER_CONFIGS},
}


def is_about(each: Acl, resource_type: ResourceType, name: str) -> bool:
    if each.resource_type != resource_type:
        return False
    if each.pattern_type == PREFIXED:
        return name.startswith(each.resource_name)
    return each.resource_name in (name, "*")


def applies(each: Acl, who: str, host: str, operation: Operation) -> bool:
    """As Kafka's StandardAuthorizerData.findResult has it: "implied operations" are those of ALLOW only."""
    if each.principal not in (who, "User:*") or each.host not in (host, "*"):
        return False
    if each.operation in (operation, WireAcl.ALL):
        return True
    return each.permission != DENY and each.operation in IMPLIED.get(operation, ())


def plain_decision(
    acls: Iterable[Acl], who: str, host: str, operation: Operation, resource_type: ResourceType, name: str
) -> bool:
    said = [each for each in acls if is_about(each, resource_type, name) and applies(each, who, host, operation)]
    return bool(said) and all(each.permission != DENY for each in said)


def plainly_any(acls: Iterable[Acl], who: str, host: str, operation: Operation, resource_type: ResourceType) -> bool:
    """As the default of Kafka's Authorizer.authorizeByResourceType has it, with implied operations."""
    said = [each for each in acls if each.resource_type == resource_type and applies(each, who, host, operation)]
    denied = [each for each in said if each.permission == DENY]
    if any((each.resource_name, each.pattern_type) == ("*", LITERAL) for each in denied):
        return False
    for each in said:
        if each.permission == DENY:
            continue
        if (each.resource_name, each.pattern_type) == ("*", LITERAL):
            return True
        same = [d for d in denied if each.pattern_type == d.pattern_type == LITERAL]
        above = [d for d in denied if d.pattern_type == PREFIXED]
        if not any(d.resource_name == each.resource_name for d in same) and not any(
            each.resource_name.startswith(d.resource_name) for d in above
        ):
            return True
    return False


def plainly_selects(pattern: Acl, each: Acl) -> bool:
    """As Kafka's ResourcePatternFilter.matches and AccessControlEntryFilter.matches have it."""
    for wanted, there, anything in (
        (pattern.resource_type, each.resource_type, WireAcl.ANY_RESOURCE),
        (pattern.operation, each.operation, WireAcl.ANY_OPERATION),
        (pattern.permission, each.permission, WireAcl.ANY_PERMISSION),
    ):
        if wanted not in (anything, there):
            return False
    for text, present in ((pattern.principal, each.principal), (pattern.host, each.host)):
        if text not in ("", present):
            return False
    if pattern.pattern_type not in (WireAcl.ANY_PATTERN, MATCH, each.pattern_type):
        return False
    if not pattern.resource_name:
        return True
    if pattern.pattern_type == MATCH:
        return is_about(each, each.resource_type, pattern.resource_name)
    return pattern.resource_name == each.resource_name


_names = st.sampled_from(["a", "ab", "ab", "abc", "b"])
_operations = st.sampled_from(
    [WireAcl.READ, WireAcl.WRITE, WireAcl.DESCRIBE, WireAcl.ALTER_CONFIGS, WireAcl.DESCRIBE_CONFIGS]
)
_types = st.sampled_from([WireAcl.TOPIC, WireAcl.TOPIC, WireAcl.TOPIC, WireAcl.GROUP])
_acls = st.builds(
    lambda where, *rest: Acl(rest[0], where[0], where[1], *rest[1:]),
    st.one_of(
        st.tuples(st.one_of(_names, st.just("*")), st.just(LITERAL)),
        st.tuples(_names, st.just(PREFIXED)),
    ),
    _types,
    st.sampled_from([ALICE, ALICE, BOB, "User:*"]),
    st.sampled_from(["*", "*", HERE, THERE]),
    st.one_of(_operations, st.just(WireAcl.ALL)),
    st.sampled_from([WireAcl.ALLOW, WireAcl.ALLOW, DENY]),
)
_sets = st.frozensets(_acls, max_size=12)
_questions = st.tuples(st.sampled_from([ALICE, BOB, "User:*"]), st.sampled_from([HERE, THERE]), _operations, _types)


@given(_sets, st.lists(_sets, max_size=3), st.lists(st.tuples(_questions, _names), min_size=1, max_size=12))
def test_decisions_are_those_of_kafkas_rules(
    first: frozenset[Acl],
    later: list[frozenset[Acl]],
    questions: list[tuple[tuple[str, str, Operation, ResourceType], str]],
) -> None:
    """Also of an index that has come from another one, which stays as it was."""
    before = AclIndex(first)
    index = before
    for acls in later:
        index = index.changed_to(acls)
    for each, acls in ((index, later[-1] if later else first), (before, first)):
        for question, name in questions:
            decision = each.decide(*question, name)
            assert decision.allowed == plain_decision(acls, *question, name)
            if decision.acl is None:
                who, host, operation, resource_type = question
                assert not any(is_about(a, resource_type, name) and applies(a, who, host, operation) for a in acls)
            else:
                assert decision.acl in acls
                assert (decision.acl.permission == DENY) != decision.allowed
            assert each.has_acls(question[3], name) == any(is_about(a, question[3], name) for a in acls)
            assert each.may_any(*question) == plainly_any(acls, *question)
            if decision.allowed:
                assert each.may_any(*question), "what is allowed for one resource must count as allowed for any"


_patterns = st.builds(
    Acl,
    st.one_of(_types, st.just(WireAcl.ANY_RESOURCE)),
    st.one_of(_names, st.sampled_from(["", "*"])),
    st.sampled_from([WireAcl.ANY_PATTERN, MATCH, LITERAL, PREFIXED]),
    st.sampled_from(["", "", ALICE, "User:*"]),
    st.sampled_from(["", "", "*", HERE]),
    st.one_of(_operations, st.sampled_from([WireAcl.ANY_OPERATION, WireAcl.ALL])),
    st.sampled_from([WireAcl.ANY_PERMISSION, WireAcl.ALLOW, DENY]),
)


@given(_sets, st.one_of(_patterns, _acls))
def test_filters_select_what_kafkas_do(acls: frozenset[Acl], pattern: Acl) -> None:
    assert matching(acls, pattern) == sorted(each for each in acls if plainly_selects(pattern, each))
    assert matching(acls, EVERYTHING) == sorted(acls) == sorted(acls, key=field_order)


def test_a_filter_leaves_nothing_open() -> None:
    """A field that is not said may be one that a newer client did say; nothing is deleted on such a guess."""
    for changes in (
        {"resource_type": 0},
        {"pattern_type": 0},
        {"operation": 0},
        {"permission": 0},
        {"operation": 99},
        {"resource_type": 7},
    ):
        wire = EVERYTHING.to_wire()
        for field, value in changes.items():
            setattr(wire, field, value)
        with pytest.raises(InvalidRequestError, match="not known here"):
            matching({acl()}, Acl.from_wire(wire))


def test_a_filter_finds_a_host_however_it_is_written() -> None:
    one = acl(host="2001:db8::1")
    pattern = acl(host="2001:DB8:0::1")
    assert matching({one}, pattern) == [one]


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:DB8:0:0::1", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("*", "*"),
        ("", ""),
        ("host.example", "host.example"),
        ("10.0.0.01", "10.0.0.01"),
    ],
)
def test_addresses_are_written_in_one_way(written: str, canonical: str) -> None:
    assert canonical_host(written) == canonical
    assert canonical_host(canonical) == canonical


# As large as it gets

MANY = 10_000


def test_a_decision_takes_no_longer_among_ten_thousand_acls_than_among_a_few() -> None:
    def decide_s(index: AclIndex, count: int) -> float:
        numbers = [n % (count // 2) for n in range(200)]
        asked = [(ALICE, f"10.0.{n % 250}.1", WireAcl.READ, WireAcl.TOPIC, f"topic{n}") for n in numbers]
        begin_s = time.process_time()
        assert all(index.decide(*question).allowed for question in asked)
        return time.process_time() - begin_s

    took_s = dict[int, float]()
    for count in (20, MANY):
        users = [acl(f"team{n % 500}.", principal=f"User:u{n}", pattern_type=PREFIXED) for n in range(count // 2)]
        topics = [acl(f"topic{n}", host=f"10.0.{n % 250}.1") for n in range(count // 2)]
        index = AclIndex([*users, *topics])
        took_s[count] = min(decide_s(index, count) for _ in range(20))
    assert took_s[MANY] < 20 * took_s[20], (
        f"a decision with 500 times as many ACLs took {took_s[MANY] / took_s[20]:.0f} times as long"
    )


def test_a_change_leaves_what_it_does_not_touch_as_it_is() -> None:
    acls = frozenset(acl(f"topic{n}", principal=f"User:u{n}") for n in range(1_000))
    index = AclIndex(acls)
    assert index.changed_to(acls) is index
    changed = index.changed_to(acls - {acl("topic1", principal="User:u1")} | {acl("new", principal="User:u2")})
    same = [who for who in index._held if changed._held.get(who) is index._held[who]]
    assert len(same) == 998
    gone = changed.changed_to(frozenset())
    assert not gone._held
    assert not any(each.literal or each.prefixed for each in gone._resources.values())


def test_every_operation_goes_with_some_resource() -> None:
    named = {number for operations in OPERATIONS.values() for number in operations}
    assert named == {number for number in WireAcl.Operation.values() if number >= WireAcl.ALL}


# Networks


@pytest.mark.parametrize(
    ("network", "inside", "outside"),
    [
        ("10.0.0.0/8", "10.255.0.1", "11.0.0.1"),
        ("10.1.2.0/31", "10.1.2.1", "10.1.2.2"),
        ("0.0.0.0/0", "203.0.113.9", "2001:db8::1"),
        ("fd00::/8", "fdff::1", "fe00::1"),
        ("::/0", "2001:db8::1", "10.0.0.1"),
    ],
)
def test_an_acl_for_a_network_covers_its_addresses(network: str, inside: str, outside: str) -> None:
    allow = acl("orders", host=network)
    check_acl(allow)
    index = AclIndex([allow])
    assert index.decide(ALICE, inside, WireAcl.READ, WireAcl.TOPIC, "orders") == Decision(True, allow)
    assert index.decide(ALICE, outside, WireAcl.READ, WireAcl.TOPIC, "orders") == NOBODY
    assert index.may_any(ALICE, inside, WireAcl.READ, WireAcl.TOPIC)
    assert not index.may_any(ALICE, outside, WireAcl.READ, WireAcl.TOPIC)
    assert index.decide(ALICE, "unknown", WireAcl.READ, WireAcl.TOPIC, "orders") == NOBODY
    assert (
        AclIndex([allow]).changed_to(frozenset()).decide(ALICE, inside, WireAcl.READ, WireAcl.TOPIC, "orders") == NOBODY
    )


def test_a_denial_of_a_network_wins_whether_it_is_wider_or_narrower() -> None:
    for allowed, denied in (("10.0.0.0/8", "10.0.0.0/24"), ("10.0.0.0/24", "10.0.0.0/8"), (HERE, "10.0.0.0/8")):
        deny = acl("orders", host=denied, permission=DENY)
        index = AclIndex([acl("orders", host=allowed), deny])
        assert index.decide(ALICE, HERE, WireAcl.READ, WireAcl.TOPIC, "orders") == Decision(False, deny)
        assert not AclIndex([acl("*", host=allowed), acl("*", host=denied, permission=DENY)]).may_any(
            ALICE, HERE, WireAcl.READ, WireAcl.TOPIC
        )


def test_networks_have_one_spelling() -> None:
    assert canonical_host("10.0.0.0/8") == canonical_host("10.0.0.0/255.0.0.0") == "10.0.0.0/8"
    assert canonical_host("FD00:0::/8") == "fd00::/8"
    assert canonical_host("10.0.0.1/32") == "10.0.0.1"
    assert canonical_host("::1/128") == "::1"
    for wrong in ("10.0.0.1/8", "10.0.0.0/33", "10.0.0.0/", "/8", "a/8", "::ffff:10.0.0.0/104", "::ffff:10.0.0.1/128"):
        with pytest.raises(InvalidRequestError, match="the host of an ACL"):
            check_acl(acl("orders", host=wrong).canonical())
