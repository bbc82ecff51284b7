"""`raftlog acl ...` on a cluster in memory, with the options of kafka-acls: what they add, find and remove."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest

from raftlog.cli import acl_words
from raftlog.security import AclOperation, AclPermission, PatternType, ResourceType
from raftmeta.acls import OPERATIONS
from tests.support.admin_service import AdminServer
from tests.support.command_line import Run
from tests.support.metadata import create_topic


def there(server: AdminServer) -> set[str]:
    """Return all permissions as the state machine writes them."""
    return set(map(str, server.image.acls))


def add(run: Run, *arguments: str) -> str:
    ran = run("acl", "add", *arguments)
    assert ran.code == 0, ran.err
    return ran.out


ADA = ("--allow-principal", "User:ada")
READ, WRITE = ("--operation", "Read"), ("--operation", "Write")
MATCH, ANY = ("--resource-pattern-type", "match"), ("--resource-pattern-type", "any")
PREFIXED = ("--resource-pattern-type", "prefixed")


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        (("--operation", "Write", "--topic", "orders"), {"ALLOW User:ada WRITE TOPIC LITERAL 'orders' from *"}),
        (("--topic", "*"), {"ALLOW User:ada ALL TOPIC LITERAL '*' from *"}),
        (
            ("--operation", "read", "--operation", "DESCRIBE", "-t", "a", "-t", "b"),
            {
                f"ALLOW User:ada {operation} TOPIC LITERAL '{t}' from *"
                for operation in ("READ", "DESCRIBE")
                for t in "ab"
            },
        ),
        (
            ("--operation", "describe-configs", "--cluster"),
            {"ALLOW User:ada DESCRIBE_CONFIGS CLUSTER LITERAL 'raftlog-cluster' from *"},
        ),
        (
            ("--operation", "Read", "--group", "billing-", "--resource-pattern-type", "PREFIXED"),
            {"ALLOW User:ada READ GROUP PREFIXED 'billing-' from *"},
        ),
        (
            (
                "--operation",
                "Write",
                "--transactional-id",
                "tx",
                "--allow-host",
                "::ffff:10.0.0.1",
                "--allow-host",
                "::0",
            ),
            {
                "ALLOW User:ada WRITE TRANSACTIONAL_ID LITERAL 'tx' from 10.0.0.1",
                "ALLOW User:ada WRITE TRANSACTIONAL_ID LITERAL 'tx' from ::",
            },
        ),
        (
            ("--deny-principal", "User:*", "--deny-host", "10.0.0.9", "--operation", "All", "--topic", "orders"),
            {
                "ALLOW User:ada ALL TOPIC LITERAL 'orders' from *",
                "DENY User:* ALL TOPIC LITERAL 'orders' from 10.0.0.9",
            },
        ),
        (
            ("--producer", "--topic", "orders"),
            {f"ALLOW User:ada {each} TOPIC LITERAL 'orders' from *" for each in ("WRITE", "DESCRIBE", "CREATE")},
        ),
        (
            ("--producer", "--idempotent", "--topic", "o", "--transactional-id", "tx"),
            {
                *(f"ALLOW User:ada {each} TOPIC LITERAL 'o' from *" for each in ("WRITE", "DESCRIBE", "CREATE")),
                *(f"ALLOW User:ada {each} TRANSACTIONAL_ID LITERAL 'tx' from *" for each in ("WRITE", "DESCRIBE")),
                "ALLOW User:ada IDEMPOTENT_WRITE CLUSTER LITERAL 'raftlog-cluster' from *",
            },
        ),
        (
            ("--consumer", "--topic", "orders", "--group", "g"),
            {
                "ALLOW User:ada READ TOPIC LITERAL 'orders' from *",
                "ALLOW User:ada DESCRIBE TOPIC LITERAL 'orders' from *",
                "ALLOW User:ada READ GROUP LITERAL 'g' from *",
            },
        ),
        (
            ("--producer", "--consumer", "--topic", "o-", "--group", "o-", *PREFIXED),
            {
                *(
                    f"ALLOW User:ada {each} TOPIC PREFIXED 'o-' from *"
                    for each in ("WRITE", "READ", "DESCRIBE", "CREATE")
                ),
                "ALLOW User:ada READ GROUP PREFIXED 'o-' from *",
            },
        ),
    ],
)
def test_add_as_kafka_acls_does(server: AdminServer, run: Run, arguments: Sequence[str], added: Iterable[str]) -> None:
    add(run, *ADA, *arguments)
    assert there(server) == set(added)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--topic", "t"), "--allow-principal User:NAME or --deny-principal"),
        (ADA, "--topic, --group, --cluster or --transactional-id"),
        (("--allow-principal", "ada", "--topic", "t"), "'ada': write User:NAME"),
        (("--allow-principal", "User:", "--topic", "t"), "'User:': write User:NAME"),
        ((*ADA, "--topic", "t", "--operation", "Raed"), "did you mean Read?"),
        ((*ADA, "--topic", "t", "--operation", "Any"), "there are All, Read, Write"),
        ((*ADA, "--topic", "t", "--operation", "IdempotentWrite"), "a topic has no IdempotentWrite; it has All, Read"),
        ((*ADA, "--topic", "t", "--group", "g", "--operation", "Write"), "a group has no Write"),
        ((*ADA, "--topic", ""), "it has 0 characters"),
        ((*ADA, "--topic", "*", *PREFIXED), "a prefix is written without it"),
        ((*ADA, "--topic", "t", *MATCH), "match"),
        ((*ADA, "--topic", "t", "--allow-host", "example.org"), "write an IP address"),
        ((*ADA, "--topic", "t", "--deny-host", "1.2.3.4"), "--deny-host needs --deny-principal"),
        ((*ADA, "--topic", "t", "--idempotent"), "--idempotent goes with --producer"),
        ((*ADA, "--producer"), "--producer needs a --topic"),
        ((*ADA, "--producer", "--topic", "t", "--operation", "Write"), "leave --operation"),
        ((*ADA, "--producer", "--topic", "t", "--deny-principal", "User:b"), "--deny-... out"),
        ((*ADA, "--producer", "--topic", "t", "--group", "g"), "--group goes with --consumer"),
        ((*ADA, "--consumer", "--topic", "t"), "--consumer needs a --group"),
        ((*ADA, "--consumer", "--topic", "t", "--group", "g", "--cluster"), "leave --cluster out"),
        ((*ADA, "--consumer", "--topic", "t", "--group", "g", "--transactional-id", "x"), "goes with --producer"),
    ],
)
def test_add_what_cannot_be(server: AdminServer, run: Run, arguments: Sequence[str], why: str) -> None:
    ran = run("acl", "add", *arguments)
    assert ran.code == 2
    assert why in ran.err
    assert not there(server)


def test_add_says_what_was_there_already(run: Run) -> None:
    assert add(run, *ADA, "--operation", "Read", "--topic", "t") == "added: User:ada may Read topic t\n"
    twice = ("--operation", "Write", "--operation", "Read", "--topic", "t")
    assert add(run, *ADA, *twice) == (
        "added: User:ada may Write topic t\nwas there already: User:ada may Read topic t\n"
    )
    done = run("acl", "add", *ADA, "--topic", "t", "--operation", "Read", "--operation", "Delete", "-o", "json").json
    assert [each["operation"] for each in done["added"]] == ["Delete"]
    assert [each["operation"] for each in done["unchanged"]] == ["Read"]


@pytest.fixture
def several(run: Run) -> None:
    add(run, *ADA, "--operation", "Read", "--operation", "Write", "--topic", "orders")
    add(run, *ADA, "--operation", "Read", "--topic", "ord", *PREFIXED)
    add(run, "--allow-principal", "User:bob", "--operation", "Read", "--topic", "*")
    add(run, "--deny-principal", "User:bob", "--deny-host", "10.0.0.1", "--operation", "Read", "--topic", "orders")
    add(run, *ADA, "--operation", "Read", "--group", "g")


def listed(run: Run, *arguments: str) -> list[str]:
    rows = run("acl", "list", *arguments).table
    return [
        f"{row['principal'][5:]} {row['permission']} {row['operation']} {row['resource_type']} "
        f"{row['pattern_type']} {row['resource_name']} {row['host']}"
        for row in rows
    ]


WRITE_ORDERS = "ada allow Write topic literal orders *"
READ_ORDERS = "ada allow Read topic literal orders *"
DENY_ORDERS = "bob deny Read topic literal orders 10.0.0.1"
READ_ORD = "ada allow Read topic prefixed ord *"
READ_ALL = "bob allow Read topic literal * *"
READ_GROUP = "ada allow Read group literal g *"
EVERYTHING = [READ_ALL, READ_ORD, READ_ORDERS, WRITE_ORDERS, DENY_ORDERS, READ_GROUP]


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), EVERYTHING),
        (("--principal", "User:bob"), [READ_ALL, DENY_ORDERS]),
        (("--principal", "User:bob", "--topic", "orders"), [DENY_ORDERS]),
        (("--topic", "orders"), [READ_ORDERS, WRITE_ORDERS, DENY_ORDERS]),
        (
            ("--topic", "orders", *MATCH),
            [READ_ALL, READ_ORD, READ_ORDERS, WRITE_ORDERS, DENY_ORDERS],
        ),
        (("--topic", "ord", *PREFIXED), [READ_ORD]),
        (("--topic", "ord", *ANY, "--group", "g"), [READ_ORD, READ_GROUP]),
        (("--cluster",), []),
    ],
)
def test_list(run: Run, arguments: Sequence[str], found: Sequence[str]) -> None:
    assert listed(run, *arguments) == list(found)


@pytest.mark.usefixtures("several")
def test_list_in_json_has_the_same(run: Run) -> None:
    ran = run("acl", "list", "--group", "g", "-o", "json")
    assert ran.json == [
        {
            "principal": "User:ada",
            "permission": "allow",
            "operation": "Read",
            "resource_type": "group",
            "resource_name": "g",
            "pattern_type": "literal",
            "host": "*",
        }
    ]
    assert "--resource-pattern-type match" in ran.err


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize(
    ("arguments", "gone"),
    [
        ((*ADA, *WRITE, "--topic", "orders"), {WRITE_ORDERS}),
        ((*ADA, "--topic", "orders"), {READ_ORDERS, WRITE_ORDERS}),
        (ADA, {READ_ORD, READ_ORDERS, WRITE_ORDERS, READ_GROUP}),
        ((*ADA, *WRITE), {WRITE_ORDERS}),
        ((*ADA, "--allow-host", "10.0.0.1"), set()),
        (("--deny-principal", "User:bob"), {DENY_ORDERS}),
        (("--topic", "orders"), {READ_ORDERS, WRITE_ORDERS, DENY_ORDERS}),
        (("--topic", "orders", *MATCH, *READ), {READ_ALL, READ_ORD, READ_ORDERS, DENY_ORDERS}),
        ((*ADA, "--consumer", "--topic", "orders", "--group", "g"), {READ_ORDERS, READ_GROUP}),
    ],
)
def test_remove(run: Run, arguments: Sequence[str], gone: set[str]) -> None:
    assert run("acl", "remove", *arguments, "--force").code == 0
    assert set(listed(run)) == set(EVERYTHING) - gone


@pytest.mark.usefixtures("several")
def test_remove_shows_what_goes_and_asks(server: AdminServer, run: Run) -> None:
    before = there(server)
    shown = "goes: User:ada may Read topic orders\ngoes: User:ada may Write topic orders\nremove 2 permissions? [y/N]: "
    ran = run("acl", "remove", *ADA, "--topic", "orders", terminal="n\n")
    assert (ran.code, ran.out, ran.err) == (1, "", f"{shown}not removed\n")
    ran = run("acl", "remove", *ADA, "--topic", "orders", terminal="")  # Ctrl-C
    assert (ran.code, ran.err) == (130, f"{shown}\nnot removed\n")
    ran = run("acl", "remove", *ADA, "--topic", "orders")
    assert ran.code == 2
    assert "pass --force" in ran.err
    assert there(server) == before
    ran = run("acl", "remove", *ADA, "--topic", "orders", "-o", "json", terminal="y\n")
    assert (ran.code, ran.err) == (0, shown)
    assert [each["operation"] for each in ran.json["removed"]] == ["Read", "Write"]
    assert len(there(server)) == len(before) - 2


def test_remove_what_is_not_there_asks_nobody(run: Run) -> None:
    ran = run("acl", "remove", "--topic", "t")
    assert (ran.code, ran.out) == (0, "nothing to do: there is no such permission\n")
    assert run("acl", "remove", "--topic", "t", "--force", "-o", "json").json == {"removed": []}


def test_remove_wants_to_know_which(run: Run) -> None:
    for arguments in ((), ("--operation", "Read"), ("--idempotent",)):
        assert run("acl", "remove", "--force", *arguments).code == 2
    assert "--cluster or --transactional-id; try" in run("acl", "remove").err


def test_the_command_that_a_refusal_names(server: AdminServer, run: Run) -> None:
    add(run, "--allow-principal", "User:alice", "--operation", "Write", "--topic", "orders")
    assert there(server) == {"ALLOW User:alice WRITE TOPIC LITERAL 'orders' from *"}


@pytest.fixture
def without() -> Iterator[AdminServer]:
    """A broker without an authorizer."""
    with AdminServer(authorizer=False) as server:
        server.propose(create_topic("a", 1))
        yield server


def test_without_an_authorizer(without: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (("list",), ("add", *ADA, "--topic", "t"), ("remove", "--topic", "t", "--force")):
        ran = run("acl", *arguments, "--bootstrap", without.bootstrap)
        assert ran.code == 1
        assert "authorizer = acl" in ran.err


def test_operations_are_those_that_the_cluster_takes() -> None:
    for kind, operations in acl_words.OPERATIONS.items():
        assert {AclOperation.ALL, *operations} == set(OPERATIONS[kind.value])  # type: ignore[index] # equal numbers
    assert {kind.value for kind in acl_words.OPERATIONS} == set(OPERATIONS)


def test_every_word_is_understood() -> None:
    for operation in AclOperation:
        if operation is not AclOperation.ANY:
            assert acl_words.operation(acl_words.word(operation)) is operation
    for kind in (ResourceType, PatternType, AclPermission):
        for value in kind:
            assert acl_words.parse(kind, acl_words.word(value), kind) is value
