"""Roles: what changes them, what is refused, and that a principal may do what its ACLs and its roles allow together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog._core.security.acls import ROLE_PARTS_PER_RECORD, Acl, AclIndex, Decision, Role
from raftlog.errors import DuplicateResource, InvalidRequestError, ResourceNotFound, UnsupportedVersion
from raftlog.v1.security_pb2 import Acl as WireAcl
from raftlog.v1.security_pb2 import RoleAlteration
from raftmeta.decide import CommandResult, decide, security
from raftmeta.replay import image_from_records
from tests.support.metadata import accept, claim, image_after, refusal, register, update_feature
from tests.support.metadata_security import acl, alter_acls, alter_roles, role
from tests.unit.raftmeta.test_acl_index import DENY, HERE, PREFIXED, plain_decision, plainly_any

EMPTY = image_after(claim(newest=True))
CREATE, DELETE = RoleAlteration.CREATE, RoleAlteration.DELETE
ALICE, BOB = "User:alice", "User:bob"


def held(*acls: Acl, by: str = "clerk") -> frozenset[Acl]:
    return frozenset(replace(each, principal=f"Role:{by}") for each in acls)


CLERK, _ = accept(EMPTY, alter_roles(role(action=CREATE, add=[acl("a"), acl("b")], grant=[ALICE])))


def test_a_role_is_made_changed_and_deleted() -> None:
    assert CLERK.roles == {"clerk": Role("clerk", held(acl("a"), acl("b")), frozenset({ALICE}))}
    assert not CLERK.acls, "permissions of a role must not be listed as ACLs"
    changed, result = accept(
        CLERK, alter_roles(role(add=[acl("c")], remove=[acl("a")], grant=[BOB, "User:*"], revoke=[ALICE]))
    )
    assert changed.roles == {"clerk": Role("clerk", held(acl("b"), acl("c")), frozenset({BOB, "User:*"}))}
    assert result.offset == changed.offset
    gone, _ = accept(changed, alter_roles(role(action=DELETE)))
    assert gone.roles == {}


def test_a_role_that_is_made_again_belongs_to_no_earlier_holder() -> None:
    gone, _ = accept(CLERK, alter_roles(role(action=DELETE)))
    again, _ = accept(gone, alter_roles(role(action=CREATE)))
    assert again.roles == {"clerk": Role("clerk")}


def test_what_is_as_asked_already_changes_nothing() -> None:
    decision = decide(CLERK, alter_roles(role(add=[acl("a")], remove=[acl("z")], grant=[ALICE], revoke=[BOB])))
    assert decision.records == ()
    assert decision.outcome == CommandResult(CLERK.offset)
    assert decide(CLERK, alter_roles()).records == ()


def test_several_roles_change_together_or_not_at_all() -> None:
    both = alter_roles(role("x", CREATE), role(add=[acl("c")]))
    assert set(accept(CLERK, both)[0].roles) == {"x", "clerk"}
    error = refusal(CLERK, alter_roles(role("x", CREATE), role("y")))
    assert isinstance(error, ResourceNotFound)
    assert "there is no role 'y'; raftlog role list" in str(error)


def test_there_is_one_role_of_a_name() -> None:
    assert isinstance(refusal(CLERK, alter_roles(role(action=CREATE))), DuplicateResource)
    assert isinstance(refusal(CLERK, alter_roles(role("x", DELETE))), ResourceNotFound)
    assert "named twice" in str(refusal(CLERK, alter_roles(role(grant=[BOB]), role(revoke=[ALICE]))))


def of(principal: str) -> RoleAlteration:
    wire = role()
    wire.additions.append(acl(principal=principal).to_wire())
    return wire


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (role("", CREATE), "has 0 characters"),
        (role("*", CREATE), "it is *"),
        (role(" a", CREATE), "space around"),
        (role("a\nb", CREATE), "control character"),
        (role("x" * 256, CREATE), "has 256 characters"),
        (role(add=[acl(operation=WireAcl.ANY_OPERATION)]), "with TOPIC goes"),
        (role(add=[acl(host="here.example")]), "the host of an ACL"),
        (role(remove=[acl("")]), "has a name of 0 characters"),
        (role(grant=["alice"]), "a principal is User:NAME"),
        (role(grant=["Role:clerk"]), "a principal is User:NAME"),
        (role(revoke=[""]), "a principal is User:NAME"),
        (of(ALICE), "is Role: and its name, or empty, not 'User:alice'"),
        (of("Role:auditor"), "is Role: and its name, or empty, not 'Role:auditor'"),
        (role(add=[acl("c")], remove=[acl("c")]), "both adds and removes"),
        (role(grant=[BOB], revoke=[BOB]), "both adds and removes"),
        (role(action=DELETE, grant=[BOB]), "both deleted and changed"),
        (RoleAlteration(name="clerk", action=9), "action 9"),  # type: ignore[arg-type] # of a newer version
    ],
)
def test_a_role_has_to_be_one(wrong: RoleAlteration, words: str) -> None:
    error = refusal(CLERK, alter_roles(wrong))
    assert type(error) is InvalidRequestError
    assert words in str(error)
    assert len(str(error)) < 600


def test_no_acl_is_of_a_role() -> None:
    """A permission gets into a role by a change of that role alone."""
    assert "a principal is User:NAME" in str(refusal(CLERK, alter_acls([acl(principal="Role:clerk")])))


def test_hosts_are_kept_in_one_spelling() -> None:
    image, _ = accept(CLERK, alter_roles(role(add=[acl("c", host="::ffff:10.0.0.1"), acl("d", host="10.0.0.1/32")])))
    assert {each.host for each in image.roles["clerk"].permissions} == {"*", "10.0.0.1"}
    image, _ = accept(image, alter_roles(role(remove=[acl("c", host="10.0.0.1"), acl("d", host="10.0.0.1")])))
    assert image.roles == CLERK.roles


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(CLERK, alter_roles(role(add=[acl(f"t{n}") for n in range(1_000)])))
    assert "changes 1001 roles, permissions of roles and grants, at most 1000" in str(error)
    monkeypatch.setattr(security, "MAX_ACLS", 3)
    full, _ = accept(CLERK, alter_acls([acl("c")]))
    for more in (alter_roles(role(add=[acl("d")])), alter_acls([acl("d")])):
        assert "would have 4 ACLs" in str(refusal(full, more))
    accept(full, alter_roles(role(add=[acl("d")], remove=[acl("a")])))
    monkeypatch.setattr(security, "MAX_ACLS", 1)  # a controller that allowed more wrote these
    accept(full, alter_roles(role(remove=[acl("a")])))
    monkeypatch.setattr(security, "MAX_ROLES", 1)
    assert "would have 2 roles, at most 1" in str(refusal(CLERK, alter_roles(role("x", CREATE))))
    accept(CLERK, alter_roles(role("x", CREATE), role(action=DELETE)))
    monkeypatch.setattr(security, "MAX_GRANTS", 1)
    assert "would have 2 grants of roles" in str(refusal(CLERK, alter_roles(role(grant=[BOB]))))


def test_a_principal_has_so_many_roles_and_no_more() -> None:
    names = [f"r{number}" for number in range(security.MAX_ROLES_OF_PRINCIPAL)]
    full, _ = accept(EMPTY, alter_roles(*(role(name, CREATE, grant=[ALICE]) for name in names)))
    error = refusal(full, alter_roles(role("x", CREATE, grant=[BOB, ALICE])))
    assert "'User:alice' would have 33 roles, at most 32" in str(error)
    accept(full, alter_roles(role("x", CREATE, grant=[ALICE]), role("r0", revoke=[ALICE])))


def test_older_clusters_refuse_and_say_what_to_do() -> None:
    older = image_after(claim(), register(), update_feature("metadata.version", 7))
    error = refusal(older, alter_roles(role(action=CREATE)))
    assert isinstance(error, UnsupportedVersion)
    assert "a role needs metadata.version=8, the cluster is at 7" in str(error)


def test_a_snapshot_has_all_of_a_role_in_one_order() -> None:
    one = image_after(
        claim(newest=True),
        alter_roles(role("b", CREATE, add=[acl("y"), acl("x")], grant=[BOB, ALICE]), role("a", CREATE)),
    )
    other = image_after(
        claim(newest=True),
        alter_roles(role("a", CREATE), role("b", CREATE, add=[acl("x"), acl("y")], grant=[ALICE, BOB])),
    )
    written = [[each.SerializeToString(deterministic=True) for each in image.to_records()] for image in (one, other)]
    assert written[0] == written[1]
    assert image_from_records(one.to_records(), one.offset) == one


def test_a_large_role_is_written_in_several_records() -> None:
    many = Role("clerk", held(*(acl(f"t{n}") for n in range(2_500))), frozenset(f"User:u{n}" for n in range(1_200)))
    image = replace(EMPTY, roles={"clerk": many})
    records = [each.role for each in image.to_records() if each.HasField("role")]
    assert [(len(each.additions), len(each.grants)) for each in records] == [(1_000, 1_000), (1_000, 200), (500, 0)]
    assert ROLE_PARTS_PER_RECORD == 1_000
    assert image_from_records(image.to_records(), image.offset) == image


def test_what_a_change_does_not_touch_is_the_same_object() -> None:
    """Brokers tell by it whether decisions have to be made anew."""
    changed, _ = accept(CLERK, alter_acls([acl("a")]))
    assert changed.roles is CLERK.roles
    changed, _ = accept(CLERK, alter_roles(role("x", CREATE)))
    assert changed.acls is CLERK.acls
    assert changed.roles["clerk"] is CLERK.roles["clerk"]


# Decisions


def index(*acls: Acl, **roles: Role) -> AclIndex:
    return AclIndex(acls, roles)


def decided(by: AclIndex, who: str = ALICE, operation: WireAcl.Operation.ValueType = WireAcl.READ) -> Decision:
    return by.decide(who, HERE, operation, WireAcl.TOPIC, "orders")


def test_a_role_allows_its_holders_and_nobody_else() -> None:
    permission = held(acl("ord", pattern_type=PREFIXED))
    of_alice = index(clerk=Role("clerk", permission, frozenset({ALICE})))
    assert decided(of_alice) == Decision(True, *permission)
    assert decided(of_alice, BOB) == Decision(False, None)
    assert decided(of_alice, "Role:clerk").allowed is True, (
        "the principal Role:clerk itself must be allowed, as the index is asked only about users"
    )
    assert not decided(index(clerk=Role("clerk", permission))).allowed
    assert decided(index(clerk=Role("clerk", permission, frozenset({"User:*"}))), BOB).allowed


def test_a_denial_wins_wherever_it_stands() -> None:
    allow, deny = acl("orders"), acl("orders", permission=DENY)
    clerk = Role("clerk", held(allow), frozenset({ALICE}))
    barred = Role("barred", held(deny, by="barred"), frozenset({ALICE}))
    assert decided(index(allow, barred=barred)) == Decision(False, *barred.permissions)
    assert decided(index(deny, clerk=clerk)) == Decision(False, deny)
    assert not decided(index(clerk=clerk, barred=barred)).allowed
    assert decided(index(clerk=clerk, barred=replace(barred, principals=frozenset({BOB})))).allowed


def test_a_permission_of_a_role_closes_what_is_open_without_acls() -> None:
    """Even if no principal has the role: a resource that a role names is no longer open to everyone."""
    assert index(clerk=Role("clerk", held(acl("orders")))).has_acls(WireAcl.TOPIC, "orders")


_permissions = st.frozensets(
    st.builds(
        acl,
        st.sampled_from(["a", "ab", "*"]),
        st.sampled_from([WireAcl.READ, WireAcl.WRITE, WireAcl.ALL, WireAcl.DESCRIBE]),
        st.sampled_from([ALICE, BOB, "User:*"]),
        permission=st.sampled_from([WireAcl.ALLOW, WireAcl.ALLOW, DENY]),
        host=st.sampled_from(["*", "*", HERE, "10.0.0.2"]),
    ),
    max_size=5,
)
_holders = st.frozensets(st.sampled_from([ALICE, BOB, "User:*"]), max_size=2)
_roles = st.dictionaries(st.sampled_from(["x", "y", "z"]), st.tuples(_permissions, _holders), max_size=3).map(
    lambda drawn: {name: Role(name, held(*acls, by=name), who) for name, (acls, who) in drawn.items()}
)
_worlds = st.tuples(_permissions, _roles)


def spelled_out(acls: frozenset[Acl], roles: dict[str, Role]) -> set[Acl]:
    """Give every holder of a role its permissions as ACLs."""
    given_ = set(acls)
    for each in roles.values():
        given_ |= {replace(permission, principal=who) for permission in each.permissions for who in each.principals}
    return given_


@given(_worlds, st.lists(_worlds, max_size=3))
def test_a_role_is_the_same_as_its_permissions_given_to_each_holder(
    first: tuple[frozenset[Acl], dict[str, Role]], later: list[tuple[frozenset[Acl], dict[str, Role]]]
) -> None:
    """By Kafka's rules for ACLs as they are written; also of an index that has come from another one."""
    found = AclIndex(*first)
    for world in later:
        found = found.changed_to(*world)
    acls, roles = later[-1] if later else first
    plain = spelled_out(acls, roles)
    for who in (ALICE, BOB, "User:carol"):
        for operation in (WireAcl.READ, WireAcl.WRITE, WireAcl.DESCRIBE):
            asked = (who, HERE, operation, WireAcl.TOPIC)
            assert found.may_any(*asked) == plainly_any(plain, *asked)
            for name in ("a", "ab", "b"):
                assert found.decide(*asked, name).allowed == plain_decision(plain, *asked, name)
    whole = acls.union(*(each.permissions for each in roles.values()))
    assert found.has_acls(WireAcl.TOPIC, "ab") == any(each.resource_name in ("ab", "*") for each in whole)


def test_a_change_leaves_what_it_does_not_touch_as_it_is() -> None:
    roles = {f"r{n}": Role(f"r{n}", held(acl(f"t{n}"), by=f"r{n}"), frozenset({f"User:u{n}"})) for n in range(100)}
    before = AclIndex([acl("orders")], roles)
    assert before.changed_to(before._acls, roles) is before
    after = before.changed_to(before._acls, {**roles, "r0": Role("r0")})
    assert sum(after._held.get(who) is before._held[who] for who in before._held) == 100
    assert not after.decide("User:u0", HERE, WireAcl.READ, WireAcl.TOPIC, "t0").allowed
    assert after.decide("User:u1", HERE, WireAcl.READ, WireAcl.TOPIC, "t1").allowed
