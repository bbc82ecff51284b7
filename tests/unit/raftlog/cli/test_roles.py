"""`raftlog role` on a cluster in memory, and what other commands show of roles."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from raftlog._core.security.acls import Role
from raftmeta.features import ROLES_LEVEL
from tests.support.admin_service import AdminServer
from tests.support.command_line import Run
from tests.support.metadata import update_feature


def done(run: Run, *arguments: str) -> str:
    ran = run("role", *arguments)
    assert (ran.code, ran.err) == (0, "")
    return ran.out


@pytest.fixture
def clerk(server: AdminServer, run: Run) -> Role:
    """A role with three permissions, that ada has."""
    server.propose(update_feature("metadata.version", ROLES_LEVEL))
    assert done(run, "create", "clerk") == "role clerk created\n"
    assert done(run, "add", "clerk", "--consumer", "--topic", "orders", "--group", "billing") == (
        "added: Role:clerk may Read topic orders\n"
        "added: Role:clerk may Describe topic orders\n"
        "added: Role:clerk may Read group billing\n"
    )
    assert done(run, "grant", "clerk", "--principal", "User:ada") == "role clerk granted to User:ada\n"
    return server.image.roles["clerk"]


def test_a_role_is_made_and_described(clerk: Role, run: Run) -> None:
    assert {str(each) for each in clerk.permissions} == {
        "ALLOW Role:clerk READ TOPIC LITERAL 'orders' from *",
        "ALLOW Role:clerk DESCRIBE TOPIC LITERAL 'orders' from *",
        "ALLOW Role:clerk READ GROUP LITERAL 'billing' from *",
    }
    assert clerk.principals == {"User:ada"}
    assert done(run, "describe", "clerk") == (
        "Role:clerk may Read topic orders\n"
        "Role:clerk may Describe topic orders\n"
        "Role:clerk may Read group billing\n"
        "granted to: User:ada\n"
    )
    described = run("role", "describe", "clerk", "-o", "json").json
    assert described["principals"] == ["User:ada"]
    assert [each["operation"] for each in described["permissions"]] == ["Read", "Describe", "Read"]
    assert run("role", "list").table == [{"role": "clerk", "permissions": "3", "principals": "1"}]
    assert run("role", "list", "--principal", "User:bob").table == []


def test_a_denial_with_a_host(clerk: Role, server: AdminServer, run: Run) -> None:
    options = ("clerk", "--deny", "--host", "10.0.0.0/8", "--operation", "Delete", "--topic", "ord")
    prefixed = ("--resource-pattern-type", "prefixed")
    done(run, "add", *options, *prefixed)
    (denial,) = server.image.roles["clerk"].permissions - clerk.permissions
    assert str(denial) == "DENY Role:clerk DELETE TOPIC PREFIXED 'ord' from 10.0.0.0/8"
    assert "not there: " in done(run, "remove", *options), "a permission with another pattern type must not be removed"
    assert "removed: " in done(run, "remove", *options, *prefixed)
    assert server.image.roles["clerk"] == clerk


def test_what_is_there_is_said_to_be(clerk: Role, run: Run) -> None:
    again = ("add", "clerk", "--operation", "Read", "--operation", "Write", "--topic", "orders")
    assert done(run, *again) == (
        "added: Role:clerk may Write topic orders\nexists already: Role:clerk may Read topic orders\n"
    )
    ran = run("role", *again, "-o", "json").json
    assert ran["added"] == []
    assert len(ran["unchanged"]) == 2


def test_a_role_is_revoked(clerk: Role, server: AdminServer, run: Run) -> None:
    done(run, "grant", "clerk", "--principal", "User:*", "--principal", "User:bob")
    assert server.image.roles["clerk"].principals == {"User:ada", "User:bob", "User:*"}
    ran = run("role", "revoke", "clerk", "--principal", "User:bob")
    assert (ran.out, ran.err) == (
        "role clerk revoked from User:bob\n",
        "User:bob: still has the role, which User:* has\n",
    )
    assert done(run, "revoke", "clerk", "--principal", "User:*") == "role clerk revoked from User:*\n"
    assert server.image.roles["clerk"] == clerk


def test_delete_asks(clerk: Role, server: AdminServer, run: Run) -> None:
    ran = run("role", "delete", "clerk", terminal="n\n")
    assert (ran.code, ran.err) == (1, "delete role clerk, which 1 principal may have now? [y/N]: not deleted\n")
    assert server.image.roles
    assert done(run, "delete", "clerk", "--yes") == "role clerk deleted\n"
    assert not server.image.roles


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("create", "clerk"), 1, "there is a role 'clerk' already"),
        (("delete", "x", "--yes"), 1, "there is no role 'x'"),
        (("delete", "x"), 1, "there is no role 'x'"),
        (("describe", "x"), 1, "no role 'x'"),
        (("add", "x", "--topic", "t"), 1, "there is no role 'x'"),
        (("add", "clerk"), 2, "name a resource"),
        (("add", "clerk", "--topic", "t", "--operation", "Raed"), 2, "did you mean Read?"),
        (("grant", "clerk", "--principal", "ada"), 2, "write User:NAME"),
        (("grant", "clerk"), 2, "--principal"),
    ],
)
@pytest.mark.usefixtures("clerk")
def test_what_cannot_be(run: Run, arguments: Sequence[str], code: int, why: str) -> None:
    ran = run("role", *arguments)
    assert ran.code == code
    assert why in ran.err


@pytest.mark.usefixtures("clerk")
def test_the_list_of_permissions_shows_those_of_roles(run: Run) -> None:
    """Who may do what with a resource, and what a user may do, without a look into each role."""
    assert run("acl", "add", "--allow-principal", "User:ada", "--operation", "Write", "--topic", "orders").code == 0

    def listed(*arguments: str) -> list[str]:
        return [f"{row['principal']} {row['operation']}" for row in run("acl", "list", *arguments).table]

    on_orders = ["User:ada Write", "Role:clerk Read", "Role:clerk Describe"]
    assert listed("--topic", "orders") == on_orders
    assert listed("--topic", "orders", "--resource-pattern-type", "match") == on_orders
    assert listed("--topic", "orders", "--resource-pattern-type", "prefixed") == []
    assert listed("--principal", "User:ada") == [*on_orders, "Role:clerk Read"]
    assert listed("--principal", "User:bob") == []
    assert listed("--group", "billing") == ["Role:clerk Read"]
    assert listed() == [*on_orders, "Role:clerk Read"]


@pytest.mark.usefixtures("clerk")
def test_a_deleted_user_leaves_its_roles_and_is_told_so(run: Run) -> None:
    assert run("user", "create", "ada", stdin="s3cret\n").code == 0
    ran = run("user", "delete", "ada", "--yes")
    assert "raftlog role revoke clerk --principal User:ada" in ran.err
