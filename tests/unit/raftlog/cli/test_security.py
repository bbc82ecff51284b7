"""`raftlog user` and `raftlog acl` on a cluster in memory: effects, output and refusals."""

from __future__ import annotations

import getpass
import hashlib
import hmac
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from raftlog._core.security.acls import OPERATIONS
from raftlog.cli.security import acls
from raftlog.errors import UnknownOutcome
from raftlog.security import AclOperation, AclPermission, PatternType, ResourceType
from raftlog.v1.security_pb2 import SCRAM_SHA_256, SCRAM_SHA_512, ScramMechanism
from raftmeta.credentials import CredentialKey
from tests.support.admin_service import AdminServer
from tests.support.command_line import Run
from tests.support.metadata import create_topic

HASHES = {SCRAM_SHA_256: "sha256", SCRAM_SHA_512: "sha512"}


def logs_in(server: AdminServer, user: str, password: str, mechanism: ScramMechanism.ValueType = SCRAM_SHA_512) -> bool:
    """Whether a user is there whose password it is, by RFC 5802, section 3: StoredKey is H(ClientKey)."""
    kept = server.image.credentials.get(CredentialKey(user, mechanism))
    if kept is None:
        return False
    hash_ = HASHES[mechanism]
    salted = hashlib.pbkdf2_hmac(hash_, password.encode(), kept.salt, kept.iterations)
    return hashlib.new(hash_, hmac.digest(salted, b"Client Key", hash_)).digest() == kept.stored_key


def typing(monkeypatch: pytest.MonkeyPatch, *answers: str | type[BaseException]) -> list[str]:
    """Type passwords at the prompts; return the prompts."""
    asked: list[str] = []
    left = list(answers)

    def ask(prompt: str, stream: object = None) -> str:
        asked.append(prompt)
        answer = left.pop(0)
        if isinstance(answer, str):
            return answer
        raise answer

    monkeypatch.setattr(getpass, "getpass", ask)
    return asked


def test_create_from_standard_input(server: AdminServer, run: Run) -> None:
    ran = run("user", "create", "orders", stdin="s3cret\n")
    assert (ran.code, ran.out, ran.err) == (0, "user orders created\n", "")
    assert logs_in(server, "orders", "s3cret")
    assert not logs_in(server, "orders", "s3cret\n")
    assert run("user", "list").table == [{"user": "orders", "mechanism": "SCRAM-SHA-512", "iterations": "8192"}]


def test_create_from_a_file_with_everything_said(server: AdminServer, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes("päss wörd\r\n".encode())
    options = ("--mechanism", "scram-sha-256", "--iterations", "4096", "--password-file", str(file))
    ran = run("user", "create", "a", *options, "-o", "json")
    assert ran.json == {"user": "a", "created": True, "mechanism": "SCRAM-SHA-256", "iterations": 4096}
    assert logs_in(server, "a", "päss wörd", SCRAM_SHA_256)


def test_a_password_is_typed_twice(server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = typing(monkeypatch, "s3cret", "s3cret")
    assert run("user", "create", "orders", terminal="").code == 0
    assert asked == ["password of orders: ", "repeat the password: "]
    assert logs_in(server, "orders", "s3cret")


@pytest.mark.parametrize(
    ("typed", "code", "why"),
    [
        (("",), 2, "the password is empty"),
        (("s3cret", "secr3t"), 2, "the passwords differ"),
        (("s3cret", EOFError), 2, "no password was typed"),
        (("s3cret", KeyboardInterrupt), 130, ""),
    ],
)
def test_a_password_that_is_not_typed_well_changes_nothing(
    server: AdminServer,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    typed: Sequence[str | type[BaseException]],
    code: int,
    why: str,
) -> None:
    typing(monkeypatch, *typed)
    ran = run("user", "create", "orders", terminal="")
    assert ran.code == code
    assert why in ran.err
    assert not [word for word in typed if isinstance(word, str) and word and word in ran.err]
    assert not server.image.credentials


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"s3cret\nmore\n", "has several lines"),
        (b"\xff", "is not UTF-8"),
        (b"x" * 5_000, "more than 4,096 characters"),
    ],
)
def test_a_file_without_a_password_is_refused_and_not_shown(
    server: AdminServer, run: Run, tmp_path: Path, text: bytes, why: str
) -> None:
    file = tmp_path / "password"
    file.write_bytes(text)
    ran = run("user", "create", "orders", "--password-file", str(file))
    assert ran.code == 2
    assert why in ran.err
    assert "s3cret" not in ran.err
    assert not server.image.credentials


