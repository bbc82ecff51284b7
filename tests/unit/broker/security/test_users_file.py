"""Users in a file or a directory: read, read again, and never shown."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from broker.config.checks import SCRAM_MECHANISMS
from broker.security.users import SALT_BYTES, UsersFile, administrator
from raftlog.errors import InvalidConfig
from raftlog.v1.security_pb2 import SCRAM_SHA_256, SCRAM_SHA_512
from tests.support.logged import records_of
from tests.support.scram_parts import Book

BOTH = (SCRAM_SHA_256, SCRAM_SHA_512)


def _write(path: Path, text: str) -> None:
    """Replace a file, as an editor does: what it was before is another file."""
    aside = path.with_name(".aside")
    aside.write_text(text)
    aside.replace(path)


def _file(path: Path) -> UsersFile:
    return UsersFile(str(path), SCRAM_MECHANISMS)


def test_a_file_has_a_line_for_each_user(tmp_path: Path) -> None:
    path = tmp_path / "users.toml"
    path.write_text('admin = "one"\n"a.b c" = "two"\n')
    users = _file(path)
    assert len(users) == 2
    for user in ("admin", "a.b c"):
        for mechanism in BOTH:
            found = users.find(user, mechanism)
            assert found is not None
            assert (found.user, found.mechanism, found.iterations) == (user, mechanism, 8_192)
            assert found.version < 0
    assert users.find("nobody", SCRAM_SHA_512) is None
    assert not users.look()


def test_a_change_that_cannot_be_read_at_once_is_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as while the process has no descriptor left: the file does not change again for it."""
    path = tmp_path / "users.toml"
    path.write_text('admin = "one"\n')
    users = _file(path)
    _write(path, 'admin = "two"\n')
    with monkeypatch.context() as patched:

        def refuse(path: Path) -> dict[str, str]:
            raise InvalidConfig("too many open files")

        patched.setattr("broker.security.users.read_passwords", refuse)
        assert not users.look()
    assert users.look()


def test_only_enabled_mechanisms_have_credentials(tmp_path: Path) -> None:
    path = tmp_path / "users.toml"
    path.write_text('admin = "one"\n')
    users = UsersFile(str(path), ("SCRAM-SHA-512",))
    assert users.find("admin", SCRAM_SHA_256) is None
    assert users.find("admin", SCRAM_SHA_512) is not None


