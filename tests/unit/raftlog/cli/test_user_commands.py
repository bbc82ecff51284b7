"""`raftlog user ...` on a cluster in memory: what it does, prints and refuses, and where passwords come from."""

from __future__ import annotations

import getpass
import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

import pytest

from raftlog.errors import UnknownOutcome
from raftlog.v1.security_pb2 import SCRAM_SHA_256, SCRAM_SHA_512, ScramMechanism
from raftmeta.credentials import CredentialKey
from tests.support.admin_service import AdminServer
from tests.support.command_line import Run

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
    """Have somebody type passwords; return what was asked."""
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
    assert asked == ["password of orders: ", "once more: "]
    assert logs_in(server, "orders", "s3cret")


@pytest.mark.parametrize(
    ("typed", "code", "why"),
    [
        (("",), 2, "the password is empty"),
        (("s3cret", "secr3t"), 2, "not the same twice"),
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
    assert ran.out == "user a has another password, for SCRAM-SHA-256 and SCRAM-SHA-512\n"
    for mechanism in HASHES:
        assert logs_in(server, "a", "new", mechanism)
        assert not logs_in(server, "a", "old", mechanism)
    assert [row["iterations"] for row in run("user", "list", "a", "-o", "json").json] == [8192, 5000]


def test_passwd_of_one_mechanism_says_that_the_other_still_has_the_old_one(server: AdminServer, run: Run) -> None:
    run("user", "create", "a", stdin="old")
    ran = run("user", "passwd", "a", "--mechanism", "SCRAM-SHA-256", stdin="new")
    assert "the old password still counts for SCRAM-SHA-512" in ran.err
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
    assert "1 permission of User:a is left" in ran.err
    assert not server.image.credentials
    command = ran.err.strip().rpartition("raftlog ")[2].split()
    assert run(*command, "--force").out == "removed: User:a may Read topic t\n"
    assert len(server.image.acls) == 1


def test_delete_asks_unless_it_is_forced(server: AdminServer, run: Run) -> None:
    run("user", "create", "a", stdin="x")
    ran = run("user", "delete", "a", terminal="n\n")
    assert (ran.code, ran.out) == (1, "")
    assert "delete user a? whoever is logged in is put out at once [y/N]: " in ran.err
    assert ran.err.endswith("not deleted\n")
    ran = run("user", "delete", "a")
    assert ran.code == 2
    assert "--force" in ran.err
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