def test_a_file_that_is_not_there(run: Run) -> None:
    ran = run("user", "create", "orders", "--password-file", "/nowhere/password")
    assert (ran.code, ran.err) == (
        1,
        "error: there is no /nowhere/password; check the path, and that its directory exists\n",
    )


def test_an_empty_standard_input_is_no_password(server: AdminServer, run: Run) -> None:
    ran = run("user", "create", "orders", stdin="\n")
    assert ran.code == 2
    assert "standard input is empty" in ran.err
    assert not server.image.credentials


def test_create_one_who_is_there(server: AdminServer, run: Run) -> None:
    run("user", "create", "orders", stdin="first")
    ran = run("user", "create", "orders", stdin="second")
    assert ran.code == 1
    assert "raftlog user passwd" in ran.err
    ran = run("user", "create", "orders", "--if-not-exists", "-o", "json", stdin="second")
    assert (ran.code, ran.json) == (0, {"user": "orders", "created": False})
    assert logs_in(server, "orders", "first")


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("User:orders",), 2, "write the name alone, 'orders'"),
        (("orders", "--iterations", "4095"), 2, "4096"),
        (("orders", "--mechanism", "PLAIN"), 2, "scram-sha-256"),
        (("ANONYMOUS",), 1, "reserved"),
    ],
)
def test_create_what_cannot_be(run: Run, arguments: Sequence[str], code: int, why: str) -> None:
    ran = run("user", "create", *arguments, stdin="x")
    assert ran.code == code
    assert why in ran.err


def test_passwd_changes_every_mechanism_and_keeps_iterations(server: AdminServer, run: Run) -> None:
    run("user", "create", "a", "--iterations", "5000", stdin="old")
    assert run("user", "passwd", "a", "--mechanism", "SCRAM-SHA-256", stdin="old").code == 0
    ran = run("user", "passwd", "a", stdin="new")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "password of user a changed for SCRAM-SHA-256 and SCRAM-SHA-512\n"
    for mechanism in HASHES:
        assert logs_in(server, "a", "new", mechanism)
        assert not logs_in(server, "a", "old", mechanism)
    assert [row["iterations"] for row in run("user", "list", "a", "-o", "json").json] == [8192, 5000]


def test_passwd_of_one_mechanism_says_that_the_other_still_has_the_old_one(server: AdminServer, run: Run) -> None:
    run("user", "create", "a", stdin="old")
    ran = run("user", "passwd", "a", "--mechanism", "SCRAM-SHA-256", stdin="new")
    assert "the old password is still valid for SCRAM-SHA-512" in ran.err
    assert logs_in(server, "a", "old", SCRAM_SHA_512)
    assert logs_in(server, "a", "new", SCRAM_SHA_256)


def test_passwd_and_delete_of_nobody(run: Run) -> None:
    for command in ("passwd", "delete"):
        ran = run("user", command, "nobody", stdin="x")
        assert ran.code == 1
        assert "no user 'nobody'" in ran.err


def test_list_names_who_is_not_there(run: Run) -> None:
    assert run("user", "list", "-o", "json").json == []
    run("user", "create", "a", stdin="x")
    ran = run("user", "list", "a", "nobody")
    assert ran.code == 1
    assert "'nobody'" in ran.err


def test_delete_tells_of_permissions_that_are_left(server: AdminServer, run: Run) -> None:
    run("user", "create", "a", stdin="x")
    run("acl", "add", "--allow-principal", "User:a", "--operation", "Read", "--topic", "t")
    run("acl", "add", "--allow-principal", "User:ab", "--operation", "Read", "--topic", "t")
    ran = run("user", "delete", "a", "--force")
    assert (ran.code, ran.out) == (0, "user a deleted\n")
    assert "1 permission of User:a left" in ran.err
    assert not server.image.credentials
    command = ran.err.strip().rpartition("raftlog ")[2].split()
    assert run(*command, "--force").out == "removed: User:a may Read topic t\n"
    assert len(server.image.acls) == 1


def test_delete_asks_unless_it_is_forced(server: AdminServer, run: Run) -> None:
    run("user", "create", "a", stdin="x")
    ran = run("user", "delete", "a", terminal="n\n")
    assert (ran.code, ran.out) == (1, "")
    assert "delete user a? its clients are logged out at once [y/N]: " in ran.err
    assert ran.err.endswith("not deleted\n")
    ran = run("user", "delete", "a")
    assert ran.code == 2
    assert "--yes" in ran.err
    assert server.image.credentials
    ran = run("user", "delete", "a", terminal="y\n")
    assert (ran.code, ran.out) == (0, "user a deleted\n")
    assert not server.image.credentials