def test_a_directory_has_a_file_for_each_user(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("one\n")
    (tmp_path / "bob").write_text("two")
    (tmp_path / "..data").mkdir()
    (tmp_path / ".hidden").write_text("not a user")
    users = _file(tmp_path)
    assert len(users) == 2
    before = users.find("bob", SCRAM_SHA_512)
    _write(tmp_path / "bob", "two\n")
    assert not users.look(), "the same password, written again, must not count as a change"
    _write(tmp_path / "bob", "three")
    assert users.look()
    assert users.find("bob", SCRAM_SHA_512) != before
    (tmp_path / "bob").unlink()
    assert users.look()
    assert users.find("bob", SCRAM_SHA_512) is None


def test_who_keeps_the_password_keeps_the_credential(tmp_path: Path) -> None:
    """Else every change of the file would end the streams of all users."""
    path = tmp_path / "users.toml"
    path.write_text('a = "one"\nb = "two"\n')
    users = _file(path)
    a, b = (users.find(user, SCRAM_SHA_512) for user in "ab")
    assert b is not None
    _write(path, 'a = "one"\nb = "three"\nc = "new"\n')
    assert users.look()
    assert users.find("a", SCRAM_SHA_512) == a
    changed = users.find("b", SCRAM_SHA_512)
    assert changed is not None
    assert changed.version != b.version
    _write(path, 'a = "one"\nb = "two"\n')
    assert users.look()
    again = users.find("b", SCRAM_SHA_512)
    assert again is not None
    assert again.version not in (b.version, changed.version), "tokens from before the change must not count any more"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('admin = "hunter2', "it is not TOML .at end of document"),
        ("admin = hunter2\n", "it is not TOML"),
        ("admin = 4711\n", "'admin' has no password in quotes"),
        ('a.b = "hunter2"\n', "a name with a dot needs quotes"),
        ('admin = ""\n', "user 'admin' has no password"),
        ('" admin" = "hunter2"\n', "' admin' is not a valid user name"),
        ('ANONYMOUS = "hunter2"\n', "'ANONYMOUS' is not a valid user name: that name is reserved"),
        ('admin = "hunter2\\u0007"\n', "the password of 'admin' has characters that are not allowed"),
        ("x" * (1 << 20) + "y", "more than 1048576 bytes"),
    ],
)
def test_what_is_no_good_is_told_and_no_password_is_shown(
    tmp_path: Path, text: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "users.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=words) as caught:
        _file(path)
    assert "hunter2" not in str(caught.value)
    _write(path, 'admin = "one"\n')
    users = _file(path)
    _write(path, text)
    with caplog.at_level(logging.ERROR):
        assert not users.look()
        os.utime(path, (1, 1))
        assert not users.look()
    assert len(records_of(caplog, "broker.security.users")) == 1, "the same problem must be logged once"
    assert "hunter2" not in caplog.text
    assert users.find("admin", SCRAM_SHA_512) is not None


def test_a_file_that_is_not_there_at_the_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"sasl.users.location='.*nowhere': it cannot be read: No such file"):
        _file(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_deleted_has_no_users(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """An operator that deletes it means to revoke the access of its users."""
    path = tmp_path / "users"
    where = tmp_path / "data" if kind == "link" else path
    if kind == "directory":
        path.mkdir()
        where = path / "admin"
        where.write_text("one")
    else:
        where.write_text('admin = "one"\n')
    if kind == "link":
        path.symlink_to(where)
    users = _file(path)
    before = users.find("admin", SCRAM_SHA_512)
    assert before is not None
    where.unlink()
    if kind == "directory":
        path.rmdir()
    assert users.look(), "streams of the deleted users must end"
    assert users.find("admin", SCRAM_SHA_512) is None
    assert len(users) == 0
    assert "was deleted, and so were its users" in caplog.text
    assert not users.look()
    assert len(records_of(caplog, "broker.security.users")) == 1, "the same problem must be logged once"
    if kind == "directory":
        path.mkdir()
    where.write_text("one" if kind == "directory" else 'admin = "one"\n')
    assert users.look()
    again = users.find("admin", SCRAM_SHA_512)
    assert again is not None
    assert again.version != before.version, "tokens from before the change must not count any more"


def test_what_is_wrong_first_and_deleted_then_has_no_users_either(tmp_path: Path) -> None:
    path = tmp_path / "users.toml"
    path.write_text('admin = "one"\n')
    users = _file(path)
    path.unlink()
    path.symlink_to(path)
    assert not users.look()
    assert users.find("admin", SCRAM_SHA_512) is not None, "the previous users must stay while the file cannot be read"
    path.unlink()
    assert users.look()
    assert users.find("admin", SCRAM_SHA_512) is None


def test_salts_are_like_no_others(tmp_path: Path) -> None:
    """So no attacker can compute verifiers in advance."""
    path = tmp_path / "users.toml"
    path.write_text('a = "one"\nb = "two"\n')
    users, elsewhere = _file(path), _file(path)
    _write(path, 'a = "one"\nb = "three"\n')
    found = [users.find(user, mechanism) for user in "ab" for mechanism in BOTH]
    assert users.look()
    changed = [users.find("b", mechanism) for mechanism in BOTH]
    others = [elsewhere.find(user, mechanism) for user in "ab" for mechanism in BOTH]
    salts = [each.salt for each in (*found, *changed, *others) if each is not None]
    assert {len(salt) for salt in salts} == {SALT_BYTES}
    assert len(set(salts)) == 10
    kept = users.find("a", SCRAM_SHA_512)
    assert kept is not None
    assert kept.salt in salts[:4], "the salt must stay as long as the password"


def test_the_metadata_wins_for_the_names_that_it_has(tmp_path: Path) -> None:
    path = tmp_path / "users.toml"
    path.write_text('admin = "one"\n')
    book = Book()
    book.users.file = _file(path)
    assert book.users.find("admin", SCRAM_SHA_512) is not None
    made = book.set("admin", "other", SCRAM_SHA_256)
    assert book.users.find("admin", SCRAM_SHA_256) == made
    assert book.users.find("admin", SCRAM_SHA_512) is None, (
        "a user in the metadata must hide the one in the file, also for mechanisms that only the file has"
    )
    book.delete("admin")
    assert book.users.find("admin", SCRAM_SHA_512) is not None


def test_unknown_names_look_like_the_users_of_the_file_too(tmp_path: Path) -> None:
    path = tmp_path / "users.toml"
    path.write_text('admin = "one"\n')
    book = Book()
    book.set("alice", "secret")
    book.users.file = _file(path)
    made = [book.users.imitation(f"name-{number}", SCRAM_SHA_512) for number in range(100)]
    assert {each.iterations for each in made} == {4_096, 8_192}
    assert {len(each.salt) for each in made} == {SALT_BYTES}
    path.unlink()
    assert book.users.file.look()
    assert {book.users.imitation(each.user, SCRAM_SHA_512).iterations for each in made} == {4_096}


def test_the_administrator_is_the_first_super_user(tmp_path: Path) -> None:
    path = tmp_path / "users.toml"
    path.write_text('bob = "one"\nroot = "two"\n')
    assert administrator(path, frozenset({"User:root"})) == {"sasl.username": "root", "sasl.password": "two"}
    assert administrator(path, frozenset()) == {"sasl.username": "bob", "sasl.password": "one"}
    assert administrator(path, frozenset({"User:carol"})) == {}