def test_delete_one_mechanism(server: AdminServer, run: Run) -> None:
    run("user", "create", "a", stdin="x")
    run("user", "passwd", "a", "--mechanism", "SCRAM-SHA-256", stdin="x")
    ran = run("user", "delete", "a", "--mechanism", "SCRAM-SHA-512", "--force", "-o", "json")
    assert ran.json == {"user": "a", "deleted": True, "mechanism": "SCRAM-SHA-512"}
    assert list(server.image.credentials) == [CredentialKey("a", SCRAM_SHA_256)]


def test_no_password_gets_into_what_is_said(server: AdminServer, run: Run) -> None:
    server.cluster.metadata.refuse_with.append(UnknownOutcome("it may have happened"))
    ran = run("user", "create", "a", stdin="s3cret")
    assert "s3cret" not in ran.out + ran.err


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
        ((*ADA, "--topic", "t", "--operation", "Any"), "write one of All, Read, Write"),
        (
            (*ADA, "--topic", "t", "--operation", "IdempotentWrite"),
            "a topic has no operation IdempotentWrite; it has All, Read",
        ),
        ((*ADA, "--topic", "t", "--group", "g", "--operation", "Write"), "a group has no operation Write"),
        ((*ADA, "--topic", ""), "it has 0 characters"),
        ((*ADA, "--topic", "*", *PREFIXED), "write a prefix without it"),
        ((*ADA, "--topic", "t", *MATCH), "match"),
        ((*ADA, "--topic", "t", "--allow-host", "example.org"), "write an IP address"),
        ((*ADA, "--topic", "t", "--deny-host", "1.2.3.4"), "--deny-host needs --deny-principal"),
        ((*ADA, "--topic", "t", "--idempotent"), "--idempotent needs --producer"),
        ((*ADA, "--producer"), "--producer needs a --topic"),
        ((*ADA, "--producer", "--topic", "t", "--operation", "Write"), "leave --operation"),
        ((*ADA, "--producer", "--topic", "t", "--deny-principal", "User:b"), "--deny-... out"),
        ((*ADA, "--producer", "--topic", "t", "--group", "g"), "--group needs --consumer"),
        ((*ADA, "--consumer", "--topic", "t"), "--consumer needs a --group"),
        ((*ADA, "--consumer", "--topic", "t", "--group", "g", "--cluster"), "leave --cluster out"),
        ((*ADA, "--consumer", "--topic", "t", "--group", "g", "--transactional-id", "x"), "needs --producer"),
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
    assert add(run, *ADA, *twice) == ("added: User:ada may Write topic t\nexists already: User:ada may Read topic t\n")
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
    named = "to remove: User:ada may Read topic orders\nto remove: User:ada may Write topic orders\n"
    shown = f"{named}remove 2 permissions? [y/N]: "
    ran = run("acl", "remove", *ADA, "--topic", "orders", terminal="n\n")
    assert (ran.code, ran.out, ran.err) == (1, "", f"{shown}not removed\n")
    ran = run("acl", "remove", *ADA, "--topic", "orders", terminal="")  # Ctrl-C
    assert (ran.code, ran.err) == (130, f"{shown}\nnot removed\n")
    ran = run("acl", "remove", *ADA, "--topic", "orders")
    assert ran.code == 2
    assert "pass --yes" in ran.err
    assert there(server) == before
    ran = run("acl", "remove", *ADA, "--topic", "orders", "-o", "json", terminal="y\n")
    assert (ran.code, ran.err) == (0, shown)
    assert [each["operation"] for each in ran.json["removed"]] == ["Read", "Write"]
    assert len(there(server)) == len(before) - 2


def test_remove_what_is_not_there_asks_nobody(run: Run) -> None:
    ran = run("acl", "remove", "--topic", "t")
    assert (ran.code, ran.out) == (0, "nothing to do: no permission matches\n")
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
    for kind, operations in acls.OPERATIONS.items():
        assert {AclOperation.ALL, *operations} == set(OPERATIONS[kind.value])  # type: ignore[index] # equal numbers
    assert {kind.value for kind in acls.OPERATIONS} == set(OPERATIONS)


def test_every_word_is_understood() -> None:
    for operation in AclOperation:
        if operation is not AclOperation.ANY:
            assert acls.operation(acls.word(operation)) is operation
    for kind in (ResourceType, PatternType, AclPermission):
        for value in kind:
            assert acls.parse(kind, acls.word(value), kind) is value
